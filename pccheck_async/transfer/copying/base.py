"""The protocol of a copy backend."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from pccheck_async.state.sources import Sources
from pccheck_async.transfer.copying.fence import Fenced
from pccheck_async.transfer.segments import Segments

__all__ = ["CopyBackend", "CopyStatistics"]


@dataclass(frozen=True, slots=True)
class CopyStatistics:
    """What a backend holds on the devices.

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
        """Whether it copies the memory of CUDA devices by address. Else :meth:`Sources.pack_devices` comes first."""
        ...

    def admit(self, devices: Collection[int]) -> Any:
        """Note which work of ``devices`` comes before a capture or a restore: what their current streams have queued.

        Called on the caller's thread. What the caller queued on another stream counts only where the current one was
        made to wait for it (``wait_stream``), as for any use of a tensor in torch.

        Args:
            devices: Indices of the CUDA devices that hold what will be copied.

        Returns:
            The admission, for :meth:`begin` or :meth:`settle`.
        """
        ...

    async def begin(self, admission: Any, sources: Sources, fenced: Fenced | None = None) -> Sources:
        """Order the copies of a capture behind what was admitted; copy first on the devices where that pays.

        Args:
            admission: What :meth:`admit` returned.
            sources: What will be copied.
            fenced: Told of the fence behind these copies where they are all that is read on devices.

        Returns:
            What to copy from: ``sources``, or others in part owned by the backend, which frees them when they are let
            go.
        """
        ...

    async def settle(self, admission: Any) -> None:
        """Order all later copies behind what was admitted."""
        ...

    async def gather(
        self, segments: Segments, into: memoryview, keepalive: Any = None, fenced: Fenced | None = None
    ) -> int:
        """Fill a staging buffer: segments of memory by address, packed pieces by their own copy, zeros between.

        Args:
            segments: What goes where; nothing of it overlaps.
            into: All of the chunk's buffer that will be written.
            keepalive: Owner of the addresses.
            fenced: Told of the fence behind the copies from devices when they are queued, if that is before they ended.
                Fences are told of in the order in which copies are queued.

        Returns:
            The CRC-32 of all of ``into``, computed over the buffer and not over the source (I8).
        """
        ...

    async def scatter(self, source: memoryview, checksum: int, segments: Segments, keepalive: Any = None) -> None:
        """Verify ``checksum`` over ``source`` and only then copy its segments to memory. Raises OSError (EBADMSG)."""
        ...

    def note_capture(self, nbytes: int, seconds: float) -> None:
        """Take note that ``nbytes`` of a state took ``seconds`` to reach staging buffers."""
        ...

    def statistics(self) -> CopyStatistics:
        """Return what is held now."""
        ...

    def close(self) -> None:
        """End threads of its own; nothing is being copied any more. Idempotent."""
        ...
