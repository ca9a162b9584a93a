"""The layout of leaves, by the memory they view, so that aliases are stored once and come back aliased.

Of every storage the byte ranges are kept that its leaves span; ranges that overlap or touch are merged, and bytes that
no leaf covers are left out: a small view does not drag its base along. The ranges of one storage are then compacted
into one :class:`StorageEntry`. A leaf (or several leaves that are the same view) that shares its range with no other
and has holes in it (``big[:, 0]``) is *packed*: stored C-contiguous, as are lazily conjugated or negated tensors.
Dimensions that are expanded (stride 0) take one item and stay expanded. A leaf whose range others overlap is stored
raw, holes included, since they may be the others' bytes.

Addresses and sizes are read anew at each save (:mod:`pccheck_async.state.cache.layout_cache`): offloading, FSDP and
``resize_`` move storages between two saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.format import dtypes
from pccheck_async.format.manifest import ALIGNMENT, TensorEntry, span
from pccheck_async.state.leaves import ArrayLeaf
from pccheck_async.state.sources import PackedSource, Sources
from pccheck_async.state.tensor_access import untyped_storage

__all__ = ["Layout", "Origins", "View", "arrange", "is_unresolved", "lay_out", "view_of"]

_WIDEST: Final = 16
"""Bytes of the widest tensor element: addresses keep their remainder by it, so that views stay aligned."""


Memory: TypeAlias = tuple[Any, int]
"""Device (``"cpu"`` for the host) and address of a storage."""


@dataclass(slots=True, eq=False)
class View:
    """What a leaf with elements views: which memory, from which address to which, with which strides.

    Attributes:
        leaf: The leaf's index.
        value: The tensor or array.
        owner: What keeps the memory: the storage, or the array that others view; not the tensor, whose data may move.
        memory: Device and address of the storage.
        low: Address of its first byte.
        high: The address after its last byte.
        first: Address of its first element.
        shape: Items per dimension.
        stride: Items from one to the next; 0 along a numpy dimension of one item.
        itemsize: Bytes of an item.
        dtype: Name of the dtype.
        holes: Whether there are bytes between its elements.
        unresolved: Whether its memory does not hold its elements as they are (yet to be conjugated or negated), or its
            strides are no multiples of the item size.
    """

    leaf: int
    value: Any
    owner: Any
    memory: Memory
    low: int
    high: int
    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int
    dtype: str
    holes: bool
    unresolved: bool

    def same(self, other: View) -> bool:
        """Whether both view the same elements."""
        mine = (self.first, self.shape, self.stride, self.dtype)
        return mine == (other.first, other.shape, other.stride, other.dtype)


def view_of(index: int, leaf: ArrayLeaf) -> View | None:
    """Return what a leaf views; None where it has no bytes. Raises UnsupportedStateError where its memory is gone."""
    if isinstance(leaf.value, torch.Tensor):
        return _tensor_view(index, leaf.path, leaf.value)
    return _array_view(index, leaf.value)


def is_unresolved(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is yet to be conjugated or negated."""
    return tensor.is_conj() or tensor.is_neg()


def _tensor_view(index: int, path: str, tensor: torch.Tensor) -> View | None:
    shape = tuple(tensor.shape)
    if 0 in shape:
        return None
    stride = tensor.stride()
    itemsize = tensor.element_size()
    last = span(shape, stride)[1]
    try:
        storage = untyped_storage(tensor)
        base, nbytes = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedStateError(
            f"{path}: this tensor has no memory of its own; save a plain one in its place (torch.zeros(x.shape) of "
            f"torch's own zeros): {error}"
        ) from error
    offset = int(tensor.storage_offset()) * itemsize
    length = (last + 1) * itemsize
    if offset + length > nbytes or base == 0:
        raise UnsupportedStateError(
            f"{path}: the tensor claims {length} bytes, but its storage has {nbytes}: it was freed or shrunk "
            "(sharded parameters are; gather them before the checkpoint)"
        )
    return View(
        leaf=index,
        value=tensor,
        owner=storage,
        memory=("cpu" if tensor.is_cpu else tensor.device, base),
        low=base + offset,
        high=base + offset + length,
        first=base + offset,
        shape=shape,
        stride=stride,
        itemsize=itemsize,
        dtype=dtypes.TORCH_NAMES[tensor.dtype],
        holes=last >= prod(size for size, step in zip(shape, stride, strict=True) if step),
        unresolved=is_unresolved(tensor),
    )


def _array_view(index: int, array: np.ndarray[Any, Any]) -> View | None:
    itemsize = array.itemsize
    if array.nbytes == 0:
        return None
    shape = array.shape
    steps = tuple(step if size > 1 else 0 for size, step in zip(shape, array.strides, strict=True))
    low, high = span(shape, steps)
    elements = prod(size for size, step in zip(shape, steps, strict=True) if step)
    whole = all(step % itemsize == 0 for step in steps)
    first = _address(array)
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    return View(
        leaf=index,
        value=array,
        owner=root,
        memory=("cpu", _address(root)),
        low=first + low,
        high=first + high + itemsize,
        first=first,
        shape=shape,
        stride=tuple(step // itemsize for step in steps),
        itemsize=itemsize,
        dtype=array.dtype.str,
        holes=high - low + itemsize > elements * itemsize or low < 0,
        unresolved=not whole,
    )


def _address(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the bytes of every leaf lie in the checkpoint, and where they come from.

    Attributes:
        tensors: One entry per leaf.
        storage_nbytes: Bytes of each storage.
        extents: The parts of the storages that hold bytes, in order; what lies between them is padding. Shape
            (parts, 3): per row the number of the storage, the offset in it and the length, in bytes.
        sources: One source per extent.
        source_of: For each leaf the number of its extent and source, -1 where it has no bytes.
        breaks: Numbers of storages that begin a new chunk, whatever is in the one before.
    """

    tensors: tuple[TensorEntry, ...]
    storage_nbytes: tuple[int, ...]
    extents: npt.NDArray[np.int64]
    sources: Sources
    source_of: tuple[int, ...]
    breaks: tuple[int, ...] = ()

    def filled(self, sources: Sources) -> Layout:
        """Return the same layout of other leaves."""
        return Layout(self.tensors, self.storage_nbytes, self.extents, sources, self.source_of, self.breaks)

    def broken_at(self, storages: tuple[int, ...]) -> Layout:
        """Return the same layout with other ``breaks``."""
        return Layout(self.tensors, self.storage_nbytes, self.extents, self.sources, self.source_of, storages)


Packing: TypeAlias = Callable[[Any, Any], PackedSource]
"""Makes a packed source of a leaf and what keeps the leaf's memory."""


@dataclass(slots=True, eq=False)
class Origins:
    """Where the sources of a layout come from.

    Attributes:
        leaves: Of each source the leaf that views its memory.
        shifts: And how far from the beginning of that leaf's storage it begins, in bytes.
        packings: How packed sources are made, by their number.
        several: Whether a source takes several objects to keep its memory.
    """

    leaves: list[int] = field(default_factory=list)
    shifts: list[int] = field(default_factory=list)
    packings: dict[int, Packing] = field(default_factory=dict)
    several: bool = False


class _Range(NamedTuple):
    low: int
    high: int
    views: list[View]
    packed: bool


def arrange(leaves: Iterable[ArrayLeaf]) -> Layout:
    """Lay out ``leaves`` by the storages they view.

    Raises:
        UnsupportedStateError: The memory of a leaf is gone or cannot be addressed; names its path.
    """
    return lay_out(leaves)[0]


def lay_out(state_leaves: Iterable[ArrayLeaf]) -> tuple[Layout, Origins]:
    """Do the same; return where the sources come from, too."""
    leaves = list(state_leaves)
    whole = _WholeTensors()
    views: list[View] = []
    builder = _Builder(leaves)
    for index, leaf in enumerate(leaves):
        if not whole.add(index, leaf.value):
            view = view_of(index, leaf)
            if view is None:
                builder.empty(index)
            else:
                views.append(view)
    shared = whole.shared(views)
    views += [view for view in (view_of(index, leaves[index]) for index in shared) if view is not None]
    views.sort(key=lambda view: view.leaf)
    groups = {group[0].leaf: group for group in _grouped_by_storage(views)}
    alone = dict(zip(whole.leaves, zip(whole.bases, whole.lows, whole.highs, whole.owners, strict=True), strict=True))
    for index in shared:
        del alone[index]
    for index in sorted([*alone, *groups]):  # in the order of the leaves, so that equal states have equal layouts
        if index in groups:
            builder.storage(_ranges(groups[index]))
        else:
            builder.alone(index, *alone[index])
    return builder.layout()


class _WholeTensors:
    """Contiguous tensors in host memory: most leaves are, and most of those share their storage with no other.

    Columns instead of an object each: the training thread waits meanwhile, and so it would for the garbage collector.
    """

    def __init__(self) -> None:
        self.leaves: list[int] = []
        self.bases: list[int] = []
        self.lows: list[int] = []
        self.highs: list[int] = []
        self.owners: list[Any] = []

    def add(self, index: int, value: Any) -> bool:
        """Add a leaf; False where it is another kind of leaf."""
        if not (isinstance(value, torch.Tensor) and value.is_cpu and value.is_contiguous()) or is_unresolved(value):
            return False
        try:
            storage = untyped_storage(value)
            base = storage.data_ptr()
        except RuntimeError:  # no memory at all: view_of refuses it with its path
            return False
        itemsize = value.element_size()
        low = base + int(value.storage_offset()) * itemsize
        high = low + value.numel() * itemsize
        if not low < high <= base + storage.nbytes():
            return False
        self.leaves.append(index)
        self.bases.append(base)
        self.lows.append(low)
        self.highs.append(high)
        self.owners.append(storage)
        return True

    def shared(self, others: Iterable[View]) -> list[int]:
        """Return the leaves that share their storage, or any of their bytes, with another one or with ``others``."""
        host = [(view.memory[1], view.low, view.high) for view in others if view.memory[0] == "cpu"]
        bases, lows, highs = (
            np.array([*mine, *(row[column] for row in host)], np.int64)
            for column, mine in enumerate((self.bases, self.lows, self.highs))
        )
        _, inverse, counts = np.unique(bases, return_inverse=True, return_counts=True)
        crowded = counts[inverse.reshape(-1)] > 1
        order = np.argsort(lows)
        reach = np.maximum.accumulate(highs[order])
        touched = lows[order][1:] < reach[:-1]
        crowded[order[1:]] |= touched
        crowded[order[:-1]] |= lows[order][1:] < highs[order][:-1]
        return [leaf for leaf, shared in zip(self.leaves, crowded[: len(self.leaves)].tolist(), strict=True) if shared]


def _grouped_by_storage(views: Sequence[View]) -> Iterable[list[View]]:
    """Group views by storage, and join storages of the host whose views overlap.

    Two objects may wrap the same memory (from_numpy, DLPack). Storages that only touch stay apart: which ones do is the
    allocator's whim.
    """
    groups: dict[Memory, list[View]] = {}
    for view in views:
        groups.setdefault(("unresolved", view.leaf) if view.unresolved else view.memory, []).append(view)
    into = {memory: memory for memory in groups}
    end, holder = 0, None
    host = [view for view in views if view.memory[0] == "cpu" and not view.unresolved]
    for view in sorted(host, key=lambda view: view.low):
        if holder is not None and view.low < end and into[view.memory] != into[holder]:
            old, new = into[view.memory], into[holder]
            into = {memory: new if target == old else target for memory, target in into.items()}
        if view.high > end:
            end, holder = view.high, view.memory
    united: dict[Memory, list[View]] = {}
    for memory, group in groups.items():
        united.setdefault(into[memory], []).extend(group)
    return [sorted(group, key=lambda view: view.leaf) for group in united.values()]


def _ranges(views: list[View]) -> list[_Range]:
    """Merge the spans of one storage's views; those alone in theirs with holes in them are packed."""
    if len(views) == 1:
        view = views[0]
        return [_Range(view.low, view.high, views, view.holes or view.unresolved)]
    views.sort(key=lambda view: (view.low, -view.high))
    clusters: list[_Range] = []
    for view in views:
        if clusters and view.low < clusters[-1].high:
            last = clusters[-1]
            last.views.append(view)
            clusters[-1] = last._replace(high=max(last.high, view.high))
        else:
            clusters.append(_Range(view.low, view.high, [view], packed=False))
    ranges: list[_Range] = []
    for cluster in clusters:
        packed = cluster.views[0].holes and all(view.same(cluster.views[0]) for view in cluster.views)
        if ranges and not packed and not ranges[-1].packed and cluster.low == ranges[-1].high:
            last = ranges[-1]
            ranges[-1] = _Range(last.low, cluster.high, last.views + cluster.views, packed=False)
        else:
            ranges.append(cluster._replace(packed=packed))
    return ranges


class _Builder:
    def __init__(self, leaves: Sequence[ArrayLeaf]) -> None:
        self._leaves = leaves
        self._entries: list[TensorEntry | None] = [None] * len(leaves)
        self._source_of = [-1] * len(leaves)
        self._sizes: list[int] = []
        self._extents: list[int] = []
        self._sources = Sources()
        self._origins = Origins()

    def empty(self, index: int) -> None:
        leaf = self._leaves[index]
        value = leaf.value
        if isinstance(value, torch.Tensor):
            dtype, stride = dtypes.TORCH_NAMES[value.dtype], tuple(value.stride())
        else:
            dtype, stride = value.dtype.str, (0,) * value.ndim
        self._entries[index] = TensorEntry(None, dtype, tuple(value.shape), stride, 0, leaf.kind, leaf.requires_grad)

    def alone(self, index: int, base: int, low: int, high: int, owner: Any) -> None:
        leaf = self._leaves[index]
        value: Any = leaf.value
        number, offset, nbytes = len(self._sizes), (low - base) % _WIDEST, high - low
        name = dtypes.TORCH_NAMES[value.dtype]
        self._entries[index] = TensorEntry(
            number, name, tuple(value.shape), value.stride(), offset, leaf.kind, leaf.requires_grad
        )
        self._source_of[index] = len(self._sources)
        self._sources.add(low, nbytes, owner)
        self._origins.leaves.append(index)
        self._origins.shifts.append(low - base)
        self._extents += (number, offset, nbytes)
        self._sizes.append(offset + nbytes)

    def storage(self, ranges: list[_Range]) -> None:
        number = len(self._sizes)
        views = [view for part in ranges for view in part.views]
        base = next((view for view in views if isinstance(view.value, torch.Tensor)), views[0]).memory[1]
        cursor = 0
        for part in ranges:
            cursor = -(-cursor // ALIGNMENT) * ALIGNMENT
            if part.packed:
                nbytes = self._pack(number, cursor, part)
            else:
                cursor += (part.low - base) % _WIDEST
                nbytes = self._place(number, cursor, part)
            self._extents += (number, cursor, nbytes)
            cursor += nbytes
        self._sizes.append(cursor)

    def _pack(self, number: int, offset: int, part: _Range) -> int:
        view = part.views[0]
        stride = _packed_stride(view.shape, view.stride)
        kept = tuple(slice(None) if step else slice(0, 1) for step in stride)
        nbytes = self._add_packed(view, 0, lambda value, _: PackedSource(value[(*kept, ...)]))
        for each in part.views:
            self._enter(each, number, stride, offset)
        return nbytes

    def _add_packed(self, view: View, shift: int, pack: Packing) -> int:
        self._origins.packings[len(self._sources)] = pack
        self._origins.leaves.append(view.leaf)
        self._origins.shifts.append(shift)
        source = pack(view.value, view.owner)
        self._sources.add_packed(source)
        return source.nbytes

    def _place(self, number: int, offset: int, part: _Range) -> int:
        first = part.views[0]
        nbytes = part.high - part.low
        shift = part.low - first.memory[1]
        where = first.memory[0]
        if where != "cpu" and where.type != "cuda":
            self._add_packed(first, shift, lambda value, storage: _flat(value.device, storage, shift, nbytes))
        else:
            owner = _owners(part.views)
            if where == "cpu":
                self._sources.add(part.low, nbytes, owner)
            else:
                self._sources.add_device(part.low, nbytes, owner, where.index)
            self._origins.leaves.append(first.leaf)
            self._origins.shifts.append(shift)
            self._origins.several |= owner is not first.owner
        for view in part.views:
            at = offset + view.first - part.low
            if isinstance(view.value, torch.Tensor) and at % view.itemsize:
                raise UnsupportedStateError(
                    f"{self._leaves[view.leaf].path}: shares memory with another leaf, but not at a multiple of its "
                    "item size; save a copy of one of them"
                )
            self._enter(view, number, view.stride, at)
        return nbytes

    def _enter(self, view: View, number: int, stride: tuple[int, ...], offset: int) -> None:
        leaf = self._leaves[view.leaf]
        self._entries[view.leaf] = TensorEntry(
            number, view.dtype, view.shape, stride, offset, leaf.kind, leaf.requires_grad
        )
        self._source_of[view.leaf] = len(self._sources) - 1

    def layout(self) -> tuple[Layout, Origins]:
        entries = tuple(entry for entry in self._entries if entry is not None)
        extents = np.array(self._extents, np.int64).reshape(-1, 3)
        layout = Layout(entries, tuple(self._sizes), extents, self._sources, tuple(self._source_of))
        return layout, self._origins


def _flat(device: torch.device, storage: Any, offset: int, nbytes: int) -> PackedSource:
    """Bytes of a storage that is not in host memory."""
    flat = torch.empty(0, dtype=torch.uint8, device=device)
    flat.set_(storage, offset, (nbytes,), (1,))
    return PackedSource(flat)


def _owners(views: list[View]) -> Any:
    owners = {id(view.owner): view.owner for view in views}
    return views[0].owner if len(owners) == 1 else tuple(owners.values())


def _packed_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """C-contiguous strides; a dimension that was expanded stays so."""
    packed = []
    step = 1
    for size, old in zip(reversed(shape), reversed(stride), strict=True):
        expanded = old == 0 and size > 1
        packed.append(0 if expanded else step)
        step *= 1 if expanded else size
    return tuple(reversed(packed))
