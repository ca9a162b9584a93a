"""``torch.distributed.checkpoint`` on stores of this package."""

from __future__ import annotations

import concurrent.futures
import io
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys, load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.futures import Future

from pccheck_async import Group, Keep, SyncCheckpointEngine, list_checkpoints, load_sync, stores
from pccheck_async.errors import IncompleteCheckpointError
from pccheck_async.integrations.dcp import StorageReader, StorageWriter
from tests.support.group_folders import spoil
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("dynamo"),
    pytest.mark.filterwarnings(
        "ignore:This process .* is multi-threaded",
        "ignore:torch.distributed is",
        "ignore:FSDP2-wrapped",
        "ignore:Please use DTensor instead",
    ),
]

FULL = torch.arange(35.0).reshape(7, 5)


def start(folder: Path, group: Group, *shape: int) -> DeviceMesh:
    """Initialise gloo, and return a mesh of all ranks."""
    rendezvous = f"file://{folder}/rendezvous-{group.world_size}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=group.rank, world_size=group.world_size)
    names = ("replicate", "shard")[-len(shape or (1,)) :]
    return init_device_mesh("cpu", shape or (group.world_size,), mesh_dim_names=names)


def state_of(mesh: DeviceMesh, value: float) -> dict[str, Any]:
    """Return tensors in all placements, and values that are none."""
    return {
        "rows": distribute_tensor(FULL * value, mesh, [Shard(0)]),
        "columns": distribute_tensor(FULL * value, mesh, [Shard(1)]),
        "copied": distribute_tensor(FULL * value, mesh, [Replicate()]),
        "plain": {"a": torch.full((3,), value), "b": [value, torch.tensor(value)], "empty": torch.empty(0, 2)},
    }


def holds(state: dict[str, Any], value: float) -> bool:
    sharded = [state[name].full_tensor() for name in ("rows", "columns", "copied")]
    plain = state["plain"]
    return (
        all(torch.equal(full, FULL * value) for full in sharded)
        and plain["a"].tolist() == [value] * 3
        and plain["b"] == [value, torch.tensor(value)]
    )


def steps_in(root: Path) -> list[int]:
    return [info.step for info in list_checkpoints(root)]


# -- saving and loading


def save_and_load(folder: Path, group: Group) -> None:
    mesh, root = start(folder, group), folder / "run"
    writer, reader = StorageWriter(root, keep_last=2), StorageReader(root)
    for step in (10, 20):
        save(state_of(mesh, step), checkpoint_id=root / f"step-{step}", storage_writer=writer)
    save(state_of(mesh, 21), storage_writer=writer)
    found = state_of(mesh, 0)
    for checkpoint_id, value in ((None, 21), (root / "step-20", 20), ("step-21", 21), (root, 21)):
        load(found, checkpoint_id=checkpoint_id, storage_reader=reader)
        assert holds(found, value), checkpoint_id
    with pytest.raises(CheckpointException, match=r"no checkpoint 'step-11'; there are: step 21, step-20"):
        load(found, checkpoint_id=root / "step-11", storage_reader=reader)
    assert holds(found, 21)
    dist.barrier()
    writer.close()


@pytest.mark.parametrize("world", [1, 2])
def test_save_and_load(tmp_path: Path, world: int) -> None:
    run_ranks(world, partial(save_and_load, tmp_path))
    assert steps_in(tmp_path / "run") == [21, 20]


@pytest.mark.parametrize("world", [1, 3])
def test_tensors_are_read_in_full_without_dcp(tmp_path: Path, world: int) -> None:
    def save_one(group: Group) -> None:
        save(state_of(start(tmp_path, group), 2.0), storage_writer=StorageWriter(tmp_path / "run"))

    run_ranks(world, save_one)
    found = load_sync(tmp_path / "run")
    assert all(torch.equal(found[name], FULL * 2) for name in ("rows", "columns", "copied"))
    assert found["plain.a"].tolist() == [2.0] * 3
    assert found["plain.b.1"].item() == 2.0


def resave(folder: Path, group: Group) -> None:
    mesh, root = start(folder, group), folder / "run"
    found = state_of(mesh, 0)
    load(found, storage_reader=StorageReader(root))
    assert holds(found, 21)
    save(state_of(mesh, 22), storage_writer=StorageWriter(root))
    load(found, storage_reader=StorageReader(root))
    assert holds(found, 22)


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    for world, work in ((2, save_and_load), (3, resave)):
        run_ranks(world, partial(work, tmp_path))
    assert steps_in(tmp_path / "run")[0] == 22  # the ranks end without close()


def test_one_process_makes_a_store_of_its_own(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": nn.Linear(3, 2).state_dict(), "step": 7, "rng": torch.get_rng_state()}
    writer = StorageWriter(tmp_path / "run")
    save(state, checkpoint_id="best", storage_writer=writer, no_dist=True)
    found: dict[str, Any] = {"model": nn.Linear(3, 2).state_dict(), "step": 0, "rng": torch.zeros_like(state["rng"])}
    load(found, checkpoint_id=tmp_path / "run" / "best", storage_reader=StorageReader(tmp_path / "run"), no_dist=True)
    assert found["step"] == 7
    assert torch.equal(found["rng"], state["rng"])
    assert torch.equal(found["model"]["weight"], state["model"]["weight"])
    assert torch.equal(load_sync(tmp_path / "run")["model.weight"], state["model"]["weight"])
    assert (tmp_path / "run" / "store.json").exists()
    writer.close()


def test_without_a_state_all_of_it_is_loaded(tmp_path: Path) -> None:
    run_ranks(2, partial(save_and_load, tmp_path))
    found = _load_state_dict_from_keys(storage_reader=StorageReader(tmp_path / "run"))
    assert torch.equal(found["rows"], FULL * 21)
    assert found["plain"]["b"] == [21, torch.tensor(21.0)]
    found = _load_state_dict_from_keys("plain", storage_reader=StorageReader(tmp_path / "run"))
    assert found.keys() == {"plain"}


def test_other_dtypes_are_converted_as_dcp_does(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path)
    save({"a": torch.arange(6.0).reshape(2, 3)}, storage_writer=writer, no_dist=True)
    found = {"a": torch.zeros(2, 3, dtype=torch.bfloat16)}
    load(found, storage_reader=StorageReader(tmp_path), no_dist=True)
    assert found["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    writer.close()


def sharded_tensors(folder: Path, group: Group) -> None:
    """Several shards on one rank; the one that saves begins in the middle."""
    start(folder, group)
    root, places = folder / "run", [(0, 3, 1), (3, 4, 0), (7, 2, 0), (9, 1, 1)]
    shards = [ShardMetadata([low, 0], [size, 4], f"rank:{rank}/cpu") for low, size, rank in places]
    full = torch.arange(40.0).reshape(10, 4)
    saved = sharded_tensor.empty(EnumerableShardingSpec(shards), 10, 4)
    for shard in saved.local_shards():
        low = shard.metadata.shard_offsets[0]
        shard.tensor.copy_(full[low : low + len(shard.tensor)])
    save({"a": saved}, storage_writer=StorageWriter(root))
    found = {"a": torch.zeros(10, 4)}
    load(found, storage_reader=StorageReader(root))
    assert torch.equal(found["a"], full)
    if group.rank == 0:
        assert torch.equal(load_sync(root)["a"], full)
    columns = ChunkShardingSpec(1, ["rank:1/cpu", "rank:0/cpu"])
    other = {"a": sharded_tensor.zeros(columns, 10, 4)}
    load(other, storage_reader=StorageReader(root))
    first = 2 * (1 - group.rank)
    assert torch.equal(other["a"].local_shards()[0].tensor, full[:, first : first + 2])


def test_sharded_tensors(tmp_path: Path) -> None:
    run_ranks(2, partial(sharded_tensors, tmp_path))


def boxes_alone(folder: Path, group: Group) -> None:
    """Each rank saves its own shards into a store of its own."""
    mesh, root = start(folder, group), folder / f"run-{group.rank}"
    rows = distribute_tensor(FULL, mesh, [Shard(0)])
    save({"rows": rows}, storage_writer=StorageWriter(root), no_dist=True)
    expected = rows.to_local().clone()
    rows.to_local().zero_()
    load({"rows": rows}, storage_reader=StorageReader(root), no_dist=True)
    assert torch.equal(rows.to_local(), expected)
    assert (root / "store.json").exists()


def test_shards_without_the_others(tmp_path: Path) -> None:
    run_ranks(2, partial(boxes_alone, tmp_path))
    with pytest.raises(IncompleteCheckpointError, match="of which this is the part of one: rows"):
        load_sync(tmp_path / "run-0")


# -- models


def model_of(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[str]:
    """Return the bits of the losses."""
    losses = []
    for step in steps:
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()).hex())
    return losses


def fsdp2(folder: Path, shape: tuple[int, ...], group: Group) -> None:
    mesh, root = start(folder, group, *shape), folder / "run"
    torch.manual_seed(3)
    model, optimizer = model_of(mesh)
    train(model, optimizer, range(2))
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": moments}, checkpoint_id=root / "step-1", storage_writer=StorageWriter(root))
    expected = train(model, optimizer, range(2, 5))
    model, optimizer = model_of(mesh)
    weights, moments = get_state_dict(model, optimizer)
    load({"model": weights, "optimizer": moments}, storage_reader=StorageReader(root))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert train(model, optimizer, range(2, 5)) == expected


@pytest.mark.parametrize("shape", [(2,), pytest.param((2, 2), marks=pytest.mark.campaign)], ids=["fsdp2", "hsdp"])
def test_fsdp2_goes_on_with_the_same_bits(tmp_path: Path, shape: tuple[int, ...]) -> None:
    run_ranks(2 * (len(shape) or 1), partial(fsdp2, tmp_path, shape))


# -- asynchronously, and with plans that are kept


def in_the_background(folder: Path, kind: AsyncCheckpointerType, group: Group) -> None:
    mesh, root = start(folder, group), folder / "run"
    os.environ["MASTER_ADDR"] = "localhost"
    writer = StorageWriter(root)
    for step in (1, 2, 3):
        state = state_of(mesh, step)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        saved = async_save(
            state,
            checkpoint_id=root / f"step-{step}",
            storage_writer=writer,
            planner=planner,
            async_checkpointer_type=kind,
        )
        assert isinstance(saved, concurrent.futures.Future)
        for tensor in (state["rows"], state["columns"], state["copied"]):
            tensor.to_local().zero_()  # what is staged is saved
        assert isinstance(saved.result(timeout=60), Metadata)
    found = state_of(mesh, 0)
    load(found, storage_reader=StorageReader(root))
    assert holds(found, 3)


@pytest.mark.parametrize(
    "kind", [AsyncCheckpointerType.THREAD, pytest.param(AsyncCheckpointerType.PROCESS, marks=pytest.mark.campaign)]
)
def test_async_save(tmp_path: Path, kind: AsyncCheckpointerType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.ranks.PATIENCE", 120.0)  # each rank starts an interpreter
    run_ranks(2, partial(in_the_background, tmp_path, kind))
    assert steps_in(tmp_path / "run")[0] == 3  # the ranks end without close()


def kept_plans(folder: Path, group: Group) -> None:
    """The plan of the first round, which tells where the ranks meet, serves other roots and later rounds."""
    mesh = start(folder, group)
    for root in (folder / "one", folder / "two"):
        for value in (1.0, 2.0):
            planner = DefaultSavePlanner(enable_plan_caching=True)
            save(state_of(mesh, value), storage_writer=StorageWriter(root), planner=planner)
            found = state_of(mesh, 0)
            load(found, storage_reader=StorageReader(root))
            assert holds(found, value)


def test_plan_caching(tmp_path: Path) -> None:
    run_ranks(2, partial(kept_plans, tmp_path))


# -- failures


class Faulty:
    """Raises in one method on some ranks."""

    fails: tuple[str, int] | None = None

    def maybe_fail(self, where: str) -> None:
        if self.fails is not None and self.fails == (where, dist.get_rank() if dist.is_initialized() else 0):
            raise ValueError(f"told to fail in {where}")


class FaultyWriter(Faulty, StorageWriter):
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.maybe_fail("set_up")
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.maybe_fail("prepare_local_plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.maybe_fail("prepare_global_plan")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.maybe_fail("write_data")
        written = super().write_data(plan, planner)
        self.maybe_fail("written")
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.maybe_fail("finish")
        super().finish(metadata, results)


class FaultyReader(Faulty, StorageReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self.maybe_fail("read_metadata")
        return super().read_metadata(*args, **kwargs)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.maybe_fail("set_up")
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        self.maybe_fail("prepare_local_plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        self.maybe_fail("prepare_global_plan")
        return super().prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self.maybe_fail("read_data")
        return super().read_data(plan, planner)


class FaultyPlanner(DefaultSavePlanner, Faulty):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.maybe_fail("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        self.maybe_fail("resolve_data")
        found: Tensor | io.BytesIO = super().resolve_data(write_item)
        return found


SAVING = [
    *(("set_up", rank) for rank in (0, 1)),
    *(("prepare_local_plan", rank) for rank in (0, 1)),
    ("prepare_global_plan", 0),
    *(("finish_plan", rank) for rank in (0, 1)),
    *(("write_data", rank) for rank in (0, 1)),
    *(("resolve_data", rank) for rank in (0, 1)),
]
TOO_LATE = [("written", 0), ("written", 1), ("finish", 0)]
"""All parts are prepared by then: the checkpoint may be there although DCP says that it failed."""


def failing_saves(folder: Path, group: Group) -> None:
    mesh, root = start(folder, group), folder / "run"
    found, reader = state_of(mesh, 0), StorageReader(root)
    value = 1.0
    save(state_of(mesh, value), storage_writer=FaultyWriter(root))
    for fails in (*SAVING, *TOO_LATE):
        writer, planner = FaultyWriter(root), FaultyPlanner()
        writer.fails = planner.fails = fails
        with pytest.raises(CheckpointException, match=f"told to fail in {fails[0]}") as raised:
            save(state_of(mesh, -1), storage_writer=writer, planner=planner)
        assert fails[1] in raised.value.failures, fails
        if fails in SAVING:
            load(found, storage_reader=reader)
            assert holds(found, value), fails
        value += 1
        save(state_of(mesh, value), storage_writer=FaultyWriter(root))
        load(found, storage_reader=reader)
        assert holds(found, value), fails
    FaultyWriter(root).close()


def test_a_failure_anywhere_fails_the_save_on_all_ranks_and_the_next_one_succeeds(tmp_path: Path) -> None:
    run_ranks(2, partial(failing_saves, tmp_path))


def first_save_fails(folder: Path, group: Group) -> None:
    """A rank that does not come to its first save is waited for, and not for ever."""
    mesh, root = start(folder, group), folder / "run"
    planner = FaultyPlanner()
    planner.fails = "finish_plan", 1
    with pytest.raises(CheckpointException, match=r"ranks 1 did not open this group within 3.0 s"):
        save(state_of(mesh, 1), storage_writer=StorageWriter(root, timeout=3.0), planner=planner)
    save(state_of(mesh, 2), storage_writer=StorageWriter(root, timeout=3.0))
    found = state_of(mesh, 0)
    load(found, storage_reader=StorageReader(root))
    assert holds(found, 2)


def test_a_failure_before_the_first_save(tmp_path: Path) -> None:
    run_ranks(2, partial(first_save_fails, tmp_path))


def failing_loads(folder: Path, group: Group) -> None:
    mesh, root = start(folder, group), folder / "run"
    save(state_of(mesh, 5), storage_writer=StorageWriter(root))
    found, reader = state_of(mesh, 0), FaultyReader(root)
    for where in ("read_metadata", "set_up", "prepare_local_plan", "prepare_global_plan", "read_data"):
        for rank in (0, 1) if where != "prepare_global_plan" else (0,):
            reader.fails = where, rank
            with pytest.raises(CheckpointException, match=f"told to fail in {where}") as raised:
                load(found, storage_reader=reader)
            assert raised.value.failures.keys() == {rank}
    reader.fails = None
    load(found, storage_reader=reader)
    assert holds(found, 5)


def test_a_failure_anywhere_fails_the_load_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, partial(failing_loads, tmp_path))


def test_without_collectives_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use_collectives=False is not supported"):
        save({"a": torch.ones(2)}, storage_writer=StorageWriter(tmp_path), no_dist=True, use_collectives=False)


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path)
    with pytest.raises(CheckpointException, match=r"UnsupportedStateError: a\.b"):
        save({"a": {"b": torch.ones(3).to_sparse()}}, storage_writer=writer, no_dist=True)
    save({"a": {"b": torch.ones(3)}}, storage_writer=writer, no_dist=True)
    writer.close()


def test_damage_is_named(tmp_path: Path) -> None:
    run_ranks(2, partial(save_and_load, tmp_path))
    root = tmp_path / "run"
    spoil(root, 1)
    with pytest.raises(CheckpointException, match=r"DamagedError: .*chunk 0") as raised:
        _load_state_dict_from_keys(storage_reader=StorageReader(root))
    assert "may hold parts" in raised.value.failures[0][0].__notes__[0]


def test_what_was_rejected_is_passed_over(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path, keep_last=3)
    for step in (1, 2):
        save({"a": torch.full((3,), float(step))}, checkpoint_id=f"step-{step}", storage_writer=writer, no_dist=True)
    writer.close()
    assert [info.step for info in stores.reject(tmp_path, step=2)] == [2]
    found = {"a": torch.zeros(3)}
    load(found, storage_reader=StorageReader(tmp_path), no_dist=True)
    assert found["a"].tolist() == [1, 1, 1]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="run does not exist, so it holds no store"):
        load({"a": torch.ones(2)}, storage_reader=StorageReader(tmp_path / "run"), no_dist=True)


def killed(folder: Path, group: Group) -> None:
    mesh, root = start(folder, group), folder / "run"
    save(state_of(mesh, 1), checkpoint_id="step-1", storage_writer=StorageWriter(root))

    class Dies(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().resolve_data(write_item)

    try:
        save(state_of(mesh, 2), checkpoint_id="step-2", storage_writer=StorageWriter(root), planner=Dies())
    except (CheckpointException, RuntimeError):
        os.kill(os.getpid(), signal.SIGKILL)  # as a launcher does


def goes_on(folder: Path, group: Group) -> None:
    mesh, root = start(folder / "again", group), folder / "run"
    found = state_of(mesh, 0)
    load(found, storage_reader=StorageReader(root))
    assert holds(found, 1)
    save(state_of(mesh, 3), checkpoint_id="step-3", storage_writer=StorageWriter(root))
    load(found, storage_reader=StorageReader(root))
    assert holds(found, 3)


def test_killed_in_a_save(tmp_path: Path) -> None:
    statuses: list[int] = []
    run_ranks(2, partial(killed, tmp_path), statuses=statuses)
    assert statuses == [-signal.SIGKILL] * 2
    assert steps_in(tmp_path / "run") == [1]
    (tmp_path / "again").mkdir()
    run_ranks(2, partial(goes_on, tmp_path))
    assert steps_in(tmp_path / "run")[0] == 3  # the ranks end without close()


# -- what an engine saved


def test_a_checkpoint_of_an_engine_is_loaded_under_the_names_of_dcp(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"model": model, "optimizer": optimizer, "n": 4, "names": ["a"]}, step=10).result()
    state: dict[str, Any] = {
        "model": nn.Linear(3, 2).state_dict(),
        "n": 0,
        "names": [""],
        "optimizer": optimizer.state_dict(),
    }
    expected = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    state["optimizer"]["state"][0]["exp_avg"].zero_()
    load(state, checkpoint_id="step-10", storage_reader=StorageReader(tmp_path), no_dist=True)
    assert torch.equal(state["model"]["weight"], model.weight)
    assert torch.equal(state["optimizer"]["state"][0]["exp_avg"], expected)
    assert (state["n"], state["names"]) == (4, ["a"])


def of_a_group(folder: Path, group: Group) -> None:
    mesh, root = start(folder, group), folder / "run"
    with SyncCheckpointEngine(root, group=group) as engine:
        state = state_of(mesh, 6) | {"own": torch.tensor(group.rank + 5), f"only-{group.rank}": torch.ones(2)}
        engine.checkpoint(state, step=1).result()
    found = state_of(mesh, 0) | {"own": torch.tensor(0), "only-1": torch.zeros(2)}
    load(found, storage_reader=StorageReader(root))
    assert holds(found, 6)
    assert found["own"] == 5  # the lowest rank's
    assert found["only-1"].tolist() == [1, 1]
    assert isinstance(found["rows"], DTensor)


def test_a_checkpoint_of_a_group_is_loaded(tmp_path: Path) -> None:
    run_ranks(2, partial(of_a_group, tmp_path))


def test_settings_of_before_work_with_a_warning(tmp_path: Path) -> None:
    now = r"StorageWriter\(keep=Keep\(every=3\), storage=StorageOptions\(io='python'\)\) now"
    with pytest.warns(DeprecationWarning, match=rf"^StorageWriter\(keep_every=3, io='python'\) is {now}"):
        writer = StorageWriter(tmp_path, keep_last=2, keep_every=3, io="python")
    state = {"x": torch.ones(3)}
    for step in range(4):
        save(state, checkpoint_id=f"step-{step}", storage_writer=writer, no_dist=True)
    writer.close()
    assert [info.step for info in list_checkpoints(tmp_path)] == [3, 2]
    with pytest.raises(TypeError, match=r"give keep_every= or keep=Keep\(every=\.\.\.\), not both"):
        StorageWriter(tmp_path, keep=Keep(every=2), keep_every=3)
