"""Reading checkpoints without an engine, also beside a running writer of another process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pccheck_async.config import Auto, EngineConfig, decide
from pccheck_async.copying import HostCopy
from pccheck_async.errors import CorruptStoreError, NoCheckpointError, ReadError
from pccheck_async.info import CheckpointInfo, check_step
from pccheck_async.layout import COMMIT_NAME, Entry, Identity, Record, slot_name
from pccheck_async.loop import EngineLoop
from pccheck_async.machine import available_cores, available_memory
from pccheck_async.manifest import MIN_BLOCK
from pccheck_async.pool import BufferPool
from pccheck_async.progress import ReadProgress, reading_progress
from pccheck_async.reading import choose, pool_for, warn_damaged
from pccheck_async.records import read_identity, read_record
from pccheck_async.restore import read_manifest, read_payload
from pccheck_async.session import IO, Session, open_session
from pccheck_async.state.match import allocate
from pccheck_async.writer import File

__all__ = ["list_checkpoints", "load", "load_sync"]

T = TypeVar("T")
_POLL_SECONDS = 0.001
_LOCK_SECONDS = 30.0


async def load(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    keys: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    host_memory: int | Auto = "auto",
    io: IO = "auto",
    progress: ReadProgress | None = None,
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
        progress: Called from another thread with the bytes done and all bytes, after each chunk; quick.

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
        state: dict[str, Any] = await loop.run(_load(path, step, keys, device, host_memory, io, progress))
        return state


def load_sync(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    keys: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    host_memory: int | Auto = "auto",
    io: IO = "auto",
    progress: ReadProgress | None = None,
) -> dict[str, Any]:
    """Load a checkpoint, blocking (see :func:`load`)."""
    with _Reading() as loop:
        return loop.call(_load(path, step, keys, device, host_memory, io, progress))


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


@dataclass(slots=True)
class _Reader:
    """An open store, read-only."""

    session: Session
    identity: Identity
    commit: File

    @classmethod
    async def open(cls, session: Session) -> _Reader | None:
        identity = await read_identity(session.writer)
        if identity is None:
            return None
        await session.writer.prepare(create=False)
        try:
            commit = await session.writer.open(COMMIT_NAME, writable=False)
        except FileNotFoundError:
            raise CorruptStoreError(f"the store has no {COMMIT_NAME!r} file") from None
        return cls(session, identity, commit)

    async def record(self) -> Record:
        return await read_record(self.session.writer, self.commit, self.identity)

    async def lock(self, pick: Callable[[Record], Entry | None]) -> tuple[Entry, File | None] | None:
        """Lock the picked checkpoint's slot against reuse; no file where it is missing.

        A slot that is locked shared, and that a record read *after* locking still names, keeps its bytes: writers take
        only free slots, and pass over locked ones. Otherwise the record has moved on: start over.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + _LOCK_SECONDS
        writer = self.session.writer
        while True:
            entry = pick(await self.record())
            if entry is None:
                return None
            try:
                file = await writer.open(slot_name(entry.slot), writable=False)
            except FileNotFoundError:
                if _names(await self.record(), entry):
                    return entry, None
            else:
                if await writer.try_lock(file, shared=True) and _names(await self.record(), entry):
                    return entry, file
                await writer.close_file(file)
            if clock() > deadline:
                raise ReadError(f"the checkpoints change faster than they can be locked ({_LOCK_SECONDS} s)")
            await asyncio.sleep(_POLL_SECONDS)


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
        reader = await _Reader.open(session)
        return [entry.info for entry in (await reader.record()).entries] if reader else []

    return await _with_session(path, io, work, EngineConfig(writers=1))


async def _load(
    path: str | os.PathLike[str],
    step: int | None,
    keys: Sequence[str] | None,
    device: str | torch.device,
    host_memory: int | Auto,
    io: IO,
    progress: ReadProgress | None,
) -> dict[str, Any]:
    config = EngineConfig(host_memory=host_memory)
    step = check_step(step)

    async def work(session: Session) -> dict[str, Any]:
        reader = await _Reader.open(session)
        if reader is None:
            raise NoCheckpointError(f"{os.fspath(path)} holds no store")
        decided = decide(
            config, block_bytes=reader.identity.block_bytes, cores=available_cores(), memory=available_memory()
        )
        pool = BufferPool(decided.host_memory, decided.chunk_bytes)
        unreadable: set[int] = set()
        while True:
            locked = await reader.lock(lambda record: choose(record.entries, step, unreadable))
            if locked is None:
                raise NoCheckpointError(
                    f"{os.fspath(path)} holds no checkpoint" + ("" if step is None else f" of step {step}")
                )
            entry, file = locked
            try:
                return await _read(reader, entry, file, pool, keys, device, progress)
            except (CorruptStoreError, ReadError) as error:
                unreadable.add(entry.counter)
                older = choose((await reader.record()).entries, step, unreadable)
                if step is not None or older is None:
                    raise
                warn_damaged(entry, older, error)
            finally:
                if file is not None:
                    await session.writer.close_file(file)

    return await _with_session(path, io, work, config)


def _names(record: Record, entry: Entry) -> bool:
    """Whether a record still names this checkpoint; its metadata may hold NaN, which equals nothing."""
    return any((found.counter, found.slot) == (entry.counter, entry.slot) for found in record.entries)


async def _read(
    reader: _Reader,
    entry: Entry,
    file: File | None,
    pool: BufferPool,
    keys: Sequence[str] | None,
    device: str | torch.device,
    progress: ReadProgress | None,
) -> dict[str, Any]:
    if file is None:
        raise CorruptStoreError(f"{slot_name(entry.slot)}, which the newest record names, is missing")
    writer = reader.session.writer
    manifest = await read_manifest(writer, file, entry, reader.identity.block_bytes)
    loading = allocate(manifest, keys, torch.device(device))
    backend = HostCopy(reader.session.operations)
    advance = reading_progress(progress, sum(chunk.nbytes for chunk in manifest.chunks))
    await read_payload(writer, backend, pool_for(manifest, pool), file, manifest, loading.targets, advance=advance)
    state: dict[str, Any] = loading.finish()
    return state
