# SPDX-License-Identifier: Apache-2.0
"""The leaves of a state (its tensors and arrays), and the sources from which a capture copies their bytes.

A source is memory with an address, or an array that is packed piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from math import prod
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.format import dtypes

Array: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"
Kind: TypeAlias = Literal["tensor", "parameter", "ndarray"]

KINDS: Final[dict[type, Kind]] = {torch.Tensor: "tensor", torch.nn.Parameter: "parameter", np.ndarray: "ndarray"}
"""Types whose direct instances, not those of subclasses, are saved as arrays."""


class ArrayLeaf(NamedTuple):
    """One tensor or array of the state: the live object, and the kind as which it is restored."""

    path: str
    value: Array
    kind: Kind
    requires_grad: bool = False


class Leaves:
    """The leaves of one state in the order in which it was walked; each :class:`ArrayLeaf` is made on demand."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.values: list[Array] = []
        self.wrappers: dict[int, torch.Tensor] = {}
        """By number of a leaf: the DTensor of which it is a box, or the composed tensor of which it is a part. Changes
        raise the version counter of that tensor only."""
        self.detached: list[range] = []
        """Numbers of the leaves saved as ``value.detach()``: parameters of modules read without ``state_dict()``."""

    def check(self) -> None:
        """Raise UnsupportedStateError, with advice, for the first leaf that cannot be saved by its bytes."""
        for path, value in zip(self.paths, self.values, strict=True):
            reason = _tensor_trouble(value) if isinstance(value, torch.Tensor) else _array_trouble(value)
            if reason:
                raise UnsupportedStateError(f"{path}: {reason}")

    def __getitem__(self, index: int) -> ArrayLeaf:
        return _leaf(self.paths[index], self.values[index], any(index in each for each in self.detached))

    def __iter__(self) -> Iterator[ArrayLeaf]:
        detached = {*chain.from_iterable(self.detached)}
        return map(_leaf, self.paths, self.values, map(detached.__contains__, range(len(self))))

    def __len__(self) -> int:
        return len(self.values)


def _leaf(path: str, value: Array, detached: bool) -> ArrayLeaf:
    if detached:
        return ArrayLeaf(path, value, "tensor")
    return ArrayLeaf(path, value, KINDS[type(value)], isinstance(value, torch.Tensor) and value.requires_grad)


def _tensor_trouble(tensor: torch.Tensor) -> str:
    """Return why a tensor cannot be saved by its bytes, and advice; empty if it can."""
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout} cannot be saved; save its indices and values, or x.to_dense()"
    if tensor.is_quantized:
        return "a quantized tensor cannot be saved; save x.int_repr() with its scale and zero point"
    if tensor.is_meta:
        return "a tensor on the meta device has no bytes; materialise it first (module.to_empty(device=...))"
    if tensor.is_nested:
        return "a nested tensor cannot be saved; save list(x.unbind())"
    if dtypes.TORCH_NAMES.get(tensor.dtype, "") not in dtypes.STORABLE:
        return f"a tensor of dtype {tensor.dtype} cannot be saved"
    if tensor.is_neg() and not _negates(tensor.dtype):
        return f"torch cannot negate {tensor.dtype}, of which this is a lazily negated view; save what it views"
    return ""


@cache
def _negates(dtype: torch.dtype) -> bool:
    try:
        torch.zeros(1, dtype=dtype, device="cpu").neg()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _array_trouble(array: np.ndarray[Any, Any]) -> str:
    if dtypes.numpy_name(array.dtype) is not None:
        return ""
    if array.dtype.hasobject:
        return f"an array of {array.dtype} holds Python objects, not bytes; save x.tolist()"
    if array.dtype.names is None and dtypes.foreign(array.dtype):
        return (
            f"an array of {array.dtype}, not one of numpy's own dtypes, cannot be saved; save a torch tensor, or "
            f"x.view('V{array.itemsize}') and the dtype's name"
        )
    return f"an array of dtype {array.dtype} cannot be saved; save each of its fields as an array"


# -- sources

HOST: Final = -1
"""Device number that stands for the host, where others are indices of CUDA devices."""


class RawSource(NamedTuple):
    """Memory that can be copied by address for as long as ``owner`` is referenced.

    ``device``: index of the CUDA device, or :data:`HOST`. The owner of device memory is a storage, or a tuple of
    storages that begin at the same address.
    """

    address: int
    nbytes: int
    owner: Any
    device: int = HOST


class PackedSource:
    """An array that is stored C-contiguous, whatever its strides and device; :meth:`copy` reads it piece by piece."""

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
            for index in index_boxes(tuple(self.array.shape), first, last):
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
    """The sources of one capture: their addresses and sizes, and the objects that keep their memory alive.

    Attributes:
        addresses: Address of each source; 0 for packed ones.
        nbytes: Bytes of each source.
        lengths: ``nbytes`` as an array.
        device_of: Device of each source; :data:`HOST` for packed ones. None if there is no source of device memory.
        devices: CUDA devices that hold any source.
        packed_devices: CUDA devices that hold packed sources.
        owned: For each source whether it is a copy that the engine made; None if there is none.
    """

    def __init__(self, sources: Iterable[Source] = ()) -> None:
        each = [*sources]
        raw = [source if isinstance(source, RawSource) else RawSource(0, source.nbytes, source) for source in each]
        self.addresses: npt.NDArray[np.uint64] = np.array([source.address for source in raw], np.uint64)
        self.nbytes = [source.nbytes for source in raw]
        self.lengths: npt.NDArray[np.int64] = np.array(self.nbytes, np.int64)
        self._owners: list[Any] = [source.owner for source in raw]  # of a packed source: itself
        placed = [source.device for source in raw]
        self.device_of = np.array(placed, np.int32) if set(placed) - {HOST} else None
        arrays: list[Any] = [source.array for source in each if isinstance(source, PackedSource)]
        self.packed_devices = {x.get_device() for x in arrays if isinstance(x, torch.Tensor) and x.is_cuda}
        self.devices = {*placed, *self.packed_devices} - {HOST}
        self.owned: npt.NDArray[np.bool_] | None = None

    def with_memory(self, addresses: npt.NDArray[np.uint64], owners: list[Any]) -> Sources:
        """Return sources of the same sizes and devices, with new memory; packed: address 0, the source as its owner."""
        new = Sources.__new__(Sources)
        vars(new).update(vars(self))  # copy.copy() takes five times as long
        new.addresses, new._owners = addresses, owners
        return new

    def pack_devices(self) -> None:
        """Turn sources of device memory into packed ones, for backends that cannot copy it by address."""
        self.addresses = self.addresses.copy()
        for index, source in enumerate(self):
            if isinstance(source, RawSource) and source.device != HOST:
                self._owners[index] = PackedSource(device_bytes(*source))
                self.addresses[index] = 0
        self.packed_devices, self.device_of = self.devices, None

    def moved(self, index: npt.NDArray[np.intp], addresses: npt.NDArray[np.uint64], owner: Any) -> Sources:
        """Return these sources, those at ``index`` replaced by their copies at ``addresses`` on the same device.

        ``owner`` keeps the memory of the copies, which count as the engine's (``owned``). The result no longer
        references the originals.
        """
        new = self.with_memory(self.addresses.copy(), self._owners.copy())
        new.addresses[index] = addresses
        new.owned = np.zeros(len(self), np.bool_) if self.owned is None else self.owned.copy()
        new.owned[index] = True
        for number in index.tolist():
            new._owners[number] = owner
        return new

    def release(self) -> None:
        """Drop the references to all memory; afterwards no source can be read."""
        self._owners = [None] * len(self._owners)

    @property
    def packed(self) -> npt.NDArray[np.bool_]:
        """Return which sources are packed: they have no address."""
        return np.equal(self.addresses, 0)

    def on_host(self) -> npt.NDArray[np.bool_]:
        """Return which sources the host copies: host memory, and packed sources of any device."""
        return np.ones(len(self), np.bool_) if self.device_of is None else np.equal(self.device_of, HOST)

    def live(self) -> npt.NDArray[np.bool_]:
        """Return which sources are memory of the live state: they are neither empty nor copies made by the engine."""
        filled = self.lengths > 0
        return filled if self.owned is None else filled & ~self.owned

    def __getitem__(self, index: int) -> Source:
        owner = self._owners[index]
        if isinstance(owner, PackedSource):
            return owner
        where = HOST if self.device_of is None else int(self.device_of[index])
        return RawSource(int(self.addresses[index]), self.nbytes[index], owner, where)

    def __iter__(self) -> Iterator[Source]:
        return map(self.__getitem__, range(len(self)))

    def __len__(self) -> int:
        return len(self._owners)


def device_bytes(address: int, nbytes: int, owner: Any, device: int) -> torch.Tensor:
    """Return device memory, by the fields of its :class:`RawSource`, as a flat tensor of bytes that views it."""
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


def index_boxes(shape: tuple[int, ...], first: int, last: int) -> Iterator[tuple[int | slice, ...]]:
    """Cut elements ``[first, last)``, in C order, into boxes; yield an index for each, fewer than 2 per dimension."""
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
            for rest in index_boxes(shape[1:], start, end):
                yield (index, *rest)
            first = index * row + end
