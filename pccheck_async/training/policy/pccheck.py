"""PCcheck's interval: as often as N checkpoints in flight can follow."""

from __future__ import annotations

from collections import deque
from statistics import median

from pccheck_async.engine import Decision, SaveReport, StepReport
from pccheck_async.training.policy.formulas import check_count, check_overhead, interval_floor, sustained_interval
from pccheck_async.training.policy.measured import LEAP, MOST_SECONDS, AgeLimit
from pccheck_async.training.policy.meter import Level

__all__ = ["PCcheckInterval"]

_WARM_UP = 2
_PROFILE = 5
_BURSTS = 2
"""Those that are compared each time: one alone may meet a hiccup. The very first pays for slots and staging memory."""

_WINDOW = 32
_REFERENCE = 3
_DRIFT = 0.2
_TINY = 1e-9


class PCcheckInterval:
    """Checkpoint every f* = ceil(Tw(N) / (N q t)) steps, never under f_min = ceil(m / (B q t)) (PCcheck, section 3.4).

    q = 1 + overhead is the tolerated slowdown. The first steps give t. Then N checkpoints in a row (three times, of
    which the quicker of the last two counts) give Tw(N), the time of one with N in flight, and B, the bandwidth of all
    together. Where two checkpoints and more take longer than N in flight can follow, f* grows. Where they take
    a fifth less than they used to, N in a row are measured again; a single one cannot tell what N take.

    Args:
        overhead: Tolerated slowdown (q - 1).
        max_in_flight: N, as the engine has it.
        most_seconds: Most age of the newest durable checkpoint, for which f* is given up; None for no limit.
    """

    def __init__(
        self, overhead: float = 0.03, *, max_in_flight: int = 2, most_seconds: float | None = MOST_SECONDS
    ) -> None:
        self._age = AgeLimit(most_seconds)
        self._slowdown = 1 + check_overhead(overhead)
        self._places = check_count("max_in_flight", max_in_flight)
        self._clean: deque[float] = deque(maxlen=_WINDOW)
        self._busy: deque[float] = deque(maxlen=_WINDOW)
        self._steps = 0
        self._since = 0
        self._profile = _PROFILE  # steps before the next burst
        self._again = False
        self._left: int | None = None  # checkpoints of the burst to begin; None outside of one
        self._burst: list[SaveReport] = []
        self._burst_step = 0
        self._bursts: list[tuple[float, float]] | None = None  # seconds and bandwidth of each; None before the first
        self._seconds = 0.0  # Tw(N)
        self._bandwidth = 0.0
        self._nbytes = 0
        self._saves = Level(window=5)
        self._reference: float | None = None
        self._settled_at = 0
        self._interval: int | None = None
        self._reason = f"measuring the first {_WARM_UP + _PROFILE} steps without a checkpoint"

    def due(self, report: StepReport) -> bool:
        """Go by the steps since the last checkpoint."""
        overdue = self._age.reached(report, self._saves.upper)
        due = self._is_due(report) or overdue
        if due:
            self._since = 0
            self._age.begin(report)
        return due

    def _is_due(self, report: StepReport) -> bool:
        self._steps += 1
        self._since += 1
        if self._steps > _WARM_UP:
            (self._busy if report.in_flight else self._clean).append(report.seconds)
        if self._again:
            self._again = False
            return True
        if self._left is None:
            if self._interval is None:
                return self._since >= self._profile + _WARM_UP * (self._bursts is None) and self._begin_burst(report)
            if self._since < self._interval:
                return False
            known = self._reference is not None and len(self._saves.values) > 1
            if (known and self._saves.median < (self._reference or 0.0) * (1 - _DRIFT)) or self._bursts:
                return self._begin_burst(report)
            self._follow(report)
            return self._since >= self._interval
        if self._left > 0:
            self._left -= 1
            return True
        if len(self._burst) >= self._places or report.in_flight == 0:
            self._end_burst(report)
        return False

    def skipped(self, report: StepReport) -> None:
        """Try again after the next step."""
        self._again = True

    def saved(self, report: SaveReport) -> None:
        """Learn what a checkpoint takes."""
        self._age.saved(report)
        self._nbytes = report.nbytes
        if self._left is not None:
            if report.step >= self._burst_step:
                self._burst.append(report)
            return
        if report.step < self._settled_at:
            return
        self._saves.add(report.seconds)
        if self._reference is None and len(self._saves.values) >= _REFERENCE:
            self._reference = self._saves.median

    def decision(self) -> Decision:
        """Return the present interval, and why."""
        return Decision(
            self._interval,
            None if self._interval is None else self._interval * self._step_seconds,
            self._reason,
            self._age.most_seconds,
        )

    @property
    def floor(self) -> int | None:
        """f_min, the interval that no scheme can go below on this storage; None before it was measured."""
        if not self._bandwidth:
            return None
        return interval_floor(self._nbytes, self._bandwidth, self._step_seconds, self._slowdown)

    @property
    def _step_seconds(self) -> float:
        return max(_TINY, median(self._clean or self._busy or [0.0]))

    def _begin_burst(self, report: StepReport) -> bool:
        self._left = self._places - 1
        self._burst = []
        self._burst_step = report.step
        return True

    def _end_burst(self, report: StepReport) -> None:
        self._left = None
        if not self._burst:  # all failed: try again, ever later
            self._profile *= 2
            return
        if self._bursts is None:
            self._bursts = []
            return
        span = max(save.now for save in self._burst) - min(save.now - save.seconds for save in self._burst)
        bandwidth = sum(save.nbytes for save in self._burst) / max(_TINY, span)
        self._bursts.append((median(save.seconds for save in self._burst), bandwidth))
        if len(self._bursts) < _BURSTS:
            return
        self._seconds = min(seconds for seconds, _ in self._bursts)
        self._bandwidth = max(bandwidth for _, bandwidth in self._bursts)
        self._bursts = []
        self._settle(report, "measured with as many in flight")

    def _follow(self, report: StepReport) -> None:
        """Keep up with checkpoints that take longer, and with steps that take another time."""
        now = self._saves.median
        if len(self._saves.values) > 1 and self._f_star(now) > (self._interval or 0):
            self._seconds = min(now, max(self._seconds, self._step_seconds) * LEAP)
            # They wait for each other: this is all that the storage does now.
            self._bandwidth = min(self._bandwidth, self._nbytes * self._places / self._seconds)
            self._settle(report, "they take longer now", now)  # if they stop waiting for each other, find out
            return
        wanted = max(self._f_star(self._seconds), self.floor or 1)
        if abs(wanted - (self._interval or 0)) > _DRIFT * (self._interval or 0):
            self._settle(report, "steps take another time now", self._reference)

    def _f_star(self, seconds: float) -> int:
        return sustained_interval(seconds, self._places, self._step_seconds, self._slowdown)

    def _settle(self, report: StepReport, why: str, reference: float | None = None) -> None:
        f_star, floor = self._f_star(self._seconds), self.floor or 1
        self._interval = max(f_star, floor)
        self._reason = (
            f"every {self._interval} steps: f* is {f_star} (a checkpoint takes {self._seconds:.3g} s with "
            f"{self._places} in flight, a step {self._step_seconds:.3g} s), "
            f"f_min {floor} at {self._bandwidth / 1e6:.4g} MB/s; {why}"
        )
        self._saves = Level(window=5)
        self._reference = reference
        self._settled_at = report.step
