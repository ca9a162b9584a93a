"""A checkpoint on its way: captured, then durable."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar

from pccheck_async.engine.loop import finish, wait_for
from pccheck_async.engine.promise import Moment, wait_for_any
from pccheck_async.errors import ClosedError
from pccheck_async.format.info import CheckpointInfo

__all__ = ["CheckpointProgress", "PendingCheckpoint"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CheckpointProgress:
    """How far a checkpoint is.

    Attributes:
        phase: "waiting" for its turn, "capturing", "writing" (all captured), "committing" (all written: manifest, flush
            and record); or what became of it.
        nbytes: Its bytes, 0 while it waits.
        captured: Those captured.
        written: Those written.
    """

    phase: Literal["waiting", "capturing", "writing", "committing", "durable", "superseded", "skipped", "failed"]
    nbytes: int
    captured: int
    written: int


class PendingCheckpoint:
    """What ``checkpoint()`` returns. Usable from any thread and any event loop; ``await pending`` waits for durable.

    Attributes:
        step: The user's number.
        counter: The engine's number; order of counters is order of admission.
        superseded: Newer checkpoints became durable first and made this one pointless; it was dropped on purpose.
        skipped: All places were in flight and ``on_busy="skip"``; nothing was captured, and this stands for the newest
        one.
        nbytes: Its bytes, None until it is its turn.
        captured_nbytes: Those captured.
        written_nbytes: Those written.
    """

    def __init__(self, step: int, counter: int) -> None:
        self.step = step
        self.counter = counter
        self.superseded = False
        self.skipped = False
        self._pid = os.getpid()
        self.admitted_at = self.captured_at = time.monotonic()
        self.stall = 0.0
        self.nbytes: int | None = None
        self.captured_nbytes = self.written_nbytes = 0
        self._settle: Callable[[], None] | None = None
        self._held: Moment[None] = Moment()
        self._captured: Moment[None] = Moment()
        self._durable: Moment[CheckpointInfo] = Moment()
        self._target = self  # whose result is waited for
        self._told = False
        self._waiters: set[object] = set()

    @classmethod
    def standing_for(cls, newest: PendingCheckpoint, step: int) -> PendingCheckpoint:
        """Return what a skipped checkpoint's caller gets: already safe to mutate, durable when ``newest`` is."""
        skipped = cls(step, newest.counter)
        skipped.skipped = True
        skipped.set_captured()
        skipped._target = newest._target
        return skipped

    async def captured(self) -> None:
        """Wait until the state's bytes are out of reach: it may be mutated now.

        Cancellation: only stops the waiting.

        Raises:
            CheckpointError: what made the checkpoint fail before its capture was complete.
        """
        await self._wait(self._captured)
        if self._settle is not None:
            self._settle()

    async def durable(self) -> CheckpointInfo:
        """Wait until the checkpoint is committed.

        Durability: the returned checkpoint survives power loss. For a superseded (or skipped) one that is a newer one.

        Cancellation: only stops the waiting; the checkpoint goes on.

        Raises:
            CheckpointError: what made it fail. Nothing of it was committed; older checkpoints are untouched.
            StoreFailedError: that was a flush or a commit record: no later checkpoint of this engine succeeds either.
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
        if self._settle is not None:
            self._settle()

    def done(self) -> bool:
        """Whether it is durable, superseded or failed."""
        return self._target._durable.over

    @property
    def progress(self) -> CheckpointProgress:
        """How far it is; of a skipped one, the one it stands for. Never blocks."""
        target = self._target
        nbytes, captured, written = target.nbytes, target.captured_nbytes, target.written_nbytes
        if self.done():
            phase: Any = "failed" if target.failed else "superseded" if target.superseded else "durable"
        elif nbytes is None:
            phase = "waiting"
        else:
            phase = "committing" if written >= nbytes else "writing" if target.is_captured else "capturing"
        return CheckpointProgress("skipped" if self.skipped else phase, nbytes or 0, captured, written)

    async def _wait(self, moment: Moment[T]) -> T:
        outcome = moment.outcome
        if outcome is not None and outcome[1] is None:
            await asyncio.sleep(0)  # others may run, and cancel
            return outcome[0]
        with _Waiter(self, moment):
            return await wait_for(moment.future())

    def _block(self, moment: Moment[T], timeout: float | None = None) -> T:
        outcome = moment.outcome
        if outcome is not None and outcome[1] is None:
            return outcome[0]
        with _Waiter(self, moment):
            try:
                return moment.result(timeout)
            except TimeoutError:
                if moment.over:
                    raise
                where = f"the checkpoint of step {self.step} is {self.progress.phase}"
                raise TimeoutError(f"{where} after {timeout} s; it goes on") from None

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """Whoever aborts it knows that it fails: nobody else is told meanwhile."""
        aborter = object()
        self._waiters.add(aborter)
        try:
            yield
        finally:
            self._waiters.discard(aborter)

    def __repr__(self) -> str:
        state = (
            "skipped"
            if self.skipped
            else "superseded"
            if self.superseded
            else "failed"
            if self.failed
            else "durable"
            if self._durable.over
            else "captured"
            if self._captured.over
            else "capturing"
        )
        return f"<PendingCheckpoint step={self.step} counter={self.counter} {state}>"

    # -- the engine's side

    def settle_by(self, settle: Callable[[], None]) -> None:
        """Call ``settle`` before anyone is told that the state may be changed."""
        self._settle = settle

    async def held_captured(self) -> None:
        """Wait until what may change before the next optimizer step is out of reach (see :meth:`captured`)."""
        await self._wait(self._held)

    def wait_held_captured(self) -> None:
        """Do the same, blocking."""
        self._block(self._held)

    async def out_of_reach(self) -> None:
        """Wait until nothing reads the live state any more; a failure stays untold."""
        if not self._captured.over:
            await finish(self._captured.future())

    def wait_out_of_reach(self, timeout: float | None = None, enough: Moment[Any] | None = None) -> bool:
        """Block until nothing reads the live state any more, or until ``enough`` is done; a failure stays untold.

        Returns:
            False where it took longer than ``timeout`` seconds.
        """
        if self._captured.over:
            return True
        return wait_for_any([each for each in (self._captured, enough) if each is not None], timeout)

    @property
    def is_captured(self) -> bool:
        """Whether the capture ended (or failed)."""
        return self._captured.over

    @property
    def failed(self) -> bool:
        """Whether it ended without becoming durable, nor pointless."""
        return self._durable.error is not None

    @property
    def failure_told(self) -> bool:
        """Whether somebody got to know of the failure."""
        return self._told

    @property
    def awaited(self) -> bool:
        """Whether somebody is waiting for it, and will get to know of a failure unless the waiting is cancelled."""
        return bool(self._waiters)

    def set_held_captured(self) -> None:
        """Note that what is not left to the guard is captured."""
        self._held.set_result(None)

    def set_captured(self) -> None:
        """Note the end of the capture."""
        if self._captured.over:
            return
        self.set_held_captured()
        self.captured_at = time.monotonic()
        self._captured.set_result(None)

    def set_durable(self, info: CheckpointInfo, *, superseded: bool = False) -> None:
        """Note the commit, or the newest checkpoint where this one is superseded."""
        self.superseded = superseded
        self.set_captured()
        self._durable.set_result(info)

    def set_failed(self, error: BaseException) -> None:
        """Note the failure."""
        for moment in (self._held, self._captured, self._durable):
            moment.set_error(error)

    def set_told(self) -> None:
        """Note that the failure was told to the user."""
        self._told = True


class _Waiter:
    """Whoever waits here while it fails has been told; whoever gave up waiting before has not."""

    __slots__ = ("_moment", "_pending")

    def __init__(self, pending: PendingCheckpoint, moment: Moment[Any]) -> None:
        self._pending = pending
        self._moment = moment

    def __enter__(self) -> None:
        pending = self._pending
        if not self._moment.over and os.getpid() != pending._pid:
            raise ClosedError("this checkpoint is on its way in the parent process; a forked child cannot wait for it")
        pending._waiters.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pending = self._pending
        if error is not None and error is self._moment.error:
            pending._told = True
        pending._waiters.discard(self)
