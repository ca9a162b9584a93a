# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime functions that devices need, by torch (``cupy_runtime.py``: by CuPy), and the kernel's source."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Literal

import numpy as np
import torch

__all__ = ["MOVE_SOURCE", "PORTABLE", "Gather", "Side", "TorchRuntime", "relax"]

PORTABLE: Final = 1
"""cudaHostRegisterPortable: host memory is page-locked for every device."""

Side = Literal["into", "source"]
"""The end of a copy that is on the host."""

Gather = Callable[[torch.cuda.Stream, int, int], None]
"""Copies rows of (destination, source, length) within a device: (stream, device address of the rows, their number)."""

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
"""Source of the only kernel, which copies many pieces of device memory at once."""


def relax() -> None:
    """Allow the calling thread to register and allocate memory while another one records a CUDA graph.

    The calling thread must not record a graph itself. Does nothing without NVIDIA's Python bindings, which torch for
    CUDA requires from 2.11 on.
    """
    with suppress(ImportError, RuntimeError):  # not installed, or without that function of the driver
        from cuda.bindings import driver

        driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)


class TorchRuntime:
    """Torch's streams and copies.

    All methods raise RuntimeError for an error of CUDA. A stream that is passed must be torch's current stream, and its
    device the current device.
    """

    def use(self, index: int) -> None:
        """Make a device the current one of the calling thread."""
        torch.cuda.set_device(index)

    def stream(self, index: int) -> torch.cuda.Stream:
        """Create a stream of the current device, ``index``, that does not wait for the default stream.

        Torch's pool has 32 streams per device and returns them in turn: training may get the same one. Training's work
        and the copies then wait for each other, which is correct, but slower.
        """
        return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]

    def kernel(self, index: int) -> Gather | None:
        """Return the kernel for the current device, ``index``; None if this runtime has none."""
        return None

    def copy(self, stream: torch.cuda.Stream, into: int, source: int, nbytes: int, host: Side | None = None) -> None:
        """Queue a copy within the device, or from or to the host; block only if the host memory is not registered.

        The driver itself finds out whether it is registered.
        """
        target = _on_host(into, nbytes) if host == "into" else _on_device(into, nbytes, stream.device)
        origin = _on_host(source, nbytes) if host == "source" else _on_device(source, nbytes, stream.device)
        target.copy_(origin, non_blocking=True)

    def zero(self, stream: torch.cuda.Stream, address: int, nbytes: int) -> None:
        """Queue zeroing device memory."""
        _on_device(address, nbytes, stream.device).zero_()

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock host memory for every device."""
        _call("cudaHostRegister", address, nbytes, PORTABLE)

    def unregister(self, address: int) -> None:
        """Unlock host memory that was given to :meth:`register`."""
        _call("cudaHostUnregister", address)


def _call(function: str, *arguments: int) -> None:
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = getattr(cudart, function)(*arguments)
    if int(error):
        raise RuntimeError(f"{function}: {cudart.cudaGetErrorString(error)}")


class _Bytes:
    """Memory at an address, with the interface through which NumPy (host) or torch (devices) makes a view of it."""

    def __init__(self, interface: str, address: int, nbytes: int) -> None:
        setattr(self, interface, {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3})


def _on_host(address: int, nbytes: int) -> torch.Tensor:
    return torch.from_numpy(np.asarray(_Bytes("__array_interface__", address, nbytes)))


def _on_device(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    tensor = torch.as_tensor(_Bytes("__cuda_array_interface__", address, nbytes), device=device)
    if tensor.data_ptr() != address:
        raise RuntimeError(f"memory of {device} at {address:#x} was copied where it was to be referred to")
    return tensor
