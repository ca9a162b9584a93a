"""Fixed intervals: every so many steps, or every so many seconds."""

from __future__ import annotations

from pccheck_async.engine import Decision, SaveReport, StepReport
from pccheck_async.training.policy.checks import check_count, check_seconds

__all__ = ["EverySeconds", "EverySteps"]


class EverySteps:
    """Checkpoint after step ``s`` wherever ``s + 1`` is a multiple of ``interval``.

    With steps numbered from 0 the first checkpoint is made after ``interval`` steps. The number alone decides: a run
    that resumes at any step saves the same steps as one that was never interrupted. A checkpoint that was skipped is
    made up for after the next step that finds a place.

    Raises:
        TypeError: ``interval`` is no int (bool is not one).
        ValueError: it is less than 1.
    """

    def __init__(self, interval: int) -> None:
        self._interval = check_count("the interval", interval)
        self._again = False

    def due(self, report: StepReport) -> bool:
        """Go by the step's number."""
        again, self._again = self._again, False
        return again or (report.step + 1) % self._interval == 0

    def skipped(self, report: StepReport) -> None:
        """Try again after the next step."""
        self._again = True

    def saved(self, report: SaveReport) -> None:
        """Learn nothing."""

    def decision(self) -> Decision:
        """Return the interval that was given."""
        every = "every step" if self._interval == 1 else f"every {self._interval} steps"
        return Decision(self._interval, None, f"{every}, as given")


class EverySeconds:
    """Checkpoint after the first step that ends ``seconds`` or more after the last checkpoint was due.

    Time counts from the start of the first step reported. A late step does not bring the next checkpoint forward.

    Raises:
        ValueError: ``seconds`` is not positive and finite.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = check_seconds("the interval", seconds)
        self._last: float | None = None
        self._again = False

    def due(self, report: StepReport) -> bool:
        """Go by the time of the report."""
        if self._last is None:
            self._last = report.now - report.seconds
        again, self._again = self._again, False
        if not again and report.now - self._last < self._seconds:
            return False
        self._last = report.now
        return True

    def skipped(self, report: StepReport) -> None:
        """Try again after the next step."""
        self._again = True

    def saved(self, report: SaveReport) -> None:
        """Learn nothing."""

    def decision(self) -> Decision:
        """Return the interval that was given."""
        return Decision(None, self._seconds, f"every {self._seconds:g} seconds, as given")
