# SPDX-License-Identifier: Apache-2.0
"""A CUDA device: memory, events and training's streams by torch; the engine's streams and copies by CuPy or torch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from pccheck_async.telemetry import write
from pccheck_async.transfer.copying.devices import Block
from pccheck_async.transfer.copying.lanes import Memory, joined
from pccheck_async.transfer.copying.runtime import TorchRuntime, relax
from pccheck_async.transfer.copying.snapshot import DeviceMemory
from pccheck_async.transfer.plan import Table

__all__ = ["CudaDevice", "CudaStream", "choose_runtime", "load"]

_SMALLEST_TABLE: Final = 64 << 10


class CudaDevice:
    """One CUDA device. The constructor does not touch it.

    All methods but :meth:`current` and :meth:`order_after_copies` are called on threads of the engine only. They set
    the current device there and leave it set: setting it back would create a context on device 0, which takes memory
    there for every process of the machine.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def current(self) -> CudaEvent:
        with torch.cuda.device(self.index):
            if torch.cuda.is_current_stream_capturing():  # work behind the event would be recorded, and not run
                raise RuntimeError("the current stream is being recorded as a CUDA graph; save and restore outside it")
        return CudaEvent(self.index, torch.cuda.current_stream(self.index))

    def order_after_copies(self, events: Sequence[CudaEvent]) -> bool:
        with torch.cuda.device(self.index):
            if torch.cuda.is_current_stream_capturing():
                return False  # a graph must not wait for work outside it
            try:
                for event in events:
                    torch.cuda.current_stream(self.index).wait_event(event.event)
            except RuntimeError as error:
                text = "device %d: a stream cannot wait for copies (%s); the host does"
                write("no_fence", text, self.index, error)
                return False
        return True

    def stream(self) -> CudaStream:
        return CudaStream(self.index)

    def memory(self) -> DeviceMemory:
        _use(self.index)
        free, total = torch.cuda.mem_get_info(self.index)
        reserved, peak = torch.cuda.memory_reserved(self.index), torch.cuda.max_memory_allocated(self.index)
        return DeviceMemory(total, free, reserved, peak)

    def register(self, address: int, nbytes: int) -> None:
        _use(self.index).register(address, nbytes)

    def unregister(self, address: int) -> None:
        _use(self.index).unregister(address)


_thread = threading.local()
_idle: dict[tuple[TorchRuntime, int], list[torch.cuda.Stream]] = {}
"""Streams of closed engines, reused by later engines. Streams are never destroyed: torch's allocator keeps memory for
each stream, and waits for the stream before it returns that memory to the driver."""


def _use(index: int) -> TorchRuntime:
    """Make a device the current one of the calling thread, which must be the engine's; return the runtime.

    Also calls :func:`relax` once per thread: while training records a CUDA graph, registering or allocating memory on
    another thread fails and ends the recording, unless that thread has called it.
    """
    runtime = load()
    runtime.use(index)
    if getattr(_thread, "relaxed_for", None) is not runtime:
        _thread.relaxed_for = runtime
        relax()
    return runtime


class CudaEvent:
    """An event on a stream of training or of the engine; keeps memory that the work before it uses."""

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


class CudaBlock:
    """Device memory of torch's allocator, so that torch's statistics show it and its cache can reuse it."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        try:
            # For the current stream, the engine's own: memory of the default stream waits for training's work there.
            self._tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        self.address = self._tensor.data_ptr()
        self.nbytes = nbytes


class _Rows(NamedTuple):
    """Rows of (destination, source, length), and their copy in device memory for the kernel; None: copy one by one."""

    rows: Table
    table: Block | None


class CudaStream:
    """A stream of the engine, and device memory for the tables of rows that its kernels read."""

    def __init__(self, index: int) -> None:
        self._runtime = runtime = _use(index)
        idle = _idle.setdefault((runtime, index), [])
        self._index = index
        self._gather = runtime.kernel(index)
        self._stream = idle.pop() if idle else runtime.stream(index)
        self._table = Memory()
        self._kept: list[Any] = []  # memory that queued work uses besides the copied one
        weakref.finalize(self, idle.append, self._stream).atexit = False

    def wait(self, event: CudaEvent) -> None:
        self._current().wait_event(event.event)

    def allocate(self, nbytes: int) -> CudaBlock:
        return CudaBlock(self._current().device, nbytes)

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
            # Torch caches pinned memory in powers of two, and hands it out again once it is released.
            pinned = torch.empty(rows.nbytes, dtype=torch.uint8, pin_memory=True)
            table = self.table_of(rows.nbytes)
        except (MemoryError, RuntimeError) as error:
            text = "device %d: no memory for a table of %d bytes (%s); copying one by one, slower"
            write("no_table", text, self._index, rows.nbytes, error)
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

    def record(self, *, timed: bool = False) -> CudaEvent:
        stream = self._current()
        kept, self._kept = self._kept, []
        return CudaEvent(self._index, stream, timed, kept)

    def synchronize(self) -> None:
        _use(self._index)
        self._stream.synchronize()
        self._kept = []

    def _current(self) -> torch.cuda.Stream:
        """Make the stream the current one of the calling thread, which must be the engine's; return it.

        Raises RuntimeError if a CUDA graph is being recorded on the stream.
        """
        _use(self._index)
        torch.cuda.set_stream(self._stream)
        if torch.cuda.is_current_stream_capturing():  # a stream of torch's pool: copies would become part of that graph
            text = "torch gave one stream to the engine and to a CUDA graph that is being recorded; CuPy prevents that"
            raise RuntimeError(text)
        return self._stream

    def table_of(self, nbytes: int) -> Block:
        """Return device memory for a table of ``nbytes`` for the kernel. Raises MemoryError."""
        return self._table.of(self, max(1 << (nbytes - 1).bit_length(), _SMALLEST_TABLE))


_loading = threading.Lock()


def load() -> TorchRuntime:
    """Return the runtime with CuPy's functions, or torch's if CuPy cannot be imported; decided on the first call.

    The import takes up to seconds, and creates nothing on a device.
    """
    with _loading:
        return choose_runtime()


@cache
def choose_runtime() -> TorchRuntime:
    """Import CuPy, and return the runtime for :func:`load`, which holds the lock."""
    relax()
    try:
        from pccheck_async.transfer.copying.cupy_runtime import CupyRuntime
    except Exception as error:  # noqa: BLE001 - a CuPy for another NumPy or driver raises many kinds of errors
        text = (
            "CuPy is missing: torch's streams copy; slower for many small tensors (%s; install "
            "pccheck-async[cuda12] or pccheck-async[cuda13])"
        )
        write("no_cupy", text, error)
        return TorchRuntime()
    return CupyRuntime()
