"""Every figure, drawn from made-up rows: what the axes hold is compared with the rows, and the PNG decoded."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.image import imread
from typer.testing import CliRunner

from pccheck_async.bench.figures import CATALOGUE, draw_rows, draw_table, draw_timeline
from pccheck_async.bench.figures.style import RC, STAGE_COLOURS, method_style, series_style
from pccheck_async.bench.table import Row, TableError, write_rows
from pccheck_async.bench.timeline import STAGES, Span, Timeline
from pccheck_async.cli import app

runner = CliRunner()
REPETITIONS = 3


def measured(
    figure: str,
    unit: str,
    value: Callable[[str, str, float], float],
    *,
    xs: tuple[float, ...],
    methods: tuple[str, ...] = ("pccheck",),
    series: tuple[str, ...] = ("",),
    workloads: tuple[str, ...] = ("",),
    floor: Callable[[float], float] | None = None,
    none: float | None = None,
) -> list[Row]:
    noise = random.Random(figure)
    rows = [
        Row(
            figure=figure,
            workload=workload,
            method=method,
            series=own,
            x=x,
            repetition=repetition,
            value=value(method, own, x) * noise.uniform(0.96, 1.04),
            unit=unit,
            floor=floor(x) if floor else None,
        )
        for workload in workloads
        for method in methods
        for own in series
        for x in xs
        for repetition in range(REPETITIONS)
    ]
    if none is not None:
        rows += [
            Row(figure=figure, workload=w, method="none", x=0, repetition=r, value=none * (1 + 0.01 * r), unit=unit)
            for w in workloads
            for r in range(REPETITIONS)
        ]
    return rows


COST = {"torch_save_safe": 4.0, "gpm": 2.4, "checkfreq": 1.6, "pccheck": 1.05, "ideal": 0.0, "gemini": 1.3}
PLAIN = 15.7


ALL = ("torch_save_safe", "gpm", "pccheck")
SIZES = {
    **dict.fromkeys(("durable", "stall", "step_stall", "restore"), ("s", ALL, ("",))),
    "processor": ("s/GiB", ALL, ("",)),
    "memory": ("MiB", ALL, ("",)),
    "small": ("ms", ALL, ("",)),
    "growth_bytes": ("s/GiB", ("pccheck",), ("durable", "restore")),
    "growth_tensors": ("µs", ("pccheck",), ("durable", "restore")),
    "growth_checkpoints": ("ms", ("pccheck",), ("durable",)),
    "growth_memory": ("MiB", ("pccheck",), ("",)),
    "growth_descriptors": ("open", ("pccheck",), ("",)),
}
"""Figures by the size of something: the unit, the methods, the series."""


def throughput(method: str, _: str, x: float) -> float:
    return x / (x / PLAIN + COST[method])


def rows_of(figure: str) -> list[Row]:
    """Return rows such as a benchmark could write."""
    if figure == "8":
        return measured(
            "8",
            "steps/s",
            throughput,
            xs=(1, 10, 25, 50, 75, 100),
            methods=("torch_save_safe", "gpm", "checkfreq", "pccheck"),
            floor=lambda x: x / max(x / PLAIN, 1.0),
            none=PLAIN,
        )
    if figure == "9":
        return measured(
            "9",
            "steps/s",
            lambda method, series, x: throughput(method, series, x) * (1 - x / (4000 if "drops" in series else 2000)),
            xs=(10, 25, 50),
            methods=("gpm", "checkfreq", "pccheck", "ideal"),
            series=("changes, average", "drops, average"),
        )
    if figure == "11":
        return measured(
            "11",
            "ms",
            lambda method, _, x: 3 + COST[method] * x / 1e6,
            xs=(1e7, 1e8, 1e9, 1e10),
            methods=("torch_save_safe", "gpm", "checkfreq", "pccheck"),
            floor=lambda x: x / 1e6,
        )
    if figure == "12":
        return measured(
            "12",
            "times",
            lambda _, n, x: 1 + 9 / x / min(float(n), 3),
            xs=(1, 2, 5, 10, 20, 30),
            series=("1", "2", "4", "6", "8"),
            floor=lambda x: max(1.0, 3 / x),
        )
    if figure == "13":
        return measured("13", "times", lambda _, p, x: 1 + 1 / x / float(p), xs=(1, 2, 3), series=("1", "2", "3"))
    if figure == "14":
        return measured(
            "14",
            "times",
            lambda _, c, x: 1 + 0.3 / x / float(c),
            xs=(1, 1.25, 1.5, 1.75, 2),
            series=("1", "2", "4", "8"),
        )
    if figure in ("gh5", "gh6"):
        return measured(
            figure,
            "s",
            lambda method, _, x: COST[method] * x / 5e9 + (0 if figure == "gh5" else 80),
            xs=(9e9, 27e9),
            methods=("torch_save_safe", "pccheck"),
            workloads=("fp32", "bf16"),
            none=None if figure == "gh5" else 79.0,
        )
    if figure == "checkfreq":
        return measured(
            figure,
            "%",
            lambda method, _, x: 40 * COST[method] / x,
            xs=(14, 19),
            methods=("checkfreq", "pccheck"),
            workloads=("alone", "beside another job"),
            floor=lambda _: 5.0,
        )
    if figure == "8-drain":
        return measured(
            figure, "s", lambda method, _, x: COST[method] / x, xs=(1, 10), methods=("checkfreq", "pccheck")
        )
    if figure in ("adaptive", "adaptive-k"):
        floor = (lambda _: 3.0) if figure == "adaptive" else None
        unit = "%" if figure == "adaptive" else "steps"
        return measured(
            figure, unit, lambda _, __, x: 10 + x, xs=(1, 2, 3, 4), methods=("Adaptive", "YoungDaly"), floor=floor
        )
    if figure in SIZES:
        unit, methods, series = SIZES[figure]
        return measured(
            figure,
            unit,
            lambda method, own, x: (2 if own == "restore" else 1) * COST[method] * x / 1e9,
            xs=(2.0**20, 2.0**29, 2.0**30),
            methods=methods,
            series=series,
            floor=(lambda x: x / 4e9) if unit != "s/GiB" else None,
        )
    assert figure in ("hpec-kmeans", "hpec-gmm")
    costs = {"savez_compressed": 20.0, "savez_durable": 6.0, "savez": 3.0, "shelf": 1.2, "shelf_in_place": 0.6}
    return measured(
        figure,
        "ms",
        lambda method, _, x: costs[method] * (1 + x / 20),
        xs=tuple(range(2, 11)),
        methods=tuple(costs),
        workloads=("on a disk", "in memory"),
    )


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures as matplotlib has them when they are saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def savefig(self: Figure, *arguments: Any, **options: Any) -> None:
        figures.append(self)
        save(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def shown(axes: Axes) -> dict[str, list[tuple[float, float, float]]]:
    """Return heights with the ends of their error bars, from left to right, by label."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    heights: list[float]
    for container in axes.containers:
        label = str(container.get_label())
        if isinstance(container, BarContainer):
            heights = [bar.get_height() for bar in container.patches]
            errors: Any = container.errorbar
        else:
            assert isinstance(container, ErrorbarContainer)
            if label.startswith("_"):
                continue  # those of bars
            heights = np.asarray(container.lines[0].get_ydata(), float).tolist()
            errors = container
        segments = errors.lines[2][0].get_segments() if errors is not None else [[(0, y), (0, y)] for y in heights]
        found[label] = [(y, float(s[0][1]), float(s[1][1])) for y, s in zip(heights, segments, strict=True)]
    return found


def check_png(path: Path, figure: Figure) -> None:
    pixels = imread(path)
    width, height = figure.get_size_inches() * RC["savefig.dpi"]
    assert pixels.shape[:2] == pytest.approx((height, width), abs=1)
    assert np.ptp(pixels[..., :3]) > 0.9
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    assert (edge[:, :3] > 0.99).all(), "something is cut off at the edge"


@pytest.mark.slow
@pytest.mark.parametrize("figure", CATALOGUE)
def test_figures_show_the_medians_and_the_spread(figure: str, tmp_path: Path, drawn: list[Figure]) -> None:
    rows = rows_of(figure)
    write_rows(tmp_path / "table.csv", rows)
    draw_table(tmp_path / "table.csv", tmp_path / "figure.png")
    (picture,) = drawn
    check_png(tmp_path / "figure.png", picture)
    panels = [axes for axes in picture.axes if axes.get_visible()]
    spec = CATALOGUE[figure]
    points: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        if row.method != "none":
            panel, curve = (row.workload, row.series), (row.method,)
            if not spec.panel_by_series:
                panel, curve = (row.workload,), (row.method, row.series)  # type: ignore[assignment]
            points.setdefault((*panel, "|", *curve, str(row.x)), []).append(row.value)
    expected = sorted((median(many), min(many), max(many)) for many in points.values())
    actual = sorted(point for axes in panels for curve in shown(axes).values() for point in curve)
    assert np.asarray(actual) == pytest.approx(np.asarray(expected))
    assert len(panels) == len({key[: key.index("|")] for key in points})
    for axes in panels:
        assert axes.get_xlabel() == spec.x_label
    assert panels[0].get_ylabel() == f"{spec.y_label} ({rows[0].unit})"
    (legend,) = picture.legends
    entries = {text.get_text() for text in legend.get_texts()}
    assert entries >= {label for axes in panels for label in shown(axes)}
    assert (spec.floor_label in entries) == any(row.floor is not None for row in rows)
    assert ("no checkpoints" in entries) == any(row.method == "none" for row in rows)
    assert legend.get_title().get_text().startswith("medians of 3 runs")


def test_the_limit_is_drawn_at_its_values(tmp_path: Path, drawn: list[Figure]) -> None:
    draw_rows(rows_of("8"), tmp_path / "8.png")
    (axes,) = drawn[0].axes
    strokes = next(c for c in axes.collections if c.get_label() == CATALOGUE["8"].floor_label)
    heights = [float(segment[0][1]) for segment in strokes.get_segments()]  # type: ignore[attr-defined]
    assert heights == pytest.approx([x / max(x / PLAIN, 1.0) for x in (1, 10, 25, 50, 75, 100)])


def test_each_bar_has_its_own_limit_where_the_figure_says_so(tmp_path: Path, drawn: list[Figure]) -> None:
    rows = [
        Row(figure="12", method="pccheck", series=series, x=x, value=5.0, unit="times", floor=max(1.0, 10 / x / number))
        for number, series in enumerate(("1", "2"), 1)
        for x in (1, 5)
    ]
    draw_rows(rows, tmp_path / "12.png")
    (axes,) = drawn[0].axes
    strokes = [c for c in axes.collections if c.get_label() == CATALOGUE["12"].floor_label]
    heights = [[float(segment[0][1]) for segment in each.get_segments()] for each in strokes]  # type: ignore[attr-defined]
    assert heights == [[10, 2], [5, 1]]
    bars = [patch for c in axes.containers if isinstance(c, BarContainer) for patch in c.patches]
    middles = [float(segment[:, 0].mean()) for each in strokes for segment in each.get_segments()]  # type: ignore[attr-defined]
    assert middles == pytest.approx([bar.get_x() + bar.get_width() / 2 for bar in bars])


def test_panels_that_share_an_axis_are_all_whole(tmp_path: Path, drawn: list[Figure]) -> None:
    rows = [
        Row(figure="gh5", workload=panel, method="pccheck", x=1e9, repetition=repetition, value=value, unit="s")
        for panel, values in (("low", (1, 2)), ("high", (8, 9)), ("lower", (0, 1)))
        for repetition, value in enumerate(values)
    ]
    draw_rows(rows, tmp_path / "gh5.png")
    for axes in drawn[0].axes:
        assert axes.get_ylim()[0] == 0
        assert axes.get_ylim()[1] > 9


def test_single_runs_have_no_error_bars_and_say_so(tmp_path: Path, drawn: list[Figure]) -> None:
    draw_rows([row for row in rows_of("8") if row.repetition == 0], tmp_path / "8.png")
    assert drawn[0].legends[0].get_title().get_text() == "one run each: no spread"
    bars = [c for c in drawn[0].axes[0].containers if isinstance(c, BarContainer)]
    assert bars
    assert all(bar.errorbar is None for bar in bars)


def test_a_method_looks_the_same_everywhere() -> None:
    known = ["torch_save", "torch_save_fsync", "torch_save_safe", "checkfreq", "gpm", "gemini", "pccheck"]
    styles = [method_style(method, known) for method in known]
    assert len({style.label for style in styles}) == len({style.colour for style in styles}) == len(known)
    assert len({style.marker for style in styles}) == len(known)
    assert method_style("pccheck", ["pccheck"]) == method_style("pccheck", ["new", "pccheck"])
    new = [method_style(name, ["one", "pccheck", "two"]) for name in ("one", "two")]
    assert [style.label for style in new] == ["one", "two"]
    assert len({style.colour for style in [*new, *styles]}) == len(known) + 2
    ladder = [series_style(str(place), place, 5).colour for place in range(5)]
    lightness = [sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) for colour in ladder]
    assert lightness == sorted(lightness, reverse=True)


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    png = tmp_path / "figure.png"
    for rows, message in (
        ([], "one figure are needed"),
        (rows_of("8") + rows_of("13"), "one figure are needed"),
        ([Row(figure="99", method="pccheck", x=1, value=1, unit="s")], "no figure '99'"),
        ([Row(figure="8", method="none", x=0, value=1, unit="s")], "no rows but those without"),
    ):
        with pytest.raises(TableError, match=message):
            draw_rows(rows, png)
    with pytest.raises(TableError, match="nothing in this timeline"):
        draw_timeline(Timeline(), png)
    assert not png.exists()


# -- timelines


def synthetic_timeline() -> Timeline:
    """Twelve steps of 60 ms, three checkpoints of eight chunks that take longer than the four steps between them."""
    spans = []
    now = 100.0
    for step in range(12):
        spans.append(Span(name="step", start=now, end=now + 0.06, step=step))
        now += 0.06
        if step % 4 == 1:
            counter, begin = step // 4, now
            spans.append(Span(name="stall", start=now, end=now + 0.015, step=step, counter=counter))
            about = {"step": step, "counter": counter}
            for chunk in range(8):
                copied = begin + 0.012 * (chunk + 1)
                spans.append(Span(name="capture", start=copied - 0.02, end=copied, nbytes=1, chunk=chunk, **about))
                wrote = begin + 0.05 + 0.03 * (chunk + 1)
                spans.append(Span(name="write", start=wrote - 0.055, end=wrote, nbytes=1, chunk=chunk, **about))
            spans.append(Span(name="commit", start=begin + 0.29, end=begin + 0.34, **about))
            spans.append(Span(name="flush", start=begin + 0.29, end=begin + 0.32, **about))
            spans.append(Span(name="flush", start=begin + 0.33, end=begin + 0.34, **about))
            now += 0.015
    return Timeline(spans)


def test_a_window_of_a_timeline(tmp_path: Path, drawn: list[Figure]) -> None:
    draw_timeline(synthetic_timeline(), tmp_path / "run.png", start=0.4, end=0.5)
    (axes,) = drawn[0].axes
    assert axes.get_xlim() == pytest.approx((399.5, 500.5))
    assert [text.get_text() for text in axes.texts] == ["step 1 durable"]
    for start, end in ((5.0, 6.0), (0.3, 0.3), (0.3, 0.2)):
        with pytest.raises(TableError, match=r"it is 0\.97 s long"):
            draw_timeline(synthetic_timeline(), tmp_path / "run.png", start=start, end=end)


def test_a_timeline_shows_every_span(tmp_path: Path, drawn: list[Figure]) -> None:
    timeline = synthetic_timeline()
    draw_timeline(timeline, tmp_path / "run.png")
    check_png(tmp_path / "run.png", drawn[0])
    (axes,) = drawn[0].axes
    bars = [
        (path.get_extents().x0, path.get_extents().x1)
        for collection in axes.collections
        for path in collection.get_paths()
    ]
    zero = min(span.start for span in timeline.spans)
    expected = [((span.start - zero) * 1e3, (span.end - zero) * 1e3) for span in timeline.spans]
    assert np.asarray(sorted(bars)) == pytest.approx(np.asarray(sorted(expected)), abs=1e-6)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["training", "in flight 1", "in flight 2"]
    assert axes.get_xlabel().startswith("time (ms)")
    assert {text.get_text() for text in axes.texts} == {f"step {step} durable" for step in (1, 5, 9)}
    assert len(drawn[0].legends[0].get_texts()) == len(STAGE_COLOURS)
    assert set(STAGES) < set(STAGE_COLOURS)


# -- the command


def test_plot_on_the_command_line(tmp_path: Path) -> None:
    table, png = tmp_path / "table.csv", tmp_path / "figure.png"
    write_rows(table, rows_of("13"))
    result = runner.invoke(app, ["bench", "plot", str(table), f"--out={png}"])
    assert result.exit_code == 0, result.output
    assert str(png) in result.stdout
    assert imread(png).ndim == 3
    timeline = tmp_path / "run.json"
    synthetic_timeline().write(timeline)
    result = runner.invoke(app, ["bench", "plot", str(timeline), f"--out={tmp_path / 'run.png'}"])
    assert result.exit_code == 0, result.output
    assert imread(tmp_path / "run.png").ndim == 3


def test_plot_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, timeline, png = tmp_path / "both.csv", tmp_path / "run.json", tmp_path / "figure.png"
    write_rows(both, rows_of("13") + rows_of("12"))
    timeline.write_text("{}")
    for arguments, status, message in (
        ([str(both), f"--out={png}"], 1, "say which to draw"),
        ([str(both), f"--out={png}", "--figure=8"], 1, "no rows of figure 8"),
        ([str(both), f"--out={tmp_path / 'missing' / 'a.png'}", "--figure=12"], 1, "FileNotFoundError"),
        ([str(tmp_path / "missing.csv"), f"--out={png}"], 1, "FileNotFoundError"),
        ([str(timeline), f"--out={png}"], 1, "no timeline"),
        ([str(timeline), f"--out={png}", "--figure=8"], 2, "--figure is for tables"),
        ([str(both), f"--out={png}", "--figure=12", "--end=1"], 2, "--start and --end are for timelines"),
        ([str(both)], 2, "--out"),
    ):
        result = runner.invoke(app, ["bench", "plot", *arguments])
        assert result.exit_code == status, result.output
        assert message in result.output
        assert "Traceback" not in result.output
        assert not png.exists()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = runner.invoke(app, ["bench", "plot", str(both), f"--out={png}", "--figure=12"])
    assert result.exit_code == 2
    assert "matplotlib" in result.stderr


def test_panels_share_an_axis_that_shows_all_of_them(tmp_path: Path, drawn: list[Figure]) -> None:
    rows = [
        Row(figure="8", workload=workload, method="pccheck", x=1, value=value, unit="steps/s")
        for workload, value in (("small", 1.0), ("large", 5.0), ("middle", 2.0))
    ]
    draw_rows(rows, tmp_path / "8.png")
    for axes in drawn[0].axes:
        assert axes.get_ylim()[0] == 0
        assert axes.get_ylim()[1] >= 5.0
