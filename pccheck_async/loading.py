"""Reading checkpoints without an engine, also beside a running writer of another process."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import torch

from pccheck_async.config import Auto, EngineConfig, decide
from pccheck_async.copying import HostCopy
from pccheck_async.errors import NoCheckpointError
from pccheck_async.info import CheckpointInfo, check_step
from pccheck_async.layout import Entry
from pccheck_async.loop import EngineLoop
from pccheck_async.machine import available_cores, available_memory
from pccheck_async.manifest import MIN_BLOCK, Manifest
from pccheck_async.pool import BufferPool
from pccheck_async.reader import Reader
from pccheck_async.reading import pool_for
from pccheck_async.restore import read_payload
from pccheck_async.session import IO, Session, open_session
from pccheck_async.state.match import allocate
from pccheck_async.writer import File

__all__ = ["list_checkpoints", "load", "load_sync"]

T = TypeVar("T")


async def load(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    keys: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    host_memory: int | Auto = "auto",
    io: IO = "auto",
) -> dict[str, Any]:
    """Load a checkpoint into new tensors. Works while a writer of another process commits.

    Args:
        path: Folder of a store.
        step: The step to load; by default the newest checkpoint, or the next older one where that is damaged (with a
        warning).
        keys: Globs over leaf paths (``"model.*"``); only what matches is read.
        device: Where the tensors go.
        host_memory: Most staging memory in bytes.
        io: As for :class:`pccheck_async.CheckpointEngine`.

    Returns:
        The app state as nested dicts, lists and values of the types that were saved; ``Stateful`` objects as their
        ``state_dict()``.

    Cancellation: ends once every read ended.

    Raises:
        NoCheckpointError: there is none, or none of ``step``.
        CorruptStoreError: damaged, and nothing older to fall back to (or ``step`` was given).
        ReadError: the device failed.
    """
    with _Reading() as loop:
        state: dict[str, Any] = await loop.run(_load(path, step, keys, device, host_memory, io))
        return state


def load_sync(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    keys: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    host_memory: int | Auto = "auto",
    io: IO = "auto",
) -> dict[str, Any]:
    """Load a checkpoint, blocking (see :func:`load`)."""
    with _Reading() as loop:
        return loop.call(_load(path, step, keys, device, host_memory, io))


def list_checkpoints(path: str | os.PathLike[str], *, io: IO = "python") -> list[CheckpointInfo]:
    """Return the committed checkpoints, newest first; ``[]`` where there is no (complete) store.

    Reads only the commit record, writes nothing, and works while a writer runs.

    Raises:
        CorruptStoreError: there is a store, but no valid record.
        ReadError: the device failed.
    """
    with _Reading() as loop:
        return loop.call(_list(path, io))


class _Reading:
    """A loop for the length of one call."""

    def __enter__(self) -> EngineLoop:
        self._loop = EngineLoop("pccheck-read")
        return self._loop

    def __exit__(self, *_: object) -> None:
        self._loop.stop()


async def _with_session(
    path: str | os.PathLike[str], io: IO, work: Callable[[Session], Coroutine[Any, Any, T]], config: EngineConfig
) -> T:
    decided = decide(config, block_bytes=MIN_BLOCK, cores=available_cores(), memory=available_memory())
    session = await open_session(path, io, writers=decided.writers, copiers=decided.copiers)
    try:
        return await work(session)
    finally:
        await session.close()


async def _list(path: str | os.PathLike[str], io: IO) -> list[CheckpointInfo]:
    async def work(session: Session) -> list[CheckpointInfo]:
        reader = await Reader.open(session)
        return [entry.info for entry in (await reader.record()).entries] if reader else []

    return await _with_session(path, io, work, EngineConfig(writers=1))


async def _load(
    path: str | os.PathLike[str],
    step: int | None,
    keys: Sequence[str] | None,
    device: str | torch.device,
    host_memory: int | Auto,
    io: IO,
) -> dict[str, Any]:
    config = EngineConfig(host_memory=host_memory)
    step = check_step(step)

    async def work(session: Session) -> dict[str, Any]:
        reader = await Reader.open(session)
        if reader is None:
            raise NoCheckpointError(f"{os.fspath(path)} holds no store")
        decided = decide(
            config, block_bytes=reader.identity.block_bytes, cores=available_cores(), memory=available_memory()
        )
        pool = BufferPool(decided.host_memory, decided.chunk_bytes)
        backend = HostCopy(session.operations)

        async def read(_: Entry, file: File, manifest: Manifest) -> dict[str, Any]:
            loading = allocate(manifest, keys, torch.device(device))
            await read_payload(session.writer, backend, pool_for(manifest, pool), file, manifest, loading.targets)
            state: dict[str, Any] = loading.finish()
            return state

        return await reader.read(path, step, read)

    return await _with_session(path, io, work, config)
