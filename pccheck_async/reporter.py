"""Tells the log and users' hooks what happens, without a line for everything."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeAlias

from pccheck_async.events import Closed, Durable, Event, Failed, Superseded, Waited
from pccheck_async.hooks import Hooks
from pccheck_async.logs import log, write

__all__ = ["Reporter"]

_Line: TypeAlias = tuple[int, str, str, dict[str, Any]]
"""Level, name of the event, text and fields of a record."""

_SUMMARY_SECONDS = 600.0
_LONG_SECONDS = 1.0
_LAST = 16
"""Checkpoints among which superseded ones are a burst where they are more than half."""


class Reporter:
    """One engine's; may be used from any thread, and reentrantly, from signal handlers. Never raises.

    Args:
        store: Path of the store, for the log.

    Attributes:
        hooks: Told of every event.
        nbytes: Of all durable checkpoints.
    """

    def __init__(self, store: str) -> None:
        self.hooks = Hooks()
        self.nbytes = 0
        self._store = store
        self._lock = threading.RLock()
        self._began = time.monotonic()
        self._since = _Sums(self._began)
        self._last: deque[bool] = deque(maxlen=_LAST)  # whether they were superseded
        self._burst = False
        self._held_up: float | None = None

    def tell(self, event: Event) -> None:
        """Note an event."""
        if event.level is not None or isinstance(event, Waited):
            with suppress(Exception):  # of a handler of the log; nobody who tells of an event expects it
                self._note(event)
        self.hooks.put(event)

    def closed(self, *, durable: int, superseded: int, failed: int, skipped: int, stall: float) -> None:
        """Note the engine's end."""
        self.tell(
            Closed(
                durable=durable,
                superseded=superseded,
                failed=failed,
                skipped=skipped,
                nbytes=self.nbytes,
                seconds=time.monotonic() - self._began,
                stall=stall,
            )
        )

    def _note(self, event: Event) -> None:
        lines: list[_Line] = []
        if event.level is not None and log.isEnabledFor(event.level):
            fields = event.fields()
            if isinstance(event, Failed):
                fields["error"] = f"{type(event.error).__name__}: {event.error}"
            lines.append((event.level, event.name, event.text, fields))
        with self._lock:
            if isinstance(event, (Durable, Superseded, Failed)):
                lines += self._count(event)
            elif isinstance(event, Waited):
                lines += self._count_waiting(event)
        for level, name, text, fields in lines:  # not under the lock: handlers of the log have locks of their own
            fields["store"] = self._store
            write(level, name, text, fields, **fields)

    def _count(self, event: Durable | Superseded | Failed) -> Iterator[_Line]:
        sums = self._since
        if isinstance(event, Durable):
            self.nbytes += event.nbytes
            sums.nbytes += event.nbytes
            sums.durable += 1
        elif isinstance(event, Superseded):
            sums.superseded += 1
        else:
            sums.failed += 1
        if not isinstance(event, Failed):
            self._last.append(isinstance(event, Superseded))
            yield from self._look_for_burst()
        now = time.monotonic()
        if now - sums.began >= _SUMMARY_SECONDS:
            self._since = _Sums(now)
            yield logging.INFO, "summary", _Sums.TEXT, sums.fields(now)

    def _look_for_burst(self) -> Iterator[_Line]:
        superseded = sum(self._last)
        if self._burst:
            self._burst = superseded > _LAST // 4
        elif superseded > _LAST // 2:
            self._burst = True
            text = (
                "%(count)d of the last %(last)d checkpoints were superseded: more are in flight than the storage of "
                "%(store)s can take; checkpoint less often, or lower max_in_flight"
            )
            yield logging.WARNING, "superseded_burst", text, {"count": superseded, "last": len(self._last)}

    def _count_waiting(self, event: Waited) -> Iterator[_Line]:
        self._since.stall += event.seconds
        now = time.monotonic()
        if event.seconds > _LONG_SECONDS and (self._held_up is None or now - self._held_up >= _SUMMARY_SECONDS):
            self._held_up = now
            text = (
                "training was kept waiting for %(seconds).3f s by the checkpoint of step %(step)d (in %(where)s); "
                "not said again for ten minutes"
            )
            yield logging.WARNING, "held_up", text, event.fields()


class _Sums:
    """Since the last summary."""

    TEXT = (
        "%(durable)d checkpoint(s) durable in the last %(seconds).0f s (%(nbytes)d bytes), %(superseded)d superseded, "
        "%(failed)d failed; training was kept waiting for %(stall).3f s"
    )

    def __init__(self, began: float) -> None:
        self.began = began
        self.durable = self.superseded = self.failed = self.nbytes = 0
        self.stall = 0.0

    def fields(self, now: float) -> dict[str, Any]:
        return {
            "durable": self.durable,
            "superseded": self.superseded,
            "failed": self.failed,
            "nbytes": self.nbytes,
            "seconds": now - self.began,
            "stall": self.stall,
        }
