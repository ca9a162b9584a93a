"""How a live nn.Module shows its own parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["live_state"]


def live_state(module: torch.nn.Module) -> Mapping[str, Any]:
    """Return the module's state with its Parameters themselves in it.

    Given back to ``load_state_dict``, a Parameter is copied onto itself, which torch leaves out. A module whose own
    ``state_dict`` does not take ``keep_vars`` shows detached tensors, which share the Parameters' memory.
    """
    parameters = inspect.signature(module.state_dict).parameters.values()
    takes = any(p.name == "keep_vars" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    state: Mapping[str, Any] = module.state_dict(keep_vars=True) if takes else module.state_dict()
    return state
