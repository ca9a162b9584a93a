"""Windows of gradient accumulation: checkpoints wait where gradients do, of whichever optimizer."""

from __future__ import annotations

import gc
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pccheck_async import SyncCheckpointEngine, list_checkpoints
from pccheck_async.windows import _PATIENCE

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Part:
    """A model with an optimizer of its own."""

    def __init__(self, kind: Callable[..., torch.optim.Optimizer] = torch.optim.Adam) -> None:
        self.model = nn.Linear(4, 4)
        self.optimizer = kind(self.model.parameters(), lr=0.1)

    def backward(self, step: int) -> None:
        self.model(torch.full((1, 4), float(step + 1))).square().sum().backward()

    def apply(self, *, to_none: bool = True) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=to_none)


def state_of(parts: dict[str, Part]) -> dict[str, Any]:
    return {name: part.model for name, part in parts.items()} | {
        f"{name} optimizer": part.optimizer for name, part in parts.items()
    }


Body = Callable[[dict[str, Part], int], None]


def saved(folder: Path, body: Body, steps: int, *, attach: tuple[str, ...] = (), names: str = "ab") -> list[int]:
    """Train, and return the steps that were saved of an interval of 1."""
    torch.manual_seed(0)
    parts = {name: Part() for name in names}
    with SyncCheckpointEngine(folder, interval=1) as engine:
        engine.attach(*(parts[name].optimizer for name in attach))
        found = []
        for step in range(steps):
            with engine.step(state_of(parts), step) as this:
                body(parts, step)
            if this.pending is not None:
                found.append(this.pending.result().step)
    return found


def windows(**lengths: int) -> Body:
    """Each part accumulates over so many brackets."""

    def body(parts: dict[str, Part], step: int) -> None:
        for name, length in lengths.items():
            parts[name].backward(step)
            if (step + 1) % length == 0:
                parts[name].apply()

    return body


@pytest.mark.parametrize("attach", [(), ("a",), ("a", "b")], ids=["none", "one", "both"])
def test_a_checkpoint_waits_for_the_windows_of_all(tmp_path: Path, attach: tuple[str, ...]) -> None:
    """Those in the state count, whichever of them are attached."""
    assert saved(tmp_path, windows(a=1, b=3), 9, attach=attach) == [2, 5, 8]
    assert saved(tmp_path / "other", windows(a=2, b=3), 12, attach=attach) == [5, 11]


@pytest.mark.parametrize("attach", [(), ("a",)], ids=["not attached", "attached"])
def test_of_one_that_is_known_from_the_first_bracket_on(tmp_path: Path, attach: tuple[str, ...]) -> None:
    assert saved(tmp_path, windows(a=3), 7, attach=attach, names="a") == [2, 5]


@pytest.mark.parametrize("attach", [(), ("a", "b")], ids=["none", "both"])
@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_that_were_used_hold_nothing_up(tmp_path: Path, attach: tuple[str, ...], to_none: bool) -> None:
    """They may lie about until the next time, or be gone."""

    def in_turns(parts: dict[str, Part], step: int) -> None:
        part = parts["ab"[step % 2]]
        part.optimizer.zero_grad(set_to_none=to_none)
        part.backward(step)
        part.optimizer.step()

    assert saved(tmp_path, in_turns, 6, attach=attach) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("attach", [(), ("a",)], ids=["none", "one"])
def test_gradients_left_by_the_last_step_of_one_that_retires_hold_nothing_up(
    tmp_path: Path, attach: tuple[str, ...]
) -> None:
    parts = {name: Part() for name in "ab"}
    whole = []
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        engine.attach(*(parts[name].optimizer for name in attach))
        for step in range(6):
            name = "a" if step < 2 else "b"
            with engine.step(state_of({name: parts[name] for name in "ab"[: 1 + step // 2]}), step) as this:
                if step not in (1, 3):
                    parts[name].backward(step)
                    parts[name].optimizer.step()
            whole.append(this.whole)
    assert whole == [True, not attach, True, not attach, True, True]


def test_a_parameter_that_keeps_no_gradient(tmp_path: Path) -> None:
    """Asking it for one is a warning of torch's."""
    weight = nn.Parameter(torch.ones(3)) * 2
    meta = torch.optim.SGD([weight], lr=0.1, differentiable=True)
    with SyncCheckpointEngine(tmp_path) as engine:
        for step in range(2):
            with engine.step({"meta": meta}, step) as this:
                pass
            assert this.whole


def test_a_gradient_in_the_place_of_one_that_was_used_is_another(tmp_path: Path) -> None:
    def body(parts: dict[str, Part], step: int) -> None:
        if step > 0:
            parts["b"].optimizer.zero_grad()  # torch takes the same memory and the same version again
        parts["b"].backward(step)
        if step == 0:
            parts["b"].optimizer.step()
        parts["a"].backward(step)
        parts["a"].apply()

    for _ in range(5):
        shutil.rmtree(tmp_path)
        assert saved(tmp_path, body, 4, attach=("a", "b")) == [0]


def test_a_parameter_that_another_optimizer_took_over(tmp_path: Path) -> None:
    """Of two phases of training, the first optimizer is kept, and only that is attached."""
    model = nn.Linear(4, 4)
    first, second = torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizers": [first, second]}
    with SyncCheckpointEngine(tmp_path, interval=1, keep_last=9) as engine:
        engine.attach(first)
        for step in range(6):
            optimizer = first if step < 3 else second
            with engine.step(state, step):
                optimizer.zero_grad()
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
    assert [info.step for info in list_checkpoints(tmp_path)] == [5, 4, 3, 2, 1, 0]  # none of them is torn


def test_resumed_in_the_middle_of_a_window_of_one_of_two(tmp_path: Path) -> None:
    def train(folder: Path, steps: int) -> dict[int, list[float]]:
        torch.manual_seed(0)
        parts = {name: Part() for name in "ab"}
        losses = {}
        with SyncCheckpointEngine(folder, interval=1) as engine:
            engine.attach(*(part.optimizer for part in parts.values()))
            restored = engine.restore(state_of(parts))
            for step in range(restored.step + 1 if restored else 0, steps):
                with engine.step(state_of(parts), step):
                    windows(a=1, b=3)(parts, step)
                losses[step] = [part.model.weight.sum().item() for part in parts.values()]
        return losses

    want = train(tmp_path / "whole", 8)
    for killed in range(1, 8):
        train(tmp_path / str(killed), killed)
        got = train(tmp_path / str(killed), 8)
        assert got == {step: want[step] for step in got}, killed


@pytest.mark.parametrize("attach", [(), ("a", "b")], ids=["none", "both"])
def test_gradients_that_nobody_ever_uses_are_ignored_in_the_end(
    tmp_path: Path, attach: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """In turns, and each step leaves gradients in the other one, too."""

    def body(parts: dict[str, Part], step: int) -> None:
        mine, other = (parts[name] for name in ("ab" if step % 2 else "ba"))
        mine.optimizer.zero_grad()
        mine.backward(step)
        other.backward(step)
        mine.optimizer.step()

    with caplog.at_level(logging.WARNING, "pccheck_async"):
        found = saved(tmp_path, body, _PATIENCE + 3, attach=attach)
    assert found == list(range(_PATIENCE - 1, _PATIENCE + 3))
    (line,) = [record for record in caplog.records if record.event == "unused_gradients"]  # type: ignore[attr-defined]
    assert (line.levelname, line.step, line.store) == ("WARNING", _PATIENCE - 1, str(tmp_path))  # type: ignore[attr-defined]
    assert "no step of the Adam has used" in line.getMessage()
    assert ("or attach the optimizers" in line.getMessage()) is not bool(attach)


def test_a_window_as_long_as_the_patience_is_waited_for(tmp_path: Path) -> None:
    assert saved(tmp_path, windows(a=1, b=_PATIENCE), 2 * _PATIENCE, attach=("a", "b")) == [
        _PATIENCE - 1,
        2 * _PATIENCE - 1,
    ]


def test_a_state_without_optimizers_is_whole_after_every_bracket(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        for step in range(3):
            with engine.step({"x": torch.ones(3), "many": [1] * 1000}, step) as this:
                pass
            assert this.whole


def test_what_has_no_hooks_is_passed_over(tmp_path: Path) -> None:
    class Inherited(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.param_groups = []

        def state_dict(self) -> dict[str, Any]:
            return {}

    part = Part()
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        engine.attach(part.optimizer)
        with engine.step({"x": torch.ones(3), "odd": Inherited()}, 0) as this:
            part.backward(0)
            part.optimizer.step()
        assert this.whole


def test_closing_lets_go(tmp_path: Path) -> None:
    part = Part()
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        with engine.step({"optimizer": part.optimizer}, 0):
            pass
        windows = engine._core.steps._windows
    before = len(windows._stepped)
    part.backward(0)
    part.optimizer.step()
    assert len(windows._stepped) == before
    assert len(part.optimizer._optimizer_step_post_hooks) == 1
    gc.collect()
