"""Two runs on one URL at the same time: the last one to open owns it, the other says so, and nothing is lost."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import CheckpointError, Drain, SyncCheckpointEngine, list_checkpoints
from pccheck_async.testing.probe import probe
from tests.support.children import in_child
from tests.support.lying_objects import LyingObjects, record_of, use_in_drains

STEPS = 4
pytestmark = pytest.mark.filterwarnings("ignore:the checkpoint of step")


def state_of(run: int, step: int) -> dict[str, Any]:
    return {"tensor": torch.arange(500) + 1000 * step + run, "run": run, "step": step}


class _Rival(threading.Thread):
    """A run of its own folder: opens, restores what the other one may have copied, saves, and closes."""

    def __init__(self, run: int, folder: Path, pauses: list[float]) -> None:
        super().__init__(daemon=True)
        self.run_number, self.folder, self.pauses = run, folder, pauses
        self.saved: list[int] = []
        self.reported: list[int] = []
        self.trouble, self.id = "", b""
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            time.sleep(self.pauses[0])
            with SyncCheckpointEngine(
                self.folder, keep_last=STEPS, drain=Drain("s3://lying/run", keep_last=2), save_last=False
            ) as engine:
                drain = probe(engine).core.assembly.drain
                assert drain is not None
                self.id = drain.run
                restored = engine.restore(state_of(9, 0))
                before = 0 if restored is None else restored.step
                for step in range(before + 1, before + STEPS + 1):
                    pending = engine.checkpoint(state_of(self.run_number, step), step=step)
                    pending.result(30)
                    self.saved.append(step)
                    time.sleep(self.pauses[step - before])
                    try:
                        pending.wait_reached("remote", 30)
                        self.reported.append(step)
                    except CheckpointError as error:
                        if "another run" not in str(error):
                            raise
                self.trouble = engine.statistics().drain_trouble
        except BaseException as error:  # noqa: BLE001 - raised by the test
            self.error = error


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 104), marks=pytest.mark.campaign)], ids=["4 rounds", "100 rounds"]
)
def test_one_wins_and_the_other_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    won = [0, 0]
    for seed in seeds:
        draw, objects = random.Random(seed), LyingObjects()
        use_in_drains(objects, monkeypatch)
        rivals = [
            _Rival(run, tmp_path / f"{seed}-{run}", [draw.random() * 0.05 for _ in range(STEPS + 1)]) for run in (0, 1)
        ]
        for each in rivals:
            each.start()
        for each in rivals:
            each.join(60)
            assert not each.is_alive()
        refused = [each for each in rivals if each.error is not None]
        for each in refused:  # both took it over at the same moment, or it found the other one's branch
            assert "at the same time" in str(each.error) or "different runs" in str(each.error), each.error
        owner = _newest_owner(objects)
        (winner,) = [each for each in rivals if each.id == owner]
        (loser,) = [each for each in rivals if each is not winner]
        won[winner.run_number] += 1
        assert not winner.trouble
        assert len(winner.saved) == STEPS
        assert winner.reported == winner.saved
        assert loser in refused or "another run" in loser.trouble or loser.reported == loser.saved
        found = in_child(lambda: _restored(tmp_path / f"{seed}-new"))  # noqa: B023 - called at once
        assert found == [winner.run_number, winner.saved[-1]], seed
        for each in rivals:  # training and the disk went on
            if each not in refused:
                assert [info.step for info in list_checkpoints(each.folder)] == each.saved[::-1]
    assert all(won)


def _newest_owner(objects: LyingObjects) -> bytes:
    key = max(key for key in objects.stored if key.startswith("commits/"))
    record = record_of(objects.stored[key], int(key.removeprefix("commits/")))
    assert record is not None
    return record.owner


def _restored(folder: Path) -> list[int]:
    with SyncCheckpointEngine(folder, drain=Drain("s3://lying/run"), save_last=False) as engine:
        found = engine.restore(state := state_of(9, 0))
        assert found is not None
        assert torch.equal(state["tensor"], state_of(state["run"], state["step"])["tensor"])
        return [state["run"], state["step"]]
