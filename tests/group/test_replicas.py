"""What ranks are believed to have alike and do not: local SGD, drift, and tensors that were named by mistake."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pccheck_async import Group, StateMismatchError, SyncCheckpointEngine, list_checkpoints, load_sync
from pccheck_async.errors import ReplicasDifferError
from tests.group.test_sharded import mesh_of
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("dynamo"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]


def model_of(rank: int) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """A DDP model and its optimizer; each rank draws other samples."""
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 7)))
    torch.manual_seed(10 + rank)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, *, local: bool) -> None:
    within: nn.Module = model.module if local else model
    within(torch.randn(5, 20)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [each.detach().clone() for each in (*model.parameters(), *moments)]


def locally(folder: Path, group: Group, trusted: Sequence[str] = ()) -> tuple[list[list[int]], bool]:
    """Train by local steps, each of which is saved; return what is there after each, and whether it is restored."""
    mesh_of(folder, group)
    model, optimizer = model_of(group.rank)
    state, there = {"model": model, "optimizer": optimizer}, []
    group = Group.of(group, trusted_replicas=trusted)
    with SyncCheckpointEngine(folder / "run", group=group, interval=1) as engine:
        engine.attach(optimizer)
        for step in range(3):
            with engine.step(state, step):
                train(model, optimizer, local=step > 0)
            engine.drain()  # a run goes on: nothing is raised here
            there.append([info.step for info in engine.checkpoints()])
        expected = bits(model, optimizer)
        train(model, optimizer, local=True)
        engine.restore(state)
        return there, all(map(torch.equal, bits(model, optimizer), expected))


def test_local_steps_are_found_at_the_first_save_and_each_rank_saves_its_own_from_then_on(tmp_path: Path) -> None:
    found = run_ranks(3, partial(locally, tmp_path))
    assert found == [([[0], [0], [2]], True)] * 3
    weights = [load_sync(tmp_path / "run", rank=rank)["model"]["module.0.weight"] for rank in range(3)]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


def test_a_run_that_goes_on_with_local_steps_loses_no_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, partial(locally, tmp_path))
    (tmp_path / "rendezvous").unlink()

    def goes_on(group: Group) -> list[int]:
        mesh_of(tmp_path, group)
        model, optimizer = model_of(group.rank)
        state = {"model": model, "optimizer": optimizer}
        with SyncCheckpointEngine(tmp_path / "run", group=group) as engine:
            engine.restore(state)
            train(model, optimizer, local=True)
            engine.checkpoint(state, step=3).result()
            return [info.step for info in engine.checkpoints()]

    assert run_ranks(2, goes_on) == [[3]] * 2


def test_what_was_saved_apart_and_is_alike_is_saved_once_again(tmp_path: Path) -> None:
    """It was not named the first time."""

    def rank_main(replicated: list[str], group: Group) -> int:
        state = {"w": torch.arange(50_000.0)}
        with SyncCheckpointEngine(tmp_path / "run", group=Group.of(group, replicated=replicated)) as engine:
            engine.restore(state)
            step = 0 if engine.latest is None else engine.latest.step + 1
            return engine.checkpoint(state, step=step).result().nbytes

    assert min(run_ranks(2, partial(rank_main, []))) >= 200_000
    assert min(run_ranks(2, partial(rank_main, ["w"]))) < 200_000


def test_what_is_trusted_is_not_compared(tmp_path: Path) -> None:
    found = run_ranks(2, partial(locally, tmp_path, trusted=["model.*", "optimizer.*"]))
    assert [there for there, _ in found] == [[[0], [1], [2]]] * 2
    assert not all(same for _, same in found)  # it is believed, and is not so


def test_other_ranks_of_local_steps_are_refused_by_name(tmp_path: Path) -> None:
    run_ranks(2, partial(locally, tmp_path))
    (tmp_path / "rendezvous").unlink()

    def other_world(group: Group) -> str:
        mesh_of(tmp_path, group)
        model, optimizer = model_of(0)
        with SyncCheckpointEngine(tmp_path / "run", group=group) as engine, pytest.raises(StateMismatchError) as caught:
            engine.restore({"model": model, "optimizer": optimizer})
        return str(caught.value)

    (said,) = run_ranks(1, other_world)
    assert r"different tensors under one name: model.module.0.bias" in said


def test_a_run_goes_on_where_ranks_share_replicas_with_some_others_only(tmp_path: Path) -> None:
    def rank_main(run: int, group: Group) -> list[list[int]]:
        mesh_of(tmp_path / f"{run}", group)
        pair, alone = torch.distributed.new_group([0, 1]), torch.distributed.new_group([2])
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Linear(20, 30), process_group=alone if group.rank == 2 else pair)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        torch.manual_seed(group.rank)
        state, there = {"model": model, "optimizer": optimizer}, []
        with SyncCheckpointEngine(tmp_path / "run", group=group, interval=1, save_last=False) as engine:
            engine.restore(state)
            for step in range(3 * run, 3 * run + 3):
                with engine.step(state, step):
                    train(model, optimizer, local=True)
                engine.drain()
                there.append([info.step for info in engine.checkpoints()])
        return there

    for run in range(2):
        (tmp_path / f"{run}").mkdir()
        found = run_ranks(3, partial(rank_main, run))
        assert found[0] == found[1] == found[2]
        # The first one of all is aborted. Of the second run none is: rank 2 has no part of what differs, and knows it.
        assert found[0] == [[[], [1], [2]], [[3], [4], [5]]][run]


def test_the_last_step_is_saved_though_it_is_the_first_to_differ(tmp_path: Path) -> None:
    def rank_main(group: Group) -> None:
        mesh_of(tmp_path, group)
        model, optimizer = model_of(group.rank)
        with SyncCheckpointEngine(tmp_path / "run", group=group, interval=1000) as engine:
            engine.attach(optimizer)
            for step in range(1, 4):
                with engine.step({"model": model, "optimizer": optimizer}, step):
                    train(model, optimizer, local=True)

    run_ranks(2, rank_main)
    assert [info.step for info in list_checkpoints(tmp_path / "run")] == [3]


@pytest.mark.parametrize("alike", [True, False])
def test_one_element_that_drifted_is_found_within_sixteen_saves(tmp_path: Path, alike: bool) -> None:
    def rank_main(group: Group) -> tuple[int, str]:
        ema = torch.zeros(1000)
        ema[777] = 0 if alike else group.rank
        state = {"ema": {"w": ema, "small": torch.zeros(64), "count": torch.zeros(1)}}
        with SyncCheckpointEngine(tmp_path / "run", group=Group.of(group, replicated=["ema.*"])) as engine:
            for step in range(16):
                try:
                    engine.checkpoint(state, step=step).result()
                except ReplicasDifferError as error:
                    engine.checkpoint(state, step=step + 1).result()
                    ema.zero_()
                    engine.restore(state)
                    assert ema[777] == group.rank
                    return step, str(error)
        return 16, ""

    found = run_ranks(2, rank_main)
    if alike:
        assert found == [(16, "")] * 2
    else:
        assert found[0] == found[1]
        assert 0 < found[0][0] < 16
        assert "such as ema.w;" in found[0][1]


class Said(logging.Handler):
    """Keeps what the log says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_the_log_names_what_differs(tmp_path: Path) -> None:
    def rank_main(group: Group) -> list[str]:
        handler = Said()
        logging.getLogger("pccheck_async").addHandler(handler)
        with SyncCheckpointEngine(tmp_path / "run", group=Group.of(group, replicated=["*"])) as engine:
            pending = engine.checkpoint({"w": torch.full((100,), float(group.rank))}, step=1)
            with pytest.raises(ReplicasDifferError):
                pending.result()
        return handler.lines

    for said in run_ranks(2, rank_main):
        assert any("checkpoint of step 1 failed" in each and "such as w;" in each for each in said)
