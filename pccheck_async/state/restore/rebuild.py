"""A skeleton and its arrays made into Python values again, every one with the type that was saved."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from pccheck_async.errors import CorruptStoreError
from pccheck_async.format.keys import MOST_ALIKE, too_alike
from pccheck_async.format.skeleton import (
    MAX_DEPTH,
    ArrayNode,
    CounterNode,
    DictNode,
    FrozenSetNode,
    ListNode,
    MappingNode,
    Node,
    OrderedDictNode,
    SetNode,
    StatefulNode,
    TupleNode,
)
from pccheck_async.state import values

__all__ = ["mapping_keys", "rebuild"]


def rebuild(
    node: Node,
    array: Callable[[int], Any],
    stateful: Callable[[StatefulNode], Any] | None = None,
    depth: int = 0,
) -> Any:
    """Return the value that ``node`` describes.

    Args:
        node: The tree.
        array: Gives the array of an index in the tensor table.
        stateful: Gives what stands for a Stateful; without it, that is the state that it returned.
        depth: Levels above this node.

    Raises:
        CorruptStoreError: The tree describes no value.
    """
    if depth > MAX_DEPTH:
        raise CorruptStoreError(f"the state is nested more than {MAX_DEPTH} levels deep")
    match node:
        case ArrayNode():
            return array(node.index)
        case StatefulNode():
            return stateful(node) if stateful is not None else rebuild(node.child, array, None, depth + 1)
        case ListNode():
            return _each(node.items, array, stateful, depth + 1)
        case TupleNode():
            return tuple(_each(node.items, array, stateful, depth + 1))
        case SetNode() | FrozenSetNode():
            return _key(node, depth) if isinstance(node, FrozenSetNode) else set(_distinct(node.items, depth + 1))
        case DictNode() | OrderedDictNode() | CounterNode():
            return _mapping(node, array, stateful, depth)
        case _:
            return values.from_node(node)


def _each(
    nodes: list[Node], array: Callable[[int], Any], stateful: Callable[[StatefulNode], Any] | None, depth: int
) -> list[Any]:
    verbatim = values.VERBATIM
    return [node if type(node) in verbatim else rebuild(node, array, stateful, depth) for node in nodes]


def mapping_keys(node: MappingNode, depth: int = 0) -> list[Hashable]:
    """Return the keys of a mapping, one per value and all different. Raises CorruptStoreError where they are not."""
    if len(node.keys) != len(node.values):
        raise CorruptStoreError(f"a mapping has {len(node.keys)} keys and {len(node.values)} values")
    return _distinct(node.keys, depth + 1)


def _mapping(
    node: MappingNode, array: Callable[[int], Any], stateful: Callable[[StatefulNode], Any] | None, depth: int
) -> Any:
    keys = mapping_keys(node, depth)
    items = zip(keys, _each(node.values, array, stateful, depth + 1), strict=True)
    if isinstance(node, DictNode):
        return dict(items)
    if isinstance(node, CounterNode):
        return Counter(dict(items))
    ordered = OrderedDict(items)
    if len(node.metadata) > 1:
        raise CorruptStoreError("an OrderedDict has more than one _metadata")
    for metadata in node.metadata:
        ordered._metadata = rebuild(metadata, array, stateful, depth + 1)  # type: ignore[attr-defined]
    return ordered


def _distinct(nodes: list[Node], depth: int) -> list[Hashable]:
    keys = [_key(node, depth) for node in nodes]
    if too_alike(nodes, keys):
        raise CorruptStoreError(f"more than {MOST_ALIKE} keys of a mapping or items of a set have the same hash")
    if len(set(keys)) != len(keys):
        raise CorruptStoreError("the keys of a mapping or the items of a set are not all different")
    return keys


def _key(node: Node, depth: int) -> Hashable:
    """The value of a key or of an item in a set: hashable, and never an array."""
    if depth > MAX_DEPTH:
        raise CorruptStoreError(f"the state is nested more than {MAX_DEPTH} levels deep")
    if isinstance(node, TupleNode):
        return tuple([_key(item, depth + 1) for item in node.items])
    if isinstance(node, FrozenSetNode):
        return frozenset(_distinct(node.items, depth + 1))
    value: Hashable = values.from_node(node)
    try:
        hash(value)
    except TypeError:
        raise CorruptStoreError(f"a {type(value).__name__} is no key") from None
    return value
