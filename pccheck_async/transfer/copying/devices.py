# SPDX-License-Identifier: Apache-2.0
"""The devices of the CUDA backend: streams of copies, memory, events; and fences made of these events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from pccheck_async.transfer.copying.snapshot import DeviceMemory
from pccheck_async.transfer.plan import Table

__all__ = ["Block", "Device", "DeviceEvent", "Fence", "Fenced", "Stream"]


class DeviceEvent(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block until all work before it ended. Called on the engine's threads. Raises the error of that work."""

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Return the time between two events that were recorded with ``timed`` and have passed."""


class Block(Protocol):
    """Device memory, aligned to 16 bytes.

    It is freed with the last reference, which must be dropped after all work on it has ended.
    """

    address: int
    nbytes: int


class Stream(Protocol):
    """Work that a device does in order, beside other streams. Called on the engine's threads, by one at a time."""

    def wait(self, event: Any) -> None:
        """Order later work after an event of :meth:`Device.current`."""

    def allocate(self, nbytes: int) -> Block:
        """Allocate device memory that later work of this stream may use without a wait. Raises MemoryError."""

    def to_host(self, into: int, source: int, nbytes: int) -> None:
        """Copy to host memory; returns only when the copy has ended if that memory was not registered."""

    def to_device(self, into: int, source: int, nbytes: int) -> None:
        """Copy from host memory; returns only when it was read if that memory was not registered."""

    def zero(self, address: int, nbytes: int) -> None:
        """Zero device memory."""

    def prepare(self, rows: Table) -> Any:
        """Make rows of (destination, source, length) ready for :meth:`move`, which is called next."""

    def move(self, prepared: Any) -> None:
        """Copy the rows of :meth:`prepare` within the device."""

    def keep(self, memory: Any) -> None:
        """Keep a reference to memory until the work so far has ended."""

    def record(self, *, timed: bool = False) -> DeviceEvent:
        """Return an event behind all work so far, which holds the references of :meth:`keep`."""

    def synchronize(self) -> None:
        """Block until all work ended."""


class Device(Protocol):
    """One device."""

    index: int

    def current(self) -> Any:
        """Return an event behind all work that is queued on the calling thread's current stream of this device.

        Raises RuntimeError if that stream is being recorded as a graph.
        """

    def order_after_copies(self, events: Sequence[Any]) -> bool:
        """Order later work of the calling thread's current stream after events of streams of this device.

        False if that cannot be done (the stream is being recorded as a graph).
        """

    def stream(self) -> Stream:
        """Make a stream."""

    def memory(self) -> DeviceMemory:
        """Return how much memory there is."""

    def register(self, address: int, nbytes: int) -> None:
        """Lock host memory for direct copies with every device. Raises RuntimeError if that is refused."""

    def unregister(self, address: int) -> None:
        """Undo :meth:`register`."""


class Fence:
    """The end of a capture's copies from devices, all of which are queued: later device work can wait for it.

    Immutable; may be used by any thread. ``ends`` has, for each stream that copies (or a key that stands for it), its
    device and an event behind the last copy.
    """

    def __init__(self, ends: Mapping[Any, tuple[Device, DeviceEvent]]) -> None:
        self._ends = dict(ends)

    def before(self, later: Fence) -> Fence:
        """Return a fence behind both; on streams that both contain, the copies of ``later`` were queued later."""
        return Fence(self._ends | later._ends)

    def order_after_copies(self) -> bool:
        """Order later work on the calling thread's current stream of each device after the copies.

        False if a stream cannot wait: then reads are known to have ended only when the capture has ended.
        """
        events: dict[int, tuple[Device, list[DeviceEvent]]] = {}
        for device, event in self._ends.values():
            events.setdefault(device.index, (device, []))[1].append(event)
        return all(device.order_after_copies(ends) for device, ends in events.values())


Fenced: TypeAlias = Callable[[Fence], None]
"""Called with a fence as soon as there is one, on any thread of the engine."""
