from __future__ import annotations

import gc
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.format.skeleton import MAX_DEPTH, DictNode, OrderedDictNode
from pccheck_async.state import Outline, flatten_unchecked
from pccheck_async.state.save.flatten import FlatState
from tests.support import state_strategies
from tests.unit.test_flatten import Thing


class Other(Thing):
    pass


def encoded(flat: FlatState) -> bytes:
    return msgspec.msgpack.encode(flat.skeleton)


def difference(one: FlatState, other: FlatState) -> str:
    if encoded(one) != encoded(other):
        return f"skeleton: {one.skeleton} became {other.skeleton}"
    if one.leaves.paths != other.leaves.paths:
        return f"paths: {one.leaves.paths} became {other.leaves.paths}"
    same = len(one.leaves) == len(other.leaves) and all(
        map(lambda a, b: a is b, one.leaves.values, other.leaves.values)
    )
    return "" if same else "arrays"


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A training step without autograd, which refuses to run once a process had a second interpreter."""
    model(torch.rand(4, 3))
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()


def trained() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return {"model": model, "optimizer": optimizer, "step": 3, "history": [1.5, 2], "rng": np.arange(4)}


def test_what_is_made_as_it_was_keeps_its_nodes() -> None:
    state = trained()
    first = flatten_unchecked(state)
    second = flatten_unchecked(state | {"step": 4}, first.outline)
    assert isinstance(first.skeleton, DictNode)
    assert isinstance(second.skeleton, DictNode)
    assert second.skeleton.values[0] is first.skeleton.values[0]
    assert second.skeleton.values[1].child.values[0] is first.skeleton.values[1].child.values[0]  # type: ignore[union-attr]
    assert encoded(flatten_unchecked(state | {"step": 4})) == encoded(second)
    assert [leaf.path for leaf in second.leaves] == [leaf.path for leaf in first.leaves]


def _set(key: Any, value: Any) -> Callable[[dict[Any, Any]], object]:
    return lambda inner: inner.__setitem__(key, value)


def _rename(inner: dict[Any, Any], old: Any, new: Any) -> None:
    """Give an item another key in the same place."""
    items = [(new if key is old else key, value) for key, value in inner.items()]
    inner.clear()
    inner.update(items)


def _move(one: dict[Any, Any], other: dict[Any, Any], key: Any) -> None:
    """Make the last item of one dict the first of another."""
    items = [(key, one.pop(key)), *other.items()]
    other.clear()
    other.update(items)


CHANGES: dict[str, Callable[[dict[Any, Any]], object]] = {
    "nothing": lambda inner: None,
    "plain value": _set("plain", 7),
    "bool for int": _set("plain", True),
    "float for int": _set("plain", 1.0),
    "minus zero": _set("zero", -0.0),
    "NaN": _set("zero", float("nan")),
    "bytearray in place": lambda inner: inner["bytes"].append(1),
    "list in place": lambda inner: inner["list"].append(3),
    "tensor for plain": _set("plain", torch.zeros(1)),
    "plain for tensor": _set("a", None),
    "array for tensor": _set("a", np.zeros(1)),
    "another tensor": _set("a", torch.ones(3)),
    "parameter for tensor": _set("a", torch.nn.Parameter(torch.ones(3))),
    "container for tensor": _set("a", {"x": torch.zeros(1)}),
    "tensor for container": _set("deep", torch.zeros(1)),
    "one more key": _set("new", torch.zeros(1)),
    "an equal key that is a bool": lambda inner: _rename(inner, 1, True),
    "an equal key that is a float": lambda inner: _rename(inner, 1, 1.0),
    "another key": lambda inner: _rename(inner, 1, 2),
    "order": lambda inner: inner.__setitem__("a", inner.pop("a")),
    "one key less": lambda inner: inner.pop("a"),
    "deep value": lambda inner: inner["deep"]["rows"][1].__setitem__("step", 9),
    "deep type": lambda inner: inner["deep"]["rows"][1].__setitem__("step", "x"),
    "deep key": lambda inner: inner["deep"]["rows"][1].__setitem__("more", torch.zeros(2)),
    "deep rename": lambda inner: _rename(inner["deep"]["rows"][1], "t", "v"),
    "an item in the next row": lambda inner: _move(inner["uneven"]["a"], inner["uneven"]["b"], "y"),
    "a flat bytearray in place": lambda inner: inner["flat"]["bytes"].append(1),
    "deep order": lambda inner: inner["deep"]["rows"][1].__setitem__("step", inner["deep"]["rows"][1].pop("step")),
    "one row more": lambda inner: inner["deep"]["rows"].__setitem__(2, {"step": 1, "t": torch.zeros(1)}),
    "a row that is no dict": lambda inner: inner["deep"]["rows"].__setitem__(1, OrderedDict(inner["deep"]["rows"][1])),
    "a row that is a tensor": lambda inner: inner["deep"]["rows"].__setitem__(1, torch.zeros(1)),
    "metadata": lambda inner: inner["ordered"]._metadata["x"].__setitem__("version", 2),
    "more metadata": lambda inner: inner["ordered"]._metadata.__setitem__("y", {}),
    "no metadata": lambda inner: delattr(inner["ordered"], "_metadata"),
    "a tensor in the metadata": lambda inner: inner["ordered"]._metadata.__setitem__("x", torch.zeros(1)),
    "tuple for list": lambda inner: inner.__setitem__("list", tuple(inner["list"])),
    "a longer tuple": lambda inner: inner.__setitem__("tuple", (*inner["tuple"], 1)),
    "counter for dict": lambda inner: inner.__setitem__("deep", Counter("ab")),
    "an object for a dict": lambda inner: inner.__setitem__("deep", Thing(inner["deep"])),
    "another object": lambda inner: inner.__setitem__("thing", Other([torch.zeros(1)])),
    "state of the object": lambda inner: setattr(inner["thing"], "state", [torch.zeros(1)]),
}


def some() -> dict[Any, Any]:
    ordered: Any = OrderedDict(w=torch.zeros(2))
    ordered._metadata = OrderedDict(x={"version": 1})
    return {
        "plain": 1,
        "zero": 0.0,
        "a": torch.zeros(3),
        1: np.zeros(2),
        "bytes": bytearray(b"x"),
        "list": [1, torch.zeros(1)],
        "tuple": (torch.zeros(1), "x"),
        "deep": {"rows": {n: {"step": n, "t": torch.zeros(1), "u": torch.ones(2)} for n in (0, 1)}, "w": torch.ones(1)},
        "uneven": {"a": {"x": torch.zeros(1), "y": torch.zeros(1)}, "b": {"z": torch.zeros(1)}},
        "flat": {"bytes": bytearray(b"x"), "t": torch.zeros(1)},
        "ordered": ordered,
        "thing": Thing({"t": torch.zeros(1), "list": [1, 2]}),
        "later": torch.zeros(1),
    }  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_taken_anew(change: str) -> None:
    inner = some()
    state = {"inner": inner, "flat": {"t": torch.zeros(1)}}
    first = flatten_unchecked(state)
    assert not difference(flatten_unchecked(state), flatten_unchecked(state, first.outline))
    CHANGES[change](inner)
    second = flatten_unchecked(state, first.outline)
    assert not difference(flatten_unchecked(state), second)
    assert not difference(flatten_unchecked(state), flatten_unchecked(state, second.outline))


@pytest.mark.parametrize("kind", ["outermost", "ordered", "with metadata", "rows", "object", "list"])
def test_one_container_whose_value_changes_back(kind: str) -> None:
    weights = torch.zeros(1)
    ordered: OrderedDict[str, Any] = OrderedDict(w=weights, step=0)
    thing = Thing({"w": weights, "step": 0})
    states: dict[str, dict[str, Any]] = {
        "outermost": {"w": weights, "step": 0},
        "ordered": {"model": ordered},
        "with metadata": {"model": ordered},
        "rows": {"a": {"w": weights, "step": 0}, "b": {"w": weights, "step": 0}},
        "object": {"thing": thing},
        "list": {"list": [weights, 0]},
    }
    state = states[kind]

    def change(step: int) -> None:
        match kind:
            case "outermost":
                state["step"] = step
            case "ordered":
                ordered["step"] = step
            case "with metadata":
                ordered["step"] = step
                ordered._metadata = {"version": step // 2, "t": weights}  # type: ignore[attr-defined]
            case "rows":
                state["a"]["step"] = step
            case "object":
                thing.state["step"] = step
            case _:
                state["list"][1] = step

    outline: Outline | None = None
    for step in (0, 0, 2, 0, 2, 2, 3, 0, 1, 2, 3, 3, 2, 1, 0):
        change(step)
        flat = flatten_unchecked(state, outline)
        assert not difference(flatten_unchecked(state), flat), step
        outline = flat.outline


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(st.data())
def test_taken_as_if_it_were_the_first_time(data: st.DataObject) -> None:
    values = st.dictionaries(st.sampled_from("abc"), state_strategies.states(), max_size=3)
    outline: Outline | None = None
    state: dict[str, Any] = {}
    for _ in range(4):
        state = {key: value for key, value in state.items() if data.draw(st.booleans())} | data.draw(values)
        for _ in range(2):
            found = flatten_unchecked(state, outline)
            assert not difference(flatten_unchecked(state), found)
            outline = found.outline


def test_every_object_is_asked_once_whatever_changed_before_and_in_it() -> None:
    class Asked(Thing):
        calls = 0

        def state_dict(self) -> Any:
            self.calls += 1
            return self.state

    one, other = Asked({"t": torch.zeros(1)}), Asked([torch.zeros(1), {"t": torch.zeros(1)}])
    state = {"one": one, "other": {"x": other}}
    outline = flatten_unchecked(state).outline
    one.state = {"t": 1, "u": torch.zeros(1)}
    other.state.append(torch.zeros(1))
    assert len(flatten_unchecked(state, outline).leaves) == 4
    assert (one.calls, other.calls) == (2, 2)


def test_what_cannot_be_saved_any_more_is_refused() -> None:
    inner: dict[str, Any] = {"t": torch.zeros(1), "deep": {"list": [torch.zeros(1), {"x": torch.zeros(1)}]}}
    state = {"x": inner}
    outline = flatten_unchecked(state).outline
    items = inner["deep"]["list"]
    for value, match in (
        (object(), r"^x\.deep\.list\.0: .*object"),
        (inner, r"^x\.deep\.list\.0: .*itself"),
        ({1, (2.0, float("nan"))}, r"^x\.deep\.list\.0: NaN"),
    ):
        items[0] = value
        with pytest.raises(UnsupportedStateError, match=match):
            flatten_unchecked(state, outline)
    items[0] = torch.zeros(1)
    for _ in range(MAX_DEPTH):
        items[1] = [items[1]]
    with pytest.raises(UnsupportedStateError, match="levels"):
        flatten_unchecked(state, outline)
    items[1] = torch.zeros(1)
    inner["deep"] = OrderedDict(list=items)
    outline = flatten_unchecked(state, outline).outline
    inner["deep"].extra = 1
    with pytest.raises(UnsupportedStateError, match="'extra'"):
        flatten_unchecked(state, outline)


def test_the_outermost_mapping_comes_back_as_a_dict_or_an_ordered_one() -> None:
    content = {"t": torch.zeros(1)}
    outline = None
    for state in (content, OrderedDict(content), MappingProxyType(content), OrderedDict(content), content):
        for _ in range(2):
            flat = flatten_unchecked(state, outline)
            assert type(flat.skeleton) is (OrderedDictNode if type(state) is OrderedDict else DictNode)
            assert len(flat.leaves) == 1
            outline = flat.outline


def test_no_array_is_held() -> None:
    state = trained()
    kept = [weakref.ref(parameter) for parameter in state["model"].parameters()]
    kept.append(weakref.ref(state["rng"]))
    outline = flatten_unchecked(state).outline
    outline = flatten_unchecked(state, outline).outline
    assert outline is not None
    del state
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


def test_plain_values_without_arrays_are_not_kept() -> None:
    assert (
        flatten_unchecked({"table": {str(n): {"n": n} for n in range(100)}, "list": [[n] for n in range(100)]}).outline
        is None
    )


def test_plain_values_that_differ_are_no_other_outline() -> None:
    def state(step: int) -> dict[str, Any]:
        return {"step": step, "o": {"group": [{"lr": step / 7, "params": [0, step]}], "state": {0: {"m": TENSOR}}}}

    first = flatten_unchecked(state(1)).outline
    assert first is not None
    for step in (2, 1, 3):
        found = flatten_unchecked(state(step), first)
        assert found.outline is not None
        assert found.outline.patterns is first.patterns
        assert not difference(flatten_unchecked(state(step)), found)
    assert flatten_unchecked(state(1) | {"more": TENSOR}, first).outline is not first


TENSOR = torch.zeros(3)
