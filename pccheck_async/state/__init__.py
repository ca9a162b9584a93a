"""The app state as a tree of plain nodes and a table of arrays, and back. No I/O, no pickle, nothing converted.

``save`` takes a live state apart, ``restore`` makes or fills one, ``cache`` makes the second save cheap. It may import
:mod:`pccheck_async.format`, :mod:`pccheck_async.telemetry` and :mod:`pccheck_async.errors`.
"""

from pccheck_async.state.ambient import apart, no_dispatch, no_functions, refuse_tracing
from pccheck_async.state.boxes import Box, FlatShard, PlannedBoxes, boxes_of_range
from pccheck_async.state.cache.layout_cache import LayoutCache, cached_layout
from pccheck_async.state.cache.tree_cache import Outline
from pccheck_async.state.foreign import compose, refuse_pickled, unpickle
from pccheck_async.state.leaves import Array
from pccheck_async.state.restore.arrays import Allocation, Target, Targets, viewed_ranges
from pccheck_async.state.restore.bind import Restoration, allocate, live_tree, match
from pccheck_async.state.restore.parts import (
    StoredBox,
    Wanted,
    merge_parts,
    private_mesh,
    reshard,
    sharded_paths,
    stored_boxes,
)
from pccheck_async.state.restore.tree import below, check_classes, mapping_keys, opened, rebuild, refuse_boxes, select
from pccheck_async.state.rng import RNGState
from pccheck_async.state.save.flatten import LiveTree, check_outermost, flatten, flatten_unchecked
from pccheck_async.state.save.owners import Owners, broadcast_buffers
from pccheck_async.state.save.replicas import Sample
from pccheck_async.state.save.split import LazyPart, Splitter
from pccheck_async.state.save.torn import Versions
from pccheck_async.state.sources import HOST, PackedSource, Sources, as_bits
from pccheck_async.state.stateful import Stateful, refuse_filling, state_dicts
from pccheck_async.state.storages import Layout, arrange
from pccheck_async.state.tensor_access import (
    accessed_since,
    begin_period,
    call_before_accesses,
    exempt_this_thread,
    stop_calling,
    stop_watching_accesses,
    storage_address,
    watch_accesses,
)
from pccheck_async.state.values import atom, from_node

__all__ = [
    "HOST",
    "Allocation",
    "Array",
    "Box",
    "FlatShard",
    "Layout",
    "LayoutCache",
    "LazyPart",
    "LiveTree",
    "Outline",
    "Owners",
    "PackedSource",
    "PlannedBoxes",
    "RNGState",
    "Restoration",
    "Sample",
    "Sources",
    "Splitter",
    "Stateful",
    "StoredBox",
    "Target",
    "Targets",
    "Versions",
    "Wanted",
    "accessed_since",
    "allocate",
    "apart",
    "arrange",
    "as_bits",
    "atom",
    "begin_period",
    "below",
    "boxes_of_range",
    "broadcast_buffers",
    "cached_layout",
    "call_before_accesses",
    "check_classes",
    "check_outermost",
    "compose",
    "exempt_this_thread",
    "flatten",
    "flatten_unchecked",
    "from_node",
    "live_tree",
    "mapping_keys",
    "match",
    "merge_parts",
    "no_dispatch",
    "no_functions",
    "opened",
    "private_mesh",
    "rebuild",
    "refuse_boxes",
    "refuse_filling",
    "refuse_pickled",
    "refuse_tracing",
    "reshard",
    "select",
    "sharded_paths",
    "state_dicts",
    "stop_calling",
    "stop_watching_accesses",
    "storage_address",
    "stored_boxes",
    "unpickle",
    "viewed_ranges",
    "watch_accesses",
]  # fmt: skip
