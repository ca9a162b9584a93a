"""A store whose engine nothing in this process leads to any more: the next engine closes that one, or is refused."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import CheckpointEngine, PendingCheckpoint, StorageOptions, SyncCheckpointEngine, list_checkpoints
from pccheck_async.errors import StoreLockedError
from pccheck_async.medium.files import Files
from pccheck_async.testing import FailingWriter, StuckWriter
from pccheck_async.transfer.operations import Operations


def state_of(step: int) -> dict[str, Any]:
    return {"tensor": torch.arange(3000) + step, "step": step}


WRITERS: list[StuckWriter] = []


def stuck(path: str, operations: Operations) -> StuckWriter:
    WRITERS.append(StuckWriter(Files(path, operations), kinds=()))
    return WRITERS[-1]


def test_a_name_is_bound_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, nothing_left_behind: None) -> None:
    engine = SyncCheckpointEngine(tmp_path)
    made_at = f"{__file__}:{sys._getframe().f_lineno - 1}"
    engine.open()
    engine.checkpoint(state_of(1), step=1)
    engine = SyncCheckpointEngine(tmp_path)
    engine.open()
    [record] = [each for each in caplog.records if each.__dict__.get("event") == "lost_engine"]
    assert record.levelno == logging.WARNING
    assert f"the engine of {tmp_path}, made at {made_at}, was closed, as nothing leads to it" in record.getMessage()
    assert [info.step for info in engine.checkpoints()] == [1]  # it was drained
    engine.restore(state_of(0))
    engine.checkpoint(state_of(2), step=2).result(60)
    engine.close()


def test_a_name_is_bound_again_in_a_coroutine(tmp_path: Path, nothing_left_behind: None) -> None:
    async def main() -> None:
        for step in range(3):
            engine = CheckpointEngine(tmp_path)
            await engine.open()
            restored = await engine.restore(state_of(0))
            assert (restored.step if restored else -1) == step - 1
            await engine.checkpoint(state_of(step), step=step)
        await engine.close()

    asyncio.run(main())


def test_the_traceback_of_a_cancelled_step_does_not_lead_to_it(tmp_path: Path, nothing_left_behind: None) -> None:
    """In a notebook: the stop button, and then the cell that opens the engine once more."""
    engines: list[CheckpointEngine] = []

    async def train(steps: int) -> None:
        for step in range(steps):
            async with engines[-1].step(state_of(step), step):
                pass
            if step == 5:
                asyncio.get_running_loop().call_soon(tasks[-1].cancel)

    tasks: list[asyncio.Task[None]] = []

    async def main() -> None:
        engines.append(CheckpointEngine(tmp_path, interval=10**6, save_last=False))
        await engines[-1].open()
        tasks.append(asyncio.create_task(train(1000)))
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await tasks[-1]
        tasks.clear()
        engines[:] = [CheckpointEngine(tmp_path)]
        await engines[-1].open()
        await engines[-1].close()
        assert cancelled.traceback

    asyncio.run(main())


def test_a_name_that_is_bound_again_once_the_next_is_open_leads_to_it(tmp_path: Path) -> None:
    engine = SyncCheckpointEngine(tmp_path).open()
    with pytest.raises(StoreLockedError, match="made at"):
        engine = SyncCheckpointEngine(tmp_path).open()
    engine.close()


def test_one_that_is_in_a_cycle_is_looked_for_as_garbage(tmp_path: Path, nothing_left_behind: None) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.me = self
            self.engine = SyncCheckpointEngine(tmp_path).open()

    Trainer().engine.checkpoint(state_of(1), step=1)
    with SyncCheckpointEngine(tmp_path) as engine:
        assert [info.step for info in engine.checkpoints()] == [1]


def test_one_that_a_name_leads_to_stays_open(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as first:
        line = sys._getframe().f_lineno - 1
        with pytest.raises(StoreLockedError, match=f"made at .*{Path(__file__).name}:{line}: close it first"):
            SyncCheckpointEngine(tmp_path).open()
        assert first.checkpoint(state_of(1), step=1).result(60).step == 1
        with SyncCheckpointEngine(tmp_path / "another") as second:
            second.checkpoint(state_of(1), step=1)


def test_a_bound_method_and_an_open_step_lead_to_it(tmp_path: Path) -> None:
    engine = SyncCheckpointEngine(tmp_path).open()
    save, close = engine.checkpoint, engine.close
    del engine
    with pytest.raises(StoreLockedError, match="made at"):
        SyncCheckpointEngine(tmp_path).open()
    assert save(state_of(1), step=1).result(60).step == 1
    close()
    del save, close
    step = SyncCheckpointEngine(tmp_path, overwrite=True).open().step(state_of(2), 2)
    with step, pytest.raises(StoreLockedError, match="made at"):
        SyncCheckpointEngine(tmp_path).open()
    del step
    SyncCheckpointEngine(tmp_path).open().close()


def test_one_in_flight_is_waited_for_and_its_checkpoint_is_durable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, nothing_left_behind: None
) -> None:
    async def main() -> PendingCheckpoint:
        engine = await CheckpointEngine(tmp_path, storage=StorageOptions(io=stuck)).open()
        [writer] = WRITERS
        writer.hold("flush")
        pending = await engine.checkpoint(state_of(1), step=1)
        await asyncio.to_thread(writer.wait_stuck)
        del engine
        with pytest.raises(StoreLockedError, match=r"made at .*:\d+, has 1 checkpoint.* in 0.01 s: open again"):
            await CheckpointEngine(tmp_path, storage=StorageOptions(lock_timeout=0.01)).open()
        assert not pending.done()
        second = asyncio.create_task(CheckpointEngine(tmp_path, storage=StorageOptions(lock_timeout=60)).open())
        await asyncio.sleep(0.5)  # it waits for the first one by then
        assert not second.done()
        writer.release()
        async with asyncio.timeout(60):
            await (await second).close()
        return pending

    WRITERS.clear()
    assert asyncio.run(main()).result(0).step == 1
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]
    assert "1 checkpoint(s) in flight were drained" in caplog.text


def test_a_failure_that_nobody_saw_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def failing(path: str, operations: Operations) -> FailingWriter:
        writers.append(FailingWriter(Files(path, operations), fail_at=None, kinds=("write",)))
        return writers[0]

    writers: list[FailingWriter] = []
    engine = SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=failing)).open()
    writers[0].fail_next()
    engine.checkpoint(state_of(1), step=1)
    del engine
    with SyncCheckpointEngine(tmp_path) as engine:
        assert engine.checkpoints() == []
    [record] = [each for each in caplog.records if each.__dict__.get("event") == "lost_engine"]
    assert "Input/output error" in record.getMessage()


def test_two_that_are_opened_at_the_same_time(tmp_path: Path, nothing_left_behind: None) -> None:
    async def main() -> None:
        await CheckpointEngine(tmp_path).open()
        opened = await asyncio.gather(
            *(CheckpointEngine(tmp_path, storage=StorageOptions(lock_timeout=60)).open() for _ in range(2)),
            return_exceptions=True,
        )
        refused = [each for each in opened if isinstance(each, StoreLockedError)]
        assert len(refused) == 1, opened  # one closed the lost engine, and the other one meets the first
        for each in opened:
            if isinstance(each, CheckpointEngine):
                await each.close()

    asyncio.run(main())


def test_waiting_for_one_ends_when_it_is_cancelled(tmp_path: Path, nothing_left_behind: None) -> None:
    async def main() -> None:
        engine = await CheckpointEngine(tmp_path, storage=StorageOptions(io=stuck)).open()
        [writer] = WRITERS
        writer.hold("flush")
        pending = await engine.checkpoint(state_of(1), step=1)
        await asyncio.to_thread(writer.wait_stuck)
        del engine
        second = asyncio.create_task(CheckpointEngine(tmp_path, storage=StorageOptions(lock_timeout=60)).open())
        await asyncio.sleep(0.05)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        writer.release()
        assert (await pending.durable()).step == 1
        await (await CheckpointEngine(tmp_path).open()).close()

    WRITERS.clear()
    asyncio.run(main())
