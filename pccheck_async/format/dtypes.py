# SPDX-License-Identifier: Apache-2.0
"""Names of dtypes in manifests: a fixed list for torch, a strict grammar for numpy; no name is imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch

from pccheck_async.errors import CorruptStoreError

TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
)
"""Every dtype of this torch by its canonical name (``float32``)."""

TORCH_NAMES: Final[Mapping[torch.dtype, str]] = MappingProxyType({dtype: name for name, dtype in TORCH_DTYPES.items()})

STORABLE: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {name: dtype for name, dtype in TORCH_DTYPES.items() if not name.startswith("q")}
)
"""Dtypes of tensors that their bytes describe completely; a quantized tensor has scales beside its bytes."""

_CARRIERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Byte order, a letter for the kind, the item size, for times a unit. Object, structured and StringDType do not parse.
_NUMPY_NAME: Final = re.compile(r"[<>|](?:[biufcSUV]\d{1,9}|[mM]8(?:\[\d{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)")


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a tensor by its name in a manifest. Raises CorruptStoreError for an unknown name."""
    try:
        return STORABLE[name]
    except KeyError:
        raise CorruptStoreError(f"unknown tensor dtype {name[:64]!r}; it may come from a newer torch") from None


def carrier(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype of the same width that every torch kernel supports, to copy elements as bits.

    Tensors of ``float4_e2m1fn_x2`` or ``uint3``, with which torch cannot compute, are viewed so, copied, viewed back.
    """
    return _CARRIERS.get(dtype.itemsize, dtype)


def numpy_name(dtype: np.dtype[Any]) -> str | None:
    """Return the name of a numpy dtype, byte order and unit included; None if bytes do not describe its values."""
    if dtype.kind not in "biufcmMSUV" or dtype.names is not None or dtype.subdtype is not None or dtype.metadata:
        return None
    return None if foreign(dtype) else dtype.str


def foreign(dtype: np.dtype[Any]) -> bool:
    """Return whether another package defined a numpy dtype (ml_dtypes' bfloat16): numpy would misread its name."""
    try:
        return np.dtype(dtype.str) != dtype
    except TypeError:
        return True


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a name in a manifest. Raises CorruptStoreError for an unknown name."""
    if _NUMPY_NAME.fullmatch(name):
        try:
            return np.dtype(name)
        except (TypeError, ValueError, OverflowError):
            pass
    raise CorruptStoreError(f"unknown array dtype {name[:64]!r}")
