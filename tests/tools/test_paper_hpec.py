"""The clusterings by every method of the HPEC figure: killed and resumed to the same bits, timed, drawn."""

from __future__ import annotations

import random
import signal
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from examples.paper import clustering, gmm, kmeans
from examples.paper.lab.experiments.hpec import Place, ratios, saves
from examples.paper.lab.figures import draw_rows
from examples.paper.lab.methods import CLUSTERING, State
from examples.paper.lab.methods.shelf import ShelfInPlace
from examples.paper.lab.table import Row
from tests.support.clustering_harness import Ended, Program

pytestmark = [
    pytest.mark.usefixtures("one_thread"),  # forked children have none but their first
    pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn"),  # which takes a second to import
]

FLAGS = ("--k=3", "--samples=200", "--tolerance=0", "--max-iterations=6")
PROGRAMS = {"kmeans": Program("kmeans", FLAGS), "gmm": Program("gmm", (*FLAGS, "--threads=1"))}
TORN = [name for name, kind in CLUSTERING.items() if not kind.atomic]
KILLS = 25
BACKGROUND = ("pccheck", "pccheck mapped")
"""A save is still on its way when the next iteration begins."""


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Program:
    return PROGRAMS[request.param]


@pytest.fixture(scope="module")
def uninterrupted(program: Program, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    ended = program.run(tmp_path_factory.mktemp(program.name) / "run")
    assert list(ended.iterations) == [1, 2, 3, 4, 5, 6], ended
    return ended


def check_resumed(resumed: Ended, killed: Ended, uninterrupted: Ended, method: str) -> None:
    """All bits of a resumed run are those of the one that was not killed, and no acknowledged save was lost."""
    assert resumed.status == 0, resumed
    if method not in BACKGROUND:
        assert resumed.resumed_from >= max(killed.iterations) - 1
    assert list(resumed.iterations) == list(range(resumed.resumed_from + 1, 7))
    assert resumed.iterations.items() <= uninterrupted.iterations.items()
    assert resumed.said[-1] == uninterrupted.said[-1]  # iterations, and a digest of the parameters


@pytest.mark.slow
@pytest.mark.parametrize("method", CLUSTERING)
def test_killed_and_resumed_ends_the_same(program: Program, uninterrupted: Ended, method: str, tmp_path: Path) -> None:
    killed = program.run(tmp_path / "run", f"--method={method}", "--crash-at=3")
    assert killed.status == -signal.SIGKILL, killed
    refused = program.run(tmp_path / "run", f"--method={method}")
    assert refused.status == 2 or method in BACKGROUND  # of those nothing may be durable yet
    resumed = program.run(tmp_path / "run", f"--method={method}", "--resume")
    assert resumed.resumed_from == 3 or method in BACKGROUND
    check_resumed(resumed, killed, uninterrupted, method)


@pytest.mark.campaign
@pytest.mark.parametrize("method", CLUSTERING)
def test_killed_anywhere_and_resumed_ends_the_same(
    program: Program, uninterrupted: Ended, method: str, tmp_path: Path
) -> None:
    draw, runs, kills, torn = random.Random(method), 0, 0, 0
    while kills < KILLS:
        store, runs = tmp_path / str(runs), runs + 1
        assert runs < 10 * KILLS, "the kills come too late"
        killed = program.run(store, f"--method={method}", kill=(draw.randint(1, 5), draw.uniform(0, 0.003)))
        if killed.status == 0:
            continue
        assert killed.status == -signal.SIGKILL, killed
        kills += 1
        resumed = program.run(store, f"--method={method}", "--resume")
        if method in TORN and resumed.status:
            assert "is torn" in resumed.said[-1]
            torn += 1
            continue
        check_resumed(resumed, killed, uninterrupted, method)
    print(f"\n{program.name}, {method}: {kills} kills, {torn} left a torn file, else the same bits")


@pytest.mark.slow
@pytest.mark.parametrize("method", TORN)
@pytest.mark.parametrize("part", [0, 0.5])
def test_a_torn_file_is_told(method: str, part: float, tmp_path: Path) -> None:
    program = PROGRAMS["kmeans"]
    assert program.run(tmp_path, f"--method={method}").status == 0
    file = tmp_path / "checkpoint.npz"
    file.write_bytes(file.read_bytes()[: int(part * file.stat().st_size)])
    ended = program.run(tmp_path, f"--method={method}", "--resume")
    assert (ended.status, "checkpoint.npz is torn" in ended.said[-1]) == (1, True), ended


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_method_is_timed_at_every_place_and_drawn(name: str, tmp_path: Path) -> None:
    samples, draw = clustering.load_samples("digits", 100), np.random.default_rng(1)
    model = kmeans.KMeans(samples, 2, 0, draw) if name == "kmeans" else gmm.Mixture(samples, 2, 1e-3, 1e-3, draw)
    model.start()
    places = [Place(figure, "here", tmp_path / figure) for figure in ("hpec-disk", "hpec-tmpfs-emulation")]
    for place in places:
        place.folder.mkdir()
    rows, notes = saves([*CLUSTERING.values()], model, places, 2, "Tiny", 2)
    assert not notes
    expected = [*CLUSTERING, "pccheck until captured"]
    assert sorted((row.figure, row.method, row.repetition) for row in rows) == sorted(
        (place.figure, method, repetition) for place in places for method in expected for repetition in (0, 1)
    )
    assert all(not list(place.folder.iterdir()) for place in places)
    pytest.importorskip("matplotlib")
    for place in places:
        draw_rows([row for row in rows if row.figure == place.figure], tmp_path / "drawn.png")


class Forgetful(ShelfInPlace):
    """Restores other centres than were saved."""

    name = "forgetful"

    def load(self, into: State) -> int:
        step = super().load(into)
        into["centres"][0, 0] += 1
        return step


def test_what_restores_other_bits_has_no_figures(tmp_path: Path) -> None:
    model = kmeans.KMeans(clustering.load_samples("digits", 50), 2, 0, np.random.default_rng(1))
    model.start()
    rows, notes = saves([ShelfInPlace, Forgetful], model, [Place("hpec-disk", "here", tmp_path)], 1, "Tiny", 2)
    assert {row.method for row in rows} == {"shelf in place"}
    assert len(notes) == 1
    assert "failed: forgetful" in notes[0]


def test_ratios_are_of_medians_and_span_all_k() -> None:
    def row(method: str, k: int, repetition: int, value: float) -> Row:
        return Row(
            figure="hpec-disk", workload="Tiny", method=method, x=k, repetition=repetition, value=value, unit="ms"
        )

    rows = [row("shelf in place", k, repetition, 2) for k in (2, 3) for repetition in range(3)]
    rows += [row("savez without fsync", 2, repetition, value) for repetition, value in enumerate((6, 4, 90))]
    rows += [row("savez without fsync", 3, repetition, 10) for repetition in range(3)]
    assert list(ratios(rows)) == [
        "Tiny: times as long as shelf in place, medians, least to most over k: savez without fsync 3 to 5."
    ]
