# SPDX-License-Identifier: Apache-2.0
"""The drain: committed checkpoints are copied to object storage in the background, and restored from there.

The drain reads slots as any reader does, so no checkpoint waits for it. Each process of an engine has a
:class:`Draining`, which uploads the parts that it has on disk; one of them also has the owner's half
(:class:`.drain_owner.DrainOwner`), which decides and commits. Requests and answers between the two halves go through
the processes that save together (:class:`.drain_owner.Savers`).
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from pccheck_async.bucket import (
    BucketMedium,
    BucketState,
    Compressing,
    Draft,
    Objects,
    Owner,
    PartName,
    RefusedError,
    Upload,
    copies_of,
    open_objects,
    send_part,
)
from pccheck_async.engine.config import Drain
from pccheck_async.engine.drain_owner import DrainOwner, Savers, end_tasks
from pccheck_async.engine.flight import Flight
from pccheck_async.errors import CheckpointError, ReadError, StoreError
from pccheck_async.format import Entry, Key, Line, Run
from pccheck_async.medium.open_medium import OpenMedium
from pccheck_async.store import FolderPart, PartReader, Source, Staging, Store
from pccheck_async.telemetry import write
from pccheck_async.transfer.copying import CopyBackend
from pccheck_async.transfer.operations import Operations

__all__ = ["Draining"]

_END_SECONDS = 1.0
"""Seconds that closing with a deadline waits until the cancelled copying has ended."""
_OWNER_SECONDS = 60.0
"""Seconds that closing waits for the owner's process, which may be dead, to begin closing."""
_RUN = Run(0, 0, 0)


class Draining:
    """The drain of an open engine, in one of its processes. Coroutines run on its loop. Made by :meth:`open`.

    Attributes:
        drain: The settings.
        objects: The objects under the prefix.
        opened: The bucket as a medium, which looks like a folder of stores.
        state: What is in the bucket, as its owner published it last.
        owner: The owner's half; None if another process has it.
        nbytes: Bytes that this process has sent.
    """

    def __init__(
        self, drain: Drain, path: str, objects: Objects, disk: Store, operations: Operations, backend: CopyBackend
    ) -> None:
        self.drain, self.objects = drain, objects
        self.nbytes = 0
        self._compressing = Compressing(drain.compression, drain.rate_limit)
        self.opened = OpenMedium(operations, BucketMedium(objects), "a bucket", objects.url)
        self.state = BucketState()
        self.owner: DrainOwner | None = None
        self._path, self._disk, self._backend = path, disk, backend
        self._savers: Savers
        self._started = False
        self._changed = asyncio.Event()
        self._flights: set[Flight] = set()
        self._durable_at: dict[int, float] = {}  # checkpoints that are not there, nor newer ones
        self._dropped: set[int] = set()  # counters that were rejected or removed; none is used again
        self._drafts: tuple[int, int, dict[int, Draft]] = (-1, 0, {})
        self._lost = ""
        self._sending: set[asyncio.Task[Any]] = set()

    @classmethod
    async def open(
        cls,
        drain: Drain,
        path: str,
        disk: Store,
        operations: Operations,
        backend: CopyBackend,
        savers: Savers,
        *,
        owns: bool,
        of_group: bool,
        overwrite: bool,
    ) -> Draining:
        """Open the bucket; if this process ``owns`` it, take it over: other runs cannot commit there any more.

        In a group all disks decide which checkpoints there are valid, once the ranks have met: a group that is refused
        then has ended the drain of the run before.

        Raises StoreError: the bucket is of another branch than the disk, and not to be overwritten; StoreLockedError:
        another run takes it over at the same time; RefusedError, ReadError, WriteError.
        """
        objects = open_objects(drain.url, drain.options, deadline=drain.deadline, writes=True)
        line = disk.committed.record.line
        draining = cls(drain, path, objects, disk, operations, backend)
        draining._savers = savers
        if not owns:
            return draining
        newest = None if of_group else next(iter(disk.committed.entries), None)

        def check(state: BucketState) -> None:
            trouble = state.trouble_beside(line, newest, path, objects.url, of_group=of_group)
            if trouble and not overwrite:
                raise StoreError(trouble)

        bucket = BucketMedium(objects)
        try:
            _, records = await bucket.look()
        except ReadError as error:
            raise ReadError(
                error.errno or errno.EIO,
                f"{error.strerror}. An engine with drain= needs the bucket when it is opened, as the newest checkpoint "
                "may be there: start again when it answers",
            ) from error
        # Before another run is fenced off for nothing.
        check(BucketState(copies_of(records), bucket.line, owner=bucket.owner))
        owner = Owner(objects, disk.file.identity.id_bytes, drain.keep_last)
        owner.line = line
        await owner.take_over()
        draining.owner = half = DrainOwner(drain, path, owner, disk, savers, lambda: draining.lag)
        check(half.state)
        half.dropped = draining._dropped
        if of_group:
            draining.adopt(half.state)
            return draining
        draining.adopt(half.state.beside(line, None if newest is None else newest.counter, of_group=False))
        draining._dropped |= {entry.counter for entry in disk.committed.record.entries if entry.rejected}
        return draining

    def adopt(self, state: BucketState) -> None:
        """Take over which checkpoints in the bucket are valid. Called at the opening."""
        self.state = state
        if self.owner is not None:
            self.owner.foreign = state.foreign

    def start(self) -> None:
        """Begin to copy. Called on the loop, once the engine is open."""
        self._started = True
        if self.owner is not None:
            self.owner.start()

    # -- what is there

    @property
    def url(self) -> str:
        """The URL of the bucket, for messages."""
        return self.objects.url

    @property
    def run(self) -> bytes:
        """The id of this run, of a process that saves alone."""
        assert self.owner is not None
        return self.owner.run

    @property
    def copied(self) -> set[int]:
        """The counters of this store's checkpoints in the bucket."""
        return {copy.entry.counter for copy in self.state.valid}

    @property
    def newest(self) -> int:
        """The largest counter of a checkpoint in the bucket, of any branch; -1 for none."""
        return self.state.newest

    @property
    def entries(self) -> list[Entry]:
        """The checkpoints in the bucket that may be restored, newest first; their slots are numbers of commits."""
        return [copy.entry for copy in self.state.valid if copy.entry.counter not in self._dropped]

    def source(self, entry: Entry) -> Source:
        """Return the source to read a checkpoint of one process in the bucket from."""
        return FolderPart(self.opened, "", Key(entry.counter, _RUN))

    def note_restored(self, counter: int) -> Line | None:
        """Called when a checkpoint was restored from the bucket; returns its line there."""
        write("drain_restored", "restored from %s: no other tier had one as new", self.url, counter=counter)
        return next((each.line for each in self.state.copies if each.entry.counter == counter), None)

    async def follow_line(self, line: Line) -> None:
        """Write the disk's new line into the bucket, too, in the background."""
        self.note_begun()

    def note_begun(self) -> None:
        """Called when the line of this run is durable on disk."""
        if self.owner is not None:
            self.owner.begins = True
            self.owner.wake()

    # -- what comes

    def note_durable(self, flight: Flight, counter: int) -> None:
        """Called when a checkpoint is durable on disk, or superseded; ``counter``: the counter of the durable one.

        The waiting for ``flight`` ends once that one, or a newer one, is in the bucket.
        """
        if why := self._over:
            flight.set_remote(CheckpointError(why))
            return
        if counter > self.newest:
            self._flights.add(flight)
            self.note_saved(counter, flight.counter)
            return
        flight.set_remote(None)

    def note_saved(self, counter: int, awaited: int = -1) -> None:
        """Called when a checkpoint is on disk; ``awaited``: a larger counter of one that it makes superfluous."""
        self._durable_at.setdefault(counter, time.monotonic())
        if self.owner is not None:
            self.owner.wake(max(counter, awaited))

    def note_dropped(self, counters: Iterable[int]) -> None:
        """Called when checkpoints were rejected or removed on disk: the bucket drops them, too."""
        self._dropped |= {*counters}
        if self.owner is not None:
            self.owner.wake()

    def learn(self, state: BucketState) -> None:
        """Called with each new state that the owner publishes."""
        self.state = state
        self._settle_flights()
        self._changed.set()

    @property
    def _over(self) -> str:
        """Why nothing is copied any more; empty while the drain runs."""
        if self.state.phase == "stopped":
            return f"the drain has stopped: {self.state.trouble}"
        if self.state.phase == "ended":
            return self.state.left or f"the drain to {self.url} was closed"
        return self._lost

    @property
    def lag(self) -> float:
        """Seconds since the oldest durable checkpoint committed that is newer than all in the bucket; 0 for none."""
        oldest = min(self._durable_at.values(), default=None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    def _settle_flights(self) -> None:
        """End the waiting for checkpoints that are in the bucket, or older than one there, or will never be there."""
        newest, settled = self.newest, max(self.newest, self.state.settled)
        self._durable_at = {counter: since for counter, since in self._durable_at.items() if counter > settled}
        over = self._over
        for flight in sorted(self._flights, key=lambda flight: flight.counter):
            error = CheckpointError(over) if over else None
            if flight.counter <= newest:
                dropped = flight.counter in self._dropped
                error = CheckpointError("it was rejected, or removed, while it was copied") if dropped else None
            elif flight.counter <= settled:
                error = CheckpointError("it was rejected, or removed, or is damaged, before it was copied")
            elif not over:
                continue
            self._flights.discard(flight)
            flight.set_remote(error)

    # -- uploading

    async def send(self, request: Upload) -> list[PartName]:
        """Upload the parts of a checkpoint that this process has to send; return their places.

        Parts that were sent before an error are not sent again.

        Raises DroppedMeanwhileError: it was replaced, removed or rejected; DamagedError, ReadError, WriteError,
        RefusedError, also once the drain has ended.
        """
        if self._lost:
            raise RefusedError("it is leaving")
        task = asyncio.current_task()
        assert task is not None
        self._sending.add(task)
        try:
            return await self._send(request)
        finally:
            self._sending.discard(task)

    async def _send(self, request: Upload) -> list[PartName]:
        counter, target, drafts = self._drafts
        if (counter, target) != (request.counter, request.target):  # else the owner has made no record since
            drafts = {}
            self._drafts = request.counter, request.target, drafts
        names = []
        for rank, source in self._savers.parts_to_send(request.counter).items():
            part = PartReader(source, self._backend, Staging())
            sent = 0
            try:
                await part.hold()  # before anything is asked of the bucket, else training may replace it meanwhile
                if rank not in drafts:
                    draft = Draft(self.objects, request.target, request.adoptable, rank)
                    await draft.name_again(request.live)
                    drafts[rank] = draft
                sent = drafts[rank].sent
                names.append(
                    await send_part(drafts[rank], part, compressing=self._compressing, rate_limit=self.drain.rate_limit)
                )
            finally:
                await part.close()
                self.nbytes += drafts[rank].sent - sent if rank in drafts else 0
        return names

    # -- the end

    async def close(self, seconds: float | None) -> str:
        """Copy the newest checkpoint, and end; return which checkpoints are left, in words, also in the log.

        Copies for at most ``seconds``, and at most ``Drain.closing``; ending requests may take a second more, and
        without ``seconds`` as long as they take. A process without the owner's half waits for the
        process that has it, and uploads its parts meanwhile, until the newest checkpoint is copied.

        Cancellation: ends at once.
        """
        most = self.drain.closing if seconds is None else min(seconds, self.drain.closing)
        try:
            if self.owner is not None:
                await self.owner.close(most)
            elif self._started:
                await self._wait_for_owner(most)
        finally:
            left = await self.cancel(None if seconds is None else _END_SECONDS)
        if left:
            write("drain_left", "%s: %s", self._path, left)
        return left

    async def _wait_for_owner(self, most: float) -> None:
        began = asyncio.get_running_loop().time()
        for seconds, phases in ((min(most, _OWNER_SECONDS), [""]), (most, ["closing"])):
            with suppress(TimeoutError):
                async with asyncio.timeout_at(began + seconds):
                    while self.state.phase in phases and not self._lost and self._is_behind:
                        self._changed.clear()
                        await self._changed.wait()

    @property
    def _is_behind(self) -> bool:
        """Whether the newest checkpoint on disk is still to be copied."""
        return any(entry.counter > max(self.newest, self.state.settled) for entry in self._savers.entries[:1])

    async def cancel(self, seconds: float | None = None) -> str:
        """End the copying and the uploads, in so many seconds at most; return which checkpoints are left, in words.

        Fails the flights that wait for a copy.
        """
        began, left = time.monotonic(), ""
        if self.owner is not None:
            left = await self.owner.cancel(seconds)
            self.learn(self.owner.state)  # the processes of a group may not have taken it in yet
        self.end(left or f"the drain to {self.url} was closed")
        await end_tasks(self._sending, None if seconds is None else began + seconds - time.monotonic())
        return left

    def end(self, why: str) -> None:
        """Called when nothing is copied any more, as the engine is closed, or the owner's process is gone."""
        self._lost = self._lost or why
        self._settle_flights()
        self._changed.set()
