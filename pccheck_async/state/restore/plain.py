"""Plain values of a live state: without arrays and objects, so that they are replaced or refilled as a whole."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import numpy as np
import torch

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.format.skeleton import (
    ArrayNode,
    CounterNode,
    DictNode,
    ListNode,
    MappingNode,
    Node,
    OrderedDictNode,
    SetNode,
    StatefulNode,
    TupleNode,
    children,
)
from pccheck_async.state import paths
from pccheck_async.state.restore.rebuild import mapping_keys
from pccheck_async.state.restore.walk import below
from pccheck_async.state.save.flatten import flatten, is_stateful

__all__ = ["MAPPINGS", "REFILLED", "SEQUENCES", "equal", "has_parts", "homeless", "live_parts", "refill", "savable"]

MAPPINGS: Final[Mapping[type, type[msgspec.Struct]]] = {
    dict: DictNode,
    OrderedDict: OrderedDictNode,
    Counter: CounterNode,
}
SEQUENCES: Final[Mapping[type, type[msgspec.Struct]]] = {list: ListNode, tuple: TupleNode}
REFILLED: Final[Mapping[type, type[msgspec.Struct]]] = {**MAPPINGS, list: ListNode, set: SetNode}
"""Containers that take another content and stay the same object."""
_NOWHERE: Final = object()


def has_parts(node: Node) -> bool:
    """Whether there is an array or an object in a stored tree."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ArrayNode, StatefulNode)):
            return True
        waiting.extend(children(node))
    return False


def homeless(live: Any, node: Node, path: str) -> Iterator[str]:
    """Yield the paths of stored objects for which there is no place in a live plain value, not even one for a None."""
    if isinstance(node, StatefulNode):
        if live is _NOWHERE:
            yield path
    elif has_parts(node):
        mapping = isinstance(node, MappingNode)
        keys = mapping_keys(node) if isinstance(node, MappingNode) else range(len(below(node)))
        there = live if mapping and isinstance(live, Mapping) else {}
        if not mapping and isinstance(live, (list, tuple)):
            there = dict(enumerate(live))
        for key, (name, child) in zip(keys, below(node), strict=True):
            yield from homeless(there.get(key, _NOWHERE), child, paths.child(path, name))


def live_parts(live: Any) -> bool:
    """Whether there is an array or an object in a live tree."""
    waiting, seen = [live], set()
    while waiting:
        live = waiting.pop()
        if isinstance(live, (torch.Tensor, np.ndarray)) or is_stateful(live):
            return True
        if isinstance(live, (Mapping, list, tuple)) and id(live) not in seen:
            seen.add(id(live))
            waiting.extend(live.values() if isinstance(live, Mapping) else live)
    return False


def savable(live: Any) -> bool:
    """Whether a live value could be saved as it is."""
    try:
        flatten({"value": live})
    except UnsupportedStateError:
        return False
    return True


def equal(live: Any, node: Node) -> bool:
    """Whether a live plain value would be saved as ``node``, to the bit."""
    try:
        skeleton = flatten({"value": live}).skeleton
    except UnsupportedStateError:
        return False
    assert isinstance(skeleton, DictNode)
    return msgspec.msgpack.encode(skeleton.values[0]) == msgspec.msgpack.encode(node)


def refill(live: Any, value: Any) -> None:
    """Give a live container the content of another one of its type."""
    if isinstance(live, list):
        live[:] = value
        return
    live.clear()
    live.update(value)
    if hasattr(value, "_metadata"):
        live._metadata = value._metadata
