"""The backend in C: its threads never wait for the GIL, and completions reach the loop through one eventfd."""

from __future__ import annotations

import errno
import os

from pccheck_async.transfer.operations.base import Operations

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
    """Operations on threads of the extension: for write, read, flush and chain, and for gather, scatter and checksum.

    Raises RuntimeError where the extension was not built, or the system has no room for that many threads.
    """

    name = "threads"

    def __init__(self, *, io_threads: int, copy_threads: int) -> None:
        if _why_not is not None:
            raise RuntimeError(
                'the extension pccheck_async._ext was not built; install a C compiler and reinstall, or use io="python"'
            ) from _why_not
        super().__init__()
        try:
            self._queue = _ext.Queue(io_threads, copy_threads)
        except BaseException as error:
            self._helpers.close()
            if isinstance(error, BlockingIOError):  # as Python says of its own threads
                raise RuntimeError("can't start new threads: see ulimit -u and the cgroup's pids.max") from error
            raise
        self._submit, self._cancel, self.gather_at_once = self._queue.submit, self._queue.cancel, _ext.gather
        self._fd: int = self._queue.fileno()
        self._loop.add_reader(self._fd, self._reap)

    def _shutdown(self) -> None:
        self._loop.remove_reader(self._fd)
        self._queue.close()

    def _reap(self) -> None:
        for token, result, found in self._queue.reap():
            completion = self._waiting.pop(token)
            if result < 0 and found is None:
                text = "checksum mismatch" if result == -errno.EBADMSG else os.strerror(-result)
                completion.set_exception(OSError(-result, text))
            else:
                completion.set_result(result if found is None else found)
