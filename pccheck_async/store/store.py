# SPDX-License-Identifier: Apache-2.0
"""One store opened for writing: the commit by which a checkpoint becomes durable, and changes of records.

:meth:`Store.commit` is all of the commit (PCcheck, section 3.2; invariants I1 to I3, I6, I11). The methods that it
calls are its steps, and :meth:`Store.take_over` comes before the first of them: the crash tests replace one after the
other by a wrong one, and must find every one of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, final

from msgspec.structs import replace

from pccheck_async.errors import DurabilityUnknownError, StoreFailedError
from pccheck_async.format import Entry, Line, Record, align
from pccheck_async.format.record import FORMAT_VERSION, MOST_ENTRIES
from pccheck_async.medium import Medium, Part, Piece
from pccheck_async.store.commit_file import CommitFile, open_commit, read_record
from pccheck_async.store.known_bytes import KnownBytes, SlotLease
from pccheck_async.store.retention import Committed, Retention
from pccheck_async.store.slots import Slots, open_slots
from pccheck_async.telemetry import write
from pccheck_async.transfer import aligned_buffer, uninterrupted

__all__ = ["Store", "StoreStatistics", "Written", "open_store"]

_CHAIN_NBYTES = 2 << 20
"""Most bytes of data that are written in one chain with their record. A chain saves two wake-ups of a 0.7 ms save
(15 %), and delays other commits until all of it is written: about a millisecond for so many bytes."""


class Latch:
    """Keeps the first error that left durability unknown, and refuses commits after it. Reopen the store to reset it.

    Attributes:
        failure: The first such error, None while there was none.
    """

    def __init__(self, known: KnownBytes | None = None) -> None:
        self.failure: BaseException | None = None
        self._known = known

    def failed(self, error: BaseException) -> StoreFailedError:
        """Refuse commits from now on because of ``error``, and return the error to raise from it.

        Only the first error is kept, and logged.
        """
        if self.failure is None:
            self.failure = error
            if self._known is not None:
                self._known.forget_all()
            write("store_failed", "the store takes no more commits: %s", error, error=str(error))
        return _failed(error)

    def check(self) -> None:
        """Raise StoreFailedError if the store takes no more commits."""
        if self.failure is not None:
            raise _failed(self.failure) from self.failure

    async def flush(self, flush: Callable[[], Awaitable[None]]) -> None:
        """Await ``flush``; if that fails, refuse commits from now on. Raises StoreFailedError.

        Cancellation: raised when the flush ended: its error must latch though the caller no longer waits.
        """

        async def flush_or_latch() -> None:
            try:
                await flush()
            except OSError as error:
                # After a failed flush the kernel may report success although the data is gone: never try again.
                raise self.failed(error) from error

        await uninterrupted(flush_or_latch())


def _failed(error: BaseException) -> StoreFailedError:
    rest = "what was committed stays readable; check the storage and open the store anew"
    if isinstance(error, OSError):
        why = error.strerror or str(error)
        return StoreFailedError(error.errno, f"the store takes no more commits: {why}; {rest}", error.filename)
    return StoreFailedError(f"the store takes no more commits: {error!r}; {rest}")


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """The store's contents and past work."""

    slots: int
    """Number of slot files."""
    slot_bytes: int
    generation: int
    """Generation of the newest record."""
    commits: int
    """Number of records written."""
    superseded: int
    """Number of checkpoints that were superseded by newer ones before they were committed."""
    reader_waits: int
    """Number of times that a checkpoint waited for other processes' readers."""
    unchanged_bytes: int
    """Bytes that were not written, as their slot still held them."""


class Written(NamedTuple):
    """A checkpoint in its slot that no record names yet.

    Attributes:
        lease: The lease of its slot, to which nothing writes any more.
        entry: The entry for the record.
        rest: Pieces of the slot that are not written yet.
        check: Function called when all of it is durable in its slot, and before the record is written: an error ends
            the checkpoint, and nothing is committed.
    """

    lease: SlotLease
    entry: Entry
    rest: Sequence[Piece] = ()
    check: Callable[[], None] | None = None


async def open_store(
    medium: Medium,
    *,
    path: str | os.PathLike[str],
    retention: Retention,
    max_in_flight: int,
    lock_timeout: float,
    version: int = FORMAT_VERSION,
    ahead: bool = True,
    known: KnownBytes | None = None,
) -> Store:
    """Lock the store, create it if there is none, and recover the state that the newest valid record describes.

    ``path`` is for messages; ``lock_timeout`` is the time in seconds to wait for another writer; ``version`` is the
    format of the records: a group's has another one, and the group decides which checkpoints they name. ``ahead`` and
    ``known`` are for :func:`open_slots`.

    Durability: opening an existing store writes nothing.

    Raises:
        StoreLockedError: another writer held the store for ``lock_timeout`` seconds.
        CorruptStoreError: the folder holds other data, or no valid record.
        StoreFullError: so many checkpoints are pinned that a record has no room for those that the rules keep.
    """
    file = await open_commit(medium, path, lock_timeout, version)
    record = await read_record(medium, file.file, file.identity, path)
    repairs = None if file.is_new else await file.repairs(medium, record, path)
    committed = Committed(record, retention)
    if version == FORMAT_VERSION:  # else a group decides which are dropped
        committed.check_rules()
    latch = Latch(known)
    sync_names = partial(latch.flush, medium.sync_names)
    slots = await open_slots(
        medium, record, sync_names, in_flight=max_in_flight, kept=retention.reserved, ahead=ahead, known=known
    )
    return Store(medium, file, committed, slots, latch, repairs)


@final
@dataclass(slots=True, eq=False)
class Store:
    """The writing side of one store; one per folder and process. Made by :func:`open_store`.

    A group has one store for each rank, and decides which checkpoints a record names: it calls
    :meth:`finish_data` and :meth:`rewrite` instead of :meth:`commit` and :meth:`amend`.
    """

    medium: Medium
    file: CommitFile
    committed: Committed
    slots: Slots
    latch: Latch
    repairs: Part | None = None
    """Writes that :meth:`take_over` performs (:meth:`CommitFile.repairs`)."""
    took_over: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that one commit holds at a time, from its decision to the freeing of the slots that it replaced."""
    commits: int = 0
    """Number of records written."""
    superseded: int = 0
    """Number of checkpoints that newer ones replaced before they were committed."""

    @property
    def block_bytes(self) -> int:
        """The block size: every offset and length in the store is a multiple of it."""
        return self.file.identity.block_bytes

    async def reserve(self, nbytes: int) -> SlotLease:
        """Lease a slot of at least ``nbytes`` for one checkpoint, creating or enlarging one if needed.

        The first call takes the store over, and reserves the space of all slots, so that a full disk shows at once and
        not in an hour. If a restore adopted a checkpoint, a record with it is written first.

        Raises StoreFullError: no space, and only free slots were changed; StoreFailedError.
        """
        if self.committed.adopted:
            await self._free_damaged()
        async with self.slots.lock:
            await self._check_leasing()
            return await self.slots.lease(align(nbytes, self.block_bytes))

    async def reserve_now(self, nbytes: int, *, creates: bool) -> SlotLease | None:
        """Call :meth:`reserve` without waiting; None if readers hold all slots, or one would have to be created."""
        if self.committed.adopted:
            await self._free_damaged()
        async with self.slots.lock:
            await self._check_leasing()
            return await self.slots.lease_now(align(nbytes, self.block_bytes), set(), creates=creates)

    async def _free_damaged(self) -> None:
        """Write a record without damaged checkpoints, which names the superseded one that a restore adopted."""
        await self.amend(lambda entries: entries)

    async def _check_leasing(self) -> None:
        """Raise StoreFailedError if the store takes no more commits; take it over on first use.

        Called under the lock of the slots.
        """
        self.latch.check()
        if not self.took_over:
            await self.take_over()

    async def commit(self, written: Written) -> bool:
        """Commit a checkpoint; False if it is superseded (I6).

        Afterwards the slot is free, or the record's. If the store takes no more commits the slot may stay leased, since
        a restart may find a record that names it. A small checkpoint without ``check`` is written in one chain with its
        record if no other commit is under way.

        Durability: on True the checkpoint survives power loss. The comment at each step below describes a crash there,
            or a crash without the step.

        Cancellation: ignored once the record is being written.

        Raises:
            WriteError, StoreFullError: a write to the slot failed, and nothing else (I11).
            StoreFailedError: a flush or the record failed, now or before; no further commits (I11).
        """
        lease, entry, rest = written.lease, written.entry, written.rest
        small = entry.nbytes <= sum([len(data) for _, data in rest]) <= _CHAIN_NBYTES  # nothing of it is written yet
        chain = written.check is None and small and self.medium.chains and not self.lock.locked()
        if not chain:
            await self.finish_data(written)
        deciding = False
        try:
            async with self.lock:
                deciding = True
                self.latch.check()
                # Decided once, and right until the record is durable: no other commit runs meanwhile (I6).
                record = self.committed.decide(entry)
                if record is not None:
                    # Write the other record, in two copies, and flush. A crash here: the record before it is whole, and
                    # the slots that it names are still theirs (I1). In a chain ``make_durable`` flushes the data before
                    # that (I2), and unlocks the slot.
                    await self.write_record(record, [(lease.file, rest)] if chain else ())
                    # Publish, and free the slots that it names no more. A crash here: no checkpoint is lost, as these
                    # slots are written only now that the record without them is durable (I3).
                    self.publish(record)
                else:
                    self.superseded += 1
        except BaseException:
            # After a failed record a restart may find either record: the slots of both are left alone.
            if not deciding or self.latch.failure is None:
                await self.release(lease, entry.manifest_offset)
            raise
        if record is None:
            await self.release(lease)
        return record is not None

    async def finish_data(self, written: Written) -> None:
        """Make all of a checkpoint durable in its slot, which no record names yet: the first half of a commit.

        Errors are those of :meth:`commit`; after an error the slot is free.
        """
        try:
            # Make the data durable. Without this: a crash may leave a durable record that names bytes which were only
            # in the device's cache (I2).
            await self.make_data_durable(written.lease, written.rest)
            if written.check is not None:
                written.check()
            await self.medium.unlock(written.lease.file)  # all writes ended: readers of the next record may lock it
        except BaseException:
            await self.release(written.lease, written.entry.manifest_offset)
            raise

    async def release(self, lease: SlotLease, manifest_offset: int | None = None) -> None:
        """Free the slot of a checkpoint that will not be committed, once nothing writes to it any more.

        The block at ``manifest_offset``, which may hold its manifest by now, is overwritten: else recovering a store
        that lost its records would mistake a torn capture for a checkpoint.

        Cancellation: raised when the slot is free.
        """

        async def give_back() -> None:
            try:
                if manifest_offset is not None:
                    if self.slots.known is not None:
                        self.slots.known.forget(lease)
                    # Flushed, as the manifest may have been; if the device fails here too, no more can be done.
                    zeros = aligned_buffer(self.file.identity.block_bytes)
                    with suppress(OSError):
                        await self.make_data_durable(lease, [(manifest_offset, zeros)])
            finally:
                try:
                    await self.medium.unlock(lease.file)
                finally:
                    self.slots.table.release(lease.slot)

        await uninterrupted(give_back())

    async def amend(
        self, change: Callable[[tuple[Entry, ...]], Iterable[Entry]], *, for_good: bool = False
    ) -> tuple[Entry, ...]:
        """Change the entries of committed checkpoints, or drop some, in one record; return those that it names.

        ``change`` is called under the commit lock with the entries, newest first, and returns the new ones. Raises its
        errors, and StoreFailedError: a flush or the record failed, now or before. ``for_good``: dropped checkpoints
        cannot be read as superseded ones either.

        Durability: when this returns the change survives power loss.
        """
        async with self.lock:
            self.latch.check()
            entries = tuple(change(self.committed.entries))
            # Without this: the record overwrites the last durable one, and a crash may leave neither. If nothing is to
            # change: a crash loses the record, which may be in the device's cache only, as its writer died before the
            # flush.
            await self.take_over_once()
            if entries != self.committed.record.entries:
                await self._replace_record(self.committed.record_naming(entries))
                if for_good:
                    # Without this: the record before still names what was removed, and a restart that finds all newer
                    # ones damaged restores it, in place of an older one that was kept.
                    await self._replace_record(self.committed.record_naming(entries))
            return entries

    async def rewrite(self, make: Callable[[Record], Record]) -> None:
        """Replace the newest record by the result of ``make``: in a group all ranks decide what a record names.

        Slots that the new record does not name become free. Raises StoreFailedError: no more records can be written.
        """
        async with self.lock:
            self.latch.check()
            await self._replace_record(make(self.committed.record))

    async def begin_line(self, line: Line) -> None:
        """Write a record that names the same checkpoints and has a new :class:`Line`, which all later records keep.

        The record overwrites the newest one, so that the superseded checkpoints of the one before stay readable. A
        torn write leaves one of the two valid: they differ only in the header, which fits in one sector, and in the
        bytes behind the body. If checkpoints are known to be damaged or were adopted, it is written like any other.

        Durability: when this returns the line survives power loss. Raises StoreFailedError.
        """
        async with self.lock:
            self.latch.check()
            await self.take_over_once()
            self.committed.line = line
            record, entries = self.committed.record, self.committed.entries
            if entries == record.entries:
                await self._replace_record(replace(record, generation=record.generation + 2, line=line))
            else:  # some are known to be damaged, or were adopted
                await self._replace_record(self.committed.record_naming(entries))

    async def _replace_record(self, record: Record) -> None:
        async def replace() -> None:
            await self.write_record(record)
            self.publish(record)

        await uninterrupted(replace())

    async def pin(self, which: int | str, pinned: bool) -> Entry:
        """Pin the newest checkpoint of a step, or the one with a name; if not ``pinned``, unpin all that match.

        Returns the newest match. Durability: see :meth:`amend`. Raises its errors and those of :meth:`Retention.pin`.
        """
        named = await self.amend(lambda entries: self.committed.retention.pin(entries, which, pinned))
        return next(entry for entry in named if entry.matches(which))

    async def reject(
        self, which: int | str, in_flight: Mapping[int, tuple[int, str | None]], until: int
    ) -> list[Entry]:
        """Reject checkpoints from one on, in one record; return the committed ones among them, newest first.

        Rejected checkpoints in flight are never committed. The arguments are those of :meth:`Retention.reject`.

        Durability: see :meth:`amend`. Raises the errors of :meth:`amend` and :meth:`Retention.reject`.
        """
        chosen: set[int] = set()

        def change(entries: tuple[Entry, ...]) -> list[Entry]:
            chosen.update(self.committed.retention.reject(entries, which, in_flight, until))
            # Under the lock of commits: checkpoints in flight now are decided on after this. Those that this process
            # never commits need no record of it.
            self.committed.rejected |= chosen
            return [entry.as_rejected() if entry.counter in chosen else entry for entry in entries]

        return [entry for entry in await self.amend(change) if entry.counter in chosen]

    async def remove(self, which: int | str, *, force: bool) -> list[Entry]:
        """Drop all checkpoints that match ``which``, pinned or not, for good; return them, newest first.

        Durability: see :meth:`amend`. Raises the errors of :meth:`amend` and :meth:`Retention.remove`.
        """
        before: list[Entry] = []

        def change(entries: tuple[Entry, ...]) -> list[Entry]:
            before[:] = entries
            return self.committed.retention.remove(entries, which, force=force)

        left = {entry.counter for entry in await self.amend(change, for_good=True)}
        await self.slots.remove_surplus()
        return [entry for entry in before if entry.counter not in left]

    async def note_damaged(self, entry: Entry) -> None:
        """Mark a checkpoint as damaged, so that the next record leaves it out. Called when a checksum does not hold."""
        self.committed.damaged.add(entry.counter)

    async def adopt(self, entry: Entry) -> None:
        """Treat a superseded checkpoint as committed again. Called once all of it was verified, while its slot is read.

        From then on its slot is not free, and the record that still names it is not overwritten, until a new record is
        durable. Does nothing if the checkpoint is not superseded any more, or a record has no room for it.
        """
        async with self.lock:
            known = self.committed.entries
            if entry in self.committed.record.superseded and entry not in known and len(known) < MOST_ENTRIES:
                self.committed.adopted += (entry,)
                kept = (*self.committed.record.entries, *self.committed.adopted)
                self.slots.table.note_committed(_slots(kept), _slots(self.committed.record.before))

    async def take_over_once(self) -> None:
        """Take the store over, unless that was done before. Raises StoreFailedError."""
        if not self.took_over:  # else skip the lock: its holder may be waiting for readers
            async with self.slots.lock:
                self.latch.check()
                if not self.took_over:  # by a reservation meanwhile
                    await self.take_over()

    # -- the steps of a commit, and the take-over before the first

    async def take_over(self) -> None:
        """Make sure that any later crash falls back to the record found at opening, before anything is written (I12).

        Called once, under the lock of the slots. Raises StoreFailedError: the store takes no commits.
        """
        # Flush the unflushed writes of a dead predecessor. Without this: a record that is only in the device's
        # cache names the slots this writer keeps; if the power fails after new data went into the slots it freed, the
        # older record comes back and names overwritten slots.
        await self.latch.flush(partial(self.medium.make_durable, [(self.file.file, ())]))
        await self.latch.flush(self.medium.sync_names)
        if self.repairs is not None:
            # Erase the remains of a torn record. Without this: its first sectors and the last sectors of this writer's
            # record, torn by a crash in turn, may together be the predecessor's whole record, of the same generation,
            # which names overwritten slots. And write one copy of the record once more, as that flush may have found
            # nothing to do: a page cache shows bytes that no disk has after a predecessor's flush failed, and to some
            # filesystems a file is clean that this process did not write. Without this: a crash brings the older record
            # back here, too.
            await self.latch.flush(partial(self.medium.make_durable, [self.repairs]))
            self.repairs = None
        self.took_over = True

    async def make_data_durable(self, lease: SlotLease, rest: Sequence[Piece]) -> None:
        """Write the rest of a checkpoint and flush its slot. Raises the errors of :meth:`commit`."""
        try:
            await self.medium.make_durable([(lease.file, rest)])
        except DurabilityUnknownError as error:
            raise self.latch.failed(error) from error
        if self.slots.known is not None:
            self.slots.known.note_flushed(lease)

    async def write_record(self, record: Record, data: Sequence[Part] = ()) -> None:
        """Write a record in the place of its generation, and make it durable; write ``data`` and flush it before.

        Cancellation: ignored: a record that may or may not be durable would latch the store.

        Raises the errors of :meth:`commit`; WriteError and StoreFullError only if a write of ``data`` failed.
        """
        try:
            await self.medium.make_durable([*data, self.file.part(record)], ignore_cancellation=True)
        except BaseException as error:
            if data and isinstance(error, OSError) and not isinstance(error, DurabilityUnknownError):
                raise  # a write of the data failed, and no more
            failed = self.latch.failed(error)  # which of the two records a restart will find is unknown
            if isinstance(error, Exception):
                raise failed from error
            raise

    def publish(self, record: Record) -> None:
        """Make ``record`` the newest one, and free the slots that it does not name (I3). Called when it is durable."""
        self.committed.publish(record)
        self.commits += 1
        self.slots.table.note_committed(_slots(record.entries), _slots(record.before))

    def statistics(self) -> StoreStatistics:
        """Return the numbers of slots, commits and waits so far."""
        return StoreStatistics(
            slots=self.slots.table.count,
            slot_bytes=sum(self.slots.table.sizes.values()),
            generation=self.committed.record.generation,
            commits=self.commits,
            superseded=self.superseded,
            reader_waits=self.slots.reader_waits,
            unchanged_bytes=0 if self.slots.known is None else self.slots.known.unchanged_nbytes,
        )


def _slots(entries: Iterable[Entry]) -> list[int]:
    return [entry.slot for entry in entries]
