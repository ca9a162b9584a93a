from __future__ import annotations

import pytest

from pccheck_async.format import Entry
from pccheck_async.group import Applied, Key, Part, Run, SeenStore, View, view, view_of
from pccheck_async.group.parts import members_digest
from pccheck_async.store import Retention


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


def test_decision_0_keeps_what_a_damaged_one_hides() -> None:
    stores = [store(0, rank, *(part(RUN, counter, rank) for counter in (5, 4, 3))) for rank in range(2)]
    found = seen(*stores)
    kept = [one.key.counter for one in view.kept_at_start(found.complete, Retention(), ())]
    assert kept == [5]
    assert [one.key.counter for one in view.kept_at_start(found.complete, Retention(), {5})] == [5, 4]
    assert [one.key.counter for one in view.kept_at_start(found.complete, Retention(keep_last=2), {4})] == [5, 4, 3]
    assert view.kept_at_start(seen().complete, Retention(), ()) == []
