# SPDX-License-Identifier: Apache-2.0
"""Sending one part of a checkpoint to a bucket: verified on the way, in bounded memory, each object in one request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from pccheck_async.bucket.coding import Block
from pccheck_async.bucket.compression import Compressed, Compressing
from pccheck_async.bucket.names import data_key, data_name, digest, found_again
from pccheck_async.bucket.objects import Data, Objects
from pccheck_async.bucket.owner import Owner, read_index
from pccheck_async.bucket.record import PartIndex, PartName, encode_index
from pccheck_async.errors import CorruptStoreError, DamagedError, ReadError
from pccheck_async.format import Entry
from pccheck_async.store import ChunkRun, PartReader, Staging, check_chunks, read_encoded_manifest
from pccheck_async.transfer import BufferLease, BufferPool, aligned_buffer

__all__ = ["OBJECT_BYTES", "Draft", "Upload", "send_part"]

OBJECT_BYTES = 16 << 20
"""Most bytes of a data object, unless a single chunk is larger."""
_MEMORY_BYTES = 64 << 20
"""Buffers of so many bytes, at least two, are read into and sent from. Four objects of 16 MiB took four fifths of the
time of two of 32 MiB: one connection does not take all that a server accepts."""


class Upload(msgspec.Struct, frozen=True, array_like=True):
    """A request to upload the parts of a committed checkpoint."""

    counter: int
    step: int
    target: int
    """The number that its commit in the bucket is to get."""
    adoptable: Mapping[str, int] = {}
    """The objects, with their sizes in bytes, that drafts may name instead of uploading their bytes again."""
    live: tuple[PartName, ...] = ()
    """The parts of the newest checkpoint in the bucket: drafts may name its objects again, too."""


class Draft:
    """The objects of one part that was not committed yet. A draft is unusable once its owner made another record.

    Args:
        objects: The objects under the prefix.
        target: The number of the commit that the part is uploaded for.
        adoptable: As in :class:`Upload`.
        rank: The rank whose part it is.

    Attributes:
        rank: The rank whose part it is.
        sent: Bytes that were uploaded, without those that the bucket had already.
    """

    def __init__(self, objects: Objects, target: int, adoptable: Mapping[str, int], rank: int = 0) -> None:
        self._bucket, self._target, self.rank = objects, target, rank
        self._there = dict[tuple[str, int], str]()
        self._sizes: dict[int, int] = {}
        self._find(adoptable)
        self._objects: dict[int, tuple[str, int, tuple[Block, ...]]] = {}
        self.sent = 0

    @classmethod
    def of(cls, owner: Owner, rank: int = 0) -> Draft:
        """Return a draft for the next commit of an owner."""
        return cls(owner.objects, owner.target, owner.adoptable, rank)

    def _find(self, objects: Mapping[str, int]) -> None:
        """Add objects that the bucket has, given with their sizes in bytes, to those that the draft may name."""
        found = found_again(objects, self.rank)
        self._there |= found
        self._sizes |= {name.number: nbytes for (_, nbytes), key in found.items() if (name := data_name(key))}

    def has(self, digits: str, nbytes: int) -> bool:
        """Whether the bucket has an object of these bytes that the draft may name."""
        return (digits, nbytes) in self._there

    def was_compressed(self, number: int, nbytes: int) -> bool:
        """Whether the bucket seems to have object ``number``, which holds ``nbytes`` of the payload, compressed."""
        return self._sizes.get(number, nbytes) < nbytes

    async def name_again(self, live: Sequence[PartName]) -> None:
        """Add the objects of this rank's part of a live commit, of which ``live`` are the parts, to those it may name.

        Only what the bucket lists: if something else has deleted an object, it is uploaded again. Raises ReadError,
        RefusedError.
        """
        part = next((part for part in live if part.rank == self.rank), None)
        try:
            sizes = {} if part is None else (await read_index(self._bucket, part)).sizes
        except CorruptStoreError:
            return
        for prefix in sorted({key.rpartition("/")[0] for key in sizes}):
            listed = await self._bucket.list(f"{prefix}/")
            self._find({key: nbytes for key, nbytes in listed if sizes.get(key) == nbytes})

    async def send(
        self, number: int, data: Data, digits: str, nbytes: int | None = None, blocks: tuple[Block, ...] = ()
    ) -> None:
        """Upload one object, unless the bucket has it. Raises WriteError, RefusedError: it may be there or not.

        ``nbytes`` and ``blocks``: if it is compressed, its size before that, and its blocks.
        """
        self._objects[number] = await self._put(number, data, digits), nbytes or len(data), blocks

    def name(self, number: int, digits: str, stored: int, nbytes: int, blocks: tuple[Block, ...]) -> None:
        """Name an object of ``stored`` bytes that the bucket has (:meth:`has`); the others are as for :meth:`send`."""
        self._objects[number] = self._there[digits, stored], nbytes, blocks

    async def _put(self, number: int, data: Data, digits: str) -> str:
        if (key := self._there.get((digits, len(data)))) is not None:
            return key
        key = data_key(self._target, self.rank, number, digits)
        await self._bucket.put(key, data)
        self._there[digits, len(data)], self._sizes[number] = key, len(data)
        self.sent += len(data)
        return key

    async def finish(self, entry: Entry, block_bytes: int, manifest: bytes) -> PartName:
        """Upload the index of the part, as its last object, and return its place. Raises the errors of :meth:`send`."""
        found = [self._objects[number] for number in sorted(self._objects)]
        blocks = tuple(blocks for _, _, blocks in found)
        objects = tuple((key, nbytes) for key, nbytes, _ in found)
        data = encode_index(PartIndex(block_bytes, objects, manifest, blocks if any(blocks) else ()))
        number = max(self._objects, default=-1) + 1
        key = await self._put(number, data, digest(data))
        return PartName(key, len(data), replace(entry, slot=0))


class _FreshLease(BufferLease):
    def __init__(self, pool: BufferPool, index: int) -> None:
        super().__init__(pool, index)
        self.view = aligned_buffer(pool.buffer_bytes)

    def release(self) -> None:
        self.view = memoryview(b"")  # whoever still has the lease has no memory
        super().release()


class _FreshBuffers(BufferPool):
    """Buffers that are never used twice: a request that was given up may still be sending from one."""

    def __init__(self, nbytes: int, buffer_bytes: int) -> None:
        super().__init__(nbytes, buffer_bytes)
        self._view = memoryview(b"")

    async def lease(self) -> BufferLease:
        return _FreshLease(self, (await super().lease()).index)


async def send_part(
    draft: Draft,
    part: PartReader,
    *,
    compressing: Compressing | None = None,
    advance: Callable[[int], None] = lambda _: None,
    rate_limit: int | None = None,
) -> PartName:
    """Upload a part that is held (:meth:`.PartReader.hold`), each chunk after it was verified; return its place.

    Args:
        draft: Uploads the objects.
        part: The part; its own staging buffers are not used.
        compressing: Compresses the objects, or some of them; None: they are sent as they are.
        advance: Called with the size in bytes of each data object once the bucket has it.
        rate_limit: Most bytes per second; None: no limit.

    Cancellation: raised when no request is awaited any more.

    Raises DamagedError, ReadError: the part cannot be read; WriteError, RefusedError.
    """
    operations, compressing = part.backend.operations, compressing or Compressing()
    clock = asyncio.get_running_loop().time
    free_at = clock()

    async def send(run: ChunkRun, view: memoryview) -> None:
        nonlocal free_at
        number, nbytes, data = run.first, len(view), view
        blocks: tuple[Block, ...] = ()
        digits = await operations.call(digest, data)
        last = compressing.last.get((draft.rank, number))
        unchanged = last is not None and last.plain == digits
        if last is not None and unchanged and draft.has(last.digits, last.nbytes):
            draft.name(number, last.digits, last.nbytes, nbytes, last.blocks)
            advance(nbytes)
            return
        if not draft.has(digits, nbytes):
            again = draft.was_compressed(number, nbytes) and (last is None or unchanged)
            data, blocks = await compressing.encode(data, operations, alone=alone, again=again)
            if blocks:
                plain, digits = digits, await operations.call(digest, data)
                compressing.last[draft.rank, number] = Compressed(plain, digits, len(data), blocks)
        if draft.has(digits, len(data)):
            await draft.send(number, data, digits, nbytes, blocks)
        else:
            if rate_limit is not None:
                free_at = max(free_at, clock())
                wait, free_at = free_at - clock(), free_at + len(data) / rate_limit
                await asyncio.sleep(wait)
            with compressing.sending(len(data)):
                await draft.send(number, data, digits, nbytes, blocks)
        advance(nbytes)

    def damaged(index: int, reason: str, error: ReadError | None) -> None:
        chunk = part.manifest.chunks[index]
        where = f"{part.file.name}: chunk {index} (bytes {chunk.offset} to {chunk.offset + chunk.nbytes})"
        raise error or DamagedError(f"{where} of the checkpoint of step {part.entry.step} is damaged: {reason}")

    size = max(OBJECT_BYTES, part.largest_chunk)
    alone = part.manifest.payload_nbytes <= size
    staging = Staging(_FreshBuffers(max(2 * size, _MEMORY_BYTES), size))
    source = part.source
    # One read at a time: else all buffers are read together, and sent together, and nothing is sent meanwhile.
    await check_chunks(
        source.medium, operations, part.file, part.manifest, staging, damaged=damaged, checked=send, at_once=1
    )
    manifest = await read_encoded_manifest(source.medium, part.file, part.entry, source.block_bytes)
    return await draft.finish(part.entry, source.block_bytes, manifest)
