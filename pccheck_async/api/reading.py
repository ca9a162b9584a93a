"""What moves bytes of one store without an engine: the backend, the medium, the threads and the staging buffers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from pccheck_async.engine import Auto, Decisions, EngineConfig, decide
from pccheck_async.format import Entry
from pccheck_async.format.manifest import MIN_BLOCK
from pccheck_async.group import OpenPart, PartReader, Parts, is_group_folder, list_group
from pccheck_async.medium.open_medium import IO, OpenMedium, open_medium
from pccheck_async.state import Wanted
from pccheck_async.store import StoreReader, UnreadableError, no_store
from pccheck_async.transfer import BufferPool, share_of_machine
from pccheck_async.transfer.copying import CopyBackend

__all__ = ["FullTensors", "open_folder", "open_reader", "staging_pool"]


def _decide(host_memory: int | Auto, block_bytes: int) -> Decisions:
    config = EngineConfig(host_memory=host_memory)
    cores, memory = share_of_machine()
    return decide(config, block_bytes=block_bytes, cores=cores, memory=memory)


async def open_folder(path: str | os.PathLike[str], io: IO, host_memory: int | Auto = "auto") -> OpenMedium:
    """Start what moves bytes of one folder; use it as a context manager, or close it.

    Raises ValueError where ``host_memory`` holds no chunk at all.
    """
    decided = _decide(host_memory, MIN_BLOCK)
    return await open_medium(path, io, writers=decided.writers, copiers=decided.copiers)


async def open_reader(
    path: str | os.PathLike[str],
    io: IO,
    host_memory: int | Auto = "auto",
    *,
    step: int | None = None,
    rank: int | None = None,
) -> StoreReader:
    """Open a store for reading, or in a group's folder the parts of one rank; close its ``opened``.

    Args:
        path: Folder of a store, or of a group.
        io: As for :class:`pccheck_async.CheckpointEngine`.
        host_memory: Most staging memory in bytes.
        step: The checkpoint that is to be read, by default the newest.
        rank: Whose part of a group's checkpoint is to be read, by default that of rank 0.

    Raises:
        NoCheckpointError: there is no store, or no complete checkpoint that the rank has a part of.
        CorruptStoreError: a record, or ``store.json``, is damaged.
        ValueError: ``rank`` for what is no group's folder.
    """
    listing, place = None, path
    if isinstance(io, str) and is_group_folder(path):
        listing = list_group(path)
        place = listing.folder_of_part(step, rank or 0)
    elif rank is not None:
        raise ValueError(f"{os.fspath(path)} is no folder of a group's checkpoints: rank={rank} means nothing there")
    opened = await open_folder(place, io, host_memory)
    try:
        reader = await StoreReader.open(opened)
        if reader is None:
            raise no_store(opened, place)
        if listing is None:
            return reader
        return PartReader(opened, reader.identity, reader.commit, rank=rank or 0, listing=listing)
    except BaseException:
        await opened.close()
        raise


def staging_pool(reader: StoreReader, host_memory: int | Auto) -> BufferPool:
    """Return buffers for the chunks of a store. Raises ValueError where ``host_memory`` holds no chunk."""
    decided = _decide(host_memory, reader.identity.block_bytes)
    return BufferPool(decided.host_memory, decided.chunk_bytes)


class FullTensors:
    """Reads tensors that lie on several ranks, from the parts of all of them. Used on the loop that reads; close it.

    Args:
        reader: Of the parts of one rank.
        entry: Of the checkpoint.
        own: That rank's part.
        backend: Copies.
        pool: Staging memory.
    """

    def __init__(self, reader: PartReader, entry: Entry, own: OpenPart, backend: CopyBackend, pool: BufferPool) -> None:
        self._others = reader.others(entry, backend, pool)
        self._parts = Parts({**self._others, reader.rank: own}, reader.rank, by_address=False)
        self._turn = asyncio.Lock()

    async def fill(self, wanted: Sequence[Wanted]) -> None:
        """Fill them. Raises DamagedError, ReadError; StateMismatchError: the parts do not make these tensors."""
        async with self._turn:
            try:
                await self._parts.match(wanted)
                await self._parts.fill()
            except UnreadableError as unreadable:
                raise unreadable.error from None
            self._parts.finish()

    async def aclose(self) -> None:
        """Let the other ranks' parts go."""
        for part in self._others.values():
            await part.close()
