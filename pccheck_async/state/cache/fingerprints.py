"""What many tensors are, apart from their memory; compared with what they were at the last save."""

from __future__ import annotations

from itertools import repeat
from operator import eq
from typing import Final

import torch

from pccheck_async.format.manifest import span
from pccheck_async.state.views import is_lazy

try:
    from pccheck_async import _ext
except ImportError:
    _dlpack_forms = None
else:
    _dlpack_forms = _ext.dlpack_forms

__all__ = ["Forms", "tell"]

_DLPACK_API: Final[object] = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
"""Since torch 2.10."""


class Forms:
    """Dtype, shape, strides, start in the storage, device, and all else that says how tensors view their storages.

    Dtypes, shapes, strides, devices and addresses come from DLPack's C API where torch and the extension have it, some
    five times as fast as a call per tensor and property.

    Args:
        tensors: Strided ones with storages. They are not held.

    Attributes:
        spans: What each takes of its storage: bytes from the storage's beginning to the first one that it may view and
            to the one after its last, equal where it has no elements; and whether they are yet to be conjugated or
            negated.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._shapes = [tuple(tensor.shape) for tensor in tensors]
        self._strides = [tensor.stride() for tensor in tensors]
        self._offsets = [*map(torch.Tensor.storage_offset, tensors)]
        self._devices = [tensor.device for tensor in tensors]
        self._requires_grad = [tensor.requires_grad for tensor in tensors]
        self._negative = [*map(torch.Tensor.is_neg, tensors)]
        self._complex = [number for number, tensor in enumerate(tensors) if tensor.is_complex()]
        self._conjugate = [tensors[number].is_conj() for number in self._complex]
        # DLPack has one word for all integers of up to a byte.
        self._narrow = [n for n, d in enumerate(self._dtypes) if d.itemsize == 1 and not d.is_floating_point]
        self._narrow_dtypes = [self._dtypes[number] for number in self._narrow]
        self._told = tell(tensors)
        highs = [
            0 if 0 in shape else (int(offset) + span(shape, stride)[1] + 1) * dtype.itemsize
            for shape, stride, offset, dtype in zip(
                self._shapes, self._strides, self._offsets, self._dtypes, strict=True
            )
        ]
        self.spans = [*zip(repeat(0), highs, map(is_lazy, tensors))]

    def same(self, tensors: list[torch.Tensor], *, told_same: bool) -> bool:
        """Whether as many tensors are what these were.

        Equal dtypes and devices say that none is quantized or on the meta device; that none is sparse is left to
        whoever asks for their storages.

        Args:
            tensors: In the same order.
            told_same: :func:`tell` says the same of them, addresses included, as of others that were what these were.
                Then, as first elements are where those were, :meth:`same_offsets` is yet to be asked unless the
                storages are, too.

        Raises:
            RuntimeError: One of them has no strides.
        """
        return (
            [tensor.requires_grad for tensor in tensors] == self._requires_grad
            and [*map(torch.Tensor.is_neg, tensors)] == self._negative
            and [tensors[number].is_conj() for number in self._complex] == self._conjugate
            and [tensors[number].dtype for number in self._narrow] == self._narrow_dtypes
            and (told_same or (self.same_offsets(tensors) and self._same_shapes(tensors)))
        )

    def same_offsets(self, tensors: list[torch.Tensor]) -> bool:
        """Whether each begins where it did in its storage."""
        return [*map(torch.Tensor.storage_offset, tensors)] == self._offsets

    def _same_shapes(self, tensors: list[torch.Tensor]) -> bool:
        if self._told is not None:
            return tell(tensors) == self._told
        return (
            [tensor.dtype for tensor in tensors] == self._dtypes
            and all(map(eq, map(torch.Tensor.size, tensors), self._shapes))
            and all(map(eq, map(torch.Tensor.stride, tensors), self._strides))
            and all(map(eq, [tensor.device for tensor in tensors], self._devices))
        )


def tell(tensors: list[torch.Tensor], *, addresses: bool = False) -> bytes | None:
    """Return devices, dtypes, shapes and strides in one piece, and where first elements are if that is asked for.

    None where DLPack has no words for one of these tensors.
    """
    if _dlpack_forms is None or _DLPACK_API is None:
        return None
    try:
        return _dlpack_forms(_DLPACK_API, tensors, addresses)
    except RuntimeError:
        return None
