"""Figures from tables: :func:`draw_table` draws what the rows of a CSV are about, all in one style.

Needs matplotlib (``pip install 'pccheck-async[plots]'``), which is imported when something is drawn.
"""

from pccheck_async.bench.figures.catalogue import CATALOGUE
from pccheck_async.bench.figures.draw import draw_rows, draw_table
from pccheck_async.bench.figures.gantt import draw_timeline

__all__ = ["CATALOGUE", "draw_rows", "draw_table", "draw_timeline"]
