"""Lightning's own checkpoints under FSDP2: each rank saves its shards, and the run goes on with the same bits."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support import ranks
from tests.support.lazily import Lazily, need_framework
from tests.support.ranks import meeting_place, run_ranks

need_framework("lightning")
kit, adapter = Lazily("tests.support.lightning_sharded"), Lazily("pccheck_async.integrations.lightning")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders"),
]


def test_it_goes_on_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "PATIENCE", 90.0)  # two trainers in each of two ranks, on busy cores
    _, final = run_ranks(2, partial(kit.saved_and_resumed, tmp_path, meeting_place()))[0]
    for world in (1, 2):
        model = run_ranks(world, partial(kit.evaluated, tmp_path, meeting_place()))[0]
        assert all(map(torch.equal, model, final))
    loaded = adapter.PCcheckIO().load_checkpoint(tmp_path / "last.ckpt")
    assert loaded["global_step"] == 12
    assert loaded.keys() >= {"loops", "callbacks", "lr_schedulers", "optimizer_states"}
    assert all(map(torch.equal, loaded["state_dict"].values(), final))
