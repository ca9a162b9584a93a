"""Figure 9 of PCcheck from measured rows of figure 8: what failures leave of a method's throughput."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from examples.paper.lab.goodput import Case, Run, poisson_failures, predict
from examples.paper.lab.table import Row

__all__ = ["GOODPUT_NOTE", "predict_goodput"]

_SECONDS, _MTBF = 13545.0, 265.0
"""Length and failure rate of the spot trace behind the published figure: 215 samples 63 s apart, 51 failures."""
_DRAWS = 9

GOODPUT_NOTE = (
    f"goodput is predicted for {_SECONDS / 3600:.2f} h with failures that come independently, one in {_MTBF:g} s on "
    "average: as many as PCcheck's artifact counts in its spot trace."
)
_CASES: tuple[Case, ...] = ("average", "worst")
_IN_FLIGHT = 2


def predict_goodput(
    rows: Sequence[Row],
    loads: Mapping[str, float],
    durable: Mapping[tuple[str, int], float],
) -> list[Row]:
    """Return rows of figure 9 for failures that come independently of each other.

    Each method loads as fast as it did when its restore was checked, and the ideal as fast as the fastest of them.
    ``python -m examples.paper goodput`` does the same for other rates, and for recorded traces.

    Args:
        rows: Of figure 8 and of one workload, those without checkpoints among them.
        loads: Seconds of a restore by method; one that is not in it is left out.
        durable: Seconds until a checkpoint is durable beside training, by method and interval.
    """
    failures = tuple(len(poisson_failures(_MTBF, _SECONDS, seed=seed)) for seed in range(_DRAWS))
    run = Run(f"MTBF {_MTBF:g} s", _SECONDS, failures)
    found: dict[tuple[str, str, float, int], Row] = {}
    for method, load in sorted(loads.items(), key=lambda item: item[1]):
        own = [row for row in rows if row.method in ("none", method)]
        taken = {float(x): seconds for (each, x), seconds in durable.items() if each == method}
        for case in _CASES:
            for row in predict(
                own, run, case, load_seconds=load, durable_seconds=taken or math.inf, max_in_flight=_IN_FLIGHT
            ):
                found.setdefault((row.method, row.series, row.x, row.repetition), row)
    order = list(dict.fromkeys(row.method for row in rows))
    return sorted(found.values(), key=lambda row: order.index(row.method) if row.method in order else len(order))
