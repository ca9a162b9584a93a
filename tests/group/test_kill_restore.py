"""SIGKILL of ranks while they restore onto another layout: storage stays as it is, and the next restore is whole."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from pccheck_async import Group, GroupError, SyncCheckpointEngine
from tests.group.test_sharded import mesh_of
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("dynamo"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]
TENSORS, SHAPE = 12, (511, 257)


def whole(number: int) -> Tensor:
    return torch.arange(float(SHAPE[0] * SHAPE[1])).reshape(SHAPE) + number


def save(folder: Path, group: Group) -> None:
    mesh = mesh_of(folder, group)
    state = {f"w{n}": distribute_tensor(whole(n), mesh, [Shard(n % 2)]) for n in range(TENSORS)}
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        for step in (1, 2):
            engine.checkpoint(state | {"own": group.rank}, step=step).result()


def restore(folder: Path, placement: Placement, group: Group) -> None:
    mesh = mesh_of(folder, group)
    zeros = {f"w{n}": distribute_tensor(torch.zeros(SHAPE), mesh, [placement]) for n in range(TENSORS)}
    (folder / f"ready{group.rank}").touch()
    with SyncCheckpointEngine(folder / "run", group=group) as engine:
        restored = engine.restore(zeros | {"own": -1})
    assert restored is not None
    assert restored.step == 2
    for number in range(TENSORS):
        local = distribute_tensor(whole(number), mesh, [placement]).to_local()
        assert torch.equal(zeros[f"w{number}"].to_local(), local)


def restore_or_fail(folder: Path, placement: Placement, group: Group) -> None:
    with suppress(GroupError, RuntimeError):  # of a rank that is gone; the latter from gloo
        restore(folder, placement, group)


def contents(folder: Path) -> dict[str, bytes]:
    """Return digests of all files but the empty stores that ranks beyond the old world make when they open."""
    there = (path for path in folder.rglob("*") if path.is_file())
    files = (path for path in there if path.parent.name not in ("rank-00002", "rank-00003"))
    return {str(path.relative_to(folder)): blake2b(path.read_bytes()).digest() for path in files}


class Killer:
    """Kills one rank, or all, at a random moment of a restore; what is left a moment later, as a launcher does."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.killed: Counter[str] = Counter()

    def __call__(self, pids: list[int]) -> None:
        deadline = time.monotonic() + 20
        while not all((self.folder / f"ready{rank}").exists() for rank in range(len(pids))):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(self.random.uniform(0, 0.08))
        victims = self.random.choice([pids, pids[:1], [self.random.choice(pids)]])
        for each in (victims, pids):
            for pid in each:
                os.kill(pid, signal.SIGKILL)  # none is reaped yet
            time.sleep(self.random.uniform(0, 0.05))
        self.killed[f"{len(victims)} of {len(pids)}"] += 1


def storm(tmp_path: Path, kills: int, seed: int) -> Counter[str]:
    run_ranks(2, partial(save, tmp_path))
    before, killer, ended = contents(tmp_path / "run"), Killer(tmp_path, seed), Counter[str]()
    for _ in range(kills):
        world, placement = killer.random.choice([1, 3, 4]), killer.random.choice([Shard(0), Shard(1), Replicate()])
        for path in (tmp_path / "rendezvous", *tmp_path.glob("ready*")):
            path.unlink(missing_ok=True)
        statuses: list[int] = []
        run_ranks(world, partial(restore_or_fail, tmp_path, placement), meanwhile=killer, statuses=statuses)
        assert {*statuses} <= {0, -signal.SIGKILL}
        ended.update("killed" if status == -signal.SIGKILL else "ended" for status in statuses)
        assert contents(tmp_path / "run") == before
    (tmp_path / "rendezvous").unlink(missing_ok=True)
    run_ranks(3, partial(restore, tmp_path, Shard(0)))
    assert contents(tmp_path / "run") == before
    return killer.killed + ended


def test_a_restore_that_is_killed_changes_nothing_on_storage(tmp_path: Path) -> None:
    assert storm(tmp_path, 4, seed=1)["killed"] > 0


@pytest.mark.campaign
def test_many_restores_that_are_killed(tmp_path: Path) -> None:
    print(f"\n{dict(storm(tmp_path, 300, seed=2))}")
