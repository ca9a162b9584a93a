# SPDX-License-Identifier: Apache-2.0
"""``pccheck memory``: lists and removes the stores that engines with ``MemoryTier`` left in this machine's memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from pccheck_async.cli.output import (
    MISUSED,
    NOTHING,
    Command,
    CommandGroup,
    Json,
    Report,
    as_json,
    complain,
    flow_help,
    printable,
    reporting,
    size,
    table,
)

memory = typer.Typer(
    name="memory",
    cls=CommandGroup,
    help="Look at, or remove, what engines with MemoryTier have left in memory.",
    no_args_is_help=True,
    add_completion=False,
)
Root = Annotated[
    Path,
    typer.Option(
        "--path", metavar="FOLDER", show_default=False, help="The tmpfs of MemoryTier(path=...), by default /dev/shm."
    ),
]
SHM = Path("/dev/shm")


@reporting
def ls(path: Root = SHM, json: Json = False) -> Report:
    """List this user's stores in memory.

    A process that was killed leaves its store there, for its restart.

    Exit status: 0 there are some, 1 it failed, 2 wrong usage, 3 there are none.
    """
    from pccheck_async.upkeep import list_memory

    found = list_memory(path)
    if not found:
        complain(f"nothing in memory: {path} has no store of this user")
        return Report([], (), NOTHING)
    rows = table("size", "steps", "", "folder", "of the store", right=1)
    for each in found:
        steps = ", ".join(str(info.step) for info in each.infos) or each.problem or "none"
        rows.add_row(size(each.nbytes), steps, "in use" if each.in_use else "", each.path.name, printable(each.origin))
    document = [
        {
            "path": str(each.path),
            "origin": each.origin,
            "nbytes": each.nbytes,
            "in_use": each.in_use,
            "problem": each.problem,
            "checkpoints": [as_json(info) for info in each.infos],
        }
        for each in found
    ]
    return Report(document, [f"In {path}:", rows])


@reporting
def clear(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="FOLDER", help="As `ls` lists them, or their stores.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that no engine has open.")] = False,
    path: Root = SHM,
    json: Json = False,
) -> Report:
    """Remove stores in memory.

    A restart then resumes from the disk. A store that an engine has open is not removed. FOLDER is a name that `ls`
    shows, or the folder of the store on disk.

    Exit status: 0 removed, 1 it failed, or an engine has one of them open, 2 wrong usage.
    """
    from pccheck_async.upkeep import clear_memory, list_memory

    if bool(folders) == everything:
        complain("name folders, or give --all")
        return Report({}, (), MISUSED)
    found = list_memory(path)
    chosen = [each.path for each in found if everything and not each.in_use]
    for folder in folders or []:
        own = [each.path for each in found if each.origin == os.path.abspath(folder)]
        inside = path / folder  # an absolute one stays as it is
        chosen += own or [inside if inside.exists() else folder]
    freed = {str(folder): clear_memory(folder) for folder in chosen}
    if not freed:
        open_ones = f"{len(found)} in use" if found else "no store of this user"
        return Report({"freed": freed}, [f"Nothing was removed: {path} has {open_ones}."])
    noun = "store" if len(freed) == 1 else "stores"
    return Report({"freed": freed}, [f"Removed {len(freed)} {noun} in memory: {size(sum(freed.values()))} are free."])


for command in (ls, clear):
    memory.command(command.__name__, cls=Command)(command)
flow_help(memory)
