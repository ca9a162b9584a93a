"""Changing a store that no trainer has open: checkpoints are dropped, pinned, and copied into it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from pccheck_async.api import open_folder, open_reader
from pccheck_async.errors import DamagedError, NoCheckpointError, StoreError, StoreFullError, StoreLockedError
from pccheck_async.format import CheckpointInfo, Entry, align, check_name, crc32, describe_which, which_one, whole_step
from pccheck_async.format.manifest import encode
from pccheck_async.format.record import MOST_ENTRIES, slot_number
from pccheck_async.group import is_group_folder
from pccheck_async.medium.filesystem import slot_bytes
from pccheck_async.medium.open_medium import IO, OpenMedium, store_path
from pccheck_async.state import refuse_boxes
from pccheck_async.store import KeepAll, SlotLease, Store, open_store
from pccheck_async.transfer import aligned_buffer
from pccheck_async.upkeep.reading import LOCK_SECONDS, Held, Progress, Run, check_chunks, hold, run

__all__ = ["Removal", "copy_checkpoint", "pin_checkpoint", "remove_checkpoints"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Removal:
    """What was dropped.

    Attributes:
        removed: The checkpoints, newest first.
        freed_nbytes: Space on storage that came free; what a reader holds comes free with the next commit.
    """

    removed: tuple[CheckpointInfo, ...]
    freed_nbytes: int


def remove_checkpoints(
    path: str | os.PathLike[str],
    steps: Collection[int] = (),
    *,
    names: Collection[str] = (),
    force: bool = False,
    io: IO = "auto",
) -> Removal:
    """Drop every checkpoint of these steps, and those with these names, pinned or not, in one commit.

    As many slots are removed.

    Durability: when this returns they are gone also after a power failure.

    Args:
        path: Folder of a store.
        steps: All of them are there, or nothing is dropped.
        names: The same.
        force: Drop them also where no checkpoint is left then.
        io: As for :class:`pccheck_async.CheckpointEngine`.

    Raises:
        NoCheckpointError: there is no checkpoint of one of the steps, or with one of the names.
        StoreError: no checkpoint would be left.
        StoreLockedError: a trainer has the store open.
        StoreFailedError: the record could not be written; which of the two a restart finds is unknown.
    """
    wanted: set[int | str] = {*map(whole_step, steps), *map(check_name, names)}
    removed: list[Entry] = []

    def change(entries: tuple[Entry, ...]) -> list[Entry]:
        missing = wanted - {which for entry in entries for which in (entry.step, entry.name)}
        if missing:
            listed = " and none".join(sorted(map(describe_which, missing)))
            raise NoCheckpointError(f"{os.fspath(path)} holds no checkpoint{listed}; nothing was removed")
        kept = [entry for entry in entries if wanted.isdisjoint((entry.step, entry.name))]
        if not kept and not force:
            raise StoreError("no checkpoint would be left; nothing was removed (--force, force=True: remove them)")
        removed[:] = [entry for entry in entries if entry not in kept]
        return kept

    async def drop(store: Store) -> None:
        await store.amend(change)
        await store.slots.remove_surplus()

    before = slot_bytes(Path(path))
    _with_store(path, io, drop)
    return Removal(tuple(entry.info for entry in removed), max(0, before - slot_bytes(Path(path))))


def pin_checkpoint(path: str | os.PathLike[str], step: int, *, pinned: bool = True, io: IO = "auto") -> CheckpointInfo:
    """Keep the newest checkpoint of ``step`` whatever a trainer's rules say, or leave it to them again.

    Durability: when this returns the change survives power loss. Does nothing where it was so already.

    Raises:
        NoCheckpointError: there is none of that step.
        StoreLockedError: a trainer has the store open: use its ``engine.pin`` and ``engine.unpin``.
        StoreFailedError: the record could not be written.
    """
    number = whole_step(step)

    async def pin(store: Store) -> CheckpointInfo:
        return (await store.pin(number, pinned)).info

    return _with_store(path, io, pin)


def _with_store(path: str | os.PathLike[str], io: IO, work: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
    """Open an existing store for writing, and never make one."""
    if is_group_folder(path):
        raise StoreError(
            f"{os.fspath(path)} holds a group's checkpoints, which only its ranks can change together: engine.pin(), "
            "engine.unpin() and engine.remove() on all of them; keep_last and the other rules drop what is neither "
            "pinned nor kept"
        )

    async def change() -> T:
        reader = await open_reader(path, io)
        async with reader.opened as opened:
            committed = len((await reader.record()).entries)
            await opened.medium.close(reader.commit)
            slots = sum(1 for name in await opened.medium.names() if slot_number(name) is not None)
            free = max(0, slots - committed)  # as many stay free: the trainer reserved them
            try:
                store = await open_store(
                    opened.medium, path=path, retention=KeepAll(), max_in_flight=free, lock_timeout=LOCK_SECONDS
                )
            except StoreLockedError as error:
                raise StoreLockedError(
                    f"{error}. A trainer that has it open pins and removes with engine.pin(step), engine.unpin(step) "
                    "and engine.remove(step=step); what none of its rules keeps goes with its next commit"
                ) from None
            return await work(store)

    return run(change())


# -- copying


def copy_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    step: int | None = None,
    name: str | None = None,
    rank: int | None = None,
    pinned: bool | None = None,
    progress: Progress = lambda done, total: None,
    io: IO = "auto",
) -> CheckpointInfo:
    """Copy a checkpoint into another store, which is made where there is none. Nothing is dropped there.

    It becomes the newest checkpoint of ``target``. Step, time and metadata stay; the counter, too, where every counter
    there is smaller, and else it gets the next one. Every chunk is verified between reading and writing, in staging
    buffers of bounded size, past the page cache on both sides where the filesystems allow it.

    Durability: when this returns the copy survives power loss. On an error nothing was committed.

    Args:
        source: Store that has it, or the folder of a group: then one rank's part of a complete checkpoint is copied. A
            trainer may write to it meanwhile.
        target: Store that gets it; no trainer has it open.
        step: The newest checkpoint of this step; by default the newest of all.
        name: The checkpoint with this name instead.
        rank: Of a group: whose part. By default that of rank 0.
        pinned: Whether the copy is pinned; by default as it is in ``source``. One that is not pinned goes when a
            trainer that opens ``target`` commits, unless its rules keep it.
        progress: See :data:`Progress`.
        io: As for :class:`pccheck_async.CheckpointEngine`.

    Returns:
        The checkpoint as ``target`` has it.

    Raises:
        ValueError: both are one folder, ``target`` is a URL or begins with ``~``, or it has a checkpoint of that name.
        NoCheckpointError: there is none to copy.
        IncompleteCheckpointError: tensors of it lie on several ranks, and a copy would have one rank's boxes of them.
        CorruptStoreError: it is damaged (DamagedError), or ``target`` is.
        StoreLockedError: a trainer has ``target`` open.
        StoreFullError: there is no space for it, or a commit record has no room for it.
        ReadError, WriteError: a device failed.
    """
    which, target = which_one(step, name), store_path(target)
    with suppress(OSError):
        if os.path.samefile(source, target):
            raise ValueError(f"{os.fspath(source)} and {os.fspath(target)} are one folder: there is nothing to copy")

    async def copy() -> CheckpointInfo:
        async with hold(source, which, io, rank) as held, await open_folder(target, io) as opened:
            refuse_boxes(held.manifest.skeleton)
            return await _copy(held, opened, target, pinned, progress)

    return run(copy())


async def _copy(held: Held, opened: OpenMedium, path: str, pinned: bool | None, progress: Progress) -> CheckpointInfo:
    store = await open_store(opened.medium, path=path, retention=KeepAll(), max_in_flight=1, lock_timeout=LOCK_SECONDS)
    if len(store.committed.entries) >= MOST_ENTRIES:
        full = f"a commit record names {MOST_ENTRIES} checkpoints: remove some first"
        raise StoreFullError(errno.ENOSPC, full, path)
    if held.entry.name is not None and any(entry.name == held.entry.name for entry in store.committed.entries):
        raise ValueError(f"{path} has a checkpoint named {held.entry.name!r} already; remove it first")
    entry = structs.replace(
        held.entry,
        counter=max(held.entry.counter, store.committed.largest_counter + 1),
        pinned=held.entry.pinned if pinned is None else pinned,
    )
    manifest = structs.replace(held.manifest, counter=entry.counter)
    data = encode(manifest)
    block = store.block_bytes
    offset = align(manifest.payload_nbytes, block)
    lease = await store.reserve(offset + align(len(data), block))
    try:
        await _copy_payload(held, opened, lease, progress)
    except BaseException:
        await store.release(lease)
        raise
    padded = aligned_buffer(align(len(data), block))
    padded[: len(data)] = data
    facts = {"manifest_offset": offset, "manifest_nbytes": len(data), "manifest_checksum": crc32(data)}
    await store.commit(lease, structs.replace(entry, slot=lease.slot, **facts), [(offset, padded)])
    return entry.info


async def _copy_payload(held: Held, opened: OpenMedium, lease: SlotLease, progress: Progress) -> None:
    manifest, done = held.manifest, 0

    def damaged(index: int, reason: str) -> None:
        chunk = manifest.chunks[index]
        raise DamagedError(
            f"{held.file.name}: chunk {index} (bytes {chunk.offset} to {chunk.offset + chunk.nbytes}) of the "
            f"checkpoint of step {held.entry.step} is damaged ({reason}); nothing was copied"
        )

    async def write(run: Run, view: memoryview) -> None:
        # Where blocks of the target are larger than those of the source, a run may end inside one. Then the writer
        # goes on without O_DIRECT.
        nonlocal done
        await opened.medium.write(lease.file, run.offset, view)
        done += run.nbytes
        progress(done, manifest.payload_nbytes)

    await check_chunks(held.reader.opened, held.file, manifest, damaged=damaged, checked=write)
