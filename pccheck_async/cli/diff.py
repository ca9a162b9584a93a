"""``pccheck diff``: how two checkpoints differ."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import typer
from rich.text import Text

from pccheck_async import CheckpointError, Comparison, LeafDifference, compare_checkpoints
from pccheck_async.cli.output import DIFFERENT, as_json, console, dump, print_table, progress_bar, refuse, table
from pccheck_async.cli.paths import parse_path
from pccheck_async.cli.show import printable, size

__all__ = ["parse_place", "run"]

_PLACE = re.compile(r"(.*)@(-?\d{1,20})", re.ASCII | re.DOTALL)


class Place(NamedTuple):
    """A checkpoint by its store and step; no folder for the store of the other one, no step for the newest."""

    path: Path | None
    step: int | None


def parse_place(text: str) -> Place:
    """Return the store and the step of ``PATH``, ``PATH@STEP`` or ``@STEP``; a folder of that very name is a path."""
    match = _PLACE.fullmatch(text)
    if match is None or Path(text).is_dir():
        return Place(parse_path(text), None)
    return Place(parse_path(match[1]) if match[1] else None, int(match[2]))


def run(one: str, other: str, *, json: bool) -> int:
    """Compare two checkpoints and return the exit status."""
    first, second = parse_place(one), parse_place(other)
    if first.path is None:
        raise typer.BadParameter(f"{one!r} names no folder: the first place is PATH or PATH@STEP")
    try:
        with progress_bar("comparing") as progress:
            found = compare_checkpoints(
                first.path, second.path, step=first.step, other_step=second.step, progress=progress
            )
    except (CheckpointError, OSError, ValueError, MemoryError) as error:
        return refuse(error)
    if json:
        dump(_as_json(found))
    else:
        _print(found)
    return DIFFERENT if found.differences else 0


def _as_json(found: Comparison) -> dict[str, Any]:
    return {
        "equal": not found.differences,
        "one": as_json(found.one),
        "other": as_json(found.other),
        "leaves": found.leaves,
        "compared_nbytes": found.nbytes,
        "differences": [_difference_as_json(each) for each in found.differences],
    }


def _difference_as_json(each: LeafDifference) -> dict[str, Any]:
    result: dict[str, Any] = {"path": each.path, "change": each.change, "one": each.one, "other": each.other}
    found = each.difference
    if found is None:
        return result
    return result | {
        "elements": found.total,
        "bits_differ": found.bits,
        "values_differ": found.values,
        "nan_on_one_side": found.nans,
        "max_absolute": found.most_absolute,
        "max_relative": found.most_relative,
    }


def _print(found: Comparison) -> None:
    screen = console()
    if found.differences:
        rows = table("differ", "of", "max abs", "max rel", "what", "leaf", right=4)
        for each in found.differences:
            rows.add_row(*_row(each))
        print_table(screen, rows)
    same = found.leaves - sum(each.change != "container" for each in found.differences)
    lines = [
        f"One: step {found.one.step}, counter {found.one.counter}. Other: step {found.other.step}, counter "
        f"{found.other.counter}. {size(found.nbytes)} of tensors compared.",
        f"{same} of {found.leaves} leaves are equal in every bit."
        if found.differences
        else f"All {found.leaves} leaves are equal in every bit.",
    ]
    for line in lines:
        screen.print(Text(line), soft_wrap=True)


def _row(each: LeafDifference) -> tuple[Text, ...]:
    found, path = each.difference, printable(each.path) or "(the state)"
    if found is None or not found.bits:
        change = f"{each.change}: {each.one} -> {each.other}" if each.one and each.other else each.change
        words = f"{path}" if each.one and each.other else f"{path}  {each.one or each.other}"
        return (*[Text("")] * 4, Text(printable(change)), Text(printable(words)))
    nans = f", {found.nans} NaN on one side" if found.nans else ""
    bits_only = found.values is not None and found.values < found.bits
    only = f", {found.bits - (found.values or 0)} in bits only" if bits_only else ""
    absolute = "" if found.most_absolute is None else f"{found.most_absolute:.4g}"
    relative = "" if found.most_relative is None else f"{found.most_relative:.4g}"
    what = f"{each.change}{f': {each.one} -> {each.other}' if each.change != 'elements' else ''}{nans}{only}"
    cells = (str(found.bits), str(found.total), absolute, relative, printable(what), path)
    return tuple(Text(cell) for cell in cells)
