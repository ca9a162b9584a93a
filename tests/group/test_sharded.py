"""Tensors that lie on several ranks: FSDP2, tensor parallelism, and both."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from typer.testing import CliRunner

from pccheck_async import (
    CheckpointEngine,
    Drain,
    FlatShard,
    Group,
    GroupError,
    RNGState,
    StateMismatchError,
    SyncCheckpointEngine,
    load_sync,
    open_checkpoint,
    stores,
)
from pccheck_async.cli import app
from pccheck_async.cli.ranks import placement
from pccheck_async.errors import CorruptStoreError, DamagedError, IncompleteCheckpointError, UnsupportedStateError
from pccheck_async.format import Entry
from pccheck_async.group import Place, read_place
from pccheck_async.state import PlannedBoxes
from pccheck_async.state.boxes import local_tensors
from pccheck_async.upkeep import ShardBox, ShardedLeaf
from tests.support.group_folders import spoil
from tests.support.lying_objects import FolderOfObjects, LyingObjects, use_in_drains
from tests.support.ranks import run_ranks
from tests.support.state_strategies import difference

pytestmark = [
    pytest.mark.usefixtures("dynamo"),
    pytest.mark.filterwarnings(
        "ignore:This process .* is multi-threaded",
        "ignore:FSDP2-wrapped module",
        "ignore:torch.distributed is disabled",
    ),
]


class Tied(nn.Module):
    """A small GPT with sizes that no world divides, and an embedding that is also its output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 7)
        self.attention = nn.Linear(7, 21)
        self.inner = nn.Linear(7, 10)
        self.outer = nn.Linear(10, 7)
        self.out = nn.Linear(7, 13, bias=False)
        self.out.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        query, key, value = self.attention(hidden).chunk(3, -1)
        hidden = hidden + nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.outer(nn.functional.relu(self.inner(hidden)))
        logits: Tensor = self.out(hidden) * self.get_buffer("scale").mean()
        return logits


def mesh_of(folder: Path, group: Group, *shape: int) -> DeviceMesh:
    """Initialise gloo, and return a mesh of this shape, of all ranks."""
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=group.rank, world_size=group.world_size)
    return init_device_mesh("cpu", shape or (group.world_size,), mesh_dim_names=("data", "model")[: len(shape) or 1])


def fsdp(mesh: DeviceMesh, **settings: Any) -> nn.Module:
    torch.manual_seed(7)
    model = Tied()
    fully_shard(model.inner, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return model


def fsdp_offloaded(mesh: DeviceMesh) -> nn.Module:
    return fsdp(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))  # pinned memory needs an accelerator


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
    data = mesh.get_local_rank("data")  # ranks of tensor parallelism see the same samples
    model = make(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        train(model, optimizer, data, range(3))
        engine.checkpoint({"model": model, "optimizer": optimizer}, step=2).result()
    expected = train(model, optimizer, data, range(3, 6))
    model = make(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, data, range(9, 10))  # other moments
    fresh = torch.optim.AdamW(model.parameters(), lr=0.1)
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        for restored in (optimizer, fresh):
            found = engine.restore({"model": model, "optimizer": restored})
            assert found is not None
            assert found.step == 2
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            assert train(model, restored, data, range(3, 6)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "world"), [pytest.param(fsdp, 1, marks=pytest.mark.campaign), (fsdp, 3), (fsdp_offloaded, 2)]
)
def test_fsdp_goes_on_with_the_same_bits(tmp_path: Path, make: Callable[[DeviceMesh], nn.Module], world: int) -> None:
    run_ranks(world, partial(resumed, tmp_path, make, ()))


@pytest.mark.slow
def test_fsdp_over_tensor_parallelism_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    run_ranks(4, partial(resumed, tmp_path, fsdp_over_tp, (2, 2)))


def drained(folder: Path, drain: Drain, group: Group) -> None:
    """Train and save, each step until it is in the bucket, and end without closing."""
    model = fsdp(mesh_of(folder, group))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    engine = SyncCheckpointEngine(folder / "run", group=group, drain=drain, save_last=False).open()
    engine.restore(state)
    for step in range(3):
        train(model, optimizer, group.rank, range(step, step + 1))
        engine.checkpoint(state, step=step).wait_reached("remote", 30)
    saved = full_tensors(model, optimizer)
    if group.rank == 0:
        torch.save(saved, folder / "saved")
    dist.barrier()


def full_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [value for held in optimizer.state.values() for value in held.values()]
    tensors = [*model.parameters(), *moments]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in tensors]


def elsewhere(folder: Path, saved: Path, drain: Drain | None, group: Group) -> list[str]:
    """Restore, compare all that the others had saved, bit by bit, and train on; return the losses."""
    model = fsdp(mesh_of(folder, group))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, group.rank, range(9, 10))
    with SyncCheckpointEngine(folder / "run", group=group, drain=drain, save_last=False) as engine:
        found = engine.restore({"model": model, "optimizer": optimizer})
        assert found is not None
        assert (found.step, found.source) == (2, "disk" if drain is None else "remote")
        expected = torch.load(saved)
        assert all(map(torch.equal, full_tensors(model, optimizer), expected))
        assert len(expected) > 20
        return train(model, optimizer, group.rank, range(3, 6))


@pytest.mark.slow
def test_four_hosts_that_are_lost_go_on_as_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have nothing but the bucket, and compute what two ranks do that have the disks of the four."""
    pytest.importorskip("xxhash")
    use_in_drains(LyingObjects(FolderOfObjects(tmp_path / "bucket")), monkeypatch)
    lost, new, beside = (tmp_path / name for name in ("lost", "new", "beside"))
    for folder in (lost, new, beside):
        folder.mkdir()
    run_ranks(4, partial(drained, lost, drain := Drain("s3://bucket/run")))
    shutil.copytree(lost / "run", beside / "run")
    shutil.rmtree(lost / "run")
    losses = run_ranks(2, partial(elsewhere, new, lost / "saved", drain))
    assert losses == run_ranks(2, partial(elsewhere, beside, lost / "saved", None))


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


@pytest.mark.slow
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


@pytest.mark.slow
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


def of_dcp(folder: Path) -> dict[str, Tensor]:
    state = {"model": Tied().state_dict()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)  # type: ignore[attr-defined]
    return state["model"]


EXPORTS: dict[Any, Callable[[Path], dict[str, Tensor]]] = {
    "torch": lambda path: torch.load(path, weights_only=True)["model"],
    "safetensors": lambda path: {name[6:].replace("\\", ""): value for name, value in load_file(path).items()},
    "dcp": of_dcp,
}


Saved: TypeAlias = "Callable[[str], tuple[Path, list[Outcome]]]"


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return the folder and the outcomes of a layout, whose ranks save once for all tests that only read it."""

    @cache
    def saved(layout: str) -> tuple[Path, list[Outcome]]:
        folder = tmp_path_factory.mktemp("saved")
        return folder / "run", run_ranks(prod(LAYOUTS[layout][1]), partial(saved_as, folder, layout))

    return saved


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param("3", marks=pytest.mark.campaign), "2 x 2"])
def test_reading_in_full(tmp_path: Path, saved_once: Saved, layout: str) -> None:
    """All ranks' parts are one state for whoever reads it, whichever rank's values are asked for beside."""
    run, ((saved, _), *_) = saved_once(layout)
    for rank in (None, 1):
        found = load_sync(run, rank=rank)
        assert all(torch.equal(found["model"][name], saved[name]) for name in found["model"])
        moments = found["optimizer"]["state"]
        assert all(torch.equal(moments[n][name], saved[f"{n}.{name}"]) for n in moments for name in moments[n])
        assert load_sync(run, rank=rank, keys=["model.inner.bias"])["model"]["inner.bias"].shape == (10,)
    with open_checkpoint(run) as checkpoint:
        for name, expected in saved.items():
            if not name[0].isdigit():
                stored = checkpoint.tensor(f"model.{name}")
                assert stored.shape == expected.shape
                assert torch.equal(stored.read(), expected)
                assert torch.equal(stored[1:], expected[1:])
                assert torch.equal(stored[-1], expected[-1])
                assert torch.equal(stored[::2], expected[::2])
        assert torch.equal(checkpoint.load()["model"]["inner.weight"], saved["inner.weight"])
    described = stores.describe(run)
    assert any(leaf.path.startswith("model.inner.weight[0:") for leaf in described.leaves)
    for to, read in EXPORTS.items():
        stores.export(run, tmp_path / to, to=to, keys=["model"])
        found = read(tmp_path / to)
        assert all(torch.equal(found[name], saved[name]) for name in ("inner.weight", "outer.bias", "out.weight"))
    folder = tmp_path / "files"
    stores.export(run, folder, to="safetensors", root="model", max_file_size=300)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    for name, title in index["weight_map"].items():
        assert torch.equal(load_file(folder / title)[name], saved[name])


def saved_by_dcp(folder: Path, group: Group) -> dict[str, Any]:
    """Save what torch.distributed.checkpoint can shard, with its own writer; return all of it in full."""
    mesh = mesh_of(folder, group)
    model = fsdp(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 0, range(2))
    full = torch.arange(15.0).reshape(5, 3)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        **{str(how): distribute_tensor(full, mesh, [how]) for how in (Shard(0), Shard(1), Replicate())},
        "short": distribute_tensor(torch.arange(7, dtype=torch.int64), mesh, [Shard(0)]),
        "few": distribute_tensor(torch.ones(1, 2), mesh, [Shard(0)]),  # some ranks have nothing of it
        "plain": {"of all": full[0], "list": [1, {"x": full[1]}]},
    }
    dcp.save(state, checkpoint_id=folder / "dcp")  # type: ignore[attr-defined]

    def in_full(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): in_full(item) for key, item in value.items()}
        return value.full_tensor() if isinstance(value, DTensor) else value

    found: dict[str, Any] = in_full(state)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.campaign), 3])
def test_import_of_what_ranks_saved_with_dcp(tmp_path: Path, world: int) -> None:
    expected, *_ = run_ranks(world, partial(saved_by_dcp, tmp_path))
    assert len([*(tmp_path / "dcp").glob("*.distcp")]) == world
    stores.import_(tmp_path / "dcp", tmp_path / "single", source="dcp", step=9)
    assert not difference(load_sync(tmp_path / "single"), expected)
    (tmp_path / "dcp" / "__1_0.distcp").unlink()
    with pytest.raises(CorruptStoreError, match=r"lacks the files __1_0\.distcp, which its metadata names"):
        stores.import_(tmp_path / "dcp", tmp_path / "single", source="dcp")


def unsharded(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(7)
    return Tied()


GRIDS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "rows": ((3,), (Shard(0),)),
    "columns": ((2,), (Shard(1),)),
    "grid": ((2, 2), (Shard(0), Shard(1))),
    "copies": ((2, 2), (Replicate(), Shard(0))),
}


def saved_on_grid(folder: Path, grid: str, group: Group) -> None:
    """Save the same tensors in another layout, a number that each rank has for itself, and one that is different."""
    shape, placements = GRIDS[grid]
    mesh = mesh_of(folder, group, *shape)
    with SyncCheckpointEngine(folder / "run", group=group, keep_last=2) as engine:
        for step in (1, 2):
            full = torch.arange(1001.0 * 7).reshape(1001, 7)
            full[500, 3] += step
            sharded = distribute_tensor(full, mesh, placements)
            state = {"w": sharded, "tied": sharded, "t": {"own": torch.tensor([group.rank + 0.5]), "a": [1, 2]}}
            engine.checkpoint(state, step=step).result()


@pytest.fixture(scope="module")
def grids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same checkpoints of groups with other layouts, and of one process alone."""
    folders = {}
    for grid in GRIDS:
        folder = tmp_path_factory.mktemp("grid")
        run_ranks(prod(GRIDS[grid][0]), partial(saved_on_grid, folder, grid))
        folders[grid] = folder / "run"
    folders["alone"] = tmp_path_factory.mktemp("alone")
    with SyncCheckpointEngine(folders["alone"], keep_last=2) as engine:
        for step in (1, 2):
            engine.checkpoint(load_sync(folders["rows"], step=step), step=step).result(60)
    return folders


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"), [("rows", "columns"), ("columns", "grid"), ("alone", "grid"), ("copies", "alone")]
)
def test_checkpoints_of_other_layouts_are_compared_in_full(grids: dict[str, Path], one: str, other: str) -> None:
    found = stores.compare(grids[one], grids[other])
    assert (found.differences, found.leaves, found.nbytes) == ((), 4, 2 * 4 * 7007 + 4)
    steps = stores.compare(grids[one], grids[other], step=1)
    assert [each.path for each in steps.differences] == ["w", "tied"]
    for each in steps.differences:
        assert each.difference is not None
        assert (each.difference.bits, each.difference.total, each.difference.most_absolute) == (1, 7007, 1.0)
    if one != "alone":
        if other != "alone":
            assert stores.compare(grids[one], grids[other], rank=1).differences == ()
        ranks = stores.compare(grids[one], grids[other], rank=1, other_rank=None if other == "alone" else 0)
        assert [(each.path, each.change) for each in ranks.differences] == [("t.own", "elements")]
        same = stores.compare(grids[one], step=1, other_step=1, rank=0, other_rank=1)
        assert [each.path for each in same.differences] == ["t.own"]
    result = CliRunner().invoke(app, ["compare", str(grids[one]), str(grids[other]), "--step=2", "--other-step=2"])
    assert result.exit_code == 0, result.output
    assert "All 4 leaves are equal in every bit." in result.stdout


@pytest.mark.slow
def test_a_comparison_names_what_is_damaged_in_another_ranks_part(grids: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(grids["columns"], tmp_path / "run")
    spoil(tmp_path / "run", 1)
    with pytest.raises(DamagedError, match=r"it holds w, tied of step 2; `pccheck verify .* --all` names all damage"):
        stores.compare(tmp_path / "run", grids["alone"])


def shown(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["show", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
def test_show_says_which_rank_has_which_box(grids: dict[str, Path], tmp_path: Path) -> None:
    for grid, says in (
        ("rows", "dim 0 over ranks 0-2 (2 x 334, 333)"),
        ("columns", "dim 1 over ranks 0-1 (4, 3)"),
        ("grid", "dims 0, 1 over ranks 0-3 (2 x 2)"),
    ):
        for rank in (0, 1):
            text = shown(grids[grid], f"--rank={rank}")
            assert f"── w  float32 [1001, 7]  28.0 kB in full: {says}\n" in text
            assert f"── tied  float32 [1001, 7]  28.0 kB in full: {says}  = w, stored once\n" in text
            assert "own  float32 [1]  4 B\n" in text
            assert text.index("── w ") < text.index("── tied ") < text.index("own ")
            assert "w[0:" not in text
            assert "2 tensors lie on several ranks: 56.1 kB in full." in text
        w, tied = json.loads(shown(grids[grid], "--json"))["sharded"]
        assert (w["path"], w["dtype"], w["shape"], w["replica"]) == ("w", "float32", [1001, 7], False)
        assert w["boxes"] == tied["boxes"]
        count = torch.zeros(1001, 7)
        for box in w["boxes"]:
            rows, columns = (slice(low, low + n) for low, n in zip(box["offsets"], box["sizes"], strict=True))
            count[rows, columns] += 1
        assert bool((count == 1).all())
        assert {box["rank"] for box in w["boxes"]} == set(range(prod(GRIDS[grid][0])))
    # Of two copies of each half, one was saved, by whoever had less to save.
    assert re.search(r"w .*: dim 0 over ranks [02](-|, )[13] \(501, 500\)", shown(grids["copies"]))
    assert stores.describe(grids["alone"]).sharded == ()
    alone = stores.describe(grids["rows"] / "rank-00001")  # what others have is not looked for
    assert (alone.sharded, alone.leaves[0].path) == ((), "w[334:668, 0:7]")
    assert "w[334:668, 0:7]" in shown(grids["rows"] / "rank-00001")
    shutil.copytree(grids["rows"], tmp_path / "run")
    description = stores.describe(tmp_path / "run", rank=2)
    slot = tmp_path / "run" / "rank-00002" / description.slot
    data = bytearray(slot.read_bytes())
    data[description.manifest_offset] ^= 1
    slot.write_bytes(data)
    with pytest.raises(
        DamagedError, match=r"the part of rank 2: .*: the manifest of checkpoint 1 \(step 2\) is damaged"
    ):
        stores.describe(tmp_path / "run")


@pytest.mark.slow
def test_boxes_of_one_rank_are_no_tensor(grids: dict[str, Path], tmp_path: Path) -> None:
    """They were None in what was loaded, and in copies."""
    part, says = grids["rows"] / "rank-00001", "of which this is the part of one: w, tied; read the group's folder"
    with pytest.raises(IncompleteCheckpointError, match=says):
        load_sync(part)
    with pytest.raises(IncompleteCheckpointError, match=says):
        stores.export(part, tmp_path / "out", to="torch")
    with open_checkpoint(part) as checkpoint:
        with pytest.raises(IncompleteCheckpointError, match=says):
            checkpoint.load()
        with pytest.raises(IncompleteCheckpointError, match="the part of one: it; read"):
            _ = checkpoint["w"]
        assert checkpoint["t.own"].tolist() == [1.5]
    assert load_sync(part, keys=["t"])["t"]["own"].tolist() == [1.5]
    stores.export(part, tmp_path / "t.pt", to="torch", root="t")
    with pytest.raises(IncompleteCheckpointError, match=says):
        stores.copy(part, tmp_path / "copy")
    asked = [str(grids["rows"]), str(tmp_path / "copy"), "--rank=0"]
    assert CliRunner().invoke(app, ["copy", *asked]).exit_code == 1  # nothing is lost
    with pytest.raises(IncompleteCheckpointError, match="w, tied; copy the parts of all ranks: leave the rank out"):
        stores.copy(grids["rows"], tmp_path / "copy", rank=1)
    assert not (tmp_path / "copy").exists()


@pytest.mark.slow
def test_a_copy_of_all_parts_has_the_tensors_in_full(grids: dict[str, Path], tmp_path: Path) -> None:
    for grid in ("grid", "rows"):  # four ranks, then three into the same folder
        stores.copy(grids[grid], tmp_path / "copy")
        assert not stores.compare(grids[grid], tmp_path / "copy").differences
    assert [len(one.places) for one in read_place(tmp_path / "copy").complete] == [3, 4]
    for rank in range(3):
        own = load_sync(tmp_path / "copy", rank=rank, keys=["t"])["t"]["own"]
        assert own.tolist() == [rank + 0.5]


@pytest.mark.slow
def test_show_of_interleaved_shards_and_replicas(tmp_path: Path, saved_once: Saved) -> None:
    text = shown(saved_once("2 x 2")[0])
    assert re.search(r"inner\.weight .* in full: dim 0 over ranks 0, 2, 1, 3 \(3, 2, 3, 2\)\n", text), text
    assert re.search(r"outer\.weight .* in full: dims 0, 1 over ranks 0-3 \(2 x 2\)\n", text), text
    run_ranks(2, partial(replicas, tmp_path))
    leaves = {leaf.path: leaf for leaf in stores.describe(tmp_path / "run").sharded}
    assert leaves["alike"].is_replica
    assert len(leaves["alike"].boxes) == 1
    assert re.search(
        r"alike  float32 \[5000\]  20\.0 kB in full: one of the replicas, of rank [01]\n", shown(tmp_path / "run")
    )


@pytest.mark.parametrize(
    ("shape", "boxes", "says"),
    [
        ((8, 3), {rank: [((rank, 0), (1, 3))] for rank in range(8)}, "dim 0 over ranks 0-7 (8 x 1)"),
        ((4,), {5: [((0,), (2,))], 3: [((2,), (2,))]}, "dim 0 over ranks 5, 3 (2 x 2)"),
        ((4,), {2: [((0,), (4,))]}, "whole, of rank 2"),
        ((), {2: [((), ())]}, "whole, of rank 2"),
        ((0, 3), {}, "of no elements"),
        ((4,), {0: [((0,), (1,)), ((2,), (1,))], 1: [((1,), (1,)), ((3,), (1,))]},
         "rank 0 [0:1]; rank 0 [2:3]; rank 1 [1:2]; rank 1 [3:4]"),
    ],
)  # fmt: skip
def test_placements_in_words(shape: tuple[int, ...], boxes: dict[int, Any], says: str) -> None:
    assert placement(sharded_leaf(shape, boxes)) == says


def sharded_leaf(shape: tuple[int, ...], boxes: dict[int, Any]) -> ShardedLeaf:
    each = {rank: tuple(ShardBox(*box) for box in there) for rank, there in boxes.items()}
    return ShardedLeaf(("w",), "float32", shape, 0, False, range(0), each)


def test_placements_on_many_ranks_are_one_line() -> None:
    ranks = range(1024)
    regular = sharded_leaf((1024,), {1023 - rank: [((rank,), (1,))] for rank in ranks})
    uneven = sharded_leaf((1024 * 1025 // 2,), {rank: [((rank * (rank + 1) // 2,), (rank + 1,))] for rank in ranks})
    scattered = sharded_leaf((2048,), {rank: [((rank,), (1,)), ((rank + 1024,), (1,))] for rank in ranks})
    assert placement(regular).endswith("1016 and 1016 more (1024 x 1)")
    assert placement(uneven).endswith("over ranks 0-1023 (1, 2, 3, 4, 5, 6, 7, 8, ...)")
    assert placement(scattered).endswith("2040 boxes more (--json names all)")
    assert max(len(placement(leaf)) for leaf in (regular, uneven, scattered)) < 300


LAYOUTS: dict[str, tuple[Callable[[DeviceMesh], nn.Module], tuple[int, ...]]] = {
    "1": (fsdp, (1,)),
    "2": (fsdp, (2,)),
    "3": (fsdp, (3,)),
    "4": (fsdp, (4,)),
    "8": (fsdp, (8,)),
    "2 x 2": (fsdp_over_tp, (2, 2)),
    "hsdp": (fsdp, (2, 2)),
    "offloaded": (fsdp_offloaded, (2,)),
    "plain": (unsharded, (1,)),
}


class Outcome(NamedTuple):
    """What one rank has."""

    state: dict[str, Tensor]
    losses: list[float]
    """Of the next three steps."""


def outcome(model: nn.Module, optimizer: torch.optim.Optimizer) -> Outcome:
    state = {name: value.clone() for name, value in full_state(model, optimizer).items()}
    return Outcome(state, [*map(float.fromhex, train(model, optimizer, 0, range(3, 6)))])


def saved_as(folder: Path, layout: str, group: Group) -> Outcome:
    make, shape = LAYOUTS[layout]
    model = make(mesh_of(folder, group, *shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        train(model, optimizer, 0, range(3))
        engine.checkpoint({"model": model, "optimizer": optimizer, "rng": RNGState()}, step=2).result()
    return outcome(model, optimizer)


def restored_as(folder: Path, saved_on: str, layout: str, fresh: bool, group: Group) -> Outcome:
    make, shape = LAYOUTS[layout]
    model = make(mesh_of(folder, group, *shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if not fresh:
        train(model, optimizer, 5, range(9, 10))
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        torch.manual_seed(group.rank + 100)
        drawn = torch.get_rng_state()
        assert engine.restore({"model": model, "optimizer": optimizer, "rng": RNGState()}) is not None
        same_world = prod(LAYOUTS[saved_on][1]) == group.world_size
        assert torch.equal(torch.get_rng_state(), drawn) != same_world  # else what was saved is of other ranks
    return outcome(model, optimizer)


def same_bits(tmp_path: Path, saved_once: Saved, before: str, after: str, fresh: bool) -> None:
    run, saved = saved_once(before)
    shutil.copytree(run, tmp_path / "run")
    restored = run_ranks(prod(LAYOUTS[after][1]), partial(restored_as, tmp_path, before, after, fresh))
    expected = saved[0]
    for state, losses in (*saved, *restored):
        assert state.keys() == expected.state.keys()
        assert all(torch.equal(state[name], expected.state[name]) for name in state)
        assert losses == (expected.losses if before == after else pytest.approx(expected.losses, rel=1e-6))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "fresh"),
    [
        ("3", "2", False),
        ("3", "offloaded", True),
        ("offloaded", "2 x 2", True),
        ("2 x 2", "plain", False),
        pytest.param("3", "2 x 2", True, marks=pytest.mark.campaign),
        pytest.param("offloaded", "plain", False, marks=pytest.mark.campaign),
        pytest.param("hsdp", "3", True, marks=pytest.mark.campaign),
        pytest.param("2", "2 x 2", True, marks=pytest.mark.campaign),
        pytest.param("2", "plain", False, marks=pytest.mark.campaign),
    ],
)
def test_another_layout_has_the_same_bits(
    tmp_path: Path, saved_once: Saved, before: str, after: str, fresh: bool
) -> None:
    same_bits(tmp_path, saved_once, before, after, fresh)


@pytest.mark.campaign
@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_every_layout_onto_every_other(tmp_path: Path, saved_once: Saved, before: str, after: str) -> None:
    same_bits(tmp_path, saved_once, before, after, fresh=True)


def replicas(folder: Path, group: Group) -> tuple[list[Tensor], Tensor]:
    """Save a DDP model, whose buffer each rank has for itself, and a plain tensor; restore all of it."""
    mesh_of(folder, group)
    torch.manual_seed(7)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(300, 400), nn.BatchNorm1d(400)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 300)).sum().backward()
    optimizer.step()
    torch.manual_seed(group.rank)
    model(torch.randn(3, 300))  # its own running mean
    alike, own = torch.full((5_000,), 3.0), torch.full((5_000,), float(group.rank))
    state = {"model": model, "optimizer": optimizer, "alike": alike, "own": own}
    with SyncCheckpointEngine(folder / "run", group=Group.of(group, replicated=["alike"])) as engine:
        engine.checkpoint(state, step=1).result()
        expected = [each.detach().clone() for each in model.state_dict().values()]
        with torch.no_grad():
            for each in model.state_dict().values():
                each.zero_()
        alike.zero_()
        own.zero_()
        state["optimizer"] = fresh = torch.optim.AdamW(model.parameters())
        engine.restore(state)
        assert all(map(torch.equal, model.state_dict().values(), expected))
        for parameter, moments in optimizer.state.items():
            assert all(torch.equal(value, fresh.state[parameter][name]) for name, value in moments.items())
        assert alike.tolist() == [3.0] * 5_000
        assert own.tolist() == [group.rank] * 5_000
        return expected, expected[-2]


@pytest.mark.slow
def test_replicas_are_saved_once_on_each_filesystem(tmp_path: Path) -> None:
    found = run_ranks(3, partial(replicas, tmp_path))
    assert not torch.equal(found[0][1], found[1][1])  # buffers are each rank's own
    nbytes = [entry.nbytes for listing in (read_place(tmp_path / "run"),) for entry in _entries(listing)]
    whole = 3 * 4 * (300 * 400 + 3 * 400)
    assert sum(nbytes) < 1.1 * whole + 3 * 4 * 5_000 + 3 * (1 << 16)
    assert max(nbytes) < 0.5 * sum(nbytes)
    state = load_sync(tmp_path / "run", rank=2)
    assert torch.equal(state["model"]["module.0.weight"], found[0][0][0])
    assert state["alike"].tolist() == [3.0] * 5_000


def _entries(listing: Place) -> list[Entry]:
    return [part.entry for part in listing.parts(listing.complete[0].key).values()]


def of_nodes(folder: Path, group: Group) -> str:
    """Two hosts with disks of their own: what lies on both is on neither in full."""
    node = folder / f"node{group.rank}" / "run"
    node.parent.mkdir(exist_ok=True)
    mesh = mesh_of(folder, group)
    full = torch.arange(12.0).reshape(4, 3)
    state = {"w": distribute_tensor(full, mesh, [Shard(0)]), "copied": distribute_tensor(full, mesh, [Replicate()])}
    with SyncCheckpointEngine(node, group=group) as engine:
        engine.checkpoint(state, step=1).result()
        for value in state.values():
            value.to_local().zero_()
        engine.restore(state)
        assert all(torch.equal(value.full_tensor(), full) for value in state.values())
        with pytest.raises(StateMismatchError) as caught:
            engine.restore({**state, "w": distribute_tensor(full, mesh, [Shard(1)])})
    return str(caught.value)


@pytest.mark.slow
def test_hosts_with_disks_of_their_own_keep_what_they_read(tmp_path: Path) -> None:
    first, second = run_ranks(2, partial(of_nodes, tmp_path))
    assert "w (the checkpoint has not all of it); the parts of ranks 1 are on filesystems not seen here" in first
    assert "of ranks 0 are" in second


def stages(folder: Path, group: Group) -> list[float]:
    """Two stages of a pipeline whose tensors have the same names: each is another tensor."""
    mesh_of(folder, group)
    alone = DeviceMesh("cpu", [group.rank])
    state = {"w": distribute_tensor(torch.full((4,), float(group.rank)), alone)}
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        engine.checkpoint(state, step=1).result()
        state["w"].to_local().zero_()
        engine.restore(state)
    full = load_sync(folder / "run", rank=group.rank)["w"]
    return [float(value) for each in (state["w"].to_local(), full) for value in each]


@pytest.mark.slow
def test_tensors_of_one_name_on_other_ranks_are_told_apart(tmp_path: Path) -> None:
    assert run_ranks(2, partial(stages, tmp_path)) == [[0.0] * 8, [1.0] * 8]


WHOLE = torch.arange(105.0).reshape(5, 7, 3)


def flat_of(group: Group, value: float | None = None) -> FlatShard:
    """Return this rank's share of all elements."""
    low, high = (105 * number // group.world_size for number in (group.rank, group.rank + 1))
    local = WHOLE.flatten()[low:high].clone()
    return FlatShard(local if value is None else local.fill_(value), WHOLE.shape, low)


def flat_saved(folder: Path, group: Group) -> None:
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        state = {"master": flat_of(group), "rank": group.rank}
        engine.checkpoint(state, step=1).result()
        state["master"] = again = flat_of(group, -1.0)
        engine.restore(state)
        assert torch.equal(again.local, flat_of(group).local)


def flat_restored(folder: Path, group: Group) -> None:
    shard, whole = flat_of(group, -1.0), torch.zeros(WHOLE.shape)
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        engine.restore({"master": shard, "rank": -1})
        assert torch.equal(shard.local, flat_of(group).local)
        engine.restore({"master": whole, "rank": -1})
        assert torch.equal(whole, WHOLE)
        with pytest.raises(StateMismatchError, match=r"master \(the shape"):
            engine.restore({"master": FlatShard(torch.zeros(3), (5, 21), 0), "rank": -1})


@pytest.mark.slow
def test_flat_ranges_have_another_split(tmp_path: Path) -> None:
    run_ranks(3, partial(flat_saved, tmp_path))
    run_ranks(2, partial(flat_restored, tmp_path))
    assert torch.equal(load_sync(tmp_path / "run")["master"], WHOLE)
    with SyncCheckpointEngine(tmp_path / "single") as engine, pytest.raises(UnsupportedStateError, match="group="):
        engine.checkpoint({"master": FlatShard(torch.zeros(3), (3,), 0)}, step=0)


def of_gpu_ranks(group: Group) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """Return what FSDP2 makes for GPUs with its parameters offloaded: a mesh of GPUs, and shards in host memory."""
    mesh, rows = DeviceMesh("cuda", [*range(group.world_size)]), 5
    meta = TensorMeta(torch.Size([rows, 3]), (3, 1), torch.float32)
    local = torch.arange(15.0).reshape(rows, 3).chunk(group.world_size)[group.rank].clone()
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
    weight = nn.Parameter(DTensor(local, spec, requires_grad=False))  # type: ignore[no-untyped-call]
    return weight, torch.optim.SGD([weight], lr=0.5, momentum=0.5)


def offloaded_from_gpus(folder: Path, saving: bool, group: Group) -> None:
    mesh_of(folder, group)
    weight, optimizer = of_gpu_ranks(group)
    local, start = weight.to_local(), weight.to_local().detach().clone()  # type: ignore[attr-defined]
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        if saving:
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            optimizer.zero_grad()
            engine.checkpoint({"weight": weight, "optimizer": optimizer}, step=1).result()
            weight, optimizer = of_gpu_ranks(group)
            local = weight.to_local()  # type: ignore[attr-defined]
        engine.restore({"weight": weight, "optimizer": optimizer})
    momentum = optimizer.state[weight]["momentum_buffer"]
    assert isinstance(momentum, DTensor)
    assert momentum.device_mesh.device_type == "cuda"
    assert momentum.to_local().is_cpu
    assert torch.equal(momentum.to_local(), torch.ones_like(local))
    assert torch.equal(local, start - 0.5)


@pytest.mark.slow
def test_shards_offloaded_from_gpus_lie_in_host_memory(tmp_path: Path) -> None:
    run_ranks(2, partial(offloaded_from_gpus, tmp_path, True))
    (tmp_path / "rendezvous").unlink()
    run_ranks(3, partial(offloaded_from_gpus, tmp_path, False))


def torn(kind: str, folder: Path, mesh: DeviceMesh, group: Group) -> None:
    sharded = {str(n): distribute_tensor(torch.zeros(2**n, 3), mesh, [Replicate()]) for n in range(4)}
    low, high = (0, 6) if group.rank == 0 else (6, 12)
    whole = {"model": sharded, "master": FlatShard(torch.zeros(high - low), (3, 4), low)}
    other = dict(whole)
    match kind:
        case "another order":
            other["model"] = dict(reversed(sharded.items()))
        case "lacks one":
            other["model"] = {name: value for name, value in sharded.items() if name != "2"}
        case "other placements":
            across = DTensor.from_local(torch.zeros(4, 3), mesh, [Shard(1)], shape=torch.Size((4, 6)), stride=(6, 1))
            whole["model"] = {
                "0": DTensor.from_local(torch.zeros(2, 6), mesh, [Shard(0)], shape=torch.Size((4, 6)), stride=(6, 1))
            }
            other["model"] = {"0": across}
        case "gap":
            other["master"] = FlatShard(torch.zeros(high - low - 1), (3, 4), low + 1)
    with SyncCheckpointEngine(folder / kind, group=group) as engine:
        engine.checkpoint(whole, step=1).result()
        with pytest.raises(GroupError, match=f"under {'master' if kind == 'gap' else 'model'}: "):
            engine.checkpoint(other if group.rank else whole, step=2).result()
        engine.checkpoint(whole, step=3).result()
    with SyncCheckpointEngine(folder / kind, group=group) as engine:
        restored = engine.restore(whole)
        assert restored is not None
        assert restored.step == 3


def all_torn(folder: Path, group: Group) -> None:
    mesh = mesh_of(folder, group)
    for kind in ("another order", "lacks one", "other placements", "gap"):
        torn(kind, folder, mesh, group)


@pytest.mark.slow
def test_ranks_whose_states_do_not_fit_together_are_told_at_once(tmp_path: Path) -> None:
    run_ranks(2, partial(all_torn, tmp_path))


def two_steps(folder: Path, group: Group) -> None:
    mesh = mesh_of(folder, group)
    with SyncCheckpointEngine(folder / "run", group=group, keep_last=2) as engine:
        for step in (1, 2):
            full = torch.full((3_001, 7), float(step))
            engine.checkpoint({"w": distribute_tensor(full, mesh, [Shard(0)])}, step=step).result()


def fallen_back(folder: Path, group: Group) -> tuple[int, list[float]]:
    mesh = mesh_of(folder, group)
    state = {"w": distribute_tensor(torch.zeros(3_001, 7), mesh, [Shard(1)])}
    with SyncCheckpointEngine(folder / "run", group=group, keep_last=2) as engine:
        with pytest.raises(DamagedError) as caught:
            engine.restore(state, step=2)
        assert "may hold parts" in caught.value.__notes__[0]
        restored = engine.restore(state)
        assert restored is not None
    return restored.step, sorted(set(state["w"].to_local().flatten().tolist()))


def unfilled(folder: Path, group: Group) -> None:
    with SyncCheckpointEngine(folder / "run", group=group, keep_last=2) as engine:
        state = {"w": torch.ones(5_000)}
        engine.checkpoint(state, step=1).result()
        state["new"] = torch.ones(5_000)
        engine.checkpoint(state, step=2).result()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=group.rank, world_size=2)
    dist.barrier()
    if group.rank == 1:
        spoil(folder / "run", 1)
    dist.barrier()
    with SyncCheckpointEngine(folder / "run", group=group, keep_last=2) as engine:
        falls_back = pytest.warns(RuntimeWarning, match="all ranks fall back to step 1")
        with falls_back, pytest.raises(StateMismatchError, match="begun to fill: new") as caught:
            engine.restore(state, strict=False)
        assert "may hold parts" in caught.value.__notes__[0]
        del state["new"]
        assert engine.restore(state, strict=False) == engine.checkpoints()[-1]


@pytest.mark.slow
def test_what_damage_left_in_the_state_does_not_stay(tmp_path: Path) -> None:
    run_ranks(2, partial(unfilled, tmp_path))


@pytest.mark.slow
def test_damage_of_a_part_that_others_read_takes_all_to_the_older_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, partial(two_steps, tmp_path))
    (tmp_path / "rendezvous").unlink(missing_ok=True)
    spoil(tmp_path / "run", 1)
    assert run_ranks(3, partial(fallen_back, tmp_path)) == [(1, [1.0])] * 3


def without_elements(folder: Path, group: Group) -> dict[str, Any]:
    """Return what is read as this rank's part, of which rank 1 has no element."""
    mesh = mesh_of(folder, group)
    state = {name: distribute_tensor(torch.full((1, 3), float(n)), mesh, [Shard(0)]) for n, name in enumerate("abc")}
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        engine.checkpoint(state, step=1).result()
    return {name: value.tolist() for name, value in load_sync(folder / "run", rank=group.rank).items()}


@pytest.mark.slow
def test_tensors_without_elements_here_are_not_taken_for_tied(tmp_path: Path) -> None:
    assert run_ranks(2, partial(without_elements, tmp_path)) == [{n: [[float(i)] * 3] for i, n in enumerate("abc")}] * 2


def placed_otherwise(folder: Path, group: Group) -> str:
    """Rank 0 saves the first row, rank 1 the second column: as many elements as there are."""
    row, column = ((0, 0), torch.ones(1, 2)), ((0, 1), torch.ones(2, 1))
    mine = PlannedBoxes((2, 2), [column if group.rank else row])
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        engine.checkpoint({"w": mine}, step=1).result()
        with pytest.raises(StateMismatchError) as caught:
            engine.restore({"w": torch.zeros(2, 2)})
    return str(caught.value)


@pytest.mark.slow
def test_boxes_that_overlap_do_not_hide_a_hole(tmp_path: Path) -> None:
    assert all("boxes of it overlap" in told for told in run_ranks(2, partial(placed_otherwise, tmp_path)))


def odd_name(folder: Path, group: Group) -> None:
    mesh = mesh_of(folder, group)
    state = {"w\udc80": distribute_tensor(torch.full((3,), 2.0), mesh, [Replicate()])}
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        engine.checkpoint(state, step=1).result()
        state["w\udc80"].to_local().zero_()
        engine.restore(state)
        assert state["w\udc80"].to_local().tolist() == [2.0] * 3
        with pytest.raises((UnsupportedStateError, GroupError), match=r"object cannot be saved|x.udc80"):
            engine.checkpoint({**state, "x\udc80": object()}, step=2).result()
        engine.checkpoint(state, step=3).result()


@pytest.mark.slow
def test_names_with_lone_surrogates_do_not_stop_the_group(tmp_path: Path) -> None:
    run_ranks(2, partial(odd_name, tmp_path))


def odd_steps(folder: Path, group: Group) -> None:
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        for step in ("one", 1 << 70, -1):
            with pytest.raises((TypeError, ValueError)):
                engine.checkpoint({"x": 1}, step=step)  # type: ignore[arg-type]
        assert engine.checkpoint({"x": 1}, step=1).result().step == 1


@pytest.mark.slow
def test_impossible_steps_do_not_stop_the_group(tmp_path: Path) -> None:
    run_ranks(2, partial(odd_steps, tmp_path))


def stepped(folder: Path, group: Group, ignored: tuple[str, ...] = ()) -> tuple[nn.Module, Callable[..., Any]]:
    """Return a DDP model, and what makes an optimizer with moments for parameters."""
    if not dist.is_initialized():
        mesh_of(folder, group)
    torch.manual_seed(7)
    inner = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    ddp = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(inner, ignored)  # type: ignore[no-untyped-call]
    model = ddp(inner)

    def optimizer_of(*parameters: nn.Parameter) -> torch.optim.SGD:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, number + 1.0)
        optimizer.step()
        return optimizer

    return model, optimizer_of


def own_parameters(folder: Path, group: Group) -> None:
    """A parameter that DDP leaves alone, and one that an optimizer of a DDP model is given later, are each rank's."""
    model, optimizer_of = stepped(folder, group, ("1.weight",))
    first, second = model.parameters()
    with torch.no_grad():
        second.fill_(group.rank)
    optimizer, late = optimizer_of(first), nn.Parameter(torch.zeros(3))
    state = {"model": model, "optimizer": optimizer}
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        engine.checkpoint(state, step=1).result()
        optimizer.add_param_group({"params": [late]})
        late.grad = torch.full((3,), float(group.rank))
        optimizer.step()
        engine.checkpoint(state, step=2).result()
        with torch.no_grad():
            second.fill_(-1.0)
        moment = optimizer.state[late]["momentum_buffer"].fill_(-1.0)
        engine.restore(state)
        assert optimizer.state[late]["momentum_buffer"].tolist() == [float(group.rank)] * 3, moment
        assert set(second.flatten().tolist()) == {float(group.rank)}


@pytest.mark.slow
def test_what_ddp_does_not_keep_alike_is_not_saved_once(tmp_path: Path) -> None:
    run_ranks(2, partial(own_parameters, tmp_path))


def of_one_parameter_each(folder: Path, group: Group) -> None:
    model, optimizer_of = stepped(folder, group)
    optimizer = optimizer_of([*model.parameters()][group.rank])
    engine = SyncCheckpointEngine(folder / "run", group=group)
    with engine, pytest.raises(GroupError, match="those under optimizer: "):
        engine.checkpoint({"model": model, "optimizer": optimizer}, step=1).result()


@pytest.mark.slow
def test_moments_of_other_parameters_are_not_taken_for_replicas(tmp_path: Path) -> None:
    """Each rank steps some of a DDP model's parameters: their numbers, and maybe shapes, are alike on all ranks."""
    run_ranks(2, partial(of_one_parameter_each, tmp_path))


class Growing:
    """Loads what has another length, as a replay buffer does."""

    def __init__(self, elements: int) -> None:
        self.items = torch.arange(float(elements))

    def state_dict(self) -> dict[str, Any]:
        return {"items": self.items}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = state["items"]


def memories(folder: Path, group: Group) -> None:
    """Restore into memory of all kinds what lay on other ranks."""
    mesh = mesh_of(folder, group)
    full = torch.arange(16.0).reshape(4, 4)
    state = {"w": distribute_tensor(full, mesh, [Shard(0)]), "buffer": Growing(5)}
    alike = torch.full((1, 3), 2.0)
    freed = torch.zeros(4, 4)
    freed.untyped_storage().resize_(0)
    elsewhere = DTensor.from_local(torch.empty(4, 2, device="meta"), mesh, [Shard(1)], run_check=False)
    with torch.inference_mode():
        inference = torch.zeros(4, 4)
    with SyncCheckpointEngine(folder / "run", group=Group.of(group, replicated=["buffer.*", "alike"])) as engine:
        engine.checkpoint({"alike": alike.expand(5, 3)}, step=0).result()
        alike.zero_()
        engine.restore({"alike": alike.expand(5, 3)})
        assert alike.tolist() == [[2.0] * 3]
        engine.checkpoint(state, step=1).result()
        buffer = Growing(2)
        for live, why in (
            (freed, "freed"), (elsewhere, "meta"), (torch.zeros(1, 4).expand(4, 4), "expanded"),
            (torch.zeros(16).as_strided((4, 4), (1, 1)), "overlap"),
        ):  # fmt: skip
            with pytest.raises(StateMismatchError, match=rf"w \(.*{why}"):
                engine.restore({"w": live, "buffer": buffer})
        columns = torch.zeros(8, 4)[::2].t()
        for plain in (inference, columns, torch.zeros(4, 8)[:, 1::2]):
            engine.restore({"w": plain, "buffer": buffer})
            assert torch.equal(plain, full)
        assert torch.equal(buffer.items, torch.arange(5.0))
        half = DeviceMesh("cpu", [0])
        there = DTensor.from_local(torch.zeros(3), half, [Replicate()], run_check=False)
        with pytest.raises((UnsupportedStateError, GroupError), match="w: this rank is not on the mesh"):
            engine.checkpoint({"w": there}, step=2).result()


@pytest.mark.slow
def test_memory_of_all_kinds(tmp_path: Path) -> None:
    run_ranks(2, partial(memories, tmp_path))


def tied_only_here(how: list[Any], folder: Path, mesh: DeviceMesh, group: Group) -> str:
    first, second = (distribute_tensor(torch.full((4, 4), value), mesh, [Shard(0)]) for value in (1.0, 2.0))
    if how == [Replicate()]:
        first, second = first.redistribute(mesh, how), second.redistribute(mesh, how)
    tied = distribute_tensor(torch.zeros(4, 4), mesh, how)
    with SyncCheckpointEngine(folder / str(how), group=group) as engine:
        engine.checkpoint({"a": first, "b": second}, step=1).result()
        with pytest.raises(StateMismatchError) as caught:
            engine.restore({"a": tied, "b": tied})
        engine.checkpoint({"a": second, "b": second}, step=2).result()
        engine.restore({"a": tied, "b": tied})
        assert torch.equal(tied.full_tensor(), second.full_tensor())
    return str(caught.value)


def each_tied(folder: Path, group: Group) -> list[str]:
    mesh = mesh_of(folder, group)
    return [tied_only_here([how], folder, mesh, group) for how in (Shard(0), Shard(1), Replicate())]


@pytest.mark.slow
def test_tensors_tied_here_were_tied_when_saved(tmp_path: Path) -> None:
    """As :class:`Shard`s they are read from other ranks; of two replicas each rank saves one."""
    for all_told in run_ranks(2, partial(each_tied, tmp_path)):
        assert all("shares memory with" in told for told in all_told)
