# SPDX-License-Identifier: Apache-2.0
"""The slots of a store: which of them may be written, and when; and their files.

A slot is *leased* to the checkpoint that is being written into it, *committed* while the newest durable record names
it, *read* while a restore of this engine reads it, and free otherwise. Only a free slot may be written (I1); a
committed slot becomes free only once the record without it is durable (:meth:`SlotTable.note_committed`, I3).
:class:`SlotTable` decides without I/O; :class:`Slots` creates, locks, leases and removes the files.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import NamedTuple

from pccheck_async.errors import CorruptStoreError, DamagedError, ReadError, StoreFullError, is_exhausted, is_forbidden
from pccheck_async.format import Record
from pccheck_async.format.record import MOST_SLOT, slot_name, slot_number
from pccheck_async.medium import LOCK_POLL_SECONDS, File, Medium
from pccheck_async.store.known_bytes import KnownBytes, SlotLease
from pccheck_async.telemetry import write
from pccheck_async.transfer import uninterrupted

__all__ = ["SlotDecision", "SlotTable", "Slots", "open_slots"]


class SlotDecision(NamedTuple):
    """The choice of a slot for a checkpoint."""

    slot: int | None
    """Number of the slot; None: every slot is in use, and no more may be made."""
    create: bool = False
    """Whether the slot does not exist yet."""
    remove: int | None = None
    """Number of a free slot that is too small, to be removed first; None for none."""


class SlotTable:
    """The slots of one store.

    Args:
        sizes: Slots found on storage: number to bytes.
        committed: Slots that the newest durable record names.
        unusable: Slots whose files cannot be opened: no new slot gets one of their numbers.
        before: Slots that the record before the newest one names.
        in_flight: Most checkpoints that are written at a time.
        kept: Number of kept checkpoints for which there are always slots; pinned ones and others are added (I10).

    Attributes:
        sizes: Slots that exist: number to bytes.
        leased: Slots being written.
    """

    def __init__(
        self,
        sizes: Mapping[int, int],
        committed: Collection[int],
        unusable: Collection[int] = (),
        before: Collection[int] = (),
        *,
        in_flight: int,
        kept: int,
    ) -> None:
        self.leased: set[int] = set()
        self._in_flight = in_flight
        self._kept = kept
        self.sizes = dict(sizes)
        self._committed = set(committed)
        self._before = set(before)
        self._read: Counter[int] = Counter()
        self._unusable = frozenset(unusable)
        self._next = max([*sizes, *committed, *before, *unusable], default=-1) + 1

    @property
    def most(self) -> int:
        """The number of slots that may exist without other readers: checkpoints in flight plus checkpoints kept."""
        return self._in_flight + max(self._kept, len(self._committed))

    @property
    def count(self) -> int:
        """The number of slots that exist."""
        return len(self.sizes)

    def free(self) -> list[int]:
        """Return the slots that nothing uses, smallest number first."""
        return sorted(self.sizes.keys() - self._committed - self.leased - self._read.keys())

    def is_free(self, slot: int) -> bool:
        """Whether a slot exists and nothing uses it."""
        used = slot in self._committed or slot in self.leased or slot in self._read
        return slot in self.sizes and not used

    def decide(self, nbytes: int, passed_over: Collection[int] = ()) -> SlotDecision:
        """Choose a slot for a checkpoint of ``nbytes``, without the free slots ``passed_over`` (readers hold them).

        If readers hold slots, one slot beyond ``most`` is allowed; after that the caller has to wait. Each slot that a
        restore of this engine reads, and that no record names any more, allows one more.
        """
        free = self.free()
        if passed_over:
            free = [slot for slot in free if slot not in passed_over]
        fitting = [slot for slot in free if self.sizes[slot] >= nbytes]
        if fitting:
            return SlotDecision(min(fitting, key=self._rank))
        if free and self.count >= self.most:
            return SlotDecision(self._fresh()[0], create=True, remove=min(free, key=self._rank))
        # A restore of this engine may need the buffers that a waiting checkpoint holds: never wait for one.
        extra = len(self._read.keys() - self._committed) + (1 if passed_over else 0)
        return SlotDecision(self._fresh()[0], create=True) if self.count < self.most + extra else SlotDecision(None)

    def _rank(self, slot: int) -> tuple[bool, int, int]:
        """Return a sort key: slots to reuse first sort first, superseded checkpoints last, as they may be needed."""
        return slot in self._before, self.sizes[slot], slot

    def missing(self) -> list[int]:
        """Return the numbers of the slots to create so that every checkpoint in flight finds one."""
        return self._fresh(max(0, self.most - self.count))

    def _fresh(self, number: int = 1) -> list[int]:
        """Return ``number`` numbers that no slot has; a number is given again only when all others were given."""
        beyond = range(self._next, MOST_SLOT + 1)
        taken = self.sizes.keys() | self._committed | self._unusable
        gaps = (slot for slot in count() if slot not in taken)
        return list(islice(chain(beyond, gaps), number))

    def created(self, slot: int, nbytes: int) -> None:
        """Add a new, free slot of ``nbytes``."""
        if slot in self.sizes:
            raise ValueError(f"slot {slot} exists")
        self.sizes[slot] = nbytes
        self._next = max(self._next, slot + 1)

    def removed(self, slot: int) -> None:
        """Remove a free slot from the table. Called before its file is removed."""
        self._check_free(slot)
        del self.sizes[slot]

    def lease(self, slot: int) -> None:
        """Lease a free slot to a checkpoint."""
        self._check_free(slot)
        self.leased.add(slot)

    def _check_free(self, slot: int) -> None:
        if not self.is_free(slot):
            raise ValueError(f"slot {slot} is not free")

    def release(self, slot: int) -> None:
        """Take a slot back from a checkpoint that will not commit; nothing writes to it any more."""
        self.leased.remove(slot)

    def note_committed(self, slots: Iterable[int], before: Iterable[int]) -> None:
        """Set the slots that the newest record names, and free those it no longer names. Called when it is durable.

        Free slots that the record ``before`` it names are reused last.
        """
        self._before, self._committed = set(before), set(slots)
        self.leased -= self._committed

    def start_reading(self, slot: int) -> None:
        """Keep a slot from being reused until :meth:`stop_reading`, through any commits meanwhile."""
        if slot not in self.sizes or slot in self.leased:
            raise ValueError(f"slot {slot} is being written, or gone")
        self._read[slot] += 1

    def hold(self, slot: int) -> None:
        """Keep a leased slot from being reused, through its commit or release, until :meth:`stop_reading`."""
        if slot not in self.leased:
            raise ValueError(f"slot {slot} is not leased")
        self._read[slot] += 1

    def stop_reading(self, slot: int) -> None:
        """End :meth:`start_reading` or :meth:`hold`."""
        self._read[slot] -= 1
        if self._read[slot] <= 0:
            del self._read[slot]

    def surplus(self) -> list[int]:
        """Return the free slots beyond ``most`` (made for readers, or when more were kept), to be removed."""
        beyond = self.count - self.most
        return sorted(self.free(), key=self._rank)[:beyond] if beyond > 0 else []


async def open_slots(
    medium: Medium,
    record: Record,
    sync_names: Callable[[], Awaitable[None]],
    *,
    in_flight: int,
    kept: int,
    ahead: bool = True,
    known: KnownBytes | None = None,
) -> Slots:
    """Open the slots that a folder has. A slot that cannot be opened is logged and never used: its checkpoint is lost.

    ``record`` is the newest one; ``sync_names`` makes names durable; ``ahead``: the first checkpoint makes all slots,
    else each is made when it is needed; ``known`` is for :class:`Slots`, the rest for :class:`SlotTable`. Raises the
    error of opening if descriptors or memory are short, or if this process may not open the slot of a checkpoint.
    """
    files: dict[int, File] = {}
    unusable: dict[int, Exception] = {}
    for name in await medium.names():
        number = slot_number(name)
        if number is None:
            continue
        try:
            files[number] = await medium.open(name, writable=True)
        except (CorruptStoreError, OSError) as error:
            committed = any(entry.slot == number for entry in record.entries)
            if is_exhausted(error) or (is_forbidden(error) and committed):  # what it holds would be passed over
                raise
            unusable[number] = error
            write("unusable_slot", "%s cannot be used: %s", name, error, error=str(error))
    sizes = {number: file.nbytes for number, file in files.items()}
    named = [entry.slot for entry in record.entries]
    before = [entry.slot for entry in record.before]
    table = SlotTable(sizes, named, unusable, before, in_flight=in_flight, kept=kept)
    return Slots(table, medium, sync_names, files, unusable, known, _reserved=not ahead)


@dataclass(slots=True, eq=False)
class Slots:
    """Leases slots to checkpoints, against other processes too. Made by :func:`open_slots`."""

    table: SlotTable
    _medium: Medium
    _sync_names: Callable[[], Awaitable[None]]
    _files: dict[int, File]
    _unusable: Mapping[int, Exception]
    known: KnownBytes | None = None
    """Hashes of bytes that need not be written again; None: all chunks are written."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that is held while a slot is chosen, created or removed."""
    reader_waits: int = 0
    """Number of times that a checkpoint waited for other processes' readers."""
    _reserved: bool = False

    async def lease(self, nbytes: int) -> SlotLease:
        """Lease a slot of at least ``nbytes``, whole blocks; wait while readers hold all.

        Called under :attr:`lock`. Raises StoreFullError.
        """
        passed_over: set[int] = set()
        waiting = False
        while (lease := await self.lease_now(nbytes, passed_over)) is None:
            if not waiting:
                waiting = True
                self.reader_waits += 1
                text = "a checkpoint waits for %d reader(s) of this store to finish"
                write("readers", text, len(passed_over))
            await asyncio.sleep(LOCK_POLL_SECONDS)
            passed_over.clear()
        return lease

    async def lease_now(self, nbytes: int, passed_over: set[int], *, creates: bool = True) -> SlotLease | None:
        """Lease a slot; None if all are in use, or unless ``creates`` one would have to be created.

        Slots that readers hold are added to ``passed_over``. Called under :attr:`lock`. Raises StoreFullError.
        """
        if creates and not self._reserved:
            await self._reserve_all(nbytes)
        while True:
            slot, create, old = self.table.decide(nbytes, passed_over)
            if slot is None or (create and not creates):
                return None
            # Locked by a reader, or by the last requests of a killed predecessor: never wait for those.
            reused = old if create else slot
            if reused is not None and not await self._lock_free(reused):
                passed_over.add(reused)
                continue
            if not create:
                self.table.lease(slot)
                lease = SlotLease(slot, self._files[slot])
                if self.known is not None:
                    self.known.take(lease)
                return lease
            if old is not None:
                await self._remove_slot(old)
            await uninterrupted(self._create_slot(slot, nbytes))

    def start_reading(self, slot: int) -> File:
        """Keep a slot from being reused until :meth:`SlotTable.stop_reading`, and return its file.

        Raises DamagedError if the file is missing or not regular, ReadError if it could not be opened.
        """
        error = self._unusable.get(slot)
        if isinstance(error, OSError):
            raise ReadError(error.errno, error.strerror, error.filename) from error
        if error is not None:
            raise DamagedError(str(error)) from error
        if slot not in self._files:
            raise DamagedError(f"{slot_name(slot)}, which the newest record names, is missing")
        self.table.start_reading(slot)
        return self._files[slot]

    async def start_reading_free(self, slot: int) -> File:
        """Perform :meth:`start_reading` for a slot that no record names. Raises DamagedError if it is being written."""
        if slot in self.table.leased:
            raise DamagedError(f"{slot_name(slot)} is being written over")
        file = self.start_reading(slot)
        try:
            # The last requests of a predecessor that was killed hold the lock until they landed; no more come.
            if not await self._medium.lock(file, shared=True):
                raise DamagedError(f"{slot_name(slot)} is being written over")
            await self._medium.unlock(file)
        except BaseException:
            self.table.stop_reading(slot)
            raise
        return file

    async def remove_surplus(self) -> None:
        """Remove slots that are neither needed nor used any more; a failure is only logged."""
        if self.lock.locked() or not self.table.surplus():
            return  # a checkpoint is looking for a slot, perhaps for long: the next commit removes them
        async with self.lock:
            for slot in self.table.surplus():
                try:
                    if await self._lock_free(slot):
                        await self._remove_slot(slot)
                except OSError as error:
                    write("surplus", "%s could not be removed: %s", slot_name(slot), error)

    async def _reserve_all(self, nbytes: int) -> None:
        missing = self.table.missing()
        for done, number in enumerate(missing):
            try:
                await uninterrupted(self._create_slot(number, nbytes))
            except StoreFullError as error:
                if error.errno == errno.EFBIG:  # free space is no help
                    text = f"a slot has {nbytes} bytes: {error.strerror}"
                    raise StoreFullError(error.errno, text, error.filename) from error
                raise StoreFullError(
                    error.errno,
                    f"{self.table.most} slots of {nbytes} bytes are needed (in flight and kept), there was space for "
                    f"{self.table.count} ({len(missing) - done} missing): free {(len(missing) - done) * nbytes} bytes, "
                    "or lower max_in_flight or the counts that are kept; committed checkpoints are untouched",
                    error.filename,
                ) from error
        self._reserved = True

    async def _lock_free(self, slot: int) -> bool:
        """Lock a free slot; False if a reader of another process, or by now one of this process, holds it."""
        if not await self._medium.lock(self._files[slot]):
            return False
        if not self.table.is_free(slot):
            await self._medium.unlock(self._files[slot])
            return False
        return True

    async def _create_slot(self, number: int, nbytes: int) -> None:
        file = await self._medium.reserve(slot_name(number), nbytes)
        # Without this: a crash may leave a record that names a slot of which no file is there. Its size is flushed with
        # its bytes.
        await self._sync_names()
        self._files[number] = file
        self.table.created(number, nbytes)

    async def _remove_slot(self, number: int) -> None:
        """Remove a free slot's file; a crash may bring it back, and then it is free again: no record names it."""
        self.table.removed(number)  # before anything is awaited: a restore might begin to read it
        file = self._files.pop(number)
        if self.known is not None:
            self.known.forget_slot(number)

        async def remove() -> None:
            await self._medium.close(file)
            await self._medium.remove(file.name)

        await uninterrupted(remove())
