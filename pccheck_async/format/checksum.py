"""The one checksum of the format: CRC-32 (IEEE 802.3, reflected, as in zlib, gzip and PNG).

Every Python has it, so a store can be verified where the extension was not compiled; the extension computes it faster
than memory delivers. CRC-32 detects every burst error of up to 32 bits, and misses one random corruption in 2**32.
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

NAME = "crc32"


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """Return the CRC-32 of ``data``, continuing from ``value``."""
    return _crc32(data, value)
