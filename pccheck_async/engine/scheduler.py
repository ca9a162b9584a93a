"""The scheduler: the one place that knows the order of things.

A checkpoint is a task graph: one coroutine per chunk leases a staging buffer, copies, writes, and returns the buffer;
another one writes the manifest as soon as the last chunk is copied; when all ended, the store commits. One that fits
into a single buffer is written in one piece, and is not worth a coroutine for each part. Checkpoints run concurrently,
at most ``max_in_flight`` of them (PCcheck, section 3.1), admitted in the order of their counters.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from pccheck_async.engine.capture import Capture, Snapshot
from pccheck_async.engine.inline_capture import Image, Images
from pccheck_async.engine.overlap import Overlapped
from pccheck_async.engine.pending import PendingCheckpoint
from pccheck_async.errors import CheckpointError
from pccheck_async.format.checksum import crc32
from pccheck_async.format.info import CheckpointInfo
from pccheck_async.format.manifest import VERSION, ChunkEntry, Manifest, ManifestEncoder
from pccheck_async.format.record import Entry, align
from pccheck_async.medium import Piece, Writer
from pccheck_async.store.commit import SlotLease, Store
from pccheck_async.telemetry.events import Abandoned, Captured
from pccheck_async.telemetry.logs import about
from pccheck_async.telemetry.reporter import Reporter
from pccheck_async.telemetry.stages import StageClock
from pccheck_async.telemetry.tracing import Sink, Traced, enter_chunk, traced
from pccheck_async.transfer.copying import CopyBackend
from pccheck_async.transfer.failures import first_failure
from pccheck_async.transfer.limiter import Limiter
from pccheck_async.transfer.memory import aligned_buffer
from pccheck_async.transfer.plan import Chunk, Plan, Planner
from pccheck_async.transfer.pool import BufferPool

__all__ = ["Job", "Scheduler"]

_LARGEST_CHECKSUM = 0xFFFFFFFF
_CHUNKS_AT_ONCE = 8
_MANY = 1000
"""Tensors that take a while to encode: some 100 us."""
_AT_ONCE = 2 << 20
"""Bytes that are written together with their record: a disk takes about a millisecond for them."""


@dataclass(slots=True, eq=False)
class Job:
    """An admitted checkpoint: what to save, whom to tell, what may find out that its capture was torn, who records."""

    pending: PendingCheckpoint
    snapshot: Snapshot
    metadata: dict[str, str | int | float | bool | None]
    overlapped: Overlapped | None = None
    trace: Sink | None = None

    def release(self) -> None:
        """Let go of the state: whoever keeps the checkpoint, or the error that ended it, would keep that, too."""
        self.snapshot.release()
        if self.overlapped is not None:
            self.overlapped.settle()


class Scheduler:
    """Runs admitted checkpoints on the engine's loop.

    Args:
        store: Where they go.
        writer: Writes the chunks.
        backend: Copies them.
        pool: Staging buffers, one chunk each.
        planner: Lays states out.
        images: Made the images of small ones.
        max_in_flight: Most checkpoints between admission and their end.
        clock: Stage times.
        ended: Called with every checkpoint that ended, its error, whether it was superseded, and its bytes, before
            anyone is told.
        reporter: Told of what happens before that.
        path: Of the store, for the log.
    """

    def __init__(
        self,
        *,
        store: Store,
        writer: Writer,
        backend: CopyBackend,
        pool: BufferPool,
        planner: Planner,
        images: Images,
        max_in_flight: int,
        clock: StageClock,
        ended: Callable[[PendingCheckpoint, Exception | None, bool, int], None],
        reporter: Reporter,
        path: str,
    ) -> None:
        self._store = store
        self._writer = writer
        self._backend = backend
        self._pool = pool
        self._planner = planner
        self._images = images
        self._clock = clock
        self._ended = ended
        self._reporter = reporter
        self._path = path
        self._limiter = Limiter(max_in_flight)
        self._manifests = ManifestEncoder()
        self._tasks: dict[PendingCheckpoint, asyncio.Task[None]] = {}
        self._captures: dict[PendingCheckpoint, Capture] = {}
        self._abandoned: dict[PendingCheckpoint, CheckpointError] = {}
        self._until: float | None = None
        self._last_drains: set[asyncio.Timeout] = set()

    def start(self, job: Job) -> None:
        """Admit a checkpoint. Called in the order of counters, which is the order in which they are served."""
        task = asyncio.get_running_loop().create_task(self._run(job), name=f"checkpoint {job.pending.counter}")
        self._tasks[job.pending] = task
        task.add_done_callback(lambda _: (self._tasks.pop(job.pending), self._abandoned.pop(job.pending, None)))

    async def abort(self, pending: PendingCheckpoint) -> bool:
        """Cancel a checkpoint whose capture has not ended and wait until nothing of it is running (I9).

        Returns:
            False where it was captured already, and goes on.
        """
        task = self._tasks.get(pending)
        if task is None or pending.is_captured:
            return False
        task.cancel()
        await asyncio.wait((task,))
        return True

    async def abandon(self, pending: PendingCheckpoint, error: CheckpointError, max_stall: float | None) -> bool:
        """Fail a checkpoint with ``error`` before its capture ended; return once nothing reads the live state any more.

        Its writes may take longer: buffers, slot and permit go back when they ended (I9).

        Returns:
            False where it was captured already, and goes on.
        """
        task = self._tasks.get(pending)
        if task is None or pending.is_captured:
            return False
        capture = self._captures.get(pending)
        self._reporter.tell(Abandoned, step=pending.step, counter=pending.counter, seconds=max_stall)
        self._abandoned[pending] = error  # the task may end before this does
        pending.set_told()
        task.cancel()
        if capture is not None:
            await capture.stop()
        pending.set_failed(error)
        return True

    async def drain(self, timeout: float | None = None, *, last: bool = False) -> list[PendingCheckpoint]:
        """Wait until every checkpoint admitted so far ended; return those that did not within ``timeout`` seconds.

        Args:
            timeout: None waits for all.
            last: Nothing comes after it: it ends when :meth:`limit` says so, too.

        Cancellation: only stops the waiting.
        """
        waiting = dict(self._tasks)
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
            if (task := self._tasks.get(pending)) is not None:
                task.cancel()

    def limit(self, until: float | None) -> None:
        """Let last drains, those that wait already too, end at a time of the monotonic clock; None: when all ended."""
        self._until = until
        for drain in self._last_drains:
            self._shorten(drain)

    def _shorten(self, drain: asyncio.Timeout) -> None:
        if self._until is not None and not drain.expired():
            end = asyncio.get_running_loop().time() + self._until - time.monotonic()
            when = drain.when()
            drain.reschedule(end if when is None else min(when, end))

    async def cancel_all(self) -> None:
        """Cancel what is left and wait until it ended."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, job: Job) -> None:
        pending = job.pending
        about.set({"store": self._path, "step": pending.step, "counter": pending.counter})
        if job.trace is not None:
            traced.set(Traced(job.trace, pending.step, pending.counter))
        try:
            permit = await self._limiter.acquire()
            try:
                info, superseded = await self._save(job)
            finally:
                permit.release()  # only after the slot that the commit freed is free
        except asyncio.CancelledError:
            error = self._abandoned.get(pending) or CheckpointError(
                f"the checkpoint of step {pending.step} was cancelled; nothing was committed"
            )
            self._ended(pending, error, False, 0)
            pending.set_failed(error)
        except Exception as error:  # noqa: BLE001 - it belongs to whoever awaits the checkpoint
            if job.overlapped is not None:
                job.overlapped.note_end(error)
            self._ended(pending, error, False, 0)
            pending.set_failed(error)
        else:
            if job.overlapped is not None:
                job.overlapped.note_end(None)
            self._ended(pending, None, superseded, info.nbytes)
            pending.set_durable(info, superseded=superseded)
            await self._store.remove_surplus()  # only now: whatever happens to it, the checkpoint is durable
        finally:
            if job.snapshot.image is not None:
                self._images.take_back(job.snapshot.image)  # every operation on it has ended
            job.release()

    async def _save(self, job: Job) -> tuple[CheckpointInfo, bool]:
        if job.snapshot.image is not None:
            return await self._save_image(job, job.snapshot.image)
        plan = self._planner.plan(job.snapshot.layout)
        pending = job.pending
        fenced = None if job.overlapped is None else job.overlapped.set_fence
        pending.nbytes = plan.payload_nbytes
        captured = partial(self._captured, pending)
        capture = Capture(job.snapshot, plan, self._backend, captured, pending.set_held_captured, fenced)
        self._captures[pending] = capture
        try:
            await capture.begin()
            # The last buffer is for those that have their slot: else two would wait for each other.
            if len(plan.chunks) == 1 and self._pool.available > 1:
                return await self._save_at_once(job, capture, plan)
            slot, entry = await self._copy_and_write(job, capture, plan)
            return await self._finish(job, slot, entry)
        finally:
            del self._captures[pending]
            capture.release()  # an error that somebody keeps would keep the state, too

    async def _save_at_once(self, job: Job, capture: Capture, plan: Plan) -> tuple[CheckpointInfo, bool]:
        """Capture a state into one buffer and write that in one piece, with the manifest in it where there is room."""
        buffer = await self._pool.lease()
        try:
            skeleton, tensors = job.snapshot.skeleton, job.snapshot.layout.tensors
            if len(tensors) >= _MANY:  # behind the submission of the copy, which is put into the loop below
                loop = asyncio.get_running_loop()
                loop.call_soon(loop.call_soon, self._manifests.prepare, skeleton, tensors)
            await self._capture_chunk(capture, 0, plan.chunks[0], buffer.view)
            job.pending.captured_nbytes = plan.payload_nbytes
            enter_chunk(None)
            return await self._write_at_once(job, plan, capture.entries(), buffer.view)
        finally:
            buffer.release()

    async def _save_image(self, job: Job, image: Image) -> tuple[CheckpointInfo, bool]:
        """Write what was captured when the engine heard of it."""
        pending, plan = job.pending, image.plan
        pending.nbytes = pending.captured_nbytes = plan.payload_nbytes
        enter_chunk(0)
        self._clock.note("capture", *image.seconds, image.entry.nbytes)
        enter_chunk(None)
        self._captured(pending)
        return await self._write_at_once(job, plan, (image.entry,), image.buffer)

    async def _write_at_once(
        self, job: Job, plan: Plan, chunks: tuple[ChunkEntry, ...], buffer: memoryview
    ) -> tuple[CheckpointInfo, bool]:
        """Write a buffer that begins with all of a state, and the manifest behind that where there is room."""
        data = self._encode(job, plan, chunks)
        padded = align(len(data), self._store.block_bytes)
        start = align(plan.payload_nbytes, self._store.block_bytes)
        rest = [(0, buffer[: start + padded])]
        if start + padded > len(buffer):
            rest = [(0, buffer[:start]), (start, aligned_buffer(padded))]
        rest[-1][1][-padded:] = data.ljust(padded, b"\0")
        slot = await self._store.reserve(self._nbytes(plan, len(data)))  # last: who has it gives it back
        entry = self._entry(job, plan, slot, data)
        return await self._finish(job, slot, entry, rest)

    async def _finish(
        self, job: Job, slot: SlotLease, entry: Entry, rest: Sequence[Piece] = ()
    ) -> tuple[CheckpointInfo, bool]:
        """Write the rest of a captured checkpoint and commit it: what is durable then, and whether that is newer."""
        start = time.perf_counter()
        try:
            if rest and job.overlapped is None and sum(len(data) for _, data in rest) <= _AT_ONCE:
                committed = await self._store.persist_and_commit(slot, rest, entry)
                job.pending.written_nbytes = entry.nbytes
                return (entry.info, False) if committed else (self._store.committed.record.entries[0].info, True)
            try:
                await self._store.persist(slot, rest)
                job.pending.written_nbytes = entry.nbytes
                if job.overlapped is not None:
                    job.overlapped.check()
            except BaseException:
                await self._store.release(slot, entry.manifest_offset)  # every operation on it has ended
                raise
            committed = await self._store.commit(slot, entry)
        finally:
            self._clock.note("commit", start, time.perf_counter())
        return (entry.info, False) if committed else (self._store.committed.record.entries[0].info, True)

    def _captured(self, pending: PendingCheckpoint) -> None:
        at = pending.captured_at if pending.is_captured else time.monotonic()  # a small one before it came here
        seconds, nbytes = max(0.0, at - pending.admitted_at), pending.nbytes or 0
        self._reporter.tell(Captured, step=pending.step, counter=pending.counter, nbytes=nbytes, seconds=seconds)
        pending.set_captured()

    async def _copy_and_write(self, job: Job, capture: Capture, plan: Plan) -> tuple[SlotLease, Entry]:
        """Capture a state into a slot, manifest included; when this returns every write has ended."""
        reserving: asyncio.Task[SlotLease] | None = None
        try:
            async with asyncio.TaskGroup() as group:
                # Beside the capture: what holds the trainer up is the copy, never the store.
                reserving = group.create_task(self._reserve(job, plan))
                describing = group.create_task(self._save_manifest(job, capture, plan, reserving))
                for index in capture.order():
                    chunk = plan.chunks[index]
                    if not reserving.done() and self._pool.available <= 1:
                        # The last buffer is for those that have their slot: else two would wait for each other.
                        await asyncio.wait((reserving,))
                    lease = await self._pool.lease()
                    saving = self._save_chunk(job.pending, capture, index, chunk, reserving, lease.view)
                    # The lease outlives the task, also one that is cancelled before it ran at all (I9).
                    group.create_task(saving).add_done_callback(lambda _, lease=lease: lease.release())  # type: ignore[misc]
                    if index % _CHUNKS_AT_ONCE == 0:
                        await asyncio.sleep(0)  # those begin while the others are still being made
        except BaseException as error:  # noqa: BLE001 - raised again below, out of its group
            if reserving is not None and not reserving.cancelled() and reserving.exception() is None:
                # Every operation on it has ended; the manifest's may have been one of them.
                end = align(plan.payload_nbytes, self._store.block_bytes) if capture.copied.is_set() else None
                await self._store.release(reserving.result(), end)
            failure = first_failure(error) if isinstance(error, BaseExceptionGroup) else error
            raise failure from failure.__cause__
        return reserving.result(), describing.result()

    async def _reserve(self, job: Job, plan: Plan) -> SlotLease:
        await asyncio.sleep(0)  # the copies first: many tensors take a while to encode
        largest = tuple(ChunkEntry(c.offset, c.nbytes, _LARGEST_CHECKSUM) for c in plan.chunks)
        return await self._store.reserve(self._nbytes(plan, len(self._encode(job, plan, largest))))

    def _nbytes(self, plan: Plan, manifest_nbytes: int) -> int:
        """Bytes of a slot; one block to spare: the next checkpoint's step and plain values may take a few more."""
        block = self._store.block_bytes
        return align(plan.payload_nbytes, block) + align(manifest_nbytes, block) + block

    async def _save_chunk(
        self,
        pending: PendingCheckpoint,
        capture: Capture,
        index: int,
        chunk: Chunk,
        reserving: asyncio.Task[SlotLease],
        buffer: memoryview,
    ) -> None:
        await self._capture_chunk(capture, index, chunk, buffer)
        pending.captured_nbytes += chunk.nbytes
        slot = await asyncio.shield(reserving)
        await self._writer.write(slot.file, chunk.offset, buffer[: chunk.nbytes])
        pending.written_nbytes += chunk.nbytes

    async def _capture_chunk(self, capture: Capture, index: int, chunk: Chunk, buffer: memoryview) -> None:
        enter_chunk(index)
        with self._clock.timed("capture", chunk.nbytes):
            await capture.chunk(index, chunk, buffer[: chunk.nbytes])

    async def _save_manifest(self, job: Job, capture: Capture, plan: Plan, reserving: asyncio.Task[SlotLease]) -> Entry:
        """Write the manifest beside the last chunks, as soon as the checksums of all are known."""
        await capture.copied.wait()
        slot = await asyncio.shield(reserving)
        data = self._encode(job, plan, capture.entries())
        entry = self._entry(job, plan, slot, data)
        await self._write_staged(slot, entry.manifest_offset, data)
        return entry

    def _entry(self, job: Job, plan: Plan, slot: SlotLease, data: bytes) -> Entry:
        return Entry(
            counter=job.pending.counter,
            step=job.pending.step,
            time=job.snapshot.time,
            nbytes=plan.payload_nbytes,
            slot=slot.slot,
            manifest_offset=align(plan.payload_nbytes, self._store.block_bytes),
            manifest_nbytes=len(data),
            manifest_checksum=crc32(data),
            pinned=False,
            metadata=job.metadata,
        )

    async def _write_staged(self, slot: SlotLease, offset: int, data: bytes) -> None:
        """Write bytes through staging buffers, a buffer's worth at a time."""
        size = self._pool.buffer_bytes
        for start in range(0, len(data), size):
            part = data[start : start + size]
            padded = align(len(part), self._store.block_bytes)
            lease = await self._pool.lease()
            try:
                lease.view[:padded] = part.ljust(padded, b"\0")
                await self._writer.write(slot.file, offset + start, lease.view[:padded])
            finally:
                lease.release()

    def _encode(self, job: Job, plan: Plan, chunks: tuple[ChunkEntry, ...]) -> bytes:
        return self._manifests.encode(
            Manifest(
                version=VERSION,
                counter=job.pending.counter,
                step=job.pending.step,
                time=job.snapshot.time,
                metadata=job.metadata,
                skeleton=job.snapshot.skeleton,
                tensors=job.snapshot.layout.tensors,
                storages=plan.storages,
                chunks=chunks,
                payload_nbytes=plan.payload_nbytes,
            )
        )
