"""Experiments that train: real runs on small states, and what keeps their comparisons fair."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pccheck_async.bench.experiments import EXPERIMENTS, Findings, Settings, overhead
from pccheck_async.bench.experiments.race import Alone, Contender, Race
from pccheck_async.bench.figures import draw_table, draw_timeline
from pccheck_async.bench.figures.style import method_style
from pccheck_async.bench.goodput import redo_seconds
from pccheck_async.bench.methods import METHODS, Handle, State
from pccheck_async.bench.methods.base import Background
from pccheck_async.bench.methods.pccheck import PCcheck
from pccheck_async.bench.methods.torch_save import TorchSave
from pccheck_async.bench.table import read_rows, write_rows
from pccheck_async.bench.timeline import Timeline
from pccheck_async.bench.workloads import Sleeping
from pccheck_async.cli import bench_goodput
from pccheck_async.transfer.machine import available_cores

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of torch that wait for each other spin, and beside a job that takes the cores they do little else."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Queueing(TorchSave):
    """Takes any number of saves and writes them one after the other, each when it was let."""

    name = "queueing"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.waiting = self.most = 0
        self.lock = threading.Lock()
        self.thread = ThreadPoolExecutor(1)

    def save(self, state: State, step: int) -> Handle:
        kept = {key: value.clone() for key, value in state.items()}
        with self.lock:
            self.waiting += 1
            self.most = max(self.most, self.waiting)
        saved: Future[None] = self.thread.submit(self.write, kept, step)
        return Background(saved)

    def write(self, state: State, step: int) -> None:
        super().save(state, step)
        with self.lock:
            self.waiting -= 1

    def close(self) -> None:
        self.thread.shutdown()


class Forgetful(TorchSave):
    """Restores all bits but one."""

    name = "forgetful"

    def load(self, into: State) -> int:
        step = super().load(into)
        into["t00002"].view(torch.uint8)[5] ^= 1
        return step


class Failing(TorchSave):
    """Fails in its fifth save: the second of a block."""

    name = "failing"

    def save(self, state: State, step: int) -> Handle:
        if step == 5:
            raise OSError("no more")
        return super().save(state, step)


class Littering(PCcheck):
    """Counts how often it was asked to delete older checkpoints."""

    name = "littering"
    tidied = 0

    def tidy(self) -> None:
        self.tidied += 1


@pytest.mark.parametrize(
    ("interval", "floor"),
    [(1, 2.0), (4, 1 + 2.0 / 4 / 2), (1000, 1 + 2.0 / 1000 / 2)],
    ids=["the storage", "the processor", "training"],
)
def test_the_floor_is_what_storage_and_processor_allow(
    interval: int, floor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccheck_async.bench.experiments.race.available_cores", lambda: 2)
    alone = Alone(nbytes=100, seconds=2.0 if interval == 1 else 1.0, processor=2.0 if interval > 1 else 0.0)
    assert alone.floor(1.0, interval) == pytest.approx(floor)
    assert available_cores() >= 1


def test_saves_of_a_method_without_a_bound_do_not_pile_up(tmp_path: Path) -> None:
    contender = Contender(Queueing, tmp_path, Sleeping(MIB, 4, 0.001))
    method = contender._method
    assert isinstance(method, Queueing)
    block = contender.block(1, 8, 0.001)
    assert method.most == 1
    assert not method.waiting  # a block ends drained
    assert block.seconds > 0.001
    assert block.durable > 0
    contender.close()


def test_a_method_of_this_package_has_several_in_flight(tmp_path: Path) -> None:
    contender = Contender(METHODS["pccheck overlapped"], tmp_path, Sleeping(MIB, 4, 0.001))
    contender.save().captured()
    contender.workload.step()
    contender.save().captured()
    assert len(contender._flying) == 2
    contender.drain()
    assert not contender._flying
    contender.close()


def test_tidying_waits_until_nothing_is_on_its_way(tmp_path: Path) -> None:
    contender = Contender(Littering, tmp_path, Sleeping(MIB, 4, 0.001))
    method = contender._method
    assert isinstance(method, Littering)
    contender.block(1, 6, 1.0)
    assert method.tidied == 1  # after the drain: with two in flight there was always one before
    contender.block(1, 6, 1.0)
    assert method.tidied == 3
    contender.close()


def test_a_block_is_in_steady_state_before_it_is_timed(tmp_path: Path) -> None:
    contender = Contender(METHODS["torch.save + fsync"], tmp_path, Sleeping(MIB, 4, 0.001))
    contender.warm()
    before = contender._step
    contender.block(1, 4, 1e-9)  # a save takes longer than a period: one goes ahead
    assert contender._step - before == 5
    contender.block(1, 4, 1e9)
    assert contender._step - before == 9
    contender.close()


def test_methods_that_fail_or_restore_something_else_are_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Forgetful, Failing):
        monkeypatch.setitem(METHODS, kind.name, kind)
    race = Race(["torch.save", "failing", "forgetful"], Sleeping(MIB, 4, 0.001), tmp_path, lambda _: None)
    try:
        found = {name: race.block(name, 1, 2, 0.001) for name in list(race.running)}
        assert found["failing"] is None
        assert list(race.running) == ["torch.save", "forgetful"]
        race.finish()
    finally:
        race.close()
    assert list(race.loads) == ["torch.save"]
    assert race.loads["torch.save"] > 0
    assert "no more" in race.problems["failing"]
    assert "differs in 1 places, t00002" in race.problems["forgetful"]
    assert len(race.notes()) == 2


@pytest.fixture(scope="module")
def throughput(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    methods = ("CheckFreq", "pccheck overlapped")
    settings = Settings(tmp_path_factory.mktemp("bench"), quick=True, repetitions=2, methods=methods)
    found = EXPERIMENTS["throughput"]().run(settings)
    assert not list(settings.folder.iterdir())
    return found


def test_throughput_has_every_method_interval_and_round(throughput: Findings) -> None:
    rows = [row for row in throughput.rows if row.figure == "8"]
    keys = {(row.method, row.x, row.repetition) for row in rows}
    expected = {(m, x, r) for m in ("CheckFreq", "pccheck overlapped") for x in (1, 10) for r in (0, 1)}
    assert keys == expected | {("none", 0, 0), ("none", 0, 1)}
    assert all(row.floor for row in rows if row.method != "none")
    assert {row.figure for row in throughput.rows} == {"8", "8-drain", "9"}
    assert any("m / (B f t)" in note and "every 10" in note for note in throughput.notes)
    assert sum("of the floor" in note for note in throughput.notes) == 4


def test_every_method_has_a_look_and_a_place_in_the_model_of_goodput() -> None:
    looks = {(style.colour, style.marker) for style in map(method_style, METHODS)}
    assert len(looks) == len(METHODS)
    for name in METHODS:
        assert redo_seconds(name, "worst", interval=10, step_seconds=1.0, load_seconds=1.0, durable_seconds=1.0) >= 11


def test_from_throughput_to_goodput_to_pictures(throughput: Findings, tmp_path: Path) -> None:
    drawn = {row.method for row in throughput.rows if row.figure == "9"}
    assert drawn == {"CheckFreq", "pccheck overlapped", "ideal"}
    table, goodput = tmp_path / "throughput.csv", tmp_path / "goodput.csv"
    write_rows(table, throughput.rows)
    for figure in ("8", "8-drain", "9"):
        draw_table(table, tmp_path / f"{figure}.png", figure)
        assert (tmp_path / f"{figure}.png").read_bytes()[:4] == b"\x89PNG"
    status = bench_goodput.run(
        table,
        trace=None,
        per_machine=4,
        mtbf=100.0,
        seconds=3600.0,
        seeds=3,
        load_seconds=0.1,
        durable_seconds=bench_goodput.parse_durable(["0.1"]),
        max_in_flight=2,
        out=goodput,
    )
    assert status == 0
    assert {row.method for row in read_rows(goodput)} == drawn
    draw_table(goodput, tmp_path / "chained.png")


@pytest.mark.campaign
def test_overhead_of_methods_and_of_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "_QUICK", replace(overhead._QUICK, phase_seconds=0.3))
    settings = Settings(tmp_path, quick=True, repetitions=1, methods=("pccheck overlapped",))
    found = EXPERIMENTS["overhead"]().run(settings)
    bars = [row for row in found.rows if row.figure == "checkfreq"]
    assert {(row.workload, row.method) for row in bars} == {
        ("alone", "pccheck overlapped"),
        ("beside another job", "pccheck overlapped"),
    }
    first, *second = sorted({int(row.x) for row in bars})
    assert any(f"picks k = {first}:" in note for note in found.notes)
    assert len(second) <= 1
    assert all(any(f"adaptive rule makes k = {k} " in note for note in found.notes) for k in second)
    assert {row.floor for row in bars} == {3.0}
    policies = {"Adaptive", "CheckFreqInterval", "PCcheckInterval", "YoungDaly"}
    steered = [row for row in found.rows if row.figure == "adaptive"]
    assert {(row.method, row.x) for row in steered} == {(name, part) for name in policies for part in (1, 2, 3, 4)}
    assert {row.method for row in found.rows if row.figure == "adaptive-k"} <= policies
    table = tmp_path / "overhead.csv"
    write_rows(table, found.rows)
    for figure in ("checkfreq", "adaptive"):
        draw_table(table, tmp_path / f"{figure}.png", figure)
    assert not list(tmp_path.glob("pccheck-bench-*"))


def test_timelines_show_checkpoints_in_flight_and_open_in_perfetto(tmp_path: Path) -> None:
    found = EXPERIMENTS["timeline"]().run(Settings(tmp_path, quick=True))
    assert len(found.timelines) == 2
    assert len(list(found.timelines.values())[1].places()) > 1  # on the disk whose streams are capped
    for number, timeline in enumerate(found.timelines.values()):
        assert {"step", "stall", "capture", "write", "flush", "commit"} == {span.name for span in timeline.spans}
        path = tmp_path / f"{number}.json"
        timeline.write(path)
        check_trace_events(json.loads(path.read_text())["traceEvents"])
        draw_timeline(Timeline.read(path), tmp_path / f"{number}.png")


def check_trace_events(events: list[dict[str, object]]) -> None:
    """By the Trace Event Format: complete events with times in microseconds, on tracks that metadata names.

    Complete events of a track lie beside or within each other: Perfetto drops one that overlaps another partly.
    """
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    tracks: dict[tuple[object, object], list[tuple[float, float]]] = {}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in ("X", "M")
        if event["ph"] == "M":
            assert isinstance(event["args"], dict)
            continue
        start, seconds = event["ts"], event["dur"]
        assert isinstance(start, float)
        assert isinstance(seconds, float)
        assert start >= 0
        assert seconds >= 0
        assert event["name"]
        assert event["pid"] in processes
        tracks.setdefault((event["pid"], event["tid"]), []).append((start, start + seconds))
    assert set(tracks) == named
    for spans in tracks.values():
        ordered = sorted(spans)
        assert all(one[1] <= other[0] + 1e-3 for one, other in pairwise(ordered))


@pytest.mark.parametrize("name", ["throughput", "overhead"])
def test_a_method_that_there_is_not_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no method 'none'"):
        EXPERIMENTS[name]().run(Settings(tmp_path, quick=True, methods=("none",)))
