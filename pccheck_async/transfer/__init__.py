# SPDX-License-Identifier: Apache-2.0
"""Moving bytes: staging buffers, the plan of chunks, copies to and from devices, and I/O operations.

Two subpackages are imported separately: ``operations/`` (write, read, flush, copy, checksum: in C or in Python) and
``copying/`` (live state to buffers and back: host or CUDA). So is ``transfer.plan``: it imports torch, which this
module and ``pccheck watch`` do not need. This package may import state, format, telemetry and errors.
"""

from pccheck_async.transfer.forks import ForkLock, abandoned_in_child
from pccheck_async.transfer.machine import (
    available_cores,
    available_descriptors,
    available_memory,
    share_of_cores,
    share_of_machine,
)
from pccheck_async.transfer.memory import PAGE_BYTES, address_of, aligned_buffer, contiguous_buffer, map_memory
from pccheck_async.transfer.pool import BufferLease, BufferPool
from pccheck_async.transfer.uninterrupted import Tasks, uninterrupted

__all__ = [
    "PAGE_BYTES",
    "BufferLease",
    "BufferPool",
    "ForkLock",
    "Tasks",
    "abandoned_in_child",
    "address_of",
    "aligned_buffer",
    "available_cores",
    "available_descriptors",
    "available_memory",
    "contiguous_buffer",
    "map_memory",
    "share_of_cores",
    "share_of_machine",
    "uninterrupted",
]  # fmt: skip
