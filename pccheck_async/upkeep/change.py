# SPDX-License-Identifier: Apache-2.0
"""Changes of a store that no trainer has open: dropping, pinning and rejecting checkpoints."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path

from pccheck_async.bucket import is_location
from pccheck_async.engine import call_once
from pccheck_async.errors import NoCheckpointError, StoreError, StoreLockedError, in_shell
from pccheck_async.format import (
    CheckpointInfo,
    Entry,
    Key,
    check_name,
    describe_which,
    formerly,
    the_one,
    there_are,
    whole_step,
)
from pccheck_async.format.record import FORMAT_VERSION, GROUP_VERSION, MIN_BLOCK, slot_name, slot_number
from pccheck_async.group import Place, drop_checkpoints, mark_rejected, open_place
from pccheck_async.medium.files import Files
from pccheck_async.medium.filesystem import slot_bytes
from pccheck_async.medium.open_medium import IO, OpenMedium
from pccheck_async.store import KeepAll, Retention, Store, StoreReader, open_store, rank_name
from pccheck_async.upkeep.bucket_change import remove_from_bucket
from pccheck_async.upkeep.reading import LOCK_SECONDS, holds_other
from pccheck_async.upkeep.salvage import find_in_slot

__all__ = [
    "Removal", "open_for_writing", "pin_checkpoint", "reject_checkpoints", "removable", "remove_checkpoints",
    "to_remove", "unpin_checkpoint",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Removal:
    """The result of dropping checkpoints.

    Attributes:
        removed: The dropped checkpoints, newest first.
        freed_nbytes: Bytes of storage that were freed; the next commit frees the space of slots that readers hold.
    """

    removed: tuple[CheckpointInfo, ...]
    freed_nbytes: int


@formerly("step", after=1, renamed={"steps": "step", "names": "name"})
def remove_checkpoints(
    path: str | os.PathLike[str],
    *,
    step: int | Collection[int] = (),
    name: str | Collection[str] = (),
    counter: int | Collection[int] = (),
    force: bool = False,
    take_over: bool = False,
    io: IO = "auto",
) -> Removal:
    """Drop every checkpoint of these steps, and those with these names or counters, pinned or not, in one commit.

    The same number of slots is removed. In the folder of a group that does not run, checkpoints are dropped on all
    ranks that have their folders in it, also checkpoints that lack parts of such ranks. A disk that a bucket was copied
    from keeps its own, and its next engine copies those that are newer than all that are left in the bucket.

    Durability: when this returns the change survives power loss.

    Args:
        path: Folder of a store, or of a group, or the URL of a bucket.
        step: A step, or several; nothing is dropped unless there are checkpoints of all of them.
        name: A name, or several, likewise.
        counter: A counter, or several, likewise; it distinguishes two checkpoints of one step.
        force: Drop them even if no checkpoint is left then, or a slot holds a newer one that no record names.
        take_over: For a bucket: the run whose drain owns it has ended. If it has not, it copies nothing more.
        io: I/O backend, as for :class:`pccheck_async.CheckpointEngine`.

    Raises:
        NoCheckpointError: there is no checkpoint of one of the steps, or with one of the names or counters.
        StoreError: no checkpoint would be left, or a slot holds a newer one; or for a bucket ``take_over`` is not set.
        StoreLockedError: a trainer has the store open, or takes the bucket over.
        StoreFailedError: the record could not be written; a restart finds either the new or the old one. ReadError,
            WriteError, RefusedError for a bucket.
        TypeError: neither ``step`` nor ``name`` nor ``counter`` is given.
    """
    if is_location(path):
        gone, nbytes = call_once(
            remove_from_bucket(
                path, lambda place: _chosen(place, step, name, counter), force=force, take_over=take_over, io=io
            )
        )
        return Removal(tuple(gone), nbytes)
    removed: list[CheckpointInfo] = []

    async def drop() -> int:
        async with _writing(path, io, by_ranks_alone=False) as (place, stores):
            await place.look()  # only now, when none of the records can change any more
            folders = [place.path / place.folder(rank) for rank in place.stores]
            before, keys = sum(map(slot_bytes, folders)), _chosen(place, step, name, counter)
            removed[:] = keys.values()
            doomed = [one.entry for one in place.complete if one.key in keys]
            if not force and doomed:
                if not place.of_group:
                    await _check_contents(place, doomed)
                Retention.check_left(
                    [one.entry for one in place.complete if one.key not in keys], [one.entry for one in place.complete]
                )
            for store in stores:
                await drop_checkpoints(store, {*keys})
            return max(0, before - sum(map(slot_bytes, folders)))

    freed_nbytes = call_once(drop())
    return Removal(tuple(removed), freed_nbytes)


def _chosen(
    place: Place,
    step: int | Collection[int],
    name: str | Collection[str],
    counter: int | Collection[int],
) -> dict[Key, CheckpointInfo]:
    there = removable(place)
    return {there[info]: info for info in to_remove(place.name, list(there), step, name, counter)}


def removable(place: Place) -> dict[CheckpointInfo, Key]:
    """Return the checkpoints of a place that may be removed, newest first.

    In a group these include checkpoints of which parts are missing although the stores of all their ranks are here, as
    a removal that was cut short leaves them. Parts in other folders are not seen, and would stay.
    """
    found = [(one.key, place.info(one)) for one in place.complete]
    for one in place.incomplete:
        if one.missing == len(one.ranks) and place.stores.keys() >= {*one.ranks}:
            parts = place.parts(one.key)
            found.append((one.key, parts[min(parts)].entry.info))
    return {info: key for key, info in sorted(found, key=lambda each: each[0], reverse=True)}


async def _check_contents(place: Place, removed: Sequence[Entry]) -> None:
    """Raise StoreError if the slot of one of ``removed`` holds another, newer checkpoint that no record names."""
    newest = max(one.entry.counter for one in place.complete)
    for entry in removed:
        if not holds_other(place.path / slot_name(entry.slot), entry):
            continue
        found = await find_in_slot(place.opened, entry.slot, MIN_BLOCK, lambda done, total: None)
        if found.entry is not None and found.entry.counter > newest:
            raise StoreError(
                f"{found.file} holds a newer checkpoint, of step {found.entry.step}, in the place of that of step "
                f"{entry.step}, and no record names it: {in_shell('recover', place.path, '--search')} shows what is "
                "there; nothing was removed (--force, force=True: remove it)"
            )


def to_remove(
    path: str | os.PathLike[str],
    infos: Sequence[CheckpointInfo],
    step: int | Collection[int],
    name: str | Collection[str],
    counter: int | Collection[int],
) -> list[CheckpointInfo]:
    """Return the checkpoints of a store that :func:`remove_checkpoints` drops. Raises NoCheckpointError, TypeError."""
    steps: Collection[int] = step if isinstance(step, Collection) else (step,)
    counters: Collection[int] = counter if isinstance(counter, Collection) else (counter,)
    names: Collection[str] = (name,) if isinstance(name, str) else name
    wanted: set[int | str] = {*map(whole_step, steps), *map(check_name, names)}
    numbers = {*map(index, counters)}
    if not wanted and not numbers:
        raise TypeError("give step= or name=, or counter=")
    missing = sorted(map(describe_which, wanted - {which for info in infos for which in (info.step, info.name)}))
    missing += [f" of counter {each}" for each in sorted(numbers - {info.counter for info in infos})]
    if missing:
        there = there_are(next(iter(wanted), None), infos)
        none = " and none".join(missing)
        raise NoCheckpointError(f"{os.fspath(path)} holds no checkpoint{none}{there}; nothing was removed")
    return [info for info in infos if not wanted.isdisjoint((info.step, info.name)) or info.counter in numbers]


@formerly("step", after=1)
def unpin_checkpoint(
    path: str | os.PathLike[str], *, step: int | None = None, name: str | None = None, io: IO = "auto"
) -> CheckpointInfo:
    """Unpin all checkpoints of a step, or the one with a name, so that rules may drop them; return the newest.

    Durability: when this returns the change survives power loss. Does nothing if it was so already.

    Args:
        path: Folder of a store.
        step: The step of the checkpoints.
        name: The name of the checkpoint, instead of a step.
        io: I/O backend, as for :class:`pccheck_async.CheckpointEngine`.

    Raises:
        NoCheckpointError: there is none of this step, or with this name.
        StoreError: it is the folder of a group.
        StoreLockedError: a trainer has the store open: use its ``engine.unpin``.
        StoreFailedError: the record could not be written.
        TypeError: neither ``step`` nor ``name`` is given.
        ValueError: both are given.
    """
    return _set_pin(path, the_one(step, name), False, io)


@formerly("step", after=1, pinned=unpin_checkpoint)
def pin_checkpoint(
    path: str | os.PathLike[str], *, step: int | None = None, name: str | None = None, io: IO = "auto"
) -> CheckpointInfo:
    """Keep a checkpoint even if a trainer's rules would drop it.

    Durability: when this returns the change survives power loss. Does nothing if it was so already.

    Args:
        path: Folder of a store.
        step: Pin the newest checkpoint of this step.
        name: Pin the checkpoint with this name instead.
        io: I/O backend, as for :class:`pccheck_async.CheckpointEngine`.

    Raises:
        NoCheckpointError: there is none of this step, or with this name.
        StoreError: it is the folder of a group.
        StoreFullError: too many are pinned; a commit record names 64.
        StoreLockedError: a trainer has the store open: use its ``engine.pin``.
        StoreFailedError: the record could not be written.
        TypeError: neither ``step`` nor ``name`` is given.
        ValueError: both are given.
    """
    return _set_pin(path, the_one(step, name), True, io)


def _set_pin(path: str | os.PathLike[str], which: int | str, pinned: bool, io: IO) -> CheckpointInfo:
    async def pin() -> CheckpointInfo:
        async with _writing(path, io) as (_, (store,)):
            store.committed.line = store.committed.record.line  # checkpoints in memory count as before
            return (await store.pin(which, pinned)).info

    return call_once(pin())


@formerly("step", after=1)
def reject_checkpoints(
    path: str | os.PathLike[str], *, step: int | None = None, name: str | None = None, io: IO = "auto"
) -> list[CheckpointInfo]:
    """Reject a checkpoint and every newer one: restores pass them over (:meth:`pccheck_async.CheckpointEngine.reject`).

    In the folder of a group that does not run, they are rejected on all ranks that have their folders in it.

    Durability: when this returns the change survives power loss.

    Args:
        path: Folder of a store, or of a group.
        step: The first bad step.
        name: The name of the first bad checkpoint, instead of a step.
        io: I/O backend, as for :class:`pccheck_async.CheckpointEngine`.

    Returns:
        The rejected checkpoints, newest first.

    Raises:
        NoCheckpointError: there is none from ``step`` on, or with this name, that is not rejected.
        IncompleteCheckpointError: all checkpoints of a group have parts in folders of other nodes.
        StoreError: none would be left to restore; nothing was rejected.
        StoreLockedError: a trainer has the store open: use its ``engine.reject``.
        StoreFailedError: the record could not be written.
        TypeError: neither ``step`` nor ``name`` is given.
        ValueError: both are given.
    """
    which = the_one(step, name)

    async def reject() -> list[CheckpointInfo]:
        async with _writing(path, io, by_ranks_alone=False) as (place, stores):
            await place.look()  # only now, when none of the records can change any more
            if not place.complete:
                raise place.nothing(None)
            others = {one.key.counter: (one.step, None) for one in place.incomplete}
            entries = [one.entry for one in place.complete]
            chosen = Retention.reject(entries, which, others, max([*others, *(entry.counter for entry in entries)]))
            for store in stores:
                await mark_rejected(store, chosen)
            await place.look()
            return [info for info in place.infos if info.counter in chosen]

    return call_once(reject())


@asynccontextmanager
async def _writing(
    path: str | os.PathLike[str], io: IO, *, by_ranks_alone: bool = True
) -> AsyncIterator[tuple[Place, list[Store]]]:
    """Open all existing stores of a place for writing.

    Raises StoreError for a group's folder if only its ranks may make the change (``by_ranks_alone``).
    """
    async with AsyncExitStack() as stack:
        place = await stack.enter_async_context(await open_place(path, io))
        if by_ranks_alone:
            place.check_one_process()
        if not place.stores:
            raise place.nothing(None)
        try:
            stores = [await open_for_writing(stack, place.opened, path, place.named(rank)) for rank in place.stores]
        except StoreLockedError as error:
            raise StoreLockedError(
                f"{error}. A trainer that has it open pins, removes and rejects with engine.pin(step=...), "
                "engine.unpin, engine.remove and engine.reject; what none of its rules "
                "keeps goes with its next commit"
            ) from None
        yield place, stores


async def open_for_writing(
    stack: AsyncExitStack,
    opened: OpenMedium,
    path: str | os.PathLike[str],
    rank: int | None,
    in_flight: int | None = None,
) -> Store:
    """Open the store of one process in a folder, or of a rank in a group's; its commits drop no checkpoints.

    Args:
        stack: Closes a rank's files when it is left; the files of ``opened`` stay open.
        opened: The medium of the folder.
        path: The folder.
        rank: The rank in a group's folder; None for the store of one process.
        in_flight: Checkpoints that will be written at a time; by default as many as there are free slots, which the
            trainer reserved.

    Raises the errors of :func:`open_store`.
    """
    version = FORMAT_VERSION
    if rank is not None:
        path, version = Path(path) / rank_name(rank), GROUP_VERSION
        opened = replace(opened, medium=Files(path, opened.operations))
        stack.push_async_callback(opened.medium.close)
    if in_flight is None:
        found = await StoreReader.newest(opened)
        slots = sum(1 for name in await opened.medium.names() if slot_number(name) is not None)
        in_flight = max(0, slots - len(found[1].entries)) if found else 0
    return await open_store(
        opened.medium,
        path=path,
        retention=KeepAll(),
        max_in_flight=in_flight,
        lock_timeout=LOCK_SECONDS,
        version=version,
    )
