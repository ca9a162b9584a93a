"""One device's share of the copying: lanes, which are streams with a scratch image each, and snapshots."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pccheck_async.telemetry.logs import write
from pccheck_async.transfer.copying.devices import Block, Device, Event, Stream
from pccheck_async.transfer.copying.snapshot import Account, Pace
from pccheck_async.transfer.copying.tables import LARGE, Ranges, Split, compacted, moves, split
from pccheck_async.transfer.segments import Table

__all__ = ["Copier", "Lane", "Memory", "Snapshot"]


_LANES: Final = 2
"""While one lane copies to the host, the other gathers."""

_SMALL_MOVE: Final = 16 << 10
"""Most bytes that one block of threads moves for a chunk: enough blocks that the device is busy."""

_LARGE_MOVE: Final = 256 << 10
"""The same for a snapshot, which has more bytes and so fewer rows."""

_REFUSED_SECONDS: Final = 1.0, 600.0
"""Nobody asks for memory again for so long after there was none: at first, and at most; twice as long each time."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Sources copied to device memory of the engine.

    Attributes:
        addresses: Where each now is.
        memory: Keeps them; free when it is let go.
        copied: When that has happened; what it reads has to be kept until then.
        started: When it began.
    """

    addresses: Table
    memory: Block
    copied: Event
    started: Event


class Copier:
    """Copies between one device and the host, and within the device. Used by one thread at a time per lane.

    Args:
        device: Does it.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.account = Account()
        self.pace = Pace()
        self._memory = Memory(self.account)
        self._guard = threading.Lock()
        self._lanes: list[Lane] = []
        self._turn = 0
        self._own: Stream | None = None  # for snapshots: they wait for training, and the lanes must not

    def lane(self) -> Lane:
        """Return the lanes in turn. They are made on first use: that is on a thread of the engine."""
        with self._guard:
            self._make_lanes()
            self._turn += 1
            return self._lanes[self._turn % _LANES]

    def settle(self, event: Any) -> None:
        """Let later copies of all lanes wait for an event."""
        with self._guard:
            self._make_lanes()
        for lane in self._lanes:
            lane.wait(event)

    def snapshot(self, addresses: Table, lengths: npt.NDArray[np.int64], after: Any) -> Snapshot:
        """Start to copy sources within the device, behind ``after``. Raises MemoryError."""
        offsets, nbytes = compacted(addresses, lengths)
        with self._guard:
            self._own = stream = self._own or self.device.stream()
        memory = self._memory.allocate(stream, nbytes)  # may wait for all work of the device; the lanes must not
        places = offsets + np.uint64(memory.address)
        with self._guard, _whole(stream):
            stream.wait(after)
            rows = stream.prepare(moves(places, addresses, lengths.astype(np.uint64), _LARGE_MOVE))
            started = stream.record(timed=True)  # what the host needed before is no part of how fast the device is
            stream.move(rows)
            return Snapshot(places, memory, stream.record(timed=True), started)

    def close(self) -> None:
        """Let go of streams and scratch images; nothing is being copied any more."""
        with self._guard:
            self._lanes.clear()
            self._own = None

    def _make_lanes(self) -> None:
        while len(self._lanes) < _LANES:
            self._lanes.append(Lane(self.device, self.account))


class Lane:
    """A stream, and the scratch image through which small segments go."""

    def __init__(self, device: Device, account: Account) -> None:
        self._device = device
        self._memory = Memory(account)
        self._stream = device.stream()
        self._guard = threading.Lock()
        self._scratch: Block | None = None

    def wait(self, event: Any) -> None:
        """Let later copies wait for an event."""
        with self._guard:
            self._stream.wait(event)

    def gather(self, table: Table, foreign: Table | None, base: int, nbytes: int) -> tuple[Event, Ranges]:
        """Start to fill a buffer.

        Args:
            table: Segments of this device.
            foreign: Those of others in the same chunk.
            base: Address of the buffer.
            nbytes: Its size.

        Returns:
            The end of it, and what of the buffer will then have been written.
        """
        with self._guard, _whole(self._stream) as stream:
            found, scratch = self._split(table, foreign, nbytes)
            if scratch:
                low, high = int(found.runs[0, 0]), int(found.runs[-1, 1])
                stream.zero(scratch + low, high - low)
                small = found.small
                rows = moves(small[:, 1] + np.uint64(scratch), small[:, 0], small[:, 2], _SMALL_MOVE)
                stream.move(stream.prepare(rows))
                for low, high in found.runs.tolist():
                    stream.to_host(base + low, scratch + low, high - low)
            for address, offset, length in found.large.tolist():
                stream.to_host(base + offset, address, length)
            return stream.record(), found.filled

    def scatter(self, table: Table, base: int, nbytes: int) -> Event:
        """Start to copy a buffer's segments to the device (see :meth:`gather`). Returns the end of it."""
        with self._guard, _whole(self._stream) as stream:
            found, scratch = self._split(table, None, nbytes)
            if scratch:
                for low, high in found.runs.tolist():
                    stream.to_device(scratch + low, base + low, high - low)
                small = found.small
                rows = moves(small[:, 0], small[:, 1] + np.uint64(scratch), small[:, 2], _SMALL_MOVE)
                stream.move(stream.prepare(rows))
            for address, offset, length in found.large.tolist():
                stream.to_device(address, base + offset, length)
            return stream.record()

    def _split(self, table: Table, foreign: Table | None, nbytes: int) -> tuple[Split, int]:
        """Split the segments; all are large where the device has no memory for a scratch image."""
        found = split(table, foreign, LARGE)
        if not len(found.small):
            return found, 0
        try:
            return found, self._image(nbytes)
        except MemoryError as error:
            text = "device %d has no memory for a scratch image of %d bytes: %s"
            write(logging.DEBUG, "no_scratch", text, self._device.index, nbytes, error)
            return split(table, foreign, large=0), 0

    def _image(self, nbytes: int) -> int:
        """Return the address of a scratch image of ``nbytes``."""
        if self._scratch is None or self._scratch.nbytes < nbytes:
            scratch = self._memory.allocate(self._stream, nbytes)
            if self._scratch is not None:
                self._stream.keep(self._scratch)
            self._scratch = scratch
        return self._scratch.address


class Memory:
    """Takes device memory for one purpose; where there was none, it is asked for less and less often.

    Whoever has none first gives back all that is cached, and training has to get its memory from the driver again.

    Args:
        account: Where it counts as held; None where that is too little to count.
    """

    def __init__(self, account: Account | None = None) -> None:
        self._account = account
        self._pause = 0.0
        self._until = 0.0

    def allocate(self, stream: Stream, nbytes: int) -> Block:
        """Take memory for a stream. Raises MemoryError."""
        now = time.monotonic()
        if now < self._until:
            raise MemoryError(f"there was none; asked again in {self._until - now:.0f} s")
        try:
            block = stream.allocate(nbytes)
        except MemoryError:
            shortest, longest = _REFUSED_SECONDS
            self._pause = min(max(2 * self._pause, shortest), longest)
            self._until = time.monotonic() + self._pause
            raise
        self._pause = 0.0
        if self._account is not None:
            self._account.take(nbytes)
            weakref.finalize(block, self._account.give_back, nbytes).atexit = False
        return block


@contextmanager
def _whole(stream: Stream) -> Iterator[Stream]:
    """Wait for what was started where not all of it could be (I9)."""
    try:
        yield stream
    except BaseException:
        stream.synchronize()
        raise
