"""Looks at tensors: all that a layout of them depends on, read in one pass and compared with an earlier look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from pccheck_async.state.tensor_access import untyped_storage

try:
    from pccheck_async import _ext
except ImportError:
    look = None
else:
    look = _ext.look

DLPACK_API: Final[object] = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
"""Since torch 2.10."""

_address: Final = torch.UntypedStorage.data_ptr
_nbytes: Final = torch.UntypedStorage.nbytes
CALLS: Final = (
    untyped_storage, _address, _nbytes, torch.Tensor.is_neg, torch.Tensor.is_conj, "dtype", "requires_grad"
)  # fmt: skip


class Look(NamedTuple):
    """The properties of tensors on which their layout depends.

    If two looks have equal forms and traits, the tensors view their storages alike. It holds the memory.
    """

    forms: object
    """Dtypes, shapes, strides and devices."""
    traits: Any
    """Where they begin in their storages, whether they require gradients, are to be negated or conjugated."""
    memory: bytes
    """Address and size of each storage, as int64."""
    storages: list[Any]


def look_at(tensors: list[torch.Tensor]) -> Look | None:
    """Return a look at tensors; None if one of them has no strides or no storage.

    None of them is remembered: torch does not swap tensors that have weak references.
    """
    try:
        if look is not None and DLPACK_API is not None:
            return Look(*look(DLPACK_API, tensors, CALLS))
    except RuntimeError:  # one that DLPack cannot describe
        pass
    try:
        return _look_at_each(tensors)
    except RuntimeError:
        return None


def _look_at_each(tensors: Sequence[torch.Tensor]) -> Look:
    storages: list[Any] = [*map(untyped_storage, tensors)]
    forms = [(each.dtype, each.shape, each.stride(), each.device) for each in tensors]
    traits = [
        (each.storage_offset(), each.requires_grad, each.is_neg(), each.is_complex() and each.is_conj())
        for each in tensors
    ]
    memory = np.array([(_address(each), _nbytes(each)) for each in storages], np.int64).reshape(-1, 2)
    return Look(forms, traits, memory.tobytes(), storages)
