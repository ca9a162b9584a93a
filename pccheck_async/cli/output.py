"""What the commands share: paths, sizes, JSON, tables, progress bars, errors and exit statuses.

Importing this imports no torch: ``pccheck --help`` must be quick.
"""

from __future__ import annotations

import inspect
import json as jsonlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, ParamSpec, TypeAlias

import typer
from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from pccheck_async.errors import CheckpointError, NoCheckpointError

if TYPE_CHECKING:
    from pccheck_async.format import CheckpointInfo

__all__ = [
    "DIFFERENT",
    "FAILED",
    "NOTHING",
    "Json",
    "Report",
    "Step",
    "StoreFolder",
    "as_json",
    "captured_at",
    "complain",
    "dump",
    "duration",
    "flow_help",
    "json_value",
    "nothing_in",
    "parse_path",
    "printable",
    "progress_bar",
    "reporting",
    "show",
    "size",
    "table",
    "terminal",
]

P = ParamSpec("P")

FAILED = 1
NOTHING = 3
DIFFERENT = 4
"""Exit statuses: the command failed; there is no checkpoint to work on; it succeeded, and its answer is bad news."""

_MOST_JSON_BITS = 4096
_LONG_WORD = 20


class Report(NamedTuple):
    """The answer of a command.

    Attributes:
        document: What ``--json`` prints.
        text: What is printed without it: lines, and tables.
        status: Exit status of the process.
    """

    document: Any
    text: Iterable[str | Table]
    status: int = 0


def reporting(command: Callable[P, Report | int]) -> Callable[P, None]:
    """Make a typer command of a function that takes ``json`` and returns a report, or an exit status.

    An error of the package or of the system becomes one line on stderr and an exit status.
    """

    @wraps(command)
    def run(*arguments: P.args, **options: P.kwargs) -> None:
        try:
            report = command(*arguments, **options)
        except BrokenPipeError:  # nobody reads the output any more
            raise
        except (CheckpointError, ImportError, OSError, ValueError, MemoryError, RecursionError) as error:
            complain(error)
            raise typer.Exit(NOTHING if isinstance(error, NoCheckpointError) else FAILED) from None
        if isinstance(report, int):
            raise typer.Exit(report)
        if options["json"]:
            dump(report.document)
        else:
            show(report.text)
        raise typer.Exit(report.status)

    return run


def flow_help(app: typer.Typer) -> None:
    """Give each command its docstring as help, a paragraph a line: typer would keep the docstring's line breaks."""
    for command in app.registered_commands:
        paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            flow_help(group.typer_instance)


def parse_path(text: str) -> Path:
    """Return a path of the command line. Raises BadParameter for what :class:`Path` would make another place of.

    An empty one, which shells make of unset variables, is not the current folder, and a URL no folder named ``s3:``.
    """
    if not text:
        raise typer.BadParameter("the path is empty; the current folder is '.'")
    if "://" in text:
        raise typer.BadParameter(f"{text!r} is a URL; give a folder or file on a disk, or on a filesystem mounted here")
    return Path(text)


StoreFolder: TypeAlias = Annotated[Path, typer.Argument(parser=parse_path, metavar="PATH", help="Folder of the store.")]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Step: TypeAlias = Annotated[
    int | None, typer.Option(help="The newest checkpoint of this step (default: the newest of all).")
]


def complain(problem: str | Exception) -> None:
    """Print one line on stderr; of an error its name and message, no traceback."""
    name = f"{type(problem).__name__}: " if isinstance(problem, Exception) else ""
    print(f"pccheck: {name}{printable(str(problem))}", file=sys.stderr)


def nothing_in(path: Path) -> str:
    """Say why a folder has no committed checkpoint."""
    from pccheck_async.format.record import IDENTITY_NAME
    from pccheck_async.store import why_no_store

    return f"{path} holds no checkpoint yet" if (path / IDENTITY_NAME).is_file() else why_no_store(path)


# -- words


def printable(text: str) -> str:
    """Return a string from a file so that it reaches a terminal as text, never as a control sequence."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def size(nbytes: int) -> str:
    """Return a number of bytes for people, in units of 1000 bytes."""
    if nbytes < 1000:
        return f"{nbytes} B"
    amount = nbytes / 1000
    for unit in ("kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def duration(seconds: float) -> str:
    """Return a time for people: ms, s, min or h."""
    if seconds < 1:
        return f"{seconds * 1000:.{1 if seconds < 0.01 else 0}f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def captured_at(info: CheckpointInfo, *, iso: bool = False) -> str | None:
    """Return when a checkpoint was captured, in UTC; a damaged store may claim a time that no calendar has."""
    try:
        return info.created.isoformat() if iso else f"{info.created:%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return None if iso else "?"


# -- JSON


def as_json(info: CheckpointInfo) -> dict[str, Any]:
    """Return a checkpoint as every ``--json`` shows it."""
    facts = {name: getattr(info, name) for name in ("step", "counter", "nbytes", "time")}
    return facts | {
        "created": captured_at(info, iso=True),
        "pinned": info.pinned,
        "metadata": dict(info.metadata),
    }


def json_value(value: object) -> str | int | float | bool | None:
    """Return a value for JSON, which has no NaN, no infinities and no bytes: those become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and value.bit_length() > _MOST_JSON_BITS:
        return hex(value)  # Python refuses to write very long ints in decimal
    return value if value is None or isinstance(value, str | int | float | bool) else printable(repr(value))


def dump(value: Any, *, one_line: bool = False) -> None:
    """Print JSON on stdout, with :func:`json_value` of everything in it; flush it where it is one line of many."""
    print(jsonlib.dumps(_strict(value), indent=None if one_line else 2, allow_nan=False), flush=one_line)


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(each) for key, each in value.items()}
    return [_strict(each) for each in value] if isinstance(value, list | tuple) else json_value(value)


# -- on the terminal


def terminal(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return stdout, or stderr. Names and reasons come from files: they are no markup."""
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


def show(text: Iterable[str | Table]) -> None:
    """Print lines and tables on stdout. Nothing is cut off: a table too wide for the terminal becomes lines."""
    screen = terminal(width=None if sys.stdout.isatty() else 200)
    for part in text:
        if isinstance(part, str):
            screen.print(part, soft_wrap=True)
        else:
            _show_table(screen, part)


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


def _show_table(screen: Console, rows: Table) -> None:
    columns = [[str(column.header), *map(str, column.cells)] for column in rows.columns]
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
        screen.print(", ".join(facts))


def _words(texts: Iterable[str]) -> Iterator[str]:
    """What stands on a line of its own at least; very long words are folded."""
    return (word[:_LONG_WORD] for text in texts for word in text.split())


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes bytes done and bytes in all, and shows them on stderr where that is a terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    screen = terminal(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=screen, transient=True, disable=not screen.is_terminal
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
