# SPDX-License-Identifier: Apache-2.0
"""Operations on bytes, submitted in batches: the base of both backends, and the backend in C.

A call adds an operation to the batch of the current loop iteration, which is submitted as a whole. A cancelled
operation is stopped if possible, and then *waited for*: when the await ends, cancelled or not, no part of the operation
is running, so that its buffer may be reused (invariant I9 of :mod:`pccheck_async.store`).
"""

from __future__ import annotations

import abc
import asyncio
import errno
import itertools
import os
from collections.abc import Awaitable, Callable, Sequence
from enum import IntEnum
from typing import Any, TypeAlias, TypeVar

from pccheck_async.transfer.operations.worker_threads import WorkerThreads

_why_not: ImportError | None = None
try:
    from pccheck_async import _ext
except ImportError as error:
    _why_not = error

__all__ = ["MOST_BYTES_ON_LOOP", "ChainStep", "Kind", "NativeOperations", "Operations", "Step"]

T = TypeVar("T")
MOST_BYTES_ON_LOOP = 256 << 10
"""Most bytes that are copied on the loop's thread: faster than waking up another thread, and then this one again."""


class Kind(IntEnum):
    """Kinds of operations and of steps in a chain, numbered as in the extension."""

    WRITE = 0
    READ = 1
    FLUSH = 2
    GATHER = 3
    SCATTER = 4
    CHECKSUM = 5
    CHAIN = 6
    UNLOCK = 7
    LINKED = 8


ChainStep: TypeAlias = tuple[Any, ...]
"""A step of a chain: ``(Kind.WRITE, fd, offset, data)``; ``(Kind.FLUSH, fd)``; ``(Kind.UNLOCK, fd)``, which releases
the lock (``flock``) of an open file; ``(Kind.LINKED, fd)``, which fails with ENOENT if the open file has no name any
more. Plain tuples, as the extension takes them: making other objects would delay a small checkpoint."""
Step: TypeAlias = tuple[int, float]
"""The end of a step of a chain: its result, negative (-errno) if it failed, which ended the chain; and the time, as
``time.perf_counter()``. A plain pair, as the extension returns it."""


class _Completion(asyncio.Future[Any]):
    """The future of an operation. ``cancel()`` only requests a stop; the awaiter resumes once the operation has ended.

    ``operation`` is the kind and the arguments, added to the batch of this loop iteration; if empty, the caller starts
    the operation. Raises OSError if the backend is closed.
    """

    def __init__(self, operations: Operations, *operation: Any, may_stop: bool = True) -> None:
        if operations._closed:
            raise OSError(errno.EBADF, "the I/O backend is closed")
        super().__init__(loop=operations._loop)
        self.token = next(operations._tokens)
        self._ask_to_stop = operations._ask_to_stop if may_stop else None
        operations._waiting[self.token] = self
        if operation:
            if not operations._batch:
                operations._loop.call_soon(operations._submit_batch)
            operations._batch.append((self.token, *operation))

    def cancel(self, msg: Any = None) -> bool:
        """Request a stop; return False, so that asyncio raises CancelledError in the awaiting task after completion."""
        if self._ask_to_stop is not None and not self.done():
            self._ask_to_stop(self.token)
        return False


class Operations(abc.ABC):
    """Base of the backends: batches submissions, matches completions to awaiters. Belongs to one event loop.

    A backend defines the members declared here without a body, and completes operations on the loop's thread. It
    receives an operation as the tuple (token, kind, arguments...) that ``_ext.pyi`` describes.
    """

    name: str
    gather_at_once: Callable[[bytes, memoryview], bytes]
    """Perform :meth:`gather` on the calling thread, for copies that take less time than waking up a thread."""
    _submit: Callable[[list[tuple[Any, ...]]], object]
    """Start the operations of a batch: all of them, or none and raise an error."""
    _cancel: Callable[[int], object]
    """Request a stop: an operation that has not started is completed with ECANCELED; any other one runs to its end."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tokens = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._batch: list[tuple[Any, ...]] = []
        self._closed = False
        self._stopped = False
        self._helpers = WorkerThreads(self._loop, self._complete, count=2, name="pccheck-call")

    def write(self, fd: int, offset: int, data: memoryview) -> Awaitable[object]:
        """Write all of ``data`` at ``offset``. Raises OSError."""
        return _Completion(self, Kind.WRITE, fd, offset, data)

    def read(self, fd: int, offset: int, into: memoryview) -> Awaitable[int]:
        """Fill ``into`` from ``offset``; return the bytes read, short only at the end of the file. Raises OSError."""
        return _Completion(self, Kind.READ, fd, offset, into)

    def flush(self, fd: int) -> Awaitable[object]:
        """Make all writes through ``fd`` durable (``fdatasync``). Raises OSError."""
        return _Completion(self, Kind.FLUSH, fd)

    def gather(self, segments: bytes, into: memoryview, keepalive: Any = None) -> Awaitable[bytes]:
        """Copy segments of memory into a buffer, zero the gaps, and return the CRC-32 of each MiB of the buffer.

        The result is a table as of :func:`pccheck_async.format.piece_sums`; it combines to the buffer's checksum.

        ``segments`` is a packed table of native-endian unsigned 64-bit triples (address, offset in ``into``, length),
        in ascending order of offset, not overlapping; ``keepalive`` is kept alive meanwhile, and owns the memory.
        """
        return _Completion(self, Kind.GATHER, segments, into, keepalive)

    def scatter(self, source: memoryview, checksum: int, segments: bytes, keepalive: Any = None) -> Awaitable[object]:
        """Verify ``checksum`` over all of ``source``, and only then copy pieces of it to memory.

        ``segments`` is as for :meth:`gather`, except that segments may overlap and come in any order. Raises OSError
        (EBADMSG) if the checksum differs; then nothing was copied.
        """
        return _Completion(self, Kind.SCATTER, source, checksum, segments, keepalive)

    def checksums(self, data: memoryview) -> Awaitable[bytes]:
        """Return the CRC-32 of each MiB of ``data``."""
        return _Completion(self, Kind.CHECKSUM, data)

    async def chain(self, steps: Sequence[ChainStep], ended: list[Step]) -> None:
        """Perform ``steps`` on one thread, in order, until one fails; append how each one ended to ``ended``.

        Used for small writes that a caller waits for: as separate operations, each step would wake up a thread and
        then the loop, which takes longer than a small write.

        A failed step raises no error; it is the last one in ``ended``.

        Cancellation: stops nothing, and is raised once the chain has ended and ``ended`` is filled.

        Raises:
            OSError: The backend is closed; nothing was performed.
            ValueError: A step is impossible; nothing was performed.
        """
        completion = _Completion(self, may_stop=False)
        self._batch.insert(0, (completion.token, Kind.CHAIN, tuple(steps)))
        self._submit_batch()  # now: somebody waits
        try:
            ended += await completion
        except asyncio.CancelledError:
            ended += completion.result()
            raise

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a blocking ``function`` on a helper thread and return its result, or raise its error."""
        return await self.obtain(lambda _: None, function, *arguments)

    async def obtain(self, undo: Callable[[T], object], function: Callable[..., T], *arguments: Any) -> T:
        """Call a blocking ``function`` on a helper thread and return its result, a resource that has to be released.

        Cancellation: raised once the call has ended; if it returned a result, ``undo`` is called with it first.
        """
        completion = _Completion(self)
        try:
            self._helpers.submit([(completion.token, function, arguments)])
        except BaseException:
            del self._waiting[completion.token]
            raise
        try:
            result: T = await completion
        except asyncio.CancelledError:
            if completion.exception() is None:
                undo(completion.result())
            raise
        return result

    async def close(self) -> None:
        """Wait until every submitted operation ended, then stop the threads. Idempotent.

        Cancellation: stops the waiting; no more operations are accepted, and another call has to end the threads.
        """
        self._closed = True
        while self._waiting:
            await asyncio.wait(list(self._waiting.values()))
        if not self._stopped:
            self._stopped = True
            self._helpers.close()
            self._shutdown()

    @property
    def running(self) -> int:
        """Number of operations submitted and not completed."""
        return len(self._waiting)

    def _ask_to_stop(self, token: int) -> None:
        for index, operation in enumerate(self._batch):
            if operation[0] == token:
                del self._batch[index]
                self._complete(token, None, OSError(errno.ECANCELED, "cancelled"))
                return
        if not self._helpers.cancel(token):
            self._cancel(token)

    def _submit_batch(self) -> None:
        batch, self._batch = self._batch, []
        try:
            if batch:
                self._submit(batch)
        except Exception as error:  # noqa: BLE001 - it is raised in the awaiter
            if len(batch) == 1:
                self._complete(batch[0][0], None, error)
                return
            # Nothing of a refused batch has started: one by one, the refusal reaches only the operation that caused it.
            for operation in batch:
                self._batch = [operation]
                self._submit_batch()

    def _complete(self, token: int, result: Any, error: BaseException | None) -> None:
        future = self._waiting.pop(token)
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    @abc.abstractmethod
    def _shutdown(self) -> None:
        """Stop the backend's threads, on which no operation is running."""


class NativeOperations(Operations):
    """Operations on threads of the extension, which never wait for the GIL.

    ``io_threads`` write, read, flush and perform chains; ``copy_threads`` gather, scatter and compute checksums.
    Completions reach the loop through one eventfd.

    Raises RuntimeError if the extension was not built, or the system cannot start so many threads.
    """

    name = "threads"

    @staticmethod
    def available() -> bool:
        """Return whether the extension was built for this interpreter."""
        return _why_not is None

    def __init__(self, *, io_threads: int, copy_threads: int) -> None:
        if _why_not is not None:
            raise RuntimeError(
                'the extension pccheck_async._ext was not built; install a C compiler and reinstall, or use io="python"'
            ) from _why_not
        super().__init__()
        try:
            self._queue = _ext.Queue(io_threads, copy_threads)
        except BaseException as error:
            self._helpers.close()
            if isinstance(error, BlockingIOError):  # Python's error for its own threads
                raise RuntimeError("can't start new threads: see ulimit -u and the cgroup's pids.max") from error
            raise
        self._submit, self._cancel, self.gather_at_once = self._queue.submit, self._queue.cancel, _ext.gather
        self._fd: int = self._queue.fileno()
        self._loop.add_reader(self._fd, self._reap)

    def _shutdown(self) -> None:
        self._loop.remove_reader(self._fd)
        self._queue.close()

    def _reap(self) -> None:
        for token, result, found in self._queue.reap():
            completion = self._waiting.pop(token)
            if result < 0 and found is None:
                text = "checksum mismatch" if result == -errno.EBADMSG else os.strerror(-result)
                completion.set_exception(OSError(-result, text))
            else:
                completion.set_result(result if found is None else found)
