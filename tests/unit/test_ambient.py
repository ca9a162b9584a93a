"""Saving and restoring inside torch's modes and transforms: every bit, or an error that names what is in the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from pccheck_async import ResumableLoader, RNGState, SyncCheckpointEngine, load_sync
from pccheck_async.api import open_checkpoint
from pccheck_async.errors import UnsupportedStateError
from tests.support.datasets import Numbers, values
from tests.support.state_strategies import array_bytes, same


def spoil(result: Any) -> Any:
    return torch.zeros_like(result, device="cpu") if isinstance(result, torch.Tensor) else result


class SpoilingCalls(TorchFunctionMode):
    """All that torch's functions return is zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return spoil(func(*args, **(kwargs or {})))


class SpoilingKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """All that torch's kernels make is zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return spoil(func(*args, **(kwargs or {})))


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def no_denormals() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "device context": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
    "default dtype": lambda: default_dtype(torch.float64),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic,
    "no denormals": no_denormals,
    "saved tensors": torch.autograd.graph.save_on_cpu,
    "forward gradients": torch.autograd.forward_ad.dual_level,
    "flop counter": lambda: FlopCounterMode(display=False),
}
SPOILING: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "calls": SpoilingCalls,
    "kernels": SpoilingKernels,
}


def plain() -> dict[str, Any]:
    """Tensors of which every kind takes another way into a checkpoint and out of it."""
    numbers = torch.linspace(1, 2, 24).reshape(4, 6)
    return {
        "dense": numbers.clone(),
        "strided": numbers[:, ::2],
        "transposed": numbers.clone().t(),
        "tiny": torch.full((6,), 1e-42)[::2],
        "half": numbers.bfloat16()[::2],
        "conjugate": torch.complex(numbers, numbers + 1).conj(),
        "negative": torch.complex(numbers, numbers + 1).conj().imag,
        "expanded": torch.ones(3, 1).expand(3, 4),
        "parameter": nn.Parameter(numbers.clone()),
        "array": np.arange(24.0).reshape(4, 6)[:, ::2],
        "bool": torch.tensor([True, False, True])[::2],
    }


def blank() -> dict[str, Any]:
    state = plain()
    for value in state.values():
        if isinstance(value, np.ndarray):
            value[...] = 0
        else:
            value.detach()[..., :1].zero_()
    return state


def objects() -> dict[str, Any]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Conv2d(3, 4, 3))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "rng": RNGState()}


def bits(state: dict[str, Any]) -> dict[str, Any]:
    return {key: (value.dtype, tuple(value.shape), array_bytes(value)) for key, value in state.items()}


def seen(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in state.items()}


@pytest.mark.parametrize("mode", [*MODES, *SPOILING])
@pytest.mark.parametrize("overlap", [False, True])
def test_tensors_are_saved_by_their_bits(tmp_path: Path, mode: str, overlap: bool) -> None:
    state = plain()
    with SyncCheckpointEngine(tmp_path) as engine:
        for step in range(2):  # the second one lies as the first did
            with (MODES | SPOILING)[mode]():
                pending = engine.checkpoint(state, step=step, overlap=overlap)
            pending.result()
            assert bits(load_sync(tmp_path)) == bits(state)


@pytest.mark.parametrize("mode", [*MODES, *SPOILING])
def test_tensors_are_restored_by_their_bits(tmp_path: Path, mode: str) -> None:
    state, live, empty = plain(), blank(), dict.fromkeys(plain())
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(state).result()
        with (MODES | SPOILING)[mode]():
            engine.restore(live)
            engine.restore(empty)
    assert bits(live) == bits(empty) == bits(state)


@pytest.mark.parametrize("mode", [*MODES, *SPOILING, "made up"])
def test_tensors_are_read_by_their_bits(tmp_path: Path, mode: str) -> None:
    state = plain()
    modes = MODES | SPOILING | {"made up": FakeTensorMode}
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(state).result()
    with open_checkpoint(tmp_path) as opened, modes[mode]():
        loaded, rebuilt, read = load_sync(tmp_path), opened.load(), opened["strided"]
    assert bits(loaded) == bits(rebuilt) == bits(state)
    assert bits({"strided": read}) == bits({"strided": state["strided"]})


@pytest.mark.parametrize("mode", MODES)
def test_objects_are_saved_and_restored_by_their_bits(tmp_path: Path, mode: str) -> None:
    state = objects()
    live = objects()
    with torch.no_grad():
        for parameter in live["model"].parameters():
            parameter.zero_()
    with SyncCheckpointEngine(tmp_path) as engine, MODES[mode]():
        engine.attach(state["optimizer"])
        engine.checkpoint(state, overlap=True).result()
        engine.restore(live)
    assert same(seen(live), seen(state))


@pytest.mark.parametrize("mode", ["device context", "default device", "default dtype", "inference mode"])
def test_data_comes_in_the_same_order(mode: str) -> None:
    def position(first: int) -> ResumableLoader:
        loader = ResumableLoader(Numbers(40), batch_size=4)
        loader.load_state_dict(loader.state_dict() | {"position": first})
        return loader

    expected = values(islice(position(20).forever(), 10))
    loader = position(20)
    with MODES[mode]():
        order = [*position(20).sampler]
    assert values(islice(loader.forever(), 10)) == expected
    assert order == [*position(20).sampler]


def inside(mode: Callable[[], AbstractContextManager[Any]]) -> Callable[[Callable[[Any], Any]], None]:
    def run(function: Callable[[Any], Any]) -> None:
        with mode():
            function(torch.ones(2))

    return run


TRACERS: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "FakeTensorMode": inside(FakeTensorMode),
    "FunctionalTensorMode": inside(FunctionalTensorMode),
    "make_fx": lambda function: make_fx(function)(torch.ones(2)),
    "torch.func": lambda function: torch.func.vmap(function)(torch.ones(2)),
    "vmap, grad": lambda function: torch.func.grad(function)(torch.ones(2)),
    "functionalize": lambda function: torch.func.functionalize(function)(torch.ones(2)),
    "torch.jit.trace": lambda function: torch.jit.trace(function, torch.ones(2)),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_nothing_is_saved_or_restored_where_tensors_are_none(tmp_path: Path, tracer: str) -> None:
    state = objects()
    before = {key: value.clone() for key, value in state["model"].state_dict().items()}
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(state, step=1).result()
        with pytest.raises(UnsupportedStateError, match=rf"checkpoint\(\) was called inside .*{tracer}"):
            TRACERS[tracer](lambda x: (engine.checkpoint(state, step=2), x.sum())[1])
        with pytest.raises(UnsupportedStateError, match=rf"restore\(\) was called inside .*{tracer}"):
            TRACERS[tracer](lambda x: (engine.restore(state), x.sum())[1])
        assert [info.step for info in engine.checkpoints()] == [1]
        assert same(dict(state["model"].state_dict()), before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_nothing_is_saved_inside_a_compiled_function(tmp_path: Path) -> None:
    state = {"x": torch.ones(3)}
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:

        def function(x: Any) -> Any:
            engine.checkpoint(state, step=2)
            return x + 1

        # What the compiler of an older torch cannot trace is refused by that, before anything of ours is asked.
        with pytest.raises((UnsupportedStateError, TorchDynamoException), match=r"torch\.compiler\.disable|dynamo"):
            torch.compile(function, backend="eager")(torch.ones(2))
        engine.checkpoint(state, step=3).result()
        disable: Any = torch.compiler.disable
        kept_out = disable(lambda: engine.checkpoint(state, step=4).result())

        def other(x: Any) -> Any:
            kept_out()
            return x + 1

        torch.compile(other, backend="eager")(torch.ones(2))
        assert engine.latest is not None
        assert engine.latest.step == 4
