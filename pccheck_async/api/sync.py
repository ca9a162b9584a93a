# SPDX-License-Identifier: Apache-2.0
"""The engine for code that is not async: the same verbs, blocking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Self

import torch

from pccheck_async.api.engine_base import EngineBase
from pccheck_async.engine import EngineLoop, PendingCheckpoint, Private, block_on, flight_of, note_closing_failure_on
from pccheck_async.format import CheckpointInfo, Metadata, Restored, formerly, the_one, which_one
from pccheck_async.telemetry import ReadProgress
from pccheck_async.training import StepContext, TrainingStep
from pccheck_async.tuning import Progress, Tuning

__all__ = ["SyncCheckpointEngine"]


class SyncCheckpointEngine(EngineBase):
    """:class:`pccheck_async.CheckpointEngine` for blocking code; use it as a context manager.

    Arguments and errors are the same. ``checkpoint()`` returns when the state is captured; ``pending.result()`` blocks
    until it is durable. Methods must not be called from a coroutine: they would block its loop.
    """

    def open(self) -> Self:
        """Lock (or create) the store and recover (see :meth:`pccheck_async.CheckpointEngine.open`)."""
        block_on(self._core, self._core.open)
        return self

    def close(self, deadline: float | None = None) -> None:
        """Wait until every checkpoint ended, then close (see :meth:`pccheck_async.CheckpointEngine.close`)."""
        with self._training.ending():
            block_on(self._core, self._core.close, deadline)

    def __aenter__(self) -> NoReturn:
        raise TypeError("use 'with SyncCheckpointEngine(...)', or CheckpointEngine in async code")

    def __aexit__(self, *_: object) -> None: ...

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with note_closing_failure_on(error), self._training.ending(go=error is None):
            block_on(self._core, self._training.leave, well=error is None)

    def step(self, state: Mapping[str, Any], step: int, *, metadata: Metadata | None = None) -> StepContext:
        """Return the context of one training step (see :meth:`pccheck_async.CheckpointEngine.step`)."""
        return StepContext(self._training, TrainingStep(state, step, metadata), self.checkpoint)

    def checkpoint(
        self,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        metadata: Metadata | None = None,
        name: str | None = None,
        replace: bool = False,
        overlap: bool = False,
    ) -> PendingCheckpoint:
        """Capture ``state``; return when it is safe to mutate (see :meth:`pccheck_async.CheckpointEngine.checkpoint`).

        A KeyboardInterrupt while it waits aborts the checkpoint.
        """
        pending, start = self._core.start_checkpoint(state, step, metadata, name=name, replace=replace, overlap=overlap)
        if pending.skipped:
            return pending
        flight = flight_of(pending)
        try:
            flight.wait_eager_captured()
        except Exception as error:
            if not self._core.in_flight.warn_of(flight, error):
                raise
        except BaseException:  # KeyboardInterrupt
            block_on(self._core, self._core.abort, flight)
            raise
        finally:
            self._core.in_flight.note_waited(flight, start, "checkpoint")
        return pending

    def restore(
        self,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        name: str | None = None,
        strict: bool = True,
        dtype: torch.dtype | None = None,
        private: Private = (),
        progress: ReadProgress | None = None,
        dry_run: bool = False,
    ) -> Restored | None:
        """Restore into ``state``, in place (see :meth:`pccheck_async.CheckpointEngine.restore`).

        The next commit drops a checkpoint that was found damaged.
        """
        which = which_one(step, name)
        return block_on(
            self._core, self._core.restore, state, which, progress,
            strict=strict, dtype=dtype, private=private, dry_run=dry_run,
        )  # fmt: skip

    @formerly("step", after=1)
    def pin(self, *, step: int | None = None, name: str | None = None) -> CheckpointInfo:
        """Keep a checkpoint until :meth:`unpin` (see :meth:`pccheck_async.CheckpointEngine.pin`)."""
        return block_on(self._core, self._core.pin, the_one(step, name), True)

    @formerly("step", after=1)
    def unpin(self, *, step: int | None = None, name: str | None = None) -> CheckpointInfo:
        """End :meth:`pin`: the next commit drops it if no rule keeps it."""
        return block_on(self._core, self._core.pin, the_one(step, name), False)

    def remove(self, *, step: int | None = None, name: str | None = None, force: bool = False) -> list[CheckpointInfo]:
        """Remove checkpoints, in one commit (see :meth:`pccheck_async.CheckpointEngine.remove`)."""
        return block_on(self._core, self._core.remove, the_one(step, name), force=force)

    @formerly("step", after=1)
    def reject(self, *, step: int | None = None, name: str | None = None) -> list[CheckpointInfo]:
        """Reject a checkpoint and every newer one (see :meth:`pccheck_async.CheckpointEngine.reject`)."""
        return block_on(self._core, self._core.reject, the_one(step, name))

    def drain(self) -> None:
        """Block until every checkpoint admitted so far ended; raises the failure of one that was not awaited."""
        block_on(self._core, self._core.drain)

    def tune(
        self,
        state: Mapping[str, Any] | None = None,
        *,
        nbytes: int | None = None,
        step_seconds: float | None = None,
        budget_seconds: float = 10.0,
        progress: Progress | None = None,
    ) -> Tuning:
        """Measure and return the settings for an engine here (see :meth:`pccheck_async.CheckpointEngine.tune`)."""
        measure = self._tuning(state, nbytes, step_seconds, budget_seconds, progress)
        self._core.loop.call(self._core.wait_ended())
        with EngineLoop("pccheck-tune") as loop:
            return loop.call(measure())
