"""A million crash states of one store: rules, pins, failures, cancellations, readers, restarts, all mixed."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pccheck_async.testing import ATOM, MappedCrashWriter
from tests.support.crash_harness import Scenario, explore

RULES: list[dict[str, Any]] = [
    {},
    {"every": 4},
    {"best": ("loss", 2, "min")},
    {"every": 7, "best": ("loss", 1, "min")},
]
STATES = 10_000
"""At least, in each of 102 scenarios; more deaths are added until there are so many."""


@pytest.mark.campaign
@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
@pytest.mark.parametrize("keep_last", [1, 3])
def test_crash_states(keep_last: int, max_in_flight: int, rules: dict[str, Any], turn: int) -> None:
    seed = 10_000 * turn + 1000 * keep_last + 100 * max_in_flight + RULES.index(rules)
    records = 0.01 if seed % 2 else 0.0
    scenario = Scenario(
        max_in_flight,
        keep_last,
        seed=seed,
        states=STATES,
        bursts=4,
        deaths=5,
        images=60,
        subsets=5,
        trouble=0.15,
        record_trouble=records,
        rules=rules,
        pins=0.5,
        sampled=0.01,
    )
    start = time.perf_counter()
    findings = explore(scenario)
    seconds = time.perf_counter() - start
    print(f"\n{findings.summary()}; {len(findings.states) / seconds:.0f} distinct images a second")
    assert not findings.violations, "\n".join(findings.violations)
    assert len(findings.states) >= STATES


@pytest.mark.campaign
@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
@pytest.mark.parametrize("keep_last", [1, 3])
def test_crash_states_of_persistent_memory(keep_last: int, max_in_flight: int) -> None:
    """Stored in parts of 8 bytes, which survive in any order until their lines are written back and fenced."""
    scenario = Scenario(
        max_in_flight,
        keep_last,
        seed=1000 * keep_last + max_in_flight,
        states=STATES,
        deaths=5,
        images=60,
        subsets=5,
        trouble=0.15,
        pins=0.5,
        sampled=0.1,
        medium=MappedCrashWriter,
        sectors=(ATOM,),
    )
    findings = explore(scenario)
    print(f"\n{findings.summary()}")
    assert not findings.violations, "\n".join(findings.violations)
    assert len(findings.states) >= STATES
