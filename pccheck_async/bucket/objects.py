# SPDX-License-Identifier: Apache-2.0
"""The interface to an object store: seven requests, whose deadlines and retries are here and nowhere else.

:class:`Objects` is the interface. :class:`.obstore_objects.ObstoreObjects` sends one request for each call;
:class:`Patient`, around it, repeats those that failed and may succeed, and ends each within its deadline.
"""

from __future__ import annotations

import asyncio
import errno
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final, TypeAlias, TypeVar

from pccheck_async.errors import ReadError, StoreError, WriteError

__all__ = ["Data", "MissingObjectError", "Objects", "Patient", "RefusedError"]

T = TypeVar("T")
Data: TypeAlias = bytes | memoryview


class RefusedError(StoreError):
    """A request that will be refused again: no bucket, no permission, a wrong option. The text says what to do."""


class MissingObjectError(Exception):
    """There is no object of this name, or it is shorter than what is read of it."""


class Objects(ABC):
    """The objects under one prefix. Names are relative to it.

    Every method may raise RefusedError; ReadError, or WriteError of those that change something: the request failed, or
    was not answered. Then it may still be applied, at any later time.

    Attributes:
        url: For messages; without credentials.
    """

    url: str

    @abstractmethod
    async def put(self, key: str, data: Data) -> None:
        """Write an object, over one of this name, in one request. ``data`` stays as it is until nobody refers to it."""

    @abstractmethod
    async def create(self, key: str, data: bytes) -> bool:
        """Write an object unless there is one of this name; return whether it was written now."""

    @abstractmethod
    async def get(self, key: str, most: int) -> bytes | None:
        """Return a whole object, None if there is none. Raises MissingObjectError: it has more than ``most`` bytes."""

    @abstractmethod
    async def read(self, key: str, start: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of an object from ``start`` on. Raises MissingObjectError."""

    @abstractmethod
    async def list(self, prefix: str, after: str = "") -> Sequence[tuple[str, int]]:
        """Return the names that begin so and sort behind ``after``, with the bytes of each object."""

    @abstractmethod
    async def delete(self, keys: Collection[str]) -> None:
        """Delete objects; those that are not there count as deleted."""

    @abstractmethod
    async def pause(self, attempt: int) -> None:
        """Wait before a request is sent again, longer for each ``attempt``."""


_ANSWER_SECONDS: Final = 10.0
"""For which a request that carries little may go unanswered until it is sent again."""
_LITTLE: Final = 1 << 20
"""Bytes. One that carries more, over a slow network, has all the time until the deadline."""


class Patient(Objects):
    """Repeats requests that failed, after a growing and random pause, until their deadline.

    Creating is not repeated here: whether an unanswered one was applied decides what to do
    (:meth:`.owner.Owner.settle`).

    Args:
        objects: Sends them.
        deadline: Seconds for a whole call, its repetitions included.
        pause: Seconds of the first pause at the most; each further one is twice as long, up to 5 s.
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

    async def read(self, key: str, start: int, into: memoryview) -> None:
        await self._repeated(f"reading {key}", ReadError, lambda: self._objects.read(key, start, into), len(into))

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
        """Send a request until it is answered; ``nbytes``: that it carries, None: not known."""
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
