"""Power loss and process death on persistent memory: lines in any order, in parts of 8 bytes, until they are fenced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from pccheck_async.testing import ATOM, CrashDisk, CrashMapping, MappedCrashWriter
from pccheck_async.testing.crash import Inode
from tests.support.crash_harness import Findings, Scenario, explore
from tests.support.mapping_mistakes import FencedTooEarly, NothingFenced, NothingWrittenBack, OneLineShort

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("machine_asked_once")]

STATES = 300
FEW: dict[str, Any] = {"images": 5, "subsets": 3}
WHOLE = 0.25
"""Share of the states that is read as a whole; of the others what a record names is read. The campaign reads all so."""
SCENARIO = Scenario(2, 1, bursts=2, deaths=1, trouble=0.0, sectors=(ATOM,), sampled=0.1, **FEW)
SEEDS = 12


@pytest.mark.parametrize("whole", [WHOLE, pytest.param(1.0, marks=pytest.mark.campaign)])
@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(1, 1, seed=1, states=STATES, bursts=3, deaths=2, **FEW),
        Scenario(4, 1, seed=5, states=STATES, bursts=1, deaths=1, **FEW),
        Scenario(2, 3, seed=10, states=STATES, bursts=2, deaths=1, chunk_blocks=16, buffers=4, **FEW),
    ],
    ids=lambda s: f"{s.max_in_flight} in flight, {s.keep_last} kept, {s.chunk_blocks} blocks a chunk",
)
def test_no_crash_breaks_a_promise(scenario: Scenario, whole: float) -> None:
    findings = explore(dataclasses.replace(scenario, medium=MappedCrashWriter, sectors=(ATOM,), sampled=whole))
    print(f"\n  {findings.summary()}")
    assert not findings.violations, "\n".join(findings.violations)
    assert len(findings.states) >= STATES
    assert findings.events["read as a whole"] > 0.8 * whole * STATES
    assert findings.events["committed"] > 0


class Unsettled(CrashMapping):
    settled = True


@pytest.mark.parametrize("mapping", [Unsettled, NothingWrittenBack, OneLineShort, NothingFenced, FencedTooEarly])
def test_what_is_left_out_is_found(mapping: Callable[[CrashDisk, Inode], CrashMapping]) -> None:
    class Mistaken(MappedCrashWriter):
        pass

    Mistaken.mapping = mapping
    for seed in range(SEEDS):
        findings: Findings = explore(dataclasses.replace(SCENARIO, enough=1, seed=seed, medium=Mistaken))
        if findings.violations:
            print(f"\n  seed {seed}: {findings.violations[0]}")
            return
    pytest.fail(f"{SEEDS} explorations found nothing")
