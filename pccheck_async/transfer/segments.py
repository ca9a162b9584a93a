"""What one chunk is copied from or to: tables of addresses, for the host and for each device, and packed pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pccheck_async.state import PackedSource

__all__ = ["PackedPiece", "Segments", "Table"]

Table: TypeAlias = npt.NDArray[np.uint64]
"""Rows of (address, offset in the chunk's buffer, length)."""

PackedPiece: TypeAlias = tuple[PackedSource, int, int, int]
"""Source, first byte of it, the one after the last, and where in the chunk's buffer they go."""


class Segments(NamedTuple):
    """The segments of one chunk; false where there are none.

    Attributes:
        host: Those in host memory, packed as :meth:`Operations.gather` (in growing order of offset, not overlapping) or
            :meth:`Operations.scatter` wants them.
        devices: Those in the memory of CUDA devices, by the device's index; ordered as those of the host.
        packed: What cannot be copied by address.
    """

    host: bytes = b""
    devices: Mapping[int, Table] = MappingProxyType({})
    packed: Sequence[PackedPiece] = ()

    def __bool__(self) -> bool:
        return bool(self.host or self.devices or self.packed)
