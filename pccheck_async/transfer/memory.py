# SPDX-License-Identifier: Apache-2.0
"""Page-aligned memory that forked children do not inherit."""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress

import numpy as np

from pccheck_async.transfer.forks import abandoned_in_child

__all__ = ["PAGE_BYTES", "address_of", "aligned_buffer", "contiguous_buffer", "map_memory"]

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_ADVICE = (
    "MADV_DONTFORK",  # a child neither copies staging memory nor shares it while a device reads it
    "MADV_DONTDUMP",  # a core dump does not carry gigabytes of weights
    "MADV_HUGEPAGE",  # first touch faults once per 2 MiB, not once per 4 KiB
)
MOST_HUGE_BYTES = 8 << 20
"""Largest size of huge pages that are used: with pages of 64 KiB a huge page has 512 MiB, much more than a chunk."""


class _Memory(mmap.mmap):
    def abandon(self) -> None:
        # The child has the object without its memory: destroying it would unmap any later mapping there.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))


def map_memory(nbytes: int) -> mmap.mmap:
    """Map ``nbytes`` (rounded up to pages) of zeroed private memory. Physical pages are allocated on first use."""
    size = max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = _Memory(-1, size, flags=flags)
    for advice in _ADVICE:
        value = getattr(mmap, advice, None)
        if value is not None and (advice != "MADV_HUGEPAGE" or _huge_page_bytes() <= MOST_HUGE_BYTES):
            with suppress(OSError):  # advice only: a kernel built without it still works
                memory.madvise(value)
    abandoned_in_child.add(memory)
    return memory


def aligned_buffer(nbytes: int) -> memoryview:
    """Return a page-aligned buffer of ``nbytes`` zeros; the memory is unmapped with the last view of it."""
    return memoryview(map_memory(nbytes))[:nbytes]


def contiguous_buffer(nbytes: int) -> memoryview:
    """Return a page-aligned buffer inside one huge page if possible, so that a device transfers it in one piece.

    A transfer from separate pages takes some microseconds longer. Once touched, the buffer occupies the whole huge
    page.
    """
    huge_bytes = _huge_page_bytes()
    if not nbytes <= huge_bytes <= MOST_HUGE_BYTES:
        return aligned_buffer(nbytes)
    view = aligned_buffer(2 * huge_bytes)
    start = -address_of(view) % huge_bytes
    return view[start : start + nbytes]


def address_of(buffer: memoryview) -> int:
    """Return the address of a buffer that is not empty."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def _huge_page_bytes() -> int:
    return PAGE_BYTES * PAGE_BYTES // 8  # mapped by one page of 8-byte table entries
