# SPDX-License-Identifier: Apache-2.0
"""Describing a checkpoint, finding lost or newer slots by their manifests, and counting the bytes that are read."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from pccheck_async.engine import call_once
from pccheck_async.errors import is_exhausted, is_forbidden, readable
from pccheck_async.format import CheckpointInfo, Entry, crc32, which_one
from pccheck_async.format.manifest import ChunkEntry
from pccheck_async.format.record import COMMIT_NAME, newest_record, slot_name
from pccheck_async.group import Place, open_place
from pccheck_async.medium.open_medium import IO, OpenMedium
from pccheck_async.medium.status_file import read_status
from pccheck_async.state.restore.parts import stored_boxes
from pccheck_async.store import CheckpointReader, NewerSlot, StoreReader, at_once, may_lack_the_newest, newer_slots
from pccheck_async.upkeep.listing import Listing, ShardBox, ShardedLeaf, StoredLeaf, list_leaves

__all__ = [
    "LOCK_SECONDS",
    "Description",
    "Progress",
    "counting",
    "describe_checkpoint",
    "forbidden_files",
    "holds_other",
    "lost_parts",
    "lost_records",
    "lost_slots",
    "newer_in_slots",
    "replaced_slots",
]

_LOOKS = 10
LOCK_SECONDS = 1.0
"""Seconds to wait for a lock: the last requests of a killed writer hold it for a moment, a trainer while it runs."""


def lost_slots(place: Place) -> dict[int, str]:
    """Return the faults of the slots of complete checkpoints, in words, by counter. Only manifests are read.

    A slot has a fault if its file is missing, too short, or not regular, or holds other bytes in place of the manifest.
    """
    faults = dict[int, list[str]]()
    for (counter, _), fault in lost_parts(place).items():
        faults.setdefault(counter, []).append(fault)
    return {counter: ", ".join(each) for counter, each in faults.items()}


def lost_parts(place: Place) -> dict[tuple[int, int], str]:
    """Return the faults of :func:`lost_slots` by counter and rank, each with the slot's name."""
    faults = dict[tuple[int, int], str]()
    if place.is_bucket:
        return {}  # reading says what is lost
    for one in place.complete:
        for rank, part in place.parts(one.key).items():
            name = os.path.join(place.folder(rank), slot_name(part.entry.slot))
            if fault := _slot_fault(place.path / name, part.entry):
                faults[one.key.counter, rank] = f"{name} {fault}"
    return faults


def replaced_slots(place: Place) -> set[int]:
    """Return the counters of checkpoints of one process whose slots hold other bytes in place of their manifests.

    Such slots are damaged; or the record is older than the slots, as in a backup that was put back in part, and the
    slots may hold newer checkpoints.
    """
    found = ((one.entry, place.path / slot_name(one.entry.slot)) for one in place.complete if not place.of_group)
    return {entry.counter for entry, path in found if holds_other(path, entry)}


def holds_other(path: Path, entry: Entry) -> bool:
    """Whether a slot, a regular file of sufficient length, holds other bytes in place of the manifest of ``entry``."""
    end = entry.manifest_offset + entry.manifest_nbytes
    return not path.is_symlink() and path.is_file() and path.stat().st_size >= end and bool(_slot_fault(path, entry))


def newer_in_slots(place: Place) -> list[NewerSlot]:
    """Return the slots of one process's store that hold newer checkpoints than its record names.

    The list is empty while a writer runs, for a bucket, and for a group, whose ranks' records show it together.
    """

    async def look(opened: OpenMedium) -> list[NewerSlot]:
        found = await StoreReader.newest(opened)
        if found is None:
            return []
        identity, record = found
        newer = await newer_slots(opened.medium, record, identity.block_bytes)
        again = await StoreReader.newest(opened) if newer else None
        return [] if again is None or again[1].generation != record.generation else newer

    if (
        place.of_group
        or place.is_part
        or place.is_bucket
        or ((published := read_status(place.path)) is not None and published.alive)
    ):
        return []
    return at_once(place.path, look)


def overwritten(place: Place) -> set[int]:
    """Return the counters of the superseded checkpoints whose slots do not hold their manifests any more."""
    found = ((entry, place.path / slot_name(entry.slot)) for entry in place.superseded)
    return {entry.counter for entry, path in found if _slot_fault(path, entry)}


def forbidden_files(place: Place) -> list[str]:
    """Return the files that a trainer opens and that this user may not read and write."""
    names = list[str]()
    for rank, (_, record) in place.stores.items():
        slots = [slot_name(entry.slot) for entry in record.entries]
        names += [os.path.join(place.folder(rank), name) for name in (COMMIT_NAME, *slots)]
    return [name for name in names if (path := place.path / name).exists() and not os.access(path, os.R_OK | os.W_OK)]


def lost_records(place: Place) -> list[str]:
    """Return the folders of stores that may have lost their newest record: neither of its two copies is valid.

    A running writer may be writing both, so they are read again for half a second.
    """
    return [place.folder(rank) or "." for rank in place.stores if _may_lack_the_newest(place, rank)]


def _may_lack_the_newest(place: Place, rank: int) -> bool:
    identity, _ = place.stores[rank]
    for look in range(_LOOKS):
        try:
            commit = memoryview((place.path / place.folder(rank) / COMMIT_NAME).read_bytes())
        except OSError:
            return False
        record = newest_record(commit, identity.id_bytes)
        if record is None or not may_lack_the_newest(commit, identity=identity, record=record):
            return False
        if look + 1 < _LOOKS:
            time.sleep(0.5 / _LOOKS)
    return True


def _slot_fault(path: Path, entry: Entry) -> str:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return "is gone"
    if not stat.S_ISREG(found.st_mode):
        kinds = {stat.S_IFDIR: "is a directory", stat.S_IFLNK: "is a symbolic link"}
        return kinds.get(stat.S_IFMT(found.st_mode), "is no regular file")
    end = entry.manifest_offset + entry.manifest_nbytes
    if found.st_size < end:
        return f"has {found.st_size} of at least {end} bytes"
    try:
        with path.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), entry.manifest_nbytes, entry.manifest_offset)
    except OSError as error:
        return "" if is_exhausted(error) or is_forbidden(error) else f"cannot be read ({error.strerror})"
    return "" if crc32(data) == entry.manifest_checksum else "does not hold what the newest record names there"


@dataclass(frozen=True, slots=True, repr=False)
class Description:
    """A committed checkpoint and its place. Sizes and offsets in bytes.

    Attributes:
        info: The commit record's description of the checkpoint.
        leaves: Tensors, arrays and plain values, in the order of the state.
        branches: Types of the containers by their paths; the root's path is empty.
        slot: Name of the file that holds the checkpoint.
        slot_nbytes: Size of that file.
        chunks: Pieces of the payload as they were written, each with its checksum.
        manifest_offset: Offset of the manifest in the slot, after the payload.
        manifest_nbytes: Length of the manifest.
        store_id: Id of the store.
        block_bytes: Block size of the store: offsets and lengths are multiples of it.
        rank: The rank whose part of a group's checkpoint it is, else None.
        sharded: Tensors of that part that lie on several ranks, in the order of the state, with the boxes of all ranks;
            the part's own boxes are among ``leaves``, too.
        differing: If no rank was named, paths under which other ranks have different tensors. Once more than 20 are
            known, no further tensors are compared by their bytes.
    """

    info: CheckpointInfo
    leaves: tuple[StoredLeaf, ...]
    branches: dict[str, str]
    slot: str
    slot_nbytes: int
    chunks: tuple[ChunkEntry, ...]
    manifest_offset: int
    manifest_nbytes: int
    store_id: str
    block_bytes: int
    rank: int | None = None
    sharded: tuple[ShardedLeaf, ...] = ()
    differing: tuple[str, ...] = ()

    def __repr__(self) -> str:
        part = "" if self.rank is None else f", rank {self.rank}"
        return f"<Description of step {self.info.step}{part}: {len(self.leaves)} leaves, {self.info.nbytes} bytes>"

    @property
    def array_nbytes(self) -> int:
        """Bytes of all tensors and arrays; shared bytes are counted for each."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def aliases(self) -> int:
        """Number of leaves that share bytes with an earlier one; shared bytes are stored once."""
        return sum(leaf.alias_of is not None for leaf in self.leaves)


def describe_checkpoint(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    name: str | None = None,
    rank: int | None = None,
    io: IO = "auto",
) -> Description:
    """Describe the newest checkpoint, the newest of ``step``, or the one called ``name``.

    Reads its manifest and no tensor.

    In a group's folder one rank's part of a complete checkpoint is described, by default rank 0's. If tensors in it lie
    on several ranks, the manifests of all ranks are read. Without ``rank``, the values that each rank has for itself
    are compared, too: if checksums do not decide, tensors are read.

    Raises:
        NoCheckpointError: there is none.
        CorruptStoreError: no record is valid, or a manifest is damaged.
        ReadError: the device failed, or this process may not open a file for each part of a group's checkpoint.
    """
    which = which_one(step, name)

    async def describe() -> Description:
        async with await open_place(path, io, rank=rank) as place, place.hold(which) as checkpoint:
            entry, listing = checkpoint.entry, list_leaves(checkpoint.manifest)
            sharded = tuple([leaf async for leaf in _with_boxes(checkpoint, listing)])
            differing = tuple(await checkpoint.differing(is_needed=False)) if rank is None else ()
            return Description(
                info=entry.info,
                leaves=tuple(listing.leaves),
                branches={listing.shown.get(path, path): kind for path, kind in listing.branches.items()},
                slot=slot_name(entry.slot),
                slot_nbytes=checkpoint.file.nbytes,
                chunks=checkpoint.manifest.chunks,
                manifest_offset=entry.manifest_offset,
                manifest_nbytes=entry.manifest_nbytes,
                store_id=place.identity.store_id,
                block_bytes=place.identity.block_bytes,
                rank=place.named(checkpoint.own_rank),
                sharded=sharded,
                differing=tuple(readable(differing)),
            )

    return call_once(describe())


async def _with_boxes(checkpoint: CheckpointReader, listing: Listing) -> AsyncIterator[ShardedLeaf]:
    """Yield the tensors that lie on several ranks, with their boxes; none if only one rank's store is known."""
    if not listing.sharded or not checkpoint.whole:
        return
    manifests = await checkpoint.manifests()
    stored = {rank: stored_boxes(manifest, rank) for rank, manifest in sorted(manifests.items())}
    for leaf in listing.sharded:
        boxes = {}
        for rank, there in stored.items():
            found = [box for box in there.get(leaf.key, ()) if box.mesh == leaf.mesh and 0 not in box.entry.shape]
            if found:
                boxes[rank] = tuple(ShardBox(box.offsets, box.entry.shape) for box in found)
        yield replace(leaf, boxes=boxes)


Progress: TypeAlias = Callable[[int, int], None]
"""Function called on another thread with the number of bytes done, and the total."""


def counting(progress: Progress, total: int) -> Callable[[int], None]:
    """Return a function to call with the number of bytes of each read, which calls ``progress`` with the sum."""
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(min(done, total), total)

    return add
