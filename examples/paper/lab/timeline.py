"""Timelines: every chunk's copy and write, every flush and commit, beside the training steps of one run.

::

    with recorded(engine) as timeline:
        train(engine)
        engine.drain()
    timeline.write("run.json")  # opens in https://ui.perfetto.dev

The file is in Chrome's trace event format. Training is one process in it, and each place in flight is one, with a track
for each thing that it does at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from examples.paper.lab.table import TableError
from pccheck_async import CheckpointEngine, SyncCheckpointEngine
from pccheck_async.telemetry import Span

__all__ = ["STAGES", "TRAINING", "Span", "Timeline", "lanes", "recorded"]

TRAINING = ("step", "stall")
"""Names of spans of the training thread."""

STAGES = ("capture", "write", "flush", "commit")
"""Names of spans of a checkpoint."""

T = TypeVar("T")
_MICROSECONDS = 1e6


class Timeline:
    """The spans of one run, in no particular order."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self.spans = list(spans)

    @property
    def training(self) -> list[Span]:
        """Those of the training thread, by time."""
        return sorted((span for span in self.spans if span.name in TRAINING), key=lambda span: span.start)

    @property
    def checkpoints(self) -> dict[int, list[Span]]:
        """Those of each checkpoint by its counter, by time."""
        found: dict[int, list[Span]] = {}
        for span in sorted(self.spans, key=lambda span: span.start):
            if span.name not in TRAINING and span.counter is not None:
                found.setdefault(span.counter, []).append(span)
        return found

    def places(self) -> list[list[int]]:
        """Return the counters of the checkpoints in as few rows as keep those apart that were worked on at a time."""
        whole = {c: (spans[0].start, max(span.end for span in spans)) for c, spans in self.checkpoints.items()}
        return lanes(list(whole), [whole[counter] for counter in whole])

    def chrome_events(self) -> list[dict[str, Any]]:
        """Return the timeline as Chrome trace events; times count from the first span on."""
        zero = min((span.start for span in self.spans), default=0.0)
        events: list[dict[str, Any]] = []
        training = [("steps", [s for s in self.training if s.name == "step"])]
        training.append(("kept waiting", [s for s in self.training if s.name == "stall"]))
        _add_process(events, 1, "training", training, zero)
        for number, counters in enumerate(self.places(), 1):
            tracks = []
            for stage in STAGES:
                spans = [s for c in counters for s in self.checkpoints[c] if s.name == stage]
                rows = lanes(spans, [(span.start, span.end) for span in spans])
                tracks += [(stage if len(rows) == 1 else f"{stage} {row}", each) for row, each in enumerate(rows, 1)]
            _add_process(events, number + 1, f"checkpoint in flight {number}", tracks, zero)
        return events

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a file that Perfetto and chrome://tracing open."""
        document = {"traceEvents": self.chrome_events(), "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(document, separators=(",", ":"), allow_nan=False), encoding="utf-8")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Timeline:
        """Read what :meth:`write` wrote; times count from the first span on.

        Raises:
            TableError: it is something else.
            OSError: it cannot be read.
        """
        try:
            document = msgspec.json.decode(Path(path).read_bytes(), type=_Document)
        except msgspec.DecodeError as error:
            raise TableError(f"{os.fspath(path)} is no timeline: {error}") from error
        spans = [
            Span(
                name=event.cat,
                start=event.ts / _MICROSECONDS,
                end=(event.ts + event.dur) / _MICROSECONDS,
                nbytes=event.args.nbytes,
                step=event.args.step,
                counter=event.args.counter,
                chunk=event.args.chunk,
            )
            for event in document.trace_events
            if event.ph == "X" and event.cat in (*TRAINING, *STAGES)
        ]
        return cls(spans)


class _Arguments(msgspec.Struct):
    step: int | None = None
    counter: int | None = None
    chunk: int | None = None
    nbytes: int = 0


class _Event(msgspec.Struct):
    ph: str
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: _Arguments = msgspec.field(default_factory=_Arguments)


class _Document(msgspec.Struct, rename={"trace_events": "traceEvents"}):
    trace_events: list[_Event]


@contextmanager
def recorded(engine: CheckpointEngine | SyncCheckpointEngine) -> Iterator[Timeline]:
    """Record what ``engine`` does inside this context.

    Checkpoints admitted inside it are recorded to their end, and none other: drain before leaving it, or look at the
    timeline when they have ended.
    """
    timeline = Timeline()
    stream = engine._core.stream
    before, stream.trace = stream.trace, timeline.spans.append  # appending is atomic: spans come from two threads
    try:
        yield timeline
    finally:
        stream.trace = before


def lanes(items: Sequence[T], times: Sequence[tuple[float, float]]) -> list[list[T]]:
    """Distribute items with a start and an end over as few lanes as keep those apart that overlap."""
    rows: list[list[T]] = []
    ends: list[float] = []
    for (start, end), item in sorted(zip(times, items, strict=True), key=lambda pair: pair[0]):
        free = next((row for row, ended in enumerate(ends) if ended <= start), len(rows))
        if free == len(rows):
            rows.append([])
            ends.append(end)
        rows[free].append(item)
        ends[free] = end
    return rows


def _add_process(
    events: list[dict[str, Any]], pid: int, name: str, tracks: Sequence[tuple[str, Sequence[Span]]], zero: float
) -> None:
    def describe(what: str, tid: int, **args: Any) -> None:
        events.append({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args})

    describe("process_name", 0, name=name)
    describe("process_sort_index", 0, sort_index=pid)
    for tid, (track, spans) in enumerate(tracks, 1):
        describe("thread_name", tid, name=track)
        describe("thread_sort_index", tid, sort_index=tid)
        events.extend(_event(span, pid, tid, zero) for span in spans)


def _event(span: Span, pid: int, tid: int, zero: float) -> dict[str, Any]:
    seconds = span.end - span.start
    args: dict[str, Any] = {"step": span.step, "counter": span.counter, "chunk": span.chunk, "nbytes": span.nbytes}
    args = {key: value for key, value in args.items() if value is not None}
    if span.nbytes and seconds > 0:
        args["MB/s"] = round(span.nbytes / seconds / 1e6, 1)
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "cat": span.name,
        "name": f"{span.name} {span.step}" if span.name in TRAINING else _title(span),
        "ts": (span.start - zero) * _MICROSECONDS,
        "dur": seconds * _MICROSECONDS,
        "args": args,
    }


def _title(span: Span) -> str:
    """By its chunk, so that equal chunks of different checkpoints get equal colours."""
    return span.name if span.chunk is None else f"{span.name} chunk {span.chunk}"
