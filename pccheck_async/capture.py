"""Capture: the state at one instant, and its copy into staging buffers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pccheck_async.copying import CopyBackend
from pccheck_async.manifest import ChunkEntry
from pccheck_async.plan import Chunk, Plan, segments
from pccheck_async.state.arrangement import Arrangement, arranged
from pccheck_async.state.flatten import take_apart
from pccheck_async.state.outline import Outline
from pccheck_async.state.storages import Layout

__all__ = ["Capture", "Snapshot", "Snapshots"]


@dataclass(slots=True, eq=False)
class Snapshot:
    """A state seen at one instant: plain values as they were, tensors by reference until they are captured.

    Attributes:
        skeleton: The tree with every plain value in it.
        layout: Where the tensors' bytes lie; holds their storages alive.
        admission: What the backend has to wait for before it copies.
        time: Seconds since the epoch.
    """

    skeleton: Any
    layout: Layout
    admission: Any
    time: float = field(default_factory=time.time)


class Snapshots:
    """Takes snapshots; one of the same structure as the last one is quick. May be used from several threads."""

    def __init__(self) -> None:
        self._last: tuple[Outline | None, Arrangement | None] = (None, None)

    def take(self, state: Mapping[str, Any], backend: CopyBackend) -> Snapshot:
        """Read a state on the caller's thread: calls every ``state_dict()``, copies plain values, copies no tensor.

        Data pointers are resolved here, anew at each save: offloading, FSDP and ``resize_`` move them. Of tensors on
        CUDA devices, the checkpoint sees what the current streams have queued by now (see :meth:`CopyBackend.admit`).

        Raises:
            UnsupportedStateError: naming the path of what cannot be saved.
        """
        outline, arrangement = self._last
        flat = take_apart(state, outline)
        layout, arrangement = arranged(flat.leaves, arrangement)
        self._last = flat.outline, arrangement
        sources = layout.sources
        if sources.devices and not backend.by_address:
            sources.pack_devices()
        return Snapshot(flat.skeleton, layout, backend.admit(sources.devices))


class Capture:
    """Copies the chunks of one snapshot; when the last one that holds live bytes is copied, the state is out of reach.

    Args:
        snapshot: What to copy.
        plan: Its chunks.
        backend: Does the copying.
        captured: Called when the live state is out of reach.

    Attributes:
        copied: Set when the last chunk was copied.
    """

    def __init__(self, snapshot: Snapshot, plan: Plan, backend: CopyBackend, captured: Callable[[], None]) -> None:
        self._sources = snapshot.layout.sources
        self._backend = backend
        self._captured = captured
        self.copied = asyncio.Event()
        self._admission = snapshot.admission
        self._chunks = plan.chunks
        self._live: set[int] = set()  # chunks not yet copied that hold bytes of the live state
        self._left = len(plan.chunks)
        self._entries: list[ChunkEntry | None] = [None] * len(plan.chunks)
        self._timed_nbytes, self._timed_since = 0, 0.0

    async def begin(self) -> None:
        """Get ready to copy; where the backend copies the state on its device first, it may be out of reach already.

        Cancellation: ends once what was started ended.
        """
        live = self._sources
        self._sources = await self._backend.begin(self._admission, live)
        if self._sources is not live:
            live.release()
        owned = self._sources.owned
        self._live = {
            index
            for index, chunk in enumerate(self._chunks)
            if owned is None or not owned[chunk.table[:, 0].astype(np.intp)].all()
        }
        self._timed_since = time.perf_counter()
        if not self._live:
            self._captured()
        if not self._left:
            self.copied.set()

    async def chunk(self, index: int, chunk: Chunk, into: memoryview) -> None:
        """Copy one chunk into its staging buffer and note its checksum.

        Cancellation: ends once the copy ended.
        """
        checksum = await self._backend.gather(segments(chunk, self._sources), into, self._sources)
        self._entries[index] = ChunkEntry(chunk.offset, chunk.nbytes, checksum)
        self._left -= 1
        self._take_time(chunk.nbytes)
        if not self._left:
            self.copied.set()
            self.release()
        if index in self._live:
            self._live.remove(index)
            if not self._live:
                self._captured()

    def entries(self) -> tuple[ChunkEntry, ...]:
        """Return offset, length and checksum of every chunk; all of them were captured."""
        return tuple(entry for entry in self._entries if entry is not None)

    def release(self) -> None:
        """Let go of the state, and of copies of it on its device; nothing is being copied any more. Idempotent."""
        self._sources.release()

    def _take_time(self, nbytes: int) -> None:
        """Tell the backend how fast it was. The first chunk does not count: it waits for the trainer's kernels."""
        now = time.perf_counter()
        if self._left + 1 == len(self._chunks) > 1:
            self._timed_since = now
        else:
            self._timed_nbytes += nbytes
        if not self._left and self._admission:
            self._backend.note_capture(self._timed_nbytes, now - self._timed_since)
