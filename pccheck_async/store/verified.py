"""The payload of one checkpoint, read in verified chunks, of which the last used are kept."""

from __future__ import annotations

import asyncio
import ctypes
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress

from pccheck_async.format.manifest import Manifest
from pccheck_async.medium import File
from pccheck_async.medium.open_medium import Session
from pccheck_async.state.targets import Targets
from pccheck_async.store.reading import pool_for
from pccheck_async.store.restore import chunks_between, read_chunk, read_payload
from pccheck_async.transfer.copying import HostCopy
from pccheck_async.transfer.memory import address_of
from pccheck_async.transfer.pool import BufferLease, BufferPool
from pccheck_async.transfer.segments import Segments

__all__ = ["VerifiedChunks"]

_KEPT = 4
"""Chunks that stay in memory: tensors that lie beside each other are mostly read one after the other."""


class VerifiedChunks:
    """Bytes of a payload by their place. Memory is bounded by the pool; one call at a time works.

    Args:
        session: Reads.
        file: The slot, locked for as long as this is used.
        manifest: What it holds.
        pool: Staging buffers; another one as large where the chunks do not fit into them.
    """

    def __init__(self, session: Session, file: File, manifest: Manifest, pool: BufferPool) -> None:
        self._writer = session.writer
        self._backend = HostCopy(session.operations)
        self._file = file
        self._manifest = manifest
        self._pool = pool_for(manifest, pool)
        self._most = max(1, min(_KEPT, self._pool.nbytes // self._pool.buffer_bytes // 2))
        self._kept: OrderedDict[int, BufferLease] = OrderedDict()
        self._turn = asyncio.Lock()

    async def fill(self, targets: Targets) -> None:
        """Fill ``targets`` in host memory: from few chunks one by one, from many as :func:`read_payload` does.

        Raises:
            CorruptStoreError: a checksum does not hold.
            ReadError: the device failed.
        """
        touched = [
            index
            for index in chunks_between(self._manifest, *targets.span)
            if len(targets.segments(self._manifest.chunks[index].offset, self._manifest.chunks[index].nbytes)[0])
        ]
        async with self._turn:
            if len(touched) > self._most:
                self._drop(0)  # the whole pool is for the chunks to come
                await read_payload(self._writer, self._backend, self._pool, self._file, self._manifest, targets)
                return
            for index in touched:
                view = await self._get(index)
                base = address_of(view)
                rows, _ = targets.segments(self._manifest.chunks[index].offset, view.nbytes)
                for address, offset, length in rows.tolist():
                    ctypes.memmove(address, base + offset, length)

    async def pieces(self, ranges: Iterable[tuple[int, int]]) -> AsyncIterator[memoryview]:
        """Yield the bytes of ranges (first byte, the one after the last); each piece stays as it is until the next.

        The next chunk is read meanwhile. Close the iterator where it is not used up.

        Raises:
            CorruptStoreError: a checksum does not hold; what was yielded before did.
            ReadError: the device failed.
        """
        chunks = self._manifest.chunks
        wanted = [
            (index, max(low, chunks[index].offset), min(high, chunks[index].offset + chunks[index].nbytes))
            for low, high in ranges
            for index in chunks_between(self._manifest, low, high)
        ]
        ahead: asyncio.Task[memoryview] | None = None
        try:
            for number, (index, low, high) in enumerate(wanted):
                view = await (ahead or self._take(index))
                ahead = None
                if number + 1 < len(wanted) and self._most > 1:
                    ahead = asyncio.create_task(self._take(wanted[number + 1][0]))
                start = chunks[index].offset
                yield view[low - start : high - start]
        finally:
            if ahead is not None:
                ahead.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await ahead

    async def _take(self, index: int) -> memoryview:
        async with self._turn:
            return await self._get(index)

    async def _get(self, index: int) -> memoryview:
        chunk = self._manifest.chunks[index]
        if index in self._kept:
            self._kept.move_to_end(index)
            return self._kept[index].view[: chunk.nbytes]
        self._drop(self._most - 1)
        lease = await self._pool.lease()
        try:
            await read_chunk(self._writer, self._backend, self._file, index, chunk, Segments(), lease.view, None)
        except BaseException:
            lease.release()
            raise
        self._kept[index] = lease
        return lease.view[: chunk.nbytes]

    def _drop(self, most: int) -> None:
        while len(self._kept) > most:
            self._kept.popitem(last=False)[1].release()
