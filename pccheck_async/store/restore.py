"""Restore: read a committed checkpoint back, verifying every checksum on the way.

Chunks are read concurrently into staging buffers, so memory is bounded by the pool whatever the size of the
checkpoint; bytes reach their tensors only after their chunk's checksum held.
"""

from __future__ import annotations

import asyncio
import errno
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

from pccheck_async.errors import CorruptStoreError, DamagedError
from pccheck_async.format.checksum import crc32
from pccheck_async.format.manifest import ChunkEntry, Manifest, decode
from pccheck_async.format.record import Entry, align
from pccheck_async.medium import File, Writer
from pccheck_async.state.targets import Targets
from pccheck_async.transfer.copying import CopyBackend
from pccheck_async.transfer.failures import first_failure
from pccheck_async.transfer.memory import aligned_buffer
from pccheck_async.transfer.plan import scatter_segments
from pccheck_async.transfer.pool import BufferLease, BufferPool
from pccheck_async.transfer.segments import Segments

__all__ = ["chunks_between", "read_chunk", "read_manifest", "read_payload", "verify_payload"]

_MOST_CHUNKS = 8
"""Read and verified at a time. They keep a disk busy; more would only be memory that nothing has touched yet, which a
restart pays for at the wrong moment: on ours a cold restore took half as long again."""


async def read_manifest(writer: Writer, file: File, entry: Entry, block_bytes: int) -> Manifest:
    """Read and validate the manifest that a commit record names.

    Raises:
        DamagedError: its checksum does not hold, or the file ends too early.
        CorruptStoreError: it is what was written, and this version does not understand it.
        ReadError: the device failed.
    """
    end = entry.manifest_offset + entry.manifest_nbytes
    if entry.manifest_offset % block_bytes or end > file.nbytes:
        raise DamagedError(
            f"{file.name} has {file.nbytes} bytes; the manifest of checkpoint {entry.counter} is said to end at {end}"
        )
    view = aligned_buffer(align(entry.manifest_nbytes, block_bytes))
    got = await writer.read(file, entry.manifest_offset, view)
    data = bytes(view[: min(got, entry.manifest_nbytes)])
    if len(data) != entry.manifest_nbytes or crc32(data) != entry.manifest_checksum:
        raise DamagedError(f"{file.name}: the manifest of checkpoint {entry.counter} (step {entry.step}) is damaged")
    try:
        manifest = decode(data)
    except CorruptStoreError as error:
        raise CorruptStoreError(
            f"{file.name}: the manifest of checkpoint {entry.counter} (step {entry.step}) is what was written, and not "
            f"understood ({error}); load it with the version of this package, and of torch, that saved it, or give the "
            "step of another one"
        ) from error
    if manifest.counter != entry.counter or manifest.payload_nbytes > entry.manifest_offset:
        raise CorruptStoreError(f"{file.name}: the manifest is not that of checkpoint {entry.counter}")
    return manifest


def chunks_between(manifest: Manifest, low: int, high: int) -> range:
    """Return the indices of the chunks that hold any of the payload's bytes from ``low`` to before ``high``."""
    chunks = manifest.chunks
    first = bisect_right(chunks, low, key=lambda chunk: chunk.offset) - 1
    return range(max(0, first), bisect_left(chunks, high, key=lambda chunk: chunk.offset)) if low < high else range(0)


async def read_payload(
    writer: Writer,
    backend: CopyBackend,
    pool: BufferPool,
    file: File,
    manifest: Manifest,
    targets: Targets,
    admission: Any = None,
    advance: Callable[[int], None] = lambda _: None,
    *,
    every: bool = False,
) -> None:
    """Fill ``targets`` from the chunks that hold them; no other chunk is read, unless ``every`` one is to be verified.

    The pool's buffers hold at least the manifest's largest chunk. Targets on a device are filled behind what the
    backend admitted there, and are whole when this returns, for any stream. ``advance`` is called with the bytes of
    each chunk that was read, or need not be.

    Cancellation: ends once every read and copy ended. The targets are then partly filled.

    Raises:
        DamagedError: a checksum does not hold; earlier chunks may have been copied already.
        ReadError: the device failed.
    """
    if admission:
        await backend.settle(admission)
    turns = asyncio.Semaphore(_MOST_CHUNKS)

    def end(lease: BufferLease) -> None:
        lease.release()
        turns.release()

    async def read(index: int, chunk: ChunkEntry, segments: Segments, buffer: memoryview) -> None:
        await read_chunk(writer, backend, file, index, chunk, segments, buffer, targets)
        advance(chunk.nbytes)

    try:
        async with asyncio.TaskGroup() as group:
            near = chunks_between(manifest, *targets.span)
            for index, chunk in enumerate(manifest.chunks):
                segments = scatter_segments(chunk.offset, chunk.nbytes, targets) if index in near else Segments()
                if not segments and not every:
                    advance(chunk.nbytes)
                else:
                    await turns.acquire()
                    lease = await pool.lease()
                    reading = read(index, chunk, segments, lease.view)
                    # The lease outlives the task, also one that is cancelled before it ran at all.
                    group.create_task(reading).add_done_callback(lambda _, lease=lease: end(lease))  # type: ignore[misc]
    except BaseExceptionGroup as errors:
        failure = first_failure(errors)
        raise failure from failure.__cause__


async def verify_payload(
    writer: Writer, backend: CopyBackend, pool: BufferPool, file: File, manifest: Manifest
) -> None:
    """Read every chunk, and copy nothing. Raises DamagedError, ReadError."""
    await read_payload(writer, backend, pool, file, manifest, Targets(), every=True)


async def read_chunk(
    writer: Writer,
    backend: CopyBackend,
    file: File,
    index: int,
    chunk: ChunkEntry,
    segments: Segments,
    buffer: memoryview,
    keepalive: Any,
) -> None:
    """Read a chunk into a staging buffer, verify it, and only then copy segments of it to their places.

    Raises:
        DamagedError: the checksum does not hold, or the file ends too early.
        ReadError: the device failed.
    """
    view = buffer[: chunk.nbytes]
    try:
        if await writer.read(file, chunk.offset, view) != chunk.nbytes:
            raise OSError(errno.EBADMSG, "the file is too short")
        await backend.scatter(view, chunk.checksum, segments, keepalive)
    except OSError as error:
        if error.errno != errno.EBADMSG:
            raise
        raise DamagedError(
            f"{file.name}: chunk {index} (bytes {chunk.offset} to {chunk.offset + chunk.nbytes}) of the checkpoint is "
            f"damaged: {error.strerror}"
        ) from None
