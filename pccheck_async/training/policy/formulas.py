# SPDX-License-Identifier: Apache-2.0
"""Checkpoint intervals from the literature, as functions of measured times; checks of the arguments of policies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "CheckFreqChoice", "check_overhead", "check_seconds", "checkfreq_interval", "daly_seconds",
    "interval_floor", "sustained_interval", "whole_steps", "young_seconds",
]  # fmt: skip

_FUZZ = 1e-9
"""Relative error of sums of floats: a quotient that exceeds a whole number by no more is rounded down to it."""


@dataclass(frozen=True, slots=True)
class CheckFreqChoice:
    """Outcome of CheckFreq's Algorithm 1.

    Attributes:
        mode: Where to copy the state first: "device", or "host".
        interval: Steps between checkpoints (k).
        overhead_seconds: The cost of one checkpoint to training (To).
    """

    mode: Literal["device", "host"]
    interval: int
    overhead_seconds: float


def checkfreq_interval(
    *,
    step_seconds: float,
    update_seconds: float = 0.0,
    host_copy_seconds: float,
    persist_seconds: float,
    overhead: float,
    device_copy_seconds: float | None = None,
    device_free_bytes: int = 0,
    nbytes: int = 0,
) -> CheckFreqChoice:
    """Return where to copy the state first, and the interval in steps (CheckFreq, FAST'21, Algorithm 1).

    To is the cost of one checkpoint to training. A copy to the host overlaps with forward and backward, the part
    Ti - Tw of a step, so it costs Toc = max(0, Tc - (Ti - Tw)). A copy on the device overlaps with nothing, and costs
    Tog = Tg. The device is chosen if the copy fits there and Tog <= Toc; To is the cost of the chosen one. Then
    k = ceil(max((Tc + Ts - To)/Ti, To/(p Ti))) steps: a checkpoint is durable before the next one begins, and the
    overhead stays within p.

    Args:
        step_seconds: Seconds of a training step (Ti).
        update_seconds: Seconds of the weight update in a step (CheckFreq's Tw; PCcheck calls the write time Tw).
        host_copy_seconds: Seconds to copy the state to the host (Tc).
        persist_seconds: Seconds to write it from there to storage (Ts).
        overhead: Budget as a share of the training time (p).
        device_copy_seconds: Seconds to copy the state on the device (Tg); None if that is not possible.
        device_free_bytes: Free device memory (Mmax - M).
        nbytes: Size of a checkpoint in bytes (m).

    Raises:
        ValueError: ``overhead`` is not over 0 and at most 1, or ``step_seconds`` is not positive.
    """
    check_overhead(overhead)
    if not step_seconds > 0:
        raise ValueError(f"step_seconds is positive, not {step_seconds!r}")
    cost = max(0.0, host_copy_seconds - (step_seconds - update_seconds))
    mode: Literal["device", "host"] = "host"
    if device_copy_seconds is not None and device_free_bytes > nbytes and device_copy_seconds <= cost:
        mode, cost = "device", device_copy_seconds
    one_in_flight = host_copy_seconds + persist_seconds - cost
    return CheckFreqChoice(mode, whole_steps(max(one_in_flight, cost / overhead), step_seconds), cost)


def young_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """Return the seconds of training between checkpoints at which least time is lost, to first order: sqrt(2 delta M).

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.

    Args:
        cost_seconds: Seconds that one checkpoint costs training (delta).
        mtbf_seconds: Mean time between failures in seconds (M).
    """
    if not (cost_seconds >= 0 and mtbf_seconds > 0):
        raise ValueError(
            f"cost_seconds is not negative and mtbf_seconds is positive, not {cost_seconds!r} and {mtbf_seconds!r}"
        )
    return math.sqrt(2 * cost_seconds * mtbf_seconds)


def daly_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """Return the optimum of :func:`young_seconds` to a higher order: better if a checkpoint's cost is near the MTBF.

    sqrt(2 delta M) (1 + sqrt(x)/3 + x/9) - delta with x = delta/(2 M) where delta < 2 M, else M.
    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006.

    Args:
        cost_seconds: Seconds that one checkpoint costs training (delta).
        mtbf_seconds: Mean time between failures in seconds (M).
    """
    first_order = young_seconds(cost_seconds, mtbf_seconds)
    if cost_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    x = cost_seconds / (2 * mtbf_seconds)
    return max(0.0, first_order * (1 + math.sqrt(x) / 3 + x / 9) - cost_seconds)


def whole_steps(seconds: float, step_seconds: float) -> int:
    """Return the smallest number of steps, at least one, that take ``seconds`` or more."""
    return max(1, math.ceil(seconds / step_seconds * (1 - _FUZZ)))


def interval_floor(nbytes: int, bandwidth: float, step_seconds: float, slowdown: float = 1.03) -> int:
    """Return f_min = ceil(m / (B q t)), the fewest steps between checkpoints that this storage allows any method.

    Args:
        nbytes: Size of a checkpoint in bytes (m).
        bandwidth: Bytes per second that the storage takes (B).
        step_seconds: Seconds of a training step (t).
        slowdown: Tolerated factor (q): 1.03 is 3 %.
    """
    return sustained_interval(nbytes / bandwidth, 1, step_seconds, slowdown)


def sustained_interval(seconds: float, max_in_flight: int, step_seconds: float, slowdown: float = 1.03) -> int:
    """Return f* = ceil(Tw(N) / (N q t)), the fewest steps between checkpoints that do not pile up (PCcheck, eq. 3).

    Args:
        seconds: Seconds until one checkpoint is durable while N are in flight (Tw(N)).
        max_in_flight: Checkpoints in flight (N).
        step_seconds: Seconds of a training step (t).
        slowdown: Tolerated factor (q): 1.03 is 3 %.
    """
    if not (step_seconds > 0 and slowdown > 0):
        raise ValueError(f"step_seconds and slowdown are positive, not {step_seconds} and {slowdown}")
    return max(1, math.ceil(seconds / max_in_flight / (slowdown * step_seconds)))


def check_overhead(value: float) -> float:
    """Return ``value`` as a float; raise ValueError unless it is a share: over 0, at most 1."""
    if not 0 < value <= 1:
        raise ValueError(f"overhead is a share of the training time, over 0 and at most 1 (0.03 is 3 %), not {value!r}")
    return float(value)


def check_seconds(name: str, value: float) -> float:
    """Return ``value`` as a float; raise ValueError with ``name`` unless it is positive and finite."""
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is a positive number of seconds, not {value!r}")
    return float(value)
