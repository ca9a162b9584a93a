"""The tree cache: outlines of the containers of a state, so that those that are as they were are not flattened again.

An outline has the keys and types in a container, and the nodes that were made of them; it holds no array, and
nothing about the arrays' memory, which is examined anew at every save (:mod:`.state.cache.layout_cache`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from operator import is_
from typing import Any, Final, TypeAlias

import torch

from pccheck_async.format import dtypes
from pccheck_async.format.skeleton import ArrayNode, DictNode, Node, OrderedDictNode, ShardedNode, StatefulNode
from pccheck_async.state import values
from pccheck_async.state.leaves import KINDS, Leaves

_COMPARABLE: Final = frozenset((str, int))
"""Types of keys that have the same node if they are equal; 0.0 equals -0.0, and (1,) equals (True,)."""


array_node: Final = lru_cache(1 << 16)(ArrayNode)
"""The same node for the same index, so that nodes can be compared by identity."""


@lru_cache(1 << 14)
def sharded_node(
    first: int, mesh: int, dtype: torch.dtype, plain: bool, shape: tuple[int, ...], offsets: tuple[tuple[int, ...], ...]
) -> ShardedNode:
    """Return the node of a tensor whose boxes are the leaves from ``first`` on; the same for equal arguments."""
    nodes = tuple(map(array_node, range(first, first + len(offsets))))
    return ShardedNode(mesh, dtypes.TORCH_NAMES[dtype], plain, shape, offsets, nodes)


@dataclass(slots=True, eq=False)
class Shape:
    """A container without its items."""

    kind: Any  # its type
    keys: list[Any] | None  # of a mapping; None for a sequence
    key_nodes: list[Node]
    names: list[str]  # of the items in paths
    make: Callable[..., Node]  # makes its node

    def items(self, value: Any) -> Sequence[Any] | None:
        """Return the items of a container that has this shape; None if it has another one."""
        if type(value) is not self.kind or len(value) != len(self.names):
            return None
        keys = self.keys
        if keys is None:
            items: Sequence[Any] = value
            return items
        if not all(map(is_, value, keys)):  # a module makes the names of its parameters anew
            now = [*value]
            if now != keys or not _COMPARABLE.issuperset(map(type, now + keys)):
                return None
        return [*value.values()]

    def node(self, nodes: list[Node], metadata: list[Node]) -> Node:
        """Return the node of a container with the nodes of its items."""
        if self.keys is None:
            return self.make(nodes)
        return self.make(self.key_nodes, nodes, *([metadata] if self.make is OrderedDictNode else ()))


class Flat:
    """Items none of which is a container: arrays, which have these ``paths``, and plain values."""

    def __init__(self, items: Sequence[Any], nodes: list[Node], paths: list[str]) -> None:
        self.nodes = nodes
        self._paths = paths
        self._kinds = [*map(type, items)]
        self._arrays = [number for number, kind in enumerate(self._kinds) if kind in KINDS]
        self._plain = [number for number, kind in enumerate(self._kinds) if kind not in KINDS]
        # A mutable value may have changed and still be the same object: it never counts as the same.
        self._values = [object() if type(items[n]) is bytearray else items[n] for n in self._plain]
        first = nodes[self._arrays[0]] if self._arrays else None
        self._first = first.index if isinstance(first, ArrayNode) else None

    def reuse(self, items: Sequence[Any], leaves: Leaves) -> list[Node] | None:
        """Return the nodes of items of the types they had; the very same list if the plain values are the same objects.

        None if their types differ, or their first array has another number; nothing was touched then.
        """
        arrays = leaves.values
        if [*map(type, items)] != self._kinds or self._first not in (None, len(arrays)):
            return None
        leaves.paths += self._paths
        if not self._plain:
            arrays += items
            return self.nodes
        arrays += [items[number] for number in self._arrays]
        plain = [items[number] for number in self._plain]
        if same_objects(plain, self._values):
            return self.nodes
        nodes = self.nodes.copy()
        for number, value in zip(self._plain, plain, strict=True):
            nodes[number] = values.ATOMS[type(value)](value)
        return nodes


class Rows:
    """Dicts of flat items (one per parameter, or per module), taken all at once; the arrays have these ``paths``."""

    def __init__(self, dicts: Sequence[dict[Any, Any]], nodes: list[Node], paths: list[str]) -> None:
        self.nodes = nodes
        self._lengths = [*map(len, dicts)]
        self._keys = [*chain.from_iterable(dicts)]
        inner = [node for row in nodes if isinstance(row, DictNode) for node in row.values]
        self._flat = Flat([*chain.from_iterable(map(dict.values, dicts))], inner, paths)

    def reuse(self, items: Sequence[Any], leaves: Leaves) -> list[Node] | None:
        """Return the nodes of dicts with the keys they had (see :meth:`Flat.reuse`)."""
        if {*map(type, items)} != {dict} or [*map(len, items)] != self._lengths:
            return None
        if not same_objects(chain.from_iterable(items), self._keys):
            return None
        inner = self._flat.reuse([*chain.from_iterable(map(dict.values, items))], leaves)
        if inner is None or inner is self._flat.nodes:
            return None if inner is None else self.nodes
        each = iter(inner)
        return [DictNode(row.keys, [*islice(each, len(row.keys))]) for row in self.nodes if isinstance(row, DictNode)]


@dataclass(slots=True, eq=False)
class Branches:
    """Items some of which are containers or objects, and the outline of each. They have to be walked."""

    nodes: list[Node]
    below: list[Outline | None]


Content: TypeAlias = Flat | Rows | Branches


@dataclass(slots=True, eq=False)
class ContainerOutline:
    """A dict, list or tuple with arrays somewhere below, or the ``_metadata`` of a module."""

    shape: Shape
    content: Content
    metadata: Sequence[Visited]
    node: Node


@dataclass(slots=True, eq=False)
class ObjectOutline:
    """A Stateful: the outline of its ``state_dict()``."""

    node: StatefulNode
    below: Outline


Outline: TypeAlias = ContainerOutline | ObjectOutline | ArrayNode
"""The outline of one value; of an array, its node."""
Visited: TypeAlias = tuple[Node, Outline | None]
"""The node of a value, and its outline."""


def same_objects(one: Iterable[object], other: Iterable[object]) -> bool:
    """Whether two sequences of one length hold the same objects."""
    return all(map(is_, one, other))
