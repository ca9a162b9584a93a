# SPDX-License-Identifier: Apache-2.0
"""Preparing a restore of a decoded manifest: into new memory (``load``), or into live objects (``engine.restore``).

Bytes are read into live arrays and new memory; then all other values are made, from these arrays and the skeleton.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, Final

import numpy as np
import torch
from msgspec import structs

from pccheck_async.errors import StateMismatchError
from pccheck_async.format import Action, dtypes
from pccheck_async.format.manifest import Manifest, TensorEntry, span
from pccheck_async.format.skeleton import (
    ArrayNode,
    ComposedNode,
    Node,
    PickledNode,
    ShardedNode,
    StatefulNode,
    arrays,
    walk,
)
from pccheck_async.state.ambient import without_modes
from pccheck_async.state.boxes import box_views
from pccheck_async.state.foreign import compose, refuse_pickled, unpickle
from pccheck_async.state.leaves import HOST, Array, as_bits
from pccheck_async.state.restore.arrays import (
    Allocation,
    Target,
    Targets,
    difference,
    is_as_stored,
    memory_trouble,
    place_of,
    steps_of,
)
from pccheck_async.state.restore.diff import Diff, Fill, Give, Rules, diff
from pccheck_async.state.restore.live import LiveTree, live_tree
from pccheck_async.state.restore.parts import Wanted
from pccheck_async.state.restore.tree import check_classes, paths_by_node, rebuild, refuse_boxes, select
from pccheck_async.state.save.flatten import naming_owner
from pccheck_async.state.storages import address_of, is_dense
from pccheck_async.state.tensor_access import storage_address, untyped_storage
from pccheck_async.telemetry import write

__all__ = ["Restoration", "allocate", "match"]

_PLACE: Final = attrgetter("device_name", "low", "high")


@dataclass(frozen=True, slots=True, eq=False)
class Restoration:
    """A restore that was checked and can begin: fill the targets, then call ``finish`` once.

    After a dry run there is nothing to fill, and ``finish`` must not be called.
    """

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
    # Of a dry run: what is done with each part of the state, and the error that a restore would raise.
    actions: Mapping[str, Action] = field(default_factory=dict)
    error: StateMismatchError | None = None

    def clear_gradients(self) -> int:
        """Set the gradients of restored tensors to None, as in a new process; return how many had one."""
        with without_modes():
            leaves = {id(each): each for each in self.trained if each.is_leaf and each.grad is not None}
            for tensor in leaves.values():
                tensor.grad = None
        return len(leaves)


def allocate(
    manifest: Manifest, keys: Sequence[str] | None = None, device: Any = "cpu", *, allow_pickle: bool = False
) -> Restoration:
    """Prepare a restore into new memory; its ``finish`` returns nested dicts, with the state in place of each Stateful.

    Args:
        manifest: Manifest of the checkpoint.
        keys: Paths or globs of the leaves and subtrees to load; None for all. Only their bytes are read.
        device: The final place of tensors (see :func:`place_of`); numpy arrays stay on the host.
        allow_pickle: Whether pickled values are unpickled; else they are refused, before any byte is read.

    Raises:
        UnsupportedStateError: There is a pickled value that is refused, or a tensor of a class that is not imported.
        StateMismatchError: One of ``keys`` selects nothing, or is ambiguous (see :func:`.tree.select`).
        IncompleteCheckpointError: A tensor lies on several ranks, and the manifest is the part of one of them.
        CorruptStoreError: The skeleton describes no value.
        RuntimeError: There is no such device; raised by torch.
    """
    place = place_of(device)
    skeleton = manifest.skeleton if keys is None else select(manifest.skeleton, keys)
    refuse_boxes(skeleton)
    check_classes(skeleton)
    pickles = [each for each in walk(skeleton) if isinstance(each, PickledNode)]
    named = paths_by_node(skeleton) if pickles else {}
    if pickles and not allow_pickle:
        refuse_pickled(pickles[0], named[id(pickles[0])])
    allocation = Allocation(manifest, sorted(arrays(skeleton)))

    def finish() -> Any:
        _warn_of_unpickling([named[id(each)] for each in pickles])
        values = partial(rebuild, skeleton, lambda index: allocation.array(index, place), composed=compose)
        with without_modes():  # this may be the caller's thread
            return values(pickled=lambda node: unpickle(node, named[id(node)], device))

    return Restoration(Targets(allocation.targets()), finish, move=partial(allocation.move, place))


def match(
    state: Mapping[str, Any] | LiveTree,
    manifest: Manifest,
    by_address: bool = False,
    *,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
    generators: bool = True,
    added: Collection[str] = (),
    dry_run: bool = False,
) -> Restoration:
    """Prepare a restore into the live ``state`` (or its :func:`live_tree`): compare them, and change nothing yet.

    The restore's ``finish`` copies arrays that were not filled in place, calls every ``load_state_dict`` and returns
    ``state``. An array is filled in place if it has the strides with which it was stored, otherwise by a copy at the
    end. A saved None may replace a live array in its container; any other plain value is a mismatch.

    A live plain value (without tensors, arrays and objects) takes any saved value: lists, dicts and sets are
    refilled with content of their type, any other value is replaced in its container. An object that was saved inside
    needs an entry at its own path: an object, or a plain value, which takes the object's state.

    Optimizers need no state yet; their parameters are identified by the names that were saved, else by their numbers.
    Any other Stateful is given its own tensors, filled, if dtype and shape are equal, else new ones. For ``strict``,
    ``dtype`` and the comparison of modules see :meth:`CheckpointEngine.restore`. ``by_address``: whether the copy
    backend can write to the memory of CUDA tensors. Without ``generators`` every :class:`RNGState` stays as it is: the
    saved ones are another rank's. Paths that :func:`merge_parts` ``added`` need not be in the state. For a ``dry_run``
    nothing is allocated, and a mismatch is not raised but returned in ``error``.

    Raises:
        UnsupportedStateError: ``state`` is not a mapping with strings for keys, or has the ``state_dict()`` of a live
            object in the object's place; tensors are traced; or a stored value is refused or cannot be unpickled.
        StateMismatchError: The state differs; lists the paths.
        CorruptStoreError: The skeleton describes no value.
    """
    tree = state if isinstance(state, LiveTree) else live_tree(state)
    found = diff(tree, manifest, Rules(strict, dtype, allow_pickle, generators, added))
    binding = _Binding(found, by_address, dtype)
    found.mismatched += binding.conflicts()
    error = found.error(strict=strict)
    if error is not None and not dry_run:
        raise error
    binding.take_new(with_memory=not dry_run)
    lists = tuple(found.missing), tuple(found.unexpected)
    plan = Restoration(Targets(), binding.finish, *lists, counts=found.counts, resharded=tuple(binding.resharded))
    return replace(plan, actions=found.actions(), error=error) if dry_run else binding.allocate(plan)


def _warn_of_unpickling(where: Collection[str]) -> None:
    """Log the paths of the first values that are unpickled, and their number; nothing if there are none."""
    if where:
        text = "allow_pickle: %d values are unpickled, which runs code that the checkpoint names: %s"
        write("unpickled", text, len(where), ", ".join([*where][:5]))


class _Live:
    """A live array that takes the bytes of a stored one; unless ``strict``, a new array may be filled in its place.

    ``mesh``: if the array is a box of a tensor on several ranks, a hash of these ranks; else None.
    """

    def __init__(self, fill: Fill, index: int, array: Array, stored: TensorEntry, by_address: bool) -> None:
        self.path, self.strict, self.index, self.array, self.entry = fill.path, fill.strict, index, array, stored
        self.mesh = fill.node.mesh if isinstance(fill.node, ShardedNode) else None
        self.device: torch.device | None = None  # None: the host
        self.negated = cast = False  # its bytes in memory are not its values
        if isinstance(array, torch.Tensor):
            if cast := (dtype := dtypes.TORCH_NAMES[array.dtype]) != stored.dtype:
                self.entry = structs.replace(stored, dtype=dtype)
            self.device = None if array.is_cpu else array.device
            self.negated = array.is_conj() or array.is_neg()
            self.address: int = array.data_ptr()
            contiguous = array.is_contiguous()
            alike = array.stride() == stored.stride
        else:
            self.address = address_of(array)
            contiguous = array.flags.c_contiguous
            alike = False
        self.as_stored = alike or is_as_stored(self.entry, self.steps)
        if contiguous:
            self.low, self.high = self.address, self.address + array.nbytes
        else:
            low, high = span(self.entry.shape, self.steps)
            self.low, self.high = self.address + low, self.address + high + self.entry.itemsize
        self.device_name = str(self.device)
        reached = self.device is None or (self.device.type == "cuda" and by_address)
        dense = contiguous or is_dense(self.entry.shape, self.steps, self.entry.itemsize)
        # Read right into its memory, not copied there at the end:
        self.in_place = reached and not self.negated and not cast and dense and self.as_stored

    @property
    def steps(self) -> tuple[int, ...]:
        """Strides in bytes."""
        return steps_of(self.array)

    def shares_as_stored(self, other: _Live) -> bool:
        """Return whether this array and ``other`` share memory exactly as they do in the checkpoint."""
        one, two, shift = self.entry, other.entry, self.address - other.address
        if one.storage != two.storage or one.offset - two.offset != shift:
            return False
        if not shift and (one.shape, one.stride, self.steps) == (two.shape, two.stride, other.steps):
            return True
        return self.as_stored and other.as_stored

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Description of the memory, for numpy to compare ranges, never to read: it may be a device's memory."""
        typestr, data = f"|V{self.entry.itemsize}", (self.address, True)
        return {"version": 3, "shape": self.entry.shape, "strides": self.steps, "typestr": typestr, "data": data}


class _Binding:
    """The memory of one restore: that of live arrays, and new memory.

    Live arrays that share memory are filled twice if the stored arrays share theirs in the same way. If not, one array
    would overwrite the other: a mismatch if both are strict, else an array that is not strict gets new memory.
    """

    def __init__(self, found: Diff, by_address: bool, dtype: torch.dtype | None) -> None:
        self._found = found
        self._manifest = found.manifest
        self._by_address = by_address
        self._dtype = dtype
        self._arrays: dict[int, Array] = {}  # that have the stored bytes at the end
        self._in_boxes: dict[int, Any] = {}  # tensors on several ranks, or stored as such, by their nodes' identity
        self._elsewhere: set[int] = set()  # stored arrays that boxes are made of: they are not read as they are
        self._values: list[Any] = []
        self._live: dict[int, _Live] = {}
        self._allocation = Allocation(found.manifest, ())
        self._is_filled = False
        self.resharded: list[Wanted] = []  # boxes that are others here than in this rank's part
        with without_modes():
            fills, found.fills = found.fills, []
            for fill in fills:
                if isinstance(node := fill.node, ArrayNode) and not fill.in_boxes:
                    entry = found.manifest.tensors[node.index]
                    self._live[node.index] = _Live(fill, node.index, fill.array, entry, by_address)
                elif fill.made_on is None and not self._take(fill):
                    continue
                found.fills.append(fill)

    def take_new(self, *, with_memory: bool) -> None:
        """Make the tensors, stored on several ranks, that the live state lacks; for a dry run, without memory."""
        with torch.inference_mode(False):
            for fill in self._found.fills:
                if fill.made_on is not None:
                    array = torch.empty_like(fill.array, device=fill.made_on) if with_memory else fill.array
                    self._take(fill._replace(array=array))

    def _take(self, fill: Fill) -> bool:
        """Plan how the boxes of a tensor are filled: from equal boxes in this rank's part, else from those of any part.

        A plain tensor is one box, which covers everything. Return False, and record the mismatch, if the tensor cannot
        take the stored one.
        """
        node, array, tensors = fill.node, fill.array, self._manifest.tensors
        children = node.boxes if isinstance(node, ShardedNode) else (node,)
        stored = [tensors[child.index] for child in children]
        found = box_views(array, fill.path)
        boxes, views = [box for box, _ in found], [view for _, view in found]
        same = isinstance(node, ShardedNode) and [(box.offsets, box.sizes) for box in boxes] == [
            *zip(node.offsets, [entry.shape for entry in stored], strict=True)
        ]
        cast = partial(difference, cast_to=self._dtype)
        troubles = map(cast, stored, views) if same else map(memory_trouble, views)
        if fill.made_on is None and (trouble := next(filter(None, troubles), "")):
            self._found.mismatched.append(f"{fill.path} ({trouble})")
            return False
        self._in_boxes[id(node)] = array
        if same:
            for child, entry, view in zip(children, stored, views, strict=True):
                self._live[child.index] = _Live(fill, child.index, view, entry, self._by_address)
            return True
        self._elsewhere.update(child.index for child in children)
        if isinstance(node, ArrayNode):
            self._arrays[node.index] = array
        mesh, stored_path = (node.mesh if isinstance(node, ShardedNode) else None), self._found.path_of(node)
        for box, local in zip(boxes, map(torch.Tensor.detach, views), strict=True):
            self.resharded.append(Wanted(fill.path, stored_path, mesh, tuple(array.shape), box, local, local))
        return True

    def conflicts(self) -> list[str]:
        """Give new memory to one of each two live arrays that would overwrite each other, if one need not be filled.

        Return a message for each pair in which both must be filled in place (are strict).
        """
        troubles = []
        for one, other in _overlapping([live for live in self._live.values() if live.entry.storage is not None]):
            dropped = not {one.index, other.index} <= self._live.keys()
            if dropped or one.shares_as_stored(other) or not _share(one, other):
                continue
            loose = next((live for live in (other, one) if not live.strict), None)
            if loose is not None:
                del self._live[loose.index]
            elif one.negated or other.negated:
                troubles.append(
                    f"{other.path} (a view of the memory of {one.path} here, conjugated or negated; the checkpoint "
                    "has them apart: give one memory of its own with resolve_conj() or resolve_neg())"
                )
            else:
                troubles.append(f"{other.path} (shares memory with {one.path} here, but not in the checkpoint)")
        # Tensors that were tied when they were saved were all saved by one rank.
        whole = {(live.mesh, live.address, live.array.nbytes): live.path for live in self._live.values()}
        for box in self.resharded:
            memory = box.mesh, box.local.data_ptr(), box.local.nbytes
            if box.mesh is not None and box.local.nbytes and memory in whole:
                troubles.append(f"{box.path} (shares memory with {whole[memory]} here, but not in the checkpoint)")
        return troubles

    def allocate(self, plan: Restoration) -> Restoration:
        """Allocate memory for arrays that are new, or are copied at the end; make all values; return the full ``plan``.

        The values' arrays are not filled yet. Raises CorruptStoreError if a value cannot be made,
        UnsupportedStateError if one cannot be unpickled.
        """
        found, lives = self._found, self._live.values()
        wanted = {index for step in (*found.steps, *found.last) for index in arrays(step.node)} - self._elsewhere
        direct = {live.index for live in lives if live.in_place}
        preferred = {
            index: device for index, device in found.preferred.items() if device.type == "cuda" and self._by_address
        }
        gradients = torch.is_grad_enabled()  # inference_mode(False) would switch them on
        with without_modes():
            self.resharded = [one.placed(self._by_address) for one in self.resharded]
            self._allocation = Allocation(self._manifest, sorted((wanted | self._live.keys()) - direct), preferred)
            targets = Targets([*self._allocation.targets(), *self._in_place()])
            # Tensors that are made now can be trained, in any mode of the caller.
            with torch.inference_mode(False), torch.set_grad_enabled(gradients):
                self._arrays |= {index: self._allocation.array(index) for index in wanted - self._live.keys()}
        self._arrays |= {live.index: live.array for live in lives}
        self._values = [self._value(step.node) for step in (*found.steps, *found.last)]
        filled = tuple([live.path for live in lives if live.in_place])
        return replace(plan, targets=targets, filled=filled, resharded=tuple(self.resharded), trained=self._trained())

    def finish(self) -> Mapping[str, Any]:
        """Finish the restore once all memory is filled: copy arrays, load states, replace values; return the state."""
        found = self._found
        _warn_of_unpickling([path for path, _ in found.unpickled.values()])
        increment = torch.autograd.graph.increment_version
        with without_modes():
            for live in self._live.values():
                if not live.in_place:
                    _copy(live, self._allocation.array(live.index))
                elif isinstance(live.array, torch.Tensor) and not live.array.is_inference():
                    increment(live.array)
            for one in self.resharded:
                one.finish()
        for whole in (*found.composed.values(), *self._in_boxes.values()):  # changes of its parts do not count there
            if isinstance(whole, torch.Tensor) and not whole.is_inference():
                increment(whole)
        arrays_of = self._arrays.items()
        inference = {index for index, each in arrays_of if isinstance(each, torch.Tensor) and each.is_inference()}
        steps = [*found.steps, *found.last]
        if found.is_special:  # tensors that are composed of others are made once these are filled
            self._is_filled = True
            self._values = [self._value(step.node) for step in steps]
        gradients = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(gradients):
            for step, value in zip(steps, self._values, strict=True):
                if isinstance(step, Give):
                    _give(
                        step, value, step.inference or bool(inference and not inference.isdisjoint(arrays(step.node)))
                    )
                else:
                    step.apply(value)
        return found.tree.state

    def _in_place(self) -> list[Target]:
        """Return targets for the live arrays that bytes are read into directly."""
        targets = []
        for live in self._live.values():
            if live.in_place and live.entry.storage is not None:
                offset = self._manifest.storages[live.entry.storage].offset + live.entry.offset
                owner = untyped_storage(live.array) if isinstance(live.array, torch.Tensor) else live.array
                device = HOST if live.device is None else live.device.index
                low = live.low - live.address  # as in the checkpoint
                targets.append(Target(offset + low, live.high - live.low, live.low, owner, device))
        return targets

    def _trained(self) -> tuple[torch.Tensor, ...]:
        """Return the live tensors that are restored and may have gradients."""
        found = self._found
        addresses = {*map(storage_address, found.trained)} - {0} if found.maybe_trained else set()
        maybe = [each for each in found.maybe_trained if storage_address(each) in addresses]
        return (*found.trained, *maybe)

    # -- values

    def _value(self, node: Node) -> Any:
        def sharded(node: ShardedNode) -> Any:
            return self._in_boxes[id(node)]

        return rebuild(node, self._arrays.__getitem__, self._object, sharded, self._found.unpickle, self._composed)

    def _object(self, node: StatefulNode) -> Any:
        objects = self._found.objects
        return objects[id(node)] if id(node) in objects else self._value(node.child)

    def _composed(self, node: ComposedNode, parts: dict[str, Any], context: Any) -> Any:
        live = self._found.composed.get(id(node))
        if live is not None and all(getattr(live, name) is part for name, part in parts.items()):
            return live
        return compose(node, parts, context) if self._is_filled else None


def _give(step: Give, stored: Any, inference: bool) -> None:
    mixture = "; the state may now be a mixture of what it was and of the checkpoint"
    mode: AbstractContextManager[Any] = torch.inference_mode() if inference else nullcontext()
    with mode, naming_owner("load_state_dict", step.path, step.value, mixture):
        step.load(stored)


def _copy(live: _Live, stored: Array) -> None:
    """Copy ``stored`` into a live array, bit for bit unless it is cast; of expanded dimensions, one element."""
    sizes = zip(live.entry.shape, live.steps, strict=True)
    once = (*(slice(0, 1) if step == 0 and size > 1 else slice(None) for size, step in sizes), ...)
    if isinstance(live.array, torch.Tensor):
        assert isinstance(stored, torch.Tensor)
        target, source = live.array.detach()[once], stored.detach()[once]
        writing: AbstractContextManager[Any] = torch.inference_mode() if live.array.is_inference() else torch.no_grad()
        with writing:
            if live.negated or target.dtype != source.dtype:
                target.copy_(source)
            else:
                as_bits(target).copy_(as_bits(source))
        return
    assert isinstance(stored, np.ndarray)
    live.array[once] = stored[once]


def _overlapping(lives: list[_Live]) -> Iterator[tuple[_Live, _Live]]:
    """Yield pairs of arrays whose address ranges overlap, except in groups that share memory as in the checkpoint.

    The exception saves time: a group of n tied arrays has n² pairs.
    """
    groups: list[list[_Live]] = []
    memory, reach = "", 0
    for live in sorted(lives, key=_PLACE):
        if live.device_name != memory or live.low >= reach:
            groups.append([])
            memory, reach = live.device_name, live.high
        groups[-1].append(live)
        reach = max(reach, live.high)
    for group in groups:
        if len(group) == 1 or all(group[0].shares_as_stored(live) for live in group[1:]):
            continue
        for number, one in enumerate(group, 1):
            for other in group[number:]:
                if other.low >= one.high:
                    break
                yield one, other


def _share(one: _Live, other: _Live) -> bool:
    """Return whether two arrays have a byte in common; True if that takes too long to compute."""
    try:
        return np.shares_memory(np.asarray(one), np.asarray(other), max_work=1_000_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
