"""Fingerprints of tensors: how they view their storages, compared with how they did at the last save."""

from __future__ import annotations

from typing import Final

import torch

try:
    from pccheck_async import _ext
except ImportError:
    dlpack_forms = None
else:
    dlpack_forms = _ext.dlpack_forms

DLPACK_API: Final[object] = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
"""Since torch 2.10."""


class Fingerprints:
    """Dtypes, shapes, strides, storage offsets, devices and all else that determines how tensors view their storages.

    The tensors are strided ones with storages, and are not held.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._forms = _forms(tensors)
        self._offsets = [*map(torch.Tensor.storage_offset, tensors)]
        self._requires_grad = [tensor.requires_grad for tensor in tensors]
        self._negative = [*map(torch.Tensor.is_neg, tensors)]
        self._complex = [number for number, tensor in enumerate(tensors) if tensor.is_complex()]
        self._conjugate = [tensors[number].is_conj() for number in self._complex]
        # DLPack has one word for all integers of up to a byte.
        kinds = [tensor.dtype for tensor in tensors]
        self._narrow = [n for n, dtype in enumerate(kinds) if dtype.itemsize == 1 and not dtype.is_floating_point]
        self._narrow_dtypes = [kinds[number] for number in self._narrow]

    def same(self, tensors: list[torch.Tensor], *, print_same: bool) -> bool:
        """Return whether as many tensors view their storages as these did.

        If so, none is quantized or on the meta device; for a sparse one, taking its storage raises. Raises RuntimeError
        for a tensor without strides.

        With ``print_same``, their :func:`fingerprint` with addresses equals that of others for which this was true:
        first elements are where they were, and unless the storages are, too, :meth:`same_offsets` must be called.
        """
        return (
            [tensor.requires_grad for tensor in tensors] == self._requires_grad
            and [*map(torch.Tensor.is_neg, tensors)] == self._negative
            and [tensors[number].is_conj() for number in self._complex] == self._conjugate
            and [tensors[number].dtype for number in self._narrow] == self._narrow_dtypes
            and (print_same or (self.same_offsets(tensors) and _forms(tensors) == self._forms))
        )

    def same_offsets(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether each begins where it did in its storage."""
        return [*map(torch.Tensor.storage_offset, tensors)] == self._offsets


def _forms(tensors: list[torch.Tensor]) -> object:
    """Dtypes, shapes, strides and devices: from DLPack's C API where possible, about five times as fast."""
    return fingerprint(tensors) or [(each.dtype, each.shape, each.stride(), each.device) for each in tensors]


def fingerprint(tensors: list[torch.Tensor], *, addresses: bool = False) -> bytes | None:
    """Return devices, dtypes, shapes and strides of tensors, with ``addresses`` also those of the first elements.

    None if DLPack cannot describe one of these tensors.
    """
    if dlpack_forms is None or DLPACK_API is None:
        return None
    try:
        return dlpack_forms(DLPACK_API, tensors, addresses)
    except RuntimeError:
        return None
