"""A semaphore that hands out leases, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

__all__ = ["Limiter", "Permit"]


class Permit:
    """One permit, released exactly once."""

    __slots__ = ("_limiter",)

    def __init__(self, limiter: Limiter) -> None:
        self._limiter: Limiter | None = limiter

    def release(self) -> None:
        """Release the permit. Raises RuntimeError the second time."""
        limiter, self._limiter = self._limiter, None
        if limiter is None:
            raise RuntimeError("the permit was released before")
        limiter._release()


class Limiter:
    """Hands out at most ``permits`` permits at a time; waiting tasks are served first come, first served.

    Bounds the checkpoints in flight (PCcheck, section 3.1: N concurrent checkpoints) and the staging buffers.

    Attributes:
        permits: In all.
        in_use: Now, those promised to waiting tasks included.
        peak: Most ever in use.
        waited: Tasks that ever had to wait.
    """

    def __init__(self, permits: int) -> None:
        if permits < 1:
            raise ValueError(f"permits must be at least 1, not {permits}")
        self.permits = permits
        self.in_use = self.peak = self.waited = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> Permit:
        """Wait for a permit. Cancellation: one granted at the same moment goes to the next waiting task."""
        if self.available and not self._waiters:
            self.in_use += 1
            self.peak = max(self.peak, self.in_use)
            return Permit(self)
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self.waited += 1
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._release()
            else:
                with suppress(ValueError):  # a release may have passed over it already
                    self._waiters.remove(waiter)
            raise
        return Permit(self)

    @property
    def available(self) -> int:
        """Permits that nobody has, and that were promised to nobody who waits."""
        return self.permits - self.in_use

    def _release(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)  # the permit changes hands: the count stays
                return
        self.in_use -= 1
