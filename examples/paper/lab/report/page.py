"""From a folder of findings to a page that needs nothing else: the same folder gives the same page."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from examples.paper.lab.figures.catalogue import CATALOGUE
from examples.paper.lab.figures.style import method_style
from examples.paper.lab.outcome import MethodInfo, Outcome, read_outcomes, replace_file
from examples.paper.lab.report.summary import Comparison, compare, count
from examples.paper.lab.report.tables import REFERENCES, Summed, amount, number, sum_up
from examples.paper.lab.table import Row, TableError, read_rows
from pccheck_async.bench.machine import BenchPlace

__all__ = ["write_report"]

_MOST_DOWNLOAD_BYTES = 4 << 20
"""A longer timeline stays a file of its own: the page has to open on a phone."""

_SAME = {
    "torch_save": "torch.save",
    "torch_save_fsync": "torch.save + fsync",
    "torch_save_safe": "torch.save + fsync + rename",
}
"""Methods that tables of figures call otherwise than the list of methods does."""

_FLAGS = ("durable", "atomic", "resumable")


@dataclass(frozen=True, slots=True)
class _Picture:
    title: str
    data: str


@dataclass(frozen=True, slots=True)
class _Download:
    """A file, in the page where ``data`` is not empty."""

    name: str
    size: str
    data: str


@dataclass(frozen=True, slots=True)
class _Metric:
    """A figure and workload with what is said of it in the summary."""

    table: Summed
    comparisons: Sequence[Comparison]


@dataclass(frozen=True, slots=True)
class _Section:
    """An experiment; ``outcome`` is None of a table that none wrote."""

    name: str
    title: str
    outcome: Outcome | None
    rows: Sequence[Row]
    tables: Sequence[Summed]
    pictures: Sequence[_Picture]
    downloads: Sequence[_Download]


@dataclass(frozen=True, slots=True)
class _Machine:
    """A place, the packages there, and the experiments that ran with both."""

    place: BenchPlace
    versions: dict[str, str]
    experiments: list[str]


def write_report(out: Path, html: Path) -> bool:
    """Write a page of everything in a folder: experiments, and tables that stand there alone.

    Args:
        out: What ``python -m examples.paper run`` wrote.
        html: The page.

    Returns:
        Whether there was anything; if not, no page is written.

    Raises:
        TableError: a file is damaged.
        OSError: a file cannot be read or written.
    """
    sections = _sections(out)
    if not sections:
        return False
    text = _render(sections)
    replace_file(html, lambda path: path.write_text(text, encoding="utf-8"))
    return True


def _sections(out: Path) -> list[_Section]:
    if not out.is_dir():
        raise NotADirectoryError(f"{out} is no folder")
    outcomes = read_outcomes(out)
    sections = [_section(out, outcome) for outcome in outcomes]
    taken = {outcome.table for outcome in outcomes}
    for path in sorted(out.glob("*.csv")):
        if path.name not in taken:
            rows = read_rows(path)
            download = _download(path, "text/csv")
            sections.append(_Section(path.stem, path.stem, None, rows, sum_up(rows), (), (download,)))
    return sections


def _section(out: Path, outcome: Outcome) -> _Section:
    pictures = [_Picture(_figure_title(figure), _picture(out / name)) for figure, name in outcome.figures.items()]
    downloads = [_download(out / outcome.table, "text/csv")] if outcome.table else []
    for title, files in outcome.timelines.items():
        if files.png:
            pictures.append(_Picture(f"Timeline: {title}", _picture(out / files.png)))
        downloads.append(_download(out / files.trace, "application/json"))
    rows = read_rows(out / outcome.table) if outcome.table else []
    return _Section(outcome.name, outcome.title, outcome, rows, sum_up(rows), pictures, downloads)


def _figure_title(figure: str) -> str:
    return CATALOGUE[figure].title if figure in CATALOGUE else figure


def _picture(path: Path) -> str:
    data = path.read_bytes()
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        raise TableError(f"{path} is no PNG")
    return _data(data, "image/png")


def _download(path: Path, kind: str) -> _Download:
    data = path.read_bytes()
    whole = _data(data, kind) if len(data) <= _MOST_DOWNLOAD_BYTES else ""
    return _Download(path.name, amount(len(data), "B"), whole)


def _data(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _render(sections: Sequence[_Section]) -> str:
    known: dict[str, MethodInfo] = {}
    for section in sections:
        known |= section.outcome.known if section.outcome else {}
    metrics = [_Metric(table, compare(table)) for section in sections for table in section.tables]
    measured = dict.fromkeys(row.method for section in sections for row in section.rows if row.method not in REFERENCES)
    environment = Environment(
        loader=PackageLoader("examples.paper.lab.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"number": number, "ratio": lambda value: number(value, 3)}
    outcomes = [section.outcome for section in sections if section.outcome is not None]
    compared = [metric for metric in metrics if metric.comparisons]
    comparisons = [comparison for metric in compared for comparison in metric.comparisons]
    return environment.get_template("page.html").render(
        sections=sections,
        metrics=compared,
        alone=[metric.table for metric in metrics if not metric.comparisons],
        counts=count(comparisons),
        any_behind=any(each.counts and part.verdict == "behind" for each in comparisons for part in each.parts),
        fewest=_fewest(metric.table for metric in compared),
        methods={method: _info(method, known) for method in measured},
        absent={name: info.why_not for name, info in known.items() if info.why_not and name not in measured},
        machines=_machines(outcomes),
        quick=[outcome.name for outcome in outcomes if outcome.quick],
        failed=[outcome.name for outcome in outcomes if outcome.problem],
        started=min((outcome.started for outcome in outcomes), default=None),
        ended=max((outcome.ended for outcome in outcomes), default=None),
        amount=amount,
        label=lambda method: method_style(method, list(measured)).label,
        lacks=lambda method: _lacks(method, known),
    )


def _info(method: str, known: dict[str, MethodInfo]) -> MethodInfo | None:
    return known.get(method) or known.get(_SAME.get(method, ""))


def _lacks(method: str, known: dict[str, MethodInfo]) -> str:
    """Return what a method does not give, of what the tests looked for."""
    info = _info(method, known)
    return "" if info is None else ", ".join(f"not {flag}" for flag in _FLAGS if not getattr(info, flag))


def _fewest(tables: Iterable[Summed]) -> int:
    """Return the rounds of the comparison that has the fewest, single runs aside; 0 where there is none."""
    lines = (line for table in tables for group in table.groups for line in group.lines if line.ratio is not None)
    return min((line.point.count for line in lines if line.point.count > 1), default=0)


def _machines(outcomes: Sequence[Outcome]) -> list[_Machine]:
    """Merge what was the same: free memory is another one each time."""
    found: dict[tuple[Any, ...], _Machine] = {}
    for outcome in outcomes:
        place = outcome.place
        key = (
            (place.machine, place.kernel, place.device, place.filesystem, place.direct, place.python, place.torch),
            tuple(outcome.versions.items()),
        )
        found.setdefault(key, _Machine(place, outcome.versions, [])).experiments.append(outcome.name)
    return list(found.values())
