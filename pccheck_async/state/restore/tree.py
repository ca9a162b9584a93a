# SPDX-License-Identifier: Apache-2.0
"""Reading a skeleton: making the value that it describes, listing its entries and leaves, selecting parts by keys."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from msgspec import structs

from pccheck_async.errors import (
    CorruptStoreError,
    IncompleteCheckpointError,
    StateMismatchError,
    UnsupportedStateError,
    explained,
    first_few,
)
from pccheck_async.format import skeleton as nodes
from pccheck_async.format.skeleton import (
    ArrayNode,
    ComposedNode,
    DictNode,
    ListNode,
    MappingNode,
    Node,
    PickledNode,
    ShardedNode,
    StatefulNode,
    TupleNode,
)
from pccheck_async.state import foreign, paths, values

_NAMES: Final = values.VERBATIM | {str}
_PARTS: Final = frozenset((ArrayNode, ShardedNode, StatefulNode))

# -- from nodes to the values that were saved


def rebuild(
    node: Node,
    array: Callable[[int], Any],
    stateful: Callable[[StatefulNode], Any] | None = None,
    sharded: Callable[[ShardedNode], Any] | None = None,
    pickled: Callable[[PickledNode], Any] = foreign.refuse_pickled,
    composed: Callable[[ComposedNode, dict[str, Any], Any], Any] | None = None,
) -> Any:
    """Return the value that ``node`` describes, every part of it with the type that was saved.

    Args:
        node: The root of the tree.
        array: Returns the array for an index into the manifest's table of tensors.
        stateful: Returns the value for a Stateful; by default, the saved result of its ``state_dict()``.
        sharded: Returns the value for a tensor that lies on several ranks; by default, None.
        pickled: Returns the value for a pickled one; by default, it is refused.
        composed: Returns the tensor composed of others, given these by name and the class's context; by default, it is
            refused.

    Raises CorruptStoreError if the tree describes no value, UnsupportedStateError for a refused value.
    """
    return _Builder(array, stateful, sharded, pickled, composed).build(node, 0)


@dataclass(slots=True)
class _Builder:
    """Makes values of nodes; no closures, whose reference cycles would keep arrays until garbage collection."""

    array: Callable[[int], Any]
    stateful: Callable[[StatefulNode], Any] | None
    sharded: Callable[[ShardedNode], Any] | None
    pickled: Callable[[PickledNode], Any]
    composed: Callable[[ComposedNode, dict[str, Any], Any], Any] | None

    def each(self, items: list[Node], depth: int) -> list[Any]:
        array, build, built = self.array, self.build, list[Any]()
        for item in items:
            if type(item) in _NAMES:
                built.append(item)
            else:
                built.append(array(item.index) if type(item) is ArrayNode else build(item, depth))
        return built

    def build(self, node: Node, depth: int) -> Any:
        if depth > nodes.MAX_DEPTH:
            raise _too_deep()
        match node:
            case ArrayNode():
                return self.array(node.index)
            case ShardedNode():
                return self.sharded(node) if self.sharded is not None else None
            case PickledNode():
                return self.pickled(node)
            case ComposedNode():
                if self.composed is None:
                    raise UnsupportedStateError(f"a {node.name[:200]}, a tensor composed of others, is not made here")
                parts = dict(zip(node.names, self.each(node.items, depth + 1), strict=True))
                return self.composed(node, parts, rebuild(node.context, _no_array))
            case StatefulNode():
                return self.stateful(node) if self.stateful is not None else self.build(node.child, depth + 1)
            case ListNode():
                return self.each(node.items, depth + 1)
            case TupleNode():
                return tuple(self.each(node.items, depth + 1))
            case nodes.SetNode():
                return set(_distinct(node.items, depth + 1))
            case nodes.FrozenSetNode():
                return _key(node, depth)
            case DictNode() | nodes.OrderedDictNode() | nodes.CounterNode():
                items = zip(mapping_keys(node, depth), self.each(node.values, depth + 1), strict=True)
                if not isinstance(node, nodes.OrderedDictNode):
                    return dict(items) if isinstance(node, DictNode) else Counter(dict(items))
                ordered = OrderedDict(items)
                if len(node.metadata) > 1:
                    raise CorruptStoreError("an OrderedDict has more than one _metadata")
                for metadata in self.each(node.metadata, depth + 1):
                    ordered._metadata = metadata  # type: ignore[attr-defined]
                return ordered
            case _:
                return values.from_node(node)


def _no_array(index: int) -> Any:
    raise CorruptStoreError(f"array {index} lies in the context of a tensor that is composed of others")


def mapping_keys(node: MappingNode, depth: int = 0) -> list[Hashable]:
    """Return the keys of a stored mapping. Raises CorruptStoreError unless they are all different, one per value."""
    if len(node.keys) != len(node.values):
        raise CorruptStoreError(f"a mapping has {len(node.keys)} keys and {len(node.values)} values")
    keys: list[Any] = node.keys
    if _NAMES.issuperset(map(type, keys)) and len({*keys}) == len(keys):
        return [*keys]  # strings and numbers are their own nodes, and few have the same hash
    return _distinct(keys, depth + 1)


def _too_deep() -> CorruptStoreError:
    return CorruptStoreError(f"the state is nested more than {nodes.MAX_DEPTH} levels deep")


def _distinct(items: list[Node], depth: int) -> list[Hashable]:
    keys = [_key(node, depth) for node in items]
    if len(items) > nodes.MOST_ALIKE and nodes.too_alike(items, keys):
        raise CorruptStoreError(f"more than {nodes.MOST_ALIKE} keys of a mapping or items of a set have the same hash")
    if len(set(keys)) != len(keys):
        raise CorruptStoreError("the keys of a mapping or the items of a set are not all different")
    return keys


def _key(node: Node, depth: int) -> Hashable:
    """Return the mapping key or set item that a node describes; raise CorruptStoreError if it is not hashable."""
    if depth > nodes.MAX_DEPTH:
        raise _too_deep()
    if isinstance(node, TupleNode):
        return tuple([_key(item, depth + 1) for item in node.items])
    if isinstance(node, nodes.FrozenSetNode):
        return frozenset(_distinct(node.items, depth + 1))
    value: Hashable = values.from_node(node)
    try:
        hash(value)
    except TypeError:
        raise CorruptStoreError(f"a {type(value).__name__} cannot be a key") from None
    return value


# -- names and leaves


def opened(node: Node) -> Node:
    """Return the node; for a Stateful, the node of its ``state_dict()``."""
    while isinstance(node, StatefulNode):
        node = node.child
    return node


def entries(node: Node) -> list[tuple[Hashable, str, Node]]:
    """Return key or index, name in paths, and node of each entry of a mapping, list or tuple; empty for other nodes.

    Raises CorruptStoreError for keys that are unhashable or not all different.
    """
    if isinstance(node, MappingNode):
        keys = mapping_keys(node)
        return list(zip(keys, paths.components(keys), node.values, strict=True))
    if isinstance(node, (ListNode, TupleNode)):
        return [(index, str(index), item) for index, item in enumerate(node.items)]
    return []


def paired(
    one: Mapping[Any, Any], other: Mapping[Any, Any]
) -> tuple[dict[Any, tuple[Any, Any]], dict[Any, Any], dict[Any, Any]]:
    """Return the entries that both mappings have, with both values; then those only in ``one``, only in ``other``."""
    both = {key: (value, other[key]) for key, value in one.items() if key in other}
    lone = {key: value for key, value in one.items() if key not in both}
    return both, lone, {key: value for key, value in other.items() if key not in both}


def below(node: Node) -> list[tuple[str, Node]]:
    """Return name and node of each entry (see :func:`entries`), also inside a Stateful's state; empty for leaves."""
    return [(name, child) for _, name, child in entries(opened(node))]


def leaves(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yield path and node of every leaf, in the order of the state. Raises CorruptStoreError (see :func:`entries`)."""
    inside = below(node)
    if not inside:
        yield path, opened(node)
    for name, child in inside:
        yield from leaves(child, paths.child(path, name))


def paths_by_node(node: Node) -> dict[int, str]:
    """Return the path of every leaf by the ``id()`` of its node and of all nodes below it.

    Attributes of an OrderedDict, which are no leaves, are included with the path that flattening gives them.
    """
    found, waiting = dict[int, str](), [("", node)]
    while waiting:
        path, node = waiting.pop()
        inside, node = below(node), opened(node)
        if not inside:
            found.update(dict.fromkeys(map(id, nodes.walk(node)), path))
        if isinstance(node, nodes.OrderedDictNode):
            waiting += [(paths.child(path, "<_metadata>"), each) for each in node.metadata]
        waiting += [(paths.child(path, name), child) for name, child in inside]
    return found


def check_classes(node: Node) -> None:
    """Raise UnsupportedStateError for the first tensor below ``node`` whose class is not imported; names its path."""
    for path, leaf in leaves(node):
        if isinstance(leaf, ComposedNode):
            foreign.class_of(leaf, path)


def refuse_boxes(node: Node, advice: str = "read the group's folder, which has the folders of all ranks in it") -> None:
    """Raise IncompleteCheckpointError if a tensor lies on several ranks, for callers that read one rank's part only."""
    if any(isinstance(each, ShardedNode) for each in nodes.walk(node)):
        names = [path or "it" for path, leaf in leaves(node) if isinstance(leaf, ShardedNode)]
        error = IncompleteCheckpointError(
            f"tensors that lie on several ranks, of which this is the part of one: {first_few(names)}; {advice}"
        )
        error.unasked = True
        raise error


def count(node: Node) -> int:
    """Return the number of leaves."""
    number, waiting = 0, [node]
    while waiting:
        node = waiting.pop()
        while isinstance(node, StatefulNode):
            node = node.child
        inside = node.values if isinstance(node, MappingNode) else []
        if isinstance(node, (ListNode, TupleNode)):
            inside = node.items
        if values.VERBATIM.issuperset(map(type, inside)):  # a loader's permutation may have millions of numbers
            number += max(1, len(inside))
        else:
            waiting += inside
    return number


def has_parts(node: Node) -> bool:
    """Return whether there is an array or a Stateful in the tree below ``node``, or is ``node`` itself."""
    return not _PARTS.isdisjoint(map(type, nodes.walk(node)))


# -- the part that ``load(keys=...)`` selects


def select(skeleton: Node, keys: Sequence[str]) -> Node:
    r"""Return ``skeleton`` cut down to the leaves and subtrees whose paths ``keys`` name, or match as globs.

    A glob is compared with escaped paths, and for leaves also with the paths that users see. A key that is no glob is
    first compared with escaped paths: ``a.b`` is not ``a\.b``. A key that matches no path that way is compared with
    paths without their escapes.

    A mapping keeps the entries with selected leaves below. A list or tuple of which only some items were
    selected becomes a dict from index to item, so that every item keeps its place.

    Raises:
        StateMismatchError: Some of ``keys`` select nothing (``missing`` lists them), or a key that was compared with
            paths without escapes names several leaves.
    """
    patterns = [keys] if isinstance(keys, str) else list(keys)
    shown: dict[str, str] = {}
    if any(map(paths.is_glob, patterns)):
        escaped = [path for path, _ in leaves(skeleton)]
        shown = {path: name for path, name in zip(escaped, paths.readable(escaped), strict=True) if name != path}
    selection = _Selection(patterns, shown)
    selected = selection.cut(skeleton, "")
    if selection.unused:
        selection = _Selection(patterns, shown, unescaped=frozenset(selection.unused))
        selected = selection.cut(skeleton, "")
    if unused := sorted(selection.unused):
        there = first_few([name for name, _ in below(skeleton)]) or "none at all"
        raise StateMismatchError(f"no leaf matches {', '.join(map(repr, unused))}; there are: {there}", missing=unused)
    for text, several in selection.named.items():
        if len(several) > 1:
            listed = first_few(several)
            why = f"{text!r} is ambiguous, the name of several leaves: {listed}; write it with its escapes"
            raise StateMismatchError(explained(why))
    return selected if selected is not None else DictNode([], [])


class _Selection:
    """The keys of one :func:`select`; ``unused`` has those that matched no path so far."""

    def __init__(self, patterns: Sequence[str], shown: Mapping[str, str], unescaped: Collection[str] = ()) -> None:
        self._shown = shown  # the leaves' names that differ from their paths
        self._exact = {text for text in patterns if not paths.is_glob(text) and text not in unescaped}
        self._globs = {
            text: paths.matcher(text) if text in unescaped else paths.glob(text)
            for text in patterns
            if text not in self._exact
        }
        self.unused = set(patterns)
        self.named: dict[str, list[str]] = {}  # the paths that a pattern without escapes is the name of

    def cut(self, node: Node, path: str) -> Node | None:
        """Return the selected part of the tree below ``node``; None if nothing is selected."""
        if isinstance(node, StatefulNode):
            child = self.cut(node.child, path)
            return None if child is None else StatefulNode(child)
        there = entries(node)
        if isinstance(node, ComposedNode):  # its parts can be had without its class
            there = list(zip(node.names, paths.components(node.names), node.items, strict=True))
        chosen: list[tuple[int, Node]] = []
        for index, (_, name, child) in enumerate(there):
            below = paths.child(path, name)
            if self._matches(below):
                chosen.append((index, child))
                if self.unused:  # keys that name nodes below a selected one count as used, too
                    self.cut(child, below)
            elif (part := self.cut(child, below)) is not None:
                chosen.append((index, part))
        if not chosen:
            return None
        parts = [part for _, part in chosen]
        if isinstance(node, nodes.OrderedDictNode) and len(parts) < len(there):
            node = structs.replace(node, metadata=[])
        if isinstance(node, MappingNode):
            return structs.replace(node, keys=[node.keys[index] for index, _ in chosen], values=parts)
        if isinstance(node, (ListNode, TupleNode)) and len(parts) == len(there):
            return structs.replace(node, items=parts)
        return DictNode([node.names[i] if isinstance(node, ComposedNode) else i for i, _ in chosen], parts)

    def _matches(self, path: str) -> bool:
        written = {path, self._shown.get(path, path)}
        hits = [path] if path in self._exact else []
        hits += [text for text, matches in self._globs.items() if any(map(matches, written))]
        self.unused.difference_update(hits)
        for text in hits:
            if text != path and text == paths.plain(path):
                self.named.setdefault(text, []).append(path)
        return bool(hits)
