"""User code runs on the thread that the documentation names, and never under a lock of the engine.

Under a lock, user code that waits for another thread, directly or by a lock of its own, waits for ever if that thread
needs the engine's lock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from pccheck_async import CheckpointError, StorageOptions, SyncCheckpointEngine, load, load_sync, open_checkpoint
from pccheck_async.engine import Decision, SaveReport, StepReport
from pccheck_async.testing import CrashDisk, CrashWriter, StuckWriter
from tests.engine.test_inline_capture_engine import FOLDER, small
from tests.support.devices import Device

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SECONDS = 20
"""After which a thread that needs a lock for an instant is taken for one that never gets it."""


class Locks:
    """Finds out whether the calling thread holds a lock that another thread needs to use an engine."""

    def __init__(self) -> None:
        self.engine: SyncCheckpointEngine | None = None
        self.threads: set[threading.Thread] = set()
        self.calls = self.under_lock = 0

    def look(self) -> None:
        """Use the engine on another thread, and wait for that one."""
        self.threads.add(threading.current_thread())
        self.calls += 1
        if self.engine is not None:
            other = threading.Thread(target=self.engine.statistics)
            other.start()
            other.join(SECONDS)
            self.under_lock += other.is_alive()


@contextmanager
def logging_to(locks: Locks) -> Iterator[None]:
    class Looking(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            locks.look()  # without the lock of the handler, which is the user's
            return True

    logger, handler = logging.getLogger("pccheck_async"), Looking()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class Locked:
    """A policy with a lock of its own, as one that reports to another thread has."""

    def __init__(self, locks: Locks) -> None:
        self._locks = locks
        self._lock = threading.Lock()

    def due(self, report: StepReport) -> bool:
        with self._lock:
            self._locks.look()
        return report.step % 2 == 0

    def skipped(self, report: StepReport) -> None: ...

    def saved(self, report: SaveReport) -> None:
        with self._lock:
            self._locks.look()

    def decision(self) -> Decision:
        with self._lock:
            self._locks.look()
            return Decision(2, None, f"asked {self._locks.calls} times")


def test_a_policy_is_asked_on_the_training_thread_alone(tmp_path: Path) -> None:
    locks = Locks()
    with SyncCheckpointEngine(tmp_path, interval=Locked(locks)) as engine:
        locks.engine = engine
        assert engine.statistics().interval == Decision(2, None, "asked 1 times")
        for step in range(4):
            with engine.step({"step": step}, step) as this:
                pass
            if this.pending is not None:
                this.pending.result(60)
        calls = locks.calls
        publishing = threading.Thread(target=engine.statistics)  # as the thread that writes the status file does
        publishing.start()
        publishing.join(60)
        assert engine.statistics().interval == Decision(2, None, f"asked {calls} times")
        assert locks.calls == calls
    assert locks.threads == {threading.current_thread()}
    assert locks.under_lock == 0


class Saving:
    """Checkpoints another state from its ``state_dict()``, so that there is no place for its own state any more."""

    def __init__(self, save: Callable[[], object]) -> None:
        self._save = save

    def state_dict(self) -> dict[str, Any]:
        self._save()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_handler_of_the_log_holds_no_lock_where_a_checkpoint_is_skipped() -> None:
    locks, writer = Locks(), StuckWriter(CrashWriter(CrashDisk()), kinds=())
    with SyncCheckpointEngine(
        FOLDER, storage=StorageOptions(io=writer), max_in_flight=1, on_busy="skip", save_last=False
    ) as engine:
        engine.checkpoint(small(), step=0).result(60)
        writer.hold("flush")
        locks.engine = engine
        with logging_to(locks):
            saving = Saving(lambda: engine.checkpoint(small(), step=2))
            assert engine.checkpoint({"saving": saving}, step=2).skipped
            assert engine.checkpoint(small(), step=3).skipped
        writer.release()
    assert (locks.calls, locks.under_lock) == (2, 0)


def test_a_handler_of_the_log_holds_no_lock_where_events_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccheck_async.telemetry.stream._MOST_EVENTS", 0)
    locks = Locks()
    with logging_to(locks), SyncCheckpointEngine(tmp_path) as engine:
        locks.engine = engine
        engine.on_event(print)
        engine.checkpoint(small(), step=0).result(60)
        assert engine.statistics().events_dropped > 1
    assert locks.under_lock == 0
    assert locks.calls > 0


class Weights(torch.nn.Parameter):
    """Calls ``look`` when torch is asked whether they require gradients."""

    look: Callable[[], object] | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.look is not None and "requires_grad" in str(getattr(func, "__self__", "")):
            cls.look()
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_a_class_of_tensors_holds_no_lock_where_an_optimizer_is_found_to_tear_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture ends on the engine's thread, which compares the tensors before the commit."""
    device, weights = Device(), torch.nn.Parameter(torch.ones(3000))
    attached, other = (torch.optim.SGD([each], lr=0.1) for each in (weights, Weights(torch.ones(3))))
    with SyncCheckpointEngine(
        tmp_path, storage=StorageOptions(io=device, host_memory=4096, chunk_bytes=4096), save_last=False
    ) as engine:
        engine.attach(attached)
        device.medium.hold("write")
        pending = engine.checkpoint({"weights": weights, "optimizer": attached}, step=0, overlap=True)
        device.medium.wait_stuck()
        ended: list[bool] = []

        def look() -> None:
            device.medium.release()
            with suppress(CheckpointError):
                ended.append(pending.result(SECONDS) is not None)

        monkeypatch.setattr(Weights, "look", look)
        other.step()
        monkeypatch.undo()
        assert ended


class Thing:
    """Pickled as a whole; notes the thread that unpickles it."""

    threads: ClassVar[list[threading.Thread]] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.threads.append(threading.current_thread())
        self.__dict__.update(state)

    def __init__(self) -> None:
        self.tensor = torch.ones(3)


def test_what_was_pickled_is_unpickled_on_the_callers_thread(tmp_path: Path) -> None:
    state = {"thing": Thing()}
    with SyncCheckpointEngine(tmp_path, allow_pickle=True) as engine:
        engine.checkpoint(state, step=0).result(60)
        Thing.threads.clear()
        engine.restore(state)
    load_sync(tmp_path, allow_pickle=True)
    asyncio.run(load(tmp_path, allow_pickle=True))
    with open_checkpoint(tmp_path, allow_pickle=True) as opened:
        opened["thing"]
        opened.load()
    assert Thing.threads == [threading.current_thread()] * 5
