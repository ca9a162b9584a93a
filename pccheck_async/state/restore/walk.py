"""The names in a skeleton: what lies directly below a node, and every leaf below it by its path."""

from __future__ import annotations

from collections.abc import Iterator

from pccheck_async.format.skeleton import (
    CounterNode,
    DictNode,
    ListNode,
    Node,
    OrderedDictNode,
    StatefulNode,
    TupleNode,
)
from pccheck_async.state import paths
from pccheck_async.state.restore.rebuild import mapping_keys
from pccheck_async.state.values import VERBATIM

__all__ = ["below", "count", "leaves", "opened"]


def opened(node: Node) -> Node:
    """Return the node, or what an object's ``state_dict()`` returned in its place."""
    while isinstance(node, StatefulNode):
        node = node.child
    return node


def below(node: Node) -> list[tuple[str, Node]]:
    """Return what lies directly below a node, by the names that paths are made of; empty for leaves.

    Leaves are arrays, plain values, sets, and containers in which there is nothing.

    Raises:
        CorruptStoreError: the keys of a mapping are impossible.
    """
    match node:
        case StatefulNode():
            return below(opened(node))
        case DictNode() | OrderedDictNode() | CounterNode():
            return list(zip(paths.components(mapping_keys(node)), node.values, strict=True))
        case ListNode() | TupleNode():
            return [(str(index), item) for index, item in enumerate(node.items)]
        case _:
            return []


def leaves(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yield path and node of every leaf, in the order of the state. Raises CorruptStoreError (see :func:`below`)."""
    children = below(node)
    if not children:
        yield path, opened(node)
    for name, child in children:
        yield from leaves(child, paths.child(path, name))


def count(node: Node) -> int:
    """Return how many leaves there are."""
    number, waiting = 0, [node]
    while waiting:
        match opened(waiting.pop()):
            case DictNode(values=inside) | OrderedDictNode(values=inside) | CounterNode(values=inside):
                pass
            case ListNode(items=inside) | TupleNode(items=inside):
                pass
            case _:
                inside = []
        if VERBATIM.issuperset(map(type, inside)):  # a loader's permutation may have millions of numbers
            number += max(1, len(inside))
        else:
            waiting += inside
    return number
