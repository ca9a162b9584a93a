"""What no optimizer owns: captured before the call returns, unless it stays the same; and what keeps being torn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pccheck_async import StorageOptions, SyncCheckpointEngine, TornCaptureError, list_checkpoints, load_sync
from pccheck_async.engine import PendingCheckpoint, flight_of
from pccheck_async.state import arrange, flatten_unchecked
from pccheck_async.state.cache.constants import Choice, Constants
from pccheck_async.transfer import PAGE_BYTES
from pccheck_async.transfer.plan import Planner
from tests.engine.test_overlap import equal
from tests.support.devices import Device
from tests.support.round_trip import parts

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

WIDTH = 640
"""1.6 MB for a square of it: too large to be copied at once."""


class Adapted(nn.Module):
    """A large base that is not trained, before and behind a small part that is."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.table: torch.Tensor
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x @ self.base + self.up(self.down(x)) + self.table[0]
        return result


def copied(module: nn.Module) -> dict[str, torch.Tensor]:
    """A state_dict() of its own; to copy it deeply is to reach for the memory."""
    return {name: value.clone() for name, value in module.state_dict().items()}


class Run:
    """An engine whose captures can be held up in the middle, a model, and an optimizer of all its parameters."""

    def __init__(self, folder: Path) -> None:
        self.io = Device()
        self.engine = SyncCheckpointEngine(
            folder, storage=StorageOptions(io=self.io, chunk_bytes=32 * PAGE_BYTES, host_memory=64 * PAGE_BYTES)
        ).open()
        self.model = Adapted()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)  # it skips what has no gradients
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.engine.attach(self.optimizer)
        self.number = 0

    def train(self) -> None:
        self.model(torch.randn(2, WIDTH)).square().mean().backward()
        self.optimizer.step()

    def save(self) -> PendingCheckpoint:
        self.number += 1
        return self.engine.checkpoint(self.state, step=self.number, overlap=True)

    def saved_whole(self) -> None:
        want = copied(self.model)
        self.save().result()
        assert equal(load_sync(self.engine.path)["model"], want)

    @contextmanager
    def in_the_middle(self) -> Iterator[PendingCheckpoint]:
        """A capture to which all that is large is left: the call would not return otherwise."""
        self.io.medium.hold("write")
        pending = self.save()
        self.io.medium.wait_stuck()
        assert not flight_of(pending).is_captured
        yield pending
        self.io.medium.release()


@contextmanager
def run(folder: Path) -> Iterator[Run]:
    it = Run(folder)
    try:
        yield it
    finally:
        it.io.medium.release()
        it.engine.close()


@pytest.mark.slow
def test_a_frozen_parameter_that_follows_by_hand_is_saved_as_it_was(tmp_path: Path) -> None:
    with run(tmp_path) as it:
        for step in range(4):
            want = copied(it.model)
            pending = it.save()
            with torch.no_grad():
                it.model.base.mul_(0.9).add_(it.model.up.weight.mean())  # in the forward pass of MoCo
            it.model.base.detach().numpy()[-1] = step
            it.train()
            pending.result()
            assert equal(load_sync(tmp_path)["model"], want)


def test_what_stays_the_same_is_left_to_the_capture(tmp_path: Path) -> None:
    with run(tmp_path) as it:
        for _ in range(2):
            it.saved_whole()
            it.train()
        want = copied(it.model)
        with it.in_the_middle() as pending:
            it.model(torch.randn(2, WIDTH)).square().mean().backward()
        it.optimizer.step()
        pending.result()
        assert equal(load_sync(tmp_path)["model"], want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["base", "table"])
def test_a_change_in_the_middle_that_nothing_counts_is_torn_once(tmp_path: Path, name: str) -> None:
    with run(tmp_path) as it:
        tensor = it.model.get_parameter(name) if name == "base" else it.model.get_buffer(name)
        memory = tensor.detach().numpy()  # taken before any capture
        for _ in range(2):
            it.saved_whole()
        with it.in_the_middle() as pending:
            memory[-1] = 7.0
        with pytest.raises(
            TornCaptureError, match=rf"model\.{name} changed while it was captured.*from now on"
        ) as told:
            pending.result()
        assert f"model.{name}" in told.value.paths
        for number in range(3):
            want = copied(it.model)
            pending = it.save()
            memory[-1] = number
            pending.result()
            assert equal(load_sync(tmp_path)["model"], want)
    assert [info.step for info in list_checkpoints(tmp_path)] == [6]


@pytest.mark.slow
def test_a_change_between_two_checkpoints_that_nothing_counts_is_told_as_one(tmp_path: Path) -> None:
    with run(tmp_path) as it:
        memory = it.model.base.detach().numpy()  # taken before any capture
        for _ in range(2):
            it.saved_whole()
        memory[-1] = 7.0
        with pytest.raises(TornCaptureError, match=r"model\.base changed.*or before that.*which nothing counts"):
            it.save().result()
        it.saved_whole()


def test_a_change_in_the_middle_that_torch_counts_is_torn_once(tmp_path: Path) -> None:
    with run(tmp_path) as it:
        for _ in range(2):
            it.saved_whole()
        with it.in_the_middle() as pending, torch.no_grad():
            it.model.base.add_(1.0)
        with pytest.raises(TornCaptureError, match=r"model\.base changed"):
            pending.result()
        for _ in range(2):
            pending = it.save()
            with torch.no_grad():
                it.model.base.add_(1.0)
            pending.result()


def renewed(model: Adapted) -> None:
    model.base = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)


BETWEEN: dict[str, Callable[[Adapted], object]] = {
    "counted": lambda model: model.base.detach().add_(1.0),
    "new": renewed,
    "data": lambda model: model.base.data.mul_(0.9).add_(0.1 * model.table.data),  # a target network
    "numpy": lambda model: model.base.detach().numpy().fill(7.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", BETWEEN)
def test_a_change_between_two_checkpoints_fails_none(tmp_path: Path, how: str) -> None:
    with run(tmp_path) as it:
        for _ in range(3):
            for _ in range(3):
                it.saved_whole()
            BETWEEN[how](it.model)


@pytest.mark.slow
def test_small_ones_and_those_of_other_optimizers_are_none_of_it(tmp_path: Path) -> None:
    with run(tmp_path) as it:
        critic = nn.Linear(WIDTH, WIDTH)
        other = torch.optim.SGD(critic.parameters(), lr=0.1)
        it.state["critic"] = critic
        for _ in range(4):
            want = copied(critic)
            pending = it.save()
            critic(torch.randn(2, WIDTH)).sum().backward()
            other.step()
            pending.result()
            assert equal(load_sync(tmp_path)["critic"], want)


# -- the pure part


def chosen(constants: Constants, state: dict[str, Any], candidates: list[str]) -> Choice:
    """What is left to one capture of a state, of which each of its chunks of a page is then learnt."""
    flat = flatten_unchecked(state, None)
    layout = arrange(flat.leaves)
    which = np.zeros(len(layout.extents), np.bool_)
    which[[layout.source_of[flat.leaves.paths.index(name)] for name in candidates]] = True
    choice = constants.choose(layout, which, flat.leaves)
    assert choice is not None
    plan = Planner(PAGE_BYTES, PAGE_BYTES).plan(replace(layout, breaks=choice.breaks))
    memory = [np.ascontiguousarray(value).view(np.uint8).reshape(-1) for value in flat.leaves.values]
    of_source = dict(zip(layout.source_of, memory, strict=True))
    checksums = [
        hash(b"".join(of_source[p.source][p.source_offset :][: p.length].tobytes() for p in parts(chunk)))
        for chunk in plan.chunks
    ]
    constants.learn(choice, [chunk.table for chunk in plan.chunks], checksums)
    return choice


def test_candidates_lie_in_chunks_of_their_own() -> None:
    items = PAGE_BYTES // 4
    state = {name: torch.ones(items // 2 + 3) for name in "abcde"}
    constants = Constants()
    for _ in range(2):
        assert not chosen(constants, state, ["b", "c", "e"]).constant.any()
    state["a"].fill_(2.0)  # nothing to do with them
    state["d"].fill_(2.0)
    choice = chosen(constants, state, ["b", "c", "e"])
    assert {*choice.paths.values()} == {"b", "c", "e"}
    assert choice.breaks == (1, 3, 4)


def test_a_leaf_that_shares_a_chunk_with_a_changing_one_is_not_left() -> None:
    items = PAGE_BYTES // 4
    state = {name: torch.ones(items * 2 + 8) for name in "abcxd"}
    constants = Constants()
    for value in range(4):
        choice = chosen(constants, state, ["a", "b", "c", "d"])
        state["a"].numpy()[-1] = value  # nothing counts that
    assert {*choice.paths.values()} == {"c", "d"}  # a changes, and shares a chunk with b
    state["c"].add_(1.0)
    assert {*chosen(constants, state, ["a", "b", "c", "d"]).paths.values()} == {"d"}


def test_another_structure_is_learnt_anew() -> None:
    state = {name: torch.ones(PAGE_BYTES) for name in "ab"}
    constants = Constants()
    for _ in range(2):
        chosen(constants, state, ["a", "b"])
    assert chosen(constants, state, ["a", "b"]).constant.all()
    assert not chosen(constants, state, ["a"]).constant.any()
    state["c"] = torch.ones(3)
    assert not chosen(constants, state, ["a", "b"]).constant.any()


def test_memory_of_which_no_change_is_counted_is_never_left() -> None:
    array = np.ones(PAGE_BYTES, np.float32)
    with torch.inference_mode():
        inference = torch.ones(PAGE_BYTES)
    state = {"a": array, "b": torch.from_numpy(array), "x": torch.ones(8), "c": inference, "d": torch.ones(PAGE_BYTES)}
    constants = Constants()
    for _ in range(3):
        choice = chosen(constants, state, ["a", "b", "c", "d"])
    assert {*choice.paths.values()} == {"d"}


def test_a_run_whose_weights_are_changed_by_hand_goes_on_with_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As sharpness-aware minimisation does: up, another gradient, and down again."""
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    io, torn = Device(), list[int]()
    settings: Any = {"chunk_bytes": 4 * PAGE_BYTES, "host_memory": 8 * PAGE_BYTES}
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=io, **settings)) as engine:
        engine.attach(optimizer)
        for step in range(5):
            want = copied(model)
            if step in (0, 2):  # between them what was torn is captured before the call returns
                io.medium.hold("write")
            pending = engine.checkpoint({"model": model}, step=step, overlap=True)
            with torch.no_grad():
                model.weight.add_(0.1)
            io.medium.release()
            try:
                pending.result()
                assert equal(load_sync(tmp_path)["model"], want)
            except TornCaptureError:
                torn.append(step)
    assert torn == [0, 2]
    events = [record.event for record in caplog.records if record.event != "failed"]  # type: ignore[attr-defined]
    assert events == ["not_in_state", "captured_eagerly"]
