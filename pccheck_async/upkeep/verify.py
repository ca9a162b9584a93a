# SPDX-License-Identifier: Apache-2.0
"""Verifying every checksum of a store, at the speed of the disk. Nothing is copied."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal

from pccheck_async.engine import call_once
from pccheck_async.errors import DamagedError, ReadError, is_forbidden
from pccheck_async.format import CheckpointInfo, Entry, Record, Which, which_one
from pccheck_async.format.manifest import Manifest
from pccheck_async.format.record import COMMIT_NBYTES, REGION_NBYTES, decode_record, newest_record, slot_name
from pccheck_async.group import Place, open_place
from pccheck_async.medium import File, read_around
from pccheck_async.medium.open_medium import IO, OpenMedium
from pccheck_async.store import Staging, StoreReader, check_chunks, read_manifest
from pccheck_async.transfer import aligned_buffer
from pccheck_async.upkeep.listing import Listing, list_leaves
from pccheck_async.upkeep.reading import Progress, counting

__all__ = ["CheckedCheckpoint", "Damage", "RecordCopy", "Verification", "check_payload", "check_place"]
__all__ += ["damaged_copies", "examine_records", "verify_checkpoints"]

_LOOKS = 20
_LOOK_SECONDS = 0.025
"""Seconds between reads of the records: a running writer may be writing one, so only a state that lasts is damage."""


RecordState = Literal["valid", "blank", "older", "damaged"]


@dataclass(frozen=True, slots=True)
class RecordCopy:
    """One copy of one commit record.

    Attributes:
        name: ``A0``, ``A1`` (even generations), ``B0`` or ``B1`` (odd ones).
        offset: Offset of the copy in the commit file, in bytes.
        generation: Generation of the record; None if the copy is not valid.
        state: ``valid``; ``blank`` if none was written yet; ``older`` than the other copy, after a kill between two
            writes; ``damaged``.
        rank: The rank whose record it is in a group's folder, else None.
    """

    name: str
    offset: int
    generation: int | None
    state: RecordState
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that differ from the written ones.

    Attributes:
        file: Name of the file.
        what: The damaged item: ``chunk 3``, ``manifest``, or ``slot`` if all of it is missing.
        offset: Offset of the first byte in the file.
        nbytes: Number of bytes.
        reason: The fault.
        leaves: Paths of the tensors and arrays that have bytes there; empty for a manifest, with which all are lost.
    """

    file: str
    what: str
    offset: int
    nbytes: int
    reason: str
    leaves: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckedCheckpoint:
    """A committed checkpoint that was read from its first to its last byte.

    Attributes:
        info: The record's description of the checkpoint.
        slot: Name of its file.
        chunks: Number of chunks that were checked.
        nbytes: Bytes of payload and manifest that were checked.
        damage: Damaged bytes; empty if the checkpoint is whole.
        rank: The rank whose part of a group's checkpoint it is, else None.
    """

    info: CheckpointInfo
    slot: str
    chunks: int
    nbytes: int
    damage: tuple[Damage, ...]
    rank: int | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Verification:
    """The result of a verification.

    Attributes:
        records: The copies of both commit records.
        checkpoints: Checkpoints that were checked, newest first; for a group all parts, rank by rank.
        nbytes: Bytes of checkpoints that were read.
        seconds: Time that reading and checking them took.
        direct: Whether they were read from the device, past the page cache.
        superseded: Superseded checkpoints that were checked, newest first: those that a restart would try, as all newer
            ones are damaged. A save may have overwritten them since.
    """

    records: tuple[RecordCopy, ...]
    checkpoints: tuple[CheckedCheckpoint, ...]
    nbytes: int
    seconds: float
    direct: bool
    superseded: tuple[CheckedCheckpoint, ...] = ()

    def __repr__(self) -> str:
        steps = dict.fromkeys(str(each.info.step) for each in self.checkpoints if each.damage)
        found = "whole" if self.whole else f"damaged: step {', '.join(steps)}" if steps else "a damaged commit record"
        return f"<Verification: {len(self.checkpoints)} checked, {self.nbytes} bytes, {found}>"

    @property
    def whole(self) -> bool:
        """Whether no record copy and no committed checkpoint that was checked is damaged."""
        return not (any(copy.state == "damaged" for copy in self.records) or any(c.damage for c in self.checkpoints))

    @property
    def damaged_copies(self) -> tuple[RecordCopy, ...]:
        """The damaged copies of records whose other copy is valid: nothing is lost with them."""
        return damaged_copies(self.records)


def verify_checkpoints(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    name: str | None = None,
    every: bool = False,
    progress: Progress = lambda done, total: None,
    io: IO = "auto",
) -> Verification:
    """Check ``store.json``, all copies of both commit records, and the manifest and every chunk of checkpoints.

    In a group's folder, the records of all ranks are checked, and all parts of complete checkpoints.

    Args:
        path: Folder of a store, or of a group.
        step: Check the newest checkpoint of this step; by default the newest of all.
        name: Check the checkpoint with this name instead.
        every: Check all committed checkpoints. Checkpoints that a running writer drops meanwhile are left out.
        progress: Called with the bytes checked (:data:`Progress`).
        io: I/O backend, as for :class:`pccheck_async.CheckpointEngine`.

    Raises:
        NoCheckpointError: there is none to check; of a group, none that is complete (IncompleteCheckpointError).
        CorruptStoreError: ``store.json`` is damaged, or no record is valid: see :func:`recover_store`. Or this version
            cannot read a part of a checkpoint that is whole.
        ReadError: the device failed under the records.
    """
    which = which_one(step, name)

    async def verify() -> Verification:
        async with await open_place(path, io) as place:
            place.choose(which)  # raises if there is none
            return await check_place(place, which, every=every, progress=progress)

    return call_once(verify())


async def check_place(
    place: Place, which: Which = None, *, every: bool = True, progress: Progress = lambda done, total: None
) -> Verification:
    """Check the records of a place, and its checkpoints or one of them. Raises the errors of verify_checkpoints()."""
    while True:  # a running writer may drop all of them before they can be held
        start = time.perf_counter()
        wanted = [place.parts(one.key) for one in (place.complete if every else (place.choose(which),))]
        entries = [part.entry for parts in wanted for part in parts.values()]
        read = counting(progress, sum(entry.manifest_nbytes + entry.nbytes for entry in entries))
        copies: list[RecordCopy] = []
        checks: list[CheckedCheckpoint] = []
        superseded: list[CheckedCheckpoint] = []
        for rank in place.stores:
            reader = await StoreReader.open(place.opened, place.folder(rank))
            if reader is None:
                continue  # it was removed meanwhile
            copies += (replace(copy, rank=place.named(rank)) for copy in await _records(reader))
            for part in (parts[rank] for parts in wanted if rank in parts):
                if checked := await _check(reader, part.entry, read):
                    checks.append(replace(checked, rank=place.named(rank)))
            for entry in _next_tried(place, checks):
                if checked := await _check(reader, entry, read, superseded=True):
                    superseded.append(checked)
            await place.opened.medium.close(reader.commit)
        if checks or not wanted:
            nbytes, seconds = sum(each.nbytes for each in (*checks, *superseded)), time.perf_counter() - start
            direct = place.opened.medium.statistics().direct
            return Verification(tuple(copies), tuple(checks), nbytes, seconds, direct, tuple(superseded))
        await place.look()


def _next_tried(place: Place, checks: Collection[CheckedCheckpoint]) -> list[Entry]:
    """Return the superseded checkpoints that a restart would try before any committed one that is not damaged."""
    damaged = {each.info.counter for each in checks if each.damage}
    kept = [one.entry.counter for one in place.complete if not one.entry.rejected]
    newest = max((counter for counter in kept if counter not in damaged), default=-1)
    return [entry for entry in place.superseded if entry.counter > newest] if damaged else []


def damaged_copies(copies: Collection[RecordCopy]) -> tuple[RecordCopy, ...]:
    """Return the damaged copies of records whose other copy is valid."""
    valid = {(copy.rank, copy.name[0]) for copy in copies if copy.state == "valid"}
    return tuple(copy for copy in copies if copy.state == "damaged" and (copy.rank, copy.name[0]) in valid)


def examine_records(commit: memoryview, store_id: bytes) -> tuple[RecordCopy, ...]:
    """Return the state of each copy of both records in the bytes of a commit file."""
    starts = range(0, COMMIT_NBYTES, REGION_NBYTES)
    regions = [commit[start : start + REGION_NBYTES] for start in starts]
    records = [decode_record(region, store_id) for region in regions]
    newest = max((record.generation for record in records if record), default=None)
    copies = []
    for number, (name, region, record) in enumerate(zip(("A0", "A1", "B0", "B1"), regions, records, strict=True)):
        state: RecordState
        if record is not None:
            other = records[number ^ 1]
            state = "older" if other and other.generation > record.generation else "valid"
        else:  # the records of odd generations begin with the first commit; from then on both are there
            unwritten = newest == 0 and number >= 2 and len(region) == REGION_NBYTES and not any(region)
            state = "blank" if unwritten else "damaged"
        copies.append(RecordCopy(name, starts[number], record.generation if record else None, state))
    return tuple(copies)


async def _records(reader: StoreReader) -> tuple[RecordCopy, ...]:
    """Return the state of all copies of records; read again until none is damaged, or the file does not change."""
    view = aligned_buffer(COMMIT_NBYTES)
    last, same = b"", 0
    for _ in range(10 * _LOOKS):
        got, lost = await read_around(reader.opened.medium, reader.commit, 0, view, reader.identity.block_bytes)
        image, bad = view[:got], {offset // REGION_NBYTES * REGION_NBYTES for offset in lost}
        copies = tuple(
            replace(copy, state="damaged") if copy.offset in bad else copy
            for copy in examine_records(image, reader.identity.id_bytes)
        )
        same, last = same + 1 if last == bytes(image) else 0, bytes(image)
        if all(copy.state != "damaged" for copy in copies) or same >= _LOOKS:
            break
        await asyncio.sleep(_LOOK_SECONDS)
    if newest_record(image, reader.identity.id_bytes) is None:
        await reader.record()  # raises, unless a writer was at work all the time
    return copies


async def _check(
    reader: StoreReader, entry: Entry, read: Callable[[int], None], *, superseded: bool = False
) -> CheckedCheckpoint | None:
    """Check one checkpoint; None if it was dropped meanwhile."""

    def pick(record: Record) -> Entry | None:
        entries = record.superseded if superseded else record.entries
        return next((one for one in entries if (one.counter, one.slot) == (entry.counter, entry.slot)), None)

    held = await reader.lock(pick)
    if held is None:
        return None
    chosen, file = held
    info, name, offset, nbytes = chosen.info, slot_name(chosen.slot), chosen.manifest_offset, chosen.manifest_nbytes
    if not isinstance(file, File):
        if is_forbidden(file):
            raise file  # it may be whole
        return CheckedCheckpoint(info, name, 0, 0, (Damage(name, "slot", 0, offset + nbytes, str(file)),))
    read(nbytes)
    medium = reader.opened.medium
    try:
        manifest = await read_manifest(medium, file, chosen, reader.identity.block_bytes)
        damages = await check_payload(reader.opened, file, manifest, list_leaves(manifest), read)
        return CheckedCheckpoint(info, name, len(manifest.chunks), manifest.payload_nbytes + nbytes, damages)
    except (DamagedError, ReadError) as error:  # of the manifest: a chunk that cannot be read is noted as damage
        return CheckedCheckpoint(info, name, 0, nbytes, (Damage(name, "manifest", offset, nbytes, str(error)),))
    finally:
        await medium.close(file)


async def check_payload(
    opened: OpenMedium, file: File, manifest: Manifest, listing: Listing, read: Callable[[int], None] = lambda _: None
) -> tuple[Damage, ...]:
    """Read every chunk of a checkpoint and return the damaged ones, in the order of the file."""
    damages: dict[int, Damage] = {}

    def damaged(index: int, reason: str, _: object) -> None:
        chunk = manifest.chunks[index]
        leaves = tuple(listing.within(chunk.offset, chunk.offset + chunk.nbytes))
        name = os.path.basename(file.name)
        damages[index] = Damage(name, f"chunk {index}", chunk.offset, chunk.nbytes, reason, leaves)

    await check_chunks(opened.medium, opened.operations, file, manifest, Staging(), damaged=damaged, read=read)
    return tuple(damages[index] for index in sorted(damages))
