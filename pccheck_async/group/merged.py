"""The parts of all ranks, read as one checkpoint: tensors that lie on several ranks are there in full.

A manifest says so by storages behind the payload of the part that is open, one for each such tensor, C-contiguous; who
reads bytes of them gets what the boxes in all parts hold.
"""

from __future__ import annotations

import ctypes
import logging
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from itertools import groupby
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from msgspec import structs

from pccheck_async.errors import CorruptStoreError, StateMismatchError, is_exhausted
from pccheck_async.format import align, dtypes
from pccheck_async.format.manifest import ALIGNMENT, Manifest, StorageEntry, TensorEntry
from pccheck_async.format.skeleton import ArrayNode, ShardedNode, replace_arrays
from pccheck_async.group.resharding import LeasedPart, OpenPart, Parts
from pccheck_async.medium import File
from pccheck_async.medium.open_medium import OpenMedium
from pccheck_async.state import Target, Targets, Wanted, boxes_of_range, merge_parts, sharded_paths
from pccheck_async.store import UnreadableError, VerifiedChunks, pool_for
from pccheck_async.telemetry import write
from pccheck_async.transfer import BufferPool
from pccheck_async.transfer.copying import CopyBackend

__all__ = ["MergedPayload", "Payload"]

_PIECE_BYTES = 4 << 20


class _Full(NamedTuple):
    """A tensor in full, in a storage of its own."""

    start: int
    """Byte at which that begins, behind the payload."""
    path: str
    node: ShardedNode

    @property
    def nbytes(self) -> int:
        return prod(self.node.shape) * dtypes.torch_dtype(self.node.dtype).itemsize


class MergedPayload:
    """Bytes of one rank's part, and of tensors in full; is read as :class:`VerifiedChunks` are.

    One medium, its threads and one pool serve all parts.

    Args:
        opened: The medium that has all parts, and its threads.
        rank: Whose part is open, in ``file``; ``manifest`` is its own.
        others: The parts of the other ranks, which are let go by :meth:`aclose`. What the open part lacks and they
            have is read from them.
        pool: Staging buffers; others are made if chunks of any part do not fit into these.

    Attributes:
        manifest: Of all that can be read; from :meth:`open` on.
    """

    def __init__(
        self,
        opened: OpenMedium,
        rank: int,
        file: File,
        manifest: Manifest,
        others: dict[int, LeasedPart],
        pool: BufferPool,
    ) -> None:
        self._opened, self._file, self._pool = opened, file, pool
        self._others = others
        self._part = OpenPart(opened.medium, file, manifest, CopyBackend(opened.operations), pool)
        self._parts = Parts({**others, rank: self._part}, rank, by_address=False)
        self.manifest = manifest
        self._tensors: list[_Full] = []

    async def open(self) -> None:
        """Hold all parts and read their manifests. Raises DamagedError, ReadError; close it then, too."""
        try:
            manifests = await self._parts.manifests()
        except UnreadableError as unreadable:
            raise unreadable.error from None
        pool = self._pool
        for each in manifests.values():
            pool = pool_for(each, pool)
        self._part.pool = pool
        for part in self._others.values():
            part.share(pool)
        self._chunks = VerifiedChunks(self._opened, self._file, self._part.manifest, pool)
        manifest, _ = merge_parts(self._parts.own, manifests)
        self.manifest, self._tensors = _in_full(manifest)
        self._end = self._tensors[0].start if self._tensors else manifest.payload_nbytes

    async def differing(self, among: Callable[[str], bool] = lambda _: True, *, is_needed: bool = True) -> list[str]:
        """Return paths of tensors under which other ranks hold other ones.

        Raises DamagedError, ReadError; where the answer is not needed these are logged, and it is none.
        """
        try:
            return await self._parts.differing(among)
        except UnreadableError as unreadable:
            if is_needed or is_exhausted(unreadable.error):
                raise unreadable.error from None
            text = "whether other ranks have different tensors is not known, as a part of theirs cannot be read: %s"
            write(logging.WARNING, "not_compared", text, unreadable.error)
            return []

    async def fill(self, targets: Targets, advance: Callable[[int], None] = lambda _: None) -> None:
        """Fill targets in host memory; ``advance`` hears of the open part's chunks.

        Raises DamagedError, ReadError; CorruptStoreError: the parts do not fit together.
        """
        own, wanted = list[Target](), list[Wanted]()
        for target in targets:
            if target.payload_offset < self._end:
                own.append(target)
            else:
                wanted += self._wanted(target)
        await self._chunks.fill(Targets(own), advance)
        if wanted:
            try:
                await self._parts.match(wanted)
                await self._parts.fill()
            except UnreadableError as unreadable:
                raise unreadable.error from None
            except StateMismatchError as error:
                raise CorruptStoreError(str(error)) from error

    def _wanted(self, target: Target) -> Iterator[Wanted]:
        first = bisect_right(self._tensors, target.payload_offset, key=lambda full: full.start) - 1
        for start, path, node in self._tensors[max(first, 0) :]:
            if start >= target.payload_offset + target.nbytes:
                break
            dtype = dtypes.torch_dtype(node.dtype)
            low = max(target.payload_offset - start, 0)
            high = min(target.payload_offset + target.nbytes - start, prod(node.shape) * dtype.itemsize)
            if low < high:
                address = target.address + start + low - target.payload_offset
                flat = torch.frombuffer((ctypes.c_char * (high - low)).from_address(address), dtype=torch.uint8)
                for box, local in boxes_of_range(node.shape, low // dtype.itemsize, flat.view(dtype)):
                    yield Wanted(path, path, node.mesh, node.shape, box, local, local)

    async def pieces(self, ranges: Iterable[tuple[int, int]]) -> AsyncGenerator[memoryview, None]:
        """Yield the bytes of ranges; see :meth:`VerifiedChunks.pieces`."""
        for is_own, group in groupby(ranges, lambda each: each[0] < self._end):
            some = [*group]
            async with aclosing(self._chunks.pieces(some) if is_own else self._pieces_in_full(some)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _pieces_in_full(self, ranges: Iterable[tuple[int, int]]) -> AsyncGenerator[memoryview, None]:
        for low, high in ranges:
            buffer = bytearray(min(_PIECE_BYTES, max(high - low, 1)))
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            for start in range(low, high, len(buffer)):
                view = memoryview(buffer)[: min(len(buffer), high - start)]
                await self.fill(Targets([Target(start, len(view), address, buffer)]))
                yield view

    async def aclose(self) -> None:
        """Let the other ranks' parts go."""
        for part in self._others.values():
            await part.close()


def _in_full(manifest: Manifest) -> tuple[Manifest, list[_Full]]:
    """Return a manifest that has tensors in full in place of the boxes of one rank, and these tensors."""
    tensors, storages, full = [*manifest.tensors], [*manifest.storages], list[_Full]()
    known, placed = sharded_paths(manifest), dict[Any, int]()
    end = align(manifest.payload_nbytes, ALIGNMENT)

    def place(node: ArrayNode | ShardedNode) -> ArrayNode:
        nonlocal end
        if isinstance(node, ArrayNode):
            return node
        one = _Full(end, known[id(node)], node)
        boxes = [manifest.tensors[box.index] for box in node.boxes]
        # Tied, where all boxes are; those without elements are alike whatever they are boxes of.
        same = id(node) if all(box.storage is None for box in boxes) else tuple(boxes)
        storage = placed.setdefault((node.shape, same), len(storages)) if one.nbytes else None
        if storage == len(storages):
            storages.append(StorageEntry(end, one.nbytes))
            full.append(one)
            end = align(end + one.nbytes, ALIGNMENT)
        stride = tuple(prod(node.shape[dim + 1 :]) for dim in range(len(node.shape)))
        tensors.append(TensorEntry(storage, node.dtype, node.shape, stride, 0, "tensor", False))
        return ArrayNode(len(tensors) - 1)

    skeleton = replace_arrays(manifest.skeleton, place)
    return structs.replace(manifest, skeleton=skeleton, tensors=tuple(tensors), storages=tuple(storages)), full


Payload: TypeAlias = VerifiedChunks | MergedPayload
"""What bytes of a checkpoint are read from."""
