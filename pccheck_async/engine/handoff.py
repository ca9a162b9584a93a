"""Work that alternates between the caller's thread and the engine's loop, for both facades."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from pccheck_async.engine.loop import EngineLoop

__all__ = ["Steps", "Until", "block_on", "outlast", "run"]


class Until(NamedTuple):
    """Wait until a future is done, so many seconds at most; whether it is, is what comes of it."""

    future: concurrent.futures.Future[Any]
    timeout: float | None = None

    def block(self) -> bool:
        """Wait, blocking."""
        concurrent.futures.wait([self.future], self.timeout)
        return self.future.done()

    async def wait(self) -> bool:
        """Wait on the caller's loop. Cancellation: only stops the waiting."""
        waiter = asyncio.wrap_future(self.future)
        try:
            await asyncio.wait((waiter,), timeout=self.timeout)
        finally:
            waiter.cancel()
        return self.future.done()


_Work: TypeAlias = Coroutine[Any, Any, Any] | Until
Steps: TypeAlias = Generator[_Work, Any, Any]
"""Runs plain code on the caller's thread (``state_dict()``, ``load_state_dict()``), yields coroutines for the loop and
what has to be waited for elsewhere, and gets their results. It never waits itself: that thread may have a loop."""


def outlast(future: concurrent.futures.Future[Any]) -> Steps:
    """Wait until ``future`` is done, however often the caller is cancelled; raise that afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            yield Until(future)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def block_on(loop: Callable[[], EngineLoop], steps: Steps, work: Callable[[], _Work] | None = None) -> Any:
    """Drive ``steps`` from this thread, blocking it while the engine's loop works; ``work`` is how to go on."""
    work = work or partial(next, steps)
    try:
        while True:
            step = work()
            try:
                result = step.block() if isinstance(step, Until) else loop().call(step)
            except BaseException as error:  # noqa: BLE001 - the steps decide what it means
                work = partial(steps.throw, error)
            else:
                work = partial(steps.send, result)
    except StopIteration as end:
        return end.value


async def run(loop: Callable[[], EngineLoop], steps: Steps) -> Any:
    """Drive ``steps`` from a coroutine on any loop. Cancellation: ends what runs on the engine's loop first."""
    work: Callable[[], _Work] = lambda: next(steps)  # noqa: E731
    try:
        while True:
            step = work()
            try:
                result = await (step.wait() if isinstance(step, Until) else loop().run(step))
            except GeneratorExit:  # the coroutine was thrown away, and cannot await anything any more
                with suppress(asyncio.CancelledError):
                    block_on(loop, steps, partial(steps.throw, asyncio.CancelledError()))
                raise
            except BaseException as error:  # noqa: BLE001 - the steps decide what it means
                work = partial(steps.throw, error)
            else:
                work = partial(steps.send, result)
    except StopIteration as end:
        return end.value
