"""What saving costs in the trainers that people use: their own ways beside ours, in turn, each in its own process.

Run: ``python -m tests.campaign.trainers_beside [--folder DIR] [--mib 64] [--steps 40] [--rounds 3] [--plot FILE]``.

Lightning with ``ModelCheckpoint(every_n_train_steps=k)`` and its own IO, the same with ``AsyncCheckpointIO``, and
``PCcheckCallback(interval=k)``; Hugging Face's Trainer with ``save_steps=k``, and ``PCcheckCallback``. One checkpoint
is kept. Slowdown: the time of a run over that of the same run that saves nothing, in the same round. Their files count
as written when the call that writes them returns: they are not flushed; ours are durable.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

FRAMEWORKS = {"lightning": ("none", "own", "async", "ours"), "transformers": ("none", "own", "ours")}
EVERY = (1, 5, 10)
BATCH = 64


def net(mib: int) -> torch.nn.Module:
    """Linear layers of so many MiB; with AdamW a checkpoint has three times that."""
    width = 1024
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(max(1, mib * 2**20 // (4 * width**2)))))


class Watch:
    """Times one run: its steps, and each save from its beginning to its end."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.saves: list[float] = []

    def step(self) -> None:
        self.steps.append(time.perf_counter())

    def timed(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def saving(*args: Any, **named: Any) -> Any:
            start = time.perf_counter()
            done = save(*args, **named)
            self.saves.append(time.perf_counter() - start)
            return done

        return saving

    def event(self, event: Any) -> None:
        if event.name == "durable":
            self.saves.append(event.seconds)


def lightning(method: str, every: int, mib: int, steps: int, folder: Path, watch: Watch) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(mib)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-6)

    class Steps(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            watch.step()

        def on_train_start(self, *_: Any) -> None:
            if method == "ours":
                ours.engine.on_event(watch.event)

    callbacks: list[Any] = [Steps()]
    plugins: list[Any] = []
    if method == "ours":
        adapter = import_module("pccheck_async.integrations.lightning")
        ours = adapter.PCcheckCallback(folder / "store", interval=every)
        callbacks.insert(0, ours)
    elif method != "none":
        callbacks.append(ModelCheckpoint(folder, every_n_train_steps=every))
        own: Any = TorchCheckpointIO()
        own.save_checkpoint = watch.timed(own.save_checkpoint)
        plugins.append(AsyncCheckpointIO(own) if method == "async" else own)
    data: Any = [*torch.randn(BATCH * steps, 1024)]
    Trainer(
        max_steps=steps, callbacks=callbacks, plugins=plugins, logger=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=method in ("own", "async"),
    ).fit(Module(), torch.utils.data.DataLoader(data, BATCH))  # fmt: skip


def transformers(method: str, every: int, mib: int, steps: int, folder: Path, watch: Watch) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(mib)

        def forward(self, x: Any) -> Any:
            return {"loss": self.net(x).square().mean()}

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            watch.step()

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if method == "ours":
                ours.engine.on_event(watch.event)

    saving = (
        {"save_strategy": "steps", "save_steps": every, "save_total_limit": 1}
        if method == "own"
        else {"save_strategy": "no"}
    )
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=BATCH, max_steps=steps, report_to=[], use_cpu=True, disable_tqdm=True,
        logging_strategy="no", **saving,
    )  # fmt: skip
    data = [{"x": row} for row in torch.randn(BATCH * steps, 1024)]
    trainer: Any = Trainer(Model(), arguments, train_dataset=data, callbacks=[Steps()])
    trainer._save_checkpoint = watch.timed(trainer._save_checkpoint)
    if method == "ours":
        adapter = import_module("pccheck_async.integrations.transformers")
        ours = adapter.PCcheckCallback(folder / "store", interval=every).attach(trainer)
    trainer.train()


def measure(framework: str, method: str, every: int, mib: int, steps: int, folder: Path) -> dict[str, float]:
    """One run, in this process. Seconds of a step on average, from the third on; of a save; peak memory in MiB."""
    watch = Watch()
    {"lightning": lightning, "transformers": transformers}[framework](method, every, mib, steps, folder, watch)
    ended = time.perf_counter()
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024
    step = (ended - watch.steps[2]) / (len(watch.steps) - 2)
    return {"step": step, "save": statistics.median(watch.saves) if watch.saves else math.nan, "peak": peak}


def one_run(framework: str, method: str, every: int, args: argparse.Namespace) -> dict[str, float]:
    """One run, in a process of its own."""
    if args.folder is not None:
        os.makedirs(args.folder, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        options = [framework, method, str(every), str(args.mib), str(args.steps), folder]
        command = [sys.executable, "-W", "ignore", "-m", "tests.campaign.trainers_beside", "--one", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise SystemExit(f"{framework} {method} {every}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def draw(found: dict[tuple[str, str, int], list[dict[str, float]]], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(FRAMEWORKS), figsize=(10, 4), sharey=True)
    for axis, (framework, methods) in zip(axes, FRAMEWORKS.items(), strict=True):
        for number, method in enumerate(methods[1:]):
            medians = [statistics.median(run["slowdown"] for run in found[framework, method, k]) for k in EVERY]
            spread = [[run["slowdown"] for run in found[framework, method, k]] for k in EVERY]
            errors = [
                [m - min(s) for m, s in zip(medians, spread, strict=True)],
                [max(s) - m for m, s in zip(medians, spread, strict=True)],
            ]
            axis.bar([k + number * 0.25 for k in range(len(EVERY))], medians, 0.22, yerr=errors, label=method)
        axis.set(
            title=framework, xlabel="steps from one checkpoint to the next", ylabel="time of a step / without saving"
        )
        axis.set_xticks([k + 0.25 for k in range(len(EVERY))], EVERY)
        axis.axhline(1, color="grey", linewidth=0.5)
        axis.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path, default=None)
    parser.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        framework, method, every, mib, steps, folder = args.one
        print(json.dumps(measure(framework, method, int(every), int(mib), int(steps), Path(folder))))
        return
    found: dict[tuple[str, str, int], list[dict[str, float]]] = defaultdict(list)
    for _ in range(args.rounds):
        for framework, methods in FRAMEWORKS.items():
            for every in EVERY:
                runs = {method: one_run(framework, method, every, args) for method in methods}
                for method, run in runs.items():
                    found[framework, method, every].append(run | {"slowdown": run["step"] / runs["none"]["step"]})
    print(
        f"{args.mib} MiB of weights, {args.rounds} rounds of {args.steps} steps, {os.cpu_count()} cores: median [range]"
    )
    for (framework, method, every), all_runs in found.items():
        columns = {name: sorted(run[name] for run in all_runs) for name in ("slowdown", "save", "peak")}
        low, median, high = columns["slowdown"][0], statistics.median(columns["slowdown"]), columns["slowdown"][-1]
        print(
            f"{framework:13} {method:6} every {every:2}: {median:5.2f} [{low:.2f}, {high:.2f}] times; a save "
            f"{statistics.median(columns['save']):6.2f} s; peak {statistics.median(columns['peak']):5.0f} MiB"
        )
    if args.plot is not None:
        draw(found, args.plot)


if __name__ == "__main__":
    main()
