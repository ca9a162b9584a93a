"""A mixture of Gaussians in torch, saved after every iteration: state that is not a network, and of some megabytes.

Weights, means, full covariances and the generator are one checkpoint, so a run that was killed and resumed ends with
the same parameters after the same number of iterations, bit for bit::

    python -m examples.paper.gmm --store run --crash-at 5   # dies by SIGKILL
    python -m examples.paper.gmm --store run --resume       # goes on

Expectation and maximisation in float64, from the clusters that a few iterations of KMeans find. When they end is as in
scikit-learn. Responsibilities follow from the parameters, so they are not saved.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2]))  # where `examples` lies, when this runs as a file

from examples.paper.clustering import Floats, Samples, make_parser, run, samples_of
from examples.paper.kmeans import KMeans, assign

BLOCK = 4096
"""Samples at a time: so many rows of differences to a mean are in memory, and sums are taken block by block."""

LLOYD = 10
"""Iterations of KMeans to start from."""


class Mixture:
    """Weights, shape (k,), means (k, features) and covariances (k, features, features), and how far they are.

    ``regularisation`` is added to every variance. Iterating ends when the mean log likelihood changes by less than
    ``tolerance``.
    """

    def __init__(
        self, samples: Samples, k: int, tolerance: float, regularisation: float, random: np.random.Generator
    ) -> None:
        self.rows, self.random = samples, random
        self.identity = f"{samples.identity}, k = {k}"
        self.samples = torch.from_numpy(samples.values)
        self.tolerance, self.regularisation = tolerance, regularisation
        features = self.samples.shape[1]
        self.weights, self.means = self.samples.new_zeros(k), self.samples.new_zeros(k, features)
        self.covariances = self.samples.new_zeros(k, features, features)
        self.iteration, self.likelihood, self.converged = 0, -math.inf, False

    @property
    def score(self) -> tuple[str, float]:
        return "mean log likelihood", self.likelihood

    @property
    def parameters(self) -> Mapping[str, Floats]:
        found = {"weights": self.weights, "means": self.means, "covariances": self.covariances}
        return {name: tensor.numpy() for name, tensor in found.items()}

    def start(self) -> None:
        """Take the samples as belonging to the cluster that KMeans finds them in."""
        clusters = KMeans(self.rows, len(self.means), 0, self.random)
        clusters.start()
        while not clusters.converged and clusters.iteration < LLOYD:
            clusters.iterate()
        labels, _ = assign(clusters.samples, clusters.centres)
        self._maximise(torch.nn.functional.one_hot(torch.from_numpy(labels), len(self.means)).double())

    def iterate(self) -> None:
        """One expectation and one maximisation."""
        logs = self.log_joint()
        each = logs.logsumexp(1, keepdim=True)
        self._maximise((logs - each).exp())
        likelihood = each.mean().item()
        self.converged = abs(likelihood - self.likelihood) < self.tolerance
        self.likelihood = likelihood
        self.iteration += 1

    def log_joint(self) -> Tensor:
        """Return the log of each component's weight times its density at each sample, shape (samples, k).

        Raises ValueError where a covariance is singular.
        """
        factors, failed = torch.linalg.cholesky_ex(self.covariances)
        if failed.any():
            raise ValueError("a covariance is not positive definite: take a larger --regularisation, or a smaller --k")
        constants = self.weights.log() - factors.diagonal(dim1=1, dim2=2).log().sum(1)
        constants -= self.samples.shape[1] / 2 * math.log(2 * math.pi)
        logs = self.samples.new_empty(len(self.samples), len(self.means))
        for block, into in zip(torch.split(self.samples, BLOCK), torch.split(logs, BLOCK), strict=True):
            for number, (factor, mean) in enumerate(zip(factors, self.means, strict=True)):
                whitened = torch.linalg.solve_triangular(factor, (block - mean).T, upper=False)
                into[:, number] = constants[number] - whitened.square_().sum(0) / 2
        return logs

    def labels(self) -> Tensor:
        """Return the most probable component of every sample."""
        return self.log_joint().argmax(1)

    def _maximise(self, responsibilities: Tensor) -> None:
        counts = responsibilities.sum(0) + 10 * torch.finfo(torch.float64).eps  # never 0
        self.weights = counts / counts.sum()
        self.means = responsibilities.T @ self.samples / counts[:, None]
        self.covariances = torch.zeros_like(self.covariances)
        for covariance, mean, shares in zip(self.covariances, self.means, responsibilities.T, strict=True):
            for block, share in zip(torch.split(self.samples, BLOCK), torch.split(shares, BLOCK), strict=True):
                difference = block - mean
                covariance.addmm_((difference * share[:, None]).T, difference)
        self.covariances /= counts[:, None, None]
        self.covariances.diagonal(dim1=1, dim2=2).add_(self.regularisation)

    def state_dict(self) -> dict[str, Any]:
        return {
            "data": self.identity,
            "weights": self.weights,
            "means": self.means,
            "covariances": self.covariances,
            "iteration": self.iteration,
            "likelihood": self.likelihood,
            "converged": self.converged,
            "random": self.random.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["data"] != self.identity:
            raise ValueError(f"the checkpoint is of {state['data']}, not of {self.identity}")
        self.weights, self.means, self.covariances = state["weights"], state["means"], state["covariances"]
        self.iteration, self.likelihood = state["iteration"], state["likelihood"]
        self.converged = state["converged"]
        self.random.bit_generator.state = state["random"]


def main() -> None:
    parser = make_parser(__doc__, tolerance=1e-3, meaning="change of the mean log likelihood at which to end")
    parser.add_argument("--regularisation", type=float, default=1e-3, help="added to variances (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; bits depend on it (default %(default)s)")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(args.threads)
    samples = samples_of(parser, args)
    run(Mixture(samples, args.k, args.tolerance, args.regularisation, np.random.default_rng(args.seed)), args)


if __name__ == "__main__":
    main()
