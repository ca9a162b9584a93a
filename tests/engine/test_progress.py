"""How far a checkpoint, a restore and a load are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import StorageOptions, SyncCheckpointEngine, load_sync
from pccheck_async.engine import CheckpointProgress
from pccheck_async.errors import WriteError
from pccheck_async.testing import CrashDisk, CrashWriter, FailingWriter, StuckWriter
from pccheck_async.testing.probe import probe
from tests.support.devices import Device

CHUNK = 64 * 1024
NBYTES = 10 * CHUNK


def state() -> dict[str, Any]:
    return {name: torch.arange(NBYTES // 8, dtype=torch.float32) for name in ("first", "second")}


def test_phases_of_a_checkpoint(tmp_path: Path) -> None:
    io = Device()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=io, chunk_bytes=CHUNK), max_in_flight=1) as engine:
        engine.checkpoint(state(), step=0).result()
        io.medium.hold("write")
        pending = engine.checkpoint(state(), step=1)  # returns captured
        io.medium.wait_stuck(10)
        assert pending.progress == CheckpointProgress("writing", NBYTES, NBYTES, 0)
        waiting, _ = probe(engine).core.start_checkpoint(state(), 2, None)
        assert waiting.progress == CheckpointProgress("waiting", 0, 0, 0)
        io.medium.hold("flush")
        io.medium.release(hold_on=True)
        io.medium.wait_stuck()
        assert pending.progress == CheckpointProgress("committing", NBYTES, NBYTES, NBYTES)
        io.medium.release()
        pending.result()
        assert pending.progress == CheckpointProgress("durable", NBYTES, NBYTES, NBYTES)
        waiting.result()


def test_how_it_ended() -> None:
    disk = CrashDisk()
    with SyncCheckpointEngine(
        "store", storage=StorageOptions(io=FailingWriter(CrashWriter(disk), fail_at=2, kinds=("write",)))
    ) as engine:
        failed = engine.checkpoint(state(), step=1)
        with pytest.raises(WriteError):
            failed.result()
    assert failed.progress.phase == "failed"
    stuck = StuckWriter(CrashWriter(disk), kinds=())
    with SyncCheckpointEngine("store", storage=StorageOptions(io=stuck), max_in_flight=2, on_busy="skip") as engine:
        stuck.hold("write", after=1)  # the first is the record's, again
        older = engine.checkpoint(state(), step=2)
        stuck.wait_stuck()
        stuck.hold()
        newer = engine.checkpoint(state(), step=3)
        newer.result()
        stuck.hold("write")
        third = engine.checkpoint(state(), step=4)
        skipped = engine.checkpoint(state(), step=5)
        assert skipped.progress.phase == "skipped"
        stuck.release()
        older.result()
        third.result()
    assert older.progress.phase == "superseded"


@pytest.mark.parametrize("reading", ["restore", "load", "load part"])
def test_reading_tells_each_chunk(tmp_path: Path, reading: str) -> None:
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(chunk_bytes=CHUNK)) as engine:
        engine.checkpoint(state(), step=1).result()
        told: list[tuple[int, int]] = []
        if reading == "restore":
            engine.restore(state(), progress=lambda done, nbytes: told.append((done, nbytes)))
        else:
            keys = ["first"] if reading == "load part" else None
            load_sync(tmp_path, keys=keys, progress=lambda done, nbytes: told.append((done, nbytes)))
    ends = range(5, 11) if reading == "load part" else range(1, 11)  # chunks that are passed over count at once
    assert told == [(end * CHUNK, NBYTES) for end in ends]


def test_where_nothing_is_read_no_progress_is_made(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"step": 1}, step=1).result()
    told = list[tuple[int, int]]()
    assert load_sync(tmp_path, progress=lambda *each: told.append(each)) == {"step": 1}
    assert told == []


def test_a_progress_callback_that_raises_is_called_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def broken(done: int, nbytes: int) -> None:
        calls.append(done)
        raise ValueError("no")

    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(chunk_bytes=CHUNK)) as engine:
        engine.checkpoint(state(), step=1).result()
        into = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
        assert engine.restore(into, progress=broken) is not None
    assert torch.equal(into["second"], state()["second"])
    assert calls == [CHUNK]
    events = [record.__dict__["event"] for record in caplog.records]
    assert [event for event in events if event != "held_up"] == ["progress"]  # a busy machine may say that, too
