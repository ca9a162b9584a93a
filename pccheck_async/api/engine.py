"""The engine for asyncio code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, NoReturn, ParamSpec, Self, TypeVar, cast

from pccheck_async.api.engine_base import EngineBase
from pccheck_async.engine.handoff import Steps
from pccheck_async.engine.pending import PendingCheckpoint
from pccheck_async.format.info import CheckpointInfo, Metadata, Restored
from pccheck_async.telemetry.progress import ReadProgress
from pccheck_async.training.step_context import AsyncBracket, TrainingStep
from pccheck_async.tuning.tuned import Tuning
from pccheck_async.tuning.tuner import Progress, checkpoint_bytes, tune

__all__ = ["CheckpointEngine"]

P = ParamSpec("P")
T = TypeVar("T")


def _noted(
    method: Callable[Concatenate[CheckpointEngine, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[CheckpointEngine, P], Coroutine[Any, Any, T]]:
    """Let closing the engine tell of calls that nobody awaited: Python's own warning of them is easily lost."""

    async def begin(call: object, work: Callable[[], Coroutine[Any, Any, T]], self: CheckpointEngine) -> T:
        self._core.unawaited.pop(call, None)
        return await work()

    @wraps(method)
    def called(self: CheckpointEngine, *arguments: P.args, **named: P.kwargs) -> Coroutine[Any, Any, T]:
        method(self, *arguments, **named).close()  # wrong arguments are refused here, and not where it is awaited
        call = object()
        self._core.unawaited[call] = method.__name__
        coroutine: Any = begin(call, partial(method, self, *arguments, **named), self)
        coroutine.__qualname__ = method.__qualname__  # of Python's own warning
        return cast("Coroutine[Any, Any, T]", coroutine)

    return cast("Callable[Concatenate[CheckpointEngine, P], Coroutine[Any, Any, T]]", called)


class CheckpointEngine(EngineBase):
    """Saves app states concurrently with training, and always leaves one whole, verified checkpoint.

    Use it as an async context manager: entering opens (or creates) the store and locks it; leaving saves the last step
    of :meth:`step` (``save_last``) and drains. It may be used from several event loops and threads; its own work runs
    on a thread of its own, so a training step that blocks the caller's loop does not hold it up.

    Args:
        path: Folder of the store; created where it does not exist.
        max_in_flight: Most checkpoints between admission and their end (PCcheck's N).
        keep_last: Committed checkpoints that are kept: so many of the newest.
        keep_every: Keep those, too, that are the first at or after each multiple of so many steps, as long as a commit
            record has room (64 in all). Steps count as for ``interval``: s + 1 of them have ended after step s.
        keep_best: Keep those, too, that are the best by a number in their metadata, such as ``("loss", 3, "min")``.
        save_last: Leaving the context without an error saves the last step that :meth:`step` finished, unless a
            checkpoint made since that step began (by hand, too, of that step or a later one) holds it. After a signal
            of :meth:`on_preemption` that is so with an error, too. Captured is the state as it is then, all at one
            instant: random numbers drawn since count. It is not saved, and the log says so, where it is no state of
            that step any more, or may be none: where an optimizer in the state made another step since, parameters
            changed so that torch counts it (best weights loaded, ``half()``), code got at them through ``.data`` or
            ``set_()`` (other weights for an evaluation), or after a :meth:`restore`; nor where the step left a window
            of gradient accumulation open. A step that raised, :meth:`close` and the end of the interpreter save
            nothing.
        chunk_bytes: Unit of copying and writing, in bytes.
        host_memory: Most staging memory, in bytes. A state that fits is captured at memory speed, a larger one streams
            through at the storage's.
        writers: Writes running at a time (PCcheck's p).
        device: Tensors on CUDA devices are first copied on their device where memory is spare and that is faster than
            to wait for the host (CheckFreq's rule); "snapshot" wherever there is memory, "stream" never.
        io: "io_uring" or "threads" (both of the C extension), "python" or "auto"; or a writer, such as those of
            :mod:`pccheck_async.testing`.
        interval: When ``engine.step`` checkpoints: every so many steps (int), every so often (timedelta), or as a
            policy of :mod:`pccheck_async.training.policy` says; by default as often as 3 % of training time allow.
        max_stall: Most seconds that a step of an attached optimizer waits on the host for a capture; beyond, that
            checkpoint is abandoned. What GPUs wait for copies that are queued on them does not count.
        check_captures: Compare what was captured beside training with a copy made before; for debugging, as it takes
            the time and the memory of that copy.
        on_busy: With ``max_in_flight`` checkpoints in flight, "wait" for one to end or "skip" the new one.
        on_error: "raise" a failure that nobody saw at the next call, or "warn" of it.
        lock_timeout: Seconds to wait for a dying writer of the same store.
        exit_timeout: Seconds that an engine left open may take to drain when the interpreter exits.

    Raises:
        ValueError: a setting is out of range.
    """

    async def open(self) -> Self:
        """Lock (or create) the store and recover; what ``async with`` does on entering.

        Durability: opening an existing store writes nothing.

        Raises:
            StoreLockedError: another writer has it.
            CorruptStoreError: the folder holds no readable store.
            WriteError: the folder cannot be written.
        """
        await self._core.run(self._core.open())
        return self

    async def close(self, deadline: float | None = None) -> None:
        """Wait until every checkpoint ended, then close; idempotent. Saves nothing more (see ``save_last``).

        Called by several tasks or threads, it returns to each when the engine is closed. What the deadline left behind
        is raised to all of them, a failure that nobody saw to one. The log tells of calls that nobody awaited.

        Args:
            deadline: Seconds after which to give up; what is then still being written is left behind and said.

        Cancellation: aborts what is in flight, waits for its operations, and closes. Where another task called it
        first: only stops the waiting.

        Raises:
            CheckpointError: the failure of a checkpoint that nobody saw, or what the deadline left behind.
        """
        await self._end(self._core.close(deadline), go=True)

    async def _end(self, steps: Steps, *, go: bool) -> None:
        with self._core.preemption.ending(go=go):
            await self._core.run(steps)
        await self._let_cancel()

    async def _let_cancel(self) -> None:
        """What a SIGINT's handler of asyncio did to the task happens now, not some steps later."""
        if self._core.preemption.asked:
            await asyncio.sleep(0)

    def __enter__(self) -> NoReturn:
        raise TypeError("use 'async with CheckpointEngine(...)', or SyncCheckpointEngine where nothing is async")

    def __exit__(self, *_: object) -> None: ...

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._end(self._core.leave(well=error is None), go=error is None)
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"a checkpoint failed too: {type(failure).__name__}: {failure}")

    def step(self, state: Mapping[str, Any], step: int, *, metadata: Metadata | None = None) -> AsyncBracket:
        """Bracket one training step, and checkpoint after it when the policy (``interval``) says so.

        The checkpoint waits for the end of a window of gradient accumulation
        (:mod:`pccheck_async.training.accumulation`). With attached optimizers the capture overlaps with the next step.
        If the body raises, nothing is captured.

        Args:
            state: As for :meth:`checkpoint`.
            step: The number of this step.
            metadata: As for :meth:`checkpoint`; more may be added to the ``metadata`` of what the context gives.

        Raises:
            CheckpointError: a checkpoint failed and nobody saw it; and what :meth:`checkpoint` raises.
        """
        return AsyncBracket(self._bracket(TrainingStep(state, step, metadata)))

    @asynccontextmanager
    async def _bracket(self, this: TrainingStep) -> AsyncIterator[TrainingStep]:
        with self._core.bracket(this):
            yield this
        if self._core.end_step(this):
            overlap = bool(self._core.guard.optimizers)
            pending = await self.checkpoint(this.state, step=this.step, metadata=this.metadata, overlap=overlap)
            self._core.steps.note(this, pending)
        if self._core.is_last(this):
            await self._core.run(self._core.last(this))
            await self._let_cancel()

    @_noted
    async def checkpoint(
        self,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        metadata: Metadata | None = None,
        overlap: bool = False,
    ) -> PendingCheckpoint:
        """Capture ``state``; return when it is safe to mutate, while the bytes still go to storage.

        ``state_dict()`` of every :class:`pccheck_async.Stateful` and all plain values are read on the caller's thread
        before the first await. The state must not change until this returns. Of tensors on CUDA devices, the checkpoint
        sees what the current streams have queued; work on other streams has to be joined first (``wait_stream``).
        Handlers of signals must not call this (see :meth:`on_preemption`): what they interrupted may be the engine.

        Args:
            state: Names to Stateful objects (modules, optimizers, ...), tensors, arrays and plain values, nested at
            will.
            step: The user's number; by default the engine's counter.
            metadata: Small facts (at most 512 bytes) that ``list_checkpoints`` shows without reading the checkpoint.
            overlap: Return earlier: what attached optimizers train is captured while training goes on, until the next
                of their steps waits for it, on GPUs without blocking the host where all copies are queued there.
                Everything else is captured before this returns, unless it is large and was the same in the last two
                checkpoints. Code that reaches for what is being captured through ``.data``, NumPy, a storage or DLPack
                waits for it. Other code that changes such a tensor calls :meth:`wait_captured` first, else the
                checkpoint is torn: found out (TornCaptureError), except for writes through references to memory that
                were taken before, compiled code and CUDA graphs (see ``check_captures``).

        Returns:
            The checkpoint on its way; await it for durability.

        Cancellation: before the capture ended, aborts this checkpoint and returns once its operations completed.

        Raises:
            UnsupportedStateError: a value cannot be saved, or is an optimizer's ``state_dict()`` from before its first
                step, in place of the optimizer; names its path. Or tensors are none where this was called: in
                FakeTensorMode, a function of torch.compile or a transform of torch.func.
            ClosedError: the engine is not open, or belongs to a parent process.
            CheckpointError: this checkpoint failed during capture, or an earlier one failed and nobody saw it.
        """
        pending, start = self._core.admit(state, step, metadata, overlap=overlap)
        try:
            await (pending.held_captured() if overlap else pending.captured())
        except asyncio.CancelledError:
            await self._core.pipeline.aborts.abort(pending)
            raise
        except Exception as error:
            if not self._core.warn_of(pending, error):
                raise
        finally:
            self._core.stalls.note_call(pending, start)
        return pending

    @_noted
    async def restore(
        self,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        strict: bool = True,
        progress: ReadProgress | None = None,
    ) -> Restored | None:
        """Restore the newest checkpoint into ``state``, in place; every checksum is verified.

        Live tensors are filled where they are, Stateful objects get ``load_state_dict``, and a plain value is a
        placeholder for whatever was saved in its place. A damaged newest checkpoint is passed over for the next older
        one, with a warning.

        Args:
            state: Shaped like the state that was saved.
            step: Restore this step instead (the newest of it); damage then raises.
            strict: With False, restore what both have: what only the state has stays as it is, what only the checkpoint
                has is not read, and the result names both (``missing``, ``unexpected``). Modules load their own state
                with the stored part put in its place; other objects get what they saved. Another shape, dtype or type,
                or an optimizer of other parameters, still raises (leave such an object out of ``state``), and so do a
                module or an entry of ``state`` of which the checkpoint has nothing below its name, and a model that one
                of them has in a wrapper.
            progress: Called on the engine's thread with the bytes done and all bytes, after each chunk (from the start
                again where a damaged checkpoint is passed over); quick.

        Returns:
            What was restored, None where the store is empty.

        Cancellation: ends once every read ended; ``state`` may then hold a mixture.

        Raises:
            StateMismatchError: leaves differ; nothing was changed (a note tells of a damaged one tried before). Modules
                with hooks before ``load_state_dict``, or a ``_load_from_state_dict`` of their own, decide themselves
                what fits below them: what they raise comes after other things were changed.
            UnsupportedStateError: ``state`` is no mapping from names, or has the ``state_dict()`` of an object in its
                place, so that it would get nothing; names its path. Or as for :meth:`checkpoint`.
            DamagedError: no checkpoint is whole; ``state`` may hold a mixture.
            CorruptStoreError: this version, or this torch, does not understand it; nothing is dropped.
            Exception: what a ``load_state_dict`` raised, with a note that names the object.
            NoCheckpointError: there is none of ``step``.
        """
        restored: Restored | None = await self._core.run(self._core.restore(state, step, progress, strict=strict))
        return restored

    @_noted
    async def pin(self, step: int) -> CheckpointInfo:
        """Keep the newest checkpoint of ``step`` until :meth:`unpin`, whatever ``keep_last`` and its like say.

        Durability: when this returns it is pinned for good, also for engines that open the store later.

        Cancellation: raised once the record is written.

        Raises:
            NoCheckpointError: there is none of ``step``.
            StoreFullError: too many are pinned; a commit record names 64.
            StoreFailedError: a flush or a record failed, now or before: nothing more is committed.
        """
        self._core.check_alive()
        return await self._core.loop.run(self._core.pin(step, True))

    @_noted
    async def unpin(self, step: int) -> CheckpointInfo:
        """End :meth:`pin`: the next commit drops it where no rule keeps it."""
        self._core.check_alive()
        return await self._core.loop.run(self._core.pin(step, False))

    @_noted
    async def drain(self) -> None:
        """Wait until every checkpoint admitted so far ended.

        Cancellation: only stops the waiting.

        Raises:
            CheckpointError: the failure of one that nobody saw.
        """
        self._core.check_alive()
        await self._core.loop.run(self._core.drain())
        self._core.admissions.raise_untold()

    @_noted
    async def tune(
        self,
        state: Mapping[str, Any] | None = None,
        *,
        nbytes: int | None = None,
        step_seconds: float | None = None,
        budget_seconds: float = 10.0,
        progress: Progress | None = None,
    ) -> Tuning:
        """Measure this storage and this machine, and return the settings for an engine here; this one stays as it is.

        Picks the smallest ``max_in_flight``, the smallest ``writers`` and the smallest ``chunk_bytes`` that are as fast
        as the best, and ``host_memory``, inside what disk, memory and cores allow (PCcheck, section 3.4). The
        engine's own ``keep_last``, and its ``host_memory`` as the budget, are taken into account. Saves checkpoints of
        a sample into a folder of its own inside the store's, about as much as the disk can take in ``budget_seconds``;
        the store's checkpoints are not touched. Train when it has ended: it measures whatever else the machine does.

        Args:
            state: What will be saved; only its size matters.
            nbytes: That size in bytes. Without either it is that of the newest checkpoint.
            step_seconds: Time of a training step; then the result says how often to checkpoint.
            budget_seconds: About how long to measure; a slow device needs more.
            progress: Called from another thread with the part done (0 to 1) and what is being measured.

        Returns:
            ``CheckpointEngine(path, **tuning.settings)`` takes the settings; ``tuning.write(path)`` keeps them.

        Cancellation: ends once every operation ended and the sample's folder is gone.

        Raises:
            InfeasibleError: nothing fits; names what is missing.
            NoCheckpointError: neither ``state`` nor ``nbytes`` nor a checkpoint says the size.
            StoreLockedError: another tuning runs in this folder.
            ValueError: ``io`` is a single writer, or an argument is out of range.
            WriteError: the storage failed.
        """
        self._core.check_alive()
        nbytes = checkpoint_bytes(self._core, state, nbytes)
        await self._core.loop.run(self._core.drain())
        return await tune(
            self._core.path,
            nbytes=nbytes,
            config=self._core.config,
            io=self._core.io,
            step_seconds=step_seconds,
            budget_seconds=budget_seconds,
            progress=progress,
        )
