"""Time to durable and restore against the raw limit of the same disk, in interleaved pairs.

Run: ``python -m tests.campaign.speed [--folder DIR] [--gib 1] [--host-memory MIB] [--pairs 9] [--io threads]``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Literal

import torch

from pccheck_async import SyncCheckpointEngine
from tests.campaign.disk import raw_disk


def build(nbytes: int, tensors: int) -> dict[str, torch.Tensor]:
    each = nbytes // tensors // 4
    return {f"t{n:04d}": torch.rand(each) for n in range(tensors)}


def peak_rss() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def reset_peak_rss() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def spread(name: str, values: list[float]) -> str:
    ordered = sorted(values)
    median = statistics.median(ordered)
    return f"{name}: median {median:.3f} [min {ordered[0]:.3f}, max {ordered[-1]:.3f}] of {len(ordered)}"


def change(state: dict[str, torch.Tensor], step: int) -> None:
    for tensor in state.values():
        tensor.add_(step + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--host-memory", type=int, default=None, help="MiB")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--io", default="auto")
    args = parser.parse_args()
    nbytes = int(args.gib * (1 << 30))
    state = build(nbytes, args.tensors)
    memory: int | Literal["auto"] = args.host_memory << 20 if args.host_memory else "auto"
    write, read, stall = [], [], []
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as folder,
        raw_disk(Path(folder), nbytes) as disk,
        SyncCheckpointEngine(Path(folder) / "store", max_in_flight=1, host_memory=memory, io=args.io) as engine,
    ):
        reset_peak_rss()
        base = peak_rss()  # the engine is open, nothing was saved yet
        for warm in range(2):  # both slots written once, as the scratch file is
            engine.checkpoint(state, step=warm).result()
        for pair in range(args.pairs):
            change(state, pair)
            limit = disk.best_write()
            start = time.perf_counter()
            pending = engine.checkpoint(state, step=pair)
            stall.append(time.perf_counter() - start)
            pending.result()
            ours = time.perf_counter() - start
            limit = min(limit, disk.best_write())
            write.append(limit / ours)
        saved = peak_rss() - base
        for _ in range(args.pairs):
            limit = disk.best_read()
            start = time.perf_counter()
            engine.restore(state)
            ours = time.perf_counter() - start
            limit = min(limit, disk.best_read())
            read.append(limit / ours)
        found = engine.statistics()
    print(f"saving raised the peak RSS by {saved >> 20} MiB")
    print(spread("durable: share of the raw write limit", write))
    print(spread("restore: share of the raw read limit", read))
    print(spread("stall, seconds", stall))
    print(f"raw read limit {nbytes / limit / 1e9:.2f} GB/s, {os.cpu_count()} cores, {threading.active_count()} threads")
    print(found)


if __name__ == "__main__":
    main()
