"""Training loops as people write them, over three loaders, uninterrupted and killed: steps, and the samples in them.

A row of :data:`HABITS` is one loop, written once. A step is saved when it ends; a run that is killed then makes new
objects and restores what was saved. DataLoader has no position: its loop saves the number of the epoch and begins that
one anew. That of StatefulDataLoader saves the number, too, and continues in the epoch.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice, zip_longest
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from pccheck_async import ResumableLoader
from tests.support.datasets import Numbers, values

EPOCHS = 3
LONG, SHORT = 6, 4  # batches of three samples
KILLED = (2, 4, 9)
MOMENTS: tuple[tuple[int, ...], ...] = ((), *((moment,) for moment in KILLED))


class KilledError(Exception):
    pass


class Life:
    """One process: loaders, made anew and restored, and the steps that it made."""

    def __init__(self, kind: str, saved: dict[str, Any], kill: int | None, **arguments: Any) -> None:
        self.kind, self.saved, self.kill, self.arguments = kind, saved, kill, arguments
        self.loaders: list[Any] = []
        self.epoch = 0

    def loader(self, batches: int = LONG) -> Any:
        data: Any = Numbers(3 * batches)
        number = len(self.loaders)
        if self.kind == "ResumableLoader":
            loader: Any = ResumableLoader(data, 3, seed=number, **self.arguments)
        elif self.kind == "StatefulDataLoader":
            stateful = pytest.importorskip("torchdata.stateful_dataloader")
            loader = stateful.StatefulDataLoader(data, 3, shuffle=True, **self.arguments)
        else:
            loader = DataLoader(data, 3, shuffle=True, **self.arguments)
        self.loaders.append(loader)
        return loader

    def restore(self) -> None:
        self.epoch = self.saved.get("epoch", 0)
        for loader, state in zip(self.loaders, self.saved.get("loaders", ()), strict=False):
            if hasattr(loader, "load_state_dict"):
                loader.load_state_dict(state)

    def epochs(self, loader: Any, steps: int | None = None) -> Iterator[Any]:
        """Yield the epochs that are left, as the documentation of the loader has it."""
        if self.kind == "ResumableLoader":
            yield from loader.epochs(EPOCHS, steps=steps)
        else:
            for epoch in range(self.epoch, EPOCHS):
                self.epoch = epoch
                yield _Cut(loader, steps)

    def step(self, *batches: torch.Tensor) -> None:
        steps = self.saved.setdefault("steps", [])
        steps.append([batch.tolist() for batch in batches])
        self.save()

    def save(self) -> None:
        states = [loader.state_dict() if hasattr(loader, "state_dict") else {} for loader in self.loaders]
        saves = self.saved.get("saves", 0) + 1
        self.saved |= {"epoch": self.epoch, "loaders": _copy(states), "saves": saves}
        if saves == self.kill:
            raise KilledError


class _Cut:
    def __init__(self, loader: Any, steps: int | None) -> None:
        self._loader, self._steps = loader, steps

    def __iter__(self) -> Iterator[Any]:
        return islice(self._loader, self._steps)

    def __len__(self) -> int:
        return min(len(self._loader), self._steps or len(self._loader))


def _copy(states: list[Any]) -> list[Any]:
    return [state if "_snapshot" in state or "_index_sampler_state" in state else json.loads(json.dumps(state))
            for state in states]  # fmt: skip


Habit = Callable[[Life], None]


def whole(life: Life) -> None:
    loader = life.loader()
    life.restore()
    for epoch in life.epochs(loader):
        for batch in epoch:
            life.step(batch)


def counted_by_steps(life: Life) -> None:
    loader = life.loader()
    life.restore()
    while len(life.saved.get("steps", ())) < LONG * EPOCHS:
        for batch in loader:
            life.step(batch)
            if len(life.saved["steps"]) == LONG * EPOCHS:
                break


def cycled(life: Life) -> None:
    def cycle(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    loader = life.loader()
    life.restore()
    for batch in islice(cycle(loader), LONG * EPOCHS - len(life.saved.get("steps", ()))):
        life.step(batch)


def zipped(first: int, second: int) -> Habit:
    def habit(life: Life) -> None:
        loaders = life.loader(first), life.loader(second)
        life.restore()
        for epoch, other in _together(life, *loaders):
            for batches in zip(epoch, other, strict=False):
                life.step(*batches)

    return habit


def zipped_longest(life: Life) -> None:
    loaders = life.loader(SHORT), life.loader(LONG)
    life.restore()
    for epoch, other in _together(life, *loaders):
        for batches in zip_longest(epoch, other, fillvalue=torch.tensor([])):
            life.step(*batches)


def _together(life: Life, one: Any, other: Any) -> Iterable[tuple[Any, Any]]:
    if life.kind == "ResumableLoader":
        return zip(life.epochs(one), life.epochs(other), strict=True)
    return ((epoch, other) for epoch in life.epochs(one))


def zipped_with_a_bare_loader(life: Life) -> None:
    one, other = life.loader(SHORT), life.loader(LONG)
    life.restore()
    for epoch in life.epochs(one):
        for batches in zip(epoch, other, strict=False):
            life.step(*batches)


def two_passes(over: str) -> Habit:
    def habit(life: Life) -> None:
        loader = life.loader()
        life.restore()
        for epoch in life.epochs(loader):
            for batch in epoch:
                life.step(batch)
            assert len([*(loader if over == "loader" else epoch)]) == len(loader)

    return habit


def trained_twice(life: Life) -> None:
    loader = life.loader()
    life.restore()
    for epoch in life.epochs(loader):
        for _ in range(2):
            for batch in epoch:
                life.step(batch)


def cut_by_itself(life: Life) -> None:
    loader = life.loader()
    life.restore()
    for epoch in life.epochs(loader, steps=4):
        assert len(epoch) == min(4, len(loader))
        for batch in epoch:
            life.step(batch)


def enumerated(life: Life) -> None:
    loader = life.loader()
    life.restore()
    for epoch in life.epochs(loader, steps=4):
        for i, batch in epoch.enumerate() if life.kind == "ResumableLoader" else enumerate(epoch):
            life.saved.setdefault("ends", []).append(i)
            life.step(batch)


def looked_at(when: str) -> Habit:
    def habit(life: Life) -> None:
        loader = life.loader()
        if when == "before the restore":
            assert len(next(iter(loader))) == 3
        life.restore()
        if when == "after the restore":
            next(iter(loader), None)  # a pass that was delivered has nothing to look at
        for epoch in life.epochs(loader):
            if when == "in each epoch":
                assert len(next(iter(epoch))) == 3
            for batch in epoch:
                life.step(batch)

    return habit


def measured_first(life: Life) -> None:
    """A pass for the mean of the data, before the restore."""
    loader = life.loader()
    assert sum(len(batch) for batch in loader) == 3 * LONG
    life.restore()
    for epoch in life.epochs(loader):
        for batch in epoch:
            life.step(batch)


def nested(life: Life) -> None:
    loader = life.loader()
    life.restore()
    for epoch in life.epochs(loader):
        for batch in epoch:
            assert sum(len(other) for other in loader) == 3 * LONG
            life.step(batch)


def over_the_loader_in_epochs(life: Life) -> None:
    """The batches of an epoch taken from the loader itself, by mistake: they are counted all the same."""
    loader = life.loader()
    life.restore()
    for _ in life.epochs(loader):
        for batch in loader:
            life.step(batch)


def one_ahead(life: Life) -> None:
    """Fetches a batch ahead of the step, as Accelerate's loaders do."""
    loader = life.loader()
    life.restore()
    for epoch in life.epochs(loader):
        batches = iter(epoch)
        batch = next(batches, None)
        while batch is not None:
            following = next(batches, None)
            life.step(batch)
            batch = following


def saved_after_each_epoch(life: Life) -> None:
    """What the end of an epoch does is not done again after a checkpoint that has it."""
    loader = life.loader()
    life.restore()
    for epoch in life.epochs(loader):
        for batch in epoch:
            life.step(batch)
        life.saved.setdefault("ends", []).append(life.epoch if life.kind != "ResumableLoader" else epoch.number)
        life.epoch += 1
        life.save()
        life.epoch -= 1


def zipped_and_saved_after_each_epoch(life: Life) -> None:
    loaders = life.loader(LONG), life.loader(SHORT)
    life.restore()
    for epoch, other in _together(life, *loaders):
        for batches in zip(epoch, other, strict=False):
            life.step(*batches)
        life.save()


def looked_at_and_saved_after_each_epoch(life: Life) -> None:
    loader = life.loader()
    life.restore()
    for epoch in life.epochs(loader):
        assert len(next(iter(epoch))) == 3
        for batch in epoch:
            life.step(batch)
        life.save()


def stopped_and_called_again(life: Life) -> None:
    """Leaves both loops after the fifth, tenth and fifteenth step, saves, and goes on with the same objects."""
    loader = life.loader()
    life.restore()
    for stop in (5, 10, 15, None):
        for epoch in life.epochs(loader):
            for batch in epoch:
                life.step(batch)
                if len(life.saved["steps"]) == stop:
                    break
            if len(life.saved["steps"]) == stop:
                life.save()  # as at the end of an epoch
                break
        life.save()


def by_number(cut: int | None = None, passes: int = 1) -> Habit:
    """The loop of earlier versions, which has wrong steps where an epoch is cut or has a second pass."""

    def habit(life: Life) -> None:
        loader = life.loader()
        life.restore()
        for _ in range(loader.epoch, EPOCHS):
            for number, batch in enumerate(loader, 1):
                life.step(batch)
                if number == cut:
                    break
            for _ in range(passes - 1):
                assert len(list(loader)) == LONG

    return habit


def zipped_by_number(life: Life) -> None:
    loaders = life.loader(LONG), life.loader(SHORT)
    life.restore()
    for _ in range(loaders[1].epoch, EPOCHS):
        for batches in zip(*loaders, strict=False):
            life.step(*batches)


def cut_by_break(life: Life) -> None:
    loader = life.loader()
    life.restore()
    for epoch in life.epochs(loader):
        for number, batch in enumerate(epoch, 1):
            life.step(batch)
            if number == 4:
                break


def cut_by_islice(life: Life) -> None:
    loader = life.loader()
    life.restore()
    for epoch in life.epochs(loader):
        for batch in islice(epoch, 4):
            life.step(batch)


Numbers4 = tuple[int, int, int, int]
HABITS: dict[str, tuple[Habit, Numbers4, Numbers4]] = {
    # steps of DataLoader and of StatefulDataLoader: uninterrupted, killed after step 2, 4 and 9
    "whole epochs": (whole, (18, 20, 22, 21), (18, 18, 18, 18)),
    "counted by steps": (counted_by_steps, (18, 18, 18, 18), (18, 18, 18, 18)),
    "cycled": (cycled, (18, 18, 18, 18), (18, 18, 18, 18)),
    "zip(short, long)": (zipped(SHORT, LONG), (12, 14, 16, 13), (12, 12, 12, 12)),
    "zip(long, short)": (zipped(LONG, SHORT), (12, 14, 16, 13), (12, 12, 12, 12)),
    "zip_longest(short, long)": (zipped_longest, (18, 20, 22, 21), (18, 18, 18, 18)),
    "second pass over the loader": (two_passes("loader"), (18, 20, 22, 21), (18, 18, 18, 18)),
    "second pass over the epoch": (two_passes("epoch"), (18, 20, 22, 21), (18, 18, 18, 18)),
    "trained twice per epoch": (trained_twice, (36, 38, 40, 45), (36, 36, 36, 42)),
    "cut by itself": (cut_by_itself, (12, 14, 16, 13), (12, 14, 14, 13)),
    "cut, enumerated": (enumerated, (12, 14, 16, 13), (12, 14, 14, 13)),
    "looked at before the restore": (looked_at("before the restore"), (18, 20, 22, 21), (18, 18, 18, 18)),
    "looked at after the restore": (looked_at("after the restore"), (18, 20, 22, 21), (18, 20, 22, 21)),
    "looked at in each epoch": (looked_at("in each epoch"), (18, 20, 22, 21), (18, 20, 22, 21)),
    "measured first": (measured_first, (18, 20, 22, 21), (18, 18, 18, 18)),
    "nested": (nested, (18, 20, 22, 21), (18, 20, 22, 21)),
    "over the loader in epochs": (over_the_loader_in_epochs, (18, 20, 22, 21), (18, 18, 18, 18)),
    "saved after each epoch": (saved_after_each_epoch, (18, 20, 22, 20), (18, 18, 18, 18)),
}
"""Loops that are right with ResumableLoader wherever they are killed."""
OURS: dict[str, Habit] = {
    "zip, saved after each epoch": zipped_and_saved_after_each_epoch,
    "looked at in each epoch, saved after it": looked_at_and_saved_after_each_epoch,
    "stopped and called again": stopped_and_called_again,
}
"""Further ones, which the others have no words for."""
WARNED: dict[str, Habit] = {
    "range(loader.epoch, n)": by_number(),
    "range(loader.epoch, n), break": by_number(cut=4),
    "range(loader.epoch, n), second pass": by_number(passes=2),
    "range(loader.epoch, n), zip": zipped_by_number,
    "zip(epoch, loader)": zipped_with_a_bare_loader,
    "break": cut_by_break,
    "islice": cut_by_islice,
}
"""Loops that are right or warn."""


def run(habit: Habit, kind: str, kills: Iterable[int] = (), **arguments: Any) -> dict[str, Any]:
    """Return what was saved last, of a run that was killed at each of these saves, counted from the first one on."""
    saved: dict[str, Any] = {}
    torch.manual_seed(0)
    for kill in kills:
        with suppress(KilledError):
            habit(Life(kind, saved, kill, **arguments))
            return saved
    habit(Life(kind, saved, None, **arguments))
    return saved


@pytest.fixture(autouse=True)
def _looks() -> Iterator[None]:
    """Looking at a batch after a restore warns; what the others warn of is looked at by the tests."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the iterator that went on at the restored position was given up")
        warnings.filterwarnings("ignore", "a for loop over the loader took batches between")
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        yield


@pytest.mark.parametrize("name", HABITS)
def test_steps_of_three_loaders(name: str) -> None:
    habit, *others = HABITS[name]
    kinds = zip(("DataLoader", "StatefulDataLoader", "ResumableLoader"), (*others, (others[0][0],) * 4), strict=True)
    for kind, expected in kinds:
        assert tuple(len(run(habit, kind, kills)["steps"]) for kills in MOMENTS) == expected, kind


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HABITS, *OURS])
def test_killed_anywhere_the_same_batches_come(name: str) -> None:
    habit: Habit = OURS[name] if name in OURS else HABITS[name][0]
    whole = run(habit, "ResumableLoader")
    for kill in range(1, whole["saves"]):
        found = run(habit, "ResumableLoader", [kill])
        assert (found["steps"], found.get("ends")) == (whole["steps"], whole.get("ends")), kill
    for every in range(1, 6):
        found = run(habit, "ResumableLoader", range(every, whole["saves"], every))
        assert (found["steps"], found.get("ends")) == (whole["steps"], whole.get("ends")), every
    seen = [tuple(batch) for step in whole["steps"] for batch in step[:1]]
    assert len({*seen}) > len(seen) / 2  # each pass has another order


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_ranks_get_the_same_batches(rank: int) -> None:
    for name in ("whole epochs", "zip(long, short)", "second pass over the loader", "cut by itself"):
        whole = run(HABITS[name][0], "ResumableLoader", rank=rank, world_size=2)
        for kill in range(1, whole["saves"]):
            assert run(HABITS[name][0], "ResumableLoader", [kill], rank=rank, world_size=2)["steps"] == whole["steps"]


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [True, False])
def test_killed_with_workers_the_same_batches_come(persistent: bool) -> None:
    arguments: dict[str, Any] = {"num_workers": 1, "persistent_workers": persistent, "prefetch_factor": 3}
    names = ("zip(long, short)", "second pass over the loader", "cut by itself", "looked at in each epoch")
    for name, kill in zip(names, (*KILLED, KILLED[1]), strict=True):  # each starts processes, which takes long
        whole = run(HABITS[name][0], "ResumableLoader")
        assert run(HABITS[name][0], "ResumableLoader", [kill], **arguments)["steps"] == whole["steps"], (name, kill)


@pytest.mark.parametrize("name", WARNED)
def test_what_resumes_wrongly_warns(name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole = run(WARNED[name], "ResumableLoader")
    assert caught
    assert {warning.category for warning in caught} == {UserWarning}
    assert {warning.filename for warning in caught} == {__file__}
    assert all("epochs(n" in str(warning.message) for warning in caught)
    assert len(whole["steps"]) in (12, 18)


def test_a_batch_that_was_fetched_ahead_counts_as_delivered() -> None:
    assert [len(run(one_ahead, "ResumableLoader", kills)["steps"]) for kills in MOMENTS] == [18, 17, 17, 17]


def test_a_restore_inside_the_loop_begins_the_epoch_that_was_restored() -> None:
    loader = ResumableLoader(Numbers(18), 3)
    expected = [[batch.tolist() for batch in epoch] for epoch in ResumableLoader(Numbers(18), 3).epochs(3)]
    got: list[Any] = []
    saved: dict[str, Any] = {}
    for epoch in loader.epochs(3):
        got.append((epoch.number, []))
        for number, batch in epoch.enumerate():
            got[-1][1].append(batch.tolist())
            if number == 2 and not saved:
                saved = loader.state_dict()
            if len(got) == 2 and number == 3:
                loader.load_state_dict(saved)
                break
    assert got == [(0, expected[0]), (1, expected[1][:4]), (0, expected[0][3:]), (1, expected[1]), (2, expected[2])]


def test_a_loop_over_epochs_that_was_left_goes_on_when_it_is_called_again() -> None:
    loader = ResumableLoader(Numbers(18), 3)
    expected = [[batch.tolist() for batch in epoch] for epoch in ResumableLoader(Numbers(18), 3).epochs(3)]
    held = loader.epochs(3)  # as the traceback of an interrupted cell of a notebook holds it
    first = next(held)
    batches = iter(first)
    assert [next(batches).tolist() for _ in range(2)] == expected[0][:2]
    again = loader.epochs(3)
    assert [batch.tolist() for batch in next(again)] == expected[0][2:]
    with pytest.raises(RuntimeError, match="start a new for loop"):
        next(batches)
    with pytest.raises(RuntimeError, match="another call of epochs"):
        next(held)
    assert [[batch.tolist() for batch in epoch] for epoch in again] == expected[1:]
    with pytest.raises(RuntimeError, match="epoch 0 is over"):
        iter(first)
    assert list(loader.epochs(3)) == []
    assert loader.epoch == 3


def test_a_loop_that_is_left_where_zip_ended_goes_on_with_the_next_epoch_of_both() -> None:
    def train(long: ResumableLoader, short: ResumableLoader, epochs: int) -> list[Any]:
        got: list[Any] = []
        for one, other in zip(long.epochs(3), short.epochs(3), strict=True):
            got.append([(first.tolist(), second.tolist()) for first, second in zip(one, other, strict=False)])
            if len(got) == epochs:
                break
        return got

    loaders = [(ResumableLoader(Numbers(18), 3), ResumableLoader(Numbers(12), 3)) for _ in range(2)]
    assert train(*loaders[0], 1) + train(*loaders[0], 3) == train(*loaders[1], 3)


def test_an_iterator_that_was_only_made_is_no_epoch() -> None:
    loader, other = ResumableLoader(Numbers(18), 3), ResumableLoader(Numbers(18), 3)
    for epoch in loader.epochs(1):
        assert len(list(other)) == 6
        _made = iter(epoch)
        assert loader.state_dict()["outer"] == 0


def test_looking_at_the_restored_epoch_gives_its_position_back() -> None:
    loader = ResumableLoader(Numbers(18), 3)
    expected = values(loader)
    loader.load_state_dict(loader.state_dict() | {"epoch": 0, "outer": 0, "position": 6})
    for epoch in loader.epochs(1):
        assert next(iter(epoch)).tolist() == expected[2]
        assert [batch.tolist() for batch in epoch] == expected[2:]


@pytest.mark.parametrize("size", [5, 6, 7])
def test_an_epoch_of_so_many_steps_has_no_more_where_few_samples_are_left(size: int) -> None:
    loader = ResumableLoader(Numbers(size), 2)
    assert [(len(epoch), len([*epoch])) for epoch in loader.epochs(2, steps=2)] == [(2, 2)] * 2


def test_an_epoch_has_a_number_and_a_length() -> None:
    loader = ResumableLoader(Numbers(18), 3)
    found = [(epoch.number, int(epoch), f"epoch {epoch}", len(epoch), bool(epoch)) for epoch in loader.epochs(2)]
    assert found == [(0, 0, "epoch 0", 6, True), (1, 1, "epoch 1", 6, True)]
    assert [repr(epoch) for epoch in loader.epochs(3, steps=4)] == ["<epoch 2, 4 batches>"]
    assert [len(epoch) for epoch in loader.epochs(4, steps=40)] == [6]


@pytest.mark.parametrize("arguments", [{"epochs": -1}, {"epochs": 1, "steps": 0}])
def test_arguments_of_epochs_that_make_no_sense(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="they are at least 0 and 1"):
        ResumableLoader(Numbers(9), 3).epochs(**arguments)


def test_set_epoch_inside_a_loop_over_epochs_must_name_the_one_underway() -> None:
    loader, other = ResumableLoader(Numbers(18), 3), ResumableLoader(Numbers(18), 3)
    got = []
    for epoch in loader.epochs(2):
        loader.set_epoch(epoch.number)
        got.append([batch.tolist() for batch in epoch])
        with pytest.raises(RuntimeError, match=rf"set_epoch\(5\) in epoch {epoch} of epochs"):
            loader.set_epoch(5)
    assert got == [[batch.tolist() for batch in epoch] for epoch in other.epochs(2)]


def test_a_position_inside_a_second_pass_is_not_saved_and_that_is_told() -> None:
    loader = ResumableLoader(Numbers(18), 3)
    for epoch in loader.epochs(1):
        assert len(list(epoch)) == 6
        assert loader.state_dict()["outer"] == 1
        batches = iter(loader)
        next(batches)
        with pytest.warns(UserWarning, match="saved inside a second pass"):
            assert loader.state_dict()["outer"] == 1
        assert len(list(batches)) == 5


def test_looking_after_a_restore_gives_the_position_back_with_a_warning() -> None:
    first = ResumableLoader(Numbers(18), 3)
    expected = values(first)
    resumed = ResumableLoader(Numbers(18), 3)
    resumed.load_state_dict(first.state_dict() | {"epoch": 0, "outer": 0, "position": 6})
    with pytest.warns(UserWarning, match="given up after one batch: this one starts at that position again"):
        looks = [next(iter(resumed)).tolist() for _ in range(2)]
    assert looks == [expected[2]] * 2
    assert values(resumed) == expected[2:]


def test_zip_takes_a_restored_position_even_if_it_ends_at_once() -> None:
    short, long = ResumableLoader(Numbers(12), 3), ResumableLoader(Numbers(18), 3)
    state = long.state_dict()
    passes = [values(long) for _ in range(2)]
    long.load_state_dict(state | {"position": 12})
    short.load_state_dict(short.state_dict() | {"position": 12})
    assert list(zip(short, long, strict=False)) == []
    with pytest.warns(UserWarning, match="given up before its first batch"):
        pairs = list(zip(short, long, strict=False))
    assert [batch.tolist() for _, batch in pairs] == passes[1][:4]


@pytest.mark.parametrize("how", ["for", "epochs", "thread"])
def test_an_epoch_that_is_left_after_a_validation_goes_on_at_its_position(how: str) -> None:
    loader, validation = (ResumableLoader(list(range(size)), shuffle=False) for size in (6, 2))

    def validate() -> None:
        for epoch in validation.epochs(1) if how == "epochs" else [validation]:
            assert len([*epoch]) == 2

    for epoch in loader.epochs(2):
        for batch in epoch:
            if batch == 2:
                if how == "thread":
                    thread = threading.Thread(target=validate)
                    thread.start()
                    thread.join()
                else:
                    validate()
                break
        break
    resumed = ResumableLoader(list(range(6)), shuffle=False)
    resumed.load_state_dict(loader.state_dict())
    epochs = resumed.epochs(2)
    epoch = next(epochs)
    assert (epoch.number, [int(batch) for batch in epoch]) == (0, [3, 4, 5])


@pytest.mark.parametrize("how", ["anew", "endless", "forever"])
def test_an_epoch_that_is_left_beside_a_validation_that_began_anew_goes_on_at_its_position(how: str) -> None:
    """The iterator over the validation's loader is kept, and ends in the step in which training breaks off."""
    loader, validation = (ResumableLoader(list(range(size)), shuffle=False) for size in (6, 2))

    def anew() -> Iterator[Any]:
        held = iter(validation)
        while True:
            batch = next(held, None)
            if batch is None:
                held = iter(validation)
                batch = next(held)
            yield batch

    def endless() -> Iterator[Any]:
        while True:
            yield from validation

    seen, batches = [], {"anew": anew, "endless": endless, "forever": validation.forever}[how]()
    for epoch in loader.epochs(2):
        for batch in epoch:
            seen.append(int(next(batches)))
            if batch == 2:
                break
        break
    assert seen == [0, 1, 0]
    resumed = ResumableLoader(list(range(6)), shuffle=False)
    resumed.load_state_dict(loader.state_dict())
    epochs = resumed.epochs(2)
    epoch = next(epochs)
    assert (epoch.number, [int(batch) for batch in epoch]) == (0, [3, 4, 5])


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    for name, habit in [*((name, row[0]) for name, row in HABITS.items()), *OURS.items(), ("one ahead", one_ahead)]:
        for kind in (
            ("DataLoader", "StatefulDataLoader", "ResumableLoader") if name not in OURS else ("ResumableLoader",)
        ):
            columns = []
            for kills in MOMENTS:
                steps = run(habit, kind, kills)["steps"]
                columns.append(f"{len(steps)} ({sum(len(batch) for step in steps for batch in step)})")
            print(f"{name:30} {kind:20}", *(f"{each:10}" for each in columns))


if __name__ == "__main__":
    main()
