"""What an engine counted, put together for users, for other processes and for its log."""

from __future__ import annotations

import time
from dataclasses import replace

from pccheck_async.engine.assembly import Pipeline
from pccheck_async.engine.in_flight import Admissions
from pccheck_async.engine.overlap import Guard
from pccheck_async.engine.stalls import Stalls
from pccheck_async.engine.statistics import EngineStatistics
from pccheck_async.engine.status_publisher import make_status
from pccheck_async.medium.status_file import Status
from pccheck_async.telemetry.reporter import Reporter
from pccheck_async.training.step_context import TrainingSteps

__all__ = ["Ledger"]


class Ledger:
    """Reads everything that counts in one engine.

    Args:
        admissions: What became of its checkpoints.
        stalls: What training waited for them.
        guard: What held it up.
        steps: Its steps.
        reporter: Tells of the engine.
    """

    def __init__(
        self, admissions: Admissions, stalls: Stalls, guard: Guard, steps: TrainingSteps, reporter: Reporter
    ) -> None:
        self._admissions = admissions
        self._stalls = stalls
        self._guard = guard
        self._steps = steps
        self._reporter = reporter
        self._began = 0.0

    def begin(self) -> None:
        """Note that the engine is open."""
        self._began = time.time()

    def end(self) -> None:
        """Tell of the engine's end."""
        counts = self._admissions.counts
        self._reporter.closed(
            durable=counts.durable,
            superseded=counts.superseded,
            failed=counts.failed,
            skipped=counts.skipped,
        )

    def statistics(self, pipeline: Pipeline) -> EngineStatistics:
        """Return a snapshot of everything counted so far."""
        io = pipeline.session.writer.statistics()
        pool, store, copying = pipeline.pool.statistics(), pipeline.store.statistics(), pipeline.backend.statistics()
        reasons = pipeline.decisions.reasons | {"device": copying.reason}
        counts = self._admissions.counts
        with self._admissions.lock:
            return EngineStatistics(
                admitted=counts.admitted,
                durable=counts.durable,
                superseded=counts.superseded,
                failed=counts.failed,
                skipped=counts.skipped,
                abandoned=counts.abandoned,
                in_flight=len(self._admissions.in_flight),
                stall_seconds=self._stalls.seconds,
                guard_seconds=self._stalls.guard_seconds,
                guard_fences=self._guard.fenced,
                interval=self._steps.decision,
                last_stall_seconds=self._stalls.last_call,
                state_seconds=self._stalls.state_seconds,
                stages=pipeline.clock.stages() | {"write": io.write, "read": io.read, "flush": io.flush},
                decisions=replace(pipeline.decisions, reasons=reasons),
                io=f"{io.engine}, {'direct' if io.direct else 'buffered'}: {io.why}",
                loop=pipeline.loop.kind,
                pool_bytes=pool.touched * pool.buffer_bytes,
                pool_peak=pool.peak,
                pool_waits=pool.waited,
                device_bytes=copying.device_bytes,
                device_peak_bytes=copying.device_peak_bytes,
                snapshots=copying.snapshots,
                slots=store.slots,
                slot_bytes=store.slot_bytes,
                plan_hits=pipeline.planner.hits,
                plan_misses=pipeline.planner.misses,
                latest=next((entry.info for entry in pipeline.store.committed.entries), None),
                durable_bytes=self._reporter.nbytes,
                save_seconds=self._admissions.save_seconds.distribution(),
                capture_seconds=self._admissions.capture_seconds.distribution(),
                stalls=self._stalls.distributions(),
                pool_in_use_bytes=pool.in_use * pool.buffer_bytes,
                events_dropped=self._reporter.hooks.dropped,
            )

    def status(self, pipeline: Pipeline) -> Status:
        """Return what other processes may know."""
        return make_status(
            self.statistics(pipeline),
            started=self._began,
            in_flight=self._admissions.in_flight,
            committed=[entry.info for entry in pipeline.store.committed.entries],
            newest=self._admissions.newest,
            report=self._steps.last,
            failure=pipeline.store.failure,
        )
