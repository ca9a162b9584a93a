"""Of ranks that have the same tensors each is saved by one of them, and all have as much to save."""

from __future__ import annotations

import torch

from pccheck_async.state import Owners


def test_every_tensor_has_one_owner_although_memory_is_used_again() -> None:
    """What a rank does not save is freed at once, where a ``state_dict()`` made it: its address tells nothing then."""
    ranks = range(3)
    tallies = [Owners(rank, [0, 0, 0], ranks, []).begin({}) for rank in ranks]
    kept: list[list[torch.Tensor]] = [[] for _ in ranks]
    for _ in range(60):
        owners = []
        for rank, tally in enumerate(tallies):
            tensor = torch.empty(10_000)
            if tally.owns(ranks, tensor):
                owners.append(rank)
                kept[rank].append(tensor)
            del tensor
        assert len(owners) == 1
    assert [*map(len, kept)] == [20, 20, 20]


def test_what_is_tied_has_one_owner() -> None:
    tally = Owners(0, [0, 0], range(2), []).begin({})
    first, second = torch.zeros(5), torch.zeros(5)
    assert [tally.owns(range(2), each) for each in (first, second, first, second)] == [True, False, True, False]


def test_ranks_with_disks_of_their_own_save_all() -> None:
    tally = Owners(1, [0, 1, 1], range(3), []).begin({})
    assert tally.owns([0, 1], torch.zeros(5))
    assert tally.owns([1, 2], torch.zeros(5))
    assert not tally.owns([1, 2], torch.zeros(5))
