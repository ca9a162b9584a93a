"""Capture: the state at one instant, and its copy into staging buffers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pccheck_async.copying import CopyBackend
from pccheck_async.manifest import ChunkEntry
from pccheck_async.plan import Chunk, Plan, segments
from pccheck_async.state.arrangement import Arrangement, arranged
from pccheck_async.state.flatten import take_apart
from pccheck_async.state.outline import Outline
from pccheck_async.state.sources import Sources
from pccheck_async.state.storages import Layout

__all__ = ["Capture", "Snapshot", "Snapshots"]


@dataclass(slots=True, eq=False)
class Snapshot:
    """A state seen at one instant: plain values as they were, tensors by reference until they are captured.

    Attributes:
        skeleton: The tree with every plain value in it.
        layout: Where the tensors' bytes lie; holds their storages alive.
        time: Seconds since the epoch.
    """

    skeleton: Any
    layout: Layout
    time: float = field(default_factory=time.time)


class Snapshots:
    """Takes snapshots; one of the same structure as the last one is quick. May be used from several threads."""

    def __init__(self) -> None:
        self._last: tuple[Outline | None, Arrangement | None] = (None, None)

    def take(self, state: Mapping[str, Any]) -> Snapshot:
        """Read a state on the caller's thread: calls every ``state_dict()``, copies plain values, copies no tensor.

        Data pointers are resolved here, anew at each save: offloading, FSDP and ``resize_`` move them.

        Raises:
            UnsupportedStateError: naming the path of what cannot be saved.
        """
        outline, arrangement = self._last
        flat = take_apart(state, outline)
        layout, arrangement = arranged(flat.leaves, arrangement)
        self._last = flat.outline, arrangement
        _settle(layout.devices)
        return Snapshot(flat.skeleton, layout)


def _settle(devices: Iterable[torch.device]) -> None:
    """Let pending kernels finish, so that device memory holds the state that the caller sees."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


class Capture:
    """Copies the chunks of one snapshot; when the last one is copied the live state is out of reach.

    Args:
        snapshot: What to copy; let go at the end.
        plan: Its chunks.
        backend: Does the copying.
        captured: Called when the last chunk was copied.
    """

    def __init__(self, snapshot: Snapshot, plan: Plan, backend: CopyBackend, captured: Callable[[], None]) -> None:
        self._sources = snapshot.layout.sources
        self._backend = backend
        self._captured = captured
        self._left = len(plan.chunks)
        self._entries: list[ChunkEntry | None] = [None] * len(plan.chunks)
        if not self._left:
            self._end()

    async def chunk(self, index: int, chunk: Chunk, into: memoryview) -> None:
        """Copy one chunk into its staging buffer and note its checksum.

        Cancellation: ends once the copy ended.
        """
        table, packed = segments(chunk, self._sources)
        checksum = await self._backend.gather(table, packed, into, self._sources)
        self._entries[index] = ChunkEntry(chunk.offset, chunk.nbytes, checksum)
        self._left -= 1
        if not self._left:
            self._end()

    def entries(self) -> tuple[ChunkEntry, ...]:
        """Return offset, length and checksum of every chunk; all of them were captured."""
        return tuple(entry for entry in self._entries if entry is not None)

    def _end(self) -> None:
        self._sources = Sources()  # the live state is let go
        self._captured()
