# SPDX-License-Identifier: Apache-2.0
"""Writes files and folders that appear under their names only when they are complete and flushed."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import aiofiles

from pccheck_async.errors import CheckpointError, first_few, write_error
from pccheck_async.medium.folder import sync
from pccheck_async.medium.renaming import exchange, rename_new
from pccheck_async.transfer import uninterrupted

__all__ = ["Sink", "new_file", "new_folder", "publish", "replacing"]


class Sink:
    """A new file. A write ends before its caller continues, even if that is cancelled: it may reuse the buffer then."""

    def __init__(self, file: Any) -> None:
        self._file = file

    async def write(self, data: Any, /) -> None:
        """Append all of a bytes-like object."""
        await uninterrupted(self._file.write(data))


@asynccontextmanager
async def new_file(path: Path) -> AsyncIterator[Sink]:
    """Yield a new file to write; at the end of the body it is flushed, and only then renamed to ``path``.

    Durability: when the context has been left, the file survives power loss.

    Raises:
        FileExistsError: there is something at ``path`` already.
        WriteError: a write or flush failed; nothing is left.
    """
    with _unnamed(path) as temporary:
        opening = asyncio.ensure_future(aiofiles.open(temporary, "xb"))
        try:
            file = await uninterrupted(opening)
            yield Sink(file)
            await uninterrupted(file.flush())
            # crash: a name that appears before the bytes it stands for
            await uninterrupted(asyncio.to_thread(os.fsync, file.fileno()))
        finally:
            if opening.exception() is None:
                await uninterrupted(opening.result().close())


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder; at the end of the body it is flushed, with its contents, and only then renamed to ``path``.

    Raises the errors of :func:`new_file`.
    """
    with _unnamed(path) as temporary:
        temporary.mkdir()
        yield temporary
        for part in (*temporary.rglob("*"), temporary):
            sync(part)  # crash: a name that appears before the contents


@contextmanager
def replacing(path: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yield a temporary path in the same folder; at the end of the body, what was made there replaces ``path``.

    At every moment ``path`` is either the old or the new one, also after a crash, which may leave the other one beside
    it as ``.NAME.*.tmp``. If the kernel or the filesystem cannot exchange two names (NFS), a folder's name is missing
    for a moment: a crash then may leave both under such names.

    Args:
        path: The file or folder to replace; it need not exist.
        parts: Patterns of the names in a folder that may be replaced; none for a file.

    Raises:
        FileExistsError: ``path`` is a folder and no file or the reverse, or a folder with other names in it.
    """
    _check_replaceable(path, parts)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        _replace(temporary, path)
        sync(path.parent)
    finally:
        _remove(temporary)


def _check_replaceable(path: Path, parts: Sequence[str]) -> None:
    if not os.path.lexists(path):
        return
    is_folder = path.is_dir() and not path.is_symlink()
    if is_folder != bool(parts):
        raise FileExistsError(f"{path} is {'a' if is_folder else 'no'} folder; give another name, or remove it first")
    if is_folder and (others := [one for one in sorted(os.listdir(path)) if not any(fnmatch(one, p) for p in parts)]):
        few = first_few(others, 5)
        raise FileExistsError(f"{path} holds what is no such export, and would be lost: {few}; remove it first")


def _replace(temporary: Path, path: Path) -> None:
    try:
        if path.is_dir():
            exchange(temporary, path)
        else:
            temporary.replace(path)
    except OSError as error:
        raise write_error(error, path) from None


def _remove(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    with suppress(OSError):
        temporary.unlink()


@contextmanager
def _unnamed(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; what the body makes there is renamed to ``path``, or removed."""
    if os.path.lexists(path):
        raise FileExistsError(f"{path} exists already; give another name, or replace it (--overwrite, overwrite=True)")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # nobody else's, in this process or another
    try:
        yield temporary
        publish(temporary, path)
    except BaseException as error:
        _remove(temporary)
        if isinstance(error, OSError) and not isinstance(error, (CheckpointError, FileExistsError)):
            raise write_error(error, path) from error.__cause__
        raise


def publish(temporary: Path, path: Path) -> None:
    """Rename to a name that nothing has, atomically; raise FileExistsError if something has it."""
    failure = rename_new(temporary, path)
    if failure in (errno.EINVAL, errno.ENOSYS):  # NFS, some of FUSE
        failure = _claim_and_rename(temporary, path)
    if failure == errno.EEXIST:
        raise FileExistsError(f"{path} was made by somebody else meanwhile; give another name")
    if failure:
        raise OSError(failure, os.strerror(failure), os.fspath(path))
    sync(path.parent)  # the name itself


def _claim_and_rename(temporary: Path, path: Path) -> int:
    """Rename after creating an empty file or folder of that name, as only one process can; return an errno, or 0."""
    try:
        if temporary.is_dir():
            path.mkdir()
        else:
            path.touch(exist_ok=False)
        temporary.rename(path)
    except OSError as error:
        return errno.EEXIST if error.errno == errno.ENOTEMPTY else error.errno or errno.EIO
    return 0
