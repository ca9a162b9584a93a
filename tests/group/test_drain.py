"""A group's checkpoints in a bucket: every rank uploads its part, rank 0 commits, all ranks restore from there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")

import torch

from pccheck_async import Drain, Group, SyncCheckpointEngine
from pccheck_async.bucket import Objects
from pccheck_async.bucket.objects import Patient
from pccheck_async.engine import drain as draining
from pccheck_async.engine import drain_owner
from tests.support.lying_objects import LyingObjects
from tests.support.thread_ranks import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("machine_asked_once")]
URL = "s3://lying/run"


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> LyingObjects:
    """The bucket of all drains."""
    objects = LyingObjects()

    def made(*_: object, **settings: Any) -> Objects:
        return Patient(objects, settings["deadline"], pause=0.001)

    monkeypatch.setattr(draining, "open_objects", made)
    monkeypatch.setattr(drain_owner, "_FIRST_PAUSE", 0.01)
    return objects


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {"tensor": torch.arange(5000) + 1000 * step + rank, "step": step, "rank": rank}


def engine_on(path: Path, group: Group, **settings: Any) -> SyncCheckpointEngine:
    return SyncCheckpointEngine(path, group=group, save_last=False, drain=Drain(URL, **settings))


def save(engine: SyncCheckpointEngine, group: Group, step: int) -> None:
    engine.checkpoint(state_of(group.rank, step), step=step).wait_reached("remote", 20)


def test_folders_that_are_gone_are_restored_from_the_bucket(tmp_path: Path, lying: LyingObjects) -> None:
    def first(group: Group) -> None:
        with engine_on(tmp_path / "run", group) as engine:
            assert engine.restore(state_of(group.rank, 0)) is None
            for step in (1, 2):
                save(engine, group, step)
                assert engine.checkpoints()[0].tiers == ("disk", "remote")
            assert engine.statistics().drained == 2

    on_ranks(2, first)
    shutil.rmtree(tmp_path / "run")

    def second(group: Group) -> None:
        with engine_on(tmp_path / "run", group) as engine:
            restored = engine.restore(state := state_of(group.rank, 0))
            assert restored is not None
            assert (restored.step, restored.source) == (2, "remote")
            assert state["rank"] == group.rank
            assert torch.equal(state["tensor"], state_of(group.rank, 2)["tensor"])
            save(engine, group, 3)

    on_ranks(2, second)
