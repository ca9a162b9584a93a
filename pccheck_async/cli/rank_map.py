# SPDX-License-Identifier: Apache-2.0
"""``pccheck show --ranks``: a table of which rank of a group has its part of which checkpoint, and stage times."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table
from rich.text import Text

from pccheck_async.cli.checkpoints import what_is_lost
from pccheck_async.cli.output import DIFFERENT, NOTHING, Report, complain, size, table, terminal
from pccheck_async.cli.ranks import describe_slowest, problems, read_place, slowest, stage_table, stage_times

if TYPE_CHECKING:
    from pccheck_async.group import Place
    from pccheck_async.medium.status_file import Published

_BAR = 12
_OTHER_COLUMNS, _ENGINE_COLUMN = len(f" rank   newest part   {'':{_BAR}}    "), len("engine   ")
"""Widths in characters of the columns beside the steps: of all others but "engine", and of "engine"."""
_THERE, _LOST, _LACKING, _NOT_YET, _NO_RANK = "■", "!", "x", "·", " "
_STYLES = {_THERE: "green", _LOST: "bold red", _LACKING: "bold red", _NOT_YET: "yellow", _NO_RANK: ""}
_UNEVEN = 1.25
"""Factor over the median above which the largest part is named: all ranks wait until it is written."""


class _Checkpoint(NamedTuple):
    """A checkpoint of a group of ``world`` ranks: bytes of each rank's part, and the ranks whose slots are lost."""

    step: int
    counter: int
    world: int
    nbytes: dict[int, int]
    lost: set[int]


def rank_map(path: Path) -> Report:
    """Return the report: each rank's part of each checkpoint, lost slots, and stage times of engines that run."""
    from pccheck_async.medium.status_file import read_status

    place = read_place(path)
    place.check_group("--ranks shows the ranks of a group")
    folders = {} if place.is_bucket else {rank: place.path / place.folder(rank) for rank in place.stores}
    published = {rank: one for rank, folder in folders.items() if (one := read_status(folder)) is not None}
    times = {rank: stage_times(one.status) for rank, one in published.items() if one.alive}
    gone, lost = what_is_lost(place)
    checkpoints = _checkpoints(place, gone)
    document = {
        "checkpoints": [
            {"step": one.step, "counter": one.counter, "nbytes": {str(rank): n for rank, n in one.nbytes.items()}}
            for one in checkpoints
        ],
        "stage_seconds": {str(rank): seconds for rank, seconds in times.items()},
        "slowest": slowest(times),
    }
    if not checkpoints:
        complain(place.nothing(None))
        return Report(document, (), NOTHING)
    notes, is_bad = problems(place, running=bool(times))
    return Report(
        document, [*_drawn(place, checkpoints, published, times), *notes, *lost], DIFFERENT if gone or is_bad else 0
    )


def _checkpoints(place: Place, gone: Collection[int]) -> list[_Checkpoint]:
    """Return complete and incomplete checkpoints, oldest first; ``gone`` has the counters of those with lost slots."""
    from pccheck_async.upkeep import lost_parts  # and torch

    lost = lost_parts(place) if gone else {}
    steps = {one.key: one.entry.step for one in place.complete} | {one.key: one.step for one in place.incomplete}
    found = []
    for key in sorted(steps):
        parts = place.parts(key)
        world = max(part.world for part in parts.values())
        nbytes = {rank: part.entry.nbytes for rank, part in sorted(parts.items())}
        lost_here = {rank for rank in nbytes if key.counter in gone and (key.counter, rank) in lost}
        found.append(_Checkpoint(steps[key], key.counter, world, nbytes, lost_here))
    return found


def _drawn(
    place: Place,
    checkpoints: Sequence[_Checkpoint],
    published: Mapping[int, Published],
    times: Mapping[int, Mapping[str, float]],
) -> Iterator[str | Table]:
    ranks = sorted({*place.stores, *(rank for one in place.incomplete for rank in one.ranks)})
    running = {rank for rank, one in published.items() if one.alive}
    counted = f"{_counted(len(ranks), 'rank')}, {_running(len(running), len(ranks))}"
    yield f"{place.name}: {counted}; {_completeness(place, checkpoints)}."
    room = terminal().width - _OTHER_COLUMNS - (_ENGINE_COLUMN if published else 0)
    shown = _newest_that_fit(checkpoints, room)
    yield _table(ranks, checkpoints[-shown:], published, is_known={*place.stores})
    marks = {mark for rank in ranks for mark in _marks(rank, checkpoints[-shown:], is_running=rank in running)}
    legend = {
        _THERE: "has its part",
        _LOST: "its slot is lost",
        _LACKING: "lacks it",
        _NOT_YET: "not yet: its engine runs",
    }
    older = len(checkpoints) - shown
    yield ", ".join(f"{mark} {means}" for mark, means in legend.items() if mark in marks) + (
        f". {_counted(older, 'older one')} left out: --json has all." if older else "."
    )
    newest = _newest_parts(checkpoints)
    largest = max(newest, key=lambda rank: newest[rank])
    if newest[largest] > _UNEVEN * (middle := median(newest.values())):
        of_all = f"median of all ranks {size(round(middle))}"
        yield f"Largest: the part of rank {largest} with {size(newest[largest])} ({of_all})."
    if times:
        yield stage_table(times)
        if text := describe_slowest(times):
            yield text
    else:
        yield "Stage times are shown only while the engines of the ranks run."


def _newest_parts(checkpoints: Sequence[_Checkpoint]) -> dict[int, int]:
    """Return the bytes of each rank's newest part."""
    return {rank: nbytes for one in checkpoints for rank, nbytes in one.nbytes.items()}


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _running(running: int, ranks: int) -> str:
    return "none running" if not running else "all running" if running == ranks else f"{running} running"


def _completeness(place: Place, checkpoints: Sequence[_Checkpoint]) -> str:
    counted, lost = _counted(len(checkpoints), "checkpoint"), sum(bool(one.lost) for one in checkpoints)
    if not (complete := place.infos):
        return f"{counted}, none complete"
    facts = [f"{len(complete)} complete"] if place.incomplete else [] if lost else ["complete"]
    facts += [f"{lost} with lost slots"] if lost else []
    return f"{', '.join([counted, *facts])}; newest: step {complete[0].step}, {size(complete[0].nbytes)}"


def _newest_that_fit(checkpoints: Sequence[_Checkpoint], room: int) -> int:
    """Return how many of the newest checkpoints fit into ``room`` characters side by side; at least one."""
    for number, one in enumerate(reversed(checkpoints)):
        room -= len(str(one.step)) + 2
        if room < 0:
            return max(1, number)
    return len(checkpoints)


def _marks(rank: int, checkpoints: Sequence[_Checkpoint], *, is_running: bool) -> list[str]:
    last = max((number for number, one in enumerate(checkpoints) if rank in one.nbytes), default=-1)

    def mark(number: int, one: _Checkpoint) -> str:
        if rank in one.nbytes:
            return _LOST if rank in one.lost else _THERE
        if rank >= one.world:
            return _NO_RANK
        return _NOT_YET if is_running and number > last else _LACKING

    return [mark(number, one) for number, one in enumerate(checkpoints)]


def _table(
    ranks: Sequence[int],
    checkpoints: Sequence[_Checkpoint],
    published: Mapping[int, Published],
    is_known: set[int],
) -> Table:
    """Return a table with a row for each rank; a rank's mark for a checkpoint is below the last digit of its step."""
    widths = [len(str(one.step)) for one in checkpoints]
    newest = _newest_parts(checkpoints)
    most = max(newest.values())
    engine = ("engine",) if published else ()
    steps = "  ".join(str(one.step) for one in checkpoints)
    rows = table("rank", *engine, "newest part", "", steps, right=1)
    for rank in ranks:
        one = published.get(rank)
        state, style = ("-", "dim") if one is None else ("runs", "green") if one.alive else ("died", "bold red")
        marks = Text()
        for width, mark in zip(widths, _marks(rank, checkpoints, is_running=state == "runs"), strict=True):
            marks.append(f"{'  ' if marks else ''}{'':{width - 1}}")
            marks.append(mark, style=_STYLES[mark])
        nbytes = newest.get(rank)
        part = Text("no folder" if rank not in is_known else "none", style="red") if nbytes is None else size(nbytes)
        cells = [Text(state, style=style)] if published else []
        rows.add_row(str(rank), *cells, part, _bar(nbytes or 0, most), marks)
    return rows


def _bar(nbytes: int, most: int) -> Text:
    filled = max(1, round(nbytes / most * _BAR)) if nbytes else 0
    return Text().append("█" * filled, style="cyan").append("░" * (_BAR - filled), style="dim")
