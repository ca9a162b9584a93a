# SPDX-License-Identifier: Apache-2.0
"""Search for manifests that no record points to: where one begins, its length, and its checkpoint."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from pccheck_async.errors import CorruptStoreError
from pccheck_async.format.manifest import LATEST_VERSION, SHARDED_VERSION, VERSION, Manifest, decode, encode
from pccheck_async.format.record import MIN_BLOCK

__all__ = ["HEAD_NBYTES", "SIGNATURES", "find_signatures", "manifest_at", "numbers_at", "object_length"]

_PIECES: Final = ((VERSION, None), (SHARDED_VERSION, ()), (LATEST_VERSION, None), (LATEST_VERSION, ()))
_FIRST: Final = [encode(Manifest(each, 0, 0, 0.0, {}, None, (), (), (), 0, its)) for each, its in _PIECES]
SIGNATURES: Final = [first[: first.index(b"counter") + len(b"counter")] for first in _FIRST]
"""The first bytes of manifests of each version: the map's number of entries, the version, the second entry's name."""

HEAD_NBYTES: Final = 64
"""Bytes at the beginning of a manifest that contain version, counter and step, with their names."""
_MAP_OF_THREE: Final = b"\x83"


class _Head(msgspec.Struct):
    version: int
    counter: int
    step: int


_FIXED: Final = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 0),  # nil, false, true
    **dict.fromkeys((0xCC, 0xD0), 1),
    **dict.fromkeys((0xCD, 0xD1), 2),
    **dict.fromkeys((0xCA, 0xCE, 0xD2), 4),
    **dict.fromkeys((0xCB, 0xCF, 0xD3), 8),
}
"""Bytes that follow the first byte of a MessagePack object of fixed length, by that first byte."""
_COUNTED: Final = {
    0xC4: (1, 1, 0), 0xC5: (2, 1, 0), 0xC6: (4, 1, 0), 0xD9: (1, 1, 0), 0xDA: (2, 1, 0), 0xDB: (4, 1, 0),
    0xDC: (2, 0, 1), 0xDD: (4, 0, 1), 0xDE: (2, 0, 2), 0xDF: (4, 0, 2),
}  # fmt: skip
"""Bytes, strings, arrays and maps, by first byte: width of the item count, and bytes and objects of each item."""


def find_signatures(data: memoryview, step: int = MIN_BLOCK) -> list[int]:
    """Return the offsets in ``data`` at which a manifest may begin, multiples of ``step``, the last one first.

    The length of ``data`` must be a multiple of ``step``, too.
    """
    rows = np.frombuffer(data, np.uint8).reshape(-1, step)
    each = [(rows[:, : len(one)] == np.frombuffer(one, np.uint8)).all(axis=1) for one in SIGNATURES]
    hits = np.logical_or.reduce(each)
    return [row * step for row in np.flatnonzero(hits).tolist()[::-1]]


def numbers_at(data: bytes | memoryview) -> tuple[int, int] | None:
    """Return counter and step of a manifest from its first :data:`HEAD_NBYTES` bytes; None if it is no manifest."""
    first = bytes(data[:HEAD_NBYTES])
    if not first.startswith(tuple(SIGNATURES)):
        return None
    first = _MAP_OF_THREE + first[1:]  # as if it ended behind the step
    try:
        head = msgspec.msgpack.decode(first[: object_length(first)], type=_Head)
    except (CorruptStoreError, msgspec.DecodeError):
        return None
    return head.counter, head.step


def object_length(data: bytes | memoryview) -> int | None:
    """Return the length of the MessagePack object at the beginning of ``data``; None if it goes on after ``data``.

    Raises CorruptStoreError for a first byte of an object that no manifest has.
    """
    at, left, end = 0, 1, len(data)
    while left:
        if at >= end:
            return None
        first = data[at]
        at += 1
        left -= 1
        if first <= 0x7F or first >= 0xE0:
            continue
        if first <= 0x9F:
            left += (first & 0x0F) * (2 if first <= 0x8F else 1)
        elif first <= 0xBF:
            at += first & 0x1F
        elif first in _FIXED:
            at += _FIXED[first]
        elif first in _COUNTED:
            width, each_bytes, each_objects = _COUNTED[first]
            if at + width > end:
                return None
            count = int.from_bytes(data[at : at + width], "big")
            at += width + each_bytes * count
            left += each_objects * count
        else:
            raise CorruptStoreError(f"no manifest: {first:#x} begins no object of one")
        if at > end:
            return None
    return at


def manifest_at(data: bytes | memoryview, offset: int) -> tuple[Manifest, int] | None:
    """Return the manifest at the beginning of ``data``, and its length; None if more bytes are needed.

    Raises CorruptStoreError if there is none, or its payload does not fit before ``offset``, its place in the slot.
    """
    if (length := object_length(data)) is None:
        return None
    manifest = decode(data[:length])
    if manifest.payload_nbytes > offset:
        raise CorruptStoreError("no manifest: its payload does not fit before it")
    return manifest, length
