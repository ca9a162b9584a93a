"""Giving checkpoints up before their capture ended, from outside the engine's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent import futures

from pccheck_async.engine.in_flight import Admissions
from pccheck_async.engine.loop import EngineLoop, finish
from pccheck_async.engine.pending import PendingCheckpoint
from pccheck_async.engine.scheduler import Scheduler
from pccheck_async.errors import CheckpointError, ClosedError

__all__ = ["Aborts"]


class Aborts:
    """Ends checkpoints whose callers will not wait for them.

    Args:
        loop: The engine's.
        scheduler: Runs the checkpoints.
        admissions: Remembers them.
        patience: Returns the most seconds to wait for operations that run, None for as long as they take.
    """

    def __init__(
        self, loop: EngineLoop, scheduler: Scheduler, admissions: Admissions, patience: Callable[[], float | None]
    ) -> None:
        self._loop = loop
        self._scheduler = scheduler
        self._admissions = admissions
        self._patience = patience

    async def abort(self, pending: PendingCheckpoint) -> None:
        """Cancel a checkpoint before its capture ended; returns once nothing of it is running, cancelled or not."""
        with pending.aborting():
            aborting = self._start(pending)
            if aborting is not None:
                patience = self._patience()
                if patience is None:
                    await finish(aborting)
                else:  # the device may be stuck, and the process goes
                    await asyncio.wait((asyncio.wrap_future(aborting),), timeout=patience)
                _note(pending, aborting)

    def abort_blocking(self, pending: PendingCheckpoint) -> None:
        """Do the same as :meth:`abort`, blocking."""
        with pending.aborting():
            aborting = self._start(pending)
            if aborting is not None:
                futures.wait([aborting], self._patience())
                _note(pending, aborting)

    def take_back(self, pending: PendingCheckpoint) -> None:
        """End a checkpoint that its caller does not get to know, whether the engine heard of it or not."""
        self.abort_blocking(pending)
        error = CheckpointError(f"the checkpoint of step {pending.step} was interrupted")
        if self._admissions.withdraw(pending, error):
            pending.set_failed(error)

    def abandon(self, pending: PendingCheckpoint, max_stall: float | None) -> None:
        """Give a capture up that holds training up for too long; returns once nothing reads the live state."""
        error = CheckpointError(
            f"abandoned the checkpoint of step {pending.step}: its capture held an optimizer's step up for longer than "
            f"max_stall = {max_stall} s"
        )
        try:
            abandoned = self._loop.call(self._scheduler.abandon(pending, error, max_stall))
        except ClosedError:
            return  # closing ended it
        if abandoned:
            self._admissions.counts.abandoned += 1

    def _start(self, pending: PendingCheckpoint) -> futures.Future[bool] | None:
        try:
            return self._loop.submit(self._scheduler.abort(pending))[0]
        except ClosedError:
            return None  # closing ended it


def _note(pending: PendingCheckpoint, aborting: futures.Future[bool]) -> None:
    if aborting.done() and aborting.exception() is None and aborting.result():
        pending.set_told()  # else it was captured already and goes on
