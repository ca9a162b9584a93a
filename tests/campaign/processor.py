"""Processor seconds per GiB made durable, all of the system's, beside torch.save with fsync; and where ours go.

Run: ``python -m tests.campaign.processor [--folder DIR] [--gib 1] [--pairs 9] [--io threads]``.

torch.save is the peer that checks what it wrote: its archive has a CRC-32 per tensor, as ours has one per chunk.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from examples.paper.lab.medians import summary
from pccheck_async import StorageOptions, SyncCheckpointEngine
from pccheck_async.bench.machine import busy_seconds
from tests.campaign.speed import build, change

SETTLE_SECONDS = 0.3


def thread_seconds() -> dict[str, float]:
    """Processor seconds of every thread of this process, by name."""
    found: dict[str, float] = defaultdict(float)
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        name = names.get(int(task.name)) or (task / "comm").read_text().strip()
        found[name] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def save_with_torch(state: dict[str, torch.Tensor], path: Path) -> None:
    torch.save(state, path)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def cost(work: Callable[[], object]) -> float:
    """System-wide processor seconds of ``work``, beyond what the machine spends on nothing for as long."""
    os.sync()
    start = time.perf_counter()
    before = busy_seconds()
    work()
    time.sleep(SETTLE_SECONDS)  # what the kernel does after the fact
    spent, seconds = busy_seconds() - before, time.perf_counter() - start
    before = busy_seconds()
    time.sleep(SETTLE_SECONDS)
    return spent - (busy_seconds() - before) / SETTLE_SECONDS * seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--io", default="auto")
    args = parser.parse_args()
    state = build(int(args.gib * (1 << 30)), 100)
    ours, peer = [], []
    spent: dict[str, float] = defaultdict(float)
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as folder,
        SyncCheckpointEngine(
            Path(folder) / "store", max_in_flight=1, storage=StorageOptions(io=args.io, skip_unchanged=False)
        ) as engine,
    ):
        for step in range(2):
            engine.checkpoint(state, step=step).result()
        for pair in range(args.pairs):
            change(state, pair)
            before = thread_seconds()
            ours.append(cost(lambda step=pair: engine.checkpoint(state, step=step).result()) / args.gib)  # type: ignore[misc]
            for name, seconds in thread_seconds().items():
                spent[name] += seconds - before.get(name, 0)
            change(state, pair)
            peer.append(cost(lambda: save_with_torch(state, Path(folder) / "torch.pt")) / args.gib)
    print(summary("this engine: processor seconds per GiB", ours))
    print(summary("torch.save and fsync: processor seconds per GiB", peer))
    print(summary("ratio", [a / b for a, b in zip(ours, peer, strict=True)]))
    for name, seconds in sorted(spent.items(), key=lambda item: -item[1])[:8]:
        print(f"    thread {name}: {seconds / args.pairs / args.gib:.4f} s per GiB")


if __name__ == "__main__":
    main()
