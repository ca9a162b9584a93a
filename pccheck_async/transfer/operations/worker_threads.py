# SPDX-License-Identifier: Apache-2.0
"""Daemon worker threads that report to an event loop in batches."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from pccheck_async.state.tensor_access import exempt_this_thread

__all__ = ["Job", "WorkerThreads"]

Job: TypeAlias = tuple[Any, Callable[..., Any], tuple[Any, ...]]
"""A call: its token, the function, the arguments."""


class WorkerThreads:
    """Calls functions on a few daemon threads; one wake-up of the loop reports all completions that are ready.

    Unlike :mod:`concurrent.futures` these threads still work in ``atexit`` handlers, where an unclosed engine drains.

    All threads are started by the constructor, since none can be started while the interpreter exits; it raises
    RuntimeError if the system cannot start so many. ``complete(token, result, error)`` is called on the loop for every
    job.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        complete: Callable[[Any, Any, BaseException | None], object],
        *,
        count: int,
        name: str,
    ) -> None:
        self._loop = loop
        self._complete = complete
        self._jobs: deque[Job] = deque()
        self._ended: deque[tuple[Any, Any, BaseException | None]] = deque()
        self._ready = threading.Condition()
        self._closed = False
        self._signalled = False
        self._pid = os.getpid()
        self._threads: list[threading.Thread] = []
        try:
            for n in range(count):
                thread = threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def submit(self, jobs: Iterable[Job]) -> None:
        """Queue jobs, first in first out. Raises RuntimeError in a forked child, where the threads do not exist."""
        if os.getpid() != self._pid:
            raise RuntimeError(f"these threads belong to process {self._pid} and do not exist in its forked children")
        with self._ready:
            self._jobs.extend(jobs)
            self._ready.notify(len(self._jobs))

    def cancel(self, token: Any) -> bool:
        """Drop a job that has not started, and report it as completed with ECANCELED; return whether it was found."""
        with self._ready:
            job = next((job for job in self._jobs if job[0] == token), None)
            if job is None:
                return False
            self._jobs.remove(job)
        self._report(token, None, OSError(errno.ECANCELED, "cancelled"))
        return True

    def close(self) -> None:
        """End the threads once the queue is empty; block until they have ended. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return  # a thread may have held the lock at the fork, and does not exist here to release it
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        error: BaseException | None
        exempt_this_thread()
        while True:
            with self._ready:
                while not self._jobs:
                    if self._closed:
                        return
                    self._ready.wait()
                token, function, arguments = self._jobs.popleft()
            try:
                result, error = function(*arguments), None
            except StopIteration as raised:  # which no future takes; coroutines turn it into the same
                result, error = None, RuntimeError(f"the call raised {raised!r}")
            except BaseException as raised:  # noqa: BLE001 - carried to the awaiter
                result, error = None, raised
            # The job's buffers must be free when its awaiter resumes, so that one can be resized or released.
            del function, arguments
            self._report(token, result, error)
            del token, result, error

    def _report(self, token: Any, result: Any, error: BaseException | None) -> None:
        with self._ready:
            self._ended.append((token, result, error))
            if self._signalled:
                return
            self._signalled = True
        self._loop.call_soon_threadsafe(self._reap)

    def _reap(self) -> None:
        with self._ready:
            self._signalled = False
            ended, self._ended = self._ended, deque()
        for token, result, error in ended:
            self._complete(token, result, error)
