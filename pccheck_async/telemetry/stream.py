# SPDX-License-Identifier: Apache-2.0
"""The stream of an engine's events: an emitted event is added to totals, logged, recorded and passed to hooks."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeAlias

from msgspec.structs import asdict

from pccheck_async.telemetry.events import Admitted, Closed, Durable, Event, Failed, Superseded, Waited
from pccheck_async.telemetry.logs import log, write
from pccheck_async.telemetry.totals import Totals
from pccheck_async.telemetry.tracing import Sink, Span, StageClock

__all__ = ["Hook", "Hooks", "ReadProgress", "Stream", "reading_progress"]

Hook: TypeAlias = Callable[[Event], object]
ReadProgress: TypeAlias = Callable[[int, int], object]
"""Callback for progress: called with the bytes of a checkpoint that are done, and with all its bytes, on a thread of
the engine. It must be quick and not call the engine. If it raises, that is logged and it is not called again."""

_Line: TypeAlias = tuple[str, str, dict[str, Any]]
"""A record to write: name of the event, text, fields."""

_MOST_EVENTS = 1024
"""Most events that wait for a slow hook; further ones are dropped."""
_ENDS = (Durable, Superseded, Failed)
_SUMMARY_SECONDS = 600.0
_LONG_SECONDS = 1.0
_LAST = 16
"""Number of recent checkpoints of which more than half have to be superseded for a warning."""

_SUMMARY = (
    "%(durable)d checkpoint(s) durable in the last %(seconds).0f s (%(nbytes)d bytes), %(superseded)d superseded, "
    "%(failed)d failed; training was kept waiting for %(stall).3f s"
)
_BURST = (
    "%(count)d of the last %(last)d checkpoints were superseded: more are in flight than the storage of %(store)s can "
    "take; checkpoint less often, or lower max_in_flight"
)
_HELD_UP = (
    "training was kept waiting for %(seconds).3f s by the checkpoint of step %(step)d (in %(where)s); not said again "
    "for ten minutes"
)


class Hooks:
    """Calls hooks with events, in order, on a separate thread, which is started for the first event.

    May be used from any thread, signal handlers included; never waits for a hook, and raises none of a hook's errors.
    """

    def __init__(self) -> None:
        self.hooks: tuple[Hook, ...] = ()
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # a signal handler may come in between
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._raised: list[Hook] = []  # not every object that can be called can be hashed, or likes to be compared
        self._closed = False
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()
        self.dropped = 0
        self._logged_drops = False

    def add(self, hook: Hook) -> Callable[[], None]:
        """Call ``hook`` with every event from now on; return a function that removes it.

        Raises TypeError if ``hook`` is not callable.
        """
        if not callable(hook):
            raise TypeError(f"a hook is called with every event, and {hook!r} cannot be called")
        with self._lock:
            self.hooks = (*self.hooks, hook)

        def remove() -> None:
            with self._lock:
                self.hooks = tuple(each for each in self.hooks if each is not hook)

        return remove

    def put(self, event: Event, *, quiet: bool = False) -> None:
        """Queue an event for the hooks, or drop and count it if too many events wait already.

        The first drop without ``quiet`` is logged. Callers that hold a lock set ``quiet``: handlers of the log are user
        code.
        """
        if not self.hooks or self._closed:
            return
        if self._queue.qsize() < _MOST_EVENTS:
            self._queue.put(event)
            if self._thread is None:
                self._start()
            return
        with self._lock:
            self.dropped += 1
            first = not quiet and not self._logged_drops
            self._logged_drops = self._logged_drops or first
        if first:
            with suppress(Exception):  # of a handler of the log; no caller expects it
                write("event_hook", "events are dropped: %d wait for a slow hook", _MOST_EVENTS)

    def close(self) -> Future[None]:
        """Accept no more events. The returned future is done when the queued events are delivered, which may take long.

        On the thread that delivers them, which must not wait for itself, the future is done already.
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
            for hook in self.hooks:
                try:
                    hook(event)
                except BaseException as error:  # noqa: BLE001 - hooks are none of the engine's business
                    if all(hook is not each for each in self._raised):
                        self._raised.append(hook)
                        with suppress(Exception):  # of a handler of the log
                            write("event_hook", "a hook raised %r at %r; said once", error, event)
        self._ended.set_result(None)


class Stream:
    """The stream of one engine's events. May be used from any thread and, reentrantly, signal handlers. Never raises.

    Attributes:
        totals: The sums over all events.
        clock: Measures the engine's own stages.
        hooks: The users' hooks.
        trace: Function that records a span; None if spans are not recorded.
        saturated: Whether checkpoints are saved as fast as they are admitted, as in a trial: then the log does not warn
            that many are superseded.
    """

    saturated = False

    def __init__(self, store: str) -> None:
        self.totals = Totals()
        self.clock = StageClock("capture", "commit", "restore")
        self.hooks = Hooks()
        self.trace: Sink | None = None
        self._store = store
        self._lock = threading.RLock()
        self._began = time.monotonic()
        self._summed_at, self._summed = self._began, self._sums()  # the last summary
        self._last: deque[bool] = deque(maxlen=_LAST)  # whether they were superseded
        self._burst = False
        self._held_up_at = -math.inf  # when that was last logged

    def emit(self, event: Event) -> None:
        """Add an event to the totals, and publish it if anybody is interested."""
        self.totals.add(event)
        wanted = event.level is not None or self.hooks.hooks
        if wanted or (type(event) is Waited and (self.trace is not None or event.seconds > _LONG_SECONDS)):
            self.publish(event)

    def publish(self, event: Event) -> None:
        """Log an event, record a wait as a span, and queue the event for hooks; do not add it to the totals.

        Hold no lock when calling this: handlers of the log are user code.
        """
        lines: list[_Line] = []
        if type(event) is Waited:
            if event.seconds > _LONG_SECONDS:
                lines = self._held_up(event)
            if self.trace is not None:
                end = time.perf_counter()
                self.trace(Span("stall", end - event.seconds, end, 0, event.step, event.counter))
        elif type(event) in _ENDS:
            lines = self._of_ends(event)
        if (event.level is not None and log.isEnabledFor(event.level)) or lines:
            self._write(event, lines)
        if self.hooks.hooks:
            # A checkpoint is admitted under the engine's lock. Its end, which no lock covers, is dropped as well.
            self.hooks.put(event, quiet=type(event) is Admitted)

    def close(self) -> None:
        """Emit :class:`Closed`, the last event, with the totals."""
        sums, seconds = self._sums(), time.monotonic() - self._began
        self.emit(Closed(**sums, skipped=self.totals.counts["skipped"], seconds=seconds))

    def _sums(self) -> dict[str, Any]:
        totals = self.totals
        counts = {name: totals.counts[name] for name in ("durable", "superseded", "failed")}
        return {**counts, "nbytes": totals.durable_bytes, "stall": totals.stall_seconds}

    def _write(self, event: Event, others: Iterable[_Line]) -> None:
        """Log an event if it has a level, and then the lines in ``others``."""
        with suppress(Exception):  # of an error without a text, or a handler of the log: nobody expects it here
            said = asdict(event)
            del said["time"]
            if isinstance(event, Failed):
                said["error"] = f"{type(event.error).__name__}: {event.error}"
            own = [(event.name, event.text, said)] if event.level is not None else []
            for name, text, fields in (*own, *others):
                fields["store"] = self._store
                write(name, text, fields, **fields)

    def _held_up(self, event: Waited) -> list[_Line]:
        with self._lock:
            now = time.monotonic()
            if now - self._held_up_at < _SUMMARY_SECONDS:
                return []
            self._held_up_at = now
        said = {"step": event.step, "counter": event.counter, "seconds": event.seconds, "where": event.where}
        return [("held_up", _HELD_UP, said)]

    def _of_ends(self, event: Event) -> list[_Line]:
        """Count the end of a checkpoint; return the lines due now: warning of a burst, summary.

        The caller writes them without the lock.
        """
        lines: list[_Line] = []
        with self._lock:
            now = time.monotonic()
            if type(event) is not Failed:
                self._last.append(type(event) is Superseded)
            superseded, before = sum(self._last), self._burst
            self._burst = superseded > _LAST // (4 if before else 2)
            if self._burst and not before and not self.saturated:
                lines.append(("superseded_burst", _BURST, {"count": superseded, "last": len(self._last)}))
            if now - self._summed_at >= _SUMMARY_SECONDS:
                sums, then = self._sums(), self._summed
                said = {name: value - then[name] for name, value in sums.items()}
                lines.append(("summary", _SUMMARY, said | {"seconds": now - self._summed_at}))
                self._summed_at, self._summed = now, sums
        return lines


def reading_progress(callback: ReadProgress | None, nbytes: int) -> Callable[[int], None]:
    """Return a function that reports progress: call it with the bytes of each chunk that is read or skipped.

    ``nbytes`` is the sum over all chunks. Raises TypeError if ``callback`` is neither callable nor None.
    """
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
                write("progress", "a progress callback raised %r and is not called any more", error)

    return advance
