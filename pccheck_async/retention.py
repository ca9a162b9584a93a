"""Which checkpoints a record keeps (invariant I6)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pccheck_async.layout import Entry

__all__ = ["retain"]


def retain(committed: Sequence[Entry], new: Entry, keep_last: int, damaged: Collection[int] = ()) -> list[Entry]:
    """Return the entries of the next record, newest first; ``new`` is not among them where it is superseded.

    Kept are the ``keep_last`` newest by counter and all pinned ones; with ``keep_last=1`` this is PCcheck's rule
    (section
    3.2: a checkpoint commits only over an older one). Checkpoints known to be damaged are dropped.
    """
    candidates = sorted(
        (entry for entry in (*committed, new) if entry.counter not in damaged),
        key=lambda entry: entry.counter,
        reverse=True,
    )
    newest = {entry.counter for entry in [e for e in candidates if not e.pinned][:keep_last]}
    return [entry for entry in candidates if entry.pinned or entry.counter in newest]
