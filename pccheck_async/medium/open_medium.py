# SPDX-License-Identifier: Apache-2.0
"""I/O backend and medium for one folder, by the name of the backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from pccheck_async.errors import machine_error
from pccheck_async.medium import Medium
from pccheck_async.medium.files import Files
from pccheck_async.medium.mapped import MappedFiles, kind_of_folder
from pccheck_async.transfer import uninterrupted
from pccheck_async.transfer.operations import NativeOperations, Operations, PythonOperations

__all__ = ["IO", "MediumName", "OpenMedium", "check_io", "open_medium", "store_path"]

IO = Literal["auto", "threads", "python"] | Medium | Callable[[str, Operations], Medium]
"""Name of an I/O backend; or a medium, or a function that makes one, as the failure doubles in ``testing`` are."""

MediumName = Literal["auto", "files", "mapped"]
"""Name of the medium that a store is written to."""
_NAMES = ("auto", "threads", "python")


@dataclass(frozen=True, slots=True)
class OpenMedium:
    """A medium and the I/O backend under it, for one engine or load.

    Attributes:
        path: Folder of the medium, for messages.
        reason: Reason for the choice of the backend, in one sentence.
    """

    operations: Operations
    medium: Medium
    reason: str
    path: str

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait until every operation ended and stop the threads; only then close the files.

        Cancellation: raised when everything is closed; else the files would stay locked.
        """
        await uninterrupted(self._close())

    async def _close(self) -> None:
        await self.operations.close()
        await self.medium.close()


def check_io(io: IO) -> None:
    """Raise ValueError for an unknown name, or for a backend that does not work here."""
    if io == "io_uring":  # type: ignore[comparison-overlap]
        raise ValueError(
            "io='io_uring' was removed: it was never faster; io='threads' (or 'auto') reads and writes the same stores"
        )
    if not isinstance(io, Medium) and not callable(io) and io not in _NAMES:
        raise ValueError(f"io is one of {', '.join(_NAMES)}, a Medium, or a function that makes one, not {io!r}")
    if io == "threads" and not NativeOperations.available():
        raise ValueError("io='threads' needs the C extension, which was not built here; use io='auto' or 'python'")


async def open_medium(
    path: str | os.PathLike[str], io: IO, *, writers: int, copiers: int, medium: MediumName = "files"
) -> OpenMedium:
    """Start the threads of an I/O backend, and return it with a medium for a folder. Called on the engine's loop.

    Args:
        path: Folder of the store.
        io: I/O backend or medium, as for :class:`pccheck_async.CheckpointEngine`.
        writers: Number of threads for writing and reading.
        copiers: Number of threads for copying.
        medium: Name of the medium, ignored if ``io`` is a medium or makes one.

    Raises:
        ValueError: ``io`` is unknown, or does not work here.
        ReadError: The threads cannot be started.
    """
    check_io(io)
    if isinstance(io, str) and io != "auto":
        name, why = io, "asked for"
    elif NativeOperations.available():
        name, why = "threads", "the C extension was built here"
    else:
        name, why = "python", "the C extension was not built here"
    backend = PythonOperations if name == "python" else NativeOperations
    operations: Operations
    try:
        operations = backend(io_threads=writers, copy_threads=copiers)
    except (OSError, RuntimeError) as error:
        raise machine_error(error, "threads for I/O") from error
    try:
        if not isinstance(io, str):
            given = io if isinstance(io, Medium) else io(os.fspath(path), operations)
            return OpenMedium(operations, given, f"files by {type(given).__name__}", os.fspath(path))
        reason = f"{name}: {why}"
        if medium == "auto" and await operations.call(kind_of_folder, Path(path)) == "persistent":
            medium = "mapped"
        kind = MappedFiles if medium == "mapped" else Files
        return OpenMedium(operations, kind(path, operations, reason), reason, os.fspath(path))
    except BaseException:
        await uninterrupted(operations.close())
        raise


def store_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a store.

    Raises ValueError for "", "~..." and URLs, which are no paths of a folder, TypeError for other types.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"the path of the store is a folder (str or Path), not {path!r}")
    text = str(os.fspath(path))
    if not text:
        raise ValueError("the path of the store is empty; the current folder is '.'")
    if text.startswith("~"):
        raise ValueError(f"{text!r} begins with '~', which only shells replace; use os.path.expanduser({text!r})")
    if "://" in text:
        raise ValueError(
            f"{text!r} is a URL; a store is a folder on a disk, or on a network filesystem mounted here, from which "
            "drain=Drain(url) copies checkpoints to a bucket"
        )
    return os.fspath(Path(path).absolute())
