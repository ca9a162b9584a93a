# SPDX-License-Identifier: Apache-2.0
"""The backend in pure Python: ``os.pwrite`` and the like on threads, for systems without a C compiler."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from pccheck_async.format import crc32, piece_sums
from pccheck_async.transfer.memory import address_of
from pccheck_async.transfer.operations.base import ChainStep, Kind, Operations, Step
from pccheck_async.transfer.operations.worker_threads import WorkerThreads

__all__ = ["OperationsAtOnce", "PythonOperations"]

T = TypeVar("T")
_IO_KINDS = frozenset((Kind.WRITE, Kind.READ, Kind.FLUSH, Kind.CHAIN))
_CHAINABLE = frozenset((Kind.WRITE, Kind.FLUSH, Kind.UNLOCK, Kind.LINKED))
_SEGMENT = struct.Struct("=QQQ")
_LAST_ADDRESS = ctypes.c_size_t(-1).value
_LAST_OFFSET = 2**63 - 1
_SMALLEST_SECTOR = 512
"""Smallest alignment of direct I/O, in bytes."""
_MOST_PER_CALL = 1 << 30
"""Most bytes per system call: Linux moves at most 2 GiB - 4 KiB; a power of two keeps direct I/O aligned."""
_MOST_RETRIES = 1000
"""Most retries in a row, a millisecond apart, after EAGAIN; then the error is raised."""


class PythonOperations(Operations):
    """Operations on Python threads (see :class:`NativeOperations`).

    System calls, ``memmove`` and ``zlib.crc32`` all release the GIL.
    """

    name = "python"

    def __init__(self, *, io_threads: int, copy_threads: int) -> None:
        super().__init__()
        self.gather_at_once = gather
        with ExitStack() as started:  # to be ended where no more can be
            started.callback(self._helpers.close)
            self._io = WorkerThreads(self._loop, self._complete, count=io_threads, name="pccheck-io")
            started.callback(self._io.close)
            self._copy = WorkerThreads(self._loop, self._complete, count=copy_threads, name="pccheck-copy")
            started.pop_all()

    def _submit(self, batch: list[tuple[Any, ...]]) -> None:
        # The arguments hold the buffers and the keepalive until the operation has ended.
        for threads, is_io in ((self._io, True), (self._copy, False)):
            of_kinds = (each for each in batch if (each[1] in _IO_KINDS) == is_io)
            if jobs := [(token, _FUNCTIONS[kind], tuple(arguments)) for token, kind, *arguments in of_kinds]:
                threads.submit(jobs)

    def _cancel(self, token: int) -> None:
        if not self._io.cancel(token):
            self._copy.cancel(token)

    def _shutdown(self) -> None:
        self._io.close()
        self._copy.close()


class OperationsAtOnce(PythonOperations):
    """Reads and calls on the calling thread: no other thread, no loop, and awaiting one never suspends.

    Used for a few small reads, which take less time than starting threads.
    """

    def __init__(self) -> None: ...

    async def read(self, fd: int, offset: int, into: memoryview) -> int:
        """Fill ``into`` from ``offset`` on the calling thread; return the bytes read."""
        return read_all(fd, offset, into)

    async def obtain(self, undo: Callable[[T], object], function: Callable[..., T], *arguments: Any) -> T:
        """Call ``function`` on the calling thread and return its result; nothing can be cancelled and undone."""
        return function(*arguments)

    async def close(self) -> None:
        """Do nothing: no operation can be running."""


def chain(steps: Sequence[ChainStep]) -> list[Step]:
    """Perform ``steps`` until one fails; return how they ended. Raises ValueError, before any, if one is impossible."""
    if not steps:
        raise ValueError("a chain has at least one step")
    for kind, *arguments in steps:
        if kind not in _CHAINABLE:
            raise ValueError(f"a chain has no steps of kind {kind}")
        if kind == Kind.WRITE:
            _, offset, data = arguments
            _check_offset(offset, data.nbytes)
    ended: list[Step] = []
    for kind, *arguments in steps:
        result = 0
        try:
            _FUNCTIONS[kind](*arguments)
        except OSError as error:
            result = -(error.errno or errno.EIO)
        ended.append((result, time.perf_counter()))
        if result:
            break
    return ended


def _check_linked(fd: int) -> None:
    """Raise FileNotFoundError if the open file has no name any more; ignore other errors, which the next step meets."""
    try:
        links = os.fstat(fd).st_nlink
    except OSError:
        return
    if not links:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def write_all(fd: int, offset: int, data: memoryview) -> None:
    """Write all of ``data`` at ``offset``, however many system calls that takes."""
    _check_offset(offset, data.nbytes)
    done = 0
    with data.cast("B") as octets:
        while done < len(octets):
            with octets[done : done + _MOST_PER_CALL] as part:
                written = _patiently(os.pwrite, fd, part, offset + done)
            if written == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            done += written


def read_all(fd: int, offset: int, into: memoryview) -> int:
    """Fill ``into`` from ``offset``; return the bytes read, short only at the end of the file."""
    _check_offset(offset, into.nbytes)
    done = 0
    with into.cast("B") as octets:
        while done < len(octets):
            with octets[done : done + _MOST_PER_CALL] as part:
                try:
                    got = _patiently(os.preadv, fd, [part], offset + done)
                except OSError as error:
                    # A direct read ended inside a sector: at the file's end. Some filesystems refuse to go on there.
                    if error.errno == errno.EINVAL and done % _SMALLEST_SECTOR:
                        break
                    raise
            if got == 0:
                break
            done += got
    return done


def _patiently(move: Callable[..., int], *arguments: Any) -> int:
    """Call ``move``, and retry after EAGAIN, where a filesystem or driver is out of requests for a moment.

    Polling does not help: files always poll as ready.
    """
    for _ in range(_MOST_RETRIES):
        try:
            return move(*arguments)
        except BlockingIOError:
            time.sleep(1e-3)
    return move(*arguments)


def gather(segments: bytes, into: memoryview, keepalive: object = None) -> bytes:
    """Copy ``segments`` into ``into``, zero the gaps, and return the CRC-32 of each MiB of ``into``."""
    checked = _checked(segments, into.nbytes, ordered=True)
    if into.readonly:
        raise BufferError("the buffer is read-only")
    base = address_of(into) if into.nbytes else 0
    filled = 0
    for address, offset, length in checked:
        ctypes.memset(base + filled, 0, offset - filled)
        ctypes.memmove(base + offset, address, length)
        filled = offset + length
    ctypes.memset(base + filled, 0, into.nbytes - filled)
    return piece_sums(into)


def scatter(source: memoryview, checksum: int, segments: bytes, keepalive: object = None) -> None:
    """Verify ``checksum`` over ``source``, then copy ``segments`` of it to memory. Raises OSError (EBADMSG)."""
    checked = _checked(segments, source.nbytes, ordered=False)
    if crc32(source) != checksum:
        raise OSError(errno.EBADMSG, "checksum mismatch")
    base = address_of(source) if source.nbytes else 0
    for address, offset, length in checked:
        ctypes.memmove(address, base + offset, length)


def _check_offset(offset: int, nbytes: int) -> None:
    if offset < 0:
        raise ValueError(f"offset {offset} is negative")
    if offset > _LAST_OFFSET - nbytes:
        raise ValueError(f"no file reaches to offset {offset}")


def _checked(segments: bytes, size: int, *, ordered: bool) -> list[tuple[int, int, int]]:
    if len(segments) % _SEGMENT.size:
        raise ValueError(f"a table of segments has {len(segments)} bytes, no multiple of {_SEGMENT.size}")
    checked = list(_SEGMENT.iter_unpack(segments))
    filled = 0
    for address, offset, length in checked:
        if offset + length > size or (length and not 0 < address <= _LAST_ADDRESS - (length - 1)):
            raise ValueError(f"segment [{offset}, {offset + length}) lies outside its buffer of {size} bytes")
        if ordered and offset < filled:
            raise ValueError(f"segment [{offset}, {offset + length}) is not behind the one before it")
        filled = offset + length
    return checked


_FUNCTIONS: dict[int, Callable[..., Any]] = {
    Kind.WRITE: write_all,
    Kind.READ: read_all,
    Kind.FLUSH: os.fdatasync,
    Kind.GATHER: gather,
    Kind.SCATTER: scatter,
    Kind.CHECKSUM: piece_sums,
    Kind.CHAIN: chain,
    Kind.UNLOCK: lambda fd: fcntl.flock(fd, fcntl.LOCK_UN),
    Kind.LINKED: _check_linked,
}
