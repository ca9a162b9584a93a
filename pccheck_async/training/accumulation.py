"""Windows of gradient accumulation: which brackets end where no gradient waits for a step.

Gradients are not saved. So a checkpoint in the middle of a window, of several brackets that lead to one step, would
lose what the first of them computed. Where a window ends follows from the steps of optimizers:

- where one is attached, one has to make a step in the bracket, or the bracket is inside its window;
- of several, and of those in the state where none is attached, none that made no step in the bracket may have gradients
  that it has not used.

A gradient was used if it is what it was when the last bracket with a step on its parameter ended. What came after that
step does not count: some training leaves gradients that nobody ever uses (an actor's loss leaves some in the critic).
Where such come to one that makes no step, and no bracket ends without any for a while, they are ignored, and a line
says so.

What is seen are gradients in ``.grad`` whose changes torch counts. Libraries that accumulate elsewhere (flat buffers of
their own, FSDP2 without synchronisation) need an attached optimizer.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from pccheck_async.engine.overlap import Guard
from pccheck_async.engine.step_hooks import StepHooks, hooks_of, unwrapped
from pccheck_async.state.ambient import no_functions
from pccheck_async.telemetry.logs import write

__all__ = ["Mark", "Windows"]


class Mark(NamedTuple):
    """Steps made by optimizers, and their parameters with versions. Who moves their memory is noted elsewhere."""

    steps: int
    parameters: list[torch.Tensor]
    versions: list[int]


_PATIENCE = 64
"""Brackets in a row whose only fault are unused gradients, until those are ignored."""
_PATIENCE_SECONDS = 600.0
_FEWEST = 3
"""After so many seconds they are ignored sooner, but not before so many brackets: those may be whole epochs."""
_MOST_ITEMS = 64
_MOST_LOOKS = 256
"""Optimizers are looked for in lists and the like of at most so many items, as long as so many values were not seen."""
_USED = "_pccheck_used"
"""An attribute of gradients: their identity (copies have it, too) and their version when they were used.

Torch does not swap tensors that have weak references (``module.to``, ``load_state_dict``), and a new one may get the
number, the memory and the version of one that is gone.
"""

_version_of = attrgetter("_version")


class _Watched:
    """What is known of one optimizer.

    Args:
        hooks: Those around its steps.
        last: The bracket of its last step.

    Attributes:
        patience: Brackets until gradients that it does not use are ignored.
        ignored: Whether they are.
    """

    def __init__(self, hooks: StepHooks, last: int) -> None:
        self.hooks = hooks
        self.last = last
        self.patience = _PATIENCE
        self.ignored = False

    def begin(self, bracket: int) -> None:
        """Note that a step begins: if it was ignored for making none for long, it just does that rarely."""
        length = bracket - self.last
        if self.ignored and length >= self.patience:
            self.ignored, self.patience = False, max(2 * length, _PATIENCE + 1)


class Windows:
    """Watches the attached optimizers, and those in the state.

    Args:
        guard: Knows the attached ones. Others in the state join them: their steps would tear captures.
        store: Path of the store, for the log.

    Attributes:
        lacks_step: Whether the last bracket had no step although an optimizer is attached.
    """

    def __init__(self, guard: Guard, store: str) -> None:
        self._guard = guard
        self._store = store
        self._watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Watched] = weakref.WeakKeyDictionary()
        self._bracket = 0
        self._held: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._held_brackets, self._held_first, self._held_since = 0, 0, 0.0
        self._unseen: set[type] = set()
        self._steps = 0
        self.lacks_step = False

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch its steps from now on. Idempotent. Raises TypeError where it has no hooks."""
        if optimizer in self._watched:
            return
        hooks = hooks_of(optimizer)
        if len(self._watched) == 1:
            for other in list(self._watched):
                if all(_is_used(gradient) for gradient in _gradients(other, most=1)):
                    _note_used(other)  # so far that was noted of one gradient alone
        hooks.add(before=self._before_step, after=self._after_step)
        self._watched[optimizer] = _Watched(hooks, self._bracket - 1)

    def begin(self, state: Mapping[str, Any]) -> int:
        """Note the beginning of a bracket, and return its number. Watches the optimizers in its state, too."""
        self._bracket += 1
        for found in _optimizers(state):
            try:
                optimizer = unwrapped(found)
                if self._guard.attached:
                    self._guard.attach(optimizer)
                self.watch(optimizer)
            except TypeError as error:
                self._say_unseen(found, error)
        return self._bracket

    def end(self, step: int, bracket: int) -> bool:
        """Note the end of a bracket; return whether it is outside all windows."""
        watched = list(self._watched.items())
        self.lacks_step = self._guard.attached and bool(watched) and all(each.last < bracket for _, each in watched)
        if self.lacks_step:
            return False
        for optimizer, each in watched:
            if each.last >= bracket and not each.ignored:
                # Of one that is attached it is enough to know that it made a step.
                _note_used(optimizer, most=1 if len(watched) == 1 and self._guard.attached else None)
        without = [optimizer for optimizer, each in watched if each.last < bracket and not each.ignored]
        waiting = [each for each in without if not all(map(_is_used, _gradients(each)))]
        if waiting:
            return self._lose_patience(waiting, step)
        self._held.clear()
        self._held_brackets = 0
        return True

    def mark(self) -> Mark:
        """Return what :meth:`is_at` compares with: the watched optimizers and their parameters as they are now."""
        groups = [group for optimizer in list(self._watched) for group in optimizer.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        return Mark(self._steps, parameters, _versions(parameters))

    def is_at(self, mark: Mark) -> bool:
        """Whether no watched optimizer has made a step since, nor the parameters changed as far as torch counts it."""
        return mark == Mark(self._steps, mark.parameters, _versions(mark.parameters))

    def close(self) -> None:
        """Let go of all optimizers."""
        for each in list(self._watched.values()):
            each.hooks.remove(self._before_step)
            each.hooks.remove(self._after_step)
        self._watched.clear()

    def _lose_patience(self, waiting: Collection[torch.optim.Optimizer], step: int) -> bool:
        """Count a bracket whose only fault is what waits; return whether that is ignored from now on."""
        now = time.monotonic()
        if self._held_brackets == 0:
            self._held_first, self._held_since = self._bracket, now
        self._held_brackets += 1
        self._held.update(waiting)
        late = self._held_brackets >= _FEWEST and now - self._held_since >= _PATIENCE_SECONDS
        for optimizer in waiting:
            patience = self._watched[optimizer].patience
            if self._held_brackets < patience and (not late or patience > _PATIENCE):  # a longer window of it is known
                return False
        held = {optimizer: self._watched[optimizer] for optimizer in list(self._held) if optimizer in self._watched}
        idle = {optimizer: each for optimizer, each in held.items() if each.last < self._held_first}
        for each in (idle or held).values():  # one that makes steps has windows of its own, beside another's left-overs
            each.ignored, each.patience = True, min(each.patience, self._held_brackets)
        text = (
            "the last %d brackets of engine.step all ended with gradients that no step of the %s has used: from now on "
            "they are taken for left over; if they are accumulated, a resumed run lacks them: bracket whole windows%s"
        )
        advice = "" if self._guard.attached else ", or attach the optimizers"
        names = ", ".join(sorted({type(each).__qualname__ for each in idle or held}))
        count = self._held_brackets
        self._held.clear()
        self._held_brackets = 0
        write(logging.WARNING, "unused_gradients", text, count, names, advice, step=step, store=self._store)
        return all(self._watched[optimizer].ignored for optimizer in waiting)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if (this := self._watched.get(optimizer)) is not None:
            this.begin(self._bracket)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if (this := self._watched.get(optimizer)) is not None:
            this.last = self._bracket
            self._steps += 1

    def _say_unseen(self, optimizer: torch.optim.Optimizer, error: TypeError) -> None:
        if not self._guard.attached and type(optimizer) not in self._unseen:
            self._unseen.add(type(optimizer))
            text = "checkpoints do not wait for windows of gradient accumulation of an optimizer in the state: %s"
            write(logging.WARNING, "unseen_optimizer", text, error, store=self._store)


def _note_used(optimizer: torch.optim.Optimizer, most: int | None = None) -> None:
    for gradient in _gradients(optimizer, most):
        setattr(gradient, _USED, (id(gradient), _version(gradient)))


def _is_used(gradient: torch.Tensor) -> bool:
    return getattr(gradient, _USED, None) == (id(gradient), _version(gradient))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    with no_functions():  # lazy parameters, and classes of users, refuse what they do not know
        try:
            return [*map(_version_of, tensors)]
        except RuntimeError:  # made in inference mode, or wrappers of others
            return [*map(_version, tensors)]


def _gradients(optimizer: torch.optim.Optimizer, most: int | None = None) -> Iterator[torch.Tensor]:
    found = (
        gradient
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (parameter.is_leaf or parameter.retains_grad) and (gradient := parameter.grad) is not None
    )
    return islice(found, most)


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
