"""Tensors that lie on several ranks: FSDP2, tensor parallelism, and both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pccheck_async import (
    CheckpointEngine,
    Group,
    StateMismatchError,
    SyncCheckpointEngine,
    UnsupportedStateError,
    describe_checkpoint,
    export_checkpoint,
    load_sync,
    open_checkpoint,
)
from pccheck_async.state.boxes import local_tensors
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded", "ignore:FSDP2-wrapped module")


class Tied(nn.Module):
    """A small model with sizes that no world divides, and an embedding that is also its output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 7)
        self.inner = nn.Linear(7, 10)
        self.outer = nn.Linear(10, 7)
        self.out = nn.Linear(7, 13, bias=False)
        self.out.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.outer(nn.functional.relu(self.inner(self.embedding(tokens))))
        logits: Tensor = self.out(hidden) * self.get_buffer("scale").mean()
        return logits


def mesh_of(folder: Path, group: Group, *shape: int) -> DeviceMesh:
    """Initialise gloo, and return a mesh of this shape, of all ranks."""
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=group.rank, world_size=group.world_size)
    return init_device_mesh("cpu", shape or (group.world_size,), mesh_dim_names=("data", "model")[: len(shape) or 1])


def fsdp(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(7)
    model = Tied()
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp_over_tp(mesh: DeviceMesh) -> nn.Module:
    """FSDP2 shards rows that tensor parallelism has split already: their shards interleave."""
    torch.manual_seed(7)
    model = Tied()
    parallelize_module(model, mesh["model"], {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[str]:
    """Return the bits of the losses."""
    losses = []
    for step in steps:
        tokens = torch.randint(13, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()).hex())
    return losses


def resumed(folder: Path, make: Callable[[DeviceMesh], nn.Module], shape: tuple[int, ...], group: Group) -> None:
    """Save in the middle of a training, go on, and go on once more from what was saved, with fresh objects."""
    mesh = mesh_of(folder, group, *shape)
    model = make(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        train(model, optimizer, group.rank, range(3))
        engine.checkpoint({"model": model, "optimizer": optimizer}, step=2).result()
    expected = train(model, optimizer, group.rank, range(3, 6))
    model = make(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, group.rank, range(9, 10))  # other moments
    fresh = torch.optim.AdamW(model.parameters(), lr=0.1)
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        for restored in (optimizer, fresh):
            found = engine.restore({"model": model, "optimizer": restored})
            assert found is not None
            assert found.step == 2
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            assert train(model, restored, group.rank, range(3, 6)) == expected


@pytest.mark.parametrize("world", [1, 3])
def test_fsdp_goes_on_with_the_same_bits(tmp_path: Path, world: int) -> None:
    run_ranks(world, partial(resumed, tmp_path, fsdp, ()))


def test_fsdp_over_tensor_parallelism_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    run_ranks(4, partial(resumed, tmp_path, fsdp_over_tp, (2, 2)))


def overlapped(folder: Path, group: Group) -> None:
    """Weights are captured beside the next step; each checkpoint holds one step."""
    mesh = mesh_of(folder, group)
    model = fsdp(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    expected: dict[int, list[Tensor]] = {}
    with SyncCheckpointEngine(folder / "run", group=group, interval=2, keep_last=3) as engine:
        engine.attach(optimizer)
        for step in range(6):
            with engine.step(state, step):
                train(model, optimizer, group.rank, range(step, step + 1))
            expected[step] = [each.clone() for each in local_tensors([*model.parameters()])]
        engine.drain()
        assert engine.statistics().failed == 0
        for info in engine.checkpoints():
            engine.restore(state, step=info.step)
            assert all(map(torch.equal, local_tensors([*model.parameters()]), expected[info.step]))
        assert len(engine.checkpoints()) == 3


def test_captures_overlap_with_training(tmp_path: Path) -> None:
    run_ranks(2, partial(overlapped, tmp_path))


def plain_tensors(folder: Path, group: Group) -> dict[str, Any]:
    mesh = mesh_of(folder, group)
    full = torch.arange(15.0).reshape(5, 3)
    rows, columns, copied = (distribute_tensor(full, mesh, [how]) for how in (Shard(0), Shard(1), Replicate()))
    state = {"rows": rows, "columns": columns, "copied": copied, "own": torch.full((2,), float(group.rank))}
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        engine.checkpoint(state, step=1).result()
        for value in state.values():
            (value.to_local() if isinstance(value, DTensor) else value).zero_()
        engine.restore(state)
        for name in ("rows", "columns", "copied"):
            assert torch.equal(state[name].full_tensor(), full)  # type: ignore[attr-defined]
        assert state["own"].tolist() == [group.rank] * 2
        with pytest.raises(UnsupportedStateError, match=r"partial: .*Partial"):
            engine.checkpoint({"partial": DTensor.from_local(full, mesh, [Partial()])}, step=2)
        with pytest.raises(StateMismatchError, match=r"rows \(the shape"):
            engine.restore({**state, "rows": copied[:, :2]})
        with pytest.raises(StateMismatchError, match=r"rows \(float64 here"):
            engine.restore({**state, "rows": columns.double()})
        with pytest.raises(StateMismatchError, match=r"own \(the shape"):
            engine.restore({**state, "own": copied})
        return {name: value.tolist() for name, value in state.items() if name == "own"}


def test_placements(tmp_path: Path) -> None:
    assert run_ranks(2, partial(plain_tensors, tmp_path)) == [{"own": [0.0, 0.0]}, {"own": [1.0, 1.0]}]


def test_without_a_group_parts_are_refused(tmp_path: Path) -> None:
    async def rank_main(group: Group) -> str:
        sharded = distribute_tensor(torch.zeros(4), mesh_of(tmp_path, group))
        async with CheckpointEngine(tmp_path) as engine:
            with pytest.raises(UnsupportedStateError) as caught:
                await engine.checkpoint({"w": sharded}, step=0)
        return str(caught.value)

    import asyncio

    (told,) = run_ranks(1, lambda group: asyncio.run(rank_main(group)))
    assert told.startswith("w: a torch.distributed.tensor.DTensor cannot be saved")
    assert "group=torch.distributed.group.WORLD" in told
    assert "full_tensor()" in told


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every tensor in full, by its name."""
    found = dict(model.state_dict())
    for number, moments in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": value for name, value in moments.items()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}


@pytest.mark.parametrize("layout", ["3", "2 x 2"])
def test_reading_in_full(tmp_path: Path, layout: str) -> None:
    """All ranks' parts are one state for whoever reads it, whichever rank's values are asked for beside."""
    saved, *_ = run_ranks(prod(LAYOUTS[layout][1]), partial(saved_as, tmp_path, layout))
    for rank in (None, 1):
        found = load_sync(tmp_path / "run", rank=rank)
        assert all(torch.equal(found["model"][name], saved[name]) for name in found["model"])
        moments = found["optimizer"]["state"]
        assert all(torch.equal(moments[n][name], saved[f"{n}.{name}"]) for n in moments for name in moments[n])
        assert load_sync(tmp_path / "run", rank=rank, keys=["model.inner.bias"])["model"]["inner.bias"].shape == (10,)
    with open_checkpoint(tmp_path / "run") as checkpoint:
        for name, expected in saved.items():
            if not name[0].isdigit():
                stored = checkpoint.tensor(f"model.{name}")
                assert stored.shape == expected.shape
                assert torch.equal(stored.read(), expected)
                assert torch.equal(stored[1:], expected[1:])
                assert torch.equal(stored[-1], expected[-1])
                assert torch.equal(stored[::2], expected[::2])
        assert torch.equal(checkpoint.load()["model"]["inner.weight"], saved["inner.weight"])
    described = describe_checkpoint(tmp_path / "run")
    assert any(leaf.path.startswith("model.inner\\.weight[0:") for leaf in described.leaves)
    with pytest.raises(UnsupportedStateError, match="lies on several ranks"):
        export_checkpoint(tmp_path / "run", tmp_path / "out.safetensors", to="safetensors")


def unsharded(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(7)
    return Tied()


LAYOUTS: dict[str, tuple[Callable[[DeviceMesh], nn.Module], tuple[int, ...]]] = {
    "1": (fsdp, (1,)),
    "2": (fsdp, (2,)),
    "3": (fsdp, (3,)),
    "4": (fsdp, (4,)),
    "8": (fsdp, (8,)),
    "2 x 2": (fsdp_over_tp, (2, 2)),
    "plain": (unsharded, (1,)),
}


def saved_as(folder: Path, layout: str, group: Group) -> dict[str, Tensor]:
    make, shape = LAYOUTS[layout]
    model = make(mesh_of(folder, group, *shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        train(model, optimizer, 0, range(3))
        engine.checkpoint({"model": model, "optimizer": optimizer}, step=2).result()
    return full_state(model, optimizer)


def restored_as(folder: Path, layout: str, fresh: bool, group: Group) -> dict[str, Tensor]:
    make, shape = LAYOUTS[layout]
    model = make(mesh_of(folder, group, *shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if not fresh:
        train(model, optimizer, 5, range(9, 10))
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        assert engine.restore({"model": model, "optimizer": optimizer}) is not None
    return full_state(model, optimizer)


@pytest.mark.filterwarnings("ignore:this checkpoint is of")
@pytest.mark.parametrize(
    ("before", "after"),
    [("2", "3"), ("3", "2"), ("1", "4"), ("2 x 2", "3"), ("2", "2 x 2"), ("plain", "2"), ("2", "plain")],
)
@pytest.mark.parametrize("fresh", [True, False])
def test_another_layout_has_the_same_bits(tmp_path: Path, before: str, after: str, fresh: bool) -> None:
    def world(layout: str) -> int:
        return prod(LAYOUTS[layout][1])

    saved = run_ranks(world(before), partial(saved_as, tmp_path, before))
    (tmp_path / "rendezvous").unlink(missing_ok=True)
    restored = run_ranks(world(after), partial(restored_as, tmp_path, after, fresh))
    for found in (*saved, *restored):
        assert found.keys() == saved[0].keys()
        assert all(torch.equal(found[name], saved[0][name]) for name in found)
