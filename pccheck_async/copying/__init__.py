"""Copy backends: how bytes get from the live state into staging buffers, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pccheck_async.copying.base import CopyBackend, CopyStatistics
from pccheck_async.copying.cuda import CudaCopy
from pccheck_async.copying.devices import Device
from pccheck_async.copying.fence import Fence, Fenced
from pccheck_async.copying.host import HostCopy
from pccheck_async.copying.snapshot import DeviceMode
from pccheck_async.operations.base import Operations

__all__ = [
    "CopyBackend",
    "CopyStatistics",
    "CudaCopy",
    "DeviceMode",
    "Fence",
    "Fenced",
    "HostCopy",
    "make_backend",
]


def make_backend(operations: Operations, mode: DeviceMode) -> CopyBackend:
    """Make the backend for this build of torch. Called on the engine's loop; imports no CuPy and touches no device."""
    return HostCopy(operations) if torch.version.cuda is None else CudaCopy(operations, _load_cupy, mode)


def _load_cupy() -> Callable[[int], Device]:
    from pccheck_async.copying.cupy_device import CupyDevice

    return CupyDevice
