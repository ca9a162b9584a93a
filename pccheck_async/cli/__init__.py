"""The ``pccheck`` command. What a subcommand needs is imported when it runs, so that ``pccheck --help`` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app", "main"]

app = typer.Typer(
    name="pccheck",
    help="Look at checkpoint stores, and see a training run survive a SIGKILL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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


def main() -> None:
    """Run the ``pccheck`` command."""
    app()
