"""Lightning as it is installed: trainings that are killed and started again, wrong uses, and its own checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

pl = pytest.importorskip("lightning.pytorch")


from pccheck_async import list_checkpoints  # noqa: E402
from tests.support.killed_training import agree, live  # noqa: E402
from tests.support.lightning_run import train  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    # Lightning's own:
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step"),
]

MOMENTS = (
    "train 2", "train 5", "captured 1", "durable 0", "validation 2 1", "epoch ends 0", "epoch starts 1", "train 11",
    "validation 11 0", "admitted 4", "train 17",
)  # fmt: skip
"""Six batches an epoch, in windows of four and two; validations after the third and the sixth."""


@pytest.fixture(autouse=True)
def _quiet(nothing_left_behind: None) -> None: ...


def killed_at(moments: list[str], tmp_path: Path, kind: str, workers: int) -> None:
    whole = live(train(tmp_path / "whole", kind, workers), tmp_path / "journal")
    assert len(whole.keys) == 18 + 6 * 2 + 2
    for moment in moments:
        place = tmp_path / moment.replace(" ", "-")
        lives = [live(train(place, kind, workers), tmp_path / "journal", moment)]
        saved = list_checkpoints(place)
        lives.append(live(train(place, kind, workers), tmp_path / "journal"))
        agree(whole, lives)
        if saved:
            assert "train 0" not in lives[1].keys


@pytest.mark.parametrize(
    "moment", ["train 2", "train 11", "captured 1", "validation 11 0", "epoch ends 0", "epoch starts 1"]
)
def test_it_goes_on_with_the_same_bits(tmp_path: Path, moment: str) -> None:
    killed_at([moment], tmp_path, "resumable", 0)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["resumable", "plain"])
@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_wherever_it_was_killed(tmp_path: Path, kind: str, workers: int) -> None:
    killed_at([*MOMENTS], tmp_path, kind, workers)
