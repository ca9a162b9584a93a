"""A store opened for reading, also beside a running writer of another process. Nothing here writes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from pccheck_async.errors import (
    CheckpointError,
    CorruptStoreError,
    DamagedError,
    NoCheckpointError,
    ReadError,
    is_exhausted,
)
from pccheck_async.format import Entry, Identity, Record, Which, describe_which
from pccheck_async.format.record import COMMIT_NAME, IDENTITY_NAME, slot_name, slot_number
from pccheck_async.medium import File
from pccheck_async.medium.files import Files
from pccheck_async.medium.open_medium import OpenMedium
from pccheck_async.store.checkpoint_reader import CheckpointReader
from pccheck_async.store.commit_file import read_identity, read_record
from pccheck_async.store.fallback import Fallback, UnreadableError, choose, only_rejected, unreadable_errors
from pccheck_async.store.part_reader import OpenSlot, PartReader, Staging
from pccheck_async.transfer.copying import CopyBackend
from pccheck_async.transfer.operations.python import OperationsAtOnce

__all__ = ["LOCK_SECONDS", "StoreReader", "no_store", "no_store_in", "read_at_once"]

T = TypeVar("T")
_POLL_SECONDS = 0.001
LOCK_SECONDS = 30.0
"""For which a reader tries to lock a checkpoint while newer ones replace it."""


def no_store(opened: OpenMedium, path: str | os.PathLike[str], what: str = "no store") -> CheckpointError:
    """Return the error for a path without a store."""
    if isinstance(opened.medium, Files):  # other media need not be folders
        return no_store_in(path, what)
    return NoCheckpointError(f"{os.fspath(path)} holds {what}")


def no_store_in(path: str | os.PathLike[str], what: str = "no store") -> CheckpointError:
    """Return the error for a folder without a store.

    NoCheckpointError if the path is wrong or nothing was saved there, CorruptStoreError if a store lost its identity.
    """
    if not os.path.lexists(path):
        return NoCheckpointError(f"{os.fspath(path)} does not exist, so it holds {what}; check the path")
    if not os.path.isdir(path):
        return NoCheckpointError(
            f"{os.fspath(path)} is no folder, so it holds {what}; give the folder that the engine saved into"
        )
    text, found = f"{os.fspath(path)} holds {what}", []
    with suppress(OSError), os.scandir(path) as entries:
        found = list(islice(entries, 1000))
    names = {each.name for each in found}
    slots = any(slot_number(name) is not None for name in names)
    if slots or COMMIT_NAME in names:
        text += f", but parts of one without {IDENTITY_NAME}: `pccheck recover {os.fspath(path)}` says what is left"
        # Without slots it may be a store that is being made, or a crash ended that: slots come last.
        return CorruptStoreError(text) if slots and IDENTITY_NAME not in names else NoCheckpointError(text)
    stores = sorted(each.name for each in found if os.path.exists(os.path.join(each.path, IDENTITY_NAME)))
    few = ", ".join(stores[:5]) + (", ..." if len(stores) > 5 else "")
    return NoCheckpointError(f"{text}; there are stores in it: {few}" if stores else text)


@dataclass(slots=True)
class StoreReader:
    """An open store, read-only."""

    opened: OpenMedium
    identity: Identity
    commit: File
    """The file of the records."""
    folder: str = ""
    """The prefix of the names of its files: "rank-00003/" on the medium of a group's folder."""

    @classmethod
    async def open(cls, opened: OpenMedium, folder: str = "") -> StoreReader | None:
        """Open the store of ``opened``; None if there is no (complete) one. Raises CorruptStoreError.

        A medium that has a ``folder`` for each of several stores is prepared by the code that opens it.
        """
        identity = await read_identity(opened.medium, folder)
        if identity is None:
            return None
        if not folder:
            await opened.medium.prepare(create=False)
        try:
            commit = await opened.medium.open(folder + COMMIT_NAME, writable=False)
        except FileNotFoundError:
            text = f"the store has no {COMMIT_NAME!r} file: see what is left with `pccheck recover`"
            raise CorruptStoreError(text) from None
        return cls(opened, identity, commit, folder)

    async def record(self) -> Record:
        """Return the newest record as it is now. Raises CorruptStoreError if there is none."""
        return await read_record(self.opened.medium, self.commit, self.identity)

    async def lock(
        self, pick: Callable[[Record], Entry | None]
    ) -> tuple[Entry, File | DamagedError | ReadError] | None:
        """Lock the picked checkpoint's slot against reuse, and return its file, or why there is none to be read.

        None if nothing is picked. One that was superseded (:attr:`Record.superseded`) may be written over by then.

        A slot that is locked shared, and that a record read *after* locking still names, keeps its bytes: writers take
        only free slots, and pass over locked ones. Otherwise the record has moved on: start over.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + LOCK_SECONDS
        medium = self.opened.medium
        while True:
            record = await self.record()
            entry = pick(record)
            if entry is None:
                return None
            superseded = entry in record.superseded
            try:
                file = await medium.open(self.folder + slot_name(entry.slot), writable=False)
            except (FileNotFoundError, CorruptStoreError, ReadError) as error:
                if is_exhausted(error):
                    raise
                if _names(await self.record(), entry, superseded):
                    missing = f"{self.folder}{slot_name(entry.slot)}, which the newest record names, is missing"
                    why = missing if isinstance(error, FileNotFoundError) else str(error)
                    return entry, error if isinstance(error, ReadError) else DamagedError(why)
            else:
                is_held = False
                try:
                    locked = await medium.lock(file, shared=True)
                    is_held = locked and _names(await self.record(), entry, superseded)
                finally:
                    if not is_held:
                        await medium.close(file)
                if is_held:
                    return entry, file
                if superseded and not locked:
                    return entry, DamagedError(f"{file.name} is being written over")
            if clock() > deadline:
                raise ReadError(f"the checkpoints change faster than they can be locked ({LOCK_SECONDS} s)")
            await asyncio.sleep(_POLL_SECONDS)

    async def read(
        self,
        path: str | os.PathLike[str],
        which: Which,
        use: Callable[[CheckpointReader], Awaitable[T]],
        staging: Staging,
        *,
        keep: bool = False,
    ) -> T:
        """Lock the newest checkpoint and use it; the next older one if it is damaged, also a superseded one.

        With a step or a name that one is used, and damage raises. ``keep`` leaves the checkpoint open and locked if
        ``use`` returned; ``path`` is for messages.

        Raises:
            NoCheckpointError: there is none, or not the requested one.
            DamagedError, ReadError: it cannot be read, and there is nothing older to fall back to.
            CorruptStoreError: this version does not understand it.
        """
        fallback = Fallback(which)
        record: Record

        def pick(found: Record) -> Entry | None:
            nonlocal record
            record = found
            # If all are rejected, the one that was superseded last was removed on purpose.
            superseded = () if all(entry.rejected for entry in found.entries) else found.superseded
            return choose(found.entries, which, fallback.unreadable, superseded)

        def older() -> tuple[Entry, bool] | None:
            chosen = pick(record)
            return None if chosen is None else (chosen, chosen in record.superseded)

        while (locked := await self.lock(pick)) is not None:
            entry, file = locked
            superseded, used = entry in record.superseded, False
            with fallback.trying(entry, superseded, older):
                if not isinstance(file, File):
                    pick(await self.record())  # for older()
                    raise UnreadableError(file) from file
                reader = self.checkpoint(entry, file, staging)
                try:
                    with unreadable_errors():
                        await reader.hold()
                        if superseded:
                            await reader.own.verify()
                        result = await use(reader)
                    used = True
                    return result
                except UnreadableError as unreadable:
                    if not is_exhausted(unreadable.error):
                        pick(await self.record())
                    raise
                finally:
                    if not (used and keep):
                        await reader.close()
        raise only_rejected(record.entries, which, path) or self.nothing(path, which)

    def checkpoint(self, entry: Entry, file: File, staging: Staging) -> CheckpointReader:
        """Return the reader of a checkpoint whose slot is locked; close it."""
        return CheckpointReader({0: self.part(entry, file, staging)})

    def part(self, entry: Entry, file: File, staging: Staging) -> PartReader:
        """Return the reader of a locked slot."""
        slot = OpenSlot(self.opened.medium, file, entry, self.identity.block_bytes)
        return PartReader(slot, CopyBackend(self.opened.operations), staging)

    def nothing(self, path: str | os.PathLike[str], which: Which) -> NoCheckpointError:
        """Return the error if there is no checkpoint, or not the requested one."""
        return NoCheckpointError(f"{os.fspath(path)} holds no checkpoint{describe_which(which)}")


def read_at_once(path: str | os.PathLike[str]) -> tuple[Identity, Record] | None:
    """Read the identity and the newest record of a store on this thread; None if there is no (complete) store.

    Raises CorruptStoreError, ReadError.
    """
    operations = OperationsAtOnce()
    opened = OpenMedium(operations, Files(path, operations), "")

    async def read() -> tuple[Identity, Record] | None:
        try:
            reader = await StoreReader.open(opened)
            return None if reader is None else (reader.identity, await reader.record())
        finally:
            await opened.medium.close()

    work = read()
    try:
        work.send(None)  # no loop is around it: these operations never suspend
    except StopIteration as end:
        found: tuple[Identity, Record] | None = end.value
        return found
    work.close()
    raise RuntimeError("it waits for something")


def _names(record: Record, entry: Entry, superseded: bool) -> bool:
    """Whether a record still names (or superseded) a checkpoint; its metadata may hold NaN, which equals nothing."""
    entries = record.superseded if superseded else record.entries
    return any((found.counter, found.slot) == (entry.counter, entry.slot) for found in entries)
