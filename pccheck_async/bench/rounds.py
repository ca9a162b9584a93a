# SPDX-License-Identifier: Apache-2.0
"""Measures methods of saving on one disk, with the same tensors, in turns, in a new random order every round.

Before each save every element of every tensor is changed, and the page cache is flushed. After each save the files are
dropped from the page cache, loaded into other tensors, and compared bit by bit. Before and after each round the disk
itself is measured, by O_DIRECT writes to a slot of the engine that no checkpoint uses, and so to the same blocks.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pccheck_async.bench.machine import BenchPlace, busy_seconds, survey
from pccheck_async.bench.methods import Method, PCcheck, Tensors
from pccheck_async.bench.raw_disk import RawDisk, RawLimit
from pccheck_async.format import align
from pccheck_async.transfer import available_memory

__all__ = ["LEAST_BYTES", "NoRoomError", "Outcome", "RoundComparison", "RoundSample", "compare", "evict"]

LEAST_BYTES = 64 << 10
_TENSORS = 64
_WARM_SAVES = 3
"""Saves before the measurement: an engine with two checkpoints in flight has three slots, each of which is written."""
_SETTLE_SECONDS = 0.2
"""Seconds after a save in which the system's load is counted as the save's; then the idle load is measured as long."""
_BLOCK = 4096
_MEMORY_COPIES = 5
"""States in memory: the state, the loaded copy, the buffer for the raw disk, and two copies that a method stages."""
_EXTRA_BYTES = 64 << 20
"""Bytes on the disk for metadata, records and folders."""


class NoRoomError(Exception):
    """The disk or the memory is too small; nothing was written."""


@dataclass(frozen=True, slots=True)
class RoundSample:
    """The measurements of one save and the load of its checkpoint.

    Attributes:
        stall: Seconds from the call to save until it returned, in which training waits.
        durable: Seconds from the call until the checkpoint would survive a power failure.
        processor: Processor seconds of the whole system that the save took, including the kernel's writeback.
        load: Seconds to load the checkpoint with a cold page cache.
    """

    stall: float
    durable: float
    processor: float
    load: float


@dataclass(slots=True)
class Outcome:
    """The outcome of a method: a sample per round, or the problem that ended it."""

    method: str
    samples: list[RoundSample] = field(default_factory=list)
    problem: str = ""

    def values(self, figure: str) -> list[float]:
        """Return one attribute of every sample: ``stall``, ``durable``, ``processor`` or ``load``."""
        return [getattr(sample, figure) for sample in self.samples]


@dataclass(slots=True)
class RoundComparison:
    """The measurements with a state of ``nbytes``: an outcome for each method, ``pccheck`` first.

    Attributes:
        raw: Seconds in which the disk itself takes the same bytes, for every round; empty without direct I/O.
        raw_way: Name of the fastest :class:`.raw_disk.Way`.
    """

    place: BenchPlace
    nbytes: int
    rounds: int
    outcomes: list[Outcome]
    raw: list[float] = field(default_factory=list)
    raw_way: str = ""


def compare(
    kinds: Sequence[type[Method]],
    folder: Path,
    nbytes: int,
    rounds: int,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> RoundComparison:
    """Measure methods in turns in a new folder inside ``folder``. It is removed at the end, also after an error.

    The state has ``nbytes``, at least 64 KiB, rounded down to whole float32 elements.

    Raises:
        NoRoomError: The checkpoints of all methods do not fit on the disk, or five copies of the state into memory.
        OSError: The folder cannot be written.
    """
    free, needed = shutil.disk_usage(folder).free, sum(kind.copies for kind in kinds) * nbytes + _EXTRA_BYTES
    if free < needed:
        raise NoRoomError(
            f"{', '.join(kind.name for kind in kinds)} need {needed} bytes in {folder} together, and {free} are free: "
            "take a smaller --size, or fewer methods with --against"
        )
    memory = available_memory()
    if memory < _MEMORY_COPIES * nbytes:
        raise NoRoomError(
            f"{_MEMORY_COPIES} copies of the state need {_MEMORY_COPIES * nbytes} bytes of memory, and {memory} can be "
            "had: take a smaller --size"
        )
    with tempfile.TemporaryDirectory(prefix="pccheck-bench-", dir=folder) as name, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(torch|safetensors)\b")
        return _Rounds(kinds, Path(name), nbytes, rounds, progress).run()


class _Rounds:
    """Runs the measurements of one comparison, and holds the open methods."""

    def __init__(
        self, kinds: Sequence[type[Method]], folder: Path, nbytes: int, rounds: int, progress: Callable[[str], None]
    ) -> None:
        self.kinds = {kind.name: kind for kind in kinds}
        self.folder, self.rounds, self.progress = folder, rounds, progress
        count = min(_TENSORS, nbytes // _BLOCK)
        draw = torch.Generator().manual_seed(0)
        lengths = [nbytes // 4 // count + (at < nbytes // 4 % count) for at in range(count)]
        self.tensors: Tensors = {f"t{at:02}": torch.rand(n, generator=draw) for at, n in enumerate(lengths)}
        self.into: Tensors = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.step = 0
        self.outcomes = [Outcome(name) for name in self.kinds]
        self.open: dict[str, Method] = {}
        self.limit: RawLimit | None = None

    def run(self) -> RoundComparison:
        """Open and warm up every method, then measure round by round."""
        place = survey(self.folder)
        if place.direct.startswith("yes"):
            self.limit = RawLimit(RawDisk(align(self.nbytes, _BLOCK)), write=True)
        order = random.Random(0)
        try:
            for outcome in self.outcomes:
                self.progress(f"{outcome.method}: opening, {_WARM_SAVES} saves")
                self._guarded(outcome, self._warm)
            self._measure_disk()
            for number in range(1, self.rounds + 1):
                for outcome in order.sample(self.outcomes, len(self.outcomes)):
                    if not outcome.problem:
                        self.progress(f"round {number} of {self.rounds}: {outcome.method}")
                        self._guarded(outcome, self._sample)
                self._measure_disk(f"round {number} of {self.rounds}: ")
        finally:
            for method in self.open.values():
                with suppress(Exception):  # a method that failed may fail again, and its error is known
                    method.close()
        found = RoundComparison(place, self.nbytes, self.rounds, self.outcomes)
        if self.limit:
            found.raw, found.raw_way = self.limit.between(), self.limit.way.name
        return found

    def _warm(self, outcome: Outcome) -> None:
        method = self.open[outcome.method] = self.kinds[outcome.method](self.folder / outcome.method)
        for _ in range(_WARM_SAVES):
            self._change()
            method.save(self.tensors, self.step)()
            method.remove_older()

    def _change(self) -> None:
        """Change every element by one unit in the last place."""
        self.step += 1
        for tensor in self.tensors.values():
            tensor.view(torch.int32).add_(1)

    def _sample(self, outcome: Outcome) -> None:
        method = self.open[outcome.method]
        self._change()
        os.sync()
        busy, start = busy_seconds(), time.perf_counter()
        wait = method.save(self.tensors, self.step)
        stall = time.perf_counter() - start
        wait()
        durable = time.perf_counter() - start
        os.sync()
        time.sleep(_SETTLE_SECONDS)
        spent, seconds = busy_seconds() - busy, time.perf_counter() - start
        busy = busy_seconds()
        time.sleep(_SETTLE_SECONDS)
        idle = (busy_seconds() - busy) / _SETTLE_SECONDS
        method.remove_older()

        for tensor in self.into.values():
            tensor.zero_()
        evict(method.folder)
        start = time.perf_counter()
        step = method.load(self.into)
        load = time.perf_counter() - start
        different = [name for name, tensor in self.tensors.items() if not torch.equal(tensor, self.into[name])]
        if different or step != self.step:
            outcome.problem = (
                f"the loaded checkpoint is not the saved one: step {step} for {self.step}, "
                f"{len(different)} of {len(self.tensors)} tensors differ"
            )
            return
        outcome.samples.append(RoundSample(stall, durable, max(0.0, spent - idle * seconds), load))

    def _measure_disk(self, title: str = "") -> None:
        """Measure the disk itself on a slot that no checkpoint uses; not again after an error, or without an engine."""
        engine, limit, self.limit = self.open.get(PCcheck.name), self.limit, None
        if limit is None or not isinstance(engine, PCcheck) or self.outcomes[0].problem:
            return
        self.progress(f"{title}the disk itself")
        os.sync()
        try:
            limit.measure(engine.free_slot())
            self.limit = limit
        except OSError as error:  # the comparison goes on without the limit
            self.progress(f"the disk itself cannot be measured: {error}")

    def _guarded(self, outcome: Outcome, action: Callable[[Outcome], None]) -> None:
        try:
            action(outcome)
        except Exception as error:  # noqa: BLE001 - the failure of one method is its row, not the end of the comparison
            outcome.problem = f"{type(error).__name__}: {error}"[:500]


def evict(folder: Path) -> None:
    """Drop the files in a folder from the page cache, so that reads go to the device."""
    os.sync()  # dirty pages would stay
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
