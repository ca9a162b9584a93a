"""The engine for code that is not async: the same verbs, blocking."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self

import torch

from pccheck_async.config import Auto, EngineConfig
from pccheck_async.core import EngineCore
from pccheck_async.hooks import Hook
from pccheck_async.info import CheckpointInfo, Metadata, Restored
from pccheck_async.metrics import openmetrics, scalars
from pccheck_async.pending import PendingCheckpoint
from pccheck_async.policy import Policy
from pccheck_async.progress import ReadProgress
from pccheck_async.retention import SpaceNeeded
from pccheck_async.session import IO
from pccheck_async.statistics import EngineStatistics
from pccheck_async.training import TrainingStep
from pccheck_async.tuned import Tuning
from pccheck_async.tuner import Progress, checkpoint_bytes, tune_blocking

__all__ = ["SyncCheckpointEngine"]


class SyncCheckpointEngine:
    """:class:`pccheck_async.CheckpointEngine` for blocking code; use it as a context manager.

    Arguments and errors are the same. ``checkpoint()`` returns when the state is captured; ``pending.result()`` blocks
    until it is durable. Methods must not be called from a coroutine: they would block its loop.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_in_flight: int = 2,
        keep_last: int = 1,
        keep_every: int | None = None,
        keep_best: tuple[str, int, Literal["min", "max"]] | None = None,
        chunk_bytes: int | Auto = "auto",
        host_memory: int | Auto = "auto",
        writers: int | Auto = "auto",
        device: Literal["auto", "snapshot", "stream"] = "auto",
        io: IO = "auto",
        interval: int | timedelta | Policy | None = None,
        max_stall: float | None = None,
        check_captures: bool = False,
        on_busy: Literal["wait", "skip"] = "wait",
        on_error: Literal["raise", "warn"] = "raise",
        lock_timeout: float = 5.0,
        exit_timeout: float = 60.0,
    ) -> None:
        config = EngineConfig(
            max_in_flight=max_in_flight,
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=keep_best,
            chunk_bytes=chunk_bytes,
            host_memory=host_memory,
            writers=writers,
            device=device,
            interval=interval,
            max_stall=max_stall,
            check_captures=check_captures,
            on_busy=on_busy,
            on_error=on_error,
            lock_timeout=lock_timeout,
            exit_timeout=exit_timeout,
        )
        self._core = EngineCore(path, io, config)

    def open(self) -> Self:
        """Lock (or create) the store and recover (see :meth:`pccheck_async.CheckpointEngine.open`)."""
        self._core.block_on(self._core.open())
        return self

    def close(self, deadline: float | None = None) -> None:
        """Wait until every checkpoint ended, then close (see :meth:`pccheck_async.CheckpointEngine.close`)."""
        with self._core.preemption.ending():
            self._core.block_on(self._core.close(deadline))

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with self._core.preemption.ending(go=error is None):
                self._core.block_on(self._core.close())
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"a checkpoint failed too: {type(failure).__name__}: {failure}")

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Let every step of ``optimizer`` wait for captures (see :meth:`pccheck_async.CheckpointEngine.attach`)."""
        self._core.attach(optimizer)

    def on_preemption(self, *signals: int, deadline: float = 25.0) -> None:
        """Save once more when the process is asked to go (see :meth:`pccheck_async.CheckpointEngine.on_preemption`)."""
        self._core.check_alive()
        self._core.preemption.watch(signals, deadline)

    @property
    def preempted(self) -> bool:
        """Whether the process was asked to go (see :meth:`pccheck_async.CheckpointEngine.preempted`)."""
        return self._core.preemption.asked

    @contextmanager
    def step(self, state: Mapping[str, Any], step: int, *, metadata: Metadata | None = None) -> Iterator[TrainingStep]:
        """Bracket one training step, and checkpoint after it (see :meth:`pccheck_async.CheckpointEngine.step`)."""
        this = TrainingStep(state, step, metadata)
        self._core.begin_step(this)
        yield this
        if self._core.end_step(this):
            overlap = bool(self._core.guard.optimizers)
            pending = self.checkpoint(state, step=step, metadata=this.metadata, overlap=overlap)
            self._core.steps.note(this, pending)
        if self._core.is_last(this):
            self._core.block_on(self._core.last(this))

    def checkpoint(
        self,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        metadata: Metadata | None = None,
        overlap: bool = False,
    ) -> PendingCheckpoint:
        """Capture ``state``; return when it is safe to mutate (see :meth:`pccheck_async.CheckpointEngine.checkpoint`).

        A KeyboardInterrupt while it waits aborts the checkpoint.
        """
        pending, start = self._core.admit(state, step, metadata, overlap=overlap)
        try:
            if overlap:
                pending.wait_held_captured()
            else:
                pending.wait_captured()
        except Exception as error:
            if not self._core.warn_of(pending, error):
                raise
        except BaseException:  # KeyboardInterrupt
            self._core.aborts.abort_blocking(pending)
            raise
        finally:
            self._core.note_stall(pending, start)
        return pending

    def restore(
        self,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        strict: bool = True,
        progress: ReadProgress | None = None,
    ) -> Restored | None:
        """Restore into ``state``, in place (see :meth:`pccheck_async.CheckpointEngine.restore`)."""
        restored: Restored | None = self._core.block_on(self._core.restore(state, step, progress, strict=strict))
        return restored

    def pin(self, step: int) -> CheckpointInfo:
        """Keep the newest checkpoint of ``step`` (see :meth:`pccheck_async.CheckpointEngine.pin`)."""
        self._core.check_alive()
        return self._core.loop.call(self._core.pin(step, True))

    def unpin(self, step: int) -> CheckpointInfo:
        """End :meth:`pin`: the next commit drops it where no rule keeps it."""
        self._core.check_alive()
        return self._core.loop.call(self._core.pin(step, False))

    def space_needed(self, state: Mapping[str, Any] | None = None, *, nbytes: int | None = None) -> SpaceNeeded:
        """Return the storage that the settings take (see :meth:`pccheck_async.CheckpointEngine.space_needed`)."""
        self._core.check_alive()
        return self._core.space_needed(checkpoint_bytes(self._core, state, nbytes))

    def drain(self) -> None:
        """Block until every checkpoint admitted so far ended; raises the failure of one that nobody saw."""
        self._core.check_alive()
        self._core.loop.call(self._core.drain())
        self._core.admissions.raise_untold()

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
        self._core.check_alive()
        nbytes = checkpoint_bytes(self._core, state, nbytes)
        self._core.loop.call(self._core.drain())
        return tune_blocking(
            self._core.path,
            nbytes=nbytes,
            config=self._core.config,
            io=self._core.io,
            step_seconds=step_seconds,
            budget_seconds=budget_seconds,
            progress=progress,
        )

    def on_event(self, hook: Hook) -> Callable[[], None]:
        """Call ``hook`` with every event (see :meth:`pccheck_async.CheckpointEngine.on_event`)."""
        return self._core.reporter.hooks.add(hook)

    def wait_captured(self) -> None:
        """Block until no capture reads the live state any more."""
        self._core.wait_captured()

    @property
    def latest(self) -> CheckpointInfo | None:
        """The newest durable checkpoint."""
        return next(iter(self._core.infos), None)

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return the durable checkpoints, newest first."""
        return self._core.infos

    def statistics(self) -> EngineStatistics:
        """Return counts, times and decisions so far."""
        return self._core.statistics()

    def metrics(self) -> str:
        """Return the statistics in the text format of OpenMetrics (see :mod:`pccheck_async.metrics`)."""
        return openmetrics({self.path: self.statistics()})

    def scalars(self) -> dict[str, float]:
        """Return the statistics as numbers by name (see :func:`pccheck_async.metrics.scalars`)."""
        return scalars(self.statistics())

    @property
    def path(self) -> str:
        """Folder of the store."""
        return self._core.path
