"""What keeps later work of a device behind the copies of a capture, without anybody waiting on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from pccheck_async.transfer.copying.devices import Device, Event

__all__ = ["Fence", "Fenced"]


class Fence:
    """The end of copies from devices, all of which are queued. Immutable; may be used by any thread.

    Args:
        ends: By the stream (or what stands for it) that does the copies: its device, and an event behind the last one.
    """

    def __init__(self, ends: Mapping[Any, tuple[Device, Event]]) -> None:
        self._ends = dict(ends)

    def before(self, later: Fence) -> Fence:
        """Return a fence behind both; on streams that both know, ``later`` was queued later."""
        return Fence(self._ends | later._ends)

    def hold_up(self) -> bool:
        """Let what the calling thread queues from now on, on its current stream of each device, come after the copies.

        Returns:
            False where a stream cannot wait: then only the end of the capture tells that nothing is read any more.
        """
        events: dict[int, tuple[Device, list[Event]]] = {}
        for device, event in self._ends.values():
            events.setdefault(device.index, (device, []))[1].append(event)
        return all(device.hold_up(ends) for device, ends in events.values())


Fenced: TypeAlias = Callable[[Fence], None]
"""Told of a fence as soon as there is one, on any thread of the engine."""
