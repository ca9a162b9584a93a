# SPDX-License-Identifier: Apache-2.0
"""The file of a shelf on a :class:`CrashDisk`: users store into its windows directly, and the power may fail any time.

A user's store into a window is in the caches of the processor, or of the kernel: any subset of its units of 8 bytes may
survive a power failure. :meth:`CrashShelfFile.notice` detects stores by comparing windows with their last contents.
Each method of the file begins with that; a test that needs more boundaries calls it between stores.
"""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path

import numpy as np

from pccheck_async.errors import StoreFullError, StoreLockedError
from pccheck_async.medium.windows import Window
from pccheck_async.testing.crash import CrashDisk, Inode
from pccheck_async.testing.crash_mapped import ATOM, CrashMapping

__all__ = ["CrashShelfFile", "CrashWindow"]


class CrashWindow(Window):
    """A window of private memory that shows a range of the file; the file copies stores in it to that range."""

    def __init__(self, file: CrashShelfFile, offset: int, nbytes: int) -> None:
        self.offset, self.nbytes = offset, nbytes
        self._crash_file = file
        self._array = np.zeros(nbytes, np.uint8)
        self._known = self._array.copy()
        self._show()

    def _show(self) -> None:
        self._array[:] = np.frombuffer(self._crash_file.inode.volatile, np.uint8, self.nbytes, self.offset)
        self._known[:] = self._array

    def memory(self) -> memoryview:
        return self._array.data

    @property
    def held(self) -> bool:
        return True

    def move(self, offset: int) -> None:
        self._crash_file.notice()
        self.offset = offset
        self._show()

    def detach(self) -> None:
        self._crash_file.notice()
        self._crash_file.windows.discard(self)

    def notice(self) -> None:
        """Write the stores since the last call to the file, one write per run of changed words."""
        words = np.flatnonzero(self._array.view(np.uint64) != self._known.view(np.uint64))
        for run in np.split(words, np.flatnonzero(np.diff(words) != 1) + 1) if len(words) else ():
            low, high = int(run[0]) * ATOM, (int(run[-1]) + 1) * ATOM
            self._known[low:high] = self._array[low:high]
            self._crash_file.mapping._copy(self.offset + low, self._array[low:high].data)


class CrashShelfFile:
    """One process's view of the file of a shelf (see :class:`~pccheck_async.medium.windows.WindowedFile`).

    Tests plant a mistake by overriding methods of this class or of its ``mapping``.

    Args:
        disk: The disk that has the file.
        name: Name of the file.
        durable: Whether the file is in persistent memory; else the kernel flushes it.
    """

    mapping_type: type[CrashMapping] = CrashMapping
    writable = True
    kind = "crash"

    def __init__(self, disk: CrashDisk, name: str = "shelf", *, durable: bool = True) -> None:
        self.path = Path(name)
        self.nbytes = 0
        self.disk = disk
        self.inode: Inode = disk.find(name)
        self.windows: weakref.WeakSet[CrashWindow] = weakref.WeakSet()
        self.mapping = self.mapping_type(disk, self.inode)
        self.mapping.durable = durable
        self.closed = False
        if not disk.try_lock(self.inode, self, shared=False):
            raise StoreLockedError(f"{name} is open elsewhere")

    @property
    def size(self) -> int:
        return len(self.inode.volatile)

    def notice(self) -> None:
        """Write the users' stores into windows since the last call to the file."""
        for window in list(self.windows):
            window.notice()

    def read(self, offset: int, nbytes: int) -> bytes:
        self.notice()
        return bytes(self.inode.volatile[offset : offset + nbytes])

    def map(self, nbytes: int) -> None:
        self.settle()
        self.nbytes = nbytes

    def settle(self) -> None:
        """Flush the whole file, as the kernel does."""
        covered = self.disk.submit_flush(self.inode)
        self.disk.boundary("flush submitted")
        self.disk.complete_flush(self.inode, covered)
        self.disk.boundary("flush completed")

    def grow(self, nbytes: int) -> None:
        if self.disk.capacity is not None and nbytes > self.disk.capacity:
            raise StoreFullError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self.mapping._copy(self.size, memoryview(bytes(max(0, nbytes - self.size))))
        self.map(nbytes)

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self.read(offset, nbytes))

    def check_size(self) -> None:
        self.notice()

    def put(self, offset: int, data: memoryview) -> None:
        self.notice()
        self.mapping._copy(offset, data)

    def persist(self, offset: int, nbytes: int) -> None:
        self.notice()
        if self.mapping.durable:
            self.mapping._write_back(offset, nbytes)
            self.mapping._fence()

    def store(self, offset: int, data: memoryview) -> None:
        self.put(offset, data)
        self.persist(offset, len(data))

    def flush(self) -> None:
        self.notice()
        if not self.mapping.durable:
            self.settle()

    def window(self, offset: int, nbytes: int) -> Window:
        self.notice()
        window = CrashWindow(self, offset, nbytes)
        self.windows.add(window)
        return window

    def close(self) -> None:
        self.notice()
        self.closed = True
        self.windows.clear()
        self.disk.unlock(self.inode, self)
