"""Operations on bytes: write, read, flush, gather, scatter, checksum, and chains of them; submitted in batches.

An :class:`Operations` belongs to one event loop. Awaiting an operation puts it into the batch of the current loop
iteration; the batch is handed to the engine behind it in one call. A cancelled operation is asked to stop and then
*waited for*: when the await ends, cancelled or not, nothing of the operation runs any more, the kernel included, so its
buffer may be reused (invariant I9).
"""

from __future__ import annotations

import abc
import asyncio
import errno
import itertools
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from pccheck_async.transfer.operations.threads import WorkerThreads

__all__ = [
    "Call",
    "Chain",
    "ChainStep",
    "Checksum",
    "Flush",
    "Gather",
    "Kind",
    "Operation",
    "Operations",
    "Read",
    "Scatter",
    "Step",
    "Write",
]

T = TypeVar("T")


class Kind(IntEnum):
    """What the extension calls operations; calls run on helper threads."""

    WRITE = 0
    READ = 1
    FLUSH = 2
    GATHER = 3
    SCATTER = 4
    CHECKSUM = 5
    CHAIN = 6
    UNLOCK = 7
    LINKED = 8


class Write(NamedTuple):
    """Write all of ``data`` at ``offset`` (bytes). Result: None."""

    fd: int
    offset: int
    data: memoryview


class Read(NamedTuple):
    """Fill ``into`` from ``offset`` (bytes). Result: bytes read, short only at the end of the file."""

    fd: int
    offset: int
    into: memoryview


class Flush(NamedTuple):
    """``fdatasync``. Result: None."""

    fd: int


class Gather(NamedTuple):
    """Copy segments of memory into a buffer, zero the gaps, and checksum all of the buffer. Result: its CRC-32.

    ``segments`` is a packed table of native-endian unsigned 64-bit triples (address, offset in the buffer, length), in
    growing order of offset, not overlapping. ``keepalive`` holds whatever owns the addresses until the copy ended.
    """

    segments: bytes
    into: memoryview
    keepalive: Any = None


class Scatter(NamedTuple):
    """Verify ``checksum`` over all of ``source`` and only then copy pieces of it to memory. Result: None.

    ``segments`` is as in :class:`Gather`, except that they may overlap and come in any order. Fails with ``EBADMSG``,
    before anything was copied, where the checksum does not hold.
    """

    source: memoryview
    checksum: int
    segments: bytes
    keepalive: Any = None


class Checksum(NamedTuple):
    """Result: CRC-32 of ``data``."""

    data: memoryview


class Chain(NamedTuple):
    """Perform steps on one thread, each once the one before it succeeded. Result: a :class:`Step` for each performed.

    For what is short and waited for: every operation of its own wakes up a thread and then the loop, which takes longer
    than a small write. Not empty. It goes on until it ended, cancelled or not.
    """

    steps: Sequence[ChainStep]


ChainStep: TypeAlias = tuple[Any, ...]
"""What a chain does: ``(Kind.WRITE, fd, offset, data)``; ``(Kind.FLUSH, fd)``; ``(Kind.UNLOCK, fd)``, which lets go of
the lock (``flock``) that an open file holds; ``(Kind.LINKED, fd)``, which fails with ENOENT where no name leads to an
open file any more. Plain tuples, as the extension takes them: small checkpoints wait for whatever is made here."""
Step: TypeAlias = tuple[int, float]
"""How a step of a chain ended: negative where it failed, the number of the error, and the chain ended; and when, of
``time.perf_counter()``. A plain pair, as the extension returns it."""


class Call(NamedTuple):
    """Call a blocking function (a metadata system call, a copy by torch) on a helper thread. Result: its own."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


Operation = Write | Read | Flush | Gather | Scatter | Checksum | Chain | Call


class _Completion(asyncio.Future[Any]):
    """The end of an operation. To cancel it only asks the operation to stop: the awaiter is told once it has ended."""

    def __init__(self, ask_to_stop: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._ask_to_stop = ask_to_stop

    def cancel(self, msg: Any = None) -> bool:
        """Return False: asyncio then raises CancelledError in the awaiting task when the completion is there."""
        if not self.done():
            self._ask_to_stop()
        return False


class Operations(abc.ABC):
    """Base of the engines: batches submissions, matches completions to awaiters, waits out cancelled ones.

    Engines implement :meth:`_submit` and :meth:`_cancel` and report through :meth:`_complete` on the loop's thread.
    """

    name: str

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tokens = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._batch: list[tuple[int, Operation]] = []
        self._closed = False
        self._stopped = False
        self._helpers = WorkerThreads(self._loop, self._complete, count=2, name="pccheck-call")

    async def write(self, fd: int, offset: int, data: memoryview) -> None:
        """Write all of ``data`` at ``offset``. Raises OSError."""
        await self._perform(Write(fd, offset, data))

    async def read(self, fd: int, offset: int, into: memoryview) -> int:
        """Fill ``into`` from ``offset``; return the bytes read, short only at the end of the file. Raises OSError."""
        result: int = await self._perform(Read(fd, offset, into))
        return result

    async def flush(self, fd: int) -> None:
        """Make what was written through ``fd`` durable (``fdatasync``). Raises OSError."""
        await self._perform(Flush(fd))

    async def gather(self, segments: bytes, into: memoryview, keepalive: Any = None) -> int:
        """Copy ``segments`` into ``into``, zero the gaps, and return the CRC-32 of all of it (see :class:`Gather`)."""
        result: int = await self._perform(Gather(segments, into, keepalive))
        return result

    async def scatter(self, source: memoryview, checksum: int, segments: bytes, keepalive: Any = None) -> None:
        """Verify ``checksum`` over ``source``, then copy ``segments`` out of it. Raises OSError (EBADMSG)."""
        await self._perform(Scatter(source, checksum, segments, keepalive))

    async def checksum(self, data: memoryview) -> int:
        """Return the CRC-32 of ``data``."""
        result: int = await self._perform(Checksum(data))
        return result

    async def chain(self, steps: Sequence[ChainStep], ended: list[Step]) -> None:
        """Perform ``steps``, each once the one before it succeeded (see :class:`Chain`).

        Args:
            steps: What to do.
            ended: Gets how each step ended, up to the one that failed, if one did: nothing after that happened.

        Cancellation: stops nothing, and is raised once the chain has ended and ``ended`` says how.

        Raises:
            OSError: The engine does not take it, and nothing of it happened.
        """
        completion = self._begin(Chain(steps), at_once=True)
        try:
            ended += await completion
        except asyncio.CancelledError:
            ended += completion.result()
            raise

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a blocking ``function`` on a helper thread and return (or raise) what it does."""
        result: T = await self._perform(Call(function, arguments))
        return result

    async def obtain(self, undo: Callable[[T], object], function: Callable[..., T], *arguments: Any) -> T:
        """Do what :meth:`call` does, for what has to be given back.

        Cancellation: raised once the call has ended and ``undo`` was called with what it returned.
        """
        completion = self._begin(Call(function, arguments))
        try:
            result: T = await completion
        except asyncio.CancelledError:
            if completion.exception() is None:
                undo(completion.result())
            raise
        return result

    async def close(self) -> None:
        """Wait until every submitted operation ended, then stop the threads. Idempotent.

        Cancellation: stops the waiting; the engine takes no more operations, and another call finishes the work.
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

    async def _perform(self, operation: Operation) -> Any:
        completion = self._begin(operation)
        try:
            return await completion
        except asyncio.CancelledError:
            completion.exception()  # retrieved: the cancellation is what the awaiter gets to know
            raise

    def _begin(self, operation: Operation, *, at_once: bool = False) -> _Completion:
        if self._closed:
            raise OSError(errno.EBADF, "the operations engine is closed")
        token = next(self._tokens)
        # What is begun at once is not to be stopped either.
        completion = _Completion(_nothing if at_once else partial(self._ask_to_stop, token), self._loop)
        self._waiting[token] = completion
        if at_once:
            self._submit_or_fail([(token, operation)])
            return completion
        if not self._batch:
            self._loop.call_soon(self._flush_batch)
        self._batch.append((token, operation))
        return completion

    def _ask_to_stop(self, token: int) -> None:
        for index, (waiting, _) in enumerate(self._batch):
            if waiting == token:
                del self._batch[index]
                self._complete(token, None, OSError(errno.ECANCELED, "cancelled"))
                return
        if not self._helpers.cancel(token):
            self._cancel(token)

    def _flush_batch(self) -> None:
        batch, self._batch = self._batch, []
        calls = [entry for entry in batch if isinstance(entry[1], Call)]
        if calls:
            self._helpers.submit([(token, op.function, op.arguments) for token, op in calls if isinstance(op, Call)])
        if len(calls) < len(batch):
            self._submit_or_fail([entry for entry in batch if not isinstance(entry[1], Call)])

    def _submit_or_fail(self, batch: list[tuple[int, Operation]]) -> None:
        try:
            self._submit(batch)
        except Exception as error:  # noqa: BLE001 - whatever went wrong belongs to the one who asked for it
            if len(batch) == 1:
                self._complete(batch[0][0], None, error)
                return
            # Nothing of a refused batch has started: one by one, the refusal reaches only the operation that caused it.
            for entry in batch:
                self._submit_or_fail([entry])

    def _complete(self, token: int, result: Any, error: BaseException | None) -> None:
        future = self._waiting.pop(token)
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    @abc.abstractmethod
    def gather_at_once(self, segments: bytes, into: memoryview) -> int:
        """Do what :meth:`gather` does, now and on this thread: for what is copied faster than a thread is woken up."""

    @abc.abstractmethod
    def _submit(self, batch: Sequence[tuple[int, Operation]]) -> None:
        """Start the operations of a batch; all or none."""

    @abc.abstractmethod
    def _cancel(self, token: int) -> None:
        """Ask the operation to stop: complete it with ECANCELED where it has not started, else let it end."""

    @abc.abstractmethod
    def _shutdown(self) -> None:
        """Stop the threads behind the engine; nothing is running any more."""


def _nothing() -> None: ...
