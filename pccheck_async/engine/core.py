"""What both facades share: opening, admission, restore, failures that nobody saw, and the end."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from pccheck_async.engine.assembly import Pipeline, open_pipeline
from pccheck_async.engine.capture import Snapshots
from pccheck_async.engine.config import EngineConfig
from pccheck_async.engine.handoff import Steps, Until, block_on, outlast, run
from pccheck_async.engine.in_flight import Admissions
from pccheck_async.engine.ledger import Ledger
from pccheck_async.engine.loop import EngineLoop
from pccheck_async.engine.overlap import Guard, Overlapped
from pccheck_async.engine.pending import PendingCheckpoint
from pccheck_async.engine.promise import Moment
from pccheck_async.engine.scheduler import Job
from pccheck_async.engine.stalls import Stalls
from pccheck_async.engine.statistics import EngineStatistics
from pccheck_async.errors import CheckpointError, ClosedError, NoCheckpointError
from pccheck_async.format.info import CheckpointInfo, Metadata, Restored, check_step, new_step, whole_step
from pccheck_async.format.record import check_metadata
from pccheck_async.medium.lifetime import forget, remember
from pccheck_async.medium.open_medium import IO, Session, check_io
from pccheck_async.medium.scratch import free_bytes, slot_bytes
from pccheck_async.medium.store_path import store_path
from pccheck_async.state.save.flatten import flatten
from pccheck_async.store.retention import SpaceNeeded
from pccheck_async.telemetry.events import Opened
from pccheck_async.telemetry.logs import about, write
from pccheck_async.telemetry.progress import ReadProgress
from pccheck_async.telemetry.reporter import Reporter
from pccheck_async.telemetry.tracing import Sink, Span
from pccheck_async.training.policy import (
    make_policy,
)
from pccheck_async.training.preemption import Preemption
from pccheck_async.training.step_context import TrainingStep, TrainingSteps

__all__ = ["EngineCore"]

_HOOKS_SECONDS = 1.0
"""What hooks get to hear of the end."""


class EngineCore:
    """One store, one loop, one scheduler; every method may be called from any thread.

    Methods that return :data:`Steps` run plain code on the caller's thread (``state_dict()``, ``load_state_dict()``)
    and yield what has to run on the engine's loop; a facade drives them, blocking or awaiting.
    """

    def __init__(self, path: str | os.PathLike[str], io: IO, config: EngineConfig) -> None:
        check_io(io)
        self.path = store_path(path) if isinstance(io, str) else os.fspath(path)
        self.config = config
        self.io = io
        self._pid = os.getpid()
        self.made_at = _caller()
        self._state = "new"
        self.reporter = Reporter(self.path, lambda: self.stalls.seconds)
        self.trace: Sink | None = None
        self.stalls = Stalls(self.reporter, lambda: self.trace)
        self.admissions = Admissions(config, self.reporter)
        self._snapshots = Snapshots()
        self.guard = Guard(config.max_stall, self._abandon, self.stalls.note_step, self._snapshots.note_access)
        policy = make_policy(config.interval, config.max_in_flight)
        self.steps = TrainingSteps(policy, self.admissions, self.guard, self.path, save_last=config.save_last)
        self._ledger = Ledger(self.admissions, self.stalls, self.guard, self.steps, self.reporter)
        self.preemption = Preemption(self)
        self._state_seen = False
        self.loop: EngineLoop
        self._session: Session | None = None  # known before the store is locked, to let go of it in a forked child
        self._pipeline: Pipeline | None = None
        self.unawaited: dict[object, str] = {}  # calls of the facade's coroutine methods that have not begun
        self._closed: Moment[Exception | None] = Moment()  # and what kept all of it from being closed

    @property
    def is_open(self) -> bool:
        """Whether it is, and nobody is closing it."""
        return self._state == "open"

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
            state = "closed; make a new one" if self._state in ("closing", "closed") else "open already"
            raise ClosedError(f"the engine of {self.path} is {state}")
        self._state = "opening"
        self.loop = EngineLoop()
        remember(self)  # before the first lock: a child forked meanwhile must not keep it
        try:
            yield self._open()
            self._ledger.begin()
            # Asks the user's policy, too, which may raise.
            checkpoints, step, io = len(self.infos), self.newest_step, self.statistics().io
        except BaseException:
            self._state = "closed"
            forget(self)
            try:
                if self._pipeline is not None:  # opened, and then the caller was cancelled before it got to know
                    yield self._pipeline.close()
            finally:
                yield from outlast(self.loop.ask_to_stop())
            yield Until(self.reporter.hooks.close(), _HOOKS_SECONDS)
            raise
        self._state = "open"
        self.reporter.tell(Opened, checkpoints=checkpoints, step=step, io=io)

    async def _open(self) -> None:
        about.set({"store": self.path})
        self._pipeline = await open_pipeline(
            self.path,
            self.io,
            self.config,
            loop=self.loop,
            admissions=self.admissions,
            reporter=self.reporter,
            patience=lambda: self.preemption.patience,
            collect=lambda: self._ledger.status(self.pipeline),
            began=self._note_session,
        )

    def _note_session(self, session: Session) -> None:
        self._session = session

    def close(self, deadline: float | None = None) -> Steps:
        """Drain, then close; idempotent. Raises the failures that nobody saw.

        With a ``deadline`` in seconds it gives up when that has passed: raises CheckpointError that says what is left
        behind, and threads, buffers and files of those requests stay as they are until the process ends.

        Called again meanwhile it waits until the engine is closed, and raises what keeps it from that, too; of the
        failures that nobody saw each is raised once, by whoever comes first.
        """
        if os.getpid() != self._pid or self._state in ("new", "closed"):
            return
        if self._state == "opening":
            raise ClosedError(f"the engine of {self.path} is being opened: cancel that, or close it afterwards")
        with self.admissions.lock:
            if first := self._state == "open":
                self._state = "closing"
        if first:
            yield from self._close(deadline)
        elif not (yield Until(self._closed.future(), deadline)):
            raise CheckpointError(f"gave up after {deadline} s: the engine of {self.path} is still closing")
        elif (error := self._closed.result()) is not None:
            raise error
        self.admissions.raise_untold()

    def leave(self, *, well: bool) -> Steps:
        """Save the last finished step if no checkpoint holds it, unless an error ends the context; then close."""
        try:
            if well or self.preemption.pending:
                yield from self._save_last(well=well)
        except BaseException as error:
            if not isinstance(error, Exception):  # cancelled: as in closing, what is in flight is not waited for
                yield self.pipeline.scheduler.cancel_all()
            try:
                yield from self.close()
            except Exception as failure:  # noqa: BLE001 - told with the first one
                error.add_note(f"a checkpoint failed too: {type(failure).__name__}: {failure}")
            raise
        yield from self.close()

    def _save_last(self, *, well: bool) -> Steps:
        if os.getpid() != self._pid or self._state != "open":
            return
        last, newest = self.steps.last_finished, self.admissions.newest
        if last is None:
            return
        if newest is not None and newest.counter > last.counter and newest.step >= last.step:
            yield self.pipeline.scheduler.drain(last=True)
            if not newest.failed:
                return
        if self.steps.is_as_it_was(last, well=well):
            self.admit(last.state, last.step, last.metadata, last=True)  # closing waits for it, and tells its failure

    def _say_unawaited(self) -> None:
        """Tell of calls that did nothing: a coroutine that nobody awaits does not even begin."""
        calls = Counter(self.unawaited.values())
        self.unawaited.clear()
        if calls:
            text = "calls that nobody awaited did nothing: %s; write 'await engine.%s(...)'"
            said = ", ".join(f"{count} of {name}()" for name, count in calls.items())
            with suppress(Exception):  # of a handler of the log: the engine closes all the same
                write(logging.WARNING, "unawaited", text, said, next(iter(calls)), store=self.path)

    def _close(self, deadline: float | None) -> Steps:
        closed, failure = True, None
        try:
            closed, left = yield self.pipeline.close(deadline)
            if not closed:
                raise self._gave_up(deadline, left)
        except Exception as error:
            failure = error
            raise
        finally:
            self._say_unawaited()
            self.steps.close()
            forget(self)
            self._ledger.end()
            try:
                if closed:
                    yield from outlast(self.loop.ask_to_stop())
            finally:
                self._state = "closed"
                self._closed.set_result(failure)
            yield Until(self.reporter.hooks.close(), _HOOKS_SECONDS if closed else 0.0)

    def _gave_up(self, deadline: float | None, left: list[PendingCheckpoint]) -> CheckpointError:
        """Return what says what is left behind, and note it as the failure of those checkpoints."""
        steps = ", ".join(str(pending.step) for pending in left)
        when = "at the deadline of a preemption" if self.preemption.asked else f"after {deadline} s"
        what = (
            f"the checkpoints of steps {steps} were still being written"
            if left
            else "a restore, a pin or the removal of a slot had not ended"
        )
        error = CheckpointError(f"gave up {when}: {what}; left behind")
        for pending in left:
            pending.set_failed(error)
        return error

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
        if self._pipeline is not None and self._pipeline.publisher is not None:
            self._pipeline.publisher.abandon()

    def check_alive(self) -> Pipeline:
        """Return the pipeline of an engine that is open, here, in this process; else raise ClosedError."""
        if os.getpid() != self._pid:
            raise ClosedError(
                "this engine belongs to the parent process; open one of your own (another folder) after a fork"
            )
        if self._state == "open" and self._pipeline is not None:
            return self._pipeline
        if self._state in ("new", "opening"):
            raise ClosedError(f"the engine of {self.path} is not open yet; use it as a context manager, or call open()")
        raise ClosedError(f"the engine of {self.path} is {self._state}")

    @property
    def pipeline(self) -> Pipeline:
        """That of an engine that was opened, closed or not: what was counted stays readable."""
        if self._pipeline is None:
            raise ClosedError(
                f"the engine of {self.path} was never opened; use it as a context manager, or call open()"
            )
        return self._pipeline

    # -- checkpoints

    def attach(self, *optimizers: torch.optim.Optimizer) -> None:
        """Let the steps of ``optimizers`` wait for captures that they would tear."""
        self.check_alive()
        self.steps.attach(*optimizers)

    def admit(
        self,
        state: Mapping[str, Any],
        step: int | None,
        metadata: Metadata | None,
        *,
        overlap: bool = False,
        last: bool = False,
    ) -> tuple[PendingCheckpoint, float]:
        """Read the state and hand it to the scheduler, all on the caller's thread. Returns when it began, too.

        There is no later one than the ``last``: it is neither skipped, nor prevented by an earlier failure.
        """
        start = time.perf_counter()
        pipeline = self.check_alive()
        self.preemption.go_on()
        last = last or self.preemption.pending
        if not last:
            self.admissions.raise_untold()
        step = None if step is None else new_step(step)
        plain = check_metadata(metadata) if metadata else {}
        skipped = None if last else self.admissions.skip(step)
        if skipped is not None:
            return skipped, start
        optimizers = self.guard.optimizers if overlap else None
        compare = self.config.check_captures
        snapshot = self._snapshots.take(state, pipeline.backend, optimizers, compare=compare, images=pipeline.images)
        self.stalls.state_seconds += time.perf_counter() - start
        pending: PendingCheckpoint | None = None
        taken = False
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
                if pipeline.publisher is not None:
                    pipeline.publisher.start()
                job = Job(pending, snapshot, plain, trace=self.trace)
                if snapshot.lazy is not None:
                    note_end = partial(self._snapshots.note_end, snapshot.lazy.constants)
                    job.overlapped = Overlapped(pending, snapshot.lazy.versions, note_end)
                    pending.settle_by(job.overlapped.settle)
                    self.guard.watch(job.overlapped)
                    if not snapshot.lazy.any_held:
                        pending.set_held_captured()
                taken = True  # before it is: a buffer that is lost does no harm, one that is given back twice does
                taken = self.loop.post(pipeline.scheduler.start, job)
                if not taken:
                    raise ClosedError(f"the engine of {self.path} is closed")
                if captured:
                    pending.set_captured()
        except BaseException:  # KeyboardInterrupt: nobody will wait for it before changing the state
            if pending is not None:
                pipeline.aborts.take_back(pending)
            raise
        finally:
            if not taken:  # skipped after all, or the engine was closed meanwhile
                if snapshot.image is not None:
                    pipeline.images.take_back(snapshot.image)
                snapshot.release()
        return pending, start

    @contextmanager
    def bracket(self, this: TrainingStep) -> Iterator[None]:
        """Note the beginning of a training step."""
        self.check_alive()
        self.preemption.in_use = True
        self.preemption.go_on()
        if not self.preemption.pending:
            self.admissions.raise_untold()
        self.steps.begin(this, self.stalls.seconds)
        try:
            yield
        except BaseException:
            self.steps.forget_last()  # of steps side by side, too: this one may have changed their state
            raise
        if this.metadata:
            check_metadata(this.metadata)  # now, and not in an hour, when a step is saved

    def end_step(self, this: TrainingStep) -> bool:
        """Note the end of a training step; return whether to checkpoint now, and train on.

        Raises UnsupportedStateError after the first one where its state could not be saved.
        """
        self.check_alive()
        if self.trace is not None:
            end = time.perf_counter()
            start = end - (time.monotonic() - this.began)
            self.trace(Span(name="step", start=start, end=end, step=this.step))
        due = self.steps.end(this, self.stalls.seconds) and not self.preemption.pending
        first, self._state_seen = not self._state_seen, True
        if first and not due:
            flatten(this.state)  # what cannot be saved is told now, and not in an hour
        return due

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
            yield self.pipeline.scheduler.drain(last=True)
            self.stalls.note_call(pending, start)
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
        self.loop.post(self.pipeline.scheduler.limit, until)

    def _abandon(self, pending: PendingCheckpoint) -> None:
        self.pipeline.aborts.abandon(pending, self.config.max_stall)

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
        await self.pipeline.scheduler.drain()

    # -- reading

    @property
    def infos(self) -> list[CheckpointInfo]:
        """Committed checkpoints, newest first."""
        return [entry.info for entry in self.pipeline.store.committed.entries]

    async def pin(self, step: int, pinned: bool) -> CheckpointInfo:
        """Keep the newest checkpoint of a step whatever the rules say, or leave it to them again."""
        return (await self.pipeline.store.pin(whole_step(step), pinned)).info

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
        pipeline = self.check_alive()
        self.admissions.raise_untold()
        step = check_step(step)
        self.steps.note_restore()
        while reading := [pending for pending in self.admissions.in_flight if not pending.is_captured]:
            for pending in reading:
                yield pending.out_of_reach()  # what is restored would tear its capture
        self.guard.wait()
        restored: Restored | None = yield from pipeline.restorer.restore(state, step, progress, strict=strict)
        if restored is None and step is not None:
            raise NoCheckpointError(f"{self.path} has no checkpoint of step {step}")
        return restored

    def statistics(self) -> EngineStatistics:
        """Return a snapshot of everything counted so far."""
        return self._ledger.statistics(self.pipeline)


def _caller() -> str:
    """Return file and line of the code that makes an engine: what is outside of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "pccheck_async":
        frame = frame.f_back
    return "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
