# SPDX-License-Identifier: Apache-2.0
"""Conversion of a plan of DCP to an app state, and of manifests to DCP's metadata.

The app state has a tensor under each of DCP's names, and under :data:`OWN` further data of DCP: the bytes that its
planner made of values that are no tensors, and the planner's data.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from pccheck_async.errors import CorruptStoreError, UnsupportedStateError
from pccheck_async.format import dtypes
from pccheck_async.format.manifest import Manifest
from pccheck_async.format.skeleton import ArrayNode, MappingNode, Node, ShardedNode
from pccheck_async.state import PlannedBoxes, paths
from pccheck_async.state.restore.parts import StoredBox, private_mesh
from pccheck_async.state.restore.tree import leaves, mapping_keys, rebuild

__all__ = ["OWN", "StoredItem", "StoredValue", "metadata_of", "state_of"]

OWN: Final = "torch.distributed.checkpoint"
"""Key in the app state of DCP's further data."""
_VERSION: Final = 1


def state_of(plan: SavePlan, planner: SavePlanner, *, alone: bool) -> dict[str, Any]:
    """Return the state that a rank saves.

    Args:
        plan: The plan of this rank.
        planner: The planner that resolves the plan's items.
        alone: Whether no other rank saves: tensors that are whole are then saved as plain tensors.

    Raises UnsupportedStateError: the planner gives data that cannot be saved; names the item.
    """
    boxes: dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], torch.Tensor]]]] = {}
    other: dict[str, Any] = {}
    for item in plan.items:
        data, name = planner.resolve_data(item), item.index.fqn
        if item.type is WriteItemType.BYTE_IO:
            tensor = _bytes(data, name)
            other[name] = tensor if alone else PlannedBoxes(tensor.shape, [((0,), tensor)])
        else:
            shape, offsets, tensor = _box(item, data)
            boxes.setdefault(name, (shape, []))[1].append((offsets, tensor))
    if OWN in boxes:
        raise UnsupportedStateError(f"{OWN!r} is not free as a name in the state: the checkpoint keeps its own there")
    state: dict[str, Any] = {}
    for name, (shape, parts) in boxes.items():
        whole = alone and len(parts) == 1 and tuple(parts[0][1].shape) == shape
        state[name] = parts[0][1] if whole else PlannedBoxes(shape, parts)
    names = {item.index.fqn for item in plan.items}
    planned = plan.planner_data
    if isinstance(planned, dict):  # each rank has all of it: entries without an item here are saved by another rank
        planned = {name: each for name, each in planned.items() if name in names}
    return state | {OWN: {"version": _VERSION, "bytes": other, "planner_data": planned}}


def _bytes(data: object, name: str) -> torch.Tensor:
    if not isinstance(data, io.BytesIO):
        raise UnsupportedStateError(f"{name}: the planner gives a {type(data).__qualname__}, and no BytesIO")
    view = data.getbuffer()
    return torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0, dtype=torch.uint8)


def _box(item: WriteItem, data: object) -> tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]:
    """Return the shape of the whole tensor, the offsets of the item's box in it, and the box."""
    name, plan = item.index.fqn, item.tensor_data
    if not isinstance(data, torch.Tensor) or plan is None:
        raise UnsupportedStateError(f"{name}: the planner gives a {type(data).__qualname__}, and no tensor")
    if data.shape != plan.chunk.sizes:
        raise UnsupportedStateError(
            f"{name}: the planner gives the shape {tuple(data.shape)} for a box of {tuple(plan.chunk.sizes)}"
        )
    return tuple(plan.size), tuple(plan.chunk.offsets), data.detach()


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A stored box of a tensor.

    Attributes:
        path: Path of the tensor in the app state.
        shape: Shape of the whole tensor.
        box: The box of the tensor, and its place in a rank's part of the checkpoint.
    """

    path: str
    shape: tuple[int, ...]
    box: StoredBox

    @property
    def rank(self) -> int:
        """The rank whose part has the box."""
        return self.box.part

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the elements."""
        return dtypes.torch_dtype(self.box.entry.dtype)


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A plain value, which is stored in the manifest itself."""

    value: Any


def metadata_of(manifests: Mapping[int, Manifest]) -> Metadata:
    """Return DCP's metadata of a checkpoint, made from its ranks' manifests.

    ``storage_data`` has a :class:`StoredItem` for each box, and that or a :class:`StoredValue` for other values. For a
    checkpoint of an engine, names are those that DCP would give, and of values that each rank has for itself only the
    lowest rank's are included.

    Raises CorruptStoreError: the manifests describe no state.
    """
    metadata = Metadata({}, planner_data=None, storage_data={})
    for rank, manifest in sorted(manifests.items()):
        part = _Part(rank, manifest)
        own = _entries(manifest.skeleton).get(OWN)
        part.add_engine_state(metadata) if own is None else part.add_planned_state(metadata, own)
    return metadata


def _entries(node: Node) -> dict[Any, Node]:
    if not isinstance(node, MappingNode):
        raise CorruptStoreError(f"a mapping was saved where there is a {type(node).__name__}")
    return dict(zip(mapping_keys(node), node.values, strict=True))


class _Part:
    def __init__(self, rank: int, manifest: Manifest) -> None:
        self._rank = rank
        self._manifest = manifest

    def add_planned_state(self, metadata: Metadata, own: Node) -> None:
        """Add this part of a state that DCP saved to ``metadata``."""
        entries = _entries(own)
        if entries.get("version") != _VERSION or not {"bytes", "planner_data"} <= entries.keys():
            raise CorruptStoreError(f"the part of rank {self._rank} has a form that this version does not know")
        _merge_planner_data(metadata, rebuild(entries["planner_data"], lambda _: None))
        for name, node in _entries(self._manifest.skeleton).items():
            if name != OWN:
                self._add_tensor(metadata, name, paths.escape(name), node)
        for name, node in _entries(entries["bytes"]).items():
            path = paths.child(paths.child(paths.escape(OWN), "bytes"), paths.escape(name))
            for item in self._items(path, node):
                _add_value(metadata, name, item)

    def add_engine_state(self, metadata: Metadata) -> None:
        """Add this part of a state that an engine saved to ``metadata``, under the names that DCP would give."""
        found: dict[int, tuple[str, Node]] = {}  # by the identity of its stand-in
        at = {node.index if isinstance(node, ArrayNode) else id(node): path for path, node in _arrays(self._manifest)}

        def stand_in(node: ArrayNode | ShardedNode, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
            tensor = torch.empty(shape, dtype=dtypes.torch_dtype(dtype), device="meta")
            kept.append(tensor)
            found[id(tensor)] = at[node.index if isinstance(node, ArrayNode) else id(node)], node
            return tensor

        def array(index: int) -> Any:
            entry = self._manifest.tensors[index]
            return _Array() if entry.kind == "ndarray" else stand_in(ArrayNode(index), entry.shape, entry.dtype)

        kept: list[torch.Tensor] = []
        tree = rebuild(self._manifest.skeleton, array, sharded=lambda node: stand_in(node, node.shape, node.dtype))
        try:
            flat, mappings = flatten_state_dict(tree)
        except ValueError as error:
            raise CorruptStoreError(f"DCP would give two leaves of this checkpoint one name: {error}") from None
        _merge_planner_data(metadata, mappings)
        for name, value in flat.items():
            if id(value) in found:
                self._add_tensor(metadata, name, *found[id(value)])
            else:
                _add_value(metadata, name, StoredValue(value))

    def _add_tensor(self, metadata: Metadata, name: str, path: str, node: Node) -> None:
        for item in self._items(path, node):
            known = metadata.state_dict_metadata.get(name)
            if known is None:
                known = TensorStorageMetadata(TensorProperties(dtype=item.dtype), torch.Size(item.shape), [])
                metadata.state_dict_metadata[name] = known
            elif item.box.mesh < 0 or not isinstance(known, TensorStorageMetadata) or known.size != item.shape:
                return  # another rank's own
            index = MetadataIndex(name, item.box.offsets)
            if index not in metadata.storage_data:
                metadata.storage_data[index] = item
                sizes = torch.Size(item.box.entry.shape)
                known.chunks.append(ChunkStorageMetadata(torch.Size(item.box.offsets), sizes))

    def _items(self, path: str, node: Node) -> Iterator[StoredItem]:
        tensors, storages = self._manifest.tensors, self._manifest.storages
        if isinstance(node, ShardedNode):
            pairs, mesh, shape = [*zip(node.offsets, node.boxes, strict=True)], node.mesh, node.shape
        elif isinstance(node, ArrayNode):
            shape = tensors[node.index].shape
            pairs, mesh = [((0,) * len(shape), node)], private_mesh(self._rank)
        else:
            raise CorruptStoreError(f"{path} is no tensor")
        for offsets, box in pairs:
            entry = tensors[box.index]
            start = 0 if entry.storage is None else storages[entry.storage].offset
            yield StoredItem(path, shape, StoredBox(self._rank, mesh, offsets, entry, start))


class _Array:
    """Stand-in for a numpy array."""


def _arrays(manifest: Manifest) -> Iterator[tuple[str, ArrayNode | ShardedNode]]:
    for path, node in leaves(manifest.skeleton):
        if isinstance(node, (ArrayNode, ShardedNode)):
            yield path, node


def _merge_planner_data(metadata: Metadata, data: Any) -> None:
    """Merge planner data into ``metadata`` by DCP's rule: if several ranks have an entry, the lowest rank's is kept."""
    known = metadata.planner_data
    if isinstance(known, dict) and isinstance(data, dict):
        metadata.planner_data = data | known
    elif known is None:
        metadata.planner_data = data


def _add_value(metadata: Metadata, name: str, stored: StoredItem | StoredValue) -> None:
    if metadata.state_dict_metadata.setdefault(name, BytesStorageMetadata()) == BytesStorageMetadata():
        metadata.storage_data.setdefault(MetadataIndex(name), stored)
