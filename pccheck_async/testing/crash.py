"""Writers on a :class:`~pccheck_async.testing.CrashDisk`."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Coroutine
from typing import Any, TypeVar

from pccheck_async.errors import ClosedError, StoreFullError, read_error, write_error
from pccheck_async.medium.base import File, FileSystemFacts, Writer, WriterStatistics
from pccheck_async.telemetry.stages import StageClock
from pccheck_async.testing.disk import CrashDisk
from pccheck_async.testing.power_loss import Image
from pccheck_async.testing.snapshot import Remove, Rename
from pccheck_async.transfer.uninterrupted import uninterrupted

__all__ = ["CrashWriter", "ImageWriter"]

T = TypeVar("T")


class CrashWriter(Writer):
    """One process's view of a :class:`CrashDisk`. Several writers on one disk stand for several processes.

    Transfers must be aligned to the disk's blocks, as direct I/O wants it.

    Args:
        disk: Where everything lands.
        turns: Every operation takes 0 to ``turns`` turns of the event loop before it is completed, so that concurrent
            operations overlap and overtake each other. No time passes.
        seed: Decides the turns.
        read_only: Refuse every change with ``EROFS``.
    """

    persists_at_once = True

    def __init__(self, disk: CrashDisk, *, turns: int = 3, seed: int = 0, read_only: bool = False) -> None:
        self.disk = disk
        self._turns = turns
        self._rng = random.Random(seed)
        self._read_only = read_only
        self._inodes: dict[File, int] = {}
        self._writable: set[File] = set()
        self._closed = False
        self._clock = StageClock("write", "read", "flush")

    async def prepare(self, *, create: bool) -> FileSystemFacts:
        return FileSystemFacts(self.disk.block_bytes, self.disk.block_bytes, direct=True, why="in memory")

    async def names(self) -> list[str]:
        return self.disk.names()

    async def read_small(self, name: str) -> bytes | None:
        try:
            inode = self.disk.find(name)
        except FileNotFoundError:
            return None
        return self.disk.read(inode, 0, self.disk.size(inode))

    async def write_small(self, name: str, data: bytes) -> None:
        await self._perform(f"write_small {name}", name, self._write_small(name, data))

    async def rename(self, name: str, to: str) -> None:
        what = f"rename {name} {to}"
        await self._perform(what, to, self._change_folder(Rename(name, to), what))

    async def unlink(self, name: str) -> None:
        what = f"unlink {name}"
        await self._perform(what, name, self._change_folder(Remove(name), what))

    async def sync_folder(self) -> None:
        with self._clock.timed("flush"):
            await self._perform("sync_folder", "", self._sync_folder())

    async def create(self, name: str, nbytes: int) -> File:
        return await self._perform(f"create {name}", name, self._create(name, nbytes))

    async def open(self, name: str, *, writable: bool) -> File:
        if writable and self._read_only:
            raise write_error(OSError(errno.EROFS, os.strerror(errno.EROFS)), name)
        return self._keep(name, self.disk.find(name), writable=writable)

    async def close_file(self, file: File) -> None:
        inode = self._inodes.pop(file, None)
        self._writable.discard(file)
        if inode is not None:
            self.disk.unlock(inode, file)

    async def in_place(self, file: File) -> bool:
        try:
            return self.disk.find(file.name) == self._inode(file)
        except FileNotFoundError:
            return False

    async def try_lock(self, file: File, *, shared: bool = False) -> bool:
        return self.disk.try_lock(self._inode(file), file, shared=shared)

    async def unlock(self, file: File) -> None:
        self.disk.unlock(self._inode(file), file)

    async def write(self, file: File, offset: int, data: memoryview) -> None:
        what = f"write {file.name} [{offset}, {offset + len(data)})"
        with self._clock.timed("write", len(data)):
            await self._perform(what, file.name, self._write(file, offset, data, what))

    async def read(self, file: File, offset: int, into: memoryview) -> int:
        with self._clock.timed("read", len(into)):
            await self._pass_time()
        try:
            self._check_aligned(offset, len(into))
            data = self.disk.read(self._inode(file), offset, len(into))
        except OSError as error:
            raise read_error(error, file.name) from error
        into[: len(data)] = data
        return len(data)

    async def flush(self, file: File) -> None:
        with self._clock.timed("flush"):
            await self._perform(f"flush {file.name}", file.name, self._flush(file))

    async def close(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        self._closed = True
        for file, inode in self._inodes.items():
            self.disk.unlock(inode, file)
        self._inodes.clear()
        self._writable.clear()

    def statistics(self) -> WriterStatistics:
        return WriterStatistics("crash", direct=True, why="in memory", **self._clock.stages())

    async def _write_small(self, name: str, data: bytes) -> None:
        try:
            inode, entry = self.disk.find(name), None
        except FileNotFoundError:
            inode, entry = self.disk.create(name, 0)
        self.disk.truncate(inode)
        change = self.disk.submit_write(inode, 0, data)
        await self._in_flight(f"write_small {name}")
        self.disk.complete_write(inode, change, data)
        if entry is not None:
            self.disk.settle(entry)
        self.disk.complete_flush(inode, self.disk.submit_flush(inode))

    async def _change_folder(self, entry: Rename | Remove, description: str) -> None:
        await self._in_flight(description)
        self.disk.change_folder(entry)
        await self._pass_time()
        self.disk.settle(entry)

    async def _sync_folder(self) -> None:
        covered = self.disk.submit_sync()
        await self._in_flight("sync_folder")
        self.disk.complete_sync(covered)

    async def _create(self, name: str, nbytes: int) -> File:
        await self._in_flight(f"create {name}")
        inode, entry = self.disk.create(name, nbytes)
        await self._pass_time()
        self.disk.settle(entry)
        return self._keep(name, inode, writable=True)

    async def _write(self, file: File, offset: int, data: memoryview, description: str) -> None:
        inode = self._inode(file)
        if file not in self._writable:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        self._check_aligned(offset, len(data))
        change = self.disk.submit_write(inode, offset, bytes(data))
        await self._in_flight(description)
        self.disk.complete_write(inode, change, bytes(data))

    async def _flush(self, file: File) -> None:
        inode = self._inode(file)
        covered = self.disk.submit_flush(inode)
        await self._in_flight(f"flush {file.name}")
        self.disk.complete_flush(inode, covered)

    async def _perform(self, description: str, name: str, operation: Coroutine[Any, Any, T]) -> T:
        """Run an operation to its end, cancelled or not; map what it raises."""
        if self._read_only:
            operation.close()
            raise write_error(OSError(errno.EROFS, os.strerror(errno.EROFS)), name)
        try:
            return await (uninterrupted(operation) if self._turns else operation)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise StoreFullError(error.errno, error.strerror, name) from error
            raise write_error(error, name) from error
        finally:
            self.disk.boundary(f"{description} completed")

    async def _in_flight(self, description: str) -> None:
        self.disk.boundary(f"{description} submitted")
        await self._pass_time()

    async def _pass_time(self) -> None:
        for _ in range(self._rng.randint(0, self._turns)):
            await asyncio.sleep(0)

    def _keep(self, name: str, inode: int, *, writable: bool) -> File:
        if self._closed:
            raise ClosedError("the writer was closed meanwhile")
        file = File(name, self.disk.size(inode), direct=True)
        self._inodes[file] = inode
        if writable:
            self._writable.add(file)
        return file

    def _inode(self, file: File) -> int:
        if file not in self._inodes:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), file.name)
        return self._inodes[file]

    def _check_aligned(self, *numbers: int) -> None:
        if any(number % self.disk.block_bytes for number in numbers):
            raise OSError(errno.EINVAL, f"not aligned to {self.disk.block_bytes} bytes: {numbers}")


class ImageWriter(CrashWriter):
    """Read an :class:`~pccheck_async.testing.Image` as the next process would; changes are refused with ``EROFS``."""

    def __init__(self, image: Image, *, block_bytes: int = 4096) -> None:
        super().__init__(CrashDisk.from_image(image, block_bytes=block_bytes), turns=0, read_only=True)
