"""What a run of an experiment leaves in a folder, and how it is found there again.

::

    NAME.csv               all rows, as in bench/table.py
    NAME-FIGURE.png        a picture of each figure among them, where matplotlib is installed
    NAME-TITLE.trace.json  a recorded timeline; NAME-TITLE.trace.png is its picture
    NAME.json              an Outcome: the question, the notes, where and how it was measured; names the others

Each file appears whole or not at all, and ``NAME.json`` last: where it is, the others are those of the same run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import msgspec

from examples.paper.lab.table import TableError
from pccheck_async.bench.machine import BenchPlace

__all__ = ["MethodInfo", "Outcome", "TimelineFiles", "file_name", "read_outcome", "read_outcomes", "replace_file"]


class MethodInfo(msgspec.Struct, frozen=True):
    """What the tests found about a method, and its first sentence.

    Attributes:
        durable: It survives a power failure.
        atomic: It survives a kill inside a save.
        resumable: All of a training state comes back.
        overlaps: Its capture runs beside the next step.
        about: What it does.
        why_not: Why it cannot run there, empty where it can.
    """

    durable: bool
    atomic: bool
    resumable: bool
    overlaps: bool = False
    about: str = ""
    why_not: str = ""


class TimelineFiles(msgspec.Struct, frozen=True):
    """Names of the files of a timeline; ``png`` is empty where it was not drawn."""

    trace: str
    png: str = ""


class Outcome(msgspec.Struct, kw_only=True, frozen=True):
    """A run of one experiment.

    Attributes:
        name: The experiment's.
        title: Its question.
        started: When it began, in UTC.
        ended: When it was over.
        quick: Small states and few rounds.
        repetitions: Rounds that were asked for, None for as many as the experiment takes by itself.
        methods: Methods that were asked for, None for all.
        place: Machine and filesystem.
        versions: Of the packages that were measured, by name.
        notes: What a reader must know, one sentence each.
        table: Name of the CSV, empty where nothing was found.
        figures: Names of the pictures, by figure.
        timelines: Names of their files, by title.
        known: Every method that there was, by name.
        problem: Why there are no findings, empty where there are.
    """

    name: str
    title: str
    started: datetime
    ended: datetime
    quick: bool
    repetitions: int | None = None
    methods: list[str] | None = None
    place: BenchPlace
    versions: dict[str, str] = {}
    notes: list[str] = []
    table: str = ""
    figures: dict[str, str] = {}
    timelines: dict[str, TimelineFiles] = {}
    known: dict[str, MethodInfo] = {}
    problem: str = ""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.ended - self.started).total_seconds()

    def files(self) -> list[str]:
        """Return the names of the files beside its own."""
        traces = [name for files in self.timelines.values() for name in (files.trace, files.png) if name]
        return [name for name in (self.table, *self.figures.values(), *traces) if name]

    def write(self, folder: Path) -> None:
        """Write ``NAME.json``."""
        encoded = msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"
        replace_file(folder / f"{self.name}.json", lambda path: path.write_bytes(encoded))


def read_outcome(path: Path) -> Outcome:
    """Read what :meth:`Outcome.write` wrote.

    Raises:
        TableError: it is something else, or names files outside its folder.
        OSError: it cannot be read.
    """
    try:
        outcome = msgspec.json.decode(path.read_bytes(), type=Outcome)
    except msgspec.DecodeError as error:
        raise TableError(f"{path} is no outcome of an experiment: {error}") from error
    for name in (outcome.name, *outcome.files()):
        if not name.startswith(path.stem) or Path(name).name != name:
            raise TableError(f"{path} names {name!r}, which is no file of its own")
    return outcome


def read_outcomes(folder: Path) -> list[Outcome]:
    """Read all of a folder, by the time they began.

    Raises:
        TableError: one of them is damaged.
        OSError: one of them cannot be read.
    """
    paths = [path for path in folder.glob("*.json") if not path.name.endswith(".trace.json")]
    return sorted((read_outcome(path) for path in paths), key=lambda outcome: (outcome.started, outcome.name))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file beside ``path``, which then takes its name: an interruption leaves the old one."""
    beside = path.with_name(f".{path.name}.writing")
    try:
        write(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def file_name(name: str, what: str, suffix: str, taken: set[str]) -> str:
    """Return a name such as ``NAME-WHAT.png``, whatever letters ``what`` has, and add it to ``taken``."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", what).strip("._-")[:80] or "untitled"
    found, number = f"{name}-{plain}{suffix}", 1
    while found in taken:
        number += 1
        found = f"{name}-{plain}-{number}{suffix}"
    taken.add(found)
    return found
