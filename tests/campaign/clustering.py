"""How long the state of a clustering takes to save, beside numpy's and torch's ways, for k clusters of MNIST's shape.

Run: ``python -m tests.campaign.clustering {kmeans,gmm} [--folder DIR] [--k 2 3 ...] [--rounds 20] [--without WAY]``.

Each way saves the same state in every round, one after the other in a random order, so that what the machine does
meanwhile falls on all of them. "durable" is what survives a power failure: to another name, flushed, renamed, the
folder flushed. The plain ways write over the last file and flush nothing; all that they leave to be written is written
before the next way begins, which pays for nothing but its own. The states are those of examples/kmeans.py and
examples/gmm.py after two iterations on synthetic images; no figure is one of MNIST.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from pccheck_async import SyncCheckpointEngine
from pccheck_async.bench.medians import median_interval
from tests.clustering_harness import flat

State = Mapping[str, Any]
Way = Callable[[State], object]
WARM = 2
"""Rounds that are not counted: the engine's slots and the others' files are created in them."""

clustering: Any = importlib.import_module("pccheck_async.examples.clustering")  # it lies in examples/
gmm: Any = importlib.import_module("pccheck_async.examples.gmm")
kmeans: Any = importlib.import_module("pccheck_async.examples.kmeans")


def fitted(program: str, samples: Any, k: int) -> Any:
    """A clustering after two iterations."""
    draw = np.random.default_rng(1)
    if program == "kmeans":
        model = kmeans.KMeans(samples, k, 1e-4, draw)
    else:
        model = gmm.Mixture(samples, k, 1e-3, 1e-3, draw)
    model.start()
    for _ in range(2):
        model.iterate()
    return model


def in_place(path: Path, write: Callable[[BinaryIO, State], None]) -> Way:
    """Over the last file, without a flush."""

    def save(state: State) -> None:
        with path.open("wb") as file:
            write(file, state)

    return save


def durable(path: Path, write: Callable[[BinaryIO, State], None]) -> Way:
    """To another name, flushed, renamed, and the folder flushed."""
    new = path.with_name(f"{path.name}.new")

    def save(state: State) -> None:
        with new.open("wb") as file:
            write(file, state)
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    return save


def savez(file: BinaryIO, state: State) -> None:
    np.savez(file, **flat(state))


def savez_compressed(file: BinaryIO, state: State) -> None:
    np.savez_compressed(file, **flat(state))


def torch_save(file: BinaryIO, state: State) -> None:
    torch.save(dict(state), file)


@contextmanager
def ways(folder: Path) -> Iterator[dict[str, Way]]:
    """Every way to save, by its name."""
    with SyncCheckpointEngine(folder / "store", max_in_flight=1) as engine:
        yield {
            "savez": in_place(folder / "a.npz", savez),
            "savez durable": durable(folder / "b.npz", savez),
            "savez_compressed": in_place(folder / "c.npz", savez_compressed),
            "savez_compressed durable": durable(folder / "d.npz", savez_compressed),
            "torch.save durable": durable(folder / "e.pt", torch_save),
            "pccheck durable": lambda state: engine.checkpoint({"clusters": state}).result(),
        }


def change(state: State) -> None:
    """What an iteration does: other bits, of the same kind."""
    for array in state.values():
        if isinstance(array, np.ndarray):
            np.multiply(array, 1 + 1e-9, out=array)
        elif isinstance(array, torch.Tensor):
            array.mul_(1 + 1e-9)


def measure(state: State, folder: Path, rounds: int, without: list[str]) -> dict[str, list[float]]:
    """Seconds of every way, by round."""
    shuffle = random.Random(1)
    with ways(folder) as found:
        chosen = {name: way for name, way in found.items() if name not in without}
        seconds: dict[str, list[float]] = {name: [] for name in chosen}
        for _ in range(rounds + WARM):
            change(state)
            for name in shuffle.sample(list(chosen), len(chosen)):
                start = time.perf_counter()
                chosen[name](state)
                seconds[name].append(time.perf_counter() - start)
                os.sync()
    return {name: each[WARM:] for name, each in seconds.items()}


def report(seconds: Mapping[str, list[float]]) -> None:
    """Print milliseconds of each way, and how many times as long as ours it takes, round by round."""
    ours = seconds["pccheck durable"]
    for name, each in seconds.items():
        median, low, high = median_interval([one * 1e3 for one in each])
        ratio, least, most = median_interval([one / our for one, our in zip(each, ours, strict=True)])
        print(
            f"  {name:25} {median:9.3f} ms [{low:.3f}, {high:.3f}]"
            + (f"   {ratio:6.2f} times ours [{least:.2f}, {most:.2f}]" if each is not ours else "")
        )


def filesystem(folder: Path) -> str:
    """Name of the filesystem that a folder is on."""
    found = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, timeout=10, check=True)
    return found.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=("kmeans", "gmm"))
    parser.add_argument("--folder", default=None)
    parser.add_argument("--k", type=int, nargs="+", default=list(range(2, 11)))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--without", nargs="+", default=[], help="ways to leave out")
    args = parser.parse_args()
    some = 20_000 if args.program == "kmeans" else 2000  # a part of them: that changes no shape of the state
    samples = clustering.load_samples("synthetic", some)
    for k in args.k:
        model = fitted(args.program, samples, k)
        state = model.state_dict()
        nbytes = sum(array.nbytes for array in model.parameters.values())
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            kind = filesystem(Path(folder))
            kind += " (memory: emulation of persistent memory)" if kind == "tmpfs" else ""
            seconds = measure(state, Path(folder), args.rounds, args.without)
        print(f"{args.program}, k = {k}, {nbytes / 1e3:.1f} kB, on {kind}, {args.rounds} rounds")
        report(seconds)
        over = statistics.median(seconds["pccheck durable"])
        print(f"  pccheck durable: {nbytes / over / 1e9:.2f} GB/s", flush=True)


if __name__ == "__main__":
    main()
