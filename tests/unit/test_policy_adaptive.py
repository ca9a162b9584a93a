from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from statistics import mean, median
from typing import Any

import pytest

from pccheck_async.engine import StepReport
from pccheck_async.training.policy import (
    Adaptive,
    CheckFreqInterval,
    PCcheckInterval,
    YoungDaly,
)
from tests.support.training_simulator import Machine, Simulator, turns

Change = Callable[[Machine], None]

BEGIN, END, LAST = 1500, 3000, 4500
SEEDS = range(20)


def table_5(machine: Machine) -> None:
    machine.save_seconds, machine.capture_seconds = 18.2, 0.95


def slower_disk(machine: Machine) -> None:
    machine.save_seconds *= 3
    machine.interference *= 3


def dearer_capture(machine: Machine) -> None:
    machine.capture_seconds *= 4


def slower_steps(machine: Machine) -> None:
    machine.step_seconds *= 1.3


def disturbed(policy: Adaptive, machine: Machine, change: Change, places: int, seed: int = 0) -> Simulator:
    """Simulate training that is disturbed from step BEGIN to step END."""

    def act(sim: Simulator) -> None:
        if sim.step == BEGIN:
            sim.machine = Machine(**vars(machine))
            change(sim.machine)
        if sim.step == END:
            sim.machine = machine

    sim = Simulator(policy, machine, seed=seed, places=places)
    sim.run(LAST, act)
    return sim


def overheads(sim: Simulator, first: int, last: int, step_seconds: float = 1.0) -> list[float]:
    """Of the periods that begin in a range of steps."""
    periods = [(a, b) for a, b in pairwise(sim.saves) if first <= a and b < last]
    return [sum(sim.costs[a + 1 : b + 1]) / ((b - a) * step_seconds) for a, b in periods]


MACHINES: dict[str, tuple[Machine, float, int]] = {
    "table 5": (Machine(save_seconds=10.0, capture_seconds=0.7), 0.05, 1),
    "interference": (Machine(save_seconds=10.0, capture_seconds=0.1, interference=0.4), 0.03, 2),
    "capped streams": (Machine(save_seconds=30.0, alone_share=0.5, capture_seconds=0.1, interference=0.4), 0.03, 2),
    "saturated": (Machine(save_seconds=30.0, capture_seconds=0.05, interference=0.1), 0.03, 2),
}


def machine_of(name: str, noise: float = 0.0) -> tuple[Machine, float, int]:
    machine, budget, places = MACHINES[name]
    return Machine(**{**vars(machine), "noise": noise}), budget, places


# -- the profile


@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_what_it_measures_is_what_there_is(scale: float, noise: float) -> None:
    machine = Machine(scale, 10.0 * scale, 1.0, 0.3 * scale, 0.5 * scale, noise, 0.05)
    policy = Adaptive(max_in_flight=2, most_seconds=None)
    Simulator(policy, machine).run(2000)
    measured = policy.measured()
    assert measured.step_seconds == pytest.approx(scale, rel=0.02)
    assert measured.save_seconds == pytest.approx(10.0 * scale, rel=0.15)
    assert measured.cost_seconds == pytest.approx(0.8 * scale, rel=0.15)
    assert measured.overhead == pytest.approx(0.03, rel=0.15)


@pytest.mark.slow
def test_what_it_measures_is_right_on_average_beside_a_lot_of_noise() -> None:
    costs, times = [], []
    for seed in SEEDS:
        policy = Adaptive(max_in_flight=2)
        Simulator(policy, Machine(1.0, 10.0, 1.0, 0.3, 0.5, 0.1, 0.1), seed=seed).run(2000)
        costs.append(policy.measured().cost_seconds)
        times.append(policy.measured().step_seconds)
    assert mean(times) == pytest.approx(1.0, rel=0.01)
    assert median(costs) == pytest.approx(0.8, rel=0.15)


def test_slow_steps_of_their_own_accord_are_no_interference() -> None:
    """Every tenth step takes twice as long: means are compared with means."""

    def log(sim: Simulator) -> None:
        sim.machine.step_seconds = 2.0 if sim.step % 10 == 9 else 1.0

    policy = Adaptive(max_in_flight=2)
    Simulator(policy, Machine(save_seconds=10.0, capture_seconds=0.5)).run(3000, log)
    assert policy.measured().step_seconds == pytest.approx(1.1, rel=0.05)
    assert policy.measured().cost_seconds == pytest.approx(0.5, rel=0.3)


def test_hiccups_move_nothing() -> None:
    def hiccup(sim: Simulator) -> None:
        sim.machine.step_seconds = 30.0 if sim.step % 97 == 50 else 1.0

    sim = Simulator(Adaptive(max_in_flight=2), Machine(save_seconds=5.0, capture_seconds=0.3))
    sim.run(3000, hiccup)
    assert set(sim.intervals[1000:]) <= set(range(8, 13))


def test_the_first_checkpoint_pays_for_what_is_made_once() -> None:
    def once(sim: Simulator) -> None:
        first = len(sim.saves) < 1
        sim.machine.save_seconds, sim.machine.capture_seconds = (60.0, 20.0) if first else (6.0, 0.3)

    sim = Simulator(Adaptive(max_in_flight=2), Machine())
    sim.run(500, once)
    assert [k for k in dict.fromkeys(sim.intervals) if k] == [10]


# -- the budget


@pytest.mark.parametrize("name", MACHINES)
def test_the_interval_is_the_least_that_keeps_the_budget(name: str) -> None:
    machine, budget, places = machine_of(name)
    sim = Simulator(Adaptive(budget, max_in_flight=places), machine, places=places)
    sim.run(2000)
    cost = machine.capture_seconds + machine.interference
    sustained = machine.save_seconds / places * max(1.0, places * machine.alone_share)
    least = max(cost / budget, sustained / places if name == "table 5" else min(sustained, machine.save_seconds))
    assert 0.95 * least <= (sim.intervals[-1] or 0) <= 1.18 * least + 1  # hysteresis
    assert mean(overheads(sim, 1000, 2000)) <= budget * 1.001
    assert turns(sim.intervals) <= 2


def test_table_5_of_checkfreq() -> None:
    """k = 14 costs 5 %; beside another job it would cost 35 %, and k = 19 costs 5 % again."""
    machine, budget, places = machine_of("table 5")
    sim = disturbed(Adaptive(budget, max_in_flight=places), machine, table_5, places)
    assert [k for k in dict.fromkeys(sim.intervals) if k] == [14, 19]
    assert (sim.intervals[BEGIN - 1], sim.intervals[END - 1], sim.intervals[-1]) == (14, 19, 14)
    alone, beside = overheads(sim, 500, BEGIN), overheads(sim, BEGIN, END)
    assert alone == pytest.approx([0.05] * len(alone))
    assert max(beside) >= 0.29
    assert all(overhead <= 0.0501 for overhead in beside[5:])
    assert turns(sim.intervals) == 1
    assert any(reason.startswith("up from 14 to 19 steps: a checkpoint takes 18.2 s") for reason in sim.reasons)
    assert sim.reasons[-1].startswith("down from 19 to 14 steps: a checkpoint costs 700 ms")
    fixed = Simulator(Adaptive(0.05), machine_of("table 5")[0], places=1)
    table_5(fixed.machine)
    fixed.policy = EveryFourteen()
    fixed.run(1400)
    assert fixed.overhead(slice(280, 1400)) == pytest.approx(0.35, rel=0.15)


class EveryFourteen(Adaptive):
    def due(self, report: StepReport) -> bool:
        return (report.step + 1) % 14 == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("table 5", table_5),
        ("table 5", dearer_capture),
        ("interference", slower_disk),
        ("interference", dearer_capture),
        ("capped streams", dearer_capture),
        ("saturated", slower_disk),
    ],
)
@pytest.mark.parametrize(
    ("noise", "seeds"), [(0.0, 1), (0.02, 5), pytest.param(0.02, len(SEEDS), marks=pytest.mark.campaign)]
)
def test_it_is_back_in_the_budget_within_five_intervals_and_back_down_after(
    name: str, change: Change, noise: float, seeds: int
) -> None:
    for seed in range(seeds):
        machine, budget, places = machine_of(name, noise)
        sim = disturbed(Adaptive(budget, max_in_flight=places), machine, change, places, seed)
        before, after = sim.intervals[BEGIN - 1] or 0, sim.intervals[-1] or 0
        beside = overheads(sim, BEGIN, END)
        tolerated = budget * (1.001 if noise == 0 else 1.1)
        assert mean(beside[5:]) <= tolerated, seed
        assert after <= 1.2 * before + 1, seed
        assert turns(sim.intervals) <= 4, seed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("table 5", table_5),
        *(pytest.param(name, dearer_capture, marks=pytest.mark.campaign) for name in ("table 5", "interference")),
    ],
)
def test_noise_of_a_tenth_does_not_hide_a_disturbance(name: str, change: Change) -> None:
    moves, inside = [], []
    for seed in SEEDS:
        machine, budget, places = machine_of(name, 0.1)
        sim = disturbed(Adaptive(budget, max_in_flight=places), machine, change, places, seed)
        inside.append(mean(overheads(sim, BEGIN, END)[5:]) / budget)
        moves.append(turns(sim.intervals))
        assert (sim.intervals[-1] or 0) <= 0.85 * max(k or 0 for k in sim.intervals[BEGIN:END]) + 4
    assert max(inside) < 1.25
    assert mean(inside) < 1.1
    assert mean(moves) <= 4  # one is there without noise


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "noise"),
    [
        *((name, 0.1) for name in ("table 5", "saturated")),
        *(pytest.param(name, noise, marks=pytest.mark.campaign) for name in MACHINES for noise in (0.02, 0.1)),
    ],
)
def test_noise_alone_does_not_make_it_oscillate(name: str, noise: float) -> None:
    moves, inside = [], []
    for seed in SEEDS:
        machine, budget, places = machine_of(name, noise)
        sim = Simulator(Adaptive(budget, max_in_flight=places), machine, seed=seed, places=places)
        sim.run(3000)
        moves.append(turns(sim.intervals))
        inside.append(sim.overhead(slice(1500, 3000)) / budget)
    assert mean(moves) <= 2  # in 80 to 190 intervals
    assert max(moves) <= 6
    assert mean(inside) <= 1.0
    assert max(inside) <= 1.25


def test_slower_steps_are_not_taken_for_interference() -> None:
    machine, budget, places = machine_of("interference")
    sim = disturbed(Adaptive(budget, max_in_flight=places), machine, slower_steps, places)
    # The cost is the same, steps take longer: the interval shrinks to ceil(17 / 1.3).
    assert [k for k in dict.fromkeys(sim.intervals) if k] == [17, 13]
    assert sim.intervals[END - 1] == 13
    assert sim.intervals[-1] == 17


def test_now_and_then_an_interval_is_left_out_where_all_steps_are_busy() -> None:
    machine = Machine(save_seconds=1.9, alone_share=0.5, capture_seconds=0.01)
    sim = Simulator(Adaptive(max_in_flight=2), machine)
    sim.run(1000)
    gaps = [b - a for a, b in pairwise(sim.saves)][3:]
    assert sim.intervals[-1] == 1
    assert 3 <= max(gaps) <= 8
    assert 1 / 15 < sum(gap > 1 for gap in gaps) / len(gaps) < 1 / 8


# -- outliers


def a_slow_step(sim: Simulator, at: int) -> None:
    sim.machine.step_seconds = 20.0 if sim.step == at else 0.01


def a_long_stall(sim: Simulator, at: int) -> None:
    sim.stall(20.0 * (sim.step == at))


def a_hiccup_of_the_disk(sim: Simulator, at: int) -> None:
    if sim.step == at:
        sim.hold_up_saves(2.0)


def slow_first_steps(sim: Simulator, at: int) -> None:
    sim.machine.step_seconds = 2.0 if sim.step < at % 8 else 0.01


@pytest.mark.slow
@pytest.mark.parametrize("outlier", [a_slow_step, a_long_stall, a_hiccup_of_the_disk, slow_first_steps])
@pytest.mark.parametrize("save", [0.04, 0.5])
@pytest.mark.parametrize("kind", [Adaptive, PCcheckInterval])
def test_a_single_outlier_prices_no_checkpoint(
    kind: type[Adaptive | PCcheckInterval], save: float, outlier: Callable[[Simulator, int], None]
) -> None:
    def run(change: Callable[[Simulator], None] | None) -> list[int]:
        sim = Simulator(kind(max_in_flight=2), Machine(0.01, save, 1.0, 0.0005, 0.0005, 0.02, 0.05))
        sim.run(1500, change)
        return [k for k in sim.intervals if k is not None]

    usual = run(None)[-1]
    for at in range(3, 400, 133):
        intervals = run(lambda sim, at=at: outlier(sim, at))  # type: ignore[misc]
        # Two checkpoints in flight that meet the same hiccup may look like another disk for a while.
        assert max(intervals) <= (16 if outlier is a_hiccup_of_the_disk else 2) * usual + 4, at
        assert intervals[-1] <= 2 * usual + 4, at


@pytest.mark.parametrize("make", [Adaptive, PCcheckInterval, CheckFreqInterval, lambda **more: YoungDaly(1e9, **more)])
def test_whatever_is_measured_the_newest_durable_checkpoint_is_no_older_than_the_limit(make: Any) -> None:
    """Steps, stalls and saves that are off again and again, and a cost that would make checkpoints an hour apart."""
    rng = random.Random(1)
    places = {} if make is CheckFreqInterval else {"max_in_flight": 2}
    machine = Machine(1.0, 5.0, capture_seconds=1.0, interference=90.0, noise=0.1)
    sim = Simulator(make(most_seconds=120.0, **places), machine)
    longest = 0.0

    def disturb(sim: Simulator) -> None:
        nonlocal longest
        step, stall = rng.choice([1.0] * 60 + [8.0]), rng.choice([0.0] * 80 + [6.0])
        sim.machine.step_seconds = step
        sim.stall(stall)
        longest = max(longest, sim.now - sim.durable_since)

    sim.run(3000, disturb)
    assert longest <= 120.0 + 8.8 + 6.0 + 18.0 * 5  # by a step, a stall, and what slows those down that are written
    assert sim.policy.decision().most_seconds == 120.0
    assert "no more than" in sim.policy.decision().reason or make is PCcheckInterval


# -- limits


@pytest.mark.parametrize(("most", "longest"), [(30.0, 22), (12.0, 4)])
def test_the_newest_durable_checkpoint_is_never_older_than_most_seconds(most: float, longest: int) -> None:
    # 3 s of each are the stall, and a checkpoint is durable 5 s after the one that makes it the newest but one began.
    policy = Adaptive(max_in_flight=2, most_seconds=most)
    sim = Simulator(policy, Machine(save_seconds=5.0, capture_seconds=3.0))
    sim.run(300)
    assert max(b - a for a, b in pairwise(sim.saves)) == longest
    assert sim.saves[0] < most
    assert "no more than" in sim.reasons[-1]
    assert policy.decision().most_seconds == most


@pytest.mark.slow
def test_steps_of_microseconds_and_of_minutes() -> None:
    machine = Machine(step_seconds=2e-5, save_seconds=0.05, capture_seconds=1e-4, interference=1e-3)
    sim = Simulator(Adaptive(max_in_flight=2), machine)
    sim.run(30_000)
    assert sim.intervals[-1] == pytest.approx(0.05 / 2e-5, rel=0.1)  # what the storage sustains
    sim = Simulator(Adaptive(max_in_flight=2), Machine(600.0, 20.0, 1.0, 0.5, 2.0))
    sim.run(100)
    assert sim.intervals[-1] == 1
    assert sim.saves[0] == 0  # one more step would be too many for ten minutes


def test_a_clock_that_stands_still_divides_nothing_by_zero() -> None:
    policy = Adaptive()
    for step in range(200):
        if policy.due(StepReport(step, 0.0, 0.0, 0.0, 0)):
            assert policy.decision().interval is None or policy.decision().interval >= 1  # type: ignore[operator]


@pytest.mark.parametrize("places", [1, 2])
def test_places_that_are_not_free_are_asked_for_again(places: int) -> None:
    machine = Machine(save_seconds=20.0, capture_seconds=0.1)
    sim = Simulator(Adaptive(max_in_flight=places), machine, places=places, skips=True)
    sim.run(2000)
    assert sim.intervals[-1] in (20, 21)  # one at a time saturates this disk
    assert len(sim.saves) > 80


def test_checkpoints_of_others_do_not_keep_it_from_beginning() -> None:
    """A user who checkpoints all the time leaves no clean steps; the stalls are seen all the same."""
    policy = Adaptive(max_in_flight=2)
    due = [step for step in range(1000) if policy.due(StepReport(step, float(step), 1.0, 0.0, 1))]
    assert due[0] == 6
    assert policy.measured().cost_seconds == 0.0
    assert policy.measured().step_seconds == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "seeds"),
    [
        (0.0, 1),
        pytest.param(0.1, 1, marks=pytest.mark.slow),
        *(pytest.param(noise, 6, marks=pytest.mark.campaign) for noise in (0.02, 0.1)),
    ],
)
@pytest.mark.parametrize("factor", [1.5, 6.5])
@pytest.mark.parametrize(("save", "cost"), [(0.015, 0.003), (0.4, 0.02)])
def test_steps_that_become_slower_are_not_taken_for_the_cost_of_checkpoints(
    noise: float, seeds: int, factor: float, save: float, cost: float
) -> None:
    """A job beside takes the cores: with a checkpoint in flight at every step there is nothing near to compare with."""

    def slower(machine: Machine) -> None:
        machine.step_seconds *= factor

    for seed in range(seeds):
        machine = Machine(0.2, save, capture_seconds=cost, noise=noise, save_noise=noise)
        policy = Adaptive(max_in_flight=2)
        sim = disturbed(policy, machine, slower, places=2, seed=seed)
        usual = sim.intervals[BEGIN - 1] or 0
        gaps = [b - a for a, b in pairwise(sim.saves) if a > 100]
        assert max(gaps) <= 4 * usual + 40, (seed, usual)
        for step in (BEGIN + 200, END - 1, END + 200, LAST - 1):
            assert (sim.intervals[step] or 0) <= 4 * usual + 4, (seed, usual, step)
