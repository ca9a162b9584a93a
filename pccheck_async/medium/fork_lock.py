"""A lock that a fork waits for, so that the child inherits no descriptor that nobody noted."""

from __future__ import annotations

import os
import threading
from types import TracebackType

__all__ = ["ForkLock"]

_SECONDS = 1.0


class ForkLock:
    """Held while a file is opened and its descriptor noted.

    A child forked in between would inherit the descriptor, and with it the file's lock, without knowing to close it. A
    fork waits for the lock, one second at most: opening a file on a stuck disk may never return. Make one per module,
    not per object: the callbacks that it registers are never unregistered.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forking = threading.local()
        os.register_at_fork(before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def _before(self) -> None:
        self._forking.holds = self._lock.acquire(timeout=_SECONDS)

    def _in_parent(self) -> None:
        if self._forking.holds:
            self._lock.release()

    def _in_child(self) -> None:
        self._lock = threading.Lock()  # the thread that holds the inherited one does not exist here
