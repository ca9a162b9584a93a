"""Whoever awaits the engine keeps a loop that turns: nothing on the caller's thread waits for a thread or a disk."""

from __future__ import annotations

import asyncio
import concurrent.futures
import fcntl
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from pccheck_async import CheckpointEngine, StorageOptions, SyncCheckpointEngine, list_checkpoints, load
from pccheck_async.engine import EngineLoop
from pccheck_async.errors import CorruptStoreError, StoreLockedError, WriteError
from pccheck_async.medium.files import Files
from pccheck_async.testing import FailingWriter
from pccheck_async.training.policy import Decision, EverySteps
from pccheck_async.transfer.operations import Operations
from tests.support.processes import open_files
from tests.support.settings import engine_settings

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

WAITS: dict[CodeType, str] = {
    threading.Thread.join.__code__: "a thread's end",
    threading.Event.wait.__code__: "an event",
    threading.Condition.wait.__code__: "a condition",
    concurrent.futures.wait.__code__: "futures",
    concurrent.futures.Future.result.__code__: "a future",
}
STARTS = threading.Thread.start.__code__
"""Waits until the thread has begun: for the processor, and for nothing that a disk, a lock or a hook can hold up."""
QUICK = {
    "getpid",
    "fspath",
    "fstat",
    "getcwd",
    "sched_getaffinity",
    "register_at_fork",
    "urandom",
    "_path_splitroot_ex",
}
"""System calls of the kernel's memory alone, and parsing of paths."""


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Fail where this thread calls anything that may wait for another thread, a lock or a disk."""
    seen: list[str] = []

    def callers(frame: FrameType | None) -> Iterator[FrameType]:
        while frame is not None:
            yield frame
            frame = frame.f_back

    def note(what: str, frame: FrameType) -> None:
        way = [each for each in callers(frame) if "/asyncio/" not in each.f_code.co_filename]
        if not any(each.f_code is STARTS or "importlib" in each.f_code.co_filename for each in way):
            seen.append(f"{what}: " + " < ".join(f"{each.f_code.co_qualname}:{each.f_lineno}" for each in way[:6]))

    def see(frame: FrameType, event: str, called: Any) -> None:
        if event == "call" and (what := WAITS.get(frame.f_code)) is not None:
            if not (frame.f_code is concurrent.futures.Future.result.__code__ and frame.f_locals["self"].done()):
                note(what, frame)
        elif event == "c_call":
            module, name = getattr(called, "__module__", None), called.__name__
            if called in (time.sleep, fcntl.flock) or (module == "posix" and name not in QUICK):
                note(f"{module}.{name}", frame)

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert not seen, "\n".join(seen)


def state_of(step: int, size: int = 3000) -> dict[str, Any]:
    return {"tensor": torch.arange(size) + step, "step": step}


def trainer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(300, 30)
    model(torch.ones(300)).sum().backward()
    return model, torch.optim.SGD(model.parameters(), momentum=0.9)


trainer()  # torch reads parts of itself from the disk when they are used first


@asynccontextmanager
async def opened(path: Path, **settings: Any) -> AsyncIterator[CheckpointEngine]:
    async with CheckpointEngine(path, **engine_settings(**settings)) as engine:
        await (await engine.checkpoint(state_of(1), step=1))
        yield engine


async def _open_and_close(path: Path) -> None:
    engine = CheckpointEngine(path)
    engine.on_event(lambda event: None)
    await engine.open()
    await engine.close()


async def _fail_to_open(path: Path) -> None:
    def fails(path: str, operations: Operations) -> FailingWriter:
        return FailingWriter(Files(path, operations), fail_at=1, kinds=("flush",))

    engine = CheckpointEngine(path, storage=StorageOptions(io=fails))
    engine.on_event(lambda event: None)
    with pytest.raises(WriteError):
        await engine.open()


async def _open_a_locked_store(path: Path) -> None:
    async with opened(path):
        with pytest.raises(StoreLockedError):
            await CheckpointEngine(path, storage=StorageOptions(lock_timeout=0.01)).open()


async def _be_cancelled_after_opening(path: Path) -> None:
    """The policy, which the engine asks when it is open, ends the opening."""

    class Cancelled(EverySteps):
        def decision(self) -> Decision:
            raise asyncio.CancelledError

    engine = CheckpointEngine(path, interval=Cancelled(1))
    with pytest.raises(asyncio.CancelledError):
        await engine.open()


async def _checkpoint(path: Path) -> None:
    async with opened(path, chunk_bytes=4096) as engine:
        for size in (30, 300_000):
            pending = await engine.checkpoint(state_of(2, size), step=2)
            await pending.captured()
            await pending.durable()
            await pending


async def _be_cancelled(path: Path) -> None:
    async with opened(path, chunk_bytes=4096, host_memory=8192) as engine:
        saving = asyncio.create_task(engine.checkpoint(state_of(2, 300_000), step=2))
        await asyncio.sleep(0)
        saving.cancel()
        await asyncio.wait([saving])


async def _step(path: Path) -> None:
    model, optimizer = trainer()
    async with opened(path, interval=1) as engine:
        engine.attach(optimizer)
        for step in range(2, 5):
            async with engine.step({"model": model, "optimizer": optimizer}, step):
                await engine.drain()  # the guard of an optimizer's step blocks its thread, as it should
                optimizer.step()


async def _restore(path: Path) -> None:
    async with opened(path) as engine:
        await (await engine.checkpoint(state_of(2, 300_000), step=2))
        await engine.checkpoint(state_of(3, 300_000), step=3)
        await engine.restore(state_of(0, 300_000))


async def _pin_unpin_and_drain(path: Path) -> None:
    async with opened(path) as engine:
        await engine.pin(step=1)
        await engine.unpin(step=1)
        await engine.checkpoint(state_of(2), step=2)
        await engine.drain()


async def _close_with_a_deadline(path: Path) -> None:
    engine = await CheckpointEngine(path).open()
    await engine.checkpoint(state_of(1), step=1)
    await engine.close(deadline=60)


async def _close_twice(path: Path) -> None:
    engine = await CheckpointEngine(path).open()
    await engine.checkpoint(state_of(1), step=1)
    await asyncio.gather(*(engine.close() for _ in range(3)))
    await engine.close()


async def _open_a_store_whose_engine_was_lost(path: Path) -> None:
    lost = await CheckpointEngine(path).open()
    pending = await lost.checkpoint(state_of(1), step=1)
    del lost
    async with CheckpointEngine(path, storage=StorageOptions(lock_timeout=60)) as engine:
        assert pending.done()
        assert engine.latest is not None


async def _leave_when_asked_to_go(path: Path) -> None:
    gone = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        async with opened(path) as engine:
            engine.on_preemption(signal.SIGUSR1)
            async with engine.step(state_of(2), 2):
                signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, gone)


@pytest.mark.parametrize(
    "work",
    [
        _open_and_close,
        _fail_to_open,
        _open_a_locked_store,
        _open_a_store_whose_engine_was_lost,
        _be_cancelled_after_opening,
        _checkpoint,
        _be_cancelled,
        _step,
        _restore,
        _pin_unpin_and_drain,
        _close_with_a_deadline,
        _close_twice,
        _leave_when_asked_to_go,
    ],
    ids=lambda work: work.__name__.strip("_"),
)
def test_nothing_on_the_callers_thread_waits(tmp_path: Path, work: Callable[[Path], Awaitable[None]]) -> None:
    async def main() -> None:
        with nothing_waits():
            await work(tmp_path)

    asyncio.run(main())


def test_nor_does_loading(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(state_of(1), step=1).result()

    async def main() -> None:
        with nothing_waits():
            assert (await load(tmp_path))["step"] == 1

    asyncio.run(main())


@pytest.mark.slow
def test_nor_does_tuning(tmp_path: Path) -> None:
    async def main() -> None:
        async with CheckpointEngine(tmp_path) as engine:
            with nothing_waits():
                await engine.tune(nbytes=1 << 16, budget_seconds=0.05)

    asyncio.run(main())


@pytest.mark.parametrize("io", [{}, {"io": "auto"}], ids=["default", "auto"])
def test_listing_takes_no_thread_and_no_loop(
    tmp_path: Path, io: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(state_of(1), step=1).result()

    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr("pccheck_async.engine.loop.new_event_loop", refuse)
    for path, steps in ((tmp_path, [1]), (tmp_path / "none", [])):
        assert [info.step for info in list_checkpoints(path, **io)] == steps
    (tmp_path / "commit").write_bytes(bytes(1 << 20))
    with pytest.raises(CorruptStoreError):
        list_checkpoints(tmp_path, **io)
    assert not open_files(tmp_path)


def test_an_interrupt_while_its_thread_starts_is_raised_and_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        EngineLoop("pccheck-interrupted")
    monkeypatch.undo()
    for thread in threading.enumerate():
        if thread.name == "pccheck-interrupted":
            thread.join(10)
            assert not thread.is_alive()
