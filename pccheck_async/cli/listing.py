# SPDX-License-Identifier: Apache-2.0
"""``pccheck ls`` and ``pccheck show``."""

from __future__ import annotations

import json as jsonlib
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.tree import Tree

import pccheck_async as pccheck
from pccheck_async.cli.checkpoints import columns_of, marks_of, naming_others, what_is_lost
from pccheck_async.cli.output import (
    DIFFERENT,
    AnyPlace,
    Json,
    Name,
    Rank,
    Report,
    Step,
    as_json,
    at_least,
    captured_at,
    complain,
    json_value,
    pick,
    printable,
    reporting,
    size,
    status_of,
    table,
)
from pccheck_async.cli.rank_map import rank_map
from pccheck_async.cli.ranks import (
    in_bucket,
    on_disk,
    place_as_json,
    placement,
    problems,
    rank_of_store,
    read_place,
)
from pccheck_async.errors import first_few, plain

if TYPE_CHECKING:
    from pccheck_async.upkeep import ShardedLeaf, StoredLeaf


_IN_MEMORY = "In memory on this machine: step {} (`pccheck memory ls`); a restart here takes the newest."


@reporting
def ls(path: AnyPlace, json: Json = False) -> Report:
    """List the committed checkpoints, newest first.

    Reads no tensor: `pccheck verify` checks all bytes. Safe while a trainer writes to the store. For a group's folder
    it lists the complete checkpoints, with the bytes of all ranks, and below them those that lack parts.

    --json prints for a store a list of checkpoints, newest first, each an object: step, counter, nbytes, time, created,
    pinned, rejected, name, metadata, lost (the reason) if its slot is lost, and in a bucket stored_nbytes. For a
    group's folder it prints an object: checkpoints, the same list, each with world_size; incomplete, a list of objects:
    step, counter, missing_ranks, missing_count, was_complete; on_disk (not for a bucket): nbytes, slots, slots_in_use;
    and problem if no trainer can open the group. For an error it prints an object: error, with type and message.

    Exit status: 0 at least one checkpoint is listed, 1 it failed, 2 wrong usage, 3 there is no committed checkpoint in
    this folder, 4 something is lost or damaged.
    """
    from pccheck_async.upkeep import memory_of  # and torch

    place = read_place(path)
    infos, document, gone, (notes, is_bad) = place.infos, place_as_json(place), dict[int, str](), problems(place)
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
        gone, lost = what_is_lost(place)
        notes += lost
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
        rows.add_row(*columns_of(info), captured_at(info), ", ".join(marks_of(info)), *name, metadata)
    if steps := ", ".join(str(info.step) for info in memory_of(path)):
        notes.append(_IN_MEMORY.format(steps))
    if place.is_bucket:
        stored = in_bucket(path)
        for each in document if isinstance(document, list) else document["checkpoints"]:
            each["stored_nbytes"] = stored.by_counter.get(each["counter"])
        facts = [", compressed"] if stored.is_compressed else []
        facts += [", without parts that cannot be read"] if None in stored.by_counter.values() else []
        notes.append(f"In the bucket {size(stored.nbytes)}{''.join(facts)}.")
    else:
        taken = on_disk(place)
        notes.append(f"On disk {size(taken['nbytes'])}: {taken['slots']} slots ({taken['slots_in_use']} in use).")
    return Report(document, [rows, *notes], DIFFERENT if gone or is_bad else 0)


@reporting
def show(
    path: AnyPlace,
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

    Shows leaves with dtype, shape and size, aliases, plain values, bytes by dtype, chunks, the manifest. For a group,
    also the full shape of tensors that lie on several ranks, and which rank saved which boxes of them.

    Writes nothing, and reads no tensor (for a group without --rank, only tensors that may differ by rank). Safe while a
    trainer writes to the store.

    Exit status: 0 shown, 1 it failed, 2 wrong usage, 3 there is no such checkpoint, 4 something is lost or damaged.
    """
    if ranks:
        if rank is not None or step is not None or name is not None:
            raise typer.BadParameter("--ranks shows all ranks and steps: give neither --rank nor --step nor --name")
        return rank_map(path)
    with naming_others(path, step, name):
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
    marks = "".join(f", {mark}" for mark in marks_of(info))
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
