"""``pccheck show``: the tree of a checkpoint."""

from __future__ import annotations

import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from pccheck_async import CheckpointError, Description, describe_checkpoint
from pccheck_async.cli.output import as_json, console, created, dump, json_value, refuse
from pccheck_async.cli.show import printable, size
from pccheck_async.state.restore.listing import StoredLeaf

__all__ = ["run"]

_LONGEST_LINE = 1 << 14


def run(path: Path, *, step: int | None, json: bool) -> int:
    """Show what a checkpoint holds and return the exit status."""
    try:
        description = describe_checkpoint(path, step=step)
        if json:
            dump(_as_json(description))
            return 0
    except (CheckpointError, OSError, ValueError) as error:
        return refuse(error)
    screen = console()
    drawn = TextIOWrapper(BytesIO(), sys.stdout.encoding, errors="backslashreplace")  # of ASCII where that is all
    # As wide as it takes: no line is cut off at the end of the terminal's.
    Console(file=drawn, width=_LONGEST_LINE, color_system=None).print(_tree(description))
    drawn.seek(0)
    for line in drawn:
        screen.print(Text(line.rstrip()), soft_wrap=True)
    for line in _facts(description):
        screen.print(Text(line), soft_wrap=True)
    return 0


def _as_json(description: Description) -> dict[str, Any]:
    return {
        **as_json(description.info),
        "store_id": description.store_id,
        "block_bytes": description.block_bytes,
        "slot": description.slot,
        "slot_nbytes": description.slot_nbytes,
        "manifest": {"offset": description.manifest_offset, "nbytes": description.manifest_nbytes},
        "chunks": [
            {"offset": chunk.offset, "nbytes": chunk.nbytes, "crc32": f"{chunk.checksum:08x}"}
            for chunk in description.chunks
        ],
        "array_nbytes": description.array_nbytes,
        "aliases": description.aliases,
        "containers": description.branches,
        "leaves": [_leaf_as_json(leaf) for leaf in description.leaves],
    }


def _leaf_as_json(leaf: StoredLeaf) -> dict[str, Any]:
    found: dict[str, Any] = {"path": leaf.path, "kind": leaf.kind}
    if leaf.entry is None:
        value = leaf.value()
        known = value is None or type(value) in (bool, int, float, str)
        return found | {"value": value if known else leaf.text(1 << 16)}
    return found | {
        "dtype": leaf.entry.dtype,
        "shape": list(leaf.entry.shape),
        "stride": list(leaf.entry.stride),
        "nbytes": leaf.nbytes,
        "requires_grad": leaf.entry.requires_grad,
        "payload": list(leaf.extent) if leaf.extent else None,
        "alias_of": leaf.alias_of,
    }


def _tree(description: Description) -> Tree:
    branches: dict[tuple[str, ...], Tree] = {(): Tree(Text(f"step {description.info.step}"))}
    for leaf in description.leaves:
        if not leaf.aside:
            _branch(leaf.names[:-1], branches, description).add(Text(_words(leaf)))
    return branches[()]


def _branch(names: tuple[str, ...], branches: dict[tuple[str, ...], Tree], description: Description) -> Tree:
    if names not in branches:
        kind = description.branches.get(".".join(names), "dict")
        label = printable(names[-1]) + ("" if kind == "dict" else f"  ({kind})")
        branches[names] = _branch(names[:-1], branches, description).add(Text(label))
    return branches[names]


def _words(leaf: StoredLeaf) -> str:
    name = printable(leaf.names[-1])
    if leaf.entry is None:
        return f"{name} = {printable(leaf.text())}"
    kind = "" if leaf.entry.kind == "tensor" else f" {leaf.entry.kind}"
    grad = " requires grad" if leaf.entry.requires_grad else ""
    alias = f"  = {printable(leaf.alias_of)}, stored once" if leaf.alias_of is not None else ""
    return f"{name}  {leaf.entry.dtype} {list(leaf.entry.shape)}{kind}{grad}  {size(leaf.nbytes)}{alias}"


def _facts(description: Description) -> list[str]:
    info, chunks = description.info, description.chunks
    arrays = sum(leaf.entry is not None for leaf in description.leaves)
    values = sum(leaf.entry is None and not leaf.aside for leaf in description.leaves)
    facts = ", ".join(f"{key}={json_value(value)!r}" for key, value in info.metadata.items())
    pieces = f"{len(chunks)} chunks of at most {size(max((c.nbytes for c in chunks), default=0))}"
    return [
        f"{arrays} tensors and arrays of {size(description.array_nbytes)}, {description.aliases} of them aliases; "
        f"{values} plain values.",
        f"Stored: {size(info.nbytes)} in {pieces}, at the beginning of {description.slot} "
        f"({size(description.slot_nbytes)}); the manifest at byte {description.manifest_offset}, "
        f"{size(description.manifest_nbytes)}.",
        f"Counter {info.counter}, captured {created(info)} UTC{', pinned' if info.pinned else ''}."
        + (f" Metadata: {printable(facts)}." if facts else ""),
    ]
