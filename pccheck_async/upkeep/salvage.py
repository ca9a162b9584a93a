# SPDX-License-Identifier: Apache-2.0
"""Searching slots for checkpoints that no record names, by their manifests; whole ones are those with all checksums."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from pccheck_async.errors import CorruptStoreError, ReadError, is_exhausted, is_forbidden, is_read_only
from pccheck_async.format import CheckpointInfo, Entry, crc32
from pccheck_async.format.found_manifest import find_signatures, manifest_at
from pccheck_async.format.manifest import Manifest
from pccheck_async.format.record import MOST_ENTRIES, MOST_METADATA_NBYTES, NAME_KEY, slot_name
from pccheck_async.medium import File, read_around
from pccheck_async.medium.open_medium import OpenMedium
from pccheck_async.transfer import PAGE_BYTES, aligned_buffer
from pccheck_async.upkeep.listing import Listing, list_leaves
from pccheck_async.upkeep.reading import Progress, counting
from pccheck_async.upkeep.verify import Damage, check_payload

__all__ = [
    "BUSY",
    "FoundCheckpoint",
    "as_recorded",
    "find_in_slot",
    "record_entries",
    "search_slot",
]

BUSY = "in use by another process"
_WINDOW_BYTES = 16 << 20
_FIRST_LOOK_BYTES = 1 << 20
_MOST_MANIFEST_NBYTES = 1 << 30
_MOST_CANDIDATES = 16
"""Most manifests in one slot whose payloads are read: a slot has one, or leftovers of some earlier ones."""
_MOST_LOOKS = 4
"""Most bytes, in multiples of the slot's size, that are read where a manifest only seems to begin: a tensor may consist
of such beginnings."""
_FEW_BYTES = 64 << 20
"""Bytes that may be read at such places in addition, however small the slot is."""
_BASE = 64 * 1024
"""Alignment of reads, a multiple of every block size, so that direct I/O works if the block size is not known."""


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """The contents of a slot.

    Attributes:
        slot: Number of the slot.
        info: The manifest's description of the checkpoint; None if there is none.
        chunks: Number of chunks of the payload.
        damage: Chunks whose checksums do not hold: another checkpoint was written over them, or bits rotted.
        entry: The entry for a record; None unless the checkpoint is whole and can be named.
        note: The reason why it is not named, or a doubt about it; empty if there is none.
        folder: In a group, the name of the rank's folder.
    """

    slot: int
    info: CheckpointInfo | None = None
    chunks: int = 0
    damage: tuple[Damage, ...] = ()
    entry: Entry | None = None
    note: str = ""
    folder: str = ""

    @property
    def file(self) -> str:
        """Name of the slot's file, with the rank's folder."""
        return os.path.join(self.folder, slot_name(self.slot))

    @property
    def whole(self) -> bool:
        """Whether there is a checkpoint whose checksums all hold, even if it is not named."""
        return self.info is not None and not self.damage


async def find_in_slot(
    opened: OpenMedium, number: int, block_bytes: int, progress: Progress, *, keep: bool = False, alone: bool = False
) -> FoundCheckpoint:
    """Search a slot; if ``keep``, it stays locked until the folder is closed, unless another process has it.

    With ``alone`` the lock is exclusive: without a commit file, whose lock keeps other recoveries out, this one does.
    """
    try:
        file = await opened.medium.open(slot_name(number), writable=alone)  # flock over NFS needs that
    except (CorruptStoreError, OSError) as error:
        if is_exhausted(error) or is_forbidden(error) or is_read_only(error):
            raise  # its checkpoint may be whole, and would not be named
        return FoundCheckpoint(number, note=str(error))
    try:
        if not await opened.medium.lock(file, shared=not alone):
            keep = False
            return FoundCheckpoint(number, note=BUSY)
        return await search_slot(opened, number, file, block_bytes, progress)
    finally:
        if not keep:
            await opened.medium.close(file)


async def search_slot(
    opened: OpenMedium, number: int, file: File, block_bytes: int, progress: Progress
) -> FoundCheckpoint:
    """Look for a whole checkpoint in a slot, from its end.

    The result has the manifest with the highest offset whose whole payload, before it in the slot, has the checksums
    that it lists. A newer checkpoint that was being written over an older one changes chunks of the older one; a
    manifest inside the payload of a whole checkpoint is part of a user's tensors. If no checkpoint is whole, the one
    with the latest time is described, with its damage.
    """
    search = _Search(opened, number, file, progress, _MOST_LOOKS * file.nbytes + _FEW_BYTES)
    best, tried = FoundCheckpoint(number, note="no manifest"), 0
    async for offset in search.offsets(block_bytes):
        try:
            candidate = await search.candidate(offset)
        except (CorruptStoreError, ReadError):
            if search.left <= 0:
                break
            continue
        tried += 1
        if tried > _MOST_CANDIDATES:
            break
        examined = await search.examine(candidate)
        if examined.entry is not None:
            return examined
        if best.info is None or (examined.info and examined.info.time > best.info.time):
            best = examined
    return best


class _Candidate(NamedTuple):
    offset: int
    nbytes: int
    checksum: int
    manifest: Manifest
    listing: Listing


@dataclass(slots=True)
class _Search:
    """The search of one slot; ``left`` is the number of bytes that may still be read in search of manifests."""

    opened: OpenMedium
    number: int
    file: File
    progress: Progress
    left: int

    async def offsets(self, step: int) -> AsyncIterator[int]:
        """Yield the offsets at which a manifest may begin, the last one first."""
        buffer, nbytes = aligned_buffer(_WINDOW_BYTES), self.file.nbytes
        for start in range((nbytes - 1) // _WINDOW_BYTES * _WINDOW_BYTES, -1, -_WINDOW_BYTES):
            got, _ = await read_around(self.opened.medium, self.file, start, buffer)
            for offset in await self.opened.operations.call(find_signatures, buffer[: got // step * step], step):
                yield start + offset
            self.progress(nbytes - start, nbytes)

    async def candidate(self, offset: int) -> _Candidate:
        """Read the manifest at ``offset``, of unknown length. Raises CorruptStoreError if there is none."""
        base = offset // _BASE * _BASE
        most = min(self.file.nbytes - base, _MOST_MANIFEST_NBYTES)
        size = _FIRST_LOOK_BYTES
        while True:
            buffer = aligned_buffer(size)
            got, lost = await read_around(self.opened.medium, self.file, base, buffer)
            self.left -= got
            data = buffer[offset - base : got]
            decoded = await self.opened.operations.call(manifest_at, data, offset)
            if decoded is not None:
                manifest, length = decoded
                if end := next((at for at in lost if offset - base - PAGE_BYTES < at < offset - base + length), None):
                    raise CorruptStoreError(f"no manifest: its bytes from {base + end} on cannot be read")
                return _Candidate(offset, length, crc32(data[:length]), manifest, list_leaves(manifest))
            if size >= most or self.left <= 0:
                raise CorruptStoreError("no manifest: it does not end inside the slot")
            size = min(4 * size, -(-most // _BASE) * _BASE)

    async def examine(self, candidate: _Candidate) -> FoundCheckpoint:
        """Verify the payload of a manifest, and return the checkpoint with its damage."""
        manifest = candidate.manifest
        read = counting(self.progress, manifest.payload_nbytes)
        damage = await check_payload(self.opened, self.file, manifest, candidate.listing, read)
        metadata = manifest.metadata
        if len(msgspec.msgpack.encode(metadata)) > MOST_METADATA_NBYTES:
            metadata = {}  # larger than a record takes: no engine wrote it
        entry = Entry(
            counter=manifest.counter,
            step=manifest.step,
            time=manifest.time,
            nbytes=manifest.payload_nbytes,
            slot=self.number,
            manifest_offset=candidate.offset,
            manifest_nbytes=candidate.nbytes,
            manifest_checksum=candidate.checksum,
            pinned=False,
            metadata=metadata,
        )
        note = "" if manifest.counter >= 0 else "no engine counts like this"
        if damage:
            note = f"{len(damage)} of {len(manifest.chunks)} chunks damaged or overwritten"
        return FoundCheckpoint(
            self.number, entry.info, len(manifest.chunks), damage, entry=None if note else entry, note=note
        )


def as_recorded(found: FoundCheckpoint, entries: Sequence[Entry], slots: Collection[int] = ()) -> FoundCheckpoint:
    """Return what was found, as damaged if a valid record has another checksum of its manifest.

    Nothing else shows a flipped bit of a plain value. The ``entries`` are the record's; counter and time tell which one
    describes this checkpoint, and one of the two may be what flipped. A checkpoint in one of ``slots`` is named all the
    same.
    """
    one = found.entry
    if one is None:
        return found
    for entry in entries:
        same = entry.slot == one.slot and (entry.counter == one.counter or entry.time == one.time)
        if same and entry.manifest_checksum != one.manifest_checksum:
            note = "its manifest is not the one that the record names: damaged"
            where = one.manifest_offset, one.manifest_nbytes
            damage = Damage(slot_name(one.slot), "manifest", *where, "checksum mismatch")
            return dataclasses.replace(found, damage=(damage,), note=note, entry=one if one.slot in slots else None)
    return found


def record_entries(
    found: Sequence[FoundCheckpoint], named: Sequence[Entry] = ()
) -> tuple[list[Entry], dict[int, str], set[int]]:
    """Return the entries of a new record, newest first, notes on slots, and the slots that may be of another run.

    Entries are ordered by counter, as in every record. Of two with one counter, the one that a valid record ``named``
    is kept, else the later one: the other was written before a crash, never committed, and its counter was used again;
    or one of them was copied here. Of several with one name, only the newest keeps the name.
    """
    known = {(entry.counter, entry.slot) for entry in named}
    whole = [one.entry for one in found if one.entry is not None]
    whole.sort(key=lambda entry: (entry.counter, (entry.counter, entry.slot) in known, entry.time), reverse=True)
    kept: list[Entry] = []
    names = set[str | None]()
    notes: dict[int, str] = {}
    strange: set[int] = set()
    for entry in whole:
        if kept and kept[-1].counter == entry.counter:
            notes[entry.slot] = f"counter {entry.counter} again: never committed, or of another run (--slot)"
            strange.add(kept[-1].slot)
        elif len(kept) == MOST_ENTRIES:
            notes[entry.slot] = f"a record names {MOST_ENTRIES}"
        else:
            if entry.name in names:
                unnamed = {key: value for key, value in entry.metadata.items() if key != NAME_KEY}
                kept.append(replace(entry, metadata=unnamed))
            else:
                kept.append(entry)
            names.add(entry.name)
    latest = largest = kept[-1] if kept else None
    for entry in reversed(kept):
        assert latest is not None
        assert largest is not None
        if entry.time < latest.time:
            notes[entry.slot] = f"captured before counter {latest.counter}: copied here, or never committed"
        elif entry.step < largest.step:
            notes[entry.slot] = f"a smaller step than that of counter {largest.counter}: copied here, or run again"
        strange |= {entry.slot} & notes.keys()
        latest = max(latest, entry, key=lambda each: each.time)
        largest = max(largest, entry, key=lambda each: each.step)
    return kept, notes, {entry.slot for entry in kept if (entry.counter, entry.slot) not in known} & strange
