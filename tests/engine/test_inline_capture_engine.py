"""States so small that they are captured before the engine's thread hears of them."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from pccheck_async import CheckpointEngine, StorageOptions, SyncCheckpointEngine, load_sync
from pccheck_async.engine import CheckpointProgress
from pccheck_async.errors import StoreFailedError, WriteError
from pccheck_async.format import Entry
from pccheck_async.format.record import COMMIT_NAME
from pccheck_async.medium import File, Medium
from pccheck_async.store import Retention, Written, open_store, slot_writer
from pccheck_async.testing import Access, CrashDisk, CrashWriter, FailingWriter, StuckWriter, WrappingWriter
from pccheck_async.transfer import aligned_buffer
from tests.support.settings import engine_settings

FOLDER = "anywhere"
T = TypeVar("T")


def small() -> dict[str, Any]:
    """Kinds that are read in different ways, and some that share memory."""
    weights = torch.arange(1000.0)
    return {
        "weights": weights,
        "tied": weights,
        "view": weights[10:20],
        "turned": torch.arange(12.0).reshape(3, 4).T,
        "empty": torch.empty(0),
        "scalar": torch.tensor(3.5),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "array": np.arange(7, dtype=">i4"),
        "backwards": np.arange(6.0)[::-1],
        "step": 1,
    }


def stuck_engine(**settings: Any) -> tuple[SyncCheckpointEngine, StuckWriter, CrashDisk]:
    disk = CrashDisk()
    writer = StuckWriter(CrashWriter(disk), kinds=())
    return SyncCheckpointEngine(FOLDER, **engine_settings(io=writer, **settings)).open(), writer, disk


def test_it_is_captured_while_the_device_hangs_and_may_change_at_once() -> None:
    engine, writer, disk = stuck_engine()
    writer.hold("reserve", "write", "flush")
    state = small()
    pending = engine.checkpoint(state, step=1)
    state["weights"].zero_()
    state["array"][:] = 0
    state["backwards"][:] = 0
    state["turned"].zero_()
    assert not pending.done()
    writer.release()
    pending.result(30)
    engine.close()
    found, want = load_sync(FOLDER, io=CrashWriter(disk, read_only=True)), small()
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert np.array_equal(
            np.asarray(found[name]), np.asarray(value.resolve_conj() if name == "conjugate" else value)
        )
    found["weights"][12] = -1
    assert found["tied"][12] == found["view"][2] == -1


@pytest.mark.slow
def test_those_that_wait_for_their_turn_keep_their_callers_waiting() -> None:
    engine, writer, _ = stuck_engine(max_in_flight=2)
    writer.hold("flush")
    for step in range(2):
        engine.checkpoint(small(), step=step)
    returned = threading.Event()

    def third() -> None:
        engine.checkpoint(small(), step=2)
        returned.set()

    thread = threading.Thread(target=third)
    thread.start()
    assert not returned.wait(0.3), "else any number of them could pile up"
    writer.release()
    assert returned.wait(30)
    thread.join()
    engine.close()


class BrokenSlots(WrappingWriter):
    broken = False
    chains = True

    async def write(self, file: File, offset: int, data: memoryview) -> None:
        if self.broken and file.name != COMMIT_NAME:
            raise WriteError(errno.EIO, "broken", file.name)
        await super().write(file, offset, data)


def test_a_failure_that_nobody_waits_for_is_raised_by_the_next_call() -> None:
    writer = BrokenSlots(CrashWriter(CrashDisk()))
    with SyncCheckpointEngine(FOLDER, storage=StorageOptions(io=writer)) as engine:
        engine.checkpoint(small(), step=1).result(30)
        writer.broken = True
        engine.checkpoint(small(), step=2)
        with pytest.raises(WriteError, match="broken"):
            engine.drain()
        writer.broken = False
        engine.checkpoint(small(), step=3).result(30)


def test_two_in_flight_have_bytes_of_their_own() -> None:
    engine, writer, disk = stuck_engine(max_in_flight=2, keep_last=2)
    state = {"a": torch.zeros(100)}
    for round_ in range(3):
        writer.hold("write")
        for step in (2 * round_, 2 * round_ + 1):
            state["a"].fill_(step)
            engine.checkpoint(state, step=step)
        state["a"].fill_(-1)
        writer.release()
        engine.drain()
    engine.close()
    for step in (4, 5):
        found = load_sync(FOLDER, step=step, io=CrashWriter(disk, read_only=True))
        assert found["a"].tolist() == [step] * 100


class Noting(WrappingWriter):
    """Remembers what was done."""

    chains = True

    def __init__(self, inner: Medium) -> None:
        super().__init__(inner)
        self.seen: list[tuple[str, str]] = []

    async def perform(self, access: Access, call: Callable[[], Awaitable[T]]) -> T:
        self.seen.append((access.kind, access.name))
        return await call()


def test_slot_and_record_are_written_in_order() -> None:
    writer = Noting(CrashWriter(CrashDisk()))
    with SyncCheckpointEngine(FOLDER, storage=StorageOptions(io=writer)) as engine:
        engine.checkpoint(small(), step=1).result(30)
        writer.seen.clear()
        engine.checkpoint(small(), step=2).result(30)
        slot = writer.seen[0][1]
        assert slot.startswith("slot-")
        assert writer.seen == [
            ("lock", slot),
            ("write", slot),
            ("flush", slot),
            ("unlock", slot),
            *[("write", COMMIT_NAME)] * 2,
            ("flush", COMMIT_NAME),
        ]


def test_a_record_under_way_keeps_no_other_slot_from_being_written() -> None:
    engine, writer, _ = stuck_engine(max_in_flight=2)
    writer.chains = True
    engine.checkpoint(small(), step=0).result(30)
    writer.hold("flush", after=1)
    first = engine.checkpoint(small(), step=1)
    writer.wait_stuck(1)  # its record
    second = engine.checkpoint(small(), step=2)
    writer.wait_stuck(2)
    assert [access.name == COMMIT_NAME for access in writer.stuck] == [True, False]
    writer.release()
    assert (first.result(30).step, second.result(30).step) == (1, 2)
    engine.close()


def test_slots_of_failed_writes_come_back() -> None:
    writer = BrokenSlots(CrashWriter(CrashDisk()))
    with SyncCheckpointEngine(FOLDER, storage=StorageOptions(io=writer)) as engine:
        engine.checkpoint(small(), step=1).result(30)
        slots = engine.statistics().slots
        for step in range(2, 2 + 2 * slots):
            writer.broken = True
            with pytest.raises(WriteError, match="broken"):
                engine.checkpoint(small(), step=step).result(30)
            writer.broken = False
            engine.checkpoint(small(), step=step).result(30)
        assert engine.statistics().slots == slots


@pytest.mark.slow
def test_without_memory_for_its_manifest_a_checkpoint_takes_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = small() | {"numbers": list(range(100_000))}  # no room for them behind the tensors
    with SyncCheckpointEngine(tmp_path, max_in_flight=1) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(slot_writer, "aligned_buffer", no_memory)
            for step in range(3):  # one more than there are slots
                with pytest.raises(OSError, match="no memory"):
                    engine.checkpoint(state, step=step).result(30)
        engine.checkpoint(state, step=3).result(30)


def no_memory(nbytes: int) -> memoryview:
    raise OSError(errno.ENOMEM, f"no memory for {nbytes} bytes")


def entry_of(counter: int, slot: int) -> Entry:
    return Entry(
        counter=counter,
        step=counter,
        time=0.0,
        nbytes=4096,
        slot=slot,
        manifest_offset=4096,
        manifest_nbytes=1,
        manifest_checksum=0,
        pinned=False,
        metadata={},
    )


@pytest.mark.parametrize("turns", range(6))
def test_a_superseded_one_that_is_cancelled_gives_its_slot_back_once(turns: int) -> None:
    """The second time it would be another checkpoint's, and what that one wrote would be overwritten."""

    async def main() -> None:
        writer = Noting(CrashWriter(CrashDisk()))
        store = await open_store(writer, path=FOLDER, retention=Retention(keep_last=1), max_in_flight=2, lock_timeout=0)
        data = aligned_buffer(8192)
        old, new = await store.reserve(8192), await store.reserve(8192)
        assert await store.commit(Written(new, entry_of(2, new.slot), [(0, data)]))
        writer.seen.clear()
        saving = asyncio.create_task(store.commit(Written(old, entry_of(1, old.slot), [(0, data)])))
        for _ in range(turns):
            await asyncio.sleep(0)
        saving.cancel()
        await asyncio.wait((saving,))
        assert saving.cancelled() or saving.result() is False
        assert writer.seen.count(("unlock", old.file.name)) <= 1
        assert ("write", old.file.name) not in writer.seen
        await writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("at_once", [True, False])
def test_a_record_under_way_when_closing_is_cancelled_is_told_as_it_ends(at_once: bool) -> None:
    disk = CrashDisk()
    writer = StuckWriter(CrashWriter(disk), kinds=())
    writer.chains = at_once

    async def main() -> None:
        engine = await CheckpointEngine(FOLDER, storage=StorageOptions(io=writer)).open()
        await (await engine.checkpoint(small(), step=1))
        writer.hold("flush", after=1)
        pending = await engine.checkpoint(small(), step=2)
        await asyncio.to_thread(writer.wait_stuck)
        assert [access.name for access in writer.stuck] == [COMMIT_NAME]
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0.05)
        closing.cancel()
        await asyncio.sleep(0.05)
        writer.release()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert (await pending).step == 2

    asyncio.run(main())
    assert load_sync(FOLDER, step=2, io=CrashWriter(disk, read_only=True))["step"] == 1


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_whatever_fails_from_the_first_flush_on_latches(at: int) -> None:
    """The slot's flush, both writes of the record, and its flush."""
    disk = CrashDisk()
    with SyncCheckpointEngine(FOLDER, storage=StorageOptions(io=CrashWriter(disk))) as engine:
        engine.checkpoint(small(), step=1).result(30)
    writer = FailingWriter(CrashWriter(disk), fail_at=None, kinds=("write", "flush"))
    writer.chains = True
    engine = SyncCheckpointEngine(FOLDER, storage=StorageOptions(io=writer)).open()
    engine.checkpoint(small(), step=2).result(30)
    writer.fail_next(at)
    with pytest.raises(WriteError):
        engine.checkpoint(small(), step=3).result(30)
    with pytest.raises(StoreFailedError):
        engine.checkpoint(small(), step=4).result(30)
    engine.close()
    assert load_sync(FOLDER, io=CrashWriter(disk, read_only=True))["step"] == 1


def test_all_of_it_is_written_where_it_is_durable(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        pending = engine.checkpoint(small(), step=1)
        pending.result(30)
        nbytes = pending.progress.nbytes
        assert nbytes > 4000
        assert pending.progress == CheckpointProgress("durable", nbytes, nbytes, nbytes)
        before = engine.statistics().stages
        assert (before["capture"].count, before["capture"].nbytes) == (1, nbytes)
        engine.checkpoint(small(), step=2).result(30)
        after = engine.statistics().stages
        done = {name: after[name].count - before[name].count for name in ("capture", "write", "flush", "commit")}
        assert done == {"capture": 1, "write": 3, "flush": 2, "commit": 1}


@pytest.mark.slow
def test_plain_values_may_be_more_than_there_is_room_for_behind_the_tensors(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        for count in (100_000, 10):
            state = small() | {"numbers": list(range(count))}
            engine.checkpoint(state, step=count).result(30)
            found = load_sync(tmp_path)
            assert found["numbers"] == state["numbers"]
            assert found["weights"].tolist() == state["weights"].tolist()


def test_no_tensor_at_all(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        state = {"step": 1, "names": ["a"]}
        pending = engine.checkpoint(state, step=1)
        state["names"].append("b")  # type: ignore[attr-defined]
        pending.result(30)
    assert load_sync(tmp_path) == {"step": 1, "names": ["a"]}


@pytest.mark.parametrize("at_once", [True, False])
def test_nothing_is_committed_once_a_record_failed_meanwhile(at_once: bool) -> None:
    """Whoever had its slot by then: the next record would have the generation of the one of which nobody knows."""

    async def main() -> None:
        noting = Noting(CrashWriter(CrashDisk()))
        writer = FailingWriter(noting, fail_at=None, kinds=("flush",))
        writer.chains = at_once
        store = await open_store(writer, path=FOLDER, retention=Retention(keep_last=2), max_in_flight=2, lock_timeout=0)
        data = aligned_buffer(8192)
        first, second = await store.reserve(8192), await store.reserve(8192)
        writer.fail_next(after=1)  # the record's flush
        with pytest.raises(StoreFailedError):
            await store.commit(Written(first, entry_of(1, first.slot), [(0, data)]))
        assert ("write", COMMIT_NAME) in noting.seen
        noting.seen.clear()
        with pytest.raises(StoreFailedError):
            await store.commit(Written(second, entry_of(2, second.slot), [(0, data)]))
        assert ("write", COMMIT_NAME) not in noting.seen
        assert store.committed.record.entries == ()
        await writer.close()

    asyncio.run(main())
