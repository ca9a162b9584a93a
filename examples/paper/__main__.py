"""The papers' figures: ``python -m examples.paper run``, ``report``, ``goodput``, ``plot``; see README.md here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parents[2]))  # where `examples` lies, when this runs as `python examples/paper`

from pccheck_async.cli.output import flow_help

__all__ = ["app"]

app = typer.Typer(
    name="python -m examples.paper",
    help="Measure ways to save side by side, draw and report what was found, and predict what failures cost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command("run")
def run_run(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Experiments (default: all).")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where to save while measuring: on the disk that is measured. Left as it was.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the tables, figures and timelines.")] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Small states, few rounds: shows that it runs, not what the machine reaches."),
    ] = False,
    repetitions: Annotated[
        int | None, typer.Option(min=1, help="Rounds of everything (default: as many as each experiment takes).")
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,NAME...]", help="Compare these only (default: all that run here); may be repeated."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out what OUT has already, measured with the same settings.")
    ] = False,
    show_list: Annotated[bool, typer.Option("--list", help="Show which experiments there are, and run none.")] = False,
) -> None:
    """Run experiments and write what they find, each as soon as it ends; Ctrl-C keeps those that ended.

    Nothing else should use the disk or the cores meanwhile. OUT gets for each experiment NAME.csv (every repetition),
    NAME.json (when, where, how, and what to know), NAME-FIGURE.png where matplotlib is installed, and timelines for
    https://ui.perfetto.dev.

    Exit status: 0 measured, 1 an experiment failed or one that was named cannot run here, 2 wrong usage, 130
    interrupted.
    """
    from examples.paper.lab import command_run

    if show_list:
        raise typer.Exit(command_run.show_list())
    if folder is None or out is None:
        raise typer.BadParameter("say where to save while measuring (--folder) and where to write the findings (--out)")
    asked = [name.strip() for text in methods or [] for name in text.split(",") if name.strip()]
    raise typer.Exit(
        command_run.run(
            names or [],
            folder=folder,
            out=out,
            quick=quick,
            repetitions=repetitions,
            methods=asked or None,
            resume=resume,
        )
    )


@app.command("report")
def run_report(
    source: Annotated[Path, typer.Argument(metavar="OUT", help="Folder that `run` wrote.")],
    html: Annotated[Path, typer.Option(help="The page to write.")],
) -> None:
    """Make one HTML page of what was measured: who is ahead where and by how much, all tables, all figures.

    The page needs no other file and no network.

    Exit status: 0 written, 1 a file cannot be read or written or is damaged, 2 wrong usage, 3 there is nothing in OUT.
    """
    from examples.paper.lab.command_report import run

    raise typer.Exit(run(source, html))


@app.command("goodput")
def run_goodput(
    table: Annotated[Path, typer.Argument(help="CSV of figure 8: throughput by interval, in steps per second.")],
    load_seconds: Annotated[float, typer.Option(min=0.0, help="Time to load a checkpoint after a failure.")],
    trace: Annotated[
        Path | None,
        typer.Option(help="CSV of what was available: a column 'Time' in seconds, the number in the last column."),
    ] = None,
    mtbf: Annotated[
        float | None,
        typer.Option(min=1e-3, help="Draw failures instead: mean time between them, in seconds."),
    ] = None,
    hours: Annotated[float, typer.Option(min=1e-3, help="With --mtbf: length of the run.")] = 24.0,
    seeds: Annotated[int, typer.Option(min=1, help="With --mtbf: how many times to draw.")] = 10,
    per_machine: Annotated[
        int, typer.Option(min=1, help="With --trace: how many of what it counts make one machine.")
    ] = 4,
    durable_seconds: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[INTERVAL=]SECONDS",
            help="Until a checkpoint of PCcheck is durable (Tw), for all intervals or for one; may be repeated.",
        ),
    ] = None,
    max_in_flight: Annotated[int, typer.Option(min=1, help="PCcheck's checkpoints in flight (N).")] = 2,
    out: Annotated[Path | None, typer.Option(help="Write the table of figure 9 to this CSV.")] = None,
) -> None:
    """Predict the steps per second that are left under failures, by PCcheck's model (figure 9).

    Failures in a trace are counted in three ways, and each costs what it does on average or at worst: all six results
    are shown.

    Exit status: 0 predicted, 1 a file cannot be read or written or is no table, 2 wrong usage.
    """
    from examples.paper.lab.command_goodput import parse_durable, run

    if (trace is None) == (mtbf is None):
        raise typer.BadParameter("say where failures come from: either --trace or --mtbf")
    raise typer.Exit(
        run(
            table,
            trace=trace,
            per_machine=per_machine,
            mtbf=mtbf,
            seconds=hours * 3600,
            seeds=seeds,
            load_seconds=load_seconds,
            durable_seconds=parse_durable(durable_seconds or []),
            max_in_flight=max_in_flight,
            out=out,
        )
    )


@app.command("plot")
def run_plot(
    source: Annotated[Path, typer.Argument(help="CSV of a benchmark, or JSON of a timeline.")],
    out: Annotated[Path, typer.Option(help="The PNG to draw (needs matplotlib).")],
    figure: Annotated[
        str | None, typer.Option(help="Which figure, where the CSV holds several: 8, 9, 11, 12, 13, 14, gh5...")
    ] = None,
    start: Annotated[float, typer.Option(min=0.0, help="Of a timeline: draw from this second on.")] = 0.0,
    end: Annotated[float | None, typer.Option(min=0.0, help="Of a timeline: draw up to this second.")] = None,
) -> None:
    """Draw a benchmark's figure from its table, or a recorded timeline.

    Exit status: 0 drawn, 1 a file cannot be read or written or is neither, 2 wrong usage or no matplotlib.
    """
    from examples.paper.lab.command_plot import run

    raise typer.Exit(run(source, out, figure=figure, start=start, end=end))


flow_help(app)

if __name__ == "__main__":
    app()
