"""Reading the chunks of a payload at the storage's speed, and checking every one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from pccheck_async.errors import ReadError
from pccheck_async.format.checksum import crc32
from pccheck_async.format.manifest import ChunkEntry, Manifest
from pccheck_async.medium import File
from pccheck_async.medium.open_medium import Session
from pccheck_async.transfer.failures import first_failure
from pccheck_async.transfer.machine import available_memory
from pccheck_async.transfer.pool import BufferPool

__all__ = ["Progress", "Run", "check_chunks", "make_pool", "runs"]

_RUN_BYTES = 16 << 20
_BUFFERS = 6
"""Four are being read, one is checked. More take longer to be touched for the first time than they save."""

Progress: TypeAlias = Callable[[int, int], None]
"""Told on another thread how many bytes are done, and of how many."""


class Run(NamedTuple):
    """Chunks that are read in one piece: small ones one by one would keep no disk busy."""

    first: int
    chunks: Sequence[ChunkEntry]

    @property
    def offset(self) -> int:
        """Of its first byte in the payload."""
        return self.chunks[0].offset

    @property
    def nbytes(self) -> int:
        """Of all its chunks."""
        return self.chunks[-1].offset + self.chunks[-1].nbytes - self.offset


def runs(chunks: Sequence[ChunkEntry], most: int) -> Iterator[Run]:
    """Group chunks that lie back to back into runs of at most ``most`` bytes; a larger chunk is a run of its own."""
    first = 0
    for index, chunk in enumerate(chunks):
        if index > first and chunk.offset + chunk.nbytes - chunks[first].offset > most:
            yield Run(first, chunks[first:index])
            first = index
    if first < len(chunks):
        yield Run(first, chunks[first:])


def make_pool(manifest: Manifest) -> BufferPool:
    """Return buffers for the chunks of a checkpoint, 96 MiB where chunks have at most 16 MiB and memory is not scarce.

    Raises MemoryError where not even one fits into memory: a damaged manifest may claim any size.
    """
    largest = max((chunk.nbytes for chunk in manifest.chunks), default=_RUN_BYTES)
    memory = available_memory()
    if largest > memory:
        raise MemoryError(f"a chunk of {largest} bytes does not fit into {memory} bytes of memory")
    size = max(largest, min(_RUN_BYTES, memory // _BUFFERS // 4096 * 4096))
    return BufferPool(max(size, min(_BUFFERS * size, memory // 4)), size)


async def check_chunks(
    session: Session,
    file: File,
    chunks: Sequence[ChunkEntry],
    pool: BufferPool,
    *,
    damaged: Callable[[int, str], None],
    checked: Callable[[Run, memoryview], Awaitable[None]] | None = None,
    read: Callable[[int], None] = lambda _: None,
) -> None:
    """Read chunks and compare each with its checksum.

    Args:
        session: Moves the bytes.
        file: The slot.
        chunks: Back to back.
        pool: Buffers, each of which holds the largest chunk.
        damaged: Called with the number of every chunk that is not what was written, and why.
        checked: Awaited with every run none of whose chunks is damaged, and its bytes.
        read: Called with the bytes of every run that was read.

    Cancellation: ends once every read ended.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for run in runs(chunks, pool.buffer_bytes):
                lease = await pool.lease()
                checking = _check(session, file, run, lease.view, damaged, checked, read)
                # The lease outlives the task, also one that is cancelled before it ran at all.
                group.create_task(checking).add_done_callback(lambda _, lease=lease: lease.release())  # type: ignore[misc]
    except BaseExceptionGroup as errors:
        failure = first_failure(errors)
        raise failure from failure.__cause__


async def _check(
    session: Session,
    file: File,
    run: Run,
    buffer: memoryview,
    damaged: Callable[[int, str], None],
    checked: Callable[[Run, memoryview], Awaitable[None]] | None,
    read: Callable[[int], None],
) -> None:
    view = buffer[: run.nbytes]
    try:
        got = await session.writer.read(file, run.offset, view)
    except ReadError as error:
        if len(run.chunks) == 1:
            damaged(run.first, f"it cannot be read: {error.strerror or error}")
            read(run.nbytes)
            return
        for index, chunk in enumerate(run.chunks, run.first):  # which of them it is
            await _check(session, file, Run(index, [chunk]), buffer, damaged, checked, read)
        return
    if len(run.chunks) == 1:
        sums = [await session.operations.checksum(view)]
    else:
        sums = await session.operations.call(_checksums, run, view)
    bad = 0
    for index, (chunk, found) in enumerate(zip(run.chunks, sums, strict=True), run.first):
        if chunk.offset - run.offset + chunk.nbytes > got:
            damaged(index, f"the file ends at byte {run.offset + got}")
            bad += 1
        elif found != chunk.checksum:
            damaged(index, "checksum mismatch")
            bad += 1
    if checked is not None and not bad:
        await checked(run, view)
    read(run.nbytes)


def _checksums(run: Run, view: memoryview) -> list[int]:
    """On a helper thread; each checksum lets the GIL go."""
    starts = [chunk.offset - run.offset for chunk in run.chunks]
    return [crc32(view[start : start + chunk.nbytes]) for start, chunk in zip(starts, run.chunks, strict=True)]
