# SPDX-License-Identifier: Apache-2.0
"""Making lost records of a group's ranks again, from their slots and the records of the other ranks."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from msgspec import structs

from pccheck_async.errors import CorruptStoreError, NewerFormatError, StoreLockedError
from pccheck_async.format import Entry, Identity, Record, checksum
from pccheck_async.format.record import (
    COMMIT_NAME,
    GROUP_VERSION,
    MIN_BLOCK,
    largest_block,
    newest_record,
    rebuild_identity,
    slot_number,
)
from pccheck_async.group import Incomplete, Part, SeenStore, parts_by_key, ranks_there, record_of, seen_store, view_of
from pccheck_async.medium.files import Files
from pccheck_async.medium.filesystem import slot_sizes
from pccheck_async.medium.open_medium import OpenMedium
from pccheck_async.store import (
    held_by_other,
    lock_commit,
    may_lack_the_newest,
    rank_folders,
    rank_name,
    read_commit,
    stored_identity,
    unread_record,
)
from pccheck_async.transfer import PAGE_BYTES
from pccheck_async.upkeep.reading import LOCK_SECONDS, Progress
from pccheck_async.upkeep.salvage import FoundCheckpoint, as_recorded, find_in_slot, record_entries

__all__ = ["LostRecords", "RankStores", "find_parts", "lock_ranks", "read_ranks"]

MOST_APART = 5.0
"""Most seconds between the captures of two ranks' parts of one checkpoint. No manifest names the run: a part of the
same counter and step that a killed run left is older, by a restart and the training up to that step."""


@dataclass(frozen=True, slots=True)
class LostRecords:
    """The slots of a rank whose records are lost.

    Attributes:
        identity: The identity of the rank's store.
        found: The contents of each slot.
        parts: The rank's parts of checkpoints that all other ranks' records name, newest first.
    """

    identity: Identity
    found: tuple[FoundCheckpoint, ...]
    parts: tuple[Part, ...]

    def records(self, seen: Iterable[SeenStore]) -> tuple[Record, Record]:
        """Return two records that name the parts, with all decisions applied that the other ranks' records reflect."""
        newest = max(
            (store.applied for store in seen if store.applied), key=lambda one: (one.run.number, one.decisions)
        )
        first = record_of(self.parts, newest, Record(-1, ()))
        return first, structs.replace(first, generation=1)


@dataclass(slots=True)
class RankStores:
    """The stores of a group's ranks, as they are found, by rank.

    Attributes:
        seen: Stores with a valid record, as that describes them.
        lost: Identities of the stores that have no valid record of a rank.
        gone: Ranks in ``lost`` that have no commit file.
        named: Entries of the valid records of ranks in ``lost``.
        older: Ranks in ``lost`` whose records are valid, but older than the records of other ranks.
        unnamed: Identities of the stores whose ``store.json`` is to be written anew: it is missing or damaged, or says
            that one process made the store.
    """

    seen: dict[int, SeenStore] = field(default_factory=dict)
    lost: dict[int, Identity] = field(default_factory=dict)
    unnamed: dict[int, Identity] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    named: dict[int, tuple[Entry, ...]] = field(default_factory=dict)
    older: set[int] = field(default_factory=set)


async def read_ranks(opened: OpenMedium, folder: Path, *, search: bool = False) -> RankStores:
    """Read the records of all ranks. With ``search``, a rank whose newest record may be missing counts as lost.

    That is one whose records are older than other ranks', or may be. Raises NewerFormatError, ReadError.
    """
    stores, identities, torn = RankStores(), dict[int, Identity](), list[int]()
    for rank, path in rank_folders(folder).items():
        prefix = f"{path.name}/"
        try:
            identity = await stored_identity(opened.medium, prefix)
        except NewerFormatError:
            raise
        except CorruptStoreError:
            identity = None
        commit = await read_commit(opened.medium, prefix)
        if identity is None or identity.format != GROUP_VERSION:
            if (made := _identity_again(path, identity, commit)) is None:
                continue
            identity = stores.unnamed[rank] = made
        record = None if commit is None else newest_record(commit[0], identity.id_bytes)
        if commit is None or record is None or record.parts is None or unread_record(*commit, identity.id_bytes):
            stores.lost[rank] = identity
            stores.gone |= {rank} if commit is None else set()
        else:
            stores.seen[rank], identities[rank] = seen_store(rank, identity, record), identity
            if may_lack_the_newest(commit[0], identity=identity, record=record):
                torn.append(rank)
    if search:
        older = {*_older(stores.seen.values())} & identities.keys()
        stores.older = older.difference(torn)
        for rank in older.union(torn):
            stores.lost[rank] = identities[rank]
            stores.named[rank] = tuple(part.entry for part in stores.seen.pop(rank).parts)
    return stores


def _older(seen: Collection[SeenStore]) -> tuple[int, ...]:
    """Return the ranks whose records lack their parts of the newest checkpoint; none if it never was complete."""
    view = view_of([*seen], [0], [])
    found = max((*view.complete, *view.incomplete), key=attrgetter("key"), default=None)
    return found.ranks if isinstance(found, Incomplete) and not found.proven else ()


def _identity_again(folder: Path, found: Identity | None, commit: tuple[memoryview, object] | None) -> Identity | None:
    """Return an identity for a rank's store that has no valid one; None for a folder without a store.

    Without a record, any id will do, and the block size is found later, from the offsets in the slots.
    """
    rebuilt = None if commit is None else rebuild_identity(commit[0])
    if rebuilt is not None and rebuilt[0].format == GROUP_VERSION:
        return rebuilt[0]
    if not slot_sizes(folder):
        return None
    store_id = secrets.token_hex(16) if found is None else found.store_id
    return Identity(format=GROUP_VERSION, store_id=store_id, checksum=checksum.NAME, block_bytes=MIN_BLOCK)


async def lock_ranks(opened: OpenMedium, folder: Path, names: Collection[str]) -> None:
    """Lock the commit files, where there are any, in ranks' folders, until the medium is closed.

    Raises StoreLockedError.
    """
    for name in names:
        opening = partial(opened.medium.open, f"{name}/{COMMIT_NAME}", writable=True)
        try:
            locked = await lock_commit(opened.medium, opening, LOCK_SECONDS)
        except FileNotFoundError:
            continue
        if locked is None:
            raise StoreLockedError(held_by_other(folder / name))


async def find_parts(
    opened: OpenMedium, folder: Path, stores: RankStores, progress: Progress
) -> dict[int, LostRecords]:
    """Search the slots of the ranks that lost records for their parts of checkpoints that other ranks' records name."""
    wanted = _lacking(stores.seen.values(), stores.lost)
    return {
        rank: await _search(opened, folder, rank, identity, wanted, stores.named.get(rank, ()), progress)
        for rank, identity in stores.lost.items()
    }


def _lacking(seen: Iterable[SeenStore], lost: Collection[int]) -> dict[int, list[Part]]:
    """Return the parts of each checkpoint that only ranks in ``lost`` lack, by counter.

    Counters that two checkpoints have are left out.
    """
    by_key = parts_by_key(seen)
    wanted = dict[int, list[Part]]()
    for key, found in by_key.items():
        parts = [part for _, part in found]
        there, world = ranks_there(parts)
        if there and world <= len(there) + len(lost) and there.union(lost).issuperset(range(world)):
            wanted[key.counter] = parts
    counters = [key.counter for key in by_key]
    return {counter: parts for counter, parts in wanted.items() if counters.count(counter) == 1}


async def _search(
    opened: OpenMedium,
    folder: Path,
    rank: int,
    identity: Identity,
    wanted: Mapping[int, list[Part]],
    recorded: Sequence[Entry],
    progress: Progress,
) -> LostRecords:
    name = rank_name(rank)
    own = replace(opened, medium=Files(folder / name, opened.operations))
    try:
        await own.medium.prepare(create=False)
        numbers = [number for each in await own.medium.names() if (number := slot_number(each)) is not None]
        found = [await find_in_slot(own, number, identity.block_bytes, progress) for number in numbers]
    finally:
        await own.medium.close()
    found = [as_recorded(one, recorded) for one in found]
    entries, notes, _ = record_entries(found)
    parts = []
    for entry in entries:
        others = [
            part
            for part in wanted.get(entry.counter, ())
            if part.entry.step == entry.step and rank < part.world and abs(part.entry.time - entry.time) <= MOST_APART
        ]
        if others and len(others) == len(wanted[entry.counter]):
            known = others[0].entry
            marked = structs.replace(entry, pinned=known.pinned, metadata=known.metadata)
            parts.append(Part(others[0].run, rank, others[0].world, others[0].committed, marked))
        else:
            notes[entry.slot] = "the records of the other ranks do not name it"
    if identity.block_bytes == MIN_BLOCK:  # it was not known
        block_bytes = largest_block([part.entry for part in parts], PAGE_BYTES)
        identity = structs.replace(identity, block_bytes=block_bytes)
    named = {part.entry.slot for part in parts}
    noted = [
        replace(one, folder=name, note=notes.get(one.slot, one.note), entry=one.entry if one.slot in named else None)
        for one in found
    ]
    return LostRecords(identity, tuple(noted), tuple(parts))
