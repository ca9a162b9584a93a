"""The app state as a tree of plain nodes and a table of arrays, and back. No I/O, no pickle, nothing converted.

``save`` takes a live state apart, ``restore`` makes or fills one, ``cache`` makes the second save cheap. It may import
:mod:`pccheck_async.format`, :mod:`pccheck_async.telemetry` and :mod:`pccheck_async.errors`.
"""

from pccheck_async.state.restore.listing import Listing, StoredLeaf, list_leaves
from pccheck_async.state.restore.match import Restoration, allocate, match
from pccheck_async.state.rng import RNGState
from pccheck_async.state.stateful import Stateful
from pccheck_async.state.targets import Target, Targets

__all__ = [
    "Listing",
    "RNGState",
    "Restoration",
    "Stateful",
    "StoredLeaf",
    "Target",
    "Targets",
    "allocate",
    "list_leaves",
    "match",
]
