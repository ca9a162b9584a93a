"""Captures beside training: what is saved is the state at the step, or nothing is."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pccheck_async import (
    CheckpointEngine,
    CheckpointError,
    RNGState,
    StorageOptions,
    SyncCheckpointEngine,
    TornCaptureError,
    list_checkpoints,
    load_sync,
)
from pccheck_async.engine import EngineLoop, Flight, Guard, flight_of
from pccheck_async.engine.capture import StateReader
from pccheck_async.errors import UnsupportedStateError, WriteError
from pccheck_async.medium import Medium
from pccheck_async.medium.files import Files
from pccheck_async.state.save.torn import TornLeaves
from pccheck_async.testing import FailingWriter
from pccheck_async.testing.probe import probe
from pccheck_async.transfer import PAGE_BYTES, uninterrupted
from pccheck_async.transfer.copying import CopyBackend
from pccheck_async.transfer.operations import Operations
from pccheck_async.transfer.plan import Planner
from tests.support.devices import Device
from tests.support.processes import passes_in_a_forked_child
from tests.support.settings import engine_settings

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LARGE = 3 << 20
"""Bytes of a tensor that is too large to be copied before the call returns."""


SMALL: dict[str, Any] = {"chunk_bytes": 4 * PAGE_BYTES, "host_memory": 8 * PAGE_BYTES}
"""Staging memory of two chunks, so that a capture cannot end while the writes of its chunks hang."""


class Net(nn.Module):
    """Linear layers with batch normalisation, dropout, a frozen matrix and a parameter that nobody optimizes."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(width, width), requires_grad=False)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.dropout(self.norm(self.first(x @ self.frozen)).relu()))
        return result


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
            if one.ndim
            else bool(one == other)
        )
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def snapshot(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: copy.deepcopy(value.state_dict() if hasattr(value, "state_dict") else value)
        for name, value in state.items()
    }


class Held:
    """An engine in the middle of an overlapped capture of a module and its optimizer."""

    def __init__(
        self,
        folder: Path,
        *,
        attached: bool = True,
        extra: dict[str, Any] | None = None,
        optimizer: type[torch.optim.SGD] = torch.optim.SGD,
        **settings: Any,
    ) -> None:
        self.io = Device()
        self.engine = SyncCheckpointEngine(folder, **engine_settings(io=self.io, **SMALL, **settings)).open()
        self.model = Net()
        self.optimizer = optimizer(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, **(extra or {})}
        self.compute()
        self.optimizer.step()
        if attached:
            self.engine.attach(self.optimizer)
        self.io.medium.hold("write")
        self.want = snapshot(self.state)
        self.pending = self.engine.checkpoint(self.state, step=1, overlap=True)
        self.io.medium.wait_stuck()
        assert not self.flight.is_captured

    @property
    def flight(self) -> Flight:
        """The engine's side of the pending checkpoint."""
        return flight_of(self.pending)

    def compute(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 96)).square().mean().backward()

    def capture_again(self, step: int) -> None:
        """Be in the middle of the capture of that step; the one before is over."""
        self.io.medium.hold("write")
        self.want = snapshot(self.state)
        self.pending = self.engine.checkpoint(self.state, step=step, overlap=True)
        self.io.medium.wait_stuck()
        assert not self.flight.is_captured

    def release_when_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> list[Flight]:
        """Let the device move again when somebody waits for the capture, and not before; return who was waited for."""
        wait, waited = Flight.wait_out_of_reach, list[Flight]()

        def release_and_wait(flight: Flight, *arguments: Any) -> bool:
            waited.append(flight)
            self.io.medium.release()
            return wait(flight, *arguments)

        monkeypatch.setattr(Flight, "wait_out_of_reach", release_and_wait)
        return waited

    def step(self) -> None:
        """Step the optimizer, while the device begins to move again only after the step was held up."""
        threading.Timer(0.05, self.io.medium.release).start()
        self.optimizer.step()


@contextmanager
def held(folder: Path, **settings: Any) -> Iterator[Held]:
    it = Held(folder, **settings)
    try:
        yield it
    finally:
        it.io.medium.release()
        it.engine.close()


def saved(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = load_sync(folder)
    return loaded


# -- the guard


def test_a_step_of_an_attached_optimizer_waits_for_the_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(tmp_path) as it:
        it.release_when_waited_for(monkeypatch)
        captured: list[bool] = []
        it.optimizer.register_step_pre_hook(lambda *_: captured.append(it.flight.is_captured))  # after the engine's
        it.compute()  # batch normalisation changes its statistics meanwhile
        it.optimizer.step()
        assert captured == [True]
        assert not equal(it.want, snapshot(it.state))
        it.pending.result()
        statistics = it.engine.statistics()
        assert statistics.guard_seconds > 0
        assert statistics.stall_seconds >= statistics.guard_seconds
    assert equal(saved(tmp_path), it.want)


def closure_of(it: Held, log: list[Any], change: bool = False) -> Callable[[], torch.Tensor]:
    """Forward and backward, noting whether the capture is over by then; ``change`` moves the weights a little."""

    def closure() -> torch.Tensor:
        log.append(it.flight.is_captured)
        if change:
            with torch.no_grad():
                it.model.first.weight.add_(1e-3)
        it.compute()
        return torch.ones(())

    return closure


class Averaging(torch.optim.SGD):
    """Swaps the parameters for an average and back, as schedule-free optimizers do."""

    def _swap(self, weight: float) -> None:
        with torch.no_grad():
            for parameter, state in self.state.items():
                parameter.lerp_(state["momentum_buffer"], weight)

    def eval(self) -> None:
        self._swap(0.1)

    def train(self) -> None:
        self._swap(0.2)


@pytest.mark.parametrize("switch", ["train", "eval"])
def test_an_optimizer_that_swaps_its_parameters_waits_for_the_capture(
    tmp_path: Path, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(tmp_path, optimizer=Averaging) as it:
        waited = it.release_when_waited_for(monkeypatch)
        getattr(it.optimizer, switch)()
        assert waited == [it.flight]
        assert not equal(it.want, snapshot(it.state))
        it.pending.result()
        other, now = copy.deepcopy(it.optimizer), snapshot(it.state)
        getattr(other, switch)()  # of the parameters that it has
        assert equal(snapshot(it.state), now)
    assert equal(saved(tmp_path), it.want)


@pytest.mark.parametrize("how", ["position", "keyword"])
@pytest.mark.parametrize("others", [0, 1])
def test_the_closure_of_a_step_runs_beside_the_capture(
    tmp_path: Path, how: str, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(tmp_path / "store") as it, SyncCheckpointEngine(tmp_path / "other") as other:
        if others:
            other.attach(it.optimizer)
            other.checkpoint(it.state, step=1, overlap=True).result()
        it.io.medium.release()
        it.pending.result()
        log: list[Any] = []
        step: Any = it.optimizer.step
        for number in (2, 3):
            it.capture_again(number)
            waited = it.release_when_waited_for(monkeypatch)
            closure = closure_of(it, log)
            assert (step(closure) if how == "position" else step(closure=closure)) == 1
            assert it.flight in waited
            assert it.flight.is_captured
            it.pending.result()
            assert equal(saved(tmp_path / "store"), it.want)
        assert log == [True, False]  # what the first closure does is not known before


def test_a_closure_that_changes_parameters_tears_one_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It left them alone before. From then on its steps wait before it, and captures are whole again."""
    with held(tmp_path) as it:
        it.io.medium.release()
        it.pending.result()
        log: list[Any] = []
        it.optimizer.step(closure_of(it, log))
        for number, torn in ((2, True), (3, False)):
            it.capture_again(number)
            it.release_when_waited_for(monkeypatch)
            it.optimizer.step(closure_of(it, log, change=True))
            with pytest.raises(TornCaptureError, match=r"model\.first\\?\.weight") if torn else nullcontext():
                it.pending.result()
        assert log == [True, False, True]
    assert equal(saved(tmp_path), it.want)
    assert [info.step for info in list_checkpoints(tmp_path)] == [3]


def test_a_closure_that_raises_leaves_the_capture_to_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> float:
        raise ZeroDivisionError

    with held(tmp_path) as it:
        it.io.medium.release()
        it.pending.result()
        it.optimizer.step(closure_of(it, []))
        it.capture_again(2)
        with pytest.raises(ZeroDivisionError):
            it.optimizer.step(fail)
        assert not it.flight.is_captured
        it.release_when_waited_for(monkeypatch)
        it.optimizer.step()
        it.pending.result()
    assert equal(saved(tmp_path), it.want)


class Ascent(torch.optim.SGD):
    """Climbs before it descends, as sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(1e-3)
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Ascent])
def test_steps_that_change_parameters_before_a_closure_wait_before_them(
    tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(tmp_path) as it:
        it.io.medium.release()
        it.pending.result()
        optimizer = kind([parameter for parameter in it.model.parameters() if parameter.requires_grad], lr=0.1)
        it.engine.attach(optimizer)
        log: list[Any] = []
        optimizer.step(closure_of(it, log))
        it.capture_again(2)
        it.release_when_waited_for(monkeypatch)
        optimizer.step(closure_of(it, log))
        it.pending.result()
        assert all(log)
    assert equal(saved(tmp_path), it.want)


KINDS = [
    each
    for each in vars(torch.optim).values()
    if isinstance(each, type) and issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
]


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_of_torch_call_their_closure_before_any_change(kind: Any) -> None:
    """What the guard relies on; L-BFGS alone does not."""
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = kind([weight])
    then: list[Any] = []

    def closure() -> float:
        then.append(weight.detach().clone())
        weight.grad = torch.ones(4, 4)
        if kind is torch.optim.SparseAdam:
            weight.grad = weight.grad.to_sparse()
        return 1.0

    before = weight.detach().clone()
    optimizer.step(closure)
    assert not torch.equal(weight, before)
    assert (len(then) == 1) == (kind is not torch.optim.LBFGS)
    assert torch.equal(then[0], before)


def test_a_closure_of_an_optimizer_that_is_not_attached_is_judged_after_it(tmp_path: Path) -> None:
    """The capture may end while the gradients are computed; then the step changes what it likes."""
    with held(tmp_path) as it:
        it.io.medium.release()
        it.pending.result()
        other = torch.optim.SGD([it.model.second.weight], lr=1.0)
        other.step(lambda: 0.0)
        it.capture_again(2)

        def closure() -> float:
            it.compute()
            it.io.medium.release()
            it.engine.wait_captured()
            return 0.0

        other.step(closure)
        it.pending.result()
    assert equal(saved(tmp_path), it.want)


@pytest.mark.parametrize("kind", ["for-loop", "foreach", "fused"])
def test_without_the_guard_a_step_is_found_out(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: Any = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[kind]
    with held(tmp_path) as it:
        model = nn.Linear(512, 512)
        optimizer = torch.optim.AdamW(model.parameters(), **flags)
        it.io.medium.release()
        it.pending.result()
        it.engine.attach(optimizer)
        model(torch.randn(2, 512)).sum().backward()
        optimizer.step()
        monkeypatch.setattr(Guard, "order_after_copies", lambda guard: None)
        it.io.medium.hold("write")
        pending = it.engine.checkpoint({"net": model, "adam": optimizer}, step=2, overlap=True)
        it.io.medium.wait_stuck()
        optimizer.step()
        it.io.medium.release()
        with pytest.raises(TornCaptureError, match=r"net\.weight is changed by an optimizer's step"):
            pending.result()
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]


def test_a_step_of_an_optimizer_that_is_not_attached_is_found_out(tmp_path: Path) -> None:
    with held(tmp_path) as it:
        other = torch.optim.SGD([it.model.second.weight], lr=1.0)
        it.compute()
        other.step()
        it.io.medium.release()
        with pytest.raises(TornCaptureError, match=r"model\.second\.weight"):
            it.pending.result()
    assert list_checkpoints(tmp_path) == []


@pytest.mark.slow
def test_an_optimizer_of_other_parameters_may_step_meanwhile(tmp_path: Path) -> None:
    critic = nn.Linear(900, 900)  # its parameters are in the state, and captured before the call returns
    with held_beside(tmp_path, critic) as (it, pending, want):
        critic(torch.randn(2, 900)).sum().backward()
        torch.optim.Adam(critic.parameters(), lr=1.0).step()
        assert not flight_of(pending).is_captured
        it.io.medium.release()
        pending.result()
    assert equal(saved(tmp_path), want)


def test_an_optimizer_may_know_frozen_parameters(tmp_path: Path) -> None:
    critic = nn.Linear(300, 300)
    critic.weight.requires_grad_(False)
    with held(tmp_path) as it:
        it.io.medium.release()
        it.pending.result()
        state = {**it.state, "critic": critic}
        want = snapshot(state)
        it.io.medium.hold("write")
        pending = it.engine.checkpoint(state, step=2, overlap=True)
        it.io.medium.wait_stuck()
        critic(torch.randn(2, 300)).sum().backward()
        torch.optim.Adam(critic.parameters(), lr=1.0).step()
        assert not flight_of(pending).is_captured
        it.io.medium.release()
        pending.result()
    assert equal(saved(tmp_path), want)


def test_a_parameter_frozen_with_a_gradient_is_stepped(tmp_path: Path) -> None:
    with held(tmp_path) as it:
        other = torch.optim.SGD([it.model.second.weight], lr=1.0)
        it.compute()
        it.model.second.weight.requires_grad_(False)
        other.step()
        assert not torch.equal(it.want["model"]["second.weight"], it.model.second.weight)
        it.io.medium.release()
        with pytest.raises(TornCaptureError, match=r"model\.second\.weight"):
            it.pending.result()
    assert list_checkpoints(tmp_path) == []


def test_a_parameter_frozen_without_a_gradient_is_left_alone_by_the_optimizers_that_know_it(tmp_path: Path) -> None:
    """As those of one network while the optimizer of all steps for another one."""
    with held(tmp_path) as it:
        other = torch.optim.SGD([it.model.second.weight], lr=1.0)
        it.model.second.weight.requires_grad_(False)
        it.model.second.weight.grad = None
        other.step()
        assert it.engine.statistics().durable == 0
        it.io.medium.release()
        it.pending.result()
    assert equal(saved(tmp_path), it.want)


@contextmanager
def held_beside(folder: Path, critic: nn.Module) -> Iterator[tuple[Held, Any, dict[str, Any]]]:
    """A capture of which the large part that nobody guards is over, and the rest is not."""
    with held(folder) as it:
        it.io.medium.release()
        it.pending.result()
        state = {**it.state, "critic": critic}
        want = snapshot(state)
        release = threading.Thread(target=release_until_returned, args=(it, done := threading.Event()))
        it.io.medium.hold("write")
        release.start()
        pending = it.engine.checkpoint(state, step=2, overlap=True)
        done.set()
        release.join()
        yield it, pending, want


def release_until_returned(it: Held, done: threading.Event) -> None:
    """Let writes through one by one as long as the call waits for some of them."""
    in_flight = probe(it.engine).core.in_flight
    while not done.wait(0.001):
        newest = in_flight.newest
        if newest is None or newest is it.flight or not newest.is_eager_captured:  # it may be a while until it returns
            it.io.medium.release(hold_on=True)


@pytest.mark.slow
def test_what_nobody_guards_is_captured_before_the_call_returns(tmp_path: Path) -> None:
    critic = nn.Linear(1000, LARGE // 4000)
    with held_beside(tmp_path, critic) as (it, pending, want):
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.fill_(7.0)
        it.model.norm.state_dict()["running_mean"].fill_(7.0)
        assert not flight_of(pending).is_captured
        it.io.medium.release()
        pending.result()
    assert equal(saved(tmp_path), want)


def test_buffers_learning_rates_and_plain_values_may_change_at_once(tmp_path: Path) -> None:
    counts = np.arange(10)
    rate = torch.tensor(0.5)
    beside, lazy = torch.ones(3, 4).t(), torch.ones(2, dtype=torch.complex64)
    extra = {"counts": counts, "rng": RNGState(), "beside": beside, "lazy": lazy.conj()}
    with held(tmp_path, extra=extra) as it:
        it.io.medium.release()
        it.pending.result()
        it.optimizer.param_groups[0]["lr"] = rate
        want = snapshot(it.state)
        it.io.medium.hold("write")
        pending = it.engine.checkpoint(it.state, step=2, overlap=True)
        it.io.medium.wait_stuck()
        counts[:] = -1
        rate.fill_(9.0)
        beside.fill_(9.0)
        lazy.fill_(9.0)
        torch.rand(10)
        it.compute()
        assert not flight_of(pending).is_captured
        it.io.medium.release()
        pending.result()
    loaded = saved(tmp_path)
    assert all(equal(loaded[name], want[name]) for name in ("model", "optimizer", "counts", "beside", "lazy"))


def test_memory_that_a_buffer_shares_with_a_parameter_is_not_left_to_the_guard(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(2 * 40_000)
            self.weight = nn.Parameter(whole[:40_000])
            self.average: torch.Tensor
            self.register_buffer("average", whole[30_000:])

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(**SMALL)) as engine:
        engine.attach(optimizer)
        want = snapshot({"model": model})
        pending = engine.checkpoint({"model": model}, overlap=True)
        model.average.fill_(3.0)
        pending.result()
    assert equal(saved(tmp_path), want)


def test_attach_refuses_what_has_no_hooks(tmp_path: Path) -> None:
    class Wrapped:
        def step(self) -> None: ...

    class Inherited(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.param_groups = []

    with SyncCheckpointEngine(tmp_path) as engine:
        refused: Any
        for refused in (Wrapped(), Inherited()):
            with pytest.raises(TypeError, match=r"(Wrapped|Inherited) has no hooks.*wait_captured"):
                engine.attach(refused)
        for refused in (object(), torch.nn.Linear(1, 1), [], "x"):
            with pytest.raises(TypeError, match=rf"attach takes optimizers, not {type(refused).__name__} objects"):
                engine.attach(refused)


def test_attaching_twice_is_once_and_closing_lets_go(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.attach(optimizer)
        engine.attach(optimizer)
    core = weakref.ref(probe(engine).core)
    with SyncCheckpointEngine(tmp_path) as engine:  # in the place of the first
        engine.attach(optimizer)
        assert len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 1
        optimizer.step()
        assert probe(engine).core.guard.optimizers == [optimizer]
    gc.collect()
    assert core() is None


@pytest.mark.parametrize("of_all", [False, True])
def test_a_step_goes_on_while_an_engine_that_it_is_attached_to_closes(tmp_path: Path, of_all: bool) -> None:
    """Torch goes through its table of hooks meanwhile."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inside, closed, errors = threading.Event(), threading.Event(), list[BaseException]()

    def order_after_copies(*_: Any) -> None:
        inside.set()
        closed.wait()

    def step() -> None:
        try:
            optimizer.step()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    register: Any = register_optimizer_step_pre_hook if of_all else optimizer.register_step_pre_hook
    hook = register(order_after_copies)
    thread = threading.Thread(target=step)
    try:
        with SyncCheckpointEngine(tmp_path) as engine:
            engine.attach(optimizer)
            engine.checkpoint({"model": model}, overlap=True).result()
            thread.start()
            inside.wait()
    finally:
        closed.set()
        thread.join()
        hook.remove()
    assert errors == []


@pytest.mark.parametrize("kind", [torch.optim.SGD, Averaging])
def test_an_optimizer_that_is_not_used_any_more_is_let_go(tmp_path: Path, kind: type[torch.optim.SGD]) -> None:
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.attach(optimizer)
        engine.checkpoint({"optimizer": optimizer}, overlap=True).result()
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None


def test_a_checkpoint_that_failed_keeps_no_state(tmp_path: Path) -> None:
    def make(path: str, operations: Operations) -> Medium:
        return FailingWriter(Files(path, operations), fail_at=1, kinds=("write",))

    SyncCheckpointEngine(tmp_path).open().close()
    weight = nn.Parameter(torch.ones(300, 300))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=make, check_captures=True)) as engine:
        engine.attach(optimizer)
        pending = engine.checkpoint({"weight": weight}, overlap=True)
        with pytest.raises(WriteError) as told:
            pending.result()
        engine.drain()
        gone = weakref.ref(weight)
        del weight, optimizer
        gc.collect()
        assert gone() is None
        assert told.value.__traceback__ is not None
        assert pending.done()


def test_a_capture_that_holds_training_up_for_too_long_is_abandoned(tmp_path: Path) -> None:
    with held(tmp_path, max_stall=0.02) as it:
        it.optimizer.step()  # returns although the device still hangs
        with pytest.raises(CheckpointError, match=r"abandoned the checkpoint of step 1.*max_stall = 0\.02 s"):
            it.pending.result()
        statistics = it.engine.statistics()
        assert (statistics.abandoned, statistics.in_flight) == (1, 1)  # its buffers are in use until the writes end
        it.io.medium.release()
        it.engine.drain()
        statistics = it.engine.statistics()
        assert (statistics.abandoned, statistics.failed, statistics.in_flight) == (1, 1, 0)
        it.engine.checkpoint(it.state, step=2).result()  # and nothing is raised by the next call
    assert [info.step for info in list_checkpoints(tmp_path)] == [2]


def test_an_interrupted_guard_keeps_waiting_at_the_next_step(tmp_path: Path) -> None:
    with held(tmp_path) as it:
        waited = it.flight.wait_out_of_reach
        it.flight.wait_out_of_reach = interrupt  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            it.optimizer.step()
        it.flight.wait_out_of_reach = waited  # type: ignore[method-assign]
        it.step()
        it.pending.result()
    assert equal(saved(tmp_path), it.want)


def interrupt(*_: Any, **__: Any) -> bool:
    raise KeyboardInterrupt


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("posted", [False, True])
def test_an_interrupted_admission_leaves_nothing_to_wait_for(
    tmp_path: Path, posted: bool, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(tmp_path) as it:
        it.io.medium.release()
        it.pending.result()
        post = EngineLoop.post

        def interrupted(loop: EngineLoop, function: Callable[..., Any], *arguments: Any) -> bool:
            monkeypatch.undo()
            if posted:
                post(loop, function, *arguments)
            raise KeyboardInterrupt

        it.io.medium.hold("write")
        monkeypatch.setattr(EngineLoop, "post", interrupted)
        release = threading.Timer(0.05, it.io.medium.release)
        release.start()
        with pytest.raises(KeyboardInterrupt):
            it.engine.checkpoint(it.state, step=2, overlap=overlap)
        statistics = it.engine.statistics()
        assert (statistics.in_flight, statistics.durable) == (0, 1)
        it.optimizer.step()
        it.engine.wait_captured()
        release.join()
        it.engine.checkpoint(it.state, step=3).result()
        statistics = it.engine.statistics()  # it was given a counter, and then it failed
        assert (statistics.admitted, statistics.durable, statistics.failed) == (3, 2, 1)
    assert [info.step for info in list_checkpoints(tmp_path)] == [3]


def test_an_interrupt_while_a_checkpoint_is_told_of_takes_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SyncCheckpointEngine(tmp_path, max_in_flight=1, on_busy="skip") as engine:
        monkeypatch.setattr(probe(engine).core.stream, "emit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.checkpoint({"x": torch.ones(3)}, step=1)
        monkeypatch.undo()
        assert (engine.statistics().in_flight, engine.statistics().admitted) == (0, 0)
        pending = engine.checkpoint({"x": torch.ones(3)}, step=2)
        assert not pending.skipped


def test_interrupts_while_a_thread_starts_start_no_more_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "pccheck-status":
            raise KeyboardInterrupt

    with SyncCheckpointEngine(tmp_path) as engine:
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.checkpoint({"x": torch.ones(3)})
        engine.checkpoint({"x": torch.ones(3)})
        assert [thread.name for thread in threading.enumerate()].count("pccheck-status") == 1


@pytest.mark.slow
def test_steps_of_several_threads_wait_for_one_capture(tmp_path: Path) -> None:
    with held(tmp_path) as it:
        it.io.medium.release()
        it.pending.result()
        critic = nn.Linear(300, 300)
        other = torch.optim.AdamW(critic.parameters(), lr=1.0, fused=True)  # counts no versions
        critic(torch.randn(2, 300)).sum().backward()
        it.engine.attach(other)
        state = {**it.state, "critic": critic}
        want = snapshot(state)
        it.io.medium.hold("write")
        pending = it.engine.checkpoint(state, step=2, overlap=True)
        it.io.medium.wait_stuck()
        steps = [threading.Thread(target=optimizer.step) for optimizer in (it.optimizer, other)]
        for step in steps:
            step.start()
            step.join(0.05)
        assert [step.is_alive() for step in steps] == [True, True]
        it.io.medium.release()
        for step in steps:
            step.join()
        pending.result()
    assert equal(saved(tmp_path), want)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_closing_gave_up_is_not_committed_later(tmp_path: Path, overlap: bool) -> None:
    io = Device()
    model = nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=True)  # counts no versions
    model(torch.randn(2, 300)).sum().backward()
    engine = SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=io, **SMALL)).open()
    engine.attach(optimizer)
    errors: list[Exception] = []

    def save() -> None:
        try:
            engine.checkpoint({"model": model}, step=1, overlap=overlap).result()
        except CheckpointError as error:
            errors.append(error)

    io.medium.hold("write")
    saving = threading.Thread(target=save)
    saving.start()
    io.medium.wait_stuck()
    with pytest.raises(CheckpointError, match="gave up after 0"):
        engine.close(0.0)
    saving.join()
    assert len(errors) == 1
    optimizer.step()  # the checkpoint failed: nothing holds training up any more
    io.medium.release()
    probe(engine).end_what_was_left_behind()
    assert list_checkpoints(tmp_path) == []


def test_a_capture_that_is_stopped_while_it_begins_reads_nothing_more() -> None:
    """A backend may be reading the live state then: it copies it on its device first."""

    async def main() -> None:
        begun = asyncio.Event()

        class Slow(CopyBackend):
            async def begin(self, _: Any, sources: Any, on_fence: Any = None) -> Any:
                await begun.wait()
                return sources

        capture = StateReader().start({"x": torch.ones(10)}, Slow(None))  # type: ignore[arg-type]  # copies nothing
        beginning = asyncio.create_task(capture.begin(Planner(4096, 4096)))
        await asyncio.sleep(0)
        stopping = asyncio.create_task(capture.stop())
        await asyncio.sleep(0)
        assert not stopping.done()
        begun.set()
        await asyncio.gather(beginning, stopping)
        with pytest.raises(asyncio.CancelledError):
            await capture.copy(0, memoryview(bytearray(4096)))

    asyncio.run(main())


def test_an_interrupted_guard_forgets_no_capture(tmp_path: Path) -> None:
    with held(tmp_path, keep_last=2) as it:
        second = it.engine.checkpoint(it.state, step=2, overlap=True)
        waited = it.flight.wait_out_of_reach
        it.flight.wait_out_of_reach = interrupt  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            it.optimizer.step()
        it.flight.wait_out_of_reach = waited  # type: ignore[method-assign]
        it.step()
        assert flight_of(second).is_captured
        it.pending.result()
        second.result()
    assert equal(saved(tmp_path), it.want)


def test_steps_of_two_threads_wait_both(tmp_path: Path) -> None:
    with held(tmp_path) as it:
        second = torch.optim.SGD([torch.zeros(3)], lr=0.1)
        it.engine.attach(second)
        waiting = threading.Event()
        waited = it.flight.wait_out_of_reach

        def wait(*arguments: Any) -> bool:
            waiting.set()
            return waited(*arguments)

        it.flight.wait_out_of_reach = wait  # type: ignore[method-assign,assignment]
        stepping = threading.Thread(target=it.optimizer.step)
        stepping.start()
        waiting.wait()
        threading.Timer(0.05, it.io.medium.release).start()
        second.step()
        assert it.flight.is_captured
        stepping.join()
        it.pending.result()
    assert equal(saved(tmp_path), it.want)


def test_a_forked_child_steps_as_it_likes(tmp_path: Path) -> None:
    with held(tmp_path) as it:
        assert passes_in_a_forked_child(it.optimizer.step)
        it.io.medium.release()
        it.pending.result()


def test_a_restore_waits_for_the_capture(tmp_path: Path) -> None:
    with held(tmp_path) as it:
        it.io.medium.release()
        it.pending.result()
        with torch.no_grad():
            it.model.first.weight.zero_()
        want = snapshot(it.state)
        it.io.medium.hold("write")
        pending = it.engine.checkpoint(it.state, step=2, overlap=True)
        it.io.medium.wait_stuck()
        threading.Timer(0.05, it.io.medium.release).start()
        restored = it.engine.restore(it.state)
        assert restored is not None
        assert restored.step in (1, 2)
        pending.result()
    assert equal(saved(tmp_path), want)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_the_forward_pass_renormalises_are_not_left_to_the_guard(
    tmp_path: Path, kind: type[nn.Embedding], frozen: bool
) -> None:
    model = nn.Sequential(kind(400, 100, max_norm=0.5), nn.Linear(100, 100))
    model[0].requires_grad_(not frozen)
    optimizer = torch.optim.SGD(model[1].parameters() if frozen else model.parameters(), lr=0.1)
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(**SMALL)) as engine:
        engine.attach(optimizer)
        want = snapshot({"model": model})
        pending = engine.checkpoint({"model": model}, overlap=True)
        model(torch.arange(400).reshape(2, 200))
        pending.result()
    assert not equal(want["model"], model.state_dict())
    assert equal(saved(tmp_path)["model"], want["model"])


@pytest.mark.parametrize("how", ["another module", "another table", "another setting"])
def test_tables_that_are_renormalised_since_the_last_checkpoint_are_not_left_to_the_guard(
    tmp_path: Path, how: str
) -> None:
    """The state is made as it was: only the modules tell."""
    model = nn.Sequential(nn.Embedding(400, 100), nn.Linear(100, 100))
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(**SMALL)) as engine:
        engine.attach(optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
        engine.checkpoint({"model": model}, overlap=True).result()
        if how == "another module":
            model = copy.deepcopy(model)
        if how == "another table":
            model[0] = nn.Embedding(400, 100, max_norm=0.5)
        model[0].max_norm = 0.5  # type: ignore[assignment]
        if how != "another setting":
            engine.attach(optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
        want = snapshot({"model": model})
        pending = engine.checkpoint({"model": model}, overlap=True)
        model(torch.arange(400).reshape(2, 200))
        pending.result()
        optimizer.step()
    assert not equal(want["model"], model.state_dict())
    assert equal(saved(tmp_path)["model"], want["model"])


@pytest.mark.parametrize("beside", [False, True])
def test_an_array_in_the_memory_of_a_parameter(tmp_path: Path, beside: bool) -> None:
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state: dict[str, Any] = {"array": model.weight.detach().numpy()} | ({"model": model} if beside else {})
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(**SMALL)) as engine:
        engine.attach(optimizer)
        want = snapshot(state)
        engine.checkpoint(state, overlap=True).result()
    assert equal(saved(tmp_path), want)


# -- other changes


def clamp(it: Held) -> None:
    with torch.no_grad():
        it.model.second.weight.clamp_(-0.01, 0.01)


def test_changes_without_a_step_are_found_out(tmp_path: Path) -> None:
    with held(tmp_path) as it:
        clamp(it)
        it.io.medium.release()
        with pytest.raises(TornCaptureError, match=r"model\.second\.weight changed before.*wait_captured"):
            it.pending.result()
    assert list_checkpoints(tmp_path) == []


def replaced(model: Net, state: dict[str, Any]) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


BETWEEN: dict[str, Callable[[Net, dict[str, Any]], object]] = {
    "other memory": replaced,
    "an alias": lambda model, state: state.update(alias=model.second.weight),
    "no bytes": lambda model, state: state.update(nothing=torch.empty(0)),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_changes_between_checkpoints_are_none_and_those_after_them_are_found_out(tmp_path: Path, what: str) -> None:
    with held(tmp_path) as it:
        it.io.medium.release()
        it.state = {"model": it.model.second}  # all of it is left to the capture
        it.engine.checkpoint(it.state, step=1, overlap=True).result()
        BETWEEN[what](it.model, it.state)
        for torn in (False, True):
            it.want = snapshot(it.state)
            it.io.medium.hold("write")
            pending = it.engine.checkpoint(it.state, step=2, overlap=True)
            it.io.medium.wait_stuck()
            if torn:
                clamp(it)
            it.io.medium.release()
            with pytest.raises(TornCaptureError, match="weight changed") if torn else nullcontext():
                pending.result()
                assert equal(saved(tmp_path), it.want)


def test_changes_after_waiting_are_none(tmp_path: Path) -> None:
    with held(tmp_path) as it:
        it.io.medium.hold("flush")
        it.io.medium.release(hold_on=True)
        it.engine.wait_captured()
        clamp(it)
        it.io.medium.release()
        it.pending.result()
    assert equal(saved(tmp_path), it.want)


def test_changes_after_captured_are_none(tmp_path: Path) -> None:
    async def main() -> None:
        io = Device()
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = {"model": model}
        want = snapshot(state)
        async with CheckpointEngine(tmp_path, storage=StorageOptions(io=io, **SMALL)) as engine:
            engine.attach(optimizer)
            await (await engine.checkpoint(state))  # makes the slots
            await (await engine.checkpoint(state))
            io.medium.hold("flush")
            pending = await engine.checkpoint(state, overlap=True)
            await pending.captured()
            with torch.no_grad():
                model.first.weight.zero_()
            io.medium.release()
            await pending
        assert equal(saved(tmp_path), want)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["data", "numpy"])
def test_a_comparison_finds_what_nothing_else_does(tmp_path: Path, how: str) -> None:
    with held(tmp_path, check_captures=True) as it:
        it.io.medium.release()
        it.pending.result()
        weight = it.model.second.weight
        before: Any = weight.data if how == "data" else weight.detach().numpy()  # while nothing captures it
        it.io.medium.hold("write")
        it.pending = it.engine.checkpoint(it.state, step=2, overlap=True)
        it.io.medium.wait_stuck()
        before *= 2.0
        it.io.medium.release()
        with pytest.raises(TornCaptureError, match=r"model\.second\.weight changed while it was captured"):
            it.pending.result()
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]


def test_a_comparison_passes_what_did_not_change(tmp_path: Path) -> None:
    with held(tmp_path, check_captures=True) as it:
        it.compute()
        it.step()
        it.pending.result()
    assert equal(saved(tmp_path), it.want)


def test_a_parameter_made_in_inference_mode_is_captured(tmp_path: Path) -> None:
    model = nn.Linear(300, 300)
    with torch.inference_mode():
        model.weight = nn.Parameter(torch.randn(300, 300), requires_grad=False)
    optimizer = torch.optim.SGD([model.bias], lr=0.1)
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(**SMALL)) as engine:
        engine.attach(optimizer)
        engine.checkpoint({"model": model}, overlap=True).result()
    assert equal(saved(tmp_path)["model"], model.state_dict())


# -- contexts around steps


FLAVOURS = ["for-loop", "foreach", "fused", "accumulation", "amp", pytest.param("compile", marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_saved_is_the_state_at_the_step(tmp_path: Path, flavour: str) -> None:
    assert check_consistency(tmp_path, flavour, checkpoints=6, backend="aot_eager") == 6


def check_consistency(folder: Path, flavour: str, checkpoints: int, backend: str) -> int:
    """Train with a checkpoint after every step; return how many were compared with what the state was then.

    Staging memory is so small that captures last until the next step. That changes every tensor the moment it may, and
    the forward pass before it the statistics of the batch normalisation.
    """
    torch.manual_seed(1)
    model = Net()
    flags: Any = {"for-loop": {"foreach": False}, "fused": {"fused": True}}.get(flavour, {"foreach": True})
    optimizer = torch.optim.AdamW(model.parameters(), **flags)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    scaler = torch.amp.GradScaler("cpu", enabled=flavour == "amp", init_scale=2.0**4)
    forward: Callable[[torch.Tensor], torch.Tensor] = model
    if flavour == "compile":
        forward = torch.compile(model, backend=backend)
    plain: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
        "step": -1,
    }
    state = {**plain, "rng": RNGState()}
    window = 3 if flavour == "accumulation" else 1
    wants: dict[int, dict[str, Any]] = {}
    checked = 0

    def run(step: int) -> None:
        state["step"] = plain["step"] = step
        with torch.autocast("cpu", torch.bfloat16, enabled=flavour == "amp"):
            loss = forward(torch.randn(8, 96)).square().mean()
        torch.autograd.backward(scaler.scale(loss))
        if (step + 1) % window == 0:
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()

    with SyncCheckpointEngine(folder, interval=1, keep_last=6, storage=StorageOptions(**SMALL)) as engine:
        engine.attach(optimizer)
        for step in range(checkpoints * window):
            with engine.step(state, step) as this:
                run(step)
            if (step + 1) % window:
                assert this.pending is None  # inside a window of accumulation
                continue
            assert this.pending is not None
            wants[step] = snapshot(plain)
            if len(wants) < 6:
                continue
            engine.drain()
            for info in engine.checkpoints():
                loaded = load_sync(folder, step=info.step)
                want = wants.pop(info.step)
                assert all(equal(loaded[name], want[name]) for name in want), info.step
                checked += 1
        statistics = engine.statistics()
        assert (statistics.superseded, statistics.failed) == (0, 0)
    return checked


def test_the_body_s_error_captures_nothing(tmp_path: Path) -> None:
    state = {"x": torch.ones(3)}
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        with pytest.raises(ZeroDivisionError), engine.step(state, 0):
            raise ZeroDivisionError
        assert engine.statistics().admitted == 0


def test_steps_are_saved_at_the_interval_with_their_metadata(tmp_path: Path) -> None:
    async def main() -> None:
        state = {"x": torch.ones(3)}
        async with CheckpointEngine(tmp_path, interval=3, keep_last=9) as engine:
            for step in range(9):
                async with engine.step(state, step, metadata={"kind": "test"}) as this:
                    state["x"] += 1
                    this.metadata["loss"] = float(step)
            assert engine.statistics().interval.interval == 3
        found = list_checkpoints(tmp_path)
        assert [info.step for info in found] == [8, 5, 2]
        assert found[0].metadata == {"kind": "test", "loss": 8.0}

    asyncio.run(main())


def test_metadata_that_cannot_be_saved_is_refused_at_the_first_step(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, interval=100) as engine:
        with pytest.raises(UnsupportedStateError, match=r"x\.item\(\)"), engine.step({"x": 1}, 0) as this:
            this.metadata["loss"] = torch.ones(1)  # type: ignore[assignment]
        assert engine.statistics().admitted == 0


def test_a_skipped_gradient_scaler_step_moves_the_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SyncCheckpointEngine(tmp_path, interval=1, keep_last=9) as engine:
        engine.attach(optimizer)
        for step in range(4):
            with engine.step({"model": model}, step):
                if step != 1:
                    optimizer.step()
    assert [info.step for info in list_checkpoints(tmp_path)] == [3, 2, 0]


def test_what_a_failed_context_stepped_ends_no_window_of_the_next(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step_and_fail() -> None:
        optimizer.step()
        raise KeyError

    with SyncCheckpointEngine(tmp_path, interval=1, storage=StorageOptions(**SMALL)) as engine:
        engine.attach(optimizer)
        with pytest.raises(KeyError), engine.step({"model": model}, 0):
            step_and_fail()
        with engine.step({"model": model}, 1) as inside:
            pass  # the first batch of a window of gradient accumulation
        with engine.step({"model": model}, 2) as whole:
            optimizer.step()
    assert (inside.pending, inside.whole) == (None, False)
    assert whole.pending is not None
    assert whole.whole


def test_a_failure_nobody_saw_is_raised_at_the_next_context(tmp_path: Path) -> None:
    with held(tmp_path, interval=1) as it:
        clamp(it)
        it.io.medium.release()
        it.engine.wait_captured()
        with pytest.raises(TornCaptureError):
            it.engine.drain()
        with it.engine.step(it.state, 2) as this:
            it.compute()
            it.optimizer.step()
        assert this.pending is not None
        this.pending.result()


@pytest.mark.parametrize("nested", [False, True])
def test_a_loop_that_perturbs_its_weights_goes_on_and_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, nested: bool
) -> None:
    """That the engine's choice to overlap was wrong is warned of, and raised only where the checkpoint is awaited.

    The paths of parameters in nested modules have dots inside their keys.
    """
    model, io = nn.Sequential(nn.Linear(300, 300)) if nested else nn.Linear(300, 300), Device()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pending, want = [], []
    with SyncCheckpointEngine(tmp_path, interval=1, storage=StorageOptions(io=io, **SMALL)) as engine:
        engine.attach(optimizer)
        for step in range(4):
            with engine.step({"model": model}, step) as this:
                with torch.no_grad():
                    next(model.parameters()).add_(0.1)
                io.medium.release()
                model(torch.ones(1, 300)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                engine.drain()
                want.append(snapshot({"model": model}))
                if step < 2:
                    io.medium.hold("write")
            pending.append(this.pending)
        with pytest.raises(TornCaptureError):
            pending[0].result()  # type: ignore[union-attr]
        assert engine.statistics().failed == 2
    assert equal(saved(tmp_path), want[3])
    events = [record.event for record in caplog.records]  # type: ignore[attr-defined]
    assert sorted(events) == ["captured_eagerly", "failed", "failed", "not_in_state"]


def test_a_torn_checkpoint_is_made_again_after_the_next_step(tmp_path: Path) -> None:
    """And not an interval later: in a short run there may be none."""
    model, io = nn.Sequential(nn.Linear(300, 300)), Device()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved_at = []
    with SyncCheckpointEngine(tmp_path, interval=50, save_last=False, storage=StorageOptions(io=io, **SMALL)) as engine:
        engine.attach(optimizer)
        for step in range(60):
            with engine.step({"model": model}, step) as this:
                model(torch.ones(1, 300)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 49:
                    io.medium.hold("write")
            if this.pending is not None:
                saved_at.append(step)
            if step == 49:
                with torch.no_grad():
                    next(model.parameters()).add_(0.1)
                io.medium.release()
                with suppress(TornCaptureError):
                    engine.drain()
            if step == 50:  # it ends, and then there is none to make again
                engine.drain()
    assert saved_at == [49, 50]
    assert [info.step for info in list_checkpoints(tmp_path)] == [50]


def test_a_run_of_which_nothing_is_saved_any_more_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should capturing before the step ends not help: a warning for each would be a run without checkpoints."""
    monkeypatch.setattr(TornLeaves, "sources", lambda *_: [])
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0

    def train() -> None:
        nonlocal steps
        with SyncCheckpointEngine(tmp_path, interval=1) as engine:
            engine.attach(optimizer)
            for steps in range(40):
                with engine.step({"model": model}, steps):
                    model(torch.ones(1, 300)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                with torch.no_grad():
                    model.weight.add_(0.1)

    with pytest.raises(TornCaptureError, match="is torn") as raised:
        train()
    assert 10 < steps < 39  # it is told of at a step after they ended
    assert raised.value.__notes__[0].endswith(" checkpoints in a row were torn: nothing is saved any more")


@pytest.mark.slow
def test_a_capture_that_is_abandoned_in_the_middle_of_a_copy_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that was held up may change what the copy reads."""

    gather = CopyBackend.gather
    copying, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    async def slow(*arguments: Any) -> bytes:
        async def copy() -> bytes:
            copying.set()
            await asyncio.to_thread(go_on.wait)
            sums = await gather(*arguments)
            ended.set()
            return sums

        return await uninterrupted(copy())

    model = nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 512)).sum().backward()
    with SyncCheckpointEngine(tmp_path, max_stall=0.05) as engine:
        engine.attach(optimizer)
        monkeypatch.setattr(CopyBackend, "gather", slow)
        pending = engine.checkpoint({"model": model, "optimizer": optimizer}, step=1, overlap=True)
        assert copying.wait(30)
        threading.Timer(0.5, go_on.set).start()
        optimizer.step()
        assert ended.is_set()
        with pytest.raises(CheckpointError, match="abandoned"):
            pending.result(30)


def test_changes_after_wait_captured_of_a_checkpoint_are_none(tmp_path: Path) -> None:
    with held(tmp_path) as it:
        it.io.medium.release()
        it.pending.wait_captured()
        with torch.no_grad():
            it.model.first.weight.add_(1.0)
        it.pending.result(60)


def test_a_restore_that_waits_for_a_capture_is_cancelled_at_once(tmp_path: Path) -> None:
    device, model = Device(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "optimizer": optimizer}
    model(torch.randn(16, 96)).square().mean().backward()
    optimizer.step()

    async def main() -> None:
        async with CheckpointEngine(tmp_path, storage=StorageOptions(io=device, **SMALL)) as engine:
            engine.attach(optimizer)
            device.medium.hold("write")
            pending = await engine.checkpoint(state, step=1, overlap=True)
            await asyncio.to_thread(device.medium.wait_stuck)
            assert not flight_of(pending).is_captured
            restoring = asyncio.create_task(engine.restore(state))
            await asyncio.sleep(0.01)
            restoring.cancel()
            await asyncio.wait((restoring,), timeout=5)
            cancelled = restoring.done() and restoring.cancelled()
            device.medium.release()
            await pending
            assert cancelled

    asyncio.run(main())
