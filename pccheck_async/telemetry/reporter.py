"""Tells the log and users' hooks what happens, without a line for everything."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeAlias

from pccheck_async.telemetry.events import Closed, Durable, Event, Failed, Superseded, Waited
from pccheck_async.telemetry.hooks import Hooks
from pccheck_async.telemetry.logs import log, write

__all__ = ["Reporter"]

P = ParamSpec("P")
_Line: TypeAlias = tuple[int, str, str, dict[str, Any]]
"""Level, name of the event, text and fields of a record."""

_SUMMARY_SECONDS = 600.0
_SUMMARY = (
    "%(durable)d checkpoint(s) durable in the last %(seconds).0f s (%(nbytes)d bytes), %(superseded)d superseded, "
    "%(failed)d failed; training was kept waiting for %(stall).3f s"
)
_LONG_SECONDS = 1.0
_LAST = 16
"""Checkpoints among which superseded ones are a burst where they are more than half."""


class Reporter:
    """One engine's; may be used from any thread, and reentrantly, from signal handlers. Never raises.

    Args:
        store: Path of the store, for the log.
        waited: Returns the seconds that training was kept waiting so far.

    Attributes:
        hooks: Told of every event.
        nbytes: Of all durable checkpoints.
    """

    def __init__(self, store: str, waited: Callable[[], float]) -> None:
        self.hooks = Hooks()
        self.nbytes = 0
        self._store = store
        self._waited = waited
        self._lock = threading.RLock()
        self._began = time.monotonic()
        self._since, self._waited_then = self._began, 0.0  # the last summary, and what training had waited by then
        self._sums: Counter[str] = Counter()  # since then
        self._last: deque[bool] = deque(maxlen=_LAST)  # whether they were superseded
        self._burst = False
        self._held_up: float | None = None

    def tell(self, kind: Callable[P, Event], *arguments: P.args, **fields: P.kwargs) -> None:
        """Note an event: its class, and its fields by name. It is made only where a hook gets it."""
        of: Any = kind
        lines = self._count(of, fields)
        logged = of.level is not None and log.isEnabledFor(of.level)
        if lines or logged:
            with suppress(Exception):  # of an error without a text, or a handler of the log: nobody expects it here
                if logged:
                    error = {"error": f"{type(fields['error']).__name__}: {fields['error']}"} if kind is Failed else {}
                    self._write([(of.level, of.name, of.text, {**fields, **error})])
                self._write(lines)
        if self.hooks:
            self.hooks.put(kind(*arguments, **fields))

    def closed(self, *, durable: int, superseded: int, failed: int, skipped: int) -> None:
        """Note the engine's end."""
        self.tell(
            Closed,
            durable=durable,
            superseded=superseded,
            failed=failed,
            skipped=skipped,
            nbytes=self.nbytes,
            seconds=time.monotonic() - self._began,
            stall=self._waited(),
        )

    def _write(self, lines: Sequence[_Line]) -> None:
        for level, name, text, fields in lines:
            fields["store"] = self._store
            write(level, name, text, fields, **fields)

    def _count(self, kind: type[Event], fields: Mapping[str, Any]) -> Sequence[_Line]:
        """Return lines, which are not written under the lock: handlers of the log have locks of their own."""
        if kind is Durable or kind is Superseded or kind is Failed:
            with self._lock:
                return self._count_end(kind, fields)
        if kind is Waited and fields["seconds"] > _LONG_SECONDS:
            with self._lock:
                return self._count_waiting(fields)
        return ()

    def _count_end(self, kind: type[Event], fields: Mapping[str, Any]) -> list[_Line]:
        lines: list[_Line] = []
        self._sums[kind.name] += 1
        if kind is Durable:
            self.nbytes += fields["nbytes"]
            self._sums["nbytes"] += fields["nbytes"]
        if kind is not Failed:
            self._last.append(kind is Superseded)
            lines += self._look_for_burst()
        now = time.monotonic()
        if now - self._since >= _SUMMARY_SECONDS:
            waited = self._waited()
            sums: dict[str, Any] = {name: self._sums[name] for name in ("durable", "superseded", "failed", "nbytes")}
            sums |= {"seconds": now - self._since, "stall": waited - self._waited_then}
            lines.append((logging.INFO, "summary", _SUMMARY, sums))
            self._sums.clear()
            self._since, self._waited_then = now, waited
        return lines

    def _look_for_burst(self) -> list[_Line]:
        superseded = sum(self._last)
        if self._burst:
            self._burst = superseded > _LAST // 4
        elif superseded > _LAST // 2:
            self._burst = True
            text = (
                "%(count)d of the last %(last)d checkpoints were superseded: more are in flight than the storage of "
                "%(store)s can take; checkpoint less often, or lower max_in_flight"
            )
            return [(logging.WARNING, "superseded_burst", text, {"count": superseded, "last": len(self._last)})]
        return []

    def _count_waiting(self, fields: Mapping[str, Any]) -> list[_Line]:
        now = time.monotonic()
        if self._held_up is not None and now - self._held_up < _SUMMARY_SECONDS:
            return []
        self._held_up = now
        text = (
            "training was kept waiting for %(seconds).3f s by the checkpoint of step %(step)d (in %(where)s); "
            "not said again for ten minutes"
        )
        return [(logging.WARNING, "held_up", text, dict(fields))]
