"""An upper limit by time: how old the newest durable checkpoint may get while steps end."""

from __future__ import annotations

from pccheck_async.engine import SaveReport, StepReport
from pccheck_async.training.policy.checks import check_seconds

__all__ = ["MOST_SECONDS", "AgeLimit"]

MOST_SECONDS = 600.0

_RETRY = 0.1
"""Part of the limit after which a checkpoint that failed is tried again where the limit was near."""


class AgeLimit:
    """Tells when a checkpoint has to begin so that the newest durable one never gets older than so many seconds.

    A checkpoint that takes more than half of the limit leaves no time to keep it: then one begins as soon as the one
    before it has ended.

    Args:
        most_seconds: The limit; None for none.

    Raises:
        ValueError: it is not positive and finite.
    """

    def __init__(self, most_seconds: float | None) -> None:
        self.most_seconds = None if most_seconds is None else check_seconds("most_seconds", most_seconds)
        self._durable: float | None = None  # when the newest durable one began, or else the first step
        self._newest = 0.0  # the same of those that are not known to have failed
        self._begun: int | None = None  # the step of one of which the outcome is not known

    def apart(self, save_seconds: float) -> float:
        """Return the most seconds from one checkpoint to the next if each takes ``save_seconds`` to become durable."""
        most = float("inf") if self.most_seconds is None else self.most_seconds
        return max(most - save_seconds, save_seconds)

    def reached(self, report: StepReport, save_seconds: float) -> bool:
        """Tell, once after every step, whether to begin one now: another such step would be too long."""
        if self._durable is None:
            self._durable = self._newest = report.now - report.seconds
        if self.most_seconds is None:
            return False
        if self._begun is not None and not report.in_flight:  # it failed, which nobody reports
            self._begun = None
            self._newest = max(self._durable, report.now - (1 - _RETRY) * self.apart(save_seconds))
        return report.now - self._newest + report.seconds > self.apart(save_seconds)

    def begin(self, report: StepReport) -> None:
        """Note that a checkpoint begins after this step."""
        self._newest, self._begun = report.now, report.step

    def saved(self, report: SaveReport) -> None:
        """Note that a checkpoint is durable, whoever asked for it."""
        began = report.now - report.seconds
        self._durable = began if self._durable is None else max(self._durable, began)
        self._newest = max(self._newest, began)
        if self._begun is not None and report.step >= self._begun:
            self._begun = None
