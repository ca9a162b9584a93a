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
    """Device memory that a backend holds now and held at most, its snapshots, and how it captured last, and why."""

    device_bytes: int
    device_peak_bytes: int
    snapshots: int
    reason: str


class CopyBackend:
    """Copies host memory by address; torch copies tensors without a plain address, and all memory of devices.

    Every coroutine waits until its operations ended, cancelled or not, and keeps ``keepalive`` until then. ``reason``
    is the reason why torch copies device memory, if there is any.

    Attributes:
        by_address: Whether it copies the memory of CUDA devices by address. If not, call :meth:`Sources.pack_devices`
            first.
        pinning: Pins staging memory, if that is of use.
    """

    by_address = False
    pinning: Pinning | None = None

    def __init__(self, operations: Operations, reason: str = "this build of torch has no CUDA") -> None:
        self.operations = operations
        self._reason = reason

    def mark_queued_work(self, devices: Collection[int]) -> Any:
        """Mark the work that comes before a capture or a restore: all that is queued on the devices' current streams.

        Called on the caller's thread. Work on other streams counts only if the current one was made to wait for it
        (``wait_stream``), as for any use of a tensor in torch. Torch copies on streams that it chooses: where torch
        copies, this waits for the queued work.

        Returns:
            The marks, for :meth:`begin` or :meth:`order_after`; false if nothing has to be waited for.
        """
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    async def begin(self, marks: Any, sources: Sources, on_fence: Fenced | None = None) -> Sources:
        """Order the copies of a capture after the marked work; take device snapshots where that pays.

        ``on_fence`` is called with the fence behind the snapshots, if these are all that the capture reads on devices.

        Returns:
            The sources to copy from: ``sources``, or others that in part are snapshots of the backend, which are freed
            with their last reference.
        """
        return sources

    async def order_after(self, marks: Any) -> None:
        """Order all later copies after the marked work."""

    async def gather(
        self, segments: Segments, into: memoryview, keepalive: Any = None, on_fence: Fenced | None = None
    ) -> bytes:
        """Fill a staging buffer: segments of memory by address, packed pieces by their own copy, zeros between.

        ``on_fence`` is called with the fence behind the copies from devices once they are queued, if that is before
        they have ended; in the order in which copies are queued.

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
        """Verify ``checksum`` over ``source`` and only then copy its segments to memory. Raises OSError (EBADMSG)."""
        return self.operations.scatter(source, checksum, segments.host, keepalive)

    def note_capture(self, nbytes: int, seconds: float) -> None:
        """Called when ``nbytes`` of a state have reached staging buffers, after ``seconds``."""

    def statistics(self) -> CopyStatistics:
        """Return the current state."""
        return CopyStatistics(0, 0, 0, self._reason)

    def close(self) -> None:
        """End the backend's own threads; nothing is being copied any more. Idempotent."""


def _copy_packed(packed: Sequence[PackedPiece], into: memoryview) -> None:
    for source, low, high, offset in packed:
        source.copy(low, high, into[offset : offset + high - low])
