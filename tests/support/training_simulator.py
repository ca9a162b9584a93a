"""A training loop and a disk on a clock of their own, driven as ``engine.step`` drives a policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from pccheck_async.engine import Policy, SaveReport, StepReport


@dataclass
class Machine:
    """What the training job and its disk are like at a time; a test changes it on the way.

    Attributes:
        step_seconds: A clean step.
        save_seconds: What one checkpoint takes that is alone.
        alone_share: Of the disk's bandwidth, what one checkpoint can take: 1 where one saturates it.
        capture_seconds: How long a checkpoint keeps training waiting directly.
        interference: What it lengthens steps by, in seconds in all, spread over the steps while it is written.
        noise: Steps take up to so much more or less than they should (relative).
    """

    step_seconds: float = 1.0
    save_seconds: float = 6.0
    alone_share: float = 1.0
    capture_seconds: float = 0.0
    interference: float = 0.0
    noise: float = 0.0
    save_noise: float = 0.0


@dataclass
class _Save:
    step: int
    begin: float
    work: float  # seconds left, if it were alone


@dataclass
class Simulator:
    """Attributes: ``saves`` are the steps after which a checkpoint began, ``costs`` the seconds each step lost.

    Checkpoints are made at the ends of windows of so many steps.
    """

    policy: Policy
    machine: Machine
    seed: int = 0
    places: int = 2
    skips: bool = False
    window: int = 1
    step: int = 0
    now: float = 0.0
    saves: list[int] = field(default_factory=list)
    intervals: list[int | None] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    durable_since: float = 0.0
    """When the newest durable checkpoint began, or else the training."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._flying: list[_Save] = []
        self._ended: list[SaveReport] = []
        self._stall = 0.0
        self._due = False

    def run(self, steps: int, change: Callable[[Simulator], None] | None = None) -> None:
        for _ in range(steps):
            if change is not None:
                change(self)
            self._one()

    def stall(self, seconds: float) -> None:
        """Keep training waiting now."""
        self._stall += seconds
        self._write(seconds)

    def hold_up_saves(self, seconds: float) -> None:
        """Let those in flight take so much longer, as a disk that does nothing meanwhile."""
        for save in self._flying:
            save.work += seconds

    def overhead(self, steps: slice) -> float:
        """Share of the training time that those steps lost."""
        lost = self.costs[steps]
        return sum(lost) / (len(lost) * self.machine.step_seconds)

    def _one(self) -> None:
        m = self.machine
        stall, self._stall = self._stall, 0.0
        base = m.step_seconds * (1 + self._random.uniform(-m.noise, m.noise))
        in_flight = len(self._flying)
        seconds, left = 0.0, base
        while left > 1e-12 * base:  # slowed while something is written
            rate = 1 / (1 + (m.interference / m.save_seconds if self._flying else 0.0))
            piece = left / rate
            if self._flying:
                piece = min(piece, self._until_next_end())
            self._write(piece)
            seconds += piece
            left -= piece * rate
        self.costs.append(seconds - base + stall)
        for ended in self._ended:
            self.policy.saved(ended)
        self._ended = []
        report = StepReport(self.step, self.now, seconds, stall, in_flight)
        self._due = self.policy.due(report) or self._due
        if self._due and (self.step + 1) % self.window:
            self.policy.skipped(report)
        elif self._due:
            self._due = False
            self._checkpoint(report)
        decision = self.policy.decision()
        self.intervals.append(decision.interval)
        if not self.reasons or self.reasons[-1] != decision.reason:
            self.reasons.append(decision.reason)
        self.step += 1

    def _checkpoint(self, report: StepReport) -> None:
        if len(self._flying) >= self.places:
            if self.skips:
                self.policy.skipped(report)
                return
            waited = self._until_next_end()
            self._write(waited)
            self._stall += waited
        m = self.machine
        factor = 1 + self._random.uniform(-m.save_noise, m.save_noise)
        self._flying.append(_Save(self.step, self.now, m.save_seconds * factor))
        self.saves.append(self.step)
        self._stall += m.capture_seconds
        self._write(m.capture_seconds)

    def _rate(self) -> float:
        """How fast each one in flight goes, compared with one that is alone."""
        return min(1.0, 1 / (len(self._flying) * self.machine.alone_share)) if self._flying else 1.0

    def _until_next_end(self) -> float:
        return min(save.work for save in self._flying) / self._rate()

    def _write(self, seconds: float) -> None:
        while self._flying and seconds > 0:
            piece = min(seconds, self._until_next_end())
            rate = self._rate()
            self.now += piece
            seconds -= piece
            for save in self._flying:
                save.work -= piece * rate
            for save in [save for save in self._flying if save.work <= 1e-9 * self.machine.save_seconds]:
                self._flying.remove(save)
                self.durable_since = max(self.durable_since, save.begin)
                capture = self.machine.capture_seconds
                self._ended.append(
                    SaveReport(save.step, self.now, self.now - save.begin, capture, capture, 1_000_000_000)
                )
        self.now += seconds


def turns(intervals: list[int | None]) -> int:
    """How often the interval changed its direction."""
    known = [k for k in intervals if k is not None]
    moves = [b - a for a, b in pairwise(known) if a != b]
    return sum((a > 0) != (b > 0) for a, b in pairwise(moves))
