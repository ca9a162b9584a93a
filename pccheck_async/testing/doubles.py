# SPDX-License-Identifier: Apache-2.0
"""Test doubles that wrap another medium, and let operations fail, hang until they are released, or be slow."""

from __future__ import annotations

import asyncio
import errno
import heapq
import os
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from pccheck_async.errors import StoreFullError, read_error, write_error
from pccheck_async.medium import File, Medium, MediumStatistics, StepwiseMedium
from pccheck_async.transfer import uninterrupted

__all__ = ["CHANGES", "Access", "FailingWriter", "StuckWriter", "ThrottledWriter", "WrappingWriter"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

CHANGES = frozenset(("flush", "remove", "replace", "reserve", "sync_names", "write"))
"""Names of the methods that change storage, or make changes durable."""


@dataclass(frozen=True, slots=True)
class Access:
    """One call of a medium's method."""

    kind: str
    """Name of the method."""
    name: str = ""
    """Name of the file; empty for the folder."""
    nbytes: int = 0
    """Number of bytes to transfer."""


def _passed(method: F) -> F:
    """Return a method that calls the method of the same name of ``inner``, through ``perform``."""
    kind = method.__name__

    async def call(self: WrappingWriter, *arguments: Any, **options: Any) -> Any:
        about, last = (arguments[0], arguments[-1]) if arguments else ("", None)
        name = about.name if isinstance(about, File) else about
        access = Access(kind, name, len(last) if isinstance(last, bytes | memoryview) else 0)
        return await self.perform(access, partial(getattr(self.inner, kind), *arguments, **options))

    return cast(F, call)


class WrappingWriter(StepwiseMedium):
    """A medium that passes every call to ``inner``; :meth:`make_durable` is passed in single steps.

    Override :meth:`perform` to change all calls, or a method to change that one.

    ::

        class SlowFlush(WrappingWriter):
            async def flush(self, file: File) -> None:
                await asyncio.sleep(0.1)
                await super().flush(file)

        CheckpointEngine(path, storage=StorageOptions(io=SlowFlush(CrashWriter(CrashDisk()))))
    """

    def __init__(self, inner: Medium) -> None:
        self.inner = inner

    async def perform(self, access: Access, call: Callable[[], Awaitable[T]]) -> T:
        """Perform ``call``; used by every method but ``close``, ``abandon`` and ``statistics``."""
        return await call()

    prepare = _passed(Medium.prepare)
    names = _passed(Medium.names)
    read_small = _passed(Medium.read_small)
    replace = _passed(Medium.replace)
    remove = _passed(Medium.remove)
    sync_names = _passed(Medium.sync_names)
    reserve = _passed(Medium.reserve)
    open = _passed(Medium.open)
    lock = _passed(Medium.lock)
    unlock = _passed(Medium.unlock)
    write = _passed(Medium.write)
    read = _passed(Medium.read)

    def stamp(self, file: File) -> object:
        return self.inner.stamp(file)

    async def flush(self, file: File) -> None:
        await self.perform(Access("flush", file.name), lambda: self.inner.make_durable([(file, ())]))

    async def close(self, file: File | None = None) -> None:
        await self.inner.close(file)

    def abandon(self) -> None:
        self.inner.abandon()

    def statistics(self) -> MediumStatistics:
        return self.inner.statistics()


class FailingWriter(WrappingWriter):
    """A medium whose operation number ``fail_at`` fails; no part of that operation is performed.

    Run once with ``fail_at=None`` to count the operations, then once for each::

        counting = FailingWriter(CrashWriter(CrashDisk()), fail_at=None)
        ...
        for k in range(1, counting.operations + 1):
            writer = FailingWriter(CrashWriter(CrashDisk()), fail_at=k, error=errno.ENOSPC)
            ...

    Args:
        inner: The writer that performs the other operations.
        fail_at: Number of the operation that fails, counted from 1; None for none. May be changed later.
        error: ``errno`` of the failure, mapped to the exception that the real writer raises.
        kinds: Names of the methods that are counted (default: all that change storage or make it durable).
        stays: Whether all later operations of these kinds fail, too, as on a device that is gone.

    Attributes:
        operations: Number of operations of ``kinds`` so far, failed ones included.
        failed: The operations that failed, in order.
    """

    def __init__(
        self,
        inner: Medium,
        *,
        fail_at: int | None,
        error: int = errno.EIO,
        kinds: Collection[str] = CHANGES,
        stays: bool = False,
    ) -> None:
        super().__init__(inner)
        self.fail_at = fail_at
        self._error = error
        self._kinds = frozenset(kinds)
        self._stays = stays
        self._guard = threading.Lock()
        self.operations = 0
        self.failed: list[Access] = []

    def fail_next(self, after: int = 0) -> None:
        """Make the next operation fail, or the one after ``after`` further operations."""
        with self._guard:
            self.fail_at = self.operations + 1 + after

    async def perform(self, access: Access, call: Callable[[], Awaitable[T]]) -> T:
        if access.kind in self._kinds:
            with self._guard:
                self.operations += 1
                past = -1 if self.fail_at is None else self.operations - self.fail_at
            if past == 0 or (self._stays and past > 0):
                self.failed.append(access)
                raise self._failure(access)
        return await call()

    def _failure(self, access: Access) -> OSError:
        error = OSError(self._error, os.strerror(self._error))
        if access.kind not in CHANGES:
            return read_error(error, access.name)
        if self._error in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return StoreFullError(error.errno, error.strerror, access.name)
        return write_error(error, access.name)


class StuckWriter(WrappingWriter):
    """A medium that holds operations back until :meth:`release`, then performs them, cancelled or not.

    The engine runs on a thread of its own, so all methods may be called from any thread::

        writer = StuckWriter(Files(...), kinds=("flush",))
        pending = await engine.checkpoint(state, step=1)
        await asyncio.to_thread(writer.wait_stuck)   # the flush hangs in the "device"
        ...
        writer.release()

    Args:
        inner: The writer that performs the released operations.
        kinds: Names of the methods that hang (default: all that change storage or make it durable).
        after: Operations of these kinds that pass before the first one hangs.
    """

    def __init__(self, inner: Medium, *, kinds: Collection[str] = CHANGES, after: int = 0) -> None:
        super().__init__(inner)
        self._changed = threading.Condition()
        self._kinds = frozenset(kinds)
        self._passing = after
        self._waiting: dict[Callable[[], object], Access] = {}  # by the functions that resume them

    @property
    def stuck(self) -> list[Access]:
        """Return the operations that hang now, oldest first."""
        with self._changed:
            return list(self._waiting.values())

    def hold(self, *kinds: str, after: int = 0) -> None:
        """Hold back operations of these kinds from now on, after ``after`` of them; others are no longer held back."""
        with self._changed:
            self._kinds = frozenset(kinds)
            self._passing = after

    def release(self, *, hold_on: bool = False) -> None:
        """Release the operations that hang; unless ``hold_on``, hold back no later ones."""
        with self._changed:
            if not hold_on:
                self._kinds = frozenset()
            waiting, self._waiting = self._waiting, {}
        for go_on in waiting:
            go_on()

    def wait_stuck(self, count: int = 1, timeout: float | None = 30.0) -> None:
        """Block until ``count`` operations hang. Raises TimeoutError after ``timeout`` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._waiting) >= count, timeout):
                raise TimeoutError(f"{len(self._waiting)} operations hang after {timeout} s, expected {count}")

    async def perform(self, access: Access, call: Callable[[], Awaitable[T]]) -> T:
        with self._changed:
            chosen = access.kind in self._kinds
            stuck = chosen and self._passing <= 0
            if chosen:
                self._passing -= 1
            if stuck:
                gate = asyncio.Event()
                self._waiting[partial(asyncio.get_running_loop().call_soon_threadsafe, gate.set)] = access
                self._changed.notify_all()
        if not stuck:
            return await call()

        async def hang() -> T:
            await gate.wait()
            return await call()

        return await uninterrupted(hang())


class ThrottledWriter(WrappingWriter):
    """A medium with limited bandwidth per file and in all, like cloud disks: several streams are faster than one.

    Transfers queue in the order in which they are submitted, and end no earlier than on a device of that bandwidth. All
    calls must be on one event loop.

    Args:
        inner: The writer that performs the transfers.
        per_stream: Most bytes per second of each file; None for no limit.
        total: Most bytes per second of all files together; None for no limit.
        per_request: Most bytes per second of each transfer; None for no limit.
        requests: Number of transfers that proceed at a time under the limit ``per_request``.
    """

    def __init__(
        self,
        inner: Medium,
        *,
        per_stream: float | None = None,
        total: float | None = None,
        per_request: float | None = None,
        requests: int = 1,
    ) -> None:
        super().__init__(inner)
        self._per_stream = per_stream
        self._total = total
        self._per_request = per_request
        # The ends of submitted transfers, in seconds of the loop's clock: of each transfer worked on at a time (a
        # heap), of the device, and of each file.
        self._requests = [0.0] * requests
        self._device = [0.0]
        self._files: defaultdict[str, list[float]] = defaultdict(lambda: [0.0])

    async def perform(self, access: Access, call: Callable[[], Awaitable[T]]) -> T:
        if access.kind not in ("read", "write"):
            return await call()
        end = max(
            _queue(self._files[access.name], access.nbytes, self._per_stream),
            _queue(self._device, access.nbytes, self._total),
            _queue(self._requests, access.nbytes, self._per_request),
        )

        async def transfer() -> T:
            result = await call()
            await asyncio.sleep(end - asyncio.get_running_loop().time())
            return result

        return await uninterrupted(transfer())


def _queue(ends: list[float], nbytes: int, bandwidth: float | None) -> float:
    """Queue a transfer after the earliest of ``ends``, a heap, in which its end replaces that; return its end."""
    end = max(asyncio.get_running_loop().time(), ends[0]) + (nbytes / bandwidth if bandwidth else 0.0)
    heapq.heapreplace(ends, end)
    return end
