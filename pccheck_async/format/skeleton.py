# SPDX-License-Identifier: Apache-2.0
"""The skeleton of a state, as the manifest holds it: a tree of plain nodes, with arrays replaced by their indices.

None, bool, int (64 bits), float and str are MessagePack's own; a value of any other type is a MessagePack array that
begins with the type's tag (``["tuple", [1, 2]]``). Floats keep all their bits, NaN payloads included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from types import NoneType
from typing import Final, TypeAlias

import msgspec
from msgspec import structs

MAX_DEPTH: Final = 100
"""Most levels of nesting of a state; far below the limits of Python's and msgpack's stacks."""
MOST_ALIKE: Final = 256
"""Most keys of one mapping with the same hash. Python compares each of them with all others, so a file made of such
keys would take time by the square of its size. Honest mappings have few: tuples of -1 and -2, which hash alike, would
need nine items each to exceed it; only ints that differ by multiples of 2**61 - 1 exceed it easily."""


class _Struct(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A node that is an array on disk: the tag, then the fields in their order."""


class ArrayNode(_Struct, frozen=True, gc=False, tag="array"):
    """A tensor or numpy array: its index in :attr:`Manifest.tensors`."""

    index: int


class ShardedNode(_Struct, frozen=True, tag="sharded"):
    """A tensor that lies on several ranks: its dtype and global shape, and the boxes of it that this part has.

    A box is an array, whose shape is the size of the box; ``offsets`` has its first index in each dimension. A part
    may have no boxes: if ranks that share a filesystem have the same box, only one of them saves it.
    """

    mesh: int
    """A hash of the ranks that the tensor lies on: tensors with one path on different ranks are different tensors.
    Negative only for plain tensors of one rank, where parts are merged (:func:`private_mesh`); never on disk."""
    dtype: str
    plain: bool
    """Whether it was a plain tensor with equal values on all ranks, and no DTensor."""
    shape: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]
    boxes: tuple[ArrayNode, ...]


class StatefulNode(_Struct, frozen=True, tag="stateful"):
    """An object with ``state_dict``; ``child`` is the result of calling that."""

    child: Node


class _Items(_Struct, frozen=True):
    """A sequence or a set."""

    items: list[Node]


class ListNode(_Items, frozen=True, tag="list"):
    """A list."""


class TupleNode(_Items, frozen=True, tag="tuple"):
    """A tuple."""


class SetNode(_Items, frozen=True, tag="set"):
    """A set."""


class FrozenSetNode(_Items, frozen=True, tag="frozenset"):
    """A frozenset."""


class ComposedNode(_Items, frozen=True, tag="composed"):
    """A tensor of a class that composes it of other tensors (``__tensor_flatten__``): their arrays are the items."""

    names: list[str]
    """The names of the attributes that hold the items, in their order."""
    context: Node
    """The context that ``__tensor_flatten__`` returned beside the names: plain values."""
    module: str
    """The module of the tensor's class."""
    name: str
    """The qualified name of the class in its module."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Mapping(_Struct, frozen=True):
    """A mapping in its order, one key per value; keys of any hashable supported type."""

    keys: list[Node]
    values: list[Node]


class DictNode(_Mapping, frozen=True, tag="dict"):
    """A dict."""


class OrderedDictNode(_Mapping, frozen=True, tag="ordered"):
    """An OrderedDict; ``metadata`` is a list with the ``_metadata`` that nn.Module sets on it, or an empty list."""

    metadata: list[Node]


class CounterNode(_Mapping, frozen=True, tag="counter"):
    """A collections.Counter."""


class _Data(_Struct, frozen=True, gc=False):
    """A value that is a string of bytes."""

    data: bytes


class _Named(_Struct, frozen=True, gc=False):
    """A value that has a name."""

    name: str


class BigIntNode(_Data, frozen=True, gc=False, tag="int"):
    """An int beyond 64 bits: two's complement, little-endian."""


class ComplexNode(_Struct, frozen=True, gc=False, tag="complex"):
    """A complex number."""

    real: float
    imag: float


class SurrogateStrNode(_Data, frozen=True, gc=False, tag="str"):
    """A str with lone surrogates, which strict UTF-8 cannot encode: UTF-8 with ``surrogatepass``."""


class BytesNode(_Data, frozen=True, gc=False, tag="bytes"):
    """A bytes object."""


class BytearrayNode(_Data, frozen=True, gc=False, tag="bytearray"):
    """A bytearray."""


class SizeNode(_Struct, frozen=True, tag="size"):
    """A torch.Size."""

    items: list[int]


class TorchDtypeNode(_Named, frozen=True, gc=False, tag="dtype"):
    """A torch.dtype by its name (``float32``)."""


class TorchDeviceNode(_Named, frozen=True, gc=False, tag="device"):
    """A torch.device as torch writes it (``cuda:0``)."""


class NumpyScalarNode(_Struct, frozen=True, gc=False, tag="npscalar"):
    """A numpy scalar: its dtype and its bytes."""

    dtype: str
    data: bytes


class NumpyDtypeNode(_Named, frozen=True, gc=False, tag="npdtype"):
    """A numpy dtype by its name, byte order included (``<f4``)."""


class PickledNode(_Struct, frozen=True, gc=False, tag="pickle"):
    """A value of a user's type, written by ``torch.save``; unpickled only on request, as that may run code."""

    kind: str
    """The name of the value's type, with the module."""
    data: bytes


MappingNode: TypeAlias = DictNode | OrderedDictNode | CounterNode
_Container: TypeAlias = MappingNode | ListNode | TupleNode | SetNode | FrozenSetNode
_Value: TypeAlias = BigIntNode | ComplexNode | SurrogateStrNode | BytesNode | BytearrayNode | PickledNode
_Torch: TypeAlias = SizeNode | TorchDtypeNode | TorchDeviceNode
_Numpy: TypeAlias = NumpyScalarNode | NumpyDtypeNode
_Array: TypeAlias = ArrayNode | ShardedNode | ComposedNode
Node: TypeAlias = bool | int | float | str | _Array | StatefulNode | _Container | _Value | _Torch | _Numpy | None


_PARENTS: Final = (OrderedDictNode, _Items, StatefulNode, ShardedNode)


def arrays(node: Node) -> list[int]:
    """Return the index of every array in the tree, in no particular order."""
    return [each.index for each in walk(node) if isinstance(each, ArrayNode)]


def walk(node: Node) -> list[Node]:
    """Return every node of the tree, a node before those below it."""
    found = [node]
    for each in found:  # which grows meanwhile
        if isinstance(each, (DictNode, CounterNode)):  # most of them
            found += each.keys
            found += each.values
        elif isinstance(each, _PARENTS):
            found += children(each)
    return found


def children(node: Node) -> Sequence[Node]:
    """Return the direct children of a node: keys and values of a mapping, items of a sequence or set."""
    if isinstance(node, _Mapping):
        return [*node.keys, *node.values, *(node.metadata if isinstance(node, OrderedDictNode) else ())]
    if isinstance(node, _Items):
        return [*node.items, node.context] if isinstance(node, ComposedNode) else node.items
    if isinstance(node, StatefulNode):
        return (node.child,)
    return node.boxes if isinstance(node, ShardedNode) else ()


def replace_arrays(node: Node, place: Callable[[ArrayNode | ShardedNode], ArrayNode | ShardedNode]) -> Node:
    """Return a tree with another node in place of each tensor or array."""
    if isinstance(node, (ArrayNode, ShardedNode)):
        return place(node)
    if isinstance(node, _Items):
        return structs.replace(node, items=[replace_arrays(item, place) for item in node.items])
    if isinstance(node, _Mapping):
        return structs.replace(node, values=[replace_arrays(value, place) for value in node.values])
    return StatefulNode(replace_arrays(node.child, place)) if isinstance(node, StatefulNode) else node


_SPREAD: Final = frozenset((NoneType, bool, int, float, str, BytesNode, SurrogateStrNode))
"""Node types of values of which no file can have more than :data:`MOST_ALIKE` with the same hash."""


def too_alike(nodes: Sequence[Node], values: Sequence[Hashable]) -> bool:
    """Return whether more than :data:`MOST_ALIKE` of the different keys ``values``, with these nodes, hash alike."""
    if len(nodes) <= MOST_ALIKE or _SPREAD.issuperset(map(type, nodes)):
        return False
    return max(Counter(map(hash, values)).values()) > MOST_ALIKE
