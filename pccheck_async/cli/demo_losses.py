# SPDX-License-Identifier: Apache-2.0
"""Reads, compares by their bits, and draws the losses of the runs of ``pccheck demo``."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from rich.box import SIMPLE
from rich.table import Table

_STYLES: Final = {
    "uninterrupted": 'stroke="#bbb" stroke-width="7"',
    "killed": 'stroke="#c0392b" stroke-width="3"',
    "resumed": 'stroke="#1f6fb2" stroke-width="3" stroke-dasharray="9 5"',
}


class Loss(NamedTuple):
    """A row of a loss file: the rounded loss, and its float32 bits in hex."""

    loss: float
    bits: str


Losses = Mapping[int, Loss]


def read_losses(path: Path) -> Losses:
    """Return the losses by step of a file with columns step, loss, bits, which may be missing or still be written."""
    if not path.exists():
        return {}
    rows = (line.split(",") for line in path.read_text().splitlines()[1:])
    return {int(row[0]): Loss(float(row[1]), row[2]) for row in rows if len(row) == 3 and len(row[2]) == 8}


class LossComparison(NamedTuple):
    """How many steps have equal bits in all runs that came to them, whether all steps have, and a table of some."""

    equal: int
    all_equal: bool
    table: Table


def compare_losses(
    uninterrupted: Losses, killed: Losses, resumed: Losses, steps: int, crash_at: int, restored: int
) -> LossComparison:
    """Compare the losses of every step; the table has some steps, and all that differ."""
    stride = steps // 60 * 10 or max(1, steps // 6)
    shown = {1, restored, restored + 1, crash_at, crash_at + 1, *range(0, steps, stride), steps}
    table = Table(box=SIMPLE, pad_edge=False)
    for heading in ("step", "loss", "uninterrupted", "killed", "resumed", ""):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    equal = 0
    for step in range(1, steps + 1):
        rows = uninterrupted.get(step), killed.get(step), resumed.get(step)
        expected = [row for row, due in zip(rows, (True, step <= crash_at, True), strict=True) if due]
        same = rows[0] is not None and all(row is not None and row.bits == rows[0].bits for row in expected)
        equal += same
        if step in shown or not same:
            marks = {restored: ", resumed here", crash_at: ", killed here"}
            table.add_row(
                str(step),
                f"{rows[0].loss:.6f}" if rows[0] else "-",
                *(row.bits if row else "-" for row in rows),
                ("equal" if same else "[bold red]DIFFERENT[/]") + marks.get(step, ""),
            )
    return LossComparison(equal, equal == steps, table)


def _round_step(span: float) -> float:
    """Return the distance of an axis's marks: 1, 2 or 5 times a power of ten, at most about six of them in the span."""
    power = 10.0 ** math.floor(math.log10(span / 6))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power * 6 >= span * (1 - 1e-9))


def draw(uninterrupted: Losses, killed: Losses, resumed: Losses, crash_at: int, restored: int, *, equal: bool) -> str:
    """Return the three loss curves as an SVG picture, whose title says whether the runs are equal."""
    width, height, left, top, right, bottom = 900, 520, 64, 112, 32, 56
    last = max(1, 2, *uninterrupted, *killed, *resumed)
    values = [row.loss for row in (*uninterrupted.values(), *killed.values(), *resumed.values())] or [0.0]
    span = max(values) - min(values) or 1.0
    losses_by, steps_by = _round_step(span), max(1, round(_round_step(last)))
    first = math.floor((min(values) - span / 20) / losses_by)
    final = math.ceil((max(values) + span / 20) / losses_by)

    def x(step: float) -> float:
        return left + (width - left - right) * step / last

    def y(value: float) -> float:
        return top + (height - top - bottom) * (final - value / losses_by) / (final - first)

    def curve(losses: Losses, style: str) -> str:
        points = " ".join(f"{x(step):.1f},{y(row.loss):.1f}" for step, row in losses.items())
        return f'<polyline fill="none" points="{points}" {style}/>'

    def mark(step: int, colour: str, text: str, above: int, most: float) -> str:
        """Return a line, and its label above the curves, left of the line if that is right of ``most``."""
        anchor = "end" if x(step) > width * most else "start"
        line = f'<path d="M{x(step):.1f} {top}V{height - bottom}" stroke="{colour}" stroke-dasharray="3 4"/>'
        return f'{line}<text x="{x(step):.1f}" y="{top - above}" text-anchor="{anchor}" fill="{colour}">{text}</text>'

    axes = []
    for number in range(first, final + 1):
        value = number * losses_by
        name = f"{value:.{max(1, -math.floor(math.log10(losses_by)))}f}"
        axes.append(f'<path d="M{left} {y(value):.1f}H{width - right}" stroke="#eee"/>')
        axes.append(f'<text x="{left - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{name}</text>')
    for step in range(0, last + 1, steps_by):
        axes.append(f'<text x="{x(step):.1f}" y="{height - bottom + 20}" text-anchor="middle">{step}</text>')
    axes.append(f'<path d="M{left} {top}V{height - bottom}H{width - right}" fill="none" stroke="#777"/>')
    title = f"{', '.join(_STYLES)}: {'every bit equal' if equal else 'not every bit is equal'}"
    legend = "".join(
        f'<path d="M{left + 230 * place} 52h36" {style}/><text x="{left + 230 * place + 44}" y="56">{name}</text>'
        for place, (name, style) in enumerate(_STYLES.items())
    )
    after = {step: row for step, row in resumed.items() if step > restored}
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="sans-serif" font-size="13" fill="#333">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            f'<text x="{left}" y="28" font-size="16" font-weight="bold">{title}</text>',
            *axes,
            f'<text x="{width / 2}" y="{height - 12}" text-anchor="middle">step</text>',
            f'<text transform="translate(16 {height / 2}) rotate(-90)" text-anchor="middle">loss</text>',
            mark(crash_at, "#c0392b", f"SIGKILL in the save of step {crash_at}", 26, 0.7),
            mark(restored, "#1f6fb2", f"resumed from step {restored}", 8, 0.3),
            *map(curve, (uninterrupted, killed, after), _STYLES.values()),
            legend,
            "</svg>\n",
        ]
    )


def exact(row: Loss) -> float:
    """Return the exact loss, from its bits: the decimals are rounded."""
    value: float = struct.unpack(">f", bytes.fromhex(row.bits))[0]
    return value
