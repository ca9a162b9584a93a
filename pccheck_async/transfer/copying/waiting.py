"""Threads that give devices work and wait for them: the loop and those of the operations engine stay free."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from pccheck_async.transfer.operations.threads import WorkerThreads

__all__ = ["Waiting"]

T = TypeVar("T")


class Waiting:
    """Calls blocking functions on threads of its own.

    Args:
        loop: The loop on whose thread :meth:`call` is awaited.
        count: Threads.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        self._loop = loop
        self._tokens = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._threads = WorkerThreads(loop, self._end, count=count, name="pccheck-device")

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call ``function`` on a thread and return (or raise) what it does.

        Cancellation: raised once the function has been called and has returned (I9): a device does not stop.
        """
        result: list[T] = []  # may be device memory: neither the thread nor whoever keeps a cancellation shall keep it
        future = self.start(lambda: result.append(function(*arguments)))
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                try:
                    await asyncio.wait((future,))
                except asyncio.CancelledError:
                    continue
            future.exception()  # retrieved: the cancellation is what the awaiter gets to know
            result.clear()
            raise
        return result.pop()

    def start(self, function: Callable[[], object]) -> asyncio.Future[None]:
        """Call ``function`` on a thread, behind what was called before."""
        token, future = next(self._tokens), self._loop.create_future()
        self._calls[token] = future
        self._threads.submit([(token, function, ())])
        return future

    def close(self) -> None:
        """End the threads, once all that was called returned."""
        self._threads.close()

    def _end(self, token: int, _: Any, error: BaseException | None) -> None:
        future = self._calls.pop(token)
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
