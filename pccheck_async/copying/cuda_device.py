"""A CUDA device: memory, events and the trainer's streams by torch, the rest by the driver's own functions."""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from pccheck_async.copying.devices import Block
from pccheck_async.copying.kernel import Kernel, compiled
from pccheck_async.copying.lanes import Memory
from pccheck_async.copying.snapshot import DeviceMemory
from pccheck_async.copying.tables import joined
from pccheck_async.logs import write
from pccheck_async.segments import Table

__all__ = ["CudaDevice"]

_THREADS: Final = 256
"""Of one block of the kernel."""
_SMALLEST_TABLE: Final = 64 << 10
_NON_BLOCKING: Final = 1
"""CU_STREAM_NON_BLOCKING: does not wait for the default stream."""
_PORTABLE: Final = 1
"""CU_MEMHOSTREGISTER_PORTABLE: locked for every device."""
_RELAXED: Final = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""

_FUNCTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemsetD8Async": (c_uint64, c_ubyte, c_size_t, c_void_p),
    "cuLaunchKernel": (c_void_p, *7 * (c_uint,), c_void_p, POINTER(c_void_p), c_void_p),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}
"""Arguments of the driver's functions; all return an error code."""


class CudaDevice:
    """One CUDA device (see :class:`pccheck_async.copying.devices.Device`). Making one touches no device.

    All but :meth:`current` and :meth:`hold_up` is called on threads of the engine only: there the current device is set
    and left so. Setting it back would make a context on device 0, which costs memory there in every process of a
    machine.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._kernel: Kernel | None = None
        self._compiled = False

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
        _use(self.index)
        if not self._compiled:
            self._kernel = compiled()
            self._compiled = True
        return _Stream(self.index, self._kernel)

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
            _call("cuMemHostRegister_v2", address, nbytes, _PORTABLE)
        except RuntimeError as error:
            raise OSError(str(error)) from error

    def unregister(self, address: int) -> None:
        """Unlock host memory. Raises OSError."""
        try:
            _use(self.index)
            _call("cuMemHostUnregister", address)
        except RuntimeError as error:
            raise OSError(str(error)) from error


_thread = threading.local()
_contexts: dict[int, c_void_p] = {}
_idle: dict[int, list[int]] = {}
"""Streams of engines that were closed, for the next ones. None is ever destroyed: torch's allocator keeps memory for
each, and waits for the stream before it gives that back to the driver."""


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _FUNCTIONS.items():
        getattr(driver, name).argtypes = arguments
    return driver


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver, without the GIL. Raises RuntimeError."""
    if error := getattr(_driver(), name)(*arguments):
        text = c_char_p()
        _driver().cuGetErrorString(error, byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'').decode() or f'error {error}'}")


def _use(index: int) -> None:
    """Make a device the current one of the calling thread, which is the engine's.

    While a thread records a CUDA graph, which training may do at any time, others must not register memory or allocate
    any: that fails, and the recording with it. Those that record nothing themselves may say so, and then they may.
    """
    torch.cuda.set_device(index)
    if index not in _contexts:
        device, context = c_int(), c_void_p()
        _call("cuDeviceGet", byref(device), index)
        _call("cuDevicePrimaryCtxRetain", byref(context), device)  # torch's, too
        _contexts[index] = context
    _call("cuCtxSetCurrent", _contexts[index])  # torch sets none where the device is the one that a thread begins with
    if not getattr(_thread, "relaxed", False):
        _thread.relaxed = True
        _call("cuThreadExchangeStreamCaptureMode", byref(c_int(_RELAXED)))


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

    def __init__(self, stream: torch.cuda.Stream, nbytes: int) -> None:
        try:
            # For this stream: memory for the default one comes after whatever training has queued there by now.
            with torch.cuda.stream(stream):
                self._tensor = torch.empty(nbytes, dtype=torch.uint8, device=stream.device)
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

    def __init__(self, index: int, kernel: Kernel | None) -> None:
        self._index = index
        self._kernel = kernel
        self._handle = _stream(index)
        self._stream = torch.cuda.ExternalStream(self._handle, device=index)  # type: ignore[no-untyped-call]
        self._table: Block | None = None
        self._memory = Memory()
        self._kept: list[Any] = []  # what the work that is queued needs, apart from what it copies
        weakref.finalize(self, _idle[index].append, self._handle).atexit = False

    def wait(self, event: _Event) -> None:
        _use(self._index)
        self._stream.wait_event(event.event)

    def allocate(self, nbytes: int) -> _Block:
        _use(self._index)
        return _Block(self._stream, nbytes)

    def copy(self, into: int, source: int, nbytes: int) -> None:
        _use(self._index)
        _call("cuMemcpyAsync", into, source, nbytes, self._handle)

    def zero(self, address: int, nbytes: int) -> None:
        _use(self._index)
        _call("cuMemsetD8Async", address, 0, nbytes, self._handle)

    def prepare(self, rows: Table) -> _Rows:
        if self._kernel is None or not len(rows):
            return _Rows(joined(rows), None)
        _use(self._index)
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
        self.copy(table.address, pinned.data_ptr(), rows.nbytes)
        return _Rows(rows, table)

    def move(self, prepared: _Rows) -> None:
        rows, table = prepared
        _use(self._index)
        if table is not None:
            assert self._kernel is not None
            address = c_uint64(table.address)
            arguments = (c_void_p * 1)(ctypes.addressof(address))
            grid, block = (len(rows), 1, 1), (_THREADS, 1, 1)
            _call("cuLaunchKernel", self._kernel.ptr, *grid, *block, 0, self._handle, arguments, None)
            return
        for into, source, nbytes in rows.tolist():
            _call("cuMemcpyAsync", into, source, nbytes, self._handle)

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

    def _table_of(self, nbytes: int) -> Block:
        if self._table is None or self._table.nbytes < nbytes:
            table = self._memory.allocate(self, max(1 << (nbytes - 1).bit_length(), _SMALLEST_TABLE))
            if self._table is not None:
                self.keep(self._table)
            self._table = table
        return self._table


def _stream(index: int) -> int:
    """Return a stream that nobody else has; torch hands its own out in turn, and one may be recorded as a graph."""
    idle = _idle.setdefault(index, [])
    if idle:
        return idle.pop()
    stream = c_void_p()
    _call("cuStreamCreate", byref(stream), _NON_BLOCKING)
    assert stream.value is not None
    return stream.value
