"""A hundred thousand crash states of a group: restarts, kills, failures, pins and swapped nodes, on 2 and 3 disks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.group_crash import Life, Scenario, explore

RESTARTS = (Life(5, pin=1), Life(5, "flushing", fails=1), Life(5, "power"), Life(5, "mixed", latches=0), Life(5))
STATES = 15_000
"""At least, in each of 8 scenarios."""


def swapping(world: int) -> tuple[Life, ...]:
    """Ranks run on other nodes, a second time where none of them ran before (with three), and come home."""
    others, more = ((*range(turn, world), *range(turn)) for turn in (1, world - 1))
    ways = (
        Life(4),
        Life(4, "killed", others),
        Life(4, "mixed", more, pin=2),
        Life(4, "power"),
        Life(4, "left", others),
    )
    return (*ways, Life(4, "flushing", others, fails=0), Life(4, "killed"))


@pytest.mark.campaign
@pytest.mark.parametrize("swaps", [False, True], ids=("nodes stay", "nodes are swapped"))
@pytest.mark.parametrize("keep_last", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_crash_states(world: int, keep_last: int, swaps: bool, tmp_path: Path) -> None:
    lives = swapping(world) if swaps else RESTARTS
    seed = 100 * world + 10 * keep_last + swaps
    scenario = Scenario(world, keep_last, lives, seed, states=STATES, cuts=1500, images=6, reopened=6)
    start = time.perf_counter()
    found = explore(scenario, tmp_path)
    seconds = time.perf_counter() - start
    print(f"\n{found.summary()}; {seconds:.0f} s")
    assert not found.violations, "\n".join(found.violations)
    assert len(found.verdicts) >= STATES
    assert found.events["reopened"] >= 6 * len(lives)
