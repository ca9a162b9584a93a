"""Flatten an app state into a skeleton of nodes and a table of tensors and arrays. No byte of an array is copied."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import structs

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.format import skeleton
from pccheck_async.format.skeleton import ComposedNode, DictNode, ListNode, Node, StatefulNode, TupleNode
from pccheck_async.state import paths, values
from pccheck_async.state.boxes import FlatShard, Holders, PlannedBoxes, box_views, holders_of, is_sharded, local_tensors
from pccheck_async.state.cache import tree_cache as cached
from pccheck_async.state.cache.tree_cache import Outline, Visited, same_objects
from pccheck_async.state.composed import find_class, is_composed
from pccheck_async.state.leaves import KINDS, Leaves
from pccheck_async.state.pickles import pickle
from pccheck_async.state.save.advice import full_name, unsupported
from pccheck_async.state.save.detached import refuse_unstepped
from pccheck_async.state.save.owners import Named, Tally
from pccheck_async.state.stateful import is_stateful, live_state

_EXPLICIT = (FlatShard, PlannedBoxes)
"""Types that determine by themselves which boxes this rank saves."""
_ARRAYS = (torch.Tensor, np.ndarray, FlatShard)
"""Types that a restore fills."""
_OWN_NODES = values.VERBATIM - {int}
_LEAST, _MOST = values.SMALL_INTS


@dataclass(slots=True, eq=False)
class FlatState:
    """A flattened state."""

    skeleton: Node  # ``ArrayNode.index`` is the number of a leaf
    leaves: Leaves
    outline: Outline | None  # reused by the next :func:`flatten_unchecked` of this state
    objects: list[Any]  # the Stateful objects whose ``state_dict()`` was called
    pickled: list[str]  # the paths of values that only pickle can hold
    has_sharded: bool  # whether there are tensors in it that lie on several ranks
    has_composed: bool  # whether there are tensors in it that are composed of others


def flatten(state: Mapping[str, Any], tally: Tally | None = None, *, allow_pickle: bool = False) -> FlatState:
    """Flatten ``state`` on the calling thread, calling ``state_dict()`` of every Stateful in it.

    Plain values are copied; tensors and arrays are the live ones.

    Raises:
        UnsupportedStateError: A value cannot be saved as it is; names its path, with advice.
    """
    flat = flatten_unchecked(state, tally=tally, allow_pickle=allow_pickle)
    flat.leaves.check()
    return flat


def flatten_unchecked(
    state: Mapping[str, Any], last: Outline | None = None, *, tally: Tally | None = None, allow_pickle: bool = False
) -> FlatState:
    """Flatten ``state`` without checking its arrays (:meth:`Leaves.check` does).

    The nodes of containers that are as they were in ``last``, the outline of any earlier state, are reused.
    Of tensors that lie on several ranks ``tally`` chooses the boxes that become leaves; without it they are refused.
    Values of other types are pickled with ``allow_pickle``, and else refused.
    """
    check_outermost(state)
    if "param_groups" in state:
        refuse_unstepped(state, "")
    flattener = _Flattener(tally, allow_pickle=allow_pickle)
    root, outline = flattener.root(state, last)
    has = flattener.has_sharded, flattener.has_composed
    return FlatState(root, flattener.leaves, outline, flattener.objects, flattener.pickled, *has)


class Opaque:
    """A live value that cannot be saved as it is, in a tree for a restore; of a container the keys and what is inside.

    Attributes:
        keys: Of a mapping, or numbers of items.
        items: The nodes of what is inside.
    """

    __slots__ = ("items", "keys")

    def __init__(self, keys: Sequence[Any] = (), items: Sequence[Any] = ()) -> None:
        self.keys = keys
        self.items = items


class Live(NamedTuple):
    """A live container or object, by its node in a tree."""

    path: str
    value: Any
    has_parts: bool
    """Whether there are arrays or objects in it."""
    is_savable: bool
    state: Any = None
    """Of an object: the result of its ``state_dict()``."""


@dataclass(slots=True, eq=False)
class LiveTree:
    """A live state, flattened to be compared with stored ones."""

    state: Mapping[str, Any]
    skeleton: Any  # like that of :class:`FlatState`, with an :class:`Opaque` for each value that cannot be saved
    leaves: Leaves  # of any class that may be filled: tensors on several ranks and composed ones are one leaf each
    lives: dict[int, Live]  # by the identity of their nodes


def flatten_live(state: Mapping[str, Any]) -> LiveTree:
    """Flatten ``state`` to restore into it, on the calling thread, calling ``state_dict()`` of every Stateful in it.

    Nothing is refused: what saving would refuse may be replaced by the stored value, or take a part of it.
    """
    flattener = _Flattener(None, lives={})
    root, _ = flattener.root(state, None)
    assert flattener.lives is not None
    flattener.lives[id(root)] = Live("", state, True, True)
    return LiveTree(state, root, flattener.leaves, flattener.lives)


def take_apart(value: Any, path: str) -> tuple[ComposedNode, list[torch.Tensor]]:
    """Return the node of a tensor that is composed of others, and these, which are the arrays from 0 on in the node.

    Raises UnsupportedStateError if they do not describe it.
    """
    kind = type(value)
    with naming_owner("__tensor_flatten__", path, value):
        names, context = value.__tensor_flatten__()
        tensors = [getattr(value, name) for name in names]
    sizes = *value.shape, *value.stride()
    trouble = ""
    if find_class(kind.__module__, kind.__qualname__) is not kind:
        trouble = "its class is not found by its name; define it at the top level of a module"
    elif any(type(tensor) is not torch.Tensor for tensor in tensors):
        trouble = "not all tensors that it is composed of are plain ones; save those by themselves"
    elif any(type(size) is not int for size in sizes):
        trouble = "its sizes are not plain ints; save the tensors that it is composed of"
    else:
        try:
            flat = flatten({"": context})
        except UnsupportedStateError as error:
            trouble = str(error)
        else:
            if len(flat.leaves) or flat.objects:
                trouble = "there are tensors or objects in it"
        if trouble:
            trouble = (
                f"the context that __tensor_flatten__ returns has more in it than plain values ({trouble}); save the "
                "tensors that it is composed of by themselves"
            )
    if trouble:
        raise UnsupportedStateError(
            f"{path}: a {full_name(value)} cannot be saved: {trouble} (an engine with allow_pickle=True pickles it)"
        )
    assert isinstance(flat.skeleton, DictNode)
    items: list[Node] = [*map(cached.array_node, range(len(tensors)))]
    shape, stride = tuple(value.shape), tuple(value.stride())
    names, plain = [*names], flat.skeleton.values[0]
    return ComposedNode(items, names, plain, kind.__module__, kind.__qualname__, shape, stride), tensors


def check_outermost(state: object) -> None:
    """Raise UnsupportedStateError for anything but a mapping whose keys are strings."""
    if not isinstance(state, (dict, Mapping)):  # dict first: it takes no time
        raise UnsupportedStateError(
            f"the state is a {type(state).__qualname__}; give a mapping from names to objects and values"
        )
    if not {*map(type, state)} <= {str}:
        key = next(key for key in state if type(key) is not str)
        raise UnsupportedStateError(f"the state has the key {key!r}; the keys of the outermost mapping are strings")


@contextmanager
def naming_owner(call: str, path: str, value: object, consequence: str = "") -> Iterator[None]:
    """Add the call and the object's path as a note to exceptions of a Stateful's own code."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by {call}() of {path}, a {full_name(value)}{consequence}")
        raise


class _Flattener:
    """One walk over a state. An outline ``last`` may be of another value: it is used only if the value fits it."""

    def __init__(
        self, tally: Tally | None, *, allow_pickle: bool = False, lives: dict[int, Live] | None = None
    ) -> None:
        self._tally = tally
        self._allow_pickle = allow_pickle
        self.lives = lives  # to restore into; None: to save
        self._refused = 0  # values so far that cannot be saved
        self.pickled: list[str] = []
        self.leaves = Leaves()
        self.objects: list[Any] = []
        self._open: set[int] = set()  # identities of the containers between the root and here
        self._in_metadata = False
        self.has_sharded = self.has_composed = False
        self._asked = 0  # Statefuls between the root and here: their states are as new as can be

    def root(self, state: Mapping[str, Any], last: Outline | None) -> Visited:
        """The node of the outermost mapping."""
        try:
            if type(state) is OrderedDict and self.lives is None:
                return self.ordered(state, "", 1, last)
            return self.inside(state, "", 1, last, make=DictNode)
        except RecursionError:
            raise UnsupportedStateError("the state is nested too deeply for Python's stack") from None

    def node(self, value: Any, path: str, depth: int, last: Outline | None) -> Visited:
        kind = type(value)
        convert = values.ATOMS.get(kind)
        if convert is not None:
            return convert(value), None
        holders = None if self._tally is None or kind not in KINDS else self._replicas(value, path)
        if kind in KINDS and holders is None:
            self.leaves.paths.append(path)
            self.leaves.values.append(value)
            node = cached.array_node(len(self.leaves) - 1)
            return node, node
        if self.lives is not None:
            return self.live(value, path, depth, last)
        if isinstance(value, (np.generic, np.dtype)):
            return values.numpy_value(value, path), None
        if kind in KINDS or (self._tally is not None and (kind in _EXPLICIT or is_sharded(value))):
            return self.sharded(value, path, holders), None
        return self.container(value, path, depth, last)

    def live(self, value: Any, path: str, depth: int, _: Outline | None) -> Visited:
        """The node of a value to restore into."""
        arrays, lives = self.leaves.values, self.lives
        node: Any = value
        assert lives is not None
        if isinstance(value, _ARRAYS):
            self.leaves.paths.append(path)
            arrays.append(node)
            return cached.array_node(len(arrays) - 1), None
        parts, refused = len(arrays) + len(self.objects), self._refused
        try:
            if isinstance(value, (np.generic, np.dtype)):
                return values.numpy_value(value, path), None
            node, _ = self.container(value, path, depth, None)
        except UnsupportedStateError:
            if is_stateful(value):
                raise
            self._refused += 1
            node = self.opaque(value, path, depth)
        if type(node) is not StatefulNode:
            has_parts = len(arrays) + len(self.objects) > parts
            lives[id(node)] = Live(path, value, has_parts, self._refused == refused)
        return node, None

    def opaque(self, value: Any, path: str, depth: int) -> Opaque:
        """The node of a value that cannot be saved."""
        if depth > skeleton.MAX_DEPTH or id(value) in self._open or not isinstance(value, (Mapping, list, tuple)):
            return Opaque()
        self._open.add(id(value))
        keys = list(value) if isinstance(value, Mapping) else range(len(value))
        items = [value[key] for key in keys]
        nodes, _ = self.each(paths.components(keys), items, path + "." if path else "", depth, None)
        self._open.discard(id(value))
        return Opaque(keys, nodes)

    def _replicas(self, value: Any, path: str) -> Holders | None:
        return (
            self._tally.holders_of_replica(path)
            if self._tally is not None and isinstance(value, torch.Tensor)
            else None
        )

    def sharded(self, value: Any, path: str, holders: Holders | None) -> Node:
        """The boxes of a tensor on several ranks that this one saves, each a leaf."""
        leaves, tally = self.leaves, self._tally
        assert tally is not None
        plain, explicit = not is_sharded(value), isinstance(value, _EXPLICIT)
        if holders is not None:
            tally.note_replica(path, value, holders)
        views = box_views(value, path)
        if holders is None:
            holders = holders_of(value, tally.everyone)
        tensor = Named(path, str(value.dtype), tuple(value.shape))
        if isinstance(value, FlatShard):
            tally.note_range(tensor, holders, value.start, value.local.numel())
        elif not explicit and not tally.owns(tensor, holders, value if plain else local_tensors([value])[0]):
            views = []
        first = len(leaves)
        for _, view in views:
            if not plain:
                leaves.wrappers[len(leaves)] = value
            leaves.paths.append(path)
            leaves.values.append(view.detach() if explicit else view)
        self.has_sharded = True
        offsets = tuple(box.offsets for box, _ in views)
        replicated = plain and not explicit
        return cached.sharded_node(first, holders.mesh, value.dtype, replicated, tuple(value.shape), offsets)

    def container(self, value: Any, path: str, depth: int, last: Outline | None) -> Visited:
        kind = type(value)
        if depth > skeleton.MAX_DEPTH:
            raise UnsupportedStateError(f"{path}: nested more than {skeleton.MAX_DEPTH} levels deep; flatten it")
        if id(value) in self._open:
            raise UnsupportedStateError(f"{path}: a {kind.__qualname__} that contains itself cannot be saved")
        self._open.add(id(value))
        try:
            if kind is dict:
                if "param_groups" in value and not self._asked and self.lives is None:
                    refuse_unstepped(value, path)
                return self.inside(value, path, depth, last, make=DictNode)
            if kind is list or kind is tuple:
                return self.sequence(value, path, depth, last)
            if kind is OrderedDict:
                return self.ordered(value, path, depth, last)
            if kind is Counter:
                _refuse_attributes(value, path, allowed=())
                return self.inside(value, path, depth, last, make=skeleton.CounterNode)[0], None
            if kind is set:
                return skeleton.SetNode(_set(value, path, depth)), None
            if kind is frozenset:
                return skeleton.FrozenSetNode(_set(value, path, depth)), None
            if is_stateful(value):
                return self.object(value, path, depth, last)
            if is_composed(value):
                try:
                    return self.composed(value, path), None
                except UnsupportedStateError:
                    if not self._allow_pickle:
                        raise
            if not self._allow_pickle:
                raise unsupported(value, path)
            self.pickled.append(path)
            return pickle(value, full_name(value), path), None
        finally:
            self._open.discard(id(value))

    def composed(self, value: torch.Tensor, path: str) -> Node:
        """The tensors that it is composed of, each a leaf; it counts their changes."""
        node, tensors = take_apart(value, path)
        if value.requires_grad or isinstance(value, torch.nn.Parameter):
            raise UnsupportedStateError(
                f"{path}: a {full_name(value)} is saved without autograd; put its module there, or x.detach()"
            )
        first = len(self.leaves)
        self.leaves.wrappers.update(dict.fromkeys(range(first, first + len(tensors)), value))
        self.leaves.paths += [paths.child(path, name) for name in node.names]
        self.leaves.values += tensors
        self.has_composed = True
        return structs.replace(node, items=[*map(cached.array_node, range(first, len(self.leaves)))])

    def ordered(self, value: OrderedDict[Any, Any], path: str, depth: int, last: Outline | None) -> Visited:
        _refuse_attributes(value, path, allowed=("_metadata",))
        outer, self._in_metadata = self._in_metadata, True
        known = last.metadata[0][1] if isinstance(last, cached.ContainerOutline) and last.metadata else None
        metadata = [
            self.node(item, paths.child(path, "<_metadata>"), depth + 1, known) for item in vars(value).values()
        ]
        self._in_metadata = outer
        return self.inside(value, path, depth, last, metadata, make=skeleton.OrderedDictNode)

    def sequence(self, value: list[Any] | tuple[Any, ...], path: str, depth: int, last: Outline | None) -> Visited:
        make = ListNode if type(value) is list else TupleNode
        kinds = set(map(type, value))
        if kinds <= values.VERBATIM and (int not in kinds or (kinds == {int} and values.all_small(value))):
            return make(list(value)), None  # a loader's permutation may have millions of numbers
        return self.inside(value, path, depth, last, make=make)

    def object(self, value: Any, path: str, depth: int, last: Outline | None) -> Visited:
        known = last if isinstance(last, cached.ObjectOutline) else None
        self.objects.append(value)
        with naming_owner("state_dict", path, value):
            keeps_vars = self.lives is not None and isinstance(value, torch.nn.Module)
            state = live_state(value) if keeps_vars else value.state_dict()
        self._asked += 1
        child, below = self.node(state, path, depth + 1, known.below if known is not None else None)
        self._asked -= 1
        if known is not None and below is known.below:
            return (known.node if child is known.node.child else StatefulNode(child)), known
        node = StatefulNode(child)
        if self.lives is not None:
            self.lives[id(node)] = Live(path, value, True, True, state)
        return node, cached.ObjectOutline(node, below) if below is not None else None

    def inside(
        self,
        value: Any,
        path: str,
        depth: int,
        last: Outline | None,
        metadata: Sequence[Visited] = (),
        *,
        make: Callable[..., Node],
    ) -> Visited:
        """Flatten the items of a mapping or a sequence."""
        known = last if isinstance(last, cached.ContainerOutline) else None
        items = known.shape.items(value) if known is not None else None
        if known is None or items is None:
            known, shape, then = None, _shape(value, path, depth, make), None
            items = value if shape.keys is None else list(value.values())
        else:
            shape, then = known.shape, known.content
        content: cached.Content | None = then
        branches = then if isinstance(then, cached.Branches) else None
        nodes = then.reuse(items, self.leaves) if isinstance(then, (cached.Flat, cached.Rows)) else None
        if nodes is None:
            nodes, content = self.each(shape.names, items, path + "." if path else "", depth, branches)
        made = [item for item, _ in metadata] if metadata else []
        if known is not None and content is known.content and _same_metadata(metadata, known.metadata):
            # An outline keeps the node of its content as it was remembered: plain values may change back to those.
            return (known.node if nodes is content.nodes else shape.node(nodes, made)), known
        node = shape.node(nodes, made)
        if content is None:
            return node, None
        remembered = node if nodes is content.nodes else shape.node(content.nodes, made)
        return node, cached.ContainerOutline(shape, content, metadata, remembered)

    def each(
        self, names: Iterable[str], items: Sequence[Any], prefix: str, depth: int, last: cached.Branches | None
    ) -> tuple[list[Node], cached.Content | None]:
        nodes: list[Node] = []
        below: list[Outline | None] = []
        walked, visit = False, self.node if self.lives is None else self.live
        atoms, arrays, known, tally = values.ATOMS, self.leaves.values, self.leaves.paths, self._tally
        first = len(arrays)
        for name, item, then in zip(names, items, repeat(None) if last is None else last.below, strict=False):
            kind = type(item)
            convert = atoms.get(kind)
            outline: Outline | None = None
            if kind in _OWN_NODES or (kind is int and _LEAST <= item <= _MOST):
                node = item
            elif convert is not None:
                node = convert(item)
            elif kind in KINDS and (tally is None or self._replicas(item, prefix + name) is None):
                node = outline = cached.array_node(len(arrays))
                arrays.append(item)
                known.append(prefix + name)
            else:
                node, outline = visit(item, prefix + name, depth + 1, then)
                walked = True
            nodes.append(node)
            below.append(outline)
        if last is not None and same_objects(below, last.below):  # plain values may differ
            return (last.nodes if same_objects(nodes, last.nodes) else nodes), last
        if self.lives is not None or (len(arrays) == first and not self._in_metadata):
            return nodes, None  # plain values may be many, and are never reused
        if not walked:
            return nodes, cached.Flat(items, nodes, known[first:])
        if all(type(item) is dict and _is_flat(outline) for item, outline in zip(items, below, strict=True)):
            return nodes, cached.Rows(items, nodes, known[first:])
        return nodes, cached.Branches(nodes, below)


def _same_metadata(one: Sequence[Visited], other: Sequence[Visited]) -> bool:
    return len(one) == len(other) and all(map(same_objects, one, other))


def _is_flat(outline: Outline | None) -> bool:
    return isinstance(outline, cached.ContainerOutline) and isinstance(outline.content, cached.Flat)


def _shape(value: Any, path: str, depth: int, make: Callable[..., Node]) -> cached.Shape:
    if make is ListNode or make is TupleNode:
        return cached.Shape(type(value), None, [], [*map(str, range(len(value)))], make)
    keys = list(value)
    kinds = {*map(type, keys)}
    key_nodes: list[Node] = keys
    if not (kinds == {str} and "".join(keys).isascii()) and not (kinds == {int} and values.all_small(keys)):
        key_nodes = [key if type(key) is str and key.isascii() else _key(key, path, depth) for key in keys]
    if len(keys) > skeleton.MOST_ALIKE:
        _check_alike(key_nodes, keys, path)
    return cached.Shape(type(value), keys, key_nodes, paths.components(keys), make)


def _key(key: Any, path: str, depth: int) -> Node:
    """The node of a dict's key or a set's item: hashable, without arrays, equal to itself."""
    if depth > skeleton.MAX_DEPTH:
        raise UnsupportedStateError(f"{path}: a key nested more than {skeleton.MAX_DEPTH} levels deep")
    kind = type(key)
    if kind is tuple:
        return TupleNode([_key(item, path, depth + 1) for item in key])
    if kind is frozenset:
        return skeleton.FrozenSetNode(_set(key, path, depth + 1))
    if kind in values.ATOMS or (isinstance(key, (np.generic, np.dtype)) and not isinstance(key, np.void)):
        if not key == key:  # noqa: PLR0124 - NaN, of any type
            raise UnsupportedStateError(f"{path}: NaN as a key or in a set cannot be saved: it never equals itself")
        return values.atom(key, path)
    raise UnsupportedStateError(
        f"{path}: a {kind.__qualname__} as a key or in a set cannot be saved; use a plain value, or a list for tensors"
    )


def _set(items: Iterable[Any], path: str, depth: int) -> list[Node]:
    """The items of a set, in an order that does not change from process to process."""
    keys = list(items)
    nodes = [_key(item, path, depth) for item in keys]
    _check_alike(nodes, keys, path)
    return sorted(nodes, key=msgspec.msgpack.encode)


def _check_alike(nodes: Sequence[Node], keys: Sequence[Any], path: str) -> None:
    if skeleton.too_alike(nodes, keys):
        raise UnsupportedStateError(
            f"{path}: more than {skeleton.MOST_ALIKE} keys or items have the same hash, and could not be read back in "
            "time that is worth the wait; store them in a list"
        )


def _refuse_attributes(value: object, path: str, allowed: tuple[str, ...]) -> None:
    for name in vars(value):
        if name not in allowed:
            where = path or "the state"
            raise UnsupportedStateError(
                f"{where}: the attribute {name!r} on a {type(value).__qualname__} would be lost; store it under a key"
            )
