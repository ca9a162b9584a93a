# SPDX-License-Identifier: Apache-2.0
"""Reading the chunks of a payload at the storage's speed, and verifying the checksum of each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from pccheck_async.errors import ReadError
from pccheck_async.format import combine, piece_sums
from pccheck_async.format.manifest import ChunkEntry, Manifest
from pccheck_async.medium import File, Medium
from pccheck_async.transfer import BufferPool, Tasks, available_memory
from pccheck_async.transfer.operations import Operations

__all__ = ["Checked", "ChunkRun", "Damaged", "Staging", "check_chunks", "in_buffers", "runs"]

T = TypeVar("T")
_MOST_READS = 8
"""Concurrent reads, each with a buffer of its own. They keep a disk busy; more would only be memory that nothing has
touched yet, which a restart pays for at the wrong moment: on our machine a cold restore took half as long again.
"""


async def in_buffers(
    pool: BufferPool, items: Iterable[T], work: Callable[[T, memoryview], Coroutine[Any, Any, None]]
) -> None:
    """Await ``work`` for each item with a buffer of the pool, a few at a time. Cancellation: raised when all ended."""
    waiting = iter(items)

    async def some() -> None:
        for item in waiting:
            lease = await pool.lease()
            try:
                await work(item, lease.view)
            finally:
                lease.release()

    async with Tasks() as group:
        for _ in range(_MOST_READS):
            group.create_task(some())


_BUFFER_BYTES, _BUFFERS = 16 << 20, 6
"""Size and number of the default buffers. More would take longer to be touched for the first time than they save."""


class Staging:
    """Staging buffers that all parts of a checkpoint share; larger ones are made if a chunk does not fit into them.

    By default buffers are made when needed: 96 MiB if chunks have at most 16 MiB and memory is not scarce.
    """

    def __init__(self, pool: BufferPool | None = None) -> None:
        self.pool = pool

    def pool_for(self, largest: int, buffers: int = 1) -> BufferPool:
        """Return a pool of at least ``buffers`` buffers of ``largest`` bytes; a larger one replaces :attr:`pool`.

        Raises MemoryError if not even one fits into memory: a damaged manifest may claim any size.
        """
        if self.pool is None:
            memory = available_memory()
            if largest > memory:
                raise MemoryError(f"a chunk of {largest} bytes does not fit into {memory} bytes of memory")
            size = max(largest, min(_BUFFER_BYTES, memory // _BUFFERS // 4096 * 4096))
            self.pool = BufferPool(max(buffers * size, min(_BUFFERS * size, memory // 4)), size)
        size = max(largest, self.pool.buffer_bytes)
        if size > self.pool.buffer_bytes or buffers * size > self.pool.nbytes:
            self.pool = BufferPool(max(self.pool.nbytes, buffers * size), size)
        return self.pool


class ChunkRun(NamedTuple):
    """Chunks that are read in one go, as single small ones would keep no disk busy; ``first`` is an index of a chunk.

    ``offset`` in the payload and ``nbytes`` are in bytes.
    """

    first: int
    chunks: Sequence[ChunkEntry]
    offset: int
    nbytes: int


def runs(chunks: Sequence[ChunkEntry], most: int) -> Iterator[ChunkRun]:
    """Group chunks that lie back to back into runs of at most ``most`` bytes; a larger chunk is a run of its own."""
    first = 0
    for index, chunk in enumerate(chunks, 1):
        start, end = chunks[first].offset, chunk.offset + chunk.nbytes
        if index == len(chunks) or chunks[index].offset + chunks[index].nbytes - start > most:
            yield ChunkRun(first, chunks[first:index], start, end - start)
            first = index


Damaged: TypeAlias = Callable[[int, str, ReadError | None], None]
"""Function called with the index of a damaged chunk, the reason, and the ReadError if the chunk cannot be read."""
Checked: TypeAlias = Callable[[ChunkRun, memoryview], Awaitable[None]]
"""Coroutine function called with each run without damaged chunks, and its bytes."""


async def check_chunks(
    medium: Medium,
    operations: Operations,
    file: File,
    manifest: Manifest,
    staging: Staging,
    *,
    damaged: Damaged,
    checked: Checked | None = None,
    read: Callable[[int], None] = lambda _: None,
    at_once: int = _MOST_READS,
) -> None:
    """Read every chunk whole and verify its checksums.

    Args:
        medium: The medium of the slot.
        operations: I/O backend that computes checksums on its threads.
        file: The slot.
        manifest: The manifest with the chunks.
        staging: Buffers to read into.
        damaged: Called for each damaged chunk (:data:`Damaged`).
        checked: Awaited for each run without damage (:data:`Checked`).
        read: Called with the number of bytes of each run that was read.
        at_once: Most reads at a time.

    Cancellation: raised when every read ended.
    """

    async def check(run: ChunkRun, buffer: memoryview) -> None:
        view, whole = buffer[: run.nbytes], True
        try:
            async with reading:
                got = await medium.read(file, run.offset, view)
        except ReadError as error:
            if len(run.chunks) > 1:
                for index, chunk in enumerate(run.chunks, run.first):  # which of them it is
                    await check(ChunkRun(index, [chunk], chunk.offset, chunk.nbytes), buffer)
                return
            damaged(run.first, f"it cannot be read: {error.strerror or error}", error)
        else:
            sums = await operations.call(_checksums, run, view)
            for index, (chunk, pieces) in enumerate(zip(run.chunks, sums, strict=True), run.first):
                if chunk.offset - run.offset + chunk.nbytes > got:
                    damaged(index, f"the file ends at byte {run.offset + got}", None)
                elif combine(pieces, chunk.nbytes) != chunk.checksum or expected[index] not in (None, pieces):
                    damaged(index, "checksum mismatch", None)
                else:
                    continue
                whole = False
            if checked is not None and whole:
                await checked(run, view)
        read(run.nbytes)

    reading = asyncio.Semaphore(at_once)
    expected = manifest.pieces or (None,) * len(manifest.chunks)
    pool = staging.pool_for(max((chunk.nbytes for chunk in manifest.chunks), default=0))
    await in_buffers(pool, runs(manifest.chunks, pool.buffer_bytes), check)


def _checksums(run: ChunkRun, view: memoryview) -> list[bytes]:
    """Return the table of checksums of each chunk of a run. Called on a helper thread; computes without the GIL."""
    starts = [chunk.offset - run.offset for chunk in run.chunks]
    return [piece_sums(view[start : start + chunk.nbytes]) for start, chunk in zip(starts, run.chunks, strict=True)]
