# SPDX-License-Identifier: Apache-2.0
"""The statistics of an engine: frozen values that users, metrics, the status file and the command line read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pccheck_async.engine.config import Decisions
from pccheck_async.engine.policy import Decision
from pccheck_async.format import CheckpointInfo
from pccheck_async.telemetry import Distribution, Stage

__all__ = ["Distribution", "EngineStatistics"]


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
        guard_seconds: The part of ``stall_seconds`` that training waited for overlapped captures: in steps of attached
            optimizers, in ``engine.wait_captured()``, and when code reached for memory that was being captured.
        guard_fences: Captures for which a step did not block: all copies were queued on the GPUs, and the step's own
            work runs after them. The GPU time spent waiting is in no count of seconds.
        interval: The decision of the policy behind ``engine.step``, and why.
        last_stall_seconds: Time that the last call of ``checkpoint()`` took.
        state_seconds: Time that ``state_dict()`` and laying out the state took, in all calls of ``checkpoint()``.
        stages: Counts of each stage, by name: capture (copy and checksum), write, flush, commit (slot flush included),
            read, restore.
        decisions: The numbers behind every "auto", and why.
        io: I/O backend, and whether I/O is direct, with the reason.
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
        stalls: Durations of the waits of training, by place: "checkpoint" for calls of ``checkpoint()``, "optimizer"
            for the waits that ``guard_seconds`` counts.
        pool_in_use_bytes: Staging memory in use now.
        in_memory: Checkpoints that were committed in memory (``memory``), those that went on to the disk included.
        memory_bytes: Bytes of all slots in memory, those of other ranks' copies included.
        in_replicas: Checkpoints that, themselves or a newer one, were copied to the memory of other hosts
            (``replicas``).
        replicas_degraded: Why the newest checkpoint in memory is not in the memory of other hosts, and since which
            step; empty if nothing is wrong.
        memory_interval: The decision of the policy of the memory tier, and why; None without that tier.
        drained: Checkpoints that were copied to the bucket (``drain``).
        drained_bytes: Bytes that this process sent to the bucket.
        drain_lag_seconds: Seconds since the oldest durable checkpoint committed that is newer than all in the bucket;
            0 if there is none.
        drain_trouble: Why nothing is copied to the bucket, at the moment or any more; empty if nothing is wrong.
        unchanged_bytes: Bytes that were not written, as their slot still held them (``skip_unchanged``).
        events_dropped: Events that no hook of ``on_event`` got, because one was too slow.
        fell_back: Restores that passed over damaged checkpoints that are newer.
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
    in_memory: int = 0
    memory_bytes: int = 0
    in_replicas: int = 0
    replicas_degraded: str = ""
    memory_interval: Decision | None = None
    drained: int = 0
    drained_bytes: int = 0
    drain_lag_seconds: float = 0.0
    drain_trouble: str = ""
    unchanged_bytes: int = 0
    events_dropped: int = 0
    fell_back: int = 0

    def __str__(self) -> str:
        counts = f"{self.durable} durable, {self.superseded} superseded, {self.failed} failed, {self.skipped} skipped"
        in_memory = f", {self.in_memory} in memory" if self.in_memory else ""
        in_memory += f" ({self.in_replicas} of other hosts, too)" if self.in_replicas else ""
        newest = "nothing durable" if self.latest is None else f"newest durable: step {self.latest.step}"
        mean = self.save_seconds.mean
        times = "" if mean is None else f"; a checkpoint took {mean:.3g} s to be durable"
        text = (
            f"{self.admitted} checkpoints: {counts}{in_memory}, {self.in_flight} in flight; {newest}\n"
            f"training waited {self.stall_seconds:.3g} s{times}\n"
            f"interval: {self.interval.reason}"
        )
        if self.drained or self.drain_trouble:
            text += f"\n{self.drained} copied to the bucket, which is {self.drain_lag_seconds:.3g} s behind"
            text += f": {self.drain_trouble}" if self.drain_trouble else ""
        if self.memory_interval is not None:
            text += f"\ninterval in memory: {self.memory_interval.reason}"
        return text

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        """Show the short text in notebooks, where ``repr`` would be two screens; called by IPython."""
        printer.text(str(self))
