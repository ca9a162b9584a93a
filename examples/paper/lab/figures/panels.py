"""Bars and lines over medians, with the whole spread of the repetitions as error bars and the limit drawn in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from examples.paper.lab.figures.catalogue import FigureSpec
from examples.paper.lab.figures.style import FLOOR_COLOUR, NONE, Style
from examples.paper.lab.table import Row

__all__ = ["Panel", "Point", "draw_panel"]

_LINE_OF_ONE = {"color": "#000000", "linewidth": 0.8, "linestyle": ":", "zorder": 1.5}
_FLOOR = {"color": FLOOR_COLOUR, "linestyle": (0, (4, 1.5)), "linewidth": 1.6, "zorder": 4}
_LABEL_ROOM = 0.09
"""Of a logarithmic axis, between two labels."""
_ERROR = {"capsize": 2.5, "elinewidth": 1.0, "capthick": 1.0}


@dataclass(frozen=True, slots=True)
class Point:
    """The repetitions of one measurement.

    Attributes:
        value: Their median.
        low: The smallest.
        high: The largest.
        count: How many there are.
    """

    value: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Point:
        """Summarise repetitions."""
        return cls(median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class Panel:
    """What one pair of axes shows.

    Attributes:
        title: Above it.
        curves: Points by x, for each label to be drawn.
        floors: The limit by x; where methods disagree, the lowest median.
        own_floors: The limit of each label by x.
        none: The run without checkpoints.
    """

    title: str
    curves: Mapping[str, Mapping[float, Point]]
    floors: Mapping[float, float]
    own_floors: Mapping[str, Mapping[float, float]]
    none: Point | None

    @classmethod
    def of(cls, title: str, rows: Iterable[Row], labels: Mapping[tuple[str, str], str]) -> Panel:
        """Collect the rows of a panel; ``labels`` names the curve of each method and series, and sets their order."""
        values: dict[str, dict[float, list[float]]] = {label: {} for label in labels.values()}
        floors: dict[float, dict[str, list[float]]] = {}
        none: list[float] = []
        for row in rows:
            if row.method == "none":
                none.append(row.value)
                continue
            label = labels.get((row.method, row.series))
            if label is None:
                continue
            values[label].setdefault(row.x, []).append(row.value)
            if row.floor is not None:
                floors.setdefault(row.x, {}).setdefault(label, []).append(row.floor)
        own: dict[str, dict[float, float]] = {}
        for x, by_label in floors.items():
            for label, many in by_label.items():
                own.setdefault(label, {})[x] = median(many)
        return cls(
            title,
            {label: {x: Point.of(many) for x, many in sorted(by_x.items())} for label, by_x in values.items() if by_x},
            {x: min(median(many) for many in by_label.values()) for x, by_label in sorted(floors.items())},
            own,
            Point.of(none) if none else None,
        )

    @property
    def xs(self) -> list[float]:
        """All values of x."""
        return sorted({x for points in self.curves.values() for x in points})


def draw_panel(axes: Any, panel: Panel, spec: FigureSpec, styles: Mapping[str, Style]) -> None:
    """Draw a panel on matplotlib axes."""
    places = {x: float(place) for place, x in enumerate(panel.xs)} if spec.even else {x: x for x in panel.xs}
    width = 0.0
    if spec.kind == "bars":
        width = _draw_bars(axes, panel, places, styles, floor_label=spec.floor_label if spec.floor_each else "")
    else:
        _draw_lines(axes, panel, places, styles)
    if not spec.floor_each:
        _draw_floors(axes, panel, places, width, spec.floor_label)
    if panel.none is not None:
        axes.axhline(panel.none.value, color=NONE.colour, linewidth=1.4, label=NONE.label, zorder=2.5)
        if panel.none.high > panel.none.low:
            axes.axhspan(panel.none.low, panel.none.high, color=NONE.colour, alpha=0.12, linewidth=0, zorder=2.4)
    if spec.one:
        axes.axhline(1.0, **_LINE_OF_ONE)
    _set_axes(axes, panel, spec, places)


def _draw_bars(
    axes: Any, panel: Panel, places: Mapping[float, float], styles: Mapping[str, Style], *, floor_label: str
) -> float:
    """Draw a group of bars at each x, each with its limit where that has a name; returns the width of a group."""
    group = 0.82
    labels = [label for label in styles if label in panel.curves]
    width = group / max(1, len(labels))
    for number, label in enumerate(labels):
        style, points = styles[label], panel.curves[label]
        middles = [places[x] - group / 2 + (number + 0.5) * width for x in points]
        axes.bar(
            middles,
            [point.value for point in points.values()],
            width * 0.92,
            yerr=_errors(points.values()),
            label=style.label,
            color=style.colour,
            hatch=style.hatch,
            edgecolor="white",
            linewidth=0.4,
            error_kw={"elinewidth": 1.0, "capthick": 1.0, "capsize": min(2.5, 14 * width), "ecolor": "#222222"},
            zorder=2,
        )
        floors = panel.own_floors.get(label, {})
        if floor_label and floors:
            lefts = [places[x] - group / 2 + number * width for x in floors]
            rights = [left + width for left in lefts]
            axes.hlines(list(floors.values()), lefts, rights, **_FLOOR | {"linestyle": "-"}, label=floor_label)
    return group


def _draw_lines(axes: Any, panel: Panel, places: Mapping[float, float], styles: Mapping[str, Style]) -> None:
    for label, style in styles.items():
        if (points := panel.curves.get(label)) is None:
            continue
        axes.errorbar(
            [places[x] for x in points],
            [point.value for point in points.values()],
            yerr=_errors(points.values()),
            label=style.label,
            color=style.colour,
            marker=style.marker or None,
            markeredgecolor="white",
            markeredgewidth=0.6,
            linestyle="-" if style.marker else "--",
            zorder=3,
            **_ERROR,
        )


def _draw_floors(axes: Any, panel: Panel, places: Mapping[float, float], width: float, label: str) -> None:
    """Over bars a stroke as wide as the group, else a line."""
    floors = {x: floor for x, floor in panel.floors.items() if x in places}
    if not floors:
        return
    look = _FLOOR | {"label": label}
    if width:
        lefts = [places[x] - width / 2 - 0.03 for x in floors]
        axes.hlines(list(floors.values()), lefts, [left + width + 0.06 for left in lefts], **look)
    else:
        axes.plot([places[x] for x in floors], list(floors.values()), **look)


def _set_axes(axes: Any, panel: Panel, spec: FigureSpec, places: Mapping[float, float]) -> None:
    axes.set_title(panel.title)
    if spec.log_y:
        axes.set_yscale("log")
    if spec.log_x:
        axes.set_xscale("log")
        axes.grid(visible=True, axis="x")
    axes.set_xticks(list(places.values()), _x_labels(spec, places), minor=False)
    axes.minorticks_off()
    if spec.log_y:
        _set_log_ticks(axes, panel)


def _x_labels(spec: FigureSpec, places: Mapping[float, float]) -> list[str]:
    """Write every x but those that are too near to the next one on a logarithmic axis."""
    if not spec.log_x:
        return [spec.x_text(x) for x in places]
    room = _LABEL_ROOM * math.log(max(places.values()) / min(places.values()))
    last = math.inf
    labels = []
    for x, place in reversed(list(places.items())):
        shown = math.log(last / place) >= room
        labels.append(spec.x_text(x) if shown else "")
        last = place if shown else last
    return labels[::-1]


def _set_log_ticks(axes: Any, panel: Panel) -> None:
    """Write the numbers out, and those between the powers of ten where these are few."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    values = [v for points in panel.curves.values() for point in points.values() for v in (point.low, point.high) if v]
    few = bool(values) and max(values) < 300 * min(values)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}" if value < 1e6 else f"{value:.0e}"))


def _errors(points: Iterable[Point]) -> list[list[float]] | None:
    """Distances to the smallest and the largest; None where nothing was repeated."""
    points = list(points)
    if all(point.count == 1 for point in points):
        return None
    below, above = ([p.value - p.low for p in points], [p.high - p.value for p in points])
    assert all(math.isfinite(each) and each >= 0 for each in below + above)
    return [below, above]
