from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pccheck_async import CheckpointError
from pccheck_async.errors import InfeasibleError
from pccheck_async.training.policy import interval_floor, sustained_interval
from pccheck_async.tuning import Point
from pccheck_async.tuning.choice import Limits, choose, fit_rounds, shortages, staging_bytes

MIB = 1 << 20
PLENTY = Limits(storage_bytes=1 << 50, host_memory=1 << 40, cores=64, stream_cpu=0.1)


@st.composite
def tables(draw: st.DrawFn) -> dict[Point, float]:
    """Part of the times on a device with a bandwidth in all, per checkpoint in flight and per writer, disturbed."""
    total, per_checkpoint, per_writer = (draw(st.floats(1, 100)) for _ in range(3))
    overhead = draw(st.floats(0, 2))
    disturbed = draw(st.sampled_from([0.0, 0.05, 0.5]))
    random = draw(st.randoms(use_true_random=False))
    table = {}
    for n in (1, 2, 3, 4, 8):
        for p in (1, 2, 4, 8):
            for b in (1, 4, 16):
                rate = min(total, per_checkpoint * n, per_writer * p) * b / (b + overhead)
                table[Point(n, p, b * MIB)] = n / rate * (1 + disturbed * random.random())
    kept = draw(st.sets(st.sampled_from(sorted(table)), min_size=1))
    return {point: table[point] for point in kept}


limits_of_any_kind = st.builds(
    Limits,
    storage_bytes=st.integers(0, 12_000 * MIB),
    host_memory=st.integers(0, 64 * MIB),
    cores=st.integers(1, 8),
    keep_last=st.integers(1, 3),
    stream_cpu=st.floats(0, 1),
)


def allowed(point: Point, limits: Limits, nbytes: int) -> bool:
    return (
        (point.max_in_flight + limits.keep_last) * nbytes <= limits.storage_bytes
        and 2 * point.chunk_bytes <= limits.host_memory
        and point.writers * limits.stream_cpu <= limits.cores
    )


def by_brute_force(table: Mapping[Point, float], limits: Limits, nbytes: int, noise: float) -> Point | None:
    """Definition of the choice, one number after the other."""
    left = [point for point in table if allowed(point, limits, nbytes)]
    if not left:
        return None
    best = min(table[point] / point.max_in_flight for point in left)
    left = [point for point in left if table[point] / point.max_in_flight <= best * (1 + noise)]
    n = min(point.max_in_flight for point in left)
    left = [point for point in left if point.max_in_flight == n]
    p = min(point.writers for point in left)
    left = [point for point in left if point.writers == p]
    return Point(n, p, min(point.chunk_bytes for point in left))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(tables(), limits_of_any_kind, st.integers(0, 3000 * MIB), st.sampled_from([0.0, 0.03, 0.1, 0.5]))
def test_the_choice_is_the_brute_force_optimum(
    table: dict[Point, float], limits: Limits, nbytes: int, noise: float
) -> None:
    expected = by_brute_force(table, limits, nbytes, noise)
    if expected is None:
        with pytest.raises(InfeasibleError) as infeasible:
            choose(table, limits, nbytes, noise)
        named = infeasible.value.constraints
        assert named
        # Each of them binds the least point, and one that no point meets is not left out.
        lacks = {point: set(shortages(point, limits, nbytes)) for point in table}
        assert set(named) <= lacks[min(table)]
        assert set.intersection(*lacks.values()) <= set(named)
        return
    choice = choose(table, limits, nbytes, noise)
    assert choice.point == expected
    assert choice.seconds == table[expected]
    assert 2 * expected.chunk_bytes <= choice.host_memory <= limits.host_memory
    assert choice.host_memory % expected.chunk_bytes == 0
    assert choice.reasons.keys() == {"max_in_flight", "writers", "chunk_bytes", "host_memory"}


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(tables(), limits_of_any_kind, st.integers(0, 3000 * MIB))
def test_shortages_are_the_constraints(table: dict[Point, float], limits: Limits, nbytes: int) -> None:
    for point in table:
        assert (not shortages(point, limits, nbytes)) == allowed(point, limits, nbytes)


@pytest.mark.parametrize(
    ("point", "limits", "nbytes", "constraint", "said"),
    [
        (
            Point(1, 1, MIB),
            Limits(storage_bytes=150, host_memory=1 << 30, cores=2),
            100,
            "storage",
            "2 slots (1 in flight, 1 kept) of 100 bytes need 200 bytes, 150 are free for them; free space",
        ),
        (
            Point(2, 1, MIB),
            Limits(storage_bytes=499, host_memory=1 << 30, cores=2, keep_last=3),
            100,
            "storage",
            "5 slots (2 in flight, 3 kept) of 100 bytes need 500 bytes, 499 are free for them; "
            "free space or lower keep_last",
        ),
        (
            Point(1, 1, 4096),
            Limits(storage_bytes=1 << 40, host_memory=8191, cores=2),
            100,
            "memory",
            "2 chunks of 4096 bytes need 8192 bytes of staging memory, the budget is 8191; raise host_memory",
        ),
        (
            Point(1, 4, 4096),
            Limits(storage_bytes=1 << 40, host_memory=1 << 30, cores=2),
            100,
            "cpu",
            "4 writers at 1.00 cores each need 4.00 cores, this process may use 2",
        ),
        (
            Point(1, 1, 4096),
            Limits(storage_bytes=1 << 40, host_memory=1 << 30, cores=2, keep_last=65),
            100,
            "record",
            "a commit record names at most 64 checkpoints, not 65; lower keep_last",
        ),
    ],
)
def test_what_binds_is_named_with_numbers(
    point: Point, limits: Limits, nbytes: int, constraint: str, said: str
) -> None:
    with pytest.raises(InfeasibleError, match="no setting fits") as infeasible:
        choose({point: 1.0}, limits, nbytes, 0.1)
    assert infeasible.value.constraints == (constraint,)
    assert f"{constraint}: {said}" in str(infeasible.value)
    assert isinstance(infeasible.value, CheckpointError)
    assert isinstance(infeasible.value, ValueError)


def test_only_what_no_point_meets_is_named() -> None:
    limits = Limits(storage_bytes=100, host_memory=2 * MIB, cores=1)
    table = {Point(1, 1, 4 * MIB): 1.0, Point(1, 1, MIB): 1.0}
    with pytest.raises(InfeasibleError) as infeasible:
        choose(table, limits, 100, 0.1)
    assert infeasible.value.constraints == ("storage",)


def test_each_constraint_can_be_met_but_not_all_at_once() -> None:
    limits = Limits(storage_bytes=200, host_memory=2 * MIB, cores=1)
    table = {Point(1, 2, MIB): 1.0, Point(2, 1, MIB): 1.0}
    with pytest.raises(InfeasibleError) as infeasible:
        choose(table, limits, 100, 0.1)
    assert infeasible.value.constraints == ("cpu",)


def test_one_is_enough_where_the_device_is_saturated() -> None:
    table = {Point(n, p, b): 1.0 * n for n in (1, 2, 4) for p in (1, 2, 4) for b in (MIB, 8 * MIB)}
    choice = choose(table, PLENTY, 100, 0.03)
    assert choice.point == Point(1, 1, MIB)
    assert choice.reasons["max_in_flight"] == "the least measured that is within 3% of the best"


def test_the_reasons_say_what_less_would_cost() -> None:
    table = {Point(1, 1, MIB): 1.5, Point(2, 1, MIB): 2.4, Point(2, 2, MIB): 2.0, Point(4, 2, MIB): 4.0}
    choice = choose(table, PLENTY, 100, 0.03)
    assert choice.point == Point(2, 2, MIB)
    assert choice.reasons["max_in_flight"].endswith("; less takes 50% longer")
    assert choice.reasons["writers"].endswith("; less takes 20% longer")
    assert choice.reasons["chunk_bytes"] == "the least measured that is within 3% of the best"


def test_writers_that_wait_need_less_than_a_core() -> None:
    table = {Point(1, 1, MIB): 2.0, Point(1, 8, MIB): 1.0}
    assert choose(table, Limits(storage_bytes=1 << 40, host_memory=1 << 30, cores=2), 100, 0.0).point.writers == 1
    waiting = Limits(storage_bytes=1 << 40, host_memory=1 << 30, cores=2, stream_cpu=0.25)
    assert choose(table, waiting, 100, 0.0).point.writers == 8


def test_nothing_to_choose_from() -> None:
    with pytest.raises(ValueError, match="nothing to choose from"):
        choose({}, PLENTY, 100, 0.1)


@pytest.mark.parametrize(
    ("nbytes", "in_flight", "budget", "expected", "said"),
    [
        (100, 1, 1000, 100, "a whole state"),
        (101, 1, 1000, 110, "a whole state"),
        (100, 2, 1000, 150, "a whole state"),
        (100, 4, 1000, 250, "a whole state"),
        (100, 4, 129, 120, "a whole state fits"),
        (100, 1, 99, 90, "does not fit"),
        (5, 1, 1000, 20, "a whole state"),
        (1000, 1, 20, 20, "does not fit"),
    ],
)
def test_staging_memory(nbytes: int, in_flight: int, budget: int, expected: int, said: str) -> None:
    point = Point(in_flight, 1, 10)
    assert staging_bytes(nbytes, point, budget) == expected
    limits = Limits(storage_bytes=1 << 40, host_memory=budget, cores=2)
    assert said in choose({point: 1.0}, limits, nbytes, 0.1).reasons["host_memory"]


@pytest.mark.parametrize(
    ("nbytes", "bandwidth", "step_seconds", "slowdown", "steps"),
    [
        (1000, 100.0, 1.0, 1.0, 10),
        (1001, 100.0, 1.0, 1.0, 11),
        (1000, 100.0, 1.0, 1.03, 10),
        (1000, 100.0, 1.0, 2.0, 5),
        (1000, 1e9, 1.0, 1.03, 1),
        (0, 1e9, 1.0, 1.03, 1),
    ],
)
def test_floor_of_the_interval(nbytes: int, bandwidth: float, step_seconds: float, slowdown: float, steps: int) -> None:
    assert interval_floor(nbytes, bandwidth, step_seconds, slowdown) == steps


@given(st.floats(1e-4, 1e4), st.integers(1, 16), st.floats(1e-4, 1e3), st.floats(1.001, 2))
@example(10.0, 2, 1.0, 1.03)
def test_the_sustained_interval_is_the_least_that_does_not_pile_up(
    seconds: float, in_flight: int, step_seconds: float, slowdown: float
) -> None:
    f = sustained_interval(seconds, in_flight, step_seconds, slowdown)
    assert f * in_flight * step_seconds * slowdown >= seconds * (1 - 1e-9)
    assert f == 1 or (f - 1) * in_flight * step_seconds * slowdown < seconds * (1 + 1e-9)


@pytest.mark.parametrize(("step_seconds", "slowdown"), [(0.0, 1.03), (-1.0, 1.03), (math.nan, 1.03), (1.0, 0.0)])
def test_no_interval_without_a_step(step_seconds: float, slowdown: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        sustained_interval(1.0, 1, step_seconds, slowdown)
    with pytest.raises(ValueError, match="positive"):
        interval_floor(1, 1.0, step_seconds, slowdown)


# -- drift

ONE, TWO, THREE, FOUR = (Point(n, 1, MIB) for n in (1, 2, 3, 4))
TRUE = {ONE: 1.0, TWO: 1.9, THREE: 3.3, FOUR: 4.0}
LINES = [(ONE, TWO)] * 3 + [(TWO, THREE, FOUR)] * 4
"""Rounds of two lines that have one point in common."""


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.2, 5), min_size=len(LINES), max_size=len(LINES)))
def test_the_drift_of_the_machine_does_not_decide(drift: list[float]) -> None:
    rounds = [{point: TRUE[point] * speed for point in line} for line, speed in zip(LINES, drift, strict=True)]
    fitted = fit_rounds(rounds)
    for point, seconds in fitted.seconds.items():
        assert seconds / fitted.seconds[ONE] == pytest.approx(TRUE[point] / TRUE[ONE], rel=1e-3)
    assert fitted.noise == 0.03
    assert min(drift) * 0.99 <= fitted.seconds[ONE] <= max(drift) * 1.01


def test_stray_measurements_hardly_move_the_rest() -> None:
    rounds = [{point: TRUE[point] for point in line} for line in LINES]
    rounds[1][TWO] *= 20
    rounds[5][FOUR] *= 20
    fitted = fit_rounds(rounds)
    for point, seconds in fitted.seconds.items():
        assert seconds == pytest.approx(TRUE[point], rel=0.01)


def test_noise_is_what_two_points_differ_by_without_reason() -> None:
    random = np.random.default_rng(0)
    for sigma in (0.05, 0.2):
        wrong, noises = [], []
        for _ in range(30):
            rounds = [{p: TRUE[p] * math.exp(random.normal(0, sigma)) for p in (ONE, TWO)} for _ in range(6)]
            fitted = fit_rounds(rounds)
            wrong.append(abs(math.log(fitted.seconds[TWO] / fitted.seconds[ONE] / TRUE[TWO])))
            noises.append(fitted.noise)
        assert np.median(wrong) < np.median(noises) < 4 * np.median(wrong)


def test_nothing_is_known_of_the_noise_where_nothing_was_measured_twice() -> None:
    assert fit_rounds([{ONE: 1.0, TWO: 2.0}]).noise == math.inf
