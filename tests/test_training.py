"""What brackets around training steps make of a policy."""

from __future__ import annotations

import logging
import time
from collections import deque
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from pccheck_async import SyncCheckpointEngine, UnsupportedStateError, list_checkpoints
from pccheck_async.policy import Decision, EverySteps, PCcheckInterval, SaveReport, StepReport
from pccheck_async.testing import CrashDisk, CrashWriter, StuckWriter
from tests.test_at_once import FOLDER, small
from tests.training_simulator import Machine, Simulator

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Model:
    """A model whose optimizer steps at the end of windows of so many brackets."""

    def __init__(self, window: int) -> None:
        self.window = window
        module = nn.Linear(4, 4)
        module(torch.ones(1, 4)).sum().backward()
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        self.state = {"model": module, "optimizer": self.optimizer}

    def train(self, engine: SyncCheckpointEngine, steps: int, seconds: float = 0.0) -> list[int]:
        """Return the steps that were saved; each is durable before the next one."""
        saved = []
        for step in range(steps):
            with engine.step(self.state, step) as this:
                time.sleep(seconds)
                if (step + 1) % self.window == 0:
                    self.optimizer.step()
            if this.pending is not None:
                saved.append(this.pending.result().step)
        return saved


class Told(EverySteps):
    """Notes what it is told."""

    def __init__(self, interval: int) -> None:
        super().__init__(interval)
        self.skips: list[int] = []

    def skipped(self, report: StepReport) -> None:
        super().skipped(report)
        self.skips.append(report.step)


def test_a_policy_hears_that_a_checkpoint_waits_for_the_end_of_a_window(tmp_path: Path) -> None:
    policy, model = Told(5), Model(window=4)
    with SyncCheckpointEngine(tmp_path, interval=policy) as engine:
        engine.attach(model.optimizer)
        assert model.train(engine, 20) == [7, 11, 15, 19]
    assert policy.skips == [4, 5, 6, 9, 10, 14]


class Deaf:
    """A policy that makes up for nothing."""

    def due(self, report: StepReport) -> bool:
        return report.step == 1

    def skipped(self, report: StepReport) -> None: ...

    def saved(self, report: SaveReport) -> None: ...

    def decision(self) -> Decision:
        return Decision(None, None, "once")


def test_what_was_due_in_a_window_is_saved_at_its_end_whatever_the_policy_makes_of_that(tmp_path: Path) -> None:
    model = Model(window=4)
    with SyncCheckpointEngine(tmp_path, interval=Deaf()) as engine:
        engine.attach(model.optimizer)
        assert model.train(engine, 20) == [3]


def test_windows_do_not_make_the_checkpoints_of_bursts_ever_rarer(tmp_path: Path) -> None:
    model = Model(window=16)
    with SyncCheckpointEngine(tmp_path, interval=PCcheckInterval()) as engine:
        engine.attach(model.optimizer)
        saved = model.train(engine, 640, seconds=0.002)  # long beside a save, even on a busy machine
        assert engine.statistics().interval.interval is not None
    assert max(later - earlier for earlier, later in pairwise(saved)) <= 64


@pytest.mark.parametrize("window", [8, 32])
def test_in_windows_an_interval_is_measured_as_it_is_without(window: int) -> None:
    def settled(window: int) -> int:
        sim = Simulator(PCcheckInterval(), Machine(save_seconds=200.0, noise=0.02), window=window)
        sim.run(4000)
        interval = sim.policy.decision().interval
        assert interval is not None
        return interval

    assert settled(window) == pytest.approx(settled(1), rel=0.2)


def test_a_line_says_once_that_no_attached_optimizer_makes_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = Model(window=1000), Model(window=1)
    with SyncCheckpointEngine(tmp_path, interval=10) as engine, caplog.at_level(logging.WARNING, "pccheck_async"):
        engine.attach(model.optimizer)
        model.optimizer, other.optimizer = other.optimizer, model.optimizer  # the one that trains is not attached
        for step in range(700):
            with engine.step(model.state, step):
                model.optimizer.step()
    (line,) = [record for record in caplog.records if record.event == "no_step"]  # type: ignore[attr-defined]
    assert (line.levelname, line.step, line.store) == ("WARNING", 9 + 255, str(tmp_path))  # type: ignore[attr-defined]
    assert "attach the one that trains" in line.getMessage()


@pytest.mark.parametrize(("every", "kept"), [(10, [39, 29, 19, 9]), (12, [39, 24, 14])])
def test_what_is_kept_is_on_the_grid_of_what_is_saved(tmp_path: Path, every: int, kept: list[int]) -> None:
    with SyncCheckpointEngine(tmp_path, interval=5, keep_every=every) as engine:
        for step in range(40):
            with engine.step({"step": step}, step) as this:
                pass
            if this.pending is not None:
                this.pending.result()
    assert [info.step for info in list_checkpoints(tmp_path)] == kept


class Measuring(EverySteps):
    """Measures another time at every step, and goes from 3 steps to 4 on the way."""

    _now, _steps = 0.0, 3

    def due(self, report: StepReport) -> bool:
        self._now = report.now
        self._steps = 3 if report.step < 10 else 4
        return super().due(report)

    def decision(self) -> Decision:
        return Decision(self._steps, self._now, f"every {self._steps} steps")


def test_an_interval_is_said_when_it_is_decided_on_and_not_at_every_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        SyncCheckpointEngine(tmp_path, interval=Measuring(100)) as engine,
        caplog.at_level(logging.INFO, "pccheck_async"),
    ):
        for step in range(30):
            with engine.step({"step": step}, step):
                pass
    lines = [record for record in caplog.records if record.event == "interval"]  # type: ignore[attr-defined]
    assert [line.interval for line in lines] == [3, 4]  # type: ignore[attr-defined]
    assert {line.store for line in lines} == {str(tmp_path)}  # type: ignore[attr-defined]


class Broken(EverySteps):
    def decision(self) -> Decision:
        raise LookupError("no decision")


def test_a_policy_that_raises_leaves_no_store_locked(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="no decision"):
        SyncCheckpointEngine(tmp_path, interval=Broken(1)).open()
    with SyncCheckpointEngine(tmp_path, lock_timeout=0) as engine:
        assert engine.checkpoints() == []


def test_a_state_that_cannot_be_saved_is_told_after_the_first_step(tmp_path: Path) -> None:
    """And not when the first save is due. Later ones may change as they like."""
    state = {"model": nn.Linear(2, 2), "seen": {"last": deque[int](maxlen=3)}}
    with SyncCheckpointEngine(tmp_path, interval=100) as engine:
        told = pytest.raises(UnsupportedStateError, match=r"seen\.last: a collections\.deque cannot be saved")
        with told, engine.step(state, 0):
            pass
        for step in range(1, 3):
            with engine.step(state, step):
                pass
        assert engine.statistics().admitted == 0


def test_a_checkpoint_that_was_skipped_is_made_up_for(tmp_path: Path) -> None:
    writer = StuckWriter(CrashWriter(CrashDisk()), kinds=())
    with SyncCheckpointEngine(FOLDER, io=writer, max_in_flight=1, on_busy="skip", interval=2) as engine:
        engine.checkpoint(small(), step=0).result(30)
        writer.hold("flush")
        saved = []
        for step in range(1, 7):
            with engine.step(small(), step) as this:
                if step >= 4:
                    writer.release()
                    engine.drain()
            if this.pending is not None and not this.pending.skipped:
                saved.append(step)
        assert saved == [1, 4, 5]
