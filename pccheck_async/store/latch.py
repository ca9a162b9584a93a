"""The error after which a store takes no more commits (invariant I11)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from pccheck_async.errors import StoreFailedError
from pccheck_async.telemetry import write
from pccheck_async.transfer import uninterrupted

__all__ = ["Latch"]


class Latch:
    """The first error after which it is unknown what is durable. It is never reset: reopen the store.

    Attributes:
        failure: That error, None while there was none.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None

    def set(self, error: BaseException) -> None:
        """Take no more commits because of ``error``; only the first one is kept, and logged."""
        if self.failure is None:
            self.failure = error
            write(logging.ERROR, "store_failed", "the store takes no more commits: %s", error, error=str(error))

    def check(self) -> None:
        """Raise StoreFailedError where the store takes no more commits."""
        if self.failure is not None:
            raise _failed(self.failure) from self.failure

    def raise_as_failed(self, error: BaseException) -> None:
        """Raise ``error`` as that of a store which takes no more commits; return where it does."""
        if self.failure is not None and isinstance(error, Exception):
            raise _failed(error) from error

    async def flush(self, flush: Callable[[], Awaitable[None]]) -> None:
        """Flush; where that fails no more commits are taken. Raises StoreFailedError.

        Cancellation: raised when the flush ended: its error must latch though the caller no longer waits.
        """

        async def flush_or_latch() -> None:
            try:
                await flush()
            except OSError as error:
                # After a failed flush the kernel may report success although the data is gone: never try again.
                self.set(error)
                raise _failed(error) from error

        await uninterrupted(flush_or_latch())


def _failed(error: BaseException) -> StoreFailedError:
    rest = "what was committed stays readable; check the storage and open the store anew"
    if isinstance(error, OSError):
        why = error.strerror or str(error)
        return StoreFailedError(error.errno, f"the store takes no more commits: {why}; {rest}", error.filename)
    return StoreFailedError(f"the store takes no more commits: {error!r}; {rest}")
