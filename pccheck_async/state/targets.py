"""Where the bytes of a restore go: payload ranges and the memory that takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np

__all__ = ["Restoration", "Target", "Targets"]


class Target(NamedTuple):
    """Bytes of the payload and the host memory that they are copied to; ``owner`` keeps that memory."""

    payload_offset: int
    nbytes: int
    address: int
    owner: Any


class Targets(Sequence[Target]):
    """Targets in the order of the payload. They may overlap there: stored once, wanted twice."""

    def __init__(self, targets: Iterable[Target] = ()) -> None:
        self._targets = tuple(sorted(targets, key=lambda target: target.payload_offset))
        count = len(self._targets)
        self._starts = np.fromiter((target.payload_offset for target in self._targets), np.int64, count)
        self._ends = self._starts + np.fromiter((target.nbytes for target in self._targets), np.int64, count)
        self._addresses = np.fromiter((target.address for target in self._targets), np.uint64, count)
        self._reach = np.maximum.accumulate(self._ends) if count else self._ends  # monotonic, so it can be searched

    def segments(self, offset: int, nbytes: int) -> bytes:
        """Return the (address, offset in the range, length) table for payload bytes ``[offset, offset + nbytes)``."""
        first = int(np.searchsorted(self._reach, offset, "right"))
        last = int(np.searchsorted(self._starts, offset + nbytes, "left"))
        if first >= last:
            return b""
        starts, ends = self._starts[first:last], self._ends[first:last]
        low, high = np.maximum(starts, offset), np.minimum(ends, offset + nbytes)
        inside = low < high
        table = np.empty((int(np.count_nonzero(inside)), 3), np.uint64)
        table[:, 0] = self._addresses[first:last][inside] + (low - starts)[inside].astype(np.uint64)
        table[:, 1] = (low - offset)[inside]
        table[:, 2] = (high - low)[inside]
        return table.tobytes()

    @overload
    def __getitem__(self, index: int) -> Target: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Target]: ...
    def __getitem__(self, index: int | slice) -> Target | Sequence[Target]:
        return self._targets[index]

    def __iter__(self) -> Iterator[Target]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)


@dataclass(frozen=True, slots=True, eq=False)
class Restoration:
    """A restore that was checked and can begin: fill the targets, then call ``finish`` once.

    Attributes:
        targets: What to fill, in the order of the payload.
        finish: Makes the state of what was filled, and returns it.
    """

    targets: Targets
    finish: Callable[[], Any]
