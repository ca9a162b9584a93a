# SPDX-License-Identifier: Apache-2.0
"""Reading one checkpoint: the parts of all ranks that saved it; a checkpoint of one process has one part.

Tensors that lie on several ranks are made of the boxes in all parts: into the boxes of this rank's live tensors, or in
full. In a manifest, tensors in full are storages after the payload of the part that is read first, one for each such
tensor, C-contiguous; bytes of these ranges are read from the boxes.
"""

from __future__ import annotations

import ctypes
import errno
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import groupby
from math import prod
from typing import Any, Final, NamedTuple

import torch
from msgspec import structs

from pccheck_async.errors import CorruptStoreError, DamagedError, ReadError, StateMismatchError, is_exhausted
from pccheck_async.format import Entry, align, dtypes
from pccheck_async.format.manifest import ALIGNMENT, Manifest, StorageEntry, TensorEntry
from pccheck_async.format.skeleton import ArrayNode, ShardedNode, replace_arrays, walk
from pccheck_async.medium import File
from pccheck_async.state import Target, Targets, boxes_of_range
from pccheck_async.state.restore.parts import StoredBox, Wanted, merge_parts, reshard, stored_boxes
from pccheck_async.state.restore.tree import paths_by_node
from pccheck_async.store.differing import differing
from pccheck_async.store.part_reader import PartReader
from pccheck_async.telemetry import write
from pccheck_async.transfer import available_descriptors

__all__ = ["CheckpointReader", "check_descriptors"]

_PIECE_BYTES = 4 << 20
_SPARE_DESCRIPTORS: Final = 4
"""Descriptors left for the records that are read while parts are locked, and for other threads."""


def check_descriptors(files: int, what: str = "reading") -> None:
    """Raise ReadError if this process may not open ``files`` more files; ``what`` begins the message."""
    free = available_descriptors()
    if files + _SPARE_DESCRIPTORS > free:
        raise ReadError(
            errno.EMFILE,
            f"{what} a checkpoint of several ranks keeps files open for each of their parts: {files} and "
            f"{_SPARE_DESCRIPTORS} more, and this process may open {free} more; raise the limit (ulimit -n)",
        )


class _Full(NamedTuple):
    """A tensor in full, in a storage of its own."""

    start: int
    """Offset in bytes at which the storage begins, after the payload."""
    path: str
    node: ShardedNode

    @property
    def nbytes(self) -> int:
        return prod(self.node.shape) * dtypes.torch_dtype(self.node.dtype).itemsize


class CheckpointReader:
    """Reads one checkpoint, on one loop; one medium, its threads and one pool serve all parts.

    A part is locked when it is first needed: the own part by :meth:`hold`, all parts by :meth:`manifests`.

    Args:
        parts: Readers of the parts, by the ranks that saved them.
        own_rank: The rank whose part is restored, or read for values that each rank has of its own.
        elsewhere: The ranks whose parts are on filesystems that cannot be reached here.
        whole: Whether ``parts`` has the parts of all ranks: then :meth:`merge` puts tensors in full into the manifest.

    Attributes:
        own: The reader of the own rank's part, which is read first.
        manifest: The manifest of all data that :meth:`fill` and :meth:`pieces` can read: after :meth:`hold` the own
            part's, after :meth:`merge` with all tensors in full.
    """

    manifest: Manifest

    def __init__(
        self,
        parts: Mapping[int, PartReader],
        own_rank: int = 0,
        elsewhere: Sequence[int] = (),
        *,
        whole: bool = True,
    ) -> None:
        self.parts = parts
        self.own = parts[own_rank]
        self.elsewhere = elsewhere
        self.whole = whole
        self.own_rank = own_rank
        self._held: set[int] = set()
        self._boxes: dict[int, dict[str, list[StoredBox]]] = {}  # by part, once they are needed
        self._planned: dict[int, Targets] = {}
        self._marks: dict[int, Any] = {}
        self._tensors: list[_Full] = []

    @property
    def entry(self) -> Entry:
        """The own part's entry in its record; available after :meth:`hold`."""
        return self.own.entry

    @property
    def file(self) -> File:
        """The open slot of the own part; available after :meth:`hold`."""
        return self.own.file

    async def hold(self) -> None:
        """Lock the own part and read its manifest. Raises DamagedError, ReadError, NoCheckpointError."""
        if self.own_rank not in self._held:
            await self.own.hold()
            self._held.add(self.own_rank)
            self.manifest = self.own.manifest

    async def manifests(self) -> dict[int, Manifest]:
        """Lock all parts, and return their manifests. Raises DamagedError, ReadError."""
        await self.hold()
        if wanted := self.parts.keys() - self._held:
            check_descriptors(len(wanted))
            for rank in sorted(wanted):
                try:
                    await self.parts[rank].hold()
                except DamagedError as error:
                    raise DamagedError(f"the part of rank {rank}: {error}") from error
                self._held.add(rank)
            # One pool for all, made before anything is read. Two buffers: the own part may keep a chunk in one.
            largest = max(part.largest_chunk for part in self.parts.values())
            self.own.staging.pool_for(largest, buffers=2)
        return {rank: part.manifest for rank, part in self.parts.items()}

    async def differing(
        self, among: Callable[[str], bool] = lambda _: True, share: tuple[int, int] = (0, 1), *, is_needed: bool = True
    ) -> list[str]:
        """Return paths under which parts hold different tensors (see :func:`.differing.differing`).

        The list is empty if only one part is known. Raises DamagedError, ReadError; if not ``is_needed``, these errors
        of comparing are logged, and the list is empty.
        """
        if len(self.parts) == 1 and not self.elsewhere:
            return []
        await self.manifests()
        try:
            return await differing(self.parts, among, share=share, incomplete=bool(self.elsewhere))
        except (DamagedError, ReadError) as error:
            if is_needed or is_exhausted(error):
                raise
            text = "whether other ranks have different tensors is not known, as a part of theirs cannot be read: %s"
            write("not_compared", text, error)
            return []

    # -- into the boxes of live tensors

    async def match(self, wanted: Sequence[Wanted]) -> None:
        """Plan from which stored boxes the ``wanted`` ones are filled; if these lie on several ranks, lock all parts.

        Raises StateMismatchError: the stored boxes do not cover them; DamagedError, ReadError.
        """
        needed = await self.manifests() if any(one.mesh is not None for one in wanted) else (self.own_rank,)
        for rank in needed:
            if rank not in self._boxes:
                self._boxes[rank] = stored_boxes(self.parts[rank].manifest, rank)
        self._planned, troubles = reshard(wanted, self._boxes, self.own_rank)
        if troubles:
            text = f"the tensors wanted here cannot be made of those in the checkpoint: {', '.join(troubles)}"
            if self.elsewhere:
                text += f"; the parts of ranks {', '.join(map(str, self.elsewhere))} are on filesystems not seen here"
            error = StateMismatchError(text, mismatched=troubles)
            error.parts_unseen = bool(self.elsewhere)
            raise error

    def begin_boxes(self) -> Targets:
        """Remove the planned targets in the own part from the plan, and return them, to be filled with its other ones.

        :meth:`fill_boxes` fills the rest after the work that devices have queued by now. Called on the caller's thread.
        """
        own = self._planned.pop(self.own_rank, Targets())
        backend = self.own.backend
        self._marks = {rank: backend.mark_queued_work(each.devices) for rank, each in self._planned.items()}
        return own

    async def fill_boxes(self) -> None:
        """Fill the boxes in the plan. Raises DamagedError, ReadError; some boxes are filled then."""
        for rank, targets in self._planned.items():
            await self.parts[rank].fill(targets, self._marks.get(rank))

    # -- in full

    async def merge(self) -> None:
        """Lock all parts, and put all tensors in full into :attr:`manifest`. Raises DamagedError, ReadError.

        Unless the reader has all parts (``whole``), this is :meth:`hold`.
        """
        if not self.whole:
            await self.hold()
            return
        manifest, _ = merge_parts(self.own_rank, await self.manifests())
        self.manifest, self._tensors = _in_full(manifest)

    @property
    def _end(self) -> int:
        """The offset in bytes at which tensors in full begin; the end of the payload if there are none."""
        return self._tensors[0].start if self._tensors else self.manifest.payload_nbytes

    async def fill(self, targets: Targets, advance: Callable[[int], None] = lambda _: None) -> None:
        """Fill targets in host memory; ``advance`` is called with the sizes in bytes of the own part's chunks.

        Raises DamagedError, ReadError; CorruptStoreError: the parts do not fit together.
        """
        if not self._tensors:
            await self.own.fill(targets, advance=advance)
            return
        own, wanted = list[Target](), list[Wanted]()
        for target in targets:
            if target.payload_offset < self._end:
                own.append(target)
            else:
                wanted += self._wanted(target)
        await self.own.fill(Targets(own), advance=advance)
        if wanted:
            try:
                await self.match(wanted)
            except StateMismatchError as error:
                raise CorruptStoreError(str(error)) from error
            await self.fill_boxes()

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
        """Yield the bytes of ranges; see :meth:`PartReader.pieces`."""
        for is_own, group in groupby(ranges, lambda each: each[0] < self._end):
            some = [*group]
            async with aclosing(self.own.pieces(some) if is_own else self._pieces_in_full(some)) as pieces:
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

    async def close(self) -> None:
        """Unlock and close all parts."""
        for part in self.parts.values():
            await part.close()

    def release(self) -> None:
        """Start to close all parts without waiting for it. Idempotent."""
        for part in self.parts.values():
            part.release()


def _in_full(manifest: Manifest) -> tuple[Manifest, list[_Full]]:
    """Return the manifest with tensors in full in place of the boxes of one rank, and those tensors."""
    tensors, storages, full = [*manifest.tensors], [*manifest.storages], list[_Full]()
    if not any(isinstance(each, ShardedNode) for each in walk(manifest.skeleton)):
        return manifest, full
    known, placed = paths_by_node(manifest.skeleton), dict[Any, int]()
    end = align(manifest.payload_nbytes, ALIGNMENT)

    def place(node: ArrayNode | ShardedNode) -> ArrayNode:
        nonlocal end
        if isinstance(node, ArrayNode):
            return node
        one = _Full(end, known[id(node)], node)
        boxes = [manifest.tensors[box.index] for box in node.boxes]
        # Tied if all boxes are; boxes without elements are alike for any tensor.
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
