"""The one kernel: it copies many pieces of device memory at once. CuPy compiles it, and nothing else needs CuPy."""

from __future__ import annotations

import ctypes
import logging
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from pccheck_async.logs import write

__all__ = ["MOVE_SOURCE", "Kernel", "compiled", "load"]

MOVE_SOURCE: Final = r"""
/* Block b copies row b of (destination, source, length): 16 bytes per thread and turn where both are aligned alike. */
extern "C" __global__ void pccheck_move(const unsigned long long *table)
{
    const unsigned long long *row = table + 3 * (unsigned long long)blockIdx.x;
    char *into = (char *)row[0];
    const char *from = (const char *)row[1];
    const unsigned long long length = row[2];
    unsigned long long head = length, wide = 0;

    if (((row[0] ^ row[1]) & 15) == 0) {
        head = (16 - (row[0] & 15)) & 15;
        if (head > length)
            head = length;
        wide = (length - head) / 16;
    }
    for (unsigned long long i = threadIdx.x; i < head; i += blockDim.x)
        into[i] = from[i];

    const uint4 *__restrict__ source = (const uint4 *)(from + head);
    uint4 *__restrict__ target = (uint4 *)(into + head);
#pragma unroll 4
    for (unsigned long long i = threadIdx.x; i < wide; i += blockDim.x)
        target[i] = source[i];

    for (unsigned long long i = head + 16 * wide + threadIdx.x; i < length; i += blockDim.x)
        into[i] = from[i];
}
"""


@cache
def load() -> Any:
    """Import CuPy and return it; None where that fails. Takes hundreds of milliseconds, and touches no device."""
    try:
        import cupy
    except Exception as error:  # noqa: BLE001 - built for another NumPy or driver, it says so in many ways
        _warn(f"CuPy cannot be used: {error}; install pccheck-async[cuda12] or pccheck-async[cuda13]")
        return None
    # CuPy before 14 does not look for the compiler that comes with torch from PyPI, but takes it once it is loaded.
    for library in Path(torch.__file__).parents[1].glob("nvidia/*/lib/libnvrtc.so.*"):
        with suppress(OSError):
            ctypes.CDLL(str(library))
    return cupy


class Kernel(Protocol):
    """The kernel on one device; it stays there for as long as this is held.

    Attributes:
        ptr: What the driver knows it by.
    """

    ptr: int


def compiled() -> Kernel | None:
    """Compile the kernel for the current device; None where that cannot be done (CuPy or NVRTC is missing)."""
    cupy = load()
    if cupy is None:
        return None
    try:
        move = cupy.RawKernel(MOVE_SOURCE, "pccheck_move")
        try:
            found: Kernel = move.kernel
        except OSError:  # there is no home, or it is read-only
            os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
            found = move.kernel
    except Exception as error:  # noqa: BLE001 - whatever the compiler says, copying goes on without it
        _warn(str(error))
        return None
    return found


def _warn(why: str) -> None:
    text = "there is no copy kernel (%s): many small tensors of CUDA devices are copied one by one, slower"
    write(logging.WARNING, "no_kernel", text, why)
