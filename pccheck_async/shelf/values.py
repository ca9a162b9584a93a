# SPDX-License-Identifier: Apache-2.0
"""Values of a shelf: taken apart into a manifest and bytes to store, and made of both again, arrays in place."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.format.manifest import ALIGNMENT, VERSION, Manifest, StorageEntry
from pccheck_async.format.record import MIN_BLOCK
from pccheck_async.format.skeleton import DictNode, Node
from pccheck_async.state import Allocation, Array, Layout, PackedSource, arrange, flatten
from pccheck_async.state.restore.tree import rebuild

__all__ = ["Put", "ValueParts", "described", "fill", "made", "refilled", "remade", "take_apart", "with_arrays"]

Put = Callable[[int, memoryview], None]
"""Stores bytes at an offset in a variable's contents."""

_PIECE: Final = 256 << 10
"""Bytes that are put at a time: the second read of a piece finds it in the processor's caches."""
_encode: Final = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class ValueParts:
    """A value, taken apart: its nodes, and its arrays (the live ones) in their order."""

    skeleton: Node
    arrays: list[Array]
    layout: Layout

    def same_as(self, skeleton: Node, arrays: list[Array]) -> bool:
        """Whether a value has these very array objects, and apart from them the same content to the bit."""
        return self.has_arrays(arrays) and _encode(self.skeleton) == _encode(skeleton)

    def has_arrays(self, arrays: list[Array]) -> bool:
        """Whether a value has these very array objects."""
        return len(self.arrays) == len(arrays) and all(a is b for a, b in zip(self.arrays, arrays, strict=True))


def take_apart(name: str, value: Any) -> ValueParts:
    """Take a value apart. Raises UnsupportedStateError if it cannot be kept; names the path in it."""
    flat = flatten({name: value})
    if flat.objects:
        raise UnsupportedStateError(f"{name}: objects are not kept on a shelf; put their state_dict() there")
    if flat.has_composed:
        raise UnsupportedStateError(
            f"{name}: no tensors that are composed of others are kept on a shelf; put those there"
        )
    return ValueParts(flat.skeleton, list(flat.leaves.values), arrange(flat.leaves))


def described(parts: ValueParts) -> Manifest:
    """Return the manifest of a value; its checksum and its counter come with the commit."""
    storages, end = [], 0
    for nbytes in parts.layout.storage_nbytes:
        storages.append(StorageEntry(_aligned(end, ALIGNMENT), nbytes))
        end = storages[-1].offset + nbytes
    tensors = parts.layout.tensors
    return Manifest(VERSION, 0, 0, 0.0, {}, parts.skeleton, tensors, tuple(storages), (), _aligned(end, MIN_BLOCK))


def fill(parts: ValueParts, manifest: Manifest, put: Put) -> None:
    """Store the bytes of a value's arrays, from any memory and device, and zeros between them.

    That is all of the payload, in order.
    """
    sources = parts.layout.sources
    if sources.devices:
        sources.pack_devices()
    end = 0
    for (storage, offset, nbytes), source in zip(parts.layout.extents.tolist(), sources, strict=True):
        start = manifest.storages[storage].offset + offset
        if end < start:
            put(end, memoryview(bytes(start - end)))
        for low in range(0, nbytes, _PIECE):
            high = min(low + _PIECE, nbytes)
            if isinstance(source, PackedSource):
                piece = memoryview(bytearray(high - low))
                source.copy(low, high, piece)
            else:
                piece = memoryview((ctypes.c_ubyte * (high - low)).from_address(source.address + low)).cast("B")
            put(start + low, piece)
        end = start + nbytes
    if end < manifest.payload_nbytes:
        put(end, memoryview(bytes(manifest.payload_nbytes - end)))


def made(manifest: Manifest, payload: memoryview) -> tuple[Any, list[Array]]:
    """Make the value that a variable's manifest describes, and its arrays, which view ``payload``.

    Raises CorruptStoreError if the manifest describes no value.
    """
    allocation = Allocation.over(manifest, payload)
    arrays = [allocation.array(index) for index in range(len(manifest.tensors))]
    return remade(manifest, arrays), arrays


def remade(manifest: Manifest, arrays: list[Array]) -> Any:
    """Make the value anew around its arrays."""
    assert isinstance(manifest.skeleton, DictNode)
    return rebuild(manifest.skeleton.values[0], arrays.__getitem__)


def with_arrays(value: Any, new: Mapping[int, Array]) -> Any:
    """Return a value with other arrays, given by the identities of the old ones; dicts and lists stay the same."""
    if isinstance(value, dict):
        for key in value:
            value[key] = with_arrays(value[key], new)
    elif isinstance(value, list):
        value[:] = [with_arrays(each, new) for each in value]
    elif type(value) is tuple:
        return tuple(with_arrays(each, new) for each in value)
    return new.get(id(value), value)


def refilled(value: Any, content: Any) -> Any:
    """Return ``content``: as the same outermost object, where that can be refilled."""
    if type(value) is type(content) is list:
        value[:] = content
        return value
    if type(value) is type(content) and isinstance(value, dict):
        value.clear()
        value.update(content)
        return value
    return content


def _aligned(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to
