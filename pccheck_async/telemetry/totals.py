# SPDX-License-Identifier: Apache-2.0
"""Sums over the events of one engine, for statistics, metrics, the status file and summaries in the log."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from pccheck_async.telemetry.events import Admitted, Durable, Event, Restored, Waited

__all__ = ["COUNTED", "Distribution", "Spread", "Totals"]

_BOUNDS = tuple(digit * 10.0**power for power in range(-3, 3) for digit in (1, 2.5, 5))
"""Bounds of the histograms in seconds: 1 ms to 500 s, three per decade."""
COUNTED = (
    "admitted",
    "durable",
    "superseded",
    "failed",
    "skipped",
    "abandoned",
    "in_memory",
    "in_replicas",
    "fell_back",
)
"""Counts that are statistics, under the same names: of events, and of restores that fell back."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram of times.

    Attributes:
        count: Number of times.
        seconds: Sum of the times, in seconds.
        up_to: For each bound in seconds, ascending, the number of times up to it; longer ones are in ``count`` only.
    """

    count: int = 0
    seconds: float = 0.0
    up_to: Mapping[float, int] = field(default_factory=lambda: dict.fromkeys(_BOUNDS, 0))

    @property
    def mean(self) -> float | None:
        """Return the mean time in seconds; None if there are no times."""
        return self.seconds / self.count if self.count else None


class Spread:
    """Collects times into a histogram."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Add one time."""
        self._counts[bisect_left(_BOUNDS, seconds)] += 1
        self.seconds += seconds

    def distribution(self) -> Distribution:
        """Return the histogram of the times so far."""
        *up_to, count = accumulate(self._counts)
        return Distribution(count, self.seconds, dict(zip(_BOUNDS, up_to, strict=True)))


class Totals:
    """Sums over events, changed by :meth:`add` only. May be used from any thread, and from signal handlers.

    Attributes:
        counts: Number of events, by name.
        stall_seconds: Sum of the training thread's waits.
        durable_bytes: Bytes of all durable checkpoints.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.durable_bytes = 0
        self.stall_seconds = self._last_stall = self._state_seconds = 0.0
        self._saves, self._captures = Spread(), Spread()
        self._stalls = {"checkpoint": Spread(), "optimizer": Spread()}

    def add(self, event: Event) -> None:
        """Add an event to the sums."""
        with self._lock:
            self.counts[event.name] += 1
            if type(event) is Admitted:  # quicker than isinstance, for classes with a metaclass
                self._state_seconds += event.state_seconds
            elif type(event) is Waited:
                seconds, where = event.seconds, event.where
                self.stall_seconds += seconds
                self._stalls[where].add(seconds)
                if where == "checkpoint":
                    self._last_stall = seconds
            elif type(event) is Durable:
                self.durable_bytes += event.nbytes
                self._saves.add(event.seconds)
                self._captures.add(event.capture_seconds)
            elif type(event) is Restored:
                self.counts["fell_back"] += event.fell_back

    def statistics(self) -> dict[str, Any]:
        """Return the sums so far, by the names of the fields in :class:`pccheck_async.EngineStatistics`."""
        with self._lock:
            return {name: self.counts[name] for name in COUNTED} | {
                "durable_bytes": self.durable_bytes,
                "stall_seconds": self.stall_seconds,
                "guard_seconds": self._stalls["optimizer"].seconds,
                "last_stall_seconds": self._last_stall,
                "state_seconds": self._state_seconds,
                "save_seconds": self._saves.distribution(),
                "capture_seconds": self._captures.distribution(),
                "stalls": {where: spread.distribution() for where, spread in self._stalls.items()},
            }
