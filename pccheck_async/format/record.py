"""The bytes of a store, format version 1.

::

    <folder>/store.json   identity: format, store id, checksum name, block size; written last when a store is created
    <folder>/commit       4 regions of 64 KiB: record copies A0, A1 (even generations), B0, B1 (odd generations)
    <folder>/slot-NNN     one checkpoint each: payload chunks from offset 0, block-aligned, then the manifest

A commit record is written in two copies into the regions of its generation's parity, so the record before it is never
touched:

====== ===== ==========================================================================
offset bytes field (little-endian)
====== ===== ==========================================================================
0      8     magic ``PCCHKREC``
8      4     format version (u32)
12     4     length of the body in bytes (u32)
16     16    store id
32     8     generation (u64), growing with every record: by one; by two after falling back to what only the
             older record names, so that this stays whole
40     4     CRC-32 of bytes 0..40 followed by the body (u32)
44     20    zeros
64     ...   body: MessagePack array of entries, newest first, at most 64; zeros up to a block
====== ===== ==========================================================================

An entry is the array (counter, step, time, payload bytes, slot, manifest offset, manifest length, manifest CRC-32,
pinned, metadata). The manifest is MessagePack too (:mod:`pccheck_async.format.manifest`). Nothing in a store refers to
its own path.

Bytes become values only here, and only validated: a :class:`Record` or an :class:`Identity` exists if every check held.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping

import msgspec
import numpy as np

from pccheck_async.errors import CorruptStoreError, UnsupportedStateError
from pccheck_async.format import checksum
from pccheck_async.format.info import CheckpointInfo

__all__ = [
    "COMMIT_NAME",
    "COMMIT_NBYTES",
    "FORMAT_VERSION",
    "HEADER",
    "IDENTITY_NAME",
    "MAGIC",
    "MOST_ENTRIES",
    "MOST_METADATA_NBYTES",
    "MOST_SLOT",
    "REGION_NBYTES",
    "Entry",
    "Identity",
    "NewerFormatError",
    "Record",
    "align",
    "check_metadata",
    "decode_identity",
    "decode_record",
    "encode_identity",
    "encode_record",
    "entries_before",
    "names_checkpoints",
    "newest_record",
    "rebuild_identity",
    "region_offsets",
    "slot_name",
    "slot_number",
]

FORMAT_VERSION = 1
IDENTITY_NAME = "store.json"
COMMIT_NAME = "commit"
MAGIC = b"PCCHKREC"
HEADER = struct.Struct("<8sII16sQI20x")
_CHECKED_HEADER = struct.Struct("<8sII16sQ")

REGION_NBYTES = 64 * 1024
"""One copy of one record; a multiple of every block size a store may have."""
COMMIT_NBYTES = 4 * REGION_NBYTES
MOST_ENTRIES = 64
MOST_SLOT = 999_999_999
"""The largest number of a slot: a file name has nine digits for it at the most, and others are not found again."""
MOST_METADATA_NBYTES = 512
"""Of one checkpoint, encoded: 64 entries of this size fit into a region."""

_BLOCKS = [REGION_NBYTES >> shift for shift in range(8)]
"""Sizes that a block may have, the largest first; the last is 512 bytes."""
_LARGEST = 1 << 62
_TIMES = (-62_135_596_800, 253_402_300_799)
"""Seconds since the epoch of the years 1 and 9999, between which ``datetime`` knows its way."""

_SLOT_NAME = re.compile(r"slot-(\d{3,9})")


class NewerFormatError(CorruptStoreError):
    """A newer version of this package made the store: it is not damaged, and nothing in it is to be changed."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What ``store.json`` says: it makes a folder a store and never changes."""

    format: int
    store_id: str
    checksum: str
    block_bytes: int

    @property
    def id_bytes(self) -> bytes:
        """The store id as the 16 bytes that stand in every record."""
        return bytes.fromhex(self.store_id)


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One committed checkpoint, as a record names it. Sizes in bytes."""

    counter: int
    step: int
    time: float
    nbytes: int
    slot: int
    manifest_offset: int
    manifest_nbytes: int
    manifest_checksum: int
    pinned: bool
    metadata: dict[str, str | int | float | bool | None]

    @property
    def info(self) -> CheckpointInfo:
        """The part that the user sees."""
        return CheckpointInfo(
            step=self.step,
            counter=self.counter,
            nbytes=self.nbytes,
            time=self.time,
            pinned=self.pinned,
            metadata=dict(self.metadata),
        )


class Record(msgspec.Struct, frozen=True):
    """A validated commit record.

    Attributes:
        generation: Of the record.
        entries: Which checkpoints exist, newest first.
        before: What the record of the other parity names, newest first. Not in the record's bytes.
    """

    generation: int
    entries: tuple[Entry, ...]
    before: tuple[Entry, ...] = ()

    @property
    def superseded(self) -> tuple[Entry, ...]:
        """What :attr:`before` has and this record has not: as long as nobody wrote over them they are there, too.

        Not what is newer than all of :attr:`entries`: that was dropped on purpose.
        """
        newest = max((entry.counter for entry in self.entries), default=-1)
        slots = {entry.slot for entry in self.entries}
        return tuple(entry for entry in self.before if entry.slot not in slots and entry.counter < newest)


_entries_decoder = msgspec.msgpack.Decoder(tuple[Entry, ...])
_metadata_decoder = msgspec.msgpack.Decoder(dict[str, str | int | float | bool | None])
_identity_decoder = msgspec.json.Decoder(Identity)


def align(nbytes: int, block_bytes: int) -> int:
    """Round ``nbytes`` up to a whole number of blocks."""
    return -(-nbytes // block_bytes) * block_bytes


def slot_name(number: int) -> str:
    """Return the file name of a slot."""
    return f"slot-{number:03d}"


def slot_number(name: str) -> int | None:
    """Return the number of the slot with this file name, None where it is no slot's."""
    match = _SLOT_NAME.fullmatch(name)
    return int(match[1]) if match and slot_name(int(match[1])) == name else None


def region_offsets(generation: int) -> tuple[int, int]:
    """Return where the two copies of the record of this generation go in the commit file."""
    first = (generation % 2) * 2 * REGION_NBYTES
    return first, first + REGION_NBYTES


def encode_identity(identity: Identity) -> bytes:
    """Return the bytes of ``store.json``."""
    return msgspec.json.format(msgspec.json.encode(identity), indent=2) + b"\n"


def decode_identity(data: bytes) -> Identity:
    """Validate ``store.json``. Raises CorruptStoreError, also for formats this version does not know."""
    try:
        identity = _identity_decoder.decode(data)
        id_nbytes = len(identity.id_bytes)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptStoreError(f"{IDENTITY_NAME} is damaged: {error}") from None
    if identity.format != FORMAT_VERSION:
        kind = NewerFormatError if identity.format > FORMAT_VERSION else CorruptStoreError
        raise kind(f"{IDENTITY_NAME} says format {identity.format}; this version reads format {FORMAT_VERSION}")
    if identity.checksum != checksum.NAME:
        raise NewerFormatError(f"{IDENTITY_NAME} names checksum {identity.checksum!r}; known: {checksum.NAME!r}")
    block = identity.block_bytes
    if id_nbytes != 16 or not 512 <= block <= REGION_NBYTES or block & (block - 1):
        raise CorruptStoreError(f"{IDENTITY_NAME} is damaged: id of {id_nbytes} bytes, blocks of {block} bytes")
    return identity


def check_metadata(metadata: Mapping[str, object]) -> dict[str, str | int | float | bool | None]:
    """Validate user metadata: names to plain values or NumPy's scalars, small. Raises UnsupportedStateError."""
    try:
        if not isinstance(metadata, Mapping):
            raise TypeError(f"not {type(metadata).__name__}")
        encoded = msgspec.msgpack.encode(dict(metadata), enc_hook=_plain)
        plain = _metadata_decoder.decode(encoded)
    except (TypeError, OverflowError, UnicodeEncodeError, msgspec.MsgspecError) as error:
        raise UnsupportedStateError(
            f"metadata maps str to str, int, float, bool or None ({error}); give a tensor's number as x.item(), "
            "put anything else into the state"
        ) from None
    if len(encoded) > MOST_METADATA_NBYTES:
        raise UnsupportedStateError(
            f"metadata takes {len(encoded)} bytes, at most {MOST_METADATA_NBYTES} fit into the commit record; "
            "put large values into the state"
        )
    return plain


def _plain(value: object) -> object:
    if isinstance(value, np.generic):  # what np.mean() returns
        return value.item()
    raise TypeError(f"{type(value).__qualname__} is none of these")


def encode_record(record: Record, store_id: bytes, block_bytes: int) -> bytes:
    """Return one copy of a record, padded to whole blocks."""
    if len(record.entries) > MOST_ENTRIES:
        raise ValueError(f"{len(record.entries)} checkpoints, a record holds at most {MOST_ENTRIES}")
    if not _sane(record):
        raise ValueError(
            "counters fall, slots differ, none is negative or too large, times are in a calendar: "
            "no reader would accept this record"
        )
    body = msgspec.msgpack.encode(record.entries)
    checked = _CHECKED_HEADER.pack(MAGIC, FORMAT_VERSION, len(body), store_id, record.generation)
    value = checksum.crc32(body, checksum.crc32(checked))
    data = HEADER.pack(MAGIC, FORMAT_VERSION, len(body), store_id, record.generation, value) + body
    padded = align(len(data), block_bytes)
    if padded > REGION_NBYTES:
        raise ValueError(f"the record takes {padded} bytes, its region has {REGION_NBYTES}")
    return data.ljust(padded, b"\0")


def decode_record(region: bytes | bytearray | memoryview, store_id: bytes) -> Record | None:
    """Validate one copy of a record; None where it is empty, torn, damaged or of another store."""
    if len(region) < HEADER.size:
        return None
    magic, version, body_nbytes, found_id, generation, value = HEADER.unpack_from(region)
    if magic != MAGIC or version != FORMAT_VERSION or found_id != store_id:
        return None
    body = bytes(region[HEADER.size : HEADER.size + body_nbytes])
    checked = bytes(region[: _CHECKED_HEADER.size])
    if (
        any(region[_CHECKED_HEADER.size + 4 : HEADER.size])
        or len(body) != body_nbytes
        or checksum.crc32(body, checksum.crc32(checked)) != value
    ):
        return None
    try:
        entries = _entries_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    record = Record(generation, entries)
    return record if _sane(record) else None


def newest_record(commit: bytes | bytearray | memoryview, store_id: bytes) -> Record | None:
    """Return the valid record of the highest generation in a commit file, None where there is none."""
    found = (
        decode_record(commit[start : start + REGION_NBYTES], store_id)
        for start in range(0, COMMIT_NBYTES, REGION_NBYTES)
    )
    return max((r for r in found if r is not None), key=lambda record: record.generation, default=None)


def entries_before(commit: bytes | bytearray | memoryview, store_id: bytes, newest: Record) -> tuple[Entry, ...]:
    """Return what the record of the other parity than the newest names; nothing where it has no valid copy."""
    regions = (commit[start : start + REGION_NBYTES] for start in region_offsets(newest.generation + 1))
    others = [record for region in regions if (record := decode_record(region, store_id)) is not None]
    return max(others, key=lambda record: record.generation).entries if others else ()


def rebuild_identity(commit: bytes | bytearray | memoryview) -> tuple[Identity, Record] | None:
    """Return what ``store.json`` said, as far as a commit file tells, and the newest record; None where none is valid.

    Every offset in the store is a multiple of the block size, which no record names: the largest is returned for which
    that holds, so that whatever is written with it is aligned to the true one, too.
    """
    found: dict[bytes, list[Record]] = {}
    for start in range(0, min(len(commit), COMMIT_NBYTES) - HEADER.size, REGION_NBYTES):
        store_id: bytes = HEADER.unpack_from(commit, start)[3]
        if (record := decode_record(commit[start : start + REGION_NBYTES], store_id)) is not None:
            found.setdefault(store_id, []).append(record)
    if not found:
        return None
    store_id, records = max(found.items(), key=lambda one: max(record.generation for record in one[1]))
    offsets = [entry.manifest_offset for record in records for entry in record.entries]
    block_bytes = next(block for block in _BLOCKS if not any(offset % block for offset in offsets) or block == 512)
    newest = max(records, key=lambda record: record.generation)
    return Identity(
        format=FORMAT_VERSION, store_id=store_id.hex(), checksum=checksum.NAME, block_bytes=block_bytes
    ), newest


def names_checkpoints(commit: bytes | bytearray | memoryview) -> bool:
    """Whether a commit file without its ``store.json`` seems to name checkpoints, of whatever store."""
    for start in range(0, min(len(commit), COMMIT_NBYTES) - HEADER.size, REGION_NBYTES):
        magic, _, _, _, generation, _ = HEADER.unpack_from(commit, start)
        if magic == MAGIC and generation > 0:
            return True
    return False


def _sane(record: Record) -> bool:
    """Whether a writer may have come to these numbers by counting, and a calendar to these times."""
    counters: list[int] = []
    slots: set[int] = set()
    for entry in record.entries:
        sizes = (entry.counter, entry.nbytes, entry.slot, entry.manifest_offset, entry.manifest_nbytes)
        if (
            min(sizes) < 0
            or entry.counter > _LARGEST
            or entry.slot > MOST_SLOT
            or entry.slot in slots
            or (counters and entry.counter >= counters[-1])
            or not _TIMES[0] <= entry.time <= _TIMES[1]
        ):
            return False
        counters.append(entry.counter)
        slots.add(entry.slot)
    return len(counters) <= MOST_ENTRIES and record.generation <= _LARGEST
