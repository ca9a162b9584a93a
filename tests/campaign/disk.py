"""The raw limit of a disk: O_DIRECT transfers of a preallocated file by 1, 2 and 4 threads, flush included.

The memory is as large as the transfer and lies in huge pages: a state does not fit into a cache either, and fewer pages
per request is part of what a disk can do.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pccheck_async.memory import map_memory

BLOCK = 4 << 20
STREAMS = (1, 2, 4)


class RawDisk:
    """A preallocated file that was written once, as a slot in use is, and memory of the same size."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        self._memory = map_memory(nbytes)
        self._view = memoryview(self._memory)
        for start in range(0, nbytes, BLOCK):
            self._view[start : start + 4096] = os.urandom(4096)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(fd, 0, nbytes)
        os.close(fd)
        self.write_seconds(2)

    def write_seconds(self, streams: int) -> float:
        """Overwrite the file and flush."""
        return self._transfer(os.O_RDWR, os.pwritev, streams, flush=True)

    def read_seconds(self, streams: int) -> float:
        """Read the file."""
        return self._transfer(os.O_RDONLY, os.preadv, streams, flush=False)

    def best_write(self) -> float:
        """Seconds of the fastest number of streams."""
        return min(self.write_seconds(streams) for streams in STREAMS)

    def best_read(self) -> float:
        """Seconds of the fastest number of streams."""
        return min(self.read_seconds(streams) for streams in STREAMS)

    def _transfer(
        self, mode: int, move: Callable[[int, list[memoryview], int], int], streams: int, flush: bool
    ) -> float:
        fd = os.open(self.path, mode | os.O_DIRECT)

        def work(first: int) -> None:
            for offset in range(first * BLOCK, self.nbytes, streams * BLOCK):
                move(fd, [self._view[offset : min(offset + BLOCK, self.nbytes)]], offset)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(streams)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if flush:
            os.fdatasync(fd)
        seconds = time.perf_counter() - start
        os.close(fd)
        return seconds


@contextmanager
def raw_disk(folder: Path, nbytes: int) -> Iterator[RawDisk]:
    """The raw limit of the disk that ``folder`` is on."""
    disk = RawDisk(folder / "scratch", nbytes)
    try:
        yield disk
    finally:
        disk.path.unlink()
