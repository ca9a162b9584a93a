"""The real protocol of many members, on a virtual clock: a decision is cheap and soon."""

from __future__ import annotations

import pytest

from tests.support.group_scale import measure


@pytest.mark.parametrize(
    ("world", "seconds"),
    [
        (8, 0.010),
        (64, 0.5),
        *(pytest.param(2**power, 0.5, marks=pytest.mark.campaign) for power in range(7, 10)),
        pytest.param(1000, 0.5, marks=pytest.mark.campaign),
        *(pytest.param(2**power, 2.5, marks=pytest.mark.campaign) for power in range(11, 13)),
    ],
)
def test_a_decision_is_cheap_and_soon(world: int, seconds: float) -> None:
    timing = measure(world)
    assert timing.operations <= 6 * world + 5  # rank 0 also tells of the admission, and publishes
    assert timing.learnt <= seconds
