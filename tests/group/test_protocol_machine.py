"""The group commit beyond what can be enumerated: up to 8 ranks, more checkpoints and runs, late messages."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.group_explorer import Explorer, Scenario

RUNS = 4
MOST_NODES = 4


class GroupMachine(RuleBasedStateMachine):
    """One training job and its restarts; ranks act in any order."""

    @initialize(
        widest=st.integers(2, 8), nodes=st.integers(1, MOST_NODES), keep=st.integers(1, 3), in_flight=st.integers(1, 3),
        programs=st.lists(st.text("ssspr", min_size=1, max_size=6), min_size=RUNS, max_size=RUNS), power=st.booleans(),
        ends=st.sampled_from(["", "q", "x"]), trouble=st.sampled_from([(0, 0), (2, 0), (0, 1)]),
    )  # fmt: skip
    def begin(
        self, widest: int, nodes: int, keep: int, in_flight: int, programs: list[str], power: bool, ends: str,
        trouble: tuple[int, int],
    ) -> None:  # fmt: skip
        scenario = Scenario(
            "drawn", tuple("s" + program + ends for program in programs), nodes=nodes, worlds=(widest,), keep=keep,
            max_in_flight=in_flight, pins=RUNS, power=power, fails=trouble[0], latches=trouble[1], force=True,
            slow=True,
        )  # fmt: skip
        self.explorer = Explorer(scenario)
        self.state = self.explorer.first()
        self.notes: list[str] = []
        self.history: list[str] = []

    def runs_left(self) -> bool:
        return self.state.era < RUNS

    @precondition(runs_left)
    @rule(
        world=st.integers(1, 8), places=st.lists(st.integers(0, MOST_NODES - 1), min_size=8, max_size=8),
        lost=st.lists(st.booleans(), min_size=8 * MOST_NODES, max_size=8 * MOST_NODES),
    )  # fmt: skip
    def restart(self, world: int, places: list[int], lost: list[bool]) -> None:
        scenario = self.explorer.scenario
        nodes = tuple(place % scenario.nodes for place in places[: min(world, *scenario.worlds)])
        fails = [scenario.power and one for one in lost[: len(self.explorer.places)]]
        self.state, self.notes = self.explorer.restart(self.state, fails, nodes)
        self.history.append(f"restart on {nodes}")

    @rule(choices=st.lists(st.integers(0, 1000), min_size=1, max_size=40))
    def act(self, choices: list[int]) -> None:
        for choice in choices:
            steps = list(self.explorer.steps(self.state))
            if not steps or self.notes:
                break
            label, after, notes = steps[choice % len(steps)]
            self.history.append(label)
            self.notes += notes
            self.state = after or self.state

    @invariant()
    def nothing_is_broken(self) -> None:
        assert not getattr(self, "notes", []), (self.notes, self.explorer.scenario, self.history)

    def teardown(self) -> None:
        """Whatever happened, those that run come to an end."""
        if hasattr(self, "state") and not self.notes:
            while steps := list(self.explorer.steps(self.state)):
                label, after, self.notes = steps[0]
                self.history.append(label)
                self.nothing_is_broken()
                assert after is not None
                self.state = after


@pytest.mark.slow
@pytest.mark.parametrize("examples", [15, pytest.param(1_000, marks=pytest.mark.campaign)])
def test_any_history_keeps_the_invariants(examples: int) -> None:
    run_state_machine_as_test(GroupMachine, settings=settings(max_examples=examples, stateful_step_count=20))
