# SPDX-License-Identifier: Apache-2.0
"""Recognises the ends of gradient accumulation windows, after which no gradient waits for an optimizer's step.

Gradients are not saved. A window is several step contexts (``engine.step``) that lead to one step of an optimizer; a
checkpoint inside it would lose the gradients that the first contexts computed. A context ends a window if both hold:

- If optimizers are attached, at least one of them made a step in the context.
- No watched optimizer (attached, or found in the state) that made no step in the context has unused gradients.

A step of any optimizer is also one of the watched optimizers with the same parameters: an attached object may wrap the
one that makes the steps, and have a ``step`` of another name or none (sharpness-aware minimisation).

A gradient is used if it has not changed since the end of the last context with a step on its parameter. So gradients
that were computed after that step, but in the same context, are used, too: some training leaves gradients that no step
uses (an actor's loss leaves some in the critic). If gradients stay unused in an optimizer that makes no step, and for a
while every context ends so, they are ignored from then on, with a warning. Of an optimizer that made a step in every
context so far, only a sample of the gradients is checked.

Only gradients in ``.grad`` whose changes torch counts are seen. Libraries that accumulate elsewhere (flat buffers of
their own, FSDP2 without synchronisation) need an attached optimizer.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from pccheck_async.engine import Guard, StepHooks, hooks_of, hooks_of_all, unwrapped
from pccheck_async.state.ambient import no_functions
from pccheck_async.state.tensor_access import storage_address
from pccheck_async.telemetry import write

__all__ = ["PATIENCE", "Accumulation", "Mark", "optimizers_in", "parameters_of"]


class Mark(NamedTuple):
    """Number of optimizer steps so far, and the optimizers' parameters with their versions and addresses."""

    steps: int
    parameters: list[torch.Tensor]
    versions: list[int]
    addresses: list[int]


PATIENCE = 64
"""Step contexts in a row that end with unused gradients until those gradients are ignored."""
PATIENCE_SECONDS, _FEWEST = 600.0, 3
"""Seconds after which they are ignored sooner, and contexts that this takes at least: one may be a whole epoch."""
_MOST_ITEMS, _MOST_LOOKS = 64, 256
"""Limits of the search for optimizers in a state: items of a container that is searched, and values seen in all."""
_OUTSIDE = 2
"""Optimizer steps between contexts, themselves without any, from which on ``optimizer.step()`` is taken to be outside
of them. (A single one may be another loss's.)"""
_MOST_IDLE = 3
"""First steps of an optimizer, all without any gradient, after which it is taken to train nothing."""
_SAMPLE = 32
"""Gradients, spread over all parameters, that are marked in an optimizer while it makes a step in every context."""
_USED = "_pccheck_used"
"""Name of an attribute of gradients: their ``id`` (copies inherit the attribute) and their version when they were used.

An attribute and no weak reference, because torch does not swap tensors that have one (``module.to``,
``load_state_dict``); and no table, because a new tensor may get the ``id``, memory and version of one that is gone.
"""

_version_of, _is_leaf, _gradient_of = attrgetter("_version"), attrgetter("is_leaf"), attrgetter("grad")


@dataclass(slots=True)
class _Watched:
    """The record of one watched optimizer, kept as long as the optimizer exists."""

    reference: weakref.ref[torch.optim.Optimizer]
    last: int  # number of the context of its last step
    patience: int = PATIENCE  # contexts until gradients that it does not use are ignored
    ignored: bool = False  # whether they are
    in_each: bool = True  # whether it made a step in every context: until then it has no windows
    sample: int | None = None  # how many of its gradients were noted as used, of all parameters; None: all
    guarded: bool = False  # whether its steps wait for captures
    idle: int | None = 0  # steps in which it found no gradient, before the first one with one; None: it trains
    waited: bool = False  # whether it had unused gradients in one of the contexts in a row that unused ones kept inside

    def gradients(self) -> list[torch.Tensor]:
        """Return those gradients of the optimizer that are marked and checked; none if the optimizer is gone."""
        optimizer = self.reference()
        return [] if optimizer is None else _gradients(optimizer, self.sample)

    def note_used(self, sample: int | None) -> None:
        """Mark gradients as used: all, or as many as ``sample``; only so many are checked from now on."""
        self.sample = sample
        gradients = self.gradients()
        for gradient, version in zip(gradients, _versions(gradients), strict=True):
            setattr(gradient, _USED, (id(gradient), version))


class Accumulation:
    """Watches the attached optimizers, and those in the state, to recognise the ends of accumulation windows.

    If optimizers are attached, those in the state are attached to ``guard``, too: their steps would tear captures.

    Args:
        guard: The guard of the engine.
        store: The engine's folder, for events.
        look_at: Called with an optimizer that made steps in several contexts and shares no parameter with a watched
            one, again at each step until it returns True.
    """

    def __init__(self, guard: Guard, store: str, look_at: Callable[[torch.optim.Optimizer], bool]) -> None:
        self._guard = guard
        self._look_at = look_at
        self._strangers: weakref.WeakKeyDictionary[torch.optim.Optimizer, float] = weakref.WeakKeyDictionary()
        self._store = store
        self._watched: dict[int, _Watched] = {}  # by the identity of the optimizer; one that is collected leaves it
        self._hooks: StepHooks | None = None
        self._context = 0
        self._unused_contexts, self._unused_first, self._unused_since = 0, 0, 0.0
        self._unseen: set[type] = set()
        self._steps = 0
        self._is_inside = False  # a context
        self._outside: list[str] = []  # optimizers that made a step outside of all since one had a step
        self._told_outside = False

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch the steps of an optimizer from now on. Idempotent. Raises TypeError if it has no hooks."""
        watched, number = self._watched, id(optimizer)
        if number in watched:
            return
        hooks_of(optimizer)
        self._see_steps()
        if len(watched) == 1:
            for other in list(watched.values()):
                if all(map(_is_used, other.gradients())):
                    other.note_used(None)  # so far that was noted of one gradient alone
        watched[number] = _Watched(weakref.ref(optimizer, lambda _: watched.pop(number, None)), self._context - 1)

    def _see_steps(self) -> None:
        if self._hooks is None:
            self._hooks = hooks_of_all()
            self._hooks.add(after=self._after_step)

    def begin(self, state: Mapping[str, Any]) -> int:
        """Called when a step context begins; returns its number. Watches, and attaches, optimizers in its state."""
        self._context += 1
        self._is_inside = True
        self._see_steps()
        attached = self._guard.attached
        for found in optimizers_in(state):
            if (known := self._watched.get(id(found))) is not None and known.guarded >= attached:
                continue
            try:
                optimizer = unwrapped(found)
                if attached:
                    self._guard.attach(optimizer)
                self.watch(optimizer)
                self._watched[id(optimizer)].guarded = attached
            except TypeError as error:
                self._say_unseen(found, error)
        return self._context

    def end(self, step: int, context: int) -> str:
        """Called when a step context ends; returns why this may be inside a window; "" if it is not."""
        watched, attached = list(self._watched.values()), self._guard.attached
        self._is_inside = False
        made, without = [], []
        for each in watched:
            if each.last >= context:
                made.append(each)
            else:
                each.in_each = False
                if not each.ignored:
                    without.append(each)
        if attached and watched and not made:
            return self._say_outside(step) or (
                "no attached optimizer made a step in it: a window of gradient accumulation is open, or the step was "
                "left out (by a gradient scaler), or made by code that no hook sees"
            )
        if made:
            self._outside.clear()
        alone = attached and len(watched) == 1  # then it is enough that it made a step
        for each in made:
            if not each.ignored:
                each.note_used(1 if alone else _SAMPLE if each.in_each else None)
        waiting = [each for each in without if not all(map(_is_used, each.gradients()))] if without else without
        if waiting and not self._lose_patience(waiting, step):
            return ("" if made else self._say_outside(step)) or (
                f"there are gradients that no step of the {_names(waiting)} has used: a window of gradient "
                "accumulation is open, or they are left over from another loss (that of a generator leaves some in the "
                "discriminator)"
            )
        if not waiting and self._unused_contexts:
            self._begin_patience()
        return ""

    def _say_outside(self, step: int) -> str:
        """Return a reason, and log it once, if optimizers make their steps between contexts; else return ""."""
        if len(self._outside) < _OUTSIDE:
            return ""
        optimizer = self._outside[-1]
        if not self._told_outside:
            self._told_outside = True
            text = (
                "a step of the %s was made outside of engine.step, between two of its blocks, and the block of step %d "
                "made none: steps are not saved that way; move optimizer.step() into the block"
            )
            write("step_outside", text, optimizer, step, step=step, store=self._store)
        return f"the {optimizer} makes its steps outside of the block of engine.step: move optimizer.step() into it"

    def watches(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether this very optimizer is watched."""
        return id(optimizer) in self._watched

    def mark(self) -> Mark:
        """Return a mark for :meth:`is_at`: the watched optimizers and their parameters at this moment."""
        parameters: list[torch.Tensor] = []
        for each in list(self._watched.values()):
            if (optimizer := each.reference()) is not None:
                parameters += parameters_of(optimizer)
        return self._mark(parameters)

    def is_at(self, mark: Mark) -> bool:
        """Return whether, since ``mark``, no watched optimizer made a step, and no parameter changed or moved."""
        return mark == self._mark(mark.parameters)

    def _mark(self, parameters: list[torch.Tensor]) -> Mark:
        # Code that gives a parameter other memory is seen by its access to ``data``, once an optimizer is attached.
        addresses = [] if self._guard.attached else _addresses(parameters)
        return Mark(self._steps, parameters, _versions(parameters), addresses)

    def close(self) -> None:
        """Remove the hooks, and forget all optimizers."""
        if self._hooks is not None:
            self._hooks.remove(self._after_step)
        self._watched.clear()
        self._strangers.clear()

    def _lose_patience(self, waiting: Collection[_Watched], step: int) -> bool:
        """Count a context that ended with unused gradients; return whether these are ignored from now on."""
        now = time.monotonic()
        if self._unused_contexts == 0:
            self._unused_first, self._unused_since = self._context, now
        self._unused_contexts += 1
        for each in waiting:
            each.waited = True
        late = self._unused_contexts >= _FEWEST and now - self._unused_since >= PATIENCE_SECONDS
        for each in waiting:  # a patience of more: a longer window of it is known
            if self._unused_contexts < each.patience and (not late or each.patience > PATIENCE):
                return False
        unused = [each for each in list(self._watched.values()) if each.waited]
        idle = [each for each in unused if each.last < self._unused_first]
        left_over = idle or unused  # one that makes steps has windows of its own, beside another's left-overs
        for each in left_over:
            each.ignored, each.patience = True, min(each.patience, self._unused_contexts)
        text = (
            "the last %d contexts of engine.step all ended with gradients that no step of the %s has used: from now on "
            "they count as left over; if they are accumulated, a resumed run lacks them: let engine.step enclose whole "
            "windows%s"
        )
        advice = "" if self._guard.attached else ", or attach the optimizers"
        fields = {"step": step, "store": self._store}
        write("unused_gradients", text, self._unused_contexts, _names(left_over), advice, **fields)
        self._begin_patience()
        return all(each.ignored for each in waiting)

    def _begin_patience(self) -> None:
        self._unused_contexts = 0
        for each in list(self._watched.values()):
            each.waited = False

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        this = self._watched.get(id(optimizer))
        stepped = [this] if this is not None else self._with_parameters_of(optimizer) if self._watched else []
        # In the first context it may be on its way into the state.
        if not stepped and self._strangers.setdefault(optimizer, self._context) < self._context:
            self._strangers[optimizer] = math.inf if self._look_at(optimizer) else self._context
        for each in stepped:
            if each.idle is not None:
                self._look_at_gradients(each, optimizer)
            if each.ignored and (length := self._context - each.last) >= each.patience:
                # It was ignored because it made no step, and now makes one: its windows are only long.
                each.ignored, each.patience = False, max(2 * length, PATIENCE + 1)
            each.last = self._context
            self._steps += 1
            if self._context and not self._is_inside:
                self._outside = [*self._outside[-1:], type(optimizer).__qualname__]

    def _look_at_gradients(self, this: _Watched, optimizer: torch.optim.Optimizer) -> None:
        """Log once if the first steps of an optimizer find no gradient: its model may not be the one that trains."""
        assert this.idle is not None
        this.idle = None if _gradients_of(parameters_of(optimizer)) else this.idle + 1
        if this.idle == _MOST_IDLE:
            text = (
                "none of the parameters of the %s had a gradient in its first %d steps: it trains nothing; if the "
                "model was made anew, make optimizer and state from it, too: else the model that trains is not saved"
            )
            write("no_gradients", text, type(optimizer).__qualname__, _MOST_IDLE, store=self._store)

    def _with_parameters_of(self, other: torch.optim.Optimizer) -> list[_Watched]:
        """Return the records of the watched optimizers that share a parameter with ``other``."""
        theirs = {*map(id, parameters_of(other))}
        return [
            each
            for each in list(self._watched.values())
            if (own := each.reference()) is not None and not theirs.isdisjoint(map(id, parameters_of(own)))
        ]

    def _say_unseen(self, optimizer: torch.optim.Optimizer, error: TypeError) -> None:
        if not self._guard.attached and type(optimizer) not in self._unseen:
            self._unseen.add(type(optimizer))
            text = "checkpoints do not wait for windows of gradient accumulation of an optimizer in the state: %s"
            write("unseen_optimizer", text, error, store=self._store)


def _names(watched: Collection[_Watched]) -> str:
    optimizers = [each.reference() for each in watched]
    return ", ".join(sorted({type(one).__qualname__ for one in optimizers if one is not None}))


def _is_used(gradient: torch.Tensor) -> bool:
    return getattr(gradient, _USED, None) == (id(gradient), _version(gradient))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    with no_functions():  # lazy parameters, and classes of users, refuse unknown functions
        try:
            return [*map(_version_of, tensors)]
        except RuntimeError:  # made in inference mode, or wrappers of others
            return [*map(_version, tensors)]


def _addresses(tensors: list[torch.Tensor]) -> list[int]:
    with no_functions():
        try:
            return [*map(torch.Tensor.data_ptr, tensors)]
        except RuntimeError:  # sparse, or wrappers of others
            return [*map(storage_address, tensors)]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups of an optimizer."""
    found: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        found += group["params"]
    return found


def _gradients(optimizer: torch.optim.Optimizer, sample: int | None) -> list[torch.Tensor]:
    """Return the gradients of about ``sample`` parameters, spread over all; of all if None, or if most have none."""
    if sample is not None:
        some = _spread(optimizer, sample)
        if 2 * len(found := _gradients_of(some)) > len(some):
            return found
    return _gradients_of(parameters_of(optimizer))


def _spread(optimizer: torch.optim.Optimizer, sample: int) -> list[torch.Tensor]:
    """Return about ``sample`` parameters at equal distances, without touching others (224 cost a step 0.1 ms)."""
    groups = [group["params"] for group in optimizer.param_groups]
    apart, first, found = sum(map(len, groups)) // sample or 1, 0, []
    for parameters in groups:
        found += parameters[first::apart]
        first = (first - len(parameters)) % apart
    return found


def _gradients_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if not all(map(_is_leaf, parameters)):  # torch warns of gradients that others do not keep
        parameters = [each for each in parameters if each.is_leaf or each.retains_grad]
    return [gradient for gradient in map(_gradient_of, parameters) if gradient is not None]


def optimizers_in(state: Mapping[str, Any]) -> list[torch.optim.Optimizer]:
    """Return the optimizers in the values of a state, and in dicts, lists and tuples in them, the outermost first."""
    found, looks, rest = [], 0, [list(state.values())]
    for values in rest:
        for value in values:
            looks += 1
            if isinstance(value, torch.optim.Optimizer):
                found.append(value)
            elif isinstance(value, dict | list | tuple) and len(value) <= _MOST_ITEMS and looks < _MOST_LOOKS:
                rest.append(list(value.values() if isinstance(value, dict) else value))
    return found
