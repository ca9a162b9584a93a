from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pccheck_async import Keep
from pccheck_async.format import Entry, Line
from pccheck_async.format.record import MOST_ENTRIES
from pccheck_async.group import Applied, Complete, Key, Part, Run, SeenStore, View, view, view_of
from pccheck_async.group.parts import link_to, members_digest, run_id
from pccheck_async.group.view import line_in, view_of_both
from pccheck_async.store import KeepAll, Retention


def run(number: int, stores: list[SeenStore], nonce: int = 0) -> Run:
    return Run(number, nonce, members_digest((store.rank, store.store_id) for store in stores))


def store(domain: int, rank: int, *parts: Part, applied: Applied | None = None, name: str = "") -> SeenStore:
    return SeenStore(domain, rank, (name or f"{domain}/{rank}").encode(), applied, parts)


def part(of: Run, counter: int, rank: int, *, world: int = 2, step: int | None = None, committed: bool = False) -> Part:
    at = counter * 10 if step is None else step
    return Part(of, rank, world, committed, Entry(counter, at, 0.0, 1, 0, 0, 0, 0, False, {"rank": rank}))


HERE = [store(0, 0), store(0, 1)]
RUN = run(3, HERE)


def seen(*stores: SeenStore, world: int = 2) -> View:
    return view_of(stores, [0] * world, [f"host{rank}" for rank in range(world)])


def test_nothing_is_there() -> None:
    assert seen() == View((), (), (), -1, 1)


def test_complete_where_all_ranks_name_it() -> None:
    found = seen(store(0, 0, part(RUN, 5, 0), part(RUN, 4, 0)), store(0, 1, part(RUN, 4, 1), part(RUN, 5, 1)))
    assert [(one.key.counter, one.places) for one in found.complete] == [(5, (0, 0)), (4, (0, 0))]
    assert found.complete[0].entry.metadata == {"rank": 0}
    assert (found.base, found.number, found.incomplete, found.error) == (5, 4, (), None)


def test_incomplete_is_proven_where_all_stores_of_the_run_are_there() -> None:
    found = seen(store(0, 0, part(RUN, 5, 0)), store(0, 1))
    assert (found.complete, found.unproven, found.base) == ((), (), 5)
    (one,) = found.incomplete
    assert (one.proven, one.ranks, one.hosts, one.step) == (True, (1,), ("host1",), 50)


def test_a_store_out_of_sight_may_have_the_part() -> None:
    for away in ((), (store(0, 1, name="made anew"),)):
        found = seen(store(0, 0, part(RUN, 5, 0)), *away)
        assert found.unproven == (Key(5, RUN),)
        assert not found.incomplete[0].proven


def test_what_a_record_calls_committed_was_complete() -> None:
    found = seen(store(0, 0, part(RUN, 5, 0, committed=True)), store(0, 1))
    assert found.unproven == (Key(5, RUN),)
    assert found.incomplete[0].committed


def test_older_ones_than_the_newest_complete_one_are_not_waited_for() -> None:
    other = Run(2, 7, 12345)
    both = [part(other, 3, 0), part(RUN, 5, 0), part(other, 6, 0)], [part(RUN, 5, 1)]
    found = seen(store(0, 0, *both[0]), store(0, 1, *both[1]))
    assert found.unproven == (Key(6, other),)
    assert {one.key.counter for one in found.incomplete} == {3, 6}


@pytest.mark.parametrize(
    "second", [part(RUN, 5, 1, step=51), part(RUN, 5, 1, world=3), part(Run(3, 1, RUN.members), 5, 1)]
)
def test_other_steps_worlds_and_runs_are_not_the_same_checkpoint(second: Part) -> None:
    assert seen(store(0, 0, part(RUN, 5, 0)), store(0, 1, second)).complete == ()


def test_parts_count_in_every_folder_of_a_members_domain() -> None:
    """Rank 0 ran on the second node, and now runs on the first one."""
    stores = store(0, 0), store(0, 1, part(RUN, 5, 1)), store(1, 0, part(RUN, 5, 0)), store(1, 1)
    found = view_of(stores, [0, 1], ["a", "b"])
    assert found.complete[0].places == (1, 0)
    assert view_of([*stores[:2], stores[2]], [0], ["a"]).complete == ()  # nobody runs in that domain


def test_the_members_of_a_run_are_found_among_many_folders() -> None:
    stores = [store(domain, rank) for domain in range(4) for rank in range(4)]
    ran = run(1, [stores[5 * rank] for rank in range(4)])  # each rank in its own domain
    held = [store(0, 0, part(ran, 1, 0, world=4)), *stores[1:]]
    assert view_of(held, [0, 1, 2, 3], []).incomplete[0].proven
    assert not view_of(held[:15], [0, 1, 2, 3], []).incomplete[0].proven  # rank 3's store is out of sight


def test_too_many_combinations_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [store(domain, rank) for domain in range(4) for rank in range(4)]
    ran = run(1, [stores[5 * rank] for rank in range(4)])
    held = [store(0, 0, part(ran, 1, 0, world=4)), *stores[1:]]
    monkeypatch.setattr(view, "_MOST_COMBINATIONS", 4**3)
    assert view_of(held, [0, 1, 2, 3], []).incomplete[0].proven
    monkeypatch.setattr(view, "_MOST_COMBINATIONS", 4**3 - 1)
    assert view_of(held, [0, 1, 2, 3], []).unproven == (Key(1, ran),)


def test_pins_are_those_of_the_highest_applied_decision() -> None:
    key = Key(5, RUN)
    both = part(RUN, 5, 0), part(RUN, 5, 1)

    def pinned(first: Applied | None, second: Applied | None) -> bool:
        found = seen(store(0, 0, both[0], applied=first), store(0, 1, both[1], applied=second))
        return found.complete[0].entry.pinned

    assert pinned(Applied(RUN, 4, ()), Applied(RUN, 5, (key,)))
    assert not pinned(Applied(RUN, 6, ()), Applied(RUN, 5, (key,)))
    assert not pinned(Applied(Run(4, 0, 0), 1, ()), Applied(RUN, 5, (key,)))
    assert pinned(None, Applied(RUN, 5, (key,)))
    assert pinned(Applied(Run(3, 99, 0), 5, ()), Applied(RUN, 5, (key,)))  # neither saw the other: either's stay


def test_numbers_and_counters_go_on_from_whatever_was_seen() -> None:
    dead = Run(8, 0, 1)
    found = seen(
        store(0, 0, part(RUN, 2, 0), part(dead, 9, 0)), store(0, 1, part(RUN, 2, 1), applied=Applied(Run(9, 0, 1), 0))
    )
    assert (found.complete[0].key.counter, found.base, found.number) == (2, 9, 10)


def test_contradictions_are_named() -> None:
    again = Run(4, 1, RUN.members)
    both = [part(RUN, 5, 0), part(again, 5, 0)], [part(RUN, 5, 1), part(again, 5, 1)]
    assert "two complete checkpoints have the counter 5" in str(
        seen(store(0, 0, *both[0]), store(0, 1, *both[1])).error
    )
    clones = view_of([store(0, 0, name="one"), store(1, 0, name="one")], [0, 1], ["a", "b"])
    assert str(clones.error).startswith("the stores of rank 0 in domain 0 and rank 0 in domain 1 are copies of one")
    assert "it was renamed" in str(seen(store(0, 1, part(RUN, 5, 0))).error)


def complete_of(*counters: int, rejected: Collection[int] = (), pinned: Collection[int] = ()) -> list[Complete]:
    """Complete checkpoints of two ranks, newest first."""
    marked = (part(RUN, counter, 0).entry for counter in counters)
    entries = [replace(one, pinned=one.counter in pinned) for one in marked]
    entries = [one.as_rejected() if one.counter in rejected else one for one in entries]
    return [Complete(RUN, 2, one, ((0, 0),)) for one in entries]


def kept(complete: list[Complete], rules: Retention, damaged: Collection[int] = (), then: Any = None) -> list[int]:
    at_start = view.kept_at_start(complete if then is None else then, complete, rules, damaged)
    return [one.entry.counter for one in at_start]


def test_decision_0_keeps_what_a_damaged_one_hides() -> None:
    found = complete_of(5, 4, 3)
    assert kept(found, Retention()) == [5]
    assert kept(found, Retention(), {5}) == [5, 4]
    assert kept(found, Retention(keep_last=2), {4}) == [5, 4, 3]
    assert kept([], Retention()) == []


def test_decision_0_keeps_what_is_rejected_and_what_was_pinned_at_the_opening() -> None:
    assert kept(complete_of(5, 4, 3, rejected=[5]), Retention()) == [5, 4]
    assert kept(complete_of(5, 4, 3), Retention(), then=complete_of(5, 4, 3, pinned=[3])) == [5, 3]
    assert kept(complete_of(5, 3), Retention(), then=complete_of(5, 4, 3, pinned=[4])) == [5]  # 4 was removed


def test_decision_0_leaves_room_for_what_is_in_flight() -> None:
    """Records that a group with fewer in flight wrote may name more than there is room for now."""
    rules = Retention(keep_last=2, most=MOST_ENTRIES - 2 * 20)
    counters = range(60, 0, -1)
    assert kept(complete_of(*counters, rejected=range(11, 61)), rules) == [*range(60, 38, -1), 10, 9]
    assert kept(complete_of(*counters, rejected=counters), rules) == [*range(60, 36, -1)]
    every = Retention(keep_last=2, keep=Keep(every=1), most=24)
    assert kept(complete_of(*counters), every, {60}) == [*range(59, 35, -1)]
    assert kept(complete_of(*counters), KeepAll(most=24)) == [*counters]  # nothing is dropped: saving is refused


@given(
    st.lists(st.sampled_from(["", "rejected", "pinned", "damaged", "pinned at the opening", "removed"]), max_size=64),
    st.integers(1, 20),
    st.none() | st.integers(1, 3),
    st.integers(1, 31),
)
def test_decision_0_never_names_more_than_there_is_room_for(
    kinds: list[str], keep_last: int, every: int | None, in_flight: int
) -> None:
    most = MOST_ENTRIES - 2 * in_flight
    by_kind = {kind: [at for at, one in enumerate(kinds) if one == kind] for kind in kinds}
    pinned, rejected, damaged = (by_kind.get(kind, []) for kind in ("pinned", "rejected", "damaged"))
    then = [*pinned, *by_kind.get("pinned at the opening", [])]
    if max(len(then), len(pinned)) + keep_last > most:
        return  # refused at the opening
    rules = Retention(keep_last=keep_last, keep=Keep(every=every), most=most)
    counters = range(len(kinds) - 1, -1, -1)
    found = complete_of(*counters, rejected=rejected, pinned=then)
    now = complete_of(*(at for at in counters if kinds[at] != "removed"), rejected=rejected, pinned=pinned)
    result = kept(now, rules, damaged, then=found)
    assert len(result) <= most
    whole = [one.entry for one in now if one.entry.counter not in damaged]
    needed = rules.retain(whole[1:], whole[0]).entries if whole else []
    assert {entry.counter for entry in needed} <= {*result}
    assert bool(result) == bool(now)
    assert len(result) == most or {*rejected} <= {*result}


# -- both tiers


def line_of(of: Run, base: int = -1, *chain: Key) -> Line:
    return Line(run_id(of.number, of.nonce), base, tuple(map(link_to, chain)))


def written(rank: int, line: Line | None, *parts: Part) -> SeenStore:
    return replace(store(0, rank, *parts), line=line)


def test_the_line_is_that_of_the_newest_run() -> None:
    older, newer = line_of(run(1, HERE)), line_of(run(3, HERE), 4, Key(2, run(1, HERE)))
    assert line_in([]) is None
    assert line_in([written(0, None), written(1, None)]) is None
    assert line_in([written(0, older), written(1, older)]) == older
    assert line_in([written(0, newer), written(1, older)]) == newer  # not all have joined
    assert line_in([written(0, older, part(RUN, 5, 0)), written(1, older)]) is None  # run 3 has no tier in memory
    assert line_in([written(0, newer, part(RUN, 5, 0)), written(1, None, part(RUN, 5, 1))]) is None  # a tool wrote
    assert line_in([written(0, newer), written(1, line_of(run(3, HERE, nonce=1)))]) is None  # which of them?
    assert line_in([written(0, newer), written(1, None, part(run(3, HERE, nonce=1), 5, 1))]) is None


def test_a_part_in_memory_counts_by_the_line_alone() -> None:
    line = line_of(RUN, 4, Key(2, run(1, HERE)))
    disk = [written(0, line), written(1, line)]

    def steps(*parts: Part) -> list[int]:
        memory = [store(0, rank, *(one for one in parts if one.rank == rank), name=f"m{rank}") for rank in (0, 1)]
        found = view_of_both(disk, [0, 0], memory, [0, 0], ["a", "b"])
        assert found.base == max((one.entry.counter for one in parts), default=-1)
        return [one.entry.step for one in found.complete]

    assert steps(part(RUN, 5, 0), part(RUN, 5, 1)) == [50]
    assert steps(part(run(1, HERE), 2, 0), part(run(1, HERE), 2, 1)) == [20]
    assert steps(part(run(1, HERE), 3, 0), part(run(1, HERE), 3, 1)) == []  # run 3 went on from before it
    assert steps(part(run(2, HERE), 2, 0), part(run(2, HERE), 2, 1)) == []
    assert steps(part(RUN, 5, 0)) == []


def test_each_part_may_be_in_either_tier() -> None:
    line = line_of(RUN)
    disk = [written(0, line), written(1, line, part(RUN, 5, 1))]
    memory = [store(0, 0, part(RUN, 5, 0), name="m0"), store(1, 1, name="m1")]
    (found,) = view_of_both(disk, [0, 0], memory, [0, 1], ["a", "b"]).complete
    assert found.ways == ((0, 2),)  # the disk comes after the memory of two hosts
    assert found.ways_through({0, 1}) == found.ways_through({2}) == ()
    memory[1] = store(1, 1, part(RUN, 5, 1), name="m1")
    (found,) = view_of_both(disk, [0, 0], memory, [0, 1], ["a", "b"]).complete
    assert found.ways == ((0, 1), (0, 2))
    assert found.ways_through({0, 2}) == ((0, 2),)
