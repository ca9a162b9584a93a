"""Does a killed and resumed run compute what an uninterrupted one computes? Compared by the raw bits of every loss.

A small transformer with dropout, BatchNorm and spectral norm trains for 151 steps and is saved every 50, by one of four
methods (see methods.py)::

    python -m examples.paper.validate_resume run --method pccheck --store run --crash-in-save 100+0.005
    python -m examples.paper.validate_resume run --method pccheck --store run --load-checkpoint

The whole experiment, in processes of their own: plain torch.save and PCcheck uninterrupted, and PCcheck killed by
SIGKILL at random moments (every other one inside a save) and resumed::

    python -m examples.paper.validate_resume compare FOLDER --plot validate_resume.png
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from pccheck_async import CheckpointError, RNGState, Stateful

sys.path.append(str(Path(__file__).parents[2]))  # where `examples` lies, when this runs as a file

from examples.paper.methods import METHODS, TornFileError
from examples.paper.resume_comparison import RunFailedError, compare
from pccheck_async.cli.demo_trainer import GPT, LossFile, Windows, learning_rate, make_deterministic, standard_library

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class FeatureNorm(nn.BatchNorm1d):
    """BatchNorm of the features of sequences, shape (batch, length, features)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def build_model(context: int, layers: int, width: int, heads: int, dropout: float) -> nn.Module:
    """Return a GPT in which random numbers and buffers count.

    Dropout draws random numbers in every step; spectral norm keeps vectors in buffers that every forward pass reads and
    changes; BatchNorm keeps running statistics.
    """
    model: Any = GPT(context, layers, width, heads, dropout)
    model.norm = FeatureNorm(width)
    for block in model.blocks.layers:
        spectral_norm(block.linear1)
    trained: nn.Module = model
    return trained


class Moment(NamedTuple):
    """A moment in a run: so many seconds after something of a step began."""

    step: int
    seconds: float

    @classmethod
    def parse(cls, text: str) -> Moment:
        step, _, seconds = text.partition("+")
        moment = cls(int(step), float(seconds or 0))
        if moment.step < 1 or not 0 <= moment.seconds < threading.TIMEOUT_MAX:
            raise ValueError(text)
        return moment


class Crash:
    """Kills this process; from another thread, so that a save is no shelter."""

    def __init__(self) -> None:
        self.timer: threading.Timer | None = None

    def after(self, seconds: float) -> None:
        self.timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        self.timer.daemon = True
        self.timer.start()

    def join(self) -> None:
        """Die here where the run was faster than the crash."""
        if self.timer is not None:
            self.timer.join()


def digest(state: Any) -> str:
    """Return SHA-256 of nested mappings and sequences: of every bit of tensors and arrays, and of everything else."""
    total = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Mapping):
            for key in sorted(value, key=str):
                total.update(f"{key!r}:".encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            total.update(f"{len(value)}:".encode())
            for item in value:
                add(item)
        elif isinstance(value, Tensor | np.ndarray):
            tensor = torch.as_tensor(value).detach().cpu().contiguous()
            total.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            total.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            total.update(repr(value).encode())

    add(state)
    return total.hexdigest()


def train(args: argparse.Namespace) -> None:
    """Train, save when due, resume or crash where the command line says so."""
    make_deterministic(args.seed, args.threads)
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    data = Windows(standard_library(), args.context, args.batch, args.seed)
    model = build_model(args.context, args.layers, args.width, args.heads, args.dropout)
    model.to(device=device, dtype=DTYPES[args.model_dtype])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate(args.training_steps))
    parts: dict[str, Stateful] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "rng": RNGState(),
        "data": data,
    }
    crash = Crash()

    with METHODS[args.method](args.store, parts, args.checkpoint_freq) as method:
        resumed = method.load() if args.load_checkpoint else 0
        print(f"resumed from step {resumed}" if resumed else "starting from scratch", flush=True)
        losses = LossFile(args.loss_file, resumed)

        for step in range(resumed + 1, args.training_steps + 1):
            if args.crash_at and step == args.crash_at.step:
                crash.after(args.crash_at.seconds)
            with method.step(step):
                x, y = data.next_batch()
                logits = model(x.to(device)).float()
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.to(device).flatten())
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                scheduler.step()
                losses.add(step, loss.item())
                if step % args.checkpoint_freq == 0:
                    print(f"step {step}: loss {loss.item():.4f}, saving", flush=True)
                    if args.crash_in_save and step == args.crash_in_save.step:
                        crash.after(args.crash_in_save.seconds)
        crash.join()
    print(f"done, final state {digest({name: part.state_dict() for name, part in parts.items()})}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train once")
    add = run.add_argument
    add("--method", choices=METHODS, default="pccheck", help="who saves (default %(default)s)")
    add("--store", type=Path, required=True, help="folder of the checkpoints")
    add("--load-checkpoint", action="store_true", help="continue from the newest one, from scratch where there is none")
    add("--crash-at", type=Moment.parse, metavar="STEP[+SECONDS]", help="die by SIGKILL, so long after the step began")
    add("--crash-in-save", type=Moment.parse, metavar="STEP[+SECONDS]", help="the same, after the step's save began")
    add("--loss-file", type=Path, help="CSV to write: step, loss, raw float32 bits")
    add("--model-dtype", choices=DTYPES, default="fp32", help="of the parameters (default %(default)s)")
    both = commands.add_parser("compare", help="run the whole experiment and compare")
    add = both.add_argument
    add("folder", type=Path, metavar="FOLDER", help="where the runs leave their files; they must not be there yet")
    add("--method", choices=METHODS, default="pccheck", help="compared with torch_save (default %(default)s)")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="of the parameters (default: both)")
    add("--kills", type=int, default=10, help="runs to kill and resume, per dtype (default %(default)s)")
    add("--kill-seed", type=int, default=0, help="of the moments of the kills (default %(default)s)")
    add("--plot", type=Path, metavar="PNG", help="picture to draw (needs matplotlib)")
    for command in (run, both):
        add = command.add_argument
        add("--seed", type=int, default=4, help="of weights, dropout and order of the data (default %(default)s)")
        add("--training-steps", type=int, default=151, help="optimizer steps in all (default %(default)s)")
        add("--checkpoint-freq", type=int, default=50, help="steps between checkpoints (default %(default)s)")
        add("--device", default="auto", help="cpu, cuda or auto: CUDA where present (default)")
        add("--threads", type=int, default=1, help="CPU threads; bits depend on it (default %(default)s)")
        add("--layers", type=int, default=2)
        add("--width", type=int, default=192)
        add("--heads", type=int, default=4)
        add("--context", type=int, default=64, help="bytes that the model sees (default %(default)s)")
        add("--batch", type=int, default=4)
        add("--dropout", type=float, default=0.1)
        add("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    try:
        if args.command == "compare":
            sys.exit(0 if compare(args) else 1)
        if args.crash_in_save and args.crash_in_save.step % args.checkpoint_freq:
            run.error(f"--crash-in-save: step {args.crash_in_save.step} is not saved")
        if not args.load_checkpoint and args.store.is_dir() and any(args.store.iterdir()):
            run.error(f"{args.store} is not empty: continue with --load-checkpoint, or choose another --store")
        train(args)
    except (CheckpointError, RunFailedError, TornFileError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
