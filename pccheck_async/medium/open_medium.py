"""Operations engine and writer for one folder, by the name of the I/O engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pccheck_async.medium import Writer
from pccheck_async.medium.files import PosixWriter
from pccheck_async.transfer.operations import native
from pccheck_async.transfer.operations.base import Operations
from pccheck_async.transfer.operations.native import NativeOperations
from pccheck_async.transfer.operations.python import PythonOperations
from pccheck_async.transfer.uninterrupted import uninterrupted

__all__ = ["IO", "Session", "check_io", "open_session"]

IO = Literal["auto", "io_uring", "threads", "python"] | Writer | Callable[[str, Operations], Writer]
"""Name of an I/O engine; or a writer, or a function that makes one, as the failure doubles in ``testing`` are."""

_NATIVE: dict[str, native.Engine] = {"io_uring": "io_uring", "threads": "threads"}
_NAMES = ("auto", *_NATIVE, "python")


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
        """Wait until every operation ended and stop the threads; only then close the files.

        Cancellation: raised when all of it is closed; else the files would stay locked.
        """
        await uninterrupted(self._close())

    async def _close(self) -> None:
        await self.operations.close()
        await self.writer.close()


def check_io(io: IO) -> None:
    """Refuse an unknown name, and an engine that does not work here. Raises ValueError."""
    if not isinstance(io, Writer) and not callable(io) and io not in _NAMES:
        raise ValueError(f"io is one of {', '.join(_NAMES)}, a Writer, or a function that makes one, not {io!r}")
    if io in _NATIVE and not native.available():
        raise ValueError(f"io={io!r} needs the C extension, which was not built here; use io='auto' or 'python'")
    if io == "io_uring" and (refusal := native.why_no_io_uring()):
        raise ValueError(f"io='io_uring' does not work here: {refusal}; use io='auto' or 'threads', or lift that")


async def open_session(path: str | os.PathLike[str], io: IO, *, writers: int, copiers: int) -> Session:
    """Start the threads. Called on the engine's loop."""
    check_io(io)
    name, why = (io, "asked for") if isinstance(io, str) and io != "auto" else _pick()
    operations: Operations
    if name == "python":
        operations = PythonOperations(io_threads=writers, copy_threads=copiers)
    else:
        operations = NativeOperations(io_threads=writers, copy_threads=copiers, engine=_NATIVE[name])
    if not isinstance(io, str):
        try:
            writer = io if isinstance(io, Writer) else io(os.fspath(path), operations)
        except BaseException:
            await operations.close()
            raise
        return Session(operations, writer, f"files by {type(writer).__name__}")
    reason = f"{name}: {why}"
    return Session(operations, PosixWriter(path, operations, reason), reason)


def _pick() -> tuple[str, str]:
    """Pick an engine, and say why.

    io_uring was measured beside threads with as many requests at a time: no difference in the time to durable or in the
    processor's, so it is left to those who ask for it.
    """
    if not native.available():
        return "python", "the C extension was not built here"
    refusal = native.why_no_io_uring()
    return "threads", refusal or "as fast as io_uring where that was measured, which works here too"
