from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings

from pccheck_async.errors import CorruptStoreError
from pccheck_async.format import skeleton as nodes
from pccheck_async.format.skeleton import (
    ArrayNode,
    DictNode,
    ListNode,
    Node,
    OrderedDictNode,
    SetNode,
    StatefulNode,
    TupleNode,
)
from pccheck_async.state import flatten
from pccheck_async.state.restore.tree import rebuild
from tests.support import state_strategies
from tests.support.state_strategies import difference


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(state_strategies.states())
def test_a_skeleton_gives_the_value_back(state: dict[str, Any]) -> None:
    flat = flatten(state)
    found = rebuild(flat.skeleton, lambda index: flat.leaves[index].value)
    assert not difference(state, found)


def test_statefuls() -> None:
    tree = ListNode([StatefulNode(DictNode(["a"], [1]))])
    assert rebuild(tree, lambda index: index) == [{"a": 1}]
    assert rebuild(tree, lambda index: index, lambda node: node) == [tree.items[0]]


def test_metadata() -> None:
    found = rebuild(OrderedDictNode([], [], [DictNode(["v"], [1])]), lambda index: index)
    assert type(found) is OrderedDict
    assert found._metadata == {"v": 1}  # type: ignore[attr-defined]


def deep(levels: int) -> Node:
    node: Node = 1
    for _ in range(levels):
        node = TupleNode([node])
    return node


@pytest.mark.parametrize(
    "node",
    [
        DictNode([1], []),
        DictNode([1, 1], [1, 2]),
        DictNode([1, True], [1, 2]),
        DictNode([ListNode([])], [1]),
        DictNode([ArrayNode(0)], [1]),
        DictNode([nodes.BytearrayNode(b"")], [1]),
        DictNode([nodes.NumpyScalarNode("|V2", b"ab")], [1]),
        DictNode([deep(5000)], [1]),
        SetNode([1, 1.0]),
        SetNode([StatefulNode(1)]),
        nodes.FrozenSetNode([DictNode([], [])]),
        OrderedDictNode([], [], [1, 2]),
        deep(200),
        nodes.TorchDtypeNode("__name__"),
        nodes.TorchDtypeNode("nn"),
        nodes.TorchDeviceNode("nonsense"),
        nodes.TorchDeviceNode("cuda:-7"),
        nodes.NumpyDtypeNode("O"),
        nodes.NumpyDtypeNode("i4,i4"),
        nodes.NumpyDtypeNode("<f3"),
        nodes.NumpyDtypeNode("<U999999999999"),
        nodes.NumpyDtypeNode("<M8[lightyear]"),
        nodes.NumpyScalarNode("<f8", b"123"),
        nodes.NumpyScalarNode("<U1", b"\xff\xff\xff\xff"),
        nodes.SurrogateStrNode(b"\xff"),
    ],
    ids=lambda node: type(node).__name__,
)
def test_hostile_nodes(node: Node) -> None:
    with pytest.raises(CorruptStoreError):
        rebuild(node, lambda index: index)
