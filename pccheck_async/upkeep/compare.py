"""How two checkpoints differ: leaf by leaf, in bounded memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from pccheck_async.api import with_session
from pccheck_async.engine import EngineConfig
from pccheck_async.errors import DamagedError
from pccheck_async.format import CheckpointInfo, check_step, dtypes
from pccheck_async.format.manifest import TensorEntry
from pccheck_async.medium.open_medium import IO, Session
from pccheck_async.state import StoredLeaf, list_leaves
from pccheck_async.store import VerifiedChunks
from pccheck_async.transfer import first_failure
from pccheck_async.upkeep.reading import Held, Progress, hold, make_pool, open_reader, run_with_session

__all__ = ["Comparison", "Difference", "LeafDifference", "compare_checkpoints", "compare_elements"]

_PIECE_BYTES = 8 << 20
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Change = Literal["added", "removed", "kind", "dtype", "shape", "elements", "value", "container"]


@dataclass(slots=True)
class Difference:
    """Counts over all elements compared so far.

    Attributes:
        total: Elements.
        bits: Elements of which a bit differs.
        values: Those among them that differ as numbers: NaN equals NaN here, and 0.0 equals -0.0. None where the
            elements are no numbers, or torch cannot compute with their dtype.
        nans: Those among them of which exactly one is NaN.
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
        path: Of the leaf, or of a container of another type.
        change: What differs: the leaf is only in the second checkpoint (``added``) or only in the first (``removed``);
            its ``kind`` (tensor, parameter, array, plain value, or whether it requires a gradient), ``dtype`` or
            ``shape``; its ``elements``; the ``value`` or type of a plain value; the type of a ``container``.
        one: The leaf in the first checkpoint, in words; empty where there is none.
        other: The leaf in the second one.
        difference: Of the elements, where they were compared.
    """

    path: str
    change: Change
    one: str
    other: str
    difference: Difference | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two checkpoints side by side.

    Attributes:
        one: The first.
        other: The second.
        leaves: Leaves in either.
        nbytes: Bytes of tensors and arrays compared element by element, of one of the two.
        differences: In the order of the state; empty where both are equal in every bit. The order of keys in a mapping
            does not count, nor which leaves share memory.
    """

    one: CheckpointInfo
    other: CheckpointInfo
    leaves: int
    nbytes: int
    differences: tuple[LeafDifference, ...]


def compare_checkpoints(
    path: str | os.PathLike[str],
    other: str | os.PathLike[str] | None = None,
    *,
    step: int | None = None,
    other_step: int | None = None,
    progress: Progress = lambda done, total: None,
    io: IO = "auto",
) -> Comparison:
    """Compare two checkpoints, verifying what is read of both.

    A few chunks of each are in memory at a time, and of tensors that do not lie in memory as their elements follow each
    other (transposed, with gaps) all of it. Both are held meanwhile: a trainer that writes to their store takes one
    slot more, or waits.

    Args:
        path: Store of the first.
        other: Store of the second; by default the same.
        step: Of the first; by default the newest one there.
        other_step: Of the second; by default the newest one there.
        progress: See :data:`Progress`.
        io: As for :class:`pccheck_async.CheckpointEngine`.

    Raises:
        NoCheckpointError: one of them is not there.
        CorruptStoreError: bytes that had to be compared are damaged.
        ReadError: the device failed.
    """
    steps = check_step(step), check_step(other_step)
    paths = path, path if other is None else other

    async def with_both(first: Session, second: Session) -> Comparison:
        async with AsyncExitStack() as stack:
            helds = []
            for session, where, wanted in zip((first, second), paths, steps, strict=True):
                reader = await open_reader(session, where)
                helds.append(await stack.enter_async_context(hold(reader, where, wanted)))
            comparing = _Comparing(first, helds, progress)
            differences = await comparing.run()
            return Comparison(
                helds[0].entry.info, helds[1].entry.info, comparing.leaves, comparing.done, tuple(differences)
            )

    async def work(first: Session) -> Comparison:
        return await with_session(paths[1], io, lambda second: with_both(first, second), EngineConfig())

    return run_with_session(paths[0], io, work)


class _Comparing:
    def __init__(self, session: Session, helds: Sequence[Held], progress: Progress) -> None:
        self._session = session
        self._helds = helds
        self._listings = listings = [list_leaves(held.manifest) for held in helds]
        self._payloads = [
            VerifiedChunks(held.reader.session, held.file, held.manifest, make_pool(held.manifest)) for held in helds
        ]
        self._progress = progress
        self._compared: dict[tuple[TensorEntry, TensorEntry], Difference] = {}
        self._ones, self._others = ({leaf.path: leaf for leaf in listing.leaves} for listing in listings)
        self._total = sum(
            leaf.nbytes
            for path, leaf in self._ones.items()
            if (match := self._others.get(path)) and leaf.entry and match.entry and _same_form(leaf.entry, match.entry)
        )
        self.leaves = len(self._ones.keys() | self._others.keys())
        self.done = 0

    async def run(self) -> list[LeafDifference]:
        differences = list(self._containers())
        for path, one in self._ones.items():
            other = self._others.get(path)
            if other is None:
                differences.append(LeafDifference(path, "removed", _words(one), ""))
            elif (difference := await self._pair(path, one, other)) is not None:
                differences.append(difference)
        added = [leaf for path, leaf in self._others.items() if path not in self._ones]
        return differences + [LeafDifference(leaf.path, "added", "", _words(leaf)) for leaf in added]

    def _containers(self) -> Iterator[LeafDifference]:
        ones, others = (listing.branches for listing in self._listings)
        for path, one in ones.items():
            if path in others and others[path] != one:
                yield LeafDifference(path, "container", one, others[path])

    async def _pair(self, path: str, one: StoredLeaf, other: StoredLeaf) -> LeafDifference | None:
        if one.entry is None or other.entry is None:
            if one.entry is None and other.entry is None and one.same_value(other):
                return None
            change: Change = "value" if one.entry is other.entry else "kind"
            return LeafDifference(path, change, _words(one), _words(other))
        a, b = one.entry, other.entry
        if (a.kind, a.requires_grad) != (b.kind, b.requires_grad):
            change = "kind"
        elif a.dtype != b.dtype:
            change = "dtype"
        elif a.shape != b.shape:
            change = "shape"
        else:
            change = "elements"
        difference = await self._elements(one, other) if _same_form(a, b) else None
        if change == "elements" and (difference is None or not difference.bits):
            return None
        return LeafDifference(path, change, _words(one), _words(other), difference)

    async def _elements(self, one: StoredLeaf, other: StoredLeaf) -> Difference:
        assert one.entry is not None and other.entry is not None  # noqa: PT018
        known = self._compared.get((one.entry, other.entry))
        if known is None:
            known = Difference()
            if one.extent is not None and other.extent is not None:
                await self._compare(one.entry, other.entry, one.extent, other.extent, known)
            self._compared[one.entry, other.entry] = known
        self.done += one.nbytes
        self._progress(self.done, self._total)
        return known

    async def _compare(
        self, one: TensorEntry, other: TensorEntry, here: tuple[int, int], there: tuple[int, int], into: Difference
    ) -> None:
        call = self._session.operations.call
        nbytes = here[1] - here[0]
        alike = _strides(one) == _strides(other) and there[1] - there[0] == nbytes
        if alike and nbytes == one.itemsize * np.prod(one.shape, dtype=np.int64):
            # Every byte is an element's, and the same one's in both: in the order of memory.
            size = _PIECE_BYTES // one.itemsize * one.itemsize or one.itemsize
            for start in range(0, nbytes, size):
                stop = min(start + size, nbytes)
                a, b = await self._read((here[0] + start, here[0] + stop), (there[0] + start, there[0] + stop))
                await call(compare_elements, one, a, b, into)
                self._progress(self.done + start, self._total)
            return
        a, b = await self._read(here, there)
        a, b = await call(_in_order, one, a), await call(_in_order, other, b)
        await call(compare_elements, one, a, b, into)

    async def _read(self, here: tuple[int, int], there: tuple[int, int]) -> tuple[memoryview, memoryview]:
        """Read a range of the payload of each, at the same time; the bytes stay as they are until the next call."""
        try:
            async with asyncio.TaskGroup() as group:
                one = group.create_task(self._range(0, *here))
                other = group.create_task(self._range(1, *there))
        except BaseExceptionGroup as errors:
            failure = first_failure(errors)
            raise failure from failure.__cause__
        return one.result(), other.result()

    async def _range(self, number: int, low: int, high: int) -> memoryview:
        whole = bytearray()
        try:
            async with aclosing(self._payloads[number].pieces([(low, high)])) as pieces:
                async for piece in pieces:
                    if len(piece) == high - low:
                        return piece  # as it lies in the chunk, which stays in memory
                    whole += piece
        except DamagedError as error:
            leaves = self._listings[number].within(low, high)
            raise DamagedError(
                f"{error}; it holds {', '.join(leaves[:5])}{', ...' if len(leaves) > 5 else ''} of step "
                f"{self._helds[number].entry.step}; `pccheck verify` names all damage"
            ) from None
        return memoryview(whole)


def _same_form(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two arrays can be compared element by element."""
    same_library = (one.kind == "ndarray") is (other.kind == "ndarray")
    return same_library and one.dtype == other.dtype and one.shape == other.shape


def _strides(entry: TensorEntry) -> tuple[int, ...]:
    return tuple(step for size, step in zip(entry.shape, entry.stride, strict=True) if size > 1)


def _in_order(entry: TensorEntry, extent: memoryview) -> memoryview:
    """Return the elements of an array one after the other, from the bytes that it views."""
    size = entry.itemsize
    steps = tuple(step * size for step in entry.stride)
    first = entry.offset - entry.extent[0]
    whole = np.ndarray(entry.shape, np.dtype((np.void, size)), extent, first, steps)
    return np.ascontiguousarray(whole).reshape(-1).view(np.uint8).data


def _words(leaf: StoredLeaf) -> str:
    """Dtype and shape of an array, type and value of a plain value."""
    entry = leaf.entry
    if entry is None:
        return f"{leaf.kind} {leaf.text(40)}"
    grad = ", requires grad" if entry.requires_grad else ""
    return f"{entry.kind} {entry.dtype} {list(entry.shape)}{grad}"


# -- elements of two arrays of one dtype and shape


def compare_elements(entry: TensorEntry, one: memoryview, other: memoryview, into: Difference) -> None:
    """Compare elements of ``entry``'s dtype that lie back to back, and add what is found to ``into``."""
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
    """Add elements that differ in their bits, as numbers."""
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
    """Elements as numbers that numpy computes with; None where they are none."""
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
