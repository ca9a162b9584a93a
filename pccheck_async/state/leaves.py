"""The tensors and arrays of a state, in columns."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.format import dtypes

Array: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"
Kind: TypeAlias = Literal["tensor", "parameter", "ndarray"]

KINDS: Final[dict[type, Kind]] = {torch.Tensor: "tensor", torch.nn.Parameter: "parameter", np.ndarray: "ndarray"}
"""Objects of exactly these types are saved as arrays."""


class ArrayLeaf(NamedTuple):
    """One tensor or array of the state: the live object, and how it comes back."""

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
        """The DTensors whose boxes are leaves, and the tensors composed of leaves, by the numbers of those: they count
        changes."""
        self.detached: list[range] = []
        """The numbers of those that are saved like ``value.detach()``: the parameters of modules that are read."""

    def check(self) -> None:
        """Raise UnsupportedStateError for the first one that cannot be saved by its bytes, with advice."""
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
    """Why a tensor cannot be saved by its bytes, and advice; empty if it can."""
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
