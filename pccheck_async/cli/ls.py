"""``pccheck ls``: the committed checkpoints of a store."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path

from rich.table import Table
from rich.text import Text

from pccheck_async import CheckpointError, CheckpointInfo, list_checkpoints
from pccheck_async.cli.output import as_json, console, created, dump, nothing_in, print_table, table
from pccheck_async.cli.show import complain, size

__all__ = ["EMPTY", "UNREADABLE", "run"]

UNREADABLE = 1
EMPTY = 3


def run(path: Path, *, json: bool) -> int:
    """List the checkpoints in ``path`` on stdout and return the exit status."""
    try:
        infos = list_checkpoints(path)
    except (CheckpointError, OSError) as error:
        complain(error)
        return UNREADABLE
    if json:
        dump([as_json(info) for info in infos])
    elif infos:
        print_table(console(), _table(infos))
    if not infos:
        complain(f"no committed checkpoint: {nothing_in(path)}")
        return EMPTY
    return 0


def _table(infos: list[CheckpointInfo]) -> Table:
    rows = table("step", "counter", "size", "captured (UTC)", "", "metadata", right=3)
    for info in infos:
        facts = ", ".join(f"{jsonlib.dumps(key)[1:-1]}={_short(value)}" for key, value in info.metadata.items())
        rows.add_row(
            str(info.step),
            str(info.counter),
            size(info.nbytes),
            created(info) or "",
            "pinned" if info.pinned else "",
            Text(facts),  # not markup
        )
    return rows


def _short(value: str | int | float | bool | None) -> str:
    """In JSON notation, so that no string reaches the terminal as a control sequence."""
    return f"{value:.6g}" if isinstance(value, float) else jsonlib.dumps(value)
