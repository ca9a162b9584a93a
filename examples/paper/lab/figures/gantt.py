"""The picture of a timeline: training above, and below it what each place in flight did, stage by stage."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.paper.lab.figures.style import RC, STAGE_COLOURS
from examples.paper.lab.table import TableError
from examples.paper.lab.timeline import STAGES, TRAINING, Span, Timeline, lanes

__all__ = ["draw_timeline"]

_TITLES = {
    "step": "training step",
    "stall": "training kept waiting",
    "capture": "copy and checksum of a chunk",
    "write": "write",
    "flush": "flush",
    "commit": "commit",
}
_LANES = {
    "step": "steps",
    "stall": "waits",
    "capture": "copies",
    "write": "writes",
    "flush": "flush",
    "commit": "commit",
}
_GAP = 0.8
_STAGE_HEIGHT = 3.0
_LABEL_SHARE = 0.08
_NARROW_SHARE = 0.004
_NUMBER_SHARE = 0.02


def draw_timeline(
    timeline: Timeline, png: str | os.PathLike[str], *, start: float = 0.0, end: float | None = None
) -> None:
    """Draw a timeline; a bar for every span, those that overlap below each other.

    Args:
        timeline: What was recorded.
        png: Where to draw.
        start: Seconds since the first span at which the picture begins.
        end: Where it ends; by default with the last span.

    Raises:
        TableError: there is nothing in it, or not in that window.
        OSError: ``png`` cannot be written.
    """
    zero = min((span.start for span in timeline.spans), default=0.0)
    last = max((span.end for span in timeline.spans), default=0.0) - zero
    window = start, last if end is None else end
    shown = Timeline(span for span in timeline.spans if span.end - zero >= window[0] and span.start - zero <= window[1])
    if not shown.spans or window[0] >= window[1]:
        raise TableError(
            f"there is nothing in this timeline between {window[0]:g} and {window[1]:g} s; it is {last:g} s long"
        )
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    scale, unit = (1e3, "ms") if window[1] - window[0] < 2 else (1.0, "s")
    limits = window[0] * scale, window[1] * scale
    rows = _rows(shown)
    height = sum(_height(stage) for _, stages in rows for stage in stages) * 0.26 + len(rows) * 0.3 + 1.6
    with mpl.rc_context(RC):
        figure = Figure(figsize=(12, min(30.0, max(3.0, height))), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        y = 0.0
        ticks: dict[float, str] = {}
        for title, stages in rows:
            for stage in stages:
                lane_height, top = _height(stage) / len(stage), y
                for lane in stage:
                    _draw_lane(axes, lane, y, lane_height, zero, scale, limits)
                    y += lane_height
                ticks[(top + y) / 2] = f"{title}: {_LANES[stage[0][0].name]}"
            axes.axhline(y + _GAP / 2, color="#DDDDDD", linewidth=0.8)
            y += _GAP
        _name_checkpoints(axes, shown, zero, scale, limits)
        axes.set_yticks(list(ticks), list(ticks.values()))
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.set_ylim(y - _GAP / 2, -_GAP)
        margin = (limits[1] - limits[0]) * 0.005
        axes.set_xlim(limits[0] - margin, limits[1] + margin)
        axes.set_xlabel(f"time ({unit}); bars of copies and writes begin when these are handed over")
        axes.set_title("Checkpoints beside training", fontweight="bold", pad=14)
        present = [name for name in STAGE_COLOURS if any(span.name == name for span in shown.spans)]
        patches = [Patch(color=STAGE_COLOURS[name], label=_TITLES[name]) for name in present]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))
        figure.savefig(Path(png), format="png")


def _rows(timeline: Timeline) -> list[tuple[str, list[list[list[Span]]]]]:
    """Return titles, stages and their lanes from top to bottom; spans of a lane do not overlap."""
    named = [[span for span in timeline.training if span.name == name] for name in TRAINING]
    rows = [("training", [[lane] for lane in named if lane])]
    checkpoints = timeline.checkpoints
    for number, counters in enumerate(timeline.places(), 1):
        spans = [span for counter in counters for span in checkpoints[counter]]
        by_stage = [[span for span in spans if span.name == stage] for stage in STAGES]
        stages = [lanes(own, [(span.start, span.end) for span in own]) for own in by_stage if own]
        rows.append((f"in flight {number}", stages))
    return [(title, stages) for title, stages in rows if stages]


def _height(stage: Sequence[Sequence[Span]]) -> float:
    return min(_STAGE_HEIGHT, float(len(stage)))


def _draw_lane(
    axes: Any, lane: Sequence[Span], y: float, height: float, zero: float, scale: float, limits: tuple[float, float]
) -> None:
    """Bars get a white edge where they are wide enough to keep their colour beside it."""
    narrow = (limits[1] - limits[0]) * _NARROW_SHARE
    widths = [(span.end - span.start) * scale for span in lane]
    colours = [STAGE_COLOURS[span.name] for span in lane]
    axes.broken_barh(
        [((span.start - zero) * scale, width) for span, width in zip(lane, widths, strict=True)],
        (y + height * 0.07, height * 0.86),
        facecolors=colours,
        edgecolors=["white" if width > narrow else colour for width, colour in zip(widths, colours, strict=True)],
        linewidth=0.5,
    )
    room = (limits[1] - limits[0]) * _NUMBER_SHARE
    for span, width in zip(lane, widths, strict=True):
        middle = (span.start - zero) * scale + width / 2
        if span.name == "step" and width > room and limits[0] < middle < limits[1]:
            axes.text(middle, y + height / 2, str(span.step), ha="center", va="center", fontsize=7, color="#555555")


def _name_checkpoints(axes: Any, timeline: Timeline, zero: float, scale: float, limits: tuple[float, float]) -> None:
    """Mark when each checkpoint became durable, and of which step it is where there is room to say so."""
    commits = [span for spans in timeline.checkpoints.values() for span in spans if span.name == "commit"]
    room = (limits[1] - limits[0]) * _LABEL_SHARE
    free = -math.inf
    for span in sorted(commits, key=lambda span: span.end):
        x = (span.end - zero) * scale
        if x > limits[1]:
            continue
        axes.axvline(x, color=STAGE_COLOURS["commit"], linewidth=0.9, linestyle=":", zorder=0.5)
        if x < free:
            continue
        free = x + room
        axes.annotate(
            f"step {span.step} durable",
            (x, -_GAP),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=7,
            color="#00614A",
            annotation_clip=False,
        )
