"""A folder that is held open: what is done there is done there, wherever it is moved to."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pccheck_async.errors import CorruptStoreError
from pccheck_async.medium.regular_file import open_regular
from pccheck_async.transfer.fork_lock import ForkLock
from pccheck_async.transfer.memory import map_memory

__all__ = ["Folder"]

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MODE = 0o666  # the user's umask decides
_MOST_SMALL_BYTES = 1 << 20
"""Of a file that is read as a whole; a store's have some hundreds."""
_NO_RESERVATION = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""The first is the C library's: it writes single bytes instead, which direct I/O refuses."""
_ZEROS_NBYTES = 4 << 20
_opening = ForkLock()


class Folder:
    """Files of a folder, and the descriptors that were opened there. Methods that touch the disk may take long.

    Until :meth:`hold` it is found by its path each time. Every descriptor is known from the moment it is opened: a
    forked child, which would share their locks, lets :meth:`abandon` close all of them.

    Args:
        path: Absolute from here on: the process may change its own folder.

    Attributes:
        path: Where it was.
        zeros: Why space is reserved by writing zeros; empty as long as the filesystem reserves it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.zeros = ""
        self._handle: int | None = None
        self._fds: set[int] = set()

    def create(self) -> None:
        """Make it durably, and all folders above it, where they do not exist."""
        folder, missing = self.path, []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for new in reversed(missing):
            new.mkdir(exist_ok=True)
            _sync(new.parent)  # a store whose folder vanishes with the power was never there

    def hold(self) -> None:
        """Stay with this folder from now on, however it may be called."""
        if self._handle is None:
            self._handle = self._remembered(lambda: os.open(self.path, _FLAGS))

    def names(self) -> list[str]:
        """Return the names of all files, sorted."""
        return sorted(os.listdir(self.path if self._handle is None else self._handle))

    def open(self, name: str, flags: int) -> int:
        """Open a file that is there. Raises CorruptStoreError for anything but a regular one."""
        return self._remembered(lambda: self.open_unknown(name, flags))

    def open_unknown(self, name: str, flags: int) -> int:
        """Open a file, making it with ``O_CREAT``, for a moment: whoever asked closes it."""
        return open_regular(self.path / name, flags, _MODE, dir_fd=self._handle)

    def read_small(self, name: str) -> bytes:
        """Return all of a file."""
        with open(name, "rb", opener=self.open_unknown) as file:
            data = file.read(_MOST_SMALL_BYTES + 1)
        if len(data) > _MOST_SMALL_BYTES:
            raise CorruptStoreError(f"{self.path / name} is too large for what it is")
        return data

    def write_small(self, name: str, data: bytes) -> None:
        """Replace all of a file, durably."""
        with open(name, "wb", opener=self.open_unknown) as file:
            file.write(data)
            file.flush()  # out of Python's buffer first: fsync sees only what the kernel has
            os.fsync(file.fileno())

    def make(self, name: str, flags: int, nbytes: int) -> int:
        """Make a file with space reserved for ``nbytes``."""
        flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = self._remembered(lambda: os.open(self._named(name), flags, _MODE, dir_fd=self._handle))
        try:
            if nbytes:
                self._reserve(fd, nbytes)
        except BaseException:
            self.close_file(fd)
            self.unlink(name)
            raise
        return fd

    def _reserve(self, fd: int, nbytes: int) -> None:
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in _NO_RESERVATION:
                raise
            self.zeros = error.strerror or str(error)
            with map_memory(_ZEROS_NBYTES) as memory, memoryview(memory) as zeros:
                done = 0
                while done < nbytes:
                    done += os.pwrite(fd, zeros[: min(len(zeros), nbytes - done)], done)

    def leads_to(self, name: str, fd: int) -> bool:
        """Whether a name is that of the file which is open as ``fd``."""
        try:
            found = os.stat(self._named(name), dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(fd))

    def close_file(self, fd: int) -> None:
        """Close a descriptor of :meth:`open` or :meth:`make`."""
        self._fds.remove(fd)
        os.close(fd)

    def replace(self, name: str, to: str) -> None:
        """Rename a file over another one."""
        os.replace(self._named(name), self._named(to), src_dir_fd=self._handle, dst_dir_fd=self._handle)

    def unlink(self, name: str) -> None:
        """Remove a file."""
        os.unlink(self._named(name), dir_fd=self._handle)

    def sync(self) -> None:
        """Make its entries durable."""
        if self._handle is None:
            _sync(self.path)
        else:
            os.fsync(self._handle)

    def close(self) -> None:
        """Let go of it; files stay open."""
        handle, self._handle = self._handle, None
        if handle in self._fds:
            self.close_file(handle)

    def abandon(self) -> None:
        """Close every descriptor, whatever is done with it."""
        for fd in self._fds:
            with suppress(OSError):
                os.close(fd)
        self._fds.clear()

    def _named(self, name: str) -> str:
        return name if self._handle is not None else os.fspath(self.path / name)

    def _remembered(self, opening: Callable[[], int]) -> int:
        with _opening:
            fd = opening()
            self._fds.add(fd)
        return fd


def _sync(folder: Path) -> None:
    fd = os.open(folder, _FLAGS)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
