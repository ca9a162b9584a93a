"""Rounds of saves and of restores in which methods take turns, and what the disk alone can do between them."""

from __future__ import annotations

import gc
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.paper.lab.bits import differences, scribble
from examples.paper.lab.methods import Method, State, UnsupportedError
from examples.paper.lab.methods.pccheck import PCcheck
from examples.paper.lab.result import Row, Sample
from examples.paper.lab.usage import PeakMemory, dirty_bytes, stored_bytes
from examples.paper.lab.workloads import SlowDevice, Workload
from pccheck_async.bench.machine import busy_seconds
from pccheck_async.bench.raw_disk import RawDisk, RawLimit, slot_file, ways
from pccheck_async.bench.rounds import evict
from pccheck_async.format import align

__all__ = ["Entry", "Rounds"]

_WARM_SAVES = 3
"""As many as the slots that an engine with two in flight has: each of them is written once before the clock runs."""
_SETTLE_SECONDS = 0.2
"""What the kernel does after the fact still counts; and for as long what it spends on nothing is looked at."""
_LEAST_ROUNDS = 3
"""A method that takes long sits out rounds, but not these."""
_RESTORING = 0.6
"""About how long the rounds of restores take beside those of saves."""
_BLOCK = 4096
_SAVING = 2 / 3
"""Share of a method's time that its saves may take; the rest is for its restores."""


class _DiffersError(Exception):
    """What was restored is not what was saved."""


@dataclass
class Entry:
    """A method that takes part: its folder, its row, and itself while it is open."""

    kind: type[Method]
    folder: Path
    row: Row
    method: Method | None = None
    spent: float = 0.0

    @property
    def good(self) -> bool:
        """Whether it has not failed."""
        return not self.row.problem

    def opened(self) -> Method:
        """Return the open method."""
        assert self.method is not None
        return self.method


class Rounds:
    """Methods that take turns in saving one workload's state, and then in restoring it.

    Args:
        workload: What is saved.
        entries: The methods; what happens to them stands in their rows.
        rounds: How often each of them saves, and how often each restores.
        device: Caps for the methods that can be given some.
        seconds: A method that has taken so long sits out what is left, but not the first three rounds.
        raw: A file for measuring the disk itself before and after each round, where none of the methods is this
            package's: else its slots are measured, of which the device has the same blocks. None: that is not measured.
        progress: Is told what is being measured.
    """

    def __init__(
        self,
        workload: Workload,
        entries: list[Entry],
        rounds: int,
        *,
        device: SlowDevice | None = None,
        seconds: float = math.inf,
        raw: Path | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.workload, self.entries, self.rounds, self.device = workload, entries, rounds, device
        self.seconds, self.raw, self.progress = seconds, raw, progress
        self.steps = 0
        self.order = random.Random(0)
        self.limits: dict[str, RawLimit] = {}
        if raw is not None:
            disk = RawDisk(align(workload.nbytes, _BLOCK))
            self.limits = {"durable": RawLimit(disk, write=True), "restore": RawLimit(disk, write=False)}

    def run(self) -> None:
        """Do it all."""
        try:
            self._open_all()
            self._limit("durable")
            clock = _Clock(self.rounds, 1 + _RESTORING)
            for number in range(self.rounds):
                self._save_round(f"round {number + 1} of {self.rounds}{clock.left(number)}")
                self._limit("durable")
            saved = self._save_last()
        finally:
            self._close()
        self._restore(saved)

    def _limit(self, figure: str) -> None:
        """Measure the disk itself on a file that is not needed: a free slot of an engine, which it will write over."""
        if figure not in self.limits:
            return
        assert self.raw is not None
        self.progress("the disk itself")
        path = self.raw
        for entry in self.entries:
            if entry.good and issubclass(entry.kind, PCcheck):
                path = slot_file(entry.folder, committed=figure == "restore")
                break
        else:
            if not path.exists():
                with path.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, align(self.workload.nbytes, _BLOCK))
                for way in ways()[:1]:  # blocks that were never written are converted when they are
                    self.limits["durable"].disk.seconds(path, way, write=True)
        os.sync()
        self.limits[figure].measure(path)

    def _open_all(self) -> None:
        """Open each method and save a few times, one method after the other: what memory it takes is seen here."""
        for entry in self.entries:
            reason = entry.kind.why_not()
            if reason is not None:
                entry.row.problem = f"skipped: {reason}"
        for entry in self._turns():
            self.progress(f"{entry.kind.name}: opening")
            gc.collect()
            with PeakMemory() as peak:
                self._guarded(entry, self._warm)
            entry.row.memory_bytes = peak.nbytes

    def _warm(self, entry: Entry) -> None:
        entry.method = self._open(entry)
        entry.method.attach(self.workload.optimizer)
        for _ in range(_WARM_SAVES):
            self.workload.step()
            handle = entry.method.save(self.workload.state(), self._next())
            handle.captured()
            handle.wait()
            entry.method.tidy()

    def _open(self, entry: Entry) -> Method:
        return entry.kind(entry.folder) if self.device is None else self.device.open(entry.kind, entry.folder)

    def _save_round(self, title: str) -> None:
        for entry in self._turns():
            if len(entry.row.samples) >= _LEAST_ROUNDS and entry.spent > _SAVING * self.seconds:
                continue
            self.progress(f"{title}: {entry.kind.name}")
            self._guarded(entry, self._sample)

    def _sample(self, entry: Entry) -> None:
        method = entry.opened()
        self.workload.step()
        os.sync()
        busy, start = busy_seconds(), time.perf_counter()
        handle = method.save(self.workload.state(), self._next())
        handle.captured()
        stall = time.perf_counter() - start
        handle.wait()
        durable = time.perf_counter() - start
        dirty = dirty_bytes(entry.folder)
        os.sync()
        time.sleep(_SETTLE_SECONDS)
        spent, seconds = busy_seconds() - busy, time.perf_counter() - start
        busy = busy_seconds()
        time.sleep(_SETTLE_SECONDS)
        idle = (busy_seconds() - busy) / _SETTLE_SECONDS
        method.tidy()
        step_stall = self._train(entry) if self.workload.trains else None
        entry.row.samples.append(Sample(stall, durable, max(0.0, spent - idle * seconds), dirty, step_stall))

    def _train(self, entry: Entry) -> float:
        """Save beside a training step; returns for how long the method kept it waiting."""
        method, workload = entry.opened(), self.workload
        workload.step()
        os.sync()
        start = time.perf_counter()
        handle = method.save(workload.state(), self._next())
        stall = time.perf_counter() - start
        workload.compute()
        start = time.perf_counter()
        handle.captured()
        stall += time.perf_counter() - start
        workload.update()
        handle.wait()
        method.tidy()
        return stall

    def _save_last(self) -> State:
        """Let every method save the same state, and return it."""
        self.workload.step()
        state = self.workload.state()
        step = self._next()

        def save(entry: Entry) -> None:
            handle = entry.opened().save(state, step)
            handle.captured()
            handle.wait()
            entry.opened().tidy()

        for entry in self._turns():
            self._guarded(entry, save)
        return state

    def _close(self) -> None:
        """Close every method; one that failed may fail again, and has said why already."""
        for entry in self.entries:
            if entry.method is not None:
                self._guarded(entry, lambda entry: entry.opened().close())
                entry.method = None

    def _restore(self, saved: State) -> None:
        """Restore in newly opened methods, the page cache cold."""
        twin = self.workload.twin()
        into = twin.state()

        def restore(entry: Entry) -> None:
            scribble(into)
            evict(entry.folder)
            start = time.perf_counter()
            with self._open(entry) as method:
                step = method.load(into)
                seconds = time.perf_counter() - start
            found = differences(saved, into)
            entry.row.verified = not found and step == self.steps
            if found:
                raise _DiffersError(f"the restored state differs in {len(found)} places, {found[0]} among them")
            if step != self.steps:
                raise _DiffersError(f"step {step} was restored, and {self.steps} was saved last")
            entry.row.restores.append(seconds)

        self._limit("restore")
        clock = _Clock(self.rounds, 1)
        for number in range(self.rounds):
            title = f"restore {number + 1} of {self.rounds}{clock.left(number)}"
            for entry in self._turns():
                if len(entry.row.restores) < _LEAST_ROUNDS or entry.spent < self.seconds:
                    self.progress(f"{title}: {entry.kind.name}")
                    self._guarded(entry, restore)
            self._limit("restore")
        for entry in self.entries:
            entry.row.stored_bytes = stored_bytes(entry.folder) if entry.folder.exists() else 0

    def _turns(self) -> Iterator[Entry]:
        """The methods that did not fail, in a new order each time: who comes after whom matters on a shared disk."""
        entries = [entry for entry in self.entries if entry.good]
        self.order.shuffle(entries)
        return iter(entries)

    def _next(self) -> int:
        self.steps += 1
        return self.steps

    def _guarded(self, entry: Entry, action: Callable[[Entry], None]) -> None:
        start = time.perf_counter()
        try:
            action(entry)
        except UnsupportedError as error:
            entry.row.problem = entry.row.problem or f"skipped: {error}"
        except _DiffersError as error:
            entry.row.problem = entry.row.problem or f"failed: {error}"
        except Exception as error:  # noqa: BLE001 - another method's failure is a row, not the end of the measurement
            entry.row.problem = entry.row.problem or f"failed: {type(error).__name__}: {error}"[:500]
        finally:
            entry.spent += time.perf_counter() - start


class _Clock:
    """Estimates how long rounds will go on, from those that were.

    Args:
        rounds: How many there are.
        length: How long all of it takes, in lengths of these rounds.
    """

    def __init__(self, rounds: int, length: float) -> None:
        self._total = rounds * length
        self._start = time.perf_counter()

    def left(self, done: int) -> str:
        """Return what to add to a line after so many rounds."""
        if not done:
            return ""
        seconds = (time.perf_counter() - self._start) / done * (self._total - done)
        return f", about {seconds / 60:.0f} min left" if seconds > 90 else f", about {seconds:.0f} s left"
