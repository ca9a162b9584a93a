# SPDX-License-Identifier: Apache-2.0
"""``pccheck tune``: measures a disk, and writes the settings for an engine there into a file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

import pccheck_async as pccheck
from pccheck_async.cli.output import (
    Json,
    Report,
    at_least,
    binary_size,
    complain,
    duration,
    parse_path,
    parse_size,
    path_argument,
    reporting,
    seconds,
    size,
    status_of,
    table,
    terminal,
)
from pccheck_async.cli.ranks import read_place


@reporting
def tune(
    path: Annotated[Path, path_argument("PATH", "Folder of the store, or where it will be.")],
    nbytes: Annotated[
        int | None,
        typer.Option(
            "--size",
            parser=parse_size,
            metavar="SIZE",
            help="Size of a checkpoint, such as 1.5GiB (default: the newest one's).",
        ),
    ] = None,
    keep_last: Annotated[
        int,
        typer.Option(
            parser=at_least(1),
            metavar="N",
            help="Checkpoints that the engine will keep (default: 1).",
            show_default=False,
        ),
    ] = 1,
    host_memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_size, metavar="SIZE", help="Most staging memory (default: a quarter of the free memory)."
        ),
    ] = None,
    step_seconds: Annotated[
        float | None,
        typer.Option(parser=seconds(1e-6), metavar="SECONDS", help="Time of a training step: how often to save."),
    ] = None,
    budget_seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            parser=seconds(0.1),
            metavar="SECONDS",
            help="About how long to measure; a slow disk needs more (default: 10).",
            show_default=False,
        ),
    ] = 10.0,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=parse_path,
            metavar="FILE",
            help="A .json file for the settings, or a folder for tuning.json (default: PATH).",
        ),
    ] = None,
    json: Json = False,
) -> Report | int:
    """Measure a disk, and write down settings for an engine there.

    Saves sample checkpoints in a folder inside PATH, which is removed at the end; the store's checkpoints are not
    changed.

    Exit status: 0 tuned, 1 it failed or nothing fits into storage, memory and cores, 2 wrong usage, 3 there is no
    checkpoint in PATH to take the size from, and no --size, 4 the store there is damaged.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from pccheck_async.engine import EngineConfig, EngineLoop, StorageOptions
    from pccheck_async.tuning import check_target
    from pccheck_async.tuning import tune as measure

    check_target(out or path)  # before the minutes of measuring
    config = EngineConfig(keep_last=keep_last, storage=StorageOptions(host_memory=host_memory or "auto"))
    if nbytes is None and (place := read_place(path)).complete:
        nbytes = place.infos[0].nbytes
    if nbytes is None:
        why = place.nothing(None)
        complain(f"no committed checkpoint to take the size from, so give it with --size: {why}")
        return status_of(why)
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    stderr = terminal(stderr=True)
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        with EngineLoop("pccheck-tune") as loop:
            measuring = measure(
                path,
                nbytes=nbytes,
                config=config,
                step_seconds=step_seconds,
                budget_seconds=budget_seconds,
                progress=lambda done, what: bar.update(task, completed=done, description=what),
            )
            tuning = loop.call(measuring)
    written = tuning.write(out or path)
    found = msgspec.to_builtins(tuning) | {"settings": tuning.numbers, "path": str(written)}
    return Report(found, _tuned(tuning, path, out or path, written))


def _tuned(tuning: pccheck.stores.Tuning, path: Path, given: Path, written: Path) -> Iterator[str | Table]:
    headings = ("in flight", "writers", "chunk", "durable after", "rate", "capture", "runs")
    measured = table(*headings, "", right=len(headings))
    settings = tuning.numbers
    for row in tuning.measurements:
        point = row.point
        chosen = all(settings[name] == getattr(point, name) for name in ("max_in_flight", "writers", "chunk_bytes"))
        measured.add_row(
            str(point.max_in_flight),
            str(point.writers),
            binary_size(point.chunk_bytes),
            duration(row.seconds),
            f"{size(int(row.bandwidth))}/s",
            f"{size(int(row.capture_bandwidth))}/s",
            str(row.repetitions),
            "chosen" if chosen else "",
        )
    yield measured
    reasons = table("setting", "value", "why")
    for name in ("max_in_flight", "writers", "chunk_bytes", "host_memory"):
        words = str if name in ("max_in_flight", "writers") else binary_size
        reasons.add_row(name, words(settings[name]), tuning.reasons[name])
    yield reasons
    sample = "" if tuning.sample_nbytes >= tuning.nbytes else f", measured with at most {size(tuning.sample_nbytes)}"
    yield f"Checkpoints of {size(tuning.nbytes)}{sample}, one durable every {duration(tuning.checkpoint_seconds)}."
    if tuning.interval is not None:
        yield (
            f"Save every {_steps(tuning.interval)} (f*) or less often; no engine on this storage can do so more "
            f"often than every {_steps(tuning.interval_floor)} (f_min), 3 % slower training granted."
        )
    yield f"The storage takes {size(int(tuning.bandwidth))}/s, a running write {tuning.stream_cpu:.2f} of a core."
    noise = f"Differences under {tuning.noise:.0%} are noise. " if math.isfinite(tuning.noise) else ""
    yield f"{noise}Measured in {tuning.seconds:.0f} s."
    call = f"stores.read_tuning({str(given)!r})"
    yield f"Written to {written}; use it as CheckpointEngine({str(path)!r}, **{call}), or copy:"
    options = ", ".join(f"{name}={number}" for name, number in settings.items() if name != "max_in_flight")
    yield f"    max_in_flight={settings['max_in_flight']}, storage=StorageOptions({options}),"


def _steps(count: int | None) -> str:
    return "step" if count == 1 else f"{count} steps"
