# SPDX-License-Identifier: Apache-2.0
"""The drain: committed checkpoints are copied to object storage in the background, and restored from there.

The drain reads slots as any reader does, so no checkpoint waits for it. The disk's line
(:class:`pccheck_async.format.Line`) decides which checkpoints in the bucket are valid beside those on disk. If the
newest one in the bucket is of another branch, opening raises an error that names both.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from msgspec.structs import replace

from pccheck_async.bucket import BucketMedium, CommitRecord, Draft, Kept, Owner, RefusedError, open_objects, send_part
from pccheck_async.engine.config import Drain
from pccheck_async.engine.flight import Flight
from pccheck_async.errors import CheckpointError, DamagedError, ReadError, StoreError, StoreLockedError
from pccheck_async.format import Entry, Key, Line, Run
from pccheck_async.medium.open_medium import OpenMedium
from pccheck_async.store import DroppedMeanwhileError, FolderPart, OwnSlot, PartReader, Source, Staging, Store
from pccheck_async.telemetry import write
from pccheck_async.transfer.copying import CopyBackend
from pccheck_async.transfer.operations import Operations

__all__ = ["Draining", "counting"]

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds between attempts while the bucket cannot be reached."""
_END_SECONDS = 1.0
"""Seconds that closing with a deadline waits until the cancelled copying has ended."""
_CANCEL_SECONDS = 0.2
"""Seconds between cancellations of the copying."""
_RUN = Run(0, 0, 0)


def _accepted(line: Line | None, record: CommitRecord) -> bool:
    return line is not None and record.run is not None and line.accepts(record.run, record.entry.counter)


def counting(
    records: Sequence[tuple[Kept, CommitRecord]], there: Line | None, line: Line | None, newest: int | None
) -> list[Entry] | None:
    """Return the checkpoints in the bucket that are valid beside a store on disk, newest first.

    Their slots are the numbers of their commits. None: the bucket's newest checkpoint is of another branch.

    Args:
        records: The commits that the newest record in the bucket names, newest first.
        there: The line of the newest record in the bucket.
        line: The line of the store on disk.
        newest: The largest counter of a checkpoint on disk; None: there is none, and the bucket's newest is valid.
    """
    found = [(kept, record) for kept, record in records if record.parts]
    if not found:
        return []
    if newest is not None and not _accepted(line, found[0][1]):
        run = None if line is None else line.run_of(newest)
        if run is None or there is None or not there.accepts(run, newest):
            return None
    return [
        replace(record.entry, slot=kept.number)
        for number, (kept, record) in enumerate(found)
        if _accepted(there, record) or _accepted(line, record) or (number == 0 and newest is None)
    ]


class Draining:
    """The drain of an open engine. Coroutines run on its loop. Made by :meth:`open`.

    Attributes:
        drain: The settings.
        count: Checkpoints that were copied.
        nbytes: Bytes that were sent.
        trouble: Why nothing is copied at the moment, or any more; empty while all is well.
        stopped: Whether nothing is copied any more, for as long as the engine is open.
    """

    def __init__(
        self,
        drain: Drain,
        path: str,
        owner: Owner,
        disk: Store,
        operations: Operations,
        backend: CopyBackend,
    ) -> None:
        self.drain = drain
        self.count = self.nbytes = 0
        self.trouble = ""
        self.stopped = False
        self._path, self._owner, self._disk, self._backend = path, owner, disk, backend
        self._opened = OpenMedium(operations, BucketMedium(owner.objects), "a bucket", owner.objects.url)
        self._base = max((disk.committed.largest_counter, *self.counters))
        self._restored: int | None = None
        self._begun = self._begins = False
        self._turn = asyncio.Lock()
        self._wake = asyncio.Event()
        self._closing = self._ended = False
        self._flights: set[Flight] = set()
        self._durable_at: dict[int, float] = {}  # checkpoints that are not there, nor newer ones
        self._dropped: set[int] = set()  # counters that were rejected or removed; none is used again
        self._foreign: set[int] = set()  # commits of another branch, whose counters mean nothing here
        self._damaged: set[int] = set()
        self._sent_at: float | None = None
        self._draft: tuple[int, Draft] | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        drain: Drain,
        path: str,
        disk: Store,
        operations: Operations,
        backend: CopyBackend,
        *,
        overwrite: bool,
    ) -> Draining:
        """Take over the bucket for this run: other runs cannot commit there any more.

        Raises StoreError: the bucket is of another branch than the disk, and not to be overwritten; StoreLockedError:
        another run takes it over at the same time; RefusedError, ReadError, WriteError.
        """
        objects = open_objects(drain.url, drain.options, deadline=drain.deadline, writes=True)
        disk.committed.line = disk.committed.record.line
        bucket = BucketMedium(objects)
        try:
            _, records = await bucket.look()
        except ReadError as error:
            raise ReadError(
                error.errno or errno.EIO,
                f"{error.strerror}. An engine with drain= needs the bucket when it is opened, as the newest checkpoint "
                "may be there: start again when it answers",
            ) from error
        if not overwrite:  # before another run is fenced off for nothing
            _check_branch(records, bucket.line, path, disk, objects.url)
        owner = Owner(objects, disk.file.identity.id_bytes, drain.keep_last)
        owner.line = disk.committed.line
        await owner.take_over()
        if not overwrite:
            _check_branch([*owner.records.items()], owner.line_there, path, disk, objects.url)
        draining = cls(drain, path, owner, disk, operations, backend)
        entries = disk.committed.record.entries
        newest = entries[0].counter if entries else None
        if counting([*owner.records.items()], owner.line_there, disk.committed.line, newest) is None:
            draining._foreign = {kept.number for kept in owner.now}
        draining._dropped |= {entry.counter for entry in entries if entry.rejected} & {*draining.counters}
        return draining

    def start(self) -> None:
        """Begin to copy. Called on the loop, once the engine is open."""
        if self._task is None and not self._closing:
            self._wake.set()
            self._task = asyncio.create_task(self._run(), name="drain")

    # -- what is there

    @property
    def url(self) -> str:
        """The URL of the bucket, for messages."""
        return self._owner.objects.url

    @property
    def counters(self) -> list[int]:
        """The counters of all checkpoints that the bucket's newest record names, newest first, of any branch."""
        return self._owner.counters

    @property
    def copied(self) -> set[int]:
        """The counters of this store's checkpoints in the bucket."""
        records = self._owner.records.items()
        return {record.entry.counter for kept, record in records if kept.number not in self._foreign}

    @property
    def newest(self) -> int:
        """The largest of :attr:`counters`; -1 for none."""
        return max(self.counters, default=-1)

    @property
    def largest_counter(self) -> int:
        """The largest counter on disk or in the bucket when this was opened: counters of this run are larger."""
        return self._base

    @property
    def entries(self) -> list[Entry]:
        """The checkpoints in the bucket that may be restored, newest first; their slots are numbers of commits."""
        newest = self._disk.committed.entries[0].counter if self._disk.committed.entries else None
        records = [*self._owner.records.items()]
        found = counting(records, self._owner.line_there, self._disk.committed.line, newest) or []
        return [entry for entry in found if entry.counter not in self._dropped and entry.slot not in self._foreign]

    def source(self, entry: Entry) -> Source:
        """Return the source to read a checkpoint in the bucket from: it is a single part there."""
        return FolderPart(self._opened, "", Key(entry.counter, _RUN))

    def note_restored(self, counter: int, *, remote: bool) -> None:
        """Called when a checkpoint was restored: this run descends from it, if it has saved none yet.

        ``remote``: it was restored from the bucket, whose line for it becomes the disk's then.
        """
        self._restored = counter
        if remote and not self._begun:
            record = next((each for each in self._owner.records.values() if each.entry.counter == counter), None)
            if record is not None:
                self._disk.committed.line = record.line
            write("drain_restored", "restored from %s: the disk had none as new", self.url, counter=counter)

    async def begin(self) -> None:
        """Make this run's line durable on disk, before its first checkpoint: it decides which in the bucket are valid.

        Does nothing after the first call. Raises StoreFailedError.
        """
        if self._begun:
            return
        async with self._turn:
            if self._begun:
                return
            before, run = self._disk.committed.line, self._owner.run
            line = Line(run, self._base) if before is None else before.descend(run, self._base, self._restored)
            await self._disk.begin_line(line)
            self._begun = self._begins = True
            self._wake.set()

    # -- what comes

    def note_durable(self, flight: Flight, counter: int) -> None:
        """Called when a checkpoint is durable on disk, or superseded; ``counter``: the counter of the durable one.

        The waiting for ``flight`` ends once that one, or a newer one, is in the bucket.
        """
        if self.stopped or self._ended:
            flight.set_remote(CheckpointError(self.trouble or f"the drain to {self.url} was closed"))
            return
        if counter <= self.newest:
            flight.set_remote(None)
            return
        self._flights.add(flight)
        self._durable_at.setdefault(counter, time.monotonic())
        self._wake.set()

    def note_dropped(self, counters: Iterable[int]) -> None:
        """Called when checkpoints were rejected or removed on disk: the bucket drops them, too."""
        self._dropped |= {*counters}
        self._wake.set()

    @property
    def lag(self) -> float:
        """Seconds since the oldest durable checkpoint committed that is newer than all in the bucket; 0 for none."""
        oldest = min(self._durable_at.values(), default=None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    # -- the work

    async def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self.stopped:
            self._wake.clear()
            try:
                if not await self._once():
                    if self._closing:
                        return
                    await self._wait()
                pause = _FIRST_PAUSE
                self.trouble = ""
            except StoreLockedError as error:
                self._stop(error)
            except (RefusedError, OSError) as error:
                if str(error) != self.trouble:
                    text = "nothing is copied to %s at the moment, which is %.0f s behind: %s; it is tried again"
                    with suppress(BaseException):  # of a handler of the log
                        write("drain_trouble", text, self.url, self.lag, error, error=str(error), store=self._path)
                self.trouble = str(error)
                if self._closing and isinstance(error, RefusedError):
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._closing_begins()
                pause = min(2 * pause, _LONGEST_PAUSE)
            except Exception as error:  # noqa: BLE001 - whatever it is, it ends the drain, and not the engine
                self._stop(error)

    def _stop(self, error: Exception) -> None:
        """Copy nothing more, after an error that another attempt will not avoid: another run owns the bucket, say."""
        self.stopped, self.trouble = True, str(error) or repr(error)
        self._end_flights(CheckpointError(f"the drain has stopped: {self.trouble}"))
        text = "the drain of %s stops; training and the disk go on: %s"
        with suppress(BaseException):  # of a handler of the log
            write("drain_stopped", text, self._path, self.trouble, error=str(error), store=self._path)

    async def _closing_begins(self) -> None:
        while True:
            was_closing = self._closing
            self._wake.clear()
            await self._wake.wait()
            if self._closing and not was_closing:
                return

    async def _wait(self) -> None:
        """Wait until there is something new to do, or until the next copy is due."""
        left = self._seconds_to_next()
        with suppress(TimeoutError):
            async with asyncio.timeout(left):
                await self._wake.wait()

    def _seconds_to_next(self) -> float | None:
        """Return the seconds until the next copy is due; None: nothing waits for it."""
        if self.drain.every is None or self._sent_at is None or self._next() is None:
            return None
        return max(0.0, self._sent_at + self.drain.every.total_seconds() - time.monotonic())

    def _next(self) -> Entry | None:
        """Return the newest checkpoint on disk that may be copied, and is newer than all in the bucket; else None."""
        committed, line = self._disk.committed, self._disk.committed.line
        newest = self.newest
        for entry in committed.entries:
            if entry.counter <= newest:
                return None
            known = line is not None and line.run_of(entry.counter) is not None  # else no line tells it later
            if known and not entry.rejected and entry.counter not in self._damaged:
                return entry
        return None

    async def _once(self) -> bool:
        """Do one piece of work; return False if there is nothing to do now.

        That is: drop rejected and removed checkpoints from the bucket, write this run's line there, or copy one.
        """
        if numbers := self._dropped_there:
            self._owner.line = self._disk.committed.line
            await self._owner.amend(numbers)
            await self._owner.collect()
            return True
        if self._begins:
            await self._tell_line()
            self._begins = False
            return True
        entry = self._next()
        if entry is None:
            self._end_flights(CheckpointError("it was rejected, or removed, or is damaged, before it was copied"))
            self._durable_at.clear()
            return False
        if not self._closing and self._seconds_to_next():
            return False
        began = time.monotonic()
        if await self._send(entry):
            self._sent_at = began
        return True

    @property
    def _dropped_there(self) -> dict[int, int]:
        """The steps of checkpoints that were dropped on disk, but not yet in the bucket, by number of the commit."""
        return {
            kept.number: record.entry.step
            for kept, record in self._owner.records.items()
            if record.entry.counter in self._dropped and kept.number not in self._foreign
        }

    async def _tell_line(self) -> None:
        """Write this run's line into the bucket, if it holds checkpoints: else a crash would make them another branch.

        Done in every run, as a line has few links, and many runs may die before they have copied anything.
        """
        if self._owner.records:
            self._owner.line = self._disk.committed.line
            await self._owner.amend(())

    async def _send(self, entry: Entry) -> bool:
        """Copy one checkpoint, and commit it in the bucket; return False if it was dropped meanwhile or is damaged."""
        if self._draft is None or self._draft[0] != entry.counter or not self._draft[1].is_current:
            self._draft = entry.counter, Draft(self._owner)  # else what was sent before an error is not sent again
        draft = self._draft[1]
        sent = draft.sent
        part = PartReader(OwnSlot(self._disk, entry), self._backend, Staging())
        try:
            await part.hold()
            name = await send_part(draft, part, rate_limit=self.drain.rate_limit)
        except DroppedMeanwhileError:
            return False
        except DamagedError as error:
            self._damaged.add(entry.counter)
            write("drain_trouble", "step %d is not copied to %s: %s", entry.step, self.url, error, error=str(error))
            return False
        finally:
            await part.close()
            self.nbytes += draft.sent - sent
        if entry.counter in self._dropped:
            return False
        self._owner.line = self._disk.committed.line
        if await self._owner.commit([name]):
            self.count += 1
        self._draft = None
        seconds = self.lag
        with suppress(BaseException):  # of a handler of the log
            write(
                "drained", "step %d is in %s", entry.step, self.url,
                step=entry.step, counter=entry.counter, nbytes=entry.nbytes, seconds=seconds,
            )  # fmt: skip
        self._settle_flights()
        await self._owner.collect()
        return True

    def _settle_flights(self) -> None:
        """End the waiting for checkpoints that are in the bucket, or older than one there."""
        newest = self.newest
        self._durable_at = {counter: since for counter, since in self._durable_at.items() if counter > newest}
        for flight in [flight for flight in self._flights if flight.counter <= newest]:
            self._flights.discard(flight)
            dropped = flight.counter in self._dropped
            flight.set_remote(CheckpointError("it was rejected, or removed, while it was copied") if dropped else None)

    def _end_flights(self, error: CheckpointError) -> None:
        self._settle_flights()
        for flight in self._flights:
            flight.set_remote(error)
        self._flights.clear()

    # -- the end

    async def close(self, seconds: float | None) -> str:
        """Copy the newest checkpoint, and end; return which checkpoints are left, in words, also in the log.

        Takes at most ``seconds``, and at most ``Drain.closing``.

        Cancellation: ends at once.
        """
        self._closing = True
        self._wake.set()
        most = self.drain.closing if seconds is None else min(seconds, self.drain.closing)
        task = self._task
        if task is not None:
            try:
                await asyncio.wait((task,), timeout=most)
            finally:
                await self.cancel(None if seconds is None else _END_SECONDS)
        if left := self._left:
            write("drain_left", "%s: %s", self._path, left)
        return left

    @property
    def _left(self) -> str:
        """The checkpoints that are not in the bucket as they are on disk, in words; empty: there are none."""
        if self.stopped:
            return ""
        left, why = [], f": {self.trouble}" if self.trouble else ""
        if (entry := self._next()) is not None:
            left.append(f"step {entry.step} is on disk, and not yet in {self.url}{why}; the next engine copies it")
        if dropped := self._dropped_there:
            steps = ", ".join(map(str, sorted(dropped.values())))
            left.append(f"steps {steps} were rejected or removed, and still count in {self.url}{why}")
        return "; ".join(left)

    async def cancel(self, seconds: float | None = None) -> None:
        """Cancel the copying, wait for its end at most so many seconds, and fail the flights that wait for a copy."""
        self._closing = True
        if self._task is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while not self._task.done():
                        self._task.cancel()  # again: a group of tasks that ends for another reason may lose it
                        await asyncio.wait((self._task,), timeout=_CANCEL_SECONDS)
        self._ended = True
        self._end_flights(CheckpointError(self._left or f"the drain to {self.url} was closed"))


def _check_branch(
    records: Sequence[tuple[Kept, CommitRecord]], there: Line | None, path: str, disk: Store, url: str
) -> None:
    """Raise StoreError if the newest commit is of another branch than the newest checkpoint on disk."""
    entries, line = disk.committed.entries, disk.committed.line
    newest = entries[0] if entries else None
    if counting(records, there, line, None if newest is None else newest.counter) is not None:
        return
    assert newest is not None
    other = next(record for _, record in records if record.parts)
    why = ""
    if line is None:
        why = (
            " (since it was copied there, an engine without drain= and memory=, or a command such as `pccheck remove`, "
            "has written to the folder, which no longer says what it goes on from)"
        )
    raise StoreError(
        f"{path} and {url} hold checkpoints of different runs, and neither goes on from the other: step {newest.step} "
        f"(counter {newest.counter}) on disk, step {other.entry.step} (counter {other.entry.counter}, of store "
        f"{other.store.hex()[:8]}) in the bucket{why}. To go on from the disk, give Drain another prefix, or the "
        "engine overwrite=True, and the bucket's are replaced; to go on from the bucket, open the engine on an empty "
        "folder"
    )
