"""Hooks of users: called with events, in order, on a thread of their own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeAlias

from pccheck_async.telemetry.events import Event
from pccheck_async.telemetry.logs import write

__all__ = ["Hook", "Hooks"]

Hook: TypeAlias = Callable[[Event], object]

_MOST_EVENTS = 1024
"""Waiting for a slow hook; more are dropped."""


class Hooks:
    """Delivers events. May be used from any thread, signal handlers included; never raises what a hook raises.

    The thread starts with the first event that a hook gets. Whoever tells of an event puts it into a queue, and does
    not wait.
    """

    def __init__(self) -> None:
        self._hooks: tuple[Hook, ...] = ()
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # a signal handler may come in between
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._raised: list[Hook] = []  # not every object that can be called can be hashed, or likes to be compared
        self._closed = False
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()
        self.dropped = 0

    def add(self, hook: Hook) -> Callable[[], None]:
        """Call ``hook`` with every event from now on. Returns what ends that. Raises TypeError."""
        if not callable(hook):
            raise TypeError(f"a hook is called with every event, and {hook!r} cannot be called")
        with self._lock:
            self._hooks = (*self._hooks, hook)

        def remove() -> None:
            with self._lock:
                self._hooks = tuple(each for each in self._hooks if each is not hook)

        return remove

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._hooks)

    def put(self, event: Event) -> None:
        """Tell the hooks of an event, soon; dropped and counted where too many wait already."""
        if not self._hooks or self._closed:
            return
        if self._queue.qsize() < _MOST_EVENTS:
            self._queue.put(event)
            if self._thread is None:
                self._start()
            return
        with self._lock:
            self.dropped += 1
            first = self.dropped == 1
        if first:
            with suppress(Exception):  # of a handler of the log; nobody who tells of an event expects it
                write(logging.WARNING, "event_hook", "events are dropped: %d wait for a slow hook", _MOST_EVENTS)

    def close(self) -> Future[None]:
        """Take no more events. The future is done when those that were told are delivered; a hook may take long.

        It is done already on the thread that delivers them, which must not wait for itself.
        """
        self._closed = True
        self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            return self._ended
        nothing: Future[None] = Future()
        nothing.set_result(None)
        return nothing

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._deliver, name="pccheck-events", daemon=True)
                with suppress(RuntimeError):  # no thread can be started any more, while the interpreter exits
                    thread.start()
                    self._thread = thread

    def _deliver(self) -> None:
        while (event := self._queue.get()) is not None:
            for hook in self._hooks:
                try:
                    hook(event)
                except BaseException as error:  # noqa: BLE001 - hooks are none of the engine's business
                    if all(hook is not each for each in self._raised):
                        self._raised.append(hook)
                        with suppress(Exception):  # of a handler of the log
                            write(logging.WARNING, "event_hook", "a hook raised %r at %r; said once", error, event)
        self._ended.set_result(None)
