"""What is known of the bytes in slots: against a model whose slots are arrays, and at its limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pccheck_async.medium import File, Medium
from pccheck_async.store import known_bytes
from pccheck_async.store.known_bytes import IDLE, KnownBytes, SlotLease

PIECE = 4
CHUNKS = ((0, 8), (8, 8), (16, 6))
"""Offsets and lengths; the last piece is shorter."""
SIZE = 32


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_bytes, "PIECE_NBYTES", PIECE)


class Slots:
    """Slots in memory, and the clock of their files."""

    def __init__(self, count: int = 3, *, dated: bool = True) -> None:
        self.files = [File(f"slot-{number:03}", SIZE) for number in range(count)]
        self.bytes = [bytearray(SIZE) for _ in range(count)]
        self.times = [0] * count
        self.dated = dated
        self.written = 0

    def stamp(self, file: File) -> object:
        return self.times[self.files.index(file)] if self.dated else 0

    def write(self, slot: int, offset: int, data: bytes) -> None:
        self.bytes[slot][offset : offset + len(data)] = data
        self.times[slot] += 1
        self.written += len(data)


async def call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def known_of(slots: Slots, **options: Any) -> KnownBytes:
    return KnownBytes(cast(Medium, slots), call, **options)


def save(slots: Slots, known: KnownBytes, slot: int, payload: bytes, chunks: int = 3, end: str = "flush") -> SlotLease:
    """Write the first chunks of a payload, and flush, or end otherwise."""

    async def write() -> SlotLease:
        lease = SlotLease(slot, slots.files[slot])
        known.take(lease)
        for offset, nbytes in CHUNKS[:chunks]:
            data = payload[offset : offset + nbytes]
            for low, high in await known.changed(lease, offset, memoryview(data)):
                slots.write(slot, offset + low, data[low:high])
        return lease

    lease = asyncio.run(write())
    if end != "abort":
        known.note_flushed(lease)
    if end == "torn":
        known.forget(lease)
        slots.write(slot, 0, bytes(PIECE))  # wherever its manifest may have been
        known.note_flushed(lease)
    return lease


PAYLOADS = st.sampled_from([b"a" * 22, b"b" * 22, b"aaaabbbb" * 2 + b"aaaabb"])
ENDS = {"save": ["flush", "flush", "abort", "torn"], "partly": ["abort"]}
OPERATIONS = st.sampled_from(["save", "save", "save", "partly", "small", "foreign", "removed", "latch"]).flatmap(
    lambda kind: st.tuples(st.just(kind), st.integers(0, 1), PAYLOADS, st.sampled_from(ENDS.get(kind, [""])))
)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(OPERATIONS, min_size=3, max_size=20), st.booleans())
def test_a_flushed_slot_holds_what_was_saved(operations: list[tuple[str, int, bytes, str]], dated: bool) -> None:
    slots = Slots(dated=dated)
    known = known_of(slots, lasting=True)
    left_out = 0
    for kind, slot, payload, end in operations:
        match kind:
            case "save":
                lease = save(slots, known, slot, payload, end=end)
                left_out += lease.unchanged_nbytes if end != "abort" else 0
                if end == "flush":
                    assert slots.bytes[slot][: len(payload)] == payload
            case "partly":
                save(slots, known, slot, payload, 2, end=end)
            case "small":  # one chunk, written with its record
                known.take(SlotLease(slot, slots.files[slot]))
                slots.write(slot, 0, payload)
            case "foreign" if dated:
                slots.write(slot, 0, payload)
            case "removed":
                known.forget_slot(slot)
                slots.bytes[slot], slots.times[slot] = bytearray(SIZE), 0
            case "latch":
                known.forget_all()
    assert known.unchanged_nbytes == left_out


def test_only_what_changed_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_bytes, "REWRITTEN", 0)
    slots = Slots()
    known = known_of(slots)
    payload = bytearray(range(22))
    save(slots, known, 0, bytes(payload))
    assert slots.written == 22
    payload[5] = payload[21] = 0
    lease = save(slots, known, 0, bytes(payload))
    assert slots.written == 22 + PIECE + 2, "a piece of the first chunk, and the short one"
    assert lease.unchanged_nbytes == known.unchanged_nbytes == 22 - PIECE - 2
    save(slots, known, 1, bytes(payload))
    assert slots.written == 2 * 22 + PIECE + 2, "another slot"


def test_some_of_it_is_written_again_so_that_rot_does_not_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_bytes, "REWRITTEN", 0.5)
    slots = Slots()
    known = known_of(slots)
    payload = bytes(range(22))
    save(slots, known, 0, payload)
    slots.bytes[0][9] ^= 1  # without a trace
    for _ in range(64):
        save(slots, known, 0, payload)
    assert slots.bytes[0][:22] == payload
    assert 0.3 < (slots.written - 22) / (64 * 22) < 0.7
    assert known.unchanged_nbytes == 65 * 22 - slots.written


@pytest.mark.parametrize("lasting", [False, True])
def test_hashing_ends_where_nothing_ever_matches(lasting: bool) -> None:
    slots = Slots()
    known = known_of(slots, lasting=lasting)
    for number in range(3 + IDLE):
        assert known.is_on
        save(slots, known, number % 3, bytes([number]) * 22)
    assert known.is_on == lasting
    assert save(slots, known, 0, bytes(22)).hashes.keys() == ({*CHUNKS} if lasting else set())


def test_one_match_begins_the_count_anew() -> None:
    slots = Slots()
    known = known_of(slots)
    for number in range(3 * IDLE):
        save(slots, known, 0, bytes(8) + bytes([number]) * 14 if number % 4 else bytes([number]) * 22)
    assert known.is_on


def test_a_medium_that_cannot_tell_changes_ends_it() -> None:
    class Plain(Slots):
        def stamp(self, file: File) -> object:
            return None

    slots = Plain()
    known = known_of(slots, lasting=True)
    save(slots, known, 0, bytes(22))
    assert not known.is_on
    save(slots, known, 0, bytes(22))
    assert slots.written == 44


def test_chunks_with_other_bounds_do_not_match() -> None:
    async def main() -> None:
        for nbytes in (8, 16):
            lease = SlotLease(0, slots.files[0])
            known.take(lease)
            assert await known.changed(lease, 0, memoryview(bytes(nbytes))) == [(0, nbytes)]
            known.note_flushed(lease)

    slots = Slots()
    known = known_of(slots)
    asyncio.run(main())
