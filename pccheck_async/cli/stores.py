# SPDX-License-Identifier: Apache-2.0
"""The commands on stores, and on the files that checkpoints are exported to and imported from."""

from __future__ import annotations

import json as jsonlib
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import typer
from rich.table import Table
from rich.tree import Tree

import pccheck_async as pccheck
from pccheck_async.cli.output import (
    DIFFERENT,
    FAILED,
    NOTHING,
    AnyFolder,
    Json,
    Name,
    OneStep,
    Rank,
    Report,
    Step,
    StoreFolder,
    as_json,
    at_least,
    captured_at,
    complain,
    json_value,
    one_of,
    parse_path,
    parse_size,
    path_argument,
    pick,
    printable,
    progress_bar,
    reporting,
    size,
    status_of,
    table,
)
from pccheck_async.cli.ranks import (
    describe_incomplete,
    group_fault,
    heat_map,
    newer_lost,
    on_disk,
    place_as_json,
    placement,
    rank_of_store,
    read_place,
)
from pccheck_async.errors import DamagedError, StoreError, first_few, in_shell, plain

if TYPE_CHECKING:
    from pccheck_async.group import Place
    from pccheck_async.upkeep import RecordCopy, ShardedLeaf, StoredLeaf

_MOST_LEAVES = 8
_MOST_CHANGES = 20
_IN_MEMORY = "In memory on this machine: step {} (`pccheck memory ls`); a restart here takes the newest."
_BACKUP = "Put a backup of the folder back, or begin anew in another folder."
_PLACE = re.compile(r"(.*)@(-?\d{1,20})", re.ASCII | re.DOTALL)


def _steps(infos: Iterable[pccheck.CheckpointInfo]) -> str:
    return ", ".join(str(info.step) for info in infos)


def _noun(infos: Sized) -> str:
    return "step" if len(infos) == 1 else "steps"


@reporting
def ls(path: AnyFolder, json: Json = False) -> Report:
    """List the committed checkpoints, newest first.

    Reads no tensor: `pccheck verify` checks all bytes. Safe while a trainer writes to the store. Of a group's folder
    those that are complete, with the bytes of all ranks, and below them those that lack parts.

    Exit status: 0 at least one checkpoint is listed, 1 it failed, 2 wrong usage, 3 there is no committed checkpoint in
    this folder, 4 something is lost or damaged.
    """
    from pccheck_async.upkeep import lost_records, lost_slots, memory_of  # and torch

    place = read_place(path)
    infos, document, notes, gone = place.infos, place_as_json(place), [*describe_incomplete(place)], dict[int, str]()
    if fault := group_fault(place):
        notes.append(f"{fault}.")
    if not infos:
        why = place.nothing(None)
        if not place.stores and not place.of_group:
            raise why
        if steps := ", ".join(str(info.step) for info in memory_of(path)):
            return Report(document, [f"On disk is none yet. {_IN_MEMORY.format(steps)}"])
        complain(str(why))
        return Report(document, notes, status_of(why))
    if note := rank_of_store(place):
        notes.append(note)
    else:
        gone = lost_slots(place) and lost_slots(read_place(path))  # a writer may have removed one meanwhile
        lost = [f"LOST: step {info.step}: {gone[info.counter]}." for info in infos if info.counter in gone]
        notes += lost if fault else [*lost, _restart(place, gone)]
        for each, info in zip(document if isinstance(document, list) else document["checkpoints"], infos, strict=True):
            each.update({"lost": gone[info.counter]} if info.counter in gone else {})
    names = ("name",) if any(info.name is not None for info in infos) else ()
    rows = table("step", "counter", "size", "captured (UTC)", "", *names, "metadata", right=3)
    for info in infos:
        # In JSON's notation no string reaches the terminal as a control sequence.
        metadata = ", ".join(
            f"{jsonlib.dumps(key)[1:-1]}={f'{value:.6g}' if isinstance(value, float) else jsonlib.dumps(value)}"
            for key, value in info.metadata.items()
        )
        name = [printable(info.name or "")] if names else []
        rows.add_row(*_columns(info), captured_at(info), ", ".join(_marks(info)), *name, metadata)
    for folder in (torn := lost_records(place)):
        whose = "" if folder == "." else f"{folder}: "
        notes.append(
            f"LOST?: {whose}both copies of a commit record are damaged, or were cut short by a power failure. It may "
            "have named a newer checkpoint: before the next save, copy the folder and see "
            f"{in_shell('recover', path, '--search')}."
        )
    if steps := ", ".join(str(info.step) for info in memory_of(path)):
        notes.append(_IN_MEMORY.format(steps))
    taken = on_disk(place)
    notes.append(f"On disk {size(taken['nbytes'])}: {taken['slots']} slots ({taken['slots_in_use']} in use).")
    return Report(document, [rows, *notes], DIFFERENT if gone or fault or torn or newer_lost(place) else 0)


def _restart(place: Place, lost: Container[int], whole: Mapping[int, str] | None = None) -> str:
    """Return a sentence that names the checkpoint that a restart restores, or tries if it was not checked.

    Args:
        place: Where it restarts from.
        lost: Counters of the committed ones that are known to be lost or damaged.
        whole: Counters of those that were found whole, with their places; None if nothing was checked.
    """
    from pccheck_async.upkeep import overwritten  # and torch

    gone = overwritten(place) if whole is None else ()
    superseded = [entry.info for entry in place.superseded if entry.counter not in gone]
    newest_first = sorted((*place.infos, *superseded), key=lambda info: -info.counter)
    found = [info for info in newest_first if not info.rejected and info.counter not in lost]
    if not found:
        text = "No checkpoint can be restored: all are rejected, lost or damaged."
        look = f" {in_shell('recover', place.path, '--search')} looks for whole ones that no record names."
        return text if place.of_group else text + look
    newest = found[0]
    what = ", which a newer one superseded and a save may have written over" if newest in superseded else ""
    if newest in superseded and whole is not None:
        return (
            f"A restart restores step {newest.step}, from {whole[newest.counter]}, which a newer one superseded: the "
            "next save may write over it."
        )
    if whole is None:
        look = f"no tensor was read here ({in_shell('verify', place.path, '--all')} checks all bytes)"
        text = f"A restart tries step {newest.step}{what}: {look}."
    elif newest.counter not in whole:
        text = f"A restart tries step {newest.step}, which was not checked (--all checks it)."
    else:
        text = f"A restart restores step {newest.step}, from {whole[newest.counter]}."
    return text + ("" if newest in superseded else _remedy(place, lost, newest))


def _remedy(place: Place, lost: Container[int], newest: pccheck.CheckpointInfo) -> str:
    """Return a sentence that says after what a store has whole checkpoints alone, if there is such a thing."""
    kept = {info.step for info in place.infos if info.counter not in lost}
    damaged = [info for info in place.infos if info.counter in lost]
    steps = sorted({info.step for info in damaged} - kept)
    if place.of_group and damaged and all(info.counter > newest.counter for info in damaged):
        return " What is damaged is dropped by training that goes on from there."
    if not steps or place.is_part:
        return ""
    if place.of_group:
        calls = ", ".join(f"engine.remove(step={step})" for step in steps)
        return f" What is damaged is dropped by {calls} on all ranks."
    options = [part for step in steps for part in ("--step", str(step))]
    return f" {in_shell('remove', place.path, *options)} drops what is damaged."


def _outcomes(verification: pccheck.stores.Verification) -> tuple[set[int], dict[int, str]]:
    """Return the counters of the checkpoints that are damaged, and those of the checked ones, with their places."""
    checked = (*verification.checkpoints, *verification.superseded)
    places = {each.info.counter: each.slot if each.rank is None else "the parts of all its ranks" for each in checked}
    return {each.info.counter for each in checked if each.damage}, places


@contextmanager
def _naming_others(path: Path, step: int | None = None, name: str | None = None) -> Iterator[None]:
    """Add the other steps to the error of a damaged checkpoint: nothing is taken in its place."""
    try:
        yield
    except DamagedError as error:
        infos = read_place(path).infos
        asked = [info for info in infos if (step is None or info.step == step) and (name is None or info.name == name)]
        if not (others := [str(info.step) for info in infos if info not in asked[:1]]):
            raise
        look = "" if "pccheck verify" in str(error) else f" ({in_shell('verify', path, '--all')} tells which are whole)"
        raise DamagedError(f"{error}; --step takes another one of {first_few(others)}{look}") from error


def _marks(info: pccheck.CheckpointInfo) -> list[str]:
    return [mark for mark in ("pinned", "rejected") if getattr(info, mark)]


def _columns(info: pccheck.CheckpointInfo) -> tuple[str, str, str]:
    return str(info.step), str(info.counter), size(info.nbytes)


# -- show


@reporting
def show(
    path: AnyFolder,
    step: Step = None,
    name: Name = None,
    rank: Rank = None,
    ranks: Annotated[
        bool, typer.Option("--ranks", help="What each rank of a group has of each checkpoint, and the slowest.")
    ] = False,
    depth: Annotated[
        int | None,
        typer.Option(parser=at_least(1), metavar="N", help="Levels to show; of those below, sums (default: all)."),
    ] = None,
    json: Json = False,
) -> Report:
    """Show the tree of a checkpoint.

    Leaves with dtype, shape and size, aliases, plain values, bytes by dtype, chunks, the manifest. Of a group's,
    tensors that lie on several ranks in full, and which rank saved which boxes.

    Reads no tensor, but of a group without --rank those that ranks may have different, and writes nothing. Safe while a
    trainer writes to the store.

    Exit status: 0 shown, 1 it failed, 2 wrong usage, 3 there is no such checkpoint, 4 something is lost or damaged.
    """
    if ranks:
        if rank is not None or step is not None or name is not None:
            raise typer.BadParameter("--ranks shows all ranks and steps: give neither --rank nor --step nor --name")
        return heat_map(path)
    with _naming_others(path, step, name):
        description = pccheck.stores.describe(path, step=step, name=name, rank=rank)
    if description.differing:
        few = printable(first_few(description.differing))
        complain(f"this is the part of rank 0, and other ranks have different tensors: {few}; see --rank")
    document = {
        **as_json(description.info),
        **pick(description, "rank", "store_id", "block_bytes", "slot", "slot_nbytes"),
        "manifest": pick(description, offset="manifest_offset", nbytes="manifest_nbytes"),
        "chunks": [
            pick(chunk, "offset", "nbytes") | {"crc32": f"{chunk.checksum:08x}"} for chunk in description.chunks
        ],
        **pick(description, "array_nbytes", "aliases", "differing", containers="branches"),
        "dtypes": _by_dtype(description),
        "leaves": [_leaf_as_json(leaf) for leaf in description.leaves] if json else [],
        "sharded": [_sharded_as_json(leaf) for leaf in description.sharded] if json else [],
    }
    return Report(document, _described(description, depth))


def _by_dtype(description: pccheck.stores.Description) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for leaf in description.leaves:
        if leaf.entry is not None:
            sums = found.setdefault(leaf.entry.dtype, {"count": 0, "nbytes": 0})
            sums["count"] += 1
            sums["nbytes"] += leaf.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1]["nbytes"]))


def _leaf_as_json(leaf: StoredLeaf) -> dict[str, Any]:
    facts = pick(leaf, "path", "kind")
    if leaf.entry is None:
        value = leaf.value()
        known = value is None or type(value) in (bool, int, float, str)
        return facts | {"value": value if known else leaf.text(1 << 16)}
    facts |= pick(leaf.entry, "dtype", "shape", "stride") | pick(leaf, "nbytes") | pick(leaf.entry, "requires_grad")
    return facts | {"payload": leaf.extent or None, "alias_of": leaf.alias_of}


def _sharded_as_json(leaf: ShardedLeaf) -> dict[str, Any]:
    boxes = [{"rank": rank, **box._asdict()} for rank, each in leaf.boxes.items() for box in each]
    return pick(leaf, "path", "dtype", "shape", "nbytes", replica="is_replica") | {"boxes": boxes}


def _described(description: pccheck.stores.Description, depth: int | None) -> Iterator[str | Tree]:
    whose = "" if description.rank is None else f", part of rank {description.rank}"
    branches: dict[tuple[str, ...], Tree] = {(): Tree(f"step {description.info.step}{whose}")}

    def branch(names: tuple[str, ...]) -> Tree:
        if names not in branches:
            path = ".".join(names)
            kind = description.branches.get(path) or description.branches.get(plain(path), "dict")
            label = printable(plain(names[-1])) + ("" if kind == "dict" else f"  ({kind})")
            branches[names] = branch(names[:-1]).add(label)
        return branches[names]

    deeper = defaultdict[tuple[str, ...], list[int]](list)

    def add(leaf: StoredLeaf | ShardedLeaf, text: str) -> None:
        if depth is not None and len(leaf.names) > depth:
            deeper[leaf.names[:depth]].append(leaf.nbytes)
            branch(leaf.names[:depth])
        else:
            branch(leaf.names[:-1]).add(text)

    end = 0
    for sharded in (*description.sharded, None):
        for leaf in description.leaves[end : None if sharded is None else sharded.leaves.start]:
            if not leaf.is_metadata:
                add(leaf, _leaf(leaf))
        if sharded is not None:
            end = sharded.leaves.stop
            add(sharded, _sharded(sharded, description.leaves[sharded.leaves.start : end]))
    for names, nbytes in deeper.items():
        branches[names].label = f"{branches[names].label}  {len(nbytes)} leaves, {size(sum(nbytes))}"
    yield branches[()]
    info, chunks = description.info, description.chunks
    arrays = sum(leaf.entry is not None for leaf in description.leaves)
    values = sum(leaf.entry is None and not leaf.is_metadata for leaf in description.leaves)
    yield (
        f"{'This part: ' if description.sharded else ''}{arrays} tensors and arrays of "
        f"{size(description.array_nbytes)}, {description.aliases} of them aliases; {values} plain values."
    )
    dtypes = [f"{name} {size(sums['nbytes'])} in {sums['count']}" for name, sums in _by_dtype(description).items()]
    if dtypes:
        yield f"By dtype: {', '.join(dtypes)}."
    if description.sharded:
        whole = size(sum(leaf.nbytes for leaf in description.sharded))
        yield f"{len(description.sharded)} tensors lie on several ranks: {whole} in full."
    yield (
        f"Stored: {size(info.nbytes)} in {len(chunks)} chunks of at most "
        f"{size(max((chunk.nbytes for chunk in chunks), default=0))}, at the beginning of {description.slot} "
        f"({size(description.slot_nbytes)}); the manifest at byte {description.manifest_offset}, "
        f"{size(description.manifest_nbytes)}."
    )
    metadata = ", ".join(f"{key}={json_value(value)!r}" for key, value in info.metadata.items())
    named = "" if info.name is None else f"Named {printable(info.name)}. "
    marks = "".join(f", {mark}" for mark in _marks(info))
    yield f"{named}Counter {info.counter}, captured {captured_at(info)} UTC{marks}." + (
        f" Metadata: {printable(metadata)}." if metadata else ""
    )


def _leaf(leaf: StoredLeaf) -> str:
    name = printable(plain(leaf.names[-1]))
    if leaf.entry is None:
        return f"{name} = {printable(leaf.text())}"
    kind = "" if leaf.entry.kind == "tensor" else f" {leaf.entry.kind}"
    grad = " requires grad" if leaf.entry.requires_grad else ""
    alias = f"  = {printable(leaf.alias_of)}, stored once" if leaf.alias_of is not None else ""
    return f"{name}  {leaf.entry.dtype} {list(leaf.entry.shape)}{kind}{grad}  {size(leaf.nbytes)}{alias}"


def _sharded(leaf: ShardedLeaf, boxes: tuple[StoredLeaf, ...]) -> str:
    where = boxes[0].alias_of if boxes else None
    alias = "" if where is None else f"  = {printable(where.rpartition('[')[0])}, stored once"
    facts = f"{leaf.dtype} {list(leaf.shape)}  {size(leaf.nbytes)} in full"
    return f"{printable(plain(leaf.names[-1]))}  {facts}: {placement(leaf)}{alias}"


# -- verify


@reporting
def verify(
    path: AnyFolder,
    step: Step = None,
    name: Name = None,
    every: Annotated[bool, typer.Option("--all", help="Check all committed checkpoints.")] = False,
    json: Json = False,
) -> Report:
    """Check every checksum, and name what is damaged.

    Those of all copies of the commit records, of the manifest, and of every chunk. Of a group's folder, the records and
    parts of all ranks. Writes nothing. Safe while a trainer writes to the store.

    Exit status: 0 no byte is damaged, 1 it failed, 2 wrong usage, 3 there is no such checkpoint, 4
    something is lost or damaged.
    """
    if every and (step is not None or name is not None):
        raise typer.BadParameter("--all excludes --step and --name")
    with progress_bar("verifying") as progress:
        verification = pccheck.stores.verify(path, step=step, name=name, every=every, progress=progress)
    place = read_place(path)
    fault = group_fault(place)
    document = {
        "whole": verification.whole and not fault,
        "records": [pick(copy, "offset", "generation", "state", "rank", copy="name") for copy in verification.records],
        "checkpoints": [
            as_json(each.info)
            | pick(each, "slot", "chunks", "rank", checked_nbytes="nbytes")
            | {"whole": not each.damage, "damage": [asdict(damage) for damage in each.damage]}
            for each in verification.checkpoints
        ],
        **pick(verification, "nbytes", "seconds", "direct"),
    }
    lines = [*_verified(verification, path)]
    if not rank_of_store(place):
        lines += describe_incomplete(place) if (newer := newer_lost(place)) else ()
        lines.append(f"{fault}." if fault else _restart(place, *_outcomes(verification)))
        fault = fault or ("newer ones are lost" if newer else "")
    return Report(document, lines, 0 if verification.whole and not fault else DIFFERENT)


def _verified(verification: pccheck.stores.Verification, path: Path) -> Iterator[str | Table]:
    rows = table("step", "counter", "size", "chunks", "captured (UTC)", "slot", "", right=4)
    for each in verification.checkpoints:
        verdict, chunks = f"{len(each.damage)} damaged" if each.damage else "whole", str(each.chunks)
        for damage in each.damage:
            if damage.what in ("slot", "manifest"):  # without a manifest no chunk is known
                verdict, chunks = f"{damage.what} {'missing' if damage.what == 'slot' else 'damaged'}", ""
        slot = _of_rank(each.rank) + each.slot
        rows.add_row(*_columns(each.info), chunks, captured_at(each.info), slot, verdict)
    for each in verification.superseded:
        verdict = f"superseded, {'damaged or written over' if each.damage else 'whole'}"
        rows.add_row(*_columns(each.info), str(each.chunks), captured_at(each.info), each.slot, verdict)
    yield rows
    for rank, damage in ((each.rank, damage) for each in verification.checkpoints for damage in each.damage):
        leaves = ", ".join(printable(path) for path in damage.leaves[:_MOST_LEAVES])
        more = len(damage.leaves) - _MOST_LEAVES
        holds = f"; it holds {leaves}{f' and {more} more (--json names all)' if more > 0 else ''}" if leaves else ""
        where = f"bytes {damage.offset} to {damage.offset + damage.nbytes}"
        yield f"{_of_rank(rank)}{damage.file}: {damage.what} ({where}): {printable(damage.reason)}{holds}"
    for copy in verification.records:
        name = f"{_of_rank(copy.rank)}commit: copy {copy.name}"
        if copy in verification.damaged_copies:
            yield _damaged_copy(copy, path)
        elif copy.state == "damaged":
            yield (
                f"{name} of a record, at byte {copy.offset}, is damaged, or was cut short by a power failure, and the "
                f"other copy, too: it may have named a newer checkpoint ({in_shell('recover', path, '--search')})"
            )
        elif copy.state == "older":
            yield f"{name} was not written when the other copy was: a kill in between (harmless)"
    rate = f", {size(int(verification.nbytes / verification.seconds))}/s" if verification.seconds > 0 else ""
    cached = "" if verification.direct else " through the page cache"
    damaged = [copy for copy in verification.records if copy.state == "damaged"]
    is_whole = verification.whole or damaged == [*verification.damaged_copies]
    if is_whole := is_whole and not any(each.damage for each in verification.checkpoints):
        verdict = "Every checksum of the checkpoints holds, and nothing is lost."
    verdict = "Every checksum holds." if verification.whole else verdict if is_whole else "DAMAGED."
    yield f"{size(verification.nbytes)} read in {verification.seconds:.2f} s{rate}{cached}. {verdict}"


def _damaged_copy(copy: RecordCopy, path: Path) -> str:
    return (
        f"{_of_rank(copy.rank)}commit: copy {copy.name} of a record, at byte {copy.offset}, is damaged, or was cut "
        "short by a power failure; the other copy is valid, so that nothing is lost. The next two saves write it anew, "
        f"or {in_shell('recover', path, '--write')}"
    )


def _of_rank(rank: int | None) -> str:
    return "" if rank is None else f"rank {rank}: "


# -- compare


class Side(NamedTuple):
    """A checkpoint by its store and step; no folder for the store of the other one, no step for the newest."""

    path: Path | None
    step: int | None


def parse_side(text: str) -> Side:
    """Return the store and the step of ``PATH``, or of ``PATH@STEP`` or ``@STEP``, as it was written in version 0.1.

    A folder of that very name is a path.
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

    Shows which leaves differ, in how many elements, and by how much; NaN equals NaN. Each of the two is the newest of
    its store, unless a step or a name is given. Tensors that lie on several ranks of a group are compared in full, even
    if divided differently; values that each rank has for itself, for --rank alone. Verifies all bytes that it reads and
    writes nothing. Safe while a trainer writes to the store, which may need a slot more.

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


# -- commands that write


@reporting
def copy(
    source: Annotated[Path, path_argument("SOURCE", "Store that has the checkpoint, or the folder of a group.")],
    target: Annotated[Path, path_argument("TARGET", "Store that gets it; made where there is none.")],
    step: Step = None,
    name: Name = None,
    rank: Annotated[
        int | None,
        typer.Option(
            parser=at_least(0), metavar="RANK", help="Of a group: the part of this rank alone (default: all)."
        ),
    ] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Pin the copy (default: as in SOURCE).")] = False,
    no_pin: Annotated[bool, typer.Option("--no-pin", help="Do not pin the copy.")] = False,
    json: Json = False,
) -> Report:
    """Copy a checkpoint into another store.

    It is verified on the way, and becomes the newest one there; others stay. Of a group, the parts of all ranks, into
    the folder of a group. A trainer may write to SOURCE meanwhile, not to TARGET.

    Exit status: 0 the copy is durable, 1 it failed and nothing was committed, 2 wrong usage, 3 there is no such
    checkpoint, 4 something is lost or damaged.
    """
    if pin and no_pin:
        raise typer.BadParameter("--pin excludes --no-pin")
    pinned = pin if pin or no_pin else None
    start = time.perf_counter()
    with progress_bar("copying") as progress, _naming_others(source, step, name):
        info = pccheck.stores.copy(source, target, step=step, name=name, rank=rank, pinned=pinned, progress=progress)
    seconds = time.perf_counter() - start
    there = read_place(target)
    world = there.complete[0].world
    whose = f", the parts of {world} ranks" if world > 1 else ""
    lines = [
        f"Step {info.step} ({size(info.nbytes)}{whose}) copied and verified in {seconds:.2f} s; it is the newest "
        f"checkpoint in {target}, counter {info.counter}{', pinned' if info.pinned else ''}."
    ]
    if later := [other for other in there.infos[1:] if other.step > info.step]:
        lines.append(f"Older there now: {_noun(later)} {_steps(later)}. A trainer tries step {info.step} first.")
    return Report(as_json(info), lines)


@reporting
def remove(
    path: StoreFolder,
    old: Annotated[list[int] | None, typer.Argument(hidden=True)] = None,
    steps: Annotated[
        list[int] | None, typer.Option("--step", metavar="STEP", help="A step to remove; may be repeated.")
    ] = None,
    names: Annotated[
        list[str] | None, typer.Option("--name", metavar="NAME", help="A name to remove; may be repeated.")
    ] = None,
    counters: Annotated[
        list[int] | None,
        typer.Option("--counter", metavar="N", help="A counter to remove, as `pccheck ls` shows it; may be repeated."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also where no checkpoint is left then.")] = False,
    json: Json = False,
) -> Report | int:
    """Remove checkpoints, and free their space.

    All of these steps, names and counters, pinned or not, or none, in one commit. No trainer has PATH open.

    Exit status: 0 removed, 1 nothing was removed, 2 wrong usage, 3 there is no checkpoint of one of the steps, or
    with one of the names or counters, 4 the store is damaged.
    """
    from pccheck_async.upkeep import to_remove  # and torch

    if old:
        _note_old(*old)
    steps, names, counters = [*(steps or []), *(old or [])], names or [], counters or []
    if not steps and not names and not counters:
        raise typer.BadParameter(f"{_WHICH}, or --counter")
    place = read_place(path)
    if not (infos := place.infos):
        raise place.nothing(None)
    place.check_one_process()
    doomed = to_remove(path, infos, steps, names, counters)
    what, nbytes = _told_apart(doomed, infos), size(sum(info.nbytes for info in doomed))
    if json and not yes:
        raise StoreError(_NOBODY)  # a question is no JSON
    try:
        if not yes and not typer.confirm(f"Remove {_noun(doomed)} {what} ({nbytes}) from {path}?", err=True):
            complain("nothing was removed")
            return FAILED
    except typer.Abort as abort:
        if isinstance(abort.__context__, KeyboardInterrupt):
            raise
        raise StoreError(_NOBODY) from None
    removal = pccheck.stores.remove(path, step=steps, name=names, counter=counters, force=force)
    return Report(
        {"removed": [as_json(info) for info in removal.removed], "freed_nbytes": removal.freed_nbytes},
        [f"Removed {_noun(removal.removed)} {_steps(removal.removed)}; {size(removal.freed_nbytes)} freed."],
    )


def _told_apart(infos: Iterable[pccheck.CheckpointInfo], there: Iterable[pccheck.CheckpointInfo]) -> str:
    """Return the steps of checkpoints, with the counters of those whose steps others in the store have, too."""
    times = Counter(info.step for info in there)
    facts = {info: [*_marks(info), *[f"counter {info.counter}"] * (times[info.step] > 1)] for info in infos}
    return ", ".join(f"{info.step} ({', '.join(each)})" if each else str(info.step) for info, each in facts.items())


_WHICH = "give --step or --name"
_NOBODY = "nothing was removed: there is no terminal to ask; give --yes"
OldStep: TypeAlias = Annotated[int | None, typer.Argument(hidden=True)]
"""A step as version 0.1 took it."""


def _note_old(*steps: int) -> None:
    options = " ".join(f"--step {step}" for step in steps)
    complain(f"write {options}; steps without --step go with version 1.1")


def _one(step: int | None, name: str | None, old: int | None) -> dict[str, Any]:
    """Return the arguments that say which checkpoint is meant."""
    if old is not None and step is None and name is None:
        _note_old(old)
        step = old
    elif old is not None or (step is None) == (name is None):
        raise typer.BadParameter(_WHICH)
    return {"step": step, "name": name}


@reporting
def pin(path: StoreFolder, old: OldStep = None, step: OneStep = None, name: Name = None, json: Json = False) -> Report:
    """Keep a checkpoint even if a trainer's rules would drop it.

    No trainer has PATH open.

    Exit status: 0 pinned, 1 it failed, 2 wrong usage, 3 there is no such checkpoint, 4 the store is damaged.
    """
    info = pccheck.stores.pin(path, **_one(step, name, old))
    return _pinned(info, "is kept whatever a trainer's rules say")


@reporting
def unpin(
    path: StoreFolder, old: OldStep = None, step: OneStep = None, name: Name = None, json: Json = False
) -> Report:
    """Leave a pinned checkpoint to a trainer's rules again.

    All checkpoints of the step. No trainer has PATH open.

    Exit status: 0 unpinned, 1 it failed, 2 wrong usage, 3 there is no such checkpoint, 4 the store is damaged.
    """
    info = pccheck.stores.unpin(path, **_one(step, name, old))
    return _pinned(info, "goes with a trainer's next commit unless a rule keeps it")


def _pinned(info: pccheck.CheckpointInfo, fate: str) -> Report:
    return Report(as_json(info), [f"Step {info.step} (counter {info.counter}) {fate}."])


@reporting
def reject(
    path: AnyFolder,
    old: OldStep = None,
    step: Annotated[int | None, typer.Option(metavar="STEP", help="The first bad step.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="The name of the first bad checkpoint.")] = None,
    json: Json = False,
) -> Report:
    """Reject a checkpoint and every newer one.

    Restores pass them over, and no rule keeps them. It cannot be undone. No trainer has PATH open.

    Exit status: 0 rejected, 1 it failed, or none would be left, 2 wrong usage, 3 there is none from this one on, 4 the
    store is damaged.
    """
    rejected = pccheck.stores.reject(path, **_one(step, name, old))
    newest = next(info for info in pccheck.list_checkpoints(path) if not info.rejected)
    return Report(
        {"rejected": [as_json(info) for info in rejected], "newest": as_json(newest)},
        [f"Rejected {_noun(rejected)} {_steps(rejected)}. A trainer tries step {newest.step} first."],
    )


# -- recover


def _slot(text: str) -> int:
    """Return the number of a slot, given as that or as the name of its file."""
    number = text.removeprefix("slot-")
    if not number.isdecimal():
        raise typer.BadParameter(f"a slot is a number, or the name of its file, such as slot-003; not {text!r}")
    return int(number)


@reporting
def recover(
    path: AnyFolder,
    write: Annotated[
        bool, typer.Option("--write", help="Write a new commit record, and store.json if it is lost.")
    ] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Search the slots even if a commit record is valid.")
    ] = False,
    slots: Annotated[
        list[int] | None,
        typer.Option("--slot", parser=_slot, metavar="SLOT", help="Name only the one in this slot; may be repeated."),
    ] = None,
    json: Json = False,
) -> Report:
    """Find whole checkpoints where the commit records are lost.

    Searches a store whose commit records or store.json are lost for checkpoints of which every byte holds. Of one that
    has both it checks every checksum, as verify --all; --write then writes a damaged copy of a record anew. Writes
    nothing without --write. Never changes a slot, and keeps the files that it replaces under other names. Where no
    commit record is valid, pins and rejections are lost: a run that was rejected may be restored
    again; look with `pccheck ls`, and reject it again.

    Exit status: 0 the store is in order (as a read-only mount may be), or written, 1 it failed, or this user may not
    write some files, 2 wrong usage,
    3 nothing whole was found, 4 there is something to write, or what a record names is lost or damaged, and is still
    named.
    """
    with progress_bar("searching") as progress:
        recovery = pccheck.stores.recover(path, write=write, search=search, slots=slots or None, progress=progress)
    document = {
        **pick(
            recovery,
            "needed",
            "missing",
            "lost",
            "problems",
            "identity",
            "record",
            "record_lost",
            "written",
            "kept",
            "unnamed",
            "unrecorded",
        ),
        "dropped": [as_json(info) for info in recovery.dropped],
        "slots": [
            pick(one, "chunks", "whole", "note", slot="file")
            | {
                "checkpoint": as_json(one.info) if one.info else None,
                "damaged_chunks": [pick(damage, "offset", "nbytes", "reason") for damage in one.damage],
            }
            for one in recovery.found
        ],
        "names": [] if recovery.refusal else [as_json(info) for info in recovery.named],
        "refusal": recovery.refusal,
    }
    status = 0 if recovery.written or not recovery.needed else NOTHING
    if recovery.copies and not recovery.written:
        status = DIFFERENT
    if search and not write and not recovery.needed:  # else no record is valid, and all of it is to be written
        there, found = read_place(path).infos, {info.counter for info in recovery.named}
        newer = there and max(found, default=0) > there[0].counter  # older ones were dropped, as they should be
        status = DIFFERENT if newer or not {info.counter for info in there} <= found else status
    lost = (recovery.missing or recovery.problems) and not recovery.named_anew
    if lost or (status and (recovery.named or recovery.record == "valid")):
        status = DIFFERENT
    from pccheck_async.upkeep import forbidden_files  # and torch

    forbidden = [] if status else forbidden_files(read_place(path))
    options = [*["--search"] * search, *[part for each in slots or () for part in ("--slot", str(each))], "--write"]
    to_write = in_shell("recover", path, *options)
    refused = forbidden and not _is_read_only(path)  # else whoever mounted it so knows
    return Report(document, _recovered(recovery, path, forbidden, to_write), FAILED if refused else status)


def _found(recovery: pccheck.stores.Recovery) -> Table:
    rows = table("slot", "step", "counter", "size", "captured (UTC)", "whole", "note", right=4)
    for one in recovery.found:
        facts = (*_columns(one.info), captured_at(one.info)) if one.info else [""] * 4
        rows.add_row(one.file, *facts, "yes" if one.whole else "no", one.note)
    return rows


def _recovered(
    recovery: pccheck.stores.Recovery, path: Path, forbidden: Sequence[str], to_write: str
) -> Iterator[str | Table]:
    if recovery.found:
        yield _found(recovery)
    yield (
        f"{recovery.identity_name} is {recovery.identity}, the commit records"
        f"{' of ' * bool(recovery.unrecorded)}{first_few(recovery.unrecorded, 5)} are {recovery.record}"
        f"{', but for one that is lost' * recovery.record_lost}."
    )
    if recovery.unnamed:
        yield f"store.json of {', '.join(recovery.unnamed)} is missing, damaged, or of a store of one process."
    steps = f"{_noun(recovery.named)} {_steps(recovery.named)}"
    dropped = ", ".join(map(_in_words, recovery.dropped))
    if recovery.lost and not recovery.refusal:
        yield (
            "Pins and rejections are lost with the records: a run that was rejected may be restored "
            f"again. Look with {in_shell('ls', path)} after --write, and reject it again. Pin again what was pinned "
            "before a trainer starts: its first commit keeps only what its rules keep."
        )
    if recovery.missing:
        slots_lost, names = ", ".join(recovery.missing), "named" if recovery.named_anew else "names"
        yield f"LOST: {slots_lost}, which the newest record {names}: gone, cut short, or no regular file."
    yield from recovery.problems
    if not recovery.written:
        yield from (_damaged_copy(copy, path) for copy in recovery.copies)
    if (recovery.missing or recovery.problems) and not recovery.named_anew:
        from pccheck_async.upkeep import lost_slots  # and torch

        if recovery.verification is not None:
            yield _restart(read_place(path), *_outcomes(recovery.verification))
        elif recovery.written:
            yield _restart(place := read_place(path), lost_slots(place))
    if recovery.written:
        kept = f"; what was there is {', '.join(recovery.kept)} now" if recovery.kept else ""
        yield f"Written: {', '.join(recovery.written)}{kept}."
        names = f"The store names {steps}, newest first" if recovery.named else "The store names no checkpoint"
        yield f"{names}. {in_shell('verify', path, '--all')} checks them."
        if dropped:
            yield f"The old record named, too: {dropped}. No slot that was chosen holds them whole."
    elif recovery.refusal:
        yield f"--write refuses: {recovery.refusal}."
    elif recovery.named and (recovery.needed or recovery.found):
        yield f"Nothing was written. After {to_write} the store names {steps}, newest first."
        if dropped:
            yield f"It no longer names {dropped}: no slot that was chosen holds them whole."
    elif recovery.found and recovery.record == "valid":
        yield f"{recovery.none_named.capitalize()}: none can be restored. Nothing was written. {_BACKUP}"
    elif not recovery.needed and (recovery.missing or recovery.problems):
        yield f"Nothing was written, as {recovery.identity_name} and a commit record are valid."
    elif not recovery.needed:
        can = "" if forbidden else ", and a trainer can open this store"
        some = recovery.verification is None or recovery.verification.checkpoints
        holds = "every checksum of the checkpoints holds" if some else "they name no checkpoint"
        yield f"Nothing is missing from the records, and {holds}{can}."
    elif recovery.record == "valid":
        yield f"Nothing was written. After {to_write} the store is there again; it names no checkpoint."
    else:
        yield f"{recovery.none_named.capitalize()}. Nothing was written. {_BACKUP}"
    if forbidden:
        yield _forbidden(forbidden, path)


def _is_read_only(path: Path) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _forbidden(files: Sequence[str], path: Path) -> str:
    if _is_read_only(path):
        return "The filesystem is mounted read-only, so that no trainer can open the store; that is no damage."
    return (
        f"This user may not read and write {first_few(files, 5)}, so that no trainer of this user can open the store; "
        "that is no damage: change the modes of these files."
    )


def _in_words(info: pccheck.CheckpointInfo) -> str:
    """Return the step of a checkpoint, with its name and marks."""
    facts = [*([] if info.name is None else [f"named {printable(info.name)}"]), *_marks(info)]
    return f"step {info.step} ({', '.join(facts)})" if facts else f"step {info.step}"


# -- export and import


@reporting
def export(
    path: AnyFolder,
    out: Annotated[Path, path_argument("OUT", "The new file, or folder.")],
    to: Annotated[
        Literal["safetensors", "torch", "dcp", "lightning", "transformers"],
        typer.Option(
            parser=one_of("safetensors", "torch", "dcp", "lightning", "transformers"),
            metavar="FORMAT",
            help="safetensors, torch, dcp, lightning or transformers.",
        ),
    ],
    step: Step = None,
    name: Name = None,
    rank: Rank = None,
    keys: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="What to export, such as 'model.*'; may be repeated.")
    ] = None,
    root: Annotated[
        str | None, typer.Option(metavar="PART", help="The part that becomes the whole, such as 'model'.")
    ] = None,
    max_file_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="safetensors: a folder of files of at most this size, and an index."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT in one step if it is an earlier export.")
    ] = False,
    json: Json = False,
) -> Report:
    """Write a checkpoint, or a part of it, in another format.

    The file or folder is read without this package.

    Without --step and --name, of a newest one whose slot or manifest is damaged the next older one is written, with a
    warning. One of which a tensor is damaged is an error: that shows only while the file is written.

    Exit status: 0 exported, 1 it failed or the format cannot express something, 2 wrong usage, 3 there is no such
    checkpoint, 4 something is lost or damaged: with an error nothing was written, with a warning an older one was.
    """
    most = None if max_file_size is None else parse_size(max_file_size)
    if most is not None and to != "safetensors":
        raise typer.BadParameter("--max-file-size is for --to safetensors")
    newest = [info.counter for info in read_place(path).infos if not info.rejected][:1]
    with _naming_others(path, step, name):
        exported = pccheck.stores.export(
            path,
            out,
            to=to,
            step=step,
            name=name,
            rank=rank,
            keys=keys or None,
            root=root,
            max_file_size=most,
            overwrite=overwrite,
        )
    fell_back = step is None and name is None and [exported.info.counter] < newest
    document = {
        "checkpoint": as_json(exported.info),
        "path": str(exported.path),
        **pick(exported, "nbytes", "tensors", "values"),
        "fell_back": fell_back,
        "changed": [printable(line) for line in exported.changed],
    }
    return Report(document, _exported(exported), DIFFERENT if fell_back else 0)


def _exported(exported: pccheck.stores.Exported) -> Iterator[str]:
    counted = f"{exported.tensors} tensors and {exported.values} plain values"
    yield f"step {exported.info.step}: {counted}, {size(exported.nbytes)}, in {exported.path}"
    for line in exported.changed[:_MOST_CHANGES]:
        complain(f"changed: {line}")
    if len(exported.changed) > _MOST_CHANGES:
        complain(f"changed: {len(exported.changed) - _MOST_CHANGES} more")


@reporting
def import_(
    file: Annotated[
        Path,
        path_argument(
            "FILE",
            "A .ckpt of Lightning, a file of torch.save or safetensors; or a folder: checkpoint-N of transformers, "
            "safetensors, dcp.",
        ),
    ],
    path: Annotated[Path, path_argument("PATH", "Folder of the store; nobody else may write to it.")],
    source: Annotated[
        Literal["lightning", "transformers", "torch", "safetensors", "dcp"] | None,
        typer.Option(
            "--from",
            parser=one_of("lightning", "transformers", "torch", "safetensors", "dcp"),
            metavar="FORMAT",
            help="lightning, transformers, torch, safetensors or dcp (default: as detected).",
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="STEP", help="Step of the new checkpoint (default: the file's, or a count).")
    ] = None,
    root: Annotated[str | None, typer.Option(metavar="PART", help="Put it below this name, such as 'model'.")] = None,
    skip_unreadable: Annotated[
        bool,
        typer.Option("--skip-unreadable", help="Leave out values that only running code could read."),
    ] = False,
    json: Json = False,
) -> Report:
    """Save a file or folder of another format as a checkpoint.

    It becomes the newest one of the store. Runs no code from the file. Prints the format that it was read as, and the
    parts that a run that goes on from it will lack.

    Exit status: 0 imported, 1 it failed, 2 wrong usage, 3 there is nothing to import, 4 it is damaged.
    """
    info = pccheck.stores.import_(file, path, source=source, step=step, root=root, skip_unreadable=skip_unreadable)
    document = as_json(info) | {"source": info.source, "missing": [printable(line) for line in info.missing]}
    return Report(document, _imported(info, file, path))


def _imported(info: pccheck.stores.Imported, file: Path, path: Path) -> Iterator[str]:
    yield f"{file} ({info.source}): step {info.step}, {size(info.nbytes)}, the newest checkpoint in {path}"
    for line in info.missing:
        complain(f"missing: {line}")
