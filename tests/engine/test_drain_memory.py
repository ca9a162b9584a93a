"""A drain beside a tier in memory: one line on disk decides which checkpoints count in both."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import (
    CheckpointEngine,
    CheckpointError,
    Drain,
    MemoryTier,
    NoCheckpointError,
    SyncCheckpointEngine,
    list_checkpoints,
)
from pccheck_async.bucket import BucketMedium, Owner
from pccheck_async.engine.drain import Draining
from pccheck_async.engine.drain_owner import DrainOwner
from pccheck_async.engine.memory import Memory
from pccheck_async.format import Entry
from pccheck_async.format.record import slot_name
from pccheck_async.store import Store
from tests.support.children import in_child
from tests.support.lying_objects import FolderOfObjects, LyingObjects, use_in_drains

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


@pytest.fixture
def tier(shared_memory: Path) -> MemoryTier:
    return MemoryTier(interval=1, path=str(shared_memory))


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a bucket in a folder, which forked processes may use."""
    use_in_drains(LyingObjects(FolderOfObjects(tmp_path / "bucket")), monkeypatch)
    return f"s3://folder{tmp_path}/bucket"


def state_of(step: int) -> dict[str, Any]:
    return {"tensor": torch.arange(500) + step, "step": step}


def engine_on(path: Path, memory: MemoryTier | None, url: str | None, *, keep_last: int = 1) -> SyncCheckpointEngine:
    drain = None if url is None else Drain(url, keep_last=3)
    return SyncCheckpointEngine(path, memory=memory, drain=drain, keep_last=keep_last, save_last=False)


def restored_by(engine: SyncCheckpointEngine, step: int | None) -> tuple[int, str]:
    """Restore a step, by default the newest, and compare it; return it and its tier, -1 for none."""
    try:
        restored = engine.restore(state := state_of(-1), step=step)
    except NoCheckpointError:
        return -1, "none"
    if restored is None:
        return -1, "none"
    assert torch.equal(state["tensor"], state_of(restored.step)["tensor"])
    return restored.step, restored.source


def save(engine: SyncCheckpointEngine, step: int, where: str) -> None:
    """Save a step in a tier, and in those before it; return when it is there."""
    pending = engine.checkpoint(state_of(step), step=step, tier="memory" if where == "memory" else "disk")
    if engine._core.config.memory is not None:
        pending.wait_reached("memory", 60)
    if where != "memory":
        pending.result(60)
    if where == "remote":
        pending.wait_reached("remote", 60)


def train(
    path: Path, memory: MemoryTier, url: str, *saves: tuple[int, str], closes: bool = False
) -> tuple[int, str, list[int]]:
    """Restore, save steps in a tier each, and die, or close; what was restored, and from which tier (-1, "none")."""

    def work() -> tuple[int, str, list[int]]:
        engine = engine_on(path, memory, url).open()
        found = restored_by(engine, None)
        there = [info.step for info in engine.checkpoints()]
        for step, where in saves:
            save(engine, step, where)
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

    def goes_back() -> None:
        engine = engine_on(run, tier, url, keep_last=3).open()
        engine.restore(state_of(-1), step=1)
        save(engine, 9, "disk")

    train(run, tier, url, (1, "remote"), (2, "remote"))
    shutil.rmtree(run)
    shutil.rmtree(folder_in(tier))
    in_child(goes_back)
    assert train(run, tier, url) == (9, "memory", [9])

    def what_can_be_restored() -> list[tuple[int, str]]:
        with engine_on(run, tier, url) as engine:
            return [each for step in (9, 2, 1, 9) if (each := restored_by(engine, step))[0] == step]

    assert in_child(what_can_be_restored) == [[9, "memory"], [1, "remote"], [9, "memory"]]


@pytest.mark.parametrize("told", [True, False], ids=["the bucket was told", "it was not"])
@pytest.mark.parametrize("back", [True, False], ids=["an older one restored", "nothing restored"])
def test_a_run_that_has_saved_in_memory_alone_is_no_other_branch(
    tmp_path: Path, tier: MemoryTier, url: str, back: bool, told: bool
) -> None:
    """Disk and bucket end with a step that the run has left behind."""
    run = tmp_path / "run"

    def leaves_it_behind() -> None:
        if not told:
            DrainOwner._write_line = _never  # type: ignore[method-assign, assignment]
        engine = engine_on(run, tier, url, keep_last=3).open()
        if back:
            assert restored_by(engine, 1)[0] == 1
        save(engine, 4, "memory")
        if told:
            _until(lambda: not engine._core.assembly.drain.owner.begins)  # type: ignore[union-attr]

    train(run, tier, url, (1, "remote"), (2, "remote"), (3, "remote"))
    in_child(leaves_it_behind)
    assert train(run, tier, url, (5, "remote"))[:2] == (4, "memory")
    assert in_bucket(tmp_path)[0] == 5
    lose_the_host(run, tier)
    assert train(run, tier, url)[:2] == (5, "remote")


async def _never(*_: object) -> None:
    await asyncio.sleep(1000)


def _until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("drained", [True, False])
def test_closing_saves_the_newest_in_memory_though_an_older_one_was_restored(
    tmp_path: Path, tier: MemoryTier, url: str, drained: bool
) -> None:
    run = tmp_path / "run"

    def first() -> None:
        engine = engine_on(run, tier, url if drained else None, keep_last=2).open()
        for step, where in ((1, "disk"), (2, "disk"), (3, "memory")):
            save(engine, step, where)

    def closes() -> int:
        with engine_on(run, tier, url if drained else None, keep_last=2) as engine:
            return restored_by(engine, 2)[0]

    in_child(first)
    assert in_child(closes) == 2
    assert [info.step for info in list_checkpoints(run)] == [3, 2]
    if drained:
        assert in_bucket(tmp_path)[0] == 3


def test_a_run_that_began_anew_and_lost_all_does_not_hide_the_bucket(
    tmp_path: Path, tier: MemoryTier, url: str
) -> None:
    """It saved in memory alone, and its line is all that is on disk."""
    run = tmp_path / "run"
    train(run, tier, url, (1, "remote"))
    lose_the_host(run, tier)
    in_child(lambda: save(engine_on(run, tier, url).open(), 4, "memory"))
    shutil.rmtree(folder_in(tier))
    assert train(run, tier, url)[:2] == (1, "remote")


@pytest.mark.parametrize("memory", [True, False])
def test_a_restore_from_the_bucket_leaves_the_disks_line_as_it_is(
    tmp_path: Path, tier: MemoryTier, url: str, memory: bool
) -> None:
    run, beside = tmp_path / "run", tier if memory else None

    def first() -> None:
        save(engine_on(run, beside, url).open(), 1, "remote")

    def second() -> None:
        engine = engine_on(run, beside, url).open()
        engine.restore(state_of(-1))
        save(engine, 2, "remote")
        save(engine, 3, "remote")

    def looks_back() -> list[Any]:
        engine = engine_on(run, beside, url).open()
        found = [restored_by(engine, 1)]
        engine.pin(step=3)
        return [*found, restored_by(engine, None)]

    def goes_on() -> None:
        engine = engine_on(run, beside, url).open()
        for step in (1, None):
            restored_by(engine, step)
        save(engine, 5, "remote")

    in_child(first)
    in_child(second)
    assert in_child(looks_back) == [[1, "remote"], [3, "memory" if memory else "disk"]]
    assert in_child(looks_back) == [[1, "remote"], [3, "memory" if memory else "disk"]]
    in_child(goes_on)
    shutil.rmtree(run)
    assert in_child(lambda: restored_by(engine_on(run, beside, url).open(), 3)) == [3, "remote"]


def test_many_lives_without_a_copy_do_not_shut_the_bucket(tmp_path: Path, url: str) -> None:
    """More than a line has links: what is there does not count beside the disk, and the next copy takes its place."""
    run = tmp_path / "run"

    def lives(step: int, where: str) -> tuple[int, str]:
        if where == "disk":
            Draining.send = _never  # type: ignore[method-assign, assignment]
        engine = engine_on(run, None, url).open()
        found = restored_by(engine, None)
        save(engine, step, where)
        return found

    assert in_child(lambda: lives(1, "remote")) == [-1, "none"]
    for step in range(2, 13):
        assert in_child(partial(lives, step, "disk")) == [step - 1, "disk"]
    assert in_child(lambda: lives(13, "remote")) == [12, "disk"]
    assert in_bucket(tmp_path)[0] == 13
    shutil.rmtree(run)
    assert in_child(lambda: restored_by(engine_on(run, None, url).open(), None)) == [13, "remote"]


def test_a_run_that_began_anew_on_an_empty_folder_goes_on_from_its_own_memory(
    tmp_path: Path, tier: MemoryTier, url: str
) -> None:
    run = tmp_path / "run"
    train(run, tier, url, (1, "remote"))
    lose_the_host(run, tier)

    def anew() -> None:
        engine = engine_on(run, tier, url).open()
        save(engine, 4, "memory")
        _until(lambda: not engine._core.assembly.drain.owner.begins)  # type: ignore[union-attr]

    in_child(anew)
    assert train(run, tier, url)[:2] == (4, "memory")


def test_a_run_that_the_bucket_was_not_told_of_survives_a_second_death(
    tmp_path: Path, tier: MemoryTier, url: str
) -> None:
    """The opening in between made a record there, and that names another run."""
    run = tmp_path / "run"

    def untold() -> None:
        DrainOwner._write_line = _never  # type: ignore[method-assign, assignment]
        engine = engine_on(run, tier, url, keep_last=3).open()
        assert restored_by(engine, 1)[0] == 1
        save(engine, 4, "memory")

    train(run, tier, url, (1, "remote"), (2, "remote"), (3, "remote"))
    in_child(untold)
    for _ in range(3):
        assert train(run, tier, url)[:2] == (4, "memory")
    assert train(run, tier, url, (5, "remote"))[:2] == (4, "memory")
    assert in_bucket(tmp_path)[0] == 5


def test_a_copy_of_the_folder_does_not_replace_what_its_run_has_copied_since(
    tmp_path: Path, tier: MemoryTier, url: str
) -> None:
    """Its run goes on from step 1, as the bucket's does, and began without the bucket."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    elsewhere = MemoryTier(interval=1, path=str(Path(tier.path) / "elsewhere"))
    Path(elsewhere.path).mkdir()

    def goes_on() -> None:
        engine = engine_on(run, elsewhere, url).open()
        save(engine, 1, "remote")
        shutil.copytree(run, copy)
        save(engine, 2, "remote")
        save(engine, 3, "remote")

    def beside() -> None:
        engine = engine_on(copy, tier, None).open()
        assert restored_by(engine, None)[0] == 1
        save(engine, 9, "disk")

    in_child(goes_on)
    in_child(beside)
    with pytest.raises(AssertionError, match="hold checkpoints of different runs"):
        train(copy, tier, url, (10, "remote"))
    assert in_bucket(tmp_path)[0] == 3


def test_a_cancelled_beginning_is_done_again(tmp_path: Path, tier: MemoryTier, url: str) -> None:
    run = tmp_path / "run"

    def cancelled() -> None:
        engine = engine_on(run, tier, url).open()
        assert restored_by(engine, None) == (1, "memory")
        assembly, loop = engine._core.assembly, engine._core.loop
        memory, before = assembly.memory, assembly.store.committed.record.line
        assert memory is not None
        loop.call(memory.turn.acquire())
        pending = engine.checkpoint(state_of(2), step=2, tier="memory")
        _until(lambda: assembly.store.committed.record.line != before)

        async def cancel() -> None:
            for task in assembly.scheduler.tasks.values():
                task.cancel()
            await asyncio.sleep(0.1)
            memory.turn.release()

        loop.call(cancel())
        with pytest.raises(CheckpointError):
            pending.wait_reached("memory", 30)
        save(engine, 4, "memory")

    train(run, tier, url, (1, "disk"))
    in_child(cancelled)
    assert train(run, tier, url)[:2] == (4, "memory")


def test_a_checkpoint_that_a_pin_saves_on_disk_is_copied(tmp_path: Path, tier: MemoryTier, url: str) -> None:
    def work() -> None:
        engine = engine_on(tmp_path / "run", tier, url).open()
        save(engine, 1, "remote")
        save(engine, 2, "memory")
        engine.pin(step=2)
        _until(lambda: engine.checkpoints()[0].tiers == ("memory", "disk", "remote"))

    in_child(work)
    assert in_bucket(tmp_path)[0] == 2


@pytest.mark.parametrize("verb", ["remove", "reject"])
def test_the_bucket_drops_what_memory_fails_to_drop(tmp_path: Path, tier: MemoryTier, url: str, verb: str) -> None:
    def work() -> None:
        async def fails(_: Memory, counters: object) -> None:
            raise OSError(5, "memory failed")

        Memory.drop = fails  # type: ignore[method-assign, assignment]
        engine = engine_on(tmp_path / "run", tier, url, keep_last=3).open()
        for step in (1, 2):
            save(engine, step, "remote")
        with pytest.raises(OSError, match="memory failed"):
            getattr(engine, verb)(step=2)
        _until(lambda: in_bucket(tmp_path) == [1])

    in_child(work)


def test_what_is_removed_or_rejected_is_so_in_all_tiers(tmp_path: Path, tier: MemoryTier, url: str) -> None:
    run = tmp_path / "run"

    def work() -> None:
        engine = engine_on(run, tier, url, keep_last=3).open()
        for step in (1, 2, 3):
            save(engine, step, "remote")
        engine.remove(step=2)
        engine.reject(step=3)
        assert engine.restore(state := state_of(-1)) is not None
        assert state["step"] == 1
        engine.close(60)

    in_child(work)
    assert train(run, tier, url)[:2] == (1, "disk")
    shutil.rmtree(run)
    assert train(run, tier, url)[:2] == (1, "remote")


def test_what_was_removed_is_not_restored_from_a_bucket_that_has_it_yet(
    tmp_path: Path, tier: MemoryTier, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_on(tmp_path / "run", tier, url, keep_last=2) as engine:
        save(engine, 1, "remote")
        save(engine, 2, "remote")
        with monkeypatch.context() as patch:
            patch.setattr(Owner, "amend", _never)
            engine.remove(step=2)
            assert restored_by(engine, None)[0] == 1
            engine.close(1)
    assert in_bucket(tmp_path)[0] == 2


@pytest.mark.parametrize("verb", ["remove", "reject"])
@pytest.mark.parametrize("memory", [True, False])
def test_what_is_in_the_bucket_alone_is_removed_and_rejected_too(
    tmp_path: Path, tier: MemoryTier, url: str, memory: bool, verb: str
) -> None:
    run, beside = tmp_path / "run", tier if memory else None
    with engine_on(run, beside, url) as engine:
        save(engine, 1, "remote")
        engine.pin(step=1)
        for step in (2, 3):
            save(engine, step, "remote")
        assert [info.step for info in list_checkpoints(run)] == [3, 1]
        gone = [3, 2] if verb == "reject" else [2]
        assert sorted((info.step for info in getattr(engine, verb)(step=2)), reverse=True) == gone
        assert restored_by(engine, None)[0] == (1 if verb == "reject" else 3)
        with pytest.raises(NoCheckpointError):
            getattr(engine, verb)(step=2)
        assert restored_by(engine, 2) == (-1, "none")
    assert in_bucket(tmp_path) == ([1] if verb == "reject" else [3, 1])


@pytest.mark.parametrize("drained", [True, False])
@pytest.mark.parametrize("verb", ["remove", "pin"])
def test_a_change_before_a_restore_leaves_what_is_in_memory_alone(
    tmp_path: Path, tier: MemoryTier, url: str, verb: str, drained: bool
) -> None:
    run, place = tmp_path / "run", url if drained else None

    def first() -> None:
        engine = engine_on(run, tier, place, keep_last=3).open()
        for step, where in ((1, "disk"), (2, "disk"), (3, "memory")):
            save(engine, step, where)

    def change() -> tuple[int, str]:
        engine = engine_on(run, tier, place, keep_last=3).open()
        getattr(engine, verb)(step=1)
        return restored_by(engine, None)

    in_child(first)
    assert in_child(change) == [3, "memory"]
    assert in_child(change if verb == "pin" else lambda: restored_by(engine_on(run, tier, place).open(), None))[0] == 3


def test_a_cancelled_removal_reaches_the_bucket(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remove, removed = Store.remove, asyncio.Event()

    async def slow(self: Store, which: int | str, *, force: bool) -> list[Entry]:
        found = await remove(self, which, force=force)
        removed.set()
        await asyncio.sleep(0.2)
        return found

    async def work() -> int:
        async with CheckpointEngine(tmp_path / "run", drain=Drain(url, keep_last=3), keep_last=3) as engine:
            for step in (1, 2):
                await (await engine.checkpoint(state_of(step), step=step)).reached("remote")
            monkeypatch.setattr(Store, "remove", slow)
            task = asyncio.create_task(engine.remove(step=2))
            while not removed.is_set():  # noqa: ASYNC110 - set on the engine's loop
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            restored = await engine.restore(state_of(-1))
            assert restored is not None
            return restored.step

    assert asyncio.run(work()) == 1
    assert in_bucket(tmp_path) == [1]


def test_a_checkpoint_for_memory_alone_does_not_reach_the_bucket(tmp_path: Path, tier: MemoryTier, url: str) -> None:
    with SyncCheckpointEngine(tmp_path / "run", memory=tier, drain=Drain(url), save_last=False) as engine:
        pending = engine.checkpoint(state_of(1), step=1, tier="memory")
        with pytest.raises(CheckpointError, match="is not copied to a bucket"):
            pending.wait_reached("remote", 10)
        second = engine.checkpoint(state_of(2), step=2)
        second.wait_reached("remote", 20)
        assert engine.checkpoints()[0].tiers == ("memory", "disk", "remote")
    assert in_bucket(tmp_path) == [2]


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


def test_a_host_that_comes_back_does_not_go_on_from_what_another_one_has_left_behind(
    tmp_path: Path, tier: MemoryTier, url: str
) -> None:
    """Its disk and its memory are of a run that another one, elsewhere, has gone on from by the bucket."""
    run = tmp_path / "run"
    elsewhere = MemoryTier(interval=1, path=str(Path(tier.path) / "elsewhere"))
    Path(elsewhere.path).mkdir()
    train(run, tier, url, (1, "remote"), (2, "memory"), (3, "memory"))
    assert train(tmp_path / "other", elsewhere, url, (12, "remote"))[:2] == (1, "remote")
    assert train(run, tier, url)[:2] == (12, "remote")


def test_memory_counts_where_another_run_has_copied_nothing_yet(tmp_path: Path, tier: MemoryTier, url: str) -> None:
    run = tmp_path / "run"
    elsewhere = MemoryTier(interval=1, path=str(Path(tier.path) / "elsewhere"))
    Path(elsewhere.path).mkdir()
    train(run, tier, url, (1, "remote"), (2, "memory"), (3, "memory"))
    assert train(tmp_path / "other", elsewhere, url, (12, "memory"))[:2] == (1, "remote")
    assert train(run, tier, url, (4, "remote"))[:2] == (3, "memory")
    assert train(run, tier, url)[:2] == (4, "memory")


@pytest.mark.parametrize("seed", [4, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(5, 44))])
def test_lives_on_two_hosts_in_turn(tmp_path: Path, tier: MemoryTier, url: str, seed: int) -> None:
    """Each host has a disk and a memory of its own, and both have one bucket: none goes on from what was left behind.

    A host goes on from what is its own if the bucket's newest checkpoint is behind that; from the bucket if that is
    ahead of its disk; and is refused if neither goes on from the other.
    """
    draw, hosts, parents = random.Random(seed), [_Host(tmp_path, tier, name) for name in "ab"], dict[int, int]()
    step, seen = 0, set[str]()

    def line_of(tip: int) -> list[int]:
        """Return a step, and those that it goes on from, newest first."""
        line = [tip] if tip > 0 else []
        while line and (before := parents[line[-1]]) > 0:
            line.append(before)
        return line

    for life in range(8):
        host, bucket = draw.choice(hosts), next(iter(in_bucket(tmp_path)), -1)
        saves = [
            (step + 1 + each, draw.choice(("memory", "memory", "disk", "remote"))) for each in range(draw.randrange(4))
        ]
        try:
            found, source, _ = train(host.run, host.tier, url, *saves)
        except AssertionError as error:
            if "hold checkpoints of different runs" not in str(error):
                raise
            assert bucket not in line_of(host.tip), life
            assert host.disk not in line_of(bucket), life
            seen.add("refused")
            continue
        step += len(saves)
        if bucket in line_of(host.tip) or bucket < 0:
            assert found == max(host.memory, host.disk, bucket), (life, source)
            seen.add("own")
        else:
            assert host.disk in (-1, *line_of(bucket)), life
            assert (found, source) == (bucket, "remote"), life
            seen.add("ahead")
        for each, where in saves:
            parents[each], found = found, each
            host.memory, host.tip = each, each
            host.disk = host.disk if where == "memory" else each
        if draw.random() < 0.2 and any(Path(host.tier.path).iterdir()):
            shutil.rmtree(folder_in(host.tier))
            host.memory = -1
    assert {"own", "ahead"} <= seen or seed != 4, "seed 4 is the one in the suite"


class _Host:
    """A folder and a memory; its newest step in each, and the newest step of the last run on it."""

    def __init__(self, folder: Path, tier: MemoryTier, name: str) -> None:
        self.run = folder / name
        self.tier = MemoryTier(interval=1, path=str(Path(tier.path) / name))
        Path(self.tier.path).mkdir()
        self.memory = self.disk = self.tip = -1
