# SPDX-License-Identifier: Apache-2.0
"""Reading a store's records, and locking its slots, also beside a writer of another process. Nothing here writes."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from pccheck_async.errors import (
    CheckpointError,
    CorruptStoreError,
    DamagedError,
    NoCheckpointError,
    ReadError,
    first_few,
    is_exhausted,
)
from pccheck_async.format import Entry, Identity, Record
from pccheck_async.format.record import (
    COMMIT_NAME,
    COMMIT_NBYTES,
    GROUP_NAME,
    IDENTITY_NAME,
    is_foreign,
    slot_name,
    slot_number,
)
from pccheck_async.medium import File
from pccheck_async.medium.files import Files
from pccheck_async.medium.folder import open_regular
from pccheck_async.medium.open_medium import OpenMedium
from pccheck_async.store.commit_file import read_identity, read_record
from pccheck_async.store.rank_folders import rank_name, recovery
from pccheck_async.transfer.operations.python import OperationsAtOnce

__all__ = ["LOCK_SECONDS", "StoreReader", "at_once", "no_store", "others_in", "others_in_words"]

T = TypeVar("T")
_POLL_SECONDS = 0.001
_OF_OTHERS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
"""Suffixes of files in which other programs save states."""
_OTHER_FOLDERS = re.compile(r"checkpoint-\d+|\.metadata")
"""Names of folders of Hugging Face's Trainer, and of the file in each folder of torch.distributed.checkpoint."""
LOCK_SECONDS = 30.0
"""Seconds for which a reader tries to lock a checkpoint while newer ones replace it."""


def no_store(opened: OpenMedium, path: str | os.PathLike[str], what: str = "no store") -> CheckpointError:
    """Return the error for a path without a store.

    NoCheckpointError if the path is wrong or nothing was saved there, CorruptStoreError if a store lost its identity.
    """
    if not isinstance(opened.medium, Files):  # other media need not be folders
        return NoCheckpointError(f"{os.fspath(path)} holds {what}")
    above = next((f"; {folder} is a store" for folder in Path(path).parents[:2] if _is_store(folder)), "")
    if not os.path.lexists(path):
        return NoCheckpointError(f"{os.fspath(path)} does not exist, so it holds {what}; check the path{above}")
    if not os.path.isdir(path):
        return NoCheckpointError(
            f"{os.fspath(path)} is no folder, so it holds {what}; give the folder that the engine saved into{above}"
        )
    text, found = f"{os.fspath(path)} holds {what}", []
    with suppress(OSError), os.scandir(path) as entries:
        found = list(islice(entries, 1000))
    names = {each.name for each in found}
    slots = any(slot_number(name) is not None for name in names)
    if slots or (COMMIT_NAME in names and not _has_foreign_commit(path)):
        text += f", but parts of one without {IDENTITY_NAME}: {recovery(path)} says what is left"
        # Without slots it may be a store that is being made, or a crash ended that: slots come last.
        return CorruptStoreError(text) if slots and IDENTITY_NAME not in names else NoCheckpointError(text)
    if stores := _stores_below(path):
        text += f"; there are stores in it: {first_few(stores, 5)}"
    return NoCheckpointError(text + above + others_in_words(path))


def others_in_words(path: str | os.PathLike[str]) -> str:
    """Return advice on a folder's checkpoints of other programs, for the end of a message; empty if it has none."""
    found = first_few(others_in(path), 3)
    return f"; there is {found} in it: `pccheck import` makes a checkpoint of a file of another format" if found else ""


def others_in(path: str | os.PathLike[str]) -> list[str]:
    """Return the names in a folder that look like checkpoints of other programs, sorted by the numbers in them.

    Stores are left out, whatever their names: ``PCcheckIO`` makes them under Lightning's names.
    """
    names: list[str] = []
    with suppress(OSError), os.scandir(path) as entries:
        names = [each.name for each in islice(entries, 1000)]
    found = [name for name in names if name.endswith(_OF_OTHERS) or _OTHER_FOLDERS.fullmatch(name)]
    found = [name for name in found if not _is_store(os.path.join(path, name))]
    return sorted(found, key=lambda name: ([int(number) for number in re.findall(r"\d+", name)], name))


def _is_store(folder: str | os.PathLike[str]) -> bool:
    return any(os.path.exists(os.path.join(folder, name)) for name in (IDENTITY_NAME, GROUP_NAME))


def _stores_below(path: str | os.PathLike[str]) -> list[str]:
    """Return the stores in a folder, or if there are none, one level further down; the last saved one first."""
    folders = [os.fspath(path)]
    for _ in range(2):
        below: list[str] = []
        for folder in folders:
            with suppress(OSError), os.scandir(folder) as entries:
                below += [each.path for each in islice(entries, 1000) if each.is_dir()]
        if stores := [folder for folder in below if _is_store(folder)]:
            stores.sort(key=lambda folder: (-_saved(folder), folder))
            return [os.path.relpath(folder, path) for folder in stores]
        folders = below[:1000]
    return []


def _saved(folder: str) -> float:
    """Return the time of the last commit in a folder with a store, or with stores of a group's ranks; 0 for none."""
    for name in (COMMIT_NAME, os.path.join(rank_name(0), COMMIT_NAME)):
        with suppress(OSError):
            return os.stat(os.path.join(folder, name)).st_mtime
    return 0.0


def _has_foreign_commit(path: str | os.PathLike[str]) -> bool:
    try:
        with open(os.path.join(path, COMMIT_NAME), "rb", opener=open_regular) as file:
            return is_foreign(file.read(COMMIT_NBYTES))
    except (OSError, CorruptStoreError):
        return False


@dataclass(slots=True)
class StoreReader:
    """An open store, read-only."""

    opened: OpenMedium
    identity: Identity
    commit: File
    """The open file of the records."""
    folder: str = ""
    """The prefix of the names of the store's files: "rank-00003/" on the medium of a group's folder."""

    @classmethod
    async def open(cls, opened: OpenMedium, folder: str = "") -> StoreReader | None:
        """Open the store on the medium ``opened``; None if there is no (complete) one. Raises CorruptStoreError.

        This prepares the medium, unless a ``folder`` on it is given: then the caller has prepared it.
        """
        folder = f"{folder}/" if folder else ""
        identity = await read_identity(opened.medium, opened.path, folder)
        if identity is None:
            return None
        if not folder:
            await opened.medium.prepare(create=False)
        try:
            commit = await opened.medium.open(folder + COMMIT_NAME, writable=False)
        except FileNotFoundError:
            text = f"the store has no {COMMIT_NAME!r} file: see what is left with {recovery(opened.path)}"
            raise CorruptStoreError(text) from None
        return cls(opened, identity, commit, folder)

    @classmethod
    async def newest(cls, opened: OpenMedium, folder: str = "") -> tuple[Identity, Record] | None:
        """Return the identity and the newest record of a store; None if there is no (complete) one.

        Raises CorruptStoreError, ReadError.
        """
        reader = await cls.open(opened, folder)
        if reader is None:
            return None
        try:
            return reader.identity, await reader.record()
        finally:
            await opened.medium.close(reader.commit)

    async def record(self) -> Record:
        """Read the newest record. Raises CorruptStoreError if none is valid, ReadError."""
        return await read_record(self.opened.medium, self.commit, self.identity, self.opened.path)

    async def lock(
        self, pick: Callable[[Record], Entry | None], record: Record | None = None
    ) -> tuple[Entry, File | DamagedError | ReadError] | None:
        """Lock the slot of the checkpoint that ``pick`` chooses from the newest record against reuse.

        Returns the entry with the slot's file, or with the error if that cannot be read; None if nothing was picked.
        ``record`` is tried first; it should be the newest one of a moment ago. A superseded checkpoint
        (:attr:`Record.superseded`) may be overwritten: DamagedError. Raises ReadError after :data:`LOCK_SECONDS`.

        A slot that is locked shared, and that a record read *after* locking still names, keeps its bytes: writers take
        only free slots, and pass over locked ones. If the record does not name it any more, pick again.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + LOCK_SECONDS
        medium = self.opened.medium
        record = await self.record() if record is None else record
        while True:
            entry = pick(record)
            if entry is None:
                return None
            superseded = entry in record.superseded
            try:
                file = await medium.open(self.folder + slot_name(entry.slot), writable=False)
            except (FileNotFoundError, CorruptStoreError, ReadError) as error:
                if is_exhausted(error):
                    raise
                if _names(record := await self.record(), entry, superseded):
                    missing = f"{self.folder}{slot_name(entry.slot)}, which the newest record names, is missing"
                    why = missing if isinstance(error, FileNotFoundError) else str(error)
                    return entry, error if isinstance(error, ReadError) else DamagedError(why)
            else:
                is_held = False
                try:
                    locked = await medium.lock(file, shared=True)
                    record = await self.record()
                    is_held = locked and _names(record, entry, superseded)
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


def at_once(path: str | os.PathLike[str], read: Callable[[OpenMedium], Coroutine[Any, Any, T]]) -> T:
    """Run ``read`` with the medium of a folder on this thread, without an event loop; then close the medium."""
    operations = OperationsAtOnce()
    opened = OpenMedium(operations, Files(path, operations), "", os.fspath(path))

    async def work() -> T:
        try:
            return await read(opened)
        finally:
            await opened.medium.close()

    working = work()
    try:
        working.send(None)  # no loop is around it: these operations never suspend
    except StopIteration as end:
        result: T = end.value
        return result
    working.close()
    raise RuntimeError("it waits for something")


def _names(record: Record, entry: Entry, superseded: bool) -> bool:
    """Whether a record names (or has superseded) a checkpoint, by counter and slot: metadata with NaN equal nothing."""
    entries = record.superseded if superseded else record.entries
    return any((found.counter, found.slot) == (entry.counter, entry.slot) for found in entries)
