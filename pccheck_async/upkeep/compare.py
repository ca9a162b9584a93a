# SPDX-License-Identifier: Apache-2.0
"""The comparison of two checkpoints, leaf by leaf, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from pccheck_async.engine import call_once
from pccheck_async.errors import DamagedError, first_few, in_shell, readable
from pccheck_async.format import CheckpointInfo, Which, dtypes, which_one
from pccheck_async.format.manifest import TensorEntry
from pccheck_async.group import Place, open_place
from pccheck_async.medium.open_medium import IO, OpenMedium
from pccheck_async.state.restore.tree import paired
from pccheck_async.store import CheckpointReader
from pccheck_async.transfer import Tasks
from pccheck_async.upkeep.listing import StoredLeaf, list_leaves
from pccheck_async.upkeep.reading import Progress

__all__ = ["Comparison", "Difference", "LeafDifference", "compare_checkpoints", "compare_elements"]

_PIECE_BYTES = 8 << 20
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Change = Literal["added", "removed", "kind", "dtype", "shape", "elements", "value", "container"]
_FORM: dict[Change, Callable[[TensorEntry], object]] = {
    "kind": attrgetter("kind", "requires_grad"),
    "dtype": attrgetter("dtype"),
    "shape": attrgetter("shape"),
}


@dataclass(slots=True)
class Difference:
    """Counts over all elements compared so far.

    Attributes:
        total: Number of elements.
        bits: Number of elements of which a bit differs.
        values: Number of elements that differ as numbers: NaN equals NaN here, and 0.0 equals -0.0. None if the
            elements are no numbers, or torch cannot compute with their dtype.
        nans: Number of elements that are NaN in exactly one of the two.
        most_absolute: The largest absolute difference, infinite against finite included; None without numbers.
        most_relative: The largest absolute difference divided by the larger of the two magnitudes.
    """

    total: int = 0
    bits: int = 0
    values: int | None = 0
    nans: int = 0
    most_absolute: float | int | None = None
    most_relative: float | None = None


@dataclass(frozen=True, slots=True)
class LeafDifference:
    """A leaf that differs.

    Attributes:
        path: The path of the leaf, or of a container whose type differs.
        change: The kind: the leaf is only in the second checkpoint (``added``) or only in the first (``removed``);
            its ``kind`` (tensor, parameter, array, plain value, or whether it requires a gradient), ``dtype`` or
            ``shape``; its ``elements``; the ``value`` or type of a plain value; the type of a ``container``.
        one: The leaf in the first checkpoint, in words; empty if there is none.
        other: The leaf in the second checkpoint, likewise.
        difference: The counts for its elements, if they were compared.
    """

    path: str
    change: Change
    one: str
    other: str
    difference: Difference | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """The result of comparing two checkpoints.

    Attributes:
        one: The first checkpoint.
        other: The second checkpoint.
        leaves: Number of leaves that are in either.
        nbytes: Bytes of tensors and arrays compared element by element, in one of the two.
        differences: Leaves that differ, in the order of the state; empty if both are equal in every bit. The order of
            keys in a mapping is ignored, and which leaves share memory.
        rank: The rank in the first, if it is a group's, whose own values were compared; None for other stores.
        other_rank: The rank in the second, likewise.
    """

    one: CheckpointInfo
    other: CheckpointInfo
    leaves: int
    nbytes: int
    differences: tuple[LeafDifference, ...]
    rank: int | None = None
    other_rank: int | None = None

    def __repr__(self) -> str:
        differ = f"{len(self.differences)} of {self.leaves} leaves differ" if self.differences else "equal in every bit"
        return f"<Comparison of step {self.one.step} with step {self.other.step}: {differ}>"


def compare_checkpoints(
    path: str | os.PathLike[str],
    other: str | os.PathLike[str] | None = None,
    *,
    step: int | None = None,
    name: str | None = None,
    other_step: int | None = None,
    other_name: str | None = None,
    rank: int | None = None,
    other_rank: int | None = None,
    progress: Progress = lambda done, total: None,
    io: IO = "auto",
) -> Comparison:
    """Compare two checkpoints, and verify all bytes that are read of both.

    A few chunks of each are in memory at a time, and all of a tensor that is not contiguous (transposed, with gaps).
    Both are locked meanwhile: a trainer that writes to their store takes one slot more, or waits.

    In a group's checkpoint, tensors that lie on several ranks are compared in full, so that two checkpoints are equal
    if only the number of ranks differs, or how tensors are divided among them; of values that each rank has for itself
    those of ``rank`` are compared.

    Args:
        path: Folder of the first checkpoint's store, or of a group.
        other: Folder of the second checkpoint's store, or of a group; by default the first folder.
        step: Step of the first checkpoint; by default the newest one there.
        name: Name of the first checkpoint, instead of its step.
        other_step: Step of the second checkpoint; by default the newest one there.
        other_name: Name of the second checkpoint, instead of its step.
        rank: Rank whose part of the first is read, in the folder of a group; by default 0.
        other_rank: Rank whose part of the second is read; in a group by default ``rank``.
        progress: Called with the bytes compared (:data:`Progress`).
        io: I/O backend, as for :class:`pccheck_async.CheckpointEngine`.

    Raises:
        NoCheckpointError: one of the checkpoints does not exist.
        CorruptStoreError: bytes that had to be compared are damaged, or parts of a group do not fit together.
        ReadError: the device failed.
        ValueError: both a step and a name of one of them are given.
    """
    which, other_which = which_one(step, name), which_one(other_step, other_name)
    other = path if other is None else other

    async def compare() -> Comparison:
        async with AsyncExitStack() as stack:
            one = await _side(stack, path, which, io, rank)
            two = await _side(stack, other, other_which, io, other_rank, default_rank=rank)
            comparing = _Comparing(one.opened, one, two, progress)
            differences = tuple(await comparing.run())
            return Comparison(one.info, two.info, comparing.leaves, comparing.done, differences, one.rank, two.rank)

    return call_once(compare())


class _Side:
    """One of the two checkpoints that are compared."""

    def __init__(self, place: Place, checkpoint: CheckpointReader) -> None:
        self.info = checkpoint.entry.info
        self.rank = place.named(checkpoint.own_rank)
        self.opened = place.opened
        self._listing = list_leaves(checkpoint.manifest)
        self._checkpoint = checkpoint
        self.branches = self._listing.branches
        self.leaves = {leaf.key: leaf for leaf in self._listing.leaves}

    async def read(self, low: int, high: int) -> memoryview:
        """Return the bytes of a range of the payload, valid until the next call. Raises DamagedError, ReadError."""
        whole = bytearray()
        try:
            async with aclosing(self._checkpoint.pieces([(low, high)])) as pieces:
                async for piece in pieces:
                    if len(piece) == high - low:
                        return piece  # as it lies in the chunk, which stays in memory
                    whole += piece
        except DamagedError as error:
            leaves = self._listing.within(low, high)
            raise DamagedError(
                f"{error}; it holds {first_few(leaves, 5)} of step {self.info.step}; "
                f"{in_shell('verify', self.opened.path, '--all')} names all damage"
            ) from None
        return memoryview(whole)


async def _side(
    stack: AsyncExitStack,
    path: str | os.PathLike[str],
    which: Which,
    io: IO,
    rank: int | None,
    *,
    default_rank: int | None = None,
) -> _Side:
    """Lock a checkpoint until the stack is left; tensors that lie on several ranks of a group are in full."""
    place = await stack.enter_async_context(await open_place(path, io, rank=rank, default_rank=default_rank))
    checkpoint = await stack.enter_async_context(place.hold(which))
    await checkpoint.merge()
    checkpoint.own.keeps = True
    return _Side(place, checkpoint)


class _Comparing:
    def __init__(self, opened: OpenMedium, one: _Side, other: _Side, progress: Progress) -> None:
        self._call = opened.operations.call
        self._one = one
        self._other = other
        self._progress = progress
        self._compared: dict[tuple[TensorEntry, TensorEntry], Difference] = {}
        self._pairs, _, self._added = paired(one.leaves, other.leaves)
        entries = [(a.entry, b.entry) for a, b in self._pairs.values()]
        self._total = sum(a.nbytes for a, b in entries if a and b and _same_form(a, b))
        self.leaves = len(one.leaves) + len(self._added)
        self.done = 0

    async def run(self) -> list[LeafDifference]:
        differences = await self._find()
        every = list(
            dict.fromkeys(path for side in (self._one, self._other) for path in (*side.leaves, *side.branches))
        )
        shown = dict(zip(every, readable(every), strict=True))
        return [replace(each, path=shown[each.path]) for each in differences]

    async def _find(self) -> list[LeafDifference]:
        branches, _, _ = paired(self._one.branches, self._other.branches)
        differences = [LeafDifference(path, "container", a, b) for path, (a, b) in branches.items() if a != b]
        for path, one in self._one.leaves.items():
            if path not in self._pairs:
                differences.append(LeafDifference(path, "removed", _words(one), ""))
            elif (difference := await self._pair(path, *self._pairs[path])) is not None:
                differences.append(difference)
        return differences + [LeafDifference(path, "added", "", _words(leaf)) for path, leaf in self._added.items()]

    async def _pair(self, path: str, one: StoredLeaf, other: StoredLeaf) -> LeafDifference | None:
        a, b = one.entry, other.entry
        change: Change
        difference = None
        if a is None or b is None:
            if a is b and one.same_value(other):
                return None
            change = "value" if a is b else "kind"
        else:
            change = next((name for name, fact in _FORM.items() if fact(a) != fact(b)), "elements")
            if _same_form(a, b):
                difference = await self._elements(a, b, one.extent, other.extent)
            if change == "elements" and (difference is None or not difference.bits):
                return None
        return LeafDifference(path, change, _words(one), _words(other), difference)

    async def _elements(
        self, one: TensorEntry, other: TensorEntry, here: tuple[int, int] | None, there: tuple[int, int] | None
    ) -> Difference:
        known = self._compared.get((one, other))
        if known is None:
            known = Difference()
            if here is not None and there is not None:
                await self._compare(one, other, here, there, known)
            self._compared[one, other] = known
        self.done += one.nbytes
        self._progress(self.done, self._total)
        return known

    async def _compare(
        self, one: TensorEntry, other: TensorEntry, here: tuple[int, int], there: tuple[int, int], into: Difference
    ) -> None:
        nbytes = here[1] - here[0]
        alike = _strides(one) == _strides(other) and there[1] - there[0] == nbytes
        if alike and nbytes == one.nbytes:
            # Neither has gaps, and both have the same strides: their bytes are compared in the order of memory.
            size = _PIECE_BYTES // one.itemsize * one.itemsize or one.itemsize
            for start in range(0, nbytes, size):
                stop = min(start + size, nbytes)
                a, b = await self._read((here[0] + start, here[0] + stop), (there[0] + start, there[0] + stop))
                await self._call(compare_elements, one, a, b, into)
                self._progress(self.done + start, self._total)
            return
        a, b = await self._read(here, there)
        a, b = await self._call(_in_order, one, a), await self._call(_in_order, other, b)
        await self._call(compare_elements, one, a, b, into)

    async def _read(self, here: tuple[int, int], there: tuple[int, int]) -> tuple[memoryview, memoryview]:
        """Read a range of each payload, both at the same time."""
        async with Tasks() as group:
            one = group.create_task(self._one.read(*here))
            other = group.create_task(self._other.read(*there))
        return one.result(), other.result()


def _same_form(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two arrays can be compared element by element."""
    same_library = (one.kind == "ndarray") is (other.kind == "ndarray")
    return same_library and one.dtype == other.dtype and one.shape == other.shape


def _strides(entry: TensorEntry) -> tuple[int, ...]:
    return tuple(step for size, step in zip(entry.shape, entry.stride, strict=True) if size > 1)


def _in_order(entry: TensorEntry, extent: memoryview) -> memoryview:
    """Return the bytes of an array's elements in C order; ``extent`` is all memory that the array views."""
    size = entry.itemsize
    steps = tuple(step * size for step in entry.stride)
    first = entry.offset - entry.extent[0]
    whole = np.ndarray(entry.shape, np.dtype((np.void, size)), extent, first, steps)
    return np.ascontiguousarray(whole).reshape(-1).view(np.uint8).data


def _words(leaf: StoredLeaf) -> str:
    """Return dtype and shape of an array, or type and value of a plain value, in words."""
    entry = leaf.entry
    if entry is None:
        return f"{leaf.kind} {leaf.text(40)}"
    grad = ", requires grad" if entry.requires_grad else ""
    return f"{entry.kind} {entry.dtype} {list(entry.shape)}{grad}"


# -- elements of two arrays of one dtype and shape


def compare_elements(entry: TensorEntry, one: memoryview, other: memoryview, into: Difference) -> None:
    """Compare elements of ``entry``'s dtype that lie back to back, and add the differences to ``into``."""
    size = entry.itemsize
    into.total += len(one) // size
    width = _WIDTHS.get(size)
    if width is not None:
        where = np.flatnonzero(np.frombuffer(one, width) != np.frombuffer(other, width))
    else:
        rows = np.frombuffer(one, np.uint8).reshape(-1, size) != np.frombuffer(other, np.uint8).reshape(-1, size)
        where = np.flatnonzero(rows.any(axis=1))
    if not len(where):
        return
    into.bits += len(where)
    a, b = _numbers(entry, one, where), _numbers(entry, other, where)
    if a is None or b is None:
        into.values = None
    else:
        _add_numbers(into, a, b)


def _add_numbers(into: Difference, one: npt.NDArray[Any], other: npt.NDArray[Any]) -> None:
    """Add the differences of elements that differ in their bits, as numbers, to ``into``."""
    exact: npt.NDArray[Any] | None = None
    if one.dtype.kind in "iu":
        # As unsigned numbers of 64 bits a difference of two of 64 bits is exact.
        exact = np.maximum(one, other).astype(np.uint64) - np.minimum(one, other).astype(np.uint64)
    wide = np.complex128 if one.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        a, b = one.astype(wide), other.astype(wide)
        nan_a, nan_b = np.isnan(a), np.isnan(b)
        differ = (a != b) & ~(nan_a & nan_b) if exact is None else exact > 0
        lone = nan_a ^ nan_b
        if into.values is not None:
            into.values += int(np.count_nonzero(differ))
        into.nans += int(np.count_nonzero(lone))
        numbers = differ & ~nan_a & ~nan_b
        if not numbers.any():
            return
        absolute = np.abs(a - b)[numbers] if exact is None else exact[numbers]
        largest = np.maximum(np.abs(a), np.abs(b))[numbers]
        relative = absolute / largest
        relative = relative[~np.isnan(relative)]  # infinite against another infinity or a number
        if exact is None:
            absolute = absolute[~np.isnan(absolute)]  # complex, where both have the same infinite part
    if len(absolute):
        into.most_absolute = max(into.most_absolute or 0, absolute.max().item())
    if len(relative):
        into.most_relative = max(into.most_relative or 0.0, float(relative.max()))


def _numbers(entry: TensorEntry, data: memoryview, where: npt.NDArray[np.intp]) -> npt.NDArray[Any] | None:
    """Return the elements at the indices ``where`` as numbers that numpy computes with; None if they are no numbers."""
    size = entry.itemsize
    picked = np.ascontiguousarray(np.frombuffer(data, np.dtype((np.void, size)))[where])
    if entry.kind == "ndarray":
        dtype = dtypes.numpy_dtype(entry.dtype)
        if dtype.kind == "b":
            return picked.view(np.uint8)
        return picked.view(dtype).astype(dtype.newbyteorder("=")) if dtype.kind in "iufc" else None
    torch_dtype = dtypes.torch_dtype(entry.dtype)
    if torch_dtype is torch.bool:
        return picked.view(np.uint8)
    if torch_dtype is torch.complex32:  # torch itself warns of it
        return picked.view(np.float16).astype(np.float32).view(np.complex64)
    # Floats that numpy lacks: all their values are values of float32.
    wide = torch_dtype is torch.bfloat16 or (torch_dtype.is_floating_point and size == 1)
    try:
        bits = torch.from_numpy(picked.view(np.uint8)).view(torch_dtype)
        numbers: npt.NDArray[Any] = (bits.to(torch.float32) if wide else bits).numpy()
    except (RuntimeError, TypeError, NotImplementedError):
        return None  # torch has dtypes that it can only store
    return numbers if numbers.dtype.kind in "iufc" else None
