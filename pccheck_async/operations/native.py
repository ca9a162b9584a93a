"""The engine in C: its threads never wait for the GIL, and finished operations reach the loop through one eventfd."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

from pccheck_async.operations.base import Call, Checksum, Flush, Gather, Operation, Operations, Read, Scatter, Write

_why_not: ImportError | None = None
try:
    from pccheck_async import _ext
except ImportError as error:
    _why_not = error

__all__ = ["NativeOperations", "available"]


def available() -> bool:
    """Return whether the extension was built for this interpreter."""
    return _why_not is None


class NativeOperations(Operations):
    """Operations on threads of the extension, or in the kernel by io_uring.

    Args:
        io_threads: Threads for write, read and flush; on io_uring, writes and reads in the kernel at a time.
        copy_threads: Threads for gather, scatter and checksum.
        engine: "threads" or "io_uring".

    Raises:
        RuntimeError: The extension was not built.
        OSError: The kernel refuses the engine.
    """

    def __init__(self, *, io_threads: int, copy_threads: int, engine: str = "threads") -> None:
        self.name = engine
        if _why_not is not None:
            raise RuntimeError(
                'the extension pccheck_async._ext was not built; install a C compiler and reinstall, or use io="python"'
            ) from _why_not
        super().__init__()
        try:
            self._queue = _ext.Queue(io_threads, copy_threads, engine)
        except BaseException:
            self._helpers.close()
            raise
        self._fd: int = self._queue.fileno()
        self._loop.add_reader(self._fd, self._reap)

    def _submit(self, batch: Sequence[tuple[int, Operation]]) -> None:
        self._queue.submit([_packed(token, operation) for token, operation in batch])

    def _cancel(self, token: int) -> None:
        self._queue.cancel(token)

    def _shutdown(self) -> None:
        self._loop.remove_reader(self._fd)
        self._queue.close()

    def _reap(self) -> None:
        for token, result, checksum in self._queue.reap():
            if result < 0:
                self._complete(token, None, _error(-result))
            else:
                self._complete(token, result if checksum is None else checksum, None)


def _packed(token: int, operation: Operation) -> tuple[Any, ...]:
    match operation:
        case Write(fd, offset, data):
            return token, _ext.WRITE, fd, offset, data
        case Read(fd, offset, into):
            return token, _ext.READ, fd, offset, into
        case Flush(fd):
            return token, _ext.FLUSH, fd
        case Gather(segments, into, keepalive):
            return token, _ext.GATHER, segments, into, keepalive
        case Scatter(source, checksum, segments, keepalive):
            return token, _ext.SCATTER, source, checksum, segments, keepalive
        case Checksum(data):
            return token, _ext.CHECKSUM, data
        case Call():
            raise TypeError("calls run on helper threads, not in the extension")


def _error(number: int) -> OSError:
    return OSError(number, "checksum mismatch" if number == errno.EBADMSG else os.strerror(number))
