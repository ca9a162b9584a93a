"""A drain beside a tier in memory: one line on disk decides which checkpoints count in both."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import (
    CheckpointError,
    Drain,
    MemoryTier,
    NoCheckpointError,
    SyncCheckpointEngine,
)
from pccheck_async.bucket import BucketMedium, Objects
from pccheck_async.bucket.objects import Patient
from pccheck_async.engine import drain as draining
from pccheck_async.format import Reach
from pccheck_async.format.record import slot_name
from tests.support.children import in_child
from tests.support.lying_objects import FolderOfObjects, LyingObjects

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


@pytest.fixture
def tier(shared_memory: Path) -> MemoryTier:
    return MemoryTier(interval=1, path=str(shared_memory))


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a bucket in a folder, which forked processes may use."""

    def made(*_: object, **settings: Any) -> Objects:
        return Patient(LyingObjects(FolderOfObjects(tmp_path / "bucket")), settings["deadline"], pause=0.001)

    monkeypatch.setattr(draining, "open_objects", made)
    return f"s3://folder{tmp_path}/bucket"


def state_of(step: int) -> dict[str, Any]:
    return {"tensor": torch.arange(500) + step, "step": step}


def train(
    path: Path, memory: MemoryTier, url: str, *saves: tuple[int, str], closes: bool = False
) -> tuple[int, str, list[int]]:
    """Restore, save steps in a tier each, and die, or close; what was restored, and from which tier (-1, "none")."""

    def work() -> tuple[int, str, list[int]]:
        engine = SyncCheckpointEngine(path, memory=memory, drain=Drain(url, keep_last=3), save_last=False).open()
        state = state_of(-1)
        restored = engine.restore(state)
        found = (-1, "none") if restored is None else (restored.step, restored.source)
        assert state["step"] == found[0]
        assert torch.equal(state["tensor"], state_of(found[0])["tensor"])
        there = [info.step for info in engine.checkpoints()]
        for step, where in saves:
            pending = engine.checkpoint(state_of(step), step=step, tier="memory" if where == "memory" else "disk")
            pending.wait_reached("memory", 60)
            if where != "memory":
                pending.result(60)
            if where == "remote":
                pending.wait_reached("remote", 60)
        if closes:
            engine.close(60)
        return *found, there

    step, source, there = in_child(work)
    return step, source, there


def in_bucket(tmp_path: Path) -> list[int]:
    _, found = asyncio.run(BucketMedium(LyingObjects(FolderOfObjects(tmp_path / "bucket"))).look())
    return [record.entry.step for _, record in found if record.parts]


def folder_in(memory: MemoryTier) -> Path:
    (folder,) = Path(memory.path).iterdir()
    return folder


def lose_the_host(path: Path, memory: MemoryTier) -> None:
    shutil.rmtree(path)
    shutil.rmtree(folder_in(memory))


def damage(folder: Path) -> None:
    """Damage the payload of every slot."""
    for slot in folder.glob(f"{slot_name(0)[:-3]}*"):
        with open(slot, "r+b") as file:
            file.write(os.urandom(4096))


def test_a_killed_process_goes_on_from_memory_and_a_lost_host_from_the_bucket(
    tmp_path: Path, tier: MemoryTier, url: str
) -> None:
    run = tmp_path / "run"
    train(run, tier, url, (1, "remote"), (2, "disk"), (3, "memory"))
    assert train(run, tier, url, (4, "memory"), (5, "remote"), (6, "memory"))[:2] == (3, "memory")
    assert in_bucket(tmp_path)[0] == 5
    lose_the_host(run, tier)
    assert train(run, tier, url)[:2] == (5, "remote")
    assert train(run, tier, url, (6, "memory"))[:2] == (5, "remote")
    assert train(run, tier, url, (7, "remote"))[:2] == (6, "memory")
    assert in_bucket(tmp_path)[0] == 7
    shutil.rmtree(folder_in(tier))
    assert train(run, tier, url)[:2] == (7, "disk")


def test_closing_saves_what_is_in_memory_alone_in_the_bucket_too(tmp_path: Path, tier: MemoryTier, url: str) -> None:
    run = tmp_path / "run"
    train(run, tier, url, (1, "disk"), (2, "memory"), closes=True)
    assert not [*Path(tier.path).iterdir()]
    assert in_bucket(tmp_path)[0] == 2
    shutil.rmtree(run)
    assert train(run, tier, url)[:2] == (2, "remote")


def test_the_next_tier_is_read_where_one_is_damaged(tmp_path: Path, tier: MemoryTier, url: str) -> None:
    run = tmp_path / "run"
    train(run, tier, url, (1, "remote"), (2, "remote"))
    assert train(run, tier, url)[:2] == (2, "memory")
    damage(folder_in(tier))
    assert train(run, tier, url)[:2] == (2, "disk")
    damage(run)
    assert train(run, tier, url, (3, "memory"))[:2] == (2, "remote")
    assert train(run, tier, url, (4, "remote"))[:2] == (3, "memory")
    assert in_bucket(tmp_path)[:2] == [4, 2]


def test_an_abandoned_branch_does_not_come_back_from_any_tier(tmp_path: Path, tier: MemoryTier, url: str) -> None:
    """Step 2 went on from step 1, and so does step 9, which is saved later."""
    run = tmp_path / "run"

    def work() -> None:
        engine = SyncCheckpointEngine(run, memory=tier, drain=Drain(url, keep_last=3), keep_last=3, save_last=False)
        engine.open()
        engine.restore(state_of(-1), step=1)
        engine.checkpoint(state_of(9), step=9).result(60)

    train(run, tier, url, (1, "remote"), (2, "remote"))
    shutil.rmtree(run)
    shutil.rmtree(folder_in(tier))
    in_child(work)
    assert train(run, tier, url) == (9, "memory", [9])

    def steps_that_can_be_restored() -> list[tuple[int, Reach]]:
        found: list[tuple[int, Reach]] = []
        with SyncCheckpointEngine(run, memory=tier, drain=Drain(url, keep_last=3), save_last=False) as engine:
            for step in (9, 2, 1, 9):
                with suppress(NoCheckpointError):
                    restored = engine.restore(state_of(-1), step=step)
                    assert restored is not None
                    found.append((step, restored.source))
        return found

    assert in_child(steps_that_can_be_restored) == [[9, "memory"], [1, "remote"], [9, "disk"]]


def test_what_is_removed_or_rejected_is_so_in_all_tiers(tmp_path: Path, tier: MemoryTier, url: str) -> None:
    run = tmp_path / "run"

    def work() -> None:
        engine = SyncCheckpointEngine(run, memory=tier, drain=Drain(url), keep_last=3, save_last=False).open()
        for step in (1, 2, 3):
            engine.checkpoint(state_of(step), step=step).wait_reached("remote", 60)
        engine.remove(step=2)
        engine.reject(step=3)
        assert engine.restore(state := state_of(-1)) is not None
        assert state["step"] == 1
        engine.close(60)

    in_child(work)
    assert train(run, tier, url)[:2] == (1, "disk")
    shutil.rmtree(run)
    assert train(run, tier, url)[:2] == (1, "remote")


def test_a_checkpoint_for_memory_alone_does_not_reach_the_bucket(tmp_path: Path, tier: MemoryTier, url: str) -> None:
    with SyncCheckpointEngine(tmp_path / "run", memory=tier, drain=Drain(url), save_last=False) as engine:
        pending = engine.checkpoint(state_of(1), step=1, tier="memory")
        with pytest.raises(CheckpointError, match="is not copied to a bucket"):
            pending.wait_reached("remote", 10)
        second = engine.checkpoint(state_of(2), step=2)
        second.wait_reached("remote", 20)
        assert engine.checkpoints()[0].tiers == ("memory", "disk", "remote")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(1, 40))])
def test_what_was_saved_last_is_restored(tmp_path: Path, tier: MemoryTier, url: str, seed: int) -> None:
    """Random lives, each ended by SIGKILL, or with it the memory, or the host: nothing older than what is left."""
    draw, run, step = random.Random(seed), tmp_path / "run", 0
    left = {"memory": -1, "disk": -1, "remote": -1}
    hosts = 0
    for life in range(10):
        saves = []
        for _ in range(draw.randrange(4)):
            step += 1
            saves.append((step, draw.choice(("memory", "memory", "disk", "remote"))))
        found, source, _ = train(run, tier, url, *saves)
        newest = max(left.values())
        if source == "remote":  # a copy may be further than the wait for it
            assert newest <= found < step + 1 - len(saves), (life, left)
            left["remote"] = found
        else:
            assert found == newest, (life, left)
        for each, where in saves:
            left |= dict.fromkeys(REACHED[where], each)
        lost = draw.choice(("nothing", "memory", "host"))
        if lost == "host" and left["remote"] > 0:
            lose_the_host(run, tier)
            left |= {"memory": -1, "disk": -1}
            hosts += 1
        elif lost == "memory":
            shutil.rmtree(folder_in(tier))
            left["memory"] = -1
    assert hosts > 0 or seed != 0, "seed 0 is the one in the suite"


REACHED = {"memory": ("memory",), "disk": ("memory", "disk"), "remote": ("memory", "disk", "remote")}
