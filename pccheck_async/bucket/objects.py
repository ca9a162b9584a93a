# SPDX-License-Identifier: Apache-2.0
"""The interface to an object store: six requests, with all their deadlines and retries.

:class:`Objects` is the interface. :class:`.obstore_objects.ObstoreObjects` sends one request for each call;
:class:`Patient`, which wraps it, repeats failed requests that may succeed, and ends each call within its deadline.
"""

from __future__ import annotations

import asyncio
import errno
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final, TypeAlias, TypeVar

from pccheck_async.errors import ReadError, StoreError, WriteError

__all__ = ["INSTALL", "Data", "MissingObjectError", "Objects", "Patient", "RefusedError"]

T = TypeVar("T")
Data: TypeAlias = bytes | memoryview


INSTALL = 'pip install "pccheck-async[bucket]"'


class RefusedError(StoreError):
    """The object store refuses a request, and would again: no bucket, no permission, a wrong option; with a remedy."""


class MissingObjectError(Exception):
    """There is no object of this name, it is shorter than the range to be read, or longer than is allowed."""


class Objects(ABC):
    """The objects under one prefix. Names are relative to it.

    Every method may raise RefusedError, and ReadError (methods that change something: WriteError) if the request failed
    or was not answered. A request that was not answered may still be applied, at any later time.

    Attributes:
        url: The location for messages, without credentials.
    """

    url: str

    @abstractmethod
    async def put(self, key: str, data: Data) -> None:
        """Write an object in one request, over any of this name. ``data`` must not change while it is referred to."""

    @abstractmethod
    async def create(self, key: str, data: bytes) -> bool:
        """Write an object unless there is one of this name; return whether it was written now."""

    @abstractmethod
    async def get(self, key: str, most: int) -> bytes | None:
        """Return a whole object, None if there is none. Raises MissingObjectError: it has more than ``most`` bytes."""

    @abstractmethod
    async def read(self, key: str, start: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` of an object from ``start`` on. Raises MissingObjectError."""

    @abstractmethod
    async def list(self, prefix: str, after: str = "") -> Sequence[tuple[str, int]]:
        """Return the names that begin with ``prefix`` and sort after ``after``, each with the size in bytes."""

    @abstractmethod
    async def delete(self, keys: Collection[str]) -> None:
        """Delete objects; names without an object are ignored."""

    @abstractmethod
    async def pause(self, attempt: int) -> None:
        """Wait before a request is sent again, longer for each ``attempt``."""


_ANSWER_SECONDS: Final = 10.0
"""Seconds that a small request may go unanswered before it is sent again."""
_LITTLE: Final = 1 << 20
"""Most bytes that a small request carries; a larger one, over a slow network, has all the time until the deadline."""


class Patient(Objects):
    """Repeats requests that failed, after a growing and random pause, until their deadline.

    :meth:`create` sends one request only: the caller must find out whether an unanswered one was applied
    (:meth:`.owner.Owner.settle`).

    Args:
        objects: Sends the requests.
        deadline: Seconds for a whole call, its repetitions included.
        pause: Half of the longest first pause in seconds; each further pause is twice as long, up to 5 s.
    """

    def __init__(self, objects: Objects, deadline: float = 60.0, pause: float = 0.2) -> None:
        self.url = objects.url
        self.deadline = deadline
        self._objects, self._pause = objects, pause

    async def put(self, key: str, data: Data) -> None:
        await self._repeated(f"writing {key}", WriteError, lambda: self._objects.put(key, data), len(data))

    async def create(self, key: str, data: bytes) -> bool:
        return await self._repeated(
            f"writing {key}", WriteError, lambda: self._objects.create(key, data), len(data), most=1
        )

    async def get(self, key: str, most: int) -> bytes | None:
        # How long it is, is not known before: the deadline alone bounds it.
        return await self._repeated(f"reading {key}", ReadError, lambda: self._objects.get(key, most), None)

    async def read(self, key: str, start: int, nbytes: int) -> memoryview:
        return await self._repeated(f"reading {key}", ReadError, lambda: self._objects.read(key, start, nbytes), nbytes)

    async def list(self, prefix: str, after: str = "") -> Sequence[tuple[str, int]]:
        return await self._repeated(f"listing {prefix}", ReadError, lambda: self._objects.list(prefix, after), None)

    async def delete(self, keys: Collection[str]) -> None:
        if keys:
            text = f"deleting {len(keys)} objects" if len(keys) > 1 else f"deleting {next(iter(keys))}"
            await self._repeated(text, WriteError, lambda: self._objects.delete(keys), None)

    async def pause(self, attempt: int) -> None:
        await asyncio.sleep(random.uniform(0.5, 1.0) * min(5.0, self._pause * 2.0 ** min(attempt, 10)))

    async def _repeated(
        self,
        what: str,
        kind: type[ReadError | WriteError],
        send: Callable[[], Awaitable[T]],
        nbytes: int | None,
        most: int = 1000,
    ) -> T:
        """Send a request until it succeeds, at most ``most`` times and until the deadline; return the result.

        ``nbytes`` is the number of bytes that it carries, None if unknown. Raises ``kind`` if no request succeeded.
        """
        clock = asyncio.get_running_loop().time
        end = clock() + self.deadline
        attempt = 0
        while True:
            attempt += 1
            left = end - clock()
            seconds = left if nbytes is None or nbytes > _LITTLE else min(left, _ANSWER_SECONDS)
            try:
                async with asyncio.timeout(max(0.0, seconds)):
                    return await send()
            except TimeoutError:
                number, why = errno.ETIMEDOUT, f"no answer in {seconds:.0f} s"
            except (ReadError, WriteError) as error:
                number, why = error.errno or errno.EIO, error.strerror or str(error)
            if attempt < most and clock() < end:
                await self.pause(attempt)
            if attempt >= most or clock() >= end:
                times = f", {attempt} requests" if attempt > 1 else ""
                raise kind(number, f"{what} in {self.url}: {why}{times}; what is there stays as it is") from None
