"""Forged shelves, read and written, until the time is over.

Run: ``python -m tests.campaign.fuzz_shelf SECONDS [SEED]``. A finding is an exception of another kind than
CheckpointError, a hang, a crash, memory beyond the file's, or anything executed; the forged file is kept.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.support.hostile import confine
from tests.support.hostile_shelf import ShelfPrey, examine_shelf


def main(seconds: float, seed: int) -> None:
    """Forge and examine."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="pccheck-fuzz-"))
    rng, counts = random.Random(seed), Counter[str]()
    prey = ShelfPrey(folder / "whole")
    confine()
    print(f"seed {seed}; what ends it is in {folder}")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        faulthandler.dump_traceback_later(20, exit=True)
        counts[examine_shelf(prey.forged(rng), folder / "forged")] += 1
        faulthandler.cancel_dump_traceback_later()
    for each in folder.iterdir():
        each.unlink()
    folder.rmdir()
    print(f"{counts.total()} forged shelves: {dict(counts)}")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else int(time.time()))
