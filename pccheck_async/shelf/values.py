# SPDX-License-Identifier: Apache-2.0
"""Converting values of a shelf to a manifest and bytes to store, and back to values whose arrays view the bytes."""

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
"""Function that stores bytes at an offset in a variable's contents."""

_PIECE: Final = 256 << 10
"""Most bytes that are stored at a time: a piece is read twice, the second time from the processor's caches."""
_encode: Final = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class ValueParts:
    """A flattened value: its skeleton, its live arrays in order, and their layout."""

    skeleton: Node
    arrays: list[Array]
    layout: Layout

    def same_as(self, skeleton: Node, arrays: list[Array]) -> bool:
        """Return whether the value has the same array objects, and otherwise the same content, bit for bit."""
        return self.has_arrays(arrays) and _encode(self.skeleton) == _encode(skeleton)

    def has_arrays(self, arrays: list[Array]) -> bool:
        """Return whether the value has the same array objects, by identity."""
        return len(self.arrays) == len(arrays) and all(a is b for a, b in zip(self.arrays, arrays, strict=True))


def take_apart(name: str, value: Any) -> ValueParts:
    """Flatten a value. Raises UnsupportedStateError, naming the path in it, if it cannot be stored on a shelf."""
    flat = flatten({name: value})
    if flat.objects:
        raise UnsupportedStateError(f"{name}: objects are not kept on a shelf; put their state_dict() there")
    if flat.has_composed:
        raise UnsupportedStateError(
            f"{name}: no tensors that are composed of others are kept on a shelf; put those there"
        )
    return ValueParts(flat.skeleton, list(flat.leaves.values), arrange(flat.leaves))


def described(parts: ValueParts) -> Manifest:
    """Return the manifest of a value, without the checksum and the counter, which are set later."""
    storages, end = [], 0
    for nbytes in parts.layout.storage_nbytes:
        storages.append(StorageEntry(_aligned(end, ALIGNMENT), nbytes))
        end = storages[-1].offset + nbytes
    tensors = parts.layout.tensors
    return Manifest(VERSION, 0, 0, 0.0, {}, parts.skeleton, tensors, tuple(storages), (), _aligned(end, MIN_BLOCK))


def fill(parts: ValueParts, manifest: Manifest, put: Put) -> None:
    """Store the whole payload in order: the bytes of a value's arrays, from any device, and zeros between them.

    ``put`` is called for each piece.
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
    """Return the value that a variable's manifest describes, and its arrays, which view ``payload``.

    Raises CorruptStoreError if the manifest does not describe a value.
    """
    allocation = Allocation.over(manifest, payload)
    arrays = [allocation.array(index) for index in range(len(manifest.tensors))]
    return remade(manifest, arrays), arrays


def remade(manifest: Manifest, arrays: list[Array]) -> Any:
    """Return a new value as the manifest describes it, with the given arrays in it."""
    assert isinstance(manifest.skeleton, DictNode)
    return rebuild(manifest.skeleton.values[0], arrays.__getitem__)


def with_arrays(value: Any, new: Mapping[int, Array]) -> Any:
    """Return a value with arrays replaced; ``new`` has the new ones by ``id()`` of the old. Changes dicts and lists."""
    if isinstance(value, dict):
        for key in value:
            value[key] = with_arrays(value[key], new)
    elif isinstance(value, list):
        value[:] = [with_arrays(each, new) for each in value]
    elif type(value) is tuple:
        return tuple(with_arrays(each, new) for each in value)
    return new.get(id(value), value)


def refilled(value: Any, content: Any) -> Any:
    """Return ``content``, moved into ``value`` if both are dicts, or lists, of the same type."""
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
