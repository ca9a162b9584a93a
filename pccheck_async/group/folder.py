# SPDX-License-Identifier: Apache-2.0
"""A group's folder: the filesystem that it is on, and the records of its ranks' stores.

::

    FOLDER/group.json     the id of this filesystem, equal for all ranks that see this file
    FOLDER/rank-00003/    the store of rank 3
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec import structs

from pccheck_async.errors import (
    CheckpointError,
    CorruptStoreError,
    NewerFormatError,
    StoreError,
    folder_error,
    in_shell,
    read_error,
)
from pccheck_async.format import Entry, Identity, Key, Line, Membership, Parts, Record
from pccheck_async.format.record import (
    GROUP_NAME,
    IDENTITY_NAME,
    decode_domain,
    encode_domain,
)
from pccheck_async.group.parts import Applied, Part, SeenStore
from pccheck_async.medium.folder import Folder, sync
from pccheck_async.medium.open_medium import OpenMedium
from pccheck_async.store import Store, StoreReader, at_once, rank_folders, rank_name

__all__ = [
    "domain_of",
    "drop_checkpoints",
    "mark_rejected",
    "parts_of",
    "read_stores",
    "record_of",
    "remove_store",
    "seen_store",
    "seen_stores",
    "stored_domain",
    "wait_for_made",
    "write_parts",
]

_MAKING_SECONDS = 2.0
_POLL_SECONDS = 0.01


def domain_of(folder: Path) -> str:
    """Return the id of the filesystem that the folder is on; the first rank there makes folder and id.

    Durability: the id is durable when this returns. A crash before that leaves no file, or a complete one.

    Raises:
        StoreError: The folder is the store of one process.
        CorruptStoreError: The file is damaged.
        ReadError, WriteError: The device failed, or the folder cannot be made.
    """
    try:
        Folder(folder).create()
        if (folder / IDENTITY_NAME).exists():
            raise StoreError(f"{folder} holds the checkpoints of one process: give the group another folder")
        deadline = time.monotonic() + _MAKING_SECONDS
        while (domain := stored_domain(folder, time.monotonic() < deadline)) is None:
            _make_domain(folder)
    except CheckpointError:
        raise
    except OSError as error:
        raise folder_error(error, folder) from error
    return domain


def _make_domain(folder: Path) -> None:
    """Make ``group.json`` durably, if there is none. Without hard links another rank may see it empty at first."""
    path, data = folder / GROUP_NAME, encode_domain(secrets.token_hex(16))
    new = folder / f".{GROUP_NAME}.{secrets.token_hex(8)}"
    try:
        _write_new(new, data)
        try:
            path.hardlink_to(new)
        except FileExistsError:  # another rank was faster: all take its id
            pass
        except OSError:  # no hard links here
            with suppress(FileExistsError):
                _write_new(path, data)
    finally:
        new.unlink(missing_ok=True)
    sync(folder)  # crash: the id that other ranks have is gone, and another one is there


def wait_for_made(folder: Path) -> None:
    """Wait until the rank that makes ``group.json`` has removed its other link to it, which changes the inode's ctime.

    Waits at most two seconds: after a crash the link stays, and the ctime does not change any more.
    """
    path, deadline = folder / GROUP_NAME, time.monotonic() + _MAKING_SECONDS
    with suppress(OSError):  # whoever reads it next says so
        while (found := path.stat()).st_nlink > 1 and time.monotonic() < deadline:
            with suppress(FileNotFoundError):  # it was removed meanwhile
                if all(link.lstat().st_ino != found.st_ino for link in folder.glob(f".{GROUP_NAME}.*")):
                    return  # its other link is elsewhere, of a backup
            time.sleep(_POLL_SECONDS)


def _write_new(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # crash: the name without its bytes
        except BaseException:
            path.unlink()
            raise


def stored_domain(folder: Path, wait: bool = False) -> str | None:
    """Return the id in a folder's ``group.json``, None if there is none. Raises CorruptStoreError, ReadError.

    With ``wait`` also None, after a moment, if the file is empty: another rank may be writing it.
    """
    try:
        data = Folder(folder).read_small(GROUP_NAME)
        if not data and wait:
            time.sleep(_POLL_SECONDS)
            return None
        return decode_domain(data)
    except FileNotFoundError:
        return None
    except NewerFormatError as error:
        raise NewerFormatError(f"{folder}: {error}") from None
    except CorruptStoreError as error:
        todo = f"{in_shell('recover', folder, '--write')} writes it anew"
        raise CorruptStoreError(f"{folder}: {error}; the checkpoints are not affected: {todo}") from None
    except OSError as error:
        raise read_error(error, folder / GROUP_NAME) from error


def seen_stores(folder: Path, *, passes_over: bool = False) -> Iterator[SeenStore]:
    """Yield every rank's store in a folder, as its newest record describes it; those never fully made are left out.

    Raises CorruptStoreError: a store has no valid record, or is a store of one process; with ``passes_over`` such a
    store is left out instead. Raises ReadError.
    """
    reading = partial(read_stores, folder=folder, passes_over=passes_over)
    for rank, found in at_once(folder, reading).items():
        yield seen_store(rank, *found)


async def read_stores(
    opened: OpenMedium, folder: Path, *, passes_over: bool = False
) -> dict[int, tuple[Identity, Record]]:
    """Return identity and newest record of every rank's store in a folder, by rank.

    A store without a valid record raises CorruptStoreError, or is left out with ``passes_over``, as are stores of one
    process then. Raises ReadError.
    """
    stores = dict[int, tuple[Identity, Record]]()
    for rank, path in rank_folders(folder).items():
        try:
            found = await StoreReader.newest(opened, path.name)
        except CorruptStoreError as error:
            if passes_over or not path.exists():  # it was removed meanwhile
                continue
            raise CorruptStoreError(f"{path}: {error}") from None
        if found is not None and not (passes_over and found[1].parts is None):
            stores[rank] = found
    return stores


def seen_store(rank: int, identity: Identity, record: Record) -> SeenStore:
    """Return a rank's store as its newest record describes it. Raises CorruptStoreError: it is one of one process."""
    if record.parts is None:
        raise CorruptStoreError(
            f"{rank_name(rank)} holds a store of one process, and no rank's parts of a group's checkpoints: `pccheck "
            "recover --write` of the folder of the group makes the rank's store again from its slots"
        )
    applied = record.parts.applied if record.parts is not None else None
    return SeenStore(0, rank, identity.id_bytes, applied, parts_of(record), record.line)


def parts_of(record: Record) -> tuple[Part, ...]:
    """Return the parts of checkpoints that a rank's record names, newest first."""
    memberships = record.parts.memberships if record.parts is not None else ()
    return tuple(
        Part(one.run, one.rank, one.world, one.committed, entry)
        for one, entry in zip(memberships, record.entries, strict=True)
    )


def record_of(parts: tuple[Part, ...], applied: Applied | None, before: Record, line: Line | None = None) -> Record:
    """Return the record that follows ``before``: with these parts, newest first, ``applied`` decision and ``line``."""
    memberships = tuple(Membership(part.run, part.rank, part.world, part.committed) for part in parts)
    entries = tuple(part.entry for part in parts)
    return Record(before.generation + 1, entries, before.entries, Parts(applied, memberships), line)


async def write_parts(store: Store, parts: tuple[Part, ...], applied: Applied | None) -> None:
    """Write a rank's next record, which names these parts, newest first, and has the store's line.

    Raises StoreFailedError: the store takes no further records.
    """
    await store.rewrite(partial(record_of, parts, applied, line=store.committed.line))


async def mark_rejected(store: Store, chosen: Collection[int]) -> None:
    """Mark the checkpoints of these counters as rejected in the record of one store, which is open for writing.

    One marked part rejects a group's checkpoint: a crash between two ranks' stores leaves it rejected for all ranks, or
    for none.

    Durability: when this returns the marks survive power loss. Raises StoreFailedError.
    """

    def marked(entries: Sequence[Entry]) -> list[Entry]:
        return [each.as_rejected() if each.counter in chosen else each for each in entries]

    record = store.committed.record
    if record.parts is None:
        await store.amend(marked)
    elif record.parts.applied is not None and marked(record.entries) != [*record.entries]:
        await store.take_over_once()
        pairs = zip(parts_of(record), marked(record.entries), strict=True)
        parts = tuple(structs.replace(part, entry=entry) for part, entry in pairs)
        await write_parts(store, parts, record.parts.applied)


async def drop_checkpoints(store: Store, keys: Collection[Key]) -> None:
    """Drop checkpoints for good from the record of one store, which is open for writing, and free their slots.

    A crash between two ranks' stores leaves a group's checkpoint without some parts: the same call drops the others.

    Durability: when this returns, a power failure does not bring them back. Raises StoreFailedError.
    """
    record = store.committed.record
    if record.parts is None:
        counters = {key.counter for key in keys}
        await store.amend(lambda entries: [each for each in entries if each.counter not in counters], for_good=True)
    elif len(kept := tuple(part for part in parts_of(record) if part.key not in keys)) < len(record.entries):
        await store.take_over_once()
        applied = record.parts.applied
        if applied is not None:
            applied = structs.replace(applied, pinned=tuple(key for key in applied.pinned if key not in keys))
        await write_parts(store, kept, applied)
    await store.slots.remove_surplus()


def remove_store(folder: Path, rank: int) -> None:
    """Remove a rank's folder, by a rename first: a crash leaves all of it, or only files that are never read."""
    aside = folder / f".removed-{rank_name(rank)}-{secrets.token_hex(8)}"
    with suppress(FileNotFoundError):
        (folder / rank_name(rank)).rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
