# SPDX-License-Identifier: Apache-2.0
"""The memory that stored arrays are read into: new memory for ``load``, live tensors and arrays for ``restore``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs
from torch.nn.parameter import is_lazy

from pccheck_async.errors import CorruptStoreError
from pccheck_async.format import dtypes
from pccheck_async.format.manifest import ALIGNMENT, Manifest, TensorEntry, span, viewed_ranges
from pccheck_async.state.leaves import HOST, KINDS, Array
from pccheck_async.state.storages import address_of
from pccheck_async.state.tensor_access import untyped_storage

_HOST: Final = torch.device("cpu")
_KINDS: Final = {"tensor": "a tensor", "parameter": "a tensor", "ndarray": "a numpy array"}
_NO_MEMORY: Final = "the storage of the tensor here was freed, shrunk or never allocated; gather or clone it first"


_Table: TypeAlias = npt.NDArray[np.uint64]
_Offsets: TypeAlias = npt.NDArray[np.int64]
_Index: TypeAlias = npt.NDArray[np.intp]

# -- memory to fill


class Target(NamedTuple):
    """A range of the payload and the memory that it is copied to, or a regular pattern of ranges of equal length.

    ``payload_offset`` and ``nbytes`` (of one range) are in bytes. ``owner`` keeps the memory alive; ``device`` is the
    index of its CUDA device, or ``HOST``.
    """

    payload_offset: int
    nbytes: int
    address: int
    owner: Any
    device: int = HOST
    sizes: tuple[int, ...] = ()
    """Number of ranges along each dimension of a pattern; empty for a single range."""
    steps: tuple[int, ...] = ()
    """Bytes from one range to the next in the payload, along each dimension."""
    strides: tuple[int, ...] = ()
    """Bytes from one range to the next in memory, along each dimension."""

    @property
    def end(self) -> int:
        """Return the offset in the payload after the last byte that is copied."""
        reach = sum((size - 1) * step for size, step in zip(self.sizes, self.steps, strict=True))
        return self.payload_offset + reach + self.nbytes

    def rows(self, low: int, high: int) -> _Table:
        """Return rows of (address, offset from ``low``, length) for the parts of ranges in bytes ``[low, high)``."""
        sizes, steps = self.sizes, self.steps
        starts = np.array([self.payload_offset], np.int64)
        places = np.array([self.address], np.int64)
        for dim, (size, step, stride) in enumerate(zip(sizes, steps, self.strides, strict=True)):
            first, last = 0, size
            if dim == 0 and step > 0:  # only the rows that reach into the chunk: a tensor may have millions
                inner = self.end - self.payload_offset - (size - 1) * step
                first = max(0, -(-(low - self.payload_offset - inner + 1) // step))
                last = min(size, -(-(high - self.payload_offset) // step))
            index = np.arange(first, max(first, last), dtype=np.int64)
            starts = (starts[:, None] + index * step).reshape(-1)
            places = (places[:, None] + index * stride).reshape(-1)
        begin, end = np.maximum(starts, low), np.minimum(starts + self.nbytes, high)
        return np.stack((places + begin - starts, begin - low, end - begin), axis=1)[begin < end].view(np.uint64)


def cut_ranges(starts: _Offsets, ends: _Offsets, bounds: _Offsets) -> tuple[_Index, _Index, _Offsets, _Offsets]:
    """Cut ranges at ``bounds``, which delimit pieces; drop the parts before the first bound and after the last one.

    Returns:
        Four arrays with one entry per part, ordered by piece: number of the range, number of the piece, first byte,
        and the byte after the last.
    """
    first = np.maximum(np.searchsorted(bounds, starts, side="right") - 1, 0)
    last = np.minimum(np.searchsorted(bounds, ends, side="left"), len(bounds) - 1)
    parts = np.maximum(last - first, 0) * (starts < ends)
    which = np.repeat(np.arange(len(starts)), parts)
    piece = np.repeat(first - np.cumsum(parts) + parts, parts) + np.arange(len(which))
    order = np.argsort(piece, kind="stable")
    which, piece = which[order], piece[order]
    return which, piece, np.maximum(starts[which], bounds[piece]), np.minimum(ends[which], bounds[piece + 1])


_ORDER: Final = itemgetter(0)


class Targets(Iterable[Target]):
    """Targets in the order of the payload; their ranges of it may overlap: bytes stored once go to several places.

    Attributes:
        devices: Indices of the CUDA devices of all targets.
        has_patterns: Whether any target is a pattern of ranges; the ranges may be many and short.
    """

    def __init__(self, targets: Iterable[Target] = ()) -> None:
        self._targets = sorted(targets, key=_ORDER)
        columns = [*zip(*self._targets, strict=True)] or [()] * len(Target._fields)
        self.has_patterns = any(columns[5])
        self._starts = np.array(columns[0], np.int64)
        self._ends = self._starts + np.array(columns[1], np.int64)
        if self.has_patterns:
            self._ends = np.array([target.end for target in self._targets], np.int64)
        self._addresses = np.array(columns[2], np.uint64)
        self._devices = np.array(columns[4], np.int32)
        self.devices: set[int] = {*columns[4]} - {HOST}

    def cut(self, bounds: _Offsets) -> Iterator[tuple[int, _Table, npt.NDArray[np.int32] | None]]:
        """Yield, for each piece of the payload that holds wanted bytes: its number, rows, and the rows' devices.

        ``bounds``, ascending, are the offsets at which pieces begin, and the end of the last one. A row is (address,
        offset in the piece, length). The devices are None if all targets are on the host.
        """
        which, piece, low, high = cut_ranges(self._starts, self._ends, bounds)
        table = np.empty((len(which), 3), np.uint64)
        table[:, 0] = self._addresses[which] + (low - self._starts[which]).astype(np.uint64)
        table[:, 1], table[:, 2] = low - bounds[piece], high - low
        numbers, first = np.unique(piece, return_index=True)
        for number, (start, stop) in zip(numbers.tolist(), pairwise([*first.tolist(), len(piece)]), strict=True):
            rows, targets = table[start:stop], which[start:stop]
            if self.has_patterns:
                rows, targets = self._spread(rows, targets, int(bounds[number]), int(bounds[number + 1]))
            if len(rows):
                yield number, rows, self._devices[targets] if self.devices else None

    def _spread(self, rows: _Table, which: _Index, low: int, high: int) -> tuple[_Table, _Index]:
        """Return rows and their targets with each pattern's single row replaced by one row per range.

        ``which`` has the number of each row's target; the piece is bytes ``[low, high)`` of the payload.
        """
        patterns = [number for number in which.tolist() if self._targets[number].sizes]
        plain = ~np.isin(which, patterns)
        tables = [self._targets[number].rows(low, high) for number in patterns]
        numbers = np.repeat(np.array(patterns, np.intp), [len(table) for table in tables])
        return np.concatenate([rows[plain], *tables]), np.concatenate([which[plain], numbers])

    def __iter__(self) -> Iterator[Target]:
        return iter(self._targets)


# -- new memory

Place: TypeAlias = torch.device | Callable[[torch.UntypedStorage, str], Any]
"""The place for loaded tensors: a device, or a function like ``map_location`` that replaces a storage on the host."""


def place_of(device: object) -> Place:
    """Return the place where ``torch.load(map_location=device)`` would put tensors that were saved on the host.

    Raises RuntimeError for a device that torch does not know, TypeError for a value that is no device.
    """
    if isinstance(device, Mapping):
        device = device.get("cpu", "cpu")
    if callable(device):
        return cast("Place", device)
    place: torch.device = torch.device(device)  # type: ignore[call-overload]
    torch.empty(0, device=place)  # raises here, or the checkpoint would be blamed when arrays cannot be made there
    return place


class _NewMemory(NamedTuple):
    """New memory (``flat``) for a storage, from its byte ``base`` on; arrays view ``ranges`` of the storage."""

    base: int
    flat: Array
    address: int
    ranges: list[tuple[int, int]]


class Allocation:
    """Uninitialised memory for the ``wanted`` arrays of a decoded manifest, one piece per storage, which arrays share.

    A storage that only numpy arrays view is allocated by numpy, any other by torch. ``devices`` has CUDA devices by the
    indices of arrays; a storage lies on one if all its wanted arrays have the same there, else on the host.
    """

    def __init__(
        self, manifest: Manifest, wanted: Iterable[int], devices: Mapping[int, torch.device] = MappingProxyType({})
    ) -> None:
        self._manifest = manifest
        self._moved: dict[tuple[int | None, Place], torch.UntypedStorage] = {}
        self._memories: dict[int, _NewMemory] = {}
        for storage, indices in _by_storage(manifest, wanted).items():
            first, *others = {devices.get(index, _HOST) for index in indices}
            entries = [manifest.tensors[index] for index in indices]
            self._memories[storage] = _allocate(entries, _HOST if others else first)

    @classmethod
    def over(cls, manifest: Manifest, payload: memoryview, wanted: Iterable[int] | None = None) -> Allocation:
        """Return an allocation whose ``wanted`` arrays, by default all, view the manifest's ``payload`` in memory."""
        allocation = cls(manifest, ())
        wanted = range(len(manifest.tensors)) if wanted is None else wanted
        for number, indices in _by_storage(manifest, wanted).items():
            storage, entries = manifest.storages[number], [manifest.tensors[index] for index in indices]
            part = np.frombuffer(payload, np.uint8, storage.nbytes, storage.offset)
            has_tensors = any(entry.kind != "ndarray" for entry in entries)
            flat: Array = torch.from_numpy(part) if has_tensors else part
            allocation._memories[number] = _NewMemory(0, flat, address_of(part), viewed_ranges(entries))
        return allocation

    def targets(self) -> Iterator[Target]:
        """Yield the memory to fill from the payload, or to verify against it, before any array is used."""
        for storage, memory in self._memories.items():
            start, flat = self._manifest.storages[storage].offset, memory.flat
            device = flat.get_device() if isinstance(flat, torch.Tensor) else HOST
            for low, high in memory.ranges:
                yield Target(start + low, high - low, memory.address + low - memory.base, flat, device)

    def array(self, index: int, place: Place = _HOST) -> Array:
        """Return an array over its memory; a tensor at ``place``, where tensors that shared a storage share one again.

        Raises CorruptStoreError if torch or numpy refuses to make an array of this shape and dtype.
        """
        entry = self._manifest.tensors[index]
        storage = None if entry.kind == "ndarray" else self._storage(entry, place)
        try:
            return self._ndarray(entry) if storage is None else self._tensor(entry, storage)
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, OverflowError) as error:
            raise CorruptStoreError(f"array {index} of the checkpoint cannot be made: {error}") from error

    def move(self, place: Place) -> None:
        """Copy the memory of tensors to a device, ready for :meth:`array`; do nothing if ``place`` is a function."""
        if isinstance(place, torch.device):
            for storage, memory in self._memories.items():
                if isinstance(memory.flat, torch.Tensor):
                    self._moved[storage, place] = memory.flat.to(place).untyped_storage()

    def _ndarray(self, entry: TensorEntry) -> np.ndarray[Any, Any]:
        dtype = dtypes.numpy_dtype(entry.dtype)
        if entry.storage is None:
            return np.empty(entry.shape, dtype)
        memory = self._memories[entry.storage]
        flat = memory.flat if isinstance(memory.flat, np.ndarray) else memory.flat.numpy()
        steps = tuple(step * dtype.itemsize for step in entry.stride)
        return np.ndarray(entry.shape, dtype, flat.data, entry.offset - memory.base, steps)

    def _storage(self, entry: TensorEntry, place: Place) -> torch.UntypedStorage:
        """Return the storage of a tensor at ``place``, copied there on first use; an empty one without elements."""
        memory = None if entry.storage is None else self._memories[entry.storage]
        flat = torch.empty(0, dtype=torch.uint8, device=_HOST) if memory is None else memory.flat
        assert isinstance(flat, torch.Tensor)
        if place == _HOST:
            return flat.untyped_storage()
        if (entry.storage, place) not in self._moved:
            if isinstance(place, torch.device):
                moved = flat.to(place).untyped_storage()
            else:
                moved = _untyped(place(flat.untyped_storage(), "cpu"), flat)
            self._moved[entry.storage, place] = moved
        return self._moved[entry.storage, place]

    def _tensor(self, entry: TensorEntry, storage: torch.UntypedStorage) -> torch.Tensor:
        dtype = dtypes.torch_dtype(entry.dtype)
        bits = dtypes.carrier(dtype)
        if entry.storage is None:
            tensor = torch.empty_strided(entry.shape, entry.stride, dtype=bits, device=storage.device)
        else:
            tensor = torch.empty(0, dtype=bits, device=storage.device)
            offset = (entry.offset - self._memories[entry.storage].base) // dtype.itemsize
            tensor.set_(storage, offset, entry.shape, entry.stride)
        tensor = tensor.view(dtype)
        if entry.kind == "parameter":
            return torch.nn.Parameter(tensor, requires_grad=entry.requires_grad)
        return tensor.requires_grad_(entry.requires_grad)


def _by_storage(manifest: Manifest, wanted: Iterable[int]) -> dict[int, list[int]]:
    """Return the ``wanted`` arrays that have elements, grouped by their storages."""
    views: dict[int, list[int]] = {}
    for index in wanted:
        if (storage := manifest.tensors[index].storage) is not None:
            views.setdefault(storage, []).append(index)
    return views


def _untyped(placed: Any, flat: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage that a user's function returned for ``flat``; None stands for the storage of ``flat`` itself.

    Raises TypeError if it returned no storage, ValueError if that is too small.
    """
    storage = flat.untyped_storage() if placed is None else getattr(placed, "_untyped_storage", placed)
    if not isinstance(storage, torch.UntypedStorage):
        raise TypeError(f"the function given as device= returns a storage or None, not {type(placed).__qualname__}")
    if storage.nbytes() < flat.nbytes:
        raise ValueError(f"the function given as device= returned {storage.nbytes()} bytes for {flat.nbytes}")
    return storage


def _allocate(entries: list[TensorEntry], device: torch.device) -> _NewMemory:
    ranges = viewed_ranges(entries)
    base = ranges[0][0] // ALIGNMENT * ALIGNMENT
    nbytes = ranges[-1][1] - base
    if all(entry.kind == "ndarray" for entry in entries):
        array = np.empty(nbytes, np.uint8)
        return _NewMemory(base, array, address_of(array), ranges)
    tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return _NewMemory(base, tensor, tensor.data_ptr(), ranges)


# -- whether live memory can take a stored array


def describe(entry: TensorEntry) -> str:
    """Return dtype and shape of a stored array for a message."""
    return f"{entry.dtype} {tuple(entry.shape)}"


def difference(entry: TensorEntry, array: Array, cast_to: torch.dtype | None = None) -> str:
    """Return why ``array`` cannot take the bytes of the stored one; empty if it can.

    A floating-point tensor of dtype ``cast_to`` can take another floating-point dtype, too.
    """
    if (
        isinstance(array, torch.Tensor)
        and array.dtype == cast_to
        and entry.kind != "ndarray"
        and dtypes.torch_dtype(entry.dtype).is_floating_point
    ):
        entry = structs.replace(entry, dtype=dtypes.TORCH_NAMES[array.dtype])
    if isinstance(array, torch.Tensor):
        kind, dtype, trouble = "tensor", dtypes.TORCH_NAMES.get(array.dtype, ""), _tensor_trouble(array)
    else:
        kind, dtype = "ndarray", dtypes.numpy_name(array.dtype) or str(array.dtype)
        trouble = "" if array.flags.writeable else "the array here is read-only"
    if _KINDS[kind] != _KINDS[entry.kind]:
        return f"{_KINDS[kind]} here, {_KINDS[entry.kind]} in the checkpoint"
    if trouble:
        return trouble
    if dtype != entry.dtype or tuple(array.shape) != entry.shape:
        return f"{dtype} {tuple(array.shape)} here, {describe(entry)} in the checkpoint"
    if isinstance(array, torch.Tensor) and array.stride() == entry.stride:
        return ""
    steps = steps_of(array)
    if is_as_stored(entry, steps):
        return ""
    for size, step, stored in zip(entry.shape, steps, entry.stride, strict=True):
        if size > 1 and step == 0 and stored != 0:
            return "the tensor here is expanded, the one in the checkpoint is not"
    if _overlaps_itself(entry.shape, steps, entry.itemsize):
        return "the elements of the tensor here overlap each other otherwise than in the checkpoint"
    return ""


def memory_trouble(tensor: torch.Tensor) -> str:
    """Return why elements cannot be copied into ``tensor``, however they were stored; empty if they can."""
    if trouble := _tensor_trouble(tensor):
        return trouble
    overlaps = tensor.numel() and _overlaps_itself(tuple(tensor.shape), steps_of(tensor), tensor.element_size())
    return "the elements of the tensor here overlap each other" if overlaps else ""


def _tensor_trouble(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return "an uninitialized lazy parameter here; run the module once before restoring"
    try:
        if type(tensor) not in KINDS and type(tensor.detach()) is not torch.Tensor:  # as in a module's state_dict()
            return f"a {type(tensor).__qualname__} here, a plain tensor in the checkpoint"
        if tensor.is_meta:
            return "on the meta device here; materialise it first (module.to_empty(device=...))"
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return "not a plain strided tensor here"
        if not tensor.numel():
            return ""
        last = tensor.numel() - 1 if tensor.is_contiguous() else span(tensor.shape, tensor.stride())[1]
        reach = tensor.storage_offset() + last + 1
        storage = untyped_storage(tensor)  # its address: that of a view without memory would be its offset
        return "" if reach * tensor.element_size() <= storage.nbytes() and storage.data_ptr() else _NO_MEMORY
    except RuntimeError:  # torch._efficientzerotensor has no storage; a tensor that left vmap cannot even be detached
        return _NO_MEMORY


def steps_of(array: Array) -> tuple[int, ...]:
    """Return the strides of an array in bytes."""
    if isinstance(array, torch.Tensor):
        itemsize = array.element_size()
        return tuple(step * itemsize for step in array.stride())
    return array.strides


def is_as_stored(entry: TensorEntry, steps: tuple[int, ...]) -> bool:
    """Return whether an array is stored with the strides ``steps``, in bytes."""
    itemsize = entry.itemsize
    for size, here, stored in zip(entry.shape, steps, entry.stride, strict=True):
        if size > 1 and here != stored * itemsize:
            return False
    return True


def _overlaps_itself(shape: tuple[int, ...], steps: tuple[int, ...], itemsize: int) -> bool:
    """Return whether elements may share memory, expanded dimensions (of step 0) aside."""
    reach = itemsize
    for step, size in sorted((abs(step), size) for size, step in zip(shape, steps, strict=True) if size > 1 and step):
        if step < reach:
            return True
        reach += (size - 1) * step
    return False
