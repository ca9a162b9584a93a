"""What a save takes of the machine, and what of it is on the device: asked of the kernel."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pccheck_async.medium.status_file import STATUS_NAME

__all__ = ["PeakMemory", "dirty_bytes", "stored_bytes"]

_CACHESTAT = 451  # from Linux 6.5 on, the same number on every architecture but alpha


def dirty_bytes(folder: Path) -> int | None:
    """Return the bytes of the files in a folder that the page cache has and the device has not; None: not known.

    Of data alone: whether the names of the files are durable, it does not tell.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    total = 0
    for path in _files(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            everything, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
            if libc.syscall(_CACHESTAT, fd, everything, found, 0) != 0:
                return None
        finally:
            os.close(fd)
        _cached, dirty, writeback, _evicted, _recently = found
        total += (dirty + writeback) * os.sysconf("SC_PAGE_SIZE")
    return total


def stored_bytes(folder: Path) -> int:
    """Return the bytes that the files in a folder take of the device."""
    return sum(path.stat().st_blocks * 512 for path in _files(folder))


class PeakMemory:
    """The most memory that this process and its descendants took beyond what they had before, sampled in a thread.

    Anonymous memory of all of them, and shared memory once; mapped files are the page cache's, and not counted.

    Attributes:
        nbytes: The peak so far.
    """

    def __init__(self, seconds: float = 0.002) -> None:
        self.nbytes = 0
        self._seconds = seconds
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._base = _memory()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.look()

    def look(self) -> None:
        """Take a sample now."""
        found = _memory() - self._base
        with self._lock:  # else the thread writes back what was the most before another one looked
            self.nbytes = max(self.nbytes, found)

    def _sample(self) -> None:
        while not self._over.wait(self._seconds):
            self.look()


def _memory() -> int:
    anonymous, shared = 0, 0
    for process in _family(os.getpid()):
        with suppress(OSError, KeyError):  # it ended meanwhile
            lines = (line.split() for line in Path(f"/proc/{process}/status").read_text().splitlines())
            fields = {line[0]: int(line[1]) * 1024 for line in lines if line and line[0].startswith("Rss")}
            anonymous += fields["RssAnon:"]
            shared = max(shared, fields["RssShmem:"])
    return anonymous + shared


def _family(process: int) -> Iterator[int]:
    yield process
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in task.read_text().split():
                yield from _family(int(child))


def _files(folder: Path) -> Iterator[Path]:
    """All but what an engine of ours publishes about itself, which is no part of what it saves."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != STATUS_NAME)
