"""The order of an epoch, and batches of it that resume anywhere, on any rank."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from pccheck_async import Group, ResumableLoader, ResumableSampler
from pccheck_async.training.data import KeyedPermutation, Order, mix
from tests.support.datasets import SHUFFLES, Numbers, values
from tests.support.ranks import run_ranks

# Orders


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 99, 100, 101, 4097])
def test_a_keyed_permutation_is_one(size: int) -> None:
    for key in range(5):
        found = KeyedPermutation(size, key)[np.arange(size, dtype=np.uint64)]
        assert sorted(found.tolist()) == list(range(size))


def test_a_keyed_permutation_is_a_function_of_the_place() -> None:
    permutation = KeyedPermutation(10**15, 7)
    assert permutation[np.array([5, 10**15 - 1], np.uint64)].tolist() == [
        int(permutation[np.array([place], np.uint64)][0]) for place in (5, 10**15 - 1)
    ]
    found = permutation[np.arange(100_000, dtype=np.uint64)]
    assert len(set(found.tolist())) == 100_000
    assert int(found.max()) < 10**15


def chi_square(counts: Counter[Any], cells: int) -> float:
    expected = counts.total() / cells
    return sum((count - expected) ** 2 for count in counts.values()) / expected + (cells - len(counts)) * expected


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [True, "keyed"])
def test_every_order_is_as_likely_as_any_other(shuffle: Any) -> None:
    """All 120 orders of five samples, and which sample follows which among 12; bounds are 5 sigma."""
    orders = Counter(tuple(Order(5, seed, shuffle).indices(seed + 1, 0, 5)) for seed in range(3000))
    assert chi_square(orders, 120) < 119 + 5 * (2 * 119) ** 0.5
    pairs: Counter[Any] = Counter()
    for epoch in range(500):
        drawn = Order(12, 3, shuffle).indices(epoch, 0, 12)
        pairs.update(pairwise(drawn))
    assert chi_square(pairs, 12 * 11) < 131 + 5 * (2 * 131) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [True, "keyed"])
def test_neighbouring_seeds_and_epochs_share_no_order(shuffle: Any) -> None:
    drawn = {tuple(Order(50, seed, shuffle).indices(epoch, 0, 50)) for seed in range(-10, 20) for epoch in range(30)}
    assert len(drawn) == 900


def test_orders_stay_as_they_are_from_release_to_release() -> None:
    """A job that is resumed with a newer version goes on in the same order."""
    assert mix("order", 0, 0) == 14906057024122720992
    assert Order(10, 1, "keyed").indices(2, 0, 10) == [4, 0, 7, 9, 3, 2, 8, 6, 1, 5]


@pytest.mark.parametrize("off", [0, np.False_])
def test_what_equals_false_does_not_shuffle(off: Any) -> None:
    sampler = ResumableSampler(8, batch_size=4, shuffle=off, drop_last=off)
    assert list(sampler) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    state = json.loads(json.dumps(sampler.state_dict()))
    ResumableSampler(8, batch_size=4, shuffle=False).load_state_dict(state)


# The sampler


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    batch_size, world_size = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    drop_last = draw(st.booleans())
    least = batch_size * world_size if drop_last else world_size
    return {
        "data": draw(st.integers(least, least + 60)),
        "batch_size": batch_size,
        "world_size": world_size,
        "drop_last": drop_last,
        "shuffle": draw(st.sampled_from(SHUFFLES)),
        "seed": draw(st.integers(-(2**70), 2**70)),
    }


def ranks(case: dict[str, Any]) -> list[ResumableSampler]:
    return [ResumableSampler(rank=rank, **case) for rank in range(case["world_size"])]


def steps(samplers: list[ResumableSampler]) -> list[list[list[int]]]:
    """The rest of the epoch: per step the batch of every rank. All ranks take the same number of steps."""
    return [list(step) for step in zip(*samplers, strict=True)]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(cases(), st.data())
def test_resuming_anywhere_loses_and_repeats_nothing(case: dict[str, Any], data: st.DataObject) -> None:
    whole = ranks(case)
    epochs = [steps(whole) for _ in range(3)]
    full = case["batch_size"] * case["world_size"]
    expected = case["data"] // full * full if case["drop_last"] else case["data"]
    for epoch in epochs:
        assert len(epoch) == len(whole[0])
        counted = Counter(index for step in epoch for batch in step for index in batch)
        assert set(counted.values()) == {1}
        assert counted.total() == expected
        assert counted.keys() <= set(range(case["data"]))
        for step in epoch[:-1]:
            assert [len(batch) for batch in step] == [case["batch_size"]] * case["world_size"]
        sizes = [len(batch) for batch in epoch[-1]]
        assert min(sizes) >= 1
        assert max(sizes) <= min(*sizes, case["batch_size"]) + 1
    if case["shuffle"] is False:
        assert [index for step in epochs[0] for batch in step for index in batch] == list(range(expected))

    done: list[list[list[int]]] = []
    state = whole[0].state_dict() | {"epoch": 0}
    while len(done) < 3 * len(whole[0]):  # a process dies again and again
        living = ranks(case)
        for sampler in living:
            sampler.load_state_dict(json.loads(json.dumps(state)))
        batches = [iter(sampler) for sampler in living]
        for number in range(data.draw(st.integers(0, 2 * len(whole[0])), label="steps until the crash") + 1):
            try:
                done.append([next(batch) for batch in batches])
            except StopIteration:
                assert number == 0 or len(done) % len(whole[0]) == 0
                assert [list(batch) for batch in batches[1:]] == [[]] * (len(batches) - 1)
                batches = [iter(sampler) for sampler in living]
        states = [sampler.state_dict() for sampler in living]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert done[: 3 * len(whole[0])] == [step for epoch in epochs for step in epoch]


@pytest.mark.parametrize("drop_last", [True, False])
def test_the_world_may_shrink_and_grow_while_steps_stay_as_they_are(drop_last: bool) -> None:
    def world(count: int) -> list[ResumableSampler]:
        return ranks({"data": 100, "batch_size": 12 // count, "world_size": count, "drop_last": drop_last, "seed": 5})

    def together(step: list[list[int]]) -> list[int]:
        return [index for batch in step for index in batch]

    expected = [together(step) for step in steps(world(1))]
    samplers, got = world(4), []
    for count in (2, 1, 3, 4):
        batches = [iter(sampler) for sampler in samplers]
        got += [together([next(batch) for batch in batches]) for _ in range(2)]
        state = samplers[0].state_dict()
        samplers = world(count)
        for sampler in samplers:
            sampler.load_state_dict(state)
    assert got + [together(step) for step in steps(samplers)] == expected


def test_a_rest_too_small_for_the_ranks_is_refused() -> None:
    one = ResumableSampler(27, batch_size=12)
    assert [len(batch) for batch in islice(one, 2)] == [12, 12]
    four = ResumableSampler(27, batch_size=3, rank=0, world_size=4)
    with pytest.raises(ValueError, match="3 samples left, fewer than the 4 ranks"):
        four.load_state_dict(one.state_dict())


def test_fewer_samples_than_ranks_join_the_step_before() -> None:
    samplers = ranks({"data": 11, "batch_size": 2, "world_size": 4, "shuffle": False})
    assert steps(samplers) == [[[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]]
    samplers = ranks({"data": 13, "batch_size": 2, "world_size": 4, "shuffle": False})
    assert steps(samplers) == [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [10], [11], [12]]]


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_ranks_draw_from_one_order(shuffle: Any) -> None:
    alone = list(ResumableSampler(40, batch_size=8, shuffle=shuffle))
    together = steps(ranks({"data": 40, "batch_size": 4, "world_size": 2, "shuffle": shuffle}))
    assert [first + second for first, second in together] == alone
    assert (alone[0] == list(range(8))) == (shuffle is False)


def test_a_for_loop_begins_a_new_pass_unless_a_position_was_restored() -> None:
    sampler, other = ResumableSampler(10, 3), ResumableSampler(10, 3)
    passes = [list(other) for _ in range(2)]
    assert next(iter(sampler)) == passes[0][0]
    state = sampler.state_dict()
    assert (sampler.epoch, sampler.position) == (0, 3)
    assert list(sampler) == passes[1]
    assert (sampler.epoch, sampler.position, len(sampler)) == (2, 0, 4)
    sampler.load_state_dict(state)
    assert list(sampler) == passes[0][1:]
    assert list(sampler) == passes[1]


def test_an_epoch_ends_when_its_loop_does() -> None:
    """A crash after the last batch, before what the loop does at the end of an epoch: that is still to be done."""
    sampler = ResumableSampler(6, batch_size=3)
    for number, _ in enumerate(sampler):
        if number == 1:
            state = sampler.state_dict()
    resumed = ResumableSampler(6, batch_size=3)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["epoch"] == 0
    assert list(resumed) == []
    assert resumed.state_dict()["epoch"] == 1
    assert list(resumed) == list(sampler)


def _lists(batches: Any) -> list[list[int]]:
    return [torch.as_tensor(batch).tolist() for batch in batches]


def _left_at_the_last(each: Any) -> list[Any]:
    got = []
    for batch in each:
        got.append(batch)
        if len(got) == len(each):
            break
    return got


@pytest.mark.parametrize("take", [lambda each: list(islice(each, len(each))), _left_at_the_last])
def test_an_epoch_whose_batches_were_all_taken_is_over(take: Any) -> None:
    sampler, other = ResumableSampler(10, batch_size=3), ResumableSampler(10, batch_size=3)
    loader = ResumableLoader(Numbers(10), batch_size=3)
    expected = [list(other) for _ in range(4)]
    for each in (sampler, loader):
        assert [_lists(take(each)) for _ in range(3)] == expected[:3]
        state = each.state_dict()
        assert (state["epoch"], state["position"]) == (2, 10)  # what the loop does at its end may still be to do
        assert _lists(take(each)) == expected[3]


def test_set_epoch_begins_an_epoch_unless_a_position_in_it_was_restored() -> None:
    sampler, other = ResumableSampler(10, 3), ResumableSampler(10, 3)
    passes = [list(other) for _ in range(4)]
    next(iter(sampler))
    state = sampler.state_dict()
    sampler.set_epoch(0)
    assert sampler.position == 3  # whoever is in the middle of it goes on
    assert list(sampler) == passes[0]
    sampler.set_epoch(1)
    assert list(sampler) == passes[1]
    sampler.set_epoch(1)
    assert list(islice(sampler, 2)) == passes[1][:2]
    sampler.load_state_dict(state)
    early = iter(sampler)  # Lightning makes its iterator before it names the epoch
    sampler.set_epoch(0)
    assert list(early) == passes[0][1:]
    sampler.load_state_dict(state)
    sampler.set_epoch(3)
    assert list(sampler) == passes[3]
    with pytest.raises(ValueError, match="epoch is -1"):
        sampler.set_epoch(-1)


def test_a_loader_that_is_cycled_in_an_epoch_of_a_trainer_has_passes_of_its_own() -> None:
    """Lightning's CombinedLoader: ``set_epoch`` once per epoch of the trainer, any number of passes in it."""

    def epoch(sampler: ResumableSampler, number: int, count: int) -> Iterator[list[int]]:
        sampler.set_epoch(number)
        batches = iter(sampler)
        sampler.set_epoch(number)  # Lightning's first iterator is made before it names the epoch
        for _ in range(count):
            batch = next(batches, None)
            if batch is None:
                batches = iter(sampler)
                batch = next(batches)
            yield batch

    whole = ResumableSampler(10, 3)
    expected = [list(epoch(whole, number, 11)) for number in range(3)]
    assert expected[0][4:8] != expected[0][:4] != expected[1][:4]
    for killed in range(1, 12):
        first, second = ResumableSampler(10, 3), ResumableSampler(10, 3)
        list(epoch(first, 0, 11))
        got = list(epoch(first, 1, killed))
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert got + list(epoch(second, 1, 11 - killed)) == expected[1]
        assert list(epoch(second, 2, 11)) == expected[2]


def test_states_of_older_versions_have_one_number_for_epoch_and_pass() -> None:
    old = {"epoch": 2, "position": 6, "size": 10, "seed": 0, "shuffle": True, "drop_last": False, "batch_size": 3,
           "world_size": 1}  # fmt: skip
    expected = [list(each) for each in ResumableSampler(10, 3).epochs(5)]
    sampler = ResumableSampler(10, 3)
    sampler.load_state_dict(old)
    assert {name: sampler.state_dict()[name] for name in old} == old
    assert [(each.number, list(each)) for each in sampler.epochs(5)] == [
        (2, expected[2][2:]), (3, expected[3]), (4, expected[4]),
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["load", "set_epoch", "another"])
def test_a_position_that_moved_ends_the_iterator_loudly(how: str) -> None:
    sampler = ResumableSampler(10, batch_size=3, shuffle=False)
    batches = iter(sampler)
    state = sampler.state_dict()
    next(batches)
    if how == "load":
        sampler.load_state_dict(state)
    elif how == "set_epoch":
        sampler.set_epoch(3)
    else:
        assert next(iter(sampler)) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="start a new for loop"):
        next(batches)
    assert next(iter(sampler)) == [0, 1, 2]


@pytest.mark.parametrize("how", ["load", "set_epoch", "another", "the epoch ends"])
def test_an_iterator_that_was_not_started_follows(how: str) -> None:
    sampler = ResumableSampler(10, batch_size=3, shuffle=False)
    batches = iter(sampler)
    if how == "load":
        sampler.load_state_dict(sampler.state_dict() | {"epoch": 2, "outer": 2, "position": 6})
    elif how == "set_epoch":
        sampler.set_epoch(2)
    elif how == "another":
        assert next(iter(sampler)) == [0, 1, 2]
    else:
        list(sampler)
    assert list(batches) == ([[6, 7, 8], [9]] if how == "load" else [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]])
    assert sampler.state_dict()["epoch"] == {"load": 3, "set_epoch": 2, "another": 3, "the epoch ends": 3}[how]


def test_the_last_batch_is_known_while_it_is_used() -> None:
    for drop_last, ends in ((False, [False, False, False, True]), (True, [False, False, True])):
        sampler = ResumableSampler(10, batch_size=3, drop_last=drop_last)
        assert [sampler.at_end for _ in sampler] == ends
        assert not sampler.at_end


@pytest.fixture
def process_group() -> Iterator[Callable[[int, int], None]]:
    """Be that rank of so many, as far as torch.distributed says."""

    def initialise(rank: int, world_size: int) -> None:
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=world_size)

    yield initialise
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", [ResumableSampler, ResumableLoader])
def test_ranks_are_those_at_the_first_use(process_group: Callable[[int, int], None], kind: Any) -> None:
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    made = kind(Numbers(12), batch_size=2, shuffle=False)
    named = kind(Numbers(12), batch_size=2, shuffle=False, rank=0, world_size=1)
    used = kind(Numbers(12), batch_size=2, shuffle=False)
    assert len(used) == len(named) == 6
    underway = iter(kind(Numbers(12), batch_size=2, shuffle=False))
    next(underway)
    process_group(1, 3)
    assert [list(map(int, batch)) for batch in made] == [[2, 3], [8, 9]]
    assert (made.state_dict()["world_size"], len(made), len(named)) == (3, 2, 6)
    for use in (len, list, lambda it: it.state_dict(), lambda it: it.load_state_dict(made.state_dict())):
        with pytest.raises(RuntimeError, match=r"rank 0 of 1 at its first use.* now says rank 1 of 3"):
            use(used)
    with pytest.raises(RuntimeError, match="rank 1 of 3"):
        next(underway)
    with pytest.raises(ValueError, match="2 samples are no step for 3 ranks"):
        kind(Numbers(2), batch_size=2)
    torch.distributed.destroy_process_group()
    assert len(made) == 2


def test_too_many_ranks_are_refused_at_the_first_use(process_group: Callable[[int, int], None]) -> None:
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    sampler = ResumableSampler(2, batch_size=1)
    process_group(0, 3)
    for _ in range(2):
        with pytest.raises(ValueError, match="2 samples are no step for 3 ranks"):
            next(iter(sampler))


def test_the_state_is_plain_and_small() -> None:
    state = ResumableSampler(10**12, batch_size=3, shuffle="keyed").state_dict()
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < 200


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"data": 99}, r"size=100 \(now 99\)"),
        ({"seed": 1}, r"seed=0 \(now 1\)"),
        ({"shuffle": "keyed"}, r"shuffle=True \(now 'keyed'\)"),
        ({"drop_last": True}, r"drop_last=False \(now True\)"),
        ({"batch_size": 5}, r"batch_size=10 on 1 ranks \(now 5 on 1; the product must stay 10\)"),
        ({"world_size": 2, "rank": 1}, r"batch_size=10 on 1 ranks \(now 10 on 2; the product must stay 10\)"),
    ],
)
def test_a_position_from_other_arguments_is_refused(other: dict[str, Any], message: str) -> None:
    saved = ResumableSampler(100, batch_size=10)
    next(iter(saved))
    sampler = ResumableSampler(**({"data": 100, "batch_size": 10} | other))
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(saved.state_dict())
    assert (sampler.epoch, sampler.position) == (0, 0)


@pytest.mark.parametrize(
    "damage",
    [{"position": 5}, {"position": -10}, {"position": 110}, {"epoch": -1}, {"epoch": "1"}, {"batch_size": None}, None],
)
def test_what_is_no_position_is_refused(damage: dict[str, Any] | None) -> None:
    sampler = ResumableSampler(100, batch_size=10)
    state = {} if damage is None else sampler.state_dict() | damage
    with pytest.raises(ValueError, match=r"not the (start of a step|state of a ResumableSampler)"):
        sampler.load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"data": 0}, ValueError, "0 samples are no step"),
        ({"data": 9, "drop_last": True}, ValueError, "9 samples are no step"),
        ({"data": 3, "rank": 0, "world_size": 4}, ValueError, "3 samples are no step for 4 ranks"),
        ({"batch_size": 0}, ValueError, "batch_size is 0"),
        ({"shuffle": "random"}, ValueError, "use True, False or 'keyed'"),
        ({"rank": 1}, ValueError, "both rank and world_size"),
        ({"rank": 2, "world_size": 2}, ValueError, "ranks count from 0"),
        ({"data": Dataset[int]()}, TypeError, "has no length"),
        ({"data": DataLoader(Numbers(9))}, TypeError, "takes the dataset, not a DataLoader"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ResumableSampler(**({"data": 100, "batch_size": 10} | arguments))


def test_the_sampler_drives_a_plain_dataloader() -> None:
    dataset = Numbers(20)
    sampler = ResumableSampler(dataset, batch_size=3, seed=2)
    loader = DataLoader(dataset, batch_sampler=sampler)
    first = values(islice(loader, 2))
    resumed = ResumableSampler(dataset, batch_size=3, seed=2)
    resumed.load_state_dict(sampler.state_dict())
    rest = [values(iter(DataLoader(dataset, batch_sampler=resumed))) for _ in resumed.epochs(2)]
    other = ResumableSampler(20, batch_size=3, seed=2)
    assert [first + rest[0], rest[1]] == [list(other), list(other)]
    assert len(loader) == 7


def _batches_of_a_rank(path: Path, group: Group) -> list[list[int]]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=group.rank, world_size=2)
    return list(ResumableSampler(10, batch_size=3, shuffle=False))


@pytest.mark.slow
def test_ranks_come_from_torch_distributed(tmp_path: Path) -> None:
    found = run_ranks(2, partial(_batches_of_a_rank, tmp_path / "meet"))
    assert found == [[[0, 1, 2], [6, 7]], [[3, 4, 5], [8, 9]]]
