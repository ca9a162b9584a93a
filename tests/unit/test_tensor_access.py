"""Code that gets at memory past torch's counters, in the middle of a capture: it waits."""

from __future__ import annotations

import asyncio
import copy
import gc
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from pccheck_async import CheckpointError, SyncCheckpointEngine, load_sync
from pccheck_async.engine import Flight
from pccheck_async.state import tensor_access as access
from pccheck_async.testing.probe import probe
from tests.engine.test_overlap import Held, equal, held, saved

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.fixture
def let_go(monkeypatch: pytest.MonkeyPatch) -> Callable[[Held], list[Flight]]:
    """The device of a held capture begins to move again when somebody waits for it, and not before."""
    return partial(Held.release_when_waited_for, monkeypatch=monkeypatch)


def resize(storage: torch.UntypedStorage) -> None:
    storage.resize_(0)


WRITES: dict[str, Callable[[Any], object]] = {
    "data": lambda parameter: parameter.data.fill_(7.0),
    "new data": lambda parameter: setattr(parameter, "data", torch.full_like(parameter, 7.0)),
    "numpy": lambda parameter: parameter.detach().numpy().fill(7.0),
    "array": lambda parameter: np.asarray(parameter.detach()).fill(7.0),
    "view": lambda parameter: parameter.detach().view(-1)[9000:].numpy().fill(7.0),
    "dlpack": lambda parameter: torch.utils.dlpack.from_dlpack(parameter.detach()).data.fill_(7.0),
    "storage": lambda parameter: parameter.untyped_storage().fill_(7),
    "set": lambda parameter: parameter.detach().set_(torch.full_like(parameter, 7.0)),
    "resize": lambda parameter: resize(parameter.untyped_storage()),
    "vector": lambda parameter: torch.nn.utils.vector_to_parameters(torch.zeros(parameter.numel()), [parameter]),
    "dtype": lambda parameter: torch.nn.ParameterList([parameter]).half(),
}


@pytest.mark.parametrize("write", WRITES)
def test_who_reaches_for_what_is_being_captured_waits(
    tmp_path: Path, write: str, let_go: Callable[[Held], list[Flight]]
) -> None:
    with held(tmp_path) as it:
        let_go(it)
        WRITES[write](it.model.second.weight)
        assert it.flight.is_captured
        it.pending.result()
        assert it.engine.statistics().guard_seconds > 0
    assert equal(saved(tmp_path), it.want)


def test_a_storage_taken_before_is_shrunk_only_after_the_capture(
    tmp_path: Path, let_go: Callable[[Held], list[Flight]]
) -> None:
    model = torch.nn.Linear(512, 512)
    storage = model.weight.untyped_storage()
    with held(tmp_path) as it:
        it.io.medium.release()
        it.pending.result()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        it.engine.attach(optimizer)
        want = copy.deepcopy(model.state_dict())
        it.io.medium.hold("write")
        it.pending = it.engine.checkpoint({"model": model}, step=2, overlap=True)
        it.io.medium.wait_stuck()
        let_go(it)
        storage.resize_(0)
        assert it.flight.is_captured
        it.pending.result()
    assert equal(saved(tmp_path)["model"], want)


def test_weights_swapped_for_an_evaluation_are_not_what_is_saved(
    tmp_path: Path, let_go: Callable[[Held], list[Flight]]
) -> None:
    with held(tmp_path) as it:
        waited = let_go(it)
        kept = [parameter.detach().clone() for parameter in it.model.parameters()]
        for parameter in it.model.parameters():
            parameter.data.copy_(torch.full_like(parameter, 0.5))
        it.model(torch.randn(4, 96))
        for parameter, before in zip(it.model.parameters(), kept, strict=True):
            parameter.data.copy_(before)
        assert waited == [it.flight]  # once
        it.pending.result()
    assert equal(saved(tmp_path), it.want)


def test_what_is_not_being_captured_is_reached_at_once(tmp_path: Path) -> None:
    other = torch.nn.Linear(4, 4)
    with held(tmp_path) as it:
        other.weight.data.fill_(1.0)
        it.model.norm.get_buffer("running_mean").data.fill_(1.0)  # copied before the call returned
        torch.ones(3).numpy()
        torch.eye(3).to_sparse().data.mul_(2.0)
        torch.ones(2, device="meta").untyped_storage()
        torch.nn.LazyLinear(4)(torch.ones(2, 3))
        assert not it.flight.is_captured
        it.io.medium.release()
        it.pending.result()
    assert equal(saved(tmp_path), it.want)


def test_one_that_waits_for_too_long_goes_on_and_the_capture_does_not(tmp_path: Path) -> None:
    with held(tmp_path, max_stall=0.02) as it:
        it.model.second.weight.data.fill_(7.0)
        with pytest.raises(CheckpointError, match="abandoned the checkpoint of step 1"):
            it.pending.result()
        it.io.medium.release()
        it.engine.drain()


def test_threads_that_capture_wait_for_nobody(tmp_path: Path) -> None:
    with held(tmp_path) as it:

        def reach() -> None:  # as finalizers may, which run on any thread
            it.model.second.weight.data.shape  # noqa: B018

        parts = probe(it.engine)
        future, _ = parts.loop.submit(parts.core.assembly.opened.operations.call(reach))
        future.result(10)
        parts.loop.loop.call_soon_threadsafe(reach)
        parts.loop.call(asyncio.sleep(0))
        assert not it.flight.is_captured
        it.io.medium.release()


def classes() -> list[dict[str, Any]]:
    """What torch's classes consist of."""
    return [dict(vars(cls)) for cls in (torch.Tensor, torch.nn.Parameter, torch.UntypedStorage)]


def test_with_nothing_attached_no_class_of_torch_is_touched(tmp_path: Path) -> None:
    before = classes()
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        for step in range(3):
            with engine.step({"model": model, "optimizer": optimizer}, step):
                optimizer.step()
            engine.checkpoint({"model": model}, step=step, overlap=True).result()
            assert classes() == before


@pytest.mark.parametrize("first", [0, 1])
def test_torch_is_as_it_was_when_the_last_engine_closed(tmp_path: Path, first: int) -> None:
    """They are patched once, by the first ``attach``, whatever is attached and saved after it."""
    before = classes()
    model = torch.nn.Linear(300, 300)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    engines = [SyncCheckpointEngine(tmp_path / name).open() for name in ("one", "other")]
    assert classes() == before
    engines[0].attach(optimizers[0])
    patched = classes()
    assert patched != before
    for engine in engines:
        engine.attach(*optimizers)
        engine.checkpoint({"model": model}, overlap=True).result()
        assert classes() == patched
    engines[first].close()
    assert classes() == patched
    engines[1 - first].close()
    engines[first].close()
    assert classes() == before


def test_accesses_leave_nothing_but_a_flag_on_the_memory(tmp_path: Path) -> None:
    """Which views share, and which is gone with it."""
    model = torch.nn.Linear(3, 3)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))
        objects = len(gc.get_objects())
        for _ in range(5000):
            torch.ones(2).numpy()
        assert len(gc.get_objects()) < objects + 500
        began = access.begin_period()
        assert not access.accessed_since(model.weight, began, writing=False)
        model.weight.detach()[1:].numpy()
        assert access.accessed_since(model.weight, began, writing=False)
        assert not access.accessed_since(model.weight, began, writing=True)
        model.weight.view(-1).data.shape  # noqa: B018
        gc.collect()
        assert access.accessed_since(model.weight, began, writing=True)
        assert not access.accessed_since(model.weight, access.begin_period(), writing=False)
        assert not access.accessed_since(model.bias, began, writing=False)


def test_between_captures_nobody_is_called(tmp_path: Path) -> None:
    """An access is quick again once what was captured is."""
    with held(tmp_path) as it:
        assert access._callbacks
        it.io.medium.release()
        it.pending.result()
        it.model.first.weight.data.shape  # noqa: B018
        assert not access._callbacks
        it.io.medium.hold("write")
        it.engine.checkpoint(it.state, step=2, overlap=True)
        assert access._callbacks
        it.io.medium.release()
    assert not access._callbacks


@pytest.mark.parametrize("kind", ["sparse", "meta", "lazy", "transformed", "subclass", "refusing"])
def test_accesses_of_odd_tensors_are_as_without(tmp_path: Path, kind: str) -> None:
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is access.untyped_storage:
                raise AssertionError("asked for its storage")
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    makers: dict[str, Callable[[], Any]] = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "meta": lambda: torch.ones(3, device="meta"),
        "lazy": lambda: torch.nn.LazyLinear(3).weight,
        "transformed": lambda: torch.ones(3),
        "subclass": lambda: torch.ones(3).as_subclass(Refusing.__base__),  # type: ignore[arg-type]
        "refusing": lambda: torch.ones(3).as_subclass(Refusing),
    }
    part = torch.nn.Linear(3, 3)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.attach(torch.optim.SGD(part.parameters(), lr=0.1))
        if kind == "transformed":
            assert torch.func.grad(lambda each: (each * each.data).sum())(torch.ones(3)).sum() == 3
        else:
            assert type(makers[kind]().data) is not None


def test_keywords_of_what_is_shadowed(tmp_path: Path) -> None:
    part = torch.nn.Linear(3, 3)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.attach(torch.optim.SGD(part.parameters(), lr=0.1))
        assert part.weight.numpy(force=True).shape == (3, 3)
        with pytest.raises(RuntimeError, match="requires grad"):
            part.weight.numpy()
        tensor = torch.ones(4)
        tensor.set_(source=torch.zeros(4).untyped_storage())
        assert tensor.tolist() == [0.0] * 4
        assert torch.Tensor.numpy.__doc__


def test_somebody_elses_shadow_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    access.watch_accesses(seen)
    access.call_before_accesses(seen.append)
    shadow: Any = torch.Tensor.numpy

    def numpy(tensor: torch.Tensor) -> Any:
        return shadow(tensor)

    monkeypatch.setattr(torch.Tensor, "numpy", numpy)
    tensor = torch.ones(2)
    assert tensor.numpy().tolist() == [1.0, 1.0]
    access.stop_calling(seen.append)
    access.stop_watching_accesses(seen)
    assert seen == [tensor]
    flagged = access.last_access(tensor)
    access.begin_period()
    assert tensor.numpy().tolist() == [1.0, 1.0]
    assert len(seen) == 1
    assert access.last_access(tensor) == flagged


@pytest.mark.slow
def test_compiled_models_are_not_compiled_again(tmp_path: Path) -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    compiled: Any = torch.compile(model, backend=counter)

    def step() -> None:
        optimizer.zero_grad()
        compiled(torch.randn(2, 8)).sum().backward()
        optimizer.step()

    step()
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.attach(optimizer)
        for _ in range(2):
            engine.checkpoint({"model": model, "optimizer": optimizer}, overlap=True)
            step()
    step()
    assert counter.frame_count == 1
    assert equal(load_sync(tmp_path)["model"].keys(), model.state_dict().keys())


@pytest.mark.parametrize("reach", ["data", "new data", "storage", "set", "resize", "resize a tensor"])
def test_outside_a_capture_it_costs_one_call(reach: str) -> None:
    """The calls of this package are counted: each of them takes about 0.1 us of an access, at most 0.3 us of it."""
    parameter, watcher, calls = torch.nn.Parameter(torch.ones(4)), object(), []
    view: Any = parameter.detach()
    storage = parameter.untyped_storage()
    reaches: dict[str, Callable[[], object]] = {
        "data": lambda: parameter.data,
        "new data": lambda: setattr(parameter, "data", view),
        "storage": lambda: torch.Tensor.untyped_storage(parameter),
        "set": lambda: view.set_(parameter.detach()),
        "resize": lambda: storage.resize_(16),
        "resize a tensor": lambda: view.resize_(2),
    }

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == access.__file__:
            calls.append(frame.f_code.co_name)

    access.watch_accesses(watcher)
    try:
        before = access.begin_period()
        sys.setprofile(count)
        reaches[reach]()
        sys.setprofile(None)
        assert calls == ["access"]
        assert access.last_access(view if "a tensor" in reach or reach == "set" else parameter) >= before
    finally:
        sys.setprofile(None)
        access.stop_watching_accesses(watcher)
