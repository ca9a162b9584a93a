"""The line of a store: which checkpoints in memory are part of the history that the disk goes on with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccheck_async.format import Line, Record
from pccheck_async.format.line import Link
from pccheck_async.format.record import HEADER, decode_record, encode_record
from tests.unit.test_record import BLOCK, STORE, entry

A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")


def test_a_run_accepts_its_own_and_what_it_descends_from() -> None:
    line = Line(A, -1).descend(B, 9, 5).descend(C, 14, 12)
    assert line == Line(C, 14, (Link(B, 12), Link(A, 5)))
    assert line.accepts(C, 15)
    assert not line.accepts(C, 14)  # its own begin after those that were there
    assert line.accepts(B, 12)
    assert not line.accepts(B, 13)  # left behind
    assert line.accepts(A, 5)
    assert not line.accepts(A, 6)
    assert not line.accepts(D, 1)


def test_the_run_of_a_counter() -> None:
    line = Line(C, 14, (Link(B, 12), Link(A, 5)))
    assert [line.run_of(counter) for counter in (15, 14, 13, 12, 6, 5, 0)] == [C, None, None, B, B, A, A]
    assert [Line(C, 14).run_of(counter) for counter in (15, 14)] == [C, None]


def test_a_run_that_goes_on_from_an_older_checkpoint_forgets_what_came_after_it() -> None:
    line = Line(C, 14, (Link(B, 12), Link(A, 5)))
    assert line.descend(D, 20, 4) == Line(D, 20, (Link(A, 4),))
    assert line.descend(D, 20, 13) == Line(D, 20)  # of no run that is known
    assert line.descend(D, 20, None) == Line(D, 20)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=12))
def test_what_a_line_accepts_is_what_it_descends_from(runs: list[tuple[int, int]]) -> None:
    """Each run goes on from one of the last checkpoints of its line, and makes some."""
    line = Line(bytes(16), -1)
    history: list[tuple[bytes, int]] = []
    everything: set[tuple[bytes, int]] = set()
    largest = -1
    for number, (back, made) in enumerate(runs, 1):
        restored = history[-1 - back] if back < len(history) else None
        run, base = bytes([number]) * 16, largest
        line = line.descend(run, base, None if restored is None else restored[1])
        history = [] if restored is None else history[: len(history) - back]
        new = [(run, base + 1 + n) for n in range(made)]
        history += new
        everything |= {*new}
        largest += made
        accepted = {key for key in everything if line.accepts(*key)}
        assert accepted <= {*history}
        if number <= 9:  # later the chain is too short for the oldest
            assert accepted == {*history}
        assert {key for key in history if line.run_of(key[1]) == key[0]} == accepted
        assert line.sane


LINE = Line(C, 1 << 60, tuple(Link(A, (1 << 50) - n) for n in range(8)))


def test_a_record_carries_it_and_older_versions_pass_it_over() -> None:
    record = Record(5, (entry(9), entry(3)), line=LINE)
    data = encode_record(record, STORE, BLOCK)
    assert decode_record(data, STORE) == record
    body_nbytes = HEADER.unpack_from(data)[2]
    plain = encode_record(Record(5, (entry(9), entry(3))), STORE, BLOCK)
    assert data[: HEADER.size + body_nbytes] == plain[: HEADER.size + body_nbytes]  # which is all that they look at


@pytest.mark.parametrize("bit", [0, 40, 70, 100, 800])
def test_a_damaged_line_leaves_the_record(bit: int) -> None:
    record = Record(5, (entry(9), entry(3)), line=LINE)
    data = bytearray(encode_record(record, STORE, BLOCK))
    start = HEADER.size + HEADER.unpack_from(data)[2]
    data[start + bit // 8] ^= 1 << bit % 8
    assert decode_record(data, STORE) == Record(5, (entry(9), entry(3)))


def test_the_line_of_another_record_is_none_of_this_one() -> None:
    one, other = (bytearray(encode_record(Record(n, (entry(9),), line=LINE), STORE, BLOCK)) for n in (5, 7))
    start = HEADER.size + HEADER.unpack_from(one)[2]
    one[start:] = other[start:]  # as a torn write over an older record may leave it
    assert decode_record(one, STORE) == Record(5, (entry(9),))


@pytest.mark.parametrize(
    "line", [Line(b"short", 3), Line(A, -2), Line(A, 3, (Link(B, 3), Link(C, 3))), Line(A, 3, (Link(B, 4),))]
)
def test_no_run_writes_a_line_that_no_reader_accepts(line: Line) -> None:
    with pytest.raises(ValueError, match="no reader would accept"):
        encode_record(Record(5, (entry(9),), line=line), STORE, BLOCK)


def test_a_line_takes_along_only_what_is_on_the_one_before() -> None:
    before = Line(b"b" * 16, 7, (Link(b"a" * 16, 5), Link(b"z" * 16, 2)))
    new = b"n" * 16
    assert Line.begin(None, new, 9, None) == Line(new, 9)
    assert Line.begin(before, new, 9, None) == Line(new, 9)
    assert Line.begin(None, new, 9, Link(b"b" * 16, 8)).chain == (Link(b"b" * 16, 8),)
    assert Line.begin(before, new, 9, Link(b"b" * 16, 8)).chain == (Link(b"b" * 16, 8), *before.chain)
    assert Line.begin(before, new, 9, Link(b"a" * 16, 4)).chain == (Link(b"a" * 16, 4), Link(b"z" * 16, 2))
    assert Line.begin(before, new, 9, Link(b"x" * 16, 8)).chain == (Link(b"x" * 16, 8),)  # of a run without memory
