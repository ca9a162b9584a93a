from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.clustering_harness import Comparison, Program, check_engine, check_savez_in_place, two_states

gmm: Any = importlib.import_module("pccheck_async.examples.gmm")  # it lies in examples/
clustering: Any = importlib.import_module("pccheck_async.examples.clustering")
sklearn_mixture: Any = pytest.importorskip("sklearn.mixture")

FLAGS = ("--k=5", "--threads=1")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Forked children have none but their first, and are compared with what is computed here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def digits() -> Any:
    return clustering.load_samples("digits", None)


def started(samples: Any, k: int, seed: int = 1, tolerance: float = 1e-3, regularisation: float = 1e-3) -> Any:
    model = gmm.Mixture(samples, k, tolerance, regularisation, np.random.default_rng(seed))
    model.start()
    return model


def compare_with_sklearn(model: Any, most: int = 100) -> None:
    """Iterate, and let scikit-learn do so from the same weights, means and covariances."""
    theirs = sklearn_mixture.GaussianMixture(
        len(model.means),
        tol=model.tolerance,
        reg_covar=model.regularisation,
        max_iter=most,
        weights_init=model.weights.numpy().copy(),
        means_init=model.means.numpy().copy(),
        precisions_init=torch.linalg.inv(model.covariances).numpy(),
    )
    labels = theirs.fit_predict(model.rows.values)
    while not model.converged and model.iteration < most:
        model.iterate()
    assert model.iteration == theirs.n_iter_
    assert model.converged == theirs.converged_
    np.testing.assert_allclose(model.weights.numpy(), theirs.weights_, rtol=1e-6)
    np.testing.assert_allclose(model.means.numpy(), theirs.means_, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(model.covariances.numpy(), theirs.covariances_, rtol=1e-6, atol=1e-12)
    assert model.likelihood == pytest.approx(theirs.lower_bound_, rel=1e-9)
    np.testing.assert_array_equal(model.labels().numpy(), labels)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 5, 10])
def test_scikit_learn_finds_the_same(digits: Any, k: int) -> None:
    compare_with_sklearn(started(digits, k))


@pytest.mark.slow
def test_scikit_learn_stops_at_the_same_iteration(digits: Any) -> None:
    counts = []
    for tolerance in (1e-2, 1e-3, 1e-5):
        model = started(digits, 5, tolerance=tolerance)
        compare_with_sklearn(model)
        counts.append(model.iteration)
    assert counts == sorted(set(counts))
    model = started(digits, 3, tolerance=0.1, regularisation=0.1)
    compare_with_sklearn(model)


@pytest.mark.slow
def test_scikit_learn_finds_the_same_in_synthetic_images() -> None:
    rows = clustering.synthetic(1500)[:, 10 * 28 : 17 * 28]  # of all 784 pixels the covariances take half a minute
    compare_with_sklearn(started(clustering.Samples(rows, "synthetic"), 3, regularisation=1e-2))


def test_the_likelihood_grows(digits: Any) -> None:
    model, before = started(digits, 5), -math.inf
    for _ in range(4):
        model.iterate()
        assert model.likelihood > before
        before = model.likelihood
    assert model.weights.sum().item() == pytest.approx(1)


def test_one_gaussian_is_the_sample_mean_and_covariance(digits: Any) -> None:
    model = started(digits, 1, regularisation=0.5)
    model.iterate()
    expected = np.cov(digits.values.T, bias=True) + 0.5 * np.eye(64)
    np.testing.assert_allclose(model.means[0].numpy(), digits.values.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(model.covariances[0].numpy(), expected, atol=1e-12)


def test_blocks_change_nothing_but_rounding(digits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = started(digits, 5)
    whole.iterate()
    monkeypatch.setattr(gmm, "BLOCK", 100)
    blocks = started(digits, 5)
    blocks.iterate()
    for name, array in whole.parameters.items():
        np.testing.assert_allclose(blocks.parameters[name], array, rtol=1e-6, atol=1e-12)


def test_a_singular_covariance_is_told(digits: Any) -> None:
    model = started(digits, 5, regularisation=0)  # some pixels are always black
    with pytest.raises(ValueError, match="larger --regularisation"):
        model.iterate()


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """One uninterrupted run, for several tests to compare with."""
    return Comparison(Program("gmm", FLAGS), tmp_path_factory.mktemp("gmm"))


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 0.5, 1])
def test_killed_and_resumed_is_uninterrupted(comparison: Comparison, part: float) -> None:
    comparison.kill_at(part)


@pytest.mark.campaign
def test_fifty_kills(tmp_path: Path) -> None:
    Comparison(Program("gmm", (*FLAGS, "--tolerance=1e-6", "--samples=600")), tmp_path).check_fifty_kills()


@pytest.mark.slow
def test_wrong_usage(comparison: Comparison) -> None:
    other = comparison.program.run(comparison.folder / "uninterrupted", "--resume", "--k=3")
    assert other.status == 1
    assert "k = 5, not of digits, 1797 x 64" in other.said[-1]


@pytest.mark.slow
def test_a_singular_covariance_ends_the_program_with_a_line(tmp_path: Path) -> None:
    done = Program("gmm", (*FLAGS, "--regularisation=0")).run(tmp_path)
    assert done.status == 1
    assert "larger --regularisation" in done.said[-1]


@pytest.fixture(scope="module")
def states(digits: Any) -> list[dict[str, Any]]:
    return two_states(started(digits, 10))


@pytest.mark.slow
def test_savez_in_place_killed_in_mid_write_loses_everything(tmp_path: Path, states: list[dict[str, Any]]) -> None:
    check_savez_in_place(tmp_path, *states)


@pytest.mark.slow
def test_the_engine_killed_in_mid_write_recovers(tmp_path: Path, states: list[dict[str, Any]]) -> None:
    check_engine(tmp_path, 600_000, *states)  # slot and commit records, in whole blocks
