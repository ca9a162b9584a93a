# SPDX-License-Identifier: Apache-2.0
"""The engine without its facades: opening, admission, restore, statistics, failures not awaited, and the end."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any, final

import torch

from pccheck_async.engine.assembly import EngineParts
from pccheck_async.engine.caller import Caller, block_on
from pccheck_async.engine.capture import Capture, StateReader
from pccheck_async.engine.config import EngineConfig
from pccheck_async.engine.flight import Flight, Promise, Waiting
from pccheck_async.engine.in_flight import InFlight
from pccheck_async.engine.loop import EngineLoop
from pccheck_async.engine.overlap import Guard
from pccheck_async.engine.peers import Alone, Peers, Private
from pccheck_async.engine.pending import PendingCheckpoint
from pccheck_async.engine.policy import TrainingHooks
from pccheck_async.engine.restore import restore
from pccheck_async.engine.scheduler import Job
from pccheck_async.engine.statistics import EngineStatistics
from pccheck_async.engine.status_publisher import make_status
from pccheck_async.errors import CheckpointError, ClosedError, NoCheckpointError, StoreLockedError, first_few
from pccheck_async.format import (
    CheckpointInfo,
    Metadata,
    Reach,
    Restored,
    Tier,
    Which,
    check_metadata,
    check_name,
    check_tier,
    describe_which,
    matches,
    new_step,
    there_are,
)
from pccheck_async.format.record import GROUP_NAME, IDENTITY_NAME
from pccheck_async.medium import forget, holder_here, remember
from pccheck_async.medium.open_medium import store_path
from pccheck_async.medium.status_file import Status
from pccheck_async.state import check_outermost, refuse_filling
from pccheck_async.store import KeepAll, MetricWatch, others_in
from pccheck_async.telemetry import ReadProgress, Stream, UsersLine, Work, work, write
from pccheck_async.telemetry.events import Opened

__all__ = ["EngineCore", "note_closing_failure_on"]

HOOKS_SECONDS = 1.0
"""Seconds that closing waits for hooks to get the last events."""


@final
class EngineCore:
    """An engine: one store, one event loop, one scheduler. Every method may be called from any thread.

    ``peers`` are the processes that save together with this one; by default there are none.

    Methods that take a :class:`.caller.Caller` run user code (``state_dict()``, ``load_state_dict()``) on the caller's
    thread, and the rest on the engine's loop; :func:`.caller.block_on` and :func:`.caller.run` call them.

    Attributes:
        keeps: The rules of retention.
        metric: Warns if no checkpoint's metadata have the number that ``Keep(best=...)`` compares.
        training: Hooks for the training around the engine; code that runs training steps replaces them by its own.
        stream: The engine's events.
        unawaited: Calls of the facade's coroutine methods that have not begun, with the methods' names.
        loop: The engine's event loop; set by :meth:`open`.
        facade: Weak reference to the object that users call, which holds this one; None: users call this one.
    """

    def __init__(self, path: str | os.PathLike[str], config: EngineConfig, peers: Peers | None = None) -> None:
        self.peers: Peers = Alone() if peers is None else peers
        self.path = store_path(path) if isinstance(config.storage.io, str) else os.fspath(path)
        self.config = config
        self.keeps = self.peers.retention(config)
        self._limited = config.on_busy == "skip" or isinstance(self.keeps, KeepAll)
        self.made_at = UsersLine.here().place
        self.facade: weakref.ref[object] | None = None
        self.training = TrainingHooks()
        self.unawaited: dict[object, str] = {}
        self.stream = Stream(self.path)
        self.in_flight = InFlight(config, self.stream)
        self.loop: EngineLoop
        self._unrestored: list[CheckpointInfo] = []  # found at opening, until the first restore or save
        self._restored_step: int | None = None  # from a restore until the next step
        self._passed_over = set[int]()  # counters of checkpoints that a restore could not read: their names are free
        self._last_step: int | None = None  # since a restore
        self._last_begun = False  # whether training began it
        self._told_smaller = self.config.overwrite
        self._told_unrestored = False
        self.metric = MetricWatch(config.retention.best, self.path)
        self.state = "new"  # then "opening", "open", "closing", "closed"
        self._unopened = ""  # why it never was open
        self.pid = os.getpid()
        self._began = 0.0
        self.captures = StateReader(allow_pickle=config.allow_pickle)
        self.guard = Guard(config.max_stall, self._stop_capture, self.in_flight.note_waited)
        self._assembly = EngineParts()
        self._closed: Promise[Exception | None] = Promise()  # and the error that kept it from closing wholly

    def summary(self) -> str:
        """Return folder, state, newest step and checkpoints in flight in words; takes no lock, and never raises."""
        if os.getpid() != self.pid:
            return f"{self.path!r} of the parent process"
        parts = [f"{self.path!r} {'not open yet' if self.state == 'new' else self.state}"]
        if self.state == "open":
            with suppress(AttributeError, ClosedError, RuntimeError):  # a group that is being left
                parts.append("no checkpoint" if (step := self.newest_step) is None else f"newest step {step}")
                parts += ["takes no more commits"] if self.stopped else []
        if in_flight := len(self.in_flight):
            parts.append(f"{in_flight} in flight")
        return ", ".join(parts)

    @property
    def is_open(self) -> bool:
        """Whether the engine is open, and not being closed."""
        return self.state == "open"

    # -- open and close

    async def open(self, caller: Caller) -> None:
        """Lock (or create) the store, recover, meet the other ranks, and start the engine.

        If an engine of this process that no code can call any more holds the store, that one is closed first. With a
        process group this is a collective call: an address is broadcast on the calling thread.
        """
        if self.state != "new":
            over = self.state in ("closing", "closed")
            state = f"{self._unopened or 'is closed'}; make a new one" if over else "is open already"
            raise ClosedError(f"the engine of {self.path} {state}")
        self.state = "opening"
        try:
            self.loop = EngineLoop()
        except BaseException:  # no thread can be had, say
            self.state = "new"
            raise
        remember(self)  # before the first lock: a child forked meanwhile must not keep it
        try:
            self.peers.meet(self.config)
            try:
                await caller.run(self._open())
            except StoreLockedError:
                if not await self._close_lost(caller):
                    raise
                await caller.run(self._open())
            self._began = time.time()
            self.training.opened()
            infos = self.infos
            found = sorted((*infos, *self.infos_elsewhere), key=lambda info: -info.counter)
            self._unrestored = [] if self.config.overwrite else [info for info in found if not info.rejected]
            checkpoints, step, io = len(infos), self.newest_step, self.statistics().io
        except BaseException as error:
            self.state = "closed"
            self._unopened = f"could not be opened ({type(error).__name__})"
            forget(self)
            try:
                await caller.run(self.peers.unopened(error))
            finally:
                try:
                    if self._assembly.complete:  # opened, and then the caller was cancelled before this returned
                        await caller.run(self._assembly.close())
                finally:
                    await caller.outlast(self.loop.ask_to_stop())
            await caller.wait(self.stream.hooks.close(), HOOKS_SECONDS)
            raise
        self.state = "open"
        self.stream.emit(Opened(checkpoints=checkpoints, step=step, io=io))

    def _warn_of_stores_below(self) -> None:
        """Warn if this empty store has stores in its subfolders: the user may have meant the path of one of them."""
        files = [file for name in (IDENTITY_NAME, GROUP_NAME) for file in Path(self.path).glob(f"[!.]*/{name}")]
        if found := sorted({file.parent.name for file in files if not file.parent.name.startswith("rank-")}):
            text = "%s holds no checkpoint, but has stores in its folders: %s; to go on with one of them, give its path"
            write("stores_below", text, self.path, first_few(found, 5), store=self.path)

    def _warn_of_others(self) -> None:
        """Warn if this empty store lies among checkpoints of other programs: training would begin anew beside them."""
        if not self.config.overwrite and (found := others_in(self.path)):
            source = self.path if ".metadata" in found else os.path.join(self.path, found[-1])
            option = " --from dcp" if ".metadata" in found else ""
            text = (
                "%s holds no checkpoint of this package, but those of other programs (%s), which are not restored: "
                "training begins anew; to go on from one, close the engine, and `pccheck import %s %s%s`"
            )
            write("others_here", text, self.path, first_few(found, 5), source, self.path, option, store=self.path)

    async def _open(self) -> None:
        work.set(Work(self.path))
        await self._assembly.open(
            self.peers.folder(self.path),
            self.config,
            self.peers,
            loop=self.loop,
            in_flight=self.in_flight,
            stream=self.stream,
            collect=self._status,
        )
        parts = self._assembly
        self.in_flight.counter, self.captures.owners = await self.peers.join(
            self.path, self.config, parts.store, parts.opened.operations, parts.scheduler.end_with, parts.memory,
            parts.drain,
        )  # fmt: skip
        if parts.drain is not None:
            parts.drain.start()
        if not self.infos and not self.infos_elsewhere:
            self._warn_of_stores_below()
            self._warn_of_others()

    async def _lost_holder(self) -> EngineCore | None:
        """Return the engine of this process that holds the store if no code can call it, else None.

        May collect garbage to find that out.
        """
        holder = holder_here(self.path)
        if not isinstance(holder, EngineCore) or holder.facade is None:
            return None
        if holder.facade() is not None:
            gc.collect()
        return holder if holder.facade() is None else None

    async def _close_lost(self, caller: Caller) -> bool:
        """Close the engine of this process that holds the store if no code can call it; return whether there was one.

        Waits for its checkpoints in flight, ``lock_timeout`` seconds at most, and does not abort them.

        Raises StoreLockedError: they did not end in that time.
        """
        holder = None if self.peers.collective else await caller.run(self._lost_holder())
        if holder is None:
            return False
        waiting = len(holder.in_flight)
        with suppress(ClosedError):  # another opening closes it
            drained, _ = holder.loop.submit(holder.wait_ended())
            if not await caller.wait(drained, self.config.storage.lock_timeout):
                raise StoreLockedError(
                    f"an engine of this process that nothing leads to any more, made at {holder.made_at}, has "
                    f"{waiting} checkpoint(s) in flight to {self.path}, which did not end in "
                    f"{self.config.storage.lock_timeout} s: open again when they have"
                )
        outcome = f"{waiting} checkpoint(s) in flight were drained" if waiting else "nothing was in flight"
        closer = Caller(holder, blocks=caller.blocks)
        try:
            with holder.training.ending():
                await holder.close(closer)
        except Exception as error:  # noqa: BLE001 - of a checkpoint that nobody can await any more
            outcome = str(error)
        finally:
            caller.blocks = closer.blocks
        text = "the engine of %s, made at %s, was closed, as nothing leads to it and another one is opened; %s"
        write("lost_engine", text, self.path, holder.made_at, outcome, store=self.path)
        return True

    async def close(self, caller: Caller, deadline: float | None = None) -> None:
        """Wait for the checkpoints in flight, then close; idempotent. Raises failures that were not awaited.

        After ``deadline`` seconds it gives up: it raises CheckpointError that names the checkpoints left behind;
        threads, buffers and files of their requests stay as they are until the process ends.

        A second call while the engine is being closed waits until it is closed, and raises the error of closing, too.
        Each failure that was not awaited is raised by one of the calls only.
        """
        if os.getpid() != self.pid or self.state in ("new", "closed"):
            return
        if self.state == "opening":
            raise ClosedError(f"the engine of {self.path} is being opened: cancel that, or close it afterwards")
        with self.in_flight.lock:
            if first := self.state == "open":
                self.state = "closing"
        if first:
            await self._close(caller, deadline)
        elif not await caller.wait(self._closed.future(), deadline):
            raise CheckpointError(f"gave up after {deadline} s: the engine of {self.path} is still closing")
        elif (error := self._closed.result()) is not None:
            raise error
        self.in_flight.raise_untold()

    def _say_unawaited(self) -> None:
        """Log calls that did nothing: a coroutine that is not awaited does not even begin."""
        calls = Counter(self.unawaited.values())
        self.unawaited.clear()
        if calls:
            text = "calls that nobody awaited did nothing: %s; write 'await engine.%s(...)'"
            said = ", ".join(f"{count} of {name}()" for name, count in calls.items())
            with suppress(Exception):  # of a handler of the log: the engine closes all the same
                write("unawaited", text, said, next(iter(calls)), store=self.path)

    async def _close(self, caller: Caller, deadline: float | None) -> None:
        closed, failure = True, None
        self.metric.end(lambda: self.infos)
        try:
            closed, left = await caller.run(self.assembly.close(deadline))
            if not closed:
                raise self._gave_up(deadline, left)
        except Exception as error:
            failure = error
            raise
        finally:
            try:
                forget(self)
                self._say_unawaited()
                self.training.closed()
                self.guard.close()
                self.stream.close()
            finally:
                try:
                    if closed:
                        await caller.outlast(self.loop.ask_to_stop())
                finally:
                    self.state = "closed"
                    self._closed.set_result(failure)
            await caller.wait(self.stream.hooks.close(), HOOKS_SECONDS if closed else 0.0)

    def _gave_up(self, deadline: float | None, left: list[Flight]) -> CheckpointError:
        """Return the error that names the checkpoints left behind, and fail them with it."""
        steps = ", ".join(str(flight.step) for flight in left)
        when = f"after {deadline} s" if self.training.patience is None else "at the deadline of a preemption"
        what = (
            f"the checkpoints of steps {steps} were still being written"
            if left
            else "a restore, a pin or the removal of a slot had not ended"
        )
        error = CheckpointError(f"gave up {when}: {what}; left behind")
        for flight in left:
            flight.set_failed(error)
        return error

    def close_at_exit(self) -> str:
        """Close with a deadline, as the interpreter exits; return a message for the user. Raises no Exception."""
        waiting = len(self.in_flight)
        try:
            with self.training.ending(go=False):  # it goes already
                block_on(self, self.close, self.config.storage.exit_timeout)
        except Exception as error:  # noqa: BLE001 - no caller is left to raise it in
            return f"the engine of {self.path} was not closed before the interpreter exited; {error}"
        drained = f"{waiting} checkpoint(s) in flight were drained" if waiting else "nothing was in flight"
        return f"the engine of {self.path} was not closed before the interpreter exited; {drained}"

    def abandon(self) -> None:
        """In a forked child: close every descriptor; the engine lives on in the parent only."""
        self.state = "closed"
        forget(self)
        self._assembly.abandon()

    def check_process(self) -> None:
        """Raise ClosedError in a forked child: a thread that does not exist there may hold any of the locks."""
        if os.getpid() != self.pid:
            raise ClosedError(
                "this engine belongs to the parent process; open one of your own (another folder) after a fork"
            )

    def check_alive(self) -> EngineParts:
        """Return the parts of the engine; raise ClosedError if it is not open, or belongs to another process."""
        if self.state == "open" and os.getpid() == self.pid:
            return self._assembly
        self.check_process()
        if self.state in ("new", "opening"):
            raise ClosedError(f"the engine of {self.path} is not open yet; {self._how_to_open}")
        over = f"is {self.state}: steps and checkpoints belong inside its block, before it is left; or make a new one"
        raise ClosedError(f"the engine of {self.path} {self._unopened or over}")

    @property
    def _how_to_open(self) -> str:
        facade = None if self.facade is None else self.facade()
        if iscoroutinefunction(getattr(facade, "open", None)):
            return "use it as a context manager (`async with`), or write `await engine.open()`"
        return "use it as a context manager (`with`), or call `engine.open()`"

    @property
    def assembly(self) -> EngineParts:
        """The parts of the engine, also after it was closed: counts stay readable. Raises ClosedError: never opened."""
        if not self._assembly.complete:
            raise ClosedError(f"the engine of {self.path} {self._unopened or f'was never opened; {self._how_to_open}'}")
        return self._assembly

    # -- checkpoints

    def start_checkpoint(
        self,
        state: Mapping[str, Any],
        step: int | None,
        metadata: Metadata | None,
        *,
        name: str | None = None,
        replace: bool = False,
        overlap: bool = False,
        last: bool = False,
        tier: Tier = "disk",
    ) -> tuple[PendingCheckpoint, float]:
        """Read the state and hand it to the scheduler, all on the caller's thread.

        The arguments are those of :meth:`pccheck_async.CheckpointEngine.checkpoint`. ``last``: no checkpoint comes
        after this one, so it is neither skipped, nor prevented by an earlier failure. ``tier="disk"`` saves in memory,
        too, if there is a memory tier. If the call raises, the checkpoint fails on all ranks.

        Returns:
            The checkpoint, and the ``time.perf_counter()`` at which the call began, for ``in_flight.note_waited``.
        """
        start, before = time.perf_counter(), self.in_flight.counter
        skipped: PendingCheckpoint | None = None
        capture: Capture | None = None
        flight: Flight | None = None
        taken = False
        try:
            check_outermost(state)
            if tier != "disk":
                self._check_tier(tier)
            assembly = self.check_alive()
            if not (last := self.training.before_checkpoint(state) or last):
                self.in_flight.raise_untold()
            step = None if step is None else new_step(step)
            self.check_restored(step)
            name = None if name is None else check_name(name)
            plain = check_metadata(metadata or {}, name) if metadata or name is not None else {}
            last = last or tier == "memory"  # which takes no place
            if (self._limited or name is not None) and (
                skipped := self._find_place(step, name, replace=replace, last=last)
            ) is not None:
                return skipped, start
            capture = self.captures.start(
                state,
                assembly.backend,
                self.guard.optimizers if overlap else None,
                check_bytes=self.config.storage.check_captures,
                inline=assembly.inline_captures,
                number=before + 1,
            )
            state_seconds = time.perf_counter() - start
            with self.in_flight.lock, _Admission(self, step, tier):
                self.check_alive()
                if (
                    self.in_flight.counter != before
                    and (  # others were admitted meanwhile
                        skipped := self._find_place(step, name, replace=replace, last=last)
                    )
                    is not None
                ):
                    return skipped, start
                # The counter is used up before the scheduler gets the checkpoint: else, after an interrupt in between,
                # two checkpoints would have it.
                flight = self.in_flight.add(step, name, state_seconds, on_disk=tier == "disk")
                self._unrestored = []
                if assembly.publisher is not None:
                    assembly.publisher.start()
                overlapped = None if capture.lazy is None else self.guard.watch(flight, capture.lazy)
                job = Job(flight, capture, plain, overlapped, self.stream.trace, assembly.memory is not None)
                # Set before the scheduler takes the capture: a buffer that is lost by an interrupt in between does no
                # harm, one that is given back twice does.
                taken = True
                taken = self.loop.post(assembly.scheduler.start, job)
                if not taken:
                    raise ClosedError(f"the engine of {self.path} is closed")
                # A checkpoint that waits for its turn keeps its caller waiting, too: else checkpoints would pile up.
                if capture.inline is not None and len(self.in_flight) <= self.config.max_in_flight:
                    flight.set_captured()
        except BaseException as error:
            if flight is not None:  # a KeyboardInterrupt: the caller may change the state without waiting
                block_on(self, self.abort, flight)
                self.in_flight.withdraw(flight)
            self.fail_checkpoint(step, error, after=before, tier=tier)
            raise
        finally:
            if capture is not None and not taken:  # skipped after all, or the engine was closed meanwhile
                capture.release()
            if skipped is not None:
                self.in_flight.tell_skipped(skipped, step)
        if self.metric.best is not None:  # without the lock: handlers of the log are user code
            self.metric.note_save(metadata or {}, lambda: self.infos)
        return PendingCheckpoint(flight), start

    def _check_tier(self, tier: Tier) -> None:
        check_tier(tier)
        if tier == "memory" and self.config.memory is None:
            raise ValueError('tier="memory" needs an engine with memory=MemoryTier(...)')

    def fail_checkpoint(
        self, step: int | None, error: BaseException, *, after: int | None = None, tier: Tier = "disk"
    ) -> None:
        """Report a checkpoint that cannot be made here: it uses up a counter on all ranks, and fails on all.

        Does nothing if this process saves alone, if the engine is not open, or if ``after`` is not the largest counter
        any more: then the call has used one up.
        """
        if (why := self.peers.describe(error)) is None:  # before the lock: it may call a user's code
            return
        with self.in_flight.lock:
            if self.state == "open" and after in (None, self.in_flight.counter):
                self.in_flight.counter += 1
                number = counted = self.in_flight.counter
                with suppress(TypeError, ValueError):  # it may be the step that is wrong
                    counted = number if step is None else new_step(step)
                self.request_failed(number, counted, why, tier)

    def request_failed(self, counter: int, step: int | None, why: str, tier: Tier) -> None:
        """Make a checkpoint whose counter was used up, and that cannot be made here, fail on all ranks."""
        on_disk = tier == "disk" or self.config.memory is None
        step = counter if step is None else step
        self.loop.post(partial(self.peers.request_failed, on_disk=on_disk), counter, step, why)

    def wait_prepared(self, flight: Flight) -> None:
        """Block until this rank's part of a checkpoint is durable; the group then decides about the checkpoint.

        Raises the checkpoint's error if it fails before that. A process that saves alone blocks until it is committed.
        """
        if not self.loop.call(self.peers.prepared(flight.counter)):
            flight.result()

    @property
    def stopped(self) -> str | None:
        """Why no checkpoint of this opening can succeed any more; None while they can."""
        failure = self.assembly.store.latch.failure
        return self.peers.stopped or (None if failure is None else str(failure))

    def check_restored(self, step: int | None, *, begun: bool = False) -> None:
        """Raise ValueError if nothing was restored, and ``step`` is not larger than the newest found at opening.

        A larger step, and a save without a step, are only warned of, once: they may be meant, after a ``load`` of that
        checkpoint, say. All ranks of a group found, restored and removed the same checkpoints, so all raise alike.

        ``begun``: called as training begins the step, not as it is saved. Also warns:

        - of the first step after a restore if it is smaller than the restored one: a loop that begins anew with the
          restored state replaces later checkpoints. So it does of the restored step itself if that is ``begun``, as
          the restored state is that of the step's end;
        - once, of a step that is smaller than the one before, or begun twice, as by a loop that counts the batches of
          each epoch.
        """
        restored, self._restored_step = self._restored_step, None
        last, again = self._last_step, begun and self._last_begun
        if step is not None:
            self._last_step, self._last_begun = step, begun or (self._last_begun and step == last)
        if last is not None and step is not None and step < last + again and not self._told_smaller:
            self._told_smaller = True
            text = (
                "step %d comes after step %d, without a restore between them: a checkpoint of it is the newest one all "
                "the same; a loop that is run again begins with restore(state), and goes on from there; one of several "
                "epochs numbers their steps in one row; an engine with overwrite=True does so, and is not told"
            )
            write("step_went_back", text, step, last, step=step, store=self.path)
        if restored is not None and step is not None and step < restored + begun:
            text = (
                "step %d was restored, and the next one is step %d, whose checkpoint may replace it: a loop goes on "
                "with range(restored.step + 1, ...)%s"
            )
            twice = ", unless it is to train that step twice" if step == restored else ""
            write("step_went_back", text, restored, step, twice, step=step, store=self.path)
        found = self._unrestored
        if not found:
            return
        newest = found[0].step
        if step is not None and step <= newest:
            raise ValueError(
                f"{self.path} holds step {newest}, and this engine, which has not restored it, is to save step {step}: "
                "call restore(state) to go on from there; to begin anew, use another folder, or open the engine with "
                "overwrite=True"
            )
        if self._told_unrestored:
            return
        self._told_unrestored = True
        text = "nobody has restored step %d, and %s is saved after it: restore(state) goes on from there"
        write("unrestored", text, newest, "another state" if step is None else f"step {step}", store=self.path)

    def _find_place(self, step: int | None, name: str | None, *, replace: bool, last: bool) -> PendingCheckpoint | None:
        """Return None if a checkpoint can be admitted, or the result of a call that is skipped, which ``last`` is not.

        Raise ValueError if another checkpoint has this name, unless it is to be replaced; StoreFullError if a record
        cannot name one more. Checkpoints in flight count, too: else the caller would get the error only after they are
        written.
        """
        if not last and (skipped := self.in_flight.skip(step)) is not None:
            return skipped
        if name is None and not isinstance(self.keeps, KeepAll):
            return None
        there = {flight.counter: flight.name for flight in self.in_flight.checkpoints()}
        free = {*self._passed_over, *(info.counter for info in self.infos if info.rejected)}
        there.update((info.counter, None if info.counter in free else info.name) for info in self.infos)
        if name is not None and name in there.values():
            if not replace:
                raise ValueError(
                    f"{self.path} has a checkpoint named {name!r} already, or in flight: remove(name={name!r}) first, "
                    "give another name, or replace=True"
                )
            there = {counter: other for counter, other in there.items() if other != name}
        self.keeps.check_place(len(there))
        return None

    @property
    def newest_step(self) -> int | None:
        """The step of the newest durable checkpoint that is not rejected."""
        return None if self.latest is None else self.latest.step

    @property
    def latest(self) -> CheckpointInfo | None:
        """The newest durable checkpoint that is not rejected."""
        return next((info for info in self.infos if not info.rejected and "disk" in info.tiers), None)

    async def abort(self, caller: Caller, flight: Flight) -> None:
        """Cancel a checkpoint whose capture has not ended, and wait until none of its operations runs.

        A checkpoint that is captured goes on. If the process is to exit on a signal, this waits at most until then:
        the device may be stuck.

        Cancellation: raised afterwards.
        """
        with Waiting(flight):
            try:
                aborting, _ = self.loop.submit(self.assembly.scheduler.abort(flight))
            except ClosedError:
                return  # closing ended it
            patience = self.training.patience
            try:
                if patience is None:
                    await caller.outlast(aborting)
                else:
                    await caller.wait(aborting, patience)
            finally:
                if aborting.done() and aborting.exception() is None and aborting.result():
                    flight.failure_told = True  # else it was captured already and goes on

    @property
    def saves_in_memory(self) -> bool:
        """Whether there is a memory tier, and it is ready; in a group not whether it is ready: all ranks act alike."""
        memory = self.assembly.memory
        return memory is not None and (memory.ready or self.peers.collective)

    def _stop_capture(self, flight: Flight) -> None:
        with suppress(ClosedError):  # closing ended it
            self.loop.call(self.assembly.scheduler.stop_capture(flight, self.config.max_stall))

    def end_last_drains_at(self, until: float | None) -> None:
        """Limit each last wait for checkpoints in flight to a time of ``time.monotonic()``; None: set no limit.

        Last waits are those of :meth:`wait_ended` with ``last``, and of closing.
        """
        self.loop.post(self.assembly.scheduler.end_last_drains_at, until)

    def wait_captured(self) -> None:
        """Block until no capture of a checkpoint admitted so far reads the live state any more."""
        self.check_alive()
        self.guard.wait()
        for flight in self.in_flight.checkpoints():
            flight.wait_out_of_reach()  # failures are raised where the checkpoint itself is awaited

    async def drain(self, caller: Caller) -> None:
        """Wait until every checkpoint admitted so far ended; raise a failure that was not awaited."""
        self.check_alive()
        await caller.run(self.wait_ended())
        self.in_flight.raise_untold()

    async def wait_ended(self, *, last: bool = False) -> None:
        """Wait on the engine's loop until every checkpoint admitted so far ended; raises no failures.

        ``last``: no checkpoint comes after these, and the waiting also ends at the time of :meth:`end_last_drains_at`.
        """
        await self.assembly.scheduler.drain(last=last)

    async def cancel_all(self) -> None:
        """Cancel every checkpoint, and wait until all have ended. Runs on the engine's loop."""
        await self.assembly.scheduler.cancel_all()

    # -- reading

    @property
    def infos(self) -> list[CheckpointInfo]:
        """Committed checkpoints, also those in memory alone, newest first. Raises ClosedError: never opened."""
        _ = self.assembly  # raises ClosedError
        on_disk, in_memory = self.peers.entries, {entry.counter: entry for entry in self.peers.in_memory}
        remote: set[int] = set() if (drain := self._assembly.drain) is None else drain.copied
        if not in_memory and not remote:
            return [entry.info for entry in on_disk]
        there = {entry.counter: entry for entry in on_disk}
        tiers: dict[Reach, Collection[int]] = {"memory": in_memory.keys(), "disk": there.keys(), "remote": remote}
        return [
            replace(entry.info, tiers=tuple(tier for tier, counters in tiers.items() if counter in counters))
            for counter, entry in sorted((in_memory | there).items(), reverse=True)
        ]

    @property
    def infos_elsewhere(self) -> list[CheckpointInfo]:
        """Checkpoints that are in the drain's bucket alone, newest first."""
        if (drain := self.assembly.drain) is None:
            return []
        here = {info.counter for info in self.infos}
        return [replace(entry.info, tiers=("remote",)) for entry in drain.entries if entry.counter not in here]

    async def pin(self, caller: Caller, which: int | str, pinned: bool) -> CheckpointInfo:
        """Exempt a checkpoint from the rules, or subject it to them again; return it.

        First waits until the matching checkpoints in flight have ended, and saves the newest one in memory on disk.
        """
        self.check_alive()
        for flight in self.in_flight.checkpoints():
            if matches(which, flight.step, flight.name):
                await self._wait_ended(caller, flight)
        if self.assembly.memory is not None:  # the disk has all of them then
            await caller.run(self.assembly.scheduler.save_unsaved())
        return (await caller.run(self.peers.pin(which, pinned))).info

    async def _wait_ended(self, caller: Caller, flight: Flight) -> None:
        if flight.on_disk:
            await caller.wait(flight.ended_future())
        else:  # it ends with the next one on disk
            await caller.run(self.assembly.scheduler.ended(flight))

    async def remove(self, caller: Caller, which: int | str, *, force: bool) -> list[CheckpointInfo]:
        """Remove the checkpoints of a step or a name; return them.

        First waits until the matching checkpoints in flight have ended, or all of them if no other would be left, and
        saves the newest one in memory on disk.
        """
        self.check_alive()
        in_flight = self.in_flight.checkpoints()
        others = any(not (info.rejected or matches(which, info.step, info.name)) for info in self.infos)
        for flight in in_flight:
            if matches(which, flight.step, flight.name) or not others:
                await self._wait_ended(caller, flight)
        if self.assembly.memory is not None:  # the disk has all of them then
            await caller.run(self.assembly.scheduler.save_unsaved())
        removed = await caller.run(self.peers.remove(which, force=force))
        self._unrestored = [info for info in self._unrestored if not matches(which, info.step, info.name)]
        return [entry.info for entry in removed]

    async def reject(self, caller: Caller, which: int | str) -> list[CheckpointInfo]:
        """Reject a checkpoint and all that were saved after it and before this call; return the committed ones.

        First saves the newest one in memory on disk.
        """
        self.check_alive()
        with self.in_flight.lock:
            until = self.in_flight.counter
            in_flight = {flight.counter: (flight.step, flight.name) for flight in self.in_flight.checkpoints()}
        if self.assembly.memory is not None:  # the disk has all of them then
            await caller.run(self.assembly.scheduler.save_unsaved())
        rejected = await caller.run(self.peers.reject(which, in_flight, until))
        self.training.rejected()
        counters = {entry.counter for entry in rejected}
        self._unrestored = [info for info in self._unrestored if info.counter not in counters]
        return [entry.info for entry in rejected]

    async def restore(
        self,
        caller: Caller,
        state: Mapping[str, Any],
        which: Which,
        progress: ReadProgress | None = None,
        *,
        strict: bool = True,
        dtype: torch.dtype | None = None,
        private: Private = (),
        dry_run: bool = False,
    ) -> Restored | None:
        """Restore the newest checkpoint (or the requested one) into ``state``, falling back if one is damaged.

        First waits until the captures under way have ended. Returns None: there is no checkpoint. Raises
        NoCheckpointError: the requested one is not there.
        """
        assembly = self.check_alive()
        candidates = self.peers.candidates(which, dry_run=dry_run)
        try:
            self.in_flight.raise_untold()
            check_outermost(state)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"dtype is one of torch's floating-point dtypes, such as torch.float32, not {dtype!r}")
            if isinstance(private, str) and private != "modulo":
                raise ValueError(f"private is 'modulo' or a list of globs over paths, not {private!r}")
            if not dry_run:
                self.training.before_restore()
            while reading := [flight for flight in self.in_flight.checkpoints() if not flight.is_captured]:
                for flight in reading:
                    await caller.wait(flight.captured_future())  # the restore would tear its capture
            self.guard.wait()
            restored = await restore(
                caller, assembly, self.captures.owners, candidates, state, progress,
                strict=strict, dtype=dtype, allow_pickle=self.config.allow_pickle, private=private, dry_run=dry_run,
            )  # fmt: skip
        except BaseException as error:
            await candidates.abandon(caller, error)
            raise
        if restored is None and which is not None:
            raise NoCheckpointError(
                f"{self.path} has no checkpoint{describe_which(which)}{there_are(which, self.infos)}"
            )
        if restored is None:
            refuse_filling(state)  # now, and not only once there is a checkpoint to restore
            self.training.found_nothing(state)
        if not dry_run:
            self._unrestored = []
            self._restored_step = None if restored is None else restored.step
            if restored is not None and candidates.fell_back:
                self._passed_over |= {info.counter for info in self.infos if info.counter > restored.counter}
            self._last_step = None
            if restored is not None:
                self.loop.post(self.peers.note_restored, restored.counter, restored.source)
        return restored

    # -- statistics

    def statistics(self) -> EngineStatistics:
        """Return a snapshot of everything counted so far. Raises ClosedError: never opened, or in a forked child."""
        self.check_process()
        parts = self.assembly
        io, pool = parts.opened.medium.statistics(), parts.pool.statistics()
        store, copying = parts.store.statistics(), parts.backend.statistics()
        reasons = parts.decisions.reasons | {"gpu_capture": copying.reason}
        with self.in_flight.lock:
            return EngineStatistics(
                **self.stream.totals.statistics(),
                in_flight=len(self.in_flight),
                guard_fences=self.guard.fenced,
                interval=self.training.decision,
                memory_interval=self.training.decision_in_memory,
                stages=self.stream.clock.stages() | {"write": io.write, "read": io.read, "flush": io.flush},
                decisions=replace(parts.decisions, reasons=reasons),
                io=f"{io.backend}, {'direct' if io.direct else 'buffered'}: {io.why}",
                loop=self.loop.kind,
                pool_bytes=pool.touched * pool.buffer_bytes,
                pool_peak=pool.peak,
                pool_waits=pool.waited,
                device_bytes=copying.device_bytes,
                device_peak_bytes=copying.device_peak_bytes,
                snapshots=copying.snapshots,
                slots=store.slots,
                slot_bytes=store.slot_bytes,
                memory_bytes=0 if parts.memory is None else parts.memory.slot_bytes,
                replicas_degraded=self.peers.degraded,
                drained=0 if parts.drain is None else parts.drain.state.count,
                drained_bytes=0 if parts.drain is None else parts.drain.nbytes,
                drain_lag_seconds=0.0 if parts.drain is None else parts.drain.lag,
                drain_trouble="" if parts.drain is None else parts.drain.state.trouble,
                unchanged_bytes=store.unchanged_bytes,
                plan_hits=parts.planner.hits,
                plan_misses=parts.planner.misses,
                latest=self.latest,
                pool_in_use_bytes=pool.in_use * pool.buffer_bytes,
                events_dropped=self.stream.hooks.dropped,
            )

    def _status(self) -> Status:
        """Return the status for other processes."""
        training, failure = self.training, self.assembly.store.latch.failure
        in_flight = self.in_flight.checkpoints()  # before the others: one that is committed meanwhile is in both
        newest = self.in_flight.newest
        infos = [info for info in self.infos if not info.rejected and "disk" in info.tiers]
        return make_status(self.statistics(), self._began, in_flight, newest, infos, training, failure)


class _Admission:
    """Context of an admission: if an error leaves it after a counter was used up, that checkpoint fails on all ranks.

    Entered under the lock of the counters, which all ranks of a group use up alike. The lock is taken and released by
    ``with`` itself: an interrupt in a method written in Python would leave it held.
    """

    __slots__ = ("_before", "_core", "_step", "_tier")

    def __init__(self, core: EngineCore, step: int | None, tier: Tier) -> None:
        self._core, self._step, self._tier, self._before = core, step, tier, core.in_flight.counter

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        core = self._core
        if kind is not None and (counter := core.in_flight.counter) != self._before:
            core.request_failed(counter, self._step, f"{kind.__qualname__} as it was admitted", self._tier)


@contextmanager
def note_closing_failure_on(error: BaseException | None) -> Iterator[None]:
    """Return the context to close an engine in after ``error``: an error of closing becomes a note on that.

    If ``error`` is None, the error of closing is raised.
    """
    try:
        yield
    except Exception as failure:
        if error is None:
            raise
        if failure is not error:
            error.add_note(f"closing the engine failed, too: {type(failure).__name__}: {failure}")
