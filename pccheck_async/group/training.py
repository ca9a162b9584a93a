"""Training steps of a group: all ranks save after the same steps, and stop after the same one when one is preempted."""

from __future__ import annotations

import math
import os
import signal
from contextlib import AbstractContextManager
from typing import Final

from pccheck_async.engine import Decision, Policy, SaveReport, StepReport
from pccheck_async.group.core import GroupCore
from pccheck_async.group.schedule import Verdict
from pccheck_async.training import TrainingRun, TrainingStep

__all__ = ["GroupTraining"]

_AHEAD_SECONDS: Final = 0.05
"""How far ahead of the training a schedule is published at the least: the time of a message, on a busy machine."""
_MOST_AHEAD: Final = 64
"""The most steps."""


class _Scheduled:
    """A policy that consults rank 0's, and answers from the group's schedule.

    A policy that has ``next_after(step)`` is followed to the step. The saves of another one are made a little later:
    1 to 2 times 50 ms, or 1 to 2 steps if these are longer.
    """

    def __init__(self, policy: Policy, core: GroupCore, training: GroupTraining) -> None:
        self._policy = policy
        self._core = core
        self._training = training
        self._due = False
        self._first = True

    def due(self, report: StepReport) -> bool:
        """Return whether all ranks save after this step. Waits if the schedule does not cover it yet."""
        run = self._core.run
        leads = self._core.group.rank == 0
        if leads:
            self._due = self._policy.due(report) or self._due
        if self._training.preemption.pending:
            run.tell_preempted()
        save = False
        while True:
            if leads and run.lacks_schedule(report.step):
                self._publish(report)
            verdict = run.at_end(report.step)
            match verdict:
                case Verdict.SAVE:
                    save = True
                case Verdict.GO:
                    return save
                case Verdict.STOP:
                    self._training.stop()
                    return True
                case Verdict.WAIT:
                    run.wait_for_schedule(report.step)

    def _publish(self, report: StepReport) -> None:
        run, policy = self._core.run, self._policy
        if (next_after := getattr(policy, "next_after", None)) is not None:
            run.publish(next_after(report.step - 1 if self._first else report.step), save=True)
        else:
            ahead = math.ceil(_AHEAD_SECONDS / report.seconds) if report.seconds > 0 else _MOST_AHEAD
            run.publish(report.step + max(1, min(_MOST_AHEAD, ahead)), save=self._due)
            self._due = False
        self._first = False

    def skipped(self, report: StepReport) -> None:
        self._policy.skipped(report)

    def saved(self, report: SaveReport) -> None:
        self._policy.saved(report)

    def decision(self) -> Decision:
        return self._policy.decision()


class GroupTraining(TrainingRun):
    """One rank's training run."""

    most_postponed_seconds = math.inf  # the clocks of ranks differ, and all of them save after the same steps

    def __init__(self, core: GroupCore, policy: Policy, *, save_last: bool) -> None:
        super().__init__(core, _Scheduled(policy, core, self), save_last=save_last)
        self._group = core
        self._last = False  # the group's last step has come

    def begin(self, this: TrainingStep) -> TrainingStep:
        super().begin(this)
        self._group.run.begin_step(this.step)
        return this

    def _sets_metric(self, this: TrainingStep) -> bool:
        """Never a reason to save: all ranks or none have to, and which of them set the metric is not known."""
        return False

    @property
    def stopping(self) -> bool:
        return self._last

    def stop(self) -> None:
        """Called when this step is the last one of all ranks; a rank that no signal reached sends one to itself."""
        self._last = True
        if not self.preemption.pending and self.preemption.signals:
            os.kill(os.getpid(), min(self.preemption.signals, default=signal.SIGTERM))

    def ending(self, *, go: bool = True) -> AbstractContextManager[None]:
        self._group.end_schedule()
        return super().ending(go=go)
