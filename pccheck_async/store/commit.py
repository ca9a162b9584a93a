"""The commit: how a checkpoint becomes durable (PCcheck, section 3.2; invariants I1 to I3, I6, I11).

:func:`commit` is all of it. The other public functions here are its steps, and :func:`take_over` comes before the first
of them: the crash tests replace one after the other by a wrong one, and must find every one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from pccheck_async.format import Entry, Record
from pccheck_async.medium import Medium, Part, Piece
from pccheck_async.store.commit_file import CommitFile
from pccheck_async.store.latch import Latch
from pccheck_async.store.retention import Committed
from pccheck_async.store.slots import SlotLease, Slots
from pccheck_async.transfer import aligned_buffer, uninterrupted

__all__ = ["CommitState", "commit", "decide", "make_data_durable", "publish", "release_slot", "take_over"]
__all__ += ["write_record"]

_CHAIN_NBYTES = 2 << 20
"""Most bytes that are written in one chain with their record. A chain saves two wake-ups of a 0.7 ms save (15 %) and
keeps other commits waiting until all of it is written: about a millisecond for so many bytes."""


@dataclass(slots=True, eq=False)
class CommitState:
    """What commits read and change."""

    medium: Medium
    file: CommitFile
    committed: Committed
    slots: Slots
    latch: Latch
    repairs: Part | None = None
    """What :func:`take_over` writes (:meth:`CommitFile.repairs`)."""
    took_over: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by one commit at a time, from its decision to the freeing of the slots that it replaced."""
    commits: int = 0
    """Records written."""
    superseded: int = 0
    """Checkpoints that newer ones replaced before they were committed."""


async def commit(
    state: CommitState,
    lease: SlotLease,
    entry: Entry,
    rest: Sequence[Piece] = (),
    written: Callable[[], None] = lambda: None,
    *,
    chain: bool = True,
) -> bool:
    """Commit a checkpoint; False where it is superseded (I6).

    Args:
        state: Of the store.
        lease: Its slot, to which nothing writes any more; given back, or the record's. Where the store takes no more
            commits it may stay taken, since a restart may find a record that names it.
        entry: What the record says of it.
        rest: What of it is not written yet.
        written: Called when all of it is durable in its slot; what it raises ends the checkpoint, unless ``chain``.
        chain: It may be written in one chain with its record where it is small and no other commit is under way.

    Durability: on True the checkpoint survives power loss. Each step below names the crash that it survives.

    Cancellation: once the record is being written it ends as if it had not been cancelled.

    Raises:
        WriteError, StoreFullError: a write to the slot failed, and nothing else (I11).
        StoreFailedError: a flush or the record failed, now or before; no further commits (I11).
    """
    small = rest and sum([len(data) for _, data in rest]) <= _CHAIN_NBYTES
    chain = bool(chain and small and state.medium.chains and not state.lock.locked())
    deciding = False
    try:
        if not chain:
            # Data durable. Crash: a durable record names bytes that were only in the device's cache (I2).
            await make_data_durable(state, lease, rest)
            written()
            await state.medium.unlock(lease.file)  # all writes ended: readers of the next record may lock the slot
        async with state.lock:
            deciding = True
            state.latch.check()
            # Decided once, and right until the record is durable: no other commit runs meanwhile (I6).
            record = decide(state, entry)
            if record is not None:
                # The other record, in two copies, and flush. Crash while it is written: the record before it is whole,
                # and the slots that it names are still theirs (I1). In a chain the data is flushed before (I2).
                await write_record(state, record, [(lease.file, rest)] if chain else ())
                # Publish, and free the slots that it names no more. Crash: none is lost, a durable record named others
                # before any of these is written again (I3).
                publish(state, record)
            else:
                state.superseded += 1
    except BaseException:
        # After a failed record a restart may find either record: the slots of both are left alone.
        if not deciding or state.latch.failure is None:
            await release_slot(state, lease, entry.manifest_offset)
        raise
    if record is None:
        await state.slots.release(lease)
    elif chain:
        written()
    return record is not None


def decide(state: CommitState, entry: Entry) -> Record | None:
    """Return the record that commits ``entry``, None where newer checkpoints superseded it."""
    kept = state.committed.retain(entry)
    state.committed.warn_of(entry, kept)
    return state.committed.record_naming(kept.entries) if entry in kept.entries else None


async def make_data_durable(state: CommitState, lease: SlotLease, rest: Sequence[Piece]) -> None:
    """Write what of a checkpoint is not written yet and flush its slot. Raises what :func:`commit` does."""
    try:
        await state.medium.make_durable([(lease.file, rest)], state.latch.set)
    except OSError as error:
        state.latch.raise_as_failed(error)
        raise


async def write_record(state: CommitState, record: Record, data: Sequence[Part] = ()) -> None:
    """Write a record over the older one of the two and make it durable; before it ``data``, where that is not yet.

    Cancellation: comes too late: a record that may or may not be durable would latch the store.

    Raises what :func:`commit` does; WriteError and StoreFullError only where a write of ``data`` failed.
    """
    try:
        await state.medium.make_durable([*data, state.file.part(record)], state.latch.set, final=True)
    except BaseException as error:
        if not (data and isinstance(error, OSError)):  # else it is latched, or only a write of the data failed
            state.latch.set(error)  # which of the two records a restart will find is unknown
        state.latch.raise_as_failed(error)
        raise


def publish(state: CommitState, record: Record) -> None:
    """Note that ``record`` is durable: it is the newest one, and slots that it does not name are free (I3)."""
    state.committed.publish(record)
    state.commits += 1
    state.slots.table.note_committed([entry.slot for entry in record.entries])


async def take_over(state: CommitState) -> None:
    """Make sure that any later crash falls back to the record found at opening, before anything is written (I12).

    Does nothing once that is done. Called under the lock of the slots. Raises StoreFailedError: no commits.
    """
    if state.took_over:
        return
    # Flush what a dead predecessor wrote and did not flush. Crash: a record that was only in the device's cache names
    # the slots this writer keeps; if the power fails after new data went into the slots it freed, the older record
    # comes back and names overwritten slots.
    await state.latch.flush(partial(state.medium.make_durable, [(state.file.file, ())]))
    await state.latch.flush(state.medium.sync_names)
    if state.repairs is not None:
        # Erase the remains of a torn record. Crash: its first sectors and the last sectors of this writer's record,
        # torn in turn, may together be the predecessor's whole record, of the same generation, which names overwritten
        # slots. And write one copy of the record once more, where that flush may have found nothing to do: a page cache
        # shows what no disk has after a predecessor's flush failed, and to some filesystems a file is clean that this
        # process did not write. Crash: the older record comes back here, too.
        await state.latch.flush(partial(state.medium.make_durable, [state.repairs]))
        state.repairs = None
    state.took_over = True


async def release_slot(state: CommitState, lease: SlotLease, manifest_offset: int | None = None) -> None:
    """Free the slot of a checkpoint that will not be committed, once nothing writes to it any more.

    What lies at ``manifest_offset`` is overwritten, where its manifest may be by now: else recovering a store that lost
    its records would mistake a torn capture for a checkpoint.

    Cancellation: raised when the slot is free.
    """

    async def release() -> None:
        try:
            if manifest_offset is not None:
                # Flushed, as the manifest may have been; where the device fails here too, no more can be done.
                zeros = aligned_buffer(state.file.identity.block_bytes)
                with suppress(OSError):
                    await state.medium.make_durable([(lease.file, [(manifest_offset, zeros)])], state.latch.set)
        finally:
            await state.slots.release(lease)

    await uninterrupted(release())
