# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that several subpackages take: keyword names, steps, counts, and the choice of a checkpoint."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Final, ParamSpec, TypeVar, cast

from pccheck_async.errors import first_few
from pccheck_async.format.info import Reach, Tier, Which

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])

_HERE: Final = {
    "interval": """
        save_steps every_n_train_steps every_n_steps save_interval train_time_interval checkpoint_interval
        checkpointing_steps save_every checkpoint_every every_steps every save_freq frequency period
    """,
    "interval=n, in steps (for each epoch, as many as it has)": "every_n_epochs save_every_n_epochs save_strategy",
    "keep_last": "save_total_limit total_limit max_to_keep keep_latest_k num_to_keep last",
    'keep=Keep(best=(metric, 1, "min"))': """
        save_top_k monitor mode metric_for_best_model greater_is_better load_best_model_at_end save_best
    """,
    "path": "dirpath output_dir checkpoint_dir save_dir directory folder store",
    "step": "global_step iteration epoch",
    "metadata": "metrics meta info",
    "state": "state_dict app_state model",
    "device": "map_location",
    "keys": "prefix only filter",
    "name": "tag label",
}
_ELSEWHERE: Final = {name: here for here, names in _HERE.items() for name in names.split()}
"""Keyword arguments of trainers and other libraries, each with this package's argument for the same purpose."""


def explained(target: C) -> C:
    """Decorate a function or a class so that the TypeError of a call with wrong arguments suggests the right ones.

    Python's own errors suggest nothing, and name the class that defines a method.
    """
    if isinstance(target, type):
        target.__init__ = explained(target.__init__)  # type: ignore[misc]
        return target

    @wraps(target)
    def called(*arguments: Any, **named: Any) -> Any:
        try:
            return target(*arguments, **named)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # from inside
            raise _wrong_arguments(target, error, arguments, named) from None

    return cast("C", called)


def _wrong_arguments(
    target: Callable[..., Any], error: TypeError, arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> TypeError:
    parameters = signature(target).parameters.values()
    owner = target.__qualname__.rpartition(".")[0]
    if "self" in [each.name for each in parameters] and owner not in [
        k.__name__ for a in arguments[:1] for k in type(a).__mro__
    ]:
        return TypeError(f"{target.__qualname__} was called on the class: make an object of it first, {owner}(...)")
    callee = type(arguments[0]).__name__ if target.__name__ == "__init__" else target.__qualname__
    known = [each.name for each in parameters if each.name != "self" and each.kind is not each.VAR_KEYWORD]
    for name in named:
        if name not in known:
            return unknown_argument(callee, name, {one: one for one in known})
    text = str(error).replace(f"{target.__qualname__}()", f"{callee}()")
    if len(arguments) > sum(each.kind is Parameter.POSITIONAL_OR_KEYWORD for each in parameters):
        text += f"; by name: {', '.join(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)}"
    return TypeError(text)


def unknown_argument(callee: str, name: str, words: Mapping[str, str]) -> TypeError:
    """Return the TypeError for an argument that does not exist, with suggestions.

    Args:
        callee: The name of the function or class that was called.
        name: The name of the argument.
        words: Names of existing arguments, and other names for them, each with the text to suggest.
    """
    near = []
    if (here := _ELSEWHERE.get(name, "")).partition("=")[0] in words:
        near.append(here)
    if name in words or not near:
        near += [words[word] for word in ([name] if name in words else get_close_matches(name, words))]
    if near:
        return TypeError(f"{callee} has no argument {name!r}; did you mean {' or '.join(dict.fromkeys(near))}?")
    return TypeError(f"{callee} has no argument {name!r}; it has {', '.join(w for w in words if words[w] == w)}")


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


def check_reach(tier: object) -> Reach:
    """Return the name of a place that a checkpoint reaches (:data:`Reach`). Raises ValueError for any other."""
    if tier == "replicas":
        return "replicas"
    if tier == "remote":
        return "remote"
    if tier in ("memory", "disk"):
        return check_tier(tier)
    raise ValueError(f"a tier is 'memory', 'replicas', 'disk' or 'remote', not {tier!r}")


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
    """Return a decorator: the function also takes arguments as in version 0.1, with a DeprecationWarning.

    Args:
        positional: Names of arguments that are keyword-only now and were positional.
        after: The number of positional arguments before them, ``self`` included.
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
    """Return the words that follow "checkpoint" in a message: which one is meant; empty for the newest of all."""
    if which is None:
        return ""
    return f" named {which!r}" if isinstance(which, str) else f" of step {which}"


def there_are(which: Which, found: Iterable[Any]) -> str:
    """Return the end of a message that there is no such checkpoint: the steps, or names, of ``found``, in order."""
    if isinstance(which, str):
        texts = [repr(each.name) for each in found if each.name is not None]
    else:
        texts = [str(each.step) for each in found]
    what = "those with names are" if isinstance(which, str) else "there are steps"
    return f"; {what} {first_few([*dict.fromkeys(texts)], 5)}" if texts else ""


def new_step(step: object) -> int:
    """Return the step of a new checkpoint as an int. Raises ValueError if it is negative, as old ones may be."""
    number = whole_step(step)
    if number < 0:
        raise ValueError(f"step is {number}; the first step is 0")
    return number


def whole_step(step: object) -> int:
    """Return a user's step as an int. Raises TypeError for a non-integer, ValueError for more than 64 bits."""
    try:
        if isinstance(step, bool):
            raise TypeError
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
