# SPDX-License-Identifier: Apache-2.0
"""Staging buffers: one chunk of page-aligned host memory each, leased and returned."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from pccheck_async.transfer.memory import aligned_buffer

__all__ = ["BufferLease", "BufferPool", "Pinning", "PoolStatistics"]

LARGEST_SLAB = 256 << 20
"""Most bytes pinned in one call: a task that waits for one buffer of a slab waits for all of it."""


class Pinning(Protocol):
    """Locks staging memory before its first use, so that devices can copy from and to it directly.

    Once it is ``active``, buffers that were leased before are pinned at their next lease.
    """

    active: bool

    async def pin(self, view: memoryview) -> None:
        """Pin memory. Cancellation: raised once that has ended."""

    def unpin_all(self) -> None:
        """Unpin all memory; nothing is copied any more."""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Use of the staging memory; ``touched`` buffers were ever used or pinned, and so occupy physical memory."""

    buffer_bytes: int
    touched: int
    in_use: int
    peak: int
    waited: int


class BufferLease:
    """A staging buffer leased to one owner, released exactly once. ``view`` is all of its memory."""

    __slots__ = ("_pool", "index", "view")

    def __init__(self, pool: BufferPool, index: int) -> None:
        self._pool: BufferPool | None = pool
        self.index = index
        self.view = pool._view[index * pool.buffer_bytes : (index + 1) * pool.buffer_bytes]

    def release(self) -> None:
        """Return the buffer to the pool; nothing reads or writes it any more. Raises RuntimeError the second time.

        The first task that still waits for a buffer gets it at once.
        """
        pool, self._pool = self._pool, None
        if pool is None:
            raise RuntimeError("the buffer was released before")
        while pool._waiters:
            waiter = pool._waiters.popleft()
            if not waiter.done():
                waiter.set_result(self.index)
                return
        pool.free.append(self.index)


class BufferPool:
    """At most ``nbytes`` of staging memory in buffers of ``buffer_bytes``; physical memory is taken on first use.

    The buffer released last is leased first: a state smaller than the pool touches only the memory it needs. Waiting
    tasks are served first come, first served: a buffer that is released is theirs at once.

    ``pinning`` pins buffers before their first use, several at a time; :meth:`close` unpins them.
    """

    def __init__(self, nbytes: int, buffer_bytes: int, pinning: Pinning | None = None) -> None:
        count = nbytes // buffer_bytes
        if count < 1:
            raise ValueError(f"host_memory of {nbytes} bytes holds no buffer of {buffer_bytes} bytes")
        self._count = count
        self.nbytes = count * buffer_bytes
        self.buffer_bytes = buffer_bytes
        self._view = aligned_buffer(count * buffer_bytes)
        self.free = list(range(count - 1, -1, -1))
        """Numbers of the buffers that are leased without waiting, the next one last."""
        self._waiters: deque[asyncio.Future[int]] = deque()
        self._touched = self._peak = self._waited = 0
        self._pinning = pinning
        self._pinned = 0  # buffers, from the first one on
        self._turn = asyncio.Lock()

    async def lease(self) -> BufferLease:
        """Wait for a buffer. Cancellation: leases nothing; one given at the same moment goes to the next waiter."""
        if self.free:
            index = self.free.pop()
            self._peak = max(self._peak, self._count - len(self.free))
        else:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            self._waited += 1
            try:
                index = await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    BufferLease(self, waiter.result()).release()
                raise
        self._touched = max(self._touched, index + 1)
        lease = BufferLease(self, index)
        if self._pinning is not None and self._pinning.active and index >= self._pinned:
            try:
                await self._pin(self._pinning, index)
            except BaseException:
                lease.release()
                raise
        return lease

    def close(self) -> None:
        """Free the memory; no buffer is leased any more. The statistics stay readable."""
        if self._pinning is not None:
            self._pinning.unpin_all()
        self._view = memoryview(b"")

    def statistics(self) -> PoolStatistics:
        """Return the current use."""
        return PoolStatistics(self.buffer_bytes, self._touched, self._count - len(self.free), self._peak, self._waited)

    async def _pin(self, pinning: Pinning, index: int) -> None:
        """Pin slabs, each as large as all before it, until a buffer is in one."""
        async with self._turn:
            while pinning.active and index >= self._pinned:
                low, most = self._pinned, max(1, LARGEST_SLAB // self.buffer_bytes)
                high = min(low + max(1, min(low, most)), self._count)
                try:
                    await pinning.pin(self._view[low * self.buffer_bytes : high * self.buffer_bytes])
                finally:
                    self._pinned = high  # also after a cancellation or a refusal: pinning is not tried again
                self._touched = max(self._touched, high)
