"""How the segments of a chunk are copied by a device: large ones one by one, many small ones in one piece.

The device gathers small segments into a scratch image of the chunk, and one copy moves each run of them between the
image and the staging buffer; a restore goes the other way. All of it is plain arithmetic on tables.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pccheck_async.transfer.segments import Table

__all__ = ["LARGE", "Ranges", "Split", "compacted", "gaps", "joined", "merged", "moves", "split"]

LARGE: Final = 256 << 10
"""Bytes from which a segment is copied by itself: the copy then takes longer than asking for it does."""

_APART: Final = 64 << 10
"""Bytes between two small segments from which they are not copied in one run."""

_ALIGNMENT: Final = 16
"""Bytes that a thread of the device moves at a time, where source and destination allow it."""

Ranges = npt.NDArray[np.int64]
"""Rows of (first byte, the one after the last) of a chunk's buffer."""

_NO_OFFSETS: Final = np.empty(0, np.uint64)


class Split(NamedTuple):
    """The segments of one device in one chunk, by the way in which they are copied.

    Attributes:
        large: Those that are copied by themselves.
        small: Those that go through the scratch image.
        runs: What is copied between the image and the buffer; every small segment lies in one run.
    """

    large: Table
    small: Table
    runs: Ranges

    @property
    def filled(self) -> Ranges:
        """What of the buffer is written when it is gathered, in order."""
        offsets, lengths = self.large[:, 1].astype(np.int64), self.large[:, 2].astype(np.int64)
        ranges = np.concatenate((np.stack((offsets, offsets + lengths), axis=1), self.runs))
        return ranges[np.argsort(ranges[:, 0], kind="stable")]


def split(table: Table, foreign: Table | None = None, large: int = LARGE) -> Split:
    """Split the segments of one device.

    Args:
        table: The segments, in any order.
        foreign: Segments of other devices in the same chunk: no run passes over them, since all are copied at once.
        large: Bytes from which a segment is copied by itself.
    """
    is_large = table[:, 2] >= large
    alone, small = table[is_large], table[~is_large]
    if not len(small):
        return Split(alone, small, np.empty((0, 2), np.int64))
    small = small[np.argsort(small[:, 1], kind="stable")]
    lows = small[:, 1]
    reach = np.maximum.accumulate(lows + small[:, 2])
    obstacles = np.sort(np.concatenate((alone[:, 1], _NO_OFFSETS if foreign is None else foreign[:, 1])))
    before = np.searchsorted(obstacles, lows)
    far = lows[1:] > reach[:-1] + np.uint64(_APART)
    starts = np.flatnonzero(np.concatenate(([True], far | (before[1:] != before[:-1]))))
    ends = np.append(starts[1:], len(small)) - 1
    return Split(alone, small, np.stack((lows[starts], reach[ends]), axis=1).astype(np.int64))


def moves(into: Table, source: Table, lengths: Table, most: int) -> Table:
    """Return rows of (destination, source, length) in which no length is over ``most``: one for each block of threads.

    Args:
        into: Destination addresses.
        source: Source addresses.
        lengths: Bytes of each.
        most: A multiple of 16, so that cutting keeps alignment.
    """
    counts = (lengths + np.uint64(most - 1)) // np.uint64(most)
    row = np.repeat(np.arange(len(lengths)), counts.astype(np.int64))
    part = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts.astype(np.int64)).astype(np.int64)
    low = part.astype(np.uint64) * np.uint64(most)
    table = np.empty((len(row), 3), np.uint64)
    table[:, 0] = into[row] + low
    table[:, 1] = source[row] + low
    table[:, 2] = np.minimum(lengths[row] - low, np.uint64(most))
    return table


def joined(rows: Table) -> Table:
    """Return rows of :func:`moves` with those made one again that go on where the one before ends."""
    if not len(rows):
        return rows
    ends = rows[:-1, :2] + rows[:-1, 2:]
    starts = np.flatnonzero(np.concatenate(([True], (rows[1:, :2] != ends).any(axis=1))))
    whole: Table = rows[starts]
    whole[:, 2] = np.add.reduceat(rows[:, 2], starts)
    return whole


def compacted(addresses: Table, lengths: npt.NDArray[np.int64]) -> tuple[Table, int]:
    """Lay memory out back to back, each piece aligned as it is at its address.

    Returns:
        Offset of each piece, and bytes of all.
    """
    shift = (addresses % np.uint64(_ALIGNMENT)).astype(np.int64)
    room = -(-(shift + lengths) // _ALIGNMENT) * _ALIGNMENT
    ends = np.cumsum(room)
    return (ends - room + shift).astype(np.uint64), int(ends[-1]) if len(ends) else 0


def gaps(filled: Ranges, nbytes: int) -> list[tuple[int, int]]:
    """Return what of a buffer lies between ``filled``, which is in order and does not overlap."""
    bounds = [0, *filled.ravel().tolist(), nbytes]
    return [(low, high) for low, high in zip(bounds[::2], bounds[1::2], strict=True) if low < high]


def merged(host: bytes, filled: Ranges, address: int) -> bytes:
    """Return the table that gathers segments of the host into a buffer that devices have filled in part.

    What was filled is gathered from the buffer itself, and so stays as it is: one pass then writes the rest, zeros the
    gaps and computes the checksum. Where a segment of the host lies in what was filled, it goes over it.

    Args:
        host: Segments in growing order of offset, not overlapping.
        filled: What devices wrote, in order, not overlapping.
        address: Of the buffer.
    """
    rows = np.frombuffer(host, np.uint64).reshape(-1, 3)
    lows, highs = rows[:, 1].astype(np.int64), (rows[:, 1] + rows[:, 2]).astype(np.int64)
    cuts = np.unique(np.concatenate((filled.ravel(), lows, highs)))
    starts, ends = cuts[:-1], cuts[1:]
    kept = _within(starts, filled[:, 0], filled[:, 1]) & ~_within(starts, lows, highs)
    own = np.empty((int(np.count_nonzero(kept)), 3), np.uint64)
    own[:, 0] = starts[kept] + address
    own[:, 1] = starts[kept]
    own[:, 2] = (ends - starts)[kept]
    table = np.concatenate((rows, own))
    return table[np.argsort(table[:, 1], kind="stable")].tobytes()


def _within(points: Ranges, lows: Ranges, highs: Ranges) -> npt.NDArray[np.bool_]:
    """Whether each point lies in one of the ranges, which are in order and do not overlap."""
    if not len(lows):
        return np.zeros(len(points), np.bool_)
    at = np.searchsorted(lows, points, "right") - 1
    return (at >= 0) & (points < highs[np.maximum(at, 0)])
