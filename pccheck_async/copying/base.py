"""The protocol of a copy backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pccheck_async.plan import PackedPiece

__all__ = ["CopyBackend", "PackedPiece"]


class CopyBackend(Protocol):
    """Copies between live state and staging buffers, with the checksum of what lies in the buffer.

    Every method waits until its operations ended, cancelled or not, and keeps ``keepalive`` until then.
    """

    name: str

    async def gather(
        self, segments: bytes, packed: Sequence[PackedPiece], into: memoryview, keepalive: Any = None
    ) -> int:
        """Fill a staging buffer: segments of host memory by address, packed pieces by their own copy, zeros between.

        Args:
            segments: Packed (address, offset, length) triples as in :class:`pccheck_async.operations.base.Gather`.
            packed: Sources that cannot be copied by address (other strides, other devices).
            into: All of the chunk's buffer that will be written.
            keepalive: Owner of the addresses.

        Returns:
            The CRC-32 of all of ``into``, computed over the buffer and not over the source (I8).
        """
        ...

    async def scatter(self, source: memoryview, checksum: int, segments: bytes, keepalive: Any = None) -> None:
        """Verify ``checksum`` over ``source`` and only then copy its segments to memory. Raises OSError (EBADMSG)."""
        ...
