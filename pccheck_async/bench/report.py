# SPDX-License-Identifier: Apache-2.0
"""Shows the measurements as a table, as JSON, or as a picture."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from pccheck_async.bench.rounds import Outcome, RoundComparison

__all__ = ["as_json", "draw", "quartiles", "ratio", "table"]

_FEW_TICKS = 0.05
_FIGURES = ("stall", "durable", "processor", "load")


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile; a single value is returned three times."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return low, middle, high


def ratio(outcome: Outcome, baseline: Outcome, figure: str) -> float | None:
    """Return the median over rounds of ``outcome`` divided by ``baseline``: a disturbed round affects both values.

    None if the two have other numbers of rounds, or the baseline is 0 in one.
    """
    pairs = list(zip(outcome.values(figure), baseline.values(figure), strict=False))
    if len(outcome.samples) != len(baseline.samples) or not pairs or min(one for _, one in pairs) <= 0:
        return None
    return statistics.median(one / other for one, other in pairs)


def table(found: RoundComparison) -> Table:
    """Return a table of medians with quartiles, the fastest to be durable first, the disk's own limit last."""
    shown = Table(box=SIMPLE, pad_edge=False)
    shown.add_column("method", no_wrap=True)
    for heading in ("call returns, ms", "durable, ms", "GB/s", "x pccheck", "load, ms", "processor, s/GiB"):
        shown.add_column(heading, justify="right", no_wrap=True)
    baseline = found.outcomes[0]
    measured = [outcome for outcome in found.outcomes if not outcome.problem]
    for outcome in sorted(measured, key=lambda outcome: statistics.median(outcome.values("durable"))):
        factor = ratio(outcome, baseline, "durable")
        shown.add_row(
            outcome.method,
            _spread(outcome.values("stall")),
            _spread(outcome.values("durable")),
            _rate(found.nbytes, outcome.values("durable")),
            "" if factor is None else f"{factor:.2f}",
            _spread(outcome.values("load")),
            _processor(statistics.median(outcome.values("processor")), found.nbytes),
        )
    if found.raw:
        shown.add_row("the disk itself", "", _spread(found.raw), _rate(found.nbytes, found.raw), "", "", "")
    return shown


def _processor(seconds: float, nbytes: int) -> str:
    """Return processor seconds per GiB; "too short" for less than a few hundredths, the unit in which Linux counts."""
    return f"{seconds * (1 << 30) / nbytes:.2f}" if seconds >= _FEW_TICKS else "too short"


def as_json(found: RoundComparison) -> str:
    """Return all samples, medians, quartiles and ratios as JSON, times in seconds, without Infinity and NaN."""
    methods = [
        {"method": outcome.method, "problem": outcome.problem or None}
        | {figure: _summary(outcome.values(figure)) for figure in _FIGURES}
        | {"ratio_to_pccheck": {figure: ratio(outcome, found.outcomes[0], figure) for figure in _FIGURES}}
        for outcome in found.outcomes
    ]
    what = {
        "bytes": found.nbytes,
        "rounds": found.rounds,
        "place": asdict(found.place),
        "disk": {"way": found.raw_way, "durable": _summary(found.raw)} if found.raw else None,
        "methods": methods,
    }
    return json.dumps(what, indent=1, allow_nan=False) + "\n"


def draw(found: RoundComparison, path: Path) -> None:
    """Draw medians and quartiles of the stall and of the time to durability into a file; needs matplotlib."""
    from matplotlib.figure import Figure

    measured = [outcome for outcome in found.outcomes if not outcome.problem]
    names = [outcome.method for outcome in measured]
    figure = Figure(figsize=(10, 1.6 + 0.5 * len(names)), layout="constrained", dpi=150)
    panels = figure.subplots(1, 2, sharey=True)
    colors = ["tab:blue" if name == "pccheck" else "0.6" for name in names]
    titles = {"stall": "the call returns (training waits)", "durable": "durable"}
    for panel, (name, title) in zip(panels, titles.items(), strict=True):
        low, middle, high = 1e3 * np.array([quartiles(outcome.values(name)) for outcome in measured]).T
        bars = panel.barh(names, middle, xerr=[middle - low, high - middle], color=colors, capsize=3)
        panel.bar_label(bars, fmt="%.3g", padding=3)
        panel.set_xlim(0, 1.15 * high.max())  # room for the last label
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(title)
        panel.set_xlabel("ms: median and quartiles; less is better")
    if found.raw:
        panels[1].axvline(statistics.median(found.raw) * 1e3, color="tab:red", linestyle="--")
        panels[1].set_title("durable; dashed: the disk itself (O_DIRECT)")
    panels[0].invert_yaxis()
    figure.suptitle(f"{found.nbytes / (1 << 20):.4g} MiB on {found.place.filesystem}, {found.rounds} rounds")
    figure.savefig(path)


def _summary(values: Sequence[float]) -> dict[str, Any] | None:
    if not values:
        return None
    low, middle, high = quartiles(values)
    return {"median": middle, "quartiles": [low, high], "samples": list(values)}


def _spread(values: Sequence[float]) -> str:
    low, middle, high = (_digits(value * 1e3) for value in quartiles(values))
    return f"{middle} [{low}, {high}]"


def _digits(value: float) -> str:
    """Return a number with three significant digits, but with all digits before the decimal point."""
    places = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{max(0, min(places, 4))}f}"


def _rate(nbytes: int, seconds: Sequence[float]) -> str:
    return f"{nbytes / statistics.median(seconds) / 1e9:.2f}"
