"""Rejecting checkpoints in stores that no engine has open."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from pccheck_async.group.folder import parts_of, write_parts
from pccheck_async.store import Store

__all__ = ["mark_rejected"]


async def mark_rejected(store: Store, chosen: Collection[int]) -> None:
    """Mark the checkpoints of these counters as rejected in the record of one store, which is open for writing.

    Of a group one marked part rejects a checkpoint: a crash between two ranks' stores leaves it rejected on all, or on
    none.

    Durability: when this returns the marks survive power loss. Raises StoreFailedError.
    """
    record = store.committed.record
    if record.parts is None:
        await store.amend(lambda entries: [each.as_rejected() if each.counter in chosen else each for each in entries])
        return
    before = parts_of(record)
    parts = tuple(
        replace(part, entry=part.entry.as_rejected()) if part.entry.counter in chosen else part for part in before
    )
    if record.parts.applied is not None and parts != before:
        async with store.slots.lock:
            await store.take_over()
        await write_parts(store, parts, record.parts.applied)
