# SPDX-License-Identifier: Apache-2.0
"""The engine's event loop, on a thread of its own.

A training step blocks the loop it runs on for its whole length. Captures and writes must go on meanwhile, so the engine
never runs on the caller's loop. Callers reach it from any thread (:meth:`EngineLoop.call`) or any loop
(:meth:`EngineLoop.run`); for calls of which part runs on the caller's thread see :mod:`pccheck_async.engine.caller`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from contextlib import closing, suppress
from typing import Any, Self, TypeVar

from pccheck_async.errors import ClosedError, machine_error
from pccheck_async.state.tensor_access import exempt_this_thread
from pccheck_async.telemetry import UsersLine, fill_standard_files, work_for
from pccheck_async.transfer import uninterrupted

try:  # here, and not when the first loop is made: on a caller's loop
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop  # type: ignore[assignment]

__all__ = ["EngineLoop", "call_once", "until_done", "wait_until"]

T = TypeVar("T")


class EngineLoop:
    """An event loop (uvloop if it is installed) on a daemon thread; as a context manager it ends with the block."""

    def __init__(self, name: str = "pccheck-engine") -> None:
        fill_standard_files()  # before the files of a store are opened
        try:
            self.loop: asyncio.AbstractEventLoop = new_event_loop()
        except OSError as error:
            raise machine_error(error, "an event loop") from error
        self.kind = new_event_loop.__module__.partition(".")[0]
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ended.set_running_or_notify_cancel()
        self._made_at = UsersLine.here()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._guard = threading.Lock()
        self._stopping = False
        try:
            self._thread.start()
        except RuntimeError as error:
            self.loop.close()
            raise machine_error(error, "a thread") from error
        except BaseException:  # Ctrl-C: the thread may run by now, or is about to
            self.loop.call_soon_threadsafe(self.loop.stop)
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> tuple[concurrent.futures.Future[T], Callable[[], None]]:
        """Start a coroutine on this loop from any thread. Return its future, and a function that cancels the coroutine.

        The future ends when the coroutine has ended, also after a cancellation, and it cannot itself be cancelled:
        when it is done, nothing is running any more.

        Raises ClosedError if the loop was stopped, or (in the future) is stopped before the coroutine ended.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        task: asyncio.Task[T] | None = None

        def ended(done: asyncio.Task[T]) -> None:
            self._tasks.discard(done)
            if done.cancelled():
                stopped = ClosedError("the engine was closed meanwhile")
                future.set_exception(stopped if self._stopping else concurrent.futures.CancelledError())
            elif (error := done.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(done.result())

        def start() -> None:
            nonlocal task
            task = self.loop.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(ended)

        def cancel() -> None:
            # One round later: a coroutine that is cancelled before its first step never gets to clean up.
            self.post(lambda: self.loop.call_soon(task.cancel) if task else None)

        if not self.post(start):
            coroutine.close()
            raise ClosedError("the engine is closed")
        return future, cancel

    def post(self, function: Callable[..., Any], *arguments: Any) -> bool:
        """Call a function on this loop soon, from any thread; return False, and never call it, if the loop stopped."""
        with self._guard:
            if not self._stopping:
                self.loop.call_soon_threadsafe(function, *arguments)
            return not self._stopping

    async def end_others(self, spared: asyncio.Task[Any] | None = None) -> None:
        """Refuse new coroutines, cancel the submitted ones, and wait until they ended. Called on this loop.

        The caller's own task is not cancelled, nor is ``spared``, which ends by itself after the caller.
        """
        with self._guard:
            self._stopping = True
        others = self._tasks - {asyncio.current_task(), spared}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)

    @property
    def is_of_this_thread(self) -> bool:
        """Whether the calling thread is the one that runs this loop: then it must not block for work on this loop."""
        return threading.current_thread() is self._thread

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on this loop, block the calling thread until it ended, and return its result.

        Raises RuntimeError on the loop's own thread.
        """
        if self.is_of_this_thread:
            coroutine.close()
            raise RuntimeError("blocking on the engine's own thread would never end")
        future, cancel = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            if not future.done():  # KeyboardInterrupt, not the coroutine's own error
                cancel()
                concurrent.futures.wait([future])
            raise

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on this loop, await it on the caller's loop, and return its result.

        Cancellation: cancels the coroutine, and is raised once that has ended. If this coroutine is closed
            (GeneratorExit), it does so, too, but blocks the calling thread meanwhile.
        """
        future, cancel = self.submit(coroutine)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            cancel()
            await until_done(future)
            raise
        except GeneratorExit:  # thrown away: it cannot await anything any more
            if self._thread.is_alive():  # else this is a forked child, in which nothing runs
                cancel()
                if not self.is_of_this_thread:  # which collects garbage, too
                    concurrent.futures.wait([future])
            raise

    def stop(self) -> None:
        """End the loop and its thread. Idempotent; must not be called on the loop's own thread."""
        self.ask_to_stop()
        self._thread.join()

    def ask_to_stop(self) -> concurrent.futures.Future[None]:
        """Stop the loop without waiting; the returned future is done when the loop is closed and its thread ends."""
        with self._guard:
            self._stopping = True
        if self._thread.is_alive():
            with suppress(RuntimeError):  # closed meanwhile, by another thread that stops it
                self.loop.call_soon_threadsafe(self.loop.stop)
        elif not self._ended.done():  # in a forked child: the thread lives on in the parent only
            self._ended.set_result(None)
        return self._ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the loop, and wait until its thread ended. Cancellation: raised once it has ended."""
        await uninterrupted(asyncio.wrap_future(self.ask_to_stop()))

    def _serve(self) -> None:
        exempt_this_thread()
        work_for(self._made_at)
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(self.end_others())
            with suppress(RuntimeError):  # no thread can be started while the interpreter exits, and none is left
                self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            try:
                self.loop.close()
            finally:
                self._ended.set_result(None)


async def wait_until(future: concurrent.futures.Future[Any], timeout: float | None = None) -> bool:
    """Wait until a future is done, at most ``timeout`` seconds; return whether it is. Its error is not raised.

    Cancellation: only stops the waiting.
    """
    waiter = asyncio.wrap_future(future)
    try:
        await asyncio.wait((waiter,), timeout=timeout)
    finally:
        if not waiter.cancel() and not waiter.cancelled():
            waiter.exception()  # retrieved: its error is for others
    return future.done()


async def until_done(future: concurrent.futures.Future[Any]) -> None:
    """Wait until ``future`` is done, with a result or an error. Cancellation: ignored."""
    while not future.done():
        with suppress(asyncio.CancelledError):
            await wait_until(future)


def call_once(work: Coroutine[Any, Any, T], name: str = "pccheck-read") -> T:
    """Run ``work`` on an event loop of its own, whose thread has this name; block until done, and return the result."""
    with closing(work), EngineLoop(name) as loop:  # else Python warns of work that never began
        return loop.call(work)
