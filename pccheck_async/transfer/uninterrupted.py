"""Waiting for concurrent steps: to their end, cancelled or not; and the one error to raise of several."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["first_failure", "to_its_end", "uninterrupted"]

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
            task.exception()  # retrieved: the cancellation is what the caller learns
        raise


async def to_its_end(step: Coroutine[Any, Any, T]) -> T:
    """Await ``step`` in a task of its own; return its result, or raise its error.

    Cancellation: ignored; the caller has to know the outcome of the step.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(step)
    ended = _Ended(loop=loop)
    task.add_done_callback(ended.set_result)
    with suppress(asyncio.CancelledError):
        await ended
    return task.result()


class _Ended(asyncio.Future[object]):
    """Cannot be cancelled: asyncio then raises CancelledError in the awaiting task once it is done."""

    def cancel(self, msg: object = None) -> bool:
        return False


def first_failure(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the group's first error; the others become notes on it, so that nothing is lost."""
    first, *others = _leaves(group)
    for other in others:
        first.add_note(f"also failed at the same time: {type(other).__name__}: {other}")
    return first


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
