"""What hooks of ``on_event`` are told, and that nothing they do matters to a checkpoint."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from pccheck_async import (
    CheckpointEngine,
    CheckpointError,
    Keep,
    StorageOptions,
    SyncCheckpointEngine,
    list_checkpoints,
)
from pccheck_async.errors import WriteError
from pccheck_async.telemetry import Event
from pccheck_async.telemetry.events import (
    Abandoned,
    Admitted,
    Captured,
    Closed,
    Durable,
    Failed,
    Opened,
    Restored,
    Skipped,
    Superseded,
    Waited,
)
from pccheck_async.telemetry.stream import Hooks
from pccheck_async.testing import CrashDisk, CrashWriter, FailingWriter, StuckWriter
from tests.engine.test_overlap import held

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits so many seconds for hooks: 60, however late a busy machine comes to them, or what a test says."""
    monkeypatch.setattr("pccheck_async.engine.core.HOOKS_SECONDS", getattr(request, "param", 60.0))


MANY = 1200
"""More events than wait for a slow hook before others are dropped."""


def state() -> dict[str, Any]:
    return {"weights": torch.arange(1000.0)}


def kinds(events: list[Event]) -> list[type[Event]]:
    return [type(event) for event in events]


def test_the_life_of_a_checkpoint_in_order(tmp_path: Path) -> None:
    events: list[Event] = []
    threads = set()

    def hook(event: Event) -> None:
        events.append(event)
        threads.add(threading.current_thread().name)

    engine = SyncCheckpointEngine(tmp_path)
    engine.on_event(hook)
    with engine:
        info = engine.checkpoint(state(), step=5).result()
        engine.restore(state())
    told = [event for event in events if not isinstance(event, Waited)]
    assert kinds(told) == [Opened, Admitted, Captured, Durable, Restored, Closed]
    _, admitted, captured, durable, restored, closed = told
    assert isinstance(admitted, Admitted)
    assert isinstance(captured, Captured)
    assert isinstance(durable, Durable)
    assert isinstance(restored, Restored)
    assert isinstance(closed, Closed)
    for event in (admitted, captured, durable, restored):
        assert (event.step, event.counter) == (5, 0)
    assert captured.nbytes == durable.nbytes == restored.nbytes == info.nbytes == closed.nbytes
    assert 0 <= captured.seconds <= durable.seconds
    assert [event.time for event in told] == sorted(event.time for event in told)
    (waited,) = [event for event in events if isinstance(event, Waited)]
    assert (waited.step, waited.where) == (5, "checkpoint")
    assert threads == {"pccheck-events"}


def test_superseded_failed_and_skipped() -> None:
    events: list[Event] = []
    disk = CrashDisk()
    stuck = StuckWriter(CrashWriter(disk), kinds=())
    with SyncCheckpointEngine("store", storage=StorageOptions(io=stuck), on_busy="skip", max_in_flight=1) as engine:
        engine.on_event(events.append)
        stuck.hold("write")
        first = engine.checkpoint(state(), step=1)
        assert engine.checkpoint(state(), step=2).skipped
        stuck.release()
        first.result()
    (skipped,) = [event for event in events if isinstance(event, Skipped)]
    assert (skipped.step, skipped.counter, skipped.in_flight) == (2, first.counter, 1)

    events.clear()
    with SyncCheckpointEngine(
        "store", storage=StorageOptions(io=FailingWriter(CrashWriter(disk), fail_at=2, kinds=("write",)))
    ) as engine:
        engine.on_event(events.append)
        with pytest.raises(WriteError) as told:
            engine.checkpoint(state(), step=3).result()
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert (failed.step, failed.error) == (3, told.value)
    assert Durable not in kinds(events)

    events.clear()
    stuck = StuckWriter(CrashWriter(disk), kinds=())
    with SyncCheckpointEngine("store", storage=StorageOptions(io=stuck)) as engine:
        engine.on_event(events.append)
        stuck.hold("write", after=1)  # the first is the record's, again
        older = engine.checkpoint(state(), step=4)
        stuck.wait_stuck()
        stuck.hold()
        engine.checkpoint(state(), step=5).result()
        stuck.release()
        older.result()
        assert older.superseded
    ended = [event for event in events if isinstance(event, (Durable, Superseded))]
    assert [(type(event), event.step) for event in ended] == [(Durable, 5), (Superseded, 4)]


def test_abandoned_comes_before_failed(tmp_path: Path) -> None:
    events: list[Event] = []
    with held(tmp_path, max_stall=0.02) as it:
        it.engine.on_event(events.append)
        it.optimizer.step()
        with pytest.raises(CheckpointError, match="abandoned"):
            it.pending.result()
    (abandoned,) = [event for event in events if isinstance(event, Abandoned)]
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert (abandoned.step, abandoned.seconds) == (1, 0.02)
    assert failed.step == 1
    assert events.index(abandoned) < events.index(failed)
    assert [event.where for event in events if isinstance(event, Waited)] == ["optimizer"]


def test_a_hook_that_raises_is_said_once_and_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []

    def broken(event: Event) -> None:
        raise SystemExit("no")

    with SyncCheckpointEngine(tmp_path) as engine:
        engine.on_event(broken)
        engine.on_event(seen.append)
        for step in range(5):
            engine.checkpoint(state(), step=step).result()
    assert [event.step for event in seen if isinstance(event, Durable)] == list(range(5))
    said = [record for record in caplog.records if getattr(record, "event", None) == "event_hook"]
    assert len(said) == 1
    assert "SystemExit('no')" in said[0].getMessage()


@dataclass
class Unhashable:
    """A dataclass compares its fields, and so is no key of a dict."""

    called: int = 0

    def __call__(self, event: Event) -> None:
        self.called += 1
        raise ValueError("no")


def test_a_hook_that_raises_may_be_any_object(caplog: pytest.LogCaptureFixture) -> None:
    hooks, broken = Hooks(), Unhashable()
    seen: list[Event] = []
    hooks.add(broken)
    hooks.add(seen.append)
    for step in range(3):
        hooks.put(Admitted(step=step, counter=step))
    hooks.close().result(60)
    assert (broken.called, len(seen)) == (3, 3)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("patience", [0.1], indirect=True)
def test_a_hook_that_blocks_harms_nothing(tmp_path: Path) -> None:
    go_on, blocked = threading.Event(), threading.Event()
    seen: list[Event] = []

    def slow(event: Event) -> None:
        blocked.set()
        go_on.wait()
        seen.append(event)

    with SyncCheckpointEngine(tmp_path) as engine:
        engine.on_event(slow)
        engine.checkpoint(state(), step=1).result()
        blocked.wait()
        engine.checkpoint(state(), step=2).result()
    # Closed although the hook still hangs in its first event.
    assert seen == []
    assert [info.step for info in list_checkpoints(tmp_path)] == [2]
    go_on.set()


@pytest.mark.parametrize("patience", [5.0], indirect=True)
def test_a_hook_that_hangs_at_the_end_holds_up_no_loop(tmp_path: Path) -> None:
    turned: list[bool] = []

    async def main() -> None:
        loop, go_on = asyncio.get_running_loop(), threading.Event()

        def waits_for_the_loop(event: Event) -> None:
            if isinstance(event, Closed):
                loop.call_soon_threadsafe(go_on.set)
                turned.append(go_on.wait(4))

        async with CheckpointEngine(tmp_path) as engine:
            engine.on_event(waits_for_the_loop)

    asyncio.run(main())
    assert turned == [True]


def test_events_beyond_the_bound_are_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    hooks, go_on, blocked = Hooks(), threading.Event(), threading.Event()
    seen: list[int] = []

    def slow(event: Event) -> None:
        assert isinstance(event, Admitted)
        blocked.set()
        go_on.wait()
        seen.append(event.step)

    hooks.add(slow)
    hooks.put(Admitted(step=0, counter=0))
    blocked.wait()
    for step in range(1, MANY):
        hooks.put(Admitted(step=step, counter=step))
    assert hooks.dropped > 1
    go_on.set()
    hooks.close().result(60)
    assert seen == list(range(MANY - hooks.dropped))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_hook_may_be_removed_and_may_use_the_engine(tmp_path: Path) -> None:
    steps: list[int] = []
    done = threading.Event()
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine:

        def pin(event: Event) -> None:
            if isinstance(event, Durable):
                engine.pin(step=event.step)
                remove()
                done.set()

        remove = engine.on_event(pin)
        engine.checkpoint(state(), step=1).result()
        done.wait()
        remove()  # once more: nothing happens
        steps += [engine.checkpoint(state(), step=step).result().step for step in range(2, 5)]
        assert [info.step for info in engine.checkpoints() if info.pinned] == [1]


def test_a_hook_that_closes_waits_for_no_events_and_so_not_for_itself() -> None:
    hooks, ended = Hooks(), Future[bool]()

    def close(event: Event) -> None:
        if isinstance(event, Captured):
            ended.set_result(hooks.close().done())

    hooks.add(close)
    hooks.put(Admitted(step=1, counter=1))  # then the thread has begun
    hooks.put(Captured(step=1, counter=1, nbytes=1, seconds=0.0))
    assert ended.result(60)
    hooks.close().result(60)


def test_hooks_of_an_engine_that_never_opened_leave_no_thread(tmp_path: Path) -> None:
    SyncCheckpointEngine(tmp_path).on_event(print)


class Broken(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise ValueError("no")


def test_a_handler_of_the_log_that_raises_harms_nothing(tmp_path: Path) -> None:
    logger, handler = logging.getLogger("pccheck_async"), Broken()
    before = logger.level
    with SyncCheckpointEngine(tmp_path) as engine:
        logger.addHandler(handler)
        logger.setLevel("DEBUG")
        try:
            assert engine.checkpoint(state(), step=1).result().step == 1
            engine.drain()
        finally:
            logger.setLevel(before)
            logger.removeHandler(handler)
    assert engine.statistics().durable_bytes > 0


def test_nor_does_one_that_raises_where_a_metric_is_missed(tmp_path: Path) -> None:
    logger, handler = logging.getLogger("pccheck_async"), Broken()
    logger.addHandler(handler)
    try:
        for folder, saves in (("many", 17), ("few", 2)):  # told of in a save, and by closing
            with SyncCheckpointEngine(tmp_path / folder, keep=Keep(best=("loss", 1, "min"))) as engine:
                for step in range(saves):
                    engine.checkpoint(state(), step=step, metadata={"lost": 1.0}).result()
            assert engine.statistics().durable == saves
    finally:
        logger.removeHandler(handler)


def test_nor_does_one_that_raises_where_events_are_dropped_or_a_hook_raises() -> None:
    hooks, go_on, blocked = Hooks(), threading.Event(), threading.Event()
    seen: list[Event] = []

    def slow(event: Event) -> None:
        blocked.set()
        go_on.wait()
        raise ValueError("no")

    hooks.add(slow)
    hooks.add(seen.append)
    logger, handler = logging.getLogger("pccheck_async"), Broken()
    logger.addHandler(handler)
    try:
        hooks.put(Admitted(step=0, counter=0))
        blocked.wait()
        for step in range(1, MANY):
            hooks.put(Admitted(step=step, counter=step))
        go_on.set()
        hooks.close().result(60)
    finally:
        logger.removeHandler(handler)
    assert hooks.dropped > 1
    assert len(seen) == MANY - hooks.dropped


def test_what_a_hook_gets_is_counted_already(tmp_path: Path) -> None:
    counted: SimpleQueue[tuple[int, int, int]] = SimpleQueue()
    with SyncCheckpointEngine(tmp_path) as engine:

        def look(event: Event) -> None:
            if isinstance(event, Durable):
                found = engine.statistics()
                counted.put((found.admitted, found.durable, found.in_flight))

        engine.on_event(look)
        for step in range(3):
            engine.checkpoint(state(), step=step).result()
            assert counted.get(timeout=60) == (step + 1, step + 1, 0)
