# SPDX-License-Identifier: Apache-2.0
"""The raw limit of a disk: O_DIRECT transfers of an existing file by several threads, the flush included.

The buffer is as large as the transfer, because a state does not fit into a processor's cache either, and lies in huge
pages, because requests with fewer pages are part of a disk's speed.
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
"""After two rounds only the three fastest ways are measured any more."""


class Way(NamedTuple):
    """One way of keeping a disk busy: a number of threads, each with one transfer of ``block`` bytes at a time."""

    name: str
    streams: int
    block: int


def ways() -> list[Way]:
    """1, 2 and 4 streams of 4 MiB each, and 4 of 8 MiB."""
    return [Way(f"{n} threads of {b} MiB", n, b * MIB) for n, b in ((1, 4), (2, 4), (4, 4), (4, 8))]


def slot_file(store: Path, *, committed: bool) -> Path:
    """Return the slot file that the newest commit record of a store names, or the first one that it does not name."""
    identity = decode_identity((store / IDENTITY_NAME).read_bytes())
    record = newest_record((store / COMMIT_NAME).read_bytes(), identity.id_bytes)
    if record is None:
        raise FileNotFoundError(f"{store} has no checkpoint")
    named = {slot_name(entry.slot) for entry in record.entries}
    return next(path for path in sorted(store.glob("slot-*")) if (path.name in named) is committed)


class RawDisk:
    """A buffer of ``nbytes`` that is written to and read from files that exist already.

    The files are an engine's own slots, so that both write the same blocks of the same device: on a virtual disk the
    speed depends on where the blocks lie, by a third on some machines.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.view = aligned_buffer(nbytes)
        for start in range(0, nbytes, 4096):
            self.view[start : start + 8] = os.urandom(8)

    def seconds(self, path: Path, way: Way, *, write: bool) -> float:
        """Overwrite the file's first bytes and flush, or read them. A slot that is written is one no record names."""
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
    """Return the limit that holds between each two rounds: the disk was measured before and after it.

    The limit is the mean of two rounds on the same file, one before and one after, where both exist: the slots of an
    engine take turns and are not equally fast. A save between two rounds has ``written`` the file of the round before
    it; a load read that of the round after it.
    """

    def beside(after: int) -> Iterator[float]:
        own, others = (after - 1, range(after, len(paths))) if written else (after, range(after - 1, -1, -1))
        yield seconds[own]
        yield from islice((seconds[at] for at in others if paths[at] == paths[own]), 1)

    return [statistics.mean(beside(after)) for after in range(1, len(paths))]


class RawLimit:
    """The limit of a disk, measured round by round in every way.

    Reported is the way with the smallest median of all rounds: the fastest of many noisy samples would be a lucky one.
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
        """The fastest one so far."""
        return self._best()[0]

    def _best(self) -> list[Way]:
        return sorted(self._seconds, key=lambda way: statistics.median(self._seconds[way]))

    def between(self) -> list[float]:
        """Return the limit in seconds between each two rounds: one less than there were rounds."""
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
