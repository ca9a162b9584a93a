"""What measuring finds: every sample, a row for each method, and where it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from examples.paper.lab.medians import median_interval
from pccheck_async.bench.machine import BenchPlace

__all__ = ["Measured", "Result", "Row", "Sample", "series", "sum_up"]


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
        samples: Every save, round after round; fewer than there were rounds where the method used up its time.
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
        limits: Seconds in which the disk moved as many bytes around each round, by the figure whose limit that is:
            ``durable`` and ``restore``; empty where that was not measured.
        limit_ways: How it was fastest, by figure.
    """

    rows: list[Row]
    workload: str
    state_bytes: int
    rounds: int
    baseline: str
    place: BenchPlace
    limits: dict[str, list[float]] = field(default_factory=dict)
    limit_ways: dict[str, str] = field(default_factory=dict)


def series(row: Row, nbytes: int) -> dict[str, list[float]]:
    """Return what was measured of a method, round by round, by figure; see :class:`Row` for the units."""
    found = {
        "stall": [sample.stall for sample in row.samples],
        "durable": [sample.durable for sample in row.samples],
        "processor": [sample.processor / nbytes * 2**30 for sample in row.samples],
        "step_stall": [sample.step_stall for sample in row.samples if sample.step_stall is not None],
        "restore": row.restores,
    }
    return {name: values for name, values in found.items() if values}


def sum_up(rows: Sequence[Row], baseline: str, nbytes: int) -> None:
    """Fill in the figures of all rows; ratios are to the row of ``baseline``."""
    base = next((series(row, nbytes) for row in rows if row.method == baseline), {})
    for row in rows:
        dirty = [sample.dirty_bytes for sample in row.samples if sample.dirty_bytes is not None]
        row.dirty_bytes = max(dirty) if dirty else None
        for name, values in series(row, nbytes).items():
            pairs = zip(values, base.get(name, []), strict=False)  # a method that failed has fewer rounds
            ratios = [value / other for value, other in pairs if other] or [float("nan")]
            row.figures[name] = Measured(*median_interval(values), *median_interval(ratios), len(values))
