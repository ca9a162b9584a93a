# SPDX-License-Identifier: Apache-2.0
"""One file whose ranges are seen through windows: memory at a fixed address that shows a changeable range of the file.

A user holds arrays in a window. :meth:`Window.move` puts another range of the file there, in one step and without
copying: by then that range holds a copy, so the arrays show the same contents as before, and later stores into them
go to the copy. Each window that was moved keeps a twin, in which its last range is mapped: moving there and
back exchanges page tables (20 us for 24 MiB), where mapping anew would fault on every page (8 ms).

A window does not outlive its range by accident: :meth:`Window.detach` gives arrays that are still held private memory
with the same contents. In a forked child windows show the file, and stores to them stay in the child.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from pccheck_async.errors import CorruptStoreError, StoreFullError, StoreLockedError, write_error
from pccheck_async.medium.base import LOCK_POLL_SECONDS
from pccheck_async.medium.folder import largest_file, open_new, open_regular, reserve
from pccheck_async.medium.mapped import kind_of_folder
from pccheck_async.medium.mapping import (
    READ_WRITE,
    Kind,
    Mapping,
    last_error,
    libc,
    map_for_this_process,
    map_range,
    shared_flags,
    unmap,
)
from pccheck_async.transfer import PAGE_BYTES, ForkLock, abandoned_in_child

__all__ = ["Window", "WindowedFile"]

_PROT_NONE = 0
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAP_FIXED = 0x10
_MOVE = 1 | 2
"""Flags of mremap: MAYMOVE and FIXED."""
_MOVE_AND_KEEP = _MOVE | 4
"""Flags with DONTUNMAP, too (Linux 5.13 for files): the old range stays mapped, so that there is never a hole which
another thread's malloc could fill."""
_HUGE_BYTES = 2 << 20
"""Windows of at least this size begin at multiples of it, so that whole page tables are moved, not their entries."""
_opening = ForkLock()
_DYING_SECONDS = 1.0


class Window:
    """Memory that shows a range of a file. :meth:`WindowedFile.window` makes it.

    Attributes:
        offset: Offset in bytes, in the file, of the range that the window shows now.
        nbytes: Length of the range, whole pages.
    """

    def __init__(self, file: WindowedFile, offset: int, nbytes: int) -> None:
        self.offset, self.nbytes = offset, nbytes
        self._file = file
        # Three places with a page between them, so that the kernel never makes one mapping of two.
        align = _HUGE_BYTES if nbytes >= _HUGE_BYTES else PAGE_BYTES
        step = -(-(nbytes + PAGE_BYTES) // align) * align
        reserved = align + 3 * step
        start = map_range(None, reserved, _PROT_NONE, _ANONYMOUS)
        self._address, self._twin, self._spare = (-(-start // align) * align + place * step for place in range(3))
        self._twin_offset = -1
        try:
            file.map_at(self._address, offset, nbytes)
        except BaseException:
            libc.munmap(start, reserved)
            raise
        memory = (ctypes.c_ubyte * nbytes).from_address(self._address)
        memory.window = self  # type: ignore[attr-defined]  # arrays keep it, and the file open and locked
        weakref.finalize(memory, unmap, start, reserved, os.getpid()).atexit = False
        self._memory: weakref.ref[Any] | None = weakref.ref(memory)
        self._handed: Any = memory

    def memory(self) -> memoryview:
        """Return the window's bytes. Called once; the window lives as long as anything that refers to them."""
        memory, self._handed = self._handed, None
        return memoryview(memory).cast("B")

    @property
    def held(self) -> bool:
        """Whether anything still refers to the window's memory."""
        return self._memory is not None and self._memory() is not None

    def move(self, offset: int) -> None:
        """Show another range of the same length from now on. Raises OSError, and then still shows the old range."""
        if offset == self.offset:
            return
        if offset != self._twin_offset or not self._exchange():
            self._file.map_at(self._address, offset, self.nbytes)
            with suppress(OSError):  # the next move maps anew
                self._file.map_at(self._twin, self.offset, self.nbytes)
                self._twin_offset = self.offset
        else:
            self._twin_offset = self.offset
        self.offset = offset

    def _exchange(self) -> bool:
        """Exchange the window's page tables with its twin's. False: the kernel cannot, and nothing has changed."""
        here, twin, spare, nbytes = self._address, self._twin, self._spare, self.nbytes
        if not _remap(here, spare, nbytes):
            return False
        if not _remap(twin, here, nbytes):
            return False  # the range moved to the spare place is still mapped here, too
        self._twin_offset = self.offset
        if not _remap(spare, twin, nbytes):
            self._file.map_at(twin, self.offset, nbytes)
        return True

    def detach(self) -> None:
        """Detach the memory from the file: its holders keep it as private memory with the same contents."""
        if self.held:
            private = map_range(None, self.nbytes, READ_WRITE, _ANONYMOUS)
            ctypes.memmove(private, self._address, self.nbytes)
            if not _remap(private, self._address, self.nbytes, _MOVE):
                raise last_error()
            for place in (self._twin, self._spare):
                map_range(place, self.nbytes, _PROT_NONE, _ANONYMOUS | _MAP_FIXED)
        self._memory = None
        self._file.windows.discard(self)

    def keep_in_child(self, fd: int) -> None:
        """Show the same range in a forked child, which has no such memory yet; stores stay in the child."""
        if self.held:
            map_range(self._address, self.nbytes, READ_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED, fd, self.offset)


class WindowedFile:
    """One locked file: a mapping of all of it, through which bytes are made durable, and windows for users.

    Methods raise WriteError and StoreFullError. They are called on one thread at a time.

    Args:
        path: The file.
        writable: Whether the lock is exclusive and stores go to the file; else the lock is shared, stores are private.

    Raises:
        StoreLockedError: The file is open elsewhere, and one of both writes.
        FileNotFoundError: There is no such file.
        CorruptStoreError: The path is no regular file.

    Attributes:
        fd: The descriptor; -1 after :meth:`close`, and in a forked child.
        kind: The kind of its memory (see :mod:`pccheck_async.medium.mapping`).
        nbytes: Bytes that are mapped (:meth:`map`).
    """

    fd = -1
    nbytes = 0

    def __init__(self, path: Path, *, writable: bool) -> None:
        self.path, self.writable = path, writable
        self.windows: weakref.WeakSet[Window] = weakref.WeakSet()
        self._pid = os.getpid()
        self._mapping: Mapping | None = None
        with _opening:
            self._keep(open_regular(path, os.O_RDWR if writable else os.O_RDONLY))
        self._lock()
        self.kind: Kind = kind_of_folder(path.parent) if writable else "cached"

    def _keep(self, fd: int) -> None:
        self.fd, self._status = fd, os.fstat(fd)
        abandoned_in_child.add(self)
        self._finalizer = weakref.finalize(self, _close, fd, self._pid)

    def _lock(self) -> None:
        """Lock the file; wait a moment for a writer that was killed.

        A mapping keeps the lock, and a killed process loses its mappings late if another one was reading its memory
        map (``ps``, monitoring): after the process was waited for.
        """
        how = (fcntl.LOCK_EX if self.writable else fcntl.LOCK_SH) | fcntl.LOCK_NB
        deadline = time.monotonic() + (0 if self._is_open_here() else _DYING_SECONDS)
        while True:
            try:
                return fcntl.flock(self.fd, how)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    self.close()
                    text = f"{self.path} is open elsewhere; one process writes to it at a time"
                    raise StoreLockedError(text) from None
            time.sleep(LOCK_POLL_SECONDS)

    def _is_open_here(self) -> bool:
        """Whether this process has the file open: waiting cannot help."""
        others = [each for each in list(abandoned_in_child) if isinstance(each, WindowedFile) and each is not self]
        return any(os.path.samestat(self._status, each._status) and not each.closed for each in others)

    @staticmethod
    def create(path: Path, nbytes: int, head: bytes) -> None:
        """Make a file of ``nbytes`` that begins with ``head``, its space reserved: all of that durably, or nothing.

        Raises:
            FileExistsError: There is something of that name.
            StoreFullError: There is not enough space.
        """
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd, temporary = open_new(path.parent)
            try:
                _reserve(fd, nbytes, path)
                os.pwrite(fd, head, 0)
                os.fsync(fd)  # crash: a name, and no header or no space behind it
                # With a folder, Python follows the link that the kernel shows for the descriptor.
                os.link(temporary or f"/proc/self/fd/{fd}", path.name, dst_dir_fd=folder, follow_symlinks=True)
                os.fsync(folder)  # crash: acknowledged, and no such file
            finally:
                os.close(fd)
                if temporary:
                    temporary.unlink()
        finally:
            os.close(folder)

    @property
    def size(self) -> int:
        """The size of the file now."""
        return os.fstat(self.fd).st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return bytes, fewer at the end of the file. The kernel reads them, so that missing pages cause no fault."""
        return os.pread(self.fd, nbytes, offset)

    def map(self, nbytes: int) -> None:
        """Map the first ``nbytes`` of the file, after a flush of earlier writers' stores."""
        try:
            # Crash: a dead predecessor's stores were in caches only, and data that builds on them becomes durable.
            os.fsync(self.fd)
            self._mapping = Mapping(self.fd, nbytes, self.kind, is_new=True)
        except OSError as error:
            raise write_error(error, self.path) from error
        self.nbytes = nbytes

    def grow(self, nbytes: int) -> None:
        """Reserve the file up to ``nbytes``, durably, and map it. Raises StoreFullError; then nothing has changed."""
        before = self.size
        try:
            _reserve(self.fd, nbytes, self.path)
        except BaseException:
            with suppress(OSError):
                os.ftruncate(self.fd, before)
            raise
        self.map(nbytes)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a view of bytes of the file in its mapping."""
        assert self._mapping is not None
        return self._mapping.view[offset : offset + nbytes]

    def check_size(self) -> None:
        """Raise CorruptStoreError if the file was truncated: touching the missing pages would end the process."""
        if self.size < self.nbytes:
            raise CorruptStoreError(
                f"{self.path} was truncated to {self.size} bytes of {self.nbytes} while it was open"
            )

    def put(self, offset: int, data: memoryview) -> None:
        """Store bytes; volatile until :meth:`persist`."""
        self.view(offset, len(data))[:] = data

    def persist(self, offset: int, nbytes: int) -> None:
        """Write back all stores to a range, by any code: they are durable at once, or with the next :meth:`flush`."""
        self.store(offset, self.view(offset, nbytes))

    def store(self, offset: int, data: memoryview) -> None:
        """Store bytes: they are durable at once, or with the next :meth:`flush`."""
        assert self._mapping is not None
        try:
            self._mapping.store(offset, data)
        except OSError as error:
            raise write_error(error, self.path) from error

    def flush(self) -> None:
        """Make all that was stored durable."""
        assert self._mapping is not None
        try:
            self._mapping.flush()
        except OSError as error:
            raise write_error(error, self.path) from error

    def window(self, offset: int, nbytes: int) -> Window:
        """Return a window that shows a range of whole pages."""
        try:
            window = Window(self, offset, nbytes)
        except OSError as error:
            raise write_error(error, self.path) from error
        self.windows.add(window)
        return window

    def map_at(self, address: int, offset: int, nbytes: int) -> None:
        """Map a range of the file at an address, over any mapping there."""
        flags = shared_flags(sync=self.kind == "persistent") if self.writable else mmap.MAP_PRIVATE
        map_for_this_process(address, nbytes, flags | _MAP_FIXED, self.fd, offset)

    @property
    def closed(self) -> bool:
        """Whether the file is closed, or belongs to the process that this one was forked from."""
        return self.fd < 0

    def close(self) -> None:
        """Detach all windows, and close the file. Idempotent."""
        for window in list(self.windows):
            window.detach()
        self._mapping = None
        if self.fd >= 0:
            fcntl.flock(self.fd, fcntl.LOCK_UN)  # even if the file is still mapped somewhere
        self.fd = -1
        self._finalizer()

    def abandon(self) -> None:
        """Close the file in a forked child; windows keep their contents, as private memory."""
        if self.closed:
            return
        with suppress(OSError):
            # Opened anew: the inherited mappings keep the parent's open file, and its lock, after the parent's death.
            fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
            for window in list(self.windows):
                window.keep_in_child(fd)
            os.close(fd)
        with suppress(OSError):
            os.close(self.fd)  # closing leaves the lock to the parent's descriptor
        self.fd = -1


def _reserve(fd: int, nbytes: int, path: Path) -> None:
    """Reserve space, so that no store to the mapping faults for want of it. Raises StoreFullError, WriteError."""
    try:
        reserve(fd, nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            why = f": {largest_file()}" if error.errno == errno.EFBIG else ""
            raise StoreFullError(error.errno, f"there is no space for {nbytes} bytes{why}", os.fspath(path)) from error
        raise write_error(error, path) from error


def _remap(source: int, target: int, nbytes: int, flags: int = _MOVE_AND_KEEP) -> bool:
    return bool(libc.mremap(source, nbytes, nbytes, flags, target) == target)


def _close(fd: int, pid: int) -> None:
    if os.getpid() == pid:
        os.close(fd)
