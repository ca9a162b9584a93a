"""The writer on a real filesystem: O_DIRECT where it works, buffered I/O and fdatasync where it does not."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias, TypeVar

import aiofiles

from pccheck_async.errors import ClosedError, StoreFullError, read_error, write_error
from pccheck_async.layout import COMMIT_NAME, REGION_NBYTES
from pccheck_async.logs import write
from pccheck_async.memory import PAGE_BYTES, map_memory
from pccheck_async.operations.base import Flush, Operations, Step, Unlock, Write
from pccheck_async.regular_file import open_regular
from pccheck_async.statistics import StageClock
from pccheck_async.uninterrupted import uninterrupted
from pccheck_async.writer.base import File, FileSystemFacts, Part, Writer, WriterStatistics
from pccheck_async.writer.filesystem import IN_MEMORY, WEAK_RESERVATION, direct_alignment, filesystem_type

__all__ = ["PosixWriter"]

T = TypeVar("T")
_FileStep: TypeAlias = tuple[File, Write | Flush | Unlock]
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MODE = 0o666  # the user's umask decides
_FORK_SECONDS = 1.0
_opening = threading.Lock()
"""Held while a file is opened: a child that is forked meanwhile would keep it, and its lock, unknown."""
_MOST_SMALL_BYTES = 1 << 20
"""Of a file that is read as a whole; a store's have some hundreds."""
_BUFFERED = "%s: buffered I/O with fdatasync: %s"
_writers: weakref.WeakSet[PosixWriter] = weakref.WeakSet()


class PosixWriter(Writer):
    """The files of one folder, moved by an operations engine; ``reason`` is why by that one, for the statistics."""

    persists_at_once = True

    def __init__(self, folder: str | os.PathLike[str], operations: Operations, reason: str = "") -> None:
        # Absolute: the process may change its folder, and then this name would be another store's.
        self._folder = Path(folder).absolute()
        self._handle: int | None = None  # of the folder; so it is this one that is written to, wherever it is moved
        self._operations = operations
        self._reason = reason
        self._facts: FileSystemFacts | None = None
        self._files: set[File] = set()
        self._fds: set[int] = set()
        self._closed = False
        _writers.add(self)
        self._clock = StageClock("write", "read", "flush")

    async def prepare(self, *, create: bool) -> FileSystemFacts:
        if create:
            await self._change(self._folder, _make_folders, self._folder)
            await self._change(self._folder, self._open_folder)
        self._facts = await self._operations.call(_probe, self._folder, create)
        if not self._facts.direct:
            write(logging.INFO, "buffered", _BUFFERED, self._folder, self._facts.why)
        return self._facts

    async def names(self) -> list[str]:
        try:
            where = self._folder if self._handle is None else self._handle
            return sorted(await self._operations.call(os.listdir, where))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise read_error(error, self._folder) from error

    async def read_small(self, name: str) -> bytes | None:
        try:
            async with aiofiles.open(self._named(name), "rb", opener=self._open) as file:
                data: bytes = await file.read(_MOST_SMALL_BYTES + 1)
                if len(data) > _MOST_SMALL_BYTES:
                    raise OSError(errno.EFBIG, "too large for what it is")
                return data
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise read_error(error, self._folder / name) from error

    async def write_small(self, name: str, data: bytes) -> None:
        path = self._folder / name
        try:
            async with aiofiles.open(self._named(name), "wb", opener=self._open) as file:
                await file.write(data)
                await file.flush()  # out of Python's buffer first: fsync sees only what the kernel has
                await self._operations.call(os.fsync, file.fileno())
        except OSError as error:
            raise self._mapped(error, path) from error

    async def rename(self, name: str, to: str) -> None:
        await self._change(self._folder / to, self._replace, self._named(name), self._named(to))

    async def unlink(self, name: str) -> None:
        await self._change(self._folder / name, self._unlink, self._named(name))

    async def sync_folder(self) -> None:
        with self._clock.timed("flush"):
            if self._handle is None:
                await self._change(self._folder, _sync_folder, self._folder)
            else:
                await self._change(self._folder, os.fsync, self._handle)

    async def create(self, name: str, nbytes: int) -> File:
        path = self._folder / name
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | self._direct_flag
        return await uninterrupted(
            self._keep(name, self._change(path, self._created, self._named(name), flags, nbytes))
        )

    async def open(self, name: str, *, writable: bool) -> File:
        path = self._folder / name
        flags = (os.O_RDWR if writable else os.O_RDONLY) | self._direct_flag
        try:
            return await uninterrupted(
                self._keep(name, self._operations.call(self._opened, self._open, self._named(name), flags))
            )
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path)) from None
        except OSError as error:
            raise (write_error if writable else read_error)(error, path) from error

    async def close_file(self, file: File) -> None:
        if file in self._files:
            self._files.remove(file)
            with suppress(OSError):
                # Not left to the descriptor's end: the kernel may hold the open file a moment longer than the request.
                fcntl.flock(file.fd, fcntl.LOCK_UN)
            self._fds.remove(file.fd)
            os.close(file.fd)
            file.fd = -1

    async def try_lock(self, file: File, *, shared: bool = False) -> bool:
        # Without waiting flock returns at once, so it needs no helper thread.
        try:
            fcntl.flock(file.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise (read_error if shared else write_error)(error, self._folder / file.name) from error
        return True

    async def unlock(self, file: File) -> None:
        try:
            fcntl.flock(file.fd, fcntl.LOCK_UN)
        except OSError as error:
            raise write_error(error, self._folder / file.name) from error

    async def write(self, file: File, offset: int, data: memoryview) -> None:
        try:
            with self._clock.timed("write", len(data)):
                await self._transfer(file, self._operations.write, offset, data)
        except OSError as error:
            raise self._mapped(error, self._folder / file.name) from error

    async def read(self, file: File, offset: int, into: memoryview) -> int:
        try:
            with self._clock.timed("read", len(into)):
                return await self._transfer(file, self._operations.read, offset, into)
        except OSError as error:
            raise read_error(error, self._folder / file.name) from error

    async def flush(self, file: File) -> None:
        try:
            with self._clock.timed("flush"):
                await self._operations.flush(file.fd)
        except OSError as error:
            raise self._mapped(error, self._folder / file.name) from error

    async def persist(self, parts: Sequence[Part], unsure: Callable[[OSError], None]) -> None:
        for file, _ in parts:
            if os.fstat(file.fd).st_nlink == 0:  # all of it would succeed, and be gone with the descriptor
                removed = OSError(errno.ENOENT, "the file was removed while the store was open; open it again")
                lost = self._mapped(removed, self._folder / file.name)
                unsure(lost)
                raise lost
        steps, done = _steps(parts), 0
        while done < len(steps):
            direct = [file for file, _ in parts if file.direct]
            start = time.perf_counter()
            ended: list[Step] = []
            refused = False
            try:
                await self._operations.chain([step for _, step in steps[done:]], ended)
                refused = _refused(steps[done:], ended, direct)
            except OSError as error:  # nothing of it happened
                raise self._mapped(error, self._folder / steps[done][0].name) from error
            finally:  # cancelled, too: it went on to its end
                failure = self._count(steps[done:], ended, start)
                done += len(ended)
                if failure is not None and not refused and any(isinstance(step, Flush) for _, step in steps[:done]):
                    unsure(failure)
            if refused:
                done -= 1
                self._give_up_direct(steps[done][0])
            elif failure is not None:
                raise failure

    async def close(self) -> None:
        self._closed = True
        for file in list(self._files):
            await self.close_file(file)
        handle, self._handle = self._handle, None
        if handle in self._fds:
            self._fds.remove(handle)
            os.close(handle)

    def abandon(self) -> None:
        self._closed = True
        for fd in self._fds:
            with suppress(OSError):
                os.close(fd)
        for file in self._files:
            file.fd = -1
        self._fds.clear()
        self._files.clear()

    def statistics(self) -> WriterStatistics:
        why = self._facts.why if self._facts else "not opened yet"
        return WriterStatistics(
            engine=self._operations.name,
            direct=self._facts is not None and self._facts.direct,
            why=f"{why}; {self._reason}" if self._reason else why,
            **self._clock.stages(),
        )

    @property
    def _direct_flag(self) -> int:
        return os.O_DIRECT if self._facts is not None and self._facts.direct else 0

    def _opened(self, function: Callable[..., int], *arguments: object) -> int:
        """Open on a helper thread, known to a forked child from the first moment on."""
        with _opening:
            fd = function(*arguments)
            self._fds.add(fd)
        return fd

    def _open_folder(self) -> None:
        if self._handle is None:
            self._handle = self._opened(os.open, self._folder, _FOLDER_FLAGS)

    def _named(self, name: str) -> str:
        """What a file is called for the folder's handle, or where there is none."""
        return name if self._handle is not None else os.fspath(self._folder / name)

    def _open(self, name: str, flags: int) -> int:
        return open_regular(name, flags, _MODE, dir_fd=self._handle)

    def _make(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE, dir_fd=self._handle)

    def _replace(self, name: str, to: str) -> None:
        os.replace(name, to, src_dir_fd=self._handle, dst_dir_fd=self._handle)

    def _unlink(self, name: str) -> None:
        os.unlink(name, dir_fd=self._handle)

    def _created(self, name: str, flags: int, nbytes: int) -> int:
        """Make a file on a helper thread; children may be forked while its space is reserved, which may take long."""
        fd = self._opened(self._make, name, flags)
        try:
            if nbytes:
                os.posix_fallocate(fd, 0, nbytes)
        except BaseException:
            self._fds.remove(fd)
            os.close(fd)
            self._unlink(name)
            raise
        return fd

    async def _keep(self, name: str, opening: Awaitable[int]) -> File:
        fd = await opening  # not interruptible: a descriptor that nobody knows would keep its lock
        file = File(name, os.fstat(fd).st_size, fd, direct=bool(self._direct_flag))
        self._files.add(file)
        if self._closed:
            self.abandon()
            raise ClosedError(f"{self._folder} was closed meanwhile")
        return file

    async def _transfer(
        self, file: File, move: Callable[[int, int, memoryview], Awaitable[T]], offset: int, data: memoryview
    ) -> T:
        was_direct = file.direct
        try:
            return await move(file.fd, offset, data)
        except OSError as error:
            if error.errno != errno.EINVAL or not was_direct:
                raise
            self._give_up_direct(file)
            return await move(file.fd, offset, data)

    def _count(self, steps: Sequence[_FileStep], ended: Sequence[Step], start: float) -> OSError | None:
        """Count what happened of a chain as if each step were an operation; return the error with which it ended."""
        for (_, step), end in zip(steps, ended, strict=False):
            if isinstance(step, Write):
                self._clock.note("write", start, end.ended, len(step.data))
            elif isinstance(step, Flush):
                self._clock.note("flush", start, end.ended)
            start = end.ended
        if not ended or (error := ended[-1].error) is None:
            return None
        failure = self._mapped(error, self._folder / steps[len(ended) - 1][0].name)
        failure.__cause__ = error
        return failure

    def _give_up_direct(self, file: File) -> None:
        """Turn direct I/O off where a filesystem accepted the flag and then refuses the transfer."""
        if not file.direct or self._facts is None:
            return  # another transfer of this file did it meanwhile
        fcntl.fcntl(file.fd, fcntl.F_SETFL, fcntl.fcntl(file.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        file.direct = False
        if self._facts.direct:
            why = "the filesystem accepted O_DIRECT and then refused a transfer (EINVAL)"
            self._facts = FileSystemFacts(self._facts.block_bytes, self._facts.memory_alignment, direct=False, why=why)
            write(logging.WARNING, "direct_refused", _BUFFERED, self._folder, why)

    async def _change(self, path: Path, function: Callable[..., T], *arguments: object) -> T:
        try:
            return await self._operations.call(function, *arguments)
        except OSError as error:
            raise self._mapped(error, path) from error

    @staticmethod
    def _mapped(error: OSError, path: Path) -> OSError:
        if error.errno in _NO_SPACE:
            return StoreFullError(error.errno, f"{error.strerror}; the last checkpoint is untouched", os.fspath(path))
        return write_error(error, path)


def _steps(parts: Sequence[Part]) -> list[_FileStep]:
    steps: list[_FileStep] = []
    for file, pieces in parts:
        steps += [(file, Write(file.fd, offset, data)) for offset, data in pieces]
        steps += [(file, Flush(file.fd)), (file, Unlock(file.fd))]
    return steps[:-1]


def _refused(steps: Sequence[_FileStep], ended: Sequence[Step], direct: Sequence[File]) -> bool:
    """Whether a write failed in the way in which direct ones are refused."""
    file, step = steps[len(ended) - 1]
    error = ended[-1].error
    return error is not None and error.errno == errno.EINVAL and isinstance(step, Write) and file in direct


def _make_folders(folder: Path) -> None:
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        _sync_folder(new.parent)  # a store whose folder vanishes with the power was never there


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, _FOLDER_FLAGS)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _probe(folder: Path, create: bool) -> FileSystemFacts:
    """Find out by trying: the flag may be refused at open, or only at the first transfer."""
    kind = filesystem_type(folder)
    if kind in IN_MEMORY:
        return _buffered(f"{kind} lies in memory")
    try:
        fd, writable = _open_probe(folder, create)
    except OSError as error:
        return _buffered(f"O_DIRECT is refused at open ({error.strerror})")
    try:
        memory_alignment, block = direct_alignment(fd)
        if block > REGION_NBYTES or block & (block - 1):  # XFS: whole allocation units where it copies on write
            return _buffered(f"O_DIRECT takes blocks of {block} bytes here; a store's are powers of two up to 64 KiB")
        with map_memory(block) as memory, memoryview(memory)[:block] as view:
            if writable:
                os.pwrite(fd, view, 0)
            else:
                os.preadv(fd, [view], 0)
    except OSError as error:
        return _buffered(f"O_DIRECT is refused at the first transfer ({error.strerror})")
    finally:
        os.close(fd)
    reservation = "; space reserved here may still be missing later" if kind in WEAK_RESERVATION else ""
    return FileSystemFacts(
        block,
        memory_alignment,
        direct=True,
        why=f"O_DIRECT works on this {kind} in blocks of {block} bytes{reservation}",
    )


def _open_probe(folder: Path, create: bool) -> tuple[int, bool]:
    """An existing store is probed by reading, so that opening it writes nothing; a new folder by a nameless file."""
    flags = os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return open_regular(folder / COMMIT_NAME, os.O_RDONLY | os.O_DIRECT), False
    except FileNotFoundError:
        if not create:
            raise
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | flags, 0o600), True
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    probe = folder / f".probe-{os.getpid()}"
    fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o600)
    probe.unlink()
    return fd, True


def _buffered(why: str) -> FileSystemFacts:
    return FileSystemFacts(PAGE_BYTES, 1, direct=False, why=why)


_held_by_fork = threading.local()


def _before_fork() -> None:
    _held_by_fork.it = _opening.acquire(timeout=_FORK_SECONDS)


def _after_fork() -> None:
    if _held_by_fork.it:
        _opening.release()


def _abandon_in_child() -> None:
    # The child shares the parent's open files, and with them its locks: an orphaned DataLoader worker must not keep
    # them.
    for writer in list(_writers):
        writer.abandon()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
os.register_at_fork(after_in_child=_abandon_in_child)
