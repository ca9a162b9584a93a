# SPDX-License-Identifier: Apache-2.0
"""Copying a checkpoint into another store, and a group's, with the parts of all ranks, into another group's folder."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from pccheck_async.bucket import Compressing, Compression, Draft, Owner, is_location, open_objects, send_part
from pccheck_async.engine import call_once
from pccheck_async.errors import DamagedError, StoreError, StoreFullError
from pccheck_async.format import CheckpointInfo, Entry, Key, Line, Run, Which, align, crc32, which_one
from pccheck_async.format.manifest import encode
from pccheck_async.format.record import IDENTITY_NAME, MOST_ENTRIES
from pccheck_async.group import (
    Applied,
    Part,
    Place,
    domain_of,
    link_to,
    members_digest,
    open_folder,
    open_place,
    pinned_keys,
    seen_stores,
    view_of,
    write_parts,
)
from pccheck_async.medium import Medium
from pccheck_async.medium.open_medium import IO, OpenMedium, store_path
from pccheck_async.state.restore.tree import refuse_boxes
from pccheck_async.store import (
    ChunkRun,
    PartReader,
    SlotLease,
    Store,
    Written,
    check_descriptors,
    rank_name,
)
from pccheck_async.transfer import aligned_buffer
from pccheck_async.upkeep.change import open_for_writing
from pccheck_async.upkeep.reading import Progress, counting

__all__ = ["copy_checkpoint"]

_TARGET_DESCRIPTORS = 3
"""Descriptors for each rank in the target: its folder, records and new slot; each of its other slots needs one, too."""

_LEAVE_OUT = "copy the parts of all ranks: leave the rank out"


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
    compression: Compression = None,
) -> CheckpointInfo:
    """Copy a checkpoint into another store, which is made if it does not exist.

    Nothing is dropped from ``target`` but a rejected checkpoint of the same name, as a new checkpoint drops it, too.

    The copy becomes the newest checkpoint of ``target``. Step, time and metadata stay; the counter, too, if every
    counter there is smaller, else the copy gets the next one. Every chunk is verified between reading and writing, in
    staging buffers of bounded size, past the page cache where the filesystems allow it. The copy takes one slot.

    From a group's folder the parts of all ranks are copied into the folder of a group, which is made if it does not
    exist; an existing one may have another number of ranks.

    Durability: when this returns the copy survives power loss. On an error nothing was committed, unless a record could
        not be flushed (StoreFailedError): then ``target`` may have the copy. A group's folder has the complete copy
        once the records of all ranks name their parts, even if the second round of records, which mark the parts as
        committed, fails. Parts that only some ranks' records name are no checkpoint; the next copy or run drops them.

    Args:
        source: Store of the checkpoint, folder of a group, or URL of a bucket. A trainer may write to it meanwhile.
        target: Store to copy into, which no trainer has open, folder of a group, or URL of an empty bucket or prefix.
        step: Copy the newest checkpoint of this step; by default the newest of all.
        name: Copy the checkpoint with this name instead.
        rank: In a group, copy only the part of this rank, into the store of one process.
        pinned: Whether the copy is pinned; by default as it is in ``source``. A copy that is not pinned is dropped when
            a trainer that opens ``target`` commits, unless its rules keep it.
        progress: Called with the bytes copied (:data:`Progress`).
        io: I/O backend, as for :class:`pccheck_async.CheckpointEngine`.
        compression: For the URL of a bucket: as for :class:`pccheck_async.Drain`.

    Returns:
        The checkpoint as ``target`` has it.

    Raises:
        ValueError: both are one folder, ``target`` begins with ``~``, or it has a checkpoint of that name that is not
            rejected. Or ``compression`` for a folder: trainers save into its slots past the page cache.
        NoCheckpointError: there is none to copy.
        IncompleteCheckpointError: with ``rank``, or from the folder of one rank: tensors lie on several ranks, and the
            copy would have one rank's boxes of them.
        CorruptStoreError: the checkpoint is damaged (DamagedError), or ``target`` is.
        StoreError: one of ``source`` and ``target`` is a group's folder, and the other the store of one process; or
            there is something in the bucket already.
        StoreLockedError: a trainer has ``target`` open.
        StoreFullError: there is no space for the copy, or a commit record has no room for it.
        ReadError, WriteError: a device failed; ReadError also where the ranks of a group save faster than all parts of
            one checkpoint can be locked.
    """
    which = which_one(step, name)
    if is_location(target):
        return call_once(_into_bucket(source, target, which, rank, pinned, progress, io, compression))
    if compression is not None:
        raise ValueError(f"compression is for a bucket, and {os.fspath(target)} is a folder")
    target = store_path(target)
    with suppress(OSError):
        if os.path.samefile(source, target):
            raise ValueError(f"{os.fspath(source)} and {os.fspath(target)} are one folder: there is nothing to copy")
    if Path(source).resolve() in Path(target).resolve().parents and not is_location(source):
        raise ValueError(f"{os.fspath(target)} lies inside {os.fspath(source)}: give a folder outside")

    async def copy() -> CheckpointInfo:
        async with (
            await open_place(source, io, rank=rank) as place,
            place.hold(which, every=rank is None) as checkpoint,
            await open_folder(target, io) as opened,
            AsyncExitStack() as stack,
        ):
            whole = checkpoint.whole and rank is None
            copying = _Copying(place, [*checkpoint.parts.values()] if whole else [checkpoint.own], pinned, progress)
            if whole:
                return await copying.into_group(Path(target), opened, stack)
            refuse_boxes(checkpoint.manifest.skeleton, *(() if rank is None else (_LEAVE_OUT,)))
            return await copying.into_store(target, opened, stack)

    return call_once(copy())


async def _into_bucket(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    which: Which,
    rank: int | None,
    pinned: bool | None,
    progress: Progress,
    io: IO,
    compression: Compression,
) -> CheckpointInfo:
    """Copy a checkpoint, or one rank's part of it, into an empty prefix of a bucket."""
    compressing = Compressing(compression)
    async with await open_place(source, io, rank=rank) as place, place.hold(which, every=rank is None) as checkpoint:
        identity, record = place.stores[checkpoint.own_rank]
        parts, line, members = [checkpoint.own], record.line, None
        if checkpoint.whole and rank is None:
            counter = checkpoint.own.entry.counter
            key = next(one.key for one in place.complete if one.key.counter == counter)
            parts, members = [*checkpoint.parts.values()], key.run.members
            if line is None or not line.accepts(*link_to(key)):  # readers know the run by the line
                line = Line(link_to(key).run, counter - 1)
        else:
            refuse_boxes(checkpoint.manifest.skeleton, *(() if rank is None else (_LEAVE_OUT,)))
        owner = Owner(open_objects(target, writes=True), identity.id_bytes, keep_last=1)
        owner.line = line
        await owner.take_over(empty=True)
        written = counting(progress, sum(part.manifest.payload_nbytes for part in parts))
        names = []
        for number, part in enumerate(parts):
            name = await send_part(Draft.of(owner, number), part, compressing=compressing, advance=written)
            entry = name.entry if pinned is None else structs.replace(name.entry, pinned=pinned)
            names.append(name._replace(entry=entry))
        await owner.commit(names, members)
        nbytes = sum(name.entry.nbytes for name in names)
        return replace(names[0].entry.info, nbytes=nbytes, tiers=("remote",))


def _check_room(entry: Entry, there: Sequence[Entry], path: str | os.PathLike[str]) -> None:
    """Raise StoreFullError or ValueError if ``entry`` cannot be committed beside the checkpoints ``there``."""
    if len(there) >= MOST_ENTRIES:
        full = f"a commit record names {MOST_ENTRIES} checkpoints: remove some first"
        raise StoreFullError(errno.ENOSPC, full, os.fspath(path))
    if entry.name is not None and any(other.name == entry.name and not other.rejected for other in there):
        raise ValueError(f"{os.fspath(path)} has a checkpoint named {entry.name!r} already; remove it first")


class _Copying:
    """Copies all parts of a checkpoint, or one, into another place. The parts are held.

    Args:
        source: The place of the checkpoint.
        parts: The parts to copy, in the order of their ranks in the target.
        pinned: Whether the copy is pinned; None: as in the source.
        progress: Called with the bytes of all parts.
    """

    def __init__(self, source: Place, parts: Sequence[PartReader], pinned: bool | None, progress: Progress) -> None:
        self._source, self._parts, self._pinned = source, parts, pinned
        self._written = counting(progress, sum(part.manifest.payload_nbytes for part in parts))

    async def _write(self, part: PartReader, store: Store, counter: int) -> Written:
        """Write a part's payload into a new slot; return that with the manifest, yet unwritten, for ``counter``."""
        manifest = structs.replace(part.manifest, counter=counter)
        data, block = encode(manifest), store.block_bytes
        offset = align(manifest.payload_nbytes, block)
        lease = await store.reserve(offset + align(len(data), block))
        try:
            await self._write_payload(part, store.medium, lease)
        except BaseException:
            await store.release(lease)
            raise
        padded = aligned_buffer(align(len(data), block))
        padded[: len(data)] = data
        entry = structs.replace(
            part.entry,
            counter=counter,
            pinned=part.entry.pinned if self._pinned is None else self._pinned,
            slot=lease.slot,
            manifest_offset=offset,
            manifest_nbytes=len(data),
            manifest_checksum=crc32(data),
        )
        return Written(lease, entry, [(offset, padded)])

    async def _write_payload(self, part: PartReader, medium: Medium, lease: SlotLease) -> None:
        def damaged(index: int, reason: str, _: object) -> None:
            chunk = part.manifest.chunks[index]
            raise DamagedError(
                f"{part.file.name}: chunk {index} (bytes {chunk.offset} to {chunk.offset + chunk.nbytes}) of the "
                f"checkpoint of step {part.entry.step} is damaged ({reason}); nothing was copied"
            )

        async def write(run: ChunkRun, view: memoryview) -> None:
            # Where blocks of the target are larger than those of the source, a run may end inside one. Then the writer
            # goes on without O_DIRECT.
            await medium.write(lease.file, run.offset, view)
            self._written(run.nbytes)

        await part.verify(damaged, write)

    async def into_store(self, path: str, opened: OpenMedium, stack: AsyncExitStack) -> CheckpointInfo:
        """Copy the only part to the store of one process, and commit it."""
        (part,) = self._parts
        store = await open_for_writing(stack, opened, path, None, in_flight=1)
        _check_room(part.entry, store.committed.entries, path)
        one = await self._write(part, store, max(part.entry.counter, store.committed.largest_counter + 1))
        await store.commit(one)
        return one.entry.info

    async def into_group(self, target: Path, opened: OpenMedium, stack: AsyncExitStack) -> CheckpointInfo:
        """Copy the parts of all ranks to a group's folder, and commit them by the group's protocol.

        All parts are prepared, and only then marked committed. The remains of a copy that was cut short are provably no
        checkpoint, and are dropped.
        """
        if (target / IDENTITY_NAME).exists():
            raise StoreError(
                f"{target} holds the checkpoints of one process, and {self._source.path} those of a group: copy into "
                "another folder, or the part of one rank alone (--rank, rank=)"
            )
        parts = self._parts
        there = (len(list((target / rank_name(rank)).glob("slot-*"))) for rank in range(len(parts)))
        check_descriptors(sum(there) + _TARGET_DESCRIPTORS * len(parts), "copying")
        domain_of(target)
        stores = [await open_for_writing(stack, opened, target, rank, in_flight=1) for rank in range(len(parts))]
        return await self._into_stores(stores, target)

    async def _into_stores(self, stores: Sequence[Store], target: Path) -> CheckpointInfo:
        """Copy the parts to the ranks' stores, which are locked, and commit them."""
        parts = self._parts
        seen = {store.rank: store for store in seen_stores(target)}
        view = view_of(list(seen.values()), [0], [])
        if view.error is not None:
            raise StoreError(f"{target}: {view.error}")
        dead = {one.key for one in view.incomplete if one.proven}
        rejected = {one.key for one in view.complete if one.entry.rejected}
        there = [[part for part in seen[rank].parts if part.key not in dead] for rank in range(len(stores))]
        for named in there:  # a checkpoint rejected on one rank is so on all
            marked = [part.entry.as_rejected() if part.key in rejected else part.entry for part in named]
            _check_room(parts[0].entry, marked, target)
        counter = max(parts[0].entry.counter, view.base + 1)
        members = members_digest((rank, store.file.identity.id_bytes) for rank, store in enumerate(stores))
        made = Run(view.number, secrets.randbits(64), members)
        async with AsyncExitStack() as stack:  # on an error slots are free again that no record may name
            leased: list[AsyncExitStack] = []
            written: list[Written] = []
            for read, store in zip(parts, stores, strict=True):
                one = await self._write(read, store, counter)
                leased.append(await stack.enter_async_context(AsyncExitStack()))
                leased[-1].push_async_callback(store.release, one.lease, one.entry.manifest_offset)
                written.append(one)
            for one, store in zip(written, stores, strict=True):
                await store.make_data_durable(one.lease, one.rest)
                await store.medium.unlock(one.lease.file)  # all writes ended: readers of a record may lock the slot
            entry = written[0].entry
            pins = pinned_keys(seen.values()) | ({Key(counter, made)} if entry.pinned else set())
            applied = Applied(made, 1, tuple(sorted(pins)))
            for committed in (False, True):
                # Crash: parts that are called committed, of a checkpoint that never was complete, count as lost.
                for rank, (one, store) in enumerate(zip(written, stores, strict=True)):
                    leased[rank].pop_all()  # the record's from here on
                    part = Part(made, rank, len(parts), committed, one.entry)
                    await write_parts(store, (part, *there[rank]), applied)
        return replace(entry.info, nbytes=sum(part.entry.nbytes for part in parts))
