"""Engines that are open: drained when the interpreter exits, abandoned in forked children."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Protocol

__all__ = ["count_open", "forget", "remember"]


class _Open(Protocol):
    path: str

    def abandon(self) -> None: ...

    def close_at_exit(self) -> str: ...


_open: dict[int, _Open] = {}


def remember(engine: _Open) -> None:
    """Note an open engine; it stays alive until :func:`forget`."""
    _open[id(engine)] = engine


def forget(engine: _Open) -> None:
    """Note that an engine was closed."""
    _open.pop(id(engine), None)


def count_open(path: str) -> int:
    """Return how many engines of this process have a store open, or are about to."""
    return sum(engine.path == path for engine in list(_open.values()))


def _drain_at_exit() -> None:
    for engine in list(_open.values()):
        forget(engine)
        print(f"pccheck_async: {engine.close_at_exit()}", file=sys.stderr)


def _abandon_in_child() -> None:
    engines = list(_open.values())
    _open.clear()
    for engine in engines:
        engine.abandon()


atexit.register(_drain_at_exit)
os.register_at_fork(after_in_child=_abandon_in_child)
