# SPDX-License-Identifier: Apache-2.0
"""Reading from the tier in memory without an engine, also beside the one that writes there. Nothing here writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from msgspec import structs

from pccheck_async.engine import Auto, MemoryTier, check_own_folder, memory_folder, memory_root, on_the_line
from pccheck_async.errors import CheckpointError, NoCheckpointError
from pccheck_async.format import Entry, Identity, Record, Tier, Which, check_tier, describe_which, there_are
from pccheck_async.group.place import Place, open_folder, open_place, read_place
from pccheck_async.medium.open_medium import IO, OpenMedium
from pccheck_async.store import at_once

__all__ = ["check_read_tier", "open_memory_place", "open_tier", "read_memory_place"]


class MemoryPlace(Place):
    """The store in memory that belongs to one on disk, which says which of its checkpoints count.

    Args:
        path: The folder of the store on disk.
        opened: The medium of the folder in memory.
    """

    def __init__(self, path: str | os.PathLike[str], opened: OpenMedium) -> None:
        super().__init__(path, opened, of_group=False)
        self._on_disk: set[int] = set()

    async def _newest(self) -> tuple[Identity, Record] | None:
        found = await super()._newest()
        # Read last: a run's line is on disk before its first checkpoint is in memory.
        _, on_disk = await self.opened.operations.call(_store_on_disk, self.path)
        self._on_disk = {entry.counter for entry in on_disk.entries}
        if found is None:
            return None
        identity, record = found
        entries = on_the_line(record.entries, record.line, on_disk.line)
        return identity, structs.replace(record, entries=tuple(entries))

    @property
    def superseded(self) -> tuple[Entry, ...]:
        return ()

    def tiers(self, counter: int) -> tuple[Tier, ...]:
        return ("memory", "disk") if counter in self._on_disk else ("memory",)

    def nothing(self, which: Which) -> CheckpointError:
        if not self.infos:
            return _nothing(self.path)
        there = there_are(which, self.infos)
        return NoCheckpointError(f"{self.path} has no checkpoint{describe_which(which)} in memory{there}")


def _store_on_disk(path: str | os.PathLike[str]) -> tuple[Identity, Record]:
    place = read_place(path)
    if place.of_group:
        raise NoCheckpointError(f"{path} holds a group's checkpoints, of which none are in memory")
    if not place.stores:
        raise place.nothing(None)
    return place.stores[0]


def _nothing(path: str | os.PathLike[str]) -> NoCheckpointError:
    return NoCheckpointError(
        f"{path} has no checkpoint in memory: an engine with memory=MemoryTier() saves there, and removes it when it "
        "is closed (MemoryTier(keep_after_close=True) leaves it)"
    )


def _folder(path: str | os.PathLike[str], tier: MemoryTier) -> Path:
    """Return the folder in memory of the store at ``path``.

    Raises NoCheckpointError if there is none; StoreError if it may be another user's.
    """
    identity, _ = _store_on_disk(path)
    folder = memory_folder(memory_root(tier), Path(path), identity.store_id)
    if not os.path.lexists(folder):
        raise _nothing(path)
    check_own_folder(folder)
    return folder


async def open_memory_place(
    path: str | os.PathLike[str], tier: MemoryTier, host_memory: int | Auto = "auto"
) -> MemoryPlace:
    """Open the tier in memory of the store at ``path``, and read its records; close it.

    Raises NoCheckpointError, StoreError, and the errors of :meth:`Place.look`.
    """
    folder = _folder(path, tier)
    opened = await open_folder(folder, "auto", host_memory)
    place = MemoryPlace(path, opened)
    try:
        await place.look()
    except BaseException:
        await opened.close()
        raise
    return place


def check_read_tier(tier: Tier | MemoryTier, rank: int | None) -> Literal["disk"] | MemoryTier:
    """Return the tier to read from, as users give it. Raises ValueError for other names, or a ``rank`` in memory."""
    if not isinstance(tier, MemoryTier):
        if check_tier(tier) == "disk":
            return "disk"
        tier = MemoryTier()
    if rank is not None:
        raise ValueError(f"rank={rank} means nothing in memory, where only one process saves")
    return tier


async def open_tier(
    path: str | os.PathLike[str],
    tier: Literal["disk"] | MemoryTier,
    io: IO,
    host_memory: int | Auto = "auto",
    *,
    rank: int | None = None,
) -> Place:
    """Open the folder at ``path``, or the tier in memory of it (see :func:`open_place`, :func:`open_memory_place`)."""
    if tier == "disk":
        return await open_place(path, io, host_memory, rank=rank)
    return await open_memory_place(path, tier, host_memory)


def read_memory_place(path: str | os.PathLike[str], tier: MemoryTier) -> MemoryPlace:
    """Read the records on this thread. Raises the errors of :func:`open_memory_place`; the place is closed."""

    async def read(opened: OpenMedium) -> MemoryPlace:
        place = MemoryPlace(path, opened)
        await place.look()
        return place

    return at_once(_folder(path, tier), read)
