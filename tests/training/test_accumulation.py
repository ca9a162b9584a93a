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
from pccheck_async.engine import hooks_of_all
from pccheck_async.testing.probe import probe
from pccheck_async.training import accumulation as windows_module
from pccheck_async.training.accumulation import PATIENCE

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
        if attach:
            engine.attach(*(parts[name].optimizer for name in attach))
        found = []
        for step in range(steps):
            with engine.step(state_of(parts), step) as this:
                body(parts, step)
            if this.pending is not None:
                found.append(this.pending.result().step)
    return found


def windows(**lengths: int) -> Body:
    """Each part accumulates over so many contexts."""

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
def test_of_one_that_is_known_from_the_first_context_on(tmp_path: Path, attach: tuple[str, ...]) -> None:
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
        if attach:
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


@pytest.mark.slow
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


@pytest.mark.parametrize("frozen", [False, True], ids=["all are trained", "two of three are frozen"])
def test_windows_of_many_parameters_that_begin_late(tmp_path: Path, frozen: bool) -> None:
    """Until the first window only a sample of gradients is looked at; from then on, every one."""
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(100)])
    for index, layer in enumerate(model):
        layer.requires_grad_(not frozen or index % 3 == 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wholes = []
    with SyncCheckpointEngine(tmp_path, interval=1000) as engine:
        for step in range(8):
            with engine.step({"model": model, "optimizer": optimizer}, step) as this:
                if step == 7:  # a loss of one layer alone, which is in no sample
                    model[1](torch.ones(1, 2)).sum().backward()
                elif step != 4:  # nothing happens in that one
                    model(torch.ones(1, 2)).sum().backward()
                if step in (0, 1, 3, 6):
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=step != 3)
            wholes.append(this.whole)
    assert wholes == [True, True, False, True, True, False, True, False]


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


@pytest.mark.slow
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
        found = saved(tmp_path, body, PATIENCE + 3, attach=attach)
    assert found == list(range(PATIENCE - 1, PATIENCE + 3))
    (line,) = [record for record in caplog.records if record.event == "unused_gradients"]  # type: ignore[attr-defined]
    assert (line.levelname, line.step, line.store) == ("WARNING", PATIENCE - 1, str(tmp_path))  # type: ignore[attr-defined]
    assert "no step of the Adam has used" in line.getMessage()
    assert ("or attach the optimizers" in line.getMessage()) is not bool(attach)


@pytest.mark.parametrize("attach", [(), ("a",)], ids=["none", "attached"])
def test_an_optimizer_that_trains_nothing_is_told(
    tmp_path: Path, attach: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """In a notebook: the model was made anew, and the state was not."""

    def anew(parts: dict[str, Part], step: int) -> None:
        if step == 0:
            new.append(Part())
        new[0].backward(step)
        parts["a"].apply()

    def idle_at_first(parts: dict[str, Part], step: int) -> None:
        if step >= 2:
            parts["a"].backward(step)
        parts["a"].apply()

    new: list[Part] = []
    with caplog.at_level(logging.WARNING, "pccheck_async"):
        saved(tmp_path / "trains", idle_at_first, 9, attach=attach, names="a")
        assert not caplog.records
        saved(tmp_path / "idle", anew, 9, attach=attach, names="a")
    (line,) = [record for record in caplog.records if record.event == "no_gradients"]  # type: ignore[attr-defined]
    assert "none of the parameters of the Adam had a gradient in its first 3 steps" in line.getMessage()
    assert "make optimizer and state from it, too" in line.getMessage()


def test_a_window_as_long_as_the_patience_is_waited_for(tmp_path: Path) -> None:
    assert saved(tmp_path, windows(a=1, b=PATIENCE), 2 * PATIENCE, attach=("a", "b")) == [
        PATIENCE - 1,
        2 * PATIENCE - 1,
    ]


def test_a_longer_window_is_waited_for_once_it_is_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where nothing is attached it is not known before its first step."""
    length = PATIENCE + 8
    with caplog.at_level(logging.WARNING, "pccheck_async"):
        found = saved(tmp_path, windows(a=length), 3 * length, names="a")
    inside = [2 * length - 9, 3 * length - 9]  # after so many contexts a checkpoint waits no longer, known or not
    assert found == sorted([*range(PATIENCE - 1, length), 2 * length - 1, 3 * length - 1, *inside])
    assert [(record.event, record.step) for record in caplog.records] == [  # type: ignore[attr-defined]
        ("unused_gradients", PATIENCE - 1),
        *(("inside_window", step) for step in inside),
    ]


def test_what_was_not_trained_at_first_has_windows_later(tmp_path: Path) -> None:
    """Its gradients were left over as long as it was not stepped."""
    first = PATIENCE + 2

    def body(parts: dict[str, Part], step: int) -> None:
        parts["a"].backward(step)
        parts["a"].apply()
        if step == first:
            parts["b"].optimizer.zero_grad()
        parts["b"].backward(step)
        if step >= first and (step - first) % 3 == 2:
            parts["b"].apply()

    found = saved(tmp_path, body, first + 9)
    assert found[:3] == [PATIENCE - 1, PATIENCE, PATIENCE + 1]
    assert [step - first for step in found if step >= first + 2] == [2, 5, 8]


@pytest.fixture
def _long_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step context count as one that takes minutes."""
    monkeypatch.setattr(windows_module, "PATIENCE_SECONDS", 0.0)


@pytest.mark.usefixtures("_long_contexts")
@pytest.mark.parametrize("contexts", [2, 3])
def test_long_contexts_are_waited_for_only_so_long(tmp_path: Path, contexts: int) -> None:
    def body(parts: dict[str, Part], step: int) -> None:
        parts["a"].backward(step)
        parts["a"].apply()
        parts["b"].backward(step)

    assert saved(tmp_path, body, contexts) == ([2] if contexts == 3 else [])


@pytest.mark.usefixtures("_long_contexts")
@pytest.mark.parametrize("attach", [(), ("a", "b")], ids=["none", "both"])
def test_a_window_of_long_contexts_is_waited_for_once_it_is_known(tmp_path: Path, attach: tuple[str, ...]) -> None:
    found = saved(tmp_path, windows(a=1, b=32), 128, attach=attach)
    assert found == [*range(2, 32), 63, 95, 127]


@pytest.mark.parametrize("attach", [(), ("a", "b", "c")], ids=["none", "all"])
def test_what_is_left_over_in_one_ends_no_windows_of_another(tmp_path: Path, attach: tuple[str, ...]) -> None:
    def body(parts: dict[str, Part], step: int) -> None:
        windows(a=1, b=3)(parts, step)
        parts["c"].backward(step)

    found = saved(tmp_path, body, PATIENCE + 12, attach=attach, names="abc")
    ends = [step for step in range(PATIENCE - 1, PATIENCE + 12) if step % 3 == 2]
    assert found == [PATIENCE - 1, *ends]  # the first one waited as long as any does: it is inside a window


@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("attach", [(), ("b",), ("a", "b")], ids=["none", "one", "both"])
def test_gradients_that_are_left_after_a_step_hold_nothing_up(
    tmp_path: Path, attach: tuple[str, ...], to_none: bool
) -> None:
    """A generator's loss leaves some in the discriminator."""

    def body(parts: dict[str, Part], step: int) -> None:
        critic, actor = parts["a"], parts["b"]
        critic.optimizer.zero_grad(to_none)
        critic.backward(step)
        critic.optimizer.step()
        actor.optimizer.zero_grad(to_none)
        critic.model(actor.model(torch.ones(1, 4))).sum().backward()
        actor.optimizer.step()

    assert saved(tmp_path, body, 3, attach=attach) == [0, 1, 2]


@pytest.mark.parametrize("attach", [(), ("a",), ("a", "b")], ids=["none", "one", "both"])
def test_gradients_that_are_zeroed_after_a_step_hold_nothing_up(tmp_path: Path, attach: tuple[str, ...]) -> None:
    def in_turns(parts: dict[str, Part], step: int) -> None:
        part = parts["ab"[step % 2]]
        part.backward(step)
        part.apply(to_none=False)

    assert saved(tmp_path, in_turns, 4, attach=attach) == [0, 1, 2, 3]


def test_steps_outside_of_contexts_end_no_window(tmp_path: Path) -> None:
    part = Part()
    found = []
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        engine.attach(part.optimizer)
        part.backward(0)
        part.apply()  # to make its state, say
        for step in range(4):
            with engine.step(state_of({"a": part}), step) as this:
                part.backward(step)
                if step % 2:
                    part.apply()
            found.append(this.whole)
    assert found == [False, True, False, True]


def test_gradients_from_before_another_joined_are_not_taken_for_used(tmp_path: Path) -> None:
    parts = {name: Part() for name in "ab"}
    found = []
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        engine.attach(parts["a"].optimizer)
        for step in range(4):
            with engine.step(state_of({name: parts[name] for name in "ab"[: 1 + step]}), step) as this:
                if step % 2 == 0:
                    parts["a"].backward(step)
                parts["b"].backward(step)
                parts["b"].apply()
                if step == 3:
                    parts["a"].apply()
            found.append(this.whole)
    assert found == [False, False, False, True]


@pytest.mark.parametrize("attach", [False, True])
def test_gradients_made_in_inference_mode(tmp_path: Path, attach: bool) -> None:
    """Torch counts no changes of these."""
    parts = {name: Part() for name in "ab"}
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        if attach:
            engine.attach(*(part.optimizer for part in parts.values()))
        for step in range(3):
            with engine.step(state_of(parts), step) as this:
                for part in parts.values():
                    with torch.inference_mode():
                        for parameter in part.model.parameters():
                            parameter.grad = torch.ones_like(parameter)
                    part.optimizer.step()
            assert this.whole


class Accelerated(torch.optim.Optimizer):
    """As Accelerate wraps optimizers: it inherits what makes it one, and has nothing of it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class Fabricated(Accelerated):
    """As Fabric does: what it lacks comes from the optimizer inside, the table of its hooks, too."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def optimizer(self) -> torch.optim.Optimizer:  # type: ignore[override]
        return self._optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class Shared(Accelerated):
    """As older Lightning does: with the attributes of the optimizer inside."""

    param_groups = None
    state = None

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__dict__ = {**vars(optimizer), "optimizer": optimizer}


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("wrapper", [Accelerated, Fabricated, Shared])
def test_the_optimizer_in_a_trainer_s_wrapper(
    tmp_path: Path, wrapper: type[Accelerated], attach: bool, caplog: pytest.LogCaptureFixture
) -> None:
    part = Part()
    wrapped = wrapper(wrapper(part.optimizer))
    found = []
    engine = SyncCheckpointEngine(tmp_path, interval=1, save_last=False)
    with caplog.at_level(logging.WARNING, "pccheck_async"), engine:
        if attach:
            engine.attach(wrapped)
        for step in range(7):
            with engine.step({"model": part.model, "optimizer": wrapped}, step) as this:
                if step % 3 == 0:
                    wrapped.zero_grad()
                part.backward(step)
                if step % 3 == 2:
                    wrapped.step()
            if this.pending is not None:
                found.append(this.pending.result().step)
    assert found == [2, 5]
    assert not caplog.records


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware minimisation: two steps of its own, and the one of an optimizer inside that nobody knows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.01)

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["before"] = parameter.clone()
                parameter.add_(0.05 * parameter.grad)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["before"])
        self.base.step()
        self.zero_grad()


@pytest.mark.parametrize("attach", [False, True])
def test_the_step_of_an_optimizer_inside_is_that_of_the_one_around_it(tmp_path: Path, attach: bool) -> None:
    """Every second context is the end of a window."""
    model = nn.Linear(4, 4)
    sharp = Sharp(model.parameters())
    found = []
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        if attach:
            engine.attach(sharp)
        for step in range(6):
            with engine.step({"model": model, "optimizer": sharp}, step) as this:
                model(torch.ones(1, 4)).square().sum().backward()
                if step % 2:
                    sharp.first_step()
                    model(torch.ones(1, 4)).square().sum().backward()
                    sharp.second_step()
            found.append(this.whole)
            if this.pending is not None:
                this.pending.result()
    assert found == [False, True] * 3


def test_the_step_of_an_optimizer_of_other_parameters_ends_no_window(tmp_path: Path) -> None:
    part, other = Part(), Part()
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        engine.attach(part.optimizer)
        with engine.step(state_of({"a": part}), 0) as this:
            part.backward(0)
            other.backward(0)
            other.apply()
        assert not this.whole


def test_a_wrapper_with_hooks_of_its_own_is_what_is_attached(tmp_path: Path) -> None:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer.param_groups, {})
            self.optimizer = optimizer

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.optimizer.step(closure)

    part = Part()
    wrapped = Lookahead(part.optimizer)
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        engine.attach(wrapped)
        assert probe(engine).core.guard.optimizers == [wrapped]
        with engine.step({"model": part.model, "optimizer": wrapped}, 0) as this:
            part.backward(0)
            wrapped.step()
        assert this.whole


def test_optimizers_deeper_in_the_state_are_seen(tmp_path: Path) -> None:
    part = Part()
    state = {"gan": {"optimizers": [{"critic": part.optimizer}], "model": part.model}}
    whole = []
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        for step in range(4):
            with engine.step(state, step) as this:
                part.backward(step)
                if step % 2:
                    part.apply()
            whole.append(this.whole)
    assert whole == [False, True, False, True]


def test_looking_for_optimizers_ends(tmp_path: Path) -> None:
    wide: dict[str, Any] = {str(n): {str(m): [0] * 50 for m in range(50)} for n in range(50)}
    looked = 0

    class Counting(list[Any]):
        def __iter__(self) -> Any:
            nonlocal looked
            looked += 1
            return super().__iter__()

    for inner in wide.values():
        for name in inner:
            inner[name] = Counting(inner[name])
    assert list(windows_module.optimizers_in({"wide": wide})) == []
    assert looked < 1000


@pytest.mark.slow
def test_an_attached_optimizer_that_is_replaced(tmp_path: Path) -> None:
    """The one that takes its place joins, and has to make steps like it."""
    part = Part()
    whole = []
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        engine.attach(part.optimizer)
        for step in range(3):
            part.optimizer = torch.optim.SGD(part.model.parameters(), lr=0.1)
            gc.collect()
            with engine.step(state_of({"a": part}), step) as this:
                if step != 1:
                    part.backward(step)
                    part.apply()
            whole.append(this.whole)
            assert probe(engine).core.guard.optimizers == [part.optimizer]
    assert whole == [True, False, True]


@pytest.mark.parametrize("attach", [False, True])
def test_torch_may_swap_what_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attach: bool) -> None:
    """It refuses tensors with weak references."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    part = Part()
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        if attach:
            engine.attach(part.optimizer)
        for step in range(4):
            with engine.step(state_of({"a": part}), step) as this:
                part.model.to(torch.float64 if step % 2 else torch.float32)
                part.model(torch.ones(1, 4, dtype=part.model.weight.dtype)).sum().backward()
                if step % 2:
                    part.optimizer.step()
            assert this.whole == (step % 2 == 1)
            part.model.to(torch.float64)


def test_optimizers_join_one_that_is_attached_later(tmp_path: Path) -> None:
    parts = {name: Part() for name in "ab"}
    with SyncCheckpointEngine(tmp_path, interval=1000) as engine:
        for step in range(3):
            with engine.step(state_of(parts), step):
                if step == 0:
                    engine.attach(parts["a"].optimizer)
        assert set(probe(engine).core.guard.optimizers) == {part.optimizer for part in parts.values()}


def test_after_the_last_attached_optimizer_is_gone_nobody_is_waited_for(tmp_path: Path) -> None:
    part = Part()
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        engine.attach(part.optimizer)
        with engine.step(state_of({"a": part}), 0):
            part.backward(0)
            part.apply()
        del part.optimizer
        gc.collect()
        with engine.step({"model": part.model}, 1) as this:  # updated by hand from now on
            pass
        assert this.whole


def test_wrappers_that_are_none(tmp_path: Path) -> None:
    """What asks them for an optimizer inside gets none, an error, or themselves."""

    class Odd(torch.optim.Optimizer):
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        @property
        def optimizer(self) -> Any:
            if isinstance(self.inner, Exception):
                raise self.inner
            return self.inner

        def state_dict(self) -> dict[str, Any]:
            return {}

        def step(self, closure: Any = None) -> None: ...  # type: ignore[override]

    one, other = Odd(None), Odd(None)
    one.inner, other.inner = other, one
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        for odd in (Odd(None), Odd(RuntimeError("not prepared")), Odd("text"), one):
            with pytest.raises(TypeError, match="Odd has no hooks around its step"):
                engine.attach(odd)
            with engine.step({"odd": odd}, 0) as this:
                pass
            assert this.whole


def test_a_state_without_optimizers_is_whole_after_every_context(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        for step in range(3):
            with engine.step({"x": torch.ones(3), "many": [1] * 1000}, step) as this:
                pass
            assert this.whole


@pytest.mark.parametrize("attach", [False, True])
def test_what_has_no_hooks_is_passed_over(tmp_path: Path, attach: bool, caplog: pytest.LogCaptureFixture) -> None:
    """And said, where nothing else tells where a window ends."""

    class Inherited(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.param_groups = []

        def state_dict(self) -> dict[str, Any]:
            return {}

    part, odd = Part(), Inherited()
    with caplog.at_level(logging.WARNING, "pccheck_async"), SyncCheckpointEngine(tmp_path, interval=1) as engine:
        if attach:
            engine.attach(part.optimizer)
        for step in range(2):
            with engine.step({"x": torch.ones(3), "odd": odd}, step) as this:
                part.backward(step)
                part.optimizer.step()
            assert this.whole
    said = "not_in_state" if attach else "unseen_optimizer"
    assert [record.event for record in caplog.records] == [said]  # type: ignore[attr-defined]


def test_closing_lets_go(tmp_path: Path) -> None:
    part = Part()
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        with engine.step({"optimizer": part.optimizer}, 0):
            pass
        hooks = hooks_of_all()
        assert hooks.after
    assert not hooks.before
    assert not hooks.after


@pytest.mark.parametrize("attach", [(), ("a",)], ids=["not attached", "attached"])
def test_an_optimizer_that_makes_its_steps_behind_the_block_is_named(
    tmp_path: Path, attach: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    part = Part()
    with SyncCheckpointEngine(tmp_path, interval=1, save_last=False) as engine:
        if attach:
            engine.attach(part.optimizer)
        for step in range(5):
            with engine.step(state_of({"a": part}), step):
                part.backward(step)
            part.apply()
    (line,) = [record for record in caplog.records if record.event == "step_outside"]  # type: ignore[attr-defined]
    assert "block of step 2 made none: steps are not saved that way; move optimizer.step() into" in line.getMessage()


def test_a_step_between_blocks_that_make_steps_is_nothing_to_say(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = Part()
    with SyncCheckpointEngine(tmp_path, interval=1, save_last=False) as engine:
        engine.attach(part.optimizer)
        for step in range(9):
            with engine.step(state_of({"a": part}), step):
                part.backward(step)
                if step % 3 == 2:  # windows of three
                    part.apply()
            if step % 3 == 2:
                part.backward(step)
                part.apply()
    assert not [record for record in caplog.records if record.event == "step_outside"]  # type: ignore[attr-defined]
