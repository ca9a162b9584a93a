"""Reading a group's folder without an engine, also beside a running group. Nothing here writes.

Checkpoints listed as complete have all their parts in this folder. Parts of ranks on other hosts in folders of their
own are not seen: there, a folder of one rank can be read for itself.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from pccheck_async.errors import IncompleteCheckpointError, NoCheckpointError, ReadError, StoreError
from pccheck_async.format import CheckpointInfo, Entry, Key, Record, Which, describe_which
from pccheck_async.group.folder import seen_stores
from pccheck_async.group.parts import Part, SeenStore
from pccheck_async.group.view import Complete, Incomplete, view_of
from pccheck_async.medium import File
from pccheck_async.store import (
    LOCK_SECONDS,
    CheckpointReader,
    FolderPart,
    PartReader,
    Staging,
    StoreReader,
    choose,
    only_rejected,
    rank_name,
)
from pccheck_async.transfer.copying import CopyBackend

__all__ = ["GroupListing", "GroupReader", "list_group"]


@dataclass(frozen=True, slots=True)
class GroupListing:
    """The records of all ranks in a folder, at one moment.

    Attributes:
        folder: The group's.
        stores: By rank.
        complete: Newest first.
        incomplete: Newest first. Beside a running group, those that are being saved are among them.
    """

    folder: Path
    stores: dict[int, SeenStore]
    complete: tuple[Complete, ...]
    incomplete: tuple[Incomplete, ...]

    def parts(self, key: Key) -> dict[int, Part]:
        """Return the parts of a checkpoint by rank."""
        return {rank: part for rank, store in self.stores.items() for part in store.parts if part.key == key}

    def info(self, one: Complete) -> CheckpointInfo:
        """Return the info of a complete checkpoint for users: the bytes of all ranks; the rest is rank 0's."""
        return replace(one.entry.info, nbytes=sum(part.entry.nbytes for part in self.parts(one.key).values()))

    def choose(self, which: Which) -> Complete:
        """Return the newest complete checkpoint that is not rejected, or the requested one.

        Raises the error of :meth:`nothing`; StoreError if all are rejected.
        """
        found = choose([one.entry for one in self.complete], which)
        if found is None:
            raise only_rejected([one.entry for one in self.complete], which, self.folder) or self.nothing(which)
        return next(one for one in self.complete if one.entry.counter == found.counter)

    def folder_of_part(self, which: Which, rank: int) -> Path:
        """Return the folder of a rank that has a part of a complete checkpoint. Raises NoCheckpointError."""
        world = self.choose(which).world
        if not 0 <= rank < world:
            what = "newest complete checkpoint" if which is None else f"checkpoint{describe_which(which)}"
            there = f"the ranks 0 to {world - 1}" if world > 1 else "rank 0 alone"
            text = f"the {what} in {self.folder} has {there}, and no rank {rank}"
            raise NoCheckpointError(text)
        return self.folder / rank_name(rank)

    def nothing(self, which: Which) -> NoCheckpointError:
        """Return the error if there is no complete checkpoint, or not the requested one."""
        lacking = [one for one in self.incomplete if which in (None, one.step)]
        if not lacking:
            return NoCheckpointError(f"{self.folder} holds no checkpoint{describe_which(which)}")
        what = "; ".join(f"step {one.step} lacks the parts of {one.lacking}" for one in lacking)
        return IncompleteCheckpointError(
            f"{self.folder} holds no complete checkpoint{describe_which(which)}: {what}; what a rank has can be read "
            f"from its own folder, such as {self.folder / rank_name(min(self.stores))}"
        )


def list_group(path: str | os.PathLike[str]) -> GroupListing:
    """Read the records of all ranks in a group's folder, on this thread.

    Records are read one after the other while ranks may write them. One that is read early may lack what later ones
    name, so nothing is incomplete before all were read again. And a complete one may have been dropped from one that
    is read late; that one names a newer checkpoint as committed, and all are read again until this is complete, too.

    Raises:
        CorruptStoreError: a rank's store has no valid record.
        StoreError: the records contradict each other.
        ReadError: the device failed, or the records change all the time.
    """
    folder, deadline = Path(path), time.monotonic() + LOCK_SECONDS
    before: dict[int, list[tuple[Key, bool]]] = {}
    incomplete: set[Key] = set()
    while True:
        stores = {store.rank: store for store in seen_stores(folder)}
        view = view_of(list(stores.values()), [0], [])
        if view.error is not None:
            raise StoreError(f"{folder}: {view.error}")
        named = {rank: [(part.key, part.committed) for part in store.parts] for rank, store in stores.items()}
        committed = max((key for parts in named.values() for key, applied in parts if applied), default=None)
        newest = view.complete[0].key if view.complete else None
        again = tuple(one for one in view.incomplete if one.key in incomplete)
        up_to_date = committed is None or (newest is not None and newest >= committed)
        if not view.incomplete or named == before or (before and up_to_date):
            return GroupListing(folder, stores, view.complete, again)
        if time.monotonic() > deadline:
            raise ReadError(f"the records in {folder} change faster than all of them can be read ({LOCK_SECONDS} s)")
        before, incomplete = named, {one.key for one in view.incomplete}


@dataclass(slots=True, kw_only=True)
class GroupReader(StoreReader):
    """The store of one rank, of which only parts of complete checkpoints are read: a record names no others.

    It is read by the medium of the group's folder, and so are the parts of all other ranks.

    A part that is locked, and that all ranks' records read *after* locking still make one of a complete checkpoint,
    keeps its bytes, like one of :meth:`StoreReader.lock`.
    """

    rank: int
    listing: GroupListing
    """As it was when a record was read last."""

    async def record(self) -> Record:
        """Return the newest record as it is now, without incomplete checkpoints."""
        self.listing = await self.opened.operations.call(list_group, self.listing.folder)
        complete = {one.key: one.entry for one in self.listing.complete}
        parts = self.listing.stores[self.rank].parts if self.rank in self.listing.stores else ()
        marks = [(part.entry, complete[part.key]) for part in parts if part.key in complete]
        entries = [structs.replace(own, pinned=one.pinned) for own, one in marks]
        rejected = [one.rejected for _, one in marks]
        return Record(0, tuple(e.as_rejected() if bad else e for e, bad in zip(entries, rejected, strict=True)))

    def checkpoint(self, entry: Entry, file: File, staging: Staging) -> CheckpointReader:
        """Return the reader of the parts of all ranks, of which this one's slot is locked; close it."""
        key, backend = self._key(entry), CopyBackend(self.opened.operations)
        parts = {
            rank: PartReader(FolderPart(self.opened, rank_name(rank), key), backend, staging)
            for rank in self.listing.parts(key).keys() - {self.rank}
        }
        return CheckpointReader({**parts, self.rank: self.part(entry, file, staging)}, self.rank, of_group=True)

    def _key(self, entry: Entry) -> Key:
        return next(one.key for one in self.listing.complete if one.entry.counter == entry.counter)

    def nothing(self, path: str | os.PathLike[str], which: Which) -> NoCheckpointError:
        """Return the error if no checkpoint is complete, or not the requested one."""
        return self.listing.nothing(which)
