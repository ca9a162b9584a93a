# SPDX-License-Identifier: Apache-2.0
"""A folder in memory with volatile and durable contents, and media that are processes' views of it."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pccheck_async.errors import ClosedError, CorruptStoreError, StoreFullError, read_error, write_error
from pccheck_async.medium import MOST_SMALL_BYTES, File, MediumFacts, MediumStatistics, StepwiseMedium
from pccheck_async.telemetry import StageClock
from pccheck_async.testing.power_loss import (
    Change,
    DiskSnapshot,
    FileState,
    FolderChange,
    Image,
    Resized,
    Written,
    closed,
    replay,
    tear,
)
from pccheck_async.transfer import uninterrupted

__all__ = ["CrashDisk", "CrashWriter", "ImageWriter"]


@dataclass(slots=True, eq=False)
class Inode:
    """A file, independent of its name."""

    number: int
    durable: bytes = b""
    unflushed: list[Change] = field(default_factory=list)
    volatile: bytearray = field(default_factory=bytearray)
    writes: int = 0
    """Number of writes so far; stands for the time of the last change."""
    locks: dict[object, bool] = field(default_factory=dict)
    """Holders of ``flock``, with whether the lock is shared: open files, and a dead process's writes still queued."""


class CrashDisk:
    """The state of one folder: as all processes see it, and as a power failure may leave it.

    :class:`~pccheck_async.testing.CrashWriter` performs its operations here, in two halves: submission and completion.
    After each half the observer is called with a :class:`DiskSnapshot`. From a snapshot,
    :func:`~pccheck_async.testing.power_loss_images` yields the images that a power failure may leave and
    :meth:`after_process_death` returns the disk of the next process.

    All methods may be called from any thread; the observer runs inside the call, one call at a time.

    Args:
        block_bytes: Alignment that offsets and lengths of transfers must have.
        capacity: Most bytes of all files together; None for no limit.
        observer: Function that is called with a snapshot at every operation boundary.

    Attributes:
        acknowledged: Counter of the newest checkpoint reported as durable; None if there is none.
    """

    def __init__(
        self,
        *,
        block_bytes: int = 4096,
        capacity: int | None = None,
        observer: Callable[[DiskSnapshot], None] | None = None,
    ) -> None:
        self.block_bytes = block_bytes
        self.capacity = capacity
        self.observer = observer
        self.acknowledged: int | None = None
        self._guard = threading.RLock()
        self._inodes: dict[int, Inode] = {}
        self._names: dict[str, int] = {}
        self._durable_names: dict[str, int] = {}
        self._pending: list[FolderChange] = []
        self._ghosts: list[tuple[Inode, Written]] = []  # writes in flight of a process that died
        self._patience = 0

    @classmethod
    def from_image(cls, image: Image, *, block_bytes: int = 4096) -> CrashDisk:
        """Return the disk with an image's files, as it is after a power failure: all of it is durable."""
        disk = cls(block_bytes=block_bytes)
        for number, (name, content) in enumerate(image.files.items()):
            disk._inodes[number] = Inode(number, content, [], bytearray(content))
            disk._names[name] = disk._durable_names[name] = number
        return disk

    @classmethod
    def after_process_death(
        cls, snapshot: DiskSnapshot, *, rng: random.Random | None = None, sector: int = 512, lingering: int = 0
    ) -> CrashDisk:
        """Return the disk after the death of a process: completed writes are kept, nothing more is durable, no locks.

        Args:
            snapshot: The disk when the process died.
            rng: Decides how much of each write in flight is performed, torn at ``sector``; None for all of it.
            sector: Unit that the device writes atomically, in bytes.
            lingering: Number of further operations for which writes in flight stay queued in the kernel, with their
                files locked, before they are performed; 0 performs them at once.
        """
        disk = cls(block_bytes=snapshot.block_bytes)
        disk.acknowledged = snapshot.acknowledged
        disk._durable_names = dict(snapshot.names)
        disk._pending = [dataclasses.replace(entry, completed=True) for entry in snapshot.pending]
        disk._names = dict(snapshot.names)
        for entry in disk._pending:
            entry.apply(disk._names)
        for number, state in snapshot.files.items():
            inode = disk._inodes[number] = Inode(number, state.durable)
            for change in state.unflushed:
                if lingering and isinstance(change, Written) and not change.completed:
                    inode.unflushed.append(change)
                    inode.locks[change] = False
                    disk._ghosts.append((inode, change))
                else:
                    parts = [change] if change.completed or rng is None else tear(change, sector, rng)
                    inode.unflushed += [dataclasses.replace(part, completed=True) for part in parts]
            inode.volatile[:] = replay(inode.durable, (c for c in inode.unflushed if c.completed))
        disk._patience = lingering
        return disk

    def acknowledge(self, counter: int) -> None:
        """Record that checkpoint ``counter`` was reported as durable, so that no later crash may lose it."""
        with self._guard:
            self.acknowledged = max(counter, self.acknowledged or counter)

    def snapshot(self, boundary: str = "") -> DiskSnapshot:
        """Return a snapshot of the disk as it is now; cheap, since contents are shared."""
        with self._guard:
            return DiskSnapshot(
                boundary,
                self.acknowledged,
                self.block_bytes,
                {number: FileState(i.durable, tuple(i.unflushed)) for number, i in self._inodes.items()},
                dict(self._durable_names),
                tuple(self._pending),
            )

    def contents(self) -> Mapping[str, bytes]:
        """Return the files by name, as a process sees them now."""
        with self._guard:
            return {name: bytes(self._inodes[number].volatile) for name, number in self._names.items()}

    # The methods below are for the writer. They raise OSError, like system calls.

    def names(self) -> list[str]:
        with self._guard:
            return sorted(self._names)

    def find(self, name: str) -> Inode:
        """Return the inode of ``name``. Raises FileNotFoundError."""
        with self._guard:
            if name not in self._names:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            return self._inodes[self._names[name]]

    def create(self, name: str, nbytes: int) -> tuple[Inode, FolderChange]:
        """Create a file of ``nbytes`` zeros; return its inode and the change of the folder. Name and size are volatile.

        Raises OSError if the name exists (EEXIST), or the capacity is exceeded (ENOSPC).
        """
        with self._guard:
            if name in self._names:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
            used = sum(len(inode.volatile) for inode in self._inodes.values())
            if self.capacity is not None and used + nbytes > self.capacity:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
            inode = Inode(max(self._inodes, default=-1) + 1)
            self._inodes[inode.number] = inode
            if nbytes:
                inode.unflushed.append(Resized(nbytes, completed=True))
                inode.volatile.extend(bytes(nbytes))
            return inode, self.change_folder(FolderChange(name, inode.number))

    def change_folder(self, entry: FolderChange) -> FolderChange:
        """Submit a change of the folder, which processes see at once; it is volatile. Raises FileNotFoundError."""
        with self._guard:
            if entry.inode is None:
                self.find(entry.name)
            entry.apply(self._names)
            self._pending.append(entry)
            return entry

    def complete_change(self, entry: FolderChange) -> None:
        """Complete a change of the folder: later calls of ``sync_names`` cover it."""
        with self._guard:
            done = dataclasses.replace(entry, completed=True)
            self._pending = [done if each is entry else each for each in self._pending]

    def submit_write(self, file: Inode, offset: int, data: bytes) -> Written:
        """Start a write: its first half is performed at once, the rest by :meth:`complete_write`."""
        with self._guard:
            change = Written(offset, data, extends=offset + len(data) > len(file.volatile))
            file.writes += 1
            file.unflushed.append(change)
            dataclasses.replace(change, data=data[: len(data) // 2]).apply(file.volatile)
            return change

    def complete_write(self, file: Inode, submitted: Written, data: bytes) -> None:
        """End a write. Its second half is taken from ``data``, the buffer now, so that a change meanwhile shows."""
        with self._guard:
            half = len(data) // 2
            landed = dataclasses.replace(submitted, data=submitted.data[:half] + data[half:], completed=True)
            landed.apply(file.volatile)
            file.unflushed = [landed if each is submitted else each for each in file.unflushed]

    def submit_flush(self, file: Inode) -> set[Change]:
        """Start a flush; return the changes that it covers: those that are completed now."""
        with self._guard:
            return {change for change in file.unflushed if change.completed}

    def complete_flush(self, file: Inode, covered: set[Change]) -> None:
        """End a flush: make the covered changes durable."""
        with self._guard:
            file.durable = replay(file.durable, (c for c in file.unflushed if c in covered))
            file.unflushed = [change for change in file.unflushed if change not in covered]

    def split(self, file: Inode, begin: int, end: int, unit: int) -> list[Change]:
        """Return the unflushed writes to a file within bytes ``[begin, end)``.

        All other unflushed writes are split at multiples of ``unit`` first, and the parts inside are returned, too.
        """

        def inside(change: Change) -> bool:
            return isinstance(change, Written) and begin <= change.offset <= change.offset + len(change.data) <= end

        with self._guard:
            file.unflushed = [
                part
                for change in file.unflushed
                for part in ([change] if inside(change) or isinstance(change, Resized) else change.sectors(unit))
            ]
            return [change for change in file.unflushed if inside(change)]

    def forget(self, file: Inode) -> None:
        """Forget that changes are unflushed, as a page cache does after a failed flush: no later flush covers them."""
        with self._guard:
            file.unflushed.clear()

    def submit_sync(self) -> list[FolderChange]:
        """Start to sync the folder; return the changes that this covers: those that are completed now."""
        with self._guard:
            return closed(self._pending, (i for i, entry in enumerate(self._pending) if entry.completed))

    def complete_sync(self, covered: list[FolderChange]) -> None:
        """End the sync of the folder: make the covered changes durable."""
        with self._guard:
            for entry in self._pending:
                if entry in covered:
                    entry.apply(self._durable_names)
            self._pending = [entry for entry in self._pending if entry not in covered]

    def try_lock(self, file: Inode, holder: object, *, shared: bool) -> bool:
        """Take a lock like ``flock`` without waiting, or convert the holder's lock; return whether that succeeded."""
        with self._guard:
            self._pass_time()
            others = [other_shared for other, other_shared in file.locks.items() if other is not holder]
            if others and not (shared and all(others)):
                return False
            file.locks[holder] = shared
            return True

    def unlock(self, file: Inode, holder: object) -> None:
        with self._guard:
            file.locks.pop(holder, None)

    def boundary(self, description: str) -> None:
        """Call the observer with a snapshot: an operation was submitted or completed, as ``description`` says."""
        with self._guard:
            self._pass_time()
            if self.observer is not None:
                self.observer(self.snapshot(description))

    def _pass_time(self) -> None:
        self._patience -= 1
        if self._patience <= 0:
            ghosts, self._ghosts = self._ghosts, []
            for inode, change in ghosts:
                self.complete_write(inode, change, change.data)
                inode.locks.pop(change, None)


class CrashWriter(StepwiseMedium):
    """A medium that is one process's view of a :class:`CrashDisk`; several writers on a disk are several processes.

    Transfers must be aligned to the disk's blocks, as for direct I/O.

    Args:
        disk: The disk on which operations are performed.
        turns: Most iterations of the event loop that an operation takes before it is completed (a random number), so
            that concurrent operations overlap and overtake each other. No time passes.
        seed: Seed of these random numbers.
        read_only: Whether every change is refused with ``EROFS``.
    """

    chains = True

    def __init__(self, disk: CrashDisk, *, turns: int = 3, seed: int = 0, read_only: bool = False) -> None:
        self.disk = disk
        self._turns = turns
        self._rng = random.Random(seed)
        self._read_only = read_only
        self._inodes: dict[File, Inode] = {}
        self._writable: set[File] = set()
        self._closed = False
        self._clock = StageClock("write", "read", "flush")

    async def prepare(self, *, create: bool) -> MediumFacts:
        return MediumFacts(self.disk.block_bytes, self.disk.block_bytes, direct=True, why="in memory")

    async def names(self) -> list[str]:
        return self.disk.names()

    async def read_small(self, name: str) -> bytes | None:
        try:
            content = bytes(self.disk.find(name).volatile)
        except FileNotFoundError:
            return None
        if len(content) > MOST_SMALL_BYTES:
            raise CorruptStoreError(f"{name} is too large for what it is")
        return content

    async def replace(self, name: str, data: bytes, *, keep_as: str = "") -> None:
        await uninterrupted(self._replace(name, data, keep_as))

    async def _replace(self, name: str, data: bytes, keep_as: str) -> None:
        disk, new = self.disk, name + ".new"

        def begin(_: None) -> tuple[Inode, FolderChange, Written]:
            inode, entry = disk.create(new, 0)
            return inode, entry, disk.submit_write(inode, 0, data)

        def end(begun: tuple[Inode, FolderChange, Written]) -> None:
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
        def keep(created: tuple[Inode, FolderChange]) -> File:
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

    def stamp(self, file: File) -> object:
        inode = self._inodes.get(file)
        return None if inode is None else (len(inode.volatile), inode.writes)

    async def write(self, file: File, offset: int, data: memoryview) -> None:
        def begin(_: None) -> tuple[Inode, Written]:
            inode = self._writable_inode(file, offset, len(data))
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
            data = bytes(self._inode(file).volatile[offset : offset + len(into)])
        except OSError as error:
            raise read_error(error, file.name) from error
        into[: len(data)] = data
        return len(data)

    async def flush(self, file: File) -> None:
        def begin(_: None) -> tuple[Inode, set[Change]]:
            inode = self._inode(file)
            return inode, self.disk.submit_flush(inode)

        with self._clock.timed("flush"):
            await self._perform(f"flush {file.name}", file.name, begin, lambda begun: self.disk.complete_flush(*begun))

    async def close(self, file: File | None = None) -> None:
        if file is None:
            self.abandon()
        elif (inode := self._inodes.pop(file, None)) is not None:
            self.disk.unlock(inode, file)

    def abandon(self) -> None:
        self._closed = True
        for file, inode in self._inodes.items():
            self.disk.unlock(inode, file)
        self._inodes.clear()

    def statistics(self) -> MediumStatistics:
        return MediumStatistics("crash", direct=True, why="in memory", **self._clock.stages())

    async def _perform(self, what: str, name: str, *steps: Callable[[Any], Any]) -> Any:
        """Run an operation to its end, cancelled or not; return the last step's result, and map OSErrors.

        The first step is the submission. Each other step gets the result of the one before, after some loop iterations.
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

    def _keep(self, name: str, inode: Inode, *, writable: bool) -> File:
        if self._closed:
            raise ClosedError("the writer was closed meanwhile")
        file = File(name, len(inode.volatile), direct=True, identity=inode)
        self._inodes[file] = inode
        if writable:
            self._writable.add(file)
        return file

    def _inode(self, file: File) -> Inode:
        if file not in self._inodes:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), file.name)
        return self._inodes[file]

    def _writable_inode(self, file: File, offset: int, nbytes: int) -> Inode:
        inode = self._inode(file)
        if file not in self._writable:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        self._check_aligned(offset, nbytes)
        return inode

    def _check_aligned(self, *numbers: int) -> None:
        if any(number % self.disk.block_bytes for number in numbers):
            raise OSError(errno.EINVAL, f"not aligned to {self.disk.block_bytes} bytes: {numbers}")


class ImageWriter(CrashWriter):
    """A medium to read an :class:`~pccheck_async.testing.Image` like the next process; refuses changes (``EROFS``)."""

    def __init__(self, image: Image, *, block_bytes: int = 4096) -> None:
        super().__init__(CrashDisk.from_image(image, block_bytes=block_bytes), turns=0, read_only=True)
