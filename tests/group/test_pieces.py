"""Readers of parts of tensors that lie on several ranks read, and verify, the MiBs that hold what they want."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from pccheck_async import Group, SyncCheckpointEngine, load_sync, open_checkpoint, stores
from pccheck_async.errors import DamagedError
from pccheck_async.format.record import slot_name
from pccheck_async.group import Place, read_place
from pccheck_async.store import rank_name
from pccheck_async.transfer.operations import Operations
from tests.group.test_sharded import mesh_of
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("dynamo"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded", "ignore:torch.distributed is disabled"),
]

MIB = 1 << 20
ROWS = (12_289, 1024)
"""Of 4 KiB; no world divides their number."""
EVEN_ROWS = (12_288, 1024)
LONG_ROWS = (8, 1 << 20)
"""Of 4 MiB."""


def whole(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(float(shape[0] * shape[1]), dtype=torch.float32).reshape(shape)


def payload_of(listing: Place) -> dict[str, int]:
    """Return the bytes of the newest checkpoint's parts, by the paths of their slots."""
    parts = listing.parts(listing.complete[0].key)
    return {
        str(listing.path / rank_name(rank) / slot_name(part.entry.slot)): part.entry.nbytes
        for rank, part in parts.items()
    }


@contextmanager
def counted(folder: Path) -> Iterator[Callable[[], int]]:
    """Count the bytes of payloads that this process reads, where the system is asked for them."""
    payloads, read = payload_of(read_place(folder)), Operations.read
    count = 0

    async def counting(self: Operations, fd: int, offset: int, into: memoryview) -> int:
        nonlocal count
        got = await read(self, fd, offset, into)
        if offset < payloads.get(os.readlink(f"/proc/self/fd/{fd}"), 0):
            count += got
        return got

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Operations, "read", counting)
        yield lambda: count


def save(folder: Path, shape: tuple[int, ...], group: Group) -> None:
    mesh = mesh_of(folder, group)
    with SyncCheckpointEngine(folder / "run", group=group, keep_last=2) as engine:
        state = {"w": distribute_tensor(whole(shape), mesh, [Shard(0)]), "own": torch.full((100,), float(group.rank))}
        engine.checkpoint(state, step=1).result()


Saved = Callable[[int, tuple[int, ...]], Path]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Stores by the world that saved them and their shape, each saved once."""

    @cache
    def original(world: int, shape: tuple[int, ...]) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        run_ranks(world, partial(save, folder, shape))
        return folder / "run"

    return original


@pytest.fixture
def saved(originals: Saved, tmp_path: Path) -> Saved:
    """Gives a test a store of its own, which it may write to and damage."""
    return lambda world, shape: shutil.copytree(originals(world, shape), tmp_path / "run")


def restore(folder: Path, shape: tuple[int, ...], placement: Shard, group: Group) -> int:
    """Return how many bytes of payloads this rank read."""
    mesh = mesh_of(folder, group)
    expected = whole(shape).chunk(group.world_size, placement.dim)[group.rank]
    local = torch.zeros(expected.shape)
    sharded = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )
    state = {"w": sharded, "own": torch.zeros(100)}
    with counted(folder / "run") as count, SyncCheckpointEngine(folder / "run", group=group) as engine:
        assert engine.restore(state, private="modulo") is not None
        assert torch.equal(local, expected)
        return count()


def flip(run: Path, rank: int, at: int) -> None:
    """Damage a byte of a rank's part."""
    path = next(path for path in payload_of(read_place(run)) if f"/{rank_name(rank)}/" in path)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.campaign), 4])
def test_a_slice_of_a_mebibyte_reads_three_at_most(saved: Saved, world: int) -> None:
    run, full = saved(world, ROWS), whole(ROWS)
    with counted(run) as count, open_checkpoint(run) as opened:
        stored = opened.tensor("w")
        for low in (0, 3_000, -(-ROWS[0] // world) - 100, ROWS[0] - 256):  # the third one lies on two ranks
            before, told = count(), opened.bytes_read
            assert torch.equal(stored[low : low + 256], full[low : low + 256])
            assert MIB <= count() - before <= 3 * MIB, (low, count() - before)
            assert low == 0 or opened.bytes_read - told == count() - before  # first come all records and manifests
        before = count()
        assert torch.equal(stored[:], full)
        assert count() - before < full.nbytes + world * MIB


@pytest.mark.parametrize(
    ("world", "shape", "most"),
    [
        *(pytest.param(world, ROWS, 1.1, marks=pytest.mark.campaign) for world in (1, 2)),
        (3, ROWS, 1.1),
        pytest.param(8, EVEN_ROWS, 1.1, marks=pytest.mark.campaign),
        (8, ROWS, 1.2),  # 1 MiB of 6
    ],
)
def test_rows_on_other_ranks_are_read_once(
    saved: Saved, tmp_path: Path, world: int, shape: tuple[int, ...], most: float
) -> None:
    saved(4, shape)
    reads = run_ranks(world, partial(restore, tmp_path, shape, Shard(0)))
    nbytes = whole(shape).nbytes
    print(f"rows of {shape}, 4 -> {world}: {sum(reads) / nbytes:.3f} of the bytes, by rank {reads}")
    assert nbytes <= sum(reads) <= most * nbytes


@pytest.mark.parametrize(
    ("world", "shape"),
    [*(pytest.param(world, ROWS, marks=pytest.mark.campaign) for world in (1, 2)), (3, ROWS), (8, EVEN_ROWS)],
)
def test_ranks_that_load_their_rows_read_them_once(saved: Saved, world: int, shape: tuple[int, ...]) -> None:
    run, full = saved(4, shape), whole(shape)
    total = 0
    for rank in range(world):
        with counted(run) as count, open_checkpoint(run) as opened:
            low, high = (shape[0] * number // world for number in (rank, rank + 1))
            assert torch.equal(opened.tensor("w")[low:high], full[low:high])
            total += count()
    print(f"rows of {shape}, 4 -> {world}, loaded: {total / full.nbytes:.3f} of the bytes")
    assert full.nbytes <= total <= 1.1 * full.nbytes


@pytest.mark.parametrize(
    ("world", "shape", "most"),
    [(4, LONG_ROWS, 1.1), pytest.param(3, LONG_ROWS, 1.6, marks=pytest.mark.campaign), (2, ROWS, 2.1)],
)
def test_columns(saved: Saved, tmp_path: Path, world: int, shape: tuple[int, ...], most: float) -> None:
    """Of rows shorter than a MiB every reader reads all."""
    saved(4, shape)
    reads = run_ranks(world, partial(restore, tmp_path, shape, Shard(1)))
    nbytes = whole(shape).nbytes
    print(f"columns of {shape}, 4 -> {world}: {sum(reads) / nbytes:.3f} of the bytes")
    assert nbytes <= sum(reads) <= most * nbytes


def test_the_same_ranks_read_their_own_parts_whole(saved: Saved, tmp_path: Path) -> None:
    run = saved(2, ROWS)
    reads = run_ranks(2, partial(restore, tmp_path, ROWS, Shard(0)))
    assert sum(reads) == sum(payload_of(read_place(run)).values())


def test_damage_is_found_by_who_reads_it(saved: Saved) -> None:
    run, full = saved(2, ROWS), whole(ROWS)
    half = -(-ROWS[0] // 2)
    flip(run, 1, 5 * MIB + 7)
    damaged = half + 5 * MIB // 4096
    with open_checkpoint(run) as opened:
        stored = opened.tensor("w")
        for low, high in ((0, damaged - 200), (damaged + 300, ROWS[0])):
            assert torch.equal(stored[low:high], full[low:high])
        for _ in range(2):
            with pytest.raises(
                DamagedError, match=r"chunk 0 \(bytes 5242880 to 6291456\) of the checkpoint is damaged"
            ):
                stored[damaged]
        with pytest.raises(DamagedError, match="chunk 0 "):
            stored.read()
        assert torch.equal(stored[0], full[0])
    with pytest.raises(DamagedError, match="chunk 0 "):
        load_sync(run, step=1)
    found = stores.verify(run)
    assert not found.whole
    (damage,) = [each for one in found.checkpoints for each in one.damage]
    assert (damage.what, damage.offset, damage.reason) == ("chunk 0", 0, "checksum mismatch")
    assert any(leaf.startswith("w") for leaf in damage.leaves)


def refused(folder: Path, placement: Placement, group: Group) -> str:
    mesh = mesh_of(folder, group)
    state = {"w": distribute_tensor(torch.full(ROWS, -1.0), mesh, [placement]), "own": torch.zeros(100)}
    with SyncCheckpointEngine(folder / "run", group=group) as engine, pytest.raises(DamagedError) as caught:
        engine.restore(state, step=1, private="modulo")
    return str(caught.value)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.campaign), 3])
def test_no_rank_restores_what_one_finds_damaged(saved: Saved, tmp_path: Path, world: int) -> None:
    run = saved(2, ROWS)
    flip(run, 1, 5 * MIB + 7)
    told = run_ranks(world, partial(refused, tmp_path, Shard(0)))
    assert all("chunk 0 (bytes" in each for each in told)


def copied(folder: Path, group: Group) -> None:
    mesh = mesh_of(folder, group)
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        tied = distribute_tensor(whole((300, 7)), mesh, [Shard(0)])
        state = {"w": tied, "tied": tied, "same": distribute_tensor(torch.ones(5), mesh, [Replicate()]), "n": 3}
        engine.checkpoint(state, step=1).result()


def test_small_parts_have_pieces(tmp_path: Path) -> None:
    """They are one chunk that is captured inline."""
    run_ranks(2, partial(copied, tmp_path))
    run = tmp_path / "run"
    assert stores.verify(run).whole
    stores.export(run, tmp_path / "w.safetensors", to="safetensors")
    assert torch.equal(load_sync(run)["w"], whole((300, 7)))
