"""A hundred thousand transactions with growth, erasure and reuse: file and memory stay as large as they are."""

from __future__ import annotations

import random
import resource
from pathlib import Path

import numpy as np
import pytest

from pccheck_async import Shelf

TRANSACTIONS = 100_000
pytestmark = pytest.mark.campaign


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_file_and_memory_stay_flat(shared_memory: Path) -> None:
    rng, seen = random.Random(1), []
    with Shelf(shared_memory / "shelf", 1 << 20) as shelf:
        shelf["x"] = np.zeros(512)
        x, free = shelf.x, shelf.free_bytes
        for number in range(TRANSACTIONS):
            match rng.randrange(5):
                case 0 | 1:
                    with shelf.transaction("x"):
                        x += 1
                case 2:
                    shelf[f"v{rng.randrange(20)}"] = np.full(rng.randrange(1, 3000), number)
                case 3:
                    shelf[f"v{rng.randrange(20)}"] = {"list": [number] * rng.randrange(20), "w": np.ones(3)}
                case _:
                    name = f"v{rng.randrange(20)}"
                    if name in shelf:
                        _ = shelf[name]
                        del shelf[name]
            if number % (TRANSACTIONS // 10) == TRANSACTIONS // 10 - 1:
                maps = Path("/proc/self/maps").read_text().count("\n")
                seen.append((resident() >> 10, maps, (shared_memory / "shelf").stat().st_size))
        for name in [name for name in shelf if name != "x"]:
            del shelf[name]
        assert shelf.free_bytes == free
        assert shelf.verify() == ()
    print(f"\n  KiB resident, mappings, bytes of the file: {seen}")
    assert {size for _, _, size in seen} == {1 << 20}
    assert seen[-1][0] < seen[0][0] * 1.02 + 512
    assert seen[-1][1] < seen[0][1] + 40
