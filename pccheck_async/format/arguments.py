# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that several rooms take: steps, names, counts, and which checkpoint is meant."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from pccheck_async.format.info import Tier, Which

P = ParamSpec("P")
T = TypeVar("T")


def check_step(step: object) -> int | None:
    """Return a user's step as an int, None for None. Raises TypeError, ValueError (see :func:`whole_step`)."""
    return None if step is None else whole_step(step)


def check_tier(tier: object) -> Tier:
    """Return the name of a tier. Raises ValueError for any other."""
    if tier == "memory":
        return "memory"
    if tier == "disk":
        return "disk"
    raise ValueError(f"a tier is 'memory' or 'disk', not {tier!r}")


def which_one(step: object, name: object) -> Which:
    """Return the requested step or name. Raises ValueError if both are given, TypeError for other types."""
    if name is None:
        return check_step(step)
    if step is not None:
        raise ValueError(f"give a step or a name, not both ({step!r} and {name!r})")
    return check_name(name)


def the_one(step: object, name: object) -> int | str:
    """Return the given step or name. Raises TypeError if there is neither, and the errors of :func:`which_one`."""
    if (which := which_one(step, name)) is None:
        raise TypeError("give step= or name=")
    return which


def formerly(
    *positional: str,
    after: int,
    renamed: Mapping[str, str] | None = None,
    pinned: Callable[..., Any] | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator: a function also takes arguments as it did in version 0.1, with a DeprecationWarning.

    Args:
        positional: Arguments that are given by name alone now.
        after: The number of those that still have places before them, ``self`` included.
        renamed: Old names of arguments, each with the new one.
        pinned: The function to call for the old argument ``pinned=False``.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        verb = function.__name__.partition("_")[0]

        @wraps(function)
        def called(*arguments: Any, **named: Any) -> Any:
            now = dict(zip(positional, arguments[after:], strict=False))
            now |= {new: named.pop(name) for name, new in (renamed or {}).items() if name in named}
            call, new = function, [f"{verb}({', '.join(f'{name}=...' for name in now)})"] if now else []
            if pinned is not None and "pinned" in named:
                call, new = (function if named.pop("pinned") else pinned), ["pin() and unpin()"]
            if not new or len(arguments) > after + len(positional):
                return function(*arguments, **named)
            warnings.warn(f"write {new[0]}; the old spelling goes with version 1.1", DeprecationWarning, stacklevel=2)
            return call(*arguments[:after], **now, **named)

        return called

    return decorate


def check_name(name: object) -> str:
    """Return the name of a checkpoint. Raises TypeError for anything but a str, ValueError for an empty one."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a checkpoint is a str, not {name!r}")
    if not name:
        raise ValueError("the name of a checkpoint is not empty; give None for no name")
    return name


def matches(which: Which, step: int, name: str | None) -> bool:
    """Whether a checkpoint of this step and name is the requested one."""
    return which in (None, step, name)


def describe_which(which: Which) -> str:
    """Return the words that follow "checkpoint" in a message."""
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
    """Return a user's step as an int. Raises TypeError for a non-integer, ValueError for more than 64 bits."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"step must be an integer, not {step!r}") from None
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"step must fit into a signed 64-bit integer; {step!r} does not")
    return number


def check_count(name: str, value: object, *, no_int: type[Exception] = ValueError) -> int:
    """Return a setting that is a whole number of at least 1. Raises ValueError, or ``no_int`` for a non-integer."""
    if type(value) is int and value >= 1:
        return value
    raise (ValueError if type(value) is int else no_int)(f"{name} is a whole number of at least 1, not {value!r}")
