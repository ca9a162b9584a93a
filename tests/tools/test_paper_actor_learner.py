from __future__ import annotations

import asyncio
import re
import signal
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.paper import actor_learner as learner
from examples.paper import cart_pole as pole
from pccheck_async import list_checkpoints, load_sync
from pccheck_async.cli.demo_losses import read_losses
from tests.support.state_strategies import difference
from tests.support.warm import run_warm, start_warm

UPDATES, INTERVAL = 24, 4
COMMAND = ["-m", "examples.paper.actor_learner", "--width=32", "--actors=4", "--length=64"]
COMMAND += [f"--updates={UPDATES}", f"--interval={INTERVAL}"]


def run(folder: Path, *more: str, status: int = 0) -> str:
    command = [*COMMAND, f"--store={folder / 'store'}", f"--loss-file={folder / 'losses.csv'}", *more]
    done = run_warm(*command, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    output: str = done.stdout
    return output


def same(one: Path, other: Path) -> bool:
    """Whether both runs computed the same losses and ended in the same state, bit for bit."""
    losses = (one / "losses.csv").read_bytes() == (other / "losses.csv").read_bytes()
    return losses and not difference(load_sync(one / "store"), load_sync(other / "store"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run, for several tests to compare with."""
    folder = tmp_path_factory.mktemp("learner")
    (folder / "said").write_text(run(folder, "--latency=0"))
    return folder


@pytest.mark.campaign
def test_the_policy_learns(uninterrupted: Path) -> None:
    means = [float(mean) for mean in re.findall(r"mean return ([\d.]+)", (uninterrupted / "said").read_text())]
    assert len(means) == UPDATES // INTERVAL
    assert means[-1] > 2 * means[0]  # an untrained policy drops the pole after some 20 steps


@pytest.mark.campaign
def test_killed_and_resumed_is_uninterrupted(tmp_path: Path, uninterrupted: Path) -> None:
    run(tmp_path, "--latency=0", "--crash-at=1", status=-signal.SIGKILL)  # maybe before anything was durable
    said = run(tmp_path, "--latency=0.001", "--resume", "--crash-at=14", status=-signal.SIGKILL)
    assert said.splitlines()[0] in ("starting from scratch", "resumed from update 1")
    (durable,) = list_checkpoints(tmp_path / "store")
    assert durable.step in (4, 8, 12, 14)  # of so small a state even the last may be durable already
    said = run(tmp_path, "--latency=0", "--resume")
    assert said.startswith(f"resumed from update {durable.step}\n")
    assert same(tmp_path, uninterrupted)


@pytest.mark.campaign
def test_interrupted_and_resumed_is_uninterrupted(tmp_path: Path, uninterrupted: Path) -> None:
    command = [*COMMAND, f"--store={tmp_path / 'store'}", f"--loss-file={tmp_path / 'losses.csv'}", "--latency=0.01"]
    with start_warm(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        said = process.stdout.readline()
        while "saving" not in said:
            said = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == learner.INTERRUPTED, rest
    assert "continue with --resume" in rest.splitlines()[-1]
    assert "Traceback" not in rest
    (durable,) = list_checkpoints(tmp_path / "store")
    assert max(read_losses(tmp_path / "losses.csv")) == durable.step < UPDATES  # nothing computed is lost
    assert run(tmp_path, "--latency=0", "--resume").startswith(f"resumed from update {durable.step}\n")
    assert same(tmp_path, uninterrupted)


def test_the_equations_of_motion() -> None:
    """One step from a place at rest, computed by hand."""
    cart = pole.CartPole(seed=1)
    cart.place = [0.0, 0.0, 0.0, 0.0]
    assert cart.push(True) == (False, False)
    falling = -(10 / 1.1) / (0.5 * (4 / 3 - 0.1 / 1.1))
    rolling = 10 / 1.1 - 0.05 * falling / 1.1
    assert cart.place == pytest.approx([0, 0.02 * rolling, 0, 0.02 * falling])


def test_actors_wait_for_the_generation_that_is_theirs() -> None:
    torch.manual_seed(0)
    policy = learner.Policy(8)
    args = Namespace(length=1, latency=0.0)

    async def wait() -> tuple[int, int, int]:
        generations = learner.Generations(policy)
        queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=9)
        acting = asyncio.ensure_future(learner.act(pole.CartPole(1), generations, queue, 1, args))
        for _ in range(50):
            await asyncio.sleep(0)
        before = queue.qsize()  # fragments 1 and 2, with generation 0
        await generations.publish(1, policy)
        for _ in range(50):
            await asyncio.sleep(0)
        acting.cancel()
        return before, queue.qsize(), len(generations.policies)

    assert asyncio.run(wait()) == (2, 3, 2)


def test_advantages() -> None:
    """Two steps into an episode's end, and one into a next one, computed by hand."""
    nan, gamma, trace = float("nan"), learner.DISCOUNT, learner.TRACE
    fragment = learner.Fragment(pushes=[0, 1, 0], values=[0.3, 0.2, 0.1, 0.4], ends=[nan, 0.0, nan])
    fell = learner.REWARD - 0.2
    expected = [learner.REWARD + gamma * 0.2 - 0.3 + gamma * trace * fell, fell, learner.REWARD + gamma * 0.4 - 0.1]
    assert learner.advantages(fragment).tolist() == pytest.approx(expected)
