"""Access to one store without an engine: the backend, the medium, the threads and the staging buffers."""

from __future__ import annotations

import os

from pccheck_async.engine import Auto, EngineConfig, decide
from pccheck_async.format import Which
from pccheck_async.format.record import MIN_BLOCK
from pccheck_async.group import GroupReader, is_group_folder, list_group
from pccheck_async.medium.open_medium import IO, OpenMedium, open_medium
from pccheck_async.store import Staging, StoreReader, no_store
from pccheck_async.transfer import BufferPool, share_of_cores, share_of_machine

__all__ = ["chunk_pool", "open_folder", "open_reader", "staging_for"]


async def open_folder(path: str | os.PathLike[str], io: IO, host_memory: int | Auto = "auto") -> OpenMedium:
    """Open the medium of one folder, with its threads; use it as a context manager, or close it.

    Raises ValueError if ``host_memory`` holds no chunk at all.
    """
    # No buffers are made here: how much memory there is decides nothing.
    decided = decide(EngineConfig(host_memory=host_memory), block_bytes=MIN_BLOCK, cores=share_of_cores(), memory=0)
    return await open_medium(path, io, writers=decided.writers, copiers=decided.copiers)


async def open_reader(
    path: str | os.PathLike[str],
    io: IO,
    host_memory: int | Auto = "auto",
    *,
    which: Which = None,
    rank: int | None = None,
) -> StoreReader:
    """Open a store for reading, or in a group's folder the parts of one rank; close its ``opened``.

    Args:
        path: Folder of a store, or of a group.
        io: As for :class:`pccheck_async.CheckpointEngine`.
        host_memory: Most staging memory in bytes.
        which: The checkpoint that is to be read, by default the newest.
        rank: The rank whose part of a group's checkpoint is to be read; by default 0.

    Raises:
        NoCheckpointError: there is no store, or no complete checkpoint that the rank has a part of.
        CorruptStoreError: a record, or ``store.json``, is damaged.
        ValueError: ``rank`` for a folder that is no group's.
    """
    if not (isinstance(io, str) and is_group_folder(path)):
        if rank is not None:
            raise ValueError(
                f"{os.fspath(path)} is no folder of a group's checkpoints: rank={rank} means nothing there"
            )
        opened = await open_folder(path, io, host_memory)
        try:
            reader = await StoreReader.open(opened)
            if reader is None:
                raise no_store(opened, path)
            return reader
        except BaseException:
            await opened.close()
            raise
    listing = list_group(path)
    place = listing.folder_of_part(which, rank or 0)
    opened = await open_folder(path, io, host_memory)
    try:
        await opened.medium.prepare(create=False)
        found = await StoreReader.open(opened, f"{place.name}/")
        if found is None:
            raise no_store(opened, place)
        await opened.medium.close(found.commit)  # the records of all ranks are read anew each time
        return GroupReader(opened, found.identity, found.commit, found.folder, rank=rank or 0, listing=listing)
    except BaseException:
        await opened.close()
        raise


def staging_for(reader: StoreReader, host_memory: int | Auto) -> Staging:
    """Return buffers for the chunks of a store. Raises ValueError if ``host_memory`` holds no chunk."""
    return Staging(chunk_pool(reader.identity.block_bytes, host_memory))


def chunk_pool(block_bytes: int, host_memory: int | Auto = "auto") -> BufferPool:
    """Return buffers for chunks. Raises ValueError if ``host_memory`` holds no chunk."""
    cores, memory = share_of_machine()
    decided = decide(EngineConfig(host_memory=host_memory), block_bytes=block_bytes, cores=cores, memory=memory)
    return BufferPool(decided.host_memory, decided.chunk_bytes)
