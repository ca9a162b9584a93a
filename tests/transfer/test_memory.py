"""Memory that forked children do not get."""

from __future__ import annotations

import ctypes
import gc
import mmap
from pathlib import Path

import pytest

from pccheck_async.transfer import PAGE_BYTES, address_of, contiguous_buffer, map_memory, memory
from tests.support.processes import passes_in_a_forked_child

_MAP_FIXED_NOREPLACE = 0x100000
HUGE = PAGE_BYTES * PAGE_BYTES // 8


def is_mapped(address: int) -> bool:
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def map_at(address: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    assert libc.mmap(address, PAGE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address


@pytest.mark.slow
def test_a_forked_child_unmaps_nothing_of_its_own_in_its_place() -> None:
    mapped = [map_memory(PAGE_BYTES)]
    address = address_of(memoryview(mapped[0]))

    def in_the_child() -> None:
        assert not is_mapped(address)
        map_at(address)  # as it may be given to anything
        mapped.clear()
        gc.collect()
        assert is_mapped(address)

    assert is_mapped(address)
    assert passes_in_a_forked_child(in_the_child)
    mapped.clear()
    gc.collect()
    assert not is_mapped(address)


@pytest.mark.parametrize("nbytes", [1, PAGE_BYTES, 5 * PAGE_BYTES, HUGE, HUGE + 1])
def test_a_contiguous_buffer_lies_inside_one_huge_page_where_it_fits(nbytes: int) -> None:
    for _ in range(3):
        buffer = contiguous_buffer(nbytes)
        assert len(buffer) == nbytes
        assert not any(buffer)
        buffer[-1:] = b"x"
        first = address_of(buffer)
        assert first % PAGE_BYTES == 0
        if nbytes <= HUGE <= memory.MOST_HUGE_BYTES:
            assert first // HUGE == (first + nbytes - 1) // HUGE


def test_a_contiguous_buffer_is_small_where_huge_pages_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_HUGE_BYTES", HUGE - 1)
    assert memoryview(contiguous_buffer(PAGE_BYTES).obj).nbytes == PAGE_BYTES
