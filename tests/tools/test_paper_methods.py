"""The methods of the benchmarks: bit for bit what was saved, and each of their flags proven by what happens."""

from __future__ import annotations

import importlib
import os
import random
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from examples.paper.lab.bits import differences, scribble
from examples.paper.lab.methods import CLUSTERING, METHODS, Method, State, UnsupportedError, find_method
from pccheck_async import RNGState
from tests.support.children import end, fork, in_child
from tests.support.loop_devices import unmount

pytestmark = [pytest.mark.campaign, pytest.mark.filterwarnings("ignore")]  # the peers use what torch deprecates

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
REFUSED = {
    "safetensors + fsync + rename": {torch.complex128},
    "torchsnapshot": {torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2},
}
REFUSED["torchsnapshot async"] = REFUSED["torchsnapshot"]
SPAWNING = {"dcp.async_save process", "torch_checkpointing"}
"""Each life of these starts another Python, which imports torch."""
KILLS, KILLS_OF_SPAWNING, MOST_KILLS = 5, 2, 150
"""How often a method that is atomic is killed, and at most one that is not, until it left nothing whole."""
IMPORTED = {
    "DeepSpeed": "deepspeed.io",
    "Lightning": "lightning.pytorch.plugins.io",
    "dcp.async_save": "torch.distributed.checkpoint.state_dict_saver",
    "safetensors": "safetensors.torch",
    "torch_checkpointing": "torch_checkpointing",
    "torchsnapshot": "torchsnapshot",
}
"""By how a method's name begins: what its children do not have to import, each for itself."""
MIB = 1 << 20


@pytest.fixture(params=[*METHODS, "pccheck mapped", "shelf reassigned", "shelf in place"])
def kind(request: pytest.FixtureRequest) -> type[Method]:
    method = (METHODS | CLUSTERING)[request.param]
    reason = method.why_not()
    if reason is not None:
        pytest.skip(reason)
    for beginning, module in IMPORTED.items():
        if method.name.startswith(beginning):
            importlib.import_module(module)
    return method


def save(method: Method, state: State, step: int) -> None:
    handle = method.save(state, step)
    handle.captured()
    handle.wait()
    method.tidy()


def bits(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Any bits at all: NaNs with a payload and subnormal numbers too."""
    generator = torch.Generator().manual_seed(seed)
    most = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, most, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def test_every_dtype_comes_back_bit_for_bit(kind: type[Method], tmp_path: Path) -> None:
    refused = in_child(lambda: refused_dtypes(kind, tmp_path))
    assert set(refused) == {str(dtype) for dtype in REFUSED.get(kind.name, set())}


def refused_dtypes(kind: type[Method], folder: Path) -> list[str]:
    refused = []
    with kind(folder) as method:
        for step, dtype in enumerate(DTYPES):
            state: State = {
                "flat": bits(dtype, 64, step),
                "nested": {"matrix": bits(dtype, 24, step + 1).reshape(4, 6)},
            }
            into: State = {"flat": bits(dtype, 64, 100), "nested": {"matrix": bits(dtype, 24, 101).reshape(4, 6)}}
            matrix: Any = into["nested"]
            place = matrix["matrix"].data_ptr()
            try:
                save(method, state, step)
            except Exception:  # noqa: BLE001 - each peer has errors of its own
                refused.append(str(dtype))
                continue
            assert method.load(into) == step
            assert differences(state, into) == []
            assert matrix["matrix"].data_ptr() == place
    return refused


def training_state(seed: int) -> State:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100 + seed)
    for _ in range(1 + seed):
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.randn(3, 1, 8, 8)).square().mean())
        optimizer.step()
        scheduler.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": RNGState().state_dict(),
        "plain": {"epoch": 3 + seed, "best": 0.1 * seed, "name": f"run {seed}", "done": seed == 1, "tag": None},
    }


def test_resumable_means_that_all_of_a_training_state_comes_back(kind: type[Method], tmp_path: Path) -> None:
    assert in_child(lambda: resumes(kind, tmp_path)) == kind.resumable


def resumes(kind: type[Method], folder: Path) -> bool:
    state, into = training_state(1), training_state(0)
    assert len(differences(state, into)) > 20
    try:
        with kind(folder) as method:
            save(method, state, 7)
    except UnsupportedError:
        return False
    try:
        with kind(folder) as method:
            return method.load(into) == 7 and differences(state, into) == []
    except Exception:  # noqa: BLE001 - torchsnapshot refuses to unpickle the arrays that it pickled
        return False


# -- what a power failure leaves


@contextmanager
def mounted(image: Path, at: Path) -> Iterator[Path]:
    at.mkdir(exist_ok=True)
    # The journal is not committed by the clock, so nothing becomes durable but by being asked for.
    command = ["mount", "-o", "loop,commit=300", str(image), str(at)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no loop device can be mounted here")
    try:
        yield at
    finally:
        unmount(at)


@pytest.mark.root
def test_durable_means_that_the_device_has_it_when_wait_returns(kind: type[Method], tmp_path: Path) -> None:
    """The device is a file, copied at that moment: what the page cache or the journal still hold is not in it.

    It has no cache of its own, so a method that wrote past the page cache and never flushed would pass.
    """
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        pytest.skip("needs root and mkfs.ext4 for a loop device")
    image, after = tmp_path / "image", tmp_path / "after"
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    with mounted(image, tmp_path / "mount") as place:
        in_child(lambda: save_and_copy(kind, place / "run", image, after))
    found = []
    for step in (1, 2):
        with mounted(after.with_suffix(f".{step}"), tmp_path / "again") as place:
            found.append(loaded(kind, place / "run", MIB))
    assert (found == [1, 2]) == kind.durable, f"after saving steps 1 and 2 the device has {found}"


def save_and_copy(kind: type[Method], folder: Path, image: Path, after: Path) -> None:
    with kind(folder) as method:
        for step in (1, 2):
            save(method, state_of(step, MIB), step)
            subprocess.run(["cp", "--sparse=always", image, after.with_suffix(f".{step}")], check=True)


def state_of(step: int, nbytes: int) -> State:
    """Every byte follows from the step."""
    half = torch.arange(nbytes // 16, dtype=torch.int64).mul_(step + 1)
    return {"one": half, "two": {"other": half + step}}


def loaded(kind: type[Method], folder: Path, nbytes: int) -> int | None:
    """The step of the newest checkpoint; None where there is no whole one."""
    found: int | None = in_child(lambda: _loaded(kind, folder, nbytes))
    return found


def _loaded(kind: type[Method], folder: Path, nbytes: int) -> int | None:
    into = state_of(0, nbytes)
    scribble(into)
    try:
        with kind(folder) as method:
            step = method.load(into)
    except Exception:  # noqa: BLE001 - each peer has errors of its own, and torn files have many
        return None
    return None if differences(state_of(step, nbytes), into) else step


# -- what a kill leaves


def test_atomic_means_that_a_kill_at_any_moment_leaves_a_whole_checkpoint(kind: type[Method], tmp_path: Path) -> None:
    chance = random.Random(0)
    tries = MOST_KILLS if not kind.atomic else KILLS_OF_SPAWNING if kind.name in SPAWNING else KILLS
    whole = True
    for number in range(tries):
        folder = tmp_path / str(number)
        acknowledged = saved_until_killed(kind, folder, 4 * MIB, chance)
        step = loaded(kind, folder, 4 * MIB)
        whole = step is not None and step >= acknowledged
        if not whole:
            break
        shutil.rmtree(folder)
    assert whole == kind.atomic, f"after kill {number + 1}: loaded {step}, acknowledged {acknowledged}"


def saved_until_killed(kind: type[Method], folder: Path, nbytes: int, chance: random.Random) -> int:
    """Save step after step in a forked process, kill it and its descendants, and return the last acknowledged step."""
    reader, writer = os.pipe()

    def live() -> None:
        method = kind(folder)
        for step in range(1, 10_000):
            save(method, state_of(step, nbytes), step)
            os.write(writer, step.to_bytes(4, "little"))

    child = fork(live)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], 60)
        assert ready, "the first save did not end"
        _wait_for_changes(folder, chance.randint(1, 8), _names if chance.random() < 0.5 else _look)
        time.sleep(chance.choice([0, chance.uniform(0, 0.005)]))
    finally:
        end(child)
        steps = os.read(reader, 1 << 20)
        os.close(reader)
    assert len(steps) >= 4, "the process died by itself"
    return int.from_bytes(steps[-4:], "little")


def _wait_for_changes(folder: Path, count: int, look: Callable[[Path], list[Any]]) -> None:
    """Wait until a folder looked different so often: a save is in the middle of something then."""
    before = look(folder)
    deadline = time.monotonic() + 0.3
    while count and time.monotonic() < deadline:  # some methods write over the same files for ever
        now = look(folder)
        if now != before:
            before, count = now, count - 1


def _names(folder: Path) -> list[Any]:
    return [each[0] for each in _look(folder)]


def _look(folder: Path) -> list[Any]:
    try:
        facts = [(path, path.stat()) for path in folder.rglob("*")]
    except OSError:  # deleted or renamed meanwhile
        return [(time.monotonic(),)]
    return [(path, fact.st_size, fact.st_mtime_ns) for path, fact in facts]


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(ValueError, match=r"no method 'pickle'; there are: pccheck, "):
        find_method("pickle")
