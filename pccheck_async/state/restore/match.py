"""A decoded manifest is matched: with new memory for ``load``, with the live objects for ``engine.restore``."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
import torch
from msgspec import structs
from torch.nn.parameter import is_lazy

from pccheck_async.errors import StateMismatchError, UnsupportedStateError
from pccheck_async.format import dtypes
from pccheck_async.format import skeleton as nodes
from pccheck_async.format.manifest import Manifest
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
    arrays,
)
from pccheck_async.state import paths
from pccheck_async.state.ambient import apart, refuse_tracing
from pccheck_async.state.boxes import FlatShard, box_views, is_sharded
from pccheck_async.state.composed import check_classes, class_of, compose, is_composed
from pccheck_async.state.leaves import Array
from pccheck_async.state.pickles import refuse_pickled, unpickle
from pccheck_async.state.restore import objects
from pccheck_async.state.restore.arrays import (
    Allocation,
    Filling,
    Targets,
    describe,
    difference,
    memory_trouble,
    place_of,
)
from pccheck_async.state.restore.reshard import Wanted
from pccheck_async.state.restore.tree import (
    count,
    entries,
    has_parts,
    leaves,
    mapping_keys,
    rebuild,
    refuse_boxes,
    select,
)
from pccheck_async.state.rng import RNGState
from pccheck_async.state.save.detached import refuse_filling
from pccheck_async.state.save.flatten import check_outermost, flatten, naming_owner, take_apart
from pccheck_async.state.stateful import can_check, is_stateful
from pccheck_async.state.tensor_access import storage_address
from pccheck_async.telemetry import write

_MAPPINGS: Final[Mapping[type, type]] = {dict: DictNode, OrderedDict: nodes.OrderedDictNode, Counter: nodes.CounterNode}
_SEQUENCES: Final[Mapping[type, type]] = {list: ListNode, tuple: nodes.TupleNode}
_REFILLED: Final[Mapping[type, type]] = {**_MAPPINGS, list: ListNode, set: nodes.SetNode}
"""Containers that take other content and stay the same object."""
_LIVE_ARRAYS: Final = (torch.Tensor, np.ndarray, FlatShard)
_NOWHERE: Final = object()
_ENCODE: Final = msgspec.msgpack.Encoder().encode
_EXTRA_STATE: Final = "_extra_state"  # the key of the result of nn.Module's get_extra_state()

_Replace = Callable[[Any], None]


@dataclass(frozen=True, slots=True, eq=False)
class Restoration:
    """A restore that was checked and can begin: fill the targets, then call ``finish`` once."""

    targets: Targets
    finish: Callable[[], Any]  # makes the state from the filled memory, and returns it
    missing: tuple[str, ...] = ()  # paths that the state has and the checkpoint lacks: they stay as they are
    unexpected: tuple[str, ...] = ()  # paths that the checkpoint has and the state lacks: they are not read
    filled: tuple[str, ...] = ()  # paths of the live arrays that the targets fill
    # By outermost names that both have: how many leaves of the checkpoint are restored, and how many it has.
    counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    resharded: tuple[Wanted, ...] = ()  # not in ``targets``: to be filled before ``finish``
    trained: tuple[torch.Tensor, ...] = ()  # live tensors that are restored and may have gradients
    move: Callable[[], None] = lambda: None  # copies to the device, which any thread may do before ``finish``


def allocate(
    manifest: Manifest, keys: Sequence[str] | None = None, device: Any = "cpu", *, allow_pickle: bool = False
) -> Restoration:
    """Prepare a restore into new memory; its ``finish`` returns a nested dict, with a dict in place of each Stateful.

    Args:
        manifest: Of the checkpoint.
        keys: Paths or globs of the leaves and subtrees to load; None for all. Only their bytes are read.
        device: The final place of tensors (see :func:`place_of`); numpy arrays stay on the host.
        allow_pickle: Whether pickled values are unpickled; else they are refused, before any byte is read.

    Raises:
        UnsupportedStateError: There is a pickled value, or a tensor of a class that is not imported.
        StateMismatchError: One of ``keys`` selects nothing.
        IncompleteCheckpointError: A tensor lies on several ranks, of which this is one's part.
        CorruptStoreError: The skeleton describes no value.
        RuntimeError: There is no such device; raised by torch.
    """
    place = place_of(device)
    skeleton = manifest.skeleton if keys is None else select(manifest.skeleton, keys)
    refuse_boxes(skeleton)
    check_classes(skeleton)
    pickled = {
        id(each): path for path, leaf in leaves(skeleton) for each in nodes.walk(leaf) if isinstance(each, PickledNode)
    }
    if pickled and not allow_pickle:
        refuse_pickled(
            *next((each, pickled[id(each)]) for each in nodes.walk(skeleton) if isinstance(each, PickledNode))
        )
    allocation = Allocation(manifest, sorted(arrays(skeleton)))

    def finish() -> Any:
        _tell_unpickled(pickled.values())
        values = partial(rebuild, skeleton, lambda index: allocation.array(index, place), composed=compose)
        with apart():  # this may be the caller's thread
            return values(pickled=lambda node: unpickle(node, pickled.get(id(node), ""), device))

    return Restoration(Targets(allocation.targets()), finish, move=partial(allocation.move, place))


def _tell_unpickled(where: Collection[str]) -> None:
    if where:
        text = "allow_pickle: %d values are unpickled, which runs code that the checkpoint names: %s"
        write(logging.WARNING, "unpickled", text, len(where), ", ".join([*where][:5]))


def match(
    state: Mapping[str, Any],
    manifest: Manifest,
    by_address: bool = False,
    *,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
    generators: bool = True,
    added: Collection[str] = (),
) -> Restoration:
    """Prepare a restore into the live ``state``: check it first, and change nothing.

    Its ``finish`` copies arrays that were not filled in place, calls every ``load_state_dict`` and returns ``state``.
    Arrays are filled in place if they lie in memory as they were stored, otherwise by a copy at the end. A container
    that holds an array takes a saved None in its place, and no other plain value.

    A live plain value (without tensors, arrays and objects) takes any saved value: lists, dicts and sets are
    refilled with content of their type, any other value is replaced in its container. An object that was saved inside
    needs an entry at its own path: an object, or a plain value, which takes the object's state.

    Optimizers need no state yet; their parameters are identified by the names that were saved, else by their numbers.
    Any other Stateful gets its own tensors if dtype and shape are equal, else new ones. For ``strict``, ``dtype``
    and the comparison of modules see :meth:`CheckpointEngine.restore`. ``by_address`` is whether
    the copy backend writes to the memory of CUDA tensors. Without ``generators`` every :class:`RNGState` stays as it
    is: the saved ones are another rank's. Paths that :func:`merge_parts` ``added`` need not be in the state.

    Raises:
        UnsupportedStateError: ``state`` is not a mapping with strings for keys, or has the ``state_dict()`` of a live
            object in the object's place; or this was called while tensors are traced.
        StateMismatchError: The state differs; lists the paths.
        CorruptStoreError: The skeleton describes no value.
    """
    refuse_tracing("restore")
    check_outermost(state)
    refuse_filling(state)
    return _Matching(state, manifest, by_address, strict, dtype, allow_pickle, generators, added).restoration()


def clear_gradients(tensors: Iterable[torch.Tensor]) -> int:
    """Set the gradients of these tensors to None, as in a process that was just started; return how many there were."""
    with apart():
        leaves = {id(each): each for each in tensors if each.is_leaf and each.grad is not None}
        for tensor in leaves.values():
            tensor.grad = None
    return len(leaves)


class _Matching:
    """One walk over the live state and the skeleton side by side."""

    def __init__(
        self,
        state: Mapping[str, Any],
        manifest: Manifest,
        by_address: bool,
        strict: bool,
        dtype: torch.dtype | None,
        allow_pickle: bool,
        generators: bool,
        added: Collection[str],
    ) -> None:
        assert isinstance(manifest.skeleton, MappingNode)
        self._state = state
        self._skeleton = manifest.skeleton
        self._tensors = manifest.tensors
        self._strict = strict
        self._dtype = dtype
        self._allow_pickle = allow_pickle
        self._unpickled: dict[int, tuple[str, Any]] = {}  # paths and values of those pickled, by identity of the node
        self._restores_generators = generators
        self._added = added
        self._filling = Filling(manifest, by_address)
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._mismatched: list[str] = []
        self._refused: list[str] = []  # paths of objects that refuse their saved state
        self._disjoint: list[str] = []  # paths that both have, with nothing in common below
        self._matched = 0  # entries of the state that are restored
        self._unread = 0  # leaves of the checkpoint that the state lacks
        self._counts: dict[str, tuple[int, int]] = {}
        self._wanted: set[int] = set()  # arrays that values are rebuilt from
        self._filled: list[torch.Tensor] = []  # live tensors that are restored
        self._maybe_filled: list[torch.Tensor] = []  # parameters that are if their memory is that of such a one
        self._actions: list[Callable[[], None]] = []
        self._last_actions: list[Callable[[], None]] = []  # generators: loading before them may draw from them
        self._objects: dict[int, Any] = {}  # live Statefuls by the identity of their node
        self._made: dict[int, Any] = {}  # tensors that lie, or lay, on several ranks, by the identity of their node
        self._composed: dict[int, Any] = {}  # live composed tensors by the identity of their node
        self._plain_made: dict[int, Any] = {}  # those of them that were saved as plain tensors, by number
        # Of tensors that lie, or lay, on several ranks: boxes that are others here than in this rank's part.
        self._resharded: list[Wanted] = []
        # Paths of tensors on several ranks whose boxes are the same here and in this rank's part, by mesh and memory.
        self._whole: dict[tuple[int, int, int], str] = {}
        # Stored arrays that resharded tensors are made of: they are not read as they are.
        self._elsewhere: set[int] = set()

    @cached_property
    def _names(self) -> objects.Names:
        return objects.names_in(self._state)

    @cached_property
    def _stored_paths(self) -> dict[int, str]:
        return {id(node): path for path, node in leaves(self._skeleton)}

    def restoration(self) -> Restoration:
        self._outermost()
        self._mismatched += self._filling.conflicts()
        # Tensors that were tied when they were saved were all saved by one rank.
        memories = ((one, (one.mesh, one.local.data_ptr(), one.local.nbytes)) for one in self._resharded)
        self._mismatched += [
            f"{one.path} (shares memory with {self._whole[memory]} here, but not in the checkpoint)"
            for one, memory in memories
            if one.local.nbytes and memory in self._whole
        ]
        if self._mismatched or (self._strict and (self._missing or self._unexpected)):
            raise self._error()
        if self._disjoint or (self._missing and (not self._matched or self._wrapped())):
            raise self._error()  # or a state in which nothing was restored would pass for a restored one
        with apart():
            self._filling.allocate(self._wanted - self._elsewhere)
            targets = Targets(self._filling.targets())

        def finish() -> Mapping[str, Any]:
            _tell_unpickled([path for path, _ in self._unpickled.values()])
            with apart():
                self._filling.finish()
            gradients = torch.is_grad_enabled()  # inference_mode(False) would switch them on
            # Tensors that are made now can be trained, in any mode of the caller.
            with torch.inference_mode(False), torch.set_grad_enabled(gradients):
                for action in self._actions + self._last_actions:
                    action()
            return self._state

        missing, unexpected = tuple(self._missing), tuple(self._unexpected)
        filled, resharded = self._filling.paths, tuple(self._resharded)
        return Restoration(
            targets, finish, missing, unexpected, filled, self._counts, resharded, tuple(self._trained())
        )

    def _trained(self) -> Iterator[torch.Tensor]:
        """Yield the live tensors that are restored and may have gradients."""
        yield from self._filled
        if self._maybe_filled:
            addresses = {*map(storage_address, self._filled)} - {0}
            yield from (each for each in self._maybe_filled if storage_address(each) in addresses)

    def _error(self) -> StateMismatchError:
        make = partial(
            StateMismatchError, missing=self._missing, unexpected=self._unexpected, mismatched=self._mismatched
        )
        advice = self._wrapped()
        if not self._mismatched and not advice:
            if self._disjoint:
                advice = (
                    f"; nothing in common below {', '.join(self._disjoint)}: leave that out of the state, or take "
                    "load(path, keys=[...]), change its names, and give it to load_state_dict"
                )
            elif self._strict:
                advice = "; to restore what both have: restore(state, strict=False)"
            else:
                advice = "; they have nothing in common"
        if not set(paths.components(mapping_keys(self._skeleton))).isdisjoint(self._unexpected):
            advice += "; to take only part of it: load(path, keys=[...])"
        if self._refused:
            refused = ", ".join(self._refused)
            advice += f"; to restore all but {refused}: take it out of the state, and call restore(state, strict=False)"
        return make(f"{make()}{advice}")

    def _wrapped(self) -> str:
        """Return advice if names differ by the prefix that a wrapper of models adds to them; else an empty string."""
        for attribute, wrapper in (("module", "DistributedDataParallel or its like"), ("_orig_mod", "torch.compile")):
            prefix = paths.escape(f"{attribute}.")
            lists = self._missing, self._unexpected
            for where, wrapped, plain in (("here", *lists), ("in the checkpoint", *reversed(lists))):
                if not {path.replace(prefix, "", 1) for path in wrapped if prefix in path}.isdisjoint(plain):
                    inside = f"save and restore the module inside (model.{attribute})"
                    return f"; a model {where} is wrapped by {wrapper}: {inside}"
        return ""

    def _outermost(self) -> None:
        setter = self._state.__setitem__ if isinstance(self._state, MutableMapping) else None
        for key, value, child, path in self._common(self._state, self._skeleton, ""):
            matched, missing, unread = self._matched, len(self._missing), self._unread
            self._value(value, child, path, None if setter is None else partial(setter, key))
            if self._matched == matched and len(self._missing) > missing and path not in self._disjoint:
                self._disjoint.append(path)
            leaves = count(child)
            self._counts[path] = leaves - (self._unread - unread), leaves

    # -- values that are filled in place or replaced

    def _value(self, live: Any, node: Node, path: str, replace: _Replace | None, *, of_object: bool = False) -> None:
        """Match a live value with a stored one, which with ``of_object`` is the ``state_dict()`` of an object."""
        if isinstance(live, _LIVE_ARRAYS):
            if node is None and replace is not None:
                self._matched += 1
                self._rebuild_later(node, replace)
            else:
                self._array(live, node, path)
        elif is_stateful(live):
            self._stateful(live, node, path)
        elif isinstance(node, StatefulNode) and (_has_live_parts(live) or _savable(live)):
            self._value(live, node.child, path, replace, of_object=True)  # restored into the object's state
        elif isinstance(node, PickledNode):
            self._plain(live, node, path, replace)
        elif not _has_live_parts(live) and (not has_parts(node) or _savable(live)):
            if not of_object:
                what = "an object in the checkpoint: put one there, or None for its state"
                self._mismatched += [f"{lost} ({what})" for lost in _without_place(live, node, path)]
            self._plain(live, node, path, replace)
        elif type(live) in _MAPPINGS and type(node) is _MAPPINGS[type(live)]:
            for key, value, child, below in self._common(live, node, path):  # type: ignore[arg-type]
                self._value(value, child, below, partial(live.__setitem__, key))
        elif type(live) in _SEQUENCES and type(node) is _SEQUENCES[type(live)]:
            self._items(live, node.items, path)  # type: ignore[union-attr]
        else:
            self._differs(live, node, path)

    def _items(self, live: Sequence[Any], nodes: Sequence[Node], path: str) -> None:
        if len(live) != len(nodes):
            self._mismatched.append(f"{path} ({len(live)} items here, {len(nodes)} in the checkpoint)")
            return
        for index, (value, child) in enumerate(zip(live, nodes, strict=True)):
            replace = partial(live.__setitem__, index) if isinstance(live, list) else None
            self._value(value, child, paths.child(path, str(index)), replace)

    def _array(self, live: Any, node: Node, path: str, *, strict: bool = True) -> None:
        self._matched += 1
        if isinstance(live, torch.Tensor):
            self._filled.append(live)
        if isinstance(node, ShardedNode) or is_sharded(live) or isinstance(live, FlatShard):
            plain = isinstance(node, ShardedNode) and node.plain and type(live) in (np.ndarray, torch.Tensor)
            if strict or not plain or self._fits(live, node):  # else it is made anew
                self._sharded(live, node, path)
            return
        if isinstance(node, ComposedNode):
            self._fill_parts(live, node, path, strict=strict)
            return
        if not isinstance(node, ArrayNode):
            if strict:
                self._differs(live, node, path)
            return
        trouble = difference(self._tensors[node.index], live, self._dtype)
        if not trouble:
            with apart():
                self._filling.add(path, node.index, live, strict=strict)
        elif strict:
            self._mismatched.append(f"{path} ({trouble})")

    def _fill_parts(self, live: Any, node: ComposedNode, path: str, *, strict: bool) -> None:
        """Match a composed tensor with a stored one; its parts are filled in place."""
        trouble = f"a {type(live).__qualname__} here, a {node.name} in the checkpoint"
        if is_composed(live) and (type(live).__module__, type(live).__qualname__) == (node.module, node.name):
            own, tensors = take_apart(live, path)
            about, stored = (_ENCODE(structs.replace(each, items=[], stride=())) for each in (own, node))
            trouble = "" if about == stored else f"another shape or context of a {node.name} here"
        if not trouble:
            indices = [item.index for item in node.items if isinstance(item, ArrayNode)]
            pairs = [*zip(indices, tensors, strict=True)]
            found = ((index, difference(self._tensors[index], part)) for index, part in pairs)
            trouble = next((f"{node.names[at]}: {each}" for at, (_, each) in enumerate(found) if each), "")
        if trouble:
            if strict:
                self._mismatched.append(f"{path} ({trouble})")
            return
        with apart():
            for name, (index, part) in zip(node.names, pairs, strict=True):
                self._filling.add(paths.child(path, name), index, part, strict=strict)
        self._composed[id(node)] = live
        if not live.is_inference():
            self._actions.append(partial(torch.autograd.graph.increment_version, live))  # which its parts do not

    def _stored_composed(self, node: ComposedNode, parts: Mapping[str, Any], context: Any) -> Any:
        live = self._composed.get(id(node))
        if live is not None and all(getattr(live, name) is part for name, part in parts.items()):
            return live
        return compose(node, parts, context)

    def _check_class(self, node: ComposedNode, *_: object) -> None:
        class_of(node, self._stored_paths.get(id(node), ""))

    def _sharded(self, live: Any, node: Node, path: str) -> None:
        """Match a tensor that lies, or lay, on several ranks with the stored one, here or on any rank.

        Nothing can be made in its place, so every difference is a mismatch.
        """
        if not isinstance(node, (ArrayNode, ShardedNode)) or not isinstance(live, (torch.Tensor, FlatShard)):
            self._differs(live, node, path)
            return
        children = node.boxes if isinstance(node, ShardedNode) else (node,)
        stored = [self._tensors[child.index] for child in children]
        shape = node.shape if isinstance(node, ShardedNode) else stored[0].shape
        if tuple(live.shape) != shape:
            self._mismatched.append(f"{path} (the shape {tuple(live.shape)} here, {shape} in the checkpoint)")
            return
        views = box_views(live, path)
        self._made[id(node)] = live
        if isinstance(node, ShardedNode) and [(box.offsets, box.sizes) for box, _ in views] == [
            (offsets, entry.shape) for offsets, entry in zip(node.offsets, stored, strict=True)
        ]:
            troubles = (difference(entry, view, self._dtype) for entry, (_, view) in zip(stored, views, strict=True))
            if trouble := next(filter(None, troubles), ""):
                self._mismatched.append(f"{path} ({trouble})")
                return
            with apart():
                for child, (_, view) in zip(children, views, strict=True):
                    self._whole[node.mesh, view.data_ptr(), view.nbytes] = path
                    self._filling.add(path, child.index, view, strict=True)
            return
        if trouble := next(filter(None, (memory_trouble(view) for _, view in views)), ""):
            self._mismatched.append(f"{path} ({trouble})")
            return
        self._elsewhere.update(child.index for child in children)
        if isinstance(node, ArrayNode):
            self._plain_made[node.index] = live
        stored_path = self._stored_paths[id(node)]
        mesh = node.mesh if isinstance(node, ShardedNode) else None
        for box, view in views:
            wrapper = live if isinstance(live, torch.Tensor) else view
            self._resharded.append(Wanted(path, stored_path, mesh, shape, box, view.detach(), wrapper))

    def _fits(self, live: Any, node: Node) -> bool:
        """Whether a live tensor has the shape and dtype of a stored one."""
        if isinstance(node, ShardedNode):
            return tuple(live.shape) == node.shape and dtypes.TORCH_NAMES.get(live.dtype) == node.dtype
        if is_sharded(live):
            return isinstance(node, ArrayNode) and tuple(live.shape) == self._tensors[node.index].shape
        return isinstance(node, ArrayNode) and not difference(self._tensors[node.index], live, self._dtype)

    def _plain(self, live: Any, node: Node, path: str, replace: _Replace | None) -> None:
        self._matched += 1
        if _REFILLED.get(type(live)) is type(node):  # other holders of this container see the new content, too
            self._rebuild_later(node, partial(_refill, live))
        elif replace is not None:
            self._rebuild_later(node, replace)
        elif has_parts(node):
            self._differs(live, node, path)
        elif not _savable(live, node):
            self._mismatched.append(f"{path} (another value, in a container that cannot change; use a dict or a list)")

    def _rebuild_later(self, node: Node, put: _Replace) -> None:
        """Call ``put`` with the stored value later. Raises CorruptStoreError now if ``node`` describes no value."""
        rebuild(node, lambda index: index, pickled=self._unpickle, composed=self._check_class)
        self._make_sharded(node)
        self._wanted.update(arrays(node))
        self._actions.append(lambda: put(self._rebuild(node)))

    def _unpickle(self, node: PickledNode) -> Any:
        """Unpickle before anything changes: failures come here. Raises UnsupportedStateError."""
        if id(node) not in self._unpickled:
            path = self._stored_paths.get(id(node), "")
            value = unpickle(node, path) if self._allow_pickle else refuse_pickled(node, path)
            self._unpickled[id(node)] = path, value
        return self._unpickled[id(node)][1]

    def _make_sharded(self, node: Node) -> None:
        """Make the plain tensors that all ranks had alike. Others are a mismatch: there is no live tensor."""
        for each in nodes.walk(node):
            if isinstance(each, ShardedNode) and id(each) not in self._made:
                path = self._stored_paths[id(each)]
                if each.plain:
                    self._sharded(torch.empty(each.shape, dtype=dtypes.torch_dtype(each.dtype)), each, path)
                    continue
                self._mismatched.append(f"{path} (lies on several ranks in the checkpoint: put a DTensor there)")

    # -- objects that load themselves

    def _stateful(self, live: Any, node: Node, path: str) -> None:
        child = node.child if isinstance(node, StatefulNode) else node
        actions, load, inference = self._actions, live.load_state_dict, False
        if node is None:  # saved before there was an object
            self._differs(live, node, path)
            return
        if isinstance(live, torch.nn.Module):
            child, own = self._module(live, child, path)
            tensors = [value for value in own.values() if isinstance(value, torch.Tensor) and not is_lazy(value)]
            inference = any(tensor.is_inference() for tensor in tensors)
            if not self._strict:
                load = partial(_load_into, live, own)
        elif isinstance(live, torch.optim.Optimizer):
            child = self._optimizer(live, child, path)
            load = partial(objects.load, live, dtype=self._dtype)
            self._filled += chain.from_iterable(group["params"] for group in live.param_groups)
            self._matched += 1
        elif isinstance(live, RNGState) and not self._restores_generators:
            self._matched += 1
            return
        else:
            self._matched += 1
            if isinstance(live, RNGState):
                actions = self._last_actions
            with naming_owner("state_dict", path, live):
                own = live.state_dict()
            self._pair(own, child, path)
            modules = (part for part in getattr(live, "__dict__", {}).values() if isinstance(part, torch.nn.Module))
            self._maybe_filled += chain.from_iterable(module.parameters() for module in modules)
        # Raises before anything changed if it describes no value; the object raises for one that it refuses.
        stored = rebuild(child, lambda index: index, pickled=self._unpickle, composed=self._check_class)
        if can_check(live):
            self._check(live, stored, path)
        self._make_sharded(child)
        self._wanted.update(arrays(child))
        if isinstance(node, StatefulNode):
            self._objects[id(node)] = live

        def action() -> None:
            state = self._rebuild(child)
            changes = inference or self._filling.inference(arrays(child))
            mode = torch.inference_mode() if changes else nullcontext()
            mixture = "; the state may now be a mixture of what it was and of the checkpoint"
            with mode, naming_owner("load_state_dict", path, live, mixture):
                load(state)

        actions.append(action)

    def _module(self, live: torch.nn.Module, node: Node, path: str) -> tuple[Node, Mapping[Any, Any]]:
        """Compare a module; return the stored state to load, and the module's own state."""
        if not isinstance(node, MappingNode):
            self._differs(live, node, path)
            return node, {}
        with naming_owner("state_dict", path, live):
            own = objects.live_state(live)
        node = _with_tied(own, node)
        own_loading, missing = objects.own_loading(live), len(self._missing)
        common = self._common(own, node, path, own_loading.all if self._strict else ())
        for key, value, child, below in common:
            is_extra = str(key).rpartition(".")[2] == _EXTRA_STATE  # of any type and size; the module decides
            if is_extra or not (isinstance(value, torch.Tensor) or isinstance(child, (ArrayNode, ShardedNode))):
                self._pair(value, child, below)  # the latter: added by a state_dict() of its own
            elif not self._decides(own_loading, str(key), value, child):
                compare = self._array if isinstance(value, (torch.Tensor, np.ndarray)) else self._differs
                compare(value, child, below)
        self._matched += len(common)
        if own and not common and len(self._missing) > missing:
            self._disjoint.append(path)
        keys = {key for key, *_ in common}
        untouched = {id(own[key]) for key in own if key not in keys}.difference(id(own[key]) for key in keys)
        self._filled += (each for each in live.parameters() if id(each) not in untouched)
        kept = [
            index
            for index, (key, name, _) in enumerate(entries(node))
            if key in keys or (self._strict and paths.child(path, name) not in self._added)
        ]
        if len(kept) == len(node.values):
            return node, own
        return structs.replace(node, keys=[node.keys[i] for i in kept], values=[node.values[i] for i in kept]), own

    def _decides(self, own_loading: objects.OwnLoading, key: str, value: Any, node: Node) -> bool:
        """Return whether a module gets a stored array in new memory: a user's hook may move or change live values."""
        if not key.startswith(own_loading.all) or is_lazy(value):
            return False
        live = isinstance(value, (torch.Tensor, np.ndarray))
        if live and self._fits(value, node):
            return key.startswith(own_loading.users)
        return self._strict

    def _optimizer(self, live: torch.optim.Optimizer, node: Node, path: str) -> Node:
        """Compare an optimizer; return the stored state to load."""
        if not isinstance(node, MappingNode):
            self._differs(live, node, path)
            return node
        with naming_owner("state_dict", path, live):
            own = live.state_dict()
        node, differences = objects.renumbered(live, own, node, lambda: self._names, path)
        differences += objects.differences(live, own, node, self._tensors, path)
        self._mismatched += differences
        if not differences:
            for _, value, parameter in objects.like_parameters(live, own, node):
                if isinstance(value, ArrayNode):
                    self._filling.prefer(value.index, parameter.device)
        self._pair(own, node, path)
        if not differences:
            for where, value, parameter in objects.like_parameters(live, own, node):
                plain = isinstance(value, ArrayNode)
                if id(value) not in self._made and (not plain or is_sharded(parameter)):
                    dtype = self._tensors[value.index].dtype if isinstance(value, ArrayNode) else value.dtype
                    made = torch.empty_like(parameter, dtype=dtypes.torch_dtype(dtype))
                    self._sharded(made, value, f"{path}.state.{where}")
        return node

    def _pair(self, live: Any, node: Node, path: str) -> None:
        """Reuse live arrays wherever the stored tree has an equal array in the same place."""
        if isinstance(live, _LIVE_ARRAYS):
            self._array(live, node, path, strict=False)
        elif isinstance(node, StatefulNode):
            if is_stateful(live):
                self._stateful(live, node, path)
            else:
                self._pair(live, node.child, path)
        else:
            for value, child, below in _beside(live, node, path):
                if value is not _NOWHERE:
                    self._pair(value, child, below)

    def _check(self, live: Any, stored: Any, path: str) -> None:
        try:
            with naming_owner("check_state_dict", path, live):
                live.check_state_dict(stored)
        except ValueError as error:
            self._refused.append(path)
            self._mismatched.append(f"{path} ({error})")

    # -- for both

    def _common(
        self, live: Mapping[Any, Any], node: MappingNode, path: str, ignored: tuple[str, ...] = ()
    ) -> list[tuple[Any, Any, Node, str]]:
        """Return key, live value, stored value and path of each key that both have.

        Keys that only one has are added to the missing or unexpected, but for those with a prefix in ``ignored``.
        """
        stored = {key: (name, child) for key, name, child in entries(node)}
        keys = list(live)
        common = []
        for key, name in zip(keys, paths.components(keys), strict=True):
            below = paths.child(path, name)
            if key in stored:
                common.append((key, live[key], stored.pop(key)[1], below))
            elif not str(key).startswith(ignored):
                self._missing.append(below)
        unread = [pair for key, pair in stored.items() if not str(key).startswith(ignored)]
        unexpected = (paths.child(path, name) for name, _ in unread)
        self._unexpected += [each for each in unexpected if each not in self._added]
        self._unread += sum(count(child) for _, child in unread)
        return common

    def _rebuild(self, node: Node) -> Any:
        return rebuild(
            node,
            self._stored_array,
            self._stored_object,
            self._stored_sharded,
            self._unpickle,
            self._stored_composed,
        )

    def _stored_array(self, index: int) -> Array:
        if index in self._plain_made:
            made: Array = self._plain_made[index]
            return made
        with apart():
            return self._filling.value(index)

    def _stored_object(self, node: StatefulNode) -> Any:
        return self._objects[id(node)] if id(node) in self._objects else self._rebuild(node.child)

    def _stored_sharded(self, node: ShardedNode) -> Any:
        return self._made[id(node)]

    def _differs(self, live: Any, node: Node, path: str) -> None:
        if isinstance(node, ArrayNode):
            entry = self._tensors[node.index]
            stored = f"{'an array' if entry.kind == 'ndarray' else 'a tensor'} {describe(entry)}"
        else:
            stored = f"a {type(node).__name__.removesuffix('Node')}"
        self._mismatched.append(f"{path} (a {type(live).__qualname__} here, {stored} in the checkpoint)")


def _with_tied(own: Mapping[Any, Any], node: MappingNode) -> MappingNode:
    """Return the stored state with the names that it lacks and that are the same tensors here as others that it has.

    Hugging Face's files hold a tied parameter under one of its names.
    """
    stored = dict(zip(mapping_keys(node), node.values, strict=True))
    plain = (torch.Tensor, torch.nn.Parameter)
    tensors = {key: value for key, value in own.items() if type(value) in plain and not is_lazy(value)}
    if tensors.keys() <= stored.keys():
        return node
    views = {key: (t.device, t.data_ptr(), t.dtype, t.shape, t.stride()) for key, t in tensors.items() if t.data_ptr()}
    names = {view: key for key, view in views.items() if key in stored}
    tied = {key: stored[names[view]] for key, view in views.items() if key not in stored and view in names}
    return structs.replace(node, keys=[*node.keys, *tied], values=[*node.values, *tied.values()])


def _load_into(live: torch.nn.Module, own: Mapping[Any, Any], stored: Mapping[Any, Any]) -> None:
    """Load the module's own state with the stored values in it: ``load_state_dict`` may require a complete state."""
    whole = OrderedDict((key, stored.get(key, value)) for key, value in own.items())
    metadata = {**getattr(own, "_metadata", {}), **getattr(stored, "_metadata", {})}
    if metadata:
        whole._metadata = metadata  # type: ignore[attr-defined]
    live.load_state_dict(whole)


# -- plain values: without arrays and objects


def _without_place(live: Any, node: Node, path: str) -> Iterator[str]:
    """Yield the paths of stored objects for which a live plain value has no entry, not even a None."""
    if isinstance(node, StatefulNode):
        if live is _NOWHERE:
            yield path
    elif has_parts(node):
        for value, child, below in _beside(live, node, path):
            yield from _without_place(value, child, below)


def _beside(live: Any, node: Node, path: str) -> Iterator[tuple[Any, Node, str]]:
    """Yield each entry of a stored container as live value (``_NOWHERE`` if there is none), node and path."""
    there: Mapping[Any, Any] = {}
    if isinstance(node, MappingNode):
        there = live if isinstance(live, Mapping) else {}
    elif isinstance(live, (list, tuple)):
        there = dict(enumerate(live))
    for key, name, child in entries(node):
        yield there.get(key, _NOWHERE), child, paths.child(path, name)


def _has_live_parts(live: Any) -> bool:
    """Return whether there is an array or an object in a live tree."""
    waiting, seen = [live], set()
    while waiting:
        live = waiting.pop()
        if isinstance(live, _LIVE_ARRAYS) or is_stateful(live):
            return True
        if isinstance(live, (Mapping, list, tuple)) and id(live) not in seen:
            seen.add(id(live))
            waiting.extend(live.values() if isinstance(live, Mapping) else live)
    return False


def _savable(live: Any, node: Node | object = _NOWHERE) -> bool:
    """Return whether a live value could be saved as it is, and, if ``node`` is given, bit for bit as that."""
    try:
        skeleton = flatten({"value": live}).skeleton
    except UnsupportedStateError:
        return False
    assert isinstance(skeleton, DictNode)
    return node is _NOWHERE or msgspec.msgpack.encode(skeleton.values[0]) == msgspec.msgpack.encode(node)


def _refill(live: Any, value: Any) -> None:
    """Give a live container the content of another one of its type."""
    if isinstance(live, list):
        live[:] = value
        return
    live.clear()
    live.update(value)
    if hasattr(value, "_metadata"):
        live._metadata = value._metadata
