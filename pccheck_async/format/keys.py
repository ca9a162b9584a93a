"""Keys of mappings and items of sets: what Python can find quickly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from types import NoneType
from typing import Final

from pccheck_async.format.skeleton import BytesNode, Node, SurrogateStrNode

__all__ = ["MOST_ALIKE", "too_alike"]

MOST_ALIKE: Final = 256
"""Keys of one mapping that may have one hash. Each is compared with all others of its hash, so a file with many such
keys would take time by the square of its size. Whoever does not look for them has few (tuples of -1 and -2, which have
the same hash, would take nine of these each); long ints that differ by a multiple of 2**61 - 1 all have."""

_SPREAD: Final = frozenset((NoneType, bool, int, float, str, BytesNode, SurrogateStrNode))
"""Nodes of values whose hashes nobody can choose, or of which fewer than that have the same."""


def too_alike(nodes: Sequence[Node], values: Sequence[Hashable]) -> bool:
    """Whether more than :data:`MOST_ALIKE` of these different keys have the same hash.

    Args:
        nodes: Of the keys.
        values: The keys themselves.
    """
    if len(nodes) <= MOST_ALIKE or _SPREAD.issuperset(map(type, nodes)):
        return False
    return max(Counter(map(hash, values)).values()) > MOST_ALIKE
