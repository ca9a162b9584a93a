# SPDX-License-Identifier: Apache-2.0
"""The policies that measure steps and checkpoints first, and then choose the interval.

Adaptive, Young-Daly and CheckFreq use the cost of a checkpoint to training, PCcheck its write time with N in flight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import NamedTuple

from pccheck_async.engine import Decision, SaveReport, StepReport
from pccheck_async.format import check_count
from pccheck_async.training.policy.formulas import (
    CheckFreqChoice,
    check_overhead,
    check_seconds,
    checkfreq_interval,
    daly_seconds,
    interval_floor,
    sustained_interval,
    whole_steps,
)
from pccheck_async.training.policy.meter import Level, OverheadMeter

__all__ = ["Adaptive", "AgeLimit", "CheckFreqInterval", "Measured", "PCcheckInterval", "Retrying", "YoungDaly"]

_MOST_SECONDS = 600.0
_RETRY = 0.1
"""After a failed checkpoint the next one is due no sooner than this part of :meth:`AgeLimit.apart` later."""
_LEAP = 8
"""The largest factor by which an interval grows at a time: a high cost is measured again before it grows more."""
_WARM_UP = 2
"""First steps that are not measured: they compile, allocate and fill caches."""
_PROFILE = 5
_CALIBRATIONS = 5
"""Early checkpoints: the first pays for slots and staging memory, four measure the cost (one may be an outlier)."""
_TAIL = (4, 32)
"""Least and most clean steps (no checkpoint in flight) to wait for where clean steps are scarce."""
_SURE, _SURE_LATER, _MANY = 2.5, 1.75, 16
"""Standard errors by which the cost must exceed the budget before the interval grows: with few periods, and with many
(from ``_MANY`` periods on)."""
_FEWEST = 2
"""Fewest periods for an estimate of the cost."""
_GO_UP = 1.02
"""Factor by which the wanted interval must be longer than the present one before the present one grows."""
_COME_DOWN = 0.85
"""A shorter interval is taken only if it is at most this part of the present one (hysteresis)."""
_LEAVE_OUT_EVERY, _DOUBTFUL = 10, 4
"""Periods without clean steps after which one checkpoint is postponed to get some: as a rule, and in doubt."""
_JUST = 1.01
"""Factor by which a checkpoint may exceed N periods before the N in flight count as waiting for each other."""
_LEARN = 3
"""Checkpoints whose median estimates the time of a single one after the interval has grown because they piled up."""
_TINY = 1e-9
"""Seconds of a step that a coarse clock measured as 0."""
_BURSTS = 2
"""Bursts of N checkpoints that are compared each time, as one may be slow by chance; the very first is not counted."""
_STEPS, _SAVES, _DRIFT = 32, 3, 0.2
"""For PCcheckInterval: steps of the median, checkpoints for an estimate of their time, and the least relative change
of either that it follows."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a policy so far; 0 if not measured yet.

    Attributes:
        step_seconds: Seconds of a step with no checkpoint in flight (t).
        save_seconds: Seconds of a checkpoint from admission to durability (Tw).
        cost_seconds: Seconds that one checkpoint costs training: stall and interference.
        overhead: Share of the training time that checkpoints cost, waits for a place in flight included; None before
            the first checkpoint.
    """

    step_seconds: float
    save_seconds: float
    cost_seconds: float
    overhead: float | None


class _Wanted(NamedTuple):
    """An interval in steps, why it is not shorter, and whether the reason is that checkpoints would pile up."""

    steps: int
    why: str
    piling: bool = False


class AgeLimit:
    """Decides when a checkpoint has to begin so that the newest durable one never gets older than ``most_seconds``.

    If a checkpoint takes more than half of the limit, the limit cannot be kept: then each begins when the one before
    should have ended. ``most_seconds=None`` is no limit.
    """

    def __init__(self, most_seconds: float | None) -> None:
        self.most_seconds = None if most_seconds is None else check_seconds("most_seconds", most_seconds)
        self._durable: float | None = None  # when the newest durable one began, or else the first step
        self._newest = 0.0  # when the newest one began that is not known to have failed
        self._begun: int | None = None  # the step of one without a known outcome

    def apart(self, save_seconds: float) -> float:
        """Return the most seconds between the starts of two checkpoints if each is durable after ``save_seconds``."""
        most = float("inf") if self.most_seconds is None else self.most_seconds
        return max(most - save_seconds, save_seconds)

    def reached(self, report: StepReport, save_seconds: float) -> bool:
        """Return, once after every step, whether a checkpoint must begin now: after another step it would be late."""
        if self._durable is None:
            self._durable = self._newest = report.now - report.seconds
        if self.most_seconds is None:
            return False
        if self._begun is not None and not report.in_flight:  # it failed, which nobody reports
            self._begun = None
            self._newest = max(self._durable, report.now - (1 - _RETRY) * self.apart(save_seconds))
        return report.now - self._newest + report.seconds > self.apart(save_seconds)

    def begin(self, report: StepReport) -> None:
        """Called when a checkpoint begins after this step."""
        self._newest, self._begun = report.now, report.step

    def saved(self, report: SaveReport) -> None:
        """Called when a checkpoint is durable, whether the policy or somebody else requested it."""
        began = report.now - report.seconds
        self._durable = began if self._durable is None else max(self._durable, began)
        self._newest = max(self._newest, began)
        if self._begun is not None and report.step >= self._begun:
            self._begun = None


class Retrying(ABC):
    """Base class of policies that try a skipped checkpoint again after the next step."""

    _again = False

    def __repr__(self) -> str:
        try:
            return f"<{type(self).__name__}: {self.decision().reason}>"
        except AttributeError:  # in __init__
            return f"<{type(self).__name__}>"

    @abstractmethod
    def decision(self) -> Decision:
        """Return the present interval, with the reason for it."""

    def skipped(self, report: StepReport) -> None:
        """Called when a due checkpoint was not taken; the next step is due again."""
        self._again = True

    def _was_skipped(self) -> bool:
        again, self._again = self._again, False
        return again


class Profiling(Retrying):
    """Base class of policies that measure before they decide."""

    def __init__(self, overhead: float, max_in_flight: int, most_seconds: float | None) -> None:
        self._overhead = check_overhead(overhead)
        self._places = check_count("max_in_flight", max_in_flight, no_int=TypeError)
        self._age = AgeLimit(most_seconds)
        self._nbytes = 0
        self._steps = 0  # reports so far
        self._since = 0  # steps since the last checkpoint
        self._interval: int | None = None
        self._reason = f"measuring the first {_WARM_UP + _PROFILE} steps without a checkpoint"

    def decision(self) -> Decision:
        """Return the present interval (None until it is measured), with the reason for it."""
        seconds = None if self._interval is None else self._interval * self._step_seconds
        return Decision(self._interval, seconds, self._reason, self._age.most_seconds)

    @property
    def _step_seconds(self) -> float:
        raise NotImplementedError


class Adaptive(Profiling):
    """Checkpoint as often as a budget allows: by default 3 % of the training time, for stall and interference together.

    The interval is k = max(ceil(C / (overhead t)), ceil(Tw / (N t))) steps, from measured times: C is the seconds that
    a checkpoint costs training, t the seconds of a clean step (no checkpoint in flight), Tw the seconds until a
    checkpoint is durable. The rule is CheckFreq's adaptive one (FAST'21), but the interval can also shrink again.

    The first steps are timed without a checkpoint. Five early checkpoints follow, with some clean steps after each.
    From then on an :class:`OverheadMeter` measures the cost of every period (from one checkpoint to the next). The
    interval grows if the cost exceeds the budget by more than the noise explains. It shrinks if a much shorter one
    would keep the budget even at a somewhat higher cost. If no step is clean, now and then a checkpoint is postponed.

    Args:
        overhead: Budget as a share of the training time.
        max_in_flight: The engine's setting of that name (N).
        most_seconds: Most age of the newest durable checkpoint, which has precedence over the budget; None: no limit.

    Raises:
        ValueError, TypeError: an argument is out of range, or of another type.
    """

    def __init__(
        self, overhead: float = 0.03, *, max_in_flight: int = 2, most_seconds: float | None = _MOST_SECONDS
    ) -> None:
        super().__init__(overhead, max_in_flight, most_seconds)
        self._meter = OverheadMeter()
        self._saves = Level(odd_first=True)
        self._captures = Level(odd_first=True)
        self._starts = 0
        self._ended = False  # the last checkpoint, by the reports
        self._after = 0  # steps since then
        self._longest = 0.0  # of the checkpoints that ended in this period
        self._priced = False  # this period: it is only being waited for a longer interval
        self._left_out = 0  # periods since an interval was left out
        self._leave_out = False
        self._saturated: float | None = None  # seconds per checkpoint when they last piled up, while it is learned
        self._alone: list[float] = []  # the seconds of each after that
        self._share = 1 / self._places
        self._raised_at = 0
        self._before: int | None = None  # the interval before it grew, until clean steps confirm that

    # -- the protocol

    def due(self, report: StepReport) -> bool:
        """Return whether to checkpoint after this step. Called once after every step."""
        overdue = self._age.reached(report, self._saves.upper)
        self._steps += 1
        if self._steps > _WARM_UP:
            self._meter.step(report)
            self._since += 1
        if self._starts and not report.in_flight:
            self._ended = True  # also where it failed, which nobody reports
        self._after += self._ended
        if self._was_skipped():
            self._restart(report)
            return True
        if self._before is not None and self._meter.clean >= _TAIL[0]:
            self._confirm()
        if not overdue and not self._complete():
            return False
        if not self._priced:
            self._price()
        if not overdue and self._interval is not None and self._since < self._interval:
            self._priced = True  # it has just become longer
            return False
        self._starts += 1
        self._restart(report)
        return True

    def saved(self, report: SaveReport) -> None:
        """Add the times of a durable checkpoint to the measurements."""
        self._age.saved(report)
        self._nbytes = report.nbytes
        self._longest = max(self._longest, report.seconds)
        if self._saves.add(report.seconds):
            self._meter.forget()  # the storage is another now
        self._captures.add(report.capture_seconds)
        self._ended = True
        if self._saturated is not None and report.step >= self._raised_at:
            self._alone.append(report.seconds)
            if len(self._alone) == _LEARN:
                self._learn_share()

    def measured(self) -> Measured:
        """Return the measurements that the interval is computed from."""
        meter = self._meter
        return Measured(meter.step_seconds, self._saves.median, max(0.0, meter.cost().seconds), meter.overhead)

    # -- which interval

    def _wanted(self, cost: float) -> _Wanted:
        """Return the interval for a checkpoint that costs ``cost`` seconds of training."""
        return max(self._for_budget(cost), self._for_storage(), key=attrgetter("steps"))

    @property
    def _step_seconds(self) -> float:
        return max(_TINY, self._meter.step_seconds)

    @property
    def _sustained(self) -> float:
        """Seconds per checkpoint that becomes durable while there are always N in flight."""
        return self._saturated if self._saturated is not None else self._saves.upper * self._share

    def _for_budget(self, cost: float) -> _Wanted:
        return _Wanted(
            whole_steps(cost / self._overhead, self._step_seconds),
            f"a checkpoint costs {_say(cost)} of training, {self._overhead:.1%} of what steps of "
            f"{_say(self._step_seconds)} take in that time",
        )

    def _for_storage(self) -> _Wanted:
        return _Wanted(
            whole_steps(self._sustained, self._step_seconds),
            f"a checkpoint takes {_say(self._saves.upper)} to become durable, and with {self._places} in flight "
            "more of them would pile up",
            piling=True,
        )

    # -- how it goes on

    def _complete(self) -> bool:
        """Return whether the period is over, so that the next checkpoint may begin."""
        if not self._starts:
            return self._since >= _PROFILE
        if self._interval is None:
            wanted = min(_TAIL[1], max(_TAIL[0], (self._since - self._meter.clean) // 2))
            enough = self._meter.clean >= wanted or self._after >= _TAIL[1]
            patience = 1 if self._saves.values else self._starts  # all failed so far: ever later
            return self._ended and enough and self._since >= _PROFILE * patience
        if self._since < self._interval:
            return False
        if self._priced or not self._leave_out:
            return True
        # Nothing but busy steps for long: wait until nothing is in flight, and for some steps more.
        busy = whole_steps(self._saves.median, self._step_seconds)
        return self._meter.clean >= self._tail or self._since >= 2 * self._interval + busy + self._tail

    @property
    def _tail(self) -> int:
        """Number of clean steps that are enough to compare busy steps with."""
        return min(_TAIL[1], max(_TAIL[0], (self._interval or 0) // 2))

    def _scarce(self, periods: int) -> bool:
        """Return whether the last ``periods`` periods had too few clean steps to compare busy steps with."""
        return self._left_out >= periods and self._meter.clean_in(periods) < self._tail

    def _price(self) -> None:
        """End the period in the meter, and choose the interval anew from its cost."""
        if not self._starts:
            self._meter.close(first=True)
            self._reason = "checkpointing early, to learn what one costs"
            return
        # If N in flight did not follow, checkpoints waited for each other: that is not the cost of one.
        self._meter.close(counted=self._longest <= _JUST * self._since * self._step_seconds * self._places)
        self._left_out = 0 if self._leave_out else self._left_out + 1
        self._leave_out = self._scarce(_LEAVE_OUT_EVERY)
        if self._starts >= _CALIBRATIONS and self._saves.values:
            self._choose()

    def _choose(self) -> None:
        if self._interval is not None and self._meter.periods < _FEWEST:
            return  # the costs were forgotten
        cost = self._meter.cost()
        likely = self._limited(cost.seconds + cost.error)
        if self._interval is None:
            self._take(likely, "measured")
            return
        sure = _SURE if self._meter.periods < _MANY else _SURE_LATER
        least = self._limited(cost.seconds - sure * cost.error)
        if least.steps > self._interval * _GO_UP:
            most = self._interval * _LEAP
            if least.piling:
                self._take(least._replace(steps=min(least.steps, most)), "up")
            elif self._meter.clean_age < 2:
                self._take(likely._replace(steps=min(likely.steps, most)), "up")
            else:
                self._leave_out = True  # it may be the steps that have changed, not the checkpoints
        elif likely.steps > self._interval:  # perhaps over the budget: find out
            self._leave_out = self._scarce(_DOUBTFUL)
        elif likely.steps <= self._interval * _COME_DOWN and self._saturated is None:
            self._take(likely, "down")

    def _confirm(self) -> None:
        """Take back the last growth of the interval if clean steps have become slower or faster since.

        The cost was then computed with older clean steps: the steps had changed, not the cost of checkpoints. With the
        longer interval the next clean steps would come later.
        """
        assert self._before is not None
        before, self._before = self._before, None
        if not self._meter.moved or self._interval is None or before >= self._interval:
            return
        self._meter.close(first=True)
        self._saturated = None
        longer, self._interval = self._interval, before
        self._reason = (
            f"back from {longer} to {before} steps: steps take {_say(self._step_seconds)} now, with or without "
            "a checkpoint"
        )

    def _take(self, wanted: _Wanted, direction: str) -> None:
        self._before = self._interval if direction == "up" else None
        if direction == "up" and wanted.piling:
            self._saturated, self._alone = self._saves.upper * self._share, []
            self._raised_at = 1 << 62  # of the next checkpoint: see _restart
        change = "" if self._interval is None else f"{direction} from {self._interval} "
        self._interval = wanted.steps
        self._reason = f"{change}{'to ' if change else ''}{wanted.steps} steps: {wanted.why}"

    def _limited(self, cost: float) -> _Wanted:
        wanted, seconds = self._wanted(max(0.0, cost)), self._age.apart(self._saves.upper)
        if wanted.steps * self._step_seconds <= seconds:
            return wanted
        return _Wanted(
            max(1, int(seconds / self._step_seconds)), f"no more than {_say(seconds)} apart, though {wanted.why}"
        )

    def _learn_share(self) -> None:
        """Compute how much N checkpoints in flight speed up this storage, from times of several and of single ones.

        If a single checkpoint saturates the storage, several do not help: each of N in flight takes N times as long,
        and at an interval of the seconds of a single one divided by N they would pile up again.
        """
        assert self._saturated is not None
        self._share = min(1.0, max(self._share, self._saturated / max(_TINY, median(self._alone))))
        self._saturated = None

    def _restart(self, report: StepReport) -> None:
        if self._saturated is not None and not self._alone:
            self._raised_at = min(self._raised_at, report.step)
        self._age.begin(report)
        self._since = self._after = 0
        self._ended = self._priced = False
        self._longest = 0.0


class YoungDaly(Adaptive):
    """Checkpoint at Daly's higher-order optimum for the measured cost, but never more often than :class:`Adaptive`.

    The optimum (:func:`~pccheck_async.training.policy.daly_seconds`) weighs the work lost at a failure against the cost
    of checkpoints. If these are cheap, it would be more often than the storage or the budget allows, so the interval of
    :class:`Adaptive` is a lower bound. (That is no less than f_min, because Tw / N >= m / B with N in flight.)

    Args:
        mtbf_seconds: Mean seconds between failures of the job: those of one machine, divided by the number of machines.
        overhead, max_in_flight, most_seconds: See :class:`Adaptive`.
    """

    def __init__(
        self,
        mtbf_seconds: float,
        overhead: float = 0.03,
        *,
        max_in_flight: int = 2,
        most_seconds: float | None = _MOST_SECONDS,
    ) -> None:
        super().__init__(overhead, max_in_flight=max_in_flight, most_seconds=most_seconds)
        self._mtbf = check_seconds("mtbf_seconds", mtbf_seconds)

    def _wanted(self, cost: float) -> _Wanted:
        optimum = _Wanted(
            whole_steps(daly_seconds(cost, self._mtbf), self._step_seconds),
            f"this loses least at one failure in {self._mtbf:g} s, where a checkpoint costs {cost:.3g} s of training",
        )
        return max(optimum, super()._wanted(cost), key=attrgetter("steps"))


class CheckFreqInterval(Adaptive):
    """CheckFreq (FAST'21): one checkpoint in flight, an interval of k steps from Algorithm 1, then from measured costs.

    The seconds of a step (Ti), of the copy (Tc) and of the write (Ts) are measured first. The cost of a checkpoint (To)
    is at first computed from them by Algorithm 1 (:func:`.checkfreq_interval`), and then measured. Unlike in the
    published rule, the interval can also shrink again.

    Args:
        overhead: Budget as a share of the training time (p).
        update_seconds: Seconds of the weight update in a step (CheckFreq's Tw); 0 if unknown.
        device_copy_seconds: Seconds to copy the state on the device (Tg); None if that is not possible.
        device_free_bytes: Free device memory.
        most_seconds: See :class:`Adaptive`.

    Attributes:
        choice: The result of Algorithm 1 for the first measurements; None before that.
    """

    def __init__(
        self,
        overhead: float = 0.035,
        *,
        update_seconds: float = 0.0,
        device_copy_seconds: float | None = None,
        device_free_bytes: int = 0,
        most_seconds: float | None = _MOST_SECONDS,
    ) -> None:
        super().__init__(overhead, max_in_flight=1, most_seconds=most_seconds)
        self._update_seconds = update_seconds
        self._device_copy_seconds = device_copy_seconds
        self._device_free_bytes = device_free_bytes
        self.choice: CheckFreqChoice | None = None

    def _wanted(self, cost: float) -> _Wanted:
        if self.choice is None:
            capture = self._captures.median
            self.choice = checkfreq_interval(
                step_seconds=self._step_seconds,
                update_seconds=self._update_seconds,
                host_copy_seconds=capture,
                persist_seconds=max(0.0, self._saves.median - capture),
                overhead=self._overhead,
                device_copy_seconds=self._device_copy_seconds,
                device_free_bytes=self._device_free_bytes,
                nbytes=self._nbytes,
            )
            return _Wanted(
                self.choice.interval,
                f"Algorithm 1 of CheckFreq, copying on the {self.choice.mode}, {self.choice.overhead_seconds:.3g} s "
                "of overhead a checkpoint",
            )
        steps = whole_steps(max(0.0, self._sustained - cost), self._step_seconds)
        return max(self._for_budget(cost), self._for_storage()._replace(steps=steps), key=attrgetter("steps"))


class PCcheckInterval(Profiling):
    """Checkpoint every f* = ceil(Tw(N) / (N q t)) steps, never under f_min = ceil(m / (B q t)) (PCcheck, section 3.4).

    q = 1 + overhead is the tolerated slowdown, and m the bytes of a checkpoint. The first steps give t, the seconds of
    a step. Then a burst of N checkpoints after consecutive steps gives Tw(N), the seconds of each with N in flight, and
    B, the bandwidth of all together. Three bursts are made: the first is ignored, and the better values of the other
    two are used. If later two checkpoints or more take longer than f* allows, f* grows. If they take a fifth less than
    before, bursts are made again, because single checkpoints do not show Tw(N).

    Args:
        overhead: Tolerated slowdown (q - 1).
        max_in_flight: The engine's setting of that name (N).
        most_seconds: Most age of the newest durable checkpoint, which has precedence over f*; None: no limit.
    """

    def __init__(
        self, overhead: float = 0.03, *, max_in_flight: int = 2, most_seconds: float | None = _MOST_SECONDS
    ) -> None:
        super().__init__(overhead, max_in_flight, most_seconds)
        self._clean: deque[float] = deque(maxlen=_STEPS)
        self._busy: deque[float] = deque(maxlen=_STEPS)
        self._profile = _PROFILE  # steps before the next burst
        self._left: int | None = None  # checkpoints of the burst to begin; None outside of one
        self._burst: list[SaveReport] = []
        self._burst_step = 0
        self._bursts: list[tuple[float, float]] | None = None  # seconds and bandwidth of each; None before the first
        self._seconds = 0.0  # Tw(N)
        self._bandwidth = 0.0
        self._saves = Level(window=5)
        self._reference: float | None = None
        self._settled_at = 0

    def due(self, report: StepReport) -> bool:
        """Return whether to checkpoint after this step. Called once after every step."""
        overdue = self._age.reached(report, self._saves.upper)
        due = self._is_due(report) or overdue
        if due:
            self._since = 0
            self._age.begin(report)
        return due

    def _is_due(self, report: StepReport) -> bool:
        self._steps += 1
        self._since += 1
        if self._steps > _WARM_UP:
            (self._busy if report.in_flight else self._clean).append(report.seconds)
        if self._was_skipped():
            return True
        if self._left is None:
            if self._interval is None:
                return self._since >= self._profile + _WARM_UP * (self._bursts is None) and self._begin_burst(report)
            if self._since < self._interval:
                return False
            quicker = self._saves.median < (self._reference or 0.0) * (1 - _DRIFT)
            if (quicker and len(self._saves.values) > 1) or self._bursts:
                return self._begin_burst(report)
            self._follow(report)
            return self._since >= self._interval
        if self._left > 0:
            self._left -= 1
            return True
        if len(self._burst) >= self._places or report.in_flight == 0:
            self._end_burst(report)
        return False

    def saved(self, report: SaveReport) -> None:
        """Add the seconds of a durable checkpoint to the measurements."""
        self._age.saved(report)
        self._nbytes = report.nbytes
        if self._left is not None:
            if report.step >= self._burst_step:
                self._burst.append(report)
            return
        if report.step < self._settled_at:
            return
        self._saves.add(report.seconds)
        if self._reference is None and len(self._saves.values) >= _SAVES:
            self._reference = self._saves.median

    @property
    def floor(self) -> int | None:
        """f_min, the fewest steps between checkpoints that this storage allows any method; None if not measured yet."""
        if not self._bandwidth:
            return None
        return interval_floor(self._nbytes, self._bandwidth, self._step_seconds, 1 + self._overhead)

    @property
    def _step_seconds(self) -> float:
        return max(_TINY, median(self._clean or self._busy or [0.0]))

    def _begin_burst(self, report: StepReport) -> bool:
        self._left = self._places - 1
        self._burst = []
        self._burst_step = report.step
        return True

    def _end_burst(self, report: StepReport) -> None:
        self._left = None
        if not self._burst:  # all failed: try again, ever later
            self._profile *= 2
            return
        if self._bursts is None:
            self._bursts = []
            return
        span = max(save.now for save in self._burst) - min(save.now - save.seconds for save in self._burst)
        bandwidth = sum(save.nbytes for save in self._burst) / max(_TINY, span)
        self._bursts.append((median(save.seconds for save in self._burst), bandwidth))
        if len(self._bursts) < _BURSTS:
            return
        self._seconds = min(seconds for seconds, _ in self._bursts)
        self._bandwidth = max(bandwidth for _, bandwidth in self._bursts)
        self._bursts = []
        self._settle(report, "measured with as many in flight")

    def _follow(self, report: StepReport) -> None:
        """Choose the interval anew if checkpoints have become slower, or steps slower or faster."""
        now = self._saves.median
        if len(self._saves.values) > 1 and self._f_star(now) > (self._interval or 0):
            self._seconds = min(now, max(self._seconds, self._step_seconds) * _LEAP)
            # They wait for each other: this is all that the storage does now.
            self._bandwidth = min(self._bandwidth, self._nbytes * self._places / self._seconds)
            self._settle(report, "they take longer now", now)  # if they stop waiting for each other, find out
            return
        wanted = max(self._f_star(self._seconds), self.floor or 1)
        if abs(wanted - (self._interval or 0)) > _DRIFT * (self._interval or 0):
            self._settle(report, "steps take another time now", self._reference)

    def _f_star(self, seconds: float) -> int:
        return sustained_interval(seconds, self._places, self._step_seconds, 1 + self._overhead)

    def _settle(self, report: StepReport, why: str, reference: float | None = None) -> None:
        f_star, floor = self._f_star(self._seconds), self.floor or 1
        self._interval = max(f_star, floor)
        self._reason = (
            f"every {self._interval} steps: f* is {f_star} (a checkpoint takes {self._seconds:.3g} s with "
            f"{self._places} in flight, a step {self._step_seconds:.3g} s), "
            f"f_min {floor} at {self._bandwidth / 1e6:.4g} MB/s; {why}"
        )
        self._saves = Level(window=5)
        self._reference = reference
        self._settled_at = report.step


def _say(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
