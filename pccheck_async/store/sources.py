# SPDX-License-Identifier: Apache-2.0
"""Sources of parts: a slot of the store that an engine of this process has open, or a slot in any folder seen here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from pccheck_async.errors import DamagedError
from pccheck_async.format import Entry, Key, Record
from pccheck_async.medium import File
from pccheck_async.medium.open_medium import OpenMedium
from pccheck_async.store.fallback import DroppedMeanwhileError
from pccheck_async.store.part_reader import Source
from pccheck_async.store.store_reader import StoreReader

if TYPE_CHECKING:
    from pccheck_async.store.store import Store

__all__ = ["FolderPart", "OwnSlot"]


class OwnSlot(Source):
    """A slot of a store that this process has open for writing; the slot is not reused while it is read.

    Args:
        store: The store.
        entry: The checkpoint's entry in the newest record or, with ``superseded``, in the one before it.
        superseded: Whether the newest record has superseded the checkpoint.
    """

    def __init__(self, store: Store, entry: Entry, *, superseded: bool = False) -> None:
        self._store, self._superseded = store, superseded
        self.entry, self.medium, self.block_bytes = entry, store.medium, store.block_bytes

    async def acquire(self) -> File:
        """Keep the slot from being reused, and return its file. Called on the engine's loop, like :meth:`release`.

        A pin that was set or removed meanwhile makes no difference. Raises DroppedMeanwhileError if the checkpoint was
        replaced, removed or rejected; and the errors of :meth:`Slots.start_reading` and
        :meth:`Slots.start_reading_free`.
        """
        entry, committed, slots = self.entry, self._store.committed, self._store.slots
        kept = (*committed.record.entries, *committed.adopted)
        if (now := next((each for each in kept if replace(each, pinned=entry.pinned) == entry), None)) is not None:
            self.entry, file = now, slots.start_reading(entry.slot)
        elif self._superseded and entry in committed.record.superseded:
            file = await slots.start_reading_free(entry.slot)
        else:
            raise DroppedMeanwhileError(
                f"checkpoint {entry.counter} (step {entry.step}) was replaced, removed or rejected meanwhile"
            )
        self._file = file
        return file

    async def close(self) -> None:
        """Release the slot."""
        self.release()

    def release(self) -> None:
        """Release the slot at once, also if its acquirer was cancelled and never got the file. Idempotent."""
        if self._file is not None:
            self._file = None
            self._store.slots.table.stop_reading(self.entry.slot)


class FolderPart(Source):
    """A part in the folder of a rank, on a filesystem that is mounted here. One descriptor is open while it is held.

    Args:
        opened: The medium of the group's folder, which is prepared; all parts share it, and its threads.
        folder: The name of the rank's folder in it; empty for a store that is that folder itself.
        key: The key of the checkpoint.
        listed: The checkpoint's entry in a list of complete checkpoints, with the group's pins and rejections.
        superseded: Whether the newest record has superseded the checkpoint.
        record: The newest record, if it was read a moment ago.
    """

    def __init__(
        self,
        opened: OpenMedium,
        folder: str,
        key: Key,
        listed: Entry | None = None,
        *,
        superseded: bool = False,
        record: Record | None = None,
    ) -> None:
        self._opened, self.medium = opened, opened.medium
        self._folder, self._record = folder, record
        self._key, self._listed, self._superseded = key, listed, superseded

    async def acquire(self) -> File:
        """Lock the slot, and return its file. Raises DamagedError if there is no such part any more, ReadError."""
        reader = await StoreReader.open(self._opened, self._folder)
        counter, found = self._key.counter, None

        def pick(record: Record) -> Entry | None:
            entries = record.superseded if self._superseded else record.entries
            return next((entry for entry in entries if entry.counter == counter), None)

        if reader is not None:
            try:
                found = await reader.lock(pick, self._record)
            finally:
                await self.medium.close(reader.commit)
        if reader is None or found is None:
            raise DamagedError(f"{self._folder or 'the store'} has no part of checkpoint {counter} any more")
        entry, file = found
        self.entry = entry if self._listed is None else entry.marked_as(self._listed)
        if not isinstance(file, File):
            raise file
        self._file, self.block_bytes = file, reader.identity.block_bytes
        return file
