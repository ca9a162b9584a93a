"""``stores.verify`` against the raw read limit of the same disk, in interleaved pairs (see ``speed.py``).

Run: ``python -m tests.campaign.verify_speed [--folder DIR] [--gib 1] [--pairs 5]``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from pccheck_async import SyncCheckpointEngine, stores
from pccheck_async.bench.raw_disk import RawDisk, RawLimit, slot_file
from tests.campaign.speed import Pairs, build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--copy", action="store_true", help="also copy it once, and compare with the disk's writes")
    args = parser.parse_args()
    nbytes = int(args.gib * (1 << 30))
    state = build(nbytes, args.tensors)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        store = Path(folder) / "store"
        with SyncCheckpointEngine(store, max_in_flight=1) as engine:
            for step in range(2):
                engine.checkpoint(state, step=step).result()
        del state
        disk = RawDisk(nbytes)

        def verify() -> float:
            found = stores.verify(store)
            assert found.whole
            assert found.direct
            return found.seconds

        reads = Pairs(RawLimit(disk, write=False), lambda: slot_file(store, committed=True))
        for _ in range(args.pairs):
            reads.measure(verify)
        reads.report("verify")
        if args.copy:
            copied = stores.copy(store, Path(folder) / "copy")
            assert stores.verify(Path(folder) / "copy").whole
            print(copied)


if __name__ == "__main__":
    main()
