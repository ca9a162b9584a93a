"""How often each stage of a save or a restore ran, over how many bytes, and for how long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pccheck_async.telemetry.tracing import tell, traced

__all__ = ["Stage", "StageClock"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the pipeline: operations, their bytes, and their seconds summed over concurrent operations."""

    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class StageClock:
    """Adds up counts, bytes and seconds by stage, and tells whoever records the run of each operation."""

    def __init__(self, *names: str) -> None:
        self._sums: dict[str, list[float]] = {name: [0, 0, 0.0] for name in names}

    @contextmanager
    def timed(self, name: str, nbytes: int = 0) -> Iterator[None]:
        """Time a block as one operation of a stage, failed ones included."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.note(name, start, time.perf_counter(), nbytes)

    def note(self, name: str, start: float, end: float, nbytes: int = 0) -> None:
        """Count an operation of a stage that ran from ``start`` to ``end`` (of ``time.perf_counter()``)."""
        sums = self._sums[name]
        sums[0] += 1
        sums[1] += nbytes
        sums[2] += end - start
        if (now := traced.get()) is not None:
            tell(now, name, start, end, nbytes)

    def stages(self) -> dict[str, Stage]:
        """Return the sums so far."""
        return {name: Stage(int(count), int(nbytes), seconds) for name, (count, nbytes, seconds) in self._sums.items()}
