"""What the tier in memory gives and costs: a restart from it beside other loads of a cached file, training beside none.

Run: ``python -m tests.campaign.memory_tier [--folder DIR] [--gib 1] [--rounds 10] [--steps 20]``.

A process saves a state on disk, then changes it, saves it in memory alone and kills itself. In each round a process for
each way, in turns, makes live tensors of that size, and is timed from there until they hold the state: an engine's
opening and ``restore``, verified, whose process is then killed too; safetensors' and torch's files, which are in the
page cache, loaded and copied into the live tensors. Each checks all bits afterwards.

Then a module trains with AdamW, some steps with no engine, and as many with a checkpoint in memory at each step, in
turns. A step takes what a batch makes it take: ``--batch`` sets how long.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from examples.paper.lab.medians import summary
from pccheck_async import MemoryTier, SyncCheckpointEngine
from pccheck_async.engine.memory import MEMORY_ROOT
from tests.support.children import fork

PARTS = 64
State = dict[str, torch.Tensor]


def made(nbytes: int, seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {f"t{number:02}": torch.rand(nbytes // PARTS // 4, generator=generator) for number in range(PARTS)}


def tier() -> MemoryTier:
    return MemoryTier(interval=1)


def save_and_die(folder: Path, nbytes: int) -> None:
    state = made(nbytes, 0)
    engine = SyncCheckpointEngine(folder, memory=tier(), interval=1000).open()
    engine.checkpoint(state, step=0).result()
    for step in (1, 2, 3):  # the first ones only make the slots in memory
        for name, tensor in made(nbytes, step).items():
            state[name].copy_(tensor)
        with engine.step(state, step=step):
            pass
        time.sleep(2)
    os.kill(os.getpid(), signal.SIGKILL)


def from_memory(folder: Path, live: State) -> float:
    start = time.perf_counter()
    engine = SyncCheckpointEngine(folder, memory=tier(), interval=1000).open()
    restored = engine.restore(live)
    seconds = time.perf_counter() - start
    assert restored is not None
    assert (restored.source, restored.step) == ("memory", 3)
    return seconds


def from_disk(folder: Path, live: State) -> float:
    start = time.perf_counter()
    engine = SyncCheckpointEngine(folder).open()
    restored = engine.restore(live)
    seconds = time.perf_counter() - start
    assert restored is not None
    return seconds


def from_safetensors(folder: Path, live: State) -> float:
    start = time.perf_counter()
    for name, tensor in load_file(folder / "state.safetensors").items():
        live[name].copy_(tensor)
    return time.perf_counter() - start


def from_torch(folder: Path, live: State) -> float:
    start = time.perf_counter()
    for name, tensor in torch.load(folder / "state.pt").items():
        live[name].copy_(tensor)
    return time.perf_counter() - start


def timed(load: Callable[[Path, State], float], folder: Path, nbytes: int, step: int) -> float:
    """Return the seconds that ``load`` took in a process of its own, which ends by SIGKILL."""
    into, out = os.pipe()

    def work() -> None:
        live = {name: tensor.zero_() for name, tensor in made(nbytes, 99).items()}
        seconds = load(folder, live)
        assert all(torch.equal(tensor, live[name]) for name, tensor in made(nbytes, step).items())
        os.write(out, str(seconds).encode())
        os.kill(os.getpid(), signal.SIGKILL)

    child = fork(work)
    os.close(out)
    with os.fdopen(into) as pipe:
        seconds = pipe.read()
    os.waitpid(child, 0)
    assert seconds, f"{load.__name__} failed"
    return float(seconds)


def restarts(folder: Path, nbytes: int, rounds: int) -> None:
    child = fork(lambda: save_and_die(folder / "store", nbytes))
    os.waitpid(child, 0)
    state = made(nbytes, 3)
    save_file(state, folder / "state.safetensors")
    torch.save(state, folder / "state.pt")
    child = fork(lambda: save_on_disk(folder / "disk", nbytes))
    os.waitpid(child, 0)
    del state
    ways = {
        "memory": (from_memory, "store"),
        "safetensors": (from_safetensors, ""),
        "torch.load": (from_torch, ""),
        "disk": (from_disk, "disk"),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name, (load, below) in sorted(ways.items(), reverse=bool(turn % 2)):
            found[name].append(timed(load, folder / below, nbytes, 3))
    for name, seconds in found.items():
        print(summary(f"restart from {name}, s", seconds))
    for name in ("safetensors", "torch.load"):
        print(summary(f"memory / {name}", [a / b for a, b in zip(found["memory"], found[name], strict=True)]))


def save_on_disk(folder: Path, nbytes: int) -> None:
    with SyncCheckpointEngine(folder) as engine:
        engine.checkpoint(made(nbytes, 3), step=3).result()


def training(folder: Path, nbytes: int, rounds: int, steps: int, batch: int) -> None:
    width = 1024
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(max(1, nbytes // (12 * width * width)))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    data = torch.randn(batch, width)
    state = {"model": model, "optimizer": optimizer}
    step = 0

    def train(engine: SyncCheckpointEngine | None) -> float:
        nonlocal step
        start = time.perf_counter()
        for _ in range(steps):
            step += 1
            with engine.step(state, step) if engine else nullcontext():
                optimizer.zero_grad()
                torch.autograd.backward(model(data).square().mean())
                optimizer.step()
        return (time.perf_counter() - start) / steps

    train(None)
    found: dict[str, list[float]] = {"none": [], "memory": []}
    with SyncCheckpointEngine(folder / "training", memory=tier(), interval=1 << 30, save_last=False) as engine:
        engine.attach(optimizer)
        for turn in range(rounds + 1):
            for name in ("none", "memory") if turn % 2 else ("memory", "none"):
                seconds = train(engine if name == "memory" else None)
                engine.drain()
                if turn:
                    found[name].append(seconds)
        totals = engine.statistics()
    for name, values in found.items():
        print(summary(f"a step with {name}, s", values))
    print(summary("memory / none", [a / b for a, b in zip(found["memory"], found["none"], strict=True)]))
    lowest, median = (of(found["memory"]) / of(found["none"]) for of in (min, statistics.median))
    print(f"memory / none: lowest {lowest:.3f}, median {median:.3f}")
    print(totals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--only", choices=["restarts", "training"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    nbytes = int(args.gib * 2**30)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        try:
            if args.only != "training":
                restarts(folder, nbytes, args.rounds)
            if args.only != "restarts":
                training(folder, nbytes, args.rounds, args.steps, args.batch)
        finally:
            for left in Path(MEMORY_ROOT).glob(f"pccheck-{os.geteuid()}-*"):
                if any(folder in Path(origin.read_text()).parents for origin in left.glob("origin")):
                    shutil.rmtree(left)


if __name__ == "__main__":
    main()
