# SPDX-License-Identifier: Apache-2.0
"""Storage of bytes: one protocol (:class:`Medium`), and one module for each medium.

It may import transfer and lower layers. It reads no records and decides nothing about durability. It alone owns
file descriptors and locks, and is the one seam at which faults are injected (:mod:`pccheck_async.testing`).
``medium.files`` and ``medium.open_medium`` are imported by their names: they import torch, which
commands such as ``pccheck watch`` do not need.
"""

from pccheck_async.medium.base import (
    LOCK_POLL_SECONDS,
    MOST_SMALL_BYTES,
    File,
    Medium,
    MediumFacts,
    MediumStatistics,
    Part,
    Piece,
    StepwiseMedium,
    read_around,
)
from pccheck_async.medium.lifetime import call_to_close, forget, holder_here, remember

__all__ = [
    "LOCK_POLL_SECONDS", "MOST_SMALL_BYTES", "File", "Medium", "MediumFacts", "MediumStatistics", "Part", "Piece",
    "StepwiseMedium", "call_to_close", "forget", "holder_here", "read_around", "remember",
]  # fmt: skip
