# SPDX-License-Identifier: Apache-2.0
"""A queue of work that follows saves, done in order on a thread that ends when the queue is empty."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = ["InTurn"]


class InTurn:
    """Runs queued work (finishing saves, removing checkpoints) in order; after a failure nothing is removed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Callable[[], None], bool]] = deque()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None  # of a save; nothing is removed until it was raised

    def then(self, work: Callable[[], None], *, removes: bool = False) -> None:
        """Queue work after that of earlier calls; if that failed, work that ``removes`` is dropped."""
        with self._changed:
            self._waiting.append((work, removes))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pccheck-lightning")
                self._thread.start()

    def wait(self, most: int = 0) -> None:
        """Wait until at most ``most`` pieces of work are left. Raises the first error since the last call."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) <= most)
            error, self._error = self._error, None
            thread = self._thread
        if most == 0 and thread is not None:
            thread.join()
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            work, removes = self._waiting[0]
            try:
                if not (removes and self._error is not None):
                    work()
            except Exception as error:  # noqa: BLE001 - raised by the next wait
                self._error = self._error or error
            with self._changed:
                self._waiting.popleft()
                ended = not self._waiting
                if ended:
                    self._thread = None
                self._changed.notify_all()
            if ended:
                return
