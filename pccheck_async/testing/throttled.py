"""A writer with the bandwidth of a slow device."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pccheck_async.medium import Medium
from pccheck_async.testing.wrapping import Access, WrappingWriter
from pccheck_async.transfer import uninterrupted

__all__ = ["ThrottledWriter"]

T = TypeVar("T")


class ThrottledWriter(WrappingWriter):
    """Caps reads and writes per file and in all, as cloud disks do: several streams reach what one alone does not.

    Transfers queue for the caps in the order in which they are submitted and end no earlier than a device of that
    bandwidth would end them. For use on one event loop.

    Args:
        inner: The writer that performs the transfers.
        per_stream: Bytes per second of any one file, None for no cap.
        total: Bytes per second of all files together, None for no cap.
        per_request: Bytes per second of any one transfer, None for no cap.
        requests: How many transfers the device works on at a time, where each of them is capped.
    """

    def __init__(
        self,
        inner: Medium,
        *,
        per_stream: float | None = None,
        total: float | None = None,
        per_request: float | None = None,
        requests: int = 1,
    ) -> None:
        super().__init__(inner)
        self._per_stream = per_stream
        self._total = total
        self._per_request = per_request
        self._lanes = [0.0] * requests
        """When each of the transfers that are worked on at a time ends; a heap."""
        self._free_at: dict[str | None, float] = {}
        """When each file, and the device (None), has done what was submitted to it: loop time in seconds."""

    async def perform(self, access: Access, call: Callable[[], Awaitable[T]]) -> T:
        if access.kind not in ("read", "write"):
            return await call()
        end = max(
            self._reserve(access.name, access.nbytes, self._per_stream),
            self._reserve(None, access.nbytes, self._total),
            self._reserve_lane(access.nbytes),
        )

        async def transfer() -> T:
            result = await call()
            await asyncio.sleep(end - asyncio.get_running_loop().time())
            return result

        return await uninterrupted(transfer())

    def _reserve(self, stream: str | None, nbytes: int, bandwidth: float | None) -> float:
        start = max(asyncio.get_running_loop().time(), self._free_at.get(stream, 0.0))
        self._free_at[stream] = start + (nbytes / bandwidth if bandwidth else 0.0)
        return self._free_at[stream]

    def _reserve_lane(self, nbytes: int) -> float:
        start = max(asyncio.get_running_loop().time(), self._lanes[0])
        end = start + (nbytes / self._per_request if self._per_request else 0.0)
        heapq.heapreplace(self._lanes, end)
        return end
