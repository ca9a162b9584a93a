"""The papers' figures: every experiment runs in small, can be drawn and reported, and leaves nothing on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from examples.paper.__main__ import app
from examples.paper.lab.experiments import EXPERIMENTS, Settings
from examples.paper.lab.figures import draw_rows
from examples.paper.lab.table import read_rows, write_rows
from tests.support.tiny_experiments import Failing, Tiny
from tests.support.warm import run_warm

ROOT = Path(__file__).parents[2]
METHODS = {
    "gh": ("torch.save + fsync + rename", "pccheck overlapped"),
    "hpec": ("savez without fsync", "savez + fsync + rename", "pccheck", "pccheck mapped", "shelf in place"),
    "overhead": ("pccheck overlapped",),
    "throughput": ("CheckFreq", "pccheck overlapped"),
    "costs": ("pccheck", "torch.save"),
    "sizes": ("pccheck", "torch.save + fsync + rename"),
}


@pytest.mark.campaign
@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "growth"])
def test_an_experiment_runs_in_small(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "disk").mkdir()
    settings = Settings(tmp_path / "disk", quick=True, repetitions=1, methods=METHODS.get(name))
    findings = EXPERIMENTS[name]().run(settings)
    assert list((tmp_path / "disk").iterdir()) == []
    assert not [note for note in findings.notes if "failed: " in note]
    write_rows(tmp_path / "table.csv", findings.rows)
    rows = read_rows(tmp_path / "table.csv")
    assert rows == findings.rows
    assert rows or findings.timelines
    for figure in {row.figure for row in rows}:
        draw_rows([row for row in rows if row.figure == figure], tmp_path / f"{figure}.png")


@pytest.mark.slow
def test_run_report_and_plot_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    for each in (Tiny, Failing):
        monkeypatch.setitem(EXPERIMENTS, each.name, each)
    disk, out = tmp_path / "disk", tmp_path / "out"
    runner = CliRunner()

    def run(*arguments: str) -> int:
        return runner.invoke(app, list(arguments)).exit_code

    assert run("run", "tiny", f"--folder={disk}", f"--out={out}") == 0
    assert list(disk.iterdir()) == []
    assert {row.method for row in read_rows(out / "tiny.csv")} == {"pccheck", "torch.save"}
    assert run("run", "failing", f"--folder={disk}", f"--out={out}") == 1
    assert run("run", "nonsense", f"--folder={disk}", f"--out={out}") == 2
    assert run("run", "tiny", f"--folder={disk}", f"--out={out}", "--methods=magic") == 1
    assert run("report", str(out), f"--html={tmp_path / 'page.html'}") == 0
    page = (tmp_path / "page.html").read_text()
    assert "How long does a &lt;tiny&gt; save take?" in page
    assert run("report", str(disk), f"--html={tmp_path / 'page.html'}") == 3
    assert run("run", "tiny", f"--folder={disk}", f"--out={out}") == 0
    assert run("plot", str(out / "tiny.csv"), "--figure=gh5", f"--out={tmp_path / 'figure.png'}") == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", [["-m", "examples.paper"], [str(ROOT / "examples" / "paper")]])
def test_it_runs_as_a_module_and_as_a_file(command: list[str]) -> None:
    done = run_warm(*command, "run", "--list", cwd=ROOT, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in EXPERIMENTS)
