"""``pccheck bench``: it measures for real at small sizes, checks what it loads, refuses early, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from examples.paper.lab.medians import median_interval
from pccheck_async import SyncCheckpointEngine, load_sync
from pccheck_async.bench import METHODS, NoRoomError, UnknownMethodError, as_json, compare, find_methods, table
from pccheck_async.bench.machine import busy_seconds, survey
from pccheck_async.bench.methods import PCcheck, Tensors, TorchSave
from pccheck_async.bench.raw_disk import RawDisk, RawLimit, Way, slot_file, ways
from pccheck_async.bench.report import quartiles, ratio
from pccheck_async.bench.rounds import Outcome, RoundComparison, RoundSample
from pccheck_async.cli import app
from tests.support.warm import start_warm

KIB, MIB = 1 << 10, 1 << 20
HERE = [name for name, kind in METHODS.items() if kind.why_not() is None]


def bench(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.mark.slow
def test_every_method_that_is_installed_is_measured_and_verified(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    disk, out = tmp_path / "disk", tmp_path / "out.json"
    disk.mkdir()
    done = bench(disk, "--size=1MiB", "--rounds=2", "--json", out, "--plot", tmp_path / "out.png")
    assert done.exit_code == 0, done.output
    assert list(disk.iterdir()) == []
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    found = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert [row["method"] for row in found["methods"]] == HERE
    assert {"torch", "dcp", "dcp-async"} <= set(HERE)
    assert (found["bytes"], found["rounds"]) == (MIB, 2)
    for row in found["methods"]:
        assert row["problem"] is None
        for figure in ("stall", "durable", "processor", "load"):
            assert len(row[figure]["samples"]) == 2
        pairs = zip(row["stall"]["samples"], row["durable"]["samples"], strict=True)
        assert all(0 < stall <= durable for stall, durable in pairs)
        assert row["method"] in done.output
    assert found["methods"][0]["ratio_to_pccheck"]["durable"] == 1
    if found["place"]["direct"].startswith("yes"):
        assert found["disk"]["durable"]["median"] > 0
        assert "the disk itself" in done.output


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", [name for name in HERE if name != "pccheck"])
def test_what_is_durable_was_flushed_after_its_last_byte(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = dict[int, int]()  # sizes by inode: names change
    fsync = os.fsync

    def note(fd: int) -> None:
        fsync(fd)
        flushed[os.fstat(fd).st_ino] = os.fstat(fd).st_size

    monkeypatch.setattr(os, "fsync", note)
    method = METHODS[name](tmp_path / name)
    method.save({"one": torch.ones(8)}, 1)()  # DCP's `.metadata` of so few tensors fits into the buffer of its file
    method.close()
    paths = [method.folder, *method.folder.rglob("*")]
    assert {path: flushed.get(path.stat().st_ino) for path in paths} == {path: path.stat().st_size for path in paths}


def test_against_chooses_methods_and_pccheck_is_always_among_them() -> None:
    assert [kind.name for kind in find_methods(["torch", "torch"])] == ["pccheck", "torch"]
    assert [kind.name for kind in find_methods([])] == HERE


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--against=torhc"], "no method 'torhc'; did you mean torch?"),
        (["--against=torch,pickle"], "There are: pccheck, torch, safetensors"),
        (["--size=1kB"], "--size is at least 65536 bytes"),
        (["--json=missing/out.json"], "--json: there is no folder"),
        (["--json=."], "--json: . is a folder"),
        (["--plot=missing/out.png"], "--plot: there is no folder"),
        (["--plot=out.jpeg2"], "is not named .png, .pdf or .svg"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_written(
    tmp_path: Path, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = bench(tmp_path, "--size=64KiB", *arguments)
    assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert said in done.output.replace("\n", " ")


def test_what_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = bench(tmp_path / "missing")
    assert (done.exit_code, "there is no folder" in done.output) == (2, True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = bench(tmp_path, "--plot", tmp_path / "a.png", "--against=torch")
    assert (done.exit_code, "pip install matplotlib" in done.output) == (2, True)
    monkeypatch.setattr("pccheck_async.bench.methods.find_spec", lambda name: None)
    with pytest.raises(UnknownMethodError, match="pip install safetensors"):
        find_methods(["safetensors"])
    assert list(tmp_path.iterdir()) == []


def test_room_is_asked_for_first(tmp_path: Path) -> None:
    with pytest.raises(NoRoomError, match="take a smaller --size"):
        compare([PCcheck], tmp_path, 1 << 60, 1)
    assert list(tmp_path.iterdir()) == []
    done = bench(tmp_path, "--size=1000TB", "--against=torch")
    assert (done.exit_code, "pccheck, torch need" in done.output) == (1, True)


class Forgetful(TorchSave):
    """Loads all bits but one."""

    name = "forgetful"

    def load(self, into: Tensors) -> int:
        step = super().load(into)
        into["t00"][0] += 1
        return step


class Stale(TorchSave):
    """Loads the right bits under a wrong step."""

    name = "stale"

    def load(self, into: Tensors) -> int:
        return super().load(into) - 1


class Failing(TorchSave):
    """Fails in its fourth save, the first that counts."""

    name = "failing"
    saves = 0

    def save(self, tensors: Tensors, step: int) -> Any:
        self.saves += 1
        if self.saves == 4:
            raise OSError("no more")
        return super().save(tensors, step)


@pytest.mark.slow
def test_a_method_that_fails_or_loads_something_else_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compare([PCcheck, Forgetful, Stale, Failing], tmp_path, 64 * KIB, 1)
    ours, forgetful, stale, failing = found.outcomes
    assert (ours.problem, len(ours.samples)) == ("", 1)
    assert "1 of 16 tensors differ" in forgetful.problem
    assert "is not the saved one: step" in stale.problem
    assert failing.problem == "OSError: no more"
    assert list(tmp_path.iterdir()) == []
    assert [row["durable"] is None for row in json.loads(as_json(found))["methods"]] == [False, True, True, True]
    monkeypatch.setitem(METHODS, "failing", Failing)
    done = bench(tmp_path, "--size=64KiB", "--rounds=1", "--against=failing")
    assert (done.exit_code, "failing failed: OSError: no more" in done.output) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_removes_what_it_wrote(tmp_path: Path, number: signal.Signals, status: int) -> None:
    command = ["-m", "pccheck_async", "bench", tmp_path, "--size=1MiB", "--rounds=1000", "--against=torch"]
    with start_warm(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob("*/torch/checkpoint.pt")):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        output = process.communicate(timeout=300)[0]
    assert process.returncode == status, output
    assert list(tmp_path.iterdir()) == []


def outcome(name: str, durable: list[float]) -> Outcome:
    return Outcome(name, [RoundSample(0.001, seconds, 0.0, 0.1) for seconds in durable])


def test_ratios_are_taken_round_by_round(tmp_path: Path) -> None:
    ours, other = outcome("pccheck", [1, 10, 1]), outcome("torch", [2, 20, 3])
    assert ratio(other, ours, "durable") == 2
    assert ratio(other, ours, "processor") is None  # of nothing there is no multiple
    assert ratio(outcome("dcp", [1.0]), ours, "durable") is None
    found = RoundComparison(survey(tmp_path), MIB, 3, [ours, other])
    assert json.loads(as_json(found))["methods"][1]["ratio_to_pccheck"]["processor"] is None
    for seconds, shown in ((1e-6, "too short"), (0.02, "too short"), (0.1, "102.40")):
        one = Outcome("pccheck", [RoundSample(0.001, 1.0, seconds, 0.1)])
        assert [*table(RoundComparison(survey(tmp_path), MIB, 1, [one])).columns[-1].cells] == [shown]
    assert [list(column.cells)[:2] for column in table(found).columns][:1] == [["pccheck", "torch"]]


def test_medians() -> None:
    assert quartiles([3.0]) == (3, 3, 3)
    assert quartiles([1, 2, 3, 4, 5]) == (2, 3, 4)
    middle, low, high = median_interval([1, 2, 3, 4, 100])
    assert (middle, statistics.median([1, 2, 3, 4, 100])) == (3, 3)
    assert 1 <= low <= middle <= high <= 100


class Disk(RawDisk):
    """Takes as long as it is told: a table instead of a clock."""

    def __init__(self, seconds: dict[str, list[float]]) -> None:
        super().__init__(4096)
        self.left = seconds

    def seconds(self, path: Path, way: Way, *, write: bool) -> float:
        return self.left[way.name].pop(0)


def test_the_limit_is_that_of_the_way_with_the_smallest_median(tmp_path: Path) -> None:
    names = [way.name for way in ways()]
    seconds = {name: [10.0 + at, 1.0 if at == 3 else 10.0 + at, 10, 10] for at, name in enumerate(names)}
    seconds[names[2]] = [3.0, 3.0, 5.0, 1.0]
    limit = RawLimit(Disk(seconds), write=True)
    for _ in range(4):
        limit.measure(tmp_path)
    assert limit.way.name == names[2]
    assert limit.between() == [3, 4, 3]
    assert sorted(len(left) for left in seconds.values()) == [0] * 3 + [2] * (len(names) - 3)


@pytest.mark.parametrize(
    ("write", "files", "seconds", "limits"),
    [
        (True, "ababa", [1, 2, 3, 4, 5], [2, 3, 4, 4]),  # of the last one nothing is known afterwards
        (False, "aabb", [1, 2, 3, 5], [1.5, 3, 4]),
        (False, "ababa", [1, 2, 3, 4, 5], [2, 2, 3, 4]),
    ],
)
def test_the_limit_is_that_of_the_file_that_was_used(
    tmp_path: Path, write: bool, files: str, seconds: list[float], limits: list[float]
) -> None:
    limit = RawLimit(Disk({way.name: list(seconds) for way in ways()}), write=write)
    for name in files:
        limit.measure(tmp_path / name)
    assert limit.between() == limits


def test_a_raw_transfer_moves_the_bytes_of_a_free_slot(tmp_path: Path) -> None:
    if not survey(tmp_path).direct.startswith("yes"):
        pytest.skip("needs a filesystem that takes direct I/O")
    data = os.urandom(MIB)
    with SyncCheckpointEngine(tmp_path) as engine:
        for step in range(2):
            engine.checkpoint({"data": bytearray(data).hex()} | {"step": step}, step=step).result()
        free, named = (slot_file(tmp_path, committed=committed) for committed in (False, True))
        assert free != named
        before = named.read_bytes()
        for way in ways():
            disk = RawDisk(4096)
            assert disk.seconds(free, way, write=True) > 0
            other = RawDisk(4096)
            assert other.seconds(free, way, write=False) > 0
            assert free.read_bytes()[:4096] == bytes(disk.view) == bytes(other.view)
        assert named.read_bytes() == before
    assert load_sync(tmp_path)["step"] == 1


def test_a_raw_transfer_that_fails_is_no_limit(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(bytes(4096))
    with pytest.raises(OSError, match=r"a raw transfer was short|Invalid argument"):
        RawDisk(8192).seconds(short, ways()[0], write=False)


@pytest.mark.slow
def test_work_takes_processor_time() -> None:
    before, own = busy_seconds(), time.process_time()
    while time.process_time() < own + 0.2:
        pass
    assert busy_seconds() - before > 0.05


@pytest.mark.slow
def test_the_package_does_not_import_the_benchmark() -> None:
    code = "import sys, pccheck_async; sys.exit(any(name.startswith('pccheck_async.bench') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
