"""Time that training was kept waiting by one engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from pccheck_async.engine.pending import PendingCheckpoint
from pccheck_async.engine.statistics import Distribution, Spread
from pccheck_async.telemetry.events import Waited
from pccheck_async.telemetry.reporter import Reporter
from pccheck_async.telemetry.tracing import Sink, Span

__all__ = ["Stalls"]


class Stalls:
    """Adds stalls up, and tells of each.

    Args:
        reporter: Told of each.
        sink: Returns what records runs now, None where nothing does.

    Attributes:
        seconds: All of them.
        guard_seconds: Those of attached optimizers' steps.
        state_seconds: What of the calls of ``checkpoint()`` went into ``state_dict()`` and laying out the state.
        last_call: The last call of ``checkpoint()``.
    """

    def __init__(self, reporter: Reporter, sink: Callable[[], Sink | None]) -> None:
        self._reporter = reporter
        self._sink = sink
        self._spreads = {"checkpoint": Spread(), "optimizer": Spread()}
        self.seconds = self.guard_seconds = self.state_seconds = self.last_call = 0.0

    def note_call(self, pending: PendingCheckpoint, start: float) -> None:
        """Count the time since ``start`` (of ``time.perf_counter()``): a caller of ``checkpoint()`` waited."""
        self.last_call = time.perf_counter() - start
        self._add(pending, self.last_call, "checkpoint")

    def note_step(self, pending: PendingCheckpoint, seconds: float) -> None:
        """Count what the step of an attached optimizer waited for a capture."""
        self.guard_seconds += seconds
        self._add(pending, seconds, "optimizer")

    def distributions(self) -> dict[str, Distribution]:
        """Return how long they were, by where."""
        return {where: spread.distribution() for where, spread in self._spreads.items()}

    def _add(self, pending: PendingCheckpoint, seconds: float, where: Literal["checkpoint", "optimizer"]) -> None:
        pending.stall += seconds
        self.seconds += seconds
        self._spreads[where].add(seconds)
        self._reporter.tell(Waited, step=pending.step, counter=pending.counter, seconds=seconds, where=where)
        if (sink := self._sink()) is not None:
            end = time.perf_counter()
            sink(Span(name="stall", start=end - seconds, end=end, step=pending.step, counter=pending.counter))
