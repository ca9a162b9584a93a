"""Windows of gradient accumulation: which brackets end where no gradient waits for a step.

Gradients are not saved. So a checkpoint in the middle of a window, of several brackets that lead to one step, would
lose what the first of them computed. Where a window ends follows from the steps of optimizers, and from gradients:

- where one is attached, one has to make a step in the bracket, or the bracket is inside its window;
- no optimizer, be it attached or only in the state, may have gradients that it has not used.

A gradient was used if it is what it was after the last step on its parameter. Some training leaves gradients that
nobody ever uses. Those that come after an optimizer's own step (an actor's loss leaves some in the critic) are told
from a window by what becomes of them: whether they are still there at the next step, or were replaced. For others there
is patience: where no bracket ends without any for a while, they are ignored, and a line says so.

What is seen are gradients in ``.grad`` whose changes torch counts. Libraries that accumulate elsewhere (flat buffers of
their own, FSDP2 without synchronisation) need an attached optimizer.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from pccheck_async.logs import write
from pccheck_async.overlap import Guard
from pccheck_async.step_hooks import StepHooks, hooks_of, unwrapped

__all__ = ["Windows"]

_PATIENCE = 64
"""Brackets in a row whose only fault are unused gradients, until those are ignored."""
_PATIENCE_SECONDS = 600.0
_FEWEST = 3
"""After so many seconds they are ignored sooner, but not before so many brackets: those may be whole epochs."""
_SAMPLE = 16
"""Of one attached optimizer alone so many parameters of each group are looked at: windows concern all of them."""
_MOST_ITEMS = 64
_MOST_LOOKS = 256
"""Optimizers are looked for in lists and the like of at most so many items, and in so many values altogether."""


class _Watched:
    """What is known of one optimizer.

    Args:
        hooks: Those around its steps.
        last: The bracket of its last step.

    Attributes:
        waiting: A parameter and its gradient that had not been used when the last bracket ended.
        dropped: Whether the last such gradient was replaced before the next step, instead of added to.
        patience: Brackets until those that wait are ignored.
        ignored: Whether they are.
    """

    def __init__(self, hooks: StepHooks, last: int) -> None:
        self.hooks = hooks
        self.last = last
        self.waiting: tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]] | None = None
        self.dropped = False
        self.patience = _PATIENCE
        self.ignored = False

    def settle(self, bracket: int) -> None:
        """Learn from a step that begins what became of the gradient that waited for it."""
        if self.waiting is None:
            return
        parameter, gradient = (each() for each in self.waiting)
        kept = parameter is not None and gradient is not None and parameter.grad is gradient
        self.waiting, self.dropped = None, not kept
        length = bracket - self.last
        if self.ignored and length >= self.patience:  # it just made no step for that long
            self.ignored = False
            if kept:
                self.patience = 2 * length


class Windows:
    """Watches the attached optimizers, and those in the state.

    Args:
        guard: Knows the attached ones. Others in the state join them: their steps would tear captures.
        store: Path of the store, for the log.
    """

    def __init__(self, guard: Guard, store: str) -> None:
        self._guard = guard
        self._store = store
        self._watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Watched] = weakref.WeakKeyDictionary()
        self._used: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._most_used = 1024
        self._bracket = 0
        self._held: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._held_brackets, self._held_since = 0, 0.0
        self._said: set[type] = set()

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch its steps from now on. Idempotent. Raises TypeError where it has no hooks."""
        if optimizer in self._watched:
            return
        hooks = hooks_of(optimizer)
        if len(self._watched) == 1:
            for other in list(self._watched):
                if self._unused(other) is None:  # only a sample was noted until now
                    self._note(_gradients(other))
        hooks.add(before=self._before_step, after=self._after_step)
        self._watched[optimizer] = _Watched(hooks, self._bracket - 1)

    def begin(self, state: Mapping[str, Any]) -> int:
        """Note the beginning of a bracket, and return its number. Watches the optimizers in its state, too."""
        self._bracket += 1
        for found in _optimizers(state):
            optimizer = unwrapped(found)
            if optimizer in self._watched:
                continue
            try:
                if self._guard.attached:
                    self._guard.attach(optimizer)
                self.watch(optimizer)
            except TypeError as error:
                self._say_unseen(found, error)
        return self._bracket

    def end(self, step: int, bracket: int) -> bool:
        """Note the end of a bracket; return whether it is outside all windows."""
        self._forget_gone()
        watched, waiting = list(self._watched.items()), []
        for optimizer, each in watched:
            each.waiting = self._unused(optimizer)
            if each.waiting is not None and not each.ignored and not (each.dropped and each.last >= bracket):
                waiting.append(optimizer)
        if self._guard.attached and not any(each.last >= bracket for _, each in watched):
            return False
        if waiting:
            return self._lose_patience(waiting, step)
        self._held.clear()
        self._held_brackets = 0
        return True

    def close(self) -> None:
        """Let go of all optimizers."""
        for each in list(self._watched.values()):
            each.hooks.remove(self._before_step)
            each.hooks.remove(self._after_step)
        self._watched.clear()
        self._used.clear()

    def _lose_patience(self, waiting: Collection[torch.optim.Optimizer], step: int) -> bool:
        """Count a bracket whose only fault is what waits; return whether that is ignored from now on."""
        now = time.monotonic()
        if self._held_brackets == 0:
            self._held_since = now
        self._held_brackets += 1
        self._held.update(waiting)
        late = self._held_brackets >= _FEWEST and now - self._held_since >= _PATIENCE_SECONDS
        for optimizer in waiting:
            patience = self._watched[optimizer].patience
            if self._held_brackets < patience and not (late and patience == _PATIENCE):  # more of it was earned
                return False
        text = (
            "the last %d brackets of engine.step all ended with gradients that no step of the %s has used: from now on "
            "they are taken for left over; if they are accumulated, a resumed run lacks them: bracket whole windows%s"
        )
        advice = "" if self._guard.attached else ", or attach the optimizers"
        name = ", ".join(sorted({type(each).__qualname__ for each in self._held}))
        count = self._held_brackets
        for optimizer in self._held:
            if (found := self._watched.get(optimizer)) is not None:
                found.ignored = True
        self._held.clear()
        self._held_brackets = 0
        write(logging.WARNING, "unused_gradients", text, count, name, advice, step=step, store=self._store)
        return True

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if (this := self._watched.get(optimizer)) is not None:
            this.settle(self._bracket)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if (this := self._watched.get(optimizer)) is not None:
            this.last = self._bracket
            if not this.ignored:
                self._note(self._seen(optimizer))

    def _seen(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        few = len(self._watched) == 1 and self._guard.attached
        return _gradients(optimizer, _SAMPLE if few else None)

    def _note(self, gradients: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for parameter, gradient in gradients:
            self._used[id(parameter)] = weakref.ref(gradient), _version(gradient)

    def _unused(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]] | None:
        for parameter, gradient in self._seen(optimizer):
            used, version = self._used.get(id(parameter), (None, 0))
            if used is None or used() is not gradient or version != _version(gradient):
                return weakref.ref(parameter), weakref.ref(gradient)
        return None

    def _forget_gone(self) -> None:
        if len(self._used) > self._most_used:
            self._used = {key: noted for key, noted in self._used.items() if noted[0]() is not None}
            self._most_used = max(1024, 2 * len(self._used))

    def _say_unseen(self, optimizer: torch.optim.Optimizer, error: TypeError) -> None:
        if not self._guard.attached and type(optimizer) not in self._said:
            self._said.add(type(optimizer))
            text = "checkpoints do not wait for windows of gradient accumulation of an optimizer in the state: %s"
            write(logging.WARNING, "unseen_optimizer", text, error, store=self._store)


def _gradients(
    optimizer: torch.optim.Optimizer, sample: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for group in optimizer.param_groups:
        parameters = group["params"]
        if sample is not None:
            parameters = parameters[:: -(-len(parameters) // sample) or 1]
        for parameter in parameters:
            if (parameter.is_leaf or parameter.retains_grad) and (gradient := parameter.grad) is not None:
                yield parameter, gradient


def _version(gradient: torch.Tensor) -> int:
    return 0 if gradient.is_inference() else gradient._version


def _optimizers(state: Mapping[str, Any]) -> Iterator[torch.optim.Optimizer]:
    """Those in the values of a state, and in dicts, lists and tuples among them, the outermost first."""
    looks, rest = 0, [list(state.values())]
    for values in rest:
        for value in values:
            looks += 1
            if isinstance(value, torch.optim.Optimizer):
                yield value
            elif isinstance(value, dict | list | tuple) and len(value) <= _MOST_ITEMS and looks < _MOST_LOOKS:
                rest.append(list(value.values() if isinstance(value, dict) else value))
