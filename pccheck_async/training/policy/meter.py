# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of a checkpoint to training by comparing busy with clean steps; and a robust running median.

A step is busy if a checkpoint was in flight in it, and else clean.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from pccheck_async.engine import StepReport

__all__ = ["Level", "OverheadMeter"]

_CLEAN_ENOUGH = 8
"""Clean steps in the last two periods below which clean steps of older periods are used, too."""
_WINDOW = 31
"""Newest periods that the cost is the median of."""
_STRAY = 4.0
"""A step more than this factor longer than the next longest of its kind is counted as the next longest."""
_BEYOND_NOISE = 2.5
_SOME = 3
_MOVED = 3.0
_LEAST_MOVE = 0.02
_MEDIAN = 1.25
"""Standard error of a median, divided by the standard error of a mean."""
_NORMAL = 1.48
"""Standard deviation of a normal distribution, divided by the median of absolute deviations."""
_DEVIATIONS = 128
_SAMPLES = 16


class Level:
    """A window of measurements with a median that a single outlier does not move.

    If the last three measurements are all above, or all below, the median of the older ones by more than the tolerance,
    or the last two by more than twice the tolerance, that is a change: the older ones are forgotten.

    Args:
        window: Measurements that are kept.
        tolerance: Relative difference that is no change.
        odd_first: Whether the first measurement is dropped when the second comes: the first checkpoint pays for
            everything that is made only once (slots, staging memory, a plan).
    """

    def __init__(self, window: int = 9, tolerance: float = 0.15, *, odd_first: bool = False) -> None:
        self._window = window
        self._tolerance = tolerance
        self._odd_first = odd_first
        self.values: list[float] = []  # those in the window, oldest first
        self._confirmed = 0  # those that were a change together: none of them is stray

    def add(self, value: float, tolerance: float = 0.0) -> bool:
        """Add a measurement; return whether it completes a change by more than an absolute ``tolerance``, too."""
        if self._odd_first and len(self.values) == 1:
            self.values.clear()
            self._odd_first = False
        self.values = [*self.values, value][-self._window :]
        changed = self._changed(3, 1.0, tolerance) or self._changed(2, 2.0, tolerance)
        if changed:
            self.values = self.values[-changed:]
            self._confirmed = changed
        return bool(changed)

    def _changed(self, count: int, times: float, tolerance: float) -> int:
        older, recent = self.values[:-count], self.values[-count:]
        if not older:
            return 0
        middle = statistics.median(older)
        limit = times * max(abs(middle) * self._tolerance, tolerance)
        return count if min(recent) > middle + limit or max(recent) < middle - limit else 0

    @property
    def median(self) -> float:
        """Median of the window, but of two values the smaller: the other may be an outlier. 0 without measurements."""
        count = len(self.values)
        return (self._ranked((count - 1) // 2) + self._ranked(count // 2)) / 2

    @property
    def upper(self) -> float:
        """Third quartile, but at most the second largest value: one may be an outlier. 0 without measurements."""
        return self._ranked((3 * len(self.values) - 1) // 4)

    def _ranked(self, rank: int) -> float:
        count = len(self.values)
        most = count - 1 if count <= self._confirmed else count - 2
        return sorted(self.values)[max(0, min(rank, most))] if self.values else 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation, from the median of absolute deviations; 0 with fewer than three measurements."""
        if len(self.values) < 3:
            return 0.0
        middle = self.median
        return _NORMAL * statistics.median(abs(value - middle) for value in self.values)


class Cost(NamedTuple):
    """Seconds that one checkpoint costs training by stall and interference: median of the periods, standard error."""

    seconds: float
    error: float


@dataclass(slots=True)
class _Steps:
    """Number, sum and longest times of the steps of one kind (busy or clean) in a period."""

    count: int = 0
    seconds: float = 0.0
    longest: tuple[float, ...] = ()  # two

    def __add__(self, other: _Steps) -> _Steps:
        longest = tuple(sorted(self.longest + other.longest)[-2:])
        return _Steps(self.count + other.count, self.seconds + other.seconds, longest)

    @property
    def mean(self) -> float:
        """Mean seconds; a step that is far longer than all others (data was late) is counted as the next longest."""
        if not self.count:
            return 0.0
        second, longest = self.longest[0], self.longest[-1]
        return (self.seconds - (longest - second if longest > _STRAY * second else 0.0)) / self.count


class OverheadMeter:
    """Splits training into periods, from one checkpoint to the next, and computes the cost of each.

    The cost is the stalls in the period, plus the seconds by which its busy steps (a checkpoint in flight) exceed clean
    ones. They are compared with the nearest clean steps, those at the end of the same period and of the one before, so
    that a machine that gets slower or faster as a whole is not taken for interference. Within a period means are
    compared: a median would ignore the few steps that a checkpoint slows down most, and find interference where every
    tenth step is slow anyway. The cost of a checkpoint is the median over periods, which ignores outliers among them.
    """

    def __init__(self) -> None:
        self._tails: deque[_Steps] = deque(maxlen=_WINDOW)  # clean steps of each period
        self._deviations: deque[float] = deque(maxlen=_DEVIATIONS)
        self._costs = Level(_WINDOW, 0.25, odd_first=True)
        self._lengths: deque[int] = deque(maxlen=_WINDOW)  # busy steps of the periods counted
        self._unsure = 0  # costs counted last, of periods without clean steps of their own
        self._clean = Level()
        self._overheads = Level()
        self.restart()

    def restart(self) -> None:
        """Begin a new period: drop the steps since the last one ended."""
        self._stall = 0.0
        self._busy, self._idle = _Steps(), _Steps()
        self._samples: deque[float] = deque(maxlen=_SAMPLES)

    def step(self, report: StepReport) -> None:
        """Add a step to the period."""
        self._stall += report.stall
        step = _Steps(1, report.seconds, (report.seconds,))
        if report.in_flight:
            self._busy += step
        else:
            self._idle += step
            self._samples.append(report.seconds)

    def close(self, *, first: bool = False, counted: bool = True) -> None:
        """End the period, because the next checkpoint begins, and begin a new one.

        Args:
            first: Whether the period had no checkpoint: its clean steps are kept for comparison, and no cost is added.
            counted: False if checkpoints waited for each other: the period's cost is then not that of a checkpoint, and
                is added to the overhead alone.
        """
        busy = self._busy.count
        steps = busy + self._idle.count
        if steps == 0:
            return
        if not self._idle.count and not self._clean.values:  # there was never a clean step: better than nothing
            self._idle = self._busy
        moved = self._take_tail()
        if not first:
            reference = self._reference()
            usual = reference.mean or self._clean.median
            cost = self._stall + self._busy.seconds - busy * usual
            if usual > 0:
                self._overheads.add(cost / (steps * usual))
            if counted and not moved:
                error = self._noise() * math.sqrt(busy + busy**2 / max(1, reference.count))
                self._lengths.append(busy)
                self._unsure += self._idle.count < _SOME
                self._costs.add(cost, _BEYOND_NOISE * error)
        self.restart()

    def forget(self) -> None:
        """Forget the costs of all periods but the last two."""
        del self._costs.values[:-2]

    @property
    def moved(self) -> bool:
        """Whether clean steps of this period are slower or faster than those before, by more than noise."""
        idle, before = self._idle, self._reference()
        if idle.count < _SOME or before.count < _SOME:
            return False
        limit = _MOVED * self._noise() * math.sqrt(1 / idle.count + 1 / before.count)
        return abs(idle.mean - before.mean) > max(limit, _LEAST_MOVE * before.mean)

    @property
    def clean(self) -> int:
        """Number of clean steps in this period so far."""
        return self._idle.count

    def clean_in(self, periods: int) -> int:
        """Return the number of clean steps in the last ``periods`` ended periods."""
        return sum(tail.count for tail in list(self._tails)[-periods:])

    @property
    def clean_age(self) -> int:
        """Number of periods that have ended since the last one with a clean step."""
        return next((age for age, tail in enumerate(reversed(self._tails)) if tail.count), len(self._tails))

    @property
    def step_seconds(self) -> float:
        """Seconds of a clean step (median); 0 before the first period with one has ended."""
        return self._clean.median

    @property
    def overhead(self) -> float | None:
        """Median share of the training time lost to stalls and interference; None before the first period's end.

        Unlike in :meth:`cost`, periods in which checkpoints waited for each other are included.
        """
        return self._overheads.median if self._overheads.values else None

    @property
    def periods(self) -> int:
        """Number of periods that the cost is the median of."""
        return len(self._costs.values)

    def cost(self) -> Cost:
        """Return the median cost of a checkpoint and its standard error, both 0 before the first period."""
        count = len(self._costs.values)
        if not count:
            return Cost(0.0, 0.0)
        busy = statistics.median(list(self._lengths)[-count:])
        clean = sum(tail.count for tail in list(self._tails)[-count - 1 :])
        noise = self._noise()
        # The scatter of few periods is no estimate: the noise of the steps is a lower limit. An error of the clean
        # steps is the same in all periods that are compared with the same ones.
        scatter = max(noise * math.sqrt(busy), self._costs.deviation) * (_MEDIAN if count > 2 else 1.0)
        error = math.hypot(scatter / math.sqrt(count), noise * busy / math.sqrt(max(1, clean)))
        return Cost(self._costs.median, error)

    def _take_tail(self) -> bool:
        """Keep the period's clean steps; if they have become slower or faster, forget older ones, and return True."""
        moved = self.moved
        if moved:
            self._tails.clear()
            del self._costs.values[max(0, len(self._costs.values) - self._unsure) :]  # since when is unknown
        if self._idle.count >= _SOME:
            self._unsure = 0
        self._tails.append(self._idle)
        if self._idle.count:
            # The mean of a short tail is noisy: the tails before it are averaged with it.
            self._clean.add(self._reference().mean)
        if len(self._samples) > 2:
            middle = statistics.median(self._samples)
            scale = math.sqrt(len(self._samples) / (len(self._samples) - 1))
            self._deviations.extend(scale * abs(sample - middle) for sample in self._samples)
        return moved

    def _reference(self) -> _Steps:
        found = _Steps()
        for age, tail in enumerate(reversed(self._tails)):
            if age > 1 and found.count >= _CLEAN_ENOUGH:
                break
            found += tail
        return found

    def _noise(self) -> float:
        return _NORMAL * statistics.median(self._deviations) if self._deviations else 0.0
