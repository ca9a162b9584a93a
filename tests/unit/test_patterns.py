"""Modules and optimizers that are read in place of their ``state_dict()``: the result is the same, whatever changes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.state import Outline, arrange, flatten, flatten_unchecked
from pccheck_async.state.cache import patterns
from pccheck_async.state.save.flatten import FlatState

pytestmark = pytest.mark.skipif(patterns.compare is None, reason="needs the extension")


ONES = torch.ones(1)


def described(flat: FlatState) -> tuple[bytes, list[str], bytes]:
    """All that a manifest says of a state."""
    return (
        msgspec.msgpack.encode(flat.skeleton),
        flat.leaves.paths,
        msgspec.msgpack.encode(arrange(flat.leaves).tensors),
    )


def saved(state: dict[str, Any], outline: Outline | None) -> Outline | None:
    """Flatten a state; what is said of it is what its ``state_dict()`` gives, and its leaves have the same memory."""
    flat, asked = flatten_unchecked(state, outline), flatten(state)
    assert described(flat) == described(asked)
    for one, other in zip(flat.leaves.values, asked.leaves.values, strict=True):
        assert isinstance(one, torch.Tensor)
        assert isinstance(other, torch.Tensor)
        assert one.is_set_to(other)
    return flat.outline


def is_asked(state: dict[str, Any], outline: Outline | None) -> bool:
    """Whether a ``state_dict()`` is called at the next save."""
    return bool(flatten_unchecked(state, outline).objects)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.table = nn.Embedding(4, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Sequential(nn.Linear(3, 3), nn.ReLU())])
        self.scale = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(5), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("none", None)
        self.add_module("gone", None)
        self.tied = self.first


def mixed() -> Any:
    return Mixed()


class Versioned(nn.Linear):
    _version = 4


class Other(nn.Linear):
    pass


def _hook(*_: Any) -> None:
    pass


def _own_state_dict(module: Any) -> None:
    module.state_dict = module.state_dict


def _bypass(module: Any) -> None:
    module.first.__dict__["_save_to_state_dict"] = lambda destination, prefix, keep: None


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda m: None,
    "a parameter replaced": lambda m: setattr(m, "scale", nn.Parameter(torch.ones(4))),
    "a parameter set to none": lambda m: setattr(m, "scale", None),
    "a parameter that was none": lambda m: setattr(m, "none", nn.Parameter(torch.ones(1))),
    "a parameter removed": lambda m: delattr(m, "scale"),
    "a parameter of another class": lambda m: m._parameters.__setitem__("scale", torch.ones(3)),
    "a parameter added": lambda m: m.first.register_parameter("more", nn.Parameter(torch.ones(1))),
    "a parameter renamed": lambda m: m._parameters.__setitem__("size", m._parameters.pop("scale")),
    "the order of parameters": lambda m: m._parameters.__setitem__("scale", m._parameters.pop("scale")),
    "other data": lambda m: setattr(m.scale, "data", torch.ones(5)),
    "gradients switched": lambda m: m.requires_grad_(False),
    "a buffer replaced": lambda m: setattr(m, "mean", torch.ones(7)),
    "a buffer that was none": lambda m: setattr(m, "nothing", torch.ones(1)),
    "a buffer set to none": lambda m: setattr(m, "mean", None),
    "a buffer that becomes persistent": lambda m: m._non_persistent_buffers_set.clear(),
    "a buffer that becomes private": lambda m: m._non_persistent_buffers_set.add("mean"),
    "a private buffer replaced": lambda m: setattr(m, "cache", torch.ones(1)),
    "a module added": lambda m: m.layers.append(nn.Linear(2, 2)),
    "a module replaced": lambda m: m.layers.__setitem__(0, nn.Linear(3, 3)),
    "a module of another class": lambda m: m.layers.__setitem__(0, Other(3, 3, bias=False)),
    "a module of another version": lambda m: m.layers.__setitem__(0, Versioned(3, 3, bias=False)),
    "a module removed": lambda m: m._modules.pop("norm"),
    "a module set to none": lambda m: setattr(m, "norm", None),
    "a module that was none": lambda m: setattr(m, "gone", nn.Linear(1, 1)),
    "a module renamed": lambda m: m._modules.__setitem__("named", m._modules.pop("norm")),
    "the order of modules": lambda m: m._modules.__setitem__("norm", m._modules.pop("norm")),
    "another class": lambda m: setattr(m.first, "__class__", Other),
    "a version of its own": lambda m: setattr(m.first, "_version", 5),
    "a hook": lambda m: m.layers[1][0].register_state_dict_post_hook(_hook),
    "a private hook": lambda m: m.layers[1][0]._register_state_dict_hook(lambda *args: args[1].pop("scale", None)),
    "a hook before": lambda m: m.first.register_state_dict_pre_hook(_hook),
    "a state_dict of its own": _own_state_dict,
    "a state_dict of a part's own": lambda m: _own_state_dict(m.norm),
    "a part that leaves itself out": _bypass,
    "a parametrization": lambda m: nn.utils.parametrizations.weight_norm(m.first),
    "a pruned weight": lambda m: prune.l1_unstructured(m.first, "weight", 2),  # type: ignore[no-untyped-call]
    "a renormalising table": lambda m: setattr(m.table, "max_norm", 1.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_in_a_module_is_noticed(change: str) -> None:
    module = mixed()
    state = {"before": 1, "model": module, "after": {"x": torch.ones(1), "y": 2.5}}
    outline = saved(state, None)
    assert not is_asked(state, outline)
    CHANGES[change](module)
    for _ in range(3):
        outline = saved(state, outline)
    state["before"] = 2
    saved(state, outline)


@pytest.mark.parametrize(
    "change",
    ["a hook", "a private hook", "a hook before", "a state_dict of its own", "a state_dict of a part's own",
     "a part that leaves itself out", "a renormalising table"],
)  # fmt: skip
def test_modules_that_do_more_than_torchs_are_asked_at_every_save(change: str) -> None:
    module = mixed()
    CHANGES[change](module)
    state = {"model": module}
    outline = saved(state, saved(state, None))
    assert is_asked(state, outline)


def _on_class(kind: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(kind, name, value, raising=False)


@pytest.mark.parametrize(
    "change",
    [
        _on_class(nn.Linear, "get_extra_state", lambda self: {"x": 1}),
        _on_class(nn.Linear, "state_dict", lambda self, **keywords: keywords["destination"]),
        _on_class(nn.BatchNorm1d, "_save_to_state_dict", lambda self, destination, prefix, keep: None),
        _on_class(nn.ReLU, "_version", 9),
        _on_class(nn.ReLU, "_version", True),
        _on_class(nn.Module, "state_dict", lambda self, **keywords: OrderedDict(x=ONES)),
    ],
)
def test_classes_that_are_given_other_methods_are_noticed(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"model": mixed()}
    outline = saved(state, None)
    assert not is_asked(state, outline)
    change(monkeypatch)
    saved(state, saved(state, outline))
    monkeypatch.undo()
    saved(state, saved(state, outline))


class WithExtra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


class Prefixed(nn.Linear):
    def state_dict(self, *args: Any, **keywords: Any) -> Any:
        keywords["prefix"] = keywords.get("prefix", "") + "x."
        return super().state_dict(*args, **keywords)


class Own(nn.Linear):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


@pytest.mark.parametrize("kind", [WithExtra, Prefixed, Own])
def test_classes_with_methods_of_their_own_are_asked(kind: Any) -> None:
    for module in (kind(2, 2), nn.Sequential(nn.Linear(2, 2), kind(2, 2))):
        state = {"x": torch.ones(1), "model": module}
        outline = saved(state, saved(state, None))
        assert is_asked(state, outline)


def test_scripted_modules_and_lazy_ones() -> None:
    with pytest.warns(DeprecationWarning, match="script"):
        scripted = torch.jit.script(nn.Linear(2, 2))
    state: dict[str, Any] = {"model": nn.Sequential(scripted)}
    saved(state, saved(state, None))
    state = {"model": nn.Sequential(nn.LazyLinear(2))}
    with pytest.raises(UnsupportedStateError):
        flatten_unchecked(state)
    state["model"](torch.ones(1, 3))
    saved(state, saved(state, None))


def test_parameters_of_other_classes_are_asked_for() -> None:
    class Scaled(nn.Parameter):
        pass

    module = nn.Linear(2, 2)
    module.weight = Scaled(torch.ones(2, 2))
    state = {"model": module}
    outline = saved(state, saved(state, None))
    assert is_asked(state, outline)


def test_no_tensor_is_detached_and_none_comes_back_as_a_parameter() -> None:
    module = nn.Linear(2, 2)
    flat = flatten_unchecked({"model": module, "own": nn.Parameter(torch.ones(1))})
    again = flatten_unchecked({"model": module, "own": nn.Parameter(torch.ones(1))}, flat.outline)
    for each in (flat, again):
        assert each.leaves.values[0] is module.weight
        assert [(leaf.kind, leaf.requires_grad) for leaf in each.leaves] == [
            ("tensor", False), ("tensor", False), ("parameter", True)
        ]  # fmt: skip


# -- optimizers


def stepped(make: Callable[[Any], torch.optim.Optimizer], module: nn.Module) -> torch.optim.Optimizer:
    optimizer = make(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("make", "asked"),
    [
        (adam, False),
        (lambda p: torch.optim.SGD(p, lr=0.1), False),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), False),
        (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)), True),
        (torch.optim.Adagrad, False),
        (lambda p: torch.optim.RMSprop(p, centered=True), False),
        (lambda p: torch.optim.AdamW([{"params": [each], "name": str(n)} for n, each in enumerate(p)]), False),
    ],
)
def test_optimizers(make: Any, asked: bool) -> None:
    optimizer = stepped(make, nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    state = {"step": 1, "optimizer": optimizer, "x": torch.ones(1)}
    outline = saved(state, None)
    assert is_asked(state, outline) == asked
    for decay in (0.2, 0.2, 0.1):
        optimizer.param_groups[0]["weight_decay"] = decay
        optimizer.step()
        outline = saved(state, outline)
    assert is_asked(state, outline) == asked


def _swap(groups: list[dict[str, Any]]) -> None:
    params = groups[0]["params"]
    params[0], params[1] = params[1], params[0]


def _forget(optimizer: Any) -> None:
    del optimizer.state[optimizer.param_groups[0]["params"][1]]


def _reorder(optimizer: Any) -> None:
    first = optimizer.param_groups[0]["params"][0]
    optimizer.state[first] = optimizer.state.pop(first)


OPTIMIZER_CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda o: None,
    "a setting": lambda o: o.param_groups[0].__setitem__("weight_decay", 3),
    "a setting that is a tensor": lambda o: o.param_groups[0].__setitem__("lr", torch.ones(())),
    "another setting": lambda o: o.param_groups[0].__setitem__("more", (1, 2)),
    "a list of settings": lambda o: o.param_groups[0].__setitem__("betas", [0.1, 0.2]),
    "a group": lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "the order of parameters": lambda o: _swap(o.param_groups),
    "a parameter twice": lambda o: o.param_groups[0]["params"].__setitem__(1, o.param_groups[0]["params"][0]),
    "a parameter without a state": _forget,
    "the order of states": _reorder,
    "another moment": lambda o: next(iter(o.state.values())).__setitem__("exp_avg", torch.ones(9)),
    "one more moment": lambda o: next(iter(o.state.values())).__setitem__("x", torch.ones(9)),
    "a number for a moment": lambda o: next(iter(o.state.values())).__setitem__("step", 7),
    "a state by name": lambda o: o.state.__setitem__("global", {"x": torch.ones(1)}),
    "no states": lambda o: o.state.clear(),
    "loaded": lambda o: o.load_state_dict(o.state_dict()),
    "a hook": lambda o: o.register_state_dict_post_hook(lambda self, state: {**state, "x": 1}),
    "a hook before": lambda o: o.register_state_dict_pre_hook(lambda self: None),
    "a state_dict of its own": lambda o: setattr(o, "state_dict", lambda: {"x": ONES}),
    "another class": lambda o: setattr(o, "__class__", torch.optim.Adam),
}


@pytest.mark.parametrize("change", OPTIMIZER_CHANGES)
def test_what_changed_in_an_optimizer_is_noticed(change: str) -> None:
    optimizer = stepped(adam, nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    state = {"optimizer": optimizer, "x": torch.ones(1)}
    outline = saved(state, None)
    assert not is_asked(state, outline)
    if change == "a parameter twice":
        optimizer.state.clear()
        outline = saved(state, None)
    OPTIMIZER_CHANGES[change](optimizer)
    for _ in range(3):
        outline = saved(state, outline)


def test_an_optimizer_steps_for_the_first_time() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    state = {"model": module, "optimizer": optimizer}
    outline = saved(state, saved(state, None))
    module.weight.grad = torch.ones(2, 2)
    optimizer.step()
    outline = saved(state, saved(state, outline))
    module.bias.grad = torch.ones(2)
    optimizer.step()
    saved(state, saved(state, outline))


def test_an_object_whose_plain_state_gets_an_array_is_asked_once() -> None:
    class Counting:
        calls = 0
        state: Any = None

        def state_dict(self) -> Any:
            self.calls += 1
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    one, other = Counting(), Counting()
    one.state, other.state = {"n": 1}, {"x": torch.ones(1)}
    state = {"w": torch.ones(1), "one": [one, 5], "other": other, "scheduler": one}
    outline = flatten_unchecked(state).outline
    calls = one.calls, other.calls
    one.state = {"n": torch.ones(1)}
    flat = flatten_unchecked(state, outline)
    assert (one.calls - calls[0], other.calls - calls[1]) == (2, 1)
    assert flat.leaves.paths == ["w", "one.0.n", "other.x", "scheduler.n"]
    assert described(flat) == described(flatten(state))


@pytest.mark.parametrize(
    "patterns_and_values",
    [
        ((patterns.items(dict, ["a"], [torch.Tensor]),), [{"a": 1}]),
        ((patterns.items(dict, ["a"], [None]),), [OrderedDict(a=1)]),
        ((patterns.items(OrderedDict, ["a", "b"], [None, None]),), [OrderedDict(b=1, a=1)]),
        ((patterns.items(dict, [1], [None]),), [{1.0: 1}]),
        ((patterns.items(dict, [1], [None]),), [{True: 1}]),
        ((patterns.sequence(list, [None]),), [[1, 2]]),
        ((patterns.sequence(list, [None]),), [(1,)]),
        ((False,), [None]),
    ],
)  # fmt: skip
def test_what_differs_leaves_nothing_behind(patterns_and_values: Any) -> None:
    compare, (expected, values) = patterns.compare, patterns_and_values
    assert compare is not None
    leaves, plain = [1], [2]
    assert compare([values[0], values[0]], (None, *expected), 0, leaves, plain, None) == 1
    assert (leaves, plain) == ([1], [2, values[0]])


def test_a_pattern_that_is_none_is_an_error() -> None:
    assert patterns.compare is not None
    with pytest.raises(ValueError, match="no such pattern"):
        patterns.compare([1], ((99,),), 0, [], [], None)
