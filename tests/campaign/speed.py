"""Time to durable and restore against the raw limit of the same disk, in interleaved pairs.

Run: ``python -m tests.campaign.speed [--folder DIR] [--gib 1] [--host-memory MIB] [--pairs 9] [--io threads]``.

Each pair times the engine between two rounds of the raw ways (threads, io_uring) on the engine's own slot files: that
which it writes next, that which it read. Each ratio is the limit around a measurement divided by the engine's time.
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from pccheck_async import SyncCheckpointEngine, _ext
from pccheck_async.bench.medians import summary
from pccheck_async.bench.raw_disk import RawDisk, RawLimit, slot_file
from pccheck_async.bench.usage import busy_seconds
from pccheck_async.memory import aligned_buffer


def build(nbytes: int, tensors: int) -> dict[str, torch.Tensor]:
    each = nbytes // tensors // 4
    return {f"t{n:04d}": torch.rand(each) for n in range(tensors)}


def peak_rss() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def reset_peak_rss() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def change(state: dict[str, torch.Tensor], step: int) -> None:
    for tensor in state.values():
        tensor.add_(step + 1)


class Pairs:
    """Measurements of something, each between two rounds of the disk's limit (see ``RawLimit``).

    Args:
        limit: What is compared with.
        path: Returns the file that the next round is measured on.
    """

    def __init__(self, limit: RawLimit, path: Callable[[], Path]) -> None:
        self._limit = limit
        self._path = path
        self._ours: list[float] = []
        limit.measure(path())

    def measure(self, ours: Callable[[], float]) -> None:
        """Take one pair."""
        self._ours.append(ours())
        self._limit.measure(self._path())

    def report(self, name: str) -> None:
        """Print the limit, and our share of it."""
        limits = self._limit.between()
        rate = self._limit.disk.nbytes / statistics.median(limits) / 1e9
        print(summary(f"{name}: share of the raw limit", [a / b for a, b in zip(limits, self._ours, strict=True)]))
        print(summary(f"{name}: seconds", self._ours), f"(limit {rate:.2f} GB/s: {self._limit.way.name})")


class BarePipeline:
    """Copies a state into memory of its size and writes each piece as soon as it is copied, then flushes.

    Args:
        state: What is copied.
        engine: "threads" or "io_uring".
    """

    _PIECE = 8 << 20
    _WRITERS, _COPIERS = 4, 2

    def __init__(self, state: dict[str, torch.Tensor], engine: str) -> None:
        self._state = state
        self._engine = engine
        self._memory = aligned_buffer(-(-sum(t.nbytes for t in state.values()) // 4096) * 4096)
        tables: dict[int, list[tuple[int, int, int]]] = {}
        offset = 0
        for tensor in state.values():
            start = 0
            while start < tensor.nbytes:
                piece, within = divmod(offset, self._PIECE)
                nbytes = min(tensor.nbytes - start, self._PIECE - within)
                tables.setdefault(piece, []).append((tensor.data_ptr() + start, within, nbytes))
                start, offset = start + nbytes, offset + nbytes
        self._tables = [np.array(table, np.uint64).tobytes() for table in tables.values()]

    def seconds(self, path: Path) -> float:
        """Do it once, over the first bytes of a file that no record names."""
        pieces = [self._memory[at : at + self._PIECE] for at in range(0, len(self._memory), self._PIECE)]
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        try:
            with closing(_ext.Queue(self._WRITERS, self._COPIERS, self._engine)) as queue:
                start = time.perf_counter()
                queue.submit([(n, _ext.GATHER, t, pieces[n], self._state) for n, t in enumerate(self._tables)])
                while queue.running:
                    select.select([queue.fileno()], [], [])
                    copied = []
                    for token, result, checksum in queue.reap():
                        if result < 0:
                            raise OSError(-result, "a bare operation failed")
                        if checksum is not None:
                            copied.append(token)
                    queue.submit([(n, _ext.WRITE, fd, n * self._PIECE, pieces[n]) for n in copied])
                os.fdatasync(fd)
                return time.perf_counter() - start
        finally:
            os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    stall: list[float] = []
    busy: list[float] = []
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as folder,
        SyncCheckpointEngine(folder, max_in_flight=1, host_memory=memory, io=args.io) as engine,
    ):
        store, disk = Path(folder), RawDisk(nbytes)
        reset_peak_rss()
        base = peak_rss()  # the engine is open, nothing was saved yet
        for warm in range(2):  # both slots written once, as the scratch file is
            engine.checkpoint(state, step=warm).result()

        def save() -> float:
            change(state, len(stall))
            processor, start = busy_seconds(), time.perf_counter()
            pending = engine.checkpoint(state, step=len(stall) + 2)
            stall.append(time.perf_counter() - start)
            pending.result()
            seconds = time.perf_counter() - start
            busy.append(busy_seconds() - processor)
            return seconds

        def restore() -> float:
            start = time.perf_counter()
            engine.restore(state)
            return time.perf_counter() - start

        writes = Pairs(RawLimit(disk, write=True), lambda: slot_file(store, committed=False))
        for _ in range(args.pairs):
            writes.measure(save)
        saved = peak_rss() - base
        bare = BarePipeline(state, engine.statistics().io.split(",")[0])
        beside: list[float] = []
        for pair in range(args.pairs + 1):
            before = bare.seconds(slot_file(store, committed=False))
            ours = save()
            if pair:  # the first one touches its memory
                beside.append((before + bare.seconds(slot_file(store, committed=False))) / 2 / ours)
        del bare
        reads = Pairs(RawLimit(disk, write=False), lambda: slot_file(store, committed=True))
        for _ in range(args.pairs):
            reads.measure(restore)
        found = engine.statistics()
    writes.report("durable")
    reads.report("restore")
    print(summary("durable: bare copies and writes, in parts of the engine's time", beside))
    print(summary("stall, seconds", stall))
    print(f"processor seconds per GiB made durable, all of the system: {sum(busy) / len(busy) / args.gib:.3f}")
    print(f"saving raised the peak RSS by {saved >> 20} MiB; {os.cpu_count()} cores")
    print(found)


if __name__ == "__main__":
    main()
