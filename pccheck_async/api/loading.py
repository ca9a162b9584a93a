"""Reading checkpoints without an engine, also beside a running writer of another process."""

from __future__ import annotations

import os
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import torch

from pccheck_async.api.reading import open_folder, open_reader, staging_pool
from pccheck_async.engine import Auto, EngineLoop
from pccheck_async.format import CheckpointInfo, Entry, check_step
from pccheck_async.format.manifest import Manifest
from pccheck_async.medium import File
from pccheck_async.medium.files import Files
from pccheck_async.medium.open_medium import IO, OpenMedium, check_io
from pccheck_async.state import allocate
from pccheck_async.store import StoreReader, pool_for, read_payload
from pccheck_async.telemetry import ReadProgress, reading_progress
from pccheck_async.transfer.copying import CopyBackend
from pccheck_async.transfer.operations.python import OperationsAtOnce

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
    progress: ReadProgress | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into new tensors. Works while a writer of another process commits.

    Args:
        path: Folder of a store.
        step: The step to load; by default the newest checkpoint, or the next older one if that is damaged (with a
            warning).
        keys: Paths of leaves, or of what contains them, as ``pccheck show`` and errors write them, or globs
            (``"model.*"``); only what matches is read. A path may be written without the escapes of dots inside keys
            (:mod:`pccheck_async.state.paths`) if only one leaf is called so.
        device: Where the tensors go.
        host_memory: Most staging memory in bytes.
        io: As for :class:`pccheck_async.CheckpointEngine`.
        progress: Called from another thread with the bytes done and all bytes, after each chunk; must be quick.

    Returns:
        The app state as nested dicts, lists and values of the types that were saved; ``Stateful`` objects as their
        ``state_dict()``.

    Cancellation: ends once every read ended.

    Raises:
        NoCheckpointError: there is none, or none of ``step``.
        DamagedError: it is damaged, and there is no older one (or ``step`` was given).
        CorruptStoreError: this version, or this torch, does not understand it.
        StateMismatchError: one of ``keys`` names nothing, or without its escapes several leaves.
        ReadError: the device failed.
        RuntimeError: torch has no such ``device``.
    """
    async with EngineLoop("pccheck-read") as loop:
        return await loop.run(_load(path, step, keys, device, host_memory, io, progress))


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
    with EngineLoop("pccheck-read") as loop:
        return loop.call(_load(path, step, keys, device, host_memory, io, progress))


def list_checkpoints(path: str | os.PathLike[str], *, io: IO = "python") -> list[CheckpointInfo]:
    """Return the committed checkpoints, newest first; ``[]`` where there is no (complete) store.

    Reads only the commit record, on this thread, writes nothing, and works while a writer runs.

    Raises:
        CorruptStoreError: there is a store, but no valid commit record.
        ReadError: the device failed.
    """
    check_io(io)
    if isinstance(io, str):
        operations = OperationsAtOnce()
        return _at_once(_list(OpenMedium(operations, Files(path, operations), "")))
    with EngineLoop("pccheck-read") as loop:
        return loop.call(_list_of_medium(path, io))


async def _list(opened: OpenMedium) -> list[CheckpointInfo]:
    """List, and close the files: the threads, where there are any, are left to the caller."""
    try:
        reader = await StoreReader.open(opened)
        return [entry.info for entry in (await reader.record()).entries] if reader else []
    finally:
        await opened.medium.close()


async def _list_of_medium(path: str | os.PathLike[str], io: IO) -> list[CheckpointInfo]:
    async with await open_folder(path, io) as opened:
        return await _list(opened)


def _at_once(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that awaits only :class:`OperationsAtOnce`, with no loop around it."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError("it waits for something")


async def _load(
    path: str | os.PathLike[str],
    step: int | None,
    keys: Sequence[str] | None,
    device: str | torch.device,
    host_memory: int | Auto,
    io: IO,
    progress: ReadProgress | None,
) -> dict[str, Any]:
    step = check_step(step)
    async with await open_folder(path, io, host_memory) as opened:
        reader = await open_reader(opened, path)
        pool, backend = staging_pool(reader, host_memory), CopyBackend(opened.operations)

        async def read(_: Entry, file: File, manifest: Manifest) -> dict[str, Any]:
            loading = allocate(manifest, keys, torch.device(device))
            advance = reading_progress(progress, sum(chunk.nbytes for chunk in manifest.chunks))
            buffers = pool_for(manifest, pool)
            await read_payload(opened.medium, backend, buffers, file, manifest, loading.targets, advance=advance)
            state: dict[str, Any] = loading.finish()
            return state

        return await reader.read(path, step, read)
