"""Runs in full: every copy, write, flush and commit beside the training steps."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from examples.paper.lab.experiments.base import Experiment, Findings, Settings
from examples.paper.lab.experiments.race import plain_block
from examples.paper.lab.timeline import Timeline, recorded
from examples.paper.lab.workloads import GPT
from pccheck_async import StorageOptions, SyncCheckpointEngine
from pccheck_async.medium import File, Medium
from pccheck_async.medium.files import Files
from pccheck_async.medium.open_medium import IO
from pccheck_async.telemetry import Span, work
from pccheck_async.testing import ThrottledWriter
from pccheck_async.transfer.operations import Operations

__all__ = ["Timelines"]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Attributes: arguments of the GPT, interval, steps before and within the recording."""

    arguments: tuple[int, int, int, int]
    interval: int
    warm: int
    steps: int


_FULL = _Plan((448, 8, 16, 1), 2, 8, 16)
_QUICK = _Plan((192, 4, 32, 1), 2, 6, 12)
_IN_FLIGHT = 3
_PERIODS = 2.5
"""Intervals that the slow disk needs for one checkpoint: several are always on their way."""


class _SlowWriter(ThrottledWriter):
    """Tells of writes as the slow device would do them, and not of what the disk below does."""

    async def write(self, file: File, offset: int, data: memoryview) -> None:
        now, start = work.get(), time.perf_counter()
        quiet = work.set(now._replace(recorder=None))
        try:
            await super().write(file, offset, data)
        finally:
            work.reset(quiet)
            if now.recorder is not None:
                end = time.perf_counter()
                now.recorder(Span("write", start, end, len(data), now.step, now.counter, now.chunk))


class Timelines(Experiment):
    """The GPT with captures beside the next step: on the disk as it is, and with its streams slowed down.

    A cloud disk caps each stream, and several checkpoints in flight make up for that; so does the second run.
    """

    name: ClassVar[str] = "timeline"
    title: ClassVar[str] = "What an engine does beside training, chunk by chunk"

    @classmethod
    def why_not(cls) -> str | None:
        """Return whether the GPT is there."""
        return GPT.why_not()

    def run(self, settings: Settings) -> Findings:
        """Record two runs."""
        plan = _QUICK if settings.quick else _FULL
        workload = GPT(*plan.arguments)
        workload.step()
        step_seconds = plain_block(workload, plan.warm)
        per_stream = workload.nbytes / (_PERIODS * plan.interval * step_seconds)

        def slowed(path: str, operations: Operations) -> Medium:
            return _SlowWriter(Files(path, operations), per_stream=per_stream)

        disks: dict[str, IO] = {"this disk": "auto", f"{per_stream / 1e6:.0f} MB/s per stream": slowed}
        found = Findings()
        for disk, io in disks.items():
            title = f"GPT, {workload.nbytes / 2**20:.3g} MiB, every {plan.interval}, {disk}"
            settings.progress(title)
            with tempfile.TemporaryDirectory(prefix="pccheck-bench-", dir=settings.folder) as folder:
                found.timelines[title] = timeline = _record(workload, plan, Path(folder), io)
            found.notes.append(f"{title}: {_summary(timeline)}.")
        return found


def _record(workload: GPT, plan: _Plan, folder: Path, io: IO) -> Timeline:
    with SyncCheckpointEngine(
        folder, max_in_flight=_IN_FLIGHT, interval=plan.interval, storage=StorageOptions(io=io)
    ) as engine:
        engine.attach(workload.optimizer)
        _train(engine, workload, 0, plan.warm)  # the first checkpoints make slots and staging memory
        engine.drain()
        with recorded(engine) as timeline:
            _train(engine, workload, plan.warm, plan.steps)
            engine.drain()
    return timeline


def _train(engine: SyncCheckpointEngine, workload: GPT, first: int, steps: int) -> None:
    state = {
        "model": workload.model,
        "optimizer": workload.optimizer,
        "scheduler": workload.scheduler,
        "rng": workload.rng,
        "data": workload.data,
    }
    for step in range(first, first + steps):
        with engine.step(state, step):
            workload.step()


def _summary(timeline: Timeline) -> str:
    steps = [span for span in timeline.training if span.name == "step"]
    stalls = [span for span in timeline.training if span.name == "stall"]
    return (
        f"{len(timeline.checkpoints)} checkpoints, up to {len(timeline.places())} in flight ({_IN_FLIGHT} allowed); "
        f"{len(steps)} steps took {sum(span.end - span.start for span in steps):.2f} s, and training was kept waiting "
        f"for {sum(span.end - span.start for span in stalls):.3f} s"
    )
