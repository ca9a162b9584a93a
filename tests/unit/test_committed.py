"""What the next record names, and where it goes."""

from __future__ import annotations

from pccheck_async.format import Entry, Record
from pccheck_async.format.record import region_offsets
from pccheck_async.store import Retention
from pccheck_async.store.retention import Committed


def entry(counter: int, slot: int) -> Entry:
    return Entry(counter, 10 * counter, 1.5, 4096, slot, 4096, 100, 7, False, {})


def test_records_take_turns_but_for_the_one_that_alone_names_what_was_adopted() -> None:
    """A crash must not tear that: both copies of a record may be half written at once."""
    damaged, older = entry(4, 0), entry(3, 1)
    committed = Committed(Record(9, (damaged,), (older,)), Retention(keep_last=2))
    assert region_offsets(committed.record_naming([damaged]).generation) != region_offsets(9)
    committed.damaged.add(4)
    committed.adopted += (older,)
    assert committed.entries == (older,)
    new = entry(5, 2)
    assert (chosen := committed.decide(new)) is not None
    assert chosen.entries == (new, older)
    record = committed.record_naming(committed.entries)
    assert (record.generation, record.entries, record.superseded) == (11, (older,), ())
    assert region_offsets(record.generation) == region_offsets(9)
    assert committed.record_naming([new]).superseded == (older,)
    committed.publish(record)
    assert committed.record_naming([new]) == Record(12, (new,), (older,))
