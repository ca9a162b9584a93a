# SPDX-License-Identifier: Apache-2.0
"""Which data objects are compressed: all, none, or those that are in the bucket sooner for it, by what was measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from pccheck_async.bucket.coding import WORTH, Block, blocks_in, compress, sample_ratio
from pccheck_async.bucket.objects import INSTALL, RefusedError
from pccheck_async.transfer.operations import Operations

__all__ = ["Compressing", "Compression", "check_compression"]

Compression: TypeAlias = Literal["auto", "zstd"] | None
_SOONER = 0.9
"""An object is compressed if it takes at most this share of the time that it takes as it is."""
_NEW = 0.3
"""Weight of the newest measurement."""
_FORGOTTEN = 0.98
"""Factor of the time of compressing for each object that it was too long for: later it is tried again."""


class Compressing:
    """Compresses the objects that one process uploads, several at the same time. Used on one loop.

    Args:
        how: "zstd": every object; "auto": while it makes the upload end sooner; None: none.
        rate_limit: Most bytes per second that are sent; None: no limit.

    Raises ValueError: ``how`` is another one; RefusedError: zstandard is not installed.
    """

    def __init__(self, how: Compression = None, rate_limit: int | None = None) -> None:
        check_compression(how)
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

    async def encode(
        self, data: memoryview, operations: Operations, *, alone: bool, again: bool
    ) -> tuple[memoryview, tuple[Block, ...]]:
        """Compress an object in place, or leave it; return the bytes to send, and their blocks, none if it was left.

        ``alone``: there is no other one to send meanwhile. ``again``: it was compressed before, so it has to be to get
        the same name. Each block is a call of its own, so that no other call waits for a whole object.
        """
        if not (again or self._how == "zstd" or (self._how == "auto" and await self._pays(data, operations, alone))):
            return data, ()
        began, end, blocks = time.perf_counter(), 0, list[Block]()
        for block in blocks_in(data):
            blocks.append(await operations.call(compress, block, data[end:]))
            end += blocks[-1].nbytes
        self._to_compress = _newer(self._to_compress, (time.perf_counter() - began) / len(data))
        return data[:end], tuple(blocks)

    async def _pays(self, data: memoryview, operations: Operations, alone: bool) -> bool:
        if self._to_send is None:  # the first objects show how fast the bucket is
            return False
        ratio = await operations.call(sample_ratio, data)
        if ratio > WORTH:
            return False
        plain, compressing = max(self._to_send, self._limit), self._to_compress or 0.0
        # Objects begin at about the same time, and two processors compress: one half of that is hidden by sending.
        if (compressing if alone else compressing / 2) + ratio * plain <= _SOONER * plain:
            return True
        self._to_compress = compressing * _FORGOTTEN
        return False

    @contextmanager
    def sending(self, nbytes: int) -> Iterator[None]:
        """Return the context in which an object of ``nbytes`` bytes is sent: its time is measured."""
        if not self._sending:
            self._since = time.perf_counter()
        self._sending += 1
        try:
            yield
            now = time.perf_counter()  # of those at the same time each counts from the end of the other
            self._to_send = _newer(self._to_send, (now - self._since) / nbytes)
            self._since = now
        finally:
            self._sending -= 1


def _newer(before: float | None, now: float) -> float:
    return now if before is None else (1 - _NEW) * before + _NEW * now


def check_compression(value: object) -> None:
    """Raise ValueError if a setting is no :data:`Compression`."""
    if value not in ("auto", "zstd", None):
        raise ValueError(f"compression is 'auto', 'zstd' or None, not {value!r}")
