"""What kmeans.py and gmm.py share: the samples, the flags, and the loop that saves every iteration and resumes."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from examples.paper.lab.methods import CLUSTERING
from pccheck_async import CheckpointError, list_checkpoints

Floats = NDArray[np.float64]

SYNTHETIC_SAMPLES, SIDE = 60_000, 28  # as many images, of as many pixels a side, as MNIST trains on
_HANDS, _REACH = 40, 2  # ways to draw a kind of stroke, and how many pixels off the centre it lies at most


class Samples(NamedTuple):
    """Rows to be clustered, float64 from 0 to 1, shape (samples, features), and what they are."""

    values: Floats
    name: str

    @property
    def identity(self) -> str:
        """What a checkpoint says of the samples that it belongs to."""
        rows, columns = self.values.shape
        return f"{self.name}, {rows} x {columns}, crc32 {zlib.crc32(np.ascontiguousarray(self.values).data):08x}"


class Clusters(Protocol):
    """A clustering under way. Its ``state_dict`` holds all that the next iterations depend on, but for the samples."""

    iteration: int
    converged: bool

    @property
    def score(self) -> tuple[str, float]:
        """Name and value of what the last iteration measured."""

    @property
    def parameters(self) -> Mapping[str, Floats]: ...

    def start(self) -> None:
        """Choose the parameters to begin with."""

    def iterate(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def load_samples(name: str, most: int | None) -> Samples:
    """Return the first ``most`` samples (None: all) of ``digits`` or ``synthetic``."""
    values = digits() if name == "digits" else synthetic(most or SYNTHETIC_SAMPLES)
    return Samples(values[:most], name)


def digits() -> Floats:
    """Return scikit-learn's handwritten digits, shape (1797, 64)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("the digits come with scikit-learn: pip install scikit-learn, or take --data synthetic")
    values: Floats = load_digits().data / 16
    return values


def synthetic(count: int) -> Floats:
    """Return images of ten kinds of blurred strokes inside a black margin, shape (count, 784).

    They have MNIST's shape, range and sparsity, not its content. Image ``n`` is the same whatever ``count`` is.
    """
    random = np.random.default_rng(28)
    along = np.linspace(0, 2 * np.pi, 60)[:, None]
    rows, columns = np.mgrid[:SIDE, :SIDE]
    offsets = range(-_REACH, _REACH + 1)
    images = []
    for _ in range(10):
        waves, amplitudes, phases = random.uniform(0.4, 1.4, 2), random.uniform(4, 8, 2), random.uniform(0, 6.3, 2)
        for _ in range(_HANDS):
            sizes, turns = amplitudes * random.uniform(0.7, 1.1, 2), phases + random.normal(scale=0.3, size=2)
            curve = (SIDE - 1) / 2 + sizes * np.sin(waves * along + turns)
            squared = ((rows - curve[:, 0, None, None]) ** 2 + (columns - curve[:, 1, None, None]) ** 2).min(axis=0)
            stroke = np.exp(-squared / random.uniform(1, 3)) * (squared < 6)
            images += [np.roll(stroke, (y, x), (0, 1)) for y in offsets for x in offsets]
    which = random.integers(len(images), size=SYNTHETIC_SAMPLES)[:count]
    brightness = random.uniform(0.7, 1.1, SYNTHETIC_SAMPLES)[:count]
    values = np.stack(images).reshape(len(images), -1)[which]
    values *= brightness[:, None]
    for number in range(len(values)):  # one draw per image, in turn
        values[number] *= random.uniform(0.8, 1.1, values.shape[1])
    pixels: Floats = np.round(np.clip(values, 0, 1) * 255) / 255
    return pixels


def digest(parameters: Mapping[str, Floats]) -> str:
    """Return SHA-256 of the bits of all parameters."""
    total = hashlib.sha256()
    for name, array in parameters.items():
        total.update(f"{name}{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def make_parser(description: str | None, *, tolerance: float, meaning: str) -> argparse.ArgumentParser:
    """Return the flags that both programs have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--store", type=Path, required=True, help="folder of the checkpoints")
    add("--resume", action="store_true", help="continue from the newest checkpoint, from scratch where there is none")
    add("--data", choices=("digits", "synthetic"), default="digits", help="synthetic: 60,000 images like MNIST's")
    add("--samples", type=int, help="cluster only the first so many")
    add("--k", type=int, default=10, help="clusters (default %(default)s)")
    add("--max-iterations", type=int, default=300, help="in all, resumed ones included (default %(default)s)")
    add("--tolerance", type=float, default=tolerance, help=f"{meaning} (default %(default)s)")
    add("--method", choices=CLUSTERING, default="pccheck", help="how to save (default %(default)s)")
    add("--crash-at", type=int, metavar="ITERATION", help="die by SIGKILL once saving this iteration lets go on")
    add("--seed", type=int, default=1)
    return parser


def samples_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Samples:
    """Return the samples that the command line asks for; end the program where it makes no sense."""
    if not args.resume and (list_checkpoints(args.store) or any(args.store.glob("checkpoint.*"))):
        parser.error(f"{args.store} holds checkpoints already: continue with --resume, or choose another --store")
    samples = load_samples(args.data, args.samples)
    if not 1 <= args.k <= len(samples.values):
        parser.error(f"--k must lie between 1 and the number of samples, {len(samples.values)}")
    return samples


def fit(clusters: Clusters, args: argparse.Namespace) -> None:
    """Iterate until done, save after every iteration, resume or crash where the command line says so."""
    with CLUSTERING[args.method](args.store) as method:
        state, restored = clusters.state_dict(), 0
        if args.resume:
            with suppress(FileNotFoundError):
                restored = method.load(state)
        print(f"resumed from iteration {restored}" if restored else "starting from scratch", flush=True)
        if args.data == "synthetic":
            print("synthetic images, of MNIST's shape: no figure here is one of MNIST", flush=True)
        if restored:
            clusters.load_state_dict(state)
        else:
            clusters.start()
        while not clusters.converged and clusters.iteration < args.max_iterations:
            clusters.iterate()
            name, value = clusters.score
            print(f"iteration {clusters.iteration}: {name} {value!r}, saving", flush=True)
            method.save(clusters.state_dict(), clusters.iteration).captured()
            # With pccheck the state is captured and being written: the next iteration may change it.
            if clusters.iteration == args.crash_at:
                os.kill(os.getpid(), signal.SIGKILL)  # with no chance to clean up
    how = "converged" if clusters.converged else "not converged"
    print(f"{how} after {clusters.iteration} iterations, parameters {digest(clusters.parameters)}", flush=True)


def run(clusters: Clusters, args: argparse.Namespace) -> None:
    """``fit``; end the program with a line where that fails for a reason that has a name."""
    try:
        fit(clusters, args)
    except (CheckpointError, ValueError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
