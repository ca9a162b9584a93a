"""Power loss and process death at every operation boundary, on the real engine (invariants I1 to I7 and I12)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from pccheck_async import CheckpointEngine, StorageOptions, SyncCheckpointEngine, load_sync
from pccheck_async.testing import CrashDisk, CrashWriter, DiskSnapshot, ImageWriter, power_loss_images
from tests.engine.test_inline_capture_engine import FOLDER
from tests.support.crash_harness import Findings, Scenario, explore, explore_damage, explore_falling_back

STATES = 400
"""Distinct crash states in each scenario, at least; the campaign has a million."""
FEW: dict[str, Any] = {"images": 5, "subsets": 3}
"""Of each boundary, so that there are many boundaries among them."""
WHOLE = 0.25
"""Share of them that is read as a whole; the campaign reads all so."""

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("machine_asked_once")]


@pytest.fixture
def judged(record_property: Callable[[str, object], None]) -> Callable[[Findings], Findings]:
    """Say what was found (``pytest -s``), and fail where recovery broke a promise."""

    def tell(findings: Findings) -> Findings:
        record_property("crash_states", len(findings.states))
        print(f"\n  {findings.summary()}")
        assert not findings.violations, "\n".join(findings.violations)
        return findings

    return tell


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(1, 1, seed=1, states=STATES, bursts=3, deaths=2, **FEW),
        Scenario(2, 3, seed=4, states=STATES, bursts=2, deaths=1, **FEW),
        Scenario(4, 3, seed=6, states=STATES, bursts=1, deaths=1, **FEW),
        Scenario(1, 1, seed=9, states=STATES, bursts=3, deaths=2, chunk_blocks=16, buffers=4, **FEW),
    ],
    ids=lambda s: f"{s.max_in_flight} in flight, {s.keep_last} kept, {s.chunk_blocks} blocks a chunk",
)
def test_no_crash_breaks_a_promise(scenario: Scenario, judged: Callable[[Findings], Findings]) -> None:
    findings = judged(explore(dataclasses.replace(scenario, sampled=WHOLE)))
    assert len(findings.states) >= STATES
    assert findings.events["read as a whole"] > 0.6 * WHOLE * STATES
    assert findings.events["process deaths"] >= 2 * scenario.deaths
    assert findings.events["committed"] > 0


def test_all_subsets_of_what_was_not_flushed(judged: Callable[[Findings], Findings]) -> None:
    findings = judged(explore(Scenario(1, 1, seed=7, bursts=3, deaths=0, subsets=9, trouble=0.0, sampled=WHOLE)))
    assert findings.exhausted == findings.boundaries


def test_a_failed_record_loses_nothing(judged: Callable[[Findings], Findings]) -> None:
    scenario = Scenario(2, 1, seed=8, bursts=2, deaths=3, images=6, subsets=3, record_trouble=0.12, sampled=WHOLE)
    findings = judged(explore(scenario))
    assert findings.events["failed"] > 0


@pytest.mark.parametrize("rules", [{"every": 3}, {"best": ("loss", 1, "min")}], ids=str)
def test_what_is_pinned_or_kept_by_a_rule_stays(rules: dict[str, Any], judged: Callable[[Findings], Findings]) -> None:
    scenario = Scenario(2, 1, seed=9, bursts=5, deaths=2, images=6, subsets=2, rules=rules, pins=1.0, sampled=0.02)
    findings = judged(explore(scenario))
    assert findings.events["pinned"] > 0
    assert len(findings.states) > 100


def test_what_is_removed_is_gone_and_the_rest_stays(judged: Callable[[Findings], Findings]) -> None:
    scenario = Scenario(2, "all", seed=12, bursts=5, deaths=1, images=6, subsets=2, removals=1.0, sampled=0.02)
    findings = judged(explore(scenario))
    assert findings.events["removed"] > 0
    assert len(findings.states) > 100


@pytest.mark.parametrize("keep_last", [1, 3])
def test_damage_never_yields_another_state(keep_last: int, judged: Callable[[Findings], Findings]) -> None:
    findings = judged(explore_damage(keep_last, images=120))
    assert findings.events["whole"] > 0
    assert findings.events["older instead" if keep_last > 1 else "refused"] > 0


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(100, 105))
@pytest.mark.parametrize("keep_last", [1, 3])
@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
def test_campaign(max_in_flight: int, keep_last: int, seed: int, judged: Callable[[Findings], Findings]) -> None:
    judged(explore(Scenario(max_in_flight, keep_last, seed=seed, bursts=6, deaths=6, images=40, subsets=6)))


def test_a_creator_that_is_killed_cannot_reach_into_the_next_ones_store() -> None:
    """What it had queued for store.json, with another id, lands when that of the next process has its name."""
    history: list[DiskSnapshot] = []

    async def save(disk: CrashDisk, step: int) -> None:
        async with CheckpointEngine("memory", storage=StorageOptions(io=CrashWriter(disk, turns=0))) as engine:
            await (await engine.checkpoint({"step": step}, step=step)).durable()

    asyncio.run(save(CrashDisk(observer=history.append), 1))
    moment = next(s for s in history if s.boundary == "write store.json.new submitted")
    for operations in range(1, 40):
        disk = CrashDisk.after_process_death(moment, lingering=operations)
        asyncio.run(save(disk, 2))
        disk = CrashDisk.after_process_death(disk.snapshot())
        assert load_sync("memory", io=CrashWriter(disk, turns=0, read_only=True)) == {"step": 2}, operations


def test_a_slot_that_a_dead_writer_made_is_durable_before_a_record_names_it() -> None:
    """It died before the folder was synced: the next one finds the slot, and only that sync makes its name durable."""
    history: list[DiskSnapshot] = []

    def save_steps(disk: CrashDisk, *steps: int) -> None:
        with SyncCheckpointEngine(
            FOLDER, storage=StorageOptions(io=CrashWriter(disk, turns=0)), max_in_flight=1
        ) as engine:
            for step in steps:
                disk.acknowledge(engine.checkpoint({"step": step}, step=step).result(30).step)

    save_steps(CrashDisk(observer=history.append), 1)
    moment = [s for s in history if s.boundary.startswith("reserve slot") and s.boundary.endswith("completed")][-1]
    disk = CrashDisk.after_process_death(moment)
    history.clear()
    disk.observer = history.append
    save_steps(disk, 2, 3)  # the second one into the slot that was made last
    for snapshot in history:
        for image in power_loss_images(snapshot, limit=8):
            if snapshot.acknowledged is not None:
                step = load_sync(FOLDER, io=ImageWriter(image))["step"]
                assert step >= snapshot.acknowledged, snapshot.boundary


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in (1, 2))])
def test_a_crash_after_falling_back_to_what_was_superseded(seed: int) -> None:
    """Nothing is lost: neither that, until something newer is durable, nor what is newer."""
    findings = explore_falling_back(seed, images=3)
    assert not findings.violations, findings.violations[:5]
    assert len(findings.states) > 50
