"""The leaves of a stored state by their paths, as people and reports name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from pccheck_async.errors import CorruptStoreError
from pccheck_async.format.manifest import Manifest, TensorEntry
from pccheck_async.format.skeleton import (
    ArrayNode,
    BytearrayNode,
    BytesNode,
    CounterNode,
    DictNode,
    ListNode,
    Node,
    OrderedDictNode,
    StatefulNode,
    SurrogateStrNode,
    TupleNode,
    children,
)
from pccheck_async.state import paths
from pccheck_async.state.restore.plain import has_parts
from pccheck_async.state.restore.rebuild import mapping_keys, rebuild

__all__ = ["Listing", "StoredLeaf", "list_leaves"]

_METADATA = "._metadata"
"""What ``nn.Module`` hangs on its state; no key is written like this, since dots in keys are escaped."""
_MOST_COMPARED = 256
"""Views of one storage that are looked through for one that overlaps."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredLeaf:
    """One tensor, array or plain value of a checkpoint. A list or tuple of plain values is one leaf.

    Attributes:
        names: The path from the root, key by key.
        entry: How an array lies in its storage; None for a plain value.
        extent: First byte of the payload that an array views, and the one after the last; None without bytes.
        alias_of: Path of an earlier leaf that shares bytes with this one: they are stored once.
        node: A plain value as it is stored.
        aside: Whether it is versions that ``nn.Module`` keeps beside a state, not part of it.
    """

    names: tuple[str, ...]
    entry: TensorEntry | None = None
    extent: tuple[int, int] | None = None
    alias_of: str | None = None
    node: Node = None
    aside: bool = False

    @property
    def path(self) -> str:
        """As in ``load(keys=...)``."""
        return ".".join(self.names)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements; 0 for a plain value, which is part of the manifest."""
        if self.entry is None:
            return 0
        count = self.entry.itemsize
        for size in self.entry.shape:
            count *= size
        return count

    @property
    def kind(self) -> str:
        """``tensor``, ``parameter``, ``ndarray``, or the name of a plain value's type."""
        if self.entry is not None:
            return self.entry.kind
        return "object" if isinstance(self.node, StatefulNode) else type(self.value()).__name__

    def value(self) -> Any:
        """Return a plain value with its type. Raises CorruptStoreError where the checkpoint describes none."""
        return rebuild(self.node, lambda _: None)

    def text(self, most: int = 80) -> str:
        """Return a plain value as Python writes it, cut to ``most`` characters; control characters are escaped."""
        node = self.node
        if isinstance(node, str):
            node = node[:most]  # no need to write out megabytes
        elif isinstance(node, (BytesNode, BytearrayNode, SurrogateStrNode)) and len(node.data) > 4 * most:
            return f"<{self.kind} of {len(node.data)} bytes>"
        try:
            text = repr(rebuild(node, lambda _: None))
        except ValueError:  # Python refuses to print very long ints in decimal
            text = f"<{self.kind} too long to show>"
        return text if len(text) <= most else text[: most - 3] + "..."

    def same_value(self, other: StoredLeaf) -> bool:
        """Whether two plain values are equal in type and every bit."""
        return msgspec.msgpack.encode(self.node) == msgspec.msgpack.encode(other.node)


@dataclass(slots=True)
class Listing:
    """What a checkpoint holds.

    Attributes:
        leaves: In the order of the state.
        branches: Types of the containers by their paths, the root's empty.
    """

    leaves: list[StoredLeaf] = field(default_factory=list)
    branches: dict[str, str] = field(default_factory=dict)

    def within(self, low: int, high: int) -> list[str]:
        """Return the paths of the leaves that have bytes between two offsets of the payload."""
        return [leaf.path for leaf in self.leaves if leaf.extent and leaf.extent[0] < high and low < leaf.extent[1]]


_NAMES: Mapping[type, str] = {
    DictNode: "dict",
    OrderedDictNode: "OrderedDict",
    CounterNode: "Counter",
    ListNode: "list",
    TupleNode: "tuple",
}


def list_leaves(manifest: Manifest) -> Listing:
    """Return the leaves of a checkpoint. Raises CorruptStoreError where its skeleton describes no state."""
    return _Walk(manifest).listing


class _Walk:
    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._seen: dict[int, dict[tuple[int, int], str]] = {}
        self.listing = Listing()
        self._visit(manifest.skeleton, (), prefix="", aside=False)

    def _visit(self, node: Node, names: tuple[str, ...], prefix: str, aside: bool) -> None:
        match node:
            case ArrayNode():
                self.listing.leaves.append(self._array(node.index, names, aside))
            case StatefulNode():
                self._visit(node.child, names, f"{prefix}object of ", aside)
            case DictNode() | OrderedDictNode() | CounterNode() if node.keys or not names:
                self.listing.branches[".".join(names)] = prefix + _NAMES[type(node)]
                for name, child in zip(paths.components(mapping_keys(node)), node.values, strict=True):
                    self._visit(child, (*names, name), "", aside)
                for metadata in node.metadata if isinstance(node, OrderedDictNode) else ():
                    self._metadata(metadata, (*names, _METADATA))
            case ListNode() | TupleNode() if any(has_parts(item) or _is_container(item) for item in node.items):
                self.listing.branches[".".join(names)] = prefix + _NAMES[type(node)]
                for index, child in enumerate(node.items):
                    self._visit(child, (*names, str(index)), "", aside)
            case _:
                if has_parts(node):
                    raise CorruptStoreError(f"an array lies inside a {type(node).__name__}")
                rebuild(node, lambda _: None)  # raises where it describes no value
                self.listing.leaves.append(StoredLeaf(names, node=node, aside=aside))

    def _metadata(self, node: Node, names: tuple[str, ...]) -> None:
        if has_parts(node):
            self._visit(node, names, "", aside=True)
        else:
            self.listing.leaves.append(StoredLeaf(names, node=node, aside=True))

    def _array(self, index: int, names: tuple[str, ...], aside: bool) -> StoredLeaf:
        entry = self._manifest.tensors[index]
        if entry.storage is None:
            return StoredLeaf(names, entry, aside=aside)
        start = self._manifest.storages[entry.storage].offset
        low, high = entry.extent
        extent = start + low, start + high
        seen = self._seen.setdefault(entry.storage, {})
        alias = seen.get(extent)
        if alias is None:
            looked = islice(seen.items(), _MOST_COMPARED)
            overlapping = (path for (a, b), path in looked if a < extent[1] and extent[0] < b)
            alias = next(overlapping, None)
            seen[extent] = ".".join(names)
        return StoredLeaf(names, entry, extent, alias, aside=aside)


def _is_container(node: Node) -> bool:
    """Whether a plain value is worth a line for each of its items."""
    return isinstance(node, (DictNode, OrderedDictNode)) and any(True for _ in children(node))
