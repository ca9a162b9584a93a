# SPDX-License-Identifier: Apache-2.0
"""Policies of fixed intervals, in steps or seconds, and the policy that a value of ``interval=`` stands for."""

from __future__ import annotations

from datetime import timedelta

from pccheck_async.engine import Decision, Policy, SaveReport, StepReport
from pccheck_async.format import check_count
from pccheck_async.training.policy.formulas import check_seconds
from pccheck_async.training.policy.measured import Adaptive, Retrying

__all__ = ["EverySeconds", "EverySteps", "make_policy"]


class _Given(Retrying):
    def saved(self, report: SaveReport) -> None:
        """Ignore the report: a fixed interval needs no measurements."""


class EverySteps(_Given):
    """Checkpoint after each step ``s`` for which ``s + 1`` is a multiple of ``interval``.

    With steps numbered from 0 the first checkpoint is made after ``interval`` steps. The number alone decides: a run
    that resumes at any step saves the same steps as one that was never interrupted. A checkpoint that was skipped is
    tried again after each next step until one is taken.

    Raises:
        TypeError: ``interval`` is no int (or a bool).
        ValueError: ``interval`` is less than 1.
    """

    def __init__(self, interval: int) -> None:
        self._interval = check_count("the interval", interval, no_int=TypeError)
        every = "every step" if interval == 1 else f"every {interval} steps"
        self._decision = Decision(interval, None, f"{every}, as given")

    def due(self, report: StepReport) -> bool:
        """Return whether to save this step: because of its number, or because the last save was skipped."""
        return self._was_skipped() or (report.step + 1) % self._interval == 0

    def next_after(self, step: int) -> int:
        """Return the next step after ``step`` that is due by its number: a group of ranks needs it in advance."""
        return ((step + 1) // self._interval + 1) * self._interval - 1

    def decision(self) -> Decision:
        """Return the interval that was given."""
        return self._decision


class EverySeconds(_Given):
    """Checkpoint after the first step that ends ``seconds`` or more after the last checkpoint was due.

    Time counts from the start of the first step reported. A late step does not bring the next checkpoint forward.

    Raises:
        ValueError: ``seconds`` is not positive and finite.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = check_seconds("the interval", seconds)
        self._decision = Decision(None, self._seconds, f"every {self._seconds:g} seconds, as given")
        self._last: float | None = None

    def due(self, report: StepReport) -> bool:
        """Return whether ``seconds`` have passed since the last checkpoint was due, or the last save was skipped."""
        if self._last is None:
            self._last = report.now - report.seconds
        due = self._was_skipped() or report.now - self._last >= self._seconds
        if due:
            self._last = report.now
        return due

    def decision(self) -> Decision:
        """Return the interval that was given."""
        return self._decision


def make_policy(interval: int | timedelta | Policy | None, max_in_flight: int = 2) -> Policy:
    """Make the policy that ``interval`` stands for.

    Args:
        interval: Steps, a time, a policy (returned as it is), or None: :class:`Adaptive` with a budget of 3 %.
        max_in_flight: The engine's setting of that name.

    Raises:
        TypeError: ``interval`` is something else (or a bool).
        ValueError: ``interval`` is not positive.
    """
    if interval is None:
        return Adaptive(max_in_flight=max_in_flight)
    if isinstance(interval, timedelta):
        return EverySeconds(interval.total_seconds())
    if type(interval) is int:
        return EverySteps(interval)
    if isinstance(interval, Policy) and not isinstance(interval, type):
        return interval
    advice = ""
    if isinstance(interval, float) and 0 < interval < 1:
        own = f"interval=Adaptive({interval}) (from pccheck_async import Adaptive)"
        advice = f"; for a share of the training time: {own}"
    raise TypeError(
        "interval is a number of steps (int), a timedelta, a policy (due, skipped, saved, decision) or None, "
        f"not {interval!r}{advice}"
    )
