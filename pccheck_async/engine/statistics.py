"""What an engine did, as frozen values: the tuner, the command line and users read these and nothing private."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from pccheck_async.engine.config import Decisions
from pccheck_async.engine.policy import Decision
from pccheck_async.format.info import CheckpointInfo
from pccheck_async.telemetry.stages import Stage

__all__ = ["Distribution", "EngineStatistics", "Spread"]

_BOUNDS = tuple(digit * 10.0**power for power in range(-3, 3) for digit in (1, 2.5, 5))
"""Seconds: 1 ms to 500 s, three to a decade."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """How long something took, each time.

    Attributes:
        count: How often.
        seconds: Their sum.
        up_to: How many took at most so many seconds, by that bound, growing; longer ones are in ``count`` only.
    """

    count: int = 0
    seconds: float = 0.0
    up_to: Mapping[float, int] = field(default_factory=lambda: dict.fromkeys(_BOUNDS, 0))


class Spread:
    """Counts times by their bounds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(_BOUNDS, seconds)] += 1
        self._seconds += seconds

    def distribution(self) -> Distribution:
        """Return what was counted so far."""
        *up_to, count = accumulate(self._counts)
        return Distribution(count, self._seconds, dict(zip(_BOUNDS, up_to, strict=True)))


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A snapshot of an engine.

    Attributes:
        admitted: Checkpoints that were given a counter.
        durable: Those that committed.
        superseded: Those that newer ones made pointless before they could commit.
        failed: Those that failed.
        skipped: Calls that found all places in flight (``on_busy="skip"``).
        abandoned: Those of the failed ones that were given up because they held training up for ``max_stall``.
        in_flight: Admitted and not ended.
        stall_seconds: Time that callers of ``checkpoint()`` and optimizer steps were kept waiting, summed.
        guard_seconds: Part of it that steps of attached optimizers waited for captures.
        guard_fences: Captures whose end such steps left to the GPUs to wait for: all copies were queued there, and what
            the step queues comes after them. That time is in no count of seconds.
        interval: What the policy behind ``engine.step`` has decided, and why.
        last_stall_seconds: Time that the last call of ``checkpoint()`` took.
        state_seconds: Part of it that went into ``state_dict()`` and laying out the state.
        stages: By name: capture (copy and checksum), write, flush, commit (slot flush included), read, restore.
        decisions: The numbers behind every "auto", and why.
        io: Operations engine, whether I/O is direct, and why.
        loop: Kind of event loop the engine runs on.
        pool_bytes: Staging memory that was ever used.
        pool_peak: Most staging buffers in use at a time.
        pool_waits: Chunks that waited for a staging buffer.
        device_bytes: GPU memory that the engine holds now: snapshots, and scratch images of chunks.
        device_peak_bytes: The most it ever held.
        snapshots: Captures that copied the state of a GPU there first.
        slots: Slots on storage.
        slot_bytes: Their bytes.
        plan_hits: Saves that reused the plan of the save before.
        plan_misses: Saves whose structure was new.
        latest: The newest durable checkpoint.
        durable_bytes: Bytes of all that committed.
        save_seconds: What they took from admission to durable.
        capture_seconds: What they took until they were captured.
        stalls: What training was kept waiting, each time: in calls of "checkpoint", in steps of an "optimizer".
        pool_in_use_bytes: Staging memory that is in use now.
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
