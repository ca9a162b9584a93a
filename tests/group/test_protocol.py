"""The group commit in every interleaving, with deaths, power losses, restarts elsewhere, and every rule broken once."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from time import monotonic

import pytest

from pccheck_async.group import actions, coordinator, member, messages, parts, restore, schedule, view
from tests.group.mutants import MUTANTS, Mutant
from tests.support.group_explorer import Explorer, Scenario

pytestmark = pytest.mark.slow

SMALL = [
    Scenario("three in one run", ("sss",), power=False, max_in_flight=1),
    Scenario("two in flight", ("ss",)),
    Scenario("power fails in each of two runs", ("s", "s")),
    Scenario("a write fails", ("ss",), fails=1),
    Scenario("a record's flush fails", ("s", "s"), latches=1),
    Scenario("three ranks or two", ("s", "s"), worlds=(3, 2), power=False),
    Scenario("two ranks swap nodes", ("s", "s"), nodes=2),
    Scenario("a node stays away", ("s", "s", "s"), nodes=3, power=False, route=((0, 1), (0, 2), (0, 1))),
    Scenario("a pin", ("sp", "s"), pins=1, power=False),
    Scenario("a rejection", ("ssr",), power=False, keep=2, max_in_flight=1),
    Scenario("a rank saves another step", ("ss",), steps=(7, 8), diverges=True, power=False),
    Scenario("a rank leaves early with an error", ("ssq",), leaves="x", power=False),
    Scenario("a record's flush fails, and all leave", ("sq",), latches=1, power=False),
    Scenario("late messages", ("ss",), slow=True, power=False),
    Scenario("replicas differ", ("ss",), differs=True, power=False, max_in_flight=1),
]
WHOLE = [
    Scenario("W=2 shared 3, power", ("sss",)),
    Scenario("W=2 shared 3/1", ("sss", "s"), power=False),
    Scenario("W=2 shared 2/1, power", ("ss", "s")),
    Scenario("W=3 shared 2, power", ("ss",), worlds=(3,)),
    Scenario("W=3 shared 1/1, power", ("s", "s"), worlds=(3,)),
    Scenario("W=2 shared, pins, 3/2/1, power", ("sps", "sp", "s"), pins=2),
    Scenario("W=2 shared, a rejection, 2, power", ("ssr",), keep=2),
    Scenario("W=2 shared, a rejection, 2/1", ("ssr", "s"), keep=2, power=False),
    Scenario("W=2 shared, replicas differ, 2/1", ("ss", "s"), differs=True, power=False),
    Scenario("W=2 shared, a step saved twice, 2/2", ("ss", "ss"), steps=(7, 7)),
]
"""Those of which there is no history that is not explored."""
CUT_OFF = [
    Scenario("W=2 shared 3/3/1, power, one failed write", ("sss", "sss", "s"), fails=1),
    Scenario("W=2 shared keep 2, 3/2/1, power", ("sss", "ss", "s"), keep=2),
    Scenario("W=2 shared 2/2/2/2, power", ("ss", "ss", "ss", "ss")),
    Scenario("W=3 shared 3", ("sss",), worlds=(3,), power=False),
    Scenario("W=3 shared 2/1, power", ("ss", "s"), worlds=(3,)),
    Scenario("W=3 shared keep 2, 2/1", ("ss", "s"), worlds=(3,), keep=2, power=False),
    Scenario("W=3 or 2 shared 2/1/1", ("ss", "s", "s"), worlds=(3, 2), power=False),
    Scenario("W=3 or 2 shared 1/1/1, power", ("s", "s", "s"), worlds=(3, 2)),
    Scenario("W=2 or 3 shared 2/1/1", ("ss", "s", "s"), worlds=(2, 3), power=False),
    Scenario("W=2 on 2 of 3 nodes, any order, 2/1/1", ("ss", "s", "s"), nodes=3, power=False),
    Scenario("W=2 on 2 of 3 nodes, any order, 1/1/1, power", ("s", "s", "s"), nodes=3),
    Scenario("W=2 on 2 nodes, any order, 2/1/1, power", ("ss", "s", "s"), nodes=2),
    Scenario("W=2: AB, AC, CB, a user goes on, 2/1/1/1", ("ss", "s", "s", "s"), nodes=3, power=False, force=True,
             memberships=((0, 1), (0, 2), (2, 1))),
    Scenario("W=2: AB, AC, a user goes on, keep 2, 2/2/1", ("ss", "ss", "s"), nodes=3, power=False, force=True, keep=2,
             memberships=((0, 1), (0, 2))),
    Scenario("W=3 ABC, 2 AB, 2 BC, a user goes on, 2/1/1", ("ss", "s", "s"), nodes=3, power=False, force=True,
             worlds=(3, 2), memberships=((0, 1, 2), (0, 1), (1, 2))),
    Scenario("W=2 shared 3/1/1, power, one record's flush fails", ("sss", "s", "s"), latches=1),
    Scenario("W=2 on 2 nodes, any order, pins, 1/1/1", ("sp", "sp", "s"), pins=2, nodes=2, power=False),
    Scenario("W=2 shared, two are rejected, 3/2/1, power", ("sssrs", "sr", "s"), keep=3, rejects_from=1),
    Scenario("W=2 or 3 shared, a rejection before all, 2/1/1, power", ("ss", "r", "s"), keep=2, worlds=(2, 3)),
    Scenario("W=2 on 2 of 3 nodes, any order, rejections, 2/1/1", ("ssr", "sr", "s"), keep=2, nodes=3, power=False),
    Scenario("W=2 shared, late messages, 3/1, one failed write", ("sss", "s"), slow=True, fails=1, power=False),
    Scenario("W=3 shared, rank 1 leaves early with an error", ("ssq",), worlds=(3,), leaves="x", power=False),
]  # fmt: skip
SECONDS, STATES_PER_SECOND, FEWEST_STATES = 540, 6_000, 20_000
"""Of the larger explorations, which are breadth first: what is cut off are the longest histories."""


@pytest.mark.parametrize("scenario", SMALL, ids=lambda scenario: scenario.name)
def test_every_history_keeps_the_invariants(scenario: Scenario) -> None:
    explorer = Explorer(scenario).explore(5_000)
    assert not explorer.found, explorer.summary()
    assert explorer.states > 200
    assert {"Start", "Commit", "durable"} <= explorer.reached
    if explorer.whole:
        wanted = {
            "fails": "Abort",
            "latches": "Broken",
            "pins": "pinned",
            "rejects": "rejected",
            "diverges": "Broken",
            "leaves": "Abort",
            "differs": "Compare",
        }
        assert {one for name, one in wanted.items() if getattr(scenario, name)} <= explorer.reached


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_broken_rule_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        for owner, name, wrong in mutant.patches:
            patched.setattr(owner, name, wrong)
        broken = Explorer(mutant.scenario).wander(100_000, until=mutant.breaks, seed=mutant.seed)
    assert mutant.breaks in broken.found
    right = Explorer(mutant.scenario).wander(min(broken.transitions, 2_000))
    assert not right.found, right.summary()


def test_each_invariant_has_a_mutant() -> None:
    """G5 has its own in test_restore, G9 in the test below."""
    assert {mutant.breaks for mutant in MUTANTS} >= {
        *(f"G{number}" for number in (1, 2, 3, 4, 6, 7, 8, 10, 11)), "PIN", "REJECT",
    }  # fmt: skip


FORBIDDEN = {"asyncio", "threading", "socket", "time", "os", "torch", "concurrent", "random", "pathlib", "io"}


def impure(source: str) -> set[str]:
    """What a module imports that waits, measures time or talks to others."""
    nodes = list(ast.walk(ast.parse(source)))
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".", maxsplit=1)[0] for name in named} & FORBIDDEN


def test_the_protocol_speaks_by_its_log_alone() -> None:
    """G9: no collective can be called off the caller's thread by what imports neither torch nor threads."""
    for module in (actions, coordinator, member, messages, parts, restore, schedule, view):
        assert not impure(inspect.getsource(module)), module
    assert impure("from torch.distributed import barrier") == {"torch"}


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scenario", WHOLE, ids=lambda scenario: scenario.name)
def test_there_is_no_other_history(scenario: Scenario) -> None:
    explorer = Explorer(scenario).explore()
    print(f"\n  {explorer.summary()}")
    assert not explorer.found, explorer.summary()
    assert explorer.whole


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_campaign(record_property: Callable[[str, object], None]) -> None:
    """At least 1,000,000 distinct histories: states, equal up to the names of runs and counters, are one."""
    began, total = monotonic(), 0
    for number, scenario in enumerate(CUT_OFF):
        left = (SECONDS - (monotonic() - began)) / (len(CUT_OFF) - number)
        most = max(FEWEST_STATES, int(STATES_PER_SECOND * left))
        explorer = Explorer(scenario).explore(most)
        total += explorer.states
        print(f"\n  {explorer.summary()}, {monotonic() - began:.0f} s", flush=True)
        assert not explorer.found, explorer.summary()
    record_property("distinct_histories", total)
    print(f"\n  {total} distinct histories")
    assert total >= 1_000_000


@pytest.mark.campaign
def test_campaign_of_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a random history finds, the whole exploration finds too, and the shortest history of it."""
    for mutant in MUTANTS:
        with monkeypatch.context() as patched:
            for owner, name, wrong in mutant.patches:
                patched.setattr(owner, name, wrong)
            explorer = Explorer(mutant.scenario).explore(500_000, stop=True)
        print(f"\n  {mutant.name}: {explorer.summary()}")
        assert explorer.found, mutant.name
