"""Operations engine and writer for one folder, by the name of the I/O engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pccheck_async.operations import native
from pccheck_async.operations.base import Operations
from pccheck_async.operations.native import NativeOperations
from pccheck_async.operations.python import PythonOperations
from pccheck_async.writer import Writer
from pccheck_async.writer.posix import PosixWriter

__all__ = ["IO", "Session", "check_io", "open_session"]

IO = Literal["auto", "threads", "python"] | Writer | Callable[[str, Operations], Writer]
"""Name of an I/O engine; or a writer, or a function that makes one, as the failure doubles in ``testing`` are."""

_NAMES = ("auto", "threads", "python")


@dataclass(frozen=True, slots=True)
class Session:
    """What moves bytes for one engine or one load.

    Attributes:
        operations: Performs reads, writes, flushes and copies.
        writer: The folder's files.
        reason: Why this I/O engine, in one sentence.
    """

    operations: Operations
    writer: Writer
    reason: str

    async def close(self) -> None:
        """Wait until every operation ended and stop the threads; only then close the files."""
        await self.operations.close()
        await self.writer.close()


def check_io(io: IO) -> None:
    """Refuse an unknown name, or the extension where it was not built. Raises ValueError."""
    if not isinstance(io, Writer) and not callable(io) and io not in _NAMES:
        raise ValueError(f"io is one of {', '.join(_NAMES)}, a Writer, or a function that makes one, not {io!r}")
    if io == "threads" and not native.available():
        raise ValueError("io='threads' needs the C extension, which was not built here; use io='auto' or 'python'")


async def open_session(path: str | os.PathLike[str], io: IO, *, writers: int, copiers: int) -> Session:
    """Start the threads. Called on the engine's loop."""
    check_io(io)
    operations: Operations
    if io == "python" or not native.available():
        operations = PythonOperations(io_threads=writers, copy_threads=copiers)
        reason = "asked for" if io == "python" else "the C extension was not built here"
    else:
        operations = NativeOperations(io_threads=writers, copy_threads=copiers)
        reason = "asked for" if io == "threads" else "the C extension is there"
    if not isinstance(io, str):
        try:
            writer = io if isinstance(io, Writer) else io(os.fspath(path), operations)
        except BaseException:
            await operations.close()
            raise
        return Session(operations, writer, f"files by {type(writer).__name__}")
    return Session(operations, PosixWriter(path, operations), f"{operations.name}: {reason}")
