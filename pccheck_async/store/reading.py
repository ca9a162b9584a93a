"""Which checkpoint to read, and what to say where it is damaged."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Sequence

from pccheck_async.format.manifest import Manifest
from pccheck_async.format.record import Entry
from pccheck_async.telemetry.logs import write
from pccheck_async.transfer.pool import BufferPool

__all__ = ["choose", "pool_for", "warn_damaged"]


def choose(
    entries: Sequence[Entry], step: int | None, unreadable: Collection[int] = (), superseded: Sequence[Entry] = ()
) -> Entry | None:
    """Return the checkpoint to read: the newest, or the newest of ``step``, without those found ``unreadable``.

    Those that were ``superseded`` are read only where all newer ones are unreadable, and never by their step.
    """
    if superseded and step is None:
        entries = sorted((*entries, *superseded), key=lambda entry: -entry.counter)
    wanted = (entry for entry in entries if step is None or entry.step == step)
    return next((entry for entry in wanted if entry.counter not in unreadable), None)


def pool_for(manifest: Manifest, pool: BufferPool) -> BufferPool:
    """Return a pool whose buffers hold this checkpoint's chunks: ``pool``, or one as large where chunks are larger."""
    largest = max((chunk.nbytes for chunk in manifest.chunks), default=0)
    if largest <= pool.buffer_bytes:
        return pool
    return BufferPool(max(pool.nbytes, largest), largest)


def warn_damaged(entry: Entry, older: Entry, error: Exception) -> None:
    """Say that a checkpoint is passed over for the next older one."""
    text = f"checkpoint of step {entry.step} cannot be read ({error}); falling back to step {older.step}"
    write(logging.WARNING, "fell_back", "%s", text, step=entry.step, counter=entry.counter, error=str(error))
    warnings.warn(text, RuntimeWarning, stacklevel=4)
