"""Histories of runs that share a bucket, with late and lost requests and deaths, over the protocol as it is."""

from __future__ import annotations

import pytest

from tests.support.lying_objects import SCENARIOS, BrokenError, Scenario, played

EACH = 40


def play(scenario: Scenario, seeds: range) -> None:
    for seed in seeds:
        try:
            played(scenario, seed)
        except BrokenError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: "-".join(each.disks))
def test_no_history_loses_anything(scenario: Scenario) -> None:
    play(scenario, range(EACH))


@pytest.mark.campaign
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: "-".join(each.disks))
def test_no_long_history_loses_anything(scenario: Scenario) -> None:
    play(scenario, range(EACH, EACH + 1000))
