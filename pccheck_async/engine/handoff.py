"""Work that alternates between the caller's thread and the engine's loop, driven blocking or awaited."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

from pccheck_async.engine.loop import EngineLoop

__all__ = ["Handoff", "Until", "block_on", "outlast", "run"]


class Until(NamedTuple):
    """Wait until a future is done, at most ``timeout`` seconds; the result is whether it is done."""

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


class _Engine(Protocol):
    loop: EngineLoop


_Work: TypeAlias = Coroutine[Any, Any, Any] | Until
Handoff: TypeAlias = Generator[_Work, Any, Any]
"""A generator that runs plain code on the caller's thread (``state_dict()``, ``load_state_dict()``).

It yields coroutines for the engine's loop, and futures to wait for, and gets their results. It never waits itself: that
thread may have a loop.
"""


def outlast(future: concurrent.futures.Future[Any]) -> Handoff:
    """Wait until ``future`` is done, however often the caller is cancelled; raise that afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            yield Until(future)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def block_on(engine: _Engine, handoff: Handoff, work: Callable[[], _Work] | None = None) -> Any:
    """Drive ``handoff`` from this thread, blocking it while the engine's loop works; ``work`` is how to go on."""
    work = work or partial(next, handoff)
    try:
        while True:
            step = work()
            try:
                result = step.block() if isinstance(step, Until) else engine.loop.call(step)
            except BaseException as error:  # noqa: BLE001 - the handoff decides what it means
                work = partial(handoff.throw, error)
            else:
                work = partial(handoff.send, result)
    except StopIteration as end:
        return end.value


async def run(engine: _Engine, handoff: Handoff) -> Any:
    """Drive ``handoff`` from a coroutine on any loop. Cancellation: ends what runs on the engine's loop first."""
    work: Callable[[], _Work] = lambda: next(handoff)  # noqa: E731
    try:
        while True:
            step = work()
            try:
                result = await (step.wait() if isinstance(step, Until) else engine.loop.run(step))
            except GeneratorExit:  # the coroutine was thrown away, and cannot await anything any more
                with suppress(asyncio.CancelledError):
                    block_on(engine, handoff, partial(handoff.throw, asyncio.CancelledError()))
                raise
            except BaseException as error:  # noqa: BLE001 - the handoff decides what it means
                work = partial(handoff.throw, error)
            else:
                work = partial(handoff.send, result)
    except StopIteration as end:
        return end.value
