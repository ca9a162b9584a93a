# SPDX-License-Identifier: Apache-2.0
"""Reading checkpoints without an engine, also beside a running writer of another process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from pccheck_async.engine import Auto, EngineLoop, MemoryTier, call_once
from pccheck_async.format import CheckpointInfo, Tier, Which, explained, which_one
from pccheck_async.group import check_read_tier, open_place, open_tier, read_place
from pccheck_async.medium.open_medium import IO, check_io
from pccheck_async.state import Restoration, allocate
from pccheck_async.state.restore.tree import leaves, select
from pccheck_async.store import CheckpointReader, warn_of_others
from pccheck_async.telemetry import ReadProgress, reading_progress

__all__ = ["list_checkpoints", "load", "load_sync"]

Device: TypeAlias = str | torch.device | Mapping[str, Any] | Callable[[torch.UntypedStorage, str], Any]


@explained
async def load(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    name: str | None = None,
    rank: int | None = None,
    keys: Sequence[str] | None = None,
    device: Device = "cpu",
    allow_pickle: bool = False,
    host_memory: int | Auto = "auto",
    io: IO = "auto",
    progress: ReadProgress | None = None,
    tier: Tier | MemoryTier = "disk",
) -> dict[str, Any]:
    """Load a checkpoint into new tensors. Works while a writer of another process commits.

    Args:
        path: Folder of a store, or of a group: then one rank's part of a complete checkpoint is loaded,
            and tensors that lie on several ranks in full.
        step: The step to load; by default the newest checkpoint, or the next older one if that is damaged (with a
            warning).
        name: The name of the checkpoint, as given to ``checkpoint(name=...)``, instead of its step.
        rank: The rank of a group whose part is loaded. By default 0; the loaded tensors are then compared with those of
            the other ranks, and a warning names those that differ.
        keys: Paths of leaves, or of their containers, as in ``pccheck show`` and errors, or globs
            (``"model.*"``); only matches are read. If two leaves would have one name, a dot inside a key is escaped in
            their paths (:mod:`pccheck_async.state.paths`).
        device: The place for tensors: a device, or a dict or a function as for ``torch.load(map_location=)``. A
            checkpoint does not record the devices of tensors, so all count as saved on "cpu": a dict is looked up with
            the key "cpu", and a function is called with each storage (on the host) and "cpu", and returns the storage
            to use, or None to use that one.
        allow_pickle: Unpickle values that were pickled by an engine with ``allow_pickle=True``. That runs code that the
            checkpoint names: give it only if you trust its writer. Without it such a checkpoint is refused.
        host_memory: Most staging memory in bytes.
        io: As for :class:`pccheck_async.CheckpointEngine`.
        progress: Called from another thread with the bytes done and all bytes, after each chunk that is read; must be
            quick.
        tier: "memory": a checkpoint in the memory of this machine (give the engine's
            :class:`pccheck_async.MemoryTier` if it has a ``path``), for a group the part of ``rank`` that is there.

    Returns:
        The app state as nested dicts, lists and values of the types that were saved; ``Stateful`` objects as their
        ``state_dict()``.

    Cancellation: ends once every read ended.

    Raises:
        NoCheckpointError: there is no checkpoint, or not the requested one, or it has no such ``rank``.
        IncompleteCheckpointError: no checkpoint of the group has the parts of all ranks; or ``path`` is the folder of
            one rank, and a tensor lies on several.
        DamagedError: the checkpoint is damaged, and there is no older one (or ``step`` or ``name`` was given).
        CorruptStoreError: this version, or this torch, cannot read it.
        StateMismatchError: one of ``keys`` matches nothing, or is ambiguous, the name of several leaves.
        UnsupportedStateError: a value in it is pickled, and ``allow_pickle`` is not given, or unpickling fails.
        ReadError: the device failed.
        RuntimeError: torch has no such ``device``.
        StoreError: the folder in memory may be another user's.
        ValueError: ``rank`` for a folder that is no group's; both ``step`` and ``name``.
    """
    work = _load(path, which_one(step, name), rank, keys, device, allow_pickle, host_memory, io, progress, tier)
    async with EngineLoop("pccheck-read") as loop:
        restoration = await loop.run(work)
    state: dict[str, Any] = restoration.finish()  # here: pickled values run code
    return state


@explained
def load_sync(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    name: str | None = None,
    rank: int | None = None,
    keys: Sequence[str] | None = None,
    device: Device = "cpu",
    allow_pickle: bool = False,
    host_memory: int | Auto = "auto",
    io: IO = "auto",
    progress: ReadProgress | None = None,
    tier: Tier | MemoryTier = "disk",
) -> dict[str, Any]:
    """Load a checkpoint into new tensors; blocks meanwhile. Works while a writer of another process commits.

    Args:
        path: Folder of a store, or of a group: then one rank's part of a complete checkpoint is loaded,
            and tensors that lie on several ranks in full.
        step: The step to load; by default the newest checkpoint, or the next older one if that is damaged (with a
            warning).
        name: The name of the checkpoint, as given to ``checkpoint(name=...)``, instead of its step.
        rank: The rank of a group whose part is loaded. By default 0; the loaded tensors are then compared with those of
            the other ranks, and a warning names those that differ.
        keys: Paths of leaves, or of their containers, as in ``pccheck show`` and errors, or globs
            (``"model.*"``); only matches are read. If two leaves would have one name, a dot inside a key is escaped in
            their paths (:mod:`pccheck_async.state.paths`).
        device: The place for tensors: a device, or a dict or a function as for ``torch.load(map_location=)``. A
            checkpoint does not record the devices of tensors, so all count as saved on "cpu": a dict is looked up with
            the key "cpu", and a function is called with each storage (on the host) and "cpu", and returns the storage
            to use, or None to use that one.
        allow_pickle: Unpickle values that were pickled by an engine with ``allow_pickle=True``. That runs code that the
            checkpoint names: give it only if you trust its writer. Without it such a checkpoint is refused.
        host_memory: Most staging memory in bytes.
        io: As for :class:`pccheck_async.SyncCheckpointEngine`.
        progress: Called from another thread with the bytes done and all bytes, after each chunk; must be quick.
        tier: "memory": a checkpoint in the memory of this machine (give the engine's
            :class:`pccheck_async.MemoryTier` if it has a ``path``), for a group the part of ``rank`` that is there.

    Returns:
        The app state as nested dicts, lists and values of the types that were saved; ``Stateful`` objects as their
        ``state_dict()``.

    Interrupts: a KeyboardInterrupt is raised once every read ended.

    Raises:
        NoCheckpointError: there is no checkpoint, or not the requested one, or it has no such ``rank``.
        IncompleteCheckpointError: no checkpoint of the group has the parts of all ranks; or ``path`` is the folder of
            one rank, and a tensor lies on several.
        DamagedError: the checkpoint is damaged, and there is no older one (or ``step`` or ``name`` was given).
        CorruptStoreError: this version, or this torch, cannot read it.
        StateMismatchError: one of ``keys`` matches nothing, or is ambiguous, the name of several leaves.
        UnsupportedStateError: a value in it is pickled, and ``allow_pickle`` is not given, or unpickling fails.
        ReadError: the device failed.
        RuntimeError: torch has no such ``device``.
        StoreError: the folder in memory may be another user's.
        ValueError: ``rank`` for a folder that is no group's; both ``step`` and ``name``.
    """
    work = _load(path, which_one(step, name), rank, keys, device, allow_pickle, host_memory, io, progress, tier)
    restoration = call_once(work)
    state: dict[str, Any] = restoration.finish()  # here: pickled values run code
    return state


def list_checkpoints(path: str | os.PathLike[str], *, io: IO = "python") -> list[CheckpointInfo]:
    """Return the committed checkpoints, newest first; ``[]`` if there is no (complete) store.

    For a group's folder only complete checkpoints, of which all ranks have their parts, with the bytes of all ranks.
    Reads only commit records, on this thread (if ``io`` is a name), writes nothing, and works while a writer runs.

    Raises:
        CorruptStoreError: there is a store, but no valid commit record.
        StoreError: the records of a group's ranks contradict each other.
        ReadError: the device failed.
    """
    check_io(io)
    if isinstance(io, str):
        return read_place(path).infos

    async def read() -> list[CheckpointInfo]:
        async with await open_place(path, io) as place:
            return place.infos

    return call_once(read())


async def _load(
    path: str | os.PathLike[str],
    which: Which,
    rank: int | None,
    keys: Sequence[str] | None,
    device: Device,
    allow_pickle: bool,
    host_memory: int | Auto,
    io: IO,
    progress: ReadProgress | None,
    tier: Tier | MemoryTier,
) -> Restoration:
    """Read a checkpoint into new memory. The caller then builds the state (``finish``), on its own thread."""
    async with await open_tier(path, check_read_tier(tier), io, host_memory, rank=rank) as place:

        async def read(checkpoint: CheckpointReader) -> Restoration:
            advance = reading_progress(progress, checkpoint.manifest.payload_nbytes)
            await checkpoint.merge()
            loading = allocate(checkpoint.manifest, keys, device, allow_pickle=allow_pickle)
            await checkpoint.fill(loading.targets, advance)
            if rank is None:
                skeleton = checkpoint.manifest.skeleton
                read = {name for name, _ in leaves(skeleton if keys is None else select(skeleton, keys))}
                warn_of_others(await checkpoint.differing(read.__contains__, is_needed=False), path)
            loading.move()
            return loading

        return await place.read(which, read, host_memory)
