"""Callbacks around the steps of optimizers, on behalf of all engines."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["Callback", "StepHooks", "hooks_of", "hooks_of_all", "unwrapped"]

Callback = Callable[[torch.optim.Optimizer], None]


class StepHooks:
    """What is called before and after each step of one optimizer, or before those of all.

    The hooks that call it are never removed: torch goes through its table of hooks meanwhile, and what is taken out of
    that as an engine closes is an error in the step of another thread. Without callbacks they do nothing.
    """

    def __init__(self) -> None:
        self.before: tuple[Callback, ...] = ()
        self.after: tuple[Callback, ...] = ()
        self._lock = threading.RLock()

    def add(self, *, before: Callback | None = None, after: Callback | None = None) -> None:
        """Call ``before`` and ``after`` from now on."""
        with self._lock:
            self.before += () if before is None else (before,)
            self.after += () if after is None else (after,)

    def remove(self, callback: Callback) -> None:
        """Do not call it any more."""
        with self._lock:
            self.before = tuple(each for each in self.before if each != callback)
            self.after = tuple(each for each in self.after if each != callback)

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """What torch calls first."""
        for callback in self.before:
            callback(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """What torch calls last."""
        for callback in self.after:
            callback(optimizer)


_hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, StepHooks] = weakref.WeakKeyDictionary()


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer whose step calls hooks: that inside a trainer's wrapper which only inherits its class.

    Those of Accelerate, Lightning and Fabric are such. Torch marks the ``step`` of a class when one of it is made.
    """
    seen: list[object] = []
    while not getattr(getattr(type(optimizer), "step", None), "hooked", False) and all(
        each is not optimizer for each in seen
    ):
        seen.append(optimizer)
        try:
            inner = optimizer.optimizer  # type: ignore[attr-defined]
        except Exception:  # noqa: BLE001 - a property of somebody's; it is not what training shall end by
            break
        if not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    return optimizer


def hooks_of(optimizer: torch.optim.Optimizer) -> StepHooks:
    """Return those of an optimizer. Raises TypeError where it has none."""
    try:
        _ = optimizer.param_groups
        hooks = _hooks.get(optimizer)
        if hooks is None:
            hooks = StepHooks()
            optimizer.register_step_pre_hook(hooks.before_step)
            optimizer.register_step_post_hook(hooks.after_step)
            _hooks[optimizer] = hooks
    except AttributeError:  # wrappers may inherit the methods, and have nothing that calls hooks
        raise TypeError(
            f"a {type(optimizer).__qualname__} has no hooks around its step; attach the torch.optim.Optimizer "
            "inside it, or call engine.wait_captured() before each of its steps"
        ) from None
    return hooks


@cache
def hooks_of_all() -> StepHooks:
    """Return those before every step of every optimizer."""
    hooks = StepHooks()
    register_optimizer_step_pre_hook(hooks.before_step)
    return hooks
