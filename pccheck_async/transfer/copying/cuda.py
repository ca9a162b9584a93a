# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend: copies device memory by address on streams of its own; the base class copies host memory.

``examples/guide/training.md`` has the consequences for training (the work that a capture contains, snapshots, overlap,
CUDA graphs). (Invariants, such as I9: :mod:`pccheck_async.store`.)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from pccheck_async.errors import CheckpointError
from pccheck_async.state import HOST, Sources
from pccheck_async.telemetry import write
from pccheck_async.transfer.copying.base import CopyBackend, CopyStatistics
from pccheck_async.transfer.copying.devices import Device, DeviceEvent, Fence, Fenced
from pccheck_async.transfer.copying.lanes import Copier, Lane, Ranges, Snapshot, compacted, gaps, merged
from pccheck_async.transfer.copying.snapshot import DeviceMode, Pace, decide, spare
from pccheck_async.transfer.memory import address_of
from pccheck_async.transfer.operations.base import Operations
from pccheck_async.transfer.operations.worker_threads import WorkerThreads
from pccheck_async.transfer.plan import Segments, Table
from pccheck_async.transfer.uninterrupted import uninterrupted

__all__ = ["CudaCopy"]

T = TypeVar("T")

_WAITERS: Final = 4
"""Number of threads that wait for devices: for snapshots, and for the copies of chunks."""

_SMALL_HOST: Final = 1 << 20
"""Most bytes of host tensors (step counts of an optimizer) that are copied together with a snapshot."""

_Marks: TypeAlias = Mapping[int, Any]
"""The event, by index of the device, after the work that copies have to wait for."""


class CudaCopy(CopyBackend):
    """Copies device memory by address. Created on the engine's loop; the constructor touches no device.

    ``open_device`` creates the :class:`Device` of an index without touching the device. ``prepare`` does slow
    preparation that needs no device (imports); it is called at once on the thread that launches copies.
    """

    by_address = True

    def __init__(
        self,
        operations: Operations,
        open_device: Callable[[int], Device],
        mode: DeviceMode = "auto",
        prepare: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(operations, "no tensors of a device were saved yet")
        self.pinning: _Pinning = _Pinning()
        self._mode: DeviceMode = mode
        self._guard = threading.Lock()
        self._open = open_device
        self._copiers: dict[int, Copier] = {}
        loop = asyncio.get_running_loop()
        self._launching = _Waiting(loop, 1)  # not the loop: a device with a full queue blocks the submitter
        self._waiting = _Waiting(loop, _WAITERS)
        self._registering = _Waiting(loop, 1)  # not behind chunks that wait for training: later chunks wait for this
        self._pace = Pace()
        self._snapshots = 0
        if prepare is not None:
            self._launching.start(prepare)

    def mark_queued_work(self, devices: Collection[int]) -> _Marks:
        if not devices:
            return {}
        with self._guard:
            for index in devices:
                if index not in self._copiers:
                    copier = Copier(self._open(index))
                    if not self._copiers:
                        self.pinning.activate(copier.device, self._registering)
                    self._copiers[index] = copier
        with _device_errors():
            return {index: self._copiers[index].device.current() for index in devices}

    async def begin(self, marks: _Marks, sources: Sources, on_fence: Fenced | None = None) -> Sources:
        if not marks:
            return sources
        with _device_errors():
            chosen = await self._launching.call(self._choose, sources)
            taken: set[int] = set()
            before = sources
            if chosen:
                sources, taken = await self._waiting.call(self._snapshot, marks, sources, chosen, on_fence)
            if taken == before.devices:
                sources = await self._copy_small_host(sources)
            await self.order_after({index: event for index, event in marks.items() if index not in taken})
            if sources.packed_devices:  # torch copies these on streams that it chooses
                await self._waiting.call(_synchronize, [marks[index] for index in sources.packed_devices])
        return sources

    async def order_after(self, marks: _Marks) -> None:
        def wait() -> None:
            for index, event in marks.items():
                self._copiers[index].wait(event)

        with _device_errors():
            await self._launching.call(wait)

    async def gather(
        self, segments: Segments, into: memoryview, keepalive: Any = None, on_fence: Fenced | None = None
    ) -> bytes:
        if not segments.devices:
            return await super().gather(segments, into, keepalive)
        base = address_of(into)
        filled = await self._fill(segments.devices, base, into.nbytes, on_fence)
        if segments.host or segments.packed:
            rest = Segments(merged(segments.host, filled, base), packed=segments.packed)
            return await super().gather(rest, into, keepalive)
        for low, high in gaps(filled, into.nbytes):
            into[low:high] = bytes(high - low)
        return await self.operations.checksums(into)

    async def scatter(self, source: memoryview, checksum: int, segments: Segments, keepalive: Any = None) -> None:
        await super().scatter(source, checksum, segments, keepalive)
        base, nbytes = address_of(source), source.nbytes

        def start(ends: list[DeviceEvent]) -> None:
            for index, table in segments.devices.items():
                ends.append(self._copiers[index].lane().scatter(table, base, nbytes))

        if segments.devices:
            await self._perform(start, base)

    def note_capture(self, nbytes: int, seconds: float) -> None:
        self._pace.note(nbytes, seconds)  # CheckFreq's Tc

    def statistics(self) -> CopyStatistics:
        accounts = [copier.account for copier in list(self._copiers.values())]
        held, peak = sum(account.held for account in accounts), sum(account.peak for account in accounts)
        return CopyStatistics(held, peak, self._snapshots, self._reason)

    def close(self) -> None:
        # The pool unregisters its buffers.
        for copier in self._copiers.values():
            copier.close()
        for threads in (self._launching, self._waiting, self._registering):
            threads.close()

    async def _fill(self, devices: Mapping[int, Table], base: int, nbytes: int, on_fence: Fenced | None) -> Ranges:
        """Fill a buffer with the devices' segments, and wait until it is. Returns the ranges written, in order."""
        filled: list[Ranges] = []
        last: dict[Lane, tuple[Device, DeviceEvent]] = {}

        def start(ends: list[DeviceEvent]) -> None:
            for index, table in devices.items():
                others = [other for key, other in devices.items() if key != index]
                foreign = np.concatenate(others) if others else None
                copier = self._copiers[index]
                lane = copier.lane()
                end, ranges = lane.gather(table, foreign, base, nbytes)
                ends.append(end)
                filled.append(ranges)
                last[lane] = copier.device, end

        await self._perform(start, base, None if on_fence is None else lambda: on_fence(Fence(last)))
        together = np.concatenate(filled)
        ordered: Ranges = together[np.argsort(together[:, 0], kind="stable")]
        return ordered

    async def _perform(
        self, start: Callable[[list[DeviceEvent]], None], base: int, queued: Callable[[], None] | None = None
    ) -> None:
        """Start copies to or from the buffer at ``base``, and wait until they ended, cancelled or not.

        ``queued`` is called when all copies are queued, unless the buffer is unregistered, so that copies block.
        """

        def start_and_wait() -> None:
            ends: list[DeviceEvent] = []
            try:
                start(ends)
            finally:
                _synchronize(ends)

        with _device_errors():
            if not self.pinning.holds(base):
                await self._waiting.call(start_and_wait)  # copies of unregistered memory block
                return
            ends: list[DeviceEvent] = []
            try:
                await self._launching.call(start, ends)  # does not wait for other chunks: the device always has work
                if queued is not None:
                    queued()
            finally:
                if ends:
                    await self._waiting.call(_synchronize, ends)

    def _choose(self, sources: Sources) -> list[int]:
        """Return the devices on which to take a snapshot; keep the reasons for :meth:`statistics`."""
        where = sources.device_of
        chosen, reasons = [], []
        for index in sorted(set() if where is None else sources.devices):
            copier = self._copiers[index]
            state_bytes = int(sources.lengths[where == index].sum())
            memory, account = copier.device.memory(), copier.account
            decision = decide(
                self._mode,
                state_bytes=state_bytes,
                spare_bytes=spare(memory, training_peak=account.training_peak(memory.peak), held=account.held),
                total_bytes=memory.total,
                device_seconds=copier.pace.seconds(state_bytes),
                host_seconds=self._pace.seconds(int(sources.lengths.sum())),
            )
            if state_bytes and decision.snapshot:
                chosen.append(index)
            reasons.append(f"device {index}: {decision.reason}")
        self._reason = "; ".join(reasons)
        return chosen

    def _snapshot(
        self, marks: _Marks, sources: Sources, chosen: Sequence[int], on_fence: Fenced | None
    ) -> tuple[Sources, set[int]]:
        """Copy the sources on ``chosen`` devices within these, and block until that ended. Called on a waiting thread.

        Returns the sources with the copies in place, and the devices that had memory for them.
        """
        where = sources.device_of
        assert where is not None
        started: dict[int, tuple[Snapshot, Any]] = {}
        try:
            for index in chosen:
                rows = np.flatnonzero(where == index)
                addresses, lengths = sources.addresses[rows], sources.lengths[rows]
                try:
                    snapshot = self._copiers[index].snapshot(addresses, lengths, marks[index])
                except MemoryError as error:
                    self._reason = f"device {index}: streamed to the host: no memory for a snapshot ({error})"
                    write("no_snapshot", "%s", self._reason)
                else:
                    started[index] = (snapshot, rows)
            if on_fence is not None and started.keys() == sources.devices:
                on_fence(Fence({n: (self._copiers[n].device, taken.copied) for n, (taken, _) in started.items()}))
        finally:
            _synchronize([snapshot.copied for snapshot, _ in started.values()])
        for index, (snapshot, rows) in started.items():
            seconds = snapshot.copied.seconds_since(snapshot.started)
            self._copiers[index].pace.note(int(sources.lengths[rows].sum()), seconds)
            sources = sources.moved(rows, snapshot.addresses, snapshot.memory)
            self._snapshots += 1
        return sources, set(started)

    async def _copy_small_host(self, sources: Sources) -> Sources:
        """Copy all sources on the host if they are small in all: then the capture ends when the snapshots end."""
        where = sources.device_of
        assert where is not None
        rows = np.flatnonzero((where == HOST) & ~sources.packed)
        lengths = sources.lengths[rows]
        if not len(rows) or int(lengths.sum()) > _SMALL_HOST:
            return sources
        offsets, nbytes = compacted(sources.addresses[rows], lengths)
        copies = memoryview(bytearray(nbytes))
        table = np.stack((sources.addresses[rows], offsets, lengths.astype(np.uint64)), axis=1)
        await self.operations.gather(table.tobytes(), copies, sources)
        return sources.moved(rows, offsets + np.uint64(address_of(copies)), copies)


class _Pinning:
    """Registers staging memory with CUDA (see :class:`pccheck_async.transfer.pool.Pinning`), once a device is known.

    If the driver refuses, copies go through the driver's own buffers, which is slower.
    """

    def __init__(self) -> None:
        self.active = False
        self._device: Device
        self._waiting: _Waiting
        self._slabs: list[range] = []

    def activate(self, device: Device, waiting: _Waiting) -> None:
        """Begin to register buffers: with ``device``, which registers for all, on the threads of ``waiting``."""
        self._device, self._waiting = device, waiting
        self.active = True

    def holds(self, address: int) -> bool:
        """Return whether the buffer that begins at ``address`` is registered."""
        return any(address in slab for slab in self._slabs)

    async def pin(self, view: memoryview) -> None:
        """Register the memory of buffers. Cancellation: raised once the registration has ended."""
        await self._waiting.call(self._register, address_of(view), view.nbytes)

    def unpin_all(self) -> None:
        """Unregister all memory; no copy may be in progress."""
        slabs, self._slabs = self._slabs, []
        self.active = False
        for slab in slabs:
            try:
                self._device.unregister(slab.start)
            except RuntimeError as error:
                write("still_pinned", "staging memory stays registered with CUDA: %s", error)

    def _register(self, address: int, nbytes: int) -> None:
        try:
            self._device.register(address, nbytes)
        except RuntimeError as error:
            if self.active:
                self.active = False
                text = (
                    "staging buffers cannot be registered with CUDA (%s); copies to and from the device go on, slower "
                    "(is the limit of locked memory, ulimit -l, too low?)"
                )
                write("not_pinned", text, error)
        else:
            self._slabs.append(range(address, address + nbytes))


class _Waiting(WorkerThreads):
    """Threads for calls that block on a device, so that the loop and the I/O threads stay free."""

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        super().__init__(loop, _end, count=count, name="pccheck-device")

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call ``function`` on a thread and return its result, or raise its error.

        Cancellation: raised once the function has returned (I9): device work cannot be stopped.
        """
        result: list[T] = []  # may be device memory: neither the thread nor a kept CancelledError shall hold it
        try:
            await uninterrupted(self.start(lambda: result.append(function(*arguments))))
        except asyncio.CancelledError:
            result.clear()
            raise
        return result.pop()

    def start(self, function: Callable[[], object]) -> asyncio.Future[None]:
        """Queue ``function`` for a thread, after earlier calls; the future is done when it has returned or raised."""
        future = self._loop.create_future()
        self.submit([(future, function, ())])
        return future


def _end(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _synchronize(events: Sequence[DeviceEvent]) -> None:
    """Block until all events have passed, even if one fails; then raise the first failure."""
    failure: Exception | None = None
    for event in events:
        try:
            event.synchronize()
        except Exception as error:  # noqa: BLE001 - the others still have to be waited for
            failure = failure or error
    if failure is not None:
        raise failure


@contextmanager
def _device_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(f"copying on a CUDA device failed: {error}") from error
