# SPDX-License-Identifier: Apache-2.0
"""The ``pccheck`` command: nothing else in the package prints.

It may import every room. Public names of the package are looked up when a command runs (``pccheck.load``), and torch
with them, so that ``pccheck --help`` is quick.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Never

import typer

from pccheck_async.cli.bench import bench
from pccheck_async.cli.changing import copy, pin, reject, remove, unpin
from pccheck_async.cli.checking import recover, verify
from pccheck_async.cli.comparing import compare
from pccheck_async.cli.converting import export, import_
from pccheck_async.cli.demo import demo
from pccheck_async.cli.listing import ls, show
from pccheck_async.cli.memory import memory
from pccheck_async.cli.output import FAILED, Command, CommandGroup, complain, drop_output, flow_help
from pccheck_async.cli.shelf import shelf
from pccheck_async.cli.tune import tune
from pccheck_async.cli.watch import watch
from pccheck_async.telemetry import fill_standard_files

__all__ = ["app", "main"]

app = typer.Typer(
    name="pccheck",
    cls=CommandGroup,
    help="Look after the checkpoint stores of pccheck_async.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from pccheck_async import __version__

        typer.echo(f"pccheck_async {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Handle the options of ``pccheck`` itself: ``--version``."""


LOOK, CHANGE = "Look at a store, also beside a trainer", "Change a store that no trainer has open"
PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    LOOK: (ls, show, verify, compare, watch),
    CHANGE: (pin, unpin, remove, reject, recover),
    "Copy and convert": (copy, export, import_),
    "Measure and try": (tune, bench, demo),
}
for panel, commands in PANELS.items():
    for command in commands:
        name = command.__name__.rstrip("_")
        app.command(name, cls=Command, rich_help_panel=panel)(command)
for name, command in (("rm", remove), ("diff", compare)):  # as they were called in version 0.1
    app.command(name, cls=Command, hidden=True)(command)
flow_help(app)
app.add_typer(shelf, rich_help_panel=LOOK)
app.add_typer(memory, rich_help_panel=LOOK)


def main() -> None:
    """Run the ``pccheck`` command, and exit with its status; without an error if the reader of a pipe has gone.

    SIGTERM and SIGHUP end the command like Ctrl-C: files that it began to write are removed.
    """
    _prepare()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except SystemExit as end:
        # Help, version and complaints are shown by typer, which ends with 1 where nobody reads them.
        broken, status = False, 0
        error = end.__context__
        while error is not None:
            broken, status = broken or isinstance(error, BrokenPipeError), getattr(error, "exit_code", status)
            error = error.__context__
        if not broken:
            raise
        drop_output(sys.stdout, sys.stderr)
        sys.exit(status)
    except KeyboardInterrupt:  # before the command began, or after it
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        with suppress(OSError):
            if not isinstance(error, BrokenPipeError):
                complain(error)
        drop_output(sys.stdout)
        sys.exit(0 if isinstance(error, BrokenPipeError) else FAILED)


def _prepare() -> None:
    fill_standard_files()
    warnings.showwarning = lambda message, *_, **__: complain(f"warning: {message}")
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names are shown that the terminal's encoding, or any, lacks
            stream.reconfigure(errors="backslashreplace")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores it
            signal.signal(number, _leave)


def _leave(number: int, frame: object) -> Never:
    raise SystemExit(128 + number)
