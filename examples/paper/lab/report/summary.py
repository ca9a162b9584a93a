"""Who is ahead, of whom, where and by how much: said of every comparison, those that are lost included."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from examples.paper.lab.figures.style import method_style
from examples.paper.lab.report.tables import REFERENCES, Group, Line, Ratio, Summed, is_own, number

__all__ = ["VERDICTS", "Comparison", "Part", "Verdict", "compare", "count"]

Verdict = Literal["behind", "ahead", "unclear"]

VERDICTS: tuple[Verdict, ...] = ("behind", "ahead", "unclear")
"""In the order in which they are told."""

_FEW_POINTS = 3


@dataclass(frozen=True, slots=True)
class Part:
    """The points at which one verdict holds.

    Attributes:
        verdict: Whether the baseline is ahead.
        single: Whether that is from one run of a method, and so no more than what was seen.
        by: By how many times it is worse (behind) or else better, of percentages by how many points; as text.
        where: Which points, as text; empty where there is one only.
        points: How many.
    """

    verdict: Verdict
    single: bool
    by: str
    where: str
    points: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The baseline and another method, over all points of a figure and workload.

    Attributes:
        baseline: Whose view it is, as people call it.
        method: The other's name in the table.
        label: As people call it.
        own: Whether the other is this package too.
        predicted: Whether a model says so, and no measurement.
        parts: One for each verdict that there is.
    """

    baseline: str
    method: str
    label: str
    own: bool
    predicted: bool
    parts: Sequence[Part]

    @property
    def counts(self) -> bool:
        """Whether it says how this package compares with others, by measurement."""
        return not self.own and not self.predicted


def compare(table: Summed) -> list[Comparison]:
    """Return the comparisons of a figure and workload, in the order of its methods."""
    if table.baseline is None:
        return []
    found: dict[str, list[tuple[Group, Line]]] = {}
    for group in table.groups:
        for line in group.lines:
            if group.saves and line.ratio is not None and line.method not in REFERENCES:
                found.setdefault(line.method, []).append((group, line))
    name = method_style(table.baseline).label
    return [
        Comparison(name, method, points[0][1].label, is_own(method), table.predicted, _parts(table, points))
        for method, points in found.items()
    ]


def count(comparisons: Iterable[Comparison]) -> dict[str, int]:
    """Return how many points have each verdict, and under "single" those of one run.

    Those against this package itself are left out, and predictions.
    """
    found = dict.fromkeys((*VERDICTS, "single"), 0)
    for comparison in comparisons:
        for part in comparison.parts:
            found["single" if part.single else part.verdict] += part.points if comparison.counts else 0
    return found


def _parts(table: Summed, points: Sequence[tuple[Group, Line]]) -> list[Part]:
    found: dict[tuple[Verdict, bool], list[tuple[Group, Line, Ratio]]] = {}
    for group, line in points:
        advantage = _advantage(table, line)
        found.setdefault(_verdict(table, group, line, advantage), []).append((group, line, advantage))
    parts = []
    for (verdict, single), own in sorted(found.items(), key=lambda item: (item[0][1], VERDICTS.index(item[0][0]))):
        where = "" if len(points) == 1 else _where(table, own, len(points))
        parts.append(Part(verdict, single, _by(verdict, [ratio for _, _, ratio in own]), where, len(own)))
    return parts


def _advantage(table: Summed, line: Line) -> Ratio:
    """Return by how much the baseline is better: more than equal methods have where it is."""
    assert line.ratio is not None
    return line.ratio.turned() if table.more_is_better else line.ratio


def _verdict(table: Summed, group: Group, line: Line, advantage: Ratio) -> tuple[Verdict, bool]:
    """By the interval where rounds pair up, else by the extremes: only what does not overlap is told apart.

    Returns:
        It, and whether it is from one run.
    """
    same = advantage.same
    if advantage.low is not None and advantage.high is not None:
        return "ahead" if advantage.low > same else "behind" if advantage.high < same else "unclear", False
    base = next(
        (
            each
            for series in (line.series, "")
            for each in group.lines
            if (each.method, each.series) == (table.baseline, series)
        ),
        None,
    )
    if base is None or min(base.point.count, line.point.count) < 2:
        return "ahead" if advantage.value > same else "behind" if advantage.value < same else "unclear", True
    above, below = line.point.low > base.point.high, line.point.high < base.point.low
    if table.more_is_better:
        above, below = below, above
    return "ahead" if above else "behind" if below else "unclear", False


def _by(verdict: Verdict, advantages: Sequence[Ratio]) -> str:
    ratios = [each.turned() for each in advantages] if verdict == "behind" else list(advantages)
    low, high = min(ratio.value for ratio in ratios), max(ratio.value for ratio in ratios)
    (one, *_) = ratios
    unit = "points" if one.difference else "× (one of the two is 0)" if math.isinf(high) else "×"
    if len(ratios) > 1 and number(low, 3) != number(high, 3):
        return f"{number(low, 3)} to {number(high, 3)} {unit}"
    if math.isinf(high) or len(ratios) > 1 or one.low is None or one.high is None:
        return f"{number(one.value, 3)} {unit}"
    return f"{number(one.value, 3)} {unit} [{number(one.low, 3)}, {number(one.high, 3)}]"


def _where(table: Summed, points: Sequence[tuple[Group, Line, Ratio]], total: int) -> str:
    share = f"at {len(points)} of {total} points"
    if len(points) == total or len(points) > _FEW_POINTS:
        return share
    named = []
    for group, line, _ in points:
        series = f"{table.series_name or 'series'} {line.series}" if line.series else ""
        named.append(", ".join(part for part in (group.title, series) if part))
    return f"{share} ({'; '.join(named)})"
