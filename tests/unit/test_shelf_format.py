"""The bytes of a shelf, and which of its pages are free."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccheck_async.errors import CorruptStoreError
from pccheck_async.shelf import format as layout
from pccheck_async.shelf.format import Extent, Header, Root
from pccheck_async.shelf.space import Space

PAGE = 4096
HEADER = Header(PAGE, bytes(range(16)))


def head(*roots: Root) -> bytes:
    data = bytearray(3 * PAGE)
    data[: layout.HEADER.size] = HEADER.encode()
    for root in roots:
        place = HEADER.place(root.sequence)
        data[place : place + layout.ROOT.size] = root.encode(HEADER)
    return bytes(data)


def root(sequence: int, nbytes: int = 8 * PAGE, offset: int = 3 * PAGE, length: int = 10) -> Root:
    return Root(sequence, nbytes, Extent(offset, length), 5)


def test_a_root_fills_a_cache_line() -> None:
    assert layout.ROOT.size == 64
    assert layout.HEADER.size < 64


def test_header_and_roots_come_back() -> None:
    assert layout.decode_header(HEADER.encode()) == HEADER
    for newest in (root(7), root(8)):
        older = root(newest.sequence - 1, offset=5 * PAGE)
        assert layout.newest_root(HEADER, head(older, newest), 8 * PAGE) == newest


@given(st.integers(0, 63), st.integers(1, 255))
def test_a_changed_root_is_none(byte: int, change: int) -> None:
    data = bytearray(head(root(7), root(8)))
    data[HEADER.place(8) + byte] ^= change
    assert layout.newest_root(HEADER, bytes(data), 8 * PAGE) == root(7)


@given(st.integers(0, layout.HEADER.size - 1), st.integers(1, 255))
def test_a_changed_header_is_refused(byte: int, change: int) -> None:
    data = bytearray(HEADER.encode())
    data[byte] ^= change
    with pytest.raises(CorruptStoreError):
        layout.decode_header(bytes(data))


def test_a_root_of_another_shelf_is_none() -> None:
    with pytest.raises(CorruptStoreError, match="both roots"):
        layout.newest_root(Header(PAGE, bytes(16)), head(root(7), root(8)), 8 * PAGE)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (root(7, nbytes=8 * PAGE + 1), "a size of"),
        (root(7, nbytes=2 * PAGE), "a size of"),
        (root(7, nbytes=9 * PAGE), "truncated"),
        (root(7, length=1 << 40), "a directory of"),
        (root(7, offset=2 * PAGE), "where they cannot be"),
        (root(7, offset=3 * PAGE + 1), "where they cannot be"),
        (root(7, offset=8 * PAGE), "where they cannot be"),
        (root(7, offset=7 * PAGE, length=PAGE + 1), "where they cannot be"),
        (root(7, offset=(1 << 64) - PAGE), "where they cannot be"),
    ],
)
def test_an_impossible_root_is_refused(bad: Root, message: str) -> None:
    with pytest.raises(CorruptStoreError, match=re.escape(message)):
        layout.newest_root(HEADER, head(bad), 8 * PAGE)


def test_extents_that_overlap_are_refused() -> None:
    layout.check_extents(HEADER, root(1), [Extent(4 * PAGE, PAGE), Extent(3 * PAGE, PAGE), Extent(), Extent()])
    with pytest.raises(CorruptStoreError, match="where they cannot be"):
        layout.check_extents(HEADER, root(1), [Extent(4 * PAGE, PAGE), Extent(3 * PAGE, 2 * PAGE)])


@pytest.mark.slow
@given(st.data())
def test_space_is_given_out_once_and_comes_back(data: st.DataObject) -> None:
    space = Space(3, 40)
    taken: list[Extent] = []
    for _ in range(data.draw(st.integers(1, 30))):
        if data.draw(st.booleans()) and taken:
            space.give(taken.pop(data.draw(st.integers(0, len(taken) - 1))))
        else:
            extent = space.take(data.draw(st.integers(1, 12)))
            if extent is not None:
                taken.append(extent)
        pages = [page for extent in taken for page in range(extent.offset, extent.end)]
        assert len(pages) == len(set(pages))
        assert all(3 <= page < 40 for page in pages)
        assert space.free_bytes == 37 - len(pages)
        assert vars(space) == vars(Space(3, 40, taken))  # joined, and as a reader would find it
    for extent in taken:
        space.give(extent)
    assert space.largest == space.free_bytes == 37


def test_space_that_is_free_is_not_given_back() -> None:
    space = Space(0, 10)
    extent = space.take(4)
    assert extent is not None
    space.give(extent)
    for wrong in (extent, Extent(2, 1), Extent(9, 3)):
        with pytest.raises(ValueError, match="free already"):
            space.give(wrong)


def test_the_smallest_range_that_has_room_is_taken() -> None:
    space = Space(0, 100, [Extent(10, 10), Extent(25, 5)])
    assert space.take(5) == Extent(20, 5)
    assert space.take(5) == Extent(0, 5)
    assert space.take(80) is None
    assert space.take_last(10) == Extent(90, 10)
    assert space.take(0) == Extent()
