# SPDX-License-Identifier: Apache-2.0
"""Measures the raw limit of a disk: O_DIRECT transfers of an existing file by several threads, the flush included.

The buffer is as large as the transfer, because a state does not fit into a processor's cache either. It is in huge
pages, because a disk is faster for requests with fewer pages.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from pccheck_async.format.record import COMMIT_NAME, IDENTITY_NAME, decode_identity, newest_record, slot_name
from pccheck_async.transfer import aligned_buffer

__all__ = ["RawDisk", "RawLimit", "Way", "between", "slot_file", "ways"]

MIB = 1 << 20
_KEEP_AFTER, _KEEP = 2, 3
"""Rounds after which only the fastest ways are measured any more, and the number of these."""


class Way(NamedTuple):
    """A way of transfer: ``streams`` threads, each with one transfer of ``block`` bytes at a time."""

    name: str
    streams: int
    block: int


def ways() -> list[Way]:
    """Return the ways that are measured: 1, 2 and 4 threads with blocks of 4 MiB, and 4 with blocks of 8 MiB."""
    return [Way(f"{n} threads of {b} MiB", n, b * MIB) for n, b in ((1, 4), (2, 4), (4, 4), (4, 8))]


def slot_file(store: Path, *, committed: bool) -> Path:
    """Return the first slot file of a store that its newest record names, or (not ``committed``) that it does not."""
    identity = decode_identity((store / IDENTITY_NAME).read_bytes())
    record = newest_record((store / COMMIT_NAME).read_bytes(), identity.id_bytes)
    if record is None:
        raise FileNotFoundError(f"{store} has no checkpoint")
    named = {slot_name(entry.slot) for entry in record.entries}
    return next(path for path in sorted(store.glob("slot-*")) if (path.name in named) is committed)


class RawDisk:
    """A buffer of ``nbytes`` that is written to, or read from, files that exist already.

    The files are an engine's slots, so that engine and raw measurement use the same blocks of the device: on a virtual
    disk the speed depends on where the blocks are, by a third on some machines.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.view = aligned_buffer(nbytes)
        for start in range(0, nbytes, 4096):
            self.view[start : start + 8] = os.urandom(8)

    def seconds(self, path: Path, way: Way, *, write: bool) -> float:
        """Return the seconds to overwrite the file's first bytes (give an unused slot) and flush, or to read them."""
        fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_DIRECT)
        offsets = range(0, self.nbytes, way.block)
        pieces = [(offset, self.view[offset : offset + way.block]) for offset in offsets]
        try:
            start = time.perf_counter()
            _by_threads(fd, pieces, way.streams, os.pwritev if write else os.preadv)
            if write:
                os.fdatasync(fd)
            return time.perf_counter() - start
        finally:
            os.close(fd)


def between(paths: Sequence[Path], seconds: Sequence[float], *, written: bool) -> list[float]:
    """Return the limit in seconds for each gap between two rounds of raw measurements, in which a method ran.

    The limit is the mean of two rounds on the file that the method used, the nearest before and the nearest after the
    gap, if both exist: the slots of an engine take turns and are not equally fast. A save (``written``) used the file
    of the round before the gap, a load the file of the round after it.
    """

    def beside(after: int) -> Iterator[float]:
        own, others = (after - 1, range(after, len(paths))) if written else (after, range(after - 1, -1, -1))
        yield seconds[own]
        yield from islice((seconds[at] for at in others if paths[at] == paths[own]), 1)

    return [statistics.mean(beside(after)) for after in range(1, len(paths))]


class RawLimit:
    """The limit of a disk, measured round by round with every :class:`Way`.

    The way with the smallest median over all rounds is reported: the fastest single sample would be fast by chance.
    """

    def __init__(self, disk: RawDisk, *, write: bool) -> None:
        self.disk = disk
        self._write = write
        self._seconds: dict[Way, list[float]] = {way: [] for way in ways()}
        self._paths: list[Path] = []

    def measure(self, path: Path) -> None:
        """Measure one round on a file of at least the buffer's size."""
        for way, seconds in self._seconds.items():
            seconds.append(self.disk.seconds(path, way, write=self._write))
        self._paths.append(path)
        if len(self._paths) == _KEEP_AFTER:
            self._seconds = {way: self._seconds[way] for way in self._best()[:_KEEP]}

    @property
    def way(self) -> Way:
        """The way with the smallest median so far."""
        return self._best()[0]

    def _best(self) -> list[Way]:
        return sorted(self._seconds, key=lambda way: statistics.median(self._seconds[way]))

    def between(self) -> list[float]:
        """Return the limit in seconds for each gap between two rounds, one fewer than rounds (see :func:`between`)."""
        return between(self._paths, self._seconds[self.way], written=self._write)


def _by_threads(
    fd: int, pieces: list[tuple[int, memoryview]], streams: int, move: Callable[[int, list[memoryview], int], int]
) -> None:
    def work(first: int) -> None:
        for offset, piece in pieces[first::streams]:
            if move(fd, [piece], offset) != len(piece):
                raise OSError("a raw transfer was short")

    with ThreadPoolExecutor(streams) as threads:
        list(threads.map(work, range(streams)))
