"""Staging buffers registered with CUDA, so that devices copy to and from them directly."""

from __future__ import annotations

import logging

from pccheck_async.telemetry.logs import write
from pccheck_async.transfer.copying.devices import Device
from pccheck_async.transfer.copying.waiting import Waiting
from pccheck_async.transfer.memory import address_of

__all__ = ["Pinning"]


class Pinning:
    """Registers staging memory before its first use (see :class:`pccheck_async.transfer.pool.Pinning`).

    Where that is refused, buffers stay as they are, and copies take the way through the driver's own buffers.

    Attributes:
        active: Whether there is a device to register memory with.
    """

    def __init__(self) -> None:
        self.active = False
        self._device: Device
        self._waiting: Waiting
        self._slabs: list[range] = []

    def activate(self, device: Device, waiting: Waiting) -> None:
        """Register from now on with ``device``, which stands for all of them."""
        self._device, self._waiting = device, waiting
        self.active = True

    def holds(self, address: int) -> bool:
        """Whether the buffer that begins at ``address`` is registered."""
        return any(address in slab for slab in self._slabs)

    async def pin(self, view: memoryview) -> None:
        """Register buffers. Cancellation: raised once that has ended."""
        await self._waiting.call(self._register, address_of(view), view.nbytes)

    def unpin_all(self) -> None:
        """Undo all of it; no device copies any more."""
        slabs, self._slabs = self._slabs, []
        self.active = False
        for slab in slabs:
            try:
                self._device.unregister(slab.start)
            except OSError as error:
                write(logging.WARNING, "still_pinned", "staging memory stays registered with CUDA: %s", error)

    def _register(self, address: int, nbytes: int) -> None:
        try:
            self._device.register(address, nbytes)
        except OSError as error:
            if self.active:
                self.active = False
                text = (
                    "staging buffers cannot be registered with CUDA (%s); copies to and from the device go on, slower "
                    "(is the limit of locked memory, ulimit -l, too low?)"
                )
                write(logging.WARNING, "not_pinned", text, error)
        else:
            self._slabs.append(range(address, address + nbytes))
