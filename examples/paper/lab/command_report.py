"""``python -m examples.paper report``: one page of everything that was measured."""

from __future__ import annotations

from pathlib import Path

from examples.paper.lab.report import write_report
from examples.paper.lab.table import TableError
from pccheck_async.cli.output import complain, size

__all__ = ["EMPTY", "run"]

EMPTY = 3


def run(source: Path, html: Path) -> int:
    """Write the page, and return the exit status."""
    try:
        if not write_report(source, html):
            complain(f"there is nothing in {source} to report: `python -m examples.paper run --out {source}` measures")
            return EMPTY
    except (TableError, OSError) as error:
        complain(error)
        return 1
    print(f"Report: {html} ({size(html.stat().st_size)})")
    return 0
