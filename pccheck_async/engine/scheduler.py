# SPDX-License-Identifier: Apache-2.0
"""The scheduler: the order of one checkpoint, from its admission until it is durable.

A checkpoint is a task graph: while its slot is being reserved, one coroutine per chunk copies the chunk and hands it to
the writer (:class:`SlotWriter`); when all have ended, the manifest is written, and the checkpoint is committed. Nothing
is left to copy of a state that was captured inline. Checkpoints run concurrently, at most ``max_in_flight`` of them
(PCcheck, section 3.1), admitted in the order of their counters. (Invariants, such as I9: :mod:`pccheck_async.store`.)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from functools import partial

from msgspec.structs import replace

from pccheck_async.engine.capture import Capture
from pccheck_async.engine.drain import Draining
from pccheck_async.engine.flight import Flight
from pccheck_async.engine.in_flight import InFlight
from pccheck_async.engine.memory import Memory, Staged
from pccheck_async.engine.overlap import Overlapped
from pccheck_async.engine.peers import Peers
from pccheck_async.errors import CheckpointError, NoCheckpointError
from pccheck_async.format import CheckpointInfo, Entry, crc32
from pccheck_async.format.manifest import Manifest, encode_again, version_of
from pccheck_async.state import ReplicaSample
from pccheck_async.store import (
    ChunkPlace,
    OwnSlot,
    PartReader,
    SlotLease,
    SlotWriter,
    Staging,
    Store,
    Written,
    read_encoded_manifest,
)
from pccheck_async.telemetry import Sink, Stream, Work, enter_chunk, work, write
from pccheck_async.telemetry.events import Abandoned, Captured, InMemory, InReplicas
from pccheck_async.transfer import BufferPool, Tasks
from pccheck_async.transfer.copying import CopyBackend
from pccheck_async.transfer.plan import Plan, Planner

__all__ = ["Job", "Scheduler"]

_YIELD_EVERY = 8
"""Number of chunks that are begun before other tasks of the loop may run."""


@dataclass(slots=True, eq=False)
class Job:
    """An admitted checkpoint."""

    flight: Flight
    capture: Capture
    metadata: dict[str, str | int | float | bool | None]
    overlapped: Overlapped | None
    """Detects a torn capture; None if training waits for the whole capture."""
    trace: Sink | None
    """Receives the spans of the work for this checkpoint; None: none are recorded."""
    in_memory: bool = False
    """Whether it is due in memory (:mod:`pccheck_async.engine.memory`)."""
    captured: bool = False
    """Whether the end of its capture was reported: the live state is not read any more."""
    task: asyncio.Task[None] = field(init=False)
    abandoned: CheckpointError | None = None
    """The error that it fails with when its task is cancelled, if it was abandoned, or its group decided against it."""


@dataclass(eq=False, kw_only=True)
class Scheduler:
    """Runs admitted checkpoints on the engine's loop."""

    store: Store
    peers: Peers
    pool: BufferPool
    planner: Planner
    backend: CopyBackend
    max_in_flight: InitVar[int]
    in_flight: InFlight
    stream: Stream
    path: str
    """The path of the store, for the log."""
    memory: Memory | None = None
    draining: Draining | None = None

    def __post_init__(self, max_in_flight: int) -> None:
        self._turns = asyncio.Semaphore(max_in_flight)  # first come, first served
        self._jobs: dict[Flight, Job] = {}
        self._saving_unsaved = asyncio.Lock()
        self._until: float | None = None
        self._last_drains: set[asyncio.Timeout] = set()

    @property
    def tasks(self) -> dict[Flight, asyncio.Task[None]]:
        """The tasks of the checkpoints that have not ended."""
        return {flight: job.task for flight, job in self._jobs.items()}

    def start(self, job: Job) -> None:
        """Admit a checkpoint, and start its task. Called in the order of counters, in which they get their turns."""
        flight, capture, refused = job.flight, job.capture, None
        try:
            self.peers.request(
                flight.counter,
                flight.step,
                job.metadata,
                capture.tally_sums,
                capture.differing,
                on_disk=flight.on_disk,
            )
        except BaseException as error:  # noqa: BLE001 - for callers that await the checkpoint
            refused = error
        task = asyncio.get_running_loop().create_task(self._run(job, refused), name=f"checkpoint {flight.counter}")
        job.task = task
        self._jobs[flight] = job
        job.task.add_done_callback(lambda _: self._jobs.pop(flight))

    async def abort(self, flight: Flight) -> bool:
        """Cancel a checkpoint, and wait until nothing of it runs (I9).

        Returns False if it ended before, or was captured and goes on.
        """
        job = self._jobs.get(flight)
        if job is None or flight.is_captured:
            return False
        job.task.cancel()
        await asyncio.wait((job.task,))
        return True

    def end_with(self, counter: int, error: CheckpointError) -> None:
        """Cancel a checkpoint that its group decided against: it fails with ``error``."""
        for flight, job in self._jobs.items():
            if flight.counter == counter:
                job.abandoned = error
                # One round later: a task that is cancelled before its first step never reports its end.
                asyncio.get_running_loop().call_soon(job.task.cancel)

    async def stop_capture(self, flight: Flight, max_stall: float | None) -> bool:
        """Abandon a capture that makes training wait for too long; return once nothing reads the live state any more.

        The checkpoint fails at once. Its writes may take longer: buffers, slot and turn are given back when these have
        ended (I9). Returns False if the checkpoint ended before, or was captured and goes on.
        """
        job = self._jobs.get(flight)
        if job is None or flight.is_captured:
            return False
        self.stream.emit(Abandoned(step=flight.step, counter=flight.counter, seconds=max_stall))
        error = CheckpointError(
            f"abandoned the checkpoint of step {flight.step}: its capture held an optimizer's step up for longer than "
            f"max_stall = {max_stall} s"
        )
        job.abandoned = error  # the task may end before this does
        flight.failure_told = True
        job.task.cancel()
        await job.capture.stop()
        flight.set_failed(error)
        return True

    async def drain(self, timeout: float | None = None, *, last: bool = False) -> list[Flight]:
        """Wait until every checkpoint admitted so far ended; return those that did not within ``timeout`` seconds.

        ``last``: no checkpoint comes after these, and the waiting also ends at the time of :meth:`end_last_drains_at`.

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
        return [flight for flight, task in waiting.items() if not task.done() and not flight.over]

    async def ended(self, flight: Flight) -> None:
        """Wait until the task of a checkpoint has ended: one that is due in memory alone is not over by then."""
        if (job := self._jobs.get(flight)) is not None:
            await asyncio.wait((job.task,))

    def give_up(self, flights: Iterable[Flight]) -> None:
        """Cancel these checkpoints without waiting: none begins a commit any more; one under way may still succeed."""
        for flight in flights:
            if (job := self._jobs.get(flight)) is not None:
                job.task.cancel()

    def end_last_drains_at(self, until: float | None) -> None:
        """Limit each :meth:`drain` with ``last``, under way or to come, to a time of ``time.monotonic()``.

        None: set no limit for those to come.
        """
        self._until = until
        for drain in self._last_drains:
            self._shorten(drain)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the time of :meth:`end_last_drains_at`, at least 0; None: there is no limit."""
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def _shorten(self, drain: asyncio.Timeout) -> None:
        if self._until is not None and not drain.expired():
            end = asyncio.get_running_loop().time() + self._until - time.monotonic()
            when = drain.when()
            drain.reschedule(end if when is None else min(when, end))

    async def cancel_all(self) -> None:
        """Cancel the tasks of all checkpoints that have not ended, and wait until they ended."""
        tasks = self.tasks.values()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, job: Job, refused: BaseException | None) -> None:
        """Save a checkpoint, and end it; or fail it with the error with which the peers ``refused`` it."""
        flight = job.flight
        work.set(Work(self.path, flight.step, flight.counter, recorder=job.trace))
        try:
            try:
                if refused is not None:
                    raise refused
                if not flight.on_disk and not await self._save_in_memory_alone(job):
                    self._refuse_in_memory(flight)
                    flight.on_disk = True  # there is no memory for it
                if flight.on_disk:
                    await self._turns.acquire()
                    try:
                        if await self.peers.admitted(flight.counter):
                            info, superseded = await self._save(job)
                        else:
                            info, superseded = self._superseding(flight), True
                    finally:
                        self._turns.release()  # only after the slot that the commit freed is free
            finally:
                # Every operation on it has ended; holders of the checkpoint, or of its error, must not keep the state.
                job.capture.release()
                if job.overlapped is not None:
                    job.overlapped.compare()
        except asyncio.CancelledError:
            error = job.abandoned or CheckpointError(
                f"the checkpoint of step {flight.step} was cancelled; nothing was committed"
            )
            self._end(job, error)
        except BaseException as error:  # noqa: BLE001 - for callers that await the checkpoint
            if not isinstance(error, Exception):  # a handler of the log that exits: it would end the engine's loop
                error = CheckpointError(f"the checkpoint of step {flight.step} was ended by {error!r}")
            self._end(job, error)
        else:
            if not flight.on_disk:
                self.in_flight.note_in_memory(flight)
                return
            self._end(job, None, info, superseded=superseded)
            await self.store.slots.remove_surplus()  # only now: even if this fails, the checkpoint is durable

    def _end(
        self, job: Job, error: Exception | None, info: CheckpointInfo | None = None, *, superseded: bool = False
    ) -> None:
        """Count the end of a checkpoint, and then end the waiting for it, even if counting fails."""
        flight = job.flight
        try:
            if job.overlapped is not None:
                job.overlapped.note_end(error)
            try:
                self.in_flight.note_end(flight, error, superseded, info)
            finally:
                self.peers.ended(flight.counter, error)
        except BaseException as failure:  # noqa: BLE001 - also of a handler of the log that exits
            with suppress(BaseException):
                write("miscounted", "the end of a checkpoint is not counted right: %r", failure)
        finally:
            if info is None:
                assert error is not None
                flight.set_failed(error)
            else:
                flight.set_durable(info, superseded=superseded)
                if self.draining is not None:
                    self.draining.note_durable(flight, info.counter)

    async def _save(self, job: Job) -> tuple[CheckpointInfo, bool]:
        """Capture the rest, write, and commit.

        Returns the checkpoint that is durable then, and whether that is a newer one, by which this one is superseded.
        """
        plan = await self._begin(job)
        staged, decided = (await self._save_in_memory(job, plan) if job.in_memory else None) or (None, None)
        try:
            async with SlotWriter(self.store, self.pool, plan, _only_chunk(job, plan, staged)) as writer:
                if staged is None:
                    if order := job.capture.order():
                        await self._capture(job, plan, writer, order)
                    manifest = self._encode(job)
                else:
                    await self._write_staged(plan, staged, writer)
                    manifest = staged.manifest
                slot, rest = await writer.finish(manifest)  # from here on the commit gives it back
                checked = staged is not None and staged.committed
                check = None if job.overlapped is None or checked else job.overlapped.check
                job.flight.written_nbytes = plan.payload_nbytes
                entry = self._entry(job, slot, manifest)
                committed = await self._commit(Written(slot, entry, rest, check), job.capture.sample)
        finally:
            if staged is not None:
                staged.release()
            if decided is not None:
                await asyncio.wait((decided,))  # else it would count as not saved there
        return (entry.info, False) if committed else (self._superseding(job.flight), True)

    def _superseding(self, flight: Flight) -> CheckpointInfo:
        """Return the newest checkpoint, with which a superseded one ends. Raises NoCheckpointError: there is none."""
        if (newest := self.peers.newest) is None:
            flight.failure_told = True  # the next call need not raise it: all were removed on purpose
            raise NoCheckpointError(
                f"the checkpoint of step {flight.step} was rejected, and no other is left: they were removed"
            )
        return newest.info

    async def _begin(self, job: Job) -> Plan:
        """Prepare the capture, unless that was done, and return the chunks."""
        flight, capture, overlapped = job.flight, job.capture, job.overlapped
        if flight.nbytes is not None:
            return capture.plan  # it was to be saved in memory alone
        if (inline := capture.inline) is None:
            await capture.begin(self.planner, None if overlapped is None else overlapped.fence.set_result)
        plan = capture.plan
        flight.nbytes = plan.payload_nbytes
        if inline is not None:
            start, end = inline.seconds
            self.stream.clock.add("capture", 1, plan.payload_nbytes, end - start)
            if job.trace is not None:
                work.get()._replace(chunk=0).record("capture", start, end, plan.payload_nbytes)
            flight.captured_nbytes = plan.payload_nbytes
        self._note_progress(job)
        return plan

    async def _capture(self, job: Job, plan: Plan, writer: SlotWriter, order: Sequence[int]) -> None:
        """Copy the chunks that are not captured yet, in their ``order``, and hand them to the writer."""
        async with Tasks() as tasks:
            await writer.reserve(tasks, lambda: len(self._encode(job)))
            for number, index in enumerate(order):
                place = await writer.place(plan.chunks[index])
                tasks.create_task(self._save_chunk(job, index, writer, place))
                if number % _YIELD_EVERY == 0:
                    await asyncio.sleep(0)  # those begin while the others are still being made

    async def _commit(self, written: Written, sample: ReplicaSample | None) -> bool:
        start = time.perf_counter()
        try:
            return await self.peers.commit(written, sample)
        finally:
            self.stream.clock.note("commit", start, time.perf_counter())

    # -- the tier in memory

    async def _save_in_memory(self, job: Job, plan: Plan) -> tuple[Staged, asyncio.Future[bool] | None] | None:
        """Capture a checkpoint into a slot in memory, and commit it there; return it with its slot held.

        The future is that of :meth:`Peers.commit_in_memory`. Returns None if the checkpoint is not due in memory, or if
        there is no slot for it.

        A torn capture is detected here, once for both tiers, and raises its error. After an error of the storage the
        tier is turned off, and the disk is written from the state, which is captured again, or, if the capture was
        complete, from the slot. Raises CheckpointError: neither of them has all of the checkpoint.
        """
        memory, capture, counter = self.memory, job.capture, job.flight.counter
        if memory is None:
            return None
        # Before the turn: in a group those that have the places there may wait for it, once the disk admits them.
        if not await self.peers.admitted_in_memory(counter):
            self.peers.ended_in_memory(counter, None)  # at once: the next one may wait for its place
            return None
        async with memory.turn:
            longest = plan.payload_nbytes + len(self._encode(job)) + memory.store.block_bytes
            if (lease := await memory.lease(longest)) is None:
                self.peers.ended_in_memory(counter, CheckpointError(memory.off or "there is no slot in memory for it"))
                return None
            first = None if capture.inline is None else capture.inline.buffer
            try:
                async with SlotWriter(memory.store, self.pool, plan, first, lease) as writer:
                    if order := capture.order():
                        await self._capture(job, plan, writer, order)
                    manifest = self._encode(job)
                    slot, rest = await writer.finish(manifest)
            except OSError as error:  # its file was cut off, say
                memory.turn_off(error)
                if not capture.restart():
                    raise CheckpointError(
                        f"the checkpoint of step {job.flight.step} was captured into memory that failed ({error}), and "
                        "its state may have changed since then; the next ones are saved on disk alone"
                    ) from error
                job.flight.captured_nbytes = 0
                return None
            check = None if job.overlapped is None else job.overlapped.check
            written = Written(slot, self._entry(job, slot, manifest), rest, check)
            commit = partial(self.peers.commit_in_memory, sample=capture.sample)
            staged, decided = await memory.commit(written, manifest, commit)
        if decided is not None:
            decided.add_done_callback(partial(self._note_in_memory, job, plan))
        elif staged.committed:
            self._note_in_memory(job, plan)
        return staged, decided

    def _note_in_memory(self, job: Job, plan: Plan, decided: asyncio.Future[bool] | None = None) -> None:
        if decided is not None and (decided.cancelled() or decided.exception() is not None or not decided.result()):
            return
        flight = job.flight
        flight.set_in_memory()
        seconds = time.monotonic() - flight.admitted_at
        self.stream.emit(
            InMemory(step=flight.step, counter=flight.counter, nbytes=plan.payload_nbytes, seconds=seconds)
        )
        if (copied := self.peers.in_replicas(flight.counter)) is not None:
            copied.add_done_callback(partial(self._note_in_replicas, flight, plan.payload_nbytes))

    def _note_in_replicas(self, flight: Flight, nbytes: int, copied: asyncio.Future[None]) -> None:
        error = copied.exception()
        if error is None:
            seconds = time.monotonic() - flight.admitted_at
            self.stream.emit(InReplicas(step=flight.step, counter=flight.counter, nbytes=nbytes, seconds=seconds))
        flight.set_in_replicas(error)

    async def _save_in_memory_alone(self, job: Job) -> bool:
        """Save a checkpoint in memory alone; return False if there was no room, or the group did not commit it there.

        Raises CheckpointError: it failed.
        """
        saved = await self._save_in_memory(job, await self._begin(job))
        if saved is None:
            return False
        staged, decided = saved
        staged.release()
        if not staged.committed:
            assert self.memory is not None
            self._refuse_in_memory(job.flight)
            raise CheckpointError(f"the checkpoint of step {job.flight.step} is not in memory: {self.memory.off}")
        return decided is None or await asyncio.shield(decided)

    def _refuse_in_memory(self, flight: Flight) -> None:
        """In a group, log that a checkpoint is not in memory, as on some rank there was no room, and raise that error.

        The error counts as delivered, so that training goes on: the next checkpoint on disk has what this one had.
        """
        if self.peers.collective:
            flight.failure_told = True
            text = "the checkpoint of step %d is not in memory: some rank has no room for it, or could not save it"
            write("memory_skipped", text, flight.step, step=flight.step, counter=flight.counter)
            raise CheckpointError(text % flight.step)

    async def _write_staged(self, plan: Plan | Manifest, staged: Staged, writer: SlotWriter) -> None:
        """Write the chunks of a checkpoint from its slot in memory, unless it has one alone: the writer has that."""
        if len(plan.chunks) > 1:
            async with Tasks() as tasks:
                await writer.reserve(tasks, lambda: len(staged.manifest))
                for chunk in plan.chunks:
                    view = staged.view[chunk.offset : chunk.offset + chunk.nbytes]
                    tasks.create_task(writer.put(ChunkPlace(chunk.offset, view, None, None)))

    async def save_unsaved(self) -> None:
        """Make the newest checkpoint in memory durable on disk, if the disk has none as new; wait if it is being saved.

        Raises the errors of :meth:`Store.commit`, and DamagedError: then nothing was written.
        """
        memory = self.memory
        if memory is None:
            return
        async with self._saving_unsaved:  # two calls would write one checkpoint twice
            if self.peers.collective:
                await self.drain()  # then all ranks know the same one
            while (entry := self.peers.unsaved) is not None:
                under_way = [task for flight, task in self.tasks.items() if flight.counter == entry.counter]
                if not under_way:
                    await self._save_from_memory(memory, entry)
                    return
                await asyncio.wait(under_way)

    async def _save_from_memory(self, memory: Memory, entry: Entry) -> None:
        source = OwnSlot(memory.store, entry)
        reader = PartReader(source, self.backend, Staging(self.pool))
        self.peers.request_unsaved(entry)
        failure: Exception | None = None
        try:
            if not await self.peers.admitted(entry.counter):
                return
            await reader.hold()
            await reader.verify()
            manifest, file = reader.manifest, reader.file
            # Read by the system, and not from the mapping: the file may be cut off by now.
            encoded = await read_encoded_manifest(source.medium, file, entry, source.block_bytes)
            assert file.mapping is not None
            staged = Staged(memory.store, entry, file.mapping.view[: manifest.payload_nbytes], encoded)
            only = staged.view if len(manifest.chunks) == 1 else None
            async with SlotWriter(self.store, self.pool, manifest, only) as writer:
                await self._write_staged(manifest, staged, writer)
                slot, rest = await writer.finish(encoded)
                committed = await self._commit(Written(slot, replace(entry, slot=slot.slot), rest), None)
        except Exception as error:
            failure = error
            raise
        finally:
            self.peers.ended(entry.counter, failure)
            await reader.close()
        if committed:
            self.in_flight.note_saved(entry.info)
            if self.draining is not None:
                self.draining.note_saved(entry.counter)

    async def _save_chunk(self, job: Job, index: int, writer: SlotWriter, place: ChunkPlace) -> None:
        """Copy a chunk, and hand it to the writer. Raises CheckpointError: the caller has given up the capture."""
        enter_chunk(index)
        nbytes, start = len(place.view), time.perf_counter()
        try:
            last = await job.capture.copy(index, place.view)
        except OSError as error:
            raise place.explained(error) from error
        finally:
            self.stream.clock.note("capture", start, time.perf_counter(), nbytes)
        if job.flight.given_up:  # after the copy: the last one sees all that was given up before it ended
            raise CheckpointError(
                f"the checkpoint of step {job.flight.step} was thrown away before its state was captured; nothing was "
                "committed"
            )
        job.flight.captured_nbytes += nbytes
        if last:
            self._note_progress(job)
        await writer.put(place)
        job.flight.written_nbytes = writer.written

    def _note_progress(self, job: Job) -> None:
        """Resolve the flight's promises about the capture, as far as they are true. Called after each progress."""
        flight, capture = job.flight, job.capture
        if capture.live or job.captured:
            if not capture.eager:
                flight.set_eager_captured()
            return
        job.captured = True
        if self.stream.hooks.hooks:  # the event is for them alone
            at = flight.captured_at if flight.is_captured else time.monotonic()  # a small one before it came here
            seconds, nbytes = max(0.0, at - flight.admitted_at), flight.nbytes or 0
            self.stream.emit(Captured(step=flight.step, counter=flight.counter, nbytes=nbytes, seconds=seconds))
        flight.set_captured()

    def _entry(self, job: Job, slot: SlotLease, manifest: bytes) -> Entry:
        """Return the entry of a checkpoint for the commit record."""
        nbytes = job.capture.plan.payload_nbytes
        return Entry(
            counter=job.flight.counter,
            step=job.flight.step,
            time=job.capture.time,
            nbytes=nbytes,
            slot=slot.slot,
            manifest_offset=nbytes,  # whole blocks
            manifest_nbytes=len(manifest),
            manifest_checksum=crc32(manifest),
            pinned=False,
            metadata=job.metadata,
        )

    def _encode(self, job: Job) -> bytes:
        """Return the encoded manifest; while there are chunks to capture, one as long as it can become."""
        capture = job.capture
        manifest = Manifest(
            version=version_of(capture.skeleton, with_pieces=capture.has_sharded, composed=capture.has_composed),
            counter=job.flight.counter,
            step=job.flight.step,
            time=capture.time,
            metadata=job.metadata,
            skeleton=capture.skeleton,
            tensors=capture.layout.tensors,
            storages=capture.plan.storages,
            chunks=tuple(capture.entries),
            payload_nbytes=capture.plan.payload_nbytes,
            pieces=tuple(capture.pieces) if capture.has_sharded else None,
        )
        return encode_again(manifest, capture.layout.known)


def _only_chunk(job: Job, plan: Plan, staged: Staged | None) -> memoryview | None:
    """Return the only chunk of a checkpoint, if it is captured already; None if it is not, or there are several."""
    if job.capture.inline is not None:
        return job.capture.inline.buffer
    return None if staged is None or len(plan.chunks) > 1 else staged.view
