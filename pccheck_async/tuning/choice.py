# SPDX-License-Identifier: Apache-2.0
"""Chooses N (checkpoints in flight), p (writers) and b (bytes of a chunk) from measured times and the machine's limits.

PCcheck, section 3.4: with N checkpoints in flight, each of which is durable after Tw(N) seconds, one becomes durable
every Tw(N)/N seconds. The smallest N for which this is within the noise of the best is chosen; then, for this N, the
smallest p, and for this N and p the smallest b.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import NamedTuple

import numpy as np

from pccheck_async.errors import InfeasibleError
from pccheck_async.format import align
from pccheck_async.format.record import MOST_ENTRIES

__all__ = [
    "LEAST_BUFFERS", "Choice", "FittedTimes", "Limits", "Point", "choose", "fit_rounds", "shortages",
    "staging_bytes",
]  # fmt: skip

LEAST_BUFFERS = 2
"""Least chunks of staging memory with which copying and writing can overlap."""

_LEAST_NOISE = 0.03
_TINY = 1e-4
_SWEEPS = 40


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """A combination of settings of the engine; a smaller point needs fewer resources.

    Attributes:
        max_in_flight: Checkpoints in flight (N).
        writers: Writes running at a time (p). All checkpoints in flight share them: PCcheck's N p.
        chunk_bytes: Unit of copying and writing (b).
    """

    max_in_flight: int
    writers: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The resources that an engine may use.

    Attributes:
        storage_bytes: Bytes for slots: the free space, and the store's present slots.
        host_memory: Most staging memory in bytes.
        cores: Cores this process may use.
        keep_last: Number of committed checkpoints that are kept, by all rules of retention together.
        stream_cpu: Share of a core that one running write takes. PCcheck's writers copy into persistent memory and
            need a core each (1.0: then the rule is its N p <= cores); writers that wait for a device need less.
    """

    storage_bytes: int
    host_memory: int
    cores: int
    keep_last: int = 1
    stream_cpu: float = 1.0


class Choice(NamedTuple):
    """The chosen point, its Tw in seconds, its staging memory in bytes, and a reason for each setting by its name."""

    point: Point
    seconds: float
    host_memory: int
    reasons: Mapping[str, str]


class FittedTimes(NamedTuple):
    """Times of points, corrected for the changing speed of the machine."""

    seconds: Mapping[Point, float]  # Tw
    noise: float  # by how much (relative) two may differ by chance; infinite where nothing was measured twice


def shortages(point: Point, limits: Limits, nbytes: int) -> dict[str, str]:
    """Return the constraints that ``point`` violates for checkpoints of ``nbytes``, by name, each with what to do.

    The constraints are PCcheck's: (N + keep_last) m <= storage, staging memory <= budget, and p u <= cores, where u is
    the share of a core that one running write takes (:class:`Limits`).
    """
    found: dict[str, str] = {}
    slots = point.max_in_flight + limits.keep_last
    if limits.keep_last > MOST_ENTRIES:
        found["record"] = (
            f"a commit record names at most {MOST_ENTRIES} checkpoints, not {limits.keep_last}; lower keep_last"
        )
    if slots * nbytes > limits.storage_bytes:
        found["storage"] = (
            f"{slots} slots ({point.max_in_flight} in flight, {limits.keep_last} kept) of {nbytes} bytes need "
            f"{slots * nbytes} bytes, {limits.storage_bytes} are free for them; free space"
            + (" or lower keep_last" if limits.keep_last > 1 else "")
        )
    if LEAST_BUFFERS * point.chunk_bytes > limits.host_memory:
        found["memory"] = (
            f"{LEAST_BUFFERS} chunks of {point.chunk_bytes} bytes need {LEAST_BUFFERS * point.chunk_bytes} bytes of "
            f"staging memory, the budget is {limits.host_memory}; raise host_memory or the memory limit"
        )
    if point.writers * limits.stream_cpu > limits.cores:
        found["cpu"] = (
            f"{point.writers} writers at {limits.stream_cpu:.2f} cores each need "
            f"{point.writers * limits.stream_cpu:.2f} cores, this process may use {limits.cores}; give it more"
        )
    return found


def choose(table: Mapping[Point, float], limits: Limits, nbytes: int, noise: float) -> Choice:
    """Return the smallest of the points within ``limits`` whose Tw(N)/N is within the noise of the best.

    Args:
        table: Tw in seconds, by point.
        limits: The resources that may be used.
        nbytes: Size of a checkpoint (m).
        noise: Relative difference that is ignored.

    Raises:
        InfeasibleError: no point is within the limits; names the constraints that are violated.
        ValueError: ``table`` is empty.
    """
    if not table:
        raise ValueError("there is nothing to choose from")
    costs = {p: s / p.max_in_flight for p, s in table.items() if not shortages(p, limits, nbytes)}
    if not costs:
        raise _infeasible(table, limits, nbytes)
    enough = min(costs.values()) * (1 + noise)
    point = min(p for p, cost in costs.items() if cost <= enough)
    host_memory = staging_bytes(nbytes, point, limits.host_memory)
    reasons = {}
    by_settings, chosen = {astuple(p): cost for p, cost in costs.items()}, astuple(point)
    for place, setting in enumerate(fields(Point)):
        less = [cost for p, cost in by_settings.items() if p[:place] == chosen[:place] and p[place] < chosen[place]]
        reasons[setting.name] = f"the least measured that is within {noise:.0%} of the best" + (
            f"; less takes {min(less) / min(costs.values()) - 1:.0%} longer" if less else ""
        )
    reasons["host_memory"] = _memory_reason(nbytes, point, host_memory, limits)
    return Choice(point, table[point], host_memory, reasons)


def staging_bytes(nbytes: int, point: Point, budget: int) -> int:
    """Return how much staging memory to use: whole chunks, at least two of them, at most ``budget`` bytes.

    A capture runs at memory speed while there are free buffers. With N in flight and captures evenly spaced, the N - 1
    older checkpoints have half of their bytes left to write on average, so memory for (N + 1)/2 states is enough. If
    the budget is less, a capture continues at the storage's speed once the buffers are full.
    """
    wanted = align(-(-nbytes * (point.max_in_flight + 1) // 2), point.chunk_bytes)
    most = budget // point.chunk_bytes * point.chunk_bytes
    return min(most, max(LEAST_BUFFERS * point.chunk_bytes, wanted))


def fit_rounds(rounds: Sequence[Mapping[Point, float]]) -> FittedTimes:
    """Separate the times of the points from the changing speed of the machine.

    A round measures some points one after the other, so that a slow phase of a shared machine affects all of them.
    Each measurement is modelled as the point's time multiplied by a factor of its round. Both are fitted with least
    absolute deviations of logarithms, on which a few outliers have no effect. Points that several rounds share make
    these rounds comparable.

    Args:
        rounds: For each round the measured seconds by point.
    """
    points = sorted({point for measured in rounds for point in measured})
    observed = [(r, points.index(point), seconds) for r, ms in enumerate(rounds) for point, seconds in ms.items()]
    logs = np.log([seconds for _, _, seconds in observed])
    design = np.zeros((len(observed), len(points) + len(rounds)))
    for row, (r, p, _) in enumerate(observed):
        design[row, p] = design[row, len(points) + r] = 1.0
    weights = np.ones(len(observed))
    for _ in range(_SWEEPS):  # iteratively reweighted least squares: least absolute deviations
        solution = np.linalg.lstsq(design * weights[:, None], logs * weights, rcond=None)[0]
        residuals = np.abs(logs - design @ solution)
        weights = 1 / np.sqrt(np.maximum(residuals, _TINY))
    typical = np.median([solution[len(points) + r] for r, _, _ in observed])
    seconds = {point: float(np.exp(solution[p] + typical)) for p, point in enumerate(points)}
    return FittedTimes(seconds, _noise(residuals, design, len(observed) / max(1, len(points))))


def _noise(residuals: np.ndarray[tuple[int], np.dtype[np.float64]], design: np.ndarray, repetitions: float) -> float:
    spare = len(residuals) - int(np.linalg.matrix_rank(design))
    if spare < 1:
        return math.inf
    # The fit goes right through as many measurements as it has parameters: the others show how far it may be off.
    deviation = 1.48 * float(np.median(np.sort(residuals)[-spare:]))  # of one measurement
    return max(_LEAST_NOISE, 1.25 * math.sqrt(2 / repetitions) * deviation)  # of the difference of two medians


def _memory_reason(nbytes: int, point: Point, host_memory: int, limits: Limits) -> str:
    if host_memory >= nbytes * (point.max_in_flight + 1) / 2:
        return "a whole state, and what older ones in flight have left to write: captures run at memory speed"
    limit = f"the budget of {limits.host_memory} bytes in whole chunks"
    if host_memory >= nbytes:
        return f"{limit}: a whole state fits, so that captures run at memory speed when nothing else is in flight"
    return f"{limit}: a state of {nbytes} bytes does not fit, so that captures end at the storage's speed"


def _infeasible(table: Mapping[Point, float], limits: Limits, nbytes: int) -> InfeasibleError:
    """Return the error with the constraints that every point violates; without any, those of the smallest point."""
    found = {point: shortages(point, limits, nbytes) for point in table}
    always = set.intersection(*(set(lacks) for lacks in found.values()))
    named = {name: text for name, text in found[min(table)].items() if name in always or not always}
    return InfeasibleError(
        "no setting fits: " + "; ".join(f"{name}: {text}" for name, text in named.items()), constraints=tuple(named)
    )
