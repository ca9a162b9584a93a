"""Objects whose bytes did not change are not sent to a bucket again."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")

import torch

from pccheck_async import Drain, Group, StorageOptions, SyncCheckpointEngine
from pccheck_async.bucket import compression, upload
from pccheck_async.bucket.coding import Block, compress
from pccheck_async.bucket.names import commit_number, data_name
from tests.support.lying_objects import LyingObjects, record_of, use_in_drains
from tests.support.thread_ranks import on_ranks

MIB = 1 << 20
FROZEN = 5
OPTIONS = StorageOptions(chunk_bytes=MIB)
pytestmark = pytest.mark.filterwarnings("ignore:the checkpoint of step")


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> LyingObjects:
    """The bucket of all drains, with objects of 1 MiB."""
    objects = LyingObjects()
    use_in_drains(objects, monkeypatch)
    monkeypatch.setattr(upload, "OBJECT_BYTES", MIB)
    return objects


def state(step: int, rank: int = 0) -> dict[str, Any]:
    """Frozen weights of five objects, and those of one that is trained."""
    generator = torch.Generator().manual_seed(rank)
    frozen = torch.randn(FROZEN * MIB // 4, generator=generator)
    return {"frozen": frozen, "trained": torch.full((MIB // 4,), step + rank / 8), "step": step}


def check(found: dict[str, Any], step: int, rank: int = 0) -> None:
    for name, value in state(step, rank).items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value


def sent(objects: LyingObjects) -> list[str]:
    """Return the data objects that were uploaded since the last call."""
    found = [key for kind, key in objects.requests if kind == "put" and data_name(key)]
    objects.requests.clear()
    return found


def drain(**settings: Any) -> Drain:
    return Drain("s3://lying/run", **settings)


@pytest.mark.parametrize("compression", [None, "zstd", "auto"])
def test_only_what_changed_is_sent(tmp_path: Path, lying: LyingObjects, compression: Any) -> None:
    settings: dict[str, Any] = {"drain": drain(compression=compression), "storage": OPTIONS, "save_last": False}
    with SyncCheckpointEngine(tmp_path / "run", **settings) as engine:
        for step in range(1, 5):
            engine.checkpoint(state(step), step=step).wait_reached("remote", 30)
            assert len(sent(lying)) == (FROZEN + 2 if step == 1 else 2)  # the trained weights, and the index
    with SyncCheckpointEngine(tmp_path / "run", **settings) as engine:  # the next run, too
        engine.restore(state(0))
        engine.checkpoint(state(5), step=5).wait_reached("remote", 30)
        assert len(sent(lying)) == 2
    targets = [name.target for key in lying.stored if (name := data_name(key))]
    assert len(targets) == FROZEN + 2  # what only older ones needed is deleted
    assert len(set(targets)) == 2
    with SyncCheckpointEngine(tmp_path / "other", **settings) as engine:
        found = engine.restore(restored := state(0))
        assert found is not None
        assert (found.step, found.source) == (5, "remote")
        check(restored, 5)


def test_what_did_not_change_is_not_compressed_again(
    tmp_path: Path, lying: LyingObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except once by the next run, which does not know the bytes before compression."""
    count = 0

    def counting(block: memoryview, into: memoryview) -> Block:
        nonlocal count
        count += 1
        return compress(block, into)

    monkeypatch.setattr(compression, "compress", counting)
    settings: dict[str, Any] = {"drain": drain(compression="zstd"), "storage": OPTIONS, "save_last": False}
    counts = []
    for first in (1, 4):
        with SyncCheckpointEngine(tmp_path / "run", **settings) as engine:
            engine.restore(state(0))
            for step in range(first, first + 3):
                before = count
                engine.checkpoint(state(step), step=step).wait_reached("remote", 30)
                counts.append(count - before)
    assert counts == [FROZEN + 1, 1, 1] * 2
    with SyncCheckpointEngine(tmp_path / "other", **settings) as engine:
        engine.restore(restored := state(0))
        check(restored, 6)


def test_what_changed_is_compressed_only_if_it_pays_then(
    tmp_path: Path, lying: LyingObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    pays = True

    async def decided(*_: object) -> bool:
        return pays

    monkeypatch.setattr(compression.Compressing, "_pays", decided)
    settings: dict[str, Any] = {"drain": drain(compression="auto"), "storage": OPTIONS, "save_last": False}
    saved, stored = {}, []
    with SyncCheckpointEngine(tmp_path / "run", **settings) as engine:
        for step in range(1, 4):
            seeded = torch.Generator().manual_seed(0 if step == 2 else step)
            saved = {"frozen": state(0)["frozen"], "trained": torch.randn(MIB // 4, generator=seeded)}
            engine.checkpoint(saved, step=step).wait_reached("remote", 30)
            stored.append([len(lying.stored[key]) for key in sent(lying)[:-1]])
            pays = False
    assert all(nbytes < MIB for nbytes in stored[0])
    assert stored[1:] == [[MIB], [MIB]]  # and what did not change keeps its name
    with SyncCheckpointEngine(tmp_path / "other", **settings) as engine:
        engine.restore(restored := {name: torch.zeros_like(each) for name, each in saved.items()})
        assert all(torch.equal(restored[name], each) for name, each in saved.items())


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_what_something_else_deleted_is_sent_again(tmp_path: Path, lying: LyingObjects, compression: Any) -> None:
    settings: dict[str, Any] = {"drain": drain(compression=compression), "storage": OPTIONS, "save_last": False}
    with SyncCheckpointEngine(tmp_path / "run", **settings) as engine:
        engine.checkpoint(state(1), step=1).wait_reached("remote", 30)
        objects = sorted(sent(lying), key=lambda key: len(lying.stored[key]))[-2:]
        del lying.stored[objects[0]]
        lying.stored[objects[1]] = lying.stored[objects[1]][:-1]
        engine.checkpoint(state(2), step=2).wait_reached("remote", 30)
        assert len(sent(lying)) in (3, 4)  # one of the two may be that of the trained weights
    with SyncCheckpointEngine(tmp_path / "other", drain=drain(), storage=OPTIONS) as engine:
        engine.restore(restored := state(0))
        check(restored, 2)


def test_a_removed_checkpoint_leaves_what_a_newer_one_names(tmp_path: Path, lying: LyingObjects) -> None:
    with SyncCheckpointEngine(
        tmp_path / "run", drain=drain(keep_last=2), keep_last=3, storage=OPTIONS, save_last=False
    ) as engine:
        for step in (1, 2, 3):
            engine.checkpoint(state(step), step=step).wait_reached("remote", 30)
        engine.remove(step=2)
        engine.checkpoint(state(4), step=4).wait_reached("remote", 30)
    with SyncCheckpointEngine(tmp_path / "other", drain=drain(keep_last=2), storage=OPTIONS) as engine:
        engine.restore(restored := state(0), step=3)
        check(restored, 3)
        engine.restore(restored := state(0), step=4)
        check(restored, 4)


@pytest.mark.slow
@pytest.mark.usefixtures("machine_asked_once")
def test_each_rank_names_its_own_again(tmp_path: Path, lying: LyingObjects) -> None:
    def work(group: Group) -> int:
        with SyncCheckpointEngine(
            tmp_path / "run", group=group, drain=drain(), storage=OPTIONS, save_last=False
        ) as engine:
            for step in (1, 2):
                engine.checkpoint(state(step, group.rank), step=step).wait_reached("remote", 30)
            return engine.statistics().drained_bytes

    def restore(group: Group) -> None:
        with SyncCheckpointEngine(tmp_path / "other", group=group, drain=drain(), storage=OPTIONS) as engine:
            engine.restore(restored := state(0, group.rank))
            check(restored, 2, group.rank)

    assert all((FROZEN + 2) * MIB < nbytes < (FROZEN + 2.1) * MIB for nbytes in on_ranks(2, work))
    on_ranks(2, restore)


def test_a_rate_limit_is_for_what_is_sent(tmp_path: Path, lying: LyingObjects) -> None:
    with SyncCheckpointEngine(tmp_path / "run", drain=drain(), storage=OPTIONS, save_last=False) as engine:
        engine.checkpoint(state(1), step=1).wait_reached("remote", 30)
    limited = drain(rate_limit=MIB // 3600)  # an hour for each object but the first
    with SyncCheckpointEngine(tmp_path / "run", drain=limited, storage=OPTIONS, save_last=False) as engine:
        engine.restore(state(0))
        engine.checkpoint(state(2), step=2).wait_reached("remote", 30)


def test_a_checkpoint_is_held_before_the_bucket_is_asked(tmp_path: Path, lying: LyingObjects) -> None:
    """Else training that saves faster than the bucket answers would replace each one in the meantime."""
    listing, create, answers, asked = lying.list, lying.create, threading.Event(), threading.Event()
    committed = list[int]()

    async def noted(key: str, data: bytes) -> bool:
        number = commit_number(key)
        record = None if number is None else record_of(data, number)
        committed.extend([record.entry.step] if record is not None and record.parts else [])
        return await create(key, data)

    async def slow(prefix: str, after: str = "") -> Any:
        if prefix.startswith("data/0"):
            asked.set()
            while not answers.is_set():  # noqa: ASYNC110 - by another thread
                await asyncio.sleep(0.001)
        return await listing(prefix, after)

    with SyncCheckpointEngine(tmp_path / "run", drain=drain(), storage=OPTIONS, save_last=False) as engine:
        engine.checkpoint(state(1), step=1).wait_reached("remote", 30)
        lying.list, lying.create = slow, noted  # type: ignore[method-assign]
        first = engine.checkpoint(state(2), step=2)
        first.result()
        assert asked.wait(30)
        for step in (3, 4, 5):
            engine.checkpoint(state(step), step=step).result()
        answers.set()
        first.wait_reached("remote", 30)
        assert 2 in committed
