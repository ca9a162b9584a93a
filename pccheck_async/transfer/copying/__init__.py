# SPDX-License-Identifier: Apache-2.0
"""Copy backends: from live state memory, on the host or on CUDA devices, into staging buffers, and back.

:func:`make_backend` returns the backend for this machine. Only ``cupy_runtime.py`` imports CuPy. This package may
import state's descriptions of memory, the log, and the rest of ``transfer``.
"""

from __future__ import annotations

import torch

from pccheck_async.transfer.copying.base import CopyBackend, CopyStatistics
from pccheck_async.transfer.copying.cuda import CudaCopy
from pccheck_async.transfer.copying.cuda_device import CudaDevice, load
from pccheck_async.transfer.copying.devices import Fence, Fenced
from pccheck_async.transfer.copying.snapshot import DeviceMode
from pccheck_async.transfer.operations.base import Operations

__all__ = ["CopyBackend", "CopyStatistics", "CudaCopy", "DeviceMode", "Fence", "Fenced", "make_backend"]


def make_backend(operations: Operations, mode: DeviceMode) -> CopyBackend:
    """Return the backend for this machine and build of torch. Called on the engine's loop; touches no device."""
    if torch.version.cuda is None:
        return CopyBackend(operations)
    if not torch.cuda.device_count():  # a query of NVML: children forked later may still use CUDA
        return CopyBackend(operations, "there is no CUDA device")
    # Importing CuPy may initialise CUDA, after which forked children cannot use it: not before the trainer did.
    prepare = load if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return CudaCopy(operations, CudaDevice, mode, prepare)
