# SPDX-License-Identifier: Apache-2.0
"""Which data objects are compressed: all, none, or those that are in the bucket sooner for it, by what was measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, TypeAlias

from pccheck_async.bucket.coding import WORTH, Block, blocks_in, compress, sample_ratio
from pccheck_async.bucket.objects import INSTALL, RefusedError
from pccheck_async.transfer.operations import Operations

__all__ = ["Compressed", "Compressing", "Compression", "check_compression"]

Compression: TypeAlias = Literal["auto", "zstd"] | None
_SOONER = 0.9
"""An object is compressed if it takes at most this share of the time that it takes as it is."""
_NEW = 0.3
"""Weight of the newest measurement of compressing."""
_OLD = 0.8
"""Weight of the measurements of sending before the newest one."""
_AT_A_TIME = 4
"""So many objects are sent at the same time: the first one of them ends late, and the others soon after it."""
_FORGOTTEN = 0.98
"""Factor of the time of compressing for each object that it was too long for: later it is tried again."""


class Compressed(NamedTuple):
    """An object that was compressed.

    Attributes:
        plain: The digest of its bytes before that.
        digits: The digest of its bytes.
        nbytes: Its size in bytes.
        blocks: Its blocks.
    """

    plain: str
    digits: str
    nbytes: int
    blocks: tuple[Block, ...]


class Compressing:
    """Compresses the objects that one process uploads, several at the same time. Used on one loop.

    Args:
        how: "zstd": every object; "auto": while it makes the upload end sooner; None: none.
        rate_limit: Most bytes per second that are sent; None: no limit.

    Attributes:
        last: The newest compressed object of each rank and number. While its bytes stay the same it need not be
            compressed again to be found in the bucket; once they change, nothing speaks for compressing it again.

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
        self._encoding, self._encoded = 0, 0.0  # objects that are being compressed; when the last one was
        self._plain, self._beside = _Pace(), _Pace()  # of sending while nothing is compressed, and beside it
        self._to_compress: float | None = None  # seconds per byte
        self.last = dict[tuple[int, int], Compressed]()

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
        self._encoding += 1
        try:
            for block in blocks_in(data):
                blocks.append(await operations.call(compress, block, data[end:]))
                end += blocks[-1].nbytes
        finally:
            self._encoding -= 1
            self._encoded = time.perf_counter()
        now = (self._encoded - began) / len(data)
        self._to_compress = now if self._to_compress is None else (1 - _NEW) * self._to_compress + _NEW * now
        return data[:end], tuple(blocks)

    async def _pays(self, data: memoryview, operations: Operations, alone: bool) -> bool:
        if self._plain.count < _AT_A_TIME:  # the first objects show how fast the bucket is
            return False
        ratio = await operations.call(sample_ratio, data)
        if ratio > WORTH:
            return False
        plain, compressing = max(self._plain.per_byte, self._limit), self._to_compress or 0.0
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
            self._measured(now - self._since, nbytes, beside=self._encoding > 0 or self._encoded > self._since)
            self._since = now
        finally:
            self._sending -= 1

    def _measured(self, seconds: float, nbytes: int, *, beside: bool) -> None:
        """Count an object that was sent. ``beside``: while others were compressed.

        Compressing takes processors that sending needs: what is sent beside it may be late for that alone, and then is
        no reason to compress more. So it counts only if the bucket has become faster all the same.
        """
        if not beside:
            self._plain.add(seconds, nbytes)
            self._beside = _Pace()
            return
        self._beside.add(seconds, nbytes)
        if self._beside.count >= 2 * _AT_A_TIME and self._beside.per_byte < self._plain.per_byte:
            self._plain = self._beside
            self._beside = _Pace()


class _Pace:
    """How long sending takes, of the last objects together."""

    def __init__(self) -> None:
        self.count = 0
        self._seconds = self._nbytes = 0.0

    @property
    def per_byte(self) -> float:
        """Seconds per byte; of none: 0."""
        return self._seconds / self._nbytes if self.count else 0.0

    def add(self, seconds: float, nbytes: int) -> None:
        self.count += 1
        self._seconds = _OLD * self._seconds + seconds
        self._nbytes = _OLD * self._nbytes + nbytes


def check_compression(value: object) -> None:
    """Raise ValueError if a setting is no :data:`Compression`."""
    if value not in ("auto", "zstd", None):
        raise ValueError(f"compression is 'auto', 'zstd' or None, not {value!r}")
