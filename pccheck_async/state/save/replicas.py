# SPDX-License-Identifier: Apache-2.0
"""The comparison of replicas: tensors assumed to be equal on several ranks, saved by one rank and restored by all.

At every save each rank takes a sample of its replicas as they are captured; ranks that share replicas take the same
ranges: a sixteenth of the bytes (at most 64 MiB), another part at each save; and under each outermost name of the state
the smallest trained parameter and the smallest other tensor, such as a moment. Local steps change every parameter, so
that they show at once. A difference in some bytes shows within as many saves as there are parts: 16, or more if
a part is limited to 64 MiB.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate
from operator import itemgetter
from typing import Any, Final, NamedTuple

import torch

from pccheck_async.format import crc32
from pccheck_async.state.boxes import Holders, hash_of
from pccheck_async.state.leaves import ArrayLeaf, PackedSource, as_bits
from pccheck_async.state.storages import view_of

_PARTS: Final = 16
_MOST_BYTES: Final = 64 << 20
_MOST_OF_SMALLEST: Final = 1 << 20
_ENOUGH: Final = 64
_MODULUS: Final = 1 << 64


class Replica(NamedTuple):
    """A plain tensor that is assumed to be equal on several ranks."""

    path: str
    tensor: torch.Tensor
    holders: Holders
    is_trained: bool
    """Whether the tensor is a parameter that requires gradients."""


class _Piece(NamedTuple):
    """A sampled range: bytes in C order."""

    path: str
    ranks: int
    """Hash of the ranks that share the tensor."""
    low: int
    bits: torch.Tensor | None
    """Copy of the bytes on their CUDA device; None for tensors elsewhere."""
    checksum: int
    """CRC-32 of the bytes if ``bits`` is None, else 0."""


class ReplicaSample:
    """A rank's bytes in the compared ranges, as they were when the sample was made.

    Bytes in host memory are read at once. Bytes on devices are copied on the current streams for :meth:`digest`.

    Args:
        replicas: Replicas in one state.
        number: Number of the checkpoint; determines the ranges.
    """

    def __init__(self, replicas: Sequence[Replica], number: int) -> None:
        by_ranks: dict[tuple[int, ...], list[Replica]] = {}
        for one in replicas:
            by_ranks.setdefault(one.holders.alike, []).append(one)
        self._pieces: list[_Piece] = []
        self._parts: dict[int, int] = {}
        self._copied: list[Any] = []  # events behind the copies on devices
        for ranks, some in by_ranks.items():
            key = hash_of(ranks)
            some.sort(key=lambda one: one.path)
            self._parts[key], ranges = _ranges(some, number)
            self._pieces += [_piece(one, key, low, high) for one, low, high in ranges]
        devices = {piece.bits.device for piece in self._pieces if piece.bits is not None}
        self._copied = [torch.cuda.current_stream(device).record_event() for device in devices]

    def digest(self) -> tuple[dict[int, tuple[int, int]], dict[str, int]]:
        """Return the sampled part and its digest, by the hash of the ranks; and the digest of each sampled path.

        Blocks until devices have copied the bytes; drops the sample.
        """
        for event in self._copied:
            event.synchronize()
        folded, named = dict.fromkeys(self._parts, 0), dict[str, int]()
        for piece in self._pieces:
            checksum = piece.checksum if piece.bits is None else crc32(piece.bits.cpu().numpy().data)
            text = f"{piece.path} {piece.low} {checksum}".encode(errors="surrogatepass")
            number = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
            folded[piece.ranks] = (folded[piece.ranks] + number) % _MODULUS
            named[piece.path] = (named.get(piece.path, 0) + number) % _MODULUS
        self._pieces, self._copied = [], []
        return {ranks: (self._parts[ranks], number) for ranks, number in folded.items()}, named


def _ranges(replicas: Sequence[Replica], number: int) -> tuple[int, list[tuple[Replica, int, int]]]:
    """Return the part that checkpoint ``number`` samples, and the ranges to compare: that part's, and the smallest."""
    sizes = [one.tensor.nbytes for one in replicas]
    total = sum(sizes)
    size = max(1, min(-(-total // _PARTS), _MOST_BYTES))
    part = number % max(1, -(-total // size))
    between = _between(replicas, [*accumulate(sizes)], part * size, (part + 1) * size)
    return part, [*between, *_smallest(replicas, sizes)]


def _between(
    replicas: Sequence[Replica], ends: Sequence[int], low: int, high: int
) -> Iterator[tuple[Replica, int, int]]:
    """Yield the ranges of whole elements between two bytes of all tensors, laid end to end; ``ends`` are their ends."""
    for number in range(bisect_right(ends, low), min(bisect_left(ends, high) + 1, len(replicas))):
        tensor = replicas[number].tensor
        start, itemsize = ends[number] - tensor.nbytes, tensor.element_size()
        first, last = ((min(max(at, start), ends[number]) - start) // itemsize * itemsize for at in (low, high))
        if first < last:
            yield replicas[number], first, last


def _smallest(replicas: Sequence[Replica], sizes: Sequence[int]) -> Iterator[tuple[Replica, int, int]]:
    """Yield the first MiB at most of the smallest trained tensor and the smallest other one under each outermost name.

    Tensors with enough elements for different gradients to show are preferred: a step count has one element, a bias
    may have two. Without such tensors, the largest is taken.
    """
    kinds: dict[tuple[str, bool], list[tuple[int, Replica]]] = {}
    for nbytes, one in zip(sizes, replicas, strict=True):
        if nbytes:
            kinds.setdefault((one.path.partition(".")[0], one.is_trained), []).append((nbytes, one))
    for sized in kinds.values():
        enough = [each for each in sized if each[1].tensor.numel() >= _ENOUGH]
        nbytes, one = min(enough, key=itemgetter(0)) if enough else max(sized, key=itemgetter(0))
        yield one, 0, min(nbytes, _MOST_OF_SMALLEST)


def _piece(one: Replica, ranks: int, low: int, high: int) -> _Piece:
    """Return bytes ``[low, high)`` of a replica. Raises UnsupportedStateError if the tensor's memory is gone."""
    tensor = one.tensor
    view_of(0, ArrayLeaf(one.path, tensor, "tensor"))
    if tensor.is_cuda:
        itemsize = tensor.element_size()
        bits = as_bits(tensor).reshape(-1)[low // itemsize : high // itemsize].clone().view(torch.uint8)
        return _Piece(one.path, ranks, low, bits, 0)
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        data = memoryview((ctypes.c_char * (high - low)).from_address(tensor.data_ptr() + low))
    else:
        data = memoryview(bytearray(high - low))
        PackedSource(tensor).copy(low, high, data)
    return _Piece(one.path, ranks, low, None, crc32(data))
