"""Work that alternates between the caller's thread and the engine's loop, for both facades."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, TypeAlias

from pccheck_async.loop import EngineLoop

__all__ = ["Steps", "block_on", "run"]

Steps: TypeAlias = Generator[Coroutine[Any, Any, Any], Any, Any]
"""Runs plain code on the caller's thread (``state_dict()``, ``load_state_dict()``), yields coroutines for the loop, and
gets their results."""


def block_on(loop: Callable[[], EngineLoop], steps: Steps) -> Any:
    """Drive ``steps`` from this thread, blocking it while the engine's loop works."""
    work: Callable[[], Coroutine[Any, Any, Any]] = lambda: next(steps)  # noqa: E731
    try:
        while True:
            coroutine = work()
            try:
                result = loop().call(coroutine)
            except BaseException as error:  # noqa: BLE001 - the steps decide what it means
                work = partial(steps.throw, error)
            else:
                work = partial(steps.send, result)
    except StopIteration as end:
        return end.value


async def run(loop: Callable[[], EngineLoop], steps: Steps) -> Any:
    """Drive ``steps`` from a coroutine on any loop. Cancellation: ends what runs on the engine's loop first."""
    work: Callable[[], Coroutine[Any, Any, Any]] = lambda: next(steps)  # noqa: E731
    try:
        while True:
            coroutine = work()
            try:
                result = await loop().run(coroutine)
            except BaseException as error:  # noqa: BLE001 - the steps decide what it means
                work = partial(steps.throw, error)
            else:
                work = partial(steps.send, result)
    except StopIteration as end:
        return end.value
