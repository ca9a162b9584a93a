# SPDX-License-Identifier: Apache-2.0
"""A bucket as a medium: its commits look like a folder of stores, so the readers of stores read them, unchanged.

No such folder exists. ``store.json`` and ``commit`` are generated at each read, from the newest record and the live
commits, which it names; ``slot-007`` is commit 7: its payload lies in data objects, its manifest in the index. The
commits of a group look like the stores of its ranks, in ``rank-00000/`` and so on. Nothing is locked: if an object is
missing and its commit is not live any more, it was replaced, and the reader starts again.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, NoReturn

from msgspec.structs import replace

from pccheck_async.bucket import protocol
from pccheck_async.bucket.coding import decompress, stored_range
from pccheck_async.bucket.copies import Copied
from pccheck_async.bucket.names import COMMITS
from pccheck_async.bucket.objects import INSTALL, MissingObjectError, Objects, RefusedError
from pccheck_async.bucket.owner import read_commit, read_index
from pccheck_async.bucket.record import CommitRecord, Kept, PartIndex, PartName
from pccheck_async.errors import CorruptStoreError, DamagedError, ReadError, WriteError
from pccheck_async.format import Applied, Entry, Identity, Line, Membership, Parts, Record
from pccheck_async.format import checksum as checksums
from pccheck_async.format.record import (
    COMMIT_NAME,
    COMMIT_NBYTES,
    FORMAT_VERSION,
    GROUP_VERSION,
    IDENTITY_NAME,
    MIN_BLOCK,
    encode_identity,
    encode_record,
    region_offsets,
    slot_name,
    slot_number,
)
from pccheck_async.medium import File, Medium, MediumFacts, MediumStatistics, Part
from pccheck_async.store import rank_name, rank_of
from pccheck_async.telemetry import StageClock, write
from pccheck_async.transfer import Tasks, uninterrupted

__all__ = ["BucketMedium", "Stored"]

_READS = 16
"""Indexes that are read at a time."""
_LOOKS = 5
"""Attempts to read the newest record, which may be superseded and deleted before it is read."""


class Stored(NamedTuple):
    """How many bytes checkpoints take in a bucket.

    Attributes:
        by_counter: Of each checkpoint, objects that others need, too, included; None: a part of it cannot be read.
        nbytes: Of all together.
        is_compressed: Whether any object is compressed.
    """

    by_counter: dict[int, int | None]
    nbytes: int
    is_compressed: bool


class BucketMedium(Medium):
    """The commits of a bucket, read-only. Requests that the object store refuses raise RefusedError.

    Attributes:
        line: The line of the newest record, as of the last :meth:`look`.
        owner: The run that made that record; empty for none.
        world: The most ranks of a live commit of a group, as of the last read; None: one process made the commits.
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.line: Line | None = None
        self.owner = b""
        self._clock = StageClock("write", "read", "flush")
        self._records: dict[Kept, CommitRecord] = {}  # they never change
        self._now: dict[int, tuple[Kept, CommitRecord]] = {}
        self._slots: dict[File, tuple[PartIndex, list[int], Kept]] = {}  # that are open, with the starts of objects
        self._commits: dict[File, int | None] = {}  # open files of records, with their ranks
        self.world: int | None = None

    # -- live commits

    async def look(self) -> tuple[int, list[tuple[Kept, CommitRecord]]]:
        """Return the newest record's number, 0 for none, and the live commits whose records can be read, newest first.

        Also sets :attr:`line` and :attr:`owner`. Raises CorruptStoreError: the newest record is damaged; ReadError,
        RefusedError.
        """
        for _ in range(_LOOKS):
            number = protocol.listing_of(await self.objects.list(COMMITS)).newest
            if not number:
                return 0, []
            newest = await self._newest(number)
            if newest is None:
                continue  # superseded, and deleted, meanwhile
            self.line, self.owner = newest.line, newest.owner
            found = [(kept, record) for kept in protocol.live(number, newest) if (record := await self._kept(kept))]
            self._records = {kept: record for kept, record in self._records.items() if kept.number >= number} | dict(
                found
            )
            return number, found
        raise ReadError(errno.EAGAIN, f"the commits in {self.objects.url} change faster than they can be read")

    async def _newest(self, number: int) -> CommitRecord | None:
        known = next((record for kept, record in self._records.items() if kept.number == number), None)
        if known is None and (known := await read_commit(self.objects, number)) is not None:
            self._records[Kept(number, known.put)] = known
        return known

    async def _kept(self, kept: Kept) -> CommitRecord | None:
        """Return the record of a live commit; None if it is missing, damaged, or replaced by another one."""
        if kept in self._records:
            return self._records[kept]
        try:
            record = await read_commit(self.objects, kept.number)
        except CorruptStoreError as error:
            write("bucket_damaged", "%s: %s", self.objects.url, error, error=str(error))
            return None
        return record if record is not None and record.put == kept.put else None

    @property
    def counting(self) -> list[int]:
        """The numbers of the live commits, as of the last read of ``commit``, ``store.json`` or the names."""
        return [*self._now]

    async def read_world(self) -> int | None:
        """Read the live commits, and return :attr:`world`. Raises the errors of :meth:`look`."""
        await self._look()
        return self.world

    async def stored(self) -> Stored:
        """Return how many bytes the checkpoints take in the bucket. Raises the errors of :meth:`look`."""
        await self._look()
        places, sizes, by_counter = asyncio.Semaphore(_READS), dict[str, int](), dict[int, int | None]()
        packed = False

        async def add(counter: int, part: PartName) -> None:
            nonlocal packed
            try:
                async with places:
                    index = await read_index(self.objects, part)
            except CorruptStoreError:  # or it was replaced a moment ago
                by_counter[counter] = None
                return
            found, packed = index.sizes | {part.key: part.nbytes}, packed or bool(index.blocks)
            sizes.update(found)
            if (known := by_counter[counter]) is not None:
                by_counter[counter] = known + sum(found.values())

        async with Tasks() as tasks:
            for _, record in self._now.values():
                by_counter[record.entry.counter] = 0
                for part in record.parts:
                    tasks.create_task(add(record.entry.counter, part))
        return Stored(by_counter, sum(sizes.values()), packed)

    async def _look(self) -> int:
        """Read the live commits that count; return the newest record's number, 0 for none.

        Those that are not of the newest one's kind (a group's, or one process's), or are out of order, do not count.
        """
        number, found = await self.look()
        commits = [(kept, record) for kept, record in found if record.parts]
        of_group, last = bool(commits) and commits[0][1].members is not None, None
        self._now = {}
        for kept, record in commits:
            if (record.members is not None) == of_group and (last is None or record.entry.counter < last):
                self._now[kept.number], last = (kept, record), record.entry.counter
        self.world = max(len(record.parts) for _, record in self._now.values()) if of_group else None
        return number

    async def _record(self, rank: int | None) -> Record | None:
        """Return the live commits as the record of a store of one process, or of a rank's store.

        None if there is no such store. Raises the errors of :meth:`look`.
        """
        number = await self._look()
        there = rank is None if self.world is None else rank is not None and rank < self.world
        if not number or not there:
            return None
        live = [(kept, record) for kept, record in self._now.values() if (rank or 0) < len(record.parts)]
        entries = [replace(record.parts[rank or 0].entry, slot=kept.number) for kept, record in live]
        if rank is None:
            return Record(2 * number, tuple(entries))
        keys = [(Copied.of(kept, record).key, record) for kept, record in self._now.values()]
        pinned = tuple(key for key, record in keys if key is not None and record.entry.pinned)
        members, named = list[Membership](), list[Entry]()
        for (kept, record), entry in zip(live, entries, strict=True):
            if (key := Copied.of(kept, record).key) is not None:
                members.append(Membership(key.run, rank, len(record.parts), True))
                named.append(entry)
        applied = Applied(members[0].run, 0, pinned) if members else None
        return Record(2 * number, tuple(named), parts=Parts(applied, tuple(members)))

    def _identity(self, rank: int | None) -> Identity:
        name = self.objects.url if rank is None else f"{self.objects.url}/{rank_name(rank)}"
        return Identity(
            format=FORMAT_VERSION if rank is None else GROUP_VERSION,
            store_id=hashlib.sha256(name.encode()).hexdigest()[:32],
            checksum=checksums.NAME,
            block_bytes=MIN_BLOCK,
        )

    def _commit_file(self, record: Record, rank: int | None) -> bytes:
        data = bytearray(COMMIT_NBYTES)
        for generation in (record.generation, record.generation - 1):  # nothing is superseded: both name the same
            try:
                again, store = replace(record, generation=generation), self._identity(rank)
                encoded = encode_record(again, store.id_bytes, MIN_BLOCK)
            except ValueError as error:
                raise CorruptStoreError(f"the commits in {self.objects.url} are impossible: {error}") from None
            for offset in region_offsets(generation):
                data[offset : offset + len(encoded)] = encoded
        return bytes(data)

    # -- methods for readers

    async def prepare(self, *, create: bool) -> MediumFacts:
        return MediumFacts(1, 1, direct=False, why=f"objects in {self.objects.url}")

    async def names(self) -> list[str]:
        if not await self._look():
            return []
        if self.world is not None:
            return [rank_name(rank) for rank in range(self.world)]
        return sorted([COMMIT_NAME, IDENTITY_NAME, *map(slot_name, self._now)])

    async def read_small(self, name: str) -> bytes | None:
        rank, name = _split(name)
        if name != IDENTITY_NAME or await self._record(rank) is None:
            return None
        return encode_identity(self._identity(rank))

    async def open(self, name: str, *, writable: bool) -> File:
        if writable:
            self._refuse()
        rank, name = _split(name)
        if name == COMMIT_NAME:
            file = File(name, COMMIT_NBYTES)
            self._commits[file] = rank
            return file
        number = slot_number(name)
        kept, record = self._now.get(-1 if number is None else number, (None, None))
        if kept is None or record is None or (rank or 0) >= len(record.parts):
            raise FileNotFoundError(errno.ENOENT, "there is no such commit any more", name)
        part = record.parts[rank or 0]
        try:
            index = await read_index(self.objects, part)
        except DamagedError as error:
            raise await self._lost(kept, str(error)) from None
        whose = "" if rank is None else f"rank {rank}'s part of "
        end = part.entry.manifest_offset + part.entry.manifest_nbytes
        file = File(f"{whose}commit {number} in {self.objects.url}", end)
        self._slots[file] = index, [*accumulate((nbytes for _, nbytes in index.objects), initial=0)], kept
        return file

    async def read(self, file: File, offset: int, into: memoryview) -> int:
        with self._clock.timed("read", len(into)):
            if file not in self._slots:
                return await self._read_commit(offset, into, self._commits.get(file))
            index, starts, _ = self._slots[file]
            end = min(offset + len(into), file.nbytes)
            if end > starts[-1]:
                tail = bytes(file.nbytes - starts[-1] - len(index.manifest)) + index.manifest
                low = max(offset, starts[-1])
                into[low - offset : end - offset] = tail[low - starts[-1] : end - starts[-1]]
            try:
                async with Tasks() as tasks:
                    for number in range(max(0, bisect_right(starts, offset) - 1), len(index.objects)):
                        low, high = max(offset, starts[number]), min(end, starts[number + 1])
                        if low >= high:
                            break
                        part = into[low - offset : high - offset]
                        tasks.create_task(self._read_object(index, number, low - starts[number], part))
            except MissingObjectError as error:
                raise await self.lost(file, f"in the bucket {error}") from None
            return max(0, end - offset)

    async def view(self, file: File, offset: int, nbytes: int) -> memoryview | None:
        if file not in self._slots:
            return None
        index, starts, _ = self._slots[file]
        number = bisect_right(starts, offset) - 1
        if number >= len(index.objects) or offset + nbytes > starts[number + 1] or index.blocks_of(number):
            return None
        with self._clock.timed("read", nbytes):
            try:
                return await self.objects.read(index.objects[number][0], offset - starts[number], nbytes)
            except MissingObjectError as error:
                raise await self.lost(file, f"in the bucket {error}") from None

    async def _read_object(self, index: PartIndex, number: int, start: int, into: memoryview) -> None:
        """Fill ``into`` from an object's bytes, from ``start`` on, as they were before it was compressed."""
        (key, nbytes), blocks = index.objects[number], index.blocks_of(number)
        if not blocks:
            into[:] = await self.objects.read(key, start, len(into))
            return
        low, high = stored_range(blocks, start, len(into))
        stored = await self.objects.read(key, low, high - low)
        try:
            await uninterrupted(asyncio.to_thread(decompress, stored, blocks, nbytes, start, into))
        except ImportError:
            raise RefusedError(f"compressed objects in {self.objects.url} need zstandard: {INSTALL}") from None
        except DamagedError as error:
            raise DamagedError(f"{key}: {error}") from None

    async def _read_commit(self, offset: int, into: memoryview, rank: int | None) -> int:
        record = await self._record(rank)
        data = b"" if record is None else self._commit_file(record, rank)[offset : offset + len(into)]
        into[: len(data)] = data
        return len(data)

    def objects_of(self, file: File) -> tuple[tuple[str, int], ...]:
        """Return name and size in bytes of each data object of an open commit."""
        return self._slots[file][0].objects

    async def lost(self, file: File, why: str) -> DamagedError | ReadError:
        """Return the error for a missing object of an open commit: DamagedError if it is still live, else ReadError."""
        return await self._lost(self._slots[file][2], why)

    async def _lost(self, kept: Kept, why: str) -> DamagedError | ReadError:
        _, found = await self.look()
        if any(kept == now for now, _ in found):
            return DamagedError(f"commit {kept.number}: {why}, though the commit counts")
        text = f"commit {kept.number} of {self.objects.url} was replaced while it was read; open it again"
        return ReadError(errno.ESTALE, text)

    async def lock(self, file: File, *, shared: bool = False) -> bool:
        return True

    async def unlock(self, file: File) -> None: ...

    async def close(self, file: File | None = None) -> None:
        if file is None:
            self.abandon()
        else:
            self._slots.pop(file, None)
            self._commits.pop(file, None)

    def abandon(self) -> None:
        self._slots.clear()
        self._commits.clear()

    def statistics(self) -> MediumStatistics:
        stages = self._clock.stages()
        why = f"objects in {self.objects.url}"
        return MediumStatistics("obstore", False, why, stages["write"], stages["read"], stages["flush"])

    # -- methods for writers: all refuse

    def _refuse(self) -> NoReturn:
        raise WriteError(
            errno.EROFS,
            "a bucket is written by an engine's drain, which owns it, and by nothing else",
            self.objects.url,
        )

    async def reserve(self, name: str, nbytes: int) -> File:
        self._refuse()

    async def remove(self, name: str) -> None:
        self._refuse()

    async def write(self, file: File, offset: int, data: memoryview) -> None:
        self._refuse()

    async def make_durable(self, parts: Sequence[Part], *, ignore_cancellation: bool = False) -> None:
        self._refuse()

    async def sync_names(self) -> None:
        self._refuse()

    async def replace(self, name: str, data: bytes, *, keep_as: str = "") -> None:
        self._refuse()


def _split(name: str) -> tuple[int | None, str]:
    """Return the rank in whose folder a file is, None for none, and the file's name there."""
    folder, _, file = name.rpartition("/")
    return rank_of(folder), file
