# SPDX-License-Identifier: Apache-2.0
"""``pccheck compare``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.table import Table

import pccheck_async as pccheck
from pccheck_async.cli.output import (
    DIFFERENT,
    Json,
    Name,
    Rank,
    Report,
    Step,
    as_json,
    at_least,
    complain,
    parse_path,
    pick,
    printable,
    progress_bar,
    reporting,
    size,
    table,
)

if TYPE_CHECKING:
    pass


_PLACE = re.compile(r"(.*)@(-?\d{1,20})", re.ASCII | re.DOTALL)


class Side(NamedTuple):
    """A checkpoint to compare: its store (None: the store of the first one) and its step (None: not given)."""

    path: Path | None
    step: int | None


def parse_side(text: str) -> Side:
    """Parse ``PATH``, or ``PATH@STEP`` or ``@STEP`` as in version 0.1, into store and step.

    If a folder has the whole text as its name, the text is a path.
    """
    match = _PLACE.fullmatch(text)
    if match is None or Path(text).is_dir():
        return Side(parse_path(text), None)
    return Side(parse_path(match[1]) if match[1] else None, int(match[2]))


@reporting
def compare(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Store of the first one, or folder of a group.")],
    other: Annotated[
        str | None, typer.Argument(metavar="OTHER", help="That of the second one (default: PATH).")
    ] = None,
    step: Step = None,
    name: Name = None,
    other_step: Annotated[int | None, typer.Option(metavar="STEP", help="Step of the second one.")] = None,
    other_name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the second one.")] = None,
    rank: Rank = None,
    other_rank: Annotated[
        int | None,
        typer.Option(parser=at_least(0), metavar="RANK", help="Rank of the second one (default, of a group: --rank)."),
    ] = None,
    json: Json = False,
) -> Report:
    """Compare two checkpoints, leaf by leaf.

    Shows which leaves differ, in how many elements, and by how much; NaN equals NaN. Each of the two checkpoints is the
    newest of its store, unless a step or a name is given. Tensors that lie on several ranks of a group are compared in
    full, even if divided differently; other values only for the rank of --rank. Verifies all bytes that it reads and
    writes nothing. Safe while a trainer writes to the store, which may take one slot more.

    Exit status: 0 all leaves are equal in every bit, 1 it failed, 2 wrong usage, 3 there is no such checkpoint, 4 they
    differ, or something is lost or damaged.
    """
    first, second = parse_side(path), Side(None, None) if other is None else parse_side(other)
    if first.path is None:
        raise typer.BadParameter(f"{path!r} names no folder")
    if other is None and other_step is None and other_name is None:
        raise typer.BadParameter("which other one? Give OTHER, --other-step or --other-name")
    step, other_step = _step_of(first, step, name, ""), _step_of(second, other_step, other_name, "other-")
    with progress_bar("comparing") as progress:
        comparison = pccheck.stores.compare(
            first.path,
            second.path,
            step=step,
            name=name,
            other_step=other_step,
            other_name=other_name,
            rank=rank,
            other_rank=other_rank,
            progress=progress,
        )
    document = {
        "equal": not comparison.differences,
        "one": as_json(comparison.one),
        "other": as_json(comparison.other),
        **pick(comparison, "leaves", "rank", "other_rank", compared_nbytes="nbytes"),
        "differences": [_difference_as_json(each) for each in comparison.differences],
    }
    return Report(document, _compared(comparison), DIFFERENT if comparison.differences else 0)


def _step_of(side: Side, step: int | None, name: str | None, prefix: str) -> int | None:
    if side.step is None:
        return step
    if step is not None or name is not None:
        raise typer.BadParameter(f"--{prefix}step and --{prefix}name exclude @{side.step}")
    complain(f"write --{prefix}step {side.step}; @{side.step} goes with version 1.1")
    return side.step


def _difference_as_json(each: pccheck.stores.LeafDifference) -> dict[str, Any]:
    facts = pick(each, "path", "change", "one", "other")
    if each.difference is not None:
        facts |= pick(each.difference, elements="total", bits_differ="bits", values_differ="values")
        facts |= pick(each.difference, nan_on_one_side="nans", max_absolute="most_absolute")
        facts |= pick(each.difference, max_relative="most_relative")
    return facts


def _compared(comparison: pccheck.stores.Comparison) -> Iterator[str | Table]:
    if comparison.differences:
        rows = table("differ", "of", "max abs", "max rel", "leaf", right=4)
        for each in comparison.differences:
            rows.add_row(*_difference(each))
        yield rows
    yield (
        f"One: step {comparison.one.step}, counter {comparison.one.counter}. Other: step {comparison.other.step}, "
        f"counter {comparison.other.counter}. {size(comparison.nbytes)} of tensors compared."
    )
    ranks = [f"those of rank {rank}" for rank in (comparison.rank, comparison.other_rank) if rank is not None]
    if ranks:
        what, *others = dict.fromkeys(ranks)
        beside = f" with {others[0]}" if others else ""
        yield f"Each rank has values of its own; {what} were compared{beside}: --rank and --other-rank choose."
    same = comparison.leaves - sum(each.change != "container" for each in comparison.differences)
    which = f"{same} of {comparison.leaves}" if comparison.differences else f"All {comparison.leaves}"
    containers = sum(each.change == "container" for each in comparison.differences)
    yield f"{which} leaves are equal in every bit{f'; {containers} containers differ in kind' if containers else ''}."


def _difference(each: pccheck.stores.LeafDifference) -> tuple[str, ...]:
    path, both = printable(each.path) or "(the state)", f"{each.one} -> {each.other}"
    elements = each.difference
    if elements is None or not elements.bits:
        what = both if each.one and each.other else each.one or each.other
        return "", "", "", "", f"{path}: {each.change}: {printable(what)}"
    notes = [] if each.change == "elements" else [f"{each.change}: {printable(both)}"]
    notes += [f"{elements.nans} NaN on one side"] if elements.nans else []
    if elements.values is not None and elements.values < elements.bits:
        notes.append(f"{elements.bits - elements.values} in bits only")
    largest = ("" if value is None else f"{value:.4g}" for value in (elements.most_absolute, elements.most_relative))
    return str(elements.bits), str(elements.total), *largest, ": ".join(filter(None, [path, ", ".join(notes)]))
