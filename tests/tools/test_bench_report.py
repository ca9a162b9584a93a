"""Running experiments, what they leave, and the page made of it: every number is there, and nothing is loaded."""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from pccheck_async.bench.experiments import EXPERIMENTS, Experiment, Findings, Settings
from pccheck_async.bench.keeping import kept, run_experiment
from pccheck_async.bench.outcome import Outcome, file_name, read_outcome
from pccheck_async.bench.place import survey
from pccheck_async.bench.report import write_report
from pccheck_async.bench.report.summary import compare, count
from pccheck_async.bench.report.tables import Ratio, amount, number, sum_up
from pccheck_async.bench.table import Row, TableError, read_rows, write_rows
from pccheck_async.bench.timeline import Timeline
from pccheck_async.cli import app
from tests.support.tiny_experiments import Absent, Endless, Failing, Tiny

runner = CliRunner()

VOID = {"meta", "link", "img", "br"}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny experiments and no others, the endless one aside."""
    for name in list(EXPERIMENTS):
        monkeypatch.delitem(EXPERIMENTS, name)
    for kind in (Tiny, Failing, Absent):
        monkeypatch.setitem(EXPERIMENTS, kind.name, kind)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the tiny experiments found."""
    folder = tmp_path_factory.mktemp("found")
    saves = tmp_path_factory.mktemp("saves")
    for kind in (Tiny, Failing, Absent):
        run_experiment(kind, Settings(saves, quick=True), folder)
    assert os.listdir(saves) == []
    return folder


def rows(values: Mapping[str, Sequence[float]], **about: Any) -> list[Row]:
    """Return rows of methods with a value for each repetition."""
    about = {"figure": "made up", "x": 1.0, "unit": "s", **about}
    return [
        Row(method=method, repetition=repetition, value=value, **about)
        for method, many in values.items()
        for repetition, value in enumerate(many)
    ]


class Made(Experiment):
    """Finds what it is told to; not abstract, and measures nothing."""

    name = "made"
    title = "What was made up?"
    findings = Findings()

    def run(self, settings: Settings) -> Findings:
        return self.findings


def make(rows: Sequence[Row], notes: Sequence[str] = (), title: str = Made.title) -> type[Experiment]:
    return type("Made", (Made,), {"findings": Findings(list(rows), list(notes)), "title": title})


class Page(HTMLParser):
    """A strict reader: every element is closed in its place."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.cells: list[list[str]] = []
        self.texts: list[str] = []
        self.style = ""
        self.feed(text)
        self.close()
        assert self.open == []

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            self.style += data
            return
        self.texts.append(data)
        if {"td", "th"} & set(self.open):
            self.cells[-1][-1] = " ".join(f"{self.cells[-1][-1]} {data}".split())


def page(out: Path, tmp_path: Path) -> Page:
    assert write_report(out, tmp_path / "page.html")
    return Page((tmp_path / "page.html").read_text())


# -- numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (1, "1.000"), (0.99996, "1.000"), (1234.56, "1,235"), (0.000123456, "0.0001235"),
        (12e6, "12,000,000"), (1e-9, "1.000e-09"), (1e20, "1.000e+20"), (math.inf, "∞"),
    ],
)  # fmt: skip
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_bytes_have_prefixes() -> None:
    texts = [amount(value, "bytes") for value in (0, 999, 1000, 536870912, 3e12)]
    assert texts == ["0 B", "999.0 B", "1.000 kB", "536.9 MB", "3.000 TB"]
    assert amount(1000, "s") == "1,000"


def test_ratios_are_taken_round_by_round() -> None:
    """The second round was disturbed, for both."""
    ratio = Ratio.of({0: 2.0, 1: 20.0, 2: 2.2}, {0: 1.0, 1: 10.0, 2: 1.0})
    assert (ratio.value, ratio.low, ratio.high, ratio.pairs) == (2.0, 2.0, 2.2, 3)
    assert Ratio.of({1: 20.0, 2: 2.0, 7: 9.0}, {0: 1.0, 1: 10.0, 2: 1.0}).pairs == 2
    assert Ratio.of({0: 4.0, 1: 6.0}, {2: 1.0, 3: 3.0}) == Ratio(2.5, None, None, 0)
    assert Ratio.of({0: 3.0}, {0: 2.0}) == Ratio(1.5, None, None, 0)
    assert Ratio.of({0: 3.0, 1: 3.0}, {0: 0.0, 1: 0.0}) == Ratio(math.inf, math.inf, math.inf, 2)
    assert Ratio.of({0: 0.0, 1: 0.0}, {0: 0.0, 1: 0.0}) == Ratio(1.0, 1.0, 1.0, 2)


def test_what_is_next_to_nothing_is_as_good_as_less() -> None:
    assert Ratio.of({0: 2e-5, 1: 0.004}, {0: 1e-5, 1: 2e-5}, least=1e-3) == Ratio(2.5, 1.0, 4.0, 2)


NINE = tuple(1 + 0.01 * number for number in range(9))


def times(factor: float) -> list[float]:
    return [factor * each for each in NINE]


@pytest.mark.parametrize(
    ("unit", "better"), [("s", 0.5), ("MB", 0.5), ("s/GiB", 0.5), ("steps/s", 2.0), ("1 / h", 2.0)]
)
def test_who_is_ahead(unit: str, better: float) -> None:
    """Rates are better when higher; all else when lower."""
    noise = [1.3, 0.7, 1.2, 0.8, 1.1, 0.9, 1.01, 0.99, 1.0]
    made = rows(
        {
            "pccheck": NINE,
            "worse": times(1 / better),
            "better": times(better),
            "alike": [a * b for a, b in zip(NINE, noise, strict=True)],
            "once": [1 / better],
            "pccheck overlapped": times(better),
            "pccheck_published": times(1 / better),
            "ideal": times(better),
        },
        unit=unit,
    )
    (table,) = sum_up(made)
    comparisons = {each.method: each for each in compare(table)}
    verdicts = {name: [(part.verdict, part.by) for part in each.parts] for name, each in comparisons.items()}
    assert verdicts["worse"] == [("ahead", "2.00 × [2.00, 2.00]")]
    assert verdicts["better"] == [("behind", "2.00 × [2.00, 2.00]")]
    assert [verdict for verdict, _ in verdicts["alike"]] == ["unclear"]
    assert verdicts["once"] == [("ahead", f"{number(1.92 if better < 1 else 2.08, 3)} ×")]
    assert comparisons["once"].parts[0].single
    assert [name for name, each in comparisons.items() if each.own] == ["pccheck overlapped"]
    assert "ideal" not in comparisons
    assert count(comparisons.values()) == {"behind": 1, "ahead": 2, "unclear": 1, "single": 1}
    assert {each.baseline for each in comparisons.values()} == {"pccheck_async"}


def test_rounds_that_do_not_pair_up_are_told_apart_by_their_extremes() -> None:
    made = rows({"pccheck": (1.0, 1.2)}) + [
        Row(figure="made up", method=method, x=1, repetition=repetition, value=value, unit="s")
        for method, many in (("apart", (1.3, 1.4)), ("overlapping", (1.1, 1.4)), ("better", (0.5, 0.9)))
        for repetition, value in enumerate(many, 5)
    ]
    verdicts = {each.method: each.parts[0].verdict for each in compare(sum_up(made)[0])}
    assert verdicts == {"apart": "ahead", "overlapping": "unclear", "better": "behind"}


def test_points_and_series() -> None:
    """A method is compared at each point: ahead here, behind there; where nothing is saved, not at all."""
    made = [
        row
        for x, factor in ((0.0, 3.0), (1.0, 0.5), (10.0, 4.0), (20.0, 2.0))
        for row in rows({"pccheck": NINE, "gpm": times(factor)}, figure="checkfreq", x=x)
    ]
    (table,) = sum_up(made)
    assert [group.title for group in table.groups] == [
        "without checkpoints",
        *(f"checkpoint interval (steps): {x}" for x in (1, 10, 20)),
    ]
    (comparison,) = compare(table)
    assert [(part.verdict, part.by, part.where) for part in comparison.parts] == [
        ("behind", "2.00 × [2.00, 2.00]", "at 1 of 3 points (checkpoint interval (steps): 1)"),
        (
            "ahead",
            "2.00 to 4.00 ×",
            "at 2 of 3 points (checkpoint interval (steps): 10; checkpoint interval (steps): 20)",
        ),
    ]
    series = rows({"pccheck": NINE}, series="2") + rows({"pccheck": times(3)}, series="4") + rows({"gpm": times(3)})
    assert compare(sum_up(series)[0]) == []  # gpm has no such parameter, and pccheck is nowhere without
    series += rows({"gpm": times(9)}, series="4")
    assert [part.by for part in compare(sum_up(series)[0])[0].parts] == ["3.00 × [3.00, 3.00]"]
    assert compare(sum_up(rows({"gpm": NINE, "torch_save": NINE}))[0]) == []


def test_percentages_are_subtracted() -> None:
    """An overhead may be 0, and twice next to nothing is next to nothing."""
    made = {"pccheck": [0.0, 0.0, 1.0] * 3, "gpm": [2.0, 3.0, 3.5] * 3, "dcp": [0.0, 1.0, 0.5] * 3}
    gpm, dcp = compare(sum_up(rows(made, unit="%"))[0])
    assert [(part.verdict, part.by) for part in gpm.parts] == [("ahead", "2.50 points [2.00, 3.00]")]
    assert [part.verdict for part in dcp.parts] == ["unclear"]
    assert compare(sum_up(rows(made))[0])[0].parts[0].by == "∞ × (one of the two is 0)"


def test_predictions_are_compared_and_not_counted() -> None:
    (table,) = sum_up(rows({"pccheck": NINE, "gpm": times(0.5)}, figure="9", unit="steps/s"))
    (comparison,) = compare(table)
    assert comparison.parts[0].verdict == "ahead"
    assert count([comparison])["ahead"] == 0


# -- running


@pytest.mark.slow
def test_what_a_run_leaves(found: Path) -> None:
    outcome = read_outcome(found / "tiny.json")
    assert (outcome.title, outcome.quick, outcome.problem) == (Tiny.title, True, "")
    assert outcome.place.filesystem == survey(found).filesystem
    assert outcome.versions["torch"] == outcome.place.torch
    assert outcome.notes[0] == "The state has 65532 bytes & 3 tensors."
    assert "Figure unheard of is not drawn: there is no figure 'unheard of'" in outcome.notes[1]
    assert outcome.known["torch.save"].durable is False
    table = read_rows(found / outcome.table)
    assert {(row.figure, row.method, row.repetition) for row in table} == {
        (figure, method, n)
        for figure in ("gh5", "unheard of")
        for method in ("pccheck", "torch.save")
        for n in range(3)
    }
    assert outcome.figures == {"gh5": "tiny-gh5.png"}
    ((title, files),) = outcome.timelines.items()
    assert (title, files.trace, files.png) == (
        "two saves / at once",
        "tiny-two_saves_at_once.trace.json",
        "tiny-two_saves_at_once.trace.png",
    )
    assert sorted(Timeline.read(found / files.trace).checkpoints) == [0, 1]
    for png in ("tiny-gh5.png", files.png):
        assert imread(found / png).ndim == 3
    assert read_outcome(found / "failing.json").problem.startswith(
        "failed: UnsupportedStateError: not: a builtins.object"
    )
    assert read_outcome(found / "absent.json").problem == "skipped: there is no <quantum> processor"
    assert sorted(os.listdir(found)) == sorted([*outcome.files(), "tiny.json", "failing.json", "absent.json"])


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_run_on_the_command_line(tmp_path: Path) -> None:
    folders = [f"--folder={tmp_path / 'saves'}", f"--out={tmp_path / 'out'}"]
    few = ["--methods=pccheck", "--repetitions=1"]
    result = runner.invoke(app, ["bench", "run", *folders, *few])
    assert result.exit_code == 1, result.output  # failing failed, and the others ran all the same
    said = [line for line in result.stderr.splitlines() if not line.startswith("pccheck: ")]
    ends = [f"{name}: {what}" for name, what in (("tiny", "done"), ("failing", "failed"), ("absent", "skipped"))]
    expected = [line for end in ends for line in (f"{end.partition(':')[0]}: running", end)]
    assert all(line.startswith(start) for line, start in zip(said, expected, strict=True)), said
    assert "tiny-two_saves_at_once.trace.json" in result.stdout
    assert os.listdir(tmp_path / "saves") == []
    assert {row.method for row in read_rows(tmp_path / "out" / "tiny.csv")} == {"pccheck"}

    before = (tmp_path / "out" / "tiny.json").read_bytes()
    result = runner.invoke(app, ["bench", "run", "tiny", *folders, *few, "--resume"])
    assert result.exit_code == 0, result.output
    assert "tiny: there already" in result.stderr
    assert (tmp_path / "out" / "tiny.json").read_bytes() == before
    result = runner.invoke(
        app, ["bench", "run", "tiny", *folders, "--methods=torch.save, pccheck", *few[1:], "--resume"]
    )
    assert result.exit_code == 0, result.output  # other settings: measured again
    assert read_outcome(tmp_path / "out" / "tiny.json").methods == ["torch.save", "pccheck"]

    result = runner.invoke(app, ["bench", "run", "absent", *folders])
    assert result.exit_code == 1
    assert "no <quantum> processor" in result.output
    result = runner.invoke(app, ["bench", "run", "tiny", *folders, "--methods=nonsense"])
    assert result.exit_code == 1
    assert "there is no method 'nonsense'; there are: pccheck," in result.stderr
    assert read_outcome(tmp_path / "out" / "tiny.json").problem == ""  # what was found before is still there


@pytest.mark.parametrize("name", ["small", "growth", pytest.param("hpec", marks=pytest.mark.slow)])
def test_a_run_that_measures_nothing_leaves_what_was_found(name: str, tmp_path: Path) -> None:
    found = type("Found", (EXPERIMENTS[name],), {"run": lambda *_: Findings(rows({"pccheck": [1.0]}))})
    before = run_experiment(found, Settings(tmp_path), tmp_path)
    command = ["bench", "run", name, "--quick", f"--folder={tmp_path}", f"--out={tmp_path}"]
    for methods in ("torch.sav", "CheckFreq"):  # none of that name; one that this experiment is not about
        result = runner.invoke(app, [*command, f"--methods={methods}"])
        assert result.exit_code == 1, result.output
        assert "nothing was measured" in result.stderr or "there is no method 'torch.sav'" in result.stderr
    assert read_outcome(tmp_path / f"{name}.json") == before
    assert [row.value for row in read_rows(tmp_path / before.table)] == [1.0]


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_interrupted_with_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPERIMENTS, Endless.name, Endless)
    monkeypatch.setitem(EXPERIMENTS, "after", type("After", (Tiny,), {"name": "after"}))
    out, saves = tmp_path / "out", tmp_path / "saves"
    arguments = ["tiny", "endless", "after", f"--folder={saves}", f"--out={out}", "--methods=pccheck", "--quick"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        result = runner.invoke(app, ["bench", "run", *arguments])
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130, result.output
    assert "interrupted; endless, after not measured; the same command with --resume goes on there" in result.stderr
    assert "tiny.csv" in result.stdout
    assert read_outcome(out / "tiny.json").problem == ""
    assert not [name for name in os.listdir(out) if not name.startswith("tiny")]
    assert os.listdir(saves) == []


def test_a_new_run_takes_the_place_of_an_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(tmp_path)
    run_experiment(make(rows({"pccheck": NINE}, figure="gh5", unit="s")), settings, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["made-gh5.png", "made.csv", "made.json"]
    assert kept(Made, settings, tmp_path) is not None
    assert kept(Made, Settings(tmp_path, quick=True), tmp_path) is None

    twice = rows({"pccheck": NINE}) * 2
    outcome = run_experiment(make(twice), settings, tmp_path)
    assert "the same measurement and repetition" in outcome.problem
    assert kept(Made, settings, tmp_path) is not None

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    outcome = run_experiment(make(rows({"pccheck": NINE}, figure="8", unit="1/s")), settings, tmp_path)
    assert outcome.notes == ["Nothing is drawn: matplotlib is not installed there."]
    assert sorted(os.listdir(tmp_path)) == ["made.csv", "made.json"]  # the picture of the old rows is gone
    assert {row.figure for row in read_rows(tmp_path / "made.csv")} == {"8"}
    (tmp_path / "made.csv").unlink()
    assert kept(Made, settings, tmp_path) is None


def test_names_of_files() -> None:
    taken: set[str] = set()
    names = [file_name("in_flight", what, ".png", taken) for what in ("N = 1", "N/1", "../../etc", "ä", "")]
    assert names == [
        "in_flight-N_1.png",
        "in_flight-N_1-2.png",
        "in_flight-etc.png",
        "in_flight-untitled.png",
        "in_flight-untitled-2.png",
    ]


# -- the page


@pytest.mark.slow
def test_the_page_needs_nothing_and_loads_nothing(found: Path, tmp_path: Path) -> None:
    read = page(found, tmp_path)
    assert read.tags.count("img") == 2
    assert read.tags.count("html") == read.tags.count("main") == read.tags.count("h1") == 1
    assert not {"script", "iframe", "object", "embed", "form"} & set(read.tags)
    assert all(each.startswith(("data:", "#")) for each in read.references)
    assert sum(each.startswith("data:image/png;base64,") for each in read.references) == 2
    assert sum(each.startswith(("data:text/csv;base64,", "data:application/json;")) for each in read.references) == 2
    assert "default-src 'none'" in (tmp_path / "page.html").read_text()
    assert "prefers-color-scheme: dark" in read.style
    assert not re.search(r"url\(|@import|@font-face", read.style)
    again = (tmp_path / "page.html").read_bytes()
    page(found, tmp_path)
    assert (tmp_path / "page.html").read_bytes() == again


@pytest.mark.slow
def test_the_page_shows_every_row_and_what_went_wrong(found: Path, tmp_path: Path) -> None:
    read = page(found, tmp_path)
    table = read_rows(found / "tiny.csv")
    for figure in ("gh5", "unheard of"):
        for method in ("pccheck", "torch.save"):
            values = [row.value for row in table if (row.figure, row.method) == (figure, method)]
            shown = f"{number(median(values))} [{number(min(values))}, {number(max(values))}]"
            (row,) = [cells for cells in read.cells if shown in cells]
            assert row[2] == "3"
            assert (row[3] == "") == (method == "pccheck")
    text = read.text
    outcome = read_outcome(found / "tiny.json")
    for expected in (
        Tiny.title, *outcome.notes, outcome.place.machine, outcome.place.kernel, outcome.place.direct, "A quick run",
        "Without findings: failing, absent", "not durable, not atomic", "UnsupportedStateError", "<quantum> processor",
        "two equal methods are told apart by luck once in 4 times", "torch.save no no yes", "pccheck_async yes yes yes",
    ):  # fmt: skip
        assert expected in text, expected


def test_hostile_strings_are_text(tmp_path: Path) -> None:
    hostile = "<script>alert('1')</script>"
    out = tmp_path / "out"
    out.mkdir()
    made = [
        row
        for unit, figure in (("<b>s", f"{hostile} one"), ("s/s", "two"))
        for row in rows(
            {"pccheck": NINE, hostile: times(0.5)}, figure=figure, unit=unit, workload="</table>", series='"&'
        )
    ]
    run_experiment(make(made, ["<img src=https://example.com/x.png onerror=alert(1)>"], hostile), Settings(out), out)
    read = page(out, tmp_path)
    assert not {"script", "img"} & set(read.tags)
    assert all(each.startswith(("data:", "#")) for each in read.references)
    for text in (f"{hostile} one, </table>", "In <b>s.", "<img src=https://example.com/x.png onerror=alert(1)>", '"&'):
        assert text in read.text
    assert f"</table>: 2.00 × [2.00, 2.00] behind {hostile}" in read.text  # said plainly, first
    assert f"</table>: 2.00 × [2.00, 2.00] behind {hostile}" in read.text[: read.text.index("Where pccheck_async is")]


def test_a_table_alone_is_shown_too(tmp_path: Path) -> None:
    write_rows(tmp_path / "goodput.csv", rows({"pccheck": NINE, "gpm": times(0.5)}, figure="9", unit="steps/s"))
    read = page(tmp_path, tmp_path)
    assert "A table without the file that says where and when it was measured." in read.text
    assert "Goodput under failures" in read.text
    assert "▲ ahead by 2.00 × [2.00, 2.00]" in read.text


def test_long_timelines_stay_files(found: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccheck_async.bench.report.page._MOST_DOWNLOAD_BYTES", 3)
    read = page(found, tmp_path)
    assert not [each for each in read.references if each.startswith(("data:text", "data:application"))]
    assert "tiny.csv (beside the tables, too large for this page)" in read.text


def test_report_exit_status(tmp_path: Path) -> None:
    out, html = tmp_path / "out", tmp_path / "page.html"
    out.mkdir()

    def report(source: Path) -> tuple[int, str]:
        result = runner.invoke(app, ["bench", "report", str(source), f"--html={html}"])
        assert "Traceback" not in result.output
        return result.exit_code, result.output

    status, said = report(out)
    assert (status, html.exists()) == (3, False)
    assert "nothing" in said
    assert report(tmp_path / "missing")[0] == 1
    write_rows(out / "table.csv", rows({"pccheck": NINE}))
    status, said = report(out)
    assert status == 0
    assert str(html) in said
    (out / "made.json").write_text("{}")
    status, said = report(out)
    assert status == 1
    assert "made.json is no outcome of an experiment" in said
    run_experiment(make(rows({"pccheck": NINE}, figure="gh5")), Settings(out), out)
    (out / "made-gh5.png").write_text("nonsense")
    assert "is no PNG" in report(out)[1]
    (out / "made-gh5.png").unlink()
    status, said = report(out)
    assert status == 1
    assert "FileNotFoundError" in said


def test_an_outcome_names_its_own_files_only(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    outcome = Outcome(name="made", title="?", started=now, ended=now, quick=False, place=survey(tmp_path))
    for changes in ({"table": "../made.csv"}, {"figures": {"8": "made/../../x.png"}}, {"table": "other.csv"}):
        (tmp_path / "made.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(outcome, **changes)))
        with pytest.raises(TableError, match="no file of its own"):
            read_outcome(tmp_path / "made.json")


def test_list_says_what_runs_here(tiny: None) -> None:
    result = runner.invoke(app, ["bench", "run", "--list"])
    assert result.exit_code == 0
    for text in ("tiny", "How long does a <tiny> save take?", "does not run: there is no <quantum> processor"):
        assert text in result.stdout
