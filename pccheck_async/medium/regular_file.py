"""Opening files in folders that others may write to: only regular ones, and without ever waiting for anybody."""

from __future__ import annotations

import fcntl
import os
import stat

from pccheck_async.errors import CorruptStoreError

__all__ = ["open_regular"]

_KINDS = (
    (stat.S_ISLNK, "symbolic link"),
    (stat.S_ISFIFO, "pipe"),
    (stat.S_ISDIR, "folder"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)


def open_regular(path: str | os.PathLike[str], flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
    """Open a file as :func:`os.open` does, unless the name is that of something else.

    Opening a pipe waits for whoever opens its other end, a symbolic link leads into somebody else's file, and a device
    may do anything. None of these is made by this package.

    Args:
        path: Of the file.
        flags: As for :func:`os.open`.
        mode: As for :func:`os.open`.
        dir_fd: A folder that is open: only the last part of ``path`` is looked up, there.

    Raises:
        CorruptStoreError: it is no regular file.
        OSError: it cannot be opened.
    """
    name = path if dir_fd is None else os.path.basename(path)
    try:
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    except OSError as error:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            _check(path, _mode(name, dir_fd))
        raise
    try:
        _check(path, os.fstat(fd).st_mode)
        # It was for the opening only: io_uring gives up on requests to such a file instead of waiting for the device.
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _mode(path: str | os.PathLike[str], dir_fd: int | None) -> int:
    try:
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode
    except OSError:
        return stat.S_IFREG  # nobody can tell: the error of opening it says more


def _check(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for test, name in _KINDS if test(mode)), "strange thing")
        raise CorruptStoreError(f"{os.fspath(path)} is a {kind}, not a file of this package: remove it")
