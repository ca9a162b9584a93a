"""The scheduler: the order of one checkpoint, from its admission until it is durable.

A checkpoint is a task graph: for each chunk a staging buffer is leased, and a coroutine copies and writes; the buffer
goes back when that has ended, in success or failure. Another coroutine writes the manifest as soon as the last chunk is
copied; when all ended, the store commits. A state of one chunk, captured inline or into one staging buffer, is written
in one piece with its manifest, without a coroutine for each part. Checkpoints run concurrently, at most
``max_in_flight`` of them (PCcheck, section 3.1), admitted in the order of their counters. (Invariants, such as I9:
:mod:`pccheck_async.store`.)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import TypeAlias

from pccheck_async.engine.capture import Capture
from pccheck_async.engine.overlap import Overlapped
from pccheck_async.engine.peers import Peers
from pccheck_async.engine.pending import PendingCheckpoint
from pccheck_async.errors import CheckpointError, NoCheckpointError, write_error
from pccheck_async.format import CheckpointInfo, Entry, align, crc32
from pccheck_async.format.checksum import SUM_BYTES, piece_count
from pccheck_async.format.manifest import ChunkEntry, Manifest, ManifestEncoder, version_of
from pccheck_async.medium import Medium, Piece
from pccheck_async.store import SlotLease, Store
from pccheck_async.telemetry import Sink, Stream, Work, enter_chunk, work, write
from pccheck_async.telemetry.events import Abandoned, Captured
from pccheck_async.transfer import BufferLease, BufferPool, Tasks, aligned_buffer
from pccheck_async.transfer.plan import Planner

__all__ = ["Job", "Scheduler"]

_LARGEST_CHECKSUM = 0xFFFFFFFF
_ROUNDS_TO_RESERVE = 4
"""Rounds of the event loop after which a slot is reserved, unless it has to be made or waited for."""
_YIELD_EVERY = 8
"""Chunks that are begun before others may run."""
_MANY = 1000
"""Tensors that take a while to encode: some 100 us."""


_ToCommit: TypeAlias = tuple[SlotLease, Entry, Sequence[Piece]]
"""The slot of a captured checkpoint, its entry for the commit record, and its pieces that are not written yet."""


@dataclass(slots=True, eq=False)
class Job:
    """An admitted checkpoint."""

    pending: PendingCheckpoint
    capture: Capture
    metadata: dict[str, str | int | float | bool | None]
    overlapped: Overlapped | None
    """Detects a torn capture; None if training waits for all of it."""
    trace: Sink | None
    """Gets spans of the work for it."""
    task: asyncio.Task[None] = field(init=False)
    abandoned: CheckpointError | None = None
    """Its failure, once its capture was stopped."""


@dataclass(eq=False, kw_only=True)
class Scheduler:
    """Runs admitted checkpoints on the engine's loop."""

    store: Store
    peers: Peers
    medium: Medium
    pool: BufferPool
    planner: Planner
    max_in_flight: InitVar[int]
    ended: Callable[[PendingCheckpoint, Exception | None, bool, int], None]
    """Called with every checkpoint that ended, its error, whether it was superseded, and its bytes; before its waiting
    callers get it, but for one whose capture was stopped."""
    stream: Stream
    path: str
    """Of the store, for the log."""

    def __post_init__(self, max_in_flight: int) -> None:
        self._turns = asyncio.Semaphore(max_in_flight)  # first come, first served
        self._manifests = ManifestEncoder()
        self._jobs: dict[PendingCheckpoint, Job] = {}
        self._until: float | None = None
        self._last_drains: set[asyncio.Timeout] = set()

    @property
    def tasks(self) -> dict[PendingCheckpoint, asyncio.Task[None]]:
        """Those of the checkpoints that have not ended."""
        return {pending: job.task for pending, job in self._jobs.items()}

    def start(self, job: Job) -> None:
        """Admit a checkpoint. Called in the order of counters, which is the order in which they are served."""
        pending, capture, refused = job.pending, job.capture, None
        try:
            self.peers.request(pending.counter, pending.step, job.metadata, capture.sums or {}, capture.differing)
        except BaseException as error:  # noqa: BLE001 - for callers that await the checkpoint
            refused = error
        task = asyncio.get_running_loop().create_task(self._run(job, refused), name=f"checkpoint {pending.counter}")
        job.task = task
        self._jobs[pending] = job
        job.task.add_done_callback(lambda _: self._jobs.pop(pending))

    async def abort(self, pending: PendingCheckpoint) -> bool:
        """Cancel a checkpoint, and wait until nothing of it runs (I9); False if it was captured, and goes on."""
        job = self._jobs.get(pending)
        if job is None or pending.is_captured:
            return False
        job.task.cancel()
        await asyncio.wait((job.task,))
        return True

    def end_with(self, counter: int, error: CheckpointError) -> None:
        """Write a checkpoint no further: its group decided otherwise."""
        for pending, job in self._jobs.items():
            if pending.counter == counter:
                job.abandoned = error
                # One round later: a task that is cancelled before its first step never reports its end.
                asyncio.get_running_loop().call_soon(job.task.cancel)

    async def stop_capture(self, pending: PendingCheckpoint, max_stall: float | None) -> bool:
        """Give a capture up that holds training up for too long; return once nothing reads the live state any more.

        The checkpoint fails; its writes may take longer: buffers, slot and turn go back when they ended (I9). False
        if it was captured already, and goes on.
        """
        job = self._jobs.get(pending)
        if job is None or pending.is_captured:
            return False
        self.stream.emit(Abandoned(step=pending.step, counter=pending.counter, seconds=max_stall))
        error = CheckpointError(
            f"abandoned the checkpoint of step {pending.step}: its capture held an optimizer's step up for longer than "
            f"max_stall = {max_stall} s"
        )
        job.abandoned = error  # the task may end before this does
        pending.failure_told = True
        job.task.cancel()
        await job.capture.stop()
        pending.set_failed(error)
        return True

    async def drain(self, timeout: float | None = None, *, last: bool = False) -> list[PendingCheckpoint]:
        """Wait until every checkpoint admitted so far ended; return those that did not within ``timeout`` seconds.

        ``last``: nothing comes after it, and it also ends at the time of :meth:`end_last_drains_at`.

        Cancellation: only stops the waiting.
        """
        waiting = self.tasks
        if waiting:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout) as limit:
                    if last:
                        self._last_drains.add(limit)
                        self._shorten(limit)
                    try:
                        await asyncio.wait(waiting.values())
                    finally:
                        self._last_drains.discard(limit)
        return [pending for pending, task in waiting.items() if not task.done() and not pending.done()]

    def give_up(self, pendings: Iterable[PendingCheckpoint]) -> None:
        """Begin no commit of these any more, whenever their operations end; one that is under way may end well."""
        for pending in pendings:
            if (job := self._jobs.get(pending)) is not None:
                job.task.cancel()

    def end_last_drains_at(self, until: float | None) -> None:
        """Make last drains, those that wait already too, end at a time of the monotonic clock; None: when all ended."""
        self._until = until
        for drain in self._last_drains:
            self._shorten(drain)

    def _shorten(self, drain: asyncio.Timeout) -> None:
        if self._until is not None and not drain.expired():
            end = asyncio.get_running_loop().time() + self._until - time.monotonic()
            when = drain.when()
            drain.reschedule(end if when is None else min(when, end))

    async def cancel_all(self) -> None:
        """Cancel the remaining tasks and wait until they ended."""
        tasks = self.tasks.values()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, job: Job, refused: BaseException | None) -> None:
        """Save a checkpoint, or end one that the store ``refused`` with that error."""
        pending = job.pending
        work.set(Work(self.path, pending.step, pending.counter, recorder=job.trace))
        try:
            try:
                if refused is not None:
                    raise refused
                await self._turns.acquire()
                try:
                    await self.peers.admitted(pending.counter)
                    info, superseded = await self._save(job)
                finally:
                    self._turns.release()  # only after the slot that the commit freed is free
            finally:
                # Every operation on it has ended; holders of the checkpoint, or of its error, must not keep the state.
                job.capture.release()
                if job.overlapped is not None:
                    job.overlapped.compare()
        except asyncio.CancelledError:
            error = job.abandoned or CheckpointError(
                f"the checkpoint of step {pending.step} was cancelled; nothing was committed"
            )
            self._end(job, error)
        except BaseException as error:  # noqa: BLE001 - for callers that await the checkpoint
            if not isinstance(error, Exception):  # a handler of the log that exits: it would end the engine's loop
                error = CheckpointError(f"the checkpoint of step {pending.step} was ended by {error!r}")
            self._end(job, error)
        else:
            self._end(job, None, info, superseded=superseded)
            await self.store.slots.remove_surplus()  # only now: even if this fails, the checkpoint is durable

    def _end(
        self, job: Job, error: Exception | None, info: CheckpointInfo | None = None, *, superseded: bool = False
    ) -> None:
        """Count the end of a checkpoint, and then end the waiting for it, even if counting fails."""
        pending, nbytes = job.pending, 0 if info is None else info.nbytes
        try:
            if job.overlapped is not None:
                job.overlapped.note_end(error)
            self.ended(pending, error, superseded, nbytes)
        except BaseException as failure:  # noqa: BLE001 - also of a handler of the log that exits
            with suppress(BaseException):
                write("miscounted", "the end of a checkpoint is not counted right: %r", failure)
        finally:
            if info is None:
                assert error is not None
                pending.set_failed(error)
            else:
                pending.set_durable(info, superseded=superseded)

    async def _save(self, job: Job) -> tuple[CheckpointInfo, bool]:
        """Capture the rest, write, and commit; return the checkpoint that is durable then, and whether it is newer."""
        pending, capture, overlapped = job.pending, job.capture, job.overlapped
        lease: BufferLease | None = None
        try:
            if (inline := capture.inline) is not None:
                pending.nbytes = pending.captured_nbytes = inline.plan.payload_nbytes
                enter_chunk(0)
                self.stream.clock.note("capture", *inline.seconds, inline.entry.nbytes)
                enter_chunk(None)
                self._note_captured(pending)
                slot, entry, rest = await self._describe(job, inline.buffer)
            else:
                plan = self.planner.plan(capture.layout)
                pending.nbytes = plan.payload_nbytes
                on_fence = None if overlapped is None else overlapped.fence.set_result
                await capture.begin(plan, partial(self._note_captured, pending), pending.set_eager_captured, on_fence)
                # In one piece, a checkpoint holds its buffer while it waits for a slot. It never takes the last one,
                # which one that has its slot may need to go on: else each would wait for the other one's.
                if len(plan.chunks) != 1 or self.pool.available <= 1:
                    slot, entry, rest = await self._copy_and_write(job)
                else:
                    lease = await self.pool.lease()
                    tensors = capture.layout.tensors
                    if len(tensors) >= _MANY:
                        # Encode while the copy runs. The copy's batch is submitted in the next round of the event loop,
                        # which has to come first: so this is put off by two rounds.
                        loop = asyncio.get_running_loop()
                        loop.call_soon(loop.call_soon, self._manifests.prepare, capture.skeleton, tensors)
                    await self._copy_chunk(job, 0, lease.view)
                    enter_chunk(None)
                    slot, entry, rest = await self._describe(job, lease.view)

            def written() -> None:
                pending.written_nbytes = entry.nbytes

            start = time.perf_counter()
            try:
                check = None if overlapped is None else overlapped.check
                committed = await self.peers.commit(slot, entry, rest, written, check, capture.sample)
            finally:
                self.stream.clock.note("commit", start, time.perf_counter())
            if committed:
                return entry.info, False
            if (newest := self.peers.newest) is None:
                pending.failure_told = True  # the next call need not raise it: all were removed on purpose
                raise NoCheckpointError(
                    f"the checkpoint of step {pending.step} was rejected, and no other is left: they were removed"
                )
            return newest.info, True
        finally:
            if lease is not None:
                lease.release()

    async def _describe(self, job: Job, buffer: memoryview) -> _ToCommit:
        """Put the manifest behind the state that a buffer begins with, if there is room; reserve a slot for both."""
        data, start = self._encode(job, job.capture.entries(), job.capture.pieces()), job.capture.plan.payload_nbytes
        padded = align(len(data), self.store.block_bytes)
        rest = [(0, buffer[: start + padded])]
        if start + padded > len(buffer):
            rest = [(0, buffer[:start]), (start, aligned_buffer(padded))]
        rest[-1][1][-padded:] = data.ljust(padded, b"\0")
        slot = await self._reserve(job, data)  # last: its holder gives it back
        return slot, self._entry(job, slot, data), rest

    def _note_captured(self, pending: PendingCheckpoint) -> None:
        at = pending.captured_at if pending.is_captured else time.monotonic()  # a small one before it came here
        seconds, nbytes = max(0.0, at - pending.admitted_at), pending.nbytes or 0
        self.stream.emit(Captured(step=pending.step, counter=pending.counter, nbytes=nbytes, seconds=seconds))
        pending.set_captured()

    async def _copy_and_write(self, job: Job) -> _ToCommit:
        """Capture a state into a slot, manifest included; when this returns every write has ended."""
        reserving: asyncio.Task[SlotLease] | None = None
        try:
            async with Tasks() as group:
                # Beside the capture: the trainer waits for the copy, never for the store.
                reserving = group.create_task(self._reserve(job))
                describing = group.create_task(self._write_manifest(job, reserving))
                # Chunks are copied right into a slot that is mapped into memory, if it is reserved by then.
                for _ in range(_ROUNDS_TO_RESERVE if self.medium.stages else 0):
                    await asyncio.sleep(0)
                for number, index in enumerate(job.capture.order()):
                    place: memoryview | None = None
                    if self.medium.stages and reserving.done():  # then one copy is all there is to do
                        chunk = job.capture.plan.chunks[index]
                        place = self.medium.stage(reserving.result().file, chunk.offset, chunk.nbytes)
                    if place is not None:
                        group.create_task(self._save_chunk(job, index, reserving, place, in_place=True))
                        continue
                    if not reserving.done() and self.pool.available <= 1:
                        # The last buffer is for checkpoints that have their slot: else one without a slot could hold
                        # all buffers, and the one whose commit frees a slot would wait for a buffer.
                        await asyncio.wait((reserving,))
                    lease = await self.pool.lease()
                    saving = self._save_chunk(job, index, reserving, lease.view)
                    # The lease outlives the task, also one that is cancelled before it ran at all (I9).
                    group.create_task(saving).add_done_callback(lambda _, lease=lease: lease.release())  # type: ignore[misc]
                    if number % _YIELD_EVERY == 0:
                        await asyncio.sleep(0)  # those begin while the others are still being made
        except BaseException:
            if reserving is not None and not reserving.cancelled() and reserving.exception() is None:
                # Every operation on it has ended; the manifest's may have been one of them.
                end = job.capture.plan.payload_nbytes if job.capture.copied.is_set() else None
                await self.store.release(reserving.result(), end)
            raise
        return reserving.result(), describing.result(), ()

    async def _reserve(self, job: Job, manifest: bytes = b"") -> SlotLease:
        """Reserve a slot; by default for the longest manifest that there may be: its checksums are not known yet."""
        capture = job.capture
        if not manifest:
            await asyncio.sleep(0)  # the copies first: many tensors take a while to encode
            chunks = capture.plan.chunks
            largest = tuple(ChunkEntry(each.offset, each.nbytes, _LARGEST_CHECKSUM) for each in chunks)
            pieces = tuple(bytes(SUM_BYTES * piece_count(each.nbytes)) for each in chunks)
            manifest = self._encode(job, largest, pieces)
        # One block to spare: the next checkpoint's step and plain values may take a few more bytes.
        return await self.store.reserve(capture.plan.payload_nbytes + len(manifest) + self.store.block_bytes)

    async def _save_chunk(
        self, job: Job, index: int, reserving: asyncio.Task[SlotLease], buffer: memoryview, *, in_place: bool = False
    ) -> None:
        """Copy a chunk into a buffer, or into its place in the slot, and write it."""
        chunk = job.capture.plan.chunks[index]
        try:
            await self._copy_chunk(job, index, buffer)
        except OSError as error:
            if not in_place:
                raise
            # The file is shorter than it was, or its memory is broken.
            raise write_error(error, reserving.result().file.name) from error
        slot = await asyncio.shield(reserving)
        await self.medium.write(slot.file, chunk.offset, buffer[: chunk.nbytes])
        job.pending.written_nbytes += chunk.nbytes

    async def _copy_chunk(self, job: Job, index: int, buffer: memoryview) -> None:
        nbytes = job.capture.plan.chunks[index].nbytes
        enter_chunk(index)
        with self.stream.clock.timed("capture", nbytes):
            await job.capture.copy(index, buffer[:nbytes])
        job.pending.captured_nbytes += nbytes

    async def _write_manifest(self, job: Job, reserving: asyncio.Task[SlotLease]) -> Entry:
        """Write the manifest beside the last chunks, as soon as the checksums of all are known."""
        await job.capture.copied.wait()
        slot = await asyncio.shield(reserving)
        data = self._encode(job, job.capture.entries(), job.capture.pieces())
        entry = self._entry(job, slot, data)
        size = self.pool.buffer_bytes
        for start in range(0, len(data), size):
            part = data[start : start + size]
            padded = align(len(part), self.store.block_bytes)
            lease = await self.pool.lease()
            try:
                lease.view[:padded] = part.ljust(padded, b"\0")
                await self.medium.write(slot.file, entry.manifest_offset + start, lease.view[:padded])
            finally:
                lease.release()
        return entry

    def _entry(self, job: Job, slot: SlotLease, data: bytes) -> Entry:
        """Return the entry of a checkpoint for the commit record; its encoded manifest is ``data``."""
        nbytes = job.capture.plan.payload_nbytes
        return Entry(
            counter=job.pending.counter,
            step=job.pending.step,
            time=job.capture.time,
            nbytes=nbytes,
            slot=slot.slot,
            manifest_offset=nbytes,  # whole blocks
            manifest_nbytes=len(data),
            manifest_checksum=crc32(data),
            pinned=False,
            metadata=job.metadata,
        )

    def _encode(self, job: Job, chunks: tuple[ChunkEntry, ...], pieces: tuple[bytes, ...]) -> bytes:
        capture = job.capture
        return self._manifests.encode(
            Manifest(
                version=version_of(
                    capture.skeleton, with_pieces=capture.sums is not None, composed=capture.has_composed
                ),
                counter=job.pending.counter,
                step=job.pending.step,
                time=capture.time,
                metadata=job.metadata,
                skeleton=capture.skeleton,
                tensors=capture.layout.tensors,
                storages=capture.plan.storages,
                chunks=chunks,
                payload_nbytes=capture.plan.payload_nbytes,
                pieces=None if capture.sums is None else pieces,
            )
        )
