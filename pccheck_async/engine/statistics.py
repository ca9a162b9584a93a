"""The counters of an engine, and the frozen values that users, the tuner and the command line read."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from pccheck_async.engine.config import Decisions
from pccheck_async.engine.pending import PendingCheckpoint
from pccheck_async.engine.policy import Decision
from pccheck_async.format import CheckpointInfo
from pccheck_async.telemetry import Reporter, Sink, Span, Stage, Waited

__all__ = ["Distribution", "EngineStatistics", "Spread", "Stalls"]

_BOUNDS = tuple(digit * 10.0**power for power in range(-3, 3) for digit in (1, 2.5, 5))
"""Seconds: 1 ms to 500 s, three to a decade."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram of times.

    Attributes:
        count: Number of times.
        seconds: Their sum.
        up_to: By bound in seconds, ascending: how many times were at most that long; longer ones are in ``count`` only.
    """

    count: int = 0
    seconds: float = 0.0
    up_to: Mapping[float, int] = field(default_factory=lambda: dict.fromkeys(_BOUNDS, 0))


class Spread:
    """Collects times into a histogram."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(_BOUNDS, seconds)] += 1
        self._seconds += seconds

    def distribution(self) -> Distribution:
        """Return the counts so far."""
        *up_to, count = accumulate(self._counts)
        return Distribution(count, self._seconds, dict(zip(_BOUNDS, up_to, strict=True)))


class Stalls:
    """Time that training was kept waiting by one engine: adds it up, and reports each stall.

    Attributes:
        seconds: All stalls, summed.
        guard_seconds: The stalls of the guard, summed (:meth:`note_guarded`).
        state_seconds: The part of all calls of ``checkpoint()`` that ``state_dict()`` and laying out the state took.
        last_call: Time that the last call of ``checkpoint()`` took.
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

    def note_guarded(self, pending: PendingCheckpoint, seconds: float) -> None:
        """Count, as "optimizer", the seconds that the guard kept training waiting for a capture.

        Mostly in the step of an attached optimizer; also in ``engine.wait_captured()``, and when code reaches for
        memory that is being captured.
        """
        self.guard_seconds += seconds
        self._add(pending, seconds, "optimizer")

    def distributions(self) -> dict[str, Distribution]:
        """Return the distribution of their lengths, by place."""
        return {where: spread.distribution() for where, spread in self._spreads.items()}

    def _add(self, pending: PendingCheckpoint, seconds: float, where: Literal["checkpoint", "optimizer"]) -> None:
        pending.stall += seconds
        self.seconds += seconds
        self._spreads[where].add(seconds)
        self._reporter.tell(Waited, step=pending.step, counter=pending.counter, seconds=seconds, where=where)
        if (sink := self._sink()) is not None:
            end = time.perf_counter()
            sink(Span(name="stall", start=end - seconds, end=end, step=pending.step, counter=pending.counter))


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counts of an engine from its opening until now.

    Attributes:
        admitted: Checkpoints that were given a counter.
        durable: Checkpoints that committed.
        superseded: Checkpoints that newer ones made pointless before they could commit.
        failed: Checkpoints that failed.
        skipped: Calls that found ``max_in_flight`` checkpoints in flight (``on_busy="skip"``).
        abandoned: Failed checkpoints that the engine gave up because they held training up for longer than
            ``max_stall``.
        in_flight: Checkpoints admitted and not ended.
        stall_seconds: Time that training was kept waiting, in calls of ``checkpoint()`` and by the guard, summed.
        guard_seconds: The part of it that training waited for overlapped captures: in steps of attached optimizers, in
            ``engine.wait_captured()``, and when code reached for memory that was being captured.
        guard_fences: Captures for which a step did not block: all copies were queued on the GPUs, and the step's own
            work runs after them. The GPU time spent waiting is in no count of seconds.
        interval: The decision of the policy behind ``engine.step``, and why.
        last_stall_seconds: Time that the last call of ``checkpoint()`` took.
        state_seconds: The part of all calls that ``state_dict()`` and laying out the state took.
        stages: By name: capture (copy and checksum), write, flush, commit (slot flush included), read, restore.
        decisions: The numbers behind every "auto", and why.
        io: I/O backend, whether I/O is direct, and why.
        loop: Kind of event loop that the engine runs on.
        pool_bytes: Staging memory that was ever used.
        pool_peak: Most staging buffers in use at a time.
        pool_waits: Chunks that waited for a staging buffer.
        device_bytes: GPU memory that the engine holds now: snapshots, and scratch images of chunks.
        device_peak_bytes: The most GPU memory it ever held.
        snapshots: Captures that first copied the state on its GPU.
        slots: Slots on storage.
        slot_bytes: Bytes of all slots.
        plan_hits: Saves that reused the plan of the save before.
        plan_misses: Saves whose structure was new.
        latest: The newest durable checkpoint.
        durable_bytes: Bytes of all checkpoints that committed.
        save_seconds: Time from admission to durable, of each durable checkpoint.
        capture_seconds: Time from admission until captured, of each durable checkpoint.
        stalls: Each time that training was kept waiting: in calls of "checkpoint", or, as "optimizer", those in
            ``guard_seconds``.
        pool_in_use_bytes: Staging memory in use now.
        events_dropped: Events that no hook of ``on_event`` got, because one was too slow.
    """

    admitted: int
    durable: int
    superseded: int
    failed: int
    skipped: int
    abandoned: int
    in_flight: int
    stall_seconds: float
    guard_seconds: float
    guard_fences: int
    interval: Decision
    last_stall_seconds: float
    state_seconds: float
    stages: Mapping[str, Stage]
    decisions: Decisions
    io: str
    loop: str
    pool_bytes: int
    pool_peak: int
    pool_waits: int
    device_bytes: int
    device_peak_bytes: int
    snapshots: int
    slots: int
    slot_bytes: int
    plan_hits: int
    plan_misses: int
    latest: CheckpointInfo | None = None
    durable_bytes: int = 0
    save_seconds: Distribution = field(default_factory=Distribution)
    capture_seconds: Distribution = field(default_factory=Distribution)
    stalls: Mapping[str, Distribution] = field(default_factory=dict)
    pool_in_use_bytes: int = 0
    events_dropped: int = 0
