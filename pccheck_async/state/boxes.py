# SPDX-License-Identifier: Apache-2.0
"""The boxes of a global tensor on this rank: offsets and sizes, computed from the placements of a DTensor.

torch has one offset per DTensor; where shards interleave (``_StridedShard``: FSDP2 over tensor parallelism), a local
tensor is several boxes. So the boxes are computed here, and compared with the shape and the offset that torch reports.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import product
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.state.leaves import index_boxes

Run: TypeAlias = tuple[int, int]
"""A range of indices along a dimension: the first one, and the one after the last."""


class Split(NamedTuple):
    """How a mesh dimension shards the tensor dimension ``dim``.

    The dimension is cut into ``factor`` pieces (1 except for ``_StridedShard``), and each piece into ``parts``. This
    rank has number ``part`` of each piece.
    """

    dim: int
    parts: int
    part: int
    factor: int = 1


class Box(NamedTuple):
    """A box of a global tensor: its sizes, and its first index in the global and in the local tensor, per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the box as a view of the local tensor."""
        for dim, (first, size) in enumerate(zip(self.local, self.sizes, strict=True)):
            if size != local.shape[dim]:
                local = local.narrow(dim, first, size)
        return local


def whole(tensor: torch.Tensor) -> Box:
    """Return the box that covers all of a tensor."""
    origin = (0,) * tensor.ndim
    return Box(origin, tuple(tensor.shape), origin)


def boxes_of_range(shape: Sequence[int], start: int, flat: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Cut elements ``start`` to ``start + len(flat)`` (in C order) of a tensor of ``shape`` into boxes.

    Yields each box with its view of ``flat``, which holds these elements.
    Source: ByteCheckpoint (NSDI '25), its decomposition of irregular shards.
    """
    stop, at = start + flat.numel(), 0
    for index in index_boxes(tuple(shape), start, stop) if start < stop else ():
        each = [(key, 1) if isinstance(key, int) else (key.start, key.stop - key.start) for key in index]
        each += [(0, size) for size in shape[len(each) :]]
        box = Box(tuple(low for low, _ in each), tuple(size for _, size in each), (0,) * len(shape))
        end = at + prod(box.sizes)
        yield box, flat[at:end].view(box.sizes)
        at = end


def boxes_of(shape: Sequence[int], splits: Sequence[Split]) -> tuple[Box, ...]:
    """Return the boxes that a shard of a tensor of global ``shape`` consists of, in C order: at least one, maybe empty.

    A split cuts n elements into pieces of ceil(n / parts), as ``torch.chunk`` does; splits apply in their order.
    """
    runs: list[list[Run]] = [[(0, size)] for size in shape]
    for split in splits:
        runs[split.dim] = _split(runs[split.dim], split)
    boxes = []
    for each in product(*map(_with_places, runs)):
        offsets, sizes, local = zip(*each, strict=True) if each else ((), (), ())
        boxes.append(Box(offsets, sizes, local))
    return tuple(boxes)


def _split(runs: list[Run], split: Split) -> list[Run]:
    length = sum(high - low for low, high in runs)
    outer = -(-length // split.factor)
    kept: list[Run] = []
    for start in range(0, length, max(outer, 1)):
        end = min(start + outer, length)
        inner = -(-(end - start) // split.parts)
        low = min(start + inner * split.part, end)
        kept += _between(runs, low, min(low + inner, end))
    joined: list[Run] = []
    for low, high in kept:
        if joined and joined[-1][1] == low:
            joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    return joined


def _between(runs: list[Run], low: int, high: int) -> Iterator[Run]:
    """Yield the parts of ``runs`` between two indices of their concatenation."""
    at = 0
    for first, last in runs:
        start, end = max(low - at, 0), min(high - at, last - first)
        if start < end:
            yield first + start, first + end
        at += last - first


def _with_places(runs: list[Run]) -> Iterator[tuple[int, int, int]]:
    """Yield for each run: first index, size, first index in the local tensor. Without runs, yield an empty one."""
    at = 0
    for low, high in runs or [(0, 0)]:
        yield low, high - low, at
        at += high - low


# -- live DTensors

_PLAIN: Final = frozenset((torch.Tensor, torch.nn.Parameter))
_KNOWN: Final = ("Shard", "Replicate", "_StridedShard")


def is_sharded(value: object) -> bool:
    """Return whether a value is a DTensor, without importing ``torch.distributed.tensor``, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


class FlatShard:
    """A rank's range of a flattened tensor, as used by ZeRO, Megatron's distributed optimizer and FSDP1.

    Put it into the state in place of the local tensor: it is saved as the boxes that the range consists of, at most
    ``2 * ndim - 1``, and restored from any other split. Every rank that shares the tensor has to put one into its
    state, even if its range is empty.

    Args:
        local: The elements, shape (n,); filled in place by a restore.
        global_shape: Shape of the whole tensor.
        start: Number of the first element in the flattened tensor, in C order.
        group: The process group of the ranks that share the tensor; by default all of the engine's group.

    Raises:
        ValueError: The range is not inside the tensor, or ``local`` does not have exactly one dimension.
    """

    __slots__ = ("group", "local", "shape", "start")

    def __init__(
        self,
        local: torch.Tensor,
        global_shape: Sequence[int],
        start: int,
        group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        self.group = group
        self.local = local
        self.shape = tuple(global_shape)
        self.start = start
        if local.ndim != 1:
            raise ValueError(f"a flat shard has one dimension, not the shape {tuple(local.shape)}")
        if start < 0 or start + local.numel() > prod(self.shape):
            last = start + local.numel()
            raise ValueError(f"elements {start} to {last} are not inside a tensor of shape {self.shape}")

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the elements."""
        return self.local.dtype

    def __repr__(self) -> str:
        return f"FlatShard({self.local.numel()} elements from {self.start} on, of shape {self.shape})"


class PlannedBoxes:
    """Boxes of a tensor that a planner assigned to this rank: it saves exactly these, without looking at other ranks'.

    Args:
        shape: Shape of the whole tensor.
        boxes: At least one pair per box: its first index in the whole tensor, and a tensor with its elements.
    """

    __slots__ = ("dtype", "shape", "views")

    def __init__(self, shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], torch.Tensor]]) -> None:
        self.shape = tuple(shape)
        self.dtype = boxes[0][1].dtype
        self.views = [(Box(tuple(offsets), tuple(view.shape), (0,) * view.ndim), view) for offsets, view in boxes]


def box_views(value: Any, path: str) -> list[tuple[Box, torch.Tensor]]:
    """Return the boxes of a tensor that this rank has, each with a view of its memory; a plain tensor is one box.

    Raises UnsupportedStateError, naming ``path``, if the boxes of a DTensor cannot be determined.
    """
    if isinstance(value, PlannedBoxes):
        return value.views
    if isinstance(value, FlatShard):
        return [*boxes_of_range(value.shape, value.start, value.local)]
    local, boxes = local_boxes(value, path) if is_sharded(value) else (value, (whole(value),))
    return [(box, box.of(local)) for box in boxes]


def local_tensors(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors, each DTensor replaced by its local tensor, which holds the memory."""
    if _PLAIN.issuperset(map(type, tensors)):
        return tensors
    with torch.no_grad():
        return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]


def local_boxes(tensor: Any, path: str) -> tuple[torch.Tensor, tuple[Box, ...]]:
    """Return the local tensor of a DTensor, which shares its memory, and the boxes that it consists of.

    Raises UnsupportedStateError, naming ``path``, if the boxes cannot be determined.
    """
    with torch.no_grad():
        local = tensor.to_local()
    try:
        boxes = _boxes_on(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape))
    except ValueError as error:
        raise UnsupportedStateError(f"{path}: {error}") from None
    if type(local) is not torch.Tensor:
        raise UnsupportedStateError(f"{path}: a DTensor of {type(local).__qualname__}s cannot be saved")
    last = boxes[-1]
    if tuple(local.shape) != tuple(map(sum, zip(last.local, last.sizes, strict=True))):
        raise UnsupportedStateError(
            f"{path}: a DTensor of shape {tuple(tensor.shape)}, {tensor.placements}, has the local shape "
            f"{tuple(local.shape)}, and it cannot be told which part that is; save x.full_tensor()"
        )
    return local, boxes


class Holders(NamedTuple):
    """The ranks that hold a tensor or parts of it, by their global ranks (in torch.distributed's default group)."""

    mesh: int
    """Hash of these ranks, and of how the tensor is placed on them."""
    alike: tuple[int, ...]
    """The ranks that have the same boxes as this rank."""
    by_boxes: tuple[tuple[int, ...], ...]
    """All the ranks, grouped: ranks in one group have the same boxes."""


def holders_of(tensor: Any, everyone: Holders) -> Holders:
    """Return the ranks that hold a tensor: ``everyone`` for planned boxes, and for a flat shard without a group."""
    if isinstance(tensor, PlannedBoxes):
        return everyone
    if isinstance(tensor, FlatShard):
        return everyone if tensor.group is None else holders_in(tensor.group)
    return _holders_on(tensor.device_mesh, tuple(tensor.placements))


@lru_cache(1 << 10)
def _holders_on(mesh: Any, placements: tuple[Any, ...]) -> Holders:
    replicated = [placement.is_replicate() for placement in placements]
    alike = tuple(slice(None) if free else at for free, at in zip(replicated, mesh.get_coordinate(), strict=True))
    sharded_first = sorted(range(mesh.mesh.ndim), key=replicated.__getitem__)
    copies = prod(size for free, size in zip(replicated, mesh.mesh.shape, strict=True) if free)
    by_boxes = mesh.mesh.permute(sharded_first).reshape(-1, copies).tolist()
    placed = _digest(f"{mesh.mesh.tolist()} {placements}")
    return Holders(placed, tuple(mesh.mesh[alike].flatten().tolist()), tuple(map(tuple, by_boxes)))


@lru_cache(1 << 10)
def holders_in(group: Any) -> Holders:
    """Return the ranks of a process group as holders of the same boxes."""
    return alike(torch.distributed.get_process_group_ranks(group))


def alike(ranks: Sequence[int]) -> Holders:
    """Return ``ranks`` as holders of the same boxes."""
    return Holders(hash_of(ranks), tuple(ranks), (tuple(ranks),))


def hash_of(ranks: Sequence[int]) -> int:
    """Return a hash of ranks, in any order, that is the same in every process."""
    return _digest(",".join(map(str, sorted(ranks))))


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")


@lru_cache(1 << 14)
def _boxes_on(mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Return the boxes of this rank. Raises ValueError if it is not on the mesh, or the boxes are uncertain."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this rank is not on the mesh of the DTensor ({mesh}); leave it out of this rank's state")
    splits = []
    for parts, part, placement in zip(mesh.shape, coordinate, placements, strict=True):
        kind = type(placement).__name__
        if kind not in _KNOWN:
            raise ValueError(f"a DTensor with the placement {placement!r} cannot be saved; redistribute it first")
        if kind != "Replicate":
            dim = placement.dim % len(shape)
            splits.append(Split(dim, parts, part, getattr(placement, "split_factor", 1)))
    boxes = boxes_of(shape, splits)
    _compare_with_torch(mesh, placements, shape, boxes)
    return boxes


def _compare_with_torch(mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...], boxes: tuple[Box, ...]) -> None:
    """Raise ValueError if torch computes other boxes for this rank; do nothing if torch lacks the private function."""
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    except (ImportError, TypeError):  # the name is a private one
        return
    last = boxes[-1]
    here = tuple(map(sum, zip(last.local, last.sizes, strict=True)))
    if here != tuple(sizes) or (0 not in here and boxes[0].offsets != tuple(offsets)):
        raise ValueError(f"torch and this package tell different parts of a DTensor {placements} on {mesh}")
