"""What the operator's commands print alike: JSON, tables, a progress bar."""

from __future__ import annotations

import json as jsonlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from pccheck_async import CheckpointInfo, NoCheckpointError
from pccheck_async.cli.show import complain, printable
from pccheck_async.format.record import IDENTITY_NAME
from pccheck_async.store.store_reader import why_no_store

__all__ = [
    "DIFFERENT",
    "FAILED",
    "NOTHING",
    "as_json",
    "console",
    "created",
    "dump",
    "json_value",
    "nothing_in",
    "print_table",
    "progress_bar",
    "refuse",
    "table",
]

FAILED = 1
NOTHING = 3
DIFFERENT = 4
"""Exit statuses: it could not be done; there is nothing to do it with; it was done, and the answer is bad news."""

_MOST_JSON_BITS = 4096
_LONG_WORD = 20


def refuse(error: Exception) -> int:
    """Print an error, and return the exit status for it.

    Raises the error where it is that nobody reads the output any more.
    """
    if isinstance(error, BrokenPipeError):
        raise error
    complain(error)
    return NOTHING if isinstance(error, NoCheckpointError) else FAILED


def nothing_in(path: Path) -> str:
    """Say why a folder has no committed checkpoint."""
    return f"{path} holds no checkpoint yet" if (path / IDENTITY_NAME).is_file() else why_no_store(path)


def table(*headings: str, right: int = 0) -> Table:
    """Return a table; the first ``right`` columns hold numbers, the last one folds."""
    made = Table(box=SIMPLE, pad_edge=False)
    for number, heading in enumerate(headings):
        last = number == len(headings) - 1
        made.add_column(
            heading,
            justify="right" if number < right else "left",
            no_wrap=not last,
            overflow="fold" if last else "ellipsis",
        )
    return made


def print_table(screen: Console, rows: Table) -> None:
    """Print a table; where the terminal is too narrow for it, a line for each row: nothing is cut off."""
    columns = [[_plain(column.header), *map(_plain, column.cells)] for column in rows.columns]
    least = sum(
        max(map(cell_len, texts if column.no_wrap else _words(texts)), default=0) + 3  # padding, and a line
        for column, texts in zip(rows.columns, columns, strict=True)
    )
    if least <= screen.width:
        screen.print(rows)
        return
    headings, *lines = zip(*columns, strict=True)
    for line in lines:
        facts = (f"{heading} {text}".strip() for heading, text in zip(headings, line, strict=True) if text)
        screen.print(Text(", ".join(facts)))


def json_value(value: object) -> str | int | float | bool | None:
    """Return a value for JSON, which has no NaN, no infinities and no bytes: those become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and value.bit_length() > _MOST_JSON_BITS:
        return hex(value)  # Python refuses to write very long ints in decimal
    return value if value is None or isinstance(value, str | int | float | bool) else printable(repr(value))


def as_json(info: CheckpointInfo) -> dict[str, Any]:
    """Return a checkpoint as ``pccheck ls --json`` shows it."""
    return {
        "step": info.step,
        "counter": info.counter,
        "nbytes": info.nbytes,
        "time": info.time,
        "created": created(info, iso=True),
        "pinned": info.pinned,
        "metadata": dict(info.metadata),
    }


def created(info: CheckpointInfo, *, iso: bool = False) -> str | None:
    """Return when a checkpoint was captured; a damaged store may claim any time, also one that no calendar has."""
    try:
        return info.created.isoformat() if iso else f"{info.created:%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return None if iso else "?"


def dump(value: Any) -> None:
    """Print JSON on stdout, with :func:`json_value` of everything in it."""
    print(jsonlib.dumps(_strict(value), indent=2, allow_nan=False))


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(each) for key, each in value.items()}
    return [_strict(each) for each in value] if isinstance(value, list | tuple) else json_value(value)


def console() -> Console:
    """Return stdout for tables; wide where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def _words(texts: Iterable[str]) -> Iterator[str]:
    """What stands on a line of its own at least; very long words are folded."""
    return (word[:_LONG_WORD] for text in texts for word in text.split())


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes bytes done and bytes in all, and shows them on stderr where that is a terminal."""
    screen = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=screen, transient=True, disable=not screen.is_terminal
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
