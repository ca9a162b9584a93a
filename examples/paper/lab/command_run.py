"""``python -m examples.paper run``: the experiments, one after the other."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from examples.paper.lab.experiments import EXPERIMENTS, Experiment, Settings
from examples.paper.lab.keeping import kept, run_experiment
from examples.paper.lab.outcome import Outcome
from pccheck_async.cli.output import complain, size
from pccheck_async.medium.filesystem import IN_MEMORY, filesystem_type

__all__ = ["INTERRUPTED", "run", "show_list"]

INTERRUPTED = 130
_ROOM = {True: 2 * 10**9, False: 10 * 10**9}
"""Free bytes below which a run, quick or not, says that it may not be enough."""


def show_list() -> int:
    """Print which experiments there are, and return the exit status."""
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("experiment", no_wrap=True)
    table.add_column("question", overflow="fold")
    table.add_column("here", overflow="fold")
    for name, experiment in EXPERIMENTS.items():
        reason = experiment.why_not()
        table.add_row(Text(name), Text(experiment.title), Text("runs" if reason is None else f"does not run: {reason}"))
    _stdout().print(table)
    return 0


def run(
    names: Sequence[str],
    *,
    folder: Path,
    out: Path,
    quick: bool,
    repetitions: int | None,
    methods: Sequence[str] | None,
    resume: bool,
) -> int:
    """Run experiments, print what became of each, and return the exit status."""
    if unknown := [name for name in names if name not in EXPERIMENTS]:
        complain(f"there is no experiment {unknown[0]!r}; there are: {', '.join(EXPERIMENTS)}")
        return 2
    chosen = [experiment for name, experiment in EXPERIMENTS.items() if not names or name in names]
    if not chosen:
        complain("there are no experiments")
        return 2
    ended: dict[str, tuple[Outcome, bool]] = {}
    status = 0
    try:
        for each in (folder, out):
            each.mkdir(parents=True, exist_ok=True)
        _warn(folder, quick=quick)
        status = _run_all(chosen, Settings(folder, quick, repetitions, methods), out, ended, resume=resume)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except OSError as error:
        complain(error)
        status = 1
    if ended:
        _stdout().print(_shown(ended))
    if status == INTERRUPTED:
        missing = [experiment.name for experiment in chosen if experiment.name not in ended]
        complain(f"interrupted; {', '.join(missing)} not measured; the same command with --resume goes on there")
    skipped = [name for name in names if ended.get(name) and ended[name][0].problem.startswith("skipped")]
    return status or (1 if skipped else 0)


def _run_all(
    chosen: Sequence[type[Experiment]],
    settings: Settings,
    out: Path,
    ended: dict[str, tuple[Outcome, bool]],
    *,
    resume: bool,
) -> int:
    console = Console(stderr=True, highlight=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    status = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(chosen))
        for experiment in chosen:
            name = experiment.name

            def tell(what: str, name: str = name) -> None:
                bar.update(task, description=f"{name}: {what}")

            earlier = kept(experiment, settings, out) if resume else None
            if earlier is None:
                tell("starting")
                if not console.is_terminal:
                    console.print(Text(f"{name}: running"), soft_wrap=True)
                own = Settings(settings.folder, settings.quick, settings.repetitions, settings.methods, tell)
                outcome = run_experiment(experiment, own, out)
            else:
                outcome = earlier
            ended[name] = outcome, earlier is None
            if outcome.problem.startswith("failed"):
                status = 1
            said = outcome.problem or (f"done in {outcome.seconds:.0f} s" if earlier is None else "there already")
            console.print(Text(f"{name}: {said}"), soft_wrap=True)
            bar.advance(task)
    return status


def _warn(folder: Path, *, quick: bool) -> None:
    kind, free = filesystem_type(folder), shutil.disk_usage(folder).free
    if kind in IN_MEMORY:
        complain(f"{folder} is in memory ({kind}): this measures no storage")
    if free < _ROOM[quick]:
        complain(f"{size(free)} are free in {folder}: with less than {size(_ROOM[quick])} an experiment may fail")


def _shown(ended: dict[str, tuple[Outcome, bool]]) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("experiment", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("files, or why there are none", overflow="fold")
    for name, (outcome, now) in ended.items():
        word = outcome.problem.partition(":")[0] or ("measured" if now else "kept")
        files = outcome.problem.partition(": ")[2] or ", ".join((f"{name}.json", *outcome.files()))
        table.add_row(Text(name), word, f"{outcome.seconds:.1f}", Text(files))
    return table


def _stdout() -> Console:
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)
