"""Power loss and process death where slots are known to hold bytes that are not written again."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pccheck_async.errors import CheckpointError
from pccheck_async.medium import File, Medium
from pccheck_async.store import SlotLease, Store, Written, known_bytes
from pccheck_async.store.known_bytes import KnownBytes
from pccheck_async.testing import WrappingWriter
from tests.support import crash_harness
from tests.support.crash_harness import BLOCK, Findings, Scenario, explore

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("machine_asked_once", "alike")]

STATES = 300
"""Distinct crash states in each scenario, at least."""
_BLOCKS = (6, 6, 9, 6, 1, 6)
"""Blocks of the weights, by step; one alone is written together with its record."""


@functools.cache
def alike_state(step: int) -> dict[str, Any]:
    """Return the one state of ``step``: each block of its weights is that of about every second other step."""
    rng = random.Random(step)
    blocks = [
        np.random.default_rng(2 * number + rng.getrandbits(1)).random(BLOCK // 4, dtype=np.float32)
        for number in range(_BLOCKS[step % len(_BLOCKS)])
    ]
    return {"weights": torch.from_numpy(np.concatenate(blocks)), "step": step}


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_harness, "state_of", alike_state)
    monkeypatch.setattr(known_bytes, "PIECE_NBYTES", BLOCK)


@pytest.fixture
def unchanged(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count checkpoints with bytes that were not written, and those that a check ended after their flush."""
    events: Counter[str] = Counter()

    def count(self: KnownBytes, lease: SlotLease) -> None:
        events["unchanged"] += lease.unchanged_nbytes > 0
        note_flushed(self, lease)

    async def tear(self: Store, written: Written) -> None:
        def torn() -> None:
            events["torn"] += 1
            raise CheckpointError("torn")

        if rng.random() < 0.1:
            written = written._replace(check=torn)
        await finish_data(self, written)

    rng, note_flushed, finish_data = random.Random(1), KnownBytes.note_flushed, Store.finish_data
    monkeypatch.setattr(KnownBytes, "note_flushed", count)
    monkeypatch.setattr(Store, "finish_data", tear)
    return events


class Undated(WrappingWriter):
    """A file whose times tell nothing: only what the store does keeps it right."""

    def stamp(self, file: File) -> object:
        return 0


def scenario(max_in_flight: int, keep_last: int, seed: int, wrap: Callable[[Medium], Medium] = Undated) -> Scenario:
    troubles: dict[str, Any] = {"deaths": 1, "trouble": 0.2, "wrap": wrap}
    return Scenario(max_in_flight, keep_last, seed=seed, bursts=24, images=4, subsets=2, sampled=0.2, **troubles)


@pytest.mark.parametrize(
    ("max_in_flight", "keep_last", "seed"),
    [(1, 1, 0), *(pytest.param(*each, marks=pytest.mark.campaign) for each in [(2, 1, 1), (4, 3, 2)])],
)
def test_no_crash_breaks_a_promise(max_in_flight: int, keep_last: int, seed: int, unchanged: Counter[str]) -> None:
    findings = explore(dataclasses.replace(scenario(max_in_flight, keep_last, seed), states=STATES))
    print(f"\n  {findings.summary()}; {unchanged}")
    assert not findings.violations, "\n".join(findings.violations)
    assert len(findings.states) >= STATES
    assert unchanged["unchanged"] > 3
    assert unchanged["torn"] > 0
    assert findings.events["failed"] > 0
    assert findings.events["cancelled"] > 0


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(100, 120))
@pytest.mark.parametrize(("max_in_flight", "keep_last"), [(1, 1), (2, 1), (4, 3)])
def test_campaign(max_in_flight: int, keep_last: int, seed: int, unchanged: Counter[str]) -> None:
    findings = explore(dataclasses.replace(scenario(max_in_flight, keep_last, seed), deaths=4, images=30))
    assert not findings.violations, "\n".join(findings.violations)
    assert unchanged["unchanged"] > 3


def found(wrap: Callable[[Medium], Medium] = Undated) -> Findings:
    """Explore until a violation is found."""
    for seed in range(12):
        findings = explore(dataclasses.replace(scenario(1, 1, seed, wrap), enough=1, sampled=1.0))
        if findings.violations:
            print(f"\n  seed {seed}: {findings.violations[0]}")
            return findings
    pytest.fail("12 explorations found nothing")


def test_what_is_known_of_a_slot_stays_known_while_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: KnownBytes, lease: SlotLease) -> None:
        lease.known = self._slots.get(lease.slot, (None, {}))[1]

    monkeypatch.setattr(KnownBytes, "take", keep)
    found()


def test_bytes_are_known_before_they_are_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def early(self: KnownBytes, lease: SlotLease, offset: int, data: memoryview) -> list[tuple[int, int]]:
        parts = await changed(self, lease, offset, data)
        self._slots[lease.slot] = 0, lease.hashes
        return parts

    changed = KnownBytes.changed
    monkeypatch.setattr(KnownBytes, "changed", early)
    found()


def test_the_times_of_a_file_tell_what_the_store_forgot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same mistake as above: nothing is left out where the file was written since."""

    def keep(self: KnownBytes, lease: SlotLease) -> None:
        stamp, hashes = self._slots.get(lease.slot, (None, {}))
        lease.known = hashes if stamp == self._medium.stamp(lease.file) else {}

    monkeypatch.setattr(KnownBytes, "take", keep)
    findings = explore(dataclasses.replace(scenario(1, 1, 0, lambda medium: medium), sampled=0.5))
    assert not findings.violations
