"""One store opened for writing: its slots, its commits, and what reads from it meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pccheck_async.errors import NoCheckpointError
from pccheck_async.format import Entry, Record, align
from pccheck_async.format.record import MOST_ENTRIES
from pccheck_async.medium import File, Medium
from pccheck_async.store.commit import CommitState, commit, publish, release_slot, take_over, write_record
from pccheck_async.store.commit_file import open_commit, read_record
from pccheck_async.store.latch import Latch
from pccheck_async.store.retention import Committed, Retention
from pccheck_async.store.slots import SlotLease, open_slots
from pccheck_async.transfer import uninterrupted

__all__ = ["DroppedMeanwhileError", "ReadLease", "Store", "StoreStatistics", "open_store"]


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """What the store holds and did."""

    slots: int
    """Slot files."""
    slot_bytes: int
    generation: int
    """Of the newest record."""
    commits: int
    """Records written."""
    superseded: int
    """Checkpoints that newer ones made pointless."""
    reader_waits: int
    """Times that a checkpoint waited for other processes' readers."""


async def open_store(
    medium: Medium, *, path: str | os.PathLike[str], retention: Retention, max_in_flight: int, lock_timeout: float
) -> Store:
    """Lock the store, create it where there is none, and recover: the newest valid record decides.

    ``path`` is for messages; ``lock_timeout`` are the seconds to wait for another writer.

    Durability: opening an existing store writes nothing.

    Raises:
        StoreLockedError: another writer held the store for ``lock_timeout`` seconds.
        CorruptStoreError: the folder holds something else, or no valid record.
        StoreFullError: so many checkpoints are pinned that a record has no room for those to be kept.
    """
    file = await open_commit(medium, path, lock_timeout)
    record = await read_record(medium, file.file, file.identity)
    repairs = None if file.is_new else await file.repairs(medium, record)
    committed = Committed(record, retention)
    committed.check_rules()
    latch = Latch()
    slots = await open_slots(medium, record, in_flight=max_in_flight, kept=retention.reserved, latch=latch)
    return Store(medium, file, committed, slots, latch, repairs)


class Store(CommitState):
    """The writing side of one store; one per folder and process. Made by :func:`open_store`."""

    commit = commit
    release = release_slot

    @property
    def block_bytes(self) -> int:
        """The unit of every offset and length in the store."""
        return self.file.identity.block_bytes

    async def adopt(self, entry: Entry) -> None:
        """Count a superseded checkpoint as committed again, once all of it was verified; its slot is being read.

        Its slot is then not free, and the record that still names it is not overwritten, until a record that names its
        successor is durable. Does nothing where a newer checkpoint was committed meanwhile.
        """
        async with self.lock:
            known = self.committed.entries
            if entry in self.committed.record.superseded and entry not in known and len(known) < MOST_ENTRIES:
                self.committed.adopted += (entry,)
                kept = (*self.committed.record.entries, *self.committed.adopted)
                self.slots.table.note_committed([one.slot for one in kept])

    async def reserve(self, nbytes: int) -> SlotLease:
        """Lease a slot of at least ``nbytes`` for one checkpoint, creating or enlarging one where needed.

        The first checkpoint reserves the space of all slots, so that a full disk shows now and not in an hour.

        Raises StoreFullError: no space, and nothing was changed but free slots; StoreFailedError.
        """
        nbytes = align(nbytes, self.block_bytes)
        if self.committed.adopted:
            await self.amend(lambda entries: entries)  # frees the slots of damaged checkpoints
        async with self.slots.lock:
            self.latch.check()
            await take_over(self)
            return await self.slots.lease(nbytes)

    async def amend(self, change: Callable[[tuple[Entry, ...]], Iterable[Entry]]) -> tuple[Entry, ...]:
        """Change the entries of committed checkpoints, or drop some, in one record; return those that it names.

        ``change`` is called under the commit lock with the entries, newest first, and returns those wanted. Raises what
        it raises, and StoreFailedError: a flush or the record failed, now or before.

        Durability: when this returns the change survives power loss.
        """

        async def replace_record(record: Record) -> None:
            await write_record(self, record)
            publish(self, record)

        async with self.lock:
            self.latch.check()
            entries = tuple(change(self.committed.entries))
            if not self.took_over:  # else skip the lock: its holder may be waiting for readers
                async with self.slots.lock:
                    self.latch.check()
                    # Crash: this record overwrites the last durable one. Where nothing is to change: the record that
                    # says so was only in the device's cache, as its writer died before the flush.
                    await take_over(self)
            if entries != self.committed.record.entries:
                await uninterrupted(replace_record(self.committed.record_naming(entries)))
            return entries

    async def pin(self, step: int, pinned: bool) -> Entry:
        """Keep the newest checkpoint of ``step`` whatever the rules say, or leave all of that step to them.

        Durability: as of :meth:`amend`. Raises what that does and what :meth:`Retention.pin` does.
        """
        named = await self.amend(lambda entries: self.committed.retention.pin(entries, step, pinned))
        return next(entry for entry in named if entry.step == step)

    def statistics(self) -> StoreStatistics:
        """Return slots and commits so far."""
        return StoreStatistics(
            slots=self.slots.table.count,
            slot_bytes=sum(self.slots.table.sizes.values()),
            generation=self.committed.record.generation,
            commits=self.commits,
            superseded=self.superseded,
            reader_waits=self.slots.reader_waits,
        )


class DroppedMeanwhileError(NoCheckpointError):
    """The checkpoint to restore was superseded before its slot could be held."""


@dataclass(slots=True, eq=False)
class ReadLease:
    """Keeps the slot of a checkpoint of ``store`` from being reused while it is read.

    Released once, also where its acquirer was cancelled and never got the file. The newest record names ``entry``, or
    has superseded it (``superseded``).
    """

    store: Store
    entry: Entry
    superseded: bool
    _held: bool = False

    async def acquire(self) -> File:
        """Hold the slot and return its file. Runs on the engine's loop, as :meth:`release` does.

        Raises DroppedMeanwhileError where newer checkpoints replaced it; DamagedError, ReadError as
        :meth:`Slots.start_reading` and :meth:`Slots.start_reading_free` do.
        """
        entry, committed, slots = self.entry, self.store.committed, self.store.slots
        if entry in committed.record.entries or entry in committed.adopted:
            file = slots.start_reading(entry.slot)
        elif self.superseded and entry in committed.record.superseded:
            file = await slots.start_reading_free(entry.slot)
        else:
            raise DroppedMeanwhileError(f"checkpoint {entry.counter} (step {entry.step}) is not kept any more")
        self._held = True
        return file

    def release(self) -> None:
        """Let the slot go, where it is held."""
        if self._held:
            self._held = False
            self.store.slots.table.stop_reading(self.entry.slot)
