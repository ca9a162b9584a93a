# SPDX-License-Identifier: Apache-2.0
"""Capture: the copy of a state, as it is at one instant, out of the trainer's reach.

There is one way for every state, :meth:`StateReader.start` on the caller's thread, which reads the state and decides
when each of its leaves is copied:

- inline: the whole state is small, and is copied before :meth:`StateReader.start` returns;
- eager: copied on the engine's loop before ``checkpoint()`` returns; with ``overlap``, small leaves already by
  :meth:`StateReader.start`;
- lazy, with ``overlap``: copied on the engine's loop while training goes on, until an optimizer's step waits for it.

The :class:`Capture` goes from there to the engine's loop, which copies the rest of it chunk by chunk.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pccheck_async.format import align, combine, piece_sums
from pccheck_async.format.checksum import SUM_BYTES, piece_count
from pccheck_async.format.manifest import ChunkEntry
from pccheck_async.state import (
    Layout,
    LazyPart,
    Memos,
    Owners,
    PackedSource,
    ReplicaSample,
    cached_layout,
    flatten,
    flatten_unchecked,
    split,
)
from pccheck_async.state.ambient import no_dispatch, no_functions, refuse_tracing
from pccheck_async.telemetry import write
from pccheck_async.transfer import PAGE_BYTES, contiguous_buffer
from pccheck_async.transfer.copying import CopyBackend, Fence, Fenced
from pccheck_async.transfer.operations import Operations
from pccheck_async.transfer.plan import PackedPiece, Plan, Planner, segments

__all__ = ["Capture", "InlineCaptures", "StateReader"]


_MOST_INLINE_BYTES = 256 << 10
"""Most bytes of a state that is captured inline, before it is handed to the engine's thread."""
_MOST_SOURCES = 64
"""Most sources of bytes in such a state: each takes a microsecond of the interpreter."""
_MANIFEST_NBYTES = 64 << 10
"""Bytes for the manifest, after those of the state, in the buffer of an inline capture."""
_KEPT = 4
"""Most free buffers that are kept for the next inline captures."""
_LARGEST_CHECKSUM = 0xFFFFFFFF
_NO_COPIES = Fence({})


@dataclass(slots=True, eq=False)
class InlineCapture:
    """A state captured into one chunk."""

    plan: Plan
    buffer: memoryview
    """The bytes of the chunk, with room for a manifest after them."""
    entry: ChunkEntry
    piece_sums: bytes
    """The checksums of the chunk's pieces."""
    seconds: tuple[float, float]
    """When the copy began and ended (of ``time.perf_counter()``)."""
    free: deque[memoryview]
    """The free buffers, to which the buffer returns when nothing reads it any more."""


class InlineCaptures:
    """Captures states of at most ``most_bytes`` and one chunk on the caller's thread. Any thread may use it.

    Handing such a state to the engine's thread, and waiting for its capture there, takes several times as long as
    copying it. So the whole state is copied at once, with its checksum, into one of the ``free`` buffers; the engine
    only describes and writes it.
    """

    def __init__(self, operations: Operations, planner: Planner, most_bytes: int = _MOST_INLINE_BYTES) -> None:
        self._operations = operations
        self._planner = planner
        self._most_bytes = min(most_bytes, planner.chunk_bytes)
        self._buffer_bytes = align(self._most_bytes, PAGE_BYTES) + _MANIFEST_NBYTES
        self.free: deque[memoryview] = deque(maxlen=_KEPT)

    def capture(self, layout: Layout) -> InlineCapture | None:
        """Copy a state in host memory; return None if it is too large, has no bytes, or lies on devices."""
        sources = layout.sources
        if sources.devices or len(sources) > _MOST_SOURCES or sum(sources.nbytes) > self._most_bytes:
            return None
        start = time.perf_counter()
        plan = self._planner.plan(layout)
        if len(plan.chunks) != 1 or plan.payload_nbytes > self._buffer_bytes:
            return None
        nbytes = plan.payload_nbytes
        table, packed = self._segments(plan, layout)
        try:
            buffer = self.free.pop()
        except IndexError:
            buffer = self._allocate()
        sums = self._operations.gather_at_once(table, buffer[:nbytes])
        if packed:
            for source, low, high, offset in packed:
                source.copy(low, high, buffer[offset : offset + high - low])
            sums = piece_sums(buffer[:nbytes])
        entry = ChunkEntry(0, nbytes, combine(sums, nbytes))
        return InlineCapture(plan, buffer, entry, sums, (start, time.perf_counter()), self.free)

    def _allocate(self) -> memoryview:
        """Return a new buffer, and put the others that are allocated with it into ``free``, for later captures."""
        size = self._buffer_bytes
        memory = contiguous_buffer(_KEPT * size)
        self.free.extend(memory[start : start + size] for start in range(size, len(memory), size))
        return memory[:size]

    def _segments(self, plan: Plan, layout: Layout) -> tuple[bytes, Sequence[PackedPiece]]:
        """Return the segments of the only chunk, and its packed pieces; faster for few parts than with numpy."""
        sources = layout.sources
        addresses = sources.addresses
        of = plan, addresses  # the layout cache gives the same ones while nothing moved
        table: bytes | None = layout.known.get("segments", of)
        if table is not None:
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
            layout.known.set("segments", of, table)
        return table, packed


class StateReader:
    """Starts captures, faster if a state has the structure of an earlier one. May be used from several threads.

    Attributes:
        owners: Chooses the boxes of tensors on several ranks that this rank saves; None: such tensors are refused.
        allow_pickle: Whether values that only pickle can hold are pickled; else they are refused.
    """

    def __init__(self, *, allow_pickle: bool = False) -> None:
        self.owners: Owners | None = None
        self.allow_pickle = allow_pickle
        self._told_pickled = False
        self._memos = Memos()

    def start(
        self,
        state: Mapping[str, Any],
        backend: CopyBackend,
        optimizers: Sequence[torch.optim.Optimizer] | None = None,
        *,
        check_bytes: bool = False,
        inline: InlineCaptures | None = None,
        number: int = 0,
    ) -> Capture:
        """Read a state on the caller's thread: call every ``state_dict()``, copy plain values, and split the leaves.

        Data pointers are resolved here, anew at each save: offloading, FSDP and ``resize_`` move them. Tensors on
        CUDA devices are captured after the work that the current streams have queued by now
        (see :meth:`CopyBackend.mark_queued_work`).

        Steps of ``optimizers`` wait for the capture, so tensors that only they change are lazy; ``check_bytes`` keeps a
        copy of these, to compare it with the capture. With ``optimizers=None`` nothing is lazy, and ``inline`` captures
        small states. ``number`` is the checkpoint's counter, which determines the sampled ranges of replicas.

        Raises UnsupportedStateError: a value cannot be saved (the error names its path), or tensors are being traced.
        """
        refuse_tracing("checkpoint")
        memo = self._memos.of(state)
        tally = None if self.owners is None else self.owners.begin(state, memo)
        flat = flatten_unchecked(state, memo.outline, tally=tally, allow_pickle=self.allow_pickle)
        if flat.pickled and not self._told_pickled:
            self._told_pickled = True
            text = "allow_pickle: %d values are pickled, and unpickling them runs code of theirs: %s"
            write("pickled", text, len(flat.pickled), ", ".join(flat.pickled[:5]))
        with no_functions(), no_dispatch():
            layout, memo.layout = cached_layout(flat.leaves, memo.layout)
            memo.outline = flat.outline
            sources = layout.sources
            if sources.devices and not backend.by_address:
                sources.pack_devices()
            lazy: LazyPart | None = None
            captured: InlineCapture | None = None
            if optimizers is not None:
                fenced = bool(sources.devices) and backend.by_address
                lazy = split(flat, layout, optimizers, memo, check_bytes=check_bytes, fenced=fenced)
            elif inline is not None and (captured := inline.capture(layout)) is not None:
                sources.release()
            marks = backend.mark_queued_work(sources.devices)
            capture = Capture(flat.skeleton, layout, backend, marks, lazy, captured)
            capture.has_sharded, capture.has_composed = flat.has_sharded, flat.has_composed
            if tally is not None:
                capture.differing = tally.differing
                if flat.has_sharded:
                    capture.tally_sums, capture.sample = tally.sums, ReplicaSample(tally.replicas, number)
            return capture

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise UnsupportedStateError if a state cannot be saved."""
        tally = None if self.owners is None else self.owners.begin(state)
        flatten(state, tally, allow_pickle=self.allow_pickle)


class Capture:
    """A state seen at one instant: plain values as they were, tensors by reference until they are copied.

    The last holder releases it: the caller of :meth:`StateReader.start` if it never reached the engine's loop, else the
    scheduler when every operation on it has ended.

    Attributes:
        skeleton: The tree of the state with every plain value in it.
        has_sharded: Whether tensors of the state lie on several ranks.
        tally_sums: Sums by which the group checks that each of these is saved once (see ``sums`` of :class:`Tally`).
        sample: Sample of the tensors that other ranks are believed to have alike; None without sharded tensors.
        differing: Hashes of the ranks whose replicas are known to differ.
        has_composed: Whether tensors of the state are composed of other tensors.
        layout: Layout of the tensors' bytes; keeps their storages alive.
        lazy: The part that is captured while training goes on; None if the caller waits for all of the state.
        inline: The capture of all of it, if it was captured inline: the live state is not read any more. Else None.
        time: Time of the capture, in seconds since the epoch.
        plan: The chunks. This and the next two are set by :meth:`begin`, unless the capture is inline.
        entries: Offset, length and checksum of each chunk. Of a chunk that is not captured yet the checksum is the
            largest one, so that the manifest is as long as it can become.
        pieces: The checksums of the pieces of each chunk, zeros of the same length before it is captured.
        live: Numbers of the chunks that hold bytes of the live state and are not copied yet.
        eager: Numbers of the chunks among these that the caller waits for: all, unless a part is lazy.
    """

    plan: Plan
    entries: list[ChunkEntry]
    pieces: list[bytes]
    has_sharded = False
    tally_sums: Mapping[str, int] = {}
    sample: ReplicaSample | None = None
    differing: frozenset[int] = frozenset()
    has_composed = False
    _stopped = False
    _copying = 0

    def __init__(
        self,
        skeleton: Any,
        layout: Layout,
        backend: CopyBackend,
        marks: Any,
        lazy: LazyPart | None = None,
        inline: InlineCapture | None = None,
    ) -> None:
        self.skeleton = skeleton
        self.layout = layout
        self.lazy = lazy
        self.inline = inline
        self.time = time.time()
        self._backend = backend
        self._marks = marks
        self._sources = layout.sources
        self.live: set[int] = set()
        self.eager: set[int] = set()
        if inline is not None:
            self.plan, self.entries, self.pieces = inline.plan, [inline.entry], [inline.piece_sums]

    async def begin(self, planner: Planner, on_fence: Fenced | None = None) -> Plan:
        """Prepare the copying, unless it was inline, and return the chunks; a backend may copy on its device first.

        ``on_fence`` is called, on any thread, once all remaining copies of the live state are queued on devices, with
        the fence after them.

        Cancellation: ends once all that was started ended.
        """
        self.plan = plan = planner.plan(self.layout)
        self._chunks, self._on_fence = plan.chunks, on_fence if self._sources.devices else None
        self._fence = _NO_COPIES
        self._idle = asyncio.Event()
        live = self._sources
        # A fence behind snapshots on devices is not enough if the host has live bytes left to copy.
        of_snapshots = None if on_fence is None or (live.live() & live.on_host()).any() else self._on_fence
        self._copying = 1
        try:
            self._sources = await self._backend.begin(self._marks, live, of_snapshots)
        finally:
            self._copying = 0
            self._idle.set()
        if self._sources is not live:
            live.release()
        alive = self._sources.live()
        self._begin_copies(self._chunks_of(alive))
        # Numbers of the live chunks whose copies are not behind the fence yet; empty without ``on_fence``.
        self._unfenced = self.live.copy() if self._on_fence is not None else set()
        # Numbers of the live chunks of which the host copies bytes: no fence covers these before they are copied.
        self._by_host = self._chunks_of(alive & self._sources.on_host()) if self._unfenced else set()
        if self.lazy is not None:
            self.eager = set() if self.lazy.eager is None else self._chunks_of(alive & self.lazy.eager)
        return plan

    def _begin_copies(self, live: set[int]) -> None:
        self.entries = [ChunkEntry(chunk.offset, chunk.nbytes, _LARGEST_CHECKSUM) for chunk in self._chunks]
        self.pieces = [bytes(SUM_BYTES * piece_count(chunk.nbytes)) for chunk in self._chunks]
        self._left = len(self._chunks)
        self._all_live, self.live, self.eager = frozenset(live), live, live.copy()
        self._timed_nbytes, self._timed_since = 0, time.perf_counter()

    def restart(self) -> bool:
        """Begin the copying again, as the copies were lost; return False if the state may have changed meanwhile.

        The state may have changed once the caller does not wait any more, and, with a lazy part, at any time. The copy
        of an inline capture is not lost: nothing is begun then.
        """
        if self.inline is not None:
            return True
        if self.lazy is not None or not self._left or (self._all_live and not self.live):
            return False
        self._begin_copies(set(self._all_live))
        return True

    def order(self) -> list[int]:
        """Return the numbers of the chunks to copy, first those that the caller waits for; none if captured inline."""
        if self.inline is not None:
            return []
        return [*sorted(self.eager), *[index for index in range(len(self._chunks)) if index not in self.eager]]

    async def copy(self, index: int, into: memoryview) -> bool:
        """Copy one chunk into memory of its length, and keep its checksums. The last chunk releases the state.

        Cancellation: ends once the copy ended.

        Returns:
            Whether the chunk was the last one of :attr:`live` or :attr:`eager`.
        """
        if self._stopped:
            raise asyncio.CancelledError
        chunk, lazy = self._chunks[index], self.lazy
        on_fence = None
        if self._on_fence is not None and index in self.live and index not in self._by_host:
            on_fence = partial(self._extend_fence, index)
        self._copying += 1
        self._idle.clear()
        try:
            sums = await self._backend.gather(segments(chunk, self._sources), into, self._sources, on_fence)
        finally:
            self._copying -= 1
            if not self._copying:
                self._idle.set()
        checksum = combine(sums, chunk.nbytes)
        if lazy is not None:
            lazy.check_chunk(index, chunk.table, into, checksum)
        self.entries[index] = ChunkEntry(chunk.offset, chunk.nbytes, checksum)
        self.pieces[index] = sums
        self._left -= 1
        if self._sources.devices:
            self._take_time(chunk.nbytes)
        if not self._left:
            if lazy is not None:
                lazy.note_captured([each.table for each in self._chunks], [each.checksum for each in self.entries])
            self.release()
        last = self.live == {index} or self.eager == {index}
        self.live.discard(index)
        self.eager.discard(index)
        if self.live and index in self._unfenced:
            self._extend_fence(index)
        return last

    async def stop(self) -> None:
        """Copy nothing more; return once nothing reads the live state."""
        self._stopped = True
        if self._copying:
            await self._idle.wait()

    def release(self) -> None:
        """Release the state, and copies of it on devices; nothing is being copied any more. Idempotent."""
        inline, self.inline, self.lazy = self.inline, None, None
        if inline is not None:
            inline.free.append(inline.buffer)  # for other captures: nothing reads it any more
        else:
            self._sources.release()

    def _extend_fence(self, index: int, fence: Fence | None = None) -> None:
        """Called when the copies of a chunk's live bytes are queued before a ``fence``, or (None) have ended."""
        self._unfenced.remove(index)
        if fence is not None:
            self._fence = self._fence.before(fence)
        if not self._unfenced and self._on_fence is not None:
            self._on_fence(self._fence)

    def _chunks_of(self, sources: npt.NDArray[np.bool_]) -> set[int]:
        return {index for index, chunk in enumerate(self._chunks) if sources[chunk.table[:, 0].astype(np.intp)].any()}

    def _take_time(self, nbytes: int) -> None:
        """Report the speed to the backend after the last chunk. The first one is left out: it waits for kernels."""
        now = time.perf_counter()
        if self._left + 1 == len(self._chunks) > 1:
            self._timed_since = now
        else:
            self._timed_nbytes += nbytes
        if not self._left:
            self._backend.note_capture(self._timed_nbytes, now - self._timed_since)
