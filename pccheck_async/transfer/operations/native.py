"""The engines in C: they never wait for the GIL, and finished operations reach the loop through one eventfd."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Sequence
from typing import Any, Literal

from pccheck_async.transfer.fork_lock import ForkLock
from pccheck_async.transfer.operations.base import (
    Chain,
    Checksum,
    Flush,
    Gather,
    Kind,
    Operation,
    Operations,
    Read,
    Scatter,
    Write,
)

_why_not: ImportError | None = None
try:
    from pccheck_async import _ext
except ImportError as error:
    _why_not = error

__all__ = ["Engine", "NativeOperations", "available", "why_no_io_uring"]

Engine = Literal["threads", "io_uring"]

_REFUSALS = {
    errno.EPERM: "by a seccomp filter, as containers have, or by the sysctl kernel.io_uring_disabled",
    errno.EACCES: "by a security module or a seccomp filter",
    errno.ENOSYS: "it is older than Linux 5.6, was built without, or a seccomp filter hides it",
    errno.ENOMEM: "before Linux 5.12 the limit on locked memory (ulimit -l) may be too low for its rings",
}
_KINDS = {
    Write: Kind.WRITE,
    Read: Kind.READ,
    Flush: Kind.FLUSH,
    Gather: Kind.GATHER,
    Scatter: Kind.SCATTER,
    Checksum: Kind.CHECKSUM,
}
_open: weakref.WeakSet[NativeOperations] = weakref.WeakSet()
_making = ForkLock()


def available() -> bool:
    """Return whether the extension was built for this interpreter."""
    return _why_not is None


def why_no_io_uring() -> str | None:
    """Try io_uring out; return why it does not work here, or None where it does."""
    if _why_not is not None:
        return "the C extension was not built here"
    try:
        _ext.Queue(1, 1, "io_uring").close()
    except OSError as error:
        cause = _REFUSALS.get(error.errno or 0)
        return f"the kernel refuses io_uring ({error.strerror}{f': {cause}' if cause else ''})"
    return None


class NativeOperations(Operations):
    """Operations on threads of the extension, or (what goes to storage) in the kernel by io_uring.

    Args:
        io_threads: Threads for write, read, flush and chain; on io_uring, writes and reads in the kernel at a time, and
            threads for chains.
        copy_threads: Threads for gather, scatter and checksum.
        engine: What performs them; copies and checksums are done by threads in either case.

    Raises:
        RuntimeError: The extension was not built, or the system has no room for as many threads.
        OSError: The kernel refuses the engine.
    """

    def __init__(self, *, io_threads: int, copy_threads: int, engine: Engine = "threads") -> None:
        self.name = engine
        if _why_not is not None:
            raise RuntimeError(
                'the extension pccheck_async._ext was not built; install a C compiler and reinstall, or use io="python"'
            ) from _why_not
        super().__init__()
        try:
            with _making:
                self._queue = _ext.Queue(io_threads, copy_threads, engine)
                _open.add(self)
        except BaseException as error:
            self._helpers.close()
            if isinstance(error, BlockingIOError):  # as Python says of its own threads
                raise RuntimeError("can't start new threads: see ulimit -u and the cgroup's pids.max") from error
            raise
        self._fd: int = self._queue.fileno()
        self._loop.add_reader(self._fd, self._reap)

    def gather_at_once(self, segments: bytes, into: memoryview) -> int:
        """Gather on this thread (see :class:`Operations`)."""
        return _ext.gather(segments, into)

    def _submit(self, batch: Sequence[tuple[int, Operation]]) -> None:
        self._queue.submit([_packed(token, operation) for token, operation in batch])

    def _cancel(self, token: int) -> None:
        self._queue.cancel(token)

    def _shutdown(self) -> None:
        self._loop.remove_reader(self._fd)
        self._queue.close()

    def disown(self) -> None:
        """In a forked child: close its copies of the engine's descriptors. Nothing else works there any more."""
        self._queue.close()

    def _reap(self) -> None:
        for token, result, found in self._queue.reap():
            if result < 0 and found is None:
                self._complete(token, None, _error(-result))
            else:
                self._complete(token, result if found is None else found, None)


def _packed(token: int, operation: Operation) -> tuple[Any, ...]:
    """Return an operation as the extension takes it: what it is made of, in that order."""
    if isinstance(operation, Chain):
        return token, Kind.CHAIN, tuple(operation.steps)
    return token, _KINDS[type(operation)], *operation


def _error(number: int) -> OSError:
    return OSError(number, "checksum mismatch" if number == errno.EBADMSG else os.strerror(number))


def _disown_in_child() -> None:
    # A ring that a child inherited would outlive the parent, and with it what is in flight there, files and locks.
    for operations in list(_open):
        operations.disown()


os.register_at_fork(after_in_child=_disown_in_child)
