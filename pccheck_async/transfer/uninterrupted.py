"""Let a step that must not stop half-way run to its end, cancelled or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["to_its_end", "uninterrupted"]

T = TypeVar("T")


async def uninterrupted(step: Awaitable[T]) -> T:
    """Await ``step``, a coroutine in a task of its own.

    Cancellation: raised once the step has ended; its result or error is then dropped, its effects are whole.
    """
    task = asyncio.ensure_future(step)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait((task,))
            except asyncio.CancelledError:
                continue
        if not task.cancelled():
            task.exception()  # retrieved: the cancellation is what the caller gets to know
        raise


async def to_its_end(step: Coroutine[Any, Any, T]) -> T:
    """Await ``step`` in a task of its own; return its result, or raise its error.

    Cancellation: comes too late; what came of the step is what the caller has to know.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(step)
    ended = _Ended(loop=loop)
    task.add_done_callback(ended.set_result)
    with suppress(asyncio.CancelledError):
        await ended
    return task.result()


class _Ended(asyncio.Future[object]):
    """Nobody cancels it: asyncio then raises CancelledError in the awaiting task when it is done."""

    def cancel(self, msg: object = None) -> bool:
        return False
