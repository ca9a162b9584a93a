"""The ``pccheck`` command. What a subcommand needs is imported when it runs, so that ``pccheck --help`` is quick."""

from __future__ import annotations

import io
import os
import signal
import sys
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Never

import typer

from pccheck_async.cli.bench import app as bench_app
from pccheck_async.cli.flow import flow_help
from pccheck_async.cli.paths import parse_path
from pccheck_async.cli.show import complain
from pccheck_async.engine.standard_files import fill_standard_files

__all__ = ["app", "main"]


def _size(text: str) -> int:
    from pccheck_async.cli.tune import parse_size

    return parse_size(text)


class _Target(StrEnum):
    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"


class _Source(StrEnum):
    TORCH = "torch"
    SAFETENSORS = "safetensors"


app = typer.Typer(
    name="pccheck",
    help="Look at checkpoint stores, convert checkpoints, see a training run survive a SIGKILL, tune, and measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app)


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
    """Options of the command itself."""


@app.command("demo")
def run_demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 60,
    interval: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = 10,
    crash_at: Annotated[int, typer.Option(help="The killed run dies in the middle of the save of this step.")] = 40,
    store: Annotated[
        Path | None, typer.Option(help="Put the runs into a new folder in here (default: the system's place).")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the loss curves into this file (needs matplotlib).")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Do not delete the stores and loss files at the end.")] = False,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda or auto.")] = "cpu",
) -> None:
    """Train a small GPT three times: uninterrupted, killed in the middle of a save, and resumed; compare every bit.

    Exit status: 0 all losses and the whole final state are equal in every bit, 1 they are not or a run failed, 2 wrong
    usage.
    """
    from pccheck_async.cli.demo import run

    if not interval < crash_at <= steps:
        raise typer.BadParameter(
            f"--crash-at {crash_at} must lie after the first checkpoint (--interval {interval}) and not after the last "
            f"step (--steps {steps}): the killed run needs an older checkpoint to go back to"
        )
    raise typer.Exit(
        run(steps=steps, interval=interval, crash_at=crash_at, within=store, plot=plot, keep=keep, device=device)
    )


@app.command("ls")
def run_ls(
    path: Annotated[Path, typer.Argument(parser=parse_path, metavar="PATH", help="Folder of the store.")],
    json: Annotated[bool, typer.Option("--json", help="Print a JSON array of objects instead of a table.")] = False,
) -> None:
    """List the committed checkpoints of a store, newest first. Safe while a trainer writes to it.

    Exit status: 0 at least one checkpoint is listed, 1 the store cannot be read, 2 wrong usage, 3 there is no committed
    checkpoint in this folder.
    """
    from pccheck_async.cli.ls import run

    raise typer.Exit(run(path, json=json))


@app.command("tune")
def run_tune(
    path: Annotated[
        Path, typer.Argument(parser=parse_path, metavar="PATH", help="Folder of the store, or where it will be.")
    ],
    nbytes: Annotated[
        int | None,
        typer.Option(
            "--size",
            parser=_size,
            metavar="SIZE",
            help="Size of a checkpoint, such as 500MB or 1.5GiB (default: that of the newest one in PATH).",
        ),
    ] = None,
    keep_last: Annotated[int, typer.Option(min=1, help="Checkpoints that the engine will keep.")] = 1,
    host_memory: Annotated[
        int | None,
        typer.Option(parser=_size, metavar="SIZE", help="Most staging memory (default: a quarter of what is free)."),
    ] = None,
    step_seconds: Annotated[
        float | None, typer.Option(min=1e-6, help="Time of a training step: shows how often to save.")
    ] = None,
    budget_seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="About how long to measure; a slow disk needs more.")
    ] = 10.0,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=parse_path,
            metavar="OUT",
            help="Write the settings to this .json file, or to tuning.json in this folder (default: PATH).",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Measure the disk under PATH and write down the settings for an engine there. Changes no checkpoint.

    Exit status: 0 tuned, 1 it failed or nothing fits into storage, memory and cores, 2 wrong usage, 3 there is no
    checkpoint in PATH to take the size from, and no --size.
    """
    from pccheck_async.cli.tune import run

    raise typer.Exit(
        run(
            path,
            nbytes=nbytes,
            keep_last=keep_last,
            host_memory=host_memory,
            step_seconds=step_seconds,
            budget_seconds=budget_seconds,
            out=out,
            json=json,
        )
    )


@app.command("watch")
def run_watch(
    path: Annotated[Path, typer.Argument(parser=parse_path, metavar="PATH", help="Folder of the store.")],
    interval: Annotated[float, typer.Option(min=0.1, max=86_400, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON objects instead, one a line.")] = False,
) -> None:
    """Watch an engine that saves into a store from another process, without disturbing it.

    What it does shows from its first checkpoint on: what is in flight, rates, waiting, what is due next. A terminal
    gets a live view until Ctrl-C. Anything else, and --json, gets a line for each look that finds a change, until the
    engine ends; where none runs, one line.

    Exit status: 0 ended by Ctrl-C, the engine that was watched was closed, or with --once one runs there; 1 the store
    cannot be read; 2 wrong usage; 3 there is nothing in this folder; 4 no engine runs there (it died, was closed
    before, or has not saved yet).
    """
    from pccheck_async.cli.watch import run

    raise typer.Exit(run(path, interval=interval, once=once, json=json))


_Store = Annotated[Path, typer.Argument(parser=parse_path, metavar="PATH", help="Folder of the store.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
_Step = Annotated[int | None, typer.Option(help="The newest checkpoint of this step (default: the newest of all).")]


@app.command("show")
def run_show(path: _Store, step: _Step = None, json: _Json = False) -> None:
    """Show the tree of a checkpoint: leaves with dtype, shape and size, aliases, plain values, chunks, the manifest.

    Reads no tensor and writes nothing. Safe while a trainer writes to the store.

    Exit status: 0 shown, 1 it cannot be read, 2 wrong usage, 3 there is no such checkpoint.
    """
    from pccheck_async.cli.tree import run

    raise typer.Exit(run(path, step=step, json=json))


@app.command("verify")
def run_verify(
    path: _Store,
    step: _Step = None,
    every: Annotated[bool, typer.Option("--all", help="Check all committed checkpoints.")] = False,
    json: _Json = False,
) -> None:
    """Check every checksum: all copies of the commit records, the manifest, and every chunk. Names what is damaged.

    Writes nothing. Safe while a trainer writes to the store.

    Exit status: 0 every byte is what was written, 1 the store cannot be read, 2 wrong usage, 3 there is no such
    checkpoint, 4 something is damaged.
    """
    from pccheck_async.cli.verify import run

    if every and step is not None:
        raise typer.BadParameter("--all and --step exclude each other")
    raise typer.Exit(run(path, step=step, every=every, json=json))


@app.command("diff")
def run_diff(
    one: Annotated[str, typer.Argument(metavar="PATH[@STEP]", help="The first checkpoint.")],
    other: Annotated[str, typer.Argument(metavar="PATH[@STEP]", help="The second one; @STEP: in the same store.")],
    json: _Json = False,
) -> None:
    """Compare two checkpoints leaf by leaf: which differ, in how many elements, and by how much. NaN equals NaN.

    Verifies what it reads and writes nothing. Safe while a trainer writes to the store, which may need a slot more.

    Exit status: 0 all leaves are equal in every bit, 1 one cannot be read, 2 wrong usage, 3 there is no such
    checkpoint, 4 they differ.
    """
    from pccheck_async.cli.diff import run

    raise typer.Exit(run(one, other, json=json))


@app.command("copy")
def run_copy(
    source: Annotated[Path, typer.Argument(parser=parse_path, metavar="SOURCE", help="Store that has the checkpoint.")],
    target: Annotated[
        Path, typer.Argument(parser=parse_path, metavar="TARGET", help="Store that gets it; made where there is none.")
    ],
    step: _Step = None,
    pin: Annotated[
        bool | None, typer.Option("--pin/--no-pin", help="Pin the copy, or do not (default: as in SOURCE).")
    ] = None,
    json: _Json = False,
) -> None:
    """Copy a checkpoint into another store, verified on the way; it becomes the newest one there, others stay.

    A trainer may write to SOURCE meanwhile, not to TARGET.

    Exit status: 0 the copy is durable, 1 it failed and nothing was committed, 2 wrong usage, 3 there is no such
    checkpoint.
    """
    from pccheck_async.cli.copy import run

    raise typer.Exit(run(source, target, step=step, pinned=pin, json=json))


@app.command("rm")
def run_rm(
    path: _Store,
    steps: Annotated[list[int], typer.Argument(help="Steps to remove, pinned or not.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also where no checkpoint is left then.")] = False,
    json: _Json = False,
) -> None:
    """Remove checkpoints, all of these steps or none, in one commit, and free their space. No trainer has PATH open.

    Exit status: 0 removed, 1 nothing was removed, 2 wrong usage, 3 there is no checkpoint of one of the steps.
    """
    from pccheck_async.cli.change import run_rm as run

    raise typer.Exit(run(path, steps, yes=yes, force=force, json=json))


@app.command("pin")
def run_pin(
    path: _Store, step: Annotated[int, typer.Argument(help="Step of the checkpoint.")], json: _Json = False
) -> None:
    """Keep the newest checkpoint of a step whatever a trainer's rules say. No trainer has PATH open.

    Exit status: 0 pinned, 1 it failed, 2 wrong usage, 3 there is no such checkpoint.
    """
    from pccheck_async.cli.change import run_pin as run

    raise typer.Exit(run(path, step, pinned=True, json=json))


@app.command("unpin")
def run_unpin(
    path: _Store, step: Annotated[int, typer.Argument(help="Step of the checkpoint.")], json: _Json = False
) -> None:
    """Leave a pinned checkpoint to a trainer's rules again. No trainer has PATH open.

    Exit status: 0 unpinned, 1 it failed, 2 wrong usage, 3 there is no such checkpoint.
    """
    from pccheck_async.cli.change import run_pin as run

    raise typer.Exit(run(path, step, pinned=False, json=json))


@app.command("recover")
def run_recover(
    path: _Store,
    write: Annotated[
        bool, typer.Option("--write", help="Write a new commit record, and store.json where it is lost.")
    ] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Search the slots also where a commit record is valid.")
    ] = False,
    slots: Annotated[
        list[int] | None, typer.Option("--slot", help="Name only the checkpoint in this slot; may be repeated.")
    ] = None,
    json: _Json = False,
) -> None:
    """Find what can be salvaged where the commit records or store.json are lost: checkpoints of which every byte holds.

    Writes nothing unless told to. Never changes a slot, and keeps the files that it replaces under other names.

    Exit status: 0 the store is in order, or written, 1 it failed, 2 wrong usage, 3 nothing whole was found, 4 there is
    something to write.
    """
    from pccheck_async.cli.recover import run

    raise typer.Exit(run(path, write=write, search=search, slots=slots, json=json))


@app.command("export")
def run_export(
    path: Annotated[Path, typer.Argument(parser=parse_path, metavar="PATH", help="Folder of the store.")],
    out: Annotated[Path, typer.Argument(parser=parse_path, metavar="OUT", help="The new file, or folder (dcp).")],
    to: Annotated[_Target, typer.Option(help="The format.")],
    step: Annotated[int | None, typer.Option(help="The step (default: the newest checkpoint).")] = None,
    keys: Annotated[
        list[str] | None, typer.Option(help="Paths or globs of what to export, such as 'model.*'; may be repeated.")
    ] = None,
    root: Annotated[str | None, typer.Option(help="The part that becomes the whole, such as 'model'.")] = None,
    json: _Json = False,
) -> None:
    """Write a checkpoint, or a part of it, as a file that others read without this package.

    Exit status: 0 exported, 1 it failed or the format cannot express something, 2 wrong usage, 3 there is no such
    checkpoint.
    """
    from pccheck_async.cli.convert import run_export as run

    raise typer.Exit(run(path, out, to=to.value, step=step, keys=keys, root=root, json=json))


@app.command("import")
def run_import(
    file: Annotated[
        Path, typer.Argument(parser=parse_path, metavar="FILE", help="A file of torch.save or of safetensors.")
    ],
    path: Annotated[
        Path,
        typer.Argument(parser=parse_path, metavar="PATH", help="Folder of the store; nobody else may write to it."),
    ],
    source: Annotated[_Source, typer.Option("--from", help="The format.")],
    step: Annotated[
        int | None, typer.Option(help="The step of the new checkpoint (default: what the file says, or a count).")
    ] = None,
    root: Annotated[str | None, typer.Option(help="Put it below this name, such as 'model'.")] = None,
    json: _Json = False,
) -> None:
    """Save what a file holds as the newest checkpoint of a store. Runs no code from the file.

    Exit status: 0 imported, 1 it failed, 2 wrong usage.
    """
    from pccheck_async.cli.convert import run_import as run

    raise typer.Exit(run(file, path, source=source.value, step=step, root=root, json=json))


flow_help(app)


def main() -> None:
    """Run the ``pccheck`` command. Ends quietly, with status 1, where nobody reads its output to the end.

    A SIGTERM or a SIGHUP ends it as Ctrl-C does: what it began to write is removed.
    """
    _prepare()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:  # before the command began, or after it
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        with suppress(OSError):
            if not isinstance(error, BrokenPipeError):
                complain(error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would be flushed at exit
        sys.exit(1)


def _prepare() -> None:
    fill_standard_files()
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
