# SPDX-License-Identifier: Apache-2.0
"""Copies of one device: lanes (streams with a scratch image each), snapshots, and the tables for both.

Large segments of a chunk are copied one by one. The device gathers small segments into a scratch image of the chunk,
from which one copy moves each run of them to the staging buffer; a restore goes the other way. The functions at the
end of the file decide this by plain arithmetic on tables. (Invariants, such as I9: :mod:`pccheck_async.store`.)
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pccheck_async.telemetry import write
from pccheck_async.transfer.copying.devices import Block, Device, DeviceEvent, Stream
from pccheck_async.transfer.copying.snapshot import Account, Pace
from pccheck_async.transfer.plan import Table

__all__ = ["Copier", "Lane", "Memory", "Ranges", "Snapshot", "compacted", "gaps", "joined", "merged", "moves", "split"]

_LANES: Final = 2
"""Number of lanes: while one copies to the host, the other one gathers."""

_SMALL_MOVE: Final = 16 << 10
"""Most bytes that one block of GPU threads moves for a chunk: few, so that there are enough blocks for the device."""

_LARGE_MOVE: Final = 256 << 10
"""Most bytes that one block moves for a snapshot, which has more bytes: larger, so that its table has fewer rows."""

_REFUSED_SECONDS: Final = 1.0, 600.0
"""Pause after a failed allocation: the first, and the longest; each is twice the one before."""

_LARGE: Final = 256 << 10
"""Bytes from which a segment counts as large, and is copied by itself: its copy takes longer than the launch."""

_APART: Final = 64 << 10
"""Largest gap in bytes between two small segments of one run."""

_ALIGNMENT: Final = 16
"""Bytes that a GPU thread moves at a time if source and destination are aligned alike."""

Ranges = npt.NDArray[np.int64]
"""Rows of (start, end): ranges of a chunk's buffer, in bytes."""

_NO_OFFSETS: Final = np.empty(0, np.uint64)


class Snapshot(NamedTuple):
    """Copies of sources in device memory of the engine: at ``addresses`` in ``memory``, freed with its last reference.

    ``started`` and ``copied`` are events before and after the copies; keep the sources until ``copied`` has passed.
    """

    addresses: Table
    memory: Block
    copied: DeviceEvent
    started: DeviceEvent


class Copier:
    """Copies between one device and the host, and within the device. May be used from several threads."""

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
        """Return the next lane, in turn. Lanes are created on first use, which is on a thread of the engine."""
        with self._guard:
            self._turn += 1
            return self._made_lanes()[self._turn % _LANES]

    def wait(self, event: Any) -> None:
        """Make later copies of all lanes wait for an event."""
        with self._guard:
            lanes = self._made_lanes()
        for lane in lanes:
            lane.wait(event)

    def snapshot(self, addresses: Table, lengths: npt.NDArray[np.int64], after: Any) -> Snapshot:
        """Start to copy sources within the device, after the event ``after``. Raises MemoryError."""
        offsets, nbytes = compacted(addresses, lengths)
        with self._guard:
            self._own = stream = self._own or self.device.stream()
        memory = self._memory.allocate(stream, nbytes)  # may wait for the device; the lanes must not
        places = offsets + np.uint64(memory.address)
        with self._guard, _whole(stream):
            stream.wait(after)
            rows = stream.prepare(moves(places, addresses, lengths.astype(np.uint64), _LARGE_MOVE))
            started = stream.record(timed=True)  # the host's preparation does not count as device time
            stream.move(rows)
            return Snapshot(places, memory, stream.record(timed=True), started)

    def close(self) -> None:
        """Drop streams and scratch images; no copy may be in progress."""
        with self._guard:
            self._lanes.clear()
            self._own = None

    def _made_lanes(self) -> list[Lane]:
        while len(self._lanes) < _LANES:
            self._lanes.append(Lane(self.device, self.account))
        return self._lanes


class Lane:
    """A stream, and the scratch image through which small segments go."""

    def __init__(self, device: Device, account: Account) -> None:
        self._device = device
        self._scratch = Memory(account)
        self._stream = device.stream()
        self._guard = threading.Lock()

    def wait(self, event: Any) -> None:
        """Make later copies of this lane wait for an event."""
        with self._guard:
            self._stream.wait(event)

    def gather(self, table: Table, foreign: Table | None, base: int, nbytes: int) -> tuple[DeviceEvent, Ranges]:
        """Start to fill a host buffer of ``nbytes`` at ``base`` with the segments in ``table``.

        ``foreign`` are other devices' segments in the same chunk.

        Returns:
            The event after the copies, and the ranges of the buffer that they write.
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

    def scatter(self, table: Table, base: int, nbytes: int) -> DeviceEvent:
        """Start to copy segments of a host buffer to the device (see :meth:`gather`). Returns the event after them."""
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

    def _split(self, table: Table, foreign: Table | None, nbytes: int) -> tuple[LaneSplit, int]:
        """Split the segments by size; return them and the scratch image's address, 0 if it is not needed.

        If the device has no memory for a scratch image, all segments count as large.
        """
        found = split(table, foreign, _LARGE)
        if not len(found.small):
            return found, 0
        try:
            return found, self._scratch.of(self._stream, nbytes).address
        except MemoryError as error:
            text = "device %d has no memory for a scratch image of %d bytes: %s"
            write("no_scratch", text, self._device.index, nbytes, error)
            return split(table, foreign, large=0), 0


class Memory:
    """Allocates device memory for one purpose; after a failure it refuses for a while, longer each time.

    Every failed attempt makes torch's allocator return its cache to the driver, and training then has to allocate anew.

    ``account`` counts the allocated memory; None if it is too little to count.
    """

    def __init__(self, account: Account | None = None) -> None:
        self._account = account
        self._block: Block | None = None
        self._pause = 0.0
        self._until = 0.0

    def of(self, stream: Stream, nbytes: int) -> Block:
        """Return one block of at least ``nbytes``, reused by all calls for the stream. Raises MemoryError."""
        if self._block is None or self._block.nbytes < nbytes:
            block = self.allocate(stream, nbytes)
            if self._block is not None:
                stream.keep(self._block)
            self._block = block
        return self._block

    def allocate(self, stream: Stream, nbytes: int) -> Block:
        """Allocate a new block for a stream. Raises MemoryError if there is no memory, and in the pause after that."""
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
    """Wait for the work on a stream if the block raises, so that no part of it is left running (I9)."""
    try:
        yield stream
    except BaseException:
        stream.synchronize()
        raise


class LaneSplit(NamedTuple):
    """The segments of one device in one chunk, divided by the way in which they are copied.

    Large segments are copied one by one, small ones through the scratch image. ``runs`` are the ranges copied between
    image and buffer; every small segment lies in one run.
    """

    large: Table
    small: Table
    runs: Ranges

    @property
    def filled(self) -> Ranges:
        """Return the ranges of the buffer that a gather writes, in order."""
        offsets, lengths = self.large[:, 1].astype(np.int64), self.large[:, 2].astype(np.int64)
        ranges = np.concatenate((np.stack((offsets, offsets + lengths), axis=1), self.runs))
        return ranges[np.argsort(ranges[:, 0], kind="stable")]


def split(table: Table, foreign: Table | None = None, large: int = _LARGE) -> LaneSplit:
    """Split the segments of one device, in any order; those of ``large`` bytes or more are copied by themselves.

    No run covers ``foreign`` segments (of other devices in the same chunk), since devices copy concurrently.
    """
    is_large = table[:, 2] >= large
    alone, small = table[is_large], table[~is_large]
    if not len(small):
        return LaneSplit(alone, small, np.empty((0, 2), np.int64))
    small = small[np.argsort(small[:, 1], kind="stable")]
    lows = small[:, 1]
    reach = np.maximum.accumulate(lows + small[:, 2])
    obstacles = np.sort(np.concatenate((alone[:, 1], _NO_OFFSETS if foreign is None else foreign[:, 1])))
    before = np.searchsorted(obstacles, lows)
    far = lows[1:] > reach[:-1] + np.uint64(_APART)
    starts = np.flatnonzero(np.concatenate(([True], far | (before[1:] != before[:-1]))))
    ends = np.append(starts[1:], len(small)) - 1
    return LaneSplit(alone, small, np.stack((lows[starts], reach[ends]), axis=1).astype(np.int64))


def moves(into: Table, source: Table, lengths: Table, most: int) -> Table:
    """Cut copies into rows of (destination, source, length), one for each block of GPU threads.

    No row has more than ``most`` bytes, a multiple of 16, so that the cuts keep the alignment.
    """
    counts = ((lengths + np.uint64(most - 1)) // np.uint64(most)).astype(np.int64)
    row = np.repeat(np.arange(len(lengths)), counts)
    part = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    low = part.astype(np.uint64) * np.uint64(most)
    return np.stack((into[row] + low, source[row] + low, np.minimum(lengths[row] - low, np.uint64(most))), axis=1)


def joined(rows: Table) -> Table:
    """Return rows of :func:`moves` with adjacent rows joined into one."""
    if not len(rows):
        return rows
    ends = rows[:-1, :2] + rows[:-1, 2:]
    starts = np.flatnonzero(np.concatenate(([True], (rows[1:, :2] != ends).any(axis=1))))
    whole: Table = rows[starts]
    whole[:, 2] = np.add.reduceat(rows[:, 2], starts)
    return whole


def compacted(addresses: Table, lengths: npt.NDArray[np.int64]) -> tuple[Table, int]:
    """Lay out pieces of memory back to back; return their offsets and the size of all.

    The offsets equal the addresses modulo 16.
    """
    shift = (addresses % np.uint64(_ALIGNMENT)).astype(np.int64)
    room = -(-(shift + lengths) // _ALIGNMENT) * _ALIGNMENT
    ends = np.cumsum(room)
    return (ends - room + shift).astype(np.uint64), int(ends[-1]) if len(ends) else 0


def gaps(filled: Ranges, nbytes: int) -> list[tuple[int, int]]:
    """Return the ranges of a buffer outside ``filled``, whose ranges are in order and do not overlap."""
    bounds = [0, *filled.ravel().tolist(), nbytes]
    return [(low, high) for low, high in zip(bounds[::2], bounds[1::2], strict=True) if low < high]


def merged(host: bytes, filled: Ranges, address: int) -> bytes:
    """Return the table for gathering host segments into a buffer at ``address`` that devices have filled in part.

    Filled ranges are gathered from the buffer itself, so that they keep their bytes: one pass then writes the rest,
    zeros the gaps and computes the checksum. A host segment inside a filled range overwrites that part. The segments,
    and the ranges, are in order and do not overlap each other.
    """
    rows = np.frombuffer(host, np.uint64).reshape(-1, 3)
    lows, highs = rows[:, 1].astype(np.int64), (rows[:, 1] + rows[:, 2]).astype(np.int64)
    cuts = np.unique(np.concatenate((filled.ravel(), lows, highs)))
    starts, ends = cuts[:-1], cuts[1:]
    kept = _within(starts, filled[:, 0], filled[:, 1]) & ~_within(starts, lows, highs)
    own = np.stack((starts[kept] + address, starts[kept], (ends - starts)[kept]), axis=1).astype(np.uint64)
    table = np.concatenate((rows, own))
    return table[np.argsort(table[:, 1], kind="stable")].tobytes()


def _within(points: Ranges, lows: Ranges, highs: Ranges) -> npt.NDArray[np.bool_]:
    """Return for each point whether it lies in one of the ranges, which are in order and do not overlap."""
    if not len(lows):
        return np.zeros(len(points), np.bool_)
    at = np.searchsorted(lows, points, "right") - 1
    return (at >= 0) & (points < highs[np.maximum(at, 0)])
