"""restore(dry_run=True): what a restore would do, and nothing of it is done."""

from __future__ import annotations

import asyncio
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pccheck_async import CheckpointEngine, Group, NoCheckpointError, RNGState, StateMismatchError, SyncCheckpointEngine
from pccheck_async.errors import DamagedError
from tests.support.group_folders import spoil
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def training(value: float) -> dict[str, Any]:
    model = nn.Linear(2, 3)
    nn.init.constant_(model.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=value, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "step": int(value),
        "history": [value],
        "array": np.full(2, value),
        "rng": RNGState(),
    }


def content(state: dict[str, Any]) -> str:
    optimizer = state["optimizer"].state_dict()
    gradients = [parameter.grad for parameter in state["model"].parameters()]
    plain = [state.get(key) for key in ("step", "history", "array")]
    return repr((state["model"].state_dict(), optimizer, gradients, plain, torch.get_rng_state().sum()))


def test_a_dry_run_says_what_a_restore_does_and_changes_nothing(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        assert engine.restore(training(1), dry_run=True) is None
        saved, live = training(1), training(2)
        engine.checkpoint(saved, step=1).result(60)
        before = content(live)
        plan = engine.restore(live, dry_run=True)
        assert plan is not None
        assert content(live) == before
        assert (plan.step, plan.missing, plan.unexpected, plan.mismatched, plan.error) == (1, (), (), (), None)
        assert plan.actions == {
            "model.weight": "fill",
            "model.bias": "fill",
            "optimizer.state.0.momentum_buffer": "fill",
            "optimizer.state.1.momentum_buffer": "fill",
            "array": "fill",
            "rng.python.words": "fill",
            "rng.numpy.state.key": "fill",
            "rng.torch": "fill",
            "model": "load",
            "optimizer": "load",
            "step": "replace",
            "history": "replace",
            "rng": "load",
        }
        restored = engine.restore(live)
        assert restored is not None
        assert (restored.filled, restored.actions) == (plan.filled, {})
        saved["model"].zero_grad()
        assert content(live) == content(saved)
        with pytest.raises(NoCheckpointError):
            engine.restore(live, step=9, dry_run=True)


@pytest.mark.parametrize("strict", [True, False])
def test_the_error_of_a_dry_run_is_that_of_the_restore(tmp_path: Path, strict: bool) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"a": torch.ones(2), "b": 1, "tied": torch.ones(4)}, step=1).result(60)
    tied = torch.zeros(4)
    live = {"a": torch.zeros(3), "c": 1, "tied": tied, "view": tied[2:]}
    with SyncCheckpointEngine(tmp_path) as engine:
        plan = engine.restore(live, strict=strict, dry_run=True)
        assert plan is not None
        with pytest.raises(StateMismatchError) as raised:
            engine.restore(live, strict=strict)
        error = raised.value
        assert plan.error == str(error)
        assert (plan.missing, plan.unexpected, plan.mismatched) == (error.missing, error.unexpected, error.mismatched)
        assert plan.missing == ("c", "view")
        with pytest.raises(ValueError, match="call restore"):  # a dry run restored nothing
            engine.checkpoint(live, step=0)


def test_a_dry_run_does_not_take_a_trainer_for_restored(tmp_path: Path) -> None:
    async def main() -> None:
        async with CheckpointEngine(tmp_path) as engine:
            await (await engine.checkpoint({"x": 1}, step=5)).durable()
        async with CheckpointEngine(tmp_path) as engine:
            plan = await engine.restore({"x": 0}, dry_run=True)
            assert plan is not None
            assert plan.actions == {"x": "replace"}
            with pytest.raises(ValueError, match="holds step 5"):
                await engine.checkpoint({"x": 0}, step=5)

    asyncio.run(main())


def planned(folder: Path, group: Group) -> tuple[Any, ...]:
    with SyncCheckpointEngine(folder, group=group) as engine:
        state: dict[str, Any] = {"x": torch.ones(1 + group.rank), "step": 1}
        engine.checkpoint(state, step=1).result(60)
        live: dict[str, Any] = {"x": torch.zeros(1), "step": 0}
        plan = engine.restore(live, dry_run=True)
        assert plan is not None
        assert (live["step"], live["x"].item()) == (0, 0.0)
        restored = engine.restore(state)
        assert restored is not None
        assert plan == restored
        return plan.actions, plan.mismatched, plan.error is None


@pytest.mark.slow
def test_each_rank_of_a_group_gets_its_own_plan(tmp_path: Path) -> None:
    one, other = run_ranks(2, partial(planned, tmp_path))
    assert one == ({"x": "fill", "step": "replace"}, (), True)
    assert other == ({"step": "replace"}, ("x (float32 (1,) here, float32 (2,) in the checkpoint)",), False)


def saved_after_a_dry_run(folder: Path, group: Group | None = None) -> list[int]:
    """Save two steps, the second one damaged by a dry run's time; return the steps after a third one."""
    rank = 0 if group is None else group.rank
    with SyncCheckpointEngine(folder, group=group, keep_last=3) as engine:
        for step in (1, 2):
            engine.checkpoint({"x": rank}, step=step).result(60)
        if group is None or rank == 1:
            spoil(folder, rank, manifest=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of the fall-back
            plan = engine.restore({"x": -1}, dry_run=True)
        assert plan is not None
        assert plan.step == 1
        engine.checkpoint({"x": rank}, step=3).result(60)
        return [info.step for info in engine.checkpoints()]


def damaged_elsewhere(folder: Path, group: Group) -> None:
    state = {"x": torch.ones(5_000) * group.rank}
    with SyncCheckpointEngine(folder, group=group) as engine:
        engine.checkpoint(state, step=1).result(60)
        if group.rank == 1:
            spoil(folder, 1, manifest=True)
        for dry_run in (True, False):
            with pytest.raises(DamagedError):
                engine.restore(state, dry_run=dry_run)


def test_a_dry_run_drops_nothing(tmp_path: Path) -> None:
    assert saved_after_a_dry_run(tmp_path) == [3, 2, 1]


@pytest.mark.slow
def test_a_dry_run_drops_nothing_of_a_group(tmp_path: Path) -> None:
    assert run_ranks(2, partial(saved_after_a_dry_run, tmp_path)) == [[3, 2, 1]] * 2


@pytest.mark.slow
def test_damage_on_another_rank_ends_a_dry_run_as_a_restore(tmp_path: Path) -> None:
    run_ranks(2, partial(damaged_elsewhere, tmp_path))
