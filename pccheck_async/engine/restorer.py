"""Restoring from the engine's own store: which checkpoint, and what to do where it is damaged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pccheck_async.engine.loop import Handoff
from pccheck_async.errors import DamagedError, ReadError, StateMismatchError
from pccheck_async.format import Entry, Restored
from pccheck_async.format.manifest import Manifest
from pccheck_async.medium import Medium
from pccheck_async.state import Restoration, match
from pccheck_async.store import (
    DroppedMeanwhileError,
    Fallback,
    ReadLease,
    Store,
    choose,
    pool_for,
    read_manifest,
    read_payload,
    verify_payload,
    warn_damaged,
)
from pccheck_async.telemetry import ReadProgress, Reporter, StageClock, events, reading_progress, write
from pccheck_async.transfer import BufferPool
from pccheck_async.transfer.copying import CopyBackend

__all__ = ["Restorer"]

_NAMED = 5
"""Paths that the warning of a partial restore names."""


class Restorer:
    """Fills states from the committed checkpoints of one store.

    Args:
        store: Knows them.
        writer: The store's files.
        backend: Copies into the live state.
        pool: Staging buffers.
        clock: Stage times.
        post: Calls a function on the engine's loop.
        reporter: Told of what happens.
    """

    def __init__(
        self,
        *,
        store: Store,
        writer: Medium,
        backend: CopyBackend,
        pool: BufferPool,
        clock: StageClock,
        post: Callable[..., Any],
        reporter: Reporter,
    ) -> None:
        self._store = store
        self._writer = writer
        self._backend = backend
        self._pool = pool
        self._clock = clock
        self._post = post
        self._reporter = reporter

    def restore(
        self,
        state: Mapping[str, Any],
        step: int | None,
        progress: ReadProgress | None = None,
        *,
        strict: bool = True,
    ) -> Handoff:
        """Restore the newest checkpoint (or that of ``step``), falling back where one is damaged; None: there is none.

        Returns:
            A :class:`Handoff` that returns a :class:`Restored`, or None.
        """
        start = time.perf_counter()
        begun: list[str] = []
        fallback = Fallback(step)
        while (chosen := self._choose(step, fallback.unreadable)) is not None:
            entry, superseded = chosen
            try:
                restored: Restored = yield from self._restore(state, entry, progress, strict, begun, superseded)
            except DroppedMeanwhileError:
                continue  # newer ones were committed
            except (DamagedError, ReadError) as error:
                if isinstance(error, DamagedError) and not superseded:  # else it may be read the next time
                    self._post(self._store.committed.damaged.add, entry.counter)
                fallback.pass_over(entry, superseded, error, lambda: self._choose(step, fallback.unreadable))
            except StateMismatchError as error:
                if begun:
                    error.add_note("reading a newer checkpoint failed before: the state may hold parts of it")
                raise
            else:
                if superseded:
                    newer, why = fallback.failure or (
                        self._store.committed.record.entries[0],
                        DamagedError("found damaged by an earlier restore"),
                    )
                    warn_damaged(newer, entry, why)
                seconds = time.perf_counter() - start
                self._reporter.tell(
                    events.Restored, step=entry.step, counter=entry.counter, nbytes=entry.nbytes, seconds=seconds
                )
                return restored
        return None

    def _choose(self, step: int | None, unreadable: Collection[int]) -> tuple[Entry, bool] | None:
        """Choose among what may be whole, and only then among what is known to be damaged, for its error.

        Returns:
            The checkpoint, and whether it was superseded.
        """
        entries, record = self._store.committed.entries, self._store.committed.record
        if (entry := choose(entries, step, unreadable, record.superseded)) is not None:
            return entry, entry not in entries
        damaged = choose(record.entries, step, unreadable)
        return None if damaged is None else (damaged, False)

    def _restore(
        self,
        state: Mapping[str, Any],
        entry: Entry,
        progress: ReadProgress | None,
        strict: bool,
        begun: list[str],
        superseded: bool,
    ) -> Handoff:
        """Restore one checkpoint; to ``begun`` go the paths of live arrays that it may fill before it fails."""
        lease = ReadLease(self._store, entry, superseded)
        try:
            file = yield lease.acquire()
            manifest: Manifest = yield read_manifest(self._writer, file, entry, self._store.block_bytes)
            pool = pool_for(manifest, self._pool)
            if superseded:
                yield verify_payload(self._writer, self._backend, pool, file, manifest)
                yield self._store.adopt(entry)
            restoration: Restoration = match(state, manifest, lambda: self._backend.by_address, strict=strict)
            _refuse_parts(entry, restoration, begun)
            begun += restoration.filled
            admission = self._backend.mark_queued_work(restoration.targets.devices)
            advance = reading_progress(progress, sum(chunk.nbytes for chunk in manifest.chunks))
            with self._clock.timed("restore", manifest.payload_nbytes):
                yield read_payload(
                    self._writer, self._backend, pool, file, manifest, restoration.targets, admission, advance
                )
        finally:
            self._post(lease.release)
        restoration.finish()
        if restoration.missing or restoration.unexpected:
            _warn_of_parts(entry, restoration)
        filled = sum(number for number, _ in restoration.counts.values())
        return Restored.of(entry.info, restoration.missing, restoration.unexpected, filled)


def _warn_of_parts(entry: Entry, restoration: Restoration) -> None:
    counts = [f"{number} of {all_} leaves of {name}" for name, (number, all_) in restoration.counts.items()]
    parts = _first_few(restoration.missing), _first_few(restoration.unexpected), _first_few(counts)
    text = "restored step %d in part: the checkpoint lacks %s; the state lacks %s; restored were %s"
    write(logging.WARNING, "restored_in_part", text, entry.step, *parts, step=entry.step, counter=entry.counter)


def _first_few(names: Sequence[str]) -> str:
    """Return the first few paths for a line of a log, and how many there are."""
    few = ", ".join(names[:_NAMED]) or "nothing"
    return few if len(names) <= _NAMED else f"{few}, ... ({len(names)} paths)"


def _refuse_parts(entry: Entry, restoration: Restoration, begun: Sequence[str]) -> None:
    """Raise StateMismatchError where what stays as it is would be what a damaged checkpoint left."""
    kept = tuple(f"{path}." for path in restoration.missing)
    if parts := sorted({path for path in begun if f"{path}.".startswith(kept)}):
        raise StateMismatchError(
            f"the checkpoint of step {entry.step} lacks what a damaged one had begun to fill: {', '.join(parts[:20])}"
            f"{', ...' if len(parts) > 20 else ''}; make the state anew, then restore(state, step={entry.step}, "
            "strict=False)",
            missing=parts,
        )
