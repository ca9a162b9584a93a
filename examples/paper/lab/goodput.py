"""Goodput under failures: the model behind figure 9 of PCcheck (ASPLOS'25), for any trace.

Training for T seconds with F failures loses R seconds at each: loading the checkpoint, and computing again what came
after it. What is left makes progress at the throughput of training with checkpoints, one step in tf seconds::

    goodput = max(0, (T - R F) / (T tf))

R is at worst ``load + f t + unfinished`` and on average ``load + (f t + unfinished) / 2``. There t is the time of a
step without checkpoints, and ``unfinished`` what is lost beyond an interval because the newest checkpoints were still
on their way: nothing where training waits for them (GPM, torch.save), ``f t`` with one in the background (CheckFreq;
the model takes Gemini alike), ``min(Tw, N f t)`` with N of them, each durable after Tw (PCcheck).
"""

from __future__ import annotations

import csv
import math
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from examples.paper.lab.table import Row, TableError

__all__ = [
    "COUNTINGS",
    "Case",
    "Counting",
    "Durable",
    "Run",
    "Trace",
    "count_failures",
    "goodput",
    "poisson_failures",
    "predict",
    "read_trace",
    "redo_seconds",
]

Case = Literal["average", "worst"]
Counting = Literal["changes", "drops", "events"]

COUNTINGS: Mapping[Counting, str] = {
    "changes": "every whole machine that leaves or arrives, those of the start included, as PCcheck's artifact counts",
    "drops": "every whole machine that leaves",
    "events": "every sample at which at least one whole machine has left, however many",
}
"""The ways to count failures in a trace, and what each takes for one."""

Durable = float | Mapping[float, float]
"""Seconds until a checkpoint is durable (Tw): one number, or by interval as in a run whose disk was shared."""

_WAITING = frozenset(
    {
        *("ideal", "gpm", "torch_save", "torch_save_fsync", "torch_save_safe"),
        *("GPM", "torch.save", "torch.save + fsync", "torch.save + fsync + rename"),
        *("dcp.save", "torchsnapshot", "safetensors + fsync + rename", "DeepSpeed FastFileWriter"),
    }
)
_ONE_IN_BACKGROUND = frozenset(
    {
        *("checkfreq", "gemini", "CheckFreq", "dcp.async_save thread", "dcp.async_save process"),
        *("torch_checkpointing", "torchsnapshot async", "Lightning AsyncCheckpointIO"),
    }
)
_SEVERAL = frozenset({"pccheck", "pccheck overlapped", "pccheck_published"})
_KNOWN = _WAITING | _ONE_IN_BACKGROUND | _SEVERAL
_IDEAL_OF = ("none", "pccheck", "pccheck_published")
"""Whose throughput without checkpoints is the ideal's."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What was available over time.

    Attributes:
        times: Seconds, ascending.
        available: GPUs (or whatever the machines consist of) at each of these times.
    """

    times: Sequence[float]
    available: Sequence[int]

    @property
    def seconds(self) -> float:
        """From the first sample to the last (T)."""
        return self.times[-1] - self.times[0]


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a CSV with a heading, a column ``Time`` in seconds, and the number available in the last column.

    Raises:
        TableError: it is not one, or holds fewer than two samples; names the line.
        OSError: it cannot be read.
    """
    times: list[float] = []
    available: list[int] = []
    with Path(path).open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        heading = next(reader, [])
        if "Time" not in heading[:-1]:
            raise TableError(f"{os.fspath(path)}: no column 'Time' before the last one; the columns are {heading}")
        column = heading.index("Time")
        for cells in reader:
            try:
                time, count = float(cells[column]), int(cells[-1])
            except (ValueError, IndexError):
                raise TableError(f"{os.fspath(path)}, line {reader.line_num}: no time and number: {cells}") from None
            if not math.isfinite(time) or count < 0 or (times and time <= times[-1]):
                raise TableError(
                    f"{os.fspath(path)}, line {reader.line_num}: times ascend and numbers are not negative: {cells}"
                )
            times.append(time)
            available.append(count)
    if len(times) < 2:
        raise TableError(f"{os.fspath(path)}: a trace has at least two samples")
    return Trace(times, available)


def count_failures(trace: Trace, counting: Counting, *, per_machine: int = 4) -> int:
    """Return the failures (F) in a trace, counted in one of the :data:`COUNTINGS`.

    Args:
        trace: What was available over time.
        counting: What to take for a failure.
        per_machine: How many of the available things make a machine; changes of fewer at a time do not count.
    """
    if per_machine < 1:
        raise ValueError(f"per_machine is at least 1, not {per_machine!r}")
    pairs = list(zip(trace.available, trace.available[1:], strict=False))
    left = [max(0, before - after) // per_machine for before, after in pairs]
    if counting == "drops":
        return sum(left)
    if counting == "events":
        return sum(count > 0 for count in left)
    arrived = sum(max(0, after - before) // per_machine for before, after in pairs)
    return trace.available[0] // per_machine + arrived + sum(left)


def poisson_failures(mtbf_seconds: float, seconds: float, *, seed: int) -> tuple[float, ...]:
    """Return the times of failures that come independently of each other, on average one in ``mtbf_seconds``.

    Args:
        mtbf_seconds: Mean time between failures.
        seconds: How long to go on (T); all times are below that.
        seed: The same seed gives the same failures.
    """
    if not 0 < mtbf_seconds < math.inf or not 0 <= seconds < math.inf:
        raise ValueError(f"both times are finite and the first is positive, not {mtbf_seconds!r} and {seconds!r}")
    generator = random.Random(seed)
    times = []
    now = generator.expovariate(1 / mtbf_seconds)
    while now < seconds:
        times.append(now)
        now += generator.expovariate(1 / mtbf_seconds)
    return tuple(times)


def redo_seconds(
    method: str,
    case: Case,
    *,
    interval: float,
    step_seconds: float,
    load_seconds: float,
    durable_seconds: float = math.inf,
    max_in_flight: int = 1,
) -> float:
    """Return what one failure costs (R), as at the top of this module.

    Args:
        method: One that the model knows, by its name in the tables.
        case: The average failure, or the worst moment for one.
        interval: Steps between checkpoints (f).
        step_seconds: A step without checkpoints (t).
        load_seconds: Loading a checkpoint (l).
        durable_seconds: Until a checkpoint is durable (Tw). Unknown, it is taken for the longest that it can be in
            steady state, N f t. Only PCcheck's bound asks for it.
        max_in_flight: Checkpoints in flight (N). Only PCcheck's bound asks for it.

    Raises:
        ValueError: the model does not say what ``method`` loses.
    """
    between = interval * step_seconds
    if method in _WAITING:
        unfinished = 0.0
    elif method in _ONE_IN_BACKGROUND:
        unfinished = between
    elif method in _SEVERAL:
        unfinished = min(durable_seconds, max_in_flight * between)
    else:
        raise ValueError(
            f"the model does not say what {method!r} loses in a failure; it knows {', '.join(sorted(_KNOWN))}"
        )
    lost = between + unfinished
    return load_seconds + (lost if case == "worst" else lost / 2)


def goodput(*, seconds: float, failures: int, redo_seconds: float, step_seconds: float) -> float:
    """Return the steps per second that count in the end: ``max(0, (T - R F) / (T tf))``.

    Args:
        seconds: Length of the run (T).
        failures: How many there were (F).
        redo_seconds: What each cost (R).
        step_seconds: A step of training with checkpoints (tf), its share of their overhead included.
    """
    if not (seconds > 0 and step_seconds > 0):
        raise ValueError(f"seconds and step_seconds are positive, not {seconds!r} and {step_seconds!r}")
    return max(0.0, (seconds - redo_seconds * failures) / (seconds * step_seconds))


@dataclass(frozen=True, slots=True)
class Run:
    """A run to predict.

    Attributes:
        label: What the predictions are called, such as "drops".
        seconds: Its length (T).
        failures: How many there were in each repetition (F): one number for a trace, several for drawn failures.
    """

    label: str
    seconds: float
    failures: Sequence[int]


def predict(
    rows: Iterable[Row],
    run: Run,
    case: Case,
    *,
    load_seconds: float,
    durable_seconds: Durable = math.inf,
    max_in_flight: int = 1,
) -> list[Row]:
    """Return figure 9 from figure 8: the goodput of every method at every interval, and the ideal.

    A method's time of a step without checkpoints is that of its own rows at interval 0, else that of method ``none``.
    The ideal has no overhead and nothing unfinished. What the model knows no rule for is left out.

    Args:
        rows: Throughput in steps per second by interval (figure 8); medians of the repetitions are used.
        run: How long, and how many failures.
        case: The average failure, or the worst.
        load_seconds: Loading a checkpoint (l).
        durable_seconds: Until a checkpoint of PCcheck is durable (Tw).
        max_in_flight: Its checkpoints in flight (N).

    Returns:
        Rows of figure 9, a repetition for each number of failures.

    Raises:
        TableError: there are no rows of figure 8, or none without checkpoints.
    """
    measured = _throughput(rows)
    if not measured:
        raise TableError("there are no rows of figure 8 (throughput by interval) to start from")
    predicted = []
    for workload, methods in measured.items():
        plain = _plain(workload, methods)
        without = {method: found.get(0.0, plain) for method, found in methods.items()}
        known = {method: found for method, found in methods.items() if method in _KNOWN}
        intervals = sorted({interval for found in methods.values() for interval in found})
        best = next((without[method] for method in _IDEAL_OF if method in without), plain)
        known["ideal"], without["ideal"] = dict.fromkeys(intervals, best), best
        for method, found in known.items():
            for interval, throughput in found.items():
                redo = redo_seconds(
                    method,
                    case,
                    interval=interval,
                    step_seconds=1 / without[method],
                    load_seconds=load_seconds,
                    durable_seconds=_durable(durable_seconds, interval),
                    max_in_flight=max_in_flight,
                )
                predicted += [
                    Row(
                        figure="9",
                        workload=workload,
                        method=method,
                        series=f"{run.label}, {case}",
                        x=interval,
                        repetition=repetition,
                        value=goodput(
                            seconds=run.seconds, failures=failures, redo_seconds=redo, step_seconds=1 / throughput
                        ),
                        unit="steps/s",
                    )
                    for repetition, failures in enumerate(run.failures)
                ]
    return predicted


def _throughput(rows: Iterable[Row]) -> dict[str, dict[str, dict[float, float]]]:
    """Return medians by workload, method and interval."""
    values: dict[str, dict[str, dict[float, list[float]]]] = {}
    for row in rows:
        if row.figure == "8":
            if not row.value > 0 or row.x < 0:
                raise TableError(f"throughputs are positive and intervals not negative, not as in {row}")
            methods = values.setdefault(row.workload, {})
            methods.setdefault(row.method, {}).setdefault(row.x, []).append(row.value)
    return {
        workload: {method: {x: median(many) for x, many in found.items()} for method, found in methods.items()}
        for workload, methods in values.items()
    }


def _plain(workload: str, methods: Mapping[str, Mapping[float, float]]) -> float:
    """Return the throughput without checkpoints."""
    if "none" in methods:
        return next(iter(methods["none"].values()))
    without = [found[0.0] for found in methods.values() if 0.0 in found]
    if not without:
        raise TableError(f"workload {workload!r}: no row of method 'none', and none at interval 0, tells the step time")
    return max(without)


def _durable(seconds: Durable, interval: float) -> float:
    return seconds if isinstance(seconds, int | float) else seconds.get(interval, math.inf)
