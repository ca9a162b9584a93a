# SPDX-License-Identifier: Apache-2.0
"""The plan of a payload: storages laid back to back, cut into chunks, and the tables by which chunks are copied.

Storages start at multiples of 64 bytes, large ones at a block. A chunk is copied, checksummed, written and read
in one piece. A plan depends only on the layout's sizes and breaks, so it is kept while the structure of the state stays
the same; addresses are looked up anew for every chunk that is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pccheck_async.format import align
from pccheck_async.format.manifest import ALIGNMENT, StorageEntry
from pccheck_async.format.record import MIN_BLOCK
from pccheck_async.state import HOST, Layout, PackedSource, Sources, Targets, cut_ranges

__all__ = ["Chunk", "PackedPiece", "Plan", "Planner", "Segments", "Table", "scatter_runs", "segments", "unit_runs"]

_LARGE: Final = 1 << 20
"""Bytes from which a storage counts as large, and starts at a block, so that its chunks are aligned like its pages."""

_Offsets: TypeAlias = npt.NDArray[np.int64]

Table: TypeAlias = npt.NDArray[np.uint64]
"""Rows of (address, offset in the chunk's buffer, length)."""

PackedPiece: TypeAlias = tuple[PackedSource, int, int, int]
"""A range of a packed source, and its place: source, first byte, byte after the last, offset in the chunk's buffer."""


class Segments(NamedTuple):
    """The segments of one chunk: ranges of memory and their offsets in its buffer; false if there are none.

    Attributes:
        host: Segments in host memory, as a packed table for :meth:`Operations.gather` (in ascending order of offset,
            not overlapping) or :meth:`Operations.scatter`.
        devices: Segments in the memory of CUDA devices, by the device's index, in the same order.
        packed: Pieces that cannot be copied by address.
    """

    host: bytes = b""
    devices: Mapping[int, Table] = MappingProxyType({})
    packed: Sequence[PackedPiece] = ()

    def __bool__(self) -> bool:
        return bool(self.host or self.devices or self.packed)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A piece of the payload: ``nbytes`` at ``offset``, made of parts of sources, with zeros between and after them.

    ``table`` has a row for each part: number of the source, offset in the source, offset in the buffer (ascending),
    length.
    """

    offset: int
    nbytes: int
    table: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The place of each storage in the payload, and the chunks into which the payload is cut."""

    storages: tuple[StorageEntry, ...]
    chunks: tuple[Chunk, ...]
    payload_nbytes: int


class Planner:
    """Plans payloads; the plan of a layout is used again while its structure stays the same.

    A chunk has at most ``chunk_bytes``; offsets and lengths of transfers are multiples of ``block_bytes``.
    """

    def __init__(self, chunk_bytes: int, block_bytes: int) -> None:
        if block_bytes <= 0 or block_bytes % MIN_BLOCK:
            raise ValueError(f"block_bytes is a multiple of {MIN_BLOCK}, not {block_bytes}")
        if chunk_bytes <= 0 or chunk_bytes % block_bytes:
            raise ValueError(f"chunk_bytes is a multiple of {block_bytes}, not {chunk_bytes}")
        self.chunk_bytes = chunk_bytes
        self.block_bytes = block_bytes
        self.hits = 0
        self.misses = 0

    def plan(self, layout: Layout) -> Plan:
        """Return the plan for ``layout``, the known one if there is one; count a hit or a miss."""
        extents = layout.extents
        of = layout.storage_nbytes, layout.breaks, extents
        known: Plan | None = layout.known.get("plan", of)
        if known is not None:
            self.hits += 1
            return known
        self.misses += 1
        storages = self._place(layout.storage_nbytes, {*layout.breaks})
        end = storages[-1].offset + storages[-1].nbytes if storages else 0
        payload_nbytes = align(end, self.block_bytes)
        bounds = [0, *(storages[number].offset for number in layout.breaks), payload_nbytes]
        plan = Plan(storages, self._cut(storages, extents, bounds), payload_nbytes)
        return layout.known.set("plan", of, plan)

    def _place(self, sizes: Sequence[int], breaks: Set[int]) -> tuple[StorageEntry, ...]:
        storages = []
        cursor = 0
        for number, nbytes in enumerate(sizes):
            cursor = align(cursor, self.block_bytes if nbytes >= _LARGE or number in breaks else ALIGNMENT)
            storages.append(StorageEntry(cursor, nbytes))
            cursor += nbytes
        return tuple(storages)

    def _cut(self, storages: Sequence[StorageEntry], extents: _Offsets, bounds: Sequence[int]) -> tuple[Chunk, ...]:
        cuts = [*chain.from_iterable(range(low, high, self.chunk_bytes) for low, high in pairwise(bounds)), bounds[-1]]
        begins = np.array(cuts, np.int64)
        offsets = np.array([storage.offset for storage in storages], np.int64)
        starts = offsets[extents[:, 0]] + extents[:, 1]
        ends = starts + extents[:, 2]
        source, chunk, low, high = cut_ranges(starts, ends, begins)
        rows = np.stack((source, low - starts[source], low - begins[chunk], high - low), axis=1).astype(np.uint64)
        parts = np.searchsorted(chunk, np.arange(len(cuts)))
        return tuple(
            Chunk(offset=begin, nbytes=end - begin, table=rows[parts[number] : parts[number + 1]])
            for number, (begin, end) in enumerate(pairwise(cuts))
        )


def segments(chunk: Chunk, sources: Sources) -> Segments:
    """Return the segments of ``sources`` that fill the buffer of ``chunk``."""
    table = chunk.table
    index = table[:, 0].astype(np.intp)
    addresses = sources.addresses[index]
    packed: list[PackedPiece] = []
    if not addresses.all():
        is_packed = addresses == 0
        for number, low, offset, length in table[is_packed].tolist():
            source = sources[number]
            assert isinstance(source, PackedSource)
            packed.append((source, low, low + length, offset))
        table, index, addresses = table[~is_packed], index[~is_packed], addresses[~is_packed]
    raw = np.empty((len(table), 3), np.uint64)
    np.add(addresses, table[:, 1], out=raw[:, 0])
    raw[:, 1:] = table[:, 2:]
    devices = sources.device_of
    if devices is None:
        return Segments(raw.tobytes(), packed=packed)
    return _by_device(raw, devices[index])._replace(packed=packed)


def scatter_runs(bounds: _Offsets, unit: int, targets: Targets) -> Iterator[tuple[int, range, Segments]]:
    """Yield the parts of chunks that have to be read: number of the chunk, run of its units, segments to copy to.

    ``bounds`` are the offsets in the payload at which chunks begin, and the end of the last one. A unit has ``unit``
    bytes; the last one of a chunk may be shorter. Segments come in any order and may overlap; their offsets count from
    the beginning of the run.
    """
    for chunk, table, devices in targets.cut(bounds):
        nbytes = bounds[chunk + 1] - bounds[chunk]
        # Quickly, where only whole chunks can be verified:
        for run in [range(1)] if unit >= nbytes else unit_runs(table, unit):
            rows, where = table, devices
            if len(run) * unit < nbytes:
                inside = (table[:, 1] >= run.start * unit) & (table[:, 1] < run.stop * unit)
                rows, where = table[inside], None if devices is None else devices[inside]
                rows[:, 1] -= np.uint64(run.start * unit)
            yield chunk, run, Segments(rows.tobytes()) if where is None else _by_device(rows, where)


def unit_runs(table: Table, unit: int) -> list[range]:
    """Return the units that hold bytes of a table's rows, as runs; no row reaches from one run into another.

    If at most one of eight units between the first and the last is not needed, all are one run: one long read is
    faster than several.
    """
    if not len(table):
        return []
    first, last = table[:, 1].astype(np.int64) // unit, (table[:, 1] + table[:, 2] - 1).astype(np.int64) // unit
    count = int(last.max()) + 1
    begun, ended = (np.bincount(each, minlength=count + 1) for each in (first, last + 1))
    units = np.flatnonzero(np.cumsum(begun - ended))
    if 8 * len(units) >= 7 * (count - int(units[0])):
        return [range(int(units[0]), count)]
    runs = np.split(units, np.flatnonzero(np.diff(units) > 1) + 1)
    return [range(int(run[0]), int(run[-1]) + 1) for run in runs]


def _by_device(raw: Table, devices: npt.NDArray[np.int32]) -> Segments:
    tables = {device: raw[devices == device] for device in np.unique(devices).tolist()}
    host = tables.pop(HOST, raw[:0])
    return Segments(host.tobytes(), tables)
