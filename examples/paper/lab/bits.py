"""Whether two states are the same in every bit, and a state made useless before something is restored into it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["differences", "scribble"]


def differences(one: Any, other: Any) -> list[str]:
    """Return the paths of what differs; types count, and so does every bit."""
    return list(_differences(one, other, ""))


def _differences(one: Any, other: Any, path: str) -> Iterator[str]:
    if type(one) is not type(other) and not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        yield f"{path or '.'} ({type(one).__name__} and {type(other).__name__})"
    elif isinstance(one, dict):
        if list(one) != list(other):
            yield f"{path or '.'} (other keys)"
        else:
            for key in one:
                yield from _differences(one[key], other[key], f"{path}.{key}" if path else str(key))
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            yield f"{path} ({len(one)} and {len(other)} items)"
        for at, pair in enumerate(zip(one, other, strict=False)):
            yield from _differences(*pair, f"{path}.{at}")
    elif not _same(one, other):
        yield path


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return torch.equal(_bytes(one), _bytes(other))
    if isinstance(one, np.ndarray):
        return bool((one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()))
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    return bool(one == other)


def scribble(state: Any) -> None:
    """Overwrite every tensor of a state."""
    if isinstance(state, torch.Tensor):
        _bytes(state).fill_(0xA5) if state.is_contiguous() and state.dtype != torch.bool else state.zero_()
    elif isinstance(state, dict):
        for value in state.values():
            scribble(value)
    elif isinstance(state, list | tuple):
        for value in state:
            scribble(value)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
