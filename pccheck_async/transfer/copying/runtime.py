"""What a device needs of the CUDA runtime: CuPy's functions, or torch's where CuPy is missing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Literal, Protocol

import numpy as np
import torch

__all__ = ["PORTABLE", "Gather", "Runtime", "Side", "TorchRuntime", "relax"]

PORTABLE: Final = 1
"""cudaHostRegisterPortable: locked for every device."""

Side = Literal["into", "source"]
"""Which end of a copy is on the host."""

Gather = Callable[[torch.cuda.Stream, int, int], None]
"""Copies rows of (destination, source, length) within a device; takes their address there, and how many they are."""


class Runtime(Protocol):
    """The functions; all raise RuntimeError. Where they take a stream, it and its device are torch's current ones."""

    def use(self, index: int) -> None:
        """Make a device the current one of the calling thread."""
        ...

    def stream(self, index: int) -> torch.cuda.Stream:
        """Make a stream of the current device, which is ``index``; it waits for no default stream, and is kept."""
        ...

    def kernel(self, index: int) -> Gather | None:
        """Return a kernel for the current device, which is ``index``, or None where there is none."""
        ...

    def copy(self, stream: torch.cuda.Stream, into: int, source: int, nbytes: int, host: Side | None = None) -> None:
        """Copy within the device, or from or to the host, and wait only where host memory was not registered."""
        ...

    def zero(self, stream: torch.cuda.Stream, address: int, nbytes: int) -> None:
        """Zero device memory."""
        ...

    def register(self, address: int, nbytes: int) -> None:
        """Lock host memory for every device."""
        ...

    def unregister(self, address: int) -> None:
        """Undo :meth:`register`."""
        ...


def relax() -> None:
    """Let the calling thread, which records no CUDA graph, register and allocate memory while others record one.

    Neither CuPy nor torch can say that; NVIDIA's bindings can, which torch for CUDA brings from 2.11 on.
    """
    with suppress(ImportError, RuntimeError):  # it is not there, or does not find the driver's function
        from cuda.bindings import driver

        driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)


class TorchRuntime:
    """Torch's streams and copies (see :class:`Runtime`)."""

    def use(self, index: int) -> None:
        torch.cuda.set_device(index)

    def stream(self, index: int) -> torch.cuda.Stream:
        """Take the next one of torch's pool.

        That has 32 for each device and hands them out in turn, again and again: training may hold the same one. What is
        queued there and here then waits for each other, which is right, but slower.
        """
        return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]

    def kernel(self, index: int) -> None:
        return None

    def copy(self, stream: torch.cuda.Stream, into: int, source: int, nbytes: int, host: Side | None = None) -> None:
        """Copy by the driver's function: torch leaves it to that whether memory was registered, and to wait if not."""
        target = _on_host(into, nbytes) if host == "into" else _on_device(into, nbytes, stream.device)
        origin = _on_host(source, nbytes) if host == "source" else _on_device(source, nbytes, stream.device)
        target.copy_(origin, non_blocking=True)

    def zero(self, stream: torch.cuda.Stream, address: int, nbytes: int) -> None:
        _on_device(address, nbytes, stream.device).zero_()

    def register(self, address: int, nbytes: int) -> None:
        _call("cudaHostRegister", address, nbytes, PORTABLE)

    def unregister(self, address: int) -> None:
        _call("cudaHostUnregister", address)


def _call(function: str, *arguments: int) -> None:
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = getattr(cudart, function)(*arguments)
    if int(error):
        raise RuntimeError(f"{function}: {cudart.cudaGetErrorString(error)}")


class _Bytes:
    """Memory by address, in the form that NumPy reads, and torch for memory of devices."""

    def __init__(self, interface: str, address: int, nbytes: int) -> None:
        setattr(self, interface, {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3})


def _on_host(address: int, nbytes: int) -> torch.Tensor:
    return torch.from_numpy(np.asarray(_Bytes("__array_interface__", address, nbytes)))


def _on_device(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    tensor = torch.as_tensor(_Bytes("__cuda_array_interface__", address, nbytes), device=device)
    if tensor.data_ptr() != address:
        raise RuntimeError(f"memory of {device} at {address:#x} was copied where it was to be referred to")
    return tensor
