"""Files and folders that appear under their names only when they are whole and flushed."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import aiofiles

from pccheck_async.errors import CheckpointError, write_error

__all__ = ["Sink", "new_file", "new_folder"]


class Sink(Protocol):
    """Where bytes go, in order."""

    async def write(self, data: Any, /) -> Any:
        """Write all of a bytes-like object."""


@asynccontextmanager
async def new_file(path: Path) -> AsyncIterator[Sink]:
    """Give a file to write; at the end of the body it is flushed, and only then gets its name.

    Durability: when the body has ended, the file is there for good, whole.

    Raises:
        FileExistsError: there is something of that name already.
        WriteError: a write or flush failed; nothing is left behind.
    """
    temporary = _temporary(path)
    try:
        async with aiofiles.open(temporary, "xb") as file:
            yield file
            await file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())  # a name must not appear before the bytes it stands for
        await asyncio.to_thread(_publish, temporary, path)
    except BaseException as error:  # noqa: BLE001 - raised again
        with suppress(OSError):
            temporary.unlink()
        raise _mapped(error, path) from error.__cause__


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a new folder; at the end of the body it is flushed, with what lies in it, and only then gets its name.

    Raises:
        FileExistsError: there is something of that name already.
        WriteError: a write or flush failed; nothing is left behind.
    """
    temporary = _temporary(path)
    try:
        temporary.mkdir()
        yield temporary
        for part in (*temporary.rglob("*"), temporary):
            _sync(part)
        _publish(temporary, path)
    except BaseException as error:  # noqa: BLE001 - raised again
        shutil.rmtree(temporary, ignore_errors=True)
        raise _mapped(error, path) from error.__cause__


def _temporary(path: Path) -> Path:
    if os.path.lexists(path):
        raise FileExistsError(f"{path} exists already; give another name, or remove it first")
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # nobody else's, in this process or another


def _publish(temporary: Path, path: Path) -> None:
    if os.path.lexists(path):
        raise FileExistsError(f"{path} was made by somebody else meanwhile; give another name")
    temporary.rename(path)
    _sync(path.parent)  # the name itself


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _mapped(error: BaseException, path: Path) -> BaseException:
    if isinstance(error, OSError) and not isinstance(error, (CheckpointError, FileExistsError)):
        return write_error(error, path)
    return error
