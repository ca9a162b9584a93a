"""Frameworks that are not installed, or in a version that was not tested."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError

import pytest

from pccheck_async.integrations import versions


@pytest.mark.parametrize("found", ["0.4.0", "0.30.1", "1.3.0"])
def test_another_version_is_named_beside_the_tested_one(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda _: found)
    with pytest.warns(UserWarning, match=rf"torchtitan {found} is installed; .*\.torchtitan was tested with 0\.3\.x"):
        versions.require("torchtitan", "0.3")


def test_the_tested_version_is_taken_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda _: "0.3.1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.require("torchtitan", "0.3")


def test_a_framework_that_is_not_there_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(ImportError, match=r'torchtitan is not installed: pip install "pccheck-async\[torchtitan\]"'):
        versions.require("torchtitan", "0.3")
