# SPDX-License-Identifier: Apache-2.0
"""Restoring from several ranks' parts of a checkpoint: entries of other parts, and the bytes to read from each part.

Tensors may lie on other ranks, or in other boxes, than when they were saved. Of each part only the MiBs that hold
wanted bytes are read, once; the ranges of a pattern are listed for one chunk at a time, never for the whole state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from msgspec import structs

from pccheck_async.format import dtypes
from pccheck_async.format.manifest import Manifest, TensorEntry
from pccheck_async.format.skeleton import (
    ArrayNode,
    ComposedNode,
    MappingNode,
    Node,
    ShardedNode,
    StatefulNode,
    replace_arrays,
    walk,
)
from pccheck_async.state import paths
from pccheck_async.state.boxes import Box
from pccheck_async.state.leaves import HOST
from pccheck_async.state.restore.arrays import Target, Targets
from pccheck_async.state.restore.tree import entries, has_parts, leaves

_Ranges = tuple[range, ...]


class StoredBox(NamedTuple):
    """A box of a tensor in a part of a checkpoint."""

    part: int
    mesh: int
    """Hash of the ranks that the tensor lay on; :func:`private_mesh` for a plain tensor of one rank."""
    offsets: tuple[int, ...]
    entry: TensorEntry
    start: int
    """Offset in the payload at which the box's storage begins, in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A box of a tensor in the live state, and the memory that a restore fills with it.

    Attributes:
        path: Path of the tensor in the live state, for messages.
        stored_path: Path of the tensor in the checkpoint.
        mesh: Hash of the ranks that the tensor lay on when it was saved; None for a plain tensor, which is read only
            from the part that this rank restores.
        shape: Shape of the whole tensor.
        box: The box to fill.
        local: View of the live tensor that is this box.
        into: Tensor that the bytes are read into: ``local``, or a temporary copy (see :meth:`placed`).
    """

    path: str
    stored_path: str
    mesh: int | None
    shape: tuple[int, ...]
    box: Box
    local: torch.Tensor
    into: torch.Tensor

    def placed(self, by_address: bool) -> Wanted:
        """Return this box, with a new tensor as ``into`` if bytes cannot be read into ``local`` itself."""
        local = self.local
        if (local.is_cpu or (local.is_cuda and by_address)) and not (local.is_neg() or local.is_conj()):
            return self
        return replace(self, into=torch.empty(local.shape, dtype=local.dtype))

    def finish(self) -> None:
        """Copy ``into`` to ``local``; if ``local`` was filled in place, increment its autograd version counter."""
        local = self.local
        if self.into is not local:
            with torch.inference_mode() if local.is_inference() else torch.no_grad():
                local.copy_(self.into)
        elif not local.is_inference():
            torch.autograd.graph.increment_version(local)


def private_mesh(part: int) -> int:
    """Return a number in place of a mesh's hash, which none has, for plain tensors saved by the rank of ``part``."""
    return -1 - part


def stored_boxes(manifest: Manifest, part: int) -> dict[str, list[StoredBox]]:
    """Return the boxes in a part, by the path of the tensor; a plain tensor is one box."""
    found: dict[str, list[StoredBox]] = {}
    for path, node in leaves(manifest.skeleton):
        mesh = private_mesh(part)
        if isinstance(node, ShardedNode):
            mesh = node.mesh
            pairs = [*zip(node.offsets, node.boxes, strict=True)]
        elif isinstance(node, ArrayNode):
            pairs = [((0,) * len(manifest.tensors[node.index].shape), node)]
        else:
            continue
        entries = [(offsets, manifest.tensors[box.index]) for offsets, box in pairs]
        starts = [0 if entry.storage is None else manifest.storages[entry.storage].offset for _, entry in entries]
        found[path] = [StoredBox(part, mesh, *pair, start) for pair, start in zip(entries, starts, strict=True)]
    return found


def reshard(
    wanted: Iterable[Wanted], stored: Mapping[int, Mapping[str, Sequence[StoredBox]]], own: int
) -> tuple[dict[int, Targets], list[str]]:
    """Return for each part the memory that is filled from it; and for each tensor that cannot be filled a message.

    Args:
        wanted: The boxes of tensors to fill.
        stored: The stored boxes of each part, by path.
        own: The part that this rank restores. Boxes that several parts have are read from it if it has them.
    """
    troubles: list[str] = []
    tied: dict[tuple[int, int, int], tuple[str, set[tuple[Any, ...]]]] = {}
    copies: dict[int, list[Target]] = {}
    for one in wanted:
        mesh = private_mesh(own) if one.mesh is None else one.mesh
        parts = (own, *(part for part in stored if part != own))
        boxes: dict[tuple[Any, ...], StoredBox] = {}
        for part in parts:
            for box in stored[part].get(one.stored_path, ()):
                if box.mesh == mesh:
                    boxes.setdefault((box.offsets, box.entry.shape), box)
        if trouble := _trouble(one, boxes.values()):
            troubles.append(f"{one.path} ({trouble})")
        if trouble or one.local.is_meta:  # of a dry run, which makes no tensor
            continue
        if one.local.nbytes:  # tensors that were tied when they were saved lie in one place there
            places = {(box.part, box.offsets, box.start + box.entry.offset, box.entry.stride) for box in boxes.values()}
            other, same = tied.setdefault((mesh, one.local.data_ptr(), one.local.nbytes), (one.path, places))
            if same != places:
                troubles.append(f"{one.path} (shares memory with {other} here, but not in the checkpoint)")
        for part, copy in _copies(one, boxes.values()):
            copies.setdefault(part, []).append(copy)
    return {part: Targets(each) for part, each in copies.items()}, troubles


def _trouble(wanted: Wanted, boxes: Iterable[StoredBox]) -> str:
    """Return why a wanted box cannot be filled from stored ones; empty if it can."""
    dtype = dtypes.TORCH_NAMES.get(wanted.local.dtype, "")
    there, parts = 0, list[_Ranges]()
    for box in boxes:
        if box.entry.dtype != dtype:
            return f"{dtype} here, {box.entry.dtype} in the checkpoint"
        if len(box.offsets) != len(wanted.shape):
            return f"the shape {wanted.shape} here, another one in the checkpoint"
        if any(map(_is_expanded_here_only, box.entry.shape, box.entry.stride, wanted.box.sizes, wanted.local.stride())):
            return "the tensor here is expanded, the one in the checkpoint is not"
        part = _overlap(box, wanted.box)
        if elements := prod(map(len, part)):
            there += elements
            parts.append(part)
    if there < prod(wanted.box.sizes):
        return "the checkpoint has not all of it"
    return "boxes of it overlap in the checkpoint" if _any_overlap(parts) else ""


def _is_expanded_here_only(stored: int, stored_step: int, size: int, step: int) -> bool:
    """Return whether a dimension is expanded (step 0) here, but in the checkpoint may have several values."""
    return size > 1 and step == 0 and (stored < size or stored_step != 0)


def _any_overlap(boxes: Sequence[_Ranges]) -> bool:
    """Return whether any two boxes have an element in common; only neighbours along one dimension are compared."""
    if len(boxes) < 2:
        return False
    along = max(range(len(boxes[0])), key=lambda dim: len({box[dim].start for box in boxes}))
    near = list[_Ranges]()
    for box in sorted(boxes, key=lambda box: box[along].start):
        near = [other for other in near if other[along].stop > box[along].start]
        if any(all(a.start < b.stop and b.start < a.stop for a, b in zip(box, other, strict=True)) for other in near):
            return True
        near.append(box)
    return False


def _overlap(stored: StoredBox, live: Box) -> _Ranges:
    sides = zip(stored.offsets, stored.entry.shape, live.offsets, live.sizes, strict=True)
    return tuple(range(max(a, b), max(a, b, min(a + m, b + n))) for a, m, b, n in sides)


def _copies(wanted: Wanted, boxes: Iterable[StoredBox]) -> Iterator[tuple[int, Target]]:
    into, itemsize = wanted.into, wanted.into.element_size()
    device = HOST if into.is_cpu else into.device.index
    strides = [step * itemsize for step in into.stride()]
    for stored in boxes:
        entry, live = stored.entry, wanted.box
        steps = [step * itemsize for step in entry.stride]
        ranges = _overlap(stored, live)
        if not prod(map(len, ranges)):
            continue
        first = [each.start for each in ranges]
        start = stored.start + entry.offset + _reach(steps, first, stored.offsets)
        address = into.data_ptr() + _reach(strides, first, live.offsets)
        dims = [each for each in zip(map(len, ranges), steps, strides, strict=True) if each[0] > 1]
        nbytes = itemsize
        while dims and dims[-1][1] == dims[-1][2] == nbytes:  # the last dimensions are one run if they are dense
            nbytes *= dims.pop()[0]
        yield stored.part, Target(start, nbytes, address, into, device, *(zip(*dims, strict=True) if dims else ()))


def _reach(steps: Sequence[int], at: Sequence[int], origin: Sequence[int]) -> int:
    return sum(step * (index - low) for step, index, low in zip(steps, at, origin, strict=True))


# -- entries that the part being read lacks: the other stages of a pipeline


def merge_parts(own: int, manifests: Mapping[int, Manifest]) -> tuple[Manifest, frozenset[str]]:
    """Return the manifest of part ``own``, completed by entries that only other parts have; and the paths of these.

    Mappings with tensors inside are merged by key; part ``own`` takes precedence, then the lowest part. An optimizer's
    state is not merged, since it numbers its parameters: another stage's number 3 is another parameter.
    Tensors of other parts become nodes without boxes: their bytes are in no storage of this manifest.
    """
    manifest, added = manifests[own], set[str]()
    skeleton = manifest.skeleton
    for part in sorted(manifests.keys() - {own}):
        skeleton = _merge(skeleton, manifests[part].skeleton, "", (part, manifests[part]), added)
    return structs.replace(manifest, skeleton=skeleton), frozenset(added)


def _merge(node: Node, other: Node, path: str, source: tuple[int, Manifest], added: set[str]) -> Node:
    if isinstance(node, StatefulNode) and isinstance(other, StatefulNode):
        child = _merge(node.child, other.child, path, source, added)
        return node if child is node.child else StatefulNode(child)
    if not isinstance(node, MappingNode) or not isinstance(other, MappingNode):
        return node
    here, there = ({key: (name, child) for key, name, child in entries(each)} for each in (node, other))
    if "param_groups" in {**here, **there} or not (has_parts(node) or has_parts(other)):
        return node
    keys, values, changed = [*node.keys], [*node.values], False
    for number, (key, (name, child)) in enumerate(here.items()):
        if key in there:
            values[number] = _merge(child, there[key][1], paths.child(path, name), source, added)
            changed |= values[number] is not child
    for key_node, (key, (name, child)) in zip(other.keys, there.items(), strict=True):
        if key not in here and not any(_not_merged(child, source[1])):
            keys.append(key_node)
            values.append(replace_arrays(child, lambda one: _elsewhere(one, *source)))
            added.add(paths.child(path, name))
            changed = True
    return structs.replace(node, keys=keys, values=values) if changed else node


def _not_merged(node: Node, manifest: Manifest) -> Iterator[bool]:
    for one in walk(node):
        yield isinstance(one, ComposedNode) or (
            isinstance(one, ArrayNode) and manifest.tensors[one.index].kind == "ndarray"
        )


def _elsewhere(node: ArrayNode | ShardedNode, part: int, manifest: Manifest) -> ShardedNode:
    if isinstance(node, ShardedNode):
        return structs.replace(node, offsets=(), boxes=())
    entry = manifest.tensors[node.index]
    return ShardedNode(private_mesh(part), entry.dtype, True, entry.shape, (), ())
