"""The ``pccheck`` command. What a subcommand needs is imported when it runs, so that ``pccheck --help`` is quick."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pccheck_async.cli.bench import app as bench_app

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
    path: Annotated[Path, typer.Argument(help="Folder of the store.")],
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
    path: Annotated[Path, typer.Argument(help="Folder of the store, or where it will be.")],
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
        typer.Option(help="Write the settings to this .json file, or to tuning.json in this folder (default: PATH)."),
    ] = None,
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
        )
    )


@app.command("export")
def run_export(
    path: Annotated[Path, typer.Argument(help="Folder of the store.")],
    out: Annotated[Path, typer.Argument(help="The new file, or folder (dcp).")],
    to: Annotated[_Target, typer.Option(help="The format.")],
    step: Annotated[int | None, typer.Option(help="The step (default: the newest checkpoint).")] = None,
    keys: Annotated[
        list[str] | None, typer.Option(help="Paths or globs of what to export, such as 'model.*'; may be repeated.")
    ] = None,
    root: Annotated[str | None, typer.Option(help="The part that becomes the whole, such as 'model'.")] = None,
) -> None:
    """Write a checkpoint, or a part of it, as a file that others read without this package.

    Exit status: 0 exported, 1 it failed or the format cannot express something, 2 wrong usage, 3 there is no such
    checkpoint.
    """
    from pccheck_async.cli.convert import run_export as run

    raise typer.Exit(run(path, out, to=to.value, step=step, keys=keys, root=root))


@app.command("import")
def run_import(
    file: Annotated[Path, typer.Argument(help="A file of torch.save or of safetensors.")],
    path: Annotated[Path, typer.Argument(help="Folder of the store; nobody else may write to it.")],
    source: Annotated[_Source, typer.Option("--from", help="The format.")],
    step: Annotated[int | None, typer.Option(help="The step of the new checkpoint.")] = None,
    root: Annotated[str | None, typer.Option(help="Put it below this name, such as 'model'.")] = None,
) -> None:
    """Save what a file holds as the newest checkpoint of a store. Runs no code from the file.

    Exit status: 0 imported, 1 it failed, 2 wrong usage.
    """
    from pccheck_async.cli.convert import run_import as run

    raise typer.Exit(run(file, path, source=source.value, step=step, root=root))


def main() -> None:
    """Run the ``pccheck`` command."""
    app()
