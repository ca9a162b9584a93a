from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pccheck_async import list_checkpoints, load_sync
from tests.support.clustering_harness import Comparison, Program, check_engine, check_savez_in_place, two_states

kmeans: Any = importlib.import_module("pccheck_async.examples.kmeans")  # it lies in examples/
clustering: Any = importlib.import_module("pccheck_async.examples.clustering")
sklearn_cluster: Any = pytest.importorskip("sklearn.cluster")


@pytest.fixture(scope="module")
def digits() -> Any:
    return clustering.load_samples("digits", None)


def started(samples: Any, k: int, seed: int = 1, tolerance: float = 1e-4) -> Any:
    model = kmeans.KMeans(samples, k, tolerance, np.random.default_rng(seed))
    model.start()
    return model


def samples_of(values: Any) -> Any:
    return clustering.Samples(np.asarray(values, float), "made up")


def compare_with_sklearn(model: Any, most: int = 300, tolerance: float = 1e-4) -> None:
    """Iterate, and let scikit-learn do so from the same centres.

    Not from samples, which are small integers here: some would be equally far from two of them, and scikit-learn leaves
    it to rounding which is nearer.
    """
    model.centres += np.random.default_rng(0).normal(scale=1e-3, size=model.centres.shape)
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


@pytest.mark.parametrize("k", [1, 2, 5, 10, 40])
def test_scikit_learn_finds_the_same(digits: Any, k: int) -> None:
    for seed in range(3):
        compare_with_sklearn(started(digits, k, seed))


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


def test_more_clusters_than_distinct_samples() -> None:
    model = started(samples_of([[0, 1]] * 3 + [[5, 5]] * 4), 4)
    while not model.converged:
        model.iterate()
    assert model.inertia == 0
    assert {tuple(centre) for centre in model.centres} == {(0, 1), (5, 5)}


def test_the_start_draws_distant_samples() -> None:
    """Probabilities are those of squared distances: 0 beside a centre, and here 100 to 1 between the two others."""
    samples = samples_of([[0, 0]] * 50 + [[1, 0]] + [[10, 0]])
    drawn = [{tuple(centre) for centre in started(samples, 2, seed).centres} for seed in range(300)]
    assert all(len(pair) == 2 for pair in drawn)
    others = [next(iter(pair - {(0, 0)})) for pair in drawn if (0, 0) in pair]
    assert len(others) > 250
    assert 0 < others.count((1, 0)) < 15


def test_the_same_seed_the_same_bits_and_another_seed_others(digits: Any) -> None:
    one, same, other = started(digits, 10, 1), started(digits, 10, 1), started(digits, 10, 2)
    for model in (one, same, other):
        model.iterate()
    assert clustering.digest(one.parameters) == clustering.digest(same.parameters)
    assert clustering.digest(one.parameters) != clustering.digest(other.parameters)


def test_synthetic_images() -> None:
    few, many = clustering.synthetic(50), clustering.synthetic(300)
    assert many.shape == (300, 784)
    assert few.tobytes() == many[:50].tobytes()
    assert 0 == many.min() < many.max() <= 1
    assert 0.6 < (many == 0).mean() < 0.95  # of MNIST's pixels 0.81 are black
    images = many.reshape(300, 28, 28)
    assert not images[:, 0].any()
    np.testing.assert_array_equal(np.round(many * 255), many * 255)


@pytest.mark.slow
def test_synthetic_images_have_mnists_shape_and_clusters() -> None:
    samples = clustering.load_samples("synthetic", None)
    assert samples.values.shape == (60_000, 784)
    model = started(clustering.Samples(samples.values[:3000], "synthetic"), 10)
    compare_with_sklearn(model)
    assert model.inertia < 0.8 * model.samples.var(axis=0).sum() * 3000  # one cloud would stay near 1


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """One uninterrupted run, for several tests to compare with."""
    return Comparison(Program("kmeans", ("--k=10", "--tolerance=0")), tmp_path_factory.mktemp("kmeans"))


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 0.5, 1])
def test_killed_and_resumed_is_uninterrupted(comparison: Comparison, part: float) -> None:
    comparison.kill_at(part)


@pytest.mark.campaign
def test_fifty_kills(tmp_path: Path) -> None:
    Comparison(Program("kmeans", ("--k=10", "--tolerance=0")), tmp_path).check_fifty_kills()


@pytest.mark.slow
def test_the_threads_of_blas_do_not_matter(comparison: Comparison, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pccheck_async.examples.kmeans", f"--store={tmp_path}", *comparison.program.flags]
    limited = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    said = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, env=limited).stdout
    assert said.splitlines() == comparison.uninterrupted.said


@pytest.mark.slow
def test_more_iterations_than_at_first(comparison: Comparison, tmp_path: Path) -> None:
    first = comparison.program.run(tmp_path, "--max-iterations=3")
    assert first.said[-1].startswith("not converged after 3 iterations")
    assert comparison.program.run(tmp_path, "--resume").said[-1] == comparison.uninterrupted.said[-1]


@pytest.mark.slow
def test_wrong_usage(comparison: Comparison, capfd: pytest.CaptureFixture[str]) -> None:
    store = comparison.folder / "uninterrupted"
    before = list_checkpoints(store)
    assert comparison.program.run(store).status == 2
    assert "continue with --resume" in capfd.readouterr().err
    assert comparison.program.run(store, "--resume", "--k=0").status == 2
    assert "--k must lie between" in capfd.readouterr().err
    for flags in (["--k=3"], ["--samples=100"]):
        other = comparison.program.run(store, "--resume", *flags)
        assert other.status == 1
        assert "the checkpoint is of digits, 1797 x 64" in other.said[-1]
    assert list_checkpoints(store) == before


@pytest.mark.slow
def test_synthetic_data_is_called_so(tmp_path: Path) -> None:
    done = Program("kmeans", ("--data=synthetic", "--samples=200", "--max-iterations=2")).run(tmp_path)
    assert done.status == 0
    assert done.said[1] == "synthetic images, of MNIST's shape: no figure here is one of MNIST"
    assert load_sync(tmp_path)["clusters"]["centres"].shape == (10, 784)


@pytest.fixture(scope="module")
def states(digits: Any) -> list[dict[str, Any]]:
    return two_states(started(digits, 10))


@pytest.mark.slow
def test_savez_in_place_killed_in_mid_write_loses_everything(tmp_path: Path, states: list[dict[str, Any]]) -> None:
    check_savez_in_place(tmp_path, *states)


@pytest.mark.slow
def test_the_engine_killed_in_mid_write_recovers(tmp_path: Path, states: list[dict[str, Any]]) -> None:
    check_engine(tmp_path, 200_000, *states)  # slot and commit records, in whole blocks
