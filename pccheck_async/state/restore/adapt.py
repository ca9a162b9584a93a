# SPDX-License-Identifier: Apache-2.0
"""Checks and repairs around the ``load_state_dict`` of modules and optimizers.

Torch's ``state_dict()`` of an optimizer identifies parameters by numbers; state under any other key is loaded, but no
step uses it. Other programs identify parameters by their names (``torch.distributed.checkpoint.state_dict``, FSDP), or
write the numbers as strings (a folder of ``torch.distributed.checkpoint`` that is read without an optimizer).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from msgspec import structs
from torch.nn.parameter import is_lazy

from pccheck_async.errors import UnsupportedStateError, first_few
from pccheck_async.format.manifest import TensorEntry
from pccheck_async.format.skeleton import ArrayNode, ListNode, MappingNode, Node, ShardedNode, TupleNode
from pccheck_async.state import paths, values
from pccheck_async.state.restore.tree import mapping_keys
from pccheck_async.state.stateful import containers_and_objects

# -- modules

_STRICT: Final = ("torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm")
"""Python modules of torch whose classes override loading only for states that torch before 0.4.1 saved."""


class OwnLoading(NamedTuple):
    """Prefixes of the keys of those parts of a module that have their own hooks or methods for loading."""

    all: tuple[str, ...]  # they may rename keys that are loaded, and resize live tensors
    users: tuple[str, ...]  # those whose hooks or methods are not torch's: they may also change keys and shapes

    def decides(self, key: str, live: Any, fits: Callable[[], bool], strict: bool) -> bool:
        """Return whether the part's own code must load a stored array from new memory: it is not filled in place.

        ``live`` is the live value, and ``fits`` returns whether it could take the stored bytes in place.
        """
        if not key.startswith(self.all) or is_lazy(live):
            return False
        if isinstance(live, (torch.Tensor, np.ndarray)) and fits():
            return key.startswith(self.users)
        return strict


def own_loading(module: torch.nn.Module) -> OwnLoading:
    """Return which parts of a module have their own hooks or methods for loading."""
    modules = module.named_modules(remove_duplicate=False)
    ways_of = {f"{name}." if name else "": [*_ways(part)] for name, part in modules}
    load = type(module).load_state_dict
    if load is not torch.nn.Module.load_state_dict:
        ways_of[""].append(load.__module__)
    own = {prefix: ways for prefix, ways in ways_of.items() if ways}
    users = [prefix for prefix, ways in own.items() if not all(way.startswith("torch.") for way in ways)]
    return OwnLoading(tuple(own), tuple(users))


def _ways(part: torch.nn.Module) -> Iterator[str]:
    """Yield the names of the Python modules that define the hooks and methods with which ``part`` is loaded."""
    for hook in part._load_state_dict_pre_hooks.values():
        yield getattr(getattr(hook, "hook", hook), "__module__", "") or ""
    method: Any = type(part)._load_from_state_dict
    if method is not torch.nn.Module._load_from_state_dict and method.__module__ not in _STRICT:
        yield method.__module__


def with_tied(own: Mapping[Any, Any], node: MappingNode) -> MappingNode:
    """Return the stored state, completed by the names of tied tensors that it lacks.

    Tied tensors in ``own`` are the same memory under several names. A lacking name gets the stored value of another
    one: Hugging Face's files hold a tied parameter under one of its names only.
    """
    stored = dict(zip(mapping_keys(node), node.values, strict=True))
    plain = (torch.Tensor, torch.nn.Parameter)
    tensors = {key: value for key, value in own.items() if type(value) in plain and not is_lazy(value)}
    if tensors.keys() <= stored.keys():
        return node
    views = {key: (t.device, t.data_ptr(), t.dtype, t.shape, t.stride()) for key, t in tensors.items() if t.data_ptr()}
    names = {view: key for key, view in views.items() if key in stored}
    tied = {key: stored[names[view]] for key, view in views.items() if key not in stored and view in names}
    return structs.replace(node, keys=[*node.keys, *tied], values=[*node.values, *tied.values()])


def wrapped(missing: Collection[str], unexpected: Collection[str]) -> str:
    """Return advice if names differ by the prefix that a wrapper adds to a model's names; else an empty string."""
    for attribute, wrapper in (("module", "DistributedDataParallel or its like"), ("_orig_mod", "torch.compile")):
        prefix = paths.escape(f"{attribute}.")
        for where, longer, plain in (("here", missing, unexpected), ("in the checkpoint", unexpected, missing)):
            if not {path.replace(prefix, "", 1) for path in longer if prefix in path}.isdisjoint(plain):
                inside = f"save and restore the module inside (model.{attribute})"
                return f"a model {where} is wrapped by {wrapper}: {inside}"
    return ""


def load_into(live: torch.nn.Module, own: Mapping[Any, Any], stored: Mapping[Any, Any]) -> None:
    """Load ``stored``, completed from ``own``, into a module: its ``load_state_dict`` may require a complete state.

    ``own`` is the module's state; stored values whose keys it lacks are left out.
    """
    whole = OrderedDict((key, stored.get(key, value)) for key, value in own.items())
    metadata = {**getattr(own, "_metadata", {}), **getattr(stored, "_metadata", {})}
    if metadata:
        whole._metadata = metadata  # type: ignore[attr-defined]
    live.load_state_dict(whole)


# -- optimizers: the check before loading

Names: TypeAlias = Mapping[int, set[str]]
"""The names that modules give to parameters, by ``id(parameter)``."""

_MOMENTS: Final = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg")
_LIKE_PARAMETER: Final = frozenset({*_MOMENTS, "acc_delta", "sum", "ax", "prev", "step_size"})
"""Keys of torch's own optimizers under which they keep state that has the shape of its parameter."""
_HOOKS: Final = "_optimizer_load_state_dict_pre_hooks"


LikeParameter: TypeAlias = tuple[str, ArrayNode | ShardedNode, torch.Tensor]
"""Place of a stored array in the state (``"number.key"``), the array's node, and the parameter of the same shape."""


def optimizer_state(
    optimizer: torch.optim.Optimizer,
    own: Mapping[str, Any],
    node: MappingNode,
    tensors: Sequence[TensorEntry],
    names: Callable[[], Names],
    path: str,
) -> tuple[MappingNode, list[str], list[LikeParameter]]:
    """Compare the parameters of a live optimizer, whose state is ``own``, with those of the stored state ``node``.

    No differences are returned if the optimizer has load pre-hooks: they receive the stored state and may make it fit.

    Returns:
        The state to load, with the live optimizer's numbers for the parameters; messages on the differences; and if
        there are none, the arrays known to be shaped like a parameter: ``load_state_dict`` moves them to its device.

    Raises:
        UnsupportedStateError: The checkpoint has state for a parameter that is not initialized yet (lazy modules).
    """
    node, mismatches = _renumbered(optimizer, own, node, names, path)
    if any(map(is_lazy, chain.from_iterable(group["params"] for group in optimizer.param_groups))):
        state = _items(_items(node).get("state"))
        for number, parameter in _parameters(optimizer, own):
            if is_lazy(parameter) and number in state:
                raise UnsupportedStateError(
                    f"{path}.state.{number}: its parameter is that of a lazy module, and not initialized yet; run the "
                    "module once before restoring"
                )
    hooked = bool(getattr(optimizer, _HOOKS, None))
    others = [] if hooked else _group_differences(optimizer, own, node, path)
    alike = [] if others else like_parameters(optimizer, own, node)
    for where, value, parameter in () if hooked else alike:
        shape = tensors[value.index].shape if isinstance(value, ArrayNode) else value.shape
        if shape != (here := tuple(parameter.shape)):
            others.append(f"{path}.state.{where} ({shape} in the checkpoint, of a parameter {here} here)")
    mismatches += others
    return node, mismatches, [] if mismatches else alike


def _group_differences(optimizer: torch.optim.Optimizer, own: Mapping[str, Any], node: Node, path: str) -> list[str]:
    where, groups = paths.child(path, "param_groups"), own.get("param_groups")
    stored = _items(node).get("param_groups")
    if not isinstance(groups, list):
        return []  # an optimizer with a state of its own kind
    if not isinstance(stored, ListNode):
        return [f"{where} (not in the checkpoint)"]
    if len(groups) != len(stored.items):
        return [f"{where} ({len(groups)} groups here, {len(stored.items)} in the checkpoint)"]
    mismatches = []
    for index, (group, item) in enumerate(zip(groups, stored.items, strict=True)):
        parameters = _items(item).get("params")
        count = len(parameters.items) if isinstance(parameters, ListNode) else 0
        if (here := len(group["params"])) != count:
            mismatches.append(f"{where}.{index}.params ({here} parameters here, {count} in the checkpoint)")
        if trouble := _other_kind(optimizer, group, item):
            mismatches.append(f"{where}.{index} ({trouble})")
    return mismatches


def _other_kind(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], node: Node) -> str:
    """Return why a stored group is of another class of optimizers; empty if it may be of this one's.

    Settings that are None or a bool may be lacking: a newer torch added them, and supplies defaults. Keys that only the
    checkpoint has may come from schedulers and users, unless a setting that this optimizer needs is lacking, too.
    """
    stored = _items(node).keys()
    defaults: Mapping[str, Any] = getattr(optimizer, "defaults", {})
    lacking = {key for key, value in defaults.items() if value is not None and not isinstance(value, bool)} - stored
    beyond = stored - group.keys()
    if not lacking or not beyond:
        return ""
    lists = [", ".join(sorted(map(str, keys))) for keys in (lacking, beyond)]
    return f"another optimizer's: for {type(optimizer).__qualname__} it lacks {lists[0]}, and has {lists[1]}"


def like_parameters(optimizer: torch.optim.Optimizer, own: Mapping[str, Any], node: Node) -> list[LikeParameter]:
    """Return the stored arrays that are known to be shaped like a parameter, each with that parameter."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return []
    state, found = _items(_items(node).get("state")), []
    for number, parameter in _parameters(optimizer, own):
        moments = state.get(number)
        if isinstance(moments, MappingNode):
            for key, value in zip(moments.keys, moments.values, strict=True):
                if isinstance(value, (ArrayNode, ShardedNode)) and key in _LIKE_PARAMETER:
                    found.append((f"{number}.{key}", value, parameter))
    return found


def _parameters(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each parameter with its number in ``state``; nothing if that has no list of ``param_groups``."""
    groups = state.get("param_groups")
    numbers = chain.from_iterable(group["params"] for group in groups) if isinstance(groups, list) else ()
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return zip(numbers, parameters, strict=isinstance(groups, list))


def _items(node: Node) -> dict[Hashable, Node]:
    """Return the entries of a stored mapping; an empty dict for any other node."""
    return dict(zip(mapping_keys(node), node.values, strict=True)) if isinstance(node, MappingNode) else {}


# -- optimizers: loading, and the repair after it


def load(optimizer: torch.optim.Optimizer, state: Any, *, dtype: torch.dtype | None = None) -> None:
    """Load ``state`` into an optimizer, and undo the changes that torch's ``load_state_dict`` makes to the values.

    Torch casts the state of a parameter to the parameter's dtype (float32 moments of a bfloat16 parameter lose their
    low bits) and iterates over strings. Tensors that were cast to ``dtype`` stay so. The values are repaired after
    users' pre-hooks and before their post-hooks.
    """
    loaded = [state]  # torch gets the last; emptied once it is repaired
    with ExitStack() as hooks:
        if hasattr(optimizer, _HOOKS):  # a wrapper of another optimizer may have none
            repair = partial(_repair, loaded=loaded, dtype=dtype)
            hooks.enter_context(optimizer.register_load_state_dict_pre_hook(lambda _, state: loaded.append(state)))
            hooks.enter_context(optimizer.register_load_state_dict_post_hook(repair, prepend=True))
        optimizer.load_state_dict(state)
    _repair(optimizer, loaded, dtype)


def _repair(optimizer: torch.optim.Optimizer, loaded: list[Any], dtype: torch.dtype | None) -> None:
    state = loaded[-1] if loaded else None
    loaded.clear()
    if not isinstance(state, Mapping) or "state" not in state or "param_groups" not in state:
        return
    for number, parameter in _parameters(optimizer, state):
        if number in state["state"] and parameter in optimizer.state:
            optimizer.state[parameter] = _repaired(optimizer.state[parameter], state["state"][number], dtype)


def _repaired(loaded: Any, stored: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(stored, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype in (stored.dtype, dtype) else stored.to(loaded.device)
    if isinstance(stored, str):
        return stored
    if isinstance(stored, dict) and isinstance(loaded, dict):
        for key in stored.keys() & loaded.keys():
            if loaded[key] is not stored[key]:
                loaded[key] = _repaired(loaded[key], stored[key], dtype)
    elif type(stored) in (list, tuple) and type(loaded) is type(stored) and len(loaded) == len(stored):
        return type(stored)(_repaired(one, other, dtype) for one, other in zip(loaded, stored, strict=True))
    return loaded


# -- optimizers: which parameter a stored state belongs to

_WRAPPERS: Final = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Components that wrappers of models add to parameters' names; programs that save by names leave them out."""
_ADVICE: Final = (
    "put the module that has them into the state, too, or give the optimizer its named_parameters() (from torch 2.6 on)"
)
_SHOWN: Final = 5


def names_in(state: Mapping[str, Any]) -> Names:
    """Return the names that the modules in a live state give to their parameters."""
    names: dict[int, set[str]] = {}
    modules = [part for _, part in containers_and_objects(state) if isinstance(part, torch.nn.Module)]
    for name, parameter in chain.from_iterable(each.named_parameters(remove_duplicate=False) for each in modules):
        names.setdefault(id(parameter), set()).add(name)
    return names


def _renumbered(
    optimizer: torch.optim.Optimizer, own: Mapping[str, Any], node: MappingNode, names: Callable[[], Names], path: str
) -> tuple[MappingNode, list[str]]:
    """Return the stored state with parameters identified by the live optimizer's numbers; and messages on differences.

    Messages name stored entries that belong to no live parameter. For an optimizer with load pre-hooks the state is
    returned unchanged: they may be there to renumber it. ``names`` is called only if the state has names.
    """
    stored = _items(node)
    groups, state, items = own.get("param_groups"), stored.get("state"), stored.get("param_groups")
    if getattr(optimizer, _HOOKS, None) or not isinstance(groups, list) or not isinstance(items, ListNode):
        return node, []
    stored_groups = [_StoredGroup(item) for item in items.items]
    sizes = [len(group.keys) for group in stored_groups]
    if any([len(each["params"]) for each in lists] != sizes for lists in (groups, optimizer.param_groups)):
        return node, []  # the groups differ, which _group_differences() reports
    kept = _items(state)
    named = any(group.names for group in stored_groups) or not _are_numbers(kept)
    known = names() if named else {}
    numbers: dict[Hashable, int | None] = {}  # by the stored groups' names for the parameters
    aliases: dict[Hashable, int | None] = {}  # by the parameters' other names; None for a name that several have
    mismatches, made = [], []
    for index, group in enumerate(stored_groups):
        here, own_names = groups[index]["params"], groups[index].get("param_names", ())
        called = _called(here, own_names, optimizer.param_groups[index]["params"], known)
        order = [called.get(name, called.get(_unwrapped(name))) for name in group.names]
        if set(order) != set(here) or len(order) != len(here):
            if group.by_name or (group.names and own_names):
                unknown = [name for name, number in zip(group.names, order, strict=True) if number is None]
                listed = first_few(unknown or group.names, _SHOWN)
                mismatches.append(f"{path}.param_groups.{index} (of these names no parameter here: {listed})")
            order = here
        numbers.update(zip(group.keys, order, strict=True))
        for name, number in called.items():
            aliases[name] = number if aliases.setdefault(name, number) == number else None
        made.append(group.renumbered(here, order))
    aliases.update({str(key): number for key, number in numbers.items()})
    number_of = {key: numbers.get(key) for key in kept}
    used = {*number_of.values(), None}
    for key, number in number_of.items():
        if number is None and (alias := aliases.get(key)) not in used:
            number_of[key] = alias
            used.add(alias)
    orphans = [str(key) for key, number in number_of.items() if number is None and key not in own.get("state", {})]
    if orphans and len(orphans) == len(number_of):  # beside those of parameters, an optimizer may have other keys
        mismatches.append(f"{path}.state (of no parameter here: {first_few(orphans, _SHOWN)})")
    if mismatches:
        return node, [f"{mismatch[:-1]}; {_ADVICE})" for mismatch in mismatches]
    changed: dict[str, Node] = {"param_groups": ListNode(made)}
    if isinstance(state, MappingNode):
        keys = [key if number is None else number for key, number in zip(state.keys, number_of.values(), strict=True)]
        changed["state"] = structs.replace(state, keys=keys)
    return _changed(node, changed), []


class _StoredGroup:
    """The identifiers of parameters in a stored group: ``keys`` are its ``params``, and ``names`` may be empty."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.keys = _plain_items(_items(node).get("params"))
        self.by_name = not _are_numbers(self.keys)
        self.names = self.keys if self.by_name else _plain_items(_items(node).get("param_names"))

    def renumbered(self, here: Sequence[int], order: Sequence[int | None]) -> Node:
        """Return the stored group with the live numbers ``here`` as its ``params``, and its names in their order.

        ``order`` has the live number of each parameter in the stored order.
        """
        node = self._node
        if not isinstance(node, MappingNode) or (list(order) == list(here) == self.keys):
            return node
        changed: dict[str, Node] = {"params": ListNode(list(here))}
        names = _items(node).get("param_names")
        if isinstance(names, ListNode) and len(names.items) == len(order):
            by_number = dict(zip(order, names.items, strict=True))
            changed["param_names"] = ListNode([by_number[number] for number in here])
        return _changed(node, changed)


def _changed(node: MappingNode, changed: Mapping[str, Node]) -> MappingNode:
    """Return a stored mapping with the values in ``changed`` for the keys that are there."""
    items = _items(node).items()
    return structs.replace(node, values=[changed.get(k, v) if isinstance(k, str) else v for k, v in items])


def _called(
    numbers: Sequence[int], own_names: Sequence[str], parameters: Sequence[torch.Tensor], known: Names
) -> dict[Hashable, int | None]:
    """Return the numbers of a group's parameters by name, with and without wrappers' prefixes.

    The number is None for a name that several parameters have.
    """
    called: dict[Hashable, int | None] = {}
    for place, (number, parameter) in enumerate(zip(numbers, parameters, strict=True)):
        names = {*known.get(id(parameter), ()), *own_names[place : place + 1]}
        for name in names | {*map(_unwrapped, names)}:
            called[name] = number if name not in called else None
    return called


def _unwrapped(name: Hashable) -> str:
    return ".".join(part for part in str(name).split(".") if part not in _WRAPPERS)


def _are_numbers(keys: Collection[Hashable]) -> bool:
    """Return whether all keys are ints, or strings of digits."""
    return {*map(type, keys)} <= {int} or all(isinstance(key, int) or str(key).isdecimal() for key in keys)


def _plain_items(node: Node) -> list[Hashable]:
    if not isinstance(node, (ListNode, TupleNode)):
        return []
    return [item if type(item) is int else values.from_node(item) for item in node.items]
