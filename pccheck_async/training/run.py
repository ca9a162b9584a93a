# SPDX-License-Identifier: Apache-2.0
"""One training run with an engine: policy, step contexts, accumulation windows, preemption, and the last save."""

from __future__ import annotations

import asyncio
import math
import os
import re
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, final

import torch
from torch.optim.lr_scheduler import LRScheduler

from pccheck_async.engine import (
    Caller,
    Decision,
    EngineCore,
    PendingCheckpoint,
    Policy,
    StepReport,
    TrainingHooks,
    block_on,
    flight_of,
    note_closing_failure_on,
    run,
    unwrapped,
)
from pccheck_async.errors import CheckpointError, ReplicasDifferError, UnsupportedStateError
from pccheck_async.format import WINDOW_KEY, Metadata, Tier, check_metadata, new_step
from pccheck_async.state import RNGState, check_outermost, containers_and_objects, is_stateful, state_dicts
from pccheck_async.state.tensor_access import accessed_since, begin_period
from pccheck_async.state.values import with_article
from pccheck_async.telemetry import Span, write
from pccheck_async.training.accumulation import Accumulation, Mark, parameters_of
from pccheck_async.training.data import ResumableLoader, ResumableSampler, iterated
from pccheck_async.training.passes import PassesUnderway
from pccheck_async.training.preemption import Preemption

__all__ = ["AsyncStepContext", "StepContext", "TrainingRun", "TrainingStep"]

MOST_POSTPONED, MOST_POSTPONED_SECONDS = 64, 600.0
"""Most step contexts, and seconds, that a checkpoint waits for the end of a window of gradient accumulation."""

_WITHOUT_PARAMETERS = (
    torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler, RNGState, ResumableLoader, ResumableSampler,
)  # fmt: skip
_HOLD_NOTHING = (torch.nn.Module, *_WITHOUT_PARAMETERS)
"""Classes of objects whose state contains no other object unseen, as that of a user's class may."""
_OF_POSITIONS = re.compile(r"^[^.]*(loader|sampler|position|offset|batch(?!_size))|^data$", re.IGNORECASE)
"""Matches keys of a state under which a position in the data may be; keys with a dot are names of parameters."""
_EVERY_STEP = 16
"""Steps in a row that are saved because they set the metric of ``Keep(best=...)``: longer runs of them are not."""


_DROPOUTS = (
    torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d, torch.nn.AlphaDropout,
    torch.nn.FeatureAlphaDropout,
)  # fmt: skip
"""Modules of torch that draw random numbers while they train."""
_ANOTHER = "the state holds another one: if this one was made anew, make the state anew, too; if not, "
_trained: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that have a state and were attached to an engine that was closed."""


class TrainingStep:
    """The result of ``with engine.step(...) as this_step``.

    Attributes:
        step: The caller's number of the step.
        metadata: A few plain values for ``list_checkpoints``, if this step is saved; may be added to inside the step
            context. A step that sets the metric of ``Keep(best=...)`` is saved (not in a group).
        pending: The checkpoint that was taken when the step context ended, or None.
        whole: Whether the context ended outside of windows of gradient accumulation.
        inside_window: Whether the step is saved although it is not whole, because the checkpoint waited too long.
        why_not_whole: Why the context may have ended inside a window; empty if it did not.
    """

    pending: PendingCheckpoint | None = None
    whole = False
    inside_window = False
    why_not_whole = ""
    began = stall_then = 0.0
    in_flight: Mapping[Tier, int]
    window = rejections = 0
    counter = -1
    mark: Mark | None = None
    wanted = False
    inside: int | None = None

    def __init__(self, state: Mapping[str, Any], step: int, metadata: Metadata | None) -> None:
        # now, not when a step is saved
        check_outermost(state, "write step(state, step)" if isinstance(step, dict) else "")
        self.state = state
        self.step = new_step(step)
        self.metadata = check_metadata(metadata) if metadata else {}

    def __repr__(self) -> str:
        text = f"<TrainingStep {vars(self).get('step', 'of no state')}"
        if (pending := vars(self).get("pending")) is not None:
            text += f", checkpoint {pending.counter}{' inside a window' if self.inside_window else ''}"
        elif vars(self).get("wanted"):
            text += ", to be saved"
        return f"{text}>"

    def save(self) -> None:
        """Request a checkpoint of this step, even if the policy does not; call it inside the context.

        The checkpoint is taken when the context ends or, inside a window of gradient accumulation, at the window's end.
        In a group all ranks must call it in the same step.
        """
        self.wanted = True

    @property
    def stored_metadata(self) -> Metadata:
        """The user's metadata, marked if the checkpoint is inside a window (the mark alone if both are too large)."""
        if not self.inside_window:
            return self.metadata
        marked = {**self.metadata, WINDOW_KEY: True}
        try:
            return check_metadata(marked)
        except UnsupportedStateError:  # too large for both: a restore needs the mark
            return {WINDOW_KEY: True}


@final
class TrainingRun(TrainingHooks):
    """Measures the training steps of one engine, lets its policy decide when to checkpoint, and saves the last step.

    A policy may choose a step inside a window of gradient accumulation, or one that a gradient scaler left out.
    Then the checkpoint is postponed to the end of the window (see :mod:`pccheck_async.training.accumulation`), and
    ``policy.skipped`` is called, so that the policy measures from the step that is saved. The recognition of a window's
    end is a guess, so after 64 contexts or ten minutes (the contexts alone in a group) the checkpoint is taken all the
    same, without overlap, and marked in its metadata.

    With ``save_last``, leaving the engine's context saves the last finished step. If its window is still open, that is
    done, with the mark, only if no checkpoint has the weights: otherwise a resumed run computes the same bits from that
    checkpoint.
    """

    def __init__(self, core: EngineCore, policy: Policy, in_memory: Policy | None, *, save_last: bool) -> None:
        self.core = core
        self.preemption = Preemption(core)
        self._policy = policy
        self._in_memory = in_memory  # the policy of the tier in memory, if there is that
        self._save_last = save_last
        self._accumulation = Accumulation(core.guard, core.path, self._look_at_stranger)
        self._last_finished: TrainingStep | None = None  # None too where the state is that of no finished step
        self._last_ended = 0  # the period that began when it ended
        self._last_whole: tuple[int, int] | None = None  # counter and step, since the start or a restore
        self._reported_stall: dict[Tier, float] = {"disk": 0.0} if in_memory is None else {"disk": 0.0, "memory": 0.0}
        self._due = False
        self._due_in_memory = False
        self._postponed, self._postponed_since = 0, 0.0  # contexts in a row that ended in a window while it was due
        self._told_postponed = False  # since a window last ended
        self._said: dict[Tier, tuple[int | None, str]] = {}
        self._state_seen = self._looked_for_absent = False
        self._passes: PassesUnderway | None = None  # from the end of the first step to that of the second
        self._rejections = 0
        collective, best = core.peers.collective, core.config.retention.best
        # In a group all ranks save after the same steps: which of them set a metric is not known, and clocks differ.
        self._metric = None if best is None or collective else best.metric
        self.most_postponed_seconds = math.inf if collective else MOST_POSTPONED_SECONDS
        self._with_metric = 0  # steps in a row that set it
        self._inside: dict[int, TrainingStep] = {}  # the open one of each thread, or task of an async engine
        core.training = self

    # -- hooks that the engine calls

    def opened(self) -> None:
        self.decision = self._policy.decision()
        self.decision_in_memory = None if self._in_memory is None else self._in_memory.decision()
        self._opened = time.monotonic()

    @property
    def patience(self) -> float | None:
        return self.preemption.patience

    @property
    def stopping(self) -> bool:
        """Whether this step is the last one: a signal requested the end of this process, or of one of another rank."""
        return self.core.peers.stopping(preempted=self.preemption.pending)

    def before_checkpoint(self, state: Mapping[str, Any]) -> bool:
        if not self._looked_for_absent:
            self._warn_of_absent(state)
        if self.preemption.limited:
            self.preemption.go_on()
        return self.stopping

    def before_restore(self) -> None:
        self._last_whole = None
        if self._last_finished is not None:
            self._last_finished.mark = None  # a restore may change the state, and that bumps no versions

    def found_nothing(self, state: Mapping[str, Any]) -> None:
        trained = [
            name for name, value in state.items() if isinstance(value, torch.optim.Optimizer) and value in _trained
        ]
        if trained:
            text = (
                "there is no checkpoint to restore, and an engine of this process has trained with %r: training goes "
                "on with what it and the parameters hold; to begin anew, make the objects again, too"
            )
            write("trained_before", text, trained[0], store=self.core.path)

    def rejected(self) -> None:
        self._last_finished = None
        self._rejections += 1

    def closed(self) -> None:
        _trained.update(each for each in self.core.guard.optimizers if each.state)
        self._last_finished = None
        self._accumulation.close()

    def ending(self, *, go: bool = True) -> AbstractContextManager[None]:
        self.core.peers.end_steps()
        return self.preemption.ending(go=go)

    # -- steps

    def attach(self, *optimizers: torch.optim.Optimizer) -> None:
        """Make steps of ``optimizers`` wait for captures that they would tear, and watch them for ends of windows."""
        self.core.check_alive()
        for optimizer in map(unwrapped, optimizers):
            self.core.guard.attach(optimizer)
            self._accumulation.watch(optimizer)

    def begin(self, this: TrainingStep, here: int) -> TrainingStep:
        """Called when a thread or task of id ``here`` enters a step's context; RuntimeError inside another step's."""
        core = self.core
        core.check_alive()
        if (outer := self._inside.get(here)) is not None:
            raise RuntimeError(
                f"engine.step of step {this.step} inside that of step {outer.step}: it would save a step that has not "
                "ended; leave the outer context first"
            )
        core.check_restored(this.step, begun=True)  # now, and not when the first save is due
        self.preemption.in_use = True
        self.preemption.go_on()
        if not self.preemption.pending:
            core.in_flight.raise_untold()
        self._last_finished = None
        this.counter = core.in_flight.counter
        this.rejections = self._rejections
        this.window = self._accumulation.begin(this.state)
        this.stall_then = core.stream.totals.stall_seconds
        this.in_flight = {tier: core.in_flight.count(tier) for tier in self._reported_stall}
        this.began = time.monotonic()
        this.inside = here
        self._inside[here] = this
        core.peers.begin_step(this.step)
        return this

    def leave_step(self, this: TrainingStep) -> None:
        """Called when the context of a step is left, or collected without being left. Idempotent."""
        if this.inside is not None:
            del self._inside[this.inside]
            this.inside = None

    def end(self, this: TrainingStep, *, failed: bool) -> Tier | None:
        """Called when a training step ends; returns the tier to save it in now; None if no checkpoint is due.

        A checkpoint on disk is also saved in memory, if there is that tier.

        Raises UnsupportedStateError at the end of the first step if its state cannot be saved.
        """
        self.leave_step(this)
        if failed:
            self._last_finished = None  # of steps side by side, too: this one may have changed their state
            return None
        if this.metadata:
            check_metadata(this.metadata)  # now, and not in an hour, when a step is saved
        core = self.core
        core.metric.note(this.metadata)
        core.check_alive()
        if core.stream.trace is not None:
            seconds = time.monotonic() - this.began  # before the other clock: else steps would begin before others end
            end = time.perf_counter()
            start = end - seconds
            core.stream.trace(Span(name="step", start=start, end=end, step=this.step))
        due: Tier | None = "disk" if self._is_due(this) and not self.stopping else None
        if self._is_due_in_memory(this, due):
            due = "memory"
        first, self._state_seen = not self._state_seen, True
        if first:
            self._warn_of_state_dicts(this)
            self._warn_of_absent(this.state)
            self._passes = None if _may_hold_position(this.state) else PassesUnderway()
        elif self._passes is not None:
            self._warn_of_pass(self._passes)
        if first and not due:
            core.captures.check(this.state)  # a state that cannot be saved fails now, not in an hour
        return due

    def note(self, this: TrainingStep, pending: PendingCheckpoint) -> None:
        """Record the checkpoint that was taken after a step; tell the policy if it was skipped."""
        this.pending = pending
        if not pending.skipped:
            flight_of(pending).overlap_was_chosen = True
        elif self.last_report is not None:
            self._policy.skipped(self.last_report)

    async def save_and_go(self, caller: Caller, this: TrainingStep) -> None:
        """Save this step unless it was saved, wait for that until the deadline, and end the preempted process."""
        core, preemption, start = self.core, self.preemption, time.perf_counter()
        try:
            if this.rejections != self._rejections:
                raise CheckpointError("checkpoints were rejected in it")
            if this.pending is None or this.pending.skipped or not flight_of(this.pending).on_disk:
                this.pending, _ = core.start_checkpoint(this.state, this.step, this.stored_metadata)
            await caller.run(core.wait_ended(last=True))
            if isinstance(flight_of(this.pending).error, ReplicasDifferError):  # only a checkpoint finds out
                this.pending, _ = core.start_checkpoint(this.state, this.step, this.stored_metadata)
                await caller.run(core.wait_ended(last=True))
            core.in_flight.note_waited(flight_of(this.pending), start, "checkpoint")
            info = this.pending.result(0)
        except TimeoutError:
            text = "gave up: step %d was still being written; nothing newer than %s"
            preemption.say(text, this.step, preemption.newest)
        except Exception as error:  # noqa: BLE001 - the process goes all the same
            preemption.say("gave up: step %d: %s; nothing newer than %s", this.step, error, preemption.newest)
        else:
            preemption.say("saved step %d in %.3f s", info.step, time.perf_counter() - start)
        preemption.finish()

    async def let_cancel(self) -> None:
        """Yield to the loop, so that a cancellation by asyncio's SIGINT handler arrives now, not some steps later."""
        if self.preemption.asked:
            await asyncio.sleep(0)

    def _is_due(self, this: TrainingStep) -> bool:
        """Report a step to the policy; return whether to checkpoint after it on disk. Called once after every step."""
        core = self.core
        before, report = self.last_report, self._report(this, self._policy, "disk")
        self.step_seconds = None if before is None else report.now - before.now
        self.last_report = report
        wanted = (self._metric is not None and self._sets_metric(this, self._metric)) or this.wanted
        save, last = core.peers.due(self._policy, report, preempted=self.preemption.pending)
        # One that was torn is made again at once, and not an interval later; in a group that is known at other times.
        again = core.in_flight.torn > 0 and not (core.in_flight.on_disk or core.peers.collective)
        self._due = save or self._due or wanted or again
        if last:
            self.preemption.follow()
        self.decision = self._say("disk", self._policy)
        this.why_not_whole = self._accumulation.end(this.step, this.window)
        this.whole = not this.why_not_whole
        if this.rejections != self._rejections:  # its state may be rejected, or have been restored since
            return False
        if self._save_last:
            this.mark = self._accumulation.mark()
            self._last_finished, self._last_ended = this, begin_period()
            self._last_whole = (this.counter, this.step) if this.whole else self._last_whole
        if this.whole:
            self._told_postponed = False
        elif self._due or self.stopping:
            this.inside_window = self._waited_too_long(this, report.now)
        saves = this.whole or this.inside_window
        if saves:
            self._postponed = 0
        elif self._due:
            self._policy.skipped(report)
        saves, self._due = self._due and saves, self._due and not saves
        return saves

    def _is_due_in_memory(self, this: TrainingStep, due: Tier | None) -> bool:
        """Report a step to the policy of the tier in memory; return whether to save it there alone.

        Called once after every step. ``due`` is "disk" if :meth:`_is_due` chose the step before, and else None.
        """
        policy, core = self._in_memory, self.core
        if policy is None or not core.saves_in_memory:
            return False
        report = self._report(this, policy, "memory")
        self._due_in_memory = core.peers.due_in_memory(policy, report) or self._due_in_memory
        self.decision_in_memory = self._say("memory", policy)
        if due is None and self._due_in_memory and not self.stopping:
            if this.whole and this.rejections == self._rejections:
                self._due_in_memory = False
                return True
            policy.skipped(report)
        self._due_in_memory = self._due_in_memory and due is None  # what is due on disk is saved in memory, too
        return False

    def _report(self, this: TrainingStep, policy: Policy, tier: Tier) -> StepReport:
        """Report newly durable checkpoints of a tier to its policy; return the report on the step for that policy."""
        now, in_flight = time.monotonic(), self.core.in_flight
        stall, in_memory = self.core.stream.totals.stall_seconds, in_flight.memory_stall
        for saved in in_flight.take_reports(tier):
            policy.saved(saved)
        own = in_memory if tier == "memory" else stall - in_memory
        before, self._reported_stall[tier] = self._reported_stall[tier], own
        return StepReport(
            step=this.step,
            now=now,
            seconds=max(0.0, now - this.began - (stall - this.stall_then)),
            stall=own - before,
            in_flight=max(this.in_flight[tier], in_flight.count(tier)),
        )

    def _sets_metric(self, this: TrainingStep, metric: str) -> bool:
        """Return whether to save a step because it sets ``metric`` (``Keep(best=...)``), whatever the policy says.

        Called once after every step. After 16 steps in a row that set it (as all set a training loss), none is saved
        for that.
        """
        if this.metadata.get(metric) is None:
            self._with_metric = 0
            return False
        self._with_metric += 1
        if self._with_metric == _EVERY_STEP + 1:
            text = (
                "%d steps in a row set %r, which Keep(best=...) goes by: from now on the interval alone chooses which "
                "are saved, and this_step.save(), until a step does not set it"
            )
            write("metric_each_step", text, _EVERY_STEP, metric, step=this.step, store=self.core.path)
        return self._with_metric <= _EVERY_STEP

    def _warn_of_state_dicts(self, this: TrainingStep) -> None:
        """Warn if the state has the ``state_dict()`` of a live object: it is out of date unless made anew each step."""
        text = (
            "%s the state_dict() of a live %s: unless it is made anew inside each step, what it held when it was made "
            "is saved every time, and restore() refuses it; put the %s itself there"
        )
        for where, owner in state_dicts(this.state):
            write("state_dict", text, where, owner, owner, step=this.step, store=self.core.path)

    def _warn_of_absent(self, state: Mapping[str, Any]) -> None:
        """Warn, once, of what training uses and the state lacks: optimizers, parameters, schedulers, loaders, RNGs."""
        if self._looked_for_absent:
            return
        self._looked_for_absent = True
        if (values := _seen(state)) is None:
            return
        absent: list[tuple[str, ...]] = []
        keys = _keys(values)
        optimizers = _optimizers(values)
        strange = partial(_trains_others, _parameters(values))
        if "param_groups" not in keys:
            there = {*map(id, optimizers)}
            forgotten = [each for each in self.core.guard.optimizers if id(each) not in there]
            for each in forgotten:
                use = "is attached, and trains another model than the state holds" if strange(each) else "is attached"
                trained = {*map(id, parameters_of(each))}
                if any(
                    type(one) is type(each) and (strange(each) or not trained.isdisjoint(map(id, parameters_of(one))))
                    for one in optimizers
                ):
                    self._say_absent("optimizer", type(each).__name__, use, _ANOTHER)
                else:
                    absent.append(("optimizer", type(each).__name__, use))
        for each in filter(strange, optimizers):
            text = (
                "the %s in the state trains none of the parameters in it, but those of another model, say of one from "
                "before it was made anew, which are not saved; make optimizer and state from the model that trains"
            )
            write("not_in_state", text, type(each).__name__, store=self.core.path)
        for each in optimizers:
            if _trained_by(each) and _holds_no_parameter(values):
                text = (
                    "the %s is in the state, and what it trains is not: a resumed run begins with the parameters of a "
                    'new model, and the optimizer\'s state of the old one; save {..., "model": model}'
                )
                write("not_in_state", text, type(each).__name__, store=self.core.path)
        for each in optimizers:
            if not strange(each) and (foreign := _foreign(values, each)):
                text = (
                    "%d parameter(s) of the %s in the state are in none of its modules, and are not saved: say of a "
                    "layer that was replaced after the optimizer was made, and trains nothing, or of a module that is "
                    "to be added; make the optimizer from the modules that train, and save all of them"
                )
                write("not_in_state", text, foreign, type(each).__name__, store=self.core.path)
        # Schedulers of torch but for ReduceLROnPlateau leave this in the groups of the optimizer that they change.
        groups = [group for each in optimizers for group in getattr(each, "param_groups", ())]  # odd ones have none
        scheduled = any("initial_lr" in group for group in groups)
        if scheduled and "last_epoch" not in keys and not any(isinstance(each, LRScheduler) for each in values):
            absent.append(("scheduler", "scheduler", "was made for an optimizer of the state", "if it makes steps, "))
        loader = next((each for each, began in [*iterated.items()] if began > self._opened), None)
        kept = any(isinstance(each, ResumableLoader | ResumableSampler) for each in values)  # another is for validation
        kept = kept or "ResumableLoader or its sampler" in {owner for _, owner in state_dicts(state)}
        if loader is not None and not kept:
            absent.append(("loader", type(loader).__name__, "was iterated over"))
        if (random := _draws(values)) and not any("rng" in str(key).lower() for key in keys):
            text = (
                "a %s in the state draws random numbers, and their generators are not in the state: a resumed run "
                'draws others than one that was not interrupted; save {..., "rng": RNGState()}'
            )
            write("not_in_state", text, random, store=self.core.path)
        for one in absent:
            self._say_absent(*one)

    def _warn_of_pass(self, passes: PassesUnderway) -> None:
        self._passes = None
        if passes.one_went_on():
            text = (
                "a DataLoader is in the middle of a pass, and its position is not in the state: a resumed run begins "
                "the epoch anew, unless the loop itself skips what it has trained on; loop over a ResumableLoader (or "
                'torchdata\'s StatefulDataLoader), and save {..., "loader": loader}'
            )
            write("not_in_state", text, store=self.core.path)

    def _look_at_stranger(self, optimizer: torch.optim.Optimizer) -> bool:
        """Warn of an unattached optimizer that trains a model in the state, and is not in the state.

        Called in the optimizer's step. Returns whether it looked: outside of step contexts it does nothing.
        """
        if not (inside := list(self._inside.values())):
            return False
        values = _seen(inside[-1].state)
        if values is None or "param_groups" in _keys(values) or not any(optimizer.state.values()):
            return True
        there = _optimizers(values)
        trained = _parameters(values)
        # One in the state whose own steps are not seen may be a wrapper of this one.
        if all(map(self._accumulation.watches, there)) and not trained.isdisjoint(map(id, parameters_of(optimizer))):
            self._say_absent("optimizer", type(optimizer).__name__, "trains a model in the state")
        return True

    def _say_absent(self, name: str, kind: str, use: str, first: str = "") -> None:
        text = (
            "%s %s, and is not in the state: what it holds is not saved, and a resumed run begins with it anew; "
            '%ssave {..., "%s": %s}'
        )
        write("not_in_state", text, with_article(kind), use, first, name, name, store=self.core.path)

    def _waited_too_long(self, this: TrainingStep, now: float) -> bool:
        """Count a context that postpones a checkpoint to a window's end; return whether to take it now all the same."""
        if not self._postponed:
            self._postponed_since = now
        self._postponed += 1
        if self._postponed < MOST_POSTPONED and now - self._postponed_since < self.most_postponed_seconds:
            return False
        if not self._told_postponed:
            self._told_postponed = True
            text = (
                "step %d is saved although it may be inside a window of gradient accumulation, whose gradients are not "
                "saved, after waiting %d contexts of engine.step for the end: %s; attach the optimizers that make the "
                "steps, or let engine.step enclose whole windows (told once until a window ends)"
            )
            fields = {"step": this.step, "store": self.core.path}
            write("inside_window", text, this.step, self._postponed, this.why_not_whole, **fields)
        return True

    def _say(self, tier: Tier, policy: Policy) -> Decision:
        """Return the policy's decision; log it if it differs from the one before."""
        decision = policy.decision()
        said = decision.interval, decision.reason  # the seconds follow every step that is measured
        if said != self._said.get(tier):
            self._said[tier] = said
            fields = {"interval": decision.interval, "seconds": decision.seconds, "store": self.core.path}
            write("interval", "%s", decision.reason if tier == "disk" else f"in memory: {decision.reason}", **fields)
        return decision

    # -- leaving the engine's context

    async def leave(self, caller: Caller, *, well: bool) -> None:
        """Save the last finished step if no checkpoint holds it (after an error: only if preempted), then close."""
        core = self.core
        try:
            if well or self.stopping:
                await self._save_last_step(caller, well=well)
        except BaseException as error:
            if not isinstance(error, Exception):  # cancelled: as in closing, checkpoints in flight are not waited for
                await caller.run(core.cancel_all())
            with note_closing_failure_on(error):
                await core.close(caller)
            raise
        await core.close(caller)

    async def _save_last_step(self, caller: Caller, *, well: bool) -> None:
        core, last = self.core, self._last_finished
        if os.getpid() != core.pid or not core.is_open or last is None:
            return
        if await self._is_saved(caller, last.counter, last.step):
            return
        why = self._what_changed(last, well=well)
        if not why and not last.whole:
            if self._last_whole is None or await self._is_saved(caller, *self._last_whole):
                why = (
                    f"{last.why_not_whole}; gradients are not saved, and a resumed run repeats the steps of the window"
                )
            else:
                last.inside_window = True
                text = (
                    "step %d is saved on leaving although it may be inside a window of gradient accumulation, whose "
                    "gradients are not saved, because no checkpoint has its weights: %s"
                )
                fields = {"step": last.step, "store": core.path}
                write("inside_window", text, last.step, last.why_not_whole, **fields)
        if not why:
            if not core.guard.attached:
                text = (
                    "step %d is saved on leaving, as the state is now: with no optimizer attached (engine.attach), it "
                    "is not seen if code has changed weights since through 'param.data.copy_()' or an array"
                )
                write("last_unseen", text, last.step, step=last.step, store=core.path)
            pending, _ = core.start_checkpoint(last.state, last.step, last.stored_metadata, last=True)
            await caller.run(core.wait_ended(last=True))
            if isinstance(flight_of(pending).error, ReplicasDifferError):
                core.start_checkpoint(last.state, last.step, last.stored_metadata, last=True)
            return  # closing waits for it, and raises its failure
        await caller.run(core.wait_ended(last=True))  # closing would wait, too: the newest one is known then
        there = "nothing is saved" if core.newest_step is None else f"newest saved: step {core.newest_step}"
        text = "the last step, %d, is not saved on leaving (%s): %s"
        write("last_not_saved", text, last.step, there, why, step=last.step, store=core.path)

    async def _is_saved(self, caller: Caller, counter: int, step: int) -> bool:
        """Wait for the newest checkpoint; return whether it is after ``counter``, of ``step`` or later, and whole."""
        newest = self.core.in_flight.newest
        if newest is None or newest.counter <= counter or newest.step < step:
            return False
        await caller.run(self.core.wait_ended(last=True))
        return not newest.failed

    def _what_changed(self, this: TrainingStep, *, well: bool) -> str:
        """Return why the state may no longer be that of the end of this step; "" if no change is seen.

        Args:
            this: The step.
            well: Whether no error ends the run. After an error, any code that reached the parameters' memory may have
                put other weights there (for an evaluation). Without one, code that may have only read the memory (to
                write a file, say) is taken to have only read it.
        """
        if this.mark is None or not self._accumulation.is_at(this.mark):
            return (
                "parameters of its optimizers have changed since, or a checkpoint was restored; leave the context "
                "before that, or call engine.checkpoint before it"
            )
        if any(accessed_since(each, self._last_ended, writing=well) for each in this.mark.parameters):
            return (
                "code got at the memory of its parameters since ('param.data'), as evaluations with other weights do; "
                "leave the context before that, or call engine.checkpoint before it"
            )
        return ""


def _seen(state: Mapping[str, Any]) -> list[Any] | None:
    """Return the containers and objects in a state; None if one of them may contain others unseen."""
    values = [value for _, value in containers_and_objects(state)]
    return values if all(isinstance(each, _HOLD_NOTHING) for each in values if is_stateful(each)) else None


def _parameters(values: list[Any]) -> set[int]:
    """Return the ``id`` of all parameters of models, and of all items of containers; none without a model."""
    models = [each for each in values if isinstance(each, torch.nn.Module)]
    beside = {*map(id, _items(values))}
    return {id(parameter) for model in models for parameter in model.parameters()} | (beside if models else set())


def _holds_no_parameter(values: list[Any]) -> bool:
    """Return whether each of the values, and of the items of containers, is of a kind that holds no parameter."""
    kinds = (*_WITHOUT_PARAMETERS, Mapping, list, tuple, str, bytes, int, float, complex, type(None))
    return all(isinstance(each, kinds) for each in [*values, *_items(values)])


def _items(values: list[Any]) -> list[Any]:
    """Return the items of the containers among the values of a state."""
    holding = [each for each in values if isinstance(each, Mapping | list | tuple)]
    return [item for each in holding for item in (each.values() if isinstance(each, Mapping) else each)]


def _may_hold_position(state: Mapping[str, Any]) -> bool:
    """Return whether a state may contain the position in the data: in an object, or under a key that looks so."""
    values = _seen(state)
    if values is None or any(isinstance(each, ResumableLoader | ResumableSampler) for each in values):
        return True
    return any(_OF_POSITIONS.search(str(key)) for key in _keys(values))


def _draws(values: list[Any]) -> str:
    """Return the class of a module that draws random numbers in training; "" without one, or with an RNGState."""
    if any(isinstance(each, RNGState) for each in values):
        return ""
    modules = (module for model in values if isinstance(model, torch.nn.Module) for module in model.modules())
    return next(
        (type(each).__name__ for each in modules if isinstance(each, _DROPOUTS) and each.p and each.training), ""
    )


def _trains_others(parameters: set[int], optimizer: torch.optim.Optimizer) -> bool:
    """Return whether both have parameters, and the optimizer trains none of these (given by ``id``)."""
    theirs = _trained_by(optimizer)
    return bool(parameters and theirs) and parameters.isdisjoint(map(id, theirs))


def _trained_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return parameters_of(optimizer) if hasattr(optimizer, "param_groups") else []  # odd ones have none


def _foreign(values: list[Any], optimizer: torch.optim.Optimizer) -> int:
    """Return how many trainable parameters of an optimizer seem to be nowhere in the state; 0 without a model there."""
    there = _parameters(values)
    if not there:
        return 0
    # The state_dict() of a module has other tensors than its parameters, of the same shapes.
    shapes = {item.shape for item in _items(values) if isinstance(item, torch.Tensor)}
    return sum(
        each.requires_grad and id(each) not in there and each.shape not in shapes for each in _trained_by(optimizer)
    )


def _keys(values: list[Any]) -> set[Any]:
    return {key for each in values if isinstance(each, Mapping) for key in each}


def _optimizers(values: list[Any]) -> list[torch.optim.Optimizer]:
    return [unwrapped(each) for each in values if isinstance(each, torch.optim.Optimizer)]


class _Context:
    """The base of :class:`StepContext` and :class:`AsyncStepContext`; ``checkpoint`` is the engine's method."""

    _entered = False
    _statement: str

    def __init__(self, training: TrainingRun, this: TrainingStep, checkpoint: Callable[..., Any]) -> None:
        self._training = training
        self._this = this
        self._checkpoint = checkpoint

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of step {self._this.step}>"

    def __del__(self) -> None:
        if not self._entered:
            text = "engine.step(...) was never entered, and did nothing: write '%s engine.step(state, step):'"
            warnings.warn(text % self._statement, RuntimeWarning, stacklevel=2)
        elif self._this.inside is not None:
            self._training.leave_step(self._this)  # entered, and never left

    def _enter(self, here: int) -> TrainingStep:
        self._entered = True
        return self._training.begin(self._this, here)

    def _refuse(self, instead: str) -> NoReturn:
        self._entered = True  # else a warning would follow
        raise TypeError(instead)

    def _take(self, tier: Tier) -> Any:
        this, overlap = self._this, bool(self._training.core.guard.optimizers) and self._this.whole
        return self._checkpoint(this.state, step=this.step, metadata=this.stored_metadata, overlap=overlap, tier=tier)

    def _is_last(self) -> bool:
        """Return whether a signal requested the end of the process, and it may end after this step."""
        return self._training.stopping and (self._this.whole or self._this.inside_window)


class StepContext(_Context):
    """The context manager that ``SyncCheckpointEngine.step`` returns."""

    _statement = "with"

    def __enter__(self) -> TrainingStep:
        return self._enter(threading.get_ident())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        training, this = self._training, self._this
        if (tier := training.end(this, failed=kind is not None)) is not None:
            training.note(this, self._take(tier))
        if kind is None and self._is_last():
            block_on(training.core, training.save_and_go, this)

    def __aenter__(self) -> NoReturn:
        self._refuse("use 'with engine.step(...)': this engine is a SyncCheckpointEngine")

    def __aexit__(self, *_: object) -> None: ...


class AsyncStepContext(_Context):
    """The async context manager that ``CheckpointEngine.step`` returns."""

    _statement = "async with"

    async def __aenter__(self) -> TrainingStep:
        return self._enter(id(asyncio.current_task()))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        training, this = self._training, self._this
        if (tier := training.end(this, failed=kind is not None)) is not None:
            training.note(this, await self._take(tier))
        if kind is None:
            if self._is_last():
                await run(training.core, training.save_and_go, this)
            # Training may await nothing else: other tasks would starve, and Ctrl-C, or the stop button of a notebook,
            # which cancel this one, would not come before the next save. Notebooks keep its traceback, which must not
            # keep the engine: its folder could not be opened again.
            del self, training, this
            await asyncio.sleep(0)

    def __enter__(self) -> NoReturn:
        self._refuse("use 'async with engine.step(...)', or a SyncCheckpointEngine where nothing is async")

    def __exit__(self, *_: object) -> None: ...
