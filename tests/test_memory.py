"""Memory that forked children do not get."""

from __future__ import annotations

import ctypes
import gc
import mmap
from pathlib import Path

from pccheck_async.memory import PAGE_BYTES, address_of, map_memory
from tests.processes import passes_in_a_forked_child

_MAP_FIXED_NOREPLACE = 0x100000


def is_mapped(address: int) -> bool:
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def map_at(address: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    assert libc.mmap(address, PAGE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address


def test_a_forked_child_unmaps_nothing_of_its_own_in_its_place() -> None:
    memory = [map_memory(PAGE_BYTES)]
    address = address_of(memoryview(memory[0]))

    def in_the_child() -> None:
        assert not is_mapped(address)
        map_at(address)  # as it may be given to anything
        memory.clear()
        gc.collect()
        assert is_mapped(address)

    assert is_mapped(address)
    assert passes_in_a_forked_child(in_the_child)
    memory.clear()
    gc.collect()
    assert not is_mapped(address)
