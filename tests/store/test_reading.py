"""Reading parts of a payload: which bytes are read, and that all of them are verified before they are used."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccheck_async.errors import DamagedError
from pccheck_async.format import Entry, combine
from pccheck_async.format.manifest import Manifest
from pccheck_async.medium import File, Medium
from pccheck_async.medium.open_medium import OpenMedium, open_medium
from pccheck_async.state import Target, Targets
from pccheck_async.store import PartReader, Source, Staging
from pccheck_async.transfer import BufferPool
from pccheck_async.transfer.copying import CopyBackend
from pccheck_async.transfer.plan import unit_runs
from pccheck_async.upkeep import list_leaves
from pccheck_async.upkeep.verify import check_payload
from tests.unit.test_manifest import MIB, of_pieces

SIZES = (3 * MIB + 512, 512, 9 * MIB, MIB)


class Slot(NamedTuple):
    folder: Path
    manifest: Manifest
    payload: bytes

    def __repr__(self) -> str:
        return "slot"  # Hypothesis prints it where a test fails

    def read(self, work: Any) -> Any:
        """Await ``work(opened, file)`` on a loop of its own."""

        async def run() -> Any:
            async with await open_medium(self.folder, "auto", writers=2, copiers=1) as opened:
                await opened.medium.prepare(create=False)
                file = await opened.medium.open("slot-000", writable=False)
                return await work(opened, file)

        return asyncio.run(run())


@pytest.fixture(scope="module")
def slot(tmp_path_factory: pytest.TempPathFactory) -> Slot:
    folder = tmp_path_factory.mktemp("slot")
    manifest, payload = of_pieces(*SIZES)
    (folder / "slot-000").write_bytes(payload)
    return Slot(folder, manifest, payload)


@contextmanager
def damaged(slot: Slot, at: int) -> Iterator[None]:
    path = slot.folder / "slot-000"
    path.write_bytes(slot.payload[:at] + bytes([slot.payload[at] ^ 4]) + slot.payload[at + 1 :])
    yield
    path.write_bytes(slot.payload)


class Memory:
    """Memory for ranges of the payload."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.ranges = ranges
        self.arrays = [np.full(high - low, 0xA5, np.uint8) for low, high in ranges]

    @property
    def targets(self) -> Targets:
        each = zip(self.ranges, self.arrays, strict=True)
        return Targets(Target(low, high - low, array.ctypes.data, array) for (low, high), array in each)

    def is_of(self, payload: bytes) -> bool:
        each = zip(self.ranges, self.arrays, strict=True)
        return all(array.tobytes() == payload[low:high] for (low, high), array in each)


def pieces_of(ranges: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return first byte and length of every piece that holds bytes of ranges."""
    found, start = set(), 0
    for size in SIZES:
        for low in range(start, start + size, MIB):
            nbytes = min(MIB, start + size - low)
            if any(first < low + nbytes and low < last for first, last in ranges):
                found.add((low, nbytes))
        start += size
    return found


def pool(buffers: int = 8) -> BufferPool:
    """Half of the buffers keep chunks: eight do so for all."""
    return BufferPool(buffers * max(SIZES), max(SIZES))


class OpenSlot(Source):
    """A slot that is open already."""

    def __init__(self, medium: Medium, file: File, entry: Entry) -> None:
        self.medium, self._file, self.entry, self.block_bytes = medium, file, entry, 4096

    async def acquire(self) -> File:
        assert self._file is not None
        return self._file


def part(opened: OpenMedium, file: File, manifest: Manifest, pool: BufferPool, *, keeps: bool = True) -> PartReader:
    """Return the reader of a slot that is open, whose manifest was read."""
    entry = Entry(0, 0, 0.0, manifest.payload_nbytes, 0, 0, 0, 0, False, {})
    slot = OpenSlot(opened.medium, file, entry)
    reader = PartReader(slot, CopyBackend(opened.operations), Staging(pool))
    reader.manifest, reader._file, reader.keeps = manifest, file, keeps
    return reader


some_ranges = st.lists(
    st.tuples(st.integers(0, sum(SIZES) - 1), st.sampled_from([1, 700, MIB - 1, MIB, 3 * MIB])).map(
        lambda each: (each[0], min(each[0] + each[1], sum(SIZES)))
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
@settings(max_examples=60)
@given(some_ranges, st.booleans())
def test_ranges_are_read_by_the_pieces_that_hold_them(slot: Slot, ranges: list[tuple[int, int]], at_once: bool) -> None:
    """Read are those, and of a chunk that is nearly wanted in full at most one of eight pieces more."""
    memory, told = Memory(ranges), list[int]()

    async def work(opened: OpenMedium, file: File) -> int:
        if at_once:
            await part(opened, file, slot.manifest, pool(), keeps=False).fill(memory.targets, advance=told.append)
        else:
            chunks = part(opened, file, slot.manifest, pool())
            await chunks.fill(memory.targets, advance=told.append)
            before = opened.medium.statistics().read.nbytes
            again = Memory(ranges)
            await chunks.fill(again.targets)
            assert again.is_of(slot.payload)
            assert opened.medium.statistics().read.nbytes == before  # it is in memory
        return opened.medium.statistics().read.nbytes

    nbytes = slot.read(work)
    assert memory.is_of(slot.payload)
    assert sum(told) == sum(SIZES)
    wanted = sum(length for _, length in pieces_of(ranges))
    assert wanted <= nbytes <= wanted + wanted // 7


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(some_ranges, min_size=1, max_size=3), st.sampled_from([2, 4, 8]))
def test_ranges_that_are_streamed(slot: Slot, groups: list[list[tuple[int, int]]], buffers: int) -> None:
    async def work(opened: OpenMedium, file: File) -> None:
        chunks = part(opened, file, slot.manifest, pool(buffers))
        for ranges in groups:
            async with aclosing(chunks.pieces(ranges)) as pieces:
                found = b"".join([bytes(piece) async for piece in pieces])
            assert found == b"".join(slot.payload[low:high] for low, high in ranges)

    slot.read(work)


def test_the_pieces_of_several_ranges_are_read_in_one_go(slot: Slot) -> None:
    start = SIZES[0] + SIZES[1]
    ranges = [(start + n * MIB + 5, start + n * MIB + 10) for n in range(5)]

    async def work(opened: OpenMedium, file: File) -> int:
        chunks = part(opened, file, slot.manifest, pool())
        async with aclosing(chunks.pieces(ranges)) as pieces:
            assert [bytes(piece) async for piece in pieces] == [slot.payload[low:high] for low, high in ranges]
        return opened.medium.statistics().read.count

    assert slot.read(work) == 1


def test_version_1_is_read_by_whole_chunks(slot: Slot) -> None:
    old = msgspec.structs.replace(slot.manifest, version=1, pieces=None)
    memory = Memory([(2 * MIB, 2 * MIB + 5)])

    async def work(opened: OpenMedium, file: File) -> int:
        await part(opened, file, old, pool()).fill(memory.targets)
        assert memory.is_of(slot.payload)
        first = opened.medium.statistics().read.nbytes
        await part(opened, file, old, pool(), keeps=False).fill(memory.targets)
        assert opened.medium.statistics().read.nbytes == 2 * first
        return first

    assert slot.read(work) == SIZES[0]


@pytest.mark.parametrize("at_once", [False, True])
def test_damage_matters_to_those_who_read_it(slot: Slot, at_once: bool) -> None:
    start = SIZES[0] + SIZES[1]
    at = start + 2 * MIB + 77
    beside, there = Memory([(at - 2 * MIB, at - MIB), (at + MIB, at + 2 * MIB)]), Memory([(at + 100, at + 101)])

    async def work(opened: OpenMedium, file: File) -> None:
        chunks = part(opened, file, slot.manifest, pool())

        async def fill(memory: Memory) -> None:
            if at_once:
                await part(opened, file, slot.manifest, pool(), keeps=False).fill(memory.targets)
            else:
                await chunks.fill(memory.targets)

        told = rf"slot-000: chunk 2 \(bytes {start + 2 * MIB} to {start + 3 * MIB}\) of the checkpoint is damaged"
        for _ in range(2):
            with pytest.raises(DamagedError, match=told):
                await fill(there)
            assert there.arrays[0].tolist() == [0xA5]
            await fill(beside)
        assert beside.is_of(slot.payload)
        (damage,) = await check_payload(opened, file, slot.manifest, list_leaves(slot.manifest))
        assert (damage.what, damage.offset, damage.nbytes) == ("chunk 2", start, SIZES[2])

    with damaged(slot, at):
        slot.read(work)


def test_a_file_that_ends_too_early(slot: Slot) -> None:
    path = slot.folder / "slot-000"
    path.write_bytes(slot.payload[: -MIB // 2])
    memory = Memory([(sum(SIZES) - 10, sum(SIZES))])

    async def work(opened: OpenMedium, file: File) -> None:
        with pytest.raises(DamagedError, match=r"chunk 3 .* too short"):
            await part(opened, file, slot.manifest, pool()).fill(memory.targets)

    try:
        slot.read(work)
    finally:
        path.write_bytes(slot.payload)


def test_pieces_that_combine_and_are_not_those_that_were_written(slot: Slot) -> None:
    """No engine writes that. Who reads a piece refuses it, and so does who verifies all."""
    first, *others = slot.manifest.pieces or ()
    forged = other_sums_of_the_same_chunk(first, SIZES[0])
    manifest = msgspec.structs.replace(slot.manifest, pieces=(forged, *others))
    memory = Memory([(0, 10)])

    async def work(opened: OpenMedium, file: File) -> None:
        with pytest.raises(DamagedError, match="chunk 0"):
            await part(opened, file, manifest, pool()).fill(memory.targets)
        with pytest.raises(DamagedError, match=r"chunk 0 .* checksum mismatch"):
            await part(opened, file, manifest, pool()).verify()
        (damage,) = await check_payload(opened, file, manifest, list_leaves(manifest))
        assert (damage.what, damage.reason) == ("chunk 0", "checksum mismatch")

    slot.read(work)


def other_sums_of_the_same_chunk(sums: bytes, nbytes: int) -> bytes:
    """Change the first piece's checksum, and the last one's by what makes up for it: both are linear."""
    changed = bytes([sums[0] ^ 1]) + sums[1:]
    difference = combine(changed, nbytes) ^ combine(sums, nbytes)
    last = int.from_bytes(changed[-4:], "little") ^ difference
    forged = changed[:-4] + last.to_bytes(4, "little")
    assert combine(forged, nbytes) == combine(sums, nbytes)
    return forged


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60)), max_size=12), st.integers(1, 40))
def test_runs_hold_every_row_and_little_else(rows: list[tuple[int, int]], unit: int) -> None:
    table = np.array([(0, low, length) for low, length in rows], np.uint64).reshape(-1, 3)
    runs = unit_runs(table, unit)
    wanted = {number for low, length in rows for number in range(low // unit, (low + length - 1) // unit + 1)}
    found = [number for run in runs for number in run]
    assert found == sorted(set(found))
    assert wanted <= set(found)
    assert len(found) <= len(wanted) + len(wanted) // 7
    for low, length in rows:
        assert any(low // unit in run and (low + length - 1) // unit in run for run in runs)
    assert all(first.stop < second.start for first, second in pairwise(runs))
