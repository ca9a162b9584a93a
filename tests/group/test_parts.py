"""Reading the parts of many ranks: one medium, one set of threads, one pool, and a locked descriptor for each part."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from pccheck_async import CheckpointError, Group, SyncCheckpointEngine, load_sync, open_checkpoint, stores
from pccheck_async.errors import CorruptStoreError, ReadError
from pccheck_async.integrations import dcp
from pccheck_async.store import chunks, rank_name
from pccheck_async.transfer import BufferPool, available_descriptors
from tests.group.test_sharded import mesh_of
from tests.support.group_folders import save_in_group, state_of_rank
from tests.support.limits import limited_descriptors
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow
WORLD = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "group"
    save_in_group(folder, WORLD, 1)
    return folder


def opened() -> list[str]:
    """Return what the descriptors of this process lead to."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # of the listing itself
            continue
    return found


def test_all_parts_share_their_threads_and_each_has_one_descriptor_that_is_locked(made: Path) -> None:
    with open_checkpoint(made / rank_name(0)) as alone:
        threads = threading.active_count()
        assert alone["step"] == 1
    with open_checkpoint(made) as checkpoint:
        assert threading.active_count() <= threads
        in_folder = [path for path in opened() if path.startswith(os.fspath(made))]
        assert sorted(in_folder) == [os.fspath(made / rank_name(rank) / "slot-000") for rank in range(WORLD)]
        for path in in_folder:
            fd = os.open(path, os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(fd)
        assert torch.equal(checkpoint["weights"], state_of_rank(0, 1)["weights"])
    assert not [path for path in opened() if path.startswith(os.fspath(made))]


def test_few_descriptors_are_enough(made: Path) -> None:
    with limited_descriptors(WORLD + 16):
        assert load_sync(made, rank=WORLD - 1)["rank"] == WORLD - 1


def test_too_few_descriptors_are_an_error_with_the_number_before_anything_is_read(made: Path) -> None:
    with (
        limited_descriptors(WORLD + 2),
        pytest.raises(ReadError, match=rf"{WORLD - 1} and 4 more, .* may open \d+ more") as raised,
    ):
        load_sync(made)
    assert raised.value.errno == errno.EMFILE
    assert "ulimit -n" in str(raised.value)
    assert not [path for path in opened() if path.startswith(os.fspath(made))]


@pytest.mark.usefixtures("nothing_left_behind")
def test_an_opening_that_fails_leaves_no_descriptor_and_no_thread(made: Path) -> None:
    for free in range(WORLD):  # wherever the first one is that cannot be had
        with limited_descriptors(free), pytest.raises(CheckpointError, match="ulimit -n"):
            open_checkpoint(made)


def test_dcp_holds_one_part_at_a_time(made: Path) -> None:
    with limited_descriptors(16):
        metadata = dcp.StorageReader(made).read_metadata()
    assert metadata.state_dict_metadata


def test_descriptors_that_are_left(made: Path) -> None:
    with limited_descriptors(20):
        before = available_descriptors()
        with open(made / "group.json", "rb"):
            assert available_descriptors() == before - 1
        assert before <= 20


def test_too_few_descriptors_are_no_damage(tmp_path: Path) -> None:
    def restore(group: Group) -> tuple[str, list[int]]:
        state = {"w": torch.zeros(3), "step": 0}
        with SyncCheckpointEngine(tmp_path, group=group, keep_last=3) as engine:
            with limited_descriptors(4), pytest.raises(ReadError, match="ulimit -n") as caught:
                engine.restore(state)
            engine.restore(state)
            assert state["step"] == 2
            engine.checkpoint(state, step=3).result()
            return str(caught.value), [info.step for info in engine.checkpoints()]

    def save(group: Group) -> None:
        with SyncCheckpointEngine(tmp_path, group=group, keep_last=3) as engine:
            for step in (1, 2):
                engine.checkpoint({"w": torch.ones(3), "step": step}, step=step).result()

    run_ranks(2, save)
    ((_, steps),) = run_ranks(1, restore)
    assert steps == [3, 2, 1]


def test_a_description_of_all_ranks_says_that_a_part_is_damaged(tmp_path: Path) -> None:
    save_in_group(tmp_path / "group", 2, 1)
    slot = tmp_path / "group" / rank_name(1) / "slot-000"
    data = bytearray(slot.read_bytes())
    data[data.rindex(b"weights")] ^= 1
    slot.write_bytes(data)
    for work in (stores.describe, load_sync, open_checkpoint):
        with pytest.raises(CorruptStoreError, match=r"the part of rank 1: .* manifest .* is damaged"):
            work(tmp_path / "group")
    slot.unlink()
    with pytest.raises(CorruptStoreError, match=r"the part of rank 1: .* is missing"):
        stores.describe(tmp_path / "group")


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tensor that lies on two ranks in one chunk each, of which that of rank 1 is larger."""
    folder = tmp_path_factory.mktemp("uneven")
    (folder / "mesh").mkdir()

    def save(group: Group) -> None:
        torch.set_num_threads(1)
        tensor = distribute_tensor(torch.arange(1 << 20), mesh_of(folder / "mesh", group), [Shard(0)])
        own = torch.ones(1000 + 100_000 * group.rank)
        with SyncCheckpointEngine(folder / "group", group=group) as engine:
            engine.checkpoint({"split": tensor, "own": own}, step=1).result(60)

    run_ranks(2, save)
    return folder / "group"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("rank", [0, 1])
def test_one_buffer_is_enough_whatever_is_kept_in_it(uneven: Path, rank: int) -> None:
    """A chunk that a lazy reader keeps takes the only buffer: the parts of other ranks need one, too."""
    state = load_sync(uneven, rank=rank, host_memory=1 << 21)
    assert torch.equal(state["split"], torch.arange(1 << 20))
    with open_checkpoint(uneven, rank=rank, host_memory=1 << 21) as checkpoint:
        for _ in range(2):
            assert torch.equal(checkpoint["own"], state["own"])
            assert torch.equal(checkpoint["split"], state["split"])
    assert not stores.compare(uneven, uneven).differences


def test_all_parts_are_read_with_one_pool(uneven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    def make(nbytes: int, buffer_bytes: int) -> BufferPool:
        made.append(buffer_bytes)
        return BufferPool(nbytes, buffer_bytes)

    monkeypatch.setattr(chunks, "BufferPool", make)
    load_sync(uneven, rank=0, host_memory=1 << 21)
    assert len(made) == 1
    assert not stores.describe(uneven, rank=0).differing
    assert len(made) <= 2
