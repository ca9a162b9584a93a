"""A checkpoint on its way: captured, then durable; each is a promise that any thread may set or wait for."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pccheck_async.engine.promise import Promise, wait_for_any
from pccheck_async.errors import ClosedError
from pccheck_async.format import CheckpointInfo

__all__ = ["CheckpointProgress", "PendingCheckpoint", "Waiting"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CheckpointProgress:
    """How far a checkpoint is.

    Attributes:
        phase: "waiting" for its turn, "capturing", "writing" (all is captured), "committing" (its last request is on
            its way: manifest, flush and commit record, and of a small checkpoint its bytes); or how it ended.
        nbytes: Bytes of the checkpoint's tensors, 0 while it waits.
        captured: Bytes captured so far.
        written: Bytes written so far, those of the last request included.
    """

    phase: Literal["waiting", "capturing", "writing", "committing", "durable", "superseded", "skipped", "failed"]
    nbytes: int
    captured: int
    written: int


class Waiting:
    """Counts a caller as waiting for a checkpoint: no other call gets its failure meanwhile.

    A caller that waits for ``promise`` while it fails gets the error; one that gave up before does not.
    """

    __slots__ = ("_pending", "_promise")

    def __init__(self, pending: PendingCheckpoint, promise: Promise[Any] | None = None) -> None:
        self._pending, self._promise = pending, promise
        if promise is not None and not promise.over and os.getpid() != pending._pid:
            raise ClosedError("this checkpoint is on its way in the parent process; a forked child cannot wait for it")

    def __enter__(self) -> None:
        self._pending._waiters.add(self)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._promise is not None and error is self._promise.error:
            self._pending.failure_told = True
        self._pending._waiters.discard(self)


class PendingCheckpoint:
    """The result of ``checkpoint()``. Usable from any thread and any event loop; ``await pending`` waits for durable.

    Attributes:
        step: The user's number.
        counter: The engine's number; checkpoints are admitted in the order of their counters.
        name: The user's name for it, None for none.
        superseded: Newer checkpoints became durable first and made this one pointless; it was dropped on purpose.
        skipped: ``max_in_flight`` checkpoints were in flight and ``on_busy="skip"``: nothing was captured, and this
            object stands for the newest one in flight.
        nbytes: Bytes of its tensors, None until it is its turn.
        captured_nbytes: Bytes captured so far.
        written_nbytes: Bytes written so far.
        failure_told: Whether the user has got its failure, as an error or a warning.
        overlap_was_chosen: Whether ``engine.step`` made it, which captures repeatedly torn tensors eagerly: that it is
            torn is warned of, and not raised by the next call.
        compare: Called before a caller that waited for the capture may change the state; set by ``Guard.watch``.
    """

    def __init__(self, step: int, counter: int, name: str | None = None) -> None:
        self.step = step
        self.counter = counter
        self.name = name
        self.superseded = False
        self.skipped = False
        self._pid = os.getpid()
        self.admitted_at = self.captured_at = time.monotonic()
        self.stall = 0.0
        self.nbytes: int | None = None
        self.captured_nbytes = self.written_nbytes = 0
        self.compare: Callable[[], None] | None = None
        self._eager_captured: Promise[None] = Promise()
        self._captured: Promise[None] = Promise()
        self._durable: Promise[CheckpointInfo] = Promise()
        self._target = self  # the checkpoint that is waited for
        self.failure_told = False
        self.overlap_was_chosen = False
        self._waiters: set[Waiting] = set()

    @classmethod
    def standing_for(cls, newest: PendingCheckpoint, step: int) -> PendingCheckpoint:
        """Return a stand-in for a skipped checkpoint: already safe to mutate, durable when ``newest`` is."""
        skipped = cls(step, newest.counter)
        skipped.skipped = True
        skipped.set_captured()
        skipped._target = newest._target
        return skipped

    async def captured(self) -> None:
        """Wait until the capture is complete: the state may be changed from then on.

        Cancellation: only stops the waiting.

        Raises:
            CheckpointError: the checkpoint failed before its capture was complete.
        """
        await self._wait(self._captured)
        if self.compare is not None:
            self.compare()

    async def durable(self) -> CheckpointInfo:
        """Wait until the checkpoint is committed.

        Durability: the returned checkpoint survives power loss. For a superseded or skipped one it is a newer one, for
            one that was rejected in flight the newest that is not.

        Cancellation: only stops the waiting; the checkpoint goes on.

        Raises:
            NoCheckpointError: it was rejected in flight, and all others were removed meanwhile.
            CheckpointError: it failed; older checkpoints are untouched, and nothing of it was committed, unless
                ``close`` gave up at its deadline: then the next opening may find it.
            StoreFailedError: a flush or a commit record failed: no later checkpoint of this engine succeeds either, and
                the next opening may find this one.
        """
        target = self._target
        return await target._wait(target._durable)

    def __await__(self) -> Generator[Any, None, CheckpointInfo]:
        return self.durable().__await__()

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """Block until durable, for code that is not async (see :meth:`durable`). Raises TimeoutError."""
        target = self._target
        return target._block(target._durable, timeout)

    def wait_captured(self, timeout: float | None = None) -> None:
        """Block until captured, for code that is not async (see :meth:`captured`). Raises TimeoutError."""
        self._block(self._captured, timeout)
        if self.compare is not None:
            self.compare()

    def done(self) -> bool:
        """Return whether it is durable, superseded or failed."""
        return self._target._durable.over

    @property
    def progress(self) -> CheckpointProgress:
        """How far it is, or, for a skipped one, how far the one is that it stands for. Never blocks."""
        target = self._target
        nbytes, captured, written = target.nbytes, target.captured_nbytes, target.written_nbytes
        if self.done():
            phase: Any = "failed" if target.failed else "superseded" if target.superseded else "durable"
        elif nbytes is None:
            phase = "waiting"
        else:
            phase = "committing" if written >= nbytes else "writing" if target.is_captured else "capturing"
        return CheckpointProgress("skipped" if self.skipped else phase, nbytes or 0, captured, written)

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

    def __repr__(self) -> str:
        return f"<PendingCheckpoint step={self.step} counter={self.counter} {self.progress.phase}>"

    # -- the engine's side

    async def eager_captured(self) -> None:
        """Wait until the eager leaves are captured: all of the state but its lazy part."""
        await self._wait(self._eager_captured)

    def wait_eager_captured(self) -> None:
        """Block until the eager leaves are captured."""
        self._block(self._eager_captured)

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

    @property
    def is_captured(self) -> bool:
        """Whether the capture ended (or failed)."""
        return self._captured.over

    @property
    def is_eager_captured(self) -> bool:
        """Whether the eager leaves are captured (or the checkpoint failed)."""
        return self._eager_captured.over

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None if it did not, or has not ended. Reading it does not count as delivering it."""
        return self._durable.error

    @property
    def failed(self) -> bool:
        """Whether it ended without becoming durable or superseded."""
        return self._durable.error is not None

    @property
    def awaited(self) -> bool:
        """Whether a caller is waiting for it, and will get a failure unless the waiting is cancelled."""
        return bool(self._waiters)

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

    def set_durable(self, info: CheckpointInfo, *, superseded: bool = False) -> None:
        """Called with the committed checkpoint, or the newest one if this one is superseded."""
        self.superseded = superseded
        self.set_captured()
        self._durable.set_result(info)

    def set_failed(self, error: BaseException) -> None:
        """Fail all promises that are not over."""
        for promise in (self._captured, self._eager_captured, self._durable):
            promise.set_error(error)
