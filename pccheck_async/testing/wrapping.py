"""The base of the doubles that stand in front of another writer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from pccheck_async.medium.base import File, FileSystemFacts, Writer, WriterStatistics

__all__ = ["CHANGES", "Access", "WrappingWriter"]

T = TypeVar("T")

CHANGES = frozenset(("create", "flush", "rename", "sync_folder", "unlink", "write", "write_small"))
"""The kinds of access that change what is on storage, or make it durable."""


@dataclass(frozen=True, slots=True)
class Access:
    """One call of a writer's method.

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


class WrappingWriter(Writer):
    """Hands every call to ``inner``. Override :meth:`perform` to treat all calls alike, or a method to change that one.

    ::

        class SlowFlush(WrappingWriter):
            async def flush(self, file: File) -> None:
                await asyncio.sleep(0.1)
                await super().flush(file)

        CheckpointEngine(path, io=SlowFlush(CrashWriter(CrashDisk())))
    """

    def __init__(self, inner: Writer) -> None:
        self.inner = inner

    async def perform(self, access: Access, call: Callable[[], Awaitable[T]]) -> T:
        """Let ``call`` happen; every method but ``close``, ``abandon`` and ``statistics`` comes through here."""
        return await call()

    async def prepare(self, *, create: bool) -> FileSystemFacts:
        return await self.perform(Access("prepare"), lambda: self.inner.prepare(create=create))

    async def names(self) -> list[str]:
        return await self.perform(Access("names"), self.inner.names)

    async def read_small(self, name: str) -> bytes | None:
        return await self.perform(Access("read_small", name), lambda: self.inner.read_small(name))

    async def write_small(self, name: str, data: bytes) -> None:
        await self.perform(Access("write_small", name, len(data)), lambda: self.inner.write_small(name, data))

    async def rename(self, name: str, to: str) -> None:
        await self.perform(Access("rename", to), lambda: self.inner.rename(name, to))

    async def unlink(self, name: str) -> None:
        await self.perform(Access("unlink", name), lambda: self.inner.unlink(name))

    async def sync_folder(self) -> None:
        await self.perform(Access("sync_folder"), self.inner.sync_folder)

    async def create(self, name: str, nbytes: int) -> File:
        return await self.perform(Access("create", name), lambda: self.inner.create(name, nbytes))

    async def open(self, name: str, *, writable: bool) -> File:
        return await self.perform(Access("open", name), lambda: self.inner.open(name, writable=writable))

    async def close_file(self, file: File) -> None:
        await self.perform(Access("close_file", file.name), lambda: self.inner.close_file(file))

    async def in_place(self, file: File) -> bool:
        return await self.perform(Access("in_place", file.name), lambda: self.inner.in_place(file))

    async def try_lock(self, file: File, *, shared: bool = False) -> bool:
        return await self.perform(Access("try_lock", file.name), lambda: self.inner.try_lock(file, shared=shared))

    async def unlock(self, file: File) -> None:
        await self.perform(Access("unlock", file.name), lambda: self.inner.unlock(file))

    async def write(self, file: File, offset: int, data: memoryview) -> None:
        await self.perform(Access("write", file.name, len(data)), lambda: self.inner.write(file, offset, data))

    async def read(self, file: File, offset: int, into: memoryview) -> int:
        return await self.perform(Access("read", file.name, len(into)), lambda: self.inner.read(file, offset, into))

    async def flush(self, file: File) -> None:
        await self.perform(Access("flush", file.name), lambda: self.inner.flush(file))

    async def close(self) -> None:
        await self.inner.close()

    def abandon(self) -> None:
        self.inner.abandon()

    def statistics(self) -> WriterStatistics:
        return self.inner.statistics()
