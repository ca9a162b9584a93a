# SPDX-License-Identifier: Apache-2.0
"""Compression of data objects: blocks of 1 MiB, each with its bytes grouped by significance, in a zstd frame.

Numbers of a model have few exponents, and mantissas that look random: grouped, the first bytes of all elements of a
block, then the second ones, and so on, the exponents compress, and zstd passes the rest over (ZipNN, Hershcovitch et
al. 2024, sections 3 and 4). A block is decoded alone, so a reader that wants a part of an object reads a part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pccheck_async.errors import DamagedError

__all__ = [
    "BLOCK_BYTES", "WORTH", "Block", "blocks_in", "compress", "decompress", "is_possible", "sample_ratio",
    "stored_range",
]  # fmt: skip

BLOCK_BYTES = 1 << 20
_LITTLE_SEARCH: Final = {"min_match": 7, "hash_log": 6, "window_log": 17}
"""Grouped bytes hardly repeat, so nearly all is gained by the entropy code: on bf16 weights this is twice as fast as
zstd's level 1 with its own parameters, and leaves 0.67 for 0.68."""
_WIDTHS = (1, 2, 4, 8)
_SLICES, _SLICE_BYTES = 4, 1 << 14
"""The width of a block is chosen by so many slices of it."""
WORTH = 0.97
"""A block is stored as it is, unless this share of its bytes is enough."""
_SAMPLED = 4
"""Blocks by which the ratio of an object is estimated."""


class Block(NamedTuple):
    """One block of a compressed object.

    Attributes:
        nbytes: Its size in the object, in bytes.
        width: Size in bytes of the elements whose bytes are grouped; 0: the block is stored as it is.
    """

    nbytes: int
    width: int


def is_possible(nbytes: int, blocks: Sequence[Block]) -> bool:
    """Whether an object of ``nbytes`` bytes can have been compressed to these blocks."""
    if len(blocks) != -(-nbytes // BLOCK_BYTES):
        return False
    sizes = chain(repeat(BLOCK_BYTES, len(blocks) - 1), (nbytes - (len(blocks) - 1) * BLOCK_BYTES,))
    return all(
        block.nbytes == size if not block.width else block.width in _WIDTHS and 0 < block.nbytes < size
        for size, block in zip(sizes, blocks, strict=True)
    )


def blocks_in(data: memoryview) -> Iterator[memoryview]:
    """Return the blocks of an object, before it is compressed."""
    for start in range(0, len(data), BLOCK_BYTES):
        yield data[start : start + BLOCK_BYTES]


def compress(block: memoryview, into: memoryview) -> Block:
    """Compress a block into the beginning of ``into``, which may be memory before it, or its own; return what it is.

    Mostly without the GIL. Raises ImportError: zstandard is not installed.
    """
    width, _ = _width_of(block)
    stored = _compressor().compress(_grouped(block, width))
    if len(stored) >= WORTH * len(block):
        width, stored = 0, block
    into[: len(stored)] = stored
    return Block(len(stored), width)


def sample_ratio(data: memoryview) -> float:
    """Estimate the share of its bytes that an object takes when it is compressed, by a small part of them."""
    blocks = [*blocks_in(data)]
    sampled = blocks[:: max(1, len(blocks) // _SAMPLED)]
    return sum(_width_of(block)[1] for block in sampled) / len(sampled)


def stored_range(blocks: Sequence[Block], start: int, nbytes: int) -> tuple[int, int]:
    """Return start and end of the bytes of a compressed object that hold ``nbytes`` plain ones from ``start`` on."""
    first, last = start // BLOCK_BYTES, (start + nbytes - 1) // BLOCK_BYTES
    low = sum(block.nbytes for block in blocks[:first])
    return low, low + sum(block.nbytes for block in blocks[first : last + 1])


def decompress(stored: memoryview, blocks: Sequence[Block], nbytes: int, start: int, into: memoryview) -> None:
    """Fill ``into`` with the plain bytes of an object from ``start`` on.

    ``stored``: the bytes of :func:`stored_range`. ``nbytes``: the plain size of the object. Mostly without the GIL.
    Raises DamagedError: they cannot be decoded; ImportError: zstandard is not installed.
    """
    end, low = start + len(into), 0
    for number in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
        begins, ends = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, nbytes)
        data = _decoded(stored[low : low + blocks[number].nbytes], blocks[number].width, ends - begins)
        low += blocks[number].nbytes
        first, last = max(begins, start), min(ends, end)
        into[first - start : last - start] = data[first - begins : last - begins]


def _decoded(stored: memoryview, width: int, nbytes: int) -> bytes | memoryview:
    if not width:
        return stored
    import zstandard

    try:
        if zstandard.frame_content_size(stored) != nbytes:  # before anything is allocated: the frame says how much
            raise DamagedError(f"a compressed block has not the size of {nbytes} bytes")
        grouped = zstandard.ZstdDecompressor().decompress(stored)
    except zstandard.ZstdError as error:
        raise DamagedError(f"a compressed block cannot be decoded: {error}") from None
    if width == 1:
        return grouped
    count = nbytes // width
    elements = np.empty((count, width), np.uint8)
    for place in range(width):  # a copy of the transposed whole takes ten times as long
        elements[:, place] = np.frombuffer(grouped, np.uint8, count, place * count)
    return elements.tobytes() + grouped[count * width :]


def _compressor() -> Any:
    import zstandard

    parameters = zstandard.ZstdCompressionParameters.from_level(
        1,
        strategy=zstandard.STRATEGY_FAST,
        write_checksum=False,  # chunks have one
        **_LITTLE_SEARCH,
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def _width_of(block: memoryview) -> tuple[int, float]:
    """Return the width by which a block compresses best, 0 for none, and the share of its bytes that it then takes.

    By the entropy of a sample, and so without what repeats in the block.
    """
    whole = len(block) // 8 * 8
    step = max(_SLICE_BYTES, whole // _SLICES // 8 * 8)  # slices begin with an element
    slices = [np.frombuffer(block[start : start + _SLICE_BYTES], np.uint8) for start in range(0, whole, step)]
    if not slices:
        return 1, 1.0
    sample = np.concatenate(slices)[: sum(map(len, slices)) // 8 * 8].reshape(-1, 8)
    counts = np.stack([np.bincount(sample[:, place], minlength=256) for place in range(8)])
    ratio, width = min((_share(counts.reshape(-1, width, 256).sum(0)) + width / 1000, width) for width in _WIDTHS)
    return width, ratio


def _share(counts: npt.NDArray[np.int64]) -> float:
    """Return the share that an entropy code takes of bytes with these counts, in groups of equally many."""
    shares = counts / counts.sum(1, keepdims=True)
    bits = -(shares * np.log2(shares, out=np.zeros_like(shares), where=counts > 0)).sum(1)
    bits += ((counts > 0).sum(1) - 1) / (2 * np.log(2) * counts.sum(1))  # a sample seems to have less than there is
    return float(bits.mean()) / 8


def _grouped(data: memoryview, width: int) -> bytes | memoryview:
    if width == 1:
        return data
    whole = len(data) // width * width
    elements = np.frombuffer(data[:whole], np.uint8).reshape(-1, width)
    return elements.T.tobytes() + data[whole:]
