"""Methods beside the same training, by turns: blocks of steps with checkpoints, and blocks without any between them."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from examples.paper.lab.bits import differences, scribble
from examples.paper.lab.methods import METHODS, Handle, Method, State, find_method
from examples.paper.lab.methods.pccheck import PCcheck
from examples.paper.lab.workloads import Workload
from pccheck_async.bench.machine import busy_seconds
from pccheck_async.bench.rounds import evict
from pccheck_async.transfer import available_cores

__all__ = ["Alone", "Block", "Contender", "Race", "chosen", "plain_block"]

_WARM_SAVES = 3
_OWN_PLACES = 2
"""In flight where the method bounds them itself: the engine's default."""
_SLOWER = 1.5
"""How much longer a save may take beside training than alone."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some steps with a checkpoint every so many.

    Attributes:
        seconds: Of a step in steady state, stalls included.
        drain: Seconds from the last step until every checkpoint was saved.
        durable: Seconds from the start of a save until the method called it saved, median.
    """

    seconds: float
    drain: float
    durable: float


@dataclass(frozen=True, slots=True)
class Alone:
    """Saves of this package while nothing trains: what the storage and the processor need for one at least.

    Attributes:
        nbytes: Of a state.
        seconds: Until durable, median.
        processor: Processor seconds of the whole system, mean.
    """

    nbytes: int
    seconds: float
    processor: float

    def floor(self, step_seconds: float, interval: int) -> float:
        """Return the seconds of a step that saving every ``interval`` steps cannot go below.

        max(t, m / (B f), t + c m / (cores f)): the storage works beside training at best, and what the processor does
        for a checkpoint it does not do for training.
        """
        cores = available_cores()
        return max(step_seconds, self.seconds / interval, step_seconds + self.processor / (cores * interval))


class Contender:
    """One method beside training. Its saves never pile up: where it sets no bound itself, each waits for the last.

    Of the methods only this package's has several on their way. CheckFreq, DCP and torch_checkpointing wait by
    themselves; torchsnapshot starts and Lightning queues any number, a copy of the state in memory for each. A method
    that cannot restore all of a training state is spared the random numbers, which is what torchsnapshot cannot.

    Args:
        kind: The method.
        folder: Its own.
        workload: What trains.

    Attributes:
        load_seconds: What a restore took, the page cache cold; None before :meth:`verify`.
    """

    def __init__(self, kind: type[Method], folder: Path, workload: Workload) -> None:
        self.kind, self.folder, self.workload = kind, folder, workload
        self.load_seconds: float | None = None
        self._places = _OWN_PLACES if issubclass(kind, PCcheck) else 1
        self._watcher = ThreadPoolExecutor(1, "watcher")
        self._flying: deque[Future[float]] = deque()
        self._durable: list[float] = []
        self._tidying = 0.0
        self._step = 0
        self._method: Method | None = kind(folder)
        self._method.attach(workload.optimizer)

    def warm(self) -> None:
        """Save a few times: files, memory and processes are made by the first ones."""
        for _ in range(_WARM_SAVES):
            self.workload.step()
            self.save().captured()
        self.drain()

    def save(self) -> Handle:
        """Start a save, once there is a place for it."""
        assert self._method is not None
        while len(self._flying) >= self._places:
            self._durable.append(self._flying.popleft().result())
        if not self._flying and self._step:
            self._tidy(self._method)
        self._step += 1
        start = time.perf_counter()
        handle = self._method.save(self._state(self.workload), self._step)
        self._flying.append(self._watcher.submit(_watch, handle, start))
        return handle

    def drain(self) -> None:
        """Wait for every save."""
        assert self._method is not None
        while self._flying:
            self._durable.append(self._flying.popleft().result())
        self._tidy(self._method)

    def block(self, interval: int, periods: int, step_seconds: float) -> Block:
        """Train; every period begins with a save, so that what it costs falls into the block.

        Args:
            interval: Steps of a period.
            periods: How many are timed.
            step_seconds: Of a step without checkpoints. Where saves take longer than a period, some periods go ahead
                that are not timed: in steady state each save waits for an older one.
        """
        usual = self._durable[-1] if self._durable else 0.0
        ahead = self._places if usual * _SLOWER > interval * step_seconds else 0
        self._durable.clear()
        for _ in range(ahead):
            self._period(interval)
        self._tidying = 0.0
        start = time.perf_counter()
        for _ in range(periods):
            self._period(interval)
        seconds = time.perf_counter() - start - self._tidying
        start, self._tidying = time.perf_counter(), 0.0
        self.drain()
        drain = time.perf_counter() - start - self._tidying
        os.sync()  # or the next block would pay for what this method left to the kernel
        return Block(seconds / (periods * interval), drain, statistics.median(self._durable))

    def alone(self, saves: int) -> Alone:
        """Save while nothing trains."""
        seconds = []
        before = busy_seconds()
        for _ in range(saves):
            start = time.perf_counter()
            self.save().captured()
            self.drain()
            seconds.append(time.perf_counter() - start)
        spent = busy_seconds() - before
        return Alone(self.workload.nbytes, statistics.median(seconds), spent / saves)

    def profile(self) -> tuple[float, float]:
        """Return the seconds of a save until captured, and until saved, while nothing trains."""
        start = time.perf_counter()
        self.save().captured()
        captured = time.perf_counter() - start
        self.drain()
        return captured, self._durable[-1]

    def verify(self, twin: Workload) -> str:
        """Save once more, restore into ``twin`` by a method opened anew, and return what differs, "" if nothing."""
        self.save().captured()
        self.drain()
        self.close()
        saved, into = self._state(self.workload), self._state(twin)
        scribble(into)
        evict(self.folder)
        start = time.perf_counter()
        with self.kind(self.folder) as method:
            step = method.load(into)
            self.load_seconds = time.perf_counter() - start
        found = differences(saved, into)
        if found:
            return f"the restored state differs in {len(found)} places, {found[0]} among them"
        return "" if step == self._step else f"step {step} was restored, and {self._step} was saved last"

    def close(self) -> None:
        """Close the method."""
        method, self._method = self._method, None
        self._watcher.shutdown()
        if method is not None:
            method.close()

    def _state(self, workload: Workload) -> State:
        state = workload.state()
        if not self.kind.resumable:
            state.pop("rng", None)
        return state

    def _period(self, interval: int) -> None:
        handle = self.save()
        for number in range(interval):
            self.workload.compute()
            if number == 0:
                handle.captured()
            self.workload.update()

    def _tidy(self, method: Method) -> None:
        """Delete older checkpoints, off the clock: methods that write over theirs have no advantage by that."""
        start = time.perf_counter()
        method.tidy()
        self._tidying += time.perf_counter() - start


class Race:
    """Several methods beside one workload. One that fails is out, with a note that says why.

    Args:
        names: Of the methods.
        workload: What trains.
        folder: Where each method gets a folder.
        progress: Is told what is being measured.

    Attributes:
        running: The methods that did not fail, by name.
        problems: Why the others are out.
        loads: Seconds of a restore by method, after :meth:`finish`.
        yardstick: This package in its default form; another contender than the one that is compared.

    Raises:
        ValueError: there is no such method.
    """

    def __init__(self, names: Sequence[str], workload: Workload, folder: Path, progress: Callable[[str], None]) -> None:
        kinds = [find_method(name) for name in names]
        self.workload, self._progress = workload, progress
        self.running: dict[str, Contender] = {}
        self.problems: dict[str, str] = {}
        self.loads: dict[str, float] = {}
        workload.step()
        self.yardstick = Contender(PCcheck, folder / "yardstick", workload)
        try:
            self.yardstick.warm()
            for number, kind in enumerate(kinds):
                reason = kind.why_not()
                if reason is not None:
                    self.problems[kind.name] = f"skipped: {reason}"
                    continue
                progress(f"{kind.name}: opening")
                with self._guarded(kind.name):
                    self.running[kind.name] = Contender(kind, folder / str(number), workload)
                    self.running[kind.name].warm()
        except BaseException:
            self.close()
            raise

    def block(self, name: str, interval: int, periods: int, step_seconds: float) -> Block | None:
        """Let a method have a block; None where it is out."""
        self._progress(f"{name}: every {interval}")
        with self._guarded(name):
            return self.running[name].block(interval, periods, step_seconds)
        return None

    def finish(self) -> None:
        """Restore with every method and compare bit by bit; one that restored something else is out."""
        twin = self.workload.twin()
        for name in list(self.running):
            self._progress(f"{name}: restoring")
            with self._guarded(name):
                contender = self.running[name]
                differs = contender.verify(twin)
                if differs:
                    raise AssertionError(differs)
                assert contender.load_seconds is not None
                self.loads[name] = contender.load_seconds

    def close(self) -> None:
        """Close all methods; one that fails to has said why already, or has nothing more to say."""
        for name in list(self.running):
            with self._guarded(name):
                self.running[name].close()
        self.yardstick.close()

    def notes(self) -> list[str]:
        """Return why methods are out, and what others were spared."""
        spared = [name for name, contender in self.running.items() if not contender.kind.resumable]
        return [
            *(f"{name} {problem}" for name, problem in self.problems.items()),
            *(f"{name} saves no random numbers here: it cannot restore them" for name in spared),
        ]

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(torch|torchsnapshot|lightning)\b")
            try:
                yield
            except Exception as error:  # noqa: BLE001 - another method's failure is a note, not the end of it all
                self.problems.setdefault(name, f"failed: {type(error).__name__}: {error}".splitlines()[0])
                out = self.running.pop(name, None)
                if out is not None:
                    self._close_failed(out)

    def _close_failed(self, contender: Contender) -> None:
        with suppress(Exception):  # what made it fail is noted
            contender.close()


def plain_block(workload: Workload, steps: int) -> float:
    """Train without checkpoints; returns the seconds of a step."""
    start = time.perf_counter()
    for _ in range(steps):
        workload.step()
    return (time.perf_counter() - start) / steps


def chosen(asked: Sequence[str] | None, usual: Iterable[str]) -> list[str]:
    """Return the methods to compare; ValueError where one that was asked for does not exist."""
    names = list(usual) if asked is None else list(asked)
    for name in names:
        find_method(name)
    return [name for name in METHODS if name in names]


def _watch(handle: Handle, start: float) -> float:
    handle.wait()
    return time.perf_counter() - start
