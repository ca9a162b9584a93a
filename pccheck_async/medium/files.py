# SPDX-License-Identifier: Apache-2.0
"""The medium on a real filesystem: O_DIRECT where it works, buffered I/O and fdatasync where it does not."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pccheck_async.errors import (
    ClosedError,
    DurabilityUnknownError,
    StoreFullError,
    folder_error,
    lock_error,
    read_error,
    write_error,
)
from pccheck_async.medium.base import File, Medium, MediumFacts, MediumStatistics, Part
from pccheck_async.medium.filesystem import probe
from pccheck_async.medium.folder import Folder, largest_file
from pccheck_async.telemetry import StageClock, work, write
from pccheck_async.transfer import abandoned_in_child
from pccheck_async.transfer.operations import ChainStep, Kind, Operations, Step

__all__ = ["REMOVED", "Files", "map_error"]

T = TypeVar("T")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REMOVED = "the file was removed while the store was open; open it again"
_ZEROS = "the filesystem reserves no space, which is taken by writing zeros (%s)"
_BUFFERED = "%s: buffered I/O with fdatasync: %s"
_WRITE, _FLUSH, _UNLOCK, _LINKED = Kind.WRITE, Kind.FLUSH, Kind.UNLOCK, Kind.LINKED
_SPANS = {_WRITE: "write", _FLUSH: "flush"}


class Files(Medium):
    """The files of one folder, transferred by an I/O backend; ``reason`` for that backend is for the statistics."""

    chains = True

    def __init__(self, folder: str | os.PathLike[str], operations: Operations, reason: str = "") -> None:
        self._folder = Folder(folder)
        self._operations = operations
        self._reason = reason
        self._facts = MediumFacts(1, 1, direct=False, why="not opened yet")
        self._files: set[File] = set()
        self._closed = False
        abandoned_in_child.add(self)
        self._clock = StageClock("write", "read", "flush")

    @contextmanager
    def _errors(self, name: str, mapped: Callable[[OSError, Path], OSError]) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise mapped(error, self._folder.path / name) from error

    async def prepare(self, *, create: bool) -> MediumFacts:
        if create:
            await self._make_folder()
        self._facts = await self._operations.call(probe, self._folder.path, create)
        if not self._facts.direct:
            write("buffered", _BUFFERED, self._folder.path, self._facts.why)
        return self._facts

    async def _make_folder(self) -> None:
        try:
            await self._operations.call(self._folder.create)
            await self._operations.call(self._folder.hold)
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise map_error(error, self._folder.path) from error
            raise folder_error(error, self._folder.path) from error

    async def names(self) -> list[str]:
        return await self._look("", self._folder.names) or []

    async def read_small(self, name: str) -> bytes | None:
        return await self._look(name, self._folder.read_small, name)

    async def _look(self, name: str, function: Callable[..., T], *arguments: object) -> T | None:
        """Call a function on a helper thread; return its result, or None if there is no such file or folder."""
        with self._errors(name, read_error), suppress(FileNotFoundError, NotADirectoryError):
            return await self._operations.call(function, *arguments)
        return None

    async def replace(self, name: str, data: bytes, *, keep_as: str = "") -> None:
        try:
            with self._clock.timed("flush"):
                await self._operations.call(self._folder.replace, name, data, keep_as)
        except OSError as error:  # which may be about the new file, that has another name
            raise map_error(error, self._folder.path / os.path.basename(error.filename or name)) from error

    async def remove(self, name: str) -> None:
        with self._errors(name, map_error):
            await self._operations.call(self._folder.unlink, name)

    async def sync_names(self) -> None:
        with self._errors("", map_error), self._clock.timed("flush"):
            await self._operations.call(self._folder.sync)

    async def reserve(self, name: str, nbytes: int) -> File:
        reserved = not self._folder.zeros
        with self._errors(name, map_error):
            file = await self._obtain(name, self._folder.make, os.O_RDWR | self._direct_flag, nbytes)
        if reserved and self._folder.zeros:
            with suppress(Exception):  # a logging handler failed: the caller still needs the file
                write("zeros", "%s: %s", self._folder.path, _ZEROS % self._folder.zeros)
        return file

    async def open(self, name: str, *, writable: bool) -> File:
        flags = (os.O_RDWR if writable else os.O_RDONLY) | self._direct_flag
        with (
            self._errors(name, write_error if writable else read_error),
            suppress(FileNotFoundError, NotADirectoryError),
        ):
            return await self._obtain(name, self._folder.open, flags)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(self._folder.path / name))

    async def lock(self, file: File, *, shared: bool = False) -> bool:
        # Without waiting flock returns at once, so it needs no helper thread.
        try:
            fcntl.flock(file.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            mapped = read_error if shared else write_error
            raise mapped(lock_error(error), self._folder.path / file.name) from error
        return True

    async def unlock(self, file: File) -> None:
        try:
            fcntl.flock(file.fd, fcntl.LOCK_UN)
        except OSError as error:
            raise write_error(error, self._folder.path / file.name) from error

    def stamp(self, file: File) -> object:
        try:
            facts = os.fstat(file.fd)
        except OSError:
            return None
        return facts.st_size, facts.st_nlink, facts.st_mtime_ns, facts.st_ctime_ns

    def write(self, file: File, offset: int, data: memoryview) -> Coroutine[Any, Any, None]:
        return self._transfer("write", file, offset, data)

    def read(self, file: File, offset: int, into: memoryview) -> Coroutine[Any, Any, int]:
        return self._transfer("read", file, offset, into)

    async def _transfer(self, stage: Literal["write", "read"], file: File, offset: int, data: memoryview) -> Any:
        operations, writes = self._operations, stage == "write"
        move: Callable[[int, int, memoryview], Awaitable[Any]] = operations.write if writes else operations.read
        start, was_direct = time.perf_counter(), file.direct
        try:
            try:
                return await move(file.fd, offset, data)
            except OSError as error:
                if error.errno != errno.EINVAL or not was_direct:
                    raise
                self._give_up_direct(file)
                return await move(file.fd, offset, data)
        except OSError as error:
            raise (map_error if writes else read_error)(error, self._folder.path / file.name) from error
        finally:
            self._clock.note(stage, start, time.perf_counter(), len(data))

    async def make_durable(self, parts: Sequence[Part], *, ignore_cancellation: bool = False) -> None:
        files, steps = _steps(parts)
        done, refused = 0, list[File]()
        cancelled = unknown = False
        failure: OSError | None = None
        while done < len(steps):
            start = time.perf_counter()
            ended: list[Step] = []
            try:
                await self._operations.chain(steps[done:], ended)
            except asyncio.CancelledError:  # too late: it went on to its end
                cancelled = True
            except OSError as error:  # nothing of it happened
                failure = map_error(error, self._folder.path / files[done].name)
                failure.__cause__ = error
                unknown = _flushes(steps[:done])
                break
            failure = self._count(files[done:], steps[done:], ended, start)
            done += len(ended)
            if failure is None:
                continue
            last = done - 1
            if failure.errno != errno.EINVAL or steps[last][0] != _WRITE or files[last] in refused:
                unknown = _flushes(steps[:done]) or steps[last][0] == _LINKED
                break
            refused.append(files[last])
            self._give_up_direct(files[last])
            done = last  # once more, as it may have been for direct I/O
        if failure is not None and unknown:
            raise DurabilityUnknownError.of(failure) from failure
        if cancelled and not ignore_cancellation:
            raise asyncio.CancelledError
        if failure is not None:
            raise failure

    async def close(self, file: File | None = None) -> None:
        if file is None:
            self._closed = True
            for each in list(self._files):
                self._close_file(each)
            self._folder.close()
        elif file in self._files:
            self._close_file(file)

    def _close_file(self, file: File) -> None:
        self._files.remove(file)
        with suppress(OSError):
            # Not left to the descriptor's end: the kernel may hold the open file a moment longer than the request.
            fcntl.flock(file.fd, fcntl.LOCK_UN)
        self._folder.close_file(file.fd)
        file.fd, file.mapping = -1, None

    def abandon(self) -> None:
        self._closed = True
        self._folder.abandon()
        for file in self._files:
            file.fd, file.mapping = -1, None
        self._files.clear()

    def statistics(self) -> MediumStatistics:
        why = self._facts.why
        if self._folder.zeros:
            why += f"; {_ZEROS % self._folder.zeros}"
        return MediumStatistics(
            backend=self._operations.name,
            direct=self._facts.direct,
            why=f"{why}; {self._reason}" if self._reason else why,
            **self._clock.stages(),
        )

    @property
    def _direct_flag(self) -> int:
        return os.O_DIRECT if self._facts.direct else 0

    async def _obtain(self, name: str, opening: Callable[..., int], *arguments: int) -> File:
        # A forgotten descriptor would keep its lock.
        fd = await self._operations.obtain(self._folder.close_file, opening, name, *arguments)
        facts = os.fstat(fd)
        file = File(name, facts.st_size, fd, bool(self._direct_flag), (facts.st_dev, facts.st_ino))
        self._files.add(file)
        if self._closed:
            self.abandon()
            raise ClosedError(f"{self._folder.path} was closed meanwhile")
        return file

    def _count(
        self, files: Sequence[File], steps: Sequence[ChainStep], ended: Sequence[Step], start: float
    ) -> OSError | None:
        """Add the steps of a chain that ended to the statistics; return the error that ended the chain, or None."""
        writes = nbytes = flushes = 0
        writing = flushing = 0.0
        now = work.get()
        recorded = now.recorder is not None
        for step, (_, end) in zip(steps, ended, strict=False):
            kind = step[0]
            if kind == _WRITE:
                writes += 1
                nbytes += len(step[3])
                writing += end - start
            elif kind == _FLUSH:
                flushes += 1
                flushing += end - start
            if recorded and kind in _SPANS:
                now.record(_SPANS[kind], start, end, len(step[3]) if kind == _WRITE else 0)
            start = end
        self._clock.add("write", writes, nbytes, writing)
        self._clock.add("flush", flushes, 0, flushing)
        if not ended or ended[-1][0] >= 0:
            return None
        number = -ended[-1][0]
        removed = steps[len(ended) - 1][0] == _LINKED
        error = OSError(number, REMOVED if removed else os.strerror(number))
        failure = map_error(error, self._folder.path / files[len(ended) - 1].name)
        failure.__cause__ = error
        return failure

    def _give_up_direct(self, file: File) -> None:
        """Turn direct I/O off, also for files opened later: the filesystem accepted it and then refused a transfer."""
        if not file.direct:
            return  # another transfer of this file did it meanwhile
        fcntl.fcntl(file.fd, fcntl.F_SETFL, fcntl.fcntl(file.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        file.direct = False
        if self._facts.direct:
            why = "the filesystem accepted O_DIRECT and then refused a transfer (EINVAL)"
            self._facts = replace(self._facts, direct=False, why=why)
            with suppress(Exception):  # of a handler of the log: it would end a write that goes on
                write("direct_refused", _BUFFERED, self._folder.path, why)


def map_error(error: OSError, path: Path) -> OSError:
    """Map the ``OSError`` of a failed change to WriteError or StoreFullError, keeping errno and naming the file."""
    if error.errno in _NO_SPACE:
        why = largest_file() if error.errno == errno.EFBIG else error.strerror
        return StoreFullError(error.errno, f"{why}; committed checkpoints are untouched", os.fspath(path))
    return write_error(error, path)


def _flushes(steps: Sequence[ChainStep]) -> bool:
    """Whether one of these steps is a flush, so that the failure of a later step leaves durability unknown."""
    return any(kind == _FLUSH for kind, *_ in steps)


def _steps(parts: Sequence[Part]) -> tuple[list[File], list[ChainStep]]:
    """Return the files of all steps, and the steps that make ``parts`` durable; the last part's file stays locked."""
    files: list[File] = []
    steps: list[ChainStep] = []
    for file, _ in parts:  # first whether they have names: else all could succeed, and be gone with the descriptors
        files.append(file)
        steps.append((_LINKED, file.fd))
    for file, pieces in parts:
        fd = file.fd
        for offset, data in pieces:
            steps.append((_WRITE, fd, offset, data))
        steps += ((_FLUSH, fd), (_UNLOCK, fd))
        files += [file] * (len(pieces) + 2)
    return files, steps[:-1]
