"""Which formats can hold an array, and what to do about one that a format refuses."""

from __future__ import annotations

from functools import cache
from typing import Any, Final, Literal, TypeAlias

import torch

from pccheck_async.format import dtypes
from pccheck_async.format.manifest import TensorEntry

__all__ = ["SAFETENSORS", "Format", "pickled", "refusal", "torch_name"]

Format: TypeAlias = Literal["torch", "safetensors", "dcp"]

SAFETENSORS: Final = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
"""Names of torch's dtypes in safetensors."""

_NUMPY: Final = {
    "|b1": "bool", "|i1": "int8", "|u1": "uint8", "<i2": "int16", "<u2": "uint16", "<i4": "int32", "<u4": "uint32",
    "<i8": "int64", "<u8": "uint64", "<f2": "float16", "<f4": "float32", "<f8": "float64", "<c8": "complex64",
    "<c16": "complex128",
}  # fmt: skip
_PICKLE_PROTOCOL: Final = 2


def refusal(entry: TensorEntry, to: Format) -> str:
    """Return why a format cannot hold an array, in brackets, and which can; empty where it can."""
    trouble = _TROUBLES[to](entry)
    if not trouble:
        return ""
    others = [other for other, find in _TROUBLES.items() if not find(entry)]
    if others:
        return f"({trouble}), which {' and '.join(others)} can hold"
    return (
        f"({trouble}), which no format can hold; `pccheck copy` can, or save x.view(torch.uint8) and the dtype's name"
    )


def torch_name(entry: TensorEntry) -> str | None:
    """Return the name of torch's dtype with the same bits; None where there is none."""
    return _NUMPY.get(entry.dtype) if entry.kind == "ndarray" else entry.dtype


@cache
def pickled(dtype: torch.dtype) -> tuple[Any, Any]:
    """How this torch pickles a tensor of a dtype: the function that makes it again, and its storage's type.

    Raises KeyError where it does not.
    """
    empty = torch.empty(0, dtype=dtypes.carrier(dtype)).view(dtype)
    function, (storage, *_) = empty.__reduce_ex__(_PICKLE_PROTOCOL)  # type: ignore[no-untyped-call]
    if isinstance(storage, torch.UntypedStorage):
        return function, torch.UntypedStorage
    return function, getattr(torch, storage._pickle_storage_type())


def _in_torch(entry: TensorEntry) -> str:
    name = torch_name(entry)
    if name is None:
        return f"a numpy array of dtype {entry.dtype}"
    if any(stride < 0 for stride in entry.stride) or entry.offset % entry.itemsize:
        return "a numpy array with strides that tensors do not have"
    try:
        pickled(dtypes.torch_dtype(name))
    except KeyError:
        return f"a tensor of dtype {name}, which torch does not save either"
    return ""


def _in_safetensors(entry: TensorEntry) -> str:
    return "" if torch_name(entry) in SAFETENSORS else f"dtype {entry.dtype}"


def _in_dcp(entry: TensorEntry) -> str:
    if entry.kind == "ndarray":
        return ""  # pickled by numpy
    if trouble := _in_torch(entry):
        return trouble
    try:
        torch._utils._element_size(dtypes.torch_dtype(entry.dtype))  # type: ignore[no-untyped-call]
    except TypeError:
        return f"a tensor of dtype {entry.dtype}, whose size torch.distributed.checkpoint does not know"
    return ""


_TROUBLES: Final = {"torch": _in_torch, "safetensors": _in_safetensors, "dcp": _in_dcp}
