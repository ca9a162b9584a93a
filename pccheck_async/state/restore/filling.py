"""Live arrays that take the bytes of stored ones: in place where the memory agrees, else by a copy at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from pccheck_async.format import dtypes
from pccheck_async.format.manifest import Manifest, TensorEntry, span
from pccheck_async.state.restore.allocation import Allocation
from pccheck_async.state.save.flatten import Array
from pccheck_async.state.sources import HOST, as_bits
from pccheck_async.state.targets import Target

__all__ = ["Filling", "describe", "difference"]


@dataclass(slots=True, eq=False)
class _Live:
    path: str
    index: int
    entry: TensorEntry
    array: Array
    strict: bool
    memory: Any  # device
    address: int
    steps: tuple[int, ...]  # bytes from one item to the next along each dimension
    in_place: bool
    lazy: bool

    def extent(self) -> tuple[int, int]:
        low, high = span(self.entry.shape, self.steps)
        return self.address + low, self.address + high + self.entry.itemsize

    def view(self) -> tuple[Any, ...]:
        return self.entry.storage, self.entry.offset, self.entry.stride, self.address, self.steps, self.entry.shape

    def lies_as_stored(self) -> bool:
        return _agree(self.entry.shape, self.steps, _stored_steps(self.entry))


class Filling:
    """The live arrays of one restore.

    A live array may be *strict* (its bytes must become the stored ones) or not (where that cannot be, a new array takes
    its place). Arrays that share memory take their bytes twice if the stored ones share theirs alike. If the stored
    ones do not, one would overwrite the other: that is a difference for strict arrays, and new memory for others.
    """

    def __init__(self, manifest: Manifest, by_address: Callable[[], bool] = lambda: False) -> None:
        self._manifest = manifest
        self._by_address = by_address
        self._live: dict[int, _Live] = {}
        self._preferred: dict[int, torch.device] = {}
        self._allocation = Allocation(manifest, ())

    def prefer(self, index: int, device: torch.device) -> None:
        """Allocate stored array ``index``, should that come to pass, on ``device``, should that be within reach."""
        if device.type == "cuda" and self._by_address():
            self._preferred[index] = device

    def add(self, path: str, index: int, array: Array, *, strict: bool) -> None:
        """Let ``array`` take the bytes of stored array ``index``; :func:`difference` found none between the two."""
        entry = self._manifest.tensors[index]
        steps = _steps(array)
        on_host = not isinstance(array, torch.Tensor) or array.is_cpu
        lazy = isinstance(array, torch.Tensor) and (array.is_conj() or array.is_neg())
        dense = _dense(entry.shape, steps, entry.itemsize) and _agree(entry.shape, steps, _stored_steps(entry))
        self._live[index] = _Live(
            path=path,
            index=index,
            entry=entry,
            array=array,
            strict=strict,
            memory=None if on_host else array.device,
            address=array.data_ptr() if isinstance(array, torch.Tensor) else array.__array_interface__["data"][0],
            steps=steps,
            in_place=dense and not lazy and (on_host or self._reaches(array)),
            lazy=lazy,
        )

    def conflicts(self) -> list[str]:
        """Drop arrays that would overwrite another; return those that must not be dropped, with what they overlap."""
        troubles = []
        for cluster in _overlapping([live for live in self._live.values() if live.entry.storage is not None]):
            for one, other in _pairs(cluster):
                if not {one.index, other.index} <= self._live.keys() or _alike(one, other) or not _share(one, other):
                    continue
                loose = next((live for live in (other, one) if not live.strict), None)
                if loose is not None:
                    del self._live[loose.index]
                elif one.lazy or other.lazy:
                    troubles.append(
                        f"{other.path} (a view of the memory of {one.path} here, conjugated or negated; the checkpoint "
                        "has them apart: give one memory of its own with resolve_conj() or resolve_neg())"
                    )
                else:
                    troubles.append(f"{other.path} (shares memory with {one.path} here, but not in the checkpoint)")
        return troubles

    def allocate(self, wanted: set[int]) -> None:
        """Allocate memory for the wanted arrays that are not live, and for the live ones that are copied at the end."""
        direct = {live.index for live in self._live.values() if live.in_place}
        self._allocation = Allocation(self._manifest, sorted((wanted | set(self._live)) - direct), self._preferred)

    def targets(self) -> Iterator[Target]:
        """Yield where the bytes go."""
        yield from self._allocation.targets()
        for live in self._live.values():
            if live.in_place and live.entry.storage is not None:
                low, high = live.entry.extent
                offset = self._manifest.storages[live.entry.storage].offset + low
                array = live.array
                owner = array.untyped_storage() if isinstance(array, torch.Tensor) else array
                device = HOST if live.memory is None else live.memory.index
                yield Target(offset, high - low, live.address, owner, device)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the live arrays that are filled in place."""
        return tuple(live.path for live in self._live.values() if live.in_place)

    def finish(self) -> None:
        """Copy what could not be filled in place, and let autograd know of what was."""
        for live in self._live.values():
            if not live.in_place:
                _copy(live, self._allocation.array(live.index))
            elif isinstance(live.array, torch.Tensor) and not live.array.is_inference():
                torch.autograd.graph.increment_version(live.array)

    def _reaches(self, array: Array) -> bool:
        return isinstance(array, torch.Tensor) and array.is_cuda and self._by_address()

    def value(self, index: int) -> Array:
        """Return the array that now has the bytes: the live one, or a new one."""
        live = self._live.get(index)
        return live.array if live is not None else self._allocation.array(index)

    def inference(self, indices: Iterable[int]) -> bool:
        """Whether an inference tensor is among these of the live ones: they change only in inference mode."""
        lives = (self._live[index] for index in indices if index in self._live)
        return any(isinstance(live.array, torch.Tensor) and live.array.is_inference() for live in lives)


def describe(entry: TensorEntry) -> str:
    """Return dtype and shape of a stored array for a message."""
    return f"{entry.dtype} {tuple(entry.shape)}"


def difference(entry: TensorEntry, array: Array) -> str:
    """Return why ``array`` cannot take the bytes of the stored one; empty where it can."""
    if isinstance(array, torch.Tensor):
        trouble = _tensor_trouble(array)
        kind, dtype = "tensor", dtypes.TORCH_NAMES.get(array.dtype, "")
    else:
        trouble = "" if array.flags.writeable else "the array here is read-only"
        kind, dtype = "ndarray", dtypes.numpy_name(array.dtype) or str(array.dtype)
    if (kind == "ndarray") is not (entry.kind == "ndarray"):
        return f"{_KINDS[kind]} here, {_KINDS[entry.kind]} in the checkpoint"
    if trouble:
        return trouble
    if dtype != entry.dtype or tuple(array.shape) != entry.shape:
        return f"{dtype} {tuple(array.shape)} here, {describe(entry)} in the checkpoint"
    steps = _steps(array)
    if _agree(entry.shape, steps, _stored_steps(entry)):
        return ""
    for size, step, stored in zip(entry.shape, steps, entry.stride, strict=True):
        if size > 1 and step == 0 and stored != 0:
            return "the tensor here is expanded, the one in the checkpoint is not"
    if _overlaps_itself(entry.shape, steps, entry.itemsize):
        return "the elements of the tensor here overlap each other otherwise than in the checkpoint"
    return ""


_KINDS = {"tensor": "a tensor", "parameter": "a tensor", "ndarray": "a numpy array"}
_NO_MEMORY = "the storage of the tensor here was freed or shrunk, or there never was one; gather or clone it first"


def _tensor_trouble(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return "an uninitialized lazy parameter here; run the module once before restoring"
    try:
        return _memory_trouble(tensor)
    except (
        RuntimeError
    ):  # torch._efficientzerotensor has no storage; what left the vmap that made it, not even a detach
        return _NO_MEMORY


def _memory_trouble(tensor: torch.Tensor) -> str:
    if type(tensor.detach()) is not torch.Tensor:  # what state_dict() of a module would have saved
        return f"a {type(tensor).__qualname__} here, a plain tensor in the checkpoint"
    if tensor.is_meta:
        return "on the meta device here; materialise it first (module.to_empty(device=...))"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return "not a plain strided tensor here"
    if not tensor.numel():
        return ""
    reach = tensor.storage_offset() + span(tensor.shape, tensor.stride())[1] + 1
    storage = tensor.untyped_storage()  # whose address it is: a view's, of no memory, is its offset
    return "" if reach * tensor.element_size() <= storage.nbytes() and storage.data_ptr() else _NO_MEMORY


def _steps(array: Array) -> tuple[int, ...]:
    if isinstance(array, torch.Tensor):
        itemsize = array.element_size()
        return tuple(step * itemsize for step in array.stride())
    return array.strides


def _stored_steps(entry: TensorEntry) -> tuple[int, ...]:
    itemsize = entry.itemsize
    return tuple(step * itemsize for step in entry.stride)


def _agree(shape: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one == other or all(a == b for size, a, b in zip(shape, one, other, strict=True) if size > 1)


def _dense(shape: tuple[int, ...], steps: tuple[int, ...], itemsize: int) -> bool:
    """Whether the elements fill their span without holes or overlaps, apart from expanded dimensions."""
    reach = itemsize
    for step, size in sorted((step, size) for size, step in zip(shape, steps, strict=True) if size > 1 and step):
        if step != reach:
            return False
        reach *= size
    return True


def _overlaps_itself(shape: tuple[int, ...], steps: tuple[int, ...], itemsize: int) -> bool:
    """Whether elements may share memory, apart from expanded dimensions."""
    reach = itemsize
    for step, size in sorted((abs(step), size) for size, step in zip(shape, steps, strict=True) if size > 1 and step):
        if step < reach:
            return True
        reach += (size - 1) * step
    return False


def _copy(live: _Live, stored: Array) -> None:
    """Copy bit for bit; of expanded dimensions, one item."""
    once = tuple(
        slice(0, 1) if step == 0 and size > 1 else slice(None)
        for size, step in zip(live.entry.shape, live.steps, strict=True)
    )
    if isinstance(live.array, torch.Tensor):
        assert isinstance(stored, torch.Tensor)
        target, source = live.array.detach()[(*once, ...)], stored.detach()[(*once, ...)]
        with _writing(live.array):
            if target.is_conj() or target.is_neg():
                target.copy_(source)
            else:
                as_bits(target).copy_(as_bits(source))
        return
    assert isinstance(stored, np.ndarray)
    live.array[(*once, ...)] = stored[(*once, ...)]


def _writing(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    return torch.inference_mode() if tensor.is_inference() else torch.no_grad()


def _overlapping(lives: list[_Live]) -> Iterator[list[_Live]]:
    """Yield groups of arrays whose spans of memory overlap, unless all of a group lie alike in the checkpoint."""
    spans = sorted(((str(live.memory), *live.extent(), live) for live in lives), key=lambda item: item[:3])
    cluster: list[_Live] = []
    memory, end = "", 0
    for where, low, high, live in spans:
        if where != memory or low >= end:
            if not _all_alike(cluster):
                yield cluster
            cluster, memory, end = [], where, high
        cluster.append(live)
        end = max(end, high)
    if not _all_alike(cluster):
        yield cluster


def _pairs(cluster: list[_Live]) -> Iterator[tuple[_Live, _Live]]:
    """Yield those of a group, in the order of their memory, whose spans overlap."""
    extents = [live.extent() for live in cluster]
    for number, (_, end) in enumerate(extents):
        for other in range(number + 1, len(cluster)):
            if extents[other][0] >= end:
                break
            yield cluster[number], cluster[other]


def _all_alike(cluster: list[_Live]) -> bool:
    return len(cluster) < 2 or all(_alike(cluster[0], live) for live in cluster[1:])


def _alike(one: _Live, other: _Live) -> bool:
    """Whether two arrays share memory here as they do in the checkpoint."""
    if one.view() == other.view():
        return True
    return (
        one.entry.storage == other.entry.storage
        and one.address - one.entry.offset == other.address - other.entry.offset
        and one.lies_as_stored()
        and other.lies_as_stored()
    )


def _share(one: _Live, other: _Live) -> bool:
    """Whether two arrays have a byte in common; where that is too hard to say, whether they may."""
    try:
        return np.shares_memory(_Shape(one).array(), _Shape(other).array(), max_work=1_000_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Shape:
    """Memory as numpy sees it, never read: the address may be another device's."""

    def __init__(self, live: _Live) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": live.entry.shape,
            "strides": live.steps,
            "typestr": f"|V{live.entry.itemsize}",
            "data": (live.address, True),
        }

    def array(self) -> np.ndarray[Any, Any]:
        return np.asarray(self)
