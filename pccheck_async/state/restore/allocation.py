"""New memory for stored arrays: only for those that are wanted, shared by those that alias."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch

from pccheck_async.errors import CorruptStoreError
from pccheck_async.format import dtypes
from pccheck_async.format.manifest import ALIGNMENT, Manifest, TensorEntry
from pccheck_async.state.save.flatten import Array
from pccheck_async.state.sources import HOST
from pccheck_async.state.targets import Target

__all__ = ["Allocation"]

_HOST: Final = torch.device("cpu")


@dataclass(slots=True, eq=False)
class _Memory:
    """Uninitialised bytes for a storage, from byte ``base`` of it on."""

    base: int
    flat: Array
    address: int
    ranges: list[tuple[int, int]]


class Allocation:
    """Uninitialised memory for the arrays of a manifest that were claimed.

    A storage that only numpy arrays view is allocated by numpy, any other by torch.

    Args:
        manifest: A checked one: sizes are bounded by its payload.
        claimed: Indices of the arrays that are wanted.
        devices: CUDA devices on which tensors are wanted, by index. A storage goes there where all that is claimed of
            it is wanted there.
    """

    def __init__(
        self, manifest: Manifest, claimed: Iterable[int], devices: Mapping[int, torch.device] = MappingProxyType({})
    ) -> None:
        self._manifest = manifest
        self._memories: dict[int, _Memory] = {}
        self._moved: dict[tuple[int, torch.device], torch.Tensor] = {}
        wanted: dict[int, list[TensorEntry]] = {}
        places: dict[int, set[torch.device]] = {}
        for index in claimed:
            entry = manifest.tensors[index]
            if entry.storage is not None:
                wanted.setdefault(entry.storage, []).append(entry)
                places.setdefault(entry.storage, set()).add(devices.get(index, _HOST))
        for storage, entries in wanted.items():
            device, *others = places[storage]
            self._memories[storage] = _allocate(entries, _HOST if others else device)

    def targets(self) -> Iterator[Target]:
        """Yield what has to be filled before any array is asked for."""
        for storage, memory in self._memories.items():
            start = self._manifest.storages[storage].offset
            for low, high in memory.ranges:
                flat = memory.flat
                device = flat.get_device() if isinstance(flat, torch.Tensor) else HOST
                yield Target(start + low, high - low, memory.address + low - memory.base, flat, device)

    def array(self, index: int, device: torch.device | None = None) -> Array:
        """Return a claimed array.

        A tensor is where it was allocated; or on ``device``, where aliases share memory as they do on the host.
        """
        entry = self._manifest.tensors[index]
        try:
            if entry.kind == "ndarray":
                return self._ndarray(entry)
            return self._tensor(entry, device or torch.device("cpu"))
        except (RuntimeError, ValueError, OverflowError) as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            raise CorruptStoreError(f"array {index} of the checkpoint cannot be made: {error}") from error

    def _ndarray(self, entry: TensorEntry) -> np.ndarray[Any, Any]:
        dtype = dtypes.numpy_dtype(entry.dtype)
        if entry.storage is None:
            return np.empty(entry.shape, dtype)
        memory = self._memories[entry.storage]
        flat = memory.flat if isinstance(memory.flat, np.ndarray) else memory.flat.numpy()
        strides = tuple(step * dtype.itemsize for step in entry.stride)
        return np.ndarray(entry.shape, dtype, flat.data, entry.offset - memory.base, strides)

    def _tensor(self, entry: TensorEntry, device: torch.device) -> torch.Tensor:
        dtype = dtypes.torch_dtype(entry.dtype)
        bits = dtypes.carrier(dtype)
        if entry.storage is None:
            tensor = torch.empty_strided(entry.shape, entry.stride, dtype=bits, device=device)
        else:
            memory = self._memories[entry.storage]
            offset = (entry.offset - memory.base) // dtype.itemsize
            flat = self._flat(entry.storage, device)
            tensor = torch.empty(0, dtype=bits, device=flat.device)
            tensor.set_(flat.untyped_storage(), offset, entry.shape, entry.stride)
        tensor = tensor.view(dtype)
        if entry.kind == "parameter":
            return torch.nn.Parameter(tensor, requires_grad=entry.requires_grad)
        return tensor.requires_grad_(entry.requires_grad)

    def _flat(self, storage: int, device: torch.device) -> torch.Tensor:
        flat = self._memories[storage].flat
        assert isinstance(flat, torch.Tensor)
        if device.type == "cpu":
            return flat
        if (storage, device) not in self._moved:
            self._moved[storage, device] = flat.to(device)
        return self._moved[storage, device]


def _allocate(entries: list[TensorEntry], device: torch.device) -> _Memory:
    ranges = _merged([entry.extent for entry in entries])
    base = ranges[0][0] // ALIGNMENT * ALIGNMENT
    nbytes = ranges[-1][1] - base
    if all(entry.kind == "ndarray" for entry in entries):
        array = np.empty(nbytes, np.uint8)
        return _Memory(base, array, array.__array_interface__["data"][0], ranges)
    tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return _Memory(base, tensor, tensor.data_ptr(), ranges)


def _merged(extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for low, high in sorted(extents):
        if ranges and low <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(high, ranges[-1][1]))
        else:
            ranges.append((low, high))
    return ranges
