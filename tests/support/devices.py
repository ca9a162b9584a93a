"""Devices that hang and fail on request, in real files."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pccheck_async.errors import WriteError
from pccheck_async.medium import Medium
from pccheck_async.medium.files import Files
from pccheck_async.testing import Access, StuckWriter, WrappingWriter
from pccheck_async.transfer.operations import Operations

T = TypeVar("T")


class Breaking(WrappingWriter):
    """Fails operations on slots of the kinds in ``broken``, after so many that pass."""

    broken: tuple[str, ...] = ()
    passing = 0

    async def perform(self, access: Access, call: Callable[[], Awaitable[T]]) -> T:
        if access.kind in self.broken and access.name.startswith("slot-"):
            self.passing -= 1
            if self.passing < 0:
                raise WriteError(errno.EIO, "broken", access.name)
        return await call()


class Device:
    """What an engine takes as ``io``: the writer that it made last hangs on request, and slots break on request."""

    breaking: Breaking
    medium: StuckWriter

    def __call__(self, path: str, operations: Operations) -> Medium:
        self.breaking = Breaking(Files(path, operations))
        self.medium = StuckWriter(self.breaking, kinds=())
        return self.medium
