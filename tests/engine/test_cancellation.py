"""Cancelling anything at any moment leaves nothing running, nothing held, and nothing untold."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import gc
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import (
    CheckpointEngine,
    CheckpointError,
    StorageOptions,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
)
from pccheck_async.engine import EngineConfig, flight_of, run
from pccheck_async.engine.assembly import EngineParts
from pccheck_async.engine.flight import Waiting
from pccheck_async.engine.in_flight import InFlight
from pccheck_async.engine.loop import until_done
from pccheck_async.errors import ClosedError, StoreFailedError, WriteError
from pccheck_async.medium import Medium
from pccheck_async.medium.files import Files
from pccheck_async.telemetry import Stream
from pccheck_async.testing import FailingWriter, StuckWriter
from pccheck_async.testing.probe import probe
from pccheck_async.transfer import PAGE_BYTES, uninterrupted
from pccheck_async.transfer.operations import Operations
from pccheck_async.transfer.operations.python import PythonOperations
from tests.support.processes import open_files, passes_in_a_forked_child

pytestmark = pytest.mark.usefixtures("nothing_left_behind", "machine_asked_once")


class Stuck:
    """Makes stuck writers on real files, and remembers the last one."""

    def __init__(self, *kinds: str, **failing: Any) -> None:
        self.kinds, self.failing = kinds, failing
        self.medium: StuckWriter

    def __call__(self, path: str, operations: Operations) -> Medium:
        inner: Medium = Files(path, operations)
        if self.failing:
            inner = FailingWriter(inner, **self.failing)
        self.medium = StuckWriter(inner, kinds=self.kinds)
        return self.medium


def state_of(step: int) -> dict[str, Any]:
    return {"tensor": torch.arange(3000) + step, "step": step}


@pytest.mark.parametrize("turns", range(0, 60, 3))
def test_a_cancelled_open_gives_the_store_free(tmp_path: Path, turns: int) -> None:
    async def main() -> None:
        opening = asyncio.create_task(CheckpointEngine(tmp_path).open())
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        try:
            engine = await opening
        except asyncio.CancelledError:
            pass
        else:
            await engine.close()
        async with CheckpointEngine(tmp_path, storage=StorageOptions(lock_timeout=0)) as engine:
            await (await engine.checkpoint(state_of(1), step=1))

    asyncio.run(main())


def test_an_engine_is_not_closed_while_it_is_opened(tmp_path: Path) -> None:
    async def main() -> None:
        engine = CheckpointEngine(tmp_path)
        opening = asyncio.create_task(engine.open())
        await asyncio.sleep(0)
        with pytest.raises(ClosedError, match="is being opened"):
            await engine.close()
        await opening
        await (await engine.checkpoint(state_of(1), step=1))
        await engine.close()

    asyncio.run(main())
    assert load_sync(tmp_path)["step"] == 1


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 21, 40])
def test_cancelled_restores_hold_no_slots(tmp_path: Path, turns: int) -> None:
    async def main() -> None:
        async with CheckpointEngine(tmp_path, storage=StorageOptions(chunk_bytes=4096)) as engine:
            await (await engine.checkpoint(state_of(0), step=0))
            for step in range(1, 5):
                restoring = asyncio.create_task(engine.restore(state_of(9)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                restoring.cancel()
                await asyncio.wait([restoring])
                await (await engine.checkpoint(state_of(step), step=step))
            assert engine.statistics().slots <= 4

    asyncio.run(main())
    assert load_sync(tmp_path)["step"] == 4


def test_a_flush_that_fails_after_its_checkpoint_was_cancelled_latches(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(state_of(0), step=0).result(60)
    stuck = Stuck("flush", fail_at=1, kinds=("flush",), error=errno.EIO)
    big = {"tensor": torch.zeros(100_000)}  # more than the pool holds: the capture cannot end before the flush

    async def main() -> None:
        async with CheckpointEngine(
            tmp_path, storage=StorageOptions(io=stuck, chunk_bytes=PAGE_BYTES, host_memory=2 * PAGE_BYTES)
        ) as engine:
            saving = asyncio.create_task(engine.checkpoint(big, step=1))
            await asyncio.to_thread(stuck.medium.wait_stuck)
            saving.cancel()
            await asyncio.sleep(0)
            stuck.medium.release()
            with pytest.raises(asyncio.CancelledError):
                await saving
            with pytest.raises(StoreFailedError):
                await engine.checkpoint(big, step=2)

    asyncio.run(main())
    assert load_sync(tmp_path)["step"] == 0


def test_nobody_else_is_told_of_a_checkpoint_while_it_is_aborted() -> None:
    in_flight = InFlight(EngineConfig(), Stream("store"))
    for aborted in (True, False):
        pending = in_flight.add(1)
        with Waiting(pending) if aborted else nullcontext():
            in_flight.note_end(pending, error := CheckpointError("cancelled"), superseded=False, info=None)
            pending.set_failed(error)
            with nullcontext() if aborted else pytest.raises(CheckpointError):
                in_flight.raise_untold()


@pytest.mark.parametrize("when", ["before it is told", "as it is told"])
def test_a_failure_whose_waiter_is_cancelled_is_for_the_next_call(when: str) -> None:
    in_flight = InFlight(EngineConfig(), Stream("store"))

    async def main() -> None:
        pending = in_flight.add(1)
        waiting = asyncio.create_task(pending.captured())
        await asyncio.sleep(0)
        in_flight.note_end(pending, error := CheckpointError("no"), superseded=False, info=None)
        in_flight.raise_untold()  # somebody waits for it
        if when == "as it is told":
            pending.set_failed(error)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        with pytest.raises(CheckpointError, match="no"):
            in_flight.raise_untold()
        in_flight.raise_untold()

    asyncio.run(main())


def test_a_failure_that_a_cancelled_waiter_saw_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()  # what earlier tests left says nothing here

    async def main() -> None:
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        waiting = asyncio.create_task(until_done(future))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        future.set_exception(ValueError("no"))
        await waiting
        gc.collect()

    asyncio.run(main())
    assert not caplog.records  # "Future exception was never retrieved"


def test_cancelled_twice_still_waits_for_its_copies(tmp_path: Path) -> None:
    stuck = Stuck("write", fail_at=None)
    big = {"tensor": torch.zeros(100_000)}

    async def main() -> None:
        async with CheckpointEngine(
            tmp_path, storage=StorageOptions(io=stuck, chunk_bytes=PAGE_BYTES, host_memory=2 * PAGE_BYTES)
        ) as engine:
            stuck.medium.release()
            await (await engine.checkpoint(state_of(0), step=0))
            stuck.medium.hold("write")
            saving = asyncio.create_task(engine.checkpoint(big, step=1))
            await asyncio.to_thread(stuck.medium.wait_stuck)
            for _ in range(3):
                saving.cancel()
                await asyncio.sleep(0.01)
            assert not saving.done()
            stuck.medium.release()
            with pytest.raises(asyncio.CancelledError):
                await saving
            assert engine.statistics().in_flight == 0

    # Opening writes too.
    opened = Stuck.__call__

    def make(self: Stuck, path: str, operations: Operations) -> Medium:
        writer = opened(self, path, operations)
        self.medium.release()
        return writer

    stuck.__class__ = type("Released", (Stuck,), {"__call__": make})
    asyncio.run(main())


def test_cancelled_after_its_capture_it_goes_on_and_its_failure_is_told(tmp_path: Path) -> None:
    stuck = Stuck(fail_at=2, kinds=("write",), error=errno.EIO)

    async def main() -> None:
        async with CheckpointEngine(tmp_path, storage=StorageOptions(io=stuck)) as engine:
            stuck.medium.hold("write")
            core = probe(engine).core
            pending, _ = core.start_checkpoint(state_of(1), 1, None)
            await asyncio.to_thread(pending.wait_captured)
            await run(core, core.abort, flight_of(pending))  # what a cancelled checkpoint() does, too late
            stuck.medium.release()
            with pytest.raises(WriteError):
                await engine.drain()

    asyncio.run(main())


def test_closing_ends_a_restore_of_another_thread(tmp_path: Path) -> None:
    stuck = Stuck()
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(state_of(0), step=0).result(60)
    engine = SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=stuck)).open()
    stuck.medium.hold("read")
    ended: list[BaseException] = []

    def restore() -> None:
        try:
            engine.restore(state_of(9))
        except ClosedError as error:
            ended.append(error)

    restoring = threading.Thread(target=restore)
    restoring.start()
    stuck.medium.wait_stuck()
    closing = threading.Thread(target=engine.close)
    closing.start()
    stuck.medium.release()
    closing.join(60)
    restoring.join(60)
    assert not closing.is_alive()
    assert not restoring.is_alive()


def test_skipping_is_decided_for_one_thread_after_another(tmp_path: Path) -> None:
    stuck = Stuck()
    barrier = threading.Barrier(4)

    class Slow:
        def state_dict(self) -> dict[str, int]:
            barrier.wait(30)  # all of them found a free place before any was admitted
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=stuck), max_in_flight=1, on_busy="skip") as engine:
        stuck.medium.hold("flush")
        threads = [threading.Thread(target=engine.checkpoint, args=({"slow": Slow()},)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        stuck.medium.release()
        engine.drain()
        found = engine.statistics()
        assert (found.admitted, found.skipped) == (1, 3)


@pytest.mark.parametrize("when", ["opening", "closing"])
def test_a_coroutine_that_is_thrown_away_half_way_leaves_no_engine(tmp_path: Path, when: str) -> None:
    async def main() -> None:
        engine = CheckpointEngine(tmp_path)
        if when == "closing":
            await engine.open()
        thrown_away = engine.open() if when == "opening" else engine.close()
        thrown_away.send(None)
        thrown_away.close()
        async with CheckpointEngine(tmp_path, storage=StorageOptions(lock_timeout=0)):
            pass

    asyncio.run(main())
    assert not open_files(tmp_path)


@pytest.mark.parametrize("thread", ["the caller's", "the engine's"])
def test_a_checkpoint_that_is_thrown_away_half_way_is_not_committed(tmp_path: Path, thread: str) -> None:
    """The state may change from then on; the garbage collector closes coroutines on the engine's thread, too."""
    stuck = Stuck()
    big = {"tensor": torch.zeros(100_000)}

    async def main() -> None:
        async with CheckpointEngine(
            tmp_path, storage=StorageOptions(io=stuck, chunk_bytes=PAGE_BYTES, host_memory=2 * PAGE_BYTES)
        ) as engine:
            await (await engine.checkpoint(big, step=0))
            stuck.medium.hold("write")
            thrown_away = engine.checkpoint(big, step=1)
            thrown_away.send(None)
            await asyncio.to_thread(stuck.medium.wait_stuck)
            if thread == "the caller's":
                thrown_away.close()
            else:
                loop = probe(engine).loop

                async def collect() -> None:
                    thrown_away.close()

                await loop.run(collect())
            big["tensor"] += 1
            stuck.medium.release()
            await engine.drain()
            assert [info.step for info in engine.checkpoints()] == [0]
            assert engine.statistics().failed == 1
            await (await engine.checkpoint(big, step=2))

    asyncio.run(main())
    assert load_sync(tmp_path)["tensor"].mean() == 1


def test_a_restore_that_is_thrown_away_half_way_fills_nothing_any_more(tmp_path: Path) -> None:
    stuck = Stuck()

    async def main() -> None:
        async with CheckpointEngine(tmp_path, storage=StorageOptions(io=stuck)) as engine:
            await (await engine.checkpoint(state_of(1), step=1))
            stuck.medium.hold("read", after=1)  # the manifest passes
            thrown_away = engine.restore(state_of(0))
            task = asyncio.create_task(thrown_away)
            await asyncio.to_thread(stuck.medium.wait_stuck)
            letting_go = threading.Timer(0.02, stuck.medium.release)
            letting_go.start()
            thrown_away.close()
            assert not stuck.medium.stuck
            letting_go.join()
            with pytest.raises(RuntimeError, match="reuse"):
                await task

    asyncio.run(main())


@pytest.mark.parametrize("closing", [False, True])
def test_what_is_skipped_after_it_was_read_gives_its_buffer_back(tmp_path: Path, closing: bool) -> None:
    stuck = Stuck()
    engine = SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=stuck), max_in_flight=1, on_busy="skip").open()

    class Busy:
        """While it is read, the only place is taken, or the engine closed."""

        def state_dict(self) -> dict[str, int]:
            if closing:
                engine.close()
            else:
                engine.checkpoint({"x": torch.ones(3)}, step=1)
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    engine.checkpoint({"x": torch.ones(3)}, step=0).result(60)
    free = len(probe(engine).inline_captures.free)
    stuck.medium.hold("flush")
    if closing:
        stuck.medium.release()
    with pytest.raises(ClosedError) if closing else nullcontext():
        assert engine.checkpoint({"busy": Busy(), "x": torch.ones(3)}, step=2).skipped
    stuck.medium.release()
    engine.close()
    assert len(probe(engine).inline_captures.free) == free


def test_an_engine_that_is_closed_twice_at_the_same_time(tmp_path: Path) -> None:
    stuck = Stuck()

    async def main() -> None:
        engine = await CheckpointEngine(tmp_path, storage=StorageOptions(io=stuck)).open()
        stuck.medium.hold("write")
        pending = await engine.checkpoint(state_of(1), step=1)
        closing = [asyncio.create_task(engine.close()) for _ in range(3)]
        await asyncio.to_thread(stuck.medium.wait_stuck)
        with pytest.raises(CheckpointError, match="still closing"):
            await engine.close(deadline=0.01)
        stuck.medium.release()
        await asyncio.gather(*closing)
        assert (await pending).step == 1
        await engine.close()

    asyncio.run(main())
    assert not open_files(tmp_path)
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]


def test_each_who_closes_an_engine_is_told_that_it_was_left_behind(tmp_path: Path) -> None:
    stuck = Stuck()

    async def main() -> None:
        engine = await CheckpointEngine(tmp_path, storage=StorageOptions(io=stuck)).open()
        stuck.medium.hold("write")
        await engine.checkpoint(state_of(1), step=1)
        await asyncio.to_thread(stuck.medium.wait_stuck)
        closing = [engine.close(deadline=0.01), engine.close(), engine.close()]
        for error in await asyncio.gather(*closing, return_exceptions=True):
            assert "the checkpoints of steps 1 were still being written; left behind" in str(error)
        await engine.close()  # and nobody later
        stuck.medium.release()
        await asyncio.to_thread(probe(engine).end_what_was_left_behind)

    asyncio.run(main())


@pytest.mark.parametrize("cancelled", [0, 1])
def test_one_of_those_who_close_an_engine_is_cancelled(tmp_path: Path, cancelled: int) -> None:
    """The first ends what is in flight, and the other one is told of that; any other only waits no more."""
    stuck = Stuck()

    async def main() -> None:
        engine = await CheckpointEngine(tmp_path, storage=StorageOptions(io=stuck)).open()
        stuck.medium.hold("write")
        pending = await engine.checkpoint(state_of(1), step=1)
        await asyncio.to_thread(stuck.medium.wait_stuck)
        closing = [asyncio.create_task(engine.close()) for _ in range(2)]
        await asyncio.sleep(0)
        closing[cancelled].cancel()
        if cancelled == 1:
            await asyncio.wait([closing[1]])  # although nothing has ended
            assert not probe(engine).loop.loop.is_closed()
        stuck.medium.release()
        with pytest.raises(asyncio.CancelledError):
            await closing[cancelled]
        if cancelled == 0:
            with pytest.raises(CheckpointError, match="step 1 was cancelled; nothing was committed"):
                await closing[1]
        else:
            await closing[0]
            assert (await pending).step == 1
        assert not open_files(tmp_path)
        assert probe(engine).loop.loop.is_closed()
        await engine.close()

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(("what", "kind"), [("restore", "read"), ("pin", "flush"), ("surplus", "remove")])
def test_a_deadline_holds_whatever_hangs(tmp_path: Path, what: str, kind: str) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=3) as engine:
        for step in range(3):
            engine.checkpoint(state_of(step), step=step).result(60)
    stuck = Stuck()
    engine = SyncCheckpointEngine(
        tmp_path, keep_last=3 if what == "pin" else 1, max_in_flight=1, storage=StorageOptions(io=stuck)
    ).open()

    def work() -> None:
        match what:
            case "restore":
                engine.restore(state_of(0))
            case "pin":
                engine.pin(step=1)
            case _:
                engine.checkpoint(state_of(3), step=3).result(60)

    stuck.medium.hold(kind)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        working = threads.submit(work)
        stuck.medium.wait_stuck()
        with pytest.raises(CheckpointError, match="a restore, a pin or the removal of a slot had not ended"):
            engine.close(deadline=0.01)
        assert open_files(tmp_path)
        stuck.medium.release()  # what was left behind ends
        error = working.exception(60)
    assert error is None if what == "surplus" else isinstance(error, ClosedError)
    while open_files(tmp_path):
        threading.Event().wait(0.001)
    probe(engine).loop.stop()
    assert list_checkpoints(tmp_path)[0].step == (3 if what == "surplus" else 2)


def test_a_close_that_is_interrupted_twice_still_closes(tmp_path: Path) -> None:
    """Whoever interrupts it again waits no more for what it does, and stops the loop."""
    stuck = Stuck()
    engine = SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=stuck)).open()
    stuck.medium.hold("write")
    pending = engine.checkpoint(state_of(1), step=1)
    stuck.medium.wait_stuck()
    parts = probe(engine)
    (saving,) = parts.tasks
    closing, cancel = parts.loop.submit(parts.core.assembly.close())
    cancel()
    while not saving.cancelling():
        threading.Event().wait(0.001)
    stopping = threading.Thread(target=parts.loop.stop)
    stopping.start()
    while parts.loop.post(lambda: None):
        threading.Event().wait(0.001)
    threading.Event().wait(0.1)  # and now it is cancelled once more
    stuck.medium.release()
    stopping.join(60)
    assert isinstance(closing.exception(60), ClosedError)
    with pytest.raises(CheckpointError, match="nothing was committed"):
        pending.result(60)
    assert not open_files(tmp_path)
    with pytest.raises(ClosedError):
        engine.close()


def test_a_child_forked_while_a_deadline_left_files_behind_holds_none(tmp_path: Path) -> None:
    stuck = Stuck()
    engine = SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=stuck)).open()
    stuck.medium.hold("flush")
    engine.checkpoint(state_of(1), step=1)
    stuck.medium.wait_stuck()
    with pytest.raises(Exception, match="gave up"):
        engine.close(deadline=0.01)

    def holds_nothing() -> None:
        assert open_files(tmp_path) == []

    assert passes_in_a_forked_child(holds_nothing)
    stuck.medium.release()
    probe(engine).end_what_was_left_behind()


class Told(StuckWriter):
    """Hangs at the first flush, and knows of forks only what the engine tells."""

    told = False

    def abandon(self) -> None:
        self.told = True
        super().abandon()


def test_a_child_forked_while_the_store_is_opened_lets_go_of_it(tmp_path: Path) -> None:
    async def main() -> None:
        made: asyncio.Future[Told] = asyncio.get_running_loop().create_future()

        def make(path: str, operations: Operations) -> Medium:
            writer = Told(Files(path, operations), kinds=("flush",))
            made.get_loop().call_soon_threadsafe(made.set_result, writer)
            return writer

        opening = asyncio.create_task(CheckpointEngine(tmp_path, storage=StorageOptions(io=make)).open())
        writer = await made
        await asyncio.to_thread(writer.wait_stuck)

        def holds_nothing() -> None:
            assert writer.told
            assert open_files(tmp_path) == []

        held, let_go = open_files(tmp_path), passes_in_a_forked_child(holds_nothing)
        writer.release()
        await (await opening).close()
        assert held, "the store is locked already"
        assert let_go

    asyncio.run(main())


def test_an_open_cancelled_after_it_succeeded_gives_the_store_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's side is done, and the caller is cancelled before it gets to know."""
    really_open = EngineParts.open

    async def main() -> None:
        loop = asyncio.get_running_loop()
        cancelled = threading.Event()

        def cancel() -> None:
            opening.cancel()
            cancelled.set()

        async def open_and_cancel(*arguments: Any, **parts: Any) -> None:
            await really_open(*arguments, **parts)
            loop.call_soon_threadsafe(cancel)
            cancelled.wait(10)

        monkeypatch.setattr(EngineParts, "open", open_and_cancel)
        opening = asyncio.create_task(CheckpointEngine(tmp_path).open())
        with pytest.raises(asyncio.CancelledError):
            await opening
        monkeypatch.undo()
        async with CheckpointEngine(tmp_path, storage=StorageOptions(lock_timeout=0)):
            pass

    asyncio.run(main())


def test_a_forked_child_does_not_wait_for_a_checkpoint_of_its_parent(tmp_path: Path) -> None:
    stuck = Stuck()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=stuck)) as engine:
        done = engine.checkpoint(state_of(1), step=1)
        done.result(60)
        stuck.medium.hold("flush")
        pending = engine.checkpoint(state_of(2), step=2)

        def in_the_child() -> None:
            assert done.result().step == 1
            with pytest.raises(ClosedError, match="in the parent process"):
                pending.result()
            with pytest.raises(ClosedError, match="in the parent process"):
                asyncio.run(pending.durable())

        assert passes_in_a_forked_child(in_the_child)
        stuck.medium.release()
        assert pending.result(60).step == 2


@pytest.mark.slow
def test_a_child_forked_while_a_file_is_opened_does_not_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slot-000").touch()
    began = threading.Event()

    really_open = os.open

    def open_slowly(path: Any, *arguments: Any, **settings: Any) -> int:
        fd = really_open(path, *arguments, **settings)
        if os.fspath(path).endswith("slot-000"):
            began.set()
            threading.Event().wait(0.2)  # as a thread may that has to wait for the GIL
        return fd

    async def main() -> None:
        operations = PythonOperations(io_threads=1, copy_threads=1)
        writer = Files(tmp_path, operations)
        monkeypatch.setattr(os, "open", open_slowly)
        opening = asyncio.create_task(writer.open("slot-000", writable=True))
        await asyncio.to_thread(began.wait)
        assert passes_in_a_forked_child(holds_nothing)
        await opening
        assert open_files(tmp_path)
        writer.abandon()
        await operations.close()

    def holds_nothing() -> None:
        assert not open_files(tmp_path)

    asyncio.run(main())


@pytest.mark.parametrize("cancelled", [1, 2, 3])
def test_a_step_ends_however_often_whoever_waits_is_cancelled(cancelled: int) -> None:
    async def main() -> None:
        go_on, ended = asyncio.Event(), []

        async def step() -> str:
            await go_on.wait()
            await asyncio.sleep(0)
            ended.append(True)
            return "whole"

        waiting = asyncio.create_task(uninterrupted(step()))
        for _ in range(cancelled):
            for _ in range(3):
                await asyncio.sleep(0)
            waiting.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not waiting.done()
        go_on.set()
        await asyncio.wait((waiting,))
        assert ended == [True]
        assert waiting.cancelled()

    asyncio.run(main())
