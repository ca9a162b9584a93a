"""Names under which ranks have different tensors: another number of ranks, and who reads without naming a rank."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

from pccheck_async import Group, RNGState, StateMismatchError, SyncCheckpointEngine, load_sync, open_checkpoint, stores
from pccheck_async.cli import app
from pccheck_async.errors import DamagedError
from pccheck_async.store import differing
from tests.engine.test_failures import flip
from tests.group.test_sharded import mesh_of
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("dynamo"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]
States = Callable[[int], dict[str, Any]]
"""The state of a rank."""


def save(folder: Path, states: States, group: Group) -> None:
    with SyncCheckpointEngine(folder, group=group) as engine:
        engine.checkpoint(states(group.rank), step=1).result()


def restored(folder: Path, states: States, group: Group, **arguments: Any) -> dict[str, Any] | StateMismatchError:
    """Return what a rank restores; or the error, where nothing was changed."""
    state = {name: zeroed(value) for name, value in states(group.rank).items()}
    before = {name: getattr(value, "clone", lambda value=value: value)() for name, value in state.items()}
    with SyncCheckpointEngine(folder, group=group) as engine:
        try:
            engine.restore(state, **arguments)
        except StateMismatchError as error:
            assert all(torch.equal(torch.as_tensor(before[name]), torch.as_tensor(state[name])) for name in before)
            return error
    return state


def zeroed(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else np.zeros_like(value)


def experts(rank: int, number: int = 1) -> dict[str, Any]:
    """A tensor that all ranks have alike, and experts of each rank under the same names."""
    return {"alike": torch.arange(5.0)} | {
        f"expert{each:02}": torch.full((3,), float(10 * each + rank)) for each in range(number)
    }


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_experts_of_another_world_are_refused_by_name(tmp_path: Path, before: int, after: int) -> None:
    states = partial(experts, number=25)
    run_ranks(before, partial(save, tmp_path, states))
    told = run_ranks(after, partial(restored, tmp_path, states))
    for each in told:
        assert isinstance(each, StateMismatchError)
        assert "expert00, expert01, " in str(each)
        assert "expert19, ...;" in str(each)
        assert "alike" not in str(each)
        assert 'private="modulo"' in str(each)


def test_one_expert_that_differs_is_enough(tmp_path: Path) -> None:
    """Only the last rank has another one, and in the last byte."""

    def states(rank: int) -> dict[str, Any]:
        many = torch.zeros(100_000, dtype=torch.uint8)
        many[-1] = rank // 3
        return {"first": torch.full((rank + 1,), 1.0)[:1], "many": many}

    run_ranks(4, partial(save, tmp_path, states))
    told = run_ranks(3, partial(restored, tmp_path, states))
    assert ["name: many;" in str(each) for each in told] == [True] * 3


def test_ranks_restore_modulo_the_old_number_where_it_is_said(tmp_path: Path) -> None:
    run_ranks(2, partial(save, tmp_path, experts))
    found = run_ranks(4, partial(restored, tmp_path, experts, private="modulo"))
    assert [each["expert00"].tolist() for each in found] == [[0.0] * 3, [1.0] * 3] * 2
    found = run_ranks(3, partial(restored, tmp_path, experts, private=["exp*"]))
    assert [each["expert00"][0].item() for each in found] == [0.0, 1.0, 0.0]
    told = run_ranks(1, partial(restored, tmp_path, experts, private=["alike"]))
    assert isinstance(told[0], StateMismatchError)
    with SyncCheckpointEngine(tmp_path / "single") as engine, pytest.raises(ValueError, match="private is 'modulo' or"):
        engine.restore({}, private="mod")


def test_what_a_partial_restore_leaves_out_may_differ(tmp_path: Path) -> None:
    run_ranks(2, partial(save, tmp_path, experts))
    (found,) = run_ranks(1, partial(restored, tmp_path, lambda _: {"alike": torch.ones(5)}, strict=False))
    assert found["alike"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def alike(rank: int) -> dict[str, Any]:
    """Equal values that lie elsewhere on each rank, and in another order of memory."""
    matrix = torch.arange(60_000.0).reshape(200, 300)
    return {
        "before": torch.zeros(1_000 * rank + 1)[:1],
        "matrix": matrix if rank % 2 else matrix.t().contiguous().t(),
        "reversed": np.arange(1000)[::-1],
        "half": matrix.to(torch.bfloat16)[::2],
        "empty": torch.zeros(0, 3),
        "rng": RNGState().state_dict(),
    }


def test_equal_tensors_are_found_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differing, "_BATCH_BYTES", 1_000)

    def seeded(rank: int) -> dict[str, Any]:
        torch.manual_seed(rank)
        return alike(rank)

    run_ranks(3, partial(save, tmp_path, seeded))

    def rank_main(group: Group) -> None:
        state = {**alike(0), "rng": RNGState()}
        state["matrix"].zero_()
        with SyncCheckpointEngine(tmp_path, group=group) as engine:
            engine.restore(state)
        assert torch.equal(state["matrix"], alike(0)["matrix"])

    run_ranks(2, rank_main)
    assert stores.describe(tmp_path).differing == ()


def test_other_shapes_and_dtypes_differ(tmp_path: Path) -> None:
    def states(rank: int) -> dict[str, Any]:
        kind = np.float32 if rank else np.float64
        return {"shape": torch.zeros(rank + 1, 0), "dtype": np.zeros(0, kind), "both": torch.zeros(2)}

    run_ranks(2, partial(save, tmp_path, states))
    assert stores.describe(tmp_path).differing == ("dtype", "shape")


def normalised(folder: Path, broadcast: bool, saves: bool, group: Group) -> str:
    """Save a DDP model whose averages differ by rank; or restore it, and return what that said."""
    mesh_of(folder, group)
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    model.broadcast_buffers = broadcast
    torch.manual_seed(group.rank)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "rng": RNGState()}
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        if saves:
            engine.checkpoint(state, step=1).result()
            return ""
        try:
            engine.restore(state)
        except StateMismatchError as error:
            return str(error)
    model(torch.zeros(2, 4))
    averages = [model.module[1].running_mean.clone() for _ in range(group.world_size)]
    dist.all_gather(averages, model.module[1].running_mean)
    model.eval()
    return "" if all(torch.equal(each, averages[0]) for each in averages) else "they differ"


@pytest.mark.parametrize("broadcast", [True, False])
def test_averages_of_batches_stop_no_restart_where_ddp_makes_them_alike(tmp_path: Path, broadcast: bool) -> None:
    run_ranks(2, partial(normalised, tmp_path, broadcast, True))
    (tmp_path / "rendezvous").unlink()
    told = run_ranks(3, partial(normalised, tmp_path, broadcast, False))
    wanted = "" if broadcast else r"model.module.1.running_mean, model.module.1.running_var;"
    assert all(wanted in each and bool(each) != broadcast for each in told)


def stage(folder: Path, same: bool, group: Group) -> None:
    mesh_of(folder, group)
    mine = DeviceMesh("cpu", [group.rank])
    value = torch.arange(4.0) + (0 if same else group.rank)
    save(folder / "run", lambda _: {"w": distribute_tensor(value, mine, [Replicate()])}, group)


@pytest.mark.parametrize("same", [True, False])
def test_tensors_of_one_name_on_other_ranks_are_compared(tmp_path: Path, same: bool) -> None:
    run_ranks(2, partial(stage, tmp_path, same))
    (found,) = run_ranks(1, partial(restored, tmp_path / "run", lambda _: {"w": torch.zeros(4)}))
    if same:
        assert found["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    else:
        assert "under one name: w;" in str(found)


def test_what_is_on_filesystems_not_seen_here_cannot_be_compared(tmp_path: Path) -> None:
    def on_node(work: Any, node: int, group: Group) -> Any:
        folder = tmp_path / f"node{node}"
        folder.mkdir(exist_ok=True)
        return work(folder / "run", lambda _: {"alike": torch.ones(3)}, group)

    run_ranks(2, lambda group: on_node(save, group.rank, group))
    told = run_ranks(3, lambda group: on_node(restored, group.rank % 2, group))
    assert ["not seen here) under one name: alike;" in str(each) for each in told] == [True] * 3


# -- reading without naming a rank


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "run"
    run_ranks(2, partial(save, path, experts))
    return path


def test_load_and_open_say_that_other_ranks_have_other_tensors(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def warned(work: Callable[[], Any]) -> list[str]:
        caplog.clear()
        work()
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    (text,) = warned(lambda: load_sync(folder))
    assert "those of rank 0 are taken: expert00;" in text
    assert warned(lambda: open_checkpoint(folder).close()) == [text]
    assert not warned(lambda: load_sync(folder, rank=0))
    assert not warned(lambda: open_checkpoint(folder, rank=1).close())
    assert not warned(lambda: load_sync(folder, keys=["alike"]))
    assert warned(lambda: load_sync(folder, keys=["alike", "expert00"])) == [text]


def test_what_is_damaged_in_another_ranks_part_is_in_nobodys_way(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = tmp_path / "run"
    shutil.copytree(folder, damaged)
    (slot,) = [each for each in damaged.glob("rank-00001/slot-*") if any(each.read_bytes())]
    flip(slot, 0)
    assert torch.equal(load_sync(damaged)["expert00"], torch.zeros(3))
    with open_checkpoint(damaged) as checkpoint:
        assert torch.equal(checkpoint["expert00"], torch.zeros(3))
    assert stores.describe(damaged).differing == ()
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 3
    assert "is not known, as a part of theirs cannot be read: rank-00001/slot-" in said[0]
    with pytest.raises(DamagedError):  # which may be the ones that are meant
        stores.export(damaged, tmp_path / "out.pt", to="torch")


def test_export_wants_to_know_the_rank(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StateMismatchError, match=r"expert00; name the rank") as caught:
        stores.export(folder, tmp_path / "out.pt", to="torch")
    assert caught.value.mismatched == ("expert00",)
    assert not list(tmp_path.iterdir())
    stores.export(folder, tmp_path / "alike.pt", to="torch", keys=["alike"])
    stores.export(folder, tmp_path / "one.pt", to="torch", rank=1)
    assert torch.load(tmp_path / "one.pt")["expert00"].tolist() == [1.0] * 3


def test_show_and_export_at_the_command_line(folder: Path, tmp_path: Path) -> None:
    assert stores.describe(folder).differing == ("expert00",)
    assert stores.describe(folder, rank=0).differing == ()
    shown = CliRunner().invoke(app, ["show", str(folder), "--json"])
    assert json.loads(shown.stdout)["differing"] == ["expert00"]
    assert "other ranks have different tensors: expert00; see --rank" in shown.stderr
    assert not CliRunner().invoke(app, ["show", str(folder), "--rank=0"]).stderr
    refused = CliRunner().invoke(app, ["export", str(folder), str(tmp_path / "out"), "--to=torch"])
    assert refused.exit_code == 1
    assert "--rank 0" in refused.stderr
