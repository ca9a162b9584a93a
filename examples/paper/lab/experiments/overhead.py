"""CheckFreq's evaluation: overhead at the interval that its policy picks, and policies that follow a disturbance."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from examples.paper.lab.experiments.base import Experiment, Findings, Settings
from examples.paper.lab.experiments.race import Race, chosen, plain_block
from examples.paper.lab.medians import median_interval
from examples.paper.lab.table import Row
from examples.paper.lab.workloads import GPT
from pccheck_async import Adaptive, Policy, SyncCheckpointEngine
from pccheck_async.policies import CheckFreqInterval, PCcheckInterval, YoungDaly
from pccheck_async.training.policy import (
    checkfreq_interval,
)
from pccheck_async.transfer import available_cores

__all__ = ["Overhead"]

_METHODS = ("pccheck", "pccheck overlapped", "torch.save + fsync", "CheckFreq", "GPM")
_BUDGET = 0.03
_MTBF = 265.0
_POLICIES: dict[str, Callable[[], Policy]] = {
    "Adaptive": lambda: Adaptive(_BUDGET),
    "CheckFreqInterval": lambda: CheckFreqInterval(_BUDGET),
    "PCcheckInterval": lambda: PCcheckInterval(_BUDGET),
    "YoungDaly": lambda: YoungDaly(_MTBF, _BUDGET),
}
_OTHER_JOB = "while True: sum(range(1000))"
_PARTS = {1: "alone", 2: "another job has just come", 3: "it has been there", 4: "it has gone"}
_ALONE, _BESIDE = "alone", "beside another job"


@dataclass(frozen=True, slots=True)
class _Plan:
    """Attributes: arguments of the GPT, steps of a plain block, seconds of a phase, rounds."""

    arguments: tuple[int, int, int, int]
    plain_steps: int
    phase_seconds: float
    rounds: int
    policy_rounds: int


_FULL = _Plan((256, 4, 64, 4), 20, 20.0, 5, 3)
_QUICK = _Plan((64, 2, 32, 2), 8, 2.0, 3, 1)


class Overhead(Experiment):
    """What checkpoints cost every k steps, alone and beside another job.

    k is what CheckFreq's Algorithm 1 makes of its own profile, and what its adaptive rule makes of the cost at that k.

    Then each policy steers an engine that captures beside the next step: alone, beside a job that takes a share of the
    cores, and alone again. Blocks without checkpoints stand between, before and after each part of a phase.
    """

    name: ClassVar[str] = "overhead"
    title: ClassVar[str] = "Overhead at the interval that policies pick"

    @classmethod
    def why_not(cls) -> str | None:
        """Return whether the GPT is there."""
        return GPT.why_not()

    def run(self, settings: Settings) -> Findings:
        """Measure the bars, then the policies."""
        names = chosen(settings.methods, _METHODS)
        plan = _QUICK if settings.quick else _FULL
        found = Findings()
        with tempfile.TemporaryDirectory(prefix="pccheck-bench-", dir=settings.folder) as folder:
            workload = GPT(*plan.arguments)
            found.notes.append(
                f"The state of the GPT has {workload.nbytes / 2**20:.3g} MiB; the budget is {_BUDGET:.0%}."
            )
            _compare(workload, plan, names, Path(folder), settings, found)
            for number in range(settings.repetitions or plan.policy_rounds):
                for name, make in _POLICIES.items():
                    settings.progress(f"{name}, round {number + 1}")
                    run = _Steered(workload, plan, make())
                    run.train(Path(folder) / f"{name}-{number}")
                    run.report(name, number, found)
        return found


def _compare(workload: GPT, plan: _Plan, names: list[str], folder: Path, settings: Settings, found: Findings) -> None:
    """Measure the bars."""
    race = Race(list(dict.fromkeys([*names, "CheckFreq"])), workload, folder, settings.progress)
    blocks: dict[tuple[str, int, str], list[float]] = {}
    try:
        intervals = _checkfreq_intervals(race, workload, plan, found)
        for number in range(settings.rounds(plan.rounds)):
            for where in (_ALONE, _BESIDE):
                with _other_job(where == _BESIDE):
                    before = plain_block(workload, plan.plain_steps)
                    for name, interval in [(name, k) for name in names if name in race.running for k in intervals]:
                        if name in race.running:
                            share, before = _one_block(race, name, interval, before, plan)
                            if share is not None:
                                blocks.setdefault((where, interval, name), []).append(share)
            settings.progress(f"round {number + 1} of the bars is over")
        race.finish()
    finally:
        race.close()
    found.notes += race.notes()
    for (where, interval, name), shares in blocks.items():
        if name not in race.loads:  # what was not restored bit for bit is no result
            continue
        found.rows += [
            _overhead_row("checkfreq", where, name, interval, number, share) for number, share in enumerate(shares)
        ]
        middle, low, high = median_interval(shares)
        found.notes.append(f"{name} every {interval}, {where}: overhead {middle:.1%} [{low:.1%}, {high:.1%}].")


def _one_block(race: Race, name: str, interval: int, before: float, plan: _Plan) -> tuple[float | None, float]:
    """Return a method's overhead as a share, None where it is out, and the plain block after it."""
    block = race.block(name, interval, -(-2 * plan.plain_steps // interval), before)
    after = plain_block(race.workload, plan.plain_steps)
    return (None if block is None else block.seconds / ((before + after) / 2) - 1), after


def _checkfreq_intervals(race: Race, workload: GPT, plan: _Plan, found: Findings) -> list[int]:
    """Return k of Algorithm 1, and the k that follows by the adaptive rule where that one is over the budget."""
    first = _algorithm_1(race, workload, plan, found)
    shares = []
    before = plain_block(workload, plan.plain_steps)
    for _ in range(3):
        share, before = _one_block(race, "CheckFreq", first, before, plan)
        shares.append(share or 0.0)
    share = statistics.median(shares)
    if share <= _BUDGET:
        return [first]
    second = math.ceil(first * share / _BUDGET)
    found.notes.append(f"At k = {first} CheckFreq costs {share:.1%}: its adaptive rule makes k = {second} of that.")
    return [first, second]


def _algorithm_1(race: Race, workload: GPT, plan: _Plan, found: Findings) -> int:
    """Return k for the method CheckFreq, from its own times."""
    updates, steps = [], []
    for _ in range(plan.plain_steps):
        start = time.perf_counter()
        workload.compute()
        middle = time.perf_counter()
        workload.update()
        steps.append(time.perf_counter() - start)
        updates.append(time.perf_counter() - middle)
    saves = [race.running["CheckFreq"].profile() for _ in range(5)]
    captured, durable = (statistics.median(times) for times in zip(*saves, strict=True))
    choice = checkfreq_interval(
        step_seconds=statistics.median(steps),
        update_seconds=statistics.median(updates),
        host_copy_seconds=captured,
        persist_seconds=durable - captured,
        overhead=_BUDGET,
    )
    found.notes.append(
        f"Algorithm 1 of CheckFreq picks k = {choice.interval}: a step takes {statistics.median(steps) * 1e3:.1f} ms, "
        f"{statistics.median(updates) * 1e3:.1f} ms of it the weight update, a copy {captured * 1e3:.1f} ms, "
        f"and {(durable - captured) * 1e3:.1f} ms more to storage."
    )
    return choice.interval


@dataclass(slots=True)
class _Part:
    """What was seen in a part of a phase. Attributes: overheads as shares; the interval at its end, and why."""

    overheads: list[float] = field(default_factory=list)
    interval: int | None = None
    reason: str = ""


class _Steered:
    """One policy through all phases."""

    def __init__(self, workload: GPT, plan: _Plan, policy: Policy) -> None:
        self._workload, self._plan, self._policy = workload, plan, policy
        self._step = 0
        self.parts: dict[int, _Part] = {}

    def train(self, folder: Path) -> None:
        """Go through the phases; the parts are numbered as the figures' axis is."""
        with SyncCheckpointEngine(folder, interval=self._policy) as engine:
            engine.attach(self._workload.optimizer)
            self._phase(engine, None, 1)
            with _other_job(True):
                self._phase(engine, 2, 3)
            self._phase(engine, None, 4)

    def report(self, name: str, number: int, found: Findings) -> None:
        """Add rows and notes."""
        for place, part in self.parts.items():
            share = statistics.median(part.overheads)
            found.rows.append(_overhead_row("adaptive", "", name, place, number, share))
            if part.interval is not None:
                found.rows.append(
                    Row(figure="adaptive-k", method=name, x=place, repetition=number, value=part.interval, unit="steps")
                )
            found.notes.append(f"{name}, round {number + 1}, {_PARTS[place]}: overhead {share:.1%}; {part.reason}")

    def _phase(self, engine: SyncCheckpointEngine, early: int | None, late: int) -> None:
        """Train with blocks of plain steps between; what the first quarter and the last half show, is kept."""
        start = time.perf_counter()
        before = plain_block(self._workload, self._plan.plain_steps)
        while (passed := time.perf_counter() - start) < self._plan.phase_seconds or late not in self.parts:
            seconds = self._segment(engine)
            engine.drain()
            after = plain_block(self._workload, self._plan.plain_steps)
            share = passed / self._plan.phase_seconds
            place = early if share < 0.25 or (early and early not in self.parts) else late if share >= 0.5 else None
            if place is not None:
                part = self.parts.setdefault(place, _Part())
                part.overheads.append(seconds / ((before + after) / 2) - 1)
                decision = self._policy.decision()
                part.interval, part.reason = decision.interval, decision.reason
            before = after

    def _segment(self, engine: SyncCheckpointEngine) -> float:
        """Train until the second checkpoint ended, for half a phase at most; returns the seconds of a step."""
        state = {"model": self._workload.model, "optimizer": self._workload.optimizer, "rng": self._workload.rng}
        admitted, first, start = engine.statistics().admitted, self._step, time.perf_counter()
        most = max(3 * (self._policy.decision().interval or 0), 4 * self._plan.plain_steps)
        while self._step - first < most:
            with engine.step(state, self._step):
                self._workload.step()
            self._step += 1
            now = engine.statistics()
            long = time.perf_counter() - start > self._plan.phase_seconds / 2
            if long or (now.admitted - admitted >= 2 and not now.in_flight):
                break
        return (time.perf_counter() - start) / (self._step - first)


def _overhead_row(figure: str, workload: str, method: str, x: float, repetition: int, share: float) -> Row:
    """Noise below no overhead at all is drawn as none; the notes have it."""
    return Row(
        figure=figure,
        workload=workload,
        method=method,
        x=x,
        repetition=repetition,
        value=max(0.0, share * 100),
        unit="%",
        floor=_BUDGET * 100,
    )


@contextmanager
def _other_job(runs: bool) -> Iterator[None]:
    """Let processes that compute all the time take half of the cores."""
    jobs = [
        subprocess.Popen([sys.executable, "-c", _OTHER_JOB])
        for _ in range(max(1, available_cores() // 2) if runs else 0)
    ]
    try:
        yield
    finally:
        for job in jobs:
            job.kill()
            job.wait()
