"""The one checksum of the format: CRC-32 (IEEE 802.3, reflected, as in zlib, gzip and PNG).

It was chosen because it is in every Python (``zlib.crc32``), so that a store can be verified where nothing compiles,
while carry-less multiplication (x86-64) and the CRC instructions (arm64) compute it faster than memory delivers. It
finds every burst of up to 32 bits and misses a random corruption once in 2**32.
"""

from __future__ import annotations

import zlib

try:
    from pccheck_async import _ext
except ImportError:
    _crc32 = zlib.crc32
    IMPLEMENTATION = "zlib"
else:
    _crc32 = _ext.crc32
    IMPLEMENTATION = _ext.CRC_IMPLEMENTATION

__all__ = ["IMPLEMENTATION", "NAME", "crc32"]

NAME = "crc32"


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """Return the CRC-32 of ``data``, continuing from ``value``."""
    return _crc32(data, value)
