# SPDX-License-Identifier: Apache-2.0
"""The memory tier: a second store, on tmpfs, in which a checkpoint is captured, and from which the disk is written.

The store in memory outlives the process, not the machine. It is a store like the one on disk, with the same records,
checks and readers; but the disk's line (:class:`pccheck_async.format.Line`) decides which of its checkpoints are valid.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from pccheck_async.engine.config import MemoryTier
from pccheck_async.errors import CheckpointError, CorruptStoreError, StoreError, StoreFullError
from pccheck_async.format import Entry, Line
from pccheck_async.format.record import IDENTITY_NAME
from pccheck_async.medium.filesystem import IN_MEMORY, filesystem_type, free_bytes
from pccheck_async.medium.mapped import MappedFiles
from pccheck_async.store import Retention, SlotLease, Store, Written, open_store
from pccheck_async.telemetry import write
from pccheck_async.transfer import available_memory
from pccheck_async.transfer.operations import Operations

__all__ = [
    "MEMORY_ROOT",
    "ORIGIN_NAME",
    "Memory",
    "Staged",
    "check_own_folder",
    "memory_folder",
    "memory_prefix",
    "memory_root",
    "note_ignored",
    "on_the_line",
    "warn_of_memory",
]

T = TypeVar("T")
MEMORY_ROOT = "/dev/shm"
_GIB = 1 << 30
ORIGIN_NAME = "origin"
"""Name of the file in memory that holds the path of the store on disk, for people."""
_HELD_SECONDS = 1.0
_FOR_ROUNDS = 2
"""Checkpoints that are kept in addition for copies on other hosts: the last one copied, and the one being copied."""
_AT_ONCE = 16 << 20
"""Bytes of the largest slot that is created while its first checkpoint waits: some 10 ms."""


@dataclass(slots=True, eq=False)
class Staged:
    """A checkpoint in its slot in memory, which is not reused until :meth:`release`.

    Attributes:
        store: The store in memory.
        view: The bytes of the payload.
        manifest: The bytes of the manifest.
        entry: The entry of the checkpoint for the record in memory.
        committed: Whether a record in memory names it.
    """

    store: Store
    entry: Entry
    view: memoryview
    manifest: bytes
    committed: bool = True

    def release(self) -> None:
        """Allow the slot to be reused. Called once."""
        self.store.slots.table.stop_reading(self.entry.slot)


def memory_root(tier: MemoryTier) -> Path:
    """Return the tmpfs that a memory tier uses."""
    return Path(MEMORY_ROOT if tier.path == "auto" else tier.path)


def memory_prefix() -> str:
    """Return the prefix of the names of this user's folders in memory."""
    return f"pccheck-{os.geteuid()}-"


def on_the_line(entries: Iterable[Entry], own: Line | None, disk: Line | None) -> list[Entry]:
    """Return the ``entries`` of a store in memory with the line ``own`` that the line ``disk`` of the disk accepts."""
    if own is None or disk is None:
        return []
    return [
        entry
        for entry in entries
        if (run := own.run_of(entry.counter)) is not None and disk.accepts(run, entry.counter)
    ]


def note_ignored(steps: Sequence[int], folder: Path, beyond: Line | None) -> None:
    """Log which steps in memory do not count. ``beyond``: as for :meth:`.BucketState.beyond`."""
    text = "checkpoints of steps %s in %s do not count: the store on disk does not descend from their run"
    if beyond is not None:
        text += ", or another run has gone on from it, whose checkpoints are in the bucket"
    write("memory_ignored", text, steps, folder)


def memory_folder(root: Path, path: Path, store_id: str, name: str = IDENTITY_NAME) -> Path:
    """Return the folder in memory that belongs to the store at ``path``, or to the group's folder there.

    The folder's name depends on the id, and on inode number and ctime of the file ``store.json`` or ``group.json``: a
    copy of a store, or a backup that was put back, has the same id, and other checkpoints. That file is never changed;
    the ctime is needed as a filesystem may soon give its inode number to another file.
    """
    try:
        found = os.stat(path / name)
    except OSError as error:
        raise StoreError(
            f"a tier in memory needs a store in a folder, which {path} is not: {error.strerror}"
        ) from error
    identity = f"{store_id} {found.st_ino} {found.st_ctime_ns}"
    return root / f"{memory_prefix()}{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def warn_of_memory(path: str, store: Store, find: Callable[[Path, Store], Path]) -> None:
    """Log, for an engine without a memory tier, that the store was used with one, whose folder is still there.

    ``find`` returns that folder, as for :meth:`Memory.open`.
    """
    with suppress(CheckpointError, OSError):
        folder = find(Path(MEMORY_ROOT), store)
        if folder.is_dir():
            text = (
                "%s was used with memory=MemoryTier(), and newer checkpoints may be in %s (`pccheck memory ls`): this "
                "engine has no memory=, and goes on from the disk; after its first save they do not count any more"
            )
            write("memory_ignored", text, path, folder)


def _warn_of_former(root: Path, folder: Path, path: str) -> None:
    """Log the folders in memory that belong to a former store at ``path``: they take memory, and are not valid."""
    below = Path(*folder.relative_to(root).parts[1:], ORIGIN_NAME)
    for other in root.glob(f"{memory_prefix()}*"):
        with suppress(OSError, StoreError):
            check_own_folder(other)
            if other not in (folder, folder.parent) and (other / below).read_bytes() == os.fsencode(path):
                text = (
                    "%s is of %s before its files were replaced, or got another owner, mode or link: it does not "
                    "count, and takes memory until `pccheck memory clear`"
                )
                write("memory_ignored", text, other, path)


def check_own_folder(folder: Path) -> None:
    """Raise StoreError unless ``folder`` is a folder, no link, of this user, and closed to all others."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise StoreError(
            f"{folder} is not a folder of this user's alone: another one may have made it, and nothing in it is "
            "trusted; remove it, or give MemoryTier(path=...)"
        )


class Memory:
    """The memory tier of an open engine. Coroutines run on its loop. Made by :meth:`open`.

    Attributes:
        store: The store in memory.
        folder: The folder of that store.
        turn: Held by one checkpoint at a time, from its lease to its commit in memory.
        tier: The settings.
        off: Why no more checkpoints are saved in memory; empty while they are.
        on_off: Called with ``off`` when the tier is turned off.
    """

    def __init__(
        self,
        tier: MemoryTier,
        disk: Store,
        store: Store,
        folder: Path,
        open_beside: Callable[[str], Awaitable[Store]],
    ) -> None:
        self.store = store
        self.folder = folder
        self.turn = asyncio.Lock()
        self.off = ""
        self.tier = tier
        self._disk = disk
        self._removed = False  # by closing
        self._beyond: Line | None = None
        self._growing: asyncio.Task[None] | None = None
        self._held_until = 0.0  # by readers
        self._open_beside = open_beside
        self._beside: dict[Path, Store] = {}
        self.on_off: Callable[[str], object] = lambda _: None

    def adopt_line(self, beyond: Line | None = None) -> None:
        """Apply the line of the store on disk, and log which checkpoints in memory it makes invalid.

        Called after the opening, if this process saves alone. ``beyond``: as for :meth:`.BucketState.beyond`; until
        this run writes its own line, checkpoints in memory have to be on that one, too.
        """
        store, self._beyond = self.store, beyond
        store.committed.line = store.committed.record.line
        if ignored := [entry.step for entry in store.committed.entries if entry not in self.entries]:
            note_ignored(ignored, self.folder, beyond)

    @classmethod
    async def open(
        cls,
        tier: MemoryTier,
        path: str,
        disk: Store,
        operations: Operations,
        in_flight: int,
        lock_timeout: float,
        find: Callable[[Path, Store], Path],
        version: int,
    ) -> Memory:
        """Open the store in memory that belongs to ``disk``, or make it; one that is damaged is replaced.

        Args:
            tier: The settings.
            path: The path of the store on disk.
            disk: The store on disk.
            operations: The engine's threads.
            in_flight: Number of slots in addition to those of the checkpoints that are kept.
            lock_timeout: Seconds to wait for another writer.
            find: Returns the folder of the store in memory, given the root of the tier and ``disk``; called on a thread
                of the engine's.
            version: Format version of the records in memory.

        Raises StoreError: its place is not in memory, or cannot be trusted.
        """
        root = memory_root(tier)

        def place() -> Path:
            if not root.is_dir() or filesystem_type(root) not in IN_MEMORY:
                raise StoreError(f"MemoryTier needs a tmpfs, and {root} is none: give MemoryTier(path=...) one")
            return find(root, disk)

        def prepare(folder: Path) -> None:
            while True:
                with suppress(FileNotFoundError):  # other ranks remove the folder of a group when they leave
                    for each in [each for each in (folder.parent, folder) if each != root]:
                        with suppress(FileExistsError):
                            each.mkdir(mode=0o700)
                        check_own_folder(each)
                    return

        async def open_there(folder: Path, origin: str, kept: int, in_flight: int) -> Store:
            await operations.call(prepare, folder)
            medium = MappedFiles(folder, operations, "the memory tier")
            try:
                store = await open_store(
                    medium,
                    path=folder,
                    retention=Retention(keep_last=kept),
                    max_in_flight=in_flight,
                    lock_timeout=lock_timeout,
                    ahead=False,
                    version=version,
                )
                if store.file.is_new:
                    await operations.call(_warn_of_former, root, folder, origin)
                    await medium.replace(ORIGIN_NAME, os.fsencode(origin))
                return store
            except BaseException:
                await medium.close()
                raise

        async def open_or_begin_anew(folder: Path, origin: str, kept: int, in_flight: int) -> Store:
            try:
                return await open_there(folder, origin, kept, in_flight)
            except CorruptStoreError as error:
                write("memory_damaged", "%s is damaged, and begun anew: %s", folder, error, error=str(error))
                await operations.call(shutil.rmtree, folder)
                return await open_there(folder, origin, kept, in_flight)

        def open_beside(name: str) -> Awaitable[Store]:
            return open_or_begin_anew(folder.parent / name, os.fspath(Path(path).parent / name), 1, 1)

        folder = await operations.call(place)
        kept = tier.keep_last + (_FOR_ROUNDS if tier.replicas else 0)
        return cls(tier, disk, await open_or_begin_anew(folder, path, kept, in_flight), folder, open_beside)

    async def open_beside(self, name: str) -> Store:
        """Open the store on this host for copies of another rank's checkpoints, or make it; for two checkpoints.

        That store is closed and removed with this tier's own.


        Raises the errors of :func:`open_store`.
        """
        self._beside[self.folder.parent / name] = store = await self._open_beside(name)
        return store

    async def remove_beside(self, name: str, operations: Operations) -> None:
        """Close and remove a store of :meth:`open_beside` whose records cannot be written any more."""
        folder = self.folder.parent / name
        await self._beside.pop(folder).medium.close()
        await operations.call(partial(shutil.rmtree, folder, ignore_errors=True))

    @property
    def entries(self) -> Sequence[Entry]:
        """The checkpoints in memory that the disk's line accepts, newest first."""
        if self._removed:
            return ()
        own = self.store.committed.line
        there = on_the_line(self.store.committed.entries, own, self._disk.committed.line)
        return there if self._beyond is None else on_the_line(there, own, self._beyond)

    @property
    def largest_counter(self) -> int:
        """The largest counter that the newest record on disk, or in memory, names; -1 for none."""
        return max(self._disk.committed.largest_counter, self.store.committed.largest_counter)

    async def follow_line(self, line: Line) -> None:
        """Drop the checkpoints that the disk's new line does not accept; if that fails, the tier is turned off."""
        async with self.turn:
            kept = {entry.counter for entry in self.entries}
            self.store.committed.line, self._beyond = line, None
            try:
                await self.store.amend(lambda entries: [entry for entry in entries if entry.counter in kept])
            except OSError as error:
                self.turn_off(error)

    @property
    def ready(self) -> bool:
        """Whether a checkpoint for memory alone is worth starting: the tier is on, and a slot is likely to be free."""
        return not self.off and self._growing is None and time.monotonic() >= self._held_until

    async def lease(self, nbytes: int) -> SlotLease | None:
        """Lease a slot of at least ``nbytes``; return None if there is no slot yet, or no memory for one.

        Without memory the tier is turned off. A large slot is created in the background, for later checkpoints: its
        pages take half a second per GiB. If readers hold slots, one more is created; if they hold that, too, nothing
        is saved in memory for a while.
        """
        if self.off or self._growing is not None:
            return None
        # A group would vote on it in vain.
        creates = nbytes <= _AT_ONCE or self.store.committed.record.parts is not None
        try:
            if self.store.slots.table.decide(nbytes).create:
                self.check_room(self.store, nbytes)
            lease = await self.store.reserve_now(nbytes, creates=creates)
        except OSError as error:
            self._failed(error)
            return None
        if lease is None and creates:
            self._note_held()
        elif lease is None:
            self._growing = asyncio.create_task(self._grow(nbytes))
        return lease

    async def _grow(self, nbytes: int) -> None:
        try:
            lease = await self.store.reserve_now(nbytes, creates=True)
            if lease is None:
                self._note_held()
            else:
                await self.store.release(lease)
        except OSError as error:
            self._failed(error)
        finally:
            self._growing = None

    def _note_held(self) -> None:
        """Save nothing here for a while: readers hold all slots."""
        if not self._held_until:
            text = "readers of other processes hold all slots in %s: meanwhile checkpoints are saved on disk alone"
            write("readers", text, self.folder)
        self._held_until = time.monotonic() + _HELD_SECONDS

    def _failed(self, error: OSError) -> None:
        table = self.store.slots.table
        if isinstance(error, StoreFullError) and table.count >= table.most:
            self._note_held()  # only the slot that readers cost is missing
        else:
            self.turn_off(error)

    def check_room(self, store: Store, nbytes: int) -> None:
        """Raise StoreFullError if tmpfs or process have no room for the slots that a store still has to create.

        ``nbytes`` is the size of a slot.
        """
        table = store.slots.table
        missing = max(1, table.most - table.count)
        there = min(free_bytes(self.folder), available_memory())
        if (needed := missing * nbytes) > there:
            total = -(-(table.most * nbytes) // _GIB)
            raise StoreFullError(
                errno.ENOSPC,
                f"{needed} bytes are needed for {missing} slots, and there are {there}; a tmpfs is enlarged by `mount "
                f"-o remount,size={total}G {self.folder.parent}`, that of a container by --shm-size={total}g",
                str(self.folder),
            )

    def turn_off(self, error: Exception) -> None:
        """Save no more checkpoints in memory, after an error; they are still saved on disk."""
        if not self.off:
            self.off = str(error)
            write("memory_off", "the memory tier is off until the next opening: %s", error, error=str(error))
            self.on_off(self.off)

    async def commit(
        self, written: Written, manifest: bytes, commit: Callable[[Written], Awaitable[T]]
    ) -> tuple[Staged, T | None]:
        """Commit a checkpoint in memory by ``commit``, and hold its slot against reuse.

        Returns the staged checkpoint, to be released, and the result of ``commit``. Called under :attr:`turn`.

        After an OSError the tier is turned off, and the checkpoint is returned as not committed, with a result of None;
        its bytes are in the slot all the same. Raises other errors of ``commit``.
        """
        lease, entry = written.lease, written.entry
        self.store.slots.table.hold(lease.slot)
        assert lease.file.mapping is not None
        staged = Staged(self.store, entry, lease.file.mapping.view[: entry.nbytes], manifest)
        try:
            return staged, await commit(written)
        except OSError as error:
            self.turn_off(error)
            staged.committed = False
            return staged, None
        except BaseException:
            staged.release()
            raise

    async def drop(self, counters: Collection[int]) -> None:
        """Drop checkpoints that were removed or rejected on disk."""
        self.store.committed.rejected |= self._disk.committed.rejected
        async with self.turn:
            await self.store.amend(lambda entries: [entry for entry in entries if entry.counter not in counters])

    @property
    def newer(self) -> Entry | None:
        """The newest valid checkpoint in memory, if it is newer than all on disk and not rejected; else None."""
        newest, largest = next(iter(self.entries), None), self._disk.committed.largest_counter
        return newest if newest is not None and newest.counter > largest and not newest.rejected else None

    def is_disposable(self, *, begun: bool) -> bool:
        """Whether nothing in memory would be missed: the disk has a checkpoint as new, and none here is passed over.

        For a process that saves alone. Once its run has ``begun``, checkpoints that its line does not accept are
        ignored.
        """
        counts = begun or len(self.entries) == len(self.store.committed.entries)
        return counts and self.newer is None

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots in memory, those of other ranks' copies included."""
        return sum(store.statistics().slot_bytes for store in (self.store, *self._beside.values()))

    async def close_files(self) -> None:
        """Close the files of the stores in memory, and leave their contents as they are."""
        for store in (self.store, *self._beside.values()):
            await store.medium.close()

    def abandon(self) -> None:
        """Close every descriptor, in a forked child."""
        for store in (self.store, *self._beside.values()):
            store.medium.abandon()

    async def close(self, operations: Operations, *, removes: bool) -> None:
        """Close the stores in memory; with ``removes`` remove their folders, unless the settings keep them."""
        if self._growing is not None:
            await asyncio.wait((self._growing,))
        await self.close_files()
        if removes and not self.tier.keep_after_close:
            self._removed = True
            await operations.call(self._remove)

    def _remove(self) -> None:
        for folder in (self.folder, *self._beside):
            shutil.rmtree(folder, ignore_errors=True)
        if self.folder.parent != memory_root(self.tier):  # that of a group: the last rank removes it
            with suppress(OSError):
                self.folder.parent.rmdir()
