# SPDX-License-Identifier: Apache-2.0
"""All reading without an engine, also while writers run. Nothing in this module writes.

A *place* is a folder with checkpoints: the store of one process, the folder of a group with the stores of its ranks, or
the folder of one such rank; or a bucket, by its URL, which looks like the place that its checkpoints come from. Each
checkpoint is a set of parts; in the store of one process it has a single one, as rank 0's.

Checkpoints of a group that are listed as complete have all their parts in this folder. Parts of ranks whose folders are
on other hosts are not seen: there, the folder of one rank can be read by itself, as if one process had saved it.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, Self, TypeVar

from pccheck_async.bucket import BucketMedium, is_location, open_objects, shown
from pccheck_async.engine import Auto, StorageOptions, call_once, decide
from pccheck_async.errors import (
    CheckpointError,
    IncompleteCheckpointError,
    NoCheckpointError,
    ReadError,
    StoreError,
    first_few,
    in_shell,
    is_exhausted,
)
from pccheck_async.format import (
    CheckpointInfo,
    Entry,
    Identity,
    Key,
    Reach,
    Record,
    Run,
    Which,
    describe_which,
    matches,
    there_are,
)
from pccheck_async.format.record import MIN_BLOCK
from pccheck_async.group.folder import read_stores, seen_store
from pccheck_async.group.parts import Applied, Part, SeenStore
from pccheck_async.group.view import Complete, Incomplete, view_of
from pccheck_async.medium.open_medium import IO, OpenMedium, open_medium
from pccheck_async.store import (
    LOCK_SECONDS,
    CheckpointReader,
    Fallback,
    FolderPart,
    PartReader,
    Staging,
    StoreReader,
    UnreadableError,
    at_once,
    choose,
    is_group_folder,
    no_store,
    only_rejected,
    others_in_words,
    rank_folders,
    rank_name,
    rank_of,
    unreadable_errors,
)
from pccheck_async.transfer import BufferPool, share_of_cores, share_of_machine
from pccheck_async.transfer.copying import CopyBackend

__all__ = ["Place", "chunk_pool", "open_folder", "open_place", "read_place"]

T = TypeVar("T")
_ALONE: Final = Run(0, 0, 0)
"""The run of all checkpoints in a store of one process."""


class Place:
    """A folder with checkpoints, as its records were at the last look. Use it as a context manager, or close it.

    Args:
        path: The folder, or the URL of a bucket.
        opened: The medium of the folder or bucket.
        of_group: Whether the stores of a group's ranks are in it, or what was copied from them.
        rank: The rank whose part of a group's checkpoint is read first; by default 0.

    Attributes:
        name: Name of the place, for messages.
        is_bucket: Whether it is a bucket, and no folder.
        stores: Identity and newest record of each whole store, by rank; the store of one process as rank 0's.
        complete: The checkpoints that have all their parts, newest first.
        incomplete: The checkpoints that lack some, newest first. While a group runs, those being saved are among them.

    Raises ValueError: ``rank`` is given for a folder that is no group's.
    """

    def __init__(
        self, path: str | os.PathLike[str], opened: OpenMedium, *, of_group: bool, rank: int | None = None
    ) -> None:
        self.path = Path(path)
        self.is_bucket = is_location(path)
        self.name = shown(path) if self.is_bucket else os.fspath(self.path)
        self.opened = opened
        self.of_group = of_group
        if rank is not None:
            self.check_group(f"rank={rank} means nothing there")
        self.rank = rank or 0
        self.stores: dict[int, tuple[Identity, Record]] = {}
        self.complete: tuple[Complete, ...] = ()
        self.incomplete: tuple[Incomplete, ...] = ()
        self._parts = defaultdict[Key, dict[int, Part]](dict)

    async def look(self) -> None:
        """Read the records of all stores.

        They are read one after the other while ranks may write them. A record that is read early may lack parts that
        later ones name, so a checkpoint counts as incomplete only after all records were read again. A complete
        checkpoint may have been dropped from a record that is read late; that record names a newer one as committed,
        and all records are read again until that one is complete, too.

        Raises:
            CorruptStoreError: a store has no valid record, or ``store.json`` is damaged.
            StoreError: the records contradict each other.
            ReadError: the device failed, or the records change all the time.
        """
        deadline = time.monotonic() + LOCK_SECONDS
        before: dict[int, list[tuple[Key, bool]]] = {}
        incomplete: set[Key] = set()
        while True:
            seen = await self._seen()
            view = view_of([*seen.values()], [0], [])
            if view.error is not None:
                raise StoreError(f"{self.name}: {view.error}")
            named = {rank: [(part.key, part.committed) for part in store.parts] for rank, store in seen.items()}
            committed = max((key for parts in named.values() for key, applied in parts if applied), default=None)
            newest = view.complete[0].key if view.complete else None
            up_to_date = committed is None or (newest is not None and newest >= committed)
            if not view.incomplete or named == before or (before and up_to_date):
                self.complete = view.complete
                self.incomplete = tuple(one for one in view.incomplete if one.key in incomplete)
                return
            if time.monotonic() > deadline:
                text = f"the records in {self.name} change faster than all of them can be read ({LOCK_SECONDS} s)"
                raise ReadError(text)
            before, incomplete = named, {one.key for one in view.incomplete}

    async def _seen(self) -> dict[int, SeenStore]:
        """Read the records once; return the stores by rank. A store of one process counts as one run of one rank."""
        if self.of_group:
            self.stores, seen = await self._read_ranks()
        else:
            found = await self._newest()
            self.stores = {} if found is None else {0: found}
            seen = {rank: _seen_alone(*found) for rank, found in self.stores.items()}
        self._parts = defaultdict(dict)
        for rank, store in seen.items():
            for part in store.parts:
                self._parts[part.key][rank] = part
        return seen

    async def _read_ranks(self) -> tuple[dict[int, tuple[Identity, Record]], dict[int, SeenStore]]:
        """Return the stores of a group's ranks, and these reduced to their valid parts, by rank."""
        if self.is_bucket:
            names = {rank: name for name in await self.opened.medium.names() if (rank := rank_of(name)) is not None}
            found = {rank: await StoreReader.newest(self.opened, name) for rank, name in names.items()}
            stores = {rank: store for rank, store in found.items() if store is not None}
        else:
            stores = await read_stores(self.opened, self.path)
        return stores, {rank: seen_store(rank, *found) for rank, found in stores.items()}

    async def _newest(self) -> tuple[Identity, Record] | None:
        """Return the identity and the newest record of the store of one process; None if there is none."""
        return await StoreReader.newest(self.opened)

    # -- contents

    @property
    def is_part(self) -> bool:
        """Whether this is the folder of one rank of a group: it has this rank's parts alone, also prepared ones."""
        return not self.of_group and any(record.parts is not None for _, record in self.stores.values())

    @property
    def rank_folders(self) -> dict[int, Path] | None:
        """The folders of a group's ranks, by rank; None for one process, and a bucket. Raises ReadError."""
        return rank_folders(self.path) if self.of_group and not self.is_bucket else None

    def named(self, rank: int) -> int | None:
        """Return the rank as shown to users: None in a store of one process."""
        return rank if self.of_group else None

    def parts(self, key: Key) -> dict[int, Part]:
        """Return the parts of a checkpoint by rank."""
        return self._parts[key]

    def info(self, one: Complete) -> CheckpointInfo:
        """Return the info of a complete checkpoint for users: the bytes of all ranks' parts, all else from rank 0's."""
        nbytes = sum(part.entry.nbytes for part in self.parts(one.key).values())
        return replace(one.entry.info, nbytes=nbytes, tiers=self.tiers(one.entry.counter))

    def tiers(self, counter: int) -> tuple[Reach, ...]:
        """Return the tiers in which a checkpoint is known to be, by its counter."""
        return ("remote",) if self.is_bucket else ("disk",)

    @property
    def infos(self) -> list[CheckpointInfo]:
        """All complete checkpoints, newest first."""
        return [self.info(one) for one in self.complete]

    def choose(self, which: Which) -> Complete:
        """Return the newest complete checkpoint that is not rejected, or the requested one.

        Raises the error of :meth:`nothing`; NoCheckpointError if it has no part of :attr:`rank`.
        """
        entry = choose([one.entry for one in self.complete], which)
        if entry is None:
            raise self.nothing(which)
        one = next(one for one in self.complete if one.entry.counter == entry.counter)
        if not 0 <= self.rank < one.world:
            what = "newest complete checkpoint" if which is None else f"checkpoint{describe_which(which)}"
            there = f"the ranks 0 to {one.world - 1}" if one.world > 1 else "rank 0 alone"
            raise NoCheckpointError(f"the {what} in {self.name} has {there}, and no rank {self.rank}")
        return one

    def nothing(self, which: Which) -> CheckpointError:
        """Return the error for the case that there is no complete checkpoint, or not the requested one.

        Returns a StoreError if all are rejected; IncompleteCheckpointError if one lacks parts; CorruptStoreError if a
        store lost its identity; else NoCheckpointError.
        """
        if error := only_rejected([one.entry for one in self.complete], which, self.name):
            return error
        lacking = [one for one in self.incomplete if matches(which, one.step, None)]
        if lacking:
            what = "; ".join(f"step {one.step} lacks the parts of {one.lacking}" for one in lacking)
            ranks = {rank for one in lacking for rank in one.ranks}
            advice = [*self.put_back(ranks), *([self.look_for_parts] if ranks <= self.stores.keys() else ())]
            what += "".join(f"; {each}" for each in advice)
            return IncompleteCheckpointError(
                f"{self.name} holds no complete checkpoint{describe_which(which)}: {what}; what a rank has can be read "
                f"from its own folder, such as {self.path / rank_name(min(self.stores))}"
            )
        if not self.stores and not self.of_group:
            return no_store(self.opened, self.name)
        there = there_are(which, self.infos) or ("" if self.infos else others_in_words(self.path))
        return NoCheckpointError(f"{self.name} holds no checkpoint{describe_which(which)}{there}")

    @property
    def look_for_parts(self) -> str:
        """The advice to search slots, which may hold parts that the records do not name."""
        look = in_shell("recover", self.path, "--search")
        return f"if the records of a rank are older than its slots, {look} finds the newest parts there"

    def put_back(self, ranks: Iterable[int]) -> Iterator[str]:
        """Yield advice for ``ranks``, which lack parts: which folders are missing, empty or another group's."""
        lacking = sorted(set(ranks))
        if gone := [rank_name(rank) for rank in lacking if rank not in (self.rank_folders or ())]:
            yield f"{first_few(gone, 5)} is not there: put it back, from a backup or that rank's host"
        if new := [rank_name(each) for each in lacking if each in self.stores and not self.stores[each][1].entries]:
            yield f"{first_few(new, 5)} is empty, made by a start: remove it, and put the old one back"
        alone = {rank for parts in self._parts.values() if len(parts) == 1 for rank in parts}
        shared = {rank for parts in self._parts.values() if len(parts) > 1 for rank in parts}
        strange = alone - shared
        if not strange.isdisjoint(lacking):
            yield (
                f"{first_few([*map(rank_name, sorted(strange))], 5)}: no other rank has any of the checkpoints there. "
                "Among these folders is one of another group, or an older one: put that of this group back"
            )

    # -- reading

    @property
    def identity(self) -> Identity:
        """The identity of the store that is read first."""
        return self.stores[self.rank][0]

    def folder(self, rank: int) -> str:
        """Return the folder of a rank's store in this one; empty for the store of one process."""
        return rank_name(rank) if self.of_group else ""

    def part(
        self, key: Key, rank: int, staging: Staging, listed: Entry | None = None, *, superseded: bool = False
    ) -> PartReader:
        """Return the reader of one part, to be closed; its entry gets pin and rejection of the ``listed`` entry."""
        record = self.stores[rank][1] if rank in self.stores else None
        source = FolderPart(self.opened, self.folder(rank), key, listed, superseded=superseded, record=record)
        return PartReader(source, CopyBackend(self.opened.operations), staging)

    async def read(
        self,
        which: Which,
        use: Callable[[CheckpointReader], Awaitable[T]],
        host_memory: int | Auto | None = None,
        *,
        keep: bool = False,
        falls_back: bool = True,
    ) -> T:
        """Lock the newest checkpoint and return the result of ``use``; if damaged, use the next older one instead.

        Superseded checkpoints are among the older ones. Damage raises if ``which`` is given, or without ``falls_back``.
        If writers replace a checkpoint before it could be locked, the one that replaced it is used. ``host_memory``:
        bytes of staging buffers, all allocated at once; None: allocated as they are needed. ``keep``: if ``use``
        returned, the checkpoint stays open and locked.

        Raises:
            NoCheckpointError: there is none, or not the requested one.
            StoreError: all are rejected.
            DamagedError, ReadError: it cannot be read, and there is nothing older to fall back to; ReadError also if
                checkpoints are replaced faster than they can be locked.
            CorruptStoreError: this version does not understand it.
            ValueError: ``host_memory`` holds no chunk.
        """
        fallback, since = Fallback(which, self.name, falls_back), time.monotonic()
        self.choose(which)  # raises if there is none; never an older one that has this rank instead
        staging = Staging(None if host_memory is None else chunk_pool(self.identity.block_bytes, host_memory))

        def find() -> tuple[Entry, bool] | None:
            complete = [one.entry for one in self.complete if self.rank < one.world]
            superseded = self.superseded
            entry = choose(complete, which, fallback.unreadable, superseded)
            return None if entry is None else (entry, entry in superseded)

        while (found := find()) is not None:
            entry, superseded = found
            one = next((one for one in self.complete if one.entry is entry), Complete(_ALONE, 1, entry, ((0,),)))
            parts = {rank: self.part(one.key, rank, staging, entry, superseded=superseded) for rank in range(one.world)}
            reader, used = CheckpointReader(parts, self.rank, whole=self.of_group), False
            try:
                with unreadable_errors():
                    await reader.hold()
                    if superseded:
                        await reader.own.verify()
                    result = await use(reader)
                fallback.succeeded(entry, superseded)
                used = True
                return result
            except UnreadableError as unreadable:
                if not is_exhausted(unreadable.error):
                    await self.look()
                    if not self._still_has(one, superseded):  # newer ones were committed
                        if time.monotonic() > since + LOCK_SECONDS:
                            text = f"the checkpoints change faster than they can be locked ({LOCK_SECONDS} s)"
                            raise ReadError(text) from unreadable
                        continue
                since = time.monotonic()  # it is damaged, and finding that out may have taken long
                fallback.failed(entry, superseded, unreadable, find)
            finally:
                if not (used and keep):
                    await reader.close()
        raise self.nothing(which)

    @property
    def superseded(self) -> tuple[Entry, ...]:
        """Superseded checkpoints of one process, which may not have been overwritten yet; none of a group."""
        # If all are rejected, the one that was superseded last was removed on purpose.
        if self.of_group or all(one.entry.rejected for one in self.complete):
            return ()
        return self.stores[0][1].superseded

    def _still_has(self, one: Complete, superseded: bool) -> bool:
        listed = self.superseded if superseded else [each.entry for each in self.complete if each.key == one.key]
        return any(entry.counter == one.entry.counter for entry in listed)

    @asynccontextmanager
    async def hold(self, which: Which, *, every: bool = False) -> AsyncIterator[CheckpointReader]:
        """Keep the newest checkpoint, or the requested one, locked until the context is left.

        ``every``: lock all its parts at once. Raises the errors of :meth:`read` without ``falls_back``.
        """

        async def use(checkpoint: CheckpointReader) -> CheckpointReader:
            if every:
                await checkpoint.manifests()
            return checkpoint

        checkpoint = await self.read(which, use, keep=True, falls_back=False)
        try:
            yield checkpoint
        finally:
            await checkpoint.close()

    def check_group(self, why: str) -> None:
        """Raise ValueError, with ``why``, if this is no folder of a group: for requests about the stores of ranks."""
        if not self.of_group:
            raise ValueError(f"{self.name} is no folder of a group's checkpoints: {why}")

    def check_one_process(self) -> None:
        """Raise StoreError if this is the folder of a group: for changes that only its ranks can make together."""
        if self.of_group:
            raise StoreError(
                f"{self.name} holds a group's checkpoints, which only its ranks can pin together: engine.pin() "
                "and engine.unpin() on all of them"
            )

    async def close(self) -> None:
        """Wait until every operation ended, stop the threads, and close the files."""
        await self.opened.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _seen_alone(identity: Identity, record: Record) -> SeenStore:
    parts = tuple(Part(_ALONE, 0, 1, True, entry) for entry in record.entries)
    pinned = tuple(part.key for part in parts if part.entry.pinned)
    return SeenStore(0, 0, identity.id_bytes, Applied(_ALONE, 0, pinned), parts)


async def open_place(
    path: str | os.PathLike[str],
    io: IO,
    host_memory: int | Auto = "auto",
    *,
    rank: int | None = None,
    default_rank: int | None = None,
) -> Place:
    """Open a folder or bucket for reading, and read its records. The caller closes the place.

    Args:
        path: Folder of a store or of a group, or the URL of a bucket.
        io: I/O backend, as for :class:`pccheck_async.CheckpointEngine`.
        host_memory: Most staging memory in bytes.
        rank: For a group: the rank whose part is read first; by default ``default_rank``, or 0.
        default_rank: Default of ``rank`` for a group; ignored for a store of one process.

    Raises the errors of :meth:`Place.look`; ValueError: ``rank`` is given for a folder that is no group's.
    """
    opened = await open_folder(path, io, host_memory)
    try:
        if isinstance(opened.medium, BucketMedium):
            grouped = await opened.medium.read_world() is not None
        else:
            grouped = isinstance(io, str) and is_group_folder(path)
        return await _place(path, opened, grouped, default_rank if grouped and rank is None else rank)
    except BaseException:
        await opened.close()
        raise


def read_place(path: str | os.PathLike[str]) -> Place:
    """Read the records of a folder or bucket, blocking this thread. Raises the errors of :meth:`Place.look`.

    The returned place is closed: no checkpoint can be read from it. A bucket is read on an event loop of its own.
    """
    if is_location(path):
        return call_once(_read_bucket(path))
    return at_once(path, lambda opened: _place(path, opened, is_group_folder(path)))


async def _read_bucket(path: str | os.PathLike[str]) -> Place:
    async with await open_place(path, "auto") as place:
        return place


async def _place(path: str | os.PathLike[str], opened: OpenMedium, of_group: bool, rank: int | None = None) -> Place:
    place = Place(path, opened, of_group=of_group, rank=rank)
    if of_group:
        await opened.medium.prepare(create=False)
    await place.look()
    return place


async def open_folder(path: str | os.PathLike[str], io: IO, host_memory: int | Auto = "auto") -> OpenMedium:
    """Open the medium of a folder or bucket, with its threads; use it as a context manager, or close it.

    Raises ValueError: ``host_memory`` holds no chunk; RefusedError: the URL is wrong, or obstore is not installed.
    """
    # No buffers are made here: how much memory there is decides nothing.
    decided = decide(StorageOptions(host_memory=host_memory), block_bytes=MIN_BLOCK, cores=share_of_cores(), memory=0)
    if is_location(path):
        objects = open_objects(path)
        io = lambda _path, _operations: BucketMedium(objects)  # noqa: E731
    return await open_medium(path, io, writers=decided.writers, copiers=decided.copiers)


def chunk_pool(block_bytes: int, host_memory: int | Auto = "auto") -> BufferPool:
    """Return a pool of staging buffers for chunks. Raises ValueError: ``host_memory`` holds no chunk."""
    cores, memory = share_of_machine()
    decided = decide(StorageOptions(host_memory=host_memory), block_bytes=block_bytes, cores=cores, memory=memory)
    return BufferPool(decided.host_memory, decided.chunk_bytes)
