# SPDX-License-Identifier: Apache-2.0
"""Patterns: the structure of a live value, which ``_ext.match`` compares with the value at the next save.

The outline of a state has its patterns, the nodes that the walk over it made, and the plain values; it holds no array,
and nothing about the arrays' memory, which is examined anew at every save (:mod:`.state.cache.layout_cache`). Each item
of the outermost mapping is compared separately.

A pattern is None for a plain value, a type for an array of exactly this type, ``...`` for a value that does not matter,
:data:`NEVER` for one that is walked at every save, and else one of the tuples below. Patterns hold no array.

Modules and optimizers whose classes do not override torch's ``state_dict()``, and that have no hooks on it, have it
called once. Later saves read their attributes instead, as torch does, and compare them with the pattern. Everything
that determines the structure of ``state_dict()`` is in the pattern, or in the class (:func:`readable`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import repeat
from operator import attrgetter, is_
from types import EllipsisType, NoneType
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from msgspec import structs
from torch.optim import Optimizer

from pccheck_async.format import dtypes
from pccheck_async.format.skeleton import ArrayNode, Node, ShardedNode, StatefulNode

try:
    from pccheck_async import _ext
except ImportError:
    compare = None  # every state is walked anew
else:
    compare = _ext.match

_ITEMS, _ORDERED, _SEQUENCE, _STATEFUL, _OBJECT, _KEYED, _PARAMETERS, _EQUAL = range(8)

NEVER: Final = False
"""Pattern that matches nothing."""


class Items(NamedTuple):
    """Pattern of a dict with exactly these keys."""

    tag: int
    kind: type
    keys: tuple[Any, ...]
    children: tuple[Pattern, ...]
    plain: int
    """Number of plain values in the dict, at any depth; likewise in the patterns below."""


class Ordered(NamedTuple):
    """Pattern of an OrderedDict with attributes."""

    tag: int
    attributes: Items
    items: Items
    plain: int


class Sequence(NamedTuple):
    """Pattern of a list or tuple."""

    tag: int
    kind: type
    children: tuple[Pattern, ...]
    plain: int


class Asked(NamedTuple):
    """Pattern of an object whose ``state_dict()`` is called at every save."""

    tag: int
    kind: type
    path: str
    child: Pattern
    plain: int


class Read(NamedTuple):
    """Pattern of an object whose attributes are read instead of calling its ``state_dict()``."""

    tag: int
    kind: type
    absent: tuple[str, ...]
    names: tuple[str, ...]
    children: tuple[Any, ...]
    state: Pattern
    """Pattern of the ``state_dict()``, with the same plain values in the same order; None inside another ``Read``."""
    plain: int


Pattern: TypeAlias = Items | Ordered | Sequence | Asked | Read | type | EllipsisType | bool | None


def items(kind: type, keys: Iterable[Any], children: Iterable[Pattern]) -> Items:
    """Return the pattern of a dict."""
    below = (*children,)
    return Items(_ITEMS, kind, (*keys,), below, sum(map(plain_in, below)))


def ordered(attributes: Items, inside: Items) -> Ordered:
    """Return the pattern of an OrderedDict."""
    return Ordered(_ORDERED, attributes, inside, attributes.plain + inside.plain)


def sequence(kind: type, children: Iterable[Pattern]) -> Sequence:
    """Return the pattern of a list or tuple."""
    below = (*children,)
    return Sequence(_SEQUENCE, kind, below, sum(map(plain_in, below)))


def asked(kind: type, path: str, child: Pattern) -> Asked:
    """Return the pattern of an object whose ``state_dict()`` is called."""
    return Asked(_STATEFUL, kind, path, child, plain_in(child))


def plain_in(pattern: Pattern) -> int:
    """Return the number of plain values in any value that matches a pattern."""
    if isinstance(pattern, (Items, Ordered, Sequence, Asked, Read)):
        return pattern.plain
    return int(pattern is None)


def remade(pattern: Pattern, node: Any, at: int, numbers: list[int], fresh: Mapping[int, Node]) -> Any:
    """Return a copy of ``node``, which matches ``pattern``, with the ``fresh`` nodes in place of some plain values.

    ``fresh`` has the new nodes by the numbers of the plain values, ``numbers`` these numbers in ascending order; ``at``
    is the number of the first plain value in ``node``.
    """
    if pattern is None:
        return fresh.get(at, node)
    count = plain_in(pattern)
    first = bisect_left(numbers, at)
    if not count or first == len(numbers) or numbers[first] >= at + count:
        return node

    def below(children: Iterable[Pattern], nodes: Iterable[Any], at: int) -> list[Any]:
        found = []
        for child, each in zip(children, nodes, strict=True):
            found.append(remade(child, each, at, numbers, fresh))
            at += plain_in(child)
        return found

    match pattern:
        case Items():
            return structs.replace(node, values=below(pattern.children, node.values, at))
        case Ordered():
            metadata = below(pattern.attributes.children, node.metadata, at)
            values = below(pattern.items.children, node.values, at + pattern.attributes.plain)
            return structs.replace(node, metadata=metadata, values=values)
        case Sequence():
            return structs.replace(node, items=below(pattern.children, node.items, at))
        case Asked():
            return StatefulNode(remade(pattern.child, node.child, at, numbers, fresh))
        case Read():
            return StatefulNode(remade(pattern.state, node.child, at, numbers, fresh))
    raise AssertionError(pattern)


_OF_MODULES: Final = ("state_dict", "_save_to_state_dict", "get_extra_state", "__getattribute__")
_OF_OPTIMIZERS: Final = ("state_dict", "__getattribute__")
_VERSION: Final = ("_version", "_version.__class__")  # True == 1
Depends: TypeAlias = tuple[Callable[[type], Any], Any]
"""A function that returns the facts about a class on which ``state_dict()`` depends, and its result for a class."""

_HOOKS_OF_MODULES: Final = ("_state_dict_pre_hooks", "_state_dict_hooks")
_HOOKS_OF_OPTIMIZERS: Final = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
_PARTS_OF_MODULES: Final = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
_PARTS_OF_OPTIMIZERS: Final = ("param_groups", "state")
_ABSENT_IN_MODULES: Final = ("state_dict", "_save_to_state_dict", "_version")
_ABSENT_IN_OPTIMIZERS: Final = ("state_dict",)
_DICTS: Final = (dict, OrderedDict)


def _depends(names: tuple[str, ...], attributes: tuple[str, ...]) -> Callable[[type], tuple[Any, ...]]:
    """Return a function of a class: whether the class has any of ``attributes``, and the values of its ``names``.

    ``attributes`` are normally set on objects only; a class that has one may define a property in its place.
    """
    get = attrgetter(*names)
    return lambda kind: (any(map(hasattr, repeat(kind), attributes)), *get(kind))


_READ: Final[Mapping[type, Callable[[type], tuple[Any, ...]]]] = {
    torch.nn.Module: _depends((*_OF_MODULES, *_VERSION), (*_PARTS_OF_MODULES, *_HOOKS_OF_MODULES)),
    Optimizer: _depends(_OF_OPTIMIZERS, (*_PARTS_OF_OPTIMIZERS, *_HOOKS_OF_OPTIMIZERS)),
}
"""Functions that return the facts about a class on which ``state_dict()`` depends, by torch's base class."""
_OF_TORCH: Final = {base: of(base) for base, of in _READ.items()}
_LEAVES: Final = (torch.Tensor, torch.nn.Parameter)


def readable(kind: type) -> Depends | None:
    """Return the facts on which ``state_dict()`` depends; None if it is not that of torch's Module or Optimizer."""
    base = next((base for base in _READ if issubclass(kind, base)), None)
    if base is None:
        return None
    of, torchs = _READ[base], _OF_TORCH[base]
    found, methods = of(kind), len(torchs) - len(_VERSION) * (base is torch.nn.Module)
    return None if found[:methods] != torchs[:methods] else (of, found)


def same_classes(classes: Mapping[type, Depends]) -> bool:
    """Return whether the facts about classes have not changed: a program may assign methods to a class."""
    return [of(kind) for kind, (of, _) in classes.items()] == [found for _, found in classes.values()]


class Reader:
    """Makes the pattern of one object whose attributes are read instead of a call of its ``state_dict()``."""

    def __init__(self) -> None:
        self.classes: dict[type, Depends] = {}
        """Classes of the objects that are read, with the facts on which their ``state_dict()`` depends."""

    def module(self, module: torch.nn.Module) -> Read | None:
        """Return the pattern of a module and all its submodules; None if its ``state_dict()`` has to be called."""
        attributes = vars(module)
        kind = type(module)
        if not self._as_in_torch(module, _ABSENT_IN_MODULES, (*_HOOKS_OF_MODULES, *_PARTS_OF_MODULES)):
            return None
        parameters, buffers, hidden, modules = (attributes[name] for name in _PARTS_OF_MODULES)
        if not {*map(type, (parameters, buffers, modules))}.issubset(_DICTS) or type(hidden) is not set:
            return None
        children = [type(None) if child is None else self.module(child) for child in modules.values()]
        tensors = [*map(type, parameters.values())]
        persistent = [... if name in hidden else type(buffer) for name, buffer in buffers.items()]
        if None in children or {*tensors, *persistent} - {*_LEAVES, NoneType, ...}:
            return None
        names: list[str] = [*_HOOKS_OF_MODULES]
        inside: list[Any] = [items(type(attributes[name]), (), ()) for name in _HOOKS_OF_MODULES]
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):  # one that renormalises is asked
            names, inside = [*names, "max_norm"], [*inside, type(None)]
        inside += [
            items(type(parameters), parameters, tensors),
            items(type(buffers), buffers, persistent),
            (_EQUAL, frozenset(hidden)),
            items(type(modules), modules, children),
        ]
        return Read(_OBJECT, kind, _ABSENT_IN_MODULES, (*names, *_PARTS_OF_MODULES), (*inside,), None, 0)

    def optimizer(self, optimizer: Optimizer, packed: Pattern) -> tuple[Read, list[int]] | None:
        """Return the pattern of an optimizer; None if its ``state_dict()``, of pattern ``packed``, has to be called.

        Also returns the numbers of those plain values in ``packed`` that are compared by structure: the lists of
        parameters.
        """
        hooks = _HOOKS_OF_OPTIMIZERS
        if not self._as_in_torch(optimizer, _ABSENT_IN_OPTIMIZERS, (*hooks, *_PARTS_OF_OPTIMIZERS)):
            return None
        attributes = vars(optimizer)
        groups, state = (attributes[name] for name in _PARTS_OF_OPTIMIZERS)
        if not isinstance(packed, Items) or packed.keys != ("state", "param_groups") or not isinstance(state, dict):
            return None
        values, described = packed.children
        if not isinstance(values, Items) or not isinstance(described, Sequence):
            return None
        parameters = [parameter for group in groups for parameter in group["params"]]
        place = {id(parameter): number for number, parameter in enumerate(parameters)}
        places = tuple(place.get(id(parameter), -1) for parameter in state)
        if places != values.keys or -1 in places or isinstance(state, OrderedDict):
            return None
        live, fixed, numbers, at = list[Items](), list[Items](), list[int](), values.plain
        for group, each in zip(groups, described.children, strict=True):
            if not isinstance(each, Items) or not {None}.issuperset(each.children) or each.keys[-1] != "params":
                return None
            at += each.plain
            numbers.append(at - 1)
            live.append(items(dict, group, [... if key == "params" else None for key in group]))
            fixed.append(items(dict, each.keys, (*each.children[:-1], ...)))
        children = (
            *(items(type(attributes[name]), (), ()) for name in hooks),
            (_PARAMETERS, "params", tuple(len(group["params"]) for group in groups)),
            (_KEYED, type(state), places, values.children),
            sequence(list, live),
        )
        names = (*hooks, "param_groups", "state", "param_groups")
        made = items(dict, packed.keys, (values, sequence(list, fixed)))
        return Read(_OBJECT, type(optimizer), _ABSENT_IN_OPTIMIZERS, names, children, made, made.plain), numbers

    def _as_in_torch(self, value: Any, absent: Iterable[str], names: Iterable[str]) -> bool:
        """Return whether an object has torch's ``state_dict()`` without hooks, and all attributes in ``names``.

        If so, record its class in ``classes``. ``absent`` are attributes that the object itself must not have.
        """
        kind, attributes = type(value), vars(value)
        depends = readable(kind)
        if depends is None or any(name in attributes for name in absent):
            return False
        if any(name not in attributes or ("hooks" in name and attributes[name]) for name in names):
            return False
        self.classes[kind] = depends
        return True


# -- the outline of a state


array_node: Final = lru_cache(1 << 16)(ArrayNode)
"""Function that returns the same node for the same index, so that nodes can be compared by identity."""

CHANGING: Final = object()
"""Stands in the outline for a plain value that may change in place: never identical to a value of the next save."""


@lru_cache(1 << 14)
def sharded_node(
    first: int, mesh: int, dtype: torch.dtype, plain: bool, shape: tuple[int, ...], offsets: tuple[tuple[int, ...], ...]
) -> ShardedNode:
    """Return the node of a tensor whose boxes are the leaves from ``first`` on; the same object for equal arguments."""
    nodes = tuple(map(array_node, range(first, first + len(offsets))))
    return ShardedNode(mesh, dtypes.TORCH_NAMES[dtype], plain, shape, offsets, nodes)


@dataclass(slots=True, eq=False)
class Outline:
    """The outline of one state; its items are those of the outermost mapping, after an OrderedDict's attributes."""

    make: Any  # makes the node of the mapping
    attributes: int  # how many of the items are attributes
    keys: list[str]
    key_nodes: list[Node]
    names: list[str]  # of the keys in paths
    patterns: tuple[Pattern, ...] = ()
    nodes: list[Node] = field(default_factory=list)
    leaves_at: list[int] = field(default_factory=list)  # number of the first leaf of each item, at last of all
    plain_at: list[int] = field(default_factory=list)  # and of the first plain value
    paths: list[str] = field(default_factory=list)  # of the leaves
    plain: list[Any] = field(default_factory=list)  # the plain values
    places: list[tuple[str, int, int]] = field(default_factory=list)  # their paths, depths, and the Statefuls around
    detached: list[range] = field(default_factory=list)  # see Leaves
    classes: dict[type, Depends] = field(default_factory=dict)  # of the objects that are read
    root: Any = None

    def holds(self, make: Any, attributes: int, keys: list[str]) -> bool:
        """Return whether the outline is of a mapping with this kind and these keys, and no class has changed since."""
        return (
            make is self.make
            and attributes == self.attributes
            and keys == self.keys
            and (not self.classes or same_classes(self.classes))
        )


def same_objects(one: Iterable[object], other: Iterable[object]) -> bool:
    """Return whether two sequences of equal length hold the same objects."""
    return all(map(is_, one, other))
