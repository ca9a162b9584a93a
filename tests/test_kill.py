"""SIGKILL at random moments: every restart finds the last acknowledged checkpoint or a newer one, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kill_harness import PHASES, Campaign


@pytest.mark.slow
def test_killed_in_every_phase(tmp_path: Path, io: str) -> None:
    outcome = Campaign(tmp_path, io=io, elements=50_000, seed=1).run(2 * len(PHASES))
    assert set(outcome.kills) == set(PHASES)
    assert outcome.acknowledged >= 0


@pytest.mark.campaign
def test_two_hundred_kills(tmp_path: Path, io: str) -> None:
    outcome = Campaign(tmp_path, io=io, elements=500_000, seed=2).run(210)
    print(f"\n{io}: kills by phase {dict(outcome.kills)}, {outcome.restarts} restarts, last {outcome.acknowledged}")
    assert min(outcome.kills.values()) >= 30
