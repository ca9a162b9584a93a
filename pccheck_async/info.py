"""What there is to know about a committed checkpoint without reading it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType

__all__ = ["CheckpointInfo", "Metadata", "check_step"]

Metadata = Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A durable checkpoint, as its commit record describes it.

    Attributes:
        step: The user's number.
        counter: The engine's own number, growing with every admitted checkpoint; it survives restarts.
        nbytes: Payload in bytes (tensors and arrays, padding included).
        time: When the state was captured, seconds since the epoch (UTC).
        pinned: Kept by hand, whatever ``keep_last`` and its like say.
        metadata: The user's small facts, as given to ``checkpoint(metadata=...)``.
    """

    step: int
    counter: int
    nbytes: int
    time: float
    pinned: bool = False
    metadata: Metadata = field(default_factory=lambda: MappingProxyType({}))

    @property
    def created(self) -> datetime:
        """The capture time as an aware datetime in UTC."""
        return datetime.fromtimestamp(self.time, UTC)


def check_step(step: object) -> int | None:
    """Return a user's step as an int (numpy's integers too), None for none. Raises TypeError, ValueError."""
    if step is None:
        return None
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"step is a whole number, not {step!r}") from None
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"step has at most 64 bits, {step!r} does not")
    return number
