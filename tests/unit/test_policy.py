from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccheck_async.engine import Policy, SaveReport, StepReport
from pccheck_async.training.policy import (
    Adaptive,
    CheckFreqInterval,
    EverySeconds,
    EverySteps,
    PCcheckInterval,
    YoungDaly,
    daly_seconds,
    interval_floor,
    make_policy,
    sustained_interval,
)
from pccheck_async.training.policy.measured import AgeLimit
from pccheck_async.training.policy.meter import Level, OverheadMeter
from tests.support.training_simulator import Machine, Simulator, turns


def report(step: int, now: float = 0.0, seconds: float = 1.0, in_flight: int = 0) -> StepReport:
    return StepReport(step, now, seconds, 0.0, in_flight)


# -- what users write


def test_what_users_write_becomes_a_policy() -> None:
    assert isinstance(make_policy(None), Adaptive)
    steps = make_policy(10)
    assert isinstance(steps, EverySteps)
    assert steps.decision().interval == 10
    time = make_policy(timedelta(minutes=2))
    assert isinstance(time, EverySeconds)
    assert (time.decision().interval, time.decision().seconds) == (None, 120.0)
    own = YoungDaly(3600)
    assert make_policy(own) is own


@pytest.mark.parametrize("wrong", [True, False, 1.5, "10", object(), Adaptive, [10]])
def test_what_is_no_interval_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="interval is a number of steps"):
        make_policy(wrong)


@pytest.mark.parametrize("share", [0.03, 0.5])
def test_a_share_of_the_time_is_refused_with_the_policy_that_takes_one(share: float) -> None:
    with pytest.raises(TypeError, match=rf"interval=Adaptive\({share}\) \(from pccheck_async import Adaptive\)$"):
        make_policy(share)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0, -1, timedelta(0), timedelta(seconds=-1)])
def test_an_interval_is_positive(wrong: Any) -> None:
    with pytest.raises(ValueError, match="interval is"):
        make_policy(wrong)


@pytest.mark.parametrize("overhead", [0, -0.1, 1.1, float("nan")])
def test_a_budget_is_a_share(overhead: float) -> None:
    for kind in (Adaptive, PCcheckInterval, CheckFreqInterval):
        with pytest.raises(ValueError, match=r"0\.03 is 3 %"):
            kind(overhead)


def test_other_settings_are_checked_too() -> None:
    with pytest.raises(ValueError, match="max_in_flight is a whole number of at least 1, not 0"):
        Adaptive(max_in_flight=0)
    with pytest.raises(TypeError, match="max_in_flight is a whole number"):
        PCcheckInterval(max_in_flight=True)
    with pytest.raises(ValueError, match="most_seconds is a positive"):
        Adaptive(most_seconds=0)
    with pytest.raises(ValueError, match="mtbf_seconds is a positive"):
        YoungDaly(float("inf"))


# -- fixed intervals


@pytest.mark.slow
@given(st.integers(1, 50), st.integers(0, 200))
def test_a_resumed_run_saves_the_same_steps(interval: int, resumed_at: int) -> None:
    def saved(first: int) -> list[int]:
        policy = EverySteps(interval)
        return [step for step in range(first, 300) if policy.due(report(step))]

    whole = saved(0)
    assert whole == list(range(interval - 1, 300, interval))
    assert saved(resumed_at) == [step for step in whole if step >= resumed_at]


def test_a_skipped_checkpoint_is_made_up_for() -> None:
    policy = EverySteps(4)
    assert [policy.due(report(step)) for step in range(4)] == [False, False, False, True]
    policy.skipped(report(3))
    assert policy.due(report(4))
    policy.skipped(report(4))
    assert policy.due(report(5))
    assert [policy.due(report(step)) for step in (6, 7)] == [False, True]


def test_time_counts_from_the_start_of_the_first_step() -> None:
    policy = EverySeconds(10)
    due = [step for step in range(30) if policy.due(report(step, now=100 + 3.0 * (step + 1), seconds=3.0))]
    assert due == [3, 7, 11, 15, 19, 23, 27]
    policy.skipped(report(27, now=184.0))
    assert policy.due(report(30, now=187.0))
    assert not policy.due(report(31, now=190.0))


# -- the limit by time


def test_the_limit_leaves_the_time_that_a_checkpoint_takes() -> None:
    limit = AgeLimit(100.0)
    assert (limit.apart(10.0), limit.apart(70.0)) == (90.0, 70.0)
    assert not limit.reached(report(0, now=1000.0), 10.0)  # of 1 s
    assert not limit.reached(report(1, now=1088.0), 10.0)
    assert limit.reached(report(2, now=1088.5), 10.0)
    assert not AgeLimit(None).reached(report(2, now=1e9), 10.0)


def test_a_checkpoint_that_failed_keeps_no_limit_and_is_tried_again_soon() -> None:
    limit = AgeLimit(100.0)
    limit.reached(report(0, now=0.0), 0.0)
    limit.begin(report(80, now=80.0))
    assert not limit.reached(report(81, now=81.0, in_flight=1), 0.0)
    tried = [step for step in range(82, 160) if _again(limit, step)]
    assert tried[0] == 99  # counted from the beginning again
    assert all(8 <= later - earlier <= 11 for earlier, later in pairwise(tried))
    limit.saved(SaveReport(tried[-1], now=170.0, seconds=170.0 - tried[-1], capture_seconds=0.0, stall=0.0, nbytes=1))
    assert not limit.reached(report(170, now=250.0), 0.0)


def _again(limit: AgeLimit, step: int) -> bool:
    if not limit.reached(report(step, now=float(step)), 0.0):
        return False
    limit.begin(report(step, now=float(step)))
    return True


# -- levels


def test_a_stray_measurement_moves_nothing() -> None:
    level = Level()
    for value in (1.0, 1.1, 0.9, 50.0, 1.0):
        assert not level.add(value)
    assert level.median == 1.0


def test_a_change_for_good_is_seen_after_two() -> None:
    level = Level()
    assert [level.add(value) for value in (1, 1, 1, 1, 1, 3, 3)] == [False] * 6 + [True]
    assert level.median == 3


def test_a_small_change_is_seen_after_three() -> None:
    level = Level(tolerance=0.1)
    assert [level.add(value) for value in (1, 1, 1, 1.15, 1.15, 1.15)] == [False] * 5 + [True]
    assert level.median == 1.15
    level = Level(tolerance=0.1)
    assert not any(level.add(value, tolerance=0.2) for value in (1, 1, 1, 1.15, 1.15, 1.15))


def test_the_first_is_not_like_the_others() -> None:
    level = Level(odd_first=True)
    level.add(9)
    assert level.median == 9
    level.add(1)
    assert level.median == 1


def test_three_of_four_do_not_exceed_the_upper_quartile() -> None:
    level = Level()
    assert level.upper == level.median == level.deviation == 0
    for value in (1, 2, 3, 4):
        level.add(value, tolerance=100)
    assert level.upper == 3


# -- meter


def period(meter: OverheadMeter, seconds: float, interference: float) -> None:
    for step in range(14):
        busy = step < 10
        meter.step(StepReport(step, 0.0, seconds + interference / 10 * busy, 0.2 * (step == 0), int(busy)))
    meter.close()


def test_a_checkpoint_costs_stall_and_interference() -> None:
    meter = OverheadMeter()
    for interference in (9.0, 0.4, 0.5, 30.0, 0.6):  # the first pays for what is made once; one is a stray
        period(meter, 1.0, interference)
    assert meter.cost().seconds == pytest.approx(0.75)
    assert meter.step_seconds == pytest.approx(1.0)


def test_a_period_in_which_steps_changed_says_nothing_of_the_cost() -> None:
    meter = OverheadMeter()
    for _ in range(4):
        period(meter, 1.0, 0.5)
    known = meter.periods
    period(meter, 0.5, 0.5)
    assert meter.periods == known
    period(meter, 0.5, 0.5)
    assert meter.periods == known + 1
    assert meter.cost().seconds == pytest.approx(0.7)
    period(meter, 0.5, 0.5)
    assert meter.step_seconds == pytest.approx(0.5)


# -- PCcheck


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("places", [1, 2, 4])
@pytest.mark.parametrize("alone_share", [1.0, 0.5, 0.25])
def test_f_star_is_what_n_in_flight_sustain(alone_share: float, places: int, noise: float) -> None:
    machine = Machine(save_seconds=60.0, alone_share=alone_share, noise=noise)
    policy = PCcheckInterval(max_in_flight=places)
    sim = Simulator(policy, machine, places=places)
    sim.run(3000)
    together = 60.0 * max(1.0, places * alone_share)  # Tw(N)
    f_star = sustained_interval(together, places, 1.0)
    k = policy.decision().interval
    assert k is not None
    assert 0.95 * f_star <= k <= 1.1 * f_star + 1
    assert policy.floor is not None
    assert policy.floor >= interval_floor(10**9, 10**9 / 60.0 / alone_share, 1.0) - 1
    assert "f_min" in policy.decision().reason
    # They do not pile up: nobody waits for a place for longer than the tolerated slowdown.
    assert sim.overhead(slice(1500, 3000)) < 0.04


@pytest.mark.parametrize("alone_share", [1.0, 0.5])
def test_f_star_follows_the_storage(alone_share: float) -> None:
    def change(sim: Simulator) -> None:
        sim.machine.save_seconds = 90.0 if 1000 <= sim.step < 2000 else 30.0

    machine = Machine(alone_share=alone_share, noise=0.05, save_noise=0.05)
    sim = Simulator(PCcheckInterval(max_in_flight=2), machine)
    sim.run(4000, change)
    before, during, after = (sim.intervals[step] or 0 for step in (999, 1999, 3999))
    assert during == pytest.approx(3 * before, rel=0.15)
    assert after == pytest.approx(before, rel=0.15)


def test_one_checkpoint_in_flight_cannot_be_faster_than_the_floor() -> None:
    policy = PCcheckInterval(max_in_flight=1)
    Simulator(policy, Machine(save_seconds=10.2), places=1).run(200)
    assert policy.decision().interval == policy.floor == 10


def test_the_floor_holds_where_f_star_is_below_it() -> None:
    # The first of two in a row is alone for a step: Tw(2) is 58.9 s, f* = 29. But the disk saves one in 30 s.
    policy = PCcheckInterval(0.03, max_in_flight=2)
    Simulator(policy, Machine(save_seconds=30.0, capture_seconds=0.1)).run(200)
    assert policy.decision().interval == policy.floor == 30
    assert "f* is 29" in policy.decision().reason


def test_checkpoints_that_fail_are_tried_again_but_ever_later() -> None:
    policy = PCcheckInterval(max_in_flight=2)
    due = [step for step in range(400) if policy.due(report(step, now=float(step)))]
    assert 4 < len(due) < 20
    assert policy.decision().interval is None


# -- Young and Daly, CheckFreq


def test_the_known_rate_of_failures_decides_inside_the_bounds() -> None:
    machine = Machine(save_seconds=10.0, capture_seconds=0.2)
    sim = Simulator(YoungDaly(3600), machine)
    sim.run(1000)
    assert sim.intervals[-1] == pytest.approx(daly_seconds(0.2, 3600), abs=1)
    assert "one failure in 3600 s" in sim.reasons[-1]


def test_failures_every_moment_do_not_break_the_budget() -> None:
    sim = Simulator(YoungDaly(20), Machine(save_seconds=2.0, capture_seconds=0.3))
    sim.run(1000)
    assert sim.intervals[-1] == 10  # 0.3 s are 3 % of 10 steps; Daly asks for 3
    sim = Simulator(YoungDaly(1, 0.5), Machine(save_seconds=30.0, capture_seconds=0.3))
    sim.run(1000)
    assert 29 <= (sim.intervals[-1] or 0) <= 33  # this storage saves one in 30 s


def test_checkfreq_begins_with_algorithm_1_and_goes_on_with_what_it_measures() -> None:
    # Algorithm 1 believes that 0.7 s of copying hide behind a step: k = 10. They do not here: 0.7 s are 5 % of 14.
    policy = CheckFreqInterval(0.05)
    sim = Simulator(policy, Machine(save_seconds=10.0, capture_seconds=0.7), places=1)
    sim.run(500)
    assert policy.choice is not None
    assert (policy.choice.mode, policy.choice.interval) == ("host", 10)
    assert [k for k in dict.fromkeys(sim.intervals) if k] == [10, 14]
    assert sim.overhead(slice(200, 200 + 20 * 14)) <= 0.0501


def test_checkfreq_comes_back_down() -> None:
    def change(sim: Simulator) -> None:
        busy = 500 <= sim.step < 1000
        sim.machine.save_seconds, sim.machine.capture_seconds = (18.2, 0.95) if busy else (10.0, 0.7)

    sim = Simulator(CheckFreqInterval(0.05), Machine(noise=0.02), places=1)
    sim.run(1500, change)
    assert sim.intervals[999] in (18, 19, 20)
    assert 13 <= (sim.intervals[-1] or 0) <= 16
    assert turns(sim.intervals) <= 2


# -- what holds of all


KINDS: dict[str, Callable[[], Policy]] = {
    "adaptive": lambda: Adaptive(most_seconds=None),
    "checkfreq": CheckFreqInterval,
    "pccheck": PCcheckInterval,
    "young": lambda: YoungDaly(1000),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_no_sequence_of_reports_breaks_a_policy(kind: str, data: st.DataObject) -> None:
    """Steps of no time, checkpoints that never end, that fail, that someone else made: an answer comes, and is sane."""
    policy = KINDS[kind]()
    assert isinstance(policy, Policy)
    times = st.sampled_from([0.0, 1e-6, 0.01, 1.0, 600.0])
    now, flying = 0.0, 0
    for step in range(data.draw(st.integers(1, 120))):
        seconds = data.draw(times)
        now += seconds
        in_flight = max(flying, data.draw(st.sampled_from([0, 0, 0, 1])))
        for _ in range(data.draw(st.integers(0, flying))):
            flying -= 1
            if data.draw(st.booleans()):
                policy.saved(SaveReport(step, now, data.draw(times), 0.0, 0.0, data.draw(st.sampled_from([0, 10**12]))))
        asked = StepReport(step, now, seconds, data.draw(times), in_flight)
        if policy.due(asked):
            if data.draw(st.booleans()):
                flying += 1
            else:
                policy.skipped(asked)
        decision = policy.decision()
        assert decision.reason
        assert decision.interval is None or decision.interval >= 1


def test_checkpoints_that_took_no_time_may_take_some_later() -> None:
    policy = PCcheckInterval()
    for step in range(200):
        if policy.due(report(step, now=float(step))):
            policy.saved(SaveReport(step, float(step), 0.0 if step < 100 else 20.0, 0.0, 0.0, 10**9))
    assert (policy.decision().interval or 0) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_place_that_was_not_free_is_asked_for_again(kind: str) -> None:
    policy = KINDS[kind]()
    step = next(step for step in range(100) if policy.due(report(step, now=float(step))))
    for later in range(step + 1, step + 4):
        policy.skipped(report(later - 1))
        assert policy.due(report(later, now=float(later), in_flight=1))
    assert policy.decision().interval is None


def test_seconds_are_over_when_they_have_passed() -> None:
    policy = EverySeconds(10)
    assert [now for now in range(1, 31) if policy.due(report(now, now=float(now)))] == [10, 20, 30]
