"""A writer of which one operation fails."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from pccheck_async.errors import StoreFullError, read_error, write_error
from pccheck_async.medium import Medium
from pccheck_async.testing.wrapping import CHANGES, Access, WrappingWriter

__all__ = ["FailingWriter"]

T = TypeVar("T")


class FailingWriter(WrappingWriter):
    """Fails the operation number ``fail_at``; nothing of that operation happens.

    Run once with ``fail_at=None`` to learn how many operations there are, then once for each::

        counting = FailingWriter(CrashWriter(CrashDisk()), fail_at=None)
        ...
        for k in range(1, counting.operations + 1):
            writer = FailingWriter(CrashWriter(CrashDisk()), fail_at=k, error=errno.ENOSPC)
            ...

    Args:
        inner: The writer that performs what does not fail.
        fail_at: Number of the operation that fails, counted from 1; None for none. May be set anew.
        error: ``errno`` of the failure, mapped to the error that the real writer raises.
        kinds: Names of the methods that count (default: all that change storage or make it durable).
        stays: Whether all later operations of these kinds fail too, as on a device that is gone.
    """

    def __init__(
        self,
        inner: Medium,
        *,
        fail_at: int | None,
        error: int = errno.EIO,
        kinds: Collection[str] = CHANGES,
        stays: bool = False,
    ) -> None:
        super().__init__(inner)
        self.fail_at = fail_at
        self._error = error
        self._kinds = frozenset(kinds)
        self._stays = stays
        self._guard = threading.Lock()
        self._operations = 0
        self._failed: list[Access] = []

    @property
    def operations(self) -> int:
        """Operations of ``kinds`` so far, failed ones included."""
        return self._operations

    @property
    def failed(self) -> list[Access]:
        """The operations that failed, in order."""
        return list(self._failed)

    def fail_next(self, after: int = 0) -> None:
        """Fail the next operation, or the one that comes after so many more."""
        with self._guard:
            self.fail_at = self._operations + 1 + after

    async def perform(self, access: Access, call: Callable[[], Awaitable[T]]) -> T:
        if access.kind in self._kinds and self._is_due(access):
            raise self._failure(access)
        return await call()

    def _is_due(self, access: Access) -> bool:
        with self._guard:
            self._operations += 1
            if self.fail_at is None:
                return False
            due = self._operations == self.fail_at or (self._stays and self._operations > self.fail_at)
            if due:
                self._failed.append(access)
            return due

    def _failure(self, access: Access) -> OSError:
        error = OSError(self._error, os.strerror(self._error))
        if not access.changes:
            return read_error(error, access.name)
        if self._error in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return StoreFullError(error.errno, error.strerror, access.name)
        return write_error(error, access.name)
