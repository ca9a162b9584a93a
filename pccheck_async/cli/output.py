# SPDX-License-Identifier: Apache-2.0
"""Common parts of the commands: paths, sizes, JSON, tables, progress bars, errors and exit statuses.

Importing this imports no torch: ``pccheck --help`` must be quick.
"""

from __future__ import annotations

import importlib.util
import inspect
import json as jsonlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, ParamSpec, TextIO, TypeAlias

import typer
from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.tree import Tree
from typer.core import TyperArgument, TyperCommand, TyperGroup

from pccheck_async.errors import (
    CheckpointError,
    CorruptStoreError,
    IncompleteCheckpointError,
    NewerFormatError,
    NoCheckpointError,
    ReadError,
    is_exhausted,
    is_forbidden,
)

if TYPE_CHECKING:
    from pccheck_async.format import CheckpointInfo

P = ParamSpec("P")

FAILED = 1
MISUSED = 2
NOTHING = 3
DIFFERENT = 4
"""Exit statuses, the same for all commands: the command failed (1); it was used wrongly (2); there is no checkpoint to
work on (3); something is lost or damaged, or compared checkpoints differ (4)."""

_MOST_JSON_BITS = 4096
_LONG_WORD = 20
_LONGEST_LINE = 1 << 14
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i)?B?", re.ASCII)


class Report(NamedTuple):
    """The answer of a command: the document for ``--json``, the text without it, and the exit status."""

    document: Any
    text: Iterable[str | Table | Tree]
    status: int = 0


def reporting(command: Callable[P, Report | int]) -> Callable[P, None]:
    """Decorate a function that takes ``json`` and returns a report, or an exit status, to make it a typer command.

    An error of the package or of the system becomes one line on stderr, with ``--json`` also a document on stdout, and
    an exit status. If the reader of the output closes it early, as in ``| head``, the rest is dropped without an error.
    """

    @wraps(command)
    def run(*arguments: P.args, **options: P.kwargs) -> None:
        report: Report | int = 0
        try:
            try:
                report = command(*arguments, **options)
            except BrokenPipeError:
                raise
            except typer.Abort as abort:  # at a question
                raise typer.Exit(130 if isinstance(abort.__context__, KeyboardInterrupt) else FAILED) from None
            except (CheckpointError, ImportError, OSError, ValueError, MemoryError, RecursionError) as error:
                complain(error)
                if options.get("json"):
                    dump({"error": {"type": type(error).__name__, "message": str(error)}}, one_line=True)
                raise typer.Exit(status_of(error)) from None
            if not isinstance(report, int):
                if options["json"]:
                    dump(report.document)
                else:
                    show(report.text)
            sys.stdout.flush()
        except BrokenPipeError:  # nobody reads the output any more
            drop_output(sys.stdout)
        raise typer.Exit(report if isinstance(report, int) else report.status)

    return run


def status_of(error: Exception) -> int:
    """Return the exit status for an error: one of the four above."""
    if isinstance(error, NewerFormatError) or getattr(error, "unasked", False):  # it is whole
        return FAILED
    unreadable = isinstance(error, ReadError) and not (is_exhausted(error) or is_forbidden(error))
    if unreadable or isinstance(error, CorruptStoreError | IncompleteCheckpointError):
        return DIFFERENT
    if isinstance(error, NoCheckpointError | FileNotFoundError):
        return NOTHING
    return MISUSED if isinstance(error, ValueError) and not isinstance(error, CheckpointError) else FAILED


def drop_output(*streams: TextIO) -> None:
    """Redirect these streams to /dev/null, so that flushing them at exit does not fail."""
    for stream in streams:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def flow_help(app: typer.Typer) -> None:
    """Set each command's help to its docstring, with each paragraph in one line: typer would keep the line breaks."""
    for command in app.registered_commands:
        paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def without_types(params: list[Any]) -> list[Any]:
    """Change parameters so that the help shows metavars alone, no types, and nothing beside a flag; return them."""
    for param in params:
        if isinstance(param, TyperArgument):
            vars(param)["display_type_rich"] = lambda ctx: None
            if param.hidden:
                vars(param)["get_usage_pieces"] = lambda ctx: []
        elif getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command whose help shows no types of parameters."""

    def get_params(self, ctx: Any) -> Any:
        """Return the command's arguments and options, including ``--help``."""
        return without_types(super().get_params(ctx))


class CommandGroup(TyperGroup):
    """A group of commands whose help shows no types of parameters."""

    def get_params(self, ctx: Any) -> Any:
        """Return the group's own options, including ``--help``."""
        return without_types(super().get_params(ctx))


def parse_path(text: str) -> Path:
    """Return the path that a text names; BadParameter for an empty text, and for a URL."""
    if not text:
        raise typer.BadParameter("the path is empty; the current folder is '.'")
    if "://" in text:
        raise typer.BadParameter(f"{text!r} is a URL; give a folder or file on a disk, or on a filesystem mounted here")
    return Path(text)


def parse_place(text: str) -> Path | str:
    """Return the path that a text names, or the text itself if it is the URL of a bucket."""
    return text if "://" in text else parse_path(text)


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``least`` on. Typer's own would show a range beside the option's name."""

    def parse(text: str) -> int:
        if (number := int(text)) < least:
            raise typer.BadParameter(f"it is at least {least}, not {number}")
        return number

    parse.__name__ = "int"  # in the error for another text
    return parse


def seconds(least: float, most: float = math.inf) -> Callable[[str], float]:
    """Return a parser of numbers of seconds from ``least`` to ``most``."""

    def parse(text: str) -> float:
        number = float(text)
        if not least <= number <= most or number == math.inf:
            raise typer.BadParameter(f"it is between {least:g} and {most:g} seconds, not {number:g}")
        return number

    parse.__name__ = "float"
    return parse


def one_of(*names: str) -> Callable[[str], str]:
    """Return a parser that accepts these names alone, and suggests the nearest one for another text."""

    def parse(text: str) -> str:
        if text not in names:
            close = get_close_matches(text, names, 1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(names)}{meant}")
        return text

    return parse


def path_argument(metavar: str, help: str) -> Any:  # noqa: A002 - as typer names it
    """Return a typer argument that is a path."""
    return typer.Argument(parser=parse_path, metavar=metavar, help=help)


def place_argument(metavar: str, help: str) -> Any:  # noqa: A002 - as typer names it
    """Return a typer argument that is a path, or the URL of a bucket."""
    return typer.Argument(parser=parse_place, metavar=metavar, help=help)


StoreFolder: TypeAlias = Annotated[Path, path_argument("PATH", "Folder of the store.")]
AnyPlace: TypeAlias = Annotated[
    Path, place_argument("PATH", "Folder of the store, or of a group of ranks; or the URL of a bucket.")
]
AnyFolder: TypeAlias = Annotated[Path, path_argument("PATH", "Folder of the store, or of a group of ranks.")]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Rank: TypeAlias = Annotated[
    int | None,
    typer.Option(parser=at_least(0), metavar="RANK", help="Of a group: whose part of a checkpoint (default: 0)."),
]
Step: TypeAlias = Annotated[
    int | None, typer.Option(metavar="STEP", help="The newest checkpoint of this step (default: the newest of all).")
]
OneStep: TypeAlias = Annotated[int | None, typer.Option(metavar="STEP", help="The newest checkpoint of this step.")]
Name: TypeAlias = Annotated[
    str | None, typer.Option(metavar="NAME", help="The checkpoint with this name, instead of a step.")
]


def no_file(option: str, file: Path | None) -> str | None:
    """Return why the file that an option names cannot be written; None if nothing is known against it."""
    if file is not None and file.is_dir():
        return f"{option}: {file} is a folder"
    if file is not None and not file.resolve().parent.is_dir():
        return f"{option}: there is no folder {file.resolve().parent}"
    return None


def no_plot(plot: Path | None) -> str | None:
    """Return why nothing can be drawn into the file of ``--plot``; None if nothing is known against it."""
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install matplotlib"
    return no_file("--plot", plot)


def complain(problem: str | Exception) -> None:
    """Print one line on stderr: a text, or the name and message of an error, without traceback."""
    name = f"{type(problem).__name__}: " if isinstance(problem, Exception) else ""
    print(f"pccheck: {name}{printable(str(problem))}", file=sys.stderr)


# -- words


def printable(text: str) -> str:
    """Return a string with its unprintable characters escaped, so that a terminal gets no control sequence from it."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def size(nbytes: int) -> str:
    """Return a number of bytes as text for people, in units of powers of 1000: "1.5 GB"."""
    if nbytes < 1000:
        return f"{nbytes} B"
    power = next((power for power in (1, 2, 3) if nbytes < 1000 ** (power + 1)), 4)
    return f"{nbytes / 1000**power:.1f} {' kMGT'[power]}B"


def binary_size(nbytes: int) -> str:
    """Return a number of bytes as text, in the largest unit (B to GiB) of which it is a whole number: "8 MiB"."""
    power = next((power for power in (3, 2, 1) if nbytes and not nbytes % 1024**power), 0)
    return f"{nbytes >> 10 * power} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def parse_size(text: str) -> int:
    """Return the bytes of a size such as "1073741824", "1GiB" or "1.5 GB" (units of 1000); else BadParameter."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; write it like 500MB, 1.5GiB or 1073741824")
    number, unit, binary = match.groups()
    nbytes = float(number) * (1024 if binary else 1000) ** " kMGT".index(unit.replace("K", "k") or " ")
    if not 1 <= nbytes < 1 << 63:
        raise typer.BadParameter("a size is at least 1 byte, and less than 8 EiB")
    return int(nbytes)


def duration(seconds: float) -> str:
    """Return a duration as text for people, in ms, s, min or h."""
    if seconds < 1:
        return f"{seconds * 1000:.{1 if seconds < 0.01 else 0}f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def captured_at(info: CheckpointInfo, *, iso: bool = False) -> str | None:
    """Return a checkpoint's time of capture as text, in UTC; for an impossible one "?", or None with ``iso``."""
    try:
        return info.created.isoformat() if iso else f"{info.created:%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return None if iso else "?"


# -- JSON


def as_json(info: CheckpointInfo) -> dict[str, Any]:
    """Return the facts about a checkpoint for JSON, the same for every command."""
    facts = pick(info, "step", "counter", "nbytes", "time")
    return facts | {
        "created": captured_at(info, iso=True),
        "pinned": info.pinned,
        "rejected": info.rejected,
        "name": info.name,
        "metadata": dict(info.metadata),
    }


def pick(thing: object, *names: str, **renamed: str) -> dict[str, Any]:
    """Return a dict of attributes: ``names``, and for each ``renamed`` pair ``key=attribute`` under another key."""
    return {name: getattr(thing, attribute) for name, attribute in (*zip(names, names, strict=True), *renamed.items())}


def json_value(value: object) -> str | int | float | bool | None:
    """Return a value that JSON can express: NaN, infinities, very long ints and other types become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and value.bit_length() > _MOST_JSON_BITS:
        return hex(value)  # Python refuses to write very long ints in decimal
    return value if value is None or isinstance(value, str | int | float | bool) else printable(repr(value))


def dump(value: Any, *, one_line: bool = False) -> None:
    """Print JSON on stdout, with :func:`json_value` applied to everything in it; ``one_line`` also flushes."""
    print(jsonlib.dumps(_strict(value), indent=None if one_line else 2, allow_nan=False), flush=one_line)


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(each) for key, each in value.items()}
    return [_strict(each) for each in value] if isinstance(value, list | tuple) else json_value(value)


# -- on the terminal


class _Screen(Console):
    def on_broken_pipe(self) -> None:
        """Called for a BrokenPipeError: raise it again, where rich's own console would exit with status 1."""
        raise BrokenPipeError from None


def terminal(*, stderr: bool = False, markup: bool = False, width: int | None = None) -> Console:
    """Return a rich console on stdout, or stderr, by default without markup, because texts come from files."""
    if width is None and not stderr and not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        width = 200
    return _Screen(stderr=stderr, width=width, markup=markup, emoji=False, highlight=False)


def show(text: Iterable[str | Table | Tree]) -> None:
    """Print lines, tables and trees on stdout, nothing cut off: a table too wide for the terminal becomes lines."""
    screen = terminal()
    for part in text:
        if isinstance(part, str):
            screen.print(part, soft_wrap=True)
        elif isinstance(part, Tree):
            terminal(width=_LONGEST_LINE).print(part)
        else:
            _show_table(screen, part)


def table(*headings: str, right: int = 0) -> Table:
    """Return an empty table with these headings; the first ``right`` columns are right-aligned, the last one folds."""
    made = Table(box=SIMPLE, pad_edge=False)
    for number, heading in enumerate(headings):
        justify: Literal["left", "right"] = "right" if number < right else "left"
        made.add_column(heading, justify=justify, no_wrap=True, overflow="ellipsis")
    made.columns[-1].no_wrap, made.columns[-1].overflow = False, "fold"
    return made


def _show_table(screen: Console, rows: Table) -> None:
    columns = [[str(column.header), *map(str, column.cells)] for column in rows.columns]
    words = [word[:_LONG_WORD] for text in columns[-1] for word in text.split()]  # the last column folds between them
    least = sum(max(map(cell_len, texts), default=0) + 3 for texts in (*columns[:-1], words))  # padding, and a line
    if least <= screen.width:
        screen.print(rows)
        return
    headings, *lines = zip(*columns, strict=True)
    for line in lines:
        facts = (f"{heading} {text}".strip() for heading, text in zip(headings, line, strict=True) if text)
        screen.print(", ".join(facts))


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of bytes done and bytes in all that moves a progress bar on stderr, if that is a terminal.

    There is no bar under a notebook's `!`, which looks like a terminal but would show every state of the bar.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    screen = terminal(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    hidden = not screen.is_terminal or "JPY_PARENT_PID" in os.environ
    with Progress(*columns, TimeRemainingColumn(), console=screen, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
