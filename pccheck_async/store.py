"""The store: which checkpoints exist, where the next one goes, and the commit.

Only here and in its slot files is anything flushed, and only here decided what is durable. The order that everything
rests on (PCcheck, section 3.2, and the invariants I1 to I3 and I12 of the design)::

    data and manifest written -> flush slot -> write the other record -> flush record -> publish -> free the old slot

Each write and the flush behind it are one operation of the writer's (:meth:`Writer.persist`), of which a disk takes
less time than of two, and whatever stands for a disk in tests sees every single one. A small checkpoint and the record
that names it are one as well, in that order: what the record says is decided before, and no other record is written
until this one is.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from pccheck_async import checksum
from pccheck_async.errors import (
    CorruptStoreError,
    NoCheckpointError,
    StoreFailedError,
    StoreLockedError,
    WriteError,
)
from pccheck_async.layout import (
    COMMIT_NAME,
    COMMIT_NBYTES,
    FORMAT_VERSION,
    IDENTITY_NAME,
    MOST_ENTRIES,
    REGION_NBYTES,
    Entry,
    Identity,
    Record,
    align,
    encode_identity,
    encode_record,
    names_checkpoints,
    region_offsets,
)
from pccheck_async.logs import write
from pccheck_async.memory import PAGE_BYTES, aligned_buffer
from pccheck_async.records import read_identity, read_record
from pccheck_async.retention import Retention
from pccheck_async.slot_files import SlotFiles, SlotLease, open_slots
from pccheck_async.uninterrupted import to_its_end, uninterrupted
from pccheck_async.writer import File, Part, Piece, Writer

__all__ = ["SlotLease", "Store", "StoreStatistics"]

_POLL_SECONDS = 0.01
"""Locks of other processes can only be polled: flock tells nobody when it becomes free."""


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


class Store:
    """The writing side of one store; one per folder and process (``commit`` is locked as long as it is open).

    Args:
        writer: The folder's files.
        retention: Which checkpoints are kept.
        max_in_flight: Checkpoints written at a time.
    """

    def __init__(self, writer: Writer, *, retention: Retention, max_in_flight: int) -> None:
        self._writer = writer
        self._retention = retention
        self._max_in_flight = max_in_flight
        self._commit_lock = asyncio.Lock()
        self._damaged: set[int] = set()
        self._failure: BaseException | None = None
        self._took_over = False
        self._record_buffer = aligned_buffer(REGION_NBYTES)
        self._commits = self._superseded = 0
        self._commit: File
        self._identity: Identity
        self._record: Record
        self._slots: SlotFiles

    # -- opening and recovery

    async def open(self, lock_timeout: float) -> None:
        """Lock the store, create it where there is none, and recover: the newest valid record decides.

        Durability: opening an existing store writes nothing.

        Raises:
            StoreLockedError: another writer held the store for ``lock_timeout`` seconds.
            CorruptStoreError: the folder holds something else, or no valid record.
            StoreFullError: so many checkpoints are pinned that a record has no room for those to be kept.
        """
        facts = await self._writer.prepare(create=True)
        self._commit = await self._open_commit()
        await self._lock_commit(lock_timeout)
        # Only now that nobody else, not even a dying writer's last request, can change it, is anything read.
        identity = await read_identity(self._writer)
        if identity is None:
            identity = await self._create(max(facts.block_bytes, PAGE_BYTES))
        self._identity = identity
        self._record = await self._recover()
        self._check_rules()
        self._slots = await open_slots(
            self._writer,
            [entry.slot for entry in self._record.entries],
            in_flight=self._max_in_flight,
            kept=self._retention.reserved,
            flush=self._flush_or_latch,
        )

    async def _recover(self) -> Record:
        return await read_record(self._writer, self._commit, self._identity)

    async def _open_commit(self) -> File:
        try:
            return await self._writer.open(COMMIT_NAME, writable=True)
        except FileNotFoundError:
            if await read_identity(self._writer) is not None:
                raise CorruptStoreError(f"{COMMIT_NAME!r} is missing beside {IDENTITY_NAME}") from None
        try:
            return await self._writer.create(COMMIT_NAME, COMMIT_NBYTES)
        except WriteError as error:
            if error.errno != errno.EEXIST:
                raise
            # Another writer was faster; the lock decides.
            return await self._writer.open(COMMIT_NAME, writable=True)

    async def _lock_commit(self, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while not await self._writer.try_lock(self._commit):
            if loop.time() >= deadline:
                raise StoreLockedError(
                    f"another writer has held this store for {timeout} s: close it first, or use another folder "
                    "(reading with load or list_checkpoints works meanwhile)"
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def _create(self, block_bytes: int) -> Identity:
        """Make the folder a store; ``store.json`` comes last, so a crash leaves either no store or a whole one."""
        if self._commit.nbytes > COMMIT_NBYTES:
            raise CorruptStoreError(f"there is a file {COMMIT_NAME!r} here that is not a store's; use an empty folder")
        if names_checkpoints(await self._read_commit()):
            raise CorruptStoreError(f"{IDENTITY_NAME} is missing beside a {COMMIT_NAME!r} file that names checkpoints")
        identity = Identity(
            format=FORMAT_VERSION, store_id=secrets.token_hex(16), checksum=checksum.NAME, block_bytes=block_bytes
        )
        first = encode_record(Record(0, ()), identity.id_bytes, block_bytes).ljust(COMMIT_NBYTES, b"\0")
        second_copy = region_offsets(0)[1]
        image = bytearray(first)
        image[second_copy : second_copy + REGION_NBYTES] = first[:REGION_NBYTES]
        view = aligned_buffer(COMMIT_NBYTES)
        view[:] = image
        await self._writer.write(self._commit, 0, view)
        await self._writer.flush(self._commit)  # crash: store.json without a first record behind it
        await self._writer.sync_folder()  # crash: store.json without a commit file beside it
        passing = IDENTITY_NAME + ".tmp"
        if passing in await self._writer.names():
            await self._writer.unlink(
                passing
            )  # crash: what its killed writer had queued lands in ours, with another id
        await self._writer.write_small(passing, encode_identity(identity))
        await self._writer.rename(passing, IDENTITY_NAME)
        await self._writer.sync_folder()  # crash: checkpoints acknowledged in a folder that is no store
        return identity

    async def _read_commit(self) -> bytes:
        view = aligned_buffer(COMMIT_NBYTES)
        return bytes(view[: await self._writer.read(self._commit, 0, view)])

    # -- what is committed

    @property
    def block_bytes(self) -> int:
        """The unit of every offset and length in the store."""
        return self._identity.block_bytes

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Committed checkpoints, newest first, those known to be damaged left out."""
        return tuple(entry for entry in self._record.entries if entry.counter not in self._damaged)

    @property
    def largest_counter(self) -> int:
        """The largest counter that was ever committed and is still known, -1 for none."""
        return max((entry.counter for entry in self._record.entries), default=-1)

    @property
    def failure(self) -> BaseException | None:
        """What latched the store, None while it takes commits."""
        return self._failure

    def mark_damaged(self, counter: int) -> None:
        """Leave a checkpoint whose bytes are not what was written out of the next record."""
        self._damaged.add(counter)

    def start_reading(self, entry: Entry) -> File:
        """Keep a checkpoint's slot from being reused until :meth:`stop_reading`, and return its file.

        Raises:
            NoCheckpointError: it was dropped meanwhile.
            CorruptStoreError: its slot is missing.
        """
        if entry not in self._record.entries:
            raise NoCheckpointError(f"checkpoint {entry.counter} (step {entry.step}) is not kept any more")
        return self._slots.start_reading(entry.slot)

    def stop_reading(self, entry: Entry) -> None:
        """End :meth:`start_reading`."""
        self._slots.stop_reading(entry.slot)

    def _check_rules(self) -> None:
        self._retention.check_room(self._record.entries)
        dropped = [entry.step for entry in self._retention.dropped(self._record.entries)]
        if dropped:
            text = "the next checkpoint drops those of steps %s: no rule of this engine keeps them"
            write(logging.WARNING, "dropping", text, dropped)

    def _retain(self, new: Entry) -> list[Entry]:
        kept = self._retention.retain(self._record.entries, new, self._damaged)
        for entry in kept.crowded_out:
            text = "the checkpoint of step %d is dropped although it is a multiple of keep_every: a record names %d"
            write(logging.WARNING, "crowded_out", text, entry.step, MOST_ENTRIES)
        return kept.entries

    # -- slots

    async def reserve(self, nbytes: int) -> SlotLease:
        """Lease a slot of at least ``nbytes`` for one checkpoint, creating or enlarging one where needed.

        The first checkpoint reserves the space of all slots, so that a full disk shows now and not in an hour.

        Raises:
            StoreFullError: no space; nothing was changed but free slots.
            StoreFailedError: an earlier flush or record failed.
        """
        nbytes = align(nbytes, self.block_bytes)
        async with self._slots.lock:
            self._check_usable()
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
                    await self._writer.persist([(lease.file, [(manifest_offset, nothing)])], self._latch)
        finally:
            await self._slots.release(lease)

    async def _take_over(self) -> None:
        """Flush what a dead predecessor wrote and did not flush, before anything builds on it (I12).

        Crash: a record that was only in the device's cache names the slots this writer keeps; if the power fails after
        new data went into the slots it freed, the older record comes back and names overwritten slots.
        """
        await self._flush_or_latch(partial(self._writer.flush, self._commit))
        await self._flush_or_latch(self._writer.sync_folder)
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
            if apart or self._failure is None:
                await self.release(lease, entry.manifest_offset)
            raise
        if apart:
            return await self.commit(lease, entry)
        if not committed:
            await self.release(lease)  # once only: by then it may be another checkpoint's
        return committed

    async def _commit_at_once(self, lease: SlotLease, rest: Sequence[Piece], entry: Entry) -> bool:
        async with self._commit_lock:  # until the record is written: what is decided here stays right
            self._check_usable()
            entries = self._retain(entry)
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
            self._check_usable()
            entries = self._retain(entry)
            if entry not in entries:
                self._superseded += 1
                self._slots.drop(lease)
                return False
            await self._replace_record(entries)
        finally:
            self._commit_lock.release()
        return True

    async def _replace_record(self, entries: Iterable[Entry], slot: Sequence[Part] = ()) -> None:
        record = Record(self._record.generation + 1, tuple(entries))
        try:
            # Crash: acknowledged, the old slot reused, this in flight (I3). To its end: a record of which nobody knows
            # whether it is durable would latch the store.
            await to_its_end(self._persist_record(record, slot))
        except BaseException as error:
            if not (slot and isinstance(error, OSError)):  # else it is latched, or only a write to the slot failed
                self._latch(error)  # which of the two records a restart will find is unknown: write nothing more
            self._raise_latched(error)
            raise
        self._publish(record)
        self._free_slots()

    async def amend(self, change: Callable[[tuple[Entry, ...]], Iterable[Entry]]) -> None:
        """Change what is known of committed checkpoints, or drop some; in one record.

        Args:
            change: From the entries as they are when no commit can change them any more, newest first, to those
                wanted; what it raises is raised. Entries that were not changed are given back as they are.

        Durability: when this returns the change survives power loss.

        Raises:
            StoreFailedError: a flush or the record failed, now or before.
        """
        if not self._took_over:  # else whoever holds the lock may wait for readers, who take their time
            async with self._slots.lock:
                self._check_usable()
                if not self._took_over:
                    await self._take_over()  # crash: this record overwrites the last durable one
        async with self._commit_lock:
            self._check_usable()
            entries = tuple(change(self.entries))
            if entries != self._record.entries:
                await uninterrupted(self._replace_record(entries))  # a record half written would latch the store

    async def pin(self, step: int, pinned: bool) -> Entry:
        """Keep the newest checkpoint of ``step`` whatever the rules say, or leave all of that step to them.

        Durability: as of :meth:`amend`. Raises what that does and what :meth:`Retention.pin` does.
        """
        await self.amend(lambda entries: self._retention.pin(entries, step, pinned))
        return next(entry for entry in self.entries if entry.step == step)

    async def _persist_slot(self, file: File, rest: Sequence[Piece]) -> None:
        try:
            await self._writer.persist([(file, rest)], self._latch)
        except OSError as error:
            self._raise_latched(error)
            raise

    async def _persist_record(self, record: Record, slot: Sequence[Part] = ()) -> None:
        """Write a record and make it durable; before it a slot, where that is not yet (I2)."""
        data = encode_record(record, self._identity.id_bytes, self.block_bytes)
        # Two copies on separate blocks: one damaged block does not cost the record. Both only ever touch this
        # generation's parity, so the record before stays whole whatever happens here, in whatever order.
        view = self._record_buffer[: len(data)]
        view[:] = data
        copies = [(offset, view) for offset in region_offsets(record.generation)]
        await self._writer.persist([*slot, (self._commit, copies)], self._latch)

    def _publish(self, record: Record) -> None:
        self._record = record
        self._damaged.intersection_update(entry.counter for entry in record.entries)
        self._commits += 1

    def _free_slots(self) -> None:
        self._slots.committed(entry.slot for entry in self._record.entries)

    # -- failure

    async def _flush_or_latch(self, flush: Callable[[], Awaitable[None]]) -> None:
        # To its end, cancelled or not: the error of a flush that nobody waits for any more must latch all the same.
        await uninterrupted(self._flush_and_latch(flush))

    async def _flush_and_latch(self, flush: Callable[[], Awaitable[None]]) -> None:
        try:
            await flush()
        except OSError as error:
            # After a failed flush the kernel may report success although the data is gone: never try again.
            self._latch(error)
            self._raise_latched(error)

    def _latch(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            write(logging.ERROR, "store_failed", "the store takes no more commits: %s", error, error=str(error))

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise _failed(self._failure) from self._failure

    def _raise_latched(self, error: BaseException) -> None:
        """Raise the error as that of a store which takes no more commits; return where it does."""
        if self._failure is not None and isinstance(error, Exception):
            raise _failed(error) from error

    def statistics(self) -> StoreStatistics:
        """Return slots and commits so far."""
        return StoreStatistics(
            slots=self._slots.count,
            slot_bytes=self._slots.nbytes,
            generation=self._record.generation,
            commits=self._commits,
            superseded=self._superseded,
            reader_waits=self._slots.reader_waits,
        )


def _failed(error: BaseException) -> StoreFailedError:
    rest = "what was committed stays readable; check the storage and open the store anew"
    if isinstance(error, OSError):
        why = error.strerror or str(error)
        return StoreFailedError(error.errno, f"the store takes no more commits: {why}; {rest}", error.filename)
    return StoreFailedError(f"the store takes no more commits: {error!r}; {rest}")
