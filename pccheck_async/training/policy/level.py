"""The present value of something that is measured again and again, is noisy, and may change for good."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["Level"]


class Level:
    """A window of measurements: their median, from which a single stray one takes nothing.

    Three in a row on one side of the older ones, by more than the tolerance, or two by more than twice that, are a
    change: the older ones are forgotten.
    The first measurement is forgotten with the second, where ``odd_first``: what is made only once (slots, staging
    memory, a plan) is paid for by the first checkpoint.

    Args:
        window: Measurements kept.
        tolerance: Relative difference that is no change.
        odd_first: The first is not like the others.
    """

    def __init__(self, window: int = 9, tolerance: float = 0.15, *, odd_first: bool = False) -> None:
        self._window = window
        self._tolerance = tolerance
        self._odd_first = odd_first
        self._values: list[float] = []
        self._confirmed = 0  # those that were a change together: none of them is stray

    def add(self, value: float, tolerance: float = 0.0) -> bool:
        """Take a measurement; ``tolerance`` is its own in absolute terms. Return whether the level changed for good."""
        if self._odd_first and len(self._values) == 1:
            self._values.clear()
            self._odd_first = False
        self._values = [*self._values, value][-self._window :]
        changed = self._changed(3, 1.0, tolerance) or self._changed(2, 2.0, tolerance)
        if changed:
            self._values = self._values[-changed:]
            self._confirmed = changed
        return bool(changed)

    def _changed(self, count: int, times: float, tolerance: float) -> int:
        older, recent = self._values[:-count], self._values[-count:]
        if not older:
            return 0
        middle = statistics.median(older)
        limit = times * max(abs(middle) * self._tolerance, tolerance)
        return count if min(recent) > middle + limit or max(recent) < middle - limit else 0

    def forget(self, but: int) -> None:
        """Forget all but the last ``but`` measurements."""
        self._values = self._values[-but:]

    def drop(self, count: int) -> None:
        """Forget the last ``count`` measurements."""
        self._values = self._values[: max(0, len(self._values) - count)]

    @property
    def values(self) -> Sequence[float]:
        """The measurements in the window, oldest first."""
        return self._values

    @property
    def sure(self) -> bool:
        """Whether there is more than one measurement."""
        return len(self._values) > 1

    @property
    def median(self) -> float:
        """The middle of the window, of two the smaller; 0 where nothing was measured."""
        count = len(self._values)
        return (self._ranked((count - 1) // 2) + self._ranked(count // 2)) / 2

    @property
    def upper(self) -> float:
        """What three of four measurements do not exceed, and one is left out that may be stray; 0 of none."""
        return self._ranked((3 * len(self._values) - 1) // 4)

    def _ranked(self, rank: int) -> float:
        count = len(self._values)
        most = count - 1 if count <= self._confirmed else count - 2
        return sorted(self._values)[max(0, min(rank, most))] if self._values else 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation of one measurement, from the median of the absolute deviations; 0 of less than three."""
        if len(self._values) < 3:
            return 0.0
        middle = self.median
        return 1.48 * statistics.median(abs(value - middle) for value in self._values)
