# SPDX-License-Identifier: Apache-2.0
"""The one checksum of the format: CRC-32 (IEEE 802.3, reflected, as in zlib, gzip and PNG).

Every Python has it, so a store can be verified where the extension was not compiled; the extension computes it faster
than memory delivers. CRC-32 detects every burst error of up to 32 bits, and misses one random corruption in 2**32.

CRC-32 is linear: the checksum of bytes is a function of the checksums and lengths of their parts. So the checksums of
all MiBs give the checksum of the whole, and several MiBs that are read in one go are verified by one checksum.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final

try:
    from pccheck_async import _ext
except ImportError:
    _ext = None  # type: ignore[assignment]
    IMPLEMENTATION = "zlib"
else:
    IMPLEMENTATION = _ext.CRC_IMPLEMENTATION

NAME = "crc32"
PIECE_BYTES: Final = 1 << 20
SUM_BYTES: Final = 4
"""Size of one checksum in a table: an unsigned integer, little-endian."""

_POLYNOMIAL: Final = 0xEDB88320
_X_0: Final = 1 << 31
_X_8: Final = 1 << 23


def piece_count(nbytes: int) -> int:
    """Return the number of pieces of ``nbytes`` bytes."""
    return -(-nbytes // PIECE_BYTES)


def piece_sums_in_python(data: bytes | bytearray | memoryview) -> bytes:
    """Return the table of the CRC-32 of each MiB of ``data``, the last one maybe shorter; see :data:`piece_sums`."""
    octets = memoryview(data).cast("B")
    pieces = (octets[at : at + PIECE_BYTES] for at in range(0, len(octets), PIECE_BYTES))
    return b"".join(zlib.crc32(piece).to_bytes(SUM_BYTES, "little") for piece in pieces)


def combine_in_python(sums: bytes | memoryview, nbytes: int) -> int:
    """Return the CRC-32 of ``nbytes`` bytes from their :data:`piece_sums`; see :data:`combine`.

    For each piece the checksum so far is multiplied by x**(8 * bytes of the piece), the method of zlib. Raises
    ValueError if the table has another length.
    """
    if nbytes < 0 or len(sums) != SUM_BYTES * piece_count(nbytes):
        raise ValueError(f"{len(sums)} bytes are no table of checksums for {nbytes}")
    value = 0
    for number in range(piece_count(nbytes)):
        left = nbytes - number * PIECE_BYTES
        over = _X_8_PIECE if left >= PIECE_BYTES else _power_of_bytes(left)
        at = number * SUM_BYTES
        value = _multiply(over, value) ^ int.from_bytes(sums[at : at + SUM_BYTES], "little")
    return value


def _power_of_bytes(nbytes: int) -> int:
    """Return x**(8 * nbytes), by squaring."""
    power, factor = _X_0, _X_8
    while nbytes:
        if nbytes & 1:
            power = _multiply(power, factor)
        factor = _multiply(factor, factor)
        nbytes >>= 1
    return power


def _multiply(a: int, b: int) -> int:
    """Return the product of two polynomials of degree below 32, reflected, modulo the polynomial of the CRC."""
    product, bit = 0, _X_0
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product


_X_8_PIECE: Final = _power_of_bytes(PIECE_BYTES)

crc32: Callable[..., int]
"""Function of bytes and of the checksum of all bytes before them (default 0): returns the checksum of all."""
piece_sums: Callable[[bytes | bytearray | memoryview], bytes]
combine: Callable[[bytes | memoryview, int], int]
if _ext is None:
    crc32, piece_sums, combine = zlib.crc32, piece_sums_in_python, combine_in_python
else:
    crc32, piece_sums, combine = _ext.crc32, _ext.crc32_pieces, _ext.crc32_combine
