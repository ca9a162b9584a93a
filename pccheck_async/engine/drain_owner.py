# SPDX-License-Identifier: Apache-2.0
"""The owner's half of a drain: decides which checkpoint is copied next, commits it in the bucket, and collects there.

One process of an engine has it, in a group that of rank 0; the parts are uploaded by all (:mod:`.drain`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from pccheck_async.bucket import BucketState, Owner, PartName, Phase, RefusedError, Upload, copies_of
from pccheck_async.engine.config import Drain
from pccheck_async.errors import DamagedError, StoreLockedError
from pccheck_async.format import Entry
from pccheck_async.store import DroppedMeanwhileError, Source, Store
from pccheck_async.telemetry import write

__all__ = ["DrainOwner", "Savers", "UploadedParts", "end_tasks"]

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds between attempts while the bucket cannot be reached."""
_CANCEL_SECONDS = 0.2
"""Seconds between cancellations of the copying."""
_DROPPED_SECONDS = 0.02
"""Seconds before the next attempt if a checkpoint was dropped on another rank, and this one does not know it yet."""


async def end_tasks(tasks: Collection[asyncio.Task[Any]], seconds: float | None) -> None:
    """Cancel tasks, and wait for their end, at most so many seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while running := [task for task in tasks if not task.done()]:
                for task in running:
                    task.cancel()  # again: a group of tasks that ends for another reason may lose it
                await asyncio.wait(running, timeout=_CANCEL_SECONDS)


class UploadedParts(NamedTuple):
    """The parts of a checkpoint, all uploaded, in the order of ranks; ``members`` is as in :class:`.CommitRecord`."""

    parts: Sequence[PartName]
    members: int | None = None


class Savers(Protocol):
    """The processes that save together (:class:`.peers.Peers`), as a drain sees them."""

    @property
    def entries(self) -> Sequence[Entry]:
        """Durable checkpoints, newest first."""

    def parts_to_send(self, counter: int) -> Mapping[int, Source]:
        """Return the parts of a checkpoint on disk that this process uploads, by rank. Raises DroppedMeanwhileError."""

    async def upload(self, request: Upload) -> UploadedParts:
        """Make all processes upload their parts; return when every part is there.

        Raises DroppedMeanwhileError, DamagedError, ReadError, WriteError, RefusedError.
        """

    def publish_bucket(self, state: BucketState) -> None:
        """Publish the state of the bucket to all processes, this one included."""


class DrainOwner:
    """The owner of the bucket. Coroutines run on the engine's loop.

    Args:
        drain: The settings.
        path: The path of the store, for messages.
        owner: The owner of the prefix, which has taken it over.
        disk: The store of this process.
        savers: The processes that upload.
        lag: Returns how many seconds the bucket is behind the disk.

    Attributes:
        dropped: Counters that were rejected or removed on disk; none is used again.
        foreign: Numbers of the commits that are not valid beside the disk.
        stopped: Whether nothing is copied any more, for as long as the engine is open.
        begins: Whether the line of this run is still to be written into the bucket.
    """

    def __init__(
        self, drain: Drain, path: str, owner: Owner, disk: Store, savers: Savers, lag: Callable[[], float]
    ) -> None:
        self.dropped: set[int] = set()
        self.foreign: tuple[int, ...] = ()
        self.stopped = self.begins = False
        self._drain, self._path, self._owner, self._disk = drain, path, owner, disk
        self._savers, self._lag = savers, lag
        self._wake = asyncio.Event()
        self._closing = self._ended = False
        self._damaged: set[int] = set()
        self._count, self._seen, self._settled = 0, -1, -1
        self._trouble = ""
        self._sent_at: float | None = None
        self._published: BucketState | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to copy. Called once the engine is open."""
        if self._task is None and not self._closing:
            self._wake.set()
            self._task = asyncio.create_task(self._run(), name="drain")

    def wake(self, durable: int = -1) -> None:
        """Called when there is something new to do; ``durable``: the counter of a checkpoint that is durable now."""
        self._seen = max(self._seen, durable)
        self._wake.set()

    @property
    def run(self) -> bytes:
        """The id of this run."""
        return self._owner.run

    @property
    def _url(self) -> str:
        return self._owner.objects.url

    @property
    def _newest(self) -> int:
        return max(self._owner.counters, default=-1)

    @property
    def state(self) -> BucketState:
        """The present state of the drain."""
        phase: Phase = "ended" if self._ended else "closing" if self._closing else ""
        return BucketState(
            copies_of(self._owner.records.items()),
            self._owner.line_there,
            self.foreign,
            self._count,
            self._settled,
            self._trouble,
            "stopped" if self.stopped else phase,
            self._left if self._ended else "",
            self._owner.owner_there,
        )

    def _publish(self) -> None:
        """Publish the state to all processes, if it has changed, once they are connected."""
        if self._task is not None and (state := self.state) != self._published:
            self._published = state
            self._savers.publish_bucket(state)

    # -- the work

    async def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self.stopped:
            self._wake.clear()
            try:
                worked = await self._once()
                pause, self._trouble = _FIRST_PAUSE, ""
                self._publish()
                if not worked:
                    if self._closing:
                        return
                    await self._wait()
            except StoreLockedError as error:
                self._stop(error)
            except (RefusedError, OSError) as error:
                if str(error) != self._trouble:
                    text = "nothing is copied to %s at the moment, which is %.0f s behind: %s; it is tried again"
                    with suppress(BaseException):  # of a handler of the log
                        write("drain_trouble", text, self._url, self._lag(), error, error=str(error), store=self._path)
                self._trouble = str(error)
                self._publish()
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
        self.stopped, self._trouble = True, str(error) or repr(error)
        self._publish()
        text = "the drain of %s stops; training and the disk go on: %s"
        with suppress(BaseException):  # of a handler of the log
            write("drain_stopped", text, self._path, self._trouble, error=str(error), store=self._path)

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
        if self._drain.every is None or self._sent_at is None or self._next() is None:
            return None
        return max(0.0, self._sent_at + self._drain.every.total_seconds() - time.monotonic())

    def _next(self) -> Entry | None:
        """Return the newest checkpoint on disk that may be copied, and is newer than all in the bucket; else None."""
        line, newest = self._disk.committed.line, self._newest
        for entry in self._savers.entries:
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
            self._publish()
            await self._owner.collect()
            return True
        if self.begins:
            await self._write_line()
            self.begins = False
            return True
        entry = self._next()
        if entry is None:  # those that are waited for were rejected, or removed, or are damaged
            self._settled = max([self._seen, *(entry.counter for entry in self._savers.entries[:1])])
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
            if record.entry.counter in self.dropped and kept.number not in self.foreign
        }

    async def _write_line(self) -> None:
        """Write this run's line into the bucket, if it holds checkpoints: else a crash would make them another branch.

        Done in every run, as a line has few links, and many runs may die before they have copied anything.
        """
        if self._owner.records:
            self._owner.line = self._disk.committed.line
            await self._owner.amend(())

    async def _send(self, entry: Entry) -> bool:
        """Copy one checkpoint, and commit it in the bucket; return False if it was dropped meanwhile or is damaged.

        Also if the run began meanwhile: its line may not name the checkpoint, which is chosen anew then.
        """
        line = self._disk.committed.line
        try:
            owner = self._owner
            request = Upload(entry.counter, entry.step, owner.target, owner.adoptable, owner.live_parts)
            parts, members = await self._savers.upload(request)
        except DroppedMeanwhileError:
            await asyncio.sleep(_DROPPED_SECONDS)
            return False
        except DamagedError as error:
            self._damaged.add(entry.counter)
            write("drain_trouble", "step %d is not copied to %s: %s", entry.step, self._url, error, error=str(error))
            return False
        await self._owner.check(parts)
        if entry.counter in self.dropped or line != self._disk.committed.line:
            return False
        self._owner.line = line
        if await self._owner.commit(parts, members):
            self._count += 1
        seconds, nbytes = self._lag(), sum(part.entry.nbytes for part in parts)
        with suppress(BaseException):  # of a handler of the log
            write(
                "drained", "step %d is in %s", entry.step, self._url,
                step=entry.step, counter=entry.counter, nbytes=nbytes, seconds=seconds,
            )  # fmt: skip
        self._publish()
        await self._owner.collect()
        return True

    # -- the end

    async def close(self, seconds: float) -> None:
        """Copy the newest checkpoint, in so many seconds at most. Called before :meth:`cancel`."""
        self._closing = True
        self._wake.set()
        self._publish()
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=seconds)

    @property
    def _left(self) -> str:
        """The checkpoints that are not in the bucket as they are on disk, in words; empty: there are none."""
        if self.stopped:
            return ""
        left, why = [], f": {self._trouble}" if self._trouble else ""
        if (entry := self._next()) is not None:
            left.append(f"step {entry.step} is on disk, and not yet in {self._url}{why}; the next engine copies it")
        if dropped := self._dropped_there:
            steps = ", ".join(map(str, sorted(dropped.values())))
            left.append(f"steps {steps} were rejected or removed, and still count in {self._url}{why}")
        return "; ".join(left)

    async def cancel(self, seconds: float | None) -> str:
        """Cancel the copying, and wait for its end, at most so many seconds; return which checkpoints are left."""
        self._closing = True
        if self._task is not None:
            await end_tasks([self._task], seconds)
        self._ended = True
        self._publish()
        return self._left
