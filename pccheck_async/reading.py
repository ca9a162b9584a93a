"""Which checkpoint to read, and what to say where it is damaged."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

from pccheck_async.layout import Entry
from pccheck_async.manifest import Manifest
from pccheck_async.pool import BufferPool

__all__ = ["choose", "pool_for", "warn_damaged"]

_log = logging.getLogger("pccheck_async")


def choose(entries: Sequence[Entry], step: int | None) -> list[Entry]:
    """Return the checkpoints to try, in order: all, newest first; with a step only the newest one of that step."""
    if step is None:
        return list(entries)
    return [entry for entry in entries if entry.step == step][:1]


def pool_for(manifest: Manifest, pool: BufferPool) -> BufferPool:
    """Return a pool whose buffers hold this checkpoint's chunks: ``pool``, or one as large where chunks are larger."""
    largest = max((chunk.nbytes for chunk in manifest.chunks), default=0)
    if largest <= pool.buffer_bytes:
        return pool
    return BufferPool(max(pool.nbytes, largest), largest)


def warn_damaged(entry: Entry, older: Entry, error: Exception) -> None:
    """Say that a checkpoint is passed over for the next older one."""
    text = f"checkpoint of step {entry.step} cannot be read ({error}); falling back to step {older.step}"
    _log.warning(text)
    warnings.warn(text, RuntimeWarning, stacklevel=4)
