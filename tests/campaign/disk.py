"""The raw limit of a disk: O_DIRECT transfers of a file in use by several streams and depths, flush included.

The memory is as large as the transfer and lies in huge pages: a state does not fit into a cache either, and fewer pages
per request is part of what a disk can do.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pccheck_async import _ext
from pccheck_async.memory import map_memory

MIB = 1 << 20


class Way(NamedTuple):
    """One way of keeping a disk busy: threads that each wait for their transfer, or requests in an io_uring."""

    name: str
    streams: int
    block: int
    uring: bool


def ways() -> list[Way]:
    """1, 2 and 4 streams of 4 and of 8 MiB, and as many depths of io_uring where the kernel has it."""
    found = [Way(f"{n} threads of {b} MiB", n, b * MIB, uring=False) for n, b in ((1, 4), (2, 4), (4, 4), (4, 8))]
    try:
        _ext.Queue(1, 1, "io_uring").close()
    except (OSError, ValueError):
        return found
    depths = ((8, 1), (4, 4), (8, 4), (4, 8))
    return found + [Way(f"io_uring, {n} deep, {b} MiB", n, b * MIB, uring=True) for n, b in depths]


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

    def _seconds(self, path: Path, way: Way, *, write: bool) -> float:
        fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_DIRECT)
        offsets = range(0, self.nbytes, way.block)
        pieces = [(offset, self._view[offset : min(offset + way.block, self.nbytes)]) for offset in offsets]
        start = time.perf_counter()
        if way.uring:
            _by_ring(fd, pieces, way.streams, write=write)
        else:
            _by_threads(fd, pieces, way.streams, os.pwritev if write else os.preadv)
        if write:
            os.fdatasync(fd)
        seconds = time.perf_counter() - start
        os.close(fd)
        return seconds


def _by_threads(
    fd: int, pieces: list[tuple[int, memoryview]], streams: int, move: Callable[[int, list[memoryview], int], int]
) -> None:
    def work(first: int) -> None:
        for offset, piece in pieces[first::streams]:
            if move(fd, [piece], offset) != len(piece):
                raise OSError("a raw transfer was short")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _by_ring(fd: int, pieces: list[tuple[int, memoryview]], depth: int, *, write: bool) -> None:
    queue = _ext.Queue(depth, 1, "io_uring")
    kind = _ext.WRITE if write else _ext.READ
    batch: list[tuple[Any, ...]] = [(token, kind, fd, offset, piece) for token, (offset, piece) in enumerate(pieces)]
    queue.submit(batch)
    while queue.running:
        select.select([queue.fileno()], [], [])
        for token, result, _ in queue.reap():
            if result < 0 or (not write and result != len(pieces[token][1])):
                raise OSError(-result, "a raw transfer failed")
    queue.close()
