"""Capture: the state at one instant, and its copy into staging buffers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pccheck_async.engine.byte_check import Reference
from pccheck_async.engine.inline_capture import Image, Images
from pccheck_async.errors import TornCaptureError
from pccheck_async.format.manifest import ChunkEntry
from pccheck_async.state.ambient import no_dispatch, no_functions, refuse_tracing
from pccheck_async.state.cache.constants import Choice, Constants
from pccheck_async.state.cache.layout_cache import Arrangement, arranged
from pccheck_async.state.cache.tears import Tears
from pccheck_async.state.cache.tree_cache import Outline
from pccheck_async.state.cache.versions import StorageMemory, Versions
from pccheck_async.state.save.eager import set_aside
from pccheck_async.state.save.flatten import FlatState, take_apart
from pccheck_async.state.save.lazy import ChangingTables, LazySources, optimized, sharing_nothing
from pccheck_async.state.sources import HOST, Sources
from pccheck_async.state.storages import Layout
from pccheck_async.transfer.copying import CopyBackend, Fence, Fenced
from pccheck_async.transfer.plan import Chunk, Plan, segments

__all__ = ["Capture", "Snapshot", "Snapshots"]


@dataclass(slots=True, eq=False)
class Snapshot:
    """A state seen at one instant: plain values as they were, tensors by reference until they are captured.

    Attributes:
        skeleton: The tree with every plain value in it.
        layout: Where the tensors' bytes lie; holds their storages alive.
        admission: What the backend has to wait for before it copies.
        lazy: What of it is captured while training goes on; None where the caller waits for all of it.
        image: All of it: it was small, and was copied at once. Nothing of the live state is read any more.
        time: Seconds since the epoch.
    """

    skeleton: Any
    layout: Layout
    admission: Any
    lazy: Lazy | None = None
    image: Image | None = None
    time: float = field(default_factory=time.time)

    def release(self) -> None:
        """Let go of the state."""
        self.layout.sources.release()
        self.lazy = None


@dataclass(slots=True, eq=False)
class Lazy:
    """The part of a snapshot that is captured while training goes on.

    Attributes:
        held: Sources that are not part of it: the caller waits for those.
        any_held: Whether there are any.
        versions: The tensors that are.
        reference: What they were, where that is to be compared.
        constants: What of it is left to it because it did not change so far; None where nothing ever could be.
        learn: Called with the checksums of all chunks, and the tables of those, if ``constants`` is something.
    """

    held: npt.NDArray[np.bool_]
    any_held: bool
    versions: Versions
    reference: Reference | None
    constants: Choice | None
    learn: Callable[[Choice, Sequence[npt.NDArray[np.uint64]], Sequence[int]], None]


class Snapshots:
    """Takes snapshots; one of the same structure as the last one is quick. May be used from several threads."""

    def __init__(self) -> None:
        self._last: tuple[Outline | None, Arrangement | None] = (None, None)
        self._tables = ChangingTables()
        self._lazy_sources = LazySources()
        self._constants = Constants()
        self._tears = Tears()
        self._part: _Part | None = None

    def take(
        self,
        state: Mapping[str, Any],
        backend: CopyBackend,
        optimizers: Iterable[torch.optim.Optimizer] | None = None,
        *,
        compare: bool = False,
        images: Images | None = None,
    ) -> Snapshot:
        """Read a state on the caller's thread: calls every ``state_dict()``, copies plain values, copies no tensor.

        Data pointers are resolved here, anew at each save: offloading, FSDP and ``resize_`` move them. Of tensors on
        CUDA devices, the checkpoint sees what the current streams have queued by now (see :meth:`CopyBackend.admit`).

        Args:
            state: The app state.
            backend: Will copy the tensors.
            optimizers: Those that will wait for the capture before they change anything: what belongs to them is left
                to it. Small parts of all else are copied here and now. None: the caller waits for everything.
            compare: Keep a copy of what is left to the capture, to compare it with.
            images: Copies a small state here and now, where there are no ``optimizers``.

        Raises:
            UnsupportedStateError: naming the path of what cannot be saved; or called where tensors are traced.
        """
        refuse_tracing("checkpoint")
        outline, arrangement = self._last
        flat = take_apart(state, outline)
        with no_functions(), no_dispatch():
            layout, arrangement = arranged(flat.leaves, arrangement)
            self._last = flat.outline, arrangement
            return self._see(flat, layout, backend, optimizers, compare=compare, images=images)

    def note_access(self, owner: Any) -> None:
        """Note that code reaches for the memory of a tensor or storage, past torch's counters."""
        self._constants.note_access(owner)

    def note_end(self, constants: Choice | None, error: Exception | None) -> None:
        """Note how a checkpoint ended: what keeps tearing its captures is captured eagerly from then on."""
        if error is None or isinstance(error, TornCaptureError):
            torn = () if error is None else error.paths
            self._tears.note(torn, () if constants is None else constants.paths.values())

    def _see(
        self,
        flat: FlatState,
        layout: Layout,
        backend: CopyBackend,
        optimizers: Iterable[torch.optim.Optimizer] | None,
        *,
        compare: bool,
        images: Images | None,
    ) -> Snapshot:
        sources = layout.sources
        if sources.devices and not backend.by_address:
            sources.pack_devices()
        lazy: Lazy | None = None
        image: Image | None = None
        if optimizers is not None:
            layout, lazy = self._split(
                flat, layout, optimizers, compare=compare, fenced=bool(sources.devices) and backend.by_address
            )
        elif images is not None and (image := images.make(layout)) is not None:
            sources.release()
        return Snapshot(flat.skeleton, layout, backend.admit(sources.devices), lazy, image)

    def _split(
        self,
        flat: FlatState,
        layout: Layout,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        compare: bool,
        fenced: bool,
    ) -> tuple[Layout, Lazy]:
        values, paths = flat.leaves.values, flat.leaves.paths
        owned = optimized(optimizers)
        if flat.objects and (changing := self._tables.among(flat.objects, flat.outline)):
            owned = sharing_nothing(owned, changing)
        sources = layout.sources
        later = self._lazy_sources.among(sources, values, owned)
        if torn := self._tears.sources(paths, layout.source_of):
            later = later.copy()
            later[torn] = False
        held = ~later
        any_held, constants = bool(held.any()), None
        if any_held:
            sources, held = set_aside(sources, held)
            candidates = held.copy()
            candidates[torn] = False
            if candidates.any():
                constants = self._constants.choose(layout, candidates, values, paths)
            if constants is not None:
                layout = layout.broken_at(constants.breaks)
                later, held = later | constants.left, held & ~constants.left
            any_held = bool(held.any())
        if fenced:  # steps change what is on the host at once (step counts): no stream holds them up
            sources, _ = set_aside(sources, later & _on_host(sources))
            if sources.owned is not None:
                later = later & ~sources.owned
        part = self._part
        if part is None or not part.is_of(later, layout):
            part = self._part = _Part(later, layout)
        tensors: list[Any] = values
        if part.members is not None:
            tensors, paths = [values[n] for n in part.members], [paths[n] for n in part.members]
        reference = None
        if compare:
            leaves = range(len(values)) if part.members is None else part.members
            source_of = map(layout.source_of.__getitem__, leaves)
            reference = Reference(sources, later, dict(zip(source_of, paths, strict=True)))
        if np.ndarray in set(map(type, tensors)):  # arrays count no changes
            counting = [number for number, each in enumerate(tensors) if isinstance(each, torch.Tensor)]
            versions = Versions([paths[n] for n in counting], [tensors[n] for n in counting])
        else:
            versions = Versions(paths, tensors, part.memory)
            part.memory = versions.memory  # the same for as long as it is this part: then nothing moved
        lazy = Lazy(held, any_held, versions, reference, constants, self._constants.learn)
        return layout if sources is layout.sources else layout.filled(sources), lazy


class _Part:
    """The leaves that are left to captures: remembered while these sources are, and lie where they did.

    Args:
        later: Which sources are.
        layout: Of the state.
    """

    def __init__(self, later: npt.NDArray[np.bool_], layout: Layout) -> None:
        self._later = later
        self._addresses = layout.sources.addresses
        lazy = [*later.tolist(), False]  # the last one stands for leaves without a source
        members = [number for number, source in enumerate(layout.source_of) if lazy[source]]
        self.members = members if len(members) < len(layout.source_of) else None
        self.memory: StorageMemory | None = None

    def is_of(self, later: npt.NDArray[np.bool_], layout: Layout) -> bool:
        """Whether this is what is left of a layout: an arrangement has one table of addresses while nothing moves."""
        return self._addresses is layout.sources.addresses and (
            self._later is later or np.array_equal(self._later, later)
        )


class Capture:
    """Copies the chunks of one snapshot; when the last one that holds live bytes is copied, the state is out of reach.

    Args:
        snapshot: What to copy.
        plan: Its chunks.
        backend: Does the copying.
        captured: Called when the live state is out of reach.
        held_captured: Called when those parts of it are that the caller waits for, where that is not all.
        fenced: Told, on any thread, of the fence behind which the live state is out of reach, where there is one before
            it is for everyone.

    Attributes:
        copied: Set when the last chunk was copied.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        plan: Plan,
        backend: CopyBackend,
        captured: Callable[[], None],
        held_captured: Callable[[], None] = lambda: None,
        fenced: Fenced | None = None,
    ) -> None:
        self._sources = snapshot.layout.sources
        self._lazy = snapshot.lazy
        self._backend = backend
        self._captured = captured
        self.copied = asyncio.Event()
        self._admission = snapshot.admission
        self._chunks = plan.chunks
        self._held_captured = held_captured
        self._fenced = fenced
        self._fence = Fence({})
        self._unfenced: set[int] = set()  # live chunks that it does not cover yet
        self._by_host: set[int] = set()  # live chunks that it never covers: the host copies live bytes of them
        self._live: set[int] = set()  # chunks not yet copied that hold bytes of the live state
        self._held: set[int] = set()  # those among them for which the caller waits
        self._left = len(plan.chunks)
        self._copying = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopped = False
        self._entries: list[ChunkEntry | None] = [None] * len(plan.chunks)
        self._timed_nbytes, self._timed_since = 0, 0.0

    async def begin(self) -> None:
        """Get ready to copy; where the backend copies the state on its device first, it may be out of reach already.

        Cancellation: ends once what was started ended.
        """
        live = self._sources
        fenced = self._fenced
        if fenced is not None and (_alive(live) & _on_host(live)).any():
            fenced = None
        self._sources = await self._backend.begin(self._admission, live, fenced)
        if self._sources is not live:
            live.release()
        alive = _alive(self._sources)
        self._live = self._chunks_of(alive)
        self._unfenced = self._live.copy()
        if self._fenced is not None:
            self._by_host = self._chunks_of(alive & _on_host(self._sources))
        if self._lazy is not None:
            self._held = self._chunks_of(alive & self._lazy.held)
            if not self._held:
                self._held_captured()
        self._timed_since = time.perf_counter()
        if not self._live:
            self._captured()
        if not self._left:
            self.copied.set()

    def order(self) -> list[int]:
        """Return the numbers of the chunks, first those for which the caller waits."""
        return sorted(range(len(self._chunks)), key=lambda index: index not in self._held)

    async def chunk(self, index: int, chunk: Chunk, into: memoryview) -> None:
        """Copy one chunk into its staging buffer and note its checksum.

        Cancellation: ends once the copy ended.
        """
        if self._stopped:
            raise asyncio.CancelledError
        fenced = None
        if self._fenced is not None and index in self._live and index not in self._by_host:
            fenced = partial(self._extend_fence, index)
        self._copying += 1
        self._idle.clear()
        try:
            checksum = await self._backend.gather(segments(chunk, self._sources), into, self._sources, fenced)
        finally:
            self._copying -= 1
            if not self._copying:
                self._idle.set()
        lazy = self._lazy
        if lazy is not None and lazy.reference is not None:
            lazy.reference.compare(chunk.parts, into)
        if lazy is not None and lazy.constants is not None:
            lazy.constants.check(index, chunk.table, checksum)
        self._entries[index] = ChunkEntry(chunk.offset, chunk.nbytes, checksum)
        self._left -= 1
        self._take_time(chunk.nbytes)
        if not self._left:
            self.copied.set()
            if lazy is not None and lazy.constants is not None:
                tables, entries = [each.table for each in self._chunks], self.entries()
                lazy.learn(lazy.constants, tables, [entry.checksum for entry in entries])
            self.release()
        if index in self._held:
            self._held.remove(index)
            if not self._held:
                self._held_captured()
        if index in self._live:
            self._live.remove(index)
            if not self._live:
                self._captured()
            elif index in self._unfenced:
                self._extend_fence(index)

    def entries(self) -> tuple[ChunkEntry, ...]:
        """Return offset, length and checksum of every chunk; all of them were captured."""
        return tuple(entry for entry in self._entries if entry is not None)

    async def stop(self) -> None:
        """Copy nothing more; return once nothing reads the live state."""
        self._stopped = True
        await self._idle.wait()

    def release(self) -> None:
        """Let go of the state, and of copies of it on its device; nothing is being copied any more. Idempotent."""
        self._sources.release()
        self._lazy = None

    def _extend_fence(self, index: int, fence: Fence | None = None) -> None:
        """Note that copies of live bytes of a chunk are behind a fence, or ended."""
        self._unfenced.remove(index)
        if fence is not None:
            self._fence = self._fence.before(fence)
        if not self._unfenced and self._fenced is not None:
            self._fenced(self._fence)

    def _chunks_of(self, sources: npt.NDArray[np.bool_]) -> set[int]:
        return {index for index, chunk in enumerate(self._chunks) if sources[chunk.table[:, 0].astype(np.intp)].any()}

    def _take_time(self, nbytes: int) -> None:
        """Tell the backend how fast it was. The first chunk does not count: it waits for the trainer's kernels."""
        now = time.perf_counter()
        if self._left + 1 == len(self._chunks) > 1:
            self._timed_since = now
        else:
            self._timed_nbytes += nbytes
        if not self._left and self._admission:
            self._backend.note_capture(self._timed_nbytes, now - self._timed_since)


def _alive(sources: Sources) -> npt.NDArray[np.bool_]:
    """Which sources hold bytes of the live state."""
    filled = sources.lengths > 0
    return filled if sources.owned is None else filled & ~sources.owned


def _on_host(sources: Sources) -> npt.NDArray[np.bool_]:
    """Which sources the host copies, those of devices that have no plain address included."""
    return np.ones(len(sources), np.bool_) if sources.device_of is None else np.equal(sources.device_of, HOST)
