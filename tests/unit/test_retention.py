from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccheck_async.format import Entry
from pccheck_async.store import Retention
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
    rules, entries = Retention(keep_every=every), list[Entry]()
    for new in made:
        entries = rules.retain(entries, new).entries
    assert sorted(each.step for each in entries) == kept
    assert entries == rules.retain(made[1:], made[0]).entries  # in whatever order they were committed
    assert not rules.dropped(entries)  # nor by a restart
    assert made[-1] in entries
