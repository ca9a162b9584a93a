"""Checks of the arguments that policies take."""

from __future__ import annotations

__all__ = ["check_count", "check_overhead", "check_seconds"]


def check_count(name: str, value: object) -> int:
    """Return ``value`` if it is a whole number of at least 1; ValueError or TypeError names it otherwise."""
    if type(value) is not int:
        raise TypeError(f"{name} is a whole number, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} is at least 1, not {value}")
    return value


def check_overhead(value: float) -> float:
    """Return ``value`` if it is a share of the training time: over 0, at most 1; ValueError otherwise."""
    if not 0 < value <= 1:
        raise ValueError(f"overhead is a share of the training time, over 0 and at most 1 (0.03 is 3 %), not {value!r}")
    return float(value)


def check_seconds(name: str, value: float) -> float:
    """Return ``value`` if it is a positive, finite number of seconds; ValueError otherwise."""
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is a positive number of seconds, not {value!r}")
    return float(value)
