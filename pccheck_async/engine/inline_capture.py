"""Inline capture: a state small enough to be captured inside ``checkpoint()``, on the caller's thread.

To hand such a state to the engine's thread, and to be told that it is captured, takes several times as long as to copy
it. So all of it is copied at once, into one buffer and with its checksum; the engine is left to describe and write it.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pccheck_async.format import align, crc32
from pccheck_async.format.manifest import ChunkEntry
from pccheck_async.state import Layout, PackedSource, Sources
from pccheck_async.transfer import PAGE_BYTES, PackedPiece, contiguous_buffer
from pccheck_async.transfer.operations import Operations
from pccheck_async.transfer.plan import Plan, Planner

__all__ = ["InlineCapture", "InlineCaptures"]

_MOST_SOURCES = 64
"""Each takes a microsecond of the interpreter."""
_MANIFEST_NBYTES = 64 << 10
"""Room behind the bytes of a state."""
_KEPT = 4
"""Buffers for the next captures."""


@dataclass(slots=True, eq=False)
class InlineCapture:
    """A state captured into one chunk.

    Attributes:
        plan: Of the state.
        buffer: Begins with the chunk; room for a manifest behind it.
        entry: Offset, length and checksum of the chunk.
        seconds: When the copy began and ended (of ``time.perf_counter()``).
        free: Where the buffer goes when nothing reads it any more.
    """

    plan: Plan
    buffer: memoryview
    entry: ChunkEntry
    seconds: tuple[float, float]
    free: deque[memoryview]

    def release(self) -> None:
        """Use the buffer for other captures: nothing reads it any more. Called once."""
        self.free.append(self.buffer)


class InlineCaptures:
    """Captures small states. May be used from several threads.

    Args:
        operations: Copies.
        planner: Lays states out.
        most_bytes: Bytes of the largest state that is captured inline.

    Attributes:
        free: Buffers that no capture has.
    """

    def __init__(self, operations: Operations, planner: Planner, most_bytes: int) -> None:
        self._operations = operations
        self._planner = planner
        self._most_bytes = most_bytes
        self._buffer_bytes = align(most_bytes, PAGE_BYTES) + _MANIFEST_NBYTES
        self.free: deque[memoryview] = deque(maxlen=_KEPT)
        self._last: tuple[Plan | None, object, bytes] = (None, None, b"")

    def capture(self, layout: Layout) -> InlineCapture | None:
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
            buffer = self.free.pop()
        except IndexError:
            buffer = self._allocate()
        checksum = self._operations.gather_at_once(table, buffer[:nbytes])
        if packed:
            for source, low, high, offset in packed:
                source.copy(low, high, buffer[offset : offset + high - low])
            checksum = crc32(buffer[:nbytes])
        entry = ChunkEntry(0, nbytes, checksum)
        return InlineCapture(plan, buffer, entry, (start, time.perf_counter()), self.free)

    def _allocate(self) -> memoryview:
        """Return a new buffer, and keep the others that are allocated with it for later captures."""
        size = self._buffer_bytes
        memory = contiguous_buffer(_KEPT * size)
        self.free.extend(memory[start : start + size] for start in range(size, len(memory), size))
        return memory[:size]

    def _segments(self, plan: Plan, sources: Sources) -> tuple[bytes, Sequence[PackedPiece]]:
        """Do what :func:`pccheck_async.transfer.plan.segments` does, faster for few parts: without numpy."""
        addresses = sources.addresses
        last_plan, last_addresses, table = self._last
        if last_plan is plan and last_addresses is addresses:  # the layout cache gives the same while nothing moved
            return table, ()
        rows = array("Q")
        packed: list[PackedPiece] = []
        for number, low, offset, length in plan.chunks[0].table.tolist():
            if address := int(addresses[number]):
                rows.extend((address + low, offset, length))
            else:
                source = sources[number]
                assert isinstance(source, PackedSource)
                packed.append((source, low, low + length, offset))
        table = rows.tobytes()
        if not packed and not addresses.flags.writeable:
            self._last = plan, addresses, table
        return table, packed
