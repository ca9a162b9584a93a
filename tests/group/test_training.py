"""Training steps of a group: one schedule, one last step."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import Adaptive, Group, SyncCheckpointEngine
from pccheck_async.engine import Decision, SaveReport, StepReport
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")]


def train(folder: Path, group: Group, interval: Any, steps: int, **settings: Any) -> list[int]:
    """Train, a step of rank r takes r milliseconds more; return the steps that were saved."""
    saved = []
    state: dict[str, Any] = {"w": torch.zeros(100), "rank": group.rank}
    with SyncCheckpointEngine(folder, group=group, interval=interval, keep_last=8, **settings) as engine:
        restored = engine.restore(state)
        first = 0 if restored is None else restored.step + 1
        for step in range(first, first + steps):
            with engine.step(state, step) as this:
                state["w"] += 1
                time.sleep(0.002 + 0.001 * group.rank)
            if this.pending is not None:
                saved.append(step)
                this.pending.result()
    return saved


@pytest.mark.parametrize("interval", [1, 4])
def test_an_interval_of_steps_is_kept_to_the_step(tmp_path: Path, interval: int) -> None:
    first = run_ranks(2, lambda group: train(tmp_path, group, interval, 10, save_last=False))
    assert first == [[step for step in range(10) if (step + 1) % interval == 0]] * 2
    newest = first[0][-1]
    again = run_ranks(2, lambda group: train(tmp_path, group, interval, 10, save_last=False))
    assert again == [[step for step in range(newest + 1, newest + 11) if (step + 1) % interval == 0]] * 2


class Odd:
    """A policy of a user's own, which differs from rank to rank."""

    def __init__(self, rank: int) -> None:
        self._every = 3 + rank

    def due(self, report: StepReport) -> bool:
        return report.step % self._every == 0

    def skipped(self, report: StepReport) -> None: ...

    def saved(self, report: SaveReport) -> None: ...

    def decision(self) -> Decision:
        return Decision(self._every, None, "odd")


@pytest.mark.parametrize("kind", ["seconds", "adaptive", "own"])
def test_what_rank_0s_policy_decides_is_done_by_all(tmp_path: Path, kind: str) -> None:
    def interval(group: Group) -> Any:
        return {"seconds": timedelta(milliseconds=40), "adaptive": Adaptive(overhead=0.5), "own": Odd(group.rank)}[kind]

    saved = run_ranks(3, lambda group: train(tmp_path, group, interval(group), 120))
    assert saved[0] == saved[1] == saved[2]
    assert len(saved[0]) > 1


@pytest.mark.parametrize("victim", [0, 1])
def test_a_preemption_of_one_rank_stops_all_after_one_step(tmp_path: Path, victim: int) -> None:
    def rank_main(group: Group) -> None:
        state: dict[str, Any] = {"w": torch.zeros(100), "rank": group.rank}
        with SyncCheckpointEngine(tmp_path, group=group, interval=1000, save_last=False) as engine:
            engine.on_preemption(deadline=20)
            (tmp_path / f"ready-{group.rank}").touch()
            for step in range(100_000):
                with engine.step(state, step):
                    state["w"] += 1
                    time.sleep(0.003 * (1 + group.rank))

    def preempt(pids: list[int]) -> None:
        deadline = time.monotonic() + 30
        while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(pids[victim], signal.SIGTERM)

    statuses: list[int] = []
    run_ranks(2, rank_main, meanwhile=preempt, statuses=statuses)
    assert statuses == [128 + signal.SIGTERM] * 2

    def look(group: Group) -> tuple[int, float, int]:
        state: dict[str, Any] = {"w": torch.zeros(100), "rank": -1}
        with SyncCheckpointEngine(tmp_path, group=group, save_last=False) as engine:
            restored = engine.restore(state)
            assert restored is not None
            return restored.step, float(state["w"][0]), int(state["rank"])

    (step, value, rank), other = run_ranks(2, look)
    assert (step + 1, rank) == (value, 0)
    assert other == (step, value, 1)
