# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in flight: captured, then durable; each is a :class:`Promise` that any thread may set or wait for."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar

from pccheck_async.engine.config import MemoryTier
from pccheck_async.errors import CheckpointError, ClosedError
from pccheck_async.format import CheckpointInfo, Reach

__all__ = ["CheckpointProgress", "Flight", "Promise", "Waiting", "wait_for_any"]

T = TypeVar("T")
_is_over = attrgetter("over")


class Promise(Generic[T]):
    """Something that happens once, with a result or an error; any thread may set, read or await it.

    Most promises are over when they are read, or are never read. So a future, which takes longer to make than all
    else here, is made only for coroutines that have to wait; a thread waits at a lock of its own. The promise itself
    has no lock, so a signal handler that uses it cannot deadlock: the first caller of ``dict.setdefault`` wins.
    """

    __slots__ = ("_facts",)

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}  # "outcome": result and error; "future", "threads": of waiting callers

    @property
    def over(self) -> bool:
        """Whether it has happened."""
        return "outcome" in self._facts

    @property
    def outcome(self) -> tuple[T, BaseException | None] | None:
        """Its result and its error, None without one; None if it has not happened yet."""
        return self._facts.get("outcome")

    @property
    def error(self) -> BaseException | None:
        """Its error; None if there is none, or it has not happened yet."""
        outcome = self.outcome
        return None if outcome is None else outcome[1]

    def set_error(self, error: BaseException) -> None:
        """Set the error; only the first call of this or of :meth:`set_result` has an effect."""
        self.set_result(None, error)

    def set_result(self, result: T | None, error: BaseException | None = None) -> None:
        """Set the result, or else the error; only the first call of this or of :meth:`set_error` has an effect."""
        outcome, facts = (result, error), self._facts
        if facts.setdefault("outcome", outcome) is not outcome or len(facts) == 1:
            return  # it was first, or nobody waits: who begins to finds the outcome
        for thread in [*facts.get("threads", ())]:
            with suppress(RuntimeError):  # another promise that it waits for was first
                thread.release()
        future = facts.get("future")
        if future is not None:
            _tell(future, outcome)

    def result(self, timeout: float | None = None) -> T:
        """Block until it has happened. Raises its error, or TimeoutError."""
        if "outcome" not in self._facts and not wait_for_any((self,), timeout):
            raise TimeoutError
        outcome: tuple[T, BaseException | None] = self._facts["outcome"]
        result, error = outcome
        if error is not None:
            raise error
        return result

    def future(self) -> Future[T]:
        """Return a future of it, which cannot be cancelled."""
        if not self.over:
            future: Future[T] = self._facts.setdefault("future", _running())
            if not self.over:
                return future  # it was there before the outcome, so that set_result finds it
        over: Future[T] = _running()
        _tell(over, self._facts["outcome"])
        return over

    def _threads(self) -> list[threading.Lock]:
        threads: list[threading.Lock] = self._facts.setdefault("threads", [])
        return threads


def wait_for_any(promises: Sequence[Promise[Any]], timeout: float | None = None) -> bool:
    """Block until one of them has happened; False if that takes longer than ``timeout`` seconds.

    If it is interrupted, it leaves no lock held. An interrupted wait for a future can leave one, and the thread that
    sets the result would then block.
    """
    mine = threading.Lock()
    mine.acquire()
    try:
        for promise in promises:
            promise._threads().append(mine)
        if not any(map(_is_over, promises)):  # else it may have been decided before this lock was added
            mine.acquire(timeout=-1 if timeout is None else min(max(timeout, 0), threading.TIMEOUT_MAX))
    finally:
        for promise in promises:
            if not promise.over and mine in (threads := promise._threads()):  # not if it was interrupted before
                threads.remove(mine)
    return any(map(_is_over, promises))


def _running() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _tell(future: Future[Any], outcome: tuple[Any, BaseException | None]) -> None:
    result, error = outcome
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


@dataclass(frozen=True, slots=True)
class CheckpointProgress:
    """How far a checkpoint is.

    Attributes:
        phase: "waiting" for its turn, "capturing", "writing" (all is captured), "committing" (its last request is on
            its way: manifest, flush and commit record, and of a small checkpoint its bytes), "in memory" (and due there
            alone); or how it ended.
        nbytes: Bytes of the checkpoint's tensors, 0 while it waits.
        captured: Bytes captured so far.
        written: Bytes written so far, those of the last request included.
    """

    phase: Literal[
        "waiting", "capturing", "writing", "committing", "in memory", "durable", "superseded", "skipped", "failed"
    ]
    nbytes: int
    captured: int
    written: int


class Waiting:
    """Counts a caller as waiting for a checkpoint: no other call gets its failure meanwhile.

    A caller that waits for ``promise`` while it fails gets the error; one that gave up before does not.
    """

    __slots__ = ("_flight", "_promise")

    def __init__(self, flight: Flight, promise: Promise[Any] | None = None) -> None:
        self._flight, self._promise = flight, promise
        if promise is not None and not promise.over and os.getpid() != flight._pid:
            raise ClosedError("this checkpoint is on its way in the parent process; a forked child cannot wait for it")

    def __enter__(self) -> None:
        self._flight._waiters.add(self)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._promise is not None and error is self._promise.error:
            self._flight.failure_told = True
        self._flight._waiters.discard(self)


class Flight:
    """The engine's side of a checkpoint from its admission on; users have a :class:`.pending.PendingCheckpoint`.

    Attributes:
        step: The user's number.
        counter: The engine's number; checkpoints are admitted in the order of their counters.
        name: The user's name for it, None for none.
        superseded: Newer checkpoints became durable first and made this one pointless; it was dropped on purpose.
        admitted_at: Of ``time.monotonic()``; so is ``captured_at``.
        stall: Seconds that training waited for it.
        nbytes: Bytes of its tensors, None until it is its turn.
        captured_nbytes: Bytes captured so far.
        written_nbytes: Bytes written so far.
        failure_told: Whether the user has got its failure, as an error or a warning.
        overlap_was_chosen: Whether ``engine.step`` made it, which captures repeatedly torn tensors eagerly: that it is
            torn is warned of, and not raised by the next call.
        given_up: Whether its caller may change the state although the capture had not ended.
        on_disk: Whether it is due on disk; else in memory alone.
        compare: Called before a caller that waited for the capture may change the state; set by ``Guard.watch``.
    """

    def __init__(
        self,
        step: int,
        counter: int,
        name: str | None = None,
        *,
        on_disk: bool = True,
        memory: MemoryTier | None = None,
        drained: bool = False,
    ) -> None:
        self.step = step
        self.counter = counter
        self.name = name
        self.on_disk = on_disk
        self.superseded = False
        self.given_up = False
        self.admitted_at = self.captured_at = time.monotonic()
        self.stall = 0.0
        self.nbytes: int | None = None
        self.captured_nbytes = self.written_nbytes = 0
        self.compare: Callable[[], None] | None = None
        self.failure_told = False
        self.overlap_was_chosen = False
        self._pid = os.getpid()
        self._eager_captured: Promise[None] = Promise()
        self._captured: Promise[None] = Promise()
        self._in_memory: Promise[None] | None = Promise() if memory is not None else None
        self._in_replicas: Promise[None] | None = Promise() if memory is not None and memory.replicas else None
        self._remote: Promise[None] | None = Promise() if drained and on_disk else None
        self._durable: Promise[CheckpointInfo] = Promise()
        self._waiters: set[Waiting] = set()

    # -- the users' waiting

    async def captured(self) -> None:
        """Wait as :meth:`.pending.PendingCheckpoint.captured`."""
        await self._wait(self._captured)
        if self.compare is not None:
            self.compare()

    def wait_captured(self, timeout: float | None = None) -> None:
        """Block as :meth:`.pending.PendingCheckpoint.wait_captured`."""
        self._block(self._captured, timeout)
        if self.compare is not None:
            self.compare()

    async def durable(self) -> CheckpointInfo:
        """Wait as :meth:`.pending.PendingCheckpoint.durable`."""
        return await self._wait(self._durable)

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """Block as :meth:`.pending.PendingCheckpoint.result`."""
        return self._block(self._durable, timeout)

    async def reached(self, tier: Reach) -> None:
        """Wait until it is committed in memory, in that of other hosts, or in a bucket."""
        await self._wait(self._of_tier(tier))

    def wait_reached(self, tier: Reach, timeout: float | None = None) -> None:
        """Block until it is committed in memory, in that of other hosts, or in a bucket."""
        self._block(self._of_tier(tier), timeout)

    def _of_tier(self, tier: Reach) -> Promise[None]:
        if tier == "replicas" and self._in_replicas is not None:
            return self._in_replicas
        if tier == "memory" and self._in_memory is not None:
            return self._in_memory
        if tier == "remote":
            if self._remote is not None:
                return self._remote
            what = f"the checkpoint of step {self.step} is not copied to a bucket"
            raise CheckpointError(f"{what}: that needs an engine with drain=Drain(...), and a checkpoint for the disk")
        where, needed = ("the memory of other hosts", "replicas=1") if tier == "replicas" else ("memory", "...")
        what = f"the checkpoint of step {self.step} is not saved in {where}"
        raise CheckpointError(f"{what}: that needs an engine with memory=MemoryTier({needed})")

    async def eager_captured(self) -> None:
        """Wait until the eager leaves are captured: all of the state but its lazy part."""
        await self._wait(self._eager_captured)

    def wait_eager_captured(self) -> None:
        """Block until the eager leaves are captured."""
        self._block(self._eager_captured)

    async def _wait(self, promise: Promise[T]) -> T:
        outcome = promise.outcome
        if outcome is not None and outcome[1] is None:
            await asyncio.sleep(0)  # others may run, and cancel
            return outcome[0]
        with Waiting(self, promise):
            return await asyncio.wrap_future(promise.future())

    def _block(self, promise: Promise[T], timeout: float | None = None) -> T:
        outcome = promise.outcome
        if outcome is not None and outcome[1] is None:
            return outcome[0]
        with Waiting(self, promise):
            try:
                return promise.result(timeout)
            except TimeoutError:
                if promise.over:
                    raise
                where = f"the checkpoint of step {self.step} is {self.progress.phase}"
                raise TimeoutError(f"{where} after {timeout} s; it goes on") from None

    @property
    def awaited(self) -> bool:
        """Whether a caller is waiting for it, and will get a failure unless the waiting is cancelled."""
        return bool(self._waiters)

    # -- the engine's waiting, which gets no failure

    def captured_future(self) -> Future[None]:
        """Return a future that is done when nothing reads the live state any more, or the capture failed."""
        return self._captured.future()

    def ended_future(self) -> Future[CheckpointInfo]:
        """Return a future that is done when the checkpoint is durable, superseded or failed."""
        return self._durable.future()

    def wait_out_of_reach(self, timeout: float | None = None, enough: Promise[Any] | None = None) -> bool:
        """Block until nothing reads the live state any more, or until ``enough`` happened. Raises no failure.

        Returns:
            False if it took longer than ``timeout`` seconds.
        """
        if self._captured.over:
            return True
        return wait_for_any([each for each in (self._captured, enough) if each is not None], timeout)

    # -- how far it is

    @property
    def is_captured(self) -> bool:
        """Whether the capture ended (or failed)."""
        return self._captured.over

    @property
    def is_eager_captured(self) -> bool:
        """Whether the eager leaves are captured (or the checkpoint failed)."""
        return self._eager_captured.over

    @property
    def over(self) -> bool:
        """Whether it is durable, superseded or failed."""
        return self._durable.over

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None if it did not, or has not ended. Reading it does not count as delivering it."""
        return self._durable.error

    @property
    def failed(self) -> bool:
        """Whether it ended without becoming durable or superseded."""
        return self._durable.error is not None

    @property
    def progress(self) -> CheckpointProgress:
        """How far it is. Never blocks."""
        nbytes, captured, written = self.nbytes, self.captured_nbytes, self.written_nbytes
        if self.over:
            phase: Any = "failed" if self.failed else "superseded" if self.superseded else "durable"
        elif nbytes is None:
            phase = "waiting"
        elif self._in_memory is not None and self._in_memory.over and not self.on_disk:
            phase = "in memory"
        else:
            phase = "committing" if written >= nbytes else "writing" if self.is_captured else "capturing"
        return CheckpointProgress(phase, nbytes or 0, captured, written)

    def give_up(self) -> None:
        """Called when its caller does not wait for the capture any more: what is not captured yet may be torn.

        Takes no lock.
        """
        if not self.is_eager_captured:
            self.given_up = self.failure_told = True

    def set_eager_captured(self) -> None:
        """Called when the eager leaves are captured."""
        self._eager_captured.set_result(None)

    def set_captured(self) -> None:
        """Called when the capture ended."""
        if self._captured.over:
            return
        self.captured_at = time.monotonic()
        self._captured.set_result(None)
        self._eager_captured.set_result(None)  # last: callers of checkpoint() wait for it

    def set_in_memory(self) -> None:
        """Called when it is committed in memory."""
        self.set_captured()
        if self._in_memory is not None:
            self._in_memory.set_result(None)

    def set_in_replicas(self, error: BaseException | None) -> None:
        """Called when it, or a newer one, is in the memory of other hosts; or with the reason why it is not."""
        if self._in_replicas is not None:
            self._in_replicas.set_result(None, error)

    def set_remote(self, error: BaseException | None) -> None:
        """Called when it, or a newer one, is in the bucket; or with the reason why it is not."""
        if self._remote is not None:
            self._remote.set_result(None, error)

    def set_durable(self, info: CheckpointInfo, *, superseded: bool = False) -> None:
        """Called with the committed checkpoint, or the newest one if this one is superseded."""
        self.superseded = superseded
        self.set_captured()
        if self._in_memory is not None and not self._in_memory.over:
            error = CheckpointError(f"the checkpoint of step {self.step} is durable, and not in memory")
            self._in_memory.set_error(error)
            self.set_in_replicas(error)
        self._durable.set_result(info)

    def set_failed(self, error: BaseException) -> None:
        """Called with the error of a failed checkpoint: promises that are over keep their outcome, the others fail."""
        known = self._in_memory is not None and self._in_memory.over and self._in_memory.error is None
        in_replicas = None if known else self._in_replicas  # one that is in memory may come to other hosts, too
        ends = (self._captured, self._eager_captured, self._in_memory, in_replicas, self._remote, self._durable)
        for promise in ends:
            if promise is not None:
                promise.set_error(error)
