"""Brackets around training steps: what a step took, and whether to checkpoint after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from itertools import chain
from types import TracebackType
from typing import Any, NoReturn

import torch

from pccheck_async.engine.in_flight import Admissions
from pccheck_async.engine.overlap import Guard
from pccheck_async.engine.pending import PendingCheckpoint
from pccheck_async.engine.policy import Decision, Policy, StepReport
from pccheck_async.engine.step_hooks import unwrapped
from pccheck_async.format.info import Metadata, new_step
from pccheck_async.format.record import check_metadata
from pccheck_async.state.save.flatten import check_outermost
from pccheck_async.state.tensor_access import notify, stop_notifying, storage_address
from pccheck_async.telemetry.logs import write
from pccheck_async.training.accumulation import Mark, Windows

__all__ = ["AsyncBracket", "Bracket", "TrainingStep", "TrainingSteps"]

_LONG_WINDOW = 256
"""Brackets without a step of an attached optimizer after which a checkpoint that is due may wait in vain."""


class TrainingStep:
    """What ``with engine.step(...) as this_step`` gives.

    Attributes:
        step: The user's number.
        metadata: Small facts for ``list_checkpoints``, if this step is saved; may be added to inside the bracket.
        pending: The checkpoint that was taken when the bracket ended, or None.
        whole: Whether the bracket ended outside windows of gradient accumulation: the state is that of a whole step.
    """

    def __init__(self, state: Mapping[str, Any], step: int, metadata: Metadata | None) -> None:
        check_outermost(state)  # now, and not in an hour, when a step is saved
        self.state = state
        self.step = new_step(step)
        self.metadata = check_metadata(metadata) if metadata else {}
        self.pending: PendingCheckpoint | None = None
        self.whole = False
        self.began = time.monotonic()
        self.stall_then = 0.0
        self.in_flight = 0
        self.window = 0
        self.counter = -1
        self.mark: Mark | None = None


class Bracket(AbstractContextManager["TrainingStep", None]):
    """What ``SyncCheckpointEngine.step`` returns: for ``with``, and for those who write ``async with`` an error."""

    def __init__(self, inner: AbstractContextManager[TrainingStep, Any]) -> None:
        self._inner = inner

    def __enter__(self) -> TrainingStep:
        return self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inner.__exit__(kind, error, traceback)

    def __aenter__(self) -> NoReturn:
        raise TypeError("use 'with engine.step(...)': this engine is a SyncCheckpointEngine")

    def __aexit__(self, *_: object) -> None: ...


class AsyncBracket(AbstractAsyncContextManager["TrainingStep", None]):
    """What ``CheckpointEngine.step`` returns: for ``async with``, and for those who write ``with`` an error."""

    def __init__(self, inner: AbstractAsyncContextManager[TrainingStep, Any]) -> None:
        self._inner = inner

    async def __aenter__(self) -> TrainingStep:
        return await self._inner.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._inner.__aexit__(kind, error, traceback)

    def __enter__(self) -> NoReturn:
        raise TypeError("use 'async with engine.step(...)', or a SyncCheckpointEngine where nothing is async")

    def __exit__(self, *_: object) -> None: ...


class TrainingSteps:
    """Measures the steps of one engine and asks its policy.

    A policy may say "now" inside a window of gradient accumulation, or after a step that a gradient scaler left out.
    Then the checkpoint waits for the end of the window (see :mod:`pccheck_async.training.accumulation`). The policy
    hears that it was not made: what it measures, and when it asks next, counts from where it is made.

    Args:
        policy: Says when to checkpoint.
        admissions: The engine's checkpoints.
        guard: The engine's guard.
        store: Path of the store, for the log.
        save_last: The last finished step may have to be saved.
    """

    def __init__(
        self, policy: Policy, admissions: Admissions, guard: Guard, store: str, *, save_last: bool = False
    ) -> None:
        self._store = store
        self._save_last = save_last
        self._last_finished: TrainingStep | None = None
        self._reached: set[tuple[int, bool]] = set()  # storages and tensors, since it ended; to write there?
        self._policy = policy
        self._admissions = admissions
        self._guard = guard
        self._windows = Windows(guard, store)
        self._reported_stall = 0.0
        self._due = False
        self._waited: int | None = 0  # brackets since it was due; None where nothing is left to say about that
        self._last: StepReport | None = None
        self._said: tuple[int | None, str] | None = None

    @property
    def decision(self) -> Decision:
        """What the policy has decided, and why."""
        return self._policy.decision()

    @property
    def last(self) -> StepReport | None:
        """The last step that went well."""
        return self._last

    @property
    def last_finished(self) -> TrainingStep | None:
        """The last step, if it went well and may have to be saved."""
        return self._last_finished

    def forget_last(self) -> None:
        """Note that the state is that of no finished step."""
        self._last_finished = None

    def note_restore(self) -> None:
        """Note that a restore may have changed the state; that bumps no versions."""
        if self._last_finished is not None:
            self._last_finished.mark = None

    def _note_access(self, owner: object, writes: bool) -> None:
        if self._last_finished is not None:
            self._reached.update(((storage_address(owner), writes), (id(owner), writes)))

    def is_as_it_was(self, this: TrainingStep, *, well: bool) -> bool:
        """Whether the state is still that of the end of this step, as far as can be told; else say what happened.

        Args:
            this: The step.
            well: No error ends the run. One may come out of an evaluation with other weights in the parameters' memory,
                however they got there; else who only may have read, to write a file, say, is taken for a reader.
        """
        if not this.whole:
            why = "a window of gradient accumulation is open, and gradients are not saved; let the last one end"
        elif this.mark is None or not self._windows.is_at(this.mark):
            why = (
                "parameters of its optimizers have changed since, or a checkpoint was restored; leave the context "
                "before that, or call engine.checkpoint before it"
            )
        elif {at for at, writes in self._reached if writes or not well}.intersection(
            chain(
                map(storage_address, this.mark.parameters), map(id, this.mark.parameters)
            )  # new memory, the same ones
        ):
            why = (
                "code got at the memory of its parameters since ('param.data'), as evaluations with other weights do; "
                "leave the context before that, or call engine.checkpoint before it"
            )
        else:
            return True
        text = "the last step, %d, is not saved on leaving: %s"
        write(logging.WARNING, "last_not_saved", text, this.step, why, step=this.step, store=self._store)
        return False

    def attach(self, *optimizers: torch.optim.Optimizer) -> None:
        """Let their steps wait for captures that they would tear, and end windows."""
        for optimizer in map(unwrapped, optimizers):
            self._guard.attach(optimizer)
            self._windows.watch(optimizer)

    def close(self) -> None:
        """Let go of all optimizers."""
        self._last_finished = None
        stop_notifying(self._note_access)
        self._guard.close()
        self._windows.close()

    def begin(self, this: TrainingStep, stall: float) -> None:
        """Note the beginning of a step; ``stall`` is the engine's so far."""
        if self._save_last:
            notify(self._note_access)
        self._last_finished = None
        self._reached.clear()
        this.counter = self._admissions.counter
        this.window = self._windows.begin(this.state)
        this.stall_then = stall
        this.in_flight = len(self._admissions.in_flight)
        this.began = time.monotonic()

    def end(self, this: TrainingStep, stall: float) -> bool:
        """Note the end of a step that went well; return whether to checkpoint now."""
        now = time.monotonic()
        for saved in self._admissions.take_reports():
            self._policy.saved(saved)
        report = self._last = StepReport(
            step=this.step,
            now=now,
            seconds=max(0.0, now - this.began - (stall - this.stall_then)),
            stall=stall - self._reported_stall,
            in_flight=max(this.in_flight, len(self._admissions.in_flight)),
        )
        self._reported_stall = stall
        self._due = self._policy.due(report) or self._due
        self._say()
        this.whole = self._windows.end(this.step, this.window)
        if self._save_last:
            this.mark = self._windows.mark() if this.whole else None
            self._last_finished = this
        if not self._due:
            return False
        if not this.whole:
            self._policy.skipped(report)
            if self._windows.lacks_step:
                self._look_for_steps(this)
            elif self._waited is not None:
                self._waited = 0
            return False
        self._due = False
        self._waited = None if self._waited is None else 0
        return True

    def note(self, this: TrainingStep, pending: PendingCheckpoint) -> None:
        """Note the checkpoint that was taken after a step."""
        this.pending = pending
        if pending.skipped and self._last is not None:
            self._policy.skipped(self._last)

    def _look_for_steps(self, this: TrainingStep) -> None:
        if self._waited is None:
            return
        self._waited += 1
        if self._waited == _LONG_WINDOW:
            self._waited = None
            text = (
                "nothing is saved: a checkpoint is due, and in the last %d brackets of engine.step no attached "
                "optimizer made a step; attach the one that trains, unless this window of gradient accumulation is "
                "that long"
            )
            write(logging.WARNING, "no_step", text, _LONG_WINDOW, step=this.step, store=self._store)

    def _say(self) -> None:
        decision = self._policy.decision()
        said = decision.interval, decision.reason  # the seconds follow every step that is measured
        if said != self._said:
            self._said = said
            fields = {"interval": decision.interval, "seconds": decision.seconds, "store": self._store}
            write(logging.INFO, "interval", "%s", decision.reason, **fields)
