"""A bound on how many keys of a mapping, or items of a set, have the same hash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from types import NoneType
from typing import Final

from pccheck_async.format.skeleton import BytesNode, Node, SurrogateStrNode

MOST_ALIKE: Final = 256
"""Keys of one mapping that may have the same hash. Python compares each of them with all others, so a file made of such
keys would take time by the square of its size. Honest mappings have few: tuples of -1 and -2, which hash alike, would
need nine items each to exceed it; only ints that differ by multiples of 2**61 - 1 exceed it easily."""

_SPREAD: Final = frozenset((NoneType, bool, int, float, str, BytesNode, SurrogateStrNode))
"""Nodes of values of which nobody can choose more than that with the same hash."""


def too_alike(nodes: Sequence[Node], values: Sequence[Hashable]) -> bool:
    """Return whether more than :data:`MOST_ALIKE` of the different keys ``values``, with these nodes, hash alike."""
    if len(nodes) <= MOST_ALIKE or _SPREAD.issuperset(map(type, nodes)):
        return False
    return max(Counter(map(hash, values)).values()) > MOST_ALIKE
