"""What a device has to do for the CUDA backend: queues of copies, memory, and events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pccheck_async.transfer.copying.snapshot import DeviceMemory
from pccheck_async.transfer.segments import Table

__all__ = ["Block", "Device", "Event", "Stream"]


class Event(Protocol):
    """A place in a stream."""

    def synchronize(self) -> None:
        """Block until all work before it ended. Called on the engine's threads. Raises what went wrong there."""
        ...

    def seconds_since(self, earlier: Event) -> float:
        """Return the time between two events that were recorded with ``timed``; both are over."""
        ...


class Block(Protocol):
    """Device memory; it is free when the block is let go, which must be after all work on it ended.

    Attributes:
        address: Where it is, aligned to 16 bytes.
        nbytes: Its size.
    """

    address: int
    nbytes: int


class Stream(Protocol):
    """Work that a device does in order, beside other streams. Called on the engine's threads, by one at a time."""

    def wait(self, event: Any) -> None:
        """Let later work wait for an event of :meth:`Device.current`."""
        ...

    def allocate(self, nbytes: int) -> Block:
        """Take device memory that later work of this stream may use: that needs no wait. Raises MemoryError."""
        ...

    def to_host(self, into: int, source: int, nbytes: int) -> None:
        """Copy to host memory; where that was not registered, this returns when the copy ended."""
        ...

    def to_device(self, into: int, source: int, nbytes: int) -> None:
        """Copy from host memory; where that was not registered, this returns when nothing more is read from there."""
        ...

    def zero(self, address: int, nbytes: int) -> None:
        """Zero device memory."""
        ...

    def prepare(self, rows: Table) -> Any:
        """Put rows of (destination, source, length) where :meth:`move` finds them, which is called next."""
        ...

    def move(self, prepared: Any) -> None:
        """Copy all of :meth:`prepare` within the device."""
        ...

    def keep(self, memory: Any) -> None:
        """Keep memory until the work so far is over."""
        ...

    def record(self, *, timed: bool = False) -> Event:
        """Return an event behind all work so far, which keeps what was to be kept."""
        ...

    def synchronize(self) -> None:
        """Block until all work ended."""
        ...


class Device(Protocol):
    """One device."""

    index: int

    def current(self) -> Any:
        """Return an event behind what the calling thread's current stream of this device has queued.

        Raises RuntimeError where that stream is being recorded as a graph.
        """
        ...

    def hold_up(self, events: Sequence[Any]) -> bool:
        """Let later work of the calling thread's current stream wait for events of streams of this device.

        Returns:
            False where that cannot be done (what the stream is given is recorded as a graph, and not run).
        """
        ...

    def stream(self) -> Stream:
        """Make a stream."""
        ...

    def memory(self) -> DeviceMemory:
        """Return how much memory there is."""
        ...

    def register(self, address: int, nbytes: int) -> None:
        """Lock host memory for direct copies with every device. Raises OSError where that is refused."""
        ...

    def unregister(self, address: int) -> None:
        """Undo :meth:`register`."""
        ...
