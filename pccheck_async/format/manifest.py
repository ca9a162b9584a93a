# SPDX-License-Identifier: Apache-2.0
"""The manifest of one checkpoint: a MessagePack map from the names of :class:`Manifest`'s fields.

The entries in it are arrays of the fields of :class:`TensorEntry`, :class:`StorageEntry` and :class:`ChunkEntry` in
their order. Only :func:`decode` makes a manifest of bytes, and it raises unless every range lies inside the payload, no
view reaches outside its storage, every array is named once, and the checksums of pieces make those of their chunks:
allocating and copying by a manifest needs no further checks. Reading one takes time in proportion to its length at
most: nesting and keys of equal hash are bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import Any, Final, Literal, Protocol

import msgspec
from msgspec import structs

from pccheck_async.errors import CorruptStoreError, UnsupportedStateError
from pccheck_async.format import dtypes
from pccheck_async.format.checksum import SUM_BYTES, combine, piece_count
from pccheck_async.format.record import MIN_BLOCK
from pccheck_async.format.skeleton import (
    MAX_DEPTH,
    ArrayNode,
    ComposedNode,
    DictNode,
    Node,
    OrderedDictNode,
    ShardedNode,
    StatefulNode,
    SurrogateStrNode,
    children,
)

VERSION: Final = 1
SHARDED_VERSION: Final = 2
"""Version of a manifest with boxes of tensors that lie on several ranks, which other ranks read in part."""
LATEST_VERSION: Final = 3
"""Version of a manifest whose outermost mapping is an OrderedDict, or with tensors that are composed of others, with
boxes or without; earlier versions of the package, which support neither, refuse this number."""
ALIGNMENT: Final = 64
"""Alignment in bytes of the start of every storage in the payload."""
_MAX_DIMENSIONS: Final = 64
_MAX_BYTES: Final = 1 << 62


class _Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class StorageEntry(_Entry, frozen=True, gc=False):
    """Memory that one or several arrays view: offset in the payload, and length, in bytes."""

    offset: int
    nbytes: int


class TensorEntry(_Entry, frozen=True, gc=False):
    """One tensor or array: a view of a storage."""

    storage: int | None
    """Index in :attr:`Manifest.storages`; None if there are no elements."""
    dtype: str
    """Name of the dtype (:mod:`pccheck_async.format.dtypes`)."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Distance in elements between neighbours along each dimension; negative only for numpy."""
    offset: int
    """Bytes from the start of the storage to the first element."""
    kind: Literal["tensor", "parameter", "ndarray"]
    """The type that is restored."""
    requires_grad: bool

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        if self.kind == "ndarray":
            return dtypes.numpy_dtype(self.dtype).itemsize
        dtype = dtypes.STORABLE.get(self.dtype) or dtypes.torch_dtype(self.dtype)  # the latter refuses unknown names
        return dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.itemsize

    @property
    def extent(self) -> tuple[int, int]:
        """First byte in the storage that the view covers, and the byte after the last."""
        low, high = span(self.shape, self.stride)
        itemsize = self.itemsize
        return self.offset + low * itemsize, self.offset + (high + 1) * itemsize


class ChunkEntry(_Entry, frozen=True, gc=False):
    """A piece of the payload as it was written, padding included."""

    offset: int
    nbytes: int
    checksum: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The description of a payload and of the state in it; ``counter`` to ``metadata`` are as in the commit record."""

    version: int
    counter: int
    step: int
    time: float
    metadata: dict[str, str | int | float | bool | None]
    skeleton: Node
    """The structure of the state; ``ArrayNode.index`` is an index in ``tensors``."""
    tensors: tuple[TensorEntry, ...]
    storages: tuple[StorageEntry, ...]
    """The memory that the tensors view, in the order of the payload."""
    chunks: tuple[ChunkEntry, ...]
    """The pieces of the payload, back to back from offset 0."""
    payload_nbytes: int
    pieces: tuple[bytes, ...] | None = None
    """For each chunk the table of the CRC-32 of each of its MiBs (see :func:`pccheck_async.format.piece_sums`), so that
    MiBs can be verified alone. Present in version 2, and in version 3 if there are boxes."""


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Manifest)


def version_of(skeleton: Node, *, with_pieces: bool, composed: bool = False) -> int:
    """Return the version of a manifest with this skeleton, with checksums of pieces and composed tensors or without."""
    if composed or isinstance(skeleton, OrderedDictNode):
        return LATEST_VERSION
    return SHARDED_VERSION if with_pieces else VERSION


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as msgpack. Raises UnsupportedStateError for metadata or a step that msgpack cannot carry."""
    try:
        return _ENCODER.encode(manifest)
    except (OverflowError, UnicodeEncodeError, TypeError) as error:
        raise UnsupportedStateError(f"the step or the metadata of a checkpoint cannot be saved: {error}") from error


class _Known(Protocol):
    def get(self, name: str, of: tuple[Any, ...]) -> Any: ...
    def set(self, name: str, of: tuple[Any, ...], value: Any) -> Any: ...


def encode_again(manifest: Manifest, known: _Known) -> bytes:
    """Return the manifest as msgpack; the bytes of parts that are the same objects as the last time are reused.

    A manifest is encoded twice, first for its length; its tables are the same while the state's structure is. ``known``
    caches the bytes. Raises UnsupportedStateError (see :func:`encode`).
    """
    skeleton, tensors, storages = of = manifest.skeleton, manifest.tensors, manifest.storages
    tables = known.get("tables", of)
    if tables is None:

        def encoded(name: str, part: Any) -> Any:
            return known.get(name, (part,)) or known.set(name, (part,), msgspec.Raw(_ENCODER.encode(part)))

        parts: Any = skeleton
        # Of a training state, all but a few numbers are in objects.
        if isinstance(skeleton, (DictNode, OrderedDictNode)):
            values = [
                encoded(f"value {number}", value) if type(value) is StatefulNode else value
                for number, value in enumerate(skeleton.values)
            ]
            parts = structs.replace(skeleton, values=values)
        tables = {
            "skeleton": msgspec.Raw(_ENCODER.encode(parts)),
            "tensors": encoded("tensors", tensors),
            "storages": encoded("storages", storages),
        }
        known.set("tables", of, tables)
    return encode(structs.replace(manifest, **tables))


def decode(data: bytes | bytearray | memoryview) -> Manifest:
    """Decode and check a manifest. Raises CorruptStoreError if anything about it is wrong."""
    try:
        manifest = _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise CorruptStoreError(f"the manifest cannot be read: {error}") from error
    if not VERSION <= manifest.version <= LATEST_VERSION:
        known = f"this package reads formats {VERSION} to {LATEST_VERSION}"
        raise CorruptStoreError(f"the manifest has format {manifest.version}; {known}")
    _check_outermost(manifest)
    _check_payload(manifest)
    for index, entry in enumerate(manifest.tensors):
        if trouble := _tensor_trouble(entry, manifest.storages):
            raise CorruptStoreError(f"array {index} of the manifest is impossible ({trouble}): {str(entry)[:200]}")
    composed = _check_skeleton(manifest.skeleton, manifest.tensors)
    pieces = manifest.pieces is not None
    if manifest.version != version_of(manifest.skeleton, with_pieces=pieces, composed=composed):
        raise CorruptStoreError(
            f"a manifest of version {manifest.version} with the checksums or the content of another version"
        )
    return manifest


def viewed_ranges(entries: list[TensorEntry]) -> list[tuple[int, int]]:
    """Return the byte ranges of a storage that arrays view, in order; ranges that touch or overlap are joined."""
    ranges: list[tuple[int, int]] = []
    for low, high in sorted(entry.extent for entry in entries):
        if ranges and low <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(high, ranges[-1][1]))
        else:
            ranges.append((low, high))
    return ranges


def span(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, int]:
    """Return the offsets of the lowest and highest element of a non-empty view, in elements from its first one."""
    low = high = 0
    for size, step in zip(shape, stride, strict=True):
        if size > 1:
            reach = (size - 1) * step
            if reach < 0:
                low += reach
            else:
                high += reach
    return low, high


def _check_outermost(manifest: Manifest) -> None:
    outermost = manifest.skeleton
    if not isinstance(outermost, (DictNode, OrderedDictNode)) or not all(
        isinstance(key, (str, SurrogateStrNode)) for key in outermost.keys
    ):
        raise CorruptStoreError("the outermost node of a state is a mapping from strings")


def _check_payload(manifest: Manifest) -> None:
    end = 0
    for index, chunk in enumerate(manifest.chunks):
        if chunk.offset != end or chunk.nbytes <= 0 or chunk.nbytes % MIN_BLOCK or not 0 <= chunk.checksum < 1 << 32:
            raise CorruptStoreError(f"chunk {index} of the manifest is impossible: {chunk}")
        end += chunk.nbytes
    if end != manifest.payload_nbytes or end > _MAX_BYTES:
        raise CorruptStoreError(f"the chunks hold {end} bytes and the payload {manifest.payload_nbytes}")
    if manifest.pieces is not None:
        _check_pieces(manifest.chunks, manifest.pieces)
    end = 0
    for index, storage in enumerate(manifest.storages):
        if storage.offset < end or storage.offset % ALIGNMENT or storage.nbytes <= 0:
            raise CorruptStoreError(f"storage {index} of the manifest is impossible: {storage}")
        end = storage.offset + storage.nbytes
    if end > manifest.payload_nbytes:
        raise CorruptStoreError(f"the storages end at byte {end} of a payload of {manifest.payload_nbytes}")


def _check_pieces(chunks: Sequence[ChunkEntry], pieces: Sequence[bytes]) -> None:
    if len(pieces) != len(chunks):
        raise CorruptStoreError(f"{len(chunks)} chunks, checksums for the pieces of {len(pieces)}")
    for index, (chunk, sums) in enumerate(zip(chunks, pieces, strict=True)):
        fits = len(sums) == SUM_BYTES * piece_count(chunk.nbytes)
        if not fits or combine(sums, chunk.nbytes) != chunk.checksum:
            raise CorruptStoreError(f"the checksum of chunk {index} of the manifest is not that of its pieces")


def _tensor_trouble(entry: TensorEntry, storages: Sequence[StorageEntry]) -> str:
    shape, stride = entry.shape, entry.stride
    known = None if entry.kind == "ndarray" else dtypes.STORABLE.get(entry.dtype)
    itemsize = entry.itemsize if known is None else known.itemsize  # the former refuses unknown dtypes
    if len(shape) != len(stride) or len(shape) > _MAX_DIMENSIONS:
        return "dimensions"
    if (shape and not 0 <= min(shape) <= max(shape) < _MAX_BYTES) or entry.offset < 0:
        return "negative or absurd sizes"
    if stride and not (-_MAX_BYTES if entry.kind == "ndarray" else -1) < min(stride) <= max(stride) < _MAX_BYTES:
        return "strides"
    if math.prod(filter(None, shape)) * max(itemsize, 1) >= _MAX_BYTES:
        return "absurd sizes"
    if entry.requires_grad and (
        entry.kind == "ndarray"
        or not (dtypes.torch_dtype(entry.dtype).is_floating_point or dtypes.torch_dtype(entry.dtype).is_complex)
    ):
        return "autograd on a dtype without"
    empty = 0 in shape or itemsize == 0
    if entry.storage is None:
        return "" if empty and entry.offset == 0 else "elements, but no storage"
    if empty or not 0 <= entry.storage < len(storages):
        return "storage"
    low, high = 0, sum(map(mul, shape, stride)) - sum(stride)  # as of span(), which is not that quick
    if min(stride, default=0) < 0:
        low, high = span(shape, stride)
    if entry.offset + low * itemsize < 0 or entry.offset + (high + 1) * itemsize > storages[entry.storage].nbytes:
        return "reaches outside its storage"
    if entry.kind != "ndarray" and entry.offset % itemsize:
        return "misaligned"
    return ""


def _check_skeleton(skeleton: Node, tensors: Sequence[TensorEntry]) -> bool:
    """Check a skeleton; return whether it has composed tensors.

    Raises CorruptStoreError if it is malformed, or does not name each of ``tensors`` once.
    """
    count = len(tensors)
    seen = bytearray(count)
    sharded: list[ShardedNode] = []
    composed = False
    level: list[Any] = [skeleton]
    for _ in range(MAX_DEPTH + 2):
        below: list[Any] = []
        for node in level:
            if isinstance(node, ArrayNode):
                if not 0 <= node.index < count or seen[node.index]:
                    raise CorruptStoreError(f"the state names array {node.index} of {count} wrongly or twice")
                seen[node.index] = 1
            elif isinstance(node, msgspec.Struct):
                if type(node) is DictNode:  # most of them
                    below += node.keys
                    below += node.values
                    continue
                below.extend(children(node))  # type: ignore[arg-type]
                if isinstance(node, ShardedNode):
                    sharded.append(node)
                elif isinstance(node, ComposedNode):
                    composed = True
                    kinds = {*map(type, node.items)}
                    if kinds - {ArrayNode} or not len(node.items) == len(node.names) == len({*node.names}):
                        raise CorruptStoreError(f"a {node.name[:200]} is composed of something else than tensors")
        if not below:
            break
        level = below
    else:
        raise CorruptStoreError("the state is nested too deeply")
    if not all(seen):
        raise CorruptStoreError(f"the state does not name array {seen.index(0)}")
    for node in sharded:
        if trouble := _box_trouble(node, [tensors[box.index] for box in node.boxes]):
            raise CorruptStoreError(f"a tensor of shape {node.shape} on several ranks is impossible ({trouble})")
    return composed


def _box_trouble(node: ShardedNode, boxes: Sequence[TensorEntry]) -> str:
    itemsize = dtypes.torch_dtype(node.dtype).itemsize  # refuses unknown ones
    if node.mesh < 0:
        return "the hash of its ranks"
    if len(node.offsets) != len(boxes):
        return f"{len(boxes)} boxes, {len(node.offsets)} offsets"
    if any(box.dtype != node.dtype or box.kind == "ndarray" for box in boxes):
        return "dtypes"
    if len(node.shape) > _MAX_DIMENSIONS or any(not 0 <= size < _MAX_BYTES for size in node.shape):
        return "absurd sizes"
    if math.prod(size for size in node.shape if size) * itemsize >= _MAX_BYTES:
        return "absurd sizes"
    for offsets, box in zip(node.offsets, boxes, strict=True):
        if not len(offsets) == len(box.shape) == len(node.shape):
            return "dimensions"
        if any(low < 0 or low + size > end for low, size, end in zip(offsets, box.shape, node.shape, strict=True)):
            return "a box reaches outside"
    return ""
