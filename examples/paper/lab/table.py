"""The one table that every benchmark writes and every figure is drawn from: CSV, one row per repetition.

==========  ==========================================================================================================
column      holds
==========  ==========================================================================================================
figure      which figure the row belongs to, such as ``8`` or ``gh5``
workload    what was trained or saved; each workload gets a panel of its own
method      how it was saved, such as ``pccheck`` or ``torch_save``; ``none``, at x 0 and once for each workload, is the
            run without checkpoints
series      the value of a second parameter where the figure has one (N, p, chunks), else empty
x           the number on the horizontal axis: interval, bytes, k...
repetition  0, 1, 2...: every run is its own row, and nothing is averaged before it is drawn
value       what was measured, in ``unit``
unit        the same in all rows of a figure
floor       the limit that no method beats at this x (for overheads the budget), in ``unit``; empty where there is none
==========  ==========================================================================================================
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

__all__ = ["COLUMNS", "Row", "TableError", "read_rows", "write_rows"]


class TableError(ValueError):
    """A table is not what this module describes; names the file and the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement; the columns are explained above.

    Raises:
        TableError: a field is missing or out of range.
    """

    figure: str
    workload: str = ""
    method: str
    series: str = ""
    x: float
    repetition: int = 0
    value: float
    unit: str
    floor: float | None = None

    def __post_init__(self) -> None:
        for name in ("figure", "method", "unit"):
            if not getattr(self, name):
                raise TableError(f"{name} is empty")
        for name in ("figure", "workload", "method", "series", "unit"):
            if any(ord(letter) < 32 for letter in getattr(self, name)):
                raise TableError(f"{name} holds a control character: {getattr(self, name)!r}")
        if not math.isfinite(self.x):
            raise TableError(f"x is a finite number, not {self.x!r}")
        if self.repetition < 0:
            raise TableError(f"repetition counts from 0, not {self.repetition!r}")
        for name in ("value", "floor"):
            number = getattr(self, name)
            if number is not None and not 0 <= number < math.inf:
                raise TableError(f"{name} is a finite number that is not negative, not {number!r}")


COLUMNS = tuple(field.name for field in fields(Row))


def write_rows(path: str | os.PathLike[str], rows: Iterable[Row]) -> None:
    """Write a table; what is read back is equal, to the last bit of every number.

    Raises:
        TableError: rows contradict each other; nothing is written.
    """
    rows = list(rows)
    _check_together(rows, [f"row {number}" for number, _ in enumerate(rows, 1)])
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(["" if cell is None else cell for cell in astuple(row)] for row in rows)


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """Read and check a table.

    Raises:
        TableError: it is not one; names the line and says what is wrong there.
        OSError: it cannot be read.
    """
    rows: list[Row] = []
    places: list[str] = []
    with Path(path).open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        try:
            heading = next(reader, [])
            if tuple(heading) != COLUMNS:
                raise TableError(f"the columns are {','.join(COLUMNS)}, not {','.join(heading)}")
            for cells in reader:
                places.append(f"line {reader.line_num}")
                rows.append(_row(cells))
            _check_together(rows, places)
        except UnicodeDecodeError as error:
            raise TableError(f"{os.fspath(path)}: {error}") from error
        except (TableError, csv.Error) as error:
            where = f", {places[-1]}" if len(places) > len(rows) else ""
            raise TableError(f"{os.fspath(path)}{where}: {error}") from error
    return rows


def _row(cells: list[str]) -> Row:
    if len(cells) != len(COLUMNS):
        raise TableError(f"{len(cells)} cells for {len(COLUMNS)} columns")
    named = dict(zip(COLUMNS, cells, strict=True))
    return Row(
        figure=named["figure"],
        workload=named["workload"],
        method=named["method"],
        series=named["series"],
        x=_number("x", named["x"]),
        repetition=_whole("repetition", named["repetition"]),
        value=_number("value", named["value"]),
        unit=named["unit"],
        floor=_number("floor", named["floor"]) if named["floor"] else None,
    )


def _number(column: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise TableError(f"{column} is a number, not {text!r}") from None


def _whole(column: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise TableError(f"{column} is a whole number, not {text!r}") from None


def _check_together(rows: list[Row], places: list[str]) -> None:
    units: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for row, place in zip(rows, places, strict=True):
        unit = units.setdefault(row.figure, row.unit)
        if row.unit != unit:
            raise TableError(f"{place}: figure {row.figure} is in {unit!r}, this row in {row.unit!r}")
        key = (row.figure, row.workload, row.method, row.series, row.x, row.repetition)
        if (first := seen.setdefault(key, place)) != place:
            raise TableError(f"{place}: the same measurement and repetition as in {first}")
