"""The two ways to make targets for a restore: new memory for ``load``, the live objects for ``engine.restore``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import structs
from torch.nn.parameter import is_lazy

from pccheck_async.errors import StateMismatchError
from pccheck_async.format.manifest import Manifest
from pccheck_async.format.skeleton import (
    ArrayNode,
    DictNode,
    ListNode,
    MappingNode,
    Node,
    StatefulNode,
    TupleNode,
    arrays,
)
from pccheck_async.state import paths
from pccheck_async.state.ambient import apart, refuse_tracing
from pccheck_async.state.restore import optimizers
from pccheck_async.state.restore.allocation import Allocation
from pccheck_async.state.restore.filling import Filling, describe, difference
from pccheck_async.state.restore.modules import Deciders, deciders, live_state
from pccheck_async.state.restore.numbering import Names, names_in, renumbered
from pccheck_async.state.restore.plain import (
    MAPPINGS,
    REFILLED,
    SEQUENCES,
    equal,
    has_parts,
    homeless,
    live_parts,
    refill,
    savable,
)
from pccheck_async.state.restore.rebuild import mapping_keys, rebuild
from pccheck_async.state.restore.select import select
from pccheck_async.state.restore.walk import count
from pccheck_async.state.rng import RNGState
from pccheck_async.state.save.detached import refuse_filling
from pccheck_async.state.save.flatten import Array, check_outermost, is_stateful, noting
from pccheck_async.state.targets import Restoration, Target, Targets

__all__ = ["Restoration", "Target", "Targets", "allocate", "match"]

_Replace = Callable[[Any], None]
_EXTRA_STATE = "_extra_state"  # what nn.Module saves get_extra_state() under


def allocate(manifest: Manifest, keys: Sequence[str] | None = None, device: str | torch.device = "cpu") -> Restoration:
    """Prepare a restore into new memory.

    Args:
        manifest: What is stored.
        keys: Paths or globs of the leaves and subtrees to load; None for all. Only their bytes are read.
        device: Where tensors go at the end; numpy arrays stay on the host.

    Returns:
        A restoration whose ``finish`` gives the nested dict, Statefuls as what their ``state_dict()`` was.

    Raises:
        StateMismatchError: One of ``keys`` selects nothing.
        CorruptStoreError: The skeleton describes no value.
        RuntimeError: There is no such device; raised by torch.
    """
    torch.empty(0, device=device)  # or it would be the checkpoint of which no array can be made
    skeleton = manifest.skeleton if keys is None else select(manifest.skeleton, keys)
    allocation = Allocation(manifest, sorted(arrays(skeleton)))
    where = torch.device(device)
    return Restoration(
        Targets(allocation.targets()), lambda: rebuild(skeleton, lambda index: allocation.array(index, where))
    )


def match(
    state: Mapping[str, Any],
    manifest: Manifest,
    by_address: Callable[[], bool] = lambda: False,
    *,
    strict: bool = True,
) -> Restoration:
    """Prepare a restore into the live ``state``. Checks it first and changes nothing.

    Tensors and arrays keep their identity and take the stored bytes, in place where they lie in host memory (or in that
    of a CUDA device, where ``by_address``) as they were stored. A live plain value (no tensor, array or object in it)
    is a placeholder for whatever was saved: lists, dicts and sets are refilled where their like was saved, anything
    else is replaced in the container that holds it. An object that was saved somewhere inside wants its place there: an
    object, or a plain value that takes its state. In place of a live tensor or array, a container that holds it takes a
    saved None, and no other plain value.

    Modules compare strictly, except for their extra state; then ``load_state_dict`` gets their own parameters. What
    lies below a module with hooks before ``load_state_dict``, or with one or a ``_load_from_state_dict`` of its own, is
    not compared: it decides whether that fits, and raises after other things changed where it does not. Optimizers may
    not have a state yet; parameters are told by the names that were saved, else by their numbers. Any other Stateful
    gets its own tensors where they are equal in dtype and shape, and new ones elsewhere.

    Two live arrays that share memory which the stored ones do not share differ from the checkpoint: one would overwrite
    the other.

    Args:
        state: The live state.
        manifest: What is stored.
        by_address: Asked when there is a CUDA tensor: whether the copy backend reaches its memory.
        strict: Otherwise what only the state has stays as it is, what only the checkpoint has is not read, and the
            restoration names both. A module then loads its own state, with what was stored in the places of that. Any
            other Stateful gets what it saved, as ever. Where they have nothing in common, altogether or below an
            outermost name or a module that both have, or differ by what a wrapper of models puts before names, that is
            a difference all the same.

    Returns:
        A restoration whose ``finish`` copies what could not be filled in place, calls every ``load_state_dict`` and
        returns ``state``.

    Raises:
        UnsupportedStateError: ``state`` is not a mapping with strings for keys, or has the ``state_dict()`` of a live
            object in the object's place; or called where tensors are traced.
        StateMismatchError: The state differs; lists the paths.
        CorruptStoreError: The skeleton describes no value.
    """
    refuse_tracing("restore")
    check_outermost(state)
    refuse_filling(state)
    matching = _Matching(manifest, by_address, strict, cache(lambda: names_in(state)))
    skeleton = manifest.skeleton
    assert isinstance(skeleton, DictNode)
    matching.outermost(state, skeleton)
    return matching.restoration(state)


class _Matching:
    """One walk over the live state and the skeleton side by side."""

    def __init__(
        self, manifest: Manifest, by_address: Callable[[], bool], strict: bool, names: Callable[[], Names]
    ) -> None:
        self._manifest = manifest
        self._strict = strict
        self._names = names
        self._filling = Filling(manifest, by_address)
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._mismatched: list[str] = []
        self._strangers: list[str] = []  # both have them, and nothing in common below
        self._matched = 0  # places in the state that take something
        self._unread = 0  # leaves of the checkpoint that the state lacks
        self._counts: dict[str, tuple[int, int]] = {}
        self._wanted: set[int] = set()  # arrays that something is rebuilt from
        self._actions: list[Callable[[], None]] = []
        self._last_actions: list[Callable[[], None]] = []  # generators: what loads before them may draw from them
        self._objects: dict[int, Any] = {}  # live Statefuls by the identity of their node

    def restoration(self, state: Mapping[str, Any]) -> Restoration:
        self._mismatched += self._filling.conflicts()
        if self._mismatched or (self._strict and (self._missing or self._unexpected)):
            raise self._error()
        if self._strangers or (self._missing and (not self._matched or _wrapped(self._missing, self._unexpected))):
            raise self._error()  # restored so, it would be taken for what was saved
        with apart():
            self._filling.allocate(self._wanted)
            targets = Targets(self._filling.targets())

        def finish() -> Mapping[str, Any]:
            with apart():
                self._filling.finish()
            with _outside_inference():  # what is made new can be trained, whatever mode the caller is in
                for action in self._actions + self._last_actions:
                    action()
            return state

        differ = tuple(self._missing), tuple(self._unexpected)
        return Restoration(targets, finish, *differ, filled=self._filling.paths, counts=self._counts)

    def _error(self) -> StateMismatchError:
        make = partial(
            StateMismatchError, missing=self._missing, unexpected=self._unexpected, mismatched=self._mismatched
        )
        skeleton = self._manifest.skeleton
        assert isinstance(skeleton, DictNode)
        advice = _wrapped(self._missing, self._unexpected)
        if not self._mismatched and not advice:
            if self._strangers:
                advice = (
                    f"; nothing in common below {', '.join(self._strangers)}: leave that out of the state, or take "
                    "load(path, keys=[...]), change its names, and give it to load_state_dict"
                )
            elif self._strict:
                advice = "; to restore what both have: restore(state, strict=False)"
            else:
                advice = "; they have nothing in common"
        if not set(paths.components(mapping_keys(skeleton))).isdisjoint(self._unexpected):
            advice += "; to take only part of it: load(path, keys=[...])"
        return make(f"{make()}{advice}")

    def outermost(self, state: Mapping[str, Any], node: DictNode) -> None:
        setter = state.__setitem__ if isinstance(state, MutableMapping) else None
        for key, value, child, path in self._common(state, node, ""):
            matched, missing, unread = self._matched, len(self._missing), self._unread
            self.value(value, child, path, None if setter is None else _setter(setter, key))
            if self._matched == matched and len(self._missing) > missing and path not in self._strangers:
                self._strangers.append(path)
            leaves = count(child)
            self._counts[path] = leaves - (self._unread - unread), leaves

    # -- values that are filled or replaced where they are

    def value(self, live: Any, node: Node, path: str, replace: _Replace | None, *, of_object: bool = False) -> None:
        """Let a live value take what is stored; ``of_object``: as what the ``state_dict()`` of an object gave."""
        if isinstance(live, (torch.Tensor, np.ndarray)):
            if node is None and replace is not None:
                self._replace(node, replace)
            else:
                self._array(live, node, path)
        elif is_stateful(live):
            self._stateful(live, node, path)
        elif isinstance(node, StatefulNode) and (live_parts(live) or savable(live)):
            self.value(live, node.child, path, replace, of_object=True)  # restored into its state
        elif not live_parts(live) and (not has_parts(node) or savable(live)):
            if not of_object:
                self._homeless(live, node, path)
            self._plain(live, node, path, replace)
        elif type(live) in MAPPINGS and type(node) is MAPPINGS[type(live)]:
            self.entries(live, node, path, live.__setitem__)  # type: ignore[arg-type]
        elif type(live) in SEQUENCES and type(node) is SEQUENCES[type(live)]:
            self._items(live, node.items, path)  # type: ignore[union-attr]
        else:
            self._differs(path, live, node)

    def entries(self, live: Mapping[Any, Any], node: MappingNode, path: str, replace: Any) -> None:
        for key, value, child, below in self._common(live, node, path):
            self.value(value, child, below, None if replace is None else _setter(replace, key))

    def _items(self, live: Sequence[Any], nodes: Sequence[Node], path: str) -> None:
        if len(live) != len(nodes):
            self._mismatched.append(f"{path} ({len(live)} items here, {len(nodes)} in the checkpoint)")
            return
        for index, (value, child) in enumerate(zip(live, nodes, strict=True)):
            replace = _setter(live.__setitem__, index) if isinstance(live, list) else None
            self.value(value, child, paths.child(path, str(index)), replace)

    def _array(self, live: torch.Tensor | np.ndarray[Any, Any], node: Node, path: str, *, strict: bool = True) -> None:
        self._matched += 1
        if not isinstance(node, ArrayNode):
            if strict:
                self._differs(path, live, node)
            return
        trouble = difference(self._manifest.tensors[node.index], live)
        if not trouble:
            with apart():
                self._filling.add(path, node.index, live, strict=strict)
        elif strict:
            self._mismatched.append(f"{path} ({trouble})")

    def _plain(self, live: Any, node: Node, path: str, replace: _Replace | None) -> None:
        self._matched += 1
        if REFILLED.get(type(live)) is type(node):
            self._refill(live, node)
        elif replace is not None:
            self._replace(node, replace)
        elif has_parts(node):
            self._differs(path, live, node)
        elif not equal(live, node):
            self._mismatched.append(f"{path} (another value, in a container that cannot change; use a dict or a list)")

    def _homeless(self, live: Any, node: Node, path: str) -> None:
        """Objects do not come back as something else, unless a value in their very place takes that."""
        for lost in homeless(live, node, path):
            self._mismatched.append(f"{lost} (an object in the checkpoint: put one there, or None for its state)")

    def _replace(self, node: Node, replace: _Replace) -> None:
        """Put a new value where the live one is."""
        self._matched += 1
        self._checked(node)
        self._wanted.update(arrays(node))
        self._actions.append(lambda: replace(self._rebuild(node)))

    def _refill(self, live: Any, node: Node) -> None:
        """Give a live container the stored content, so that whoever else holds it sees it, too."""
        self._checked(node)
        self._wanted.update(arrays(node))
        self._actions.append(lambda: refill(live, self._rebuild(node)))

    # -- objects that load themselves

    def _stateful(self, live: Any, node: Node, path: str) -> None:
        child = node.child if isinstance(node, StatefulNode) else node
        actions, load, inference = self._actions, live.load_state_dict, False
        if node is None:  # saved before there was one: no object's state
            self._differs(path, live, node)
            return
        if isinstance(live, torch.nn.Module):
            child, own = self._module(live, child, path)
            tensors = [value for value in own.values() if isinstance(value, torch.Tensor) and not is_lazy(value)]
            inference = any(tensor.is_inference() for tensor in tensors)
            if not self._strict:
                load = partial(_load_into, live, own)
        elif isinstance(live, torch.optim.Optimizer):
            child = self._optimizer(live, child, path)
            load = partial(optimizers.load, live)
            self._matched += 1
        else:
            self._matched += 1
            if isinstance(live, RNGState):
                self._generators(live, child, path)
                actions = self._last_actions
            with noting("state_dict", path, live):
                own = live.state_dict()
            self._pair(own, child, path)
        self._checked(child)
        self._wanted.update(arrays(child))
        if isinstance(node, StatefulNode):
            self._objects[id(node)] = live

        def action() -> None:
            state = self._rebuild(child)
            changes = inference or self._filling.inference(arrays(child))
            inside = torch.inference_mode() if changes else nullcontext()
            mixture = "; the state may now be a mixture of what it was and of the checkpoint"
            with inside, noting("load_state_dict", path, live, mixture):
                load(state)

        actions.append(action)

    def _module(self, live: torch.nn.Module, node: Node, path: str) -> tuple[Node, Mapping[Any, Any]]:
        """Returns what there is to load, and the module's own state."""
        if not isinstance(node, MappingNode):
            self._differs(path, live, node)
            return node, {}
        with noting("state_dict", path, live):
            own = live_state(live)
        deciding, missing = deciders(live), len(self._missing)
        common = self._common(own, node, path, deciding.all if self._strict else ())
        for key, value, child, below in common:
            if str(key).rpartition(".")[2] == _EXTRA_STATE:
                self._pair(value, child, below)  # of any type and size; the module decides
            elif isinstance(value, torch.Tensor) or isinstance(child, ArrayNode):
                if not self._left_to(deciding, str(key), value, child):
                    self._array_of_module(value, child, below)
            else:
                self._pair(value, child, below)  # what a state_dict() of its own adds
        self._matched += len(common)
        if own and not common and len(self._missing) > missing:
            self._strangers.append(path)
        if self._strict or len(common) == len(node.values):
            return node, own
        keys = {key for key, *_ in common}
        kept = [index for index, key in enumerate(mapping_keys(node)) if key in keys]
        return structs.replace(node, keys=[node.keys[i] for i in kept], values=[node.values[i] for i in kept]), own

    def _left_to(self, deciding: Deciders, key: str, value: Any, node: Node) -> bool:
        """Whether a module gets a stored array in new memory, and decides what becomes of it.

        A hook of a user's that moves or changes what it finds would find what it has filled already, if that were live.
        """
        if not key.startswith(deciding.all) or is_lazy(value):
            return False
        live = isinstance(value, (torch.Tensor, np.ndarray))
        if live and isinstance(node, ArrayNode) and not difference(self._manifest.tensors[node.index], value):
            return key.startswith(deciding.users)
        return self._strict

    def _array_of_module(self, value: Any, node: Node, path: str) -> None:
        if isinstance(value, (torch.Tensor, np.ndarray)):
            self._array(value, node, path)
        else:
            self._differs(path, value, node)

    def _optimizer(self, live: torch.optim.Optimizer, node: Node, path: str) -> Node:
        """Returns what there is to load."""
        if not isinstance(node, MappingNode):
            self._differs(path, live, node)
            return node
        with noting("state_dict", path, live):
            own = live.state_dict()
        node, differences = renumbered(live, own, node, self._names, path)
        differences += optimizers.differences(live, own, node, self._manifest.tensors, path)
        self._mismatched += differences
        if not differences:
            for index, device in optimizers.places(live, own, node):
                self._filling.prefer(index, device)
        self._pair(own, node, path)
        return node

    def _pair(self, live: Any, node: Node, path: str) -> None:
        """Reuse live arrays wherever the stored tree has an equal one in the same place."""
        if isinstance(live, (torch.Tensor, np.ndarray)):
            self._array(live, node, path, strict=False)
        elif isinstance(node, StatefulNode):
            if is_stateful(live):
                self._stateful(live, node, path)
            else:
                self._pair(live, node.child, path)
        elif isinstance(live, Mapping) and isinstance(node, MappingNode):
            for key, name, child in _named(node):
                if key in live:
                    self._pair(live[key], child, paths.child(path, name))
        elif isinstance(live, (list, tuple)) and isinstance(node, (ListNode, TupleNode)):
            for index, (value, child) in enumerate(zip(live, node.items, strict=False)):
                self._pair(value, child, paths.child(path, str(index)))

    def _generators(self, live: RNGState, node: Node, path: str) -> None:
        if not isinstance(node, MappingNode):
            self._differs(path, live, node)
            return
        for key, _, child in _named(node):
            if key == "cuda":
                trouble = live.mismatch(len(child.items) if isinstance(child, ListNode) else None)
                if trouble:
                    self._mismatched.append(f"{path}.{trouble}")

    # -- what both need

    def _common(
        self, live: Mapping[Any, Any], node: MappingNode, path: str, decided: tuple[str, ...] = ()
    ) -> list[tuple[Any, Any, Node, str]]:
        """Key, live value, stored value and path of what both have; notes what only one has, unless that is decided.

        What begins so is left to a module's own way of loading.
        """
        stored = {key: (name, child) for key, name, child in _named(node)}
        keys = list(live)
        common = []
        for key, name in zip(keys, paths.components(keys), strict=True):
            below = paths.child(path, name)
            if key in stored:
                common.append((key, live[key], stored.pop(key)[1], below))
            elif not str(key).startswith(decided):
                self._missing.append(below)
        unread = [pair for key, pair in stored.items() if not str(key).startswith(decided)]
        self._unexpected += [paths.child(path, name) for name, _ in unread]
        self._unread += sum(count(child) for _, child in unread)
        return common

    def _checked(self, node: Node) -> None:
        """Fail before anything changed where ``node`` describes no value."""
        rebuild(node, lambda index: index)

    def _rebuild(self, node: Node) -> Any:
        return rebuild(node, self._value, self._object)

    def _value(self, index: int) -> Array:
        with apart():
            return self._filling.value(index)

    def _object(self, node: StatefulNode) -> Any:
        return self._objects[id(node)] if id(node) in self._objects else self._rebuild(node.child)

    def _differs(self, path: str, live: Any, node: Node) -> None:
        if isinstance(node, ArrayNode):
            entry = self._manifest.tensors[node.index]
            stored = f"{'an array' if entry.kind == 'ndarray' else 'a tensor'} {describe(entry)}"
        else:
            stored = f"a {_type_name(node)}"
        self._mismatched.append(f"{path} (a {type(live).__qualname__} here, {stored} in the checkpoint)")


@contextmanager
def _outside_inference() -> Iterator[None]:
    gradients = torch.is_grad_enabled()  # inference_mode(False) would switch them on
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        yield


def _wrapped(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """What to do where names differ by what a wrapper of models puts before them."""
    for attribute, wrapper in (("module", "DistributedDataParallel or its like"), ("_orig_mod", "torch.compile")):
        prefix = paths.escape(f"{attribute}.")
        for where, wrapped, plain in (("here", missing, unexpected), ("in the checkpoint", unexpected, missing)):
            if not {path.replace(prefix, "", 1) for path in wrapped if prefix in path}.isdisjoint(plain):
                inside = f"save and restore the module inside (model.{attribute})"
                return f"; a model {where} is wrapped by {wrapper}: {inside}"
    return ""


def _load_into(live: torch.nn.Module, own: Mapping[Any, Any], stored: Mapping[Any, Any]) -> None:
    """Load the module's own state with what is stored of it: so it is whole, whatever ``load_state_dict`` asks for."""
    whole = OrderedDict((key, stored.get(key, value)) for key, value in own.items())
    metadata = {**getattr(own, "_metadata", {}), **getattr(stored, "_metadata", {})}
    if metadata:
        whole._metadata = metadata  # type: ignore[attr-defined]
    live.load_state_dict(whole)


def _setter(replace: Callable[[Any, Any], None], key: Any) -> _Replace:
    return lambda value: replace(key, value)


def _named(node: MappingNode) -> list[tuple[Hashable, str, Node]]:
    keys = mapping_keys(node)
    return list(zip(keys, paths.components(keys), node.values, strict=True))


def _type_name(node: Node) -> str:
    if isinstance(node, msgspec.Struct):
        return type(node).__name__.removesuffix("Node")
    return type(node).__name__
