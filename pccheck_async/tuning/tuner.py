# SPDX-License-Identifier: Apache-2.0
"""The tuner: measures real engines on the storage, and chooses N, p, b (see :mod:`.choice`) and the staging memory.

Every point is measured by an engine on a store of its own, in a folder that is removed afterwards: a sample state that
changes between saves is checkpointed without a pause, so that N are always in flight, and Tw(N) is N times the time per
save. Not all combinations are measured, but three lines of points: first N with enough writers, then p at the best N,
then b. Each line is continued while larger values are better. The points of a line take turns in rounds, so that
changes of the machine's speed do not decide (:func:`pccheck_async.tuning.choice.fit_rounds`).
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from pccheck_async.engine import EngineConfig, EngineCore, StorageOptions, decide
from pccheck_async.errors import InfeasibleError, NoCheckpointError
from pccheck_async.format.record import MIN_BLOCK
from pccheck_async.medium import Medium
from pccheck_async.medium.filesystem import free_bytes, slot_bytes
from pccheck_async.medium.open_medium import IO, store_path
from pccheck_async.state import arrange, flatten
from pccheck_async.training.policy import interval_floor, sustained_interval
from pccheck_async.transfer import PAGE_BYTES, available_cores, available_memory
from pccheck_async.transfer.plan import Planner
from pccheck_async.tuning.choice import LEAST_BUFFERS, Choice, FittedTimes, Limits, Point, choose, fit_rounds, shortages
from pccheck_async.tuning.trials import Trial, TrialSample, run_trial, saves_of_trial, scratch_folder, try_disk
from pccheck_async.tuning.tuned import Measurement, Tuning

__all__ = ["Progress", "checkpoint_bytes", "tune"]

Progress = Callable[[float, str], None]
"""A function that is called with the part done (0 to 1) and the name of the present measurement, on another thread."""

_MIB = 1 << 20
_MANIFEST_BYTES = _MIB
"""Most bytes of a checkpoint in addition to its tensors."""

_WRITERS = 4
_CHUNK_BYTES = 8 * _MIB
_CHUNK_SECONDS = 0.02
"""First value of b: at most these bytes, and at most the bytes that the device writes in these seconds."""
_LEAST_CHUNK_BYTES = _MIB // 4
_MOST = Point(max_in_flight=8, writers=64, chunk_bytes=64 * _MIB)

_LINES = ("max_in_flight", "writers", "chunk_bytes")
_LEAST_ROUNDS = 3
_PLANNED_ROUNDS = 4
_MOST_ROUNDS = 16
_GOOD_NOISE = 0.04
_LEAST_TOLERANCE, _MOST_TOLERANCE = 0.05, 0.1
"""Bounds of the relative slowness that is tolerated for a smaller setting; in between, it is the measured noise."""

_LEAST_SAMPLE_BYTES = 2 * _MIB
_LEAST_CHUNKS = 4
"""Least chunks of a sample: fewer cannot be copied and written at the same time."""
_STORAGE_SHARE = 64
"""Divisor of the free space for the largest sample. The stores of a tuning have at most 19 slots of that size (N of 1,
2, 4 and 8, and one more each), so that most of the space stays free."""
_MEMORY_SHARE = 16
"""Divisor of the memory for the largest sample; with 8 in flight, 4.5 times as much is staging memory."""
_DISK_BYTES = 256 * _MIB
_DISK_SECONDS = 0.3


async def tune(
    path: str | os.PathLike[str],
    *,
    nbytes: int,
    config: EngineConfig | None = None,
    step_seconds: float | None = None,
    budget_seconds: float = 10.0,
    progress: Progress | None = None,
) -> Tuning:
    """Measure the storage under ``path`` and return the settings for checkpoints of ``nbytes`` there.

    Needs no engine and changes no store: arguments and errors are those of
    :meth:`pccheck_async.CheckpointEngine.tune`. If the folder ``path`` does not exist, it is created for the time of
    the tuning. Fields of ``config`` that are used: ``keep_last``, ``keep``, ``storage.host_memory`` (the budget) and
    ``storage.io`` (a name or a function; a single Medium is refused, because it has one folder). For a large checkpoint
    a smaller sample is measured and the times are scaled. Run it on an event loop of its own
    (:class:`pccheck_async.engine.EngineLoop`), because it computes; ``progress`` is called on the thread of that loop.

    Cancellation: ends once every operation ended and the folder of the samples is removed. (After a SIGKILL the next
    tuning removes it.)
    """
    began = time.perf_counter()
    config = config or EngineConfig()
    io, budget = config.storage.io, config.storage.host_memory
    if isinstance(io, Medium):
        raise ValueError(
            "a tuning needs writers of its own: give io as a name, or as a function of folder and operations"
        )
    if type(nbytes) is not int or nbytes < 0:
        raise ValueError(f"nbytes is the size of a checkpoint in bytes, not {nbytes!r}")
    for name, seconds in (("budget_seconds", budget_seconds), ("step_seconds", step_seconds)):
        if seconds is not None and not seconds > 0:
            raise ValueError(f"{name} is positive, not {seconds!r}")
    cores, memory = available_cores(), available_memory()
    folder = Path(store_path(path))
    free = free_bytes(folder)
    if budget == "auto":
        budget = decide(config.storage, block_bytes=PAGE_BYTES, cores=cores, memory=memory).host_memory
    limits = Limits(
        storage_bytes=free + slot_bytes(folder),
        host_memory=budget,
        cores=cores,
        keep_last=config.retention.reserved,
    )
    _check_feasible(limits, nbytes, free)
    tell = progress or (lambda part, what: None)
    with scratch_folder(folder) as space:
        tell(0.0, "the storage")
        size = min(_DISK_BYTES, max(nbytes, _LEAST_SAMPLE_BYTES), free // _STORAGE_SHARE)
        disk = await try_disk(space / "disk", io, nbytes=size, seconds=min(_DISK_SECONDS, budget_seconds / 20))
        limits = replace(limits, stream_cpu=disk.stream_cpu)
        most = min(nbytes, free // _STORAGE_SHARE, memory // _MEMORY_SHARE)
        search = _Search(space, io, limits, nbytes, most, disk.bandwidth, budget_seconds, tell)
        choice = await search.run()
    table = search.measurements()
    bandwidth = max(disk.bandwidth, *(row.bandwidth for row in table))
    tell(1.0, "done")
    in_flight, writers, chunk_bytes = choice.point.max_in_flight, choice.point.writers, choice.point.chunk_bytes
    storage = StorageOptions(writers=writers, chunk_bytes=chunk_bytes, host_memory=choice.host_memory)
    return Tuning(
        settings={"max_in_flight": in_flight, "storage": storage},
        reasons=choice.reasons,
        measurements=table,
        nbytes=nbytes,
        sample_nbytes=search.sample_nbytes,
        noise=search.fitted.noise,
        bandwidth=bandwidth,
        stream_cpu=disk.stream_cpu,
        cores=cores,
        seconds=time.perf_counter() - began,
        checkpoint_seconds=choice.seconds / in_flight,
        interval=sustained_interval(choice.seconds, in_flight, step_seconds) if step_seconds else None,
        interval_floor=interval_floor(nbytes, bandwidth, step_seconds) if step_seconds else None,
    )


def checkpoint_bytes(core: EngineCore, state: Mapping[str, Any] | None, nbytes: int | None) -> int:
    """Return ``nbytes``, or else the size of ``state``, or else of the newest checkpoint (NoCheckpointError)."""
    if nbytes is not None:
        if state is not None:
            raise ValueError("give state or nbytes, not both")
        return nbytes
    if state is not None:
        return Planner(_MOST.chunk_bytes, MIN_BLOCK).plan(arrange(flatten(state).leaves)).payload_nbytes
    if not core.infos:
        raise NoCheckpointError(f"{core.path} has no checkpoint to take the size from; give state or nbytes")
    return core.infos[0].nbytes


@dataclass
class _Search:
    """The search for max_in_flight, then writers, then chunk_bytes: each is doubled while that is faster."""

    space: Path
    io: IO
    limits: Limits
    nbytes: int
    most_sample: int  # bytes
    bandwidth: float  # of the storage: the most that was seen
    seconds: float  # about how long it may take
    tell: Progress
    part: float = 0.0  # done
    began: float = field(default_factory=time.perf_counter)
    rounds: list[dict[Point, Trial]] = field(default_factory=list)
    too_much: dict[str, str] = field(default_factory=dict)
    fitted: FittedTimes = field(default_factory=lambda: FittedTimes({}, 0.0))
    sample_nbytes: int = 0

    async def run(self) -> Choice:
        """Measure the three lines, and return the choice."""
        most_chunk = max(_LEAST_CHUNK_BYTES, self.most_sample // _LEAST_CHUNKS)
        chunk = _chunk_bytes(min(_CHUNK_BYTES, int(self.bandwidth * _CHUNK_SECONDS), most_chunk), self.limits)
        least_chunk = min(chunk, _LEAST_CHUNK_BYTES)
        # Enough writers, so that they do not hide the gain of more in flight; but no more than the cores feed.
        most_writers = _power_of_two(int(self.limits.cores / max(self.limits.stream_cpu, 1 / _MOST.writers)))
        await self._line("max_in_flight", 1, 2, lambda n: Point(n, min(max(_WRITERS, n), most_writers), chunk))
        best = self._choose().point
        await self._line("writers", max(1, best.writers // 4), best.writers, lambda p: replace(best, writers=p))
        best = self._choose().point
        first, most = max(least_chunk, chunk // 4), min(most_chunk, _MOST.chunk_bytes)
        await self._line("chunk_bytes", first, chunk, lambda b: replace(best, chunk_bytes=b), most=most)
        choice = self._choose()
        reasons = {name: text + self.too_much.get(name, "") for name, text in choice.reasons.items()}
        return choice._replace(reasons=reasons)

    def measurements(self) -> tuple[Measurement, ...]:
        """Return the measurements, with times scaled to the size that the tuning is for."""
        trials = [item for measured in self.rounds for item in measured.items()]
        repetitions = Counter(point for point, _ in trials)
        return tuple(
            Measurement(
                point=point,
                seconds=seconds,
                bandwidth=self.nbytes * point.max_in_flight / seconds,
                capture_bandwidth=self.nbytes / median(trial.captured for found, trial in trials if found == point),
                repetitions=repetitions[point],
            )
            for point, seconds in sorted(self.fitted.seconds.items())
        )

    @property
    def _tolerance(self) -> float:
        return min(max(self.fitted.noise, _LEAST_TOLERANCE), _MOST_TOLERANCE)

    def _choose(self) -> Choice:
        return choose(self.fitted.seconds, self.limits, _storage_bytes(self.nbytes), self._tolerance)

    async def _line(
        self, name: str, first: int, last: int, at: Callable[[int], Point], most: int | None = None
    ) -> None:
        """Measure the points of ``first``, twice that, and so on to ``last``; further while the last is the fastest."""
        most = most or getattr(_MOST, name)
        points: list[Point] = []
        value = first
        while value <= most:
            lacks = shortages(at(value), self.limits, _storage_bytes(self.nbytes))
            if lacks:
                self.too_much[name] = f"; {value} would not fit: {'; '.join(lacks.values())}"
                break
            points.append(at(value))
            value *= 2
            if value > last:
                await self._measure(name, points)
                if len(points) > 1 and not self._still_better(points):
                    return
                points = points[-1:]  # the next point is measured beside it
        if len(points) > 1 or points[0] not in self.fitted.seconds:
            await self._measure(name, points)

    def _still_better(self, points: Sequence[Point]) -> bool:
        costs = [self.fitted.seconds[point] / point.max_in_flight for point in points]
        return costs[-1] * (1 + self._tolerance) < min(costs[:-1])

    async def _measure(self, name: str, points: Sequence[Point]) -> None:
        """Measure the points in rounds: more rounds while times are noisy and the line's share of the budget lasts."""
        line = _LINES.index(name)
        end = self.began + self.seconds * (line + 1) / len(_LINES)
        sample = TrialSample(self._sample_bytes(points))
        self.sample_nbytes = max(self.sample_nbytes, sample.nbytes)
        factor = max(1.0, self.nbytes / sample.nbytes)  # were it all proportional to the size
        for turn in range(_MOST_ROUNDS):
            if turn >= _LEAST_ROUNDS and (self.fitted.noise <= _GOOD_NOISE or time.perf_counter() > end):
                break
            measured: dict[Point, Trial] = {}
            for point in points if turn % 2 else reversed(points):
                done = min(1.0, (turn + len(measured) / len(points)) / _PLANNED_ROUNDS)
                self.part = max(self.part, (line + done) / len(_LINES))
                chunk = f"chunks of {point.chunk_bytes >> 10} KiB"
                self.tell(self.part, f"{point.max_in_flight} in flight, {point.writers} writer(s), {chunk}")
                folder = self.space / f"in-flight-{point.max_in_flight}"
                trial = await run_trial(folder, self.io, point, sample, self.limits.host_memory)
                measured[point] = Trial(trial.durable * factor, trial.captured * factor)
            self.rounds.append(measured)
            self.fitted = fit_rounds([{p: t.durable for p, t in each.items()} for each in self.rounds])
        best = min(self.fitted.seconds[point] / point.max_in_flight for point in points)
        self.bandwidth = max(self.bandwidth, self.nbytes / best)

    def _sample_bytes(self, points: Sequence[Point]) -> int:
        """Return the sample size with which the points take a quarter of the budget (three lines, one of them long)."""
        saves = sum(_PLANNED_ROUNDS * saves_of_trial(point) + point.max_in_flight for point in points)
        wanted = int(self.bandwidth * self.seconds / (len(_LINES) + 1) / saves)
        chunks = _LEAST_CHUNKS * max(point.chunk_bytes for point in points)
        return min(max(wanted, chunks, _LEAST_SAMPLE_BYTES), self.most_sample)


def _power_of_two(most: int) -> int:
    """Return the largest power of two up to ``most``, at least 1."""
    return 1 << max(1, most).bit_length() - 1


def _chunk_bytes(most: int, limits: Limits) -> int:
    return max(PAGE_BYTES, _power_of_two(min(most, limits.host_memory // LEAST_BUFFERS)))


def _storage_bytes(nbytes: int) -> int:
    return nbytes + _MANIFEST_BYTES


def _check_feasible(limits: Limits, nbytes: int, free: int) -> None:
    """Raise InfeasibleError if not even the smallest point fits, or there is no space for the tuning itself."""
    least = Point(1, 1, _chunk_bytes(_LEAST_CHUNK_BYTES, limits))
    choose({least: 1.0}, limits, _storage_bytes(nbytes), 0.0)
    needed = _STORAGE_SHARE * min(nbytes, _LEAST_SAMPLE_BYTES)
    if free < needed:
        raise InfeasibleError(
            f"storage: measuring needs {needed} free bytes, there are {free}; free space", constraints=("storage",)
        )
