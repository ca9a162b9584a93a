"""One look for all figures: a method has the same name, colour and marker everywhere.

The colours are those of Okabe and Ito, which people with any common form of colour blindness can tell apart; markers
and hatches repeat what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["FLOOR_COLOUR", "NONE", "RC", "STAGE_COLOURS", "Style", "method_style", "series_style"]


@dataclass(frozen=True, slots=True)
class Style:
    """How something is drawn: its name in the legend, its colour, its marker on lines, its hatch in bars."""

    label: str
    colour: str
    marker: str = "o"
    hatch: str = ""


FLOOR_COLOUR = "#D55E00"
NONE = Style("no checkpoints", "#000000")
STAGE_COLOURS = {
    "step": "#D9D9D9",
    "stall": "#D55E00",
    "capture": "#56B4E9",
    "write": "#0072B2",
    "flush": "#E69F00",
    "commit": "#009E73",
}

_METHODS = {
    "none": NONE,
    "ideal": Style("ideal", "#000000", ""),
    "pccheck": Style("pccheck_async", "#0072B2", "o"),
    "pccheck_published": Style("PCcheck (published)", "#56B4E9", "D", "///"),
    "checkfreq": Style("CheckFreq", "#009E73", "^", "\\\\\\"),
    "gpm": Style("GPM", "#CC79A7", "s", "xxx"),
    "gemini": Style("Gemini", "#E69F00", "v", "..."),
    "torch_save": Style("torch.save", "#BBBBBB", "P"),
    "torch_save_fsync": Style("torch.save, fsync", "#888888", "X", "///"),
    "torch_save_safe": Style("torch.save, crash-safe", "#555555", "d", "\\\\\\"),
    "pccheck overlapped": Style("pccheck_async, overlapped", "#0072B2", "s", "///"),
    "pccheck until captured": Style("pccheck_async, until captured", "#56B4E9", "o", "..."),
    "CheckFreq": Style("CheckFreq", "#009E73", "^", "\\\\\\"),
    "GPM": Style("GPM", "#CC79A7", "s", "xxx"),
    "torch.save": Style("torch.save", "#BBBBBB", "P"),
    "torch.save + fsync": Style("torch.save, fsync", "#888888", "X", "///"),
    "torch.save + fsync + rename": Style("torch.save, crash-safe", "#555555", "d", "\\\\\\"),
    "dcp.save": Style("dcp.save", "#AA4499", "h", "///"),
    "dcp.async_save thread": Style("DCP async, thread", "#44AA99", "<"),
    "dcp.async_save process": Style("DCP async, process", "#117733", ">", "///"),
    "torch_checkpointing": Style("torch_checkpointing", "#332288", "*"),
    "torchsnapshot": Style("torchsnapshot", "#882255", "p", "///"),
    "torchsnapshot async": Style("torchsnapshot async", "#661100", "p"),
    "safetensors + fsync + rename": Style("safetensors, crash-safe", "#999933", "h", "\\\\\\"),
    "Lightning AsyncCheckpointIO": Style("Lightning async", "#F0E442", "v", "..."),
    "DeepSpeed FastFileWriter": Style("DeepSpeed FastFileWriter", "#DDCC77", ">", "///"),
    "savez without fsync": Style("savez, no fsync", "#BBBBBB", "P"),
    "savez + fsync + rename": Style("savez, fsync", "#888888", "X", "///"),
    "savez_compressed without fsync": Style("savez_compressed, no fsync", "#E69F00", "d", "\\\\\\"),
    "savez_compressed + fsync + rename": Style("savez_compressed, fsync", "#CC79A7", "s", "xxx"),
    "pccheck mapped": Style('pccheck_async, medium="mapped"', "#009E73", "^"),
    "shelf reassigned": Style("shelf, reassigned", "#D55E00", "D"),
    "shelf in place": Style("shelf, in place", "#882255", "v"),
}
_OTHERS = ("#F0E442", "#661100", "#332288", "#44AA99", "#AA4499", "#999933", "#DDCC77", "#88CCEE", "#CC6677", "#117733")
_OTHER_MARKERS = "<>*ph8HX1d"
_SEQUENCE_MARKERS = "os^Dv<>P"

RC: Any = {
    "figure.dpi": 150,
    "savefig.dpi": 150,
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.7,
    "hatch.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def method_style(method: str, among: Sequence[str] = ()) -> Style:
    """Return how a method is drawn; one that has no style here gets its name and a colour by its place ``among`` them.

    Args:
        method: Its name in the tables.
        among: All methods of the figure.
    """
    if method in _METHODS:
        return _METHODS[method]
    unknown = [each for each in among if each not in _METHODS]
    place = unknown.index(method) if method in unknown else 0
    return Style(method, _OTHERS[place % len(_OTHERS)], _OTHER_MARKERS[place % len(_OTHER_MARKERS)])


def series_style(label: str, place: int, count: int) -> Style:
    """Return how the value of a parameter is drawn: the more of it, the darker."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    share = 0.85 - 0.75 * (place / max(1, count - 1))  # cividis: the same to all eyes; its very ends are too pale
    return Style(label, to_hex(colormaps["cividis"](share)), _SEQUENCE_MARKERS[place % len(_SEQUENCE_MARKERS)])
