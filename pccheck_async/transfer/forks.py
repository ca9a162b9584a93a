# SPDX-License-Identifier: Apache-2.0
"""Releasing resources that a forked child shares with its parent: files and their locks, memory, engines."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

__all__ = ["ForkLock", "abandoned_in_child"]


class Abandonable(Protocol):
    """An owner of resources that a forked child must not keep."""

    def abandon(self) -> None:
        """Release the resources in a forked child, without waiting, unlocking or flushing."""


abandoned_in_child: weakref.WeakSet[Abandonable] = weakref.WeakSet()
"""Objects whose ``abandon()`` is called in every forked child. A child shares its parent's open files, and with them
their locks, which an orphaned DataLoader worker must not keep."""


class ForkLock:
    """A lock to hold while a file is opened and its descriptor recorded; forks wait for it.

    A child forked in between would inherit the descriptor, and with it the file's lock, without a record to close it
    by. A fork waits one second at most: opening a file on a stuck disk may never return. Make one lock per module, not
    per object: the callbacks that it registers are never unregistered.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forking = threading.local()
        os.register_at_fork(before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _before(self) -> None:
        self._forking.holds = self._lock.acquire(timeout=1.0)

    def _in_parent(self) -> None:
        if self._forking.holds:
            self._lock.release()

    def _in_child(self) -> None:
        self._lock = threading.Lock()  # the thread that holds the inherited one does not exist here


def _abandon_in_child() -> None:
    for owner in list(abandoned_in_child):
        owner.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)
