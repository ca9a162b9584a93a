"""Reading a committed checkpoint: which one, its manifest, and its chunks, every checksum verified on the way.

Memory is bounded by the pool of staging buffers; bytes reach their tensors only after a checksum of them held. Where a
manifest has checksums of the MiBs of each chunk, only those MiBs are read that hold wanted bytes, else whole chunks.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import warnings
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pccheck_async.errors import (
    CorruptStoreError,
    DamagedError,
    NoCheckpointError,
    ReadError,
    StoreError,
    is_exhausted,
)
from pccheck_async.format import Entry, Which, align, combine, crc32, describe_which
from pccheck_async.format.checksum import PIECE_BYTES, SUM_BYTES
from pccheck_async.format.manifest import ChunkEntry, Manifest, decode
from pccheck_async.medium import File, Medium
from pccheck_async.medium.open_medium import OpenMedium
from pccheck_async.state import AnyTargets, Targets
from pccheck_async.telemetry import write
from pccheck_async.transfer import BufferLease, BufferPool, Segments, Tasks, address_of, aligned_buffer
from pccheck_async.transfer.copying import CopyBackend
from pccheck_async.transfer.plan import Table, scatter_runs, unit_runs

__all__ = [
    "DroppedMeanwhileError", "Fallback", "UnreadableError", "VerifiedChunks", "choose", "only_rejected", "pool_for",
    "read_manifest", "read_payload", "unreadable_errors",
]  # fmt: skip


def choose(
    entries: Sequence[Entry], which: Which, unreadable: Collection[int] = (), superseded: Sequence[Entry] = ()
) -> Entry | None:
    """Return the checkpoint to read: the newest of those that are asked for, without the ``unreadable`` ones.

    Those that were ``superseded`` are read only where all newer ones are unreadable, and never by step or name. Those
    that are rejected are read by step or name alone, where no other one has it.
    """
    if superseded and which is None:
        entries = sorted((*entries, *superseded), key=lambda entry: -entry.counter)
    wanted = [entry for entry in entries if entry.matches(which) and entry.counter not in unreadable]
    rejected = wanted[0] if wanted and which is not None else None
    return next((entry for entry in wanted if not entry.rejected), rejected)


def only_rejected(entries: Collection[Entry], which: Which, where: str | os.PathLike[str]) -> StoreError | None:
    """Return what to raise where all checkpoints that are asked for are rejected; None where that is not so."""
    wanted = [entry for entry in entries if entry.matches(which)]
    if not wanted or not all(entry.rejected for entry in wanted):
        return None
    steps = ", ".join(sorted({str(entry.step) for entry in wanted}))
    return StoreError(
        f"{os.fspath(where)} holds none but rejected checkpoints{describe_which(which)} (steps {steps}): load() with a "
        "step reads one all the same; to begin anew, use another folder"
    )


class DroppedMeanwhileError(NoCheckpointError):
    """The checkpoint to read was superseded before its slot could be held."""


class UnreadableError(Exception):
    """What reading the store raised. Objects of the user may raise such errors, too, which say nothing of the store."""

    def __init__(self, error: DamagedError | ReadError) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def unreadable_errors() -> Iterator[None]:
    """Tell errors that say something of a checkpoint from all others: they become UnreadableError."""
    try:
        yield
    except (DamagedError, ReadError) as error:
        raise UnreadableError(error) from error


class Fallback:
    """The way past checkpoints that cannot be read, to the newest one that can.

    ::

        while (found := find()) is not None:
            with fallback.trying(*found, find):
                return read(...)

    Superseded checkpoints come last, and only where all of one is whole; but before them, what a device failed to read
    is tried once more: a failure that passes must not cost a checkpoint that is kept. Where a step or a name was asked
    for, damage raises, and nothing else is read.

    Attributes:
        unreadable: Counters of those that were tried in vain.
        failure: The newest one of them, and its error; a superseded one only where there is no other.
    """

    def __init__(self, which: Which) -> None:
        self.unreadable: set[int] = set()
        self.failure: tuple[Entry, Exception] | None = None
        self._which = which
        self._unread: set[int] | None = set()  # by the device; None once all of them were tried again

    @contextmanager
    def trying(self, entry: Entry, superseded: bool, older: Callable[[], tuple[Entry, bool] | None]) -> Iterator[None]:
        """Read ``entry`` in this context, which ends quietly where the next one has to be tried, and warns of that.

        ``older`` returns what is to be read next and is not ``unreadable``, and whether that was superseded. Raises
        what :func:`unreadable_errors` found where nothing is left to try, or where it says nothing of the checkpoint.
        """
        try:
            yield
        except DroppedMeanwhileError:
            return  # newer ones were committed
        except UnreadableError as unreadable:
            error = unreadable.error
        else:
            if superseded and self.failure is not None:
                _warn_damaged(self.failure[0], entry, self.failure[1])
            return
        if is_exhausted(error):
            raise error
        self.unreadable.add(entry.counter)
        if self.failure is None or not superseded:
            self.failure = entry, error
        chosen = older()
        if self._which is not None or chosen is None:
            raise self.failure[1] from None
        if self._unread is not None and isinstance(error, ReadError):
            self._unread.add(entry.counter)
        if chosen[1] and self._unread:
            self.unreadable -= self._unread
            self._unread = None
        elif chosen[0].counter < entry.counter and not chosen[1]:  # else only once that one proved whole
            _warn_damaged(self.failure[0], chosen[0], self.failure[1])


def _warn_damaged(entry: Entry, older: Entry, error: Exception) -> None:
    """Warn that a checkpoint is passed over for an older one. In the log it is below what is shown by default."""
    text = f"checkpoint of step {entry.step} cannot be read ({error}); falling back to step {older.step}"
    write(logging.INFO, "fell_back", "%s", text, step=entry.step, counter=entry.counter, error=str(error))
    warnings.warn(text, RuntimeWarning, stacklevel=5)


def pool_for(manifest: Manifest, pool: BufferPool) -> BufferPool:
    """Return a pool whose buffers hold this checkpoint's chunks: ``pool``, or one as large where chunks are larger."""
    largest = max((chunk.nbytes for chunk in manifest.chunks), default=0)
    return pool if largest <= pool.buffer_bytes else BufferPool(max(pool.nbytes, largest), largest)


_MOST_RUNS = 8
"""Read and verified at a time. They keep a disk busy; more would only be memory that nothing has touched yet, which a
restart pays for at the wrong moment: on ours a cold restore took half as long again."""


async def read_manifest(medium: Medium, file: File, entry: Entry, block_bytes: int) -> Manifest:
    """Read and validate the manifest that a commit record names.

    Raises DamagedError, ReadError; CorruptStoreError where it is what was written and this version does not understand.
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


def _chunks_between(chunks: Sequence[ChunkEntry], low: int, high: int) -> range:
    """Return the indices of the chunks that hold any of the payload's bytes from ``low`` to before ``high``."""
    first = bisect_right(chunks, low, key=lambda chunk: chunk.offset) - 1
    return range(max(0, first), bisect_left(chunks, high, key=lambda chunk: chunk.offset)) if low < high else range(0)


class _Run(NamedTuple):
    """Bytes of a chunk that are read in one go and verified by one checksum: all of it, or some of its MiBs."""

    chunk: int
    offset: int
    """In the payload."""
    nbytes: int
    checksum: int


def _unit(manifest: Manifest, index: int) -> int:
    """Return of how many bytes of a chunk there is a checksum."""
    return manifest.chunks[index].nbytes if manifest.pieces is None else PIECE_BYTES


def _run(manifest: Manifest, index: int, unit: int, units: range) -> _Run:
    chunk, checksum = manifest.chunks[index], manifest.chunks[index].checksum
    low, high = units.start * unit, min(units.stop * unit, chunk.nbytes)
    if high - low < chunk.nbytes:
        assert manifest.pieces is not None
        checksum = combine(manifest.pieces[index][units.start * SUM_BYTES : units.stop * SUM_BYTES], high - low)
    return _Run(index, chunk.offset + low, high - low, checksum)


async def read_payload(
    medium: Medium,
    backend: CopyBackend,
    pool: BufferPool,
    file: File,
    manifest: Manifest,
    targets: AnyTargets,
    marks: Any = None,
    advance: Callable[[int], None] = lambda _: None,
    *,
    every: bool = False,
) -> None:
    """Fill ``targets`` from the chunks that hold them, or from MiBs of these where those can be verified alone.

    The pool's buffers hold at least the manifest's largest chunk. Targets on a device are filled behind the marked work
    (``marks``: what :meth:`CopyBackend.mark_queued_work` returned), and are whole when this returns, for any stream.
    ``advance`` is called with the bytes of the payload that were read, or need not be.

    Cancellation: ends once every read and copy ended. The targets are then partly filled.

    Raises DamagedError where a checksum does not hold, ReadError; other bytes may have been copied already.
    """
    if marks:
        await backend.order_after(marks)
    near = _chunks_between(manifest.chunks, *targets.span)
    turns = asyncio.Semaphore(_MOST_RUNS)

    def end(done: asyncio.Task[None], lease: BufferLease, nbytes: int) -> None:
        lease.release()
        turns.release()
        if not done.cancelled() and done.exception() is None:
            advance(nbytes)

    def runs_of(index: int, chunk: ChunkEntry) -> list[tuple[_Run, Segments]]:
        unit = chunk.nbytes if every else _unit(manifest, index)
        runs = scatter_runs(chunk.offset, chunk.nbytes, unit, targets) if index in near else []
        if every and not runs:
            runs = [(range(1), Segments())]
        return [(_run(manifest, index, unit, units), segments) for units, segments in runs]

    async with Tasks() as group:
        for index, chunk in enumerate(manifest.chunks):
            runs = runs_of(index, chunk)
            if unwanted := chunk.nbytes - sum(run.nbytes for run, _ in runs):
                advance(unwanted)
            for run, segments in runs:
                await turns.acquire()
                lease = await pool.lease()
                work = _read_run(medium, backend, file, run, segments, lease.view, targets)
                # The lease outlives the task, also one that is cancelled before it ran at all.
                group.create_task(work).add_done_callback(partial(end, lease=lease, nbytes=run.nbytes))


async def _read_run(
    medium: Medium,
    backend: CopyBackend,
    file: File,
    run: _Run,
    segments: Segments,
    buffer: memoryview,
    keepalive: Any,
) -> None:
    """Read into a staging buffer, verify that, and only then copy segments of it to their places."""
    view = buffer[: run.nbytes]
    try:
        if await medium.read(file, run.offset, view) != run.nbytes:
            raise OSError(errno.EBADMSG, "the file is too short")
        await backend.scatter(view, run.checksum, segments, keepalive)
    except OSError as error:
        if error.errno != errno.EBADMSG:
            raise
        raise DamagedError(
            f"{file.name}: chunk {run.chunk} (bytes {run.offset} to {run.offset + run.nbytes}) of the checkpoint is "
            f"damaged: {error.strerror}"
        ) from None


_KEPT = 4
"""Chunks that stay in memory: tensors that lie beside each other are mostly read one after the other."""


class _Kept(NamedTuple):
    """A chunk in memory, and which units of it were read and verified."""

    lease: BufferLease
    there: set[int]


class VerifiedChunks:
    """Bytes of a payload by their place. Memory is bounded by the pool; one call at a time works.

    The slot ``file`` stays locked for as long as this is used. Another pool is used where chunks do not fit into
    ``pool``'s buffers.
    """

    def __init__(self, opened: OpenMedium, file: File, manifest: Manifest, pool: BufferPool) -> None:
        self._medium = opened.medium
        self._backend = CopyBackend(opened.operations)
        self._file = file
        self._manifest = manifest
        self._pool = pool_for(manifest, pool)
        self._most = max(1, min(_KEPT, self._pool.nbytes // self._pool.buffer_bytes // 2))
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._turn = asyncio.Lock()

    async def fill(self, targets: Targets, advance: Callable[[int], None] = lambda _: None) -> None:
        """Fill ``targets`` in host memory: from few chunks one by one, from many as :func:`read_payload` does.

        ``advance`` is called with the bytes of each chunk that was read, or need not be.

        Raises DamagedError, ReadError.
        """
        chunks = self._manifest.chunks
        near = _chunks_between(chunks, *targets.span)
        rows_of = {index: targets.segments(chunks[index].offset, chunks[index].nbytes)[0] for index in near}
        touched = {index: rows for index, rows in rows_of.items() if len(rows)}
        async with self._turn:
            if len(touched) > self._most:
                self._drop(0)  # the whole pool is for the chunks to come
                payload = self._medium, self._backend, self._pool, self._file, self._manifest
                await read_payload(*payload, targets, advance=advance)
                return
            for index, rows in touched.items():
                base = address_of(await self._get(index, rows))
                for address, offset, length in rows.tolist():
                    ctypes.memmove(address, base + offset, length)
                advance(chunks[index].nbytes)
            advance(sum(chunk.nbytes for index, chunk in enumerate(chunks) if index not in touched))

    async def pieces(self, ranges: Iterable[tuple[int, int]]) -> AsyncGenerator[memoryview, None]:
        """Yield the bytes of ranges (first byte, the one after the last); each piece stays as it is until the next.

        The next chunk is read meanwhile; what several ranges want of a chunk, in one go. Close the iterator where it is
        not used up. Raises DamagedError, ReadError.
        """
        chunks = self._manifest.chunks
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
        """Return a chunk, of which the units that hold these rows are there."""
        kept = self._kept.pop(index, None)
        if kept is None:
            self._drop(self._most - 1)
            kept = _Kept(await self._pool.lease(), set())
        self._kept[index] = kept  # as the last one that was used
        view, unit = kept.lease.view[: self._manifest.chunks[index].nbytes], _unit(self._manifest, index)
        async with Tasks() as group:
            for units in unit_runs(rows, unit):
                # What is there may be in use: it is not read again.
                partly = not kept.there.isdisjoint(units)
                for missing in [range(n, n + 1) for n in units if n not in kept.there] if partly else [units]:
                    group.create_task(self._read(index, missing, view[missing.start * unit :], kept.there))
        return view

    async def _read(self, index: int, units: range, into: memoryview, there: set[int]) -> None:
        run = _run(self._manifest, index, _unit(self._manifest, index), units)
        await _read_run(self._medium, self._backend, self._file, run, Segments(), into, None)
        there.update(units)

    def _drop(self, most: int) -> None:
        while len(self._kept) > most:
            self._kept.popitem(last=False)[1].lease.release()
