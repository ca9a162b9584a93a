# SPDX-License-Identifier: Apache-2.0
"""Timing of operations: sums by stage, and spans for a recorder.

Without a recorder, as in everyday use, a timed operation costs the lookup of one variable more. The recorder is found
through a context variable, so that a writer need not know for which checkpoint it writes.
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
    """An operation and the time that it took.

    Attributes:
        name: "step" and "stall" on the training thread ("stall": it had to wait); for a checkpoint "capture" (copy and
            checksum of a chunk), "write", "flush", and "commit", which covers the write of the manifest (and of the
            data, if it is one chunk), the flush of the slot, and the writes and the flush of the record.
        start: Beginning, by ``time.perf_counter()``; for copies and writes the time of submission, so that waiting for
            a free thread is included.
        end: End, by ``time.perf_counter()``, whether the operation failed or not.
        nbytes: Bytes that were moved; 0 if none are.
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
"""Function that is called with each span when it ends, on any thread. It must be quick and not raise."""


class Work(NamedTuple):
    """The work that a task does: values for the fields of the task's log records and spans."""

    store: str | None = None
    step: int | None = None
    counter: int | None = None
    chunk: int | None = None
    recorder: Sink | None = None
    """Function that gets the spans; None if they are not recorded."""

    def record(self, name: str, start: float, end: float, nbytes: int = 0) -> None:
        """Record a span of this work, which has a recorder."""
        assert self.recorder is not None
        self.recorder(Span(name, start, end, nbytes, self.step, self.counter, self.chunk))


work: ContextVar[Work] = ContextVar("work", default=Work())  # noqa: B039 - a tuple
"""The work of the current task. Tasks that it starts inherit the value, so that lower modules need no arguments."""


def enter_chunk(index: int | None) -> None:
    """Set the chunk that the current task works on, None for no chunk; do nothing if spans are not recorded."""
    if (now := work.get()).recorder is not None:
        work.set(now._replace(chunk=index))


@dataclass(frozen=True, slots=True)
class Stage:
    """Sums of one stage of the pipeline: number of operations, bytes, and seconds, added over concurrent operations."""

    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class _Sums:
    """The sums of a stage so far: attributes take half as long to change as the items of a list."""

    __slots__ = ("count", "nbytes", "seconds")

    def __init__(self) -> None:
        self.count = self.nbytes = 0
        self.seconds = 0.0


class StageClock:
    """Adds up counts, bytes and seconds by stage, and records each operation as a span of the current work."""

    def __init__(self, *names: str) -> None:
        self._sums = {name: _Sums() for name in names}

    @contextmanager
    def timed(self, name: str, nbytes: int = 0) -> Iterator[None]:
        """Measure the block as one operation of a stage, whether it raises or not."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.note(name, start, time.perf_counter(), nbytes)

    def note(self, name: str, start: float, end: float, nbytes: int = 0) -> None:
        """Add an operation from ``start`` to ``end`` (by ``time.perf_counter()``) to a stage, and record its span."""
        self.add(name, 1, nbytes, end - start)
        if (now := work.get()).recorder is not None:
            now.record(name, start, end, nbytes)

    def add(self, name: str, count: int, nbytes: int, seconds: float) -> None:
        """Add ``count`` operations to a stage, whose spans the caller records."""
        sums = self._sums[name]
        sums.count += count
        sums.nbytes += nbytes
        sums.seconds += seconds

    def stages(self) -> dict[str, Stage]:
        """Return the sums so far, by stage."""
        return {name: Stage(sums.count, sums.nbytes, sums.seconds) for name, sums in self._sums.items()}
