"""DeepSpeed on our checkpoint engine: ZeRO 1 to 3 on two ranks, killed and resumed."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pccheck_async import CheckpointError, GroupError, StorageOptions, SyncCheckpointEngine, list_checkpoints, load_sync
from pccheck_async.medium import Medium
from pccheck_async.medium.files import Files
from pccheck_async.testing import FailingWriter
from pccheck_async.transfer.operations import Operations
from tests.support.killed_ranks import RankJournal, on_ranks
from tests.support.killed_training import Life, agree, bits, live

os.environ.setdefault("DS_ACCELERATOR", "cpu")
deepspeed = pytest.importorskip("deepspeed")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for minutes

from pccheck_async.integrations.deepspeed import COMPLETE, CheckpointEngine  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:This process .* is multi-threaded",
        "ignore:.* is deprecated. Please use:FutureWarning",  # DeepSpeed calls collectives by old names
        "ignore:.*torch.cpu.amp.autocast:FutureWarning",
    ),
]

STEPS = 7


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Import what DeepSpeed imports late, for all forks."""
    with warnings.catch_warnings(action="ignore"):
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401


class Job:
    """A training by DeepSpeed, whose ranks drop out differently."""

    def __init__(self, folder: Path, stage: int, *, ours: bool = True) -> None:
        deepspeed.utils.logger.setLevel("ERROR")
        os.environ["LOCAL_RANK"] = str(dist.get_rank())  # of this fork
        deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": True},
        }
        self.folder, self.tag = folder / "run", "step-{}"
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
        if ours:
            CheckpointEngine(self.engine)
        torch.manual_seed(30 + dist.get_rank())

    def resume(self) -> int:
        """Return the first step to train. DeepSpeed gives all ranks rank 0's ``client_state``."""
        _, client = self.engine.load_checkpoint(self.folder)
        if client:
            torch.set_rng_state(client["rng"][dist.get_rank()])
        return int(self.engine.global_steps)

    def train(self, steps: range, journal: RankJournal | None = None) -> None:
        for step in steps:
            for part in range(2):
                generator = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
                loss = self.engine(torch.randn(4, 6, generator=generator).bfloat16()).float().square().mean()
                self.engine.backward(loss)
                self.engine.step()
                if journal is not None:
                    journal.note(f"train {step}.{part}", loss.detach())
            if step % 2:
                self.save(self.tag.format(step))
                if journal is not None:
                    journal.reach(f"saved {step}")

    def save(self, tag: str | None = None, **settings: Any) -> None:
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, torch.get_rng_state())
        self.engine.save_checkpoint(self.folder, tag, client_state={"rng": states}, **settings)

    def everything(self) -> dict[str, Any]:
        optimizer = self.engine.optimizer.optimizer
        with deepspeed.zero.GatheredParameters([*self.engine.module.parameters()]):
            return {
                "model": self.engine.module.state_dict(),
                "optimizer": [*optimizer.state.values()],
                "scheduler": self.engine.lr_scheduler.state_dict(),
                "rng": torch.get_rng_state(),
            }


def run(folder: Path, stage: int, tag: str, journal: RankJournal) -> None:
    reach_in_saves(journal)
    job = Job(folder, stage)
    job.tag = tag
    job.train(range(job.resume(), STEPS), journal)
    journal.note("end", job.everything())
    job.save("last")  # what is being saved when the program ends counts, too
    job.engine.destroy()


def reach_in_saves(journal: RankJournal) -> None:
    """Let events of the stores, and the names that files get, be moments of this process."""
    opening, renaming = SyncCheckpointEngine.open, Path.replace

    def open_noted(engine: SyncCheckpointEngine) -> SyncCheckpointEngine:
        engine.on_event(lambda event: journal.reach(event.name))
        return opening(engine)

    def rename_noted(path: Path, target: Path) -> Path:
        journal.reach(f"before {target.name}")
        return renaming(path, target)

    SyncCheckpointEngine.open = open_noted  # type: ignore[assignment, method-assign]
    Path.replace = rename_noted  # type: ignore[assignment, method-assign]


def lives_of(folder: Path, stage: int, *moments: str | None, tag: str = "step-{}") -> list[Life]:
    folder.mkdir()
    work = on_ranks(2, partial(run, folder, stage, tag))
    return [live(work, folder / f"journal-{number}", moment) for number, moment in enumerate(moments)]


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.campaign), 3])
def test_resumed_bit_by_bit(tmp_path: Path, stage: int) -> None:
    whole, *_ = lives_of(tmp_path / "whole", stage, None)
    moments = {1: ("1 saved 3",), 2: ("0 train 4.1",), 3: ("1 train 5.0",)}[stage]
    agree(whole, lives_of(tmp_path / "killed", stage, *moments, None))
    assert (tmp_path / "killed" / "run" / "latest").read_text() == "last"


CAMPAIGNS = [pytest.param(f"0 before {what}#2", marks=pytest.mark.campaign) for what in ("complete", "latest")]


@pytest.mark.parametrize("moment", ["1 durable#2", *CAMPAIGNS])
def test_a_tag_that_is_saved_again_is_the_old_one_or_the_new_one(tmp_path: Path, moment: str) -> None:
    """Parts of the new one are durable already; what counts is what all ranks have."""
    whole, *_ = lives_of(tmp_path / "whole", 2, None, tag="same")
    agree(whole, lives_of(tmp_path / "killed", 2, moment, None, tag="same"))


def on_two(folder: Path, work: Callable[[RankJournal], object]) -> None:
    live(on_ranks(2, work), folder / "journal")


def test_goes_on_from_files_and_loads_what_was_just_saved(tmp_path: Path) -> None:
    def work(_: RankJournal) -> None:
        job = Job(tmp_path, 2, ours=False)
        job.train(range(4))
        job.save("files")
        saved = bits(job.everything())
        job = Job(tmp_path, 2)
        assert job.resume() == 4
        assert bits(job.everything()) == saved
        scaler = type(job.engine.optimizer.loss_scaler)
        job.train(range(4, 6))
        job.save("stores")
        saved = bits(job.everything())
        job.engine.checkpoint_engine.wait()
        made_files(job.folder / "stores", job.folder / "files again")
        files = Job(tmp_path, 2, ours=False)
        files.engine.load_checkpoint(files.folder, "files again")
        assert bits(files.everything()["model"]) == bits(job.everything()["model"])
        job.train(range(6, 7))
        assert job.resume() == 6  # that load waits for the save
        assert bits(job.everything()) == saved
        assert type(job.engine.optimizer.loss_scaler) is scaler
        job.engine.save_16bit_model(str(job.folder), "exported.bin")
        dist.barrier()
        assert torch.load(job.folder / "exported.bin")["0.weight"].shape == (16, 6)

    on_two(tmp_path, work)
    parts = [*(tmp_path / "run" / "stores").glob("*.pt")]
    assert len(parts) == 3
    assert all([info.nbytes for info in list_checkpoints(part)] for part in parts)
    assert all(len([*part.glob("slot-*")]) == 1 for part in parts)  # nothing is left reserved


def made_files(tag: Path, files: Path) -> None:
    """As the guide's page does it."""
    dist.barrier()
    if dist.get_rank() == 0:
        files.mkdir()
        for part in tag.glob("*.pt"):
            state = load_sync(part, step=int((tag / COMPLETE).read_text()), allow_pickle=True)["state"]
            torch.save(state, files / part.name)
    dist.barrier()


def test_a_rank_that_fails_to_write_keeps_the_tag_from_counting(tmp_path: Path) -> None:
    def work(_: RankJournal) -> None:
        job = Job(tmp_path, 1)
        job.train(range(1))
        job.save("good")
        job.engine.checkpoint_engine.wait()
        if dist.get_rank() == 1:
            break_writing()
        job.save("bad")
        with pytest.raises(CheckpointError) as caught:
            job.engine.checkpoint_engine.wait()
        assert isinstance(caught.value, GroupError) == (dist.get_rank() == 0)
        assert "No space left" in str(caught.value)

    on_two(tmp_path, work)
    assert (tmp_path / "run" / "latest").read_text() == "good"
    assert not (tmp_path / "run" / "bad" / COMPLETE).exists()


def break_writing() -> None:
    """Let every write to a store that is open fail, as on a disk that is full."""
    making, opening = SyncCheckpointEngine.__init__, SyncCheckpointEngine.open
    media: list[FailingWriter] = []

    def medium(path: str, operations: Operations) -> Medium:
        media.append(FailingWriter(Files(path, operations), fail_at=None, error=errno.ENOSPC, stays=True))
        return media[-1]

    def make(engine: SyncCheckpointEngine, path: str, **settings: Any) -> None:
        making(engine, path, storage=StorageOptions(io=medium), **settings)

    def open_full(engine: SyncCheckpointEngine) -> SyncCheckpointEngine:
        opening(engine)
        media[-1].fail_at = media[-1].operations + 1
        return engine

    SyncCheckpointEngine.__init__ = make  # type: ignore[assignment, method-assign]
    SyncCheckpointEngine.open = open_full  # type: ignore[assignment, method-assign]


def test_saving_that_raises_keeps_the_tag_from_counting(tmp_path: Path) -> None:
    def work(_: RankJournal) -> None:
        job = Job(tmp_path, 1)
        job.train(range(1))
        job.save("good")
        with pytest.raises(KeyError, match="reserved"):
            job.engine.save_checkpoint(job.folder, "bad", client_state={"checkpoint_parallel_dimensions": 1})
        job.train(range(1, 3))
        job.engine.checkpoint_engine.wait()

    on_two(tmp_path, work)
    assert (tmp_path / "run" / "latest").read_text() == "step-1"
    assert not (tmp_path / "run" / "bad" / COMPLETE).exists()


def test_what_is_used_of_deepspeed_is_there() -> None:
    used = {
        "create",
        "save",
        "load",
        "commit",
        "is_decoupled",
        "get_commit_info",
        "cleanup",
        "preserves_storage_sharing",
    }
    interface = deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine
    assert used <= {*vars(interface)}
    assert interface.__abstractmethods__ <= used
    assert {"save_checkpoint", "load_checkpoint", "destroy"} <= {*vars(deepspeed.DeepSpeedEngine)}
