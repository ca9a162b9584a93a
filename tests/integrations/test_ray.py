"""The recipe for Ray Train: run again, and with a worker that is killed, it ends with the bits of one whole run."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pccheck_async import stores

ROOT = Path(__file__).parents[2]
FREE = ("rng.python", "rng.numpy")
"""Generators that the recipe does not seed, because it draws nothing from them."""

pytestmark = [pytest.mark.campaign, pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")]


def run(module: str, folder: Path, steps: int) -> tuple[str, str]:
    """Run it in a process of its own; return the lines it printed: where it began, and Ray's result."""
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, str(steps)]
    ended = subprocess.run(command, check=False, cwd=folder, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    began, *_, result = ended.stdout.splitlines()  # between them, what Ray says of the killed worker
    return began, result


def test_the_recipe_resumes_after_its_end_and_after_a_worker_was_killed(tmp_path: Path) -> None:
    twice, once = tmp_path / "twice", tmp_path / "once"
    assert run("examples.ray_train", twice, 12)[0] == "starting from scratch"
    began, interrupted = run("tests.support.killed_ray", twice, 24 - 12)
    assert began == "resumed after step 11"
    assert (twice / "killed").exists()
    _, whole = run("examples.ray_train", once, 24)
    assert interrupted == whole  # the loss, in every digit
    assert "'step': 23" in whole
    compared = stores.compare(*(folder / "checkpoints" / "ray_train" for folder in (twice, once)))
    assert compared.one.step == compared.other.step == 23
    assert compared.leaves >= 12
    assert not [found.path for found in compared.differences if not found.path.startswith(FREE)]
    for folder in (twice, once):  # Ray deleted pointers, and nothing else
        pointers = {path.name for path in (folder / "checkpoints" / "ray_runs" / "train").glob("step-*")}
        assert len(pointers) == 2
        assert "step-23" in pointers
