"""The rows of a figure, summed up: medians, extremes, and ratios to this package's."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from examples.paper.lab.figures.catalogue import CATALOGUE
from examples.paper.lab.figures.panels import Point
from examples.paper.lab.figures.style import method_style
from examples.paper.lab.medians import median_interval
from examples.paper.lab.table import Row

__all__ = ["BASELINE", "REFERENCES", "Group", "Line", "Ratio", "Summed", "amount", "is_own", "number", "sum_up"]

BASELINE = "pccheck"
"""The method that ratios are to."""

REFERENCES = ("none", "ideal")
"""What stands in a ``method`` column and is no way to save."""

_PREDICTED = ("9",)
_BYTES = ("B", "byte", "bytes")
_RATE = re.compile(r"/\s*(s|min|h)$")

Values = Mapping[int, float]
"""Measured values by their repetition."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Values of a method by those of the baseline; of percentages, which may be 0, those of the baseline subtracted.

    Attributes:
        value: The median of the rounds' ratios; where rounds do not pair up, the ratio of the medians.
        low: The lower end of its 95 % bootstrap interval, None where fewer than two rounds pair up.
        high: The upper end.
        pairs: How many rounds did.
        difference: Whether it is a difference, which is 0 where a ratio is 1.
    """

    value: float
    low: float | None
    high: float | None
    pairs: int
    difference: bool = False

    @classmethod
    def of(cls, values: Values, base: Values, *, difference: bool = False, least: float = -math.inf) -> Ratio:
        """Compare repetition by repetition where both have it: interleaved rounds saw the same disturbances.

        What is less than ``least`` is taken for that.
        """
        values, base = ({n: max(each, least) for n, each in which.items()} for which in (values, base))
        compare = _subtract if difference else _divide
        both = sorted(values.keys() & base.keys())
        if len(both) < 2:
            return cls(compare(median(values.values()), median(base.values())), None, None, 0, difference)
        return cls(*median_interval([compare(values[each], base[each]) for each in both]), len(both), difference)

    @property
    def same(self) -> float:
        """What it is of equal methods."""
        return 0.0 if self.difference else 1.0

    def turned(self) -> Ratio:
        """Return the baseline's by the method's."""

        def turn(value: float) -> float:
            return -value if self.difference else 1 / value if value else math.inf

        low, high = (None if end is None else turn(end) for end in (self.high, self.low))
        return Ratio(turn(self.value), low, high, self.pairs, self.difference)


@dataclass(frozen=True, slots=True)
class Line:
    """One measurement of a method.

    Attributes:
        method: As in the table.
        label: As people call it.
        series: The value of the figure's second parameter.
        point: Median, extremes and how many.
        ratio: To the baseline; None of itself, and where it was not measured there.
        floor: The limit that no method beats.
    """

    method: str
    label: str
    series: str
    point: Point
    ratio: Ratio | None
    floor: float | None


@dataclass(frozen=True, slots=True)
class Group:
    """All measurements at an x.

    Attributes:
        x: Where.
        title: Says where; empty where the figure has one x only and it means nothing.
        saves: Whether anything is saved there: not at interval 0.
        lines: In the order of the rows.
    """

    x: float
    title: str
    saves: bool
    lines: Sequence[Line]


@dataclass(frozen=True, slots=True)
class Summed:
    """A workload of a figure.

    Attributes:
        figure: Name in the table.
        title: What is measured.
        x_label: What x is.
        series_name: What ``series`` is the value of.
        workload: What was saved, may be empty.
        unit: Of all values.
        more_is_better: Rates are the better the higher they are; all else costs.
        predicted: Whether a model says so, and no measurement.
        baseline: The method that ratios are to; None where none of this package's is there.
        groups: By x, ascending.
    """

    figure: str
    title: str
    x_label: str
    series_name: str
    workload: str
    unit: str
    more_is_better: bool
    predicted: bool
    baseline: str | None
    groups: Sequence[Group]

    @property
    def has_ratios(self) -> bool:
        """Whether anything is compared."""
        return any(line.ratio for group in self.groups for line in group.lines)

    @property
    def has_floor(self) -> bool:
        """Whether there is a limit."""
        return any(line.floor is not None for group in self.groups for line in group.lines)


def sum_up(rows: Iterable[Row]) -> list[Summed]:
    """Return a table for each figure and workload, in the order of the rows."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.figure, row.workload), []).append(row)
    return [_sum_up(figure, workload, own) for (figure, workload), own in groups.items()]


def is_own(method: str) -> bool:
    """Whether a method is this package's; what PCcheck's authors published is not."""
    return method == BASELINE or method.startswith((f"{BASELINE} ", f"{BASELINE},"))


def number(value: float, digits: int = 4) -> str:
    """Return a number for people: so many significant digits, no exponent unless there is no way without."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    rounded = f"{value:.{digits - 1}e}"
    exponent = int(rounded.partition("e")[2])
    return f"{float(rounded):,.{max(0, digits - 1 - exponent)}f}" if -7 <= exponent < 15 else rounded


def amount(value: float, unit: str) -> str:
    """Return a value without its unit, bytes aside: those get the prefix that fits each."""
    if unit not in _BYTES:
        return number(value)
    for prefix, nbytes in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= nbytes:
            return f"{number(value / nbytes)} {prefix}"
    return f"{number(value)} B"


def _sum_up(figure: str, workload: str, rows: Sequence[Row]) -> Summed:
    spec = CATALOGUE.get(figure)
    values: dict[tuple[float, str, str], dict[int, float]] = {}
    floors: dict[tuple[float, str, str], list[float]] = {}
    for row in rows:
        key = row.x, row.method, row.series
        values.setdefault(key, {})[row.repetition] = row.value
        if row.floor is not None:
            floors.setdefault(key, []).append(row.floor)
    least = -math.inf if spec is None else spec.least
    methods = list(dict.fromkeys(row.method for row in rows))
    baseline = next((each for each in sorted(methods, key=lambda name: name != BASELINE) if is_own(each)), None)

    def line(key: tuple[float, str, str]) -> Line:
        x, method, series = key
        base = None
        if baseline is not None and method not in (baseline, "none"):
            base = values.get((x, baseline, series)) or values.get((x, baseline, ""))
        return Line(
            method=method,
            label=method_style(method, methods).label,
            series=series,
            point=Point.of(list(values[key].values())),
            ratio=Ratio.of(values[key], base, difference=rows[0].unit == "%", least=least) if base else None,
            floor=median(floors[key]) if key in floors else None,
        )

    xs = sorted({x for x, _, _ in values})
    intervals = spec is not None and spec.colour_by == "method"  # of a figure whose x is that, 0 is: never
    groups = []
    for x in xs:
        saves = not (x == 0 and intervals)
        text = f"{spec.x_label}: {spec.x_text(x)}" if spec is not None else f"x: {x:g}" if len(xs) > 1 else ""
        lines = [line(key) for key in values if key[0] == x]
        groups.append(Group(x, text if saves else "without checkpoints", saves, lines))
    return Summed(
        figure=figure,
        title=spec.title if spec is not None else figure,
        x_label=spec.x_label if spec is not None else "x",
        series_name=spec.series_name if spec is not None else "",
        workload=workload,
        unit=rows[0].unit,
        more_is_better=_RATE.search(rows[0].unit) is not None,
        predicted=figure in _PREDICTED,
        baseline=baseline,
        groups=groups,
    )


def _subtract(one: float, other: float) -> float:
    return one - other


def _divide(one: float, other: float) -> float:
    if other:
        return one / other
    return math.inf if one else 1.0
