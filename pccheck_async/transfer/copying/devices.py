# SPDX-License-Identifier: Apache-2.0
"""The interface of devices for the CUDA backend: streams for copies, memory, events; and fences made of events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from pccheck_async.transfer.copying.snapshot import DeviceMemory
from pccheck_async.transfer.plan import Table

__all__ = ["Block", "Device", "DeviceEvent", "Fence", "Fenced", "Stream"]


class DeviceEvent(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block until all work before the event has ended; raise its error. Called on the engine's threads."""

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Return the time between two events that were recorded with ``timed`` and have passed."""


class Block(Protocol):
    """Device memory, aligned to 16 bytes.

    The memory is freed with the last reference, which must not be dropped before all work on the memory has ended.
    """

    address: int
    nbytes: int


class Stream(Protocol):
    """A queue of device work that runs in order, concurrently with other streams.

    Called on the engine's threads, by one thread at a time.
    """

    def wait(self, event: Any) -> None:
        """Order later work after an event of :meth:`Device.current`."""

    def allocate(self, nbytes: int) -> Block:
        """Allocate device memory that later work of this stream may use without a wait. Raises MemoryError."""

    def to_host(self, into: int, source: int, nbytes: int) -> None:
        """Queue a copy to host memory; if that is not registered, block until the copy has ended."""

    def to_device(self, into: int, source: int, nbytes: int) -> None:
        """Queue a copy from host memory; if that is not registered, block until it was read."""

    def zero(self, address: int, nbytes: int) -> None:
        """Queue zeroing device memory."""

    def prepare(self, rows: Table) -> Any:
        """Return rows of (destination, source, length) in the form for :meth:`move`, which has to be called next."""

    def move(self, prepared: Any) -> None:
        """Queue the copies of the rows from :meth:`prepare`, within the device."""

    def keep(self, memory: Any) -> None:
        """Keep a reference to memory until the work queued so far has ended."""

    def record(self, *, timed: bool = False) -> DeviceEvent:
        """Return an event after all work so far; it takes over the references of :meth:`keep`."""

    def synchronize(self) -> None:
        """Block until all work of the stream has ended."""


class Device(Protocol):
    """A device: a factory of streams and events."""

    index: int

    def current(self) -> Any:
        """Return an event after all work that is queued on the calling thread's current stream of this device.

        Raises RuntimeError if a CUDA graph is being recorded on the stream.
        """

    def order_after_copies(self, events: Sequence[Any]) -> bool:
        """Make later work on the calling thread's current stream of this device wait for events of other streams.

        Return False if that is impossible (a CUDA graph is being recorded on the stream).
        """

    def stream(self) -> Stream:
        """Return a new stream."""

    def memory(self) -> DeviceMemory:
        """Return the sizes of the device's memory."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock host memory for direct copies to and from all devices. Raises RuntimeError if refused."""

    def unregister(self, address: int) -> None:
        """Unlock host memory that was given to :meth:`register`."""


class Fence:
    """The end of copies from devices that a capture has queued: later device work can wait for it.

    Immutable; may be used by any thread. ``ends`` has, by stream (or a key that stands for it), the device and an event
    after the last copy.
    """

    def __init__(self, ends: Mapping[Any, tuple[Device, DeviceEvent]]) -> None:
        self._ends = dict(ends)

    def before(self, later: Fence) -> Fence:
        """Return a fence after the copies of both; on streams of both, those of ``later`` must be queued after ours."""
        return Fence(self._ends | later._ends)

    def order_after_copies(self) -> bool:
        """Make later work on the calling thread's current stream of each device wait for the copies.

        Return False if a stream cannot wait: then the caller has to wait until the capture has ended.
        """
        events: dict[int, tuple[Device, list[DeviceEvent]]] = {}
        for device, event in self._ends.values():
            events.setdefault(device.index, (device, []))[1].append(event)
        return all(device.order_after_copies(ends) for device, ends in events.values())


Fenced: TypeAlias = Callable[[Fence], None]
"""Function that is called with a fence once its copies are queued, on any thread of the engine."""
