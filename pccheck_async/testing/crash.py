"""Writers on a :class:`~pccheck_async.testing.CrashDisk`."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable
from typing import Any

from pccheck_async.errors import ClosedError, CorruptStoreError, StoreFullError, read_error, write_error
from pccheck_async.medium import MOST_SMALL_BYTES, File, MediumFacts, MediumStatistics, StepwiseMedium
from pccheck_async.telemetry import StageClock
from pccheck_async.testing.disk import CrashDisk
from pccheck_async.testing.power_loss import Change, FolderChange, Image, Written
from pccheck_async.transfer import uninterrupted

__all__ = ["CrashWriter", "ImageWriter"]


class CrashWriter(StepwiseMedium):
    """One process's view of a :class:`CrashDisk`. Several writers on one disk stand for several processes.

    Transfers must be aligned to the disk's blocks, as direct I/O wants it.

    Args:
        disk: Where everything lands.
        turns: Every operation takes 0 to ``turns`` turns of the event loop before it is completed, so that concurrent
            operations overlap and overtake each other. No time passes.
        seed: Decides the turns.
        read_only: Refuse every change with ``EROFS``.
    """

    chains = True

    def __init__(self, disk: CrashDisk, *, turns: int = 3, seed: int = 0, read_only: bool = False) -> None:
        self.disk = disk
        self._turns = turns
        self._rng = random.Random(seed)
        self._read_only = read_only
        self._inodes: dict[File, int] = {}
        self._writable: set[File] = set()
        self._closed = False
        self._clock = StageClock("write", "read", "flush")

    async def prepare(self, *, create: bool) -> MediumFacts:
        return MediumFacts(self.disk.block_bytes, self.disk.block_bytes, direct=True, why="in memory")

    async def names(self) -> list[str]:
        return self.disk.names()

    async def read_small(self, name: str) -> bytes | None:
        try:
            inode = self.disk.find(name)
        except FileNotFoundError:
            return None
        if (nbytes := self.disk.size(inode)) > MOST_SMALL_BYTES:
            raise CorruptStoreError(f"{name} is too large for what it is")
        return self.disk.read(inode, 0, nbytes)

    async def replace(self, name: str, data: bytes, *, keep_as: str = "") -> None:
        await uninterrupted(self._replace(name, data, keep_as))

    async def _replace(self, name: str, data: bytes, keep_as: str) -> None:
        disk, new = self.disk, name + ".new"

        def begin(_: None) -> tuple[int, FolderChange, Written]:
            inode, entry = disk.create(new, 0)
            return inode, entry, disk.submit_write(inode, 0, data)

        def end(begun: tuple[int, FolderChange, Written]) -> None:
            inode, entry, change = begun
            disk.complete_write(inode, change, data)
            disk.complete_change(entry)
            disk.complete_flush(inode, disk.submit_flush(inode))

        if new in disk.names():
            await self.remove(new)
        await self._perform(f"write {new}", new, begin, end)
        if keep_as:
            await self._change(f"rename {name} {keep_as}", keep_as, FolderChange(name, to=keep_as))
        await self._change(f"rename {new} {name}", name, FolderChange(new, to=name))
        await self.sync_names()

    async def remove(self, name: str) -> None:
        await self._change(f"remove {name}", name, FolderChange(name))

    async def _change(self, what: str, name: str, entry: FolderChange) -> None:
        change, complete = self.disk.change_folder, self.disk.complete_change
        await self._perform(what, name, lambda _: None, lambda _: change(entry), complete)

    async def sync_names(self) -> None:
        with self._clock.timed("flush"):
            await self._perform("sync_names", "", lambda _: self.disk.submit_sync(), self.disk.complete_sync)

    async def reserve(self, name: str, nbytes: int) -> File:
        def keep(created: tuple[int, FolderChange]) -> File:
            self.disk.complete_change(created[1])
            return self._keep(name, created[0], writable=True)

        file: File = await self._perform(
            f"reserve {name}", name, lambda _: None, lambda _: self.disk.create(name, nbytes), keep
        )
        return file

    async def open(self, name: str, *, writable: bool) -> File:
        if writable and self._read_only:
            raise write_error(OSError(errno.EROFS, os.strerror(errno.EROFS)), name)
        return self._keep(name, self.disk.find(name), writable=writable)

    async def lock(self, file: File, *, shared: bool = False) -> bool:
        return self.disk.try_lock(self._inode(file), file, shared=shared)

    async def unlock(self, file: File) -> None:
        self.disk.unlock(self._inode(file), file)

    async def write(self, file: File, offset: int, data: memoryview) -> None:
        def begin(_: None) -> tuple[int, Written]:
            inode = self._inode(file)
            if file not in self._writable:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            self._check_aligned(offset, len(data))
            return inode, self.disk.submit_write(inode, offset, bytes(data))

        what = f"write {file.name} [{offset}, {offset + len(data)})"
        with self._clock.timed("write", len(data)):
            await self._perform(
                what, file.name, begin, lambda begun: self.disk.complete_write(begun[0], begun[1], bytes(data))
            )

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
        def begin(_: None) -> tuple[int, list[Change]]:
            inode = self._inode(file)
            return inode, self.disk.submit_flush(inode)

        with self._clock.timed("flush"):
            await self._perform(f"flush {file.name}", file.name, begin, lambda begun: self.disk.complete_flush(*begun))

    async def close(self, file: File | None = None) -> None:
        if file is None:
            self.abandon()
        elif (inode := self._inodes.pop(file, None)) is not None:
            self._writable.discard(file)
            self.disk.unlock(inode, file)

    def abandon(self) -> None:
        self._closed = True
        for file, inode in self._inodes.items():
            self.disk.unlock(inode, file)
        self._inodes.clear()
        self._writable.clear()

    def statistics(self) -> MediumStatistics:
        return MediumStatistics("crash", direct=True, why="in memory", **self._clock.stages())

    async def _perform(self, what: str, name: str, *steps: Callable[[Any], Any]) -> Any:
        """Run an operation to its end, cancelled or not; map what it raises.

        Its first step is its submission; time passes before each of the others, which get what the one before returned.
        """
        if self._read_only:
            raise write_error(OSError(errno.EROFS, os.strerror(errno.EROFS)), name)

        async def run() -> Any:
            result = steps[0](None)
            self.disk.boundary(f"{what} submitted")
            for step in steps[1:]:
                await self._pass_time()
                result = step(result)
            return result

        try:
            return await (uninterrupted(run()) if self._turns else run())
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise StoreFullError(error.errno, error.strerror, name) from error
            raise write_error(error, name) from error
        finally:
            self.disk.boundary(f"{what} completed")

    async def _pass_time(self) -> None:
        for _ in range(self._rng.randint(0, self._turns)):
            await asyncio.sleep(0)

    def _keep(self, name: str, inode: int, *, writable: bool) -> File:
        if self._closed:
            raise ClosedError("the writer was closed meanwhile")
        file = File(name, self.disk.size(inode), direct=True, identity=inode)
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
