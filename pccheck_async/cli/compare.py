"""Comparing the losses of training runs, row by row, by their bits."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.box import SIMPLE
from rich.table import Table

__all__ = ["Losses", "compare_losses", "draw", "exact", "read_losses"]


class Loss(NamedTuple):
    """A row of a loss file: the loss in decimal for people, its float32 bits for comparing."""

    loss: float
    bits: str


Losses = Mapping[int, Loss]


def read_losses(path: Path) -> Losses:
    """Read a loss file (columns step, loss, bits), which may be missing or still be written."""
    if not path.exists():
        return {}
    rows = (line.split(",") for line in path.read_text().splitlines()[1:])
    return {int(row[0]): Loss(float(row[1]), row[2]) for row in rows if len(row) == 3 and len(row[2]) == 8}


@dataclass(frozen=True)
class LossComparison:
    """Rows of which both the killed run (as far as it came) and the resumed run have the uninterrupted run's bits."""

    total: int
    equal: int
    table: Table

    @property
    def all_equal(self) -> bool:
        """Whether there is a row for every step and all are equal."""
        return 0 < self.total == self.equal


def compare_losses(
    uninterrupted: Losses, killed: Losses, resumed: Losses, steps: int, crash_at: int, restored: int
) -> LossComparison:
    """Compare the losses of every step, and tabulate some of them."""
    stride = steps // 60 * 10 or max(1, steps // 6)
    shown = {1, restored, restored + 1, crash_at, crash_at + 1, *range(0, steps, stride), steps}
    table = Table(box=SIMPLE, pad_edge=False)
    for heading in ("step", "loss", "uninterrupted", "killed", "resumed"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
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
    return LossComparison(steps, equal, table)


def draw(path: Path, uninterrupted: Losses, killed: Losses, resumed: Losses, crash_at: int, restored: int) -> None:
    """Draw the three loss curves, and below them how far the resumed run is from the uninterrupted one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    curves, difference = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    styles = (
        ("uninterrupted", uninterrupted, {"color": "0.75", "linewidth": 6}),
        ("killed", killed, {"color": "tab:red", "linewidth": 2.5}),
        ("resumed", {s: row for s, row in resumed.items() if s > restored}, {"color": "tab:blue", "linestyle": "--"}),
    )
    for label, losses, style in styles:
        curves.plot(list(losses), [row.loss for row in losses.values()], label=label, **style)
    curves.axvline(crash_at, color="tab:red", linestyle=":", label=f"SIGKILL while saving step {crash_at}")
    curves.axvline(restored, color="tab:blue", linestyle=":", label=f"resumed from step {restored}")
    curves.set_ylabel("loss")
    curves.legend()
    common = [step for step in resumed if step in uninterrupted]
    difference.plot(common, [exact(resumed[step]) - exact(uninterrupted[step]) for step in common], color="tab:blue")
    difference.set_ylabel("resumed minus\nuninterrupted")
    difference.set_xlabel("step")
    figure.savefig(path)


def exact(row: Loss) -> float:
    """Return the loss from its bits, where the decimals are rounded."""
    value: float = struct.unpack(">f", bytes.fromhex(row.bits))[0]
    return value
