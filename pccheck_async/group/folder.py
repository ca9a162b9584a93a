"""A group's folder: which filesystem it is on, and what its ranks' stores say.

::

    FOLDER/group.json     the id of this filesystem, the same for all ranks that see this file
    FOLDER/rank-00003/    the store of rank 3
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from pccheck_async.errors import CorruptStoreError, StoreError
from pccheck_async.format import Identity, Membership, Parts, Record
from pccheck_async.format.record import GROUP_NAME, GROUP_VERSION, IDENTITY_NAME
from pccheck_async.group.parts import Applied, Part, SeenStore
from pccheck_async.medium.folder import Folder
from pccheck_async.store import read_at_once

__all__ = [
    "domain_of",
    "parts_of",
    "rank_folders",
    "rank_name",
    "record_of",
    "remove_store",
    "seen_stores",
]

_RANK_NAME = re.compile(r"rank-(\d{5,9})")


class _Domain(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    domain: str


def rank_name(rank: int) -> str:
    """Return the name of a rank's folder."""
    return f"rank-{rank:05d}"


def rank_folders(folder: Path) -> dict[int, Path]:
    """Return the folders of ranks in a group's folder, by rank."""
    found: dict[int, Path] = {}
    with suppress(FileNotFoundError):
        for child in folder.iterdir():
            if (match := _RANK_NAME.fullmatch(child.name)) and rank_name(int(match[1])) == child.name:
                found[int(match[1])] = child
    return dict(sorted(found.items()))


def domain_of(folder: Path) -> str:
    """Return the id of the filesystem that the folder is on; the first one there chooses it.

    Durability: it is durable when this returns. A crash before leaves no file, or all of it.

    Raises:
        StoreError: The folder is the store of one process.
        CorruptStoreError: The file is damaged.
    """
    Folder(folder).create()
    if (folder / IDENTITY_NAME).exists():
        raise StoreError(f"{folder} holds the checkpoints of one process: give the group another folder")
    path = folder / GROUP_NAME
    if not path.exists():
        new = folder / f".{GROUP_NAME}.{secrets.token_hex(8)}"
        with new.open("xb") as file:
            file.write(msgspec.json.encode(_Domain(format=GROUP_VERSION, domain=secrets.token_hex(16))) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another rank was faster: all take its id
            path.hardlink_to(new)
        new.unlink()
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Domain).domain
    except msgspec.MsgspecError as error:
        raise CorruptStoreError(f"{path} is damaged: {error}") from None


def seen_stores(folder: Path) -> Iterator[SeenStore]:
    """Yield what the newest record of every rank's store in a folder says; a store that was never whole is none.

    Raises CorruptStoreError where a store has no valid record, ReadError.
    """
    for rank, path in rank_folders(folder).items():
        try:
            found = read_at_once(path)
        except CorruptStoreError as error:
            if not path.exists():  # it was removed meanwhile
                continue
            raise CorruptStoreError(f"{path}: {error}") from None
        if found is not None:
            yield seen_store(rank, *found)


def seen_store(rank: int, identity: Identity, record: Record) -> SeenStore:
    """Return what the newest record of a rank's store says."""
    applied = record.parts.applied if record.parts is not None else None
    return SeenStore(0, rank, identity.id_bytes, applied, parts_of(record))


def parts_of(record: Record) -> tuple[Part, ...]:
    """Return the parts of checkpoints that a rank's record names, newest first."""
    memberships = record.parts.memberships if record.parts is not None else ()
    return tuple(
        Part(one.run, one.rank, one.world, one.committed, entry)
        for one, entry in zip(memberships, record.entries, strict=True)
    )


def record_of(parts: tuple[Part, ...], applied: Applied, before: Record) -> Record:
    """Return the record that comes after ``before`` and names these parts, newest first."""
    memberships = tuple(Membership(part.run, part.rank, part.world, part.committed) for part in parts)
    entries = tuple(part.entry for part in parts)
    return Record(before.generation + 1, entries, before.entries, Parts(applied, memberships))


def remove_store(folder: Path, rank: int) -> None:
    """Remove a rank's folder, by a rename first: a crash leaves all of it, or nothing that counts."""
    aside = folder / f".removed-{rank_name(rank)}-{secrets.token_hex(8)}"
    with suppress(FileNotFoundError):
        (folder / rank_name(rank)).rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
