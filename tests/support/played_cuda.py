"""CUDA, played by the host: what CuPy, torch.cuda and NVIDIA's bindings are asked for happens at once, to host memory.

It refuses what hardware would not forgive: work that does not go to the engine's current stream, host memory that is
registered twice, and memory or registrations asked for by a thread that would end the recording of a graph by that.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from pccheck_async.transfer.copying.cuda_device import choose_runtime

Library = Literal["cupy", "cupy without a compiler", "torch"]


class PlayedStream:
    device = torch.device("cpu")

    def __init__(self, handle: int = 0, device: int = 0) -> None:
        self.cuda_stream = handle or id(self)

    def wait_event(self, event: object) -> None:
        assert isinstance(event, PlayedEvent)

    def synchronize(self) -> None: ...


class PlayedEvent:
    def __init__(self, enable_timing: bool, blocking: bool) -> None:
        assert blocking

    def record(self, stream: PlayedStream) -> None:
        assert isinstance(stream, PlayedStream)

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: object) -> float:
        return 1.0


class PlayedCuda(threading.local):
    """Threads differ in their current stream, and in whether they said that they record nothing."""

    relaxed = False
    current = 0

    def __init__(self, shared: SimpleNamespace) -> None:
        self.it = shared

    def relax(self, mode: int) -> None:
        assert mode == 2
        self.relaxed = True

    def set_stream(self, stream: PlayedStream) -> None:
        self.current = stream.cuda_stream

    def new_stream(self, *_: Any, **options: bool) -> PlayedStream:
        self.it.streams.append(PlayedStream())
        return self.it.streams[-1]  # type: ignore[no-any-return]

    def on(self, handle: int) -> None:
        assert handle == self.current
        assert handle in [stream.cuda_stream for stream in self.it.streams]

    def copy(self, into: int, source: int, nbytes: int, kind: int, handle: int) -> None:
        self.on(handle)
        assert kind == 4
        ctypes.memmove(into, source, nbytes)

    def zero(self, address: int, value: int, nbytes: int, handle: int) -> None:
        self.on(handle)
        ctypes.memset(address, value, nbytes)

    def register(self, address: int, nbytes: int, flags: int) -> int:
        assert self.relaxed
        assert flags == 1
        assert address not in self.it.registered
        if not self.it.refuse_to_register:
            self.it.registered[address] = nbytes
        return 2 if self.it.refuse_to_register else 0


@contextmanager
def played(library: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Let there be CUDA and one of the libraries. Returns what tests look at."""
    it = SimpleNamespace(registered={}, refuse_to_register=False, recorded=0, streams=[], gathered=0)
    cuda = PlayedCuda(it)
    empty, as_tensor = torch.empty, torch.as_tensor

    def unregister(address: int) -> int:
        del it.registered[address]
        return 0

    def played_empty(*size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory or "device" in options:
            cuda.on(cuda.current)
            assert cuda.relaxed
        return empty(*size, **options)

    def played_as_tensor(data: Any, **options: Any) -> torch.Tensor:
        if not hasattr(data, "__cuda_array_interface__"):
            return as_tensor(data, **options)
        cuda.on(cuda.current)
        address, _ = data.__cuda_array_interface__["data"]
        assert not any(low <= address < low + nbytes for low, nbytes in it.registered.items())  # that is the host's
        return torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=data.__cuda_array_interface__)))

    functions: dict[str, Any] = {
        "device": lambda _: nullcontext(),
        "set_device": lambda _: None,
        "set_stream": cuda.set_stream,
        "is_current_stream_capturing": lambda: it.recorded == cuda.current != 0,
        "current_stream": lambda _: PlayedStream(),
        "mem_get_info": lambda _: (64 << 20, 64 << 20),
        "memory_reserved": lambda _: 0,
        "max_memory_allocated": lambda _: 0,
        "Stream": cuda.new_stream,
        "ExternalStream": PlayedStream,
        "Event": PlayedEvent,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=cuda.register, cudaHostUnregister=unregister, cudaGetErrorString=lambda _: "played"
        ),
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch, "empty", played_empty)
    monkeypatch.setattr(torch, "as_tensor", played_as_tensor)
    modes = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=cuda.relax, CUstreamCaptureMode=modes)
    modules: dict[str, Any] = {"cuda": SimpleNamespace(), "cuda.bindings": SimpleNamespace(driver=driver)}
    if library != "torch":
        modules["cupy"] = _cupy(cuda, unregister, compiles=library == "cupy")
        modules["cupy.cuda"] = modules["cupy"].cuda
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with using("torch" if library == "torch" else "cupy", monkeypatch):
        yield it


@contextmanager
def using(library: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Copy with one of the libraries; tests after that choose anew."""
    if library == "torch":
        monkeypatch.setitem(sys.modules, "cupy", None)
    else:
        pytest.importorskip(library)

    def forget() -> None:
        choose_runtime.cache_clear()
        sys.modules.pop("pccheck_async.transfer.copying.cupy_runtime", None)

    forget()
    try:
        yield
    finally:
        forget()


def _cupy(cuda: PlayedCuda, unregister: Any, *, compiles: bool) -> SimpleNamespace:
    entered: list[int] = []

    class Stream:
        def __init__(self, non_blocking: bool) -> None:
            assert non_blocking
            self.ptr = cuda.new_stream().cuda_stream

        def __enter__(self) -> None:
            entered.append(self.ptr)

        def __exit__(self, *_: object) -> None:
            entered.pop()

    class RawKernel:
        def __init__(self, source: str, name: str) -> None:
            assert name in source

        @property
        def num_regs(self) -> int:
            if not compiles:
                raise RuntimeError("no NVRTC")
            return 32

        def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[np.uint64]) -> None:
            assert block == (256,)
            table = np.ctypeslib.as_array((ctypes.c_uint64 * (3 * grid[0])).from_address(int(arguments[0])))
            for row in table.reshape(-1, 3).tolist():
                cuda.copy(row[0], row[1], row[2], 4, entered[-1])
            cuda.it.gathered += grid[0]

    class CUDARuntimeError(RuntimeError):
        pass

    def register(*arguments: int) -> None:
        if cuda.register(*arguments):
            raise CUDARuntimeError("played")

    functions = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError, getDeviceCount=lambda: 1, setDevice=lambda _: None, memcpyDefault=4,
        memcpyAsync=cuda.copy, memsetAsync=cuda.zero, hostRegister=register, hostUnregister=unregister,
    )  # fmt: skip
    return SimpleNamespace(RawKernel=RawKernel, cuda=SimpleNamespace(runtime=functions, Stream=Stream))
