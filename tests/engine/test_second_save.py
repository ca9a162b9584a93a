"""A second save of a state is what a first one would be: changes that leave types, shapes and addresses alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pccheck_async import SyncCheckpointEngine, load_sync


def conjugated(state: dict[str, Any]) -> None:
    state["complex"].data = state["complex"].data.conj()


def negated(state: dict[str, Any]) -> None:
    state["real"].data = state["real"].data._neg_view()


def opened(state: dict[str, Any]) -> None:
    """A module gives detached tensors, its parameters themselves are parameters."""
    state["inside"]["module"] = OrderedDict(state["inside"]["module"]._parameters)


def with_a_property(state: dict[str, Any]) -> None:
    kind = type(state["inside"]["module"])
    kind._buffers = property(lambda self: {**vars(self)["_buffers"], "added": torch.ones(1)})


def kinds(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: kinds(each) for key, each in value.items()}
    if isinstance(value, torch.Tensor):
        return type(value).__name__, value.requires_grad, value.resolve_conj().resolve_neg().tolist()
    return value


@pytest.mark.parametrize("change", [conjugated, negated, opened, with_a_property])
def test_a_second_save_notices(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    class Linear(nn.Linear):
        pass

    state = {"complex": torch.tensor([1 + 2j]), "real": torch.ones(2), "inside": {"module": Linear(2, 2)}}
    with SyncCheckpointEngine(tmp_path / "twice") as engine:
        for step in range(2):
            engine.checkpoint(state, step=step).result(60)
        change(state)
        engine.checkpoint(state, step=2).result(60)
    with SyncCheckpointEngine(tmp_path / "once") as engine:
        engine.checkpoint(state, step=2).result(60)
    assert kinds(load_sync(tmp_path / "twice")) == kinds(load_sync(tmp_path / "once"))


class Both:
    """Gives the states of a model and of its optimizer, which has made no step."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.number = 0

    def state_dict(self) -> dict[str, Any]:
        self.number += 1
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_what_an_object_gives_is_not_refused_the_second_time(tmp_path: Path) -> None:
    state = {"both": Both()}
    with SyncCheckpointEngine(tmp_path) as engine:
        for step in range(3):
            assert engine.checkpoint(state, step=step).result(60).step == step


@dataclass
class Compared:
    """Compares its tensors, which has no truth value."""

    tensor: torch.Tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_objects_of_a_state_are_not_compared_by_their_own_code(tmp_path: Path) -> None:
    objects = Compared(torch.ones(3)), Compared(torch.zeros(3))
    with SyncCheckpointEngine(tmp_path) as engine:
        for step in range(4):
            engine.checkpoint({"x": objects[step % 2]}, step=step).result(60)
            assert load_sync(tmp_path)["x"]["tensor"].tolist() == objects[step % 2].tensor.tolist()


def test_a_number_among_the_states_of_an_optimizer_without_parameters(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.param_groups[0]["params"] = []
    optimizer.state[-1] = {"a": torch.ones(1)}  # type: ignore[index]
    with SyncCheckpointEngine(tmp_path) as engine:
        for step in range(3):
            engine.checkpoint({"x": optimizer, "step": step}, step=step).result(60)
    assert load_sync(tmp_path)["x"]["state"][-1]["a"].tolist() == [1.0]
