"""A group with a tier in memory and a drain: one line on the disks decides which checkpoints count in all tiers."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest

pytest.importorskip("obstore")

import torch

from pccheck_async import Drain, Group, MemoryTier, SyncCheckpointEngine
from pccheck_async.bucket import BucketMedium, Owner
from pccheck_async.engine.drain_owner import DrainOwner
from pccheck_async.errors import StoreError
from pccheck_async.testing.probe import probe
from tests.support.lying_objects import FolderOfObjects, LyingObjects, use_in_drains
from tests.support.ranks import RankFailedError, run_ranks, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("machine_asked_once"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded", "ignore:the checkpoint of step"),
]
Where = Literal["memory", "replicas", "disk", "remote"]


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a bucket in a folder, which forked processes may use."""
    use_in_drains(LyingObjects(FolderOfObjects(tmp_path / "bucket")), monkeypatch)
    return f"s3://folder{tmp_path}/bucket"


def in_bucket(tmp_path: Path) -> list[int]:
    _, found = asyncio.run(BucketMedium(LyingObjects(FolderOfObjects(tmp_path / "bucket"))).look())
    return [record.entry.step for _, record in found if record.parts]


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {"tensor": torch.arange(500) + 1000 * step + rank, "step": step, "rank": rank}


@dataclass
class Hosts:
    """Hosts, each with a folder and a memory of its own, on which the ranks of runs live and die."""

    folder: Path
    memory: Path
    url: str
    settings: dict[str, Any] = field(default_factory=dict)

    def disk(self, host: int) -> Path:
        return self.folder / f"host{host}" / "run"

    def tier(self, host: int) -> MemoryTier:
        path = self.memory / f"host{host}"
        path.mkdir(exist_ok=True)
        replicas = self.settings.get("replicas", 0)
        return MemoryTier(interval=1, path=str(path), replicas=replicas)

    def lose_memory(self, host: int) -> None:
        shutil.rmtree(self.memory / f"host{host}", ignore_errors=True)

    def lose(self, host: int) -> None:
        self.lose_memory(host)
        shutil.rmtree(self.disk(host).parent, ignore_errors=True)

    def live(
        self,
        places: Sequence[int],
        *saves: tuple[int, Where],
        step: int | None = None,
        closes: bool = False,
        then: Callable[[SyncCheckpointEngine, int], object] = lambda engine, rank: None,
    ) -> list[tuple[int, str]]:
        """Restore, save steps in a tier each, and die, or close, with one rank on each of these hosts.

        Returns what each rank restored, and from which tier: (-1, "none") for nothing.
        """
        with TemporaryDirectory() as name:
            marks, world = Path(name), len(places)

            def work(group: Group) -> tuple[int, str]:
                rank, host = group.rank, places[group.rank]
                drain = Drain(self.url, keep_last=3)
                self.disk(host).parent.mkdir(parents=True, exist_ok=True)
                memory = self.tier(host) if self.settings.get("memory", True) else None
                engine = SyncCheckpointEngine(
                    self.disk(host), group=group, memory=memory, drain=drain, save_last=False,
                    keep_last=self.settings.get("keep_last", 1),
                )  # fmt: skip
                engine.open()
                found = -1, "none"
                state = state_of(rank, -1)
                restores = self.settings.get("restores", True)
                if restores and (restored := engine.restore(state, step=step, private="modulo")) is not None:
                    assert torch.equal(state["tensor"], state_of(state["rank"], restored.step)["tensor"])
                    assert state["step"] == restored.step
                    found = restored.step, restored.source
                for number, where in saves:
                    tier: Literal["memory", "disk"] = "memory" if where in ("memory", "replicas") else "disk"
                    pending = engine.checkpoint(state_of(rank, number), step=number, tier=tier)
                    if memory is not None:
                        pending.wait_reached("memory", 20)
                    pending.wait_reached(where, 20)
                then(engine, rank)
                if closes:
                    engine.close(30)
                (marks / str(rank)).touch()
                wait_for(*(marks / str(each) for each in range(world)))
                return found  # and the process ends without closing it

            found: list[tuple[int, str]] = run_ranks(world, work)
        return found


async def _never(*_: object) -> None:
    await asyncio.sleep(1000)


@pytest.fixture
def hosts(tmp_path: Path, shared_memory: Path, url: str) -> Hosts:
    return Hosts(tmp_path, shared_memory, url)


def test_killed_processes_go_on_from_memory_and_lost_hosts_from_the_bucket(hosts: Hosts, tmp_path: Path) -> None:
    assert hosts.live([0, 1], (1, "remote"), (2, "disk"), (3, "memory")) == [(-1, "none")] * 2
    assert hosts.live([0, 1], (4, "memory"), (5, "remote"), (6, "memory")) == [(3, "memory")] * 2
    assert in_bucket(tmp_path)[0] == 5
    hosts.lose(1)  # and its half of step 6
    own, lost = hosts.live([0, 1])
    assert own in ((5, "memory"), (5, "disk"))  # not all of it from the bucket
    assert lost == (5, "remote")
    hosts.lose(0)
    hosts.lose(1)
    assert hosts.live([0, 1]) == [(5, "remote")] * 2
    assert hosts.live([0, 1], (7, "memory")) == [(5, "remote")] * 2
    assert hosts.live([0, 1], (8, "remote")) == [(7, "memory")] * 2
    assert in_bucket(tmp_path)[0] == 8
    hosts.lose_memory(0)
    hosts.lose_memory(1)
    assert hosts.live([0, 1]) == [(8, "disk")] * 2


@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks_reads_memory_disk_and_bucket(hosts: Hosts, world: int) -> None:
    hosts.live([0, 1], (1, "remote"), (2, "memory"))
    places = [0, 1, 1][:world] if world > 1 else [0]
    found = hosts.live(places, (3, "memory"))
    # One rank alone does not see the other host's memory.
    assert {step for step, _ in found} == {1 if world == 1 else 2}
    assert {step for step, _ in hosts.live(places)} == {3}


def test_closing_saves_what_is_in_memory_alone_in_the_bucket_too(hosts: Hosts, tmp_path: Path) -> None:
    hosts.live([0, 1], (1, "disk"), (2, "memory"), closes=True)
    assert in_bucket(tmp_path)[0] == 2
    hosts.lose(0)
    hosts.lose(1)
    assert hosts.live([0, 1]) == [(2, "remote")] * 2


def test_an_abandoned_branch_does_not_come_back_from_any_tier(hosts: Hosts, tmp_path: Path) -> None:
    """Step 2 went on from step 1, and so does step 9, which is saved later."""
    hosts.settings["keep_last"] = 3
    hosts.live([0, 1], (1, "remote"), (2, "remote"))
    for host in (0, 1):
        hosts.lose(host)
    assert hosts.live([0, 1], (9, "memory"), step=1) == [(1, "remote")] * 2
    assert hosts.live([0, 1]) == [(9, "memory")] * 2
    with pytest.raises(RankFailedError, match="NoCheckpointError"):
        hosts.live([0, 1], step=2)
    assert hosts.live([0, 1], (10, "remote")) == [(9, "memory")] * 2
    assert in_bucket(tmp_path)[0] == 10


def test_hosts_that_come_back_do_not_go_on_from_what_others_have_left_behind(hosts: Hosts) -> None:
    hosts.live([0, 1], (1, "remote"), *((step, "memory") for step in range(2, 8)))  # with larger counters than step 12
    assert hosts.live([2, 3], (12, "remote")) == [(1, "remote")] * 2
    assert hosts.live([0, 1], (13, "memory")) == [(12, "remote")] * 2
    assert hosts.live([0, 1]) == [(13, "memory")] * 2


def test_memory_counts_where_others_have_copied_nothing_yet(hosts: Hosts) -> None:
    hosts.live([0, 1], (1, "remote"), (2, "memory"), (3, "memory"))
    assert hosts.live([2, 3], (12, "memory")) == [(1, "remote")] * 2
    assert hosts.live([0, 1], (4, "remote")) == [(3, "memory")] * 2
    assert hosts.live([2, 3]) == [(4, "remote")] * 2


@pytest.mark.parametrize("verb", ["remove", "reject"])
def test_what_is_removed_or_rejected_is_so_in_all_tiers(hosts: Hosts, tmp_path: Path, verb: str) -> None:
    hosts.settings["keep_last"] = 2

    def drop(engine: SyncCheckpointEngine, _: int) -> None:
        getattr(engine, verb)(step=2)

    hosts.live([0, 1], (1, "remote"), (2, "remote"), then=drop, closes=True)
    assert in_bucket(tmp_path) == [1]
    assert [step for step, _ in hosts.live([0, 1])] == [1, 1]
    hosts.lose(0)
    assert [step for step, _ in hosts.live([0, 1])] == [1, 1]


def test_a_restore_from_the_bucket_then_memory_alone_is_no_other_branch(hosts: Hosts, tmp_path: Path) -> None:
    """The disks are empty, and the run that saved in memory alone has its line there."""
    hosts.live([0, 1], (1, "remote"), (2, "remote"))
    for host in (0, 1):
        hosts.lose(host)
    assert hosts.live([0, 1], (3, "memory")) == [(2, "remote")] * 2
    hosts.lose_memory(0)
    assert hosts.live([0, 1], (4, "remote")) == [(2, "remote")] * 2
    assert in_bucket(tmp_path)[0] == 4


def test_the_line_goes_on_where_that_of_the_bucket_ends(hosts: Hosts) -> None:
    """Else what its older checkpoints go on from is forgotten, and they do not count any more."""
    hosts.live([0, 1], (1, "remote"))
    hosts.live([2, 3], (2, "remote"))
    assert hosts.live([4, 5], (3, "remote")) == [(2, "remote")] * 2
    assert hosts.live([4, 5], step=1) == [(1, "remote")] * 2


def test_what_was_removed_does_not_come_from_the_bucket_either(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Owner, "amend", _never)  # the bucket has it for long

    def remove(engine: SyncCheckpointEngine, rank: int) -> None:
        engine.remove(step=2)
        restored = engine.restore(state_of(rank, -1))
        assert restored is not None
        assert restored.step == 1

    hosts.settings["keep_last"] = 2
    hosts.live([0, 1], (1, "remote"), (2, "remote"), then=remove)


@pytest.mark.parametrize(("memory", "lost"), [(True, True), (True, False), (False, False)])
def test_a_bucket_that_was_not_told_of_the_line_is_no_other_branch(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, memory: bool, lost: bool
) -> None:
    hosts.settings |= {"keep_last": 3, "memory": memory}
    hosts.live([0, 1], (1, "remote"), (2, "remote"), (3, "remote"))
    for host in (0, 1) if lost else ():
        hosts.lose(host)
    with monkeypatch.context() as patch:
        patch.setattr(DrainOwner, "_write_line", _never)
        where: Where = "memory" if memory else "disk"
        assert {step for step, _ in hosts.live([0, 1], (4, where), step=1)} == {1}
    for _ in range(2):
        assert hosts.live([0, 1]) == [(4, where)] * 2


def test_ranks_that_began_anew_go_on_from_their_own_memory(hosts: Hosts) -> None:
    hosts.live([0, 1], (1, "remote"))
    hosts.lose(0)
    hosts.lose(1)

    def told(engine: SyncCheckpointEngine, _: int) -> None:
        drain = probe(engine).core.assembly.drain
        assert drain is not None
        while drain.owner is not None and drain.owner.begins:
            time.sleep(0.01)

    hosts.settings["restores"] = False
    hosts.live([0, 1], (4, "memory"), then=told)
    hosts.settings["restores"] = True
    assert hosts.live([0, 1]) == [(4, "memory")] * 2


@pytest.mark.parametrize("verb", ["remove", "reject"])
def test_what_is_in_the_bucket_alone_is_removed_and_rejected_too(hosts: Hosts, tmp_path: Path, verb: str) -> None:
    def change(engine: SyncCheckpointEngine, rank: int) -> None:
        engine.pin(step=1)
        for step in (2, 3):
            engine.checkpoint(state_of(rank, step), step=step).wait_reached("remote", 20)
        getattr(engine, verb)(step=2)
        for step in (2, 3) if verb == "reject" else (2,):
            with pytest.raises(StoreError):
                engine.restore(state_of(rank, -1), step=step)

    hosts.live([0, 1], (1, "remote"), then=change, closes=True)
    assert in_bucket(tmp_path) == ([1] if verb == "reject" else [3, 1])
    assert {step for step, _ in hosts.live([0, 1])} == {1 if verb == "reject" else 3}


def test_copies_on_other_hosts_come_before_the_bucket(hosts: Hosts) -> None:
    hosts.settings["replicas"] = 1
    hosts.live([0, 1], (1, "remote"), (5, "replicas"))
    hosts.lose(1)
    own, lost = hosts.live([0, 1], (6, "replicas"))
    assert own == (5, "memory")
    assert lost == (5, "replicas")
    hosts.lose(0)
    hosts.lose(1)
    assert hosts.live([0, 1]) == [(1, "remote")] * 2


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(1, 20))])
def test_what_was_saved_last_is_restored(hosts: Hosts, tmp_path: Path, seed: int) -> None:
    """Random lives of two ranks on three hosts, which lose memories and disks, and come back."""
    draw, step, parents = random.Random(seed), 0, dict[int, int]()
    memory, disk, tips = dict[int, int](), dict[int, int](), dict[int, int]()
    kinds = set[str]()

    def line_of(tip: int) -> list[int]:
        line = [tip] if tip > 0 else []
        while line and (before := parents[line[-1]]) > 0:
            line.append(before)
        return line

    for life in range(7):
        places = draw.choice([[0, 1], [0, 1], [2, 2]])
        used, bucket = sorted({*places}), next(iter(in_bucket(tmp_path)), -1)
        saves: list[tuple[int, Where]] = [
            (step + 1 + each, draw.choice(("memory", "memory", "disk", "remote"))) for each in range(draw.randrange(4))
        ]
        whole_memory = min(memory.get(host, -1) for host in used)
        tip = max(tips.get(host, -1) for host in used)
        try:
            found = hosts.live(places, *saves)
        except RankFailedError as error:
            if "hold checkpoints of different runs" not in str(error):
                raise
            assert bucket not in line_of(tip), life
            kinds.add("refused")
            continue
        step += len(saves)
        (at,) = {each for each, _ in found}
        if bucket in line_of(tip) or bucket < 0:
            # Each part from wherever it is: a part in memory, the others on their disks.
            parts = [{memory.get(host, -1), disk.get(host, -1)} for host in used]
            there = [each for each in line_of(tip) if all(each in part or each == bucket for part in parts)]
            assert at == max([*there, bucket, -1]), (life, found, memory, disk, bucket, whole_memory)
            kinds.add("own")
        else:
            assert at == bucket, (life, found, memory, disk, tip)
            kinds.add("ahead")
        for each, where in saves:
            parents[each], at = at, each
            for host in used:
                memory[host] = tips[host] = each
                disk[host] = disk.get(host, -1) if where == "memory" else each
        for host in used:
            if (fate := draw.random()) < 0.15:
                hosts.lose_memory(host)
                memory[host] = -1
            elif fate < 0.3 and bucket > 0:
                hosts.lose(host)
                memory[host] = disk[host] = tips[host] = -1
    assert {"own", "ahead"} <= kinds or seed != 0, "seed 0 is the one in the suite"
