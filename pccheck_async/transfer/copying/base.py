# SPDX-License-Identifier: Apache-2.0
"""Copies between live state and staging buffers: the contract of copy backends, and the backend for host memory.

(Invariants, such as I8: :mod:`pccheck_async.store`.)
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pccheck_async.state import Sources
from pccheck_async.transfer.copying.devices import Fenced
from pccheck_async.transfer.operations.base import MOST_BYTES_ON_LOOP, Operations
from pccheck_async.transfer.plan import PackedPiece, Segments
from pccheck_async.transfer.pool import Pinning

__all__ = ["CopyBackend", "CopyStatistics"]


@dataclass(frozen=True, slots=True)
class CopyStatistics:
    """Device memory that a backend holds and held at most, its number of snapshots, the reason for its last choice."""

    device_bytes: int
    device_peak_bytes: int
    snapshots: int
    reason: str


class CopyBackend:
    """Copies host memory by address; tensors without a plain address, and all device memory, are copied by torch.

    Every coroutine waits until its operations ended, cancelled or not, and keeps ``keepalive`` until then. ``reason``
    says why torch copies device memory.

    Attributes:
        by_address: Whether the backend copies the memory of CUDA devices by address. If not, call
            :meth:`Sources.pack_devices` first.
        pinning: Pins staging memory; None if that has no use.
    """

    by_address = False
    pinning: Pinning | None = None

    def __init__(self, operations: Operations, reason: str = "this build of torch has no CUDA") -> None:
        self.operations = operations
        self._reason = reason

    def mark_queued_work(self, devices: Collection[int]) -> Any:
        """Mark the work that copies have to wait for: all that is queued on the devices' current streams.

        Called on the thread that begins a capture or a restore. Work on other streams is included only if the current
        stream was made to wait for it (``wait_stream``), as for any use of a tensor in torch. Where torch copies, on
        streams that it chooses, this method blocks until the queued work has ended.

        Returns:
            The marks, for :meth:`begin` or :meth:`order_after`; false if copies have to wait for nothing.
        """
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    async def begin(self, marks: Any, sources: Sources, on_fence: Fenced | None = None) -> Sources:
        """Order the copies of a capture after the marked work; take device snapshots where the backend decides so.

        ``on_fence`` is called with the fence after the snapshots if the capture reads nothing else on devices.

        Returns:
            The sources to copy from: ``sources``, or new ones, some of which are copies owned by the backend, freed
            with their last reference.
        """
        return sources

    async def order_after(self, marks: Any) -> None:
        """Order all later copies after the marked work."""

    async def gather(
        self, segments: Segments, into: memoryview, keepalive: Any = None, on_fence: Fenced | None = None
    ) -> bytes:
        """Fill a staging buffer: segments of memory by address, packed pieces by :meth:`PackedSource.copy`, else zeros.

        ``on_fence`` is called with the fence after the copies from devices when they are queued, in the order in which
        they are; not if they block, and so end before.

        Returns:
            The CRC-32 of each MiB of ``into``, computed from the buffer and not from the source (I8).
        """
        if len(into) <= MOST_BYTES_ON_LOOP:
            sums = self.operations.gather_at_once(segments.host, into)
        else:
            sums = await self.operations.gather(segments.host, into, keepalive)
        if not segments.packed:
            return sums
        await self.operations.call(_copy_packed, segments.packed, into)
        return await self.operations.checksums(into)

    def scatter(
        self, source: memoryview, checksum: int, segments: Segments, keepalive: Any = None
    ) -> Awaitable[object]:
        """Verify ``checksum`` over ``source``, and only then copy its segments to memory.

        Raises OSError (EBADMSG) if the checksum differs.
        """
        return self.operations.scatter(source, checksum, segments.host, keepalive)

    def note_capture(self, nbytes: int, seconds: float) -> None:
        """Take a measurement: a capture took ``seconds`` to copy ``nbytes`` of a state to staging buffers."""

    def statistics(self) -> CopyStatistics:
        """Return the current statistics."""
        return CopyStatistics(0, 0, 0, self._reason)

    def close(self) -> None:
        """End the backend's own threads; no copy may be in progress. Idempotent."""


def _copy_packed(packed: Sequence[PackedPiece], into: memoryview) -> None:
    for source, low, high, offset in packed:
        source.copy(low, high, into[offset : offset + high - low])
