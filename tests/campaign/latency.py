"""How long a small state takes to become durable, beside the bare sequence: write, flush, write a record, flush.

Run: ``python -m tests.campaign.latency [--folder DIR] [--kib 64] [--pairs 200] [--io threads]``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from examples.paper.lab.bare_sequence import BareSequence
from examples.paper.lab.medians import summary
from pccheck_async import StorageOptions, SyncCheckpointEngine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--kib", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--io", default="auto")
    args = parser.parse_args()
    state = {f"t{n}": torch.rand(args.kib * 64) for n in range(4)}
    bare, ours, beyond = [], [], []
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as folder,
        SyncCheckpointEngine(
            Path(folder) / "store", max_in_flight=1, storage=StorageOptions(io=args.io, skip_unchanged=False)
        ) as engine,
        BareSequence(Path(folder), args.kib << 10) as sequence,
    ):
        for step in range(args.pairs + 10):
            for tensor in state.values():
                tensor.add_(1)
            before = sequence.seconds()
            start = time.perf_counter()
            engine.checkpoint(state, step=step).result()
            seconds = time.perf_counter() - start
            if step >= 10:  # the first ones create slots
                bare.append((before + sequence.seconds()) / 2 * 1e3)
                ours.append(seconds * 1e3)
                beyond.append(ours[-1] - bare[-1])
        io = engine.statistics().io
    print(summary("bare sequence, ms", bare))
    print(summary(f"{args.kib} KiB durable, ms", ours))
    print(summary("beyond the bare sequence, ms", beyond))
    print(f"difference of the medians: {statistics.median(ours) - statistics.median(bare):.3f} ms; {io}")


if __name__ == "__main__":
    main()
