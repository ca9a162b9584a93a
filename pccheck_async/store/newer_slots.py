# SPDX-License-Identifier: Apache-2.0
"""Slots that hold newer checkpoints than the newest record names: reported only, and never taken for committed ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, NamedTuple

from pccheck_async.errors import CorruptStoreError, first_few, is_exhausted
from pccheck_async.format import Record
from pccheck_async.format.found_manifest import HEAD_NBYTES, find_signatures, numbers_at
from pccheck_async.format.record import COMMIT_NAME, slot_name, slot_number
from pccheck_async.medium import File, Medium
from pccheck_async.store.rank_folders import recovery
from pccheck_async.store.store import Store
from pccheck_async.telemetry import write
from pccheck_async.transfer import PAGE_BYTES, aligned_buffer

__all__ = ["NewerSlot", "newer_in_words", "newer_slots", "warn_of_newer"]

_TAIL_NBYTES: Final = 1 << 20
"""Bytes at the end of a slot that are searched for a manifest if no offset is known: a slot is made for payload and
manifest together, so most manifests begin there."""


class NewerSlot(NamedTuple):
    """A slot whose manifest is of a newer checkpoint than all that the newest record names."""

    slot: int
    step: int
    counter: int
    is_named: bool
    """Whether the record names another checkpoint in this slot: no writer overwrites that, so the record is old."""


async def newer_slots(medium: Medium, record: Record, block_bytes: int) -> list[NewerSlot]:
    """Return the slots that were written after the newest record, oldest checkpoint first.

    Each save that was killed just before its record leaves such a slot; so does a record that is older than the slots.
    Only the blocks of a slot are read at which the records' checkpoints have their manifests: the manifest of a state
    of another layout is not found. A manifest is the last thing written into a slot, and that of a failed save is
    overwritten. The list is empty if the last change was a removal: then both records name the same.
    """
    if record.entries and record.entries == record.before:
        return []
    newest = max((entry.counter for entry in record.entries), default=-1)
    named = {entry.slot for entry in record.entries}
    removed = {(entry.counter, entry.slot) for entry in record.before}
    offsets = sorted({entry.manifest_offset for entry in (*record.entries, *record.before)})
    found: dict[int, NewerSlot] = {}
    numbers = [number for name in await medium.names() if (number := slot_number(name)) is not None]
    for number in sorted(numbers, key=lambda number: (number in named, number)):
        if number in named and not found:
            break  # saves take the free slots before those that an older record names
        try:
            file = await medium.open(slot_name(number), writable=False)
        except (CorruptStoreError, OSError) as error:
            if is_exhausted(error):
                raise
            continue
        try:
            for counter, step in await _numbers(medium, file, offsets, block_bytes):
                if counter > max(newest, found[number].counter if number in found else -1):
                    found[number] = NewerSlot(number, step, counter, number in named)
        except OSError as error:
            if is_exhausted(error):
                raise
        finally:
            await medium.close(file)
    kept = [one for one in found.values() if (one.counter, one.slot) not in removed]
    return sorted(kept, key=lambda one: one.counter)


async def _numbers(medium: Medium, file: File, offsets: Sequence[int], block_bytes: int) -> list[tuple[int, int]]:
    """Return counter and step of each manifest at these offsets of a slot; without offsets, of those near its end."""
    size = max(PAGE_BYTES, block_bytes)
    if offsets:
        heads = []
        for offset in offsets:
            block = aligned_buffer(size)
            heads.append(block[: await medium.read(file, offset, block)])
    else:
        tail = aligned_buffer(_TAIL_NBYTES + size)
        got = await medium.read(file, max(0, file.nbytes - _TAIL_NBYTES) // size * size, tail)
        places = find_signatures(tail[: got // block_bytes * block_bytes], block_bytes)
        heads = [tail[place : place + HEAD_NBYTES] for place in places]
    return [numbers for head in heads if (numbers := numbers_at(head)) is not None]


def newer_in_words(found: Sequence[NewerSlot], path: str | os.PathLike[str]) -> str:
    """Return the text that these slots hold newer checkpoints, with possible reasons and a remedy."""
    slots = first_few([f"{slot_name(one.slot)} (step {one.step})" for one in found], 5)
    are = "are newer checkpoints" if len(found) > 1 else "is a newer checkpoint"
    there = f"in {slots} {are} than {COMMIT_NAME} names"
    older = f"{COMMIT_NAME} is older than the slots, as in a backup that was put back in part"
    look = f"{recovery(path, '--search')} says what is whole"
    if any(one.is_named for one in found):
        return (
            f"{there}, also in the places of those: {older}. The next saves may write over that: let no trainer save "
            f"before the folder is copied, and {look}"
        )
    return (
        f"{there}: that is normal after a kill, of which a save was not finished, or after a removal, and nothing is "
        f"lost. Only if files were put back or exchanged by hand: {older}; copy the folder before the next save, and "
        f"{look}"
    )


async def warn_of_newer(store: Store, path: str | os.PathLike[str]) -> None:
    """Log slots of a store that was just opened that hold newer checkpoints than its record names, if there are any."""
    if found := await newer_slots(store.medium, store.committed.record, store.block_bytes):
        text, fields = newer_in_words(found, path), {"step": found[-1].step, "counter": found[-1].counter}
        if any(one.is_named for one in found):
            write("older_record", "%s", text, **fields)
        else:
            write("unrecorded_slots", "%s", text, **fields)
