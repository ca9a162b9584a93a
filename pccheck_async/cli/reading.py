"""The commands that only read stores: ``ls``, ``show``, ``verify`` and ``diff``."""

from __future__ import annotations

import json as jsonlib
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.tree import Tree

import pccheck_async as pccheck
from pccheck_async.cli.output import (
    DIFFERENT,
    NOTHING,
    Json,
    Report,
    Step,
    StoreFolder,
    as_json,
    captured_at,
    complain,
    json_value,
    nothing_in,
    parse_path,
    printable,
    progress_bar,
    reporting,
    size,
    table,
)

if TYPE_CHECKING:
    from pccheck_async.state import StoredLeaf

__all__ = ["Place", "diff", "ls", "parse_place", "show", "verify"]

_LONGEST_LINE = 1 << 14
_MOST_LEAVES = 8
_PLACE = re.compile(r"(.*)@(-?\d{1,20})", re.ASCII | re.DOTALL)


@reporting
def ls(
    path: StoreFolder,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON array of objects instead of a table.")] = False,
) -> Report:
    """List the committed checkpoints of a store, newest first. Safe while a trainer writes to it.

    Exit status: 0 at least one checkpoint is listed, 1 the store cannot be read, 2 wrong usage, 3 there is no committed
    checkpoint in this folder.
    """
    infos = pccheck.list_checkpoints(path)
    if not infos:
        complain(f"no committed checkpoint: {nothing_in(path)}")
        return Report([], (), NOTHING)
    rows = table("step", "counter", "size", "captured (UTC)", "", "metadata", right=3)
    for info in infos:
        # In JSON's notation no string reaches the terminal as a control sequence.
        metadata = ", ".join(
            f"{jsonlib.dumps(key)[1:-1]}={f'{value:.6g}' if isinstance(value, float) else jsonlib.dumps(value)}"
            for key, value in info.metadata.items()
        )
        numbers = str(info.step), str(info.counter), size(info.nbytes)
        rows.add_row(*numbers, captured_at(info), "pinned" if info.pinned else "", metadata)
    return Report([as_json(info) for info in infos], [rows])


# -- show


@reporting
def show(path: StoreFolder, step: Step = None, json: Json = False) -> Report:
    """Show the tree of a checkpoint: leaves with dtype, shape and size, aliases, plain values, chunks, the manifest.

    Reads no tensor and writes nothing. Safe while a trainer writes to the store.

    Exit status: 0 shown, 1 it cannot be read, 2 wrong usage, 3 there is no such checkpoint.
    """
    description = pccheck.describe_checkpoint(path, step=step)
    document = {
        **as_json(description.info),
        **{name: getattr(description, name) for name in ("store_id", "block_bytes", "slot", "slot_nbytes")},
        "manifest": {"offset": description.manifest_offset, "nbytes": description.manifest_nbytes},
        "chunks": [
            {"offset": chunk.offset, "nbytes": chunk.nbytes, "crc32": f"{chunk.checksum:08x}"}
            for chunk in description.chunks
        ],
        "array_nbytes": description.array_nbytes,
        "aliases": description.aliases,
        "containers": description.branches,
        "leaves": [_leaf_as_json(leaf) for leaf in description.leaves] if json else [],
    }
    return Report(document, _described(description))


def _leaf_as_json(leaf: StoredLeaf) -> dict[str, Any]:
    facts: dict[str, Any] = {"path": leaf.path, "kind": leaf.kind}
    if (entry := leaf.entry) is None:
        value = leaf.value()
        known = value is None or type(value) in (bool, int, float, str)
        return facts | {"value": value if known else leaf.text(1 << 16)}
    return facts | {
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "stride": list(entry.stride),
        "nbytes": leaf.nbytes,
        "requires_grad": entry.requires_grad,
        "payload": list(leaf.extent) if leaf.extent else None,
        "alias_of": leaf.alias_of,
    }


def _described(description: pccheck.Description) -> Iterator[str]:
    branches: dict[tuple[str, ...], Tree] = {(): Tree(f"step {description.info.step}")}

    def branch(names: tuple[str, ...]) -> Tree:
        if names not in branches:
            kind = description.branches.get(".".join(names), "dict")
            label = printable(names[-1]) + ("" if kind == "dict" else f"  ({kind})")
            branches[names] = branch(names[:-1]).add(label)
        return branches[names]

    for leaf in description.leaves:
        if not leaf.is_metadata:
            branch(leaf.names[:-1]).add(_leaf(leaf))
    drawn = TextIOWrapper(BytesIO(), sys.stdout.encoding, errors="backslashreplace")  # of ASCII where that is all
    # As wide as it takes: no line is cut off at the end of the terminal's.
    wide = Console(file=drawn, width=_LONGEST_LINE, color_system=None, markup=False, emoji=False, highlight=False)
    wide.print(branches[()])
    drawn.seek(0)
    yield from (line.rstrip() for line in drawn)
    info, chunks = description.info, description.chunks
    arrays = sum(leaf.entry is not None for leaf in description.leaves)
    values = sum(leaf.entry is None and not leaf.is_metadata for leaf in description.leaves)
    yield (
        f"{arrays} tensors and arrays of {size(description.array_nbytes)}, {description.aliases} of them aliases; "
        f"{values} plain values."
    )
    yield (
        f"Stored: {size(info.nbytes)} in {len(chunks)} chunks of at most "
        f"{size(max((chunk.nbytes for chunk in chunks), default=0))}, at the beginning of {description.slot} "
        f"({size(description.slot_nbytes)}); the manifest at byte {description.manifest_offset}, "
        f"{size(description.manifest_nbytes)}."
    )
    metadata = ", ".join(f"{key}={json_value(value)!r}" for key, value in info.metadata.items())
    yield f"Counter {info.counter}, captured {captured_at(info)} UTC{', pinned' if info.pinned else ''}." + (
        f" Metadata: {printable(metadata)}." if metadata else ""
    )


def _leaf(leaf: StoredLeaf) -> str:
    name = printable(leaf.names[-1])
    if leaf.entry is None:
        return f"{name} = {printable(leaf.text())}"
    kind = "" if leaf.entry.kind == "tensor" else f" {leaf.entry.kind}"
    grad = " requires grad" if leaf.entry.requires_grad else ""
    alias = f"  = {printable(leaf.alias_of)}, stored once" if leaf.alias_of is not None else ""
    return f"{name}  {leaf.entry.dtype} {list(leaf.entry.shape)}{kind}{grad}  {size(leaf.nbytes)}{alias}"


# -- verify


@reporting
def verify(
    path: StoreFolder,
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", help="Check all committed checkpoints.")] = False,
    json: Json = False,
) -> Report:
    """Check every checksum: all copies of the commit records, the manifest, and every chunk. Names what is damaged.

    Writes nothing. Safe while a trainer writes to the store.

    Exit status: 0 every byte is what was written, 1 the store cannot be read, 2 wrong usage, 3 there is no such
    checkpoint, 4 something is damaged.
    """
    if every and step is not None:
        raise typer.BadParameter("--all and --step exclude each other")
    with progress_bar("verifying") as progress:
        verification = pccheck.verify_checkpoints(path, step=step, every=every, progress=progress)
    document = {
        "whole": verification.whole,
        "records": [
            {"copy": copy.name, "offset": copy.offset, "generation": copy.generation, "state": copy.state}
            for copy in verification.records
        ],
        "checkpoints": [
            {
                **as_json(each.info),
                "slot": each.slot,
                "chunks": each.chunks,
                "checked_nbytes": each.nbytes,
                "whole": not each.damage,
                "damage": [asdict(damage) for damage in each.damage],
            }
            for each in verification.checkpoints
        ],
        **{name: getattr(verification, name) for name in ("nbytes", "seconds", "direct")},
    }
    return Report(document, _verified(verification), 0 if verification.whole else DIFFERENT)


def _verified(verification: pccheck.Verification) -> Iterator[str | Table]:
    rows = table("step", "counter", "size", "chunks", "captured (UTC)", "slot", "", right=4)
    for each in verification.checkpoints:
        numbers = str(each.info.step), str(each.info.counter), size(each.info.nbytes), str(each.chunks)
        verdict = f"{len(each.damage)} damaged" if each.damage else "whole"
        rows.add_row(*numbers, captured_at(each.info), each.slot, verdict)
    yield rows
    for damage in (damage for each in verification.checkpoints for damage in each.damage):
        leaves = ", ".join(printable(path) for path in damage.leaves[:_MOST_LEAVES])
        more = len(damage.leaves) - _MOST_LEAVES
        holds = f"; it holds {leaves}{f' and {more} more (--json names all)' if more > 0 else ''}" if leaves else ""
        where = f"bytes {damage.offset} to {damage.offset + damage.nbytes}"
        yield f"{damage.file}: {damage.what} ({where}): {printable(damage.reason)}{holds}"
    for copy in verification.records:
        if copy.state == "damaged":
            yield (
                f"commit: copy {copy.name} of a record, at byte {copy.offset}, is damaged, or was cut short by a power "
                "failure; the next two commits write it anew"
            )
        elif copy.state == "older":
            yield f"commit: copy {copy.name} was not written when the other copy was: a kill in between (harmless)"
    rate = f", {size(int(verification.nbytes / verification.seconds))}/s" if verification.seconds > 0 else ""
    cached = "" if verification.direct else " through the page cache"
    verdict = "Every checksum holds." if verification.whole else "DAMAGED."
    yield f"{size(verification.nbytes)} read in {verification.seconds:.2f} s{rate}{cached}. {verdict}"


# -- diff


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


@reporting
def diff(
    one: Annotated[str, typer.Argument(metavar="PATH[@STEP]", help="The first checkpoint.")],
    other: Annotated[str, typer.Argument(metavar="PATH[@STEP]", help="The second one; @STEP: in the same store.")],
    json: Json = False,
) -> Report:
    """Compare two checkpoints leaf by leaf: which differ, in how many elements, and by how much. NaN equals NaN.

    Verifies what it reads and writes nothing. Safe while a trainer writes to the store, which may need a slot more.

    Exit status: 0 all leaves are equal in every bit, 1 one cannot be read, 2 wrong usage, 3 there is no such
    checkpoint, 4 they differ.
    """
    first, second = parse_place(one), parse_place(other)
    if first.path is None:
        raise typer.BadParameter(f"{one!r} names no folder: the first place is PATH or PATH@STEP")
    with progress_bar("comparing") as progress:
        comparison = pccheck.compare_checkpoints(
            first.path, second.path, step=first.step, other_step=second.step, progress=progress
        )
    document = {
        "equal": not comparison.differences,
        "one": as_json(comparison.one),
        "other": as_json(comparison.other),
        "leaves": comparison.leaves,
        "compared_nbytes": comparison.nbytes,
        "differences": [_difference_as_json(each) for each in comparison.differences],
    }
    return Report(document, _compared(comparison), DIFFERENT if comparison.differences else 0)


def _difference_as_json(each: pccheck.LeafDifference) -> dict[str, Any]:
    facts = {"path": each.path, "change": each.change, "one": each.one, "other": each.other}
    if (difference := each.difference) is None:
        return facts
    return facts | {
        "elements": difference.total,
        "bits_differ": difference.bits,
        "values_differ": difference.values,
        "nan_on_one_side": difference.nans,
        "max_absolute": difference.most_absolute,
        "max_relative": difference.most_relative,
    }


def _compared(comparison: pccheck.Comparison) -> Iterator[str | Table]:
    if comparison.differences:
        rows = table("differ", "of", "max abs", "max rel", "what", "leaf", right=4)
        for each in comparison.differences:
            rows.add_row(*_difference(each))
        yield rows
    yield (
        f"One: step {comparison.one.step}, counter {comparison.one.counter}. Other: step {comparison.other.step}, "
        f"counter {comparison.other.counter}. {size(comparison.nbytes)} of tensors compared."
    )
    same = comparison.leaves - sum(each.change != "container" for each in comparison.differences)
    which = f"{same} of {comparison.leaves}" if comparison.differences else f"All {comparison.leaves}"
    yield f"{which} leaves are equal in every bit."


def _difference(each: pccheck.LeafDifference) -> tuple[str, ...]:
    path, both = printable(each.path) or "(the state)", f"{each.one} -> {each.other}"
    elements = each.difference
    if elements is None or not elements.bits:
        in_both = bool(each.one and each.other)
        change = f"{each.change}: {both}" if in_both else each.change
        return "", "", "", "", printable(change), path if in_both else printable(f"{path}  {each.one or each.other}")
    nans = f", {elements.nans} NaN on one side" if elements.nans else ""
    bits_only = elements.values is not None and elements.values < elements.bits
    only = f", {elements.bits - (elements.values or 0)} in bits only" if bits_only else ""
    what = f"{each.change}{f': {both}' if each.change != 'elements' else ''}{nans}{only}"
    largest = ("" if value is None else f"{value:.4g}" for value in (elements.most_absolute, elements.most_relative))
    return str(elements.bits), str(elements.total), *largest, printable(what), path
