# SPDX-License-Identifier: Apache-2.0
"""The files of a store and the commit record, format versions 1 and 2.

::

    <folder>/store.json   identity: format, store id, checksum name, block size; written last when a store is created
    <folder>/commit       4 regions of 64 KiB: record copies A0, A1 (even generations), B0, B1 (odd generations)
    <folder>/slot-NNN     one checkpoint each: payload chunks from offset 0, block-aligned, then the manifest

A commit record names the committed checkpoints. It is written in two copies into the regions of its generation's
parity, so that writing it never touches the record before it. Any valid copy makes a record valid, and the valid record
of the highest generation decides. A copy is:

====== ===== ==========================================================================
offset bytes field (little-endian)
====== ===== ==========================================================================
0      8     magic ``PCCHKREC``
8      4     format version (u32)
12     4     length of the body in bytes (u32)
16     16    store id
32     8     generation (u64), growing with every record: by one; by two after a fall back to a checkpoint that
             only the older record names, so that the older record is not overwritten
40     4     CRC-32 of bytes 0..40 followed by the body (u32)
44     20    zeros
64     ...   body: MessagePack array of entries, newest first, at most 64
...    ...   the line, if the store has a tier in memory (:mod:`pccheck_async.format.line`): magic
             ``LINE``, length (u32), CRC-32 seeded by that of the record (u32), and as many bytes
             of MessagePack. Versions that do not know it pass it over; zeros up to a block
====== ===== ==========================================================================

An entry is a MessagePack array of the fields of :class:`Entry` in their order: counter, step, time, payload bytes,
slot, manifest offset, manifest length, manifest CRC-32, pinned, metadata. The metadata also have the checkpoint's name,
as ``pccheck.name``, and the mark of a rejected one, ``pccheck.rejected``. In version 2, for the store of one rank of a
group, the body is an array of that array and :class:`pccheck_async.format.parts.Parts`. The manifest is MessagePack,
too (:mod:`pccheck_async.format.manifest`). Nothing in a store refers to its own path.

Bytes from storage become a :class:`Record` or an :class:`Identity` in this module only, and only if every check holds.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import attrgetter
from types import NoneType
from typing import Any

import msgspec
from msgspec.structs import replace

from pccheck_async.errors import CorruptStoreError, NewerFormatError, UnsupportedStateError
from pccheck_async.format import checksum
from pccheck_async.format.arguments import matches
from pccheck_async.format.info import CheckpointInfo, Metadata, Which
from pccheck_async.format.line import Line
from pccheck_async.format.parts import Parts

FORMAT_VERSION = 1
GROUP_VERSION = 2
"""Format version of the store of one rank of a group."""
IDENTITY_NAME = "store.json"
COMMIT_NAME = "commit"
GROUP_NAME = "group.json"
"""The file that marks the folder of a group; the stores of its ranks are folders in it."""
MAGIC = b"PCCHKREC"
HEADER = struct.Struct("<8sII16sQI20x")
_CHECKED_HEADER = struct.Struct("<8sII16sQ")
_LINE = struct.Struct("<4sII")
_LINE_MAGIC = b"LINE"

MIN_BLOCK = 512
"""The smallest block size, in bytes. The length of every chunk is a multiple of it, for any block size of the store."""
REGION_NBYTES = 64 * 1024
"""Space for one copy of one record; a multiple of every block size a store may have."""
COMMIT_NBYTES = 4 * REGION_NBYTES
MOST_ENTRIES = 64
MOST_SLOT = 999_999_999
"""The largest number of a slot: its file name has at most nine digits."""
MOST_RANKS = 1_000_000_000
"""The largest world size: the name of a rank's folder has at most nine digits."""
MOST_METADATA_NBYTES = 512
"""Most bytes of one checkpoint's encoded metadata: 64 entries of this size fit into a region."""
NAME_KEY = "pccheck.name"
"""Metadata key of a checkpoint's name. So version 1 has names, too, and readers that do not know names keep them."""
REJECTED_KEY = "pccheck.rejected"
"""Metadata key, True for a rejected checkpoint; older versions ignore the key, and restore the checkpoint."""
_OWN_KEYS = {NAME_KEY: "where checkpoint(name=...) is kept", REJECTED_KEY: "what engine.reject() sets"}

_LARGEST = 1 << 62
_TIMES = (-62_135_596_800, 253_402_300_799)
"""Seconds since the epoch of the years 1 and 9999, the range of ``datetime``."""
_PLAIN = (str, int, float, bool, NoneType)
_generation = attrgetter("generation")
_SLOT_NAME = re.compile(r"slot-(\d{3,9})")
_DOMAIN = re.compile(r"[0-9a-f]{32}")


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``store.json``, which makes a folder a store and never changes."""

    format: int
    store_id: str
    checksum: str
    block_bytes: int

    @property
    def id_bytes(self) -> bytes:
        """The store id as the 16 bytes in every record."""
        return bytes.fromhex(self.store_id)


class Domain(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``group.json``: the id of a filesystem, the same for all ranks that see this file."""

    format: int
    domain: str


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A committed checkpoint in a record. Offsets and sizes in bytes."""

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
    def name(self) -> str | None:
        """The user's name for the checkpoint."""
        return name_in(self.metadata)

    @property
    def rejected(self) -> bool:
        """Whether restores pass the checkpoint over, and no rule keeps it."""
        return self.metadata.get(REJECTED_KEY) is True

    def as_rejected(self) -> Entry:
        """Return the entry, marked as rejected."""
        return self if self.rejected else replace(self, metadata=self.metadata | {REJECTED_KEY: True})

    def marked_as(self, other: Entry) -> Entry:
        """Return the entry, pinned if and only if ``other`` is, and marked as rejected if ``other`` is."""
        marked = self if self.pinned == other.pinned else replace(self, pinned=other.pinned)
        return marked.as_rejected() if other.rejected else marked

    @property
    def info(self) -> CheckpointInfo:
        """The public description of the checkpoint."""
        metadata, name, rejected = dict(self.metadata), None, False
        if metadata:
            name, rejected = self.name, self.rejected
        if name is not None:
            del metadata[NAME_KEY]
        if rejected:
            del metadata[REJECTED_KEY]
        return CheckpointInfo(self.step, self.counter, self.nbytes, self.time, self.pinned, metadata, name, rejected)

    def matches(self, which: Which) -> bool:
        """Whether this entry matches the requested step or name."""
        return matches(which, self.step, self.name)


class Record(msgspec.Struct, frozen=True):
    """A validated commit record."""

    generation: int
    entries: tuple[Entry, ...]
    """The committed checkpoints, newest first."""
    before: tuple[Entry, ...] = ()
    """The entries of the record before this one, newest first; not part of this record's bytes."""
    parts: Parts | None = None
    """The group's fields in the record of one rank; None in the store of one process."""
    line: Line | None = None
    """The line that decides which checkpoints in memory are valid; None: none is."""

    @property
    def version(self) -> int:
        """The format version of the record's bytes."""
        return FORMAT_VERSION if self.parts is None else GROUP_VERSION

    @property
    def superseded(self) -> tuple[Entry, ...]:
        """Checkpoints of :attr:`before` that this record does not name, which are readable until they are overwritten.

        Checkpoints newer than all of :attr:`entries` are left out: they were removed on purpose.
        """
        newest = max((entry.counter for entry in self.entries), default=-1)
        slots = {entry.slot for entry in self.entries}
        return tuple(entry for entry in self.before if entry.slot not in slots and entry.counter < newest)


_decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {
    FORMAT_VERSION: msgspec.msgpack.Decoder(tuple[Entry, ...]),
    GROUP_VERSION: msgspec.msgpack.Decoder(tuple[tuple[Entry, ...], Parts]),
}
_metadata_decoder = msgspec.msgpack.Decoder(dict[str, str | int | float | bool | None])
_line_decoder = msgspec.msgpack.Decoder(Line)
_identity_decoder = msgspec.json.Decoder(Identity)
_domain_decoder = msgspec.json.Decoder(Domain)


def align(nbytes: int, block_bytes: int) -> int:
    """Round ``nbytes`` up to a whole number of blocks."""
    return -(-nbytes // block_bytes) * block_bytes


def slot_name(number: int) -> str:
    """Return the file name of a slot."""
    return f"slot-{number:03d}"


def slot_number(name: str) -> int | None:
    """Return the number in a slot's file name; None for any other name."""
    match = _SLOT_NAME.fullmatch(name)
    return int(match[1]) if match and slot_name(int(match[1])) == name else None


def region_offsets(generation: int) -> tuple[int, int]:
    """Return the offsets in the commit file of the two copies of the record of this generation."""
    first = (generation % 2) * 2 * REGION_NBYTES
    return first, first + REGION_NBYTES


def encode_identity(identity: Identity) -> bytes:
    """Return the bytes of ``store.json``."""
    return msgspec.json.format(msgspec.json.encode(identity), indent=2) + b"\n"


def decode_identity(data: bytes) -> Identity:
    """Decode and check ``store.json``. Raises CorruptStoreError; NewerFormatError if only newer versions read it."""
    try:
        identity = _identity_decoder.decode(data)
        id_nbytes = len(identity.id_bytes)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptStoreError(f"{IDENTITY_NAME} is damaged ({error})") from None
    if identity.format not in (FORMAT_VERSION, GROUP_VERSION):
        kind = NewerFormatError if identity.format > GROUP_VERSION else CorruptStoreError
        raise kind(
            f"{IDENTITY_NAME} says format {identity.format}; this version reads formats {FORMAT_VERSION} and "
            f"{GROUP_VERSION}"
        )
    if identity.checksum != checksum.NAME:
        raise NewerFormatError(f"{IDENTITY_NAME} names checksum {identity.checksum!r}; known: {checksum.NAME!r}")
    block = identity.block_bytes
    if id_nbytes != 16 or not MIN_BLOCK <= block <= REGION_NBYTES or block & (block - 1):
        raise CorruptStoreError(f"{IDENTITY_NAME} is damaged: id of {id_nbytes} bytes, blocks of {block} bytes")
    return identity


def encode_domain(domain: str) -> bytes:
    """Return the bytes of ``group.json``."""
    return msgspec.json.encode(Domain(format=GROUP_VERSION, domain=domain)) + b"\n"


def decode_domain(data: bytes) -> str:
    """Return the id in ``group.json``. Raises CorruptStoreError; NewerFormatError if only newer versions read it."""
    try:
        found = _domain_decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptStoreError(f"{GROUP_NAME} is damaged: {error}") from None
    if found.format != GROUP_VERSION:
        kind = NewerFormatError if found.format > GROUP_VERSION else CorruptStoreError
        raise kind(f"{GROUP_NAME} says format {found.format}; this version reads format {GROUP_VERSION}")
    if _DOMAIN.fullmatch(found.domain) is None:
        raise CorruptStoreError(f"{GROUP_NAME} is damaged: its id is no number of 32 hexadecimal digits")
    return found.domain


def name_in(metadata: Metadata) -> str | None:
    """Return the name of the checkpoint that has this metadata, None for none."""
    name = metadata.get(NAME_KEY)
    return name if isinstance(name, str) else None


def check_metadata(
    metadata: Mapping[str, object], name: str | None = None
) -> dict[str, str | int | float | bool | None]:
    """Return user metadata (names to plain values or numpy scalars) as plain values, with the checkpoint's name in it.

    Raises UnsupportedStateError: some value is of another type, a key is reserved (:data:`NAME_KEY`,
    :data:`REJECTED_KEY`), or all together exceed 512 bytes encoded.
    """
    try:
        if not isinstance(metadata, Mapping):
            raise TypeError(f"not {type(metadata).__name__}")
        if own := [key for key in _OWN_KEYS if key in metadata]:
            raise TypeError(f"{own[0]!r} is {_OWN_KEYS[own[0]]}")
        if strange := [key for key in metadata if not isinstance(key, str)]:
            raise TypeError(f"{strange[0]!r} is no str")
        named = {} if name is None else {NAME_KEY: name}
        encoded = msgspec.msgpack.encode({key: _plain(value) for key, value in metadata.items()} | named)
        plain = _metadata_decoder.decode(encoded)
    except (TypeError, OverflowError, UnicodeEncodeError, msgspec.MsgspecError) as error:
        raise UnsupportedStateError(
            f"metadata maps str to str, int, float, bool or None ({error}); give a tensor's number as x.item(), "
            "put anything else into the state"
        ) from None
    if len(encoded) > MOST_METADATA_NBYTES:
        raise UnsupportedStateError(
            f"metadata{'' if name is None else ' and name'} takes {len(encoded)} bytes, at most "
            f"{MOST_METADATA_NBYTES} fit into the commit record; "
            "put large values into the state"
        )
    return plain


def _plain(value: object) -> object:
    """Return a value as a plain type that records may have. Raises TypeError: msgspec would make strings of others."""
    if type(value) not in _PLAIN:
        import numpy as np  # records are read without it

        if isinstance(value, np.generic):  # such as the result of np.mean()
            value = value.item()
    if not isinstance(value, _PLAIN):
        raise TypeError(f"{type(value).__qualname__} is none of these")
    return value


def encode_record(record: Record, store_id: bytes, block_bytes: int) -> bytes:
    """Return the bytes of one copy of a record, in whole blocks. Raises ValueError: no reader would accept it."""
    if not _sane(record):
        raise ValueError(
            f"counters must fall, slots differ, numbers be neither negative nor too large, times lie in the years 1 "
            f"to 9999, and checkpoints be at most {MOST_ENTRIES}: no reader would accept this record"
        )
    body = msgspec.msgpack.encode(record.entries if record.parts is None else (record.entries, record.parts))
    checked = _CHECKED_HEADER.pack(MAGIC, record.version, len(body), store_id, record.generation)
    value = checksum.crc32(body, checksum.crc32(checked))
    data = HEADER.pack(MAGIC, record.version, len(body), store_id, record.generation, value) + body
    if record.line is not None:
        line = msgspec.msgpack.encode(record.line)
        data += _LINE.pack(_LINE_MAGIC, len(line), checksum.crc32(line, value)) + line
    padded = align(len(data), block_bytes)
    if padded > REGION_NBYTES:
        raise ValueError(f"the record takes {padded} bytes, its region has {REGION_NBYTES}")
    return data.ljust(padded, b"\0")


def decode_record(region: bytes | bytearray | memoryview, store_id: bytes) -> Record | None:
    """Decode and check one copy of a record; None if it is empty, torn, damaged or another store's."""
    if len(region) < HEADER.size:
        return None
    magic, version, body_nbytes, record_store, generation, value = HEADER.unpack_from(region)
    if magic != MAGIC or version not in _decoders or record_store != store_id:
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
        content = _decoders[version].decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    entries, parts = (content, None) if version == FORMAT_VERSION else content
    line = _decode_line(region[HEADER.size + body_nbytes :], value)
    record = Record(generation, entries, (), parts, line)
    return record if _sane(record) else None


def _decode_line(data: bytes | bytearray | memoryview, seed: int) -> Line | None:
    """Return the :class:`Line` that follows a record's body; None if there is none, or it is damaged.

    Without a line, no checkpoint of the tier in memory is restored.
    """
    if len(data) < _LINE.size:
        return None
    magic, nbytes, value = _LINE.unpack_from(data)
    encoded = bytes(data[_LINE.size : _LINE.size + nbytes])
    if magic != _LINE_MAGIC or len(encoded) != nbytes or checksum.crc32(encoded, seed) != value:
        return None
    try:
        line: Line = _line_decoder.decode(encoded)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return line if line.sane else None


def generation_of(region: bytes | bytearray | memoryview) -> int | None:
    """Return the generation in the header of a copy of a record, valid or not; None if it has no such header."""
    if len(region) < HEADER.size:
        return None
    magic, _, _, _, generation, _ = HEADER.unpack_from(region)
    return int(generation) if magic == MAGIC else None


def newest_record(commit: bytes | bytearray | memoryview, store_id: bytes) -> Record | None:
    """Return the valid record of the highest generation in a commit file, None if there is none."""
    return _newest(_regions(commit), store_id)


def entries_before(commit: bytes | bytearray | memoryview, store_id: bytes, newest: Record) -> tuple[Entry, ...]:
    """Return the entries of the record before the newest, from the regions of the other parity; empty if it is lost."""
    regions = (commit[start : start + REGION_NBYTES] for start in region_offsets(newest.generation + 1))
    before = _newest(regions, store_id)
    return before.entries if before else ()


def _newest(regions: Iterable[bytes | bytearray | memoryview], store_id: bytes) -> Record | None:
    records = (decode_record(region, store_id) for region in regions)
    return max(filter(None, records), key=_generation, default=None)


def rebuild_identity(commit: bytes | bytearray | memoryview) -> tuple[Identity, Record] | None:
    """Return the content of a lost ``store.json`` and the newest record; None if no record is valid.

    No record has the block size, but every offset in the store is a multiple of it. The largest block size for which
    that is so is returned: a multiple of the true one, so that later writes are aligned to the true one, too.
    """
    by_store: dict[bytes, list[Record]] = {}
    for region in _regions(commit):
        store_id: bytes = HEADER.unpack_from(region)[3]
        if (record := decode_record(region, store_id)) is not None:
            by_store.setdefault(store_id, []).append(record)
    if not by_store:
        return None
    store_id, records = max(by_store.items(), key=lambda one: max(map(_generation, one[1])))
    block = largest_block([entry for record in records for entry in record.entries], REGION_NBYTES)
    newest = max(records, key=_generation)
    identity = Identity(format=newest.version, store_id=store_id.hex(), checksum=checksum.NAME, block_bytes=block)
    return identity, newest


def largest_block(entries: Collection[Entry], most: int) -> int:
    """Return the largest block size up to ``most`` that every offset in these entries is a multiple of."""
    block = most
    while block > MIN_BLOCK and any(entry.manifest_offset % block for entry in entries):
        block //= 2
    return block


def names_checkpoints(commit: bytes | bytearray | memoryview) -> bool:
    """Return whether a commit file without its ``store.json`` seems to name checkpoints, of any store."""
    headers = (HEADER.unpack_from(region) for region in _regions(commit))
    return any(magic == MAGIC and generation > 0 for magic, _, _, _, generation, _ in headers)


def is_foreign(commit: bytes | bytearray | memoryview) -> bool:
    """Return whether a commit file without its ``store.json`` holds bytes that no store wrote.

    A crash may leave any part of a first record, which is short, on persistent memory also one without its magic.
    """
    data = bytes(commit)
    regions = [data[start : start + REGION_NBYTES] for start in range(0, len(data), REGION_NBYTES)]
    if any(region.startswith(MAGIC) for region in regions):
        return False
    return any(any(region[: len(MAGIC)]) or any(region[MIN_BLOCK:]) for region in regions)


def _regions(commit: bytes | bytearray | memoryview) -> Iterator[bytes | bytearray | memoryview]:
    """Yield the four regions of a commit file; regions that are cut off before their header's end are left out."""
    for start in range(0, min(len(commit), COMMIT_NBYTES) - HEADER.size + 1, REGION_NBYTES):
        yield commit[start : start + REGION_NBYTES]


def is_sane_entry(one: Entry) -> bool:
    """Return whether the numbers of an entry are in their ranges."""
    least = min(one.counter, one.nbytes, one.slot, one.manifest_offset, one.manifest_nbytes)
    return least >= 0 and one.counter <= _LARGEST and one.slot <= MOST_SLOT and _TIMES[0] <= one.time <= _TIMES[1]


def _sane(record: Record) -> bool:
    """Return whether a writer may have made this record: its numbers and times are in range, and fit together."""
    entries, above = record.entries, _LARGEST + 1
    for one in entries:
        if one.counter >= above or not is_sane_entry(one):
            return False
        above = one.counter
    return (
        len({one.slot for one in entries}) == len(entries) <= MOST_ENTRIES
        and record.generation <= _LARGEST
        and (record.parts is None or _sane_parts(record.parts, len(entries)))
        and (record.line is None or record.line.sane)
    )


def _sane_parts(parts: Parts, entries: int) -> bool:
    """Return whether a rank may have written these fields: numbers are in range, and every rank is below its world."""
    runs = [one.run for one in parts.memberships]
    if (applied := parts.applied) is not None:
        runs += [applied.run, *(key.run for key in applied.pinned)]
        if not 0 <= applied.decisions <= _LARGEST or any(not 0 <= key.counter <= _LARGEST for key in applied.pinned):
            return False
    return (
        len(parts.memberships) == entries
        and all(0 <= one.rank < one.world <= MOST_RANKS for one in parts.memberships)
        and all(0 <= run.number <= _LARGEST and min(run.nonce, run.members) >= 0 for run in runs)
    )
