"""KMeans in NumPy, saved after every iteration: a state that is no network.

python examples/kmeans.py [ITERATIONS]    # makes 10 iterations more; the second run resumes
"""

import sys
from typing import Any

import numpy as np

from pccheck_async import SyncCheckpointEngine

ITERATIONS = int(sys.argv[1]) if len(sys.argv) > 1 else 10


class KMeans:
    """Mini-batch KMeans. Anything with these two methods can be saved; arrays and plain values go inside."""

    def __init__(self, samples: np.ndarray[Any, np.dtype[np.float64]], k: int) -> None:
        self.samples, self.random = samples, np.random.default_rng(0)
        self.centres, self.counts = self.random.choice(samples, k, replace=False), np.zeros(k, int)

    def iterate(self) -> float:
        """Move the centres towards a random part of the samples; return the mean squared distance."""
        part = self.random.choice(self.samples, 256)
        squared = ((part[:, None] - self.centres) ** 2).sum(2)
        for label, sample in zip(squared.argmin(1), part, strict=True):
            self.counts[label] += 1
            self.centres[label] += (sample - self.centres[label]) / self.counts[label]
        return float(squared.min(1).mean())

    def state_dict(self) -> dict[str, Any]:
        return {"centres": self.centres, "counts": self.counts, "random": self.random.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.centres, self.counts = state["centres"], state["counts"]
        self.random.bit_generator.state = state["random"]


groups = np.random.default_rng(1)
samples = groups.permutation(groups.normal(size=(5, 8)).repeat(400, 0) * 5 + groups.normal(size=(2000, 8)))
clusters = KMeans(samples, k=5)
state = {"clusters": clusters}

with SyncCheckpointEngine("checkpoints/kmeans") as engine:
    restored = engine.restore(state)
    first = restored.step + 1 if restored else 0
    print(f"resumed after iteration {restored.step}" if restored else "starting from scratch")
    for iteration in range(first, first + ITERATIONS):
        distance = clusters.iterate()
        engine.checkpoint(state, step=iteration, metadata={"distance": distance})  # returns when captured
    print(f"iteration {iteration}: mean squared distance {distance:.3f}")
