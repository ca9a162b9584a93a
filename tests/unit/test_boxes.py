"""Boxes of sharded tensors: each element of a tensor on exactly one rank of a mesh dimension, where torch puts it."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard, _utils
from torch.distributed.tensor.placement_types import _StridedShard

from pccheck_async.state.boxes import Box, FlatShard, Split, boxes_of, boxes_of_range
from tests.support.warm import run_warm


def pieces(shape: tuple[int, ...], splits: list[Split]) -> torch.Tensor:
    """Return the local tensor, which holds its global indices, as torch splits it."""
    local = torch.arange(prod(shape)).reshape(shape)
    for dim, parts, part, factor in splits:
        placement = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
        local = placement._split_tensor(local, parts, with_padding=False)[0][part]
    return local


def by_boxes(shape: tuple[int, ...], splits: list[Split]) -> torch.Tensor:
    """Return the same from the boxes."""
    indices = torch.arange(prod(shape)).reshape(shape)
    boxes = boxes_of(shape, splits)
    last = boxes[-1]
    local = torch.full([at + size for at, size in zip(last.local, last.sizes, strict=True)], -1)
    for box in boxes:
        box.of(local).copy_(Box(box.offsets, box.sizes, box.offsets).of(indices))
    return local


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int, int]]]:
    """A global shape, and for each mesh dimension a tensor dimension, the ranks along it, and a split factor."""
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    splits = st.tuples(st.integers(0, len(shape) - 1), st.integers(1, 5), st.sampled_from([1, 1, 2, 3]))
    return shape, draw(st.lists(splits, max_size=3))


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(meshes())
def test_the_boxes_of_all_ranks_are_where_torch_puts_the_shards_and_tile_the_tensor(
    mesh: tuple[tuple[int, ...], list[tuple[int, int, int]]],
) -> None:
    shape, dims = mesh
    found: list[int] = []
    for coordinate in product(*(range(parts) for _, parts, _ in dims)):
        splits = [Split(dim, parts, part, factor) for (dim, parts, factor), part in zip(dims, coordinate, strict=True)]
        local = pieces(shape, splits)
        assert torch.equal(by_boxes(shape, splits), local) or not local.numel()
        assert prod(by_boxes(shape, splits).shape) == local.numel()
        found += local.flatten().tolist()
    assert sorted(found) == [*range(prod(shape))]


@pytest.mark.parametrize(("length", "parts"), [(5, 4), (1, 3), (0, 2), (12, 5)])
def test_uneven_and_empty_shards(length: int, parts: int) -> None:
    """torch.chunk leaves the last ranks less, or nothing."""
    each = [boxes_of((length, 2), [Split(0, parts, part)]) for part in range(parts)]
    assert all(len(boxes) == 1 for boxes in each)
    assert sum(boxes[0].sizes[0] for boxes in each) == length


def test_shards_that_interleave_are_several_boxes() -> None:
    """FSDP2 over tensor parallelism: the first rank of 2 x 2 has rows 0 and 2 of 4, as one box each."""
    boxes = boxes_of((8, 3), [Split(0, 2, 0, factor=2)])
    assert [(box.offsets, box.sizes, box.local) for box in boxes] == [
        ((0, 0), (2, 3), (0, 0)),
        ((4, 0), (2, 3), (2, 0)),
    ]


def test_a_tensor_of_a_billion_elements_takes_no_time() -> None:
    assert len(boxes_of((1 << 40,), [Split(0, 1024, 1023), Split(0, 8, 7, factor=1)])) == 1


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_a_range_of_a_flattened_tensor_is_few_boxes(sizes: list[int], data: st.DataObject) -> None:
    shape = tuple(sizes)
    whole = torch.arange(prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    flat = torch.full((stop - start,), -1)
    boxes = [*boxes_of_range(shape, start, flat)]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    for box, view in boxes:
        view.copy_(Box(box.offsets, box.sizes, box.offsets).of(whole))
    assert flat.tolist() == [*range(start, stop)]


def test_impossible_flat_shards() -> None:
    with pytest.raises(ValueError, match="one dimension"):
        FlatShard(torch.zeros(2, 2), (4,), 0)
    with pytest.raises(ValueError, match="elements 3 to 7 are not inside"):
        FlatShard(torch.zeros(4), (2, 3), 3)


@pytest.mark.slow
def test_private_names_of_torch_may_be_missing() -> None:
    """What only serves advice, or compares what is known already, breaks nothing where torch has it no more."""
    code = """
import torch, torch.distributed as dist
import torch.utils.data.dataloader as loaders
import torch.distributed.tensor._utils as utils
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
del loaders._BaseDataLoaderIter
from pccheck_async.errors import CheckpointError
from pccheck_async.state.boxes import box_views
from pccheck_async.state.save.advice import unsupported
assert "save the loader, not its iterator" in str(unsupported(iter(loaders.DataLoader([1])), "x"))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
tensors = [distribute_tensor(torch.ones(n), mesh, [Shard(0)]) for n in (4, 5, 6)]
def wrong(*_):
    return (9,), (9,)
def changed():
    pass
for tensor, name in zip(tensors, (wrong, changed, None)):
    if name is None:
        del utils.compute_local_shape_and_global_offset
    else:
        utils.compute_local_shape_and_global_offset = name
    try:
        print(box_views(tensor, "x")[0][0].sizes)
    except CheckpointError as error:
        print("torch and this package tell different parts" in str(error))
dist.destroy_process_group()
"""
    done = run_warm("-c", code, text=True)
    assert done.stdout.splitlines() == ["True", "(5,)", "(6,)"], done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(_utils, "_compute_local_shape_and_global_offset"), reason="torch has another oracle")
@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((1024,), [Shard(0)]),
        ((1024,), [Shard(1)]),
        ((32, 32), [Shard(0), Shard(1)]),
        ((32, 32), [Replicate(), Shard(0)]),
        ((32, 32), [_StridedShard(0, split_factor=32), Shard(0)]),
        ((4, 16, 16), [Replicate(), _StridedShard(1, split_factor=16), Shard(1)]),
        ((8, 8, 16), [Shard(1), Shard(0), Shard(1)]),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "shape", [(31, 4096), *(pytest.param(shape, marks=pytest.mark.campaign) for shape in [(1000, 37), (3, 5)])], ids=str
)
def test_every_rank_of_a_large_mesh(mesh: tuple[int, ...], placements: list[Any], shape: tuple[int, ...]) -> None:
    count = np.zeros(shape, np.int64)
    for coordinate in product(*map(range, mesh)):
        splits = [
            Split(placement.dim, parts, part, getattr(placement, "split_factor", 1))
            for parts, part, placement in zip(mesh, coordinate, placements, strict=True)
            if not placement.is_replicate()
        ]
        boxes = boxes_of(shape, splits)
        sizes, offsets = _utils._compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
        here = tuple(map(sum, zip(boxes[-1].local, boxes[-1].sizes, strict=True)))
        assert here == sizes
        assert 0 in here or boxes[0].offsets == offsets
        for box in boxes:
            count[tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))] += 1
    replicas = prod(parts for parts, placement in zip(mesh, placements, strict=True) if placement.is_replicate())
    assert (count == replicas).all()
