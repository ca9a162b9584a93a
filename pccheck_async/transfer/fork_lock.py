"""Forks keep out of what must not be half done in the child."""

from __future__ import annotations

import os
import threading
from types import TracebackType

__all__ = ["ForkLock"]

_SECONDS = 1.0


class ForkLock:
    """Held while a file or a ring is opened and noted: a child forked in between would keep it, and its lock, unknown.

    A fork waits for it, a second at most: opening a file on a stuck disk may take for ever. Make one for a module: it
    is never forgotten.
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
        self._lock = threading.Lock()  # whoever holds the other one is not here
