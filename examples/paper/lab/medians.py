"""How measured values are summed up: medians with bootstrap intervals."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

__all__ = ["median_interval", "summary"]

_RESAMPLES = 2000


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the ends of its 95 % bootstrap interval (percentile method, fixed seed)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return statistics.median(values), medians[_RESAMPLES * 25 // 1000], medians[_RESAMPLES * 975 // 1000]


def summary(name: str, values: Sequence[float]) -> str:
    """Return one line: median, its interval, the extremes."""
    median, low, high = median_interval(values)
    return (
        f"{name}: median {median:.3f} [{low:.3f}, {high:.3f}], "
        f"extremes {min(values):.3f} and {max(values):.3f} of {len(values)}"
    )
