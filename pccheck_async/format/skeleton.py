"""The skeleton of a state: a tree of plain nodes that msgpack carries, arrays replaced by their index in a table.

None, bool, int (64 bits), float and str stand for themselves; everything else is a tagged struct. Floats keep all
their bits, NaN payloads included. A node knows nothing about how to make it or what to make of it: see ``values``,
``flatten`` and ``rebuild``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias, Union

import msgspec

__all__ = [
    "MAX_DEPTH",
    "ArrayNode",
    "BigIntNode",
    "BytearrayNode",
    "BytesNode",
    "ComplexNode",
    "CounterNode",
    "DictNode",
    "FrozenSetNode",
    "ListNode",
    "MappingNode",
    "Node",
    "NumpyDtypeNode",
    "NumpyScalarNode",
    "OrderedDictNode",
    "SequenceNode",
    "SetNode",
    "SizeNode",
    "StatefulNode",
    "SurrogateStrNode",
    "TorchDeviceNode",
    "TorchDtypeNode",
    "TupleNode",
    "arrays",
    "children",
]

MAX_DEPTH: Final = 100
"""Levels of nesting a state may have; far below what would exhaust Python's or msgpack's stack."""


class _Struct(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class ArrayNode(_Struct, frozen=True, gc=False, tag="array"):
    """A tensor or array: its index in the tensor table."""

    index: int


class StatefulNode(_Struct, frozen=True, tag="stateful"):
    """An object with ``state_dict``; ``child`` is what that returned."""

    child: Node


class ListNode(_Struct, frozen=True, tag="list"):
    """A list."""

    items: list[Node]


class TupleNode(_Struct, frozen=True, tag="tuple"):
    """A tuple."""

    items: list[Node]


class SetNode(_Struct, frozen=True, tag="set"):
    """A set."""

    items: list[Node]


class FrozenSetNode(_Struct, frozen=True, tag="frozenset"):
    """A frozenset."""

    items: list[Node]


class DictNode(_Struct, frozen=True, tag="dict"):
    """A dict in its order; keys of any hashable supported type."""

    keys: list[Node]
    values: list[Node]


class OrderedDictNode(_Struct, frozen=True, tag="ordered"):
    """An OrderedDict; ``metadata`` holds the ``_metadata`` that nn.Module hangs on it, in a list of one, or of none."""

    keys: list[Node]
    values: list[Node]
    metadata: list[Node]


class CounterNode(_Struct, frozen=True, tag="counter"):
    """A collections.Counter."""

    keys: list[Node]
    values: list[Node]


class BigIntNode(_Struct, frozen=True, gc=False, tag="int"):
    """An int beyond 64 bits: two's complement, little-endian."""

    data: bytes


class ComplexNode(_Struct, frozen=True, gc=False, tag="complex"):
    """A complex number."""

    real: float
    imag: float


class SurrogateStrNode(_Struct, frozen=True, gc=False, tag="str"):
    """A str with lone surrogates, which UTF-8 proper cannot carry (``surrogatepass``)."""

    data: bytes


class BytesNode(_Struct, frozen=True, gc=False, tag="bytes"):
    """A bytes object."""

    data: bytes


class BytearrayNode(_Struct, frozen=True, gc=False, tag="bytearray"):
    """A bytearray."""

    data: bytes


class SizeNode(_Struct, frozen=True, tag="size"):
    """A torch.Size."""

    items: list[int]


class TorchDtypeNode(_Struct, frozen=True, gc=False, tag="dtype"):
    """A torch.dtype by its name."""

    name: str


class TorchDeviceNode(_Struct, frozen=True, gc=False, tag="device"):
    """A torch.device as torch writes it (``cuda:0``)."""

    name: str


class NumpyScalarNode(_Struct, frozen=True, gc=False, tag="npscalar"):
    """A numpy scalar: its dtype and its bytes."""

    dtype: str
    data: bytes


class NumpyDtypeNode(_Struct, frozen=True, gc=False, tag="npdtype"):
    """A numpy dtype by its name."""

    name: str


SequenceNode: TypeAlias = ListNode | TupleNode | SetNode | FrozenSetNode
MappingNode: TypeAlias = DictNode | OrderedDictNode | CounterNode
Node: TypeAlias = Union[  # noqa: UP007 - the members name each other, so this cannot be written with bars
    bool,
    int,
    float,
    str,
    ArrayNode,
    StatefulNode,
    ListNode,
    TupleNode,
    SetNode,
    FrozenSetNode,
    DictNode,
    OrderedDictNode,
    CounterNode,
    BigIntNode,
    ComplexNode,
    SurrogateStrNode,
    BytesNode,
    BytearrayNode,
    SizeNode,
    TorchDtypeNode,
    TorchDeviceNode,
    NumpyScalarNode,
    NumpyDtypeNode,
    None,
]


def arrays(node: Node) -> Iterator[int]:
    """Yield the index of every array in the tree, in no particular order."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ArrayNode):
            yield node.index
        elif isinstance(node, _Struct):
            waiting.extend(children(node))


def children(node: Node) -> Iterator[Node]:
    """Yield the direct children of a node: keys and values of a mapping, items of a sequence."""
    match node:
        case ListNode() | TupleNode() | SetNode() | FrozenSetNode():
            yield from node.items
        case OrderedDictNode():
            yield from node.keys
            yield from node.values
            yield from node.metadata
        case DictNode() | CounterNode():
            yield from node.keys
            yield from node.values
        case StatefulNode():
            yield node.child
        case _:
            pass
