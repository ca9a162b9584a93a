"""Lazy memory: it may be captured while training goes on, because only the step of an attached optimizer changes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pccheck_async.format.manifest import span
from pccheck_async.state.boxes import local_tensors
from pccheck_async.state.cache.tree_cache import same_objects
from pccheck_async.state.sources import Sources
from pccheck_async.state.storages import Layout, is_dense
from pccheck_async.state.tensor_access import storage_address

_Which: TypeAlias = npt.NDArray[np.bool_]

_address: Final = torch.Tensor.data_ptr
_is_contiguous: Final = torch.Tensor.is_contiguous
_nbytes: Final = attrgetter("nbytes")
_requires_grad: Final = attrgetter("requires_grad")


def optimized(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return the parameters that ``optimizers`` change, and the tensors they keep for them (moments, step counts).

    Frozen parameters are none of them: other code may change those (the key encoder of MoCo follows by hand).
    """
    parameters, kept = _held(optimizers)
    return local_tensors([*filter(_requires_grad, parameters), *kept])


def _held(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return all parameters of ``optimizers``, and the tensors they keep for them."""
    parameters: list[torch.Tensor] = []
    states: list[dict[Any, Any]] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters += group["params"]
        states += [each for each in optimizer.state.values() if isinstance(each, dict)]
    kept = [*chain.from_iterable(map(dict.values, states))]
    if not {torch.Tensor}.issuperset(map(type, kept)):
        kept = [value for value in kept if isinstance(value, torch.Tensor)]
    return parameters, kept


def sharing_nothing(tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of ``tensors`` that share no storage with ``others``: two parameters may have the same memory."""
    shared = {*map(storage_address, others)} - {0}
    return [tensor for tensor in tensors if storage_address(tensor) not in shared]


def changed_by_forward(objects: Iterable[Any]) -> list[torch.Tensor]:
    """Return the weights of embeddings with ``max_norm`` in the modules among ``objects``: a forward changes them."""
    level = [each for each in objects if isinstance(each, torch.nn.Module)]
    modules: set[torch.nn.Module] = set()
    while level:
        modules.update(level)
        children = [child for module in level for child in module._modules.values()]
        level = [child for child in children if child is not None and child not in modules]
    tables = [module for module in modules if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))]
    return local_tensors([table.weight for table in tables if table.max_norm is not None])


def lazy_sources(
    layout: Layout, optimizers: Sequence[torch.optim.Optimizer], leaves: Sequence[Any], objects: Sequence[Any] = ()
) -> tuple[_Which, bool]:
    """Return which sources lie in memory that only steps of ``optimizers`` change, and whether all do.

    The array is not to be changed. Parameters that the forward of modules among ``objects`` changes are none of them.
    The answer is remembered if all tensors of the optimizers are ``leaves`` themselves: it follows from which ones are
    meant, for as long as none moved.
    """
    changing = changed_by_forward(objects) if objects else []
    held = [*chain.from_iterable(_held(optimizers))]
    numbers, found = layout.known.get("lazy sources", (layout.sources.addresses,)) or ((), None)
    same = len(numbers) == len(held) and same_objects(held, map(leaves.__getitem__, numbers))
    if found is not None and same and not changing:
        return found  # type: ignore[no-any-return]
    tensors = optimized(optimizers)
    which = covered(layout.sources, sharing_nothing(tensors, changing) if changing else tensors)
    found = which, bool(which.all())
    number_of = {id(leaf): number for number, leaf in enumerate(leaves)}
    if not changing and number_of.keys() >= {*map(id, held)}:
        numbers = [number_of[id(each)] for each in held]
        layout.known.set("lazy sources", (layout.sources.addresses,), (numbers, found))
    return found


def covered(sources: Sources, tensors: Sequence[torch.Tensor]) -> _Which:
    """Return which of ``sources`` lie with all their bytes in memory that ``tensors`` take; packed ones do not.

    Tensors with holes in them, and those without plain memory, are left out.
    """
    lows, highs = _ranges(tensors)
    if not len(lows):
        return np.zeros(len(sources), np.bool_)
    order = np.argsort(lows, kind="stable")
    lows, highs = lows[order], np.maximum.accumulate(highs[order])
    apart = lows[1:] > highs[:-1]  # ranges that touch are one: leaves that touch are one extent
    lows, highs = lows[np.append(True, apart)], highs[np.append(apart, True)]
    addresses = sources.addresses.astype(np.int64)
    at = np.searchsorted(lows, addresses, side="right") - 1
    inside: _Which = (at >= 0) & (addresses + sources.lengths <= highs[at]) & ~sources.packed
    return inside


def _ranges(tensors: Sequence[torch.Tensor]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    try:
        dense = [*map(_is_contiguous, tensors)]  # no Python per tensor: there may be ten thousands
        lows = np.fromiter(map(_address, tensors), np.int64, len(tensors))
    except RuntimeError:  # a tensor without plain memory: sparse, or of a class that wraps others
        return _ranges([tensor for tensor in tensors if _has_memory(tensor)])
    if not all(dense):
        dense = [flag or _is_run(each) for flag, each in zip(dense, tensors, strict=True)]
    highs = lows + np.fromiter(map(_nbytes, tensors), np.int64, len(tensors))
    known = (lows > 0) & (lows < highs) & np.array(dense, np.bool_)
    return lows[known], highs[known]


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        tensor.is_contiguous()
        return tensor.data_ptr() > 0
    except RuntimeError:
        return False


def _is_run(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor are one run, in any order."""
    shape, stride = tensor.shape, tensor.stride()
    return is_dense(shape, stride, 1) and span(shape, stride)[1] + 1 == tensor.numel()
