"""What is known of a committed checkpoint without reading it, and the numbers of steps."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import TypeAlias

Metadata = Mapping[str, str | int | float | bool | None]
Which: TypeAlias = int | str | None
"""Which checkpoint: the newest of a step (int), the one that has a name (str), or the newest of all (None)."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A durable checkpoint, as its commit record describes it.

    Attributes:
        step: The user's number.
        counter: The engine's own number, larger than that of every checkpoint kept when this one was admitted.
        nbytes: Length of the payload in bytes (tensors and arrays, with padding).
        time: Time of the capture, seconds since the epoch (UTC).
        pinned: Kept until it is unpinned, whatever the rules (``keep_last`` and its like) say.
        metadata: What the user gave to ``checkpoint(metadata=...)``.
        name: What the user gave to ``checkpoint(name=...)``, None for nothing.
    """

    step: int
    counter: int
    nbytes: int
    time: float
    pinned: bool = False
    metadata: Metadata = field(default_factory=dict, hash=False)
    name: str | None = None

    @property
    def created(self) -> datetime:
        """The capture time as an aware datetime in UTC."""
        return datetime.fromtimestamp(self.time, UTC)


@dataclass(frozen=True, slots=True, eq=False)
class Restored(CheckpointInfo):
    """The checkpoint that was restored, and how it and the state differed (``strict=False``).

    It equals the :class:`CheckpointInfo` of that checkpoint.

    Attributes:
        missing: Paths that the state has and the checkpoint lacks: they stayed as they were. Of a subtree that the
            checkpoint lacks as a whole, the path of its root alone.
        unexpected: Paths that the checkpoint has and the state lacks: they were not read.
        filled: Number of leaves of the checkpoint that were restored; all of them, where nothing is unexpected.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    filled: int = 0

    @classmethod
    def of(
        cls, info: CheckpointInfo, missing: tuple[str, ...], unexpected: tuple[str, ...], filled: int = 0
    ) -> Restored:
        """Return ``info`` with the differences."""
        facts = {fact.name: getattr(info, fact.name) for fact in fields(CheckpointInfo)}
        return cls(**facts, missing=missing, unexpected=unexpected, filled=filled)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CheckpointInfo):
            return NotImplemented
        return all(getattr(self, name.name) == getattr(other, name.name) for name in fields(CheckpointInfo))

    __hash__ = CheckpointInfo.__hash__


def check_step(step: object) -> int | None:
    """Return a user's step as an int, None for None. Raises TypeError, ValueError (see :func:`whole_step`)."""
    return None if step is None else whole_step(step)


def which_one(step: object, name: object) -> Which:
    """Return which checkpoint a user asks for. Raises ValueError where both are given, TypeError for other types."""
    if name is None:
        return check_step(step)
    if step is not None:
        raise ValueError(f"give a step or a name, not both ({step!r} and {name!r})")
    return check_name(name)


def check_name(name: object) -> str:
    """Return the name of a checkpoint. Raises TypeError for what is no str, ValueError for an empty one."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a checkpoint is a str, not {name!r}")
    if not name:
        raise ValueError("the name of a checkpoint is not empty; give None for no name")
    return name


def in_words(which: Which) -> str:
    """Return what stands behind "checkpoint" in a message: of which step, with which name, or nothing."""
    if which is None:
        return ""
    return f" named {which!r}" if isinstance(which, str) else f" of step {which}"


def new_step(step: object) -> int:
    """Return the step of a new checkpoint, which is 0 or more; checkpoints of old versions may have negative ones."""
    number = whole_step(step)
    if number < 0:
        raise ValueError(f"step is {number}; the first step is 0")
    return number


def whole_step(step: object) -> int:
    """Return a user's step as an int. Raises TypeError for what is no integer, ValueError for more than 64 bits."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"step is a whole number, not {step!r}") from None
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"step has at most 64 bits, {step!r} does not")
    return number


def check_count(name: str, value: object, *, no_int: type[Exception] = ValueError) -> int:
    """Return a setting that is a whole number of at least 1. Raises ValueError, ``no_int`` for what is no int."""
    if type(value) is int and value >= 1:
        return value
    raise (ValueError if type(value) is int else no_int)(f"{name} is a whole number of at least 1, not {value!r}")
