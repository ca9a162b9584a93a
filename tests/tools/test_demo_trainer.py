from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import list_checkpoints, load_sync
from pccheck_async.cli import demo_trainer as gpt
from pccheck_async.cli.demo_losses import read_losses
from tests.support.state_strategies import difference
from tests.support.warm import run_warm

TINY = ("--layers=1", "--width=32", "--heads=2", "--context=32", "--batch=4", "--threads=1", "--device=cpu")
STEPS, INTERVAL, CRASH_AT = 24, 4, 14


def train(
    store: Path, losses: Path, *more: str, killed: bool = False, seed: int = 1337
) -> subprocess.CompletedProcess[str]:
    command = ["-m", "pccheck_async.cli.demo_trainer", *TINY, f"--store={store}"]
    command += [f"--loss-file={losses}", f"--steps={STEPS}", f"--interval={INTERVAL}", f"--seed={seed}", *more]
    done = run_warm(*command, text=True)
    assert done.returncode == (-signal.SIGKILL if killed else 0), done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted run, for several tests to compare with."""
    folder = tmp_path_factory.mktemp("gpt")
    train(folder / "store", folder / "losses.csv")
    return folder


@pytest.mark.slow
def test_killed_and_resumed_is_uninterrupted(folder: Path, tmp_path: Path) -> None:
    store, losses = tmp_path / "store", tmp_path / "losses.csv"
    uninterrupted = read_losses(folder / "losses.csv")
    train(store, losses, f"--crash-at={CRASH_AT}", killed=True)
    assert read_losses(losses) == {step: uninterrupted[step] for step in range(1, CRASH_AT + 1)}
    # Of the saves of steps 4, 8, 12 and 14 at most two were in flight, so one is durable. So small a state is written
    # fast: it may even be the last. Whichever it is, that is where the next run goes on.
    (durable,) = list_checkpoints(store)
    assert durable.step in (4, 8, 12, CRASH_AT)
    assert durable.metadata["loss"] == pytest.approx(uninterrupted[durable.step].loss, abs=1e-6)

    done = train(store, losses, "--resume")
    assert done.stdout.startswith(f"resumed from step {durable.step}\n")
    assert losses.read_bytes() == (folder / "losses.csv").read_bytes()
    assert not difference(load_sync(store), load_sync(folder / "store"))


@pytest.mark.slow
def test_will_not_overwrite_a_run(folder: Path) -> None:
    before = (folder / "losses.csv").read_bytes()
    command = ["-m", "pccheck_async.cli.demo_trainer", *TINY, f"--store={folder / 'store'}"]
    done = run_warm(*command, text=True)
    assert done.returncode == 2
    assert "--resume" in done.stderr
    assert (folder / "losses.csv").read_bytes() == before


def drawn(data: Any, batches: int) -> list[tuple[bytes, bytes]]:
    pairs = (data.next_batch() for _ in range(batches))
    return [(x.numpy().tobytes(), y.numpy().tobytes()) for x, y in pairs]


TEXT = bytes(range(256)) * 5


@pytest.mark.parametrize("batches", [0, 1, 7, 39, 40, 41, 100])
def test_windows_resume_without_replay(batches: int) -> None:
    data = gpt.Windows(TEXT, context=16, batch=2, seed=3)
    drawn(data, batches)
    resumed = gpt.Windows(TEXT, context=16, batch=2, seed=3)
    resumed.load_state_dict(data.state_dict())
    assert drawn(resumed, 60) == drawn(data, 60)


def test_windows_cover_an_epoch_once_and_shuffle_the_next() -> None:
    text = bytes(range(251))  # every window of 10 begins with another byte
    data = gpt.Windows(text, context=10, batch=5, seed=3)
    epochs = [[int(first) for _ in range(5) for first in data.next_batch()[0][:, 0]] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 250, 10))
    assert epochs[0] != epochs[1]


def test_targets_are_the_next_bytes() -> None:
    x, y = gpt.Windows(TEXT, context=16, batch=2, seed=3).next_batch()
    assert x.shape == y.shape == (2, 16)
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_windows_refuse_another_text() -> None:
    state = gpt.Windows(TEXT, context=16, batch=2, seed=3).state_dict()
    with pytest.raises(ValueError, match="other data"):
        gpt.Windows(TEXT + b"!", context=16, batch=2, seed=3).load_state_dict(state)


def test_learning_rate_warms_up_and_decays() -> None:
    factor = gpt.learning_rate(100)
    assert factor(0) == pytest.approx(0.1)
    assert max(factor(step) for step in range(100)) == pytest.approx(factor(10), rel=0.05)
    assert factor(100) == pytest.approx(0.1)


def test_loss_file_keeps_rows_up_to_the_restored_step(tmp_path: Path) -> None:
    path = tmp_path / "losses.csv"
    losses = gpt.LossFile(path, last_step=0)
    for step in (1, 2, 3):
        losses.add(step, 1 / step)
    with path.open("a") as file:
        file.write("4,0.2")  # a row cut off
    gpt.LossFile(path, last_step=2).add(3, 0.5)
    lines = path.read_text().splitlines()
    assert lines == ["step,loss,bits", "1,1.000000,3f800000", "2,0.500000,3f000000", "3,0.500000,3f000000"]
    gpt.LossFile(path, last_step=0)
    assert path.read_text() == "step,loss,bits\n"
