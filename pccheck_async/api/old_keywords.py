# SPDX-License-Identifier: Apache-2.0
"""The keyword arguments of engines that version 0.1 had; they work in 1.0, with a warning that gives the new spelling.

Integrations that pass settings on to an engine send them through :func:`renamed` first: the warning then shows the
user's line.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, Literal, TypedDict

from pccheck_async.engine import Auto, StorageOptions
from pccheck_async.format import unknown_argument
from pccheck_async.group import Group
from pccheck_async.medium.open_medium import IO, MediumName
from pccheck_async.store import Keep
from pccheck_async.telemetry import warn_user

__all__ = ["OldKeywords", "refuse_unknown", "renamed", "renamed_path"]


class OldKeywords(TypedDict, total=False):
    """The engine's keywords of version 0.1, for type checkers."""

    keep_every: int | None
    keep_best: tuple[str, int, Literal["min", "max"]] | None
    spaced: Sequence[tuple[timedelta | float, timedelta | float]]
    medium: MediumName
    io: IO
    writers: int | Auto
    chunk_bytes: int | Auto
    host_memory: int | Auto
    device: Literal["auto", "snapshot", "stream"]
    check_captures: bool
    lock_timeout: float
    exit_timeout: float
    replicated: Sequence[str]
    trusted_replicas: Sequence[str]


_SPELLING: Final = {"keep": "Keep({})", "storage": "StorageOptions({})", "group": "Group.of(group, {})"}
_DEFAULTS: Final[dict[str, Any]] = {"keep": Keep(), "storage": StorageOptions()}
_NEW: Final = {
    "keep_every": ("keep", "every"),
    "keep_best": ("keep", "best"),
    "spaced": ("keep", "spaced"),
    "medium": ("storage", "medium"),
    "io": ("storage", "io"),
    "writers": ("storage", "writers"),
    "chunk_bytes": ("storage", "chunk_bytes"),
    "host_memory": ("storage", "host_memory"),
    "device": ("storage", "gpu_capture"),
    "check_captures": ("storage", "check_captures"),
    "lock_timeout": ("storage", "lock_timeout"),
    "exit_timeout": ("storage", "exit_timeout"),
    "replicated": ("group", "replicated"),
    "trusted_replicas": ("group", "trusted_replicas"),
}
"""By old keyword: the new keyword, and the field of its value."""


def renamed(callee: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of an engine with the old ones in their new spelling; DeprecationWarning if any is old.

    Args:
        callee: Name of the class that the user called.
        settings: Keyword arguments; unknown ones stay as they are. Without a ``group`` among them, old keywords about
            groups stay, too: they are renamed when the engine gets them with the group.

    Raises:
        TypeError: an old keyword, and the field that replaces it, are both given.
        ValueError: a value is out of range.
    """
    known = [name for name, (keyword, _) in _NEW.items() if keyword != "group" or "group" in settings]
    old = {name: settings[name] for name in known if name in settings}
    new = {name: value for name, value in settings.items() if name not in old}
    if not old:
        return new
    fields: dict[str, dict[str, Any]] = {}
    for name, value in old.items():
        keyword, field = _NEW[name]
        fields.setdefault(keyword, {})[field] = value
        if keyword in new and _is_set(new[keyword], field):
            raise TypeError(f"{callee}: give {name}= or {_spelled(keyword, {field: ...})}, not both")
    before = ", ".join(f"{name}={_code(value)}" for name, value in old.items())
    now = ", ".join(_spelled(keyword, given) for keyword, given in fields.items())
    text = f"{callee}({before}) is {callee}({now}) now; the old spelling goes with version 1.1"
    warn_user(text, DeprecationWarning)
    for keyword, given in fields.items():
        if keyword in _DEFAULTS:
            new[keyword] = replace(new.get(keyword, _DEFAULTS[keyword]), **given)
        elif new.get(keyword) is not None:  # else there are no ranks that they concern
            new[keyword] = Group.of(new[keyword], **given)
    return new


def renamed_path(
    callee: str, path: str | os.PathLike[str] | None, old: str, settings: Mapping[str, Any]
) -> tuple[str | os.PathLike[str], dict[str, Any]]:
    """Return the argument ``path``, and the settings without its old name; DeprecationWarning if that was used.

    Args:
        callee: Name of the class that the user called.
        path: The first argument of the call; None if it was not given.
        old: The name of this argument in version 0.1.
        settings: Keyword arguments, perhaps with the old name among them.

    Raises:
        TypeError: the path is not given, or given twice.
    """
    if old not in settings:
        if path is None:
            raise TypeError(f"{callee} takes the folder of its store as first argument, path")
        return path, dict(settings)
    if path is not None:
        raise TypeError(f"{callee}: give {old}= or path=, not both")
    given: str | os.PathLike[str] = settings[old]
    spelled = _code(given)
    text = f"{callee}({old}={spelled}) is {callee}(path={spelled}) now; the old spelling goes with version 1.1"
    warn_user(text, DeprecationWarning)
    return given, {name: value for name, value in settings.items() if name != old}


def _is_set(given: object, field: str) -> bool:
    default = next((one for one in _DEFAULTS.values() if isinstance(given, type(one))), None)
    return getattr(given, field, ()) != getattr(default, field, ())


def _spelled(keyword: str, fields: Mapping[str, Any]) -> str:
    inner = ", ".join(f"{field}={_code(value)}" for field, value in fields.items())
    return f"{keyword}={_SPELLING[keyword].format(inner)}"


def _code(value: object) -> str:
    """Return the value as Python code, or "..." for values of other types than numbers, strings, lists and tuples."""
    return repr(value) if isinstance(value, str | int | float | list | tuple | None) else "..."


def refuse_unknown(callee: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError if a name is no keyword of the callee, nor one of version 0.1: Python's error would not name it.

    Args:
        callee: Name of the class that the user called.
        names: Keywords that the callee was given.
        known: Keywords that the callee has.
    """
    words = {one: one for one in known}
    unknown = [name for name in names if name not in words and name not in _NEW]
    for old, (keyword, field) in _NEW.items():
        words[old] = words[field] = _spelled(keyword, {field: ...})
    for name in unknown:
        raise unknown_argument(callee, name, words)
