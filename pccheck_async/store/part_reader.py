# SPDX-License-Identifier: Apache-2.0
"""Reading one part of a checkpoint: its manifest and its chunks; every checksum is verified.

Memory is bounded by the pool of staging buffers; bytes are copied to tensors only after their checksum is verified. If
a manifest has checksums of the MiBs of each chunk, only MiBs with wanted bytes are read, else whole chunks.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pccheck_async.errors import CorruptStoreError, DamagedError, ReadError, read_error
from pccheck_async.format import Entry, align, combine, crc32
from pccheck_async.format.checksum import PIECE_BYTES, SUM_BYTES
from pccheck_async.format.manifest import ChunkEntry, Manifest, decode
from pccheck_async.medium import File, Medium
from pccheck_async.medium.mapping import view_private
from pccheck_async.state import Targets
from pccheck_async.store.chunks import Checked, Damaged, Staging, check_chunks, in_buffers
from pccheck_async.transfer import (
    BufferLease,
    BufferPool,
    Tasks,
    address_of,
    aligned_buffer,
)
from pccheck_async.transfer.copying import CopyBackend
from pccheck_async.transfer.plan import Segments, Table, scatter_runs, unit_runs

__all__ = ["PartReader", "Source", "read_encoded_manifest", "read_manifest"]


class Source(ABC):
    """The place of one part of a checkpoint, and the lock that keeps it from being overwritten. Used on one loop.

    Attributes:
        entry: The part's entry in its record; available after :meth:`acquire`.
        medium: The medium of the part's file.
        block_bytes: Block size of the store, in bytes; available after :meth:`acquire`.
    """

    entry: Entry
    medium: Medium
    block_bytes: int
    _file: File | None = None

    @abstractmethod
    async def acquire(self) -> File:
        """Lock the part's file, and return it. Raises DamagedError, ReadError, NoCheckpointError."""

    async def close(self) -> None:
        """Unlock and close the file, if it is held."""
        file, self._file = self._file, None
        if file is not None:
            await self.medium.close(file)

    def release(self) -> None:
        """Start :meth:`close` without waiting for it. Idempotent."""
        self._closing = asyncio.ensure_future(self.close())


async def read_manifest(medium: Medium, file: File, entry: Entry, block_bytes: int) -> Manifest:
    """Read and validate the manifest that a commit record names.

    Raises DamagedError, ReadError; CorruptStoreError if its checksum holds and this version does not understand it.
    """
    data = await read_encoded_manifest(medium, file, entry, block_bytes)
    try:
        manifest = decode(data)
    except CorruptStoreError as error:
        raise CorruptStoreError(
            f"{file.name}: the manifest of checkpoint {entry.counter} (step {entry.step}) is what was written, and not "
            f"understood ({error}); load it with the version of this package, and of torch, that saved it, or give the "
            "step of another one"
        ) from error
    if manifest.counter != entry.counter or manifest.payload_nbytes > entry.manifest_offset:
        raise CorruptStoreError(f"{file.name}: the manifest is not that of checkpoint {entry.counter}")
    return manifest


async def read_encoded_manifest(medium: Medium, file: File, entry: Entry, block_bytes: int) -> bytes:
    """Read the bytes of the manifest that a commit record names, and verify its checksum.

    Raises DamagedError, ReadError.
    """
    end = entry.manifest_offset + entry.manifest_nbytes
    if entry.manifest_offset % block_bytes or end > file.nbytes:
        raise DamagedError(
            f"{file.name} has {file.nbytes} bytes; the manifest of checkpoint {entry.counter} is said to end at {end}"
        )
    view = aligned_buffer(align(entry.manifest_nbytes, block_bytes))
    got = await medium.read(file, entry.manifest_offset, view)
    data = bytes(view[: min(got, entry.manifest_nbytes)])
    if len(data) != entry.manifest_nbytes or crc32(data) != entry.manifest_checksum:
        raise DamagedError(f"{file.name}: the manifest of checkpoint {entry.counter} (step {entry.step}) is damaged")
    return data


def _chunks_between(chunks: Sequence[ChunkEntry], low: int, high: int) -> range:
    """Return the indices of the chunks that hold any of the payload's bytes from ``low`` to before ``high``."""
    first = bisect_right(chunks, low, key=lambda chunk: chunk.offset) - 1
    return range(max(0, first), bisect_left(chunks, high, key=lambda chunk: chunk.offset)) if low < high else range(0)


class _Run(NamedTuple):
    """Bytes of a chunk that are read in one go and verified by one checksum: all of it, or some of its MiBs."""

    chunk: int
    offset: int
    """Offset in the payload, in bytes."""
    nbytes: int
    checksum: int
    segments: Segments
    """The places of wanted bytes, relative to the beginning of the run."""


_OFFSET: Final = attrgetter("offset")
_KEPT = 4
"""Most chunks that stay in memory: neighbouring tensors are mostly read one after the other."""


class _Kept(NamedTuple):
    """A chunk in memory, and the indices of its units that were read and verified."""

    lease: BufferLease
    there: set[int]


class PartReader:
    """Reads one process's part of a checkpoint: all of it, if one process saved it. Coroutines run on one loop.

    Args:
        source: The place and the lock of the part.
        backend: Backend that copies verified bytes to tensors.
        staging: Buffers to read into.

    Attributes:
        manifest: The part's manifest; available after :meth:`hold`.
        keeps: Whether some chunks stay in memory between calls of :meth:`fill`, for reading tensor by tensor into host
            memory; :meth:`pieces` always keeps some.
    """

    manifest: Manifest
    _file: File

    def __init__(self, source: Source, backend: CopyBackend, staging: Staging) -> None:
        self.source = source
        self.backend = backend
        self.staging = staging
        self.keeps = False
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._turn = asyncio.Lock()
        self._verified: set[int] = set()  # chunks, in the mapped payload

    @property
    def entry(self) -> Entry:
        """The part's entry in its record; available after :meth:`hold`."""
        return self.source.entry

    @property
    def file(self) -> File:
        """The open slot; available after :meth:`hold`."""
        return self._file

    async def hold(self) -> None:
        """Lock the slot against reuse, and read the manifest. Raises DamagedError, ReadError, NoCheckpointError."""
        self._file = await self.source.acquire()
        self.manifest = await read_manifest(self.source.medium, self._file, self.entry, self.source.block_bytes)

    @property
    def _pool(self) -> BufferPool:
        return self.staging.pool_for(self.largest_chunk)

    @cached_property
    def largest_chunk(self) -> int:
        """Bytes of the largest chunk; available after :meth:`hold`."""
        return int(np.diff(self._bounds).max(initial=0))

    @property
    def _most(self) -> int:
        """Most chunks that are kept in memory."""
        return max(1, min(_KEPT, self._pool.nbytes // self._pool.buffer_bytes // 2))

    async def verify(self, damaged: Damaged | None = None, checked: Checked | None = None) -> None:
        """Read and verify every chunk, and fill nothing; the arguments are those of :func:`check_chunks`.

        Raises DamagedError, ReadError for the first damage if ``damaged`` is None.
        """

        def refuse(index: int, reason: str, error: ReadError | None) -> None:
            chunk = self.manifest.chunks[index]
            raise error or self._damaged(index, chunk.offset, chunk.nbytes, reason)

        medium, operations, damaged = self.source.medium, self.backend.operations, damaged or refuse
        await check_chunks(
            medium, operations, self._file, self.manifest, self.staging, damaged=damaged, checked=checked
        )

    async def view(self) -> memoryview:
        """Return a private mapping of the payload of a file in memory, which stays locked until the last view is gone.

        Bytes in it are not verified (:meth:`verify_there`). Raises DamagedError.
        """
        if not (nbytes := self.manifest.payload_nbytes):
            return memoryview(b"")
        try:
            return await self.backend.operations.call(view_private, self._file.fd, nbytes)
        except OSError as error:
            raise DamagedError(f"{self._file.name} of the checkpoint cannot be mapped: {error.strerror}") from error

    async def verify_there(self, payload: memoryview, ranges: Iterable[tuple[int, int]]) -> None:
        """Verify, once each, the chunks of the mapped payload that hold these ranges (first byte, byte after the last).

        Raises DamagedError, ReadError.
        """
        chunks = self.manifest.chunks
        async with Tasks() as group:
            for index in {n for low, high in ranges for n in _chunks_between(chunks, low, high)} - self._verified:
                group.create_task(self._verify_chunk(index, payload))

    async def _verify_chunk(self, index: int, payload: memoryview) -> None:
        chunk = self.manifest.chunks[index]
        view = payload[chunk.offset : chunk.offset + chunk.nbytes]
        try:
            await self.backend.scatter(view, chunk.checksum, Segments())
        except OSError as error:
            if error.errno != errno.EBADMSG:
                raise read_error(error, self._file.name) from error
            raise self._damaged(index, chunk.offset, chunk.nbytes, error.strerror) from None
        self._verified.add(index)

    @cached_property
    def _bounds(self) -> npt.NDArray[np.int64]:
        """The offsets of all chunks, and the end of the last one, in bytes."""
        return np.array([*map(_OFFSET, self.manifest.chunks), self.manifest.payload_nbytes], np.int64)

    @cached_property
    def _unit(self) -> int:
        """Bytes of a chunk that one checksum covers: a MiB; if chunks have only one checksum, the payload's length."""
        return self.manifest.payload_nbytes if self.manifest.pieces is None else PIECE_BYTES

    def _run(self, index: int, units: range, segments: Segments) -> _Run:
        chunk, pieces, unit = self.manifest.chunks[index], self.manifest.pieces, self._unit
        low, high, checksum = units.start * unit, min(units.stop * unit, chunk.nbytes), chunk.checksum
        if high - low < chunk.nbytes:
            assert pieces is not None
            checksum = combine(pieces[index][units.start * SUM_BYTES : units.stop * SUM_BYTES], high - low)
        return _Run(index, chunk.offset + low, high - low, checksum, segments)

    async def fill(self, targets: Targets, marks: Any = None, advance: Callable[[int], None] = lambda _: None) -> None:
        """Fill ``targets`` from the chunks that hold them, or from MiBs of these that can be verified alone.

        Targets on a device are filled after the marked work (``marks``, from :meth:`CopyBackend.mark_queued_work`),
        and are whole when this returns, for any stream. ``advance`` is called with numbers of bytes of the payload that
        were read, or are not needed.

        Cancellation: raised when every read and copy ended. The targets are then partly filled.

        Raises DamagedError if a checksum does not hold, ReadError; other bytes may have been copied already.
        """
        if not self.keeps or targets.has_patterns:
            await self._stream(targets, marks, advance)
            return
        chunks = self.manifest.chunks
        touched = {index: rows for index, rows, _ in targets.cut(self._bounds)}
        async with self._turn:
            if len(touched) > self._most:
                self._drop(0)  # the whole pool is for the chunks to come
                await self._stream(targets, marks, advance)
                return
            for index, rows in touched.items():
                base = address_of(await self._get(index, rows))
                for address, offset, length in rows.tolist():
                    ctypes.memmove(address, base + offset, length)
                advance(chunks[index].nbytes)
            if unwanted := self.manifest.payload_nbytes - sum(chunks[index].nbytes for index in touched):
                advance(unwanted)

    async def pieces(self, ranges: Iterable[tuple[int, int]]) -> AsyncGenerator[memoryview, None]:
        """Yield the bytes of ranges (first byte, byte after the last); a piece is valid until the next is requested.

        The next chunk is read ahead; the bytes of several ranges in one chunk are read in one go. Close the iterator if
        it is not used up. Raises DamagedError, ReadError.
        """
        chunks = self.manifest.chunks
        wanted = [
            (index, max(low - chunks[index].offset, 0), min(high - chunks[index].offset, chunks[index].nbytes))
            for low, high in ranges
            for index in _chunks_between(chunks, low, high)
        ]
        rows: dict[int, list[tuple[int, int, int]]] = {}
        for index, low, high in wanted:
            rows.setdefault(index, []).append((0, low, high - low))
        tables = {index: np.array(each, np.uint64) for index, each in rows.items()}
        ahead: asyncio.Task[memoryview] | None = None
        try:
            for number, (index, low, high) in enumerate(wanted):
                view = await (ahead or self._chunk(index, tables[index]))
                ahead = None
                if number + 1 < len(wanted) and self._most > 1:
                    following = wanted[number + 1][0]
                    ahead = asyncio.create_task(self._chunk(following, tables[following]))
                yield view[low:high]
        finally:
            if ahead is not None:
                ahead.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await ahead

    async def _chunk(self, index: int, rows: Table) -> memoryview:
        async with self._turn:
            return await self._get(index, rows)

    async def _get(self, index: int, rows: Table) -> memoryview:
        """Return the buffer of a chunk in which the units that hold ``rows`` have been read and verified."""
        kept = self._kept.pop(index, None)
        if kept is None:
            self._drop(self._most - 1)
            kept = _Kept(await self._pool.lease(), set())
        self._kept[index] = kept  # as the last one that was used
        view, unit = kept.lease.view[: self.manifest.chunks[index].nbytes], self._unit
        async with Tasks() as group:
            for units in unit_runs(rows, unit):
                # Bytes that are there may be in use: they are not read again.
                partly = not kept.there.isdisjoint(units)
                for missing in [range(n, n + 1) for n in units if n not in kept.there] if partly else [units]:
                    group.create_task(self._read(index, missing, view[missing.start * unit :], kept.there))
        return view

    async def _stream(self, targets: Targets, marks: Any, advance: Callable[[int], None]) -> None:
        if marks:
            await self.backend.order_after(marks)

        def runs() -> Iterator[_Run]:
            done = 0
            for found in scatter_runs(self._bounds, self._unit, targets):
                run = self._run(*found)
                if run.offset > done:
                    advance(run.offset - done)
                done = run.offset + run.nbytes
                yield run
            if self.manifest.payload_nbytes > done:
                advance(self.manifest.payload_nbytes - done)

        await in_buffers(self._pool, runs(), partial(self._read_run, keepalive=targets, advance=advance))

    async def _read_run(
        self, run: _Run, buffer: memoryview, keepalive: Any = None, advance: Callable[[int], None] = lambda _: None
    ) -> None:
        """Read a run into a staging buffer, verify it, and only then copy its segments to their places.

        If the medium has it in memory of its own, it is verified and copied from there.
        """
        medium, view = self.source.medium, None
        try:
            if run.segments.host and not run.segments.devices:  # devices copy from pinned memory
                view = await medium.view(self._file, run.offset, run.nbytes)
            if view is None:
                view = buffer[: run.nbytes]
                if await medium.read(self._file, run.offset, view) != run.nbytes:
                    raise OSError(errno.EBADMSG, "the file is too short")
            await self.backend.scatter(view, run.checksum, run.segments, keepalive)
        except OSError as error:
            if error.errno == errno.EBADMSG:
                raise self._damaged(run.chunk, run.offset, run.nbytes, error.strerror) from None
            if isinstance(error, ReadError):
                raise
            raise read_error(error, self._file.name) from error
        advance(run.nbytes)

    def _damaged(self, chunk: int, offset: int, nbytes: int, reason: str | None) -> DamagedError:
        where = f"{self._file.name}: chunk {chunk} (bytes {offset} to {offset + nbytes})"
        return DamagedError(f"{where} of the checkpoint is damaged: {reason}")

    async def _read(self, index: int, units: range, into: memoryview, there: set[int]) -> None:
        await self._read_run(self._run(index, units, Segments()), into)
        there.update(units)

    def _drop(self, most: int) -> None:
        while len(self._kept) > most:
            self._kept.popitem(last=False)[1].lease.release()

    async def close(self) -> None:
        """Drop kept chunks, and unlock and close the slot."""
        self._drop(0)
        await self.source.close()

    def release(self) -> None:
        """Start to close the part without waiting for it. Idempotent."""
        self._drop(0)
        self.source.release()
