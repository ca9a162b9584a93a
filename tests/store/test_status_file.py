"""The status file: what it says, when it is there, and that nothing about it matters to a checkpoint."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pccheck_async import StorageOptions, SyncCheckpointEngine, list_checkpoints, load_sync
from pccheck_async.engine.status_publisher import Publisher
from pccheck_async.format import crc32
from pccheck_async.medium.status_file import (
    STATUS_NAME,
    CommittedStatus,
    InFlightStatus,
    Published,
    Status,
    encode_status,
    read_status,
)
from pccheck_async.testing import CrashDisk, CrashWriter
from tests.support.processes import open_files, passes_in_a_forked_child
from tests.support.warm import start_warm

EXAMPLE = Status(
    pid=123,
    host="node",
    started=1.0e9,
    time=1.0e9 + 100,
    in_flight=[
        InFlightStatus(step=9, counter=4, phase="writing", nbytes=1000, captured=1000, written=400, seconds=0.5),
    ],
    committed=[CommittedStatus(step=8, counter=3, nbytes=1000, time=1.0e9 + 90, pinned=True)],
    counts={"admitted": 5, "durable": 4},
    durable_bytes=4000,
    save_seconds=0.7,
    stall_seconds=2.0,
    stage_bytes={"write": 5000, "capture": 5000},
    stage_seconds={"write": 1.0, "capture": 0.2},
    pool_bytes=2000,
    pool_in_use_bytes=1000,
    host_memory=4000,
    slots=3,
    slot_bytes=3300,
    io="threads",
    interval=10,
    interval_seconds=None,
    reason="as given",
    step=12,
    step_seconds=0.25,
    next_step=19,
    next_time=None,
    failure="",
)


def published(path: Path, accept: Callable[[Published], bool] = lambda _: True) -> Published:
    """Wait for a status; an engine publishes twice a second."""
    while True:
        found = read_status(path)
        if found is not None and accept(found):
            return found


def save(engine: SyncCheckpointEngine, step: int) -> None:
    engine.checkpoint({"weights": torch.full((1000,), float(step))}, step=step).result()


def test_a_status_comes_back(tmp_path: Path) -> None:
    (tmp_path / "status").write_bytes(encode_status(EXAMPLE))
    assert read_status(tmp_path) == Published(EXAMPLE, alive=False)
    longer = msgspec.structs.replace(EXAMPLE, reason="x" * 1000)
    (tmp_path / "status").write_bytes(encode_status(EXAMPLE) + encode_status(longer)[len(encode_status(EXAMPLE)) :])
    assert read_status(tmp_path) == Published(EXAMPLE, alive=False)  # the end of a longer one is left there


@pytest.mark.slow
@given(st.binary(max_size=200), st.integers(0, 2000), st.booleans())
def test_damaged_bytes_are_nothing(junk: bytes, at: int, truncate: bool) -> None:
    data = encode_status(EXAMPLE)
    at %= len(data)
    damaged = data[:at] + junk + (b"" if truncate else data[at + len(junk) :])
    with tempfile.TemporaryDirectory() as path:
        (Path(path) / "status").write_bytes(damaged)
        found = read_status(path)
        assert (found is not None) == (damaged[: len(data)] == data)


def test_a_valid_checksum_over_something_else_is_nothing(tmp_path: Path) -> None:
    for body in (b"{}", b"[1", b'{"pid": "x"}', b"\xff"):
        head = b"pccheck-status 1 %08x %08x\n" % (len(body), crc32(body))
        (tmp_path / "status").write_bytes(head + body)
        assert read_status(tmp_path) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"h"', b'"\xff"'), (b'"pid":1', b'"x":' + b"[" * 100_000 + b"]" * 100_000 + b',"pid":1'), (b"4096", b"9" * 400)],
    ids=["no UTF-8", "deep", "large"],
)
def test_a_forged_status_is_nothing(tmp_path: Path, old: bytes, new: bytes) -> None:
    status = msgspec.structs.replace(EXAMPLE, host="h", pid=1, slot_bytes=4096)
    body = encode_status(status).split(b"\n", 1)[1]
    assert old in body
    forged = body.replace(old, new)
    (tmp_path / "status").write_bytes(b"pccheck-status 1 %08x %08x\n" % (len(forged), crc32(forged)) + forged)
    assert read_status(tmp_path) is None


def test_what_is_no_plain_file_is_nothing(tmp_path: Path) -> None:
    assert read_status(tmp_path / "missing") is None
    (tmp_path / "status").mkdir()
    assert read_status(tmp_path) is None
    (tmp_path / "status").rmdir()
    os.mkfifo(tmp_path / "status")
    assert read_status(tmp_path) is None


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left_behind")
def test_it_is_there_from_the_first_checkpoint_until_the_end(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine:
        save(engine, 1)
    assert sorted(os.listdir(tmp_path)) == ["commit", *sorted(p.name for p in tmp_path.glob("slot-*")), "store.json"]
    files = sorted(os.listdir(tmp_path))
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine:
        engine.restore({"weights": torch.zeros(1000)})
        list_checkpoints(tmp_path)
        assert sorted(os.listdir(tmp_path)) == files  # I5
        save(engine, 2)
        found = published(tmp_path, lambda each: each.status.counts["durable"] == 1)
        assert found.alive
        status = found.status
        assert (status.pid, [each.step for each in status.committed]) == (os.getpid(), [2, 1])
        assert (status.counts["admitted"], status.in_flight, status.failure) == (1, [], "")
        assert status.started <= status.time
        assert [info.step for info in list_checkpoints(tmp_path)] == [2, 1]
        assert load_sync(tmp_path)["weights"][0] == 2
    assert sorted(os.listdir(tmp_path)) == files
    assert read_status(tmp_path) is None


@pytest.mark.slow
def test_what_training_does_and_what_is_due(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, interval=4) as engine:
        for step in range(6):
            with engine.step({"weights": torch.zeros(10)}, step):
                pass
        status = published(tmp_path, lambda each: each.status.step == 5).status
    assert (status.interval, status.next_step, status.next_time) == (4, 7, None)
    assert status.reason == "every 4 steps, as given"
    assert status.step_seconds is not None


def test_writers_of_others_publish_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with SyncCheckpointEngine("store", storage=StorageOptions(io=CrashWriter(CrashDisk()))) as engine:
        save(engine, 1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("obstacle", ["a file of somebody else", "a folder", "no space"])
def test_what_cannot_be_published_is_said_once_and_harms_nothing(
    tmp_path: Path, obstacle: str, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> int:
        return sum(record.__dict__["event"] == "status" for record in caplog.records)

    several = threading.Event()

    def collect() -> Status:
        tries.append(1)
        if len(tries) == 3:
            several.set()
        if obstacle == "no space":
            raise OSError(28, "no space")
        return EXAMPLE

    tries: list[int] = []
    if obstacle == "a file of somebody else":
        (tmp_path / "status").write_text("all is well")
    elif obstacle == "a folder":
        (tmp_path / "status").mkdir()
    with SyncCheckpointEngine(tmp_path) as engine:
        for step in range(3):
            save(engine, step)
    assert said() == (obstacle != "no space")
    caplog.clear()
    publisher = Publisher(str(tmp_path), collect, pause=0.001)
    publisher.start()
    assert several.wait(60)
    publisher.close(60)
    assert said() == 1
    assert [info.step for info in list_checkpoints(tmp_path)] == [2]
    if obstacle == "a file of somebody else":
        assert (tmp_path / "status").read_text() == "all is well"


def test_what_a_dead_process_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "status").write_bytes(encode_status(EXAMPLE))
    with SyncCheckpointEngine(tmp_path) as engine:
        found = read_status(tmp_path)
        assert found == Published(EXAMPLE, alive=False)  # opening writes nothing
        save(engine, 1)
        assert published(tmp_path, lambda each: each.alive).status.pid == os.getpid()
    assert read_status(tmp_path) is None


def test_closing_removes_what_a_dead_process_left(tmp_path: Path) -> None:
    """The crash is over: an engine was opened after it and closed, also one that had nothing left to save."""
    with SyncCheckpointEngine(tmp_path) as engine:
        save(engine, 1)
    (tmp_path / STATUS_NAME).write_bytes(encode_status(EXAMPLE))
    with SyncCheckpointEngine(tmp_path) as engine:
        assert engine.restore({"weights": torch.zeros(1000)}) is not None
        assert read_status(tmp_path) == Published(EXAMPLE, alive=False)  # opening and restoring write nothing
    assert read_status(tmp_path) is None
    (tmp_path / STATUS_NAME).write_text("all is well")  # somebody else's
    with SyncCheckpointEngine(tmp_path):
        pass
    assert (tmp_path / STATUS_NAME).read_text() == "all is well"


@pytest.mark.slow
def test_what_is_closed_while_it_is_read_did_not_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is removed, and then its lock released, between reading it and asking for the lock."""
    with SyncCheckpointEngine(tmp_path) as engine:
        save(engine, 1)
        published(tmp_path, lambda each: each.alive)
        flock = fcntl.flock

        def closed_first(fd: int, how: int) -> None:
            monkeypatch.setattr(fcntl, "flock", flock)
            engine.close()
            flock(fd, how)

        monkeypatch.setattr(fcntl, "flock", closed_first)
        assert read_status(tmp_path) is None


def test_a_reader_that_is_quicker_than_the_lock_takes_no_engine_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is there before the engine has locked its file, a reader opens and locks it."""
    lock, readers = fcntl.flock, []

    def locked_by_a_reader_first(fd: int, how: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(os.fspath(tmp_path / STATUS_NAME)) and how & fcntl.LOCK_EX:
            with suppress(FileNotFoundError):
                readers.append(os.open(tmp_path / STATUS_NAME, os.O_RDONLY))
                lock(readers[-1], fcntl.LOCK_SH | fcntl.LOCK_NB)
        lock(fd, how)

    with SyncCheckpointEngine(tmp_path) as engine:
        monkeypatch.setattr("pccheck_async.engine.status_publisher.fcntl.flock", locked_by_a_reader_first)
        save(engine, 1)
        assert published(tmp_path).alive
        monkeypatch.undo()
    for fd in readers:
        os.close(fd)
    assert not list(tmp_path.glob("status*"))


def test_closing_removes_its_own_and_no_other(tmp_path: Path) -> None:
    """One that closed at a deadline, its lock gone, may be followed by another process before it ends."""
    with SyncCheckpointEngine(tmp_path) as engine:
        save(engine, 1)
        published(tmp_path)
        (tmp_path / "other").write_bytes(b"another's")
        (tmp_path / "other").rename(tmp_path / STATUS_NAME)
    assert (tmp_path / STATUS_NAME).read_bytes() == b"another's"


def test_a_forked_child_does_not_keep_it_alive(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        save(engine, 1)
        published(tmp_path, lambda each: each.alive)

        def check() -> None:
            assert open_files(tmp_path) == []

        assert passes_in_a_forked_child(check)
        found = read_status(tmp_path)
        assert found is not None
        assert found.alive


TRAINER = """
import sys, torch
from pccheck_async import SyncCheckpointEngine
with SyncCheckpointEngine(sys.argv[1], interval=2) as engine:
    for step in range(2):
        with engine.step({"weights": torch.zeros(1000)}, step):
            pass
    engine.drain()
    print("saved", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_of_a_killed_process_the_last_status_stays(tmp_path: Path) -> None:
    child = start_warm("-c", TRAINER, tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "saved\n"
        alive = published(tmp_path, lambda each: each.status.counts["durable"] == 1)
        assert (alive.alive, alive.status.pid, alive.status.next_step) == (True, child.pid, 3)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
    dead = read_status(tmp_path)
    assert dead is not None
    assert (dead.alive, dead.status.pid, dead.status.committed[0].step) == (False, child.pid, 1)
    with SyncCheckpointEngine(tmp_path) as engine:  # and nothing trips over it
        assert engine.restore({"weights": torch.ones(1000)}) is not None
