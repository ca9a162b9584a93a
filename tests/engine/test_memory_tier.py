"""The tier in memory: what survives the process is restored, and only where the store on disk goes on from it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import (
    CheckpointEngine,
    MemoryTier,
    StorageOptions,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
)
from pccheck_async.engine.peers import Alone
from pccheck_async.engine.scheduler import Scheduler
from pccheck_async.errors import CheckpointError, StoreError, StoreLockedError, TornCaptureError, WriteError
from pccheck_async.format import Identity
from pccheck_async.format.record import decode_identity, newest_record, slot_name
from pccheck_async.medium.mapped import MappedFiles
from pccheck_async.policies import Decision, SaveReport, StepReport
from pccheck_async.store import PartReader
from pccheck_async.stores import pin, reject, remove
from pccheck_async.testing.probe import probe
from tests.support.children import fork, in_child

SIZES = pytest.mark.parametrize("elements", [500, 300_000], ids=["one request", "chunks"])


@pytest.fixture
def tier(shared_memory: Path) -> MemoryTier:
    return MemoryTier(interval=1, path=str(shared_memory))


def state_of(step: int, elements: int = 500) -> dict[str, Any]:
    return {"tensor": torch.arange(elements) + step, "step": step}


def engine_on(path: Path, memory: MemoryTier | None, **settings: Any) -> SyncCheckpointEngine:
    return SyncCheckpointEngine(path, memory=memory, save_last=False, **settings)


def train(
    path: Path, memory: MemoryTier | None, steps: range, *, on_disk: range = range(0), elements: int = 500
) -> int:
    """Save steps in memory, some also on disk, and die; what was restored before them, -1 for nothing."""

    def work() -> int:
        engine = engine_on(path, memory).open()
        state = state_of(-1, elements)
        restored = engine.restore(state)
        found = -1 if restored is None else restored.step
        assert state["step"] == found
        assert torch.equal(state["tensor"], state_of(found, elements)["tensor"])
        for step in steps:
            tier = "disk" if step in on_disk or memory is None else "memory"
            pending = engine.checkpoint(state_of(step, elements), step=step, tier=tier)  # type: ignore[arg-type]
            if memory is not None:
                pending.wait_reached("memory", 60)
            if tier == "disk":
                pending.result(60)
        return found

    return int(in_child(work))


def restored_by(path: Path, memory: MemoryTier | None, elements: int = 500) -> tuple[int, str]:
    """The step that a restart restores, and the tier that it comes from; nothing is saved."""

    def work() -> tuple[int, str]:
        state = state_of(-1, elements)
        restored = engine_on(path, memory).open().restore(state)
        if restored is None:
            return -1, "none"
        assert torch.equal(state["tensor"], state_of(restored.step, elements)["tensor"])
        return restored.step, restored.source

    step, source = in_child(work)
    return step, source


def folder_in(memory: MemoryTier) -> Path:
    (folder,) = Path(memory.path).iterdir()
    return folder


# -- a restart


@SIZES
def test_a_killed_process_goes_on_from_memory(tmp_path: Path, tier: MemoryTier, elements: int) -> None:
    train(tmp_path, tier, range(8), on_disk=range(3, 5), elements=elements)
    assert [info.step for info in list_checkpoints(tmp_path)] == [4]
    assert restored_by(tmp_path, tier, elements) == (7, "memory")
    assert restored_by(tmp_path, None, elements) == (4, "disk")
    assert restored_by(tmp_path, tier, elements) == (7, "memory")  # reading changed nothing
    assert train(tmp_path, tier, range(8, 10), elements=elements) == 7
    assert restored_by(tmp_path, tier, elements) == (9, "memory")


@SIZES
def test_the_newest_one_is_read_from_memory_though_it_is_on_disk(
    tmp_path: Path, tier: MemoryTier, elements: int
) -> None:
    train(tmp_path, tier, range(3), on_disk=range(3), elements=elements)
    assert restored_by(tmp_path, tier, elements) == (2, "memory")
    assert restored_by(tmp_path, None, elements) == (2, "disk")


def test_before_the_first_checkpoint_on_disk(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(3))
    assert list_checkpoints(tmp_path) == []
    assert restored_by(tmp_path, tier) == (2, "memory")


def test_many_restarts_keep_the_line(tmp_path: Path, tier: MemoryTier) -> None:
    for run in range(12):
        on_disk = range(run * 3, run * 3 + 1) if run % 4 == 1 else range(0)
        assert train(tmp_path, tier, range(run * 3, run * 3 + 3), on_disk=on_disk) == run * 3 - 1


def test_the_machine_is_lost(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(5), on_disk=range(2, 3))
    shutil.rmtree(folder_in(tier))
    assert train(tmp_path, tier, range(3, 6)) == 2
    assert restored_by(tmp_path, tier) == (5, "memory")


def test_what_a_run_goes_on_from_stays_until_its_first_checkpoint_is_there(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(5), on_disk=range(2, 3))

    def killed_in_its_first_save() -> int:
        engine = engine_on(tmp_path, tier).open()
        restored = engine.restore(state_of(-1))
        assert restored is not None
        entered = threading.Event()

        async def hang(self: Alone, *arguments: Any, **named: Any) -> None:
            entered.set()
            await asyncio.sleep(3600)

        Alone.commit_in_memory = hang  # type: ignore[method-assign]  # in a process of its own
        engine.checkpoint(state_of(5), step=5, tier="memory")
        assert entered.wait(60)
        return restored.step

    assert in_child(killed_in_its_first_save) == 4
    assert restored_by(tmp_path, tier) == (4, "memory")


# -- what memory must not bring back


def test_a_run_that_began_anew(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(5), on_disk=range(2, 3))

    def anew() -> None:
        engine = engine_on(tmp_path, tier, overwrite=True).open()
        engine.checkpoint(state_of(0), step=0, tier="memory").wait_reached("memory", 60)
        engine.checkpoint(state_of(1), step=1).result(60)

    in_child(anew)
    assert restored_by(tmp_path, tier) == (1, "memory")
    shutil.rmtree(folder_in(tier))
    assert restored_by(tmp_path, tier) == (1, "disk")


def test_a_run_that_went_on_from_an_older_step(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(6), on_disk=range(2, 3))

    def back() -> int:
        engine = engine_on(tmp_path, tier).open()
        restored = engine.restore(state_of(-1), step=2)
        assert restored is not None
        engine.checkpoint(state_of(3), step=3, tier="memory").wait_reached("memory", 60)
        return restored.step

    assert in_child(back) == 2
    assert restored_by(tmp_path, tier) == (3, "memory")  # and not step 5 of the run before


def test_a_run_on_another_host_in_between(tmp_path: Path, shared_memory: Path) -> None:
    here, there = (MemoryTier(interval=1, path=str(shared_memory / name)) for name in ("here", "there"))
    for each in (here, there):
        Path(each.path).mkdir()
    train(tmp_path, here, range(5), on_disk=range(2, 3))
    assert train(tmp_path, there, range(3, 9), on_disk=range(6, 7)) == 2  # here's memory is not there
    assert restored_by(tmp_path, here) == (6, "disk")  # there's memory is not here, and here's is left behind
    assert restored_by(tmp_path, there) == (8, "memory")


def test_a_run_without_the_tier_in_between(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(5), on_disk=range(2, 3))
    train(tmp_path, None, range(3, 4))
    assert restored_by(tmp_path, tier) == (3, "disk")


def test_an_older_image_of_the_disk_is_put_back(tmp_path: Path, tier: MemoryTier) -> None:
    store = tmp_path / "run"
    train(store, tier, range(2), on_disk=range(1, 2))
    shutil.copytree(store, tmp_path / "image")
    assert train(store, tier, range(2, 6), on_disk=range(3, 4)) == 1
    for name in ("commit", "slot-000", "slot-001", "slot-002"):  # in place: the inodes stay
        if (tmp_path / "image" / name).exists():
            (store / name).write_bytes((tmp_path / "image" / name).read_bytes())
    assert restored_by(store, tier) == (1, "disk")


def test_a_copied_folder_has_a_memory_of_its_own(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path / "run", tier, range(5), on_disk=range(2, 3))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert restored_by(tmp_path / "copy", tier) == (2, "disk")
    assert train(tmp_path / "copy", tier, range(3, 5)) == 2
    assert restored_by(tmp_path / "copy", tier) == (4, "memory")
    assert restored_by(tmp_path / "run", tier) == (4, "memory")


@pytest.mark.parametrize("tool", [remove, reject])
def test_a_tool_that_drops_checkpoints(tmp_path: Path, tier: MemoryTier, tool: Callable[..., object]) -> None:
    def work() -> None:
        engine = engine_on(tmp_path, tier, keep_last=2).open()
        for step in range(3):
            engine.checkpoint(state_of(step), step=step).result(60)

    in_child(work)
    tool(tmp_path, step=2)
    assert restored_by(tmp_path, tier) == (1, "disk")


def test_a_tool_that_pins_leaves_memory_as_it_is(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(5), on_disk=range(2, 3))
    pin(tmp_path, step=2)
    assert restored_by(tmp_path, tier) == (4, "memory")


@pytest.mark.parametrize("verb", ["remove", "reject"])
@pytest.mark.parametrize("last_on_disk", [True, False])
def test_the_engine_drops_it_in_memory_too(tmp_path: Path, tier: MemoryTier, verb: str, last_on_disk: bool) -> None:
    def work() -> list[int]:
        engine = engine_on(tmp_path, tier, keep_last=2).open()
        for step in range(3):
            engine.checkpoint(state_of(step), step=step, tier="disk" if step < 2 or last_on_disk else "memory")
        engine.drain()
        getattr(engine, verb)(step=2)
        return [info.step for info in engine.checkpoints() if not info.rejected]

    assert in_child(work) == [1]
    assert restored_by(tmp_path, tier) == (1, "disk")


def test_a_rejected_one_does_not_stay_in_memory_once_the_disk_drops_it(tmp_path: Path, shared_memory: Path) -> None:
    """Only the disk's record has the mark: without it the checkpoint in memory would be restored."""
    memory = MemoryTier(interval=1, path=str(shared_memory), keep_last=3)

    def work() -> list[int]:
        engine = engine_on(tmp_path, memory, keep_last=2).open()
        for step in range(3):
            engine.checkpoint(state_of(step), step=step).result(60)
        engine.reject(step=2)
        engine.checkpoint(state_of(3), step=3).result(60)
        found = [info.step for info in engine.checkpoints()]
        engine.reject(step=3)
        return found

    assert in_child(work) == [3, 1, 0]  # step 0 is in memory alone, which keeps three
    assert restored_by(tmp_path, memory)[0] == 1


def test_one_that_is_rejected_in_flight_does_not_come_to_memory(
    tmp_path: Path, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No record has the mark, so that after a kill nothing else would keep it from being restored."""
    admitted, entered, go = Alone.admitted_in_memory, threading.Event(), threading.Event()

    async def held(self: Alone, counter: int) -> bool:
        entered.set()
        await asyncio.to_thread(go.wait, 60)
        return await admitted(self, counter)

    def work() -> list[int]:
        engine = engine_on(tmp_path, tier, keep_last=2).open()
        engine.checkpoint(state_of(1), step=1).result(60)
        monkeypatch.setattr(Alone, "admitted_in_memory", held)
        engine.checkpoint(state_of(2), step=2, tier="memory")
        assert entered.wait(60)
        assert engine.reject(step=2) == []
        go.set()
        engine.drain()
        return [info.step for info in engine.checkpoints()]

    assert in_child(work) == [1]
    assert restored_by(tmp_path, tier)[0] == 1


def test_pinning_one_that_is_in_memory_alone_makes_it_durable(tmp_path: Path, tier: MemoryTier) -> None:
    with engine_on(tmp_path, tier) as engine:
        engine.checkpoint(state_of(1), step=1, tier="memory")
        engine.drain()
        assert engine.pin(step=1).pinned
        assert [(info.step, info.pinned) for info in list_checkpoints(tmp_path)] == [(1, True)]


# -- damage


def test_pinning_beside_one_that_is_on_its_way_to_the_disk_writes_it_once(
    tmp_path: Path, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_on(tmp_path, tier, keep_last=3) as engine:
        engine.checkpoint(state_of(1), step=1).result(60)
        commit, entered, go = Alone.commit, threading.Event(), threading.Event()

        async def held(self: Alone, *arguments: Any) -> bool:
            entered.set()
            await asyncio.to_thread(go.wait, 60)
            return await commit(self, *arguments)

        monkeypatch.setattr(Alone, "commit", held)
        pending = engine.checkpoint(state_of(2), step=2)
        assert entered.wait(60)  # it is committed in memory by now
        with ThreadPoolExecutor() as threads:
            pins = [threads.submit(engine.pin, step=1) for _ in range(2)]
            done, _ = wait(pins, 0.5)
            monkeypatch.undo()
            go.set()
            assert pending.result(60).step == 2
            assert [pin.result(60).step for pin in pins] == [1, 1]
        assert not done
        engine.checkpoint(state_of(3), step=3).result(60)
        assert [(info.step, info.pinned) for info in engine.checkpoints()] == [(3, False), (2, False), (1, True)]


def flip(folder: Path, offset: int = 100) -> None:
    for slot in folder.glob("slot-*"):
        with open(slot, "r+b") as file:
            file.seek(offset)
            (byte,) = file.read(1)
            file.seek(offset)
            file.write(bytes([byte ^ 1]))


@SIZES
def test_a_bit_that_flipped_in_memory_costs_the_copy_alone(
    tmp_path: Path, tier: MemoryTier, elements: int, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, tier, range(4), on_disk=range(3, 4), elements=elements)
    flip(folder_in(tier))
    with engine_on(tmp_path, tier) as engine:
        state = state_of(-1, elements)
        restored = engine.restore(state)
        assert restored is not None
        assert (restored.step, restored.source) == (3, "disk")
        assert torch.equal(state["tensor"], state_of(3, elements)["tensor"])
    assert "the copy in memory of step 3 cannot be read" in caplog.text


def test_of_one_in_memory_alone_it_costs_the_step(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(4), on_disk=range(1, 2))
    flip(folder_in(tier))
    with engine_on(tmp_path, tier) as engine:
        with pytest.warns(RuntimeWarning, match=r"step 3 cannot be read.*step 1"):
            restored = engine.restore(state_of(-1))
        assert restored is not None
        assert (restored.step, restored.source) == (1, "disk")


def test_a_damaged_disk_is_passed_over_for_an_older_one_in_memory(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(4), on_disk=range(3, 4))
    flip(tmp_path)
    assert restored_by(tmp_path, tier) == (3, "memory")


def test_a_line_leaves_the_superseded_one_readable(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, None, range(2))
    train(tmp_path, tier, range(2, 3))
    shutil.rmtree(folder_in(tier))
    newest = newest_record((tmp_path / "commit").read_bytes(), identity_of(tmp_path).id_bytes)
    assert newest is not None
    assert newest.line is not None
    with open(tmp_path / slot_name(newest.entries[0].slot), "r+b") as slot:
        slot.write(b"?" * 100)
    with engine_on(tmp_path, tier) as engine, pytest.warns(RuntimeWarning, match="falling back to step 0"):
        engine.restore(state_of(-1))


def test_what_goes_on_from_a_superseded_one_counts_in_memory(tmp_path: Path, tier: MemoryTier) -> None:
    """The record that names the superseded one again has the line of the run that restored it."""
    train(tmp_path, None, range(2))
    newest = newest_record((tmp_path / "commit").read_bytes(), identity_of(tmp_path).id_bytes)
    assert newest is not None
    with open(tmp_path / slot_name(newest.entries[0].slot), "r+b") as slot:
        slot.write(b"?" * 100)

    def work() -> None:
        engine = engine_on(tmp_path, tier).open()
        with pytest.warns(RuntimeWarning, match="falling back to step 0"):
            engine.restore(state_of(-1))
        engine.checkpoint(state_of(1), step=1, tier="memory").wait_reached("memory", 60)

    in_child(work)
    assert restored_by(tmp_path, tier) == (1, "memory")


def identity_of(store: Path) -> Identity:
    return decode_identity((store / "store.json").read_bytes())


@pytest.mark.parametrize("name", ["commit", "store.json"])
def test_a_store_in_memory_that_cannot_be_read_is_begun_anew(tmp_path: Path, tier: MemoryTier, name: str) -> None:
    train(tmp_path, tier, range(4), on_disk=range(1, 2))
    (folder_in(tier) / name).write_bytes(b"?" * 70)
    assert train(tmp_path, tier, range(2, 4)) == 1
    assert restored_by(tmp_path, tier) == (3, "memory")


@pytest.mark.parametrize(
    "offsets", [(0, 40, 120), pytest.param((9, 20, 70, 90), marks=pytest.mark.campaign)], ids=["some", "the others"]
)
def test_a_damaged_record_in_memory(tmp_path: Path, tier: MemoryTier, offsets: tuple[int, ...]) -> None:
    train(tmp_path, tier, range(2), on_disk=range(1))
    folder = folder_in(tier)
    shutil.copytree(folder, tmp_path / "whole")
    for offset in offsets:
        with open(folder / "commit", "r+b") as file:
            for region in range(4):
                byte = (tmp_path / "whole" / "commit").read_bytes()[region * 65536 + offset]
                file.seek(region * 65536 + offset)
                file.write(bytes([byte ^ 4]))
        assert restored_by(tmp_path, tier) == (0, "disk")
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "whole", folder)
        assert restored_by(tmp_path, tier) == (1, "memory")


def test_a_forked_child_holds_nothing(tmp_path: Path, tier: MemoryTier) -> None:
    number = tmp_path / "child"

    def work() -> None:
        engine = engine_on(tmp_path / "run", tier).open()
        engine.checkpoint(state_of(1), step=1, tier="memory").wait_reached("memory", 60)
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)  # it outlives its parent
            time.sleep(60)
            os._exit(0)
        number.write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(fork(work), 0)
    child = int(number.read_text())
    try:
        assert restored_by(tmp_path / "run", tier) == (1, "memory")
        os.kill(child, 0)  # it is there still
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_second_engine_waits_for_the_first(tmp_path: Path, tier: MemoryTier) -> None:
    with engine_on(tmp_path, tier) as engine:
        engine.checkpoint(state_of(1), step=1, tier="memory").wait_reached("memory", 60)
        with pytest.raises(StoreLockedError):
            engine_on(tmp_path, tier, storage=StorageOptions(lock_timeout=0.1)).open()
        engine.checkpoint(state_of(2), step=2, tier="memory").wait_reached("memory", 60)
    assert load_sync(tmp_path)["step"] == 2


# -- its place


def test_another_users_folder_is_refused(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(2))
    folder_in(tier).chmod(0o755)
    with pytest.raises(StoreError, match="not a folder of this user's alone"):
        engine_on(tmp_path, tier).open()
    os.chown(folder_in(tier), 12345, 12345)
    folder_in(tier).chmod(0o700)
    with pytest.raises(StoreError, match="not a folder of this user's alone"):
        engine_on(tmp_path, tier).open()


def test_a_link_is_refused(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(2))
    folder = folder_in(tier)
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")
    with pytest.raises(StoreError, match="not a folder of this user's alone"):
        engine_on(tmp_path, tier).open()


def test_a_disk_is_no_memory(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="needs a tmpfs"):
        engine_on(tmp_path / "run", MemoryTier(path=str(tmp_path))).open()


@pytest.mark.parametrize("free", [100_000, 1_000_000], ids=["for no slot", "for one of several"])
def test_memory_that_is_too_small_is_told_and_the_disk_goes_on(
    tmp_path: Path, tier: MemoryTier, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    monkeypatch.setattr("pccheck_async.engine.memory.free_bytes", lambda folder: free)
    with engine_on(tmp_path, tier) as engine:
        info = engine.checkpoint(state_of(1, 100_000), step=1).result(60)
        assert info.step == 1
        pending = engine.checkpoint(state_of(2, 100_000), step=2, tier="memory")
        assert pending.result(60).step == 2
        assert not pending.superseded
        engine.checkpoint(state_of(3, 100_000), step=3).result(60)
    assert caplog.text.count("the memory tier is off") == 1
    assert "mount -o remount,size=" in caplog.text
    assert "--shm-size=" in caplog.text
    assert load_sync(tmp_path)["step"] == 3


@pytest.mark.parametrize("left", [4096, 1 << 20])
@pytest.mark.parametrize("memory_alone", [False, True])
def test_a_slot_that_is_cut_off_while_it_runs(
    tmp_path: Path, tier: MemoryTier, caplog: pytest.LogCaptureFixture, left: int, memory_alone: bool
) -> None:
    elements = 300_000
    with engine_on(tmp_path, tier, storage=StorageOptions(chunk_bytes=256 << 10)) as engine:
        for _ in range(2):  # then no slot has to be made
            engine.checkpoint(state_of(0, elements), step=0).result(60)
        for slot in folder_in(tier).glob("slot-*"):
            os.truncate(slot, left)
        pending = engine.checkpoint(state_of(1, elements), step=1, tier="memory" if memory_alone else "disk")
        assert pending.result(60).step == 1
        assert not pending.superseded
        assert pending.progress.captured == pending.progress.nbytes
        assert torch.equal(load_sync(tmp_path)["tensor"], state_of(1, elements)["tensor"])
        engine.checkpoint(state_of(2, elements), step=2).result(60)
    assert caplog.text.count("the memory tier is off") == 1
    assert load_sync(tmp_path)["step"] == 2


def test_a_slot_that_is_cut_off_fails_what_is_captured_beside_training(tmp_path: Path, tier: MemoryTier) -> None:
    """Training may have changed by now what was in the lost memory alone."""
    model = torch.nn.Linear(500, 500)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with engine_on(tmp_path, tier) as engine:
        engine.attach(optimizer)
        for _ in range(2):
            engine.checkpoint(state, step=0).result(60)
        for slot in folder_in(tier).glob("slot-*"):
            os.truncate(slot, 4096)
        pending = engine.checkpoint(state, step=1, overlap=True)
        with pytest.raises(CheckpointError, match=r"step 1 was captured into memory that failed.*slot"):
            pending.result(60)
        engine.checkpoint(state, step=2, overlap=True).result(60)


@SIZES
@pytest.mark.parametrize("overlap", [False, True])
def test_a_record_in_memory_that_is_cut_off_costs_nothing_on_disk(
    tmp_path: Path, tier: MemoryTier, caplog: pytest.LogCaptureFixture, elements: int, overlap: bool
) -> None:
    with engine_on(tmp_path, tier) as engine:
        for step in range(2):
            engine.checkpoint(state_of(step, elements), step=step).result(60)
        os.truncate(folder_in(tier) / "commit", 0)
        pending = engine.checkpoint(state_of(2, elements), step=2, overlap=overlap)
        assert pending.result(60).step == 2
        with pytest.raises(CheckpointError, match="not in memory"):
            pending.wait_reached("memory", 60)
        assert torch.equal(load_sync(tmp_path)["tensor"], state_of(2, elements)["tensor"])
        engine.checkpoint(state_of(3, elements), step=3).result(60)
    assert caplog.text.count("the memory tier is off") == 1
    assert load_sync(tmp_path)["step"] == 3


def test_a_record_in_memory_that_is_cut_off_fails_what_is_due_there_alone(tmp_path: Path, tier: MemoryTier) -> None:
    with engine_on(tmp_path, tier) as engine:
        engine.checkpoint(state_of(1), step=1).result(60)
        os.truncate(folder_in(tier) / "commit", 0)
        with pytest.raises(CheckpointError, match="step 2 is not in memory"):
            engine.checkpoint(state_of(2), step=2, tier="memory").wait_reached("memory", 60)
        engine.checkpoint(state_of(3), step=3, tier="memory").result(60)
    assert load_sync(tmp_path)["step"] == 3


def test_a_record_in_memory_that_is_cut_off_before_the_first_save(
    tmp_path: Path, tier: MemoryTier, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, tier, range(3), on_disk=range(1, 2))
    with engine_on(tmp_path, tier, overwrite=True) as engine:
        os.truncate(folder_in(tier) / "commit", 0)
        for step in range(3, 6):
            assert engine.checkpoint(state_of(step), step=step).result(60).step == step
    assert caplog.text.count("the memory tier is off") == 1
    assert restored_by(tmp_path, tier) == (5, "disk")


def test_a_slot_that_is_cut_off_is_not_read(tmp_path: Path, tier: MemoryTier, caplog: pytest.LogCaptureFixture) -> None:
    elements = 300_000
    train(tmp_path, tier, range(2), on_disk=range(2), elements=elements)
    with engine_on(tmp_path, tier) as engine:
        for slot in folder_in(tier).glob("slot-*"):
            os.truncate(slot, 4096)
        state = state_of(-1, elements)
        restored = engine.restore(state)
        assert restored is not None
        assert (restored.step, restored.source) == (1, "disk")
        assert torch.equal(state["tensor"], state_of(1, elements)["tensor"])
    assert "the copy in memory of step 1 cannot be read" in caplog.text


@SIZES
@pytest.mark.parametrize("before", ["its manifest is read", "it is written"])
def test_a_slot_that_is_cut_off_as_it_is_made_durable(
    tmp_path: Path, tier: MemoryTier, elements: int, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped file that is read beyond its end kills the process."""

    def cut_off() -> None:
        for slot in folder_in(tier).glob("slot-*"):
            os.truncate(slot, 0)

    verify, write_staged = PartReader.verify, Scheduler._write_staged

    async def cut_off_when_verified(self: PartReader) -> None:
        await verify(self)
        cut_off()

    async def cut_off_and_written(self: Scheduler, *arguments: Any) -> None:
        cut_off()
        await write_staged(self, *arguments)

    def work() -> str:
        engine = engine_on(tmp_path, tier).open()
        engine.checkpoint(state_of(1, elements), step=1).result(60)
        engine.checkpoint(state_of(2, elements), step=2, tier="memory").wait_reached("memory", 60)
        if before == "it is written":
            monkeypatch.setattr(Scheduler, "_write_staged", cut_off_and_written)
        else:
            monkeypatch.setattr(PartReader, "verify", cut_off_when_verified)
        with pytest.raises(CheckpointError, match="step 2 is in memory alone: the engine closed") as raised:
            engine.close()
        return str(raised.value)

    assert ("damaged" in in_child(work)) == (before == "its manifest is read")
    assert load_sync(tmp_path)["step"] == 1


def test_large_slots_are_made_beside_training(
    tmp_path: Path, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch, nothing_left_behind: None
) -> None:
    monkeypatch.setattr("pccheck_async.engine.memory._AT_ONCE", 0)
    state: dict[str, Any] = {"tensor": torch.zeros(300_000)}
    with SyncCheckpointEngine(tmp_path, interval=1000, memory=tier) as engine:
        assert engine.checkpoint(state, step=0).result(60).step == 0  # through staging memory
        for step in range(1, 200):
            with engine.step(state, step) as this:
                state["tensor"] += 1
            with suppress(CheckpointError):  # it went to the disk: a slot was being made
                if this.pending is not None:
                    this.pending.wait_reached("memory", 60)
        statistics = engine.statistics()
        assert statistics.in_memory > 100
        assert statistics.durable < 10  # one each time that a slot is made
    assert load_sync(tmp_path)["tensor"][0] == 199


# -- waiting, and leaving


def test_one_in_memory_alone_is_durable_when_the_next_one_on_disk_is(tmp_path: Path, tier: MemoryTier) -> None:
    with engine_on(tmp_path, tier) as engine:
        first, second = (engine.checkpoint(state_of(step), step=step, tier="memory") for step in (1, 2))
        for each in (first, second):
            each.wait_reached("memory", 60)
            assert not each.done()
            assert each.progress.phase == "in memory"
        with pytest.raises(TimeoutError, match="in memory"):
            first.result(0.01)
        assert engine.latest is None
        assert probe(engine).core._status().committed == []
        assert [(info.step, info.tiers) for info in engine.checkpoints()] == [(2, ("memory",))]
        third = engine.checkpoint(state_of(3), step=3)
        third.wait_reached("disk", 60)
        assert first.result(60).step == second.result(60).step == 3
        assert first.superseded
        assert second.superseded
        assert not third.superseded
        assert [(info.step, info.tiers) for info in engine.checkpoints()] == [(3, ("memory", "disk"))]


@SIZES
def test_leaving_makes_the_newest_one_durable(
    tmp_path: Path, tier: MemoryTier, elements: int, nothing_left_behind: None
) -> None:
    with engine_on(tmp_path, tier) as engine:
        pendings = [engine.checkpoint(state_of(step, elements), step=step, tier="memory") for step in range(3)]
    assert [each.result(0).step for each in pendings] == [2, 2, 2]
    assert [each.superseded for each in pendings] == [True, True, False]
    assert [info.step for info in list_checkpoints(tmp_path)] == [2]
    assert torch.equal(load_sync(tmp_path)["tensor"], state_of(2, elements)["tensor"])
    assert list(Path(tier.path).iterdir()) == []


def test_leaving_after_a_restore_from_memory_makes_that_durable(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(4), on_disk=range(1, 2))
    with engine_on(tmp_path, tier) as engine:
        engine.restore(state_of(-1))
    assert load_sync(tmp_path)["step"] == 3
    assert list(Path(tier.path).iterdir()) == []


def test_opening_and_leaving_changes_nothing(tmp_path: Path, tier: MemoryTier) -> None:
    train(tmp_path, tier, range(4), on_disk=range(1, 2))
    for _ in range(2):
        with engine_on(tmp_path, tier) as engine:
            assert [(info.step, info.tiers) for info in engine.checkpoints()] == [(3, ("memory",)), (1, ("disk",))]
    assert restored_by(tmp_path, tier) == (3, "memory")


def test_a_damaged_one_is_not_written_over_what_the_disk_has(tmp_path: Path, tier: MemoryTier) -> None:
    engine = engine_on(tmp_path, tier).open()
    engine.checkpoint(state_of(1), step=1).result(60)
    engine.checkpoint(state_of(2), step=2, tier="memory").wait_reached("memory", 60)
    flip(folder_in(tier))
    with pytest.raises(CheckpointError, match=r"step 2 is in memory alone.*damaged"):
        engine.close()
    assert load_sync(tmp_path)["step"] == 1


def test_memory_is_kept_for_readers(tmp_path: Path, shared_memory: Path) -> None:
    with engine_on(tmp_path, MemoryTier(interval=1, path=str(shared_memory), keep_after_close=True)) as engine:
        engine.checkpoint(state_of(1), step=1)
    (folder,) = shared_memory.iterdir()
    assert load_sync(folder)["step"] == 1


def test_a_torn_capture_is_in_no_tier(tmp_path: Path, tier: MemoryTier) -> None:
    model = torch.nn.Linear(500, 500)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with engine_on(tmp_path, tier, on_error="warn") as engine:
        engine.attach(optimizer)
        pending = engine.checkpoint(state, step=1, overlap=True, tier="memory")
        with torch.no_grad():
            model.weight.add_(1)
        with pytest.raises(TornCaptureError):
            pending.wait_reached("memory", 60)
        assert engine.checkpoints() == []


def test_a_torn_capture_does_not_come_to_disk_either_where_memory_fails_before_it_is_found(
    tmp_path: Path, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(500, 500)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state, changed = {"model": model, "optimizer": optimizer}, threading.Event()

    async def fail(*_: Any, **__: Any) -> None:
        while not changed.is_set():  # noqa: ASYNC110 - by another thread
            await asyncio.sleep(0.001)
        raise WriteError(5, "played")

    with engine_on(tmp_path, tier, on_error="warn") as engine:
        engine.attach(optimizer)
        engine.checkpoint(state, step=0).result(60)
        monkeypatch.setattr(MappedFiles, "make_durable", fail)
        pending = engine.checkpoint(state, step=1, overlap=True)
        with torch.no_grad():
            model.weight.add_(1)
        changed.set()
        with pytest.raises(TornCaptureError):
            pending.result(60)
    assert [info.step for info in list_checkpoints(tmp_path)] == [0]


# -- training steps


def test_steps_save_in_memory_between_those_on_disk(tmp_path: Path, tier: MemoryTier) -> None:
    state: dict[str, Any] = {"tensor": torch.zeros(1000)}
    with SyncCheckpointEngine(tmp_path, interval=5, memory=tier) as engine:
        tiers = []
        for step in range(12):
            with engine.step(state, step) as this:
                state["tensor"] += 1
            assert this.pending is not None
            this.pending.wait_reached("memory", 60)
            tiers.append(next(info.tiers for info in engine.checkpoints() if info.step == step))
            if step % 5 == 4:
                this.pending.result(60)
        assert engine.statistics().durable == 2
        assert engine.statistics().in_memory == 12
    assert load_sync(tmp_path)["tensor"][0] == 12
    assert list_checkpoints(tmp_path)[0].step == 11


def test_an_interval_of_its_own(tmp_path: Path, shared_memory: Path) -> None:
    state: dict[str, Any] = {"tensor": torch.zeros(1000)}
    saved = []
    with SyncCheckpointEngine(tmp_path, interval=100, memory=MemoryTier(interval=3, path=str(shared_memory))) as engine:
        for step in range(8):
            with engine.step(state, step) as this:
                state["tensor"] += 1
            saved += [] if this.pending is None else [step]
    assert saved == [2, 5]
    assert list_checkpoints(tmp_path)[0].step == 7  # save_last


def test_async_steps_and_verbs(tmp_path: Path, tier: MemoryTier, nothing_left_behind: None) -> None:
    async def main() -> None:
        state: dict[str, Any] = {"tensor": torch.zeros(300_000)}
        async with CheckpointEngine(tmp_path, interval=4, memory=tier) as engine:
            for step in range(6):
                async with engine.step(state, step) as this:
                    state["tensor"] += 1
                assert this.pending is not None
                await this.pending.reached("memory")
            pending = await engine.checkpoint(state, step=6, tier="memory")
            await pending.reached("memory")
        assert (await pending).step == 6

    asyncio.run(main())
    assert load_sync(tmp_path)["tensor"][0] == 6


def test_attached_optimizers_overlap_with_the_copy_into_memory(tmp_path: Path, tier: MemoryTier) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(700, 700)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    weights = []
    with SyncCheckpointEngine(tmp_path, interval=4, memory=tier) as engine:
        engine.attach(optimizer)
        for step in range(10):
            with engine.step(state, step):
                model(torch.randn(2, 700)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            weights.append(model.weight.detach().clone())
        assert engine.statistics().failed == 0
    assert torch.equal(load_sync(tmp_path)["model"]["weight"], weights[-1])


def test_a_signal_makes_the_last_step_durable(tmp_path: Path, tier: MemoryTier) -> None:
    def work() -> None:
        engine = SyncCheckpointEngine(tmp_path, interval=100, memory=tier)
        state: dict[str, Any] = {"tensor": torch.zeros(1000)}
        with engine:
            engine.on_preemption()
            for step in range(100):
                with engine.step(state, step):
                    state["tensor"] += 1
                    if step == 7:
                        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(AssertionError, match="SystemExit: 143"):
        in_child(work)
    assert load_sync(tmp_path)["tensor"][0] == 8


@pytest.mark.parametrize("stays", [False, True])
def test_a_closed_engine_says_where_its_checkpoints_are(tmp_path: Path, shared_memory: Path, stays: bool) -> None:
    memory = MemoryTier(interval=1, path=str(shared_memory), keep_after_close=stays)
    with engine_on(tmp_path, memory) as engine:
        engine.checkpoint(state_of(1), step=1).result(60)
    assert engine.latest is not None
    assert engine.latest.tiers == (("memory", "disk") if stays else ("disk",))


class Recording:
    """A policy that chooses some steps, and keeps what it is told."""

    def __init__(self, chosen: Collection[int]) -> None:
        self.chosen = chosen
        self.steps: list[StepReport] = []
        self.saves: list[SaveReport] = []
        self.skips: list[int] = []

    def due(self, report: StepReport) -> bool:
        self.steps.append(report)
        return report.step in self.chosen

    def saved(self, report: SaveReport) -> None:
        self.saves.append(report)

    def skipped(self, report: StepReport) -> None:
        self.skips.append(report.step)

    def decision(self) -> Decision:
        return Decision(interval=None, seconds=None, reason=f"steps {self.chosen}")


def test_each_tier_has_a_policy_that_is_told_of_its_own_checkpoints(
    tmp_path: Path, tier: MemoryTier, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    on_disk, in_memory = Recording(range(0)), Recording(range(5))
    tier = replace(tier, interval=in_memory)
    state = {"tensor": torch.zeros(3_000_000)}
    with SyncCheckpointEngine(tmp_path, interval=on_disk, memory=tier, save_last=False) as engine:
        for step in range(8):
            with engine.step(state, step) as this:
                state["tensor"] += 1
            if this.pending is not None:
                this.pending.wait_reached("memory", 60)
                while engine.statistics().in_flight:  # reports are made when nothing of it is left to do
                    time.sleep(0.001)
        statistics = engine.statistics()
    assert [report.step for report in in_memory.saves] == list(range(5))
    assert all(12_000_000 <= report.nbytes < 12_100_000 for report in in_memory.saves)
    assert not on_disk.saves
    assert [report.step for report in on_disk.steps] == [report.step for report in in_memory.steps] == list(range(8))
    assert [report.stall for report in on_disk.steps] == [0.0] * 8
    assert sum(report.stall for report in in_memory.steps) == pytest.approx(statistics.stall_seconds)
    assert statistics.memory_interval == in_memory.decision()
    assert "in memory: steps range(0, 5)" in caplog.text


def test_what_is_due_on_disk_needs_no_checkpoint_in_memory_beside_it(tmp_path: Path, tier: MemoryTier) -> None:
    tier = replace(tier, interval=Recording((2, 3)))
    saved = []
    with SyncCheckpointEngine(tmp_path, interval=Recording((3,)), memory=tier, save_last=False) as engine:
        for step in range(6):
            with engine.step({"step": step}, step) as this:
                pass
            if this.pending is not None:
                this.pending.wait_reached("memory", 60)
                saved.append(step)
        assert (engine.statistics().in_memory, saved) == (2, [2, 3])
        assert engine.statistics().admitted == 2


def test_by_default_it_saves_in_memory_as_often_as_the_budget_allows(tmp_path: Path, shared_memory: Path) -> None:
    state = {"tensor": torch.zeros(1_000_000)}
    with SyncCheckpointEngine(tmp_path, interval=1000, memory=MemoryTier(path=str(shared_memory))) as engine:
        for step in range(60):
            with engine.step(state, step):
                time.sleep(0.001)
        statistics = engine.statistics()
        assert 0 < statistics.in_memory < 60
        assert statistics.memory_interval is not None
        assert statistics.memory_interval.interval


# -- wrong use


def test_wrong_use(tmp_path: Path, tier: MemoryTier) -> None:
    for wrong in ({"interval": 0}, {"interval": "1"}, {"keep_last": -1}, {"path": ""}, {"keep_after_close": 1}):
        with pytest.raises((ValueError, TypeError)):
            SyncCheckpointEngine(tmp_path, memory=MemoryTier(**wrong))
    with pytest.raises(TypeError, match=r"memory is a MemoryTier, such as memory=MemoryTier\(\)"):
        SyncCheckpointEngine(tmp_path, memory=True)  # type: ignore[arg-type]
    with engine_on(tmp_path, None) as engine:
        with pytest.raises(ValueError, match=r"needs an engine with memory=MemoryTier"):
            engine.checkpoint(state_of(1), step=1, tier="memory")
        with pytest.raises(ValueError, match="a tier is 'memory' or 'disk', not 'ram'"):
            engine.checkpoint(state_of(1), step=1, tier="ram")  # type: ignore[arg-type]
        pending = engine.checkpoint(state_of(1), step=1)
        pending.wait_reached("disk", 60)
        with pytest.raises(CheckpointError, match="not saved in memory: that needs an engine with memory"):
            pending.wait_reached("memory", 60)


def test_the_log_says_what_does_not_count(tmp_path: Path, tier: MemoryTier, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, tier, range(5), on_disk=range(2, 3))
    train(tmp_path, None, range(3, 4))
    with engine_on(tmp_path, tier):
        pass
    assert "checkpoints of steps [4]" in caplog.text
    assert "do not count" in caplog.text


def test_an_engine_without_the_tier_says_that_there_was_one(
    tmp_path: Path, tier: MemoryTier, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccheck_async.engine.memory.MEMORY_ROOT", tier.path)
    train(tmp_path, tier, range(5), on_disk=range(2, 3))
    with engine_on(tmp_path, None) as engine:
        assert "was used with memory=MemoryTier()" in caplog.text
        engine.restore(state_of(-1))
        engine.checkpoint(state_of(3), step=3)
    caplog.clear()
    with engine_on(tmp_path, None):
        assert "MemoryTier" not in caplog.text


def test_waiting_for_the_disk_where_only_memory_is_due_says_what_it_waits_for(tmp_path: Path, tier: MemoryTier) -> None:
    async def main() -> None:
        async with CheckpointEngine(tmp_path / "async", memory=tier, save_last=False) as engine:
            pending = await engine.checkpoint(state_of(1), step=1, tier="memory")
            await pending.reached("memory")
            text = "step 1 is for memory alone: this waits until a newer one is on disk"
            with pytest.warns(RuntimeWarning, match=text), pytest.raises(TimeoutError):
                await asyncio.wait_for(pending.durable(), 0.01)
            await (await engine.checkpoint(state_of(2), step=2))
            assert (await pending).step == 2  # over, so nothing is said

    asyncio.run(main())
    with engine_on(tmp_path / "blocking", tier) as engine:
        pending = engine.checkpoint(state_of(1), step=1, tier="memory")
        threading.Timer(0.2, engine.close).start()
        with pytest.warns(RuntimeWarning, match=r"wait_reached\('memory'\)") as warned:
            assert pending.result().step == 1
    assert warned[0].filename == __file__


@pytest.mark.parametrize("verb", ["pin", "remove"])
def test_a_verb_while_one_is_saved_in_memory_alone(
    tmp_path: Path, tier: MemoryTier, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is over only with the next one on disk: the verb must not wait for that."""
    commit = Alone.commit_in_memory

    async def slow(self: Alone, *arguments: Any, **keywords: Any) -> None:
        await asyncio.sleep(0.3)
        await commit(self, *arguments, **keywords)

    with engine_on(tmp_path, tier, keep_last=2) as engine:
        engine.checkpoint(state_of(0), step=0).result(60)
        monkeypatch.setattr(Alone, "commit_in_memory", slow)
        engine.checkpoint(state_of(1), step=1, tier="memory")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(getattr(engine, verb), step=1).result(20)
        assert [info.step for info in list_checkpoints(tmp_path)] == ([1, 0] if verb == "pin" else [0])
