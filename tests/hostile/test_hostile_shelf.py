"""Forged shelves: an error of this package, or variables; no crash, no memory beyond the file's, nothing executed."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from pccheck_async.errors import CorruptStoreError
from pccheck_async.shelf import format as layout
from pccheck_async.shelf.format import Root
from pccheck_async.transfer import PAGE_BYTES
from tests.hostile.test_hostile import in_a_cage
from tests.support.hostile import NUMBERS
from tests.support.hostile_shelf import ShelfPrey, examine_shelf


def test_a_forged_root_is_refused_or_names_a_directory_inside_the_file(tmp_path: Path) -> None:
    prey = ShelfPrey(tmp_path / "whole")
    true = [prey.root.sequence, prey.root.nbytes, *prey.root.directory]
    refused = 0
    for first, second in itertools.combinations(range(4), 2):
        for facts in itertools.product(*([*NUMBERS, true[n]] if n in (first, second) else [true[n]] for n in range(4))):
            file = prey.with_root(*facts)
            try:
                root = layout.newest_root(prey.header, file, len(file))
            except CorruptStoreError:
                refused += 1
            else:
                assert 3 * PAGE_BYTES <= root.directory.offset < root.directory.end <= root.nbytes <= len(file)
                Root(root.sequence + 1, root.nbytes, root.directory, 0).encode(prey.header)
    assert refused > 1_000


def test_a_directory_of_no_bytes_is_refused_wherever_it_is_said_to_be(tmp_path: Path) -> None:
    prey = ShelfPrey(tmp_path / "whole")
    for offset in NUMBERS:
        forged = prey.with_root(prey.root.sequence, prey.root.nbytes, offset, 0)
        assert examine_shelf(forged, tmp_path / "forged") == "refused"


@pytest.mark.slow
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
