from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pccheck_async.format.manifest import TensorEntry
from pccheck_async.state import Layout, PackedSource, Sources, Target, Targets, cached_layout, flatten
from pccheck_async.state.leaves import RawSource
from pccheck_async.transfer.plan import Planner, Segments, scatter_runs, segments
from tests.support.round_trip import parts

MIB = 1 << 20


def layout(*sizes: int) -> Layout:
    extents = np.array([(number, 0, nbytes) for number, nbytes in enumerate(sizes)], np.int64).reshape(-1, 3)
    entries = tuple(TensorEntry(n, "uint8", (size,), (1,), 0, "tensor", False) for n, size in enumerate(sizes))
    sources = Sources(RawSource(1 << 20 | n << 40, size, None) for n, size in enumerate(sizes))
    return Layout(entries, sizes, extents, sources, tuple(range(len(sizes))))


def table(data: bytes) -> list[list[int]]:
    found: list[list[int]] = np.frombuffer(data, np.uint64).reshape(-1, 3).tolist()
    return found


@pytest.mark.parametrize("block", [4096, 65536])
def test_small_storages_are_aligned_to_64_bytes_and_large_ones_to_a_block(block: int) -> None:
    plan = Planner(MIB, block).plan(layout(1, 64, 65, MIB, 3))
    assert [storage.offset for storage in plan.storages] == [0, 64, 128, block, block + MIB]
    assert plan.payload_nbytes == MIB + 2 * block
    assert [(chunk.offset, chunk.nbytes) for chunk in plan.chunks] == [(0, MIB), (MIB, 2 * block)]


def test_parts() -> None:
    plan = Planner(1024, 512).plan(layout(100, 2000, 5))
    assert parts(plan.chunks[0]) == ((0, 0, 0, 100), (1, 0, 128, 896))
    assert parts(plan.chunks[1]) == ((1, 896, 0, 1024),)
    assert parts(plan.chunks[2]) == ((1, 1920, 0, 80), (2, 0, 128, 5))
    assert plan.chunks[2].nbytes == 512
    assert plan.payload_nbytes == 2560


def test_nothing() -> None:
    plan = Planner(1024, 512).plan(layout())
    assert (plan.storages, plan.chunks, plan.payload_nbytes) == ((), (), 0)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 5000), max_size=12), st.sampled_from([512, 1024, 4096, 65536]), st.integers(1, 4))
def test_every_byte_is_in_one_part_and_in_its_place(sizes: list[int], block: int, blocks: int) -> None:
    plan = Planner(block * blocks, block).plan(layout(*sizes))
    payload: dict[int, tuple[int, int]] = {}
    end = 0
    for chunk in plan.chunks:
        assert chunk.offset == end
        assert chunk.nbytes % block == 0 < chunk.nbytes <= block * blocks
        end += chunk.nbytes
        filled = 0
        for part in parts(chunk):
            assert filled <= part.buffer_offset < part.buffer_offset + part.length <= chunk.nbytes
            filled = part.buffer_offset + part.length
            for byte in range(part.length):
                payload[chunk.offset + part.buffer_offset + byte] = (part.source, part.source_offset + byte)
    assert end == plan.payload_nbytes
    expected = {
        plan.storages[number].offset + byte: (number, byte) for number, size in enumerate(sizes) for byte in range(size)
    }
    assert payload == expected


def test_the_plan_is_kept_while_the_structure_stays() -> None:
    planner = Planner(1024, 512)
    tensors = [torch.zeros(10), torch.zeros(300)]
    layout, last = cached_layout(flatten({"t": tensors}).leaves)
    first = planner.plan(layout)
    layout, last = cached_layout(flatten({"t": [t.clone() for t in tensors]}).leaves, last)
    assert planner.plan(layout) is first
    assert (planner.hits, planner.misses) == (1, 1)
    layout, last = cached_layout(flatten({"t": [*tensors, torch.zeros(1)]}).leaves, last)
    assert planner.plan(layout) is not first
    layout.breaks = (1,)
    assert planner.plan(layout) is not first
    assert (planner.hits, planner.misses) == (1, 3)


@pytest.mark.parametrize(("chunk", "block"), [(0, 512), (1000, 512), (512, 1024), (1024, 0), (1024, 100), (-512, 512)])
def test_sizes_that_do_not_fit(chunk: int, block: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        Planner(chunk, block)


def test_segments() -> None:
    packed = PackedSource(torch.zeros(200, 2)[:, 0])
    sources = Sources([RawSource(1000, 100, None), packed, RawSource(5000, 300, None)])
    plan = Planner(512, 512).plan(layout(100, 800, 300))
    found = segments(plan.chunks[0], sources)
    assert (table(found.host), found.packed) == ([[1000, 0, 100]], [(packed, 0, 384, 128)])
    found = segments(plan.chunks[1], sources)
    assert (table(found.host), found.packed) == ([[5000, 448, 64]], [(packed, 384, 800, 0)])
    found = segments(plan.chunks[2], sources)
    assert (table(found.host), found.devices, found.packed) == ([[5064, 0, 236]], {}, [])


def test_segments_by_device() -> None:
    packed = PackedSource(torch.zeros(200, 2)[:, 0])
    sources = Sources(
        [RawSource(1000, 100, None), RawSource(1 << 40, 300, None, 1), packed, RawSource(7000, 64, None, 0)]
    )
    assert sources.devices == {0, 1}
    plan = Planner(512, 512).plan(layout(100, 300, 800, 64))
    found = segments(plan.chunks[0], sources)
    assert table(found.host) == [[1000, 0, 100]]
    assert {device: rows.tolist() for device, rows in found.devices.items()} == {1: [[1 << 40, 128, 300]]}
    assert found.packed == [(packed, 0, 64, 448)]
    found = segments(plan.chunks[2], sources)
    assert found.host == b""
    assert {device: rows.tolist() for device, rows in found.devices.items()} == {0: [[7000, 256, 64]]}
    assert found


def scattered(offset: int, targets: Targets) -> Segments:
    """Return what takes bytes of a chunk of 512 bytes that has one checksum."""
    found = [*scatter_runs(np.array([offset, offset + 512]), 512, targets)]
    assert [(chunk, units) for chunk, units, _ in found] in ([], [(0, range(1))])
    return found[0][2] if found else Segments()


def test_scatter_segments() -> None:
    known = Targets([Target(600, 100, 9000, None), Target(0, 2000, 50_000, None), Target(640, 10, 7000, None)])
    found = [table(scattered(low, known).host) for low in (0, 512, 1536)]
    assert sorted(found[1]) == [[7000, 128, 10], [9000, 88, 100], [50_512, 0, 512]]
    assert (found[0], found[2]) == ([[50_000, 0, 512]], [[51_536, 0, 464]])
    assert not scattered(2048, known)
    assert not scattered(0, Targets())
    gap = Targets([Target(0, 10, 1, None), Target(5000, 10, 1, None)])
    assert not scattered(512, gap)
    assert [target.payload_offset for target in gap] == [0, 5000]


def test_scatter_segments_by_device() -> None:
    targets = Targets([Target(0, 600, 9000, None, 1), Target(100, 50, 5000, None), Target(600, 9, 8000, None, 0)])
    assert targets.devices == {0, 1}
    found = scattered(0, targets)
    assert table(found.host) == [[5000, 100, 50]]
    assert {device: rows.tolist() for device, rows in found.devices.items()} == {1: [[9000, 0, 512]]}
    found = scattered(512, targets)
    assert found.host == b""
    assert {device: rows.tolist() for device, rows in found.devices.items()} == {
        0: [[8000, 88, 9]],
        1: [[9512, 0, 88]],
    }


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 90)), max_size=12))
def test_targets_take_every_byte_however_they_overlap(ranges: list[tuple[int, int]]) -> None:
    targets = Targets(Target(low, nbytes, number << 32, None) for number, (low, nbytes) in enumerate(ranges))
    found = set()
    for number, rows, _ in targets.cut(np.arange(0, 401, 50)):
        for address, offset, length in rows.tolist():
            assert offset + length <= 50
            found |= {(address + byte, 50 * number + offset + byte) for byte in range(length)}
    expected = {((n << 32) + byte, low + byte) for n, (low, nbytes) in enumerate(ranges) for byte in range(nbytes)}
    assert found == expected


@pytest.mark.slow
def test_ten_thousand_small_tensors_are_planned_once() -> None:
    state: dict[str, Any] = {str(number): torch.zeros(16) for number in range(10_000)}
    leaves = flatten(state).leaves
    planner = Planner(4 * MIB, 4096)
    layout, last = cached_layout(leaves)
    plan = planner.plan(layout)
    for number in (1, 2):
        layout, last = cached_layout(leaves, last)
        assert planner.plan(layout) is plan
        assert planner.hits == number
