"""Where the bytes of a capture come from: an address, or an array that is packed piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pccheck_async.format import dtypes
from pccheck_async.state.leaves import Array

HOST: Final = -1
"""Stands for the host where the index of a CUDA device may stand."""


class RawSource(NamedTuple):
    """Memory that can be copied by address for as long as ``owner`` is held; ``device`` is the index of a CUDA device.

    The owner of device memory is a storage, or several that begin at the same address.
    """

    address: int
    nbytes: int
    owner: Any
    device: int = HOST


class PackedSource:
    """An array stored C-contiguous whatever its strides, device or lazy bits; :meth:`copy` reads it piece by piece."""

    __slots__ = ("array", "nbytes")

    def __init__(self, array: Array) -> None:
        self.array = array.detach() if isinstance(array, torch.Tensor) else array
        itemsize = array.element_size() if isinstance(array, torch.Tensor) else array.itemsize
        self.nbytes = prod(array.shape) * itemsize

    def copy(self, low: int, high: int, into: memoryview) -> None:
        """Copy bytes ``[low, high)`` of the packed array into ``into``, which has that length."""
        if not 0 <= low <= high <= self.nbytes or len(into) != high - low:
            raise ValueError(f"bytes [{low}, {high}) of {self.nbytes} do not fit a buffer of {len(into)}")
        if low == high:
            return
        itemsize = self.nbytes // prod(self.array.shape)
        first, last = low // itemsize, -(-high // itemsize)
        if low % itemsize or high % itemsize:  # cuts through an element: at most two of them are copied for nothing
            whole = memoryview(bytearray((last - first) * itemsize))
            self.copy(first * itemsize, last * itemsize, whole)
            start = low - first * itemsize
            into[:] = whole[start : start + high - low]
            return
        done = 0
        with torch.no_grad():
            for index in _boxes(tuple(self.array.shape), first, last):
                piece = self.array[(*index, ...)]  # the ellipsis keeps a numpy item an array
                nbytes = prod(piece.shape) * itemsize
                with into[done : done + nbytes] as target:
                    if isinstance(piece, torch.Tensor):
                        _copy_tensor(piece, target)
                    else:
                        np.ndarray(piece.shape, piece.dtype, target)[...] = piece
                done += nbytes


Source: TypeAlias = RawSource | PackedSource


class Sources:
    """The sources of one capture: their addresses in one table, and what keeps their memory."""

    def __init__(self, sources: Iterable[Source] = ()) -> None:
        self._addresses: list[int] = []
        self.nbytes: list[int] = []
        self._owners: list[Any] = []  # of a packed source: itself
        self._placed: dict[int, int] = {}  # device by index, of those that are not in host memory
        self.devices: set[int] = set()  # CUDA devices that hold any of them
        self.packed_devices: set[int] = set()  # those that hold packed ones
        self.owned: npt.NDArray[np.bool_] | None = None  # copies that the engine made; None for none
        for source in sources:
            if isinstance(source, PackedSource):
                self.add_packed(source)
            else:
                self.add(*source)

    def with_memory(self, addresses: npt.NDArray[np.uint64], owners: list[Any]) -> Sources:
        """Return sources of the same sizes on the same devices; a packed one has the address 0 and owns itself."""
        new = Sources()
        new.addresses, new.nbytes, new.lengths, new._owners = addresses, self.nbytes, self.lengths, owners
        new._placed, new.devices, new.packed_devices = self._placed.copy(), self.devices, self.packed_devices.copy()
        return new

    def add(self, address: int, nbytes: int, owner: Any, device: int = HOST) -> None:
        """Append memory of the host or a CUDA device (a :class:`RawSource` is only made when someone asks for it)."""
        if device != HOST:
            self._placed[len(self._owners)] = device
            self.devices.add(device)
        self._addresses.append(address)
        self.nbytes.append(nbytes)
        self._owners.append(owner)

    def add_packed(self, source: PackedSource) -> None:
        """Append a packed source."""
        if isinstance(source.array, torch.Tensor) and source.array.is_cuda:
            self.devices.add(source.array.get_device())
            self.packed_devices.add(source.array.get_device())
        self.add(0, source.nbytes, source)

    def pack_devices(self) -> None:
        """Make packed sources of device memory, for those who cannot copy it by address."""
        self.addresses = self.addresses.copy()
        for index, device in self._placed.items():
            address, nbytes = int(self.addresses[index]), self.nbytes[index]
            self._owners[index] = PackedSource(device_bytes(address, nbytes, self._owners[index], device))
            self.addresses[index] = 0
            self.packed_devices.add(device)
        self._placed.clear()

    def moved(self, index: npt.NDArray[np.intp], addresses: npt.NDArray[np.uint64], owner: Any) -> Sources:
        """Return the same sources, those at ``index`` copied to ``addresses`` on their device, which ``owner`` keeps.

        The engine owns what was copied; the memory that it came from is let go.
        """
        new = self.with_memory(self.addresses.copy(), self._owners.copy())
        new.addresses[index] = addresses
        new.owned = np.zeros(len(self), np.bool_) if self.owned is None else self.owned.copy()
        new.owned[index] = True
        for number in index.tolist():
            new._owners[number] = owner
        return new

    def release(self) -> None:
        """Let go of all memory. No source can be asked for any more."""
        self._owners = [None] * len(self._owners)

    @cached_property
    def addresses(self) -> npt.NDArray[np.uint64]:
        """Address of each source; 0 for packed ones. None is added any more once one of these tables was asked for."""
        return np.array(self._addresses, np.uint64)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of each source."""
        return np.array(self.nbytes, np.int64)

    @cached_property
    def packed(self) -> npt.NDArray[np.bool_]:
        """Which sources are packed."""
        return np.equal(self.addresses, 0)

    @cached_property
    def device_of(self) -> npt.NDArray[np.int32] | None:
        """The device of each source that has an address, else :data:`HOST`; None where all are on the host."""
        if not self._placed:
            return None
        devices = np.full(len(self), HOST, np.int32)
        devices[list(self._placed)] = list(self._placed.values())
        return devices

    def on_host(self) -> npt.NDArray[np.bool_]:
        """Return which sources the host copies, those of devices that have no plain address included."""
        return np.ones(len(self), np.bool_) if self.device_of is None else np.equal(self.device_of, HOST)

    def live(self) -> npt.NDArray[np.bool_]:
        """Return which sources hold bytes of the live state: those that have any, and are no copies of the engine."""
        filled = self.lengths > 0
        return filled if self.owned is None else filled & ~self.owned

    def __getitem__(self, index: int) -> Source:
        owner = self._owners[index]
        if isinstance(owner, PackedSource):
            return owner
        where = self._placed.get(index % len(self), HOST)
        return RawSource(int(self.addresses[index]), self.nbytes[index], owner, where)

    def __iter__(self) -> Iterator[Source]:
        return map(self.__getitem__, range(len(self)))

    def __len__(self) -> int:
        return len(self._owners)


def device_bytes(address: int, nbytes: int, owner: Any, device: int) -> torch.Tensor:
    """Return device memory as a flat tensor of bytes."""
    storages = owner if isinstance(owner, tuple) else (owner,)
    storage = max(storages, key=lambda each: int(each.nbytes()))
    flat = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", device))
    return flat.set_(storage, address - storage.data_ptr(), (nbytes,), (1,))


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of ``tensor`` as integers of the same width, which copies bit for bit for every dtype."""
    return tensor.detach().view(dtypes.carrier(tensor.dtype))


def _copy_tensor(piece: torch.Tensor, into: memoryview) -> None:
    bits = _resolved_bits(piece)
    flat = torch.frombuffer(into, dtype=torch.uint8)
    if flat.data_ptr() % bits.element_size():
        dense = bits.cpu().reshape(-1).clone(memory_format=torch.contiguous_format)  # its stride is 1, of one item, too
        flat.copy_(dense.view(torch.uint8))
    else:
        flat.view(bits.dtype).reshape(bits.shape).copy_(bits)


def _resolved_bits(piece: torch.Tensor) -> torch.Tensor:
    piece = piece.resolve_neg()
    if not piece.is_conj():
        return as_bits(piece)
    parts = torch.view_as_real(piece.conj()).clone()  # as it lies in memory; complex32 has no kernels
    parts[..., 1].neg_()
    return as_bits(parts)


def _boxes(shape: tuple[int, ...], first: int, last: int) -> Iterator[tuple[int | slice, ...]]:
    """Cut elements ``[first, last)`` of C order into boxes that indexing can reach: at most two per dimension."""
    if not shape:
        yield ()
        return
    row = prod(shape[1:])
    while first < last:
        index, start = divmod(first, row)
        rows = 0 if start else (last - first) // row
        if rows:
            yield (slice(index, index + rows),)
            first += rows * row
        else:  # inside one row
            end = min(last - index * row, row)
            for rest in _boxes(shape[1:], start, end):
                yield (index, *rest)
            first = index * row + end
