"""A committed checkpoint's slot, held while this engine restores from it."""

from __future__ import annotations

from pccheck_async.errors import NoCheckpointError
from pccheck_async.format.record import Entry
from pccheck_async.medium import File
from pccheck_async.store.commit import Store

__all__ = ["DroppedMeanwhileError", "ReadLease"]


class DroppedMeanwhileError(NoCheckpointError):
    """The checkpoint to restore was superseded before it could be held."""


class ReadLease:
    """Keeps a slot while it is read; given back once, also where nobody got to know that it was taken."""

    def __init__(self, store: Store, entry: Entry, *, superseded: bool) -> None:
        self._store = store
        self._entry = entry
        self._superseded = superseded
        self._taken = False

    async def take(self) -> File:
        """Hold the slot and return its file. Runs on the engine's loop, as :meth:`give_back` does."""
        try:
            file = await self._store.start_reading(self._entry, superseded=self._superseded)
        except NoCheckpointError as error:
            raise DroppedMeanwhileError(str(error)) from None
        self._taken = True
        return file

    def give_back(self) -> None:
        """Let the slot go, where it was taken."""
        taken, self._taken = self._taken, False
        if taken:
            self._store.stop_reading(self._entry)
