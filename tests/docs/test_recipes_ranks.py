"""The programs of several ranks on the page with recipes: some under torchrun, some as processes with what it sets."""

from __future__ import annotations

import importlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pccheck_async import list_checkpoints, load_sync, stores
from pccheck_async.errors import CheckpointError
from tests.support.readme_blocks import ROOT
from tests.support.recipes import program, write_program
from tests.support.state_strategies import difference
from tests.support.warm import start_warm

PAGE = "recipes.md"
WORLD = 2
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DEVICE": "cpu"}
FREE = {"rng.python", "rng.numpy"}
"""Generators that no program seeds, because none draws from them."""
pytestmark = pytest.mark.slow


def ranks(script: Path, **more: str) -> list[subprocess.Popen[str]]:
    """Start the ranks of a program, with the environment that torchrun gives them."""
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1"}
    return [
        start_warm(
            script,
            cwd=script.parent,
            env=ENVIRONMENT | common | {"MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)} | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]


def finish(script: Path, **more: str) -> list[str]:
    """Run the ranks of a program to their end; return what each printed."""
    started = ranks(script, **more)
    printed = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * WORLD, printed
    return printed


def steps(folder: Path) -> list[int]:
    try:
        return [info.step for info in list_checkpoints(folder)]
    except CheckpointError:
        return []


def wait_for_step(folder: Path, step: int, processes: list[subprocess.Popen[str]]) -> None:
    """Wait until a checkpoint of this step, or a later one, is there."""
    deadline = time.monotonic() + 120
    while max(steps(folder), default=-1) < step:
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes)
        time.sleep(0.001)


def kill(started: list[subprocess.Popen[str]], folder: Path, step: int) -> None:
    """Kill all ranks once a checkpoint of this step, or a later one, is there."""
    wait_for_step(folder, step, started)
    for process in started:
        process.kill()
        process.communicate(timeout=120)


def different(one: Path, other: Path, rank: int) -> set[str]:
    """Return the leaves that differ in the newest checkpoints of two groups, those of one rank's own among them."""
    compared = stores.compare(one, other, rank=rank, other_rank=rank)
    assert compared.one.step == compared.other.step
    assert compared.leaves >= 3
    paths = {each.path for each in compared.differences}
    return {path for path in paths if ".".join(path.split(".")[:2]) not in FREE}


@pytest.fixture(autouse=True, scope="module")
def _imported_once(dynamo: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.script, in a module of torch
        for module in ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.distributed.optim"):
            importlib.import_module(module)


@pytest.fixture
def scripts(tmp_path: Path) -> Any:
    def make(name: str) -> tuple[Path, Path]:
        folders = tmp_path / "once", tmp_path / "killed"
        for folder in folders:
            folder.mkdir()
        one, other = (write_program(PAGE, name, folder) for folder in folders)
        return one, other

    return make


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_fsdp_whose_ranks_are_killed(scripts: Any, kills: int) -> None:
    once, killed = scripts("fsdp.py")
    finish(once)
    run, choice = killed.parent / "run", random.Random(0)
    for _ in range(kills):
        kill(ranks(killed), run, max(steps(run), default=0) + choice.randint(1, 30))
    finish(killed)
    assert steps(run) == [99]
    for rank in range(WORLD):
        assert different(once.parent / "run", run, rank) == set()


def test_the_shares_of_a_zero_redundancy_optimizer(scripts: Any) -> None:
    once, killed = scripts("zero.py")
    quiet = {"PYTHONWARNINGS": "ignore::DeprecationWarning"}  # of torch.jit.script, in a module of torch
    finish(once, **quiet)
    kill(ranks(killed, **quiet), killed.parent / "run", 29)
    finish(killed, **quiet)
    assert steps(killed.parent / "run") == [99]
    for rank in range(WORLD):
        assert different(once.parent / "run", killed.parent / "run", rank) == set()


class Cluster:
    """A stand-in for SLURM: its commands are scripts on a PATH, and jobs are run by bash."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bin = folder / "bin"
        self._bin.mkdir()
        self._command("srun", 'exec "$@"')
        self._command("scontrol", 'echo "$@" >> requeued')
        self._command("torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')
        script = program(PAGE, "train.sbatch").replace("--nproc-per-node 8", f"--nproc-per-node {WORLD}")
        (folder / "train.sbatch").write_text(script)

    def _command(self, name: str, line: str) -> None:
        path = self._bin / name
        path.write_text(f"#!/bin/bash\n{line}\n")
        path.chmod(0o755)

    @property
    def requeued(self) -> str:
        path = self._folder / "requeued"
        return path.read_text() if path.exists() else ""

    def start(self) -> subprocess.Popen[str]:
        """Start the job."""
        path = os.pathsep.join([str(self._bin), os.environ["PATH"]])
        return subprocess.Popen(
            ["bash", "train.sbatch"],
            cwd=self._folder,
            env=ENVIRONMENT | {"PATH": path, "SLURM_JOB_ID": "42"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.campaign  # a minute, half of which torchrun waits for ranks that wait for a dead one
def test_a_batch_script_requeues_when_the_time_is_up_and_not_after_a_failure(scripts: Any) -> None:
    once, batch = scripts("fsdp.py")
    finish(once)
    cluster = Cluster(batch.parent)
    with cluster.start() as job:  # a rank is killed
        wait_for_step(batch.parent / "run", 10, [job])
        [agent] = children(job.pid)
        os.kill(children(agent)[1], signal.SIGKILL)
        job.communicate(timeout=120)
    assert (job.returncode, cluster.requeued) == (1, "")
    reached = steps(batch.parent / "run")[0]
    with cluster.start() as job:  # the time is up
        wait_for_step(batch.parent / "run", reached + 10, [job])
        job.send_signal(signal.SIGUSR1)
        said, _ = job.communicate(timeout=120)
    assert (job.returncode, cluster.requeued) == (1, "requeue 42\n")
    assert "got SIGTERM: saving once more" in said
    saved = re.findall(r"SIGTERM: saved step (\d+) in", said)
    assert len(saved) == WORLD
    assert [*map(int, set(saved))] == steps(batch.parent / "run")
    with cluster.start() as job:  # it goes on to its end
        said, _ = job.communicate(timeout=120)
    assert (job.returncode, cluster.requeued) == (0, "requeue 42\n"), said
    assert steps(batch.parent / "run") == [99]
    for rank in range(WORLD):
        assert different(once.parent / "run", batch.parent / "run", rank) == set()


def sides(diff: str) -> dict[str, str]:
    """Return the programs before and after a change."""
    lines = diff.splitlines(keepends=True)
    return {
        name: "".join(line[1:] for line in lines if not line.startswith(other))
        for name, other in (("before.py", "+"), ("after.py", "-"))
    }


def test_a_run_of_dcp_goes_on(tmp_path: Path) -> None:
    for folder in ("once", "changed"):
        (tmp_path / folder).mkdir()
        for name, text in sides(program(PAGE, "dcp.py")).items():
            (tmp_path / folder / name).write_text(text)
    finish(tmp_path / "once" / "before.py", STEPS="40")
    changed = tmp_path / "changed"
    finish(changed / "before.py", STEPS="20")
    (changed / "dcp" / "25").mkdir()  # as a kill leaves one: no metadata
    finish(changed / "after.py", STEPS="27")
    assert steps(changed / "run") == [26]
    finish(changed / "after.py", STEPS="40")
    assert steps(changed / "run") == [39]
    stores.import_(tmp_path / "once" / "dcp" / "39", tmp_path / "imported")
    stores_of = tmp_path / "imported", changed / "run"
    one, other = (dict(load_sync(store, keys=["model.*"])["model"]) for store in stores_of)
    assert len(one) == 4
    assert not difference(one, other)


def test_both_sides_are_short() -> None:
    for text in sides(program(PAGE, "dcp.py")).values():
        assert len(text.splitlines()) < 60
