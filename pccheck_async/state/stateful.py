# SPDX-License-Identifier: Apache-2.0
"""Stateful objects, their places in a live state, and dicts there that a ``state_dict()`` returned.

Such a dict holds the object's state at one moment. Its tensors are the object's own; all else is a copy, and restoring
into it does not reach the object. The dict of an optimizer, scheduler or scaler is recognised by values that it shares
with the live object: a dict that was loaded, or made by hand, is like any other. The dicts of RNGState and of loaders
share nothing, and are recognised by their keys. The dict of a module is filled in place, unless it has more than
tensors in it (extra state).
"""

from __future__ import annotations

import gc
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import NoneType
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.state import paths

_LEAVES: Final = frozenset((NoneType, bool, int, float, str, torch.Tensor, torch.nn.Parameter, np.ndarray))


@runtime_checkable
class Stateful(Protocol):
    """An object with a state of its own: a module, an optimizer, a scheduler, a loader, or a user's own.

    A class may also have ``check_state_dict(state_dict)``, which raises ValueError for a state that its
    ``load_state_dict`` would refuse. ``engine.restore`` calls it before it changes anything; arrays and objects in the
    state are then placeholders.
    """

    def state_dict(self) -> Any:
        """Return the state, made of any values that can be saved."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Set the object's state to one that ``state_dict()`` returned."""


def is_stateful(value: object) -> bool:
    """Return whether ``value`` is an object (not a class) with ``state_dict`` and ``load_state_dict``."""
    kind = type(value)
    return not isinstance(value, type) and hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")


def can_check(value: object) -> bool:
    """Return whether ``value`` has a ``check_state_dict``, defined where its ``load_state_dict`` is or in a subclass.

    False for modules and optimizers: their parts are compared one by one, and some have a method of that name.
    """
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return False
    names = ("check_state_dict", "load_state_dict")
    checker, loader = (next((kind for kind in type(value).__mro__ if name in vars(kind)), None) for name in names)
    return checker is not None and loader is not None and issubclass(checker, loader)


def live_state(module: torch.nn.Module) -> Mapping[str, Any]:
    """Return a module's state with the Parameters themselves: loading does not copy a parameter onto itself.

    If its own ``state_dict`` does not take ``keep_vars``, the state has detached tensors, which share the memory.
    """
    parameters = inspect.signature(module.state_dict).parameters.values()
    takes = any(p.name == "keep_vars" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    state: Mapping[str, Any] = module.state_dict(keep_vars=True) if takes else module.state_dict()
    return state


def containers_and_objects(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield path and value of every container and object in a live state, each object once, root first.

    The walk does not enter Stateful objects.
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


# -- dicts that a live object's state_dict() made, in place of the object

_SETTINGS: Final = (float, tuple, torch.Tensor)
"""Types of an optimizer's settings whose identity shows whether a dict shares them with a live optimizer."""
_SCALER: Final = frozenset({"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"})
_GENERATORS: Final = frozenset({"python", "numpy", "torch", "cuda"})
_PYTHON: Final = frozenset({"version", "words", "gauss"})
_POSITION: Final = frozenset({"epoch", "position", "size", "seed", "shuffle", "drop_last", "batch_size", "world_size"})
"""``_SCALER`` to ``_POSITION``: keys of the states of GradScaler, :class:`RNGState` and ResumableLoader."""


def state_dicts(state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield for each dict in a live state that stands for an object its place, in words, and the object's kind."""
    for path, value in containers_and_objects(state):
        owner = _owner(value) if isinstance(value, Mapping) else ""
        if owner:
            yield f"{_where(path)} is", owner


def refuse_filling(state: Mapping[str, Any]) -> None:
    """Raise UnsupportedStateError if an object's ``state_dict()`` stands in its place: restoring would not reach it."""
    for where, owner in state_dicts(state):
        raise UnsupportedStateError(
            f"{where} the state_dict() of a live {owner}, and what is restored into that dict does not reach the "
            f"{owner}; put the {owner} itself there, or None to get the dict that was saved"
        )


def _owner(value: Mapping[Any, Any]) -> str:
    """Return the kind of object whose state a dict is, if it cannot all be filled in place; empty for other dicts."""
    if "param_groups" in value:
        return "optimizer" if _of_live(value) else ""
    if "_last_lr" in value:
        return "scheduler" if _is_referenced([value["_last_lr"]], _is_scheduler) else ""
    if value.keys() == _SCALER:
        return "scaler" if _is_referenced([value["growth_factor"], value["backoff_factor"]], _is_scaler) else ""
    if value.keys() == _GENERATORS:  # users write such dicts themselves, too
        python = value["python"]
        return "RNGState" if isinstance(python, Mapping) and python.keys() == _PYTHON else ""
    if value.keys() >= _POSITION:
        return "ResumableLoader or its sampler"
    if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
        return "" if all(isinstance(item, torch.Tensor) for item in value.values()) else "module"
    return ""


def refuse_unstepped(value: Mapping[Any, Any], path: str) -> None:
    """Raise UnsupportedStateError for the dict of a live optimizer before its first step: it would never get moments.

    The dict of SGD without momentum, which has no moments, is accepted.
    """
    state = value.get("state")
    plain_sgd = all("dampening" in group and group.get("momentum") == 0 for group in _groups(value))
    if isinstance(state, dict) and not state and not plain_sgd and _of_live(value):
        raise UnsupportedStateError(
            f"{_where(path)} is the state_dict() of an optimizer before its first step, and will stay that; put the "
            "optimizer itself there, which is asked at every checkpoint"
        )


def _where(path: str) -> str:
    return f"{path}: this" if path else "the state"


def _groups(value: Mapping[Any, Any]) -> list[Mapping[str, Any]]:
    """Return the groups in an optimizer's dict that have parameters."""
    groups = value["param_groups"]
    dicts = [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    return [group for group in dicts if isinstance(group.get("params"), list) and group["params"]]


def _of_live(value: Mapping[Any, Any]) -> bool:
    """Return whether a live optimizer has the same object as a parameter's state in a dict, or else as a setting.

    Settings are compared if the dict has no state yet; True if none of them can identify the optimizer.
    """
    state = value.get("state")
    if not isinstance(state, Mapping):
        return False
    if state:
        first = next(iter(state.values()))
        return _is_referenced([first], lambda holder: isinstance(holder, dict) and _keyed_by_tensor(holder))
    groups = _groups(value)
    shown = [item for group in groups for item in group.values() if isinstance(item, _SETTINGS)]
    if not shown:
        return bool(groups)  # no value identifies it (SGD with lr=1), and none in it is worth a doubt
    return _is_referenced(shown, lambda holder: isinstance(holder, dict) and _keyed_by_tensor(holder.get("params")))


def _keyed_by_tensor(items: object) -> bool:
    return isinstance(items, (dict, list)) and isinstance(next(iter(items), None), torch.Tensor)


def _is_scheduler(holder: Any) -> bool:
    owner = holder.get("optimizer") if isinstance(holder, dict) else None
    return isinstance(holder, torch.optim.lr_scheduler.LRScheduler) or isinstance(owner, torch.optim.Optimizer)


def _is_scaler(holder: Any) -> bool:
    return isinstance(holder, torch.amp.GradScaler) or (isinstance(holder, dict) and "_growth_factor" in holder)


def _is_referenced(values: Iterable[object], by: Callable[[Any], bool]) -> bool:
    """Return whether any of these objects is referenced by an object for which ``by`` returns True."""
    return any(map(by, gc.get_referrers(*values)))
