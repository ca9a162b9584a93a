"""Memory that may be captured while training goes on, because only an optimizer's step changes it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from operator import attrgetter, is_
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from pccheck_async.state.outline import Outline
from pccheck_async.state.sources import Sources

__all__ = ["LazyMemory", "ModuleParameters", "optimized"]

_address: Final = torch.Tensor.data_ptr
_is_contiguous: Final = torch.Tensor.is_contiguous
_nbytes: Final = attrgetter("nbytes")


def optimized(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return the parameters of ``optimizers``, and the tensors they keep for each of them (moments, step counts)."""
    found: list[torch.Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found += group["params"]
        for kept in optimizer.state.values():
            if isinstance(kept, dict):
                found += [value for value in kept.values() if isinstance(value, torch.Tensor)]
    return found


class ModuleParameters:
    """What the modules of a state tell of their parameters. May be used from several threads.

    Parameters are looked up only where the state's outline is another one, or other modules are in it: a parameter that
    was put in the place of one of them meanwhile is not known, and so captured eagerly.
    """

    def __init__(self) -> None:
        self._last: tuple[Outline | None, _Modules] = (None, _Modules([]))

    def look(self, objects: Iterable[Any], outline: Outline | None) -> _Modules:
        """Return what the modules among ``objects`` are now."""
        modules = [each for each in objects if isinstance(each, torch.nn.Module)]
        known, last = self._last
        if outline is None or outline is not known or not last.are(modules):
            last = _Modules(modules)
            self._last = outline, last
        return last


class _Modules:
    """Modules and all in them. They are not held."""

    def __init__(self, roots: Sequence[torch.nn.Module]) -> None:
        parts = [part for root in roots for part in root.modules()]
        self._roots = [weakref.ref(root) for root in roots]
        self._parts = [weakref.ref(part) for part in parts]
        self._children = [weakref.ref(child) for part in parts for child in _children(part)]
        self._all = [weakref.ref(parameter) for root in roots for parameter in root.parameters()]
        tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        self._tables = [weakref.ref(part) for part in parts if isinstance(part, tables)]

    def are(self, roots: Sequence[torch.nn.Module]) -> bool:
        """Whether these are the same modules with the same modules in them."""
        if len(roots) != len(self._roots) or not all(map(is_, roots, map(_alive, self._roots))):
            return False
        parts = [*map(_alive, self._parts)]
        if None in parts:
            return False
        children = [child for part in parts for child in _children(part)]
        return len(children) == len(self._children) and all(map(is_, children, map(_alive, self._children)))

    def frozen(self) -> list[torch.Tensor]:
        """Return those parameters that no optimizer changes (``requires_grad=False``)."""
        alive = map(_alive, self._all)
        return [parameter for parameter in alive if parameter is not None and not parameter.requires_grad]

    def changed_by_forward(self) -> list[torch.Tensor]:
        """Return those that change in the forward pass: the weights of embeddings with ``max_norm``."""
        alive = map(_alive, self._tables)
        return [table.weight for table in alive if table is not None and table.max_norm is not None]


def _alive(reference: weakref.ref[Any]) -> Any:
    return reference()


def _children(module: Any) -> list[Any]:
    return [child for child in module._modules.values() if child is not None]


class LazyMemory:
    """Ranges of memory, by address.

    Args:
        tensors: Whose bytes; those with holes between them, and those without plain memory, are left out.
        without: Tensors among them that are left out, too.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], without: Iterable[torch.Tensor] = ()) -> None:
        excluded = set(map(id, without))
        lows, highs = _ranges([tensor for tensor in tensors if id(tensor) not in excluded])
        order = np.argsort(lows, kind="stable")
        lows, highs = lows[order], np.maximum.accumulate(highs[order]) if len(order) else highs
        first = np.ones(len(lows), np.bool_)
        first[1:] = lows[1:] > highs[:-1]  # ranges that touch are one: leaves that touch are one extent
        self._lows = lows[first]
        self._highs = highs[np.flatnonzero(np.append(first[1:], True))] if len(lows) else highs

    def covers(self, sources: Sources) -> npt.NDArray[np.bool_]:
        """Return which of ``sources`` lie in it with all their bytes; packed ones do not."""
        lows = sources.addresses.astype(np.int64)
        return self._around(lows, lows + sources.lengths) & ~sources.packed

    def _around(self, lows: npt.NDArray[np.int64], highs: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        if not len(self._lows):
            return np.zeros(len(lows), np.bool_)
        at = np.searchsorted(self._lows, lows, side="right") - 1
        return (at >= 0) & (highs <= self._highs[at])


def _ranges(tensors: list[torch.Tensor]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    try:
        dense = [*map(_is_contiguous, tensors)]  # no Python per tensor: there may be ten thousands
        lows = np.fromiter(map(_address, tensors), np.int64, len(tensors))
    except RuntimeError:  # a tensor without plain memory: sparse, or of a class that wraps others
        return _ranges([tensor for tensor in tensors if _has_memory(tensor)])
    if not all(dense):
        dense = [flag or _is_run(each.shape, each.stride()) for flag, each in zip(dense, tensors, strict=True)]
    highs = lows + np.fromiter(map(_nbytes, tensors), np.int64, len(tensors))
    known = (lows > 0) & (lows < highs) & np.array(dense, np.bool_)
    return lows[known], highs[known]


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        tensor.is_contiguous()
        return tensor.data_ptr() > 0
    except RuntimeError:
        return False


def _is_run(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements of a tensor are one run, in whatever order."""
    reach = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step != reach:
                return False
            reach *= size
    return True
