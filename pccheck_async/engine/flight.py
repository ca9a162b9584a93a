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
        """Whether the promise has a result or an error."""
        return "outcome" in self._facts

    @property
    def outcome(self) -> tuple[T, BaseException | None] | None:
        """The result, and the error or None; None if neither is set yet."""
        return self._facts.get("outcome")

    @property
    def error(self) -> BaseException | None:
        """The error; None if there is none, or the promise is not over yet."""
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
        """Block until the promise is over; return its result. Raises its error, or TimeoutError."""
        if "outcome" not in self._facts and not wait_for_any((self,), timeout):
            raise TimeoutError
        outcome: tuple[T, BaseException | None] = self._facts["outcome"]
        result, error = outcome
        if error is not None:
            raise error
        return result

    def future(self) -> Future[T]:
        """Return a future with the outcome, which cannot be cancelled."""
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
    """Block until one of the promises is over; return False if none is after ``timeout`` seconds.

    If this is interrupted, it leaves no lock held. An interrupted wait for a future can leave one held, and the thread
    that sets the result would then block.
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
    """Context in which a caller waits for a checkpoint: no other call gets the checkpoint's failure meanwhile.

    The failure counts as delivered if the context is left with the error of ``promise``, not if the caller gave up
    before. Raises ClosedError in a forked child, where the promise never comes true.
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
        step: The user's number of the step.
        counter: The engine's number; checkpoints are admitted in the order of their counters.
        name: The user's name for the checkpoint, None for none.
        superseded: Whether newer checkpoints became durable first, so that this one was dropped on purpose.
        admitted_at: Time of the admission, of ``time.monotonic()``.
        captured_at: Time at which the capture ended, of ``time.monotonic()``; before that ``admitted_at``.
        stall: Seconds that training waited for this checkpoint.
        nbytes: Bytes of the checkpoint's tensors, None until its turn has come.
        captured_nbytes: Bytes captured so far.
        written_nbytes: Bytes written so far.
        failure_told: Whether the failure needs no delivery any more: the user got it, or it is not the user's concern.
        overlap_was_chosen: Whether ``engine.step`` chose to overlap the capture. If it is torn, the user is warned, and
            the next call does not raise: ``engine.step`` captures repeatedly torn tensors eagerly.
        given_up: Whether the caller stopped waiting before the eager leaves were captured, and may change the state.
        on_disk: Whether the checkpoint is due on disk; else in memory alone.
        compare: Compares the lazy tensors with their versions, to detect a torn capture. Called after each wait for the
            capture, before the caller may change the state. Set by ``Guard.watch``; None if nothing is lazy.
    """

    superseded = False
    stall = 0.0
    nbytes: int | None = None
    captured_nbytes = written_nbytes = 0
    failure_told = overlap_was_chosen = given_up = False
    compare: Callable[[], None] | None = None

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
        self.admitted_at = self.captured_at = time.monotonic()
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
        """Wait until the capture is complete (see :meth:`.pending.PendingCheckpoint.captured`)."""
        await self._wait(self._captured)
        if self.compare is not None:
            self.compare()

    def wait_captured(self, timeout: float | None = None) -> None:
        """Block until the capture is complete (see :meth:`.pending.PendingCheckpoint.wait_captured`)."""
        self._block(self._captured, timeout)
        if self.compare is not None:
            self.compare()

    async def durable(self) -> CheckpointInfo:
        """Wait until the checkpoint is durable (see :meth:`.pending.PendingCheckpoint.durable`)."""
        return await self._wait(self._durable)

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """Block until the checkpoint is durable (see :meth:`.pending.PendingCheckpoint.result`)."""
        return self._block(self._durable, timeout)

    async def reached(self, tier: Reach) -> None:
        """Wait until the checkpoint is committed in memory, in the memory of other hosts, or in a bucket."""
        await self._wait(self._of_tier(tier))

    def wait_reached(self, tier: Reach, timeout: float | None = None) -> None:
        """Block until the checkpoint is committed in memory, in the memory of other hosts, or in a bucket."""
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
        """Whether a caller is waiting for the checkpoint, and will get its failure unless the waiting is cancelled."""
        return bool(self._waiters)

    # -- the engine's waiting, which gets no failure

    def captured_future(self) -> Future[None]:
        """Return a future that is done when nothing reads the live state any more, or the capture failed."""
        return self._captured.future()

    def ended_future(self) -> Future[CheckpointInfo]:
        """Return a future that is done when the checkpoint is durable, superseded or failed."""
        return self._durable.future()

    def wait_out_of_reach(self, timeout: float | None = None, enough: Promise[Any] | None = None) -> bool:
        """Block until nothing reads the live state any more, or until ``enough`` is over. Raises no failure.

        Returns:
            False if it took longer than ``timeout`` seconds.
        """
        if self._captured.over:
            return True
        return wait_for_any([each for each in (self._captured, enough) if each is not None], timeout)

    # -- how far it is

    @property
    def is_captured(self) -> bool:
        """Whether the capture has ended (or the checkpoint failed)."""
        return self._captured.over

    @property
    def is_eager_captured(self) -> bool:
        """Whether the eager leaves are captured (or the checkpoint failed)."""
        return self._eager_captured.over

    @property
    def over(self) -> bool:
        """Whether the checkpoint is durable, superseded or failed."""
        return self._durable.over

    @property
    def error(self) -> BaseException | None:
        """The error that the checkpoint failed with; None if it did not fail, or has not ended.

        Reading it does not count as delivering it.
        """
        return self._durable.error

    @property
    def failed(self) -> bool:
        """Whether the checkpoint ended without becoming durable or superseded."""
        return self._durable.error is not None

    @property
    def progress(self) -> CheckpointProgress:
        """How far the checkpoint is. Never blocks."""
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
        """Called when the caller does not wait for the capture any more: eager leaves not yet captured may be torn.

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
        """Called when the checkpoint is committed in memory, and so captured, too."""
        self.set_captured()
        if self._in_memory is not None:
            self._in_memory.set_result(None)

    def set_in_replicas(self, error: BaseException | None) -> None:
        """Called when the checkpoint, or a newer one, is in the memory of other hosts, or with the error why not."""
        if self._in_replicas is not None:
            self._in_replicas.set_result(None, error)

    def set_remote(self, error: BaseException | None) -> None:
        """Called when the checkpoint, or a newer one, is in the bucket, or with the error why not."""
        if self._remote is not None:
            self._remote.set_result(None, error)

    def set_durable(self, info: CheckpointInfo, *, superseded: bool = False) -> None:
        """Called with the committed checkpoint, or the newest one if this one is superseded.

        Fails the waiting for memory and for other hosts, if the checkpoint is not in memory by then.
        """
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
