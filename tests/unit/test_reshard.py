"""Which boxes a tensor is made of; those that overlap are refused, wherever they do."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from pccheck_async.format.manifest import TensorEntry
from pccheck_async.state.boxes import whole
from pccheck_async.state.restore.parts import StoredBox, Wanted, reshard


def stored(part: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> StoredBox:
    stride = tuple(torch.empty(sizes).stride())
    return StoredBox(part, 0, offsets, TensorEntry(0, "float32", sizes, stride, 0, "tensor", False), 0)


def troubles(shape: tuple[int, ...], boxes: list[StoredBox]) -> list[str]:
    local = torch.empty(shape)
    wanted = Wanted("w", "w", 0, shape, whole(local), local, local)
    parts = {box.part: {"w": [other for other in boxes if other.part == box.part]} for box in boxes}
    return reshard([wanted], parts, 0)[1]


TILES = [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2)), ((2, 2), (2, 2))]


def test_tiles_that_cover_a_tensor_make_it() -> None:
    for order in permutations(range(4)):
        assert not troubles((4, 4), [stored(part, *TILES[tile]) for part, tile in enumerate(order)])


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((4,), [((0,), (3,)), ((2,), (2,))]),
        ((4,), [((0,), (4,)), ((1,), (1,))]),
        ((4, 4), [((0, 0), (4, 3)), ((0, 2), (4, 2))]),
        ((4, 4), [*TILES, ((1, 1), (2, 2))]),
        ((6,), [((0,), (5,)), ((1,), (1,)), ((4,), (2,))]),  # not with its neighbour, but with the one before that
        ((4, 4), [((0, 0), (3, 4)), ((2, 0), (2, 2)), ((2, 2), (2, 2))]),
    ],
)
def test_boxes_that_overlap_are_refused(
    shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    for order in permutations(boxes):
        found = [stored(part, *box) for part, box in enumerate(order)]
        assert troubles(shape, found) == ["w (boxes of it overlap in the checkpoint)"]


def test_a_hole_is_refused() -> None:
    assert troubles((4, 4), [stored(part, *tile) for part, tile in enumerate(TILES[:3])]) == [
        "w (the checkpoint has not all of it)"
    ]


def test_tensors_that_a_dry_run_does_not_make_are_compared_and_not_filled() -> None:
    local = torch.empty((4, 4), device="meta")
    wanted = [Wanted(name, name, 0, (4, 4), whole(local), local, local) for name in ("whole", "torn")]
    tiles = [stored(0, *tile) for tile in TILES]
    targets, found = reshard(wanted, {0: {"whole": tiles, "torn": tiles[:3]}}, 0)
    assert found == ["torn (the checkpoint has not all of it)"]
    assert not targets
