"""Measuring: a row says what happened, a restore that differs is found, the kernel's figures mean what they say."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pccheck_async.bench import usage
from pccheck_async.bench.bits import differences, scribble
from pccheck_async.bench.measure import Result, Row, measure
from pccheck_async.bench.methods import Handle, Method, State
from pccheck_async.bench.methods.base import Done
from pccheck_async.bench.methods.torch_save import TorchSave, TorchSaveRename
from pccheck_async.bench.usage import PeakMemory, busy_seconds, dirty_bytes, evict, stored_bytes
from pccheck_async.bench.workloads import GPT, WORKLOADS, Digits, Raw, Sleeping, SlowDevice, Workload

MIB = 1 << 20


class Forgetful(TorchSave):
    """Restores all bits but one."""

    name = "forgetful"

    def load(self, into: State) -> int:
        step = super().load(into)
        into["t00002"].view(torch.uint8)[5] ^= 1
        return step


class Stale(TorchSave):
    """Saves every other time."""

    name = "stale"
    turn = 0

    def save(self, state: State, step: int) -> Handle:
        self.turn += 1
        return super().save(state, step) if self.turn % 2 else Done()


class Failing(TorchSave):
    name = "failing"

    def save(self, state: State, step: int) -> Handle:
        if step > 8:
            raise OSError("no more")
        return super().save(state, step)


class Absent(TorchSave):
    name = "absent"

    @classmethod
    def why_not(cls) -> str | None:
        return "not of this world"


def rows(result: Result) -> dict[str, Row]:
    return {row.method: row for row in result.rows}


@pytest.mark.slow
def test_a_row_for_every_method_and_what_went_wrong(tmp_path: Path) -> None:
    kinds: list[str | type[Method]] = [
        "pccheck",
        "pccheck overlapped",
        TorchSaveRename,
        Forgetful,
        Stale,
        Failing,
        Absent,
    ]
    result = measure(kinds, Sleeping(MIB, 7, 0.01), tmp_path, 2)
    found = rows(result)
    assert list(found) == [kind if isinstance(kind, str) else kind.name for kind in kinds]
    assert (result.workload, result.state_bytes, result.rounds, result.baseline) == ("sleeping", 1048572, 2, "pccheck")
    for name in ("pccheck", "pccheck overlapped", TorchSaveRename.name):
        row = found[name]
        assert (row.problem, row.verified) == ("", True)
        assert set(row.figures) == {"stall", "durable", "processor", "step_stall", "restore"}
        assert (len(row.samples), len(row.restores)) == (2, 2)
        assert 0 < row.figures["stall"].median <= row.figures["durable"].median
        assert row.stored_bytes >= result.state_bytes
    assert found["pccheck"].figures["durable"].ratio == 1
    assert found["pccheck"].dirty_bytes in (0, None)
    assert "differs in 1 places, t00002 " in found["forgetful"].problem
    assert found["forgetful"].verified is False
    assert found["stale"].verified is False
    assert "OSError: no more" in found["failing"].problem
    assert found["absent"].problem == "skipped: not of this world"
    assert found["absent"].figures == {}
    assert list(tmp_path.iterdir()) == []
    assert result.place.filesystem


def test_ratios_are_to_the_first_where_the_baseline_is_not_measured(tmp_path: Path) -> None:
    result = measure([TorchSave], Raw(4096, 2), tmp_path, 1)
    assert result.baseline == "torch.save"
    assert result.rows[0].figures["restore"].ratio == 1
    assert "step_stall" not in result.rows[0].figures  # a state that is not trained


def test_no_round_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one round"):
        measure(["pccheck"], Raw(4096, 2), tmp_path, 0)


@pytest.mark.slow
def test_a_slow_device_is_for_the_methods_that_can_be_given_one(tmp_path: Path) -> None:
    device = SlowDevice(per_stream=8 * MIB, total=8 * MIB)
    found = rows(measure(["pccheck", "torch.save"], Raw(MIB, 2), tmp_path, 1, device=device))
    assert found["pccheck"].problem == ""
    assert found["pccheck"].figures["durable"].median >= 1 / 8  # the device is never faster than it was told to be
    assert found["torch.save"].problem.startswith("skipped: torch.save writes to the filesystem by itself")


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: Raw(4096, 3), lambda: GPT(16, 1, 16, 2), lambda: Digits(4, 8)])
def test_a_step_changes_every_trained_tensor_and_a_twin_has_the_same_structure(make: Any) -> None:
    workload: Workload = make()
    before = {key: value.clone() for key, value in _tensors(workload.state()).items()}
    workload.step()
    after = _tensors(workload.state())
    same = [key for key in before if key != "rng.torch" and torch.equal(before[key], after[key])]
    # The key's bias has no gradient: it adds the same to every score, and the softmax does not see it.
    assert [key for key in same if "qkv.bias" not in key] == []
    twin = _tensors(workload.twin().state())
    assert {key: (value.shape, value.dtype) for key, value in twin.items()} == {
        key: (value.shape, value.dtype) for key, value in after.items()
    }
    assert workload.nbytes > 0


def _tensors(state: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return {path: state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {key: value for name, each in items for key, value in _tensors(each, f"{path}.{name}".lstrip(".")).items()}


def test_the_same_seed_trains_to_the_same_bits() -> None:
    runs = []
    for _ in range(2):
        workload = GPT(16, 1, 16, 2, seed=3)
        workload.step()
        runs.append(workload.losses)
    assert runs[0] == runs[1]
    assert len(runs[0]) == 2


def test_every_workload_has_its_name() -> None:
    assert set(WORKLOADS) == {"raw", "sleeping", "gpt", "digits"}


# -- bits


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        (torch.tensor([math.nan]), torch.tensor([math.nan]), []),
        (torch.tensor([0.0]), torch.tensor([-0.0]), ["x"]),
        (torch.zeros(2, 3), torch.zeros(3, 2), ["x"]),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), ["x"]),
        (torch.nn.Parameter(torch.ones(2)), torch.ones(2), []),
        (0.0, -0.0, ["x"]),
        (1, True, ["x (int and bool)"]),
        ([1, 2], [1, 3], ["x.1"]),
        ([1], (1,), ["x (list and tuple)"]),
        ([1], [1, 2], ["x (1 and 2 items)"]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, ["x (other keys)"]),
        (np.arange(3), np.arange(3), []),
        (np.arange(3), np.arange(3, dtype=np.int32), ["x"]),
    ],
)
def test_differences(one: Any, other: Any, found: list[str]) -> None:
    assert differences({"x": one}, {"x": other}) == found


def test_scribbling_spoils_every_tensor() -> None:
    state = {"a": torch.ones(3), "b": [torch.ones(2, dtype=torch.bool), {"c": torch.ones(4, 6)[:, ::2]}]}
    scribble(state)
    assert not any((tensor == 1).any() for tensor in _tensors(state).values())


# -- what the kernel says


def test_dirty_bytes_are_those_that_were_not_flushed(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        for _ in range(5):  # another process may flush everything at any moment
            file.seek(0)
            file.write(os.urandom(MIB))
            file.flush()
            if (dirty := dirty_bytes(tmp_path)) == MIB:
                break
        if dirty is None:
            pytest.skip("this kernel has no cachestat")
        assert dirty == MIB
        os.fsync(file.fileno())
        assert dirty_bytes(tmp_path) == 0
    assert stored_bytes(tmp_path) >= MIB


def test_what_was_evicted_is_read_from_the_device(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(MIB))
    evict(tmp_path)
    assert _resident(path) == 0
    path.read_bytes()
    assert _resident(path) == MIB


def _resident(path: Path) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
        at = ctypes.c_char.from_buffer(mapped)
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(at)), ctypes.c_size_t(len(mapped)), pages) == 0
        del at
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


_PEAK = """
import mmap, sys
from pccheck_async.bench.usage import PeakMemory
size = int(sys.argv[1])
with PeakMemory() as peak, mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
    memory.write(bytes(size))
    peak.look()
print(peak.nbytes)
"""


def test_peak_memory_sees_what_came_and_went() -> None:
    # In a process of its own: what earlier tests left may be given back meanwhile, and hide what came.
    size = 32 * MIB
    command = [sys.executable, "-c", _PEAK, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert abs(int(done.stdout) - size) < 8 * MIB


def test_a_sample_that_takes_long_undoes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, go_on = threading.Event(), threading.Event()

    def memory() -> int:
        if threading.current_thread().name == "slow":
            measured.set()
            assert go_on.wait(60)
            return 1
        return 100 if measured.is_set() else 0

    monkeypatch.setattr(usage, "_memory", memory)
    with PeakMemory(3600) as peak:
        slow = threading.Thread(target=peak.look, name="slow")
        slow.start()
        assert measured.wait(60)
        peak.look()
        go_on.set()
        slow.join()
        assert peak.nbytes == 100


def test_work_takes_processor_time() -> None:
    before, own = busy_seconds(), time.process_time()
    while time.process_time() < own + 0.5:
        pass
    assert busy_seconds() - before > 0.1
