"""Measuring methods against each other: the same state, seed, disk and clock, in interleaved rounds.

Rules: every tensor changes before each save; nothing is dirty in the page cache when a save starts; what is written
back after it counts as its processor time; each restore starts with a cold page cache, goes into tensors that exist,
and is compared bit by bit with what was saved; a method that fails, or whose restore differs, gets a row that says so.

Run: ``pccheck bench run costs --folder DIR --out DIR [--methods pccheck --methods "torch.save + fsync"]``.
"""

from __future__ import annotations

import gc
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pccheck_async.bench.bits import differences, scribble
from pccheck_async.bench.medians import median_interval
from pccheck_async.bench.methods import Method, State, UnsupportedError, find_method
from pccheck_async.bench.place import Place, survey
from pccheck_async.bench.usage import PeakMemory, busy_seconds, dirty_bytes, evict, stored_bytes
from pccheck_async.bench.workloads import SlowDevice, Workload

__all__ = ["Measured", "Result", "Row", "Sample", "measure"]

_WARM_SAVES = 3
"""As many as the slots that an engine with two in flight has: each of them is written once before the clock runs."""
_SETTLE_SECONDS = 0.2
"""What the kernel does after the fact still counts; and for as long what it spends on nothing is looked at."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One save, or one restore.

    Attributes:
        stall: Seconds until training might change the state, with nothing to do meanwhile.
        durable: Seconds until the method called it saved.
        processor: Processor seconds of the whole system, writing back included.
        dirty_bytes: What the device did not have when the method called it saved; None where the kernel does not tell.
        step_stall: Seconds that the method kept a training step waiting; None where the workload does not train.
    """

    stall: float
    durable: float
    processor: float
    dirty_bytes: int | None
    step_stall: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """A median, the ends of its 95 % bootstrap interval, and the same of its ratio to the baseline, round by round."""

    median: float
    low: float
    high: float
    ratio: float
    ratio_low: float
    ratio_high: float
    count: int


@dataclass(slots=True)
class Row:
    """What was found about a method.

    Attributes:
        method: Its name.
        overlaps: Whether its capture runs beside the next step.
        durable: Whether it survives a power failure, by the tests.
        atomic: Whether it survives a kill inside a save, by the tests.
        resumable: Whether all of a training state comes back, by the tests.
        figures: By name: ``stall``, ``durable``, ``step_stall``, ``restore`` in seconds, ``processor`` in seconds per
            GiB; what was not measured is missing.
        dirty_bytes: The most that was not on the device when the method called it saved.
        memory_bytes: The most memory that it took beyond the state.
        stored_bytes: What its files take of the device in the end, older checkpoints deleted.
        verified: Whether every restore had the bits that were saved; None where none was tried.
        problem: Why there is no (whole) row, empty where there is.
        samples: Every save.
        restores: Seconds of every restore.
    """

    method: str
    overlaps: bool
    durable: bool
    atomic: bool
    resumable: bool
    figures: dict[str, Measured] = field(default_factory=dict)
    dirty_bytes: int | None = None
    memory_bytes: int = 0
    stored_bytes: int = 0
    verified: bool | None = None
    problem: str = ""
    samples: list[Sample] = field(default_factory=list)
    restores: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Result:
    """A measurement.

    Attributes:
        rows: One for each method, in the order asked for.
        workload: Name of the workload.
        state_bytes: Bytes of the tensors of its state.
        rounds: How many there were.
        baseline: The method that ratios are to: theirs / its.
        place: Machine and filesystem.
    """

    rows: list[Row]
    workload: str
    state_bytes: int
    rounds: int
    baseline: str
    place: Place


class _DiffersError(Exception):
    """What was restored is not what was saved."""


@dataclass
class _Entry:
    kind: type[Method]
    folder: Path
    row: Row
    method: Method | None = None

    @property
    def good(self) -> bool:
        return not self.row.problem

    def opened(self) -> Method:
        assert self.method is not None
        return self.method


def measure(
    methods: Sequence[str | type[Method]],
    workload: Workload,
    folder: Path,
    rounds: int = 5,
    *,
    baseline: str = "pccheck",
    device: SlowDevice | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Result:
    """Measure ``methods`` by turns.

    Args:
        methods: Names or classes.
        workload: What is saved.
        folder: Where; each method gets a new folder in it, which is deleted at the end.
        rounds: How often each method saves, and how often each restores.
        baseline: The method that ratios are to; the first one where it is not among them.
        device: Caps for the methods that can be given some; a row of another method says that it cannot.
        progress: Is told what is being measured.

    Raises:
        ValueError: a name that there is not, or no round.
    """
    if rounds < 1:
        raise ValueError(f"at least one round, not {rounds}")
    kinds = [find_method(each) if isinstance(each, str) else each for each in methods]
    with tempfile.TemporaryDirectory(prefix="pccheck-bench-", dir=folder) as name, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(torch|torchsnapshot|lightning)\b")
        place = survey(Path(name))
        entries = [_Entry(kind, Path(name) / str(at), _row(kind)) for at, kind in enumerate(kinds)]
        run = _Run(workload, entries, device, progress)
        try:
            run.open()
            for number in range(rounds):
                run.save_round(number)
            saved = run.save_last()
        finally:
            run.close()
        run.restore(saved, rounds)
    rows = [entry.row for entry in entries]
    names = [row.method for row in rows]
    baseline = baseline if baseline in names or not names else names[0]
    _sum_up(rows, baseline, workload.nbytes)
    return Result(rows, workload.name, workload.nbytes, rounds, baseline, place)


class _Run:
    def __init__(
        self, workload: Workload, entries: list[_Entry], device: SlowDevice | None, progress: Callable[[str], None]
    ) -> None:
        self.workload, self.entries, self.device, self.progress = workload, entries, device, progress
        self.steps = 0
        self.order = random.Random(0)

    def open(self) -> None:
        """Open each method and save a few times, one method after the other: what memory it takes is seen here."""
        for entry in self.entries:
            reason = entry.kind.why_not()
            if reason is not None:
                entry.row.problem = f"skipped: {reason}"
        for entry in self._turns():
            self.progress(f"{entry.kind.name}: opening")
            gc.collect()
            with PeakMemory() as peak:
                self._guarded(entry, self._warm)
            entry.row.memory_bytes = peak.nbytes

    def _warm(self, entry: _Entry) -> None:
        entry.method = self._open(entry)
        entry.method.attach(self.workload.optimizer)
        for _ in range(_WARM_SAVES):
            self.workload.step()
            handle = entry.method.save(self.workload.state(), self._next())
            handle.captured()
            handle.wait()
            entry.method.tidy()

    def _open(self, entry: _Entry) -> Method:
        return entry.kind(entry.folder) if self.device is None else self.device.open(entry.kind, entry.folder)

    def save_round(self, number: int) -> None:
        for entry in self._turns():
            self.progress(f"round {number + 1}: {entry.kind.name}")
            self._guarded(entry, self._sample)

    def _sample(self, entry: _Entry) -> None:
        method = entry.opened()
        self.workload.step()
        os.sync()
        busy, start = busy_seconds(), time.perf_counter()
        handle = method.save(self.workload.state(), self._next())
        handle.captured()
        stall = time.perf_counter() - start
        handle.wait()
        durable = time.perf_counter() - start
        dirty = dirty_bytes(entry.folder)
        os.sync()
        time.sleep(_SETTLE_SECONDS)
        spent, seconds = busy_seconds() - busy, time.perf_counter() - start
        busy = busy_seconds()
        time.sleep(_SETTLE_SECONDS)
        idle = (busy_seconds() - busy) / _SETTLE_SECONDS
        method.tidy()
        step_stall = self._train(entry) if self.workload.trains else None
        entry.row.samples.append(Sample(stall, durable, max(0.0, spent - idle * seconds), dirty, step_stall))

    def _train(self, entry: _Entry) -> float:
        """Save beside a training step; returns for how long the method kept it waiting."""
        method, workload = entry.opened(), self.workload
        workload.step()
        os.sync()
        start = time.perf_counter()
        handle = method.save(workload.state(), self._next())
        stall = time.perf_counter() - start
        workload.compute()
        start = time.perf_counter()
        handle.captured()
        stall += time.perf_counter() - start
        workload.update()
        handle.wait()
        method.tidy()
        return stall

    def save_last(self) -> State:
        """Let every method save the same state, and return it."""
        self.workload.step()
        state = self.workload.state()
        step = self._next()

        def save(entry: _Entry) -> None:
            handle = entry.opened().save(state, step)
            handle.captured()
            handle.wait()
            entry.opened().tidy()

        for entry in self._turns():
            self._guarded(entry, save)
        return state

    def close(self) -> None:
        """Close every method; one that failed may fail again, and has said why already."""
        for entry in self.entries:
            if entry.method is not None:
                self._guarded(entry, lambda entry: entry.opened().close())
                entry.method = None

    def restore(self, saved: State, rounds: int) -> None:
        """Restore in newly opened methods, the page cache cold."""
        twin = self.workload.twin()
        into = twin.state()

        def restore(entry: _Entry) -> None:
            scribble(into)
            evict(entry.folder)
            start = time.perf_counter()
            with self._open(entry) as method:
                step = method.load(into)
                seconds = time.perf_counter() - start
            found = differences(saved, into)
            entry.row.verified = not found and step == self.steps
            if found:
                raise _DiffersError(f"the restored state differs in {len(found)} places, {found[0]} among them")
            if step != self.steps:
                raise _DiffersError(f"step {step} was restored, and {self.steps} was saved last")
            entry.row.restores.append(seconds)

        for number in range(rounds):
            for entry in self._turns():
                self.progress(f"restore {number + 1}: {entry.kind.name}")
                self._guarded(entry, restore)
        for entry in self.entries:
            entry.row.stored_bytes = stored_bytes(entry.folder) if entry.folder.exists() else 0

    def _turns(self) -> Iterator[_Entry]:
        """The methods that did not fail, in a new order each time: who comes after whom matters on a shared disk."""
        entries = [entry for entry in self.entries if entry.good]
        self.order.shuffle(entries)
        return iter(entries)

    def _next(self) -> int:
        self.steps += 1
        return self.steps

    def _guarded(self, entry: _Entry, action: Callable[[_Entry], None]) -> None:
        try:
            action(entry)
        except UnsupportedError as error:
            entry.row.problem = entry.row.problem or f"skipped: {error}"
        except _DiffersError as error:
            entry.row.problem = entry.row.problem or f"failed: {error}"
        except Exception as error:  # noqa: BLE001 - another method's failure is a row, not the end of the measurement
            entry.row.problem = entry.row.problem or f"failed: {type(error).__name__}: {error}"[:500]


def _row(kind: type[Method]) -> Row:
    return Row(kind.name, kind.overlaps, kind.durable, kind.atomic, kind.resumable)


def _series(row: Row, nbytes: int) -> dict[str, list[float]]:
    found = {
        "stall": [sample.stall for sample in row.samples],
        "durable": [sample.durable for sample in row.samples],
        "processor": [sample.processor / nbytes * 2**30 for sample in row.samples],
        "step_stall": [sample.step_stall for sample in row.samples if sample.step_stall is not None],
        "restore": row.restores,
    }
    return {name: values for name, values in found.items() if values}


def _sum_up(rows: list[Row], baseline: str, nbytes: int) -> None:
    base = next((_series(row, nbytes) for row in rows if row.method == baseline), {})
    for row in rows:
        dirty = [sample.dirty_bytes for sample in row.samples if sample.dirty_bytes is not None]
        row.dirty_bytes = max(dirty) if dirty else None
        for name, values in _series(row, nbytes).items():
            pairs = zip(values, base.get(name, []), strict=False)  # a method that failed has fewer rounds
            ratios = [value / other for value, other in pairs if other] or [float("nan")]
            row.figures[name] = Measured(*median_interval(values), *median_interval(ratios), len(values))
