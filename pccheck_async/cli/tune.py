"""``pccheck tune``: measure a storage, and write down the settings for an engine there."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pccheck_async import CheckpointError, Measurement, Tuning, list_checkpoints
from pccheck_async.cli.output import console, dump, nothing_in, print_table
from pccheck_async.cli.show import complain, size
from pccheck_async.engine.config import EngineConfig
from pccheck_async.tuning.tuner import tune_blocking

__all__ = ["FAILED", "SIZELESS", "parse_size", "run"]

FAILED = 1
SIZELESS = 3

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?", re.ASCII)


def run(
    path: Path,
    *,
    nbytes: int | None,
    keep_last: int,
    host_memory: int | None,
    step_seconds: float | None,
    budget_seconds: float,
    out: Path | None,
    json: bool,
) -> int:
    """Tune, print what was found, write the settings, and return the exit status."""
    try:
        config = EngineConfig(keep_last=keep_last, host_memory=host_memory or "auto")
        nbytes = nbytes or next((info.nbytes for info in list_checkpoints(path)), None)
        if nbytes is None:
            complain(f"no committed checkpoint to take the size from, so say it with --size: {nothing_in(path)}")
            return SIZELESS
        columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        stderr = Console(stderr=True)
        with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
            task = bar.add_task("", total=1.0)
            tuning = tune_blocking(
                path,
                nbytes=nbytes,
                config=config,
                step_seconds=step_seconds,
                budget_seconds=budget_seconds,
                progress=lambda done, what: bar.update(task, completed=done, description=what),
            )
        written = tuning.write(out or path)
    except (CheckpointError, OSError, ValueError) as error:
        complain(error)
        return FAILED
    if json:
        dump(msgspec.to_builtins(tuning) | {"path": str(written)})
    else:
        _print(tuning, path, out or path, written)
    return 0


def parse_size(text: str) -> int:
    """Return a size in bytes: "1073741824", "1GiB" and "1.5 GB" (units of 1000 bytes)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; say it like 500MB, 1.5GiB or 1073741824")
    number, unit, binary = match.groups()
    nbytes = float(number) * (1024 if binary else 1000) ** " kMGT".index(unit.replace("K", "k") or " ")
    if not 1 <= nbytes < 1 << 63:
        raise typer.BadParameter("a size is at least 1 byte, and less than 8 EiB")
    return int(nbytes)


def _print(tuning: Tuning, path: Path, given: Path, written: Path) -> None:
    screen = console()
    print_table(screen, _measurements(tuning))
    print_table(screen, _settings(tuning))
    sample = "" if tuning.sample_nbytes >= tuning.nbytes else f", measured with at most {size(tuning.sample_nbytes)}"
    lines = [
        f"Checkpoints of {size(tuning.nbytes)}{sample}, one durable every {_seconds(tuning.checkpoint_seconds)}.",
        f"The storage takes {size(int(tuning.bandwidth))}/s, a running write {tuning.stream_cpu:.2f} of a core.",
        (f"Differences under {tuning.noise:.0%} are noise. " if math.isfinite(tuning.noise) else "")
        + f"Measured in {tuning.seconds:.0f} s.",
    ]
    if tuning.interval is not None:
        lines.insert(
            1,
            f"Save every {_steps(tuning.interval)} (f*) or less often; no engine on this storage can do so more "
            f"often than every {_steps(tuning.interval_floor)} (f_min), 3 % slower training granted.",
        )
    call = f"read_tuning({str(given)!r})"
    lines.append(f"Written to {written}; use it as CheckpointEngine({str(path)!r}, **{call}).")
    for line in lines:
        screen.print(Text(line), soft_wrap=True)


def _measurements(tuning: Tuning) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    for heading in ("in flight", "writers", "chunk", "durable after", "rate", "capture", "runs"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in tuning.measurements:
        point = row.point
        table.add_row(
            str(point.max_in_flight),
            str(point.writers),
            _binary(point.chunk_bytes),
            _seconds(row.seconds),
            f"{size(int(row.bandwidth))}/s",
            f"{size(int(row.capture_bandwidth))}/s",
            str(row.repetitions),
            "chosen" if _is_chosen(row, tuning) else "",
        )
    return table


def _is_chosen(row: Measurement, tuning: Tuning) -> bool:
    point, settings = row.point, tuning.settings
    return (point.max_in_flight, point.writers, point.chunk_bytes) == (
        settings["max_in_flight"],
        settings["writers"],
        settings["chunk_bytes"],
    )


def _settings(tuning: Tuning) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    values = {
        "max_in_flight": str(tuning.settings["max_in_flight"]),
        "writers": str(tuning.settings["writers"]),
        "chunk_bytes": _binary(tuning.settings["chunk_bytes"]),
        "host_memory": _binary(tuning.settings["host_memory"]),
    }
    for name, value in values.items():
        table.add_row(name, value, Text(tuning.reasons[name]))
    return table


def _binary(nbytes: int) -> str:
    """In the largest unit of 1024 that it is a whole number of."""
    units = ["B", "KiB", "MiB", "GiB"]
    while nbytes and nbytes % 1024 == 0 and len(units) > 1:
        nbytes //= 1024
        del units[0]
    return f"{nbytes} {units[0]}"


def _steps(count: int | None) -> str:
    return "step" if count == 1 else f"{count} steps"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
