"""The host backend: copy threads of the I/O backend; torch copies only memory without a plain address."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from pccheck_async.state import Sources
from pccheck_async.transfer.copying.base import CopyStatistics
from pccheck_async.transfer.copying.devices import Fenced
from pccheck_async.transfer.operations.base import Operations
from pccheck_async.transfer.plan import PackedPiece, Segments

__all__ = ["HostCopy"]

_AT_ONCE = 256 << 10
"""Bytes up to which a chunk is copied on the calling thread: two wake-ups take longer."""


class HostCopy:
    """Copies host memory by address; packed pieces go through torch on a helper thread.

    Args:
        operations: Performs the copies.
        reason: Why device memory, if there is any, is copied by torch.
    """

    name = "host"
    by_address = False

    def __init__(self, operations: Operations, reason: str = "this build of torch has no CUDA") -> None:
        self._operations = operations
        self._reason = reason

    def admit(self, devices: Collection[int]) -> None:
        """Wait for queued kernels: torch copies on streams that it chooses (see :class:`CopyBackend`)."""
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    async def begin(self, admission: None, sources: Sources, fenced: Fenced | None = None) -> Sources:
        """Return ``sources`` (see :class:`CopyBackend`)."""
        return sources

    async def order_after(self, admission: None) -> None:
        """Do nothing: the admitted work has ended (see :class:`CopyBackend`)."""

    async def gather(
        self, segments: Segments, into: memoryview, keepalive: Any = None, fenced: Fenced | None = None
    ) -> int:
        """Fill a staging buffer and return its CRC-32 (see :class:`CopyBackend`)."""
        if len(into) <= _AT_ONCE:
            checksum = self._operations.gather_at_once(segments.host, into)
        else:
            checksum = await self._operations.gather(segments.host, into, keepalive)
        if not segments.packed:
            return checksum
        await self._operations.call(_copy_packed, segments.packed, into)
        return await self._operations.checksum(into)

    async def scatter(self, source: memoryview, checksum: int, segments: Segments, keepalive: Any = None) -> None:
        """Verify, then copy out (see :class:`CopyBackend`)."""
        await self._operations.scatter(source, checksum, segments.host, keepalive)

    def note_capture(self, nbytes: int, seconds: float) -> None:
        """Do nothing: no decision depends on it."""

    def statistics(self) -> CopyStatistics:
        """Return zeros, and the reason (see :class:`CopyBackend`)."""
        return CopyStatistics(0, 0, 0, self._reason)

    def close(self) -> None:
        """Do nothing: the threads are those of the operations."""


def _copy_packed(packed: Sequence[PackedPiece], into: memoryview) -> None:
    for source, low, high, offset in packed:
        source.copy(low, high, into[offset : offset + high - low])
