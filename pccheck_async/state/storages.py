# SPDX-License-Identifier: Apache-2.0
"""The layout of leaves, by the memory they view, so that aliases are stored once and restored as aliases.

From each storage the byte ranges that its leaves span are saved; ranges that overlap or touch are merged, and bytes
that no leaf covers are left out: a small view does not save its whole base. The ranges of one storage are then
compacted into one :class:`StorageEntry`. A leaf with holes between its elements (``big[:, 0]``) whose range no other
leaf overlaps, equal views aside, is *packed*: stored C-contiguous, as are lazily conjugated or negated tensors.
Expanded dimensions (stride 0) are stored as one item and stay expanded. A leaf whose range other leaves overlap is
stored raw, holes included, since these may be the other leaves' bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter, is_
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.format import dtypes
from pccheck_async.format.manifest import ALIGNMENT, TensorEntry, span
from pccheck_async.state.leaves import HOST, ArrayLeaf, PackedSource, RawSource, Source, Sources
from pccheck_async.state.tensor_access import untyped_storage

_WIDEST: Final = 16
"""Bytes of the widest tensor element: offsets keep the remainder modulo this number, so that views stay aligned."""

Memory: TypeAlias = tuple[Any, int]
"""Device (``"cpu"`` for the host) and address of a storage."""

_SAME_ELEMENTS: Final = attrgetter("first", "shape", "stride", "dtype")
"""Function of a :class:`StorageView`, whose results are equal for views of the same elements."""


@dataclass(slots=True, eq=False)
class StorageView:
    """The memory that a leaf with elements views.

    A view is unresolved if it is lazily conjugated or negated, so that its memory does not hold its elements, or if its
    strides are not multiples of the item size.
    """

    number: int
    leaf: ArrayLeaf
    owner: Any  # keeps the memory: a storage, or the array that others view; not the tensor, whose data may move
    memory: Memory
    low: int  # address of its first byte
    first: int  # address of its first element
    high: int  # the address after its last byte
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # items from one to the next; 0 along a numpy dimension of one item
    dtype: str
    holes: bool  # whether there are bytes between its elements
    unresolved: bool


def view_of(number: int, leaf: ArrayLeaf) -> StorageView | None:
    """Return the view of a leaf; None if it has no bytes. Raises UnsupportedStateError if its memory is gone."""
    if isinstance(leaf.value, torch.Tensor):
        return _tensor_view(number, leaf, leaf.value)
    return _array_view(number, leaf, leaf.value)


def is_unresolved(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is lazily conjugated or negated: its memory does not hold its elements."""
    return tensor.is_conj() or tensor.is_neg()


def is_dense(shape: Sequence[int], steps: Sequence[int], itemsize: int) -> bool:
    """Return whether elements fill their span without holes or overlaps, in any order; ignore expanded dimensions."""
    reach = itemsize
    for step, size in sorted((step, size) for size, step in zip(shape, steps, strict=True) if size > 1 and step):
        if step != reach:
            return False
        reach *= size
    return True


def _tensor_view(number: int, leaf: ArrayLeaf, tensor: torch.Tensor) -> StorageView | None:
    shape = tuple(tensor.shape)
    if 0 in shape:
        return None
    stride, itemsize, elements = tensor.stride(), tensor.element_size(), tensor.numel()
    length, holes = elements * itemsize, False
    if not tensor.is_contiguous():
        reach = span(shape, stride)[1] + 1
        length, holes = reach * itemsize, reach > prod(size for size, step in zip(shape, stride, strict=True) if step)
    try:
        storage = untyped_storage(tensor)
        base, nbytes = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedStateError(
            f"{leaf.path}: this tensor has no memory of its own; save a plain one in its place (torch.zeros(x.shape) "
            f"of torch's own zeros): {error}"
        ) from error
    offset = int(tensor.storage_offset()) * itemsize
    if offset + length > nbytes or base == 0:
        raise UnsupportedStateError(
            f"{leaf.path}: the tensor claims {length} bytes, but its storage has {nbytes}: it was freed or shrunk "
            "(sharded parameters are; gather them before the checkpoint)"
        )
    memory = ("cpu" if tensor.is_cpu else tensor.device, base)
    low, dtype = base + offset, dtypes.TORCH_NAMES[tensor.dtype]
    unresolved = is_unresolved(tensor)
    return StorageView(number, leaf, storage, memory, low, low, low + length, shape, stride, dtype, holes, unresolved)


def _array_view(number: int, leaf: ArrayLeaf, array: np.ndarray[Any, Any]) -> StorageView | None:
    if array.nbytes == 0:
        return None
    shape, itemsize = array.shape, array.itemsize
    steps = tuple(step if size > 1 else 0 for size, step in zip(shape, array.strides, strict=True))
    low, high = span(shape, steps)
    nbytes = itemsize * prod(size for size, step in zip(shape, steps, strict=True) if step)
    first = address_of(array)
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    return StorageView(
        number=number,
        leaf=leaf,
        owner=root,
        memory=("cpu", address_of(root)),
        low=first + low,
        first=first,
        high=first + high + itemsize,
        shape=shape,
        stride=tuple(step // itemsize for step in steps),
        dtype=array.dtype.str,
        holes=high - low + itemsize > nbytes or low < 0,
        unresolved=any(step % itemsize for step in steps),
    )


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Return the address of the first item of an array."""
    address: int = array.__array_interface__["data"][0]
    return address


class Known:
    """A cache of computed values by name: the last one of each name, valid while its inputs are the same.

    Tuples and bytes are the same if they are equal, other inputs if they are identical. May be used from several
    threads.
    """

    def __init__(self) -> None:
        self._values: dict[str, tuple[tuple[Any, ...], Any]] = {}

    def get(self, name: str, of: tuple[Any, ...]) -> Any:
        """Return the value last set for ``name`` if it was computed from the same inputs ``of``; else None."""
        last = self._values.get(name)
        if last is None or len(last[0]) != len(of):
            return None
        return last[1] if all(map(is_, last[0], of)) or all(map(_alike, last[0], of)) else None

    def set(self, name: str, of: tuple[Any, ...], value: _T) -> _T:
        """Remember ``value`` under ``name`` with the inputs ``of`` from which it was computed, and return it."""
        self._values[name] = of, value
        return value


_T = TypeVar("_T")
_COMPARED: Final = (tuple, bytes)


def _alike(one: Any, other: Any) -> bool:
    return one is other or bool(type(other) in _COMPARED and one == other)


@dataclass(slots=True, eq=False)
class Layout:
    """The place of every leaf's bytes in the checkpoint, and their sources.

    Attributes:
        tensors: One entry per leaf.
        storage_nbytes: Bytes of each storage.
        extents: The parts of the storages that hold bytes, in order; bytes between them are padding. Shape
            (parts, 3): per row the number of the storage, the offset in it and the length, in bytes.
        sources: One source per extent.
        source_of: For each leaf the number of its extent and source, -1 if it has no bytes.
        breaks: Numbers of storages that begin a new chunk, even if the one before is not full.
        known: Values computed from the layout; shared by layouts that only differ in the addresses of their sources.
    """

    tensors: tuple[TensorEntry, ...]
    storage_nbytes: tuple[int, ...]
    extents: npt.NDArray[np.int64]
    sources: Sources
    source_of: tuple[int, ...]
    breaks: tuple[int, ...] = ()
    known: Known = field(default_factory=Known)


Packing: TypeAlias = Callable[[Any, Any], PackedSource]
"""Function that makes a packed source of a leaf's value and the object that keeps its memory."""


@dataclass(slots=True, eq=False)
class Origins:
    """How the sources of a layout were made: from which leaves, views and packings."""

    views: list[StorageView | None] = field(default_factory=list)  # of the leaves
    leaves: list[int] = field(default_factory=list)  # of each source the leaf that views its memory,
    shifts: list[int] = field(default_factory=list)  # and how many bytes into that leaf's storage it begins
    packings: dict[int, Packing] = field(default_factory=dict)  # of packed sources, by their numbers
    several: bool = False  # whether a source takes several objects to keep its memory


def arrange(leaves: Iterable[ArrayLeaf]) -> Layout:
    """Return the layout of ``leaves`` by the storages they view.

    Raises:
        UnsupportedStateError: The memory of a leaf is gone or cannot be addressed; names its path.
    """
    return lay_out(leaves)[0]


def lay_out(leaves: Iterable[ArrayLeaf]) -> tuple[Layout, Origins]:
    """Return the layout of ``leaves`` (see :func:`arrange`), and the origins of its sources."""
    builder = _Builder()
    views = builder.origins.views
    for number, leaf in enumerate(leaves):
        views.append(view_of(number, leaf))
        builder.entries.append(_empty_entry(leaf) if views[-1] is None else None)
    builder.source_of = [-1] * len(builder.entries)
    for group in _grouped_by_storage([view for view in views if view is not None]):
        builder.add_storage(_ranges(group))
    entries = tuple(entry for entry in builder.entries if entry is not None)
    extents = np.array(builder.extents, np.int64).reshape(-1, 3)
    layout = Layout(entries, tuple(builder.sizes), extents, Sources(builder.sources), tuple(builder.source_of))
    return layout, builder.origins


def _grouped_by_storage(views: list[StorageView]) -> Iterable[list[StorageView]]:
    """Group views by storage, in the order of the leaves, and join storages of the host whose views overlap.

    Two storage objects may wrap the same memory (from_numpy, DLPack). Storages that only touch are not joined: which
    ones touch depends on the allocator.
    """
    groups: dict[Memory, list[StorageView]] = {}
    for view in views:
        groups.setdefault(("unresolved", view.number) if view.unresolved else view.memory, []).append(view)
    into = {memory: memory for memory in groups}
    end, holder = 0, None
    host = [view for view in views if view.memory[0] == "cpu" and not view.unresolved]
    for view in sorted(host, key=attrgetter("low")):
        if holder is not None and view.low < end and into[view.memory] != into[holder]:
            old, new = into[view.memory], into[holder]
            into = {memory: new if target == old else target for memory, target in into.items()}
        if view.high > end:
            end, holder = view.high, view.memory
    united: dict[Memory, list[StorageView]] = {}
    for memory, group in groups.items():
        united.setdefault(into[memory], []).extend(group)
    return [sorted(group, key=attrgetter("number")) for group in united.values()]


class _Range(NamedTuple):
    low: int
    high: int
    views: list[StorageView]
    packed: bool


def _ranges(views: list[StorageView]) -> list[_Range]:
    """Return the byte ranges of one storage's views, merged where they overlap or touch.

    A range with holes whose views have the same elements is packed, and not merged with neighbours.
    """
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
        packed = cluster.views[0].holes and len({*map(_SAME_ELEMENTS, cluster.views)}) == 1
        if ranges and not packed and not ranges[-1].packed and cluster.low == ranges[-1].high:
            last = ranges[-1]
            ranges[-1] = _Range(last.low, cluster.high, last.views + cluster.views, packed=False)
        else:
            ranges.append(cluster._replace(packed=packed))
    return ranges


class _Builder:
    """Collects the parts of a layout, storage by storage."""

    def __init__(self) -> None:
        self.entries: list[TensorEntry | None] = []  # None until its storage is added
        self.source_of: list[int] = []
        self.sizes: list[int] = []
        self.extents: list[int] = []
        self.sources: list[Source] = []
        self.origins = Origins()

    def add_storage(self, ranges: list[_Range]) -> None:
        number = len(self.sizes)
        views = [view for part in ranges for view in part.views]
        base = next((view for view in views if isinstance(view.leaf.value, torch.Tensor)), views[0]).memory[1]
        end = 0
        for part in ranges:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            if not part.packed:
                offset += (part.low - base) % _WIDEST
            nbytes = self._add_source(part)
            for view in part.views:
                leaf, value = view.leaf, view.leaf.value
                stride, at = view.stride, offset + view.first - part.low
                if part.packed:
                    stride, at = _packed_stride(view.shape, stride), offset
                elif isinstance(value, torch.Tensor) and at % value.element_size():
                    raise UnsupportedStateError(
                        f"{leaf.path}: shares memory with another leaf, but not at a multiple of its item size; save a "
                        "copy of one of them"
                    )
                self.entries[view.number] = TensorEntry(
                    number, view.dtype, view.shape, stride, at, leaf.kind, leaf.requires_grad
                )
                self.source_of[view.number] = len(self.sources) - 1
            self.extents += (number, offset, nbytes)
            end = offset + nbytes
        self.sizes.append(end)

    def _add_source(self, part: _Range) -> int:
        """Add the source of a range, and its origin; return its length."""
        view = part.views[0]
        packed, (device, base) = part.packed, view.memory
        shift, nbytes = 0 if packed else part.low - base, part.high - part.low
        self.origins.leaves.append(view.number)
        self.origins.shifts.append(shift)
        if not packed and (device == "cpu" or device.type == "cuda"):
            owners = {id(each.owner): each.owner for each in part.views}
            self.origins.several |= len(owners) > 1
            owner = view.owner if len(owners) == 1 else tuple(owners.values())
            self.sources.append(RawSource(part.low, nbytes, owner, HOST if device == "cpu" else device.index))
            return nbytes
        kept = tuple(slice(None) if step else slice(0, 1) for step in _packed_stride(view.shape, view.stride))

        def pack(value: Any, storage: Any) -> PackedSource:
            if packed:
                with torch.no_grad():  # a view of integers that require gradients is an error
                    return PackedSource(value[(*kept, ...)])
            flat = torch.empty(0, dtype=torch.uint8, device=value.device)  # a device whose memory has no plain address
            return PackedSource(flat.set_(storage, shift, (nbytes,), (1,)))

        self.origins.packings[len(self.sources)] = pack
        source = pack(view.leaf.value, view.owner)
        self.sources.append(source)
        return source.nbytes


def _empty_entry(leaf: ArrayLeaf) -> TensorEntry:
    value = leaf.value
    if isinstance(value, torch.Tensor):
        dtype, stride = dtypes.TORCH_NAMES[value.dtype], tuple(value.stride())
    else:
        dtype, stride = value.dtype.str, (0,) * value.ndim
    return TensorEntry(None, dtype, tuple(value.shape), stride, 0, leaf.kind, leaf.requires_grad)


def _packed_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return the C-contiguous strides for a shape; dimensions that are expanded in ``stride`` stay expanded."""
    packed = []
    step = 1
    for size, old in zip(reversed(shape), reversed(stride), strict=True):
        expanded = old == 0 and size > 1
        packed.append(0 if expanded else step)
        step *= 1 if expanded else size
    return tuple(reversed(packed))
