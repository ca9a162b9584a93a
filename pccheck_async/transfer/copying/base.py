"""The protocol of a copy backend."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from pccheck_async.state import Sources
from pccheck_async.transfer.copying.devices import Fenced
from pccheck_async.transfer.plan import Segments

__all__ = ["CopyBackend", "CopyStatistics"]


@dataclass(frozen=True, slots=True)
class CopyStatistics:
    """Device memory that a backend holds, and its snapshots.

    Attributes:
        device_bytes: Device memory held now.
        device_peak_bytes: Most device memory held at a time.
        snapshots: Snapshots taken on a device.
        reason: How device memory was captured last, and why, in one sentence.
    """

    device_bytes: int
    device_peak_bytes: int
    snapshots: int
    reason: str


class CopyBackend(Protocol):
    """Copies between live state and staging buffers, with the checksum of what lies in the buffer.

    Every coroutine waits until its operations ended, cancelled or not, and keeps ``keepalive`` until then.
    """

    name: str

    @property
    def by_address(self) -> bool:
        """Whether it copies the memory of CUDA devices by address. If not, call :meth:`Sources.pack_devices` first."""
        ...

    def admit(self, devices: Collection[int]) -> Any:
        """Mark the work that comes before a capture or a restore: all that is queued on the devices' current streams.

        Called on the caller's thread. Work on other streams counts only if the current one was made to wait for it
        (``wait_stream``), as for any use of a tensor in torch.

        Args:
            devices: Indices of the CUDA devices that hold memory to be copied.

        Returns:
            The admission, for :meth:`begin` or :meth:`order_after`.
        """
        ...

    async def begin(self, admission: Any, sources: Sources, fenced: Fenced | None = None) -> Sources:
        """Order the copies of a capture after the admitted work; take device snapshots where that pays.

        Args:
            admission: What :meth:`admit` returned.
            sources: The memory to be copied.
            fenced: Called with the fence behind the snapshots, if these are all that the capture reads on devices.

        Returns:
            The sources to copy from: ``sources``, or others that in part are snapshots of the backend, which are freed
            with their last reference.
        """
        ...

    async def order_after(self, admission: Any) -> None:
        """Order all later copies after the admitted work."""
        ...

    async def gather(
        self, segments: Segments, into: memoryview, keepalive: Any = None, fenced: Fenced | None = None
    ) -> int:
        """Fill a staging buffer: segments of memory by address, packed pieces by their own copy, zeros between.

        Args:
            segments: Segments of the chunk; they do not overlap.
            into: The part of the chunk's buffer that will be written.
            keepalive: Owner of the addresses.
            fenced: Called with the fence behind the copies from devices once they are queued, if that is before they
                have ended; in the order in which copies are queued.

        Returns:
            The CRC-32 of all of ``into``, computed from the buffer and not from the source (I8).
        """
        ...

    async def scatter(self, source: memoryview, checksum: int, segments: Segments, keepalive: Any = None) -> None:
        """Verify ``checksum`` over ``source`` and only then copy its segments to memory. Raises OSError (EBADMSG)."""
        ...

    def note_capture(self, nbytes: int, seconds: float) -> None:
        """Note that ``nbytes`` of a state took ``seconds`` to reach staging buffers."""
        ...

    def statistics(self) -> CopyStatistics:
        """Return the current state."""
        ...

    def close(self) -> None:
        """End the backend's threads; nothing is being copied any more. Idempotent."""
        ...
