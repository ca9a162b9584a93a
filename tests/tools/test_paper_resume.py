from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.paper import methods
from examples.paper import resume_comparison as comparison
from examples.paper import validate_resume as validate
from pccheck_async.cli.demo_losses import Loss

STEPS, EVERY = 13, 4
TINY = {"layers": 1, "width": 32, "heads": 2, "context": 32, "batch": 4, "threads": 1, "device": "cpu", "seed": 4}
LENGTH = {"training_steps": STEPS, "checkpoint_freq": EVERY}
COMMAND = [sys.executable, "-m", "examples.paper.validate_resume"]
OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in {**TINY, **LENGTH}.items()]
SAFE = ("torch_save_fsync", "checkfreq", "pccheck")


@pytest.fixture(autouse=True)
def _settings_restored() -> Iterator[None]:
    """The runs that train in this process change what torch does, and draw random numbers."""
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), torch.get_rng_state()
    python, generator = random.getstate(), np.random.get_state()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.set_num_threads(before[1])
    torch.set_rng_state(before[2])
    random.setstate(python)
    np.random.set_state(generator)


class Runs:
    """Runs of the example: those that end well in this process, those that die in one of their own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def train(self, name: str, method: str, dtype: str = "fp32", resume: bool = False) -> list[str]:
        """Return what it said; the last line tells the final state."""
        args = {"method": method, "model_dtype": dtype, "load_checkpoint": resume, "dropout": 0.1, "lr": 1e-3}
        moments = {"crash_at": None, "crash_in_save": None}
        self.capsys.readouterr()
        validate.train(
            Namespace(**TINY, **LENGTH, **args, **moments, store=self.folder / name, loss_file=self.file(name))
        )
        return self.capsys.readouterr().out.splitlines()

    def die(self, name: str, method: str, *options: str) -> None:
        command = [*COMMAND, "run", *OPTIONS, f"--method={method}", f"--store={self.folder / name}"]
        command += [f"--loss-file={self.file(name)}", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.csv"

    def same_losses(self, one: str, other: str) -> bool:
        return self.file(one).read_bytes() == self.file(other).read_bytes()


@pytest.fixture
def runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Runs:
    return Runs(tmp_path, capsys)


@pytest.mark.campaign
@pytest.mark.parametrize("method", SAFE)
def test_killed_inside_saves_and_resumed(runs: Runs, method: str) -> None:
    expected = runs.train("whole", "torch_save")
    runs.die("killed", method, "--crash-in-save=4+0.001")
    runs.die("killed", method, "--load-checkpoint", "--crash-in-save=8")
    said = runs.train("killed", method, resume=True)
    assert said[-1] == expected[-1]
    assert runs.same_losses("killed", "whole")


def small_model() -> Any:
    torch.manual_seed(0)
    return validate.build_model(context=8, layers=1, width=16, heads=2, dropout=0.1)


def test_random_numbers_and_buffers_count() -> None:
    """Without the random numbers or the buffers of the interrupted run, the next loss would be another."""
    tokens = torch.arange(16).reshape(2, 8)

    def output(seed: int = 1, buffer: str = "") -> torch.Tensor:
        model = small_model()
        if buffer:
            [vector] = [tensor for name, tensor in model.named_buffers() if name.endswith(buffer)]
            vector.copy_(vector.roll(1))
        torch.manual_seed(seed)
        result: torch.Tensor = model(tokens)
        return result

    assert torch.equal(output(), output())
    assert not torch.equal(output(), output(seed=2))
    assert not torch.equal(output(), output(buffer="_v"))
    model = small_model()
    model(tokens)
    assert model.norm.num_batches_tracked == 1
    assert not torch.equal(model.norm.running_var, small_model().norm.running_var)


def test_the_digest_is_of_every_bit() -> None:
    state = {"a": torch.zeros(3), "b": [1.0, None, {"c": np.arange(2)}], 3: "x"}
    other = [
        {**state, "a": torch.tensor([0.0, 0.0, -0.0])},
        {**state, "a": torch.zeros(3, dtype=torch.int32)},
        {**state, "a": torch.zeros(1, 3)},
        {**state, "b": [1.0, None, {"c": np.arange(2) * 2}]},
        {**state, "b": [1, None, {"c": np.arange(2)}]},
        {**state, 3: "y"},
        {**state, "d": 0},
    ]
    assert validate.digest(state) == validate.digest(dict(reversed(state.items())))
    assert len({validate.digest(each) for each in [state, *other]}) == 1 + len(other)
    assert validate.digest([[1], 2]) != validate.digest([[1, 2]])


class Trained:
    """A small model and its optimizer after a step, and what else a method asks for."""

    def __init__(self) -> None:
        self.model = small_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.parts = {"model": self.model, "optimizer": self.optimizer}
        self.learn()

    def learn(self) -> None:
        self.forward()
        self.optimizer.step()

    def forward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.arange(16).reshape(2, 8)).square().mean().backward()

    def digest(self) -> str:
        result: str = validate.digest({name: part.state_dict() for name, part in self.parts.items()})
        return result


def test_checkfreq_copies_before_the_update_and_what_forward_changes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_copy, copy = threading.Event(), methods.copied
    monkeypatch.setattr(methods, "copied", lambda state: (may_copy.wait(30), copy(state))[1])
    trained = Trained()
    with methods.CheckFreq(tmp_path, trained.parts, every=1) as method:
        expected = trained.digest()
        method.save(1)
        trained.forward()  # changes the buffers
        assert trained.digest() != expected
        update = threading.Thread(target=trained.optimizer.step)
        update.start()
        update.join(0.1)
        assert update.is_alive()  # the update waits for the copy
        may_copy.set()
        update.join()
    assert trained.digest() != expected
    assert methods.CheckFreq(tmp_path, trained.parts, every=1).load() == 1
    assert trained.digest() == expected


def test_checkfreq_raises_what_went_wrong_in_the_background(tmp_path: Path) -> None:
    trained = Trained()
    method = methods.CheckFreq(tmp_path / "store", trained.parts, every=1)
    (tmp_path / "store").rmdir()
    method.save(1)
    trained.learn()  # is not held up
    with pytest.raises(FileNotFoundError):
        method.save(2)
    method.wait()


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_flush_leaves_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    trained = Trained()
    method = methods.TorchSaveFsync(tmp_path, trained.parts, every=1)
    method.save(1)
    calls, flush = [], os.fsync

    def fail(fd: int) -> None:
        calls.append(os.readlink(f"/proc/self/fd/{fd}"))
        if len(calls) == failing:
            raise OSError("flush failed")
        flush(fd)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="flush failed"):
        method.save(2)
    assert calls == [str(tmp_path / "checkpoint.tmp"), str(tmp_path)][:failing]  # the file, then its name
    assert method.load() == (1 if failing == 1 else 2)


def run_of(bits: dict[int, str], state: str = "s") -> Any:
    losses = {step: Loss(0.0, value) for step, value in bits.items()}
    return comparison.Run(losses, ["starting from scratch", f"done, final state {state}"])


def test_the_verdict_needs_every_bit() -> None:
    whole = {step: f"{step:08x}" for step in range(1, 4)}
    good = run_of(whole)

    def verdict(uninterrupted: Any = good, killed: Any = None, resumed: Any = good) -> bool:
        kill = comparison.Kill("", killed or run_of({1: whole[1]}), resumed)
        result: bool = comparison.Experiment("fp32", "pccheck", 3, good, uninterrupted, [kill]).equal
        return result

    assert verdict()
    assert not verdict(uninterrupted=run_of(whole | {2: "00000009"}))
    assert not verdict(uninterrupted=run_of(whole, state="t"))
    assert not verdict(resumed=run_of(whole | {3: "00000009"}))
    assert not verdict(resumed=run_of(whole, state="t"))
    assert not verdict(resumed=run_of({1: whole[1], 2: whole[2]}))
    assert not verdict(killed=run_of({1: "00000009"}))
    assert not verdict(killed=run_of({2: whole[2]}))


def conduct(folder: Path, *options: str, timeout: int) -> tuple[int, str]:
    command = [*COMMAND, "compare", str(folder / "runs"), f"--plot={folder / 'picture.png'}", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.campaign
def test_the_experiment_in_small(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    status, said = conduct(tmp_path, *OPTIONS, "--dtypes=fp32", "--kills=1", timeout=600)
    assert status == 0, said
    assert len(re.findall(f"{STEPS} of {STEPS} losses equal, final state equal", said)) == 2
    assert "every bit is equal" in said
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_the_experiment(tmp_path: Path) -> None:
    """151 steps, fp32 and bf16, ten kills each, every other one inside a save."""
    status, said = conduct(tmp_path, timeout=3600)
    print(said)
    assert status == 0
    assert len(re.findall("151 of 151 losses equal, final state equal", said)) == 2 * 11
    for dtype in ("fp32", "bf16"):
        assert len(re.findall(f"{dtype}: .*, inside the save of step", said)) >= 5
