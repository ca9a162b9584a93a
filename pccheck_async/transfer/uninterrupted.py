# SPDX-License-Identifier: Apache-2.0
"""Waiting for concurrent steps: to their end, cancelled or not; and the one error to raise of several."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from typing import Any, TypeVar

__all__ = ["Tasks", "uninterrupted"]

T = TypeVar("T")


async def uninterrupted(step: Awaitable[T]) -> T:
    """Await ``step``, a coroutine in a task of its own.

    Cancellation: raised once the step has ended; its result or error is then dropped, its effects are whole.
    """
    task = asyncio.ensure_future(step)
    try:
        await _End(task)
    except asyncio.CancelledError:
        if not task.cancelled():
            task.exception()  # retrieved: the caller gets the cancellation
        raise
    return task.result()


class _End(asyncio.Future[object]):
    """A future that is done when a step ends; ``cancel()`` changes nothing: a waiter gets CancelledError only then."""

    def __init__(self, step: asyncio.Future[Any]) -> None:
        super().__init__(loop=step.get_loop())
        step.add_done_callback(self.set_result)

    def cancel(self, msg: object = None) -> bool:
        return False


class Tasks(asyncio.TaskGroup):
    """Tasks that end together: one failure ends the others, and is raised; further failures become notes on it."""

    async def __aexit__(self, *raised: Any) -> None:
        try:
            await super().__aexit__(*raised)
        except BaseExceptionGroup as group:
            first, *others = _leaves(group)
            for other in others:
                first.add_note(f"also failed at the same time: {type(other).__name__}: {other}")
            raise first from first.__cause__


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):  # a medium of the user's may have groups of its own
            yield from _leaves(error)
        else:
            yield error
