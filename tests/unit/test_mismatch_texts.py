"""Every text of StateMismatchError about a state and a checkpoint, word for word: how it is provoked and what it says.

Each row is independent of the way in which states are compared, so that the comparison can be rebuilt under it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from pccheck_async.errors import StateMismatchError
from pccheck_async.format.manifest import TensorEntry
from pccheck_async.state import FlatShard, Owners, match
from pccheck_async.state.boxes import whole
from pccheck_async.state.restore.parts import StoredBox, Wanted, reshard
from tests.support.round_trip import save
from tests.unit.test_composed import OtherScaled, scaled

HEAD = "the checkpoint does not fit this state; nothing was restored. "
MISSING = "missing from the checkpoint"
UNEXPECTED = "unexpected in the checkpoint"
DIFFERENT = "different in the checkpoint"
LENIENT = "to restore what both have: restore(state, strict=False)"
PART = "to take only part of it: load(path, keys=[...])"
UNLIKE = "leave that out of the state, or take load(path, keys=[...]), change its names, and give it to load_state_dict"
SIZES = "has other sizes here (another width, or number of classes?); make it with the sizes that were saved"
ALONE = "take it out of the state, and call restore(state, strict=False)"
NAMES = (
    "put the module that has them into the state, too, or give the optimizer its named_parameters() (from torch 2.6 on)"
)


class Thing:
    """A Stateful that refuses a state with another table, if it is told to check."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.state = dict(state_dict)


class Checking(Thing):
    def check_state_dict(self, state_dict: dict[str, Any], /) -> None:
        raise ValueError("another table")


class Wrapped(nn.Module):
    def __init__(self, attribute: str) -> None:
        super().__init__()
        setattr(self, attribute, nn.Linear(2, 2))


class Special(torch.Tensor):
    """A tensor of a user's class."""


class Row(NamedTuple):
    """One text: what was saved, the live state, and what ``restore`` says."""

    name: str
    saved: Callable[[], Mapping[str, Any]]
    live: Callable[[], Mapping[str, Any]]
    text: str
    strict: bool = True


def read_only() -> np.ndarray[Any, Any]:
    array = np.zeros(2)
    array.flags.writeable = False
    return array


def freed() -> torch.Tensor:
    tensor = torch.zeros(2)
    tensor.untyped_storage().resize_(0)
    return tensor


def views(join: bool) -> dict[str, Any]:
    base = torch.zeros(4)
    return {"a": base, "b": base[2:] if join else torch.ones(2)}


def conjugated() -> dict[str, Any]:
    waves = torch.ones(3, dtype=torch.complex64)
    return {"w": waves, "c": waves.conj()}


def adam(*sizes: int, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(size)) for size in sizes], **options)
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = torch.ones_like(each)
    optimizer.step()
    return optimizer


def named(*names: str) -> Thing:
    state = adam(*range(1, 1 + len(names))).state_dict()
    state["state"] = {name: state["state"][number] for number, name in enumerate(names)}
    state["param_groups"][0]["params"] = [*names]
    return Thing(**state)


def moments(*names: str) -> Thing:
    state = adam(*range(1, 1 + len(names))).state_dict()
    state["state"] = {name: state["state"][number] for number, name in enumerate(names)}
    return Thing(**state)


def flat(*values: float, shape: tuple[int, ...] = (4,), start: int = 0) -> FlatShard:
    return FlatShard(torch.tensor(values), shape, start)


def tied(together: bool) -> dict[str, Any]:
    memory = torch.zeros(2)
    return {
        "s": FlatShard(memory, (4,), 0),
        "t": FlatShard(memory if together else torch.ones(2), (4,), 0 if together else 2),
    }


def sgd(*sizes: int) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(size))]} for size in sizes], lr=0.1)


ROWS = (
    Row(
        "missing and unexpected",
        lambda: {"a": 1, "c": 3},
        lambda: {"a": 0, "b": 2},
        f"{HEAD}{LENIENT}; {PART}. {MISSING} (1): b; {UNEXPECTED} (1): c",
    ),
    Row(
        "unexpected below",
        lambda: {"a": {"t": torch.ones(1), "u": 1}},
        lambda: {"a": {"t": torch.ones(1)}},
        f"{HEAD}{LENIENT}. {UNEXPECTED} (1): a.u",
    ),
    Row(
        "more than five",
        lambda: {f"k{number}": 1 for number in range(25)},
        lambda: {"k0": 0},
        f"{HEAD}{LENIENT}; {PART}. {UNEXPECTED} (24): k1, k2, k3, k4, k5 and 19 more",
    ),
    Row(
        "nothing in common",
        lambda: {"a": 1},
        lambda: {"b": 1},
        f"{HEAD}they have nothing in common; {PART}. {MISSING} (1): b; {UNEXPECTED} (1): a",
    ),
    Row(
        "nothing in common, not strict",
        lambda: {"a": 1},
        lambda: {"b": 1},
        f"{HEAD}they have nothing in common; {PART}. {MISSING} (1): b; {UNEXPECTED} (1): a",
        strict=False,
    ),
    Row(
        "a model that was renamed",
        lambda: {"model": nn.Linear(1, 1), "optimizer": adam(1), "epoch": 1},
        lambda: {"net": nn.Linear(1, 1), "optimizer": adam(1), "epoch": 0},
        (
            f"{HEAD}'net' is missing and 'model' is unexpected, with equal leaves: was it renamed? "
            f'restore it by the name that was saved: restore({{"model": ..., ...}}). '
            f"{MISSING} (1): net; {UNEXPECTED} (1): model"
        ),
    ),
    Row(
        "an optimizer that was renamed, before its first step",
        lambda: {"model": nn.Linear(1, 1), "optimizer": adam(1), "rng": Thing(x=1)},
        lambda: {"model": nn.Linear(1, 1), "opt": torch.optim.Adam([nn.Parameter(torch.ones(1))]), "rng": Thing(x=0)},
        (
            f"{HEAD}'opt' is missing and 'optimizer' is unexpected, with equal leaves: was it renamed? "
            f'restore it by the name that was saved: restore({{"optimizer": ..., ...}}). '
            f"{MISSING} (1): opt; {UNEXPECTED} (1): optimizer"
        ),
        strict=False,
    ),
    Row(
        "two models, of which either may be the renamed one",
        lambda: {"model": nn.Linear(1, 1), "epoch": 1},
        lambda: {"one": nn.Linear(1, 1), "two": nn.Linear(1, 1), "epoch": 0},
        f"{HEAD}nothing in common below one, two; {UNLIKE}; {PART}. {MISSING} (2): one, two; {UNEXPECTED} (1): model",
    ),
    Row(
        "another object than the one that is missing",
        lambda: {"scheduler": Thing(last=1), "epoch": 1},
        lambda: {"sampler": Thing(position=1), "epoch": 0},
        f"{HEAD}{LENIENT}; {PART}. {MISSING} (1): sampler; {UNEXPECTED} (1): scheduler",
    ),
    Row(
        "a model that was not saved",
        lambda: {"model": nn.Linear(1, 1), "epoch": 1},
        lambda: {"model": nn.Linear(1, 1), "ema": nn.Linear(1, 1), "epoch": 0},
        f"{HEAD}nothing in common below ema; {UNLIKE}. {MISSING} (1): ema",
        strict=False,
    ),
    Row(
        "the state of Lightning",
        lambda: {"model": nn.Linear(1, 1), "optimizers": [], "lr_schedulers": [], "callbacks": 1, "loops": 1},
        lambda: {"model": nn.Linear(1, 1), "optimizer": adam(1), "step": 0},
        (
            f"{HEAD}it was saved through pccheck_async.integrations.lightning.PCcheckCallback; go on through that; "
            f"{PART}. {MISSING} (2): optimizer, step; {UNEXPECTED} (4): optimizers, lr_schedulers, callbacks and 1 more"
        ),
    ),
    Row(
        "another precision",
        lambda: {"m": nn.Linear(1, 1)},
        lambda: {"m": nn.Linear(1, 1).bfloat16()},
        (
            f"{HEAD}the dtypes differ; to cast: restore(state, dtype=torch.bfloat16). {DIFFERENT} (2): m.weight "
            "(bfloat16 (1, 1) here, float32 (1, 1) in the checkpoint), m.bias (bfloat16 (1,) here, float32 (1,) in the "
            "checkpoint)"
        ),
    ),
    Row(
        "nothing in common below a name",
        lambda: {"m": {"x": torch.ones(1)}, "step": 1},
        lambda: {"m": {"y": torch.ones(1)}, "step": 0},
        f"{HEAD}nothing in common below m; {UNLIKE}. {MISSING} (1): m.y; {UNEXPECTED} (1): m.x",
    ),
    Row(
        "nothing in common below a name, not strict",
        lambda: {"m": {"x": torch.ones(1)}, "step": 1},
        lambda: {"m": {"y": torch.ones(1)}, "step": 0},
        f"{HEAD}nothing in common below m; {UNLIKE}. {MISSING} (1): m.y; {UNEXPECTED} (1): m.x",
        strict=False,
    ),
    Row(
        "no module in common",
        lambda: {"m": [nn.Identity(), 1]},
        lambda: {"m": [nn.Linear(1, 1), 1]},
        f"{HEAD}nothing in common below m.0; {UNLIKE}. {MISSING} (2): m.0.weight, m.0.bias",
        strict=False,
    ),
    Row(
        "wrapped by DDP here",
        lambda: {"m": nn.Linear(2, 2)},
        lambda: {"m": Wrapped("module")},
        (
            f"{HEAD}a model here is wrapped by DistributedDataParallel or its like: save and restore the "
            "module inside (model.module). "
            f"{MISSING} (2): m.module.weight, m.module.bias; {UNEXPECTED} (2): m.weight, m.bias"
        ),
    ),
    Row(
        "wrapped by DDP in the checkpoint",
        lambda: {"m": Wrapped("module"), "step": 1},
        lambda: {"m": nn.Linear(2, 2), "step": 0},
        (
            f"{HEAD}a model in the checkpoint is wrapped by DistributedDataParallel or its like: save and "
            "restore the module inside (model.module). "
            f"{MISSING} (2): m.weight, m.bias; {UNEXPECTED} (2): m.module.weight, m.module.bias"
        ),
        strict=False,
    ),
    Row(
        "compiled here",
        lambda: {"m": nn.Linear(2, 2)},
        lambda: {"m": Wrapped("_orig_mod")},
        (
            f"{HEAD}a model here is wrapped by torch.compile: save and restore the module inside "
            "(model._orig_mod). "
            f"{MISSING} (2): m._orig_mod.weight, m._orig_mod.bias; {UNEXPECTED} (2): m.weight, m.bias"
        ),
    ),
    Row(
        "compiled in the checkpoint",
        lambda: {"m": Wrapped("_orig_mod"), "step": 1},
        lambda: {"m": nn.Linear(2, 2), "step": 0},
        (
            f"{HEAD}a model in the checkpoint is wrapped by torch.compile: save and restore the module "
            "inside (model._orig_mod). "
            f"{MISSING} (2): m.weight, m.bias; {UNEXPECTED} (2): m._orig_mod.weight, m._orig_mod.bias"
        ),
        strict=False,
    ),
    Row(
        "missing and different",
        lambda: {"a": torch.ones(2), "c": 1},
        lambda: {"a": torch.ones(3), "b": 1},
        (
            f"{HEAD}a {SIZES}; {PART}. "
            f"{MISSING} (1): b; {UNEXPECTED} (1): c; {DIFFERENT} (1): a (float32 (3,) here, float32 (2,) in "
            "the checkpoint)"
        ),
    ),
    Row(
        "items",
        lambda: {"a": [torch.ones(1)] * 2},
        lambda: {"a": [torch.ones(1)]},
        f"{HEAD}{DIFFERENT} (1): a (1 items here, 2 in the checkpoint)",
    ),
    Row(
        "a value that cannot change",
        lambda: {"a": (torch.ones(1), 3)},
        lambda: {"a": (torch.ones(1), 4)},
        f"{HEAD}{DIFFERENT} (1): a.1 (another value, in a container that cannot change; use a dict or a list)",
    ),
    Row(
        "a value in a mapping that cannot change",
        lambda: {"step": 3},
        lambda: MappingProxyType({"step": 4}),
        f"{HEAD}{DIFFERENT} (1): step (another value, in a container that cannot change; use a dict or a list)",
    ),
    Row(
        "an object without a place",
        lambda: {"best": {"net": Thing(x=1)}},
        lambda: {"best": None},
        f"{HEAD}{DIFFERENT} (1): best.net (an object in the checkpoint: put one there, or None for its state)",
    ),
    Row(
        "an object without an entry",
        lambda: {"best": {"nets": [1, Thing(x=1)]}},
        lambda: {"best": {"nets": [1]}},
        f"{HEAD}{DIFFERENT} (1): best.nets.1 (an object in the checkpoint: put one there, or None for its state)",
    ),
    Row(
        "a placeholder that cannot change",
        lambda: {"a": (torch.ones(1), torch.ones(1))},
        lambda: {"a": (torch.ones(1), None)},
        f"{HEAD}{DIFFERENT} (1): a.1 (a NoneType here, a tensor float32 (1,) in the checkpoint)",
    ),
    Row(
        "a tensor here, a value there",
        lambda: {"a": 3},
        lambda: {"a": torch.ones(1)},
        f"{HEAD}{DIFFERENT} (1): a (a Tensor here, an int in the checkpoint)",
    ),
    Row(
        "a parameter here, a dict there",
        lambda: {"a": {"x": torch.ones(1)}},
        lambda: {"a": nn.Parameter(torch.ones(1))},
        f"{HEAD}{DIFFERENT} (1): a (a Parameter here, a Dict in the checkpoint)",
    ),
    Row(
        "an array here, an object there",
        lambda: {"a": Thing(x=1)},
        lambda: {"a": np.ones(1)},
        f"{HEAD}{DIFFERENT} (1): a (a ndarray here, a Stateful in the checkpoint)",
    ),
    Row(
        "another container",
        lambda: {"a": {"x": torch.ones(1)}},
        lambda: {"a": [torch.ones(1)]},
        f"{HEAD}{DIFFERENT} (1): a (a list here, a Dict in the checkpoint)",
    ),
    Row(
        "an object that cannot be saved",
        lambda: {"a": torch.ones(2, dtype=torch.int32)},
        lambda: {"a": object()},
        f"{HEAD}{DIFFERENT} (1): a (an object here, a tensor int32 (2,) in the checkpoint)",
    ),
    Row(
        "an object that cannot be saved, for an array",
        lambda: {"a": np.ones(2)},
        lambda: {"a": {1, 2, object}},
        f"{HEAD}{DIFFERENT} (1): a (a set here, an array <f8 (2,) in the checkpoint)",
    ),
    Row(
        "an object where none was saved",
        lambda: {"a": None},
        lambda: {"a": Thing(x=1)},
        f"{HEAD}{DIFFERENT} (1): a (a Thing here, a NoneType in the checkpoint)",
    ),
    Row(
        "a module here, a value there",
        lambda: {"m": 3},
        lambda: {"m": nn.Linear(1, 1)},
        f"{HEAD}{DIFFERENT} (1): m (a Linear here, an int in the checkpoint)",
    ),
    Row(
        "an optimizer here, a list there",
        lambda: {"o": [1]},
        lambda: {"o": sgd(1)},
        f"{HEAD}{DIFFERENT} (1): o (a SGD here, a List in the checkpoint)",
    ),
    Row(
        "shape",
        lambda: {"a": torch.ones(3)},
        lambda: {"a": torch.ones(2)},
        f"{HEAD}a {SIZES}. {DIFFERENT} (1): a (float32 (2,) here, float32 (3,) in the checkpoint)",
    ),
    Row(
        "dtype",
        lambda: {"a": torch.ones(2, dtype=torch.int32)},
        lambda: {"a": torch.ones(2)},
        f"{HEAD}{DIFFERENT} (1): a (float32 (2,) here, int32 (2,) in the checkpoint)",
    ),
    Row(
        "kind",
        lambda: {"a": np.ones(2)},
        lambda: {"a": torch.ones(2)},
        f"{HEAD}{DIFFERENT} (1): a (a tensor here, a numpy array in the checkpoint)",
    ),
    Row(
        "kind of the other way",
        lambda: {"a": torch.ones(2)},
        lambda: {"a": np.ones(2)},
        f"{HEAD}{DIFFERENT} (1): a (a numpy array here, a tensor in the checkpoint)",
    ),
    Row(
        "numpy dtype",
        lambda: {"a": np.ones(2)},
        lambda: {"a": np.ones(2, ">f4")},
        f"{HEAD}{DIFFERENT} (1): a (>f4 (2,) here, <f8 (2,) in the checkpoint)",
    ),
    Row(
        "shape in a module",
        lambda: {"m": nn.Linear(1, 2)},
        lambda: {"m": nn.Linear(1, 3)},
        (
            f"{HEAD}m {SIZES}. "
            f"{DIFFERENT} (2): m.weight (float32 (3, 1) here, float32 (2, 1) in the checkpoint), m.bias "
            "(float32 (3,) here, float32 (2,) in the checkpoint)"
        ),
    ),
    Row(
        "an array in a module",
        lambda: {"m": {"weight": np.ones((1, 1), np.float32), "bias": 1}},
        lambda: {"m": nn.Linear(1, 1)},
        (
            f"{HEAD}{DIFFERENT} (2): m.weight (a tensor here, a numpy array in the checkpoint), m.bias (a "
            "Parameter here, an int in the checkpoint)"
        ),
    ),
    Row(
        "read-only",
        lambda: {"a": np.ones(2)},
        lambda: {"a": read_only()},
        f"{HEAD}{DIFFERENT} (1): a (the array here is read-only)",
    ),
    Row(
        "meta",
        lambda: {"a": torch.ones(2)},
        lambda: {"a": torch.zeros(2, device="meta")},
        f"{HEAD}{DIFFERENT} (1): a (on the meta device here; materialise it first (module.to_empty(device=...)))",
    ),
    Row(
        "freed",
        lambda: {"a": torch.ones(2)},
        lambda: {"a": freed()},
        (
            f"{HEAD}{DIFFERENT} (1): a (the storage of the tensor here was freed, shrunk or never allocated; "
            "gather or clone it first)"
        ),
    ),
    Row(
        "expanded",
        lambda: {"a": torch.ones(2)},
        lambda: {"a": torch.zeros(1).expand(2)},
        f"{HEAD}{DIFFERENT} (1): a (the tensor here is expanded, the one in the checkpoint is not)",
    ),
    Row(
        "overlapping elements",
        lambda: {"a": torch.ones(3, 2)},
        lambda: {"a": torch.zeros(4).unfold(0, 2, 1)},
        (
            f"{HEAD}{DIFFERENT} (1): a (the elements of the tensor here overlap each other otherwise than in the "
            "checkpoint)"
        ),
    ),
    Row(
        "sparse",
        lambda: {"a": torch.ones(2)},
        lambda: {"a": torch.zeros(2).to_sparse()},
        f"{HEAD}{DIFFERENT} (1): a (not a plain strided tensor here)",
    ),
    Row(
        "a user's class",
        lambda: {"a": torch.ones(2)},
        lambda: {"a": torch.ones(2).as_subclass(Special)},
        f"{HEAD}{DIFFERENT} (1): a (a Special here, a plain tensor in the checkpoint)",
    ),
    Row(
        "a lazy parameter",
        lambda: {"m": nn.Linear(2, 3)},
        lambda: {"m": nn.LazyLinear(3)},
        (
            f"{HEAD}{DIFFERENT} (2): m.weight (an uninitialized lazy parameter here; run the module once before "
            "restoring), m.bias (an uninitialized lazy parameter here; run the module once before restoring)"
        ),
    ),
    Row(
        "shared memory",
        lambda: views(False),
        lambda: views(True),
        f"{HEAD}{DIFFERENT} (1): b (shares memory with a here, but not in the checkpoint)",
    ),
    Row(
        "conjugated memory",
        conjugated,
        conjugated,
        (
            f"{HEAD}{DIFFERENT} (1): c (a view of the memory of w here, conjugated or negated; the checkpoint has "
            "them apart: give one memory of its own with resolve_conj() or resolve_neg())"
        ),
    ),
    Row(
        "composed of another class",
        lambda: {"a": scaled(torch.zeros(2, dtype=torch.int8))},
        lambda: {"a": OtherScaled(torch.zeros(2), torch.ones(1))},
        f"{HEAD}{DIFFERENT} (1): a (a OtherScaled here, a Scaled in the checkpoint)",
    ),
    Row(
        "composed with another context",
        lambda: {"a": scaled(torch.zeros(2, dtype=torch.int8), 1)},
        lambda: {"a": scaled(torch.zeros(2, dtype=torch.int8), 2)},
        f"{HEAD}{DIFFERENT} (1): a (another shape or context of a Scaled here)",
    ),
    Row(
        "composed of other parts",
        lambda: {"a": scaled(torch.zeros(2, dtype=torch.int8))},
        lambda: {"a": scaled(torch.zeros(2))},
        f"{HEAD}{DIFFERENT} (1): a (codes: float32 (2,) here, int8 (2,) in the checkpoint)",
    ),
    Row(
        "composed, and a plain tensor here",
        lambda: {"a": scaled(torch.zeros(2, dtype=torch.int8))},
        lambda: {"a": torch.zeros(2)},
        f"{HEAD}{DIFFERENT} (1): a (a Tensor here, a Scaled in the checkpoint)",
    ),
    Row(
        "several ranks, another shape",
        lambda: {"s": flat(1, 2, 3, 4)},
        lambda: {"s": flat(1, 2, shape=(2,))},
        f"{HEAD}{DIFFERENT} (1): s (the shape (2,) here, (4,) in the checkpoint)",
    ),
    Row(
        "several ranks, another dtype",
        lambda: {"s": flat(1, 2, 3, 4)},
        lambda: {"s": FlatShard(torch.zeros(4, dtype=torch.int32), (4,), 0)},
        f"{HEAD}{DIFFERENT} (1): s (int32 (4,) here, int64 (4,) in the checkpoint)",
    ),
    Row(
        "several ranks, and an array here",
        lambda: {"s": flat(1, 2, 3, 4)},
        lambda: {"s": np.zeros(4, np.float32)},
        f"{HEAD}{DIFFERENT} (1): s (a ndarray here, a Sharded in the checkpoint)",
    ),
    Row(
        "several ranks, and a value there",
        lambda: {"s": 1},
        lambda: {"s": flat(1, 2, 3, 4)},
        f"{HEAD}{DIFFERENT} (1): s (a FlatShard here, an int in the checkpoint)",
    ),
    Row(
        "several ranks, memory that overlaps",
        lambda: {"s": flat(1.0, 2.0, shape=(2, 2))},
        lambda: {"s": torch.zeros(3).as_strided((2, 2), (1, 1))},
        f"{HEAD}{DIFFERENT} (1): s (the elements of the tensor here overlap each other)",
    ),
    Row(
        "several ranks, and None here",
        lambda: {"s": flat(1, 2, 3, 4)},
        lambda: {"s": None},
        f"{HEAD}{DIFFERENT} (1): s (lies on several ranks in the checkpoint: put a DTensor there)",
    ),
    Row(
        "several ranks, and a thing here",
        lambda: {"x": Thing(s=flat(1, 2, 3, 4))},
        lambda: {"x": Thing(s=1)},
        f"{HEAD}{DIFFERENT} (1): x.s (lies on several ranks in the checkpoint: put a DTensor there)",
    ),
    Row(
        "several ranks, tied here",
        lambda: tied(False),
        lambda: tied(True),
        f"{HEAD}{DIFFERENT} (1): t (shares memory with s here, but not in the checkpoint)",
    ),
    Row(
        "a replica of another shape",
        lambda: {"replica": torch.zeros(4)},
        lambda: {"replica": torch.zeros(3)},
        f"{HEAD}{DIFFERENT} (1): replica (the shape (3,) here, (4,) in the checkpoint)",
    ),
    Row(
        "refused by an object",
        lambda: {"x": [Checking(table=2)]},
        lambda: {"x": [Checking(table=1)]},
        f"{HEAD}to restore all but x.0: {ALONE}. {DIFFERENT} (1): x.0 (another table)",
    ),
    Row(
        "optimizer without groups",
        lambda: {"o": Thing(x=1)},
        lambda: {"o": sgd(1)},
        f"{HEAD}to restore all but o: {ALONE}. {DIFFERENT} (1): o.param_groups (not in the checkpoint)",
    ),
    Row(
        "optimizer with other groups",
        lambda: {"o": sgd(1, 2)},
        lambda: {"o": sgd(1)},
        f"{HEAD}to restore all but o: {ALONE}. {DIFFERENT} (1): o.param_groups (1 groups here, 2 in the checkpoint)",
    ),
    Row(
        "optimizer with other parameters",
        lambda: {"o": adam(1, 2)},
        lambda: {"o": adam(1)},
        (
            f"{HEAD}to restore all but o: {ALONE}. "
            f"{DIFFERENT} (1): o.param_groups.0.params (1 parameters here, 2 in the checkpoint)"
        ),
    ),
    Row(
        "optimizer of other shapes",
        lambda: {"o": adam(1)},
        lambda: {"o": adam(2)},
        (
            f"{HEAD}to restore all but o: {ALONE}. "
            f"{DIFFERENT} (2): o.state.0.exp_avg ((1,) in the checkpoint, of a parameter (2,) here), "
            "o.state.0.exp_avg_sq ((1,) in the checkpoint, of a parameter (2,) here)"
        ),
    ),
    Row(
        "optimizer of another kind",
        lambda: {"o": sgd(1)},
        lambda: {"o": adam(1)},
        (
            f"{HEAD}to restore all but o: {ALONE}. "
            f"{DIFFERENT} (1): o.param_groups.0 (another optimizer's: for Adam it lacks betas, eps, and has "
            "dampening, momentum, nesterov)"
        ),
    ),
    Row(
        "model of other layers, and its optimizer",
        lambda: {"m": {"a": torch.ones(2), "b": torch.ones(2)}, "o": adam(1, 2)},
        lambda: {"m": {"a": torch.ones(2)}, "o": adam(1)},
        (
            f"{HEAD}m has other leaves here (other layers?); make it as the saved one was; to restore what both have: "
            f"take o out of the state, and call restore(state, strict=False). {UNEXPECTED} (1): m.b; "
            f"{DIFFERENT} (1): o.param_groups.0.params (1 parameters here, 2 in the checkpoint)"
        ),
    ),
    Row(
        "names that no module has",
        lambda: {"o": named("w", "v")},
        lambda: {"o": adam(1, 2)},
        (
            f"{HEAD}to restore all but o: {ALONE}. "
            f"{DIFFERENT} (1): o.param_groups.0 (of these names no parameter here: w, v; {NAMES})"
        ),
    ),
    Row(
        "moments that no module has",
        lambda: {"o": moments(*"abcdef")},
        lambda: {"o": adam(*range(1, 7))},
        (
            f"{HEAD}to restore all but o: {ALONE}. "
            f"{DIFFERENT} (1): o.state (of no parameter here: a, b, c, d, e, ...; {NAMES})"
        ),
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_text_of_a_mismatch(row: Row) -> None:
    saved = save(row.saved(), owners=Owners(0, [0], [0], ["replica"]))
    with pytest.raises(StateMismatchError) as raised:
        match(row.live(), saved.decoded, strict=row.strict)
    assert str(raised.value) == row.text


def stored(offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: str = "float32", start: int = 0) -> StoredBox:
    stride = tuple(torch.empty(sizes).stride())
    return StoredBox(0, 0, offsets, TensorEntry(0, dtype, sizes, stride, 0, "tensor", False), start)


class Boxes(NamedTuple):
    """One text about a tensor that is made of boxes of several ranks."""

    name: str
    live: Callable[[], torch.Tensor]
    boxes: list[StoredBox]
    text: str


BOXES = (
    Boxes("dtype", lambda: torch.zeros(4), [stored((0,), (4,), "int32")], "w (float32 here, int32 in the checkpoint)"),
    Boxes(
        "dimensions",
        lambda: torch.zeros(4),
        [stored((0, 0), (2, 2))],
        "w (the shape (4,) here, another one in the checkpoint)",
    ),
    Boxes(
        "expanded",
        lambda: torch.zeros(1).expand(4),
        [stored((0,), (4,))],
        "w (the tensor here is expanded, the one in the checkpoint is not)",
    ),
    Boxes("a hole", lambda: torch.zeros(4), [stored((0,), (3,))], "w (the checkpoint has not all of it)"),
    Boxes(
        "overlap",
        lambda: torch.zeros(4),
        [stored((0,), (3,)), stored((2,), (2,))],
        "w (boxes of it overlap in the checkpoint)",
    ),
)


@pytest.mark.parametrize("row", BOXES, ids=lambda row: row.name)
def test_the_text_about_a_tensor_made_of_boxes(row: Boxes) -> None:
    local = row.live()
    wanted = Wanted("w", "w", 0, tuple(local.shape), whole(local), local, local)
    assert reshard([wanted], {0: {"w": row.boxes}}, 0)[1] == [row.text]


def test_the_text_about_boxes_of_tensors_that_are_tied_here_only() -> None:
    local = torch.zeros(4)
    wanted = [Wanted(name, name, 0, (4,), whole(local), local, local) for name in ("v", "w")]
    parts = {0: {"v": [stored((0,), (4,))], "w": [stored((0,), (4,), start=64)]}}
    assert reshard(wanted, parts, 0)[1] == ["w (shares memory with v here, but not in the checkpoint)"]


def test_the_text_about_keys_that_select_nothing() -> None:
    saved = save({"model": {"a": {"x.y": 1}, "a.x": {"y": 2}}, "step": 1})
    with pytest.raises(StateMismatchError) as raised:
        saved.load(["modle.*", "stap"])
    assert str(raised.value) == "no leaf matches 'modle.*', 'stap'; there are: model, step"
    with pytest.raises(StateMismatchError) as raised:
        save({}).load(["x"])
    assert str(raised.value) == "no leaf matches 'x'; there are: none at all"
    with pytest.raises(StateMismatchError) as raised:
        saved.load(["model.a.x.y"])
    assert str(raised.value) == (
        r"'model.a.x.y' is ambiguous, the name of several leaves: model.a.x\.y, model.a\.x.y; write it with its "
        r"escapes (in a path, \. is a dot inside a key)"
    )
