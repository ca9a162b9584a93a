"""Running an experiment and keeping what it found."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import traceback
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from examples.paper.lab.experiments import Experiment, Findings, Settings
from examples.paper.lab.figures import draw_rows, draw_timeline
from examples.paper.lab.methods import CLUSTERING, METHODS, Method
from examples.paper.lab.outcome import MethodInfo, Outcome, TimelineFiles, file_name, read_outcome, replace_file
from examples.paper.lab.table import Row, TableError, write_rows
from pccheck_async.bench.machine import survey

__all__ = ["kept", "run_experiment"]

_PACKAGES = (
    "pccheck-async", "torch", "numpy", "uvloop", "msgspec", "cupy-cuda12x", "cupy-cuda13x", "safetensors",
    "torchsnapshot", "torch_checkpointing", "lightning", "scikit-learn",
)  # fmt: skip


def kept(experiment: type[Experiment], settings: Settings, out: Path) -> Outcome | None:
    """Return what an earlier run with the same settings found; None where there is no such run, or it failed."""
    try:
        outcome = read_outcome(out / f"{experiment.name}.json")
    except (TableError, OSError):
        return None
    asked = None if settings.methods is None else list(settings.methods)
    same = (outcome.quick, outcome.repetitions, outcome.methods) == (settings.quick, settings.repetitions, asked)
    whole = all((out / name).exists() for name in outcome.files())
    return outcome if same and whole and not outcome.problem else None


def run_experiment(experiment: type[Experiment], settings: Settings, out: Path) -> Outcome:
    """Run an experiment and write what it found; of an experiment that fails, why.

    A failure, or a run that measures nothing, leaves the findings of an earlier run where they are.

    Args:
        experiment: Which.
        settings: How, and on which filesystem.
        out: The folder for the files.

    Returns:
        What is in ``out`` now, or of a failure what it was.

    Raises:
        OSError: ``out`` cannot be written.
    """
    started, place = datetime.now(UTC), survey(settings.folder)
    problem = "" if (reason := experiment.why_not()) is None else f"skipped: {reason}"
    findings = Findings()
    if not problem:
        try:
            findings = experiment().run(settings)
        except Exception as error:  # noqa: BLE001 - the other experiments go on; what is wrong is written down
            problem = f"failed: {type(error).__name__}: {error}"[:2000] + _where(error)
        else:
            if not findings.rows and not findings.timelines:
                word = "failed" if settings.methods is None else "skipped"  # it may be about other methods
                problem = f"{word}: nothing was measured: {' '.join(findings.notes)}"
    outcome = Outcome(
        name=experiment.name,
        title=experiment.title,
        started=started,
        ended=datetime.now(UTC),
        quick=settings.quick,
        repetitions=settings.repetitions,
        methods=None if settings.methods is None else list(settings.methods),
        place=place,
        versions=_versions(),
        notes=list(findings.notes),
        known=_method_infos(),
        problem=problem,
    )
    if not problem:
        try:
            return _keep(outcome, findings, out)
        except TableError as error:
            outcome = msgspec.structs.replace(outcome, problem=f"failed: {error}")
    if not _has_findings(out / f"{experiment.name}.json"):
        outcome.write(out)
    return outcome


def _keep(outcome: Outcome, findings: Findings, out: Path) -> Outcome:
    own = out / f"{outcome.name}.json"
    before = set(read_outcome(own).files()) if _has_findings(own) else set()
    taken: set[str] = set()
    notes = list(outcome.notes)
    table = f"{outcome.name}.csv"

    def write_table(path: Path) -> None:
        write_rows(path, findings.rows)
        own.unlink(missing_ok=True)  # from here on the files could be of two runs

    replace_file(out / table, write_table)
    figures = _draw_figures(outcome.name, findings.rows, out, taken, notes)
    timelines: dict[str, TimelineFiles] = {}
    for title, timeline in findings.timelines.items():
        trace = file_name(outcome.name, title, ".trace.json", taken)
        replace_file(out / trace, timeline.write)
        png = file_name(outcome.name, title, ".trace.png", taken) if _can_draw() else ""
        if png:
            try:
                replace_file(out / png, partial(draw_timeline, timeline))
            except Exception as error:  # noqa: BLE001 - the numbers are worth more than their picture
                notes.append(f"The timeline {title!r} is not drawn: {error}.")
                png = ""
        timelines[title] = TimelineFiles(trace, png)
    outcome = msgspec.structs.replace(outcome, notes=notes, table=table, figures=figures, timelines=timelines)
    for name in before - set(outcome.files()):
        (out / name).unlink(missing_ok=True)
    outcome.write(out)
    return outcome


def _draw_figures(name: str, rows: Sequence[Row], out: Path, taken: set[str], notes: list[str]) -> dict[str, str]:
    """Draw what can be drawn; adds to the notes what cannot, and why."""
    found: dict[str, str] = {}
    if not _can_draw():
        notes.append("Nothing is drawn: matplotlib is not installed there.")
        return found
    for figure in dict.fromkeys(row.figure for row in rows):
        png = file_name(name, figure, ".png", taken)
        own = [row for row in rows if row.figure == figure]
        try:
            replace_file(out / png, partial(draw_rows, own))
        except Exception as error:  # noqa: BLE001 - the numbers are worth more than their picture
            notes.append(f"Figure {figure} is not drawn: {error}.")
        else:
            found[figure] = png
    return found


def _where(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _has_findings(path: Path) -> bool:
    try:
        return not read_outcome(path).problem
    except (TableError, OSError):
        return False


def _can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _versions() -> dict[str, str]:
    """Return those of the packages that are installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _method_infos() -> dict[str, MethodInfo]:
    """Return what there is to know of every method, those that one experiment has for itself among them."""
    kinds = {kind.name: kind for kind in _kinds(Method) if hasattr(kind, "name")} | METHODS | CLUSTERING
    return {
        name: MethodInfo(
            durable=kind.durable,
            atomic=kind.atomic,
            resumable=kind.resumable,
            overlaps=kind.overlaps,
            about=(kind.__doc__ or "").strip().partition("\n\n")[0].replace("\n    ", " ").replace("``", ""),
            why_not=kind.why_not() or "",
        )
        for name, kind in kinds.items()
    }


def _kinds(kind: type) -> Iterator[type[Method]]:
    each: type[Method]
    for each in kind.__subclasses__():
        if each.__module__.startswith("examples.paper."):
            yield each
        yield from _kinds(each)
