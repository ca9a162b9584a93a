"""How leaves lay when they were last laid out, so that leaves that lie the same way need not be laid out again.

A layout depends on what each leaf is (type, dtype, shape, strides, where in its storage it begins) and on how their
memory relates: which leaves view one storage, and whether storages overlap. It does not depend on the addresses. So
all of that is compared at every save, with every address and size read anew, and where nothing differs only the
sources are made again. Whatever differs, or cannot be told quickly, leads to a full :func:`lay_out`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pccheck_async.state import dtypes
from pccheck_async.state.forms import Forms
from pccheck_async.state.leaves import Leaves
from pccheck_async.state.sources import Sources
from pccheck_async.state.storages import Layout, Origins, lay_out
from pccheck_async.state.views import View, view_of

__all__ = ["Arrangement", "arranged"]

_Numbers: TypeAlias = npt.NDArray[np.int64]

_BLOCK: Final = 1024
"""Tensors that are looked at together: what all looks at them need of them stays in a core's cache."""

_untyped_storage: Final = torch.Tensor.untyped_storage
_address: Final = torch.UntypedStorage.data_ptr
_nbytes: Final = torch.UntypedStorage.nbytes


def arranged(leaves: Leaves, last: Arrangement | None = None) -> tuple[Layout, Arrangement | None]:
    """Lay out ``leaves``, quickly where they lie as they did when ``last`` was returned.

    Returns:
        The layout, and what to give as ``last`` the next time.

    Raises:
        UnsupportedStateError: A leaf cannot be saved; names its path.
    """
    layout = last.again(leaves) if last is not None else None
    if layout is not None:
        return layout, last
    leaves.check()
    layout, origins = lay_out(leaves)
    return layout, _remembered(leaves, layout, origins)


def _remembered(leaves: Leaves, layout: Layout, origins: Origins) -> Arrangement | None:
    if origins.several or any(
        entry.dtype not in dtypes.STORABLE for entry in layout.tensors if entry.kind != "ndarray"
    ):
        return None
    arrangement = Arrangement(leaves, layout, origins)
    found = arrangement.again(leaves)  # refuses what cannot be told quickly: better now than at every save
    if found is None or not np.array_equal(found.sources.addresses, layout.sources.addresses):
        return None
    return arrangement


class Arrangement:
    """What a layout depended on. Holds no array and no memory.

    Args:
        leaves: What was laid out.
        layout: How.
        origins: Where its sources come from.
    """

    def __init__(self, leaves: Leaves, layout: Layout, origins: Origins) -> None:
        values = leaves.values
        self._layout = layout.filled(Sources())
        self._sources_then = layout.sources.again(layout.sources.addresses[:0], [])
        self._packings = origins.packings
        self._shifts = np.array(origins.shifts, np.int64)
        self._types = [*map(type, values)]
        # From here on tensors come before arrays.
        self._tensors = [number for number, value in enumerate(values) if isinstance(value, torch.Tensor)]
        self._arrays = [number for number, value in enumerate(values) if isinstance(value, np.ndarray)]
        self._order = self._tensors + self._arrays
        self._places: list[int] = np.argsort(self._order)[np.array(origins.leaves, np.intp)].tolist()
        self._in_order = self._places == [*range(len(values))]
        tensors, views = self._split(leaves)
        self._blocks = [Forms(tensors[start : start + _BLOCK]) for start in range(0, len(tensors), _BLOCK)]
        self._array_forms = [*self._forms_of_arrays(leaves, views)]
        spans = [span for block in self._blocks for span in block.spans] + [*map(_span, views)]
        self._relations = _Relations(
            _Memory.of_tensors(tensors).and_arrays(views).bases, np.array(spans, np.int64).reshape(-1, 3)
        )

    def again(self, leaves: Leaves) -> Layout | None:
        """Return the layout of ``leaves``, None where they do not lie as they did."""
        if [*map(type, leaves.values)] != self._types:
            return None
        tensors, views = self._split(leaves)
        if [*self._forms_of_arrays(leaves, views)] != self._array_forms:
            return None
        found = []
        for number, forms in enumerate(self._blocks):
            block = tensors[number * _BLOCK : (number + 1) * _BLOCK]
            try:
                if not forms.same(block):
                    return None
                found.append(_Memory.of_tensors(block))
            except RuntimeError:  # of a tensor without strides or without a storage
                return None
        memory = _Memory.joined(found).and_arrays(views)
        if not self._relations.hold(memory):
            return None
        return self._layout.filled(self._sources(leaves, memory))

    def _split(self, leaves: Leaves) -> tuple[list[Any], list[View | None]]:
        values = leaves.values
        if not self._arrays:
            return values, []
        return [values[number] for number in self._tensors], [view_of(n, leaves[n]) for n in self._arrays]

    def _forms_of_arrays(self, leaves: Leaves, views: list[View | None]) -> Iterator[Any]:
        for number, view in zip(self._arrays, views, strict=True):
            array: Any = leaves.values[number]
            form = (array.dtype.str, array.shape, dtypes.numpy_name(array.dtype))
            if view is None:
                yield form
            else:
                places = (view.low, view.high, view.first)
                yield form, view.stride, view.lazy, *(place - view.memory[1] for place in places)

    def _sources(self, leaves: Leaves, memory: _Memory) -> Sources:
        if self._in_order:
            addresses, owners = memory.bases + self._shifts, memory.owners
        else:
            addresses = memory.bases[self._places] + self._shifts
            owners = [*map(memory.owners.__getitem__, self._places)]
        for number, pack in self._packings.items():
            source = pack(leaves.values[self._order[self._places[number]]], owners[number])
            addresses[number], owners[number] = 0, source
        return self._sources_then.again(addresses.view(np.uint64), owners)


@dataclass(frozen=True, slots=True, eq=False)
class _Memory:
    """Of each leaf: where its storage begins, how many bytes it has, and what keeps it."""

    bases: _Numbers
    sizes: _Numbers
    owners: list[Any]

    @classmethod
    def of_tensors(cls, tensors: Sequence[torch.Tensor]) -> _Memory:
        owners: list[Any] = [*map(_untyped_storage, tensors)]
        bases = np.fromiter(map(_address, owners), np.int64, len(owners))
        return cls(bases, np.fromiter(map(_nbytes, owners), np.int64, len(owners)), owners)

    @classmethod
    def joined(cls, parts: Sequence[_Memory]) -> _Memory:
        if not parts:
            return cls.of_tensors(())
        return cls(
            np.concatenate([part.bases for part in parts]),
            np.concatenate([part.sizes for part in parts]),
            [*chain.from_iterable(part.owners for part in parts)],
        )

    def and_arrays(self, views: Sequence[View | None]) -> _Memory:
        if not views:
            return self
        bases = np.array([view.memory[1] if view is not None else 0 for view in views], np.int64)
        sizes = np.array([_span(view)[1] for view in views], np.int64)
        owners = [view.owner if view is not None else None for view in views]
        return _Memory.joined((self, _Memory(bases, sizes, owners)))


def _span(view: View | None) -> tuple[int, int, int]:
    """See :attr:`Forms.spans`."""
    return (view.low - view.memory[1], view.high - view.memory[1], view.lazy) if view is not None else (0, 0, 0)


class _Relations:
    """Which leaves lie in one storage, and that different storages do not overlap.

    Args:
        bases: Of each leaf where its storage begins.
        spans: Of each leaf what it takes of its storage (see :attr:`Forms.spans`).
    """

    def __init__(self, bases: _Numbers, spans: _Numbers) -> None:
        lows, highs, lazy = spans.T
        self._with_bytes = np.flatnonzero(lows < highs)
        self._reaches = highs[self._with_bytes]
        # What is lazy is saved apart, whatever memory it shares.
        self._members = np.flatnonzero((lows < highs) & (lazy == 0))
        _, first, storage = np.unique(bases[self._members], return_index=True, return_inverse=True)
        storage = storage.reshape(-1)
        self._firsts = self._members[first]  # one leaf of each storage
        self._twins = self._firsts[storage]  # for each leaf, the one of its storage
        self._starts, self._ends = np.zeros(len(first), np.int64), np.zeros(len(first), np.int64)
        np.minimum.at(self._starts, storage, lows[self._members])
        np.maximum.at(self._ends, storage, highs[self._members])

    def hold(self, memory: _Memory) -> bool:
        """Whether all storages are large enough, shared by the leaves that shared them, and apart from each other."""
        bases = memory.bases
        if not bases[self._with_bytes].all() or (memory.sizes[self._with_bytes] < self._reaches).any():
            return False  # freed or shrunk
        if not np.array_equal(bases[self._members], bases[self._twins]):
            return False
        each = bases[self._firsts]
        starts, ends = each + self._starts, each + self._ends
        order = np.argsort(starts, kind="stable")  # quick where they are in order already
        return bool((starts[order][1:] >= ends[order][:-1]).all())
