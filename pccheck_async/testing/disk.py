"""A folder in memory with volatile and durable contents."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pccheck_async.testing.power_loss import (
    Change,
    FileState,
    FolderChange,
    Image,
    Resized,
    Snapshot,
    Written,
    closed,
    replay,
    tear,
)

__all__ = ["CrashDisk"]

Holder = object
"""The holder of a lock: an open file, or a write that its dead process left in the kernel's queue."""


@dataclass(slots=True)
class _Inode:
    number: int
    durable: bytes = b""
    unflushed: list[Change] = field(default_factory=list)
    volatile: bytearray = field(default_factory=bytearray)
    locks: dict[Holder, bool] = field(default_factory=dict)
    """Holders of ``flock``, True for shared ones."""


class CrashDisk:
    """What all processes that open one folder see, and what a power failure would leave of it.

    :class:`~pccheck_async.testing.CrashWriter` performs its operations here, in two halves: submitted and completed.
    After each half the observer is called with a :class:`Snapshot`. From a snapshot,
    :func:`~pccheck_async.testing.power_loss_images` yields what a power failure may leave and
    :meth:`after_process_death` what the next process finds.

    All methods may be called from any thread; the observer runs inside the call, one call at a time.

    Args:
        block_bytes: Alignment of offsets and lengths that transfers must keep.
        capacity: Bytes that files may have in all, None for no limit.
        observer: Called at every operation boundary.

    Attributes:
        acknowledged: Counter of the newest checkpoint promised to be durable.
    """

    def __init__(
        self,
        *,
        block_bytes: int = 4096,
        capacity: int | None = None,
        observer: Callable[[Snapshot], None] | None = None,
    ) -> None:
        self.block_bytes = block_bytes
        self.capacity = capacity
        self.observer = observer
        self.acknowledged: int | None = None
        self._guard = threading.RLock()
        self._inodes: dict[int, _Inode] = {}
        self._names: dict[str, int] = {}
        self._durable_names: dict[str, int] = {}
        self._pending: list[FolderChange] = []
        self._ghosts: list[tuple[_Inode, Written]] = []  # writes in flight of a process that died
        self._patience = 0

    @classmethod
    def from_image(cls, image: Image, *, block_bytes: int = 4096) -> CrashDisk:
        """Return the disk as it is found after a power failure: all there is on it is durable."""
        disk = cls(block_bytes=block_bytes)
        for number, (name, content) in enumerate(image.files.items()):
            disk._inodes[number] = _Inode(number, content, [], bytearray(content))
            disk._names[name] = disk._durable_names[name] = number
        return disk

    @classmethod
    def after_process_death(
        cls, snapshot: Snapshot, *, rng: random.Random | None = None, sector: int = 512, lingering: int = 0
    ) -> CrashDisk:
        """Return the disk as the next process finds it: nothing written is lost, nothing more is durable, no locks.

        Args:
            snapshot: The disk when the process died.
            rng: Decides what each write in flight left behind, torn at ``sector``; None to let all of it land.
            sector: What the device writes atomically, in bytes.
            lingering: Writes in flight stay queued in the kernel, which keeps their files locked, and land only after
                so many further operations. 0: at once.
        """
        disk = cls(block_bytes=snapshot.block_bytes)
        disk.acknowledged = snapshot.acknowledged
        disk._durable_names = dict(snapshot.names)
        disk._pending = [dataclasses.replace(entry, completed=True) for entry in snapshot.pending]
        disk._names = dict(snapshot.names)
        for entry in disk._pending:
            entry.apply(disk._names)
        for number, state in snapshot.files.items():
            inode = disk._inodes[number] = _Inode(number, state.durable)
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
        """Note that checkpoint ``counter`` was reported as durable: from now on no crash may lose it."""
        with self._guard:
            self.acknowledged = max(counter, self.acknowledged or counter)

    def snapshot(self, boundary: str = "") -> Snapshot:
        """Return the disk as it is now; cheap, since contents are shared."""
        with self._guard:
            return Snapshot(
                boundary,
                self.acknowledged,
                self.block_bytes,
                {number: FileState(i.durable, tuple(i.unflushed)) for number, i in self._inodes.items()},
                dict(self._durable_names),
                tuple(self._pending),
            )

    def contents(self) -> Mapping[str, bytes]:
        """Return what a process sees now: files by name."""
        with self._guard:
            return {name: bytes(self._inodes[number].volatile) for name, number in self._names.items()}

    # What follows is for the writer. An inode is named by its number. Raises OSError, as system calls do.

    def names(self) -> list[str]:
        with self._guard:
            return sorted(self._names)

    def find(self, name: str) -> int:
        """Return the inode of ``name``. Raises FileNotFoundError."""
        with self._guard:
            if name not in self._names:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            return self._names[name]

    def size(self, inode: int) -> int:
        with self._guard:
            return len(self._inodes[inode].volatile)

    def read(self, inode: int, offset: int, nbytes: int) -> bytes:
        """Return bytes as processes see them: those of writes in flight are partly there."""
        with self._guard:
            return bytes(self._inodes[inode].volatile[offset : offset + nbytes])

    def create(self, name: str, nbytes: int) -> tuple[int, FolderChange]:
        """Enter a new file of ``nbytes`` zeros. Its name and its size are volatile."""
        with self._guard:
            if name in self._names:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
            used = sum(len(inode.volatile) for inode in self._inodes.values())
            if self.capacity is not None and used + nbytes > self.capacity:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
            inode = _Inode(max(self._inodes, default=-1) + 1)
            self._inodes[inode.number] = inode
            if nbytes:
                inode.unflushed.append(Resized(nbytes, completed=True))
                inode.volatile.extend(bytes(nbytes))
            return inode.number, self.change_folder(FolderChange(name, inode.number))

    def change_folder(self, entry: FolderChange) -> FolderChange:
        """Let a change of the folder happen; volatile."""
        with self._guard:
            if entry.inode is None:
                self.find(entry.name)
            entry.apply(self._names)
            self._pending.append(entry)
            return entry

    def complete_change(self, entry: FolderChange) -> None:
        """Complete a change of the folder: from now on ``sync_names`` covers it."""
        with self._guard:
            done = dataclasses.replace(entry, completed=True)
            self._pending = [done if each is entry else each for each in self._pending]

    def submit_write(self, inode: int, offset: int, data: bytes) -> Written:
        """Start a write: half of it lands at once, the rest with :meth:`complete_write`."""
        with self._guard:
            file = self._inodes[inode]
            change = Written(offset, data, extends=offset + len(data) > len(file.volatile))
            file.unflushed.append(change)
            dataclasses.replace(change, data=data[: len(data) // 2]).apply(file.volatile)
            return change

    def complete_write(self, inode: int, submitted: Written, data: bytes) -> None:
        """End a write. ``data`` is the buffer as it is now: if it was changed meanwhile, the second half shows it."""
        with self._guard:
            file = self._inodes[inode]
            half = len(data) // 2
            landed = dataclasses.replace(submitted, data=submitted.data[:half] + data[half:], completed=True)
            landed.apply(file.volatile)
            file.unflushed = [landed if each is submitted else each for each in file.unflushed]

    def submit_flush(self, inode: int) -> list[Change]:
        """Start a flush and return what it covers: the changes that are complete now."""
        with self._guard:
            return [change for change in self._inodes[inode].unflushed if change.completed]

    def complete_flush(self, inode: int, covered: list[Change]) -> None:
        """End a flush: what it covers is durable."""
        with self._guard:
            file = self._inodes[inode]
            known = {id(change) for change in covered}
            file.durable = replay(file.durable, (c for c in file.unflushed if id(c) in known))
            file.unflushed = [change for change in file.unflushed if id(change) not in known]

    def forget(self, inode: int) -> None:
        """Take changes that are not durable for durable ones, as a page cache does after a flush that failed."""
        with self._guard:
            self._inodes[inode].unflushed.clear()

    def submit_sync(self) -> list[FolderChange]:
        """Start to sync the folder and return what that covers: the changes that are complete now."""
        with self._guard:
            return closed(self._pending, (i for i, entry in enumerate(self._pending) if entry.completed))

    def complete_sync(self, covered: list[FolderChange]) -> None:
        """End to sync the folder: what that covers is durable."""
        with self._guard:
            known = {id(entry) for entry in covered}
            for entry in self._pending:
                if id(entry) in known:
                    entry.apply(self._durable_names)
            self._pending = [entry for entry in self._pending if id(entry) not in known]

    def try_lock(self, inode: int, holder: Holder, *, shared: bool) -> bool:
        """``flock`` without waiting; a lock that is held is converted."""
        with self._guard:
            self._pass_time()
            locks = self._inodes[inode].locks
            others = [other_shared for other, other_shared in locks.items() if other is not holder]
            if others and not (shared and all(others)):
                return False
            locks[holder] = shared
            return True

    def unlock(self, inode: int, holder: Holder) -> None:
        with self._guard:
            self._inodes[inode].locks.pop(holder, None)

    def boundary(self, description: str) -> None:
        """Note that an operation was submitted or completed, and show the disk to the observer."""
        with self._guard:
            self._pass_time()
            if self.observer is not None:
                self.observer(self.snapshot(description))

    def _pass_time(self) -> None:
        self._patience -= 1
        if self._patience <= 0:
            ghosts, self._ghosts = self._ghosts, []
            for inode, change in ghosts:
                self.complete_write(inode.number, change, change.data)
                inode.locks.pop(change, None)
