"""Ranges of a payload, cut out of chunks whose checksums held: a few chunks in memory at a time."""

from __future__ import annotations

import asyncio
from bisect import bisect_right

from pccheck_async.errors import DamagedError
from pccheck_async.state.restore.listing import Listing
from pccheck_async.transfer.memory import aligned_buffer
from pccheck_async.upkeep.held import Held

__all__ = ["VerifiedPayload"]

_KEPT = 3
"""Chunks in memory: the one in use, the next one being read, and one for aliases and small leaves out of order."""


class VerifiedPayload:
    """Reads a held checkpoint's payload. For one task; the next chunk is read while the last one is in use."""

    def __init__(self, held: Held, listing: Listing) -> None:
        self._held = held
        self._listing = listing
        self._starts = [chunk.offset for chunk in held.manifest.chunks]
        self._chunks: dict[int, asyncio.Task[memoryview]] = {}
        self.read_nbytes = 0

    async def read(self, low: int, high: int) -> memoryview:
        """Return payload bytes ``[low, high)``. Raises DamagedError where they are damaged, ReadError."""
        first, last = bisect_right(self._starts, low) - 1, bisect_right(self._starts, high - 1) - 1
        if first == last:
            start = self._starts[first]
            return (await self._chunk(first))[low - start : high - start]
        whole = memoryview(bytearray(high - low))
        for index in range(first, last + 1):
            data = await self._chunk(index)
            start = self._starts[index]
            a, b = max(low, start), min(high, start + len(data))
            whole[a - low : b - low] = data[a - start : b - start]
        return whole

    async def close(self) -> None:
        """Wait until nothing is read any more."""
        for task in self._chunks.values():
            task.cancel()
        await asyncio.gather(*self._chunks.values(), return_exceptions=True)
        self._chunks.clear()

    async def _chunk(self, index: int) -> memoryview:
        task = self._chunks.pop(index, None)
        self._chunks[index] = task = task or await self._start(index)  # the last one to make room for others
        if index + 1 < len(self._starts) and index + 1 not in self._chunks:
            self._chunks[index + 1] = await self._start(index + 1)
        return await task

    async def _start(self, index: int) -> asyncio.Task[memoryview]:
        while len(self._chunks) >= _KEPT:
            oldest = self._chunks.pop(next(iter(self._chunks)))
            await asyncio.gather(oldest, return_exceptions=True)  # damage in a chunk that nobody wanted is no news
        return asyncio.create_task(self._load(index))

    async def _load(self, index: int) -> memoryview:
        chunk = self._held.manifest.chunks[index]
        session, file = self._held.reader.session, self._held.file
        view = aligned_buffer(chunk.nbytes)
        got = await session.writer.read(file, chunk.offset, view)
        self.read_nbytes += chunk.nbytes
        if got != chunk.nbytes or await session.operations.checksum(view) != chunk.checksum:
            leaves = self._listing.within(chunk.offset, chunk.offset + chunk.nbytes)
            raise DamagedError(
                f"{file.name}: chunk {index} of the checkpoint of step {self._held.entry.step} is damaged; it holds "
                f"{', '.join(leaves[:5])}{', ...' if len(leaves) > 5 else ''}; `pccheck verify` names all damage"
            )
        return view
