"""Lazy memory: it may be captured while training goes on, because only the step of an attached optimizer changes it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pccheck_async.format.manifest import span
from pccheck_async.state.cache.fingerprints import fingerprint
from pccheck_async.state.cache.tree_cache import Outline
from pccheck_async.state.sources import Sources
from pccheck_async.state.storages import is_dense
from pccheck_async.state.tensor_access import untyped_storage

_Which: TypeAlias = npt.NDArray[np.bool_]

_address: Final = torch.Tensor.data_ptr
_is_contiguous: Final = torch.Tensor.is_contiguous
_nbytes: Final = attrgetter("nbytes")
_requires_grad: Final = attrgetter("requires_grad")


def optimized(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return the parameters that ``optimizers`` change, and the tensors they keep for them (moments, step counts).

    Frozen parameters are none of them: somebody else may change those (the key encoder of MoCo follows by hand).
    """
    tensors: list[torch.Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            tensors += filter(_requires_grad, group["params"])
        kept = [each for each in optimizer.state.values() if isinstance(each, dict)]
        tensors += [value for value in chain.from_iterable(map(dict.values, kept)) if isinstance(value, torch.Tensor)]
    return tensors


def sharing_nothing(tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of ``tensors`` that share no storage with ``others``: two parameters may have the same memory."""
    shared = set(map(_storage, others))
    return [tensor for tensor in tensors if _storage(tensor) not in shared]


def _storage(tensor: torch.Tensor) -> int:
    try:
        return untyped_storage(tensor).data_ptr()
    except (NotImplementedError, RuntimeError):  # none: sparse, or of a class that wraps others
        return -id(tensor)


class ChangingTables:
    """The weights of embeddings with ``max_norm``, which change in the forward pass. May be used from several threads.

    Embeddings are looked for only where the state's outline is another one, or other modules are in it.
    """

    def __init__(self) -> None:
        self._last: tuple[Outline | None, _Modules] = (None, _Modules([]))

    def among(self, objects: Iterable[Any], outline: Outline | None) -> list[torch.Tensor]:
        """Return those of the modules among ``objects``, from whose ``state_dict()`` the ``outline`` was made."""
        modules = [each for each in objects if isinstance(each, torch.nn.Module)]
        then, last = self._last
        if outline is None or outline is not then or not last.are(modules):
            last = _Modules(modules)
            self._last = outline, last
        return last.changed_by_forward()


class _Modules:
    """Modules and all in them. They are not held."""

    def __init__(self, roots: Sequence[torch.nn.Module]) -> None:
        parts = [part for root in roots for part in root.modules()]
        tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        self._roots = [*map(weakref.ref, roots)]
        self._parts = [*map(weakref.ref, parts)]
        self._children = [*map(weakref.ref, _children(parts))]
        self._tables = [weakref.ref(part) for part in parts if isinstance(part, tables)]

    def are(self, roots: Sequence[torch.nn.Module]) -> bool:
        """Whether these are the same modules with the same modules in them."""
        if not _refer_to(self._roots, roots):
            return False
        parts = [*map(_alive, self._parts)]
        return None not in parts and _refer_to(self._children, _children(parts))

    def changed_by_forward(self) -> list[torch.Tensor]:
        """Return those that change in the forward pass: the weights of embeddings with ``max_norm``."""
        alive = map(_alive, self._tables)
        return [table.weight for table in alive if table is not None and table.max_norm is not None]


def _alive(reference: weakref.ref[Any]) -> Any:
    return reference()


def _refer_to(references: Sequence[weakref.ref[Any]], objects: Sequence[Any]) -> bool:
    return len(references) == len(objects) and all(map(is_, objects, map(_alive, references)))


def _children(modules: Iterable[Any]) -> list[Any]:
    return [child for module in modules for child in module._modules.values() if child is not None]


class LazyMemory:
    """The ranges of memory that tensors take; those with holes and those without plain memory are left out."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        lows, highs = _ranges(tensors)
        order = np.argsort(lows, kind="stable")
        lows, highs = lows[order], np.maximum.accumulate(highs[order]) if len(order) else highs
        first = np.ones(len(lows), np.bool_)
        first[1:] = lows[1:] > highs[:-1]  # ranges that touch are one: leaves that touch are one extent
        self._lows = lows[first]
        self._highs = highs[np.flatnonzero(np.append(first[1:], True))] if len(lows) else highs

    def covers(self, sources: Sources) -> _Which:
        """Return which of ``sources`` lie in it with all their bytes; packed ones do not."""
        if not len(self._lows):
            return np.zeros(len(sources), np.bool_)
        lows = sources.addresses.astype(np.int64)
        at = np.searchsorted(self._lows, lows, side="right") - 1
        return (at >= 0) & (lows + sources.lengths <= self._highs[at]) & ~sources.packed


class LazySources:
    """Which sources lie in lazy memory, remembered for as long as neither they nor that memory change."""

    def __init__(self) -> None:
        self._last: tuple[npt.NDArray[np.uint64], object, _Which] | None = None  # replaced at once: see Splitter

    def among(self, sources: Sources, tensors: list[torch.Tensor]) -> _Which:
        """Return which of ``sources`` lie in the memory of ``tensors`` (see :class:`LazyMemory`). Not to be changed.

        The table of addresses of the sources is the same object as at the last call while all leaves lie as they did.
        """
        last, addresses, places = self._last, sources.addresses, _places(tensors)
        if last is not None and addresses is last[0] and places is not None and places == last[1]:
            return last[2]
        which = LazyMemory(tensors).covers(sources)
        self._last = addresses, places, which
        return which


def _places(tensors: list[torch.Tensor]) -> object:
    """Return where tensors are and what they take, to compare; None where that takes a longer look."""
    print_ = fingerprint(tensors, addresses=True)
    try:
        if print_ is None and all(map(_is_contiguous, tensors)):
            return [*map(_address, tensors)], [*map(_nbytes, tensors)]
    except RuntimeError:  # no plain memory
        pass
    return print_


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
    """Whether the elements of a tensor are one run, in whatever order."""
    shape, stride = tensor.shape, tensor.stride()
    return is_dense(shape, stride, 1) and span(shape, stride)[1] + 1 == tensor.numel()
