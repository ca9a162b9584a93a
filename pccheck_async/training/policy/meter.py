# SPDX-License-Identifier: Apache-2.0
"""The cost of a checkpoint to training, measured against clean steps; and the level of noisy values that may change."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from pccheck_async.engine import StepReport

__all__ = ["Level", "OverheadMeter"]

_CLEAN_ENOUGH = 8
"""Clean steps without which the reference goes further back than one period."""
_WINDOW = 31
"""Periods that count."""
_STRAY = 4.0
"""A clean step so many times as long as all others in the comparison is ignored."""
_BEYOND_NOISE = 2.5
_SOME = 3
_MOVED = 3.0
_LEAST_MOVE = 0.02
_MEDIAN = 1.25
"""Standard error of a median, in those of a mean."""
_NORMAL = 1.48
"""Standard deviation, in medians of absolute deviations."""
_DEVIATIONS = 128
_SAMPLES = 16


class Level:
    """A window of measurements: their median, from which a single stray one takes nothing.

    Three in a row on one side of the older ones, by more than the tolerance, or two by more than twice that, are a
    change: the older ones are forgotten. The first measurement is forgotten with the second, if ``odd_first``: the
    first checkpoint pays for everything that is made only once (slots, staging memory, a plan).

    ``window`` measurements are kept; ``tolerance`` is a relative difference that is no change.
    """

    def __init__(self, window: int = 9, tolerance: float = 0.15, *, odd_first: bool = False) -> None:
        self._window = window
        self._tolerance = tolerance
        self._odd_first = odd_first
        self.values: list[float] = []  # those in the window, oldest first
        self._confirmed = 0  # those that were a change together: none of them is stray

    def add(self, value: float, tolerance: float = 0.0) -> bool:
        """Take a measurement; ``tolerance`` is its own in absolute terms. Return whether it is a change."""
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
        """The middle of the window, of two the smaller; 0 where nothing was measured."""
        count = len(self.values)
        return (self._ranked((count - 1) // 2) + self._ranked(count // 2)) / 2

    @property
    def upper(self) -> float:
        """An upper bound of three of four measurements, without one that may be stray; 0 of none."""
        return self._ranked((3 * len(self.values) - 1) // 4)

    def _ranked(self, rank: int) -> float:
        count = len(self.values)
        most = count - 1 if count <= self._confirmed else count - 2
        return sorted(self.values)[max(0, min(rank, most))] if self.values else 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation of one measurement, from the median of the absolute deviations; 0 of less than three."""
        if len(self.values) < 3:
            return 0.0
        middle = self.median
        return _NORMAL * statistics.median(abs(value - middle) for value in self.values)


class Cost(NamedTuple):
    """Seconds of training that one checkpoint costs, stall and interference: median of some periods, standard error."""

    seconds: float
    error: float


@dataclass(slots=True)
class _Steps:
    """Steps of one kind in a period."""

    count: int = 0
    seconds: float = 0.0
    longest: tuple[float, ...] = ()  # two

    def __add__(self, other: _Steps) -> _Steps:
        longest = tuple(sorted(self.longest + other.longest)[-2:])
        return _Steps(self.count + other.count, self.seconds + other.seconds, longest)

    @property
    def mean(self) -> float:
        """Their mean; one that alone is far longer than all others (data was late) counts as the next longest."""
        if not self.count:
            return 0.0
        second, longest = self.longest[0], self.longest[-1]
        return (self.seconds - (longest - second if longest > _STRAY * second else 0.0)) / self.count


class OverheadMeter:
    """Splits training into periods, from one checkpoint to the next, and prices each.

    A period costs the stalls in it, and the excess time of its busy steps (a checkpoint in flight) over clean ones. The
    clean ones are the nearest: the tail of the period itself and that of the one before, so that a machine that gets
    slower or faster as a whole is not taken for interference. Within a period means are compared with means: a median
    would pass over the few steps that a checkpoint hits hardest, and find interference where every tenth step is slow
    of its own accord. The median is taken over periods, whose stray ones it passes over.
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
        """Begin the period anew."""
        self._stall = 0.0
        self._busy, self._idle = _Steps(), _Steps()
        self._samples: deque[float] = deque(maxlen=_SAMPLES)

    def step(self, report: StepReport) -> None:
        """Take a step."""
        self._stall += report.stall
        step = _Steps(1, report.seconds, (report.seconds,))
        if report.in_flight:
            self._busy += step
        else:
            self._idle += step
            self._samples.append(report.seconds)

    def close(self, *, first: bool = False, counted: bool = True) -> None:
        """End the period, since the next checkpoint begins.

        The ``first`` had no checkpoint: only clean steps, for comparison. If checkpoints waited for each other, the
        cost of the period is not that of a checkpoint, and is not ``counted``.
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
        """Forget the costs of checkpoints, except for the last ones."""
        del self._costs.values[:-2]

    @property
    def moved(self) -> bool:
        """Whether the clean steps of this period take another time than those before it."""
        idle, before = self._idle, self._reference()
        if idle.count < _SOME or before.count < _SOME:
            return False
        limit = _MOVED * self._noise() * math.sqrt(1 / idle.count + 1 / before.count)
        return abs(idle.mean - before.mean) > max(limit, _LEAST_MOVE * before.mean)

    @property
    def clean(self) -> int:
        """Clean steps in this period."""
        return self._idle.count

    def clean_in(self, periods: int) -> int:
        """Return how many clean steps the last periods had."""
        return sum(tail.count for tail in list(self._tails)[-periods:])

    @property
    def clean_age(self) -> int:
        """Whole periods since there was a clean step."""
        return next((age for age, tail in enumerate(reversed(self._tails)) if tail.count), len(self._tails))

    @property
    def step_seconds(self) -> float:
        """Seconds that a step takes while no checkpoint is in flight (median); 0 before the first such step."""
        return self._clean.median

    @property
    def overhead(self) -> float | None:
        """Median share of the training time lost to stalls and interference; None before the first period's end.

        Periods in which checkpoints waited for each other count, too, unlike in :meth:`cost`.
        """
        return self._overheads.median if self._overheads.values else None

    @property
    def periods(self) -> int:
        """Periods that the cost is the median of."""
        return len(self._costs.values)

    def cost(self) -> Cost:
        """Return the cost of a checkpoint, and its error."""
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
        """Keep the clean steps of the period; return whether steps take another time than in the periods before."""
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
