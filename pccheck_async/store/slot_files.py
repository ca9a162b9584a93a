"""The slots of a store as files: created, locked, leased, removed. Which one comes next, :mod:`slots` decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from pccheck_async.errors import CorruptStoreError, DamagedError, ReadError, StoreFullError, is_exhausted
from pccheck_async.format.record import Record, slot_name, slot_number
from pccheck_async.medium import File, Writer
from pccheck_async.store.slots import Create, Replace, Reuse, SlotTable, Wait
from pccheck_async.telemetry.logs import write
from pccheck_async.transfer.uninterrupted import uninterrupted

__all__ = ["SlotFiles", "SlotLease", "open_slots"]

_POLL_SECONDS = 0.01
"""Locks of other processes can only be polled: flock tells nobody when it becomes free."""

Flush: TypeAlias = Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]
"""Calls a function that flushes; where that fails, the store takes no more commits."""


@dataclass(slots=True, eq=False)
class SlotLease:
    """A slot that one checkpoint writes into; exclusive, also against other processes. Given back exactly once."""

    slot: int
    file: File
    nbytes: int


async def open_slots(writer: Writer, record: Record, *, in_flight: int, kept: int, flush: Flush) -> SlotFiles:
    """Open the slots that a folder has; one that cannot be opened is left alone, and costs what it holds.

    Args:
        writer: The folder's files.
        record: The newest one.
        in_flight: Most checkpoints that are written at a time.
        kept: Checkpoints for which there is always room.
        flush: See :data:`Flush`.
    """
    files: dict[int, File] = {}
    unusable: dict[int, Exception] = {}
    for name in await writer.names():
        number = slot_number(name)
        if number is None:
            continue
        try:
            files[number] = await writer.open(name, writable=True)
        except (CorruptStoreError, OSError) as error:
            if is_exhausted(error):
                raise
            unusable[number] = error
            write(logging.WARNING, "unusable_slot", "%s cannot be used: %s", name, error, error=str(error))
    sizes = {number: file.nbytes for number, file in files.items()}
    named = [entry.slot for entry in record.entries]
    before = [entry.slot for entry in record.before]
    table = SlotTable(sizes, [*before, *named], unusable, in_flight=in_flight, kept=kept)
    table.committed(named)
    return SlotFiles(writer, files, unusable, table, flush)


class SlotFiles:
    """Leases slots to checkpoints, against other processes too. Made by :func:`open_slots`.

    Attributes:
        lock: Held while a slot is looked for or removed.
        reader_waits: Times that a checkpoint waited for other processes' readers.
    """

    def __init__(
        self, writer: Writer, files: dict[int, File], unusable: Mapping[int, Exception], table: SlotTable, flush: Flush
    ) -> None:
        self.lock = asyncio.Lock()
        self.reader_waits = 0
        self._writer = writer
        self._files = files
        self._unusable = unusable
        self._table = table
        self._flush = flush
        self._reserved = False

    @property
    def count(self) -> int:
        """Slot files."""
        return self._table.count

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return self._table.nbytes

    async def lease(self, nbytes: int) -> SlotLease:
        """Lease a slot of at least ``nbytes``, whole blocks. Called under :attr:`lock`. Raises StoreFullError."""
        if not self._reserved:
            await self._reserve_all(nbytes)
        slot = await self._find_slot(nbytes)
        self._table.lease(slot)
        return SlotLease(slot, self._files[slot], nbytes)

    async def release(self, lease: SlotLease) -> None:
        """Give back a slot that is still locked, once nothing writes to it any more."""
        await self._writer.unlock(lease.file)
        self.drop(lease)

    def drop(self, lease: SlotLease) -> None:
        """Give back a slot that was unlocked before, and that no record will name."""
        self._table.release(lease.slot)

    def committed(self, slots: Iterable[int]) -> None:
        """Take note that a durable record names exactly these slots: all others that nobody leases are free (I3)."""
        self._table.committed(slots)

    def start_reading(self, slot: int) -> File:
        """Keep a slot from being reused until :meth:`stop_reading`.

        Raises:
            DamagedError: it is missing, or no file.
            ReadError: its file could not be opened.
        """
        error = self._unusable.get(slot)
        if isinstance(error, OSError):
            raise ReadError(error.errno, error.strerror, error.filename) from error
        if error is not None:
            raise DamagedError(str(error)) from error
        if slot not in self._files:
            raise DamagedError(f"{slot_name(slot)}, which the newest record names, is missing")
        self._table.start_reading(slot)
        return self._files[slot]

    async def start_reading_free(self, slot: int) -> File:
        """Do so with a slot that no record names. Raises DamagedError also where it is being written."""
        if slot in self._table.leased:
            raise DamagedError(f"{slot_name(slot)} is being written over")
        file = self.start_reading(slot)
        try:
            # The last requests of a predecessor that was killed hold the lock until they landed; no more come.
            if not await self._writer.try_lock(file, shared=True):
                raise DamagedError(f"{slot_name(slot)} is being written over")
            await self._writer.unlock(file)
        except BaseException:
            self.stop_reading(slot)
            raise
        return file

    def stop_reading(self, slot: int) -> None:
        """End :meth:`start_reading`."""
        self._table.stop_reading(slot)

    async def remove_surplus(self) -> None:
        """Remove slots that are neither needed nor used any more; a failure is only logged."""
        if self.lock.locked() or not self._table.surplus():
            return  # where a checkpoint looks for a slot, perhaps for long, the next commit does it
        async with self.lock:
            for slot in self._table.surplus():
                try:
                    if await self._lock_free(slot):
                        await self._remove_slot(slot)
                except OSError as error:
                    write(logging.WARNING, "surplus", "%s could not be removed: %s", slot_name(slot), error)

    async def _reserve_all(self, nbytes: int) -> None:
        missing = self._table.missing()
        for done, number in enumerate(missing):
            try:
                await uninterrupted(self._create_slot(number, nbytes))
            except StoreFullError as error:
                raise StoreFullError(
                    error.errno,
                    f"{self._table.most} slots of {nbytes} bytes are needed (in flight and kept), there was space for "
                    f"{self._table.count} ({len(missing) - done} missing); the last checkpoint is untouched",
                    error.filename,
                ) from error
        self._reserved = True

    async def _find_slot(self, nbytes: int) -> int:
        passed_over: set[int] = set()
        while True:
            decision = self._table.decide(nbytes, passed_over)
            match decision:
                case Reuse(slot):
                    # Held by a reader, or by the requests of a predecessor that was killed: never wait for those.
                    if await self._lock_free(slot):
                        return slot
                    passed_over.add(slot)
                case Create(slot):
                    await uninterrupted(self._create_slot(slot, nbytes))
                case Replace(old, slot):
                    if not await self._lock_free(old):
                        passed_over.add(old)
                        continue
                    await self._remove_slot(old)
                    await uninterrupted(self._create_slot(slot, nbytes))
                case Wait(readers):
                    self.reader_waits += 1
                    text = "a checkpoint waits for %d reader(s) of this store to finish"
                    write(logging.WARNING, "readers", text, readers)
                    await self._wait_for_readers(passed_over)
                    passed_over.clear()

    async def _lock_free(self, slot: int) -> bool:
        """Lock a free slot; False where a reader has it: of another process, or of this one by now."""
        if not await self._writer.try_lock(self._files[slot]):
            return False
        if self._table.is_free(slot):
            return True
        await self._writer.unlock(self._files[slot])
        return False

    async def _wait_for_readers(self, slots: set[int]) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            free = set(self._table.free())
            if free - slots:
                return
            for slot in slots & free:
                if await self._writer.try_lock(self._files[slot]):
                    await self._writer.unlock(self._files[slot])
                    return

    async def _create_slot(self, number: int, nbytes: int) -> None:
        file = await self._writer.create(slot_name(number), nbytes)
        # Crash: a record may name this slot later, and its name must be there then. Its size is flushed with its bytes.
        await self._flush(self._writer.sync_folder)
        self._files[number] = file
        self._table.created(number, nbytes)

    async def _remove_slot(self, number: int) -> None:
        """Remove a free slot's file; a crash may bring it back, and then it is free again: no record names it."""
        self._table.removed(number)  # before anything is awaited: a restore might begin to read it
        await uninterrupted(self._remove_file(self._files.pop(number)))

    async def _remove_file(self, file: File) -> None:
        await self._writer.close_file(file)
        await self._writer.unlink(file.name)
