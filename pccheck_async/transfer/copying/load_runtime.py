"""Which CUDA runtime there is: CuPy's, or torch's where CuPy is missing."""

from __future__ import annotations

import logging
import threading
from functools import cache

from pccheck_async.telemetry.logs import write
from pccheck_async.transfer.copying.runtime import Runtime, TorchRuntime, relax

__all__ = ["load"]

_loading = threading.Lock()


def load() -> Runtime:
    """Import CuPy, or do without it, once. Takes up to seconds; creates nothing on a device."""
    with _loading:
        return _load()


@cache
def _load() -> Runtime:
    relax()
    try:
        from pccheck_async.transfer.copying.cupy_runtime import CupyRuntime
    except Exception as error:  # noqa: BLE001 - built for another NumPy or driver, it says so in many ways
        text = (
            "CuPy is missing: torch's streams copy; slower for many small tensors (%s; install "
            "pccheck-async[cuda12] or pccheck-async[cuda13])"
        )
        write(logging.WARNING, "no_cupy", text, error)
        return TorchRuntime()
    return CupyRuntime()
