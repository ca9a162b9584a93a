"""``python -m examples.paper goodput``: what failures leave of a measured throughput."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from examples.paper.lab.goodput import COUNTINGS, Case, Run, count_failures, poisson_failures, predict, read_trace
from examples.paper.lab.table import Row, TableError, read_rows, write_rows
from pccheck_async.cli.output import complain

__all__ = ["parse_durable", "run"]

_CASES: tuple[Case, ...] = ("average", "worst")


def parse_durable(texts: list[str]) -> defaultdict[float, float]:
    """Return Tw by interval from "3.5" (all others) and "10=2.1"."""
    found: defaultdict[float, float] = defaultdict(lambda: math.inf)
    for text in texts:
        interval, _, seconds = text.rpartition("=")
        try:
            number, key = float(seconds), float(interval) if interval else None
        except ValueError:
            raise typer.BadParameter(f"{text!r}: say it like 3.5, or like 10=2.1 for interval 10") from None
        if not number >= 0:
            raise typer.BadParameter(f"{text!r}: a time is not negative")
        if key is None:
            found.default_factory = lambda number=number: number
        else:
            found[key] = number
    return found


def run(
    table: Path,
    *,
    trace: Path | None,
    per_machine: int,
    mtbf: float | None,
    seconds: float,
    seeds: int,
    load_seconds: float,
    durable_seconds: defaultdict[float, float],
    max_in_flight: int,
    out: Path | None,
) -> int:
    """Predict, print, write, and return the exit status."""
    try:
        rows = read_rows(table)
        runs = _runs(trace, per_machine, mtbf, seconds, seeds)
        predicted = [
            row
            for case in _CASES
            for each in runs
            for row in predict(
                rows,
                each,
                case,
                load_seconds=load_seconds,
                durable_seconds={row.x: durable_seconds[row.x] for row in rows},
                max_in_flight=max_in_flight,
            )
        ]
        if out is not None:
            write_rows(out, predicted)
    except (TableError, OSError) as error:
        complain(error)
        return 1
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    for each in runs:
        console.print(Text(_said(each)), soft_wrap=True)
    console.print(_shown(predicted))
    if out is not None:
        console.print(Text(f"Written to {out}"), soft_wrap=True)
    return 0


def _runs(trace: Path | None, per_machine: int, mtbf: float | None, seconds: float, seeds: int) -> list[Run]:
    if trace is not None:
        read = read_trace(trace)
        return [
            Run(counting, read.seconds, (count_failures(read, counting, per_machine=per_machine),))
            for counting in COUNTINGS
        ]
    assert mtbf is not None
    drawn = tuple(len(poisson_failures(mtbf, seconds, seed=seed)) for seed in range(seeds))
    return [Run(f"MTBF {mtbf:g} s", seconds, drawn)]


def _said(run: Run) -> str:
    count = f"{median(run.failures):g} failures in {run.seconds / 3600:.2f} h"
    meaning = next((meaning for counting, meaning in COUNTINGS.items() if counting == run.label), "")
    spread = f" (median of {len(run.failures)} draws, {min(run.failures)} to {max(run.failures)})"
    return f"{run.label}: {count}" + (f": {meaning}" if meaning else spread)


def _shown(rows: list[Row]) -> Table:
    """Medians: a line per workload, method and interval, a column per way to count and case."""
    labels = list(dict.fromkeys(row.series for row in rows))
    values: dict[tuple[str, str, float], dict[str, list[float]]] = {}
    for row in rows:
        values.setdefault((row.workload, row.method, row.x), {}).setdefault(row.series, []).append(row.value)
    table = Table(box=SIMPLE, pad_edge=False)
    for heading in ("workload", "method"):
        table.add_column(heading, no_wrap=True)
    for heading in ("interval", *labels):
        table.add_column(Text(heading), justify="right")
    for (workload, method, x), cells in values.items():
        table.add_row(Text(workload), Text(method), f"{x:g}", *(f"{median(cells[label]):.4g}" for label in labels))
    return table
