from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pccheck_async.errors import NoCheckpointError, StoreError
from pccheck_async.format import Entry
from pccheck_async.store import Keep, KeepAll, Retention
from tests.unit.test_record import entry


def kept(committed: list[int], new: int, keep_last: int, damaged: set[int] | None = None) -> list[int]:
    entries = [entry(c) for c in sorted(committed, reverse=True)]
    return [e.counter for e in Retention(keep_last=keep_last).retain(entries, entry(new), damaged or set()).entries]


def test_keep_one_is_pcchecks_rule() -> None:
    assert kept([4], 5, 1) == [5]
    assert kept([5], 4, 1) == [5]  # superseded


def test_a_late_one_still_counts_among_several() -> None:
    assert kept([7, 5], 6, 2) == [7, 6]
    assert kept([7, 6], 5, 2) == [7, 6]
    assert kept([7, 6], 5, 3) == [7, 6, 5]


def test_damaged_ones_are_dropped() -> None:
    assert kept([7, 6], 8, 3, {7}) == [8, 6]


def test_pinned_ones_stay_and_do_not_count() -> None:
    pinned = msgspec.structs.replace(entry(1), pinned=True)
    assert [e.counter for e in Retention().retain([entry(4), pinned], entry(5)).entries] == [5, 1]


@given(st.lists(st.integers(0, 50), unique=True), st.integers(51, 60) | st.integers(-20, -1), st.integers(1, 5))
def test_the_newest_of_all_is_always_kept(committed: list[int], new: int, keep_last: int) -> None:
    result = kept(committed, new + 20, keep_last) if new + 20 not in committed else [max([*committed, new + 20])]
    assert result[0] == max([*committed, new + 20])
    assert len(result) <= keep_last


def test_order_is_newest_first() -> None:
    entries: list[Entry] = [entry(9), entry(3)]
    assert [e.counter for e in Retention(keep_last=3).retain(entries, entry(6)).entries] == [9, 6, 3]


@pytest.mark.parametrize(
    ("every", "steps", "kept"),
    [
        (1000, [99, 199, 899, 999, 1099, 1899, 1999, 2099], [999, 1999, 2099]),  # those of interval=100
        (1000, [0, 700, 1340, 1700, 2050, 2700], [1340, 2050, 2700]),  # those of an adaptive policy
        (1000, [1000, 2000, 3000], [1000, 2000, 3000]),  # numbered by steps ended
        (1000, [1040, 990, 1030, 1050], [1030, 1050]),  # it went back
        (1000, [1040, 1040], [1040]),
        (1, [0, 1, 2], [0, 1, 2]),
        (3, [-5, -1, 1], [1]),  # of an old store
    ],
)
def test_the_first_at_or_after_each_multiple_of_the_steps_ended(every: int, steps: list[int], kept: list[int]) -> None:
    made = [msgspec.structs.replace(entry(n), step=step) for n, step in enumerate(steps)]
    rules, entries = Retention(keep=Keep(every=every)), list[Entry]()
    for new in made:
        entries = rules.retain(entries, new).entries
    assert sorted(each.step for each in entries) == kept
    assert entries == rules.retain(made[1:], made[0]).entries  # in whatever order they were committed
    assert not rules.dropped(entries)  # nor by a restart
    assert made[-1] in entries


def saved_at(*times: float, rejected: tuple[int, ...] = ()) -> list[Entry]:
    made = [msgspec.structs.replace(entry(n), time=time) for n, time in enumerate(times)]
    return [each.as_rejected() if each.counter in rejected else each for each in made]


@pytest.mark.parametrize(
    ("spaced", "times", "kept"),
    [
        (((10, 30),), range(60), [30, 40, 50, 59]),  # one for each slice, and the newest
        (((10, 30),), [5, 8, 13, 14, 31], [5, 13, 31]),  # the first of each slice, wherever in it that is
        (((10, 30), (40, 200)), range(0, 150, 5), [0, 40, 80, 120, 130, 140, 145]),
        (((10, 30),), [5, 100, 101], [100, 101]),  # after a pause
        (((10, 30),), [5, 25, 7, 8, 26], [5, 25, 26]),  # the clock was set back, and slices are those of the clock
        (((10, 30),), [500, 5, 8, 15], [5, 15, 500]),  # from a clock that went wrong
        (((10, 30),), [*range(500, 600, 10), *range(0, 60, 10)], [20, 30, 40, 50]),  # for long
    ],
)
def test_the_first_of_each_slice_of_time(
    spaced: tuple[tuple[float, float], ...], times: list[float], kept: list[float]
) -> None:
    rules, entries = Retention(keep=Keep(spaced=spaced)), list[Entry]()
    for new in saved_at(*times):
        entries = rules.retain(entries, new).entries
        assert len(entries) <= rules.reserved  # else a record may have no room for them
        assert entries[0] == new
    assert sorted(each.time for each in entries) == kept
    assert not rules.dropped(entries)  # nor by a restart


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 60)).map(lambda each: (each[0], sum(each))), max_size=2),
)
@example([0, 1, 0, 30], [(2, 30)])
def test_what_is_the_first_of_a_slice_stays_it(gaps: list[int], spaced: list[tuple[int, int]]) -> None:
    """What one commit drops is nothing that the rules would want later."""
    times, now = [], 0
    for gap in gaps:
        times.append(now := now + gap)
    rules, entries = Retention(keep=Keep(spaced=spaced), most=1000), list[Entry]()
    made = saved_at(*times)
    for new in made:
        entries = rules.retain(entries, new).entries
        assert len(entries) <= rules.reserved
    assert entries == rules.retain(made[:-1], made[-1]).entries


def test_rejected_ones_count_for_no_rule_and_stay_only_pinned() -> None:
    rules = Retention(keep_last=2, keep=Keep(every=2, best=("loss", 1, "min"), spaced=((1, 9),)))
    made = [
        msgspec.structs.replace(each, metadata=each.metadata | {"loss": -each.counter}, step=each.counter)
        for each in saved_at(0, 1, 2, 3, 4, rejected=(2, 3, 4))
    ]
    assert [each.counter for each in rules.retain(made[:-1], made[-1]).entries] == [1, 0]
    made[3] = msgspec.structs.replace(made[3], pinned=True)
    assert [each.counter for each in rules.retain(made[:-1], made[-1]).entries] == [3, 1, 0]
    assert [each.counter for each in KeepAll().retain(made[:-1], made[-1]).entries] == [4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("steps", "in_flight", "step", "until", "rejected"),
    [
        ([1, 2, 3], {}, 2, 2, {1, 2}),
        ([1, 2, 3], {3: 4, 4: 5}, 3, 4, {2, 3, 4}),
        ([1, 2], {2: 3}, 3, 2, {2}),  # in flight alone
        ([1, 2, 4], {}, 3, 2, {2}),  # the step itself was not saved
        ([1, 2, 5, 3, 4], {}, 3, 4, {2, 3, 4}),  # a rollback from 5 to 2
        ([1, 3, 2, 3], {}, 3, 3, {1, 3}),  # what the newest of the step came from is not
        ([2, 1, 0], {3: 0}, 1, 3, {0, 1, 2, 3}),
        ([1, 2, 3], {3: 4}, 2, 1, {1}),  # admitted after the call
    ],
)
def test_what_is_rejected(
    steps: list[int], in_flight: dict[int, int], step: int, until: int, rejected: set[int]
) -> None:
    made = [msgspec.structs.replace(entry(n), step=step) for n, step in enumerate(steps)]
    if len(rejected) >= len(made) and set(range(len(made))) <= rejected:
        with pytest.raises(StoreError, match="would be left to restore"):
            Retention.reject(made, step, {at: (each, None) for at, each in in_flight.items()}, until)
        made.append(msgspec.structs.replace(entry(99), step=0))
    assert Retention.reject(made, step, {at: (each, None) for at, each in in_flight.items()}, until) == rejected
    marked = [each.as_rejected() if each.counter in rejected else each for each in made]
    with pytest.raises(NoCheckpointError):
        Retention.reject(marked, step, {}, until)
