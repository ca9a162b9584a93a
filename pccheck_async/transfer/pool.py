# SPDX-License-Identifier: Apache-2.0
"""A pool of staging buffers, each for one chunk, in page-aligned host memory."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from pccheck_async.transfer.memory import aligned_buffer

__all__ = ["BufferLease", "BufferPool", "Pinning", "PoolStatistics"]

LARGEST_SLAB = 256 << 20
"""Most bytes pinned in one call (a slab): a task that waits for one of its buffers waits for all of them."""


class Pinning(Protocol):
    """Locks staging memory before its first use, so that devices can copy from and to it directly.

    While ``active``, buffers are pinned when they are leased, also those that were leased before without.
    """

    active: bool

    async def pin(self, view: memoryview) -> None:
        """Pin memory. Cancellation: raised once the pinning has ended."""

    def unpin_all(self) -> None:
        """Unpin all memory; no copy may be in progress."""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Use of the staging memory, in buffers of ``buffer_bytes``.

    ``touched``: buffers that were ever used or pinned, and so occupy physical memory; ``in_use``, ``peak``: buffers
    leased now, and at most; ``waited``: leases that had to wait.
    """

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
        """Return the buffer, which must not be read or written any more, to the first waiting task, or to the pool.

        Raises RuntimeError on a second call.
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
    """At most ``nbytes`` of staging memory in buffers of ``buffer_bytes``; physical memory is allocated on first use.

    The buffer released last is leased first: a state smaller than the pool touches only the memory it needs. Waiting
    tasks get released buffers in the order in which they began to wait.

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
        """Numbers of the free buffers; the last one is leased next."""
        self._waiters: deque[asyncio.Future[int]] = deque()
        self._touched = self._peak = self._waited = 0
        self._pinning = pinning
        self._pinned = 0  # buffers, from the first one on
        self._turn = asyncio.Lock()

    async def lease(self) -> BufferLease:
        """Wait for a free buffer, pin it if it has to be, and return its lease.

        Cancellation: leases nothing; a buffer that was assigned at the same moment goes to the next waiter.
        """
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
        """Unpin and free the memory; no buffer may be leased. The statistics stay readable."""
        if self._pinning is not None:
            self._pinning.unpin_all()
        self._view = memoryview(b"")

    def statistics(self) -> PoolStatistics:
        """Return the current use of the pool."""
        return PoolStatistics(self.buffer_bytes, self._touched, self._count - len(self.free), self._peak, self._waited)

    async def _pin(self, pinning: Pinning, index: int) -> None:
        """Pin slabs, each as large as all before it but no larger than the limit, until they contain a buffer."""
        async with self._turn:
            while pinning.active and index >= self._pinned:
                low, most = self._pinned, max(1, LARGEST_SLAB // self.buffer_bytes)
                high = min(low + max(1, min(low, most)), self._count)
                try:
                    await pinning.pin(self._view[low * self.buffer_bytes : high * self.buffer_bytes])
                finally:
                    self._pinned = high  # also after a cancellation or a refusal: pinning is not tried again
                self._touched = max(self._touched, high)
