"""Experiments over parameters: real runs of their quick forms, and the parts that they are made of."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pccheck_async.bench.bits import differences
from pccheck_async.bench.course import DiffersError, SlowCourse, check_restore, one_thread, train
from pccheck_async.bench.experiments import EXPERIMENTS, Findings, Settings
from pccheck_async.bench.experiments.hpec import clustering
from pccheck_async.bench.figures import draw_rows
from pccheck_async.bench.methods import Method, State, UnsupportedError
from pccheck_async.bench.methods.pccheck import PCcheck, PCcheckOverlapped
from pccheck_async.bench.methods.savez import Savez, SavezCompressed, SavezCompressedDurable, SavezDurable
from pccheck_async.bench.methods.torch_save import TorchSave
from pccheck_async.bench.table import Row, write_rows
from pccheck_async.bench.workloads import Raw, Sleeping, SlowDevice

MIB = 1 << 20
SAFE = "torch.save + fsync + rename"


def found_by(name: str, folder: Path, methods: tuple[str, ...] | None = None) -> Findings:
    """Run one round of the quick form; its rows are a table, can be drawn, and nothing of it is left."""
    (folder / "disk").mkdir()
    findings = EXPERIMENTS[name]().run(Settings(folder / "disk", quick=True, repetitions=1, methods=methods))
    assert list((folder / "disk").iterdir()) == []
    assert not [note for note in findings.notes if "failed: " in note]
    write_rows(folder / "table.csv", findings.rows)
    for figure in {row.figure for row in findings.rows}:
        draw_rows([row for row in findings.rows if row.figure == figure], folder / f"{figure}.png")
    return findings


def places(rows: list[Row], figure: str) -> Counter[tuple[str, str, float]]:
    return Counter((row.method, row.series, row.x) for row in rows if row.figure == figure)


@pytest.mark.campaign
def test_sizes(tmp_path: Path) -> None:
    rows = found_by("sizes", tmp_path, ("pccheck", "torch.save", SAFE)).rows  # the second is not durable
    assert places(rows, "11") == {(method, "", x): 1 for method in ("pccheck", SAFE) for x in (4e6, 32e6)}
    assert all(row.unit == "ms" and row.value > 0 and row.floor for row in rows)


@pytest.mark.campaign
def test_in_flight(tmp_path: Path) -> None:
    rows = found_by("in_flight", tmp_path).rows
    assert places(rows, "12") == {("pccheck overlapped", n, f): 1 for n in "124" for f in (1, 3, 10)}
    floors = {(row.series, row.x): row.floor or 0 for row in rows}
    assert floors["1", 1] == pytest.approx(3 * floors["1", 3])
    assert floors["1", 1] == pytest.approx(4 * floors["4", 1])
    assert all(floor >= 1 for floor in floors.values())


@pytest.mark.campaign
def test_writers(tmp_path: Path) -> None:
    rows = found_by("writers", tmp_path).rows
    assert places(rows, "13") == {("pccheck overlapped", p, n): 1 for p in "124" for n in (1, 2)}
    floors = {(row.series, row.x): row.floor or 0 for row in rows}
    assert floors["1", 1] == floors["1", 2] == pytest.approx(2 * floors["2", 2])
    assert floors["4", 1] == floors["2", 1] > floors["2", 2] > floors["4", 2] >= 1  # one file is capped, and all are


@pytest.mark.campaign
def test_memory(tmp_path: Path) -> None:
    rows = found_by("memory", tmp_path).rows
    assert places(rows, "14") == {("pccheck overlapped", c, x): 1 for c in "28" for x in (0.5, 1.0, 2.0)}


@pytest.mark.campaign
def test_gh(tmp_path: Path) -> None:
    findings = found_by("gh", tmp_path, (SAFE, "pccheck overlapped"))
    expected = {(method, "", x): 1 for method in (SAFE, "pccheck overlapped") for x in (4e6, 12e6)}
    assert places(findings.rows, "gh6") == expected
    assert places(findings.rows, "gh5") == dict.fromkeys(expected, 2)
    assert {row.workload for row in findings.rows if row.figure == "gh5"} == {
        "until it is saved",
        "that training waits",
    }
    assert sum("drain" in note for note in findings.notes) == 4
    whole = [row for row in findings.rows if row.figure == "gh6"]
    assert all(row.value >= 0.3 and (row.floor or 0) >= 0.3 for row in whole)  # thirty steps that sleep


@pytest.mark.campaign
def test_hpec(tmp_path: Path) -> None:
    if EXPERIMENTS["hpec"].why_not() is not None:
        pytest.skip("the examples are not installed")
    names = ("savez", "savez_durable", SAFE, "pccheck")
    findings = found_by("hpec", tmp_path, names)
    panels = {row.workload for row in findings.rows if row.figure == "hpec-kmeans"}
    drawn = (*names, "pccheck until captured")
    assert places(findings.rows, "hpec-kmeans") == {(m, "", k): len(panels) for m in drawn for k in (2, 6, 10)}
    assert places(findings.rows, "hpec-gmm") == {(m, "", k): len(panels) for m in drawn for k in (2, 4)}
    assert ("KMeans, tmpfs (emulation of persistent memory)" in panels) != any("disk only" in n for n in findings.notes)


@pytest.mark.parametrize("name", ["sizes", "gh", "hpec"])
def test_a_method_that_there_is_not(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no method 'magic'"):
        EXPERIMENTS[name]().run(Settings(tmp_path, quick=True, methods=("magic",)))


class Counting(TorchSave):
    """Notes the steps at which it saved."""

    saved: list[int]

    def save(self, state: State, step: int) -> Any:
        self.saved = [*getattr(self, "saved", []), step]
        return super().save(state, step)


def test_training_saves_after_every_interval_and_the_last_state_comes_back(tmp_path: Path) -> None:
    workload = Raw(4096, 2)
    before = {key: value.clone() for key, value in workload.state().items()}
    method = Counting(tmp_path)
    course = train(workload, method, steps=6, interval=3, lead=3)
    assert method.saved == [2, 5, 8]
    assert (course.steps, course.step_seconds) == (6, course.seconds / 6)
    for key, value in workload.state().items():
        assert torch.equal(value, before[key] + 9)  # as many steps
    check_restore(method, workload.state(), workload.twin().state())
    workload.step()
    with pytest.raises(DiffersError, match="differs in 2 places, t00000 "):
        check_restore(method, workload.state(), workload.twin().state())


def test_training_without_checkpoints_takes_its_steps() -> None:
    workload = Sleeping(4096, 2, 0.01)
    assert train(workload, None, steps=3).step_seconds >= 0.01


@pytest.mark.slow
def test_a_slow_course_is_no_faster_than_its_device(tmp_path: Path) -> None:
    with one_thread():
        assert torch.get_num_threads() == 1
        course = SlowCourse(tmp_path, SlowDevice(per_stream=20 * MIB), nbytes=MIB, step_seconds=0.001)
        assert course.alone() >= 0.05
        step = course.step_seconds(interval=1, checkpoints=4, max_in_flight=1)
    assert step >= 0.05 * 3 / 4  # the first of the four may have had its place before the clock ran
    assert list(tmp_path.iterdir()) == []


def test_one_thread_gives_the_others_back() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), one_thread():
        raise KeyError
    assert torch.get_num_threads() == before


def test_a_cap_per_request_needs_to_know_how_many(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="number of writers"):
        SlowDevice(per_request=MIB).open(PCcheck, tmp_path)


def test_the_engine_is_opened_as_it_was_asked_for(tmp_path: Path) -> None:
    with PCcheckOverlapped(tmp_path, max_in_flight=3, chunk_bytes=MIB, host_memory=2 * MIB, writers=2) as method:
        assert isinstance(method, PCcheckOverlapped)
        decisions = method.engine.statistics().decisions
    assert (decisions.chunk_bytes, decisions.host_memory, decisions.writers) == (MIB, 2 * MIB, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Savez, SavezDurable, SavezCompressed, SavezCompressedDurable])
@pytest.mark.parametrize("program", ["kmeans", "gmm"])
def test_savez_brings_the_state_of_a_clustering_back(kind: type[Method], program: str, tmp_path: Path) -> None:
    if EXPERIMENTS["hpec"].why_not() is not None:
        pytest.skip("the examples are not installed")
    state = clustering(program, 2, samples=100)
    into = {key: value * 0 if isinstance(value, np.ndarray | torch.Tensor) else None for key, value in state.items()}
    with kind(tmp_path) as method:
        method.save(state, 1).wait()
        method.save(state, 2).wait()
    with kind(tmp_path) as method:
        assert method.load(into) == 2
    assert differences(state, into) == []
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.npz"]


def test_savez_refuses_a_name_that_it_needs_itself(tmp_path: Path) -> None:
    with Savez(tmp_path) as method, pytest.raises(UnsupportedError, match="'rest'"):
        method.save({"rest": np.zeros(2)}, 1)
