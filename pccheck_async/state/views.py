"""What one leaf views: which memory, from which address to which, with which strides."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.format import dtypes
from pccheck_async.format.manifest import span
from pccheck_async.state.leaves import ArrayLeaf
from pccheck_async.state.tensor_access import untyped_storage

__all__ = ["Memory", "View", "is_lazy", "view_of"]

Memory: TypeAlias = tuple[Any, int]
"""Device (``"cpu"`` for the host) and address of a storage."""


@dataclass(slots=True, eq=False)
class View:
    """A leaf with elements.

    Attributes:
        leaf: Its index.
        value: The tensor or array.
        owner: What keeps the memory: the storage, or the array that others view; not the tensor, which may move on.
        memory: Of the storage.
        low: Address of its first byte.
        high: The address after its last byte.
        first: Address of its first element.
        shape: Items per dimension.
        stride: Items from one to the next; 0 along a numpy dimension of one item.
        itemsize: Bytes.
        dtype: Its name.
        holes: Whether there are bytes between its elements.
        lazy: Whether its memory does not hold its elements as they are, or its strides cannot be written down.
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
    lazy: bool

    def same(self, other: View) -> bool:
        """Whether both view the same elements."""
        mine = (self.first, self.shape, self.stride, self.dtype)
        return mine == (other.first, other.shape, other.stride, other.dtype)


def view_of(index: int, leaf: ArrayLeaf) -> View | None:
    """Return what a leaf views; None where it has no bytes. Raises UnsupportedStateError where its memory is gone."""
    if isinstance(leaf.value, torch.Tensor):
        return _tensor_view(index, leaf.path, leaf.value)
    return _array_view(index, leaf.value)


def is_lazy(tensor: torch.Tensor) -> bool:
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
        lazy=is_lazy(tensor),
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
        lazy=not whole,
    )


def _address(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
