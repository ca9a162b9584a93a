"""The store: which checkpoints exist, where the next one goes, and the commit.

Only here and in its files (:mod:`commit_file`, :mod:`slot_files`) is anything flushed, and only here decided what is
durable. The order that everything rests on (PCcheck, section 3.2, and the invariants I1 to I3 and I12 of the design)::

    data and manifest written -> flush slot -> write the other record -> flush record -> publish -> free the old slot

Each write and the flush behind it are one operation of the writer's (:meth:`Writer.persist`), of which a disk takes
less time than of two, and whatever stands for a disk in tests sees every single one. A small checkpoint and the record
that names it are one as well, in that order: what the record says is decided before, and no other record is written
until this one is.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from pccheck_async.errors import NoCheckpointError
from pccheck_async.format.record import MOST_ENTRIES, Entry, Record, align
from pccheck_async.medium import File, Part, Piece, Writer
from pccheck_async.store.commit_file import CommitFile, open_commit
from pccheck_async.store.committed import Committed
from pccheck_async.store.latch import Latch
from pccheck_async.store.records import read_record
from pccheck_async.store.retention import Retention
from pccheck_async.store.slot_files import SlotFiles, SlotLease, open_slots
from pccheck_async.transfer.memory import aligned_buffer
from pccheck_async.transfer.uninterrupted import uninterrupted

__all__ = ["SlotLease", "Store", "StoreStatistics", "open_store"]


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """What the store holds and did.

    Attributes:
        slots: Slot files.
        slot_bytes: Their bytes.
        generation: Of the newest record.
        commits: Records written.
        superseded: Checkpoints that newer ones made pointless.
        reader_waits: Times that a checkpoint waited for other processes' readers.
    """

    slots: int
    slot_bytes: int
    generation: int
    commits: int
    superseded: int
    reader_waits: int


async def open_store(
    writer: Writer, *, path: str | os.PathLike[str], retention: Retention, max_in_flight: int, lock_timeout: float
) -> Store:
    """Lock the store, create it where there is none, and recover: the newest valid record decides.

    Args:
        writer: The folder's files.
        path: The folder, for messages.
        retention: Which checkpoints are kept.
        max_in_flight: Checkpoints written at a time.
        lock_timeout: Seconds to wait for another writer.

    Durability: opening an existing store writes nothing.

    Raises:
        StoreLockedError: another writer held the store for ``lock_timeout`` seconds.
        CorruptStoreError: the folder holds something else, or no valid record.
        StoreFullError: so many checkpoints are pinned that a record has no room for those to be kept.
    """
    commit = await open_commit(writer, path, lock_timeout)
    record = await read_record(writer, commit.file, commit.identity)
    unsettled = None if commit.is_new else await commit.unsettled(writer, record)
    committed = Committed(record, retention)
    committed.check_rules()
    latch = Latch()
    slots = await open_slots(writer, record, in_flight=max_in_flight, kept=retention.reserved, flush=latch.flush)
    return Store(writer, commit, committed, slots, latch, unsettled)


class Store:
    """The writing side of one store; one per folder and process. Made by :func:`open_store`.

    Args:
        writer: The folder's files.
        commit: Where records go; locked as long as it is open.
        committed: What the newest record names.
        slots: Where checkpoints go.
        latch: Ends the commits after an error.
        unsettled: What is written before anything else.

    Attributes:
        committed: What the newest record names.
    """

    def __init__(
        self,
        writer: Writer,
        commit: CommitFile,
        committed: Committed,
        slots: SlotFiles,
        latch: Latch,
        unsettled: Part | None,
    ) -> None:
        self._writer = writer
        self._commit = commit
        self.committed = committed
        self._slots = slots
        self._latch = latch
        self._unsettled = unsettled
        self._commit_lock = asyncio.Lock()
        self._took_over = False
        self._commits = self._superseded = 0

    @property
    def block_bytes(self) -> int:
        """The unit of every offset and length in the store."""
        return self._commit.identity.block_bytes

    @property
    def failure(self) -> BaseException | None:
        """What latched the store, None while it takes commits."""
        return self._latch.failure

    async def start_reading(self, entry: Entry, *, superseded: bool = False) -> File:
        """Keep a checkpoint's slot from being reused until :meth:`stop_reading`, and return its file.

        Args:
            entry: Which one the newest record names, or, with ``superseded``, has superseded.
            superseded: See above.

        Raises:
            NoCheckpointError: it was dropped meanwhile.
            DamagedError: its slot is missing, no file, or, where it was superseded, being written over.
            ReadError: the file of its slot could not be opened.
        """
        committed = self.committed
        if entry in committed.record.entries or entry in committed.adopted:
            return self._slots.start_reading(entry.slot)
        if superseded and entry in committed.record.superseded:
            return await self._slots.start_reading_free(entry.slot)
        raise NoCheckpointError(f"checkpoint {entry.counter} (step {entry.step}) is not kept any more")

    async def adopt(self, entry: Entry) -> None:
        """Take a superseded checkpoint for a committed one again, while its slot is read and all of it is whole.

        Until a record that names what comes after it is durable its slot is not free, and the record that still names
        it is not written over. Nothing is done where a newer one was committed meanwhile.
        """
        async with self._commit_lock:
            known = self.committed.entries
            if entry in self.committed.record.superseded and entry not in known and len(known) < MOST_ENTRIES:
                self.committed.adopt(entry)
                kept = (*self.committed.record.entries, *self.committed.adopted)
                self._slots.committed([one.slot for one in kept])

    def stop_reading(self, entry: Entry) -> None:
        """End :meth:`start_reading`."""
        self._slots.stop_reading(entry.slot)

    # -- slots

    async def reserve(self, nbytes: int) -> SlotLease:
        """Lease a slot of at least ``nbytes`` for one checkpoint, creating or enlarging one where needed.

        The first checkpoint reserves the space of all slots, so that a full disk shows now and not in an hour.

        Raises:
            StoreFullError: no space; nothing was changed but free slots.
            StoreFailedError: an earlier flush or record failed.
        """
        nbytes = align(nbytes, self.block_bytes)
        if self.committed.adopted:
            await self.amend(lambda entries: entries)  # frees the slots of the damaged ones: no further one is needed
        async with self._slots.lock:
            self._latch.check()
            if not self._took_over:
                await self._take_over()
            return await self._slots.lease(nbytes)

    async def release(self, lease: SlotLease, manifest_offset: int | None = None) -> None:
        """Give back the slot of a checkpoint that will not commit, once nothing writes to it any more.

        Args:
            lease: From :meth:`reserve`.
            manifest_offset: Where its manifest may be by now. It is overwritten: else recovering a store that lost its
                records would take a torn capture for a checkpoint.

        Cancellation: raised when the slot is free.
        """
        await uninterrupted(self._release(lease, manifest_offset))

    async def _release(self, lease: SlotLease, manifest_offset: int | None) -> None:
        try:
            if manifest_offset is not None:
                # Flushed, as the manifest may have been; where the device fails here too, no more can be done.
                nothing = aligned_buffer(self.block_bytes)
                with suppress(OSError):
                    await self._writer.persist([(lease.file, [(manifest_offset, nothing)])], self._latch.set)
        finally:
            await self._slots.release(lease)

    async def _take_over(self) -> None:
        """Make the record that was found the one that any later crash falls back to (I12).

        Flush what a dead predecessor wrote and did not flush. Crash: a record that was only in the device's cache names
        the slots this writer keeps; if the power fails after new data went into the slots it freed, the older record
        comes back and names overwritten slots.

        Erase what a predecessor tore. Crash: its first sectors and the last ones of this writer's record, torn in turn,
        may be the whole record that nobody found, of the same generation, which names overwritten slots.

        Write one copy of the record once more, where that flush may have found nothing to do: a page cache shows what
        no disk has after a predecessor's flush failed, and to some filesystems a file is clean that this process did
        not write. Crash: the older record comes back here, too.
        """
        await self._latch.flush(partial(self._writer.flush, self._commit.file))
        await self._latch.flush(self._writer.sync_folder)
        if self._unsettled is not None:
            await self._latch.flush(partial(self._writer.persist, [self._unsettled], self._latch.set))
            self._unsettled = None
        self._took_over = True

    async def remove_surplus(self) -> None:
        """Remove slots that are neither needed nor used any more; a failure is only logged."""
        await self._slots.remove_surplus()

    # -- commit

    async def persist(self, lease: SlotLease, rest: Sequence[Piece] = ()) -> None:
        """Write what of a checkpoint is not written yet, and make all of it durable; then it may be committed.

        Durability: the bytes survive power loss, and no record names them yet.

        Raises:
            WriteError, StoreFullError: a write failed, and nothing else (I11).
            StoreFailedError: the flush failed; no further commits.
        """
        await self._persist_slot(lease.file, rest)  # crash: a record that names bytes still in the device's cache (I2)

    async def persist_and_commit(self, lease: SlotLease, rest: Sequence[Piece], entry: Entry) -> bool:
        """Do what :meth:`persist` and :meth:`commit` do; the lease is given back whatever happens.

        Where no other commit is under way all of it is one operation of the writer's, of which the record is a part:
        other commits wait until all is written, so this is for what takes hardly longer than a record.

        Durability: on True the checkpoint survives power loss.

        Cancellation: once the writing of slot and record has begun it ends as if nobody had cancelled it.

        Raises:
            WriteError, StoreFullError: a write to the slot failed, and nothing else (I11).
            StoreFailedError: a flush or the record failed, now or before; no further commits (I11).
        """
        apart = self._commit_lock.locked() or not self._writer.persists_at_once
        committed = False
        try:
            if apart:
                await self.persist(lease, rest)
            else:
                committed = await self._commit_at_once(lease, rest, entry)
        except BaseException:
            if apart or self._latch.failure is None:
                await self.release(lease, entry.manifest_offset)
            raise
        if apart:
            return await self.commit(lease, entry)
        if not committed:
            await self.release(lease)  # once only: by then it may be another checkpoint's
        return committed

    async def _commit_at_once(self, lease: SlotLease, rest: Sequence[Piece], entry: Entry) -> bool:
        async with self._commit_lock:  # until the record is written: what is decided here stays right
            self._latch.check()
            entries = self.committed.retain(entry)
            if entry not in entries:
                self._superseded += 1
                return False
            await self._replace_record(entries, [(lease.file, rest)])
        return True

    async def commit(self, lease: SlotLease, entry: Entry) -> bool:
        """Commit a persisted checkpoint; False where it is superseded, and then its slot is free again (I6).

        Durability: on True the checkpoint survives power loss. The lease is given back either way.

        Cancellation: once the record is being written it ends as if nobody had cancelled it.

        Raises:
            StoreFailedError: a flush or the record failed, now or before; no further commits (I11).
        """
        try:
            await self._writer.unlock(lease.file)  # all writes ended; whoever reads the record next may lock it shared
            await self._commit_lock.acquire()
        except BaseException:
            await self.release(lease, entry.manifest_offset)
            raise
        try:
            self._latch.check()
            entries = self.committed.retain(entry)
            if entry not in entries:
                self._superseded += 1
                self._slots.drop(lease)
                return False
            await self._replace_record(entries)
        finally:
            self._commit_lock.release()
        return True

    async def _replace_record(self, entries: Iterable[Entry], slot: Sequence[Part] = ()) -> None:
        record = self.committed.follow(entries)
        try:
            # Crash: acknowledged, the old slot reused, this in flight (I3).
            await self._persist_record(record, slot)
        except BaseException as error:
            if not (slot and isinstance(error, OSError)):  # else it is latched, or only a write to the slot failed
                self._latch.set(error)  # which of the two records a restart will find is unknown: write nothing more
            self._latch.raise_as_failed(error)
            raise
        self.committed.publish(record)
        self._commits += 1
        self._slots.committed([entry.slot for entry in record.entries])

    async def amend(self, change: Callable[[tuple[Entry, ...]], Iterable[Entry]]) -> None:
        """Change what is known of committed checkpoints, or drop some; in one record.

        Args:
            change: From the entries as they are when no commit can change them any more, newest first, to those
                wanted; what it raises is raised. Entries that were not changed are given back as they are.

        Durability: when this returns the change survives power loss.

        Raises:
            StoreFailedError: a flush or the record failed, now or before.
        """
        async with self._commit_lock:
            self._latch.check()
            entries = tuple(change(self.committed.entries))
            if entries == self.committed.record.entries:
                return
            if not self._took_over:  # else whoever holds the lock may wait for readers, who take their time
                async with self._slots.lock:
                    self._latch.check()
                    if not self._took_over:
                        await self._take_over()  # crash: this record overwrites the last durable one
            await uninterrupted(self._replace_record(entries))  # a record half written would latch the store

    async def pin(self, step: int, pinned: bool) -> Entry:
        """Keep the newest checkpoint of ``step`` whatever the rules say, or leave all of that step to them.

        Durability: as of :meth:`amend`. Raises what that does and what :meth:`Retention.pin` does.
        """
        changed: list[Entry] = []

        def change(entries: tuple[Entry, ...]) -> list[Entry]:
            changed[:] = self.committed.retention.pin(entries, step, pinned)
            return changed

        await self.amend(change)
        return next(entry for entry in changed if entry.step == step)

    async def _persist_slot(self, file: File, rest: Sequence[Piece]) -> None:
        try:
            await self._writer.persist([(file, rest)], self._latch.set)
        except OSError as error:
            self._latch.raise_as_failed(error)
            raise

    async def _persist_record(self, record: Record, slot: Sequence[Part] = ()) -> None:
        """Write a record and make it durable; before it a slot, where that is not yet (I2).

        Cancellation: comes too late: a record of which nobody knows whether it is durable would latch the store.
        """
        await self._writer.persist([*slot, self._commit.part(record)], self._latch.set, final=True)

    def statistics(self) -> StoreStatistics:
        """Return slots and commits so far."""
        return StoreStatistics(
            slots=self._slots.count,
            slot_bytes=self._slots.nbytes,
            generation=self.committed.record.generation,
            commits=self._commits,
            superseded=self._superseded,
            reader_waits=self._slots.reader_waits,
        )
