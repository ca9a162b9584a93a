"""What saving costs: the experiments run for real in small, their rows can be drawn, and limits mean limits."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from pccheck_async import SyncCheckpointEngine
from pccheck_async.bench.bits import differences, scribble
from pccheck_async.bench.experiments import EXPERIMENTS, Findings, Settings
from pccheck_async.bench.experiments import growth as growth_module
from pccheck_async.bench.experiments.costs import Costs, Need, grouped
from pccheck_async.bench.experiments.growth import Growth
from pccheck_async.bench.experiments.small import Savez, Small
from pccheck_async.bench.figures import draw_rows
from pccheck_async.bench.measure import measure
from pccheck_async.bench.place import survey
from pccheck_async.bench.raw_disk import BareSequence, RawDisk, RawLimit, Way, slot_file, ways
from pccheck_async.bench.table import Row, read_rows, write_rows
from pccheck_async.bench.workloads import Raw

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture(autouse=True)
def _direct(tmp_path: Path) -> None:
    if not survey(tmp_path).direct.startswith("yes"):
        pytest.skip("needs a filesystem that takes direct I/O")


def written(findings: Findings, folder: Path) -> list[Row]:
    """The rows as a reader of the table has them, each figure drawn."""
    write_rows(folder / "table.csv", findings.rows)
    rows = read_rows(folder / "table.csv")
    for figure in figures(rows):
        draw_rows([row for row in rows if row.figure == figure], folder / "figure.png")
    assert not [path for path in folder.iterdir() if path.name.startswith("pccheck-")]
    return rows


def figures(rows: Iterable[Row]) -> set[str]:
    return {row.figure for row in rows}


@pytest.mark.slow
def test_costs_are_those_of_every_method_asked_for(tmp_path: Path) -> None:
    said: list[str] = []
    methods = ["pccheck", "torch.save", "safetensors + fsync + rename"]
    findings = Costs(sizes=[MIB]).run(Settings(tmp_path, True, 1, methods, said.append))
    rows = written(findings, tmp_path)
    assert figures(rows) == {"durable", "processor", "stall", "step_stall", "restore", "memory"}
    measured = {row.method for row in rows}
    assert {"pccheck", "torch.save"} <= measured <= set(methods)
    for row in rows:
        assert (row.floor is not None) == (row.figure in ("durable", "restore"))
    counts = Counter((row.figure, row.method, row.x) for row in rows)
    assert set(counts.values()) == {1}
    assert len(counts) == 6 * len(measured)
    assert any("1 MiB: 100 tensors" in note and "durable by" in note for note in findings.notes)
    assert any("power failure" in note and "torch.save" in note for note in findings.notes)
    assert any("MiB, group 1 of 1: round 1 of 1" in text for text in said)


def test_an_unknown_method_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no method 'pickle'"):
        EXPERIMENTS["costs"]().run(Settings(tmp_path, methods=["pickle"]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("memory", "disk", "groups", "outside"),
    [
        (100, 100, [["pccheck", "a", "b", "c"]], []),
        (4, 100, [["pccheck", "a", "b"], ["pccheck", "c"]], []),
        (100, 5, [["pccheck", "a"], ["pccheck", "b"], ["pccheck", "c"]], []),
        (3, 100, [["pccheck", "b", "c"]], ["a"]),
        (1, 1, [], ["pccheck", "a", "b", "c"]),
    ],
)
def test_groups_fit_into_memory_and_on_the_disk(
    memory: float, disk: float, groups: list[list[str]], outside: list[str]
) -> None:
    needs = {"pccheck": Need(2, 3), "a": Need(2, 2), "b": Need(0, 2), "c": Need(1, 2)}
    assert grouped(needs, memory * GIB, disk * GIB, GIB) == (groups, outside)


def test_groups_without_the_baseline() -> None:
    needs = {"a": Need(2, 2), "b": Need(1, 2)}
    assert grouped(needs, 2 * GIB, 9 * GIB, GIB) == ([["a"], ["b"]], [])
    assert grouped({"pccheck": Need(1, 3)}, 2 * GIB, 9 * GIB, GIB) == ([["pccheck"]], [])


@pytest.mark.campaign
def test_a_method_that_used_up_its_time_sits_out(tmp_path: Path) -> None:
    said: list[str] = []
    result = measure(["torch.save"], Raw(4096, 2), tmp_path, 5, seconds=1e-9, progress=said.append)
    (row,) = result.rows
    assert (len(row.samples), len(row.restores), row.verified) == (3, 3, True)
    assert any("left" in text for text in said)


@pytest.mark.slow
@pytest.mark.parametrize("methods", [["pccheck"], ["torch.save"]])
def test_limits_are_measured_around_every_round(methods: list[str], tmp_path: Path) -> None:
    result = measure(methods, Raw(MIB, 2), tmp_path, 2, limits=True)
    assert result.rows[0].verified, result.rows[0].problem  # what was written to a free slot did no harm
    assert {figure: len(seconds) for figure, seconds in result.limits.items()} == {"durable": 2, "restore": 2}
    assert set(result.limit_ways.values()) <= {way.name for way in ways()}
    assert measure(methods, Raw(4096, 2), tmp_path, 1).limits == {}


class Disk(RawDisk):
    """Takes as long as it is told: a table instead of a clock."""

    def __init__(self, seconds: dict[str, list[float]]) -> None:
        super().__init__(4096)
        self.left = seconds

    def write_seconds(self, path: Path, way: Way) -> float:
        return self.left[way.name].pop(0)


def test_the_limit_is_that_of_the_way_with_the_smallest_median(tmp_path: Path) -> None:
    names = [way.name for way in ways()]
    seconds = {name: [10.0 + at, 1.0 if at == 4 else 10.0 + at, 10, 10] for at, name in enumerate(names)}
    seconds[names[2]] = [3.0, 3.0, 5.0, 1.0]
    limit = RawLimit(Disk(seconds), write=True)
    for _ in range(4):
        limit.measure(tmp_path)
    assert limit.way.name == names[2]
    assert limit.between() == [3, 4, 3]
    assert sorted(len(left) for left in seconds.values()) == [0] * 3 + [2] * (len(names) - 3)


class Clock(RawDisk):
    """Takes ``now`` seconds, whichever way."""

    now = 0.0

    def write_seconds(self, path: Path, way: Way) -> float:
        return self.now

    read_seconds = write_seconds


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
    clock = Clock(4096)
    limit = RawLimit(clock, write=write)
    for name, clock.now in zip(files, seconds, strict=True):
        limit.measure(tmp_path / name)
    assert limit.between() == limits


def test_a_raw_transfer_moves_the_bytes_of_a_free_slot(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        for step in range(2):
            engine.checkpoint(Raw(MIB, 2).state(), step=step).result()
        free, named = (slot_file(tmp_path, committed=committed) for committed in (False, True))
        assert free != named
        before = named.read_bytes()
        for way in ways():
            disk = RawDisk(MIB)
            assert disk.write_seconds(free, way) > 0
            assert free.read_bytes()[:MIB] == disk.data()
            other = RawDisk(MIB)
            assert other.read_seconds(free, way) > 0
            assert other.data() == disk.data()
        assert named.read_bytes() == before
        into = Raw(MIB, 2, seed=1).state()
        assert engine.restore(into) is not None
    assert differences(Raw(MIB, 2).state(), into) == []


def test_a_raw_transfer_that_fails_is_no_limit(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(bytes(4096))
    for way in ways():
        with pytest.raises(OSError, match="a raw transfer was short") as error:
            RawDisk(8192).read_seconds(short, way)
        assert error.value.errno is None  # no system call failed


def test_the_bare_sequence_writes_what_it_says(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with BareSequence(tmp_path, 64 << 10) as sequence:
        assert sequence.seconds() > 0
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == {"data": 64 << 10, "record": 4096}
    assert len(os.listdir("/proc/self/fd")) <= before


def test_savez_brings_back_what_it_saved(tmp_path: Path) -> None:
    state, into = Raw(4096, 3).state(), Raw(4096, 3, seed=1).state()
    with Savez(tmp_path) as method:
        for step in (1, 2):
            method.save(state, step).wait()
        scribble(into)
        assert method.load(into) == 2
    assert differences(state, into) == []
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.npz"]


@pytest.mark.slow
def test_small_states_beside_the_bare_sequence(tmp_path: Path) -> None:
    findings = Small().run(Settings(tmp_path, True, 2))
    rows = written(findings, tmp_path)
    assert figures(rows) == {"small"}
    assert {row.method for row in rows} == {"pccheck", "savez_durable", "torch.save + fsync + rename"}
    assert {row.x for row in rows} == {64 << 10, MIB}
    assert len(rows) == 12
    assert all(row.floor for row in rows)
    assert Small().run(Settings(tmp_path, methods=["GPM"])).rows == []


@pytest.mark.campaign
def test_growth_of_all_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth_module, "_BYTES", (MIB, 4 * MIB, 1 << 60))
    monkeypatch.setattr(growth_module, "_TENSORS", (1, 10))
    monkeypatch.setattr(growth_module, "_CHECKPOINTS", (1, 10))
    findings = Growth().run(Settings(tmp_path, repetitions=1))
    rows = written(findings, tmp_path)
    by_figure = {name: [row for row in rows if row.figure == name] for name in figures(rows)}
    assert {(row.series, row.x) for row in by_figure["growth_bytes"]} == {
        (series, x) for series in ("stall", "durable", "restore") for x in (MIB, 4 * MIB)
    }
    assert all((row.floor is None) == (row.series == "stall") for row in by_figure["growth_bytes"])
    assert {row.x for row in by_figure["growth_tensors"]} == {1, 10}
    for name in ("growth_checkpoints", "growth_memory", "growth_descriptors"):
        assert {row.x for row in by_figure[name]} == {1, 10}
    assert len({row.value for row in by_figure["growth_descriptors"]}) == 1
    assert any("were not measured: too little of the disk" in note for note in findings.notes)
