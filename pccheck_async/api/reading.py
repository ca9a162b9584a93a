"""What moves bytes of one store without an engine: the backend, the medium, the threads and the staging buffers."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pccheck_async.engine import Auto, Decisions, EngineConfig, decide
from pccheck_async.format.manifest import MIN_BLOCK
from pccheck_async.medium.open_medium import IO, Session, open_session
from pccheck_async.store import StoreReader, no_store
from pccheck_async.transfer import BufferPool, available_cores, available_memory

__all__ = ["folder_session", "open_reader", "staging_pool", "start_session"]


def _decide(host_memory: int | Auto, block_bytes: int) -> Decisions:
    config = EngineConfig(host_memory=host_memory)
    return decide(config, block_bytes=block_bytes, cores=available_cores(), memory=available_memory())


async def start_session(path: str | os.PathLike[str], io: IO, host_memory: int | Auto = "auto") -> Session:
    """Start what moves bytes of one folder. Raises ValueError where ``host_memory`` holds no chunk at all."""
    decided = _decide(host_memory, MIN_BLOCK)
    return await open_session(path, io, writers=decided.writers, copiers=decided.copiers)


@asynccontextmanager
async def folder_session(
    path: str | os.PathLike[str], io: IO, host_memory: int | Auto = "auto"
) -> AsyncIterator[Session]:
    """Give what moves bytes of one folder (see :func:`start_session`); its files are closed at the end."""
    session = await start_session(path, io, host_memory)
    try:
        yield session
    finally:
        await session.close()


async def open_reader(session: Session, path: str | os.PathLike[str]) -> StoreReader:
    """Open a store for reading. Raises NoCheckpointError where there is none, CorruptStoreError."""
    reader = await StoreReader.open(session)
    if reader is None:
        raise no_store(session, path)
    return reader


def staging_pool(reader: StoreReader, host_memory: int | Auto) -> BufferPool:
    """Return buffers for the chunks of a store. Raises ValueError where ``host_memory`` holds no chunk."""
    decided = _decide(host_memory, reader.identity.block_bytes)
    return BufferPool(decided.host_memory, decided.chunk_bytes)
