# SPDX-License-Identifier: Apache-2.0
"""A folder that is held open, so that its files are found even after the folder was moved."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pccheck_async.errors import CorruptStoreError
from pccheck_async.medium.base import MOST_SMALL_BYTES
from pccheck_async.transfer import ForkLock, map_memory

__all__ = ["Folder", "largest_file", "open_nameless", "open_new", "open_regular", "reserve", "sync"]

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MODE = 0o666  # the user's umask decides
_NO_RESERVATION = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors that mean that the filesystem reserves no space. EINVAL comes from the C library, whose substitute writes
single bytes, which direct I/O refuses."""
_ZEROS_NBYTES = 4 << 20
_KINDS = {"l": "symbolic link", "p": "pipe", "d": "folder", "s": "socket", "c": "device", "b": "device"}
"""Kinds of files by the first letter of :func:`stat.filemode`."""


_opening = ForkLock()


class Folder:
    """Files of a folder, and the descriptors that were opened there. Methods that touch the disk may take long.

    Until :meth:`hold` the folder is found by its path each time. Every descriptor is recorded when it is opened: a
    forked child, which would share its lock, closes all of them by :meth:`abandon`.

    Attributes:
        path: Path of the folder when this object was made.
        zeros: Reason for reserving space by writing zeros; empty as long as the filesystem reserves it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()  # the process may change its own folder
        self.zeros = ""
        self._handle: int | None = None
        self._fds: set[int] = set()

    def create(self) -> None:
        """Make the folder and all missing folders above it, durably."""
        folder, missing = self.path, []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for new in reversed(missing):
            new.mkdir(exist_ok=True)
            sync(new.parent)  # a store whose folder vanishes with the power was never there

    def hold(self) -> None:
        """Hold this folder open: later calls use it even if it is renamed."""
        if self._handle is None:
            self._handle = self._remembered(lambda: os.open(self.path, _FLAGS))

    def names(self) -> list[str]:
        """Return the names of all files, sorted."""
        return sorted(os.listdir(self.path if self._handle is None else self._handle))

    def open(self, name: str, flags: int) -> int:
        """Open an existing file. Raises CorruptStoreError for anything but a regular file."""
        return self._remembered(lambda: self.open_unknown(name, flags))

    def open_unknown(self, name: str, flags: int) -> int:
        """Open a file (or make it, with ``O_CREAT``) without recording the descriptor: the caller soon closes it."""
        return open_regular(self.path / name, flags, _MODE, dir_fd=self._handle)

    def read_small(self, name: str) -> bytes:
        """Return the contents of a small file. Raises CorruptStoreError if it is large."""
        with open(name, "rb", opener=self.open_unknown) as file:
            data = file.read(MOST_SMALL_BYTES + 1)
        if len(data) > MOST_SMALL_BYTES:
            raise CorruptStoreError(f"{self.path / name} is too large for what it is")
        return data

    def replace(self, name: str, data: bytes, keep_as: str) -> None:
        """Replace a file's contents, durably and atomically; the old file gets the name ``keep_as``, unless empty."""
        new = name + ".new"
        # Crash: writes that the killed writer of a left-over had queued land in ours.
        with suppress(FileNotFoundError):
            self.unlink(new)
        with open(new, "xb", opener=self.open_unknown) as file:
            file.write(data)
            file.flush()  # out of Python's buffer first: fsync covers only data that the kernel has
            os.fsync(file.fileno())  # crash: the name of a file without its bytes
        if keep_as:
            self._rename(name, keep_as)
        self._rename(new, name)
        self.sync()  # crash: acknowledged, and the old file back

    def make(self, name: str, flags: int, nbytes: int) -> int:
        """Make a file with space reserved for ``nbytes``, and return its descriptor."""
        flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = self._remembered(lambda: os.open(self._named(name), flags, _MODE, dir_fd=self._handle))
        try:
            if nbytes and (why := reserve(fd, nbytes)):
                self.zeros = why
        except BaseException:
            self.close_file(fd)
            self.unlink(name)
            raise
        return fd

    def close_file(self, fd: int) -> None:
        """Close a descriptor of :meth:`open` or :meth:`make`."""
        self._fds.remove(fd)
        os.close(fd)

    def _rename(self, name: str, to: str) -> None:
        os.replace(self._named(name), self._named(to), src_dir_fd=self._handle, dst_dir_fd=self._handle)

    def unlink(self, name: str) -> None:
        """Remove a file."""
        os.unlink(self._named(name), dir_fd=self._handle)

    def sync(self) -> None:
        """Make the folder's entries durable."""
        if self._handle is None:
            sync(self.path)
        else:
            os.fsync(self._handle)

    def close(self) -> None:
        """Close the folder itself; files stay open."""
        handle, self._handle = self._handle, None
        if handle in self._fds:
            self.close_file(handle)

    def abandon(self) -> None:
        """Close every descriptor, also those in use."""
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


def open_nameless(folder: Path, flags: int = 0) -> int:
    """Open a new file without a name for reading and writing. Raises OSError: the filesystem has no such files."""
    return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC | flags, _MODE)


def open_new(folder: Path, flags: int = 0) -> tuple[int, Path | None]:
    """Open a new file of a folder, and return its descriptor, and its path to be removed; None if it has no name."""
    try:
        return open_nameless(folder, flags), None
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    path = folder / f".new-{secrets.token_hex(8)}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | flags, _MODE), path


def largest_file() -> str:
    """Return the reason and a remedy for EFBIG: a limit of this process, or of the filesystem, on the size of files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        return "File too large for this filesystem: use another one"
    return f"File too large: at most {limit} bytes in this process (RLIMIT_FSIZE); raise `ulimit -f`"


def reserve(fd: int, nbytes: int) -> str:
    """Reserve the space of an open file up to ``nbytes``, which becomes its size.

    Returns the reason why zeros were written; empty if the filesystem reserves space. Raises OSError: no space.
    """
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _NO_RESERVATION:
            raise
        with map_memory(_ZEROS_NBYTES) as memory, memoryview(memory) as zeros:
            done = os.fstat(fd).st_size
            while done < nbytes:
                done += os.pwrite(fd, zeros[: min(len(zeros), nbytes - done)], done)
        return error.strerror or str(error)
    return ""


def sync(path: Path) -> None:
    """Make a file, or the entries of a folder, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_regular(path: str | os.PathLike[str], flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
    """Open a file like :func:`os.open`, but only a regular file.

    Opening a pipe waits for its other end, a symbolic link may lead to another user's file, and opening a device may
    have any effect. This package makes none of these.

    With ``dir_fd``, the descriptor of a folder, the last component of ``path`` is looked up in that folder.

    Raises:
        CorruptStoreError: it is no regular file.
        OSError: it cannot be opened.
    """
    name = path if dir_fd is None else os.path.basename(path)
    try:
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    except OSError as error:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            with suppress(OSError):  # else the error of opening it is the clearer one
                _check(path, os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)
        raise
    try:
        _check(path, os.fstat(fd).st_mode)
        # O_NONBLOCK was for the opening only, which a FIFO in the place of the file would block.
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.filemode(mode)[0], "strange thing")
        raise CorruptStoreError(
            f"{os.fspath(path)} is a {kind}, not a file of this package: see what it is, and give another path or move "
            "it away"
        )
