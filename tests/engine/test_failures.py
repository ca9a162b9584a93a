"""Every error of the package is provoked, and none of them loses what was committed."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from pccheck_async import (
    CheckpointEngine,
    CheckpointError,
    NoCheckpointError,
    PendingCheckpoint,
    StorageOptions,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
    stores,
)
from pccheck_async.engine import Alone, EngineLoop, Peers, flight_of
from pccheck_async.engine.flight import Waiting
from pccheck_async.engine.in_flight import InFlight
from pccheck_async.errors import (
    ClosedError,
    CorruptStoreError,
    ReadError,
    StoreFailedError,
    StoreFullError,
    StoreLockedError,
    WriteError,
    read_error,
    write_error,
)
from pccheck_async.format import Record
from pccheck_async.format.record import (
    COMMIT_NBYTES,
    REGION_NBYTES,
    decode_identity,
    encode_record,
    newest_record,
    region_offsets,
)
from pccheck_async.medium import File, Medium
from pccheck_async.medium.files import Files
from pccheck_async.medium.status_file import read_status
from pccheck_async.testing import CrashDisk, CrashWriter, FailingWriter, StuckWriter, WrappingWriter
from pccheck_async.testing.probe import probe
from pccheck_async.transfer import PAGE_BYTES
from pccheck_async.transfer.operations import Operations
from tests.engine.test_inline_capture_engine import FOLDER
from tests.support.children import in_child
from tests.support.devices import Device
from tests.support.loop_devices import unmount

pytestmark = pytest.mark.usefixtures("nothing_left_behind", "machine_asked_once")


def state_of(step: int) -> dict[str, Any]:
    return {"tensor": torch.arange(3000) + step, "step": step}


def save(folder: Path, *steps: int, keep_last: int = 3) -> None:
    with SyncCheckpointEngine(folder, keep_last=keep_last, storage=StorageOptions(chunk_bytes=4096)) as engine:
        for step in steps:
            engine.checkpoint(state_of(step), step=step).result(60)


def loaded_step(folder: Path, **kwargs: Any) -> int:
    state = load_sync(folder, **kwargs)
    assert torch.equal(state["tensor"], torch.arange(3000) + state["step"])
    step: int = state["step"]
    return step


class Failing:
    """Makes failing writers on real files, and remembers the last one."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.medium: FailingWriter

    def __call__(self, path: str, operations: Operations) -> Medium:
        self.medium = FailingWriter(Files(path, operations), **self.settings)
        return self.medium


# -- a failing device


def count_operations(folder: Path) -> int:
    counting = Failing(fail_at=None)
    with SyncCheckpointEngine(folder, storage=StorageOptions(io=counting, chunk_bytes=8192), keep_last=2) as engine:
        for step in range(3):
            engine.checkpoint(state_of(step), step=step).result(60)
    return counting.medium.operations


@pytest.mark.slow
@pytest.mark.parametrize(("error", "stays"), [(errno.EIO, True), (errno.ENOSPC, False)], ids=["EIO for good", "ENOSPC"])
def test_every_operation_fails_once(tmp_path: Path, error: int, stays: bool) -> None:
    """EIO (ENOSPC) in the k-th operation for every k: what was acknowledged stays, nothing hangs, the error is told."""
    operations = count_operations(tmp_path / "count")
    assert operations > 30
    for k in range(1, operations + 1):
        folder = tmp_path / f"{k}"
        acknowledged = -1
        told: list[BaseException] = []
        try:
            with SyncCheckpointEngine(
                folder,
                storage=StorageOptions(io=Failing(fail_at=k, error=error, stays=stays), chunk_bytes=8192),
                keep_last=2,
            ) as engine:
                for step in range(3):
                    try:
                        acknowledged = engine.checkpoint(state_of(step), step=step).result(60).step
                    except (WriteError, StoreFullError, StoreFailedError) as failure:
                        told.append(failure)
        except (WriteError, StoreFullError) as failure:  # while opening
            told.append(failure)
        assert told, f"operation {k} failed silently"
        assert any(getattr(failure, "errno", None) == error for failure in told)
        try:
            assert loaded_step(folder) >= acknowledged
        except NoCheckpointError:
            assert acknowledged == -1
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_a_failed_data_write_fails_only_its_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 0)
    failing = Failing(fail_at=2, kinds=("write",))
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=failing, chunk_bytes=4096)) as engine:
        with pytest.raises(WriteError) as failed:
            engine.checkpoint(state_of(1), step=1).result(60)
        assert failed.value.errno == errno.EIO
        assert "slot-" in str(failed.value.filename)
        assert engine.checkpoint(state_of(2), step=2).result(60).step == 2
        assert engine.statistics().failed == 1
    assert loaded_step(tmp_path) == 2


@pytest.mark.slow
def test_a_failed_flush_latches_the_store(tmp_path: Path) -> None:
    save(tmp_path, 0)
    failing = Failing(fail_at=2, kinds=("flush",))  # the first one is the take-over's
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=failing, chunk_bytes=4096)) as engine:
        with pytest.raises(StoreFailedError) as first:
            engine.checkpoint(state_of(1), step=1).result(60)
        with pytest.raises(StoreFailedError) as latched:
            engine.checkpoint(state_of(2), step=2).result(60)
        for told in (first.value, latched.value):
            assert isinstance(told.__cause__, WriteError)
            assert told.errno == errno.EIO
            assert told.filename == told.__cause__.filename
            assert "open the store anew" in str(told)
        live = state_of(9)
        assert engine.restore(live) is not None  # what was committed stays readable
        assert live["step"] == 0
    assert loaded_step(tmp_path) == 0
    save(tmp_path, 5)
    assert loaded_step(tmp_path) == 5


@pytest.mark.parametrize("kind", ["write", "flush", "sync_names"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_pinning_fails_with_the_error_that_is_documented(tmp_path: Path, kind: str, error: int) -> None:
    """The first time, and every time after."""
    save(tmp_path, 0, 1, keep_last=3)
    for number in range(1, 4):
        failing = Failing(fail_at=number, kinds=(kind,), error=error)
        with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=failing), keep_last=3) as engine:
            try:
                engine.pin(step=0)
            except StoreFailedError as failure:
                told = failure.errno
            else:
                assert not failing.medium.failed, "nothing failed any more"
                assert number > 1
                break
            assert told == error
            with pytest.raises(StoreFailedError):
                engine.pin(step=0)
            with pytest.raises(StoreFailedError):
                engine.checkpoint(state_of(2), step=2).result(60)
        assert loaded_step(tmp_path) == 1


@pytest.mark.slow
def test_a_surplus_slot_that_cannot_be_removed_fails_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 0, 1, 2, keep_last=3)
    with SyncCheckpointEngine(
        tmp_path, storage=StorageOptions(io=Failing(fail_at=1, kinds=("remove",)), chunk_bytes=4096)
    ) as engine:
        assert engine.checkpoint(state_of(3), step=3).result(60).step == 3
        engine.drain()
        assert engine.statistics().failed == 0
    assert "could not be removed" in caplog.text
    assert loaded_step(tmp_path) == 3


def test_a_store_that_was_removed_takes_no_more_commits(tmp_path: Path, io: str) -> None:
    engine = SyncCheckpointEngine(tmp_path / "store", storage=StorageOptions(io=io)).open()  # type: ignore[arg-type]
    engine.checkpoint(state_of(1), step=1).result(60)
    (tmp_path / "store" / "commit").unlink()
    with pytest.raises(WriteError, match="commit") as raised:
        engine.checkpoint(state_of(2), step=2).result(60)
    assert raised.value.errno == errno.ENOENT
    with pytest.raises(StoreFailedError, match="was removed"):
        engine.checkpoint(state_of(3), step=3).result(60)
    engine.close()


def test_a_slot_that_was_removed_fails_its_checkpoint(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, max_in_flight=1) as engine:
        engine.checkpoint(state_of(1), step=1).result(60)
        committed = stores.describe(tmp_path).slot
        (free,) = [path for path in tmp_path.glob("slot-*") if path.name != committed]
        free.unlink()
        with pytest.raises(WriteError, match=free.name):
            engine.checkpoint(state_of(2), step=2).result(60)
        assert engine.latest is not None
        assert engine.latest.step == 1
    assert load_sync(tmp_path)["step"] == 1


def test_a_failed_read_is_told_with_its_errno(tmp_path: Path) -> None:
    save(tmp_path, 0)
    with pytest.raises(ReadError) as failed:
        load_sync(tmp_path, io=Failing(fail_at=4, kinds=("read",)))
    assert failed.value.errno == errno.EIO


def test_a_failed_read_falls_back_to_the_older_one(tmp_path: Path) -> None:
    save(tmp_path, 0, 1)
    with pytest.warns(RuntimeWarning, match="falling back to step 0"):
        assert loaded_step(tmp_path, io=Failing(fail_at=4, kinds=("read",))) == 0
    assert [info.step for info in list_checkpoints(tmp_path)] == [1, 0]


# -- failures that nobody awaited


def test_an_unseen_failure_is_raised_by_the_next_call(tmp_path: Path) -> None:
    device = Device()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=device, chunk_bytes=4096)) as engine:
        pending = _failing_unseen(engine, device)
        device.breaking.broken = ()
        with pytest.raises(WriteError):
            engine.checkpoint(state_of(2), step=2)
        assert pending.done()
        assert engine.checkpoint(state_of(3), step=3).result(60).step == 3  # told once


def test_a_failure_that_somebody_waits_for_is_theirs_until_they_give_up(tmp_path: Path) -> None:
    device = Device()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=device, chunk_bytes=4096)) as engine:
        pending = _failing_unseen(engine, device)
        with Waiting(flight_of(pending)):
            engine.drain()
        with pytest.raises(WriteError):
            engine.drain()


def test_an_unseen_failure_is_raised_on_exit(tmp_path: Path) -> None:
    device = Device()
    with (
        pytest.raises(WriteError),
        SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=device, chunk_bytes=4096)) as engine,
    ):
        _failing_unseen(engine, device)


def test_an_unseen_failure_becomes_a_note_on_the_bodys_error(tmp_path: Path) -> None:
    def body(device: Device) -> None:
        with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=device, chunk_bytes=4096)) as engine:
            _failing_unseen(engine, device)
            raise KeyError("mine")

    with pytest.raises(KeyError) as raised:
        body(Device())
    assert any("closing the engine failed, too" in note for note in raised.value.__notes__)


def test_a_seen_failure_is_not_raised_again(tmp_path: Path) -> None:
    device = Device()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=device, chunk_bytes=4096)) as engine:
        pending = _failing_unseen(engine, device)
        with pytest.raises(WriteError):
            pending.result(60)


@pytest.mark.slow
def test_on_error_warn(tmp_path: Path) -> None:
    device = Device()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=device, chunk_bytes=4096), on_error="warn") as engine:
        _failing_unseen(engine, device)
        device.breaking.broken = ()
        with pytest.warns(RuntimeWarning, match="step 1 failed"):
            engine.checkpoint(state_of(2), step=2)


def _failing_unseen(engine: SyncCheckpointEngine, device: Device) -> PendingCheckpoint:
    """A checkpoint that failed after it was captured."""
    device.breaking.broken = ("write",)
    device.medium.hold("write")
    pending = engine.checkpoint(state_of(1), step=1)
    device.medium.release()
    while not pending.done():
        time.sleep(0.001)
    probe(engine).loop.call(probe(engine).scheduler.drain())  # unlike engine.drain() it tells nobody
    return pending


# -- a full or read-only place


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 16 MiB on a loop device."""
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        pytest.skip("needs root and mkfs.ext4 for a loop device")
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, mount], check=False, capture_output=True).returncode:
        pytest.skip("no loop device can be mounted here")
    try:
        yield mount
    finally:
        unmount(mount)


@pytest.mark.root
@pytest.mark.slow
def test_a_full_filesystem(small_disk: Path, io: str) -> None:
    with SyncCheckpointEngine(small_disk / "s", storage=StorageOptions(io=io)) as engine:  # type: ignore[arg-type]
        with pytest.raises(StoreFullError, match="slots of") as full:
            engine.checkpoint({"big": torch.zeros(2 << 20)}, step=1).result(60)
        assert full.value.errno == errno.ENOSPC
        assert engine.checkpoint(state_of(2), step=2).result(60).step == 2
        with pytest.raises(StoreFullError, match="committed checkpoints are untouched"):
            engine.checkpoint({"big": torch.zeros(4 << 20)}, step=3).result(60)
        assert engine.latest is not None
        assert engine.checkpoint(state_of(4), step=4).result(60).step == 4
    assert loaded_step(small_disk / "s") == 4


@pytest.mark.root
def test_a_read_only_filesystem(small_disk: Path) -> None:
    save(small_disk / "s", 1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(WriteError, match="files cannot be written") as refused, SyncCheckpointEngine(small_disk / "s"):
        pass
    assert refused.value.errno == errno.EROFS
    with pytest.raises(WriteError, match="folder cannot be made"), SyncCheckpointEngine(small_disk / "new"):
        pass
    assert loaded_step(small_disk / "s") == 1


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    asked = "; give a folder: "
    refused = pytest.raises(WriteError, match=rf"folder cannot be made or opened \(it is a file\){asked}'.*/file'")
    with refused, SyncCheckpointEngine(tmp_path / "file"):
        pass
    refused = pytest.raises(WriteError, match=rf"opened \(.*/file: it is a file\){asked}'.*/file/below'")
    with refused, SyncCheckpointEngine(tmp_path / "file" / "below"):
        pass
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_made() -> None:
    missing = (
        r"folder cannot be made or opened \(/proc/foo: No such file or directory\); use a folder .*: '/proc/foo/ck'"
    )
    with pytest.raises(WriteError, match=missing) as refused, SyncCheckpointEngine("/proc/foo/ck"):
        pass
    assert (refused.value.errno, refused.value.filename) == (errno.ENOENT, "/proc/foo/ck")


def test_a_folder_that_takes_no_files() -> None:
    """Of procfs: of another one root may write to whatever it likes."""
    refusal = (
        r"the store's files cannot be written \(.+\); use a folder that this process may write: '/proc/sys/commit'"
    )
    with pytest.raises(WriteError, match=refusal), SyncCheckpointEngine("/proc/sys"):
        pass


@pytest.mark.parametrize("torn", [b"", bytes(3000), bytes(16) + b"the store's id", b"PCCHKREC"])
def test_a_store_is_made_anew_where_a_crash_ended_that(tmp_path: Path, torn: bytes) -> None:
    (tmp_path / "commit").write_bytes(torn)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"x": 1}, step=1).result(60)
    assert stores.verify(tmp_path).whole


@pytest.mark.parametrize("mine", [b"abc", b"mine" * 750, bytes(5000) + b"mine", b"mine" * 200_000])
def test_a_foreign_commit_file_is_left_alone(tmp_path: Path, mine: bytes) -> None:
    (tmp_path / "commit").write_bytes(mine)
    with pytest.raises(CorruptStoreError, match="not a store's"), SyncCheckpointEngine(tmp_path):
        pass
    with pytest.raises(NoCheckpointError):
        stores.recover(tmp_path, write=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"commit": mine}


# -- a second writer


@pytest.mark.slow
def test_a_writer_of_another_process_is_named(tmp_path: Path) -> None:
    def told() -> str:
        with pytest.raises(StoreLockedError) as refused:
            SyncCheckpointEngine(tmp_path, storage=StorageOptions(lock_timeout=0)).open()
        return str(refused.value)

    with SyncCheckpointEngine(tmp_path) as engine:
        assert "waited 0 s: another process has " in in_child(told)  # it has not published anything
        engine.checkpoint(state_of(1), step=1).result(60)
        deadline = time.monotonic() + 60
        while (published := read_status(tmp_path)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert published is not None
        assert f"waited 0 s: process {os.getpid()} on {published.status.host!r} has " in in_child(told)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        line = sys._getframe().f_lineno - 1
        held = f"{re.escape(str(tmp_path))} open, made at {re.escape(__file__)}:{line}: close it first"
        (tmp_path.parent / "link").symlink_to(tmp_path)
        for path in (tmp_path, tmp_path.parent / "link"):  # at once: whoever holds it does not die
            with (
                pytest.raises(StoreLockedError, match="made at"),
                SyncCheckpointEngine(path, storage=StorageOptions(lock_timeout=3600)),
            ):
                pass
        with pytest.raises(StoreLockedError, match=held):
            stores.pin(tmp_path, step=1)
        assert engine.checkpoint(state_of(1), step=1).result(60).step == 1
    save(tmp_path, 2)


def test_a_writer_that_is_being_closed_is_waited_for(tmp_path: Path) -> None:
    def stuck(path: str, operations: Operations) -> StuckWriter:
        writers.append(StuckWriter(Files(path, operations), kinds=()))
        return writers[0]

    async def main() -> None:
        first = await CheckpointEngine(tmp_path, storage=StorageOptions(io=stuck)).open()
        writers[0].hold("flush")
        await first.checkpoint(state_of(1), step=1)
        await asyncio.to_thread(writers[0].wait_stuck)
        closing = asyncio.create_task(first.close())
        await asyncio.sleep(0)
        second = asyncio.create_task(CheckpointEngine(tmp_path, storage=StorageOptions(lock_timeout=60)).open())
        await asyncio.sleep(0.05)
        assert not second.done()
        writers[0].release()
        await closing
        await (await second).close()

    writers: list[StuckWriter] = []

    asyncio.run(main())


# -- damage


def slot_of(folder: Path, step: int) -> Path:
    """The slot file of a step, found by its contents."""
    wanted = (torch.arange(3000) + step).numpy().tobytes()
    return next(path for path in folder.glob("slot-*") if path.read_bytes().startswith(wanted[:4096]))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def record_region(folder: Path, *, newest: bool) -> int:
    data = (folder / "commit").read_bytes()
    generations = {
        start: int.from_bytes(data[start + 32 : start + 40], "little")
        for start in range(0, COMMIT_NBYTES, REGION_NBYTES)
    }
    return (max if newest else min)(generations, key=lambda start: (generations[start], -start))


@pytest.mark.slow
def test_one_copy_of_the_record_damaged_harms_nothing(tmp_path: Path) -> None:
    save(tmp_path, 0, 1)
    flip(tmp_path / "commit", record_region(tmp_path, newest=True) + 70)
    assert loaded_step(tmp_path) == 1
    save(tmp_path, 2)
    assert [info.step for info in list_checkpoints(tmp_path)] == [2, 1, 0]


def test_both_copies_damaged_go_back_one_record(tmp_path: Path) -> None:
    save(tmp_path, 0, 1)
    region = record_region(tmp_path, newest=True)
    flip(tmp_path / "commit", region + 70)
    flip(tmp_path / "commit", region + REGION_NBYTES + 70)
    assert loaded_step(tmp_path) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["write", "flush"])
def test_remains_of_a_record_that_cannot_be_erased_latch_the_store(tmp_path: Path, kind: str) -> None:
    save(tmp_path, 0, 1)
    region = record_region(tmp_path, newest=False)
    for start in (region, region - REGION_NBYTES):
        flip(tmp_path / "commit", start + 70)
    before = (tmp_path / "commit").read_bytes()
    failing = Failing(fail_at=1 if kind == "write" else 2, kinds=(kind,))  # the first flush is I12's
    with SyncCheckpointEngine(tmp_path, keep_last=3, storage=StorageOptions(io=failing)) as engine:
        for step in (2, 3):
            with pytest.raises(StoreFailedError):
                engine.checkpoint(state_of(step), step=step).result(60)
    assert failing.medium.failed
    if kind == "write":
        assert (tmp_path / "commit").read_bytes() == before
    assert [info.step for info in list_checkpoints(tmp_path)] == [1, 0]
    save(tmp_path, 2)
    assert [info.step for info in list_checkpoints(tmp_path)] == [2, 1, 0]


@pytest.mark.parametrize("what", ["counter", "generation"])
def test_where_counting_ends_nothing_is_lost(tmp_path: Path, what: str) -> None:
    """Nobody counts that far, but whoever finds such a record acknowledges nothing that cannot be read again."""
    save(tmp_path, 0, 1, keep_last=1)
    identity = decode_identity((tmp_path / "store.json").read_bytes())
    image = bytearray((tmp_path / "commit").read_bytes())
    record = newest_record(image, identity.id_bytes)
    assert record is not None
    if what == "counter":
        record = Record(record.generation, (structs.replace(record.entries[0], counter=2**62),))
    else:
        record = Record(2**62, record.entries)
    data = encode_record(record, identity.id_bytes, identity.block_bytes)
    for offset in region_offsets(record.generation):
        image[offset : offset + len(data)] = data
    (tmp_path / "commit").write_bytes(image)
    with SyncCheckpointEngine(tmp_path) as engine:
        for step in (2, 3):
            with pytest.raises(StoreFailedError, match="no reader would accept this record"):
                engine.checkpoint(state_of(step), step=step).result(60)
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]


def test_all_records_damaged(tmp_path: Path) -> None:
    save(tmp_path, 0, 1)
    for start in range(0, COMMIT_NBYTES, REGION_NBYTES):
        flip(tmp_path / "commit", start + 33)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for read in (load_sync, list_checkpoints):
        with pytest.raises(CorruptStoreError, match="no copy of a commit record"):
            read(tmp_path)
    with pytest.raises(CorruptStoreError), SyncCheckpointEngine(tmp_path):
        pass
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_missing_identity_beside_records_is_not_overwritten(tmp_path: Path) -> None:
    save(tmp_path, 0)
    (tmp_path / "store.json").unlink()
    with pytest.raises(CorruptStoreError, match=r"store\.json"), SyncCheckpointEngine(tmp_path):
        pass


def test_a_missing_commit_file_is_not_made_anew(tmp_path: Path) -> None:
    save(tmp_path, 0)
    (tmp_path / "commit").unlink()
    with pytest.raises(CorruptStoreError, match="commit"), SyncCheckpointEngine(tmp_path):
        pass
    assert not (tmp_path / "commit").exists()


def test_damaged_identity(tmp_path: Path) -> None:
    save(tmp_path, 0)
    (tmp_path / "store.json").write_text("{}")
    with pytest.raises(CorruptStoreError, match=r"store\.json"):
        list_checkpoints(tmp_path)
    with pytest.raises(CorruptStoreError, match=r"store\.json"), SyncCheckpointEngine(tmp_path):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("where", ["chunk", "manifest", "missing", "short"])
def test_a_damaged_checkpoint_falls_back_and_is_dropped_by_the_next_record(tmp_path: Path, where: str) -> None:
    save(tmp_path, 0, 1)
    slot = slot_of(tmp_path, 1)
    match where:
        case "chunk":
            flip(slot, 5000)
        case "manifest":
            flip(slot, 24576 + 30)
        case "missing":
            slot.unlink()
        case "short":
            os.truncate(slot, 4096)
    with pytest.warns(RuntimeWarning, match="falling back to step 0"):
        assert loaded_step(tmp_path) == 0
    with pytest.raises(CorruptStoreError, match="slot-"):
        load_sync(tmp_path, step=1)
    with (
        SyncCheckpointEngine(tmp_path, keep_last=3, storage=StorageOptions(chunk_bytes=4096)) as engine,
        pytest.raises(CorruptStoreError, match="slot-"),
    ):
        engine.restore(state_of(9), step=1)
    with SyncCheckpointEngine(tmp_path, keep_last=3, storage=StorageOptions(chunk_bytes=4096)) as engine:
        live = state_of(9)
        with pytest.warns(RuntimeWarning, match="falling back to step 0"):
            info = engine.restore(live)
        assert info is not None
        assert (info.step, live["step"]) == (0, 0)
        assert [kept.step for kept in engine.checkpoints()] == [0]
        assert engine.checkpoint(state_of(1), step=1).result(60).counter == 2
    assert [info.step for info in list_checkpoints(tmp_path)] == [1, 0]
    assert loaded_step(tmp_path) == 1


@pytest.mark.slow
def test_the_only_checkpoint_damaged(tmp_path: Path) -> None:
    save(tmp_path, 0)
    flip(slot_of(tmp_path, 0), 100)
    with pytest.raises(CorruptStoreError, match="chunk 0"):
        load_sync(tmp_path)
    with SyncCheckpointEngine(tmp_path) as engine, pytest.raises(CorruptStoreError, match="chunk 0"):
        engine.restore(state_of(9))


# -- slots that cannot be opened


class BadInode(WrappingWriter):
    """Fails to open some files."""

    def __init__(self, inner: Medium, names: set[str], error: int) -> None:
        super().__init__(inner)
        self.chains = inner.chains
        self.names_of_bad, self.error = names, error

    async def open(self, name: str, *, writable: bool) -> File:
        if name in self.names_of_bad:
            error = OSError(self.error, os.strerror(self.error))
            raise (write_error if writable else read_error)(error, name)
        return await super().open(name, writable=writable)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "bad"),
    [("free", errno.EIO), ("free", "folder"), ("older", errno.ESTALE), ("older", "symlink"), ("newest", errno.EIO),
     ("free", errno.EACCES), ("newest", "folder")],
)  # fmt: skip
def test_a_slot_that_cannot_be_opened_costs_what_it_holds(tmp_path: Path, which: str, bad: int | str) -> None:
    save(tmp_path, 0, 1, keep_last=2)
    held = {step: slot_of(tmp_path, step).name for step in (0, 1)}
    name = {"newest": held[1], "older": held[0]}.get(which) or min(
        path.name for path in tmp_path.glob("slot-*") if path.name not in held.values()
    )
    if isinstance(bad, str):
        (tmp_path / name).rename(tmp_path / "aside")
        (tmp_path / name).mkdir() if bad == "folder" else (tmp_path / name).symlink_to(tmp_path / "aside")
    before = (tmp_path / ("aside" if isinstance(bad, str) else name)).read_bytes()

    def io(path: str, operations: Operations) -> Medium:
        return BadInode(Files(path, operations), set() if isinstance(bad, str) else {name}, bad)  # type: ignore[arg-type]

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert loaded_step(tmp_path, io=io) == (0 if which == "newest" else 1)
        with SyncCheckpointEngine(tmp_path, keep_last=2, storage=StorageOptions(io=io)) as engine:
            restored = engine.restore(state_of(9))
            assert restored is not None
            assert restored.step == (0 if which == "newest" else 1)
            for step in (2, 3, 4):
                engine.checkpoint(state_of(step), step=step).result(60)
    assert len(warned) == (2 if which == "newest" else 0)
    assert stores.verify(tmp_path, io=io, every=True).whole  # what it held was superseded
    assert [info.step for info in list_checkpoints(tmp_path)] == [4, 3]
    assert (tmp_path / ("aside" if isinstance(bad, str) else name)).read_bytes() == before
    if bad == errno.EACCES:  # what may be whole is not left out
        with pytest.raises(ReadError):
            stores.recover(tmp_path, io=io, search=True)
    else:
        assert [info.step for info in stores.recover(tmp_path, io=io, search=True).named][:2] == [4, 3]


@pytest.mark.parametrize("bad", [errno.EMFILE, errno.ENFILE])
def test_a_process_without_descriptors_takes_no_slot_for_a_bad_one(tmp_path: Path, bad: int) -> None:
    save(tmp_path, 0)
    name = slot_of(tmp_path, 0).name
    io: Any = lambda path, operations: BadInode(Files(path, operations), {name}, bad)  # noqa: E731
    with pytest.raises(WriteError), SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=io)):
        pass


def test_verify_tells_of_a_slot_that_cannot_be_opened(tmp_path: Path) -> None:
    save(tmp_path, 0, 1)
    name = slot_of(tmp_path, 1).name
    io: Any = lambda path, operations: BadInode(Files(path, operations), {name}, errno.EIO)  # noqa: E731
    damages = [damage for one in stores.verify(tmp_path, io=io, every=True).checkpoints for damage in one.damage]
    assert [(damage.file, damage.what) for damage in damages] == [(name, "slot")]
    assert "Input/output error" in damages[0].reason


# -- places in flight


def test_on_busy_skip(tmp_path: Path) -> None:
    device = Device()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=device), max_in_flight=1, on_busy="skip") as engine:
        device.medium.hold("flush")  # the device hangs; the capture does not wait for it
        first = engine.checkpoint(state_of(1), step=1)
        device.medium.wait_stuck()
        skipped = engine.checkpoint(state_of(2), step=2)
        assert skipped.skipped
        assert not first.skipped
        device.medium.release()
        assert skipped.result(60).step == 1
        assert engine.statistics().skipped == 1


def test_superseded(tmp_path: Path) -> None:
    """The older of two is held back until the newer one is durable; it is then dropped, and its slot is free again."""
    device = Device()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=device, chunk_bytes=4096), max_in_flight=2) as engine:
        engine.checkpoint(state_of(0), step=0).result(60)
        device.medium.hold("write")
        older = engine.checkpoint({"tensor": torch.arange(3000) + 1, "step": 1}, step=1)
        device.medium.wait_stuck()
        held = [access.name for access in device.medium.stuck]
        device.medium.hold()
        newer = engine.checkpoint(state_of(2), step=2)
        assert newer.result(60).step == 2
        device.medium.release()
        assert older.result(60).step == 2
        assert older.superseded
        assert held
        assert engine.statistics().superseded == 1
        for step in range(3, 6):
            engine.checkpoint(state_of(step), step=step).result(60)
        assert engine.statistics().slots == 3
    assert loaded_step(tmp_path) == 5


def test_close_gives_up_at_its_deadline(tmp_path: Path) -> None:
    device = Device()
    engine = SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=device)).open()
    device.medium.hold("flush")
    pending = engine.checkpoint(state_of(1), step=1)
    device.medium.wait_stuck()
    with pytest.raises(CheckpointError, match="gave up"):
        engine.close(deadline=0.01)
    with pytest.raises(CheckpointError, match="gave up"):
        pending.result(1)
    # What was left behind is left alone; here it is ended so that the test leaves nothing.
    device.medium.release()
    probe(engine).end_what_was_left_behind()


# -- the interpreter's end


@pytest.mark.slow
def test_an_unclosed_engine_drains_at_exit(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys, torch
        from pccheck_async import StorageOptions, SyncCheckpointEngine
        from pccheck_async.testing import ThrottledWriter
        from pccheck_async.medium.files import Files
        slow = lambda path, operations: ThrottledWriter(Files(path, operations), total=40e6)
        engine = SyncCheckpointEngine(sys.argv[1], storage=StorageOptions(io=slow)).open()
        engine.checkpoint({"tensor": torch.arange(3000) + 4, "step": 4, "big": torch.ones(5_000_000)}, step=4)
        """
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True, timeout=600
    )
    assert "was not closed" in ran.stderr
    assert "drained" in ran.stderr
    assert loaded_step(tmp_path) == 4


def test_no_warning_without_a_reason(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path, 1)
        assert loaded_step(tmp_path) == 1


# -- who is told of a failure


@pytest.mark.slow
def test_who_stopped_waiting_was_not_told(tmp_path: Path) -> None:
    device = Device()

    async def main() -> None:
        async with CheckpointEngine(tmp_path, storage=StorageOptions(io=device)) as engine:
            device.breaking.broken = ("write",)
            device.medium.hold("write")
            pending = await engine.checkpoint(state_of(1), step=1)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pending.durable(), 0.01)
            await pending.captured()
            device.medium.release()
            with pytest.raises(WriteError):
                await engine.drain()

    asyncio.run(main())


def test_whoever_waits_is_told_and_nobody_twice(tmp_path: Path) -> None:
    device = Device()

    async def main() -> None:
        async with CheckpointEngine(
            tmp_path, storage=StorageOptions(io=device), max_in_flight=1, on_busy="skip"
        ) as engine:
            device.breaking.broken = ("write",)
            device.medium.hold("write")
            pending = await engine.checkpoint(state_of(1), step=1)
            skipped = await engine.checkpoint(state_of(2), step=2)
            assert skipped.skipped
            waiting = asyncio.create_task(skipped.durable())
            await asyncio.sleep(0)
            await pending.captured()
            device.medium.release()
            with pytest.raises(WriteError):
                await waiting

    asyncio.run(main())


def test_on_error_warn_never_raises_into_the_trainer(tmp_path: Path) -> None:
    """Also where the failure comes while the state is captured."""
    failing = Failing(fail_at=2, kinds=("reserve",), error=errno.ENOSPC, stays=True)
    with SyncCheckpointEngine(
        tmp_path,
        storage=StorageOptions(io=failing, chunk_bytes=PAGE_BYTES, host_memory=2 * PAGE_BYTES),
        on_error="warn",
    ) as engine:
        for step in range(2):
            with pytest.warns(RuntimeWarning, match=f"step {step} failed"):
                engine.checkpoint({"tensor": torch.zeros(100_000)}, step=step)
        assert engine.statistics().failed == 2


# -- edges of an engine's life


def test_reading_from_an_engine_that_was_never_opened(tmp_path: Path) -> None:
    engine = SyncCheckpointEngine(tmp_path)
    for read in (engine.checkpoints, engine.statistics, lambda: engine.latest):
        with pytest.raises(ClosedError, match="never opened"):
            read()
    with engine:
        pass
    assert engine.checkpoints() == []
    assert engine.statistics().durable == 0


def test_the_wrong_with() -> None:
    with pytest.raises(TypeError, match="async with"), CheckpointEngine("unused"):
        pass


def test_a_step_entered_the_wrong_way_says_how(tmp_path: Path) -> None:
    async def main() -> None:
        async with CheckpointEngine(tmp_path / "a") as engine:
            with pytest.raises(TypeError, match=r"use 'async with engine\.step"), engine.step({}, 1):
                raise AssertionError("not entered")
        with SyncCheckpointEngine(tmp_path / "b") as blocking:
            with pytest.raises(TypeError, match=r"use 'with engine\.step"):
                async with blocking.step({}, 1):  # type: ignore[misc]
                    raise AssertionError("not entered")
            assert blocking.latest is None
        with pytest.raises(TypeError, match=r"use 'with SyncCheckpointEngine"):
            async with SyncCheckpointEngine(tmp_path / "c"):  # type: ignore[misc]
                raise AssertionError("not entered")
        assert not (tmp_path / "c").exists()

    asyncio.run(main())


def test_a_cancelled_close_still_closes(tmp_path: Path) -> None:
    device = Device()

    async def main() -> None:
        engine = await CheckpointEngine(tmp_path, storage=StorageOptions(io=device)).open()
        device.breaking.broken = ("write",)
        device.medium.hold("write")
        pending = await engine.checkpoint(state_of(1), step=1)
        closing = asyncio.create_task(engine.close())
        await asyncio.to_thread(device.medium.wait_stuck)
        closing.cancel()
        await asyncio.sleep(0)
        device.medium.release()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(CheckpointError):
            await pending
        with pytest.raises(ClosedError):
            await engine.checkpoint(state_of(2), step=2)

    asyncio.run(main())


def test_a_close_that_is_cancelled_before_it_began_still_closes(tmp_path: Path, nothing_left_behind: None) -> None:
    async def main() -> None:
        engine = await CheckpointEngine(tmp_path).open()
        gate = threading.Event()
        probe(engine).loop.post(gate.wait, 60)  # the close and its cancellation reach the engine's loop together
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        closing.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(ClosedError):
            await engine.checkpoint(state_of(2), step=2)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("chunk_bytes", "buffers", "sizes"),
    [(PAGE_BYTES, 4, (48 * PAGE_BYTES,)), (1 << 20, 1, (6 << 20, 1 << 19))],
    ids=["of many chunks", "of many chunks and of one"],
)
def test_readers_and_a_small_pool_do_not_make_two_checkpoints_wait_for_each_other(
    tmp_path: Path, chunk_bytes: int, buffers: int, sizes: tuple[int, ...]
) -> None:
    """One checkpoint waits for a slot that the other will free, the other for a buffer that the first one holds."""
    states = [{"tensor": torch.zeros(nbytes // 4)} for nbytes in sizes]
    big, memory = states[0], buffers * chunk_bytes
    with SyncCheckpointEngine(
        tmp_path, max_in_flight=2, storage=StorageOptions(host_memory=memory, chunk_bytes=chunk_bytes)
    ) as engine:
        engine.checkpoint(big, step=0).result(60)
        engine.checkpoint(big, step=1).result(60)
        held = [os.open(tmp_path / f"slot-00{n}", os.O_RDONLY) for n in range(3)]
        locked = 0
        for fd in held:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                locked += 1
            except BlockingIOError:
                pass
            if locked == 2:
                break
        try:
            pendings: list[PendingCheckpoint] = []
            threads = [
                threading.Thread(target=lambda n=n: pendings.append(engine.checkpoint(states[n % len(states)], step=n)))
                for n in range(2, 6)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert len(pendings) == 4
            assert max(pending.result(60).step for pending in pendings) in range(2, 6)
        finally:
            for fd in held:
                os.close(fd)


def test_a_disk_too_small_for_all_slots_shows_at_every_checkpoint() -> None:
    """And not in an hour, when a slot is missing."""

    disk = CrashDisk(capacity=COMMIT_NBYTES + 4096 + 3 * 200_000)
    state = {"weights": torch.zeros(50_000)}  # three slots are needed, with their manifests a little more
    with SyncCheckpointEngine(FOLDER, storage=StorageOptions(io=CrashWriter(disk)), max_in_flight=2) as engine:
        for step in range(3):
            with pytest.raises(StoreFullError, match="3 slots of"):
                engine.checkpoint(state, step=step).result(30)


@pytest.mark.parametrize("how", ["load", "restore"])
def test_a_step_that_was_asked_for_does_not_fall_back_to_an_older_one_of_that_step(tmp_path: Path, how: str) -> None:
    """After a rollback there are two of it."""

    with SyncCheckpointEngine(tmp_path, keep_last=2, storage=StorageOptions(chunk_bytes=4096)) as engine:
        for number in (1, 2):
            engine.checkpoint(state_of(number), step=5).result(60)
    flip(slot_of(tmp_path, 2), 5000)
    if how == "load":
        with pytest.raises(CorruptStoreError):
            load_sync(tmp_path, step=5)
    else:
        with SyncCheckpointEngine(tmp_path, keep_last=2) as engine, pytest.raises(CorruptStoreError):
            engine.restore(state_of(9), step=5)


@pytest.mark.slow
def test_a_failed_read_costs_no_checkpoint(tmp_path: Path) -> None:
    """The device may read it the next time; only wrong bytes are dropped."""

    save(tmp_path, 0, 1)
    failing = Failing(fail_at=None, kinds=("read",))
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=failing, chunk_bytes=4096), keep_last=4) as engine:
        failing.medium.fail_at = failing.medium.operations + 1
        with pytest.warns(RuntimeWarning, match="falling back to step 0"):
            engine.restore(state_of(9))
        engine.checkpoint(state_of(2), step=2).result(60)
    assert [info.step for info in list_checkpoints(tmp_path)] == [2, 1, 0]


class Exiting(logging.Handler):
    """Exits, as a handler does that ends the process at the first warning."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.event in ("failed", "durable", "superseded"):  # type: ignore[attr-defined]
            sys.exit("a handler of the log")


@pytest.mark.parametrize("end", ["durable", "failed", "cancelled"])
def test_who_waits_is_told_also_where_a_handler_of_the_log_exits(tmp_path: Path, end: str) -> None:
    """On the engine's thread that would end the thread, and with it all that goes on there."""
    device, logger, handler = Device(), logging.getLogger("pccheck_async"), Exiting()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=device, chunk_bytes=4096)) as engine:
            device.breaking.broken = ("write",) if end == "failed" else ()
            device.medium.hold("write")
            pending = engine.checkpoint({"a": torch.ones(30_000)}, step=1)
            device.medium.wait_stuck()
            if end == "cancelled":
                (task,) = probe(engine).tasks
                probe(engine).loop.post(task.cancel)
            device.medium.release()
            if end == "durable":
                assert pending.result(30).step == 1
            else:
                with pytest.raises(CheckpointError, match="broken" if end == "failed" else "was cancelled"):
                    pending.result(30)
            device.breaking.broken = ()
            assert engine.checkpoint({"a": torch.ones(30_000)}, step=2).result(30).step == 2
            assert engine.statistics().in_flight == 0
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert [info.step for info in list_checkpoints(tmp_path)] == [2]


@pytest.mark.parametrize("end", ["durable", "failed"])
def test_who_waits_is_told_whatever_goes_wrong_in_counting(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: InFlight, *_: object) -> None:
        raise MemoryError("no room to count")

    device, told = Device(), list[int]()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=device)) as engine:
        device.breaking.broken = ("write",) if end == "failed" else ()
        monkeypatch.setattr(InFlight, "note_end", fail)
        monkeypatch.setattr(Alone, "ended", lambda peers, counter, error: told.append(counter))
        pending = engine.checkpoint({"a": torch.ones(30)}, step=1)
        with pytest.raises(WriteError, match="broken") if end == "failed" else nullcontext():
            assert pending.result(30).step == 1
        engine.drain()
    assert told == [pending.counter]
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "the end of a checkpoint is not counted right: MemoryError('no room to count')"
    ]


def test_who_waits_is_told_where_the_store_takes_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Peers, *_: object, **__: object) -> None:
        raise MemoryError("no room for a request")

    with SyncCheckpointEngine(tmp_path) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(Alone, "request", fail)
            with pytest.raises(MemoryError, match="no room for a request"):
                engine.checkpoint({"a": torch.ones(30_000)}, step=1).result(30)
        assert engine.checkpoint({"a": torch.ones(30_000)}, step=2).result(30).step == 2


def test_who_waits_for_the_closing_is_told_where_it_fails_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SyncCheckpointEngine(tmp_path).open()
    closing = threading.Thread(target=engine.close, daemon=True)

    def fail() -> None:
        closing.start()
        raise MemoryError("no room to close")

    monkeypatch.setattr(probe(engine).core.guard, "close", fail)
    with pytest.raises(MemoryError, match="no room to close"):
        engine.close()
    closing.join(30)
    assert not closing.is_alive()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(lock_timeout=0)) as again:
        assert again.checkpoints() == []


def test_a_map_of_the_state_that_is_cut_off_fails_the_checkpoint(tmp_path: Path) -> None:
    def work() -> list[int]:
        file = tmp_path / "weights"
        weights = np.asarray(np.memmap(file, np.uint8, "w+", shape=(1 << 20,)))
        with SyncCheckpointEngine(tmp_path / "run") as engine:
            engine.checkpoint({"x": weights}, step=0).result(30)
            os.truncate(file, 4096)
            with pytest.raises(CheckpointError, match="memory of the state cannot be read") as failed:
                engine.checkpoint({"x": weights}, step=1).result(30)
            assert failed.value.__cause__ is not failed.value
            return [info.step for info in engine.checkpoints()]

    assert in_child(work) == [0]


def test_an_engine_that_gets_no_thread_can_be_opened_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: EngineLoop, *_: object) -> None:
        raise RuntimeError("can't start new thread")

    engine = SyncCheckpointEngine(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(EngineLoop, "__init__", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            engine.open()
    with engine:
        assert engine.checkpoint({"x": torch.ones(3)}, step=0).result(30).step == 0
