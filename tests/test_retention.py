from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pccheck_async.layout import Entry
from pccheck_async.retention import Retention
from tests.test_layout import entry


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
