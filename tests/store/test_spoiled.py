"""A checkpoint that failed leaves nothing that a recovery takes for one when every record is lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pccheck_async import CheckpointError, StorageOptions, SyncCheckpointEngine, TornCaptureError, load_sync, stores
from pccheck_async.errors import StoreFailedError, WriteError
from pccheck_async.medium import Medium
from pccheck_async.medium.files import Files
from pccheck_async.testing.probe import probe
from pccheck_async.transfer import PAGE_BYTES
from pccheck_async.transfer.operations import Operations
from tests.support.devices import Breaking, Device

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
SIZES: dict[str, dict[str, Any]] = {
    "in one piece": {},
    "in chunks": {"chunk_bytes": PAGE_BYTES, "host_memory": 64 * PAGE_BYTES},
}


def found(folder: Path) -> list[int]:
    """Steps of the checkpoints that a recovery offers once all records are gone."""
    (folder / "commit").unlink()
    return [info.step for info in stores.recover(folder).named]


def begin(engine: SyncCheckpointEngine) -> None:
    """Checkpoint step 0, so large that its slots do for all others."""
    engine.checkpoint({"step": 0, "room": torch.zeros(30_000)}, step=0).result(60)


def tear(engine: SyncCheckpointEngine, device: Device, *broken: str) -> None:
    """Checkpoint step 1, change a tensor of it before anybody waited for the capture, and let slots break after it."""
    model = nn.Linear(60, 60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    device.medium.hold("flush")
    # One name each: what the capture before tore would be captured before the call returns.
    pending = engine.checkpoint({"-".join(("model", *broken)): model}, step=1, overlap=True)
    device.medium.wait_stuck()  # the manifest is written by now, and the slot about to be flushed
    with torch.no_grad():
        model.weight.add_(1.0)
    device.breaking.broken, device.breaking.passing = broken, int("flush" in broken)  # the one that is stuck
    device.medium.release()
    with pytest.raises(TornCaptureError):
        pending.result(60)
    engine.drain()
    device.breaking.broken = ()


@pytest.mark.parametrize("size", SIZES)
def test_a_torn_one(tmp_path: Path, size: str) -> None:
    device = Device()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=device, **SIZES[size])) as engine:
        begin(engine)
        tear(engine, device)
    assert found(tmp_path) == [0]


def test_a_torn_one_whose_device_fails_too(tmp_path: Path) -> None:
    device = Device()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=device)) as engine:
        begin(engine)
        tear(engine, device, "write")
        assert engine.checkpoint({"step": 2}, step=2).result(60).step == 2, "a failed write is that checkpoint's alone"
        tear(engine, device, "flush")
        with pytest.raises(StoreFailedError):
            engine.checkpoint({"step": 3}, step=3).result(60)
    assert load_sync(tmp_path)["step"] == 2


@pytest.mark.parametrize("size", SIZES)
def test_one_whose_flush_fails(tmp_path: Path, size: str) -> None:
    device = Device()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=device, **SIZES[size])) as engine:
        begin(engine)
        device.breaking.broken = ("flush",)
        with pytest.raises(StoreFailedError):
            engine.checkpoint({"weight": torch.ones(60, 60)}, step=1).result(60)
    assert found(tmp_path) == [0]


def give_up(engine: SyncCheckpointEngine, device: Device) -> None:
    """Close with a deadline that has passed, and let what was left behind end."""
    with pytest.raises(CheckpointError, match="gave up after 0"):
        engine.close(0.0)
    device.medium.release()
    probe(engine).end_what_was_left_behind()


@pytest.mark.parametrize("size", SIZES)
def test_one_that_closing_gave_up(tmp_path: Path, size: str) -> None:
    device = Device()
    engine = SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=device, **SIZES[size])).open()
    begin(engine)
    device.medium.hold("flush")
    engine.checkpoint({"weight": torch.ones(60, 60)}, step=1)
    device.medium.wait_stuck()
    give_up(engine, device)
    assert found(tmp_path) == [0]


def test_one_that_closing_gave_up_while_its_chunks_were_written(tmp_path: Path) -> None:
    device = Device()
    engine = SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=device, **SIZES["in chunks"])).open()
    begin(engine)
    device.medium.hold("write")
    engine.checkpoint({"weight": torch.ones(60, 60)}, step=1)
    device.medium.wait_stuck(4)  # all chunks: they end, cancelled or not
    give_up(engine, device)
    assert found(tmp_path) == [0]


def test_one_that_closing_gave_up_while_another_was_committed(tmp_path: Path) -> None:
    device = Device()
    engine = SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=device), max_in_flight=2).open()
    begin(engine)
    device.medium.hold("flush")
    for step in (1, 2):
        engine.checkpoint({"step": step}, step=step)
    device.medium.wait_stuck(2)
    device.medium.release(hold_on=True)
    device.medium.wait_stuck()  # one's record
    lock: Any = probe(engine).store.lock
    waits = threading.Event()
    while not lock._waiters:  # the other
        waits.wait(0.001)
    give_up(engine, device)
    steps = found(tmp_path)
    assert len(steps) == 2, "of the one whose record was being written nobody knows whether it counts"
    assert 0 in steps


def test_a_copy_whose_flush_fails(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder, step in ((source, 1), (target, 0)):
        with SyncCheckpointEngine(folder) as engine:
            engine.checkpoint({"step": step}, step=step).result(60)

    def io(path: str, operations: Operations) -> Medium:
        writer = Breaking(Files(path, operations))
        if path == str(target):
            writer.broken = ("flush",)
        return writer

    with pytest.raises(WriteError, match="broken"):
        stores.copy(source, target, io=io)
    assert found(target) == [0]
