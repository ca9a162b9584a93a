"""Copy backends: how bytes get from the live state into staging buffers, and back."""

from __future__ import annotations

import torch

from pccheck_async.transfer.copying.base import CopyBackend, CopyStatistics
from pccheck_async.transfer.copying.cuda import CudaCopy
from pccheck_async.transfer.copying.cuda_device import CudaDevice
from pccheck_async.transfer.copying.fence import Fence, Fenced
from pccheck_async.transfer.copying.host import HostCopy
from pccheck_async.transfer.copying.load_runtime import load
from pccheck_async.transfer.copying.snapshot import DeviceMode
from pccheck_async.transfer.operations.base import Operations

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
    """Make the backend for this machine and build of torch. Called on the engine's loop; touches no device."""
    if torch.version.cuda is None:
        return HostCopy(operations)
    if not torch.cuda.device_count():  # asks NVML: children that are forked later may still use CUDA
        return HostCopy(operations, "there is no CUDA device")
    # Importing CuPy may initialise CUDA. Where nobody did, children that are forked may still use it: then not yet.
    prepare = load if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return CudaCopy(operations, CudaDevice, mode, prepare)
