"""Windows of gradient accumulation: which brackets end where no gradient waits for a step.

Gradients are not saved. So a checkpoint in the middle of a window, of several brackets that lead to one step, would
lose what the first of them computed. Where a window ends follows from the steps of optimizers:

- one that is attached has to make a step, or the bracket is inside its window;
- of several, and of those in the state where none is attached, none may have got gradients that it has not used.

A gradient was used if it is what it was after the last step on its parameter. Some training leaves gradients that
nobody ever uses (a generator's loss leaves some in the discriminator). Where hardly a bracket ends without any, they
are ignored after a while, and a line says so.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from pccheck_async.logs import write
from pccheck_async.overlap import Guard
from pccheck_async.step_hooks import StepHooks, hooks_of

__all__ = ["Windows"]

_PATIENCE = 64
"""Brackets in a row whose only fault are unused gradients, until those are ignored."""
_MOST_ITEMS = 64
"""Optimizers are looked for in lists and the like of at most so many items."""


class Windows:
    """Watches the attached optimizers, or those in the state.

    Args:
        guard: Knows the attached ones. Others in the state join them: their steps would tear captures.
        store: Path of the store, for the log.
    """

    def __init__(self, guard: Guard, store: str) -> None:
        self._guard = guard
        self._store = store
        self._hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, StepHooks] = weakref.WeakKeyDictionary()
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._used: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._patience: int | None = _PATIENCE

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch its steps from now on. Idempotent. Raises TypeError where it has no hooks."""
        if optimizer in self._hooks:
            return
        hooks = hooks_of(optimizer)
        for other in list(self._hooks):
            self._note(other)  # as long as there was one, that was not done
        self._hooks[optimizer] = hooks
        hooks.add(after=self._after_step)

    def look_at(self, state: Mapping[str, Any]) -> None:
        """Watch the optimizers in the outermost values of an app state, and in containers among these."""
        attached = bool(self._guard.optimizers)
        for optimizer in _optimizers(state):
            with suppress(TypeError):
                if attached:
                    self._guard.attach(optimizer)
                self.watch(optimizer)

    def forget(self) -> None:
        """Let the steps so far not count for the next bracket."""
        self._stepped.clear()

    def end(self, step: int) -> bool:
        """Note the end of a bracket; return whether it is outside all windows."""
        stepped, self._stepped = self._stepped, weakref.WeakSet()
        if self._guard.optimizers and not stepped:
            return False
        if self._patience is None:
            return True
        waiting = next((each for each in list(self._hooks) if each not in stepped and self._has_unused(each)), None)
        if waiting is None:
            self._patience = _PATIENCE
            return True
        self._patience -= 1
        if self._patience > 0:
            return False
        self._patience = None
        text = (
            "the last %d brackets of engine.step all ended with gradients that no step of the %s has used: from now on "
            "they are taken for left over; if they are accumulated, a resumed run lacks them: bracket whole windows%s"
        )
        advice = "" if self._guard.optimizers else ", or attach the optimizers"
        name = type(waiting).__qualname__
        write(logging.WARNING, "unused_gradients", text, _PATIENCE, name, advice, step=step, store=self._store)
        return True

    def close(self) -> None:
        """Let go of all optimizers."""
        for hooks in list(self._hooks.values()):
            hooks.remove(self._after_step)
        self._hooks.clear()
        self._used.clear()

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._stepped.add(optimizer)
        # Of one that is attached it is enough to know that. In a fork() nobody asks.
        if self._patience is not None and (len(self._hooks) > 1 or not self._guard.optimizers):
            self._note(optimizer)

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, gradient in _gradients(optimizer):
            self._used[id(parameter)] = weakref.ref(gradient), gradient._version

    def _has_unused(self, optimizer: torch.optim.Optimizer) -> bool:
        for parameter, gradient in _gradients(optimizer):
            used, version = self._used.get(id(parameter), (None, 0))
            if used is None or used() is not gradient or version != gradient._version:
                return True
        return False


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (parameter.is_leaf or parameter.retains_grad) and (gradient := parameter.grad) is not None:
                yield parameter, gradient


def _optimizers(state: Mapping[str, Any]) -> Iterator[torch.optim.Optimizer]:
    for value in state.values():
        if isinstance(value, torch.optim.Optimizer):
            yield value
        elif isinstance(value, dict | list | tuple) and len(value) <= _MOST_ITEMS:
            for item in value.values() if isinstance(value, dict) else value:
                if isinstance(item, torch.optim.Optimizer):
                    yield item
