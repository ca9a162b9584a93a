# SPDX-License-Identifier: Apache-2.0
"""The engine for code that is not async: the same verbs, blocking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Self

import torch

from pccheck_async.api.engine_base import EngineBase
from pccheck_async.engine import EngineLoop, PendingCheckpoint, Private, block_on, flight_of, note_closing_failure_on
from pccheck_async.format import (
    CheckpointInfo,
    Metadata,
    Restored,
    Tier,
    check_tier,
    explained,
    formerly,
    the_one,
    which_one,
)
from pccheck_async.telemetry import ReadProgress
from pccheck_async.training import StepContext, TrainingStep
from pccheck_async.tuning import Progress, Tuning

__all__ = ["SyncCheckpointEngine"]


class SyncCheckpointEngine(EngineBase):
    """Saves app states while training goes on, and always leaves one whole, verified checkpoint; for blocking code.

    Use it as a context manager: entering opens (or creates) the store and locks it; leaving saves the last step that
    :meth:`step` finished (``save_last``) and waits for all checkpoints. :meth:`checkpoint` returns when the state is
    captured; ``result()`` of what it returns blocks until that is durable. It may be used from several threads. Its own
    work runs in a thread of its own. Methods must not be called from a coroutine: they would block its loop.
    """

    def open(self) -> Self:
        """Lock (or create) the store and recover; called by ``with`` on entering.

        Durability: opening an existing store writes nothing.

        Raises:
            StoreLockedError: another writer has it.
            CorruptStoreError: the folder holds no readable store.
            WriteError: the folder cannot be written.
        """
        block_on(self._core, self._core.open)
        return self

    def close(self, deadline: float | None = None) -> None:
        """Wait until every checkpoint ended, then close the store; idempotent. Saves nothing more (see ``save_last``).

        Several threads may call it: each returns when the engine is closed. If the deadline left checkpoints behind,
        that is raised in all of them; the failure of one whose ``result()`` was not called is raised in one.

        Args:
            deadline: Seconds after which to give up. Checkpoints still being written then are left behind, and named.
                With a ``drain`` it also waits until the newest one is in the bucket, within the same time; the log says
                what is left, and the next engine copies it.

        Interrupts: a KeyboardInterrupt aborts the checkpoints in flight, and is raised when the engine is closed.

        Raises:
            CheckpointError: a checkpoint failed and its ``result()`` was not called, or the deadline left some behind.
        """
        with self._training.ending():
            block_on(self._core, self._core.close, deadline)

    def __aenter__(self) -> NoReturn:
        raise TypeError("use 'with SyncCheckpointEngine(...)', or CheckpointEngine in async code")

    def __aexit__(self, *_: object) -> None: ...

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with note_closing_failure_on(error), self._training.ending(go=error is None):
            block_on(self._core, self._training.leave, well=error is None)

    @explained
    def step(self, state: Mapping[str, Any], step: int, *, metadata: Metadata | None = None) -> StepContext:
        """Return the context of one training step, which checkpoints after it when one is due (``interval``).

        Inside a window of gradient accumulation the checkpoint is postponed to the window's end
        (:mod:`pccheck_async.training.accumulation`), by 64 contexts or ten minutes at most. With attached optimizers
        the capture overlaps with the next step; a torn one is warned of, and not raised by a later call. If the body
        raises, nothing is captured.

        Args:
            state: As for :meth:`checkpoint`.
            step: The number of this step.
            metadata: As for :meth:`checkpoint`; the body may add to ``metadata`` of the :class:`TrainingStep` it gets.

        Raises:
            CheckpointError: an earlier checkpoint failed and its ``result()`` was not called; and all errors of
                :meth:`checkpoint`.
            ValueError: as for :meth:`checkpoint`, on entering, whether or not this step would be saved.
        """
        return StepContext(self._training, TrainingStep(state, step, metadata), self.checkpoint)

    @explained
    def checkpoint(
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
        """Capture ``state``; return when it is safe to mutate, while the bytes are still being written.

        ``state_dict()`` of every :class:`pccheck_async.Stateful` and all plain values are read on this thread. The
        state must not change until this returns. Tensors on CUDA devices are captured after the work queued on the
        current streams; join other streams first (``wait_stream``). Signal handlers must not call this, because they
        may have interrupted the engine itself (see :meth:`on_preemption`).

        Gradients are not saved: call it after a step of the optimizer, not inside a window of gradient accumulation,
        whose end :meth:`step` waits for and this does not.

        Args:
            state: Names to Stateful objects (modules, optimizers, ...), tensors, arrays and plain values, nested at
                will.
            step: The user's number; by default the engine's counter.
            metadata: Small facts (at most 512 bytes) that ``list_checkpoints`` shows without reading the checkpoint.
            name: Of the checkpoint, such as "epoch=3": :func:`pccheck_async.load_sync`, :meth:`restore`, :meth:`remove`
                and the command line find it by that. It counts into the 512 bytes of ``metadata``. Names of the
                checkpoints in a store, and of those in flight, differ. In a group all ranks give the same.
            replace: The record that commits it drops the checkpoint that has its ``name``, pinned or not: after a crash
                either the one or the other is there.
            overlap: Return earlier. The tensors that attached optimizers train are captured while training goes on; the
                next step of such an optimizer waits for the capture (on GPUs without blocking the host, if all copies
                are queued there). Everything else is captured before this returns, except large tensors that were the
                same in the last two checkpoints. Code that reaches a tensor being captured through ``.data``, NumPy, a
                storage or DLPack waits by itself. Other code that changes one must call :meth:`wait_captured` first;
                otherwise the checkpoint is torn. That is detected (TornCaptureError), except for writes through
                references to memory that were taken before, compiled code and CUDA graphs (see ``check_captures``).
            tier: "memory": save it in memory alone (``memory=MemoryTier(...)``); one for the disk is in memory, too.
                Wait for that by ``pending.wait_reached("memory")``.

        Returns:
            The checkpoint in flight; its ``result()`` blocks until it is durable.

        Interrupts: a KeyboardInterrupt before the capture ended aborts this checkpoint, and is raised once its
        operations completed.

        Raises:
            UnsupportedStateError: a value cannot be saved, or an optimizer's ``state_dict()`` from before its first
                step stands in place of the optimizer; names the path. Or it was called inside code whose tensors have
                no values: FakeTensorMode, a function of torch.compile or a transform of torch.func.
            ClosedError: the engine is not open, or belongs to a parent process.
            CheckpointError: this checkpoint failed during its capture, or an earlier one failed and its ``result()``
                was not called.
            ValueError: there is a checkpoint of this ``name`` already, or in flight. Or a run begins anew over another:
                the newest checkpoint that the store was opened with has this ``step`` or a larger one, and this engine
                has neither restored nor saved any (``overwrite``); nothing was captured.
            StoreFullError: with ``keep_last="all"``, 64 checkpoints are kept or in flight; nothing was captured.
        """
        pending, start = self._core.start_checkpoint(
            state, step, metadata, name=name, replace=replace, overlap=overlap, tier=check_tier(tier)
        )
        if pending.skipped:
            return pending
        flight = flight_of(pending)
        try:
            flight.wait_eager_captured()
        except Exception as error:
            if not self._core.in_flight.warn_of(flight, error):
                raise
        except BaseException:  # KeyboardInterrupt
            block_on(self._core, self._core.abort, flight)
            raise
        finally:
            self._core.in_flight.note_waited(flight, start, "checkpoint")
        return pending

    @explained
    def restore(
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

        Tensors are filled in place, Stateful objects get ``load_state_dict``, and a plain value is replaced by the one
        that was saved. If the newest checkpoint is damaged, the next older one is restored, with a warning. The next
        commit drops a checkpoint that was found damaged.

        Gradients (``.grad``) of the tensors, modules and optimizers that are restored become None, with a warning if
        there were any: those of a step that was interrupted would be added to the next one's.

        Args:
            state: Shaped like the state that was saved.
            step: Restore this step instead (the newest checkpoint of it); damage then raises.
            name: Restore the checkpoint with this name instead.
            strict: False restores the leaves that both have. Leaves of the state alone stay as they are, those of the
                checkpoint alone are not read; the result names both (``missing``, ``unexpected``). Modules load their
                own state with the stored part in place; other objects get their saved state. These still raise: another
                shape, dtype or type; an optimizer of other parameters (leave such an object out of ``state``); a module
                or an optimizer of which the checkpoint has nothing, and an entry of ``state`` that both have with
                nothing in common below; a model that only one of them has in a wrapper.
            dtype: A floating-point dtype: live tensors of this dtype also take stored ones of another floating-point
                dtype, cast by ``copy_``, and so do the tensors that an optimizer keeps for such parameters. (Not if a
                tensor lies on several ranks in another way than it was saved.) None: another dtype raises.
            private: Of a group whose checkpoint is of another number of ranks: how to restore plain tensors that
                differed by rank under one name. By default they are refused. "modulo": rank r restores those of rank r
                modulo the old number. Globs over paths: "modulo" for these alone.
            progress: Called on the engine's thread with the bytes done and all bytes, after each chunk (from 0 again if
                a damaged checkpoint is passed over). It must be quick.
            dry_run: Compare only: nothing is changed and no array is read, and the result has a restore's ``actions``
                and the ``error`` that it would raise. In a group all ranks call it, and each gets its own.

        Returns:
            The restored checkpoint; None if the store is empty.

        Interrupts: a KeyboardInterrupt is raised once every read ended; ``state`` may then hold a mixture.

        Raises:
            StateMismatchError: leaves differ, or it is of another number of ranks, which had different tensors under
                one name (see ``private``); nothing was changed (a note names a damaged one tried before). Modules with
                hooks before ``load_state_dict``, or a ``_load_from_state_dict`` of their own, decide themselves which
                leaves fit below them: their errors come after other things were changed.
            UnsupportedStateError: ``state`` is no mapping from names, or has the ``state_dict()`` of an object in the
                object's place, so that the object would get nothing; names the path. Or as for :meth:`checkpoint`.
            DamagedError: no checkpoint is whole; ``state`` may hold a mixture.
            CorruptStoreError: this version, or this torch, does not understand it; nothing is dropped.
            Exception: the error of a ``load_state_dict``, with a note that names the object.
            NoCheckpointError: there is none of ``step``, or with this ``name``.
            StoreError: all, or all of this step or name, are rejected (:meth:`reject`).
            ReadError: the device failed, and there is nothing older to fall back to.
            CheckpointError: an earlier checkpoint failed and its ``result()`` was not called; nothing was read.
        """
        which = which_one(step, name)
        return block_on(
            self._core, self._core.restore, state, which, progress,
            strict=strict, dtype=dtype, private=private, dry_run=dry_run,
        )  # fmt: skip

    @formerly("step", after=1)
    def pin(self, *, step: int | None = None, name: str | None = None) -> CheckpointInfo:
        """Keep a checkpoint until :meth:`unpin`, even if ``keep_last`` or a rule would drop it.

        One that is in flight is waited for first. In a group all ranks call this alike.

        Args:
            step: The newest checkpoint of this step, or give
            name: a name.

        Durability: when this returns the pin survives power loss; engines that open the store later respect it.

        Interrupts: a KeyboardInterrupt is raised once the record is written.

        Raises:
            NoCheckpointError: there is none of this step, or with this name.
            StoreFullError: too many are pinned; a commit record names 64.
            StoreFailedError: a flush or a record failed, now or before: nothing more is committed.
            TypeError: neither ``step`` nor ``name`` is given.
            ValueError: both are given.
        """
        return block_on(self._core, self._core.pin, the_one(step, name), True)

    @formerly("step", after=1)
    def unpin(self, *, step: int | None = None, name: str | None = None) -> CheckpointInfo:
        """End :meth:`pin`, of all checkpoints of a step: the next commit drops those that no rule keeps.

        Args:
            step: A step, or give
            name: a name.

        Returns:
            The newest of them.

        Durability: when this returns the change survives power loss.

        Interrupts: a KeyboardInterrupt is raised once the record is written.

        Raises:
            NoCheckpointError: there is none of this step, or with this name.
            StoreFailedError: a flush or a record failed, now or before: nothing more is committed.
            TypeError: neither ``step`` nor ``name`` is given.
            ValueError: both are given.
        """
        return block_on(self._core, self._core.pin, the_one(step, name), False)

    @explained
    def remove(self, *, step: int | None = None, name: str | None = None, force: bool = False) -> list[CheckpointInfo]:
        """Remove the checkpoint called ``name``, or every one of ``step``, pinned or not, in one commit.

        Those of them that are in flight are waited for first. If none would be left, all that are in flight are waited
        for: save the next one, then remove the last one. In a group all ranks call this alike.

        Args:
            step: A step, or give
            name: a name.
            force: Remove them even if no checkpoint is left then.

        Returns:
            The removed checkpoints, newest first.

        Durability: when this returns they are gone also after a power failure. A crash before that leaves all of them,
        or none. (In a group, one that a crash left on some ranks alone is not complete any more, and not restored.)

        Interrupts: a KeyboardInterrupt is raised once the record is written.

        Raises:
            NoCheckpointError: there is none of this step, or with this name.
            StoreError: no checkpoint would be left that is not rejected; nothing was removed.
            StoreFailedError: a flush or a record failed, now or before: nothing more is committed.
            TypeError: neither ``step`` nor ``name`` is given.
            ValueError: both are given.
        """
        return block_on(self._core, self._core.remove, the_one(step, name), force=force)

    @formerly("step", after=1)
    def reject(self, *, step: int | None = None, name: str | None = None) -> list[CheckpointInfo]:
        """Reject a checkpoint and every newer one, as after a run diverged: :meth:`restore` passes them over.

        Rejected are all checkpoints of the step (that of the one called ``name``) and of larger steps, and those that
        were saved after the newest one of ``step``, or after the one called ``name``. Those of them in flight are
        dropped (``superseded``). Rejected ones count for no rule (``keep_last`` and its like): the next commit drops
        those that are not pinned. This cannot be taken back; :func:`pccheck_async.load_sync` with ``step=`` still reads
        one that is there. Checkpoints saved after this call are not rejected: call :meth:`restore` first. The step of
        :meth:`step` that this is called in, and the last one before, are not saved. In a group all ranks call this
        alike.

        Args:
            step: The first bad step, or give
            name: the name of the first bad checkpoint.

        Returns:
            The committed ones that were rejected, newest first.

        Durability: when this returns they are passed over also after a power failure, on all ranks.

        Interrupts: a KeyboardInterrupt is raised once the record is written.

        Raises:
            NoCheckpointError: there is none from ``step`` on, or with this name, that is not rejected.
            StoreError: no committed checkpoint would be left to restore; nothing was rejected.
            StoreFailedError: a flush or a record failed, now or before: nothing more is committed.
            TypeError: neither ``step`` nor ``name`` is given.
            ValueError: both are given.
        """
        return block_on(self._core, self._core.reject, the_one(step, name))

    def drain(self) -> None:
        """Block until every checkpoint admitted so far ended.

        Raises:
            CheckpointError: one failed and its ``result()`` was not called.
        """
        block_on(self._core, self._core.drain)

    def tune(
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
        engine's ``keep_last`` counts, and its ``host_memory`` is the budget. Sample checkpoints are saved into a folder
        inside the store's, about as many as the disk takes in ``budget_seconds``; the store's checkpoints are not
        touched. Do not train meanwhile: other work of the machine is measured, too.

        Args:
            state: The state to be saved; only its size matters.
            nbytes: That size in bytes. Without either it is that of the newest checkpoint.
            step_seconds: Time of a training step; then the result has an interval for checkpoints.
            budget_seconds: About how long to measure; a slow device needs more.
            progress: Called from another thread with the part done (0 to 1) and a text on the current measurement.

        Returns:
            ``SyncCheckpointEngine(path, **tuning.settings)`` takes the settings; ``tuning.write(path)`` keeps them.

        Interrupts: a KeyboardInterrupt is raised once every operation ended and the sample's folder is gone.

        Raises:
            InfeasibleError: nothing fits; names the missing resource.
            NoCheckpointError: neither ``state`` nor ``nbytes`` nor a checkpoint gives the size.
            StoreLockedError: another tuning runs in this folder.
            ValueError: ``io`` is a single medium, or an argument is out of range.
            WriteError: the storage failed.
        """
        measure = self._tuning(state, nbytes, step_seconds, budget_seconds, progress)
        self._core.loop.call(self._core.wait_ended())
        with EngineLoop("pccheck-tune") as loop:
            return loop.call(measure())
