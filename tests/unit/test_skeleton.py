from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest

from pccheck_async.format import skeleton as nodes
from pccheck_async.format.skeleton import ArrayNode, DictNode, ListNode, Node, OrderedDictNode, StatefulNode, TupleNode


class Carrier(msgspec.Struct):
    node: Node


def carried(node: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(Carrier(node)), type=Carrier).node


@pytest.mark.parametrize(
    "node",
    [
        None,
        True,
        0,
        -(2**63),
        2**64 - 1,
        1.0,
        "1",
        "",
        ArrayNode(3),
        ListNode([1, 1.0, True, None, "x"]),
        TupleNode([ListNode([])]),
        DictNode([1, "1"], [ArrayNode(0), StatefulNode(None)]),
        OrderedDictNode([], [], [DictNode([], [])]),
        nodes.BytesNode(b"\0"),
        nodes.ComplexNode(1.0, -0.0),
        nodes.NumpyScalarNode("<f8", b"12345678"),
    ],
)
def test_nodes_travel_with_their_types(node: Any) -> None:
    found = carried(node)
    assert found == node
    assert type(found) is type(node)


@pytest.mark.parametrize("bits", [0x7FF0000000000001, 0xFFF8000000000123, 0x8000000000000000, 0x7FF0000000000000, 1])
def test_floats_keep_every_bit(bits: int) -> None:
    value = struct.unpack("<d", struct.pack("<Q", bits))[0]
    assert struct.pack("<d", carried(value)) == struct.pack("<Q", bits)


def test_a_node_of_another_shape_is_refused() -> None:
    cases: list[Any] = [["array", "x"], ["array", 1, 2], ["unknown", 1], {}, ["list", [["array", None]]]]
    for wrong in cases:
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode({"node": wrong}), type=Carrier)


def test_children_and_arrays() -> None:
    tree = OrderedDictNode(["k"], [StatefulNode(ListNode([ArrayNode(1)]))], [ArrayNode(0)])
    assert list(nodes.children(tree)) == ["k", tree.values[0], ArrayNode(0)]
    assert sorted(nodes.arrays(tree)) == [0, 1]
    assert list(nodes.children("leaf")) == []
