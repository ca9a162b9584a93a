"""Ctrl-C, anywhere in the calls of an engine: nothing acknowledged is lost, nothing torn is kept, nothing leaks."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import CheckpointError, StorageOptions, SyncCheckpointEngine, load_sync
from tests.support.interrupts import interrupter


def state_of(step: int) -> dict[str, Any]:
    return {"a": torch.full((3000,), float(step)), "b": torch.full((3000,), float(step)), "step": step}


def storm(path: Path, seed: int, rounds: int) -> dict[str, int]:
    """Interrupt the saving of so many steps, and look at what is there after each."""
    seen = {"saved": 0, "not saved": 0, "reopened": 0}
    engine, acknowledged = SyncCheckpointEngine(path, keep_last=2, overwrite=True).open(), 0
    engine.checkpoint(state_of(0), step=0).result(60)
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with interrupter(seed) as source, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, rounds + 1):
            try:
                source.ask(0.004)
                engine.checkpoint(state_of(step), step=step).result(60)
                acknowledged = step
                source.wait()
            except KeyboardInterrupt:
                pass
            with suppress(CheckpointError):  # of the one that was interrupted
                engine.drain()
            infos = engine.checkpoints()
            assert infos[0].step in (acknowledged, step), (infos[0], acknowledged, step)
            seen["saved" if infos[0].step == step else "not saved"] += 1
            acknowledged = infos[0].step
            found = load_sync(path)
            assert found["step"] == acknowledged
            assert (found["a"] == acknowledged).all()
            assert (found["b"] == acknowledged).all()
            statistics = engine.statistics()
            assert statistics.in_flight == 0
            assert statistics.pool_in_use_bytes == 0
            if step % 50 == 0:
                engine.close()
                engine = SyncCheckpointEngine(
                    path, keep_last=2, overwrite=True, storage=StorageOptions(lock_timeout=0)
                ).open()
                seen["reopened"] += 1
                engine.checkpoint(state_of(step), step=step).result(60)
                acknowledged = step
    assert threading.active_count() <= before[0]
    assert len(os.listdir("/proc/self/fd")) <= before[1] + 2
    engine.close()
    seen["swallowed"] = source.swallowed
    return seen


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left_behind")
def test_a_storm_of_interrupts(tmp_path: Path) -> None:
    seen = storm(tmp_path, 1, 40)
    assert seen["saved"] + seen["not saved"] == 40


@pytest.mark.campaign
@pytest.mark.usefixtures("nothing_left_behind")
def test_a_storm_of_2000_interrupts(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    seen = storm(tmp_path, 2, 2000)
    record_property("seen", seen)
    assert min(seen["saved"], seen["not saved"]) > 20


class Endless:
    """Its finalizer ends by an interrupt."""

    def __del__(self) -> None:
        while True:
            pass


def swallow() -> None:
    with suppress(KeyboardInterrupt):
        while True:
            pass


@pytest.mark.parametrize(
    ("work", "found"), [(swallow, ["1 interrupts were swallowed, 0 in finalizers"]), (Endless, [])]
)
def test_an_interrupt_that_is_swallowed_other_than_by_a_finalizer_fails(
    work: Callable[[], object], found: list[str]
) -> None:
    told = []
    try:
        with interrupter(1) as source:
            source.patience = 0.05
            source.ask(1)
            with suppress(KeyboardInterrupt):
                work()
                source.wait()
            assert source.swallowed == 1
    except AssertionError as error:
        told.append(str(error).partition("\n")[0])
    assert told == found
