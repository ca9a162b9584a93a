# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of one engine: which were admitted, which are in flight, and how the others ended."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Literal

from pccheck_async.engine.config import EngineConfig
from pccheck_async.engine.flight import Flight
from pccheck_async.engine.pending import PendingCheckpoint
from pccheck_async.engine.policy import SaveReport
from pccheck_async.errors import CheckpointError, ReplicasDifferError, TornCaptureError
from pccheck_async.format import CheckpointInfo, Tier
from pccheck_async.telemetry import Stream, warn_user, write
from pccheck_async.telemetry.events import Admitted, Durable, Event, Failed, Skipped, Superseded, Waited

__all__ = ["InFlight"]

_MOST_REPORTS = 64
"""Reports on durable checkpoints that wait for the end of the next training step; older ones are dropped."""
_MOST_TORN = 10
"""Most torn checkpoints of ``engine.step`` in a row, beside those in flight, that are only warned of. Tensors that were
torn twice are captured before the step ends, so more torn checkpoints mean that nothing is saved any more."""


class InFlight:
    """Assigns counters, and holds every checkpoint until it ended and its failure was delivered.

    Attributes:
        lock: Held while a checkpoint is admitted; reentrant, as a signal handler may read statistics meanwhile.
        counter: The largest counter that was assigned.
        newest: The checkpoint that was admitted last, None before the first.
        torn: Torn checkpoints of ``engine.step`` since a checkpoint ended without an error.
        memory_stall: Seconds that training waited for checkpoints that are due in memory alone.
    """

    def __init__(self, config: EngineConfig, stream: Stream) -> None:
        self._config = config
        self._stream = stream
        self.lock = threading.RLock()
        self.counter = -1
        self.newest: Flight | None = None
        self._in_flight: dict[Flight, None] = {}
        self._in_memory: list[Flight] = []  # those alone there, until a newer one is on disk
        self.memory_stall = 0.0
        self._failed: list[tuple[Flight, Exception]] = []
        self.torn = 0
        self._reports: dict[Tier, deque[tuple[int, float, float, float, float, int]]] = {  # arguments of SaveReports
            "disk": deque(maxlen=_MOST_REPORTS),
            "memory": deque(maxlen=_MOST_REPORTS),
        }

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def on_disk(self) -> int:
        """Number of checkpoints in flight that are due on disk: ``max_in_flight`` limits these alone."""
        return self.count("disk")

    def count(self, tier: Tier) -> int:
        """Return how many checkpoints in flight are due on disk ("disk"), or in memory alone ("memory")."""
        if not self._in_flight:  # asked at every step, and mostly so
            return 0
        with self.lock:
            return sum(flight.on_disk is (tier == "disk") for flight in self._in_flight)

    def checkpoints(self) -> list[Flight]:
        """Return the checkpoints admitted and not ended, oldest first."""
        with self.lock:
            return list(self._in_flight)

    def add(
        self, step: int | None, name: str | None = None, state_seconds: float = 0.0, *, on_disk: bool = True
    ) -> Flight:
        """Admit a checkpoint under the next counter. Called before the engine's loop gets it.

        ``state_seconds`` is the time that ``state_dict()`` and laying out the state took.
        """
        self.counter += 1
        step = self.counter if step is None else step
        flight = Flight(
            step,
            self.counter,
            name,
            on_disk=on_disk,
            memory=self._config.memory,
            drained=self._config.drain is not None,
        )
        self._stream.emit(Admitted(step=flight.step, counter=flight.counter, state_seconds=state_seconds))
        # No call from here on: an interrupt would leave one in flight without a holder.
        self.newest = flight
        self._in_flight[flight] = None
        return flight

    def skip(self, step: int | None) -> PendingCheckpoint | None:
        """Return the result of a call that is skipped; None if it is not, by ``max_in_flight`` and ``on_busy``.

        The caller then calls :meth:`tell_skipped`, once it holds no lock.
        """
        if self._config.on_busy != "skip":
            return None
        with self.lock:
            if self.on_disk < self._config.max_in_flight:
                return None
            newest = next(flight for flight in reversed(self._in_flight) if flight.on_disk)
        return PendingCheckpoint(newest, skipped=newest.step if step is None else step)

    def tell_skipped(self, skipped: PendingCheckpoint, step: int | None) -> None:
        """Report a checkpoint that :meth:`skip` skipped; without the lock, as handlers of the log are user code."""
        self._stream.emit(Skipped(step=step, counter=skipped.counter, in_flight=self._config.max_in_flight))

    def withdraw(self, flight: Flight) -> None:
        """Fail a checkpoint that its caller does not receive, unless it has ended, or is captured and goes on."""
        with self.lock:
            if flight.is_captured or flight not in self._in_flight:
                return  # the loop got it, and ended it or has captured it
            del self._in_flight[flight]
        error = CheckpointError(f"the checkpoint of step {flight.step} was interrupted")
        self._stream.emit(Failed(step=flight.step, counter=flight.counter, error=error))
        flight.set_failed(error)

    def note_waited(
        self, flight: Flight, start: float, where: Literal["checkpoint", "optimizer"] = "optimizer"
    ) -> None:
        """Count the time from ``start`` (of ``time.perf_counter()``) until now, when training waited for ``flight``.

        ``where``: the place of the wait, as in :class:`Waited`.
        """
        seconds = time.perf_counter() - start
        flight.stall += seconds
        if not flight.on_disk:
            self.memory_stall += seconds
        self._stream.emit(Waited(step=flight.step, counter=flight.counter, seconds=seconds, where=where))

    # -- their ends

    def note_end(self, flight: Flight, error: Exception | None, superseded: bool, info: CheckpointInfo | None) -> None:
        """Count the end of a checkpoint, and end those in memory that it supersedes.

        Called before the callers that wait for it are woken. Does nothing if it was withdrawn.
        """
        now, step, counter = time.monotonic(), flight.step, flight.counter
        seconds, captured, stall = now - flight.admitted_at, flight.captured_at - flight.admitted_at, flight.stall
        nbytes = 0 if info is None else info.nbytes
        event: Event
        if error is not None:
            event = Failed(step=step, counter=counter, error=error)
        elif superseded:  # the time of its end is no measure of a save
            event = Superseded(step=step, counter=counter, seconds=seconds)
        else:
            captured = max(0.0, captured)
            event = Durable(
                step=step, counter=counter, nbytes=nbytes, seconds=seconds, capture_seconds=captured, stall=stall
            )
        with self.lock:  # both at once: statistics count each checkpoint once
            if flight not in self._in_flight:
                return  # it was withdrawn, and its end is delivered
            del self._in_flight[flight]
            self._stream.totals.add(event)
            if error is None:
                self.torn = 0
            elif _chosen_and_torn(flight, error):
                self.torn += 1
            if error is not None:
                self._failed.append((flight, error))
            elif not superseded:
                self._reports["disk"].append((step, now, seconds, captured, stall, nbytes))
        self._stream.publish(event)
        if error is None and not superseded:
            self._end_in_memory(counter, info)

    def note_in_memory(self, flight: Flight) -> None:
        """Called when a checkpoint that is due in memory alone is committed there: it ends when a newer one is on disk.

        Does nothing if it was withdrawn.
        """
        now, since = time.monotonic(), flight.admitted_at
        captured, nbytes = max(0.0, flight.captured_at - since), flight.nbytes or 0
        report = flight.step, now, now - since, captured, flight.stall, nbytes
        with self.lock:
            if flight in self._in_flight:
                del self._in_flight[flight]
                self._in_memory.append(flight)
                self._reports["memory"].append(report)

    def note_saved(self, info: CheckpointInfo) -> None:
        """Called when a checkpoint that was in memory alone is durable on disk: ends it, and the older ones there."""
        with self.lock:
            same = [flight for flight in self._in_memory if flight.counter == info.counter]
            self._in_memory = [flight for flight in self._in_memory if flight not in same]
        for flight in same:
            flight.set_durable(info)
        self._end_in_memory(info.counter, info)

    def _end_in_memory(self, counter: int, info: CheckpointInfo | None) -> None:
        """End, as superseded, the checkpoints in memory that are older than the one with ``counter`` on disk."""
        if not self._in_memory or info is None:
            return
        with self.lock:
            older = [flight for flight in self._in_memory if flight.counter < counter]
            self._in_memory = [flight for flight in self._in_memory if flight.counter >= counter]
        for flight in older:  # no events: it is no sign of slow storage
            flight.set_durable(info, superseded=True)

    def fail_in_memory(self, error: Exception | None) -> None:
        """Fail the checkpoints that are still in memory alone. Called when the engine closes.

        ``error`` is the error of writing the newest one to disk, which then counts as a failure; None: there was none.
        """
        with self.lock:
            left, self._in_memory = self._in_memory, []
        if error is not None:
            write("memory_unsaved", "the newest checkpoint in memory is not on disk: %s", error, error=str(error))
        for flight in left:
            why = "" if error is None else f" ({error})"
            failure = CheckpointError(
                f"the checkpoint of step {flight.step} is in memory alone: the engine closed{why}"
            )
            with self.lock:
                self._failed += [] if error is None or flight is not left[-1] else [(flight, failure)]
            flight.set_failed(failure)

    def take_reports(self, tier: Tier) -> list[SaveReport]:
        """Return the reports on checkpoints that became durable ("disk"), or were saved in memory alone ("memory").

        Each report is returned once.
        """
        reports = self._reports[tier]
        return [SaveReport(*reports.popleft()) for _ in range(len(reports))]

    def raise_untold(self) -> None:
        """Raise the first failure that was not awaited (or warn of it), with the others as notes on it."""
        if not self._failed:
            return
        with self.lock:
            warned_of = self.torn <= _MOST_TORN + self._config.max_in_flight
            failed = [
                (flight, error)
                for flight, error in self._failed
                if not flight.failure_told
                and not (warned_of and _chosen_and_torn(flight, error))
                and not isinstance(error, ReplicasDifferError)  # the next one saves each rank's own
            ]
            # A waiting caller will get its failure, or be cancelled before that: then it is for the next call.
            self._failed = [each for each in failed if each[0].awaited]
            untold = [each for each in failed if each not in self._failed]
        untold = [(flight, error) for flight, error in untold if not self.warn_of(flight, error)]
        if not untold:
            return
        (told, first), *others = untold
        told.failure_told = True
        if not warned_of:
            first.add_note(f"{self.torn} checkpoints in a row were torn: nothing is saved any more")
        for flight, error in others:
            flight.failure_told = True
            first.add_note(f"the checkpoint of step {flight.step} failed too: {error}")
        raise first

    def warn_of(self, flight: Flight, error: Exception) -> bool:
        """Warn of a failure at the user's line if ``on_error`` is "warn"; return whether it is."""
        if self._config.on_error != "warn":
            return False
        flight.failure_told = True
        warn_user(f"the checkpoint of step {flight.step} failed: {error}", RuntimeWarning)
        return True


def _chosen_and_torn(flight: Flight, error: Exception) -> bool:
    """Return whether a failure is a torn capture that ``engine.step`` chose to overlap.

    Such failures are only warned of, as tensors that are torn repeatedly are captured eagerly from then on.
    """
    return flight.overlap_was_chosen and isinstance(error, TornCaptureError)
