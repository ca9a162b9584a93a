"""Bytes that a slot still holds are not written again, and every checkpoint is whole all the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import Group, MemoryTier, StorageOptions, SyncCheckpointEngine, load_sync
from pccheck_async.engine.metrics import openmetrics
from pccheck_async.errors import CheckpointError, StoreFailedError
from pccheck_async.store import known_bytes
from pccheck_async.stores import verify
from pccheck_async.testing import CrashDisk, CrashWriter, FailingWriter
from pccheck_async.testing.probe import probe
from tests.support.ranks import run_ranks

CHUNK = 64 << 10
FROZEN = 8 * CHUNK
STORAGE: dict[str, Any] = {"chunk_bytes": CHUNK}


@pytest.fixture(autouse=True)
def nothing_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_bytes, "REWRITTEN", 0)


def state_of(step: int) -> dict[str, Any]:
    """Return a frozen tower of eight chunks, and two that are trained."""
    tower = torch.arange(FROZEN // 4, dtype=torch.int32)
    return {"tower": tower, "head": torch.full((2 * CHUNK // 4,), step, dtype=torch.int32), "step": step}


def equal(found: dict[str, Any], step: int) -> bool:
    wanted = state_of(step)
    return found["step"] == step and all(torch.equal(found[name], wanted[name]) for name in ("tower", "head"))


def engine_on(path: Path | str, **options: Any) -> SyncCheckpointEngine:
    return SyncCheckpointEngine(path, max_in_flight=1, storage=StorageOptions(**STORAGE | options))


def save(engine: SyncCheckpointEngine, *steps: int) -> int:
    """Save steps one after the other; return how many bytes were left out."""
    before = engine.statistics().unchanged_bytes
    for step in steps:
        engine.checkpoint(state_of(step), step=step).result(60)
    return engine.statistics().unchanged_bytes - before


def slot_of(path: Path, step: int) -> Path:
    """Return the slot with the head of a step."""
    head = state_of(step)["head"].numpy().tobytes()
    (found,) = (slot for slot in path.glob("slot-*") if head in slot.read_bytes())
    return found


def test_frozen_layers_are_written_once_for_each_slot(tmp_path: Path) -> None:
    with engine_on(tmp_path) as engine:
        assert save(engine, 0, 1) == 0
        written = engine.statistics().stages["write"].nbytes
        assert save(engine, 2, 3, 4) == 3 * FROZEN
        assert engine.statistics().stages["write"].nbytes - written < 3 * 3 * CHUNK, "heads, manifests, records"
        assert f'pccheck_unchanged_bytes_total{{store="run"}} {3 * FROZEN}' in openmetrics({"run": engine.statistics()})
        for step in (5, 6):
            save(engine, step)
            assert equal(load_sync(tmp_path), step)
    assert verify(tmp_path).whole
    with engine_on(tmp_path) as engine:
        assert engine.restore(state := state_of(-1)) is not None
        assert equal(state, 6)
        assert save(engine, 7, 8) == 0, "a new process knows nothing"
        assert save(engine, 9) == FROZEN


def test_a_small_trained_tensor_among_frozen_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_bytes, "PIECE_NBYTES", CHUNK // 16)
    with engine_on(tmp_path) as engine:
        state = state_of(0)
        for step in range(4):
            state["tower"][CHUNK // 8 :: CHUNK // 4] = state["step"] = step  # one element of every chunk
            engine.checkpoint(state, step=step).result(60)
        assert engine.statistics().unchanged_bytes == 2 * (FROZEN // 16 * 15 + 2 * CHUNK)
        assert torch.equal(load_sync(tmp_path)["tower"], state["tower"])


def longer(slot: Path) -> None:
    os.truncate(slot, slot.stat().st_size + 4096)


def touched(slot: Path) -> None:
    os.utime(slot)


def other_bytes(slot: Path) -> None:
    with slot.open("r+b") as file:
        file.write(b"others")


def linked(slot: Path) -> None:
    slot.with_suffix(".copy").hardlink_to(slot)


@pytest.mark.parametrize("change", [longer, touched, other_bytes, linked])
def test_a_slot_that_others_changed_is_unknown(tmp_path: Path, change: Callable[[Path], None]) -> None:
    with engine_on(tmp_path) as engine:
        save(engine, 0, 1)
        change(slot_of(tmp_path, 0))
        assert save(engine, 2) == 0
        assert save(engine, 3) == FROZEN, "the other slot"
        assert save(engine, 4) == FROZEN
    assert equal(load_sync(tmp_path), 4)


def test_rot_under_bytes_that_were_left_out_is_found(tmp_path: Path) -> None:
    with engine_on(tmp_path) as engine:
        save(engine, 0, 1)
        slot = slot_of(tmp_path, 0)
        times = slot.stat()
        with slot.open("r+b") as file:
            file.seek(3 * CHUNK)
            file.write(b"rot")
        os.utime(slot, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fstat", lambda fd: times)  # as if the device had done it
            known = engine.statistics().unchanged_bytes
            engine.checkpoint(state_of(2), step=2).result(60)
        assert engine.statistics().unchanged_bytes - known == FROZEN
        assert not verify(tmp_path).whole
        with pytest.warns(RuntimeWarning, match="chunk 3 .* falling back to step 1"):
            assert engine.restore(state := state_of(-1)) is not None
        assert equal(state, 1)


def test_a_failed_flush_ends_it() -> None:
    medium = FailingWriter(CrashWriter(CrashDisk(), turns=0), fail_at=None, kinds=("flush",))
    engine = engine_on("memory", io=medium)
    with engine:
        save(engine, 0, 1)
        known = probe(engine).store.slots.known
        assert known is not None
        assert known._slots
        medium.fail_next()
        with pytest.raises(StoreFailedError):
            save(engine, 2)
        assert not known._slots
        with pytest.raises(StoreFailedError):
            save(engine, 3)


def test_a_failed_write_leaves_its_slot_unknown() -> None:
    disk = CrashDisk()
    medium = FailingWriter(CrashWriter(disk, turns=0), fail_at=None, kinds=("write",))
    with engine_on("memory", io=medium) as engine:
        save(engine, 0, 1)
        medium.fail_next(1)
        with pytest.raises(CheckpointError):
            save(engine, 2)
        assert save(engine, 3) == 0
        assert save(engine, 4, 5) == 2 * FROZEN
        assert equal(load_sync("memory", io=CrashWriter(disk, turns=0, read_only=True)), 5)


def test_nothing_is_known_of_slots_that_are_gone(tmp_path: Path) -> None:
    with engine_on(tmp_path) as engine:
        save(engine, 0, 1, 2)
        for step in range(3, 7):  # each slot is too small
            engine.checkpoint({"tower": torch.zeros(FROZEN), "step": step}, step=step).result(60)
        slots = probe(engine).store.slots
        assert slots.known is not None
        assert slots.known._slots.keys() <= slots.table.sizes.keys()


@pytest.mark.parametrize(
    "options",
    [{"skip_unchanged": False}, {"medium": "mapped"}, {"chunk_bytes": 2 * FROZEN}],
    ids=["not wanted", "mapped", "one chunk"],
)
def test_where_all_is_written(tmp_path: Path, options: dict[str, Any]) -> None:
    with engine_on(tmp_path, **options) as engine:
        assert save(engine, *range(4)) == 0


def test_all_is_written_from_memory(tmp_path: Path, shared_memory: Path) -> None:
    storage = StorageOptions(**STORAGE)
    memory = MemoryTier(path=str(shared_memory))
    with SyncCheckpointEngine(tmp_path, storage=storage, memory=memory) as engine:
        assert save(engine, *range(5)) == 0
    assert equal(load_sync(tmp_path), 4)


def test_all_is_written_where_no_slot_is_taken_again(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last="all", storage=StorageOptions(**STORAGE)) as engine:
        save(engine, 0)
        assert probe(engine).store.slots.known is None


def test_without_xxhash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_bytes, "xxh3_128", None)
    with pytest.raises(ImportError, match=r"pip install \"pccheck-async\[unchanged\]\""):
        StorageOptions(skip_unchanged=True)
    with engine_on(tmp_path) as engine:
        assert save(engine, *range(4)) == 0


def test_a_wrong_value_is_refused() -> None:
    with pytest.raises(ValueError, match="skip_unchanged"):
        StorageOptions(skip_unchanged="yes")  # type: ignore[arg-type]


def test_a_rank_of_a_group(tmp_path: Path) -> None:
    def rank_main(group: Group) -> tuple[int, bool]:
        with SyncCheckpointEngine(tmp_path, group=group, storage=StorageOptions(**STORAGE)) as engine:
            for step in range(6):
                state = {f"{name} {group.rank}": value for name, value in state_of(step).items()}
                engine.checkpoint(state, step=step).result(60)
            state = {f"{name} {group.rank}": value for name, value in state_of(-1).items()}
            engine.restore(state)
            found = {name: state[f"{name} {group.rank}"] for name in state_of(0)}
            return engine.statistics().unchanged_bytes, equal(found, 5)

    for unchanged, is_equal in run_ranks(2, rank_main):
        assert unchanged >= 2 * FROZEN
        assert is_equal
    assert verify(tmp_path).whole
