"""Which figures there are, and what their axes show: those of PCcheck, its GH200 port, CheckFreq and the HPEC paper."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

__all__ = ["CATALOGUE", "FigureSpec"]


def _plain(x: float) -> str:
    return f"{x:g}"


def _phase(x: float) -> str:
    return {1: "not yet", 2: "just came", 3: "there for a while", 4: "gone again"}.get(int(x), f"{x:g}")


def _bytes(x: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if x >= size:
            return f"{x / size:.3g} {unit}"
    return f"{x:g} B"


def _binary(x: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if x >= 0.499 * size:  # tensors of equal size leave a few bytes out
            return f"{x / size:.3g} {unit}"
    return f"{x:g} B"


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureSpec:
    """What is drawn, and how.

    Attributes:
        title: Of the whole figure.
        x_label: What x is.
        y_label: What the values are; their unit is added.
        kind: Bars or lines.
        colour_by: What tells bars or lines of a panel apart.
        series_name: What ``series`` is the value of, such as "N".
        panel_by_series: A panel for each value of ``series``, and not a bar or line.
        even: The values of x stand at even distances, whatever they are.
        log_x: A logarithmic horizontal axis.
        log_y: A logarithmic vertical axis.
        one: Draw the line at 1: slowdowns and multiples.
        from_zero: The vertical axis begins at 0.
        floor_label: What the limit is called.
        floor_each: Every bar has a limit of its own, and not every x.
        x_text: Writes an x.
        least: Smaller values are compared as if they were this one: what they differ by is nothing to a user.
    """

    title: str
    x_label: str
    y_label: str
    kind: Literal["bars", "lines"]
    colour_by: Literal["method", "series"] = "method"
    series_name: str = ""
    panel_by_series: bool = False
    even: bool = True
    log_x: bool = False
    log_y: bool = False
    one: bool = False
    from_zero: bool = True
    floor_label: str = "limit of the storage"
    floor_each: bool = False
    x_text: Callable[[float], str] = _plain
    least: float = -math.inf


_INTERVAL = "checkpoint interval (steps)"
_log_log = partial(FigureSpec, kind="lines", even=False, log_x=True, log_y=True, from_zero=False)

CATALOGUE: dict[str, FigureSpec] = {
    "8": FigureSpec(
        title="Throughput by checkpoint interval",
        x_label=_INTERVAL,
        y_label="throughput",
        kind="bars",
        floor_label="limit of storage and processor",
    ),
    "8-drain": FigureSpec(
        title="After the last step: time until every checkpoint is durable",
        x_label=_INTERVAL,
        y_label="drain",
        kind="bars",
        least=1e-3,
    ),
    "9": FigureSpec(
        title="Goodput under failures",
        x_label=_INTERVAL,
        y_label="goodput",
        kind="lines",
        series_name="failures:",
        panel_by_series=True,
    ),
    "11": _log_log(
        title="Time of one checkpoint by its size",
        x_label="size of the checkpoint",
        y_label="time until durable",
        x_text=_bytes,
    ),
    "12": FigureSpec(
        title="Slowdown by interval and checkpoints in flight (N)",
        x_label=_INTERVAL,
        y_label="slowdown",
        kind="bars",
        colour_by="series",
        series_name="N =",
        one=True,
        floor_label="max(1, Tw / (N f t))",
        floor_each=True,
    ),
    "13": FigureSpec(
        title="Slowdown by checkpoints in flight and writers (p)",
        x_label="checkpoints in flight (N)",
        y_label="slowdown",
        kind="bars",
        colour_by="series",
        series_name="p =",
        one=True,
        floor_each=True,
    ),
    "14": FigureSpec(
        title="Slowdown by host memory and number of chunks",
        x_label="staging memory (multiples of the state, m)",
        y_label="slowdown",
        kind="lines",
        colour_by="series",
        series_name="chunks:",
        even=False,
        one=True,
        floor_label="max(1, Tw / (N f t))",
        from_zero=False,
    ),
    "gh5": FigureSpec(
        title="Time of one checkpoint",
        x_label="size of the checkpoint",
        y_label="time of one checkpoint",
        kind="bars",
        x_text=_bytes,
    ),
    "gh6": FigureSpec(
        title="Training from start to end",
        x_label="size of the checkpoint",
        y_label="duration",
        kind="bars",
        x_text=_bytes,
        floor_label="without checkpoints",
    ),
    **{
        figure: FigureSpec(
            title=title, x_label="size of the state", y_label=label, kind="bars", log_y=log_y, x_text=_binary
        )
        for figure, title, label, log_y in (
            ("durable", "Time until a checkpoint is saved", "time until saved", True),
            ("processor", "Processor time of a save, writing back included", "processor time", False),
            ("stall", "Stall of a save with nothing to do meanwhile", "stall", True),
            ("step_stall", "Stall of a save beside a training step", "stall", True),
            ("restore", "Restore with a cold page cache", "time of a restore", False),
            ("memory", "Memory that saving takes beyond the state", "memory", False),
        )
    },
    "small": FigureSpec(
        title="Time of one save of a small state",
        x_label="size of the state",
        y_label="time until durable",
        kind="bars",
        floor_label="write, flush, record, flush",
        x_text=_binary,
    ),
    "growth_bytes": _log_log(
        title="Time for each byte as a state grows",
        x_label="size of the state",
        y_label="time for each byte",
        panel_by_series=True,
        x_text=_binary,
    ),
    "growth_tensors": _log_log(
        title="Time for each tensor of 64 MiB in ever more of them",
        x_label="tensors",
        y_label="time for each tensor",
        colour_by="series",
    ),
    **{
        figure: FigureSpec(
            title=title, x_label="checkpoints so far", y_label=label, kind="lines", even=False, log_x=True
        )
        for figure, title, label in (
            ("growth_checkpoints", "Time of one save as their number grows", "time until durable"),
            ("growth_memory", "Resident memory as the number of checkpoints grows", "resident memory"),
            ("growth_descriptors", "Open descriptors as the number of checkpoints grows", "descriptors"),
        )
    },
    "checkfreq": FigureSpec(
        title="Overhead of checkpointing",
        x_label=_INTERVAL,
        y_label="overhead",
        kind="bars",
        floor_label="budget",
    ),
    "adaptive": FigureSpec(
        title="Overhead that policies keep to",
        x_label="another job beside training",
        y_label="overhead",
        kind="bars",
        floor_label="budget",
        x_text=_phase,
    ),
    "adaptive-k": FigureSpec(
        title="Interval that policies choose",
        x_label="another job beside training",
        y_label="interval",
        kind="bars",
        log_y=True,
        x_text=_phase,
    ),
    **{
        figure: FigureSpec(
            title=f"Time of one save of a clustering, {where}",
            x_label="clusters (k)",
            y_label="time of one save",
            kind="lines",
            even=False,
            log_y=True,
            from_zero=False,
        )
        for figure, where in (
            ("hpec-disk", "on the disk"),
            ("hpec-tmpfs-emulation", "on tmpfs: persistent memory is emulated, nothing survives the power"),
        )
    },
}
"""By the name in the ``figure`` column."""
