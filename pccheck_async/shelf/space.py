# SPDX-License-Identifier: Apache-2.0
"""The free pages of a shelf, computed without I/O from the extents in use."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from pccheck_async.shelf.format import Extent

__all__ = ["Space"]


class Space:
    """Free ranges of ``[begin, end)``, ordered by offset; neighbours are joined.

    An extent is taken from the smallest range that has room, so that a variable that is written repeatedly alternates
    between two places. The search takes time proportional to the number of ranges, at most one more than the extents.
    """

    def __init__(self, begin: int, end: int, taken: Iterable[Extent] = ()) -> None:
        self._free: list[Extent] = []
        for extent in sorted(each for each in taken if each.nbytes):
            if extent.offset > begin:
                self._free.append(Extent(begin, extent.offset - begin))
            begin = extent.end
        if end > begin:
            self._free.append(Extent(begin, end - begin))

    @property
    def free_bytes(self) -> int:
        """Return the number of free bytes."""
        return sum(each.nbytes for each in self._free)

    @property
    def largest(self) -> int:
        """Return the number of bytes of the largest free range."""
        return max((each.nbytes for each in self._free), default=0)

    def take(self, nbytes: int) -> Extent | None:
        """Take an extent of ``nbytes`` from the free ranges and return it; None if no range has room."""
        if nbytes == 0:
            return Extent()
        rooms = [each for each in self._free if each.nbytes >= nbytes]
        if not rooms:
            return None
        room = min(rooms, key=lambda each: each.nbytes)
        index = self._free.index(room)
        rest = Extent(room.offset + nbytes, room.nbytes - nbytes)
        self._free[index : index + 1] = [rest] if rest.nbytes else []
        return Extent(room.offset, nbytes)

    def take_last(self, nbytes: int) -> Extent:
        """Take an extent from the end of the last free range, which must have room, and return it."""
        last = self._free.pop()
        if last.nbytes > nbytes:
            self._free.append(Extent(last.offset, last.nbytes - nbytes))
        return Extent(last.end - nbytes, nbytes)

    def give(self, extent: Extent) -> None:
        """Add an extent to the free ranges. Raises ValueError if a part of it is free already."""
        if not extent.nbytes:
            return
        index = bisect_left(self._free, extent)
        before = self._free[index - 1] if index else Extent()
        after = self._free[index] if index < len(self._free) else Extent(extent.end, 0)
        if before.end > extent.offset or after.offset < extent.end:
            raise ValueError(f"{extent} is free already")
        if after.nbytes and after.offset == extent.end:
            del self._free[index]
            extent = Extent(extent.offset, extent.nbytes + after.nbytes)
        if before.nbytes and before.end == extent.offset:
            del self._free[index - 1]
            extent = Extent(before.offset, before.nbytes + extent.nbytes)
        insort(self._free, extent)
