# SPDX-License-Identifier: Apache-2.0
"""Engines that are open: drained when the interpreter exits, abandoned in forked children, found by their store."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from inspect import iscoroutinefunction
from typing import Protocol

from pccheck_async.transfer import abandoned_in_child

__all__ = ["call_to_close", "forget", "holder_here", "remember"]


class Open(Protocol):
    """An engine whose store is open."""

    path: str
    made_at: str
    facade: weakref.ref[object] | None

    @property
    def is_open(self) -> bool: ...

    def abandon(self) -> None: ...

    def close_at_exit(self) -> str: ...


_open: dict[int, Open] = {}


def remember(engine: Open) -> None:
    """Keep an open engine alive until :func:`forget`. A forked child abandons it."""
    _open[id(engine)] = engine
    abandoned_in_child.add(engine)


def forget(engine: Open) -> None:
    """Drop an engine after it was closed or abandoned."""
    abandoned_in_child.discard(engine)
    _open.pop(id(engine), None)


def holder_here(path: str | os.PathLike[str]) -> Open | None:
    """Return the engine of this process that has a store open; None if there is none, or it is closing."""
    wanted = os.path.realpath(path)
    found = (each for each in list(_open.values()) if each.is_open and os.path.realpath(each.path) == wanted)
    return next(found, None)


def call_to_close(engine: Open) -> str:
    """Return a colon and the call that closes an engine, for a message; empty if ``__main__`` has no name for it."""
    facade, names = None if engine.facade is None else engine.facade(), vars(sys.modules["__main__"])
    there = [name for name, value in [*names.items()] if value is facade is not None]
    if isinstance(outputs := names.get("Out"), dict):  # a notebook's cells that end in the engine
        there += [f"Out[{cell}]" for cell, value in [*outputs.items()] if value is facade is not None]
    if not (name := next((name for name in there if not name.startswith("_")), "")):
        return ""
    return f": {'await ' if iscoroutinefunction(getattr(facade, 'close', None)) else ''}{name}.close()"


def _drain_at_exit() -> None:
    for engine in list(_open.values()):
        forget(engine)
        print(f"pccheck_async: {engine.close_at_exit()}", file=sys.stderr)


atexit.register(_drain_at_exit)
