"""The raw limit of a disk: O_DIRECT transfers of a file in use by several streams and depths, flush included.

The memory is as large as the transfer and lies in huge pages: a state does not fit into a cache either, and fewer pages
per request is part of what a disk can do.
"""

from __future__ import annotations

import os
import select
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from pccheck_async.format.record import COMMIT_NAME, IDENTITY_NAME, decode_identity, newest_record, slot_name
from pccheck_async.transfer.memory import aligned_buffer, map_memory
from pccheck_async.transfer.operations.native import why_no_io_uring

__all__ = ["BareSequence", "RawDisk", "RawLimit", "Way", "between", "slot_file", "ways"]

MIB = 1 << 20
_RECORD = 4096
_KEEP_AFTER, _KEEP = 2, 3
"""After so many rounds only so many ways are measured on: the fastest."""


class Way(NamedTuple):
    """One way of keeping a disk busy: threads that each wait for their transfer, or requests in an io_uring."""

    name: str
    streams: int
    block: int
    uring: bool


def ways() -> list[Way]:
    """1, 2 and 4 streams of 4 and of 8 MiB, and as many depths of io_uring where the kernel has it."""
    found = [Way(f"{n} threads of {b} MiB", n, b * MIB, uring=False) for n, b in ((1, 4), (2, 4), (4, 4), (4, 8))]
    if why_no_io_uring() is not None:
        return found
    depths = ((8, 1), (4, 4), (8, 4), (4, 8))
    return found + [Way(f"io_uring, {n} deep, {b} MiB", n, b * MIB, uring=True) for n, b in depths]


def slot_file(store: Path, *, committed: bool) -> Path:
    """Return the slot of a store that its newest record names, or the next one that no record names."""
    identity = decode_identity((store / IDENTITY_NAME).read_bytes())
    record = newest_record((store / COMMIT_NAME).read_bytes(), identity.id_bytes)
    if record is None:
        raise FileNotFoundError(f"{store} has no checkpoint")
    named = {slot_name(entry.slot) for entry in record.entries}
    return next(path for path in sorted(store.glob("slot-*")) if (path.name in named) is committed)


class RawDisk:
    """Memory of a transfer's size, moved to and from files that exist already.

    The files are an engine's own slots, so that both write the same blocks of the same device: how fast those are
    depends on where they lie in a virtual disk, by a third on some machines.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = map_memory(nbytes)
        self._view = memoryview(self._memory)
        for start in range(0, nbytes, 4096):
            self._view[start : start + 8] = os.urandom(8)

    def write_seconds(self, path: Path, way: Way) -> float:
        """Overwrite the file's first bytes and flush. A slot must be one that no record names."""
        return self._seconds(path, way, write=True)

    def read_seconds(self, path: Path, way: Way) -> float:
        """Read the file's first bytes."""
        return self._seconds(path, way, write=False)

    def data(self) -> bytes:
        """Return what is in the memory."""
        return bytes(self._view[: self.nbytes])

    def _seconds(self, path: Path, way: Way, *, write: bool) -> float:
        fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_DIRECT)
        offsets = range(0, self.nbytes, way.block)
        pieces = [(offset, self._view[offset : min(offset + way.block, self.nbytes)]) for offset in offsets]
        try:
            start = time.perf_counter()
            if way.uring:
                _by_ring(fd, pieces, way.streams, write=write)
            else:
                _by_threads(fd, pieces, way.streams, os.pwritev if write else os.preadv)
            if write:
                os.fdatasync(fd)
            return time.perf_counter() - start
        finally:
            os.close(fd)


def between(paths: Sequence[Path], seconds: Sequence[float], *, written: bool) -> list[float]:
    """Return what those rounds took that what lies between two of them is to be compared with.

    That is the mean of two rounds on the file that it used, one from before it and one from after it, where there are
    both: an engine's slots take turns, and are not equally fast.

    Args:
        paths: On which file each round was measured: the one that was next to be written, or was there to be read.
        seconds: What each round took.
        written: What lies between wrote the file of the round before it; else it read that of the round after it.
    """

    def beside(after: int) -> Iterator[float]:
        own, others = (after - 1, range(after, len(paths))) if written else (after, range(after - 1, -1, -1))
        yield seconds[own]
        yield from islice((seconds[at] for at in others if paths[at] == paths[own]), 1)

    return [statistics.mean(beside(after)) for after in range(1, len(paths))]


class RawLimit:
    """What the disk can do, measured in rounds by every way.

    The limit of a round is that of the way with the smallest median of all rounds: the fastest of many noisy samples
    would be a lucky one. For what lies between two rounds see :func:`between`.

    Args:
        disk: Moves the bytes.
        write: Whether they are written, or read.
    """

    def __init__(self, disk: RawDisk, *, write: bool) -> None:
        self.disk = disk
        self._write = write
        self._move = disk.write_seconds if write else disk.read_seconds
        self._seconds: dict[Way, list[float]] = {way: [] for way in ways()}
        self._paths: list[Path] = []

    def measure(self, path: Path) -> None:
        """Measure one round on a file that has so many bytes."""
        for way, seconds in self._seconds.items():
            seconds.append(self._move(path, way))
        self._paths.append(path)
        if len(self._paths) == _KEEP_AFTER:
            best = sorted(self._seconds, key=lambda way: statistics.median(self._seconds[way]))[:_KEEP]
            self._seconds = {way: self._seconds[way] for way in best}

    @property
    def way(self) -> Way:
        """The fastest one so far."""
        return min(self._seconds, key=lambda way: statistics.median(self._seconds[way]))

    def between(self) -> list[float]:
        """Return the limit in seconds between each two rounds: one less than there were rounds."""
        return between(self._paths, self._seconds[self.way], written=self._write)


class BareSequence:
    """The least that any crash-consistent save does, blocking, on files of its own: write, flush, record, flush.

    Args:
        folder: Where the two files go; on a filesystem that takes direct I/O.
        nbytes: What is written before the record, a multiple of the block size.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._data, self._record = aligned_buffer(nbytes), aligned_buffer(_RECORD)
        self._files = [os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_DIRECT) for name in ("data", "record")]
        for fd, view in zip(self._files, (self._data, self._record), strict=True):
            os.posix_fallocate(fd, 0, len(view))

    def seconds(self) -> float:
        """Do it once."""
        data, record = self._files
        start = time.perf_counter()
        os.pwrite(data, self._data, 0)
        os.fdatasync(data)
        os.pwrite(record, self._record, 0)
        os.fdatasync(record)
        return time.perf_counter() - start

    def close(self) -> None:
        """Close the files."""
        for fd in self._files:
            os.close(fd)

    def __enter__(self) -> BareSequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _by_threads(
    fd: int, pieces: list[tuple[int, memoryview]], streams: int, move: Callable[[int, list[memoryview], int], int]
) -> None:
    failures: list[OSError] = []

    def work(first: int) -> None:
        try:
            for offset, piece in pieces[first::streams]:
                if move(fd, [piece], offset) != len(piece):
                    raise OSError("a raw transfer was short")
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _by_ring(fd: int, pieces: list[tuple[int, memoryview]], depth: int, *, write: bool) -> None:
    from pccheck_async import _ext

    kind = _ext.WRITE if write else _ext.READ
    batch: list[tuple[Any, ...]] = [(token, kind, fd, offset, piece) for token, (offset, piece) in enumerate(pieces)]
    with closing(_ext.Queue(depth, 1, "io_uring")) as queue:
        queue.submit(batch)
        while queue.running:
            select.select([queue.fileno()], [], [])
            for token, result, _ in queue.reap():
                if result < 0:
                    raise OSError(-result, "a raw transfer failed")
                if not write and result != len(pieces[token][1]):
                    raise OSError("a raw transfer was short")
