# SPDX-License-Identifier: Apache-2.0
"""Deferring Ctrl-C while a shelf changes: a KeyboardInterrupt is raised before or after a change, never in the middle.

Python calls a signal handler between two byte codes of the main thread, with the interrupted frame. While a shelf
changes, and inside ``with shelf.transaction()``, the handler below is installed for SIGINT. It calls the previous
handler: at once if the interrupted code is the user's, at the end of the change if it is the shelf's.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["HoldsBack"]

_ROOM = f"{Path(__file__).parent}/"


class _Interrupts:
    """The handler, and the deferred signal. ``begin`` runs on the main thread only, ``end`` on any (``__del__``)."""

    def __init__(self) -> None:
        self._depth = 0
        self._before: Callable[[int, FrameType | None], Any] = signal.default_int_handler
        self._held: FrameType | None = None
        self._handler = self._on_signal  # one object, to be recognised

    def begin(self) -> None:
        current = signal.getsignal(signal.SIGINT)
        if callable(current) and current is not self._handler:  # inside another one, too: a user may have set one there
            self._before = current
            with suppress(ValueError):  # an interpreter beside the main one
                signal.signal(signal.SIGINT, self._handler)
        self._depth += 1

    def end(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            held = self._held
            self._put_back()
            if held is not None:
                self._before(signal.SIGINT, held)

    def _put_back(self) -> None:
        self._held = None
        if signal.getsignal(signal.SIGINT) is self._handler:  # else the user has set another one meanwhile
            with suppress(ValueError):  # a transaction was collected on another thread: the next signal passes through
                signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        at = frame if self._depth else None
        while at is not None and not at.f_code.co_filename.startswith(_ROOM):
            at = at.f_back
        if at is not None:
            self._held = at
        else:
            if not self._depth:  # in ``begin`` or ``end``, which it ends
                self._put_back()
            self._before(signum, frame)


_interrupts = _Interrupts()


class HoldsBack:
    """A context that defers a KeyboardInterrupt in the shelf's own code to its end; other code is interrupted at once.

    Does nothing on threads other than the main one.
    """

    _entered = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            _interrupts.begin()
            self._entered = True

    def __exit__(self, *_: object) -> None:
        if self._entered:
            self._entered = False
            _interrupts.end()

    def __del__(self) -> None:
        self.__exit__()  # of a transaction that was begun and never ended: else no later interrupt would be raised
