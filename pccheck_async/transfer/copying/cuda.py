"""The CUDA backend: its own streams copy device memory by address; the host backend copies the rest.

**What a capture contains.** All work that the caller's current stream of each device had queued at admission: events
are recorded there, and the copies wait for them. Join work of other streams first, as for any use of a tensor in torch
(``torch.cuda.current_stream().wait_stream(side)``). The tensors' storages are held until all copies from them ended.

**Libraries.** Copies run on streams of CuPy, or of torch if CuPy is not installed. CuPy also compiles a kernel that
gathers many small tensors; without it they are copied one by one, slower.

**Snapshots.** If GPU memory is spare, and copying on the device is faster than waiting for the host, the state is first
copied on its device. ``device="stream"`` of an engine disables that, ``device="snapshot"`` forces it if there is
memory. The statistics show the GPU memory used (``device_peak_bytes``) and the reason
(``decisions.reasons["device"]``).

**Overlap.** A step of an attached optimizer waits for an overlapped capture on the GPU, not on the host, as soon as all
copies of the capture are queued there: ``optimizer.step()`` returns, and its kernels run behind the copies
(``guard_fences`` counts that). Step counts on the host are copied before ``checkpoint()`` returns. The host waits, at
most ``max_stall``, if the staging memory does not hold the whole state or could not be registered with CUDA, if larger
parameters lie on the host, and while a step is recorded as a CUDA graph. Streams that are not ordered behind the step
need ``engine.wait_captured()`` first, which waits on the host.

**CUDA graphs.** Captures go on while a graph is recorded, but none may begin on the stream that is recorded. Recording
beside a capture takes ``cuda-bindings`` (a dependency of torch from 2.11 on), or
``capture_error_mode="thread_local"``; else CUDA ends the recording with an error.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from pccheck_async.errors import CheckpointError
from pccheck_async.state import HOST, Sources
from pccheck_async.telemetry import write
from pccheck_async.transfer.copying.base import CopyStatistics
from pccheck_async.transfer.copying.devices import Device, Event, Fence, Fenced
from pccheck_async.transfer.copying.host import HostCopy
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
"""Threads that wait for devices: for the start of captures, and for chunks."""

_SMALL_HOST: Final = 1 << 20
"""Most bytes of host tensors (step counts of an optimizer) that are copied together with a snapshot."""

_Admission: TypeAlias = Mapping[int, Any]


class CudaCopy:
    """Copies device memory by address (see :class:`CopyBackend`). Created on the engine's loop; touches no device yet.

    Args:
        operations: Copies host memory and computes checksums.
        open_device: Creates the :class:`Device` of an index without touching the device.
        mode: When states are first copied on their device.
        prepare: Slow preparation that needs no device (imports); called at once, on the thread that launches copies.
    """

    name = "cuda"
    by_address = True

    def __init__(
        self,
        operations: Operations,
        open_device: Callable[[int], Device],
        mode: DeviceMode = "auto",
        prepare: Callable[[], object] | None = None,
    ) -> None:
        self.pinning = _Pinning()
        self._operations = operations
        self._host = HostCopy(operations)
        self._mode: DeviceMode = mode
        self._guard = threading.Lock()
        self._open = open_device
        self._copiers: dict[int, Copier] = {}
        loop = asyncio.get_running_loop()
        self._launching = _Waiting(loop, 1)  # not the loop: a device with a full queue blocks who submits
        self._waiting = _Waiting(loop, _WAITERS)
        self._registering = _Waiting(loop, 1)  # not behind chunks that wait for training: later chunks wait for this
        self._pace = Pace()
        self._reason = "no tensors of a device were saved yet"
        self._snapshots = 0
        if prepare is not None:
            self._launching.start(prepare)

    def admit(self, devices: Collection[int]) -> _Admission:
        """Record events on the current streams (see :class:`CopyBackend`)."""
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

    async def begin(self, admission: _Admission, sources: Sources, fenced: Fenced | None = None) -> Sources:
        """Take snapshots on the devices where that pays; on others let the lanes wait (see :class:`CopyBackend`)."""
        if not admission:
            return sources
        with _device_errors():
            chosen = await self._launching.call(self._choose, sources)
            taken: set[int] = set()
            before = sources
            if chosen:
                sources, taken = await self._waiting.call(self._snapshot, admission, sources, chosen, fenced)
            if taken == before.devices:
                sources = await self._copy_small_host(sources)
            await self.order_after({index: event for index, event in admission.items() if index not in taken})
            if sources.packed_devices:  # torch copies these on streams that it chooses
                await self._waiting.call(_synchronize, [admission[index] for index in sources.packed_devices])
        return sources

    async def order_after(self, admission: _Admission) -> None:
        """Let the lanes wait (see :class:`CopyBackend`)."""

        def wait() -> None:
            for index, event in admission.items():
                self._copiers[index].wait(event)

        with _device_errors():
            await self._launching.call(wait)

    async def gather(
        self, segments: Segments, into: memoryview, keepalive: Any = None, fenced: Fenced | None = None
    ) -> int:
        """Fill a staging buffer and return its CRC-32 (see :class:`CopyBackend`)."""
        if not segments.devices:
            return await self._host.gather(segments, into, keepalive)
        base = address_of(into)
        filled = await self._fill(segments.devices, base, into.nbytes, fenced)
        if segments.host or segments.packed:
            rest = Segments(merged(segments.host, filled, base), packed=segments.packed)
            return await self._host.gather(rest, into, keepalive)
        for low, high in gaps(filled, into.nbytes):
            into[low:high] = bytes(high - low)
        return await self._operations.checksum(into)

    async def scatter(self, source: memoryview, checksum: int, segments: Segments, keepalive: Any = None) -> None:
        """Verify, then copy out (see :class:`CopyBackend`)."""
        await self._host.scatter(source, checksum, segments, keepalive)
        base, nbytes = address_of(source), source.nbytes

        def start(ends: list[Event]) -> None:
            for index, table in segments.devices.items():
                ends.append(self._copiers[index].lane().scatter(table, base, nbytes))

        if segments.devices:
            await self._perform(start, base)

    def note_capture(self, nbytes: int, seconds: float) -> None:
        """Note the time to the host, CheckFreq's Tc (see :class:`CopyBackend`)."""
        self._pace.note(nbytes, seconds)

    def statistics(self) -> CopyStatistics:
        """Return the memory held on all devices (see :class:`CopyBackend`)."""
        accounts = [copier.account for copier in list(self._copiers.values())]
        held, peak = sum(account.held for account in accounts), sum(account.peak for account in accounts)
        return CopyStatistics(held, peak, self._snapshots, self._reason)

    def close(self) -> None:
        """End the threads, free device memory (see :class:`CopyBackend`). The pool unregisters its buffers."""
        for copier in self._copiers.values():
            copier.close()
        for threads in (self._launching, self._waiting, self._registering):
            threads.close()

    async def _fill(self, devices: Mapping[int, Table], base: int, nbytes: int, fenced: Fenced | None) -> Ranges:
        """Let devices copy their segments into a buffer. Returns the ranges written, in order."""
        filled: list[Ranges] = []
        last: dict[Lane, tuple[Device, Event]] = {}

        def start(ends: list[Event]) -> None:
            for index, table in devices.items():
                others = [other for key, other in devices.items() if key != index]
                foreign = np.concatenate(others) if others else None
                copier = self._copiers[index]
                lane = copier.lane()
                end, ranges = lane.gather(table, foreign, base, nbytes)
                ends.append(end)
                filled.append(ranges)
                last[lane] = copier.device, end

        await self._perform(start, base, None if fenced is None else lambda: fenced(Fence(last)))
        if len(filled) == 1:
            return filled[0]
        together = np.concatenate(filled)
        ordered: Ranges = together[np.argsort(together[:, 0], kind="stable")]
        return ordered

    async def _perform(
        self, start: Callable[[list[Event]], None], base: int, queued: Callable[[], None] | None = None
    ) -> None:
        """Start copies to or from the buffer at ``base``, and wait until they ended, cancelled or not.

        If the copies do not block, ``queued`` is called when all of them are queued.
        """

        def start_and_wait() -> None:
            ends: list[Event] = []
            try:
                start(ends)
            finally:
                _synchronize(ends)

        with _device_errors():
            if not self.pinning.holds(base):
                await self._waiting.call(start_and_wait)  # copies of unregistered memory block
                return
            ends: list[Event] = []
            try:
                await self._launching.call(start, ends)  # does not wait for other chunks: the device always has work
                if queued is not None:
                    queued()
            finally:
                if ends:
                    await self._waiting.call(_synchronize, ends)

    def _choose(self, sources: Sources) -> list[int]:
        """Decide on which devices to take a snapshot."""
        where = sources.device_of
        chosen, reasons = [], []
        for index in sorted(set() if where is None else sources.devices):
            copier = self._copiers[index]
            state_bytes = int(sources.lengths[where == index].sum())
            memory = copier.device.memory()
            decision = decide(
                self._mode,
                state_bytes=state_bytes,
                spare_bytes=spare(
                    memory, training_peak=copier.account.training_peak(memory.peak), held=copier.account.held
                ),
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
        self, admission: _Admission, sources: Sources, chosen: Sequence[int], fenced: Fenced | None
    ) -> tuple[Sources, set[int]]:
        """Copy sources on their devices, on a waiting thread. Returns the copies, and the devices that had memory."""
        where = sources.device_of
        assert where is not None
        started: dict[int, tuple[Snapshot, Any]] = {}
        try:
            for index in chosen:
                rows = np.flatnonzero(where == index)
                addresses, lengths = sources.addresses[rows], sources.lengths[rows]
                try:
                    snapshot = self._copiers[index].snapshot(addresses, lengths, admission[index])
                except MemoryError as error:
                    self._reason = f"device {index}: streamed to the host: no memory for a snapshot ({error})"
                    write(logging.INFO, "no_snapshot", "%s", self._reason)
                else:
                    started[index] = (snapshot, rows)
            if fenced is not None and started.keys() == sources.devices:
                fenced(Fence({n: (self._copiers[n].device, taken.copied) for n, (taken, _) in started.items()}))
        finally:
            _synchronize([snapshot.copied for snapshot, _ in started.values()])
        for index, (snapshot, rows) in started.items():
            seconds = snapshot.copied.seconds_since(snapshot.started)
            self._copiers[index].pace.note(int(sources.lengths[rows].sum()), seconds)
            sources = sources.moved(rows, snapshot.addresses, snapshot.memory)
            self._snapshots += 1
        return sources, set(started)

    async def _copy_small_host(self, sources: Sources) -> Sources:
        """Copy a few bytes of host tensors, so that the capture has ended as soon as the snapshots have."""
        where = sources.device_of
        assert where is not None
        rows = np.flatnonzero((where == HOST) & ~sources.packed)
        lengths = sources.lengths[rows]
        if not len(rows) or int(lengths.sum()) > _SMALL_HOST:
            return sources
        offsets, nbytes = compacted(sources.addresses[rows], lengths)
        copies = memoryview(bytearray(nbytes))
        table = np.stack((sources.addresses[rows], offsets, lengths.astype(np.uint64)), axis=1)
        await self._operations.gather(table.tobytes(), copies, sources)
        return sources.moved(rows, offsets + np.uint64(address_of(copies)), copies)


class _Pinning:
    """Registers staging memory before its first use (see :class:`pccheck_async.transfer.pool.Pinning`).

    If the driver refuses, copies go through buffers of the driver, slower.

    Attributes:
        active: Whether there is a device to register memory with.
    """

    def __init__(self) -> None:
        self.active = False
        self._device: Device
        self._waiting: _Waiting
        self._slabs: list[range] = []

    def activate(self, device: Device, waiting: _Waiting) -> None:
        """Register from now on, with ``device`` on behalf of all devices."""
        self._device, self._waiting = device, waiting
        self.active = True

    def holds(self, address: int) -> bool:
        """Whether the buffer that begins at ``address`` is registered."""
        return any(address in slab for slab in self._slabs)

    async def pin(self, view: memoryview) -> None:
        """Register buffers. Cancellation: raised once that has ended."""
        await self._waiting.call(self._register, address_of(view), view.nbytes)

    def unpin_all(self) -> None:
        """Unregister all memory; no device copies any more."""
        slabs, self._slabs = self._slabs, []
        self.active = False
        for slab in slabs:
            try:
                self._device.unregister(slab.start)
            except OSError as error:
                write(logging.WARNING, "still_pinned", "staging memory stays registered with CUDA: %s", error)

    def _register(self, address: int, nbytes: int) -> None:
        try:
            self._device.register(address, nbytes)
        except OSError as error:
            if self.active:
                self.active = False
                text = (
                    "staging buffers cannot be registered with CUDA (%s); copies to and from the device go on, slower "
                    "(is the limit of locked memory, ulimit -l, too low?)"
                )
                write(logging.WARNING, "not_pinned", text, error)
        else:
            self._slabs.append(range(address, address + nbytes))


class _Waiting:
    """Calls functions that block on a device, on threads of its own: loop and I/O threads stay free.

    Args:
        loop: The loop on which :meth:`call` is awaited.
        count: Threads.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        self._loop = loop
        self._tokens = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._threads = WorkerThreads(loop, self._end, count=count, name="pccheck-device")

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call ``function`` on a thread and return (or raise) what it does.

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
        """Call ``function`` on a thread, after the functions of earlier calls."""
        token, future = next(self._tokens), self._loop.create_future()
        self._calls[token] = future
        self._threads.submit([(token, function, ())])
        return future

    def close(self) -> None:
        """End the threads once all calls have returned."""
        self._threads.close()

    def _end(self, token: int, _: Any, error: BaseException | None) -> None:
        future = self._calls.pop(token)
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def _synchronize(events: Sequence[Event]) -> None:
    """Wait for all events even if one fails; raise the first failure at the end."""
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
