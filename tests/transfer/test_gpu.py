"""The engine on real devices."""

from __future__ import annotations

import asyncio
import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pccheck_async import (
    CheckpointEngine,
    CheckpointError,
    StorageOptions,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
)
from pccheck_async.engine import flight_of
from pccheck_async.format import dtypes
from pccheck_async.state import HOST, Allocation, Target, as_bits
from pccheck_async.transfer.copying.cuda_device import CudaDevice, CudaStream, load
from pccheck_async.transfer.copying.snapshot import DeviceMode
from tests.support.played_cuda import using
from tests.support.state_strategies import difference, tensor_of

pytestmark = pytest.mark.gpu

MODES: list[DeviceMode] = ["stream", "snapshot", "auto"]
MIB = 1 << 20


def on_host(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, dict):
        return {key: on_host(value) for key, value in state.items()}
    return [on_host(value) for value in state] if isinstance(state, list) else state


def cleared(state: dict[str, Any]) -> dict[str, Any]:
    """The same tensors with other bytes."""
    return {key: [torch.full_like(as_bits(t), 0x5A).view(t.dtype) for t in state[key]] for key in state}


def bits_of(tensors: list[torch.Tensor]) -> list[bytes]:
    return [as_bits(tensor).cpu().numpy().tobytes() for tensor in tensors]


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return as_bits(tensor).cuda().view(tensor.dtype)  # torch has no kernels for some dtypes


@pytest.fixture(params=["cupy", "torch"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with using(request.param, monkeypatch):
        yield


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> DeviceMode:
    found: DeviceMode = request.param
    return found


def test_every_dtype_to_the_bit(tmp_path: Path, mode: DeviceMode) -> None:
    rng = np.random.default_rng(0)
    state = {
        name: [
            on_gpu(tensor_of(dtype, (37,), rng.bytes(37 * dtype.itemsize))),
            on_gpu(tensor_of(dtype, (3, 50_000), rng.bytes(150_000 * dtype.itemsize))),
        ]
        for name, dtype in dtypes.STORABLE.items()
    }
    expected = {name: bits_of(tensors) for name, tensors in state.items()}
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(gpu_capture=mode, chunk_bytes=MIB)) as engine:
        for step in range(2):
            engine.checkpoint(state, step=step).result(60)
        live = cleared(state)
        addresses = [tensor.data_ptr() for tensors in live.values() for tensor in tensors]
        engine.restore(live)
        assert {name: bits_of(tensors) for name, tensors in live.items()} == expected
        assert [tensor.data_ptr() for tensors in live.values() for tensor in tensors] == addresses
    loaded = load_sync(tmp_path, device="cuda")
    assert {name: bits_of(tensors) for name, tensors in loaded.items()} == expected
    assert all(tensor.is_cuda for tensors in loaded.values() for tensor in tensors)


def odd_ones() -> dict[str, Any]:
    base = torch.arange(300_000.0, device="cuda")
    return {
        "tied": [base, base[5:9], base.view(300, 1000).t(), base],
        "holes": [torch.rand(400, 300, device="cuda")[:, 3:70], torch.rand(3, device="cuda").expand(4, 3)],
        "unaligned": [torch.rand(100, device="cuda")[1:], torch.rand(77, device="cuda").to(torch.bfloat16)[3:]],
        "lazy": [
            torch.randn(500, dtype=torch.complex64, device="cuda").conj(),
            torch.randn(9, device="cuda")._neg_view(),
        ],
        "empty": [torch.empty(0, 3, device="cuda"), torch.tensor(3.0, device="cuda")],
        "host": [torch.rand(1000), torch.tensor(7.0)],
        "array": np.arange(10_000),
        "step": 3,
    }


def test_odd_tensors(tmp_path: Path, mode: DeviceMode) -> None:
    state = odd_ones()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(gpu_capture=mode, chunk_bytes=64 * 1024)) as engine:
        for step in range(2):
            engine.checkpoint(state, step=step).result(60)
        assert not difference(on_host(state), on_host(load_sync(tmp_path, device="cuda")))
        live = odd_ones()
        for tensor in (*live["holes"][:1], *live["unaligned"], *live["lazy"], *live["host"]):
            tensor.zero_()
        live["tied"][0].zero_()
        engine.restore(live)
        assert not difference(on_host(state), on_host(live))


@pytest.mark.parametrize(("count", "nbytes"), [(10_000, 2000), (50, 4 * MIB)])
@pytest.mark.usefixtures("nothing_left_behind")
def test_many_small_and_some_large(tmp_path: Path, mode: DeviceMode, count: int, nbytes: int) -> None:
    state = {"t": [torch.randint(0, 255, (nbytes + n % 7,), dtype=torch.uint8, device="cuda") for n in range(count)]}
    whole = torch.cat(state["t"]).cpu()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(gpu_capture=mode)) as engine:
        for step in range(2):
            engine.checkpoint(state, step=step)
            engine.drain()
        for tensor in state["t"]:
            tensor.zero_()
        engine.restore(state)
        assert torch.equal(torch.cat(state["t"]).cpu(), whole)


def test_a_side_stream_that_was_joined(tmp_path: Path, mode: DeviceMode) -> None:
    tensors = [torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(gpu_capture=mode)) as engine:
        for step in range(1, 4):
            with torch.cuda.stream(side):
                torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
                for tensor in tensors:
                    tensor.fill_(step)
            torch.cuda.current_stream().wait_stream(side)
            engine.checkpoint({"t": tensors}, step=step)
            side.wait_stream(torch.cuda.current_stream())
            engine.drain()
            assert all(bool((tensor == step).all()) for tensor in load_sync(tmp_path)["t"])


def test_the_current_stream_may_be_any(tmp_path: Path, mode: DeviceMode) -> None:
    tensors = [torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda"), torch.zeros(300, 2, device="cuda")[:, 0]]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(gpu_capture=mode)) as engine, torch.cuda.stream(side):
        for step in range(1, 4):
            torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
            for tensor in tensors:
                tensor.fill_(step)
            engine.checkpoint({"t": tensors}, step=step)
            engine.drain()
            assert all(bool((tensor == step).all()) for tensor in load_sync(tmp_path)["t"])


def test_mutation_as_soon_as_the_call_returned(tmp_path: Path, mode: DeviceMode) -> None:
    tensors = [torch.zeros(6 * MIB, dtype=torch.uint8, device="cuda") for _ in range(20)]
    tensors += [torch.zeros(100, dtype=torch.uint8, device="cuda") for _ in range(500)]
    counter = torch.zeros(())
    with SyncCheckpointEngine(
        tmp_path, storage=StorageOptions(gpu_capture=mode), keep_last=5, max_in_flight=3
    ) as engine:
        for step in range(5):
            counter.fill_(step)
            for tensor in tensors:
                tensor.fill_(step)
            engine.checkpoint({"t": tensors, "c": counter}, step=step)
            counter.fill_(99)
            for tensor in tensors:
                tensor.fill_(99)
        engine.drain()
        assert engine.statistics().snapshots == {"stream": 0, "snapshot": 5, "auto": 4}[mode]
        for step in range(5):
            found = load_sync(tmp_path, step=step)
            assert found["c"] == step
            assert all(bool((tensor == step).all()) for tensor in found["t"])


def test_restored_tensors_may_be_used_at_once(tmp_path: Path) -> None:
    """By any stream, and whatever was queued on them before."""
    tensors = [torch.full((8 * MIB,), 7, dtype=torch.uint8, device="cuda") for _ in range(8)]
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"t": tensors}, step=0).result(60)
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        for tensor in tensors:
            tensor.fill_(1)
        versions = [tensor._version for tensor in tensors]
        engine.restore({"t": tensors})
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            sums = [tensor.sum(dtype=torch.int64) for tensor in tensors]
        assert [int(each) for each in sums] == [7 * 8 * MIB] * 8
        assert all(tensor._version > version for tensor, version in zip(tensors, versions, strict=True))


def test_an_optimizer_comes_back(tmp_path: Path, mode: DeviceMode, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512)).cuda()
        return model, torch.optim.AdamW(model.parameters())

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            inputs = torch.randn(8, 512, generator=torch.Generator().manual_seed(step)).cuda()
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

    model, optimizer = build()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(gpu_capture=mode)) as engine:
        train(model, optimizer, range(3))
        engine.checkpoint({"model": model, "optimizer": optimizer}, step=2)
        train(model, optimizer, range(3, 5))
        engine.drain()
        resumed, fresh = build()
        made: list[str] = []
        targets = Allocation.targets

        def noting(allocation: Allocation) -> Iterator[Target]:
            for target in targets(allocation):
                made.append("host" if target.device == HOST else "cuda")
                yield target

        monkeypatch.setattr(Allocation, "targets", noting)
        engine.restore({"model": resumed, "optimizer": fresh})
        assert made.count("cuda") == 2 * 4  # two moments of each: read straight into place
        train(resumed, fresh, range(3, 5))
    assert not difference(on_host(model.state_dict()), on_host(resumed.state_dict()))
    assert not difference(on_host(optimizer.state_dict()), on_host(fresh.state_dict()))


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_a_step_leaves_the_waiting_to_the_device(tmp_path: Path, mode: DeviceMode, kind: str, beside: bool) -> None:
    """The copies are behind a sleeping kernel, and what the step queues is behind the copies."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=kind == "foreach", fused=kind == "fused")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with SyncCheckpointEngine(
        tmp_path, storage=StorageOptions(gpu_capture=mode), keep_last=9, max_in_flight=4
    ) as engine:
        engine.attach(optimizer)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 1024, device="cuda")).square().mean().backward()
            if step == 0:
                optimizer.step()  # makes the moments
            want = on_host({name: each.state_dict() for name, each in state.items()})
            want = copy.deepcopy(want)  # step counts are on the host already
            side.wait_stream(torch.cuda.current_stream())  # so far: not for what the copies wait for
            torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # some 500 ms
            pending = engine.checkpoint(state, step=step, overlap=True)
            with torch.cuda.stream(side if beside else torch.cuda.current_stream()):
                optimizer.step()
            assert step == 0 or not flight_of(pending).is_captured  # at first, staging memory is still being registered
            torch.cuda.current_stream().wait_stream(side)
            pending.result(60)
            assert not difference(want, on_host(load_sync(tmp_path, step=step)))
        assert engine.statistics().guard_fences >= 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_several_devices(tmp_path: Path, mode: DeviceMode) -> None:
    devices = range(torch.cuda.device_count())
    state = {str(n): torch.rand(10 + 1000 * n, device=f"cuda:{n % len(devices)}") for n in range(200)}
    state["host"] = torch.rand(1000)
    expected = on_host(state)
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(gpu_capture=mode, chunk_bytes=MIB)) as engine:
        for step in range(2):
            engine.checkpoint(state, step=step)
            engine.drain()
        for tensor in state.values():
            tensor.zero_()
        engine.restore(state)
    assert not difference(expected, on_host(state))


def test_gpu_memory_is_back_after_the_save(tmp_path: Path, mode: DeviceMode) -> None:
    nbytes = 512 * MIB
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(gpu_capture=mode)) as engine:
        tensor = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        for step in range(2):
            engine.checkpoint({"t": tensor}, step=step)
            engine.drain()
        found = engine.statistics()
        assert found.device_bytes < 128 * MIB  # scratch images at most
        assert (found.device_peak_bytes >= nbytes) is (mode != "stream")
        held = torch.cuda.memory_allocated()
        del tensor
        gc.collect()
        assert torch.cuda.memory_allocated() <= held - nbytes
    assert torch.cuda.memory_allocated() <= held - nbytes


def test_no_memory_for_a_snapshot(tmp_path: Path) -> None:
    """Torch's allocator refuses what the driver would have."""
    state = {"t": torch.randint(0, 255, (256 * MIB,), dtype=torch.uint8, device="cuda")}
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * MIB) / total)
    try:
        with SyncCheckpointEngine(tmp_path, storage=StorageOptions(gpu_capture="snapshot")) as engine:
            engine.checkpoint(state, step=0).result(60)
            found = engine.statistics()
            assert found.snapshots == 0
            assert "no memory" in found.decisions.reasons["gpu_capture"]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(load_sync(tmp_path)["t"], state["t"].cpu())


def test_cancelled(tmp_path: Path, mode: DeviceMode) -> None:
    tensors = [torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]

    async def main() -> None:
        async with CheckpointEngine(tmp_path, storage=StorageOptions(gpu_capture=mode), max_in_flight=1) as engine:
            await (await engine.checkpoint({"t": tensors}, step=0))
            for turns in range(5):
                torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
                saving = asyncio.create_task(engine.checkpoint({"t": tensors}, step=1))
                for _ in range(turns):
                    await asyncio.sleep(0)
                saving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await saving
                for tensor in tensors:
                    tensor.fill_(turns)
            await (await engine.checkpoint({"t": tensors}, step=2))
            await engine.drain()
            assert engine.statistics().device_bytes < 128 * MIB

    asyncio.run(main())
    assert all(bool((tensor == 4).all()) for tensor in load_sync(tmp_path, step=2)["t"])


def test_a_graph_is_recorded_beside_a_capture(tmp_path: Path, mode: DeviceMode) -> None:
    """Recording forbids other threads to register memory and the like, unless they know better."""
    pytest.importorskip("cuda.bindings")
    state = {"t": torch.rand(64 * MIB // 4, device="cuda")}
    parameter = torch.nn.Parameter(state["t"])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    into, source = torch.zeros(1000, device="cuda"), torch.rand(1000, device="cuda")
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(gpu_capture=mode), keep_last=9) as engine:
        engine.attach(optimizer)
        for step in range(4):
            graph = torch.cuda.CUDAGraph()
            pending = engine.checkpoint({"t": parameter}, step=step, overlap=True)
            with torch.cuda.graph(graph):
                into.copy_(source)
            pending.result(60)
            into.zero_()
            graph.replay()
            assert torch.equal(into, source)
            assert torch.equal(load_sync(tmp_path, step=step)["t"], on_host(parameter))
        assert engine.statistics().failed == 0


def test_a_stream_that_is_recorded_is_refused(tmp_path: Path) -> None:
    state = {"t": torch.rand(1000, device="cuda")}
    with SyncCheckpointEngine(tmp_path) as engine:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            state["t"].mul_(2)
            with pytest.raises(CheckpointError, match="CUDA graph"):
                engine.checkpoint(state, step=0)
        engine.checkpoint(state, step=1).result(60)
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]


@pytest.mark.parametrize("broken", ["registration", "compiler", "scratch", "table"])
def test_without(tmp_path: Path, mode: DeviceMode, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way around works to the bit."""

    def refuse(*_: Any) -> Any:
        raise RuntimeError("the limit of locked memory")

    def full(*_: Any) -> Any:
        raise MemoryError("out of memory")

    if broken == "registration":
        monkeypatch.setattr(CudaDevice, "register", refuse)
    elif broken == "compiler":
        monkeypatch.setattr(type(load()), "kernel", lambda *_: None)
    elif broken == "table":
        monkeypatch.setattr(CudaStream, "table_of", full)
    else:
        monkeypatch.setattr(CudaStream, "allocate", full)
    state = {"large": torch.rand(5 * MIB, device="cuda")} | {
        str(n): torch.rand(n + 1, device="cuda") for n in range(300)
    }
    expected = on_host(state)
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(gpu_capture=mode)) as engine:
        for step in range(2):  # "auto" streams the first one
            engine.checkpoint(state, step=step).result(60)
        for tensor in state.values():
            tensor.zero_()
        engine.restore(state)
        assert not difference(expected, on_host(state))
        assert (engine.statistics().snapshots > 0) is (broken != "scratch" and mode != "stream")


def test_chunks_of_another_size_than_the_stores(tmp_path: Path) -> None:
    state = {"t": torch.rand(5 * MIB, device="cuda"), "s": torch.rand(100, device="cuda")}
    expected = on_host(state)
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(chunk_bytes=4 * MIB)) as engine:
        engine.checkpoint(state, step=0)
    for tensor in state.values():
        tensor.zero_()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(chunk_bytes=64 * 1024, host_memory=MIB)) as engine:
        engine.restore(state)
        assert not difference(expected, on_host(state))
