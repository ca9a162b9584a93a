"""How a live nn.Module shows its own parameters, and which of what is stored it makes something else of."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch

__all__ = ["Deciders", "deciders", "live_state"]

_STRICT: Final = ("torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm")
"""Modules of torch whose own way to load differs only for what versions before 0.4.1 saved."""


def live_state(module: torch.nn.Module) -> Mapping[str, Any]:
    """Return the module's state with its Parameters themselves in it.

    Given back to ``load_state_dict``, a Parameter is copied onto itself, which torch leaves out. A module whose own
    ``state_dict`` does not take ``keep_vars`` shows detached tensors, which share the Parameters' memory.
    """
    parameters = inspect.signature(module.state_dict).parameters.values()
    takes = any(p.name == "keep_vars" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    state: Mapping[str, Any] = module.state_dict(keep_vars=True) if takes else module.state_dict()
    return state


class Deciders(NamedTuple):
    """The modules in a module that see what is stored before it is loaded, by the prefixes of their keys.

    Attributes:
        all: Hooks and overridden methods may rename keys there, and resize what is live.
        users: Those of them that are not torch's may do anything, also with what fits.
    """

    all: tuple[str, ...]
    users: tuple[str, ...]


def deciders(module: torch.nn.Module) -> Deciders:
    """Return which parts of a module load in a way of their own."""
    found = {f"{name}." if name else "": [*_ways(part)] for name, part in module.named_modules(remove_duplicate=False)}
    load = type(module).load_state_dict
    if load is not torch.nn.Module.load_state_dict:
        found[""].append(load.__module__)
    own = {prefix: ways for prefix, ways in found.items() if ways}
    users = [prefix for prefix, ways in own.items() if not all(way.startswith("torch.") for way in ways)]
    return Deciders(tuple(own), tuple(users))


def _ways(part: torch.nn.Module) -> Iterator[str]:
    """Yield where the hooks and methods come from that load one module."""
    for hook in part._load_state_dict_pre_hooks.values():
        yield getattr(getattr(hook, "hook", hook), "__module__", "") or ""
    method: Any = type(part)._load_from_state_dict
    if method is not torch.nn.Module._load_from_state_dict and method.__module__ not in _STRICT:
        yield method.__module__
