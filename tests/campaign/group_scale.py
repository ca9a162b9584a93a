"""The curve of decisions over the number of members: ``python -m tests.campaign.group_scale PICTURE.png``."""

from __future__ import annotations

import sys

from matplotlib.figure import Figure

from tests.support.group_scale import measure

WORLDS = [2**power for power in range(3, 13)]


def main(picture: str) -> None:
    """Measure and draw."""
    timings = [measure(world) for world in WORLDS]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, label in (("published", "decided"), ("learnt", "learnt by all members")):
        axes.plot(WORLDS, [1e3 * getattr(each, name) for each in timings], marker="o", label=label)
    axes.axhline(500, color="gray", linestyle=":", label="0.5 s")
    axes.set(xscale="log", yscale="log", xlabel="members", ylabel="ms after the last prepare")
    axes.set_xticks(WORLDS, [*map(str, WORLDS)])
    axes.minorticks_off()
    axes.set_title("All members prepare at once: simulated, with store costs as measured")
    axes.legend()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1])
