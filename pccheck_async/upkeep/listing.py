# SPDX-License-Identifier: Apache-2.0
"""The leaves of a stored state by their paths, as people and reports name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from math import prod
from typing import Any, Final, NamedTuple

import msgspec

from pccheck_async.errors import CorruptStoreError, readable
from pccheck_async.format import dtypes
from pccheck_async.format import skeleton as nodes
from pccheck_async.format.manifest import Manifest, TensorEntry
from pccheck_async.format.skeleton import (
    ArrayNode,
    ComposedNode,
    ListNode,
    MappingNode,
    Node,
    OrderedDictNode,
    PickledNode,
    ShardedNode,
    StatefulNode,
    children,
)
from pccheck_async.state import paths
from pccheck_async.state.restore.tree import below, has_parts, rebuild

_METADATA: Final = "._metadata"
"""Path component for the ``_metadata`` that ``nn.Module`` sets on its state; a dot in a key would be escaped."""
_CONTEXT: Final = "._context"
"""Path component for everything that a composed tensor has beside its parts."""
_MOST_COMPARED: Final = 256
"""Most views of one storage that are searched for one that overlaps."""
_DATA: Final = nodes.BytesNode | nodes.BytearrayNode | nodes.SurrogateStrNode


class _Pickled:
    """A stand-in for a pickled value: nothing here unpickles."""

    def __init__(self, node: PickledNode) -> None:
        self._node = node

    def __repr__(self) -> str:
        return f"<pickled {self._node.kind}, {len(self._node.data)} bytes>"


@dataclass(frozen=True, slots=True, eq=False)
class StoredLeaf:
    """One tensor, array or plain value of a checkpoint. A list or tuple of plain values is one leaf."""

    names: tuple[str, ...]  # the components of its path
    entry: TensorEntry | None = None  # of an array
    extent: tuple[int, int] | None = None  # first byte of the payload that an array with elements views, and the end
    alias_of: str | None = None  # path of an earlier leaf that shares bytes with this one: they are stored once
    node: Node = None  # a plain value as it is stored
    shown: str | None = None  # the path without its escapes

    @property
    def is_metadata(self) -> bool:
        """Whether it is in the ``_metadata`` (versions) that ``nn.Module`` sets on its state."""
        return _METADATA in self.names

    @property
    def key(self) -> str:
        """The path with its escapes, unique among all leaves; equal in other checkpoints for the same leaf."""
        return ".".join(self.names)

    @property
    def path(self) -> str:
        """The path, as for ``load(keys=...)``: without its escapes, unless another leaf's would be equal."""
        return self.key if self.shown is None else self.shown

    @property
    def nbytes(self) -> int:
        """Bytes of the elements; 0 for a plain value, which is part of the manifest."""
        return 0 if self.entry is None else self.entry.itemsize * prod(self.entry.shape)

    @property
    def kind(self) -> str:
        """``tensor``, ``parameter``, ``ndarray``, or the name of a plain value's type."""
        if self.entry is not None:
            return self.entry.kind
        if isinstance(self.node, PickledNode):
            return "pickled"
        return "object" if isinstance(self.node, StatefulNode) else type(self.value()).__name__

    def value(self) -> Any:
        """Return a plain value, with stand-ins for pickled ones. Raises CorruptStoreError: the node describes none."""
        return rebuild(self.node, lambda _: None, pickled=_Pickled)

    def text(self, most: int = 80) -> str:
        """Return a plain value as Python writes it, cut to ``most`` characters; control characters are escaped."""
        node = self.node
        if isinstance(node, str):
            node = node[:most]  # of a str of megabytes, repr() would make as many
        elif isinstance(node, _DATA) and len(node.data) > 4 * most:
            return f"<{self.kind} of {len(node.data)} bytes>"
        try:
            text = repr(rebuild(node, lambda _: None, pickled=_Pickled))
        except ValueError:  # Python refuses to print very long ints in decimal
            text = f"<{self.kind} too long to show>"
        return text if len(text) <= most else text[: most - 3] + "..."

    def same_value(self, other: StoredLeaf) -> bool:
        """Return whether two plain values are equal in type and every bit."""
        return msgspec.msgpack.encode(self.node) == msgspec.msgpack.encode(other.node)


class ShardBox(NamedTuple):
    """A box of a tensor: its first index and its size along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ShardedLeaf:
    """A tensor that lies on several ranks."""

    names: tuple[str, ...]  # the components of its path
    dtype: str
    shape: tuple[int, ...]  # of all of it
    mesh: int  # a hash of the ranks that it lies on
    is_replica: bool  # whether it was a plain tensor that all ranks have alike
    leaves: range  # numbers, among the leaves, of its boxes in the listed part
    boxes: Mapping[int, tuple[ShardBox, ...]] = field(default_factory=dict)  # with elements, by part
    shown: str | None = None  # the path without its escapes

    @property
    def key(self) -> str:
        """The path with its escapes."""
        return ".".join(self.names)

    @property
    def path(self) -> str:
        """The path, as for ``load(keys=...)``: without its escapes, unless another leaf's would be equal."""
        return self.key if self.shown is None else self.shown

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * dtypes.torch_dtype(self.dtype).itemsize


@dataclass(slots=True)
class Listing:
    """The content of a checkpoint: leaves in the order of the state, and types of the containers by their paths."""

    leaves: list[StoredLeaf] = field(default_factory=list)
    branches: dict[str, str] = field(default_factory=dict)
    sharded: list[ShardedLeaf] = field(default_factory=list)
    """The tensors that lie on several ranks, without their boxes: those in other parts are not known here."""
    shown: Mapping[str, str] = field(default_factory=dict)
    """Shown paths, by the paths with escapes; empty if no path has escapes."""

    def within(self, low: int, high: int) -> list[str]:
        """Return the paths of the leaves that have bytes at the payload's offsets from ``low`` to before ``high``."""
        return [leaf.path for leaf in self.leaves if leaf.extent and leaf.extent[0] < high and low < leaf.extent[1]]


def list_leaves(manifest: Manifest) -> Listing:
    """Return the leaves of a checkpoint. Raises CorruptStoreError if its skeleton describes no state."""
    walk = _Walk(manifest)
    walk.visit(manifest.skeleton, ())
    return _without_escapes(walk.listing)


def _without_escapes(listing: Listing) -> Listing:
    """Return the listing with shown paths: without escapes, unless two would be equal then."""
    found = [leaf.key for leaf in listing.leaves] + [leaf.key for leaf in listing.sharded]
    escaped = list(dict.fromkeys([*found, *listing.branches]))
    shown = dict(zip(escaped, readable(escaped), strict=True))
    if all(path is name for path, name in shown.items()):
        return listing
    leaves = [
        replace(leaf, shown=shown[leaf.key], alias_of=leaf.alias_of and shown[leaf.alias_of]) for leaf in listing.leaves
    ]
    sharded = [replace(leaf, shown=shown[leaf.key]) for leaf in listing.sharded]
    return Listing(leaves, listing.branches, sharded, shown)


class _Walk:
    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._views: dict[int, dict[tuple[int, int], str]] = {}  # paths by extent, of each storage
        self.listing = Listing()

    def visit(self, node: Node, names: tuple[str, ...], kind: str = "") -> None:
        """Add the leaves at and below ``node`` to the listing; ``kind`` names the objects whose state it is."""
        leaves = self.listing.leaves
        if isinstance(node, StatefulNode):
            self.visit(node.child, names, f"{kind}object of ")
        elif isinstance(node, ArrayNode):
            leaves.append(self._array(node.index, names))
        elif isinstance(node, ComposedNode):
            for name, child in zip(node.names, node.items, strict=True):
                self.visit(child, (*names, paths.components([name])[0]))
            sizes: list[Node] = [ListNode([*node.shape]), ListNode([*node.stride])]
            about = ListNode([node.module, node.name, *sizes, node.context])
            leaves.append(StoredLeaf((*names, _CONTEXT), node=about))
        elif isinstance(node, ShardedNode):
            place = range(len(leaves), len(leaves) + len(node.boxes))
            self.listing.sharded.append(ShardedLeaf(names, node.dtype, node.shape, node.mesh, node.plain, place))
            for offsets, box in zip(node.offsets, node.boxes, strict=True):
                leaf = self._array(box.index, (*names[:-1], names[-1] + _place(offsets, self._manifest, box)))
                leaves.append(leaf)
        elif (isinstance(node, MappingNode) and (node.keys or not names)) or any(
            has_parts(child) or _is_container(child) for _, child in below(node)
        ):
            type_name = type(node).__name__.removesuffix("Node")
            type_name = type_name if type_name in ("OrderedDict", "Counter") else type_name.lower()
            self.listing.branches[".".join(names)] = kind + type_name
            for name, child in below(node):
                self.visit(child, (*names, name))
            for metadata in node.metadata if isinstance(node, OrderedDictNode) else ():
                if has_parts(metadata):
                    self.visit(metadata, (*names, _METADATA))
                else:
                    leaves.append(StoredLeaf((*names, _METADATA), node=metadata))
        else:
            if has_parts(node):
                raise CorruptStoreError(f"an array lies inside a {type(node).__name__}")
            leaves.append(StoredLeaf(names, node=node))
            leaves[-1].value()  # raises if it describes no value

    def _array(self, index: int, names: tuple[str, ...]) -> StoredLeaf:
        entry = self._manifest.tensors[index]
        if entry.storage is None:
            return StoredLeaf(names, entry)
        start, (low, high) = self._manifest.storages[entry.storage].offset, entry.extent
        extent = start + low, start + high
        views = self._views.setdefault(entry.storage, {})
        alias = views.get(extent)
        if alias is None:
            compared = islice(views.items(), _MOST_COMPARED)
            alias = next((path for (a, b), path in compared if a < extent[1] and extent[0] < b), None)
            views[extent] = ".".join(names)
        return StoredLeaf(names, entry, extent, alias)


def _place(offsets: tuple[int, ...], manifest: Manifest, box: ArrayNode) -> str:
    """Return the place of a box in its tensor, as an index expression."""
    sizes = manifest.tensors[box.index].shape
    return f"[{', '.join(f'{low}:{low + size}' for low, size in zip(offsets, sizes, strict=True))}]"


def _is_container(node: Node) -> bool:
    """Return whether each item of a plain value is listed as a leaf of its own."""
    return isinstance(node, (nodes.DictNode, OrderedDictNode)) and bool(children(node))
