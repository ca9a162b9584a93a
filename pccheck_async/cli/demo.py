"""``pccheck demo``: three training runs, one of them killed in the middle of a save, compared bit by bit."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import pccheck_async as pccheck
from pccheck_async.cli.output import FAILED, complain, no_plot, printable, reporting, size, terminal

KILL_ATTEMPTS = 3
POLL_SECONDS = 0.2


class RunFailedError(Exception):
    """A training run did not end as it should: why, and the last lines that it printed."""


@dataclass(frozen=True)
class DemoRun:
    """One training run: its name, where it saves, and the loss files that its ranks write row by row."""

    name: str
    store: Path
    loss_file: Path
    ranks: int

    @property
    def loss_files(self) -> list[Path]:
        """The file of each rank."""
        if self.ranks == 1:
            return [self.loss_file]
        return [self.loss_file.with_stem(f"{self.loss_file.stem}-rank{rank}") for rank in range(self.ranks)]

    @property
    def log(self) -> Path:
        """The file of the training process's output."""
        return self.loss_file.with_suffix(".log")

    def newest(self) -> pccheck.CheckpointInfo | None:
        """The newest durable checkpoint, read beside the writer."""
        return next(iter(pccheck.list_checkpoints(self.store)), None)


@reporting
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 60,
    interval: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = 10,
    crash_at: Annotated[int, typer.Option(help="The killed run dies in the middle of the save of this step.")] = 40,
    store: Annotated[
        Path | None, typer.Option(help="Put the runs into a new folder in here (default: the system's place).")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the loss curves (of rank 0) into this file (needs matplotlib).")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Do not delete the stores and loss files at the end.")] = False,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda or auto.")] = "cpu",
    ranks: Annotated[
        int, typer.Option(min=1, help="Train data-parallel in so many processes under torchrun (gloo, on the CPU).")
    ] = 1,
) -> int:
    """Train a small GPT three times: uninterrupted, killed in the middle of a save, and resumed; compare every bit.

    With --ranks, all ranks save one checkpoint together, the last rank is killed, and torchrun ends the others; all are
    started again, and the losses and the final state of every rank are compared.

    Exit status: 0 all losses and the whole final state are equal in every bit, 1 they are not or a run failed, 2 wrong
    usage.
    """
    if not interval < crash_at <= steps:
        raise typer.BadParameter(
            f"--crash-at {crash_at} must lie after the first checkpoint (--interval {interval}) and not after the last "
            f"step (--steps {steps}): the killed run needs an older checkpoint to go back to"
        )
    if ranks > 1 and device != "cpu":
        raise typer.BadParameter(f"--ranks {ranks} trains on the CPU, not with --device {device}")
    if problem := no_plot(plot) or (ranks > 1 and no_torchrun()):
        complain(problem)
        return 2
    console = terminal(markup=True)
    if store is not None:
        store.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="pccheck-demo-", dir=store))
    options = [f"--steps={steps}", f"--interval={interval}", f"--device={device}"]
    if ranks > 1:  # they share the cores
        options += ["--layers=2", "--width=128", "--threads=1"]
    try:
        return 0 if _demonstrate(console, folder, options, steps, crash_at, plot, ranks) else FAILED
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


def no_torchrun() -> str | None:
    """Return why several ranks cannot be trained here."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return "--ranks needs torch.distributed with gloo, which this build of torch comes without"
    if importlib.util.find_spec("torch.distributed.run") is None:
        return "--ranks needs torchrun (torch.distributed.run), which this build of torch comes without"
    return None


def _demonstrate(
    console: Console, folder: Path, options: list[str], steps: int, crash_at: int, plot: Path | None, ranks: int
) -> bool:
    console.print(
        f"Training a small GPT on the sources of Python's standard library{f' on {ranks} ranks' if ranks > 1 else ''}, "
        f"three times: uninterrupted, killed in the middle of the save of step {crash_at}, and resumed.\n"
    )
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
    states = [
        pccheck.compare_checkpoints(uninterrupted.store, resumed.store, rank=part, other_rank=part) for part in parts
    ]
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
    if plot is not None:
        draw(plot, *rows[0], crash_at, durable.step)
        console.print(f"Picture: {plot}", soft_wrap=True, markup=False)
    all_equal = all(each.all_equal for each in losses) and not different
    verdict = "[bold green]Every bit is equal." if all_equal else "[bold red]The runs differ."
    console.print(f"{verdict}[/] ({time.monotonic() - began:.0f} s)")
    return all_equal


def _train_until_killed(
    console: Console, folder: Path, options: list[str], crash_at: int, ranks: int
) -> tuple[DemoRun, pccheck.CheckpointInfo]:
    """Train until the SIGKILL; again where the save was so fast that the kill came after it."""
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
    """Run the trainer in processes of its own, printing how far it is, and check how it ended."""
    command = [sys.executable, "-m"]
    if run.ranks > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={run.ranks}", "-m"]
    command += ["pccheck_async.cli.demo_trainer", *options, f"--store={run.store}", f"--loss-file={run.loss_file}"]
    # The installed package, also where the current folder is a checkout of the sources.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    told = run.newest()
    with run.log.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                told = _tell(console, run, told)
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


def _tell(console: Console, run: DemoRun, told: pccheck.CheckpointInfo | None) -> pccheck.CheckpointInfo | None:
    """Print a line if a checkpoint newer than the last one printed is durable, and return the newest."""
    newest = run.newest()
    if newest is not None and newest != told:
        loss = newest.metadata["loss"]
        console.print(f"{run.name + ':':<14} the checkpoint of step {newest.step} is durable, loss {loss:.4f}")
    return newest


# -- losses, row by row, by their bits


class Loss(NamedTuple):
    """A row of a loss file: the loss in decimal for people, its float32 bits for comparing."""

    loss: float
    bits: str


Losses = Mapping[int, Loss]


def read_losses(path: Path) -> Losses:
    """Read a loss file (columns step, loss, bits), which may be missing or still be written."""
    if not path.exists():
        return {}
    rows = (line.split(",") for line in path.read_text().splitlines()[1:])
    return {int(row[0]): Loss(float(row[1]), row[2]) for row in rows if len(row) == 3 and len(row[2]) == 8}


class LossComparison(NamedTuple):
    """Steps of which both the killed run (as far as it came) and the resumed run have the uninterrupted run's bits."""

    equal: int
    all_equal: bool
    table: Table


def compare_losses(
    uninterrupted: Losses, killed: Losses, resumed: Losses, steps: int, crash_at: int, restored: int
) -> LossComparison:
    """Compare the losses of every step, and tabulate some of them."""
    stride = steps // 60 * 10 or max(1, steps // 6)
    shown = {1, restored, restored + 1, crash_at, crash_at + 1, *range(0, steps, stride), steps}
    table = Table(box=SIMPLE, pad_edge=False)
    for heading in ("step", "loss", "uninterrupted", "killed", "resumed", ""):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    equal = 0
    for step in range(1, steps + 1):
        rows = uninterrupted.get(step), killed.get(step), resumed.get(step)
        expected = [row for row, due in zip(rows, (True, step <= crash_at, True), strict=True) if due]
        same = rows[0] is not None and all(row is not None and row.bits == rows[0].bits for row in expected)
        equal += same
        if step in shown or not same:
            marks = {restored: ", resumed here", crash_at: ", killed here"}
            table.add_row(
                str(step),
                f"{rows[0].loss:.6f}" if rows[0] else "-",
                *(row.bits if row else "-" for row in rows),
                ("equal" if same else "[bold red]DIFFERENT[/]") + marks.get(step, ""),
            )
    return LossComparison(equal, equal == steps, table)


def draw(path: Path, uninterrupted: Losses, killed: Losses, resumed: Losses, crash_at: int, restored: int) -> None:
    """Draw the three loss curves, and below them how far the resumed run is from the uninterrupted one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    curves, difference = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    styles = (
        ("uninterrupted", uninterrupted, {"color": "0.75", "linewidth": 6}),
        ("killed", killed, {"color": "tab:red", "linewidth": 2.5}),
        ("resumed", {s: row for s, row in resumed.items() if s > restored}, {"color": "tab:blue", "linestyle": "--"}),
    )
    for label, losses, style in styles:
        curves.plot(list(losses), [row.loss for row in losses.values()], label=label, **style)
    curves.axvline(crash_at, color="tab:red", linestyle=":", label=f"SIGKILL while saving step {crash_at}")
    curves.axvline(restored, color="tab:blue", linestyle=":", label=f"resumed from step {restored}")
    curves.set_ylabel("loss")
    curves.legend()
    common = [step for step in resumed if step in uninterrupted]
    difference.plot(common, [exact(resumed[step]) - exact(uninterrupted[step]) for step in common], color="tab:blue")
    difference.set_ylabel("resumed minus\nuninterrupted")
    difference.set_xlabel("step")
    figure.savefig(path)


def exact(row: Loss) -> float:
    """Return the loss from its bits, where the decimals are rounded."""
    value: float = struct.unpack(">f", bytes.fromhex(row.bits))[0]
    return value
