"""Operations on bytes, submitted in batches: what both backends share, and what each has to implement.

Awaiting an operation puts it into the batch of the current loop iteration, which is submitted in one call. A cancelled
operation is asked to stop and then *waited for*: when the await ends, cancelled or not, nothing of the operation runs
any more, so its buffer may be reused (invariant I9).
"""

from __future__ import annotations

import abc
import asyncio
import errno
import itertools
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, TypeAlias, TypeVar

from pccheck_async.transfer.operations.worker_threads import WorkerThreads

__all__ = ["ChainStep", "Kind", "Operations", "Step"]

T = TypeVar("T")


class Kind(IntEnum):
    """Kinds of operations, numbered as in the extension."""

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
more. Plain tuples, as the extension takes them: a small checkpoint waits for every object made here."""
Step: TypeAlias = tuple[int, float]
"""How a step of a chain ended: its result, negative (-errno) if it failed and so ended the chain; and when, as
``time.perf_counter()``. A plain pair, as the extension returns it."""


class _Completion(asyncio.Future[Any]):
    """The end of an operation. Cancelling it only asks the operation to stop; the awaiter resumes once it has ended."""

    def __init__(self, ask_to_stop: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._ask_to_stop = ask_to_stop

    def cancel(self, msg: Any = None) -> bool:
        """Return False: asyncio then raises CancelledError in the awaiting task when the completion is there."""
        if not self.done():
            self._ask_to_stop()
        return False


class Operations(abc.ABC):
    """Base of the backends: batches submissions, matches completions to awaiters. Belongs to one event loop.

    A backend implements the abstract methods, and calls :meth:`_complete` on the loop's thread. To it an operation is
    the tuple (token, kind, arguments...) that ``_ext.pyi`` describes.
    """

    name: str

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tokens = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._batch: list[tuple[Any, ...]] = []
        self._closed = False
        self._stopped = False
        self._helpers = WorkerThreads(self._loop, self._complete, count=2, name="pccheck-call")

    async def write(self, fd: int, offset: int, data: memoryview) -> None:
        """Write all of ``data`` at ``offset``. Raises OSError."""
        await self._perform(Kind.WRITE, fd, offset, data)

    async def read(self, fd: int, offset: int, into: memoryview) -> int:
        """Fill ``into`` from ``offset``; return the bytes read, short only at the end of the file. Raises OSError."""
        result: int = await self._perform(Kind.READ, fd, offset, into)
        return result

    async def flush(self, fd: int) -> None:
        """Make what was written through ``fd`` durable (``fdatasync``). Raises OSError."""
        await self._perform(Kind.FLUSH, fd)

    async def gather(self, segments: bytes, into: memoryview, keepalive: Any = None) -> int:
        """Copy segments of memory into a buffer, zero the gaps, and return the CRC-32 of all of the buffer.

        ``segments`` is a packed table of native-endian unsigned 64-bit triples (address, offset in ``into``, length),
        in growing order of offset, not overlapping; ``keepalive`` owns the addresses.
        """
        result: int = await self._perform(Kind.GATHER, segments, into, keepalive)
        return result

    async def scatter(self, source: memoryview, checksum: int, segments: bytes, keepalive: Any = None) -> None:
        """Verify ``checksum`` over all of ``source``, and only then copy pieces of it to memory.

        ``segments`` is as for :meth:`gather`, except that segments may overlap and come in any order. Raises OSError
        where the checksum differs (EBADMSG); nothing was copied.
        """
        await self._perform(Kind.SCATTER, source, checksum, segments, keepalive)

    async def checksum(self, data: memoryview) -> int:
        """Return the CRC-32 of ``data``."""
        result: int = await self._perform(Kind.CHECKSUM, data)
        return result

    async def chain(self, steps: Sequence[ChainStep], ended: list[Step]) -> None:
        """Perform ``steps`` on one thread, each after the one before it succeeded.

        For short writes that somebody waits for: as an operation of its own, each step would wake up a thread and then
        the loop, which takes longer than a small write.

        ``ended`` receives how each performed step ended; the last of them failed if not all were performed.

        Cancellation: stops nothing, and is raised once the chain has ended and ``ended`` says how.

        Raises:
            OSError: The backend is closed; nothing was performed.
            ValueError: A step is impossible; nothing was performed.
        """
        token, completion = self._expect(lambda: None)
        self._submit_or_fail([(token, Kind.CHAIN, tuple(steps))])
        try:
            ended += await completion
        except asyncio.CancelledError:
            ended += completion.result()
            raise

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a blocking ``function`` on a helper thread and return (or raise) what it does."""
        return await self.obtain(lambda _: None, function, *arguments)

    async def obtain(self, undo: Callable[[T], object], function: Callable[..., T], *arguments: Any) -> T:
        """Do what :meth:`call` does, for a result that has to be given back.

        Cancellation: raised once the call has ended and ``undo`` was called with what it returned.
        """
        token, completion = self._expect()
        try:
            self._helpers.submit([(token, function, arguments)])
        except BaseException:
            del self._waiting[token]
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

        Cancellation: stops the waiting; no more operations are accepted, and another call finishes the work.
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
        """Operations submitted and not completed."""
        return len(self._waiting)

    async def _perform(self, kind: Kind, *arguments: Any) -> Any:
        token, completion = self._expect()
        if not self._batch:
            self._loop.call_soon(self._flush_batch)
        self._batch.append((token, kind, *arguments))
        try:
            return await completion
        except asyncio.CancelledError:
            completion.exception()  # retrieved: the cancellation is what the awaiter learns
            raise

    def _expect(self, ask_to_stop: Callable[[], None] | None = None) -> tuple[int, _Completion]:
        if self._closed:
            raise OSError(errno.EBADF, "the I/O backend is closed")
        token = next(self._tokens)
        completion = _Completion(ask_to_stop or partial(self._ask_to_stop, token), self._loop)
        self._waiting[token] = completion
        return token, completion

    def _ask_to_stop(self, token: int) -> None:
        for index, operation in enumerate(self._batch):
            if operation[0] == token:
                del self._batch[index]
                self._complete(token, None, OSError(errno.ECANCELED, "cancelled"))
                return
        if not self._helpers.cancel(token):
            self._cancel(token)

    def _flush_batch(self) -> None:
        batch, self._batch = self._batch, []
        if batch:
            self._submit_or_fail(batch)

    def _submit_or_fail(self, batch: list[tuple[Any, ...]]) -> None:
        try:
            self._submit(batch)
        except Exception as error:  # noqa: BLE001 - it is raised in the awaiter
            if len(batch) == 1:
                self._complete(batch[0][0], None, error)
                return
            # Nothing of a refused batch has started: one by one, the refusal reaches only the operation that caused it.
            for operation in batch:
                self._submit_or_fail([operation])

    def _complete(self, token: int, result: Any, error: BaseException | None) -> None:
        future = self._waiting.pop(token)
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    @abc.abstractmethod
    def gather_at_once(self, segments: bytes, into: memoryview) -> int:
        """Do what :meth:`gather` does, now and on this thread: for copies faster than waking up a thread."""

    @abc.abstractmethod
    def _submit(self, batch: list[tuple[Any, ...]]) -> None:
        """Start the operations of a batch; all or none."""

    @abc.abstractmethod
    def _cancel(self, token: int) -> None:
        """Ask the operation to stop: complete it with ECANCELED where it has not started, else let it end."""

    @abc.abstractmethod
    def _shutdown(self) -> None:
        """Stop the backend's threads; nothing is running any more."""
