# SPDX-License-Identifier: Apache-2.0
"""Waiting for concurrent steps until they have ended, cancelled or not; and choosing one of several errors to raise."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from typing import Any, TypeVar

__all__ = ["Tasks", "uninterrupted"]

T = TypeVar("T")


async def uninterrupted(step: Awaitable[T]) -> T:
    """Await ``step``, run in a task of its own, and return its result.

    Cancellation: does not stop the step, and is raised once the step has ended; its result or error is then dropped.
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
    """A future that is done when a step ends. ``cancel()`` does nothing: CancelledError is raised in a waiter then."""

    def __init__(self, step: asyncio.Future[Any]) -> None:
        super().__init__(loop=step.get_loop())
        step.add_done_callback(self.set_result)

    def cancel(self, msg: object = None) -> bool:
        return False


class Tasks(asyncio.TaskGroup):
    """A TaskGroup that raises the first error itself instead of an exception group; other errors become notes on it."""

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
