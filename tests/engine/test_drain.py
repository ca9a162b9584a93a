"""Copying committed checkpoints to a bucket in the background, and restoring from there."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")

import torch
from obstore.store import HTTPStore

from pccheck_async import (
    CheckpointEngine,
    CheckpointError,
    Drain,
    NoCheckpointError,
    StorageOptions,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
    stores,
)
from pccheck_async.bucket import upload
from pccheck_async.bucket.names import digest
from pccheck_async.bucket.objects import RefusedError
from pccheck_async.errors import DamagedError, StoreError, WriteError
from pccheck_async.medium import File
from pccheck_async.medium.files import Files
from tests.support.lying_objects import LyingObjects, use_in_drains


def state(step: int, nbytes: int = 1 << 16) -> dict[str, Any]:
    return {"weights": torch.full((nbytes // 4,), float(step)), "step": step}


def until(condition: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket"


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> LyingObjects:
    """The bucket of all drains."""
    objects = LyingObjects()
    use_in_drains(objects, monkeypatch)
    return objects


def steps(url: str) -> list[int]:
    return [info.step for info in list_checkpoints(url)]


def steps_in(objects: LyingObjects) -> list[int]:
    from pccheck_async.bucket.medium import BucketMedium

    _, found = asyncio.run(BucketMedium(objects).look())
    return [record.entry.step for _, record in found if record.parts]


@contextmanager
def said(caplog: pytest.LogCaptureFixture, event: str) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "pccheck_async"):
        yield
    assert event in [getattr(record, "event", "") for record in caplog.records]


# -- copying


def test_committed_checkpoints_are_copied(tmp_path: Path, url: str) -> None:
    with SyncCheckpointEngine(tmp_path / "run", drain=Drain(url, keep_last=2)) as engine:
        assert engine.restore(state(0)) is None
        for step in (1, 2, 3):
            pending = engine.checkpoint(state(step), step=step)
            pending.wait_reached("remote", 20)
            assert steps(url)[0] == step
            assert engine.checkpoints()[0].tiers == ("disk", "remote")
        statistics = engine.statistics()
        assert statistics.drained == 3
        assert statistics.drained_bytes > 3 << 16
        assert statistics.drain_lag_seconds == 0
        assert statistics.drain_trouble == ""
        assert "pccheck_checkpoints_drained_total" in engine.metrics()
        assert "3 copied to the bucket" in str(statistics)
    assert steps(url) == [3, 2]
    assert load_sync(url)["step"] == 3


def test_leaving_copies_the_newest(tmp_path: Path, url: str) -> None:
    with SyncCheckpointEngine(tmp_path / "run", drain=Drain(url, every=timedelta(hours=1))) as engine:
        engine.checkpoint(state(1), step=1).wait_reached("remote", 20)
        for step in (2, 3):
            engine.checkpoint(state(step), step=step).result()
        time.sleep(0.1)
        assert engine.statistics().drained == 1
        assert engine.statistics().drain_lag_seconds > 0
    assert steps(url) == [3]


def test_asyncio_code_waits_for_the_bucket(tmp_path: Path, url: str) -> None:
    async def work() -> None:
        async with CheckpointEngine(tmp_path / "run", drain=Drain(url)) as engine:
            pending = await engine.checkpoint(state(1), step=1)
            await pending.reached("remote")

    asyncio.run(work())
    assert steps(url) == [1]


def test_a_store_of_obstores_is_a_bucket(tmp_path: Path) -> None:
    from obstore.store import MemoryStore

    store = MemoryStore()
    with SyncCheckpointEngine(tmp_path / "run", drain=Drain(store)) as engine:
        engine.checkpoint(state(1), step=1).result()
    with SyncCheckpointEngine(tmp_path / "other", drain=Drain(store)) as engine:
        restored = engine.restore(target := state(0))
        assert restored is not None
        assert (restored.source, target["step"]) == ("remote", 1)


def test_no_checkpoint_waits_for_a_bucket_that_hangs(tmp_path: Path, lying: LyingObjects) -> None:
    drain = Drain("s3://lying/run", closing=0.1)
    with SyncCheckpointEngine(tmp_path / "run", drain=drain) as engine:
        engine.checkpoint(state(0), step=0).wait_reached("remote", 20)
        time.sleep(0.2)  # what is collected after it
        lying.lies, before = {"slow"}, len(lying.requests)
        engine.checkpoint(state(1), step=1).result(20)
        until(lambda: len(lying.requests) > before)
        start = time.monotonic()
        for step in range(2, 12):
            engine.checkpoint(state(step), step=step).result(20)
        assert time.monotonic() - start < 10
        assert engine.statistics().durable == 12
    assert [info.step for info in list_checkpoints(tmp_path / "run")] == [11]


def test_trouble_is_said_and_passes(tmp_path: Path, lying: LyingObjects, caplog: pytest.LogCaptureFixture) -> None:
    with said(caplog, "drain_trouble"), SyncCheckpointEngine(tmp_path / "run", drain=Drain("s3://lying/run")) as engine:
        lying.lies = {"vanished"}
        pending = engine.checkpoint(state(1), step=1)
        pending.result()
        until(lambda: "no such bucket" in engine.statistics().drain_trouble)
        assert engine.statistics().drain_lag_seconds > 0
        with pytest.raises(TimeoutError):
            pending.wait_reached("remote", 0.05)
        lying.lies = set()
        pending.wait_reached("remote", 20)
        until(lambda: not engine.statistics().drain_trouble)
    assert steps_in(lying) == [1]


@pytest.mark.parametrize("lie", ["no answer", "conflict after success"])
def test_lies_of_the_store_lose_nothing(lie: str, tmp_path: Path, lying: LyingObjects) -> None:
    with SyncCheckpointEngine(tmp_path / "run", drain=Drain("s3://lying/run", keep_last=2)) as engine:
        for step in range(5):
            lying.lies, lying.times = {lie}, 2
            engine.checkpoint(state(step), step=step).wait_reached("remote", 20)
            assert steps_in(lying)[0] == step
    assert steps_in(lying) == [4, 3]
    assert sum(key.startswith("commits/") for key in lying.stored) == 2


def test_closing_ends_in_time_and_says_what_is_left(
    tmp_path: Path, lying: LyingObjects, caplog: pytest.LogCaptureFixture
) -> None:
    drain = Drain("s3://lying/run", closing=0.2)
    with said(caplog, "drain_left"), SyncCheckpointEngine(tmp_path / "run", drain=drain) as engine:
        lying.lies = {"vanished"}
        pending = engine.checkpoint(state(7), step=7)
        pending.result()
    assert "step 7 is on disk, and not yet in lying://bucket" in caplog.text
    with pytest.raises(CheckpointError, match="step 7 is on disk, and not yet"):
        pending.wait_reached("remote")
    lying.lies = set()
    with SyncCheckpointEngine(tmp_path / "run", drain=drain):
        pass
    assert steps_in(lying) == [7], "the next engine copies it, though it saves nothing"


def test_what_was_sent_is_not_sent_again_after_a_crash(tmp_path: Path, lying: LyingObjects) -> None:
    drain = Drain("s3://lying/run", closing=0.05)
    lying.times = 0
    with SyncCheckpointEngine(tmp_path / "run", drain=drain) as engine:
        lying.lies = {"slow"}
        original, sent = lying.create, list[str]()

        async def create(key: str, data: bytes) -> bool:
            lying.times = None  # no answer any more, once all of the data are there
            sent.append(key)
            return await original(key, data)

        lying.create = create  # type: ignore[method-assign]
        engine.checkpoint(state(1), step=1).result()
        until(lambda: sent)
    lying.lies, lying.times = set(), None
    before = {key for key in lying.stored if key.startswith("data/")}
    assert len(before) == 2
    lying.create = original  # type: ignore[method-assign]
    with SyncCheckpointEngine(tmp_path / "run", drain=drain) as engine:
        until(lambda: engine.statistics().drained == 1)
        assert engine.statistics().drained_bytes == 0
    assert {key for key in lying.stored if key.startswith("data/")} == before


def test_what_a_removal_has_deleted_of_a_draft_is_sent_again(tmp_path: Path, lying: LyingObjects) -> None:
    """The record of the removal makes objects of an earlier draft garbage, which the next commit must not name."""
    drain, sent, refused = Drain("s3://lying/run", keep_last=4), list[str](), threading.Event()
    with SyncCheckpointEngine(tmp_path / "run", keep_last=4, drain=drain) as engine:
        for step in (1, 2):
            engine.checkpoint(state(step), step=step).wait_reached("remote", 20)
        original = lying.put

        async def put(key: str, data: Any) -> None:
            if sent:  # the data are there, and not the index
                refused.set()
                raise RefusedError("played")
            sent.append(key)
            await original(key, data)

        lying.put = put  # type: ignore[method-assign]
        pending = engine.checkpoint(state(3), step=3)
        assert refused.wait(20)
        engine.remove(step=1)
        until(lambda: steps_in(lying) == [2] and sent[0] not in lying.stored)
        lying.put = original  # type: ignore[method-assign]
        pending.wait_reached("remote", 20)
    with SyncCheckpointEngine(tmp_path / "empty", drain=drain) as engine:
        restored = engine.restore(state(0))
        assert restored is not None
        assert (restored.step, restored.source) == (3, "remote")


# -- restoring


def test_an_empty_folder_restores_from_the_bucket(tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture) -> None:
    with SyncCheckpointEngine(tmp_path / "one", drain=Drain(url, keep_last=3)) as engine:
        for step in (1, 2):
            engine.checkpoint(state(step), step=step, name=f"n{step}").wait_reached("remote", 20)
    with (
        said(caplog, "drain_restored"),
        SyncCheckpointEngine(tmp_path / "two", drain=Drain(url, keep_last=3)) as engine,
    ):
        restored = engine.restore(target := state(0))
        assert restored is not None
        assert (restored.step, restored.source) == (2, "remote")
        assert "from a bucket" in repr(restored)
        assert torch.equal(target["weights"], state(2)["weights"])
        earlier = engine.restore(target, step=1)
        assert earlier is not None
        assert (earlier.source, target["step"]) == ("remote", 1)
        with pytest.raises(NoCheckpointError):
            engine.restore(target, step=9)
        engine.restore(target, name="n2")
        info = engine.checkpoint(state(3), step=3).result()
        assert info.counter > restored.counter
    assert steps(url) == [3, 2, 1]
    with SyncCheckpointEngine(tmp_path / "one", drain=Drain(url, keep_last=3)) as engine:
        restored = engine.restore(target)
        assert restored is not None
        assert (restored.step, restored.source) == (3, "remote"), "the bucket goes on from what is on this disk"
        engine.checkpoint(state(4), step=4).result()
    assert steps(url) == [4, 3, 2]


def test_a_run_does_not_begin_anew_over_the_bucket_unasked(tmp_path: Path, url: str) -> None:
    with SyncCheckpointEngine(tmp_path / "one", drain=Drain(url)) as engine:
        engine.checkpoint(state(5), step=5).result()
    with SyncCheckpointEngine(tmp_path / "two", drain=Drain(url)) as engine:
        with pytest.raises(ValueError, match="holds step 5"):
            engine.checkpoint(state(1), step=1)
        restored = engine.restore(state(0))
        assert restored is not None
    assert steps(url) == [5]


def test_other_branches_are_refused_and_left_alone(tmp_path: Path, url: str) -> None:
    with SyncCheckpointEngine(tmp_path / "other") as engine:
        engine.checkpoint(state(9), step=9).result()
    with SyncCheckpointEngine(tmp_path / "run", drain=Drain(url)) as engine:
        engine.checkpoint(state(1), step=1).wait_reached("remote", 20)
        other = SyncCheckpointEngine(tmp_path / "other", drain=Drain(url))
        with pytest.raises(StoreError, match=r"step 9 .* on disk, step 1 .* in the bucket.*another prefix"):
            other.open()
        engine.checkpoint(state(2), step=2).wait_reached("remote", 20)
    assert steps(url) == [2]


def test_a_folder_that_a_command_wrote_to_is_another_branch_until_it_is_said_to_be_right(
    tmp_path: Path, url: str
) -> None:
    with SyncCheckpointEngine(tmp_path / "run", keep_last=2, drain=Drain(url, keep_last=2)) as engine:
        for step in (1, 2):
            engine.checkpoint(state(step), step=step).wait_reached("remote", 20)
    stores.remove(tmp_path / "run", step=2)
    with pytest.raises(StoreError, match=r"such as `pccheck remove`, has written .* overwrite=True"):
        SyncCheckpointEngine(tmp_path / "run", keep_last=2, drain=Drain(url, keep_last=2)).open()
    with SyncCheckpointEngine(tmp_path / "run", drain=Drain(url, keep_last=2), overwrite=True) as engine:
        restored = engine.restore(state(0))
        assert restored is not None
        assert (restored.step, restored.source) == (1, "disk"), "the removed one is not brought back"
        engine.checkpoint(state(2), step=2).wait_reached("remote", 20)
    with SyncCheckpointEngine(tmp_path / "run", drain=Drain(url, keep_last=2)) as engine:
        restored = engine.restore(state(0))
        assert restored is not None
        assert restored.step == 2
        engine.checkpoint(state(3), step=3).result()
    assert steps(url) == [3, 2]


def test_of_two_runs_the_last_to_begin_copies(tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture) -> None:
    with SyncCheckpointEngine(tmp_path / "one", drain=Drain(url)) as first:
        first.checkpoint(state(1), step=1).wait_reached("remote", 20)
        with said(caplog, "drain_stopped"), SyncCheckpointEngine(tmp_path / "two", drain=Drain(url)) as second:
            second.restore(state(0))
            pending = first.checkpoint(state(2), step=2)
            assert pending.result().step == 2, "the disk goes on"
            with pytest.raises(CheckpointError, match="another run"):
                pending.wait_reached("remote", 20)
            assert "another run" in first.statistics().drain_trouble
            second.checkpoint(state(3), step=3).wait_reached("remote", 20)
            first.checkpoint(state(4), step=4).result()
    assert steps(url) == [3]


def test_damage_on_disk_is_made_good_by_the_bucket(tmp_path: Path, url: str) -> None:
    drain = Drain(url)
    with SyncCheckpointEngine(tmp_path / "run", drain=drain) as engine:
        engine.checkpoint(state(1), step=1).result()
    for slot in (tmp_path / "run").glob("slot-*"):
        with slot.open("r+b") as file:
            file.seek(100)
            file.write(b"?" * 600)
    with SyncCheckpointEngine(tmp_path / "run", drain=drain) as engine:
        restored = engine.restore(target := state(0))
        assert restored is not None
        assert (restored.source, target["step"]) == ("remote", 1)
        assert torch.equal(target["weights"], state(1)["weights"])
        engine.checkpoint(state(2), step=2).result()
    assert steps(url) == [2]


def test_a_run_that_went_back_restarts_after_a_crash(tmp_path: Path, lying: LyingObjects) -> None:
    drain = Drain("s3://lying/run", keep_last=3, closing=0.05)
    with SyncCheckpointEngine(tmp_path / "run", keep_last=3, drain=drain) as engine:
        for step in (1, 2, 3):
            engine.checkpoint(state(step), step=step).wait_reached("remote", 20)
    with SyncCheckpointEngine(tmp_path / "run", keep_last=3, drain=drain, overwrite=True) as engine:
        engine.restore(state(0), step=1)
        original = lying.put

        async def put(key: str, data: Any) -> None:
            await asyncio.sleep(60)

        lying.put = put  # type: ignore[method-assign]
        engine.checkpoint(state(2), step=2).result()
        time.sleep(0.2)
    lying.put = original  # type: ignore[method-assign]
    assert steps_in(lying) == [3, 2, 1], "the new branch has not come there"
    with SyncCheckpointEngine(tmp_path / "run", keep_last=3, drain=drain) as engine:
        restored = engine.restore(state(0))
        assert restored is not None
        assert (restored.step, restored.source) == (2, "disk")
        engine.checkpoint(state(3), step=3).wait_reached("remote", 20)
    assert steps_in(lying)[0] == 3


# -- dropping


def test_what_is_rejected_or_removed_goes_from_the_bucket(tmp_path: Path, url: str) -> None:
    with SyncCheckpointEngine(tmp_path / "run", keep_last=4, drain=Drain(url, keep_last=4)) as engine:
        for step in (1, 2, 3, 4):
            engine.checkpoint(state(step), step=step).wait_reached("remote", 20)
        engine.remove(step=2)
        until(lambda: steps(url) == [4, 3, 1])
        engine.reject(step=3)
        until(lambda: steps(url) == [1])
    with SyncCheckpointEngine(tmp_path / "empty", drain=Drain(url, keep_last=4)) as engine:
        restored = engine.restore(state(0))
        assert restored is not None
        assert restored.step == 1


def test_a_rejection_is_followed_after_a_crash(tmp_path: Path, lying: LyingObjects) -> None:
    drain = Drain("s3://lying/run", keep_last=4, closing=0.05)
    with SyncCheckpointEngine(tmp_path / "run", keep_last=4, drain=drain) as engine:
        for step in (1, 2):
            engine.checkpoint(state(step), step=step).wait_reached("remote", 20)
        lying.lies = {"vanished"}
        engine.reject(step=2)
    lying.lies = set()
    assert steps_in(lying) == [2, 1]
    with SyncCheckpointEngine(tmp_path / "run", keep_last=4, drain=drain):
        until(lambda: steps_in(lying) == [1])


def hold_puts(lying: LyingObjects, goes_on: threading.Event) -> None:
    original = lying.put

    async def put(key: str, data: Any) -> None:
        while not goes_on.is_set():  # noqa: ASYNC110 - by another thread
            await asyncio.sleep(0.001)
        await original(key, data)

    lying.put = put  # type: ignore[method-assign]


def test_what_is_removed_while_it_is_copied_does_not_come_there(tmp_path: Path, lying: LyingObjects) -> None:
    goes_on = threading.Event()
    drain = Drain("s3://lying/run", keep_last=4)
    with SyncCheckpointEngine(tmp_path / "run", keep_last=4, drain=drain) as engine:
        engine.checkpoint(state(1), step=1).wait_reached("remote", 20)
        hold_puts(lying, goes_on)
        until(lambda: not engine.statistics().drain_lag_seconds)
        made = [key for kind, key, *_ in lying.requests if kind == "create"]
        pending = engine.checkpoint(state(2), step=2)
        pending.result(20)
        time.sleep(0.05)
        engine.remove(step=2)
        goes_on.set()
        with pytest.raises(CheckpointError, match="rejected, or removed"):
            pending.wait_reached("remote", 20)
    assert steps_in(lying) == [1]
    assert [key for kind, key, *_ in lying.requests if kind == "create"] == made, "not for a moment"


def test_what_is_removed_behind_an_unanswered_commit_goes_when_that_arrives(
    tmp_path: Path, lying: LyingObjects
) -> None:
    with SyncCheckpointEngine(tmp_path / "run", keep_last=4, drain=Drain("s3://lying/run", keep_last=4)) as engine:
        engine.checkpoint(state(1), step=1).wait_reached("remote", 20)
        create, late = lying.create, list[tuple[str, bytes]]()

        async def unanswered(key: str, data: bytes) -> bool:
            late.append((key, data))
            raise WriteError(errno.EIO, "no answer")

        lying.create = unanswered  # type: ignore[method-assign]
        engine.checkpoint(state(2), step=2).result(20)
        until(lambda: engine.statistics().drain_trouble)
        engine.remove(step=2)
        lying.create = create  # type: ignore[method-assign]
        lying.stored.setdefault(*late[0])
        engine.checkpoint(state(3), step=3).wait_reached("remote", 20)
        until(lambda: steps_in(lying) == [3, 1])
    assert steps_in(lying) == [3, 1]


def test_a_removal_that_did_not_come_there_is_said_on_closing(
    tmp_path: Path, lying: LyingObjects, caplog: pytest.LogCaptureFixture
) -> None:
    drain = Drain("s3://lying/run", keep_last=4, closing=0.05)
    with SyncCheckpointEngine(tmp_path / "run", keep_last=4, drain=drain) as engine:
        for step in (1, 2):
            engine.checkpoint(state(step), step=step).wait_reached("remote", 20)
        lying.lies = {"vanished"}
        engine.remove(step=2)
    assert "steps 2 were rejected or removed, and still count in lying://bucket" in caplog.text


# -- what else may go wrong


def test_commits_of_another_branch_are_never_restored(tmp_path: Path, url: str) -> None:
    """Counters repeat: what is here as one checkpoint may be another there."""
    with SyncCheckpointEngine(tmp_path / "one", drain=Drain(url, keep_last=5)) as engine:
        for step in (5, 6, 7):
            engine.checkpoint(state(step), step=step).wait_reached("remote", 20)
    with SyncCheckpointEngine(tmp_path / "two", keep_last=3) as engine:
        engine.checkpoint(state(1), step=1).result()
    with SyncCheckpointEngine(tmp_path / "two", keep_last=3, drain=Drain(url, keep_last=5), overwrite=True) as engine:
        engine.checkpoint(state(9), step=9).wait_reached("remote", 20)
        with pytest.raises(NoCheckpointError):
            engine.restore(state(0), step=7)  # more than were saved here: its counter is none of ours
        damaged = next(path for path in (tmp_path / "two").glob("slot-*") if b"\x00\x00\x80?" * 9 in path.read_bytes())
        data = bytearray(damaged.read_bytes())
        data[data.index(b"\x00\x00\x80?" * 9)] ^= 1
        damaged.write_bytes(data)
        with pytest.raises(DamagedError):
            engine.restore(state(0), step=1)


def test_who_waits_is_told_if_closing_is_cancelled(tmp_path: Path, lying: LyingObjects) -> None:
    async def work() -> None:
        engine = CheckpointEngine(tmp_path / "run", drain=Drain("s3://lying/run"))
        await engine.open()
        hold_puts(lying, threading.Event())
        pending = await engine.checkpoint(state(1), step=1)
        await pending.durable()
        waiting = asyncio.ensure_future(pending.reached("remote"))
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0.1)
        closing.cancel()
        with suppress(asyncio.CancelledError):
            await closing
        with pytest.raises(CheckpointError, match="step 1 is on disk, and not yet in"):
            await asyncio.wait_for(waiting, 20)

    asyncio.run(work())


def test_closing_ends_though_an_object_fails_while_another_is_under_way(
    tmp_path: Path, lying: LyingObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of tasks that ends because one failed loses a cancellation that comes meanwhile."""

    def slow(data: memoryview) -> str:
        if len(digested) % 2:
            time.sleep(0.4)  # a large object on a slow machine: no cancellation ends it
        digested.append(time.monotonic())
        return digest(data)

    async def fail(key: str, data: Any) -> None:
        raise WriteError(errno.EIO, "no answer")

    digested = list[float]()
    monkeypatch.setattr(upload, "digest", slow)
    monkeypatch.setattr(upload, "OBJECT_BYTES", 1 << 18)
    lying.put = fail  # type: ignore[method-assign]
    drain = Drain("s3://lying/run", closing=0.1, deadline=0.01)
    engine = SyncCheckpointEngine(tmp_path / "run", storage=StorageOptions(chunk_bytes=1 << 18), drain=drain).open()
    engine.checkpoint({"weights": torch.rand(1 << 17)}, step=1).result(20)
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()


@pytest.mark.parametrize("event", ["drain_trouble", "drained"])
def test_a_log_that_raises_ends_no_drain(
    tmp_path: Path, lying: LyingObjects, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "pccheck_async")

    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if getattr(record, "event", "") == event:
                raise RuntimeError("the log is full")

    handler = Raising()
    logging.getLogger("pccheck_async").addHandler(handler)
    try:
        with SyncCheckpointEngine(tmp_path / "run", drain=Drain("s3://lying/run")) as engine:
            lying.lies = {"vanished"}
            pending = engine.checkpoint(state(1), step=1)
            pending.result(20)
            until(lambda: "no such bucket" in engine.statistics().drain_trouble)
            lying.lies = set()
            pending.wait_reached("remote", 20)
            engine.checkpoint(state(2), step=2).wait_reached("remote", 20)
    finally:
        logging.getLogger("pccheck_async").removeHandler(handler)


# -- settings


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    for wrong in ({"keep_last": 0}, {"keep_last": 64}, {"every": 10}, {"rate_limit": 0}, {"deadline": -1},
                  {"options": "x"}, {"closing": None}):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Drain("s3://bucket/run", **wrong)
    with pytest.raises(ValueError, match="such as s3://bucket/run"):
        Drain(tmp_path)
    with pytest.raises(TypeError, match='Drain\\("s3://bucket/run"\\)'):
        SyncCheckpointEngine(tmp_path / "run", drain="s3://bucket/run")  # type: ignore[arg-type]
    with SyncCheckpointEngine(tmp_path / "run") as engine, pytest.raises(CheckpointError, match="drain=Drain"):
        engine.checkpoint(state(1)).wait_reached("remote")


def test_secrets_are_not_shown() -> None:
    drain = Drain("s3://user:password@bucket/run?x=password", options={"secret_access_key": "password"})
    assert "password" not in repr(drain)
    assert "password" not in repr(Drain(HTTPStore("https://user:password@host/run?x=password")))


def test_a_rate_limit_spreads_the_objects_over_time(
    tmp_path: Path, lying: LyingObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "OBJECT_BYTES", 1 << 18)
    put, times = lying.put, list[float]()

    async def noted(key: str, data: Any) -> None:
        times.append(time.monotonic())
        await put(key, data)

    lying.put = noted  # type: ignore[method-assign]
    storage = StorageOptions(chunk_bytes=1 << 18)
    drain = Drain("s3://lying/run", rate_limit=1 << 20)
    with SyncCheckpointEngine(tmp_path / "run", storage=storage, drain=drain) as engine:
        engine.checkpoint({"weights": torch.rand(1 << 18)}, step=1).wait_reached("remote", 20)
    assert len(times) > 4
    assert times[3] - times[0] > 0.5, "four objects of a quarter of a second each"


def test_no_memory_is_sent_from_twice(tmp_path: Path, lying: LyingObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was given up may still be sending: other bytes under its name would be damage."""
    monkeypatch.setattr(upload, "OBJECT_BYTES", 1 << 18)
    put, sending = lying.put, list[tuple[Any, bytes]]()

    async def noted(key: str, data: Any) -> None:
        sending.append((data, bytes(data)))
        await put(key, data)

    lying.put = noted  # type: ignore[method-assign]
    storage = StorageOptions(chunk_bytes=1 << 18)
    with SyncCheckpointEngine(tmp_path / "run", storage=storage, drain=Drain("s3://lying/run")) as engine:
        engine.checkpoint({"weights": torch.rand(1 << 19)}, step=1).wait_reached("remote", 20)
    assert len(sending) > 8
    assert all(bytes(data) == then for data, then in sending)


def test_one_object_is_read_while_others_are_sent(
    tmp_path: Path, lying: LyingObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If two were read together, they would be sent together, and the bucket would wait for the next two."""
    monkeypatch.setattr(upload, "OBJECT_BYTES", 1 << 18)
    original, now, most = Files.read, 0, 0

    async def counted(self: Files, file: File, offset: int, into: memoryview) -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        try:
            await asyncio.sleep(0.01)
            return await original(self, file, offset, into)
        finally:
            now -= 1

    storage = StorageOptions(chunk_bytes=1 << 18)
    with SyncCheckpointEngine(tmp_path / "run", storage=storage, drain=Drain("s3://lying/run")) as engine:
        monkeypatch.setattr(Files, "read", counted)
        engine.checkpoint({"weights": torch.rand(1 << 19)}, step=1).wait_reached("remote", 20)
    assert most == 1


def test_a_rejection_means_nothing_for_another_branch(tmp_path: Path, url: str) -> None:
    """Counters repeat on other disks: what is rejected here is not what has its counter there."""
    with SyncCheckpointEngine(tmp_path / "one", drain=Drain(url, keep_last=5)) as engine:
        for step in (0, 1):
            engine.checkpoint(state(step), step=step).wait_reached("remote", 20)
    with SyncCheckpointEngine(tmp_path / "two", keep_last=3) as engine:
        for step in (7, 8):
            engine.checkpoint(state(step), step=step).result()
        engine.reject(step=8)
    assert list_checkpoints(tmp_path / "two")[0].counter == list_checkpoints(url)[0].counter
    with SyncCheckpointEngine(tmp_path / "two", drain=Drain(url, keep_last=5), overwrite=True) as engine:
        assert {info.tiers for info in engine.checkpoints()} == {("disk",)}
        engine.checkpoint(state(9), step=9).wait_reached("remote", 20)
    assert steps(url) == [9, 1, 0]
