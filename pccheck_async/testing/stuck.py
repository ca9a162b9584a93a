"""A writer whose operations hang until they are released."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from pccheck_async.medium import Medium
from pccheck_async.testing.wrapping import CHANGES, Access, WrappingWriter
from pccheck_async.transfer import uninterrupted

__all__ = ["StuckWriter"]

T = TypeVar("T")


class StuckWriter(WrappingWriter):
    """Holds chosen operations back until :meth:`release`, then performs them, cancelled or not.

    The engine runs on a thread of its own, so everything here may be called from any thread::

        writer = StuckWriter(Files(...), kinds=("flush",))
        pending = await engine.checkpoint(state, step=1)
        await asyncio.to_thread(writer.wait_stuck)   # the flush hangs in the "device"
        ...
        writer.release()

    Args:
        inner: The writer that performs what was released.
        kinds: Names of the methods that hang (default: all that change storage or make it durable).
        after: Operations of these kinds that pass before the first one hangs.
    """

    def __init__(self, inner: Medium, *, kinds: Collection[str] = CHANGES, after: int = 0) -> None:
        super().__init__(inner)
        self._changed = threading.Condition()
        self._kinds = frozenset(kinds)
        self._passing = after
        self._waiting: dict[asyncio.Future[None], Access] = {}

    @property
    def stuck(self) -> list[Access]:
        """The operations that hang now, oldest first."""
        with self._changed:
            return list(self._waiting.values())

    def hold(self, *kinds: str, after: int = 0) -> None:
        """Let operations of these kinds hang from now on, instead of those named before."""
        with self._changed:
            self._kinds = frozenset(kinds)
            self._passing = after

    def release(self, *, hold_on: bool = False) -> None:
        """Release what hangs; later operations pass too, unless ``hold_on``."""
        with self._changed:
            if not hold_on:
                self._kinds = frozenset()
            waiting, self._waiting = self._waiting, {}
        for future in waiting:
            future.get_loop().call_soon_threadsafe(_release_one, future)

    def wait_stuck(self, count: int = 1, timeout: float | None = 30.0) -> None:
        """Block until ``count`` operations hang. Raises TimeoutError after ``timeout`` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._waiting) >= count, timeout):
                raise TimeoutError(f"{len(self._waiting)} operations hang after {timeout} s, expected {count}")

    async def perform(self, access: Access, call: Callable[[], Awaitable[T]]) -> T:
        gate = self._gate(access)
        if gate is None:
            return await call()

        async def hang() -> T:
            await gate
            return await call()

        return await uninterrupted(hang())

    def _gate(self, access: Access) -> asyncio.Future[None] | None:
        with self._changed:
            if access.kind not in self._kinds:
                return None
            if self._passing > 0:
                self._passing -= 1
                return None
            gate = asyncio.get_running_loop().create_future()
            self._waiting[gate] = access
            self._changed.notify_all()
            return gate


def _release_one(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
