"""States so small that they are captured before the engine's thread hears of them."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pccheck_async import SyncCheckpointEngine, WriteError, load_sync
from pccheck_async.layout import COMMIT_NAME
from pccheck_async.testing import CrashDisk, CrashWriter, StuckWriter, WrappingWriter
from pccheck_async.writer import File

FOLDER = "anywhere"


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
    return SyncCheckpointEngine(FOLDER, io=writer, **settings).open(), writer, disk


def test_it_is_captured_while_the_device_hangs_and_may_change_at_once() -> None:
    engine, writer, disk = stuck_engine()
    writer.hold("create", "write", "flush")
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

    async def write(self, file: File, offset: int, data: memoryview) -> None:
        if self.broken and file.name != COMMIT_NAME:
            raise WriteError(errno.EIO, "broken", file.name)
        await super().write(file, offset, data)


def test_a_failure_that_nobody_waits_for_is_raised_by_the_next_call() -> None:
    writer = BrokenSlots(CrashWriter(CrashDisk()))
    with SyncCheckpointEngine(FOLDER, io=writer) as engine:
        engine.checkpoint(small(), step=1).result(30)
        writer.broken = True
        engine.checkpoint(small(), step=2)
        with pytest.raises(WriteError, match="broken"):
            engine.drain()
        writer.broken = False
        engine.checkpoint(small(), step=3).result(30)


def test_no_tensor_at_all(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        state = {"step": 1, "names": ["a"]}
        pending = engine.checkpoint(state, step=1)
        state["names"].append("b")  # type: ignore[attr-defined]
        pending.result(30)
    assert load_sync(tmp_path) == {"step": 1, "names": ["a"]}
