# SPDX-License-Identifier: Apache-2.0
"""The layout cache: the layout of a state at the last save, reused while the leaves lie in memory in the same way.

A layout depends on the kind of each leaf (type, dtype, shape, strides, storage offset) and on how the memory of leaves
relates (which leaves view one storage, whether storages overlap), not on addresses. All of that is compared at every
save, with every address and size read anew: offloading, FSDP and ``resize_`` move storages. If nothing differs, only
the sources are made again; a difference, or a state that cannot be compared quickly, leads to a full
:func:`lay_out`. If every storage has its old address and size, as in everyday training, the relations are not
compared again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pccheck_async.format import dtypes
from pccheck_async.state.leaves import Leaves
from pccheck_async.state.storages import Layout, Origins, StorageView, lay_out, view_of
from pccheck_async.state.tensor_access import untyped_storage

try:
    from pccheck_async import _ext
except ImportError:
    look = None
else:
    look = _ext.look

DLPACK_API: Final[object] = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
"""Torch's table of DLPack functions, which torch has since 2.10; else None."""

_address: Final = torch.UntypedStorage.data_ptr
_nbytes: Final = torch.UntypedStorage.nbytes
CALLS: Final = (
    untyped_storage, _address, _nbytes, torch.Tensor.is_neg, torch.Tensor.is_conj, "dtype", "requires_grad"
)  # fmt: skip
_Numbers: TypeAlias = npt.NDArray[np.int64]


def cached_layout(leaves: Leaves, last: LayoutCache | None = None) -> tuple[Layout, LayoutCache | None]:
    """Return the layout of ``leaves``, and the cache to pass as ``last`` next time; reuse the layout in ``last``.

    Raises:
        UnsupportedStateError: A leaf cannot be saved; names its path.
    """
    layout = last.reuse(leaves) if last is not None else None
    if layout is not None:
        return layout, last
    leaves.check()
    layout, origins = lay_out(leaves)
    new = LayoutCache(leaves, layout, origins) if not origins.several else None
    again = new.reuse(leaves) if new is not None else None  # if this cannot be compared: better now than every time
    same = again is not None and np.array_equal(again.sources.addresses, layout.sources.addresses)
    return layout, new if same else None


class LayoutCache:
    """A layout, and the properties of the leaves that determine it. Holds no array and no memory."""

    def __init__(self, leaves: Leaves, layout: Layout, origins: Origins) -> None:
        values = leaves.values
        self._layout = replace(layout, sources=layout.sources.with_memory(layout.sources.addresses[:0], []))
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
        look = look_at(tensors)
        self._forms: Any = None if look is None else look.forms
        self._traits: Any = None if look is None else look.traits
        self._detached = [*leaves.detached]
        self._array_forms = [*self._forms_of_arrays(leaves, views)]
        self._relations = _Relations([origins.views[number] for number in self._order])
        self._place: _Place | None = None

    def reuse(self, leaves: Leaves) -> Layout | None:
        """Return the layout of ``leaves``; None if they do not lie in memory as they did when this was made."""
        if [*map(type, leaves.values)] != self._types or leaves.detached != self._detached:
            return None
        tensors, views = self._split(leaves)
        if self._arrays and [*self._forms_of_arrays(leaves, views)] != self._array_forms:
            return None
        place = self._place
        look = look_at(tensors)
        if look is None or look.forms != self._forms or look.traits != self._traits:
            return None
        owners = look.storages
        spans = [(_base(view), _span(view)[1]) for view in views]
        if place is None or look.memory != place.memory or spans != place.spans:
            of_tensors = np.frombuffer(look.memory, np.int64).reshape(-1, 2)
            each = np.concatenate([of_tensors, np.array(spans, np.int64).reshape(-1, 2)])
            if not self._relations.hold(each[:, 0], each[:, 1]):
                return None
            place = self._place = _Place(look.memory, spans, self._addresses(each[:, 0]))
        if views:
            owners = owners + [None if view is None else view.owner for view in views]
        last = self._layout
        if self._packings or not self._in_order:
            owners = self._owners(leaves, owners)
        sources = last.sources.with_memory(place.addresses, owners)
        return Layout(  # replace() takes longer
            last.tensors, last.storage_nbytes, last.extents, sources, last.source_of, last.breaks, last.known
        )

    def _split(self, leaves: Leaves) -> tuple[list[Any], list[StorageView | None]]:
        values = leaves.values
        if not self._arrays:
            return values, []
        return [values[number] for number in self._tensors], [view_of(n, leaves[n]) for n in self._arrays]

    def _forms_of_arrays(self, leaves: Leaves, views: list[StorageView | None]) -> Iterator[Any]:
        for number, view in zip(self._arrays, views, strict=True):
            array: Any = leaves.values[number]
            yield array.dtype.str, array.shape, dtypes.numpy_name(array.dtype)
            if view is not None:
                places = (view.low, view.high, view.first)
                yield view.stride, view.unresolved, *(place - view.memory[1] for place in places)

    def _addresses(self, bases: _Numbers) -> npt.NDArray[np.uint64]:
        addresses = (bases if self._in_order else bases[self._places]) + self._shifts
        addresses[[*self._packings]] = 0
        table = addresses.view(np.uint64)
        table.flags.writeable = False  # several saves have it
        return table

    def _owners(self, leaves: Leaves, owners: list[Any]) -> list[Any]:
        """Return for each source the object that keeps its memory, given the ``owners`` of all leaves' memory."""
        if not self._in_order:
            owners = [*map(owners.__getitem__, self._places)]
        for number, pack in self._packings.items():
            owners[number] = pack(leaves.values[self._order[self._places[number]]], owners[number])
        return owners


class _Place(NamedTuple):
    """The addresses and sizes of all storages, and the resulting addresses of the sources."""

    memory: bytes
    spans: list[tuple[int, int]]
    addresses: npt.NDArray[np.uint64]


def _base(view: StorageView | None) -> int:
    return 0 if view is None else view.memory[1]


def _span(view: StorageView | None) -> tuple[int, int]:
    """Return the byte offsets in the storage at which a view begins and ends; (0, 0) for None."""
    return (view.low - view.memory[1], view.high - view.memory[1]) if view is not None else (0, 0)


class _Relations:
    """Record of which leaves lie in one storage; different storages did not overlap."""

    def __init__(self, views: Sequence[StorageView | None]) -> None:
        bases = np.array([*map(_base, views)], np.int64)
        lows, highs = np.array([*map(_span, views)], np.int64).reshape(-1, 2).T
        self._with_bytes = np.flatnonzero(lows < highs)
        self._reaches = highs[self._with_bytes]
        # Unresolved views are saved apart, even if they share memory.
        self._members = np.array([n for n, view in enumerate(views) if view and not view.unresolved], np.int64)
        _, first, storage = np.unique(bases[self._members], return_index=True, return_inverse=True)
        storage = storage.reshape(-1)
        self._firsts = self._members[first]  # one leaf of each storage
        self._same_storage = self._firsts[storage]  # for each leaf, the one of those that shares its storage
        self._starts, self._ends = np.zeros(len(first), np.int64), np.zeros(len(first), np.int64)
        np.minimum.at(self._starts, storage, lows[self._members])
        np.maximum.at(self._ends, storage, highs[self._members])

    def hold(self, bases: _Numbers, sizes: _Numbers) -> bool:
        """Return whether storages at new ``bases`` are large enough, shared by the same leaves, and do not overlap."""
        if not bases[self._with_bytes].all() or (sizes[self._with_bytes] < self._reaches).any():
            return False  # freed or shrunk
        if not np.array_equal(bases[self._members], bases[self._same_storage]):
            return False
        each = bases[self._firsts]
        starts, ends = each + self._starts, each + self._ends
        order = np.argsort(starts, kind="stable")  # quick if they are in order already
        return bool((starts[order][1:] >= ends[order][:-1]).all())


# -- a look at tensors: all that a layout of them depends on, read in one pass


class Look(NamedTuple):
    """The properties of tensors on which their layout depends.

    If two looks have equal forms and traits, the tensors view their storages alike. A look keeps the storages alive.
    """

    forms: object
    """Dtypes, shapes, strides and devices."""
    traits: Any
    """Storage offsets, and whether tensors require gradients, are lazily negated, are lazily conjugated."""
    memory: bytes
    """Address and size of each storage, as int64."""
    storages: list[Any]


def look_at(tensors: list[torch.Tensor]) -> Look | None:
    """Return the properties of tensors that a layout depends on; None if one of them has no strides or no storage.

    The tensors are not referenced, not even weakly: torch refuses to swap tensors that have weak references.
    """
    try:
        if look is not None and DLPACK_API is not None:
            return Look(*look(DLPACK_API, tensors, CALLS))
    except RuntimeError:  # one that DLPack cannot describe
        pass
    try:
        return _look_at_each(tensors)
    except RuntimeError:
        return None


def _look_at_each(tensors: Sequence[torch.Tensor]) -> Look:
    storages: list[Any] = [*map(untyped_storage, tensors)]
    forms = [(each.dtype, each.shape, each.stride(), each.device) for each in tensors]
    traits = [
        (each.storage_offset(), each.requires_grad, each.is_neg(), each.is_complex() and each.is_conj())
        for each in tensors
    ]
    memory = np.array([(_address(each), _nbytes(each)) for each in storages], np.int64).reshape(-1, 2)
    return Look(forms, traits, memory.tobytes(), storages)
