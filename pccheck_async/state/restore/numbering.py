"""Whose a stored optimizer state is: of which parameters of the live optimizer, by their names or numbers.

torch's ``state_dict()`` calls parameters by their numbers, and ``load_state_dict()`` takes them in their order; what it
knows no parameter of, it keeps under the key that it has, where no step finds it. Others call them by their names
(``torch.distributed.checkpoint.state_dict``, FSDP), or make strings of the numbers (what is read of a folder of
``torch.distributed.checkpoint`` without an optimizer).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import torch
from msgspec import structs

from pccheck_async.format.skeleton import ListNode, MappingNode, Node, TupleNode
from pccheck_async.state import values
from pccheck_async.state.restore.optimizers import entries, has_hooks
from pccheck_async.state.stateful import parts

__all__ = ["Names", "names_in", "renumbered"]

Names = Mapping[int, set[str]]
"""What modules call their parameters, by the identity of those."""

_WRAPPERS: Final = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Components of names that come from a wrapper; those who save by names leave them out."""
_ADVICE: Final = (
    "put the module that has them into the state, too, or give the optimizer its named_parameters() (from torch 2.6 on)"
)
_SHOWN: Final = 5


def names_in(state: Mapping[str, Any]) -> Names:
    """Return what the modules in a state call their parameters."""
    found: dict[int, set[str]] = {}
    for _, part in parts(state):
        if isinstance(part, torch.nn.Module):
            for name, parameter in part.named_parameters(remove_duplicate=False):
                found.setdefault(id(parameter), set()).add(name)
    return found


def renumbered(
    optimizer: torch.optim.Optimizer, own: Mapping[str, Any], node: MappingNode, names: Callable[[], Names], path: str
) -> tuple[MappingNode, list[str]]:
    """Return the stored state with the live optimizer's numbers for whatever it calls the parameters.

    An optimizer with hooks that see the stored state first gets it as it is: they may be there for this very purpose.

    Args:
        optimizer: The live one.
        own: Its ``state_dict()``.
        node: The stored state.
        names: Gives what modules call its parameters; asked only where the stored state has names.
        path: Where the optimizer is.

    Returns:
        The state, and what in it is of no parameter here.
    """
    stored = entries(node)
    groups, state, items = own.get("param_groups"), stored.get("state"), stored.get("param_groups")
    if has_hooks(optimizer) or not isinstance(groups, list) or not isinstance(items, ListNode):
        return node, []
    stored_groups = [_StoredGroup(item) for item in items.items]
    sizes = [len(group.keys) for group in stored_groups]
    if any([len(each["params"]) for each in lists] != sizes for lists in (groups, optimizer.param_groups)):
        return node, []  # another make-up: that is said elsewhere
    kept = entries(state)
    named = any(group.names for group in stored_groups) or not all(map(_is_number, kept))
    known = names() if named else {}
    numbers: dict[Hashable, int | None] = {}  # by what the stored groups call the parameters
    aliases: dict[Hashable, int | None] = {}  # by what else may be meant
    troubles, made = [], []
    for index, group in enumerate(stored_groups):
        here, own_names = groups[index]["params"], groups[index].get("param_names", ())
        called = _called(here, own_names, optimizer.param_groups[index]["params"], known)
        order = [called.get(name, called.get(_bare(name))) for name in group.names]
        if set(order) != set(here) or len(order) != len(here):
            if group.by_name or (group.names and own_names):
                unknown = [name for name, number in zip(group.names, order, strict=True) if number is None]
                listed = _some(unknown or group.names)
                troubles.append(f"{path}.param_groups.{index} (of these names no parameter here: {listed})")
            order = here
        numbers.update(zip(group.keys, order, strict=True))
        for name, number in called.items():
            aliases[name] = number if aliases.setdefault(name, number) == number else None
        made.append(group.renumbered(here, order))
    aliases.update({str(key): number for key, number in numbers.items()})
    found = {key: numbers.get(key) for key in kept}
    taken = {*found.values(), None}
    for key, number in found.items():
        if number is None and (alias := aliases.get(key)) not in taken:
            found[key] = alias
            taken.add(alias)
    strange = [str(key) for key, number in found.items() if number is None and key not in own.get("state", {})]
    if strange and len(strange) == len(found):  # beside those of parameters, an optimizer may have keys of its own
        troubles.append(f"{path}.state (of no parameter here: {_some(strange)})")
    if troubles:
        return node, [f"{trouble[:-1]}; {_ADVICE})" for trouble in troubles]
    changed: dict[str, Node] = {"param_groups": ListNode(made)}
    if isinstance(state, MappingNode):
        keys = [key if number is None else number for key, number in zip(state.keys, found.values(), strict=True)]
        changed["state"] = structs.replace(state, keys=keys)
    items_of = [changed.get(key, value) if isinstance(key, str) else value for key, value in stored.items()]
    return structs.replace(node, values=items_of), []


class _StoredGroup:
    """Parameters as a stored group calls them: in ``params``, and by their names where it has any."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.keys = _items(entries(node).get("params"))
        self.by_name = not all(map(_is_number, self.keys))
        self.names = self.keys if self.by_name else _items(entries(node).get("param_names"))

    def renumbered(self, here: Sequence[int], order: Sequence[int | None]) -> Node:
        """Return the group as the live one would have saved it: its numbers, and names in their order."""
        node = self._node
        if not isinstance(node, MappingNode) or (list(order) == list(here) == self.keys):
            return node
        changed: dict[str, Node] = {"params": ListNode(list(here))}
        stored = entries(node)
        if isinstance(names := stored.get("param_names"), ListNode) and len(names.items) == len(order):
            by_number = dict(zip(order, names.items, strict=True))
            changed["param_names"] = ListNode([by_number[number] for number in here])
        new = [changed.get(key, value) if isinstance(key, str) else value for key, value in stored.items()]
        return structs.replace(node, values=new)


def _called(
    numbers: Sequence[int], own_names: Sequence[str], parameters: Sequence[torch.Tensor], known: Names
) -> dict[Hashable, int | None]:
    """Return which of a group's parameters has which name, also without wrappers; None for what several are called."""
    called: dict[Hashable, int | None] = {}
    for place, (number, parameter) in enumerate(zip(numbers, parameters, strict=True)):
        found = {*known.get(id(parameter), ()), *own_names[place : place + 1]}
        for name in found | {*map(_bare, found)}:
            called[name] = number if name not in called else None
    return called


def _bare(name: Hashable) -> str:
    return ".".join(part for part in str(name).split(".") if part not in _WRAPPERS)


def _is_number(key: Hashable) -> bool:
    return isinstance(key, int) or (isinstance(key, str) and key.isdecimal())


def _items(node: Node) -> list[Hashable]:
    return [values.from_node(item) for item in node.items] if isinstance(node, (ListNode, TupleNode)) else []


def _some(names: Sequence[Hashable]) -> str:
    return ", ".join(map(str, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
