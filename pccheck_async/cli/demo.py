# SPDX-License-Identifier: Apache-2.0
"""``pccheck demo``: three training runs, one of them killed in the middle of a save, compared bit by bit."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import pccheck_async as pccheck
from pccheck_async.cli.demo_losses import compare_losses, draw, read_losses
from pccheck_async.cli.output import FAILED, at_least, complain, no_file, printable, reporting, size, terminal

NEXT = """
In your own loop:

    with SyncCheckpointEngine("checkpoints") as engine:
        restored = engine.restore(state)       # in place; None if nothing is saved yet
        ...  with engine.step(state, step):    # around each step; saves as often as costs at most 3 % of the time
"""
KILL_ATTEMPTS = 3
POLL_SECONDS = 0.2


class RunFailedError(Exception):
    """A training run did not end as expected; the arguments are the reason and the last lines that it printed."""


@dataclass(frozen=True)
class DemoRun:
    """One training run: name, store, number of ranks, and the loss file that it writes row by row."""

    name: str
    store: Path
    loss_file: Path
    ranks: int

    @property
    def loss_files(self) -> list[Path]:
        """The loss file of each rank."""
        if self.ranks == 1:
            return [self.loss_file]
        return [self.loss_file.with_stem(f"{self.loss_file.stem}-rank{rank}") for rank in range(self.ranks)]

    @property
    def log(self) -> Path:
        """The file with the output of the training process."""
        return self.loss_file.with_suffix(".log")

    def newest(self) -> pccheck.CheckpointInfo | None:
        """Return the newest durable checkpoint, or None; the run may be saving meanwhile."""
        return next(iter(pccheck.list_checkpoints(self.store)), None)


@reporting
def demo(
    steps: Annotated[
        int,
        typer.Option(
            parser=at_least(3), metavar="N", help="Training steps of each run (default: 60).", show_default=False
        ),
    ] = 60,
    interval: Annotated[
        int | None,
        typer.Option(
            parser=at_least(1), metavar="STEPS", help="Steps between two checkpoints (default: a sixth of --steps)."
        ),
    ] = None,
    crash_at: Annotated[
        int | None,
        typer.Option(metavar="STEP", help="The step in whose save one run dies (default: at two thirds)."),
    ] = None,
    store: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Put the runs in here (default: the system's place).")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the loss curves into this SVG file (default: a new one).")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Do not delete the stores and loss files at the end.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Train a model 13 times as large: minutes, not half a minute.")
    ] = False,
    device: Annotated[
        str,
        typer.Option(metavar="DEVICE", help="Where to train: cpu, cuda or auto (default: cpu).", show_default=False),
    ] = "cpu",
    ranks: Annotated[
        int,
        typer.Option(
            parser=at_least(1),
            metavar="N",
            help="Train data-parallel in so many processes, on the CPU (default: 1).",
            show_default=False,
        ),
    ] = 1,
) -> int:
    """See a training run survive a SIGKILL, compared bit by bit.

    Trains a small GPT three times: uninterrupted, killed in the middle of a save, and resumed. With --ranks, all ranks
    save one checkpoint together under torchrun. Then the last rank is killed, torchrun ends the others, and all are
    started again; the losses and the final state of every rank are compared.

    Exit status: 0 all losses and the whole final state are equal in every bit, 1 they are not or a run failed, 2 wrong
    usage.
    """
    interval = max(1, steps // 6) if interval is None else interval
    crash_at = max(interval + 1, steps * 2 // 3) if crash_at is None else crash_at
    if not interval < crash_at <= steps:
        raise typer.BadParameter(
            f"--crash-at {crash_at} must lie after the first checkpoint (--interval {interval}) and not after the last "
            f"step (--steps {steps}): the killed run needs an older checkpoint to go back to"
        )
    if ranks > 1 and device != "cpu":
        raise typer.BadParameter(f"--ranks {ranks} trains on the CPU, not with --device {device}")
    if plot is not None and plot.suffix != ".svg":
        raise typer.BadParameter(f"--plot {plot}: the picture is an SVG file")
    if problem := no_file("--plot", plot) or (ranks > 1 and no_torchrun()):
        complain(problem)
        return 2
    console = terminal(markup=True)
    if store is not None:
        store.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="pccheck-demo-", dir=store))
    options = [f"--steps={steps}", f"--interval={interval}", f"--device={device}"]
    if not full:
        options += ["--layers=2", "--width=128", "--context=64", "--threads=1"]
    elif ranks > 1:  # they share the cores
        options += ["--threads=1"]
    on = f" on {ranks} ranks" if ranks > 1 else ""
    duration = "some minutes" if full else "about half a minute" if steps <= 60 else "a minute or more"
    picture = None
    try:
        console.print(
            f"Training a small GPT on the sources of Python's standard library{on}, three times: "
            f"uninterrupted, killed in the middle of the save of step {crash_at}, and resumed. That takes "
            f"{duration} on two cores.\n"
        )
        all_equal, picture = _demonstrate(console, folder, options, steps, crash_at, plot, ranks)
        return 0 if all_equal else FAILED
    except RunFailedError as error:
        why, *last_lines = error.args
        complain(why)
        for line in last_lines:
            print(f"  {printable(line)}", file=sys.stderr)
        return FAILED
    finally:
        if keep:
            console.print(f"Kept: {folder}", soft_wrap=True, markup=False)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        if picture is not None:
            console.print(f"Picture: {picture}", soft_wrap=True, markup=False)


def no_torchrun() -> str | None:
    """Return why several ranks cannot be trained here; None if they can."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return "--ranks needs torch.distributed with gloo, which this build of torch comes without"
    if importlib.util.find_spec("torch.distributed.run") is None:
        return "--ranks needs torchrun (torch.distributed.run), which this build of torch comes without"
    return None


def _demonstrate(
    console: Console, folder: Path, options: list[str], steps: int, crash_at: int, plot: Path | None, ranks: int
) -> tuple[bool, Path]:
    """Run, compare and draw all; return whether every bit is equal, and the file of the picture."""
    began = time.monotonic()
    uninterrupted = DemoRun("uninterrupted", folder / "uninterrupted", folder / "uninterrupted.csv", ranks)
    _train(uninterrupted, options, console)

    killed, durable = _train_until_killed(console, folder, options, crash_at, ranks)

    # The resumed run continues the killed one's store and a copy of its loss files.
    resumed = DemoRun("resumed", killed.store, folder / "resumed.csv", ranks)
    for source, copy in zip(killed.loss_files, resumed.loss_files, strict=True):
        shutil.copyfile(source, copy)
    _train(resumed, [*options, "--resume"], console)
    said = re.search(r"resumed from step (\d+)", resumed.log.read_text())
    if said is None or int(said[1]) != durable.step:
        found = said[0] if said is not None else "that it started from scratch"
        raise RunFailedError(f"the resumed run should have resumed from step {durable.step}, but said: {found}")

    who, end, where = "killed run", f" (exit status {-signal.SIGKILL})", ""
    if ranks > 1:
        who, end, where = f"killed run's rank {ranks - 1}", ", and torchrun ended the other ranks", " on all ranks"
    console.print(
        f"\nThe {who} died by SIGKILL in the middle of the save of step {crash_at}{end}.\nIts newest durable "
        f"checkpoint was that of step {durable.step} ({size(durable.nbytes)}{where}). The resumed run went on from it "
        f"and computed steps {durable.step + 1} to {steps}."
    )
    files = zip(uninterrupted.loss_files, killed.loss_files, resumed.loss_files, strict=True)
    rows = [(read_losses(one), read_losses(two), read_losses(three)) for one, two, three in files]
    losses = [compare_losses(*each, steps, crash_at, durable.step) for each in rows]
    for rank, compared in enumerate(losses):
        if rank == 0 or not compared.all_equal:
            console.print(*[f"Rank {rank}:"] * (ranks > 1), compared.table)
    console.print(f"Losses: {sum(each.equal for each in losses)} of {ranks * steps} equal in every bit.")
    parts: list[int | None] = [*range(ranks)] if ranks > 1 else [None]
    states = [pccheck.stores.compare(uninterrupted.store, resumed.store, rank=part, other_rank=part) for part in parts]
    leaves = sum(state.leaves for state in states)
    different = [
        f"rank {rank}: {each.path}" if ranks > 1 else each.path
        for rank, state in enumerate(states)
        for each in state.differences
    ]
    console.print(
        f"Final state (model, optimizer, scheduler, random numbers, data position): {leaves - len(different)} of "
        f"{leaves} leaves equal in every bit, {size(sum(state.nbytes for state in states))} of tensors."
    )
    for path in different[:10]:
        console.print(f"  different: {path}", markup=False)
    if plot is None:
        number, name = tempfile.mkstemp(prefix="pccheck-demo-", suffix=".svg")
        os.close(number)
        plot = Path(name)
    all_equal = all(each.all_equal for each in losses) and not different
    plot.write_text(draw(*rows[0], crash_at, durable.step, equal=all_equal), encoding="utf-8")
    verdict = "[bold green]Every bit is equal." if all_equal else "[bold red]The runs differ."
    console.print(f"{verdict}[/] ({time.monotonic() - began:.0f} s)")
    if all_equal:
        console.print(NEXT, soft_wrap=True, markup=False)
    return all_equal, plot


def _train_until_killed(
    console: Console, folder: Path, options: list[str], crash_at: int, ranks: int
) -> tuple[DemoRun, pccheck.CheckpointInfo]:
    """Train until the SIGKILL, again if the save was complete before it; return the run and its newest checkpoint."""
    for attempt in range(1, KILL_ATTEMPTS + 1):
        name = f"killed{attempt if attempt > 1 else ''}"
        killed = DemoRun("killed", folder / name, folder / f"{name}.csv", ranks)
        _train(killed, [*options, f"--crash-at={crash_at}"], console, killed=True)
        durable = killed.newest()
        if durable is None:
            raise RunFailedError("the killed run left no durable checkpoint behind")
        if durable.step < crash_at:
            return killed, durable
        console.print(f"The save of step {crash_at} was complete before the kill: once more.")
    raise RunFailedError(f"the kill came after the save {KILL_ATTEMPTS} times: this storage is too fast for the demo")


def _train(run: DemoRun, options: list[str], console: Console, *, killed: bool = False) -> None:
    """Run the trainer in processes of its own and show its progress; raise RunFailedError if it ends unexpectedly."""
    command = [sys.executable, "-m"]
    if run.ranks > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={run.ranks}", "-m"]
    command += ["pccheck_async.cli.demo_trainer", *options, f"--store={run.store}", f"--loss-file={run.loss_file}"]
    # The installed package, also where the current folder is a checkout of the sources.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    told = run.newest()
    steps = int(options[0].partition("=")[2])
    with run.log.open("wb") as log, _progress(console, run.name, steps) as show:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                told = _tell(console, run, told)
                show(max(read_losses(run.loss_files[0]), default=0))
                time.sleep(POLL_SECONDS)
            _tell(console, run, told)
        finally:
            process.terminate()  # torchrun passes it on: killed, it would leave its ranks behind
            process.wait()
    expected_status = 0
    if killed:  # torchrun ends with 1 for any end of a rank
        expected_status = -signal.SIGKILL if run.ranks == 1 else 1
    said = run.log.read_text(errors="replace")
    if process.returncode != expected_status or killed != ("dies in the save" in said):
        raise RunFailedError(
            f"the {run.name} run ended with status {process.returncode}, expected {expected_status}; its last words:",
            *said.splitlines()[-15:],
        )


@contextmanager
def _progress(console: Console, name: str, steps: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that moves a progress bar to a step; the bar is shown on terminals only."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{name}: starting", total=steps)
        yield lambda step: progress.update(task, completed=step, description=f"{name}{':' if step else ': starting'}")


def _tell(console: Console, run: DemoRun, told: pccheck.CheckpointInfo | None) -> pccheck.CheckpointInfo | None:
    """Return the newest durable checkpoint; print a line about it unless it is ``told``, the last one printed."""
    newest = run.newest()
    if newest is not None and newest != told:
        loss = newest.metadata["loss"]
        console.print(f"{run.name + ':':<14} the checkpoint of step {newest.step} is durable, loss {loss:.4f}")
    return newest
