"""Files that are mapped: persistent memory, emulated on tmpfs, and pages of the page cache."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import mmap
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from pccheck_async import StorageOptions, SyncCheckpointEngine, list_checkpoints, load_sync
from pccheck_async.errors import StoreFullError, WriteError
from pccheck_async.medium import Medium
from pccheck_async.medium.mapped import MappedFiles, kind_of_folder
from pccheck_async.medium.mapping import map_file
from pccheck_async.medium.open_medium import IO, MediumName
from pccheck_async.testing import MEDIUM_CHECKS
from pccheck_async.transfer import PAGE_BYTES, address_of, aligned_buffer
from pccheck_async.transfer.operations import Operations
from tests.fixtures import BACKENDS
from tests.support.loop_devices import Mounted
from tests.support.processes import passes_in_a_forked_child


@pytest.fixture(params=["on disk", "in memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path, shared_memory: Path) -> Path:
    """A folder whose mapped files are pages of the page cache, and one where persistent memory is emulated."""
    return (tmp_path if request.param == "on disk" else shared_memory) / "store"


@asynccontextmanager
async def opened(folder: Path, io: str) -> AsyncIterator[MappedFiles]:
    operations = BACKENDS[io](io_threads=1, copy_threads=1)
    medium = MappedFiles(folder, operations)
    try:
        await medium.prepare(create=True)
        yield medium
    finally:
        await medium.close()
        await operations.close()


@pytest.mark.parametrize("check", MEDIUM_CHECKS, ids=lambda check: check.__name__)
def test_mapped_files_keep_what_a_medium_promises(
    check: Callable[..., Coroutine[None, None, None]], place: Path, io: str
) -> None:
    async def main() -> None:
        made: list[Operations] = []

        async def make() -> Medium:
            made.append(BACKENDS[io](io_threads=1, copy_threads=1))
            return MappedFiles(place, made[-1])

        try:
            await check(make)
        finally:
            for operations in made:
                await operations.close()

    asyncio.run(main())


def state(step: int, floats: int = 100_000) -> dict[str, object]:
    return {"weights": torch.full((floats,), float(step)), "small": torch.arange(5) + step, "step": step}


def same(found: dict[str, object], step: int, floats: int = 100_000) -> bool:
    want = state(step, floats)
    return all(torch.equal(found[k], v) if isinstance(v, torch.Tensor) else found[k] == v for k, v in want.items())  # type: ignore[arg-type]


@pytest.mark.parametrize("medium", ["files", "mapped"])
def test_stores_are_the_same_on_each_medium(place: Path, io: IO, medium: MediumName) -> None:
    """What one wrote the other one continues."""
    mediums: list[MediumName] = [medium, "mapped" if medium == "files" else "files", medium]
    for step, name in enumerate(mediums):
        with SyncCheckpointEngine(
            place, storage=StorageOptions(io=io, medium=name, chunk_bytes=1 << 16), keep_last=2
        ) as engine:
            if step:
                restored = state(-1)
                assert engine.restore(restored) is not None
                assert same(restored, step - 1)
            engine.checkpoint(state(step), step=step).result()
            assert same(load_sync(place), step)  # a reader beside it
    assert [info.step for info in list_checkpoints(place)] == [2, 1]
    assert same(load_sync(place, step=1), 1)


def test_states_grow_and_slots_with_them(place: Path) -> None:
    with SyncCheckpointEngine(place, storage=StorageOptions(medium="mapped", chunk_bytes=1 << 16)) as engine:
        for step, floats in enumerate((10, 100_000, 30, 300_000)):
            engine.checkpoint(state(step, floats), step=step).result()
            assert same(load_sync(place), step, floats)


def test_what_kind_of_memory_it_is_is_said(place: Path, shared_memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="pccheck_async")
    with SyncCheckpointEngine(place, storage=StorageOptions(medium="mapped")) as engine:
        emulated = place.is_relative_to(shared_memory)
        words = "emulated, and nothing survives the power" if emulated else "page cache, which msync flushes"
        assert kind_of_folder(place) == ("emulated" if emulated else "cached")
        assert words in engine.statistics().io
        assert words in caplog.text


def test_only_persistent_memory_is_mapped_by_itself(place: Path) -> None:
    with SyncCheckpointEngine(place) as engine:
        assert "mapped" not in engine.statistics().io
    with pytest.raises(ValueError, match="medium is 'auto', 'files' or 'mapped', not 'pmem'"):
        SyncCheckpointEngine(place, storage=StorageOptions(medium="pmem"))  # type: ignore[arg-type]


def test_a_file_that_somebody_truncated_fails_its_checkpoint_only(place: Path) -> None:
    with SyncCheckpointEngine(place, storage=StorageOptions(medium="mapped", chunk_bytes=1 << 16)) as engine:
        for step in range(2):
            engine.checkpoint(state(step), step=step).result()
        for path in place.glob("slot-*"):
            os.truncate(path, PAGE_BYTES)
        with pytest.raises(WriteError):
            engine.checkpoint(state(2), step=2).result()


def test_a_store_whose_folder_was_removed_says_so(place: Path) -> None:
    with SyncCheckpointEngine(place, storage=StorageOptions(medium="mapped")) as engine:
        engine.checkpoint(state(0), step=0).result()
        for path in place.iterdir():
            path.unlink()
        with pytest.raises(OSError, match="removed while the store was open"):
            engine.checkpoint(state(1), step=1).result()


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    with Mounted(tmp_path, "tmpfs", 4 << 20) as mounted:
        yield mounted.place


@pytest.mark.root
@pytest.mark.slow
def test_a_full_filesystem_keeps_the_last_checkpoint(small_tmpfs: Path) -> None:
    folder = small_tmpfs / "store"
    with SyncCheckpointEngine(folder, storage=StorageOptions(medium="mapped"), max_in_flight=1) as engine:
        engine.checkpoint(state(0), step=0).result()
        with pytest.raises(StoreFullError):
            engine.checkpoint(state(1, 2_000_000), step=1).result()
        engine.checkpoint(state(2), step=2).result()
    assert same(load_sync(folder), 2)


@pytest.mark.slow
def test_a_forked_child_has_none_of_it(place: Path) -> None:
    with SyncCheckpointEngine(place, storage=StorageOptions(medium="mapped")) as engine:
        engine.checkpoint(state(0), step=0).result()
        child = os.fork()
        if child == 0:
            maps = Path("/proc/self/maps").read_text()
            os._exit(any(str(place) in line for line in maps.splitlines()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert str(place) in Path("/proc/self/maps").read_text()
        engine.checkpoint(state(1), step=1).result()
    assert str(place) not in Path("/proc/self/maps").read_text()


def test_a_forked_child_that_drops_a_mapping_of_its_parent_keeps_its_own_memory_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(PAGE_BYTES))
    with open(tmp_path / "file", "r+b") as file:
        mapped = [map_file(file.fileno(), PAGE_BYTES, sync=False)]
    address = address_of(mapped[0])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
    fixed_unless_taken = 0x100000

    def check() -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed_unless_taken
        assert libc.mmap(address, PAGE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
        ctypes.memmove(address, b"mine", 4)
        mapped.clear()
        gc.collect()
        assert ctypes.string_at(address, 4) == b"mine"

    assert passes_in_a_forked_child(check)
    mapped.clear()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_what_is_larger_than_a_store_at_once_is_stored_by_threads(place: Path, io: str) -> None:
    async def main() -> None:
        async with opened(place, io) as medium:
            nbytes = 1 << 20
            file = await medium.reserve("slot-000", 2 * nbytes)
            data = aligned_buffer(nbytes)
            data[:] = os.urandom(nbytes)
            await asyncio.gather(medium.write(file, 0, data), medium.write(file, nbytes, data))
            staged = medium.stage(file, nbytes, PAGE_BYTES)
            assert staged is not None
            staged[:4] = b"here"
            await medium.make_durable([(file, [(nbytes, staged)])])
            found = aligned_buffer(2 * nbytes)
            assert await medium.read(file, 0, found) == 2 * nbytes
            assert bytes(found) == bytes(data) + b"here" + bytes(data[4:])

    asyncio.run(main())


def test_chunks_are_captured_where_they_rest(place: Path, io: IO) -> None:
    """Once a slot is there, no staging buffer is taken: a state of 32 chunks goes through a pool of one buffer."""
    with SyncCheckpointEngine(
        place, storage=StorageOptions(io=io, medium="mapped", chunk_bytes=1 << 16, host_memory=1 << 16)
    ) as engine:
        for step in range(4):
            engine.checkpoint(state(step, 500_000), step=step).result()
            assert same(load_sync(place), step, 500_000)
        assert engine.statistics().pool_waits < 4 * 31  # each but the first checkpoint takes one for its manifest
