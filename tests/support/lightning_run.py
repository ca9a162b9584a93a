"""One small training with Lightning, all of whose numbers go into a journal."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from pccheck_async import ResumableLoader
from pccheck_async.integrations.lightning import PCcheckCallback
from tests.support.killed_training import Journal

__all__ = ["Model", "Samples", "make_trainer", "train"]

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
        self._note(f"train {self.trainer.fit_loop.total_batch_idx}", loss)
        return loss  # type: ignore[no-any-return]

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        loss = self.net(batch).square().mean() + torch.rand(())
        self.log("validation", loss)
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

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counted"] = self.counted

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.counted = checkpoint["counted"]


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
    samples = Samples(22, random=kind == "resumable")
    if kind == "resumable":
        return ResumableLoader(samples, batch_size=4, seed=5, num_workers=workers)
    sampler = EpochSampler(samples, generator=torch.Generator())
    return DataLoader(
        samples, 4, sampler=sampler, num_workers=workers, multiprocessing_context="fork" if workers else None
    )


def train(folder: Path, kind: str = "resumable", workers: int = 0, **options: Any) -> Callable[[Journal], None]:
    """Return what trains three epochs of six batches in windows of four, with two validations in each."""

    def work(journal: Journal) -> None:
        torch.manual_seed(0)
        model = Model(journal)
        saver = PCcheckCallback(folder, interval=1)
        callbacks = [saver, EMAWeightAveraging(decay=0.9), EarlyStopping("validation", patience=100)]
        trainer = make_trainer(
            folder, *callbacks, Moments(journal, saver),
            **{"accumulate_grad_batches": 4, "val_check_interval": 0.5, "precision": "bf16-mixed"} | options,
        )  # fmt: skip
        trainer.fit(model, loader_of(kind, workers), DataLoader(Samples(8, random=False), 4))
        if trainer.global_step == 0:
            return
        parts = [trainer.optimizers[0], *(config.scheduler for config in trainer.lr_scheduler_configs)]
        journal.note("end", [model.state_dict(), [part.state_dict() for part in parts], model.counted])
        journal.note("end of random numbers", torch.get_rng_state())

    return work
