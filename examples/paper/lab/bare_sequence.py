"""The least that a crash-consistent save can do, without an engine: what a small checkpoint is compared with."""

from __future__ import annotations

import os
import time
from pathlib import Path

from pccheck_async.transfer import aligned_buffer

__all__ = ["BareSequence"]

_RECORD = 4096


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
