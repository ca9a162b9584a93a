# SPDX-License-Identifier: Apache-2.0
"""Renames that fail if the new name exists, and exchanges of two names."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

__all__ = ["exchange", "rename_new"]

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_libc = ctypes.CDLL(None, use_errno=True)


def rename_new(temporary: Path, path: Path) -> int:
    """Rename unless ``path`` exists; return 0 or an errno: EEXIST if it does, EINVAL if the check is not supported."""
    return _rename(temporary, path, _RENAME_NOREPLACE)


def exchange(temporary: Path, path: Path) -> None:
    """Exchange two names, of files or folders, which both exist.

    Where the kernel or the filesystem cannot (NFS), ``path`` is gone for a moment: then, after a crash, both may be
    there under names that end with ``.tmp``. Raises OSError.
    """
    failure = _rename(temporary, path, _RENAME_EXCHANGE)
    if failure in (errno.EINVAL, errno.ENOSYS):
        old = temporary.with_suffix(".old.tmp")
        path.rename(old)
        temporary.rename(path)
        old.rename(temporary)
    elif failure:
        raise OSError(failure, os.strerror(failure), os.fspath(path))


def _rename(one: Path, other: Path, flags: int) -> int:
    rename = getattr(_libc, "renameat2", None)
    if rename is None:
        return errno.ENOSYS
    names = (os.fsencode(one), os.fsencode(other))
    return ctypes.get_errno() if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], flags) else 0
