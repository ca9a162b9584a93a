"""The experiment of validate_resume.py: its runs in processes of their own, compared by bits, and drawn."""

from __future__ import annotations

import argparse
import importlib.util
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from pccheck_async.cli.demo_losses import Losses, exact, read_losses

OPTIONS = (
    "seed", "training_steps", "checkpoint_freq", "device", "threads", "layers", "width", "heads", "context", "batch",
    "dropout", "lr",
)  # fmt: skip
"""What all runs of an experiment have in common."""


class RunFailedError(Exception):
    """A run did not end as it should, or the experiment cannot begin."""


@dataclass(frozen=True)
class Run:
    """A run that ended: the losses it wrote, up to its death or the end, and what it printed."""

    losses: Losses
    said: list[str]

    @property
    def state(self) -> str:
        """Digest of the final state."""
        return self.said[-1].removeprefix("done, final state ")

    @property
    def resumed_from(self) -> int:
        return int(self.said[0].removeprefix("resumed from step ")) if self.said[0].startswith("resumed") else 0

    def same(self, other: Run, steps: int) -> int:
        """Steps whose loss has the same bits in both."""
        pairs = ((self.losses.get(step), other.losses.get(step)) for step in range(1, steps + 1))
        return sum(one is not None and two is not None and one.bits == two.bits for one, two in pairs)


@dataclass(frozen=True)
class Kill:
    """A run that was killed, and the one that went on from what it left."""

    moment: str
    killed: Run
    resumed: Run

    @property
    def last_save(self) -> int:
        """The last step whose save had begun."""
        return max((int(line.split()[1][:-1]) for line in self.killed.said if line.endswith(", saving")), default=0)

    @property
    def inside_save(self) -> bool:
        """Whether a save had begun and was not durable yet."""
        return self.resumed.resumed_from < self.last_save

    @property
    def died_after(self) -> int:
        """The last step whose loss was written."""
        return max(self.killed.losses, default=0)

    def __str__(self) -> str:
        where = f"after step {self.died_after}"
        where += f", inside the save of step {self.last_save}" if self.inside_save else ""
        origin = f"step {self.resumed.resumed_from}" if self.resumed.resumed_from else "scratch"
        return f"killed {where} ({self.moment}) and resumed from {origin}"


@dataclass(frozen=True)
class Experiment:
    """All runs of one dtype."""

    dtype: str
    method: str
    steps: int
    baseline: Run
    uninterrupted: Run
    kills: list[Kill]

    @property
    def equal(self) -> bool:
        """Whether every run has the baseline's bits, in every loss and in the final state."""
        runs = [self.uninterrupted, *(kill.resumed for kill in self.kills)]
        killed = (
            kill.killed.same(self.baseline, self.steps) == len(kill.killed.losses) == kill.died_after
            for kill in self.kills
        )
        return all(killed) and all(
            run.same(self.baseline, self.steps) == self.steps and run.state == self.baseline.state for run in runs
        )


def compare(args: argparse.Namespace) -> bool:
    """Run the experiment for every dtype and return whether all bits were equal."""
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise RunFailedError("--plot needs matplotlib: pip install matplotlib")
    if args.plot is not None and not args.plot.resolve().parent.is_dir():
        raise RunFailedError(f"--plot: there is no folder {args.plot.resolve().parent}")
    folders = {dtype: args.folder / dtype for dtype in args.dtypes}
    for folder in folders.values():
        if folder.exists():
            raise RunFailedError(f"{folder} is there already: choose another folder")
        folder.mkdir(parents=True)
    experiments = [conduct(args, dtype, folder) for dtype, folder in folders.items()]
    if args.plot is not None:
        draw(args.plot, experiments)
        print(f"picture: {args.plot}")
    equal = all(experiment.equal for experiment in experiments)
    print("every bit is equal" if equal else "THE RUNS DIFFER")
    return equal


def conduct(args: argparse.Namespace, dtype: str, folder: Path) -> Experiment:
    """Run everything for one dtype, telling what comes out."""
    options = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in OPTIONS]
    options += [f"--model-dtype={dtype}"]
    steps = args.training_steps

    def tell(what: str, run: Run) -> None:
        state = "equal" if run.state == baseline.state else "DIFFERENT"
        print(f"{dtype}: {what}: {run.same(baseline, steps)} of {steps} losses equal, final state {state}", flush=True)

    baseline = train(folder / "baseline", [*options, "--method=torch_save"])
    print(
        f"{dtype}: torch_save, uninterrupted: loss {exact(baseline.losses[steps]):.4f} after {steps} steps", flush=True
    )
    options += [f"--method={args.method}"]
    uninterrupted = train(folder / "uninterrupted", options)
    tell(f"{args.method}, uninterrupted", uninterrupted)

    kills = []
    moments = Moments(random.Random(f"{args.kill_seed} {dtype}"), steps, args.checkpoint_freq)
    for number in range(1, args.kills + 1):
        kill = kill_and_resume(folder, number, options, moments)
        tell(f"{args.method}, {kill}", kill.resumed)
        kills.append(kill)
    return Experiment(dtype, args.method, steps, baseline, uninterrupted, kills)


class Moments:
    """Random moments to die at; those inside a save come earlier after a kill that came after its save."""

    def __init__(self, generator: random.Random, steps: int, every: int) -> None:
        self.random, self.steps, self.every = generator, steps, every
        self.window = 0.05

    def anywhere(self) -> str:
        return f"--crash-at={self.random.randint(1, self.steps)}+{self.random.uniform(0, 0.1):.4f}"

    def in_save(self) -> str:
        step = self.every * self.random.randint(1, self.steps // self.every)
        return f"--crash-in-save={step}+{self.random.uniform(0, self.window):.6f}"


def kill_and_resume(folder: Path, number: int, options: list[str], moments: Moments) -> Kill:
    """Kill every other run inside a save; again, and sooner, where the save was over before."""
    for attempt in count(1):
        name = f"killed-{number}" + (f"-{attempt}" if attempt > 1 else "")
        moment = moments.anywhere() if number % 2 else moments.in_save()
        killed = train(folder / name, [*options, moment], expected=-signal.SIGKILL)
        # The resumed run goes on in the killed one's store, with a copy of its loss file.
        shutil.copyfile(folder / f"{name}.csv", folder / f"{name}-resumed.csv")
        resumed = train(folder / f"{name}-resumed", [*options, "--load-checkpoint"], store=folder / name)
        kill = Kill(moment.removeprefix("--"), killed, resumed)
        if kill.inside_save or number % 2:
            return kill
        moments.window /= 2
    raise AssertionError


def train(path: Path, options: list[str], expected: int = 0, store: Path | None = None) -> Run:
    """Train in a process of its own; the path names its store, its loss file and its log."""
    log, losses = path.with_suffix(".log"), path.with_suffix(".csv")
    command = [sys.executable, str(Path(__file__).with_name("validate_resume.py")), "run", *options]
    command += [f"--store={store or path}", f"--loss-file={losses}"]
    with log.open("wb") as output:
        status = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    said = log.read_text(errors="replace").splitlines()
    if status != expected:
        last_lines = "\n".join(said[-15:])
        raise RunFailedError(f"{path} ended with status {status}, expected {expected}; its last words:\n{last_lines}")
    return Run(read_losses(losses), said)


def draw(path: Path, experiments: list[Experiment]) -> None:
    """Draw the loss curves of every dtype, and below them how far they are from the baseline."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.5, 4.8 * len(experiments)), 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(2, len(experiments), sharex=True, sharey="row", height_ratios=(3, 1), squeeze=False)
    for (curves, difference), found in zip(axes.T, experiments, strict=True):
        draw_one(curves, difference, found)
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("minus\ntorch.save's")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=90, pil_kwargs={"optimize": True})


def draw_one(curves: Any, difference: Any, found: Experiment) -> None:
    """Draw one dtype; of the killed runs one that died inside a save and resumed from an earlier one, if there is."""
    baseline = {step: exact(row) for step, row in found.baseline.losses.items()}
    kill = max(found.kills, key=lambda kill: (kill.inside_save, kill.resumed.resumed_from > 0), default=None)
    styles: list[tuple[str, Losses, dict[str, Any]]] = [
        ("torch.save, uninterrupted", found.baseline.losses, {"color": "0.75", "linewidth": 5}),
        (f"{found.method}, uninterrupted", found.uninterrupted.losses, {"color": "tab:orange", "linewidth": 2.5}),
    ]
    if kill is not None:
        steps = {s: row for s, row in kill.resumed.losses.items() if s > kill.resumed.resumed_from}
        styles.append((f"{found.method}, killed and resumed", steps, {"color": "tab:blue", "linewidth": 1}))
        styles.append(("", kill.killed.losses, {"color": "tab:blue", "linewidth": 1}))
    for label, losses, style in styles:
        curves.plot(list(losses), [exact(row) for row in losses.values()], label=label, **style)
        difference.plot(list(losses), [exact(row) - baseline[step] for step, row in losses.items()], **style)
    if kill is not None:
        inside = " inside a save" if kill.inside_save else ""
        for axis in (curves, difference):
            axis.axvline(kill.died_after, color="tab:red", linestyle=":", label=f"SIGKILL{inside}")
            axis.axvline(kill.resumed.resumed_from, color="tab:blue", linestyle=":", label="resumed from here")
    runs = len(found.kills) + 2
    verdict = f"{runs} runs, {found.steps} losses each: " + ("equal in every bit" if found.equal else "DIFFERENT")
    curves.set_title(f"{found.dtype}: {verdict}", fontsize="medium")
    difference.set_xlabel("step")
