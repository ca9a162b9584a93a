"""A CUDA device by CuPy; memory, and the trainer's streams, by torch. The one module that imports CuPy."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import cupy
import numpy as np
import torch
from cupy.cuda import runtime

from pccheck_async.copying.kernel import MOVE_SOURCE
from pccheck_async.copying.snapshot import DeviceMemory
from pccheck_async.copying.tables import joined
from pccheck_async.logs import write
from pccheck_async.segments import Table

__all__ = ["CupyDevice"]

_THREADS: Final = 256
_REGISTER_PORTABLE: Final = 1
"""cudaHostRegisterPortable: locked for every device."""
_SMALLEST_TABLE: Final = 64 << 10
_RELAXED: Final = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""

try:
    runtime.getDeviceCount()
except runtime.CUDARuntimeError as error:  # importing it tells nothing: it brings a runtime of its own
    raise ImportError(f"this CuPy does not work with this driver: {error}") from error

_move = cupy.RawKernel(MOVE_SOURCE, "pccheck_move")


class CupyDevice:
    """One CUDA device (see :class:`pccheck_async.copying.devices.Device`). Making one touches no device.

    All but :meth:`current` and :meth:`hold_up` is called on threads of the engine only: there the current device is set
    and left so. Setting it back would make a context on device 0, which costs memory there in every process of a
    machine.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._compiled: bool | None = None

    def current(self) -> _TorchEvent:
        """Record an event on the calling thread's current stream of this device. Raises RuntimeError."""
        with torch.cuda.device(self.index):
            if torch.cuda.is_current_stream_capturing():  # what waits for the event would be recorded, and not run
                raise RuntimeError("the current stream is being recorded as a CUDA graph; save and restore outside it")
        return _TorchEvent(self.index)

    def hold_up(self, events: Sequence[_Event]) -> bool:
        """Let the calling thread's current stream of this device wait for events of streams of ours."""
        with torch.cuda.device(self.index):  # handle 0 is the default stream of whichever device is the current one
            if torch.cuda.is_current_stream_capturing():
                return False  # a graph must not wait for work outside it
            stream = torch.cuda.current_stream(self.index).cuda_stream
            try:
                for event in events:
                    runtime.streamWaitEvent(stream, event.ptr)
            except runtime.CUDARuntimeError as error:
                text = "device %d: a stream cannot wait for copies (%s); the host does"
                write(logging.DEBUG, "no_fence", text, self.index, error)
                return False
        return True

    def stream(self) -> _Stream:
        """Make a stream that does not wait for the default stream."""
        _use(self.index)
        if self._compiled is None:
            self._compiled = _compile()
        return _Stream(self.index, self._compiled)

    def allocate(self, nbytes: int) -> _Block:
        """Take memory from torch's allocator. Raises MemoryError."""
        _use(self.index)
        return _Block(self.index, nbytes)

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
            _use(self.index)
            runtime.hostRegister(address, nbytes, _REGISTER_PORTABLE)
        except runtime.CUDARuntimeError as error:
            raise OSError(str(error)) from error

    def unregister(self, address: int) -> None:
        """Unlock host memory. Raises OSError."""
        try:
            _use(self.index)
            runtime.hostUnregister(address)
        except runtime.CUDARuntimeError as error:
            raise OSError(str(error)) from error


_thread = threading.local()


def _use(index: int) -> None:
    """Make a device the current one of the calling thread, which is the engine's.

    While a thread records a CUDA graph, which training may do at any time, others must not register memory or allocate
    any: that fails, and the recording with it. Those that record nothing themselves may say so, and then they may.
    """
    runtime.setDevice(index)
    if not getattr(_thread, "relaxed", False):
        _thread.relaxed = True
        with suppress(OSError, AttributeError):  # a driver from before CUDA 10.1
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


def _compile() -> bool:
    """Compile the kernel for the current device; False where that cannot be done (NVRTC is missing)."""
    # CuPy before 14 does not look for the compiler that comes with torch from PyPI, but takes it once it is loaded.
    for library in Path(torch.__file__).parents[1].glob("nvidia/*/lib/libnvrtc.so.*"):
        with suppress(OSError):
            ctypes.CDLL(str(library))
    try:
        try:
            _ = _move.num_regs  # compiles for this device alone; compile() would forget the others
        except OSError:  # there is no home, or it is read-only
            os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
            _ = _move.num_regs
    except Exception as error:  # noqa: BLE001 - whatever the compiler says, copying goes on without it
        text = "the copy kernel cannot be compiled (%s); many small tensors are copied one by one, slower"
        write(logging.WARNING, "no_kernel", text, error)
        return False
    return True


class _TorchEvent:
    """An event on torch's current stream; torch guards the device of the calling thread, which is not ours."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(index))
        self.ptr: int = self._event.cuda_event  # what CuPy's Stream.wait_event asks an event for

    def synchronize(self) -> None:
        _use(self._index)
        self._event.synchronize()

    def seconds_since(self, earlier: Any) -> float:
        raise TypeError("an event of the trainer's stream measures no time")


class _Block:
    """Device memory of torch's allocator, in which others see it and may use it again."""

    def __init__(self, index: int, nbytes: int) -> None:
        try:
            self._tensor = torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", index))
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        self.address = self._tensor.data_ptr()
        self.nbytes = nbytes
        # The allocator knows one stream only: what was queued there may still use memory that it now gave us.
        self.ready = _TorchEvent(index)


class _Event:
    def __init__(self, index: int, stream: cupy.cuda.Stream, timed: bool, kept: list[Any]) -> None:
        self._index = index
        self._event = cupy.cuda.Event(block=True, disable_timing=not timed)
        self._event.record(stream)
        self.ptr: int = self._event.ptr
        self._kept = kept

    def synchronize(self) -> None:
        _use(self._index)
        self._event.synchronize()
        self._kept = []

    def seconds_since(self, earlier: Any) -> float:
        milliseconds: float = cupy.cuda.get_elapsed_time(earlier._event, self._event)
        return milliseconds / 1000


class _Rows(NamedTuple):
    """Rows of (destination, source, length), and the block in which the kernel finds them; else they go one by one."""

    rows: Table
    table: _Block | None


class _Stream:
    """A stream, and the device memory for the tables of its kernels."""

    def __init__(self, index: int, compiled: bool) -> None:
        self._index = index
        self._compiled = compiled
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._table: _Block | None = None
        self._kept: list[Any] = []  # what the work that is queued needs, apart from what it copies

    def wait(self, event: _TorchEvent) -> None:
        _use(self._index)
        self._stream.wait_event(event)

    def copy(self, into: int, source: int, nbytes: int) -> None:
        _use(self._index)
        runtime.memcpyAsync(into, source, nbytes, runtime.memcpyDefault, self._stream.ptr)

    def zero(self, address: int, nbytes: int) -> None:
        _use(self._index)
        runtime.memsetAsync(address, 0, nbytes, self._stream.ptr)

    def prepare(self, rows: Table) -> _Rows:
        if not self._compiled or not len(rows):
            return _Rows(joined(rows), None)
        _use(self._index)
        try:
            pinned = cupy.cuda.alloc_pinned_memory(rows.nbytes)
            table = self._table_of(rows.nbytes)
        except (MemoryError, runtime.CUDARuntimeError) as error:
            text = "device %d: no memory for a table of %d bytes (%s); copying one by one, slower"
            write(logging.DEBUG, "no_table", text, self._index, rows.nbytes, error)
            return _Rows(joined(rows), None)
        self.keep(pinned)
        np.frombuffer(pinned, np.uint64, rows.size)[:] = rows.ravel()
        runtime.memcpyAsync(table.address, pinned.ptr, rows.nbytes, runtime.memcpyHostToDevice, self._stream.ptr)
        return _Rows(rows, table)

    def move(self, prepared: _Rows) -> None:
        rows, table = prepared
        if table is None:
            for into, source, nbytes in rows.tolist():
                self.copy(into, source, nbytes)
            return
        _use(self._index)
        with self._stream:
            _move((len(rows),), (_THREADS,), (np.uint64(table.address),))

    def keep(self, memory: Any) -> None:
        self._kept.append(memory)

    def record(self, *, timed: bool = False) -> _Event:
        _use(self._index)
        kept, self._kept = self._kept, []
        return _Event(self._index, self._stream, timed, kept)

    def synchronize(self) -> None:
        _use(self._index)
        self._stream.synchronize()
        self._kept = []

    def _table_of(self, nbytes: int) -> _Block:
        if self._table is None or self._table.nbytes < nbytes:
            table = _Block(self._index, max(1 << (nbytes - 1).bit_length(), _SMALLEST_TABLE))
            self.wait(table.ready)
            if self._table is not None:
                self.keep(self._table)
            self._table = table
        return self._table
