"""The programs of the page with recipes: killed at random and resumed, they end with the bits of a run that was not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from pccheck_async import stores
from tests.support.readme_blocks import ROOT
from tests.support.recipes import MOST_LINES, programs, write_program
from tests.support.state_strategies import difference
from tests.support.warm import run_warm, start_warm

PAGE = "recipes.md"
FREE = {"rng.python", "rng.numpy"}
"""Generators that no program seeds, because none draws from them: they differ from run to run."""
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_the_programs_are_short() -> None:
    for page in (PAGE, "notebooks.md"):
        for name, text in programs(page).items():
            assert len(text.splitlines()) < MOST_LINES, name


def start(script: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a program in its own folder."""
    return start_warm(
        script, *arguments, cwd=script.parent, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(script: Path, *arguments: str) -> str:
    """Run a program to its end; return what it printed."""
    done = run_warm(script, *arguments, cwd=script.parent, env=ENVIRONMENT, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    printed: str = done.stdout
    return printed


def same_bits(one: Path, other: Path, *, step: int | None = None) -> bool:
    """Whether the checkpoints of two stores are equal, but for generators that are not used."""
    compared = stores.compare(one, other, step=step, other_step=step)
    different = {difference.path for difference in compared.differences}
    assert compared.one.step == compared.other.step
    assert compared.leaves >= 3
    return {path for path in different if ".".join(path.split(".")[:2]) not in FREE} == set()


def rows(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_the_training_script_killed_at_random(seed: int, tmp_path: Path) -> None:
    choice, scripts = random.Random(seed), {}
    for name in ("once", "killed"):
        (tmp_path / name).mkdir()
        scripts[name] = write_program(PAGE, "train.py", tmp_path / name)
    finish(scripts["once"])
    once, killed = tmp_path / "once", tmp_path / "killed"
    total = rows(once / "log.csv")
    for life in range(5):
        at = rows(killed / "log.csv") + choice.randint(1, total // 5)
        with start(scripts["killed"]) as process:
            while rows(killed / "log.csv") < at and process.poll() is None:
                time.sleep(0.0005)
            process.send_signal(signal.SIGKILL)
        assert process.returncode in ((-signal.SIGKILL,) if life < 4 else (-signal.SIGKILL, 0))
        with (killed / "log.csv").open("a") as log:
            log.write(choice.choice(["", "99", "99999,0.5,", "5"]))  # a row that the kill has cut
    finish(scripts["killed"])
    assert (killed / "log.csv").read_bytes() == (once / "log.csv").read_bytes()
    assert same_bits(once / "run", killed / "run")
    best = [torch.load(folder / "best.pt") for folder in (once, killed)]
    assert not difference(*best)
