"""TorchTitan's components, trained as its trainer does, on our checkpoint manager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset

from pccheck_async import StateMismatchError, list_checkpoints
from tests.support.killed_ranks import RankJournal, on_ranks
from tests.support.killed_training import Life, agree, bits, live

pytest.importorskip("torchtitan")

from torchtitan.components import checkpointer
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

from pccheck_async.integrations.torchtitan import CheckpointManager

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:This process .* is multi-threaded",
        "ignore:FSDP2-wrapped",
        "ignore:.set_vital. is deprecated",  # torchdata
        "ignore:To get the last learning rate",  # TorchTitan's LRSchedulersContainer.load_state_dict
    ),
]

STEPS = 9
HOOKS = {"_load", "_save", "_wait_for_saving", "_maybe_wait_for_staging", "_close"}


class Tokens(IterableDataset[Tensor]):
    """An endless stream of one rank, at a position of its own."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self.position + self.rank)
            self.position += 1
            yield torch.randn(6, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class Job:
    """What TorchTitan's trainer builds, and its loop."""

    def __init__(self, folder: Path, manager: type[Any] = CheckpointManager, **settings: Any) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Dropout(0.3), nn.Linear(7, 3))
        mesh = init_device_mesh("cpu", (world,))
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        torch.manual_seed(50 + rank)  # dropout differs by rank
        parts = [self.model]
        group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.05})
        self.optimizers = OptimizersContainer.Config(param_groups=[group], implementation="for-loop").build(
            model_parts=parts
        )
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=STEPS
        )
        self.loader = ParallelAwareDataloader(Tokens(rank), rank, world, batch_size=4)
        self.step, self.seen = 0, 0
        settings = {"enable": True, "interval": 2, "keep_latest_k": 2, "last_save_model_only": False} | settings
        self.checkpointer = manager.Config(**settings).build(
            dataloader=self.loader,
            model_parts=parts,
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def train(self, journal: RankJournal | None = None, steps: int = STEPS) -> None:
        self.checkpointer.load(step=-1)
        batches = iter(self.loader)
        while self.step < steps:
            self.step += 1
            loss = self.model(next(batches)).square().mean()
            loss.backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            self.seen += 4
            if journal is not None:
                journal.note(f"train {self.step}", loss.detach())
            self.checkpointer.save(self.step, last_step=self.step == STEPS)

    def everything(self) -> dict[str, Any]:
        parts = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizers.state_dict(),
            "scheduler": self.schedulers.state_dict(),
            "own": self.state_dict(),
        }
        local = {
            f"{part}.{name}": value.to_local() if hasattr(value, "to_local") else value
            for part, values in parts.items()
            for name, value in values.items()
        }
        return local | {"rng": torch.get_rng_state()}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.seen = state_dict["step"], state_dict["seen"]


def run(folder: Path, journal: RankJournal) -> None:
    job = Job(folder)
    job.checkpointer.engine.on_event(lambda event: journal.reach(f"{event.name} {event.step}"))
    job.train(journal)
    job.checkpointer.close()
    journal.note("end", job.everything())


def lives_of(folder: Path, *moments: str | None) -> list[Life]:
    work = on_ranks(2, partial(run, folder))
    return [live(work, folder / f"journal-{number}", moment) for number, moment in enumerate(moments)]


def test_resumed_bit_by_bit(tmp_path: Path) -> None:
    """Two ranks of FSDP2 with dropout, BatchNorm of their own, and a data position of their own."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole, *_ = lives_of(tmp_path / "whole", None)
    lives = lives_of(tmp_path / "killed", "0 train 3", "1 captured 4", "0 train 8", None)
    agree(whole, lives)
    assert [info.step for info in list_checkpoints(tmp_path / "killed" / "checkpoint")] == [9, 8]


def alone(folder: Path, work: Callable[[RankJournal], object]) -> None:
    live(on_ranks(1, work), folder / "journal")


def test_goes_on_from_torchtitans_own_checkpoints(tmp_path: Path) -> None:
    def work(_: RankJournal) -> None:
        job = Job(tmp_path, checkpointer.CheckpointManager)
        job.train(steps=4)
        saved = everything(job)
        job = Job(tmp_path)
        job.train(steps=4)
        assert {name for name, _ in everything(job) ^ saved} == {"rng"}  # TorchTitan's own does not save it
        job.train(steps=6)
        saved = everything(job)
        job.checkpointer.close()
        job = Job(tmp_path)
        job.train(steps=6)
        assert everything(job) == saved
        job.checkpointer.close()

    alone(tmp_path, work)
    assert [info.step for info in list_checkpoints(tmp_path / "checkpoint")] == [6]


def test_last_step_is_exported_by_torchtitan_and_not_resumed_from(tmp_path: Path) -> None:
    def work(_: RankJournal) -> None:
        job = Job(tmp_path, last_save_model_only=True)
        job.train()
        job.checkpointer.close()
        job = Job(tmp_path)
        assert job.checkpointer.load()
        assert job.step == STEPS - 1
        job.checkpointer.close()

    alone(tmp_path, work)
    assert (tmp_path / "checkpoint" / f"step-{STEPS}" / ".metadata").exists()


def test_what_is_left_out_stays_and_all_else_has_to_fit(tmp_path: Path) -> None:
    def work(_: RankJournal) -> None:
        job = Job(tmp_path)
        job.train(steps=4)
        job.checkpointer.close()
        other = Job(tmp_path, exclude_from_loading=["lr_scheduler", "train_state"])
        fresh = other.schedulers.state_dict()
        assert other.checkpointer.load(step=4)
        assert (other.step, other.schedulers.state_dict()) == (0, fresh)
        assert torch.equal(other.everything()["model.0.weight"], job.everything()["model.0.weight"])
        with pytest.raises(FileNotFoundError, match="load_step=3"):
            other.checkpointer.load(step=3)
        other.checkpointer.exclude_from_loading = ["optimizr"]
        with pytest.raises(ValueError, match="'optimizr' is not one of train_state, model, optimizer"):
            other.checkpointer.load()
        other.checkpointer.exclude_from_loading = ["dataloader"]
        other.checkpointer.states["more"] = {"value": 1}
        with pytest.raises(StateMismatchError, match=r"missing from the checkpoint .*more"):
            other.checkpointer.load()
        other.checkpointer.close()

    alone(tmp_path, work)


@pytest.mark.parametrize("count", [0, 65])
def test_more_checkpoints_than_a_store_keeps(count: int) -> None:
    with pytest.raises(ValueError, match=rf"keep_latest_k is 2 to 64: .* cannot keep {count or 'all'}"):
        CheckpointManager.Config(enable=True, keep_latest_k=count)


def test_switched_off_nothing_is_made(tmp_path: Path) -> None:
    def work(_: RankJournal) -> None:
        job = Job(tmp_path, enable=False)
        job.train(steps=3)
        job.checkpointer.close()

    alone(tmp_path, work)
    assert not (tmp_path / "checkpoint").exists()


def test_what_is_used_of_torchtitan_is_there() -> None:
    """The hooks and the two private methods that the module names, and nothing new that has to be implemented."""
    assert checkpointer.BaseCheckpointManager.__abstractmethods__ == HOOKS
    assert all(hasattr(checkpointer.CheckpointManager, name) for name in ("_should_save", "_save_last_step"))


def everything(job: Job) -> set[tuple[str, str]]:
    """Return the bits of each part of a job's state, as they are now."""
    return {(name, bits(value)) for name, value in job.everything().items()}
