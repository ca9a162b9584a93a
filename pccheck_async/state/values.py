# SPDX-License-Identifier: Apache-2.0
"""Converting plain values to nodes and back, with exact types and all bits; also keys of mappings and items of sets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType, NoneType
from typing import Any, Final

import msgspec
import numpy as np
import torch

from pccheck_async.errors import CorruptStoreError, UnsupportedStateError
from pccheck_async.format import dtypes
from pccheck_async.format import skeleton as nodes
from pccheck_async.format.skeleton import Node

SMALL_INTS: Final = (-(1 << 63), (1 << 64) - 1)

VERBATIM: Final = frozenset((NoneType, bool, int, float))
"""Types whose values serve as their own nodes; ints only up to 64 bits."""


def with_article(name: str) -> str:
    """Return the name of a type with its indefinite article, for messages: "an int", "a Linear"."""
    return f"{'an' if name[:1] in 'aeiouAEIO' else 'a'} {name}"


def all_small(numbers: Collection[int]) -> bool:
    """Return whether all these ints can serve as their own nodes: they fit into 64 bits, signed or unsigned."""
    return not numbers or (min(numbers) >= SMALL_INTS[0] and max(numbers) <= SMALL_INTS[1])


def _from_int(value: int) -> Node:
    if SMALL_INTS[0] <= value <= SMALL_INTS[1]:
        return value
    return nodes.BigIntNode(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _from_str(value: str) -> Node:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return nodes.SurrogateStrNode(value.encode("utf-8", "surrogatepass"))
    return value


ATOMS: Final[Mapping[type, Callable[[Any], Node]]] = MappingProxyType(
    {
        **dict.fromkeys((NoneType, bool, float), lambda value: value),
        int: _from_int,
        str: _from_str,
        complex: lambda value: nodes.ComplexNode(value.real, value.imag),
        bytes: nodes.BytesNode,
        bytearray: lambda value: nodes.BytearrayNode(bytes(value)),
        torch.Size: lambda value: nodes.SizeNode(list(value)),
        torch.dtype: lambda value: nodes.TorchDtypeNode(dtypes.TORCH_NAMES[value]),
        torch.device: lambda value: nodes.TorchDeviceNode(str(value)),
    }
)
"""Conversions to nodes by exact type; a value of a subclass would be restored as another type."""


def atom(value: Any, path: str) -> Node:
    """Return the node of a value without children. Raises UnsupportedStateError for any other value."""
    convert = ATOMS.get(type(value))
    return convert(value) if convert is not None else numpy_value(value, path)


def numpy_value(value: Any, path: str) -> Node:
    """Return the node of a numpy scalar or dtype. Raises UnsupportedStateError for any other value."""
    if isinstance(value, np.dtype):
        return nodes.NumpyDtypeNode(_dtype_name(value, path))
    if isinstance(value, np.generic) and type(value) is value.dtype.type:
        name = _dtype_name(value.dtype, path)
        return nodes.NumpyScalarNode(name, value.tobytes()[: value.dtype.itemsize])  # '' has a NUL there
    raise UnsupportedStateError(f"{path}: a {type(value).__qualname__} cannot be saved here")


def _dtype_name(dtype: np.dtype[Any], path: str) -> str:
    name = dtypes.numpy_name(dtype)
    if name is None:
        raise UnsupportedStateError(
            f"{path}: the numpy dtype {dtype} cannot be saved, since its bytes alone do not describe its values; "
            "save each field as an array of its own, and values of another package's dtypes as plain values or tensors"
        )
    return name


def key_nodes(keys: list[Any], path: str, depth: int) -> list[Node]:
    """Return the nodes of the keys of one mapping. Raises UnsupportedStateError if a key cannot be saved."""
    kinds = {*map(type, keys)}
    found: list[Node] = keys
    if not (kinds == {str} and "".join(keys).isascii()) and not (kinds == {int} and all_small(keys)):
        found = [key if type(key) is str and key.isascii() else _key(key, path, depth) for key in keys]
    if len(keys) > nodes.MOST_ALIKE:
        _check_alike(found, keys, path)
    return found


def _key(key: Any, path: str, depth: int) -> Node:
    """Return the node of a mapping key or set item.

    Raises UnsupportedStateError unless it is a plain hashable value without arrays that equals itself.
    """
    if depth > nodes.MAX_DEPTH:
        raise UnsupportedStateError(f"{path}: a key nested more than {nodes.MAX_DEPTH} levels deep")
    kind = type(key)
    if kind is tuple:
        return nodes.TupleNode([_key(item, path, depth + 1) for item in key])
    if kind is frozenset:
        return nodes.FrozenSetNode(set_nodes(key, path, depth + 1))
    if kind in ATOMS or (isinstance(key, (np.generic, np.dtype)) and not isinstance(key, np.void)):
        if not key == key:  # noqa: PLR0124 - NaN, of any type
            raise UnsupportedStateError(f"{path}: NaN as a key or in a set cannot be saved: it never equals itself")
        return atom(key, path)
    raise UnsupportedStateError(
        f"{path}: a {kind.__qualname__} as a key or in a set cannot be saved; use a plain value, or a list for tensors"
    )


def set_nodes(items: Iterable[Any], path: str, depth: int) -> list[Node]:
    """Return the nodes of the items of a set, in an order that is the same in every process."""
    keys = list(items)
    found = [_key(item, path, depth) for item in keys]
    _check_alike(found, keys, path)
    return sorted(found, key=msgspec.msgpack.encode)


def _check_alike(found: Sequence[Node], keys: Sequence[Any], path: str) -> None:
    if nodes.too_alike(found, keys):
        raise UnsupportedStateError(
            f"{path}: more than {nodes.MOST_ALIKE} keys or items have the same hash, and could not be read back in "
            "time that is worth the wait; store them in a list"
        )


def from_node(node: Node) -> Any:
    """Return the value of a node without children. Raises CorruptStoreError if the node does not describe a value."""
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    convert = _FROM_NODE.get(type(node))
    if convert is None:
        raise CorruptStoreError(f"a {type(node).__name__} is no plain value")
    return convert(node)


def _numpy_scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    if len(data) != dtype.itemsize:
        raise CorruptStoreError(f"a numpy scalar of dtype {dtype} has {len(data)} bytes instead of {dtype.itemsize}")
    match dtype.kind:  # an array of one item would lose trailing NULs, and has no item size for an empty string
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


def _make(make: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return make(argument)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise CorruptStoreError(f"not a {make.__name__}: {str(argument)[:64]!r}") from error


def _torch_dtype(name: str) -> torch.dtype:
    if name not in dtypes.TORCH_DTYPES:
        raise CorruptStoreError(f"unknown torch dtype {name[:64]!r}; it may come from a newer torch")
    return dtypes.TORCH_DTYPES[name]


_FROM_NODE: Final[Mapping[type, Callable[[Any], Any]]] = MappingProxyType(
    {
        nodes.BigIntNode: lambda node: int.from_bytes(node.data, "little", signed=True),
        nodes.ComplexNode: lambda node: complex(node.real, node.imag),
        nodes.SurrogateStrNode: lambda node: _decode(node.data, "utf-8"),
        nodes.BytesNode: lambda node: node.data,
        nodes.BytearrayNode: lambda node: bytearray(node.data),
        nodes.SizeNode: lambda node: _make(torch.Size, node.items),
        nodes.TorchDtypeNode: lambda node: _torch_dtype(node.name),
        nodes.TorchDeviceNode: lambda node: _make(torch.device, node.name),
        nodes.NumpyDtypeNode: lambda node: dtypes.numpy_dtype(node.name),
        nodes.NumpyScalarNode: lambda node: _numpy_scalar(dtypes.numpy_dtype(node.dtype), node.data),
    }
)
