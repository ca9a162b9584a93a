"""Finding manifests in bytes that no record points to: pure decisions, no I/O."""

from __future__ import annotations

from typing import Final

import numpy as np

from pccheck_async.errors import CorruptStoreError
from pccheck_async.format.manifest import MIN_BLOCK, VERSION, Manifest, decode, encode

__all__ = ["SIGNATURE", "MalformedError", "find_signatures", "manifest_at", "object_length"]

_FIRST: Final = Manifest(VERSION, 0, 0, 0.0, {}, None, (), (), (), 0)
SIGNATURE: Final = encode(_FIRST)[: encode(_FIRST).index(b"counter") + len(b"counter")]
"""What every manifest of this format begins with: a map of so many entries, its version, the name of the second."""

_FIXED: Final = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 0),  # nil, false, true
    **dict.fromkeys((0xCC, 0xD0), 1),
    **dict.fromkeys((0xCD, 0xD1), 2),
    **dict.fromkeys((0xCA, 0xCE, 0xD2), 4),
    **dict.fromkeys((0xCB, 0xCF, 0xD3), 8),
}
"""Bytes that follow the first one of a MessagePack object of fixed length."""
_SIZED: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes and strings: so many bytes of length come first."""
_COUNTED: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""Arrays and maps: so many bytes of count come first, and each item takes so many objects."""


class MalformedError(ValueError):
    """Bytes that are no MessagePack."""


def find_signatures(data: memoryview, step: int = MIN_BLOCK) -> list[int]:
    """Return the multiples of ``step`` at which a manifest may begin, the last one first; ``step`` divides all."""
    rows = np.frombuffer(data, np.uint8).reshape(-1, step)
    hits = (rows[:, : len(SIGNATURE)] == np.frombuffer(SIGNATURE, np.uint8)).all(axis=1)
    return [row * step for row in np.flatnonzero(hits).tolist()[::-1]]


def object_length(data: bytes | memoryview) -> int | None:
    """Return the length of the MessagePack object that ``data`` begins with; None where it goes on behind the end.

    Raises MalformedError where it is none.
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
        if first <= 0x8F:
            left += 2 * (first & 0x0F)
        elif first <= 0x9F:
            left += first & 0x0F
        elif first <= 0xBF:
            at += first & 0x1F
        elif first in _FIXED:
            at += _FIXED[first]
        elif first in _SIZED:
            width = _SIZED[first]
            if at + width > end:
                return None
            at += width + int.from_bytes(data[at : at + width], "big")
        elif first in _COUNTED:
            width, each = _COUNTED[first]
            if at + width > end:
                return None
            left += each * int.from_bytes(data[at : at + width], "big")
            at += width
        else:
            raise MalformedError(f"{first:#x} begins no object of a manifest")
        if at > end:
            return None
    return at


def manifest_at(data: bytes | memoryview, offset: int) -> tuple[Manifest, int] | None:
    """Return the manifest that ``data`` begins with and its length; None where more bytes are needed to tell.

    Args:
        data: Bytes of a slot.
        offset: Where in the slot they lie.

    Raises:
        CorruptStoreError: no manifest begins here, or none that this place can have: the payload lies before it.
    """
    try:
        length = object_length(data)
    except MalformedError as error:
        raise CorruptStoreError(f"no manifest: {error}") from None
    if length is None:
        return None
    manifest = decode(data[:length])
    if manifest.payload_nbytes > offset:
        raise CorruptStoreError("no manifest: its payload does not fit before it")
    return manifest, length
