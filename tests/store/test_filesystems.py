"""Real filesystems: checkpoints on each of them, full ones, read-only ones, and those whose power fails in mid-save."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import CheckpointError, StorageOptions, SyncCheckpointEngine, list_checkpoints, load_sync
from pccheck_async.errors import StoreFullError
from tests.engine.test_engine import assert_same, state_of
from tests.support.kill_harness import PHASES, Campaign
from tests.support.loop_devices import LOG_FLUSHED, LOG_LOST, MAKE, MIB, Mounted

pytestmark = [pytest.mark.root, pytest.mark.slow]


class PowerLosses(Campaign):
    """Deaths of the machine, by the shutdown of its filesystem, instead of those of a process."""

    def __init__(self, device: Mounted, **settings: Any) -> None:
        super().__init__(device.place / "store", **settings)
        self.device = device
        self.journals = {LOG_FLUSHED: 0, LOG_LOST: 0}

    def strike(self, child: int) -> None:
        how = self.random.choice((LOG_FLUSHED, LOG_LOST, LOG_LOST))
        self.journals[how] += 1
        self.device.lose_power(how)
        super().strike(child)

    def recover(self) -> None:
        self.device.unmount()
        self.device.mount()


@pytest.mark.parametrize("kind", MAKE)
def test_saves_and_loads(tmp_path: Path, kind: str, io: str) -> None:
    with Mounted(tmp_path, kind) as device:
        with SyncCheckpointEngine(device.place / "store", storage=StorageOptions(io=io), keep_last=2) as engine:  # type: ignore[arg-type]
            for step, size in enumerate((5000, 5000, 90_000, 300)):
                engine.checkpoint(state_of(step, size), step=step).result()
            engine.pin(step=3)
        with SyncCheckpointEngine(device.place / "store", storage=StorageOptions(io=io)) as engine:  # type: ignore[arg-type]
            engine.checkpoint(state_of(4), step=4).result()
        assert [info.step for info in list_checkpoints(device.place / "store")] == [4, 3]
        assert_same(load_sync(device.place / "store", step=3), 3, 300)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.campaign) if kind == "ext2" else kind for kind in MAKE]
)
def test_a_full_filesystem(tmp_path: Path, kind: str) -> None:
    with Mounted(tmp_path, kind) as device:
        store, filler = device.place / "store", device.place / "filler"
        with SyncCheckpointEngine(store) as engine:
            engine.checkpoint(state_of(0), step=0).result()
            noise = os.urandom(8 * MIB)
            for nbytes in (8 * MIB, MIB // 4):
                with filler.open("ab", buffering=0) as file, suppress(OSError):
                    while file.write(noise[:nbytes]):
                        os.fsync(file.fileno())
            with pytest.raises(StoreFullError):
                engine.checkpoint({"x": torch.zeros(8 * MIB), "step": 1}, step=1).result()
            assert_same(load_sync(store), 0)
            if kind != "btrfs":  # it needs new blocks for whatever is written
                engine.checkpoint(state_of(2), step=2).result()
                assert_same(load_sync(store), 2)
            filler.unlink()
        with SyncCheckpointEngine(store) as engine:
            engine.checkpoint(state_of(3, 100_000), step=3).result()
        assert_same(load_sync(store), 3, 100_000)


def test_a_filesystem_that_turns_read_only_in_mid_save(tmp_path: Path) -> None:
    with Mounted(tmp_path, "ext4") as device:
        store, last = device.place / "store", -1
        engine = SyncCheckpointEngine(store, keep_last=2).open()
        for step in range(20):
            last = engine.checkpoint(state_of(step, 200_000), step=step).result(60).step
        pending = engine.checkpoint(state_of(20, 200_000), step=20)
        device.abort()
        with suppress(CheckpointError):
            last = pending.result(60).step
        with pytest.raises(CheckpointError):
            engine.checkpoint(state_of(21, 200_000), step=21).result(60)
        with suppress(CheckpointError):
            engine.close()
        assert load_sync(store)["step"] >= last >= 19
        assert_same(load_sync(store), load_sync(store)["step"], 200_000)
        with pytest.raises(CheckpointError), SyncCheckpointEngine(store):
            pass
        device.unmount()
        device.mount()
        with SyncCheckpointEngine(store) as engine:
            engine.checkpoint(state_of(77), step=77).result()
        assert_same(load_sync(store), 77)


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_the_power_fails_in_every_phase(tmp_path: Path, kind: str) -> None:
    with Mounted(tmp_path, kind) as device:
        campaign = PowerLosses(device, io="threads", elements=20_000, seed=1)
        outcome = campaign.run(len(PHASES))
        assert outcome.restarts >= len(PHASES) - 1


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["ext4", "ext4 of 1 KiB blocks", "xfs"])
def test_the_power_fails_often(tmp_path: Path, kind: str) -> None:
    start = time.perf_counter()
    with Mounted(tmp_path, kind) as device:
        campaign = PowerLosses(device, io="threads", elements=100_000, seed=2, in_flight=2)
        outcome = campaign.run(140)
    seconds = time.perf_counter() - start
    journals = f"journal flushed {campaign.journals[LOG_FLUSHED]} times, lost {campaign.journals[LOG_LOST]} times"
    print(
        f"\n{kind}: power lost {dict(outcome.kills)}, {journals}; {outcome.restarts} restarts verified, "
        f"last step acknowledged {outcome.acknowledged}, {seconds:.0f} s"
    )
