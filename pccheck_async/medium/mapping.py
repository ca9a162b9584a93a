# SPDX-License-Identifier: Apache-2.0
"""A file mapped into memory, and the instructions or calls that make bytes stored there durable.

There are three kinds, distinguished by a trial:

- ``"persistent"``: the filesystem accepts MAP_SYNC (DAX: persistent memory, CXL memory, battery-backed DRAM). Stored
  bytes are durable once their cache lines were written back and fenced: no system call.
- ``"emulated"``: tmpfs, with the same instructions. Bytes survive the process, but no power loss; also for tests.
- ``"cached"``: pages of the page cache, anywhere else. The kernel flushes them (``msync``).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from typing import Literal

from pccheck_async.transfer import address_of

try:
    from pccheck_async import _ext
except ImportError:  # built without a compiler: the kernel writes lines back, too
    INSTRUCTIONS = ""
else:
    INSTRUCTIONS = _ext.PERSIST_IMPLEMENTATION

__all__ = [
    "INSTRUCTIONS", "READ_WRITE", "Kind", "Mapping", "last_error", "libc", "map_file", "map_for_this_process",
    "map_range", "shared_flags", "unmap",
]  # fmt: skip

Kind = Literal["persistent", "emulated", "cached"]

READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_SYNC = 0x80000
_MAP_SHARED_VALIDATE = 0x03
_MS_SYNC = 4
_MADV_DONTFORK = 10
"""madvise: a forked child does not get the memory. It must not write to a store."""
_MADV_DONTDUMP = 16
_MADV_POPULATE_WRITE = 23
"""madvise, from Linux 5.14 on: map all pages before they are stored to; an error reports pages that are missing."""
_FAILED = ctypes.c_void_p(-1).value

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_range(address: int | None, nbytes: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    """Call ``mmap``, and return the address. Raises OSError."""
    got = libc.mmap(address, nbytes, protection, flags, fd, offset)
    if got == _FAILED:
        raise last_error()
    return int(got)


def map_for_this_process(address: int | None, nbytes: int, flags: int, fd: int, offset: int) -> int:
    """Map a range of a file for reading and writing, and return the address. Raises OSError.

    Forked children and core dumps get none of this memory.
    """
    address = map_range(address, nbytes, READ_WRITE, flags, fd, offset)
    for advice in (_MADV_DONTFORK, _MADV_DONTDUMP):
        libc.madvise(address, nbytes, advice)
    return address


def shared_flags(*, sync: bool) -> int:
    """Return the flags of a shared mapping; with ``sync`` (MAP_SYNC), stored bytes need no flush of metadata."""
    return _MAP_SHARED_VALIDATE | _MAP_SYNC if sync else mmap.MAP_SHARED


def unmap(address: int, nbytes: int, pid: int) -> None:
    """Unmap memory if this is the process ``pid``: a forked child has not this memory there, and maybe other memory."""
    if os.getpid() == pid:
        libc.munmap(address, nbytes)


def last_error() -> OSError:
    """Return the error of the last call that this thread made through ``libc``."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def map_file(fd: int, nbytes: int, *, sync: bool) -> memoryview:
    """Map an open file for writing; it is unmapped with the last view of it.

    Python's own ``mmap`` duplicates the descriptor, and a duplicate in a forked child would keep the file's lock.

    Args:
        fd: The descriptor, open for reading and writing.
        nbytes: The size of the file.
        sync: Whether to map with MAP_SYNC: stored bytes need no flush of the file's metadata.

    Raises:
        OSError: The file cannot be mapped: EOPNOTSUPP if ``sync`` is set and the filesystem has no such memory.
    """
    address = map_for_this_process(None, nbytes, shared_flags(sync=sync), fd, 0)
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(memory, unmap, address, nbytes, os.getpid()).atexit = False
    return memoryview(memory).cast("B")


def view_private(fd: int, nbytes: int) -> memoryview:
    """Map the first ``nbytes`` of an open file privately: stores to the view stay in this process.

    The mapping holds a shared lock of its own on the file, until the last view is gone; a forked child, which has the
    mapping too, holds it until it ends. Raises OSError.
    """
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(own, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # It keeps a duplicate of the descriptor, and with it the lock.
        return memoryview(mmap.mmap(own, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    except ValueError as error:  # the file is shorter
        raise OSError(errno.EBADMSG, str(error)) from error
    finally:
        os.close(own)


class Mapping:
    """A writable mapping of one file. Methods raise OSError, and may be called from any thread.

    Attributes:
        view: All bytes of the file.
        durable: Whether bytes are durable (or treated so, where that is emulated) when :meth:`store` returns.
        settled: Whether the file was flushed since it was opened: its size, and all stores of earlier writers.
    """

    settled = False

    def __init__(self, fd: int, nbytes: int, kind: Kind, *, is_new: bool) -> None:
        self.view = map_file(fd, nbytes, sync=kind == "persistent")
        self.durable = kind != "cached" and bool(INSTRUCTIONS)
        self._address = address_of(self.view)
        # Pages of memory that an earlier process filled are there, and come into this one's view quickly enough.
        populated = kind == "persistent" or (kind == "emulated" and is_new)
        if populated and libc.madvise(self._address, nbytes, _MADV_POPULATE_WRITE) != 0:
            error = last_error()
            if error.errno == errno.EFAULT:  # later it would be SIGBUS
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # EINVAL, of an older kernel: pages come with the first stores.

    def store(self, offset: int, data: memoryview) -> None:
        """Copy bytes to ``offset``, unless ``data`` is that memory itself; if the mapping is ``durable``, durably."""
        self._copy(offset, data)
        if self.durable:
            # Crash: bytes that a record names were in the caches of the processor only.
            self._write_back(offset, len(data))
            # Crash: a record is on its way to the memory sooner than the data that it names.
            self._fence()

    def flush(self) -> None:
        """Make all stored bytes durable, unless the mapping is ``durable``."""
        if not self.durable and libc.msync(self._address, len(self.view), _MS_SYNC) != 0:
            raise last_error()

    def _copy(self, offset: int, data: memoryview) -> None:
        into = self.view[offset : offset + len(data)]
        if len(data) == 0 or address_of(data) == self._address + offset:
            return
        if INSTRUCTIONS:
            _ext.store(into, data)
        else:
            into[:] = data

    def _write_back(self, offset: int, nbytes: int) -> None:
        _ext.write_back(self.view[offset : offset + nbytes])

    def _fence(self) -> None:
        _ext.fence()
