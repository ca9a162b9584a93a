"""What moves bytes of one store without an engine: the backend, the medium, the threads and the staging buffers."""

from __future__ import annotations

import os

from pccheck_async.engine import Auto, Decisions, EngineConfig, decide
from pccheck_async.format.manifest import MIN_BLOCK
from pccheck_async.medium.open_medium import IO, OpenMedium, open_medium
from pccheck_async.store import StoreReader, no_store
from pccheck_async.transfer import BufferPool, available_cores, available_memory

__all__ = ["open_folder", "open_reader", "staging_pool"]


def _decide(host_memory: int | Auto, block_bytes: int) -> Decisions:
    config = EngineConfig(host_memory=host_memory)
    return decide(config, block_bytes=block_bytes, cores=available_cores(), memory=available_memory())


async def open_folder(path: str | os.PathLike[str], io: IO, host_memory: int | Auto = "auto") -> OpenMedium:
    """Start what moves bytes of one folder; use it as a context manager, or close it.

    Raises ValueError where ``host_memory`` holds no chunk at all.
    """
    decided = _decide(host_memory, MIN_BLOCK)
    return await open_medium(path, io, writers=decided.writers, copiers=decided.copiers)


async def open_reader(opened: OpenMedium, path: str | os.PathLike[str]) -> StoreReader:
    """Open a store for reading. Raises NoCheckpointError where there is none, CorruptStoreError."""
    reader = await StoreReader.open(opened)
    if reader is None:
        raise no_store(opened, path)
    return reader


def staging_pool(reader: StoreReader, host_memory: int | Auto) -> BufferPool:
    """Return buffers for the chunks of a store. Raises ValueError where ``host_memory`` holds no chunk."""
    decided = _decide(host_memory, reader.identity.block_bytes)
    return BufferPool(decided.host_memory, decided.chunk_bytes)
