"""What an engine did, as frozen values: the tuner, the command line and users read these and nothing private."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from pccheck_async.config import Decisions
from pccheck_async.policy import Decision
from pccheck_async.tracing import tell, traced

__all__ = ["EngineStatistics", "Stage", "StageClock"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the pipeline: operations, their bytes, and their seconds summed over concurrent operations."""

    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0


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


class StageClock:
    """Adds up counts, bytes and seconds by stage, and tells whoever records the run of each operation."""

    def __init__(self, *names: str) -> None:
        self._stages = dict.fromkeys(names, Stage())

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
        stage = self._stages[name]
        self._stages[name] = Stage(stage.count + 1, stage.nbytes + nbytes, stage.seconds + end - start)
        if (now := traced.get()) is not None:
            tell(now, name, start, end, nbytes)

    def stages(self) -> dict[str, Stage]:
        """Return the sums so far."""
        return dict(self._stages)
