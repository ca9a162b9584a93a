from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import enum
import io
import itertools
import json
import pathlib
import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.format.skeleton import (
    MAX_DEPTH,
    ArrayNode,
    CounterNode,
    DictNode,
    ListNode,
    OrderedDictNode,
    StatefulNode,
)
from pccheck_async.state import RNGState, Stateful, flatten, flatten_unchecked
from pccheck_async.state.restore.tree import rebuild

Point = namedtuple("Point", "x y")


class Color(enum.Enum):
    RED = 1


class Loud(enum.IntEnum):
    YES = 1


class MyTensor(torch.Tensor):
    pass


class Thing:
    def __init__(self, state: Any) -> None:
        self.state = state
        self.thread = 0

    def state_dict(self) -> Any:
        self.thread = threading.get_ident()
        return self.state

    def load_state_dict(self, state_dict: Any, /) -> None:
        self.state = state_dict


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


class Delegating:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_skeleton_and_leaves() -> None:
    weight, array = torch.nn.Parameter(torch.zeros(2)), np.zeros(3)
    flat = flatten({"a": {"w": weight, 3: [array, 1.5]}, "t": torch.zeros(1), "c": Counter("aab")})
    assert isinstance(flat.skeleton, DictNode)
    assert flat.skeleton.values[0] == DictNode(["w", 3], [ArrayNode(0), ListNode([ArrayNode(1), 1.5])])
    assert flat.skeleton.values[2] == CounterNode(["a", "b"], [2, 1])
    assert [(leaf.path, leaf.kind, leaf.requires_grad) for leaf in flat.leaves] == [
        ("a.w", "parameter", True),
        ("a.3.0", "ndarray", False),
        ("t", "tensor", False),
    ]
    assert flat.leaves[0].value is weight
    assert flat.leaves[1].value is array


def test_modules_and_their_metadata() -> None:
    flat = flatten({"model": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))})
    assert isinstance(flat.skeleton, DictNode)
    module = flat.skeleton.values[0]
    assert isinstance(module, StatefulNode)
    assert isinstance(module.child, OrderedDictNode)
    assert len(module.child.metadata) == 1
    assert flat.leaves[0].path == r"model.0\.weight"
    assert flat.leaves[0].kind == "tensor"


def test_the_state_of_a_module_as_the_whole_state() -> None:
    state: Any = torch.nn.BatchNorm1d(2).state_dict()
    flat = flatten_unchecked(state)
    assert isinstance(flat.skeleton, OrderedDictNode)
    again = flatten_unchecked(state, flat.outline)
    assert again.skeleton is flat.skeleton  # nothing changed: a second save takes the nodes of the first
    state._metadata[""]["version"] = 9
    assert flatten_unchecked(state, flat.outline).skeleton == flatten(state).skeleton != flat.skeleton
    assert isinstance(flatten_unchecked(dict(state), flat.outline).skeleton, DictNode)
    state.mark = 1
    with pytest.raises(UnsupportedStateError, match="the state: the attribute 'mark' on a OrderedDict would be lost"):
        flatten(state)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_statefuls_at_any_depth_are_asked_on_this_thread() -> None:
    inner = Thing({"t": torch.ones(1)})
    outer = Thing([1, {"inner": inner}])
    flat = flatten({"things": {"outer": outer}})
    assert outer.thread == inner.thread == threading.get_ident()
    assert [leaf.path for leaf in flat.leaves] == ["things.outer.1.inner.t"]
    assert isinstance(outer, Stateful)
    assert not isinstance(object(), Stateful)


def test_plain_values_are_copied() -> None:
    history = [1, 2]
    flat = flatten({"h": history})
    history.append(3)
    assert flat.skeleton == DictNode(["h"], [ListNode([1, 2])])


def test_any_mapping_may_be_the_state() -> None:
    assert flatten(MappingProxyType({"a": 1})).skeleton == DictNode(["a"], [1])


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (Point(1, 2), "tuple"),
        (Color.RED, "name"),
        (Loud.YES, "name"),
        (defaultdict(int), "dict"),
        (deque([1]), "list"),
        (range(3), "list"),
        (MappingProxyType({}), "dict"),
        (lambda: 1, "code"),
        (Thing, "give an instance: Thing()"),
        (RNGState, "give an instance: RNGState()"),
        (object(), "state_dict"),
        (torch.Generator(), "state_dict() returns x.get_state(), and whose load_state_dict(state) does x.set_state("),
        (MyTensor(), "plain tensor"),
        (
            torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
            "save those tensors (an engine with allow_pickle=True",
        ),
        (torch.zeros(2).to_sparse(), "to_dense"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch._neg_view(torch.zeros(2, dtype=torch.bool)), "negate"),
        (np.array([object()]), "tolist"),
        (np.zeros(2, [("a", "i4")]), "fields"),
        (np.zeros(2).view(np.matrix), "asarray"),
        (np.zeros(2, [("a", "i4")])[0], "field"),
        (np.dtype("O"), "field"),
        ({torch.zeros(1)}, "list"),
        ({float("nan"): 1}, "NaN"),
        ({(1, float("nan")): 1}, "NaN"),
        ({np.datetime64("NaT", "s")}, "NaN"),
        ({Color.RED: 1}, "key"),
        (np.ma.masked_array([1]), "getmaskarray"),
        (np.random.default_rng(0), "does x.bit_generator.state = state"),
        (np.random.RandomState(0), "legacy=False"),
        (random.Random(0), "getstate"),
        (Settings(), "asdict"),
        (pathlib.Path("x"), "str(x)"),
        (argparse.Namespace(a=1), "vars(x)"),
        (datetime.datetime(2020, 1, 1), "isoformat"),
        (datetime.date(2020, 1, 1), "isoformat"),
        (datetime.timedelta(1), "total_seconds"),
        (decimal.Decimal(1), "str(x)"),
        (memoryview(b"x"), "bytes(x)"),
        (Delegating(torch.nn.Linear(1, 1)), "on its class"),
        (Settings, "code"),
        (slice(1), "state_dict"),
        (iter(DataLoader([1])), "save the loader, not its iterator: pccheck_async.ResumableLoader"),  # type: ignore[arg-type]
        (enumerate(DataLoader([1])), "save what it comes from"),  # type: ignore[arg-type]
        ((x for x in [1]), "save what it comes from"),
        (torch.nn.Linear(1, 1).parameters(), "save what it comes from"),
        (itertools.count(), "save what it comes from"),
        (io.StringIO(), "save its path"),
        (BatchSampler(RandomSampler([1]), 1, drop_last=False), "ResumableSampler"),
        (RandomSampler([1]), "ResumableSampler"),
        (TensorDataset(torch.ones(1)), "leave it out: data is no state"),
        (Endless(), "leave it out: data is no state"),
        (random.SystemRandom(), "leave it out"),
        (np.random.PCG64(0), "does x.state = state"),
        (type("Box", (), {"__iter__": lambda self: iter([1])})(), "state_dict"),
        (type("S", (str,), {})("x"), "plain str"),
    ],
)
def test_unsupported_values_name_their_path_and_say_what_to_do(value: Any, advice: str) -> None:
    with pytest.raises(UnsupportedStateError, match=r"^outer\.a\.b\.1: .*") as raised:
        flatten({"outer": {"a.b": [0, value]}})
    assert advice in str(raised.value)


def test_arrays_of_dtypes_that_others_defined() -> None:
    """By their names, numpy would take them for plain bytes, or for nothing that it knows."""
    core = "numpy._core" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else "numpy.core"
    rational = pytest.importorskip(f"{core}._rational_tests").rational
    array = np.array([rational(1, 2), rational(2, 3)])
    with pytest.raises(UnsupportedStateError, match=r"^a: an array of rational, not .*x\.view\('V8'\)"):
        flatten({"a": array})
    with pytest.raises(UnsupportedStateError, match="a: the numpy dtype rational cannot be saved"):
        flatten({"a": array.dtype})
    with pytest.raises(UnsupportedStateError, match=r"^a: "):
        flatten({"a": array[0]})
    flatten({"a": array.view("V8")})


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning")
def test_quantized_and_nested_tensors() -> None:
    quantized = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)
    with pytest.raises(UnsupportedStateError, match="int_repr"):
        flatten({"q": quantized})
    with pytest.raises(UnsupportedStateError, match=r"dtype torch\.qint8"):  # not quantized, says torch
        flatten({"q": torch.zeros(2, dtype=torch.uint8).view(torch.qint8)})
    nested = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)
    with pytest.raises(UnsupportedStateError, match=r"^n: "):
        flatten({"n": nested})


def test_lazy_modules() -> None:
    with pytest.raises(UnsupportedStateError, match="lazy"):
        flatten({"m": torch.nn.LazyLinear(3)})


@pytest.mark.parametrize("state", [{1: 2}, {None: 2}, [], None, {type("S", (str,), {})("x"): 1}])
def test_the_outermost_mapping_has_string_keys(state: Any) -> None:
    with pytest.raises(UnsupportedStateError, match="the state"):
        flatten(state)


def test_attributes_on_containers_are_not_dropped_in_silence() -> None:
    ordered: OrderedDict[str, int] = OrderedDict()
    ordered.extra = 1  # type: ignore[attr-defined]
    counter: Counter[str] = Counter()
    counter.extra = 1  # type: ignore[attr-defined]
    for value in (ordered, counter):
        with pytest.raises(UnsupportedStateError, match="'extra'"):
            flatten({"x": value})


def test_cycles() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    with pytest.raises(UnsupportedStateError, match=r"^x\.0\.again: .*itself"):
        flatten({"x": loop})
    thing = Thing({})
    thing.state["me"] = thing
    with pytest.raises(UnsupportedStateError, match="itself"):
        flatten({"x": thing})
    shared = [1]
    flatten({"x": [shared, shared]})  # twice is no cycle


def test_depth() -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    flatten({"x": deep})
    with pytest.raises(UnsupportedStateError, match="levels"):
        flatten({"x": [deep]})
    key: Any = 1
    for _ in range(MAX_DEPTH):
        key = (key,)
    with pytest.raises(UnsupportedStateError, match="levels"):
        flatten({"x": {key: 1}})


def test_errors_of_state_dict_are_the_users_own() -> None:
    class Broken(Thing):
        def state_dict(self) -> Any:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as raised:
        flatten({"x": [Thing(Broken(1))]})
    (note,) = raised.value.__notes__
    assert note.startswith("raised by state_dict() of x.0, a tests.unit.test_flatten.")
    assert note.endswith("Broken")


def test_sets_are_written_in_one_order() -> None:
    one, two = frozenset(["a", "b", "c", 1, 2, None]), frozenset([None, 2, 1, "c", "b", "a"])
    assert flatten({"s": one}).skeleton == flatten({"s": two}).skeleton


@pytest.mark.parametrize("items", [[], [1, 2], [1, 1 << 64], [-(1 << 63) - 1], [1.5, None, True], [1, True], [1, "x"]])
def test_lists_of_numbers(items: list[Any]) -> None:
    node = flatten({"x": items}).skeleton.values[0]  # type: ignore[union-attr]
    assert isinstance(node, ListNode)
    assert node.items is not items
    assert repr(rebuild(node, lambda index: index)) == repr(items)


def fresh(kind: Any = torch.optim.Adam, **settings: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind(torch.nn.Linear(2, 2).parameters(), **settings)
    return optimizer


@pytest.mark.parametrize(
    "make", [fresh, lambda: fresh(torch.optim.SGD, lr=0.25, momentum=0.9), lambda: fresh(lr=torch.tensor(0.5))]
)
def test_the_state_dict_of_an_optimizer_before_its_first_step(make: Any) -> None:
    optimizer = make()
    kept = optimizer.state_dict()
    says = r"is the state_dict\(\) of an optimizer before its first step, and will stay that; put the optimizer itself"
    for where, state in (("o: this ", {"o": kept}), (r"a\.0\.o: this ", {"a": [{"o": kept}]}), ("the state ", kept)):
        with pytest.raises(UnsupportedStateError, match=f"^{where}{says}"):
            flatten(state)
    flatten({"o": optimizer})
    flatten({"o": Thing({"inside": optimizer.state_dict()})})  # asked at every checkpoint
    flatten({"o": json.loads(json.dumps(kept, default=float))})  # of no live optimizer
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    flatten({"o": optimizer.state_dict()})


def test_the_state_dict_of_an_optimizer_without_moments() -> None:
    flatten({"o": fresh(torch.optim.SGD, lr=0.25).state_dict()})
    flatten({"state": torch.ones(2), "param_groups": torch.ones(2)})
    flatten({"x": {"state": {}, "param_groups": [{"params": []}, 3]}})
