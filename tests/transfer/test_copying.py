"""One suite for every copy backend, and the arithmetic behind the one that drives devices."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pccheck_async import StorageOptions, SyncCheckpointEngine, load_sync
from pccheck_async.engine.capture import Capture
from pccheck_async.errors import CheckpointError, WriteError
from pccheck_async.format import crc32, piece_sums
from pccheck_async.medium import Medium
from pccheck_async.medium.files import Files
from pccheck_async.state import HOST, PackedSource, Sources, arrange
from pccheck_async.state.leaves import ArrayLeaf, RawSource
from pccheck_async.testing import FailingWriter
from pccheck_async.transfer import BufferPool, address_of, aligned_buffer
from pccheck_async.transfer.copying import CopyBackend, CudaCopy, lanes, make_backend
from pccheck_async.transfer.copying.cuda_device import CudaDevice, load
from pccheck_async.transfer.copying.lanes import Lane, compacted, gaps, joined, merged, moves, split
from pccheck_async.transfer.copying.runtime import MOVE_SOURCE, TorchRuntime
from pccheck_async.transfer.copying.snapshot import Account, DeviceMemory, DeviceMode, Pace, decide, spare
from pccheck_async.transfer.operations import Operations
from pccheck_async.transfer.operations.python import PythonOperations, gather
from pccheck_async.transfer.plan import PackedPiece, Planner, Segments, Table
from pccheck_async.transfer.pool import LARGEST_SLAB
from tests.fixtures import BACKENDS, need
from tests.support.played_cuda import Library, played, using
from tests.support.pretend_device import PretendDevice, PretendStream, copy_with, keep_on

KIB, MIB = 1 << 10, 1 << 20


class Place:
    """Where a backend finds live memory."""

    def __init__(self, device: int = HOST) -> None:
        self.device = device

    def put(self, data: bytes, shift: int = 0) -> tuple[int, Any]:
        """Return address (its remainder by 16 is ``shift``) and owner."""
        memory = np.zeros(len(data) + 32, np.uint8)
        start = (shift - int(memory.ctypes.data)) % 16
        memory[start : start + len(data)] = np.frombuffer(data, np.uint8)
        return int(memory.ctypes.data) + start, memory[start : start + len(data)]

    def get(self, owner: Any) -> bytes:
        return bytes(owner.tobytes())

    def write_later(self, owner: Any, data: bytes) -> None:
        """Let the trainer write, as it does: what it queues may happen only when somebody waits for it."""
        owner[:] = np.frombuffer(data, np.uint8)

    def finish(self) -> None:
        """Let whatever is still queued happen."""


class PretendPlace(Place):
    def __init__(self, device: PretendDevice) -> None:
        super().__init__(device.index)
        self.it = device

    def put(self, data: bytes, shift: int = 0) -> tuple[int, Any]:
        return self.it.tensor(data, shift)

    def get(self, owner: Any) -> bytes:
        self.it.training.synchronize()
        return super().get(owner)

    def write_later(self, owner: Any, data: bytes) -> None:
        self.it.training.later(lambda: super(PretendPlace, self).write_later(owner, data))

    def finish(self) -> None:
        for stream in self.it.streams:
            stream.synchronize()


class CudaPlace(Place):
    def put(self, data: bytes, shift: int = 0) -> tuple[int, Any]:
        memory = torch.zeros(len(data) + 16, dtype=torch.uint8, device=f"cuda:{self.device}")
        tensor = memory[shift : shift + len(data)]
        self.write_later(tensor, data)
        torch.cuda.synchronize(self.device)
        return tensor.data_ptr(), tensor

    def get(self, owner: Any) -> bytes:
        return bytes(owner.cpu().numpy().tobytes())

    def write_later(self, owner: Any, data: bytes) -> None:
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]  # some 30 ms
        owner.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).pin_memory(), non_blocking=True)

    def finish(self) -> None:
        torch.cuda.synchronize(self.device)


class Bench:
    """A backend on a loop, with places to copy from and to, and staging buffers."""

    def __init__(self, operations: Operations, backend: CopyBackend, places: list[Place], pool: BufferPool) -> None:
        self.operations, self.backend, self.places, self.pool = operations, backend, places, pool

    @property
    def pretended(self) -> list[PretendDevice]:
        return [place.it for place in self.places if isinstance(place, PretendPlace)]

    def check(self) -> None:
        for device in self.pretended:
            assert not device.faults
            assert device.idle()


MakeBench = Callable[..., Any]


KINDS = [(kind, io) for io in BACKENDS for kind in ("host", "pretend")]
PLAYED: list[Library] = ["torch", "cupy", "cupy without a compiler"]


@pytest.fixture(
    params=[
        *KINDS,
        *((library, "python") for library in PLAYED),
        *(pytest.param((f"real {library}", "threads"), marks=pytest.mark.gpu) for library in ("torch", "cupy")),
    ],
    ids="-".join,
)
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeBench]:
    """A function that opens a bench: ``mode``, ``buffers`` of ``buffer_bytes``, ``refuse`` registration."""
    kind, io = request.param
    need(io)

    @asynccontextmanager
    async def make(
        mode: DeviceMode = "stream", buffer_bytes: int = 1 * MIB, buffers: int = 4, refuse: bool = False
    ) -> AsyncIterator[Bench]:
        operations = BACKENDS[io](io_threads=1, copy_threads=2)
        pretended = [PretendDevice(0), PretendDevice(1)] if kind == "pretend" else []
        registering: list[Any] = [*pretended, *cuda]
        for device in registering:
            device.refuse_to_register = refuse
        places: list[Place] = [Place(), *map(PretendPlace, pretended)]
        backend: CopyBackend
        if kind == "host":
            backend = CopyBackend(operations)
        elif kind == "pretend":
            backend = CudaCopy(operations, pretended.__getitem__, mode)
        else:
            backend = CudaCopy(operations, CudaDevice, mode)
            places += [Place(0)] if kind in PLAYED else map(CudaPlace, range(torch.cuda.device_count()))
        pool = BufferPool(buffers * buffer_bytes, buffer_bytes, getattr(backend, "pinning", None))
        try:
            yield Bench(operations, backend, places, pool)
        finally:
            await operations.close()
            backend.close()
            pool.close()
            assert not any(device.registered for device in registering)

    with ExitStack() as opened:
        cuda = [opened.enter_context(played(kind, monkeypatch))] if kind in PLAYED else []
        if kind.startswith("real"):
            opened.enter_context(using(kind[5:], monkeypatch))
        yield make


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


class Layout:
    """Random pieces at random places, with gaps between them, that fill a buffer."""

    def __init__(self, bench: Bench, seed: int, nbytes: int, sizes: tuple[int, ...], every: bool = True) -> None:
        self.random = random.Random(seed)
        sources: list[RawSource] = []
        self.expected = bytearray(nbytes)
        self.owners: list[tuple[Place, Any, int, int]] = []
        rows: dict[int, list[tuple[int, int, int]]] = {}
        packed: list[PackedPiece] = []
        offset = 0
        while True:
            offset += self.random.choice([0, 0, 1, 15, 64, 5000])
            length = self.random.choice(sizes)
            if offset + length > nbytes:
                break
            data = self.random.randbytes(length)
            self.expected[offset : offset + length] = data
            if every and self.random.random() < 0.05:
                holes = torch.frombuffer(bytearray(data), dtype=torch.uint8).repeat_interleave(2)[::2]
                packed.append((PackedSource(holes), 0, length, offset))
            else:
                place = self.random.choice(bench.places if every else bench.places[-1:])
                address, owner = place.put(data, self.random.choice([offset % 16, offset % 16, 0, 3]))
                self.owners.append((place, owner, offset, length))
                sources.append(RawSource(address, length, owner, place.device))
                rows.setdefault(place.device, []).append((address, offset, length))
            offset += length
        self.sources = Sources(sources)
        tables = {device: np.array(found, np.uint64) for device, found in rows.items()}
        host = tables.pop(HOST, np.empty((0, 3), np.uint64))
        self.segments = Segments(host.tobytes(), tables, packed)

    @property
    def devices(self) -> list[int]:
        return [device for device in self.segments.devices if device != HOST]


SHAPES = [
    (7, 4 * KIB, (1, 3, 16, 100)),
    (8, 300 * KIB, (4, 64, 1000, 40_000)),
    (9, 1 * MIB, (4, 300 * KIB, 20_000)),
    (10, 1 * MIB, (256 * KIB,)),
    (11, 1 * MIB, (1, 17, 255, 70_000)),
]

REFUSED = SHAPES[1]
"""The one that is copied in the suite where buffers cannot be registered, too: the others are in the campaign."""
EACH = pytest.mark.parametrize(
    ("seed", "nbytes", "sizes", "refuse"),
    [
        *((*shape, False) for shape in SHAPES),
        *(pytest.param(*each, True, marks=() if each is REFUSED else pytest.mark.campaign) for each in SHAPES),
    ],
)


@pytest.mark.parametrize("only", [False, True])
@EACH
def test_gather(
    bench: MakeBench,
    seed: int,
    nbytes: int,
    sizes: tuple[int, ...],
    only: bool,
    refuse: bool,
    recwarn: pytest.WarningsRecorder,
) -> None:
    async def test() -> None:
        async with bench(refuse=refuse) as it:
            layout = Layout(it, seed, nbytes, sizes, every=not only)
            await it.backend.order_after(it.backend.mark_queued_work(layout.devices))
            lease = await it.pool.lease()
            lease.view[:] = b"\xee" * len(lease.view)
            into = lease.view[:nbytes]
            sums = await it.backend.gather(layout.segments, into, layout.sources)
            assert into == layout.expected
            assert sums == piece_sums(into)
            assert lease.view[nbytes:] == b"\xee" * (len(lease.view) - nbytes)
            it.check()

    run(test)
    assert len([each for each in recwarn if "registered" in str(each.message)]) <= refuse


@EACH
@pytest.mark.filterwarnings("ignore:staging buffers cannot be registered")
def test_scatter(bench: MakeBench, seed: int, nbytes: int, sizes: tuple[int, ...], refuse: bool) -> None:
    async def test() -> None:
        async with bench(refuse=refuse) as it:
            layout = Layout(it, seed, nbytes, sizes)
            for place, owner, _, length in layout.owners:
                place.write_later(owner, bytes(length))
            await it.backend.order_after(it.backend.mark_queued_work(layout.devices))
            lease = await it.pool.lease()
            source = lease.view[:nbytes]
            source[:] = layout.expected
            table = layout.segments._replace(packed=())
            with pytest.raises(OSError, match="mismatch") as damaged:
                await it.backend.scatter(source, crc32(source) ^ 1, table, layout.sources)
            assert damaged.value.errno == errno.EBADMSG
            assert all(place.get(owner) != layout.expected[o : o + n] for place, owner, o, n in layout.owners if n > 8)
            for place, owner, _, length in layout.owners:
                place.write_later(owner, b"z" * length)
            await it.backend.order_after(it.backend.mark_queued_work(layout.devices))
            await it.backend.scatter(source, crc32(source), table, layout.sources)
            assert all(place.get(owner) == layout.expected[o : o + n] for place, owner, o, n in layout.owners)
            it.check()

    run(test)


def test_scatter_of_what_is_wanted_twice(bench: MakeBench) -> None:
    async def test() -> None:
        async with bench() as it:
            place = it.places[-1]
            lease = await it.pool.lease()
            lease.view[:] = random.Random(3).randbytes(len(lease.view))
            ranges = [(500_000, 400_000), (7, 90), (500_001, 10), (0, 40), (50, 300_000), (7, 90)]
            owners = [place.put(bytes(length), offset % 16) for offset, length in ranges]
            table = np.array([(address, *one) for (address, _), one in zip(owners, ranges, strict=True)], np.uint64)
            there = Segments(table.tobytes()) if place.device == HOST else Segments(devices={place.device: table})
            await it.backend.order_after(it.backend.mark_queued_work(set(there.devices)))
            await it.backend.scatter(lease.view, crc32(lease.view), there, owners)
            for (_, owner), (offset, length) in zip(owners, ranges, strict=True):
                assert place.get(owner) == lease.view[offset : offset + length]

    run(test)


def test_ten_thousand_small_segments(bench: MakeBench) -> None:
    async def test() -> None:
        async with bench() as it:
            place = it.places[-1]
            data = random.Random(4).randbytes(10_000 * 64)
            address, owner = place.put(data)
            count = np.arange(10_000)
            table = np.stack((address + 64 * count[::-1], 100 * count, np.full(10_000, 60)), axis=1).astype(np.uint64)
            there = Segments(table.tobytes()) if place.device == HOST else Segments(devices={place.device: table})
            await it.backend.order_after(it.backend.mark_queued_work(set(there.devices)))
            into = (await it.pool.lease()).view
            assert await it.backend.gather(there, into, owner) == piece_sums(into)
            expected = np.zeros(len(into), np.uint8)
            rows = np.frombuffer(data, np.uint8).reshape(-1, 64)[::-1, :60]
            expected[: 10_000 * 100].reshape(-1, 100)[:, :60] = rows
            assert into == expected.tobytes()
            it.check()

    run(test)


def test_chunks_beside_each_other(bench: MakeBench) -> None:
    """They share streams and scratch images; none may see another's bytes."""

    async def test() -> None:
        async with bench(buffers=20, buffer_bytes=512 * KIB) as it:
            layouts = [Layout(it, seed, 512 * KIB, (3, 100, 9000, 300_000), every=seed % 2 == 0) for seed in range(20)]
            devices = {device for layout in layouts for device in layout.devices}
            await it.backend.order_after(it.backend.mark_queued_work(devices))
            leases = [await it.pool.lease() for _ in layouts]
            async with asyncio.TaskGroup() as group:
                for lease, layout in zip(leases, layouts, strict=True):
                    group.create_task(it.backend.gather(layout.segments, lease.view, layout.sources))
            assert all(lease.view == layout.expected for lease, layout in zip(leases, layouts, strict=True))
            it.check()

    run(test)


def test_sees_what_was_queued_before_it(bench: MakeBench) -> None:
    async def test() -> None:
        async with bench() as it:
            place = it.places[-1]
            address, owner = place.put(bytes(1000))
            sources = Sources([RawSource(address, 1000, owner, place.device)])
            place.write_later(owner, b"a" * 1000)
            admission = it.backend.mark_queued_work(sources.devices - {HOST})
            assert await it.backend.begin(admission, sources) is sources
            table = np.array([(address, 24, 1000)], np.uint64)
            there = Segments(table.tobytes()) if place.device == HOST else Segments(devices={place.device: table})
            into = (await it.pool.lease()).view[:1024]
            await it.backend.gather(there, into, sources)
            assert into == bytes(24) + b"a" * 1000
            it.check()

    run(test)


async def ended(copying: Awaitable[object]) -> None:
    await copying


@pytest.mark.parametrize("refuse", [False, True])
@pytest.mark.filterwarnings("ignore:staging buffers cannot be registered")
def test_cancelled_copies_have_ended(bench: MakeBench, refuse: bool) -> None:
    """A device does not stop: the buffer is its own until it is done (I9)."""

    async def test() -> None:
        async with bench(refuse=refuse) as it:
            layout = Layout(it, 5, 1 * MIB, (300_000, 1000))
            for place, owner, _, length in layout.owners:
                place.write_later(owner, b"z" * length)  # takes a while
            await it.backend.order_after(it.backend.mark_queued_work(layout.devices))
            lease = await it.pool.lease()
            table = layout.segments._replace(packed=())
            for turns in range(1, 5):
                for copy in (
                    lambda: it.backend.gather(layout.segments, lease.view, layout.sources),
                    lambda: it.backend.scatter(lease.view, crc32(lease.view), table, layout.sources),
                ):
                    copying = asyncio.create_task(ended(copy()))  # type: ignore[no-untyped-call]
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    copying.cancel()
                    await asyncio.wait([copying])
                    assert copying.cancelled() or turns > 1
                    assert it.operations.running == 0
                    assert all(device.idle() for device in it.pretended)
                    lease.view[:] = b"\xcc" * len(lease.view)
                    for place in it.places:
                        place.finish()
                    assert lease.view == b"\xcc" * len(lease.view)

    run(test)


# -- a whole capture: sources, plan, snapshot, chunks


def leaves_on(place: Place, count: int) -> tuple[Sources, list[tuple[Any, bytes]]]:
    rng = random.Random(count)
    sources, owners = [], []
    for _ in range(count):
        data = rng.randbytes(rng.choice([4, 1000, 70_000, 400_000]))
        address, owner = place.put(data)
        owners.append((owner, data))
        sources.append(RawSource(address, len(data), owner, place.device))
    return Sources(sources), owners


class Saving:
    """A capture of sources by a backend, into one buffer of the payload."""

    def __init__(self, it: Bench, sources: Sources) -> None:
        leaves = [ArrayLeaf(str(n), np.zeros(int(size), np.uint8), "ndarray") for n, size in enumerate(sources.lengths)]
        self.layout = arrange(leaves)
        object.__setattr__(self.layout, "sources", sources)
        self.planner = Planner(256 * KIB, 4 * KIB)
        self.plan = self.planner.plan(self.layout)
        self.payload = bytearray(self.plan.payload_nbytes)
        self.captured_after: int | None = None
        self.copied = 0
        self.it = it
        admission = it.backend.mark_queued_work(sources.devices)
        self.capture = Capture(None, self.layout, it.backend, admission)

    async def begin(self) -> None:
        await self.capture.begin(self.planner)
        self._note()

    def _note(self) -> None:
        if self.captured_after is None and not self.capture.live:
            self.captured_after = self.copied

    async def chunk(self, index: int) -> None:
        chunk = self.plan.chunks[index]
        lease = await self.it.pool.lease()
        await self.capture.copy(index, lease.view[: chunk.nbytes])
        self._note()
        self.copied += 1
        self.payload[chunk.offset : chunk.offset + chunk.nbytes] = lease.view[: chunk.nbytes]
        lease.release()

    async def all(self) -> None:
        for index in range(len(self.plan.chunks)):
            await self.chunk(index)

    def stored(self) -> list[bytes]:
        found = []
        for storage, (number, offset, nbytes) in zip(self.plan.storages, self.layout.extents.tolist(), strict=True):
            assert storage is self.plan.storages[number]
            start = storage.offset + offset
            found.append(bytes(self.payload[start : start + nbytes]))
        return found


def test_capture_without_a_snapshot(bench: MakeBench) -> None:
    async def test() -> None:
        async with bench("stream") as it:
            sources, owners = leaves_on(it.places[-1], 20)
            saving = Saving(it, sources)
            await saving.begin()
            assert saving.captured_after is None
            await saving.all()
            assert saving.stored() == [data for _, data in owners]
            assert saving.captured_after == len(saving.plan.chunks) - 1
            assert [crc32(saving.payload[e.offset : e.offset + e.nbytes]) for e in saving.capture.entries] == [
                entry.checksum for entry in saving.capture.entries
            ]
            assert all(source.owner is None for source in saving.layout.sources if isinstance(source, RawSource))
            it.check()

    run(test)


@pytest.fixture
def devices() -> Iterator[list[PretendDevice]]:
    found = [PretendDevice(0, 64 * MIB), PretendDevice(1, 64 * MIB)]
    yield found
    for device in found:
        assert not device.faults
        assert device.idle()


@asynccontextmanager
async def pretending(devices: list[PretendDevice], mode: DeviceMode) -> AsyncIterator[Bench]:
    operations = PythonOperations(io_threads=1, copy_threads=1)
    backend = CudaCopy(operations, devices.__getitem__, mode)
    pool = BufferPool(4 * MIB, 1 * MIB, backend.pinning)
    try:
        yield Bench(operations, backend, [Place(), *map(PretendPlace, devices)], pool)
    finally:
        await operations.close()
        backend.close()
        pool.close()


def test_a_snapshot_is_out_of_reach(devices: list[PretendDevice]) -> None:
    async def test() -> None:
        async with pretending(devices, "snapshot") as it:
            sources, owners = leaves_on(it.places[1], 20)
            host_address, counter = it.places[0].put(b"\x05" * 4)
            sources = Sources([*sources, RawSource(host_address, 4, counter)])
            nbytes = int(sources.lengths.sum()) - 4
            saving = Saving(it, sources)
            await saving.begin()
            assert saving.captured_after == 0
            for owner, _ in owners:
                owner[:] = 0
            counter[:] = 0
            assert all(source.owner is None for source in sources if isinstance(source, RawSource))
            held = it.backend.statistics()
            assert nbytes <= held.device_bytes <= nbytes + 20 * 16
            await saving.all()
            assert saving.stored() == [data for _, data in owners] + [b"\x05" * 4]
            found = it.backend.statistics()
            assert found.snapshots == 1
            assert found.device_bytes <= 2 * MIB  # scratch images: the snapshot is gone
            assert found.device_peak_bytes >= held.device_bytes
            assert "asked for" in found.reason
            assert devices[0].allocated == found.device_bytes

    run(test)


def test_a_snapshot_waits_for_what_was_admitted_and_nothing_later(devices: list[PretendDevice]) -> None:
    """Training goes on on its stream meanwhile; memory that is taken there would come after that."""

    async def test() -> None:
        async with pretending(devices, "snapshot") as it:
            sources, owners = leaves_on(it.places[1], 9)
            for owner, data in owners:
                owner[:] = 0
                it.places[1].write_later(owner, data)
            saving = Saving(it, sources)
            for owner, data in owners:
                it.places[1].write_later(owner, bytes(len(data)))
            await saving.begin()
            await saving.all()
            assert it.backend.statistics().snapshots == 1
            assert saving.stored() == [data for _, data in owners]

    run(test)


def test_a_snapshot_of_two_devices(devices: list[PretendDevice]) -> None:
    async def test() -> None:
        async with pretending(devices, "snapshot") as it:
            sources, owners = leaves_on(it.places[1], 9)
            others, more = leaves_on(it.places[2], 8)
            sources = Sources([*sources, *others])
            saving = Saving(it, sources)
            await saving.begin()
            assert saving.captured_after == 0
            for owner, _ in owners + more:
                owner[:] = 0
            await saving.all()
            assert saving.stored() == [data for _, data in owners + more]
            assert it.backend.statistics().snapshots == 2

    run(test)


@pytest.mark.slow
def test_copies_that_block_do_not_block_the_loop(devices: list[PretendDevice]) -> None:
    """They hold their lane while they wait for training, and the next capture has something to tell that lane."""

    async def test() -> None:
        async with pretending(devices, "stream") as it:
            devices[0].refuse_to_register = True
            sources, owners = leaves_on(it.places[1], 20)
            saving = Saving(it, sources)
            await saving.begin()
            lease = await it.pool.lease()  # refused: from now on copies block
            lease.release()
            devices[0].pause()
            copying = asyncio.create_task(saving.all())
            await asyncio.sleep(0.1)
            resume = threading.Timer(5, devices[0].resume)
            resume.start()
            following = asyncio.create_task(it.backend.begin(it.backend.mark_queued_work({0}), sources))
            await asyncio.sleep(0.1)
            assert not devices[0].moves.is_set()
            devices[0].resume()
            resume.cancel()
            await copying
            await following
            assert saving.stored() == [data for _, data in owners]

    run(test)


@pytest.mark.slow
def test_a_lane_without_memory_does_not_ask_again_at_once(devices: list[PretendDevice]) -> None:
    async def test() -> None:
        asked = []
        allocate = devices[0].allocate

        def refuse(stream: PretendStream, nbytes: int) -> Any:
            asked.append(nbytes)
            devices[0].capacity = 0
            return allocate(stream, nbytes)

        devices[0].allocate = refuse  # type: ignore[method-assign]
        async with pretending(devices, "stream") as it:
            sources, owners = leaves_on(it.places[1], 200)
            saving = Saving(it, sources)
            await saving.begin()
            await saving.all()
            assert saving.stored() == [data for _, data in owners]
            assert len(saving.plan.chunks) > len(asked) == 2  # lanes

    run(test)


def test_where_memory_is_short_the_state_is_streamed(devices: list[PretendDevice]) -> None:
    """One device has room, the other says so and then has not: only that one's part stays within reach."""
    claimed = devices[1].memory()

    async def test() -> None:
        async with pretending(devices, "snapshot") as it:
            sources, owners = leaves_on(it.places[1], 9)
            others, more = leaves_on(it.places[2], 8)
            sources = Sources([*sources, *others])
            devices[1].memory = lambda: claimed  # type: ignore[method-assign]
            devices[1].capacity = 1 * MIB
            saving = Saving(it, sources)
            await saving.begin()
            assert saving.captured_after is None
            for owner, _ in owners:
                owner[:] = 0
            await saving.all()
            assert saving.stored() == [data for _, data in owners + more]
            assert saving.captured_after is not None
            assert "no memory" in it.backend.statistics().reason

    run(test)


def test_a_snapshot_that_found_no_memory_is_tried_less_and_less_often(
    devices: list[PretendDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try makes torch's allocator give back all that it has cached."""
    now = 1000.0
    monkeypatch.setattr(lanes, "time", SimpleNamespace(monotonic=lambda: now))
    claimed = devices[0].memory()
    monkeypatch.setattr(devices[0], "memory", lambda: claimed)
    asked: list[float] = []
    allocate = devices[0].allocate

    def count(stream: PretendStream, nbytes: int) -> Any:
        if nbytes > 1 * MIB:
            asked.append(now)
        return allocate(stream, nbytes)

    async def test() -> None:
        nonlocal now
        async with pretending(devices, "snapshot") as it:
            monkeypatch.setattr(devices[0], "allocate", count)
            sources, _ = leaves_on(it.places[1], 20)

            async def begin() -> None:
                await it.backend.begin(it.backend.mark_queued_work({0}), sources)

            devices[0].capacity = 1 * MIB
            for _ in range(40):
                await begin()
                now += 1
            assert asked == [1000, 1001, 1003, 1007, 1015, 1031]
            assert "asked again in 24 s" in it.backend.statistics().reason
            devices[0].capacity, now = 64 * MIB, 2000.0
            for _ in range(2):
                await begin()
            assert it.backend.statistics().snapshots == 2
            devices[0].capacity = 1 * MIB
            for _ in range(2):
                await begin()
                now += 1
            assert asked[-2:] == [2000, 2001]

    run(test)


def test_no_memory_for_a_scratch_image(devices: list[PretendDevice]) -> None:
    async def test() -> None:
        devices[0].capacity = 1000
        async with pretending(devices, "auto") as it:
            sources, owners = leaves_on(it.places[1], 9)
            saving = Saving(it, sources)
            await saving.begin()
            await saving.all()
            assert saving.stored() == [data for _, data in owners]
            assert it.backend.statistics().device_peak_bytes == 0

    run(test)


def test_a_scratch_image_that_grows(devices: list[PretendDevice]) -> None:
    """The old one is in use until the lane is through with it."""
    device = devices[0]
    lane = Lane(device, Account())
    address, owner = device.tensor(random.Random(8).randbytes(3000))
    table = np.array([(address, 7, 1000), (address + 1000, 1500, 2000)], np.uint64)
    events, buffers = [], []
    for nbytes in (3600, 9000, 9000):
        buffers.append(aligned_buffer(nbytes))
        device.register(address_of(buffers[-1]), nbytes)
        events.append(lane.gather(table, None, address_of(buffers[-1]), nbytes)[0])
    for event in events:
        event.synchronize()
    assert all(each[7:1007] == owner[:1000].tobytes() for each in buffers)
    assert all(each[1500:3500] == owner[1000:].tobytes() for each in buffers)


def test_the_rule_is_fed_by_what_was_measured(devices: list[PretendDevice]) -> None:
    async def test() -> None:
        async with pretending(devices, "auto") as it:
            taken = []
            for _ in range(3):
                sources, owners = leaves_on(it.places[1], 9)
                saving = Saving(it, sources)
                await saving.begin()
                taken.append(it.backend.statistics().snapshots)
                await saving.all()
                assert saving.stored() == [data for _, data in owners]
            assert taken == [0, 1, 2]
            devices[0].peak = 63 * MIB  # training took that much in between
            saving = Saving(it, leaves_on(it.places[1], 9)[0])
            await saving.begin()
            assert it.backend.statistics().snapshots == 2
            assert "leaves" in it.backend.statistics().reason
            await saving.all()

    run(test)


def test_cancelled_snapshots_have_ended(devices: list[PretendDevice]) -> None:
    async def test() -> None:
        async with pretending(devices, "snapshot") as it:
            sources, _ = leaves_on(it.places[1], 9)
            saving = Saving(it, sources)
            beginning = asyncio.create_task(saving.begin())
            await asyncio.sleep(0)
            beginning.cancel()
            with pytest.raises(asyncio.CancelledError):
                await beginning
            del beginning
            saving.capture.release()
            assert devices[0].idle()
            assert devices[0].allocated == 0

    run(test)


def test_packed_pieces_of_a_device_come_after_its_kernels(
    devices: list[PretendDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with pretending(devices, "stream") as it:
            sources = Sources([PackedSource(torch.arange(20.0).view(2, 10)[:, 0])])
            sources.devices, sources.packed_devices = {0}, {0}
            done: list[bool] = []
            devices[0].training.later(lambda: done.append(True))
            await it.backend.begin(it.backend.mark_queued_work({0}), sources)
            assert done == [True]

    run(test)


def test_an_error_of_the_device_is_a_checkpoint_error(devices: list[PretendDevice]) -> None:
    async def test() -> None:
        async with pretending(devices, "stream") as it:
            sources, _ = leaves_on(it.places[1], 9)
            saving = Saving(it, sources)
            await saving.begin()
            await saving.chunk(0)

            def fail(rows: Table) -> None:
                raise RuntimeError("an illegal memory access was encountered")

            for stream in devices[0].streams:
                stream.move = fail  # type: ignore[method-assign]
            with pytest.raises(CheckpointError, match="illegal memory access"):
                await saving.all()

    run(test)


def test_devices_need_no_cupy(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where there are any they are copied by address, and captured beside training."""
    operations = PythonOperations.__new__(PythonOperations)  # copies nothing

    async def test() -> None:
        assert make_backend(operations, "auto").statistics().reason == "this build of torch has no CUDA"
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        assert make_backend(operations, "auto").statistics().reason == "there is no CUDA device"
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        backend = make_backend(operations, "auto")
        assert isinstance(backend, CudaCopy)
        assert backend.by_address
        backend.close()

    run(test)
    with using("torch", monkeypatch):
        assert load() is load()
    (record,) = caplog.records
    assert record.event == "no_cupy"  # type: ignore[attr-defined]
    assert "CuPy is missing: torch's streams copy; slower for many small tensors" in record.getMessage()
    assert "pccheck-async[cuda12]" in record.getMessage()


def test_device_memory_without_its_backend_is_packed() -> None:
    tensor = torch.arange(10.0)
    sources = Sources([RawSource(1000, 8, None), RawSource(tensor.data_ptr() + 4, 12, tensor.untyped_storage(), 3)])
    assert sources.devices == {3}
    assert sources[-1] == sources[1]
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|cuda|NVIDIA"):  # there is none here, or no fourth
        sources.pack_devices()


# -- buffers and their registration


def test_buffers_are_registered_once_and_unregistered_at_the_end(devices: list[PretendDevice]) -> None:
    async def test() -> None:
        async with pretending(devices, "stream") as it:
            (await it.pool.lease()).release()
            assert not devices[0].registered
            it.backend.mark_queued_work({0})
            first = await it.pool.lease()
            assert devices[0].registered == {address_of(first.view): 1 * MIB}
            second = await it.pool.lease()
            assert len(devices[0].registered) == 2
            first.release()
            (await it.pool.lease()).release()
            second.release()
            assert len(devices[0].registered) == 2
        assert not devices[0].registered

    run(test)


@pytest.mark.parametrize(("most", "slabs"), [(32, [1, 1, 2, 4, 8, 4]), (4, [1, 1, 2, 4, 4, 4, 4])])
def test_buffers_are_registered_in_slabs_that_double(devices: list[PretendDevice], most: int, slabs: list[int]) -> None:
    """A call for each takes its time; all at once would take memory that a small state never needs."""
    nbytes = LARGEST_SLAB // most  # of address space: nobody writes to it

    async def lease(pool: BufferPool) -> None:
        view = (await pool.lease()).view
        assert devices[0].locked(address_of(view), view.nbytes)

    async def test() -> None:
        async with pretending(devices, "stream") as it:
            pool = BufferPool(20 * nbytes, nbytes, it.backend.pinning)
            before = [await pool.lease() for _ in range(3)]
            assert not devices[0].registered
            it.backend.mark_queued_work({0})
            for each in before:
                each.release()
            async with asyncio.TaskGroup() as group:
                for _ in range(20):
                    group.create_task(lease(pool))
            assert [slab // nbytes for slab in devices[0].registered.values()] == slabs
            assert pool.statistics().touched == 20

    run(test)


def test_a_lease_cancelled_while_its_buffer_is_registered_is_given_back(devices: list[PretendDevice]) -> None:
    async def test() -> None:
        async with pretending(devices, "stream") as it:
            it.backend.mark_queued_work({0})
            leasing = asyncio.create_task(it.pool.lease())
            await asyncio.sleep(0)
            leasing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leasing
            assert len(it.pool.free) == 4
            leases = [await it.pool.lease() for _ in range(4)]
            assert len({lease.index for lease in leases}) == 4

    run(test)


def test_refused_registration_is_said_once(devices: list[PretendDevice], caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with pretending(devices, "stream") as it:
            devices[0].refuse_to_register = True
            it.backend.mark_queued_work({0})
            for _ in range(2):
                await it.pool.lease()
            (record,) = caplog.records
            assert "ulimit -l" in record.getMessage()

    run(test)


# -- the kernel

CC = shutil.which("cc")
HARNESS = """
#include <setjmp.h>
#include <stdint.h>
typedef struct {{ uint32_t x, y, z, w; }} __attribute__((aligned(16))) uint4;
unsigned misaligned;
static jmp_buf out;
void __ubsan_handle_type_mismatch_v1(void *data, void *pointer)  /* called by -fsanitize=alignment */
{{
    misaligned++;
    longjmp(out, 1);
}}
static struct {{ unsigned x; }} blockIdx, threadIdx, blockDim;
#define __global__
#define __restrict__ restrict
{source}
void launch(const unsigned long long *table, unsigned blocks, unsigned threads)
{{
    blockDim.x = threads;
    if (setjmp(out))
        return;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = threads; threadIdx.x-- > 0;)
            pccheck_move(table);
}}
"""


@pytest.mark.skipif(CC is None, reason="no C compiler on PATH")
def test_the_kernel_moves_every_byte_whatever_the_alignment(tmp_path: Path) -> None:
    """Its threads do not talk to each other, so a host can play them one after the other."""
    source = tmp_path / "move.c"
    source.write_text(HARNESS.format(source=MOVE_SOURCE.replace('extern "C"', "").replace("#pragma unroll 4", "")))
    flags = ("-std=gnu11", "-O1", "-fPIC", "-fsanitize=alignment")
    subprocess.run([str(CC), *flags, "-c", source, "-o", tmp_path / "move.o"], check=True)
    subprocess.run([str(CC), "-shared", tmp_path / "move.o", "-o", tmp_path / "move.so"], check=True)
    library = ctypes.CDLL(str(tmp_path / "move.so"))
    launch, misaligned = library.launch, ctypes.c_uint.in_dll(library, "misaligned")
    rng = random.Random(6)
    memory = np.frombuffer(bytearray(rng.randbytes(1 << 16)), np.uint8)
    base = memory.ctypes.data
    for threads in (1, 7, 256):
        into = np.full(1 << 16, 0xAA, np.uint8)
        expected = into.copy()
        rows, at = [], 0
        while True:
            at += rng.randrange(40)
            length = rng.choice([0, 1, 5, 15, 16, 17, 31, 33, 100, 4096])
            start = rng.randrange((1 << 16) - 4096)
            if rng.random() < 0.6:
                start += (into.ctypes.data + at - base - start) % 16
            if at + length > 1 << 16 or start + length > 1 << 16:
                break
            rows.append((into.ctypes.data + at, base + start, length))
            expected[at : at + length] = memory[start : start + length]
            at += length
        table = np.array(rows, np.uint64)
        launch(ctypes.c_void_p(table.ctypes.data), len(rows), threads)
        assert not misaligned.value
        assert (into == expected).all()


# -- the libraries


@pytest.mark.parametrize("library", PLAYED)
def test_streams_are_kept_for_the_next_engine(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch's allocator may still have memory for them."""

    async def test() -> None:
        with played(library, monkeypatch) as cuda:
            for _ in range(2):
                operations = PythonOperations(io_threads=1, copy_threads=1)
                backend = CudaCopy(operations, CudaDevice, "snapshot")
                pool = BufferPool(4 * MIB, 1 * MIB, backend.pinning)
                it = Bench(operations, backend, [Place()], pool)
                sources, owners = leaves_on(Place(0), 20)
                saving = Saving(it, sources)
                await saving.begin()
                await saving.all()
                assert saving.stored() == [data for _, data in owners]
                assert backend.statistics().snapshots == 1
                assert cuda.registered
                await operations.close()
                backend.close()
                pool.close()
                assert not cuda.registered
                del it, saving, backend, pool
            assert len(cuda.streams) == 3  # two lanes, and snapshots
            assert (cuda.gathered > 0) is (library == "cupy")
            assert CudaDevice(0).order_after_copies([CudaDevice(0).current()])
            cuda.refuse_to_register = True
            with pytest.raises(RuntimeError, match="played"):
                CudaDevice(0).register(0, 1)

    run(test)
    assert [record.event for record in caplog.records] == {  # type: ignore[attr-defined]
        "cupy": [],
        "cupy without a compiler": ["no_kernel"],
        "torch": ["no_cupy"],
    }[library]


def test_a_cupy_that_does_not_work_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with played("cupy", monkeypatch):
        assert type(load()).__name__ == "CupyRuntime"
    with played("cupy", monkeypatch):
        runtime = sys.modules["cupy.cuda"].runtime

        def fail() -> int:
            raise runtime.CUDARuntimeError("cudaErrorInsufficientDriver")

        runtime.getDeviceCount = fail
        assert isinstance(load(), TorchRuntime)


def test_a_stream_of_torchs_that_is_recorded_is_given_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch hands its streams out in turn; what the engine gives one would become part of the trainer's graph."""
    with played("torch", monkeypatch) as cuda:
        stream = CudaDevice(0).stream()
        cuda.recorded = cuda.streams[0].cuda_stream
        (source, _), (into, owner) = Place().put(b"a" * 100), Place().put(bytes(100))
        for give in (
            lambda: stream.to_host(into, source, 100),
            lambda: stream.to_device(into, source, 100),
            lambda: stream.zero(source, 100),
            lambda: stream.move(stream.prepare(np.array([(into, source, 100)], np.uint64))),
            lambda: stream.wait(CudaDevice(0).current()),
            lambda: stream.allocate(100),
            stream.record,
        ):
            with pytest.raises(RuntimeError, match="CUDA graph"):
                give()
        assert owner.tobytes() == bytes(100)


def test_torch_copies_in_place_and_leaves_the_waiting_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    with played("torch", monkeypatch):
        stream = CudaDevice(0).stream()
        (source, _), (into, owner) = Place().put(b"a" * 100), Place().put(bytes(100))
        copy, blocking = torch.Tensor.copy_, []

        def copy_(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            blocking.append(not non_blocking)
            return copy(into, source)

        monkeypatch.setattr(torch.Tensor, "copy_", copy_)
        stream.to_host(into, source, 50)
        stream.to_device(into + 50, source, 50)
        assert owner.tobytes() == b"a" * 100
        assert blocking == [False, False]
        alias = torch.as_tensor
        monkeypatch.setattr(torch, "as_tensor", lambda *data, **options: alias(*data, **options).clone())
        with pytest.raises(RuntimeError, match="referred to"):
            stream.to_device(into, source, 100)


def test_a_stream_without_memory_for_a_table_does_not_ask_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    with played("cupy", monkeypatch):
        empty, stream = torch.empty, CudaDevice(0).stream()

        def full(nbytes: int, **options: Any) -> Any:
            if "device" not in options:
                return empty(nbytes, **options)
            asked.append(nbytes)
            raise torch.cuda.OutOfMemoryError

        monkeypatch.setattr(torch, "empty", full)
        source, into = Place().put(b"a" * 1000), Place().put(bytes(1000))
        for _ in range(3):
            stream.move(stream.prepare(np.array([(into[0], source[0], 1000)], np.uint64)))
            assert into[1].tobytes() == b"a" * 1000
    assert asked == [64 * KIB]


# -- tables

rows_of = st.lists(st.tuples(st.sampled_from([0, 1, 63, 64, 100, 70_000]), st.integers(1, 400_000)), max_size=12)


def placed(gaps_and_lengths: list[tuple[int, int]]) -> Table:
    offset, rows = 0, []
    for gap, length in gaps_and_lengths:
        rows.append((1 << 40 | offset, offset + gap, length))
        offset += gap + length
    return np.array(rows, np.uint64).reshape(-1, 3)


@pytest.mark.slow
@settings(deadline=None)
@given(rows_of, st.sampled_from([0, 64, 256 << 10]), st.data())
def test_split_copies_every_segment_once_and_no_other(
    rows: list[tuple[int, int]], large: int, data: st.DataObject
) -> None:
    table = placed(rows)
    is_mine = np.array([data.draw(st.booleans()) for _ in rows], np.bool_)
    mine, foreign = table[is_mine], table[~is_mine]
    found = split(mine, foreign, large)
    assert sorted([*found.large.tolist(), *found.small.tolist()]) == sorted(mine.tolist())
    assert all(length >= large for _, _, length in found.large.tolist())
    assert all(length < large for _, _, length in found.small.tolist())
    for _, offset, length in found.small.tolist():
        assert sum(low <= offset and offset + length <= high for low, high in found.runs.tolist()) == 1
    filled = found.filled.tolist()
    assert all(low < high <= following for (low, high), (following, _) in pairwise(filled))
    for _, offset, length in foreign.tolist():
        assert not any(low < offset + length and offset < high for low, high in filled)


def test_split_joins_what_is_near() -> None:
    table = placed([(0, 100), (28, 64), (70_000, 50), (14, 300_000), (0, 10), (64, 10)])
    found = split(table)
    assert found.runs.tolist() == [[0, 192], [70_192, 70_242], [370_256, 370_340]]
    assert len(found.large) == 1
    assert split(table[:0]).filled.tolist() == []


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.integers(1, 1 << 40), st.integers(0, 300_000)), max_size=9))
def test_moves_cut_rows_to_size(rows: list[tuple[int, int, int]]) -> None:
    into, source, lengths = np.array(rows, np.uint64).reshape(-1, 3).T
    found = moves(into, source, lengths, 16 << 10).tolist()
    assert all(0 < length <= 16 << 10 for _, _, length in found)
    whole: list[tuple[int, int, int]] = []
    for one in found:
        last = whole[-1] if whole else (0, 0, 0)
        if one[0] == last[0] + last[2] and one[1] == last[1] + last[2] and last[2] % (16 << 10) == 0:
            whole[-1] = (last[0], last[1], last[2] + one[2])
        else:
            whole.append(tuple(one))
    assert whole == [row for row in rows if row[2]]


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(1, 20)), max_size=9))
def test_joined_rows_copy_the_same_in_fewest_pieces(rows: list[tuple[int, int, int]]) -> None:
    into, source, lengths = np.array(rows, np.uint64).reshape(-1, 3).T
    whole: list[tuple[int, int, int]] = []
    for one in rows:
        last = whole[-1] if whole else (0, 0, 0)
        if one[0] == last[0] + last[2] and one[1] == last[1] + last[2]:
            whole[-1] = (last[0], last[1], last[2] + one[2])
        else:
            whole.append(one)
    assert [tuple(row) for row in joined(moves(into, source, lengths, 16)).tolist()] == whole


@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.integers(1, 5000)), max_size=20))
def test_compacted_pieces_keep_their_alignment_and_do_not_overlap(pieces: list[tuple[int, int]]) -> None:
    addresses = np.array([address for address, _ in pieces], np.uint64)
    lengths = np.array([length for _, length in pieces], np.int64)
    offsets, nbytes = compacted(addresses, lengths)
    end = 0
    for (address, length), offset in zip(pieces, offsets.tolist(), strict=True):
        assert offset % 16 == address % 16
        assert end <= offset < end + 32
        end = offset + length
    assert end <= nbytes < end + 16


@pytest.mark.slow
@given(rows_of, st.data())
def test_merged_tables_keep_what_devices_wrote_and_add_what_the_host_has(
    rows: list[tuple[int, int]], data: st.DataObject
) -> None:
    """The run of a device may pass over segments of the host: those go over it."""
    table = placed([(gap, length % 3000 + 1) for gap, length in rows])
    nbytes = int(table[-1, 1] + table[-1, 2] if len(table) else 0) + 100
    on_host = np.array([data.draw(st.booleans()) for _ in rows], np.bool_)
    filled = split(table[~on_host], None, 64).filled
    buffer = aligned_buffer(nbytes)
    buffer[:] = b"\xee" * nbytes
    expected = bytearray(nbytes)
    for low, high in filled.tolist():
        buffer[low:high] = expected[low:high] = b"d" * (high - low)
    host = np.full(1 << 16, ord("h"), np.uint8)
    mine = table[on_host].copy()
    mine[:, 0] = host.ctypes.data
    for _, offset, length in mine.tolist():
        expected[offset : offset + length] = b"h" * length
    found = merged(mine.tobytes(), filled, address_of(buffer))
    assert gather(found, buffer) == piece_sums(buffer)
    assert buffer == expected


def test_gaps() -> None:
    assert gaps(np.array([[0, 5], [5, 7], [10, 12]], np.int64), 20) == [(7, 10), (12, 20)]
    assert gaps(np.empty((0, 2), np.int64), 20) == [(0, 20)]
    assert gaps(np.array([[3, 20]], np.int64), 20) == [(0, 3)]


# -- when to take a snapshot

GIB = 1 << 30
RULE = {
    "state_bytes": 30 * GIB,
    "spare_bytes": 40 * GIB,
    "total_bytes": 140 * GIB,
    "device_seconds": 0.02,
    "host_seconds": 0.6,
}


@pytest.mark.parametrize(
    ("changed", "snapshot", "reason"),
    [
        ({}, True, "0.0200 s on the device, 0.6000 s of waiting"),
        ({"spare_bytes": 37 * GIB}, False, "7168 MiB stay in reserve"),
        ({"device_seconds": None}, True, "training leaves 40960 MiB"),
        ({"host_seconds": None}, False, "first capture shows"),
        ({"device_seconds": 0.7}, False, "0.7000 s on the device, 0.6000 s"),
        ({"host_seconds": 0.01}, False, "0.0100 s of waiting"),
        ({"host_seconds": 0.03}, True, "0.0300 s of waiting"),
        ({"host_seconds": 0.0}, False, "0.0000 s of waiting"),
    ],
)
def test_the_rule_of_checkfreq(changed: dict[str, Any], snapshot: bool, reason: str) -> None:
    decision = decide("auto", **(RULE | changed))
    assert decision.snapshot is snapshot
    assert reason in decision.reason


def test_modes() -> None:
    slow: dict[str, Any] = RULE | {"device_seconds": 9.0, "host_seconds": None, "spare_bytes": 30 * GIB}
    assert decide("snapshot", **slow) == (True, "snapshot on the device: asked for")
    assert not decide("snapshot", **(slow | {"spare_bytes": 30 * GIB - 1})).snapshot
    assert decide("stream", **RULE) == (False, "streamed to the host: asked for")  # type: ignore[arg-type]


def test_the_peak_of_training_is_told_apart_from_ours() -> None:
    account = Account()
    assert account.training_peak(60) == 60
    account.take(30)
    assert account.training_peak(60) == 60  # it was reached before
    assert account.training_peak(90) == 60
    assert account.training_peak(95) == 65
    account.give_back(30)
    assert (account.held, account.peak) == (0, 30)
    assert account.training_peak(95) == 65


def test_spare_memory() -> None:
    assert spare(DeviceMemory(140, 50, 85, 0), training_peak=60, held=10) == 65


def test_pace() -> None:
    pace = Pace()
    assert pace.seconds(10) is None
    pace.note(100, 2.0)
    pace.note(0, 5.0)
    assert pace.seconds(50) == 1.0


# -- the whole engine, its tensors on a device that pretends


@pytest.fixture
def engine_on(monkeypatch: pytest.MonkeyPatch, devices: list[PretendDevice]) -> PretendDevice:
    """Let every engine find the tensors of its state, but for the smallest, in a device's memory."""
    keep_on(monkeypatch, devices, lambda address, nbytes: 0 if nbytes >= 64 else HOST)
    return devices[0]


def state_of(step: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(step)
    sizes = [1, 3, 1000, 70_000, 300_000, 17]
    return {"step": step, "t": {str(n): torch.rand(size, generator=rng) for n, size in enumerate(sizes)}}


def write(device: PretendDevice, tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Do as torch does: at once on the host; on a device it is queued and not done yet."""
    if tensor.nbytes >= 64:
        device.training.later(partial(tensor.copy_, value))
    else:
        tensor.copy_(value)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.parametrize("mode", ["auto", "snapshot", "stream"])
def test_an_engine_whose_state_changes_as_soon_as_it_may(
    tmp_path: Path, engine_on: PretendDevice, mode: DeviceMode
) -> None:
    with SyncCheckpointEngine(
        tmp_path, storage=StorageOptions(gpu_capture=mode, chunk_bytes=256 * KIB, host_memory=1 * MIB), keep_last=4
    ) as engine:
        live = state_of(0)
        for step in range(4):
            fresh = state_of(step)
            live["step"] = step
            for name, tensor in live["t"].items():
                write(engine_on, tensor, fresh["t"][name])
            engine.checkpoint(live, step=step)
            for tensor in live["t"].values():
                tensor.zero_()
        engine.drain()
        found = engine.statistics()
        assert found.snapshots == {"auto": 3, "snapshot": 4, "stream": 0}[mode]
        assert found.device_peak_bytes > 1_480_000 or mode == "stream"
        assert found.device_bytes < 1 * MIB
        assert found.decisions.reasons["gpu_capture"].startswith("device 0: ")
        for step in range(4):
            restored = load_sync(tmp_path, step=step)
            expected = state_of(step)
            assert restored["step"] == step
            assert all(torch.equal(restored["t"][name], tensor) for name, tensor in expected["t"].items())
        for tensor in live["t"].values():
            write(engine_on, tensor, torch.full_like(tensor, 7))
        engine.restore(live, step=1)
        assert engine_on.allocated == engine.statistics().device_bytes > 0
        engine_on.training.synchronize()
        assert all(torch.equal(live["t"][name], tensor) for name, tensor in state_of(1)["t"].items())
    assert engine_on.allocated == engine.statistics().device_bytes == 0


@pytest.mark.usefixtures("nothing_left_behind")
def test_what_takes_a_while_is_done_when_the_engine_opens(
    tmp_path: Path, devices: list[PretendDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the trainer's first step nor a loop waits for it, and closing does."""
    importing, imported = threading.Event(), threading.Event()
    names: list[str] = []

    def prepare() -> None:
        importing.wait(5)
        names.append(threading.current_thread().name)
        imported.set()

    copy_with(monkeypatch, devices, prepare)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"n": 1, "t": torch.rand(1000)}, step=0).result(60)
        assert not names
        importing.set()
    assert imported.is_set()
    assert [name.rstrip("0123456789") for name in names] == ["pccheck-device-"]


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_failed_checkpoint_keeps_no_device_memory(tmp_path: Path, engine_on: PretendDevice) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        creating = 0  # an existing store is opened without a write
        assert engine.latest is None

    def failing(path: str, operations: Operations) -> Medium:
        return FailingWriter(Files(path, operations), fail_at=creating + 1, kinds=("write",))

    few: dict[str, Any] = {"chunk_bytes": 256 * KIB, "host_memory": 512 * KIB}
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(gpu_capture="snapshot", io=failing, **few)) as engine:
        pending = engine.checkpoint(state_of(0), step=0)
        with pytest.raises(WriteError) as failure:
            pending.result(60)
        assert engine.statistics().device_bytes <= 2 * 256 * KIB
        assert failure.value.__traceback__ is not None  # which holds the frames that the snapshot passed through


@pytest.mark.usefixtures("nothing_left_behind", "engine_on")
def test_an_engine_that_does_not_open_leaves_no_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(nbytes: int) -> memoryview:
        raise MemoryError(f"no staging memory of {nbytes} bytes")

    monkeypatch.setattr("pccheck_async.transfer.pool.aligned_buffer", full)
    with pytest.raises(MemoryError, match="staging"):
        SyncCheckpointEngine(tmp_path, storage=StorageOptions(host_memory=64 * MIB)).open()


@pytest.mark.parametrize(
    ("settings", "chunk_bytes", "reason"),
    [
        ({"host_memory": 512 * MIB}, 32 * MIB, "32 MiB, as there is a GPU"),
        ({"host_memory": 64 * MIB}, 8 * MIB, "holds 8 of them"),
        ({"host_memory": 512 * MIB, "chunk_bytes": 16 * MIB}, 16 * MIB, "given"),
    ],
)
@pytest.mark.usefixtures("engine_on")
def test_chunks_for_devices_are_larger(tmp_path: Path, settings: dict[str, Any], chunk_bytes: int, reason: str) -> None:
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(**settings)) as engine:
        decisions = engine.statistics().decisions
        assert decisions.chunk_bytes == chunk_bytes
        assert reason in decisions.reasons["chunk_bytes"]


def test_modes_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'snapshot' or 'stream', not 'gpu'"):
        SyncCheckpointEngine(tmp_path, storage=StorageOptions(gpu_capture="gpu"))  # type: ignore[arg-type]
