"""Restoring from the engine's own store: which checkpoint, and what to do where it is damaged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pccheck_async.engine.handoff import Steps
from pccheck_async.errors import DamagedError, ReadError, StateMismatchError, is_exhausted
from pccheck_async.format.info import Restored
from pccheck_async.format.manifest import Manifest
from pccheck_async.format.record import Entry
from pccheck_async.medium import Writer
from pccheck_async.state.restore.match import Restoration, match
from pccheck_async.store.commit import Store
from pccheck_async.store.read_lease import DroppedMeanwhileError, ReadLease
from pccheck_async.store.reading import choose, pool_for, warn_damaged
from pccheck_async.store.restore import read_manifest, read_payload, verify_payload
from pccheck_async.telemetry import events
from pccheck_async.telemetry.logs import write
from pccheck_async.telemetry.progress import ReadProgress, reading_progress
from pccheck_async.telemetry.reporter import Reporter
from pccheck_async.telemetry.stages import StageClock
from pccheck_async.transfer.copying import CopyBackend
from pccheck_async.transfer.pool import BufferPool

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
        writer: Writer,
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
    ) -> Steps:
        """Restore the newest checkpoint (or that of ``step``), falling back where one is damaged; None: there is none.

        Returns:
            Steps that end with a :class:`Restored`, or None.
        """
        start = time.perf_counter()
        unreadable: set[int] = set()
        unread: set[int] | None = set()  # by the device; None once all of them were tried again
        begun: list[str] = []
        failure: tuple[Entry, Exception] | None = None
        while (chosen := self._choose(step, unreadable)) is not None:
            entry, superseded = chosen
            try:
                restored: Restored = yield from self._restore(state, entry, progress, strict, begun, superseded)
            except DroppedMeanwhileError:
                continue  # newer ones were committed
            except (DamagedError, ReadError) as error:
                if is_exhausted(error):
                    raise  # it says nothing of the checkpoint, which the next commit would drop for an older one
                if isinstance(error, DamagedError) and not superseded:  # else it may be read the next time
                    self._post(self._store.committed.mark_damaged, entry.counter)
                unreadable.add(entry.counter)
                if failure is None or not superseded:
                    failure = entry, error
                older = self._choose(step, unreadable)
                if step is not None or older is None:
                    raise failure[1] from None
                if unread is not None and isinstance(error, ReadError):
                    unread.add(entry.counter)
                if older[1] and unread:  # a device that failed once must not cost a checkpoint that is kept
                    unreadable -= unread
                    unread = None
                    continue
                if older[0].counter < entry.counter and not older[1]:  # else only where that one is whole
                    warn_damaged(failure[0], older[0], failure[1])
            except StateMismatchError as error:
                if unreadable:
                    error.add_note("a newer, damaged checkpoint was tried before: the state may hold parts of it")
                raise
            else:
                if superseded:
                    newer, why = failure or (self._store.committed.record.entries[0], DamagedError("found before"))
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
    ) -> Steps:
        """Restore one checkpoint; to ``begun`` go the paths of live arrays that it may fill before it fails."""
        lease = ReadLease(self._store, entry, superseded=superseded)
        try:
            file = yield lease.take()
            manifest: Manifest = yield read_manifest(self._writer, file, entry, self._store.block_bytes)
            pool = pool_for(manifest, self._pool)
            if superseded:
                yield verify_payload(self._writer, self._backend, pool, file, manifest)
                yield self._store.adopt(entry)
            restoration: Restoration = match(state, manifest, lambda: self._backend.by_address, strict=strict)
            _refuse_parts(entry, restoration, begun)
            begun += restoration.filled
            admission = self._backend.admit(restoration.targets.devices)
            advance = reading_progress(progress, sum(chunk.nbytes for chunk in manifest.chunks))
            with self._clock.timed("restore", manifest.payload_nbytes):
                yield read_payload(
                    self._writer, self._backend, pool, file, manifest, restoration.targets, admission, advance
                )
        finally:
            self._post(lease.give_back)
        restoration.finish()
        if restoration.missing or restoration.unexpected:
            _warn_of_parts(entry, restoration)
        filled = sum(number for number, _ in restoration.counts.values())
        return Restored.of(entry.info, restoration.missing, restoration.unexpected, filled)


def _warn_of_parts(entry: Entry, restoration: Restoration) -> None:
    counts = [f"{number} of {all_} leaves of {name}" for name, (number, all_) in restoration.counts.items()]
    found = _some(restoration.missing), _some(restoration.unexpected), _some(counts)
    text = "restored step %d in part: the checkpoint lacks %s; the state lacks %s; restored were %s"
    write(logging.WARNING, "restored_in_part", text, entry.step, *found, step=entry.step, counter=entry.counter)


def _some(names: Sequence[str]) -> str:
    """Paths for a line of a log: the first few, and how many there are."""
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
