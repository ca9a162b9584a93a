"""The raw limit of a disk: O_DIRECT writes of a file that exists, by several threads, flush included."""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

from pccheck_async.memory import map_memory
from pccheck_async.writer.filesystem import IN_MEMORY, filesystem_type

__all__ = ["raw_write_seconds"]

_MIB = 1 << 20
_WAYS = ((1, 4 * _MIB), (2, 4 * _MIB), (4, 4 * _MIB), (4, 8 * _MIB))
"""Threads, and bytes of a write: one of them saturates any disk that was measured."""


def raw_write_seconds(folder: Path, nbytes: int, rounds: int = 3) -> float:
    """Return the time in which no method can make so many bytes durable: the median of the fastest way.

    Args:
        folder: On the filesystem that is measured; a passing file is written there.
        nbytes: How many, made whole pages.
        rounds: How often each way writes, by turns.

    Raises:
        OSError: the file cannot be written.
    """
    pages = -(-nbytes // 4096) * 4096
    flag = 0 if filesystem_type(folder) in IN_MEMORY else os.O_DIRECT
    with tempfile.TemporaryDirectory(prefix="pccheck-limit-", dir=folder) as name, map_memory(pages) as memory:
        view = memoryview(memory)[:pages]
        try:
            for start in range(0, pages, 4096):
                view[start : start + 8] = os.urandom(8)  # no device may find zeros
            fd = os.open(Path(name) / "file", os.O_RDWR | os.O_CREAT | flag, 0o600)
            try:
                os.posix_fallocate(fd, 0, pages)
                _write(fd, view, *_WAYS[-1])  # a first write may have to allocate
                seconds: dict[tuple[int, int], list[float]] = {way: [] for way in _WAYS}
                for _ in range(rounds):
                    for way, each in seconds.items():
                        each.append(_write(fd, view, *way))
            finally:
                os.close(fd)
        finally:
            view.release()
    return min(statistics.median(each) for each in seconds.values())


def _write(fd: int, data: memoryview, threads: int, block: int) -> float:
    """Write all of it, flush, and return the seconds."""
    failures: list[OSError] = []

    def work(first: int) -> None:
        try:
            for offset in range(first * block, len(data), threads * block):
                with data[offset : offset + block] as piece:
                    if os.pwritev(fd, [piece], offset) != len(piece):
                        raise OSError("a raw write was short")
        except OSError as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os.fdatasync(fd)
    seconds = time.perf_counter() - start
    if failures:
        raise failures[0]
    return seconds
