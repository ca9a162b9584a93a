"""Changing a store that no trainer has open: checkpoints are dropped, pinned and rejected."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pccheck_async.api import open_reader
from pccheck_async.errors import NoCheckpointError, StoreError, StoreLockedError
from pccheck_async.format import CheckpointInfo, Entry, check_name, describe_which, whole_step
from pccheck_async.format.record import slot_number
from pccheck_async.group import is_group_folder, reject_in_group
from pccheck_async.medium.filesystem import slot_bytes
from pccheck_async.medium.open_medium import IO
from pccheck_async.store import KeepAll, Retention, Store, open_store
from pccheck_async.upkeep.reading import LOCK_SECONDS, run

__all__ = ["Removal", "pin_checkpoint", "reject_checkpoints", "remove_checkpoints"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Removal:
    """The result of dropping checkpoints.

    Attributes:
        removed: The checkpoints, newest first.
        freed_nbytes: Space on storage that came free; that of slots held by readers comes free with the next commit.
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
        if not force:
            Retention.check_left(kept, entries)
        removed[:] = [entry for entry in entries if entry not in kept]
        return kept

    async def drop(store: Store) -> None:
        await store.amend(change)
        await store.slots.remove_surplus()

    before = slot_bytes(Path(path))
    _with_store(path, io, drop)
    return Removal(tuple(entry.info for entry in removed), max(0, before - slot_bytes(Path(path))))


def pin_checkpoint(path: str | os.PathLike[str], step: int, *, pinned: bool = True, io: IO = "auto") -> CheckpointInfo:
    """Keep the newest checkpoint of ``step`` even if a trainer's rules would drop it, or leave it to them again.

    Durability: when this returns the change survives power loss. Does nothing if it was so already.

    Raises:
        NoCheckpointError: there is none of that step.
        StoreLockedError: a trainer has the store open: use its ``engine.pin`` and ``engine.unpin``.
        StoreFailedError: the record could not be written.
    """
    number = whole_step(step)

    async def pin(store: Store) -> CheckpointInfo:
        return (await store.pin(number, pinned)).info

    return _with_store(path, io, pin)


def reject_checkpoints(path: str | os.PathLike[str], step: int, *, io: IO = "auto") -> tuple[CheckpointInfo, ...]:
    """Reject every checkpoint from ``step`` on (see :meth:`pccheck_async.CheckpointEngine.reject`).

    In the folder of a group that does not run, on all ranks that have their folders in it.

    Durability: when this returns restores pass them over also after a power failure.

    Returns:
        The rejected checkpoints, newest first.

    Raises:
        NoCheckpointError: there is none from ``step`` on that is not rejected.
        IncompleteCheckpointError: of a group, parts of all are in folders of other nodes.
        StoreError: none would be left to restore; nothing was rejected.
        StoreLockedError: a trainer has the store open: use its ``engine.reject``.
        StoreFailedError: the record could not be written.
    """
    number = whole_step(step)
    if isinstance(io, str) and is_group_folder(path):
        return run(reject_in_group(path, number, LOCK_SECONDS))

    async def reject(store: Store) -> tuple[CheckpointInfo, ...]:
        rejected = await store.reject(number, {}, store.committed.largest_counter)
        return tuple(entry.info for entry in rejected)

    return _with_store(path, io, reject)


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
                    f"{error}. A trainer that has it open pins, removes and rejects with engine.pin(step), "
                    "engine.unpin(step), engine.remove(step=step) and engine.reject(step); what none of its rules "
                    "keeps goes with its next commit"
                ) from None
            return await work(store)

    return run(change())
