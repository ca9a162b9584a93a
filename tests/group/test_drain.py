"""A group's checkpoints in a bucket: every rank uploads its part, rank 0 commits, all ranks restore from there."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")

import torch

from pccheck_async import Drain, FlatShard, Group, StorageOptions, SyncCheckpointEngine, stores
from pccheck_async.bucket import BucketMedium, CommitRecord, Kept, Objects, Owner, upload
from pccheck_async.bucket.names import commit_number
from pccheck_async.bucket.record import PartName, decode_commit
from pccheck_async.engine import Draining
from pccheck_async.engine import drain as draining
from pccheck_async.errors import CheckpointError, NoCheckpointError
from pccheck_async.group.drain import GroupDrain
from pccheck_async.group.messages import AnyDecision, Opened
from pccheck_async.group.ranks import Ranks
from pccheck_async.store import Source
from pccheck_async.testing.probe import probe
from tests.support.lying_objects import FolderOfObjects, LyingObjects, use_in_drains
from tests.support.ranks import run_ranks, wait_for
from tests.support.thread_ranks import on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("machine_asked_once"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded", "ignore:the checkpoint of step"),
]
URL = "s3://lying/run"
ELEMENTS = 6000


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> LyingObjects:
    """The bucket of all drains."""
    objects = LyingObjects()
    use_in_drains(objects, monkeypatch)
    return objects


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def state_of(group: Group, step: int) -> dict[str, Any]:
    """A tensor of which every rank has a shard, and one that is the rank's own."""
    share, rank = ELEMENTS // group.world_size, group.rank
    whole = torch.arange(ELEMENTS, dtype=torch.float32) + 10 * step
    shard = FlatShard(whole[rank * share : (rank + 1) * share].clone(), (ELEMENTS,), rank * share)
    return {"shard": shard, "own": torch.arange(3000) + 1000 * step + rank, "step": step, "rank": rank}


def check(state: dict[str, Any], group: Group, step: int, world: int) -> None:
    """Compare a state that was restored from a checkpoint of ``world`` ranks, bit by bit."""
    wanted = state_of(group, step)
    assert state["step"] == step
    assert torch.equal(state["shard"].local, wanted["shard"].local)
    assert state["rank"] == group.rank % world
    assert torch.equal(state["own"], torch.arange(3000) + 1000 * step + state["rank"])


def engine_on(path: Path, group: Group, url: str = URL, **settings: Any) -> SyncCheckpointEngine:
    of_drain = {name: settings.pop(name) for name in ("closing", "every") if name in settings}
    drain = Drain(url, keep_last=settings.pop("in_bucket", 1), **of_drain)
    return SyncCheckpointEngine(path, group=group, save_last=False, drain=drain, **settings)


def save(engine: SyncCheckpointEngine, group: Group, step: int) -> None:
    engine.checkpoint(state_of(group, step), step=step).wait_reached("remote", 30)


def saved(path: Path, steps: range, world: int = 2, **settings: Any) -> None:
    """Save steps on all ranks, each until it is in the bucket, and close."""

    def work(group: Group) -> None:
        with engine_on(path, group, **settings) as engine:
            engine.restore(state_of(group, 0), private="modulo")
            for step in steps:
                save(engine, group, step)

    on_ranks(world, work)


def restored(path: Path, world: int, of: int, **settings: Any) -> list[tuple[int, str]]:
    """Restore and compare on all ranks; return the step and the source of each."""

    def work(group: Group) -> tuple[int, str]:
        with engine_on(path, group, **settings) as engine:
            found = engine.restore(state := state_of(group, 0), private="modulo")
            assert found is not None
            check(state, group, found.step, of)
            return found.step, found.source

    return on_ranks(world, work)


def live(objects: Objects) -> list[tuple[Kept, CommitRecord]]:
    return [one for one in asyncio.run(BucketMedium(objects).look())[1] if one[1].parts]


def steps_in(objects: Objects) -> list[int]:
    return [record.entry.step for _, record in live(objects)]


def barrier(group: Group, path: Path, name: str) -> None:
    path.mkdir(exist_ok=True)
    (path / f"{name}-{group.rank}").touch()
    wait_for(*(path / f"{name}-{rank}" for rank in range(group.world_size)))


# -- saving and restoring


def test_folders_that_are_gone_are_restored_from_the_bucket_by_any_number_of_ranks(
    tmp_path: Path, lying: LyingObjects
) -> None:
    def first(group: Group) -> None:
        with engine_on(tmp_path / "run", group) as engine:
            assert engine.restore(state_of(group, 0)) is None
            for step in (1, 2):
                save(engine, group, step)
                assert engine.checkpoints()[0].tiers == ("disk", "remote")
            assert engine.statistics().drained == 2
            assert engine.statistics().drained_bytes > 12000
            assert engine.statistics().drain_lag_seconds == 0

    on_ranks(2, first)
    assert steps_in(lying) == [2]
    assert [len(record.parts) for _, record in live(lying)] == [2]
    for world in (2, 1, 3):
        shutil.rmtree(tmp_path / "run")
        assert restored(tmp_path / "run", world, of=2) == [(2, "remote")] * world
    saved(tmp_path / "run", range(3, 4), world=3)
    assert [len(record.parts) for _, record in live(lying)] == [3]
    assert restored(tmp_path / "run", 3, of=3) == [(3, "disk")] * 3


def test_a_rank_whose_folder_is_gone_reads_the_bucket_and_the_others_their_disks(
    tmp_path: Path, lying: LyingObjects
) -> None:
    saved(tmp_path / "run", range(1, 3))
    shutil.rmtree(tmp_path / "run" / "rank-00001")
    assert restored(tmp_path / "run", 2, of=2) == [(2, "disk"), (2, "remote")]
    saved(tmp_path / "run", range(3, 4))
    assert restored(tmp_path / "run", 2, of=2) == [(3, "disk")] * 2


def test_damage_on_one_ranks_disk_is_made_good_by_the_bucket(tmp_path: Path, lying: LyingObjects) -> None:
    saved(tmp_path / "run", range(1, 2))
    damage(tmp_path / "run" / "rank-00001", lambda data: b"\x07" in data)
    assert restored(tmp_path / "run", 2, of=2) == [(1, "disk"), (1, "remote")]


def damage(folder: Path, chosen: Callable[[bytes], bool]) -> None:
    for slot in folder.glob("slot-*"):
        if chosen(slot.read_bytes()):
            with slot.open("r+b") as file:
                file.seek(100)
                file.write(b"?" * 600)


def test_older_checkpoints_in_the_bucket_are_restored_on_request(tmp_path: Path, lying: LyingObjects) -> None:
    def work(group: Group) -> None:
        with engine_on(tmp_path / "run", group, in_bucket=3) as engine:
            for step in (1, 2, 3):
                save(engine, group, step)
            found = engine.restore(state := state_of(group, 0), step=2)
            assert found is not None
            assert (found.step, found.source) == (2, "remote")
            check(state, group, 2, 2)
            with pytest.raises(NoCheckpointError):
                engine.restore(state, step=9)

    on_ranks(2, work)


def test_a_checkpoint_that_other_ranks_saved_is_copied_by_the_next_start(tmp_path: Path, lying: LyingObjects) -> None:
    def first(group: Group) -> None:
        with engine_on(tmp_path / "run", group, closing=0.05) as engine:
            lying.lies = {"vanished"}
            engine.checkpoint(state_of(group, 7), step=7).result()

    on_ranks(3, first)
    lying.lies = set()
    assert steps_in(lying) == []

    def second(group: Group) -> None:
        with engine_on(tmp_path / "run", group):
            pass

    on_ranks(2, second)
    assert steps_in(lying) == [7]
    assert [len(record.parts) for _, record in live(lying)] == [3]
    shutil.rmtree(tmp_path / "run")
    assert restored(tmp_path / "run", 2, of=3) == [(7, "remote")] * 2


def test_hosts_with_disks_of_their_own(tmp_path: Path, lying: LyingObjects) -> None:
    """Rank 1 moves to a host without the folder: it reads the bucket, and then also what is in it alone."""

    def opened(group: Group, hosts: str) -> SyncCheckpointEngine:
        return engine_on(tmp_path / hosts[group.rank] / "run", group, in_bucket=3)

    def first(group: Group) -> None:
        with opened(group, "ab") as engine:
            for step in (1, 2):
                save(engine, group, step)

    def second(group: Group) -> list[tuple[int, str]]:
        found = list[tuple[int, str]]()
        with opened(group, "ac") as engine:
            for step in (None, 1):
                restored = engine.restore(state := state_of(group, 0), step=step)
                assert restored is not None
                check(state, group, restored.step, 2)
                found.append((restored.step, restored.source))
            engine.restore(state)
            save(engine, group, 3)  # the disks drop the one that was restored
            for step in (2, 1, 3):
                restored = engine.restore(state := state_of(group, 0), step=step)
                assert restored is not None
                check(state, group, step, 2)
                found.append((restored.step, restored.source))
        return found

    for host in "abc":
        (tmp_path / host).mkdir()
    on_ranks(2, first)
    in_bucket = [(2, "remote"), (1, "remote"), (3, "disk")]
    assert on_ranks(2, second) == [[(2, "disk"), (1, "remote"), *in_bucket], [(2, "remote"), (1, "remote"), *in_bucket]]


def test_a_bucket_that_one_rank_cannot_read_is_an_error_on_all(tmp_path: Path, lying: LyingObjects) -> None:
    saved(tmp_path / "run", range(1, 2))
    shutil.rmtree(tmp_path / "run")
    refusing = LyingObjects(lying.stored)
    refusing.lies = {"vanished"}

    def work(group: Group) -> str:
        with engine_on(tmp_path / "run", group) as engine:
            if group.rank == 1:
                drain = probe(engine).core.assembly.drain
                assert drain is not None
                drain.opened.medium.objects = refusing  # type: ignore[attr-defined]
            before = state_of(group, 0)
            with pytest.raises(CheckpointError, match="there is no such bucket"):
                engine.restore(state := state_of(group, 0))
            assert torch.equal(state["own"], before["own"])
            barrier(group, tmp_path / "marks", "refused")
            if group.rank == 1:
                refusing.lies = set()
            found = engine.restore(state)
            assert found is not None
            check(state, group, 1, 2)
            return found.source

    assert on_ranks(2, work) == ["remote"] * 2


# -- trouble


def test_a_rank_that_is_killed_in_its_upload_leaves_nothing_partial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = LyingObjects(FolderOfObjects(tmp_path / "bucket"))
    monkeypatch.setattr(draining, "open_objects", lambda *_, **__: objects)
    monkeypatch.setattr(upload, "OBJECT_BYTES", 1 << 18)

    def big(group: Group, step: int) -> dict[str, Any]:
        return {"own": torch.arange(5 << 15) * (step + 2) + group.rank, "step": step}

    def opened(group: Group) -> SyncCheckpointEngine:
        return engine_on(tmp_path / "run", group, storage=StorageOptions(chunk_bytes=1 << 18))

    def killed(group: Group) -> None:
        engine = opened(group).open()
        engine.checkpoint(big(group, 1), step=1).wait_reached("remote", 30)
        barrier(group, tmp_path / "marks", "first")
        put, left = objects.put, [3]

        async def dying(key: str, data: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            await put(key, data)

        if group.rank == 1:
            objects.put = dying  # type: ignore[method-assign]
        engine.checkpoint(big(group, 2), step=2).result(30)
        time.sleep(60)

    def kill_the_other(pids: list[int]) -> None:
        os.waitid(os.P_PID, pids[1], os.WEXITED | os.WNOWAIT)
        os.kill(pids[0], signal.SIGKILL)

    statuses = list[int]()
    run_ranks(2, killed, meanwhile=kill_the_other, statuses=statuses)
    assert statuses == [-signal.SIGKILL] * 2
    assert steps_in(objects) == [1]
    before = {key for key in objects.stored if key.startswith("data/000000003/00001/")}
    assert len(before) == 3

    def next_start(group: Group) -> tuple[int, str, int]:
        with opened(group) as engine:
            found = engine.restore(state := big(group, 0))
            assert found is not None
            assert torch.equal(state["own"], big(group, found.step)["own"])
            until(lambda: engine.statistics().drained == 1)
            return found.step, found.source, engine.statistics().drained_bytes

    found = run_ranks(2, next_start)
    assert [each[:2] for each in found] == [(2, "disk")] * 2
    assert found[1][2] < 3 << 18, "three of its five objects were there"
    assert steps_in(objects) == [2]
    assert before <= {*objects.stored}
    named = {part.key for _, record in live(objects) for part in record.parts} | needed(objects)
    assert {key for key in objects.stored if key.startswith("data/")} == named, "nothing else is left"


@pytest.mark.parametrize("lives", [4, pytest.param(50, marks=[pytest.mark.campaign, pytest.mark.timeout(3600)])])
def test_killed_again_and_again_at_any_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: int) -> None:
    objects = LyingObjects(FolderOfObjects(tmp_path / "bucket"))
    monkeypatch.setattr(draining, "open_objects", lambda *_, **__: objects)
    told = tmp_path / "reported"
    told.touch()
    for seed in range(lives):
        chosen, world = random.Random(seed), 2 + seed % 2
        victim, left = chosen.randrange(world), [chosen.randint(1, 40)]
        if seed % 3 == 2:
            shutil.rmtree(tmp_path / "run", ignore_errors=True)

        def life(group: Group, victim: int = victim, left: list[int] = left) -> None:
            begin = objects._begin

            async def dying(kind: str, key: str) -> None:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                await begin(kind, key)

            if group.rank == victim:
                objects._begin = dying  # type: ignore[method-assign]
            with engine_on(tmp_path / "run", group, in_bucket=2) as engine:
                found = engine.restore(state := state_of(group, 0), private="modulo")
                reported = max(map(int, told.read_text().split()), default=-1)
                assert (-1 if found is None else found.step) >= reported
                if found is not None:
                    assert state["step"] == found.step
                step = 0 if found is None else found.step + 1
                while True:
                    save(engine, group, step)
                    with told.open("a") as file:
                        file.write(f"{step}\n")
                    step += 1

        def kill_the_others(pids: list[int], victim: int = victim) -> None:
            os.waitid(os.P_PID, pids[victim], os.WEXITED | os.WNOWAIT)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

        statuses = list[int]()
        run_ranks(world, life, meanwhile=kill_the_others, statuses=statuses)
        assert statuses == [-signal.SIGKILL] * world, f"seed {seed}"
        whole = {*objects.stored}
        for _, record in live(objects):
            assert {part.key for part in record.parts} <= whole, f"seed {seed}"
            assert len(record.parts) in (2, 3)
        assert needed(objects) <= whole, f"seed {seed}"
        reported = max(map(int, told.read_text().split()), default=-1)
        assert max(steps_in(objects), default=-1) >= reported, f"seed {seed}: step {reported} was reported"
    assert reported > 0


def needed(objects: Objects) -> set[str]:
    """Return the data objects that the live commits need."""

    async def work() -> set[str]:
        owner = Owner(objects, b"s" * 16, 9)
        owner.now = tuple(kept for kept, _ in (await BucketMedium(objects).look())[1])
        return {key for read in (await owner.named()).values() if read is not None for key in read[1]}

    return asyncio.run(work())


def held(lying: LyingObjects, of: str = "data/") -> threading.Event:
    """Hold all uploads until the event is set."""
    goes_on, original = threading.Event(), lying.put

    async def put(key: str, data: Any) -> None:
        while key.startswith(of) and not goes_on.is_set():  # noqa: ASYNC110 - by another thread
            await asyncio.sleep(0.001)
        await original(key, data)

    lying.put = put  # type: ignore[method-assign]
    return goes_on


def test_a_damaged_part_keeps_its_checkpoint_from_the_bucket(
    tmp_path: Path, lying: LyingObjects, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, send = threading.Event(), Draining.send

    async def send_damaged(self: Draining, request: upload.Upload) -> list[PartName]:
        while request.step == 2 and not damaged.is_set():  # noqa: ASYNC110 - by another thread
            await asyncio.sleep(0.001)
        return await send(self, request)

    monkeypatch.setattr(Draining, "send", send_damaged)

    def work(group: Group) -> None:
        with engine_on(tmp_path / "run", group) as engine:
            save(engine, group, 1)
            pending = engine.checkpoint(state_of(group, 2), step=2)
            assert pending.result(30).step == 2
            barrier(group, tmp_path / "marks", "two")
            if group.rank == 1:
                damage(
                    tmp_path / "run" / "rank-00001", lambda data: torch.tensor([4501, 4502]).numpy().tobytes() in data
                )
                damaged.set()
            with pytest.raises(CheckpointError, match="is damaged, before it was copied"):
                pending.wait_reached("remote", 30)
            assert steps_in(lying) == [1]
            barrier(group, tmp_path / "marks", "damaged")
            save(engine, group, 3)

    on_ranks(2, work)
    assert steps_in(lying) == [3]
    assert "step 2 is not copied to lying://bucket: rank 1: " in caplog.text


def test_a_run_that_takes_the_bucket_over_is_named_on_all_ranks(tmp_path: Path, lying: LyingObjects) -> None:
    def work(group: Group) -> None:
        with engine_on(tmp_path / "run", group) as engine:
            save(engine, group, 1)
            barrier(group, tmp_path / "marks", "one")
            if group.rank == 0:
                asyncio.run(Owner(lying, b"x" * 16, 1, run=b"\xab" * 16).take_over())
            barrier(group, tmp_path / "marks", "taken")
            pending = engine.checkpoint(state_of(group, 2), step=2)
            assert pending.result(30).step == 2
            with pytest.raises(CheckpointError, match=r"another run \(run abababab"):
                pending.wait_reached("remote", 30)
            assert "another run (run abababab" in engine.statistics().drain_trouble
            for step in (3, 4):
                assert engine.checkpoint(state_of(group, step), step=step).result(30).step == step
            assert engine.statistics().durable == 4

    on_ranks(2, work)
    assert steps_in(lying) == [1]


def test_training_goes_on_without_the_bucket_which_catches_up(tmp_path: Path, lying: LyingObjects) -> None:
    def work(group: Group) -> None:
        with engine_on(tmp_path / "run", group) as engine:
            save(engine, group, 1)
            barrier(group, tmp_path / "marks", "one")
            if group.rank == 0:
                lying.lies = {"vanished"}
            barrier(group, tmp_path / "marks", "off")
            for step in (2, 3, 4):
                pending = engine.checkpoint(state_of(group, step), step=step)
                assert pending.result(30).step == step
            until(lambda: "no such bucket" in engine.statistics().drain_trouble)
            lag = engine.statistics().drain_lag_seconds
            time.sleep(0.05)
            assert engine.statistics().drain_lag_seconds > lag > 0
            barrier(group, tmp_path / "marks", "told")
            lying.lies = set()
            pending.wait_reached("remote", 30)
            until(lambda: not engine.statistics().drain_trouble)
            assert engine.statistics().drain_lag_seconds == 0

    on_ranks(2, work)
    assert steps_in(lying) == [4]


def test_one_rank_that_cannot_send_keeps_the_checkpoint_waiting(tmp_path: Path, lying: LyingObjects) -> None:
    goes_on = threading.Event()

    def work(group: Group) -> None:
        with engine_on(tmp_path / "run", group) as engine:
            pending = engine.checkpoint(state_of(group, 1), step=1)
            assert pending.result(30).step == 1
            with pytest.raises(TimeoutError):
                pending.wait_reached("remote", 0.3)
            assert steps_in(lying) == [], "a part is missing"
            for step in range(2, 9):  # more than there are slots: no checkpoint waits for the part that is read
                newest = engine.checkpoint(state_of(group, step), step=step)
                assert newest.result(30).step == step
            assert engine.statistics().drained == 0
            assert engine.statistics().slots <= 5
            barrier(group, tmp_path / "marks", "waited")
            goes_on.set()
            pending.wait_reached("remote", 30)
            newest.wait_reached("remote", 30)

    put = lying.put

    async def refuse(key: str, data: Any) -> None:
        while "/00001/" in key and not goes_on.is_set():  # noqa: ASYNC110 - by another thread
            await asyncio.sleep(0.001)
        await put(key, data)

    lying.put = refuse  # type: ignore[method-assign]
    on_ranks(2, work)
    assert steps_in(lying) == [8]


def test_a_bucket_that_is_another_one_on_each_host_is_refused(
    tmp_path: Path, lying: LyingObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder, say, that each host has for itself: rank 0 would commit a part that nobody finds there."""
    other, opened = LyingObjects(), list[Objects]()
    made = Draining.open.__func__  # type: ignore[attr-defined]

    async def of_rank(cls: type[Draining], /, *arguments: Any, owns: bool, **more: Any) -> Draining:
        draining: Draining = await made(cls, *arguments, owns=owns, **more)
        if not owns:
            draining.objects = other
        opened.append(draining.objects)
        return draining

    monkeypatch.setattr(Draining, "open", classmethod(of_rank))

    def work(group: Group) -> None:
        with engine_on(tmp_path / "run", group, closing=0.1) as engine:
            assert engine.checkpoint(state_of(group, 1), step=1).result(30).step == 1
            until(lambda: "the part of rank 1 is not there" in engine.statistics().drain_trouble)

    on_ranks(2, work)
    assert len(opened) == 2
    assert steps_in(lying) == []
    assert other.stored


def test_a_part_that_nobody_sends_keeps_the_checkpoint_from_the_bucket(
    tmp_path: Path, lying: LyingObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = GroupDrain.parts_to_send

    def nothing(self: GroupDrain, counter: int) -> Mapping[int, Source]:
        return {} if self.disk.member.rank == 1 else original(self, counter)

    monkeypatch.setattr(GroupDrain, "parts_to_send", nothing)

    def work(group: Group) -> None:
        with engine_on(tmp_path / "run", group, closing=0.1) as engine:
            engine.checkpoint(state_of(group, 1), step=1).result(30)
            until(lambda: "the parts of rank 1 were not sent" in engine.statistics().drain_trouble)

    on_ranks(2, work)
    assert steps_in(lying) == []


# -- dropping


def test_what_is_rejected_or_removed_goes_from_the_bucket(tmp_path: Path, lying: LyingObjects) -> None:
    def work(group: Group) -> None:
        with engine_on(tmp_path / "run", group, keep_last=4, in_bucket=4) as engine:
            for step in (1, 2, 3, 4):
                save(engine, group, step)
            engine.remove(step=2)
            until(lambda: steps_in(lying) == [4, 3, 1])
            barrier(group, tmp_path / "marks", "removed")
            with pytest.raises(NoCheckpointError):
                engine.restore(state_of(group, 0), step=2)
            engine.reject(step=3)
            until(lambda: steps_in(lying) == [1])

    on_ranks(2, work)
    shutil.rmtree(tmp_path / "run")
    assert restored(tmp_path / "run", 2, of=2, in_bucket=4) == [(1, "remote")] * 2


def test_a_rejection_is_followed_after_a_crash(tmp_path: Path, lying: LyingObjects) -> None:
    def first(group: Group) -> None:
        with engine_on(tmp_path / "run", group, keep_last=4, in_bucket=4, closing=0.05) as engine:
            for step in (0, 1, 2):
                save(engine, group, step)
            barrier(group, tmp_path / "marks", "saved")
            lying.lies = {"vanished"}
            engine.remove(step=1)
            with pytest.raises(NoCheckpointError):
                engine.restore(state_of(group, 0), step=1)  # though the bucket has it yet
            engine.reject(step=2)

    def second(group: Group) -> None:
        with engine_on(tmp_path / "run", group, keep_last=4, in_bucket=4):
            until(lambda: steps_in(lying) == [1, 0])  # of a removal the disk keeps no trace: closing has said so

    on_ranks(2, first)
    lying.lies = set()
    assert steps_in(lying) == [2, 1, 0]
    on_ranks(2, second)


def test_the_state_of_the_bucket_is_not_set_back_at_the_opening(
    tmp_path: Path, lying: LyingObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is slow, and learns that the group is open together with the first change in the bucket."""
    learn = Ranks._learn

    def slow(self: Ranks, decision: AnyDecision) -> None:
        if isinstance(decision, Opened) and self.group.rank == 1:
            waiting = threading.Thread(target=until, args=(lambda: steps_in(lying) == [1], 10))  # it runs a loop
            waiting.start()
            waiting.join()
            time.sleep(0.3)
        learn(self, decision)

    def first(group: Group) -> None:
        with engine_on(tmp_path / "run", group, keep_last=4, in_bucket=4, closing=0.05) as engine:
            for step in (1, 2):
                save(engine, group, step)
            barrier(group, tmp_path / "marks", "saved")
            lying.lies = {"vanished"}
            engine.reject(step=2)

    def second(group: Group) -> list[int]:
        with engine_on(tmp_path / "run", group, keep_last=4, in_bucket=4) as engine:
            barrier(group, tmp_path / "marks", "open")
            drain = probe(engine).core.assembly.drain
            assert drain is not None
            return [copy.entry.step for copy in drain.state.copies]

    on_ranks(2, first)
    lying.lies = set()
    monkeypatch.setattr(Ranks, "_learn", slow)
    assert on_ranks(2, second) == [[1], [1]]


# -- other branches


@pytest.mark.parametrize("lost", [False, True], ids=["all folders", "rank 0's is gone"])
def test_a_disk_and_a_bucket_of_different_branches_are_named_on_all_ranks(
    tmp_path: Path, lying: LyingObjects, lost: bool
) -> None:
    saved(tmp_path / "one", range(1, 2))

    def other(group: Group) -> None:
        with SyncCheckpointEngine(tmp_path / "two", group=group, save_last=False) as engine:
            engine.checkpoint(state_of(group, 9), step=9).result(30)

    def refused(group: Group) -> str:
        with pytest.raises(CheckpointError) as raised:
            engine_on(tmp_path / "two", group).open()
        return str(raised.value)

    on_ranks(2, other)
    if lost:
        shutil.rmtree(tmp_path / "two" / "rank-00000")
    for text in on_ranks(2, refused):
        assert "step 9 (counter 0) on disk, step 1 (counter 0, of store" in text
        assert "overwrite=True" in text
        assert str(tmp_path / "two") in text
        assert "lying://bucket" in text
    assert steps_in(lying) == [1]
    if lost:
        return

    def overwriting(group: Group) -> None:
        with engine_on(tmp_path / "two", group, overwrite=True) as engine:
            found = engine.restore(state_of(group, 0))
            assert found is not None
            assert (found.step, found.source) == (9, "disk")
            save(engine, group, 10)

    on_ranks(2, overwriting)
    assert steps_in(lying) == [10]
    assert restored(tmp_path / "two", 2, of=2) == [(10, "disk")] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_an_old_image_of_any_ranks_folder_is_passed_over(tmp_path: Path, lying: LyingObjects, rank: int) -> None:
    """The newest line of all disks decides: rank 0's folder alone may be of a branch that was left."""
    saved(tmp_path / "run", range(1, 4), keep_last=3)
    folder = tmp_path / "run" / f"rank-0000{rank}"
    shutil.copytree(folder, tmp_path / "image")

    def back(group: Group) -> None:
        with engine_on(tmp_path / "run", group, keep_last=3, overwrite=True) as engine:
            engine.restore(state_of(group, 0), step=1)
            save(engine, group, 4)

    on_ranks(2, back)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "image", folder)
    sources = ["remote" if each == rank else "disk" for each in range(2)]
    assert restored(tmp_path / "run", 2, of=2, keep_last=3) == [(4, source) for source in sources]


def test_a_run_that_went_back_restarts_after_a_crash(tmp_path: Path, lying: LyingObjects) -> None:
    saved(tmp_path / "run", range(1, 4), keep_last=3, in_bucket=3)

    def back(group: Group) -> None:
        with engine_on(tmp_path / "run", group, keep_last=3, in_bucket=3, closing=0.05, overwrite=True) as engine:
            engine.restore(state_of(group, 0), step=1)
            held(lying)
            engine.checkpoint(state_of(group, 2), step=2).result(30)
            time.sleep(0.2)

    put = lying.put
    on_ranks(2, back)
    lying.put = put  # type: ignore[method-assign]
    assert steps_in(lying) == [3, 2, 1], "the new branch has not come there"

    def again(group: Group) -> None:
        with engine_on(tmp_path / "run", group, keep_last=3, in_bucket=3) as engine:
            found = engine.restore(state := state_of(group, 0))
            assert found is not None
            assert (found.step, found.source) == (2, "disk")
            check(state, group, 2, 2)
            save(engine, group, 3)

    on_ranks(2, again)
    assert steps_in(lying)[0] == 3


def test_one_process_and_a_group_do_not_take_each_others_bucket(tmp_path: Path, lying: LyingObjects) -> None:
    with SyncCheckpointEngine(tmp_path / "alone", drain=Drain(URL), save_last=False) as engine:
        engine.checkpoint({"step": 5}, step=5).wait_reached("remote", 30)

    def refused(group: Group) -> str:
        with pytest.raises(CheckpointError) as raised:
            engine_on(tmp_path / "run", group).open()
        return str(raised.value)

    for text in on_ranks(2, refused):
        assert "holds checkpoints of one process (step 5)" in text
        assert "is for a group of ranks: give Drain another prefix" in text
    saved(tmp_path / "run", range(6, 7), overwrite=True)
    assert steps_in(lying) == [6]
    with pytest.raises(CheckpointError, match=r"holds checkpoints of a group of ranks \(step 6\).* is for one process"):
        SyncCheckpointEngine(tmp_path / "alone", drain=Drain(URL)).open()


def test_a_checkpoint_whose_run_no_line_names_is_not_copied(
    tmp_path: Path, lying: LyingObjects, caplog: pytest.LogCaptureFixture
) -> None:
    """It would be there as one of another run, and the next start would find two with its counter."""

    def without(group: Group, step: int) -> None:
        with SyncCheckpointEngine(tmp_path / "run", group=group, keep_last=2, save_last=False) as engine:
            engine.restore(state_of(group, 0))
            engine.checkpoint(state_of(group, step), step=step).result(30)

    def work(group: Group) -> None:
        with engine_on(tmp_path / "run", group, keep_last=2) as engine:
            engine.restore(state_of(group, 0))
            barrier(group, tmp_path / "marks", "restored")
            if group.rank == 1:
                content = torch.tensor([4501, 4502]).numpy().tobytes()
                damage(tmp_path / "run" / "rank-00001", lambda data: content in data)
            barrier(group, tmp_path / "marks", "damaged")
            engine.pin(step=1)
            until(lambda: "step 1 is not copied to lying://bucket: the line" in caplog.text)
            assert steps_in(lying) == []

    on_ranks(2, lambda group: without(group, 1))
    on_ranks(2, lambda group: without(group, 2))
    on_ranks(2, work)
    assert "step 2 is not copied to lying://bucket: rank 1: " in caplog.text
    saved(tmp_path / "run", range(3, 4), keep_last=2)
    assert restored(tmp_path / "run", 2, of=2, keep_last=2) == [(3, "disk")] * 2


def test_a_copy_of_what_the_line_does_not_name_is_restored_all_the_same(
    tmp_path: Path, lying: LyingObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that a run has left behind, copied by a command: the copy's own line names its run."""
    other = LyingObjects()
    monkeypatch.setattr("pccheck_async.upkeep.copying.open_objects", lambda *_, **__: other)

    def work(group: Group, step: int | None, *saves: int) -> None:
        with engine_on(tmp_path / "run", group, keep_last=9) as engine:
            engine.restore(state_of(group, 0), step=step)
            for each in saves:
                engine.checkpoint(state_of(group, each), step=each).result(30)

    on_ranks(2, lambda group: work(group, None, 1, 2, 3))
    on_ranks(2, lambda group: work(group, 1, 12))
    stores.copy(tmp_path / "run", URL, step=3)
    use_in_drains(other, monkeypatch)
    assert restored(tmp_path / "other", 2, of=2) == [(3, "remote")] * 2


def test_a_checkpoint_of_an_abandoned_branch_is_not_copied_under_another_runs_id(
    tmp_path: Path, lying: LyingObjects
) -> None:
    """A link of a line covers counters that its run did not save; a restart would find two checkpoints with one."""
    settings: dict[str, Any] = {"keep_last": 9, "in_bucket": 3, "closing": 0.05}
    put = lying.put

    async def fail(key: str, data: Any) -> None:
        raise OSError(errno.EIO, "no answer")

    def first(group: Group) -> None:
        with engine_on(tmp_path / "run", group, **settings) as engine:
            for step in (1, 2, 3):
                engine.checkpoint(state_of(group, step), step=step).result(30)

    def second(group: Group) -> None:
        with engine_on(tmp_path / "run", group, **settings) as engine:
            engine.restore(state_of(group, 0), step=1)
            engine.checkpoint(state_of(group, 12), step=12).result(30)

    def third(group: Group) -> None:
        with engine_on(tmp_path / "run", group, **settings) as engine:
            engine.restore(state_of(group, 0))
            engine.reject(step=12)
            barrier(group, tmp_path / "marks", "rejected")
            lying.put = put  # type: ignore[method-assign]
            until(lambda: steps_in(lying))
            barrier(group, tmp_path / "marks", "copied")

    lying.put = fail  # type: ignore[method-assign]
    for work in (first, second, third):
        on_ranks(2, work)
    assert steps_in(lying) == [1]
    assert restored(tmp_path / "run", 2, of=2, keep_last=9) == [(3, "disk")] * 2, "the disks have all of them"
    shutil.rmtree(tmp_path / "run")
    assert restored(tmp_path / "run", 2, of=2, keep_last=9) == [(1, "remote")] * 2


def test_a_run_that_goes_back_while_a_checkpoint_is_copied(tmp_path: Path, lying: LyingObjects) -> None:
    """The line of the new run does not name that checkpoint, and the one before it is over."""

    def first(group: Group) -> None:
        with engine_on(tmp_path / "run", group, keep_last=9, closing=0.05) as engine:
            for step in (1, 2, 3):
                engine.checkpoint(state_of(group, step), step=step).result(30)

    def second(group: Group) -> None:
        with engine_on(tmp_path / "run", group, keep_last=9, closing=0.05) as engine:
            if group.rank == 0:
                until(lambda: any(key.startswith("data/") for _, key in lying.requests[before:]))
            barrier(group, tmp_path / "marks", "begun")
            engine.restore(state_of(group, 0), step=1)
            pending = engine.checkpoint(state_of(group, 12), step=12)
            pending.result(30)
            barrier(group, tmp_path / "marks", "saved")
            goes_on.set()
            pending.wait_reached("remote", 30)

    goes_on, committed = held(lying), list[int]()
    on_ranks(2, first)
    before, create = len(lying.requests), lying.create

    async def note(key: str, data: bytes) -> bool:
        record = decode_commit(data, commit_number(key) or 0)
        committed.extend(part.entry.step for part in record.parts[:1])
        return await create(key, data)

    lying.create = note  # type: ignore[method-assign]
    on_ranks(2, second)
    assert committed == [12]


# -- the end


def test_closing_copies_the_newest(tmp_path: Path, lying: LyingObjects) -> None:
    def work(group: Group) -> None:
        with engine_on(tmp_path / "run", group) as engine:
            for step in (1, 2, 3):
                pending = engine.checkpoint(state_of(group, step), step=step)
                pending.result(30)
            if group.rank == 0:
                time.sleep(0.3)  # the other is closing, and still sends its part
        pending.wait_reached("remote", 0)

    on_ranks(2, work)
    assert steps_in(lying) == [3]


def test_closing_ends_in_time_and_says_on_all_ranks_what_is_left(
    tmp_path: Path, lying: LyingObjects, caplog: pytest.LogCaptureFixture
) -> None:
    def work(group: Group) -> None:
        with engine_on(tmp_path / "run", group, closing=0.3) as engine:
            lying.lies = {"vanished"}
            pending = engine.checkpoint(state_of(group, 7), step=7)
            pending.result(30)
        with pytest.raises(CheckpointError, match="step 7 is on disk, and not yet in lying://bucket"):
            pending.wait_reached("remote", 0)

    on_ranks(2, work)
    assert "step 7 is on disk, and not yet in lying://bucket" in caplog.text
    lying.lies = set()

    def idle(group: Group) -> None:
        with engine_on(tmp_path / "run", group):
            pass

    on_ranks(2, idle)
    assert steps_in(lying) == [7], "the next start copies it, though it saves nothing"


def test_closing_with_a_deadline_ends_by_then_on_all_ranks(tmp_path: Path, lying: LyingObjects) -> None:
    def work(group: Group) -> float:
        engine = engine_on(tmp_path / "run", group).open()
        save(engine, group, 1)
        barrier(group, tmp_path / "marks", "saved")
        lying.lies = {"slow"}
        pending = engine.checkpoint(state_of(group, 2), step=2)
        pending.result(30)
        start = time.monotonic()
        engine.close(deadline=1.0)
        with pytest.raises(CheckpointError):
            pending.wait_reached("remote", 0)
        return time.monotonic() - start

    assert max(on_ranks(2, work)) < 10
    lying.lies = set()
    assert steps_in(lying) == [1]


def test_a_change_before_any_restore_keeps_the_line(tmp_path: Path, lying: LyingObjects) -> None:
    saved(tmp_path / "run", range(1, 3), keep_last=2, in_bucket=2)

    def work(group: Group) -> None:
        with engine_on(tmp_path / "run", group, keep_last=2, in_bucket=2) as engine:
            engine.remove(step=1)

    on_ranks(2, work)
    assert steps_in(lying) == [2]
    assert restored(tmp_path / "run", 2, of=2, keep_last=2, in_bucket=2) == [(2, "disk")] * 2
    shutil.rmtree(tmp_path / "run")
    assert restored(tmp_path / "run", 2, of=2, keep_last=2, in_bucket=2) == [(2, "remote")] * 2


def test_a_rank_that_leaves_early_is_not_waited_for(
    tmp_path: Path, lying: LyingObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_OWNER_SECONDS", 0.1)
    goes_on = held(lying, "data/000000002/00001/")

    def work(group: Group) -> None:
        with engine_on(tmp_path / "run", group, closing=5) as engine:
            pending = engine.checkpoint(state_of(group, 1), step=1)
            pending.result(30)
            if group.rank == 0:
                until(lambda: "rank 1: it " in engine.statistics().drain_trouble)
                goes_on.set()

    on_ranks(2, work)
    assert steps_in(lying) == []


@pytest.mark.parametrize("raising", [0, 1])
def test_a_rank_that_raises_fails_the_others_checkpoints_at_once(
    tmp_path: Path, lying: LyingObjects, raising: int
) -> None:
    """And goes on sending its parts of those that are durable."""
    goes_on = held(lying)

    def work(group: Group) -> float:
        took = 0.0
        with suppress(ZeroDivisionError), engine_on(tmp_path / "run", group) as engine:
            engine.checkpoint(state_of(group, 1), step=1).result(30)
            barrier(group, tmp_path / "marks", "saved")
            if group.rank == raising:
                raise ZeroDivisionError
            start = time.monotonic()
            try:
                with pytest.raises(CheckpointError, match=f"rank {raising} left before"):
                    engine.checkpoint(state_of(group, 2), step=2).result(10)
            finally:
                goes_on.set()
            took = time.monotonic() - start
        return took

    assert max(on_ranks(2, work)) < 10
    assert steps_in(lying) == [1]


def test_a_rank_leaves_at_once_when_all_is_copied(tmp_path: Path, lying: LyingObjects) -> None:
    def work(group: Group) -> float:
        with engine_on(tmp_path / "run", group) as engine:
            save(engine, group, 1)
            barrier(group, tmp_path / "marks", "saved")
            start = time.monotonic()
            if group.rank == 0:
                wait_for(tmp_path / "left")
        (tmp_path / "left").touch()
        return time.monotonic() - start

    assert max(on_ranks(2, work)) < 10


def test_closing_waits_for_the_owner_with_one_deadline(tmp_path: Path, lying: LyingObjects) -> None:
    goes_on = held(lying)

    def work(group: Group) -> float:
        engine = engine_on(tmp_path / "run", group).open()
        engine.checkpoint(state_of(group, 1), step=1).result(30)
        barrier(group, tmp_path / "marks", "saved")
        start = time.monotonic()
        if group.rank == 0:
            time.sleep(3.5)
            engine.close()
            return 0.0
        engine.close(deadline=4)
        goes_on.set()
        return time.monotonic() - start

    assert max(on_ranks(2, work)) < 6.5


def test_closing_has_a_limit_though_a_request_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = LyingObjects(FolderOfObjects(tmp_path / "bucket"))
    monkeypatch.setattr(draining, "open_objects", lambda *_, **__: objects)
    put = objects.put

    async def stuck(key: str, data: Any) -> None:
        end = time.monotonic() + 20
        while "/00001/" in key and time.monotonic() < end:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        await put(key, data)

    objects.put = stuck  # type: ignore[method-assign]

    def work(group: Group) -> float:  # in processes: threads of an engine that gave up stay
        engine = engine_on(tmp_path / "run", group, closing=1).open()
        engine.checkpoint(state_of(group, 1), step=1).result(30)
        barrier(group, tmp_path / "marks", "saved")
        start = time.monotonic()
        if group.rank == 1:
            with pytest.raises(CheckpointError, match="gave up after 2 s"):
                engine.close(deadline=2)
        else:
            engine.close(deadline=2)
        return time.monotonic() - start

    assert max(run_ranks(2, work)) < 12
    assert steps_in(objects) == []
