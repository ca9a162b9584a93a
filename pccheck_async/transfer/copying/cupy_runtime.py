# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime with CuPy's functions. No other module imports CuPy."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import cupy
import numpy as np
import torch
from cupy.cuda import runtime

from pccheck_async.telemetry import write
from pccheck_async.transfer.copying.runtime import MOVE_SOURCE, PORTABLE, Gather, Side, TorchRuntime

__all__ = ["CupyRuntime"]

_THREADS: Final = 256
"""Number of threads in one block of the kernel."""

try:
    runtime.getDeviceCount()
except runtime.CUDARuntimeError as error:  # importing CuPy proves nothing: it has a runtime of its own
    raise ImportError(f"this CuPy does not work with this driver: {error}") from error

_move = cupy.RawKernel(MOVE_SOURCE, "pccheck_move")


class CupyRuntime(TorchRuntime):
    """CuPy's streams and copies."""

    def __init__(self) -> None:
        self._streams: dict[int, Any] = {}  # by handle; CuPy destroys a stream with its last reference

    def use(self, index: int) -> None:
        super().use(index)
        runtime.setDevice(index)  # torch and CuPy each have a runtime of their own

    def stream(self, index: int) -> torch.cuda.Stream:
        own = cupy.cuda.Stream(non_blocking=True)
        self._streams[own.ptr] = own
        return torch.cuda.ExternalStream(own.ptr, device=index)  # type: ignore[no-untyped-call]

    def kernel(self, index: int) -> Gather | None:
        return self._gather if _compiled(index) else None

    def _gather(self, stream: torch.cuda.Stream, table: int, count: int) -> None:
        with self._streams[stream.cuda_stream]:
            _move((count,), (_THREADS,), (np.uint64(table),))

    def copy(self, stream: torch.cuda.Stream, into: int, source: int, nbytes: int, host: Side | None = None) -> None:
        kind = runtime.memcpyDefault  # the driver finds out where each address lies
        runtime.memcpyAsync(into, source, nbytes, kind, stream.cuda_stream)

    def zero(self, stream: torch.cuda.Stream, address: int, nbytes: int) -> None:
        runtime.memsetAsync(address, 0, nbytes, stream.cuda_stream)

    def register(self, address: int, nbytes: int) -> None:
        runtime.hostRegister(address, nbytes, PORTABLE)

    def unregister(self, address: int) -> None:
        runtime.hostUnregister(address)


@cache
def _compiled(index: int) -> bool:
    """Compile the kernel for the current device, ``index``; return whether that succeeded (it needs NVRTC)."""
    # CuPy before 14 does not search for the compiler that torch from PyPI depends on, but uses it once it is loaded.
    for library in Path(torch.__file__).parents[1].glob("nvidia/*/lib/libnvrtc.so.*"):
        with suppress(OSError):
            ctypes.CDLL(str(library))
    try:
        try:
            _ = _move.num_regs  # compiles for this device; compile() would drop the other devices' code
        except OSError:  # no home directory, or a read-only one
            os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
            _ = _move.num_regs
    except Exception as error:  # noqa: BLE001 - copying works without the kernel, after any error of the compiler
        text = "device %d: the copy kernel cannot be compiled (%s); many small tensors are copied one by one, slower"
        write("no_kernel", text, index, str(error))  # its traceback would keep the stream
        return False
    return True
