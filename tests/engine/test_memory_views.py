# SPDX-License-Identifier: Apache-2.0
"""Checkpoints opened in memory: tensors view the slots that training saved into, and keep them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pccheck_async import MemoryTier, StorageOptions, SyncCheckpointEngine, load, load_sync, open_checkpoint
from pccheck_async.errors import CheckpointError, ClosedError, DamagedError, NoCheckpointError, StoreError
from pccheck_async.format.record import slot_name
from tests.support.children import in_child
from tests.support.state_strategies import TORCH_DTYPES

CHUNKED = 1_500_000
"""Elements of a tensor that takes several chunks."""


@pytest.fixture
def tier(shared_memory: Path) -> MemoryTier:
    return MemoryTier(interval=1, path=str(shared_memory), keep_after_close=True)


def state_of(step: int, elements: int = CHUNKED) -> dict[str, Any]:
    weights = torch.full((elements,), float(step))
    return {
        "weights": weights,
        "tied": weights,
        "small": torch.arange(7) + step,
        "array": np.ones(3) * step,
        "step": step,
    }


@contextmanager
def training(path: Path, tier: MemoryTier, steps: range, elements: int = CHUNKED) -> Iterator[SyncCheckpointEngine]:
    with SyncCheckpointEngine(path, memory=tier, save_last=False) as engine:
        for step in steps:
            engine.checkpoint(state_of(step, elements), step=step).result()
        yield engine


def saved(path: Path, tier: MemoryTier, steps: range) -> None:
    with training(path, tier, steps):
        pass


def folder_of(tier: MemoryTier) -> Path:
    (folder,) = Path(tier.path).iterdir()
    return folder


def test_tensors_view_the_memory_of_the_slot(tmp_path: Path, tier: MemoryTier) -> None:
    saved(tmp_path, tier, range(2))
    with open_checkpoint(tmp_path, tier=tier) as found:
        read, weights = found.bytes_read, found["weights"]
        assert found.info.step == found["step"] == 1
        assert found.info.tiers == ("memory", "disk")
        assert "step 1 in memory, of" in repr(found)
        assert torch.equal(weights, state_of(1)["weights"])
        assert weights.data_ptr() == found["weights"].data_ptr() == found["tied"].data_ptr()
        assert found.tensor("weights")[5:9].data_ptr() == weights[5:9].data_ptr()
        assert np.array_equal(found["array"], np.ones(3))
        everything = found.load()
        assert everything["weights"].data_ptr() == everything["tied"].data_ptr() == weights.data_ptr()
        assert found.bytes_read == read  # of the manifest alone


def test_load_copies_what_is_in_memory(tmp_path: Path, tier: MemoryTier) -> None:
    with training(tmp_path, tier, range(2)) as engine:
        engine.checkpoint(state_of(2), step=2, tier="memory").wait_reached("memory")
        loaded = load_sync(tmp_path, tier=tier)
        assert asyncio.run(load(tmp_path, keys=["step"], tier=tier)) == {"step": 2}
        assert load_sync(tmp_path)["step"] == load_sync(tmp_path, tier="disk")["step"] == 1
        for step in range(3, 9):  # into all slots
            engine.checkpoint(state_of(step), step=step, tier="memory").wait_reached("memory")
    assert torch.equal(loaded["weights"], state_of(2)["weights"])
    assert loaded["weights"].data_ptr() == loaded["tied"].data_ptr()
    assert np.array_equal(loaded["array"], state_of(2)["array"])
    with pytest.raises(NoCheckpointError, match="has no checkpoint of step 1000 in memory"):
        load_sync(tmp_path, step=1000, tier=tier)
    with pytest.raises(ValueError, match="a tier is 'memory' or 'disk'"):
        load_sync(tmp_path, tier="ram")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank=0 means nothing there"):
        load_sync(tmp_path, rank=0, tier=tier)


def test_what_is_written_into_them_stays_here(tmp_path: Path, tier: MemoryTier) -> None:
    saved(tmp_path, tier, range(1))
    with open_checkpoint(tmp_path, tier=tier) as found, open_checkpoint(tmp_path, tier=tier) as other:
        found["weights"].add_(1)
        found["array"][:] = 7
        assert torch.equal(found["weights"], torch.ones(CHUNKED))
        assert torch.equal(other["weights"], torch.zeros(CHUNKED))
        assert np.array_equal(other["array"], np.zeros(3))
    with SyncCheckpointEngine(tmp_path, memory=tier) as engine:
        state = state_of(5)
        restored = engine.restore(state)
        assert restored is not None
        assert restored.source == "memory"
        assert torch.equal(state["weights"], torch.zeros(CHUNKED))


@pytest.mark.parametrize("elements", [100, CHUNKED], ids=["one request", "chunks"])
def test_they_keep_their_memory_while_training_goes_on(tmp_path: Path, tier: MemoryTier, elements: int) -> None:
    with training(tmp_path, tier, range(3), elements) as engine:
        with open_checkpoint(tmp_path, tier=tier) as found:
            weights, before = found["weights"], engine.statistics().memory_bytes
        with pytest.raises(ClosedError):
            found["weights"]
        for step in range(3, 20):
            pending = engine.checkpoint(state_of(step, elements), step=step)
            pending.result()
            assert engine.latest is not None
            assert "memory" in engine.latest.tiers  # a reader costs a slot, and no checkpoint
        assert torch.equal(weights, torch.full((elements,), 2.0))
        slot = max(each.stat().st_size for each in folder_of(tier).glob("slot-*"))
        assert engine.statistics().memory_bytes <= before + slot
        del weights
        for step in range(20, 30):
            engine.checkpoint(state_of(step, elements), step=step).result()
        assert engine.statistics().memory_bytes <= before + slot
        with open_checkpoint(tmp_path, tier=tier) as found:
            assert torch.equal(found["weights"], torch.full((elements,), 29.0))


@pytest.mark.parametrize("elements", [100, CHUNKED * 3], ids=["one request", "slots made beside training"])
def test_readers_that_hold_every_slot_delay_nothing(
    tmp_path: Path, tier: MemoryTier, elements: int, caplog: pytest.LogCaptureFixture
) -> None:
    held: list[torch.Tensor] = []
    with training(tmp_path, tier, range(2), elements) as engine:
        step = 2
        while not any("hold all slots" in text for text in caplog.messages):
            with open_checkpoint(tmp_path, tier=tier) as found:
                held.append(found["weights"])
            engine.checkpoint(state_of(step, elements), step=step).result()  # on disk, whatever readers do
            step += 1
            assert step < 100
        slots = [each.stat().st_size for each in folder_of(tier).glob("slot-*")]
        assert len(slots) <= 5  # keep_last + max_in_flight + 1, and one for the readers
        assert [float(each[0]) for each in held] == sorted(float(each[0]) for each in held)
        assert all(torch.equal(each, each[:1].expand_as(each)) for each in held)
        held.clear()
        for _ in range(200):  # a while later it saves in memory again
            step += 1
            engine.checkpoint(state_of(step, elements), step=step).result()
            if engine.latest is not None and "memory" in engine.latest.tiers:
                break
            time.sleep(0.05)
        assert engine.latest is not None
        assert "memory" in engine.latest.tiers


def test_another_process_reads_whole_steps_beside_training(tmp_path: Path, tier: MemoryTier) -> None:
    stop = threading.Event()

    def read() -> int:
        seen: list[int] = []
        while len(set(seen)) < 5:
            with open_checkpoint(tmp_path, tier=tier) as found:
                step, state = found.info.step, found.load()
                assert found.info.tiers == (("memory",) if step else ("memory", "disk"))
            assert state["step"] == step
            assert torch.equal(state["weights"], torch.full((CHUNKED // 10,), float(step)))
            assert torch.equal(state["small"], torch.arange(7) + step)
            seen.append(step)
        assert seen == sorted(seen)
        return len(seen)

    def train() -> None:
        step = 1
        while not stop.is_set():
            engine.checkpoint(state_of(step, CHUNKED // 10), step=step, tier="memory")
            step += 1

    with training(tmp_path, tier, range(1), CHUNKED // 10) as engine:
        trainer = threading.Thread(target=train)
        trainer.start()
        try:
            assert in_child(read) >= 5
        finally:
            stop.set()
            trainer.join()


def test_a_flipped_bit_is_found_where_it_is_read(tmp_path: Path, tier: MemoryTier) -> None:
    state = {"first": torch.rand(CHUNKED), "second": torch.rand(CHUNKED)}
    with SyncCheckpointEngine(tmp_path, memory=tier, storage=StorageOptions(chunk_bytes=1 << 20)) as engine:
        engine.checkpoint(state, step=1).result()
    slots = [each for each in folder_of(tier).iterdir() if each.name.startswith(slot_name(0)[:5])]
    first = state["first"].numpy().tobytes()
    for each in slots:
        data = bytearray(each.read_bytes())
        if (place := data.find(first[:64])) >= 0:
            data[place + 1_000_000] ^= 4
            each.write_bytes(data)
    with open_checkpoint(tmp_path, tier=tier) as found:
        with pytest.raises(DamagedError, match="damaged"):
            found["first"]
        with pytest.raises(DamagedError, match="damaged"):
            found.load()
        assert torch.equal(found["second"][-1000:], state["second"][-1000:])


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_all_dtypes(tmp_path: Path, tier: MemoryTier, dtype: torch.dtype) -> None:
    values = torch.arange(64 * dtype.itemsize, dtype=torch.uint8) % 2
    state = {"values": values.view(dtype), "none": torch.empty(0, dtype=dtype)}
    with SyncCheckpointEngine(tmp_path, memory=tier) as engine:
        engine.checkpoint(state, step=0).result()
    with open_checkpoint(tmp_path, tier=tier) as found:
        for name, tensor in state.items():
            assert found[name].dtype == dtype
            assert found[name].shape == tensor.shape
            assert found[name].view(torch.uint8).equal(tensor.view(torch.uint8))


def test_only_what_the_disk_goes_on_from_is_opened(tmp_path: Path, tier: MemoryTier) -> None:
    saved(tmp_path, tier, range(3))
    with SyncCheckpointEngine(tmp_path) as engine:  # without the tier: memory is stale from its first save on
        state = state_of(0)
        engine.restore(state)
        engine.checkpoint(state, step=7).result()
    with pytest.raises(NoCheckpointError, match="no checkpoint in memory"):
        open_checkpoint(tmp_path, tier=tier)


def test_what_is_not_there(tmp_path: Path, tier: MemoryTier) -> None:
    with pytest.raises(NoCheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "none", tier=tier)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(state_of(0), step=0).result()
    with pytest.raises(NoCheckpointError, match=r"memory=MemoryTier\(\) saves there"):
        open_checkpoint(tmp_path, tier=tier)
    saved(tmp_path, tier, range(4, 5))
    with pytest.raises(NoCheckpointError, match="no checkpoint of step 3 in memory; there are steps 4"):
        open_checkpoint(tmp_path, step=3, tier=tier)
    with pytest.raises(ValueError, match="'memory' or 'disk', not 'ram'"):
        open_checkpoint(tmp_path, tier="ram")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank=1 means nothing there"):
        open_checkpoint(tmp_path, rank=1, tier=tier)


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, tier: MemoryTier) -> None:
    saved(tmp_path, tier, range(1))
    os.chmod(folder_of(tier), 0o777)
    with pytest.raises(StoreError, match="not a folder of this user's alone"):
        open_checkpoint(tmp_path, tier=tier)


def test_a_slot_that_was_cut_short_is_damaged(tmp_path: Path, tier: MemoryTier) -> None:
    saved(tmp_path, tier, range(1))
    with open_checkpoint(tmp_path, tier=tier) as found:
        os.truncate(max(folder_of(tier).iterdir(), key=lambda each: each.stat().st_size), 4096)
        with pytest.raises(CheckpointError, match="slot"):
            found["weights"]
