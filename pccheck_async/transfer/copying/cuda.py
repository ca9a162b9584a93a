"""The CUDA backend: streams of its own copy device memory by address, the host backend does the rest.

A capture sees what the caller's current stream had queued on each device: events are recorded there when it is
admitted, and the copies wait for them. Work on other streams has to be joined first (``wait_stream``), as for any use
of a tensor in torch (``torch.cuda.current_stream().wait_stream(side)``). The tensors' storages are held until all
copies from them ended.

Copies run on streams of CuPy, or of torch where CuPy is missing. CuPy compiles a kernel, too, that gathers many small
tensors; without it they are copied one by one, slower.

Where GPU memory is spare and that is faster than to wait for the host, the state is first copied on its device:
``device="stream"`` of an engine prevents that, ``device="snapshot"`` asks for it wherever there is memory. Its
statistics show how much GPU memory that took (``device_peak_bytes``), and why (``decisions.reasons["device"]``).

A step of an attached optimizer waits for an overlapped capture on the GPU, not on the host, as soon as all of its
copies are queued there: ``optimizer.step()`` returns, and what it queues runs behind the copies (``guard_fences``
counts that). Step counts on the host are copied before ``checkpoint()`` returns. The host has to wait, at most
``max_stall``, where staging memory does not hold the whole state, where it could not be registered, for larger
parameters on the host, and while a step is recorded as a CUDA graph: then captures go on, but none may begin on the
stream that is recorded. A recording beside a capture takes ``cuda-bindings`` (torch brings it from 2.11 on), or
``capture_error_mode="thread_local"``; else CUDA ends the recording with an error. Work on streams that are not ordered
behind the step needs ``engine.wait_captured()`` first, which waits on the host.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import numpy as np

from pccheck_async.errors import CheckpointError
from pccheck_async.state.sources import HOST, Sources
from pccheck_async.telemetry.logs import write
from pccheck_async.transfer.copying.base import CopyStatistics
from pccheck_async.transfer.copying.devices import Device, Event
from pccheck_async.transfer.copying.fence import Fence, Fenced
from pccheck_async.transfer.copying.host import HostCopy
from pccheck_async.transfer.copying.lanes import Copier, Lane, Snapshot
from pccheck_async.transfer.copying.pinning import Pinning
from pccheck_async.transfer.copying.snapshot import DeviceMode, Pace, decide, spare
from pccheck_async.transfer.copying.tables import Ranges, compacted, gaps, merged
from pccheck_async.transfer.copying.waiting import Waiting
from pccheck_async.transfer.memory import address_of
from pccheck_async.transfer.operations.base import Operations
from pccheck_async.transfer.segments import Segments, Table

__all__ = ["CudaCopy"]


_WAITERS: Final = 4
"""Threads that wait for devices: captures at their beginning, and chunks."""

_SMALL_HOST: Final = 1 << 20
"""Most bytes of host tensors (step counts of an optimizer) that are copied aside together with a snapshot."""

_Admission: TypeAlias = Mapping[int, Any]


class CudaCopy:
    """Copies device memory by address (see :class:`CopyBackend`). Made on the engine's loop; touches no device yet.

    Args:
        operations: Copies host memory and computes checksums.
        open_device: Makes a device by index, and does not touch it yet.
        mode: When states are first copied on their device.
        prepare: Does what takes a while and needs no device; called at once, on the thread that will launch copies.
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
        self.pinning = Pinning()
        self._operations = operations
        self._host = HostCopy(operations)
        self._mode: DeviceMode = mode
        self._guard = threading.Lock()
        self._open = open_device
        self._copiers: dict[int, Copier] = {}
        loop = asyncio.get_running_loop()
        self._launching = Waiting(loop, 1)  # not the loop: a device that has much to do lets whoever gives it more wait
        self._waiting = Waiting(loop, _WAITERS)
        self._registering = Waiting(loop, 1)  # not behind chunks that wait for training: later ones wait for this
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
        """Take snapshots where that pays, let the lanes wait elsewhere (see :class:`CopyBackend`)."""
        if not admission:
            return sources
        with _device_errors():
            chosen = await self._launching.call(self._choose, sources)
            taken: set[int] = set()
            before = sources
            if chosen:
                sources, taken = await self._waiting.call(self._take, admission, sources, chosen, fenced)
            if taken == before.devices:
                sources = await self._take_host(sources)
            await self.settle({index: event for index, event in admission.items() if index not in taken})
            if sources.packed_devices:  # torch copies these on streams of its own choice
                await self._waiting.call(_synchronize, [admission[index] for index in sources.packed_devices])
        return sources

    async def settle(self, admission: _Admission) -> None:
        """Let the lanes wait (see :class:`CopyBackend`)."""

        def settle() -> None:
            for index, event in admission.items():
                self._copiers[index].settle(event)

        with _device_errors():
            await self._launching.call(settle)

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
        """Take note of Tc (see :class:`CopyBackend`)."""
        self._pace.note(nbytes, seconds)

    def statistics(self) -> CopyStatistics:
        """Return what is held on all devices (see :class:`CopyBackend`)."""
        accounts = [copier.account for copier in list(self._copiers.values())]
        held, peak = sum(account.held for account in accounts), sum(account.peak for account in accounts)
        return CopyStatistics(held, peak, self._snapshots, self._reason)

    def close(self) -> None:
        """End the threads, let device memory go (see :class:`CopyBackend`). The pool unregisters its buffers."""
        for copier in self._copiers.values():
            copier.close()
        for threads in (self._launching, self._waiting, self._registering):
            threads.close()

    async def _fill(self, devices: Mapping[int, Table], base: int, nbytes: int, fenced: Fenced | None) -> Ranges:
        """Let devices write what is theirs into a buffer. Returns what was written, in order."""
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

        Where they do not block, ``queued`` is called when all of them are queued.
        """

        def start_and_wait() -> None:
            ends: list[Event] = []
            try:
                start(ends)
            finally:
                _synchronize(ends)

        with _device_errors():
            if not self.pinning.holds(base):
                await self._waiting.call(start_and_wait)  # such copies block
                return
            ends: list[Event] = []
            try:
                await self._launching.call(start, ends)  # whatever others wait for: the device always has work
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

    def _take(
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

    async def _take_host(self, sources: Sources) -> Sources:
        """Copy the few bytes of host tensors aside, so that the live state is out of reach as soon as the rest is."""
        where = sources.device_of
        assert where is not None
        rows = np.flatnonzero((where == HOST) & ~sources.packed)
        lengths = sources.lengths[rows]
        if not len(rows) or int(lengths.sum()) > _SMALL_HOST:
            return sources
        offsets, nbytes = compacted(sources.addresses[rows], lengths)
        aside = memoryview(bytearray(nbytes))
        table = np.stack((sources.addresses[rows], offsets, lengths.astype(np.uint64)), axis=1)
        await self._operations.gather(table.tobytes(), aside, sources)
        return sources.moved(rows, offsets + np.uint64(address_of(aside)), aside)


def _synchronize(events: Sequence[Event]) -> None:
    """Wait for all events, whatever goes wrong with one; raise that at the end."""
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
