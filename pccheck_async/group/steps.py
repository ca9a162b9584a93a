# SPDX-License-Identifier: Apache-2.0
"""Training steps of one rank: the policy is rank 0's, and its answers come from the group's schedule."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Final

from pccheck_async.engine import Policy, StepEnd, StepReport
from pccheck_async.errors import GroupError
from pccheck_async.group.control import Server
from pccheck_async.group.member import Member
from pccheck_async.group.schedule import Verdict

__all__ = ["Steps"]

_AHEAD_SECONDS: Final = 0.05
"""How far ahead of the training a schedule is published at the least: the time of a message, on a busy machine."""
_MOST_AHEAD: Final = 64
"""The most steps."""


class Steps:
    """The steps of this rank's trainer, on whose thread the methods run.

    Args:
        member: This rank's.
        server: On rank 0: the control plane.
        report_preempted: Reports to the group that this rank was preempted; called once.

    Attributes:
        changed: Held around every use of the member's schedule, and notified after each decision.
        stopped: Whether the last step of all ranks has come.
    """

    def __init__(self, member: Member, server: Server | None, report_preempted: Callable[[], object]) -> None:
        self._member = member
        self._server = server
        self._report_preempted = report_preempted
        self.changed = threading.Condition()
        self._published: int | None = None
        self._preempted = self._due = self.stopped = False

    def begin(self, step: int) -> None:
        """Called when the trainer begins a step."""
        with self.changed:
            self._member.schedule.begin(step)
            if self._server is not None:
                self._server.step = step

    def end(self) -> None:
        """Called when the loop ended: the group then agrees on no last step, which this rank would miss."""
        with self.changed:
            self._member.schedule.end()

    def due(self, policy: Policy, report: StepReport, *, preempted: bool) -> StepEnd:
        """Return what all ranks do after this step. Waits if the schedule does not cover it yet.

        A policy that has ``next_after(step)`` is followed to the step. The saves of another one are made a little
        later: 1 to 2 times 50 ms, or 1 to 2 steps if these are longer. Raises GroupError: the schedule never will.
        """
        save = False
        if self._server is not None:
            self._due = policy.due(report) or self._due
        if preempted and not self._preempted:
            self._preempted = True
            self._report_preempted()
        while True:
            if self._server is not None and (self._published is None or self._published <= report.step):
                self._publish(self._server, policy, report)
            verdict = self._verdict(report.step)
            if verdict is not Verdict.SAVE:
                last = verdict is Verdict.STOP
                self.stopped = self.stopped or last
                return StepEnd(save or last, last)
            save = True

    def _publish(self, server: Server, policy: Policy, report: StepReport) -> None:
        """Schedule the next step."""
        if (next_after := getattr(policy, "next_after", None)) is not None:
            step, save = next_after(report.step - (self._published is None)), True
        else:
            ahead = math.ceil(_AHEAD_SECONDS / report.seconds) if report.seconds > 0 else _MOST_AHEAD
            step, save, self._due = report.step + max(1, min(_MOST_AHEAD, ahead)), self._due, False
        self._published = step
        server.decide(lambda coordinator: coordinator.schedule.publish(step, save=save))

    def _verdict(self, step: int) -> Verdict:
        with self.changed:
            while (verdict := self._member.schedule.at_end(step)) is Verdict.WAIT:
                if (stopped := self._member.stopped) is not None:
                    raise GroupError(stopped.why)
                self.changed.wait()
            return verdict
