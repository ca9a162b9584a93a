from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccheck_async.training.policy.formulas import (
    CheckFreqChoice,
    checkfreq_interval,
    daly_seconds,
    whole_steps,
    young_seconds,
)

seconds = st.floats(1e-6, 1e4)


@pytest.mark.parametrize(
    ("ti", "tw", "tg", "free", "tc", "ts", "p", "expected"),
    [
        # Tc hides behind forward and backward: To = 0, and k is what lets one become durable before the next.
        (1.0, 0.25, None, 0, 0.75, 9.25, 0.05, CheckFreqChoice("host", 10, 0.0)),
        (1.0, 0.25, None, 0, 0.75, 9.5, 0.05, CheckFreqChoice("host", 11, 0.0)),
        # It does not: Toc = 1.5 - (1 - 0.25) = 0.75, and 0.75/(0.05 1) = 15 > (1.5 + 8.5 - 0.75)/1 = 9.25.
        (1.0, 0.25, None, 0, 1.5, 8.5, 0.05, CheckFreqChoice("host", 15, 0.75)),
        # As much by the storage: (1.5 + 14.25 - 0.75)/1 = 15, and a little more.
        (1.0, 0.25, None, 0, 1.5, 14.25, 0.05, CheckFreqChoice("host", 15, 0.75)),
        (1.0, 0.25, None, 0, 1.5, 14.5, 0.05, CheckFreqChoice("host", 16, 0.75)),
        # The device: Tog = 0.25 <= 0.75 and it fits: 0.25/0.05 = 5 < 1.5 + 8.5 - 0.25 = 9.75.
        (1.0, 0.25, 0.25, 101, 1.5, 8.5, 0.05, CheckFreqChoice("device", 10, 0.25)),
        (1.0, 0.25, 0.75, 101, 1.5, 8.5, 0.05, CheckFreqChoice("device", 15, 0.75)),  # Tog = Toc
        (1.0, 0.25, 0.76, 101, 1.5, 8.5, 0.05, CheckFreqChoice("host", 15, 0.75)),  # Tog > Toc
        (1.0, 0.25, 0.25, 100, 1.5, 8.5, 0.05, CheckFreqChoice("host", 15, 0.75)),  # Mmax - M = m is not enough
        (1.0, 0.25, 0.0, 101, 0.5, 1.5, 0.05, CheckFreqChoice("device", 2, 0.0)),  # Tog = Toc = 0
        # Table 5: 0.7 s of 14 steps of 1 s are 5 %.
        (1.0, 0.0, None, 0, 1.7, 8.3, 0.05, CheckFreqChoice("host", 14, 0.7)),
        (100.0, 0.0, None, 0, 1.0, 1.0, 0.05, CheckFreqChoice("host", 1, 0.0)),
    ],
)
def test_algorithm_1(
    ti: float, tw: float, tg: float | None, free: int, tc: float, ts: float, p: float, expected: CheckFreqChoice
) -> None:
    choice = checkfreq_interval(
        step_seconds=ti,
        update_seconds=tw,
        device_copy_seconds=tg,
        device_free_bytes=free,
        nbytes=100,
        host_copy_seconds=tc,
        persist_seconds=ts,
        overhead=p,
    )
    assert (choice.mode, choice.interval) == (expected.mode, expected.interval)
    assert choice.overhead_seconds == pytest.approx(expected.overhead_seconds)


@given(seconds, st.floats(0, 1), seconds, seconds, seconds, st.floats(0.001, 1), st.booleans())
def test_algorithm_1_keeps_both_bounds_and_no_more(
    ti: float, update: float, tg: float, tc: float, ts: float, p: float, fits: bool
) -> None:
    def choose(tc: float, ts: float, p: float) -> CheckFreqChoice:
        return checkfreq_interval(
            step_seconds=ti,
            update_seconds=update * ti,
            device_copy_seconds=tg,
            device_free_bytes=101 if fits else 99,
            nbytes=100,
            host_copy_seconds=tc,
            persist_seconds=ts,
            overhead=p,
        )

    choice = choose(tc, ts, p)
    k, cost = choice.interval, choice.overhead_seconds
    assert cost <= p * k * ti * (1 + 1e-6)
    assert tc + ts - cost <= k * ti * (1 + 1e-6)
    less = (k - 1) * ti * (1 - 1e-6)
    assert k == 1 or cost > p * less or tc + ts - cost > less
    assert fits or choice.mode == "host"
    assert choose(tc, 2 * ts, p).interval >= k
    assert choose(tc, ts, min(1.0, 2 * p)).interval <= k
    if not fits:
        assert choose(2 * tc, ts, p).interval >= k


@pytest.mark.parametrize(
    ("cost", "mtbf", "young", "daly"),
    [
        (0.0, 3600.0, 0.0, 0.0),
        (2.0, 3600.0, 120.0, 120 * (1 + 1 / 180 + 1 / 32400) - 2),  # x = 1/3600
        (8.0, 100.0, 40.0, 40 * (1 + 0.2 / 3 + 0.04 / 9) - 8),  # x = 1/25
        (50.0, 100.0, 100.0, 100 * (1 + 0.5 / 3 + 0.25 / 9) - 50),  # x = 1/4
        (200.0, 100.0, 200.0, 100.0),  # delta = 2 M
        (300.0, 100.0, math.sqrt(60000), 100.0),
    ],
)
def test_young_and_daly(cost: float, mtbf: float, young: float, daly: float) -> None:
    assert young_seconds(cost, mtbf) == pytest.approx(young)
    assert daly_seconds(cost, mtbf) == pytest.approx(daly)


def lost(compute: float, cost: float, mtbf: float) -> float:
    """Expected time per useful second, failures coming at random: M (exp((tau + delta)/M) - 1)/tau (Daly's model)."""
    return mtbf * math.expm1((compute + cost) / mtbf) / compute


@given(st.floats(1e-4, 1.9), st.floats(0.5, 2))
def test_no_other_interval_loses_much_less_than_daly_s(share: float, factor: float) -> None:
    tau = daly_seconds(share, 1.0)
    assert lost(tau, share, 1.0) <= lost(tau * factor, share, 1.0) * 1.02


@given(st.floats(0, 1e4), st.floats(1e-3, 1e7))
def test_the_interval_grows_with_cost_and_with_the_time_between_failures(cost: float, mtbf: float) -> None:
    assert young_seconds(cost, 2 * mtbf) >= young_seconds(cost, mtbf)
    assert young_seconds(2 * cost, mtbf) >= young_seconds(cost, mtbf)
    assert daly_seconds(cost, mtbf) >= 0
    assert daly_seconds(cost, 2 * mtbf) >= daly_seconds(cost, mtbf) * (1 - 1e-9)


def test_a_sum_of_floats_is_not_one_step_more() -> None:
    assert whole_steps(0.1 + 0.2, 0.1) == 3
    assert whole_steps(3.001, 1.0) == 4
    assert whole_steps(0.0, 1.0) == 1


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="overhead is a share"):
        checkfreq_interval(step_seconds=1, host_copy_seconds=1, persist_seconds=1, overhead=0)
    with pytest.raises(ValueError, match="step_seconds is positive"):
        checkfreq_interval(step_seconds=0, host_copy_seconds=1, persist_seconds=1, overhead=0.1)
    with pytest.raises(ValueError, match="mtbf_seconds is positive"):
        daly_seconds(1, 0)
    with pytest.raises(ValueError, match="cost_seconds is not negative"):
        young_seconds(-1, 1)
