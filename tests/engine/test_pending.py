"""What a user sees of a checkpoint on its way."""

from __future__ import annotations

import pytest

from pccheck_async import PendingCheckpoint, SyncCheckpointEngine
from pccheck_async.testing import CrashDisk, CrashWriter, StuckWriter
from tests.support.settings import engine_settings

NAMES = """
    captured counter done durable name nbytes progress reached result skipped step superseded wait_captured wait_reached
"""


def test_its_public_names() -> None:
    assert [name for name in dir(PendingCheckpoint) if not name.startswith("_")] == NAMES.split()
    assert hasattr(PendingCheckpoint, "__await__")


def test_it_cannot_be_changed() -> None:
    with SyncCheckpointEngine("x", **engine_settings(io=CrashWriter(CrashDisk()))) as engine:
        pending = engine.checkpoint({"x": 1}, step=3, name="three")
        assert (pending.step, pending.counter, pending.name) == (3, 0, "three")
        for name in NAMES.split():
            with pytest.raises(AttributeError):
                setattr(pending, name, None)
        with pytest.raises(AttributeError):
            pending.other = 1  # type: ignore[attr-defined]
        pending.result()
        assert (pending.nbytes, pending.done(), pending.superseded) == (0, True, False)
        assert repr(pending) == "<PendingCheckpoint step=3 counter=0 durable>"


def test_a_skipped_one_stands_for_the_newest_in_flight() -> None:
    stuck = StuckWriter(CrashWriter(CrashDisk()), kinds=())
    with SyncCheckpointEngine("x", **engine_settings(io=stuck, max_in_flight=1, on_busy="skip")) as engine:
        engine.checkpoint({"x": 0}, step=0).result()
        stuck.hold("write")
        saved = engine.checkpoint({"x": 1}, step=1, name="one")
        skipped = engine.checkpoint({"x": 2}, step=2, name="two")
        assert (skipped.step, skipped.counter, skipped.name, skipped.nbytes) == (2, saved.counter, None, None)
        assert (skipped.skipped, skipped.superseded, skipped.done()) == (True, False, False)
        skipped.wait_captured(0)
        assert repr(skipped) == f"<PendingCheckpoint step=2 counter={saved.counter} skipped>"
        with pytest.raises(TimeoutError, match="the checkpoint of step 1 is committing"):
            skipped.result(0)
        stuck.release()
        assert skipped.result(60).step == 1
        assert (skipped.done(), skipped.progress.phase, saved.progress.phase) == (True, "skipped", "durable")
