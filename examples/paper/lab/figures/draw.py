"""From the rows of one figure to a PNG."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.paper.lab.figures.catalogue import CATALOGUE, FigureSpec
from examples.paper.lab.figures.panels import Panel, draw_panel
from examples.paper.lab.figures.style import RC, Style, method_style, series_style
from examples.paper.lab.table import Row, TableError, read_rows

__all__ = ["draw_rows", "draw_table"]

_PANEL_INCHES = (5.6, 3.9)
_BAR_INCHES = 0.14
_MOST_COLUMNS = 3
_LETTER_INCHES, _KEY_INCHES = 0.078, 0.65


def draw_table(csv: str | os.PathLike[str], png: str | os.PathLike[str], figure: str | None = None) -> None:
    """Draw the figure whose rows a CSV holds.

    Args:
        csv: A table as :mod:`examples.paper.lab.table` describes it.
        png: Where to draw.
        figure: Which of its figures; may be left out where there is one only.

    Raises:
        TableError: it is no such table, or does not say one known figure.
        OSError: a file cannot be read or written.
    """
    rows = read_rows(csv)
    found = list(dict.fromkeys(row.figure for row in rows))
    if figure is None and len(found) != 1:
        holds = f"the figures {', '.join(found)}: say which to draw" if found else "no rows"
        raise TableError(f"{os.fspath(csv)} holds {holds}")
    chosen = [row for row in rows if row.figure == (figure or found[0])]
    if not chosen:
        raise TableError(f"{os.fspath(csv)} has no rows of figure {figure}; it has {', '.join(found) or 'none at all'}")
    draw_rows(chosen, png)


def draw_rows(rows: Sequence[Row], png: str | os.PathLike[str]) -> None:
    """Draw the rows of one figure.

    Raises:
        TableError: they are of several figures, or of an unknown one, or hold nothing to draw.
        OSError: ``png`` cannot be written.
    """
    names = {row.figure for row in rows}
    if len(names) != 1:
        raise TableError(f"the rows of one figure are needed, not of {len(names)}")
    name = names.pop()
    if name not in CATALOGUE:
        raise TableError(f"there is no figure {name!r}; there are {', '.join(CATALOGUE)}")
    spec = CATALOGUE[name]
    if spec.colour_by == "method":
        rows = [row for row in rows if row.method == "none" or row.x > 0]  # at interval 0 nothing is saved
    labels, styles = _curves(rows, spec)
    panels = [panel for panel in _panels(rows, spec, labels) if panel.curves]
    if not panels:
        raise TableError(f"figure {name} has no rows but those without checkpoints")
    _save(panels, spec, styles, unit=rows[0].unit, repetitions=_repetitions(panels), png=Path(png))


def _curves(rows: Sequence[Row], spec: FigureSpec) -> tuple[dict[tuple[str, str], str], dict[str, Style]]:
    """Return which curve each method and series belong to, and how the curves look, in the legend's order."""
    pairs = list(dict.fromkeys((row.method, row.series) for row in rows if row.method != "none"))
    methods = list(dict.fromkeys(method for method, _ in pairs))
    series = sorted({series for _, series in pairs}, key=_natural)
    labels: dict[tuple[str, str], str] = {}
    styles: dict[str, Style] = {}
    if spec.colour_by == "method":
        for method, own in pairs:
            style = method_style(method, methods)
            name = (
                style.label if spec.panel_by_series or not own else f"{style.label}, {spec.series_name} {own}".strip()
            )
            labels[method, own] = name
            styles[name] = Style(name, style.colour, style.marker, style.hatch)
        return labels, styles
    for place, own in enumerate(series):
        for method in methods:
            if (method, own) in pairs:
                prefix = f"{method_style(method, methods).label}, " if len(methods) > 1 else ""
                name = f"{prefix}{spec.series_name} {own}".strip()
                labels[method, own] = name
                hatch = "" if method == methods[0] else "///"
                plain = series_style(name, place, len(series))
                styles[name] = Style(name, plain.colour, plain.marker, hatch)
    return labels, styles


def _panels(rows: Sequence[Row], spec: FigureSpec, labels: dict[tuple[str, str], str]) -> list[Panel]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.method != "none":
            groups.setdefault((row.workload, row.series if spec.panel_by_series else ""), []).append(row)
    for (workload, _), group in groups.items():
        group.extend(row for row in rows if row.method == "none" and row.workload == workload)
    titles = {
        key: ", ".join(part for part in (key[0], f"{spec.series_name} {key[1]}" if key[1] else "") if part)
        for key in groups
    }
    return [Panel.of(titles[key], group, labels) for key, group in groups.items()]


def _repetitions(panels: Sequence[Panel]) -> str:
    counts = {point.count for panel in panels for points in panel.curves.values() for point in points.values()}
    if counts == {1}:
        return "one run each: no spread"
    some = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{counts.pop()}"
    return f"medians of {some} runs; error bars from the smallest to the largest"


def _save(
    panels: Sequence[Panel], spec: FigureSpec, styles: dict[str, Style], *, unit: str, repetitions: str, png: Path
) -> None:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = _PANEL_INCHES
    if spec.kind == "bars":
        width = max(width, _BAR_INCHES * max(len(panel.curves) * (len(panel.xs) + 1) for panel in panels))
    most = 2 if width > _PANEL_INCHES[0] or len(panels) == 4 else _MOST_COLUMNS
    columns = min(most, len(panels))
    lines = -(-len(panels) // columns)
    with mpl.rc_context(RC):
        figure = Figure(figsize=(max(6.4, width * columns), height * lines + 0.9), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(spec.title, fontsize=13, fontweight="bold")
        grid = figure.subplots(lines, columns, sharey=True, squeeze=False)
        flat = list(grid.flat)
        for axes, panel in zip(flat, panels, strict=False):
            draw_panel(axes, panel, spec, styles)
            axes.set_xlabel(spec.x_label)
        if spec.from_zero and not spec.log_y:
            # After the last panel: all share the axis, and it no longer grows from here on. Values that hardly differ
            # would lie on its upper end.
            flat[0].set_ylim(0, 1.03 * flat[0].get_ylim()[1])
        for axes in flat[len(panels) :]:
            axes.set_visible(False)
        for row in grid:
            row[0].set_ylabel(f"{spec.y_label} ({unit})")
        _add_legend(figure, flat, list(styles), repetitions)
        figure.savefig(png, format="png")


def _add_legend(figure: Any, axes: Sequence[Any], curves: Sequence[str], note: str) -> None:
    """One legend for all panels, below them, limits last, and a note on what the error bars are."""
    found: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    labels = sorted(found, key=lambda label: label not in curves)
    needed = _KEY_INCHES + _LETTER_INCHES * max(map(len, labels))
    columns = max(2, min(len(labels), int(figure.get_size_inches()[0] // needed)))
    handles = [found[label] for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, title=note)


def _natural(text: str) -> tuple[float, str]:
    """Numbers by their size, before all else."""
    try:
        return float(text), ""
    except ValueError:
        return float("inf"), text
