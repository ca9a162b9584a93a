"""A copy of parts of a state, to compare with what was captured of them later."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pccheck_async.errors import TornCaptureError
from pccheck_async.state.sources import HOST, PackedSource, Sources, device_bytes

if TYPE_CHECKING:
    from pccheck_async.transfer.plan import Part

__all__ = ["Reference"]


class Reference:
    """The bytes of some sources, copied when this is made: as much host memory again, and the time of the copy.

    Args:
        sources: What is captured.
        wanted: Which of them to copy.
        paths: How the leaf of a source is called.
    """

    def __init__(self, sources: Sources, wanted: npt.NDArray[np.bool_], paths: Mapping[int, str]) -> None:
        self._paths = paths
        self._bytes = {int(number): _copy(sources, int(number)) for number in np.flatnonzero(wanted)}

    def compare(self, parts: Iterable[Part], captured: memoryview) -> None:
        """Raise TornCaptureError where ``captured`` differs; names the leaf."""
        for part in parts:
            then = self._bytes.get(part.source)
            if then is None:
                continue
            now = np.frombuffer(captured, np.uint8, part.length, part.buffer_offset)
            if not np.array_equal(then[part.source_offset : part.source_offset + part.length], now):
                path = self._paths.get(part.source, "a tensor")
                raise TornCaptureError(
                    f"{path} changed while it was captured; nothing of that checkpoint is committed. Call "
                    "engine.wait_captured() before code that changes it, or checkpoint with overlap=False",
                    paths=[path],
                )


def _copy(sources: Sources, number: int) -> npt.NDArray[np.uint8]:
    source = sources[number]
    copy: Any = np.empty(source.nbytes, np.uint8)
    if isinstance(source, PackedSource):
        source.copy(0, source.nbytes, memoryview(copy))
    elif source.device == HOST:
        ctypes.memmove(copy.ctypes.data, source.address, source.nbytes)
    else:
        copy = device_bytes(*source).cpu().numpy()
    found: npt.NDArray[np.uint8] = copy
    return found
