"""Forged shelves: an error of this package, or variables; no crash, no memory beyond the file's, nothing executed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile.test_hostile import in_a_cage
from tests.support.hostile_shelf import ShelfPrey, examine_shelf

pytestmark = pytest.mark.slow


def test_forged_shelves(shared_memory: Path) -> None:
    prey = ShelfPrey(shared_memory / "whole")

    def shelves(rng: random.Random, count: int, log: Callable[[str], None]) -> Counter[str]:
        counts: Counter[str] = Counter()
        for number in range(count):
            forged = prey.forged(rng)
            log(f"shelf {number}, left in {shared_memory}")
            counts[examine_shelf(forged, shared_memory / "forged")] += 1
        return counts

    counts = in_a_cage(shared_memory, 1, shelves, 300)
    assert counts["refused"] > 0
    assert counts["read, written"] > 0
