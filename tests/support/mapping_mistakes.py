"""Mistakes in how the bytes of a mapped file become durable, which crash tests have to find."""

from __future__ import annotations

from pccheck_async.testing import CrashMapping


class NothingWrittenBack(CrashMapping):
    def _write_back(self, offset: int, nbytes: int) -> None: ...


class OneLineShort(CrashMapping):
    def _write_back(self, offset: int, nbytes: int) -> None:
        super()._write_back(offset, nbytes - 64)


class NothingFenced(CrashMapping):
    def _fence(self) -> None: ...


class FencedTooEarly(CrashMapping):
    def _write_back(self, offset: int, nbytes: int) -> None:
        super()._fence()
        super()._write_back(offset, nbytes)

    def _fence(self) -> None: ...
