# SPDX-License-Identifier: Apache-2.0
"""Reading from the memory tier without an engine, also while one writes there. Nothing in this module writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from msgspec import structs

from pccheck_async.engine import Auto, MemoryTier, check_own_folder, memory_folder, memory_root
from pccheck_async.engine import on_the_line as entries_on_the_line
from pccheck_async.errors import CheckpointError, NoCheckpointError
from pccheck_async.format import Entry, Identity, Reach, Record, Tier, Which, check_tier, describe_which, there_are
from pccheck_async.format.record import GROUP_NAME
from pccheck_async.group.folder import read_stores, seen_store, stored_domain
from pccheck_async.group.parts import SeenStore, on_the_line
from pccheck_async.group.place import Place, open_folder, open_place, read_place
from pccheck_async.group.view import line_in
from pccheck_async.medium.open_medium import IO, OpenMedium
from pccheck_async.store import at_once, is_group_folder

__all__ = ["check_read_tier", "open_memory_place", "open_tier", "read_memory_place"]


class MemoryPlace(Place):
    """The store in memory that belongs to a store on disk, or the stores of a group's ranks in memory.

    The line on disk decides which checkpoints are valid. Of a group only checkpoints are complete that have all their
    parts in the memory of this machine.

    Args:
        path: The folder of the store on disk, or of the group.
        opened: The medium of the folder in memory.
        of_group: Whether the folder in memory is a group's.
        rank: The rank whose part is read first, as for :class:`Place`.
    """

    def __init__(
        self, path: str | os.PathLike[str], opened: OpenMedium, *, of_group: bool, rank: int | None = None
    ) -> None:
        super().__init__(path, opened, of_group=of_group, rank=rank)
        self._on_disk: set[int] = set()

    async def _newest(self) -> tuple[Identity, Record] | None:
        found = await super()._newest()
        # Read last: a run's line is on disk before its first checkpoint is in memory.
        on_disk = await self._read_disk()
        if found is None:
            return None
        identity, record = found
        entries = entries_on_the_line(record.entries, record.line, on_disk.stores[0][1].line)
        return identity, structs.replace(record, entries=tuple(entries))

    async def _read_ranks(self) -> tuple[dict[int, tuple[Identity, Record]], dict[int, SeenStore]]:
        stores = await read_stores(self.opened, Path(self.opened.path), passes_over=True)
        on_disk = await self._read_disk()
        line = line_in([seen_store(rank, *found) for rank, found in on_disk.stores.items()])
        seen = on_the_line([seen_store(rank, *found) for rank, found in stores.items()], line)
        return stores, {store.rank: store for store in seen}

    async def _read_disk(self) -> Place:
        place: Place = await self.opened.operations.call(_place_on_disk, self.path)
        self._on_disk = {one.entry.counter for one in place.complete}
        return place

    @property
    def superseded(self) -> tuple[Entry, ...]:
        return ()

    def tiers(self, counter: int) -> tuple[Reach, ...]:
        return ("memory", "disk") if counter in self._on_disk else ("memory",)

    def nothing(self, which: Which) -> CheckpointError:
        if not self.infos:
            return _nothing(self.path)
        there = there_are(which, self.infos)
        return NoCheckpointError(f"{self.path} has no checkpoint{describe_which(which)} in memory{there}")


def _place_on_disk(path: str | os.PathLike[str]) -> Place:
    place = read_place(path)
    if not place.stores:
        raise place.nothing(None)
    return place


def _nothing(path: str | os.PathLike[str]) -> NoCheckpointError:
    return NoCheckpointError(
        f"{path} has no checkpoint in memory: an engine with memory=MemoryTier() saves there, and removes it when it "
        "is closed (MemoryTier(keep_after_close=True) leaves it)"
    )


def _folder(path: str | os.PathLike[str], tier: MemoryTier) -> Path:
    """Return the folder in memory of the store, or the group, at ``path``.

    Raises NoCheckpointError: there is none; StoreError: it may be another user's.
    """
    place, root = _place_on_disk(path), memory_root(tier)
    if place.of_group:
        folder = memory_folder(root, Path(path), stored_domain(Path(path)) or "", GROUP_NAME)
    else:
        folder = memory_folder(root, Path(path), place.identity.store_id)
    if not os.path.lexists(folder):
        raise _nothing(path)
    check_own_folder(folder)
    return folder


async def open_memory_place(
    path: str | os.PathLike[str], tier: MemoryTier, host_memory: int | Auto = "auto", *, rank: int | None = None
) -> MemoryPlace:
    """Open the memory tier of the store at ``path``, and read its records. The caller closes the place.

    Raises NoCheckpointError, StoreError, and the errors of :meth:`Place.look`.
    """
    folder = _folder(path, tier)
    opened = await open_folder(folder, "auto", host_memory)
    try:
        return await _look(path, opened, folder, rank)
    except BaseException:
        await opened.close()
        raise


async def _look(path: str | os.PathLike[str], opened: OpenMedium, folder: Path, rank: int | None = None) -> MemoryPlace:
    place = MemoryPlace(path, opened, of_group=is_group_folder(folder), rank=rank)
    if place.of_group:
        await opened.medium.prepare(create=False)
    await place.look()
    return place


def check_read_tier(tier: Tier | MemoryTier) -> Literal["disk"] | MemoryTier:
    """Return the tier to read from, given as users do: "memory" becomes ``MemoryTier()``. Raises ValueError."""
    if isinstance(tier, MemoryTier):
        return tier
    return "disk" if check_tier(tier) == "disk" else MemoryTier()


async def open_tier(
    path: str | os.PathLike[str],
    tier: Literal["disk"] | MemoryTier,
    io: IO,
    host_memory: int | Auto = "auto",
    *,
    rank: int | None = None,
) -> Place:
    """Open the store at ``path``, or its memory tier (see :func:`open_place`, :func:`open_memory_place`)."""
    if tier == "disk":
        return await open_place(path, io, host_memory, rank=rank)
    return await open_memory_place(path, tier, host_memory, rank=rank)


def read_memory_place(path: str | os.PathLike[str], tier: MemoryTier) -> MemoryPlace:
    """Read the records in memory, blocking this thread; return the place, closed.

    Raises the errors of :func:`open_memory_place`.
    """
    folder = _folder(path, tier)
    return at_once(folder, lambda opened: _look(path, opened, folder))
