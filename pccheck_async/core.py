"""What both facades share: opening, admission, restore, failures that nobody saw, and the end."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from pccheck_async.aborts import Aborts
from pccheck_async.admissions import Admissions
from pccheck_async.capture import Snapshots
from pccheck_async.config import Decisions, EngineConfig, decide
from pccheck_async.copying import CopyBackend, CudaCopy, make_backend
from pccheck_async.errors import (
    CheckpointError,
    ClosedError,
    NoCheckpointError,
)
from pccheck_async.events import Opened, Waited
from pccheck_async.image import Images
from pccheck_async.info import CheckpointInfo, Metadata, Restored, check_step
from pccheck_async.layout import check_metadata
from pccheck_async.lifetime import forget, remember
from pccheck_async.logs import about
from pccheck_async.loop import EngineLoop
from pccheck_async.machine import available_cores, available_memory
from pccheck_async.manifest import MIN_BLOCK
from pccheck_async.overlap import Guard, Overlapped
from pccheck_async.pending import PendingCheckpoint
from pccheck_async.plan import Planner
from pccheck_async.policy import make_policy
from pccheck_async.pool import BufferPool
from pccheck_async.preemption import Preemption
from pccheck_async.progress import ReadProgress
from pccheck_async.published import Status
from pccheck_async.publisher import Publisher, make_status
from pccheck_async.reporter import Reporter
from pccheck_async.restorer import Restorer
from pccheck_async.retention import SpaceNeeded
from pccheck_async.scheduler import Job, Scheduler
from pccheck_async.scratch import free_bytes, slot_bytes
from pccheck_async.session import IO, Session, check_io, open_session
from pccheck_async.statistics import EngineStatistics, Spread, StageClock
from pccheck_async.steps import Steps, block_on, run
from pccheck_async.store import Store, open_store
from pccheck_async.tracing import Sink, Span
from pccheck_async.training import TrainingStep, TrainingSteps

__all__ = ["EngineCore"]

_AT_ONCE = 256 << 10
"""Bytes of a state that is captured before the engine's thread hears of it."""
_HOOKS_SECONDS = 1.0
"""What hooks get to hear of the end."""


class EngineCore:
    """One store, one loop, one scheduler; every method may be called from any thread.

    Methods that return :data:`Steps` run plain code on the caller's thread (``state_dict()``, ``load_state_dict()``)
    and yield what has to run on the engine's loop; a facade drives them, blocking or awaiting.
    """

    def __init__(self, path: str | os.PathLike[str], io: IO, config: EngineConfig) -> None:
        check_io(io)
        self.path = os.fspath(Path(path).absolute() if isinstance(io, str) else path)  # the process may change folders
        self.config = config
        self.io = io
        self._pid = os.getpid()
        self._state = "new"
        self.reporter = Reporter(self.path)
        self._publisher: Publisher | None = None
        self._opened_at = 0.0
        self.admissions = Admissions(config, self.reporter.tell)
        self.guard = Guard(config.max_stall, self._abandon, self._note_guard)
        self.steps = TrainingSteps(make_policy(config.interval, config.max_in_flight), self.admissions, self.guard)
        self.preemption = Preemption(self)
        self.stall = self._last_stall = self._state_seconds = self._guard_seconds = 0.0
        self._clock = StageClock("capture", "commit", "restore")
        self._stalls = {"checkpoint": Spread(), "optimizer": Spread()}
        self.trace: Sink | None = None
        self._snapshots = Snapshots()
        self.loop: EngineLoop
        self._session: Session | None = None
        self._ended = asyncio.Event()  # on the engine's loop, as are those who wait for it
        self._waiting_for_end: set[asyncio.Task[Any] | None] = set()
        self._store: Store
        self._decisions: Decisions
        self._backend: CopyBackend
        self._pool: BufferPool
        self._planner: Planner
        self._images: Images
        self._scheduler: Scheduler
        self._restorer: Restorer
        self.aborts: Aborts

    # -- driving

    def block_on(self, steps: Steps) -> Any:
        """Drive ``steps`` from this thread, blocking it while the engine's loop works."""
        return block_on(lambda: self.loop, steps)

    async def run(self, steps: Steps) -> Any:
        """Drive ``steps`` from a coroutine on any loop. Cancellation: ends what runs on the engine's loop first."""
        return await run(lambda: self.loop, steps)

    # -- open and close

    def open(self) -> Steps:
        """Lock (or create) the store, recover, and start the engine."""
        if self._state != "new":
            raise ClosedError(f"the engine of {self.path} is {self._state}; make a new one")
        self._state = "opening"
        self.loop = EngineLoop()
        remember(self)  # before the first lock: a child forked meanwhile must not keep it
        try:
            yield self._open()
        except BaseException:
            self._state = "closed"
            forget(self)
            if self._session is not None:  # opened, and then the caller was cancelled before it got to know
                self.loop.call(self._session.close())
            self.loop.stop()
            self.reporter.hooks.close(_HOOKS_SECONDS)
            raise
        self._state = "open"
        self._opened_at = time.time()
        infos = self.infos
        self.reporter.tell(Opened(checkpoints=len(infos), step=self.newest_step, io=self.statistics().io))

    async def _open(self) -> None:
        about.set({"store": self.path})
        config = self.config
        cores, memory = available_cores(), available_memory()
        first = decide(config, block_bytes=MIN_BLOCK, cores=cores, memory=memory)
        self._session = await open_session(self.path, self.io, writers=first.writers, copiers=first.copiers)
        try:
            writer = self._session.writer
            self._store = await open_store(
                writer,
                retention=config.retention,
                max_in_flight=config.max_in_flight,
                lock_timeout=config.lock_timeout,
            )
            decided = decide(config, block_bytes=self._store.block_bytes, cores=cores, memory=memory)
            decided.reasons["io"] = self._session.reason
            self._decisions = decided
            self._backend = make_backend(self._session.operations, config.device)
            pinning = self._backend.pinning if isinstance(self._backend, CudaCopy) else None
            self._pool = BufferPool(decided.host_memory, decided.chunk_bytes, pinning)
            self._planner = Planner(decided.chunk_bytes, self._store.block_bytes)
            self._images = Images(self._session.operations, self._planner, min(_AT_ONCE, decided.chunk_bytes))
            self._scheduler = Scheduler(
                store=self._store,
                writer=writer,
                backend=self._backend,
                pool=self._pool,
                planner=self._planner,
                images=self._images,
                max_in_flight=config.max_in_flight,
                clock=self._clock,
                ended=self.admissions.note_end,
                tell=self.reporter.tell,
                path=self.path,
            )
            self.aborts = Aborts(self.loop, self._scheduler, self.admissions, lambda: self.preemption.patience)
            self._restorer = Restorer(
                store=self._store,
                writer=writer,
                backend=self._backend,
                pool=self._pool,
                clock=self._clock,
                post=self.loop.post,
                tell=self.reporter.tell,
            )
            self.admissions.counter = self._store.largest_counter
            if isinstance(self.io, str):  # of other writers' folders only they know what and where they are
                self._publisher = Publisher(self.path, self._status)
        except BaseException:
            session, self._session = self._session, None
            await session.close()
            raise

    def close(self, deadline: float | None = None) -> Steps:
        """Drain, then close; idempotent. Raises the failures that nobody saw.

        With a ``deadline`` in seconds it gives up when that has passed: raises CheckpointError that says what is left
        behind, and threads, buffers and files of those requests stay as they are until the process ends.
        """
        if os.getpid() != self._pid or self._state in ("new", "closed"):
            return
        if self._state == "opening":
            raise ClosedError(f"the engine of {self.path} is being opened: cancel that, or close it afterwards")
        with self.admissions.lock:
            first, self._state = self._state != "closing", "closing"
        if not first:
            yield from self._closed_by_another(deadline)
            return
        left: list[PendingCheckpoint] = []
        try:
            left = yield self._close(deadline)
        finally:
            self._state = "closed"
            self.guard.close()
            forget(self)
            if not left:
                self.loop.stop()
            self._report_end(0.0 if left else _HOOKS_SECONDS)
        if left:
            steps = ", ".join(str(pending.step) for pending in left)
            when = "at the deadline of a preemption" if self.preemption.asked else f"after {deadline} s"
            error = CheckpointError(
                f"gave up {when}: the checkpoints of steps {steps} were still being written; left behind"
            )
            for pending in left:
                pending.set_failed(error)
            raise error
        self.admissions.raise_untold()

    def _closed_by_another(self, deadline: float | None) -> Steps:
        """Wait while another thread or task closes the engine."""

        async def wait() -> None:
            self._waiting_for_end.add(asyncio.current_task())
            async with asyncio.timeout(deadline):
                await self._ended.wait()

        try:
            yield wait()
        except TimeoutError:
            raise CheckpointError(f"gave up after {deadline} s: the engine of {self.path} is still closing") from None
        except ClosedError:  # its loop is over already
            return

    async def _close(self, deadline: float | None) -> list[PendingCheckpoint]:
        try:
            return await self._end(deadline)
        finally:
            self._ended.set()

    async def _end(self, deadline: float | None) -> list[PendingCheckpoint]:
        left: list[PendingCheckpoint] = []
        try:
            left = await self._scheduler.drain(deadline, last=True)
        finally:
            if self._publisher is not None:
                self._publisher.close(0.1 if left else 5.0)  # while the store is locked
            if left:
                self._scheduler.give_up(left)  # what they still had to capture may change from now on
            else:
                await self._scheduler.cancel_all()  # nothing, unless the drain was cancelled
                await self.loop.end_others(self._waiting_for_end)  # restores of other threads
                await self._opened().close()
                self._backend.close()
                self._pool.close()
        return left

    def _report_end(self, hooks_seconds: float) -> None:
        counts = self.admissions.counts
        self.reporter.closed(
            durable=counts.durable,
            superseded=counts.superseded,
            failed=counts.failed,
            skipped=counts.skipped,
            stall=self.stall,
        )
        self.reporter.hooks.close(hooks_seconds)

    def close_at_exit(self) -> str:
        """Drain with a deadline because the interpreter exits; return what to tell the user. Never raises."""
        waiting = len(self.admissions.in_flight)
        try:
            with self.preemption.ending(go=False):  # it goes already
                self.block_on(self.close(self.config.exit_timeout))
        except Exception as error:  # noqa: BLE001 - nobody is left to raise it to
            return f"the engine of {self.path} was not closed before the interpreter exited; {error}"
        drained = f"{waiting} checkpoint(s) in flight were drained" if waiting else "nothing was in flight"
        return f"the engine of {self.path} was not closed before the interpreter exited; {drained}"

    def abandon(self) -> None:
        """In a forked child: let go of every descriptor; the engine lives on in the parent only."""
        self._state = "closed"
        if self._session is not None:
            self._session.writer.abandon()
        if self._publisher is not None:
            self._publisher.abandon()

    def check_alive(self) -> None:
        """Raise ClosedError unless the engine is open, here, in this process."""
        if os.getpid() != self._pid:
            raise ClosedError(
                "this engine belongs to the parent process; open one of your own (another folder) after a fork"
            )
        if self._state in ("new", "opening"):
            raise ClosedError(f"the engine of {self.path} is not open yet; use it as a context manager, or call open()")
        if self._state != "open":
            raise ClosedError(f"the engine of {self.path} is {self._state}")

    def _opened(self) -> Session:
        """The session of an engine that was opened, closed or not: what was counted stays readable."""
        if self._session is None or self._state in ("new", "opening"):
            raise ClosedError(
                f"the engine of {self.path} was never opened; use it as a context manager, or call open()"
            )
        return self._session

    # -- checkpoints

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the steps of ``optimizer`` wait for captures that it would tear."""
        self.check_alive()
        self.guard.attach(optimizer)

    def admit(
        self, state: Mapping[str, Any], step: int | None, metadata: Metadata | None, *, overlap: bool = False
    ) -> tuple[PendingCheckpoint, float]:
        """Read the state and hand it to the scheduler, all on the caller's thread. Returns when it began, too."""
        start = time.perf_counter()
        self.check_alive()
        self.preemption.go_on()
        last = self.preemption.pending  # there is no later one: neither skipped, nor prevented by an earlier failure
        if not last:
            self.admissions.raise_untold()
        step = check_step(step)
        plain = check_metadata(metadata) if metadata else {}
        skipped = None if last else self.admissions.skip(step)
        if skipped is not None:
            return skipped, start
        optimizers = self.guard.optimizers if overlap else None
        compare = self.config.check_captures
        snapshot = self._snapshots.take(state, self._backend, optimizers, compare=compare, images=self._images)
        self._state_seconds += time.perf_counter() - start
        pending: PendingCheckpoint | None = None
        try:
            with self.admissions.lock:
                self.check_alive()
                skipped = None if last else self.admissions.skip(step)  # others may have been admitted meanwhile
                if skipped is not None:
                    return skipped, start
                # One that waits for its turn keeps its caller waiting, too: else they would pile up.
                captured = snapshot.image is not None and len(self.admissions.in_flight) < self.config.max_in_flight
                # Before the engine hears of it: an interrupt must not give it away twice.
                pending = self.admissions.add(step)
                if self._publisher is not None:
                    self._publisher.start()
                job = Job(pending, snapshot, plain, trace=self.trace)
                if snapshot.lazy is not None:
                    job.overlapped = Overlapped(pending, snapshot.lazy.versions)
                    pending.settle_by(job.overlapped.settle)
                    self.guard.watch(job.overlapped)
                    if not snapshot.lazy.any_held:
                        pending.set_held_captured()
                if not self.loop.post(self._scheduler.start, job):
                    raise ClosedError(f"the engine of {self.path} is closed")
                if captured:
                    pending.set_captured()
        except BaseException:  # KeyboardInterrupt: nobody will wait for it before changing the state
            if pending is not None:
                self.aborts.take_back(pending)
            raise
        return pending, start

    @contextmanager
    def bracket(self, this: TrainingStep) -> Iterator[None]:
        """Note the beginning of a training step, and one that fails."""
        self.check_alive()
        self.preemption.in_use = True
        self.preemption.go_on()
        if not self.preemption.pending:
            self.admissions.raise_untold()
        self.steps.begin(this, self.stall)
        try:
            yield
        except BaseException:
            self.steps.fail()
            raise

    def end_step(self, this: TrainingStep) -> bool:
        """Note the end of a training step; return whether to checkpoint now, and train on."""
        self.check_alive()
        if self.trace is not None:
            end = time.perf_counter()
            start = end - (time.monotonic() - this.began)
            self.trace(Span(name="step", start=start, end=end, step=this.step))
        return self.steps.end(this, self.stall) and not self.preemption.pending

    def is_last(self, this: TrainingStep) -> bool:
        """Whether the process was asked to go, and may after this step."""
        return self.preemption.pending and this.whole

    def last(self, this: TrainingStep) -> Steps:
        """Save this step unless that was done, drain until the deadline, and let the process go."""
        say, start = self.preemption.say, time.perf_counter()
        try:
            if this.pending is None or this.pending.skipped:
                this.pending, _ = self.admit(this.state, this.step, this.metadata)
            pending = this.pending
            yield self._scheduler.drain(last=True)
            self.note_stall(pending, start)
            info = pending.result(0)
        except TimeoutError:
            say("gave up: step %d was still being written; nothing newer than %s", this.step, self.preemption.newest)
        except Exception as error:  # noqa: BLE001 - the process goes all the same
            say("gave up: step %d: %s; nothing newer than %s", this.step, error, self.preemption.newest)
        else:
            say("saved step %d in %.3f s", info.step, time.perf_counter() - start)
        self.preemption.settle()

    @property
    def newest_step(self) -> int | None:
        """The step of the newest durable checkpoint."""
        return next((info.step for info in self.infos), None)

    def limit(self, until: float | None) -> None:
        """Let last drains end at a time of the monotonic clock."""
        self.loop.post(self._scheduler.limit, until)

    def note_stall(self, pending: PendingCheckpoint, start: float) -> None:
        """Count the time since ``start`` as time that a caller of ``checkpoint()`` was kept waiting."""
        self._last_stall = time.perf_counter() - start
        self._add_stall(pending, self._last_stall, "checkpoint")

    def _abandon(self, pending: PendingCheckpoint) -> None:
        self.aborts.abandon(pending, self.config.max_stall)

    def _note_guard(self, pending: PendingCheckpoint, seconds: float) -> None:
        self._guard_seconds += seconds
        self._add_stall(pending, seconds, "optimizer")

    def _add_stall(self, pending: PendingCheckpoint, seconds: float, where: Literal["checkpoint", "optimizer"]) -> None:
        pending.stall += seconds
        self.stall += seconds
        self._stalls[where].add(seconds)
        self.reporter.tell(Waited(step=pending.step, counter=pending.counter, seconds=seconds, where=where))
        if self.trace is not None:
            end = time.perf_counter()
            self.trace(Span(name="stall", start=end - seconds, end=end, step=pending.step, counter=pending.counter))

    def warn_of(self, pending: PendingCheckpoint, error: Exception) -> bool:
        """Warn of a failure instead of raising it, where the user chose that; False where it is to be raised."""
        return self.admissions.warn_of(pending, error)

    def wait_captured(self) -> None:
        """Block until no capture of a checkpoint admitted so far reads the live state any more."""
        self.check_alive()
        self.guard.wait()
        for pending in self.admissions.in_flight:
            pending.wait_out_of_reach()  # failures are told where the checkpoint itself is awaited

    async def drain(self) -> None:
        """Wait until every admitted checkpoint ended."""
        await self._scheduler.drain()

    # -- reading

    @property
    def infos(self) -> list[CheckpointInfo]:
        """Committed checkpoints, newest first."""
        self._opened()
        return [entry.info for entry in self._store.entries]

    async def pin(self, step: int, pinned: bool) -> CheckpointInfo:
        """Keep the newest checkpoint of a step whatever the rules say, or leave it to them again."""
        return (await self._store.pin(step, pinned)).info

    def space_needed(self, nbytes: int) -> SpaceNeeded:
        """Return the storage that this engine takes for checkpoints of ``nbytes``."""
        folder = Path(self.path)
        available = free_bytes(folder) + slot_bytes(folder)
        return self.config.retention.space_needed(nbytes, self.config.max_in_flight, available)

    def restore(
        self,
        state: Mapping[str, Any],
        step: int | None,
        progress: ReadProgress | None = None,
        *,
        strict: bool = True,
    ) -> Steps:
        """Restore the newest checkpoint (or that of ``step``) into ``state``, falling back where one is damaged."""
        self.check_alive()
        self.admissions.raise_untold()
        step = check_step(step)
        for pending in self.admissions.in_flight:
            yield pending.out_of_reach()  # what is restored would tear its capture
        self.guard.wait()
        restored: Restored | None = yield from self._restorer.restore(state, step, progress, strict=strict)
        if restored is None and step is not None:
            raise NoCheckpointError(f"{self.path} has no checkpoint of step {step}")
        return restored

    # -- statistics

    def statistics(self) -> EngineStatistics:
        """Return a snapshot of everything counted so far."""
        io = self._opened().writer.statistics()
        pool, store, copying = self._pool.statistics(), self._store.statistics(), self._backend.statistics()
        decisions = replace(self._decisions, reasons=self._decisions.reasons | {"device": copying.reason})
        counts = self.admissions.counts
        with self.admissions.lock:
            return EngineStatistics(
                admitted=counts.admitted,
                durable=counts.durable,
                superseded=counts.superseded,
                failed=counts.failed,
                skipped=counts.skipped,
                abandoned=counts.abandoned,
                in_flight=len(self.admissions.in_flight),
                stall_seconds=self.stall,
                guard_seconds=self._guard_seconds,
                guard_fences=self.guard.fenced,
                interval=self.steps.decision,
                last_stall_seconds=self._last_stall,
                state_seconds=self._state_seconds,
                stages=self._clock.stages() | {"write": io.write, "read": io.read, "flush": io.flush},
                decisions=decisions,
                io=f"{io.engine}, {'direct' if io.direct else 'buffered'}: {io.why}",
                loop=self.loop.kind,
                pool_bytes=pool.touched * pool.buffer_bytes,
                pool_peak=pool.peak,
                pool_waits=pool.waited,
                device_bytes=copying.device_bytes,
                device_peak_bytes=copying.device_peak_bytes,
                snapshots=copying.snapshots,
                slots=store.slots,
                slot_bytes=store.slot_bytes,
                plan_hits=self._planner.hits,
                plan_misses=self._planner.misses,
                latest=next(iter(self.infos), None),
                durable_bytes=self.reporter.nbytes,
                save_seconds=self.admissions.save_seconds.distribution(),
                capture_seconds=self.admissions.capture_seconds.distribution(),
                stalls={where: spread.distribution() for where, spread in self._stalls.items()},
                pool_in_use_bytes=pool.in_use * pool.buffer_bytes,
                events_dropped=self.reporter.hooks.dropped,
            )

    def _status(self) -> Status:
        """What other processes may know, called on the publisher's thread."""
        return make_status(
            self.statistics(),
            started=self._opened_at,
            in_flight=self.admissions.in_flight,
            committed=self.infos,
            newest=self.admissions.newest,
            report=self.steps.last,
            failure=self._store.failure,
        )
