"""Of ranks that have the same tensors each is saved by one of them, and all have as much to save.

Whether ranks agree about that shows in sums over all of them, before anything is committed.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.state import Memos, Owners
from pccheck_async.state.boxes import Holders, hash_of
from pccheck_async.state.save.owners import Named, Tally

NAMED = Named("model.weight", "torch.float32", (5,))


def on(*by_boxes: Sequence[int], rank: int | None = None) -> Holders:
    """Return the holders of a tensor, ranks that have the same boxes together, as one of them sees it."""
    rank = by_boxes[0][0] if rank is None else rank
    alike = next(each for each in by_boxes if rank in each)
    return Holders(hash_of([*chain.from_iterable(by_boxes)]), tuple(alike), tuple(map(tuple, by_boxes)))


def tally_of(rank: int, domains: Sequence[int], members: Sequence[int] | None = None) -> Tally:
    return Owners(rank, domains, range(len(domains)) if members is None else members, []).begin({})


def test_every_tensor_has_one_owner_although_memory_is_used_again() -> None:
    """What a rank does not save is freed at once, where a ``state_dict()`` made it: its address tells nothing then."""
    ranks = range(3)
    tallies = [tally_of(rank, [0, 0, 0]) for rank in ranks]
    kept: list[list[torch.Tensor]] = [[] for _ in ranks]
    for _ in range(60):
        owners = []
        for rank, tally in enumerate(tallies):
            tensor = torch.empty(10_000)
            if tally.owns(NAMED, on(ranks), tensor):
                owners.append(rank)
                kept[rank].append(tensor)
            del tensor
        assert len(owners) == 1
    assert [*map(len, kept)] == [20, 20, 20]


def test_what_is_tied_has_one_owner() -> None:
    tally = tally_of(0, [0, 0])
    first, second = torch.zeros(5), torch.zeros(5)
    found = [tally.owns(NAMED, on(range(2)), each) for each in (first, second, first, second)]
    assert found == [True, False, True, False]


def test_ranks_with_disks_of_their_own_save_all() -> None:
    tally = tally_of(1, [0, 1, 1])
    assert tally.owns(NAMED, on([0, 1], rank=1), torch.zeros(5))
    assert tally.owns(NAMED, on([1, 2]), torch.zeros(5))
    assert not tally.owns(NAMED, on([1, 2]), torch.zeros(5))


class Equal(torch.optim.SGD):
    """Compares itself with others in a way of its own."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("no code of a user compares its objects")

    __hash__ = torch.optim.SGD.__hash__


def test_objects_are_not_compared_by_their_own_code() -> None:
    owners, memo = Owners(0, [0], [0], []), Memos().of({})
    one, other = (Equal([torch.ones(1)], lr=0.1) for _ in range(2))
    for optimizer in (one, one, other):
        owners.begin({"optimizer": optimizer}, memo)


def test_a_model_is_not_kept_alive() -> None:
    owners, model = Owners(0, [0], [0], []), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    owners.begin({"optimizer": optimizer})
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


# -- sums


def total(domains: Sequence[int], walk: Callable[[int, Tally], None]) -> Counter[str]:
    """Return the sums over all ranks that are not 0, where ``walk`` shows each one its tensors."""
    sums: Counter[str] = Counter()
    for rank in range(len(domains)):
        tally = tally_of(rank, domains)
        walk(rank, tally)
        sums.update(tally.sums)
    return Counter({name: value for name, value in sums.items() if value % (1 << 64)})


def show(tally: Tally, rank: int, *tensors: tuple[str, int, list[list[int]]]) -> None:
    """Show tensors: path, length, and the ranks that have them, those with the same boxes together."""
    for path, length, by_boxes in tensors:
        if any(rank in each for each in by_boxes):
            tally.owns(Named(path, "float32", (length,)), on(*by_boxes, rank=rank), torch.zeros(length))


REPLICATED = [[0, 1, 2, 3]]
HYBRID = [[0, 2], [1, 3]]
SHARDED = [[0], [1], [2], [3]]
STATE = (("model.a", 7, REPLICATED), ("model.b", 5, HYBRID), ("optimizer.c", 9, SHARDED), ("model.d", 1, [[1, 3]]))


@pytest.mark.parametrize("domains", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 2, 3], [0, 0, 0, 1]])
def test_ranks_that_agree_make_zero(domains: list[int]) -> None:
    assert not total(domains, lambda rank, tally: show(tally, rank, *STATE))


def test_boxes_without_bytes_have_one_owner_wherever_they_lie() -> None:
    """Those of one rank may lie in one memory, and those of another each in its own: their address tells neither."""
    kept = []

    def walk(rank: int, tally: Tally) -> None:
        one = torch.zeros(9)
        for number in range(8):
            memory = torch.zeros(1 + number) if rank else one
            local = memory[len(memory) :] if number % 2 else torch.zeros(5)
            kept.append(local)
            tally.owns(Named(f"w{number}", "float32", tuple(local.shape)), on([0, 1], rank=rank), local)

    assert not total([0, 0], walk)
    assert {each.data_ptr() for each in kept if not each.nbytes} == {0}


@st.composite
def meshes(draw: st.DrawFn) -> list[list[int]]:
    """Ranks of up to 16, those that have the same boxes together."""
    boxes, copies = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ranks = draw(st.permutations(range(16)))
    return [list(ranks[number : boxes * copies : boxes]) for number in range(boxes)]


@pytest.mark.slow
@given(
    st.lists(st.tuples(meshes(), st.integers(1, 1000)), max_size=8),
    st.lists(st.integers(0, 3), min_size=16, max_size=16),
)
def test_each_box_has_one_owner_in_each_domain(tensors: list[tuple[list[list[int]], int]], domains: list[int]) -> None:
    owners: Counter[tuple[int, int, int]] = Counter()

    def walk(rank: int, tally: Tally) -> None:
        for number, (by_boxes, length) in enumerate(tensors):
            for box, holders in enumerate(by_boxes):
                named = Named(f"w{number}", "float32", (length,))
                if rank in holders and tally.owns(named, on(*by_boxes, rank=rank), torch.zeros(length)):
                    owners[number, box, domains[rank]] += 1

    assert not total(domains, walk)
    held = {
        (number, box, domains[rank])
        for number, (by_boxes, _) in enumerate(tensors)
        for box, holders in enumerate(by_boxes)
        for rank in holders
    }
    assert owners == Counter(held)


@pytest.mark.parametrize("domains", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3]])
@pytest.mark.parametrize("lacks", range(4))
@pytest.mark.parametrize("number", range(3))
def test_a_rank_that_lacks_a_tensor_shows(domains: list[int], lacks: int, number: int) -> None:
    path = STATE[number][0]

    def walk(rank: int, tally: Tally) -> None:
        show(tally, rank, *(each for each in STATE if rank != lacks or each[0] != path))

    assert path.split(".")[0] in total(domains, walk)


def test_ranks_that_walk_in_another_order_show() -> None:
    """Two tensors of other sizes change who has the fewest bytes: one has two owners then, or none."""
    tensors = [("model.a", 7, REPLICATED), ("model.b", 9, REPLICATED), ("model.c", 100, REPLICATED)]

    def walk(rank: int, tally: Tally) -> None:
        show(tally, rank, *(tensors if rank else reversed(tensors)))

    assert total([0, 0, 0, 0], walk)


def test_what_shares_memory_on_other_ranks_is_decided_by_these() -> None:
    """Rank 0 has two tensors in one memory, or of no elements: one with rank 1, one with rank 2, who know one each."""
    for elements in (0, 5):
        tied = torch.zeros(elements)
        sums: Counter[str] = Counter()
        for rank in range(3):
            tally = tally_of(rank, [0, 0, 0])
            for path, holders, tensor in (("x", [0, 2], torch.zeros(9)), ("a", [0, 1], tied), ("b", [0, 2], tied)):
                if rank in holders:
                    tally.owns(NAMED._replace(path=path), on(holders), tensor)
            sums.update(tally.sums)
        assert not [name for name, value in sums.items() if value % (1 << 64)]


def test_ranks_with_another_shape_or_dtype_show() -> None:
    assert total([0, 0], lambda rank, tally: show(tally, rank, ("a", 5 + rank, [[0, 1]])))
    assert total([0, 1], lambda rank, tally: show(tally, rank, ("a", 5 + rank, [[0], [1]])))


def test_parts_on_ranks_outside_of_the_group_are_refused() -> None:
    tally = tally_of(0, [0, 0], members=[0, 1])
    assert tally.owns(NAMED, on([0, 2], [1, 3]), torch.zeros(5)), "replicas elsewhere are not needed"
    with pytest.raises(UnsupportedStateError, match=r"model\.weight: .*not in the engine's group"):
        tally.owns(NAMED, on([0], [2]), torch.zeros(5))
    with pytest.raises(UnsupportedStateError, match=r"model\.weight: .*not in the engine's group"):
        tally.note_range(NAMED, on([2, 3]), 0, 5)


@pytest.mark.parametrize(
    ("bounds", "fits"),
    [
        ([(0, 4), (4, 7), (7, 12)], True),
        ([(0, 12), (12, 12), (12, 12)], True),
        ([(5, 12), (0, 0), (0, 5)], True),
        ([(0, 4), (4, 7), (7, 11)], False),
        ([(0, 4), (5, 7), (7, 12)], False),
        ([(0, 6), (4, 10), (10, 12)], False),
        ([(1, 4), (4, 7), (7, 12)], False),
        ([(0, 12), (0, 12), (0, 12)], False),
        ([(0, 6), (6, 12), (0, 6)], False),
        ([(0, 0), (0, 0), (0, 0)], False),
        ([(0, 6), (6, 12)], False),
    ],
)
def test_ranges_have_to_be_all_of_a_flattened_tensor(bounds: list[tuple[int, int]], fits: bool) -> None:
    def walk(rank: int, tally: Tally) -> None:
        if rank < len(bounds):
            low, high = bounds[rank]
            tally.note_range(Named("master", "float32", (3, 4)), tally.everyone, low, high - low)

    assert (not total([0, 0, 1], walk)) == fits
