# SPDX-License-Identifier: Apache-2.0
"""The protocol of a medium: the operations that a store needs on its files."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pccheck_async.errors import DurabilityUnknownError, ReadError, is_exhausted
from pccheck_async.medium.mapping import Mapping
from pccheck_async.telemetry import Stage
from pccheck_async.transfer import PAGE_BYTES, uninterrupted

__all__ = [
    "LOCK_POLL_SECONDS", "MOST_SMALL_BYTES", "File", "Medium", "MediumFacts", "MediumStatistics", "Part", "Piece",
    "StepwiseMedium", "read_around",
]  # fmt: skip

_NONE = Stage()

LOCK_POLL_SECONDS = 0.01
"""Seconds between attempts to get a lock: it can only be polled, as ``flock`` does not report when it becomes free."""
MOST_SMALL_BYTES = 1 << 20
"""Most bytes of a file that is read as a whole; those of a store have some hundreds."""
Piece: TypeAlias = tuple[int, memoryview]
"""An offset in a file, and the bytes to write there."""


@dataclass(slots=True, eq=False)
class File:
    """An open file of a store. Only its medium looks at ``fd`` and ``mapping``.

    Attributes:
        nbytes: Size when it was opened or reserved.
        fd: The descriptor, -1 for a medium that has none.
        direct: Whether transfers bypass the page cache.
        mapping: Mapping of the whole file into memory, for a medium that writes through one.
        identity: A value that is equal for two open files if both are the same file, under any name.
    """

    name: str
    nbytes: int
    fd: int = field(default=-1, repr=False)
    direct: bool = False
    identity: object = field(default=None, repr=False)
    mapping: Mapping | None = field(default=None, repr=False)


Part: TypeAlias = tuple[File, Sequence[Piece]]
"""A file, and the pieces of it that are to become durable."""


@dataclass(frozen=True, slots=True)
class MediumFacts:
    """The alignment that a medium needs, and whether direct I/O works there.

    Attributes:
        block_bytes: Alignment of offsets and lengths of every transfer.
        memory_alignment: Alignment of buffers in memory.
        direct: Whether direct I/O works here.
        why: The reason for ``direct``, one sentence for the log and the statistics.
    """

    block_bytes: int
    memory_alignment: int
    direct: bool
    why: str


@dataclass(frozen=True, slots=True)
class MediumStatistics:
    """Transfers since the medium was made; seconds are summed over concurrent operations.

    ``backend`` is the name of the I/O backend; ``direct``: whether transfers bypass the page cache; ``why``: the
    reasons for both. ``flush`` counts flushes of files and of names.
    """

    backend: str
    direct: bool
    why: str
    write: Stage = _NONE
    read: Stage = _NONE
    flush: Stage = _NONE


class Medium(abc.ABC):
    """The files of one store. Methods fail with WriteError, ReadError or StoreFullError.

    The operations are :meth:`names` (list), :meth:`reserve`, :meth:`read`, :meth:`write`, :meth:`make_durable`,
    :meth:`replace` (a small file, as a whole), :meth:`lock` and :meth:`close`; :meth:`open` and :meth:`remove` are for
    files made by :meth:`reserve`. Staging memory comes from the engine's pool. The store decides when bytes become
    durable: only :meth:`prepare`, :meth:`make_durable`, :meth:`sync_names` and :meth:`replace` make anything durable.
    ``StoreFullError`` means that there is no space. Anything but a regular file (a pipe, a device, a folder, a symbolic
    link) is never opened: CorruptStoreError.

    :mod:`pccheck_async.testing.medium_conformance` checks any medium against this contract.

    Cancellation: every method waits until its operation ended, cancelled or not.

    Attributes:
        chains: Whether :meth:`make_durable` takes about as long for small pieces of several files as for one, so that
            a commit record may be passed together with its data. False in test doubles that delay single operations:
            a write of another checkpoint would delay a commit.
        stages: Whether :meth:`stage` may return memory.
    """

    chains = False
    stages = False

    @abc.abstractmethod
    async def prepare(self, *, create: bool) -> MediumFacts:
        """Determine alignment and direct I/O; with ``create`` make the folder, durably, if it does not exist."""

    @abc.abstractmethod
    async def names(self) -> list[str]:
        """Return the names of the files, sorted; an empty list if the folder does not exist."""

    @abc.abstractmethod
    async def reserve(self, name: str, nbytes: int) -> File:
        """Make a file of ``nbytes`` zeros, its space reserved, and open it; :meth:`sync_names` makes its name durable.

        Raises:
            StoreFullError: there is no space; nothing is left behind.
            WriteError: there is such a file (EEXIST), or the device failed.
        """

    @abc.abstractmethod
    async def open(self, name: str, *, writable: bool) -> File:
        """Open an existing file. Raises FileNotFoundError (unwrapped) where there is none."""

    @abc.abstractmethod
    async def remove(self, name: str) -> None:
        """Remove a file's name; a crash may bring it back until :meth:`sync_names`."""

    @abc.abstractmethod
    async def read(self, file: File, offset: int, into: memoryview) -> int:
        """Fill ``into``; return the bytes read, short only at the end of the file."""

    def stage(self, file: File, offset: int, nbytes: int) -> memoryview | None:
        """Return memory for these bytes of ``file``, to be filled and then passed to :meth:`write`; None for none."""
        return None

    async def view(self, file: File, offset: int, nbytes: int) -> memoryview | None:
        """Return these bytes of ``file`` in memory of the medium's own, to be read there; None: use :meth:`read`.

        Another process may truncate the file: only operations that survive missing pages may access the view. Raises
        the errors of :meth:`read`.
        """
        return None

    def stamp(self, file: File) -> object:
        """Return a value that changes when the file is changed, as far as its timestamps show; None: unavailable."""
        return None

    @abc.abstractmethod
    async def write(self, file: File, offset: int, data: memoryview) -> None:
        """Write ``data``, with the alignment that :class:`MediumFacts` gives; volatile until :meth:`make_durable`."""

    @abc.abstractmethod
    async def make_durable(self, parts: Sequence[Part], *, ignore_cancellation: bool = False) -> None:
        """Write and flush several files, one after the other: all pieces of a file, its flush, then the next file.

        A flush makes everything written to the file durable, its size too. Every file but the last is unlocked
        before the next is written.

        Args:
            parts: Files and their pieces, aligned as for :meth:`write`; a file without pieces is only flushed.
            ignore_cancellation: The caller needs the outcome.

        Cancellation: raised once everything is done or a step failed, unless that leaves durability unknown.

        Raises:
            DurabilityUnknownError: a flush failed, or any step after the first flush.
            WriteError, StoreFullError: a write to the first file failed, and nothing else happened.
        """

    @abc.abstractmethod
    async def sync_names(self) -> None:
        """Make the set of names durable: all names that were reserved or removed so far."""

    @abc.abstractmethod
    async def read_small(self, name: str) -> bytes | None:
        """Return all of a small file, None if it does not exist. Raises CorruptStoreError if it is large."""

    @abc.abstractmethod
    async def replace(self, name: str, data: bytes, *, keep_as: str = "") -> None:
        """Make ``data`` all of a small file, durably, in one step: a crash leaves the old file or the new one.

        If ``keep_as`` is given, the old file gets that name; then a crash may leave no file called ``name``.
        """

    @abc.abstractmethod
    async def lock(self, file: File, *, shared: bool = False) -> bool:
        """Lock a file against other openings of it, without waiting; False if another one has it locked.

        The lock ends with :meth:`unlock`, with :meth:`close`, or with the process and its last request.
        """

    @abc.abstractmethod
    async def unlock(self, file: File) -> None:
        """Undo :meth:`lock`."""

    @abc.abstractmethod
    async def close(self, file: File | None = None) -> None:
        """Close a file, and its lock with it; by default all files, and the medium. Idempotent."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """Close all descriptors at once, in a forked child: no waiting, no unlocking, no flushing."""

    @abc.abstractmethod
    def statistics(self) -> MediumStatistics:
        """Return the transfers so far."""


class StepwiseMedium(Medium):
    """A medium whose :meth:`make_durable` performs each write, flush and unlocking as an operation of its own."""

    @abc.abstractmethod
    async def flush(self, file: File) -> None:
        """Make everything written to ``file``, and its size, durable."""

    async def make_durable(self, parts: Sequence[Part], *, ignore_cancellation: bool = False) -> None:
        """Write and flush step by step (:meth:`Medium.make_durable`)."""
        steps = asyncio.ensure_future(self._make_durable(parts))
        try:
            await uninterrupted(steps)
        except asyncio.CancelledError:
            unknown = not steps.cancelled() and isinstance(steps.exception(), DurabilityUnknownError)
            if not (ignore_cancellation or unknown):
                raise
            steps.result()

    async def _make_durable(self, parts: Sequence[Part]) -> None:
        flushing = False
        try:
            for number, (file, pieces) in enumerate(parts, 1):
                for offset, data in pieces:
                    await self.write(file, offset, data)
                flushing = True
                await self.flush(file)
                if number < len(parts):
                    await self.unlock(file)
        except DurabilityUnknownError:  # of a medium behind this one
            raise
        except OSError as error:
            if flushing:
                raise DurabilityUnknownError.of(error) from error
            raise


async def read_around(
    medium: Medium, file: File, offset: int, into: memoryview, block_bytes: int = PAGE_BYTES
) -> tuple[int, dict[int, ReadError]]:
    """Read like :meth:`Medium.read`; on a device error retry block by block: a bad sector costs one block.

    Blocks have ``block_bytes``, or a page where that is larger.

    Returns:
        The bytes read, and the error of each unreadable block by its offset in ``into``. Such a block is filled
        with 0xff: no record, manifest or unwritten space looks like that.
    """
    try:
        return await medium.read(file, offset, into), {}
    except ReadError as error:
        if is_exhausted(error):
            raise  # no error of the device
        nbytes = max(0, min(len(into), file.nbytes - offset))
    lost = {}
    size = max(PAGE_BYTES, block_bytes)
    for start in range(0, nbytes, size):
        block = into[start : start + size]
        try:
            await medium.read(file, offset + start, block)
        except ReadError as error:
            if is_exhausted(error):
                raise
            lost[start] = error
            block[:] = b"\xff" * len(block)
    return nbytes, lost
