"""A device in host memory that does nothing until somebody waits for it: a missing wait shows as missing bytes.

Stands for a GPU where there is none. Work is queued and performed only by :meth:`PretendEvent.synchronize` and
:meth:`PretendStream.synchronize`, and then at the worst time that the waits allow: the trainer's kernels behind the end
of the stream that somebody waits for. Memory belongs to the stream that took it: its last owner there still writes to
it. Freed memory is full of rubbish. While it is paused, nothing is performed at all. What a real device would punish
(an address that is not its own, memory freed while work on it is queued, an event loop that launches work, which may
block) is noted in ``faults``.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from pccheck_async.engine import assembly as pipeline
from pccheck_async.engine import capture, restore
from pccheck_async.state import HOST, Layout, LayoutCache, Restoration, Sources, Targets, cached_layout, match
from pccheck_async.state.leaves import Leaves, RawSource
from pccheck_async.transfer.copying import CopyBackend, CudaCopy
from pccheck_async.transfer.copying.snapshot import DeviceMemory, DeviceMode
from pccheck_async.transfer.operations import Operations
from pccheck_async.transfer.plan import Table

_machine = threading.RLock()  # one processor for all devices


class PretendDevice:
    def __init__(self, index: int, capacity: int = 1 << 30) -> None:
        self.index = index
        self.capacity = capacity
        self.allocated = 0
        self.peak = 0
        self.registered: dict[int, int] = {}
        self.refuse_to_register = False
        self.refuse_to_wait = False
        self.moves = threading.Event()
        self.moves.set()
        self.faults: list[str] = []
        self.streams: list[PretendStream] = []
        self.training = PretendStream(self)  # the trainer's
        self._spaces: dict[int, np.ndarray[Any, Any]] = {}

    # -- what CudaCopy asks for

    def current(self) -> PretendEvent:
        return PretendEvent(self.training)

    def order_after_copies(self, events: Sequence[PretendEvent]) -> bool:
        for event in () if self.refuse_to_wait else events:
            self.training.wait(event)
        return not self.refuse_to_wait

    def stream(self) -> PretendStream:
        self.streams.append(PretendStream(self))
        return self.streams[-1]

    def memory(self) -> DeviceMemory:
        self.refuse_loops("asks for memory")
        return DeviceMemory(self.capacity, self.capacity - self.allocated, self.allocated, self.peak)

    def register(self, address: int, nbytes: int) -> None:
        if self.refuse_to_register:
            raise RuntimeError("the limit of locked memory")
        if any(low < address + nbytes and address < low + size for low, size in self.registered.items()):
            raise RuntimeError("already registered")
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        if address not in self.registered:
            raise RuntimeError("not registered")
        del self.registered[address]

    # -- what tests ask for

    def allocate(self, stream: PretendStream, nbytes: int) -> PretendBlock:
        if self.allocated + nbytes > self.capacity:
            raise MemoryError(f"{nbytes} bytes")
        return PretendBlock(stream, nbytes)

    def pause(self) -> None:
        self.moves.clear()

    def resume(self) -> None:
        self.moves.set()

    def tensor(self, data: bytes, shift: int = 0) -> tuple[int, np.ndarray[Any, Any]]:
        """Put data into device memory, at an address with remainder ``shift`` by 16. Returns address and owner."""
        memory = self.space(len(data) + 32)
        start = (shift - self.address(memory)) % 16
        memory[start : start + len(data)] = np.frombuffer(data, np.uint8)
        return self.address(memory) + start, memory[start : start + len(data)]

    def space(self, nbytes: int) -> np.ndarray[Any, Any]:
        memory = np.full(nbytes, 0xAA, np.uint8)
        self._spaces[self.address(memory)] = memory  # for ever: an address is never reused
        return memory

    def adopt(self, address: int, nbytes: int) -> None:
        """Take memory of the host for its own, as long as nobody frees it."""
        self._spaces[address] = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def refuse_loops(self, what: str) -> None:
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            self.faults.append(f"an event loop {what}")

    def idle(self) -> bool:
        return not any(touched for stream in self.streams for _, touched in stream.queue)

    def uses(self, address: int, nbytes: int) -> bool:
        queued = [touched for stream in self.streams for _, touched in stream.queue]
        return any(low < address + nbytes and address < low + size for touched in queued for low, size in touched)

    def holds(self, address: int, nbytes: int) -> bool:
        return any(low <= address and address + nbytes <= low + len(space) for low, space in self._spaces.items())

    def locked(self, address: int, nbytes: int) -> bool:
        return any(low <= address and address + nbytes <= low + size for low, size in self.registered.items())

    @staticmethod
    def address(memory: np.ndarray[Any, Any]) -> int:
        return int(memory.ctypes.data)


class PretendBlock:
    def __init__(self, stream: PretendStream, nbytes: int) -> None:
        self.nbytes = nbytes
        self._device = device = stream.device
        self._memory = device.space(nbytes + 16)
        self.address = (device.address(self._memory) + 15) // 16 * 16
        stream.later(partial(self._memory.fill, 0xEE))  # whoever had the memory before on it is not done with that
        device.allocated += nbytes
        device.peak = max(device.peak, device.allocated)

    def __del__(self) -> None:
        with _machine:
            if self._device.uses(self.address, self.nbytes):
                self._device.faults.append(f"{self.nbytes} bytes were freed while work on them was queued")
        self._memory[:] = 0xDD
        self._device.allocated -= self.nbytes


class PretendStream:
    def __init__(self, device: PretendDevice) -> None:
        self.device = device
        self.queue: list[tuple[Callable[[], Any], list[tuple[int, int]]]] = []  # work, and the memory that it touches
        self.done = 0

    def wait(self, event: PretendEvent) -> None:
        self.later(event.perform)

    def to_host(self, into: int, source: int, nbytes: int) -> None:
        self._copy(into, source, nbytes, there=source, here=into)

    def to_device(self, into: int, source: int, nbytes: int) -> None:
        self._copy(into, source, nbytes, there=into, here=source)

    def allocate(self, nbytes: int) -> PretendBlock:
        return self.device.allocate(self, nbytes)

    def zero(self, address: int, nbytes: int) -> None:
        self._check(address, nbytes)
        self.later(lambda: ctypes.memset(address, 0, nbytes), (address, nbytes))

    def prepare(self, rows: Table) -> Table:
        return rows

    def keep(self, memory: Any) -> None:
        self.later(lambda: memory)

    def move(self, rows: Table) -> None:
        for into, source, nbytes in rows.tolist():
            self._check(into, nbytes)
            self._check(source, nbytes)
            self.later(partial(ctypes.memmove, into, source, nbytes), (into, nbytes), (source, nbytes))

    def record(self, *, timed: bool = False) -> PretendEvent:
        return PretendEvent(self, timed=timed)

    def synchronize(self) -> None:
        self.device.moves.wait()
        with _machine:
            while self.queue:
                self.perform_one()

    def later(self, work: Callable[[], Any], *touched: tuple[int, int]) -> None:
        if self in self.device.streams:  # and not a trainer's
            self.device.refuse_loops("launches work")
        with _machine:
            self.queue.append((work, list(touched)))

    def perform_one(self) -> None:
        self.queue.pop(0)[0]()
        self.done += 1

    def _copy(self, into: int, source: int, nbytes: int, *, there: int, here: int) -> None:
        self._check(there, nbytes)
        self.later(partial(ctypes.memmove, into, source, nbytes), (into, nbytes), (source, nbytes))
        if not self.device.locked(here, nbytes):
            self.synchronize()  # such memory is copied while the caller waits

    def _check(self, address: int, nbytes: int) -> None:
        if not self.device.holds(address, nbytes):
            self.device.faults.append(f"[{address}, {address + nbytes}) is not memory of device {self.device.index}")


class PretendEvent:
    def __init__(self, stream: PretendStream, *, timed: bool = False) -> None:
        self._stream = stream
        self._timed = timed
        with _machine:
            self._end = stream.done + len(stream.queue)

    def synchronize(self) -> None:
        self._stream.device.moves.wait()
        with _machine:
            self.perform()
            self._stream.device.training.synchronize()

    def perform(self, but: int = 0) -> None:
        with _machine:
            while self._stream.done < self._end - but:
                self._stream.perform_one()

    def seconds_since(self, earlier: Any) -> float:
        assert self._timed
        assert earlier._timed
        return 1e-6


Place = Callable[[int, int], int]
"""Says on which device (or on the host) the memory of an address and a size is."""


def keep_on(monkeypatch: pytest.MonkeyPatch, devices: Sequence[PretendDevice], place: Place) -> None:
    """Let every engine find the tensors of its state in the memory of devices, as ``place`` says."""

    def cached_layout_on_devices(leaves: Leaves, last: LayoutCache | None) -> tuple[Layout, LayoutCache | None]:
        layout, last = cached_layout(leaves, last)
        placed = []
        for source in layout.sources:
            assert isinstance(source, RawSource)
            index = place(source.address, source.nbytes)
            if index != HOST:
                devices[index].adopt(source.address, source.nbytes)
            placed.append(source._replace(device=index))
        return replace(layout, sources=Sources(placed)), last

    def match_on_devices(*arguments: Any, **options: Any) -> Restoration:
        found = match(*arguments, **options)
        placed = []
        for target in found.targets:
            index = place(target.address, target.nbytes)
            if index != HOST:
                devices[index].adopt(target.address, target.nbytes)
            placed.append(target._replace(device=index))
        return replace(found, targets=Targets(placed))

    monkeypatch.setattr(capture, "cached_layout", cached_layout_on_devices)
    monkeypatch.setattr(restore, "match", match_on_devices)
    copy_with(monkeypatch, devices)


def copy_with(monkeypatch: pytest.MonkeyPatch, devices: Sequence[PretendDevice], *prepare: Callable[[], None]) -> None:
    """Let every engine copy with such devices, once it has done what there is to ``prepare``."""

    def make(operations: Operations, mode: DeviceMode) -> CopyBackend:
        return CudaCopy(operations, devices.__getitem__, mode, *prepare)

    monkeypatch.setattr(pipeline, "make_backend", make)
