# SPDX-License-Identifier: Apache-2.0
"""Comparing a live state with a stored one, and planning what a restore does with each part. Neither is changed.

The live state is flattened into a tree like the stored one (:func:`.live.live_tree`); one walk visits both.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, repeat
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import structs
from torch.nn.parameter import is_lazy

from pccheck_async.errors import CheckpointError, StateMismatchError
from pccheck_async.format import Action, dtypes
from pccheck_async.format import skeleton as nodes
from pccheck_async.format.manifest import Manifest, TensorEntry
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
)
from pccheck_async.state import paths, values
from pccheck_async.state.boxes import FlatShard, is_sharded
from pccheck_async.state.foreign import class_of, is_composed, refuse_pickled, unpickle
from pccheck_async.state.leaves import KINDS
from pccheck_async.state.restore import adapt
from pccheck_async.state.restore.arrays import describe, difference
from pccheck_async.state.restore.live import Live, LiveTree, Opaque
from pccheck_async.state.restore.tree import (
    count,
    entries,
    has_parts,
    mapping_keys,
    opened,
    paired,
    paths_by_node,
    rebuild,
)
from pccheck_async.state.rng import RNGState
from pccheck_async.state.save.flatten import naming_owner, take_apart
from pccheck_async.state.stateful import can_check

_MAPPINGS: Final[Mapping[type, type]] = {dict: DictNode, OrderedDict: nodes.OrderedDictNode, Counter: nodes.CounterNode}
_SEQUENCES: Final[Mapping[type, type]] = {list: ListNode, tuple: nodes.TupleNode}
_REFILLED: Final[Mapping[type, type]] = {**_MAPPINGS, list: ListNode, set: nodes.SetNode}
"""Types of containers that are refilled, and stay the same object; each with its type of node."""
_NOWHERE: Final = object()
_ENCODE: Final = msgspec.msgpack.Encoder().encode
_EXTRA_STATE: Final = "_extra_state"  # the key of the result of nn.Module's get_extra_state()
_TRAINED: Final = (torch.nn.Module, torch.optim.Optimizer)
_WRITERS: Final[Mapping[str, Set[Any]]] = {
    "lightning.PCcheckCallback": {"lr_schedulers", "callbacks", "loops"},
    "lightning.PCcheckIO": {"pytorch-lightning_version", "state_dict"},
    "transformers.PCcheckCallback": {"model", "optimizer", "scheduler", "rng", "trainer"},
    "accelerate.training_state": {"accelerator", "loader", "rng"},
    "torchtitan.CheckpointManager": {"train_state", "dataloader"},
    "dcp.StorageWriter": {"torch.distributed.checkpoint"},
}
"""Sets of outermost names that identify a checkpoint as saved by an integration; by the integration."""
_SPECIAL: Final = frozenset((ComposedNode, PickledNode, ShardedNode))
"""Types of nodes whose values need more than the bytes of one array on this rank."""


class Fill(NamedTuple):
    """A live array that takes the bytes of a stored one; both may consist of boxes on several ranks."""

    path: str
    node: ArrayNode | ShardedNode
    array: Any
    strict: bool = True  # it is filled itself; else another may take its place
    made_on: torch.device | None = None  # the device for a tensor that is yet to be made; ``array`` is meta then
    in_boxes: bool = False  # it lies, or lay, on several ranks


class Put(NamedTuple):
    """A replacement of a plain live value: of the entry ``key`` in ``value``, or without a key of all its content."""

    node: Node
    path: str
    value: Any
    key: Any = _NOWHERE  # in the container ``value``

    def apply(self, stored: Any) -> None:
        """Replace the live value or content by ``stored``."""
        if self.key is not _NOWHERE:
            self.value[self.key] = stored
        elif isinstance(self.value, list):
            self.value[:] = stored
        else:
            self.value.clear()
            self.value.update(stored)
            if hasattr(stored, "_metadata"):
                self.value._metadata = stored._metadata


class Give(NamedTuple):
    """An object (``value``) that is given its stored state by a call of ``load``."""

    node: Node
    path: str
    load: Callable[[Any], Any]
    value: Any
    inference: bool = False  # it changes tensors that change only in inference mode


@dataclass(slots=True, eq=False)
class Diff:
    """The differences, and what a restore does: ``fills``, then ``steps`` and ``last`` in their order.

    Attributes:
        is_special: Whether the checkpoint has values that are composed, pickled, or lie on several ranks.
        missing: Paths that the state has and the checkpoint lacks: they stay as they are.
        unexpected: Paths that the checkpoint has and the state lacks: they are not read.
        mismatched: Paths that both have and that cannot be restored, each with the reason in parentheses.
        refused: Paths of objects that refuse their stored state.
        resized: Paths of arrays whose shape differs.
        castable: Paths of floating-point tensors that only differ in dtype, with the live dtype to cast to.
        renamed: Outermost objects that only the state has, with the name, only in the checkpoint, of a state that fits.
        disjoint: Paths that both have, with nothing in common below.
        counts: For each outermost name that both have: how many of its leaves in the checkpoint are restored, and all.
        matched: How many entries of the state are restored.
        last: Random generators; they are loaded last, since loading other objects may draw from them.
        preferred: Devices for stored arrays that have no live array, by index of the array.
        trained: Live tensors that are restored and may have gradients.
        maybe_trained: Parameters of other objects; they count as ``trained`` if they share memory with such a tensor.
        objects: Live objects by the ``id()`` of their stored node.
        composed: Live composed tensors by the ``id()`` of their stored node.
        unpickled: Path and value of each value that was unpickled so far, by the ``id()`` of its node.
    """

    tree: LiveTree
    manifest: Manifest
    is_special: bool
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)
    castable: dict[str, torch.dtype] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    disjoint: list[str] = field(default_factory=list)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    matched: int = 0
    fills: list[Fill] = field(default_factory=list)
    steps: list[Put | Give] = field(default_factory=list)
    last: list[Give] = field(default_factory=list)
    preferred: dict[int, torch.device] = field(default_factory=dict)
    trained: list[torch.Tensor] = field(default_factory=list)
    maybe_trained: list[torch.Tensor] = field(default_factory=list)
    objects: dict[int, Any] = field(default_factory=dict)
    composed: dict[int, torch.Tensor] = field(default_factory=dict)
    unpickled: dict[int, tuple[str, Any]] = field(default_factory=dict)
    _stored_paths: dict[int, str] = field(default_factory=dict)

    def path_of(self, node: Node) -> str:
        """Return the path of a stored leaf by its node."""
        self._stored_paths = self._stored_paths or paths_by_node(self.manifest.skeleton)
        return self._stored_paths.get(id(node), "")

    def unpickle(self, node: PickledNode) -> Any:
        """Return a pickled value; unpickle it on the first call only. Raises UnsupportedStateError if that fails."""
        if id(node) not in self.unpickled:
            path = self.path_of(node)
            self.unpickled[id(node)] = path, unpickle(node, path)
        return self.unpickled[id(node)][1]

    def error(self, *, strict: bool) -> StateMismatchError | None:
        """Return the error if the state cannot be restored, or if ``strict`` not all of it; else None."""
        if not (self.missing or self.unexpected or self.mismatched or self.disjoint):
            return None
        wrapped = adapt.wrapped(self.missing, self.unexpected)
        empty = [*self.disjoint, *self._unfilled()]
        # If nothing was restored, the state would pass for a restored one.
        nothing = bool(empty or (self.missing and (not self.matched or wrapped)))
        if not (self.mismatched or strict or nothing):
            return None
        causes, advice = [wrapped] if wrapped else [], list[str]()
        if writer := self._writer():
            causes.append(f"it was saved through pccheck_async.integrations.{writer}")
            advice.append("go on through that")
        for here, there in self.renamed.items():
            causes.append(f"'{here}' is missing and '{there}' is unexpected, with equal leaves: was it renamed?")
            advice.append(f'restore it by the name that was saved: restore({{"{there}": ..., ...}})')
        if not writer and (unlike := [path for path in empty if path not in self.renamed and not wrapped]):
            causes.append(f"nothing in common below {', '.join(paths.readable(unlike))}")
            advice.append(
                "leave that out of the state, or take load(path, keys=[...]), change its names, and give it to "
                "load_state_dict"
            )
        elif nothing and not causes:
            causes.append("they have nothing in common")
        if self.resized:
            below = dict.fromkeys(map(paths.first, self.resized))
            causes.append(f"{', '.join(below)} has other sizes here (another width, or number of classes?)")
            advice.append("make it with the sizes that were saved")
        if self.mismatched and len(self.castable) == len(self.mismatched) and len({*self.castable.values()}) == 1:
            causes.append("the dtypes differ")
            advice.append(f"to cast: restore(state, dtype={next(iter(self.castable.values()))})")
        refused = tuple(f"{path}." for path in self.refused)
        apart = not nothing and all(f"{path.partition(' (')[0]}.".startswith(refused) for path in self.mismatched)
        others = [path for path in (*self.missing, *self.unexpected) if not f"{path}.".startswith(refused)]
        if apart and self.mismatched and others:
            causes.append(f"{', '.join(dict.fromkeys(map(paths.first, others)))} has other leaves here (other layers?)")
            advice.append("make it as the saved one was")
            advice.append(
                f"to restore what both have: take {', '.join(self.refused)} out of the state, and call "
                "restore(state, strict=False)"
            )
        elif apart and self.mismatched:
            rest = "take it out of the state, and call restore(state, strict=False)"
            advice.append(f"to restore all but {', '.join(self.refused)}: {rest}")
        elif apart and strict:
            advice.append("to restore what both have: restore(state, strict=False)")
        assert isinstance(self.manifest.skeleton, MappingNode)
        outermost = {*paths.components(mapping_keys(self.manifest.skeleton))} - {*self.renamed.values()}
        if not outermost.isdisjoint(self.unexpected):
            advice.append("to take only part of it: load(path, keys=[...])")
        return StateMismatchError(
            missing=self.missing,
            unexpected=self.unexpected,
            mismatched=self.mismatched,
            cause="; ".join(causes),
            advice="; ".join(advice),
        )

    def _unfilled(self) -> list[str]:
        """Return the paths of modules and optimizers that are missing in the checkpoint altogether."""
        lacking = tuple(f"{path}." for path in self.missing)
        objects = [live for live in self.tree.lives.values() if isinstance(live.value, _TRAINED) and live.state]
        return [live.path for live in objects if f"{live.path}.".startswith(lacking)]

    def _writer(self) -> str:
        """Return the integration that saved the checkpoint; empty if none did, or the live state has its names, too."""
        assert isinstance(self.manifest.skeleton, MappingNode)
        stored, here = {*mapping_keys(self.manifest.skeleton)}, self.tree.state.keys()
        writers = (writer for writer, names in _WRITERS.items() if names <= stored and not names <= here)
        return next(writers, "")

    def actions(self) -> dict[str, Action]:
        """Return for each restored path what is done: ``"fill"``, ``"load"`` or ``"replace"``."""
        actions: dict[str, Action] = {each.path: "fill" for each in self.fills}
        steps = [*self.steps, *self.last]
        return actions | {step.path: "load" if isinstance(step, Give) else "replace" for step in steps}


class Rules(NamedTuple):
    """The arguments of :func:`.bind.match` that determine which differences are allowed."""

    strict: bool = True
    dtype: torch.dtype | None = None
    allow_pickle: bool = False
    generators: bool = True
    added: Collection[str] = ()


def diff(tree: LiveTree, manifest: Manifest, rules: Rules) -> Diff:
    """Return how a live state differs from a stored one, and what a restore does."""
    return _Walk(tree, manifest, rules).outermost()


class _Walk:
    """One walk over a live and a stored tree side by side."""

    def __init__(self, tree: LiveTree, manifest: Manifest, rules: Rules) -> None:
        self._tree = tree
        self._skeleton: Any = manifest.skeleton
        self._tensors = manifest.tensors
        self._rules = rules
        self.found = Diff(tree, manifest, not _SPECIAL.isdisjoint(map(type, nodes.walk(manifest.skeleton))))
        self._unread = 0  # leaves of the checkpoint that the state lacks
        self._names = cache(partial(adapt.names_in, tree.state))
        self._taken: set[int] = set()  # identities of the stored nodes of tensors on several ranks that are filled

    def outermost(self) -> Diff:
        """Compare the values under all outermost names; return the differences found."""
        found, state = self.found, self._tree.state
        container = state if isinstance(state, MutableMapping) else None
        for key, live, node, path in self._common(self._tree.skeleton, self._skeleton, ""):
            matched, missing, unread = found.matched, len(found.missing), self._unread
            self._value(live, node, path, container, key)
            if found.matched == matched and len(found.missing) > missing and path not in found.disjoint:
                found.disjoint.append(path)
            number = count(node)
            found.counts[path] = number - (self._unread - unread), number
        found.renamed = self._renamed()
        return found

    def _renamed(self) -> dict[str, str]:
        """Return outermost objects that only the state has, each with the one name in the checkpoint that fits it."""
        missing, unexpected = {*self.found.missing}, {*self.found.unexpected}
        keys, items = _entries_of(self._tree.skeleton)
        ours = {name: live for name, live in zip(paths.components(keys), items, strict=True) if name in missing}
        theirs = {name: node for _, name, node in entries(self._skeleton) if name in unexpected}
        pairs = [
            (here, there)
            for here, live in ours.items()
            for there, node in theirs.items()
            if type(live) is StatefulNode and self._is_whole(live, node)
        ]
        counts = Counter(chain.from_iterable((("here", here), ("there", there)) for here, there in pairs))
        return {here: there for here, there in pairs if counts["here", here] == counts["there", there] == 1}

    def _is_whole(self, live: StatefulNode, node: Node) -> bool:
        """Return whether a stored state fits an object exactly: nothing is missing, unexpected or mismatched."""
        stored = opened(node)
        if not isinstance(stored, MappingNode):
            return False
        value = self._tree.lives[id(live)].value
        if not isinstance(value, _TRAINED) and {*_entries_of(live.child)[0]} != {*mapping_keys(stored)}:
            return False  # such objects take any state
        alone = _Walk(self._tree, self.found.manifest, self._rules)
        try:
            alone._object(live, node)
        except (CheckpointError, TypeError, ValueError):
            return False
        found = alone.found
        return bool(found.matched) and not (found.missing or found.unexpected or found.mismatched)

    # -- values that are filled in place or replaced

    def _value(
        self, live: Any, node: Any, path: str, container: Any, key: Any = None, *, of_object: bool = False
    ) -> None:
        """Compare a live value with a stored one; ``of_object``: the latter is the ``state_dict()`` of an object.

        ``container`` is the live container in which the live value can be replaced; None if that is immutable.
        """
        found = self.found
        if type(live) is ArrayNode:
            if node is None and container is not None:
                found.matched += 1
                found.steps.append(Put(node, path, container, key))
            else:
                self._array(self._tree.leaves.values[live.index], node, path)
            return
        if type(live) is StatefulNode:
            self._object(live, node)
            return
        known, kind = self._tree.lives.get(id(live)), type(node)
        live_parts = known is not None and known.has_parts
        savable = known is None or known.is_savable
        if isinstance(node, StatefulNode) and (live_parts or savable):
            self._value(live, node.child, path, container, key, of_object=True)  # restored into the object's state
        elif isinstance(node, PickledNode):
            self._plain(live, known, node, path, container, key)
        elif not live_parts and (savable or not has_parts(node)):
            if not of_object:
                what = "an object in the checkpoint: put one there, or None for its state"
                found.mismatched += [f"{lost} ({what})" for lost in _without_place(live, node, path)]
            self._plain(live, known, node, path, container, key)
        elif known is not None and _MAPPINGS.get(type(known.value)) is kind:
            for name, value, child, below in self._common(live, node, path):
                self._value(value, child, below, known.value, name)
        elif known is None or _SEQUENCES.get(type(known.value)) is not kind:
            self._differs(live, node, path)
        elif len(live.items) != len(node.items):
            found.mismatched.append(f"{path} ({len(live.items)} items here, {len(node.items)} in the checkpoint)")
        else:
            within = known.value if isinstance(known.value, list) else None
            for index, (item, child) in enumerate(zip(live.items, node.items, strict=True)):
                self._value(item, child, paths.child(path, str(index)), within, index)

    def _plain(self, live: Any, known: Live | None, node: Node, path: str, container: Any, key: Any) -> None:
        found = self.found
        found.matched += 1
        if known is not None and _REFILLED.get(type(known.value)) is type(node):
            self._give(node)  # other holders of this container see the new content, too
            found.steps.append(Put(node, path, known.value))
        elif container is not None:
            self._give(node)
            found.steps.append(Put(node, path, container, key))
        elif has_parts(node):
            self._differs(live, node, path)
        elif (known is not None and not known.is_savable) or _ENCODE(live) != _ENCODE(node):
            found.mismatched.append(f"{path} (another value, in a container that cannot change; use a dict or a list)")

    def _array(self, live: Any, node: Node, path: str, *, strict: bool = True) -> None:
        found = self.found
        found.matched += 1
        if isinstance(live, torch.Tensor):
            found.trained.append(live)
        if type(node) is ShardedNode or (type(live) not in KINDS and _lies_in_boxes(live)):
            plain = isinstance(node, ShardedNode) and node.plain and type(live) in (np.ndarray, torch.Tensor)
            if strict or not plain or self._fits(live, node):  # else it is made anew
                self._sharded(live, node, path)
        elif isinstance(node, ComposedNode):
            self._fill_parts(live, node, path, strict=strict)
        elif isinstance(node, ArrayNode):
            trouble = difference(self._tensors[node.index], live, self._rules.dtype)
            if not trouble:
                found.fills.append(Fill(path, node, live, strict))
            elif strict:
                self._note_array(live, self._tensors[node.index], path)
                found.mismatched.append(f"{path} ({trouble})")
        elif strict:
            self._differs(live, node, path)

    def _note_array(self, live: Any, entry: TensorEntry, path: str) -> None:
        """Record a live array as resized or castable if it is, for the advice in the error."""
        if is_lazy(live):
            return
        floating = isinstance(live, torch.Tensor) and live.dtype.is_floating_point
        if tuple(live.shape) != entry.shape:
            self.found.resized.append(path)
        elif floating and not difference(entry, live, live.dtype):
            self.found.castable[path] = live.dtype

    def _fill_parts(self, live: Any, node: ComposedNode, path: str, *, strict: bool) -> None:
        """Compare a composed tensor with a stored one, and plan to fill its parts in place."""
        trouble = f"a {type(live).__qualname__} here, a {node.name} in the checkpoint"
        if is_composed(live) and (type(live).__module__, type(live).__qualname__) == (node.module, node.name):
            own, tensors = take_apart(live, path)
            about, stored = (_ENCODE(structs.replace(each, items=[], stride=())) for each in (own, node))
            trouble = "" if about == stored else f"another shape or context of a {node.name} here"
        if not trouble:
            items = [item for item in node.items if isinstance(item, ArrayNode)]
            pairs = [*zip(node.names, items, tensors, strict=True)]
            found = ((name, difference(self._tensors[item.index], part)) for name, item, part in pairs)
            trouble = next((f"{name}: {each}" for name, each in found if each), "")
        if trouble:
            if strict:
                self.found.mismatched.append(f"{path} ({trouble})")
            return
        self.found.fills += [Fill(paths.child(path, name), item, part, strict) for name, item, part in pairs]
        self.found.composed[id(node)] = live

    def _sharded(self, live: Any, node: Node, path: str, made_on: torch.device | None = None) -> None:
        """Compare a tensor that lies on several ranks, here or in the checkpoint, with the stored one.

        ``bind`` compares the boxes. No other tensor can be made in its place, so every difference is a mismatch.
        """
        if not isinstance(node, (ArrayNode, ShardedNode)) or not isinstance(live, (torch.Tensor, FlatShard)):
            self._differs(live, node, path)
            return
        shape = node.shape if isinstance(node, ShardedNode) else self._tensors[node.index].shape
        if tuple(live.shape) != shape:
            here = f"the shape {tuple(live.shape)} here, {shape} in the checkpoint"
            self.found.mismatched.append(f"{path} ({here})")
            return
        self._taken.add(id(node))
        self.found.fills.append(Fill(path, node, live, made_on=made_on, in_boxes=True))

    def _fits(self, live: Any, node: Node) -> bool:
        """Return whether a live array has the shape and dtype of a stored one (of a DTensor, only the shape)."""
        if isinstance(node, ShardedNode):
            return tuple(live.shape) == node.shape and dtypes.TORCH_NAMES.get(live.dtype) == node.dtype
        if is_sharded(live):
            return isinstance(node, ArrayNode) and tuple(live.shape) == self._tensors[node.index].shape
        return isinstance(node, ArrayNode) and not difference(self._tensors[node.index], live, self._rules.dtype)

    def _give(self, node: Node) -> None:
        """Check that a stored value can be made: its composed and pickled values, and its tensors on several ranks.

        A tensor on several ranks that has no live tensor is planned to be made if it was a plain one, equal on all
        ranks, else recorded as a mismatch. Raises UnsupportedStateError for a refused pickle, or a class that is not
        imported.
        """
        found = self.found
        for each in nodes.walk(node) if found.is_special else ():
            if isinstance(each, PickledNode) and not self._rules.allow_pickle:
                refuse_pickled(each, self.found.path_of(each))
            elif isinstance(each, ComposedNode):
                class_of(each, self.found.path_of(each))
            elif isinstance(each, ShardedNode) and id(each) not in self._taken:
                path = self.found.path_of(each)
                if each.plain:
                    like = torch.empty(each.shape, dtype=dtypes.torch_dtype(each.dtype), device="meta")
                    self._sharded(like, each, path, torch.device("cpu"))
                else:
                    found.mismatched.append(f"{path} (lies on several ranks in the checkpoint: put a DTensor there)")

    # -- objects that load themselves

    def _object(self, live: StatefulNode, node: Node) -> None:
        found, known = self.found, self._tree.lives[id(live)]
        value, path = known.value, known.path
        child = node.child if isinstance(node, StatefulNode) else node
        steps: list[Any] = found.steps
        load, inference = value.load_state_dict, False
        if node is None:  # saved before there was an object
            self._differs(live, node, path)
            return
        if isinstance(value, torch.nn.Module):
            child = self._module(live, known, child)
            tensors = [each for each in known.state.values() if isinstance(each, torch.Tensor) and not is_lazy(each)]
            inference = any(map(torch.Tensor.is_inference, tensors))
            if not self._rules.strict:
                load = partial(adapt.load_into, value, known.state)
        elif isinstance(value, torch.optim.Optimizer):
            child = self._optimizer(live, known, child)
            load = partial(adapt.load, value, dtype=self._rules.dtype)
            found.trained += chain.from_iterable(group["params"] for group in value.param_groups)
            found.matched += 1
        elif isinstance(value, RNGState) and not self._rules.generators:
            found.matched += 1
            return
        else:
            found.matched += 1
            if isinstance(value, RNGState):
                steps = found.last
            self._pair(live.child, child)
            modules = (part for part in getattr(value, "__dict__", {}).values() if isinstance(part, torch.nn.Module))
            found.maybe_trained += chain.from_iterable(module.parameters() for module in modules)
        self._give(child)
        if can_check(value):
            self._check(value, child, path)
        if isinstance(node, StatefulNode):
            found.objects[id(node)] = value
        steps.append(Give(child, path, load, value, inference))

    def _module(self, live: StatefulNode, known: Live, node: Node) -> Node:
        """Compare a module with its stored state; return the stored state to load."""
        found, module, own, path = self.found, known.value, known.state, known.path
        if not isinstance(node, MappingNode):
            self._differs(live, node, path)
            return node
        node = adapt.with_tied(own, node)
        own_loading, missing, strict = adapt.own_loading(module), len(found.missing), self._rules.strict
        common = self._common(live.child, node, path, own_loading.all if strict else ())
        for key, value, child, below in common:
            array = self._tree.leaves.values[value.index] if type(value) is ArrayNode else None
            is_extra = str(key).rpartition(".")[2] == _EXTRA_STATE  # of any type and size; the module decides
            if is_extra or not (isinstance(array, torch.Tensor) or isinstance(child, (ArrayNode, ShardedNode))):
                self._pair(value, child)  # the latter: added by a state_dict() of its own
            elif not own_loading.all or not own_loading.decides(
                str(key), array, partial(self._fits, array, child), strict
            ):
                if isinstance(array, (torch.Tensor, np.ndarray)):
                    self._array(array, child, below)
                else:
                    self._differs(value, child, below)
        found.matched += len(common)
        if own and not common and len(found.missing) > missing:
            found.disjoint.append(path)
        keys = {key for key, *_ in common}
        untouched = {id(own[key]) for key in own if key not in keys} - {id(own[key]) for key in keys}
        found.trained += [each for each in module.parameters() if id(each) not in untouched]
        if len(common) == len(node.values):
            return node
        kept = [
            index
            for index, (key, name, _) in enumerate(entries(node))
            if key in keys or (strict and paths.child(path, name) not in self._rules.added)
        ]
        return structs.replace(node, keys=[node.keys[i] for i in kept], values=[node.values[i] for i in kept])

    def _optimizer(self, live: StatefulNode, known: Live, node: Node) -> Node:
        """Compare an optimizer with its stored state; return the stored state to load."""
        found, optimizer, own, path = self.found, known.value, known.state, known.path
        if not isinstance(node, MappingNode):
            self._differs(live, node, path)
            return node
        node, differences, alike = adapt.optimizer_state(optimizer, own, node, self._tensors, self._names, path)
        found.mismatched += differences
        found.refused += [path] if differences else []
        for _, value, parameter in alike:
            if isinstance(value, ArrayNode):
                found.preferred[value.index] = parameter.device
        self._pair(live.child, node)
        for where, value, parameter in alike:
            plain = isinstance(value, ArrayNode) and (type(parameter) in KINDS or not is_sharded(parameter))
            if plain or id(value) in self._taken:
                continue
            dtype = self._tensors[value.index].dtype if isinstance(value, ArrayNode) else value.dtype
            like = torch.empty_like(parameter, dtype=dtypes.torch_dtype(dtype), device="meta")
            made_on = None if parameter.is_meta else parameter.device  # if it is, that is a mismatch
            self._sharded(like, value, f"{path}.state.{where}", made_on)
        return node

    def _pair(self, live: Any, node: Node) -> None:
        """Plan to fill live arrays in an object's state where the stored state has an equal array in the same place."""
        if type(live) is ArrayNode:
            each = self._tree.leaves
            self._array(each.values[live.index], node, each.paths[live.index], strict=False)
        elif not isinstance(node, StatefulNode):
            lives, each = self._tree.lives, self._tree.leaves
            for one, other in _beside(live, node):
                if type(one) is ArrayNode:
                    self._array(each.values[one.index], other, each.paths[one.index], strict=False)
                elif type(one) is StatefulNode or ((known := lives.get(id(one))) and known.has_parts):
                    self._pair(one, other)
        elif type(live) is StatefulNode:
            self._object(live, node)
        else:
            self._pair(live, node.child)

    def _check(self, value: Any, node: Node, path: str) -> None:
        stored = rebuild(node, lambda index: index, pickled=self.found.unpickle, composed=lambda *_: None)
        try:
            with naming_owner("check_state_dict", path, value):
                value.check_state_dict(stored)
        except ValueError as error:
            self.found.refused.append(path)
            self.found.mismatched.append(f"{path} ({error})")

    # -- for both

    def _common(
        self, live: Any, node: MappingNode, path: str, ignored: tuple[str, ...] = ()
    ) -> list[tuple[Any, Any, Node, str]]:
        """Return key, live value, stored value and path for each key that both mappings have.

        Keys that only one has are recorded as missing or unexpected, except those with a prefix in ``ignored``.
        """
        found, prefix = self.found, f"{path}." if path else ""
        keys, items = _entries_of(live)
        names = [prefix + name for name in paths.components(keys)]
        if isinstance(live, MappingNode) and live.keys == node.keys and len(live.keys) == len(node.values):
            return [*zip(keys, items, node.values, names, strict=True)]
        ours = dict(zip(keys, zip(items, names, strict=True), strict=True))
        both, lacking, unread = paired(ours, {key: (prefix + name, child) for key, name, child in entries(node)})
        found.missing += [below for key, (_, below) in lacking.items() if not str(key).startswith(ignored)]
        for key, (below, child) in unread.items():
            if not str(key).startswith(ignored):
                if below not in self._rules.added:
                    found.unexpected.append(below)
                self._unread += count(child)
        return [(key, value, child, below) for key, ((value, below), (_, child)) in both.items()]

    def _differs(self, live: Any, node: Node, path: str) -> None:
        if isinstance(node, ArrayNode):
            entry = self._tensors[node.index]
            stored = f"{'an array' if entry.kind == 'ndarray' else 'a tensor'} {describe(entry)}"
        else:
            stored = values.with_article(type(node).__name__.removesuffix("Node"))
        if type(live) is ArrayNode:
            live = self._tree.leaves.values[live.index]
        elif known := self._tree.lives.get(id(live)):
            live = known.value
        elif isinstance(live, nodes.Node):
            live = values.from_node(live)
        here = values.with_article(type(live).__qualname__)
        self.found.mismatched.append(f"{path} ({here} here, {stored} in the checkpoint)")


def _lies_in_boxes(value: Any) -> bool:
    return is_sharded(value) or isinstance(value, FlatShard)


def _entries_of(live: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the keys of a live mapping, and the nodes of its values; two empty lists for anything else."""
    if isinstance(live, MappingNode):
        return mapping_keys(live), live.values
    return live if isinstance(live, Opaque) else ([], [])


def _beside(live: Any, node: Node) -> Iterator[tuple[Any, Node]]:
    """Return pairs: the live entry (``_NOWHERE`` if there is none) and the stored one, for each stored entry."""
    if isinstance(node, MappingNode):
        if isinstance(live, MappingNode) and live.keys == node.keys and len(live.keys) == len(node.values):
            return zip(live.values, node.values, strict=True)
        there = dict(zip(*_entries_of(live), strict=True))
        return zip([there.get(key, _NOWHERE) for key in mapping_keys(node)], node.values, strict=True)
    if not isinstance(node, (ListNode, nodes.TupleNode)):
        return iter(())
    items = live.items if isinstance(live, (ListNode, nodes.TupleNode)) else ()
    return zip(chain(items, repeat(_NOWHERE)), node.items, strict=False)


def _without_place(live: Any, node: Node, path: str) -> Iterator[str]:
    """Yield the paths of stored objects for which a live plain value has no entry, not even a None."""
    if isinstance(node, StatefulNode):
        if live is _NOWHERE:
            yield path
    elif has_parts(node):
        for (one, other), (_, name, _) in zip(_beside(live, node), entries(node), strict=True):
            yield from _without_place(one, other, paths.child(path, name))
