# SPDX-License-Identifier: Apache-2.0
"""The records of a store, and the lock on a slot, also beside a writer of another process. Nothing here writes."""

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
"""Ends of the names of files that other programs save states in."""
_OTHER_FOLDERS = re.compile(r"checkpoint-\d+|\.metadata")
"""Names of the folders of Hugging Face's Trainer, and of the file in each folder of torch.distributed.checkpoint."""
LOCK_SECONDS = 30.0
"""For which a reader tries to lock a checkpoint while newer ones replace it."""


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
    """Return the names in a folder that look like checkpoints of other programs, those of the highest numbers last.

    Stores are none, whatever they are called: ``PCcheckIO`` makes them under names of Lightning's.
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
    """Return the stores in a folder, or else those one level further down; the one that was saved to last first."""
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
    """The time of the last commit in a folder with a store, or with those of a group's ranks."""
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
    """The file of the records."""
    folder: str = ""
    """The prefix of the names of its files: "rank-00003/" on the medium of a group's folder."""

    @classmethod
    async def open(cls, opened: OpenMedium, folder: str = "") -> StoreReader | None:
        """Open the store of ``opened``; None if there is no (complete) one. Raises CorruptStoreError.

        A medium that has a ``folder`` for each of several stores is prepared by the code that opens it.
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
        """Return the newest record as it is now. Raises CorruptStoreError if there is none."""
        return await read_record(self.opened.medium, self.commit, self.identity, self.opened.path)

    async def lock(
        self, pick: Callable[[Record], Entry | None], record: Record | None = None
    ) -> tuple[Entry, File | DamagedError | ReadError] | None:
        """Lock the picked checkpoint's slot against reuse, and return its file, or why there is none to be read.

        None if nothing is picked, at first from ``record`` if that is the newest one of a moment ago. One that was
        superseded (:attr:`Record.superseded`) may be written over by then.

        A slot that is locked shared, and that a record read *after* locking still names, keeps its bytes: writers take
        only free slots, and pass over locked ones. Otherwise the record has moved on: start over.
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
    """Read from a folder on this thread: operations end before they return. The medium is closed afterwards."""
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
    """Whether a record still names (or superseded) a checkpoint; its metadata may hold NaN, which equals nothing."""
    entries = record.superseded if superseded else record.entries
    return any((found.counter, found.slot) == (entry.counter, entry.slot) for found in entries)
