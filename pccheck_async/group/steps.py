# SPDX-License-Identifier: Apache-2.0
"""Training steps of one rank: the policy is rank 0's, and its answers come from the group's schedule."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from pccheck_async.engine import Policy, StepEnd, StepReport
from pccheck_async.errors import GroupError
from pccheck_async.group.control import Server
from pccheck_async.group.coordinator import Coordinator
from pccheck_async.group.messages import AnyDecision, Broken
from pccheck_async.group.schedule import Schedule, Verdict

__all__ = ["Steps"]

_AHEAD_SECONDS: Final = 0.05
"""Seconds that a step is scheduled ahead of the training, at the least: the time of a message, on a busy machine."""
_MOST_AHEAD: Final = 64
"""The most steps that a step is scheduled ahead."""


class Steps:
    """The steps of this rank's trainer, on whose thread the methods run.

    Args:
        schedule: This rank's copy of the schedule.
        broken: Returns why no more steps are scheduled; None while they are.
        server: The control plane, on rank 0; else None.
        report_preempted: Reports to the group that this rank was preempted; called once.
        disk: For saves in memory: the steps of the disk; None: these are the steps of the disk. Steps of memory raise
            no error if their tier breaks, and are published two ahead, as they may be consecutive.

    Attributes:
        changed: Held around every use of the schedules of both tiers, and notified after each decision.
        stopped: Whether the last step of all ranks has come.
    """

    def __init__(
        self,
        schedule: Schedule,
        broken: Callable[[], Broken | None],
        server: Server | None,
        report_preempted: Callable[[], object] = lambda: None,
        disk: Steps | None = None,
    ) -> None:
        self._schedule = schedule
        self._broken = broken
        self._server = server
        self._report_preempted = report_preempted
        self._in_memory = disk is not None
        self._ahead = 1 if disk is None else 2
        self.changed: threading.Condition = threading.Condition() if disk is None else disk.changed
        self._upcoming: list[int] = []
        self._published: int | None = None
        self._preempted = self._due = self.stopped = False

    def begin(self, step: int) -> None:
        """Called when the trainer begins a step."""
        with self.changed:
            self._schedule.begin(step)
            if self._server is not None:
                self._server.step = step

    def end(self) -> None:
        """Called when the loop has ended: the group then agrees on no last step, as this rank would miss it."""
        with self.changed:
            self._schedule.end()

    def due(self, policy: Policy, report: StepReport, *, preempted: bool) -> StepEnd:
        """Return the actions of all ranks after this step. Blocks while the schedule does not cover it yet.

        Saves of a policy that has ``next_after(step)`` are made exactly at its steps; those of another policy later, by
        1 to 2 times 50 ms, or 1 to 2 steps if these are longer. Raises GroupError: no more steps will be scheduled.
        """
        save = False
        if self._server is not None:
            self._due = policy.due(report) or self._due
        if preempted and not self._preempted:
            self._preempted = True
            self._report_preempted()
        while True:
            if self._server is not None:
                self._publish(self._server, policy, report)
            verdict = self._verdict(report.step)
            if verdict is not Verdict.SAVE:
                last = verdict is Verdict.STOP
                self.stopped = self.stopped or last
                return StepEnd(save or last, last)
            save = True

    def _publish(self, server: Server, policy: Policy, report: StepReport) -> None:
        """On rank 0, schedule further steps, if too few are upcoming."""
        self._upcoming = [step for step in self._upcoming if step > report.step]
        next_after = getattr(policy, "next_after", None)
        while len(self._upcoming) < (1 if next_after is None else self._ahead):
            if next_after is not None:
                last = self._upcoming[-1] if self._upcoming else report.step - (self._published is None)
                step, save = next_after(last), True
            else:
                ahead = math.ceil(_AHEAD_SECONDS / report.seconds) if report.seconds > 0 else _MOST_AHEAD
                step, save, self._due = report.step + max(1, min(_MOST_AHEAD, ahead)), self._due, False
            self._published = step
            self._upcoming += [step] if step > report.step else []
            server.decide(partial(self._schedule_in, step=step, save=save))

    def _schedule_in(self, coordinator: Coordinator, *, step: int, save: bool) -> Sequence[AnyDecision]:
        if self._in_memory:
            return coordinator.schedule_in_memory(step, save=save)
        return coordinator.schedule.publish(step, save=save)

    def _verdict(self, step: int) -> Verdict:
        with self.changed:
            while (verdict := self._schedule.at_end(step)) is Verdict.WAIT:
                if (broken := self._broken()) is not None:
                    if self._in_memory:
                        return Verdict.GO
                    raise GroupError(broken.why)
                self.changed.wait()
            return verdict
