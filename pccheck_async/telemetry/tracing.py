# SPDX-License-Identifier: Apache-2.0
"""Timing of operations: sums by stage, and spans for a recorder of a run.

Without a recorder, as in everyday use, this costs the lookup of one variable for each timed operation. The
recorder is found through a context variable, so that a writer need not know for which checkpoint it writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Sink", "Span", "Stage", "StageClock", "Work", "enter_chunk", "work"]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Attributes:
        name: "step" and "stall" on the training thread ("stall": it was kept waiting); of a checkpoint "capture" (copy
            and checksum of a chunk), "write", "flush", and "commit", which holds the write of the manifest (and of the
            data, if it is one chunk), its slot's flush, the record's writes and the record's flush.
        start: When it began, of ``time.perf_counter()``: for copies and writes when they were handed over, so
            that waiting for a free thread is part of them.
        end: When it ended, failed or not.
        nbytes: Bytes that were moved, 0 where none are.
        step: The user's number of the step or checkpoint.
        counter: The engine's number of the checkpoint, None for a step.
        chunk: Number of the chunk, None for work on no chunk (manifest, record, flushes).
    """

    name: str
    start: float
    end: float
    nbytes: int = 0
    step: int | None = None
    counter: int | None = None
    chunk: int | None = None


Sink = Callable[[Span], None]
"""Takes spans as they end, from the training thread and from the engine's. It is quick and does not raise."""


class Work(NamedTuple):
    """The work of a task: fields of its records in the log, and of its spans."""

    store: str | None = None
    step: int | None = None
    counter: int | None = None
    chunk: int | None = None
    recorder: Sink | None = None
    """Gets its spans; None if they are not recorded."""


work: ContextVar[Work] = ContextVar("work", default=Work())  # noqa: B039 - a tuple
"""That of the current task; tasks that it starts inherit it, so that modules below need no arguments for it."""


def enter_chunk(index: int | None) -> None:
    """Set the chunk that the current task works for; None for none."""
    if (now := work.get()).recorder is not None:
        work.set(now._replace(chunk=index))


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the pipeline: operations, their bytes, and their seconds summed over concurrent operations."""

    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class StageClock:
    """Adds up counts, bytes and seconds by stage, and records each operation as a span of the current work."""

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
        if (record := (now := work.get()).recorder) is not None:
            record(Span(name, start, end, nbytes, now.step, now.counter, now.chunk))

    def stages(self) -> dict[str, Stage]:
        """Return the sums so far."""
        return {name: Stage(int(count), int(nbytes), seconds) for name, (count, nbytes, seconds) in self._sums.items()}
