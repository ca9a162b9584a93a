"""A CUDA device: memory, events and the trainer's streams by torch, streams and copies of its own by CuPy or torch."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from pccheck_async.telemetry.logs import write
from pccheck_async.transfer.copying.devices import Block
from pccheck_async.transfer.copying.lanes import Memory
from pccheck_async.transfer.copying.load_runtime import load
from pccheck_async.transfer.copying.runtime import Runtime, relax
from pccheck_async.transfer.copying.snapshot import DeviceMemory
from pccheck_async.transfer.copying.tables import joined
from pccheck_async.transfer.segments import Table

__all__ = ["CudaDevice"]

_SMALLEST_TABLE: Final = 64 << 10


class CudaDevice:
    """One CUDA device (see :class:`pccheck_async.transfer.copying.devices.Device`). Making one touches no device.

    All but :meth:`current` and :meth:`hold_up` is called on threads of the engine only: there the current device is set
    and left so. Setting it back would make a context on device 0, which costs memory there in every process of a
    machine.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def current(self) -> _Event:
        """Record an event on the calling thread's current stream of this device. Raises RuntimeError."""
        with torch.cuda.device(self.index):
            if torch.cuda.is_current_stream_capturing():  # what waits for the event would be recorded, and not run
                raise RuntimeError("the current stream is being recorded as a CUDA graph; save and restore outside it")
        return _Event(self.index, torch.cuda.current_stream(self.index))

    def hold_up(self, events: Sequence[_Event]) -> bool:
        """Let the calling thread's current stream of this device wait for events of streams of ours."""
        with torch.cuda.device(self.index):
            if torch.cuda.is_current_stream_capturing():
                return False  # a graph must not wait for work outside it
            try:
                for event in events:
                    torch.cuda.current_stream(self.index).wait_event(event.event)
            except RuntimeError as error:
                text = "device %d: a stream cannot wait for copies (%s); the host does"
                write(logging.DEBUG, "no_fence", text, self.index, error)
                return False
        return True

    def stream(self) -> _Stream:
        """Make a stream that does not wait for the default stream."""
        return _Stream(self.index)

    def memory(self) -> DeviceMemory:
        """Ask the driver and torch's allocator."""
        _use(self.index)
        free, total = torch.cuda.mem_get_info(self.index)
        return DeviceMemory(
            total, free, torch.cuda.memory_reserved(self.index), torch.cuda.max_memory_allocated(self.index)
        )

    def register(self, address: int, nbytes: int) -> None:
        """Lock host memory. Raises OSError."""
        try:
            _use(self.index).register(address, nbytes)
        except RuntimeError as error:
            raise OSError(str(error)) from error

    def unregister(self, address: int) -> None:
        """Unlock host memory. Raises OSError."""
        try:
            _use(self.index).unregister(address)
        except RuntimeError as error:
            raise OSError(str(error)) from error


_thread = threading.local()
_idle: dict[tuple[Runtime, int], list[torch.cuda.Stream]] = {}
"""Streams of engines that were closed, for the next ones. None is ever destroyed: torch's allocator keeps memory for
each, and waits for the stream before it gives that back to the driver."""


def _use(index: int) -> Runtime:
    """Make a device the current one of the calling thread, which is the engine's.

    While a thread records a CUDA graph, which training may do at any time, others must not register memory or allocate
    any: that fails, and the recording with it. Those that record nothing themselves may say so, and then they may.
    """
    runtime = load()
    runtime.use(index)
    if not getattr(_thread, "relaxed", False):
        _thread.relaxed = True
        relax()
    return runtime


class _Event:
    """An event on a stream, the trainer's or ours. Torch guards the device of the calling thread, which is not ours."""

    def __init__(self, index: int, stream: torch.cuda.Stream, timed: bool = False, kept: Sequence[Any] = ()) -> None:
        self._index = index
        self._kept = kept
        self.event = torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def synchronize(self) -> None:
        _use(self._index)
        self.event.synchronize()
        self._kept = ()

    def seconds_since(self, earlier: Any) -> float:
        milliseconds: float = earlier.event.elapsed_time(self.event)
        return milliseconds / 1000


class _Block:
    """Device memory of torch's allocator, in which others see it, and may use it again once it gave back its cache."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        try:
            # For the current stream, which is ours: memory for the default one comes after what training queued there.
            self._tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        self.address = self._tensor.data_ptr()
        self.nbytes = nbytes


class _Rows(NamedTuple):
    """Rows of (destination, source, length), and the block in which the kernel finds them; else they go one by one."""

    rows: Table
    table: Block | None


class _Stream:
    """A stream, and the device memory for the tables of its kernels."""

    def __init__(self, index: int) -> None:
        self._runtime = runtime = _use(index)
        idle = _idle.setdefault((runtime, index), [])
        self._index = index
        self._gather = runtime.kernel(index)
        self._stream = idle.pop() if idle else runtime.stream(index)
        self._table: Block | None = None
        self._memory = Memory()
        self._kept: list[Any] = []  # what the work that is queued needs, apart from what it copies
        weakref.finalize(self, idle.append, self._stream).atexit = False

    def wait(self, event: _Event) -> None:
        self._current().wait_event(event.event)

    def allocate(self, nbytes: int) -> _Block:
        return _Block(self._current().device, nbytes)

    def to_host(self, into: int, source: int, nbytes: int) -> None:
        self._runtime.copy(self._current(), into, source, nbytes, "into")

    def to_device(self, into: int, source: int, nbytes: int) -> None:
        self._runtime.copy(self._current(), into, source, nbytes, "source")

    def zero(self, address: int, nbytes: int) -> None:
        self._runtime.zero(self._current(), address, nbytes)

    def prepare(self, rows: Table) -> _Rows:
        if self._gather is None or not len(rows):
            return _Rows(joined(rows), None)
        self._current()
        try:
            # Torch keeps such memory, in powers of two, and gives it out again once it is let go of.
            pinned = torch.empty(rows.nbytes, dtype=torch.uint8, pin_memory=True)
            table = self._table_of(rows.nbytes)
        except (MemoryError, RuntimeError) as error:
            text = "device %d: no memory for a table of %d bytes (%s); copying one by one, slower"
            write(logging.DEBUG, "no_table", text, self._index, rows.nbytes, error)
            return _Rows(joined(rows), None)
        self.keep(pinned)
        pinned.numpy().view(np.uint64)[:] = rows.ravel()
        self.to_device(table.address, pinned.data_ptr(), rows.nbytes)
        return _Rows(rows, table)

    def move(self, prepared: _Rows) -> None:
        rows, table = prepared
        stream = self._current()
        if self._gather is not None and table is not None:
            self._gather(stream, table.address, len(rows))
            return
        for into, source, nbytes in rows.tolist():
            self._runtime.copy(stream, into, source, nbytes)

    def keep(self, memory: Any) -> None:
        self._kept.append(memory)

    def record(self, *, timed: bool = False) -> _Event:
        stream = self._current()
        kept, self._kept = self._kept, []
        return _Event(self._index, stream, timed, kept)

    def synchronize(self) -> None:
        _use(self._index)
        self._stream.synchronize()
        self._kept = []

    def _current(self) -> torch.cuda.Stream:
        """Make the stream the current one of the calling thread, which is the engine's, and leave it so."""
        _use(self._index)
        torch.cuda.set_stream(self._stream)
        if torch.cuda.is_current_stream_capturing():  # one of torch's: our copies would become part of that graph
            text = "torch gave one stream to the engine and to a CUDA graph that is being recorded; CuPy prevents that"
            raise RuntimeError(text)
        return self._stream

    def _table_of(self, nbytes: int) -> Block:
        if self._table is None or self._table.nbytes < nbytes:
            table = self._memory.allocate(self, max(1 << (nbytes - 1).bit_length(), _SMALLEST_TABLE))
            if self._table is not None:
                self.keep(self._table)
            self._table = table
        return self._table
