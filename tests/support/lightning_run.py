"""One small training with Lightning, all of whose numbers go into a journal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.callbacks import Callback, EarlyStopping, EMAWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from pccheck_async import Group, MemoryTier, ResumableLoader, StorageOptions
from pccheck_async.integrations.lightning import PCcheckCallback
from tests.support.killed_training import Journal
from tests.support.ranks import meet

__all__ = [
    "Counting", "Finetuned", "Iterating", "Model", "Ranks", "Reloading", "Samples", "StopAt", "Unsized", "Worsening",
    "make_trainer", "train", "train_rank",
]  # fmt: skip

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Samples(Dataset[Any]):
    """Numbers by index, with noise where ``random``."""

    def __init__(self, size: int, *, random: bool) -> None:
        self.inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))
        self.random = random

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.inputs[index] + (torch.randn(4) / 10 if self.random else 0.0)


class Unsized(IterableDataset[Any]):
    """As many samples, in an order that it draws when it is iterated over."""

    def __init__(self, size: int) -> None:
        self.samples = Samples(size, random=False)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in torch.randperm(len(self.samples)).tolist():
            yield self.samples[index]


class EpochSampler(RandomSampler):
    """An order that is a function of the epoch, as DistributedSampler's is."""

    def set_epoch(self, epoch: int) -> None:
        self.generator = torch.Generator().manual_seed(epoch)


class Model(pl.LightningModule):
    """Dropout, BatchNorm, a scheduler of each kind, and hooks of its own that change what is saved."""

    def __init__(self, journal: Journal | None = None, width: int = 8) -> None:
        super().__init__()
        self.journal = journal
        self.net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 1))
        self.counted = 0

    def _note(self, key: str, value: Any) -> None:
        if self.journal is not None and not self.trainer.sanity_checking:
            self.journal.note(key, value)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        self.log("mean", loss, on_step=False, on_epoch=True, sync_dist=True)
        self._note(f"train {self.trainer.fit_loop.total_batch_idx}", loss)
        return loss  # type: ignore[no-any-return]

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        loss = self.net(batch).square().mean() + torch.rand(())
        self.log("validation", loss, sync_dist=True)
        self._note(f"validation {self.trainer.fit_loop.total_batch_idx} {index}", loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95), "interval": "step"},
            {"scheduler": plateau, "monitor": "validation", "interval": "epoch"},
        ]

    def on_train_batch_end(self, *_: Any) -> None:
        self.counted += int(torch.randint(10, ()))

    def on_train_epoch_end(self) -> None:
        self._note(f"mean {self.trainer.current_epoch}", self.trainer.callback_metrics.get("mean"))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counted"] = self.counted

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.counted = checkpoint["counted"]


class Counting(pl.LightningModule):
    """Notes the steps that it was trained at."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.net = nn.Linear(4, width)
        self.trained: list[int] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.trained.append(self.trainer.global_step)
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Worsening(Counting):
    """Its metric grows with the steps."""

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.log("metric", float(self.trainer.global_step))


class Reloading(pl.LightningModule):
    """Makes its own loaders, and notes what they gave: batch sums of training and validation, by step."""

    def __init__(self, loader: Callable[[int], Any], die_at: int = -1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.2))
        self.loader = loader
        self.die_at = die_at
        self.seen: dict[str, Any] = {}

    def train_dataloader(self) -> Any:
        return self.loader(self.trainer.current_epoch)

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(3 + self.trainer.current_epoch, random=False), 4)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        parts = [torch.zeros(1, 4) if part is None else part for part in tree_leaves(batch)]
        loss = self.net(torch.cat(parts)).square().mean()
        sums = torch.stack([part.sum() for part in parts]).tolist()
        self.seen[f"train {self.trainer.global_step}"] = [*sums, float(loss.detach())]
        if self.trainer.global_step == self.die_at:
            raise ZeroDivisionError
        return loss  # type: ignore[no-any-return]

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        if not self.trainer.sanity_checking:
            self.seen[f"validation {self.trainer.global_step} {index}"] = float(batch.sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Iterating(Reloading):
    """Fetches its batches itself."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> torch.Tensor:  # type: ignore[override]
        batch, index, _ = next(dataloader_iter)
        return super().training_step(batch, index)


class Finetuned(Reloading):
    """Has a backbone for ``BackboneFinetuning``, which is no part of its optimizer at first, or is, frozen."""

    def __init__(self, loader: Callable[[int], Any], die_at: int = -1, *, whole: bool = False) -> None:
        super().__init__(loader, die_at)
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.net = nn.Sequential(self.backbone, nn.Dropout(0.2), nn.Linear(4, 3))
        self.whole = whole

    def configure_optimizers(self) -> Any:
        trained = self.parameters() if self.whole else self.net[2].parameters()
        return torch.optim.AdamW(trained, 1e-2)


class ShardedModel(Model):
    """The same under FSDP2."""

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        fully_shard(self.net, mesh=mesh["data_parallel"])


class Ranks(ClusterEnvironment):
    """Processes that are there already."""

    main_address, main_port, creates_processes_externally = "localhost", 0, True

    def __init__(self, rank: int, world: int = 2) -> None:
        self._rank, self._world = rank, world

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return self._world

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0


class StopAt(Callback):
    """Tells the training to stop after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop |= trainer.global_step == self.step


class Moments(Callback):
    """Reaches what happens around epochs, and what happens in a save."""

    def __init__(self, journal: Journal, saver: PCcheckCallback) -> None:
        self.journal, self.saver = journal, saver

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        if self.saver.engine is not None:
            self.saver.engine.on_event(lambda event: self.journal.reach(f"{event.name} {getattr(event, 'step', '')}"))

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        self.journal.reach(f"epoch starts {trainer.current_epoch}")

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.journal.reach(f"epoch ends {trainer.current_epoch - 1}")


def make_trainer(folder: Path, *callbacks: Callback, **options: Any) -> Any:
    """Return a quiet Trainer."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, "max_epochs": 3, "default_root_dir": folder,
    }  # fmt: skip
    return pl.Trainer(**quiet | options, callbacks=[*callbacks])


def loader_of(kind: str, workers: int) -> Any:
    samples = Samples(22, random=kind != "plain")
    if kind == "resumable":
        return ResumableLoader(samples, batch_size=4, seed=5, num_workers=workers)
    if kind == "shuffled":
        return DataLoader(
            samples, 4, shuffle=True, num_workers=workers, multiprocessing_context="fork" if workers else None
        )
    sampler = EpochSampler(samples, generator=torch.Generator().manual_seed(0))
    return DataLoader(
        samples, 4, sampler=sampler, num_workers=workers, multiprocessing_context="fork" if workers else None
    )


def train(
    folder: Path,
    kind: str = "resumable",
    workers: int = 0,
    *,
    model: type[Model] = Model,
    in_flight: int = 2,
    interval: int = 1,
    memory: MemoryTier | None = None,
    **options: Any,
) -> Callable[[Journal], None]:
    """Return what trains three epochs of six batches in windows of four, with two validations in each."""

    def work(journal: Journal) -> None:
        torch.manual_seed(0)
        saver = PCcheckCallback(
            folder,
            interval=interval,
            max_in_flight=in_flight,
            memory=memory,
            storage=StorageOptions(exit_timeout=1),  # for ranks that died
        )
        callbacks: list[Any] = [saver, EarlyStopping("validation", patience=100)]
        if model is Model:  # it shards nothing
            callbacks.append(EMAWeightAveraging(decay=0.9))
        trained = model(journal)
        trainer = make_trainer(
            folder, *callbacks, Moments(journal, saver),
            **{"accumulate_grad_batches": 4, "val_check_interval": 0.5, "precision": "bf16-mixed"} | options,
        )  # fmt: skip
        trainer.fit(trained, loader_of(kind, workers), DataLoader(Samples(8, random=False), 4))
        parts = [trainer.optimizers[0], *(config.scheduler for config in trainer.lr_scheduler_configs)]
        final = [trained.state_dict(), [part.state_dict() for part in parts], trained.counted]
        journal.note("end", tree_map_only(DTensor, DTensor.to_local, final))
        journal.note("end of random numbers", torch.get_rng_state())

    return work


def train_rank(group: Group, place: Any, folder: Path, journal: Path, kind: str, die_at: str | None = None) -> None:
    """Train on one of two ranks with DDP or FSDP2. The ranks draw different numbers."""
    dist.init_process_group("gloo", store=meet(place), rank=group.rank, world_size=group.world_size)
    environment = Ranks(group.rank)
    options: dict[str, Any] = {"devices": 2, "num_sanity_val_steps": 0}
    if kind == "ddp":
        options["strategy"] = DDPStrategy(cluster_environment=environment, process_group_backend="gloo")
        model: type[Model] = Model
    else:
        options["strategy"] = ModelParallelStrategy(2, 1, process_group_backend="gloo")
        options |= {"plugins": [environment], "precision": "32-true"}
        model = ShardedModel
    train(folder, model=model, **options)(Journal(journal, die_at))
