"""``torch.distributed.checkpoint`` on stores of this package."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from pccheck_async import Group, list_checkpoints
from pccheck_async.integrations.dcp import StorageReader, StorageWriter
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:This process .* is multi-threaded", "ignore:torch.distributed is disabled", "ignore:FSDP2-wrapped"
    ),
]


def start(folder: Path, group: Group) -> None:
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=group.rank, world_size=group.world_size)


def save_and_load(folder: Path, group: Group) -> None:
    start(folder, group)
    root = folder / "run"
    mesh = init_device_mesh("cpu", (group.world_size,))
    full = torch.arange(35.0).reshape(7, 5)

    def state(value: float) -> dict[str, Any]:
        return {
            "rows": distribute_tensor(full * value, mesh, [Shard(0)]),
            "columns": distribute_tensor(full * value, mesh, [Shard(1)]),
            "copied": distribute_tensor(full * value, mesh, [Replicate()]),
            "plain": {"a": torch.full((3,), value), "b": [value, torch.tensor(value)]},
        }

    writer, reader = StorageWriter(root), StorageReader(root)
    for step in (10, 20):
        save(state(step), checkpoint_id=root / f"step-{step}", storage_writer=writer)
    found = state(0)
    load(found, storage_reader=reader)
    for name in ("rows", "columns", "copied"):
        assert isinstance(found[name], DTensor)
        assert torch.equal(found[name].full_tensor(), full * 20)
    assert found["plain"]["a"].tolist() == [20.0] * 3
    assert found["plain"]["b"] == [20, torch.tensor(20.0)]
    dist.barrier()
    writer.close()


def test_save_and_load(tmp_path: Path) -> None:
    run_ranks(2, partial(save_and_load, tmp_path))
    assert [info.step for info in list_checkpoints(tmp_path / "run")] == [20]
