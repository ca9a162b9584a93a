"""The schedule and preemption in every interleaving, with a collective in each step of the training and without."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from pccheck_async.group import LeadSchedule, Schedule, Verdict, decode_decision, decode_message, encode
from pccheck_async.group.messages import Acknowledge, Confirm, Next, Preempted, Propose, Withdraw
from tests.support.group_explorer import Table, cloned, frozen


@dataclass(frozen=True)
class Scenario:
    world: int = 2
    steps: int = 5
    lock: bool = True  # training has a collective in each step: nobody ends one before all have begun it
    gaps: tuple[int, ...] = (1, 2)  # what rank 0's policy may say
    stride: int = 1  # of the user's numbers
    window: int = 1  # steps of gradient accumulation
    preempt: bool = True
    trainer_answers: bool = False  # a mutant: no thread of the protocol, the trainer's at the end of a step


OBJECTS = Table()
"""Numbers for schedules of ranks and of rank 0, those that behave alike the same."""


class State(NamedTuple):
    ranks: tuple[int, ...]
    lead: int
    log: tuple[bytes, ...] = ()
    learned: tuple[int, ...] = ()
    at: tuple[int, ...] = ()  # the step that each trainer is in, or has ended
    phase: tuple[str, ...] = ()  # run, end, left
    saves: tuple[tuple[int, ...], ...] = ()
    stopped: tuple[bool, ...] = ()
    inbox: tuple[bytes, ...] = ()
    signalled: bool = False


def number(one: Schedule | LeadSchedule) -> int:
    return OBJECTS.add(one, frozen(one))


def put(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def explore(scenario: Scenario, *, stop: bool = False) -> tuple[int, set[str]]:
    """Return how many states there are, and what is wrong, with what happened behind a plus.

    ``stop``: as soon as something is wrong.
    """
    world = scenario.world
    lead = LeadSchedule(world, lead=1)
    ranks = list(map(Schedule, range(world)))
    for rank in ranks:
        rank.begin(0)
    lead.step = 0
    log = tuple(map(encode, lead.publish(0)))
    first = State(
        tuple(map(number, ranks)),
        number(lead),
        log,
        (0,) * world,
        (0,) * world,
        ("run",) * world,
        ((),) * world,
        (False,) * world,
    )
    seen, queue, found = {first}, deque([first]), set[str]()
    while queue and not (stop and wrong(found)):
        state = queue.popleft()
        after = list(successors(scenario, state))
        ended = all(phase == "left" for phase in state.phase)
        if not [one for label, one in after if label != "signal"] and not ended:
            found.add("deadlock")
        if ended:
            found |= judge_end(state)
        for saved in state.saves:
            if saved != max(state.saves, key=len)[: len(saved)]:
                found.add("G7: different sequences")
        for _, one in after:
            if one not in seen:
                seen.add(one)
                queue.append(one)
    return len(seen), found


def wrong(found: set[str]) -> set[str]:
    return {one for one in found if not one.startswith("+")}


def judge_end(state: State) -> set[str]:
    found = set()
    if len(set(state.saves)) > 1:
        found.add("ranks saved different steps")
    if len(set(zip(state.at, state.stopped, strict=True))) > 1:
        found.add("ranks stopped at different steps")
    decided = {type(decode_decision(one)).__name__ for one in state.log}
    if state.stopped[0] and state.saves[0][-1] == state.at[0]:
        found.add("+stopped and saved")
    return found | ({"+withdrawn"} if "Withdraw" in decided else set())


def successors(scenario: Scenario, state: State) -> Iterator[tuple[str, State]]:
    if scenario.preempt and not state.signalled:
        for rank, phase in enumerate(state.phase):
            if phase != "left":
                yield "signal", state._replace(signalled=True, inbox=(*state.inbox, encode(Preempted(rank))))
    if state.inbox:
        lead, message = cloned(OBJECTS[state.lead]), decode_message(state.inbox[0])
        assert isinstance(message, Preempted | Acknowledge)
        lead.step = OBJECTS[state.ranks[0]].step
        decisions = lead.receive(message)
        yield (
            "receive",
            state._replace(lead=number(lead), inbox=state.inbox[1:], log=state.log + tuple(map(encode, decisions))),
        )
    for rank in range(scenario.world):
        answers = not scenario.trainer_answers or state.phase[rank] != "run"
        if state.learned[rank] < len(state.log) and answers:
            yield "learn", learn(state, rank)
        if state.phase[rank] == "run":
            if not scenario.lock or all(at >= state.at[rank] for at in state.at):
                yield "end a step", state._replace(phase=put(state.phase, rank, "end"))
        elif state.phase[rank] == "end":
            yield from leave_context(scenario, state, rank)


def learn(state: State, rank: int) -> State:
    one, decision = cloned(OBJECTS[state.ranks[rank]]), decode_decision(state.log[state.learned[rank]])
    assert isinstance(decision, Next | Propose | Confirm | Withdraw)
    answer = one.learn(decision)
    inbox = state.inbox if answer is None else (*state.inbox, encode(answer))
    learned = put(state.learned, rank, state.learned[rank] + 1)
    return state._replace(ranks=put(state.ranks, rank, number(one)), learned=learned, inbox=inbox)


def leave_context(scenario: Scenario, state: State, rank: int) -> Iterator[tuple[str, State]]:
    """The end of a step's context: what the schedule says, until it says to go on."""
    one, at = cloned(OBJECTS[state.ranks[rank]]), state.at[rank]
    whole = (at + 1) % scenario.window == 0
    verdict = one.at_end(at * scenario.stride, whole=whole)
    state = state._replace(ranks=put(state.ranks, rank, number(one)))
    saves = state.saves[rank]
    saved = put(state.saves, rank, saves if saves[-1:] == (at,) else (*saves, at))
    match verdict:
        case Verdict.SAVE:
            if rank != 0:
                yield "save", state._replace(saves=saved)
                return
            for gap in scenario.gaps:  # rank 0 publishes the next one first
                lead = cloned(OBJECTS[state.lead])
                log = state.log + tuple(map(encode, lead.publish((at + gap) * scenario.stride)))
                yield "save", state._replace(saves=saved, lead=number(lead), log=log)
        case Verdict.STOP:
            yield "stop", end(state, rank)._replace(saves=saved, stopped=put(state.stopped, rank, True))
        case Verdict.GO if at + 1 == scenario.steps:
            yield "leave", end(state, rank)
        case Verdict.GO:
            following = cloned(one)
            following.begin((at + 1) * scenario.stride)
            yield (
                "go on",
                state._replace(
                    ranks=put(state.ranks, rank, number(following)),
                    at=put(state.at, rank, at + 1),
                    phase=put(state.phase, rank, "run"),
                ),
            )


def end(state: State, rank: int) -> State:
    one = cloned(OBJECTS[state.ranks[rank]])
    one.end()
    return state._replace(ranks=put(state.ranks, rank, number(one)), phase=put(state.phase, rank, "left"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(steps=3, gaps=(1,)),
        pytest.param(Scenario(), marks=pytest.mark.campaign),
        pytest.param(Scenario(lock=False, steps=4), marks=pytest.mark.campaign),
        pytest.param(Scenario(world=3, steps=3, gaps=(1,)), marks=pytest.mark.campaign),
        pytest.param(Scenario(stride=5, steps=4, gaps=(2,)), marks=pytest.mark.campaign),
        pytest.param(Scenario(window=2, steps=4, gaps=(2,), lock=False), marks=pytest.mark.campaign),
    ],
    ids=str,
)
def test_all_ranks_save_and_stop_alike(scenario: Scenario) -> None:
    states, found = explore(scenario)
    print(f"\n  {scenario}: {states} states, {sorted(found)}")
    assert not wrong(found)
    assert found == {"+stopped and saved", "+withdrawn"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "broken", "scenario"),
    [
        ("_has_to_wait", Schedule._lacks_schedule, Scenario(steps=3, gaps=(1,))),  # nobody waits for the confirmation
        ("_has_passed", lambda self, step: False, Scenario(lock=False, steps=3, gaps=(1,))),  # nobody refuses
        ("_lacks_schedule", lambda self, step: False, Scenario(lock=False, steps=4, preempt=False, gaps=(1,))),
        ("_has_passed", Schedule._has_passed, Scenario(steps=3, gaps=(1,), trainer_answers=True)),
    ],
    ids=["nobody waits for the confirmation", "nobody refuses", "a rank goes past the schedule", "the trainer answers"],
)
def test_every_broken_rule_is_found(
    name: str, broken: Callable[..., bool], scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Schedule, name, broken)
    assert wrong(explore(scenario, stop=True)[1])


def test_the_lead_doubles_when_a_rank_has_passed_the_proposed_step() -> None:
    lead = LeadSchedule(2, lead=2)
    lead.step = 10
    assert lead.receive(Preempted(1)) == [Propose(0, 12)]
    assert lead.receive(Preempted(0)) == []
    assert lead.receive(Acknowledge(0, 0, None, False)) == []
    assert lead.receive(Acknowledge(1, 0, 14, False)) == [Propose(1, 18)]
    assert lead.receive(Acknowledge(0, 0, None, False)) == []  # of the first one
    assert lead.receive(Acknowledge(0, 1, 19, False)) == []
    assert lead.receive(Acknowledge(1, 1, None, False)) == [Propose(2, 27)]
    assert lead.receive(Acknowledge(0, 2, None, False)) == []
    assert lead.receive(Acknowledge(1, 2, None, False)) == [Confirm(27)]
    assert lead.receive(Preempted(1)) == []


def test_schedules_go_forward() -> None:
    lead = LeadSchedule(2)
    assert lead.publish(5) == [Next(5)]
    with pytest.raises(ValueError, match="step 5 is scheduled after step 5"):
        lead.publish(5)


def test_a_rank_that_knows_no_schedule_waits() -> None:
    one = Schedule(1)
    one.begin(0)
    assert one.at_end(0) is Verdict.WAIT
    one.learn(Next(0))
    assert one.at_end(0) is Verdict.SAVE
    assert one.at_end(0) is Verdict.GO
    one.begin(1)
    assert one.at_end(1) is Verdict.WAIT
    assert one.at_end(1, whole=False) is Verdict.GO
    one.learn(Next(2))
    assert one.at_end(1) is Verdict.GO


def test_a_scheduled_step_at_which_nothing_is_saved_is_passed() -> None:
    one = Schedule(1)
    one.learn(Next(1, save=False))
    assert one.at_end(0) is Verdict.GO
    assert one.at_end(1) is Verdict.GO
    assert one.at_end(2) is Verdict.WAIT
    one.learn(Next(2))
    assert one.at_end(2) is Verdict.SAVE
