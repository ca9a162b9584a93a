"""What torch's optimizers need beside ``load_state_dict``: a check before it, and a repair after it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.format.manifest import TensorEntry
from pccheck_async.format.skeleton import ArrayNode, ListNode, MappingNode, Node
from pccheck_async.state import paths
from pccheck_async.state.restore.rebuild import mapping_keys

__all__ = ["differences", "entries", "has_hooks", "load", "places"]


_MOMENTS: Final = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg")
_LIKE_PARAMETER: Final = frozenset({*_MOMENTS, "acc_delta", "sum", "ax", "prev", "step_size"})
"""State of torch's own optimizers that has the shape of its parameter."""
_HOOKS: Final = "_optimizer_load_state_dict_pre_hooks"


def differences(
    optimizer: torch.optim.Optimizer,
    own: Mapping[str, Any],
    node: Node,
    tensors: Sequence[TensorEntry],
    path: str,
) -> list[str]:
    """Return how the parameters of a live optimizer differ from those of the stored state.

    Nothing is said of one that has hooks which see the stored state first: they may be there to make it fit.

    Args:
        optimizer: The live one.
        own: Its ``state_dict()``.
        node: The stored state.
        tensors: The stored tensors.
        path: Where the optimizer is.

    Raises:
        UnsupportedStateError: Something is stored of a parameter that has no shape yet.
    """
    _refuse_lazy(optimizer, own, node, path)
    if has_hooks(optimizer):
        return []
    found = _group_differences(optimizer, own, node, path)
    if not found and type(optimizer).__module__.startswith("torch.optim"):
        found = _shape_differences(optimizer, own, node, tensors, path)
    return found


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether there are hooks that see a state before it is loaded."""
    return bool(getattr(optimizer, _HOOKS, None))


def _refuse_lazy(optimizer: torch.optim.Optimizer, own: Mapping[str, Any], node: Node, path: str) -> None:
    if not any(map(is_lazy, chain.from_iterable(group["params"] for group in optimizer.param_groups))):
        return
    state = entries(entries(node).get("state"))
    for number, parameter in _parameters(optimizer, own):
        if is_lazy(parameter) and number in state:
            raise UnsupportedStateError(
                f"{path}.state.{number}: its parameter is that of a lazy module, and not initialized yet; run the "
                "module once before restoring"
            )


def _group_differences(optimizer: torch.optim.Optimizer, own: Mapping[str, Any], node: Node, path: str) -> list[str]:
    groups = own.get("param_groups")
    stored = entries(node).get("param_groups")
    where = paths.child(path, "param_groups")
    if not isinstance(groups, list):
        return []  # an optimizer with a state of its own kind
    if not isinstance(stored, ListNode):
        return [f"{where} (not in the checkpoint)"]
    if len(groups) != len(stored.items):
        return [f"{where} ({len(groups)} groups here, {len(stored.items)} in the checkpoint)"]
    found = []
    for index, (group, item) in enumerate(zip(groups, stored.items, strict=True)):
        parameters = entries(item).get("params")
        count = len(parameters.items) if isinstance(parameters, ListNode) else 0
        if len(group["params"]) != count:
            found.append(f"{where}.{index}.params ({len(group['params'])} parameters here, {count} in the checkpoint)")
        trouble = _other_kind(optimizer, group, item)
        if trouble:
            found.append(f"{where}.{index} ({trouble})")
    return found


def _other_kind(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], node: Node) -> str:
    """Why a stored group is another kind of optimizer's; empty where it may be this one's.

    Flags (None or a bool) that the checkpoint lacks are no reason: a newer torch added them, and fills them in. Nor is
    what the checkpoint has beyond (schedulers and users put keys of their own into groups), unless a setting without
    which this optimizer cannot step is lacking.
    """
    stored = entries(node).keys()
    if not stored:
        return ""
    defaults: Mapping[str, Any] = getattr(optimizer, "defaults", {})
    lacking = {key for key, value in defaults.items() if value is not None and not isinstance(value, bool)} - stored
    beyond = stored - group.keys()
    if not lacking or not beyond:
        return ""
    lists = [", ".join(sorted(map(str, keys))) for keys in (lacking, beyond)]
    return f"another optimizer's: for {type(optimizer).__qualname__} it lacks {lists[0]}, and has {lists[1]}"


def _shape_differences(
    optimizer: torch.optim.Optimizer, own: Mapping[str, Any], node: Node, tensors: Sequence[TensorEntry], path: str
) -> list[str]:
    found = []
    for where, index, parameter in _like_parameters(optimizer, own, node):
        shape = tensors[index].shape
        if shape != tuple(parameter.shape):
            here = tuple(parameter.shape)
            found.append(f"{path}.state.{where} ({shape} in the checkpoint, of a parameter {here} here)")
    return found


def places(optimizer: torch.optim.Optimizer, own: Mapping[str, Any], node: Node) -> Iterator[tuple[int, torch.device]]:
    """Yield which stored arrays ``load_state_dict`` will want on which device, where that is known.

    Args:
        optimizer: The live one, between which and the stored state no :func:`differences` were found.
        own: Its ``state_dict()``.
        node: The stored state.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        for _, index, parameter in _like_parameters(optimizer, own, node):
            yield index, parameter.device


def _like_parameters(
    optimizer: torch.optim.Optimizer, own: Mapping[str, Any], node: Node
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield number and key, index of the stored array, and parameter, for all that has the shape of its parameter."""
    state = entries(entries(node).get("state"))
    for number, parameter in _parameters(optimizer, own):
        for key, value in entries(state.get(number)).items():
            if key in _LIKE_PARAMETER and isinstance(value, ArrayNode):
                yield f"{number}.{key}", value.index, parameter


def _parameters(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield what a state calls each parameter, and the parameter; nothing of a state that is of its own kind."""
    groups = state.get("param_groups")
    numbers = chain.from_iterable(group["params"] for group in groups) if isinstance(groups, list) else ()
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return zip(numbers, parameters, strict=isinstance(groups, list))


def load(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Load ``state``, and undo what torch does to it on the way.

    ``load_state_dict`` casts the state of a parameter to the parameter's dtype (float32 moments of a bfloat16 parameter
    lose their low bits) and iterates over strings in it. Hooks of users' own come before and after that: what counts is
    what they made of ``state``, and they have the last word.
    """
    loaded = [state]  # the last is what torch gets; emptied once it is repaired
    handles = []
    if hasattr(optimizer, _HOOKS):  # a wrapper of another optimizer may have none
        handles = [
            optimizer.register_load_state_dict_pre_hook(lambda _, state: loaded.append(state)),
            optimizer.register_load_state_dict_post_hook(lambda _: _repair(optimizer, loaded), prepend=True),
        ]
    try:
        optimizer.load_state_dict(state)
    finally:
        for handle in handles:
            handle.remove()
    _repair(optimizer, loaded)


def _repair(optimizer: torch.optim.Optimizer, loaded: list[Any]) -> None:
    state = loaded[-1] if loaded else None
    loaded.clear()
    if not isinstance(state, Mapping) or "state" not in state or "param_groups" not in state:
        return
    for number, parameter in _parameters(optimizer, state):
        if number in state["state"] and parameter in optimizer.state:
            optimizer.state[parameter] = _repaired(optimizer.state[parameter], state["state"][number])


def _repaired(loaded: Any, stored: Any) -> Any:
    if isinstance(stored, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == stored.dtype else stored.to(loaded.device)
    if isinstance(stored, str):
        return stored
    if isinstance(stored, dict) and isinstance(loaded, dict):
        for key in stored.keys() & loaded.keys():
            loaded[key] = _repaired(loaded[key], stored[key])
    elif type(stored) in (list, tuple) and type(loaded) is type(stored) and len(loaded) == len(stored):
        return type(stored)(_repaired(one, other) for one, other in zip(loaded, stored, strict=True))
    return loaded


def entries(node: Node) -> dict[Hashable, Node]:
    """Return what a stored mapping holds; nothing of what is none."""
    if isinstance(node, MappingNode):
        return dict(zip(mapping_keys(node), node.values, strict=True))
    return {}
