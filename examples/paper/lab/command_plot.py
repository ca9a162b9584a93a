"""``python -m examples.paper plot``: pictures of tables and timelines."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from examples.paper.lab.figures import draw_table, draw_timeline
from examples.paper.lab.table import TableError
from examples.paper.lab.timeline import Timeline
from pccheck_async.cli.output import complain

__all__ = ["run"]


def run(source: Path, out: Path, *, figure: str | None, start: float, end: float | None) -> int:
    """Draw, and return the exit status."""
    if importlib.util.find_spec("matplotlib") is None:
        complain("plotting needs matplotlib: pip install matplotlib")
        return 2
    is_timeline = source.suffix.lower() == ".json"
    if is_timeline and figure is not None:
        complain("--figure is for tables; a timeline is one picture")
        return 2
    if not is_timeline and (start, end) != (0.0, None):
        complain("--start and --end are for timelines (.json)")
        return 2
    try:
        if is_timeline:
            draw_timeline(Timeline.read(source), out, start=start, end=end)
        else:
            draw_table(source, out, figure)
    except (TableError, OSError) as error:
        complain(error)
        return 1
    print(f"Picture: {out}")
    return 0
