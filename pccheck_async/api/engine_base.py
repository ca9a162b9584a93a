# SPDX-License-Identifier: Apache-2.0
"""The shared base class of the async and the blocking engine: settings, and methods that are the same in both."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping
from datetime import timedelta
from functools import partial
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Never, Unpack

import torch
from torch.distributed import ProcessGroup

from pccheck_async.api.old_keywords import OldKeywords, refuse_unknown, renamed
from pccheck_async.engine import (
    Drain,
    EngineConfig,
    EngineCore,
    EngineStatistics,
    MemoryTier,
    Policy,
    StorageOptions,
    check_flag,
    openmetrics,
    scalars,
)
from pccheck_async.format import CheckpointInfo, explained
from pccheck_async.group import Group, Ranks
from pccheck_async.medium.filesystem import free_bytes, slot_bytes
from pccheck_async.store import Keep, SpaceNeeded
from pccheck_async.telemetry import Hook
from pccheck_async.training import TrainingRun
from pccheck_async.training.policy import make_policy
from pccheck_async.tuning import Progress, Tuning, checkpoint_bytes, tune

__all__ = ["EngineBase"]

_VERBS: Final = {
    **dict.fromkeys(("save", "save_checkpoint", "save_state", "snapshot"), "checkpoint(state, step=...)"),
    **dict.fromkeys(("load", "load_checkpoint", "load_state", "load_state_dict", "resume"), "restore(state)"),
    **dict.fromkeys(("wait", "flush", "join", "synchronize"), "drain()"),
    **dict.fromkeys(("shutdown", "stop", "finish", "end"), "close()"),
    **dict.fromkeys(("delete", "drop"), "remove(step=...)"),
    **dict.fromkeys(("latest_step", "last", "newest"), "latest.step"),
    **dict.fromkeys(("list", "steps", "all_steps", "list_checkpoints"), "checkpoints()"),
}
"""Calls to write instead, by the names of methods of other libraries: shown in the error for such a name."""


class EngineBase:
    """The base class of :class:`pccheck_async.CheckpointEngine` and :class:`pccheck_async.SyncCheckpointEngine`."""

    @explained
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_in_flight: int = 2,
        keep_last: int | Literal["all"] = 1,
        keep: Keep = Keep(),
        save_last: bool = True,
        interval: int | timedelta | Policy | None = None,
        max_stall: float | None = None,
        on_busy: Literal["wait", "skip"] = "wait",
        on_error: Literal["raise", "warn"] = "raise",
        allow_pickle: bool = False,
        overwrite: bool = False,
        group: ProcessGroup | Group | None = None,
        storage: StorageOptions = StorageOptions(),
        memory: MemoryTier | None = None,
        drain: Drain | None = None,
        **old: Unpack[OldKeywords],
    ) -> None:
        """Make an engine; opening it creates or locks the store.

        Args:
            path: Folder of the store; created if it does not exist.
            max_in_flight: Most checkpoints that are copied and written at a time (PCcheck's N); see ``on_busy``.
            keep_last: How many of the newest committed checkpoints are kept. "all": nothing is dropped, until
                :meth:`remove` drops it; a commit record names 64 checkpoints, so that :meth:`checkpoint` raises
                StoreFullError, before it captures anything, if these exist or are in flight.
            keep: Further rules (:class:`pccheck_async.Keep`): ``Keep(every=1000, best=("loss", 3, "min"))``.
            save_last: Leaving the context without an error saves the last step that :meth:`step` finished, unless a
                checkpoint that was taken since that step began (also by hand, of that step or a later one) holds it.
                After a signal of :meth:`on_preemption` this also happens with an error. The state is captured as it is
                at that moment, as one consistent snapshot; random numbers drawn since then are part of it. The step is
                not saved, and the log says why, if the state may no longer be that step's: an optimizer in the state
                made another step, parameters changed or moved as far as torch counts it (best weights loaded,
                ``half()``), code reached them through ``.data`` or ``set_()`` (other weights for an evaluation; seen
                only with an optimizer attached, or if they are in other memory then), :meth:`restore` was called, or
                the step left a window of gradient accumulation open. A step that raised, :meth:`close` and the end of
                the interpreter save nothing.
            interval: When ``engine.step`` checkpoints: every so many steps (int), every so often (timedelta), or by a
                policy of :mod:`pccheck_async.training.policy`. None: as often as costs at most 3 % of training
                time.
            max_stall: Most seconds that a step of an attached optimizer waits on the host for a capture; after that the
                checkpoint is abandoned. The time that GPUs wait for copies queued on them does not count.
            allow_pickle: Save values of types that need pickle (a loss scaler without ``state_dict``, a namespace, an
                enum, a function) as ``torch.save`` pickles them, each as a whole, and :meth:`restore` them. Unpickling
                runs code: give this only if you trust the writer of the store. A warning is logged at the first such
                save and at each such restore. Without it such values raise UnsupportedStateError, when they are saved
                and when they are restored. Sparse and quantized tensors, and keys of such types, raise all the same.
            overwrite: Save any step without a :meth:`restore` first: a run begins anew over another, or its state is
                newer than those of the store. By default such a step has to be larger than the newest that the store
                holds. With a ``drain``: checkpoints in the bucket that are of another run than the disk's are replaced.
            on_busy: With ``max_in_flight`` checkpoints in flight, "wait" for one to end, or "skip" the new one.
            on_error: "raise" the failure of a checkpoint that was not awaited at the next call, or "warn" of it.
            group: The ranks that save together: a ``torch.distributed.ProcessGroup`` or a :class:`pccheck_async.Group`.
                Every rank opens an engine on the same ``path``, which is then a group's folder, and calls all methods
                alike. A checkpoint is complete on all ranks, or it is not there. Errors of one rank are
                :class:`GroupError` on the others. None: one process. DTensors are saved as they lie on the ranks, boxes
                of several ranks only once on each filesystem, and restored into any other layout and number of ranks.
                With :meth:`pccheck_async.Group.of`, name plain tensors that are the same on all ranks.
            storage: How bytes get to the storage (:class:`pccheck_async.StorageOptions`).
            memory: Keep the newest checkpoints in memory, too (:class:`pccheck_async.MemoryTier`); all ranks or none.
            drain: Copy checkpoints to object storage, too (:class:`pccheck_async.Drain`), and restore from there if the
                folder is empty; all ranks or none.

        Raises:
            ValueError: a setting is out of range.
        """
        if old:
            callee = type(self).__name__
            refuse_unknown(callee, old, _keywords())
            given = renamed(callee, {"keep": keep, "group": group, "storage": storage, **old})
            keep, group, storage = given["keep"], given["group"], given["storage"]
        config = EngineConfig(
            max_in_flight=max_in_flight,
            keep_last=keep_last,
            keep=keep,
            max_stall=max_stall,
            allow_pickle=allow_pickle,
            overwrite=overwrite,
            on_busy=on_busy,
            on_error=on_error,
            storage=storage,
            memory=memory,
            drain=drain,
        )
        policy = make_policy(interval, max_in_flight)
        in_memory = None if memory is None else make_policy(memory.interval, max_in_flight=1)  # one at a time
        check_flag("save_last", save_last)
        self._core = EngineCore(path, config, None if group is None else Ranks(Group.of(group)))
        self._core.facade = weakref.ref(self)
        self._training = TrainingRun(self._core, policy, in_memory, save_last=save_last)

    def __repr__(self) -> str:
        core: EngineCore | None = vars(self).get("_core")  # none yet, in the traceback of wrong settings
        return f"<{type(self).__name__}{'' if core is None else f' {core.summary()}'}>"

    if not TYPE_CHECKING:  # where it would hide misspelt names

        def __getattr__(self, name: str) -> Never:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _VERBS:
                text += f": write engine.{_VERBS[name]}"
            raise AttributeError(text, name=name, obj=self)

    def __reduce_ex__(self, protocol: object) -> Never:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: there is one for a store; keep it out of what goes "
            "to other processes or is deep-copied"
        )

    def attach(self, *optimizers: torch.optim.Optimizer) -> None:
        """Make every step of ``optimizers`` wait until captures of the tensors that it changes ended.

        From then on ``engine.step`` captures their parameters, and the tensors that they keep for each parameter, while
        the next forward and backward run (CheckFreq, section 4.1). Code that changes them outside the optimizer's step
        (``param.copy_()``, ``load_state_dict``) must call :meth:`wait_captured` first. Code that reaches their memory
        through ``param.data``, ``.numpy()``, storages or DLPack waits by itself: these attributes of ``torch.Tensor``
        are shadowed until the engine is closed. Attaching one optimizer also attaches every other optimizer found in
        the state of ``engine.step`` (in its values, and in dicts, lists and tuples among these). For a trainer's
        wrapper (Accelerate, Lightning, Fabric) the wrapped optimizer is attached.

        Raises:
            TypeError: none is given, or one has no hooks around its step.
        """
        if not optimizers:
            raise TypeError("attach takes the optimizers that train: engine.attach(optimizer); none was given")
        self._training.attach(*optimizers)

    def on_preemption(self, *signals: int, deadline: float = 25.0) -> None:
        """Install signal handlers: on a signal, save once more and exit the process within ``deadline`` seconds.

        After such a signal the next context of :meth:`step` that ends well, outside a window of gradient accumulation,
        takes a checkpoint, regardless of the policy and ``on_busy``, and waits until it is durable. Then the signal
        handlers from before are put back and the process exits: a Python handler from before is called
        (``KeyboardInterrupt`` for a SIGINT; after one that returns, the process goes on), otherwise
        ``SystemExit(128 + signum)`` is raised, so that ``finally`` blocks run. If no step ends in time, or if the
        signal comes again after more than a second, the process exits at once in the same way, from any code, and
        nothing newer is saved. Code that does not use :meth:`step` looks at :attr:`preempted`. If several engines of
        the process watch the signal, all those that run steps save.

        Closing the engine waits until the deadline at most, ends a preempted process, and puts handlers back. Forked
        children get the previous handlers back. Signals without a previous handler, except SIGTERM and SIGINT, are
        ignored in them, because the death of a data loader's worker is an error in the trainer.

        Args:
            signals: By default ``signal.SIGTERM``.
            deadline: Seconds from the signal to the exit; fewer than until the SIGKILL (30 s on Kubernetes and SLURM).

        Raises:
            RuntimeError: this is not the main thread.
            ValueError: a signal that cannot be handled, or a deadline that is not positive.
        """
        self._core.check_alive()
        self._training.preemption.watch(signals, deadline)

    @property
    def preempted(self) -> bool:
        """Whether one of the signals of :meth:`on_preemption` came: then checkpoint, and leave the engine's context."""
        return self._training.preemption.asked

    def space_needed(self, state: Mapping[str, Any] | None = None, *, nbytes: int | None = None) -> SpaceNeeded:
        """Return the bytes of storage that ``max_in_flight`` and each rule of retention take.

        Args:
            state: The state to be saved; only the size of its tensors matters.
            nbytes: Size of the state in bytes. Without this and ``state``: the size of the newest checkpoint.

        Raises:
            NoCheckpointError: neither ``state`` nor ``nbytes`` nor a checkpoint gives the size.
        """
        self._core.check_alive()
        nbytes, folder = checkpoint_bytes(self._core, state, nbytes), Path(self.path)
        config, available = self._core.config, free_bytes(folder) + slot_bytes(folder)
        return config.retention.space_needed(nbytes, config.max_in_flight, available)

    def on_event(self, hook: Hook) -> Callable[[], None]:
        """Call ``hook`` with every event of :mod:`pccheck_async.telemetry.events` from now on.

        May be called before the engine is opened. All hooks are called on one thread of their own, one event after the
        other, in order; they may use the engine. The
        first error of a hook is logged. While a hook is slow, up to 1024 events wait for it; further ones are dropped
        and counted (``statistics().events_dropped``). Closing the engine waits a second at most for waiting events.

        Returns:
            A function that removes the hook.
        """
        self._core.check_process()
        return self._core.stream.hooks.add(hook)

    def wait_captured(self) -> None:
        """Block this thread until no capture reads the live state any more; then any code may change the state."""
        self._core.wait_captured()

    @property
    def latest(self) -> CheckpointInfo | None:
        """The newest durable checkpoint that is not rejected; None without one. :meth:`restore` takes it if whole."""
        return self._core.latest

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return the durable checkpoints and those in memory alone (``CheckpointInfo.tiers``), newest first."""
        return self._core.infos

    def statistics(self) -> EngineStatistics:
        """Return counts, times and decisions so far.

        Raises:
            ClosedError: the engine was never opened, or this is a forked child.
        """
        return self._core.statistics()

    def metrics(self) -> str:
        """Return the statistics in the text format of OpenMetrics (see :mod:`pccheck_async.engine.metrics`)."""
        return openmetrics({self.path: self.statistics()})

    def scalars(self) -> dict[str, float]:
        """Return the statistics as numbers by name (see :func:`pccheck_async.engine.metrics.scalars`)."""
        return scalars(self.statistics())

    def _tuning(
        self,
        state: Mapping[str, Any] | None,
        nbytes: int | None,
        step_seconds: float | None,
        budget_seconds: float,
        progress: Progress | None,
    ) -> Callable[[], Coroutine[Any, Any, Tuning]]:
        """Return a coroutine function that tunes for an engine like this one; call it after all checkpoints ended."""
        self._core.check_alive()
        return partial(
            tune,
            self._core.path,
            nbytes=checkpoint_bytes(self._core, state, nbytes),
            config=self._core.config,
            step_seconds=step_seconds,
            budget_seconds=budget_seconds,
            progress=progress,
        )

    @property
    def path(self) -> str:
        """Folder of the store."""
        return self._core.path


def _keywords() -> list[str]:
    return [*signature(EngineBase).parameters]


def engine_settings(callee: str, settings: Mapping[str, Any], own: Iterable[str] = ()) -> dict[str, Any]:
    """Return keyword arguments for an engine, those of version 0.1 in their new spelling (see :func:`.renamed`).

    Args:
        callee: Name of the class that the user called, which passes the arguments on to an engine.
        settings: Keyword arguments.
        own: Names of further arguments of the callee, to suggest where a name is unknown.

    Raises:
        TypeError: an engine has no such argument, or one is given in both spellings.
        ValueError: a value is out of range.
    """
    refuse_unknown(callee, settings, [*_keywords(), *own])
    return renamed(callee, settings)


def _signature_of_new_keywords() -> Signature:
    """Return the engines' signature without the keywords of version 0.1, for ``help()`` and editors."""
    whole = signature(EngineBase.__init__)
    return whole.replace(parameters=[each for name, each in whole.parameters.items() if name != "old"])


EngineBase.__init__.__signature__ = _signature_of_new_keywords()  # type: ignore[attr-defined]
