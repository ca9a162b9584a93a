from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.paper import clustering, kmeans
from tests.support.clustering_harness import Comparison, Program, check_engine, check_savez_in_place, two_states


@pytest.fixture(scope="module")
def digits() -> Any:
    return clustering.load_samples("digits", None)


def started(samples: Any, k: int, seed: int = 1, tolerance: float = 1e-4) -> Any:
    model = kmeans.KMeans(samples, k, tolerance, np.random.default_rng(seed))
    model.start()
    return model


def compare_with_sklearn(model: Any, most: int = 300, tolerance: float = 1e-4) -> None:
    """Iterate, and let scikit-learn do so from the same centres.

    Not from samples, which are small integers here: some would be equally far from two of them, and scikit-learn leaves
    it to rounding which is nearer.
    """
    model.centres += np.random.default_rng(0).normal(scale=1e-3, size=model.centres.shape)
    sklearn_cluster: Any = pytest.importorskip("sklearn.cluster")
    theirs = sklearn_cluster.KMeans(
        len(model.centres), init=model.centres.copy(), n_init=1, algorithm="lloyd", tol=tolerance, max_iter=most
    ).fit(model.samples)
    while not model.converged and model.iteration < most:
        model.iterate()
    labels, squared = kmeans.assign(model.samples, model.centres)
    assert model.iteration == theirs.n_iter_
    np.testing.assert_allclose(model.centres, theirs.cluster_centers_, rtol=1e-6, atol=1e-12)
    np.testing.assert_array_equal(labels, theirs.labels_)
    assert squared.sum() == pytest.approx(theirs.inertia_, rel=1e-9)


@pytest.mark.parametrize("k", [1, 2, 5, 10, pytest.param(40, marks=pytest.mark.slow)])
def test_scikit_learn_finds_the_same(digits: Any, k: int) -> None:
    for seed in range(3):
        compare_with_sklearn(started(digits, k, seed))


@pytest.mark.slow
def test_scikit_learn_stops_at_the_same_iteration(digits: Any) -> None:
    counts = []
    for tolerance in (0, 1e-2, 1):  # 0: when no label changes any more
        model = started(digits, 10, tolerance=tolerance)
        compare_with_sklearn(model, tolerance=tolerance)
        counts.append(model.iteration)
    assert counts == sorted(set(counts), reverse=True)
    compare_with_sklearn(started(digits, 10), most=3)


@pytest.mark.parametrize("far", [1, 3])
def test_empty_clusters_are_filled_as_by_scikit_learn(digits: Any, far: int) -> None:
    model = started(digits, 10)
    model.centres[2 : 2 + far] += 100 + np.arange(far)[:, None]
    labels, _ = kmeans.assign(digits.values, model.centres)
    assert len(np.unique(labels)) == 10 - far
    compare_with_sklearn(model)
    labels, _ = kmeans.assign(digits.values, model.centres)
    assert len(np.unique(labels)) == 10


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """One uninterrupted run, for several tests to compare with."""
    return Comparison(Program("kmeans", ("--k=10", "--tolerance=0")), tmp_path_factory.mktemp("kmeans"))


@pytest.mark.campaign
@pytest.mark.parametrize("part", [0, 0.5, 1])
def test_killed_and_resumed_is_uninterrupted(comparison: Comparison, part: float) -> None:
    comparison.kill_at(part)


@pytest.mark.campaign
def test_fifty_kills(tmp_path: Path) -> None:
    Comparison(Program("kmeans", ("--k=10", "--tolerance=0")), tmp_path).check_fifty_kills()


@pytest.fixture(scope="module")
def states(digits: Any) -> list[dict[str, Any]]:
    return two_states(started(digits, 10))


@pytest.mark.campaign
def test_savez_in_place_killed_in_mid_write_loses_everything(tmp_path: Path, states: list[dict[str, Any]]) -> None:
    check_savez_in_place(tmp_path, *states)


@pytest.mark.campaign
def test_the_engine_killed_in_mid_write_recovers(tmp_path: Path, states: list[dict[str, Any]]) -> None:
    check_engine(tmp_path, 200_000, *states)  # slot and commit records, in whole blocks
