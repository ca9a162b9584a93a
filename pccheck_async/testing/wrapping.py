"""The base of the doubles that stand in front of another medium."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pccheck_async.medium import File, Medium, MediumFacts, MediumStatistics, StepwiseMedium

__all__ = ["CHANGES", "Access", "WrappingWriter"]

T = TypeVar("T")

CHANGES = frozenset(("flush", "remove", "replace", "reserve", "sync_names", "write"))
"""The kinds of access that change what is on storage, or make it durable."""


@dataclass(frozen=True, slots=True)
class Access:
    """One call of a medium's method.

    Attributes:
        kind: The method's name.
        name: The file it is about, empty for the folder.
        nbytes: Bytes transferred, 0 for all but reads and writes.
    """

    kind: str
    name: str = ""
    nbytes: int = 0

    @property
    def changes(self) -> bool:
        """Whether it changes storage: such calls fail with WriteError, others with ReadError."""
        return self.kind in CHANGES


class WrappingWriter(StepwiseMedium):
    """Hands every call to ``inner``, :meth:`make_durable` in single steps.

    Override :meth:`perform` to treat all calls alike, or a method to change that one.

    ::

        class SlowFlush(WrappingWriter):
            async def flush(self, file: File) -> None:
                await asyncio.sleep(0.1)
                await super().flush(file)

        CheckpointEngine(path, io=SlowFlush(CrashWriter(CrashDisk())))
    """

    def __init__(self, inner: Medium) -> None:
        self.inner = inner

    async def perform(self, access: Access, call: Callable[[], Awaitable[T]]) -> T:
        """Let ``call`` happen; every method but ``close``, ``abandon`` and ``statistics`` comes through here."""
        return await call()

    async def prepare(self, *, create: bool) -> MediumFacts:
        return await self.perform(Access("prepare"), lambda: self.inner.prepare(create=create))

    async def names(self) -> list[str]:
        return await self.perform(Access("names"), self.inner.names)

    async def read_small(self, name: str) -> bytes | None:
        return await self.perform(Access("read_small", name), lambda: self.inner.read_small(name))

    async def replace(self, name: str, data: bytes, *, keep_as: str = "") -> None:
        call = partial(self.inner.replace, name, data, keep_as=keep_as)
        await self.perform(Access("replace", name, len(data)), call)

    async def remove(self, name: str) -> None:
        await self.perform(Access("remove", name), lambda: self.inner.remove(name))

    async def sync_names(self) -> None:
        await self.perform(Access("sync_names"), self.inner.sync_names)

    async def reserve(self, name: str, nbytes: int) -> File:
        return await self.perform(Access("reserve", name), lambda: self.inner.reserve(name, nbytes))

    async def open(self, name: str, *, writable: bool) -> File:
        return await self.perform(Access("open", name), lambda: self.inner.open(name, writable=writable))

    async def lock(self, file: File, *, shared: bool = False) -> bool:
        return await self.perform(Access("lock", file.name), lambda: self.inner.lock(file, shared=shared))

    async def unlock(self, file: File) -> None:
        await self.perform(Access("unlock", file.name), lambda: self.inner.unlock(file))

    async def write(self, file: File, offset: int, data: memoryview) -> None:
        await self.perform(Access("write", file.name, len(data)), lambda: self.inner.write(file, offset, data))

    async def read(self, file: File, offset: int, into: memoryview) -> int:
        return await self.perform(Access("read", file.name, len(into)), lambda: self.inner.read(file, offset, into))

    async def flush(self, file: File) -> None:
        await self.perform(Access("flush", file.name), lambda: self.inner.make_durable([(file, ())]))

    async def close(self, file: File | None = None) -> None:
        await self.inner.close(file)

    def abandon(self) -> None:
        self.inner.abandon()

    def statistics(self) -> MediumStatistics:
        return self.inner.statistics()
