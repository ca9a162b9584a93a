from __future__ import annotations

import math
import re
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from uuid import UUID

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pccheck_async.errors import CorruptStoreError, UnsupportedStateError
from pccheck_async.format import Applied, Entry, Identity, Key, Membership, Parts, Record, Run, checksum
from pccheck_async.format import record as layout
from pccheck_async.format.record import (
    COMMIT_NBYTES,
    FORMAT_VERSION,
    GROUP_VERSION,
    HEADER,
    MAGIC,
    MOST_ENTRIES,
    MOST_METADATA_NBYTES,
    REGION_NBYTES,
    decode_record,
    encode_record,
    entries_before,
)

STORE = bytes(range(16))
BLOCK = 4096


def entry(counter: int, *, slot: int | None = None, metadata: dict[str, object] | None = None) -> Entry:
    return Entry(
        counter=counter,
        step=counter * 10,
        time=1.5,
        nbytes=4096,
        slot=counter if slot is None else slot,
        manifest_offset=4096,
        manifest_nbytes=100,
        manifest_checksum=7,
        pinned=False,
        metadata=metadata or {},  # type: ignore[arg-type]
    )


def commit_file(*records: Record) -> bytearray:
    image = bytearray(COMMIT_NBYTES)
    for record in records:
        data = layout.encode_record(record, STORE, BLOCK)
        for offset in layout.region_offsets(record.generation):
            image[offset : offset + len(data)] = data
    return image


def test_record_round_trip() -> None:
    record = Record(5, (entry(9, metadata={"loss": float("inf"), "name": "ü", "n": None}), entry(3)))
    assert layout.decode_record(layout.encode_record(record, STORE, BLOCK), STORE) == record


def test_the_record_of_a_rank_round_trip() -> None:
    run = Run(3, (1 << 64) - 1, 7)
    parts = Parts(Applied(run, 12, (Key(9, run),)), tuple(Membership(run, 1, 4, n == 1) for n in range(2)))
    record = Record(5, (entry(9), entry(3)), (), parts)
    data = layout.encode_record(record, STORE, BLOCK)
    assert layout.decode_record(data, STORE) == record
    assert HEADER.unpack_from(data)[1] == GROUP_VERSION
    for memberships in ((), parts.memberships[:1]):
        with pytest.raises(ValueError, match="no reader would accept"):
            layout.encode_record(replace(record, parts=Parts(None, memberships)), STORE, BLOCK)


def test_the_largest_record_of_a_rank_fits_its_region() -> None:
    run = Run(1 << 40, (1 << 64) - 1, (1 << 64) - 1)
    made = (entry(1 << 40 | n, slot=n, metadata={"m": "x" * 508}) for n in reversed(range(MOST_ENTRIES)))
    entries = tuple(each.as_rejected() for each in made)
    pinned = tuple(Key(each.counter, run) for each in entries)
    parts = Parts(Applied(run, 1 << 60, pinned), (Membership(run, (1 << 20) - 1, 1 << 20, True),) * MOST_ENTRIES)
    record = Record(1 << 60, entries, (), parts)
    assert layout.decode_record(layout.encode_record(record, STORE, BLOCK), STORE) == record


def test_the_largest_record_fits_its_region() -> None:
    metadata = layout.check_metadata({"k": "x" * (MOST_METADATA_NBYTES - 10)})
    entries = tuple(
        msgspec.structs.replace(
            entry(2**62 - n, slot=999_999_999 - n, metadata=dict(metadata)),
            step=-(2**62),
            nbytes=2**62,
            manifest_offset=2**62,
            manifest_nbytes=2**62,
            manifest_checksum=2**32 - 1,
        ).as_rejected()
        for n in range(MOST_ENTRIES)
    )
    data = layout.encode_record(Record(2**60, entries), STORE, REGION_NBYTES)
    assert len(data) <= REGION_NBYTES
    decoded = layout.decode_record(data, STORE)
    assert decoded is not None
    assert decoded.entries == entries


def test_too_many_entries_are_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        layout.encode_record(Record(1, tuple(entry(99 - n) for n in range(MOST_ENTRIES + 1))), STORE, BLOCK)


@given(st.data())
def test_no_damaged_byte_goes_unnoticed(data: st.DataObject) -> None:
    record = Record(5, (entry(9, metadata={"loss": 0.5}), entry(3)))
    image = bytearray(layout.encode_record(record, STORE, BLOCK))
    used = HEADER.size + int.from_bytes(image[12:16], "little")
    position = data.draw(st.integers(0, used - 1))
    image[position] ^= data.draw(st.integers(1, 255))
    assert layout.decode_record(image, STORE) is None


@given(st.binary(max_size=300))
def test_garbage_is_no_record(garbage: bytes) -> None:
    assert layout.decode_record(garbage, STORE) is None
    assert layout.decode_record(layout.MAGIC + garbage, STORE) is None


def test_a_record_of_another_store_is_none() -> None:
    assert layout.decode_record(layout.encode_record(Record(1, ()), STORE, BLOCK), bytes(16)) is None


@pytest.mark.parametrize(
    "record",
    [
        *(
            Record(1, entries)
            for entries in (
                (entry(3), entry(9)),
                (entry(3), entry(3)),
                (entry(9, slot=1), entry(3, slot=1)),
                (msgspec.structs.replace(entry(3), manifest_offset=-1),),
                (msgspec.structs.replace(entry(3), counter=2**62 + 1),),
            )
        ),
        *(Record(1, (msgspec.structs.replace(entry(3), time=time),)) for time in (math.nan, math.inf, 1e15, -1e12)),
        Record(2**62 + 1, ()),
        Record(2**64 - 1, ()),
    ],
    ids=lambda record: str(record)[:60],
)
def test_impossible_records_are_neither_written_nor_read(record: Record) -> None:
    """Numbers nobody counts to, too: the next record could not be written, or ``CheckpointInfo.created`` would fail."""
    with pytest.raises(ValueError, match="no reader would accept"):
        encode_record(record, STORE, BLOCK)
    assert decode_record(unchecked(record), STORE) is None
    assert decode_record(unchecked(Record(1, (entry(9), entry(3)))), STORE) is not None


def unchecked(record: Record) -> bytes:
    """A record as the format has it, whatever it says."""
    body = msgspec.msgpack.encode(record.entries)
    header = [MAGIC, FORMAT_VERSION, len(body), STORE, record.generation]
    value = checksum.crc32(body, checksum.crc32(HEADER.pack(*header, 0)[:40]))
    return HEADER.pack(*header, value) + body


def test_newest_valid_record_decides() -> None:
    older, newer = Record(4, (entry(1),)), Record(5, (entry(2),))
    image = commit_file(older, newer)
    assert layout.newest_record(image, STORE) == newer
    first, second = layout.region_offsets(5)
    image[first + 70] ^= 1
    assert layout.newest_record(image, STORE) == newer
    image[second + 70] ^= 1
    assert layout.newest_record(image, STORE) == older
    for offset in layout.region_offsets(4):
        image[offset] ^= 1
    assert layout.newest_record(image, STORE) is None


def test_generations_alternate_and_copies_do_not_overlap() -> None:
    regions = [*layout.region_offsets(6), *layout.region_offsets(7)]
    assert sorted(regions) == [n * REGION_NBYTES for n in range(4)]
    assert layout.region_offsets(6) == layout.region_offsets(8)


def test_identity_round_trip() -> None:
    identity = Identity(format=1, store_id=STORE.hex(), checksum="crc32", block_bytes=4096)
    assert layout.decode_identity(layout.encode_identity(identity)) == identity
    assert identity.id_bytes == STORE


@pytest.mark.parametrize(
    "change",
    [
        {"format": 3},
        {"store_id": "zz"},
        {"store_id": "00"},
        {"checksum": "md5"},
        {"block_bytes": 4097},
        {"block_bytes": 0},
        {"block_bytes": -4096},
        {"block_bytes": 1 << 40},
    ],
)
def test_bad_identity_is_refused(change: dict[str, object]) -> None:
    fields = {"format": 1, "store_id": STORE.hex(), "checksum": "crc32", "block_bytes": 4096} | change
    with pytest.raises(CorruptStoreError):
        layout.decode_identity(msgspec.json.encode(fields))


@pytest.mark.parametrize("data", [b"", b"{}", b"[" * 100_000, b"\xff\xfe", b'{"format": "1"}'])
def test_garbage_identity_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptStoreError):
        layout.decode_identity(data)


class Color(Enum):
    RED = "red"


@pytest.mark.parametrize(
    "metadata",
    [
        {"a": [1]},
        {"a": b"x"},
        {1: "a"},
        {"a": object()},
        {"a": "x" * 1000},
        {"a": 2**70},
        {"\ud800": 1},
        {"a": np.zeros(1)},
        {"a": np.complex64(1)},
        {"a": np.longdouble(1)},
        {"a": np.datetime64("2024-05-01")},
        {"a": UUID(int=1)},
        {"a": Decimal("1.5")},
        {"a": date(2024, 5, 1)},
        {"a": datetime(2024, 5, 1)},
        {"a": timedelta(1)},
        {"a": Color.RED},
        {Color.RED: 1},
        {0: 1},
    ],
)
def test_bad_metadata_is_refused(metadata: dict[str, object]) -> None:
    with pytest.raises(UnsupportedStateError, match="metadata"):
        layout.check_metadata(metadata)


def test_metadata_of_numpys_scalars() -> None:
    given = {"a": np.mean([1.0, 2.0]), "b": np.float32(0.5), "c": np.int64(7), "d": np.bool_(True), "e": np.str_("x")}
    plain = layout.check_metadata(given)
    assert plain == {"a": 1.5, "b": 0.5, "c": 7, "d": True, "e": "x"}
    assert [type(value) for value in plain.values()] == [float, float, int, bool, str]


def test_slot_names() -> None:
    assert [layout.slot_name(n) for n in (0, 42, 12345)] == ["slot-000", "slot-042", "slot-12345"]
    assert all(layout.slot_number(layout.slot_name(n)) == n for n in (0, 7, 999, 1000, 123456))
    assert [layout.slot_number(n) for n in ("slot-", "slot-1", "slot-0001", "slot-abc", "commit", "slot-001.tmp")] == [
        None
    ] * 6


def test_the_documented_table_is_the_header() -> None:
    """The guide and the docstring show the same table, and it says what the struct does."""
    expected = [(0, 8), (8, 4), (12, 4), (16, 16), (32, 8), (40, 4), (44, 20)]
    row = re.compile(r"^(\d+)\s+(\d+)\s", re.MULTILINE)
    assert [(int(a), int(b)) for a, b in row.findall(layout.__doc__ or "")] == expected
    page = (Path(__file__).parents[2] / "examples" / "guide" / "storage.md").read_text()
    section = page[page.index("<!-- format -->") : page.index("<!-- /format -->")]
    assert [(int(a), int(b)) for a, b in re.findall(r"^\| (\d+) \| (\d+) \|", section, re.MULTILINE)] == expected
    assert sum(size for _, size in expected) == HEADER.size


def test_a_record_of_another_format_is_none() -> None:
    store_id = bytes(range(16))
    data = bytearray(encode_record(Record(3, ()), store_id, 4096))
    _, _, nbytes, _, generation, _ = HEADER.unpack_from(data)
    for version in (FORMAT_VERSION, GROUP_VERSION + 1):
        HEADER.pack_into(data, 0, MAGIC, version, nbytes, store_id, generation, 0)
        value = checksum.crc32(data[HEADER.size : HEADER.size + nbytes], checksum.crc32(data[:40]))
        HEADER.pack_into(data, 0, MAGIC, version, nbytes, store_id, generation, value)
        assert (decode_record(data, store_id) is None) is (version != FORMAT_VERSION)


@pytest.mark.parametrize("copy", range(4))
def test_any_copy_of_a_record_tells_that_there_are_checkpoints(copy: int) -> None:
    image = commit_file(layout.Record(1, (entry(3),)), layout.Record(2, (entry(3),)))
    for region in set(range(4)) - {copy}:
        image[region * REGION_NBYTES : (region + 1) * REGION_NBYTES] = bytes(REGION_NBYTES)
    assert layout.names_checkpoints(bytes(image))


def test_a_commit_file_that_is_cut_off_after_a_header_still_tells_that_there_are_checkpoints() -> None:
    image = commit_file(layout.Record(1, ()), layout.Record(2, (entry(3),)))
    assert layout.names_checkpoints(bytes(image[: HEADER.size]))
    assert not layout.names_checkpoints(bytes(image[: HEADER.size - 1]))


@given(st.sampled_from([512, 4096, 65536]), st.lists(st.integers(0, 40), max_size=4))
def test_what_is_written_with_a_rebuilt_identity_fits_the_true_one(block: int, ends: list[int]) -> None:
    entries = [
        msgspec.structs.replace(entry(9 - number, slot=number), manifest_offset=end * block)
        for number, end in enumerate(ends)
    ]
    image = commit_file(Record(4, tuple(entries[1:])), Record(5, tuple(entries)))
    rebuilt = layout.rebuild_identity(image)
    assert rebuilt is not None
    identity, record = rebuilt
    assert layout.decode_identity(layout.encode_identity(identity)) == identity
    assert (identity.id_bytes, record.generation) == (STORE, 5)
    assert identity.block_bytes % block == 0
    assert not any(one.manifest_offset % identity.block_bytes for one in entries)


@pytest.mark.parametrize("newest", [4, 5])
def test_remains_of_another_store_do_not_decide_which_one_is_rebuilt(newest: int) -> None:
    """A file system may have put them there; the store whose record is the newest is the one that was written last."""
    other = bytes(reversed(STORE))
    image = bytearray(commit_file(Record(4, (entry(1),)), Record(5, (entry(2),))))
    for offset in layout.region_offsets(9 - newest):
        older = layout.encode_record(Record(9 - newest - 4, ()), other, BLOCK)
        image[offset : offset + REGION_NBYTES] = older.ljust(REGION_NBYTES, b"\0")
    rebuilt = layout.rebuild_identity(bytes(image))
    assert rebuilt is not None
    identity, record = rebuilt
    assert (identity.id_bytes, record.generation) == (STORE, newest)


def test_nothing_is_rebuilt_without_a_record() -> None:
    assert layout.rebuild_identity(bytes(COMMIT_NBYTES)) is None
    assert layout.rebuild_identity(b"") is None


@pytest.mark.parametrize(
    ("named", "before", "superseded"),
    [
        ([(5, 0)], [(4, 1)], [4]),
        ([(5, 0)], [(4, 0)], []),  # written over
        ([(5, 0), (3, 2)], [(4, 1), (3, 2)], [4]),
        ([(3, 2)], [(4, 1), (3, 2)], []),  # removed, and newer than what was kept
        ([], [(4, 1)], []),
    ],
)
def test_what_a_record_superseded(
    named: list[tuple[int, int]], before: list[tuple[int, int]], superseded: list[int]
) -> None:
    older, newer = ([entry(counter, slot=slot) for counter, slot in pairs] for pairs in (before, named))
    image = commit_file(Record(4, tuple(older)), Record(5, tuple(newer)))
    newest = layout.newest_record(image, STORE)
    assert newest is not None
    newest = replace(newest, before=entries_before(image, STORE, newest))
    assert [one.counter for one in newest.superseded] == superseded
