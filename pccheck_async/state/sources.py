"""Where the bytes of a capture come from: an address in host memory, or an array that is packed piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import torch

from pccheck_async.state import dtypes
from pccheck_async.state.leaves import Array

__all__ = ["PackedSource", "RawSource", "Source", "Sources", "as_bits"]


class RawSource(NamedTuple):
    """Host memory that can be copied by address for as long as ``owner`` is held."""

    address: int
    nbytes: int
    owner: Any


class PackedSource:
    """An array stored C-contiguous whatever its strides, device or lazy bits; never materialised as a whole.

    Args:
        array: A tensor on any device, or a numpy array; it is read at the time of each :meth:`copy`.
    """

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
            whole = bytearray((last - first) * itemsize)
            self._copy_elements(first, last, memoryview(whole), itemsize)
            start = low - first * itemsize
            into[:] = memoryview(whole)[start : start + high - low]
        else:
            self._copy_elements(first, last, into, itemsize)

    def _copy_elements(self, first: int, last: int, into: memoryview, itemsize: int) -> None:
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


class Sources(Sequence[Source]):
    """The sources of one capture: their addresses in one table, and what keeps their memory.

    Args:
        sources: Any sources; :meth:`add` takes more.

    Attributes:
        nbytes: Length of each source.
    """

    def __init__(self, sources: Iterable[Source] = ()) -> None:
        self._addresses: list[int] = []
        self.nbytes: list[int] = []
        self._owners: list[Any] = []  # of a packed source: itself
        for source in sources:
            if isinstance(source, PackedSource):
                self.add_packed(source)
            else:
                self.add(*source)

    @classmethod
    def of_columns(cls, addresses: npt.NDArray[np.uint64], nbytes: list[int], owners: list[Any]) -> Sources:
        """Return the sources of these columns; of a packed one the address is 0 and the owner the source itself."""
        sources = cls()
        sources.addresses = addresses
        sources.nbytes = nbytes
        sources._owners = owners
        return sources

    def add(self, address: int, nbytes: int, owner: Any) -> None:
        """Append host memory (a :class:`RawSource` that is only made when someone asks for it)."""
        self._addresses.append(address)
        self.nbytes.append(nbytes)
        self._owners.append(owner)

    def add_packed(self, source: PackedSource) -> None:
        """Append a packed source."""
        self.add(0, source.nbytes, source)

    @cached_property
    def addresses(self) -> npt.NDArray[np.uint64]:
        """Address of each source; 0 for packed ones. No source is added any more once this was asked for."""
        return np.array(self._addresses, np.uint64)

    @cached_property
    def packed(self) -> npt.NDArray[np.bool_]:
        """Which sources are packed."""
        return np.equal(self.addresses, 0)

    @overload
    def __getitem__(self, index: int) -> Source: ...
    @overload
    def __getitem__(self, index: slice) -> Sources: ...
    def __getitem__(self, index: int | slice) -> Source | Sources:
        if isinstance(index, slice):
            return Sources(self[number] for number in range(*index.indices(len(self))))
        owner = self._owners[index]
        if isinstance(owner, PackedSource):
            return owner
        return RawSource(int(self.addresses[index]), self.nbytes[index], owner)

    def __len__(self) -> int:
        return len(self._owners)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of ``tensor`` as integers of the same width, which copies bit for bit for every dtype."""
    return tensor.detach().view(dtypes.carrier(tensor.dtype))


def _copy_tensor(piece: torch.Tensor, into: memoryview) -> None:
    bits = _resolved_bits(piece)
    flat = torch.frombuffer(into, dtype=torch.uint8)
    if flat.data_ptr() % bits.element_size():
        flat.copy_(bits.cpu().contiguous().reshape(-1).view(torch.uint8))
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
    head, tail = -(-first // row), last // row  # whole rows
    if head > tail:  # inside one row
        yield from _inside(shape, tail, first - tail * row, last - tail * row)
        return
    if first < head * row:
        yield from _inside(shape, head - 1, first - (head - 1) * row, row)
    if head < tail:
        yield (slice(head, tail),)
    if tail * row < last:
        yield from _inside(shape, tail, 0, last - tail * row)


def _inside(shape: tuple[int, ...], index: int, first: int, last: int) -> Iterator[tuple[int | slice, ...]]:
    for rest in _boxes(shape[1:], first, last):
        yield (index, *rest)
