"""Plain values without children, to nodes and back, each with its exact type and every bit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType, NoneType
from typing import Any, Final

import numpy as np
import torch

from pccheck_async.errors import CorruptStoreError, UnsupportedStateError
from pccheck_async.format import dtypes
from pccheck_async.format.skeleton import (
    BigIntNode,
    BytearrayNode,
    BytesNode,
    ComplexNode,
    Node,
    NumpyDtypeNode,
    NumpyScalarNode,
    SizeNode,
    SurrogateStrNode,
    TorchDeviceNode,
    TorchDtypeNode,
)

__all__ = ["ATOMS", "VERBATIM", "all_small", "atom", "from_node", "numpy_value"]

_SMALL_INTS: Final = (-(1 << 63), (1 << 64) - 1)

VERBATIM: Final = frozenset((NoneType, bool, int, float))
"""Types whose values are their own nodes, ints up to 64 bits only."""


def all_small(numbers: Collection[int]) -> bool:
    """Whether every one of these ints is its own node."""
    return not numbers or (min(numbers) >= _SMALL_INTS[0] and max(numbers) <= _SMALL_INTS[1])


def _int(value: int) -> Node:
    if _SMALL_INTS[0] <= value <= _SMALL_INTS[1]:
        return value
    return BigIntNode(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _str(value: str) -> Node:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return SurrogateStrNode(value.encode("utf-8", "surrogatepass"))
    return value


def _same(value: Any) -> Node:
    node: Node = value
    return node


ATOMS: Final[Mapping[type, Callable[[Any], Node]]] = MappingProxyType(
    {
        NoneType: _same,
        bool: _same,
        float: _same,
        int: _int,
        str: _str,
        complex: lambda value: ComplexNode(value.real, value.imag),
        bytes: BytesNode,
        bytearray: lambda value: BytearrayNode(bytes(value)),
        torch.Size: lambda value: SizeNode(list(value)),
        torch.dtype: lambda value: TorchDtypeNode(dtypes.TORCH_NAMES[value]),
        torch.device: lambda value: TorchDeviceNode(str(value)),
    }
)
"""How to save a value of exactly this type; a subclass is another type and comes back as something else."""


def atom(value: Any, path: str) -> Node:
    """Return the node of a value without children. Raises UnsupportedStateError for any other value."""
    convert = ATOMS.get(type(value))
    return convert(value) if convert is not None else numpy_value(value, path)


def numpy_value(value: Any, path: str) -> Node:
    """Return the node of a numpy scalar or dtype. Raises UnsupportedStateError for any other value."""
    if isinstance(value, np.dtype):
        return NumpyDtypeNode(_dtype_name(value, path))
    if isinstance(value, np.generic) and type(value) is value.dtype.type:
        name = _dtype_name(value.dtype, path)
        return NumpyScalarNode(name, value.tobytes()[: value.dtype.itemsize])  # an empty string has 0 bytes, not a NUL
    raise UnsupportedStateError(f"{path}: a {type(value).__qualname__} cannot be saved here")


def _dtype_name(dtype: np.dtype[Any], path: str) -> str:
    name = dtypes.numpy_name(dtype)
    if name is None:
        raise UnsupportedStateError(
            f"{path}: the numpy dtype {dtype} cannot be saved, since its bytes alone do not say what it holds; "
            "save each field as an array of its own, and of dtypes that are not numpy's own plain values or tensors"
        )
    return name


def from_node(node: Node) -> Any:
    """Return the value of a node without children. Raises CorruptStoreError where it makes no sense."""
    match node:
        case None | bool() | int() | float() | str():
            return node
        case BigIntNode():
            return int.from_bytes(node.data, "little", signed=True)
        case ComplexNode():
            return complex(node.real, node.imag)
        case SurrogateStrNode():
            return _decode(node.data, "utf-8")
        case BytesNode():
            return node.data
        case BytearrayNode():
            return bytearray(node.data)
        case SizeNode():
            return _guarded(torch.Size, node.items)
        case TorchDtypeNode():
            if node.name not in dtypes.TORCH_DTYPES:
                raise CorruptStoreError(f"unknown torch dtype {node.name[:64]!r}; it may come from a newer torch")
            return dtypes.TORCH_DTYPES[node.name]
        case TorchDeviceNode():
            return _guarded(torch.device, node.name)
        case NumpyDtypeNode():
            return dtypes.numpy_dtype(node.name)
        case NumpyScalarNode():
            return _numpy_scalar(dtypes.numpy_dtype(node.dtype), node.data)
        case _:
            raise CorruptStoreError(f"a {type(node).__name__} has no place here")


def _numpy_scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    if len(data) != dtype.itemsize:
        raise CorruptStoreError(f"a numpy scalar of dtype {dtype} has {len(data)} bytes instead of {dtype.itemsize}")
    match dtype.kind:  # an array of one item would lose trailing NULs, and has no room for an empty string
        case "S":
            return np.bytes_(data)
        case "U":
            return np.str_(_decode(data, "utf-32-le" if dtype.str[0] == "<" else "utf-32-be"))
        case "V":
            return np.void(data)
        case _:
            return np.frombuffer(data, dtype)[0]


def _decode(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding, "surrogatepass")
    except UnicodeDecodeError as error:
        raise CorruptStoreError(f"a string is not {encoding}") from error


def _guarded(make: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return make(argument)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise CorruptStoreError(f"not a {make.__name__}: {str(argument)[:64]!r}") from error
