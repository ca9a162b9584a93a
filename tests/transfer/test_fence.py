"""Steps that let devices wait for copies: what they queue comes after, and what is saved is the state before them.

The devices pretend (:mod:`tests.support.pretend_device`): while they are paused no capture ends, so a step that returns
did not wait for one; when they go on, everything that no wait holds up happens before the copies.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pccheck_async import CheckpointError, SyncCheckpointEngine, TornCaptureError, list_checkpoints, load_sync
from pccheck_async.engine import flight_of
from pccheck_async.state import HOST, Sources
from pccheck_async.state.leaves import RawSource
from pccheck_async.state.save import split
from pccheck_async.testing.probe import probe
from pccheck_async.transfer.copying import Fence
from pccheck_async.transfer.copying.snapshot import DeviceMode
from tests.support.pretend_device import Place, PretendDevice, PretendStream, keep_on
from tests.support.settings import engine_settings

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

KIB, MIB = 1 << 10, 1 << 20

WHOLE: dict[str, Any] = {"chunk_bytes": 512 * KIB, "host_memory": 8 * MIB}
"""Staging memory for the whole state, in more chunks than there are threads that wait for a paused device."""


class LaterOptimizer(torch.optim.Optimizer):
    """Keeps a moment and a count of steps for each parameter; what it changes on devices is queued there.

    Args:
        parameters: What to optimize.
        queue: Called with a tensor and what changes it.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], queue: Callable[[torch.Tensor, Callable[[], Any]], None]
    ) -> None:
        super().__init__(parameters, {})
        self._queue = queue
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"step": torch.zeros(()), "moment": torch.rand(parameter.shape)}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter, kept in self.state.items():
            kept["step"] += 1  # on the host, at once
            for tensor in (parameter, kept["moment"]):
                self._queue(tensor, partial(tensor.data.add_, 1.0))


class Training:
    """An engine, and a state on devices, with an optimizer that is attached."""

    def __init__(self, folder: Path, devices: list[PretendDevice], place: Place, **settings: Any) -> None:
        self.folder, self.devices, self.place = folder, devices, place
        knobs: dict[str, Any] = {"gpu_capture": "stream", "keep_last": 9} | WHOLE | settings
        self.engine = SyncCheckpointEngine(folder, **engine_settings(**knobs)).open()
        self.weights = [torch.rand(size).requires_grad_() for size in (300_000, 70_000, 200_000)]
        self.optimizer = LaterOptimizer(self.weights, self.queue)
        self.state: dict[str, Any] = {"weights": self.weights, "optimizer": self.optimizer, "step": 0}
        self.engine.attach(self.optimizer)

    def queue(self, tensor: torch.Tensor, work: Callable[[], Any]) -> None:
        index = self.place(tensor.data_ptr(), tensor.nbytes)
        if index == HOST:
            work()
        else:
            self.devices[index].training.later(work)

    def use_another_stream(self) -> None:
        for device in self.devices:
            device.training = PretendStream(device)

    def pause(self) -> None:
        for device in self.devices:
            device.pause()

    def resume(self) -> None:
        for device in self.devices:
            device.resume()

    def resume_soon(self) -> None:
        threading.Timer(0.05, self.resume).start()

    def checkpoint(self, step: int) -> tuple[Any, dict[str, torch.Tensor]]:
        """Start to capture; return the checkpoint, and what it has to hold."""
        want = {name: tensor.detach().clone() for name, tensor in self.tensors()}
        return self.engine.checkpoint(self.state, step=step, overlap=True), want

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, weight in enumerate(self.weights):
            yield f"weight {number}", weight
            for name, kept in self.optimizer.state[weight].items():
                yield f"{name} {number}", kept

    def check(self, step: int, want: dict[str, torch.Tensor]) -> None:
        """Compare what was saved."""
        found = load_sync(self.folder, step=step)
        for number, weight in enumerate(found["weights"]):
            assert torch.equal(weight, want[f"weight {number}"])
            for name, kept in found["optimizer"]["state"][number].items():
                assert torch.equal(kept, want[f"{name} {number}"]), name

    def finish(self) -> None:
        for device in self.devices:
            device.training.synchronize()


def by_size(address: int, nbytes: int) -> int:
    return 0 if nbytes >= 64 else HOST


@contextmanager
def training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: Place = by_size, count: int = 1, **settings: Any
) -> Iterator[Training]:
    devices = [PretendDevice(index, 64 * MIB) for index in range(count)]
    for device in devices:
        device.registered = devices[0].registered  # locked for one, locked for all
    keep_on(monkeypatch, devices, place)
    it = Training(folder, devices, place, **settings)
    try:
        yield it
    finally:
        it.resume()
        it.engine.close()
    for device in devices:
        assert not device.faults
        assert device.idle()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stream", "snapshot"])
def test_a_step_does_not_wait_for_copies_that_are_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: DeviceMode
) -> None:
    with training(tmp_path, monkeypatch, gpu_capture=mode) as it:
        for step in range(3):
            it.pause()
            pending, want = it.checkpoint(step)
            it.optimizer.step()
            assert not flight_of(pending).is_captured
            it.resume()
            pending.result(60)
            it.check(step, want)
            it.finish()
            assert torch.equal(it.weights[0], want["weight 0"] + 1)  # and the step was made
        assert it.engine.statistics().guard_fences == 3


def test_every_device_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def place(address: int, nbytes: int) -> int:
        return HOST if nbytes < 64 else int(nbytes < 1 * MIB)

    with training(tmp_path, monkeypatch, place, count=2) as it:
        it.pause()
        pending, want = it.checkpoint(0)
        it.optimizer.step()
        assert not flight_of(pending).is_captured
        it.resume()
        pending.result(60)
        it.check(0, want)
        assert it.engine.statistics().guard_fences == 1


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("attached", [True, False])
def test_steps_on_other_streams_wait_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attached: bool, refused: bool
) -> None:
    """The first step let its own stream wait, and no other; where that stream cannot wait, the host does."""
    with training(tmp_path, monkeypatch) as it:
        first, second = LaterOptimizer([torch.zeros(1)], it.queue), it.optimizer
        it.engine.attach(first)
        other = LaterOptimizer(it.weights, it.queue)
        it.pause()
        pending, want = it.checkpoint(0)
        first.step()
        it.use_another_stream()
        it.devices[0].refuse_to_wait = refused
        if refused:
            it.resume_soon()
        if attached:
            second.step()
        else:
            other.step()
        assert flight_of(pending).is_captured == refused
        it.resume()
        pending.result(60)
        it.check(0, want)
        assert it.engine.statistics().guard_fences == 1


@pytest.mark.slow
def test_the_host_waits_for_what_is_not_queued_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging memory is smaller than the state: until it is free again the rest is not even queued."""
    with training(tmp_path, monkeypatch, chunk_bytes=256 * KIB, host_memory=512 * KIB) as it:
        for step in range(3):
            it.pause()
            pending, want = it.checkpoint(step)
            it.resume_soon()
            it.optimizer.step()
            pending.result(60)
            it.check(step, want)
            it.finish()


@pytest.mark.parametrize("refused", ["to register", "to wait"])
def test_the_host_waits_where_devices_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """Copies to other memory block, and a stream that is recorded as a graph waits for nothing outside it."""
    with training(tmp_path, monkeypatch) as it:
        it.devices[0].refuse_to_register = refused == "to register"
        it.devices[0].refuse_to_wait = refused == "to wait"
        it.pause()
        pending, want = it.checkpoint(0)
        it.resume_soon()
        it.optimizer.step()
        assert flight_of(pending).is_captured
        pending.result(60)
        it.check(0, want)
        assert it.engine.statistics().guard_fences == 0


def test_the_host_waits_for_what_is_captured_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter on the host, too large to be copied before the call returns, in one chunk with others on a device."""

    def place(address: int, nbytes: int) -> int:
        return HOST if nbytes < 64 or nbytes > 1 * MIB else 0

    with training(tmp_path, monkeypatch, place, chunk_bytes=8 * MIB) as it:
        it.pause()
        pending, want = it.checkpoint(0)
        it.resume_soon()
        it.optimizer.step()
        pending.result(60)
        it.check(0, want)


def test_whoever_waits_for_captures_waits_for_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any code may change the state after that, also such that no device queues."""
    with training(tmp_path, monkeypatch) as it:
        it.pause()
        pending, want = it.checkpoint(0)
        it.optimizer.step()
        assert not flight_of(pending).is_captured
        it.resume_soon()
        it.engine.wait_captured()
        assert flight_of(pending).is_captured
        for weight in it.weights:
            weight.detach().zero_()
        pending.result(60)
        it.check(0, want)


def test_what_changed_before_the_step_is_still_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with training(tmp_path, monkeypatch) as it:
        it.pause()
        pending, _ = it.checkpoint(0)
        it.weights[1].detach().add_(1.0)
        it.optimizer.step()
        it.resume()
        with pytest.raises(TornCaptureError, match=r"weights\.1 changed before its capture was waited for"):
            pending.result(60)
    assert list_checkpoints(tmp_path) == []


def test_a_capture_that_fails_before_all_is_queued_has_no_fence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: int) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with training(tmp_path, monkeypatch) as it:
        it.engine.checkpoint(it.state, step=0).result(60)
        with monkeypatch.context() as broken:
            broken.setattr(it.devices[0].streams[1], "to_host", fail)  # one lane of two
            pending, _ = it.checkpoint(1)
            it.optimizer.step()
            assert flight_of(pending).is_captured
            with pytest.raises(CheckpointError, match="illegal memory access"):
                pending.result(60)
        assert it.engine.statistics().guard_fences == 0
        it.finish()
        pending, want = it.checkpoint(2)
        it.optimizer.step()
        pending.result(60)
        it.check(2, want)


def test_a_capture_that_is_not_queued_in_time_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with training(tmp_path, monkeypatch, chunk_bytes=256 * KIB, host_memory=512 * KIB, max_stall=0.01) as it:
        it.pause()
        pending, _ = it.checkpoint(0)
        scheduler = probe(it.engine).scheduler
        stop_capture = scheduler.stop_capture

        async def stop_and_resume(*arguments: Any) -> bool:
            stopping = asyncio.ensure_future(stop_capture(*arguments))
            await asyncio.sleep(0)  # it has begun
            it.resume()
            return await stopping

        monkeypatch.setattr(scheduler, "stop_capture", stop_and_resume)
        it.optimizer.step()
        with pytest.raises(CheckpointError, match="abandoned"):
            pending.result(60)
        assert it.engine.statistics().abandoned == 1
        assert it.engine.statistics().guard_fences == 0


def test_fences_are_joined_by_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one stream the last event is enough; of several, one of each."""
    device, other = PretendDevice(0), PretendDevice(1)
    done: list[str] = []
    fence = Fence({})
    lanes = {"a": device.stream(), "b": device.stream(), "c": other.stream()}
    for name in "abacb":
        lanes[name].later(partial(done.append, name))
        fence = fence.before(Fence({name: (other if name == "c" else device, lanes[name].record())}))
    lanes["a"].later(partial(done.append, "later"))
    assert fence.order_after_copies()
    assert [len(each.training.queue) for each in (device, other)] == [2, 1]
    device.training.synchronize()
    other.training.synchronize()
    assert sorted(done) == ["a", "a", "b", "b", "c"]


def flat(address: int, nbytes: int, *_: Any) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


@pytest.fixture
def _host_as_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let memory of the host pass for a device's."""
    monkeypatch.setattr(split, "device_bytes", flat)


@pytest.mark.usefixtures("_host_as_a_device")
def test_a_copy_on_a_device_keeps_what_it_came_from() -> None:
    """Its copy is queued on the current stream; nobody may get memory of another stream before that is over."""
    storage = torch.arange(100.0).untyped_storage()
    alive = weakref.ref(storage)
    sources = Sources([RawSource(storage.data_ptr(), 400, storage, 0)])
    copied, left = split.copy_small(sources, np.ones(1, np.bool_))
    assert not left.any()
    sources.release()
    del storage, sources
    gc.collect()
    assert alive() is not None
    copied.release()
    gc.collect()
    assert alive() is None


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch would launch on a device: views are none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("_host_as_a_device")
def test_small_tensors_of_a_device_are_copied_in_one_piece() -> None:
    """However many there are: an operation takes some microseconds of the training thread, and of the device."""
    tensors = [torch.arange(length, dtype=torch.uint8) for length in (1, 4, 15, 16, 17, 64, 100)]
    sources = Sources([RawSource(each.data_ptr(), each.nbytes, each, 0) for each in tensors])
    with Operations() as seen:
        copied, _ = split.copy_small(sources, np.ones(len(tensors), np.bool_))
    assert len(seen.names) == 2, seen.names
    for tensor, address in zip(tensors, copied.addresses.tolist(), strict=True):
        assert address % 16 == copied.addresses[0] % 16
        assert torch.equal(flat(address, tensor.nbytes), tensor)
