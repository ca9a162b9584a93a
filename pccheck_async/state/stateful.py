"""Stateful objects, and their places in a live state."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch

from pccheck_async.state import paths

_LEAVES: Final = frozenset((NoneType, bool, int, float, str, torch.Tensor, torch.nn.Parameter, np.ndarray))


@runtime_checkable
class Stateful(Protocol):
    """An object with a state of its own: a module, an optimizer, a scheduler, a loader, or a user's own.

    A class may also have ``check_state_dict(state_dict)``, which raises ValueError for a state that its
    ``load_state_dict`` would refuse: ``engine.restore`` calls it before it changes anything, with placeholders for
    arrays and objects in the state.
    """

    def state_dict(self) -> Any:
        """Return the state, made of any values that can be saved."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Set the state to one that ``state_dict`` returned."""


def is_stateful(value: object) -> bool:
    """Return whether ``value`` is an object (not a class) with ``state_dict`` and ``load_state_dict``."""
    kind = type(value)
    return not isinstance(value, type) and hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")


def can_check(value: object) -> bool:
    """Return whether ``value`` has a ``check_state_dict`` for its own ``load_state_dict``, not for one it overrides.

    Modules and optimizers have none: their parts are compared one by one, and some have a method of that name.
    """
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return False
    names = ("check_state_dict", "load_state_dict")
    checker, loader = (next((kind for kind in type(value).__mro__ if name in vars(kind)), None) for name in names)
    return checker is not None and loader is not None and issubclass(checker, loader)


def live_state(module: torch.nn.Module) -> Mapping[str, Any]:
    """Return the module's state with its Parameters themselves in it, which torch does not copy onto themselves.

    A module whose own ``state_dict`` does not take ``keep_vars`` returns detached tensors, which share the memory.
    """
    parameters = inspect.signature(module.state_dict).parameters.values()
    takes = any(p.name == "keep_vars" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    state: Mapping[str, Any] = module.state_dict(keep_vars=True) if takes else module.state_dict()
    return state


def containers_and_objects(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield path and value of every container and object in a live state, root first.

    It does not descend into Stateful objects.
    """
    waiting: list[tuple[str, Any]] = [("", state)]
    seen: set[int] = set()
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield path, value
        mapping = isinstance(value, Mapping)
        if is_stateful(value) or not (mapping or isinstance(value, (list, tuple))):
            continue
        items = [*value.values()] if mapping else value
        if not _LEAVES.issuperset(map(type, items)):
            names = paths.components([*value]) if mapping else map(str, range(len(items)))
            each = [(name, item) for name, item in zip(names, items, strict=True) if type(item) not in _LEAVES]
            waiting += [(paths.child(path, name), item) for name, item in reversed(each)]
