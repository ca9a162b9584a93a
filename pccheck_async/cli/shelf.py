# SPDX-License-Identifier: Apache-2.0
"""``pccheck shelf``: lists, shows and verifies the variables of a shelf, without changing it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.table import Table

import pccheck_async as pccheck
from pccheck_async.cli.output import (
    DIFFERENT,
    Command,
    CommandGroup,
    Json,
    Report,
    flow_help,
    path_argument,
    pick,
    printable,
    reporting,
    size,
    table,
)

if TYPE_CHECKING:
    from pccheck_async.shelf.format import Variable
    from pccheck_async.upkeep import StoredLeaf

ShelfPath: TypeAlias = Annotated[Path, path_argument("PATH", "File of the shelf.")]

shelf = typer.Typer(
    name="shelf",
    cls=CommandGroup,
    help="Look at a shelf: named variables in a mapped file.",
    no_args_is_help=True,
    add_completion=False,
)


@reporting
def ls(path: ShelfPath, json: Json = False) -> Report:
    """List the variables of a shelf.

    Refused while a process writes to it.

    Exit status: 0 listed, 1 it failed, 2 wrong usage, 4 it is damaged, or no shelf.
    """
    with pccheck.Shelf(path, readonly=True) as opened:
        variables = opened.variables()
        facts = pick(opened, "nbytes", "free_bytes", "sequence")
    rows = table("size", "transaction", "variable", "", right=2)
    for name, variable in variables.items():
        leaves = _leaves(variable)
        what = _leaf(leaves[0]) if len(leaves) == 1 else f"{len(leaves)} values"
        rows.add_row(size(variable.nbytes), str(variable.manifest.counter), printable(name), what)
    document = facts | {"variables": [_as_json(name, variable) for name, variable in variables.items()]}
    used = f"{len(variables)} variables; {size(facts['free_bytes'])} of {size(facts['nbytes'])} are free."
    return Report(document, [rows, used])


@reporting
def show(path: ShelfPath, json: Json = False) -> Report:
    """Show every value in the variables of a shelf.

    Shows plain values, and dtype and shape of arrays.

    Exit status: 0 shown, 1 it failed, 2 wrong usage, 4 it is damaged, or no shelf.
    """
    with pccheck.Shelf(path, readonly=True) as opened:
        variables = opened.variables()
    document = [
        _as_json(name, variable) | {"leaves": _leaves_as_json(variable)} for name, variable in variables.items()
    ]
    return Report(document, _shown(list(variables.values())))


@reporting
def verify(path: ShelfPath, json: Json = False) -> Report:
    """Compare every variable of a shelf with its checksum.

    The checksum is that of the variable's last transaction.

    Exit status: 0 no variable differs from its last transaction, 1 it failed, 2 wrong usage, 4 some were changed
    outside a transaction, or are damaged.
    """
    with pccheck.Shelf(path, readonly=True) as opened:
        changed = opened.verify()
        count = len(opened)
    text = [f"{printable(name)}: changed outside a transaction, or damaged" for name in changed]
    verdict = f"{len(changed)} of {count} variables are not what their last transactions made of them."
    text.append(verdict if changed else f"Every checksum of {count} variables holds.")
    return Report({"whole": not changed, "changed": list(changed)}, text, DIFFERENT if changed else 0)


def _leaves(variable: Variable) -> list[StoredLeaf]:
    from pccheck_async.upkeep import list_leaves

    return list_leaves(variable.manifest).leaves


def _leaf(leaf: StoredLeaf) -> str:
    if leaf.entry is None:
        return printable(leaf.text())
    return f"{leaf.entry.dtype} {list(leaf.entry.shape)} {leaf.entry.kind}"


def _shown(variables: list[Variable]) -> Iterator[str | Table]:
    for variable in variables:
        for leaf in _leaves(variable):
            yield f"{printable(leaf.path)} = {_leaf(leaf)}"


def _as_json(name: str, variable: Variable) -> dict[str, Any]:
    return {"name": name} | pick(variable, "offset", "nbytes") | pick(variable.manifest, "time", transaction="counter")


def _leaves_as_json(variable: Variable) -> list[dict[str, Any]]:
    return [
        {"path": leaf.path, "value": leaf.text(1 << 16)}
        if leaf.entry is None
        else {"path": leaf.path} | pick(leaf.entry, "dtype", "shape", "kind")
        for leaf in _leaves(variable)
    ]


for command in (ls, show, verify):
    shelf.command(command.__name__, cls=Command)(command)
flow_help(shelf)
