# SPDX-License-Identifier: Apache-2.0
"""One run's ownership of a prefix: taking it over, commits, and the deletion of objects that no live commit needs.

This module orders the requests; :mod:`.protocol` decides by their answers, and comments here name its rules. Nothing
but requests is awaited, so the tests play every order of two runs' requests, late and lost ones among them, and replace
the steps by wrong ones. A run has one owner, and calls one method at a time.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from msgspec import structs

from pccheck_async.bucket import protocol
from pccheck_async.bucket.names import COMMITS, DATA, commit_key, commit_number
from pccheck_async.bucket.objects import MissingObjectError, Objects, RefusedError
from pccheck_async.bucket.record import (
    MOST_INDEX_NBYTES,
    MOST_RECORD_NBYTES,
    CommitRecord,
    Kept,
    PartIndex,
    PartName,
    decode_commit,
    decode_index,
    encode_commit,
)
from pccheck_async.errors import CorruptStoreError, DamagedError, StoreLockedError, WriteError
from pccheck_async.format import Line

__all__ = ["Owner", "read_commit", "read_index"]

_MOST_LOSSES = 20
"""Attempts at taking over, in each of which another run takes the number first, before it is given up."""
_MOST_ATTEMPTS = 6
"""Most times that one record is sent."""


async def read_commit(objects: Objects, number: int) -> CommitRecord | None:
    """Read the record of a commit; None: there is none. Raises CorruptStoreError, ReadError, RefusedError."""
    try:
        data = await objects.get(commit_key(number), MOST_RECORD_NBYTES)
    except MissingObjectError as error:
        raise CorruptStoreError(f"the record of commit {number} in the bucket is impossible: {error}") from None
    return None if data is None else decode_commit(data, number)


async def read_index(objects: Objects, part: PartName) -> PartIndex:
    """Read the index of a part. Raises DamagedError: it is gone; CorruptStoreError, ReadError, RefusedError."""
    try:
        data = await objects.get(part.key, min(part.nbytes, MOST_INDEX_NBYTES))
    except MissingObjectError as error:
        raise DamagedError(f"in the bucket {error}") from None
    if data is None or len(data) != part.nbytes:
        raise DamagedError(f"{part.key} is gone from the bucket, or has another length")
    return decode_index(data, part)


class Owner:
    """The run that may write under a prefix, from :meth:`take_over` until another run takes it over.

    Args:
        objects: The objects under the prefix.
        store: The id of the store that the run copies from.
        keep_last: Most checkpoints that stay committed.
        run: The id of the run; random by default.

    Attributes:
        run: The id of the run, 16 random bytes.
        base: The number of this run's newest record; 0 before :meth:`take_over`.
        now: The live commits, newest first.
        records: The records of :attr:`now` that could be read.
        spare: Numbers of commits whose uploaded data this run may still use, so that they are not deleted.
        adoptable: Data objects that were uploaded for :attr:`spare`, with their sizes in bytes.
        line: The line of the store, for the next record.
        line_there: The line of the newest record when this run took over; the run's fence has it, too.
        owner_there: The run that made that record; empty for none.
    """

    def __init__(self, objects: Objects, store: bytes, keep_last: int, run: bytes | None = None) -> None:
        self.objects = objects
        self.run = secrets.token_bytes(16) if run is None else run
        self.base = 0
        self.now: tuple[Kept, ...] = ()
        self.records: dict[Kept, CommitRecord] = {}
        self.spare: tuple[int, ...] = ()
        self.adoptable: dict[str, int] = {}
        self.line: Line | None = None
        self.line_there: Line | None = None
        self.owner_there = b""
        self._store, self._keep_last = store, keep_last
        self._named: dict[str, Collection[str]] = {}  # by index

    @property
    def target(self) -> int:
        """The number that the next commit gets unless another run takes it; its data objects are named by it."""
        return self.base + 1

    @property
    def live_parts(self) -> tuple[PartName, ...]:
        """The parts of the newest live commit whose record could be read; empty if there is none."""
        return next((record.parts for record in self.records.values() if record.parts), ())

    def _record(
        self,
        keep: Sequence[Kept],
        parts: Sequence[PartName] = (),
        spare: Sequence[int] = (),
        members: int | None = None,
    ) -> CommitRecord:
        put = secrets.token_bytes(16)
        return CommitRecord(self.run, put, self._store, self.line, tuple(keep), tuple(spare), tuple(parts), members)

    # -- taking over

    async def take_over(self, *, empty: bool = False) -> None:
        """Make this run the owner (B3): from now on no other run commits. ``empty``: refuse a prefix with objects.

        Also checks that the store keeps preconditions and lists what was just written, and reads the live records.

        Raises:
            StoreLockedError: other runs are taking it over all the time, or one did a moment ago.
            RefusedError: the store does not keep preconditions, or shows old lists; or the prefix is not empty.
            CorruptStoreError: the newest record is damaged; ReadError, WriteError.
        """
        overtaken = 0
        for attempt in range(1, _MOST_LOSSES + 1):
            listing = protocol.listing_of([*await self.objects.list(COMMITS), *await self.objects.list(DATA)])
            if empty and (listing.commits or listing.data):
                raise RefusedError(f"{self.objects.url} holds checkpoints already: give an empty prefix")
            newest = await self._newest(listing)
            if newest is None and listing.newest:
                continue  # it was superseded meanwhile
            now = () if newest is None else protocol.live(listing.newest, newest)
            number, spare = protocol.next_number(listing), protocol.drafts(listing, newest)
            line = self.line if newest is None else newest.line
            members = newest.members if newest is not None and now else None
            fence = structs.replace(self._record(now, spare=spare, members=members), line=line)
            if protocol.outcome(await self.settle(number, fence), fence) != "mine":
                await self.objects.pause(attempt)
                continue
            if await self._overtaken(number, fence):
                overtaken += 1
                if overtaken > 1:
                    raise StoreLockedError(f"another run takes {self.objects.url} over at the same time: end one")
                continue
            self.base, self.now, self.spare, self.line_there = number, now, spare, line
            self.owner_there = b"" if newest is None else newest.owner
            self.adoptable = protocol.adoptable(listing, spare)
            self.records = await self.read(now)
            return
        raise StoreLockedError(f"other runs take {self.objects.url} over all the time: end all but one")

    async def _newest(self, listing: protocol.Listing) -> CommitRecord | None:
        return await read_commit(self.objects, listing.newest) if listing.commits else None

    async def _overtaken(self, number: int, fence: CommitRecord) -> bool:
        """Return whether there is a record above the fence. Raises RefusedError if the store cannot be trusted.

        The fence is created once more, with the same bytes: a store that takes it for new would let two runs commit.
        """
        again = await self._create_again(number, fence)
        listed = protocol.listing_of(await self.objects.list(COMMITS))
        if listed.newest > number:
            return True  # a newer run may have deleted the fence meanwhile
        if number not in listed.commits:
            raise RefusedError(
                f"{self.objects.url}: the store does not list an object that was just written; commits need lists "
                "that are up to date (no cache or replica in between)"
            )
        if again:
            raise RefusedError(
                f"{self.objects.url}: the store ignores preconditions (If-None-Match), so two runs could destroy each "
                "other's checkpoints: use a version of its server that keeps them"
            )
        return False

    async def _create_again(self, number: int, fence: CommitRecord) -> bool:
        data, attempt = encode_commit(fence, number), 0
        while True:
            attempt += 1
            try:
                return await self.objects.create(commit_key(number), data)
            except OSError:  # no answer
                if attempt >= _MOST_ATTEMPTS:
                    raise
                await self.objects.pause(attempt)

    async def read(self, now: Sequence[Kept]) -> dict[Kept, CommitRecord]:
        """Read the records of live commits; records that are damaged, missing or replaced are left out."""
        found = dict[Kept, CommitRecord]()
        for kept in now:
            with suppress(CorruptStoreError):
                record = await read_commit(self.objects, kept.number)
                if record is not None and record.put == kept.put:
                    found[kept] = record
        return found

    # -- one record

    async def settle(self, number: int, record: CommitRecord) -> CommitRecord:
        """Create a record unless its number is taken; return the record that has the number.

        If a request is not answered and no record is found, the same bytes are sent again: it may still arrive (B6).

        Raises WriteError, ReadError: it is unknown whether the record is, or will be, there.
        """
        data, attempt = encode_commit(record, number), 0
        failure: OSError | None = None
        while attempt < _MOST_ATTEMPTS:
            attempt += 1
            try:
                if await self.objects.create(commit_key(number), data):
                    return record
            except OSError as error:  # no answer
                failure = error
            found = await read_commit(self.objects, number)
            if found is not None:
                return found
            await self.objects.pause(attempt)
        raise failure or WriteError(errno.EAGAIN, f"record {number} of {self.objects.url} is neither there nor created")

    async def higher(self, number: int) -> int:
        """Return the highest number of a record above ``number``, 0 for none (B4)."""
        listed = await self.objects.list(COMMITS, after=commit_key(number))
        return max((found for key, _ in listed if (found := commit_number(key)) is not None), default=0)

    async def _stop(self, number: int) -> NoReturn:
        """Raise StoreLockedError: the record of this number is another run's."""
        found = await read_commit(self.objects, number)
        which = "" if found is None else f" (run {found.owner.hex()[:8]}, of store {found.store.hex()[:8]})"
        raise StoreLockedError(
            f"another run{which} took {self.objects.url} over: this one copies nothing more there, and deletes nothing"
        )

    # -- commits

    async def commit(self, parts: Sequence[PartName], members: int | None = None) -> bool:
        """Commit a checkpoint whose parts are uploaded; return False if one at least as new is committed already (B7).

        ``parts``: those of all ranks, in their order; ``members``: as in :class:`.CommitRecord`. When this returns, a
        restart finds the checkpoint, or a newer one, in the bucket.

        Raises StoreLockedError: another run took the prefix over; WriteError, ReadError: the checkpoint may be
        committed, or may be later; call this again, or commit another one.
        """
        counter, came_late = parts[0].entry.counter, False
        while True:
            if not protocol.may_send(counter, self.counters):
                if came_late:  # an earlier attempt for this checkpoint: what is spared was for that
                    self.spare, self.adoptable = (), {}
                return came_late
            keep = protocol.retained(self.now, self._keep_last - 1)
            if await self._made(self._record(keep, parts, members=members)):
                return True
            came_late = True

    async def check(self, parts: Sequence[PartName]) -> None:
        """Read the indexes of parts that are to be committed: other processes may have uploaded them elsewhere.

        Raises RefusedError: one is not there; ReadError.
        """
        for part in parts:
            try:
                await self._needed(part)
            except CorruptStoreError as error:
                raise RefusedError(
                    f"{self.objects.url}: the part of rank {part.rank} is not there, as seen from here ({error}): all "
                    "ranks need the same bucket, and no folder that each host has for itself"
                ) from None

    async def _needed(self, part: PartName) -> Collection[str]:
        """Return the data objects of a part. Raises the errors of :func:`read_index`."""
        if part.key not in self._named:
            index = await read_index(self.objects, part)
            self._named[part.key] = frozenset(key for key, _ in index.objects)
        return self._named[part.key]

    async def amend(self, without: Collection[int]) -> None:
        """Make a record that no longer names the commits ``without`` (numbers). Raises the errors of :meth:`commit`."""
        made = False
        while not made:
            keep = protocol.retained(self.now, len(self.now), without)
            of_group = (self.records[kept].members for kept in keep if kept in self.records)
            members = next((each for each in of_group if each is not None), None)
            made = await self._made(self._record(keep, spare=self.spare, members=members), self.spare)

    async def _made(self, record: CommitRecord, spare: Sequence[int] = ()) -> bool:
        """Make the next record. False: an earlier attempt of this run was applied in its place, and is now the base."""
        number = self.base + 1
        found = await self.settle(number, record)
        came = protocol.outcome(found, record)
        if came == "other":
            await self._stop(number)
        if came == "earlier":
            await self._rebase(number, found)
            return False
        await self._own(number, record, spare)
        return True

    @property
    def counters(self) -> list[int]:
        """The counters of the committed checkpoints whose records could be read, newest first."""
        return [record.entry.counter for record in self.records.values()]

    async def _rebase(self, number: int, found: CommitRecord) -> None:
        """Continue from a record of this run that was given up and was created after all."""
        await self._own(number, found, self.spare)

    async def _own(self, number: int, record: CommitRecord, spare: Sequence[int] = ()) -> None:
        """Confirm a record of this run that was created (B4), and make it the base.

        Raises StoreLockedError if another run made a higher one.
        """
        if above := await self.higher(number):
            await self._stop(above)
        known = {**self.records, Kept(number, record.put): record}
        self.base, self.spare, self.now = number, tuple(spare), protocol.live(number, record)
        self.records = {kept: known[kept] for kept in self.now if kept in known}
        self.adoptable = self.adoptable if spare else {}

    # -- deletion

    async def collect(self) -> int:
        """Delete the objects that no live commit needs, once a commit is confirmed; return their number (B5).

        If this fails, the next call deletes them.
        """
        named = await self.named()
        listing = protocol.listing_of([*await self.objects.list(COMMITS), *await self.objects.list(DATA)])
        keys = protocol.deletable(self.base, named, listing, self.spare)
        await self.delete(keys)
        return len(keys)

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects in the order of ``keys``: records first, so that the data of a record that is found exist."""
        for start in range(0, len(keys), 1000):
            await self.objects.delete(keys[start : start + 1000])

    async def named(self) -> Mapping[Kept, tuple[CommitRecord, Collection[str]] | None]:
        """Return for each live commit its record, as stored now, and the data objects it needs; None: unreadable."""
        found = dict[Kept, tuple[CommitRecord, Collection[str]] | None]()
        for kept in self.now:
            try:
                record = await read_commit(self.objects, kept.number)
                needed = set[str]()
                for part in () if record is None else record.parts:
                    needed |= {*await self._needed(part)}
            except CorruptStoreError:
                record = None
            found[kept] = None if record is None else (record, needed)
        there = {part.key for record in self.records.values() for part in record.parts}
        self._named = {key: names for key, names in self._named.items() if key in there}
        return found
