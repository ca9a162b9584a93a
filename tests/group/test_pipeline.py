"""Stages of a pipeline are put together by the names of what they hold: on another number of stages, and when read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from pccheck_async import Group, StateMismatchError, SyncCheckpointEngine, load_sync, stores
from pccheck_async.state.boxes import local_tensors
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("dynamo"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded", "ignore:FSDP2-wrapped module"),
]
LAYERS = 5


def layer(number: int) -> nn.Linear:
    torch.manual_seed(number)
    return nn.Linear(6 + number, 7 + number)


def stage_of(folder: Path, group: Group, stages: int) -> dict[str, Any]:
    """Return the state of the stage that a rank has: layers that follow each other; each stage on as many ranks."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=group.rank, world_size=group.world_size
    )
    width = group.world_size // stages
    stage = group.rank // width
    numbers = [number for number in range(LAYERS) if number * stages // LAYERS == stage]
    model = nn.ModuleDict({f"layer{number}": layer(number) for number in numbers})
    if width > 1:
        meshes = [DeviceMesh("cpu", [*range(first, first + width)]) for first in range(0, group.world_size, width)]
        for each in model.values():
            fully_shard(each, mesh=meshes[stage])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    flat: dict[str, Any] = {}  # as get_optimizer_state_dict(flatten_optimizer_state_dict=True) names it
    for name, parameter in model.named_parameters():
        flat |= {f"state.{name}.{kind}": value for kind, value in optimizer.state[parameter].items()}
        flat[f"param_groups.{name}.lr"] = 0.1 + int(name[5])
    return {"model": model, "optimizer": flat, "stages": stages, "rank": group.rank}


def tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Return what is below model and optimizer, local tensors of DTensors."""
    found = {**state["model"].state_dict(), **state["optimizer"]}
    names, values = [*found], [*found.values()]
    arrays = iter(local_tensors([value for value in values if isinstance(value, Tensor)]))
    return {n: next(arrays).clone() if isinstance(v, Tensor) else v for n, v in zip(names, values, strict=True)}


def saved(folder: Path, stages: int, group: Group) -> None:
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        engine.checkpoint(stage_of(folder, group, stages), step=1).result()


def restored(folder: Path, stages: int, before: int, group: Group) -> None:
    state = stage_of(folder, group, stages)
    expected = tensors(state)
    for value in (*state["model"].parameters(), *state["optimizer"].values()):
        if isinstance(value, Tensor):
            local_tensors([value.detach()])[0].zero_()
    state["optimizer"] = {name: v if isinstance(v, Tensor) else -1.0 for name, v in state["optimizer"].items()}
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        if stages > before and before == 1:
            with pytest.raises(StateMismatchError, match="layer"):  # one rank has what this stage does not
                engine.restore(state)
        info = engine.restore(state, strict=stages <= before and stages == 1)
    assert info is not None
    assert not info.missing
    found = tensors(state)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value
    assert state["stages"] == before


Once: TypeAlias = "Callable[[int, Callable[[Path, Group], object]], tuple[Path, list[Any]]]"


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Return the folder of what so many ranks saved with a function, and what they returned: they run once for all."""

    @cache
    def ran(world: int, save: Callable[[Path, Group], object]) -> tuple[Path, list[Any]]:
        folder = tmp_path_factory.mktemp("saved")
        return folder / "run", run_ranks(world, partial(save, folder))

    return ran


@cache
def saving(stages: int) -> Callable[[Path, Group], None]:
    return lambda folder, group: saved(folder, stages, group)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((2, 2), (1, 1), marks=pytest.mark.campaign),
        pytest.param((2, 2), (3, 3), marks=pytest.mark.campaign),
        ((1, 1), (2, 2)),
        ((2, 4), (1, 2)),
        ((2, 4), (3, 3)),
    ],
)
def test_a_pipeline_is_split_otherwise(
    tmp_path: Path, once: Once, before: tuple[int, int], after: tuple[int, int]
) -> None:
    run, _ = once(before[1], saving(before[0]))
    shutil.copytree(run, tmp_path / "run")
    run_ranks(after[1], partial(restored, tmp_path, after[0], before[0]))


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Pipeline:
    """A stage of a training: activations go to the next rank, gradients to the one before."""

    def __init__(self, folder: Path, group: Group) -> None:
        rendezvous = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=rendezvous, rank=group.rank, world_size=group.world_size)
        self.rank, self.last = group.rank, group.world_size - 1
        self.numbers = [number for number in range(LAYERS) if number * group.world_size // LAYERS == group.rank]
        self.model = nn.ModuleDict({f"layer{number}": layer(number) for number in self.numbers})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)}

    def train(self, steps: range) -> list[float]:
        """Return the losses: on the last stage."""
        losses = []
        for step in steps:
            batch = torch.randn(8, 6 + self.numbers[0], generator=torch.Generator().manual_seed(step))
            if self.rank > 0:
                dist.recv(batch, self.rank - 1)
            hidden = batch.requires_grad_()
            for each in self.model.values():
                hidden = torch.tanh(each(hidden))
            if self.rank < self.last:
                dist.send(hidden.detach(), self.rank + 1)
                gradient = torch.empty_like(hidden)
                dist.recv(gradient, self.rank + 1)
                hidden.backward(gradient)  # type: ignore[no-untyped-call]
            else:
                loss = (hidden - 0.3).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.item())
            if self.rank > 0:
                assert batch.grad is not None
                dist.send(batch.grad, self.rank - 1)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses


def trained(folder: Path, group: Group) -> list[float]:
    pipeline = Pipeline(folder, group)
    pipeline.train(range(3))
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        engine.checkpoint(pipeline.state(), step=2).result()
    return pipeline.train(range(3, 8))


def resumed(folder: Path, group: Group) -> list[float]:
    pipeline = Pipeline(folder, group)
    pipeline.train(range(20, 21))  # other weights and moments
    state = pipeline.state()
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        assert engine.restore(state, strict=group.world_size < 3) is not None
    set_optimizer_state_dict(pipeline.model, pipeline.optimizer, state["optimizer"], options=FLAT)
    return pipeline.train(range(3, 8))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_pipeline_goes_on_with_the_same_losses(tmp_path: Path, once: Once, world: int) -> None:
    run, (*_, expected) = once(2, trained)
    assert len(expected) == 5
    shutil.copytree(run, tmp_path / "run")
    found = run_ranks(world, partial(resumed, tmp_path))[-1]
    assert found == (expected if world == 2 else pytest.approx(expected, rel=1e-6))


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.campaign), 4])
def test_all_stages_are_read_as_one_state(tmp_path: Path, once: Once, world: int) -> None:
    run, _ = once(world, saving(2))
    for rank in (None, 1):
        found = load_sync(run, rank=rank)
        assert found["rank"] == (rank or 0)
        assert {name[:6] for name in found["model"]} == {f"layer{number}" for number in range(LAYERS)}
        assert len(found["optimizer"]) == LAYERS * 2 * 4
        for name, value in found["model"].items():
            assert value.shape == layer(int(name[5])).state_dict()[name[7:]].shape
            assert value.count_nonzero() == value.numel()
    stores.export(run, tmp_path / "file", to="safetensors", keys=["model"])
    exported = load_file(tmp_path / "file")
    assert len(exported) == 2 * LAYERS
    read = load_sync(run, keys=["model.layer4.weight"])["model"]["layer4.weight"]
    assert torch.equal(exported["model.layer4.weight"], read)
