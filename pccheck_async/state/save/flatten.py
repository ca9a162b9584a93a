# SPDX-License-Identifier: Apache-2.0
"""Flatten an app state into a skeleton of nodes and a table of tensors and arrays. No byte of an array is copied."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from msgspec import structs

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.format import skeleton
from pccheck_async.format.skeleton import ComposedNode, DictNode, ListNode, Node, StatefulNode, TupleNode
from pccheck_async.state import paths, values
from pccheck_async.state.ambient import without_modes
from pccheck_async.state.boxes import FlatShard, Holders, PlannedBoxes, box_views, holders_of, is_sharded, local_tensors
from pccheck_async.state.cache import patterns
from pccheck_async.state.cache.patterns import NEVER, Depends, Items, Outline, Pattern, Read, same_objects
from pccheck_async.state.foreign import find_class, is_composed, pickle
from pccheck_async.state.leaves import KINDS, Leaves
from pccheck_async.state.save.advice import full_name, unsupported
from pccheck_async.state.save.owners import Named, Tally
from pccheck_async.state.stateful import is_stateful, refuse_unstepped

_EXPLICIT = (FlatShard, PlannedBoxes)
"""Types whose values determine which boxes this rank saves, without a choice among ranks."""
_OWN_NODES = values.VERBATIM - {int}
_LEAST, _MOST = values.SMALL_INTS

Visited: TypeAlias = tuple[Node, Pattern]
"""The node of a value, and the pattern that the value matches."""


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
    """Flatten ``state`` on the calling thread, calling ``state_dict()`` of every Stateful in it; check its arrays.

    Plain values are copied; the leaves are the live tensors and arrays.

    Raises:
        UnsupportedStateError: A value cannot be saved as it is; names its path, with advice.
    """
    check_outermost(state)
    flat = flatten_unchecked(state, tally=tally, allow_pickle=allow_pickle, remembers=False)
    flat.leaves.check()
    return flat


def flatten_unchecked(
    state: Mapping[str, Any],
    last: Outline | None = None,
    *,
    tally: Tally | None = None,
    allow_pickle: bool = False,
    remembers: bool = True,
) -> FlatState:
    """Flatten ``state``; check neither its arrays (:meth:`Leaves.check`) nor its keys (:func:`check_outermost`).

    Values that match ``last``, the outline of any earlier state, are not walked again. For modules and optimizers that
    save like torch's own, attributes are read instead of calling ``state_dict()`` (:mod:`.state.cache.patterns`).
    ``tally`` chooses the boxes of tensors on several ranks that become leaves; without it such tensors are refused.
    Values of other types are pickled if ``allow_pickle``, else refused.
    """
    flattener = Flattener(tally, allow_pickle=allow_pickle, remembers=remembers and patterns.compare is not None)
    if "param_groups" in state:
        refuse_unstepped(state, "")
    try:
        root, outline = flattener.root(state, last)
    except RecursionError:
        raise too_deep() from None
    has = flattener.has_sharded, flattener.has_composed
    return FlatState(root, flattener.leaves, outline, flattener.objects, flattener.pickled, *has)


def take_apart(value: Any, path: str) -> tuple[ComposedNode, list[torch.Tensor]]:
    """Return the node of a composed tensor, and its inner tensors, to which the node refers by numbers from 0 on.

    Raises UnsupportedStateError if the tensor cannot be made from them and the plain values of its context.
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
            f"{path}: a {full_name(value)} cannot be saved: {trouble} (an engine with allow_pickle=True pickles it, if "
            "pickle can)"
        )
    assert isinstance(flat.skeleton, DictNode)
    items: list[Node] = [*map(patterns.array_node, range(len(tensors)))]
    shape, stride = tuple(value.shape), tuple(value.stride())
    names, plain = [*names], flat.skeleton.values[0]
    return ComposedNode(items, names, plain, kind.__module__, kind.__qualname__, shape, stride), tensors


def check_outermost(state: object, advice: str = "") -> None:
    """Raise UnsupportedStateError unless the state is a mapping whose keys are strings; ``advice`` is an example."""
    if not isinstance(state, (dict, Mapping)):  # dict first: it takes no time
        advice = advice or 'state = {"model": model, "optimizer": optimizer}'
        raise UnsupportedStateError(
            f"the state is {values.with_article(type(state).__qualname__)}; give a mapping from names to objects and "
            f"values ({advice})"
        )
    if not {*map(type, state)} <= {str}:
        key = next(key for key in state if type(key) is not str)
        raise UnsupportedStateError(f"the state has the key {key!r}; the keys of the outermost mapping are strings")


def too_deep() -> UnsupportedStateError:
    """Return the error for a state so deeply nested that a walk ended in RecursionError."""
    return UnsupportedStateError("the state is nested too deeply for Python's stack")


@contextmanager
def naming_owner(call: str, path: str, value: object, consequence: str = "") -> Iterator[None]:
    """Add a note with the call, the object's path and the consequence to exceptions of a Stateful's own code."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by {call}() of {path}, {values.with_article(full_name(value))}{consequence}")
        raise


class Flattener:
    """One walk over a state; used once.

    Each value is converted to a node, and to a pattern with which the next save compares the value. Plain values are
    listed in the order of the walk. A container without arrays counts as one plain value, except in optimizers and in
    the attributes of an OrderedDict, where each value inside is compared (``_outlined``).
    """

    def __init__(self, tally: Tally | None = None, *, allow_pickle: bool = False, remembers: bool = False) -> None:
        self._tally = tally
        self._allow_pickle = allow_pickle
        self._remembers = remembers
        self.pickled: list[str] = []
        self.leaves = Leaves()
        self.objects: list[Any] = []
        self.has_sharded = self.has_composed = False
        self.open: set[int] = set()  # identities of the containers between the root and here
        self._outlined = False
        self.asked = 0  # Statefuls between the root and here: their states are as new as can be
        self._answers: list[tuple[Any, Any]] = []  # objects that were asked lately, and their states
        self._again: list[tuple[Any, Any]] = []  # those of them that will come again
        self._plain: list[Any] = []
        self._places: list[tuple[str, int, int]] = []  # of the plain values: paths, depths, and Statefuls around them
        self._classes: dict[type, Depends] = {}

    def root(self, state: Mapping[str, Any], last: Outline | None) -> tuple[Node, Outline | None]:
        """Flatten the outermost mapping; return its node and outline. Nodes of items that match ``last`` are reused."""
        attributes: list[Any] = []
        make: Any = DictNode
        if type(state) is OrderedDict:
            _refuse_attributes(state, "", allowed=("_metadata",))
            make, attributes = skeleton.OrderedDictNode, [*vars(state).values()]
        keys, items = [*state], [*attributes, *state.values()]
        if last is None or not self._remembers or not last.holds(make, len(attributes), keys):
            last = None
            key_nodes, names = values.key_nodes(keys, "", 1), paths.components(keys)
        else:
            key_nodes, names = last.key_nodes, last.names
            root = self._same(items, last)
            if root is not None:
                return root, last
        new = Outline(make, len(attributes), keys, key_nodes, names)
        below: list[Pattern] = []
        at = 0
        while at < len(items):
            if last is not None and last.leaves_at[at] == len(self.leaves):
                stop = self._match(items, last, at, new)
                below += last.patterns[at:stop]
                at = stop
            if at < len(items):
                new.leaves_at.append(len(self.leaves))
                new.plain_at.append(len(self._plain))
                self._outlined = at < len(attributes)
                path = "<_metadata>" if self._outlined else names[at - len(attributes)]
                node, pattern = self.node(items[at], path, 2)
                new.nodes.append(node)
                below.append(pattern)
                at += 1
        if last is not None and same_objects(new.nodes, last.nodes):
            if same_objects(below, last.patterns):
                return last.root, last
            root = last.root
        else:
            metadata = [new.nodes[: len(attributes)]] if type(state) is OrderedDict else ()
            root = make(key_nodes, new.nodes[len(attributes) :], *metadata)
        if not len(self.leaves) or not self._remembers:
            return root, None  # plain values may be many, and are never reused
        new.leaves_at.append(len(self.leaves))
        new.plain_at.append(len(self._plain))
        same = last is not None and same_objects(below, last.patterns)
        new.patterns, new.root = last.patterns if last is not None and same else (*below,), root
        new.paths, new.detached = self.leaves.paths, self.leaves.detached
        new.plain, new.places = self._plain, self._places
        new.classes = self._classes if last is None else last.classes | self._classes
        return root, new

    def _same(self, items: list[Any], last: Outline) -> Node:
        """Return the node of a state that differs from ``last`` at most in outermost plain values; else None."""
        assert patterns.compare is not None
        leaves, found = self.leaves, list[Any]()
        nodes, root = last.nodes, last.root
        if patterns.compare(items, last.patterns, 0, leaves.values, found, self._ask) < len(items):
            root = None
        elif not same_objects(found, last.plain):
            nodes = nodes.copy()
            for number, (value, then) in enumerate(zip(found, last.plain, strict=True)):
                if value is then:
                    continue
                item, convert = bisect_right(last.plain_at, number) - 1, values.ATOMS.get(type(value))
                if convert is None or last.patterns[item] is not None:
                    root = None
                    break
                nodes[item] = convert(value)
            if root is not None:
                metadata = [nodes[: last.attributes]] if last.make is skeleton.OrderedDictNode else ()
                root = last.make(last.key_nodes, nodes[last.attributes :], *metadata)
        if root is None:
            leaves.values.clear()
            self._again, self._answers = self._answers, []  # objects that are compared again are not asked twice
        else:
            leaves.paths, leaves.detached = last.paths, last.detached
        return root  # type: ignore[no-any-return]

    def _match(self, values: list[Any], last: Outline, at: int, new: Outline) -> int:
        """Reuse the nodes of items from ``at`` on that match ``last``; return the number of the first that does not."""
        assert patterns.compare is not None
        leaves, found = self.leaves, list[Any]()
        self._answers = []
        stop = patterns.compare(values, last.patterns, at, leaves.values, found, self._ask)
        leaves.paths += last.paths[last.leaves_at[at] : last.leaves_at[stop]]
        first, fresh = last.plain_at[at], dict[int, Node]()
        known = last.plain[first : last.plain_at[stop]]
        if not same_objects(found, known):
            for number, (value, then) in enumerate(zip(found, known, strict=True), first):
                if value is not then:
                    node, plain = self._plain_node(value, *last.places[number])
                    if not plain:
                        stop = bisect_right(last.plain_at, number) - 1
                        fresh = {number: node for number, node in fresh.items() if number < last.plain_at[stop]}
                        break
                    fresh[number] = node
        if stop < len(values):
            self._again += self._answers  # those that are walked now are not asked twice
        end, last_plain = last.leaves_at[stop], last.plain_at[stop]
        del leaves.values[end:], leaves.paths[end:]
        numbers, shift = [*fresh], len(self._plain) - first
        nodes, plain_at = last.nodes[at:stop], last.plain_at[at:stop]
        for item in {bisect_right(last.plain_at, number) - 1 for number in numbers}:
            nodes[item - at] = patterns.remade(
                last.patterns[item], last.nodes[item], last.plain_at[item], numbers, fresh
            )
        new.leaves_at += last.leaves_at[at:stop]
        new.plain_at += [place + shift for place in plain_at] if shift else plain_at
        new.nodes += nodes
        leaves.detached += [each for each in last.detached if last.leaves_at[at] <= each.start < end]
        kept = last.plain[first:last_plain]
        for number in numbers:
            kept[number - first] = _kept(found[number - first])
        self._plain += kept
        self._places += last.places[first:last_plain]
        return stop

    def _plain_node(self, value: Any, path: str, depth: int, asked: int) -> tuple[Node, bool]:
        """Return the node of a value that took the place of a plain one, and whether it is plain as well."""
        convert = values.ATOMS.get(type(value))
        if convert is not None:
            return convert(value), True
        leaves, plain = len(self.leaves), len(self._plain)
        around, self.asked = self.asked, asked
        node, pattern = self.node(value, path, depth)
        self.asked = around
        # The leaves and plain values in it are taken back.
        del self.leaves.values[leaves:], self.leaves.paths[leaves:]
        del self._plain[plain:], self._places[plain:]
        self.leaves.detached = [each for each in self.leaves.detached if each.start < leaves]
        for number in [number for number in self.leaves.wrappers if number >= leaves]:
            del self.leaves.wrappers[number]
        return node, pattern is None

    def _remember(self, value: Any, path: str, depth: int) -> None:
        if not self._remembers:
            return
        self._plain.append(_kept(value))
        self._places.append((path, depth, self.asked))

    def node(self, value: Any, path: str, depth: int) -> Visited:
        """Convert one value; collect its leaves and plain values."""
        (node,), (pattern,) = self.each([path], [value], "", depth - 1)
        return node, pattern

    def other(self, value: Any, path: str, depth: int) -> Visited:
        """Convert a value that is neither plain nor an array of this rank alone."""
        kind = type(value)
        if isinstance(value, (np.generic, np.dtype)):
            self._remember(value, path, depth)
            return values.numpy_value(value, path), None
        if kind in KINDS or (self._tally is not None and (kind in _EXPLICIT or is_sharded(value))):
            return self._sharded(value, path), NEVER
        leaves, plain = len(self.leaves.values), len(self._plain)
        node, pattern = self.container(value, path, depth)
        if pattern is None and len(self.leaves.values) > leaves:
            pattern = NEVER
        if pattern is None or pattern is NEVER:
            del self._plain[plain:], self._places[plain:]
        if pattern is None:
            self._remember(value, path, depth)
        return node, pattern

    def _replicas(self, value: Any, path: str) -> Holders | None:
        return (
            self._tally.holders_of_replica(path)
            if self._tally is not None and isinstance(value, torch.Tensor)
            else None
        )

    def _sharded(self, value: Any, path: str) -> Node:
        """Return the node of a tensor on several ranks; add each box that this rank saves as a leaf."""
        leaves, tally, holders = self.leaves, self._tally, self._replicas(value, path)
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
        return patterns.sharded_node(first, holders.mesh, value.dtype, replicated, tuple(value.shape), offsets)

    def container(self, value: Any, path: str, depth: int) -> Visited:
        """Convert a container, an object, or a composed tensor; pickle or refuse any other value."""
        kind = type(value)
        if depth > skeleton.MAX_DEPTH:
            raise UnsupportedStateError(f"{path}: nested more than {skeleton.MAX_DEPTH} levels deep; flatten it")
        if id(value) in self.open:
            raise UnsupportedStateError(f"{path}: a {kind.__qualname__} that contains itself cannot be saved")
        self.open.add(id(value))
        try:
            if kind is dict:
                unstepped = "param_groups" in value and not self.asked
                if unstepped:
                    refuse_unstepped(value, path)
                node, pattern = self.mapping(value, path, depth, DictNode)
                # What refuses such a dict is no part of the pattern.
                return node, NEVER if unstepped and not value.get("state") else pattern
            if kind is list or kind is tuple:
                return self._sequence(value, path, depth)
            if kind is OrderedDict:
                return self._ordered(value, path, depth)
            if kind is Counter:
                _refuse_attributes(value, path, allowed=())
                return self.mapping(value, path, depth, skeleton.CounterNode)[0], None
            if kind is set:
                return skeleton.SetNode(values.set_nodes(value, path, depth)), None
            if kind is frozenset:
                return skeleton.FrozenSetNode(values.set_nodes(value, path, depth)), None
            if is_stateful(value):
                return self.object(value, path, depth)
            if is_composed(value):
                try:
                    return self._composed(value, path), NEVER
                except UnsupportedStateError:
                    if not self._allow_pickle:
                        raise
            if not self._allow_pickle:
                raise unsupported(value, path)
            self.pickled.append(path)
            return pickle(value, full_name(value), path), None
        finally:
            self.open.discard(id(value))

    def _composed(self, value: torch.Tensor, path: str) -> Node:
        """Return the node of a composed tensor; add its inner tensors as leaves, with the tensor as their wrapper."""
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
        return structs.replace(node, items=[*map(patterns.array_node, range(first, len(self.leaves)))])

    def _ordered(self, value: OrderedDict[Any, Any], path: str, depth: int) -> Visited:
        _refuse_attributes(value, path, allowed=("_metadata",))
        outer, self._outlined = self._outlined, True
        nodes, below = self.each(["<_metadata>"], [*vars(value).values()], path + "." if path else "", depth)
        self._outlined = outer
        node, inside = self.mapping(value, path, depth, skeleton.OrderedDictNode, nodes)
        if isinstance(inside, Items):
            return node, NEVER if _has(NEVER, below) else patterns.ordered(
                patterns.items(dict, vars(value), below), inside
            )
        return node, inside

    def _sequence(self, value: list[Any] | tuple[Any, ...], path: str, depth: int) -> Visited:
        make = ListNode if type(value) is list else TupleNode
        kinds = set(map(type, value))
        if kinds <= values.VERBATIM and (int not in kinds or (kinds == {int} and values.all_small(value))):
            return make(list(value)), None  # a loader's permutation may have millions of numbers
        nodes, below = self.each(map(str, range(len(value))), value, path + "." if path else "", depth)
        if not self._remembers:
            return make(nodes), NEVER
        return make(nodes), self._pattern(below, partial(patterns.sequence, type(value)))

    def mapping(self, value: Any, path: str, depth: int, make: Any, *metadata: list[Node]) -> Visited:
        """Convert a mapping; ``make`` makes its node of key nodes, value nodes and ``metadata``."""
        keys = [*value]
        key_nodes, names = values.key_nodes(keys, path, depth), paths.components(keys)
        nodes, below = self.each(names, [*value.values()], path + "." if path else "", depth)
        if not self._remembers:
            return make(key_nodes, nodes, *metadata), NEVER
        return make(key_nodes, nodes, *metadata), self._pattern(below, partial(patterns.items, type(value), keys))

    def _pattern(self, below: list[Pattern], make: Callable[[list[Pattern]], Pattern]) -> Pattern:
        if _has(NEVER, below):
            return NEVER
        return make(below) if self._outlined or not all(each is None for each in below) else None

    def each(
        self, names: Iterable[str], items: Iterable[Any], prefix: str, depth: int
    ) -> tuple[list[Node], list[Pattern]]:
        """Convert the items of a container at ``depth``; ``prefix`` is the container's path with a dot."""
        nodes: list[Node] = []
        below: list[Pattern] = []
        atoms, arrays, known, tally = values.ATOMS, self.leaves.values, self.leaves.paths, self._tally
        for name, item in zip(names, items, strict=False):
            kind = type(item)
            convert = atoms.get(kind)
            pattern: Pattern = None
            if convert is not None:
                own = kind in _OWN_NODES or (kind is int and _LEAST <= item <= _MOST)
                node = item if own else convert(item)
                if self._remembers:
                    self._remember(item, prefix + name, depth + 1)
            elif kind in KINDS and (tally is None or self._replicas(item, prefix + name) is None):
                node, pattern = patterns.array_node(len(arrays)), kind
                arrays.append(item)
                known.append(prefix + name)
            else:
                node, pattern = self.other(item, prefix + name, depth + 1)
            nodes.append(node)
            below.append(pattern)
        return nodes, below

    def object(self, value: Any, path: str, depth: int) -> Visited:
        """Convert a Stateful: call its ``state_dict()``, unless that was called before in this walk."""
        state = self._ask(value, path)
        leaves, plain, outer = len(self.leaves), len(self._plain), self._outlined
        reads = self._remembers and self._tally is None and patterns.readable(type(value)) is not None
        self._outlined = outer or (reads and isinstance(value, torch.optim.Optimizer))
        self.asked += 1
        child, below = self.node(state, path, depth + 1)
        self.asked -= 1
        self._outlined = outer
        node = StatefulNode(child)
        if below is None or below is NEVER:
            return node, below
        read = self._read(value, state, below, leaves, plain) if reads else None
        return node, read or patterns.asked(type(value), path, below)

    def _ask(self, value: Any, path: str) -> Any:
        for number, (asked, state) in enumerate(self._again):
            if asked is value:
                self._answers.append(self._again.pop(number))
                return state
        self.objects.append(value)
        with naming_owner("state_dict", path, value):
            state = value.state_dict()
        self._answers.append((value, state))
        return state

    def _read(self, value: Any, state: Any, below: Pattern, leaves: int, plain: int) -> Pattern:
        """Return the pattern by which later saves read an object; None if reading does not give its ``state`` exactly.

        ``leaves`` and ``plain`` are the numbers of the object's first leaf and plain value; the collected ones are
        replaced by those that were read.
        """
        reader, found, plain_found = patterns.Reader(), list[Any](), list[Any]()
        fixed: list[int] = []
        pattern: Read | None = None
        if isinstance(value, torch.nn.Module):
            pattern = reader.module(value)
        elif (described := reader.optimizer(value, below)) is not None:
            pattern, fixed = described
        assert patterns.compare is not None
        if pattern is None or patterns.compare([value], (pattern,), 0, found, plain_found, None) != 1:
            return None
        then = self.leaves.values[leaves:]
        if len(found) != len(then):
            return None
        if isinstance(value, torch.nn.Module):
            with without_modes():
                if len(state) != len(found) or not all(map(_is_detached, then, found)):
                    return None
            del self._plain[plain:], self._places[plain:]  # versions in the metadata: those of the classes
            self.leaves.values[leaves:] = found
            self.leaves.detached.append(range(leaves, len(self.leaves)))
        else:
            kept = [each for number, each in enumerate(self._plain[plain:]) if number not in fixed]
            if (
                len(kept) != len(plain_found)
                or not same_objects(kept, map(_kept, plain_found))
                or not same_objects(found, then)
            ):
                return None
            for number in reversed(fixed):
                del self._plain[plain + number], self._places[plain + number]
        self._classes |= reader.classes
        return pattern


def _is_detached(one: Any, tensor: torch.Tensor) -> bool:
    """Return whether a tensor equals the result of ``tensor.detach()``: the same memory, type and no gradient."""
    try:
        return type(one) is torch.Tensor and not one.requires_grad and one.is_set_to(tensor)
    except (RuntimeError, NotImplementedError):  # sparse
        return False


def _kept(value: Any) -> Any:
    """Return the object to compare with a plain value at the next save: the value, or ``CHANGING`` if it is mutable."""
    kind = type(value)
    if kind in values.ATOMS:
        return patterns.CHANGING if kind is bytearray else value
    return value if kind is tuple and values.VERBATIM.issuperset(map(type, value)) else patterns.CHANGING


def _has(pattern: Pattern, below: Iterable[Pattern]) -> bool:
    return any(each is pattern for each in below)


def _refuse_attributes(value: object, path: str, allowed: tuple[str, ...]) -> None:
    for name in vars(value):
        if name not in allowed:
            where = path or "the state"
            raise UnsupportedStateError(
                f"{where}: the attribute {name!r} on a {type(value).__qualname__} would be lost; store it under a key"
            )
