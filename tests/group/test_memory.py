"""The tier in memory of a group: what survives the processes is restored, where the disks go on from it."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
import torch

from pccheck_async import (
    CheckpointEngine,
    FlatShard,
    Group,
    MemoryTier,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
    open_checkpoint,
)
from pccheck_async.engine import Memory
from pccheck_async.engine import memory as engine_memory
from pccheck_async.errors import (
    CheckpointError,
    GroupError,
    ReadError,
    StateMismatchError,
    StoreError,
    StoreLockedError,
    TornCaptureError,
    WriteError,
)
from pccheck_async.format import Line, Record
from pccheck_async.group import driver as group_driver
from pccheck_async.group import memory as group_memory
from pccheck_async.group.driver import Driver
from pccheck_async.group.member import _Phase
from pccheck_async.group.memory import GroupMemory
from pccheck_async.group.messages import Abort, AnyDecision, AnyMessage, ChangeRequest
from pccheck_async.group.parts import SeenStore
from pccheck_async.store import Store, Written
from pccheck_async.stores import reject
from pccheck_async.testing.probe import probe
from pccheck_async.upkeep import clear_memory, list_memory
from pccheck_async.upkeep import memory_of as memory_infos
from tests.support.ranks import RankFailedError, run_ranks, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("machine_asked_once"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded", "ignore:the checkpoint of step"),
]
SIZES = pytest.mark.parametrize("elements", [500, 300_000], ids=["one request", "chunks"])


@pytest.fixture
def tier(shared_memory: Path) -> MemoryTier:
    return MemoryTier(interval=1, path=str(shared_memory))


def state_of(rank: int, step: int, elements: int = 500) -> dict[str, Any]:
    return {"tensor": torch.arange(elements) + 1000 * step + rank, "step": step, "rank": rank}


def engine_on(path: Path, group: Group, memory: MemoryTier | None, **settings: Any) -> SyncCheckpointEngine:
    return SyncCheckpointEngine(path, group=group, memory=memory, save_last=False, **settings)


def restore_in(engine: SyncCheckpointEngine, rank: int, elements: int, step: int | None = None) -> tuple[int, str]:
    """Restore, and compare; return the step, -1 for none, and where this rank read it."""
    state = state_of(rank, -1, elements)
    restored = engine.restore(state, step=step, private="modulo")
    if restored is None:
        return -1, "none"
    assert torch.equal(state["tensor"], state_of(state["rank"], restored.step, elements)["tensor"])
    return restored.step, restored.source


def train(
    path: Path,
    memory: MemoryTier | None,
    steps: range = range(0),
    *,
    on_disk: range = range(0),
    elements: int = 500,
    world: int = 2,
    step: int | None = None,
    then: Callable[[SyncCheckpointEngine, int], object] = lambda engine, rank: None,
    places: Callable[[int], tuple[Path, MemoryTier | None]] | None = None,
    **settings: Any,
) -> list[tuple[int, str]]:
    """Restore, save steps in memory, some also on disk, and die, on all ranks; return what each one restored."""

    def work(group: Group) -> tuple[int, str]:
        folder, tier = (path, memory) if places is None else places(group.rank)
        engine = engine_on(folder, group, tier, **settings).open()
        found = restore_in(engine, group.rank, elements, step)
        for number in steps:
            where = "disk" if number in on_disk or tier is None else "memory"
            pending = engine.checkpoint(state_of(group.rank, number, elements), step=number, tier=where)  # type: ignore[arg-type]
            if tier is not None:
                pending.wait_reached("memory", 20)
            if where == "disk":
                pending.result(20)
        then(engine, group.rank)
        (marks / str(group.rank)).touch()
        wait_for(*(marks / str(rank) for rank in range(world)))
        return found  # and the process ends without closing it

    with TemporaryDirectory() as name:
        marks = Path(name)
        found: list[tuple[int, str]] = run_ranks(world, work)
    return found


def marks_of(path: Path) -> Path:
    """Make a folder in which ranks say that they are done: one that dies earlier leaves the others waiting."""
    marks = path.with_name(f"{path.name}-marks")
    marks.mkdir()
    return marks


def meet_at(marks: Path, rank: int, name: str = "", world: int = 2) -> None:
    """Wait until all ranks are here."""
    (marks / f"{name}{rank}").touch()
    wait_for(*(marks / f"{name}{each}" for each in range(world)))


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something that nothing reports holds."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def memory_of(engine: SyncCheckpointEngine) -> Memory:
    memory = probe(engine).core.assembly.memory
    assert memory is not None
    return memory


def driver_of(engine: CheckpointEngine | SyncCheckpointEngine) -> Driver:
    """Return the driver in memory of a rank."""
    memory = probe(engine).core.peers._memory  # type: ignore[attr-defined]
    assert isinstance(memory, GroupMemory)
    return memory.driver


def fail_on(store: Store) -> None:
    """Let the next data that goes to a store fail."""
    finish = Store.finish_data

    async def fails(self: Store, written: Written) -> None:
        if self is store:
            await self.release(written.lease)
            raise WriteError(5, "the device failed", "slot")
        await finish(self, written)

    Store.finish_data = fails  # type: ignore[method-assign]


def delay_on(store: Store) -> None:
    """Let data take a while to a store."""
    finish = Store.finish_data

    async def slow(self: Store, written: Written) -> None:
        if self is store:
            await asyncio.sleep(0.5)
        await finish(self, written)

    Store.finish_data = slow  # type: ignore[method-assign]


def part_of(memory: MemoryTier, rank: int) -> Path:
    (folder,) = Path(memory.path).iterdir()
    return folder / f"rank-{rank:05d}"


# -- a restart


@pytest.mark.parametrize(
    ("world", "elements"),
    [
        (1, 500),
        (2, 300_000),
        *(pytest.param(*each, marks=pytest.mark.campaign) for each in [(1, 300_000), (2, 500), (4, 500), (4, 300_000)]),
    ],
)
def test_killed_ranks_go_on_from_memory(tmp_path: Path, tier: MemoryTier, elements: int, world: int) -> None:
    go_on = partial(train, tmp_path, tier, elements=elements, world=world)
    assert go_on(range(8), on_disk=range(3, 5)) == [(-1, "none")] * world
    assert list_checkpoints(tmp_path)[0].step == 4
    assert go_on() == [(7, "memory")] * world
    assert train(tmp_path, None, elements=elements, world=world) == [(4, "disk")] * world  # reading changed nothing
    assert go_on(range(8, 10)) == [(7, "memory")] * world
    assert go_on() == [(9, "memory")] * world


def test_before_the_first_checkpoint_on_disk(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(3))
    assert list_checkpoints(tmp_path) == []
    assert train(tmp_path, tier) == [(2, "memory")] * 2


def test_many_restarts_keep_the_line(tmp_path: Path, tier: MemoryTier) -> None:
    for run in range(10):
        on_disk = range(run * 3, run * 3 + 1) if run % 4 == 1 else range(0)
        found = train(tmp_path, tier, range(run * 3, run * 3 + 3), on_disk=on_disk)
        assert [step for step, _ in found] == [run * 3 - 1] * 2


# -- memory that is lost, in part or wholly


def test_the_machine_is_lost(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(5), on_disk=range(2, 3))
    shutil.rmtree(part_of(tier, 0).parent)
    assert train(tmp_path, tier, range(3, 6)) == [(2, "disk")] * 2
    assert train(tmp_path, tier) == [(5, "memory")] * 2


def test_memory_of_one_rank_is_lost(tmp_path: Path, tier: MemoryTier) -> None:
    """What is in memory alone lacks a part; of the newest one on disk the other rank's copy in memory is read."""
    train(tmp_path, tier, range(5), on_disk=range(2, 3))
    shutil.rmtree(part_of(tier, 1))
    assert train(tmp_path, tier) == [(2, "disk")] * 2  # memory keeps one, and that is step 4
    train(tmp_path, tier, range(3, 6), on_disk=range(5, 6))
    shutil.rmtree(part_of(tier, 1))
    assert train(tmp_path, tier) == [(5, "memory"), (5, "disk")]


def test_memory_alone_is_lost_before_anything_is_on_disk(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(3))
    shutil.rmtree(part_of(tier, 1))
    assert train(tmp_path, tier, range(1)) == [(-1, "none")] * 2
    assert train(tmp_path, tier) == [(0, "memory")] * 2


def test_a_store_in_memory_is_damaged(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(3), on_disk=range(2, 3))
    (part_of(tier, 0) / "store.json").write_bytes(b"spoilt")
    assert train(tmp_path, tier, range(3, 4)) == [(2, "disk"), (2, "memory")]
    assert train(tmp_path, tier) == [(3, "memory")] * 2


def test_a_store_of_one_process_beside_those_of_the_ranks(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(3))
    with SyncCheckpointEngine(part_of(tier, 5)) as engine:
        engine.checkpoint(state_of(0, 9), step=9)
    assert load_sync(tmp_path, tier=tier)["step"] == 2
    assert train(tmp_path, tier, range(3, 4)) == [(2, "memory")] * 2
    assert train(tmp_path, tier) == [(3, "memory")] * 2


def test_memory_that_cannot_be_looked_through_is_off(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(4), on_disk=range(2, 3))

    def fail(self: Driver, seen: Callable[[Driver], list[SeenStore]] = Driver._scan) -> list[SeenStore]:
        if not self.member.in_memory:
            return seen(self)
        with monkeypatch.context() as within:
            within.setattr(group_driver, "seen_stores", failing)
            return seen(self)

    def failing(folder: Path, *, passes_over: bool) -> list[SeenStore]:
        raise ReadError(5, "input/output error", os.fspath(folder))

    def off(engine: SyncCheckpointEngine, rank: int) -> None:
        with pytest.raises(CheckpointError, match="not in memory"):
            engine.checkpoint(state_of(rank, 3), step=3, tier="memory").wait_reached("memory", 20)
        engine.checkpoint(state_of(rank, 4), step=4).result(20)
        assert memory_of(engine).off

    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patched:
        patched.setattr(Driver, "_scan", fail)
        assert train(tmp_path, tier, then=off) == [(2, "disk")] * 2
    assert train(tmp_path, tier) == [(4, "disk")] * 2


def test_hosts_with_folders_of_their_own(tmp_path: Path, shared_memory: Path) -> None:
    """Rank 2's host loses its memory: that of the others is read where the disk has it, too."""
    hosts = [0, 0, 1]
    for host in {*hosts}:
        (shared_memory / f"{host}").mkdir()

    def places(rank: int) -> tuple[Path, MemoryTier]:
        host = f"{hosts[rank]}"
        return tmp_path / host / "run", MemoryTier(interval=1, path=str(shared_memory / host))

    go_on = partial(train, tmp_path, None, world=3, places=places)
    go_on(range(3), on_disk=range(1, 2))
    assert go_on() == [(2, "memory")] * 3
    shutil.rmtree(shared_memory / "1")
    (shared_memory / "1").mkdir()
    found = go_on(range(2, 4), on_disk=range(3, 4))  # records of the other host may still name step 1 in memory
    assert ([step for step, _ in found], found[2]) == ([1, 1, 1], (1, "disk"))
    shutil.rmtree(shared_memory / "1")
    (shared_memory / "1").mkdir()
    assert go_on() == [(3, "memory"), (3, "memory"), (3, "disk")]


# -- what memory must not bring back


def test_a_run_that_began_anew(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(5), on_disk=range(2, 3))

    def anew(group: Group) -> None:
        with engine_on(tmp_path, group, tier, overwrite=True) as engine:
            engine.checkpoint(state_of(group.rank, 0), step=0, tier="memory").wait_reached("memory", 20)
            engine.checkpoint(state_of(group.rank, 1), step=1).result(20)

    run_ranks(2, anew)
    assert train(tmp_path, tier) == [(1, "disk")] * 2  # they left well, and removed their memory


def test_a_run_that_went_on_from_an_older_step(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(6), on_disk=range(2, 3))
    assert train(tmp_path, tier, range(3, 4), step=2) == [(2, "disk")] * 2
    assert train(tmp_path, tier) == [(3, "memory")] * 2  # and not step 5 of the run before


@pytest.mark.parametrize("without", [True, False], ids=["without the tier", "elsewhere"])
def test_a_run_in_between(tmp_path: Path, shared_memory: Path, without: bool) -> None:
    here, there = (MemoryTier(interval=1, path=str(shared_memory / name)) for name in ("here", "there"))
    for each in (here, there):
        Path(each.path).mkdir()
    train(tmp_path, here, range(5), on_disk=range(2, 3))
    assert train(tmp_path, None if without else there, range(3, 5), on_disk=range(3, 4)) == [(2, "disk")] * 2
    assert train(tmp_path, here) == [(4 if without else 3, "disk")] * 2


def test_a_copied_folder_has_a_memory_of_its_own(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path / "run", tier, range(5), on_disk=range(2, 3))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert train(tmp_path / "copy", tier, range(3, 5)) == [(2, "disk")] * 2
    assert train(tmp_path / "copy", tier) == [(4, "memory")] * 2
    (tmp_path / "run").rename(tmp_path / "moved")
    assert train(tmp_path / "moved", tier) == [(4, "memory")] * 2


def test_memory_of_a_folder_that_changed_hands_is_said_to_be_left(
    tmp_path: Path, tier: MemoryTier, caplog: pytest.LogCaptureFixture
) -> None:
    def say(engine: SyncCheckpointEngine, rank: int) -> None:
        said = [record.message for record in caplog.records if getattr(record, "event", "") == "memory_ignored"]
        assert [rank for each in said if f"rank-{rank:05d} before its files" in each] == ([rank] if changed else [])

    changed = False
    train(tmp_path, tier, range(2), on_disk=range(1), then=say)
    train(tmp_path, tier, then=say)
    (tmp_path / "group.json").chmod(0o600)
    changed = True
    assert train(tmp_path, tier, then=say) == [(0, "disk")] * 2


def test_an_older_image_of_the_disk_is_put_back(tmp_path: Path, tier: MemoryTier) -> None:
    store = tmp_path / "run"
    train(store, tier, range(2), on_disk=range(1, 2))
    shutil.copytree(store, tmp_path / "image")
    train(store, tier, range(2, 6), on_disk=range(3, 4))
    for file in (tmp_path / "image").glob("rank-*/*"):  # in place: the inodes stay
        (store / file.relative_to(tmp_path / "image")).write_bytes(file.read_bytes())
    assert train(store, tier) == [(1, "disk")] * 2


def test_an_older_image_of_the_same_run_is_overtaken_unless_memory_is_cleared(tmp_path: Path, tier: MemoryTier) -> None:
    """A known limit, which the guide names: no record on disk says that it was newer."""
    store, image = tmp_path / "run", tmp_path / "image"

    def copy(engine: SyncCheckpointEngine, rank: int) -> None:
        meet_at(marks, rank, "saved")
        if rank == 0:
            shutil.copytree(store, image)
        meet_at(marks, rank, "copied")
        engine.checkpoint(state_of(rank, 1), step=1).result(20)
        engine.checkpoint(state_of(rank, 2), step=2, tier="memory").wait_reached("memory", 20)

    marks = marks_of(store)
    train(store, tier, range(1), on_disk=range(1), then=copy)
    for file in image.glob("rank-*/*"):  # in place: the inodes stay
        (store / file.relative_to(image)).write_bytes(file.read_bytes())
    assert [info.step for info in list_checkpoints(store)] == [0]
    assert train(store, tier) == [(2, "memory")] * 2
    (found,) = list_memory(tier.path)
    clear_memory(found.path)
    assert train(store, tier) == [(0, "disk")] * 2


def test_a_tool_that_rejects(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(5), on_disk=range(1, 4), keep_last=2)
    reject(tmp_path, step=3)
    assert train(tmp_path, tier, keep_last=2) == [(2, "disk")] * 2


# -- another number of ranks


@pytest.mark.parametrize("worlds", [(3, 2), (2, 3)])
def test_another_number_of_ranks(tmp_path: Path, tier: MemoryTier, worlds: tuple[int, int]) -> None:
    before, after = worlds
    train(tmp_path, tier, range(4), on_disk=range(1, 2), world=before)
    assert train(tmp_path, tier, range(4, 6), world=after) == [(3, "memory")] * after
    assert train(tmp_path, tier, world=after) == [(5, "memory")] * after
    there = [child.name for child in part_of(tier, 0).parent.iterdir()]
    assert len(there) == after  # what no rank writes to went with a commit


# -- what is said


@pytest.mark.parametrize("late", [True, False])
def test_a_rank_that_does_not_open_the_tier_keeps_nobody_waiting(
    tmp_path: Path, tier: MemoryTier, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks, find = marks_of(tmp_path), group_memory._domain_of

    def domain_of(rank: int, folder: Path) -> str:
        if rank == 1 and late:
            wait_for(marks / "0")
        elif rank == 1:
            raise OSError(5, "input/output error")
        return find(folder)

    def work(group: Group) -> str:
        if late:
            group.timeout = 1.0
        monkeypatch.setattr(group_memory, "_domain_of", partial(domain_of, group.rank))
        with pytest.raises((GroupError, OSError)) as caught:
            engine_on(tmp_path, group, tier).open()
        meet_at(marks, group.rank)
        return str(caught.value)

    said = run_ranks(2, work)
    why = "ranks 1 did not open the tier in memory" if late else "rank 1 cannot open its tier in memory: OSError(5"
    assert why in said[0]
    assert list_checkpoints(tmp_path) == []
    assert train(tmp_path, tier, range(1)) == [(-1, "none")] * 2


def test_what_does_not_count_is_said(tmp_path: Path, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_memory, "MEMORY_ROOT", tier.path)

    def look(memory: MemoryTier | None, group: Group) -> list[str]:
        said = list[str]()
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.event) if hasattr(record, "event") else None  # type: ignore[method-assign]
        logging.getLogger("pccheck_async").addHandler(handler)
        engine = engine_on(tmp_path, group, memory).open()
        step = 9 if memory is None else 10
        engine.checkpoint(state_of(group.rank, step), step=step).result(20)
        (marks / f"{memory is None}{group.rank}").touch()
        wait_for(*(marks / f"{memory is None}{rank}" for rank in range(2)))
        return [event for event in said if event == "memory_ignored"]

    marks = marks_of(tmp_path)
    train(tmp_path, tier, range(3))
    assert run_ranks(2, partial(look, None)) == [["memory_ignored"]] * 2  # this engine has none
    assert run_ranks(2, partial(look, replace(tier, keep_last=2))) == [["memory_ignored"]] * 2


# -- damage


@SIZES
@pytest.mark.parametrize("whole_file", [True, False], ids=["no manifest", "a flipped bit"])
def test_damage_in_memory_drops_no_checkpoint(
    tmp_path: Path, tier: MemoryTier, elements: int, whole_file: bool
) -> None:
    train(tmp_path, tier, range(3), on_disk=range(2, 3), elements=elements)
    spoil_slots(part_of(tier, 1), whole=whole_file)
    assert train(tmp_path, tier, range(3, 4), elements=elements) == [(2, "memory"), (2, "disk")]
    assert train(tmp_path, tier, elements=elements) == [(3, "memory")] * 2


def test_damage_of_the_only_copy_takes_all_to_an_older_checkpoint(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(4), on_disk=range(1, 2))
    spoil_slots(part_of(tier, 1))
    assert train(tmp_path, tier, range(2, 3)) == [(1, "disk")] * 2
    assert train(tmp_path, tier) == [(2, "memory")] * 2


def test_damage_on_both_tiers_is_kept_apart_by_rank(tmp_path: Path, tier: MemoryTier) -> None:
    """Rank 0's copy on disk is damaged, rank 1's in memory: each has another one."""
    train(tmp_path, tier, range(3), on_disk=range(2, 3))
    spoil_slots(tmp_path / "rank-00000")
    spoil_slots(part_of(tier, 1))
    assert train(tmp_path, tier) == [(2, "memory"), (2, "disk")]


def spoil_slots(folder: Path, *, whole: bool = True) -> None:
    for slot in folder.glob("slot-*"):
        data = bytearray(slot.read_bytes())
        for at in range(100, len(data) if whole else 101, 64):
            data[at] ^= 1
        slot.write_bytes(bytes(data))


# -- while they train


def test_steps_are_saved_in_memory_on_all_ranks_alike(tmp_path: Path, tier: MemoryTier) -> None:
    def work(group: Group) -> list[tuple[int, str]]:
        saved = list[tuple[int, str]]()
        with SyncCheckpointEngine(tmp_path, group=group, memory=tier, interval=5) as engine:
            state: dict[str, Any] = {"w": torch.zeros(1000), "rank": group.rank}
            engine.restore(state)
            for step in range(12):
                with engine.step(state, step) as this_step:
                    state["w"] += 1
                if this_step.pending is not None:
                    this_step.pending.wait_reached("memory", 20)
                    saved.append((step, "disk" if step % 5 == 4 else "memory"))
            (marks / str(group.rank)).touch()
            wait_for(*(marks / str(rank) for rank in range(2)))
            assert engine.statistics().in_memory == len(saved)
        return saved

    marks = marks_of(tmp_path)
    first, second = run_ranks(2, work)
    assert first == second
    assert [step for step, _ in first] == [*range(12)]
    assert list_checkpoints(tmp_path)[0].step == 11


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_whose_memory_is_full_turns_the_tier_off_for_all(tmp_path: Path, tier: MemoryTier, victim: int) -> None:
    """The disk goes on, and what is due in memory alone ends without an error of training."""

    def work(group: Group) -> list[object]:
        engine = engine_on(tmp_path, group, tier).open()
        engine.checkpoint(state_of(group.rank, 0), step=0).result(20)
        if group.rank == victim:
            memory_of(engine).turn_off(OSError(28, "no space left"))
        with pytest.raises(CheckpointError, match="not in memory"):
            engine.checkpoint(state_of(group.rank, 1), step=1, tier="memory").wait_reached("memory", 20)
        pending = engine.checkpoint(state_of(group.rank, 2), step=2)
        info = pending.result(20)
        (marks / str(group.rank)).touch()
        wait_for(*(marks / str(rank) for rank in range(2)))
        return [info.step, [info.step for info in engine.checkpoints()][:1], memory_of(engine).off != ""]

    marks = marks_of(tmp_path)
    assert run_ranks(2, work) == [[2, [2], True]] * 2
    assert train(tmp_path, tier) == [(2, "disk")] * 2
    assert train(tmp_path, tier, range(3, 4)) == [(2, "disk")] * 2
    assert train(tmp_path, tier) == [(3, "memory")] * 2


def test_a_checkpoint_that_fails_on_disk_is_in_memory(tmp_path: Path, tier: MemoryTier) -> None:
    def work(group: Group) -> str:
        engine = engine_on(tmp_path, group, tier, on_error="warn").open()
        engine.checkpoint(state_of(group.rank, 0), step=0).result(20)
        if group.rank == 1:
            fail_on(probe(engine).store)
        pending = engine.checkpoint(state_of(group.rank, 1), step=1)
        pending.wait_reached("memory", 20)
        with pytest.raises(CheckpointError) as caught:
            pending.result(20)
        (marks / str(group.rank)).touch()
        wait_for(*(marks / str(rank) for rank in range(2)))
        return type(caught.value).__name__

    marks = marks_of(tmp_path)
    run_ranks(2, work)
    assert train(tmp_path, tier) == [(1, "memory")] * 2


def test_a_failure_on_disk_leaves_alone_what_is_still_on_its_way_to_memory(tmp_path: Path, tier: MemoryTier) -> None:
    def work(group: Group) -> None:
        engine = engine_on(tmp_path, group, tier, on_error="warn").open()
        engine.checkpoint(state_of(group.rank, 0), step=0).result(20)
        if group.rank == 1:
            fail_on(probe(engine).store)
        else:
            delay_on(memory_of(engine).store)
        pending = engine.checkpoint(state_of(group.rank, 1), step=1)
        pending.wait_reached("memory", 20)
        with pytest.raises(CheckpointError):
            pending.result(20)
        (marks / str(group.rank)).touch()
        wait_for(*(marks / str(rank) for rank in range(2)))

    marks = marks_of(tmp_path)
    run_ranks(2, work)
    assert train(tmp_path, tier) == [(1, "memory")] * 2


def test_a_call_that_raises_on_one_rank_fails_on_all(tmp_path: Path, tier: MemoryTier) -> None:
    def work(group: Group) -> list[int]:
        engine = engine_on(tmp_path, group, tier).open()
        for step, where in ((0, "disk"), (1, "memory"), (2, "disk"), (3, "memory")):
            state = state_of(group.rank, step)
            if step in (1, 2) and group.rank == 1:
                state["strange"] = object()
                with pytest.raises(CheckpointError):
                    engine.checkpoint(state, step=step, tier=where)  # type: ignore[arg-type]
            else:
                pending = engine.checkpoint(state, step=step, tier=where)  # type: ignore[arg-type]
                if step in (1, 2):
                    with pytest.raises(CheckpointError):
                        pending.wait_reached("memory", 20)
                    with suppress(CheckpointError):
                        pending.result(20)
                else:
                    pending.wait_reached("memory", 20)
                    assert where == "memory" or pending.result(20)
        (marks / str(group.rank)).touch()
        wait_for(*(marks / str(rank) for rank in range(2)))
        return [info.step for info in engine.checkpoints()]

    marks = marks_of(tmp_path)
    assert run_ranks(2, work) == [[3, 0]] * 2
    assert train(tmp_path, tier) == [(3, "memory")] * 2


def test_one_for_memory_alone_waits_for_its_place_beside_those_that_wait_for_the_disk(
    tmp_path: Path, tier: MemoryTier
) -> None:
    """The two before it have both places there, and are not admitted on disk yet."""

    def work(group: Group) -> None:
        engine = engine_on(tmp_path, group, tier).open()
        begin, scheduler = Store.begin_line, probe(engine).core.assembly.scheduler

        async def late(self: Store, line: Line) -> None:
            await until(lambda: len(scheduler.tasks) == 3)
            for _ in range(10):  # the third one waits for its place by now
                await asyncio.sleep(0)
            await begin(self, line)

        Store.begin_line = late  # type: ignore[method-assign]
        first, second, third = (
            engine.checkpoint(state_of(group.rank, step), step=step, tier=where)  # type: ignore[arg-type]
            for step, where in enumerate(("disk", "disk", "memory"))
        )
        third.wait_reached("memory", 20)
        assert [first.result(20).step, second.result(20).step] in ([0, 1], [1, 1])
        meet_at(marks, group.rank)

    marks = marks_of(tmp_path)
    run_ranks(2, work)
    assert train(tmp_path, tier) == [(2, "memory")] * 2


def test_a_restore_that_one_rank_cannot_begin_ends_for_all_without_the_tier(tmp_path: Path, tier: MemoryTier) -> None:
    def work(group: Group) -> list[int]:
        engine = engine_on(tmp_path, group, tier).open()
        engine.checkpoint(state_of(group.rank, 0), step=0).result(20)
        if group.rank == 1:
            memory_of(engine).turn_off(OSError(28, "no space left"))
        with pytest.raises(CheckpointError, match="not in memory"):  # from here on it is off for all
            engine.checkpoint(state_of(group.rank, 1), step=1, tier="memory").wait_reached("memory", 20)
        with pytest.raises(TypeError if group.rank == 1 else CheckpointError):
            engine.restore([1] if group.rank == 1 else state_of(0, -1))  # type: ignore[arg-type]
        found = restore_in(engine, group.rank, 500)[0]
        meet_at(marks, group.rank)
        return [found]

    marks = marks_of(tmp_path)
    assert run_ranks(2, work) == [[0]] * 2


def test_the_disk_goes_on_as_the_tier_ends_while_a_record_there_is_written(tmp_path: Path, tier: MemoryTier) -> None:
    def work(group: Group) -> None:
        engine = engine_on(tmp_path, group, tier).open()
        engine.checkpoint(state_of(group.rank, 0), step=0).result(20)
        memory, rewrite = memory_of(engine), Store.rewrite

        async def late(self: Store, make: Callable[[Record], Record]) -> None:
            if self is memory.store:
                (marks / "written").touch()
                await until(lambda: memory.off != "")
            await rewrite(self, make)

        Store.rewrite = late  # type: ignore[method-assign]
        if group.rank == 1:
            wait_for(marks / "written")
            memory.turn_off(OSError(28, "no space left"))
        for step in range(1, 4):
            engine.checkpoint(state_of(group.rank, step), step=step).result(20)
        meet_at(marks, group.rank)

    marks = marks_of(tmp_path)
    run_ranks(2, work)


def test_an_error_in_memory_that_nobody_foresaw_ends_that_tier_alone(tmp_path: Path, tier: MemoryTier) -> None:
    def work(group: Group) -> bool:
        engine = engine_on(tmp_path, group, tier).open()
        engine.checkpoint(state_of(group.rank, 0), step=0).result(20)
        member = driver_of(engine).member
        if group.rank == 1:
            member.record_durable = lambda: 1 / 0  # type: ignore[assignment, return-value]
        engine.checkpoint(state_of(group.rank, 1), step=1).result(20)
        with pytest.raises(CheckpointError, match="not in memory"):
            engine.checkpoint(state_of(group.rank, 2), step=2, tier="memory").wait_reached("memory", 20)
        engine.checkpoint(state_of(group.rank, 3), step=3).result(20)
        meet_at(marks, group.rank)
        return memory_of(engine).off != ""

    marks = marks_of(tmp_path)
    assert run_ranks(2, work) == [True] * 2


def test_a_disk_that_fails_before_the_run_began_ends_the_tier(tmp_path: Path, tier: MemoryTier) -> None:
    """No checkpoint in memory waits for the line that rank 1 cannot write, and closing does not either."""

    def work(group: Group) -> None:
        engine = engine_on(tmp_path, group, tier).open()
        if group.rank == 1:

            async def fails(self: Store, line: Line) -> None:
                raise WriteError(5, "input/output error", "commit")

            Store.begin_line = fails  # type: ignore[method-assign]
        pending = engine.checkpoint(state_of(group.rank, 0), step=0, tier="memory")
        with pytest.raises(CheckpointError, match="not in memory"):
            pending.wait_reached("memory", 20)
        engine.close()

    run_ranks(2, work)


def test_a_change_right_after_a_failure_on_disk(tmp_path: Path, tier: MemoryTier) -> None:
    """The rank on which it failed has not read the group's decision about that yet."""

    def work(group: Group) -> int:
        engine = engine_on(tmp_path, group, tier, on_error="warn").open()
        engine.checkpoint(state_of(group.rank, 0), step=0).result(20)
        if group.rank == 1:
            fail_on(probe(engine).store)
            client = probe(engine).core.peers._client  # type: ignore[attr-defined]
            learn, post, asked = client._learn, client.post, threading.Event()

            def held(decision: AnyDecision) -> None:
                if isinstance(decision, Abort):
                    asked.wait(20)
                learn(decision)

            def noted(message: AnyMessage) -> None:
                if isinstance(message, ChangeRequest):
                    asked.set()
                post(message)

            client._learn, client.post = held, noted
        pending = engine.checkpoint(state_of(group.rank, 1), step=1)
        pending.wait_reached("memory", 20)
        with pytest.raises(CheckpointError):
            pending.result(20)
        pinned = engine.pin(step=0).step
        meet_at(marks, group.rank)
        return pinned

    marks = marks_of(tmp_path)
    assert run_ranks(2, work) == [0, 0]


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_an_interrupt_after_the_request_of_a_checkpoint_changes_nothing(
    tmp_path: Path, tier: MemoryTier, where: Literal["disk", "memory"]
) -> None:
    def fail_again(engine: SyncCheckpointEngine, rank: int) -> None:
        core = probe(engine).core
        if rank == 1:
            core.request_failed(core.in_flight.counter, 1, "KeyboardInterrupt as it was admitted", where)
        engine.checkpoint(state_of(rank, 2), step=2, tier="memory").wait_reached("memory", 10)
        engine.checkpoint(state_of(rank, 3), step=3).result(10)

    train(tmp_path, tier, range(2), on_disk=range(1, 2) if where == "disk" else range(1), then=fail_again)
    assert train(tmp_path, tier) == [(3, "memory")] * 2


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_an_error_of_the_machine_as_a_rank_votes_in_memory(
    tmp_path: Path, tier: MemoryTier, where: Literal["disk", "memory"]
) -> None:
    def fail(engine: SyncCheckpointEngine, rank: int) -> None:
        driver = driver_of(engine)
        decided = driver.decided

        async def fails(*_: object) -> bool:
            raise MemoryError("no memory for a thread")

        if rank == 1:
            driver.decided = fails  # type: ignore[method-assign, assignment]
        pending = engine.checkpoint(state_of(rank, 2), step=2, tier=where)
        with pytest.raises((CheckpointError, MemoryError)):
            pending.wait_reached("memory", 10)
        if where == "disk":
            pending.result(10)
        driver.decided = decided  # type: ignore[method-assign]
        engine.checkpoint(state_of(rank, 3), step=3, tier="memory").wait_reached("memory", 10)
        engine.checkpoint(state_of(rank, 4), step=4).result(10)

    train(tmp_path, tier, range(2), on_disk=range(1), then=fail, on_error="warn")
    assert train(tmp_path, tier) == [(4, "memory")] * 2


# -- leaving


def test_leaving_makes_the_newest_one_durable_and_takes_memory_away(tmp_path: Path, tier: MemoryTier) -> None:
    def work(group: Group) -> None:
        with engine_on(tmp_path, group, tier) as engine:
            engine.checkpoint(state_of(group.rank, 0), step=0).result(20)
            pending = engine.checkpoint(state_of(group.rank, 1), step=1, tier="memory")
            pending.wait_reached("memory", 20)
        assert pending.result(0).step == 1

    run_ranks(2, work)
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]
    assert list(Path(tier.path).iterdir()) == []
    assert train(tmp_path, tier) == [(1, "disk")] * 2


@pytest.mark.parametrize("verb", ["remove", "reject"])
@pytest.mark.parametrize("last_on_disk", [True, False])
def test_memory_follows_what_is_removed(tmp_path: Path, tier: MemoryTier, verb: str, last_on_disk: bool) -> None:
    def drop(engine: SyncCheckpointEngine, rank: int) -> None:
        getattr(engine, verb)(step=3)
        assert next(info.step for info in engine.checkpoints() if not info.rejected) == 2

    train(tmp_path, tier, range(4), on_disk=range(1, 4 if last_on_disk else 3), then=drop, keep_last=2)
    assert train(tmp_path, tier, keep_last=2) == [(2, "disk")] * 2


@pytest.mark.parametrize("verb", ["remove", "reject"])
def test_one_that_another_run_left_in_memory_alone_is_dropped(tmp_path: Path, tier: MemoryTier, verb: str) -> None:
    train(tmp_path, tier, range(3), on_disk=range(1, 2))
    assert drop_in(tmp_path, tier, verb, step=2) == [[2], [1]]
    assert [step for step, _ in train(tmp_path, tier)] == [1, 1]


def drop_in(path: Path, tier: MemoryTier, verb: str, step: int) -> list[list[int]]:
    """Restore, remove or reject from a step on, and die; return the steps that went, and the others."""

    def work(group: Group) -> list[list[int]]:
        engine = engine_on(path, group, tier).open()
        restore_in(engine, group.rank, 500)
        gone = [info.step for info in getattr(engine, verb)(step=step)]
        there = [info.step for info in engine.checkpoints() if not info.rejected]
        meet_at(marks, group.rank)
        return [gone, there]

    marks = marks_of(path)
    first, second = run_ranks(2, work)
    assert first == second
    return first  # type: ignore[no-any-return]


@pytest.mark.parametrize("verb", ["remove", "reject"])
def test_the_only_one_is_not_dropped_from_memory(tmp_path: Path, tier: MemoryTier, verb: str) -> None:
    train(tmp_path, tier, range(1))
    with pytest.raises(RankFailedError, match=r"StoreError: no c.* would be left"):
        drop_in(tmp_path, tier, verb, step=0)
    assert train(tmp_path, tier) == [(0, "memory")] * 2


def test_an_older_one_in_memory_alone_is_rejected_too(tmp_path: Path, shared_memory: Path) -> None:
    """The newest one there is written to disk before; step 2 is between both."""
    tier = MemoryTier(interval=1, path=str(shared_memory), keep_last=2)

    def drop(engine: SyncCheckpointEngine, rank: int) -> None:
        assert [info.step for info in engine.reject(step=2)] == [3, 2]
        assert [info.step for info in engine.checkpoints() if not info.rejected] == [1]

    train(tmp_path, tier, range(1, 4), on_disk=range(1, 2), keep_last=2, then=drop)
    assert train(tmp_path, tier, keep_last=2) == [(1, "disk")] * 2


def test_pins_are_the_disks(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(3), on_disk=range(1, 2))

    def pin(group: Group) -> None:
        engine = engine_on(tmp_path, group, tier).open()
        restore_in(engine, group.rank, 500)
        with pytest.raises(StoreError, match="in memory alone"):
            engine.pin(step=2)
        meet_at(marks, group.rank)

    marks = marks_of(tmp_path)
    run_ranks(2, pin)
    assert train(tmp_path, tier) == [(2, "memory")] * 2


@pytest.mark.parametrize("restores", [True, False])
def test_pinning_loses_nothing_in_memory(tmp_path: Path, tier: MemoryTier, restores: bool) -> None:
    train(tmp_path, tier, range(4), on_disk=range(1, 2))

    def pin(group: Group) -> None:
        engine = engine_on(tmp_path, group, tier).open()
        if restores:
            restore_in(engine, group.rank, 500)
        engine.pin(step=1)
        (marks / str(group.rank)).touch()
        wait_for(*(marks / str(rank) for rank in range(2)))

    marks = marks_of(tmp_path)
    run_ranks(2, pin)
    assert [(info.step, info.pinned) for info in list_checkpoints(tmp_path)] == [(1, True)]
    assert train(tmp_path, tier) == [(3, "memory")] * 2


def test_a_rank_that_leaves_alone_keeps_nobody_waiting(tmp_path: Path, tier: MemoryTier) -> None:
    """Its newest checkpoint is in memory alone; the others are told at their next one on disk, and save it with it."""

    def work(group: Group) -> None:
        engine = engine_on(tmp_path, group, tier).open()
        engine.checkpoint(state_of(group.rank, 0), step=0, tier="memory").wait_reached("memory", 20)
        if group.rank == 0:
            with pytest.raises(CheckpointError, match="rank 1 left before"):
                engine.checkpoint(state_of(0, 1), step=1).result(20)
        engine.close()

    run_ranks(2, work)
    assert [info.step for info in list_checkpoints(tmp_path)] == [0]
    assert train(tmp_path, tier) == [(0, "disk")] * 2


def test_closing_that_is_cancelled_ends_without_the_others(tmp_path: Path, tier: MemoryTier) -> None:
    """Rank 1 has no part in the last checkpoint: nothing is decided about it."""

    async def close(group: Group) -> None:
        engine = await CheckpointEngine(tmp_path, group=group, memory=tier, save_last=False).open()
        await engine.checkpoint(state_of(group.rank, 0), step=0)
        await engine.drain()
        if group.rank == 1:
            await asyncio.to_thread(wait_for, marks / "0")
            return
        await engine.checkpoint(state_of(0, 1), step=1)
        member = driver_of(engine).member
        await until(lambda: any(job.phase is _Phase.PREPARED for job in member._jobs.values()))
        closing = asyncio.create_task(engine.close())
        await until(lambda: member._left)
        closing.cancel()
        done, _ = await asyncio.wait((closing,), timeout=10)
        (marks / "0").touch()
        assert done

    marks = marks_of(tmp_path)
    run_ranks(2, lambda group: asyncio.run(close(group)))
    assert [step for step, _ in train(tmp_path, tier)] == [0, 0]


def test_a_run_that_only_restored_leaves_memory_as_it_is(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(4), on_disk=range(1, 2))

    def look(group: Group) -> int:
        with engine_on(tmp_path, group, tier) as engine:
            return restore_in(engine, group.rank, 500)[0]

    assert run_ranks(2, look) == [3, 3]
    assert train(tmp_path, tier) == [(3, "memory")] * 2


# -- reading without an engine


def test_others_read_it_from_memory_beside_the_group(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(4), on_disk=range(1, 2))
    state = load_sync(tmp_path, tier=tier)
    assert (state["step"], state["rank"]) == (3, 0)
    assert load_sync(tmp_path, tier=tier, rank=1)["rank"] == 1
    with open_checkpoint(tmp_path, tier=tier, rank=1) as checkpoint:
        assert checkpoint.info.tiers == ("memory",)
        assert torch.equal(checkpoint.load()["tensor"], state_of(1, 3)["tensor"])
    assert memory_infos(tmp_path, tier.path)[0].step == 3  # records may name older ones until the next commit
    (found,) = list_memory(tier.path)
    assert (found.origin, [info.step for info in found.infos][:1], found.in_use) == (str(tmp_path), [3], False)
    train(tmp_path, None, range(4, 5))
    with pytest.raises(CheckpointError):  # it does not count any more
        load_sync(tmp_path, tier=tier)
    assert clear_memory(found.path) > 0
    assert list_memory(tier.path) == []


def test_one_that_ranks_have_open_is_not_cleared(tmp_path: Path, tier: MemoryTier) -> None:
    def look(engine: SyncCheckpointEngine, rank: int) -> None:
        (found,) = list_memory(tier.path)
        assert found.in_use
        with pytest.raises(StoreLockedError):
            clear_memory(found.path)

    train(tmp_path, tier, range(2), then=look)


# -- several hosts with one disk


def _hosts(shared_memory: Path, hosts: list[int], path: Path) -> Callable[[int], tuple[Path, MemoryTier]]:
    for host in {*hosts}:
        (shared_memory / f"{host}").mkdir(exist_ok=True)
    return lambda rank: (path, MemoryTier(interval=1, path=str(shared_memory / f"{hosts[rank]}")))


def test_ranks_that_come_back_on_other_hosts_get_their_parts_from_memory_there(
    tmp_path: Path, shared_memory: Path
) -> None:
    train(tmp_path, None, range(4), on_disk=range(1, 2), places=_hosts(shared_memory, [0, 1], tmp_path))
    swapped = partial(train, tmp_path, None, places=_hosts(shared_memory, [1, 0], tmp_path))
    assert swapped() == [(3, "memory")] * 2
    assert swapped(range(4, 6)) == [(3, "memory")] * 2
    assert swapped() == [(5, "memory")] * 2


def _shard(rank: int, world: int, value: float | None = None) -> dict[str, Any]:
    """Return a rank's range of a tensor of 1200 elements, all equal to ``value`` or to their index."""
    first, end = rank * 1200 // world, (rank + 1) * 1200 // world
    local = torch.arange(first, end).float() if value is None else torch.full((end - first,), value)
    return {"w": FlatShard(local, (1200,), first)}


@pytest.mark.parametrize("saved_on_disk", [2, 1], ids=["also on disk", "in memory alone"])
def test_other_splits_read_parts_of_other_hosts_on_the_disk_of_all(
    tmp_path: Path, shared_memory: Path, saved_on_disk: int
) -> None:
    """What is in the memory of other hosts alone is passed over for what all see."""

    def save(group: Group) -> None:
        path, tier = _hosts(shared_memory, [0, 1], tmp_path)(group.rank)
        engine = engine_on(path, group, tier).open()
        for step in range(2):
            on_disk = step < saved_on_disk
            pending = engine.checkpoint(_shard(group.rank, 2), step=step, tier="disk" if on_disk else "memory")
            pending.result(20) if on_disk else pending.wait_reached("memory", 20)
        meet_at(marks, group.rank)

    def go_on(group: Group) -> tuple[int, bool]:
        path, tier = _hosts(shared_memory, [0, 1, 1], tmp_path)(group.rank)
        engine, state = engine_on(path, group, tier).open(), _shard(group.rank, 3, -1.0)
        planned = engine.restore(state, dry_run=True)
        assert planned is not None
        assert (planned.step, planned.error) == (saved_on_disk - 1, None)
        restored = engine.restore(state)
        assert restored is not None
        meet_at(marks, group.rank, "again", 3)
        return restored.step, torch.equal(state["w"].local, _shard(group.rank, 3)["w"].local)

    marks = marks_of(tmp_path)
    run_ranks(2, save)
    assert run_ranks(3, go_on) == [(saved_on_disk - 1, True)] * 3


def test_a_state_that_does_not_fit_is_no_reason_to_take_an_older_checkpoint(
    tmp_path: Path, shared_memory: Path
) -> None:
    places = _hosts(shared_memory, [0, 1], tmp_path)

    def save_smaller(engine: SyncCheckpointEngine, rank: int) -> None:
        engine.checkpoint(state_of(rank, 1, 300), step=1, tier="memory").wait_reached("memory", 20)

    def restore(group: Group) -> None:
        path, tier = places(group.rank)
        engine = engine_on(path, group, tier).open()
        with pytest.raises(StateMismatchError, match="tensor"):
            restore_in(engine, group.rank, 500)
        meet_at(marks, group.rank)

    marks = marks_of(tmp_path)
    train(tmp_path, None, range(1), on_disk=range(1), places=places, then=save_smaller)
    run_ranks(2, restore)


def test_what_all_have_alike_is_in_the_memory_of_each_host(tmp_path: Path, shared_memory: Path) -> None:
    """The disk is one for all, and has it twice then: a host reads no other host's memory."""

    def work(hosts: list[int], save: bool, group: Group) -> tuple[int, str] | None:
        path, tier = _hosts(shared_memory, hosts, tmp_path)(group.rank)
        alike = Group.of(group, replicated=["weights"])
        engine = engine_on(path, alike, tier).open()
        state: dict[str, Any] = {"weights": torch.zeros(5000), "rank": group.rank}
        restored = engine.restore(state)
        found = None if restored is None else (int(state["weights"][0]), restored.source)
        if save:
            state["weights"] += 7
            engine.checkpoint(state, step=7, tier="memory").wait_reached("memory", 20)
        (marks / f"{save}{group.rank}").touch()
        wait_for(*(marks / f"{save}{rank}" for rank in range(3)))
        return found

    marks = marks_of(tmp_path)
    assert run_ranks(3, partial(work, [0, 0, 1], True)) == [None] * 3
    assert run_ranks(3, partial(work, [0, 0, 1], False)) == [(7, "memory")] * 3


# -- in one run


def test_a_restore_within_the_run(tmp_path: Path, tier: MemoryTier) -> None:
    def go_back(engine: SyncCheckpointEngine, rank: int) -> None:
        assert restore_in(engine, rank, 500) == (4, "memory")
        assert restore_in(engine, rank, 500, step=2)[0] == 2
        engine.checkpoint(state_of(rank, 3), step=3, tier="memory").wait_reached("memory", 20)
        assert restore_in(engine, rank, 500) == (3, "memory")

    train(tmp_path, tier, range(5), on_disk=range(2, 3), then=go_back)
    assert train(tmp_path, tier) == [(3, "memory")] * 2


def test_a_torn_capture_is_in_no_tier(tmp_path: Path, tier: MemoryTier) -> None:
    def tear(engine: SyncCheckpointEngine, rank: int) -> None:
        check = Store.finish_data

        async def torn(self: Store, written: Written) -> None:
            if rank == 1 and self is memory_of(engine).store:
                await self.release(written.lease)
                raise TornCaptureError("the optimizer changed it")
            await check(self, written)

        Store.finish_data = torn  # type: ignore[method-assign]
        pending = engine.checkpoint(state_of(rank, 2), step=2)
        for wait in (partial(pending.wait_reached, "memory"), pending.result):
            with pytest.raises(TornCaptureError):
                wait(20)
        Store.finish_data = check  # type: ignore[method-assign]
        with suppress(CheckpointError):
            engine.drain()

    train(tmp_path, tier, range(2), on_disk=range(1, 2), then=tear)
    assert train(tmp_path, tier) == [(1, "memory")] * 2


def test_the_interval_is_chosen_by_rank_0(tmp_path: Path, shared_memory: Path) -> None:
    def work(group: Group) -> list[int]:
        saved = list[int]()
        with SyncCheckpointEngine(tmp_path, group=group, memory=MemoryTier(path=str(shared_memory))) as engine:
            state: dict[str, Any] = {"w": torch.zeros(1000), "rank": group.rank}
            for step in range(40):
                with engine.step(state, step) as this_step:
                    state["w"] += 1
                    time.sleep(0.005)
                if this_step.pending is not None:
                    saved.append(step)
        return saved

    first, second = run_ranks(2, work)
    assert first == second
    assert first
    assert list_checkpoints(tmp_path)[0].step == 39
