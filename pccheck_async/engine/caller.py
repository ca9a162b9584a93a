# SPDX-License-Identifier: Apache-2.0
"""Work that is partly the caller's and partly the engine's: how it waits, in a blocking call and in a coroutine.

User code (``state_dict()``, ``load_state_dict()``) runs on the thread of the caller, everything else on the engine's
loop. The methods that need both are coroutines that get a :class:`Caller` and await nothing but its methods. They are
written once: :func:`run` awaits them on the caller's loop, :func:`block_on` runs them on a thread without one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from pccheck_async.engine.loop import EngineLoop, wait_until

__all__ = ["Caller", "block_on", "run"]

P = ParamSpec("P")
T = TypeVar("T")


class _Engine(Protocol):
    loop: EngineLoop


class Caller:
    """Waits for one call of an engine: on the caller's loop, or blocking its thread and never suspending.

    Attributes:
        blocks: Whether the methods block. They do so, too, once the coroutine of the call is closed (GeneratorExit),
            unless on the engine's thread: it cannot be suspended any more, but has to end the work that it began.
    """

    def __init__(self, engine: _Engine, *, blocks: bool) -> None:
        self._engine = engine
        self.blocks = blocks

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop; return its result. Cancellation: cancels it, and waits for its end."""
        if self.blocks:
            return self._engine.loop.call(coroutine)
        try:
            return await self._engine.loop.run(coroutine)
        except GeneratorExit:
            raise self._thrown_away() from None

    async def wait(self, future: concurrent.futures.Future[Any], timeout: float | None = None) -> bool:
        """Wait until a future is done, at most ``timeout`` seconds; return whether it is. Its error is not raised.

        Cancellation: only stops the waiting.
        """
        if self.blocks:
            concurrent.futures.wait([future], timeout)
            return future.done()
        try:
            return await wait_until(future, timeout)
        except GeneratorExit:
            raise self._thrown_away() from None

    async def outlast(self, future: concurrent.futures.Future[Any]) -> None:
        """Wait until a future is done. Cancellation, however often: raised afterwards."""
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await self.wait(future)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def _thrown_away(self) -> BaseException:
        if self._engine.loop.is_of_this_thread:  # which collects garbage, too, and cannot wait for itself
            return GeneratorExit()
        self.blocks = True
        return asyncio.CancelledError()


def block_on(
    engine: _Engine,
    work: Callable[Concatenate[Caller, P], Coroutine[Any, Any, T]],
    /,
    *arguments: P.args,
    **named: P.kwargs,
) -> T:
    """Call ``work`` with a caller that blocks this thread, and the arguments; return its result."""
    coroutine = work(Caller(engine, blocks=True), *arguments, **named)
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        coroutine.close()
    raise RuntimeError(f"{coroutine!r} awaited something else than its caller")


async def run(
    engine: _Engine,
    work: Callable[Concatenate[Caller, P], Coroutine[Any, Any, T]],
    /,
    *arguments: P.args,
    **named: P.kwargs,
) -> T:
    """Await ``work``, called with a caller that waits on this loop, and the arguments; return its result.

    Cancellation: first ends the work on the engine's loop. If this coroutine is closed (GeneratorExit), it blocks
        meanwhile; on the engine's own thread it waits for nothing.
    """
    caller = Caller(engine, blocks=False)
    try:
        result = await work(caller, *arguments, **named)
    except asyncio.CancelledError:
        if not caller.blocks:
            raise
    else:
        if not caller.blocks:
            return result
    raise GeneratorExit
