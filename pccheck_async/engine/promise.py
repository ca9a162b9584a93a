"""Something that happens once, and what came of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from operator import attrgetter
from typing import Any, Generic, TypeVar

__all__ = ["Moment", "wait_for_any"]

T = TypeVar("T")
_is_over = attrgetter("over")


class Moment(Generic[T]):
    """It has a result or an error, for any thread to note and any thread to ask for.

    Most moments are over when somebody asks, or nobody ever does. So a future, which takes longer to make than all else
    here, is made only for coroutines that have to wait; a thread waits at a lock of its own. There is none that a
    signal handler could find taken: whoever is first in a dict decides.
    """

    __slots__ = ("_facts",)

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}  # "outcome": result and error; "future", "threads": of those who wait

    @property
    def over(self) -> bool:
        """Whether it has happened."""
        return "outcome" in self._facts

    @property
    def outcome(self) -> tuple[T, BaseException | None] | None:
        """Its result, and what went wrong if something did; None where it has not happened yet."""
        return self._facts.get("outcome")

    @property
    def error(self) -> BaseException | None:
        """What went wrong; None where nothing did, or it has not happened yet."""
        outcome = self.outcome
        return None if outcome is None else outcome[1]

    def set_result(self, result: T) -> None:
        """Note that it happened; whoever was first decided."""
        self._decide((result, None))

    def set_error(self, error: BaseException) -> None:
        """Note that it will not happen; whoever was first decided."""
        self._decide((None, error))

    def result(self, timeout: float | None = None) -> T:
        """Block until it has happened. Raises its error, or TimeoutError."""
        if "outcome" not in self._facts and not wait_for_any((self,), timeout):
            raise TimeoutError
        outcome: tuple[T, BaseException | None] = self._facts["outcome"]
        result, error = outcome
        if error is not None:
            raise error
        return result

    def future(self) -> Future[T]:
        """Return a future of it; nobody can cancel that."""
        if not self.over:
            future: Future[T] = self._facts.setdefault("future", _running())
            if not self.over:
                return future  # whoever decides will find it
        over: Future[T] = _running()
        _tell(over, self._facts["outcome"])
        return over

    def _threads(self) -> list[threading.Lock]:
        threads: list[threading.Lock] = self._facts.setdefault("threads", [])
        return threads

    def _decide(self, outcome: tuple[Any, BaseException | None]) -> None:
        if self._facts.setdefault("outcome", outcome) is not outcome:
            return
        for thread in [*self._facts.get("threads", ())]:
            with suppress(RuntimeError):  # another moment that it waits for was first
                thread.release()
        future = self._facts.get("future")
        if future is not None:
            _tell(future, outcome)


def wait_for_any(moments: Sequence[Moment[Any]], timeout: float | None = None) -> bool:
    """Block until one of them has happened; False where that takes longer than ``timeout`` seconds.

    Interrupted, it leaves no lock behind that whoever decides would wait for, as futures do.
    """
    mine = threading.Lock()
    mine.acquire()
    try:
        for moment in moments:
            moment._threads().append(mine)
        if not any(map(_is_over, moments)):  # else whoever decided may not have found it
            mine.acquire(timeout=-1 if timeout is None else min(max(timeout, 0), threading.TIMEOUT_MAX))
    finally:
        for moment in moments:
            if not moment.over and mine in (threads := moment._threads()):  # not where it was interrupted before
                threads.remove(mine)
    return any(map(_is_over, moments))


def _running() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _tell(future: Future[Any], outcome: tuple[Any, BaseException | None]) -> None:
    result, error = outcome
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
