# SPDX-License-Identifier: Apache-2.0
"""The engine for asyncio code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial, wraps
from typing import Any, Concatenate, NoReturn, ParamSpec, Self, TypeVar, cast

import torch

from pccheck_async.api.engine_base import EngineBase
from pccheck_async.engine import Caller, EngineLoop, PendingCheckpoint, Private, flight_of, note_closing_failure_on, run
from pccheck_async.format import (
    CheckpointInfo,
    Metadata,
    Restored,
    Tier,
    explained,
    formerly,
    the_one,
    which_one,
)
from pccheck_async.telemetry import ReadProgress
from pccheck_async.training import AsyncStepContext, TrainingStep
from pccheck_async.tuning import Progress, Tuning

__all__ = ["CheckpointEngine"]

P = ParamSpec("P")
T = TypeVar("T")


def _counted_until_awaited(
    method: Callable[Concatenate[CheckpointEngine, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[CheckpointEngine, P], Coroutine[Any, Any, T]]:
    """Decorate a coroutine method so that closing the engine logs its calls that were not awaited.

    Python's own warning of them is easily lost. Wrong arguments raise TypeError at the call, not at the ``await``.
    """

    @wraps(method)
    def called(self: CheckpointEngine, *arguments: P.args, **named: P.kwargs) -> Coroutine[Any, Any, T]:
        method(self, *arguments, **named).close()  # wrong arguments are refused here, and not at the await
        call = object()
        self._core.unawaited[call] = method.__name__

        async def begin() -> T:
            self._core.unawaited.pop(call, None)
            return await method(self, *arguments, **named)

        begin.__qualname__ = method.__qualname__  # of Python's own warning
        return begin()

    return cast("Callable[Concatenate[CheckpointEngine, P], Coroutine[Any, Any, T]]", called)


class CheckpointEngine(EngineBase):
    """Saves app states while training goes on, and always leaves one whole, verified checkpoint.

    Use it as an async context manager: entering opens (or creates) the store and locks it; leaving saves the last step
    that :meth:`step` finished (``save_last``) and waits for all checkpoints. It may be used from several event loops
    and threads. Its own work runs on an event loop in a thread of its own, so a training step that blocks the caller's
    loop does not delay it.
    """

    async def open(self) -> Self:
        """Lock (or create) the store and recover; called by ``async with`` on entering.

        If an engine of this process that no code can reach any more has the store open, it is drained and closed first.

        Durability: opening an existing store writes nothing.

        Raises:
            StoreLockedError: another writer has locked it; if that is an engine of this process, the message names the
                line that made it.
            CorruptStoreError: the folder holds no readable store.
            WriteError: the folder cannot be written.
        """
        await run(self._core, self._core.open)
        return self

    async def close(self, deadline: float | None = None) -> None:
        """Wait until every checkpoint ended, then close the store. Idempotent. The last step is not saved.

        (Leaving the context saves it: ``save_last``.) Several tasks or threads may call this: each call returns when
        the engine is closed. If checkpoints are unfinished at the deadline, every call raises; the failure of a
        checkpoint that was not awaited is raised by one call. The log names calls of the engine's coroutine methods
        that were not awaited.

        Args:
            deadline: Seconds after which to give up: checkpoints still being written are abandoned, and the error names
                them. With a ``drain`` this also waits, within the same time, until the newest checkpoint is in the
                bucket; the log names checkpoints that are not there, and the next engine copies them.

        Cancellation: aborts the checkpoints in flight, waits for their I/O operations, and closes the store. If another
        task called this first: only stops the waiting.

        Raises:
            CheckpointError: a checkpoint that was not awaited failed, or some were unfinished at the deadline.
        """
        await self._end(partial(self._core.close, deadline=deadline), go=True)

    async def _end(self, end: Callable[[Caller], Coroutine[Any, Any, None]], *, go: bool) -> None:
        with self._training.ending(go=go):
            await run(self._core, end)
        await self._training.let_cancel()

    def __enter__(self) -> NoReturn:
        raise TypeError("use 'async with CheckpointEngine(...)', or SyncCheckpointEngine where nothing is async")

    def __exit__(self, *_: object) -> None: ...

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with note_closing_failure_on(error):
            await self._end(partial(self._training.leave, well=error is None), go=error is None)

    @explained
    def step(self, state: Mapping[str, Any], step: int, *, metadata: Metadata | None = None) -> AsyncStepContext:
        """Return the context manager of one training step; leaving it takes a checkpoint if one is due (``interval``).

        Inside a window of gradient accumulation the checkpoint is postponed to the window's end
        (:mod:`pccheck_async.training.accumulation`), by 64 contexts or ten minutes at most. With attached optimizers
        the capture overlaps with the next step; of a torn capture a warning is logged, and no later call raises it. If
        the body raises, nothing is captured.

        Args:
            state: As for :meth:`checkpoint`.
            step: The number of this step.
            metadata: As for :meth:`checkpoint`; the body may add to ``metadata`` of the :class:`TrainingStep` that
                ``as`` gives it.

        Raises:
            CheckpointError: an earlier checkpoint failed and was not awaited; and all errors of :meth:`checkpoint`.
            ValueError: as for :meth:`checkpoint`, on entering, whether or not this step would be saved.
        """
        return AsyncStepContext(self._training, TrainingStep(state, step, metadata), self.checkpoint)

    @_counted_until_awaited
    @explained
    async def checkpoint(
        self,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        metadata: Metadata | None = None,
        name: str | None = None,
        replace: bool = False,
        overlap: bool = False,
        tier: Tier = "disk",
    ) -> PendingCheckpoint:
        """Capture ``state``; return when the state may be changed again, while its bytes are still being written.

        ``state_dict()`` of every :class:`pccheck_async.Stateful` and all plain values are read on the caller's thread
        before the first await. The state must not change until this returns. Tensors on CUDA devices are
        captured after the work queued on the current streams; join other streams first (``wait_stream``). Signal
        handlers must not call this, because they may have interrupted the engine itself (see :meth:`on_preemption`).

        Gradients are not saved: call this after a step of the optimizer, not inside a window of gradient accumulation.
        (:meth:`step` waits for the end of such a window, and this does not.)

        Args:
            state: Names to Stateful objects (modules, optimizers, ...), tensors, arrays and plain values, nested at
                will.
            step: The caller's number of the training step; by default the checkpoint's number in the store.
            metadata: A few plain values (at most 512 bytes) that ``list_checkpoints`` shows without reading the
                checkpoint.
            name: Name of the checkpoint, such as "epoch=3", by which :func:`pccheck_async.load`, :meth:`restore`,
                :meth:`remove` and the command line find it. The name counts into the 512 bytes of ``metadata``. No two
                checkpoints in a store, or in flight, have one name. In a group all ranks give the same.
            replace: The commit of this checkpoint also drops the one that has its ``name`` now, pinned or not: after a
                crash exactly one of the two is there.
            overlap: Return earlier. The tensors that attached optimizers train are captured while training goes on;
                the next step of such an optimizer waits for the capture (on GPUs without blocking the host, if all
                copies are queued there). Everything else is captured before this returns, except large tensors that
                were the same in the last two checkpoints. Code that reaches a tensor being captured through ``.data``,
                NumPy, a storage or DLPack waits by itself. Other code that changes one must call
                :meth:`wait_captured` first; otherwise the checkpoint is torn. That is detected (TornCaptureError),
                except for writes through references to memory that were taken before, compiled code and CUDA graphs
                (see ``StorageOptions(check_captures=True)``).
            tier: "memory": save in memory alone (needs ``memory=MemoryTier(...)``). A checkpoint for the "disk" is
                saved in memory, too, if there is such a tier; ``await pending.reached("memory")`` waits for that.

        Returns:
            The checkpoint in flight; awaiting it waits until it is durable.

        Cancellation: before the capture ended, aborts this checkpoint and returns once its I/O operations completed.

        Raises:
            UnsupportedStateError: a value cannot be saved, or an optimizer's ``state_dict()`` from before its first
                step stands in place of the optimizer; names the path. Or it was called inside code whose tensors have
                no values: FakeTensorMode, a function of torch.compile or a transform of torch.func.
            ClosedError: the engine is not open, or belongs to a parent process.
            CheckpointError: this checkpoint failed during its capture, or an earlier one failed and was not awaited.
            ValueError: a checkpoint of this ``name`` exists already, or is in flight. Or a run would begin anew in the
                store of another: the newest checkpoint that the store was opened with has this ``step`` or a larger
                one, and this engine has neither restored nor saved any (``overwrite`` allows it). Nothing was captured.
            StoreFullError: with ``keep_last="all"``, 64 checkpoints are kept or in flight; nothing was captured.
        """
        pending, start = self._core.start_checkpoint(
            state, step, metadata, name=name, replace=replace, overlap=overlap, tier=tier
        )
        if pending.skipped:
            await asyncio.sleep(0)  # others may run, and cancel
            return pending
        flight = flight_of(pending)
        try:
            await flight.eager_captured()
        except asyncio.CancelledError:
            await run(self._core, self._core.abort, flight)
            raise
        except GeneratorExit:  # thrown away: maybe by the garbage collector, on any thread, so nothing is waited for
            flight.give_up()
            raise
        except Exception as error:
            if not self._core.in_flight.warn_of(flight, error):
                raise
        finally:
            self._core.in_flight.note_waited(flight, start, "checkpoint")
        return pending

    @_counted_until_awaited
    @explained
    async def restore(
        self,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        name: str | None = None,
        strict: bool = True,
        dtype: torch.dtype | None = None,
        private: Private = (),
        progress: ReadProgress | None = None,
        dry_run: bool = False,
    ) -> Restored | None:
        """Restore the newest checkpoint into ``state``, in place; every checksum is verified.

        Tensors are filled in place, Stateful objects get ``load_state_dict``, and a plain value is replaced by
        the one that was saved. If the newest checkpoint is damaged, the next older one is restored, with a warning. The
        next commit drops a checkpoint that was found damaged.

        Gradients (``.grad``) of the tensors, modules and optimizers that are restored become None, with a warning if
        there were any: gradients of an interrupted step would be added to those of the next step.

        Args:
            state: Shaped like the state that was saved.
            step: Restore the newest checkpoint of this step instead; if it is damaged, that raises.
            name: Restore the checkpoint with this name instead; if it is damaged, that raises.
            strict: False restores only leaves that are in both ``state`` and checkpoint. Leaves of ``state`` alone stay
                as they are, leaves of the checkpoint alone are not read; the result names both (``missing``,
                ``unexpected``). A module gets its own state with the stored leaves put into it; other objects get their
                saved state. These still raise: another shape, dtype or type; an optimizer of other parameters (leave
                such an object out of ``state``); a module or an optimizer of which the checkpoint has nothing; an entry
                of both with no leaf in common; a model that is in a wrapper (DDP) in only one of them.
            dtype: A floating-point dtype: live tensors of this dtype also take stored ones of another floating-point
                dtype, cast by ``copy_``, and so do the tensors that an optimizer keeps for such parameters. (Not if a
                tensor lies on several ranks in another way than it was saved.) None: another dtype raises.
            private: How a group restores plain tensors that differed by rank under one name, if another number of ranks
                saved the checkpoint. By default they are refused. "modulo": rank r restores those of rank r modulo the
                old number of ranks. Globs over paths: "modulo" for these paths alone.
            progress: Called on the engine's thread with the bytes done and all bytes, after each chunk that is read
                (from 0 again after a damaged checkpoint). It must be quick.
            dry_run: Only compare: nothing is changed and no array is read. The result has the ``actions`` of a restore,
                and the ``error`` that it would raise. In a group all ranks call it, and each gets its own result.

        Returns:
            The restored checkpoint; None if the store is empty.

        Cancellation: returns once every read ended; ``state`` may then hold a mixture.

        Raises:
            StateMismatchError: leaves differ, or another number of ranks saved the checkpoint, with different tensors
                under one name (see ``private``); nothing was changed. (A note names a damaged checkpoint tried before.)
                But modules with hooks before ``load_state_dict``, or a ``_load_from_state_dict`` of their own, decide
                themselves which leaves fit below them: their errors come after other objects were changed.
            UnsupportedStateError: ``state`` is no mapping from names, or has the ``state_dict()`` of an object in the
                object's place, so that the object would get nothing; names the path. Or as for :meth:`checkpoint`.
            DamagedError: no checkpoint is whole; ``state`` may hold a mixture.
            CorruptStoreError: this version, or this torch, cannot read the checkpoint; nothing is dropped.
            Exception: the error of a ``load_state_dict``, with a note that names the object.
            NoCheckpointError: no checkpoint has this ``step`` or ``name``.
            StoreError: all checkpoints, or all of this step or name, are rejected (:meth:`reject`).
            ReadError: the device failed, and there is nothing older to fall back to.
            CheckpointError: an earlier checkpoint failed and was not awaited; nothing was read.
        """
        which = which_one(step, name)
        return await run(
            self._core, self._core.restore, state, which, progress,
            strict=strict, dtype=dtype, private=private, dry_run=dry_run,
        )  # fmt: skip

    @formerly("step", after=1)
    @_counted_until_awaited
    async def pin(self, *, step: int | None = None, name: str | None = None) -> CheckpointInfo:
        """Keep a checkpoint until :meth:`unpin`, even if ``keep_last`` or a rule would drop it.

        If it is in flight, this waits for it first. In a group all ranks call this alike.

        Args:
            step: Pin the newest checkpoint of this step. (Give either this or ``name``.)
            name: Pin the checkpoint with this name.

        Durability: when this returns the pin survives power loss; engines that open the store later respect it.

        Cancellation: raised once the record is written.

        Raises:
            NoCheckpointError: no checkpoint has this step or name.
            StoreFullError: too many are pinned; a commit record names 64.
            StoreFailedError: a flush or the write of a record failed, now or before: nothing more is committed.
            TypeError: neither ``step`` nor ``name`` is given.
            ValueError: both are given.
        """
        return await run(self._core, self._core.pin, the_one(step, name), True)

    @formerly("step", after=1)
    @_counted_until_awaited
    async def unpin(self, *, step: int | None = None, name: str | None = None) -> CheckpointInfo:
        """Undo :meth:`pin`: the next commit drops the checkpoint unless a rule keeps it.

        Args:
            step: Unpin all checkpoints of this step. (Give either this or ``name``.)
            name: Unpin the checkpoint with this name.

        Returns:
            The newest checkpoint that was unpinned.

        Durability: when this returns the change survives power loss.

        Cancellation: raised once the record is written.

        Raises:
            NoCheckpointError: no checkpoint has this step or name.
            StoreFailedError: a flush or the write of a record failed, now or before: nothing more is committed.
            TypeError: neither ``step`` nor ``name`` is given.
            ValueError: both are given.
        """
        return await run(self._core, self._core.pin, the_one(step, name), False)

    @_counted_until_awaited
    @explained
    async def remove(
        self, *, step: int | None = None, name: str | None = None, force: bool = False
    ) -> list[CheckpointInfo]:
        """Remove the checkpoint called ``name``, or every one of ``step``, pinned or not, in one commit.

        If some of them are in flight, this waits for those first; if no other checkpoint is committed, it waits for all
        that are in flight (so the next one may be saved just before this call). In a group all ranks call this alike.

        Args:
            step: Remove all checkpoints of this step. (Give either this or ``name``.)
            name: Remove the checkpoint with this name.
            force: Remove them even if no checkpoint is left then.

        Returns:
            The removed checkpoints, newest first.

        Durability: when this returns they are gone also after a power failure. A crash before that leaves all of them,
        or none. (In a group, a checkpoint that a crash left on some ranks alone is incomplete, and not restored.)
        The bucket of a drain drops them in the background: a run that is killed before leaves them there.

        Cancellation: raised once the record is written.

        Raises:
            NoCheckpointError: no checkpoint has this step or name.
            StoreError: no checkpoint would be left that is not rejected; nothing was removed.
            StoreFailedError: a flush or the write of a record failed, now or before: nothing more is committed.
            TypeError: neither ``step`` nor ``name`` is given.
            ValueError: both are given.
        """
        return await run(self._core, self._core.remove, the_one(step, name), force=force)

    @formerly("step", after=1)
    @_counted_until_awaited
    async def reject(self, *, step: int | None = None, name: str | None = None) -> list[CheckpointInfo]:
        """Reject a checkpoint and every newer one, as after a run diverged: :meth:`restore` passes them over.

        All checkpoints of ``step`` (or of the step of the one called ``name``) and of larger steps are rejected, and
        all that were saved after the newest one of ``step``, or after the one called ``name``. Those in flight are
        dropped (``superseded``). No rule (``keep_last`` and the like) keeps a rejected checkpoint: the next commit
        drops those that are not pinned. Rejecting cannot be undone; :func:`pccheck_async.load` with ``step=`` still
        reads a rejected checkpoint until it is dropped. Checkpoints saved after this call are not rejected: call
        :meth:`restore` first. The step of :meth:`step` that this is called in, and the last step before, are not saved.
        In a group all ranks call this alike.

        Args:
            step: The first bad step. (Give either this or ``name``.)
            name: Name of the first bad checkpoint.

        Returns:
            The committed checkpoints that were rejected, newest first.

        Durability: when this returns they stay rejected also after a power failure, on all ranks.
        The bucket of a drain drops them in the background: a run that is killed before leaves those valid that it alone
        has.

        Cancellation: raised once the record is written.

        Raises:
            NoCheckpointError: no checkpoint from ``step`` on, or with this name, is left that is not rejected.
            StoreError: no committed checkpoint would be left to restore; nothing was rejected.
            StoreFailedError: a flush or the write of a record failed, now or before: nothing more is committed.
            TypeError: neither ``step`` nor ``name`` is given.
            ValueError: both are given.
        """
        return await run(self._core, self._core.reject, the_one(step, name))

    @_counted_until_awaited
    async def drain(self) -> None:
        """Wait until every checkpoint admitted so far ended.

        Cancellation: only stops the waiting.

        Raises:
            CheckpointError: a checkpoint that was not awaited failed.
        """
        await run(self._core, self._core.drain)

    @_counted_until_awaited
    async def tune(
        self,
        state: Mapping[str, Any] | None = None,
        *,
        nbytes: int | None = None,
        step_seconds: float | None = None,
        budget_seconds: float = 10.0,
        progress: Progress | None = None,
    ) -> Tuning:
        """Measure this storage and this machine, and return settings for an engine here; this engine stays as it is.

        Chooses the smallest ``max_in_flight``, then the smallest ``writers``, then the smallest ``chunk_bytes`` that
        are as fast as the best, and ``host_memory``, within disk, memory and cores (PCcheck, section 3.4). This
        engine's ``keep_last`` and ``keep`` count, and its ``host_memory`` is the budget. Sample checkpoints are saved
        into a folder inside the store's, about as many as the disk takes in ``budget_seconds``; the store's checkpoints
        are not touched. Do not train meanwhile: other work of the machine is measured, too.

        Args:
            state: The state to be saved; only its size matters.
            nbytes: Size of the state in bytes. Without this and ``state``: the size of the newest checkpoint.
            step_seconds: Seconds of a training step; with it the result also has an interval for checkpoints.
            budget_seconds: About how many seconds to measure; a slow device needs more.
            progress: Called from another thread with the part done (0 to 1) and a text on the current measurement.

        Returns:
            ``CheckpointEngine(path, **tuning.settings)`` takes the settings; ``tuning.write(path)`` keeps them.

        Cancellation: returns once every operation ended and the folder of the samples is removed.

        Raises:
            InfeasibleError: nothing fits; names the missing resource.
            NoCheckpointError: neither ``state`` nor ``nbytes`` nor a checkpoint gives the size.
            StoreLockedError: another tuning runs in this folder.
            ValueError: ``io`` of the engine is a single medium, or an argument is out of range.
            WriteError: the storage failed.
        """
        measure = self._tuning(state, nbytes, step_seconds, budget_seconds, progress)
        await self._core.loop.run(self._core.wait_ended())
        async with EngineLoop("pccheck-tune") as loop:
            return await loop.run(measure())
