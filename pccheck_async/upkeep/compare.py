"""How two checkpoints differ: leaf by leaf, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pccheck_async.engine.config import EngineConfig
from pccheck_async.format.info import CheckpointInfo, check_step
from pccheck_async.format.manifest import TensorEntry
from pccheck_async.medium.open_medium import IO, Session
from pccheck_async.state.restore.listing import Listing, StoredLeaf, list_leaves
from pccheck_async.store.store_reader import OneLoop, with_session
from pccheck_async.upkeep.chunks import Progress
from pccheck_async.upkeep.elements import Difference, compare_elements
from pccheck_async.upkeep.held import hold, open_reader
from pccheck_async.upkeep.verified import VerifiedPayload

__all__ = ["Comparison", "LeafDifference", "compare_checkpoints"]

_PIECE_BYTES = 8 << 20

Change = Literal["added", "removed", "kind", "dtype", "shape", "elements", "value", "container"]


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
            listings = [list_leaves(held.manifest) for held in helds]
            payloads = [VerifiedPayload(held, listing) for held, listing in zip(helds, listings, strict=True)]
            for payload in payloads:
                stack.push_async_callback(payload.close)
            comparing = _Comparing(first, listings, payloads, progress)
            differences = await comparing.run()
            return Comparison(
                helds[0].entry.info, helds[1].entry.info, comparing.leaves, comparing.done, tuple(differences)
            )

    async def work(first: Session) -> Comparison:
        return await with_session(paths[1], io, lambda second: with_both(first, second), EngineConfig())

    with OneLoop() as loop:
        return loop.call(with_session(paths[0], io, work, EngineConfig()))


class _Comparing:
    def __init__(
        self, session: Session, listings: list[Listing], payloads: list[VerifiedPayload], progress: Progress
    ) -> None:
        self._session = session
        self._listings = listings
        self._payloads = payloads
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
        found = list(self._containers())
        for path, one in self._ones.items():
            other = self._others.get(path)
            if other is None:
                found.append(LeafDifference(path, "removed", _words(one), ""))
            elif (difference := await self._pair(path, one, other)) is not None:
                found.append(difference)
        added = [leaf for path, leaf in self._others.items() if path not in self._ones]
        return found + [LeafDifference(leaf.path, "added", "", _words(leaf)) for leaf in added]

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
                a = await self._payloads[0].read(here[0] + start, here[0] + stop)
                b = await self._payloads[1].read(there[0] + start, there[0] + stop)
                await call(compare_elements, one, a, b, into)
                self._progress(self.done + start, self._total)
            return
        a, b = await self._payloads[0].read(*here), await self._payloads[1].read(*there)
        a, b = await call(_in_order, one, a), await call(_in_order, other, b)
        await call(compare_elements, one, a, b, into)


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
