from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.paper import clustering, gmm
from tests.support.clustering_harness import Comparison, Program, check_engine, check_savez_in_place, two_states

pytestmark = pytest.mark.usefixtures("one_thread")  # forked children have none but their first

FLAGS = ("--k=5", "--threads=1")


@pytest.fixture(scope="module")
def digits() -> Any:
    return clustering.load_samples("digits", None)


def started(samples: Any, k: int, seed: int = 1, tolerance: float = 1e-3, regularisation: float = 1e-3) -> Any:
    model = gmm.Mixture(samples, k, tolerance, regularisation, np.random.default_rng(seed))
    model.start()
    return model


def compare_with_sklearn(model: Any, most: int = 100) -> None:
    """Iterate, and let scikit-learn do so from the same weights, means and covariances."""
    theirs = pytest.importorskip("sklearn.mixture").GaussianMixture(
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
@pytest.mark.parametrize("k", [1, 5])
def test_scikit_learn_finds_the_same(digits: Any, k: int) -> None:
    compare_with_sklearn(started(digits, k))


def test_one_gaussian_is_the_sample_mean_and_covariance(digits: Any) -> None:
    model = started(digits, 1, regularisation=0.5)
    model.iterate()
    expected = np.cov(digits.values.T, bias=True) + 0.5 * np.eye(64)
    np.testing.assert_allclose(model.means[0].numpy(), digits.values.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(model.covariances[0].numpy(), expected, atol=1e-12)


def test_a_singular_covariance_is_told(digits: Any) -> None:
    model = started(digits, 5, regularisation=0)  # some pixels are always black
    with pytest.raises(ValueError, match="larger --regularisation"):
        model.iterate()


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """One uninterrupted run, for several tests to compare with."""
    return Comparison(Program("gmm", FLAGS), tmp_path_factory.mktemp("gmm"))


@pytest.mark.campaign
@pytest.mark.parametrize("part", [0, 0.5, 1])
def test_killed_and_resumed_is_uninterrupted(comparison: Comparison, part: float) -> None:
    comparison.kill_at(part)


@pytest.mark.campaign
def test_fifty_kills(tmp_path: Path) -> None:
    Comparison(Program("gmm", (*FLAGS, "--tolerance=1e-6", "--samples=600")), tmp_path).check_fifty_kills()


@pytest.fixture(scope="module")
def states(digits: Any) -> list[dict[str, Any]]:
    return two_states(started(digits, 10))


@pytest.mark.campaign
def test_savez_in_place_killed_in_mid_write_loses_everything(tmp_path: Path, states: list[dict[str, Any]]) -> None:
    check_savez_in_place(tmp_path, *states)


@pytest.mark.campaign
def test_the_engine_killed_in_mid_write_recovers(tmp_path: Path, states: list[dict[str, Any]]) -> None:
    check_engine(tmp_path, 600_000, *states)  # slot and commit records, in whole blocks
