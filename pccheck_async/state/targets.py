"""The memory that a restore fills: ranges of the payload, and where each is copied to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pccheck_async.state.sources import HOST


class Target(NamedTuple):
    """A range of the payload and the memory that it is copied to. Offset and length are in bytes.

    ``owner`` keeps the memory alive; ``device`` is the index of its CUDA device, or ``HOST``.
    """

    payload_offset: int
    nbytes: int
    address: int
    owner: Any
    device: int = HOST


class Targets(Iterable[Target]):
    """Targets in the order of the payload, where they may overlap: bytes stored once go to several places.

    Attributes:
        devices: Indices of the CUDA devices of all targets.
    """

    def __init__(self, targets: Iterable[Target] = ()) -> None:
        self._targets = tuple(sorted(targets, key=lambda target: target.payload_offset))
        count = len(self._targets)
        self._starts = np.fromiter((target.payload_offset for target in self._targets), np.int64, count)
        self._ends = self._starts + np.fromiter((target.nbytes for target in self._targets), np.int64, count)
        self._addresses = np.fromiter((target.address for target in self._targets), np.uint64, count)
        self.devices = {target.device for target in self._targets} - {HOST}
        self._devices = np.fromiter((target.device for target in self._targets), np.int32, count)
        # Ascending, so that it can be searched:
        self._reach = np.maximum.accumulate(self._ends) if count else self._ends

    @property
    def span(self) -> tuple[int, int]:
        """The first byte of the payload that any target takes, and the byte after the last."""
        return (int(self._starts[0]), int(self._reach[-1])) if self._targets else (0, 0)

    def segments(self, offset: int, nbytes: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32] | None]:
        """Return the memory for payload bytes ``[offset, offset + nbytes)``.

        Returns:
            Rows of (address, offset in the range, length), and the device of each row; None where all are on the host.
        """
        first = int(np.searchsorted(self._reach, offset, "right"))
        last = max(first, int(np.searchsorted(self._starts, offset + nbytes, "left")))
        starts, ends = self._starts[first:last], self._ends[first:last]
        low, high = np.maximum(starts, offset), np.minimum(ends, offset + nbytes)
        inside = low < high
        table = np.empty((int(np.count_nonzero(inside)), 3), np.uint64)
        table[:, 0] = self._addresses[first:last][inside] + (low - starts)[inside].astype(np.uint64)
        table[:, 1] = (low - offset)[inside]
        table[:, 2] = (high - low)[inside]
        return table, self._devices[first:last][inside] if self.devices else None

    def __iter__(self) -> Iterator[Target]:
        return iter(self._targets)
