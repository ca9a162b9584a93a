"""The short examples: each resumes where it ended, and ends with the bits of a run that was never interrupted."""

from __future__ import annotations

import ast
import importlib
import os
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pccheck_async import Shelf, list_checkpoints, stores
from tests.support.run_example import EXAMPLES
from tests.support.state_strategies import difference
from tests.support.warm import run_warm

APART = ("ray_train", "shelf")
"""Those tested apart: Ray starts processes of its own (tests/integrations/test_ray.py), a shelf is no store (below)."""
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in ("__init__", *APART))
FREE = {"rng.python", "rng.numpy"}
"""Generators that no example seeds, because none draws from them: they differ from run to run."""
COUNTED_FROM_ONE = {"hf_trainer"}
"""Those whose steps are the numbers of a trainer that calls the first one 1."""
ROOT = EXAMPLES.parent


def run(name: str, folder: Path, *arguments: str) -> str:
    """Run an example in a process of its own; return what it printed."""
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = "-m", "tests.support.run_example", name, *arguments
    done = run_warm(*command, cwd=folder, env=environment, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == (128 + signal.SIGTERM if name == "preemption" else 0), done.stdout
    printed: str = done.stdout
    return printed


def test_there_are_examples() -> None:
    assert len(NAMES) >= 7


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_example_resumes_with_the_same_bits(name: str, tmp_path: Path) -> None:
    for node in ast.parse((EXAMPLES / f"{name}.py").read_text()).body:  # once, and not in each of its processes
        if isinstance(node, ast.ImportFrom) and node.module:
            importlib.import_module(node.module)
    assert "starting from scratch" in run(name, tmp_path / "twice")
    half = list_checkpoints(tmp_path / "twice" / "checkpoints" / name)[0].step
    second = run(name, tmp_path / "twice")
    resumed = re.search(r"^resumed after [\w-]+ (\d+)$", second, re.MULTILINE)
    assert resumed, second
    assert int(resumed[1]) == half
    first = 1 if name in COUNTED_FROM_ONE else 0
    run(name, tmp_path / "once", str(2 * (half + 1 - first)))
    folders = [tmp_path / times / "checkpoints" / name for times in ("twice", "once")]
    compared = stores.compare(*folders)
    assert compared.one.step == compared.other.step == 2 * half + 1 - first
    assert compared.leaves >= 3
    different = {difference.path for difference in compared.differences}
    assert {path for path in different if ".".join(path.split(".")[:2]) not in FREE} == set()


@pytest.mark.slow
def test_the_shelf_resumes_with_the_same_bits(tmp_path: Path) -> None:
    assert "starting from scratch" in run("shelf", tmp_path / "twice", "1")
    assert "resumed after iteration 0" in run("shelf", tmp_path / "twice", "1")
    run("shelf", tmp_path / "once", "2")
    found = []
    for times in ("twice", "once"):
        with Shelf(tmp_path / times / "kmeans.shelf", readonly=True) as shelf:
            found.append({name: np.copy(value) for name, value in dict(shelf).items()})
            assert shelf.verify() == ()
    assert not difference(found[0], found[1])


def test_the_programs_are_short() -> None:
    for name in (*NAMES, *APART):
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 90, name
