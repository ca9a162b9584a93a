"""Training with a checkpoint every f steps: how long the steps take in steady state, and the drain apart."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.paper.lab.bits import differences, scribble
from examples.paper.lab.methods import Handle, Method
from examples.paper.lab.methods.pccheck import PCcheckOverlapped
from examples.paper.lab.table import Row
from examples.paper.lab.workloads import Sleeping, SlowDevice, Workload

__all__ = ["Course", "DiffersError", "SlowCourse", "check_restore", "one_thread", "slow_course", "train"]


_PLAIN_STEPS = 20


class DiffersError(Exception):
    """What was restored is not what was saved."""


@dataclass(frozen=True, slots=True)
class Course:
    """Some steps of training.

    Attributes:
        steps: How many were timed.
        seconds: What they took.
        drain: Seconds from the last step's end until the last checkpoint was saved.
    """

    steps: int
    seconds: float
    drain: float

    @property
    def step_seconds(self) -> float:
        """One step, with its share of all that checkpoints cost."""
        return self.seconds / self.steps


@contextmanager
def one_thread() -> Iterator[None]:
    """Give torch one thread: those of its pool wait for each other where one has lost its core, for ten steps' time.

    A trainer that stands for one on a GPU has no use for them, and its steps are exact without.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(workload: Workload, method: Method | None, *, steps: int, interval: int = 1, lead: int = 0) -> Course:
    """Train, save after every ``interval`` steps, and wait for what was saved.

    Where ``lead`` and ``steps`` are multiples of the interval, the time has in it as much of the checkpoints before it
    as it leaves of its own ones to what comes after.

    Args:
        workload: Trains.
        method: Saves, its optimizer attached by the caller; None: nothing is saved.
        steps: To be timed.
        interval: Steps between checkpoints (f).
        lead: Steps before those, until as many checkpoints are on their way as always.
    """
    handles: list[Handle] = []
    captured = True
    start = time.perf_counter()
    for step in range(lead + steps):
        if step == lead:
            start = time.perf_counter()
        workload.compute()
        if not captured:
            handles[-1].captured()
            captured = True
        workload.update()
        if method is not None and (step + 1) % interval == 0:
            handles.append(method.save(workload.state(), step))
            captured = False
    end = time.perf_counter()
    for handle in handles:
        handle.wait()
    drain = time.perf_counter() - end
    if method is not None and handles:
        method.tidy()
    return Course(steps, end - start, drain)


def check_restore(method: Method, saved: Any, into: Any) -> None:
    """Restore over a state and compare every bit with what was saved last.

    Raises:
        DiffersError: they are not the same; names a place.
    """
    scribble(into)
    method.load(into)
    found = differences(saved, into)
    if found:
        raise DiffersError(f"{method.name}: the restored state differs in {len(found)} places, {found[0]} among them")


class SlowCourse:
    """Training of an exact step time beside engines on a slow device: each course has an engine of its own.

    To be used inside :func:`one_thread`; :func:`slow_course` sees to that.

    Args:
        folder: Where the engines' stores go; each is deleted after its course.
        device: Its caps.
        nbytes: Bytes of the state (m).
        step_seconds: Time of forward and backward.
        tensors: How many the state has.
    """

    def __init__(self, folder: Path, device: SlowDevice, *, nbytes: int, step_seconds: float, tensors: int = 8) -> None:
        self.workload = Sleeping(nbytes, tensors, step_seconds)
        self._twin = self.workload.twin().state()
        self._folder, self._device = folder, device
        self._plain: list[float] = []

    def plain(self) -> float:
        """Return the time of a step without checkpoints (t), in seconds: the median of blocks beside the courses."""
        self._plain = self._plain or [self._block()]
        return statistics.median(self._plain)

    def begin_round(self) -> None:
        """Forget the step times of earlier rounds."""
        self._plain = []

    def _block(self) -> float:
        return train(self.workload, None, steps=_PLAIN_STEPS).step_seconds

    def alone(self) -> float:
        """Return the time until a checkpoint is durable (Tw), in seconds, where there is no other and no training."""
        with tempfile.TemporaryDirectory(dir=self._folder) as name, self._open(Path(name), max_in_flight=1) as method:
            for step in range(3):  # the first two create the slots
                self.workload.update()
                start = time.perf_counter()
                method.save(self.workload.state(), step).wait()
                seconds = time.perf_counter() - start
        return seconds

    def step_seconds(
        self, *, interval: int, checkpoints: int, max_in_flight: int, lead: int = 0, **options: Any
    ) -> float:
        """Return the time of a step with checkpoints in steady state, in seconds.

        Args:
            interval: Steps between checkpoints (f).
            checkpoints: How many are timed.
            max_in_flight: Checkpoints in flight (N).
            lead: How many come before those: at least one more than may be in flight.
            options: Further ones of the engine.

        Raises:
            DiffersError: the last one is not what was saved.
        """
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            folder = Path(name)
            with self._open(folder, max_in_flight=max_in_flight, **options) as method:
                method.attach(self.workload.optimizer)
                course = train(
                    self.workload,
                    method,
                    steps=checkpoints * interval,
                    interval=interval,
                    lead=max(lead, max_in_flight + 1) * interval,
                )
            with PCcheckOverlapped(folder) as again:  # at the speed of the real device
                check_restore(again, self.workload.state(), self._twin)
        self._plain.append(self._block())
        return course.step_seconds

    def slowdown(
        self, figure: str, *, series: int, x: float, repetition: int, step_seconds: float, limit: float
    ) -> Row:
        """Return a row for a step that takes so long with checkpoints: its multiple of one without.

        Args:
            figure: Where it is drawn.
            series: Value of the parameter that tells lines or bars apart.
            x: Value of the other one.
            repetition: Round of the experiment.
            step_seconds: See :meth:`step_seconds`.
            limit: The least multiple that the device allows; never below 1.
        """
        return Row(
            figure=figure,
            method="pccheck overlapped",
            series=str(series),
            x=x,
            repetition=repetition,
            value=step_seconds / self.plain(),
            unit="times",
            floor=max(1.0, limit),
        )

    def _open(self, folder: Path, **options: Any) -> Method:
        return self._device.open(PCcheckOverlapped, folder, **options)


@contextmanager
def slow_course(folder: Path, device: SlowDevice, *, nbytes: int, step_seconds: float) -> Iterator[SlowCourse]:
    """Give a :class:`SlowCourse` with a folder of its own below ``folder``, and torch one thread."""
    with tempfile.TemporaryDirectory(prefix="pccheck-bench-", dir=folder) as name, one_thread():
        yield SlowCourse(Path(name), device, nbytes=nbytes, step_seconds=step_seconds)
