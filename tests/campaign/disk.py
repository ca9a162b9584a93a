"""The raw limit of a disk: O_DIRECT transfers of a preallocated file by 1, 2 and 4 threads, flush included."""

from __future__ import annotations

import functools
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pccheck_async.memory import map_memory

BLOCK = 4 << 20
STREAMS = (1, 2, 4)


@contextmanager
def scratch(folder: Path, nbytes: int) -> Iterator[Path]:
    """A preallocated file that was written once, as a slot in use is."""
    path = folder / "scratch"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(fd, 0, nbytes)
    os.close(fd)
    write_seconds(path, nbytes, 2)
    try:
        yield path
    finally:
        path.unlink()


def write_seconds(path: Path, nbytes: int, streams: int) -> float:
    """Overwrite ``nbytes`` and flush."""
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    try:
        start = time.perf_counter()
        _run(fd, nbytes, streams, os.pwritev)
        os.fdatasync(fd)
        return time.perf_counter() - start
    finally:
        os.close(fd)


def read_seconds(path: Path, nbytes: int, streams: int) -> float:
    """Read ``nbytes``."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        start = time.perf_counter()
        _run(fd, nbytes, streams, os.preadv)
        return time.perf_counter() - start
    finally:
        os.close(fd)


def best_write(path: Path, nbytes: int) -> float:
    """Seconds of the fastest number of streams."""
    return min(write_seconds(path, nbytes, streams) for streams in STREAMS)


def best_read(path: Path, nbytes: int) -> float:
    """Seconds of the fastest number of streams."""
    return min(read_seconds(path, nbytes, streams) for streams in STREAMS)


def _run(fd: int, nbytes: int, streams: int, move: object) -> None:
    buffers = [_buffer(index) for index in range(streams)]

    def work(first: int) -> None:
        memory = buffers[first]
        for offset in range(first * BLOCK, nbytes, streams * BLOCK):
            move(fd, [memory[: min(BLOCK, nbytes - offset)]], offset)  # type: ignore[operator]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@functools.cache
def _buffers() -> mmap.mmap:
    memory = map_memory(2 * max(STREAMS) * BLOCK)
    memory.write(os.urandom(4096) * (len(memory) // 4096))
    return memory


def _buffer(index: int) -> memoryview:
    """Memory in huge pages, touched before: fewer pages per request is part of what a disk can do."""
    return memoryview(_buffers())[index * BLOCK : (index + 1) * BLOCK]
