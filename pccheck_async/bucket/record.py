# SPDX-License-Identifier: Apache-2.0
"""The record of a commit in a bucket, and the index of one part's objects.

Both have a header of 20 bytes (magic, format u32, length of the body u32, CRC-32 of the header before it and the body
u32, all little-endian) and a body of MessagePack: :class:`CommitRecord`, :class:`PartIndex`. Bytes from a bucket become
either of them in this module only, and only if every check holds.

A record is created once and never changed. The newest record names the *live* commits: itself, unless it has no parts,
and its keep-list. A record without parts is a *fence*: its owner took the prefix over, or dropped checkpoints.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import msgspec

from pccheck_async.bucket.coding import Block, is_possible
from pccheck_async.bucket.names import MOST_NUMBER, data_name
from pccheck_async.errors import CorruptStoreError, NewerFormatError
from pccheck_async.format import Entry, Line, crc32
from pccheck_async.format.record import MIN_BLOCK, MOST_ENTRIES, MOST_METADATA_NBYTES, REGION_NBYTES, is_sane_entry

__all__ = [
    "MOST_INDEX_NBYTES", "MOST_RECORD_NBYTES", "CommitRecord", "Kept", "PartIndex", "PartName", "decode_commit",
    "decode_index", "encode_commit", "encode_index",
]  # fmt: skip

T = TypeVar("T")
_FORMATS = 2
"""The newest format of a record: 2 for one of a group, or that keeps one of a group, which format 1 cannot say; else 1.

So a version that reads format 1 alone refuses a group's bucket, and does not pass over the checkpoints there.
"""
_INDEX_FORMATS = 2
"""The newest format of an index: 2 if any object is compressed, else 1, so that older versions read it."""
_HEADER = struct.Struct("<8sIII")
_CHECKED = struct.Struct("<8sII")
_COMMIT_MAGIC, _INDEX_MAGIC = b"PCCHKBKT", b"PCCHKPRT"
MOST_RECORD_NBYTES = 4 << 20
"""Most bytes of the record of a commit, enough for some thousand ranks."""
MOST_INDEX_NBYTES = 1 << 30
"""Most bytes of the index of a part, which contains the manifest."""
_LARGEST = 1 << 62
_MOST_SPARE = 1024
"""Most spare commit numbers in one record."""


class Kept(NamedTuple):
    """A live commit, by its number and put-id: the latter differs if another record gets the number later."""

    number: int
    put: bytes


class PartName(NamedTuple):
    """The place of one rank's part of a checkpoint: key and size in bytes of its index object, and the part's entry.

    ``entry.slot`` is 0 and not used; offsets are relative to the slot that the part was uploaded from.
    """

    key: str
    nbytes: int
    entry: Entry

    @property
    def rank(self) -> int:
        """The rank whose part it is; -1: the key is none of this package's."""
        name = data_name(self.key)
        return -1 if name is None else name.rank


class CommitRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The record of a commit.

    Attributes:
        owner: Id of the run that made the record, 16 random bytes for each opening of a drain.
        put: Put-id, 16 random bytes for each record that was made, by which an attempt recognizes its own record.
        store: Id of the store that the checkpoint comes from, 16 bytes.
        line: Line of that store, by which runs descend from each other; None: it has none.
        keep: Older commits that are live, too, newest first.
        spare: Commit numbers, up to this record's, whose uploaded data the owner may still use; they are not deleted.
        parts: Parts of the checkpoint, one per rank, in the order of ranks; empty: this record is a fence.
        members: For the checkpoint of a group: :attr:`.Run.members` of the run that saved it; None: one process did.
            For a fence: that of a checkpoint of a group that it keeps; None: it keeps none.
    """

    owner: bytes
    put: bytes
    store: bytes
    line: Line | None
    keep: tuple[Kept, ...]
    spare: tuple[int, ...] = ()
    parts: tuple[PartName, ...] = ()
    members: int | None = None

    @property
    def entry(self) -> Entry:
        """Rank 0's entry; IndexError for a fence, which has none."""
        return self.parts[0].entry

    @property
    def run(self) -> bytes | None:
        """The run that saved the checkpoint; None if it is not known, or this is a fence."""
        return self.line.run_of(self.entry.counter) if self.line is not None and self.parts else None


class PartIndex(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The objects of one part, in the order of the payload, and its encoded manifest."""

    block_bytes: int
    objects: tuple[tuple[str, int], ...]
    """Key of each object, and size in bytes of what it holds of the payload."""
    manifest: bytes
    blocks: tuple[tuple[Block, ...], ...] = ()
    """The blocks of each object that is compressed, and none of any other; empty if no object is."""

    def blocks_of(self, index: int) -> tuple[Block, ...]:
        """Return the blocks of an object by its place among the objects; none: it is stored as it is."""
        return self.blocks[index] if self.blocks else ()

    @property
    def sizes(self) -> dict[str, int]:
        """Size in bytes of each object in the bucket, by key."""
        sizes = [nbytes for _, nbytes in self.objects]
        coded = (sum(block.nbytes for block in self.blocks_of(number)) for number in range(len(sizes)))
        return {key: stored or nbytes for (key, nbytes), stored in zip(self.objects, coded, strict=True)}


_commits = msgspec.msgpack.Decoder(CommitRecord)
_indexes = msgspec.msgpack.Decoder(PartIndex)


def _encode(magic: bytes, version: int, body: bytes) -> bytes:
    checked = _CHECKED.pack(magic, version, len(body))
    return _HEADER.pack(magic, version, len(body), crc32(body, crc32(checked))) + body


def encode_commit(record: CommitRecord, number: int) -> bytes:
    """Return the bytes of a record. Raises ValueError: no reader would accept it."""
    if trouble := _trouble(record, number):
        raise ValueError(f"a record of commit {number} is impossible: {trouble}")
    fields, version = msgspec.structs.astuple(record), _FORMATS
    if record.members is None:  # in format 1, which older versions read
        fields, version = fields[:-1], 1
    data = _encode(_COMMIT_MAGIC, version, msgspec.msgpack.encode(fields))
    if len(data) > MOST_RECORD_NBYTES:
        raise ValueError(f"the record takes {len(data)} bytes, at most {MOST_RECORD_NBYTES} are read")
    return data


def encode_index(index: PartIndex) -> bytes:
    """Return the bytes of an index."""
    fields, version = msgspec.structs.astuple(index), _INDEX_FORMATS
    if not index.blocks:
        fields, version = fields[:-1], 1
    return _encode(_INDEX_MAGIC, version, msgspec.msgpack.encode(fields))


def decode_commit(data: bytes, number: int) -> CommitRecord:
    """Decode and check the record of a commit. Raises CorruptStoreError; NewerFormatError: its format is newer."""
    what = f"the record of commit {number} in the bucket"
    record = _decode(_COMMIT_MAGIC, _FORMATS, _commits, data, what)
    if trouble := _trouble(record, number):
        raise CorruptStoreError(f"{what} is impossible: {trouble}")
    return record


def decode_index(data: bytes, part: PartName) -> PartIndex:
    """Decode and check the index of a part. Raises CorruptStoreError; NewerFormatError: its format is newer."""
    what = f"the object {part.key} in the bucket"
    index, entry = _decode(_INDEX_MAGIC, _INDEX_FORMATS, _indexes, data, what), part.entry
    sizes = [nbytes for _, nbytes in index.objects]
    block = index.block_bytes
    whole = all(nbytes > 0 for nbytes in sizes) and sum(sizes) == entry.nbytes
    named = all(data_name(key) is not None for key, _ in index.objects)
    blocks = MIN_BLOCK <= block <= REGION_NBYTES and not block & (block - 1)
    coded = not index.blocks or (
        whole
        and (
            len(index.blocks) == len(sizes)
            and all(not each or is_possible(nbytes, each) for nbytes, each in zip(sizes, index.blocks, strict=True))
        )
    )
    if not (whole and named and blocks and coded and len(index.manifest) == entry.manifest_nbytes):
        raise CorruptStoreError(f"{what} is not the index of a checkpoint of {entry.nbytes} bytes")
    return index


def _decode(magic: bytes, newest: int, decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T:
    if len(data) < _HEADER.size or not data.startswith(magic):
        raise CorruptStoreError(f"{what} is none of this package's")
    _, version, nbytes, value = _HEADER.unpack_from(data)
    if version > newest:
        raise NewerFormatError(f"{what} has format {version}; this version reads format {newest}")
    body = data[_HEADER.size :]
    if len(body) != nbytes or crc32(body, crc32(data[: _CHECKED.size])) != value:
        raise CorruptStoreError(f"{what} is damaged: its checksum does not hold")
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise CorruptStoreError(f"{what} is damaged: {error}") from None


def _trouble(record: CommitRecord, number: int) -> str:
    """Return the reason why no writer can have made this record; empty if one can."""
    ids: list[Any] = [record.owner, record.put, record.store, *(kept.put for kept in record.keep)]
    numbers = [number, *(kept.number for kept in record.keep)]
    if any(len(each) != 16 for each in ids):
        return "an id has not 16 bytes"
    if not 0 < number <= MOST_NUMBER or not all(newer > older > 0 for newer, older in pairwise(numbers)):
        return "numbers do not fall"
    if len(record.keep) >= MOST_ENTRIES or len(record.spare) > _MOST_SPARE:
        return "it keeps too many"
    if not all(0 < target <= number for target in record.spare):
        return "it spares what is above it"
    if record.line is not None and not record.line.sane:
        return "no run can have this line"
    if record.members is not None and not ((record.parts or record.keep) and 0 <= record.members < 1 << 64):
        return "no group can have these members"
    for rank, part in enumerate(record.parts):
        name = data_name(part.key)
        if name is None or name.rank != rank or not 0 < name.target <= number or not 0 < part.nbytes <= _LARGEST:
            return f"the part of rank {rank}"
        nbytes = len(msgspec.msgpack.encode(part.entry.metadata))
        if not is_sane_entry(part.entry) or nbytes > 2 * MOST_METADATA_NBYTES:  # it may be marked as rejected
            return f"the entry of rank {rank}"
    return ""
