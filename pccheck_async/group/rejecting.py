"""Rejecting checkpoints in the folder of a group that does not run."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from pathlib import Path

from msgspec.structs import replace

from pccheck_async.errors import StoreLockedError
from pccheck_async.format import CheckpointInfo
from pccheck_async.format.record import GROUP_VERSION
from pccheck_async.group.folder import parts_of, write_parts
from pccheck_async.group.reading import list_group
from pccheck_async.medium.open_medium import open_medium
from pccheck_async.store import Retention, Store, open_store, rank_folders, read_at_once

__all__ = ["reject_in_group"]


async def reject_in_group(path: str | os.PathLike[str], step: int, lock_timeout: float) -> tuple[CheckpointInfo, ...]:
    """Mark all parts in a folder that :meth:`Retention.reject` chooses; return the complete checkpoints, newest first.

    One marked part rejects a checkpoint: a crash in the middle leaves each of them rejected on all ranks, or on none.

    Durability: when this returns all records that have marks survive power loss.

    Raises the errors of :meth:`Retention.reject`; IncompleteCheckpointError if all lack parts, which are in other
    folders; StoreLockedError if a rank runs; StoreFailedError.
    """
    stores: list[Store] = []
    async with AsyncExitStack() as stack:
        for folder in rank_folders(Path(path)).values():
            if read_at_once(folder) is None:  # it was never whole
                continue
            opened = await stack.enter_async_context(await open_medium(os.fspath(folder), "auto", writers=1, copiers=1))
            try:
                store = await open_store(
                    opened.medium,
                    path=folder,
                    retention=Retention(),
                    max_in_flight=1,
                    lock_timeout=lock_timeout,
                    version=GROUP_VERSION,
                )
            except StoreLockedError as error:
                raise StoreLockedError(f"{error}. The ranks of a group that runs call engine.reject(step)") from None
            stores.append(store)
        listing = list_group(path)  # only now, when none of the records can change any more
        if not listing.complete:
            raise listing.nothing(None)
        others = {one.key.counter: one.step for one in listing.incomplete}
        entries = [one.entry for one in listing.complete]
        until = max([*others, *(entry.counter for entry in entries)])
        chosen = Retention.reject(entries, step, others, until)
        for store in stores:
            record = store.committed.record
            parts = [
                replace(part, entry=part.entry.as_rejected()) if part.entry.counter in chosen else part
                for part in parts_of(record)
            ]
            if record.parts is None or record.parts.applied is None or tuple(parts) == parts_of(record):
                continue
            async with store.slots.lock:
                await store.take_over()
            await write_parts(store, tuple(parts), record.parts.applied)
        marked = [one for one in listing.complete if one.entry.counter in chosen]
        return tuple(listing.info(replace(one, entry=one.entry.as_rejected())) for one in marked)
