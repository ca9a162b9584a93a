"""Training throughput of the example GPT with a checkpoint every f steps, beside none and beside the floor.

Run: ``python -m tests.campaign.throughput [--folder DIR] [--layers 4] [--width 256] [--rounds 9]``.

Blocks of steps take turns: none, then every interval, round after round, the same model throughout. The floor of a step
is max(t, m / (B f), t + c m / (cores f)): t of the blocks without checkpoints beside it, c the system's processor
seconds per byte of saves while nothing trains, B the bandwidth of those. Steady state only: the drain after a block is
not timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.train_gpt import GPT, Windows, standard_library
from pccheck_async import SyncCheckpointEngine
from pccheck_async.bench.medians import median_interval
from pccheck_async.bench.usage import busy_seconds


class Run:
    """One model in training."""

    def __init__(self, layers: int, width: int) -> None:
        torch.manual_seed(1)
        self.data = Windows(standard_library(), 128, 8, 1)
        self.model = GPT(128, layers, width, max(1, width // 64), 0.1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "data": self.data}

    def train(self) -> None:
        x, y = self.data.next_batch()
        loss = nn.functional.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20, help="least steps of a block")
    parser.add_argument("--intervals", type=int, nargs="+", default=[10, 5, 1])
    args = parser.parse_args()
    run = Run(args.layers, args.width)
    run.train()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        engines = {f: SyncCheckpointEngine(Path(name) / str(f), interval=f).open() for f in args.intervals}
        nbytes, bandwidth, processor = alone(engines[args.intervals[0]], run)
        cores = len(os.sched_getaffinity(0))
        print(
            f"state {nbytes / 2**20:.1f} MiB, {bandwidth / 1e9:.2f} GB/s, "
            f"{processor * 2**30:.3f} processor seconds per GiB"
        )
        plain: list[float] = []
        found: dict[int, list[tuple[float, float]]] = {f: [] for f in args.intervals}
        for turn in range(args.rounds + 1):
            before = block(run, args.steps, None)
            for f, engine in engines.items():
                seconds = block(run, max(args.steps, 3 * f) // f * f, engine)
                after = block(run, args.steps, None)
                if turn:
                    found[f].append((seconds, (before + after) / 2))
                    plain.append(after)
                before = after
        for engine in engines.values():
            engine.close()
    t = statistics.median(plain)
    print(f"without checkpoints: {t * 1e3:.1f} ms per step")
    for f, pairs in found.items():
        floors = [max(t, nbytes / (bandwidth * f), t + processor * nbytes / (cores * f)) for _, t in pairs]
        slower = median_interval([seconds / t for seconds, t in pairs])
        floor = statistics.median(floor / t for floor, (_, t) in zip(floors, pairs, strict=True))
        over = median_interval([seconds / floor for floor, (seconds, _) in zip(floors, pairs, strict=True)])
        print(
            f"every {f}: {slower[0]:.3f} [{slower[1]:.3f}, {slower[2]:.3f}] of none, floor {floor:.3f}, "
            f"{over[0]:.3f} [{over[1]:.3f}, {over[2]:.3f}] of the floor, {len(pairs)} blocks"
        )


def alone(engine: SyncCheckpointEngine, run: Run) -> tuple[int, float, float]:
    """Bytes, bytes per second to durable, and processor seconds per byte, of saves while nothing trains."""
    nbytes, seconds, spent = 0, [], []
    for number in range(8):
        before, start = busy_seconds(), time.perf_counter()
        info = engine.checkpoint(run.state, step=number).result()
        nbytes = info.nbytes
        seconds.append(time.perf_counter() - start)
        spent.append(busy_seconds() - before)
    return nbytes, nbytes / statistics.median(seconds[2:]), statistics.mean(spent[2:]) / nbytes


def block(run: Run, steps: int, engine: SyncCheckpointEngine | None) -> float:
    """Seconds per step."""
    if engine is not None:
        engine.attach(run.optimizer)
    start = time.perf_counter()
    for step in range(steps):
        if engine is None:
            run.train()
        else:
            with engine.step(run.state, step):
                run.train()
    if engine is not None:
        # The end of a block pays for the capture that its last step left to the next one.
        engine.wait_captured()
    seconds = (time.perf_counter() - start) / steps
    if engine is not None:
        engine.drain()
    return seconds


if __name__ == "__main__":
    main()
