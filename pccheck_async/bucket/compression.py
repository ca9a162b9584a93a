# SPDX-License-Identifier: Apache-2.0
"""Which data objects are compressed: all, none, or those that are in the bucket sooner for it, by what was measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from pccheck_async.bucket.coding import Block, compress, sample_ratio
from pccheck_async.bucket.objects import INSTALL, RefusedError
from pccheck_async.transfer import uninterrupted

__all__ = ["Compressing", "Compression"]

Compression: TypeAlias = Literal["auto", "zstd"] | None
_SOONER = 0.9
"""An object is compressed if it takes at most this share of the time that it takes as it is."""
_LEAST_RATIO = 0.97
_NEW = 0.3
"""Weight of the newest measurement."""
_FORGOTTEN = 0.98
"""Factor of the time of compressing for each object that it was too long for: later it is tried again."""


class Compressing:
    """Compresses the objects that one process uploads, one after the other or at the same time. Used on one loop.

    An object's bytes are compressed while the one before is sent, so the slower of the two decides how long a
    checkpoint takes.

    Args:
        how: "zstd": every object; "auto": while it makes the upload end sooner; None: none.
        rate_limit: Most bytes per second that are sent; None: no limit.

    Raises RefusedError: zstandard is not installed.
    """

    def __init__(self, how: Compression = None, rate_limit: int | None = None) -> None:
        if how is not None:
            try:
                import zstandard  # noqa: F401 - missing modules are told of before anything is sent
            except ImportError as error:
                raise RefusedError(f"compression needs zstandard: {INSTALL}") from error
        self._how = how
        self._limit = 0.0 if rate_limit is None else 1 / rate_limit
        self._sending, self._since = 0, 0.0
        # Seconds per byte, None before the first.
        self._to_send: float | None = None
        self._to_compress: float | None = None
        self._sent = 0

    async def encode(self, data: memoryview, *, alone: bool) -> tuple[memoryview, tuple[Block, ...]]:
        """Compress an object in place, or leave it; return the bytes to send, and their blocks, none if it was left.

        ``alone``: there is no other one to send meanwhile. Takes threads of its own, as commits wait for those of the
        I/O backend. Cancellation: raised when the work on the bytes has ended.
        """
        if self._how is None or (self._how == "auto" and not await self._pays(data, alone=alone)):
            return data, ()
        began, nbytes = time.perf_counter(), len(data)
        end, blocks = await uninterrupted(asyncio.to_thread(compress, data))
        self._to_compress = _newer(self._to_compress, (time.perf_counter() - began) / nbytes)
        return data[:end], blocks

    async def _pays(self, data: memoryview, *, alone: bool) -> bool:
        if self._to_send is None:  # the first objects show how fast the bucket is
            return False
        plain, compressing = max(self._to_send, self._limit), self._to_compress or 0.0
        if compressing > _SOONER * plain:
            self._to_compress = compressing * _FORGOTTEN
            return False
        ratio = await uninterrupted(asyncio.to_thread(sample_ratio, data))
        seconds = compressing + ratio * plain if alone else max(compressing, ratio * plain)
        return ratio <= _LEAST_RATIO and seconds <= _SOONER * plain

    @contextmanager
    def sending(self, nbytes: int) -> Iterator[None]:
        """Return the context in which an object of ``nbytes`` bytes is sent: its time is measured."""
        now = time.perf_counter()
        if not self._sending:
            self._since, self._sent = now, 0
        self._sending += 1
        try:
            yield
            now, self._sent = time.perf_counter(), self._sent + nbytes
            self._to_send = _newer(self._to_send, (now - self._since) / self._sent)
        finally:
            self._sending -= 1
            self._since, self._sent = now, 0


def _newer(before: float | None, now: float) -> float:
    return now if before is None else (1 - _NEW) * before + _NEW * now
