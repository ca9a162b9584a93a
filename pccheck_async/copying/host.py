"""The host backend: copy threads of the operations engine, torch only for what has no plain address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pccheck_async.copying.base import PackedPiece
from pccheck_async.operations.base import Operations

__all__ = ["HostCopy"]


class HostCopy:
    """Copies host memory by address; packed pieces go through torch on a helper thread."""

    name = "host"

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def gather(
        self, segments: bytes, packed: Sequence[PackedPiece], into: memoryview, keepalive: Any = None
    ) -> int:
        """Fill a staging buffer and return its CRC-32 (see :class:`CopyBackend`)."""
        checksum = await self._operations.gather(segments, into, keepalive)
        if not packed:
            return checksum
        await self._operations.call(_copy_packed, packed, into)
        return await self._operations.checksum(into)

    async def scatter(self, source: memoryview, checksum: int, segments: bytes, keepalive: Any = None) -> None:
        """Verify, then copy out (see :class:`CopyBackend`)."""
        await self._operations.scatter(source, checksum, segments, keepalive)


def _copy_packed(packed: Sequence[PackedPiece], into: memoryview) -> None:
    for source, low, high, offset in packed:
        source.copy(low, high, into[offset : offset + high - low])
