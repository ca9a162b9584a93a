"""Figures from tables: :func:`draw_table` draws what the rows of a CSV are about, all in one style.

Needs matplotlib (``pip install 'pccheck-async[plots]'``), which is imported when something is drawn.
"""

from examples.paper.lab.figures.catalogue import CATALOGUE
from examples.paper.lab.figures.draw import draw_rows, draw_table
from examples.paper.lab.figures.gantt import draw_timeline

__all__ = ["CATALOGUE", "draw_rows", "draw_table", "draw_timeline"]
