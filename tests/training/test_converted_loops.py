"""Loops of converted trainings that count batches or epochs by themselves: killed, and compared bit by bit."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import ResumableLoader, RNGState, SyncCheckpointEngine, list_checkpoints
from tests.support.datasets import Numbers
from tests.support.killed_training import Journal, agree, live

WINDOW = 4
BATCHES = 10  # the last window of an epoch has two
Counted = Callable[[Any], Iterator[tuple[int, Any]]]


def accumulated(
    folder: Path, counted: Counted, journal: Journal, leave_at: int | None = None, interval: int = 1
) -> None:
    """Accumulates gradients over windows of four batches, and flushes at the end of an epoch, by ``counted``.

    ``leave_at`` leaves the context of the engine after a step, and the training.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(BATCHES * 2, 3, generator=torch.Generator().manual_seed(1))
    loader = ResumableLoader(torch.utils.data.TensorDataset(data), 2)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": RNGState()}
    with SyncCheckpointEngine(folder, interval=interval) as engine:
        engine.attach(optimizer)
        restored = engine.restore(state)
        step = restored.step + 1 if restored else 0
        for epoch in loader.epochs(3):
            for i, (batch,) in counted(epoch):
                with engine.step(state, step):
                    loss = model(batch).square().mean()
                    loss.backward()
                    if (i + 1) % WINDOW == 0 or i + 1 == len(epoch):
                        optimizer.step()
                        optimizer.zero_grad()
                engine.drain()
                journal.note(f"loss {step}", loss)
                journal.note(f"number {step}", i)
                step += 1
                if step - 1 == leave_at:
                    return
        journal.note("weights", dict(model.state_dict()))


def life_after_life(folder: Path, counted: Counted) -> None:
    whole = live(partial(accumulated, folder / "whole", counted), folder / "journal")
    killed = live(partial(accumulated, folder / "killed", counted), folder / "journal", "loss 15")
    resumed = live(partial(accumulated, folder / "killed", counted), folder / "journal")
    assert resumed.keys[0] == "loss 14"  # in the middle of the second epoch
    agree(whole, [killed, resumed])


def test_numbers_of_an_epoch_continue_after_a_kill(tmp_path: Path) -> None:
    life_after_life(tmp_path, by_method)


def by_method(epoch: Any) -> Iterator[tuple[int, Any]]:
    return epoch.enumerate()  # type: ignore[no-any-return]


def test_leaving_inside_a_window_keeps_the_checkpoint_of_its_beginning(tmp_path: Path) -> None:
    whole = live(partial(accumulated, tmp_path / "whole", by_method), tmp_path / "journal")
    left = live(partial(accumulated, tmp_path / "left", by_method, leave_at=15), tmp_path / "journal")
    assert [(info.step, info.inside_window) for info in list_checkpoints(tmp_path / "left")] == [(13, False)]
    agree(whole, [left, live(partial(accumulated, tmp_path / "left", by_method), tmp_path / "journal")])


def test_leaving_inside_a_window_saves_weights_that_no_checkpoint_has(tmp_path: Path) -> None:
    leaves = partial(accumulated, leave_at=15, interval=1000)
    live(partial(leaves, tmp_path / "left", by_method), tmp_path / "journal")
    assert [(info.step, info.inside_window) for info in list_checkpoints(tmp_path / "left")] == [(15, True)]
    live(partial(leaves, tmp_path / "first", by_method, leave_at=1), tmp_path / "journal")
    assert list_checkpoints(tmp_path / "first") == []  # nothing was trained


def by_the_function(epoch: Any) -> Iterator[tuple[int, Any]]:
    yield from enumerate(epoch)


@pytest.mark.filterwarnings("ignore:enumerate begins at 0")
def test_the_function_enumerate_begins_anew_after_a_kill(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="differs"):
        life_after_life(tmp_path, by_the_function)


def test_the_function_enumerate_in_a_resumed_epoch_is_warned_of() -> None:
    epochs = resumed_at(1, 4).epochs(3)
    with pytest.warns(UserWarning, match=r"enumerate begins at 0 .*after 4 batches.*epoch\.enumerate\(\)") as caught:
        numbers = [[i for i, _ in by_the_function(epoch)] for epoch in epochs]
    assert numbers == [list(range(6)), list(range(10))]
    assert [each.filename for each in caught] == [__file__]


def resumed_at(epoch: int, batches: int) -> ResumableLoader:
    before, loader = (ResumableLoader(Numbers(20), 2) for _ in range(2))
    for each in before.epochs(3):
        for number, _ in each.enumerate(1):
            if (each.number, number) == (epoch, batches):
                loader.load_state_dict(before.state_dict())
    return loader


def test_numbers_are_those_of_a_whole_pass() -> None:
    loader = resumed_at(1, 4)
    first = [(epoch.number, [[i for i, _ in epoch.enumerate(1)] for _ in range(2)]) for epoch in loader.epochs(3)]
    whole = list(range(1, 11))
    assert first == [(1, [whole[4:], whole]), (2, [whole, whole])]
    merged = ResumableLoader(Numbers(9), 2, rank=1, world_size=2)  # the last step has five samples
    state = merged.state_dict()
    merged.load_state_dict(state | {"position": 4})
    assert [[i for i, _ in epoch.enumerate()] for epoch in merged.epochs(2)] == [[1], [0, 1]]


def test_numbers_of_an_accelerated_loader_continue() -> None:
    accelerate = pytest.importorskip("accelerate")
    from pccheck_async.integrations.accelerate_loader import AcceleratedLoader

    loader = AcceleratedLoader(resumed_at(1, 4), accelerate.Accelerator(cpu=True))
    got = [[(i, len(batch)) for i, batch in epoch.enumerate()] for epoch in loader.epochs(3)]
    assert got == [[(i, 2) for i in range(first, 10)] for first in (4, 0)]


def test_a_count_that_continues_or_is_another_loops_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in resumed_at(1, 4).epochs(2):
            assert [i for i, _ in enumerate(epoch, 4)] == list(range(4, 10))
        for epoch in resumed_at(1, 4).epochs(2):
            others = enumerate("ab")
            assert len([next(others, None) for _ in epoch]) == 6
        for _, epoch in enumerate(resumed_at(0, 10).epochs(2)):
            assert [i for i, _ in enumerate(epoch)] == ([] if epoch.number == 0 else list(range(10)))


EPOCHS = 3


def test_a_source_that_cannot_be_parsed_costs_a_warning_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SystemError("AST constructor recursion depth mismatch")

    loader = resumed_at(1, 4)
    with monkeypatch.context() as patched:
        patched.setattr("ast.parse", fail)
        by_a_range_of_a_name(loader)


def by_a_range_of_a_name(loader: ResumableLoader) -> None:
    for _epoch in range(EPOCHS):
        for _ in loader:
            pass


def by_a_range_of_a_number(loader: ResumableLoader) -> None:
    for _epoch in range(1, 4):
        for _, _ in enumerate(loader):
            pass


def by_a_function(loader: ResumableLoader) -> None:
    def train_one_epoch(epoch: int) -> float:
        total = 0.0
        with torch.enable_grad():
            for batch in loader:
                total += float(batch.sum())
        return total / len(loader)

    for epoch in range(EPOCHS):
        train_one_epoch(epoch)


WRONG = [by_a_range_of_a_name, by_a_range_of_a_number, by_a_function]


@pytest.mark.parametrize("loop", WRONG)
def test_a_range_of_epochs_is_warned_of_in_its_second_pass(loop: Callable[[ResumableLoader], None]) -> None:
    with pytest.warns(UserWarning, match=r"`for _?epoch in range\(.*\)` makes as many passes .*loader\.epochs\(n\)"):
        loop(resumed_at(1, 10))


def test_what_a_range_of_epochs_does_right_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loop in WRONG:
            loop(ResumableLoader(Numbers(20), 2))
        by_a_range_of_a_name(resumed_at(0, 4))  # the rest of the first epoch, and two more


def test_loops_that_count_steps_or_the_epochs_that_are_left_are_not_warned_of() -> None:
    steps = 0

    def step() -> bool:
        nonlocal steps
        steps += 1
        return steps % 25 == 0

    def until(loader: ResumableLoader) -> None:
        for _ in range(1000):
            for _ in loader:
                if step():
                    return

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        until(resumed_at(1, 4))
        loader, stop = resumed_at(1, 10), False
        while not stop:
            for _ in loader:
                stop = stop or step()
        loader = resumed_at(1, 10)
        for _ in itertools.repeat(None, 3):
            for _ in loader:
                step()
        loader, done = resumed_at(1, 10), 1
        for _ in range(4 - done):
            for _ in loader:
                step()
        for _ in range(3):  # each with a restore of its own
            for _ in resumed_at(1, 10):
                step()
