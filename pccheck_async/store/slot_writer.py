# SPDX-License-Identifier: Apache-2.0
"""Writing one checkpoint into a slot: its chunks, followed by its manifest.

(Invariants, such as I9: :mod:`pccheck_async.store`.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from pccheck_async.errors import CheckpointError, write_error
from pccheck_async.format import align
from pccheck_async.format.manifest import Manifest
from pccheck_async.medium import File, Piece
from pccheck_async.store.known_bytes import SlotLease
from pccheck_async.store.store import Store
from pccheck_async.transfer import BufferLease, BufferPool, Tasks, aligned_buffer
from pccheck_async.transfer.plan import Chunk, Plan

__all__ = ["ChunkPlace", "SlotWriter"]


class ChunkPlace(NamedTuple):
    """Memory of one chunk's length: in a staging buffer, or its place in a slot that is mapped into memory."""

    offset: int
    """Offset of the chunk in the slot, in bytes."""
    view: memoryview
    lease: BufferLease | None
    slot: File | None

    def explained(self, error: OSError) -> OSError | CheckpointError:
        """Return the error to raise for a failed copy into this memory.

        For a mapped slot it is a WriteError: the slot's file was truncated, or its memory is broken. For a staging
        buffer it is a CheckpointError: the source, a memory map, was truncated or is broken.
        """
        if self.slot is not None:
            return write_error(error, self.slot.name)
        return CheckpointError(
            f"memory of the state cannot be read ({error.strerror}): the file of a memory map (numpy.memmap, "
            "torch.from_file) was cut off, or the memory is broken"
        )


class SlotWriter:
    """Writes one checkpoint. On exit it gives back the buffers, and the slot unless :meth:`finish` returned that.

    Each chunk is written as soon as it is captured. A chunk that is the only one is kept until the manifest exists,
    unless it is in the last free buffer: both are then written in one request, which small checkpoints share with their
    commit record (:meth:`Store.commit`); and the slot is reserved only then, when the length is known.

    Args:
        store: The store of the slot.
        pool: The pool of staging buffers.
        plan: The chunks, or the manifest of a checkpoint that is copied.
        first: The only chunk, if it was captured before, with or without room after it.
        lease: A slot of the store that is long enough; the writer owns it from now on. None: one is reserved.
    """

    def __init__(
        self,
        store: Store,
        pool: BufferPool,
        plan: Plan | Manifest,
        first: memoryview | None = None,
        lease: SlotLease | None = None,
    ) -> None:
        self._store = store
        self._medium = store.medium
        self._pool = pool
        self._plan = plan
        self._kept = first  # begins with the only chunk
        self._leases: set[BufferLease] = set()
        self._reserving: asyncio.Future[SlotLease] | None = None
        if lease is not None:
            self._reserving = asyncio.get_running_loop().create_future()
            self._reserving.set_result(lease)
        self.written = 0
        """Bytes of chunks that are in the slot: written now, or known to be in it."""

    async def __aenter__(self) -> SlotWriter:
        return self

    async def __aexit__(self, *_: object) -> None:
        for lease in self._leases:
            lease.release()
        reserving = self._reserving
        if reserving is not None and not reserving.cancelled() and reserving.exception() is None:
            await self._store.release(reserving.result())

    async def reserve(self, tasks: Tasks, longest: Callable[[], int]) -> None:
        """Start a task that reserves a slot during the capture: the trainer waits for the copies, never for the store.

        Does nothing for a single chunk that can be kept. ``longest`` returns the most bytes that the manifest may have.
        """
        # The last buffer is for checkpoints that have their slot: else those without a slot could hold all buffers, and
        # the one whose commit frees a slot would wait for a buffer.
        if self._reserving is not None or (len(self._plan.chunks) == 1 and len(self._pool.free) > 1):
            return

        async def reserve() -> SlotLease:
            if not self._medium.stages:
                await asyncio.sleep(0)  # the copies first: many tensors take a while to encode
            return await self._reserve(longest())

        self._reserving = tasks.create_task(reserve())
        if self._medium.stages:
            await asyncio.sleep(0)  # the slot first, if none has to be made or waited for: it is copied right into it

    async def place(self, chunk: Chunk) -> ChunkPlace:
        """Return the memory to copy a chunk into. Called after :meth:`reserve`.

        Cancellation: no memory is taken.
        """
        if (reserving := self._reserving) is not None:
            if not reserving.done() and len(self._pool.free) <= 1:
                await asyncio.wait((reserving,))
            if self._medium.stages and reserving.done():
                file = reserving.result().file
                if (view := self._medium.stage(file, chunk.offset, chunk.nbytes)) is not None:
                    return ChunkPlace(chunk.offset, view, None, file)
        lease = await self._pool.lease()
        self._leases.add(lease)
        return ChunkPlace(chunk.offset, lease.view[: chunk.nbytes], lease, None)

    async def put(self, place: ChunkPlace) -> None:
        """Write a chunk that was copied into its place, or keep it for the manifest if it is the only one.

        A chunk in the last buffer is not kept: in a group the commit waits for other ranks, whose commits may wait for
        this rank's next checkpoint, which needs a buffer.
        """
        if len(self._plan.chunks) == 1 and self._reserving is None:
            assert place.lease is not None  # without a slot
            self._kept = place.lease.view
            return
        assert self._reserving is not None
        slot = self._reserving.result() if self._reserving.done() else await asyncio.shield(self._reserving)
        parts, known = [(0, len(place.view))], self._store.slots.known
        if known is not None and place.lease is not None:
            parts = await known.changed(slot, place.offset, place.view)
        for start, end in parts:
            await self._medium.write(slot.file, place.offset + start, place.view[start:end])
        self.written += len(place.view)
        if place.lease is not None:
            self._leases.remove(place.lease)
            place.lease.release()

    async def finish(self, manifest: bytes) -> tuple[SlotLease, list[Piece]]:
        """Return the slot, which the caller owns then, and its pieces that are not written yet, with the manifest."""
        end, padded = self._plan.payload_nbytes, align(len(manifest), self._store.block_bytes)
        kept = self._kept
        if kept is None:
            rest: list[Piece] = [(end, aligned_buffer(padded))]
        elif end + padded <= len(kept):
            rest = [(0, kept[: end + padded])]
        else:
            rest = [(0, kept[:end]), (end, aligned_buffer(padded))]
        rest[-1][1][-padded:] = manifest.ljust(padded, b"\0")
        # Last: the caller gives it back.
        slot = await self._reserve(len(manifest)) if self._reserving is None else self._reserving.result()
        self._reserving = None
        return slot, rest

    async def _reserve(self, manifest_nbytes: int) -> SlotLease:
        # One block to spare: the next checkpoint's step and plain values may take a few more bytes.
        return await self._store.reserve(self._plan.payload_nbytes + manifest_nbytes + self._store.block_bytes)
