"""A semaphore that hands out leases, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

__all__ = ["Limiter", "LimiterStatistics", "Permit"]


@dataclass(frozen=True, slots=True)
class LimiterStatistics:
    """Attributes: permits in all, in use now, most ever in use, tasks waiting now, tasks that ever had to wait."""

    permits: int
    in_use: int
    peak: int
    waiting: int
    waited: int


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

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class Limiter:
    """Hands out at most ``permits`` permits at a time; waiting tasks are served first come, first served.

    Bounds the checkpoints in flight (PCcheck, section 3.1: N concurrent checkpoints) and the staging buffers.
    """

    def __init__(self, permits: int) -> None:
        if permits < 1:
            raise ValueError(f"permits must be at least 1, not {permits}")
        self._permits = permits
        self._in_use = 0
        self._peak = 0
        self._waited = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> Permit:
        """Wait for a permit.

        Cancellation: a permit granted at the same moment goes to the next waiting task.
        """
        if self._in_use < self._permits and not self._waiters:
            return self._grant()
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._waited += 1
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
        return self._permits - self._in_use

    def statistics(self) -> LimiterStatistics:
        """Return the current use."""
        return LimiterStatistics(self._permits, self._in_use, self._peak, len(self._waiters), self._waited)

    def _grant(self) -> Permit:
        self._in_use += 1
        self._peak = max(self._peak, self._in_use)
        return Permit(self)

    def _release(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)  # the permit changes hands: the count stays
                return
        self._in_use -= 1
