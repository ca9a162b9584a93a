"""Forks in the middle of saves, exits with saves in flight, devices that hang or are slow and uneven."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from pccheck_async import StorageOptions, SyncCheckpointEngine, load_sync
from pccheck_async.medium import Medium
from pccheck_async.medium.files import Files
from pccheck_async.testing import Access, StuckWriter, WrappingWriter
from pccheck_async.transfer.operations import Operations

T = TypeVar("T")
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.usefixtures("nothing_left_behind"),
    pytest.mark.filterwarnings("ignore:.*fork"),
]


class Items(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((100,), float(index))


def state_of(step: int, elements: int = 200_000) -> dict[str, Any]:
    return {"tensor": torch.arange(elements) * (step + 1), "step": step}


def is_whole(state: dict[str, Any]) -> bool:
    return bool(torch.equal(state["tensor"], state_of(state["step"], len(state["tensor"]))["tensor"]))


def test_workers_are_forked_in_the_middle_of_saves(tmp_path: Path, io: str) -> None:
    """Every epoch forks workers while checkpoints are copied, written and flushed."""
    epochs, forks = 60, 0
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=io, chunk_bytes=64 << 10), max_in_flight=3) as engine:  # type: ignore[arg-type]
        step = 0
        for epoch in range(epochs):
            for _ in range(3):
                pending = engine.checkpoint(state_of(step), step=step)
                step += 1
            loader = torch.utils.data.DataLoader(Items(), batch_size=4, num_workers=2)
            seen = sum(len(batch) for batch in loader)
            forks += 2
            assert seen == 40
            if epoch % 10 == 0:
                pending.result(60)
                found = load_sync(tmp_path)
                assert found["step"] == step - 1
                assert is_whole(found)
        engine.drain()
    assert load_sync(tmp_path)["step"] == step - 1
    print(f"\n{io}: {forks} workers forked beside {step} checkpoints")


EXITS = {
    "end": "",
    "sys.exit": "sys.exit(0)",
    "error": "raise ZeroDivisionError",
    "thread": "threading.Thread(target=lambda: time.sleep(0.01)).start()",
    "another thread saves": (
        "threading.Thread(target=lambda: [engine.checkpoint(state(n), step=n) for n in range(4, 8)]).start()"
    ),
    "terminated": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(20)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "os._exit": "os._exit(0)",
}

EXITING = """
import os, random, signal, sys, threading, time, torch
from pccheck_async import StorageOptions, SyncCheckpointEngine
def state(step):
    return {"tensor": torch.arange(2_000_000) * (step + 1), "step": step}
options = StorageOptions(io=sys.argv[2], chunk_bytes=1 << 20)
engine = SyncCheckpointEngine(sys.argv[1], max_in_flight=4, storage=options).open()
engine.checkpoint(state(0), step=0).result()
print("saved", flush=True)
for step in range(1, 4):
    engine.checkpoint(state(step), step=step)
time.sleep(float(sys.argv[3]))
"""


@pytest.mark.parametrize("how", EXITS)
def test_exits_with_saves_in_flight(tmp_path: Path, how: str, io: str) -> None:
    rng, steps, drained, orderly = random.Random(1), [], 0, how in ("end", "sys.exit", "error", "thread")
    for number in range(4):
        folder = tmp_path / str(number)
        program = textwrap.dedent(EXITING) + EXITS[how]
        arguments = [sys.executable, "-c", program, str(folder), io, str(rng.choice([0, rng.uniform(0, 0.02)]))]
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}
        ran = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False, env=env)
        assert "saved" in ran.stdout, ran.stderr
        assert "Fatal Python error" not in ran.stderr
        state = load_sync(folder)
        assert is_whole(state)
        steps.append(state["step"])
        if orderly:
            assert state["step"] == 3, ran.stderr
            drained += "checkpoint(s) in flight were drained" in ran.stderr
        shutil.rmtree(folder)
    assert drained or not orderly or how == "thread"  # else nothing was in flight; that thread may outlast all of it
    print(f"\n{io}, {how}: loads steps {steps}, {drained} times drained")


class Uneven(WrappingWriter):
    """A device on which everything takes anything from nothing to a long time."""

    def __init__(self, inner: Medium, rng: random.Random) -> None:
        super().__init__(inner)
        self._rng = rng

    async def perform(self, access: Access, call: Callable[[], Awaitable[T]]) -> T:
        await asyncio.sleep(self._rng.choice((0, 0, 0.001, 0.01, self._rng.expovariate(20))))
        result = await call()
        await asyncio.sleep(self._rng.choice((0, 0, 0.002)))
        return result


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_and_uneven_device(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": -1}

    def make(path: str, operations: Operations) -> Medium:
        return Uneven(Files(path, operations), rng)

    wants: dict[int, torch.Tensor] = {}
    storage = StorageOptions(io=make, chunk_bytes=16 << 10, host_memory=64 << 10)
    with SyncCheckpointEngine(tmp_path, max_in_flight=3, keep_last=2, interval=2, storage=storage) as engine:
        engine.attach(optimizer)
        for step in range(60):
            with engine.step(state, step) as this:
                state["step"] = step
                model(torch.rand(2, 200)).sum().backward()
                optimizer.step()
            if this.pending is not None:
                wants[step] = model.weight.detach().clone()
        engine.drain()
        statistics = engine.statistics()
        for info in engine.checkpoints():
            assert torch.equal(load_sync(tmp_path, step=info.step)["model"]["weight"], wants[info.step])
    assert statistics.failed == 0
    print(f"\n{statistics.durable} durable, {statistics.superseded} superseded, stall {statistics.stall_seconds:.2f} s")


@pytest.mark.parametrize("kind", ["write", "flush", "reserve", "replace"])
def test_a_device_that_hangs_for_thirty_seconds(tmp_path: Path, kind: str) -> None:
    """In mid-save, or while a store is made, since only that replaces a file."""
    made: list[StuckWriter] = []
    stuck: list[Access] = []

    def make(path: str, operations: Operations) -> Medium:
        made.append(StuckWriter(Files(path, operations), kinds=("replace",) if kind == "replace" else ()))
        return made[-1]

    def go_on() -> None:
        stuck.extend(made[0].stuck)
        made[0].release()

    timer = threading.Timer(30, go_on)
    timer.start()
    start = time.perf_counter()
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=make), max_in_flight=2) as engine:
        engine.checkpoint(state_of(0), step=0).result(60)
        made[0].hold(kind)
        pendings = [engine.checkpoint(state_of(step, 400_000), step=step) for step in range(1, 5)]
        steps = [pending.result(60).step for pending in pendings]
    timer.join()
    assert {access.kind for access in stuck} == {kind}
    assert max(steps) == 4
    assert is_whole(load_sync(tmp_path))
    print(f"\n{kind} hung: {steps} after {time.perf_counter() - start:.0f} s")
