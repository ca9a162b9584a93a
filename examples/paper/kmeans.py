"""KMeans in NumPy, saved after every iteration: state that is not a network.

The centres, the generator and a digest of the labels are one checkpoint of some kilobytes, so a run that was killed and
resumed ends with the same centres after the same number of iterations, bit for bit::

    python -m examples.paper.kmeans --store run --crash-at 5   # dies by SIGKILL
    python -m examples.paper.kmeans --store run --resume       # goes on

Lloyd's iterations from a kmeans++ start (Arthur and Vassilvitskii, 2007), in float64. When they end, and what becomes
of empty clusters, is as in scikit-learn. No sum is left to BLAS, whose threads would decide on its order.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).parents[2]))  # where `examples` lies, when this runs as a file

from examples.paper.clustering import Floats, Samples, make_parser, run, samples_of

BLOCK = 256
"""Samples at a time: differences to a centre stay in the processor's cache."""


class KMeans:
    """Centres, shape (k, features), and how far they are.

    ``tolerance`` is relative to the mean variance of the features: iterating ends when the squared distance that the
    centres moved is no more, or when no sample changed its cluster.
    """

    def __init__(self, samples: Samples, k: int, tolerance: float, random: np.random.Generator) -> None:
        self.samples, self.random = samples.values, random
        self.identity = f"{samples.identity}, k = {k}"
        self.centres = np.zeros((k, self.samples.shape[1]))
        self.least_shift = tolerance * float(self.samples.var(axis=0).mean())
        self.labels = ""  # a digest: whether they changed is all that an iteration needs to know of the one before
        self.iteration, self.inertia, self.converged = 0, np.inf, False

    @property
    def score(self) -> tuple[str, float]:
        return "inertia", self.inertia

    @property
    def parameters(self) -> Mapping[str, Floats]:
        return {"centres": self.centres}

    def start(self) -> None:
        """Draw samples as centres, each with a probability proportional to its squared distance to those drawn."""
        chosen = int(self.random.integers(len(self.samples)))
        for number in range(len(self.centres)):
            self.centres[number] = self.samples[chosen]
            _, squared = assign(self.samples, self.centres[: number + 1])
            total = squared.sum()  # 0: fewer distinct samples than clusters
            chosen = int(self.random.choice(len(self.samples), p=squared / total if total else None))

    def iterate(self) -> None:
        """Assign every sample to its nearest centre, then move the centres to the means of their samples."""
        labels, squared = assign(self.samples, self.centres)
        sums, counts = np.zeros_like(self.centres), np.bincount(labels, minlength=len(self.centres))
        for first in range(0, len(labels), BLOCK):
            block, of = self.samples[first : first + BLOCK], labels[first : first + BLOCK]
            for label in np.unique(of):
                sums[label] += block[of == label].sum(axis=0)
        self._fill_empty(sums, counts, labels, squared)
        moved = sums / np.maximum(counts, 1)[:, None]
        moved[counts == 0] = moved[counts.argmax()]
        shift = ((moved - self.centres) ** 2).sum()
        now = hashlib.sha256(labels.tobytes()).hexdigest()
        self.converged = bool(now == self.labels or shift <= self.least_shift)
        self.centres, self.labels, self.inertia = moved, now, float(squared.sum())
        self.iteration += 1

    def _fill_empty(self, sums: Floats, counts: NDArray[np.intp], labels: NDArray[np.intp], squared: Floats) -> None:
        """Give every empty cluster one of the samples that are farthest from their centres."""
        empty = np.flatnonzero(counts == 0)
        if not empty.size or not squared.max():
            return
        farthest = np.argpartition(squared, -empty.size)[-empty.size :][::-1]
        for cluster, sample in zip(empty, farthest, strict=True):
            sums[labels[sample]] -= self.samples[sample]
            counts[labels[sample]] -= 1
            sums[cluster], counts[cluster] = self.samples[sample], 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "data": self.identity,
            "centres": self.centres,
            "labels": self.labels,
            "iteration": self.iteration,
            "inertia": self.inertia,
            "converged": self.converged,
            "random": self.random.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["data"] != self.identity:
            raise ValueError(f"the checkpoint is of {state['data']}, not of {self.identity}")
        self.centres, self.labels = state["centres"], state["labels"]
        self.iteration, self.inertia, self.converged = state["iteration"], state["inertia"], state["converged"]
        self.random.bit_generator.state = state["random"]


def assign(samples: Floats, centres: Floats) -> tuple[NDArray[np.intp], Floats]:
    """Return for every sample its nearest centre (of equals the first), and the squared distance to it."""
    labels, squared = np.empty(len(samples), np.intp), np.empty(len(samples))
    for first in range(0, len(samples), BLOCK):
        block = samples[first : first + BLOCK]
        each = np.empty((len(block), len(centres)))
        for number, centre in enumerate(centres):
            difference = block - centre
            np.einsum("sf,sf->s", difference, difference, out=each[:, number])
        labels[first : first + BLOCK] = each.argmin(axis=1)
        squared[first : first + BLOCK] = each.min(axis=1)
    return labels, squared


def main() -> None:
    parser = make_parser(__doc__, tolerance=1e-4, meaning="relative shift of the centres at which to end")
    args = parser.parse_args()
    samples = samples_of(parser, args)
    run(KMeans(samples, args.k, args.tolerance, np.random.default_rng(args.seed)), args)


if __name__ == "__main__":
    main()
