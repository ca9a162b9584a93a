"""Telling a user's callback how far reading is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

from pccheck_async.telemetry.logs import write

__all__ = ["ReadProgress", "reading_progress"]

ReadProgress: TypeAlias = Callable[[int, int], object]
"""Takes the bytes of a checkpoint that are done, and all of them. Called on a thread of the engine's: it is quick, and
calls nothing of the engine. If it raises, that is logged and it is not called again."""


def reading_progress(callback: ReadProgress | None, nbytes: int) -> Callable[[int], None]:
    """Return what is called with the bytes of each chunk that is read, or that need not be, of ``nbytes`` in all."""
    if callback is not None and not callable(callback):
        raise TypeError(f"progress is called with two numbers of bytes, and {callback!r} cannot be called")
    done, current = 0, callback

    def advance(nbytes_more: int) -> None:
        nonlocal done, current
        done += nbytes_more
        if current is not None:
            try:
                current(done, nbytes)
            except Exception as error:  # noqa: BLE001 - it is there to look on
                current = None
                write(logging.WARNING, "progress", "a progress callback raised %r and is not called any more", error)

    return advance
