"""The rate of a capture, checksum included, beside the fastest copy that two threads of this machine can do.

Run: ``python -m tests.campaign.capture [--folder DIR] [--gib 1] [--pairs 9]``.

The fastest of: memmove, torch's ``copy_``, and the extension's copy past the caches that computes the checksum on the
way. Each is done by two threads on halves of the same memory, from pages as torch allocates them into huge ones.
"""

from __future__ import annotations

import argparse
import ctypes
import select
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable

import torch

from examples.paper.lab.medians import summary
from pccheck_async import StorageOptions, SyncCheckpointEngine, _ext
from pccheck_async.transfer import address_of, aligned_buffer
from tests.campaign.speed import build, change

CHUNK = 8 << 20


def copies(source: torch.Tensor, target: memoryview) -> dict[str, Callable[[int, int], object]]:
    """Ways to copy bytes ``[low, high)``; all of them let go of the GIL."""
    torch.set_num_threads(1)  # two threads copy at a time, each on its own
    into = torch.frombuffer(target, dtype=torch.uint8)
    begin, end = source.data_ptr(), address_of(target)

    def gather(low: int, high: int) -> None:
        queue = _ext.Queue(1, 1)
        queue.submit(
            [
                (n, _ext.GATHER, struct.pack("=QQQ", begin + n, 0, CHUNK), target[n : n + CHUNK], source)
                for n in range(low, high, CHUNK)
            ]
        )
        while queue.running:
            select.select([queue.fileno()], [], [])
            queue.reap()
        queue.close()

    return {
        "memmove": lambda low, high: ctypes.memmove(end + low, begin + low, high - low),
        "torch": lambda low, high: into[low:high].copy_(source[low:high]),
        "extension": gather,
    }


def seconds(copy: Callable[[int, int], object], nbytes: int) -> float:
    half = nbytes // 2 // CHUNK * CHUNK
    threads = [threading.Thread(target=copy, args=part) for part in ((0, half), (half, 2 * half))]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=9)
    args = parser.parse_args()
    nbytes = int(args.gib * (1 << 30))
    state = build(nbytes, 100)
    source, target = torch.ones(nbytes, dtype=torch.uint8), aligned_buffer(nbytes)
    ways = copies(source, target)
    limits: dict[str, list[float]] = {name: [] for name in ways}
    stall = []
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as folder,
        SyncCheckpointEngine(folder, max_in_flight=1, storage=StorageOptions(skip_unchanged=False)) as engine,
    ):
        for step in range(2):
            engine.checkpoint(state, step=step).result()
        for copy in ways.values():
            seconds(copy, nbytes)  # pages of the target that nothing has touched cost ten times as much
        for pair in range(args.pairs):
            for name, copy in ways.items():
                limits[name].append(seconds(copy, nbytes))
            change(state, pair)
            start = time.perf_counter()
            pending = engine.checkpoint(state, step=pair)
            stall.append(time.perf_counter() - start)
            pending.result()
    for name, measured in limits.items():
        print(f"    {name}, two threads: {nbytes / statistics.median(measured) / 1e9:.1f} GB/s")
    best = min(limits, key=lambda name: statistics.median(limits[name]))
    print(
        summary(f"capture: share of the best copy ({best})", [a / b for a, b in zip(limits[best], stall, strict=True)])
    )
    print(summary("capture, GB/s, call to return", [nbytes / 1e9 / value for value in stall]))


if __name__ == "__main__":
    main()
