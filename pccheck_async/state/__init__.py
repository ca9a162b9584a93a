# SPDX-License-Identifier: Apache-2.0
"""The app state as a tree of plain nodes and a table of arrays, and back. No I/O, no pickle, nothing converted.

``save`` flattens a live state, ``restore`` makes or fills one, ``cache`` makes the second save cheap. This package may
import :mod:`pccheck_async.format`, :mod:`pccheck_async.telemetry` and :mod:`pccheck_async.errors`.

Other packages import these modules by name: ``restore.tree`` reads skeletons, ``restore.parts`` plans reading from
several ranks' parts, ``tensor_access`` watches accesses to memory, ``ambient`` switches off torch's modes, ``foreign``
converts values of users' classes, ``values`` plain values; ``paths`` makes the names of leaves.
"""

from pccheck_async.state.boxes import Box, FlatShard, PlannedBoxes, boxes_of_range
from pccheck_async.state.cache.layout_cache import LayoutCache, cached_layout
from pccheck_async.state.cache.memo import Memo, Memos
from pccheck_async.state.cache.patterns import Outline
from pccheck_async.state.leaves import HOST, Array, PackedSource, Sources, as_bits
from pccheck_async.state.restore.arrays import Allocation, Target, Targets, cut_ranges
from pccheck_async.state.restore.bind import Restoration, allocate, match
from pccheck_async.state.restore.live import LiveTree, live_tree
from pccheck_async.state.rng import RNGState
from pccheck_async.state.save.flatten import check_outermost, flatten, flatten_unchecked
from pccheck_async.state.save.owners import Owners, broadcast_buffers
from pccheck_async.state.save.replicas import ReplicaSample
from pccheck_async.state.save.split import LazyPart, split
from pccheck_async.state.save.torn import Versions
from pccheck_async.state.stateful import Stateful, containers_and_objects, is_stateful, refuse_filling, state_dicts
from pccheck_async.state.storages import Layout, arrange

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
    "Memo",
    "Memos",
    "Outline",
    "Owners",
    "PackedSource",
    "PlannedBoxes",
    "RNGState",
    "ReplicaSample",
    "Restoration",
    "Sources",
    "Stateful",
    "Target",
    "Targets",
    "Versions",
    "allocate",
    "arrange",
    "as_bits",
    "boxes_of_range",
    "broadcast_buffers",
    "cached_layout",
    "check_outermost",
    "containers_and_objects",
    "cut_ranges",
    "flatten",
    "flatten_unchecked",
    "is_stateful",
    "live_tree",
    "match",
    "refuse_filling",
    "split",
    "state_dicts",
]  # fmt: skip
