"""The protocol between the store and its folder of files."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pccheck_async.errors import ReadError, is_exhausted
from pccheck_async.telemetry.stages import Stage
from pccheck_async.transfer.memory import PAGE_BYTES
from pccheck_async.transfer.uninterrupted import to_its_end, uninterrupted

__all__ = ["File", "FileSystemFacts", "Part", "Piece", "Writer", "WriterStatistics"]

_NONE = Stage()

Piece: TypeAlias = tuple[int, memoryview]
"""Bytes, and where in a file they go."""


@dataclass(slots=True, eq=False)
class File:
    """An open file of the store's folder. Only its writer looks at ``fd``.

    Attributes:
        name: File name inside the folder.
        nbytes: Size in bytes when it was opened or created.
        fd: The descriptor, -1 for doubles that have none.
        direct: Whether transfers bypass the page cache.
    """

    name: str
    nbytes: int
    fd: int = field(default=-1, repr=False)
    direct: bool = False


Part: TypeAlias = tuple[File, Sequence[Piece]]
"""A file, and what of it is to become durable."""


@dataclass(frozen=True, slots=True)
class FileSystemFacts:
    """What the filesystem under the folder asks for.

    Attributes:
        block_bytes: Alignment of offsets and lengths of every transfer.
        memory_alignment: Alignment of buffers in memory.
        direct: Whether direct I/O works here.
        why: One sentence for the log and the statistics.
    """

    block_bytes: int
    memory_alignment: int
    direct: bool
    why: str


@dataclass(frozen=True, slots=True)
class WriterStatistics:
    """Transfers since the writer was made; seconds are summed over concurrent operations.

    Attributes:
        engine: Name of the operations engine.
        direct: Whether transfers bypass the page cache.
        why: Why direct I/O is (not) used, and why by that engine.
        write: Writes and their bytes.
        read: Reads and their bytes.
        flush: Flushes of files and of the folder.
    """

    engine: str
    direct: bool
    why: str
    write: Stage = _NONE
    read: Stage = _NONE
    flush: Stage = _NONE


class Writer(abc.ABC):
    """A folder of files. Every method that fails raises WriteError or ReadError (``StoreFullError`` for no space).

    What is no regular file (a pipe, a device, a folder, a symbolic link) is none of the store's: a writer on a real
    filesystem opens nothing of the kind, waits for nobody there, and raises CorruptStoreError.

    Nothing here flushes on its own: durability is decided by the store, and only there. A file created, renamed or
    unlinked is durable under its name after :meth:`sync_folder`; bytes written and the size of a file after
    :meth:`flush`.

    Cancellation: every method waits until its operation ended, cancelled or not.

    Attributes:
        persists_at_once: Whether :meth:`persist` of small pieces of several files takes about as long as that of one,
            so that a commit may be given to it with what it commits. Doubles that hold single operations up say no: a
            commit would be held up by a write of another checkpoint.
    """

    persists_at_once = False

    @abc.abstractmethod
    async def prepare(self, *, create: bool) -> FileSystemFacts:
        """Find out what the filesystem asks for; with ``create`` make the folder, every new folder's parent synced."""

    @abc.abstractmethod
    async def names(self) -> list[str]:
        """Names of the files in the folder, sorted."""

    @abc.abstractmethod
    async def read_small(self, name: str) -> bytes | None:
        """All of a small metadata file, None where it does not exist. Raises CorruptStoreError where it is large."""

    @abc.abstractmethod
    async def write_small(self, name: str, data: bytes) -> None:
        """Create or overwrite a small metadata file and flush it (its name is not yet durable)."""

    @abc.abstractmethod
    async def rename(self, name: str, to: str) -> None:
        """Rename a file, replacing ``to``."""

    @abc.abstractmethod
    async def unlink(self, name: str) -> None:
        """Remove a file's name."""

    @abc.abstractmethod
    async def sync_folder(self) -> None:
        """Make creations, renames and removals in the folder durable."""

    @abc.abstractmethod
    async def create(self, name: str, nbytes: int) -> File:
        """Create a file of ``nbytes`` zeros, space reserved. Raises StoreFullError and leaves nothing behind."""

    @abc.abstractmethod
    async def open(self, name: str, *, writable: bool) -> File:
        """Open an existing file. Raises FileNotFoundError (unwrapped) where there is none."""

    @abc.abstractmethod
    async def close_file(self, file: File) -> None:
        """Close a file; its lock goes with it."""

    async def in_place(self, file: File) -> bool:
        """Whether the name of an open file still leads to it: another process may have put a new one there."""
        return True

    @abc.abstractmethod
    async def try_lock(self, file: File, *, shared: bool = False) -> bool:
        """``flock`` without waiting; False where somebody else holds it."""

    @abc.abstractmethod
    async def unlock(self, file: File) -> None:
        """Give the lock of ``file`` back."""

    @abc.abstractmethod
    async def write(self, file: File, offset: int, data: memoryview) -> None:
        """Write all of ``data``; offset, length and address are aligned as :class:`FileSystemFacts` says."""

    @abc.abstractmethod
    async def read(self, file: File, offset: int, into: memoryview) -> int:
        """Fill ``into``; return the bytes read, short only at the end of the file."""

    async def read_around(self, file: File, offset: int, into: memoryview) -> tuple[int, dict[int, ReadError]]:
        """Do what :meth:`read` does, and where the device fails, block by block: a bad sector costs one block.

        Returns:
            The bytes read, and by their offsets in ``into`` the blocks that cannot be read, and why. Those hold ones
            (0xff): neither a record, nor a manifest, nor what was never written looks like that.
        """
        try:
            return await self.read(file, offset, into), {}
        except ReadError as error:
            if is_exhausted(error):
                raise  # it says nothing of the device
            nbytes = max(0, min(len(into), file.nbytes - offset))
        lost = {}
        for start in range(0, nbytes, PAGE_BYTES):
            block = into[start : start + PAGE_BYTES]
            try:
                await self.read(file, offset + start, block)
            except ReadError as error:
                if is_exhausted(error):
                    raise
                lost[start] = error
                block[:] = b"\xff" * len(block)
        return nbytes, lost

    @abc.abstractmethod
    async def flush(self, file: File) -> None:
        """Make everything written to ``file``, and its size, durable."""

    async def persist(self, parts: Sequence[Part], unsure: Callable[[OSError], None], *, final: bool = False) -> None:
        """Write the pieces of a file and then flush it, and only then those of the next: all in one go.

        :meth:`write` and :meth:`flush`; every file but the last is let go of (:meth:`unlock`) before the next is
        written. A writer may do that in less time than one by one; those that count, delay or fail single operations
        need not.

        Args:
            parts: Pieces are aligned as for :meth:`write`; none: the file is only flushed.
            unsure: Called before an error is raised after which nobody knows what is durable: of a flush, and of
                whatever comes after the first one. After a failed write to the first file nothing else happened.
            final: What came of it is what the caller has to know, cancelled or not.

        Cancellation: all of it happens, and ``unsure`` is called where something fails, before that is raised; where it
            is ``final``, cancellation comes too late, and is forgotten.
        """
        await (to_its_end if final else uninterrupted)(self._persist(parts, unsure))

    async def _persist(self, parts: Sequence[Part], unsure: Callable[[OSError], None]) -> None:
        flushing = False
        try:
            for number, (file, pieces) in enumerate(parts, 1):
                for offset, data in pieces:
                    await self.write(file, offset, data)
                flushing = True
                await self.flush(file)
                if number < len(parts):
                    await self.unlock(file)
        except OSError as error:
            if flushing:
                unsure(error)
            raise

    @abc.abstractmethod
    async def close(self) -> None:
        """Close all files. Idempotent."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """Close all descriptors at once, in a forked child: no waiting, no unlocking, no flushing."""

    @abc.abstractmethod
    def statistics(self) -> WriterStatistics:
        """Return the transfers so far."""
