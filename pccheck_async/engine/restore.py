"""Restoring from the engine's own store: which checkpoint, and what to do where it is damaged."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pccheck_async.engine.assembly import Assembly
from pccheck_async.engine.loop import Handoff
from pccheck_async.errors import DamagedError, StateMismatchError
from pccheck_async.format import Entry, Restored
from pccheck_async.format.manifest import Manifest
from pccheck_async.medium import File
from pccheck_async.state import Restoration, Targets, match
from pccheck_async.store import (
    Fallback,
    ReadLease,
    UnreadableError,
    choose,
    pool_for,
    read_manifest,
    read_payload,
    reading,
)
from pccheck_async.telemetry import ReadProgress, events, reading_progress, write

__all__ = ["restore"]

_NAMED = 5
"""Paths that the warning of a partial restore names."""


def restore(
    parts: Assembly, state: Mapping[str, Any], step: int | None, progress: ReadProgress | None, *, strict: bool
) -> Handoff:
    """Restore the newest checkpoint (or that of ``step``), falling back where one is damaged; None: there is none."""
    start = time.perf_counter()
    begun: list[str] = []  # paths of live arrays that a damaged checkpoint may have filled
    fallback, committed = Fallback(step), parts.store.committed

    def find() -> tuple[Entry, bool] | None:
        """Return what to read, and whether it was superseded; what is known to be damaged comes last, for its error."""
        entries, record = committed.entries, committed.record
        if (entry := choose(entries, step, fallback.unreadable, record.superseded)) is not None:
            return entry, entry not in entries
        damaged = choose(record.entries, step, fallback.unreadable)
        return None if damaged is None else (damaged, False)

    while (found := find()) is not None:
        entry, superseded = found
        if superseded and fallback.failure is None:
            fallback.failure = committed.record.entries[0], DamagedError("found damaged by an earlier restore")
        with fallback.trying(entry, superseded, find):
            try:
                restored: Restored = yield from _restore_one(parts, state, entry, superseded, progress, strict, begun)
            except UnreadableError as unreadable:
                if isinstance(unreadable.error, DamagedError) and not superseded:  # else it may be read the next time
                    parts.loop.post(committed.damaged.add, entry.counter)
                raise
            except StateMismatchError as error:
                if begun:
                    error.add_note("reading a newer checkpoint failed before: the state may hold parts of it")
                raise
            break
    else:
        return None
    seconds = time.perf_counter() - start
    parts.reporter.tell(events.Restored, step=entry.step, counter=entry.counter, nbytes=entry.nbytes, seconds=seconds)
    return restored


def _restore_one(
    parts: Assembly,
    state: Mapping[str, Any],
    entry: Entry,
    superseded: bool,
    progress: ReadProgress | None,
    strict: bool,
    begun: list[str],
) -> Handoff:
    """Restore one checkpoint; to ``begun`` go the paths of live arrays that it may fill before it fails."""
    store, medium, backend = parts.store, parts.opened.medium, parts.backend
    lease = ReadLease(store, entry, superseded)

    async def hold() -> tuple[File, Manifest]:
        with reading():
            file = await lease.acquire()
            manifest = await read_manifest(medium, file, entry, store.block_bytes)
            if superseded:
                pool = pool_for(manifest, parts.pool)
                await read_payload(medium, backend, pool, file, manifest, Targets(), every=True)
                await store.adopt(entry)
            return file, manifest

    async def fill() -> None:
        pool, targets = pool_for(manifest, parts.pool), restoration.targets
        advance = reading_progress(progress, sum(chunk.nbytes for chunk in manifest.chunks))
        with reading(), parts.clock.timed("restore", manifest.payload_nbytes):
            await read_payload(medium, backend, pool, file, manifest, targets, admission, advance)

    try:
        file, manifest = yield hold()
        restoration: Restoration = match(state, manifest, lambda: backend.by_address, strict=strict)
        _refuse_parts(entry, restoration, begun)
        begun += restoration.filled
        admission = backend.mark_queued_work(restoration.targets.devices)
        yield fill()
    finally:
        parts.loop.post(lease.release)
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
