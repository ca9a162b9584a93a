"""Time to durable and restore against the raw limit of the same disk, in interleaved pairs.

Run: ``python -m tests.campaign.speed [--folder DIR] [--gib 1] [--host-memory MIB] [--pairs 9] [--io threads]``.

Each pair times the engine between two rounds of the raw ways on the engine's own slot files: that
which it writes next, that which it read. Each ratio is the limit of that file, from before and after where there is
both, divided by the engine's time.
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
from typing import Any, Literal

import torch

from examples.paper.lab.medians import summary
from pccheck_async import StorageOptions, SyncCheckpointEngine, _ext
from pccheck_async.bench.machine import busy_seconds
from pccheck_async.bench.raw_disk import RawDisk, RawLimit, between, slot_file
from pccheck_async.format import combine
from pccheck_async.state import cached_layout, flatten
from pccheck_async.transfer import aligned_buffer
from pccheck_async.transfer.plan import Planner, segments


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
    """What any engine does at least: copies a state and writes each piece as soon as it is copied, then flushes.

    And back: reads the pieces, verifies each, and copies it to its places.

    Args:
        state: What is copied.
    """

    _IN_FLIGHT, _COPIERS = 4, 2
    _PLACES = 8  # pieces that are read or verified at a time

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self._state = state
        layout, _ = cached_layout(flatten(state).leaves)
        plan = Planner(8 << 20, 4096).plan(layout)
        memory = aligned_buffer(plan.payload_nbytes)
        self._offsets = [chunk.offset for chunk in plan.chunks]
        self._pieces = [memory[chunk.offset : chunk.offset + chunk.nbytes] for chunk in plan.chunks]
        self._tables = [segments(chunk, layout.sources).host for chunk in plan.chunks]
        self._checksums = [0] * len(self._tables)

    def write_seconds(self, path: Path) -> float:
        """Write the state once, over the first bytes of a file that no record names."""

        def move(queue: _ext.Queue, fd: int) -> None:
            queue.submit([(n, _ext.GATHER, t, self._pieces[n], self._state) for n, t in enumerate(self._tables)])
            while queue.running:
                copied = []
                for number, sums in _ended(queue):
                    if sums is not None:
                        self._checksums[number] = combine(sums, len(self._pieces[number]))
                        copied.append((number, _ext.WRITE, fd, self._offsets[number], self._pieces[number]))
                queue.submit(copied)
            os.fdatasync(fd)

        return self._seconds(path, move)

    def read_seconds(self, path: Path) -> float:
        """Read back what was written last."""

        def move(queue: _ext.Queue, fd: int) -> None:
            places = self._pieces[: self._PLACES]
            left = iter(range(len(self._tables)))

            def read(place: memoryview) -> list[Any]:
                if (number := next(left, None)) is None:
                    return []
                at[number] = place[: len(self._pieces[number])]
                return [(number, _ext.READ, fd, self._offsets[number], at[number])]

            at: dict[int, memoryview] = {}
            queue.submit([operation for place in places for operation in read(place)])
            verifying: set[int] = set()
            while queue.running:
                batch: list[Any] = []
                for number, _ in _ended(queue):
                    if number in verifying:
                        batch += read(at[number])
                    else:
                        verifying.add(number)
                        table = self._tables[number]
                        batch.append((number, _ext.SCATTER, at[number], self._checksums[number], table, self._state))
                queue.submit(batch)

        return self._seconds(path, move)

    def _seconds(self, path: Path, move: Callable[[_ext.Queue, int], None]) -> float:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        try:
            with closing(_ext.Queue(self._IN_FLIGHT, self._COPIERS)) as queue:
                start = time.perf_counter()
                move(queue, fd)
                return time.perf_counter() - start
        finally:
            os.close(fd)


def _ended(queue: _ext.Queue) -> list[tuple[int, Any]]:
    select.select([queue.fileno()], [], [])
    ended = queue.reap()
    for _, result, _ in ended:
        if result < 0:
            raise OSError(-result, "a bare operation failed")
    return [(token, sums) for token, _, sums in ended]


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
        SyncCheckpointEngine(
            folder, max_in_flight=1, storage=StorageOptions(host_memory=memory, io=args.io, skip_unchanged=False)
        ) as engine,
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
        bare = BarePipeline(state)
        spare = slot_file(store, committed=False)
        bare.write_seconds(spare)  # touches its memory
        beside: dict[str, list[float]] = {}
        spares, ours, theirs = [spare], [], [bare.write_seconds(spare)]
        for _ in range(args.pairs):
            ours.append(save())
            spares.append(slot_file(store, committed=False))
            theirs.append(bare.write_seconds(spares[-1]))
        beside["durable"] = [a / b for a, b in zip(between(spares, theirs, written=True), ours, strict=True)]
        for _ in range(args.pairs):
            before, our = bare.read_seconds(spares[-1]), restore()
            beside.setdefault("restore", []).append((before + bare.read_seconds(spares[-1])) / 2 / our)
        del bare
        reads = Pairs(RawLimit(disk, write=False), lambda: slot_file(store, committed=True))
        for _ in range(args.pairs):
            reads.measure(restore)
        found = engine.statistics()
    writes.report("durable")
    reads.report("restore")
    for name, ratios in beside.items():
        where = "" if name == "durable" else " on the other slot"
        print(summary(f"{name}: bare operations{where}, in parts of the engine's time", ratios))
    print(summary("stall, seconds", stall))
    print(f"processor seconds per GiB made durable, all of the system: {sum(busy) / len(busy) / args.gib:.3f}")
    print(f"saving raised the peak RSS by {saved >> 20} MiB; {os.cpu_count()} cores")
    print(found)


if __name__ == "__main__":
    main()
