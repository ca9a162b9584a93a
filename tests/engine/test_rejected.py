"""Checkpoints that are rejected: restores pass them over, and no rule keeps them."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import (
    CheckpointEngine,
    CheckpointInfo,
    Keep,
    NoCheckpointError,
    StorageOptions,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
    open_checkpoint,
)
from pccheck_async.errors import StoreError, UnsupportedStateError
from pccheck_async.store import StoreReader, at_once
from pccheck_async.testing import CrashDisk, CrashWriter, StuckWriter
from tests.engine.test_failures import flip, slot_of, state_of
from tests.engine.test_inline_capture_engine import FOLDER, stuck_engine

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


DAMAGE = r"damaged|checksum"


def save(engine: SyncCheckpointEngine, *steps: int, **more: Any) -> None:
    for step in steps:
        engine.checkpoint(state_of(step), step=step, **more).result()


def restored_step(engine: SyncCheckpointEngine, **which: Any) -> int:
    state = state_of(-1)
    restored = engine.restore(state, **which)
    assert restored is not None
    assert restored.step == state["step"]
    return restored.step


def marks(infos: list[CheckpointInfo]) -> list[tuple[int, bool]]:
    return [(info.step, info.rejected) for info in infos]


def test_the_step_and_all_newer_ones_are_passed_over_and_no_rule_keeps_them(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=5, keep=Keep(every=3, best=("loss", 1, "min"))) as engine:
        for step in range(1, 6):
            save(engine, step, metadata={"loss": -step})
        assert marks(engine.reject(step=4)) == [(5, True), (4, True)]
        found = [(5, True), (4, True), (3, False), (2, False), (1, False)]
        assert marks(engine.checkpoints()) == marks(list_checkpoints(tmp_path)) == found
        assert engine.latest is not None
        assert engine.latest.step == engine.statistics().latest.step == 3  # type: ignore[union-attr]
        assert dict(engine.checkpoints()[0].metadata) == {"loss": -5}
        assert restored_step(engine) == load_sync(tmp_path)["step"] == 3
        with pytest.raises(NoCheckpointError, match="of step 4 or newer that is not rejected"):
            engine.reject(step=4)
        save(engine, 4)
        assert marks(engine.checkpoints()) == [(4, False), (3, False), (2, False), (1, False)]
        assert restored_step(engine) == 4
    with SyncCheckpointEngine(tmp_path) as engine:
        assert restored_step(engine) == 4


def test_it_is_durable_for_later_engines_and_readers(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=3) as engine:
        save(engine, 1, 2, 3)
        engine.reject(step=2)
    with SyncCheckpointEngine(tmp_path, keep_last=3) as engine:
        assert restored_step(engine) == 1
        with open_checkpoint(tmp_path) as opened:
            assert opened["step"] == 1
        with pytest.raises(StoreError, match="none but rejected checkpoints of step 3"):
            engine.restore(state_of(-1), step=3)
        assert load_sync(tmp_path, step=3)["step"] == 3  # to look at what went wrong


def test_a_version_that_knows_nothing_of_it_reads_the_record(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=3) as engine:
        save(engine, 1, 2, metadata={"loss": 1.0})
        engine.reject(step=2)
        with pytest.raises(UnsupportedStateError, match="is what engine"):
            engine.checkpoint(state_of(3), step=3, metadata={"pccheck.rejected": True})
    found = at_once(tmp_path, StoreReader.newest)
    assert found is not None
    assert found[1].version == 1
    assert [dict(entry.metadata) for entry in found[1].entries] == [
        {"loss": 1.0, "pccheck.rejected": True},
        {"loss": 1.0},
    ]


def test_newer_is_what_was_saved_later_and_larger_steps_of_before_a_rollback(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=9) as engine:
        save(engine, 1, 2, 5)
        assert restored_step(engine, step=2) == 2
        save(engine, 3, 4)
        engine.reject(step=3)
        assert restored_step(engine) == 2  # and not step 5 of before it
        save(engine, 3)
        assert restored_step(engine) == 3
        save(engine, 1)  # went back by itself
        engine.reject(step=3)
        assert marks(engine.checkpoints())[0] == (1, True)
        assert restored_step(engine) == 2


def test_none_to_go_back_to_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=3) as engine:
        with pytest.raises(NoCheckpointError):
            engine.reject(step=1)
        save(engine, 1, 2)
        with pytest.raises(NoCheckpointError, match="of step 3 or newer"):
            engine.reject(step=3)
        for step in (1, 0):
            with pytest.raises(StoreError, match="would be left to restore"):
                engine.reject(step=step)
        assert marks(engine.checkpoints()) == [(2, False), (1, False)]
        assert restored_step(engine) == 2
        engine.reject(step=2)
        with pytest.raises(StoreError, match="none but rejected checkpoints would be left"):
            engine.remove(step=1)
        engine.remove(step=1, force=True)
        with pytest.raises(StoreError, match="none but rejected") as raised:
            engine.restore(state_of(-1))
        assert not isinstance(raised.value, NoCheckpointError)  # which some take for "begin anew"
    with SyncCheckpointEngine(tmp_path) as engine:
        with pytest.raises(StoreError, match="none but rejected"):
            engine.restore(state_of(-1))
        with pytest.raises(StoreError, match="none but rejected"):
            load_sync(tmp_path)
        save(engine, 1)
        assert restored_step(engine) == 1


def test_a_damaged_one_never_falls_back_to_a_rejected_one(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=3) as engine:
        save(engine, 1, 2, 3)
        engine.reject(step=2)
        flip(slot_of(tmp_path, 1), 100)
        with pytest.raises(StoreError, match=DAMAGE):
            engine.restore(state_of(-1))
        with pytest.raises(StoreError, match=DAMAGE):
            load_sync(tmp_path)


def test_a_pinned_one_stays_to_be_looked_at(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        save(engine, 1)
        engine.pin(step=1)
        save(engine, 2)
        engine.pin(step=2)
        engine.reject(step=2)
        save(engine, 3, 4)
        assert [(info.step, info.pinned, info.rejected) for info in engine.checkpoints()] == [
            (4, False, False),
            (2, True, True),
            (1, True, False),
        ]


def test_its_name_is_free_again(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=3) as engine:
        save(engine, 1, name="epoch=1")
        save(engine, 2, name="epoch=2")
        engine.reject(step=2)
        save(engine, 3, name="epoch=2")
        assert restored_step(engine, name="epoch=2") == 3


def test_what_is_in_flight_is_dropped_and_never_replaces_what_is_gone_back_to() -> None:
    engine, stuck, _ = stuck_engine(max_in_flight=2)
    large = {"weights": torch.zeros(1 << 20), "step": 0}  # too large to be written in one chain with its record
    try:
        engine.checkpoint(large, step=1).result()
        stuck.hold("reserve", "write", "flush")
        bad = [engine.checkpoint(large, step=step) for step in (2, 3)]
        stuck.wait_stuck(2)
        stuck.hold()
        assert engine.reject(step=2) == []  # none of them was committed
        stuck.release()
        assert [pending.result(30).step for pending in bad] == [1, 1]
        assert all(pending.superseded for pending in bad)
        assert marks(engine.checkpoints()) == [(1, False)]
        engine.checkpoint(large, step=2).result()
        assert marks(engine.checkpoints()) == [(2, False)]
    finally:
        engine.close()


def test_a_removal_waits_for_what_would_be_left_beside_rejected_ones() -> None:
    engine, stuck, _ = stuck_engine(keep_last=3, max_in_flight=2)
    try:
        save(engine, 1, 2)
        engine.reject(step=2)
        stuck.hold("write", "flush")
        engine.checkpoint({"w": torch.ones(1 << 20)}, step=3)
        release = threading.Timer(0.1, stuck.release)
        release.start()
        assert [info.step for info in engine.remove(step=1)] == [1]
        release.join()
        assert marks(engine.checkpoints())[0] == (3, False)
    finally:
        engine.close()


def test_one_in_flight_that_was_rejected_ends_though_none_is_left_beside_it() -> None:
    """It was admitted while the removal of the last one waited already."""
    large = {"weights": torch.zeros(1 << 20), "step": 0}  # too large to be written in one chain with its record

    async def train() -> None:
        stuck = StuckWriter(CrashWriter(CrashDisk()), kinds=())
        async with (
            CheckpointEngine(FOLDER, storage=StorageOptions(io=stuck), max_in_flight=2) as engine,
            AsyncExitStack() as ends,
        ):
            ends.callback(stuck.release)  # else a failure of this test waits for ever
            await (await engine.checkpoint(large, step=1))
            stuck.hold("flush")
            first = await engine.checkpoint(large, step=2)
            await asyncio.to_thread(stuck.wait_stuck)
            removing = asyncio.create_task(engine.remove(step=1, force=True))
            await asyncio.sleep(0)  # it waits for the first one
            stuck.hold("write", "flush")
            second = await engine.checkpoint(large, step=3)
            await asyncio.to_thread(stuck.wait_stuck, 2)
            assert await engine.reject(step=2) == []
            stuck.release(hold_on=True)  # once each: the first one ends, the second one comes to its flush
            assert (await first).step == 1
            await asyncio.to_thread(stuck.wait_stuck, 2)  # the other is the record without the last one
            stuck.release()
            assert [info.step for info in await removing] == [1]
            with pytest.raises(NoCheckpointError, match="step 3 was rejected, and no other is left"):
                await second
            assert engine.checkpoints() == []
            await (await engine.checkpoint(large, step=1))  # who gave it up need not be told

    asyncio.run(train())


def test_it_is_the_same_in_async_code(tmp_path: Path) -> None:
    async def train() -> None:
        async with CheckpointEngine(tmp_path, keep_last=3) as engine:
            for step in (1, 2):
                await (await engine.checkpoint(state_of(step), step=step))
            assert marks(await engine.reject(step=2)) == [(2, True)]
            restored = await engine.restore(state_of(-1))
            assert restored is not None
            assert restored.step == 1
            with pytest.raises(TypeError, match="step must be an integer"):
                await engine.reject(step="last")  # type: ignore[arg-type]

    asyncio.run(train())


def test_a_run_begins_anew_only_over_what_is_not_rejected(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=3) as engine:
        save(engine, 1, 5)
    with SyncCheckpointEngine(tmp_path, keep_last=3) as engine:
        engine.reject(step=5)
        with pytest.raises(ValueError, match="holds step 1"):
            engine.checkpoint(state_of(1), step=1)
        save(engine, 2)
        assert restored_step(engine) == 2
