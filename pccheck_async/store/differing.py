# SPDX-License-Identifier: Apache-2.0
"""Names under which the parts of one checkpoint hold different tensors: experts, stages, buffers of each rank.

Such a name is ambiguous. Tensors of equal layout are compared by the checksums of their chunks; the bytes of others
are read, until more names differ than a message lists.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import torch
from msgspec import structs

from pccheck_async.errors import CorruptStoreError, first_few
from pccheck_async.format import dtypes
from pccheck_async.format.skeleton import ArrayNode, ShardedNode
from pccheck_async.state import boxes_of_range
from pccheck_async.state.restore.parts import StoredBox, Wanted, private_mesh, reshard, stored_boxes
from pccheck_async.state.restore.tree import leaves
from pccheck_async.store.part_reader import PartReader
from pccheck_async.telemetry import write

__all__ = ["differing", "warn_of_others"]

_MOST_NAMED: Final = 20
_MOST_RANKS: Final = 8
_BATCH_BYTES: Final = 16 << 20


class _Tensor(NamedTuple):
    """One of the tensors of a name: a plain one of one part, or one that lies on the ranks of a mesh."""

    mesh: int
    kind: tuple[Any, ...]
    """Dtype and shape, and for plain tensors also type and reversed dimensions: tensors of different kinds differ."""
    itemsize: int
    part: int
    """The lowest rank whose part has any of the tensor."""
    is_plain: bool
    """Whether it is a plain tensor of that part alone."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor viewed as bytes: its own shape, with the item size as last dimension."""
        return (*self.kind[1], self.itemsize)


class _Pair(NamedTuple):
    """A range of bytes, from ``low`` to ``high`` in C order, of two tensors of one name."""

    path: str
    tensors: tuple[_Tensor, _Tensor]
    low: int
    high: int


async def differing(
    parts: Mapping[int, PartReader],
    among: Callable[[str], bool] = lambda _: True,
    *,
    share: tuple[int, int] = (0, 1),
    incomplete: bool = False,
) -> list[str]:
    """Return paths under which parts hold different tensors or arrays; once more than 20 are known, no bytes are read.

    Paths below the state of a :class:`pccheck_async.RNGState` are left out: they differ on all ranks, and another
    rank's are of no use.

    Args:
        parts: Readers of the parts, by the ranks that saved them.
        among: Function that returns whether a path is compared.
        share: Index of this rank and number of the ranks that compare these parts, each a share of the pairs.
        incomplete: Whether there are further parts that cannot be read here: tensors that would have to be compared
            with theirs are taken for different.

    Raises DamagedError, ReadError.
    """
    named = {path: tensors for path, tensors in _named(parts).items() if among(path)}
    found = {
        path
        for path, tensors in named.items()
        if len({one.kind for one in tensors}) > 1 or (incomplete and (len(tensors) > 1 or tensors[0].is_plain))
    }
    comparison = _Comparison(parts, found)
    number, count = share
    for other in range(1, max(map(len, named.values()), default=0)):
        if other % count == number:
            await comparison.compare(
                (path, (all_[0], all_[other])) for path, all_ in named.items() if len(all_) > other
            )
    return sorted(found)


def ranks_in_words(ranks: Sequence[int], count: int) -> str:
    """Return the words for ``count`` ranks, of which ``ranks`` are the first, for a message."""
    few = ", ".join(map(str, ranks[:_MOST_RANKS]))
    more = f" and {count - _MOST_RANKS} more" if count > _MOST_RANKS else ""
    return f"rank{'s' if count > 1 else ''} {few}{more}"


def warn_of_others(names: Sequence[str], path: str | os.PathLike[str]) -> None:
    """Log that rank 0's tensors are taken and other ranks have different ones under ``names``, if there are any."""
    if names:
        text = "other ranks have different tensors, and those of rank 0 are taken: %s; name the rank that is meant"
        write("other_ranks", text, first_few(names), store=os.fspath(path))


def _named(parts: Mapping[int, PartReader]) -> dict[str, list[_Tensor]]:
    """Return the tensors of each path, one for each mesh, in the order of the lowest ranks that have them."""
    named: dict[str, dict[int, _Tensor]] = {}
    for rank in sorted(parts):
        manifest = parts[rank].manifest
        for path, node in leaves(manifest.skeleton):
            if isinstance(node, ShardedNode):
                itemsize = dtypes.torch_dtype(node.dtype).itemsize
                one = _Tensor(node.mesh, (node.dtype, node.shape), itemsize, rank, False)
            elif isinstance(node, ArrayNode):
                entry = manifest.tensors[node.index]
                reverses = tuple(dim for dim, step in enumerate(entry.stride) if step < 0)
                kind = entry.dtype, entry.shape, entry.kind == "ndarray", reverses
                one = _Tensor(private_mesh(rank), kind, entry.itemsize, rank, True)
            else:
                continue
            named.setdefault(path, {}).setdefault(one.mesh, one)
    generators = tuple(path.removesuffix("python.words") for path in named if path.endswith(".python.words"))
    return {path: [*each.values()] for path, each in named.items() if not path.startswith(generators)}


class _Comparison:
    """Compares pairs of tensors, batch by batch; the paths of those that differ are added to ``found``."""

    def __init__(self, parts: Mapping[int, PartReader], found: set[str]) -> None:
        self._parts = parts
        self._found = found
        self._boxes = {rank: _in_bytes(stored_boxes(part.manifest, rank)) for rank, part in parts.items()}
        self._chunk_starts = {rank: [chunk.offset for chunk in part.manifest.chunks] for rank, part in parts.items()}

    async def compare(self, pairs: Iterable[tuple[str, tuple[_Tensor, _Tensor]]]) -> None:
        batch, nbytes = list[_Pair](), 0
        for path, tensors in pairs:
            end = 0 if self._same_chunks(path, *tensors) else prod(tensors[0].shape)
            for low in range(0, end, _BATCH_BYTES):
                if path in self._found or len(self._found) > _MOST_NAMED:
                    break
                batch.append(_Pair(path, tensors, low, min(low + _BATCH_BYTES, end)))
                nbytes += batch[-1].high - low
                if nbytes >= _BATCH_BYTES:
                    await self._read(batch)
                    batch, nbytes = [], 0
        await self._read(batch)

    async def _read(self, batch: Sequence[_Pair]) -> None:
        one, other = [await self._filled(batch, side) for side in (0, 1)]
        self._found.update(pair.path for pair, a, b in zip(batch, one, other, strict=True) if not torch.equal(a, b))

    async def _filled(self, batch: Sequence[_Pair], side: int) -> list[torch.Tensor]:
        read = [torch.empty(pair.high - pair.low, dtype=torch.uint8) for pair in batch]
        wanted = [
            Wanted(pair.path, pair.path, one.mesh, one.shape, box, local, local)
            for pair, flat in zip(batch, read, strict=True)
            for one in pair.tensors[side : side + 1]
            for box, local in boxes_of_range(one.shape, pair.low, flat)
        ]
        targets, troubles = reshard(wanted, self._boxes, min(self._parts))
        if troubles:
            raise CorruptStoreError(f"the parts do not fit together: {first_few(troubles)}")
        for rank, each in targets.items():
            await self._parts[rank].fill(each)
        return read

    def _same_chunks(self, path: str, one: _Tensor, other: _Tensor) -> bool:
        """Whether two plain tensors lie at the same place in chunks of the same checksums."""
        if not (one.is_plain and other.is_plain):
            return False
        ((box,), (beside,)) = (self._boxes[each.part][path] for each in (one, other))
        if (box.start, box.entry.offset, box.entry.stride) != (beside.start, beside.entry.offset, beside.entry.stride):
            return False
        if box.entry.storage is None:
            return True
        low, high = (box.start + end for end in box.entry.extent)
        chunks, besides = (
            self._parts[each.part].manifest.chunks[
                bisect_right(self._chunk_starts[each.part], low) - 1 : bisect_left(self._chunk_starts[each.part], high)
            ]
            for each in (one, other)
        )
        return chunks == besides


def _in_bytes(named: Mapping[str, Sequence[StoredBox]]) -> dict[str, list[StoredBox]]:
    """Return the boxes of elements as boxes of bytes, with the bytes of an element as one more dimension."""
    return {path: [*map(_box_in_bytes, boxes)] for path, boxes in named.items()}


def _box_in_bytes(box: StoredBox) -> StoredBox:
    entry, itemsize = box.entry, box.entry.itemsize
    # Dimensions that numpy reverses are taken in the order of memory.
    first = sum((size - 1) * step for size, step in zip(entry.shape, entry.stride, strict=True) if step < 0)
    stride = (*(abs(step) * itemsize for step in entry.stride), 1)
    in_bytes = structs.replace(
        entry, dtype="uint8", kind="tensor", shape=(*entry.shape, itemsize), stride=stride, requires_grad=False,
        offset=0 if entry.storage is None else entry.offset + first * itemsize,
    )  # fmt: skip
    return box._replace(offsets=(*box.offsets, 0), entry=in_bytes)
