"""Images of small states: their bytes as they go to storage, made on the caller's thread.

To have a small state captured by the engine's thread, and to be told of it, takes several times as long as to copy it.
So that is done at once, in one piece and with its checksum; what is left to the engine is to describe and to write it.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pccheck_async.format.checksum import crc32
from pccheck_async.format.manifest import ChunkEntry
from pccheck_async.format.record import align
from pccheck_async.state.sources import PackedSource, Sources
from pccheck_async.state.storages import Layout
from pccheck_async.transfer.memory import PAGE_BYTES, contiguous_buffer
from pccheck_async.transfer.operations.base import Operations
from pccheck_async.transfer.plan import Plan, Planner
from pccheck_async.transfer.segments import PackedPiece

__all__ = ["Image", "Images"]

_MOST_SOURCES = 64
"""Each takes a microsecond of the interpreter."""
_MANIFEST_NBYTES = 64 << 10
"""Room behind the bytes of a state."""
_KEPT = 4
"""Buffers for the next images."""


@dataclass(slots=True, eq=False)
class Image:
    """A state in one chunk.

    Attributes:
        plan: Of the state.
        buffer: Begins with the chunk; room for a manifest behind it.
        entry: Offset, length and checksum of the chunk.
        seconds: When it was begun to be made, and when it was ready (of ``time.perf_counter()``).
    """

    plan: Plan
    buffer: memoryview
    entry: ChunkEntry
    seconds: tuple[float, float]


class Images:
    """Makes images. May be used from several threads.

    Args:
        operations: Copies.
        planner: Lays states out.
        most_bytes: Of a state of which an image is made.
    """

    def __init__(self, operations: Operations, planner: Planner, most_bytes: int) -> None:
        self._operations = operations
        self._planner = planner
        self._most_bytes = most_bytes
        self._buffer_bytes = align(most_bytes, PAGE_BYTES) + _MANIFEST_NBYTES
        self._free: deque[memoryview] = deque(maxlen=_KEPT)
        self._last: tuple[Plan | None, object, bytes] = (None, None, b"")

    def make(self, layout: Layout) -> Image | None:
        """Copy a state in host memory; None where it is too large, or has no bytes at all."""
        sources = layout.sources
        if sources.devices or len(sources) > _MOST_SOURCES or sum(sources.nbytes) > self._most_bytes:
            return None
        start = time.perf_counter()
        plan = self._planner.plan(layout)
        if len(plan.chunks) != 1 or plan.payload_nbytes > self._buffer_bytes:
            return None
        nbytes = plan.payload_nbytes
        table, packed = self._segments(plan, sources)
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = self._another()
        checksum = self._operations.gather_at_once(table, buffer[:nbytes])
        if packed:
            for source, low, high, offset in packed:
                source.copy(low, high, buffer[offset : offset + high - low])
            checksum = crc32(buffer[:nbytes])
        return Image(plan, buffer, ChunkEntry(0, nbytes, checksum), (start, time.perf_counter()))

    def take_back(self, image: Image) -> None:
        """Use the buffer of an image again: nothing reads it any more."""
        self._free.append(image.buffer)

    def _another(self) -> memoryview:
        """Return a buffer, and put others beside it away for later."""
        size = self._buffer_bytes
        memory = contiguous_buffer(_KEPT * size)
        self._free.extend(memory[start : start + size] for start in range(size, len(memory), size))
        return memory[:size]

    def _segments(self, plan: Plan, sources: Sources) -> tuple[bytes, Sequence[PackedPiece]]:
        """Do what :func:`.plan.segments` does: of few parts that takes less time without arrays."""
        addresses = sources.addresses
        last_plan, last_addresses, table = self._last
        if last_plan is plan and last_addresses is addresses:  # an arrangement gives the same while nothing moved
            return table, ()
        found = array("Q")
        packed: list[PackedPiece] = []
        for number, low, offset, length in plan.chunks[0].table.tolist():
            if address := int(addresses[number]):
                found.extend((address + low, offset, length))
            else:
                source = sources[number]
                assert isinstance(source, PackedSource)
                packed.append((source, low, low + length, offset))
        table = found.tobytes()
        if not packed and not addresses.flags.writeable:
            self._last = plan, addresses, table
        return table, packed
