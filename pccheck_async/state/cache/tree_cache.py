"""The outline of a state: what the walk over it found, so that the next save compares it instead of walking again.

An outline has the keys and types in a state (:mod:`.state.cache.patterns`), the nodes that were made of them, and the
plain values; it holds no array, and nothing about the arrays' memory, which is examined anew at every save
(:mod:`.state.cache.layout_cache`). The items of the outermost mapping match or differ each by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from operator import is_
from typing import Any, Final

import torch

from pccheck_async.format import dtypes
from pccheck_async.format.skeleton import ArrayNode, Node, ShardedNode
from pccheck_async.state.cache.patterns import Depends, Pattern, same_classes

array_node: Final = lru_cache(1 << 16)(ArrayNode)
"""The same node for the same index, so that nodes can be compared by identity."""

CHANGING: Final = object()
"""Remembered in place of a plain value that may change and still be the same object: it never counts as the same."""


@lru_cache(1 << 14)
def sharded_node(
    first: int, mesh: int, dtype: torch.dtype, plain: bool, shape: tuple[int, ...], offsets: tuple[tuple[int, ...], ...]
) -> ShardedNode:
    """Return the node of a tensor whose boxes are the leaves from ``first`` on; the same for equal arguments."""
    nodes = tuple(map(array_node, range(first, first + len(offsets))))
    return ShardedNode(mesh, dtypes.TORCH_NAMES[dtype], plain, shape, offsets, nodes)


@dataclass(slots=True, eq=False)
class Outline:
    """The outline of one state. Its items are the attributes of an OrderedDict, and then the items of the mapping."""

    make: Any  # makes the node of the mapping
    attributes: int  # how many of the items are attributes
    keys: list[str]
    key_nodes: list[Node]
    names: list[str]  # of the keys in paths
    patterns: tuple[Pattern, ...] = ()
    nodes: list[Node] = field(default_factory=list)
    leaves_at: list[int] = field(default_factory=list)  # number of the first leaf of each item, at last of all
    plain_at: list[int] = field(default_factory=list)  # and of the first plain value
    paths: list[str] = field(default_factory=list)  # of the leaves
    plain: list[Any] = field(default_factory=list)  # the plain values
    places: list[tuple[str, int, int]] = field(default_factory=list)  # their paths, depths, and the Statefuls around
    detached: list[range] = field(default_factory=list)  # see Leaves
    classes: dict[type, Depends] = field(default_factory=dict)  # of the objects that are read
    root: Any = None

    def holds(self, make: Any, attributes: int, keys: list[str]) -> bool:
        """Return whether a mapping has these keys, and classes are as they were."""
        return (
            make is self.make
            and attributes == self.attributes
            and keys == self.keys
            and (not self.classes or same_classes(self.classes))
        )


def same_objects(one: Iterable[object], other: Iterable[object]) -> bool:
    """Whether two sequences of one length hold the same objects."""
    return all(map(is_, one, other))
