# SPDX-License-Identifier: Apache-2.0
"""The format of a shelf's file, without I/O.

The file is divided into pages, of the page size of the machine that made it. Numbers are little-endian.

====================  ================================================================================================
page 0                the header, which never changes (:data:`HEADER`)
page 1, page 2        two roots (:data:`ROOT`, 64 bytes each); the valid one with the greater number is in force
the others            extents, whole pages each: the directory, and the contents of each variable that has arrays
====================  ================================================================================================

A root has the offset, length and CRC-32 of the directory. The directory is the MessagePack array ``[sequence,
variables]``: the sequence number of its root, and a map from names to ``[offset, manifest]``: the offset of the
variable's extent (0 if it has none), and a manifest (:mod:`pccheck_async.format.manifest`) of the state
``{name: value}``. Plain values are in the manifest's skeleton, arrays in the extent, which is the payload: one chunk
with one CRC-32, as of the variable's last transaction. The manifest's counter is the number of that transaction's root.

Space that no extent covers is free; no list of free space is stored that could be wrong.

A transaction changes no byte that the root in force refers to: it stores new extents and a new directory into free
space, makes them durable, and then stores the root with the next sequence number over the older root (*the commit*). If
the power fails meanwhile, the new root's checksum is wrong and the other root is still in force. Recovery only chooses
the root, so it may be killed and repeated at will.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from pccheck_async.errors import CorruptStoreError, NewerFormatError, StoreFullError, UnsupportedStateError
from pccheck_async.format import crc32, manifest
from pccheck_async.format.manifest import ChunkEntry, Manifest
from pccheck_async.format.skeleton import DictNode

MAGIC: Final = b"PCSHELF\0"
VERSION: Final = 1
HEADER: Final = struct.Struct("<8sII16sI")
"""Header: magic, version, bytes of a page, random identity, CRC-32 of all of these."""
ROOT: Final = struct.Struct("<QQQQI24xI")
"""Root: sequence number (from 1), bytes of the file in use, offset and bytes and CRC-32 of the directory, zeros, CRC-32
of the header's identity followed by all of these. A root fills a cache line."""
FIRST_PAGE: Final = 3
"""Number of the first page that extents may use."""
MOST_DIRECTORY_BYTES: Final = 64 << 20
_MOST_SEQUENCE: Final = 1 << 63
"""Largest valid sequence number, which no shelf reaches by counting; the field could hold more."""
_MOST_PAGE_BYTES: Final = 1 << 20


class Extent(NamedTuple):
    """A range of whole pages of the file, in bytes; 0 bytes stand for no extent."""

    offset: int = 0
    nbytes: int = 0

    @property
    def end(self) -> int:
        """Return the offset of the first byte after the extent."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file, which never changes. Decoded only by :func:`decode_header`."""

    page_bytes: int
    identity: bytes

    def encode(self) -> bytes:
        """Return the header's bytes."""
        body = HEADER.pack(MAGIC, VERSION, self.page_bytes, self.identity, 0)[:-4]
        return body + zlib.crc32(body).to_bytes(4, "little")

    def pages(self, nbytes: int) -> int:
        """Return a number of bytes rounded up to whole pages."""
        return -(-nbytes // self.page_bytes) * self.page_bytes

    def place(self, sequence: int) -> int:
        """Return the offset of the root with this sequence number: the two places are used in turn."""
        return (1 + sequence % 2) * self.page_bytes


@dataclass(frozen=True, slots=True)
class Root:
    """A root, which refers to the directory of a committed state. Decoded only by :func:`newest_root`."""

    sequence: int
    nbytes: int
    directory: Extent
    """Extent of the directory; its ``nbytes`` is the exact length, not whole pages."""
    checksum: int

    def encode(self, header: Header) -> bytes:
        """Return the root's bytes, with their checksum."""
        body = ROOT.pack(self.sequence, self.nbytes, *self.directory, self.checksum, 0)[:-4]
        return body + root_checksum(header, body).to_bytes(4, "little")


def root_checksum(header: Header, body: bytes) -> int:
    """Return the checksum of a root's other bytes (``body``); it depends on the shelf's identity."""
    return zlib.crc32(header.identity + body)


class Variable(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A variable's entry in the directory. Entries from a file are checked by :func:`decode_directory`."""

    offset: int
    manifest: Manifest

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the variable's contents in the file."""
        return self.manifest.payload_nbytes

    @property
    def checksum(self) -> int:
        """Return the CRC-32 of the variable's contents as of its last transaction; 0 without contents."""
        return self.manifest.chunks[0].checksum if self.manifest.chunks else 0

    def with_checksum(self, checksum: int) -> Variable:
        """Return a copy of the entry with another checksum of the contents."""
        chunks = (ChunkEntry(0, self.nbytes, checksum),) if self.nbytes else ()
        return type(self)(self.offset, msgspec.structs.replace(self.manifest, chunks=chunks))


class StoredVariable(Variable, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A variable of an open transaction whose final contents are stored already, with their checksum in the entry."""


class _Placed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    offset: int
    manifest: msgspec.Raw


class _Directory(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    sequence: int
    variables: dict[str, _Placed]


@dataclass(slots=True)
class DirectoryEncoder:
    """Encodes directories; reuses the encoding of entries that did not change since the last call."""

    _last: dict[str, tuple[Variable, _Placed]] = field(default_factory=dict)
    _encoder: msgspec.msgpack.Encoder = field(default_factory=msgspec.msgpack.Encoder)

    def encode(self, sequence: int, variables: Mapping[str, Variable]) -> bytes:
        """Return the bytes of a directory.

        Raises:
            UnsupportedStateError: A name cannot be encoded.
            StoreFullError: The directory would be longer than ``MOST_DIRECTORY_BYTES``.
        """
        placed = {}
        for name, variable in variables.items():
            last = self._last.get(name)
            if last is None or last[0] is not variable:
                last = variable, _Placed(variable.offset, msgspec.Raw(manifest.encode(variable.manifest)))
            placed[name] = last
        try:
            data = self._encoder.encode(_Directory(sequence, {name: each for name, (_, each) in placed.items()}))
        except UnicodeEncodeError as error:
            raise UnsupportedStateError(f"the name of a variable is not encodable: {error}") from error
        if len(data) > MOST_DIRECTORY_BYTES:
            raise StoreFullError(
                f"the directory of a shelf has at most {MOST_DIRECTORY_BYTES} bytes, and this one would have "
                f"{len(data)}: keep numbers in arrays"
            )
        self._last = placed
        return data


_DECODER: Final = msgspec.msgpack.Decoder(_Directory)


def decode_header(data: bytes) -> Header:
    """Decode the header. Raises CorruptStoreError, and NewerFormatError for an unknown version."""
    if len(data) < HEADER.size or data[: len(MAGIC)] != MAGIC:
        raise CorruptStoreError("this is not the file of a shelf")
    _, version, page_bytes, identity, checksum = HEADER.unpack_from(data)
    if zlib.crc32(data[: HEADER.size - 4]) != checksum:
        raise CorruptStoreError("the header of the shelf is damaged")
    if version != VERSION:
        raise NewerFormatError(f"the shelf has format {version}; this package reads format {VERSION}")
    if not 512 <= page_bytes <= _MOST_PAGE_BYTES or page_bytes & (page_bytes - 1):
        raise CorruptStoreError(f"the shelf claims pages of {page_bytes} bytes")
    return Header(page_bytes, identity)


def newest_root(header: Header, head: bytes, size: int) -> Root:
    """Return the root in force, from the first three pages (``head``) of a file of ``size`` bytes.

    Raises CorruptStoreError if no root is valid, or the one in force describes an impossible file.
    """
    roots = []
    for place in (header.page_bytes, 2 * header.page_bytes):
        data = head[place : place + ROOT.size]
        if len(data) < ROOT.size or root_checksum(header, data[:-4]) != int.from_bytes(data[-4:], "little"):
            continue
        sequence, nbytes, offset, length, checksum, _ = ROOT.unpack(data)
        if sequence > 0 and header.place(sequence) == place:
            roots.append(Root(sequence, nbytes, Extent(offset, length), checksum))
    if not roots:
        raise CorruptStoreError("both roots of the shelf are damaged")
    root = max(roots, key=lambda each: each.sequence)
    if root.sequence > _MOST_SEQUENCE:
        raise CorruptStoreError(f"the shelf claims {root.sequence} transactions")
    if root.nbytes % header.page_bytes or root.nbytes < FIRST_PAGE * header.page_bytes:
        raise CorruptStoreError(f"the shelf claims a size of {root.nbytes} bytes")
    if root.nbytes > size:
        raise CorruptStoreError(f"the file of the shelf was truncated: it has {size} bytes of {root.nbytes}")
    if not 0 < root.directory.nbytes <= MOST_DIRECTORY_BYTES:
        raise CorruptStoreError(f"the shelf claims a directory of {root.directory.nbytes} bytes")
    check_extents(header, root, [Extent(root.directory.offset, header.pages(root.directory.nbytes))])
    return root


def decode_directory(header: Header, root: Root, data: bytes) -> dict[str, Variable]:
    """Decode the directory that a root refers to, and check all its entries. Raises CorruptStoreError.

    The check: every extent lies in the file, overlaps no other, and has the size that its manifest describes.
    """
    if len(data) != root.directory.nbytes or crc32(data) != root.checksum:
        raise CorruptStoreError("the directory of the shelf is damaged")
    try:
        directory = _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise CorruptStoreError(f"the directory of the shelf cannot be read: {error}") from error
    if directory.sequence != root.sequence:
        raise CorruptStoreError(f"root {root.sequence} of the shelf names the directory of root {directory.sequence}")
    variables = {name: _variable(name, placed) for name, placed in directory.variables.items()}
    extents = [Extent(each.offset, header.pages(each.nbytes)) for each in variables.values()]
    check_extents(header, root, [Extent(root.directory.offset, header.pages(root.directory.nbytes)), *extents])
    return variables


def _variable(name: str, placed: _Placed) -> Variable:
    variable = Variable(placed.offset, manifest.decode(placed.manifest))
    skeleton = variable.manifest.skeleton
    if not isinstance(skeleton, DictNode) or skeleton.keys != [name] or len(skeleton.values) != 1:
        raise CorruptStoreError(f"variable {name[:64]!r} of the shelf is another one")
    if len(variable.manifest.chunks) > 1 or (placed.offset != 0) != (variable.nbytes > 0):
        raise CorruptStoreError(f"variable {name[:64]!r} of the shelf is in an impossible place")
    return variable


def check_extents(header: Header, root: Root, extents: list[Extent]) -> None:
    """Raise CorruptStoreError unless extents begin at pages, lie in the file, and do not overlap."""
    end = FIRST_PAGE * header.page_bytes
    for extent in sorted(each for each in extents if each.nbytes):
        if extent.offset < end or extent.offset % header.page_bytes or extent.end > root.nbytes:
            raise CorruptStoreError(f"the shelf claims {extent.nbytes} bytes at {extent.offset}, where they cannot be")
        end = extent.end
